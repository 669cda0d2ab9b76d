/* Reference of gemm: the product as model.md 0.3 defines it.
 *
 * Every output is one di_dot32 of an input row and a weight row, both as floats: codes times their scales, which is
 * exact (an e4m3 or e2m1 value times a power of two). A part of the job is one row of outputs; it decodes every weight
 * anew. */
#include "panel.h"

void di_cpu_need_gemm(const di_limits *limits, di_cpu_need *need) {
    /* An input row of one group and one row of weights. */
    size_t in = di_cpu_piece((size_t)limits->n_in_max * sizeof(float));
    di_cpu_need_raise(need, 0, 2 * in);
    di_cpu_need_panel_gemm(limits, need);
}

bool di_cpu_gemm_fits(const di_gemm_args *a) {
    int64_t g = DI_MAX(a->n_groups, 1);
    return di_cpu_is_act(&a->x) && di_cpu_is_mat(a->w) && di_cpu_is_real(&a->out) && a->w->n_out % g == 0 &&
           a->x.n_cols == g * a->w->n_in && a->out.n_cols == a->w->n_out && a->out.n_rows == a->x.n_rows &&
           (a->x.dtype != DI_F8_E4M3 || a->w->n_in % 32 == 0);
}

typedef struct gemm_job {
    const di_gemm_args *a;
    const di_stream *stream;
} gemm_job;

static void gemm_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const gemm_job *job = ctx;
    const di_gemm_args *a = job->a;
    int64_t n_in = a->w->n_in, n_out = a->w->n_out, group_out = n_out / DI_MAX(a->n_groups, 1);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n_in * sizeof *x);
    float *w = di_cpu_take(&at, (size_t)n_in * sizeof *w);
    for (int64_t o = 0; o < n_out; o++) {
        if (o % group_out == 0)
            di_cpu_load(&a->x, row, o / group_out * n_in, n_in, x);
        di_cpu_mat_row(a->w, o, w);
        float y = di_dot32(x, w, n_in);
        if (a->add)
            y += a->add[row * a->out.stride + o];
        di_cpu_store(&a->out, row, o, 1, &y);
    }
}

static di_status gemm(di_stream *stream, const di_gemm_args *a) {
    if (!di_cpu_gemm_fits(a) || !di_cpu_scratch_fits(stream, 0, 2 * di_cpu_piece((size_t)a->w->n_in * sizeof(float)))) {
        return DI_ERR_SHAPE;
    }
    gemm_job job = {a, stream};
    di_cpu_run(stream, gemm_row, &job, a->x.n_rows, a->x.n_rows * a->w->n_out * a->w->n_in);
    return DI_OK;
}

void di_cpu_install_ref_gemm(di_cpu_kernels *k) {
    k->gemm = gemm;
}
