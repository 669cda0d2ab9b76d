/* The engine of wide products on AVX-512: sixteen outputs in the lanes of a vector (avx512_wide.h), a row's value
 * broadcast to them.
 *
 * A weight of all 16 rows costs one shift and one table lookup (E2M1), a shift and a mask or two (E4M3, bf16), and each
 * row of activations one fused multiply-add; up to 8 rows are multiplied as the weights are decoded. Where the
 * processor has VNNI, E2M1 weights take integers instead (avx512_vnni_wide.c).
 *
 * E4M3 is decoded by moving its bits into fp32's exponent and mantissa, 2^120 too small. Rows are packed 2^64 larger
 * for it and each group's sum is multiplied by what remains, so that every step is exact. Codes below 2^-6 have no such
 * form: a unit that has one takes a slower way, 2^16 larger. */
#include "avx512_wide.h"

#include "tensor/math_inline.h"

enum { SLOW_SHIFT = 16, ROWS_MAX = 128, OUTS_MAX = 128 };

/* ---- packing ---- */

static size_t packed_bytes(int64_t n_rows, int64_t n_in) {
    return (size_t)(n_rows * n_in) * sizeof(float);
}
/* With integers behind the floats; a class a row is more than one a band. */
static size_t packed_bytes_vnni(int64_t n_rows, int64_t n_in) {
    size_t groups = (size_t)(n_rows * (n_in / 32));
    return packed_bytes(n_rows, n_in) + groups * (2 * 16 * sizeof(int32_t) + sizeof(float) + 1);
}

/* Range of |v| by its bits: false for NaN, infinities and exponents that products might not survive; zero is fine. */
INLINE bool is_in_range(__m512 v) {
    __m512i a = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7FFFFFFF));
    __m512i d = _mm512_sub_epi32(a, _mm512_set1_epi32(DI_WIDE_X_MIN << 23));
    __mmask16 is_far = _mm512_cmpge_epu32_mask(d, _mm512_set1_epi32((DI_WIDE_X_MAX - DI_WIDE_X_MIN) << 23));
    return _mm512_mask_test_epi32_mask(is_far, a, a) == 0;
}

/* Groups [g0, g1) of a row as floats; `step` floats from a group to the next. */
static bool pack_floats(const di_wide_x *x, int64_t row, int64_t g0, int64_t g1, int64_t step, float *out) {
    const di_act *a = x->x;
    int64_t at = row * a->stride + x->col0;
    bool is_fine = true;
    const int shift = x->weights == DI_F8_E4M3 ? X_SHIFT_E4M3 : 0;
    if (a->dtype == DI_BF16) {
        const uint16_t *v = (const uint16_t *)a->data + at;
        __m512 up = _mm512_castsi512_ps(_mm512_set1_epi32((127 + shift) << 23));
        for (int64_t k = 32 * g0; k < 32 * g1; k += 16) {
            __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + k)));
            __m512 f = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
            is_fine &= is_in_range(f);
            _mm512_store_ps(out + k / 32 * step + k % 32, _mm512_mul_ps(f, up));
        }
        return is_fine;
    }
    const uint8_t *codes = (const uint8_t *)a->data + at;
    const uint8_t *scale = a->scale + row * (a->n_cols / 32) + x->col0 / 32;
    for (int64_t g = g0; g < g1; g++) {
        /* E4M3 as fp16, 2^8 too small; that conversion knows subnormals whatever the mode. */
        __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + 32 * g)));
        __m512i magnitude = _mm512_and_si512(c, _mm512_set1_epi16(0x7F));
        __m512i half =
            _mm512_or_si512(_mm512_slli_epi16(_mm512_sub_epi16(c, magnitude), 8), _mm512_slli_epi16(magnitude, 7));
        is_fine &= _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F)) == 0;
        is_fine &= scale[g] >= DI_WIDE_X_MIN + 9 && scale[g] <= DI_WIDE_X_MAX - 9;
        __m512 up = _mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)(scale[g] + 8 + shift) << 23)));
        __m512 lo = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        __m512 hi = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
        _mm512_store_ps(out + g * step, _mm512_mul_ps(lo, up));
        _mm512_store_ps(out + g * step + 16, _mm512_mul_ps(hi, up));
    }
    return is_fine;
}

/* Codes as integers of 2^-9, magnitudes apart from signs. */
INLINE __m512i code_magnitudes(__m512i codes) {
    __m512i m = _mm512_and_si512(codes, _mm512_set1_epi32(7));
    __m512i e = _mm512_and_si512(_mm512_srli_epi32(codes, 3), _mm512_set1_epi32(15));
    __mmask16 is_normal = _mm512_test_epi32_mask(e, e);
    m = _mm512_mask_or_epi32(m, is_normal, m, _mm512_set1_epi32(8));
    return _mm512_sllv_epi32(m, _mm512_maskz_sub_epi32(is_normal, e, _mm512_set1_epi32(1)));
}

/* The low halves of 32 integers in the order of a band. */
INLINE void store_pairs(int32_t *to, __m512i a, __m512i b) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    __m512i low = _mm512_and_si512(_mm512_permutex2var_epi32(a, first, b), _mm512_set1_epi32(0xFFFF));
    __m512i high = _mm512_slli_epi32(_mm512_permutex2var_epi32(a, second, b), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(low, high));
}

/* The integers of groups [g0, g1) of a row of QA codes, to row i of a band of n. */
static void pack_ints(const di_act *a, int64_t row, int64_t col0, int64_t g0, int64_t g1, int i, int n,
                      const band *to) {
    const uint8_t *codes = (const uint8_t *)a->data + row * a->stride + col0;
    const uint8_t *scale = a->scale + row * (a->n_cols / 32) + col0 / 32;
    /* Weights count up to 12: with more than this in a chain's inputs, its sums might need a 25th bit. */
    const int32_t inputs_max = ((1 << 24) - 1) / 12;
    for (int64_t g = g0; g < g1; g++) {
        __m512i ca = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + 32 * g)));
        __m512i cb = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + 32 * g + 16)));
        __m512i va = code_magnitudes(ca), vb = code_magnitudes(cb);
        uint32_t all = (uint32_t)_mm512_reduce_or_epi32(_mm512_or_si512(va, vb));
        int zeros = all ? __builtin_ctz(all) : 0;
        va = _mm512_srl_epi32(va, _mm_cvtsi32_si128(zeros));
        vb = _mm512_srl_epi32(vb, _mm_cvtsi32_si128(zeros));
        int kind = INT_ONE;
        if (all >> zeros >= 1u << 15) {
            __m512i both = _mm512_add_epi32(va, vb);
            int32_t even = _mm512_mask_reduce_add_epi32(0x5555, both), odd = _mm512_mask_reduce_add_epi32(0xAAAA, both);
            kind = even <= inputs_max && odd <= inputs_max ? INT_TWO : INT_NONE;
        }
        const __m512i zero = _mm512_setzero_si512(), sign = _mm512_set1_epi32(0x80);
        va = _mm512_mask_sub_epi32(va, _mm512_test_epi32_mask(ca, sign), zero, va);
        vb = _mm512_mask_sub_epi32(vb, _mm512_test_epi32_mask(cb, sign), zero, vb);
        int64_t at = g * n + i;
        if (kind == INT_TWO) {
            const __m512i byte = _mm512_set1_epi32(0xFF);
            store_pairs(to->low + 16 * at, _mm512_and_si512(va, byte), _mm512_and_si512(vb, byte));
            store_pairs(to->high + 16 * at, _mm512_srai_epi32(va, 8), _mm512_srai_epi32(vb, 8));
        } else {
            store_pairs(to->low + 16 * at, va, vb);
            _mm512_storeu_si512(to->high + 16 * at, zero);
        }
        /* Of 2^-9 and half a weight. */
        to->units[at] = di_f32_from_bits((uint32_t)(scale[g] + zeros - 10) << 23);
        to->classes[g] |= (uint8_t)kind;
    }
}

INLINE bool pack_rows(const di_wide_x *x, int64_t tile, int64_t g0, int64_t g1, bool has_vnni) {
    enum { BANDS = DI_WIDE_ROWS / ROWS_FUSED };
    bool is_fine = true;
    for (int64_t b = tile * BANDS; b < (tile + 1) * BANDS && b * ROWS_FUSED < x->n_rows; b++) {
        band to = band_at(x->packed, b, x->n_rows, x->n_in);
        int n = band_rows(b, x->n_rows);
        bool has_ints = has_vnni && x->weights == DI_F4_E2M1;
        if (has_ints)
            memset(to.classes + g0, x->x->dtype == DI_F8_E4M3 ? INT_ONE : INT_NONE, (size_t)(g1 - g0));
        for (int i = 0; i < n; i++) {
            int64_t r = b * ROWS_FUSED + i, row = x->rows ? x->rows[r] : x->row0 + r;
            is_fine &= pack_floats(x, row, g0, g1, 32 * n, to.floats + 32 * i);
            if (has_ints && is_fine && x->x->dtype == DI_F8_E4M3)
                pack_ints(x->x, row, x->col0, g0, g1, i, n, &to);
        }
    }
    return is_fine;
}
static bool pack(const di_wide_x *x, int64_t tile, int64_t g0, int64_t g1) {
    return pack_rows(x, tile, g0, g1, false);
}
static bool pack_vnni(const di_wide_x *x, int64_t tile, int64_t g0, int64_t g1) {
    return pack_rows(x, tile, g0, g1, true);
}

/* Input k of a dword, for all lanes. */
INLINE __m512 weight(di_dtype kind, __m512i q, int k, bool is_slow) {
    if (kind == DI_F4_E2M1) {
        const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                            -2.0f, -3.0f, -4.0f, -6.0f);
        int shift = 4 * k; /* the lookup reads the low four bits */
        return _mm512_permutexvar_ps(shift ? _mm512_srli_epi32(q, (unsigned)shift) : q, table);
    }
    if (kind == DI_F8_E4M3) {
        /* The byte in the upper half of a word, its sign spread over four bits; then the word in the upper half. */
        __m512i t = k % 2 ? q : _mm512_slli_epi16(q, 8);
        t = _mm512_srai_epi16(t, 4);
        t = k < 2 ? _mm512_slli_epi32(t, 16) : t;
        t = _mm512_and_si512(t, _mm512_set1_epi32((int)0x87F00000));
        if (!is_slow)
            return _mm512_castsi512_ps(t);
        /* (1 + m/8) * 2^-111 stands where m/4 * 2^-111 is meant: twice it less 2^-110. */
        __mmask16 is_small = _mm512_testn_epi32_mask(t, _mm512_set1_epi32(0x07800000));
        __m512 v = _mm512_castsi512_ps(_mm512_add_epi32(t, _mm512_set1_epi32(SLOW_SHIFT << 23)));
        __m512i one = _mm512_set1_epi32((127 - 110) << 23);
        one = _mm512_or_si512(one, _mm512_and_si512(t, _mm512_set1_epi32((int)0x80000000)));
        return _mm512_mask_sub_ps(v, is_small, _mm512_add_ps(v, v), _mm512_castsi512_ps(one));
    }
    __m512i v = k % 2 ? _mm512_and_si512(q, _mm512_set1_epi32((int)0xFFFF0000)) : _mm512_slli_epi32(q, 16);
    return _mm512_castsi512_ps(v);
}

enum { CODES_FINE, CODES_SMALL, CODES_BAD };

/* Whether all codes of a turned unit have the fast form, some are small, or some are unusable. */
INLINE int judge(di_dtype kind, const __m512i q[16], __m512i most) {
    if (kind == DI_F4_E2M1)
        return CODES_FINE;
    if (kind == DI_BF16) {
        const short limit = (short)((DI_WIDE_W_MAX - DI_WIDE_W_MIN) << 7);
        return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(limit)) ? CODES_BAD : CODES_FINE;
    }
    if (__builtin_expect(_mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8((char)0xEC)) == 0, 1))
        return CODES_FINE;
    for (int i = 0; i < 16; i++) {
        if (_mm512_cmpeq_epi8_mask(_mm512_add_epi8(q[i], q[i]), _mm512_set1_epi8((char)0xFE)))
            return CODES_BAD;
    }
    return CODES_SMALL;
}

/* ---- products as weights are decoded ---- */

/* Group i of a unit. `next` is turned meanwhile, or NULL. */
INLINE void group_products(di_dtype kind, bool is_slow, int n_rows, const __m512i *unit, int i, __m512 factor,
                           const float *x, __m512 *acc, turning *next, __m512i *turned) {
    enum { PER_STEP = 16 / TURN_STEPS };
    const int n = GROUP_DWORDS(kind), inputs = 32 / n;
    __m512 even[ROWS_FUSED], odd[ROWS_FUSED];
    for (int r = 0; r < n_rows; r++)
        even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int d = 0; d < n; d++) {
        __m512i q = unit[i * n + d];
        /* Decoded no earlier: a whole group's weights don't fit the registers. */
        __asm__("" : "+v"(q), "+v"(even[n_rows - 1]));
#pragma GCC unroll 4
        for (int k = 0; k < inputs; k += 2) {
            __m512 a = weight(kind, q, k, is_slow), b = weight(kind, q, k + 1, is_slow);
            const float *at = x + d * inputs + k;
#pragma GCC unroll 8
            for (int r = 0; r < n_rows; r++) {
                even[r] = _mm512_fmadd_ps(a, _mm512_set1_ps(at[r * 32]), even[r]);
                odd[r] = _mm512_fmadd_ps(b, _mm512_set1_ps(at[r * 32 + 1]), odd[r]);
            }
        }
        if (next && (i * n + d) % PER_STEP == PER_STEP - 1)
            turn_step(kind, next, (i * n + d) / PER_STEP, turned);
    }
    if (is_slow)
        factor = _mm512_mul_ps(factor, _mm512_set1_ps(0x1p-16f));
    for (int r = 0; r < n_rows; r++)
        acc[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), factor, acc[r]);
}

INLINE bool fused(di_dtype kind, int n_rows, const strip *s, const float *x, float *out, int64_t ldo) {
    const int unit_groups = UNIT_GROUPS(kind);
    const int64_t n_units = DI_CEIL_DIV(s->n_groups, unit_groups);
    __m512 acc[ROWS_FUSED], factor[16];
    __m512i turned[2][16];
    turning t;
    for (int i = 0; i < n_rows; i++)
        acc[i] = _mm512_setzero_ps();
    turn_start(kind, s, 0, &t);
    turn_steps(kind, &t, 0, TURN_STEPS, turned[0]);
    for (int64_t u = 0; u < n_units; u++) {
        int64_t g = u * unit_groups;
        const __m512i *unit = turned[u % 2];
        __m512i *next = turned[(u + 1) % 2];
        if (g % 16 == 0 && !load_scales(kind, s, g, (int)DI_MIN(s->n_groups - g, 16), factor))
            return false;
        int codes = judge(kind, unit, t.most);
        if (__builtin_expect(codes == CODES_BAD, 0))
            return false;
        turn_start(kind, s, DI_MIN(u + 1, n_units - 1), &t); /* the last is turned twice */
        bool is_full = s->n_groups - g >= unit_groups;
        if (__builtin_expect(codes == CODES_FINE && is_full, 1)) {
#pragma GCC unroll 4
            for (int i = 0; i < unit_groups; i++) {
                const float *at = x + (g + i) * 32 * n_rows;
                __asm__("" : "+r"(at)); /* one address and offsets, not an address for every input */
                group_products(kind, false, n_rows, unit, i, factor[(g + i) % 16], at, acc, &t, next);
            }
            continue;
        }
        int n = (int)DI_MIN(s->n_groups - g, unit_groups);
        for (int i = 0; i < n; i++) {
            const __m512i *q = unit + i * GROUP_DWORDS(kind);
            const float *at = x + (g + i) * 32 * n_rows;
            __asm__("" : "+r"(at));
            group_products(kind, kind == DI_F8_E4M3, n_rows, q, 0, factor[(g + i) % 16], at, acc, NULL, NULL);
        }
        turn_steps(kind, &t, 0, TURN_STEPS, next);
    }
    for (int i = 0; i < n_rows; i++)
        _mm512_storeu_ps(out + i * ldo, acc[i]);
    return true;
}

#define FUSED(name, kind)                                                                                              \
    static bool name(int n_rows, const strip *s, const float *x, float *out, int64_t ldo) {                            \
        switch (n_rows) {                                                                                              \
        case 1:                                                                                                        \
            return fused(kind, 1, s, x, out, ldo);                                                                     \
        case 2:                                                                                                        \
            return fused(kind, 2, s, x, out, ldo);                                                                     \
        case 3:                                                                                                        \
            return fused(kind, 3, s, x, out, ldo);                                                                     \
        case 4:                                                                                                        \
            return fused(kind, 4, s, x, out, ldo);                                                                     \
        case 5:                                                                                                        \
            return fused(kind, 5, s, x, out, ldo);                                                                     \
        case 6:                                                                                                        \
            return fused(kind, 6, s, x, out, ldo);                                                                     \
        case 7:                                                                                                        \
            return fused(kind, 7, s, x, out, ldo);                                                                     \
        default:                                                                                                       \
            return fused(kind, 8, s, x, out, ldo);                                                                     \
        }                                                                                                              \
    }
FUSED(fused_e2m1, DI_F4_E2M1)
FUSED(fused_e4m3, DI_F8_E4M3)
FUSED(fused_bf16, DI_BF16)

/* ---- blocks ---- */

/* Rows [o, o + 16) of w; `next` is what to prefetch meanwhile. */
static strip strip_at(const di_mat *w, int64_t o, const uint8_t *next) {
    int64_t ld = di_wide_row_bytes(w), n_groups = w->n_in / 32;
    strip s = {.rows = (const uint8_t *)w->data + o * ld, .ld = ld, .n_groups = n_groups, .split = 16, .ahead = next};
    if (w->dtype == DI_F4_E2M1) {
        s.scale[0] = w->scale + o * n_groups;
    } else if (w->dtype == DI_F8_E4M3) {
        int64_t block = o / 32;
        s.scale[0] = s.scale[1] = w->scale + block * n_groups;
        if (o % 32 > 16) {
            s.split = (int)(32 - o % 32);
            s.scale[1] += n_groups;
        }
    }
    return s;
}

/* Up to 8 rows at a time, as the weights are decoded. */
static bool block_few(const di_wide_block *b, bool has_ints) {
    const di_mat *w = b->w;
    bool is_fine = true;
    for (int64_t o = 0; o < b->n_out && is_fine; o += LANES) {
        int64_t at = DI_MIN(o, b->n_out - LANES); /* the last strip may overlap: the same sums again */
        strip s = strip_at(w, b->o0 + at, b->ahead);
        if (o + LANES < b->n_out)
            s.ahead = s.rows + LANES * s.ld;
        for (int64_t i = 0; i < b->n_rows && is_fine; i += ROWS_FUSED) {
            int n = (int)DI_MIN(b->n_rows - i, ROWS_FUSED);
            band x = band_at(b->packed, (b->row0 + i) / ROWS_FUSED, b->packed_rows, w->n_in);
            float *acc = b->acc + i * b->lda + at;
            if (w->dtype == DI_F4_E2M1)
                is_fine =
                    has_ints ? di_avx512_vnni_few(n, &s, &x, acc, b->lda) : fused_e2m1(n, &s, x.floats, acc, b->lda);
            else
                is_fine = w->dtype == DI_F8_E4M3 ? fused_e4m3(n, &s, x.floats, acc, b->lda)
                                                 : fused_bf16(n, &s, x.floats, acc, b->lda);
            s.ahead = NULL;
        }
    }
    return is_fine;
}

/* E2M1 and integers: a decoded piece of 32 outputs meets all rows. */
static bool block_many(const di_wide_block *b, uint8_t *work) {
    float *sums = (float *)(void *)work; /* [n_rows][32 outputs], whole lines */
    band bands[ROWS_MAX / ROWS_FUSED];
    bool is_fine = true;
    for (int64_t i = 0; i * ROWS_FUSED < b->n_rows; i++)
        bands[i] = band_at(b->packed, b->row0 / ROWS_FUSED + i, b->packed_rows, b->w->n_in);
    for (int64_t o = 0; o < b->n_out && is_fine; o += 2 * LANES) {
        int64_t at = DI_MIN(o, b->n_out - 2 * LANES);
        strip s[2] = {strip_at(b->w, b->o0 + at, NULL), strip_at(b->w, b->o0 + at + LANES, NULL)};
        is_fine = di_avx512_vnni_many(s, bands, b->n_rows, work + sizeof *sums * ROWS_MAX * 2 * LANES, sums);
        for (int64_t i = 0; i < b->n_rows; i++)
            memcpy(b->acc + i * b->lda + at, sums + i * 2 * LANES, 2 * LANES * sizeof *sums);
    }
    return is_fine;
}

static bool block(const di_wide_block *b, uint8_t *work) {
    (void)work;
    return block_few(b, false);
}
static bool block_vnni(const di_wide_block *b, uint8_t *work) {
    bool is_many = b->w->dtype == DI_F4_E2M1 && b->n_rows > ROWS_FUSED && b->n_out >= 2 * LANES;
    return is_many ? block_many(b, work) : block_few(b, true);
}

/* ---- the gate between an expert's matrices ---- */

INLINE __m512 round_bf16(__m512 v) {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, is_nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* di_expf_inline, operation by operation. */
INLINE __m512 exp_vector(__m512 x) {
    const __m512 least = _mm512_set1_ps(DI_EXPF_MIN), most = _mm512_set1_ps(DI_EXPF_MAX);
    const __m512 shift = _mm512_set1_ps(0x1.8p23f);
    __m512 c = _mm512_min_ps(most, _mm512_max_ps(least, x)); /* of a NaN either gives the second operand */
    __m512 kf = _mm512_add_ps(_mm512_mul_ps(c, _mm512_set1_ps(0x1.715476p0f)), shift);
    __m512i k = _mm512_slli_epi32(_mm512_castps_si512(kf), 23);
    kf = _mm512_sub_ps(kf, shift);
    __m512 r = _mm512_sub_ps(c, _mm512_mul_ps(kf, _mm512_set1_ps(0x1.62e4p-1f)));
    r = _mm512_sub_ps(r, _mm512_mul_ps(kf, _mm512_set1_ps(0x1.7f7d1cp-20f)));
    static const float series[5] = {0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0.5f};
    __m512 p = _mm512_set1_ps(0x1.a01a02p-13f);
    for (int i = 0; i < 5; i++)
        p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(series[i]));
    __m512 y = _mm512_add_ps(r, _mm512_mul_ps(_mm512_mul_ps(r, r), p));
    y = _mm512_add_ps(_mm512_set1_ps(1.0f), y);
    y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), k));
    y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, least, _CMP_LT_OQ), _mm512_setzero_ps());
    y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ), _mm512_set1_ps(__builtin_inff()));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

INLINE __m512 activation(__m512 g, __m512 u, __m512 weight, __m512 limit) {
    g = round_bf16(g);
    u = round_bf16(u);
    g = _mm512_min_ps(limit, g);
    u = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, u));
    __m512 e =
        exp_vector(_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(g), _mm512_set1_epi32((int)0x80000000))));
    __m512 v = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    return _mm512_mul_ps(_mm512_mul_ps(v, u), weight);
}

/* tensor/format.c's conversion. */
INLINE __m128i e4m3_codes(__m512 v) {
    __m512i bits = _mm512_castps_si512(v), a = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    __m512i u = _mm512_min_epi32(a, _mm512_set1_epi32(0x43E00000)); /* 448 */
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(1));
    __m512i normal = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFFF)), odd);
    normal = _mm512_sub_epi32(_mm512_srli_epi32(normal, 20), _mm512_set1_epi32(120 << 3));
    __m512 moved = _mm512_add_ps(_mm512_castsi512_ps(u), _mm512_set1_ps(16384.0f));
    __m512i small = _mm512_sub_epi32(_mm512_castps_si512(moved), _mm512_set1_epi32(0x46800000));
    __m512i code = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(u, _mm512_set1_epi32(0x3C800000)), small);
    code =
        _mm512_mask_mov_epi32(code, _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(0x7F800000)), _mm512_set1_epi32(0x7F));
    code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80)));
    return _mm512_cvtepi32_epi8(code);
}

static void gate(const di_wide_gate *t) {
    const __m512 limit = _mm512_set1_ps(t->limit);
    for (int64_t i = 0; i < t->n_rows; i++) {
        const float *g = t->g + i * t->ld, *u = t->u + i * t->ld;
        __m512 weight = _mm512_set1_ps(t->weight[i]);
        __m512 a = activation(_mm512_loadu_ps(g), _mm512_loadu_ps(u), weight, limit);
        __m512 b = activation(_mm512_loadu_ps(g + 16), _mm512_loadu_ps(u + 16), weight, limit);
        /* QA: NaN doesn't count for the scale. */
        const __m512i no_sign = _mm512_set1_epi32(0x7FFFFFFF), infinity = _mm512_set1_epi32(0x7F800000);
        __m512i ia = _mm512_and_si512(_mm512_castps_si512(a), no_sign);
        __m512i ib = _mm512_and_si512(_mm512_castps_si512(b), no_sign);
        ia = _mm512_maskz_mov_epi32(_mm512_cmple_epi32_mask(ia, infinity), ia);
        ib = _mm512_maskz_mov_epi32(_mm512_cmple_epi32_mask(ib, infinity), ib);
        int32_t most = _mm512_reduce_max_epi32(_mm512_max_epi32(ia, ib));
        float amax = di_f32_from_bits((uint32_t)DI_MAX(most, (int32_t)di_f32_bits(1e-4f)));
        float s = di_f32_from_bits((di_f32_bits(amax / 448.0f) + 0x007FFFFFu) & 0x7F800000u);
        __m512 inverse = _mm512_set1_ps(1.0f / s);
        t->scales[i * t->scales_ld] = (uint8_t)(di_f32_bits(s) >> 23);
        uint8_t *codes = t->codes + i * t->codes_ld;
        _mm_storeu_si128((__m128i *)codes, e4m3_codes(_mm512_mul_ps(a, inverse)));
        _mm_storeu_si128((__m128i *)(codes + 16), e4m3_codes(_mm512_mul_ps(b, inverse)));
    }
}

/* ---- rows of results ---- */

static void store(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v, const float *add) {
    float *f = (float *)out->data + row * out->stride + col;
    uint16_t *h = (uint16_t *)out->data + row * out->stride + col;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 is_there = n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1u);
        __m512 y = _mm512_maskz_loadu_ps(is_there, v + i);
        if (add)
            y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(is_there, add + i));
        if (out->dtype == DI_F32) {
            _mm512_mask_storeu_ps(f + i, is_there, y);
        } else {
            __m512i top = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(y)), 16);
            _mm512_mask_cvtepi32_storeu_epi16(h + i, is_there, top);
        }
    }
}

static void accumulate(float *sum, const uint16_t *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(y + i)));
        __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sum + i), v));
    }
    for (; i < n; i++)
        sum[i] += di_bf16_to_f32(y[i]);
}

/* ---- engines ---- */

/* With more rows than are multiplied at a time, kernels that decode a tile once for all of them are faster, unless
 * integers make up for it. */
static bool is_best(di_dtype weights, int64_t n_rows) {
    (void)weights;
    return n_rows <= ROWS_FUSED;
}
static bool is_best_vnni(di_dtype weights, int64_t n_rows) {
    return weights == DI_F4_E2M1 || n_rows <= ROWS_FUSED;
}

static const di_wide_engine engine = {
    .rows_max = ROWS_MAX,
    .outs_max = OUTS_MAX,
    .work_bytes = 0,
    .is_best = is_best,
    .packed_bytes = packed_bytes,
    .pack = pack,
    .block = block,
    .gate = gate,
    .store = store,
    .accumulate = accumulate,
};

static const di_wide_engine engine_vnni = {
    .rows_max = ROWS_MAX,
    .outs_max = OUTS_MAX,
    .work_bytes = sizeof(float) * ROWS_MAX * 2 * LANES + DI_AVX512_VNNI_WORK_BYTES,
    .is_best = is_best_vnni,
    .packed_bytes = packed_bytes_vnni,
    .pack = pack_vnni,
    .block = block_vnni,
    .gate = gate,
    .store = store,
    .accumulate = accumulate,
};

const di_wide_engine *di_wide_avx512(bool has_vnni) {
    return has_vnni ? &engine_vnni : &engine;
}

void di_cpu_install_avx512_wide(di_cpu_kernels *k) {
    di_wide_install(k, di_wide_avx512(__builtin_cpu_supports("avx512vnni")));
}
