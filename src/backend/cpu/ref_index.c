/* The indexer's selection, the readable definition (model.md 3.7).
 *
 * Row by row: its query quantised, the scores of all visible entries (parts are fixed ranges of entries), then the best
 * entries and the best candidate blocks. A score that is NaN or -inf is never chosen, so fewer than topk may come out
 * even where more entries are visible. portable_index.c gives the same result faster. */
#include "index.h"

#define ENTRIES_PER_PART 256

typedef struct ref_job {
    di_stream *stream;
    const di_index_select_args *a;
    int64_t row, n;
    const float *q, *w; /* of the row: [Ai, Di], [Ai] */
    float *scores;      /* [n] */
} ref_job;

static void score_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const ref_job *job = ctx;
    const di_index_select_args *a = job->a;
    int32_t seq = a->rows->seq[job->row];
    float *key = (float *)(void *)di_cpu_worker(job->stream, worker);
    int64_t end = DI_MIN((part + 1) * ENTRIES_PER_PART, job->n);
    for (int64_t j = part * ENTRIES_PER_PART; j < end; j++) {
        di_cpu_entry_load(a->rows, &a->keys, seq, (int32_t)j, key);
        float score = 0.0f;
        for (int32_t h = 0; h < a->n_heads; h++) {
            float dot = di_dot32(job->q + (int64_t)h * a->dim, key, a->dim);
            score += job->w[h] * (dot > 0.0f ? dot : 0.0f);
        }
        job->scores[j] = a->round_bf16 ? di_round_bf16(score) : score;
    }
}

/* Makes every score outside the row's candidate blocks -inf. */
static void keep_candidates(const di_index_select_args *a, int64_t row, int64_t n, float *scores) {
    const int32_t *list = a->cand_in + row * a->n_cand;
    int32_t at = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t block = j / a->cand_block;
        while (at < a->n_cand && list[at] >= 0 && list[at] < block)
            at++;
        if (at == a->n_cand || list[at] != block)
            scores[j] = -INFINITY;
    }
}

/* The k best of s, ascending, padded with -1. */
static void best(const float *s, int64_t n, int32_t k, int32_t *out) {
    int32_t count = 0; /* out[0..count) is the best so far, best first */
    for (int64_t j = 0; j < n; j++) {
        if (!(s[j] > -INFINITY) || (count == k && !(k && s[j] > s[out[k - 1]])))
            continue;
        int32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && s[j] > s[out[at - 1]]; at--)
            out[at] = out[at - 1];
        out[at] = (int32_t)j;
    }
    if (count) {
        float last = s[out[count - 1]];
        int32_t last_idx = out[count - 1];
        int32_t at = 0;
        for (int64_t j = 0; j < n; j++) {
            if (s[j] > last || (s[j] == last && j <= last_idx))
                out[at++] = (int32_t)j;
        }
    }
    for (int32_t t = count; t < k; t++)
        out[t] = -1;
}

/* Scores of the blocks of cand_block entries; returns how many blocks have a visible entry. */
static int64_t score_blocks(const di_index_select_args *a, const float *scores, int64_t n, float *out) {
    const float bf16_max = di_bf16_to_f32(0x7F7F);
    int64_t n_blocks = DI_CEIL_DIV(n, a->cand_block);
    for (int64_t b = 0; b < n_blocks; b++) {
        float most = -INFINITY;
        int64_t end = DI_MIN((b + 1) * a->cand_block, n);
        for (int64_t j = b * a->cand_block; j < end; j++)
            most = scores[j] > most ? scores[j] : most;
        out[b] = most > bf16_max ? bf16_max : most;
    }
    if (n_blocks)
        out[n_blocks - 1] = INFINITY; /* the newest always takes part */
    return n_blocks;
}

void di_cpu_index_query(const di_index_select_args *a, int64_t row, uint8_t *bytes, float *q) {
    int64_t n = (int64_t)a->n_heads * a->dim;
    di_cpu_load(&a->q, row, 0, n, q);
    if (a->keys.format == DI_KV_F32)
        return;
    uint8_t *scale = bytes + di_kv_data_bytes(DI_KV_MX4, n);
    di_kv_encode(DI_KV_MX4, q, n, bytes, scale);
    di_kv_decode(DI_KV_MX4, bytes, scale, n, q);
}

static di_status ref_index_select(di_stream *stream, const di_index_select_args *a) {
    if (!di_cpu_index_fits(stream, a))
        return DI_ERR_SHAPE;
    int64_t n_q = (int64_t)a->n_heads * a->dim;
    di_index_scratch scratch = di_cpu_index_scratch(stream);
    ref_job job = {stream, a, 0, 0, scratch.q, scratch.w, scratch.scores};
    for (int64_t row = 0; row < a->rows->n_rows; row++) {
        int64_t n = job.n = di_cpu_index_visible(a, row);
        job.row = row;
        di_cpu_index_query(a, row, di_cpu_worker(stream, 0), scratch.q);
        di_cpu_load(&a->w, row, 0, a->n_heads, scratch.w);
        di_cpu_run(stream, score_part, &job, DI_CEIL_DIV(n, ENTRIES_PER_PART), n * n_q);
        if (a->cand_in)
            keep_candidates(a, row, n, scratch.scores);
        best(scratch.scores, n, a->topk, a->idx + row * a->topk);
        if (a->cand_out) {
            int64_t n_blocks = score_blocks(a, scratch.scores, n, scratch.block_scores);
            best(scratch.block_scores, n_blocks, a->n_cand, a->cand_out + row * a->n_cand);
        }
        if (a->scores) {
            float *out = a->scores + row * a->scores_stride;
            for (int64_t j = 0; j < a->scores_stride; j++)
                out[j] = j < n ? scratch.scores[j] : -INFINITY;
        }
    }
    return DI_OK;
}

/* ---- for every level --------------------------------------------------------------------------------------------- */

bool di_cpu_index_fits(const di_stream *stream, const di_index_select_args *a) {
    const di_limits *limits = &stream->dev->limits;
    int64_t n_q = (int64_t)a->n_heads * a->dim;
    if (!a->rows || a->n_heads < 1 || a->dim < 32 || a->dim % 32 || a->ratio < 1 || !di_cpu_is_real(&a->q) ||
        !di_cpu_is_real(&a->w) || a->q.n_rows < a->rows->n_rows || a->w.n_rows < a->rows->n_rows ||
        a->q.n_cols != n_q || a->w.n_cols != a->n_heads || !di_cpu_paged_fits(&a->keys) || a->keys.n_values != a->dim ||
        a->topk < 0 || !a->idx || a->n_heads > limits->index_heads || a->dim > limits->index_dim)
        return false;
    if ((a->cand_in || a->cand_out) && (a->n_cand < 1 || a->cand_block < 8 || a->cand_block % 8))
        return false;
    for (int64_t row = 0; row < a->rows->n_rows; row++) {
        int64_t n = di_cpu_index_visible(a, row);
        if (n > limits->entries_max || (a->scores && n > a->scores_stride))
            return false;
    }
    di_cpu_need need = {0, 0};
    di_cpu_need_index(limits, &need);
    return di_cpu_scratch_fits(stream, need.shared, need.worker);
}

void di_cpu_install_ref_index(di_cpu_kernels *k) {
    k->index_select = ref_index_select;
    k->topk = best;
}
