/* Hyper-connections on the NVIDIA backend against the CPU reference: the same bits, whichever kernel the number of rows
 * picks, and the same bits of a row alone. */
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
    twin_open(&t, &l, "auto");
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

/* Numbers of rows that take the kernels of prefill: some turns of the one for few rows, 16 rows a block, 32 rows. */
DI_PROPERTY(hc_mix_of_many_rows_has_the_reference_bits, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
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

/* A row of a large batch, by the kernels for many rows, is the row alone. */
DI_PROPERTY(hc_mix_of_a_row_alone_has_the_same_bits, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 2; i++) {
        int64_t n_rows = i ? 2300 : 1700, h = 256;
        mix_case c;
        mix_make(&c, &rng, DI_BF16, n_rows, 4, h, true);
        di_hc_mix_args d = mix_in(&t, &c), one = d;
        assert_int_equal(t.gpu.ops->hc_mix(t.stream, &d), DI_OK);
        float all[24], alone[24];
        one.x.n_rows = one.z.n_rows = 1;
        one.z.data = twin_out(&t, (size_t)h * 2);
        one.pre_out = twin_out(&t, 16), one.post = twin_out(&t, 16), one.comb = twin_out(&t, 64);
        for (int k = 0; k < 5; k++) {
            int64_t row = di_test_random_range(&rng, 0, n_rows - 1);
            uint16_t z_all[256], z_alone[256];
            one.x.data = (uint16_t *)d.x.data + row * 4 * h;
            one.pre_in = d.pre_in + row * 4;
            assert_int_equal(t.gpu.ops->hc_mix(t.stream, &one), DI_OK);
            twin_back(&t, z_all, (uint16_t *)d.z.data + row * h, sizeof z_all);
            twin_back(&t, z_alone, one.z.data, sizeof z_alone);
            twin_same(z_alone, z_all, sizeof z_all, "z of a row alone");
            twin_back(&t, all, d.pre_out + row * 4, 16), twin_back(&t, all + 4, d.post + row * 4, 16);
            twin_back(&t, all + 8, d.comb + row * 16, 64);
            twin_back(&t, alone, one.pre_out, 16), twin_back(&t, alone + 4, one.post, 16);
            twin_back(&t, alone + 8, one.comb, 64);
            twin_same(alone, all, sizeof all, "mixes of a row alone");
        }
        twin_drop(&t);
        ops_mem_free(&c.mem);
    }
    twin_close(&t);
}

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
              cmocka_unit_test(hc_mix_of_many_rows_has_the_reference_bits),
              cmocka_unit_test(hc_mix_of_a_row_alone_has_the_same_bits),
              cmocka_unit_test(hc_post_has_the_reference_bits));
