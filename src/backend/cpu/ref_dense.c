/* Reference of the row-wise operations: embed, rms_norm, quant, rope_table, rope, stream_mean, gather, feed.
 *
 * Plain loops over rows; a part of a job is one row. Shapes that don't fit together are DI_ERR_SHAPE before anything is
 * written. Formulas: ops.h, model.md 3.1, 3.3, 3.4. */
#include "cpu.h"

void di_cpu_need_dense(const di_limits *limits, di_cpu_need *need) {
    /* rms_norm: a row and its weights; rope, quant and stream_mean: a row. */
    di_cpu_need_raise(need, 0, 2 * di_cpu_piece((size_t)limits->n_in_max * sizeof(float)));
}

/* ---- embed ---- */

static void embed_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_embed_args *a = ctx;
    int64_t n_cols = a->table->n_in;
    int64_t id = a->ids[row];
    bool is_known = id >= 0 && id < a->table->n_out;
    const uint16_t *src = (const uint16_t *)a->table->data + (is_known ? id * n_cols : 0);
    for (int32_t copy = 0; copy < a->copies; copy++) {
        int64_t at = row * a->out.stride + copy * n_cols;
        if (a->out.dtype == DI_BF16) {
            uint16_t *dst = (uint16_t *)a->out.data + at;
            for (int64_t i = 0; i < n_cols; i++)
                dst[i] = is_known ? src[i] : 0;
        } else {
            float *dst = (float *)a->out.data + at;
            for (int64_t i = 0; i < n_cols; i++)
                dst[i] = is_known ? di_bf16_to_f32(src[i]) : 0.0f;
        }
    }
}

static di_status embed(di_stream *stream, const di_embed_args *a) {
    if (!di_cpu_is_mat(a->table) || a->table->dtype != DI_BF16 || !di_cpu_is_real(&a->out) || a->copies < 1 ||
        a->out.n_cols != a->copies * a->table->n_in) {
        return DI_ERR_SHAPE;
    }
    di_cpu_run(stream, embed_row, (void *)a, a->out.n_rows, a->out.n_rows * a->out.n_cols);
    return DI_OK;
}

/* ---- rms_norm ---- */

typedef struct norm_job {
    const di_rms_norm_args *a;
    const di_stream *stream;
} norm_job;

static void norm_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const norm_job *job = ctx;
    const di_rms_norm_args *a = job->a;
    int64_t n = a->x.n_cols;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n * sizeof *x);
    const uint16_t *weight = a->weight;
    di_cpu_load(&a->x, row, 0, n, x);
    float mean = di_dot32(x, x, n) / (float)n;
    float r = 1.0f / sqrtf(mean + a->eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * r * di_bf16_to_f32(weight[i]);
    di_cpu_store(&a->out, row, 0, n, x);
}

bool di_cpu_rms_norm_fits(const di_stream *stream, const di_rms_norm_args *a) {
    int64_t n = a->x.n_cols;
    return di_cpu_is_real(&a->x) && di_cpu_is_real(&a->out) && a->weight && n >= 1 && a->out.n_cols == n &&
           a->out.n_rows == a->x.n_rows &&
           di_cpu_scratch_fits(stream, 0, 2 * di_cpu_piece((size_t)n * sizeof(float))); /* a row and its weights */
}

static di_status rms_norm(di_stream *stream, const di_rms_norm_args *a) {
    if (!di_cpu_rms_norm_fits(stream, a))
        return DI_ERR_SHAPE;
    norm_job job = {a, stream};
    di_cpu_run(stream, norm_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * 2);
    return DI_OK;
}

/* ---- quant ---- */

typedef struct quant_job {
    const di_quant_args *a;
    const di_stream *stream;
} quant_job;

static void quant_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const quant_job *job = ctx;
    const di_quant_args *a = job->a;
    int64_t n = a->x.n_cols;
    float *buf = (float *)di_cpu_worker(job->stream, worker);
    di_quant_qa(di_cpu_row(&a->x, row, 0, n, buf), n, (uint8_t *)a->out.data + row * a->out.stride,
                a->out.scale + row * (n / 32));
}

bool di_cpu_quant_fits(const di_quant_args *a) {
    return di_cpu_is_real(&a->x) && a->out.dtype == DI_F8_E4M3 && di_cpu_is_act(&a->out) &&
           a->out.n_cols == a->x.n_cols && a->out.n_rows == a->x.n_rows;
}

static di_status quant(di_stream *stream, const di_quant_args *a) {
    int64_t n = a->x.n_cols;
    if (!di_cpu_quant_fits(a) || !di_cpu_scratch_fits(stream, 0, (size_t)n * sizeof(float)))
        return DI_ERR_SHAPE;
    quant_job job = {a, stream};
    di_cpu_run(stream, quant_row, &job, a->x.n_rows, a->x.n_rows * n * 4);
    return DI_OK;
}

/* ---- rope ---- */

static void rope_table_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_rope_table_args *a = ctx;
    for (int32_t j = 0; j < a->n_freq; j++) {
        float angle = (float)a->pos[row] * a->inv_freq[j];
        a->cos[row * a->n_freq + j] = cosf(angle);
        a->sin[row * a->n_freq + j] = sinf(angle);
    }
}

static di_status rope_table(di_stream *stream, const di_rope_table_args *a) {
    if (a->n_rows < 0 || a->n_freq < 1 || !a->inv_freq)
        return DI_ERR_SHAPE;
    di_cpu_run(stream, rope_table_row, (void *)a, a->n_rows, (int64_t)a->n_rows * a->n_freq * 16);
    return DI_OK;
}

static void rope_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_rope_args *a = ctx;
    const float *cos_row = a->cos + row * a->n_freq, *sin_row = a->sin + row * a->n_freq;
    int64_t first = a->head_dim - 2 * a->n_freq;
    for (int32_t head = 0; head < a->n_heads; head++) {
        int64_t col = (int64_t)head * a->head_dim + first;
        for (int32_t j = 0; j < a->n_freq; j++, col += 2) {
            float v[2], c = cos_row[j], s = a->inverse ? -sin_row[j] : sin_row[j];
            di_cpu_load(&a->x, row, col, 2, v);
            float rotated[2] = {v[0] * c - v[1] * s, v[0] * s + v[1] * c};
            di_cpu_store(&a->x, row, col, 2, rotated);
        }
    }
}

bool di_cpu_rope_fits(const di_stream *stream, const di_rope_args *a) {
    return di_cpu_is_real(&a->x) && a->n_heads >= 1 && a->n_freq >= 1 && a->head_dim >= 2 * a->n_freq &&
           a->x.n_cols == (int64_t)a->n_heads * a->head_dim &&
           di_cpu_scratch_fits(stream, 0, 2 * (size_t)a->n_freq * sizeof(float)); /* a head's pairs */
}

static di_status rope(di_stream *stream, const di_rope_args *a) {
    if (!di_cpu_rope_fits(stream, a))
        return DI_ERR_SHAPE;
    di_cpu_run(stream, rope_row, (void *)a, a->x.n_rows, a->x.n_rows * a->n_heads * a->n_freq * 8);
    return DI_OK;
}

/* ---- stream_mean ---- */

typedef struct mean_job {
    const di_stream_mean_args *a;
    const di_stream *stream;
} mean_job;

static void mean_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const mean_job *job = ctx;
    const di_stream_mean_args *a = job->a;
    int64_t h = a->out.n_cols;
    float scale = 1.0f / (float)a->m;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *sum = di_cpu_take(&at, (size_t)h * sizeof *sum);
    float *x = di_cpu_take(&at, (size_t)h * sizeof *x);
    di_cpu_load(&a->x, row, 0, h, sum);
    for (int32_t m = 1; m < a->m; m++) {
        di_cpu_load(&a->x, row, m * h, h, x);
        for (int64_t i = 0; i < h; i++)
            sum[i] += x[i];
    }
    for (int64_t i = 0; i < h; i++)
        sum[i] *= scale;
    di_cpu_store(&a->out, row, 0, h, sum);
}

static di_status stream_mean(di_stream *stream, const di_stream_mean_args *a) {
    if (!di_cpu_is_real(&a->x) || !di_cpu_is_real(&a->out) || a->m < 1 || a->x.n_cols != a->m * a->out.n_cols ||
        a->x.n_rows != a->out.n_rows ||
        !di_cpu_scratch_fits(stream, 0, 2 * di_cpu_piece((size_t)a->out.n_cols * sizeof(float)))) {
        return DI_ERR_SHAPE;
    }
    mean_job job = {a, stream};
    di_cpu_run(stream, mean_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols);
    return DI_OK;
}

/* ---- gather ---- */

static void gather_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_gather_args *a = ctx;
    if (a->idx[row] < 0)
        return;
    memcpy((uint8_t *)a->out + (size_t)row * a->row_bytes, (const uint8_t *)a->x + (size_t)a->idx[row] * a->row_bytes,
           a->row_bytes);
}

static di_status gather(di_stream *stream, const di_gather_args *a) {
    if (a->n < 0 || a->row_bytes < 1)
        return DI_ERR_SHAPE;
    di_cpu_run(stream, gather_row, (void *)a, a->n, (int64_t)(a->row_bytes / 8) * a->n);
    return DI_OK;
}

/* ---- feed ---- */

static void feed_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_feed_args *a = ctx;
    if (a->from[row] < 0)
        return;
    int32_t token = a->tokens[a->from[row]];
    a->ids[row] = token;
    bool has_class = token >= 0 && token < a->n_map && (!a->token_map || a->token_map[token] >= 0);
    int32_t *grams = a->grams + row * a->n_gram;
    for (int32_t k = 0; k < a->n_gram; k++) {
        if (!has_class)
            grams[k] = a->pad;
        else if (k == 0)
            grams[0] = a->token_map ? a->token_map[token] : token;
    }
}

static di_status feed(di_stream *stream, const di_feed_args *a) {
    if (a->n < 0 || !a->from || !a->tokens || !a->ids || a->n_gram < 0 || (a->n_gram && !a->grams))
        return DI_ERR_SHAPE;
    di_cpu_run(stream, feed_row, (void *)a, a->n, a->n);
    return DI_OK;
}

void di_cpu_install_ref_dense(di_cpu_kernels *k) {
    k->embed = embed;
    k->rms_norm = rms_norm;
    k->quant = quant;
    k->rope_table = rope_table;
    k->rope = rope;
    k->stream_mean = stream_mean;
    k->gather = gather;
    k->feed = feed;
}
