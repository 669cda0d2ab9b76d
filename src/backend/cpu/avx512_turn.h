/* Sixteen rows of sixteen dwords, turned: the one shuffle network of the engines of wide products. Private to
 * avx512_*.c and amx_*.c, which are compiled for AVX-512. */
#ifndef DI_CPU_AVX512_TURN_H
#define DI_CPU_AVX512_TURN_H

#include <immintrin.h>

/* r[i] lane j becomes r[j] lane i: 64 shuffles. */
static inline __attribute__((always_inline)) void di_avx512_turn(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* lane part L of r[i + j]: column 4*L + j of rows i..i+3 */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) { /* even and odd parts of columns j of all rows, then each apart */
        __m512i even_a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        __m512i even_b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        __m512i odd_a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
        __m512i odd_b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
        t[j] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(even_a, even_b, 0xDD);
        t[12 + j] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

#endif
