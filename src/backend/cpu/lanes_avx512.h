/* Vectors of the avx512 level: sixteen floats; bytes in four lanes of sixteen. */
#ifndef DI_CPU_LANES_AVX512_H
#define DI_CPU_LANES_AVX512_H

#include <immintrin.h>

#define DI_LANES 16
#define DI_BLOCK_VECS 2
#define DI_BLOCK_ROWS 12
#define DI_HAS_BYTES 1
#define DI_INSTALL(family) di_cpu_install_avx512_##family

#include "lanes.h"

DI_INLINE di_v di_v_splat(float x) {
    return (di_v)_mm512_set1_ps(x);
}
DI_INLINE di_v di_v_fma(di_v a, di_v b, di_v c) {
    return (di_v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
/* Sixteen fp16 values. */
DI_INLINE di_v di_v_load_half(const uint16_t *p) {
    return (di_v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* Rows of DI_LANES / 2 pairs to columns. */
DI_INLINE void di_v_transpose_pairs(di_v v[8]) {
    __m512d a[8], b[8];
    for (int i = 0; i < 8; i += 2) { /* pairs of rows i, i+1 side by side: columns 0 2 4 6, then 1 3 5 7 */
        a[i] = _mm512_unpacklo_pd((__m512d)v[i], (__m512d)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_pd((__m512d)v[i], (__m512d)v[i + 1]);
    }
    for (int h = 0; h < 2; h++) { /* of four rows: columns h and 4+h, 2+h and 6+h */
        b[h] = _mm512_shuffle_f64x2(a[h], a[2 + h], 0x88);
        b[2 + h] = _mm512_shuffle_f64x2(a[h], a[2 + h], 0xDD);
        b[4 + h] = _mm512_shuffle_f64x2(a[4 + h], a[6 + h], 0x88);
        b[6 + h] = _mm512_shuffle_f64x2(a[4 + h], a[6 + h], 0xDD);
    }
    for (int c = 0; c < 4; c++) { /* of eight rows: columns c and 4+c */
        v[c] = (di_v)_mm512_shuffle_f64x2(b[c], b[4 + c], 0x88);
        v[4 + c] = (di_v)_mm512_shuffle_f64x2(b[c], b[4 + c], 0xDD);
    }
}
DI_INLINE di_v di_v_swap_pairs(di_v v) { /* (b, a) of every pair (a, b) */
    return (di_v)_mm512_permute_ps((__m512)v, 0xB1);
}
DI_INLINE int32_t di_v_largest(di_vi v) {
    return _mm512_reduce_max_epi32((__m512i)v);
}
/* The lowest byte of every lane. */
DI_INLINE void di_v_store_bytes(uint8_t *p, di_vi v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)v));
}

/* ---- bytes (lanes_bytes.h) ---- */

#define DI_BYTE_LANES 4
typedef __m512i di_b;
#define DI_B(operation) _mm512_##operation
#define DI_B_BITS(operation) _mm512_##operation##_si512

/* Lane i: the 16 bytes at p + i*stride. */
DI_INLINE di_b di_b_load_lanes(const uint8_t *p, int64_t stride) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + 2 * stride)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(p + 3 * stride)), 3);
}
DI_INLINE void di_b_store(void *p, di_b v) {
    _mm512_storeu_si512(p, v);
}
/* The same 16 bytes in every lane. */
DI_INLINE di_b di_b_table(const uint8_t *p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}
DI_INLINE bool di_b_any_equal(di_b a, di_b b) {
    return _mm512_cmpeq_epi8_mask(a, b) != 0;
}

#endif
