/* rms_norm, quant, rope, engram_gather and engram_gate with the same operations as the reference, at the width of the
 * level that includes this. Included after lanes_<level>.h. */
#include "dot_body.h"

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
    float *weight = di_cpu_take(&at, (size_t)n * sizeof *weight);
    row_load(&a->x, row, 0, n, x);
    row_from_bf16(a->weight, n, weight);
    float r = 1.0f / sqrtf(row_dot32_from(0.0f, x, x, n) / (float)n + a->eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * r * weight[i];
    row_store(&a->out, row, 0, n, x);
}

static di_status rms_norm(di_stream *stream, const di_rms_norm_args *a) {
    if (!di_cpu_rms_norm_fits(stream, a))
        return DI_ERR_SHAPE;
    norm_job job = {a, stream};
    di_cpu_run(stream, norm_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols);
    return DI_OK;
}

/* ---- quant ---- */

typedef struct quant_job {
    const di_quant_args *a;
    const di_stream *stream;
} quant_job;

static void quant_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const quant_job *job = ctx;
    const di_quant_args *a = job->a;
    uint8_t *codes = (uint8_t *)a->out.data + row * a->out.stride, *scale = a->out.scale + row * (a->x.n_cols / 32);
    for (int64_t i = 0; i < a->x.n_cols; i += 32) {
        float x[32];
        row_load(&a->x, row, i, 32, x);
        scale[i / 32] = row_quant_qa_32(x, codes + i);
    }
}

static di_status quant(di_stream *stream, const di_quant_args *a) {
    if (!di_cpu_quant_fits(a))
        return DI_ERR_SHAPE;
    quant_job job = {a, stream};
    di_cpu_run(stream, quant_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols);
    return DI_OK;
}

/* ---- rope ---- */

typedef struct rope_job {
    const di_rope_args *a;
    const di_stream *stream;
} rope_job;

static void rotate(float *v, int32_t n_freq, const float *cos_row, const float *sin_row, float sign) {
    for (int32_t j = 0; j < n_freq; j++) {
        float a = v[2 * j], b = v[2 * j + 1], c = cos_row[j], s = sin_row[j] * sign;
        v[2 * j] = a * c - b * s;
        v[2 * j + 1] = a * s + b * c;
    }
}

static void rope_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const rope_job *job = ctx;
    const di_rope_args *a = job->a;
    const float *cos_row = a->cos + row * a->n_freq, *sin_row = a->sin + row * a->n_freq;
    float sign = a->inverse ? -1.0f : 1.0f;
    int64_t n = 2 * (int64_t)a->n_freq, col = a->head_dim - n;
    float *buf = (float *)di_cpu_worker(job->stream, worker);
    for (int32_t head = 0; head < a->n_heads; head++, col += a->head_dim) {
        if (a->x.dtype == DI_F32) {
            rotate((float *)a->x.data + row * a->x.stride + col, a->n_freq, cos_row, sin_row, sign);
        } else {
            row_load(&a->x, row, col, n, buf);
            rotate(buf, a->n_freq, cos_row, sin_row, sign);
            row_store(&a->x, row, col, n, buf);
        }
    }
}

static di_status rope(di_stream *stream, const di_rope_args *a) {
    if (!di_cpu_rope_fits(stream, a))
        return DI_ERR_SHAPE;
    rope_job job = {a, stream};
    di_cpu_run(stream, rope_row, &job, a->x.n_rows, a->x.n_rows * a->n_heads * a->n_freq * 4);
    return DI_OK;
}

/* ---- engram_gather ---- */

typedef struct gather_job {
    const di_engram_gather_args *a;
    const di_stream *stream;
} gather_job;

/* The table's rows lie anywhere in far more memory than any cache holds: all that a row of the step needs is asked for
 * before the first of it is read, so that the waits pass side by side. */
static void gather_ahead(const di_engram_gather_args *a, int64_t row) {
    enum { LINE = 64 };
    int64_t dim = a->dim, n_groups = dim / 32;
    for (int32_t col = 0; col < a->n_cols; col++) {
        int64_t id = a->rows[row * a->n_cols + col];
        if (id < 0 || id >= a->n_table)
            continue;
        for (int64_t i = 0; i < dim; i += LINE)
            __builtin_prefetch(a->codes + id * dim + i);
        __builtin_prefetch(a->codes + id * dim + dim - 1); /* rows need not start at a line */
        __builtin_prefetch(a->scales + id * n_groups);
        __builtin_prefetch(a->scales + id * n_groups + n_groups - 1);
    }
}

static void gather_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const gather_job *job = ctx;
    gather_ahead(job->a, row);
    di_cpu_engram_gather_row(job->a, row, (float *)di_cpu_worker(job->stream, worker));
}

static di_status engram_gather(di_stream *stream, const di_engram_gather_args *a) {
    if (!di_cpu_engram_gather_fits(stream, a))
        return DI_ERR_SHAPE;
    gather_job job = {a, stream};
    di_cpu_run(stream, gather_row, &job, a->out.n_rows, a->out.n_rows * a->out.n_cols);
    return DI_OK;
}

/* ---- engram_gate ---- */

typedef struct gate_job {
    const di_engram_gate_args *a;
    const di_stream *stream;
} gate_job;

/* 1/sqrt(mean of squares + eps). */
static float inverse_rms(const float *x, int64_t n, float eps) {
    return 1.0f / sqrtf(row_dot32_from(0.0f, x, x, n) / (float)n + eps);
}

static void gate_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const gate_job *job = ctx;
    const di_engram_gate_args *a = job->a;
    bool is_skipped = a->skip && a->skip[row];
    int64_t h = a->x.n_cols / a->m;
    float h_scale = 1.0f / sqrtf((float)h);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)h * sizeof *x);
    float *key = di_cpu_take(&at, (size_t)h * sizeof *key);
    float *work = di_cpu_take(&at, (size_t)h * sizeof *work); /* x*qk, then the value */
    for (int32_t m = 0; m < a->m; m++) {
        float g = 0.0f;
        if (!is_skipped) {
            row_load(&a->x, row, m * h, h, x);
            row_load(&a->kv, row, m * h, h, key);
            const float *qk = a->qk + m * h;
            for (int64_t i = 0; i < h; i++)
                work[i] = x[i] * qk[i];
            float dot =
                row_dot32_from(0.0f, work, key, h) * inverse_rms(x, h, a->eps) * inverse_rms(key, h, a->eps) * h_scale;
            g = di_cpu_sigmoid(copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot));
            row_load(&a->kv, row, a->m * h, h, work);
            for (int64_t i = 0; i < h; i++)
                x[i] += g * work[i];
            row_store(&a->x, row, m * h, h, x);
        }
        if (a->gate)
            a->gate[row * a->m + m] = g;
    }
}

static di_status engram_gate(di_stream *stream, const di_engram_gate_args *a) {
    if (!di_cpu_engram_gate_fits(stream, a))
        return DI_ERR_SHAPE;
    gate_job job = {a, stream};
    di_cpu_run(stream, gate_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols);
    return DI_OK;
}

void DI_INSTALL(dense)(di_cpu_kernels *k) {
    k->rms_norm = rms_norm;
    k->quant = quant;
    k->rope = rope;
    k->engram_gather = engram_gather;
    k->engram_gate = engram_gate;
}
