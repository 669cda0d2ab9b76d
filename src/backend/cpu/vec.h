/* Four floats at once in plain C: the compilers' generic vectors, which need no flags and no intrinsics and become
 * SSE2 on x86-64, NEON on AArch64 and scalar code elsewhere. Loads and stores take any alignment.
 *
 * Owns: the vector type, its few moves, and decoding of 32 E4M3 codes. Every lane computes what scalar code would. */
#ifndef DI_CPU_VEC_H
#define DI_CPU_VEC_H

#include "cpu.h"

typedef float di_f4 __attribute__((vector_size(16)));
typedef double di_d2 __attribute__((vector_size(16)));

static inline di_f4 di_f4_load(const float *p) {
    di_f4 v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void di_f4_store(float *p, di_f4 v) {
    memcpy(p, &v, sizeof v);
}
static inline di_f4 di_f4_splat(float x) {
    return (di_f4){x, x, x, x};
}
/* (a[0], a[1], b[0], b[1]). The doubles only carry bits: two 64-bit loads instead of four and their shuffles. */
static inline di_f4 di_f4_pairs(const float *a, const float *b) {
    double lo, hi;
    memcpy(&lo, a, sizeof lo);
    memcpy(&hi, b, sizeof hi);
    return (di_f4)(di_d2){lo, hi};
}

/* Lanes i..l of (a[0..3], b[0..3]). */
#define di_f4_shuffle(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)

/* 32 codes times one scale. */
static inline void di_cpu_e4m3_32(const uint8_t *codes, uint8_t scale, float *out) {
    if (scale == 0) {
        for (int i = 0; i < 32; i++)
            out[i] = di_cpu_scaled(di_e4m3_table[codes[i]], 0);
        return;
    }
    di_f4 s = di_f4_splat(di_e8m0_to_f32(scale));
    for (int i = 0; i < 32; i += 8) {
        const uint8_t *c = codes + i;
        di_f4 a = {di_e4m3_table[c[0]], di_e4m3_table[c[1]], di_e4m3_table[c[2]], di_e4m3_table[c[3]]};
        di_f4 b = {di_e4m3_table[c[4]], di_e4m3_table[c[5]], di_e4m3_table[c[6]], di_e4m3_table[c[7]]};
        di_f4_store(out + i, a * s);
        di_f4_store(out + i + 4, b * s);
    }
}

#endif
