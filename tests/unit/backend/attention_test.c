/* Core attention on cases small enough to write down: the sink, empty key sets, lists with gaps, the inverse rotation,
 * the drafting round; and the fast version against the definition at the released shape. */
#include "ops_rig.h"

enum { D = 32, HEADS_MAX = 4, KEYS = 6 };

/* One sequence with exact keys: window positions 0..KEYS, the ring empty, and KEYS entries in one block. */
typedef struct tiny {
    ops_rig r;
    di_rows rows;
    int32_t pos, lo, hi, zero, n, block, idx[8];
    float q[HEADS_MAX * D], out[HEADS_MAX * D], records[KEYS * D], entries[KEYS * D], sink[HEADS_MAX], cs[D / 2],
        sn[D / 2];
    uint8_t ring[D * 4];
    di_attention_args a;
} tiny;

static void tiny_init(tiny *t, di_cpu_level level, int32_t n_heads) {
    memset(t, 0, sizeof *t);
    const di_limits limits = {.rows_max = 8,
                              .n_in_max = 128,
                              .head_dim = 64,
                              .n_heads = HEADS_MAX,
                              .keys_max = 12,
                              .entries_max = 16,
                              .index_dim = 32};
    ops_rig_open(&t->r, level, 2, &limits);
    uint64_t rng = 9;
    for (int i = 0; i < KEYS * D; i++)
        t->records[i] = (float)(2 * di_test_random_unit(&rng) - 1);
    for (int i = 0; i < KEYS * D; i++)
        t->entries[i] = (float)(2 * di_test_random_unit(&rng) - 1);
    for (int i = 0; i < HEADS_MAX * D; i++)
        t->q[i] = (float)(2 * di_test_random_unit(&rng) - 1);
    for (int i = 0; i < 8; i++)
        t->idx[i] = -1;
    for (int i = 0; i < D / 2; i++)
        t->cs[i] = 1;
    t->n = KEYS;
    t->rows = (di_rows){.n_rows = 1,
                        .n_seqs = 1,
                        .pos = &t->pos,
                        .seq = &t->zero,
                        .win_lo = &t->lo,
                        .win_hi = &t->hi,
                        .row0 = &t->zero,
                        .n = &t->n,
                        .pos0 = &t->zero,
                        .slot = &t->zero,
                        .blocks = &t->block,
                        .blocks_stride = 1};
    int64_t n_cols = n_heads * D;
    t->a = (di_attention_args){.rows = &t->rows,
                               .q = {DI_F32, 1, n_cols, n_cols, t->q, NULL},
                               .n_heads = n_heads,
                               .head_dim = D,
                               .win_format = DI_KV_F32,
                               .records = (uint8_t *)t->records,
                               .ring = {t->ring, sizeof t->ring, 0, D * 4, 1},
                               .idx = t->idx,
                               .topk = 8,
                               .main = {(uint8_t *)t->entries, sizeof t->entries, 0, KEYS, DI_KV_F32, D},
                               .sink = t->sink,
                               .scale = 0.25f,
                               .cos = t->cs,
                               .sin = t->sn,
                               .n_freq = D / 2,
                               .out = {DI_F32, 1, n_cols, n_cols, t->out, NULL}};
}

static void tiny_run(tiny *t) {
    memset(t->out, 0xFF, sizeof t->out);
    assert_int_equal(di_cpu_ops.attention(t->r.stream, &t->a), DI_OK);
}

static double dot(const float *a, const float *b) {
    double s = 0;
    for (int i = 0; i < D; i++)
        s += (double)a[i] * b[i];
    return s;
}

#define FOR_EACH_LEVEL(level) for (di_cpu_level level = DI_CPU_REF; level <= di_cpu_level_best(); level++)

static void one_key_shares_the_mass_with_the_sink(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 2);
        t.lo = 2;
        t.hi = 3;
        t.sink[1] = 1.5f;
        tiny_run(&t);
        for (int h = 0; h < 2; h++) {
            double s = dot(t.q + h * D, t.records + 2 * D) * 0.25, p = exp(s) / (exp(s) + exp(t.sink[h]));
            for (int i = 0; i < D; i++)
                assert_true(fabs(t.out[h * D + i] - p * t.records[2 * D + i]) < 1e-6);
        }
        ops_rig_close(&t.r);
    }
}

static void the_sink_counts_once_and_is_not_scaled(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 1);
        memset(t.q, 0, sizeof t.q); /* all scores 0 */
        t.hi = 3;
        t.idx[0] = 1;
        t.sink[0] = logf(4);
        tiny_run(&t);
        for (int i = 0; i < D; i++) {
            double want = ((double)t.records[i] + t.records[D + i] + t.records[2 * D + i] + t.entries[D + i]) / 8;
            assert_true(fabs(t.out[i] - want) < 1e-6);
        }
        ops_rig_close(&t.r);
    }
}

static void no_key_gives_zeros(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 3);
        static const float zeros[3 * D];
        static const int32_t ranges[3][2] = {{0, 0}, {4, 4}, {5, 2}};
        for (int i = 0; i < 3; i++) {
            t.lo = ranges[i][0];
            t.hi = ranges[i][1];
            t.a.cos = t.sn; /* an angle whose cosine is 0 and negative sine must not make -0 */
            tiny_run(&t);
            assert_memory_equal(t.out, zeros, sizeof zeros);
        }
        t.a.idx = NULL;
        tiny_run(&t);
        assert_memory_equal(t.out, zeros, sizeof zeros);
        ops_rig_close(&t.r);
    }
}

static void gaps_in_the_list_do_not_matter(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        float dense[2 * D];
        tiny_init(&t, level, 2);
        t.hi = 2;
        t.idx[0] = 4;
        t.idx[1] = 0;
        t.idx[2] = 5;
        tiny_run(&t);
        memcpy(dense, t.out, sizeof dense);
        memcpy(t.idx, (const int32_t[8]){-1, 4, -1, -1, 0, -1, 5, -1}, sizeof t.idx);
        tiny_run(&t);
        assert_memory_equal(t.out, dense, sizeof dense);
        ops_rig_close(&t.r);
    }
}

/* A quarter turn back: (a, b) becomes (b, -a); values before the rotated ones stay. */
static void the_output_turns_back(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        float plain[D];
        tiny_init(&t, level, 1);
        t.hi = 4;
        t.a.n_freq = 8;
        tiny_run(&t);
        memcpy(plain, t.out, sizeof plain);
        for (int i = 0; i < 8; i++) {
            t.cs[i] = 0;
            t.sn[i] = 1;
        }
        tiny_run(&t);
        for (int i = 0; i < D - 16; i++)
            assert_true(t.out[i] == plain[i]);
        for (int i = D - 16; i < D; i += 2) {
            assert_true(t.out[i] == plain[i + 1]);
            assert_true(t.out[i + 1] == -plain[i]);
        }
        ops_rig_close(&t.r);
    }
}

/* In a drafting round every row sees every key of the block, also those behind it (dspark.md 4.4). */
static void keys_after_the_row_take_part(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 1);
        memset(t.q, 0, sizeof t.q);
        t.sink[0] = -100;
        t.a.idx = NULL;
        t.hi = KEYS;
        tiny_run(&t);
        for (int i = 0; i < D; i++) {
            double want = 0;
            for (int k = 0; k < KEYS; k++)
                want += t.records[k * D + i] / 6.0;
            assert_true(fabs(t.out[i] - want) < 1e-6);
        }
        ops_rig_close(&t.r);
    }
}

/* Scores far outside exp's range: the largest takes all. */
static void large_scores_do_not_overflow(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 1);
        t.a.idx = NULL;
        t.hi = KEYS;
        t.a.scale = 1e4f;
        tiny_run(&t);
        int best = 0;
        for (int k = 1; k < KEYS; k++)
            if (dot(t.q, t.records + k * D) > dot(t.q, t.records + best * D))
                best = k;
        assert_true(dot(t.q, t.records + best * D) > 0.1);
        assert_memory_equal(t.out, t.records + best * D, sizeof(float) * D);
        ops_rig_close(&t.r);
    }
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        tiny t;
        tiny_init(&t, level, 1);
        t.hi = 5; /* 5 + 8 keys, reserved for 12 */
        assert_int_equal(di_cpu_ops.attention(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.hi = 1;
        t.a.n_heads = 2; /* q has one head's columns */
        assert_int_equal(di_cpu_ops.attention(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.a.n_heads = 1;
        t.a.n_freq = D;
        assert_int_equal(di_cpu_ops.attention(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.a.n_freq = 0;
        t.a.main.n_values = 2 * D;
        assert_int_equal(di_cpu_ops.attention(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.a.main.n_values = D;
        t.a.sink = NULL;
        assert_int_equal(di_cpu_ops.attention(t.r.stream, &t.a), DI_ERR_SHAPE);
        ops_rig_close(&t.r);
    }
}

/* 64 heads of 512, 128 + 512 keys: rows one by one (heads shared out) and 33 rows at once (rows shared out). */
static void the_released_shape_is_the_same_at_every_level(void **state) {
    (void)state;
    enum { HEADS = 64, WIDE = 512, WINDOW = 128, TOPK = 512, ROWS = 33, ENTRIES = 600, RING = 134 };
    const di_limits limits = {
        .rows_max = ROWS, .n_in_max = 512, .head_dim = WIDE, .n_heads = HEADS, .keys_max = WINDOW + TOPK};
    uint64_t rng = 21;
    size_t rec = 528, ent = 288, row_bytes = HEADS * WIDE * 2;
    uint8_t *records = ops_rig_alloc(rec * ROWS), *ring = ops_rig_alloc(rec * RING),
            *page = ops_rig_alloc(ent * ENTRIES);
    for (int i = 0; i < ROWS; i++)
        ops_rig_random_record(&rng, DI_KV_FP8, records + rec * i, records + rec * i + WIDE, WIDE);
    for (int i = 0; i < RING; i++)
        ops_rig_random_record(&rng, DI_KV_FP8, ring + rec * i, ring + rec * i + WIDE, WIDE);
    for (int i = 0; i < ENTRIES; i++)
        ops_rig_random_record(&rng, DI_KV_FP4, page + ent * i, page + ent * i + WIDE / 2, WIDE);
    uint16_t *q = ops_rig_alloc(row_bytes * ROWS), *out = ops_rig_alloc(row_bytes * ROWS),
             *want = ops_rig_alloc(row_bytes * ROWS);
    for (int i = 0; i < ROWS * HEADS * WIDE; i++)
        q[i] = di_f32_to_bf16((float)(di_test_random_unit(&rng) - 0.5));
    float sink[HEADS], *cs = ops_rig_alloc(ROWS * 32 * sizeof *cs), *sn = ops_rig_alloc(ROWS * 32 * sizeof *sn);
    for (int h = 0; h < HEADS; h++)
        sink[h] = (float)(4 * di_test_random_unit(&rng) - 2);
    for (int i = 0; i < ROWS * 32; i++) {
        cs[i] = (float)cos(i);
        sn[i] = (float)sin(i);
    }
    int32_t pos[ROWS], lo[ROWS], hi[ROWS], seq[ROWS] = {0}, zero = 0, n = ROWS, pos0 = 300;
    int32_t *idx = ops_rig_alloc(ROWS * TOPK * sizeof *idx);
    for (int i = 0; i < ROWS; i++) {
        pos[i] = pos0 + i;
        lo[i] = pos[i] - WINDOW + 1;
        hi[i] = pos[i] + 1;
        for (int t = 0; t < TOPK; t++)
            idx[i * TOPK + t] = t + (t >= TOPK - 2 * i) * 80; /* lists differ in their tails */
    }
    di_rows rows = {.n_rows = ROWS,
                    .n_seqs = 1,
                    .pos = pos,
                    .seq = seq,
                    .win_lo = lo,
                    .win_hi = hi,
                    .row0 = &zero,
                    .n = &n,
                    .pos0 = &pos0,
                    .slot = &zero,
                    .blocks = &zero,
                    .blocks_stride = 1};
    di_attention_args a = {.rows = &rows,
                           .q = {DI_BF16, ROWS, HEADS * WIDE, HEADS * WIDE, q, NULL},
                           .n_heads = HEADS,
                           .head_dim = WIDE,
                           .win_format = DI_KV_FP8,
                           .records = records,
                           .ring = {ring, rec * RING, 0, rec, RING},
                           .idx = idx,
                           .topk = TOPK,
                           .main = {page, ent * ENTRIES, 0, ENTRIES, DI_KV_FP4, WIDE},
                           .sink = sink,
                           .scale = 0.0441941738f,
                           .cos = cs,
                           .sin = sn,
                           .n_freq = 32,
                           .out = {DI_BF16, ROWS, HEADS * WIDE, HEADS * WIDE, want, NULL}};
    ops_rig r;
    ops_rig_open(&r, DI_CPU_REF, 2, &limits);
    assert_int_equal(di_cpu_ops.attention(r.stream, &a), DI_OK);
    ops_rig_close(&r);
    for (di_cpu_level level = DI_CPU_PORTABLE; level <= di_cpu_level_best(); level++) {
        ops_rig_open(&r, level, 2, &limits);
        rows.n_rows = ROWS;
        a.out.data = out;
        assert_int_equal(di_cpu_ops.attention(r.stream, &a), DI_OK);
        assert_memory_equal(out, want, row_bytes * ROWS);
        memset(out, 0xFF, row_bytes * ROWS);
        rows.n_rows = 3;
        assert_int_equal(di_cpu_ops.attention(r.stream, &a), DI_OK);
        assert_memory_equal(out, want, row_bytes * 3);
        ops_rig_close(&r);
    }
    free(records);
    free(ring);
    free(page);
    free(q);
    free(out);
    free(want);
    free(cs);
    free(sn);
    free(idx);
}

DI_TEST_GROUP(attention, cmocka_unit_test(one_key_shares_the_mass_with_the_sink),
              cmocka_unit_test(the_sink_counts_once_and_is_not_scaled), cmocka_unit_test(no_key_gives_zeros),
              cmocka_unit_test(gaps_in_the_list_do_not_matter), cmocka_unit_test(the_output_turns_back),
              cmocka_unit_test(keys_after_the_row_take_part), cmocka_unit_test(large_scores_do_not_overflow),
              cmocka_unit_test(bad_shapes_are_refused),
              cmocka_unit_test(the_released_shape_is_the_same_at_every_level));
