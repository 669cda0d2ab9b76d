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
    ROW_PAD = 16, /* floats between packed rows: keeps them off one another's cache sets */
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

/* One group of 32 inputs of one row: dword 4*q + j holds inputs 8*q + j and 8*q + 4 + j. */
typedef struct int_group {
    int32_t low[16], high[16];
} int_group;

/* One row's integers: groups, then the value of each group's 1 times a half, then classes. */
static inline size_t int_row_bytes(int64_t n_groups) {
    return di_cpu_piece((size_t)n_groups * (sizeof(int_group) + sizeof(float) + 1)) + 64;
}
static inline const int_group *int_groups(const uint8_t *row) {
    return (const int_group *)(const void *)row;
}
static inline const float *int_units(const uint8_t *row, int64_t n_groups) {
    return (const float *)(const void *)(row + (size_t)n_groups * sizeof(int_group));
}
static inline const uint8_t *int_classes(const uint8_t *row, int64_t n_groups) {
    return row + (size_t)n_groups * (sizeof(int_group) + sizeof(float));
}

/* Rows as a kernel gets them. */
typedef struct packed_rows {
    const float *floats;
    int64_t ldf; /* floats between rows */
    const uint8_t *ints;
    int64_t ldi; /* bytes between rows */
} packed_rows;

/* ---- sixteen rows of weights ---- */

typedef struct strip {
    const uint8_t *rows; /* the first of 16 rows */
    int64_t ld;          /* bytes of a row */
    int64_t n_groups;
    const uint8_t *scale[2]; /* scale rows; E2M1: of the first of the 16; E4M3: of the lanes before `split` and after */
    int split;
    const uint8_t *ahead, *ahead_scale; /* prefetched while this strip is read */
} strip;

/* A unit as it is stored: 64 bytes of each row, or as many groups as are left and the rest zeros. */
INLINE void load_unit(di_dtype kind, const strip *s, int64_t unit, __m512i r[16]) {
    const uint8_t *p = s->rows + unit * UNIT_BYTES;
    int64_t left = s->n_groups - unit * UNIT_GROUPS(kind);
    if (__builtin_expect(left >= UNIT_GROUPS(kind), 1)) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++, p += s->ld)
            r[i] = _mm512_loadu_si512(p);
    } else {
        __mmask16 is_there = (__mmask16)((1u << (left * GROUP_DWORDS(kind))) - 1u);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++, p += s->ld)
            r[i] = _mm512_maskz_loadu_epi32(is_there, p);
    }
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

/* The lines of the strip to come into the second-level cache, and those of the next unit from there into the first. */
INLINE void prefetch_unit(const strip *s, int64_t unit) {
    const char *near = (const char *)s->rows + (unit + 1) * UNIT_BYTES;
    for (int i = 0; i < LANES; i++, near += s->ld)
        _mm_prefetch(near, _MM_HINT_T0);
    if (!s->ahead)
        return;
    const char *far = (const char *)s->ahead + unit * (LANES * UNIT_BYTES);
    for (int i = 0; i < LANES; i++)
        _mm_prefetch(far + i * UNIT_BYTES, _MM_HINT_T1);
}

/* ---- avx512_vnni_wide.c: E2M1 weights and rows with integers ---- */

/* Sixteen outputs of n_rows <= 8 rows; false at unusual scales. */
bool di_avx512_vnni_few(int n_rows, const strip *s, const packed_rows *x, float *out, int64_t ldo);
/* Thirty-two outputs of any number of rows. acc [n_rows][32] and work, DI_AVX512_VNNI_WORK_BYTES, 64-byte aligned. */
bool di_avx512_vnni_many(const strip s[2], const packed_rows *x, int64_t n_rows, void *work, float *acc);
enum { DI_AVX512_VNNI_WORK_BYTES = 9 * 1024 };

#endif
