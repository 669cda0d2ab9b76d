/* Core attention, the readable definition (model.md 3.8, dspark.md 4.4).
 *
 * A part is one row. Its keys, which are its values too, are decoded once and in order: the window from oldest to
 * newest, then the listed entries. Every head then makes its scores, its probabilities and its sum over the keys, each
 * sum in key order. portable_attention.c gives the same bits faster. */
#include "avx512_attention.h"

typedef struct ref_job {
    di_stream *stream;
    const di_attention_args *a;
} ref_job;

static size_t ref_bytes(int64_t keys_max, int64_t d) {
    return di_cpu_piece((size_t)(keys_max * d) * sizeof(float)) + di_cpu_piece((size_t)keys_max * sizeof(float)) +
           2 * di_cpu_piece((size_t)d * sizeof(float));
}

/* Decodes the row's keys [n, D]; returns n. */
static int64_t load_keys(const di_attention_args *a, int64_t row, float *keys) {
    const di_rows *rows = a->rows;
    int32_t seq = rows->seq[row];
    int64_t d = a->head_dim, n = 0;
    size_t record_bytes = di_kv_record_bytes(a->win_format, d), data_bytes = di_kv_data_bytes(a->win_format, d);
    for (int32_t pos = rows->win_lo[row]; pos < rows->win_hi[row]; pos++, n++) {
        const uint8_t *record = di_cpu_window_at(rows, a->records, record_bytes, &a->ring, seq, pos);
        di_kv_decode(a->win_format, record, record + data_bytes, d, keys + n * d);
    }
    for (int32_t t = 0; a->idx && t < a->topk; t++) {
        int32_t entry = a->idx[row * a->topk + t];
        if (entry >= 0)
            di_cpu_entry_load(rows, &a->main, seq, entry, keys + n++ * d);
    }
    return n;
}

static void attention_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const ref_job *job = ctx;
    const di_attention_args *a = job->a;
    int64_t d = a->head_dim, keys_max = job->stream->dev->limits.keys_max;
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *keys = di_cpu_take(&at, (size_t)(keys_max * d) * sizeof(float));
    float *p = di_cpu_take(&at, (size_t)keys_max * sizeof(float));
    float *q = di_cpu_take(&at, (size_t)d * sizeof(float));
    float *out = di_cpu_take(&at, (size_t)d * sizeof(float));
    int64_t n = load_keys(a, row, keys);
    for (int64_t h = 0; h < a->n_heads; h++) {
        di_cpu_load(&a->q, row, h * d, d, q);
        float most = a->sink[h];
        for (int64_t k = 0; k < n; k++) {
            p[k] = di_dot32(q, keys + k * d, d) * a->scale;
            most = p[k] > most ? p[k] : most;
        }
        float sum = 0.0f;
        for (int64_t k = 0; k < n; k++) {
            p[k] = di_expf(p[k] - most);
            sum += p[k];
        }
        sum += di_expf(a->sink[h] - most);
        for (int64_t i = 0; i < d; i++)
            out[i] = 0.0f;
        for (int64_t k = 0; k < n; k++) {
            for (int64_t i = 0; i < d; i++)
                out[i] += p[k] * keys[k * d + i];
        }
        /* The sum may be 0 only where all scores are lost as NaN; no key at all gives zeros. */
        for (int64_t i = 0; i < d && n; i++)
            out[i] = out[i] / sum;
        if (n)
            di_cpu_unrotate(a, row, out);
        di_cpu_store(&a->out, row, h * d, d, out);
    }
}

static di_status ref_attention(di_stream *stream, const di_attention_args *a) {
    if (!di_cpu_attention_fits(stream, a) ||
        !di_cpu_scratch_fits(stream, 0, ref_bytes(stream->dev->limits.keys_max, a->head_dim)))
        return DI_ERR_SHAPE;
    ref_job job = {stream, a};
    int64_t n_rows = a->rows->n_rows;
    di_cpu_run(stream, attention_row, &job, n_rows, n_rows * a->n_heads * a->head_dim * 128);
    return DI_OK;
}

bool di_cpu_attention_fits(const di_stream *stream, const di_attention_args *a) {
    const di_rows *rows = a->rows;
    int64_t n_cols = (int64_t)a->n_heads * a->head_dim, d = a->head_dim;
    const di_limits *limits = &stream->dev->limits;
    if (!rows || a->n_heads < 1 || d < 32 || d % 32 || !di_cpu_is_real(&a->q) || !di_cpu_is_real(&a->out) ||
        a->q.n_rows < rows->n_rows || a->out.n_rows < rows->n_rows || a->q.n_cols != n_cols ||
        a->out.n_cols != n_cols || !a->records || !a->sink ||
        !di_cpu_ring_fits(&a->ring, di_kv_record_bytes(a->win_format, d)) || a->n_freq < 0 || 2 * a->n_freq > d ||
        (a->n_freq && (!a->cos || !a->sin)) || d > limits->head_dim || a->n_heads > limits->n_heads)
        return false;
    if (a->idx && (a->topk < 0 || !di_cpu_paged_fits(&a->main) || a->main.n_values != d))
        return false;
    int64_t topk = a->idx ? a->topk : 0;
    for (int64_t row = 0; row < rows->n_rows; row++) {
        int64_t window = (int64_t)rows->win_hi[row] - rows->win_lo[row];
        if (DI_MAX(window, (int64_t)0) + topk > limits->keys_max)
            return false;
        if (window > 0 && rows->win_lo[row] < 0)
            return false;
    }
    return true;
}

void di_cpu_need_attention(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need_raise(need, 0, ref_bytes(limits->keys_max, limits->head_dim));
    di_cpu_need_portable_attention(limits, need);
    di_cpu_need_avx512_attention(limits, need);
}

void di_cpu_install_ref_attention(di_cpu_kernels *k) {
    k->attention = ref_attention;
}
