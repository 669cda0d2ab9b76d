/* Core attention on the NVIDIA backend: the portable kernel has the reference's bits on any shape; the fast one stays
 * within its bound of a sum in double, and a row's bits don't depend on the rows beside it.
 *
 * Memory that no key of the case uses holds NaN codes, so that a read beside a record shows. */
#include "twin.h"

typedef struct acase {
    ops_mem mem;
    di_rows rows;
    di_attention_args a;
    size_t record_bytes, entry_bytes, ring_bytes, page_bytes;
    int32_t n_slots, n_pages;
} acase;

typedef struct shape {
    int32_t heads, d, n_freq, window, topk, per_block, ratio, n_seqs, rows_max, pos_max;
    di_kv_format win, main; /* topk 0: no list */
    di_dtype dtype;
    int64_t pad;    /* columns between rows */
    bool has_gaps;  /* -1 between entries, entries in any order */
    bool is_draft;  /* every row sees all rows of its sequence and no further back than the first one */
    bool is_empty;  /* rows without any key among the others */
    int32_t n_rows; /* of each sequence; 0: random */
} shape;

static uint8_t *poisoned(acase *c, size_t n_bytes) {
    uint8_t *p = ops_mem_take(&c->mem, n_bytes);
    memset(p, 0xFF, n_bytes);
    return p;
}

static void fill_record(uint64_t *rng, di_kv_format f, uint8_t *record, int64_t d) {
    ops_rig_random_record(rng, f, record, record + ops_rig_data_bytes(f, d), d);
}

/* Codes and scales of entry j of a sequence: the second holds for MX4 too. */
static void entry_at(const acase *c, int32_t seq, int32_t j, uint8_t **data, uint8_t **scale) {
    const di_paged *p = &c->a.main;
    int64_t at = j % p->per_block, n_data = ops_rig_data_bytes(p->format, p->n_values),
            n_scale = ops_rig_scale_bytes(p->format, p->n_values);
    uint8_t *section =
        p->pages + (size_t)c->rows.blocks[seq * c->rows.blocks_stride + j / p->per_block] * p->page_bytes + p->offset;
    *data = section + at * (p->format == DI_KV_MX4 ? n_data : n_data + n_scale);
    *scale = p->format == DI_KV_MX4 ? section + p->per_block * n_data + at * n_scale : *data + n_data;
}

static uint8_t *window_at(const acase *c, int32_t seq, int32_t pos) {
    const di_ring *ring = &c->a.ring;
    if (pos >= c->rows.pos0[seq])
        return (uint8_t *)c->a.records + (size_t)(c->rows.row0[seq] + pos - c->rows.pos0[seq]) * c->record_bytes;
    return ring->slots + (size_t)c->rows.slot[seq] * ring->slot_bytes + ring->offset +
           (size_t)(pos % ring->ring_len) * ring->record_bytes;
}

static int32_t *ints(acase *c, int64_t n) {
    return ops_mem_take(&c->mem, (size_t)n * sizeof(int32_t));
}
static float *floats(acase *c, int64_t n) {
    return ops_mem_take(&c->mem, (size_t)n * sizeof(float));
}

/* A list of a row: up to topk of the n visible entries, no entry twice. */
static void make_list(acase *c, uint64_t *rng, const shape *s, int32_t seq, int32_t n, int32_t *list) {
    bool *taken = ops_rig_alloc((size_t)n + 1);
    int32_t want = n < s->topk ? n : s->topk, at = 0;
    if (s->has_gaps)
        want = (int32_t)di_test_random_range(rng, 0, want);
    for (int32_t i = 0; i < want;) {
        int32_t j = (int32_t)di_test_random_range(rng, 0, n - 1);
        while (taken[j])
            j = (j + 1) % n;
        taken[j] = true;
        i++;
        if (s->has_gaps)
            list[at++] = j;
    }
    for (int32_t j = 0; j < n && !s->has_gaps; j++) {
        if (taken[j])
            list[at++] = j;
    }
    for (int32_t i = at; i < s->topk; i++)
        list[i] = -1;
    for (int32_t i = s->topk - 1; s->has_gaps && i > 0; i--) { /* shuffle, gaps too */
        int32_t k = (int32_t)di_test_random_range(rng, 0, i), t = list[i];
        list[i] = list[k];
        list[k] = t;
    }
    for (int32_t i = 0; i < s->topk; i++) {
        uint8_t *data, *scale;
        if (list[i] < 0)
            continue;
        entry_at(c, seq, list[i], &data, &scale);
        bool is_new = true; /* entries of an earlier row stay as they are */
        for (int64_t b = 0; b < ops_rig_data_bytes(s->main, s->d); b++)
            is_new = is_new && data[b] == 0xFF;
        if (is_new)
            ops_rig_random_record(rng, s->main, data, scale, s->d);
    }
    free(taken);
}

static void acase_init(acase *c, uint64_t *rng, const shape *s) {
    memset(c, 0, sizeof *c);
    int32_t *row0 = ints(c, s->n_seqs), *n = ints(c, s->n_seqs), *pos0 = ints(c, s->n_seqs), *slot = ints(c, s->n_seqs);
    int32_t n_rows = 0;
    for (int32_t i = 0; i < s->n_seqs; i++) {
        row0[i] = n_rows;
        n[i] = s->n_rows ? s->n_rows : (int32_t)di_test_random_range(rng, 1, s->rows_max);
        pos0[i] = (int32_t)di_test_random_range(rng, 0, s->pos_max - n[i]);
        slot[i] = s->n_seqs - i; /* slot 0 is nobody's */
        n_rows += n[i];
    }
    int32_t stride = s->pos_max / s->ratio / s->per_block + 2;
    c->n_slots = s->n_seqs + 1;
    c->n_pages = s->n_seqs * stride + 3;
    int32_t *pos = ints(c, n_rows), *seq = ints(c, n_rows), *lo = ints(c, n_rows), *hi = ints(c, n_rows);
    int32_t *blocks = ints(c, s->n_seqs * stride), *idx = s->topk ? ints(c, (int64_t)n_rows * s->topk) : NULL;
    for (int32_t i = 0; i < s->n_seqs * stride; i++)
        blocks[i] = (i * 7 + 3) % c->n_pages;
    for (int32_t i = 0; i < s->n_seqs * stride; i++) { /* no block twice */
        for (int32_t k = 0; k < i; k++) {
            if (blocks[k] == blocks[i]) {
                blocks[i] = (blocks[i] + 1) % c->n_pages;
                k = -1;
            }
        }
    }
    c->rows = (di_rows){n_rows, s->n_seqs, pos, seq, lo, hi, row0, n, pos0, slot, blocks, stride};
    c->record_bytes = (size_t)ops_rig_record_bytes(s->win, s->d);
    c->entry_bytes = (size_t)ops_rig_record_bytes(s->topk ? s->main : DI_KV_FP8, s->d);
    int32_t ring_len = s->window + 6;
    size_t align = 16, ring_record = c->record_bytes + (di_test_random(rng) % 2 ? 16 : 0);
    size_t slot_bytes = DI_ROUND_UP(32 + ring_record * (size_t)ring_len, align);
    c->ring_bytes = slot_bytes * (size_t)c->n_slots;
    c->page_bytes = DI_ROUND_UP(48 + c->entry_bytes * (size_t)s->per_block, align);
    int64_t n_cols = (int64_t)s->heads * s->d, col_stride = n_cols + s->pad;
    float *q = floats(c, n_rows * col_stride), *sink = floats(c, s->heads);
    uint16_t *q_bf16 = ops_mem_take(&c->mem, (size_t)(n_rows * col_stride) * 2);
    ops_rig_random_bf16(rng, 1, q, n_rows * col_stride);
    for (int32_t i = 0; i < s->heads; i++)
        sink[i] = (float)(6 * di_test_random_unit(rng) - 3);
    float *cs = floats(c, (int64_t)n_rows * s->n_freq), *sn = floats(c, (int64_t)n_rows * s->n_freq);
    for (int64_t i = 0; i < (int64_t)n_rows * s->n_freq; i++) {
        double angle = 7 * di_test_random_unit(rng);
        cs[i] = (float)cos(angle);
        sn[i] = (float)sin(angle);
    }
    c->a = (di_attention_args){
        .rows = &c->rows,
        .q = ops_rig_act(s->dtype, q, q_bf16, n_rows, col_stride),
        .n_heads = s->heads,
        .head_dim = s->d,
        .win_format = s->win,
        .records = poisoned(c, c->record_bytes * (size_t)n_rows),
        .ring = {poisoned(c, c->ring_bytes), slot_bytes, 32, ring_record, ring_len},
        .idx = idx,
        .topk = s->topk,
        .main = {poisoned(c, c->page_bytes * (size_t)c->n_pages), c->page_bytes, 48, s->per_block, s->main, s->d},
        .sink = sink,
        .scale = (float)(4 / sqrt((double)s->d)),
        .cos = cs,
        .sin = sn,
        .n_freq = s->n_freq,
        .out = {s->dtype, n_rows, n_cols, col_stride, NULL, NULL}};
    c->a.q.n_cols = n_cols;
    c->a.out.data = ops_mem_take(&c->mem, (size_t)(n_rows * col_stride) * sizeof(float));
    for (int32_t q_seq = 0, i = 0; q_seq < s->n_seqs; q_seq++) {
        for (int32_t k = 0; k < n[q_seq]; k++)
            fill_record(rng, s->win, (uint8_t *)c->a.records + c->record_bytes * (size_t)(row0[q_seq] + k), s->d);
        for (int32_t p = DI_MAX(pos0[q_seq] - s->window, 0); p < pos0[q_seq]; p++)
            fill_record(rng, s->win, window_at(c, q_seq, p), s->d);
        for (int32_t k = 0; k < n[q_seq]; k++, i++) {
            pos[i] = pos0[q_seq] + k;
            seq[i] = q_seq;
            hi[i] = s->is_draft ? pos0[q_seq] + n[q_seq] : pos[i] + 1;
            lo[i] = DI_MAX((s->is_draft ? pos0[q_seq] : hi[i]) - s->window, 0);
            int32_t visible = (pos[i] + 1) / s->ratio;
            if (s->is_empty && i % 3 == 1) {
                hi[i] = lo[i] - i % 2;
                visible = 0;
            }
            if (idx)
                make_list(c, rng, s, q_seq, visible, idx + (int64_t)i * s->topk);
        }
    }
}

static di_limits limits_of(const shape *s) {
    return (di_limits){.rows_max = 1024,
                       .n_in_max = 512,
                       .n_out_max = 512,
                       .entries_max = s->pos_max,
                       .keys_max = s->window + s->topk + (s->is_draft ? s->rows_max : 0),
                       .head_dim = s->d,
                       .n_heads = s->heads,
                       .index_dim = 32};
}

/* The case in device memory, its output poisoned. */
static di_attention_args mirror(twin *t, const acase *c, di_rows *rows) {
    di_attention_args d = c->a;
    *rows = twin_rows_in(t, &c->rows);
    d.rows = rows;
    d.q = twin_act_in(t, &c->a.q);
    d.records = twin_in(t, c->a.records, c->record_bytes * (size_t)c->rows.n_rows);
    d.ring.slots = twin_in(t, c->a.ring.slots, c->ring_bytes);
    d.idx = twin_in(t, c->a.idx, (size_t)c->rows.n_rows * (size_t)c->a.topk * 4);
    d.main.pages = twin_in(t, c->a.main.pages, c->page_bytes * (size_t)c->n_pages);
    d.sink = twin_in(t, c->a.sink, (size_t)c->a.n_heads * 4);
    size_t angles = (size_t)c->rows.n_rows * (size_t)c->a.n_freq * 4;
    d.cos = angles ? twin_in(t, c->a.cos, angles) : NULL;
    d.sin = angles ? twin_in(t, c->a.sin, angles) : NULL;
    d.out = twin_act_out(t, &c->a.out);
    return d;
}

/* ---- the portable kernel ----------------------------------------------------------------------------------------- */

static void same_bits(uint64_t seed, const shape *s) {
    twin t;
    acase c;
    uint64_t rng = seed;
    acase_init(&c, &rng, s);
    di_limits limits = limits_of(s);
    twin_open(&t, &limits, "portable");
    di_rows rows;
    di_attention_args d = mirror(&t, &c, &rows);
    assert_int_equal(di_cpu_ops.attention(t.cpu_stream, &c.a), DI_OK);
    assert_int_equal(t.gpu.ops->attention(t.stream, &d), DI_OK);
    twin_act_same(&t, &d.out, &c.a.out, "attention");
    twin_close(&t);
    ops_mem_free(&c.mem);
}

DI_PROPERTY(attention_portable_same_bits, 16) {
    uint64_t rng = seed;
    static const di_kv_format formats[] = {DI_KV_F32, DI_KV_FP8, DI_KV_FP4, DI_KV_MX4};
    shape s = {.heads = (int32_t)di_test_random_range(&rng, 1, 11),
               .d = 32 * (int32_t)di_test_random_range(&rng, 1, 5),
               .window = (int32_t)di_test_random_range(&rng, 1, 40),
               .topk = (int32_t)di_test_random_range(&rng, 0, 2) * (int32_t)di_test_random_range(&rng, 1, 50),
               .per_block = (int32_t)di_test_random_range(&rng, 1, 20),
               .ratio = (int32_t)di_test_random_range(&rng, 1, 2),
               .n_seqs = (int32_t)di_test_random_range(&rng, 1, 5),
               .rows_max = (int32_t)di_test_random_range(&rng, 1, 30),
               .pos_max = 120,
               .win = formats[di_test_random_range(&rng, 0, 1)],
               .main = formats[di_test_random_range(&rng, 0, 3)],
               .dtype = di_test_random(&rng) % 2 ? DI_F32 : DI_BF16,
               .pad = 3 * di_test_random_range(&rng, 0, 1),
               .has_gaps = di_test_random(&rng) % 2,
               .is_draft = di_test_random(&rng) % 4 == 0,
               .is_empty = di_test_random(&rng) % 3 == 0};
    s.n_freq = (int32_t)di_test_random_range(&rng, 0, s.d / 2);
    same_bits(di_test_random(&rng), &s);
}

static const shape released = {.heads = 64,
                               .d = 512,
                               .n_freq = 32,
                               .window = 128,
                               .topk = 512,
                               .per_block = 64,
                               .ratio = 2,
                               .n_seqs = 2,
                               .n_rows = 2,
                               .rows_max = 2,
                               .pos_max = 1500,
                               .win = DI_KV_FP8,
                               .main = DI_KV_FP4,
                               .dtype = DI_BF16};

static void attention_portable_released(void **state) {
    (void)state;
    same_bits(41, &released);
    shape exact = released;
    exact.win = exact.main = DI_KV_F32;
    exact.dtype = DI_F32;
    exact.n_rows = 1;
    same_bits(42, &exact);
}

/* ---- the fast kernel --------------------------------------------------------------------------------------------- */

/* out and bound [heads, d] of a row in double; bound: sum of p*|v| over sum of p, rotated with absolute values. */
static void attend(const acase *c, int64_t row, double *out, double *bound) {
    const di_attention_args *a = &c->a;
    int32_t seq = c->rows.seq[row], n_window = DI_MAX(c->rows.win_hi[row] - c->rows.win_lo[row], 0), n = 0;
    int64_t d = a->head_dim;
    double *keys = ops_rig_alloc((size_t)((n_window + a->topk + 1) * d) * sizeof *keys);
    double *p = ops_rig_alloc((size_t)(n_window + a->topk + 1) * sizeof *p);
    for (int32_t i = 0; i < n_window; i++, n++) {
        uint8_t *record = window_at(c, seq, c->rows.win_lo[row] + i);
        for (int64_t v = 0; v < d; v++)
            keys[n * d + v] = ops_rig_value(a->win_format, record, record + ops_rig_data_bytes(a->win_format, d), v);
    }
    for (int32_t t = 0; a->idx && t < a->topk; t++) {
        uint8_t *data, *scale;
        if (a->idx[row * a->topk + t] < 0)
            continue;
        entry_at(c, seq, a->idx[row * a->topk + t], &data, &scale);
        for (int64_t v = 0; v < d; v++)
            keys[n * d + v] = ops_rig_value(a->main.format, data, scale, v);
        n++;
    }
    for (int64_t h = 0; h < a->n_heads; h++) {
        double most = a->sink[h], sum = 0, *o = out + h * d, *b = bound + h * d;
        for (int32_t k = 0; k < n; k++) {
            p[k] = 0;
            for (int64_t v = 0; v < d; v++)
                p[k] += ops_act_value(&a->q, row, h * d + v) * keys[k * d + v];
            p[k] *= a->scale;
            most = DI_MAX(most, p[k]);
        }
        for (int64_t v = 0; v < d; v++)
            o[v] = b[v] = 0;
        for (int32_t k = 0; k < n; k++) {
            p[k] = exp(p[k] - most);
            sum += p[k];
            for (int64_t v = 0; v < d; v++) {
                o[v] += p[k] * keys[k * d + v];
                b[v] += p[k] * fabs(keys[k * d + v]);
            }
        }
        sum += exp(a->sink[h] - most);
        for (int64_t v = 0; v < d; v++) {
            o[v] /= sum;
            b[v] /= sum;
        }
        for (int32_t f = 0; f < a->n_freq; f++) {
            double cs = a->cos[row * a->n_freq + f], sn = a->sin[row * a->n_freq + f];
            int64_t v = d - 2 * a->n_freq + 2 * f;
            double x = o[v], y = o[v + 1], bx = b[v], by = b[v + 1];
            o[v] = x * cs + y * sn;
            o[v + 1] = y * cs - x * sn;
            b[v] = bx * fabs(cs) + by * fabs(sn);
            b[v + 1] = by * fabs(cs) + bx * fabs(sn);
        }
    }
    free(keys);
    free(p);
}

/* P is rounded to bf16: 2^-9 of every term. Scores and exponentials in fp32, in another order: together less than the
 * same again for scores below 2^10. Then the output's own rounding. */
static void close_enough(const acase *c, const double *got, int64_t row) {
    int64_t n = (int64_t)c->a.n_heads * c->a.head_dim;
    double *want = ops_rig_alloc((size_t)n * sizeof *want), *bound = ops_rig_alloc((size_t)n * sizeof *bound);
    attend(c, row, want, bound);
    for (int64_t i = 0; i < n; i++) {
        double e = fabs(got[row * n + i] - want[i]), most = 0x1p-8 * bound[i] + 0x1p-8 * fabs(want[i]) + 1e-30;
        if (!(e <= most))
            fail_msg("row %lld, head %lld, value %lld: %g, expected %g within %g", (long long)row,
                     (long long)(i / c->a.head_dim), (long long)(i % c->a.head_dim), got[row * n + i], want[i], most);
    }
    free(want);
    free(bound);
}

/* attention_quant has the codes of attention's result, which is `out` on the device. */
static void codes_follow(twin *t, acase *c, const di_attention_args *d) {
    di_act out = d->out, codes = ops_act_empty(&c->mem, DI_F8_E4M3, out.n_rows, out.n_cols);
    out.data = ops_mem_take(&c->mem, twin_act_bytes(&out));
    twin_back(t, out.data, d->out.data, twin_act_bytes(&out));
    assert_int_equal(di_cpu_ops.quant(t->cpu_stream, &(di_quant_args){.x = out, .out = codes}), DI_OK);
    di_attention_quant_args args = {.attention = *d, .codes = twin_act_out(t, &codes)};
    args.attention.out = twin_act_out(t, &c->a.out);
    assert_int_equal(t->gpu.ops->attention_quant(t->stream, &args), DI_OK);
    twin_act_same(t, &args.codes, &codes, "codes of attention");
}

/* Checks every row_step-th row against double, the codes that go with it, and that fewer rows, and repetition, give the
 * same bits: up to 16 rows are another kernel's. */
static void fast(const shape *s, uint64_t seed, int64_t row_step) {
    twin t;
    acase c;
    uint64_t rng = seed;
    acase_init(&c, &rng, s);
    di_limits limits = limits_of(s);
    twin_open(&t, &limits, "sm90");
    di_rows rows;
    di_attention_args d = mirror(&t, &c, &rows);
    assert_int_equal(t.gpu.ops->attention(t.stream, &d), DI_OK);
    double *got = twin_act_values(&t, &d.out);
    for (int64_t row = 0; row < c.rows.n_rows; row += row_step)
        close_enough(&c, got, row);
    codes_follow(&t, &c, &d);
    size_t n_bytes = twin_act_bytes(&d.out), row_bytes = (size_t)d.out.n_cols * 2;
    uint8_t *first = ops_rig_alloc(n_bytes), *again = ops_rig_alloc(n_bytes);
    twin_back(&t, first, d.out.data, n_bytes);
    int32_t fewer[] = {1, c.rows.n_rows / 2, c.rows.n_rows};
    for (int i = 0; i < 3; i++) {
        rows.n_rows = fewer[i];
        d.out = twin_act_out(&t, &c.a.out);
        assert_int_equal(t.gpu.ops->attention(t.stream, &d), DI_OK);
        twin_back(&t, again, d.out.data, n_bytes);
        for (int64_t row = 0; row < rows.n_rows; row++)
            twin_same(again + row * d.out.stride * 2, first + row * d.out.stride * 2, row_bytes, "fewer rows");
    }
    free(got);
    free(first);
    free(again);
    twin_close(&t);
    ops_mem_free(&c.mem);
}

static void attention_fast_decode(void **state) {
    (void)state;
    shape s = released;
    s.n_seqs = 5;
    s.n_rows = 1;
    fast(&s, 51, 1);
}

static void attention_fast_verify(void **state) {
    (void)state;
    shape s = released;
    s.n_seqs = 3;
    s.n_rows = 6;
    s.per_block = 128;
    s.ratio = 1;
    s.pad = 64;
    fast(&s, 52, 5);
}

static void attention_fast_fp8_pages(void **state) {
    (void)state;
    shape s = released;
    s.main = DI_KV_FP8;
    s.has_gaps = true;
    s.n_rows = s.rows_max = 10;
    fast(&s, 53, 4);
}

static void attention_fast_draft_block(void **state) {
    (void)state;
    shape s = released;
    s.topk = 0;
    s.n_seqs = 4;
    s.n_rows = s.rows_max = 5;
    s.is_draft = true;
    fast(&s, 54, 4);
}

/* More rows than multiprocessors, few keys each: blocks go from row to row, through empty ones too. */
static void attention_fast_many_rows(void **state) {
    (void)state;
    shape s = released;
    s.window = 20;
    s.topk = 70;
    s.n_seqs = 1;
    s.n_rows = s.rows_max = 290;
    s.pos_max = 400;
    s.is_empty = true;
    s.has_gaps = true;
    fast(&s, 55, 13);
    s.topk = 0;
    s.n_seqs = 3;
    s.n_rows = s.rows_max = 100;
    fast(&s, 56, 17);
}

static void attention_fast_prefill(void **state) {
    (void)state;
    shape s = released;
    s.n_seqs = 1;
    s.n_rows = s.rows_max = 160;
    s.pos_max = 161;
    s.topk = 130;
    fast(&s, 57, 23);
}

/* Every scale that the quantisers can write, the smallest E4M3 scales too; scores far outside exp's range. */
static void extremes(int32_t n_rows, int64_t row_step) {
    shape s = released;
    acase c;
    twin t;
    uint64_t rng = 58;
    s.n_seqs = 1;
    s.n_rows = s.rows_max = n_rows;
    acase_init(&c, &rng, &s);
    for (size_t i = 0; i < c.record_bytes * (size_t)n_rows; i++) {
        if (i % 528 >= 512)
            ((uint8_t *)c.a.records)[i] = (uint8_t)di_test_random_range(&rng, 105, 127);
    }
    for (int32_t page = 0; page < c.n_pages; page++) {
        for (int32_t e = 0; e < s.per_block; e++) {
            uint8_t *scale = c.a.main.pages + (size_t)page * c.page_bytes + 48 + (size_t)e * 288 + 256;
            for (int k = 0; k < 32 && scale[0] != 0xFF; k++) {
                scale[k] = (uint8_t)(e % 3 == 0   ? di_test_random_range(&rng, 0, 8)
                                     : e % 3 == 1 ? di_test_random_range(&rng, 8, 0x38)
                                                  : di_test_random_range(&rng, 0x38, 0x7E));
            }
        }
    }
    ((float *)c.a.sink)[3] = -INFINITY;
    ((float *)c.a.sink)[4] = 1000;
    di_limits limits = limits_of(&s);
    twin_open(&t, &limits, "sm90");
    di_rows rows;
    di_attention_args d = mirror(&t, &c, &rows);
    assert_int_equal(t.gpu.ops->attention(t.stream, &d), DI_OK);
    double *got = twin_act_values(&t, &d.out);
    for (int64_t row = 0; row < n_rows; row += row_step)
        close_enough(&c, got, row);
    free(got);
    twin_close(&t);
    ops_mem_free(&c.mem);
}

static void attention_fast_extremes(void **state) {
    (void)state;
    extremes(3, 1);
    extremes(20, 6);
}

static void attention_refuses(void **state) {
    (void)state;
    twin t;
    acase c;
    uint64_t rng = 59;
    shape s = released;
    s.d = 64;
    s.heads = 4;
    s.n_freq = 8;
    acase_init(&c, &rng, &s);
    di_limits limits = limits_of(&s);
    twin_open(&t, &limits, "auto");
    di_rows rows;
    di_attention_args d = mirror(&t, &c, &rows), bad;
#define REFUSES(change)                                                                                                \
    bad = d;                                                                                                           \
    change;                                                                                                            \
    assert_int_equal(t.gpu.ops->attention(t.stream, &bad), DI_ERR_SHAPE)
    REFUSES(bad.n_heads = 5);
    REFUSES(bad.n_freq = 33);
    REFUSES(bad.main.n_values = 32);
    REFUSES(bad.sink = NULL);
    REFUSES(bad.records = NULL);
    REFUSES(bad.topk = (int32_t)limits.keys_max + 1);
    REFUSES(bad.ring.record_bytes = 65);
    REFUSES(bad.out.dtype = DI_F8_E4M3);
    rows.n_rows = 0;
    assert_int_equal(t.gpu.ops->attention(t.stream, &d), DI_OK);
    twin_close(&t);
    ops_mem_free(&c.mem);
}

DI_TEST_GROUP(attention_cuda, cmocka_unit_test(attention_portable_same_bits),
              cmocka_unit_test(attention_portable_released), cmocka_unit_test(attention_fast_decode),
              cmocka_unit_test(attention_fast_verify), cmocka_unit_test(attention_fast_fp8_pages),
              cmocka_unit_test(attention_fast_draft_block), cmocka_unit_test(attention_fast_many_rows),
              cmocka_unit_test(attention_fast_prefill), cmocka_unit_test(attention_fast_extremes),
              cmocka_unit_test(attention_refuses));
