/* Dense operations: the bits of a row depend on nothing but the row.
 *
 * Every property makes random arguments, runs them with the reference on one thread, and then on every level and number
 * of threads: all rows in one call, all rows in another order, and the rows cut into calls of random sizes. Every row
 * must have the same bits each time. What the right values are is the unit tests' business. */
#include "ops_mat.h"

enum { ROWS_MAX = 150 };

/* An operation on picked rows: reads the inputs of rows[0..n), in that order, and writes its results for them one after
 * the other, row_bytes each. Memory of the call comes from mem. */
typedef struct op_case {
    int64_t n_rows;
    size_t row_bytes;
    void (*run)(const struct op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out);
    const void *ctx;
} op_case;

static void run_picked(const op_case *c, di_stream *stream, const int64_t *rows, int64_t n, uint8_t *out_by_row) {
    ops_mem mem = {0};
    uint8_t *out = ops_mem_take(&mem, (size_t)n * c->row_bytes);
    c->run(c, stream, &mem, rows, n, out);
    for (int64_t i = 0; i < n; i++) {
        memcpy(out_by_row + (size_t)rows[i] * c->row_bytes, out + (size_t)i * c->row_bytes, c->row_bytes);
    }
    ops_mem_free(&mem);
}

static void check_rows(const op_case *c, const char *how, int variant, const uint8_t *got, const uint8_t *want) {
    for (int64_t row = 0; row < c->n_rows; row++) {
        if (memcmp(got + (size_t)row * c->row_bytes, want + (size_t)row * c->row_bytes, c->row_bytes)) {
            fail_msg("row %d of %d differs from the reference: %s, variant %d", (int)row, (int)c->n_rows, how, variant);
        }
    }
}

static void check_case(const op_case *c, uint64_t *rng) {
    di_limits limits = ops_mat_limits();
    size_t n_bytes = (size_t)c->n_rows * c->row_bytes;
    uint8_t *want = ops_rig_alloc(n_bytes), *got = ops_rig_alloc(n_bytes);
    int64_t order[ROWS_MAX];
    assert_true(c->n_rows <= ROWS_MAX);
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        for (int64_t i = 0; i < c->n_rows; i++)
            order[i] = i;
        run_picked(c, rig.stream, order, c->n_rows, variant ? got : want);
        if (variant)
            check_rows(c, "all rows", variant, got, want);
        for (int64_t i = c->n_rows - 1; i > 0; i--) { /* shuffle */
            int64_t j = di_test_random_range(rng, 0, i), t = order[i];
            order[i] = order[j], order[j] = t;
        }
        memset(got, 0xA5, n_bytes);
        run_picked(c, rig.stream, order, c->n_rows, got);
        check_rows(c, "shuffled", variant, got, want);
        memset(got, 0xA5, n_bytes);
        for (int64_t i = 0; i < c->n_rows;) {
            int64_t n = di_test_random_range(rng, 1, DI_MIN(c->n_rows - i, 20));
            run_picked(c, rig.stream, order + i, n, got);
            i += n;
        }
        check_rows(c, "in pieces", variant, got, want);
        ops_rig_close(&rig);
    }
    free(want), free(got);
}

static int64_t pick_rows(uint64_t *rng) {
    /* Small counts, where panels differ most, and now and then more than a block of rows. */
    return di_test_random_range(rng, 0, 9) ? di_test_random_range(rng, 1, 40)
                                           : di_test_random_range(rng, 129, ROWS_MAX);
}

static void copy_rows(const di_act *x, uint8_t *out, size_t row_bytes, size_t at) {
    size_t n = di_dtype_bytes(x->dtype, (size_t)x->n_cols);
    for (int64_t i = 0; i < x->n_rows; i++) {
        memcpy(out + (size_t)i * row_bytes + at, (uint8_t *)x->data + (size_t)i * n, n);
    }
}

/* ---- gemm ---- */

typedef struct gemm_ctx {
    di_act x;
    di_mat w;
    int32_t n_groups;
    di_dtype out;
} gemm_ctx;

static void run_gemm(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const gemm_ctx *g = c->ctx;
    di_gemm_args args = {.x = ops_act_pick(mem, &g->x, rows, n), .w = &g->w, .n_groups = g->n_groups};
    args.out = (di_act){g->out, n, g->w.n_out, g->w.n_out, out, NULL};
    assert_int_equal(di_cpu_ops.gemm(stream, &args), DI_OK);
}

DI_PROPERTY(gemm_rows_stand_alone, 40) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    const di_dtype weights[4] = {DI_F32, DI_BF16, DI_F8_E4M3, DI_F4_E2M1}, acts[3] = {DI_F32, DI_BF16, DI_F8_E4M3};
    gemm_ctx g = {.n_groups = (int32_t)di_test_random_range(&rng, 1, 3),
                  .out = di_test_random(&rng) & 1 ? DI_F32 : DI_BF16};
    di_dtype w = weights[di_test_random_range(&rng, 0, 3)], x = acts[di_test_random_range(&rng, 0, 2)];
    int64_t n_rows = pick_rows(&rng), n_in = di_test_random_range(&rng, 1, 300);
    if (w == DI_F4_E2M1 || x == DI_F8_E4M3)
        n_in = DI_ROUND_UP(n_in, 32);
    g.w = ops_mat_random(&mem, &rng, w, g.n_groups * di_test_random_range(&rng, 1, 50), n_in);
    g.x = ops_act_random(&mem, &rng, x, n_rows, n_in * g.n_groups);
    op_case c = {n_rows, di_dtype_bytes(g.out, (size_t)g.w.n_out), run_gemm, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

/* ---- rms_norm, quant, embed, stream_mean ---- */

typedef struct norm_ctx {
    di_act x;
    di_mat weight;
} norm_ctx;

static void run_norm(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const norm_ctx *g = c->ctx;
    di_rms_norm_args args = {.x = ops_act_pick(mem, &g->x, rows, n), .weight = g->weight.data, .eps = 1e-20f};
    args.out = (di_act){g->x.dtype, n, g->x.n_cols, g->x.n_cols, out, NULL};
    assert_int_equal(di_cpu_ops.rms_norm(stream, &args), DI_OK);
}

DI_PROPERTY(rms_norm_rows_stand_alone, 20) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    int64_t n_rows = pick_rows(&rng), n = di_test_random_range(&rng, 1, 700);
    norm_ctx g = {.x = ops_act_random(&mem, &rng, seed & 1 ? DI_F32 : DI_BF16, n_rows, n),
                  .weight = ops_mat_random(&mem, &rng, DI_BF16, 1, n)};
    op_case c = {n_rows, di_dtype_bytes(g.x.dtype, (size_t)n), run_norm, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

static void run_quant(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const di_act *x = c->ctx;
    di_act codes = ops_act_empty(mem, DI_F8_E4M3, n, x->n_cols);
    di_quant_args args = {.x = ops_act_pick(mem, x, rows, n), .out = codes};
    assert_int_equal(di_cpu_ops.quant(stream, &args), DI_OK);
    copy_rows(&codes, out, c->row_bytes, 0);
    for (int64_t i = 0; i < n; i++) {
        memcpy(out + (size_t)i * c->row_bytes + x->n_cols, codes.scale + i * (x->n_cols / 32),
               (size_t)(x->n_cols / 32));
    }
}

DI_PROPERTY(quant_rows_stand_alone, 20) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    int64_t n_rows = pick_rows(&rng), n = 32 * di_test_random_range(&rng, 1, 12);
    di_act x = ops_act_random(&mem, &rng, seed & 1 ? DI_F32 : DI_BF16, n_rows, n);
    op_case c = {n_rows, (size_t)(n + n / 32), run_quant, &x};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

typedef struct embed_ctx {
    di_mat table;
    int32_t ids[ROWS_MAX];
} embed_ctx;

static void run_embed(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const embed_ctx *g = c->ctx;
    int32_t *ids = ops_mem_take(mem, (size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n; i++)
        ids[i] = g->ids[rows[i]];
    di_embed_args args = {.table = &g->table, .ids = ids, .copies = 4};
    args.out = (di_act){DI_BF16, n, 4 * g->table.n_in, 4 * g->table.n_in, out, NULL};
    assert_int_equal(di_cpu_ops.embed(stream, &args), DI_OK);
}

DI_PROPERTY(embed_rows_stand_alone, 10) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    embed_ctx g = {.table = ops_mat_random(&mem, &rng, DI_BF16, 20, di_test_random_range(&rng, 1, 70))};
    for (int i = 0; i < ROWS_MAX; i++)
        g.ids[i] = (int32_t)di_test_random_range(&rng, -2, 22);
    op_case c = {pick_rows(&rng), (size_t)(8 * g.table.n_in), run_embed, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

static void run_mean(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const di_act *x = c->ctx;
    int64_t h = x->n_cols / 4;
    di_stream_mean_args args = {.x = ops_act_pick(mem, x, rows, n), .m = 4, .out = {x->dtype, n, h, h, out, NULL}};
    assert_int_equal(di_cpu_ops.stream_mean(stream, &args), DI_OK);
}

DI_PROPERTY(stream_mean_rows_stand_alone, 10) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    int64_t n_rows = pick_rows(&rng), h = di_test_random_range(&rng, 1, 90);
    di_act x = ops_act_random(&mem, &rng, seed & 1 ? DI_F32 : DI_BF16, n_rows, 4 * h);
    op_case c = {n_rows, di_dtype_bytes(x.dtype, (size_t)h), run_mean, &x};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

/* ---- rope ---- */

typedef struct rope_ctx {
    di_act x;
    int32_t pos[ROWS_MAX], n_heads, n_freq;
    bool is_inverse;
} rope_ctx;

static void run_rope(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const rope_ctx *g = c->ctx;
    float inv_freq[32];
    for (int j = 0; j < 32; j++)
        inv_freq[j] = 1.0f / (float)(1 + j * j);
    int32_t *pos = ops_mem_take(mem, (size_t)n * sizeof *pos);
    float *cos_table = ops_mem_take(mem, (size_t)(n * g->n_freq) * 4),
          *sin_table = ops_mem_take(mem, (size_t)(n * g->n_freq) * 4);
    for (int64_t i = 0; i < n; i++)
        pos[i] = g->pos[rows[i]];
    di_rope_table_args table = {.pos = pos,
                                .n_rows = (int32_t)n,
                                .n_freq = g->n_freq,
                                .inv_freq = inv_freq,
                                .cos = cos_table,
                                .sin = sin_table};
    assert_int_equal(di_cpu_ops.rope_table(stream, &table), DI_OK);
    di_rope_args args = {.x = ops_act_pick(mem, &g->x, rows, n),
                         .n_heads = g->n_heads,
                         .cos = cos_table,
                         .sin = sin_table,
                         .head_dim = (int32_t)(g->x.n_cols / g->n_heads),
                         .n_freq = g->n_freq,
                         .inverse = g->is_inverse};
    assert_int_equal(di_cpu_ops.rope(stream, &args), DI_OK);
    copy_rows(&args.x, out, c->row_bytes, 0);
}

DI_PROPERTY(rope_rows_stand_alone, 20) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    rope_ctx g = {.n_heads = (int32_t)di_test_random_range(&rng, 1, 5),
                  .n_freq = (int32_t)di_test_random_range(&rng, 1, 20)};
    int64_t n_rows = pick_rows(&rng), dim = 2 * g.n_freq + di_test_random_range(&rng, 0, 20);
    g.is_inverse = di_test_random(&rng) & 1;
    for (int i = 0; i < ROWS_MAX; i++)
        g.pos[i] = (int32_t)di_test_random_range(&rng, 0, 1 << 20);
    g.x = ops_act_random(&mem, &rng, seed & 1 ? DI_F32 : DI_BF16, n_rows, g.n_heads * dim);
    op_case c = {n_rows, di_dtype_bytes(g.x.dtype, (size_t)g.x.n_cols), run_rope, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

/* ---- hyper-connections ---- */

typedef struct hc_ctx {
    di_act x, f, pre, comb;
    di_mat fn, base;
    int32_t m;
} hc_ctx;

static void run_mix(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const hc_ctx *g = c->ctx;
    const float scale[3] = {0.1f, 0.2f, 0.3f};
    di_act x = ops_act_pick(mem, &g->x, rows, n), pre_in = ops_act_pick(mem, &g->pre, rows, n);
    di_act z = ops_act_empty(mem, g->x.dtype, n, g->f.n_cols), pre = ops_act_empty(mem, DI_F32, n, g->m);
    di_act post = ops_act_empty(mem, DI_F32, n, g->m), comb = ops_act_empty(mem, DI_F32, n, g->m * g->m);
    di_hc_mix_args args = {.x = x,
                           .m = g->m,
                           .pre_in = pre_in.data,
                           .fn = g->fn.data,
                           .scale = scale,
                           .base = g->base.data,
                           .iters = 20,
                           .eps = 1e-6f,
                           .norm_eps = 1e-20f,
                           .z = z,
                           .pre_out = pre.data,
                           .post = post.data,
                           .comb = comb.data};
    assert_int_equal(di_cpu_ops.hc_mix(stream, &args), DI_OK);
    size_t at = 0;
    copy_rows(&pre, out, c->row_bytes, at), at += 4 * (size_t)g->m;
    copy_rows(&post, out, c->row_bytes, at), at += 4 * (size_t)g->m;
    copy_rows(&comb, out, c->row_bytes, at), at += 4 * (size_t)(g->m * g->m);
    copy_rows(&z, out, c->row_bytes, at);
}

static void run_post(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const hc_ctx *g = c->ctx;
    di_act x = ops_act_pick(mem, &g->x, rows, n), f = ops_act_pick(mem, &g->f, rows, n);
    di_act post = ops_act_pick(mem, &g->pre, rows, n), comb = ops_act_pick(mem, &g->comb, rows, n);
    di_hc_post_args args = {.x = x, .f = f, .m = g->m, .post = post.data, .comb = comb.data};
    assert_int_equal(di_cpu_ops.hc_post(stream, &args), DI_OK);
    copy_rows(&x, out, c->row_bytes, 0);
}

DI_PROPERTY(hc_rows_stand_alone, 20) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    const int32_t streams[4] = {4, 4, 2, 3};
    hc_ctx g = {.m = streams[seed % 4]};
    int64_t n_rows = pick_rows(&rng), h = di_test_random_range(&rng, 1, 200);
    if (seed & 4)
        h = DI_ROUND_UP(h, seed & 8 ? 128 : 32);
    di_dtype dtype = di_test_random(&rng) & 1 ? DI_F32 : DI_BF16;
    g.x = ops_act_random(&mem, &rng, dtype, n_rows, g.m * h);
    g.f = ops_act_random(&mem, &rng, dtype, n_rows, h);
    g.pre = ops_act_random(&mem, &rng, DI_F32, n_rows, g.m);
    g.comb = ops_act_random(&mem, &rng, DI_F32, n_rows, g.m * g.m);
    g.fn = ops_mat_random(&mem, &rng, DI_F32, (2 + g.m) * g.m, g.m * h);
    g.base = ops_mat_random(&mem, &rng, DI_F32, 1, (2 + g.m) * g.m);
    op_case mix = {n_rows, di_dtype_bytes(dtype, (size_t)h) + 4 * (size_t)((2 + g.m) * g.m), run_mix, &g};
    check_case(&mix, &rng);
    op_case post = {n_rows, di_dtype_bytes(dtype, (size_t)(g.m * h)), run_post, &g};
    check_case(&post, &rng);
    ops_mem_free(&mem);
}

/* ---- Engram ---- */

typedef struct engram_ctx {
    di_act table, x, kv;
    di_mat qk;
    int32_t grams[ROWS_MAX * 4];
    uint8_t skip[ROWS_MAX];
} engram_ctx;

enum { EG_HEADS = 2, EG_COLS = 3 * EG_HEADS, EG_DIM = 32, EG_M = 4 };

/* Hash, lookup and gate one after the other. */
static void run_engram(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n,
                       uint8_t *out) {
    const engram_ctx *g = c->ctx;
    const int64_t mult[4] = {8437364068238481, 532881113154025, 3959239832743293, 8146170270474473};
    const int64_t primes[EG_COLS] = {3, 5, 7, 11, 13, 17}, offsets[EG_COLS] = {0, 3, 8, 15, 26, 39};
    int32_t *grams = ops_mem_take(mem, (size_t)n * 16);
    uint8_t *skip = ops_mem_take(mem, (size_t)n);
    int64_t *ids = ops_mem_take(mem, (size_t)n * EG_COLS * 8);
    for (int64_t i = 0; i < n; i++) {
        memcpy(grams + 4 * i, g->grams + 4 * rows[i], 16);
        skip[i] = g->skip[rows[i]];
    }
    di_engram_hash_args hash = {.grams = grams,
                                .n = (int32_t)n,
                                .n_gram = 4,
                                .n_heads = EG_HEADS,
                                .mult = mult,
                                .primes = primes,
                                .offsets = offsets,
                                .rows = ids};
    assert_int_equal(di_cpu_ops.engram_hash(stream, &hash), DI_OK);
    di_act e = ops_act_empty(mem, DI_F8_E4M3, n, EG_COLS * EG_DIM);
    di_engram_gather_args gather = {.codes = g->table.data,
                                    .scales = g->table.scale,
                                    .n_table = g->table.n_rows,
                                    .dim = EG_DIM,
                                    .n_cols = EG_COLS,
                                    .rows = ids,
                                    .out = e};
    assert_int_equal(di_cpu_ops.engram_gather(stream, &gather), DI_OK);
    di_act x = ops_act_pick(mem, &g->x, rows, n);
    float *gate = ops_mem_take(mem, (size_t)(n * EG_M) * sizeof *gate);
    di_engram_gate_args add = {.x = x,
                               .kv = ops_act_pick(mem, &g->kv, rows, n),
                               .m = EG_M,
                               .qk = g->qk.data,
                               .skip = skip,
                               .eps = 1e-20f,
                               .gate = gate};
    assert_int_equal(di_cpu_ops.engram_gate(stream, &add), DI_OK);
    size_t at = di_dtype_bytes(x.dtype, (size_t)x.n_cols);
    copy_rows(&x, out, c->row_bytes, 0);
    copy_rows(&e, out, c->row_bytes, at);
    for (int64_t i = 0; i < n; i++)
        memcpy(out + (size_t)i * c->row_bytes + at + EG_COLS * EG_DIM, gate + i * EG_M, 4 * EG_M);
}

DI_PROPERTY(engram_rows_stand_alone, 20) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    static engram_ctx g;
    int64_t n_rows = pick_rows(&rng), h = di_test_random_range(&rng, 1, 130);
    di_dtype dtype = seed & 1 ? DI_F32 : DI_BF16;
    g.table = ops_act_random(&mem, &rng, DI_F8_E4M3, 50, EG_DIM); /* some hashed rows lie beyond it */
    g.x = ops_act_random(&mem, &rng, dtype, n_rows, EG_M * h);
    g.kv = ops_act_random(&mem, &rng, dtype, n_rows, (EG_M + 1) * h);
    g.qk = ops_mat_random(&mem, &rng, DI_F32, EG_M, h);
    for (int i = 0; i < ROWS_MAX * 4; i++)
        g.grams[i] = (int32_t)di_test_random_range(&rng, 0, 899);
    for (int i = 0; i < ROWS_MAX; i++)
        g.skip[i] = di_test_random_range(&rng, 0, 4) == 0;
    op_case c = {n_rows, di_dtype_bytes(dtype, (size_t)(EG_M * h)) + EG_COLS * EG_DIM + 4 * EG_M, run_engram, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

/* ---- mixture of experts ---- */

typedef struct moe_ctx {
    di_act x, y; /* real rows for the router, and what the experts read */
    di_mat gate, bias;
    uint8_t is_image[ROWS_MAX];
    di_expert experts[13];
    int32_t k, n_experts;
    bool has_shared;
} moe_ctx;

/* The router, then the experts that it chose. */
static void run_moe(const op_case *c, di_stream *stream, ops_mem *mem, const int64_t *rows, int64_t n, uint8_t *out) {
    const moe_ctx *g = c->ctx;
    di_act x = ops_act_pick(mem, &g->x, rows, n), weight = ops_act_empty(mem, DI_F32, n, g->k);
    di_act idx = ops_act_empty(mem, DI_F32, n, g->k); /* as many bytes as int32 */
    uint8_t *is_image = ops_mem_take(mem, (size_t)n);
    for (int64_t i = 0; i < n; i++)
        is_image[i] = g->is_image[rows[i]];
    di_moe_route_args route = {.x = x,
                               .gate = &g->gate,
                               .bias = g->bias.data,
                               .bias_vl = (const float *)g->bias.data + g->n_experts,
                               .is_image = is_image,
                               .k = g->k,
                               .factor = 1.5f,
                               .idx = idx.data,
                               .weight = weight.data};
    assert_int_equal(di_cpu_ops.moe_route(stream, &route), DI_OK);
    di_act result = ops_act_empty(mem, g->y.dtype == DI_F32 ? DI_F32 : DI_BF16, n, g->y.n_cols);
    di_moe_args args = {.x = ops_act_pick(mem, &g->y, rows, n),
                        .idx = idx.data,
                        .weight = weight.data,
                        .k = g->k,
                        .n_experts = g->n_experts,
                        .experts = g->experts,
                        .shared = g->has_shared ? &g->experts[12] : NULL,
                        .limit = 2.0f,
                        .out = result};
    assert_int_equal(di_cpu_ops.moe(stream, &args), DI_OK);
    copy_rows(&idx, out, c->row_bytes, 0);
    copy_rows(&weight, out, c->row_bytes, 4 * (size_t)g->k);
    copy_rows(&result, out, c->row_bytes, 8 * (size_t)g->k);
}

DI_PROPERTY(moe_rows_stand_alone, 25) {
    uint64_t rng = seed;
    ops_mem mem = {0};
    moe_ctx g = {.n_experts = (int32_t)di_test_random_range(&rng, 1, 12), .has_shared = di_test_random(&rng) & 1};
    g.k = (int32_t)di_test_random_range(&rng, 1, DI_MIN(g.n_experts, 6));
    int64_t n_rows = pick_rows(&rng), h = 32 * di_test_random_range(&rng, 1, 5),
            inner = 32 * di_test_random_range(&rng, 1, 4);
    bool is_faithful = di_test_random(&rng) & 1;
    g.x = ops_act_random(&mem, &rng, is_faithful ? DI_BF16 : DI_F32, n_rows, h);
    g.y = ops_act_random(&mem, &rng, is_faithful ? DI_F8_E4M3 : DI_F32, n_rows, h);
    g.gate = ops_mat_random(&mem, &rng, DI_BF16, g.n_experts, h);
    g.bias = ops_mat_random(&mem, &rng, DI_F32, 2, g.n_experts);
    for (int i = 0; i < ROWS_MAX; i++)
        g.is_image[i] = di_test_random_range(&rng, 0, 3) == 0;
    for (int e = 0; e < 13; e++) {
        di_dtype w = e < 12 ? DI_F4_E2M1 : DI_F8_E4M3;
        g.experts[e].w1 = ops_mat_random(&mem, &rng, w, inner, h);
        g.experts[e].w3 = ops_mat_random(&mem, &rng, w, inner, h);
        g.experts[e].w2 = ops_mat_random(&mem, &rng, w, h, inner);
    }
    op_case c = {n_rows, 8 * (size_t)g.k + (size_t)h * (is_faithful ? 2 : 4), run_moe, &g};
    check_case(&c, &rng);
    ops_mem_free(&mem);
}

DI_TEST_GROUP(ops_dense, cmocka_unit_test(gemm_rows_stand_alone), cmocka_unit_test(rms_norm_rows_stand_alone),
              cmocka_unit_test(quant_rows_stand_alone), cmocka_unit_test(embed_rows_stand_alone),
              cmocka_unit_test(stream_mean_rows_stand_alone), cmocka_unit_test(rope_rows_stand_alone),
              cmocka_unit_test(hc_rows_stand_alone), cmocka_unit_test(engram_rows_stand_alone),
              cmocka_unit_test(moe_rows_stand_alone));
