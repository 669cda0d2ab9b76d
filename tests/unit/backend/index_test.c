/* index_select against the golden files (scores, selections, candidate blocks) and on cases that decide ties, the
 * newest block, missing entries and numbers that are none. */
#include "golden.h"
#include "ops_rig.h"

#define FOR_EACH_LEVEL(level) for (di_cpu_level level = DI_CPU_REF; level <= di_cpu_level_best(); level++)

/* One row that sees n entries of one sequence, all in one block. */
typedef struct query {
    ops_rig r;
    di_rows rows;
    int32_t pos, zero, n_rows;
    di_index_select_args a;
} query;

static void query_init(query *t, di_cpu_level level, int32_t n, int32_t n_heads, int32_t dim) {
    memset(t, 0, sizeof *t);
    const di_limits limits = {.rows_max = 4,
                              .n_in_max = 128,
                              .head_dim = 32,
                              .n_heads = 1,
                              .keys_max = 8,
                              .entries_max = n > 0 ? n : 1,
                              .index_heads = n_heads,
                              .index_dim = dim};
    ops_rig_open(&t->r, level, 2, &limits);
    t->pos = n - 1;
    t->n_rows = 1;
    t->rows = (di_rows){.n_rows = 1,
                        .n_seqs = 1,
                        .pos = &t->pos,
                        .seq = &t->zero,
                        .win_lo = &t->zero,
                        .win_hi = &t->zero,
                        .row0 = &t->zero,
                        .n = &t->n_rows,
                        .pos0 = &t->pos,
                        .slot = &t->zero,
                        .blocks = &t->zero,
                        .blocks_stride = 1};
    t->a = (di_index_select_args){.rows = &t->rows, .n_heads = n_heads, .dim = dim, .ratio = 1};
}

/* ---- golden ------------------------------------------------------------------------------------------------------ */

/* Checks the last row of a prompt at layer `layer`, whose keys are those of layer `keys`. cand: -1 none, 0 the golden
 * blocks restrict, 1 the layer makes them. Codes have 2 bits and few exponents, so that the dot products are exact in
 * any order: the bf16 scores must be equal, not close. */
static void check_golden(di_cpu_level level, const char *file, int layer, int keys, int32_t ratio, int cand) {
    golden *g = golden_open(di_test_data(file));
    char name[64];
#define GET(l, what) (snprintf(name, sizeof name, "layers.%d.%s", l, what), golden_get(g, name))
    golden_tensor q = GET(layer, "index_q_raw"), w = GET(layer, "index_weight"), score = GET(layer, "index_score");
    golden_tensor selected = GET(layer, "index_selected"), codes = GET(keys, "index_k_raw.fp4"),
                  scales = GET(keys, "index_k_raw.fp4_scale");
    int32_t n = (int32_t)codes.shape[0], n_heads = (int32_t)q.shape[1], dim = (int32_t)q.shape[2];
    int64_t last = q.shape[0] - 1;
    assert_int_equal(score.shape[1], n);
    uint8_t *page = ops_rig_alloc(codes.n_bytes + scales.n_bytes);
    memcpy(page, codes.data, codes.n_bytes);
    memcpy(page + codes.n_bytes, scales.data, scales.n_bytes);
    int32_t topk = (int32_t)selected.shape[1], *idx = ops_rig_alloc((size_t)topk * 4);
    float *got = ops_rig_alloc((size_t)n * 4);
    query t;
    query_init(&t, level, n, n_heads, dim);
    t.pos = n * ratio - 1;
    t.a.ratio = ratio;
    t.a.q = (di_act){DI_BF16, 1, n_heads * dim, n_heads * dim, (uint16_t *)(void *)q.data + last * n_heads * dim, NULL};
    t.a.w = (di_act){DI_BF16, 1, n_heads, n_heads, (uint16_t *)(void *)w.data + last * n_heads, NULL};
    t.a.keys = (di_paged){page, codes.n_bytes + scales.n_bytes, 0, n, DI_KV_MX4, dim};
    t.a.round_bf16 = true;
    t.a.topk = topk;
    t.a.idx = idx;
    t.a.scores = got;
    t.a.scores_stride = n;
    int32_t *blocks = NULL, *blocks_want = NULL;
    if (cand >= 0) {
        golden_tensor b = GET(keys, "candidate_blocks");
        t.a.n_cand = (int32_t)b.shape[1];
        t.a.cand_block = 8;
        blocks = ops_rig_alloc((size_t)t.a.n_cand * 4);
        blocks_want = ops_rig_alloc((size_t)t.a.n_cand * 4);
        for (int32_t i = 0; i < t.a.n_cand; i++)
            blocks[i] = blocks_want[i] = (int32_t)golden_int(&b, (b.shape[0] - 1) * t.a.n_cand + i);
        if (cand) {
            memset(blocks, 0xEE, (size_t)t.a.n_cand * 4);
            t.a.cand_out = blocks;
        } else {
            t.a.cand_in = blocks;
        }
    }
    assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_OK);
    for (int32_t j = 0; j < n; j++) {
        bool is_in = cand != 0;
        for (int32_t i = 0; i < t.a.n_cand && !is_in; i++)
            is_in = blocks[i] == j / 8;
        assert_true(got[j] == (is_in ? golden_float(&score, last * n + j) : -INFINITY));
    }
    for (int32_t i = 0; i < topk; i++)
        assert_int_equal(idx[i], golden_int(&selected, (selected.shape[0] - 1) * topk + i));
    if (cand > 0)
        assert_memory_equal(blocks, blocks_want, (size_t)t.a.n_cand * 4);
    ops_rig_close(&t.r);
    golden_close(g);
    free(page);
    free(idx);
    free(got);
    free(blocks);
    free(blocks_want);
#undef GET
}

static void golden_scores_and_selections(void **state) {
    (void)state;
    static const char *const files[] = {"tiny/faithful.2.safetensors", "tiny/faithful.5.safetensors",
                                        "tiny/faithful.8.safetensors", "tiny/faithful.11.safetensors"};
    FOR_EACH_LEVEL(level) {
        for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
            check_golden(level, files[i], 1, 1, 2, -1);
            check_golden(level, files[i], 3, 3, 2, -1);
            check_golden(level, files[i], 4, 4, 1, 1);
            check_golden(level, files[i], 6, 4, 1, 0);
        }
        check_golden(level, "real-shape/faithful.0.safetensors", 1, 1, 2, -1);
        check_golden(level, "real-shape/faithful.0.safetensors", 3, 3, 1, 1);
        check_golden(level, "real-shape/faithful.0.safetensors", 4, 3, 1, 0);
    }
}

/* ---- exact keys made by hand ------------------------------------------------------------------------------------- */

enum { N_MAX = 3000, DIM = 32 };

/* Runs a row whose entry j scores s[j] exactly: the query is (1, -1, 0, ..), the key (max(s, 0), max(-s, 0), 0, ..),
 * the two heads weigh +1 and -1. */
static void run_scores(di_cpu_level level, const float *s, int32_t n, int32_t topk, int32_t *idx, int32_t n_cand,
                       const int32_t *cand_in, int32_t *cand_out) {
    query t;
    query_init(&t, level, n, 2, DIM);
    float q[2 * DIM] = {0}, w[2] = {1, -1};
    q[0] = 1;
    q[DIM + 1] = 1;
    float *keys = ops_rig_alloc((size_t)(n + 1) * DIM * sizeof *keys);
    for (int32_t j = 0; j < n; j++) {
        keys[j * DIM] = s[j] > 0 ? s[j] : 0;
        keys[j * DIM + 1] = s[j] < 0 ? -s[j] : 0;
    }
    t.a.q = (di_act){DI_F32, 1, 2 * DIM, 2 * DIM, q, NULL};
    t.a.w = (di_act){DI_F32, 1, 2, 2, w, NULL};
    t.a.keys = (di_paged){(uint8_t *)keys, 0, 0, n + 1, DI_KV_F32, DIM};
    t.a.topk = topk;
    t.a.idx = idx;
    t.a.n_cand = n_cand;
    t.a.cand_block = 8;
    t.a.cand_in = cand_in;
    t.a.cand_out = cand_out;
    assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_OK);
    ops_rig_close(&t.r);
    free(keys);
}

static void assert_list(const int32_t *got, const int32_t *want, int n) {
    for (int i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

static void ties_go_to_the_lower_index(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        int32_t idx[4];
        run_scores(level, (const float[]){1, 3, 2, 3, 2, 2, -1}, 7, 4, idx, 0, NULL, NULL);
        assert_list(idx, (const int32_t[]){1, 2, 3, 4}, 4);
        run_scores(level, (const float[]){0, 0, 0, 0, 0, 0}, 6, 4, idx, 0, NULL, NULL);
        assert_list(idx, (const int32_t[]){0, 1, 2, 3}, 4);
        run_scores(level, (const float[]){-5, -4, -4, -3, -4}, 5, 3, idx, 0, NULL, NULL);
        assert_list(idx, (const int32_t[]){1, 2, 3}, 3);
    }
}

static void fewer_entries_than_topk_are_padded(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        int32_t idx[4], cand[3];
        run_scores(level, (const float[]){-1, -2}, 2, 4, idx, 3, NULL, cand);
        assert_list(idx, (const int32_t[]){0, 1, -1, -1}, 4);
        assert_list(cand, (const int32_t[]){0, -1, -1}, 3);
        run_scores(level, NULL, 0, 4, idx, 3, NULL, cand); /* the first row of a ratio-2 layer sees nothing */
        assert_list(idx, (const int32_t[]){-1, -1, -1, -1}, 4);
        assert_list(cand, (const int32_t[]){-1, -1, -1}, 3);
    }
}

/* An infinite key value meets zeros of the other head's query: that dot product is NaN and counts as 0. */
static void minus_infinity_never_wins(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        int32_t idx[5];
        const float s[5] = {-1, INFINITY, -2, -INFINITY, -3};
        run_scores(level, s, 5, 3, idx, 0, NULL, NULL);
        assert_list(idx, (const int32_t[]){0, 1, 2}, 3);
        run_scores(level, s, 5, 5, idx, 0, NULL, NULL);
        assert_list(idx, (const int32_t[]){0, 1, 2, 4, -1}, 5);
    }
}

/* A weight that is NaN makes every score NaN: nothing is selected, and only the newest block stays a candidate. */
static void nan_never_wins(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        query t;
        query_init(&t, level, 20, 1, DIM);
        float q[DIM] = {1}, w[1] = {NAN}, keys[20 * DIM] = {0};
        int32_t idx[3], cand[2];
        t.a.q = (di_act){DI_F32, 1, DIM, DIM, q, NULL};
        t.a.w = (di_act){DI_F32, 1, 1, 1, w, NULL};
        t.a.keys = (di_paged){(uint8_t *)keys, 0, 0, 20, DI_KV_F32, DIM};
        t.a.topk = 3;
        t.a.idx = idx;
        t.a.n_cand = 2;
        t.a.cand_block = 8;
        t.a.cand_out = cand;
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_OK);
        assert_list(idx, (const int32_t[]){-1, -1, -1}, 3);
        assert_list(cand, (const int32_t[]){2, -1}, 2);
        ops_rig_close(&t.r);
    }
}

static void the_newest_block_always_takes_part(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        float s[27];
        for (int j = 0; j < 27; j++)
            s[j] = j / 8 == 1 ? 5.0f : j / 8 == 3 ? -9.0f : 1.0f;
        int32_t idx[2], cand[2];
        run_scores(level, s, 27, 2, idx, 2, NULL, cand);
        assert_list(cand, (const int32_t[]){1, 3}, 2);
        run_scores(level, s, 27, 2, idx, 1, NULL, cand);
        assert_list(cand, (const int32_t[]){3}, 1);
        run_scores(level, s, 24, 2, idx, 2, NULL, cand); /* blocks 0 and 2 tie below 1: the newest wins anyway */
        assert_list(cand, (const int32_t[]){1, 2}, 2);
    }
}

static void candidate_blocks_restrict_the_selection(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        float s[27];
        for (int j = 0; j < 27; j++)
            s[j] = (float)j;
        int32_t idx[4];
        run_scores(level, s, 27, 4, idx, 3, (const int32_t[]){0, 2, -1}, NULL);
        assert_list(idx, (const int32_t[]){20, 21, 22, 23}, 4);
        run_scores(level, s, 27, 4, idx, 3, (const int32_t[]){3, -1, -1}, NULL); /* the partial block has 3 entries */
        assert_list(idx, (const int32_t[]){24, 25, 26, -1}, 4);
        run_scores(level, s, 27, 4, idx, 3, (const int32_t[]){-1, -1, -1}, NULL);
        assert_list(idx, (const int32_t[]){-1, -1, -1, -1}, 4);
    }
}

/* Orders that are hard on clever searches: rising, falling, all but one equal; over more than one part. */
static void long_lists_are_exact(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        float *s = ops_rig_alloc(N_MAX * sizeof *s);
        int32_t idx[100];
        for (int j = 0; j < N_MAX; j++)
            s[j] = (float)j * 0.001f - 1;
        run_scores(level, s, N_MAX, 100, idx, 0, NULL, NULL);
        for (int t = 0; t < 100; t++)
            assert_int_equal(idx[t], N_MAX - 100 + t);
        for (int j = 0; j < N_MAX; j++)
            s[j] = (float)-j * 0.001f + 1;
        run_scores(level, s, N_MAX, 100, idx, 0, NULL, NULL);
        for (int t = 0; t < 100; t++)
            assert_int_equal(idx[t], t);
        for (int j = 0; j < N_MAX; j++)
            s[j] = j == 2222 ? 0.5000001f : 0.5f;
        run_scores(level, s, N_MAX, 100, idx, 0, NULL, NULL);
        for (int t = 0; t < 99; t++)
            assert_int_equal(idx[t], t);
        assert_int_equal(idx[99], 2222);
        free(s);
    }
}

static const float *sorted_by;
static int falling(const void *x, const void *y) {
    int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
    if (sorted_by[a] != sorted_by[b])
        return sorted_by[a] > sorted_by[b] ? -1 : 1;
    return a < b ? -1 : 1;
}
static int rising(const void *x, const void *y) {
    int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
    return (a > b) - (a < b);
}

/* As many scores as a context of a million tokens has blocks, against sorting: spread, rounded so that many tie, large
 * ones side by side, mostly equal, mostly never chosen. */
static void the_longest_lists_are_exact(void **state) {
    (void)state;
    enum { N = 70001, KINDS = 5, TOPK_MAX = 2048 };
    float *s = ops_rig_alloc(N * sizeof *s);
    int32_t *order = ops_rig_alloc(N * sizeof *order), *idx = ops_rig_alloc(TOPK_MAX * sizeof *idx);
    for (int kind = 0; kind < KINDS; kind++) {
        uint64_t rng = 31;
        for (int j = 0; j < N; j++) {
            float x = (float)(di_test_random_unit(&rng) + di_test_random_unit(&rng) - 1);
            bool is_rare = di_test_random(&rng) % 50 == 0;
            s[j] = kind == 0   ? x
                   : kind == 1 ? di_round_bf16(x)
                   : kind == 2 ? x + (j / 3000 == 9)
                   : kind == 3 ? (is_rare ? x : 0.0f)
                               : (is_rare ? x : -INFINITY);
        }
        int32_t n = 0, topk = kind == 2 ? 512 : TOPK_MAX;
        for (int j = 0; j < N; j++) {
            if (s[j] > -INFINITY)
                order[n++] = j;
        }
        sorted_by = s;
        qsort(order, (size_t)n, sizeof *order, falling);
        int32_t n_best = DI_MIN(n, topk);
        qsort(order, (size_t)n_best, sizeof *order, rising);
        for (di_cpu_level level = DI_CPU_PORTABLE; level <= di_cpu_level_best(); level++) {
            run_scores(level, s, N, topk, idx, 0, NULL, NULL);
            assert_list(idx, order, n_best);
            for (int32_t t = n_best; t < topk; t++)
                assert_int_equal(idx[t], -1);
        }
    }
    free(s);
    free(order);
    free(idx);
}

/* Scales for which a product leaves the normal floats, the NaN among them, and groups of zeros: the same bits as the
 * reference, also beside entries of ordinary scales. */
static void scales_at_the_ends_are_the_same_at_every_level(void **state) {
    (void)state;
    enum { N = 90, HEADS = 3, WIDE = 64 };
    static const uint8_t ends[] = {0, 1, 2, 20, 70, 71, 183, 184, 230, 254, 255};
    uint64_t rng = 41;
    uint8_t keys[N * (WIDE / 2 + WIDE / 32)], *scales = keys + N * WIDE / 2;
    for (int j = 0; j < N; j++) {
        ops_rig_random_record(&rng, DI_KV_MX4, keys + j * WIDE / 2, scales + j * WIDE / 32, WIDE);
        if (j % 5 == 0)
            scales[j * WIDE / 32 + j % 2] = ends[j / 5 % (int)DI_COUNT(ends)];
        if (j % 9 == 0)
            memset(keys + j * WIDE / 2, j % 2 ? 0x80 : 0, WIDE / 4);
    }
    for (int exponent = -120; exponent <= 120; exponent += 40) {
        float q[HEADS * WIDE], w[HEADS] = {1, -2, 0.5f};
        uint64_t from = 42;
        for (int i = 0; i < HEADS * WIDE; i++)
            q[i] = (float)(ldexp(di_test_random_unit(&from) - 0.5, i < WIDE ? exponent : 0));
        float scores[2][N];
        int32_t idx[8];
        FOR_EACH_LEVEL(level) {
            query t;
            query_init(&t, level, N, HEADS, WIDE);
            t.a.q = (di_act){DI_F32, 1, HEADS * WIDE, HEADS * WIDE, q, NULL};
            t.a.w = (di_act){DI_F32, 1, HEADS, HEADS, w, NULL};
            t.a.keys = (di_paged){keys, sizeof keys, 0, N, DI_KV_MX4, WIDE};
            t.a.topk = 8;
            t.a.idx = idx;
            t.a.scores = scores[level > DI_CPU_REF];
            t.a.scores_stride = N;
            assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_OK);
            for (int j = 0; j < N && level > DI_CPU_REF; j++) {
                if (scores[0][j] == scores[0][j])
                    assert_memory_equal(&scores[1][j], &scores[0][j], sizeof(float));
                else
                    assert_true(scores[1][j] != scores[1][j]);
            }
            ops_rig_close(&t.r);
        }
    }
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    FOR_EACH_LEVEL(level) {
        query t;
        query_init(&t, level, 4, 1, DIM);
        float x[8 * DIM] = {0};
        int32_t idx[2];
        t.a.q = (di_act){DI_F32, 1, DIM, DIM, x, NULL};
        t.a.w = (di_act){DI_F32, 1, 1, 1, x, NULL};
        t.a.keys = (di_paged){(uint8_t *)x, 0, 0, 8, DI_KV_F32, DIM};
        t.a.topk = 2;
        t.a.idx = idx;
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_OK);
        t.pos = 4; /* a fifth entry, reserved for 4 */
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.pos = 3;
        t.a.scores = x;
        t.a.scores_stride = 3;
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.a.scores = NULL;
        t.a.cand_out = idx;
        t.a.n_cand = 2;
        t.a.cand_block = 12;
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_ERR_SHAPE);
        t.a.cand_out = NULL;
        t.a.w.n_cols = 2;
        assert_int_equal(di_cpu_ops.index_select(t.r.stream, &t.a), DI_ERR_SHAPE);
        ops_rig_close(&t.r);
    }
}

/* The last step alone, at every level, against sorting: many ties, NaN and -inf among the scores, more asked for than
 * there are. */
static void the_step_alone_is_exact(void **state) {
    (void)state;
    enum { N = 65536, CASES = 4 };
    static const int32_t topks[CASES] = {512, 1, 4000, 0};
    static const int64_t lens[CASES] = {N, N, 3001, 100};
    float *s = ops_rig_alloc(N * sizeof *s);
    int32_t *order = ops_rig_alloc(N * sizeof *order), *idx = ops_rig_alloc(N * sizeof *idx);
    uint64_t rng = 5;
    for (int c = 0; c < CASES; c++) {
        int32_t n = 0, topk = topks[c];
        for (int64_t j = 0; j < lens[c]; j++) {
            uint64_t r = di_test_random(&rng);
            s[j] = r % 97 == 0 ? NAN : r % 89 == 0 ? -INFINITY : di_round_bf16((float)di_test_random_unit(&rng) - 0.5f);
            if (s[j] > -INFINITY)
                order[n++] = (int32_t)j;
        }
        sorted_by = s;
        qsort(order, (size_t)n, sizeof *order, falling);
        int32_t n_best = DI_MIN(n, topk);
        qsort(order, (size_t)n_best, sizeof *order, rising);
        FOR_EACH_LEVEL(level) {
            di_device *dev;
            di_error err = {0};
            di_test_ok(di_cpu_device_open(&dev, 1, level, &err), &err);
            di_cpu_device_ops.topk(dev, s, lens[c], topk, idx);
            assert_list(idx, order, n_best);
            for (int32_t t = n_best; t < topk; t++)
                assert_int_equal(idx[t], -1);
            di_cpu_device_ops.close(dev);
        }
    }
    free(s);
    free(order);
    free(idx);
}

DI_TEST_GROUP(index_select, cmocka_unit_test(the_step_alone_is_exact), cmocka_unit_test(golden_scores_and_selections),
              cmocka_unit_test(ties_go_to_the_lower_index), cmocka_unit_test(fewer_entries_than_topk_are_padded),
              cmocka_unit_test(minus_infinity_never_wins), cmocka_unit_test(nan_never_wins),
              cmocka_unit_test(the_newest_block_always_takes_part),
              cmocka_unit_test(candidate_blocks_restrict_the_selection), cmocka_unit_test(long_lists_are_exact),
              cmocka_unit_test(the_longest_lists_are_exact),
              cmocka_unit_test(scales_at_the_ends_are_the_same_at_every_level),
              cmocka_unit_test(bad_shapes_are_refused));
