/* Sixteen rows of sixteen dwords, turned: the one shuffle network of the engines of wide products. Private to
 * avx512_*.c and amx_*.c, which are compiled for AVX-512. */
#ifndef DI_CPU_AVX512_TURN_H
#define DI_CPU_AVX512_TURN_H

#include <immintrin.h>

/* First half: of four rows; lane part L of row j becomes dwords 4*L + j of all four. */
static inline __attribute__((always_inline)) void di_avx512_turn_rows(__m512i r[4]) {
    __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
}

/* Second half, once all rows went through the first: dwords j, 4 + j, 8 + j and 12 + j of the 16 rows. */
static inline __attribute__((always_inline)) void di_avx512_turn_parts(const __m512i r[16], int j, __m512i out[16]) {
    /* even and odd parts, then each apart */
    __m512i even_a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    __m512i even_b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    __m512i odd_a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
    __m512i odd_b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
    out[j] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
    out[4 + j] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
    out[8 + j] = _mm512_shuffle_i32x4(even_a, even_b, 0xDD);
    out[12 + j] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xDD);
}

/* r[i] lane j becomes r[j] lane i: 64 shuffles. */
static inline __attribute__((always_inline)) void di_avx512_turn(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
        di_avx512_turn_rows(r + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        di_avx512_turn_parts(r, j, t);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

#endif
