/* Core attention with AVX-512; bit for bit ref_attention.c.
 *
 * Heads are the lanes of the scores, so that every lane keeps its own order of sums and the softmax runs over keys
 * without crossing lanes; values are the lanes of the sum over keys. Keys are decoded once for all heads, to bf16,
 * which holds every quantised key exactly, and are widened to floats a block of keys and a panel of values at a time,
 * which stays in the first-level cache while all heads use it:
 *
 *     scores  for each panel of 64 values, for each block of 48 keys: 6 keys x 32 heads at a time, in registers
 *     values  for each panel of 64 values, for each block of 48 keys: 4 heads x 64 values at a time, in registers
 *
 *     many rows: a part is a few consecutive rows, which share the window keys that they have in common, and the listed
 *                entries that stand at the same place of their lists
 *     few rows:  row after row; first the parts decode 32 keys each, then each part computes 16 heads
 *
 * Where queries and keys are bf16 values their products are exact and the steps of the dot products are fused. The
 * probabilities are floats: their products with the values round before they are added. */
#include "avx512_attention.h"

#include "avx512_vec.h"

#define KEYS_PER_PART 32
#define AHEAD 8 /* entries whose reads are under way */
/* Few rows: below this many, provided that a row is worth several parts. */
#define SPLIT_ROWS_MAX 16
#define SPLIT_WORK_MIN (2 << 20)

/* ---- keys -------------------------------------------------------------------------------------------------------- */

typedef struct job {
    di_stream *stream;
    const di_attention_args *a;
    const di_attention_steps *steps;
    di_attention_sizes z;
    bool is_bf16, is_fused;
    int64_t rows_per_part;
    /* the row at work, few rows only */
    void *keys;
    int32_t *entries; /* its listed entries without gaps */
    int64_t row, n_main;
} job;

static inline void *key_at(bool is_bf16, int64_t d, const void *keys, int64_t slot) {
    return (uint8_t *)(uintptr_t)keys + (size_t)(slot * d) * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
}

static void put_key(const job *j, void *keys, int64_t slot, di_kv_format format, const uint8_t *data,
                    const uint8_t *scale) {
    void *at = key_at(j->is_bf16, j->z.d, keys, slot);
    if (j->is_bf16)
        di_v16_kv_bf16(format, data, scale, j->z.d, at);
    else
        di_v16_kv_f32(format, data, scale, j->z.d, at);
}

/* Decodes the window keys at positions [pos, pos + n) to slots from `slot` on. */
static void put_window(const job *j, void *keys, int32_t seq, int32_t pos, int64_t n, int64_t slot) {
    const di_attention_args *a = j->a;
    size_t record_bytes = di_kv_record_bytes(a->win_format, j->z.d),
           data_bytes = di_kv_data_bytes(a->win_format, j->z.d);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *record = di_cpu_window_at(a->rows, a->records, record_bytes, &a->ring, seq, pos + (int32_t)i);
        put_key(j, keys, slot + i, a->win_format, record, record + data_bytes);
    }
}

/* Decodes n entries, entry[i] to slot at[i] or, where at is NULL, to slot i from `slot` on. Entries lie anywhere in
 * memory: reads of the next ones are under way while one is decoded. */
static void put_entries(const job *j, void *keys, int32_t seq, const int32_t *entry, const int32_t *at, int64_t n,
                        int64_t slot) {
    const di_paged *p = &j->a->main;
    size_t n_bytes = di_kv_record_bytes(p->format, j->z.d);
    di_cpu_entry next[AHEAD];
    for (int64_t i = 0; i < n + AHEAD - 1; i++) {
        if (i < n) {
            di_cpu_entry e = next[i % AHEAD] = di_cpu_entry_at(j->a->rows, p, seq, entry[i]);
            for (size_t b = 0; b < n_bytes; b += 64)
                __builtin_prefetch(e.data + b);
        }
        int64_t now = i - (AHEAD - 1);
        if (now >= 0)
            put_key(j, keys, at ? at[now] : slot + now, p->format, next[now % AHEAD].data, next[now % AHEAD].scale);
    }
}

/* Values [c, c + width) of n <= DI_KEY_BLOCK keys to the panel, and zeros below them: tiles read whole. */
static void widen(const di_attention_part *t, const void *keys, int64_t c, int64_t width, int64_t n) {
    float *out = t->panel;
    for (int64_t k = 0; k < n; k++, out += DI_VALUE_PANEL) {
        const void *key = key_at(t->is_bf16, t->d, keys, k);
        for (int64_t i = 0; i < width; i += DI_LANES) {
            __m512 x = t->is_bf16 ? di_v16_from_bf16((const uint16_t *)key + c + i)
                                  : _mm512_loadu_ps((const float *)key + c + i);
            _mm512_store_ps(out + i, x);
        }
    }
    for (int64_t k = n; k < DI_MIN(n + DI_HEAD_LANES, (int64_t)DI_KEY_BLOCK); k++, out += DI_VALUE_PANEL)
        memset(out, 0, DI_VALUE_PANEL * sizeof(float));
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Queries as [heads / 16, d, 16]. */
static void load_queries(const di_attention_part *t) {
    const di_act *x = &t->a->q;
    int64_t at = t->row * x->stride + t->head * t->d;
    float *q = t->q;
    for (int64_t h = 0; h < t->heads; h += DI_HEAD_LANES) {
        int64_t n = DI_MIN(t->n_heads - h, (int64_t)DI_HEAD_LANES);
        for (int64_t i = 0; i < t->d; i += DI_LANES) {
            __m512 r[16];
            for (int64_t k = 0; k < DI_HEAD_LANES; k++) {
                int64_t from = at + (h + k) * t->d + i;
                if (k >= n)
                    r[k] = _mm512_setzero_ps();
                else if (x->dtype == DI_BF16)
                    r[k] = di_v16_from_bf16((const uint16_t *)x->data + from);
                else
                    r[k] = _mm512_loadu_ps((const float *)x->data + from);
            }
            di_v16_transpose(r);
            for (int64_t k = 0; k < DI_LANES; k++)
                _mm512_store_ps(q + h * t->d + (i + k) * DI_LANES, r[k]);
        }
    }
}

/* s[k][v] (+)= the dot products of `width` values, 32 or 64, of n_keys keys and n_vecs vectors of heads, which lie
 * `stride` apart. Sums of a group of 32 stay in registers, which is why this must be inlined with constant counts. */
static inline __attribute__((always_inline)) void score_tile(const float *q, int64_t stride, const float *keys,
                                                             int64_t width, bool is_first, float *s, int64_t heads,
                                                             const int n_keys, const int n_vecs, const bool is_fused) {
    for (int64_t g = 0; g < width; g += 32) {
        __m512 sum[2][8][2]; /* over even, over odd values */
        for (int k = 0; k < n_keys; k++) {
            for (int v = 0; v < n_vecs; v++)
                sum[0][k][v] = sum[1][k][v] = _mm512_setzero_ps();
        }
        for (int64_t i = g; i < g + 32; i += 2) {
            for (int odd = 0; odd < 2; odd++) {
                __m512 x[2];
                for (int v = 0; v < n_vecs; v++)
                    x[v] = _mm512_load_ps(q + v * stride + (i + odd) * DI_LANES);
                for (int k = 0; k < n_keys; k++) {
                    __m512 key = _mm512_set1_ps(keys[k * DI_VALUE_PANEL + i + odd]);
                    for (int v = 0; v < n_vecs; v++)
                        sum[odd][k][v] = is_fused ? _mm512_fmadd_ps(x[v], key, sum[odd][k][v])
                                                  : _mm512_add_ps(sum[odd][k][v], _mm512_mul_ps(x[v], key));
                }
            }
        }
        for (int k = 0; k < n_keys; k++) {
            for (int v = 0; v < n_vecs; v++) {
                float *at = s + k * heads + v * DI_LANES;
                __m512 acc = is_first && g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at);
                _mm512_store_ps(at, _mm512_add_ps(acc, _mm512_add_ps(sum[0][k][v], sum[1][k][v])));
            }
        }
    }
}

/* A block of m keys against all heads, two vectors of heads at a time. */
static inline __attribute__((always_inline)) void score_block(const di_attention_part *t, int64_t c, int64_t width,
                                                              int64_t m, float *s, const bool is_fused) {
    const float *q = (const float *)t->q + c * DI_LANES;
    int64_t stride = t->d * DI_LANES, h = 0;
    for (; h + 2 * DI_LANES <= t->heads; h += 2 * DI_LANES) {
        for (int64_t k = 0; k < m; k += 6)
            score_tile(q + h * t->d, stride, t->panel + k * DI_VALUE_PANEL, width, c == 0, s + k * t->heads + h,
                       t->heads, 6, 2, is_fused);
    }
    if (h < t->heads) {
        for (int64_t k = 0; k < m; k += 8)
            score_tile(q + h * t->d, stride, t->panel + k * DI_VALUE_PANEL, width, c == 0, s + k * t->heads + h,
                       t->heads, 8, 1, is_fused);
    }
}

static void score_keys(const di_attention_part *t, const void *keys, int64_t n, float *s) {
    for (int64_t c = 0; c < t->d; c += DI_VALUE_PANEL) {
        int64_t width = DI_MIN((int64_t)DI_VALUE_PANEL, t->d - c);
        for (int64_t k = 0; k < n; k += DI_KEY_BLOCK) {
            int64_t m = DI_MIN((int64_t)DI_KEY_BLOCK, n - k);
            widen(t, key_at(t->is_bf16, t->d, keys, k), c, width, m);
            if (t->is_fused)
                score_block(t, c, width, m, s + k * t->heads, true);
            else
                score_block(t, c, width, m, s + k * t->heads, false);
        }
    }
}

static const di_attention_steps avx512_steps = {load_queries, score_keys};

/* ---- probabilities and values ------------------------------------------------------------------------------------ */

/* Dot products to exponentials in place, and their sums with the sink's, for n_vecs vectors of heads from h on. */
static inline __attribute__((always_inline)) void exp_tile(const di_attention_part *t, int64_t h, int64_t n, float *s,
                                                           float *sums, const int n_vecs) {
    const __m512 scale = _mm512_set1_ps(t->a->scale);
    __m512 sink[4], most[4], sum[4];
    for (int v = 0; v < n_vecs; v++) {
        int64_t used = DI_MAX((int64_t)0, DI_MIN(t->n_heads - h - v * DI_LANES, (int64_t)DI_LANES));
        __mmask16 mask = (__mmask16)((1u << used) - 1);
        sink[v] = most[v] = _mm512_maskz_loadu_ps(mask, t->a->sink + t->head + h + v * DI_LANES);
        sum[v] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < n; k++) {
        for (int v = 0; v < n_vecs; v++) {
            float *at = s + k * t->heads + h + v * DI_LANES;
            __m512 x = _mm512_mul_ps(_mm512_load_ps(at), scale);
            _mm512_store_ps(at, x);
            most[v] = _mm512_max_ps(x, most[v]); /* the second where x is not the larger or is NaN */
        }
    }
    for (int64_t k = 0; k < n; k++) {
        for (int v = 0; v < n_vecs; v++) {
            float *at = s + k * t->heads + h + v * DI_LANES;
            __m512 e = di_v16_exp_le0(_mm512_sub_ps(_mm512_load_ps(at), most[v]));
            _mm512_store_ps(at, e);
            sum[v] = _mm512_add_ps(sum[v], e);
        }
    }
    for (int v = 0; v < n_vecs; v++)
        _mm512_store_ps(sums + h + v * DI_LANES,
                        _mm512_add_ps(sum[v], di_v16_exp_le0(_mm512_sub_ps(sink[v], most[v]))));
}

static void make_exps(const di_attention_part *t, int64_t n, float *s, float *sums) {
    int64_t h = 0;
    for (; h + 4 * DI_LANES <= t->heads; h += 4 * DI_LANES)
        exp_tile(t, h, n, s, sums, 4);
    for (; h < t->heads; h += DI_LANES)
        exp_tile(t, h, n, s, sums, 1);
}

/* acc[h][0..16*n_vecs) += p[k][h] * panel[k] for 4 heads and n keys in rising order. */
static inline __attribute__((always_inline)) void value_tile(const float *p, int64_t heads, const float *panel,
                                                             int64_t n, float *acc, const int n_vecs) {
    __m512 c[4][4];
    for (int h = 0; h < 4; h++) {
        for (int v = 0; v < n_vecs; v++)
            c[h][v] = _mm512_load_ps(acc + h * DI_VALUE_PANEL + v * DI_LANES);
    }
    for (int64_t k = 0; k < n; k++) {
        __m512 x[4];
        for (int v = 0; v < n_vecs; v++)
            x[v] = _mm512_load_ps(panel + k * DI_VALUE_PANEL + v * DI_LANES);
        for (int h = 0; h < 4; h++) {
            __m512 w = _mm512_set1_ps(p[k * heads + h]);
            for (int v = 0; v < n_vecs; v++)
                c[h][v] = _mm512_add_ps(c[h][v], _mm512_mul_ps(w, x[v]));
        }
    }
    for (int h = 0; h < 4; h++) {
        for (int v = 0; v < n_vecs; v++)
            _mm512_store_ps(acc + h * DI_VALUE_PANEL + v * DI_LANES, c[h][v]);
    }
}

/* acc [heads, DI_VALUE_PANEL] += the panel's m keys times their probabilities. */
static void value_block(const di_attention_part *t, int64_t width, int64_t m, const float *p, float *acc) {
    for (int64_t h = 0; h < t->n_heads; h += 4) {
        if (width == DI_VALUE_PANEL)
            value_tile(p + h, t->heads, t->panel, m, acc + h * DI_VALUE_PANEL, 4);
        else
            value_tile(p + h, t->heads, t->panel, m, acc + h * DI_VALUE_PANEL, 2);
    }
}

/* Keys of a row that lie side by side. */
typedef struct key_run {
    const void *keys;
    int64_t n;
} key_run;

/* out [n_heads, d] = sum over the keys of p times key, divided by sums. */
static void make_values(const di_attention_part *t, const key_run runs[2], const float *p, const float *sums,
                        float *acc, float *out) {
    for (int64_t c = 0; c < t->d; c += DI_VALUE_PANEL) {
        int64_t width = DI_MIN((int64_t)DI_VALUE_PANEL, t->d - c), done = 0;
        memset(acc, 0, (size_t)(t->heads * DI_VALUE_PANEL) * sizeof(float));
        for (int r = 0; r < 2; r++) {
            for (int64_t k = 0; k < runs[r].n; k += DI_KEY_BLOCK) {
                int64_t m = DI_MIN((int64_t)DI_KEY_BLOCK, runs[r].n - k);
                widen(t, key_at(t->is_bf16, t->d, runs[r].keys, k), c, width, m);
                value_block(t, width, m, p + (done + k) * t->heads, acc);
            }
            done += runs[r].n;
        }
        for (int64_t h = 0; h < t->n_heads; h++) {
            __m512 by = _mm512_set1_ps(sums[h]);
            for (int64_t i = 0; i < width; i += DI_LANES) {
                __m512 x = _mm512_div_ps(_mm512_load_ps(acc + h * DI_VALUE_PANEL + i), by);
                _mm512_store_ps(out + h * t->d + c + i, x);
            }
        }
    }
}

static void store_heads(const di_attention_part *t, const float *x) {
    const di_act *out = &t->a->out;
    int64_t at = t->row * out->stride + t->head * t->d, n = t->n_heads * t->d;
    if (out->dtype == DI_F32) {
        memcpy((float *)out->data + at, x, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; i += DI_LANES)
        di_v16_to_bf16((uint16_t *)out->data + at + i, _mm512_load_ps(x + i));
}

/* Up to z.heads heads of a row from `head` on. at: scratch. */
static void attend(const job *j, int64_t row, int64_t head, int64_t heads, const key_run runs[2], uint8_t *at) {
    const di_attention_args *a = j->a;
    di_attention_sizes z = j->z;
    z.heads = heads;
    di_attention_part t = {.a = a,
                           .row = row,
                           .head = head,
                           .n_heads = DI_MIN(heads, a->n_heads - head),
                           .d = z.d,
                           .heads = heads,
                           .is_bf16 = j->is_bf16,
                           .is_fused = j->is_fused};
    t.q = di_cpu_take(&at, di_attention_query_bytes(&z));
    float *s = di_cpu_take(&at, di_attention_score_bytes(&z));
    t.panel = di_cpu_take(&at, di_attention_panel_bytes());
    float *acc = di_cpu_take(&at, (size_t)(heads * DI_VALUE_PANEL) * sizeof(float));
    float *sums = di_cpu_take(&at, (size_t)heads * sizeof(float));
    float *out = t.q; /* the queries are of no use once the scores are made */
    int64_t n = runs[0].n + runs[1].n;
    if (n == 0) {
        memset(out, 0, (size_t)(t.n_heads * t.d) * sizeof(float));
        store_heads(&t, out);
        return;
    }
    j->steps->load(&t);
    /* What the first run's step writes past its end, the second's overwrites. */
    j->steps->score(&t, runs[0].keys, runs[0].n, s);
    j->steps->score(&t, runs[1].keys, runs[1].n, s + runs[0].n * heads);
    make_exps(&t, n, s, sums);
    make_values(&t, runs, s, sums, acc, out);
    for (int64_t h = 0; h < t.n_heads; h++)
        di_cpu_unrotate(a, row, out + h * t.d);
    store_heads(&t, out);
}

/* ---- many rows --------------------------------------------------------------------------------------------------- */

/* Rows [row, end) of one sequence whose windows, together positions [lo, hi), fit the slots: computes them. */
static void attend_group(const job *j, int64_t row, int64_t end, int32_t lo, int32_t hi, void *keys, int32_t *lists,
                         uint8_t *at) {
    const di_attention_args *a = j->a;
    const di_rows *rows = a->rows;
    int32_t seq = rows->seq[row];
    put_window(j, keys, seq, lo, hi - lo, 0);
    /* held[i] is the entry that slot main + i has; entries to decode go to slots. */
    int32_t *held = lists, *entry = held + j->z.cap, *slot = entry + j->z.cap;
    int64_t main = hi - lo, n_held = 0;
    for (; row < end; row++) {
        int64_t n_window = DI_MAX(rows->win_hi[row] - rows->win_lo[row], 0), n_main = 0;
        const int32_t *list = a->idx ? a->idx + row * a->topk : NULL;
        int64_t n_new = 0;
        for (int32_t t = 0; list && t < a->topk; t++) {
            if (list[t] < 0)
                continue;
            if (n_main >= n_held || held[n_main] != list[t]) {
                held[n_main] = entry[n_new] = list[t];
                slot[n_new++] = (int32_t)(main + n_main);
            }
            n_main++;
        }
        n_held = DI_MAX(n_held, n_main);
        put_entries(j, keys, seq, entry, slot, n_new, 0);
        int64_t first = n_window ? rows->win_lo[row] - lo : 0;
        const key_run runs[2] = {{key_at(j->is_bf16, j->z.d, keys, first), n_window},
                                 {key_at(j->is_bf16, j->z.d, keys, main), n_main}};
        attend(j, row, 0, j->z.heads, runs, at);
    }
}

static void rows_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_rows *rows = j->a->rows;
    uint8_t *at = di_cpu_worker(j->stream, worker);
    void *keys = di_cpu_take(&at, di_attention_keys_bytes(&j->z));
    int32_t *lists = di_cpu_take(&at, di_attention_lists_bytes(&j->z));
    int64_t topk = j->a->idx ? j->a->topk : 0, cap = j->z.cap - DI_KEY_SPARE;
    int64_t row = part * j->rows_per_part, end = DI_MIN(row + j->rows_per_part, (int64_t)rows->n_rows);
    while (row < end) {
        int32_t lo = 0, hi = 0; /* union of the group's windows */
        int64_t next = row;
        for (; next < end && rows->seq[next] == rows->seq[row]; next++) {
            int32_t l = rows->win_lo[next], h = rows->win_hi[next];
            if (l >= h)
                continue;
            if (lo < hi) {
                l = DI_MIN(l, lo);
                h = DI_MAX(h, hi);
                if ((int64_t)h - l + topk > cap)
                    break;
            }
            lo = l;
            hi = h;
        }
        attend_group(j, row, next, lo, hi, keys, lists, at);
        row = next;
    }
}

/* ---- few rows ---------------------------------------------------------------------------------------------------- */

static int64_t n_window_of(const job *j) {
    return DI_MAX(j->a->rows->win_hi[j->row] - j->a->rows->win_lo[j->row], 0);
}

static void keys_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const job *j = ctx;
    int32_t seq = j->a->rows->seq[j->row], lo = j->a->rows->win_lo[j->row];
    int64_t n_window = n_window_of(j), n = n_window + j->n_main, slot = part * KEYS_PER_PART;
    int64_t end = DI_MIN(slot + KEYS_PER_PART, n);
    if (slot < n_window) {
        int64_t n_here = DI_MIN(end, n_window) - slot;
        put_window(j, j->keys, seq, lo + (int32_t)slot, n_here, slot);
        slot += n_here;
    }
    if (slot < end)
        put_entries(j, j->keys, seq, j->entries + slot - n_window, NULL, end - slot, slot);
}

static void heads_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const key_run runs[2] = {{j->keys, n_window_of(j) + j->n_main}, {j->keys, 0}};
    attend(j, j->row, part * DI_HEAD_LANES, DI_HEAD_LANES, runs, di_cpu_worker(j->stream, worker));
}

static void split_rows(job *j) {
    const di_attention_args *a = j->a;
    uint8_t *at = di_cpu_shared(j->stream);
    j->keys = di_cpu_take(&at, di_attention_keys_bytes(&j->z));
    j->entries = di_cpu_take(&at, di_attention_lists_bytes(&j->z));
    for (j->row = 0; j->row < a->rows->n_rows; j->row++) {
        j->n_main = 0;
        for (int32_t t = 0; a->idx && t < a->topk; t++) {
            int32_t entry = a->idx[j->row * a->topk + t];
            if (entry >= 0)
                j->entries[j->n_main++] = entry;
        }
        int64_t n = n_window_of(j) + j->n_main;
        di_cpu_run(j->stream, keys_part, j, DI_CEIL_DIV(n, KEYS_PER_PART), n * j->z.d);
        di_cpu_run(j->stream, heads_part, j, j->z.heads / DI_HEAD_LANES, 2 * n * j->z.heads * j->z.d);
    }
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

di_status di_cpu_attention_lanes(di_stream *stream, const di_attention_args *a, const di_attention_steps *bf16_steps) {
    if (!di_cpu_attention_fits(stream, a))
        return DI_ERR_SHAPE;
    di_cpu_need need = {0, 0};
    di_cpu_need_avx512_attention(&stream->dev->limits, &need);
    if (!di_cpu_scratch_fits(stream, need.shared, need.worker))
        return DI_ERR_SHAPE;
    int64_t keys_max = stream->dev->limits.keys_max, n_rows = a->rows->n_rows;
    job j = {.stream = stream, .a = a, .z = di_attention_sizes_of(keys_max, a->n_heads, a->head_dim)};
    j.is_bf16 = a->win_format != DI_KV_F32 && (!a->idx || a->main.format != DI_KV_F32);
    j.is_fused = j.is_bf16 && a->q.dtype == DI_BF16;
    j.steps = j.is_fused ? bf16_steps : &avx512_steps;
    int64_t row_work = 2 * keys_max * j.z.heads * j.z.d;
    if (n_rows < SPLIT_ROWS_MAX && row_work >= SPLIT_WORK_MIN) {
        split_rows(&j);
        return DI_OK;
    }
    j.rows_per_part = DI_MAX((int64_t)1, DI_MIN((int64_t)DI_KEY_ROWS, n_rows / 8));
    di_cpu_run(stream, rows_part, &j, DI_CEIL_DIV(n_rows, j.rows_per_part), n_rows * row_work);
    return DI_OK;
}

static di_status avx512_attention(di_stream *stream, const di_attention_args *a) {
    return di_cpu_attention_lanes(stream, a, &avx512_steps);
}

void di_cpu_install_avx512_attention(di_cpu_kernels *k) {
    k->attention = avx512_attention;
}
