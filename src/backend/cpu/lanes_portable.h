/* Vectors of the portable level: four floats, which become SSE2 on x86-64, NEON on AArch64 and scalar code elsewhere.
 */
#ifndef DI_CPU_LANES_PORTABLE_H
#define DI_CPU_LANES_PORTABLE_H

#define DI_LANES 4
#define DI_BLOCK_VECS 4
#define DI_BLOCK_ROWS 2
#define DI_HAS_BYTES 0
#define DI_INSTALL(family) di_cpu_install_portable_##family

#include "lanes.h"

DI_INLINE di_v di_v_splat(float x) {
    return (di_v){x, x, x, x};
}

/* Rows of DI_LANES / 2 pairs to columns. */
DI_INLINE void di_v_transpose_pairs(di_v v[2]) {
    di_v a = v[0], b = v[1];
    v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
}
DI_INLINE di_v di_v_swap_pairs(di_v v) { /* (b, a) of every pair (a, b) */
    return __builtin_shufflevector(v, v, 1, 0, 3, 2);
}
DI_INLINE int32_t di_v_largest(di_vi v) {
    int32_t a = DI_MAX(v[0], v[1]), b = DI_MAX(v[2], v[3]);
    return DI_MAX(a, b);
}
/* The lowest byte of every lane. */
DI_INLINE void di_v_store_bytes(uint8_t *p, di_vi v) {
    for (int i = 0; i < DI_LANES; i++)
        p[i] = (uint8_t)v[i];
}

#endif
