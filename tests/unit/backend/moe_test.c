/* moe_route and moe at every level: choices, ties and weights; outputs in double (exact) and by the quantisers
 * (faithful). */
#include "ops_mat.h"

/* ---- routing ---- */

static void route_matches_double(void **state) {
    (void)state;
    enum { N = 19, H = 96, E = 16, K = 5 };
    di_limits limits = ops_mat_limits();
    uint64_t rng = 1;
    ops_mem mem = {0};
    di_act x = ops_act_random(&mem, &rng, DI_BF16, N, H);
    di_mat gate = ops_mat_random(&mem, &rng, DI_BF16, E, H), bias = ops_mat_random(&mem, &rng, DI_F32, 2, E);
    const float *bias_text = bias.data, *bias_image = bias_text + E;
    uint8_t is_image[N] = {0};
    is_image[3] = is_image[11] = 1;
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        int32_t idx[N * K];
        float weight[N * K];
        di_moe_route_args args = {.x = x,
                                  .gate = &gate,
                                  .bias = bias_text,
                                  .bias_vl = bias_image,
                                  .is_image = is_image,
                                  .k = K,
                                  .factor = 1.5f,
                                  .idx = idx,
                                  .weight = weight};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.moe_route(rig.stream, &args), DI_OK);
        for (int row = 0; row < N; row++) {
            double score[E], sum = 0;
            const float *b = is_image[row] ? bias_image : bias_text;
            for (int e = 0; e < E; e++) {
                double v = 0;
                for (int i = 0; i < H; i++)
                    v += ops_act_value(&x, row, i) * ops_mat_value(&gate, e, i);
                score[e] = sqrt(log1p(exp(v)));
            }
            bool is_chosen[E] = {false};
            for (int k = 0; k < K; k++) {
                int e = idx[row * K + k];
                assert_true(e >= 0 && e < E && !is_chosen[e]);
                is_chosen[e] = true;
                sum += score[e];
                if (k) { /* best first */
                    int before = idx[row * K + k - 1];
                    assert_true(score[e] + b[e] <= score[before] + b[before] + 1e-5);
                }
            }
            int last = idx[row * K + K - 1];
            for (int e = 0; e < E; e++) {
                assert_true(is_chosen[e] || score[e] + b[e] <= score[last] + b[last] + 1e-5);
            }
            for (int k = 0; k < K; k++)
                ops_close(weight[row * K + k], score[idx[row * K + k]] / sum * 1.5, 1e-5);
        }
        args.k = E + 1;
        assert_int_equal(di_cpu_ops.moe_route(rig.stream, &args), DI_ERR_SHAPE);
        ops_rig_close(&rig);
    }
    ops_mem_free(&mem);
}

/* Equal scores: the lower expert first. A logit beyond 20 is its own softplus; the bias moves the choice, not the
 * weight. */
static void route_breaks_ties_low(void **state) {
    (void)state;
    enum { H = 32, E = 6, K = 3 };
    di_limits limits = ops_mat_limits();
    uint16_t gate_data[E * H] = {0}, x_data[H] = {0};
    x_data[0] = di_f32_to_bf16(1.0f);
    const float logits[E] = {0, 25, 0, 0, 25, -200};
    for (int e = 0; e < E; e++)
        gate_data[e * H] = di_f32_to_bf16(logits[e]);
    const float bias[E] = {0, 0, 0, 0, 0, 0}, lifted[E] = {0, 0, 0, 100, 0, 0};
    di_mat gate = {DI_BF16, E, H, gate_data, NULL};
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        int32_t idx[K];
        float weight[K];
        di_moe_route_args args = {.x = {DI_BF16, 1, H, H, x_data, NULL},
                                  .gate = &gate,
                                  .bias = bias,
                                  .k = K,
                                  .factor = 1,
                                  .idx = idx,
                                  .weight = weight};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.moe_route(rig.stream, &args), DI_OK);
        assert_int_equal(idx[0], 1);
        assert_int_equal(idx[1], 4);
        assert_int_equal(idx[2], 0);
        double s0 = sqrt(log(2)), sum = 5 + 5 + s0;
        ops_close(weight[0], 5 / sum, 1e-6);
        ops_close(weight[2], s0 / sum, 1e-6);
        args.bias = lifted;
        assert_int_equal(di_cpu_ops.moe_route(rig.stream, &args), DI_OK);
        assert_int_equal(idx[0], 3);
        assert_int_equal(idx[1], 1);
        assert_int_equal(idx[2], 4);
        ops_close(weight[0], s0 / sum, 1e-6);
        ops_rig_close(&rig);
    }
}

/* ---- experts ---- */

enum { EXPERTS = 7 };

static void make_experts(ops_mem *mem, uint64_t *rng, int64_t h, int64_t inner, di_expert *experts) {
    for (int e = 0; e <= EXPERTS; e++) { /* the last is the shared one: FP8 */
        di_dtype dtype = e < EXPERTS ? DI_F4_E2M1 : DI_F8_E4M3;
        experts[e].w1 = ops_mat_random(mem, rng, dtype, inner, h);
        experts[e].w3 = ops_mat_random(mem, rng, dtype, inner, h);
        experts[e].w2 = ops_mat_random(mem, rng, dtype, h, inner);
    }
}

/* Distinct random experts a row; expert 2 is never chosen. */
static void choose(uint64_t *rng, int64_t n, int32_t k, int32_t *idx, float *weight) {
    for (int64_t row = 0; row < n; row++) {
        bool is_used[EXPERTS] = {false, false, true};
        for (int32_t i = 0; i < k; i++) {
            int32_t e;
            do
                e = (int32_t)di_test_random_range(rng, 0, EXPERTS - 1);
            while (is_used[e]);
            is_used[e] = true;
            idx[row * k + i] = e;
            weight[row * k + i] = (float)(0.1 + di_test_random_unit(rng));
        }
    }
}

static float product(const di_mat *w, int64_t o, const float *x, float *buf) {
    for (int64_t i = 0; i < w->n_in; i++)
        buf[i] = (float)ops_mat_value(w, o, i);
    return ops_dot32(x, buf, w->n_in);
}

/* One row by the text of model.md 3.10, with the sums of ops_dot32. */
static void moe_row(const di_act *x, int64_t row, const int32_t *idx, const float *weight, int32_t k,
                    const di_expert *experts, const di_expert *shared, float limit, float *out) {
    bool is_faithful = x->dtype == DI_F8_E4M3;
    int64_t h = x->n_cols, inner = experts[0].w1.n_out;
    float *xf = ops_rig_alloc((size_t)h * 4), *act = ops_rig_alloc((size_t)inner * 4),
          *buf = ops_rig_alloc((size_t)(h + inner) * 4);
    uint8_t *codes = ops_rig_alloc((size_t)inner), *scales = ops_rig_alloc((size_t)inner);
    for (int64_t i = 0; i < h; i++)
        xf[i] = (float)ops_act_value(x, row, i), out[i] = 0;
    for (int e = 0; e <= EXPERTS; e++) {
        const di_expert *expert = e < EXPERTS ? NULL : shared;
        float w = 1;
        for (int32_t i = 0; i < k && e < EXPERTS; i++) {
            if (idx[i] == e)
                expert = &experts[e], w = weight[i];
        }
        if (!expert)
            continue;
        for (int64_t i = 0; i < inner; i++) {
            float g = product(&expert->w1, i, xf, buf), u = product(&expert->w3, i, xf, buf);
            if (is_faithful)
                g = di_round_bf16(g), u = di_round_bf16(u);
            if (limit > 0)
                g = fminf(g, limit), u = fmaxf(fminf(u, limit), -limit);
            act[i] = g / (1 + di_expf(-g)) * u * w;
        }
        if (is_faithful) {
            di_quant_qa(act, inner, codes, scales);
            for (int64_t i = 0; i < inner; i++)
                act[i] = (float)(ops_rig_e4m3(codes[i]) * ldexp(1, scales[i / 32] - 127));
        }
        for (int64_t o = 0; o < h; o++) {
            float y = product(&expert->w2, o, act, buf);
            out[o] += is_faithful ? di_round_bf16(y) : y;
        }
    }
    for (int64_t o = 0; o < h && is_faithful; o++)
        out[o] = di_round_bf16(out[o]);
    free(xf), free(act), free(buf), free(codes), free(scales);
}

static void moe_sums_experts_in_order(void **state) {
    (void)state;
    /* rows: decode, a small batch, and enough for full panels and an odd rest */
    const struct {
        int64_t n, h, inner;
        int32_t k;
        bool is_faithful, has_shared;
        float limit;
    } cases[] = {
        {1, 64, 64, 4, true, true, 10.0f},  {6, 96, 32, 3, true, true, 1.0f},   {45, 64, 96, 4, true, false, 10.0f},
        {1, 64, 64, 4, false, true, 10.0f}, {33, 64, 70, 2, false, true, 0.0f}, {5, 40, 32, 0, false, true, 0.5f},
    };
    uint64_t rng = 2;
    for (size_t c = 0; c < DI_COUNT(cases); c++) {
        int64_t n = cases[c].n, h = cases[c].h, inner = cases[c].inner;
        int32_t k = cases[c].k;
        ops_mem mem = {0};
        di_expert experts[EXPERTS + 1];
        if (h % 32 || inner % 32) { /* FP4 has whole groups only */
            for (int e = 0; e <= EXPERTS; e++) {
                experts[e].w1 = ops_mat_random(&mem, &rng, DI_F8_E4M3, inner, h);
                experts[e].w3 = ops_mat_random(&mem, &rng, DI_F8_E4M3, inner, h);
                experts[e].w2 = ops_mat_random(&mem, &rng, DI_F8_E4M3, h, inner);
            }
        } else {
            make_experts(&mem, &rng, h, inner, experts);
        }
        const di_expert *shared = cases[c].has_shared ? &experts[EXPERTS] : NULL;
        di_act x = ops_act_random(&mem, &rng, cases[c].is_faithful ? DI_F8_E4M3 : DI_F32, n, h);
        int32_t *idx = ops_mem_take(&mem, (size_t)(n * k + 1) * sizeof *idx);
        float *weight = ops_mem_take(&mem, (size_t)(n * k + 1) * sizeof *weight),
              *want = ops_mem_take(&mem, (size_t)h * 4);
        choose(&rng, n, k, idx, weight);
        di_dtype dtype = cases[c].is_faithful ? DI_BF16 : DI_F32;
        di_limits limits = ops_mat_limits();
        for (int variant = 0; variant < ops_rig_variants(); variant++) {
            di_act out = ops_act_empty(&mem, dtype, n, h);
            di_expert broken = experts[2];
            experts[2].w1.data = experts[2].w2.data = experts[2].w3.data = NULL; /* nobody's choice is not touched */
            di_moe_args args = {.x = x,
                                .idx = idx,
                                .weight = weight,
                                .k = k,
                                .n_experts = EXPERTS,
                                .experts = experts,
                                .shared = shared,
                                .limit = cases[c].limit,
                                .out = out};
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_OK);
            experts[2] = broken;
            for (int64_t row = 0; row < n; row++) {
                moe_row(&x, row, idx + row * k, weight + row * k, k, experts, shared, cases[c].limit, want);
                for (int64_t o = 0; o < h; o++) {
                    float got = (float)ops_act_value(&out, row, o);
                    if (got != want[o])
                        fail_msg("case %zu variant %d row %d out %d: %g, expected %g", c, variant, (int)row, (int)o,
                                 got, want[o]);
                }
            }
            if (k) {
                idx[0] = EXPERTS; /* no such expert */
                assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_ERR_SHAPE);
                idx[0] = idx[1]; /* the same one twice */
                if (k > 1)
                    assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_ERR_SHAPE);
                choose(&rng, 1, k, idx, weight);
            }
            ops_rig_close(&rig);
        }
        ops_mem_free(&mem);
    }
}

/* The exact path against double, so that the order of sums above is not taken for the formula. */
static void moe_matches_double(void **state) {
    (void)state;
    enum { N = 3, H = 64, I = 32, K = 2 };
    uint64_t rng = 4;
    ops_mem mem = {0};
    di_expert experts[EXPERTS + 1];
    make_experts(&mem, &rng, H, I, experts);
    di_act x = ops_act_random(&mem, &rng, DI_F32, N, H);
    int32_t idx[N * K];
    float weight[N * K];
    choose(&rng, N, K, idx, weight);
    di_limits limits = ops_mat_limits();
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        di_act out = ops_act_empty(&mem, DI_F32, N, H);
        di_moe_args args = {.x = x,
                            .idx = idx,
                            .weight = weight,
                            .k = K,
                            .n_experts = EXPERTS,
                            .experts = experts,
                            .shared = &experts[EXPERTS],
                            .limit = 10.0f,
                            .out = out};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_OK);
        for (int row = 0; row < N; row++) {
            double sum[H] = {0}, size[H] = {0};
            for (int i = 0; i <= K; i++) {
                const di_expert *e = i < K ? &experts[idx[row * K + i]] : &experts[EXPERTS];
                double act[I];
                for (int j = 0; j < I; j++) {
                    double g = 0, u = 0;
                    for (int c = 0; c < H; c++) {
                        g += ops_mat_value(&e->w1, j, c) * ops_act_value(&x, row, c);
                        u += ops_mat_value(&e->w3, j, c) * ops_act_value(&x, row, c);
                    }
                    g = fmin(g, 10), u = fmax(fmin(u, 10), -10);
                    act[j] = g / (1 + exp(-g)) * u * (i < K ? weight[row * K + i] : 1);
                }
                for (int o = 0; o < H; o++) {
                    for (int j = 0; j < I; j++) {
                        sum[o] += ops_mat_value(&e->w2, o, j) * act[j];
                        size[o] += fabs(ops_mat_value(&e->w2, o, j)) * (fabs(act[j]) + 1);
                    }
                }
            }
            for (int o = 0; o < H; o++)
                ops_close(ops_act_value(&out, row, o), sum[o], 2e-5 * size[o]);
        }
        ops_rig_close(&rig);
    }
    ops_mem_free(&mem);
}

/* More rows than a batch of pairs holds: one expert's rows are cut, all sums stay. Every row must equal the row alone.
 */
static void moe_cuts_a_popular_expert(void **state) {
    (void)state;
    enum { N = 1300, H = 32, I = 32 };
    uint64_t rng = 5;
    ops_mem mem = {0};
    di_expert experts[EXPERTS + 1];
    make_experts(&mem, &rng, H, I, experts);
    di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, N, H);
    int32_t *idx = ops_mem_take(&mem, 2 * N * sizeof *idx);
    float *weight = ops_mem_take(&mem, 2 * N * sizeof *weight);
    for (int64_t row = 0; row < N; row++) {
        idx[2 * row] = 4; /* everybody's first choice */
        idx[2 * row + 1] = row % 3 ? 1 : 6;
        weight[2 * row] = 0.5f, weight[2 * row + 1] = 1.25f;
    }
    di_limits limits = ops_mat_limits();
    limits.rows_max = N;
    ops_rig rig;
    ops_rig_open(&rig, di_cpu_level_best(), 2, &limits);
    di_act out = ops_act_empty(&mem, DI_BF16, N, H), alone = ops_act_empty(&mem, DI_BF16, 1, H);
    di_moe_args args = {.x = x,
                        .idx = idx,
                        .weight = weight,
                        .k = 2,
                        .n_experts = EXPERTS,
                        .experts = experts,
                        .shared = &experts[EXPERTS],
                        .limit = 10.0f,
                        .out = out};
    assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_OK);
    for (int64_t row = 0; row < N; row += 7) {
        di_moe_args one = args;
        one.x = (di_act){DI_F8_E4M3, 1, H, H, (uint8_t *)x.data + row * H, x.scale + row};
        one.idx = idx + 2 * row, one.weight = weight + 2 * row, one.out = alone;
        assert_int_equal(di_cpu_ops.moe(rig.stream, &one), DI_OK);
        assert_memory_equal((uint16_t *)out.data + row * H, alone.data, H * sizeof(uint16_t));
    }
    ops_rig_close(&rig);
    ops_mem_free(&mem);
}

DI_TEST_GROUP(backend_moe, cmocka_unit_test(route_matches_double), cmocka_unit_test(route_breaks_ties_low),
              cmocka_unit_test(moe_sums_experts_in_order), cmocka_unit_test(moe_matches_double),
              cmocka_unit_test(moe_cuts_a_popular_expert));
