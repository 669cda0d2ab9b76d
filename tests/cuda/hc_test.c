/* Hyper-connections on the NVIDIA backend against the CPU reference: the portable kernels have its bits, whichever of
 * them the number of rows picks; the mixes by Hopper's tensor cores are within the rounding of fp32 sums, and have its
 * bits where sums are exact. All give a row the same bits alone and in any batch. */
#include <inttypes.h>
#include <math.h>

#include "twin.h"

static di_limits limits(void) {
    return (di_limits){.rows_max = 4096, .n_in_max = 20480, .n_out_max = 64, .hidden_size = 5120};
}

/* Arguments of a case in host memory, outputs poisoned. */
typedef struct mix_case {
    ops_mem mem;
    di_hc_mix_args a;
    float scale[3];
} mix_case;

static float *floats(ops_mem *mem, uint64_t *rng, int64_t n, float low, float high) {
    float *v = ops_mem_take(mem, (size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        v[i] = low + (high - low) * (float)di_test_random_unit(rng);
    return v;
}
static float *poison(ops_mem *mem, int64_t n) {
    float *v = ops_mem_take(mem, (size_t)n * 4);
    memset(v, TWIN_POISON, (size_t)n * 4);
    return v;
}

static void mix_make(mix_case *c, uint64_t *rng, di_dtype dtype, int64_t n_rows, int32_t m, int64_t h, bool with_fn) {
    memset(c, 0, sizeof *c);
    int64_t n = m * h, dots = (2 + m) * m;
    c->a = (di_hc_mix_args){.m = m, .iters = 20, .eps = 1e-6f, .norm_eps = 1e-20f};
    c->a.x = ops_act_random(&c->mem, rng, dtype, n_rows, n);
    c->a.z = ops_act_empty(&c->mem, dtype, n_rows, h);
    memset(c->a.z.data, TWIN_POISON, twin_act_bytes(&c->a.z));
    c->a.pre_in = floats(&c->mem, rng, n_rows * m, 0, 1);
    c->scale[0] = 0.3f, c->scale[1] = -0.2f, c->scale[2] = 2.0f;
    if (with_fn) {
        c->a.fn = floats(&c->mem, rng, dots * n, -0.05f, 0.05f);
        c->a.scale = c->scale;
        c->a.base = floats(&c->mem, rng, dots, -1, 1);
    }
    c->a.pre_out = poison(&c->mem, n_rows * m);
    c->a.post = poison(&c->mem, n_rows * m);
    c->a.comb = poison(&c->mem, n_rows * m * m);
}

static di_hc_mix_args mix_in(twin *t, const mix_case *c) {
    const di_hc_mix_args *a = &c->a;
    int64_t n_rows = a->x.n_rows, dots = (2 + a->m) * a->m;
    di_hc_mix_args d = *a;
    d.x = twin_act_in(t, &a->x);
    d.z = twin_act_out(t, &a->z);
    d.pre_in = twin_in(t, a->pre_in, (size_t)(n_rows * a->m) * 4);
    d.fn = twin_in(t, a->fn, (size_t)(dots * a->x.n_cols) * 4);
    d.scale = twin_in(t, a->scale, sizeof c->scale);
    d.base = twin_in(t, a->base, (size_t)dots * 4);
    d.pre_out = twin_out(t, (size_t)(n_rows * a->m) * 4);
    d.post = twin_out(t, (size_t)(n_rows * a->m) * 4);
    d.comb = twin_out(t, (size_t)(n_rows * a->m * a->m) * 4);
    return d;
}

static void same_floats(twin *t, const float *dev, const float *want, int64_t n, const char *what) {
    float *got = ops_rig_alloc((size_t)n * 4);
    twin_back(t, got, dev, (size_t)n * 4);
    twin_same(got, want, (size_t)n * 4, what);
    free(got);
}

static void mix_compare(twin *t, const di_hc_mix_args *d, const di_hc_mix_args *want) {
    int64_t n_rows = want->x.n_rows, m = want->m;
    twin_act_same(t, &d->z, &want->z, "hc_mix: z");
    same_floats(t, d->pre_out, want->pre_out, n_rows * m, "hc_mix: pre");
    same_floats(t, d->post, want->post, n_rows * m, "hc_mix: post");
    same_floats(t, d->comb, want->comb, n_rows * m * m, "hc_mix: comb");
}

static void mix_check(twin *t, uint64_t *rng, di_dtype dtype, int64_t n_rows, int32_t m, int64_t h, bool with_fn) {
    mix_case c;
    mix_make(&c, rng, dtype, n_rows, m, h, with_fn);
    di_hc_mix_args d = mix_in(t, &c);
    assert_int_equal(di_cpu_ops.hc_mix(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->hc_mix(t->stream, &d), DI_OK);
    mix_compare(t, &d, &c.a);
    twin_drop(t);
    ops_mem_free(&c.mem);
}

DI_PROPERTY(hc_mix_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "portable");
    const int64_t rows[6] = {1, 2, 7, 33, 64, 140};
    for (int i = 0; i < 6; i++)
        mix_check(&t, &rng, i % 3 == 2 ? DI_F32 : DI_BF16, rows[i], 4, 5120, i != 3);
    for (int i = 0; i < 8; i++) /* the tiny model's width and less, other numbers of streams, odd widths */
        mix_check(&t, &rng, i & 1 ? DI_F32 : DI_BF16, di_test_random_range(&rng, 1, 40), i < 4 ? 4 : i - 2,
                  i < 4 ? 32 << i : di_test_random_range(&rng, 1, 150), true);
    mix_check(&t, &rng, DI_BF16, 9, 4, 100, true);
    mix_check(&t, &rng, DI_BF16, 9, 8, 64, true);
    twin_close(&t);
}

/* What Hopper's kernel leaves to the others: fp32, no mixes, other shapes. */
DI_PROPERTY(hc_mix_of_other_kinds_has_the_reference_bits, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    mix_check(&t, &rng, DI_F32, 5, 4, 5120, true);
    mix_check(&t, &rng, DI_F32, 70, 4, 256, true);
    mix_check(&t, &rng, DI_BF16, 20, 4, 256, false);
    mix_check(&t, &rng, DI_BF16, 9, 4, 104, true);
    mix_check(&t, &rng, DI_BF16, 9, 4, 100, true);
    mix_check(&t, &rng, DI_BF16, 9, 8, 64, true);
    twin_close(&t);
}

/* Numbers of rows that take the kernels of prefill: some turns of the one for few rows, 16 rows a block, 32 rows. */
DI_PROPERTY(hc_mix_of_many_rows_has_the_reference_bits, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "portable");
    for (int i = 0; i < 2; i++) {
        di_dtype dtype = i ? DI_F32 : DI_BF16;
        mix_check(&t, &rng, dtype, 700 + i, 4, 64, true);
        mix_check(&t, &rng, dtype, 1551, 4, 256, true);
        mix_check(&t, &rng, dtype, 2205, 4, 160, true);
        mix_check(&t, &rng, dtype, 4003, 4, 32, true);
    }
#ifndef DI_TWIN_EMU /* some seconds of the emulation */
    mix_check(&t, &rng, DI_BF16, 1601, 4, 5120, true);
    mix_check(&t, &rng, DI_BF16, 2213, 4, 5120, true);
#endif
    twin_close(&t);
}

/* Some rows of a batch are each the row alone. */
static void alone_check(twin *t, uint64_t *rng, int64_t n_rows, int64_t h) {
    mix_case c;
    mix_make(&c, rng, DI_BF16, n_rows, 4, h, true);
    di_hc_mix_args d = mix_in(t, &c), one = d;
    assert_int_equal(t->gpu.ops->hc_mix(t->stream, &d), DI_OK);
    float all[24], alone[24];
    uint16_t *z_all = ops_rig_alloc((size_t)h * 2), *z_alone = ops_rig_alloc((size_t)h * 2);
    one.x.n_rows = one.z.n_rows = 1;
    one.z.data = twin_out(t, (size_t)h * 2);
    one.pre_out = twin_out(t, 16), one.post = twin_out(t, 16), one.comb = twin_out(t, 64);
    for (int k = 0; k < 6; k++) { /* the last one too */
        int64_t row = k ? di_test_random_range(rng, 0, n_rows - 1) : n_rows - 1;
        one.x.data = (uint16_t *)d.x.data + row * 4 * h;
        one.pre_in = d.pre_in + row * 4;
        assert_int_equal(t->gpu.ops->hc_mix(t->stream, &one), DI_OK);
        twin_back(t, z_all, (uint16_t *)d.z.data + row * h, (size_t)h * 2);
        twin_back(t, z_alone, one.z.data, (size_t)h * 2);
        twin_same(z_alone, z_all, (size_t)h * 2, "z of a row alone");
        twin_back(t, all, d.pre_out + row * 4, 16), twin_back(t, all + 4, d.post + row * 4, 16);
        twin_back(t, all + 8, d.comb + row * 16, 64);
        twin_back(t, alone, one.pre_out, 16), twin_back(t, alone + 4, one.post, 16);
        twin_back(t, alone + 8, one.comb, 64);
        twin_same(alone, all, sizeof all, "mixes of a row alone");
    }
    free(z_all), free(z_alone);
    twin_drop(t);
    ops_mem_free(&c.mem);
}

/* Of large batches, by the kernels for many rows. */
DI_PROPERTY(hc_mix_of_a_row_alone_has_the_same_bits, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "portable");
    alone_check(&t, &rng, 1700, 256);
    alone_check(&t, &rng, 2300, 256);
    twin_close(&t);
}

/* ---- Hopper's kernel ---------------------------------------------------------------------------------------------
 */

enum kind {
    RANDOM,
    CANCELLING, /* large terms cancel, and what is left lies in the lower bits of weights */
    EXACT       /* of integers: the sums are exact in any order */
};

/* Inputs that want every bit of the weights. */
static void mix_fill(mix_case *c, uint64_t *rng, enum kind kind) {
    uint16_t *x = c->a.x.data;
    float *fn = (float *)(uintptr_t)c->a.fn;
    int64_t n = c->a.x.n_cols;
    if (kind == CANCELLING) {
        /* A pair of columns is v*(a + d) - v*(a - d), in units of a bf16 number a: d is 2^-9 and some for the second
         * part of the weight, and nearly 2^-17 for the third. Both have one sign in all pairs, so that no part can be
         * missed: without the third the dot would be short of 2^-18 of its terms' magnitudes and more. */
        for (int64_t i = 0; i < c->a.x.n_rows * n; i += 2) {
            x[i] = di_f32_to_bf16((float)(0.5 + di_test_random_unit(rng)));
            x[i + 1] = x[i] ^ 0x8000u;
        }
        for (int64_t i = 0; i < 24 * n; i += 2) {
            float a = 1.0f + (float)di_test_random_range(rng, 2, 62) * 0x1p-7f;
            float d = 0x1p-9f + (float)di_test_random_range(rng, 1, 63) * 0x1p-16f + 0x1.Cp-18f;
            float sign = di_test_random(rng) & 1 ? 0x1p-5f : -0x1p-5f;
            fn[i] = a * sign + d * 0x1p-5f;
            fn[i + 1] = a * sign - d * 0x1p-5f;
        }
    } else if (kind == EXACT) {
        /* Twelve ones in a row of zeros meet integers of 20 bits: no sum reaches 2^24. */
        memset(x, 0, twin_act_bytes(&c->a.x));
        for (int64_t i = 0; i < c->a.x.n_rows * 12; i++)
            x[i / 12 * n + di_test_random_range(rng, 0, n - 1)] = di_test_random(rng) & 1 ? 0x3F80 : 0xBF80;
        for (int64_t i = 0; i < 24 * n; i++)
            fn[i] = (float)di_test_random_range(rng, -(1 << 20), 1 << 20);
        for (int i = 0; i < 3; i++)
            c->scale[i] *= 0x1p-26f;
    }
}

static void near(const float *got, const float *want, int n, double bound, const char *what, int64_t row) {
    for (int i = 0; i < n; i++) {
        if (!(fabs((double)got[i] - want[i]) <= bound))
            fail_msg("hc_mix: %s %d of row %" PRId64 " is %.9g, expected %.9g within %.2g", what, i, row, got[i],
                     want[i], bound);
    }
}

/* Products are exact, and an addition loses at most about 2^-23 of the largest number at hand, on either side; how
 * often that is as large as all terms' magnitudes together depends on the order. 2^-20 of these is the bound here:
 * several additions at their worst, and a sixth of what goes missing without the weights' third parts (mix_fill). A
 * quarter of a logit's error arrives behind the sigmoid; the Sinkhorn steps project onto the matrices that it ends in,
 * which leaves twice the largest error of a logit. What follows the sums has a last bit or two of its own. */
static void bounds_check(twin *t, const mix_case *c, const di_hc_mix_args *d) {
    const di_hc_mix_args *a = &c->a;
    int64_t n_rows = a->x.n_rows, n = a->x.n_cols;
    float *pre = ops_rig_alloc((size_t)n_rows * 16), *post = ops_rig_alloc((size_t)n_rows * 16);
    float *comb = ops_rig_alloc((size_t)n_rows * 64), *x = ops_rig_alloc((size_t)n * 4);
    twin_back(t, pre, d->pre_out, (size_t)n_rows * 16), twin_back(t, post, d->post, (size_t)n_rows * 16);
    twin_back(t, comb, d->comb, (size_t)n_rows * 64);
    for (int64_t row = 0; row < n_rows; row++) {
        double squares = 0, most[3] = {0, 0, 0};
        for (int64_t i = 0; i < n; i++) {
            x[i] = di_bf16_to_f32(((const uint16_t *)a->x.data)[row * n + i]);
            squares += (double)x[i] * x[i];
        }
        for (int o = 0; o < 24; o++) {
            float terms = 0; /* of the bound alone */
            for (int64_t i = 0; i < n; i++)
                terms += fabsf(x[i] * a->fn[o * n + i]);
            int of = o < 8 ? o / 4 : 2;
            most[of] = fmax(most[of], terms * fabs((double)a->scale[of]) / sqrt(squares / (double)n));
        }
        near(pre + row * 4, a->pre_out + row * 4, 4, most[0] * 0x1p-22 + 0x1p-22, "pre", row);
        near(post + row * 4, a->post + row * 4, 4, most[1] * 0x1p-21 + 0x1p-21, "post", row);
        near(comb + row * 16, a->comb + row * 16, 16, most[2] * 0x1p-19 + 0x1p-20, "comb", row);
    }
    free(pre), free(post), free(comb), free(x);
}

static void sm90_check(twin *t, uint64_t *rng, enum kind kind, int64_t n_rows, int64_t h) {
    mix_case c;
    mix_make(&c, rng, DI_BF16, n_rows, 4, h, true);
    mix_fill(&c, rng, kind);
    di_hc_mix_args d = mix_in(t, &c);
    assert_int_equal(di_cpu_ops.hc_mix(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->hc_mix(t->stream, &d), DI_OK);
    if (kind == EXACT) {
        mix_compare(t, &d, &c.a);
    } else {
        twin_act_same(t, &d.z, &c.a.z, "hc_mix: z");
        bounds_check(t, &c, &d);
    }
    twin_drop(t);
    ops_mem_free(&c.mem);
}

DI_PROPERTY(sm90_is_within_rounding, 1) {
    uint64_t rng = seed;
    const int64_t rows[5] = {1, 7, 64, 65, 200};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "sm90");
    for (int i = 0; i < 5; i++) {
        twin_turn(seed, i);
        sm90_check(&t, &rng, i & 1 ? RANDOM : CANCELLING, rows[i], 5120);
    }
    for (int i = 0; i < 12; i++) {
        twin_turn(seed, i);
        sm90_check(&t, &rng, i & 1 ? RANDOM : CANCELLING, di_test_random_range(&rng, 1, 300),
                   32 * di_test_random_range(&rng, 1, 20));
    }
    sm90_check(&t, &rng, CANCELLING, 1100, 160);
    twin_close(&t);
    twin_turn(0, 1);
}

/* Of every way to form blocks of threads; more rows than 8192 go by turns. */
DI_PROPERTY(sm90_has_the_reference_bits_where_sums_are_exact, 1) {
    uint64_t rng = seed;
    const int64_t shapes[10][2] = {{1, 288},  {3, 32},    {64, 160},   {65, 288},  {129, 288},
                                   {700, 96}, {1024, 32}, {1025, 288}, {1500, 64}, {8500, 32}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "sm90");
    for (int i = 0; i < 10; i++) {
        twin_turn(seed, i);
        sm90_check(&t, &rng, EXACT, shapes[i][0], shapes[i][1]);
    }
    twin_close(&t);
    twin_turn(0, 1);
}

DI_PROPERTY(sm90_of_a_row_alone_has_the_same_bits, 1) {
    uint64_t rng = seed;
    const int64_t shapes[7][2] = {{40, 288}, {66, 288}, {300, 160}, {1024, 96}, {1030, 288}, {1300, 256}, {8300, 32}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "sm90");
    for (int i = 0; i < 7; i++) {
        twin_turn(seed, i);
        alone_check(&t, &rng, shapes[i][0], shapes[i][1]);
    }
    twin_close(&t);
    twin_turn(0, 1);
}

/* ---- hc_post ------------------------------------------------------------------------------------------------------
 */

DI_PROPERTY(hc_post_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t shapes[6][2] = {{4, 5120}, {4, 256}, {3, 33}, {8, 40}, {4, 1000}, {1, 7}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 18; i++) {
        ops_mem mem = {0};
        int64_t m = shapes[i % 6][0], h = shapes[i % 6][1], n_rows = di_test_random_range(&rng, 1, h > 1000 ? 40 : 300);
        di_dtype dtype = i % 3 ? DI_BF16 : DI_F32;
        di_hc_post_args a = {.x = ops_act_random(&mem, &rng, dtype, n_rows, m * h),
                             .f = ops_act_random(&mem, &rng, dtype, n_rows, h),
                             .m = (int32_t)m,
                             .post = floats(&mem, &rng, n_rows * m, 0, 2),
                             .comb = floats(&mem, &rng, n_rows * m * m, 0, 1)};
        di_hc_post_args d = a;
        d.x = twin_act_in(&t, &a.x);
        d.f = twin_act_in(&t, &a.f);
        d.post = twin_in(&t, a.post, (size_t)(n_rows * m) * 4);
        d.comb = twin_in(&t, a.comb, (size_t)(n_rows * m * m) * 4);
        assert_int_equal(di_cpu_ops.hc_post(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->hc_post(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.x, &a.x, "hc_post");
        d.m++;
        assert_int_equal(t.gpu.ops->hc_post(t.stream, &d), DI_ERR_SHAPE);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_hc, cmocka_unit_test(hc_mix_has_the_reference_bits),
              cmocka_unit_test(hc_mix_of_other_kinds_has_the_reference_bits),
              cmocka_unit_test(hc_mix_of_many_rows_has_the_reference_bits),
              cmocka_unit_test(hc_mix_of_a_row_alone_has_the_same_bits), cmocka_unit_test(sm90_is_within_rounding),
              cmocka_unit_test(sm90_has_the_reference_bits_where_sums_are_exact),
              cmocka_unit_test(sm90_of_a_row_alone_has_the_same_bits),
              cmocka_unit_test(hc_post_has_the_reference_bits));
