/* Rows of activations as floats and back, at the width of the level that includes this: the functions of cpu.h whose
 * names begin alike, inlined into kernels. Included by other bodies, after lanes_<level>.h. */
#ifndef DI_CPU_ACT_BODY_H
#define DI_CPU_ACT_BODY_H

#include "lanes.h"
#include "tensor/format_inline.h"
#include "vec.h"

DI_INLINE void row_from_bf16(const uint16_t *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = di_bf16_to_f32(x[i]);
}

DI_INLINE void row_to_bf16(const float *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = di_f32_to_bf16(x[i]);
}

/* 32 codes times one scale. */
DI_INLINE void row_e4m3_32(const uint8_t *codes, uint8_t scale, float *out) {
#if DI_HAS_BYTES
    if (scale != 0) { /* 2^-127 alone would be flushed */
        /* As fp16 a code's exponent and mantissa read as value * 2^-8, the NaN codes as 480. */
        uint16_t half[32];
        for (int i = 0; i < 32; i++)
            half[i] = (uint16_t)((codes[i] & 0x80) << 8 | (codes[i] & 0x7F) << 7);
        di_v s = di_v_splat(di_e8m0_to_f32(scale)), up = di_v_splat(256.0f);
        for (int i = 0; i < 32; i += DI_LANES) {
            di_v v = di_v_load_half(half + i) * up;
            di_vi is_nan = (v == di_v_splat(480.0f)) | (v == di_v_splat(-480.0f));
            v = (di_v)((di_vi)v | (is_nan & 0x7FC00000));
            di_v_store(out + i, v * s);
        }
        return;
    }
#endif
    di_cpu_e4m3_32(codes, scale, out);
}

DI_INLINE void row_load(const di_act *x, int64_t row, int64_t col, int64_t n, float *out) {
    int64_t at = row * x->stride + col;
    if (x->dtype == DI_F32) {
        memcpy(out, (const float *)x->data + at, (size_t)n * sizeof *out);
    } else if (x->dtype == DI_BF16) {
        row_from_bf16((const uint16_t *)x->data + at, n, out);
    } else {
        const uint8_t *codes = (const uint8_t *)x->data + at;
        const uint8_t *scale = x->scale + row * (x->n_cols / 32) + col / 32;
        for (int64_t i = 0; i < n; i += 32)
            row_e4m3_32(codes + i, scale[i / 32], out + i);
    }
}

DI_INLINE void row_store(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v) {
    int64_t at = row * out->stride + col;
    if (out->dtype == DI_F32) {
        memcpy((float *)out->data + at, v, (size_t)n * sizeof *v);
    } else {
        row_to_bf16(v, n, (uint16_t *)out->data + at);
    }
}

/* di_quant_qa_group with vectors: the same operations on bit patterns. */
DI_INLINE uint8_t row_quant_qa_32(const float *x, uint8_t *codes) {
    const di_vi magnitude = (di_vi)di_v_splat(0.0f) + 0x7FFFFFFF;
    di_vi most = (di_vi)di_v_splat(1e-4f);
    for (int i = 0; i < 32; i += DI_LANES) {
        di_vi a = (di_vi)di_v_load(x + i) & magnitude;
        a &= a <= 0x7F800000; /* NaN counts as zero */
        di_vi above = a > most;
        most = (a & above) | (most & ~above);
    }
    float s = di_pow2_ceil(di_f32_from_bits((uint32_t)di_v_largest(most)) / 448.0f);
    const di_v inv = di_v_splat(1.0f / s);
    for (int i = 0; i < 32; i += DI_LANES) {
        di_vi bits = (di_vi)(di_v_load(x + i) * inv), a = bits & magnitude;
        di_vi is_large = a > 0x43E00000, is_nan = a > 0x7F800000;
        di_vi u = (a & ~is_large) | (is_large & 0x43E00000);
        di_vi is_small = u < 0x3C800000;
        di_vi normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120 << 3);
        di_vi small = (di_vi)((di_v)u + di_v_splat(16384.0f)) - 0x46800000;
        di_vi code = (small & is_small) | (normal & ~is_small);
        code = (code & ~is_nan) | (is_nan & 0x7F);
        di_v_store_bytes(codes + i, code | ((bits >> 24) & 0x80));
    }
    return di_e8m0_byte(s);
}

#endif
