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

/* sum += pair * *x. The compiler has no form of it that broadcasts as it loads, and would take two instructions. */
INLINE __m512i dot(__m512i sum, __m512i pair, const int32_t *x) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(pair), "m"(*x));
    return sum;
}

/* Pairs of weights of 16 outputs, times two, as 16-bit integers: vector 4*q + j has inputs 8*q + j and 8*q + 4 + j. */
INLINE __m512i pair_of(const __m512i q[4], int p) {
    const __m256i half = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m512i table = _mm512_broadcast_i64x4(half); /* twice, so that a lookup ignores bit 4 */
    __m512i at = p % 4 ? _mm512_srli_epi16(q[p / 4], (unsigned)(4 * (p % 4))) : q[p / 4];
    return _mm512_permutexvar_epi16(at, table);
}
INLINE void look_up(const __m512i q[4], __m512i pair[16]) {
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++)
        pair[p] = pair_of(q, p);
}

/* Weight k of a group as a float. */
INLINE __m512 float_of(const __m512i *pair, int k) {
    __m512i v = pair[k / 8 * 4 + k % 4];
    v = k % 8 < 4 ? _mm512_slli_epi32(v, 16) : v;
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 16)), _mm512_set1_ps(0.5f));
}

/* Group g of a band, whose first row of it is row `at` of all. */
INLINE band group_at(const band *x, int64_t g, int64_t at) {
    band group = {x->floats + 32 * at, x->low + 16 * at, x->high + 16 * at, x->units + at, x->classes + g};
    /* One address a group and offsets, not an address for every input. */
    __asm__("" : "+r"(group.floats), "+r"(group.low), "+r"(group.high));
    return group;
}

/* One group of 16 outputs and n_rows <= 8 rows: acc += its sum. x: where the group of the first row lies. */
INLINE void int_products(int n_rows, bool is_two, const __m512i *pair, __m512 factor, const band *x, __m512 *acc) {
    /* One row's sum is cut in two, so that it doesn't wait for itself. */
    const bool is_cut = n_rows <= 2;
    __m512i low[2][ROWS_FUSED], high[ROWS_FUSED];
    for (int i = 0; i < n_rows; i++)
        low[0][i] = low[1][i] = high[i] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            __m512i *to = &low[is_cut ? p % 2 : 0][i];
            *to = dot(*to, pair[p], x->low + 16 * i + p);
            if (is_two)
                high[i] = dot(high[i], pair[p], x->high + 16 * i + p);
        }
    }
    for (int i = 0; i < n_rows; i++) {
        __m512i sum = is_cut ? _mm512_add_epi32(low[0][i], low[1][i]) : low[0][i];
        if (is_two)
            sum = _mm512_add_epi32(sum, _mm512_slli_epi32(high[i], 8));
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(factor, _mm512_set1_ps(x->units[i])), acc[i]);
    }
}

INLINE void float_products(int n_rows, const __m512i *pair, __m512 factor, const float *x, __m512 *acc) {
    __m512 even[ROWS_FUSED], odd[ROWS_FUSED];
    for (int i = 0; i < n_rows; i++)
        even[i] = odd[i] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int k = 0; k < 32; k += 2) {
        __m512 a = float_of(pair, k), b = float_of(pair, k + 1);
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            even[i] = _mm512_fmadd_ps(a, _mm512_set1_ps(x[32 * i + k]), even[i]);
            odd[i] = _mm512_fmadd_ps(b, _mm512_set1_ps(x[32 * i + k + 1]), odd[i]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        acc[i] = _mm512_fmadd_ps(_mm512_add_ps(even[i], odd[i]), factor, acc[i]);
}

/* Group g of n_rows rows of a band of `n`, from row i on. */
INLINE void piece_products(int n_rows, const __m512i *pair, __m512 factor, const band *x, int64_t g, int n, int i,
                           __m512 *acc) {
    band group = group_at(x, g, g * n + i);
    int kind = *group.classes;
    if (__builtin_expect(kind == INT_ONE, 1))
        int_products(n_rows, false, pair, factor, &group, acc);
    else if (kind == INT_TWO)
        int_products(n_rows, true, pair, factor, &group, acc);
    else
        float_products(n_rows, pair, factor, group.floats, acc);
}

/* ---- up to 8 rows ---- */

/* A group whose weights are one integer each, looked up as they are multiplied. Steps `step` and the one after of
 * `next` go between. */
INLINE void low_products(int n_rows, const __m512i q[4], __m512 factor, const band *x, turning *next, int step,
                         __m512i *turned, __m512 *acc) {
    /* Few rows' sums are cut in two, so that they don't wait for themselves. */
    const bool is_cut = n_rows <= 4;
    __m512i sum[2][ROWS_FUSED];
    for (int i = 0; i < n_rows; i++)
        sum[0][i] = sum[1][i] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
        __m512i pair = pair_of(q, p);
#pragma GCC unroll 8
        for (int i = 0; i < n_rows; i++) {
            __m512i *to = &sum[is_cut ? p % 2 : 0][i];
            *to = dot(*to, pair, x->low + 16 * i + p);
        }
        if (p % 8 == 7)
            turn_step(DI_F4_E2M1, next, step + p / 8, turned);
    }
    for (int i = 0; i < n_rows; i++) {
        __m512i all = is_cut ? _mm512_add_epi32(sum[0][i], sum[1][i]) : sum[0][i];
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(factor, _mm512_set1_ps(x->units[i])), acc[i]);
    }
}

INLINE void products(int n_rows, const __m512i q[4], __m512 factor, const band *x, int64_t g, turning *next, int step,
                     __m512i *turned, __m512 *acc) {
    band group = group_at(x, g, g * n_rows);
    int kind = *group.classes;
    if (__builtin_expect(kind == INT_ONE, 1)) {
        low_products(n_rows, q, factor, &group, next, step, turned, acc);
        return;
    }
    __m512i pair[16];
    look_up(q, pair);
    if (kind == INT_TWO)
        int_products(n_rows, true, pair, factor, &group, acc);
    else
        float_products(n_rows, pair, factor, group.floats, acc);
    turn_steps(DI_F4_E2M1, next, step, step + 2, turned);
}

INLINE bool few(int n_rows, const strip *s, const band *x, float *out, int64_t ldo) {
    const int unit_groups = UNIT_GROUPS(DI_F4_E2M1);
    const int64_t n_units = DI_CEIL_DIV(s->n_groups, unit_groups);
    __m512 acc[ROWS_FUSED], factor[16];
    __m512i turned[2][16];
    turning t;
    for (int i = 0; i < n_rows; i++)
        acc[i] = _mm512_setzero_ps();
    turn_start(DI_F4_E2M1, s, 0, &t);
    turn_steps(DI_F4_E2M1, &t, 0, TURN_STEPS, turned[0]);
    for (int64_t u = 0; u < n_units; u++) {
        int64_t g = u * unit_groups;
        int n = (int)DI_MIN(s->n_groups - g, unit_groups);
        if (g % 16 == 0 && !load_scales(DI_F4_E2M1, s, g, (int)DI_MIN(s->n_groups - g, 16), factor))
            return false;
        turn_start(DI_F4_E2M1, s, DI_MIN(u + 1, n_units - 1), &t); /* the last is turned twice */
#pragma GCC unroll 4
        for (int i = 0; i < unit_groups; i++) {
            if (i < n)
                products(n_rows, turned[u % 2] + 4 * i, factor[(g + i) % 16], x, g + i, &t, 2 * i, turned[(u + 1) % 2],
                         acc);
            else
                turn_steps(DI_F4_E2M1, &t, 2 * i, 2 * i + 2, turned[(u + 1) % 2]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        _mm512_storeu_ps(out + i * ldo, acc[i]);
    return true;
}

bool di_avx512_vnni_few(int n_rows, const strip *s, const band *x, float *out, int64_t ldo) {
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

/* All groups of a piece for n_rows <= 8 rows of a band of n, from row `first` on; acc: of that row. */
INLINE void add_ints(int n_rows, const int_piece *p, int n_groups, const band *x, int64_t g0, int n, int first,
                     float *acc) {
    enum { LDA = 2 * LANES };
    for (int g = 0; g < n_groups; g++) {
        for (int half = 0; half < 2; half++) {
            __m512 sums[ROWS_FUSED];
            for (int i = 0; i < n_rows; i++)
                sums[i] = _mm512_load_ps(acc + i * LDA + half * LANES);
            piece_products(n_rows, p->pair[g][half], p->factor[g][half], x, g0 + g, n, first, sums);
            for (int i = 0; i < n_rows; i++)
                _mm512_store_ps(acc + i * LDA + half * LANES, sums[i]);
        }
    }
}

bool di_avx512_vnni_many(const strip s[2], const band *bands, int64_t n_rows, void *work, float *acc) {
    int_piece *p = work;
    int64_t n_groups = s[0].n_groups;
    __m512 factor[2][16];
    memset(acc, 0, (size_t)n_rows * 2 * LANES * sizeof *acc);
    for (int64_t g = 0; g < n_groups; g += PIECE_GROUPS) {
        int n = (int)DI_MIN(n_groups - g, PIECE_GROUPS);
        for (int half = 0; half < 2; half++) {
            if (g % 16 == 0 && !load_scales(DI_F4_E2M1, &s[half], g, (int)DI_MIN(n_groups - g, 16), factor[half]))
                return false;
            turning t;
            __m512i r[16];
            turn_start(DI_F4_E2M1, &s[half], g / PIECE_GROUPS, &t);
            turn_steps(DI_F4_E2M1, &t, 0, TURN_STEPS, r);
            for (int i = 0; i < n; i++) {
                look_up(r + 4 * i, p->pair[i][half]);
                p->factor[i][half] = factor[half][(g + i) % 16];
            }
        }
        for (int64_t b = 0; b * ROWS_FUSED < n_rows; b++) {
            const band *x = &bands[b];
            int rows = band_rows(b, n_rows);
            float *to = acc + b * ROWS_FUSED * 2 * LANES;
            for (int i = 0; i < rows;) {
                int left = rows - i;
                float *at = to + i * 2 * LANES;
                if (left >= 8)
                    add_ints(8, p, n, x, g, rows, i, at), i += 8;
                else if (left >= 4)
                    add_ints(4, p, n, x, g, rows, i, at), i += 4;
                else if (left >= 2)
                    add_ints(2, p, n, x, g, rows, i, at), i += 2;
                else
                    add_ints(1, p, n, x, g, rows, i, at), i += 1;
            }
        }
    }
    return true;
}
