/* Sixteen floats at once for the files of the avx512 and amx levels: bf16 in and out, the exponential, decoding of the
 * cache formats.
 *
 * Every lane computes what the scalar code of tensor/ computes: the same operations in the same order, none fused where
 * that code is not, so that the bits are the same. Included only by files that are compiled with the flags of AVX-512
 * F, BW, DQ and VL. */
#ifndef DI_CPU_AVX512_VEC_H
#define DI_CPU_AVX512_VEC_H

#include <immintrin.h>

#include "cpu.h"
#include "tensor/math_inline.h"

#define DI_LANES 16

/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

static inline __m512 di_v16_from_bf16(const uint16_t *p) {
    __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* di_f32_to_bf16 in the high halves of the lanes; the low halves are to be dropped. */
static inline __m512i di_v16_bf16_high(__m512 x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(r, is_nan, u, _mm512_set1_epi32(0x400000));
}

static inline void di_v16_to_bf16(uint16_t *p, __m512 x) {
    __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(di_v16_bf16_high(x), 16));
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}

static inline __m512 di_v16_round_bf16(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(di_v16_bf16_high(x), _mm512_set1_epi32((int)0xFFFF0000u)));
}

/* The high halves alone: for values that are bf16 values already. */
static inline void di_v16_to_bf16_exact(uint16_t *p, __m512 x) {
    __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}

/* ---- moves ------------------------------------------------------------------------------------------------------- */

/* In place: row i of the result is lane i of the 16 rows. */
static inline void di_v16_transpose(__m512 r[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
    }
}

/* ---- the exponential --------------------------------------------------------------------------------------------- */

/* di_expf_inline of a value clamped to its limits. */
static inline __m512 di_v16_exp_core(__m512 c) {
    const __m512 shift = _mm512_set1_ps(0x1.8p23f);
    __m512 kf = _mm512_add_ps(_mm512_mul_ps(c, _mm512_set1_ps(0x1.715476p0f)), shift);
    __m512i k_exponent = _mm512_slli_epi32(_mm512_castps_si512(kf), 23);
    kf = _mm512_sub_ps(kf, shift);
    __m512 r = _mm512_sub_ps(_mm512_sub_ps(c, _mm512_mul_ps(kf, _mm512_set1_ps(0x1.62e4p-1f))),
                             _mm512_mul_ps(kf, _mm512_set1_ps(0x1.7f7d1cp-20f)));
    __m512 p = _mm512_set1_ps(0x1.a01a02p-13f);
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0x1.6c16c2p-10f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0x1.111112p-7f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0x1.555556p-5f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0x1.555556p-3f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0.5f));
    __m512 y = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(r, _mm512_mul_ps(_mm512_mul_ps(r, r), p)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), k_exponent));
}

/* di_expf_inline of every lane. vminps and vmaxps give their second operand where one is NaN. */
static inline __m512 di_v16_exp(__m512 x) {
    const __m512 least = _mm512_set1_ps(DI_EXPF_MIN), most = _mm512_set1_ps(DI_EXPF_MAX);
    __m512 y = di_v16_exp_core(_mm512_min_ps(most, _mm512_max_ps(least, x)));
    y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y);
    y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ), _mm512_set1_ps(__builtin_inff()));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

/* The same where no lane is above 0. */
static inline __m512 di_v16_exp_le0(__m512 x) {
    const __m512 least = _mm512_set1_ps(DI_EXPF_MIN);
    __m512 y = di_v16_exp_core(_mm512_max_ps(least, x));
    y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y);
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

/* ---- cache formats ----------------------------------------------------------------------------------------------- */

/* Sixteen E4M3 codes. The code's exponent and mantissa placed in a half float read as value * 2^-8, also where they are
 * subnormal; the two NaN codes would read as 480. */
static inline __m512 di_v16_e4m3(const uint8_t *codes) {
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)codes);
    __m256i h = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7), _mm256_set1_epi16((short)0xBF80));
    __m512 x = _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
    const __m256i last = _mm256_set1_epi16(0x3F80);
    __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(h, last), last);
    return _mm512_mask_mov_ps(x, is_nan, _mm512_set1_ps(__builtin_nanf("")));
}

/* Sixteen E2M1 codes, two a byte. */
static inline __m512 di_v16_e2m1(const uint8_t *packed) {
    uint32_t half[2];
    memcpy(half, packed, sizeof half);
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i x = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)half[0]), 0xFF00, (int)half[1]);
    /* The permutation looks at the low 4 bits of a lane's index alone. */
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(x, shifts), _mm512_loadu_ps(di_e2m1_table));
}

/* Values [i, i + 16) of a record. */
static inline __m512 di_v16_kv(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t i) {
    switch (format) {
    case DI_KV_FP8:
        return _mm512_mul_ps(di_v16_e4m3(data + i), _mm512_set1_ps(di_e8m0_to_f32(scale[i / 32])));
    case DI_KV_FP4:
        return _mm512_mul_ps(di_v16_e2m1(data + i / 2), _mm512_set1_ps(di_e4m3_to_f32(scale[i / 16])));
    case DI_KV_MX4:
        return _mm512_mul_ps(di_v16_e2m1(data + i / 2), _mm512_set1_ps(di_e8m0_to_f32(scale[i / 32])));
    case DI_KV_F32:
        break;
    }
    return _mm512_loadu_ps((const float *)(const void *)data + i);
}

/* A record of n values, n a multiple of 32, as floats or, where it is quantised, as bf16 values, which they are. */
static inline void di_v16_kv_f32(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t n,
                                 float *out) {
    for (int64_t i = 0; i < n; i += DI_LANES)
        _mm512_storeu_ps(out + i, di_v16_kv(format, data, scale, i));
}
/* Thirty-two E4M3 codes times 2^(scale-127) as bf16 values, without a float: 10 <= scale <= 245 keeps them normal. A
 * code's exponent and mantissa lie where bf16 has them once shifted, but for the base of the exponent; the 8 codes
 * below the normal ones come from a table. */
static inline __m512i di_v32_e4m3_bf16(const uint8_t *codes, int scale) {
    __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)codes));
    __m512i a = _mm512_and_si512(c, _mm512_set1_epi16(0x7F));
    __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7F), c), 8);
    __m512i x = _mm512_add_epi16(_mm512_slli_epi16(a, 4), _mm512_set1_epi16((short)((scale - 7) << 7)));
    /* 0, 2^-9 .. 7 * 2^-9, twice for the codes' bit 3, which is 0 here, and for indices of 5 bits. */
    const __m128i small = _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
    __m512i table = _mm512_broadcast_i32x4(small);
    table = _mm512_mask_add_epi16(table, 0xFEFEFEFE, table, _mm512_set1_epi16((short)((scale - 127) * 128)));
    x = _mm512_mask_permutexvar_epi16(x, _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(8)), a, table);
    x = _mm512_mask_mov_epi16(x, _mm512_cmpeq_epi16_mask(a, _mm512_set1_epi16(0x7F)), _mm512_set1_epi16(0x7FC0));
    return _mm512_or_si512(x, sign);
}

static inline void di_v16_kv_bf16(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t n,
                                  uint16_t *out) {
    if (format == DI_KV_FP8) {
        for (int64_t i = 0; i < n; i += 2 * DI_LANES, scale++) {
            if (*scale >= 10 && *scale <= 245) {
                _mm512_storeu_si512(out + i, di_v32_e4m3_bf16(data + i, *scale));
                continue;
            }
            di_v16_to_bf16_exact(out + i, di_v16_kv(format, data + i, scale, 0));
            di_v16_to_bf16_exact(out + i + DI_LANES, di_v16_kv(format, data + i, scale, DI_LANES));
        }
        return;
    }
    if (format == DI_KV_MX4) {
        for (int64_t i = 0; i < n; i += DI_LANES)
            di_v16_to_bf16_exact(out + i, di_v16_kv(format, data, scale, i));
        return;
    }
    /* A byte a lane: its two values meet again as the halves of the lane. */
    const __m512 table = _mm512_loadu_ps(di_e2m1_table);
    for (int64_t i = 0; i < n; i += 2 * DI_LANES, data += DI_LANES, scale += 2) {
        __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)data));
        __m512 s = _mm512_mask_mov_ps(_mm512_set1_ps(di_e4m3_to_f32(scale[0])), 0xFF00,
                                      _mm512_set1_ps(di_e4m3_to_f32(scale[1])));
        __m512i even = _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(x, table), s));
        __m512i odd = _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table), s));
        __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even, 16), odd);
        _mm512_storeu_si512(out + i, both);
    }
}

#endif
