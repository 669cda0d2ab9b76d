/* Reference of the hyper-connections: hc_mix and hc_post, model.md 3.3.
 *
 * hc_mix reads the trunk once for three results: the collapse by the previous sub-layer's weights, the mixing logits
 * and the mean square that normalises them. Index convention of comb: [old stream][new stream]. A part of a job is one
 * row. */
#include "hc.h"

void di_cpu_need_hc(const di_limits *limits, di_cpu_need *need) {
    /* The trunk of a row as floats, one collapsed or sub-layer output row, one new stream. */
    size_t in = di_cpu_piece((size_t)limits->n_in_max * sizeof(float));
    di_cpu_need_raise(need, 0, 3 * in);
    di_cpu_need_hc_blocks(limits, need);
}

bool di_cpu_hc_mix_fits(const di_hc_mix_args *a) {
    int64_t n = a->x.n_rows, h = a->z.n_cols;
    return di_cpu_is_real(&a->x) && di_cpu_is_real(&a->z) && a->m >= 1 && a->m <= DI_CPU_HC_MAX && h >= 1 &&
           a->x.n_cols == a->m * h && a->z.n_rows == n && a->pre_in &&
           (!a->fn || (a->scale && a->base && a->pre_out && a->post && a->comb));
}

void di_cpu_sinkhorn(float *c, int32_t m, int32_t iters, float eps) {
    for (int32_t a = 0; a < m; a++) { /* softmax over the new streams, + eps */
        float *row = c + a * m, most = row[0], sum = 0.0f;
        for (int32_t b = 1; b < m; b++)
            most = row[b] > most ? row[b] : most;
        for (int32_t b = 0; b < m; b++) {
            row[b] = di_expf(row[b] - most);
            sum += row[b];
        }
        for (int32_t b = 0; b < m; b++)
            row[b] = row[b] / sum + eps;
    }
    for (int32_t i = 0; i < iters; i++) {
        for (int32_t a = 0; i > 0 && a < m;
             a++) { /* rows: by the sum over the new streams; the softmax was the first */
            float sum = 0.0f;
            for (int32_t b = 0; b < m; b++)
                sum += c[a * m + b];
            for (int32_t b = 0; b < m; b++)
                c[a * m + b] /= sum + eps;
        }
        for (int32_t b = 0; b < m; b++) { /* columns: by the sum over the old streams */
            float sum = 0.0f;
            for (int32_t a = 0; a < m; a++)
                sum += c[a * m + b];
            for (int32_t a = 0; a < m; a++)
                c[a * m + b] /= sum + eps;
        }
    }
}

void di_cpu_hc_finish(const di_hc_mix_args *a, int64_t row, const float *dots, float sum_squares) {
    int32_t m = a->m;
    float rms = sqrtf(sum_squares / (float)a->x.n_cols + a->norm_eps);
    float *pre = a->pre_out + row * m, *post = a->post + row * m, *comb = a->comb + row * m * m;
    for (int32_t i = 0; i < m; i++)
        pre[i] = di_cpu_sigmoid(dots[i] / rms * a->scale[0] + a->base[i]) + a->eps;
    for (int32_t i = 0; i < m; i++) {
        post[i] = 2.0f * di_cpu_sigmoid(dots[m + i] / rms * a->scale[1] + a->base[m + i]);
    }
    for (int32_t i = 0; i < m * m; i++)
        comb[i] = dots[2 * m + i] / rms * a->scale[2] + a->base[2 * m + i];
    di_cpu_sinkhorn(comb, m, a->iters, a->eps);
}

/* ---- hc_mix ---- */

typedef struct mix_job {
    const di_hc_mix_args *a;
    const di_stream *stream;
} mix_job;

static void mix_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const mix_job *job = ctx;
    const di_hc_mix_args *a = job->a;
    int64_t n = a->x.n_cols, h = a->z.n_cols;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n * sizeof *x);
    float *z = di_cpu_take(&at, (size_t)h * sizeof *z);
    di_cpu_load(&a->x, row, 0, n, x);
    for (int64_t i = 0; i < h; i++) {
        z[i] = 0.0f;
        for (int32_t m = 0; m < a->m; m++)
            z[i] += a->pre_in[row * a->m + m] * x[m * h + i];
    }
    di_cpu_store(&a->z, row, 0, h, z);
    if (!a->fn)
        return;
    float dots[(2 + DI_CPU_HC_MAX) * DI_CPU_HC_MAX] = {0};
    for (int32_t o = 0; o < (2 + a->m) * a->m; o++)
        dots[o] = di_dot32(a->fn + o * n, x, n);
    di_cpu_hc_finish(a, row, dots, di_dot32(x, x, n));
}

static di_status hc_mix(di_stream *stream, const di_hc_mix_args *a) {
    size_t in = di_cpu_piece((size_t)a->x.n_cols * sizeof(float));
    if (!di_cpu_hc_mix_fits(a) || !di_cpu_scratch_fits(stream, 0, 2 * in))
        return DI_ERR_SHAPE;
    mix_job job = {a, stream};
    int64_t n_dots = a->fn ? (2 + a->m) * a->m : 0;
    di_cpu_run(stream, mix_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * (n_dots + 2));
    return DI_OK;
}

/* ---- hc_post ---- */

typedef struct post_job {
    const di_hc_post_args *a;
    const di_stream *stream;
} post_job;

static void post_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const post_job *job = ctx;
    const di_hc_post_args *args = job->a;
    int32_t m = args->m;
    int64_t n = args->x.n_cols, h = args->f.n_cols;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n * sizeof *x);
    float *f = di_cpu_take(&at, (size_t)h * sizeof *f);
    float *y = di_cpu_take(&at, (size_t)h * sizeof *y);
    const float *post = args->post + row * m, *comb = args->comb + row * m * m;
    di_cpu_load(&args->x, row, 0, n, x);
    di_cpu_load(&args->f, row, 0, h, f);
    for (int32_t b = 0; b < m; b++) {
        for (int64_t i = 0; i < h; i++)
            y[i] = post[b] * f[i];
        for (int32_t a = 0; a < m; a++) {
            float c = comb[a * m + b];
            for (int64_t i = 0; i < h; i++)
                y[i] += c * x[a * h + i];
        }
        di_cpu_store(&args->x, row, b * h, h, y);
    }
}

bool di_cpu_hc_post_fits(const di_stream *stream, const di_hc_post_args *a) {
    size_t in = di_cpu_piece((size_t)a->x.n_cols * sizeof(float));
    return di_cpu_is_real(&a->x) && di_cpu_is_real(&a->f) && a->m >= 1 && a->post && a->comb &&
           a->x.n_cols == a->m * a->f.n_cols && a->f.n_rows == a->x.n_rows && di_cpu_scratch_fits(stream, 0, 3 * in);
}

static di_status hc_post(di_stream *stream, const di_hc_post_args *a) {
    if (!di_cpu_hc_post_fits(stream, a))
        return DI_ERR_SHAPE;
    post_job job = {a, stream};
    di_cpu_run(stream, post_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * (a->m + 1));
    return DI_OK;
}

void di_cpu_install_ref_hc(di_cpu_kernels *k) {
    k->hc_mix = hc_mix;
    k->hc_post = hc_post;
}
