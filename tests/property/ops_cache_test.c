/* Properties of the operations on caches, over random shapes, formats, batches and windows:
 *
 *   - attention and index scores agree with double precision computed from the stored bytes, within a bound that is
 *     counted from the number of fp32 operations, not fitted;
 *   - what index_select keeps is exactly what sorting its scores gives;
 *   - every level and thread count gives the same bits, and so does one row a call, with keys from the ring. */
#include "ops_rig.h"

#define EPS 0x1p-24

/* ---- a random scene: sequences with rings, pages and rows -------------------------------------------------------- */

enum { SEQS_MAX = 4, ROWS_MAX = 48, BLOCKS = 64 };

typedef struct scene {
    int32_t n_seqs, n_rows, ring_len, per_block;
    int32_t pos[ROWS_MAX], seq[ROWS_MAX], win_lo[ROWS_MAX], win_hi[ROWS_MAX];
    int32_t row0[SEQS_MAX], n[SEQS_MAX], pos0[SEQS_MAX], slot[SEQS_MAX];
    int32_t blocks[SEQS_MAX * BLOCKS];
    di_rows rows;
} scene;

/* The oldest position whose key the ring still has before the forward. */
static int32_t oldest(const scene *sc, int32_t s) {
    int32_t p = sc->pos0[s] - sc->ring_len;
    return p > 0 ? p : 0;
}

static void scene_init(scene *sc, uint64_t *rng, bool is_causal) {
    memset(sc, 0, sizeof *sc);
    sc->n_seqs = (int32_t)di_test_random_range(rng, 1, SEQS_MAX);
    sc->ring_len = (int32_t)di_test_random_range(rng, 3, 40);
    sc->per_block = (int32_t)di_test_random_range(rng, 3, 20);
    int32_t window = (int32_t)di_test_random_range(rng, 1, sc->ring_len);
    for (int32_t s = 0; s < sc->n_seqs; s++) {
        sc->row0[s] = sc->n_rows;
        sc->n[s] = (int32_t)di_test_random_range(rng, 1, di_test_random(rng) % 3 ? 12 : 2);
        sc->pos0[s] = (int32_t)di_test_random_range(rng, 0, di_test_random(rng) % 3 ? 90 : 2);
        sc->slot[s] = (s * 3 + 1) % SEQS_MAX; /* a permutation that is not the identity */
        for (int32_t b = 0; b < BLOCKS; b++)
            sc->blocks[s * BLOCKS + b] = (b * 7 + s * BLOCKS + 5) % (SEQS_MAX * BLOCKS);
        for (int32_t i = 0; i < sc->n[s]; i++) {
            int32_t row = sc->n_rows++, p = sc->pos0[s] + i, end = sc->pos0[s] + sc->n[s];
            sc->pos[row] = p;
            sc->seq[row] = s;
            if (is_causal) {
                sc->win_lo[row] = p - window + 1 > 0 ? p - window + 1 : 0;
                sc->win_hi[row] = p + 1;
            } else { /* any range, also past the row itself as in a drafting round, also an empty one */
                sc->win_lo[row] = (int32_t)di_test_random_range(rng, oldest(sc, s), end);
                sc->win_hi[row] =
                    (int32_t)di_test_random_range(rng, di_test_random(rng) % 4 ? sc->win_lo[row] : 0, end);
            }
        }
    }
    sc->rows = (di_rows){.n_rows = sc->n_rows,
                         .n_seqs = sc->n_seqs,
                         .pos = sc->pos,
                         .seq = sc->seq,
                         .win_lo = sc->win_lo,
                         .win_hi = sc->win_hi,
                         .row0 = sc->row0,
                         .n = sc->n,
                         .pos0 = sc->pos0,
                         .slot = sc->slot,
                         .blocks = sc->blocks,
                         .blocks_stride = BLOCKS};
}

/* The one row `row` of a scene as a batch of its own; out must live as long as its rows. */
typedef struct one_row {
    int32_t pos, seq, win_lo, win_hi, row0, n, slot;
    di_rows rows;
} one_row;

static void one_row_init(one_row *o, const scene *sc, int32_t row) {
    int32_t s = sc->seq[row];
    *o = (one_row){
        .pos = sc->pos[row], .win_lo = sc->win_lo[row], .win_hi = sc->win_hi[row], .n = 1, .slot = sc->slot[s]};
    o->rows = (di_rows){.n_rows = 1,
                        .n_seqs = 1,
                        .pos = &o->pos,
                        .seq = &o->seq,
                        .win_lo = &o->win_lo,
                        .win_hi = &o->win_hi,
                        .row0 = &o->row0,
                        .n = &o->n,
                        .pos0 = &o->pos,
                        .slot = &o->slot,
                        .blocks = sc->blocks + s * BLOCKS,
                        .blocks_stride = BLOCKS};
}

/* Where entry j of sequence s lies, from ops.h's words. */
static void entry_at(const scene *sc, const di_paged *p, int32_t s, int32_t j, uint8_t **data, uint8_t **scale) {
    int64_t n_data = ops_rig_data_bytes(p->format, p->n_values), n_scale = ops_rig_scale_bytes(p->format, p->n_values);
    int64_t at = j % p->per_block;
    uint8_t *section = p->pages + (size_t)sc->blocks[s * BLOCKS + j / p->per_block] * p->page_bytes + p->offset;
    bool is_split = p->format == DI_KV_MX4;
    *data = section + at * (is_split ? n_data : n_data + n_scale);
    *scale = is_split ? section + p->per_block * n_data + at * n_scale : *data + n_data;
}

static di_paged paged_init(const scene *sc, uint64_t *rng, di_kv_format format, int32_t n_values) {
    di_paged p = {.format = format, .n_values = n_values, .per_block = sc->per_block};
    p.offset = (size_t)di_test_random_range(rng, 0, 3) * 32;
    p.page_bytes = p.offset + (size_t)(ops_rig_record_bytes(format, n_values) * sc->per_block) + 17;
    size_t n_bytes = p.page_bytes * SEQS_MAX * BLOCKS;
    p.pages = ops_rig_alloc(n_bytes);
    memset(p.pages, 0xFF, n_bytes); /* what nobody wrote reads as NaN */
    return p;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

typedef struct attention_scene {
    scene sc;
    di_limits limits;
    di_attention_args a;
    int32_t entries;
    float *q, *out;
    uint16_t *q16;
    uint8_t *slots_start; /* the rings before this forward */
    size_t slots_bytes;
} attention_scene;

/* Record of a window key, from the ring or from this forward. */
static uint8_t *window_record(const attention_scene *as, int32_t s, int32_t pos) {
    const scene *sc = &as->sc;
    const di_ring *r = &as->a.ring;
    if (pos >= sc->pos0[s])
        return (uint8_t *)as->a.records + (size_t)(sc->row0[s] + pos - sc->pos0[s]) * r->record_bytes;
    return r->slots + (size_t)sc->slot[s] * r->slot_bytes + r->offset + (size_t)(pos % r->ring_len) * r->record_bytes;
}

static void attention_init(attention_scene *as, uint64_t *rng, bool is_causal) {
    memset(as, 0, sizeof *as);
    scene *sc = &as->sc;
    scene_init(sc, rng, is_causal);
    di_attention_args *a = &as->a;
    static const di_kv_format mains[] = {DI_KV_FP4, DI_KV_FP8, DI_KV_F32};
    bool is_exact = di_test_random(rng) % 3 == 0;
    a->rows = &sc->rows;
    a->n_heads = (int32_t)di_test_random_range(rng, 1, 9);
    a->head_dim = 32 * (int32_t)di_test_random_range(rng, 1, 4);
    a->n_freq = (int32_t)di_test_random_range(rng, 0, a->head_dim / 2);
    a->win_format = is_exact ? DI_KV_F32 : DI_KV_FP8;
    a->scale = (float)(1 / sqrt(a->head_dim));
    int64_t d = a->head_dim, n_cols = a->n_heads * d;

    a->ring = (di_ring){
        .ring_len = sc->ring_len, .record_bytes = (size_t)ops_rig_record_bytes(a->win_format, d), .offset = 64};
    a->ring.slot_bytes = a->ring.offset + a->ring.record_bytes * (size_t)sc->ring_len + 32;
    as->slots_bytes = a->ring.slot_bytes * SEQS_MAX;
    a->ring.slots = ops_rig_alloc(as->slots_bytes);
    memset(a->ring.slots, 0xFF, as->slots_bytes);
    a->records = ops_rig_alloc(a->ring.record_bytes * ROWS_MAX);
    for (int32_t s = 0; s < sc->n_seqs; s++) {
        for (int32_t p = oldest(sc, s); p < sc->pos0[s] + sc->n[s]; p++) {
            uint8_t *record = window_record(as, s, p);
            ops_rig_random_record(rng, a->win_format, record, record + ops_rig_data_bytes(a->win_format, d), d);
        }
    }
    as->slots_start = ops_rig_alloc(as->slots_bytes);
    memcpy(as->slots_start, a->ring.slots, as->slots_bytes);

    as->entries = (int32_t)di_test_random_range(rng, 1, 60);
    a->main = paged_init(sc, rng, is_exact ? DI_KV_F32 : mains[di_test_random(rng) % 2], (int32_t)d);
    for (int32_t s = 0; s < sc->n_seqs; s++) {
        for (int32_t j = 0; j < as->entries; j++) {
            uint8_t *data, *scale;
            entry_at(sc, &a->main, s, j, &data, &scale);
            ops_rig_random_record(rng, a->main.format, data, scale, d);
        }
    }
    a->topk = (int32_t)di_test_random_range(rng, 1, 40);
    int32_t *idx = ops_rig_alloc((size_t)(ROWS_MAX * a->topk) * sizeof *idx);
    int kind = (int)(di_test_random(rng) % 4);
    for (int32_t i = 0; i < sc->n_rows * a->topk; i++) {
        int32_t t = i % a->topk;
        idx[i] = (int32_t)di_test_random_range(rng, -1, as->entries - 1);
        if (kind == 1)
            idx[i] = t < as->entries ? t : -1; /* all of a short context: the same in every row */
        if (kind == 2)
            idx[i] = -1;
    }
    a->idx = kind == 3 ? NULL : idx;
    if (kind == 3)
        free(idx);

    as->q = ops_rig_alloc((size_t)(ROWS_MAX * n_cols) * sizeof(float));
    as->q16 = ops_rig_alloc((size_t)(ROWS_MAX * n_cols) * sizeof(uint16_t));
    ops_rig_random_bf16(rng, 3, as->q, sc->n_rows * n_cols);
    a->q = ops_rig_act(is_exact ? DI_F32 : DI_BF16, as->q, as->q16, sc->n_rows, n_cols);
    float *sink = ops_rig_alloc((size_t)a->n_heads * sizeof(float));
    for (int32_t h = 0; h < a->n_heads; h++)
        sink[h] = (float)(8 * di_test_random_unit(rng) - 4);
    a->sink = sink;
    float *cos_table = ops_rig_alloc((size_t)(ROWS_MAX * (a->n_freq + 1)) * sizeof(float));
    float *sin_table = ops_rig_alloc((size_t)(ROWS_MAX * (a->n_freq + 1)) * sizeof(float));
    for (int32_t i = 0; i < sc->n_rows * a->n_freq; i++) {
        double angle = 6.283 * di_test_random_unit(rng);
        cos_table[i] = (float)cos(angle);
        sin_table[i] = (float)sin(angle);
    }
    a->cos = cos_table;
    a->sin = sin_table;
    as->out = ops_rig_alloc((size_t)(ROWS_MAX * n_cols) * sizeof(float));
    a->out = (di_act){.dtype = a->q.dtype, .n_rows = sc->n_rows, .n_cols = n_cols, .stride = n_cols, .data = as->out};
    /* A large keys_max makes a row worth several parts. */
    as->limits = (di_limits){.rows_max = ROWS_MAX,
                             .keys_max = di_test_random(rng) % 2 ? 110 : 3000,
                             .head_dim = d,
                             .n_heads = a->n_heads,
                             .n_in_max = n_cols};
}

static void attention_free(attention_scene *as) {
    free((void *)as->a.records);
    free((void *)as->a.idx);
    free((void *)as->a.sink);
    free((void *)as->a.cos);
    free((void *)as->a.sin);
    free(as->a.ring.slots);
    free(as->a.main.pages);
    free(as->slots_start);
    free(as->q);
    free(as->q16);
    free(as->out);
}

static float out_value(const di_act *out, int64_t i) {
    return out->dtype == DI_BF16 ? di_bf16_to_f32(((const uint16_t *)out->data)[i]) : ((const float *)out->data)[i];
}

/* Keys of a row in double [n, D], in order; returns n. */
static int64_t true_keys(const attention_scene *as, int32_t row, double *keys) {
    const di_attention_args *a = &as->a;
    int32_t s = as->sc.seq[row];
    int64_t n = 0, d = a->head_dim;
    for (int32_t p = as->sc.win_lo[row]; p < as->sc.win_hi[row]; p++, n++) {
        const uint8_t *record = window_record(as, s, p);
        for (int64_t i = 0; i < d; i++)
            keys[n * d + i] = ops_rig_value(a->win_format, record, record + ops_rig_data_bytes(a->win_format, d), i);
    }
    for (int32_t t = 0; a->idx && t < a->topk; t++) {
        uint8_t *data, *scale;
        int32_t j = a->idx[row * a->topk + t];
        if (j < 0)
            continue;
        entry_at(&as->sc, &a->main, s, j, &data, &scale);
        for (int64_t i = 0; i < d; i++)
            keys[n * d + i] = ops_rig_value(a->main.format, data, scale, i);
        n++;
    }
    return n;
}

/* Checks one head of one row against double. The bound: a score is a chain of D/32 + 18 roundings of partial sums below
 * sum|q k|, exp doubles that as a relative error, the sums over n keys add n each, rotation and division a few. */
static void check_head(const attention_scene *as, int32_t row, int32_t h, const double *keys, int64_t n) {
    const di_attention_args *a = &as->a;
    int64_t d = a->head_dim, at = ((int64_t)row * a->n_heads + h) * d;
    double out[128] = {0}, p[128], most = a->sink[h], sum = 0, spread = 0, key_max = 0;
    assert_true(n <= 128);
    for (int64_t k = 0; k < n; k++) {
        double dot = 0, size = 0;
        for (int64_t i = 0; i < d; i++) {
            dot += as->q[at + i] * keys[k * d + i];
            size += fabs(as->q[at + i] * keys[k * d + i]);
            key_max = fmax(key_max, fabs(keys[k * d + i]));
        }
        p[k] = dot * a->scale;
        spread = fmax(spread, size * a->scale);
        most = fmax(most, p[k]);
    }
    for (int64_t k = 0; k < n; k++) {
        p[k] = exp(p[k] - most);
        sum += p[k];
        for (int64_t i = 0; i < d; i++)
            out[i] += p[k] * keys[k * d + i];
    }
    sum += exp(a->sink[h] - most);
    double bound = EPS * key_max * 2 * (2 * spread * ((double)d / 32 + 20) + 2 * (double)n + 16);
    for (int64_t i = 0; i < d; i++) {
        double want = out[i] / sum;
        int64_t pair = i - (d - 2 * a->n_freq);
        if (pair >= 0) {
            double c = a->cos[row * a->n_freq + pair / 2], s = a->sin[row * a->n_freq + pair / 2];
            want = pair % 2 ? (out[i] * c - out[i - 1] * s) / sum : (out[i] * c + out[i + 1] * s) / sum;
        }
        double got = out_value(&a->out, at + i), allowed = bound + (a->out.dtype == DI_BF16 ? fabs(want) * 0x1p-8 : 0);
        if (!(fabs(got - want) <= allowed))
            fail_msg("row %d head %d value %d of %d keys: %.9g, expected %.9g within %.2g", row, h, (int)i, (int)n, got,
                     want, allowed);
        if (n == 0)
            assert_true(got == 0 && !signbit(got));
    }
}

DI_PROPERTY(attention_agrees_with_double_and_all_levels_and_threads, 150) {
    attention_scene as;
    attention_init(&as, &seed, false);
    size_t n_bytes = (size_t)(as.sc.n_rows * as.a.out.n_cols) * (as.a.out.dtype == DI_BF16 ? 2 : 4);
    uint8_t *first = ops_rig_alloc(n_bytes);
    for (int v = 0; v < ops_rig_variants(); v++) {
        ops_rig r;
        ops_rig_open_variant(&r, v, &as.limits);
        memset(as.out, 0xFF, n_bytes);
        assert_int_equal(di_cpu_ops.attention(r.stream, &as.a), DI_OK);
        ops_rig_close(&r);
        if (v == 0)
            memcpy(first, as.out, n_bytes);
        assert_memory_equal(as.out, first, n_bytes);
    }
    double *keys = ops_rig_alloc((size_t)(as.limits.keys_max * as.a.head_dim) * sizeof *keys);
    for (int32_t row = 0; row < as.sc.n_rows; row++) {
        int64_t n = true_keys(&as, row, keys);
        for (int32_t h = 0; h < as.a.n_heads; h++)
            check_head(&as, row, h, keys, n);
    }
    free(keys);
    free(first);
    attention_free(&as);
}

/* The same sequences fed one row a call: keys that were records come from the ring now. */
DI_PROPERTY(attention_is_the_same_one_row_at_a_time, 100) {
    attention_scene as;
    attention_init(&as, &seed, true);
    const scene *sc = &as.sc;
    size_t row_bytes = (size_t)as.a.out.n_cols * (as.a.out.dtype == DI_BF16 ? 2 : 4);
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &as.limits);
    assert_int_equal(di_cpu_ops.attention(r.stream, &as.a), DI_OK);
    uint8_t *whole = ops_rig_alloc(row_bytes * ROWS_MAX);
    memcpy(whole, as.out, row_bytes * (size_t)sc->n_rows);
    for (int32_t row = 0; row < sc->n_rows; row++) {
        one_row o;
        one_row_init(&o, sc, row);
        di_attention_args a = as.a;
        a.rows = &o.rows;
        a.records += (size_t)row * a.ring.record_bytes;
        if (a.idx)
            a.idx += row * a.topk;
        a.cos += row * a.n_freq;
        a.sin += row * a.n_freq;
        a.q.n_rows = a.out.n_rows = 1;
        a.q.data = (uint8_t *)a.q.data + (size_t)row * row_bytes;
        assert_int_equal(di_cpu_ops.attention(r.stream, &a), DI_OK);
        assert_memory_equal(as.out, whole + (size_t)row * row_bytes, row_bytes);
        di_ring_store_args store = {.rows = &o.rows, .records = a.records, .store_from = &o.pos, .ring = a.ring};
        assert_int_equal(di_cpu_ops.ring_store(r.stream, &store), DI_OK);
    }
    /* Storing all rows in one call leaves the same rings. */
    uint8_t *by_row = ops_rig_alloc(as.slots_bytes);
    memcpy(by_row, as.a.ring.slots, as.slots_bytes);
    memcpy(as.a.ring.slots, as.slots_start, as.slots_bytes);
    di_ring_store_args store = {.rows = &sc->rows, .records = as.a.records, .store_from = sc->pos0, .ring = as.a.ring};
    assert_int_equal(di_cpu_ops.ring_store(r.stream, &store), DI_OK);
    assert_memory_equal(as.a.ring.slots, by_row, as.slots_bytes);
    free(by_row);
    free(whole);
    ops_rig_close(&r);
    attention_free(&as);
}

/* ---- index_select ------------------------------------------------------------------------------------------------ */

typedef struct index_scene {
    scene sc;
    di_limits limits;
    di_index_select_args a;
    float *q, *w;
    uint16_t *q16, *w16;
    int32_t entries; /* of every sequence */
    int32_t *cand;
} index_scene;

static void index_init(index_scene *is, uint64_t *rng) {
    memset(is, 0, sizeof *is);
    scene *sc = &is->sc;
    scene_init(sc, rng, true);
    bool is_long = di_test_random(rng) % 3 == 0;
    if (is_long) { /* more entries than one part takes */
        for (int32_t row = 0; row < sc->n_rows; row++)
            sc->pos[row] += 500;
        for (int32_t s = 0; s < sc->n_seqs; s++)
            sc->pos0[s] += 500;
        sc->per_block = 12;
    }
    di_index_select_args *a = &is->a;
    bool is_exact = di_test_random(rng) % 3 == 0;
    a->rows = &sc->rows;
    a->n_heads = (int32_t)di_test_random_range(rng, 1, 9);
    a->dim = 32 * (int32_t)di_test_random_range(rng, 1, 4);
    a->ratio = (int32_t)di_test_random_range(rng, 1, 2);
    a->keys = paged_init(sc, rng, is_exact ? DI_KV_F32 : DI_KV_MX4, a->dim);
    a->round_bf16 = !is_exact;
    a->topk = (int32_t)di_test_random_range(rng, 1, 70);
    a->cand_block = di_test_random(rng) % 2 ? 8 : 16;
    is->entries = (is_long ? 620 : 110) / a->ratio;
    for (int32_t s = 0; s < sc->n_seqs; s++) {
        for (int32_t j = 0; j < is->entries; j++) {
            uint8_t *data, *scale;
            entry_at(sc, &a->keys, s, j, &data, &scale);
            ops_rig_random_record(rng, a->keys.format, data, scale, a->dim);
        }
    }
    int64_t n_q = (int64_t)a->n_heads * a->dim;
    is->q = ops_rig_alloc((size_t)(ROWS_MAX * n_q) * sizeof(float));
    is->q16 = ops_rig_alloc((size_t)(ROWS_MAX * n_q) * sizeof(uint16_t));
    is->w = ops_rig_alloc((size_t)(ROWS_MAX * a->n_heads) * sizeof(float));
    is->w16 = ops_rig_alloc((size_t)(ROWS_MAX * a->n_heads) * sizeof(uint16_t));
    ops_rig_random_bf16(rng, 2, is->q, sc->n_rows * n_q);
    ops_rig_random_bf16(rng, 1, is->w, sc->n_rows * a->n_heads);
    for (int32_t row = 0; row < sc->n_rows; row++) {
        uint64_t kind = di_test_random(rng) % 12;
        for (int32_t h = 0; h < a->n_heads && kind < 2; h++)
            is->w[row * a->n_heads + h] = kind ? 0 : NAN; /* all tie; none counts */
    }
    a->q = ops_rig_act(is_exact ? DI_F32 : DI_BF16, is->q, is->q16, sc->n_rows, n_q);
    a->w = ops_rig_act(is_exact ? DI_F32 : DI_BF16, is->w, is->w16, sc->n_rows, a->n_heads);
    a->idx = ops_rig_alloc((size_t)(ROWS_MAX * a->topk) * sizeof(int32_t));
    a->n_cand = (int32_t)di_test_random_range(rng, 1, 50);
    is->cand = ops_rig_alloc((size_t)(ROWS_MAX * a->n_cand) * sizeof(int32_t));
    uint64_t use = di_test_random(rng) % 3;
    if (use == 0)
        a->n_cand = 0;
    if (use == 1)
        a->cand_out = is->cand;
    if (use == 2) { /* random ascending blocks of the visible ones */
        a->cand_in = is->cand;
        for (int32_t row = 0; row < sc->n_rows; row++) {
            int32_t n = (sc->pos[row] + 1) / a->ratio, at = 0;
            for (int32_t b = 0; b * a->cand_block < n && at < a->n_cand; b++)
                if (di_test_random(rng) % 3)
                    is->cand[row * a->n_cand + at++] = b;
            while (at < a->n_cand)
                is->cand[row * a->n_cand + at++] = -1;
        }
    }
    a->scores_stride = is->entries + (int64_t)(di_test_random(rng) % 20);
    a->scores = ops_rig_alloc((size_t)(ROWS_MAX * a->scores_stride) * sizeof(float));
    /* Little room makes several waves of rows. */
    is->limits = (di_limits){.rows_max = ROWS_MAX,
                             .entries_max = is->entries,
                             .index_heads = a->n_heads,
                             .index_dim = a->dim,
                             .head_dim = a->dim,
                             .n_in_max = n_q};
}

static void index_free(index_scene *is) {
    free(is->q);
    free(is->q16);
    free(is->w);
    free(is->w16);
    free(is->cand);
    free(is->a.idx);
    free(is->a.scores);
    free(is->a.keys.pages);
}

/* Whether entry j takes part for a row. */
static bool takes_part(const di_index_select_args *a, int32_t row, int32_t j) {
    if (!a->cand_in)
        return true;
    for (int32_t t = 0; t < a->n_cand; t++)
        if (a->cand_in[row * a->n_cand + t] == j / a->cand_block)
            return true;
    return false;
}

/* Score in double. QI of the query from its definition; *size: the sum of magnitudes, for the bound. */
static double true_score(const index_scene *is, int32_t row, int32_t j, double *size) {
    const di_index_select_args *a = &is->a;
    uint8_t *data, *scale;
    entry_at(&is->sc, &a->keys, is->sc.seq[row], j, &data, &scale);
    double score = 0;
    *size = 0;
    for (int32_t h = 0; h < a->n_heads; h++) {
        const float *q = is->q + ((int64_t)row * a->n_heads + h) * a->dim;
        double dot = 0, dot_size = 0;
        for (int32_t g = 0; g < a->dim; g += 32) {
            double most = 6 * 0x1p-126, step = 1;
            for (int32_t i = g; i < g + 32; i++)
                most = fmax(most, fabs(q[i]));
            int e;
            step = frexp((double)((float)most / 6.0f), &e) == 0.5 ? ldexp(1, e - 1) : ldexp(1, e);
            for (int32_t i = g; i < g + 32; i++) {
                double v = q[i];
                if (a->keys.format != DI_KV_F32) { /* nearest on the grid, ties to the even code */
                    double m = fabs(v) / step;
                    m = m < 2 ? rint(2 * m) / 2 : m < 4 ? rint(m) : fmin(2 * rint(m / 2), 6);
                    v = copysign(m * step, v);
                }
                double k = ops_rig_value(a->keys.format, data, scale, i);
                dot += v * k;
                dot_size += fabs(v * k);
            }
        }
        double w = is->w[row * a->n_heads + h];
        score += w * fmax(dot, 0);
        *size += fabs(w) * dot_size;
    }
    return score;
}

static const float *sort_by;
static int by_score(const void *x, const void *y) {
    int32_t i = *(const int32_t *)x, j = *(const int32_t *)y;
    if (sort_by[i] != sort_by[j])
        return sort_by[i] > sort_by[j] ? -1 : 1;
    return i < j ? -1 : 1;
}
static int by_index(const void *x, const void *y) {
    return *(const int32_t *)x - *(const int32_t *)y;
}

/* The k best of s by sorting, as index_select must give them. */
static void check_best(const float *s, int32_t n, int32_t k, const int32_t *got) {
    int32_t *order = ops_rig_alloc((size_t)n * sizeof *order), m = 0;
    for (int32_t i = 0; i < n; i++)
        if (s[i] > -INFINITY)
            order[m++] = i;
    sort_by = s;
    qsort(order, (size_t)m, sizeof *order, by_score);
    if (m > k)
        m = k;
    qsort(order, (size_t)m, sizeof *order, by_index);
    for (int32_t t = 0; t < k; t++)
        assert_int_equal(got[t], t < m ? order[t] : -1);
    free(order);
}

static void check_row(const index_scene *is, int32_t row) {
    const di_index_select_args *a = &is->a;
    const float *scores = a->scores + row * a->scores_stride;
    int32_t n = (is->sc.pos[row] + 1) / a->ratio;
    for (int32_t j = 0; j < a->scores_stride; j++) {
        if (j >= n || !takes_part(a, row, j)) {
            assert_true(scores[j] == -INFINITY);
            continue;
        }
        double size, want = true_score(is, row, j, &size);
        if (isnan(want)) {
            assert_true(isnan(scores[j]));
            continue;
        }
        double allowed = EPS * size * (a->dim / 32 + 20 + a->n_heads) + (a->round_bf16 ? 0x1p-8 * fabs(want) : 0);
        if (!(fabs(scores[j] - want) <= allowed))
            fail_msg("row %d entry %d: score %.9g, expected %.9g within %.2g", row, j, scores[j], want, allowed);
        if (a->round_bf16)
            assert_true(scores[j] == di_round_bf16(scores[j]));
    }
    check_best(scores, n, a->topk, a->idx + row * a->topk);
    if (a->cand_out) {
        float blocks[640];
        int32_t n_blocks = (n + a->cand_block - 1) / a->cand_block;
        for (int32_t b = 0; b < n_blocks; b++) {
            blocks[b] = -INFINITY;
            for (int32_t j = b * a->cand_block; j < n && j < (b + 1) * a->cand_block; j++)
                blocks[b] = fmaxf(blocks[b], scores[j]);
        }
        if (n_blocks)
            blocks[n_blocks - 1] = INFINITY;
        check_best(blocks, n_blocks, a->n_cand, a->cand_out + row * a->n_cand);
    }
}

DI_PROPERTY(index_select_agrees_with_double_sorting_and_all_levels, 150) {
    index_scene is;
    index_init(&is, &seed);
    size_t idx_bytes = (size_t)(is.sc.n_rows * is.a.topk) * sizeof(int32_t);
    size_t cand_bytes = (size_t)(is.sc.n_rows * is.a.n_cand) * sizeof(int32_t);
    size_t score_bytes = (size_t)(is.sc.n_rows * is.a.scores_stride) * sizeof(float);
    uint8_t *first = ops_rig_alloc(idx_bytes + cand_bytes + score_bytes);
    for (int v = 0; v < ops_rig_variants(); v++) {
        ops_rig r;
        ops_rig_open_variant(&r, v, &is.limits);
        memset(is.a.idx, 0xEE, idx_bytes);
        memset(is.a.scores, 0xEE, score_bytes);
        if (is.a.cand_out)
            memset(is.a.cand_out, 0xEE, cand_bytes);
        assert_int_equal(di_cpu_ops.index_select(r.stream, &is.a), DI_OK);
        ops_rig_close(&r);
        if (v == 0) {
            memcpy(first, is.a.idx, idx_bytes);
            memcpy(first + idx_bytes, is.cand, cand_bytes);
            memcpy(first + idx_bytes + cand_bytes, is.a.scores, score_bytes);
        }
        assert_memory_equal(is.a.idx, first, idx_bytes);
        assert_memory_equal(is.cand, first + idx_bytes, cand_bytes);
        for (size_t i = 0; i < score_bytes / 4; i++) { /* a NaN's bits are the processor's choice */
            float x = is.a.scores[i], y;
            memcpy(&y, first + idx_bytes + cand_bytes + 4 * i, 4);
            assert_true(isnan(x) ? isnan(y) : di_f32_bits(x) == di_f32_bits(y));
        }
    }
    for (int32_t row = 0; row < is.sc.n_rows; row++)
        check_row(&is, row);
    free(first);
    index_free(&is);
}

DI_PROPERTY(index_select_is_the_same_one_row_at_a_time, 60) {
    index_scene is;
    index_init(&is, &seed);
    is.a.scores = (free(is.a.scores), NULL);
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &is.limits);
    assert_int_equal(di_cpu_ops.index_select(r.stream, &is.a), DI_OK);
    int32_t *idx = ops_rig_alloc((size_t)is.a.topk * sizeof *idx),
            *cand = ops_rig_alloc((size_t)is.a.n_cand * sizeof *cand);
    size_t size = is.a.q.dtype == DI_BF16 ? 2 : 4;
    for (int32_t row = 0; row < is.sc.n_rows; row++) {
        one_row o;
        one_row_init(&o, &is.sc, row);
        di_index_select_args a = is.a;
        a.rows = &o.rows;
        a.q.n_rows = a.w.n_rows = 1;
        a.q.data = (uint8_t *)a.q.data + (size_t)(row * a.q.n_cols) * size;
        a.w.data = (uint8_t *)a.w.data + (size_t)(row * a.w.n_cols) * size;
        a.idx = idx;
        if (a.cand_in)
            a.cand_in += row * a.n_cand;
        if (a.cand_out)
            a.cand_out = cand;
        assert_int_equal(di_cpu_ops.index_select(r.stream, &a), DI_OK);
        assert_memory_equal(idx, is.a.idx + row * a.topk, (size_t)a.topk * sizeof *idx);
        if (a.cand_out)
            assert_memory_equal(cand, is.cand + row * a.n_cand, (size_t)a.n_cand * sizeof *cand);
    }
    free(idx);
    free(cand);
    ops_rig_close(&r);
    index_free(&is);
}

DI_TEST_GROUP(ops_cache, cmocka_unit_test(attention_agrees_with_double_and_all_levels_and_threads),
              cmocka_unit_test(attention_is_the_same_one_row_at_a_time),
              cmocka_unit_test(index_select_agrees_with_double_sorting_and_all_levels),
              cmocka_unit_test(index_select_is_the_same_one_row_at_a_time));
