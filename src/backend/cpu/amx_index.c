/* Index scores with AMX; the rest is avx512_index.c's, and the bits are ref_index.c's.
 *
 * Quantised keys and queries are bf16 values, and a tile product over 32 values makes exactly the sums of di_dot32.
 * Rows of the result are heads, columns are entries, so that the weighted sum over heads adds whole rows, in rising
 * order:
 *
 *     queries  [16 heads, 32 values], rows of the row's query
 *     keys     [16 pairs of values, 16 entries, 2], made from the codes, once for all rows of a part
 *     dots     [16 heads, 16 entries] of floats: 2 x 2 of them are made at a time */
#include "avx512_index.h"

#include "amx_tiles.h"

enum { TILE = DI_INDEX_TILE, GROUP = DI_INDEX_GROUP, GROUP_BYTES = GROUP * TILE * 2, HEADS = 16 };

static void query(const di_index_job *j, int64_t row, float *room, float *w, uint8_t *scratch) {
    const di_index_select_args *a = j->a;
    int64_t n = (int64_t)a->n_heads * a->dim;
    di_index_lanes_query(j, row, room, w, scratch);
    di_index_query q = di_index_lanes_query_of(a, room);
    di_v16_kv_bf16(DI_KV_MX4, scratch, scratch + n / 2, n, q.values);
    memset(q.values + n, 0, (size_t)(j->heads * a->dim - n) * sizeof *q.values);
}

/* Pairs of bf16 values: a code's value by a table, times the entry's power of two by the exponent field. */
static void put_pairs(uint8_t *codes, const __m512i packed[4], const __m512i *scale) {
    uint16_t values[32]; /* twice the table: the permutation looks at 5 bits of an index, of which 4 are a code's */
    for (int i = 0; i < 32; i++)
        values[i] = di_f32_to_bf16(di_e2m1_table[i & 15]);
    const __m512i table = _mm512_loadu_si512(values), magnitude = _mm512_set1_epi16(0x7FFF);
    __m512i shift = _mm512_slli_epi32(_mm512_sub_epi32(*scale, _mm512_set1_epi32(127)), 7);
    shift = _mm512_or_si512(_mm512_and_si512(shift, _mm512_set1_epi32(0xFFFF)), _mm512_slli_epi32(shift, 16));
    for (int i = 0; i < 4; i++) {
        for (int pair = 0; pair < 4; pair++, codes += 64) {
            /* Bits that the bytes of a quadword, two lanes, start from: each word takes the code of its value. */
            uint64_t from = 0x0024002000040000u + 0x0008000800080008u * (uint64_t)pair;
            __m512i two = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)from), packed[i]);
            __m512i x = _mm512_permutexvar_epi16(two, table);
            x = _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, magnitude), x, shift);
            _mm512_store_si512(codes, x);
        }
    }
}

/* Dots of one or two tiles of heads with one or two tiles of entries. Tiles 0 .. 3 are dots [heads, entries], 4 and 5
 * queries, 6 and 7 keys. */
static inline __attribute__((always_inline)) void make_dots(const uint16_t *q, int64_t dim, const uint8_t *codes,
                                                            float *dots, const bool has_heads_2,
                                                            const bool has_tile_2) {
    size_t stride = (size_t)dim * sizeof *q, dots_stride = 2 * TILE * sizeof *dots;
    const uint8_t *codes_2 = codes + dim / GROUP * GROUP_BYTES;
    DI_TILE_ZERO(0);
    DI_TILE_ZERO(1);
    DI_TILE_ZERO(2);
    DI_TILE_ZERO(3);
    for (int64_t i = 0; i < dim; i += GROUP, codes += GROUP_BYTES, codes_2 += GROUP_BYTES) {
        DI_TILE_LOAD(4, q + i, stride);
        DI_TILE_LOAD(6, codes, 64);
        DI_TILE_DOT(0, 4, 6);
        if (has_tile_2) {
            DI_TILE_LOAD(7, codes_2, 64);
            DI_TILE_DOT(1, 4, 7);
        }
        if (has_heads_2) {
            DI_TILE_LOAD(5, q + HEADS * dim + i, stride);
            DI_TILE_DOT(2, 5, 6);
            if (has_tile_2)
                DI_TILE_DOT(3, 5, 7);
        }
    }
    DI_TILE_STORE(0, dots, dots_stride);
    if (has_tile_2)
        DI_TILE_STORE(1, dots + TILE, dots_stride);
    if (has_heads_2) {
        DI_TILE_STORE(2, dots + HEADS * 2 * TILE, dots_stride);
        if (has_tile_2)
            DI_TILE_STORE(3, dots + HEADS * 2 * TILE + TILE, dots_stride);
    }
}

static void score_tiles(const di_index_tiles *k, const di_index_query *q, const float *w, int64_t tile, int n_tiles,
                        __m512 score[2]) {
    int64_t dim = k->a->dim, n_heads = k->a->n_heads;
    const uint8_t *codes = k->codes + tile * (dim / GROUP) * GROUP_BYTES;
    for (int64_t h = 0; h < n_heads; h += 2 * HEADS) {
        const uint16_t *values = q->values + h * dim;
        float *dots = k->dots + h * 2 * TILE;
        if (n_heads - h > HEADS) {
            if (n_tiles == 2)
                make_dots(values, dim, codes, dots, true, true);
            else
                make_dots(values, dim, codes, dots, true, false);
        } else if (n_tiles == 2) {
            make_dots(values, dim, codes, dots, false, true);
        } else {
            make_dots(values, dim, codes, dots, false, false);
        }
    }
    const __m512 zero = _mm512_setzero_ps();
    score[0] = score[1] = zero;
    for (int64_t h = 0; h < n_heads; h++) {
        __m512 by = _mm512_set1_ps(w[h]);
        for (int t = 0; t < n_tiles; t++) {
            /* The larger of NaN and 0 is 0. */
            __m512 dot = _mm512_max_ps(_mm512_loadu_ps(k->dots + (h * 2 + t) * TILE), zero);
            score[t] = _mm512_add_ps(score[t], _mm512_mul_ps(by, dot));
        }
    }
}

static void score(const di_index_job *j, int64_t row, int64_t end, int64_t base, int64_t n, uint8_t *scratch) {
    static const di_index_lanes lanes = {GROUP_BYTES, put_pairs, score_tiles};
    di_tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = GROUP * sizeof(uint16_t);
        config.rows[i] = TILE;
    }
    di_tile_configure(&config);
    di_index_lanes_score(j, &lanes, row, end, base, n, scratch);
    DI_TILE_RELEASE();
}

static di_status amx_index_select(di_stream *stream, const di_index_select_args *a) {
    static const di_index_steps steps = {query, score, di_index_lanes_best, di_index_lanes_block_max};
    return di_cpu_index_select_lanes(stream, a, &steps);
}

void di_cpu_install_amx_index(di_cpu_kernels *k) {
    k->index_select = amx_index_select;
}
