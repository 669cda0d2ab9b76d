/* Reference of the mixture of experts: moe_route and moe, model.md 3.10.
 *
 * One row at a time, one expert after the other in rising id, the shared one last; every product is a di_dot32 with a
 * weight row decoded for it. The activation between the matrices goes through QA in faithful numerics, straight from
 * fp32. */
#include "moe.h"

void di_cpu_need_moe(const di_limits *limits, di_cpu_need *need) {
    /* moe: an input row, a weight row, the activation with its codes and scales, the sum. moe_route: a row, a weight
     * row, the logits and the choices. */
    size_t in = di_cpu_piece((size_t)limits->n_in_max * sizeof(float));
    size_t act = di_cpu_piece((size_t)limits->intermediate * sizeof(float));
    size_t experts = di_cpu_piece((size_t)limits->experts_max * sizeof(float));
    di_cpu_need_raise(need, 0, 3 * in + 4 * act + 2 * experts);
    di_cpu_need_panel_moe(limits, need);
}

/* ---- moe_route ---- */

bool di_cpu_route_fits(const di_moe_route_args *a) {
    return di_cpu_is_real(&a->x) && di_cpu_is_mat(a->gate) && a->gate->n_in == a->x.n_cols && a->bias && a->k >= 1 &&
           a->k <= a->gate->n_out && a->k <= DI_CPU_EXPERTS_PER_ROW_MAX && (!a->is_image || a->bias_vl);
}

void di_cpu_route_row(const di_moe_route_args *a, int64_t row, float *logits, uint8_t *chosen) {
    int64_t n_experts = a->gate->n_out;
    const float *bias = a->is_image && a->is_image[row] ? a->bias_vl : a->bias;
    int32_t *idx = a->idx + row * a->k;
    float *weight = a->weight + row * a->k;
    float *score = logits, sum = 0.0f;
    for (int64_t e = 0; e < n_experts; e++) {
        float v = logits[e];
        score[e] = sqrtf(v > 20.0f ? v : (float)di_log1p(di_exp(v))); /* sqrt(softplus) */
    }
    memset(chosen, 0, (size_t)n_experts);
    for (int32_t i = 0; i < a->k; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n_experts; e++) {
            if (!chosen[e] && (best < 0 || score[e] + bias[e] > score[best] + bias[best]))
                best = e;
        }
        chosen[best] = 1;
        idx[i] = (int32_t)best;
        sum += score[best];
    }
    for (int32_t i = 0; i < a->k; i++)
        weight[i] = score[idx[i]] / (sum + 1e-20f) * a->factor;
}

typedef struct route_job {
    const di_moe_route_args *a;
    const di_stream *stream;
} route_job;

static void route_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const route_job *job = ctx;
    const di_moe_route_args *a = job->a;
    int64_t n = a->x.n_cols, n_experts = a->gate->n_out;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)n * sizeof *x);
    float *w = di_cpu_take(&at, (size_t)n * sizeof *w);
    float *logits = di_cpu_take(&at, (size_t)n_experts * sizeof *logits);
    uint8_t *chosen = di_cpu_take(&at, (size_t)n_experts);
    di_cpu_load(&a->x, row, 0, n, x);
    for (int64_t e = 0; e < n_experts; e++) {
        di_cpu_mat_row(a->gate, e, w);
        logits[e] = di_dot32(x, w, n);
    }
    di_cpu_route_row(a, row, logits, chosen);
}

static di_status moe_route(di_stream *stream, const di_moe_route_args *a) {
    size_t in = di_cpu_piece((size_t)a->x.n_cols * sizeof(float));
    if (!di_cpu_route_fits(a) ||
        !di_cpu_scratch_fits(stream, 0, 2 * in + 2 * di_cpu_piece((size_t)a->gate->n_out * sizeof(float)))) {
        return DI_ERR_SHAPE;
    }
    route_job job = {a, stream};
    di_cpu_run(stream, route_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * a->gate->n_out);
    return DI_OK;
}

/* ---- moe ---- */

static bool expert_fits(const di_expert *e, int64_t h, int64_t i) {
    return di_cpu_is_mat(&e->w1) && di_cpu_is_mat(&e->w3) && di_cpu_is_mat(&e->w2) && e->w1.n_in == h &&
           e->w3.n_in == h && e->w1.n_out == i && e->w3.n_out == i && e->w2.n_in == i && e->w2.n_out == h;
}

bool di_cpu_moe_fits(const di_moe_args *a) {
    int64_t n = a->x.n_rows, h = a->x.n_cols;
    bool is_faithful = a->x.dtype == DI_F8_E4M3;
    if (!(is_faithful || a->x.dtype == DI_F32) || !di_cpu_is_act(&a->x) || !di_cpu_is_real(&a->out) ||
        a->out.n_rows != n || a->out.n_cols != h || a->k < 0 || a->k > DI_CPU_EXPERTS_PER_ROW_MAX ||
        (!a->k && !a->shared)) {
        return false;
    }
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    if (!any)
        return false;
    int64_t inner = any->w1.n_out;
    if (is_faithful && inner % 32)
        return false;
    if (a->shared && !expert_fits(a->shared, h, inner))
        return false;
    for (int64_t i = 0; i < n * a->k; i++) {
        if (a->idx[i] < 0 || a->idx[i] >= a->n_experts || !expert_fits(&a->experts[a->idx[i]], h, inner))
            return false;
        for (int64_t j = i - i % a->k; j < i; j++) {
            if (a->idx[j] == a->idx[i])
                return false; /* an expert counts once a row */
        }
    }
    return true;
}

typedef struct moe_job {
    const di_moe_args *a;
    const di_stream *stream;
} moe_job;

static void moe_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const moe_job *job = ctx;
    const di_moe_args *a = job->a;
    bool is_faithful = a->x.dtype == DI_F8_E4M3;
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    int64_t h = a->x.n_cols, inner = any->w1.n_out;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)h * sizeof *x);
    float *w = di_cpu_take(&at, (size_t)DI_MAX(h, inner) * sizeof *w);
    float *act = di_cpu_take(&at, (size_t)inner * sizeof *act);
    uint8_t *codes = di_cpu_take(&at, (size_t)inner), *scales = di_cpu_take(&at, (size_t)inner);
    float *sum = di_cpu_take(&at, (size_t)h * sizeof *sum);
    di_cpu_load(&a->x, row, 0, h, x);
    memset(sum, 0, (size_t)h * sizeof *sum);
    int64_t last = -1; /* expert done last; n_experts stands for the shared one */
    for (int32_t done = 0; done < a->k + (a->shared ? 1 : 0); done++) {
        int64_t next = a->n_experts;
        float weight = 1.0f;
        for (int32_t i = 0; i < a->k; i++) {
            int32_t e = a->idx[row * a->k + i];
            if (e > last && e < next)
                next = e, weight = a->weight[row * a->k + i];
        }
        const di_expert *expert = next < a->n_experts ? &a->experts[next] : a->shared;
        last = next;
        for (int64_t i = 0; i < inner; i++) {
            di_cpu_mat_row(&expert->w1, i, w);
            float g = di_dot32(x, w, h);
            di_cpu_mat_row(&expert->w3, i, w);
            act[i] = di_cpu_swiglu(g, di_dot32(x, w, h), weight, a->limit, is_faithful);
        }
        if (is_faithful) {
            di_quant_qa(act, inner, codes, scales);
            for (int64_t i = 0; i < inner; i++)
                act[i] = di_cpu_scaled(di_e4m3_to_f32(codes[i]), scales[i / 32]);
        }
        for (int64_t o = 0; o < h; o++) {
            di_cpu_mat_row(&expert->w2, o, w);
            float y = di_dot32(act, w, inner);
            sum[o] += is_faithful ? di_round_bf16(y) : y;
        }
    }
    for (int64_t o = 0; is_faithful && o < h; o++)
        sum[o] = di_round_bf16(sum[o]);
    di_cpu_store(&a->out, row, 0, h, sum);
}

static di_status moe(di_stream *stream, const di_moe_args *a) {
    if (!di_cpu_moe_fits(a))
        return DI_ERR_SHAPE;
    int64_t h = a->x.n_cols, inner = (a->k ? &a->experts[0] : a->shared)->w1.n_out;
    size_t in = di_cpu_piece((size_t)h * sizeof(float)), act = di_cpu_piece((size_t)inner * sizeof(float));
    if (!di_cpu_scratch_fits(stream, 0, 3 * in + 4 * act))
        return DI_ERR_SHAPE;
    moe_job job = {a, stream};
    di_cpu_run(stream, moe_row, &job, a->x.n_rows, a->x.n_rows * (a->k + 1) * 3 * h * inner);
    return DI_OK;
}

void di_cpu_install_ref_moe(di_cpu_kernels *k) {
    k->moe_route = moe_route;
    k->moe = moe;
}
