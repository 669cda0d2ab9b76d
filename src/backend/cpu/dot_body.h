/* Sums in the order of di_dot32 of one row, at the width of the level that includes this.
 *
 * The terms of a group are added one after the other, so that the lanes of a vector have to be groups, or outputs:
 * terms are multiplied where they lie, side by side, and then transposed, a pair of an even and an odd term being an
 * element:
 *
 *     row i: the pairs of group i, or of output i      ->      column j: pair j of every group, or output
 *
 * Included after lanes_<level>.h. */
#ifndef DI_CPU_DOT_BODY_H
#define DI_CPU_DOT_BODY_H

#include "act_body.h"

#define DI_PAIRS (DI_LANES / 2)

/* The even and the odd chain of DI_PAIRS groups of 32 terms each: row i is a + i*lda times b + i*ldb. */
DI_INLINE di_v chains_of(const float *a, int64_t lda, const float *b, int64_t ldb) {
    di_v chain = {0};
    for (int k = 0; k < 32; k += DI_LANES) {
        di_v v[DI_PAIRS];
        for (int i = 0; i < DI_PAIRS; i++)
            v[i] = di_v_load(a + i * lda + k) * di_v_load(b + i * ldb + k);
        di_v_transpose_pairs(v);
        for (int j = 0; j < DI_PAIRS; j++)
            chain += v[j];
    }
    return chain;
}

/* sum + di_dot32(a, b, n) in its order. */
DI_INLINE float row_dot32_from(float sum, const float *a, const float *b, int64_t n) {
    int64_t i = 0;
    for (; i + 32 * DI_PAIRS <= n; i += 32 * DI_PAIRS) {
        float chain[DI_LANES];
        di_v_store(chain, chains_of(a + i, 32, b + i, 32));
        for (int g = 0; g < DI_LANES; g += 2)
            sum += chain[g] + chain[g + 1];
    }
    for (; i + 64 <= n; i += 64) {
        di_f4 chain = {0};
        for (int64_t k = i; k < i + 32; k += 2)
            chain += di_f4_pairs(a + k, a + k + 32) * di_f4_pairs(b + k, b + k + 32);
        sum += chain[0] + chain[1];
        sum += chain[2] + chain[3];
    }
    for (; i < n; i += 32) {
        float chain[2] = {0.0f, 0.0f};
        for (int64_t k = i; k < DI_MIN(i + 32, n); k++)
            chain[(k - i) & 1] += a[k] * b[k];
        sum += chain[0] + chain[1];
    }
    return sum;
}

#endif
