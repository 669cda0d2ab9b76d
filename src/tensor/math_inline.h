/* di_expf as an inline function, so that a kernel's loop over it vectorises; bit-identical to tensor.h's di_expf.
 *
 * The core has no branch: two clamps, a rounding by the 1.5*2^23 trick, a polynomial, one integer addition to the
 * exponent and three selects. A hand-written vector version does these same operations in this order, none of them
 * fused. */
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

#endif
