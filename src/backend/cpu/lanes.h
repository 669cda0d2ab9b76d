/* Vectors of DI_LANES floats: what kernel bodies (*_body.h) are written with, so that one source serves every level.
 *
 * A level's file includes its own lanes_<level>.h, which says how wide a vector is and how its few special moves are
 * made, and then the bodies. Arithmetic is the compilers' generic vectors: every lane computes what scalar code would,
 * so the width can't change a bit. Fused multiply-add is only where di_v_fma is written.
 *
 *   DI_LANES          floats of a vector
 *   DI_BLOCK_VECS     vectors of outputs that a product keeps in registers, for DI_BLOCK_ROWS rows at a time
 *   DI_HAS_BYTES      1: the level has the byte moves of lanes_bytes.h, and di_v_load_half
 *   DI_INSTALL(f)     name of the function that installs family f of the level
 *
 * Private to the kernel files of backend/cpu. */
#ifndef DI_CPU_LANES_H
#define DI_CPU_LANES_H

#include "cpu.h"

#define DI_INLINE static inline __attribute__((always_inline))

typedef float di_v __attribute__((vector_size(4 * DI_LANES)));
typedef int32_t di_vi __attribute__((vector_size(4 * DI_LANES)));
typedef uint32_t di_vu __attribute__((vector_size(4 * DI_LANES)));

DI_INLINE di_v di_v_load(const float *p) {
    di_v v;
    memcpy(&v, p, sizeof v);
    return v;
}
DI_INLINE void di_v_store(float *p, di_v v) {
    memcpy(p, &v, sizeof v);
}

#endif
