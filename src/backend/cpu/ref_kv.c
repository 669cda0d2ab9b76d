/* Writers of the caches, the readable definition: record encoding, window rings, pooled pairs, paged entries.
 *
 * A row or an entry is written by one part alone and reads nothing that another part writes, so that parts may run in
 * any order. Formats are tensor/'s; which rows, entries and slots there are is the model's business. Other levels run
 * the same parts with their own way to do one record (cache.h). */
#include "cache.h"

/* Rows of one part: enough to be worth handing out, few enough to balance. */
#define ROWS_PER_PART 16

/* ---- kv_encode --------------------------------------------------------------------------------------------------- */

typedef struct encode_job {
    di_stream *stream;
    const di_kv_encode_args *a;
    di_cpu_encode_fn *encode;
} encode_job;

static void encode_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const encode_job *job = ctx;
    const di_kv_encode_args *a = job->a;
    int64_t n = a->x.n_cols;
    size_t record_bytes = di_kv_record_bytes(a->format, n), data_bytes = di_kv_data_bytes(a->format, n);
    float *buf = (float *)(void *)di_cpu_worker(job->stream, worker);
    int64_t end = DI_MIN((part + 1) * ROWS_PER_PART, a->x.n_rows);
    for (int64_t row = part * ROWS_PER_PART; row < end; row++) {
        uint8_t *record = a->records + (size_t)row * record_bytes;
        job->encode(a->format, di_cpu_row(&a->x, row, 0, n, buf), n, record, record + data_bytes);
    }
}

di_status di_cpu_kv_encode_by(di_stream *stream, const di_kv_encode_args *a, di_cpu_encode_fn *encode) {
    int64_t n = a->x.n_cols;
    if (!di_cpu_is_real(&a->x) || !di_cpu_kv_fits(a->format, n) || !a->records ||
        !di_cpu_scratch_fits(stream, 0, (size_t)n * sizeof(float)))
        return DI_ERR_SHAPE;
    encode_job job = {stream, a, encode};
    di_cpu_run(stream, encode_part, &job, DI_CEIL_DIV(a->x.n_rows, ROWS_PER_PART), a->x.n_rows * n);
    return DI_OK;
}

static di_status ref_kv_encode(di_stream *stream, const di_kv_encode_args *a) {
    return di_cpu_kv_encode_by(stream, a, di_kv_encode);
}

/* ---- ring_store -------------------------------------------------------------------------------------------------- */

static void ring_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const di_ring_store_args *a = ctx;
    const di_rows *rows = a->rows;
    int64_t end = DI_MIN((part + 1) * ROWS_PER_PART, (int64_t)rows->n_rows);
    for (int64_t row = part * ROWS_PER_PART; row < end; row++) {
        int32_t seq = rows->seq[row], pos = rows->pos[row], last = rows->pos0[seq] + rows->n[seq] - 1;
        /* A row whose element a later row of this forward takes is not written: no two parts share an element. */
        if (pos < a->store_from[seq] || last - pos >= a->ring.ring_len)
            continue;
        memcpy(di_cpu_ring_at(&a->ring, rows->slot[seq], pos), a->records + (size_t)row * a->ring.record_bytes,
               a->ring.record_bytes);
    }
}

static di_status ref_ring_store(di_stream *stream, const di_ring_store_args *a) {
    if (!a->rows || !a->records || !a->store_from || !di_cpu_ring_fits(&a->ring, 1))
        return DI_ERR_SHAPE;
    di_ring_store_args args = *a;
    int64_t n_rows = a->rows->n_rows;
    di_cpu_run(stream, ring_part, &args, DI_CEIL_DIV(n_rows, ROWS_PER_PART),
               n_rows * (int64_t)a->ring.record_bytes / 16);
    return DI_OK;
}

/* ---- compress_pool ----------------------------------------------------------------------------------------------- */

typedef struct pool_job {
    di_stream *stream;
    const di_compress_pool_args *a;
    di_cpu_pool_fn *pool;
} pool_job;

static void pool_pair(const float *first, const float *second, int64_t d, float *out) {
    for (int64_t c = 0; c < d; c++) {
        float most = first[c] > second[c] ? first[c] : second[c];
        float e0 = di_expf(first[c] - most), e1 = di_expf(second[c] - most);
        float sum = e0 + e1;
        float w0 = e0 / sum, w1 = e1 / sum;
        out[c] = w0 * first[d + c] + w1 * second[d + c];
    }
}

static void pool_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const pool_job *job = ctx;
    const di_compress_pool_args *a = job->a;
    const di_rows *rows = a->rows;
    int64_t d = a->out.n_cols;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *pair = di_cpu_take(&at, (size_t)(2 * d) * sizeof(float));
    float *out = di_cpu_take(&at, (size_t)d * sizeof(float));
    int64_t end = DI_MIN((part + 1) * ROWS_PER_PART, (int64_t)a->entries.n);
    for (int64_t i = part * ROWS_PER_PART; i < end; i++) {
        int32_t row = a->entries.row[i];
        if (row < 0)
            continue;
        int32_t seq = a->entries.seq[i], pos = rows->pos[row];
        const float *second = a->cg + (int64_t)row * 2 * d; /* gate scores, then latents */
        const float *first = second - 2 * d;
        if (pos - 1 < rows->pos0[seq]) {
            memcpy(pair, di_cpu_ring_at(&a->ring, rows->slot[seq], pos - 1), (size_t)(2 * d) * sizeof(float));
            first = pair;
        }
        job->pool(first, second, d, out);
        di_cpu_store(&a->out, i, 0, d, out);
    }
}

di_status di_cpu_compress_pool_by(di_stream *stream, const di_compress_pool_args *a, di_cpu_pool_fn *pool) {
    int64_t d = a->out.n_cols;
    size_t floats = di_cpu_piece((size_t)(2 * d) * sizeof(float)) + di_cpu_piece((size_t)d * sizeof(float));
    if (!a->rows || a->entries.n < 0 || !a->cg || !di_cpu_is_real(&a->out) || a->out.n_rows < a->entries.n ||
        !di_cpu_ring_fits(&a->ring, (size_t)(2 * d) * sizeof(float)) || !di_cpu_scratch_fits(stream, 0, floats))
        return DI_ERR_SHAPE;
    pool_job job = {stream, a, pool};
    di_cpu_run(stream, pool_part, &job, DI_CEIL_DIV(a->entries.n, ROWS_PER_PART), a->entries.n * d * 16);
    return DI_OK;
}

static di_status ref_compress_pool(di_stream *stream, const di_compress_pool_args *a) {
    return di_cpu_compress_pool_by(stream, a, pool_pair);
}

/* ---- page_store -------------------------------------------------------------------------------------------------- */

typedef struct page_job {
    di_stream *stream;
    const di_page_store_args *a;
    di_cpu_encode_fn *encode;
} page_job;

static void page_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const page_job *job = ctx;
    const di_page_store_args *a = job->a;
    int64_t n = a->dst.n_values;
    float *buf = (float *)(void *)di_cpu_worker(job->stream, worker);
    int64_t end = DI_MIN((part + 1) * ROWS_PER_PART, (int64_t)a->entries.n);
    for (int64_t i = part * ROWS_PER_PART; i < end; i++) {
        if (a->entries.row[i] < 0)
            continue;
        di_cpu_entry e = di_cpu_entry_at(a->rows, &a->dst, a->entries.seq[i], a->entries.idx[i]);
        job->encode(a->dst.format, di_cpu_row(&a->x, i, 0, n, buf), n, e.data, e.scale);
    }
}

di_status di_cpu_page_store_by(di_stream *stream, const di_page_store_args *a, di_cpu_encode_fn *encode) {
    if (!a->rows || a->entries.n < 0 || !di_cpu_is_real(&a->x) || a->x.n_rows < a->entries.n ||
        !di_cpu_paged_fits(&a->dst) || a->x.n_cols != a->dst.n_values ||
        !di_cpu_scratch_fits(stream, 0, (size_t)a->dst.n_values * sizeof(float)))
        return DI_ERR_SHAPE;
    page_job job = {stream, a, encode};
    di_cpu_run(stream, page_part, &job, DI_CEIL_DIV(a->entries.n, ROWS_PER_PART),
               (int64_t)a->entries.n * a->dst.n_values);
    return DI_OK;
}

static di_status ref_page_store(di_stream *stream, const di_page_store_args *a) {
    return di_cpu_page_store_by(stream, a, di_kv_encode);
}

/* ---- the family -------------------------------------------------------------------------------------------------- */

void di_cpu_need_kv(const di_limits *limits, di_cpu_need *need) {
    /* The most that one record takes: a pair of latents with their scores, and a pooled row. */
    size_t d = (size_t)DI_MAX(limits->head_dim, limits->index_dim);
    di_cpu_need_raise(need, 0, di_cpu_piece(2 * d * sizeof(float)) + di_cpu_piece(d * sizeof(float)));
}

void di_cpu_install_ref_kv(di_cpu_kernels *k) {
    k->kv_encode = ref_kv_encode;
    k->ring_store = ref_ring_store;
    k->compress_pool = ref_compress_pool;
    k->page_store = ref_page_store;
}
