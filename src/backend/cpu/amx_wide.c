/* The engine of wide products on AMX: tiles of 16 outputs x 32 inputs of weights times 32 inputs x up to 16 rows.
 *
 * One tile product sums 32 inputs in the order of di_dot32, bit for bit (model.md 0.3), whatever the mode of the
 * thread. Weights are the left operand, so that they are decoded to bf16 row by row as they are stored; rows of
 * activations are the right one, packed as pairs of inputs:
 *
 *     packed rows:  [tile of 16 rows][group of 32 inputs][16 pairs][rows of the tile][2]
 *     decoded weights: [group][half][16 outputs][32 inputs], 1 KiB each        sums: [16 outputs][rows of the tile]
 *
 * Up to 32 rows (stream): the sums of 32 outputs stay in tiles while weights go by once; decoding the next 64 bytes of
 * each row is laid between the tile products of the last, because those take their time in a unit of their own.
 *
 * More rows (panes): 512 inputs of 32 outputs are decoded at a time and meet all rows, two tiles of rows by two of
 * outputs; sums wait in memory between one 512 inputs and the next. Rows of 512 inputs stay in the second-level cache
 * while all outputs of the block pass by. */
#include <immintrin.h>

#include "amx_tiles.h"
#include "avx512_turn.h"
#include "wide.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    HALF = 16, /* outputs of a tile */
    TILE_BYTES = 1024,
    UNIT_BYTES = 64, /* of each row of weights, decoded together: 4, 2 or 1 groups */
    PANE_GROUPS = 16,
    SCALES = DI_WIDE_SCALE_MAX - DI_WIDE_SCALE_MIN + 1,
    ROWS_MAX = 512,
    OUTS_MAX = 256
};

/* Tiles by number. */
#define C00 0 /* outputs 0..15 of 32, first tile of rows */
#define C10 1
#define C01 2 /* second tile of rows */
#define C11 3
#define A0 4
#define A1 5
#define B0 6
#define B1 7

/* ---- configuration ---- */

/* For tiles of n0 and n1 rows of activations (0: no second). */
static void configure(int n0, int n1) {
    di_tile_config c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    const int n[8] = {n0, n0, n1, n1, HALF, HALF, n0, n1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = n[i] ? HALF : 0;
        c.row_bytes[i] = (uint16_t)(4 * n[i]);
    }
    di_tile_configure(&c);
}

/* ---- words ---- */

/* m * 2^-9 as bf16 for m = 0..7: E4M3 codes without an exponent. */
INLINE __m512i small_codes(void) {
    const __m128i values = _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
    return _mm512_broadcast_i32x4(values);
}

/* 32 E4M3 codes, sign-extended, times 2^(scale - 127), as bf16. In the fast form there are no codes below 8. */
INLINE __m512i e4m3_words(__m512i c, __m512i exponent, __m512i small, bool is_fast) {
    __m512i t = _mm512_slli_epi16(c, 4); /* sign, exponent and mantissa in bf16's places */
    __m512i v = _mm512_add_epi16(_mm512_and_si512(t, _mm512_set1_epi16((short)0x87F0)), exponent);
    if (is_fast)
        return v;
    __mmask32 is_small = _mm512_testn_epi16_mask(c, _mm512_set1_epi16(0x78));
    v = _mm512_mask_permutexvar_epi16(v, is_small, c, small);
    return _mm512_or_si512(v, _mm512_and_si512(t, _mm512_set1_epi16((short)0x8000)));
}
INLINE __m512i e4m3_exponent(int scale) {
    return _mm512_set1_epi16((short)((120 + scale - 127) * 128));
}
INLINE __m512i e4m3_small(int scale) {
    __m512i s = small_codes();
    return _mm512_mask_add_epi16(s, _mm512_test_epi16_mask(s, s), s, _mm512_set1_epi16((short)((scale - 127) * 128)));
}

/* ---- packing ---- */

static size_t packed_bytes(int64_t n_rows, int64_t n_in) {
    return (size_t)n_rows * (size_t)n_in * sizeof(uint16_t);
}

/* 32 values of one row as bf16; *is_fine turns false at a NaN or a value out of range. */
INLINE __m512i row_words(const di_act *x, int64_t row, int64_t col, bool *is_fine) {
    int64_t at = row * x->stride + col;
    if (x->dtype == DI_BF16) {
        __m512i v = _mm512_loadu_si512((const uint16_t *)x->data + at);
        __m512i a = _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF));
        __m512i d = _mm512_sub_epi16(a, _mm512_set1_epi16((short)(DI_WIDE_X_MIN << 7)));
        __mmask32 is_far = _mm512_cmpge_epu16_mask(d, _mm512_set1_epi16((short)((DI_WIDE_X_MAX - DI_WIDE_X_MIN) << 7)));
        *is_fine &= _mm512_mask_test_epi16_mask(is_far, a, a) == 0;
        return v;
    }
    int scale = x->scale[row * (x->n_cols / 32) + col / 32];
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)((const uint8_t *)x->data + at)));
    __m512i a = _mm512_and_si512(c, _mm512_set1_epi16(0x7F));
    *is_fine &= scale >= DI_WIDE_X_MIN + 9 && scale <= DI_WIDE_X_MAX - 9;
    *is_fine &= _mm512_cmpeq_epi16_mask(a, _mm512_set1_epi16(0x7F)) == 0;
    return e4m3_words(c, e4m3_exponent(scale), e4m3_small(scale), false);
}

static bool pack(const di_wide_x *x, int64_t tile, int64_t g0, int64_t g1) {
    bool is_fine = true;
    int64_t r0 = tile * DI_WIDE_ROWS, n = DI_MIN(x->n_rows - r0, DI_WIDE_ROWS);
    uint8_t *out = (uint8_t *)x->packed + r0 * x->n_in * 2;
    __mmask16 is_there = (__mmask16)((1u << n) - 1u);
    for (int64_t g = g0; g < g1; g++) {
        __m512i r[16];
        for (int64_t i = 0; i < n; i++) {
            int64_t row = x->rows ? x->rows[r0 + i] : x->row0 + r0 + i;
            r[i] = row_words(x->x, row, x->col0 + 32 * g, &is_fine);
        }
        uint8_t *to = out + g * 64 * n;
        if (n == 1) {
            _mm512_storeu_si512(to, r[0]);
            continue;
        }
        for (int64_t i = n; i < 16; i++)
            r[i] = _mm512_setzero_si512();
        di_avx512_turn(r);
        for (int p = 0; p < 16; p++)
            _mm512_mask_storeu_epi32(to + p * 4 * n, is_there, r[p]);
    }
    return is_fine;
}

/* ---- weights ---- */

/* Sixteen rows of weights. */
typedef struct strip {
    const uint8_t *rows;
    int64_t ld; /* bytes of a row */
    int64_t n_groups;
    const uint8_t *scale[2]; /* E2M1: of the first row; E4M3: of the rows before `split` and after */
    int split;
} strip;

static strip strip_at(const di_mat *w, int64_t o) {
    int64_t ld = di_wide_row_bytes(w), n_groups = w->n_in / 32;
    strip s = {.rows = (const uint8_t *)w->data + o * ld, .ld = ld, .n_groups = n_groups, .split = HALF};
    if (w->dtype == DI_F4_E2M1) {
        s.scale[0] = w->scale + o * n_groups;
    } else if (w->dtype == DI_F8_E4M3) {
        s.scale[0] = s.scale[1] = w->scale + o / 32 * n_groups;
        if (o % 32 > HALF) {
            s.split = (int)(32 - o % 32);
            s.scale[1] += n_groups;
        }
    }
    return s;
}

/* E2M1's sixteen values for every scale that is taken, twice each, so that a lookup may ignore bit 4. */
typedef uint16_t e2m1_table[32];

static void e2m1_tables(e2m1_table *tables) {
    const __m256i half =
        _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, (short)0x8000, (short)0xBF00,
                          (short)0xBF80, (short)0xBFC0, (short)0xC000, (short)0xC040, (short)0xC080, (short)0xC0C0);
    const __m512i values = _mm512_broadcast_i64x4(half);
    const __mmask32 is_there = _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7FFF));
    for (int i = 0; i < SCALES; i++) {
        __m512i exponent = _mm512_set1_epi16((short)((DI_WIDE_SCALE_MIN + i - 127) * 128));
        _mm512_store_si512(tables[i], _mm512_mask_add_epi16(values, is_there, values, exponent));
    }
}

/* Decodes rows [r0, r1) of a strip, n_groups <= 4, 2 or 1 groups from g on, to [group][half] tiles at out; the groups'
 * tiles lie `step` bytes apart. False: something unusual. */
INLINE bool decode(di_dtype kind, const strip *s, int64_t g, int n_groups, int r0, int r1, const e2m1_table *tables,
                   uint8_t *out, size_t step) {
    bool is_fine = true;
    if (kind == DI_F4_E2M1) {
        for (int r = r0; r < r1; r++) {
            const uint8_t *p = s->rows + r * s->ld + 16 * g, *scale = s->scale[0] + r * s->n_groups + g;
            for (int i = 0; i < n_groups; i++) {
                unsigned at = (unsigned)scale[i] - DI_WIDE_SCALE_MIN;
                is_fine &= at < SCALES;
                at = at < SCALES ? at : 0;
                /* Word 2j looks at the low nibble of byte j, word 2j+1 at the high one. */
                __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p + 16 * i)));
                b = _mm512_or_si512(b, _mm512_slli_epi32(b, 12));
                __m512i v = _mm512_permutexvar_epi16(b, _mm512_load_si512(tables[at]));
                _mm512_store_si512(out + (size_t)i * step + 64 * r, v);
            }
        }
        return is_fine;
    }
    if (kind == DI_F8_E4M3) {
        __m512i most = _mm512_setzero_si512(), exponent[2][2];
        for (int i = 0; i < n_groups; i++) {
            for (int part = 0; part < 2; part++) {
                int scale = s->scale[part][g + i];
                is_fine &= scale >= DI_WIDE_SCALE_MIN && scale <= DI_WIDE_SCALE_MAX;
                exponent[i][part] = e4m3_exponent(scale);
            }
        }
        __mmask64 is_there = n_groups == 2 ? ~(__mmask64)0 : 0xFFFFFFFFu;
        for (int r = r0; r < r1; r++) {
            const uint8_t *p = s->rows + r * s->ld + 32 * g;
            /* Twice the magnitude less 16 wraps around for small codes and is largest for NaN. */
            __m512i codes = _mm512_mask_loadu_epi8(_mm512_set1_epi8(0x40), is_there, p);
            most = _mm512_max_epu8(most, _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(16)));
            for (int i = 0; i < n_groups; i++) {
                __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p + 32 * i)));
                __m512i v = e4m3_words(c, exponent[i][r >= s->split], c, true);
                _mm512_store_si512(out + (size_t)i * step + 64 * r, v);
            }
        }
        if (__builtin_expect(_mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8((char)0xEC)) == 0, 1))
            return is_fine;
        for (int r = r0; r < r1; r++) {
            for (int i = 0; i < n_groups; i++) {
                const uint8_t *p = s->rows + r * s->ld + 32 * (g + i);
                int scale = s->scale[r >= s->split][g + i];
                __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
                __m512i a = _mm512_and_si512(c, _mm512_set1_epi16(0x7F));
                is_fine &= _mm512_cmpeq_epi16_mask(a, _mm512_set1_epi16(0x7F)) == 0;
                __m512i v = e4m3_words(c, exponent[i][r >= s->split], e4m3_small(scale), false);
                _mm512_store_si512(out + (size_t)i * step + 64 * r, v);
            }
        }
        return is_fine;
    }
    /* bf16 is read where it is; only its exponents are looked at. */
    __m512i most = _mm512_setzero_si512();
    for (int r = r0; r < r1; r++) {
        for (int i = 0; i < n_groups; i++) {
            __m512i v = _mm512_loadu_si512(s->rows + r * s->ld + 64 * (g + i));
            __m512i a = _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF));
            __mmask32 is_there = _mm512_test_epi16_mask(a, a);
            most = _mm512_max_epu16(
                most, _mm512_maskz_sub_epi16(is_there, a, _mm512_set1_epi16((short)(DI_WIDE_W_MIN << 7))));
        }
    }
    const short limit = (short)((DI_WIDE_W_MAX - DI_WIDE_W_MIN) << 7);
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(limit)) == 0;
}

#define UNIT_GROUPS(kind) ((kind) == DI_F4_E2M1 ? 4 : (kind) == DI_F8_E4M3 ? 2 : 1)

/* ---- results ---- */

/* Sums [16 outputs][n rows] to columns of acc [row][lda]. */
static void put_rows(const float *sums, int n, float *acc, int64_t lda) {
    __m512i r[16];
    __mmask16 is_there = (__mmask16)((1u << n) - 1u);
    for (int o = 0; o < 16; o++)
        r[o] = _mm512_maskz_loadu_epi32(is_there, sums + o * n);
    di_avx512_turn(r);
    for (int i = 0; i < n; i++)
        _mm512_storeu_si512(acc + i * lda, r[i]);
}

/* ---- up to 32 rows ---- */

typedef struct stream_work {
    _Alignas(64) uint8_t tiles[2][4][2][TILE_BYTES]; /* [unit mod 2][group][half] */
    _Alignas(64) float sums[4][HALF * DI_WIDE_ROWS];
} stream_work;

/* Products of one group whose decoded weights lie at a0 and a1. */
INLINE void dot_group(bool has_second, const uint8_t *a0, const uint8_t *a1, int64_t lda, const uint8_t *b0, int n0,
                      const uint8_t *b1, int n1) {
    DI_TILE_LOAD(B0, b0, (size_t)(4 * n0));
    DI_TILE_LOAD(A0, a0, (size_t)lda);
    DI_TILE_DOT(C00, A0, B0);
    DI_TILE_LOAD(A1, a1, (size_t)lda);
    DI_TILE_DOT(C10, A1, B0);
    if (has_second) {
        DI_TILE_LOAD(B1, b1, (size_t)(4 * n1));
        DI_TILE_DOT(C01, A0, B1);
        DI_TILE_DOT(C11, A1, B1);
    }
}

INLINE bool stream(di_dtype kind, bool has_second, const strip s[2], const uint8_t *x0, int n0, const uint8_t *x1,
                   int n1, const e2m1_table *tables, const uint8_t *ahead, stream_work *work) {
    const int unit_groups = UNIT_GROUPS(kind);
    int64_t n_groups = s[0].n_groups, n_units = DI_CEIL_DIV(n_groups, unit_groups);
    bool is_fine = true;
    DI_TILE_ZERO(C00);
    DI_TILE_ZERO(C10);
    if (has_second) {
        DI_TILE_ZERO(C01);
        DI_TILE_ZERO(C11);
    }
    for (int64_t unit = 0; unit <= n_units; unit++) {
        int64_t g = unit * unit_groups, before = g - unit_groups;
        int n = (int)DI_MIN(n_groups - g, unit_groups);
        const int rows = 2 * HALF / unit_groups; /* decoded between two groups' products */
        if (ahead && unit < n_units) {
            for (int i = 0; i < 2 * HALF; i++)
                _mm_prefetch((const char *)ahead + unit * 2 * HALF * UNIT_BYTES + i * UNIT_BYTES, _MM_HINT_T1);
        }
        for (int i = 0; i < unit_groups; i++) {
            if (unit > 0 && before + i < n_groups) {
                int64_t at = before + i;
                const uint8_t *b0 = x0 + at * 64 * n0, *b1 = x1 + at * 64 * n1;
                if (kind == DI_BF16) {
                    dot_group(has_second, s[0].rows + 64 * at, s[1].rows + 64 * at, s[0].ld, b0, n0, b1, n1);
                } else {
                    uint8_t(*a)[TILE_BYTES] = work->tiles[(unit - 1) % 2][i];
                    dot_group(has_second, a[0], a[1], 64, b0, n0, b1, n1);
                }
            }
            if (unit == n_units)
                continue;
            /* A share of the 32 rows, of one half or both. */
            uint8_t *out = work->tiles[unit % 2][0][0];
            int r0 = i * rows, half = r0 / HALF;
            if (rows > HALF) {
                is_fine &= decode(kind, &s[0], g, n, 0, HALF, tables, out, 2 * TILE_BYTES);
                is_fine &= decode(kind, &s[1], g, n, 0, HALF, tables, out + TILE_BYTES, 2 * TILE_BYTES);
            } else {
                is_fine &= decode(kind, &s[half], g, n, r0 % HALF, r0 % HALF + rows, tables, out + half * TILE_BYTES,
                                  2 * TILE_BYTES);
            }
        }
    }
    DI_TILE_STORE(C00, work->sums[0], (size_t)(4 * n0));
    DI_TILE_STORE(C10, work->sums[1], (size_t)(4 * n0));
    if (has_second) {
        DI_TILE_STORE(C01, work->sums[2], (size_t)(4 * n1));
        DI_TILE_STORE(C11, work->sums[3], (size_t)(4 * n1));
    }
    return is_fine;
}

/* One function for each kind, so that each is compiled with its own constants. */
#define STREAM(name, kind)                                                                                             \
    static bool name(const strip s[2], const uint8_t *x0, int n0, const uint8_t *x1, int n1, const e2m1_table *t,      \
                     const uint8_t *ahead, stream_work *work) {                                                        \
        return n1 ? stream(kind, true, s, x0, n0, x1, n1, t, ahead, work)                                              \
                  : stream(kind, false, s, x0, n0, x0, n0, t, ahead, work);                                            \
    }
STREAM(stream_e2m1, DI_F4_E2M1)
STREAM(stream_e4m3, DI_F8_E4M3)
STREAM(stream_bf16, DI_BF16)

/* ---- more rows ---- */

typedef struct pane_work {
    _Alignas(64) uint8_t tiles[PANE_GROUPS][2][TILE_BYTES];
    _Alignas(64) float sums[OUTS_MAX * ROWS_MAX]; /* [32 outputs][tile of rows][half][16][rows of the tile] */
} pane_work;

/* Groups of one pane for one or two tiles of rows. */
INLINE void pane(bool has_second, const uint8_t *a0, const uint8_t *a1, int64_t lda, size_t step, int n_groups,
                 const uint8_t *b0, int n0, const uint8_t *b1, int n1, bool is_first, float *sums) {
    float *c00 = sums, *c10 = c00 + HALF * n0, *c01 = c10 + HALF * n0, *c11 = c01 + HALF * n1;
    if (is_first) {
        DI_TILE_ZERO(C00);
        DI_TILE_ZERO(C10);
        if (has_second) {
            DI_TILE_ZERO(C01);
            DI_TILE_ZERO(C11);
        }
    } else {
        DI_TILE_LOAD(C00, c00, (size_t)(4 * n0));
        DI_TILE_LOAD(C10, c10, (size_t)(4 * n0));
        if (has_second) {
            DI_TILE_LOAD(C01, c01, (size_t)(4 * n1));
            DI_TILE_LOAD(C11, c11, (size_t)(4 * n1));
        }
    }
    for (int g = 0; g < n_groups; g++) {
        dot_group(has_second, a0 + (size_t)g * step, a1 + (size_t)g * step, lda, b0 + (size_t)g * 64 * (size_t)n0, n0,
                  b1 + (size_t)g * 64 * (size_t)n1, n1);
    }
    DI_TILE_STORE(C00, c00, (size_t)(4 * n0));
    DI_TILE_STORE(C10, c10, (size_t)(4 * n0));
    if (has_second) {
        DI_TILE_STORE(C01, c01, (size_t)(4 * n1));
        DI_TILE_STORE(C11, c11, (size_t)(4 * n1));
    }
}

static bool decode_any(di_dtype kind, const strip *s, int64_t g, int n_groups, const e2m1_table *tables, uint8_t *out) {
    bool is_fine = true;
    const int unit_groups = UNIT_GROUPS(kind);
    for (int i = 0; i < n_groups; i += unit_groups) {
        int n = DI_MIN(n_groups - i, unit_groups);
        uint8_t *to = out + (size_t)i * 2 * TILE_BYTES;
        for (int r = 0; r < HALF; r++)
            _mm_prefetch((const char *)s->rows + (r + 2 * HALF) * s->ld + (g + i) * (UNIT_BYTES / unit_groups),
                         _MM_HINT_T1);
        is_fine &= kind == DI_F4_E2M1   ? decode(DI_F4_E2M1, s, g + i, n, 0, HALF, tables, to, 2 * TILE_BYTES)
                   : kind == DI_F8_E4M3 ? decode(DI_F8_E4M3, s, g + i, n, 0, HALF, tables, to, 2 * TILE_BYTES)
                                        : decode(DI_BF16, s, g + i, n, 0, HALF, tables, to, 2 * TILE_BYTES);
    }
    return is_fine;
}

/* ---- blocks ---- */

typedef struct amx_work {
    _Alignas(64) e2m1_table tables[SCALES];
    union {
        stream_work stream;
        pane_work pane;
    };
} amx_work;

/* The two strips of 32 outputs from o on; the last ones of a block may overlap: the same sums again. */
static void strips_at(const di_wide_block *b, int64_t o, int64_t at[2], strip s[2]) {
    for (int half = 0; half < 2; half++) {
        at[half] = DI_MIN(o + half * HALF, b->n_out - HALF);
        s[half] = strip_at(b->w, b->o0 + at[half]);
    }
}

static bool few_rows(const di_wide_block *b, const uint8_t *x, amx_work *work) {
    int64_t n_in = b->w->n_in;
    int n0 = (int)DI_MIN(b->n_rows, DI_WIDE_ROWS), n1 = (int)b->n_rows - n0;
    const uint8_t *x1 = x + (int64_t)n0 * n_in * 2;
    stream_work *sw = &work->stream;
    bool is_fine = true;
    configure(n0, n1);
    for (int64_t o = 0; o < b->n_out && is_fine; o += 2 * HALF) {
        int64_t at[2];
        strip s[2];
        strips_at(b, o, at, s);
        const uint8_t *ahead = o + 2 * HALF < b->n_out ? s[1].rows + HALF * s[1].ld : b->ahead;
        is_fine = b->w->dtype == DI_F4_E2M1   ? stream_e2m1(s, x, n0, x1, n1, work->tables, ahead, sw)
                  : b->w->dtype == DI_F8_E4M3 ? stream_e4m3(s, x, n0, x1, n1, work->tables, ahead, sw)
                                              : stream_bf16(s, x, n0, x1, n1, work->tables, ahead, sw);
        for (int half = 0; half < 2; half++) {
            put_rows(sw->sums[half], n0, b->acc + at[half], b->lda);
            if (n1)
                put_rows(sw->sums[2 + half], n1, b->acc + n0 * b->lda + at[half], b->lda);
        }
    }
    DI_TILE_RELEASE();
    return is_fine;
}

/* Two tiles of rows at a time; the last may be one, and the last tile narrower. */
static void pane_rows(const di_wide_block *b, const uint8_t *x, const strip s[2], int64_t g, int n_groups,
                      int *configured, pane_work *work, float *sums) {
    int64_t n_in = b->w->n_in;
    bool is_bf16 = b->w->dtype == DI_BF16;
    const uint8_t *a0 = is_bf16 ? s[0].rows + 64 * g : work->tiles[0][0];
    const uint8_t *a1 = is_bf16 ? s[1].rows + 64 * g : work->tiles[0][1];
    int64_t lda = is_bf16 ? s[0].ld : 64;
    size_t step = is_bf16 ? 64 : 2 * TILE_BYTES;
    for (int64_t r = 0; r < b->n_rows; r += 2 * DI_WIDE_ROWS) {
        int n0 = (int)DI_MIN(b->n_rows - r, DI_WIDE_ROWS), n1 = (int)DI_MIN(b->n_rows - r - n0, DI_WIDE_ROWS);
        const uint8_t *b0 = x + r * n_in * 2 + g * 64 * n0, *b1 = x + (r + n0) * n_in * 2 + g * 64 * n1;
        float *c = sums + r * 2 * HALF;
        if (*configured != n0 * 32 + n1) {
            configure(n0, n1);
            *configured = n0 * 32 + n1;
        }
        if (n1)
            pane(true, a0, a1, lda, step, n_groups, b0, n0, b1, n1, g == 0, c);
        else
            pane(false, a0, a1, lda, step, n_groups, b0, n0, b0, n0, g == 0, c);
    }
}

static bool many_rows(const di_wide_block *b, const uint8_t *x, amx_work *work) {
    pane_work *pw = &work->pane;
    int64_t n_groups = b->w->n_in / 32;
    int configured = 0;
    bool is_fine = true;
    for (int64_t g = 0; g < n_groups && is_fine; g += PANE_GROUPS) {
        int n = (int)DI_MIN(n_groups - g, PANE_GROUPS);
        for (int64_t o = 0; o < b->n_out; o += 2 * HALF) {
            int64_t at[2];
            strip s[2];
            strips_at(b, o, at, s);
            for (int half = 0; half < 2; half++)
                is_fine &= decode_any(b->w->dtype, &s[half], g, n, work->tables, pw->tiles[0][half]);
            pane_rows(b, x, s, g, n, &configured, pw, pw->sums + o * b->n_rows);
        }
    }
    DI_TILE_RELEASE();
    for (int64_t o = 0; o < b->n_out && is_fine; o += 2 * HALF) {
        int64_t at[2];
        strip s[2];
        strips_at(b, o, at, s);
        const float *sums = pw->sums + o * b->n_rows;
        for (int64_t r = 0; r < b->n_rows; r += DI_WIDE_ROWS) {
            int n = (int)DI_MIN(b->n_rows - r, DI_WIDE_ROWS);
            for (int half = 0; half < 2; half++, sums += HALF * n)
                put_rows(sums, n, b->acc + r * b->lda + at[half], b->lda);
        }
    }
    return is_fine;
}

static bool block(const di_wide_block *b, uint8_t *scratch) {
    amx_work *work = (amx_work *)scratch;
    const uint8_t *x = (const uint8_t *)b->packed + b->row0 * b->w->n_in * 2;
    if (b->w->dtype == DI_F4_E2M1)
        e2m1_tables(work->tables);
    return b->n_rows <= 2 * DI_WIDE_ROWS ? few_rows(b, x, work) : many_rows(b, x, work);
}

/* ---- the rest is AVX-512's ---- */

static void gate(const di_wide_gate *g) {
    di_wide_avx512(false)->gate(g);
}
static void store(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v, const float *add) {
    di_wide_avx512(false)->store(out, row, col, n, v, add);
}
static void accumulate(float *sum, const uint16_t *y, int64_t n) {
    di_wide_avx512(false)->accumulate(sum, y, n);
}

static bool is_best(di_dtype weights, int64_t n_rows) {
    (void)weights, (void)n_rows;
    return true;
}

static const di_wide_engine engine = {
    .rows_max = ROWS_MAX,
    .outs_max = OUTS_MAX,
    .work_bytes = sizeof(amx_work),
    .is_best = is_best,
    .packed_bytes = packed_bytes,
    .pack = pack,
    .block = block,
    .gate = gate,
    .store = store,
    .accumulate = accumulate,
};

void di_cpu_install_amx_wide(di_cpu_kernels *k) {
    di_wide_install(k, &engine);
}

const di_wide_engine *di_wide_amx(void) {
    return &engine;
}
