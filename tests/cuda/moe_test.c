/* moe_route and moe on the NVIDIA backend against the CPU's reference: the portable kernels have its
 * bits; the fast kernels stay within a bound of it, give a row the same bits in any batch, and repeat themselves. */
#include "twin.h"

/* ---- cases --------------------------------------------------------------------------------------------------------
 */

static di_limits limits_of(int64_t rows, int64_t h, int64_t inner, int64_t experts, int64_t k) {
    return (di_limits){.rows_max = rows,
                       .n_in_max = DI_MAX(h, inner),
                       .n_out_max = DI_MAX(h, inner),
                       .entries_max = 64,
                       .keys_max = 64,
                       .head_dim = 64,
                       .n_heads = 8,
                       .index_heads = 4,
                       .index_dim = 64,
                       .experts_max = experts,
                       .experts_per_row_max = k,
                       .intermediate = inner,
                       .hidden_size = h,
                       .candidate_blocks = 8};
}

/* ---- router ---- */

typedef struct route_case {
    ops_mem mem;
    di_mat gate;
    di_moe_route_args a; /* in host memory */
    di_mat dev_gate;
    di_moe_route_args d;
    size_t bytes; /* of choices, of weights */
    bool has_ties;
} route_case;

static void route_make(route_case *c, twin *t, uint64_t *rng, di_dtype dtype, int64_t n, int64_t h, int64_t experts,
                       int32_t k, int64_t stride, bool has_ties) {
    memset(c, 0, sizeof *c);
    c->has_ties = has_ties;
    di_act x = ops_act_empty(&c->mem, dtype, n, stride);
    for (int64_t i = 0; i < n * stride; i++) {
        float v = 2 * ops_mat_noise(rng);
        if (dtype == DI_F32)
            ((float *)x.data)[i] = v;
        else
            ((uint16_t *)x.data)[i] = di_f32_to_bf16(v);
    }
    x.n_cols = h;
    c->gate = ops_mat_random(&c->mem, rng, DI_BF16, experts, h);
    uint16_t *gate = (uint16_t *)c->gate.data;
    for (int64_t i = 0; i < experts * h; i++) /* logits of a few units */
        gate[i] = di_f32_to_bf16(di_bf16_to_f32(gate[i]) * (float)(3.0 / sqrt((double)h)));
    for (int64_t e = 1; has_ties && e < experts; e += 2) /* experts 2i and 2i + 1 have equal scores */
        memcpy(gate + e * h, gate + (e - 1) * h, (size_t)h * 2);
    float *bias = ops_mem_take(&c->mem, (size_t)experts * 8);
    for (int64_t e = 0; e < 2 * experts; e++)
        bias[e] = has_ties ? 0.25f : 0.2f * ops_mat_noise(rng);
    uint8_t *is_image = ops_mem_take(&c->mem, (size_t)n);
    for (int64_t i = 0; i < n; i++)
        is_image[i] = di_test_random_range(rng, 0, 3) == 0;
    c->bytes = (size_t)(n * k) * 4;
    c->a = (di_moe_route_args){.x = x,
                               .gate = &c->gate,
                               .bias = bias,
                               .bias_vl = bias + experts,
                               .is_image = is_image,
                               .k = k,
                               .factor = 1.5f,
                               .idx = ops_mem_take(&c->mem, c->bytes),
                               .weight = ops_mem_take(&c->mem, c->bytes)};
    c->dev_gate = twin_mat_in(t, &c->gate);
    c->d = c->a;
    c->d.x = twin_act_in(t, &x);
    c->d.gate = &c->dev_gate;
    c->d.bias = twin_in(t, bias, (size_t)experts * 4);
    c->d.bias_vl = twin_in(t, bias + experts, (size_t)experts * 4);
    c->d.is_image = twin_in(t, is_image, (size_t)n);
    c->d.idx = twin_out(t, c->bytes);
    c->d.weight = twin_out(t, c->bytes);
}

static void route_drop(route_case *c, twin *t) {
    twin_drop(t);
    ops_mem_free(&c->mem);
}

static void check_route(twin *t, uint64_t *rng, di_dtype dtype, int64_t n, int64_t h, int64_t experts, int32_t k,
                        int64_t stride, bool has_ties) {
    route_case c;
    route_make(&c, t, rng, dtype, n, h, experts, k, stride, has_ties);
    assert_int_equal(di_cpu_ops.moe_route(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->moe_route(t->stream, &c.d), DI_OK);
    void *got = ops_mem_take(&c.mem, c.bytes);
    twin_back(t, got, c.d.idx, c.bytes);
    twin_same(got, c.a.idx, c.bytes, "choices");
    twin_back(t, got, c.d.weight, c.bytes);
    twin_same(got, c.a.weight, c.bytes, "weights");
    c.d.k = (int32_t)experts + 1;
    assert_int_equal(t->gpu.ops->moe_route(t->stream, &c.d), DI_ERR_SHAPE);
    route_drop(&c, t);
}

/* The choice of a row by logits of the tensor cores. Products of bf16 are exact, sums are off as in gemm_test.c by
 * 2^-22 of the magnitudes for each input; the slope of sqrt(softplus) is below 1/2. So each choice is the best of those
 * left but for twice that, and equal experts, whose logits have equal bits, are chosen with the lower one first. */
static void fast_route_row(const route_case *c, int64_t row, const int32_t *idx, const float *weight) {
    const di_moe_route_args *a = &c->a;
    int64_t h = c->gate.n_in, experts = c->gate.n_out;
    const float *bias = a->is_image[row] ? a->bias_vl : a->bias;
    double score[512], bound = 0, sum = 0;
    bool is_taken[512] = {0};
    for (int64_t e = 0; e < experts; e++) {
        double y = 0, size = 0;
        for (int64_t i = 0; i < h; i++) {
            double p = ops_act_value(&a->x, row, i) * ops_mat_value(&c->gate, e, i);
            y += p;
            size += fabs(p);
        }
        score[e] = sqrt(y > 20 ? y : log1p(exp(y)));
        bound = fmax(bound, (double)h * 0x1p-23 * size + 0x1p-20);
    }
    for (int32_t i = 0; i < a->k; i++)
        sum += score[idx[i]];
    for (int32_t i = 0; i < a->k; i++) {
        int32_t at = idx[i];
        assert_true(at >= 0 && at < experts && !is_taken[at]);
        for (int64_t e = 0; e < experts; e++) {
            if (!is_taken[e] && score[e] + bias[e] > score[at] + bias[at] + 2 * bound)
                fail_msg("row %d, choice %d: expert %d has %.9g, expert %d %.9g", (int)row, i, at, score[at] + bias[at],
                         (int)e, score[e] + bias[e]);
        }
        if (c->has_ties && at % 2)
            assert_true(is_taken[at - 1]);
        is_taken[at] = true;
        double want = score[at] / sum * (double)a->factor,
               off = want * (bound / score[at] + a->k * bound / sum + 0x1p-20);
        if (!(fabs(weight[i] - want) <= off))
            fail_msg("row %d, choice %d: weight %.9g, expected %.9g within %.3g", (int)row, i, weight[i], want, off);
    }
}

/* Rows 0.. alone, then more and more of them together: the same choices, the same bits of weights. */
static void check_fast_route(twin *t, uint64_t *rng, const int64_t *rows, int64_t h, int64_t experts, int32_t k,
                             int64_t stride, bool has_ties) {
    route_case c;
    int64_t n_max = 0, before = 0;
    for (int r = 0; rows[r]; r++)
        n_max = rows[r];
    route_make(&c, t, rng, DI_BF16, n_max, h, experts, k, stride, has_ties);
    int32_t *idx = ops_mem_take(&c.mem, c.bytes), *idx_before = ops_mem_take(&c.mem, c.bytes);
    float *weight = ops_mem_take(&c.mem, c.bytes), *weight_before = ops_mem_take(&c.mem, c.bytes);
    for (int r = 0; rows[r]; r++) {
        size_t bytes = (size_t)(rows[r] * k) * 4;
        c.d.x.n_rows = rows[r];
        assert_int_equal(t->gpu.ops->moe_route(t->stream, &c.d), DI_OK);
        twin_back(t, idx, c.d.idx, bytes);
        twin_back(t, weight, c.d.weight, bytes);
        twin_same(idx, idx_before, (size_t)(before * k) * 4, "choices of a larger batch");
        twin_same(weight, weight_before, (size_t)(before * k) * 4, "weights of a larger batch");
        memcpy(idx_before, idx, bytes);
        memcpy(weight_before, weight, bytes);
        before = rows[r];
    }
    for (int64_t row = 0; row < n_max; row += row < 4 || n_max < 70 ? 1 : n_max / 37)
        fast_route_row(&c, row, idx + row * k, weight + row * k);
    route_drop(&c, t);
}

DI_PROPERTY(route_has_the_references_bits, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(900, 5120, 256, 384, 8);
    twin t;
    twin_open(&t, &limits, "portable");
    check_route(&t, &rng, DI_BF16, 1, 5120, 384, 6, 5120, false); /* as released */
    check_route(&t, &rng, DI_BF16, 5, 5120, 384, 6, 5120, true);
    check_route(&t, &rng, DI_BF16, 19, 5120, 128, 3, 5136, false);
    check_route(&t, &rng, DI_F32, 3, 5120, 384, 6, 5120, false);
    check_route(&t, &rng, DI_BF16, 9, 1000, 7, 7, 1001, false); /* no group of 32 at the end, no alignment */
    check_route(&t, &rng, DI_F32, 9, 100, 33, 2, 101, true);
    check_route(&t, &rng, DI_BF16, 35, 3200, 30, 6, 3208, true); /* operands in stages, the last one partial */
    check_route(&t, &rng, DI_BF16, 201, 160, 90, 6, 160, true);  /* many rows; fewer groups than warps */
    check_route(&t, &rng, DI_BF16, 530, 512, 70, 6, 512, false);
    check_route(&t, &rng, DI_BF16, 600, 256, 64, 4, 256, true);
    check_route(&t, &rng, DI_F32, 515, 72, 66, 4, 73, false);
    for (int i = 0; i < 8; i++) {
        int64_t experts = di_test_random_range(&rng, 1, 100), h = 32 * di_test_random_range(&rng, 1, 12);
        check_route(&t, &rng, di_test_random(&rng) & 1 ? DI_BF16 : DI_F32, di_test_random_range(&rng, 1, 40), h,
                    experts, (int32_t)di_test_random_range(&rng, 1, DI_MIN(experts, 8)), h, di_test_random(&rng) & 1);
    }
    twin_close(&t);
}

DI_PROPERTY(fast_route_chooses_the_best, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(9000, 5120, 256, 384, 8);
    twin t;
    twin_open(&t, &limits, "sm90");
#ifdef DI_TWIN_EMU /* a thousandth of the rate */
    check_fast_route(&t, &rng, (int64_t[]){1, 3, 0}, 5120, 384, 6, 5120, false);
    check_fast_route(&t, &rng, (int64_t[]){1, 9, 70, 300, 2100, 0}, 128, 36, 6, 136, true);
    check_fast_route(&t, &rng, (int64_t[]){2, 65, 200, 0}, 640, 72, 6, 640, false);
#else
    check_fast_route(&t, &rng, (int64_t[]){1, 5, 64, 65, 130, 300, 1000, 3000, 9000, 0}, 5120, 384, 6, 5120, false);
    check_fast_route(&t, &rng, (int64_t[]){1, 64, 257, 2500, 0}, 5120, 128, 3, 5136, true);
    check_fast_route(&t, &rng, (int64_t[]){2, 65, 200, 5000, 0}, 640, 72, 6, 640, true);
#endif
    check_fast_route(&t, &rng, (int64_t[]){3, 64, 66, 0}, 256, 7, 7, 256, false); /* odd outputs */
    twin_close(&t);
}

/* ---- experts ---- */

typedef struct moe_case {
    ops_mem mem;
    int64_t n, h, inner;
    int32_t k, n_experts;
    di_expert *experts, *experts_d; /* host memory both; the second with matrices on the device; the shared one last */
    bool has_shared;
    di_moe_args a, d; /* of the host, of the device */
    void *table;
} moe_case;

/* Experts of a row: distinct; `skew` makes low ids more likely, so that some experts have many rows and some none. */
static void choose(uint64_t *rng, moe_case *c, int32_t *idx, float *weight, double skew) {
    for (int64_t row = 0; row < c->n; row++) {
        for (int32_t i = 0; i < c->k; i++) {
            bool is_taken = true;
            while (is_taken) {
                idx[row * c->k + i] = (int32_t)(c->n_experts * pow(di_test_random_unit(rng), skew)) % c->n_experts;
                is_taken = false;
                for (int32_t j = 0; j < i; j++)
                    is_taken |= idx[row * c->k + j] == idx[row * c->k + i];
            }
            weight[row * c->k + i] = (float)(0.1 + di_test_random_unit(rng));
        }
    }
}

static void make_case(twin *t, moe_case *c, uint64_t *rng, di_dtype x_dtype, di_dtype expert_dtype,
                      di_dtype shared_dtype, double skew) {
    c->mem = (ops_mem){0};
    int32_t n_all = c->n_experts + 1;
    c->experts = ops_mem_take(&c->mem, (size_t)n_all * sizeof *c->experts);
    c->experts_d = ops_mem_take(&c->mem, (size_t)n_all * sizeof *c->experts_d);
    for (int32_t e = 0; e < n_all; e++) {
        di_dtype dtype = e < c->n_experts ? expert_dtype : shared_dtype;
        di_expert *x = &c->experts[e], *d = &c->experts_d[e];
        x->w1 = ops_mat_random(&c->mem, rng, dtype, c->inner, c->h);
        x->w3 = ops_mat_random(&c->mem, rng, dtype, c->inner, c->h);
        x->w2 = ops_mat_random(&c->mem, rng, dtype, c->h, c->inner);
        *d = (di_expert){twin_mat_in(t, &x->w1), twin_mat_in(t, &x->w3), twin_mat_in(t, &x->w2)};
    }
    di_act x = ops_act_random(&c->mem, rng, x_dtype, c->n, c->h);
    di_act out = ops_act_empty(&c->mem, x_dtype == DI_F32 ? DI_F32 : DI_BF16, c->n, c->h);
    int32_t *idx = ops_mem_take(&c->mem, (size_t)(c->n * c->k) * 4 + 4);
    float *weight = ops_mem_take(&c->mem, (size_t)(c->n * c->k) * 4 + 4);
    choose(rng, c, idx, weight, skew);
    c->a = (di_moe_args){.x = x,
                         .idx = idx,
                         .weight = weight,
                         .k = c->k,
                         .n_experts = c->n_experts,
                         .experts = c->experts,
                         .shared = c->has_shared ? &c->experts[c->n_experts] : NULL,
                         .limit = 1.5f,
                         .out = out};
    c->d = c->a;
    c->d.x = twin_act_in(t, &x);
    c->d.idx = twin_in(t, idx, (size_t)(c->n * c->k) * 4 + 4);
    c->d.weight = twin_in(t, weight, (size_t)(c->n * c->k) * 4 + 4);
    c->d.experts = c->experts_d;
    c->d.shared = c->has_shared ? &c->experts_d[c->n_experts] : NULL;
    c->d.out = twin_act_out(t, &out);
    di_error err = {0};
    di_test_ok(t->gpu.device->experts_place(t->dev, c->experts_d, c->n_experts, c->d.shared, &c->table, &err), &err);
    c->d.table = c->table;
}

static void end_case(twin *t, moe_case *c) {
    t->gpu.device->free(t->dev, c->table);
    twin_drop(t);
    ops_mem_free(&c->mem);
}

static void check_bits(twin *t, uint64_t *rng, moe_case c, di_dtype x_dtype, di_dtype expert, di_dtype shared) {
    make_case(t, &c, rng, x_dtype, expert, shared, 1.5);
    assert_int_equal(di_cpu_ops.moe(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->moe(t->stream, &c.d), DI_OK);
    twin_act_same(t, &c.d.out, &c.a.out, "moe");
    end_case(t, &c);
}

DI_PROPERTY(portable_moe_has_the_references_bits, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(1100, 5120, 2304, 40, 6);
    twin t;
    twin_open(&t, &limits, "portable");
    check_bits(&t, &rng, (moe_case){.n = 2, .h = 5120, .inner = 2304, .k = 2, .n_experts = 4, .has_shared = true},
               DI_F8_E4M3, DI_F4_E2M1, DI_F8_E4M3);
    check_bits(&t, &rng, (moe_case){.n = 1, .h = 512, .inner = 2304, .k = 6, .n_experts = 40, .has_shared = true},
               DI_F32, DI_F4_E2M1, DI_F8_E4M3);
    /* more choices than one block sorts, and rows of a second pass */
    check_bits(&t, &rng, (moe_case){.n = 1037, .h = 64, .inner = 32, .k = 3, .n_experts = 9, .has_shared = true},
               DI_F8_E4M3, DI_F4_E2M1, DI_F8_E4M3);
    check_bits(&t, &rng, (moe_case){.n = 3, .h = 96, .inner = 64, .k = 0, .n_experts = 0, .has_shared = true},
               DI_F8_E4M3, DI_F4_E2M1, DI_F8_E4M3);
    check_bits(&t, &rng, (moe_case){.n = 11, .h = 50, .inner = 37, .k = 2, .n_experts = 5, .has_shared = true}, DI_F32,
               DI_F32, DI_BF16);
    for (int i = 0; i < 10; i++) {
        int32_t experts = (int32_t)di_test_random_range(&rng, 1, 20);
        moe_case c = {.n = di_test_random_range(&rng, 1, 60),
                      .h = 32 * di_test_random_range(&rng, 1, 9),
                      .inner = 32 * di_test_random_range(&rng, 1, 6),
                      .k = (int32_t)di_test_random_range(&rng, 1, DI_MIN(experts, 6)),
                      .n_experts = experts,
                      .has_shared = di_test_random(&rng) & 1};
        bool is_faithful = di_test_random(&rng) & 1;
        check_bits(&t, &rng, c, is_faithful ? DI_F8_E4M3 : DI_F32, di_test_random(&rng) & 1 ? DI_F4_E2M1 : DI_F8_E4M3,
                   di_test_random(&rng) & 1 ? DI_F4_E2M1 : DI_F8_E4M3);
    }
    twin_close(&t);
}

/* The bound. The tensor core's sums differ from the reference's in the last bits of fp32 (Hopper: bf16 multiplies, cut
 * instead of rounded while they add) or by some 10^-4 (Blackwell: codes, of which a group of 32 may keep 13 bits). So
 * some of g, u and the experts' results, rounded to bf16, come out one ulp (2^-8) apart, a few in a hundred; an
 * activation then moves by one E4M3 code, at most 2^-3 of itself, a few in a thousand. Over a row's norm that is 2^-9
 * or so for most rows; but where it meets the one activation that carries a short row, the row moves by nearly that
 * code. So the middle one of the rows is held to 2^-7, each to 2^-3, and the worst single output to half the row's mean
 * size. */
static int compare_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void check_close(twin *t, const di_act *got_d, const di_act *want) {
    double *got = twin_act_values(t, got_d), *part = calloc((size_t)want->n_rows, sizeof *part);
    assert_non_null(part);
    for (int64_t row = 0; row < want->n_rows; row++) {
        double norm = 0, error = 0, worst = 0;
        for (int64_t i = 0; i < want->n_cols; i++) {
            double w = ops_act_value(want, row, i), e = got[row * want->n_cols + i] - w;
            norm += w * w;
            error += e * e;
            worst = fabs(e) > worst || isnan(e) ? fabs(e) : worst;
        }
        double mean = sqrt(norm / (double)want->n_cols);
        part[row] = sqrt(error / norm);
        if (!(part[row] <= 0x1p-3) || !(worst <= 0x1p-1 * mean))
            fail_msg("row %lld of %lld: error %.3g of the norm, worst %.3g of the mean size", (long long)row,
                     (long long)want->n_rows, part[row], worst / mean);
    }
    qsort(part, (size_t)want->n_rows, sizeof *part, compare_double);
    if (want->n_rows > 2 && !(part[want->n_rows / 2] <= 0x1p-7))
        fail_msg("the middle one of %lld rows: error %.3g of the norm", (long long)want->n_rows,
                 part[want->n_rows / 2]);
    free(part);
    free(got);
}

static void check_fast(twin *t, uint64_t *rng, moe_case c, di_dtype expert, di_dtype shared, double skew) {
    make_case(t, &c, rng, DI_F8_E4M3, expert, shared, skew);
    assert_int_equal(di_cpu_ops.moe(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->moe(t->stream, &c.d), DI_OK);
    check_close(t, &c.d.out, &c.a.out);
    /* again, into poison: the same bits */
    size_t bytes = twin_act_bytes(&c.d.out);
    uint8_t *first = ops_rig_alloc(bytes), *second = ops_rig_alloc(bytes);
    twin_back(t, first, c.d.out.data, bytes);
    di_act again = twin_act_out(t, &c.a.out);
    di_moe_args d = c.d;
    d.out = again;
    assert_int_equal(t->gpu.ops->moe(t->stream, &d), DI_OK);
    twin_back(t, second, again.data, bytes);
    twin_same(second, first, bytes, "moe, run again");
    free(first);
    free(second);
    end_case(t, &c);
}

static void check_fast_cases(twin *t, uint64_t *rng) {
#ifndef DI_TWIN_EMU
    check_fast(t, rng, (moe_case){.n = 2, .h = 5120, .inner = 2304, .k = 6, .n_experts = 8, .has_shared = true},
               DI_F4_E2M1, DI_F8_E4M3, 1.0);
#endif
    /* few rows: one and several tiles of an expert, experts without rows, without shared, both formats for both */
    check_fast(t, rng, (moe_case){.n = 1, .h = 512, .inner = 256, .k = 6, .n_experts = 40, .has_shared = true},
               DI_F4_E2M1, DI_F8_E4M3, 1.0);
    check_fast(t, rng, (moe_case){.n = 33, .h = 256, .inner = 512, .k = 3, .n_experts = 20, .has_shared = true},
               DI_F4_E2M1, DI_F8_E4M3, 2.5);
    check_fast(t, rng, (moe_case){.n = 20, .h = 256, .inner = 256, .k = 2, .n_experts = 9, .has_shared = false},
               DI_F8_E4M3, DI_F4_E2M1, 1.5);
    check_fast(t, rng, (moe_case){.n = 17, .h = 768, .inner = 256, .k = 2, .n_experts = 9, .has_shared = true},
               DI_F4_E2M1, DI_F4_E2M1, 1.5);
    /* many rows: wide tiles, full ones and such as aren't half full */
    check_fast(t, rng, (moe_case){.n = 70, .h = 256, .inner = 256, .k = 2, .n_experts = 9, .has_shared = true},
               DI_F4_E2M1, DI_F8_E4M3, 1.5);
    check_fast(t, rng, (moe_case){.n = 300, .h = 512, .inner = 256, .k = 2, .n_experts = 7, .has_shared = true},
               DI_F4_E2M1, DI_F8_E4M3, 2.0);
    check_fast(t, rng, (moe_case){.n = 300, .h = 256, .inner = 512, .k = 3, .n_experts = 3, .has_shared = true},
               DI_F8_E4M3, DI_F8_E4M3, 1.0);
    check_fast(t, rng, (moe_case){.n = 650, .h = 256, .inner = 256, .k = 1, .n_experts = 2, .has_shared = false},
               DI_F4_E2M1, DI_F8_E4M3, 1.3);
}

DI_PROPERTY(fast_moe_is_close, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(700, 5120, 2304, 40, 6);
    twin t;
    twin_open(&t, &limits, "sm90");
    check_fast_cases(&t, &rng);
    /* all widths of all forms, FP4 of the routed expert and FP8 of the shared one or the other way; the shortest k */
    const int64_t rows[] = {1, 3, 8, 12, 25, 38, 45, 70, 90, 110, 125, 200};
    for (int i = 0; i < 2 * (int)DI_COUNT(rows); i++) {
        twin_turn(seed, i);
        check_fast(&t, &rng,
                   (moe_case){.n = rows[i / 2], .h = 256, .inner = 256, .k = 1, .n_experts = 1, .has_shared = true},
                   i % 2 ? DI_F8_E4M3 : DI_F4_E2M1, i % 2 ? DI_F4_E2M1 : DI_F8_E4M3, 1.0);
    }
    for (int i = 0; i < 3; i++) { /* one expert of many rows, another of few */
        twin_turn(seed, i);
        check_fast(&t, &rng,
                   (moe_case){.n = 12 + 58 * i, .h = 256, .inner = 256, .k = 1, .n_experts = 2, .has_shared = true},
                   DI_F4_E2M1, DI_F4_E2M1, 3.0);
    }
    twin_turn(0, 1);
    twin_close(&t);
}

/* Where weights are laid out anew for the fast kernels, the portable ones still find their values: exact numerics. */
DI_PROPERTY(placed_weights_have_their_values, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(40, 512, 512, 12, 3);
    twin t;
    twin_open(&t, &limits, "sm90");
    check_bits(&t, &rng, (moe_case){.n = 3, .h = 512, .inner = 256, .k = 2, .n_experts = 4, .has_shared = true}, DI_F32,
               DI_F4_E2M1, DI_F8_E4M3);
    check_bits(&t, &rng, (moe_case){.n = 9, .h = 256, .inner = 512, .k = 3, .n_experts = 12, .has_shared = true},
               DI_F32, DI_F8_E4M3, DI_F4_E2M1);
    /* one of both kinds is not laid out */
    check_bits(&t, &rng, (moe_case){.n = 2, .h = 256, .inner = 256, .k = 1, .n_experts = 3, .has_shared = true}, DI_F32,
               DI_F4_E2M1, DI_BF16);
    check_bits(&t, &rng, (moe_case){.n = 2, .h = 256, .inner = 256, .k = 1, .n_experts = 3, .has_shared = true}, DI_F32,
               DI_F32, DI_F8_E4M3);
    twin_close(&t);
}

/* A scale that the fast kernels' numbers can't hold is said, not used. */
DI_PROPERTY(large_scales_are_refused, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(8, 256, 256, 4, 2);
    twin t;
    twin_open(&t, &limits, "sm90");
    static const struct {
        di_dtype dtype;
        uint8_t most;
    } kinds[2] = {{DI_F4_E2M1, 160}, {DI_F8_E4M3, 166}};
    for (int i = 0; i < 4; i++) {
        ops_mem mem = {0};
        di_error err = {0};
        bool is_refused = i % 2;
        di_expert e = {ops_mat_random(&mem, &rng, kinds[i / 2].dtype, 256, 256),
                       ops_mat_random(&mem, &rng, kinds[i / 2].dtype, 256, 256),
                       ops_mat_random(&mem, &rng, kinds[i / 2].dtype, 256, 256)};
        ((uint8_t *)e.w3.scale)[17] = (uint8_t)(kinds[i / 2].most + is_refused);
        di_expert d[2] = {{twin_mat_in(&t, &e.w1), twin_mat_in(&t, &e.w3), twin_mat_in(&t, &e.w2)}};
        d[1] = (di_expert){twin_mat_in(&t, &e.w1), twin_mat_in(&t, &e.w1), twin_mat_in(&t, &e.w2)};
        void *table = NULL;
        di_status st = t.gpu.device->experts_place(t.dev, d, 2, NULL, &table, &err);
        if (is_refused) {
            assert_int_equal(st, DI_ERR_FORMAT);
            assert_non_null(
                strstr(err.message, i < 2 ? "expert 0, 'w3': a scale of byte 161 (2^34), expected 160 (2^33)"
                                          : "expert 0, 'w3': a scale of byte 167 (2^40), expected 166 (2^39)"));
            assert_null(table);
            di_expert shared = {twin_mat_in(&t, &e.w1), twin_mat_in(&t, &e.w3), twin_mat_in(&t, &e.w2)};
            assert_int_equal(t.gpu.device->experts_place(t.dev, NULL, 0, &shared, &table, &err), DI_ERR_FORMAT);
            assert_non_null(strstr(err.message, "shared expert 0, 'w3': a scale of byte"));
            assert_null(table);
        } else {
            di_test_ok(st, &err);
            t.gpu.device->free(t.dev, table);
        }
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

/* A row's bits don't depend on its batch: rows of a large batch, which takes one form, alone and a few together, which
 * take another. */
static void check_rows_apart(twin *t, uint64_t *rng) {
    for (int i = 0; i < 3; i++) {
        moe_case c = {.n = i ? 90 * i + 230 : 120,
                      .h = 512,
                      .inner = 256,
                      .k = i == 2 ? 3 : 2,
                      .n_experts = i == 2 ? 3 : 8,
                      .has_shared = i != 1};
        make_case(t, &c, rng, DI_F8_E4M3, i == 1 ? DI_F8_E4M3 : DI_F4_E2M1, DI_F8_E4M3, 1.5);
        assert_int_equal(t->gpu.ops->moe(t->stream, &c.d), DI_OK);
        size_t row_bytes = (size_t)c.h * 2, bytes = (size_t)c.n * row_bytes;
        uint8_t *all = ops_rig_alloc(bytes), *some = ops_rig_alloc(bytes);
        twin_back(t, all, c.d.out.data, bytes);
        for (int64_t n = 1; n <= 100; n = n * 3 + 1) { /* 1, 4, 13, 40 */
            int64_t row0 = di_test_random_range(rng, 0, c.n - n);
            di_moe_args d = c.d;
            d.x.n_rows = d.out.n_rows = n;
            d.x.data = (uint8_t *)d.x.data + row0 * c.h;
            d.x.scale += row0 * (c.h / 32);
            d.idx += row0 * c.k;
            d.weight += row0 * c.k;
            d.out.data = twin_out(t, (size_t)n * row_bytes);
            assert_int_equal(t->gpu.ops->moe(t->stream, &d), DI_OK);
            twin_back(t, some, d.out.data, (size_t)n * row_bytes);
            twin_same(some, all + (size_t)row0 * row_bytes, (size_t)n * row_bytes, "rows of a batch, apart");
        }
        free(all);
        free(some);
        end_case(t, &c);
    }
}

DI_PROPERTY(fast_moe_rows_stand_alone, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(700, 512, 512, 40, 6);
    twin t;
    twin_open(&t, &limits, "sm90");
    check_rows_apart(&t, &rng);
    twin_close(&t);
}

/* Blackwell's kernels, which are taken when asked for by name. */
DI_PROPERTY(sm100_moe_is_close, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(700, 5120, 2304, 40, 6);
    twin t;
    twin_open_sm100(&t, &limits);
    check_fast_cases(&t, &rng);
    for (int i = 0; i < 4; i++) { /* tiles of 16, 32, 64 and 128 */
        const int64_t rows[4] = {9, 30, 60, 140};
        twin_turn(seed, i);
        check_fast(&t, &rng,
                   (moe_case){.n = rows[i], .h = 384, .inner = 384, .k = 1, .n_experts = 2, .has_shared = true},
                   DI_F4_E2M1, DI_F8_E4M3, 1.3);
    }
    twin_turn(0, 1);
    twin_close(&t);
}

DI_PROPERTY(sm100_moe_rows_stand_alone, 1) {
    uint64_t rng = seed;
    di_limits limits = limits_of(700, 512, 512, 40, 6);
    twin t;
    twin_open_sm100(&t, &limits);
    check_rows_apart(&t, &rng);
    twin_close(&t);
}

/* What the reference refuses and the host can see. */
static void moe_refuses(void **state) {
    (void)state;
    uint64_t rng = 5;
    di_limits limits = limits_of(8, 256, 256, 4, 2);
    twin t;
    twin_open(&t, &limits, "auto");
    moe_case c = {.n = 2, .h = 256, .inner = 256, .k = 2, .n_experts = 3, .has_shared = true};
    make_case(&t, &c, &rng, DI_F8_E4M3, DI_F4_E2M1, DI_F8_E4M3, 1.0);
    di_moe_args d = c.d;
    d.table = NULL;
    assert_int_equal(t.gpu.ops->moe(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.out.n_cols = 128;
    assert_int_equal(t.gpu.ops->moe(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.x.dtype = DI_BF16;
    assert_int_equal(t.gpu.ops->moe(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.x.n_rows = d.out.n_rows = 0;
    assert_int_equal(t.gpu.ops->moe(t.stream, &d), DI_OK);
    di_error err = {0};
    void *table = NULL;
    di_expert odd[2] = {c.experts_d[0], c.experts_d[1]};
    odd[1].w2.n_in = 128;
    assert_int_equal(t.gpu.device->experts_place(t.dev, odd, 2, NULL, &table, &err), DI_ERR_SHAPE);
    assert_null(table);
    end_case(&t, &c);
    twin_close(&t);
}

DI_TEST_GROUP(cuda_moe, cmocka_unit_test(route_has_the_references_bits), cmocka_unit_test(fast_route_chooses_the_best),
              cmocka_unit_test(portable_moe_has_the_references_bits), cmocka_unit_test(fast_moe_is_close),
              cmocka_unit_test(fast_moe_rows_stand_alone), cmocka_unit_test(placed_weights_have_their_values),
              cmocka_unit_test(large_scales_are_refused), cmocka_unit_test(sm100_moe_is_close),
              cmocka_unit_test(sm100_moe_rows_stand_alone), cmocka_unit_test(moe_refuses));
