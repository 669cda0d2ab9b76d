/* The draft module's own operation, the readable definition: the confidence head (dspark.md 4.4.2).
 *
 * One dot product a row over the hidden state and the embedding of the token before, side by side, then a sigmoid. What
 * the confidence is used for is the engine's business. */
#include "cpu.h"

typedef struct confidence_job {
    di_stream *stream;
    const di_confidence_args *a;
} confidence_job;

/* Floats of one worker: the row and the weights, [H + rank] each. */
static size_t confidence_bytes(int64_t n) {
    return 2 * di_cpu_piece((size_t)n * sizeof(float));
}

static void confidence_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const confidence_job *job = ctx;
    const di_confidence_args *a = job->a;
    int64_t h = a->hid.n_cols, n = a->w->n_in;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n * sizeof(float));
    float *w = di_cpu_take(&at, (size_t)n * sizeof(float));
    di_mat_row(a->w, 0, w);
    di_cpu_load(&a->hid, part, 0, h, x);
    di_cpu_load(&a->emb, part, 0, n - h, x + h);
    float v = di_dot32(w, x, n) / a->tau;
    v = v < -60.0f ? -60.0f : v > 60.0f ? 60.0f : v;
    a->conf[part] = di_cpu_sigmoid(v);
}

static di_status ref_confidence(di_stream *stream, const di_confidence_args *a) {
    if (!di_cpu_is_real(&a->hid) || !di_cpu_is_real(&a->emb) || a->hid.n_rows != a->emb.n_rows || !a->w ||
        !a->w->data || a->w->n_out != 1 || a->w->n_in != a->hid.n_cols + a->emb.n_cols || !a->conf ||
        !di_cpu_scratch_fits(stream, 0, confidence_bytes(a->w->n_in)))
        return DI_ERR_SHAPE;
    confidence_job job = {stream, a};
    di_cpu_run(stream, confidence_part, &job, a->hid.n_rows, a->hid.n_rows * a->w->n_in);
    return DI_OK;
}

void di_cpu_need_draft(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need_raise(need, 0, confidence_bytes(limits->n_in_max));
}

void di_cpu_install_ref_draft(di_cpu_kernels *k) {
    k->confidence = ref_confidence;
}
