/* di_expf as an inline function, so that a kernel's loop over it vectorises, and di_exp of several values at once where
 * they are at most 0; bit-identical to tensor.h's.
 *
 * The core has no branch: clamps, a rounding by the 1.5*2^23 (1.5*2^52) trick, a polynomial, one step for the exponent
 * and selects. A hand-written vector version does these same operations in this order, none of them fused. */
#ifndef DI_TENSOR_MATH_INLINE_H
#define DI_TENSOR_MATH_INLINE_H

#include <stdint.h>
#include <string.h>

#define DI_EXPF_MIN (-87.3f) /* below: zero; at it the result is still normal */
#define DI_EXPF_MAX 88.7f    /* above: infinity; at it the result is still finite */

/* x = k*ln2 + r with |r| <= ln2/2; ln2 is split so that k*hi and x - k*hi are exact. e^r is its series up to r^7
 * (truncation below 0.1 ulp); adding k to the exponent field is exact because the limits keep the result normal. */
static inline float di_expf_inline(float x) {
    const float log2e = 0x1.715476p0f, ln2_hi = 0x1.62e4p-1f, ln2_lo = 0x1.7f7d1cp-20f, shift = 0x1.8p23f;
    float c = x < DI_EXPF_MIN ? DI_EXPF_MIN : x;
    c = c > DI_EXPF_MAX ? DI_EXPF_MAX : c;
    float kf = c * log2e + shift; /* its low mantissa bits are k */
    uint32_t bits;
    memcpy(&bits, &kf, sizeof bits);
    uint32_t k_exponent = bits << 23;
    kf = kf - shift;
    float r = (c - kf * ln2_hi) - kf * ln2_lo;
    float p = 0x1.a01a02p-13f; /* 1/7! */
    p = p * r + 0x1.6c16c2p-10f;
    p = p * r + 0x1.111112p-7f;
    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    float y = 1.0f + (r + (r * r) * p);
    memcpy(&bits, &y, sizeof bits);
    bits += k_exponent;
    memcpy(&y, &bits, sizeof y);
    y = x < DI_EXPF_MIN ? 0.0f : y;
    y = x > DI_EXPF_MAX ? __builtin_inff() : y;
    return x != x ? x : y;
}

enum { DI_EXP_BLOCK = 8 };

/* In place: the steps of math.c's di_exp for DI_EXP_BLOCK values of at most 0, -infinity too. Eight at once, as the
 * compilers' generic vectors, hide the latency of the steps; the compilers make no vectors of a loop over scalars. */
static inline void di_exp_block(double *values) {
    typedef double vec __attribute__((vector_size(8 * DI_EXP_BLOCK)));
    typedef uint64_t bits __attribute__((vector_size(8 * DI_EXP_BLOCK)));
    const double log2e = 0x1.71547652b82fep0, ln2_hi = 0x1.62e42fee00000p-1, ln2_lo = 0x1.a39ef35793c76p-33;
    const double shift = 0x1.8p52, least = -745.2;
    vec x;
    memcpy(&x, values, sizeof x);
    const bits none = {0};
    /* Comparisons as sign bits of differences: SSE2's compilers take other ones apart. */
    bits is_zero = none - ((bits)(x - least) >> 63);
    vec c = (vec)((bits)x & ~is_zero); /* 0 for what is masked in the end: subnormal steps would be slow */
    vec kd = c * log2e + shift;        /* its low mantissa bits are k */
    bits k = (bits)kd;
    kd = kd - shift;
    vec hi = c - kd * ln2_hi, lo = kd * ln2_lo;
    vec r = hi - lo;
    vec lost = (hi - r) - lo;
    vec p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    vec y = 1.0 + (r + ((r * r) * p + lost));
    /* 2^k in two factors where it is below the normal numbers; elsewhere the second is 1. */
    bits more = (none - ((bits)(kd + 1021.0) >> 63)) & 100;
    y = y * (vec)((k + more + 1023) << 52) * (vec)((1023 - more) << 52);
    y = (vec)((bits)y & ~is_zero);
    memcpy(values, &y, sizeof y);
}

#endif
