/* Reference of Engram: the hash of n-grams to table rows, the lookup, and the gated addition to the trunk.
 *
 * Hashing is in 64-bit integers throughout: multipliers keep every product below 2^63, so that the modulo is of a
 * non-negative number. A part of a job is one row. Formulas: model.md 3.2.4, 3.2.5. */
#include "cpu.h"

void di_cpu_need_engram(const di_limits *limits, di_cpu_need *need) {
    /* engram_gate: a stream, its key, the value. engram_gather: one stored row of at most n_in_max values. */
    di_cpu_need_raise(need, 0, 3 * di_cpu_piece((size_t)limits->n_in_max * sizeof(float)));
}

/* ---- engram_hash ---- */

static void hash_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const di_engram_hash_args *a = ctx;
    const int32_t *gram = a->grams + row * a->n_gram;
    int64_t n_cols = (int64_t)(a->n_gram - 1) * a->n_heads;
    uint64_t h = (uint64_t)(int64_t)gram[0] * (uint64_t)a->mult[0];
    for (int32_t s = 1; s < a->n_gram; s++) {
        h ^= (uint64_t)(int64_t)gram[s] * (uint64_t)a->mult[s];
        for (int32_t head = 0; head < a->n_heads; head++) {
            int64_t col = (int64_t)(s - 1) * a->n_heads + head;
            a->rows[row * n_cols + col] = (int64_t)(h % (uint64_t)a->primes[col]) + a->offsets[col];
        }
    }
}

static di_status engram_hash(di_stream *stream, const di_engram_hash_args *a) {
    if (a->n < 0 || a->n_gram < 2 || a->n_heads < 1)
        return DI_ERR_SHAPE;
    di_cpu_run(stream, hash_row, (void *)a, a->n, (int64_t)a->n * (a->n_gram - 1) * a->n_heads * 16);
    return DI_OK;
}

/* ---- engram_gather ---- */

typedef struct gather_job {
    const di_engram_gather_args *a;
    const di_stream *stream;
} gather_job;

void di_cpu_engram_gather_row(const di_engram_gather_args *a, int64_t row, float *buf) {
    int64_t dim = a->dim, n_groups = dim / 32;
    for (int32_t col = 0; col < a->n_cols; col++) {
        int64_t id = a->rows[row * a->n_cols + col];
        bool is_stored = id >= 0 && id < a->n_table;
        if (a->out.dtype == DI_F8_E4M3) {
            uint8_t *codes = (uint8_t *)a->out.data + row * a->out.stride + col * dim;
            uint8_t *scales = a->out.scale + (row * a->n_cols + col) * n_groups;
            if (is_stored) {
                memcpy(codes, a->codes + id * dim, (size_t)dim);
                memcpy(scales, a->scales + id * n_groups, (size_t)n_groups);
            } else {
                memset(codes, 0, (size_t)dim);
                memset(scales, 127, (size_t)n_groups);
            }
        } else {
            for (int64_t i = 0; i < dim; i++) {
                buf[i] = is_stored
                             ? di_cpu_scaled(di_e4m3_to_f32(a->codes[id * dim + i]), a->scales[id * n_groups + i / 32])
                             : 0.0f;
            }
            di_cpu_store(&a->out, row, col * dim, dim, buf);
        }
    }
}

static void gather_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const gather_job *job = ctx;
    di_cpu_engram_gather_row(job->a, row, (float *)di_cpu_worker(job->stream, worker));
}

bool di_cpu_engram_gather_fits(const di_stream *stream, const di_engram_gather_args *a) {
    return a->dim >= 32 && a->dim % 32 == 0 && a->n_cols >= 1 && a->out.n_cols == (int64_t)a->n_cols * a->dim &&
           di_cpu_is_act(&a->out) && di_cpu_scratch_fits(stream, 0, (size_t)a->dim * sizeof(float));
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
    return 1.0f / sqrtf(di_dot32(x, x, n) / (float)n + eps);
}

static void gate_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const gate_job *job = ctx;
    const di_engram_gate_args *a = job->a;
    int64_t h = a->x.n_cols / a->m;
    float h_scale = 1.0f / sqrtf((float)h);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *x = di_cpu_take(&at, (size_t)h * sizeof *x);
    float *key = di_cpu_take(&at, (size_t)h * sizeof *key);
    float *work = di_cpu_take(&at, (size_t)h * sizeof *work); /* x*qk, then the value */
    for (int32_t m = 0; m < a->m; m++) {
        if (a->skip && a->skip[row]) {
            if (a->gate)
                a->gate[row * a->m + m] = 0.0f;
            continue;
        }
        di_cpu_load(&a->x, row, m * h, h, x);
        di_cpu_load(&a->kv, row, m * h, h, key);
        const float *qk = a->qk + m * h;
        for (int64_t i = 0; i < h; i++)
            work[i] = x[i] * qk[i];
        float dot = di_dot32(work, key, h) * inverse_rms(x, h, a->eps) * inverse_rms(key, h, a->eps) * h_scale;
        float g = di_cpu_sigmoid(copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot));
        di_cpu_load(&a->kv, row, a->m * h, h, work);
        for (int64_t i = 0; i < h; i++)
            x[i] += g * work[i];
        di_cpu_store(&a->x, row, m * h, h, x);
        if (a->gate)
            a->gate[row * a->m + m] = g;
    }
}

bool di_cpu_engram_gate_fits(const di_stream *stream, const di_engram_gate_args *a) {
    return di_cpu_is_real(&a->x) && di_cpu_is_real(&a->kv) && a->m >= 1 && a->x.n_cols % a->m == 0 && a->qk &&
           a->kv.n_cols == a->x.n_cols / a->m * (a->m + 1) && a->kv.n_rows == a->x.n_rows &&
           di_cpu_scratch_fits(stream, 0, 3 * di_cpu_piece((size_t)(a->x.n_cols / a->m) * sizeof(float)));
}

static di_status engram_gate(di_stream *stream, const di_engram_gate_args *a) {
    if (!di_cpu_engram_gate_fits(stream, a))
        return DI_ERR_SHAPE;
    gate_job job = {a, stream};
    di_cpu_run(stream, gate_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * 4);
    return DI_OK;
}

void di_cpu_install_ref_engram(di_cpu_kernels *k) {
    k->engram_hash = engram_hash;
    k->engram_gather = engram_gather;
    k->engram_gate = engram_gate;
}
