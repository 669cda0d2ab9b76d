/* exp, ln and log1p in double with the steps of tensor/math.c, so that equal arguments give equal bits. For files that
 * are compiled without fused multiply-add. */
#ifndef DI_CUDA_MATH_CUH
#define DI_CUDA_MATH_CUH

#include "cuda.h"

#define CU_LN2_HI 0x1.62e42fee00000p-1
#define CU_LN2_LO 0x1.a39ef35793c76p-33
#define CU_ROUND_SHIFT 0x1.8p52

__device__ static inline double cu_power_of_two(int64_t k) {
    return __longlong_as_double((long long)(k + 1023) << 52);
}

/* di_exp */
__device__ static inline double cu_exp(double x) {
    if (!(x <= 709.8))
        return x != x ? x : __longlong_as_double(0x7FF0000000000000ll);
    if (x < -745.2)
        return 0.0;
    double kd = (x * 0x1.71547652b82fep0 + CU_ROUND_SHIFT) - CU_ROUND_SHIFT;
    double hi = x - kd * CU_LN2_HI, lo = kd * CU_LN2_LO;
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
    if (k > 1023)
        return (y * cu_power_of_two(1023)) * cu_power_of_two(k - 1023);
    if (k < -1021)
        return (y * cu_power_of_two(k + 100)) * cu_power_of_two(-100);
    return y * cu_power_of_two(k);
}

/* log_core of math.c: log(1 + f) + k*ln2 + c. */
__device__ static inline double cu_log_core(double f, double k, double c) {
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
    double small = s * (half_square + p * z) + (k * CU_LN2_LO + c);
    return k * CU_LN2_HI - ((half_square - small) - f);
}

/* Splits a positive normal x into 2^k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)). */
__device__ static inline double cu_log_split(double x, double *k) {
    const long long root_half = 0x3FE6A09E667F3BCDll; /* bits of sqrt(1/2) */
    long long bits = __double_as_longlong(x) + (0x3FF0000000000000ll - root_half);
    *k = (double)((bits >> 52) - 1023);
    return __longlong_as_double((bits & 0x000FFFFFFFFFFFFFll) + root_half) - 1.0;
}

/* di_ln of a positive normal number. */
__device__ static inline double cu_ln(double x) {
    double k, f = cu_log_split(x, &k);
    return cu_log_core(f, k, 0.0);
}

/* di_log1p of x below 2^1022; NaN stays as it is. */
__device__ static inline double cu_log1p(double x) {
    if (!(x >= 0.0))
        return x;
    if (x < 0x1.a827999fcef32p-2)
        return cu_log_core(x, 0.0, 0.0);
    double u = 1.0 + x, k;
    double lost = x < 1.0 ? x - (u - 1.0) : 1.0 - (u - x);
    double f = cu_log_split(u, &k);
    return cu_log_core(f, k, lost / u);
}

#endif
