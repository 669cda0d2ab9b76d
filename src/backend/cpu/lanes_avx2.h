/* Vectors of the avx2 level: eight floats; bytes in two lanes of sixteen. */
#ifndef DI_CPU_LANES_AVX2_H
#define DI_CPU_LANES_AVX2_H

#include <immintrin.h>

#define DI_LANES 8
#define DI_BLOCK_VECS 2
#define DI_BLOCK_ROWS 6
#define DI_HAS_BYTES 1
#define DI_INSTALL(family) di_cpu_install_avx2_##family

#include "lanes.h"

DI_INLINE di_v di_v_splat(float x) {
    return (di_v)_mm256_set1_ps(x);
}
DI_INLINE di_v di_v_fma(di_v a, di_v b, di_v c) {
    return (di_v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
/* Eight fp16 values. */
DI_INLINE di_v di_v_load_half(const uint16_t *p) {
    return (di_v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* Rows of DI_LANES / 2 pairs to columns. */
DI_INLINE void di_v_transpose_pairs(di_v v[4]) {
    __m256d a = _mm256_unpacklo_pd((__m256d)v[0], (__m256d)v[1]), b = _mm256_unpackhi_pd((__m256d)v[0], (__m256d)v[1]);
    __m256d c = _mm256_unpacklo_pd((__m256d)v[2], (__m256d)v[3]), d = _mm256_unpackhi_pd((__m256d)v[2], (__m256d)v[3]);
    v[0] = (di_v)_mm256_permute2f128_pd(a, c, 0x20);
    v[1] = (di_v)_mm256_permute2f128_pd(b, d, 0x20);
    v[2] = (di_v)_mm256_permute2f128_pd(a, c, 0x31);
    v[3] = (di_v)_mm256_permute2f128_pd(b, d, 0x31);
}
DI_INLINE di_v di_v_swap_pairs(di_v v) { /* (b, a) of every pair (a, b) */
    return (di_v)_mm256_permute_ps((__m256)v, 0xB1);
}
DI_INLINE int32_t di_v_largest(di_vi v) {
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xB1)));
}
/* The lowest byte of every lane; their other bytes are zero. */
DI_INLINE void di_v_store_bytes(uint8_t *p, di_vi v) {
    __m128i a = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(a, a));
}

/* ---- bytes (lanes_bytes.h) ---- */

#define DI_BYTE_LANES 2
typedef __m256i di_b;
#define DI_B(operation) _mm256_##operation
#define DI_B_BITS(operation) _mm256_##operation##_si256

/* Lane i: the 16 bytes at p + i*stride. */
DI_INLINE di_b di_b_load_lanes(const uint8_t *p, int64_t stride) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)),
                                   _mm_loadu_si128((const __m128i *)(p + stride)), 1);
}
DI_INLINE void di_b_store(void *p, di_b v) {
    _mm256_storeu_si256(p, v);
}
/* The same 16 bytes in every lane. */
DI_INLINE di_b di_b_table(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
DI_INLINE bool di_b_any_equal(di_b a, di_b b) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) != 0;
}

#endif
