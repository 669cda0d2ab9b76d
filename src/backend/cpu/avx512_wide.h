/* What the files of the AVX-512 engine of wide products share: sixteen rows of weights turned into lanes, and the form
 * in which rows are packed. Private to avx512_*wide.c.
 *
 * Weights are stored row by row, so a lane's next weight lies a whole row away. Sixty-four bytes of each of 16 rows
 * make a unit; turned (avx512_turn.h), vector d of a unit has the d-th four bytes of row o in lane o. */
#ifndef DI_CPU_AVX512_WIDE_H
#define DI_CPU_AVX512_WIDE_H

#include "avx512_turn.h"
#include "wide.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,
    ROWS_FUSED = 8, /* rows of activations that are multiplied as weights are decoded */
    UNIT_BYTES = 64,
    X_SHIFT_E4M3 = 64
};

#define UNIT_GROUPS(kind) ((kind) == DI_F4_E2M1 ? 4 : (kind) == DI_F8_E4M3 ? 2 : 1)
#define GROUP_DWORDS(kind) (16 / UNIT_GROUPS(kind)) /* of a unit */

/* ---- integers of a row ----
 *
 * E2M1 weights are halves of integers up to 12 and QA's codes integers of at most 18 bits times a power of two, mostly
 * far fewer bits. Where every partial sum of a group's products fits in fp32's 24 bits, no order of adding can round,
 * and integer dot products give the very bits of the two chains (avx512_vnni_wide.c). Packing decides that group by
 * group. */
typedef enum int_class {
    INT_ONE = 0, /* one 16-bit number a value: `low` alone */
    INT_TWO = 1, /* low + 256 * high */
    INT_NONE = 3 /* sums might round: the floats are multiplied in order */
} int_class;     /* the class of several rows is all their bits */

/* ---- packed rows ----
 *
 * Rows are packed in bands of 8, which a kernel multiplies side by side; the last band has what is left. Within a band
 * the rows of a group follow one another: a kernel made for so many rows reads all of a group at fixed distances from
 * one address, and the whole band in one stream.
 *
 *     floats   [group][row][32]   each band's at 8 * band * n_in
 *     low      [group][row][16]   dword 4*q + j holds inputs 8*q + j and 8*q + 4 + j
 *     high     [group][row][16]   of INT_TWO, else zeros
 *     units    [group][row]       the value of 1 times a half
 *     classes  [group]            of all rows of the band */
typedef struct band {
    float *floats;
    int32_t *low, *high; /* these and what follows: where the weights are E2M1 and there is VNNI */
    float *units;
    uint8_t *classes;
} band;

/* The rows that belong to band i. */
INLINE int band_rows(int64_t i, int64_t n_rows) {
    return (int)DI_MIN(n_rows - i * ROWS_FUSED, ROWS_FUSED);
}

/* Band i of n_rows packed rows. */
INLINE band band_at(const void *packed, int64_t i, int64_t n_rows, int64_t n_in) {
    int64_t n_groups = n_in / 32, row = i * ROWS_FUSED;
    float *floats = (float *)(uintptr_t)packed;
    int32_t *low = (int32_t *)(void *)(floats + n_rows * n_in), *high = low + n_rows * n_groups * 16;
    float *units = (float *)(void *)(high + n_rows * n_groups * 16);
    uint8_t *classes = (uint8_t *)(units + n_rows * n_groups);
    return (band){floats + row * n_in, low + row * n_groups * 16, high + row * n_groups * 16, units + row * n_groups,
                  classes + i * n_groups};
}

/* ---- sixteen rows of weights ---- */

typedef struct strip {
    const uint8_t *rows; /* the first of 16 rows */
    int64_t ld;          /* bytes of a row */
    int64_t n_groups;
    const uint8_t *scale[2]; /* scale rows; E2M1: of the first of the 16; E4M3: of the lanes before `split` and after */
    int split;
    const uint8_t *ahead, *ahead_scale; /* prefetched while this strip is read */
} strip;

/* ---- turning ----
 *
 * A unit is turned in eight steps, which kernels lay between the products of the unit before: shuffles have one port,
 * and all 64 in a row would leave the other one idle. Steps 0 to 3 shuffle four rows each, steps 4 to 7 what these have
 * left of every fourth dword. */
enum { TURN_STEPS = 8 };

typedef struct turning {
    const strip *s;
    int64_t unit;
    __mmask16 is_there; /* dwords of a row; in the last unit as many as the groups that are left, and zeros */
    __m512i half[16];   /* between the steps */
    __m512i most;       /* by watch, of all rows */
} turning;

INLINE void turn_start(di_dtype kind, const strip *s, int64_t unit, turning *t) {
    int64_t left = DI_MIN(s->n_groups - unit * UNIT_GROUPS(kind), UNIT_GROUPS(kind));
    t->s = s;
    t->unit = unit;
    t->is_there = (__mmask16)((1u << (left * GROUP_DWORDS(kind))) - 1u);
    t->most = _mm512_setzero_si512();
}

/* What is most unusual about the codes so far; E2M1 has none that are. */
INLINE __m512i watch(di_dtype kind, __m512i codes, __m512i most) {
    if (kind == DI_F8_E4M3) {
        /* Twice the magnitude less 16 wraps around for small codes and is largest for NaN. */
        __m512i v = _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(16));
        return _mm512_max_epu8(most, v);
    }
    if (kind == DI_BF16) {
        __m512i a = _mm512_and_si512(codes, _mm512_set1_epi16(0x7FFF));
        __mmask32 is_there = _mm512_test_epi16_mask(a, a);
        return _mm512_max_epu16(most,
                                _mm512_maskz_sub_epi16(is_there, a, _mm512_set1_epi16((short)(DI_WIDE_W_MIN << 7))));
    }
    return most;
}

/* The lines of the unit after into the first-level cache, and of the strip to come into the second. */
INLINE void prefetch_rows(const strip *s, int64_t unit, int first) {
    const char *near = (const char *)s->rows + first * s->ld + (unit + 1) * UNIT_BYTES;
    for (int i = 0; i < 4; i++, near += s->ld)
        _mm_prefetch(near, _MM_HINT_T0);
    if (!s->ahead)
        return;
    const char *far = (const char *)s->ahead + (unit * LANES + first) * UNIT_BYTES;
    for (int i = 0; i < 4; i++)
        _mm_prefetch(far + i * UNIT_BYTES, _MM_HINT_T1);
}

/* out[d] lane o: dword d of row o, when all steps are done. */
INLINE void turn_step(di_dtype kind, turning *t, int step, __m512i out[16]) {
    if (step >= 4) {
        di_avx512_turn_parts(t->half, step - 4, out);
        return;
    }
    const uint8_t *p = t->s->rows + 4 * step * t->s->ld + t->unit * UNIT_BYTES;
    __m512i r[4];
    prefetch_rows(t->s, t->unit, 4 * step);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, p += t->s->ld) {
        r[i] = _mm512_maskz_loadu_epi32(t->is_there, p);
        t->most = watch(kind, r[i], t->most);
    }
    di_avx512_turn_rows(r);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        t->half[4 * step + i] = r[i];
}

/* Steps [first, end). */
INLINE void turn_steps(di_dtype kind, turning *t, int first, int end, __m512i out[16]) {
    for (int i = first; i < end; i++)
        turn_step(kind, t, i, out);
}

/* Scales of up to 16 groups from group g on, as the factor of the group's sum; false: one is out of range. */
INLINE bool load_scales(di_dtype kind, const strip *s, int64_t g, int n, __m512 *factor) {
    if (kind == DI_F4_E2M1) {
        __mmask16 is_there = (__mmask16)((1u << n) - 1u);
        __m512i r[4], q[4], bad = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) { /* rows i, 4+i, 8+i, 12+i */
            const uint8_t *p = s->scale[0] + i * s->n_groups + g;
            const __m128i fill = _mm_set1_epi8(127);
            __m512i v = _mm512_castsi128_si512(_mm_mask_loadu_epi8(fill, is_there, p));
            v = _mm512_inserti32x4(v, _mm_mask_loadu_epi8(fill, is_there, p + 4 * s->n_groups), 1);
            v = _mm512_inserti32x4(v, _mm_mask_loadu_epi8(fill, is_there, p + 8 * s->n_groups), 2);
            r[i] = _mm512_inserti32x4(v, _mm_mask_loadu_epi8(fill, is_there, p + 12 * s->n_groups), 3);
            bad = _mm512_max_epu8(bad, _mm512_sub_epi8(r[i], _mm512_set1_epi8(DI_WIDE_SCALE_MIN)));
        }
        /* Vector j: the four scales from g + 4*j on, of row o in lane o. */
        __m512i t0 = _mm512_unpacklo_epi32(r[0], r[1]), t1 = _mm512_unpacklo_epi32(r[2], r[3]);
        __m512i t2 = _mm512_unpackhi_epi32(r[0], r[1]), t3 = _mm512_unpackhi_epi32(r[2], r[3]);
        q[0] = _mm512_unpacklo_epi64(t0, t1);
        q[1] = _mm512_unpackhi_epi64(t0, t1);
        q[2] = _mm512_unpacklo_epi64(t2, t3);
        q[3] = _mm512_unpackhi_epi64(t2, t3);
        for (int i = 0; i < 16; i++) {
            __m512i top = _mm512_slli_epi32(q[i / 4], (unsigned)(24 - 8 * (i % 4)));
            top = _mm512_and_si512(_mm512_srli_epi32(top, 1), _mm512_set1_epi32(0x7F800000));
            factor[i] = _mm512_castsi512_ps(top);
        }
        return _mm512_cmpgt_epu8_mask(bad, _mm512_set1_epi8((char)(DI_WIDE_SCALE_MAX - DI_WIDE_SCALE_MIN))) == 0;
    }
    if (kind == DI_F8_E4M3) {
        bool is_fine = true;
        __mmask16 is_second = (__mmask16)(0xFFFFu << s->split);
        for (int i = 0; i < n; i++) {
            int a = s->scale[0][g + i], b = s->scale[1][g + i];
            is_fine &= a >= DI_WIDE_SCALE_MIN && a <= DI_WIDE_SCALE_MAX;
            is_fine &= b >= DI_WIDE_SCALE_MIN && b <= DI_WIDE_SCALE_MAX;
            __m512i e = _mm512_mask_set1_epi32(_mm512_set1_epi32(a), is_second, b);
            e = _mm512_add_epi32(e, _mm512_set1_epi32(120 - X_SHIFT_E4M3));
            factor[i] = _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
        }
        return is_fine;
    }
    for (int i = 0; i < n; i++)
        factor[i] = _mm512_set1_ps(1.0f);
    return true;
}

/* ---- avx512_vnni_wide.c: E2M1 weights and rows with integers ---- */

/* Sixteen outputs of a band of n_rows; false at unusual scales. */
bool di_avx512_vnni_few(int n_rows, const strip *s, const band *x, float *out, int64_t ldo);
/* Thirty-two outputs of n_rows rows, from the first of bands[0] on. acc [n_rows][32] and work,
 * DI_AVX512_VNNI_WORK_BYTES, 64-byte aligned. */
bool di_avx512_vnni_many(const strip s[2], const band *bands, int64_t n_rows, void *work, float *acc);
enum { DI_AVX512_VNNI_WORK_BYTES = 9 * 1024 };

#endif
