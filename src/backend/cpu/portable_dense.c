/* rms_norm and rope with the same operations as the reference, arranged so that the compiler vectorises them. */
#include "cpu.h"

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
    di_cpu_load(&a->x, row, 0, n, x);
    di_cpu_bf16_to_f32(a->weight, n, weight);
    float r = 1.0f / sqrtf(di_cpu_dot32(x, x, n) / (float)n + a->eps);
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * r * weight[i];
    di_cpu_store(&a->out, row, 0, n, x);
}

static di_status rms_norm(di_stream *stream, const di_rms_norm_args *a) {
    int64_t n = a->x.n_cols;
    if (!di_cpu_is_real(&a->x) || !di_cpu_is_real(&a->out) || !a->weight || n < 1 || a->out.n_cols != n ||
        a->out.n_rows != a->x.n_rows || !di_cpu_scratch_fits(stream, 0, 2 * di_cpu_piece((size_t)n * sizeof(float)))) {
        return DI_ERR_SHAPE;
    }
    norm_job job = {a, stream};
    di_cpu_run(stream, norm_row, &job, a->x.n_rows, a->x.n_rows * n);
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
            di_cpu_load(&a->x, row, col, n, buf);
            rotate(buf, a->n_freq, cos_row, sin_row, sign);
            di_cpu_store(&a->x, row, col, n, buf);
        }
    }
}

static di_status rope(di_stream *stream, const di_rope_args *a) {
    if (!di_cpu_is_real(&a->x) || a->n_heads < 1 || a->n_freq < 1 || a->head_dim < 2 * a->n_freq ||
        a->x.n_cols != (int64_t)a->n_heads * a->head_dim ||
        !di_cpu_scratch_fits(stream, 0, 2 * (size_t)a->n_freq * sizeof(float))) {
        return DI_ERR_SHAPE;
    }
    rope_job job = {a, stream};
    di_cpu_run(stream, rope_row, &job, a->x.n_rows, a->x.n_rows * a->n_heads * a->n_freq * 4);
    return DI_OK;
}

void di_cpu_install_portable_dense(di_cpu_kernels *k) {
    k->rms_norm = rms_norm;
    k->rope = rope;
}
