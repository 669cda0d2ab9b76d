/* The arithmetic probe of a level: independent chains of multiply-adds in registers, as many as hide their latency.
 *
 * A level's file sets PEAK (its suffix), VEC (a vector of floats) and MADD(acc, a, b), and includes this. The products
 * of bf16 values are exact in fp32, so that fused and unfused steps do the same work; it is what a level's kernels can
 * reach at most. */
#ifndef DI_CPU_PEAK_BODY_H
#define DI_CPU_PEAK_BODY_H

#include "cpu.h"

#define PEAK_NAME_(level) di_cpu_install_##level##_peak
#define PEAK_NAME(level) PEAK_NAME_(level)

static double peak(int64_t n, const float *from, float *to) {
    enum { CHAINS = 12, LANES = sizeof(VEC) / sizeof(float) };
    VEC acc[CHAINS], a, b;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + LANES, sizeof b);
    for (int k = 0; k < CHAINS; k++)
        acc[k] = a;
    for (int64_t i = 0; i < n; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < CHAINS; k++)
            acc[k] = MADD(acc[k], a, b);
    }
    for (int k = 1; k < CHAINS; k++)
        acc[0] = MADD(acc[0], acc[k], b);
    memcpy(to, &acc[0], sizeof acc[0]);
    return 2.0 * CHAINS * LANES * (double)n;
}

void PEAK_NAME(PEAK)(di_cpu_kernels *k) {
    k->peak = peak;
}

#endif
