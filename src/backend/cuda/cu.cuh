/* What kernels share: number formats, loads and stores of activations, sums in the order of ops.h, exp.
 *
 * The functions repeat those of tensor/ for the device, operation by operation: files of portable kernels are compiled
 * with fused multiply-add off and subnormals flushed, as the CPU's kernels run, so that equal lines give equal bits. */
#ifndef DI_CU_CUH
#define DI_CU_CUH

#include "cuda.h"

enum { DI_WARP = 32 };

/* ---- bits and formats --------------------------------------------------------------------------------------------
 */

__device__ static inline float cu_bf16_to_f32(uint16_t h) {
    return __uint_as_float((uint32_t)h << 16);
}
/* To nearest even; NaN stays NaN (quiet). */
__device__ static inline uint16_t cu_f32_to_bf16(float f) {
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
__device__ static inline float cu_round_bf16(float f) {
    return cu_bf16_to_f32(cu_f32_to_bf16(f));
}
/* 2^(b-127); 255 is NaN, 0 a subnormal. */
__device__ static inline float cu_e8m0_to_f32(uint8_t b) {
    return __uint_as_float(b == 255 ? 0x7FC00000u : b ? (uint32_t)b << 23 : 0x00400000u);
}
/* The same of byte g of a word of four scales, by fewer instructions: 0 is 0, 255 infinity. */
__device__ static inline float cu_scale_at(uint32_t word, int g) {
    return __uint_as_float((g < 3 ? word << (23 - 8 * g) : word >> 1) & 0x7F800000u);
}
/* v times the scale b. 2^-127 is flushed where a kernel reads it, so that it comes in two steps. */
__device__ static inline float cu_scaled(float v, uint8_t b) {
    return b ? v * cu_e8m0_to_f32(b) : v * 0x1p-126f * 0.5f;
}
/* OCP E4M3 "fn": exact in float. */
__device__ static inline float cu_e4m3_to_f32(uint8_t code) {
    uint32_t sign = (uint32_t)(code & 0x80) << 24, m = code & 7u, e = (code >> 3) & 15u;
    if ((code & 0x7F) == 0x7F)
        return __uint_as_float(0x7FC00000u | sign);
    float magnitude = e ? __uint_as_float((e + 120u) << 23 | m << 20) : (float)m * 0x1p-9f;
    return __uint_as_float(__float_as_uint(magnitude) | sign);
}
/* 0 .5 1 1.5 2 3 4 6 and their negatives. */
__device__ static inline float cu_e2m1_to_f32(uint32_t code) {
    uint32_t sign = (code & 8u) << 28, e = (code >> 1) & 3u, m = code & 1u;
    uint32_t magnitude = e ? (e + 126u) << 23 | m << 22 : m ? 0x3F000000u : 0u;
    return __uint_as_float(magnitude | sign);
}

/* ---- activations -------------------------------------------------------------------------------------------------
 */

/* Value (row, col) of a block: codes are taken as code*scale. */
__device__ static inline float cu_act_load(const di_act &x, int64_t row, int64_t col) {
    int64_t at = row * x.stride + col;
    if (x.dtype == DI_F32)
        return ((const float *)x.data)[at];
    if (x.dtype == DI_BF16)
        return cu_bf16_to_f32(((const uint16_t *)x.data)[at]);
    return cu_scaled(cu_e4m3_to_f32(((const uint8_t *)x.data)[at]), x.scale[row * (x.n_cols / 32) + col / 32]);
}
__device__ static inline void cu_act_store(const di_act &x, int64_t row, int64_t col, float v) {
    int64_t at = row * x.stride + col;
    if (x.dtype == DI_F32)
        ((float *)x.data)[at] = v;
    else
        ((uint16_t *)x.data)[at] = cu_f32_to_bf16(v);
}

/* Value (o, i) of a stored matrix. */
__device__ static inline float cu_mat_load(const di_mat &w, int64_t o, int64_t i) {
    int64_t at = o * w.n_in + i;
    if (w.dtype == DI_F32)
        return ((const float *)w.data)[at];
    if (w.dtype == DI_BF16)
        return cu_bf16_to_f32(((const uint16_t *)w.data)[at]);
    if (w.dtype == DI_F8_E4M3)
        return cu_scaled(cu_e4m3_to_f32(((const uint8_t *)w.data)[at]),
                         w.scale[o / 32 * ((w.n_in + 31) / 32) + i / 32]);
    uint32_t byte = ((const uint8_t *)w.data)[at / 2];
    return cu_scaled(cu_e2m1_to_f32(at % 2 ? byte >> 4 : byte & 15u), w.scale[o * (w.n_in / 32) + i / 32]);
}

/* ---- exp, with tensor/math_inline.h's steps ----------------------------------------------------------------------
 */

__device__ static inline float cu_expf(float x) {
    const float log2e = 0x1.715476p0f, ln2_hi = 0x1.62e4p-1f, ln2_lo = 0x1.7f7d1cp-20f, shift = 0x1.8p23f;
    float c = x < -87.3f ? -87.3f : x;
    c = c > 88.7f ? 88.7f : c;
    float kf = __fadd_rn(__fmul_rn(c, log2e), shift);
    uint32_t k_exponent = __float_as_uint(kf) << 23;
    kf = __fsub_rn(kf, shift);
    float r = __fsub_rn(__fsub_rn(c, __fmul_rn(kf, ln2_hi)), __fmul_rn(kf, ln2_lo));
    float p = 0x1.a01a02p-13f;
    p = __fadd_rn(__fmul_rn(p, r), 0x1.6c16c2p-10f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.111112p-7f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.555556p-5f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.555556p-3f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    float y = __fadd_rn(1.0f, __fadd_rn(r, __fmul_rn(__fmul_rn(r, r), p)));
    y = __uint_as_float(__float_as_uint(y) + k_exponent);
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.7f ? __uint_as_float(0x7F800000u) : y;
    return x != x ? x : y;
}
__device__ static inline float cu_sigmoid(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, cu_expf(-x)));
}

/* ---- sums --------------------------------------------------------------------------------------------------------
 */

/* One group of di_dot32: up to 32 products from position i0 on, by two chains over even and odd inputs. a(i) and b(i)
 * give the factors at position i. The dot product is the sum of its groups in rising order, from 0. */
template <class A, class B> __device__ static inline float cu_dot_group(A a, B b, int64_t i0, int64_t n) {
    float even = 0.0f, odd = 0.0f;
    int64_t end = i0 + 32 < n ? i0 + 32 : n;
    for (int64_t i = i0; i < end; i += 2) {
        even = __fadd_rn(even, __fmul_rn(a(i), b(i)));
        if (i + 1 < end)
            odd = __fadd_rn(odd, __fmul_rn(a(i + 1), b(i + 1)));
    }
    return __fadd_rn(even, odd);
}

#endif
