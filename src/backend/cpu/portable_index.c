/* The course of the indexer's selection for all fast levels, and the portable level's; bit for bit ref_index.c.
 *
 * Rows are taken in waves whose scores fit the shared scratch, so that memory does not grow with rows times entries:
 *
 *     1  a part is a row:                its query, quantised
 *     2  a part is 16 rows by 256 entries: keys decoded once, then the rows' scores
 *     3  a part is a row:                the best blocks and entries
 *
 * Levels put their own steps into it (index.h). */
#include "lanes_portable.h"

#include "index_body.h"

#define TILE_INDEX_ROWS 16

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

static int64_t heads_padded(int64_t n_heads) {
    return DI_ROUND_UP(n_heads, 16);
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
    /* Other levels' decoded keys take less than the panels; their dot products of two tiles with all heads take: */
    size_t dots = di_cpu_piece((size_t)(heads_padded(limits->index_heads) * 64) * sizeof(float));
    di_cpu_need_raise(need, shared, DI_MAX(panels + 2 * key + dots, query));
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

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

uint32_t di_cpu_index_wanted(const di_index_select_args *a, int64_t row, int64_t base, int64_t end) {
    int64_t n_groups = DI_CEIL_DIV(end - base, DI_CPU_INDEX_GROUP);
    uint32_t all = n_groups >= 32 ? UINT32_MAX : ((uint32_t)1 << n_groups) - 1, wanted = 0;
    if (!a->cand_in)
        return all;
    const int32_t *list = a->cand_in + row * a->n_cand;
    for (int32_t t = list_find(list, a->n_cand, base / a->cand_block); t < a->n_cand && list[t] >= 0; t++) {
        int64_t first = DI_MAX((int64_t)list[t] * a->cand_block, base);
        int64_t last = DI_MIN((int64_t)(list[t] + 1) * a->cand_block, end);
        if (first >= end)
            break;
        for (int64_t e = first; e < last; e += DI_CPU_INDEX_GROUP)
            wanted |= (uint32_t)1 << (e - base) / DI_CPU_INDEX_GROUP;
    }
    return wanted;
}

const di_index_steps di_index_portable_steps = {panel_query, panel_scores, panel_best, block_max};

/* ---- the operation ----------------------------------------------------------------------------------------------- */

static void query_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const di_index_job *j = ctx;
    int64_t row = j->row0 + part;
    j->steps->query(j, row, di_index_query_of(j, row), di_index_weights_of(j, row), di_cpu_worker(j->stream, worker));
}

static void score_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const di_index_job *j = ctx;
    const di_index_select_args *a = j->a;
    int64_t base = part % j->n_chunks * TILE_ENTRIES, wave_end = j->row0 + j->n_rows;
    int64_t row = j->row0 + part / j->n_chunks * TILE_INDEX_ROWS, end = DI_MIN(row + TILE_INDEX_ROWS, wave_end);
    while (row < end) {
        /* Rows of one sequence share decoded keys. */
        int64_t next = row, n = 0;
        for (; next < end && a->rows->seq[next] == a->rows->seq[row]; next++)
            n = DI_MAX(n, di_cpu_index_visible(a, next));
        if (base < n)
            j->steps->score(j, row, next, base, n, di_cpu_worker(j->stream, worker));
        row = next;
    }
}

static void select_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const di_index_job *j = ctx;
    const di_index_select_args *a = j->a;
    int64_t row = j->row0 + part, n = di_cpu_index_visible(a, row);
    const float *scores = di_index_scores_of(j, row);
    j->steps->best(scores, n, a->topk, a->idx + row * a->topk);
    if (a->cand_out) {
        const float bf16_max = di_bf16_to_f32(0x7F7F);
        float *blocks = j->s.block_scores + part * (j->stride / DI_CPU_INDEX_GROUP);
        int64_t n_blocks = DI_CEIL_DIV(n, a->cand_block);
        j->steps->block_max(scores, n, a->cand_block, blocks);
        for (int64_t b = 0; b < n_blocks; b++)
            blocks[b] = blocks[b] > bf16_max ? bf16_max : blocks[b];
        if (n_blocks)
            blocks[n_blocks - 1] = INFINITY;
        j->steps->best(blocks, n_blocks, a->n_cand, a->cand_out + row * a->n_cand);
    }
    if (a->scores) {
        float *out = a->scores + row * a->scores_stride;
        memcpy(out, scores, (size_t)n * sizeof(float));
        for (int64_t e = n; e < a->scores_stride; e++)
            out[e] = -INFINITY;
    }
}

/* Takes rows from row0 on while their scores fit. */
static void take_wave(di_index_job *j) {
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

di_status di_cpu_index_run(di_stream *stream, const di_index_select_args *a, const di_index_steps *steps) {
    if (!di_cpu_index_fits(stream, a))
        return DI_ERR_SHAPE;
    di_index_job j = {
        .stream = stream, .a = a, .s = di_cpu_index_scratch(stream), .steps = steps, .heads = heads_padded(a->n_heads)};
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

static di_status portable_index_select(di_stream *stream, const di_index_select_args *a) {
    return di_cpu_index_run(stream, a, &di_index_portable_steps);
}

void di_cpu_install_portable_index(di_cpu_kernels *k) {
    k->index_select = portable_index_select;
    k->topk = panel_best;
}
