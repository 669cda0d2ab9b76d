/* exp, log and log1p of IEEE operations in a written order.
 *
 * The C library's functions differ between versions and machines in their last bit, which would make a sampled token
 * depend on them. These use only additions, multiplications, divisions and bit operations, none fused, so that every
 * backend that writes the same lines gets the same bits. Series coefficients are the rational numbers of the Taylor
 * series: the arguments are reduced far enough that a fitted polynomial would gain nothing.
 *
 * Largest errors measured against long double (tests/unit/tensor/math_test.c holds them to the bounds of tensor.h):
 * di_exp 0.88 ulp, di_ln 0.84 ulp, di_log1p 0.80 ulp, di_expf (every float) 1.03 ulp. */
#include "tensor.h"

#include "math_inline.h"

/* ln2 = LN2_HI + LN2_LO; the low 21 bits of LN2_HI's mantissa are zero, so that k*LN2_HI is exact for |k| < 2^21. */
#define LN2_HI 0x1.62e42fee00000p-1
#define LN2_LO 0x1.a39ef35793c76p-33
#define LOG2E 0x1.71547652b82fep0

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 2^k for -1022 <= k <= 1023. */
static inline double power_of_two(int64_t k) {
    return from_bits((uint64_t)(k + 1023) << 52);
}

/* x = k*ln2 + r, |r| <= ln2/2; the bits that r loses by rounding come back as a first-order term. */
double di_exp(double x) {
    if (!(x <= 709.8))
        return x != x ? x : __builtin_inf();
    if (x < -745.2)
        return 0.0;
    const double shift = 0x1.8p52;
    double kd = (x * LOG2E + shift) - shift;
    double hi = x - kd * LN2_HI, lo = kd * LN2_LO;
    double r = hi - lo;
    double lost = (hi - r) - lo;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
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
    double y = 1.0 + (r + ((r * r) * p + lost));
    int64_t k = (int64_t)kd;
    /* Two factors where one is out of range; the second multiplication is the only one that rounds. */
    if (k > 1023)
        return (y * power_of_two(1023)) * power_of_two(k - 1023);
    if (k < -1021)
        return (y * power_of_two(k + 100)) * power_of_two(-100);
    return y * power_of_two(k);
}

/* log(1 + f) + k*ln2 + c for sqrt(1/2) - 1 <= f <= sqrt(2) - 1 and a small c: with s = f/(2+f),
 * log(1+f) = log((1+s)/(1-s)) = 2s + s*R, R = 2/3 s^2 + 2/5 s^4 + ..., and 2s = f - s*f, rearranged so that f, which is
 * exact, is added last. */
static inline double log_core(double f, double k, double c) {
    double s = f / (2.0 + f);
    double z = s * s;
    double p = 2.0 / 21.0;
    p = p * z + 2.0 / 19.0;
    p = p * z + 2.0 / 17.0;
    p = p * z + 2.0 / 15.0;
    p = p * z + 2.0 / 13.0;
    p = p * z + 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    double half_square = 0.5 * f * f;
    double small = s * (half_square + p * z) + (k * LN2_LO + c);
    return k * LN2_HI - ((half_square - small) - f);
}

/* Splits a positive normal x*2^k0 into 2^k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)). */
static inline double split(double x, double k0, double *k) {
    const uint64_t root_half = 0x3FE6A09E667F3BCDu; /* bits of sqrt(1/2) */
    uint64_t bits = bits_of(x) + (0x3FF0000000000000u - root_half);
    *k = (double)((int64_t)(bits >> 52) - 1023) + k0;
    bits = (bits & 0x000FFFFFFFFFFFFFu) + root_half;
    return from_bits(bits) - 1.0;
}

double di_ln(double x) {
    if (!(x > 0.0))
        return x == 0.0 ? -__builtin_inf() : __builtin_nan("");
    if (x > 0x1.fffffffffffffp1023)
        return x;
    double k0 = 0.0, k;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k0 = -54.0;
    }
    double f = split(x, k0, &k);
    return log_core(f, k, 0.0);
}

double di_log1p(double x) {
    if (!(x >= 0.0))
        return __builtin_nan("");
    if (x < 0x1.a827999fcef32p-2)
        return log_core(x, 0.0, 0.0); /* sqrt(2) - 1: f is x itself */
    if (x > 0x1p1022)
        return di_ln(x);
    double u = 1.0 + x, k;
    double lost = x < 1.0 ? x - (u - 1.0) : 1.0 - (u - x); /* 1 + x - u, exact */
    double f = split(u, 0.0, &k);
    return log_core(f, k, lost / u);
}

float di_expf(float x) {
    return di_expf_inline(x);
}
