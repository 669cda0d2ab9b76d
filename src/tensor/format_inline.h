/* The quantisers' inner functions, inline, so that a kernel's loop over a group vectorises; bit-identical to
 * tensor.h's.
 *
 * Written without branches: comparisons of bit patterns, selects and the rounding of one addition. */
#ifndef DI_TENSOR_FORMAT_INLINE_H
#define DI_TENSOR_FORMAT_INLINE_H

#include "tensor.h"

/* Magnitudes are compared as bit patterns: non-negative integers that order as the floats do, with NaN above all. */
static inline uint32_t di_e4m3_code(float f) {
    uint32_t bits = di_f32_bits(f);
    int32_t a = (int32_t)(bits & 0x7FFFFFFFu);
    int32_t u = a > 0x43E00000 ? 0x43E00000 : a; /* 448 */
    /* Normal codes: 3 mantissa bits, exponent rebased from 127 to 7. */
    int32_t normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120 << 3);
    /* Below 2^-6 the grid is 2^-9: adding 2^14, whose ulp that is, rounds to nearest even. Code 8 is 2^-6 again. */
    int32_t small = (int32_t)di_f32_bits(di_f32_from_bits((uint32_t)u) + 16384.0f) - 0x46800000;
    int32_t code = u < 0x3C800000 ? small : normal;
    code = a > 0x7F800000 ? 0x7F : code;
    return (uint32_t)code | ((bits >> 24) & 0x80u);
}

/* The code is the number of borders between neighbours that the magnitude has passed; a tie goes to the even code. */
static inline uint32_t di_e2m1_code(float f) {
    uint32_t bits = di_f32_bits(f);
    int32_t a = (int32_t)(bits & 0x7FFFFFFFu);
    int32_t code = (a > 0x3E800000)    /* .25 */
                   + (a >= 0x3F400000) /* .75 */
                   + (a > 0x3FA00000)  /* 1.25 */
                   + (a >= 0x3FE00000) /* 1.75 */
                   + (a > 0x40200000)  /* 2.5 */
                   + (a >= 0x40600000) /* 3.5 */
                   + (a > 0x40A00000); /* 5; NaN and infinities pass all */
    return (uint32_t)code | ((bits >> 28) & 8u);
}

/* NaN must not become a group's scale: it counts as zero here and comes out as a NaN code (E4M3). */
static inline float di_abs_max(const float *x, int n, float least) {
    int32_t most = (int32_t)di_f32_bits(least);
    for (int i = 0; i < n; i++) {
        int32_t a = (int32_t)(di_f32_bits(x[i]) & 0x7FFFFFFFu);
        a = a > 0x7F800000 ? 0 : a;
        most = a > most ? a : most;
    }
    return di_f32_from_bits((uint32_t)most);
}

/* The smallest power of two >= s, s positive and normal; its E8M0 byte is the exponent field. An infinite s stays
 * infinite: byte 255, NaN. */
static inline float di_pow2_ceil(float s) {
    return di_f32_from_bits((di_f32_bits(s) + 0x007FFFFFu) & 0x7F800000u);
}

static inline uint8_t di_e8m0_byte(float pow2) {
    return (uint8_t)(di_f32_bits(pow2) >> 23);
}

/* One group of QA: 32 codes; returns the scale. */
static inline uint8_t di_quant_qa_group(const float *x, uint8_t *codes) {
    float s = di_pow2_ceil(di_abs_max(x, 32, 1e-4f) / 448.0f), inv = 1.0f / s;
    for (int i = 0; i < 32; i++)
        codes[i] = (uint8_t)di_e4m3_code(x[i] * inv);
    return di_e8m0_byte(s);
}

#endif
