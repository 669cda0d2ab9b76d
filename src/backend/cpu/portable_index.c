/* The indexer's selection for speed in plain C; bit for bit ref_index.c.
 *
 * Rows are taken in waves whose scores fit the shared scratch, so that memory does not grow with rows times entries:
 *
 *     1  a part is a row:                its query, quantised
 *     2  a part is 16 rows by 256 entries: keys decoded once into panels of 8 (only those that a row needs), then the
 *                                          rows' scores, 8 entries and 4 heads at a time
 *     3  a part is a row:                the best blocks and entries, by a radix search for the last one that gets in
 *
 * The search looks at all scores a fixed number of times, whatever their order, and leaves the chosen ascending. */
#include "index.h"
#include "portable_tile.h"

#define TILE_ENTRIES DI_CPU_INDEX_ENTRIES
#define TILE_PANELS (TILE_ENTRIES / DI_TILE_LANES)
#define TILE_INDEX_ROWS 16

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

static int64_t heads_padded(int64_t n_heads) {
    return DI_ROUND_UP(n_heads, DI_TILE_ROWS);
}

static int64_t score_room(int64_t entries_max) {
    return 4 * DI_ROUND_UP(entries_max, DI_TILE_LANES) + 4 * DI_TILE_LANES;
}

static di_index_scratch cut_scratch(const di_limits *limits, uint8_t *base, size_t *n_bytes) {
    di_index_scratch s;
    uint8_t *at = base;
    int64_t heads = heads_padded(limits->index_heads);
    s.n_scores = score_room(limits->entries_max);
    size_t sizes[] = {(size_t)(DI_CPU_INDEX_ROWS * heads * limits->index_dim) * sizeof(float),
                      (size_t)(DI_CPU_INDEX_ROWS * heads) * sizeof(float), (size_t)s.n_scores * sizeof(float),
                      (size_t)(s.n_scores / DI_TILE_LANES) * sizeof(float)};
    *n_bytes = 0;
    for (size_t i = 0; i < DI_COUNT(sizes); i++)
        *n_bytes += di_cpu_piece(sizes[i]);
    if (!base)
        return s;
    s.q = di_cpu_take(&at, sizes[0]);
    s.w = di_cpu_take(&at, sizes[1]);
    s.scores = di_cpu_take(&at, sizes[2]);
    s.block_scores = di_cpu_take(&at, sizes[3]);
    return s;
}

di_index_scratch di_cpu_index_scratch(const di_stream *stream) {
    size_t n_bytes;
    return cut_scratch(&stream->dev->limits, di_cpu_shared(stream), &n_bytes);
}

void di_cpu_need_index(const di_limits *limits, di_cpu_need *need) {
    size_t shared;
    cut_scratch(limits, NULL, &shared);
    size_t panels = di_cpu_piece((size_t)(TILE_ENTRIES * limits->index_dim) * sizeof(float));
    size_t key = di_cpu_piece((size_t)limits->index_dim * sizeof(float));
    size_t query =
        di_cpu_piece(di_kv_record_bytes(DI_KV_MX4, limits->index_heads * DI_ROUND_UP(limits->index_dim, 32)));
    di_cpu_need_raise(need, shared, DI_MAX(panels + key, query));
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

typedef struct job {
    di_stream *stream;
    const di_index_select_args *a;
    di_index_scratch s;
    int64_t heads;        /* padded to a multiple of 4; the queries of the padding are zero */
    int64_t row0, n_rows; /* the wave */
    int64_t stride;       /* scores between its rows, a multiple of 8 */
    int64_t n_chunks;     /* of TILE_ENTRIES */
} job;

static void query_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_index_select_args *a = j->a;
    int64_t n = (int64_t)a->n_heads * a->dim, stride = j->heads * a->dim;
    float *q = j->s.q + part * stride, *w = j->s.w + part * j->heads;
    di_cpu_index_query(a, j->row0 + part, di_cpu_worker(j->stream, worker), q);
    memset(q + n, 0, (size_t)(stride - n) * sizeof(float));
    di_cpu_load(&a->w, j->row0 + part, 0, a->n_heads, w);
}

/* Scores of one row against one panel of 8 keys. */
static void score_panel(const job *j, const float *q, const float *w, const float *panel, float *out) {
    const di_index_select_args *a = j->a;
    const di_f4 zero = {0};
    di_f4 score[2] = {zero, zero};
    for (int64_t h = 0; h < a->n_heads; h += DI_TILE_ROWS) {
        di_tile t;
        di_tile_dots(q + h * a->dim, a->dim, panel, a->dim, &t);
        for (int r = 0; r < DI_TILE_ROWS && h + r < a->n_heads; r++) {
            di_f4 weight = di_f4_splat(w[h + r]);
            score[0] += weight * di_f4_relu(t.v[r][0]);
            score[1] += weight * di_f4_relu(t.v[r][1]);
        }
    }
    di_f4_store(out, score[0]);
    di_f4_store(out + 4, score[1]);
    for (int lane = 0; lane < DI_TILE_LANES && a->round_bf16; lane++)
        out[lane] = di_round_bf16(out[lane]);
}

/* Keys of entries [base, base + TILE_ENTRIES) below n of one sequence, decoded panel by panel when first asked for. */
typedef struct key_panels {
    float *panels, *key;
    bool is_ready[TILE_PANELS];
} key_panels;

static const float *panel_of(const job *j, key_panels *k, int32_t seq, int64_t base, int64_t n, int64_t i) {
    const di_index_select_args *a = j->a;
    float *panel = k->panels + i * DI_TILE_LANES * a->dim;
    if (!k->is_ready[i]) {
        k->is_ready[i] = true;
        int64_t first = base + i * DI_TILE_LANES, end = DI_MIN(first + DI_TILE_LANES, n);
        for (int64_t e = first; e < end; e++) {
            di_cpu_entry_load(a->rows, &a->keys, seq, (int32_t)e, k->key);
            di_panel_put_column(panel, e - first, a->dim, k->key);
        }
    }
    return panel;
}

/* Position in an ascending list with -1 at its end of the first block >= `block`; the list's used length when none. */
static int32_t list_find(const int32_t *list, int32_t n, int64_t block) {
    int32_t lo = 0, hi = n;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (list[mid] >= 0 && list[mid] < block)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Scores of one row for entries [base, end). n: entries that the panels may decode. */
static void score_row(const job *j, key_panels *k, int64_t row, int64_t base, int64_t end, int64_t n) {
    const di_index_select_args *a = j->a;
    int64_t at = row - j->row0;
    int32_t seq = a->rows->seq[row];
    const float *q = j->s.q + at * j->heads * a->dim, *w = j->s.w + at * j->heads;
    float *scores = j->s.scores + at * j->stride + base;
    if (!a->cand_in) {
        for (int64_t i = 0; i * DI_TILE_LANES < end - base; i++)
            score_panel(j, q, w, panel_of(j, k, seq, base, n, i), scores + i * DI_TILE_LANES);
        return;
    }
    for (int64_t e = 0; e < DI_ROUND_UP(end - base, DI_TILE_LANES); e++)
        scores[e] = -INFINITY;
    const int32_t *list = a->cand_in + row * a->n_cand;
    for (int32_t t = list_find(list, a->n_cand, base / a->cand_block); t < a->n_cand && list[t] >= 0; t++) {
        int64_t first = DI_MAX((int64_t)list[t] * a->cand_block, base);
        int64_t last = DI_MIN((int64_t)(list[t] + 1) * a->cand_block, end);
        if (first >= end)
            break;
        for (int64_t i = (first - base) / DI_TILE_LANES; i * DI_TILE_LANES < last - base; i++)
            score_panel(j, q, w, panel_of(j, k, seq, base, n, i), scores + i * DI_TILE_LANES);
    }
}

static void score_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_index_select_args *a = j->a;
    uint8_t *at = di_cpu_worker(j->stream, worker);
    key_panels k;
    k.panels = di_cpu_take(&at, (size_t)(TILE_ENTRIES * a->dim) * sizeof(float));
    k.key = di_cpu_take(&at, (size_t)a->dim * sizeof(float));
    int64_t base = part % j->n_chunks * TILE_ENTRIES, wave_end = j->row0 + j->n_rows;
    int64_t row = j->row0 + part / j->n_chunks * TILE_INDEX_ROWS, end = DI_MIN(row + TILE_INDEX_ROWS, wave_end);
    while (row < end) {
        /* Rows of one sequence share panels. */
        int64_t next = row, n = 0;
        for (; next < end && a->rows->seq[next] == a->rows->seq[row]; next++)
            n = DI_MAX(n, di_cpu_index_visible(a, next));
        memset(k.is_ready, 0, sizeof k.is_ready);
        for (; row < next; row++) {
            int64_t row_end = DI_MIN(base + TILE_ENTRIES, di_cpu_index_visible(a, row));
            if (base < row_end)
                score_row(j, &k, row, base, row_end, n);
        }
    }
}

/* ---- the best ---------------------------------------------------------------------------------------------------- */

/* An unsigned number that orders as the score does; the two zeros are one. */
static inline uint32_t rank_of(float score) {
    uint32_t bits = di_f32_bits(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline bool is_usable(float score) {
    return score > -INFINITY; /* false for NaN */
}

/* The k best of s, ascending, ties to the lower index, padded with -1. The rank of the last one that gets in is found
 * digit by digit, from the top: `left` of the scores whose higher digits equal `prefix` still have to be chosen. */
static void best(const float *s, int64_t n, int32_t k, int32_t *out) {
    int64_t usable = 0;
    for (int64_t i = 0; i < n; i++)
        usable += is_usable(s[i]);
    int64_t left = DI_MIN((int64_t)k, usable);
    uint32_t prefix = 0, mask = 0;
    bool is_all = usable <= k;
    for (int shift = 24; shift >= 0 && !is_all; shift -= 8) {
        uint32_t count[256] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t rank = rank_of(s[i]);
            if (is_usable(s[i]) && (rank & mask) == prefix)
                count[rank >> shift & 255]++;
        }
        uint32_t digit = 255;
        for (; left > count[digit]; digit--)
            left -= count[digit];
        prefix |= digit << shift;
        mask |= 255u << shift;
        if (left == count[digit]) { /* all of them get in: lower digits don't matter */
            left = INT64_MAX;
            break;
        }
    }
    int32_t at = 0;
    for (int64_t i = 0; i < n && at < k; i++) {
        if (!is_usable(s[i]))
            continue;
        uint32_t rank = rank_of(s[i]) & mask;
        if (rank > prefix || is_all)
            out[at++] = (int32_t)i;
        else if (rank == prefix && left > 0) {
            left--;
            out[at++] = (int32_t)i;
        }
    }
    while (at < k)
        out[at++] = -1;
}

static void select_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const job *j = ctx;
    const di_index_select_args *a = j->a;
    int64_t row = j->row0 + part, n = di_cpu_index_visible(a, row);
    const float *scores = j->s.scores + part * j->stride;
    best(scores, n, a->topk, a->idx + row * a->topk);
    if (a->cand_out) {
        const float bf16_max = di_bf16_to_f32(0x7F7F);
        float *blocks = j->s.block_scores + part * (j->stride / DI_TILE_LANES);
        int64_t n_blocks = DI_CEIL_DIV(n, a->cand_block);
        for (int64_t b = 0; b < n_blocks; b++) {
            float most = -INFINITY;
            int64_t end = DI_MIN((b + 1) * a->cand_block, n);
            for (int64_t e = b * a->cand_block; e < end; e++)
                most = scores[e] > most ? scores[e] : most;
            blocks[b] = most > bf16_max ? bf16_max : most;
        }
        if (n_blocks)
            blocks[n_blocks - 1] = INFINITY;
        best(blocks, n_blocks, a->n_cand, a->cand_out + row * a->n_cand);
    }
    if (a->scores) {
        float *out = a->scores + row * a->scores_stride;
        memcpy(out, scores, (size_t)n * sizeof(float));
        for (int64_t e = n; e < a->scores_stride; e++)
            out[e] = -INFINITY;
    }
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

/* Takes rows from row0 on while their scores fit. */
static void take_wave(job *j) {
    j->n_rows = 0;
    j->stride = DI_TILE_LANES;
    while (j->n_rows < DI_CPU_INDEX_ROWS && j->row0 + j->n_rows < j->a->rows->n_rows) {
        int64_t n = DI_ROUND_UP(di_cpu_index_visible(j->a, j->row0 + j->n_rows), DI_TILE_LANES);
        int64_t stride = DI_MAX(j->stride, n);
        if ((j->n_rows + 1) * stride > j->s.n_scores)
            break;
        j->stride = stride;
        j->n_rows++;
    }
    j->n_chunks = DI_CEIL_DIV(j->stride, TILE_ENTRIES);
}

static di_status portable_index_select(di_stream *stream, const di_index_select_args *a) {
    if (!di_cpu_index_fits(stream, a))
        return DI_ERR_SHAPE;
    job j = {.stream = stream, .a = a, .s = di_cpu_index_scratch(stream), .heads = heads_padded(a->n_heads)};
    for (j.row0 = 0; j.row0 < a->rows->n_rows; j.row0 += j.n_rows) {
        take_wave(&j);
        int64_t n_q = (int64_t)a->n_heads * a->dim;
        di_cpu_run(stream, query_part, &j, j.n_rows, j.n_rows * n_q * 4);
        di_cpu_run(stream, score_part, &j, DI_CEIL_DIV(j.n_rows, TILE_INDEX_ROWS) * j.n_chunks,
                   j.n_rows * j.stride * n_q);
        di_cpu_run(stream, select_part, &j, j.n_rows, j.n_rows * j.stride * 8);
    }
    return DI_OK;
}

void di_cpu_install_portable_index(di_cpu_kernels *k) {
    k->index_select = portable_index_select;
}
