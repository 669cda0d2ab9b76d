/* E2M1 weights on AVX-512 VNNI: integer dot products where no order of adding can round.
 *
 * A weight is half an integer up to 12 and a row's group of 32 QA codes is integers of 16 bits, or twice 8 and 10,
 * times a power of two; packing has made sure that every partial sum of the group's products fits in 24 bits. Then the
 * two chains of model.md 0.3 never round, their sum rounds once, and the sum of all 32 products as an integer,
 * converted once, is the same float. One instruction multiplies 32 pairs where a fused multiply-add of floats takes 16,
 * and the lookup of weights yields 32 at a time.
 *
 * A group whose sums might round is multiplied as floats in their order, made from the same looked-up integers. */
#include "avx512_wide.h"

/* Pairs of weights of 16 outputs, times two, as 16-bit integers: vector 4*q + j has inputs 8*q + j and 8*q + 4 + j. */
INLINE void look_up(const __m512i q[4], __m512i pair[16]) {
    const __m256i half = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m512i table = _mm512_broadcast_i64x4(half); /* twice, so that a lookup ignores bit 4 */
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m512i at = i % 4 ? _mm512_srli_epi16(q[i / 4], (unsigned)(4 * (i % 4))) : q[i / 4];
        pair[i] = _mm512_permutexvar_epi16(at, table);
    }
}

/* Weight k of a group as a float. */
INLINE __m512 float_of(const __m512i *pair, int k) {
    __m512i v = pair[k / 8 * 4 + k % 4];
    v = k % 8 < 4 ? _mm512_slli_epi32(v, 16) : v;
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 16)), _mm512_set1_ps(0.5f));
}

/* One group of 16 outputs and n_rows <= 8 rows: acc += its sum. x: the group of the first row. */
INLINE void int_products(int n_rows, bool is_two, const __m512i *pair, __m512 factor, const int_group *x, int64_t ldi,
                         const float *unit, __m512 *acc) {
    /* One row's sum is cut in two, so that it doesn't wait for itself. */
    const bool is_cut = n_rows <= 2;
    __m512i low[2][ROWS_FUSED], high[ROWS_FUSED];
    for (int i = 0; i < n_rows; i++)
        low[0][i] = low[1][i] = high[i] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            const int_group *at = (const int_group *)(const void *)((const uint8_t *)x + i * ldi);
            __m512i *to = &low[is_cut ? p % 2 : 0][i];
            *to = _mm512_dpwssd_epi32(*to, pair[p], _mm512_set1_epi32(at->low[p]));
            if (is_two)
                high[i] = _mm512_dpwssd_epi32(high[i], pair[p], _mm512_set1_epi32(at->high[p]));
        }
    }
    for (int i = 0; i < n_rows; i++) {
        __m512i sum = is_cut ? _mm512_add_epi32(low[0][i], low[1][i]) : low[0][i];
        if (is_two)
            sum = _mm512_add_epi32(sum, _mm512_slli_epi32(high[i], 8));
        const float *u = (const float *)(const void *)((const uint8_t *)unit + i * ldi);
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(factor, _mm512_set1_ps(*u)), acc[i]);
    }
}

INLINE void float_products(int n_rows, const __m512i *pair, __m512 factor, const float *x, int64_t ldf, __m512 *acc) {
    __m512 even[ROWS_FUSED], odd[ROWS_FUSED];
    for (int i = 0; i < n_rows; i++)
        even[i] = odd[i] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int k = 0; k < 32; k += 2) {
        __m512 a = float_of(pair, k), b = float_of(pair, k + 1);
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            even[i] = _mm512_fmadd_ps(a, _mm512_set1_ps(x[i * ldf + k]), even[i]);
            odd[i] = _mm512_fmadd_ps(b, _mm512_set1_ps(x[i * ldf + k + 1]), odd[i]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        acc[i] = _mm512_fmadd_ps(_mm512_add_ps(even[i], odd[i]), factor, acc[i]);
}

/* The class of a group for all of n_rows rows together. */
INLINE int class_of(int n_rows, const uint8_t *classes, int64_t ldi) {
    int most = 0;
    for (int i = 0; i < n_rows; i++)
        most |= classes[i * ldi];
    return most;
}

/* ---- up to 8 rows ---- */

INLINE void few_group(int n_rows, const __m512i q[4], __m512 factor, const packed_rows *x, int64_t g, int64_t n_groups,
                      __m512 *acc) {
    __m512i pair[16];
    look_up(q, pair);
    int kind = class_of(n_rows, int_classes(x->ints, n_groups) + g, x->ldi);
    const int_group *ints = int_groups(x->ints) + g;
    const float *unit = int_units(x->ints, n_groups) + g, *floats = x->floats + 32 * g;
    if (__builtin_expect(kind == INT_ONE, 1))
        int_products(n_rows, false, pair, factor, ints, x->ldi, unit, acc);
    else if (kind == INT_TWO)
        int_products(n_rows, true, pair, factor, ints, x->ldi, unit, acc);
    else
        float_products(n_rows, pair, factor, floats, x->ldf, acc);
}

INLINE bool few(int n_rows, const strip *s, const packed_rows *x, float *out, int64_t ldo) {
    const int unit_groups = UNIT_GROUPS(DI_F4_E2M1);
    __m512 acc[ROWS_FUSED], factor[16];
    for (int i = 0; i < n_rows; i++)
        acc[i] = _mm512_setzero_ps();
    for (int64_t g = 0; g < s->n_groups; g += unit_groups) {
        int n = (int)DI_MIN(s->n_groups - g, unit_groups);
        __m512i r[16];
        if (g % 16 == 0 && !load_scales(DI_F4_E2M1, s, g, (int)DI_MIN(s->n_groups - g, 16), factor))
            return false;
        load_unit(DI_F4_E2M1, s, g / unit_groups, r);
        prefetch_unit(s, g / unit_groups);
        di_avx512_turn(r);
        for (int i = 0; i < n; i++)
            few_group(n_rows, r + 4 * i, factor[(g + i) % 16], x, g + i, s->n_groups, acc);
    }
    for (int i = 0; i < n_rows; i++)
        _mm512_storeu_ps(out + i * ldo, acc[i]);
    return true;
}

bool di_avx512_vnni_few(int n_rows, const strip *s, const packed_rows *x, float *out, int64_t ldo) {
    switch (n_rows) {
    case 1:
        return few(1, s, x, out, ldo);
    case 2:
        return few(2, s, x, out, ldo);
    case 3:
        return few(3, s, x, out, ldo);
    case 4:
        return few(4, s, x, out, ldo);
    case 5:
        return few(5, s, x, out, ldo);
    case 6:
        return few(6, s, x, out, ldo);
    case 7:
        return few(7, s, x, out, ldo);
    default:
        return few(8, s, x, out, ldo);
    }
}

/* ---- more rows share a piece of 32 outputs x 128 inputs ---- */

/* A piece is one unit of weights. */
enum { PIECE_GROUPS = UNIT_GROUPS(DI_F4_E2M1) };

typedef struct int_piece {
    _Alignas(64) __m512i pair[PIECE_GROUPS][2][16]; /* [group][half] */
    __m512 factor[PIECE_GROUPS][2];
} int_piece;

_Static_assert(sizeof(int_piece) <= DI_AVX512_VNNI_WORK_BYTES, "a piece fits its room");

/* All groups of a piece for n_rows <= 8 rows, of which x and acc are the first. */
INLINE void add_ints(int n_rows, const int_piece *p, int n, const packed_rows *x, int64_t g0, int64_t n_groups,
                     float *acc) {
    enum { LDA = 2 * LANES };
    for (int g = 0; g < n; g++) {
        int64_t at = g0 + g;
        int kind = class_of(n_rows, int_classes(x->ints, n_groups) + at, x->ldi);
        const int_group *ints = int_groups(x->ints) + at;
        const float *unit = int_units(x->ints, n_groups) + at;
        for (int half = 0; half < 2; half++) {
            const __m512i *pair = p->pair[g][half];
            __m512 sums[ROWS_FUSED];
            for (int i = 0; i < n_rows; i++)
                sums[i] = _mm512_load_ps(acc + i * LDA + half * LANES);
            if (__builtin_expect(kind == INT_ONE, 1))
                int_products(n_rows, false, pair, p->factor[g][half], ints, x->ldi, unit, sums);
            else if (kind == INT_TWO)
                int_products(n_rows, true, pair, p->factor[g][half], ints, x->ldi, unit, sums);
            else
                float_products(n_rows, pair, p->factor[g][half], x->floats + 32 * at, x->ldf, sums);
            for (int i = 0; i < n_rows; i++)
                _mm512_store_ps(acc + i * LDA + half * LANES, sums[i]);
        }
    }
}

bool di_avx512_vnni_many(const strip s[2], const packed_rows *x, int64_t n_rows, void *work, float *acc) {
    int_piece *p = work;
    int64_t n_groups = s[0].n_groups;
    __m512 factor[2][16];
    memset(acc, 0, (size_t)n_rows * 2 * LANES * sizeof *acc);
    for (int64_t g = 0; g < n_groups; g += PIECE_GROUPS) {
        int n = (int)DI_MIN(n_groups - g, PIECE_GROUPS);
        for (int half = 0; half < 2; half++) {
            if (g % 16 == 0 && !load_scales(DI_F4_E2M1, &s[half], g, (int)DI_MIN(n_groups - g, 16), factor[half]))
                return false;
            __m512i r[16];
            load_unit(DI_F4_E2M1, &s[half], g / PIECE_GROUPS, r);
            di_avx512_turn(r);
            for (int i = 0; i < n; i++) {
                look_up(r + 4 * i, p->pair[i][half]);
                p->factor[i][half] = factor[half][(g + i) % 16];
            }
        }
        for (int64_t i = 0; i < n_rows;) {
            packed_rows at = {x->floats + i * x->ldf, x->ldf, x->ints + i * x->ldi, x->ldi};
            int64_t left = n_rows - i;
            float *to = acc + i * 2 * LANES;
            if (left >= 8)
                add_ints(8, p, n, &at, g, n_groups, to), i += 8;
            else if (left >= 4)
                add_ints(4, p, n, &at, g, n_groups, to), i += 4;
            else if (left >= 2)
                add_ints(2, p, n, &at, g, n_groups, to), i += 2;
            else
                add_ints(1, p, n, &at, g, n_groups, to), i += 1;
        }
    }
    return true;
}
