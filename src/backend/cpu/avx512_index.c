/* The indexer's selection with AVX-512; bit for bit ref_index.c, in the course of portable_index.c.
 *
 * Scores. Queries and keys are E2M1 codes in groups of 32 with one power of two each. Twice a code is an integer, so
 * the products and sums of a group are integers below 2^13 times a power of two: exact in any order. A group's part of
 * a dot product is therefore made of bytes, multiplied four at a time into 32-bit lanes, and enters the accumulator as
 * one float, as the two chains of di_dot32 do. Lanes are entries:
 *
 *     tile of 16 entries, group of 32 values:  8 vectors, each 4 bytes a lane: even values of 8, odd values of 8, ...
 *
 * Bytes of keys are 2*code + 12, unsigned as the instruction wants them; 12 times the sum of the query's bytes is taken
 * off first. Where a scale is so far from 1 that a product could leave the range of normal floats, or is NaN, the
 * scores concerned are made from floats, one by one.
 *
 * The best. The k-th largest of the maxima of at least k disjoint groups is a lower limit for the k-th largest score,
 * and few scores reach it: they are compacted, and the search goes on among them. */
#include <float.h>

#include "avx512_index.h"

enum {
    TILE = DI_INDEX_TILE,
    GROUP = DI_INDEX_GROUP,
    GROUP_BYTES = GROUP * TILE, /* of a tile's codes of one group */
    KEY_BIAS = 12,
    SCALE_MIN = 127 - 56, /* E8M0 bytes whose products stay far from both ends */
    SCALE_MAX = 127 + 56
};

/* ---- queries ----------------------------------------------------------------------------------------------------- */

di_index_query di_index_lanes_query_of(const di_index_select_args *a, float *room) {
    int64_t n = a->dim / GROUP * a->n_heads;
    di_index_query q;
    q.codes = (int8_t *)room;
    q.start = (int32_t *)(void *)(q.codes + n * GROUP);
    q.scale = (float *)(void *)(q.start + n);
    q.is_plain = (bool *)(void *)(q.scale + n);
    q.values = (uint16_t *)(void *)(q.codes + DI_ROUND_UP(n * (GROUP + 8) + 1, 64));
    return q;
}

static inline __m128i doubled_codes(void) {
    return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
}

static bool is_zero_group(const uint8_t *packed) {
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)packed);
    return _mm_testz_si128(x, _mm_set1_epi8(0x77)) != 0;
}

void di_index_lanes_query(const di_index_job *j, int64_t row, float *room, float *w, uint8_t *scratch) {
    const di_index_select_args *a = j->a;
    int64_t n = (int64_t)a->n_heads * a->dim, n_groups = a->dim / GROUP;
    di_cpu_load(&a->w, row, 0, a->n_heads, w);
    di_cpu_load(&a->q, row, 0, n, room); /* quantised into scratch before the room takes its last form */
    uint8_t *scales = scratch + n / 2;
    di_cpu_avx512_encode(DI_KV_MX4, room, n, scratch, scales);
    di_index_query q = di_index_lanes_query_of(a, room);
    const __m128i low = _mm_set1_epi8(15), table = doubled_codes();
    *q.is_plain = true;
    for (int64_t g = 0; g < n_groups; g++) {
        for (int64_t h = 0; h < a->n_heads; h++) {
            const uint8_t *packed = scratch + (h * n_groups + g) * (GROUP / 2);
            uint8_t scale = scales[h * n_groups + g];
            __m128i x = _mm_loadu_si128((const __m128i *)(const void *)packed);
            __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(x, low));
            __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(x, 4), low));
            int64_t at = g * a->n_heads + h;
            __m128i *codes = (__m128i *)(void *)(q.codes + at * GROUP);
            _mm_storeu_si128(codes, _mm_unpacklo_epi32(even, odd));
            _mm_storeu_si128(codes + 1, _mm_unpackhi_epi32(even, odd));
            /* Sums of absolute differences to 0 of the codes made positive by 12. */
            const __m128i bias = _mm_set1_epi8(12), zero = _mm_setzero_si128();
            __m128i sum = _mm_add_epi64(_mm_sad_epu8(_mm_add_epi8(even, bias), zero),
                                        _mm_sad_epu8(_mm_add_epi8(odd, bias), zero));
            int32_t total = _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 2) - 12 * GROUP;
            q.start[at] = -KEY_BIAS * total;
            q.scale[at] = di_e8m0_to_f32(scale);
            if (scale < SCALE_MIN || scale > SCALE_MAX) {
                if (is_zero_group(packed))
                    q.scale[at] = 1.0f;
                else
                    *q.is_plain = false;
            }
        }
    }
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

/* Four vectors of four bytes a lane become the lanes' dwords: out[i] lane e = dword i of packed[e] at `offset`. */
static inline void gather_dwords(const uint8_t *const packed[TILE], size_t offset, __m512i out[4]) {
    __m512i z[4];
    for (int i = 0; i < 4; i++) {
        z[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(packed[i] + offset)));
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(const void *)(packed[i + 4] + offset)), 1);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(const void *)(packed[i + 8] + offset)), 2);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(const void *)(packed[i + 12] + offset)), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, b);
    out[1] = _mm512_unpackhi_epi64(a, b);
    out[2] = _mm512_unpacklo_epi64(c, d);
    out[3] = _mm512_unpackhi_epi64(c, d);
}

/* The entries' scale bytes of a group. are_words: they lie side by side, 4 an entry. */
static inline __m512i scale_bytes(const uint8_t *const scales[TILE], int64_t g, bool are_words) {
    if (are_words)
        return _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(scales[0]), _mm_cvtsi64_si128(8 * g)),
                                _mm512_set1_epi32(255));
    uint32_t b[TILE];
    for (int e = 0; e < TILE; e++)
        b[e] = scales[e][g];
    return _mm512_loadu_si512(b);
}

static void make_tile(di_index_tiles *k, int64_t i) {
    const di_index_select_args *a = k->a;
    int64_t n_groups = a->dim / GROUP, first = k->base + i * TILE, n = DI_MIN((int64_t)TILE, k->n - first);
    const uint8_t *packed[TILE], *scales[TILE];
    di_cpu_entry at = di_cpu_entry_at(a->rows, &a->keys, k->seq, (int32_t)first);
    bool is_one_block = first % a->keys.per_block + n <= a->keys.per_block;
    for (int64_t e = 0; e < TILE; e++) {
        int64_t from = DI_MIN(e, n - 1); /* lanes without an entry repeat the last: nobody looks at them */
        if (!is_one_block)
            at = di_cpu_entry_at(a->rows, &a->keys, k->seq, (int32_t)(first + from));
        size_t step = is_one_block ? (size_t)from : 0;
        packed[e] = at.data + step * (size_t)(a->dim / 2);
        scales[e] = at.scale + step * (size_t)n_groups;
    }
    uint8_t *codes = k->codes + (size_t)(i * n_groups) * k->lanes->group_bytes;
    float *scale = k->scales + i * n_groups * TILE;
    __mmask16 far = 0;
    for (int64_t g = 0; g < n_groups; g++, codes += k->lanes->group_bytes) {
        __m512i b = scale_bytes(scales, g, is_one_block && n == TILE && n_groups == 4);
        __mmask16 is_far = _mm512_cmplt_epi32_mask(b, _mm512_set1_epi32(SCALE_MIN)) |
                           _mm512_cmpgt_epi32_mask(b, _mm512_set1_epi32(SCALE_MAX));
        b = _mm512_mask_mov_epi32(b, is_far, _mm512_set1_epi32(127));
        for (int e = 0; is_far >> e; e++) {
            if ((is_far >> e & 1) && !is_zero_group(packed[e] + g * GROUP / 2))
                far |= (__mmask16)(1u << e);
        }
        __m512i x[4];
        gather_dwords(packed, (size_t)(g * GROUP / 2), x);
        k->lanes->put(codes, x, &b);
        _mm512_store_si512(scale + g * TILE, _mm512_slli_epi32(_mm512_sub_epi32(b, _mm512_set1_epi32(2)), 23));
    }
    k->far[i] = far;
    k->is_ready[i] = true;
}

/* Bytes of 4 values each: even values of 8, odd values of 8, and so on. */
static void put_bytes(uint8_t *codes, const __m512i packed[4], const __m512i *scale) {
    (void)scale; /* enters after the sums */
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i table = _mm512_add_epi8(_mm512_broadcast_i32x4(doubled_codes()), _mm512_set1_epi8(KEY_BIAS));
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_and_si512(packed[i], low), odd = _mm512_and_si512(_mm512_srli_epi16(packed[i], 4), low);
        _mm512_store_si512(codes + i * 128, _mm512_shuffle_epi8(table, even));
        _mm512_store_si512(codes + i * 128 + 64, _mm512_shuffle_epi8(table, odd));
    }
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* acc + the 4 products of each lane's bytes, a unsigned, b signed. In assembler, because the level does not promise the
 * instruction and a caller chooses at run time. */
static inline __m512i dot_bytes(__m512i acc, __m512i a, __m512i b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}

/* One group of the queries of some heads. */
typedef struct group_query {
    const int8_t *codes;  /* [heads, 32] */
    const int32_t *start; /* [heads] */
    const float *scale, *w;
    float *dots; /* [heads, 2, TILE] */
} group_query;

/* Adds the group's part to the dot products of n_tiles tiles with n heads, side by side, so that no sum waits for its
 * own last step. In the last group the dot products are complete and enter the scores instead. */
static inline __attribute__((always_inline)) void score_heads(const group_query *q, const __m512i key[2][8],
                                                              const __m512 scale[2], __m512 score[2], const int n,
                                                              const int n_tiles, const bool has_vnni,
                                                              const bool is_first, const bool is_last) {
    __m512i acc[4][2];
    for (int h = 0; h < n; h++) {
        for (int t = 0; t < n_tiles; t++)
            acc[h][t] = has_vnni ? _mm512_set1_epi32(q->start[h]) : _mm512_setzero_si512();
    }
    for (int i = 0; i < 8; i++) {
        for (int h = 0; h < n; h++) {
            int32_t four;
            memcpy(&four, q->codes + h * GROUP + 4 * i, sizeof four);
            __m512i x = _mm512_set1_epi32(four);
            for (int t = 0; t < n_tiles; t++) {
                /* Sums of 16 bits hold a whole group: 2 * 8 * 24 * 12 at most. */
                acc[h][t] = has_vnni ? dot_bytes(acc[h][t], key[t][i], x)
                                     : _mm512_add_epi16(acc[h][t], _mm512_maddubs_epi16(key[t][i], x));
            }
        }
    }
    for (int h = 0; h < n; h++) {
        for (int t = 0; t < n_tiles; t++) {
            __m512i sum = acc[h][t];
            if (!has_vnni)
                sum = _mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(1)), _mm512_set1_epi32(q->start[h]));
            /* Powers of two: the products are exact, and fusing the last with the addition changes nothing. */
            __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale[t]), by = _mm512_set1_ps(q->scale[h]);
            float *dots = q->dots + (h * 2 + t) * TILE;
            __m512 dot = is_first ? _mm512_mul_ps(part, by) : _mm512_fmadd_ps(part, by, _mm512_load_ps(dots));
            if (!is_last)
                _mm512_store_ps(dots, dot);
            else /* the larger of NaN and 0 is 0 */
                score[t] = _mm512_add_ps(
                    score[t], _mm512_mul_ps(_mm512_set1_ps(q->w[h]), _mm512_max_ps(dot, _mm512_setzero_ps())));
        }
    }
}

static inline __attribute__((always_inline)) void score_group(const di_index_query *q, int64_t g, int64_t n_heads,
                                                              const uint8_t *codes, const float *scales,
                                                              int64_t n_groups, float *dots, const float *w,
                                                              __m512 score[2], const int n_tiles, const bool has_vnni,
                                                              const bool is_first, const bool is_last) {
    __m512i key[2][8];
    __m512 scale[2];
    for (int t = 0; t < n_tiles; t++) {
        for (int i = 0; i < 8; i++)
            key[t][i] = _mm512_load_si512(codes + (t * n_groups + g) * GROUP_BYTES + i * 64);
        scale[t] = _mm512_load_ps(scales + (t * n_groups + g) * TILE);
    }
    group_query at = {q->codes + g * n_heads * GROUP, q->start + g * n_heads, q->scale + g * n_heads, w, dots};
    int64_t h = 0;
    for (; h + 4 <= n_heads; h += 4) {
        score_heads(&at, key, scale, score, 4, n_tiles, has_vnni, is_first, is_last);
        at = (group_query){at.codes + 4 * GROUP, at.start + 4, at.scale + 4, at.w + 4, at.dots + 8 * TILE};
    }
    for (; h < n_heads; h++) {
        score_heads(&at, key, scale, score, 1, n_tiles, has_vnni, is_first, is_last);
        at = (group_query){at.codes + GROUP, at.start + 1, at.scale + 1, at.w + 1, at.dots + 2 * TILE};
    }
}

static inline __attribute__((always_inline)) void score_tiles(const di_index_tiles *k, const di_index_query *q,
                                                              const float *w, int64_t tile, __m512 score[2],
                                                              const int n_tiles, const bool has_vnni) {
    int64_t n_groups = k->a->dim / GROUP, n_heads = k->a->n_heads;
    const uint8_t *codes = k->codes + tile * n_groups * GROUP_BYTES;
    const float *scales = k->scales + tile * n_groups * TILE;
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t g = 0; g + 1 < n_groups; g++) {
        if (g == 0)
            score_group(q, g, n_heads, codes, scales, n_groups, k->dots, w, sum, n_tiles, has_vnni, true, false);
        else
            score_group(q, g, n_heads, codes, scales, n_groups, k->dots, w, sum, n_tiles, has_vnni, false, false);
    }
    if (n_groups == 1)
        score_group(q, 0, n_heads, codes, scales, n_groups, k->dots, w, sum, n_tiles, has_vnni, true, true);
    else
        score_group(q, n_groups - 1, n_heads, codes, scales, n_groups, k->dots, w, sum, n_tiles, has_vnni, false, true);
    score[0] = sum[0];
    score[1] = sum[1];
}

static void score_vnni(const di_index_tiles *k, const di_index_query *q, const float *w, int64_t tile, int n_tiles,
                       __m512 score[2]) {
    if (n_tiles == 2)
        score_tiles(k, q, w, tile, score, 2, true);
    else
        score_tiles(k, q, w, tile, score, 1, true);
}

static void score_plain(const di_index_tiles *k, const di_index_query *q, const float *w, int64_t tile, int n_tiles,
                        __m512 score[2]) {
    if (n_tiles == 2)
        score_tiles(k, q, w, tile, score, 2, false);
    else
        score_tiles(k, q, w, tile, score, 1, false);
}

/* One score from floats, as the reference makes it. */
static float score_alone(const di_index_tiles *k, const di_index_query *q, const float *w, int64_t entry) {
    const di_index_select_args *a = k->a;
    di_cpu_entry_load(a->rows, &a->keys, k->seq, (int32_t)entry, k->key);
    float score = 0.0f;
    for (int64_t h = 0; h < a->n_heads; h++) {
        for (int64_t i = 0; i < a->dim; i++) {
            int64_t at = i / GROUP * a->n_heads + h, in = i % GROUP;
            int8_t code = q->codes[at * GROUP + in / 8 * 8 + in % 2 * 4 + in % 8 / 2];
            k->head[i] = 0.5f * code * q->scale[at];
        }
        float dot = di_dot32(k->head, k->key, a->dim);
        score += w[h] * (dot > 0.0f ? dot : 0.0f);
    }
    return a->round_bf16 ? di_round_bf16(score) : score;
}

/* The lanes of `mask` of two tiles of a row to out. */
static void score_pair(di_index_tiles *k, const di_index_query *q, const float *w, int64_t tile, uint32_t mask,
                       float *out) {
    int n_tiles = mask >> TILE ? 2 : 1;
    for (int t = 0; t < n_tiles; t++) {
        if (!k->is_ready[tile + t])
            make_tile(k, tile + t);
    }
    __m512 score[2];
    k->lanes->score(k, q, w, tile, n_tiles, score);
    for (int t = 0; t < n_tiles; t++)
        _mm512_mask_storeu_ps(out + t * TILE, (__mmask16)(mask >> t * TILE),
                              k->a->round_bf16 ? di_v16_round_bf16(score[t]) : score[t]);
    uint32_t far = (uint32_t)k->far[tile] | (n_tiles == 2 ? (uint32_t)k->far[tile + 1] << TILE : 0);
    for (uint32_t left = *q->is_plain ? far & mask : mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        out[lane] = score_alone(k, q, w, k->base + tile * TILE + lane);
    }
}

void di_index_lanes_score(const di_index_job *j, const di_index_lanes *lanes, int64_t row, int64_t end, int64_t base,
                          int64_t n, uint8_t *scratch) {
    const di_index_select_args *a = j->a;
    int64_t n_groups = a->dim / GROUP;
    di_index_tiles k = {.a = a, .lanes = lanes, .seq = a->rows->seq[row], .base = base, .n = n};
    k.codes = di_cpu_take(&scratch, (size_t)(DI_INDEX_TILES * n_groups) * lanes->group_bytes);
    k.scales = di_cpu_take(&scratch, (size_t)(DI_INDEX_TILES * n_groups * TILE) * sizeof(float));
    k.key = di_cpu_take(&scratch, (size_t)a->dim * sizeof(float));
    k.head = di_cpu_take(&scratch, (size_t)a->dim * sizeof(float));
    k.dots = di_cpu_take(&scratch, (size_t)(j->heads * 2 * TILE) * sizeof(float));
    for (; row < end; row++) {
        int64_t row_end = DI_MIN(base + DI_CPU_INDEX_ENTRIES, di_cpu_index_visible(a, row));
        if (base >= row_end)
            continue;
        uint32_t wanted = di_cpu_index_wanted(a, row, base, row_end);
        di_index_query q = di_index_lanes_query_of(a, di_index_query_of(j, row));
        float *out = di_index_scores_of(j, row) + base;
        for (int64_t tile = 0; tile * TILE < row_end - base; tile += 2) {
            int64_t left = row_end - base - tile * TILE;
            uint32_t seen = left >= 2 * TILE ? UINT32_MAX : ((uint32_t)1 << left) - 1;
            /* A bit of the pair's 4 becomes 8 lanes. */
            uint32_t four = wanted >> tile * TILE / DI_CPU_INDEX_GROUP & 15;
            uint32_t mask = (uint32_t)_pdep_u32(four, 0x01010101u) * 255u & seen;
            for (int t = 0; t < 2 && mask != seen; t++)
                _mm512_mask_storeu_ps(out + (tile + t) * TILE, (__mmask16)((seen & ~mask) >> t * TILE),
                                      _mm512_set1_ps(-INFINITY));
            if (mask)
                score_pair(&k, &q, di_index_weights_of(j, row), tile, mask, out + tile * TILE);
        }
    }
}

static void avx512_score(const di_index_job *j, int64_t row, int64_t end, int64_t base, int64_t n, uint8_t *scratch) {
    static const di_index_lanes vnni = {GROUP_BYTES, put_bytes, score_vnni},
                                plain = {GROUP_BYTES, put_bytes, score_plain};
    di_index_lanes_score(j, __builtin_cpu_supports("avx512vnni") ? &vnni : &plain, row, end, base, n, scratch);
}

/* ---- the best ---------------------------------------------------------------------------------------------------- */

enum { KEPT_MAX = 4096 }; /* candidates for the best, and maxima, at most */

/* Unsigned numbers that order as scores do, the two zeros one; 0 for what is never chosen: NaN and -inf. */
static inline __m512i rank_16(__m512 x) {
    __m512i u = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    __m512i flip = _mm512_or_si512(_mm512_srai_epi32(u, 31), _mm512_set1_epi32((int)0x80000000u));
    return _mm512_maskz_xor_epi32(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ), u, flip);
}

static inline float from_rank(uint32_t rank) {
    return di_f32_from_bits(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

static inline __mmask16 lanes_below(int64_t i, int64_t n) {
    return n - i >= DI_LANES ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
}

/* The k-th largest of n ranks, of which at least k are not 0; ranks are padded with 0 to whole vectors. Bit by bit from
 * the top, and only the bits in which ranks differ. */
static uint32_t kth_rank(const uint32_t *ranks, int64_t n, int64_t k) {
    __m512i differ = _mm512_setzero_si512(), some = _mm512_set1_epi32((int)ranks[0]);
    for (int64_t i = 0; i < n; i += DI_LANES)
        differ = _mm512_or_si512(differ, _mm512_xor_si512(some, _mm512_loadu_si512(ranks + i)));
    uint32_t open = (uint32_t)_mm512_reduce_or_epi32(differ), found = ranks[0] & ~open;
    while (open) {
        uint32_t bit = (uint32_t)1 << (31 - __builtin_clz(open));
        __m512i least = _mm512_set1_epi32((int)(found | bit));
        int64_t count = 0;
        for (int64_t i = 0; i < n; i += DI_LANES)
            count += __builtin_popcount(_mm512_cmpge_epu32_mask(_mm512_loadu_si512(ranks + i), least));
        if (count >= k)
            found |= bit;
        open ^= bit;
    }
    return found;
}

/* The same over scores, for when too many reach the limit to be kept. */
static uint32_t kth_score(const float *s, int64_t n, int64_t k) {
    uint32_t found = 0;
    for (uint32_t bit = (uint32_t)1 << 31; bit; bit >>= 1) {
        __m512i least = _mm512_set1_epi32((int)(found | bit));
        int64_t count = 0;
        for (int64_t i = 0; i < n; i += DI_LANES) {
            __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_below(i, n), s + i);
            count += __builtin_popcount(_mm512_cmpge_epu32_mask(rank_16(x), least));
        }
        if (count >= k)
            found |= bit;
    }
    return found;
}

/* The lowest `n` bits that are set. */
static inline uint32_t lowest_bits(uint32_t mask, int64_t n) {
    return n >= 32 ? mask : _pdep_u32(((uint32_t)1 << n) - 1, mask);
}

/* Appends the indices of the ranks above `last`, and of `ties` ranks equal to it, lower index first. */
typedef struct taker {
    __m512i last;
    int64_t ties;
    int32_t *out, n;
} taker;

static inline void take(taker *t, __m512i ranks, __m512i idx) {
    uint32_t equal = _mm512_cmpeq_epi32_mask(ranks, t->last);
    uint32_t chosen = _mm512_cmpgt_epu32_mask(ranks, t->last);
    if (equal && t->ties > 0) {
        equal = lowest_bits(equal, t->ties);
        t->ties -= __builtin_popcount(equal);
        chosen |= equal;
    }
    _mm512_mask_compressstoreu_epi32(t->out + t->n, (__mmask16)chosen, idx);
    t->n += __builtin_popcount(chosen);
}

/* A score that at least k scores reach, or the least finite one: the k-th largest of the maxima of disjoint groups. The
 * groups are spread over all of s, since large scores lie close together. */
static float limit_of(const float *s, int64_t n, int64_t k) {
    int64_t n_vecs = n / DI_LANES, n_groups = DI_MIN(DI_CEIL_DIV(2 * k, DI_LANES), n_vecs / 2);
    if (n_groups * DI_LANES < k || n_groups * DI_LANES > KEPT_MAX)
        return -FLT_MAX;
    uint32_t ranks[KEPT_MAX];
    float *maxima = (float *)(void *)ranks;
    for (int64_t g = 0; g < n_groups; g++)
        _mm512_storeu_ps(maxima + g * DI_LANES, _mm512_set1_ps(-INFINITY));
    for (int64_t v = 0; v < n_vecs; v += n_groups) {
        const float *from = s + v * DI_LANES;
        for (int64_t g = 0; g < DI_MIN(n_groups, n_vecs - v); g++) {
            float *m = maxima + g * DI_LANES;
            _mm512_storeu_ps(m, _mm512_max_ps(_mm512_loadu_ps(from + g * DI_LANES), _mm512_loadu_ps(m)));
        }
    }
    int64_t usable = 0;
    for (int64_t g = 0; g < n_groups; g++) {
        __m512i r = rank_16(_mm512_loadu_ps(maxima + g * DI_LANES));
        usable += __builtin_popcount(_mm512_test_epi32_mask(r, r));
        _mm512_storeu_si512(ranks + g * DI_LANES, r);
    }
    return usable < k ? -FLT_MAX : from_rank(kth_rank(ranks, n_groups * DI_LANES, k));
}

/* Which of the 64 scores from i on reach the limit. */
static inline uint64_t reach(const float *s, int64_t i, int64_t n, __m512 least) {
    uint64_t found = 0;
    for (int v = 0; v < 4; v++) {
        int64_t at = i + v * DI_LANES;
        __mmask16 here = n - at >= DI_LANES ? 0xFFFF : n <= at ? 0 : lanes_below(at, n);
        __mmask16 m = _mm512_mask_cmp_ps_mask(here, _mm512_maskz_loadu_ps(here, s + at), least, _CMP_GE_OQ);
        found |= (uint64_t)m << v * DI_LANES;
    }
    return found;
}

/* Indices of the scores from `limit` up, ascending; returns how many, KEPT_MAX or more when not all are kept. */
static int64_t keep(const float *s, int64_t n, float limit, int32_t *kept) {
    const __m512 least = _mm512_set1_ps(limit);
    int64_t count = 0;
    for (int64_t i = 0; i < n && count < KEPT_MAX; i += 4 * DI_LANES) {
        for (uint64_t left = reach(s, i, n, least); left; left &= left - 1)
            kept[count++] = (int32_t)i + __builtin_ctzll(left);
    }
    return count;
}

void di_index_lanes_best(const float *s, int64_t n, int32_t k, int32_t *out) {
    taker t = {.out = out};
    if (k > 0) {
        int32_t kept[KEPT_MAX + 64]; /* the last 64 scores looked at may all be kept */
        uint32_t ranks[KEPT_MAX];
        float limit = n < KEPT_MAX && n < 4 * (int64_t)k ? -FLT_MAX : limit_of(s, n, k);
        int64_t count = keep(s, n, limit, kept);
        if (count < KEPT_MAX) {
            for (int64_t i = 0; i < count; i += DI_LANES) {
                __mmask16 here = lanes_below(i, count);
                __m512 x = _mm512_mask_i32gather_ps(_mm512_set1_ps(-INFINITY), here,
                                                    _mm512_maskz_loadu_epi32(here, kept + i), s, 4);
                _mm512_storeu_si512(ranks + i, rank_16(x));
            }
            uint32_t last = count > k ? kth_rank(ranks, count, k) : 1;
            t.last = _mm512_set1_epi32((int)last);
            int64_t above = 0;
            for (int64_t i = 0; i < count && count > k; i += DI_LANES)
                above += __builtin_popcount(_mm512_cmpgt_epu32_mask(_mm512_loadu_si512(ranks + i), t.last));
            t.ties = k - above;
            for (int64_t i = 0; i < count; i += DI_LANES)
                take(&t, _mm512_loadu_si512(ranks + i), _mm512_maskz_loadu_epi32(lanes_below(i, count), kept + i));
        } else {
            uint32_t last = DI_MAX(kth_score(s, n, k), 1u); /* 0 where fewer than k can be chosen */
            t.last = _mm512_set1_epi32((int)last);
            int64_t above = 0;
            for (int pass = 0; pass < 2; pass++) {
                __m512i idx = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
                t.ties = k - above;
                for (int64_t i = 0; i < n; i += DI_LANES) {
                    __m512i r = rank_16(_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_below(i, n), s + i));
                    if (pass == 0)
                        above += __builtin_popcount(_mm512_cmpgt_epu32_mask(r, t.last));
                    else
                        take(&t, r, idx);
                    idx = _mm512_add_epi32(idx, _mm512_set1_epi32(DI_LANES));
                }
            }
        }
    }
    for (int32_t i = t.n; i < k; i++)
        out[i] = -1;
}

/* The larger of neighbours: 32 values to 16. */
static inline __m512 max_of_pairs(__m512 a, __m512 b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_max_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

void di_index_lanes_block_max(const float *s, int64_t n, int64_t block, float *out) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    int64_t b = 0;
    for (; block == 8 && (b + 16) * 8 <= n; b += 16) {
        __m512 m[8];
        for (int i = 0; i < 8; i++)
            m[i] = _mm512_max_ps(_mm512_loadu_ps(s + b * 8 + i * DI_LANES), none); /* none for NaN */
        for (int width = 8; width > 1; width /= 2) {
            for (int i = 0; i < width; i += 2)
                m[i / 2] = max_of_pairs(m[i], m[i + 1]);
        }
        _mm512_storeu_ps(out + b, m[0]);
    }
    for (; b * block < n; b++) {
        __m512 most = none;
        int64_t end = DI_MIN((b + 1) * block, n);
        for (int64_t i = b * block; i < end; i += DI_LANES)
            most =
                _mm512_mask_max_ps(most, lanes_below(i, end), _mm512_maskz_loadu_ps(lanes_below(i, end), s + i), most);
        out[b] = _mm512_reduce_max_ps(most);
    }
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

di_status di_cpu_index_select_lanes(di_stream *stream, const di_index_select_args *a, const di_index_steps *steps) {
    if (a->keys.format == DI_KV_MX4)
        return di_cpu_index_run(stream, a, steps);
    di_index_steps others = di_index_portable_steps;
    others.best = di_index_lanes_best;
    others.block_max = di_index_lanes_block_max;
    return di_cpu_index_run(stream, a, &others);
}

static di_status avx512_index_select(di_stream *stream, const di_index_select_args *a) {
    static const di_index_steps steps = {di_index_lanes_query, avx512_score, di_index_lanes_best,
                                         di_index_lanes_block_max};
    return di_cpu_index_select_lanes(stream, a, &steps);
}

void di_cpu_install_avx512_index(di_cpu_kernels *k) {
    k->index_select = avx512_index_select;
    k->topk = di_index_lanes_best;
}
