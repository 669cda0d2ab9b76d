/* gemm at every level: the sum order bit by bit, all formats against double, groups, addition, odd sizes, faults. */
#include "ops_mat.h"

typedef struct gemm_case {
    di_dtype x, w, out;
    int64_t n_rows, n_in, n_out;
    int32_t n_groups;
    bool has_add;
} gemm_case;

static const gemm_case cases[] = {
    /* one row, panels of 4, 8 and 16 rows, and a block of rows and a bit */
    {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 1, 256, 128, 1, false},
    {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 3, 256, 64, 1, false},
    {DI_F8_E4M3, DI_F8_E4M3, DI_F32, 7, 160, 96, 1, false},
    {DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 9, 288, 40, 1, false},
    {DI_F8_E4M3, DI_F4_E2M1, DI_F32, 16, 64, 33, 1, false},
    {DI_BF16, DI_BF16, DI_F32, 21, 96, 70, 1, false},
    {DI_BF16, DI_BF16, DI_BF16, 30, 320, 31, 1, true},
    {DI_F32, DI_F32, DI_F32, 13, 512, 24, 1, false},
    {DI_F32, DI_F8_E4M3, DI_F32, 2, 544, 32, 1, true},
    {DI_F32, DI_F4_E2M1, DI_F32, 131, 96, 34, 1, false},
    /* groups, as the output projection has them; a group that is no whole number of tiles or scale blocks */
    {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 5, 128, 128, 2, false},
    {DI_F8_E4M3, DI_F8_E4M3, DI_F32, 18, 64, 120, 3, false},
    /* inputs that fill no group of 32 */
    {DI_F32, DI_F32, DI_F32, 1, 7, 5, 1, false},
    {DI_BF16, DI_F8_E4M3, DI_F32, 6, 45, 50, 1, false},
    {DI_F32, DI_BF16, DI_F32, 20, 100, 9, 1, false},
};

static void gemm_sums_in_order(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    uint64_t rng = 1;
    for (size_t c = 0; c < DI_COUNT(cases); c++) {
        const gemm_case *k = &cases[c];
        ops_mem mem = {0};
        int64_t width = k->n_in * k->n_groups;
        di_act x = ops_act_random(&mem, &rng, k->x, k->n_rows, width);
        di_mat w = ops_mat_random(&mem, &rng, k->w, k->n_out, k->n_in);
        float *add = NULL;
        if (k->has_add) {
            add = ops_mem_take(&mem, (size_t)(k->n_rows * k->n_out) * sizeof *add);
            for (int64_t i = 0; i < k->n_rows * k->n_out; i++)
                add[i] = ops_mat_noise(&rng);
        }
        float *xf = ops_mem_take(&mem, (size_t)k->n_in * sizeof *xf),
              *wf = ops_mem_take(&mem, (size_t)k->n_in * sizeof *wf);
        for (int variant = 0; variant < ops_rig_variants(); variant++) {
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            di_act out = ops_act_empty(&mem, k->out, k->n_rows, k->n_out);
            di_gemm_args args = {.x = x, .w = &w, .n_groups = k->n_groups, .add = add, .out = out};
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            for (int64_t row = 0; row < k->n_rows; row++) {
                for (int64_t o = 0; o < k->n_out; o++) {
                    int64_t col0 = o / (k->n_out / k->n_groups) * k->n_in;
                    double exact = add ? add[row * k->n_out + o] : 0, size = fabs(exact);
                    for (int64_t i = 0; i < k->n_in; i++) {
                        double xv = ops_act_value(&x, row, col0 + i), wv = ops_mat_value(&w, o, i);
                        xf[i] = (float)xv, wf[i] = (float)wv;
                        exact += xv * wv, size += fabs(xv * wv);
                    }
                    float want = ops_dot32(xf, wf, k->n_in);
                    if (add)
                        want += add[row * k->n_out + o];
                    if (k->out == DI_BF16)
                        want = di_round_bf16(want);
                    double got = ops_act_value(&out, row, o);
                    if (got != (double)want)
                        fail_msg("case %zu variant %d row %d out %d: %g, expected %g", c, variant, (int)row, (int)o,
                                 got, want);
                    ops_close(got, exact, ops_sum_bound(k->n_in, size) + ops_round_bound(k->out, exact));
                }
            }
            ops_rig_close(&rig);
        }
        ops_mem_free(&mem);
    }
}

/* The power of byte 0 is subnormal, the products with it are not: flush-to-zero must not lose them. */
static void gemm_keeps_the_least_scale(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        for (int is_fp4 = 0; is_fp4 < 2; is_fp4++) {
            uint8_t codes[32], scale[1] = {0};
            float x[32] = {0}, y = -1;
            memset(codes, is_fp4 ? 0x77 : 0x7E, sizeof codes); /* 6 and 448 */
            x[3] = 1.0f;
            di_mat w = {is_fp4 ? DI_F4_E2M1 : DI_F8_E4M3, 1, 32, codes, scale};
            di_gemm_args args = {.x = {DI_F32, 1, 32, 32, x, NULL}, .w = &w, .out = {DI_F32, 1, 1, 1, &y, NULL}};
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            assert_true(y == (is_fp4 ? 6.0f : 448.0f) * 0x1p-126f * 0.5f);
            ops_rig_close(&rig);
        }
    }
}

static void gemm_flushes_subnormals(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        float x[64] = {0}, w[64] = {0}, y = -1;
        x[0] = 0x1p-100f, w[0] = 0x1p-40f;  /* a product of 2^-140 is zero */
        x[33] = 0x1p-130f, w[33] = 0x1p20f; /* so is an input of 2^-130 */
        di_mat mat = {DI_F32, 1, 64, w, NULL};
        di_gemm_args args = {.x = {DI_F32, 1, 64, 64, x, NULL}, .w = &mat, .out = {DI_F32, 1, 1, 1, &y, NULL}};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
        assert_true(y == 0.0f);
        ops_rig_close(&rig);
    }
}

static bool same_bits_or_nan(float a, float b) {
    return (a != a && b != b) || di_f32_bits(a) == di_f32_bits(b);
}

/* Scales near and beyond the ends of the range in which levels may leave them to the end of a group, on either side,
 * and NaN among scales and codes: every level gives the reference's bits. */
static void gemm_is_the_same_at_the_ends_of_scales(void **state) {
    (void)state;
    static const uint8_t low_high[][2] = {{38, 44}, {158, 163}, {0, 3},     {251, 254}, {0, 254},
                                          {60, 75}, {176, 182}, {104, 106}, {255, 255}};
    enum { N_IN = 160, N_OUT = 40 };
    di_limits limits = ops_mat_limits();
    uint64_t rng = 11;
    for (size_t c = 0; c < DI_COUNT(low_high) * DI_COUNT(low_high) * 2; c++) {
        const uint8_t *of_w = low_high[c / 2 % DI_COUNT(low_high)], *of_x = low_high[c / 2 / DI_COUNT(low_high)];
        bool is_fp4 = c % 2;
        int64_t n_rows = di_test_random_range(&rng, 1, 9);
        ops_mem mem = {0};
        di_mat w = ops_mat_random(&mem, &rng, is_fp4 ? DI_F4_E2M1 : DI_F8_E4M3, N_OUT, N_IN);
        di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, n_rows, N_IN);
        uint8_t *scales = (uint8_t *)(uintptr_t)w.scale, *codes = (uint8_t *)(uintptr_t)w.data;
        for (int64_t i = 0; i < (is_fp4 ? N_OUT : DI_CEIL_DIV(N_OUT, 32)) * (N_IN / 32); i++)
            scales[i] = (uint8_t)di_test_random_range(&rng, of_w[0], of_w[1]);
        for (int64_t i = 0; i < n_rows * (N_IN / 32); i++)
            x.scale[i] = (uint8_t)di_test_random_range(&rng, of_x[0], of_x[1]);
        if (!is_fp4 && c % 3 == 0)
            codes[di_test_random_range(&rng, 0, N_OUT * N_IN - 1)] = di_test_random(&rng) & 1 ? 0x7F : 0xFF;
        if (c % 5 == 0)
            ((uint8_t *)x.data)[di_test_random_range(&rng, 0, n_rows * N_IN - 1)] = 0x7F;
        di_act want = ops_act_empty(&mem, DI_F32, n_rows, N_OUT), got = ops_act_empty(&mem, DI_F32, n_rows, N_OUT);
        for (int variant = 0; variant < ops_rig_variants(); variant += 3) {
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            di_gemm_args args = {.x = x, .w = &w, .out = variant ? got : want};
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            for (int64_t i = 0; variant && i < n_rows * N_OUT; i++) {
                float a = ((float *)got.data)[i], b = ((float *)want.data)[i];
                if (!same_bits_or_nan(a, b))
                    fail_msg("case %zu variant %d value %d: %.9g, expected %.9g", c, variant, (int)i, a, b);
            }
            ops_rig_close(&rig);
        }
        ops_mem_free(&mem);
    }
}

/* Values that no quantiser makes but a file may hold: every level agrees with the reference, NaN for NaN. */
typedef struct unusual {
    di_dtype x, w;
    int x_code, x_scale, w_code, w_scale; /* put into one place each; -1: nothing */
} unusual;

static const unusual unusuals[] = {
    {DI_F8_E4M3, DI_F8_E4M3, -1, -1, 0x7F, -1},  {DI_F8_E4M3, DI_F8_E4M3, -1, -1, 0xFF, 255},
    {DI_F8_E4M3, DI_F8_E4M3, -1, -1, -1, 0},     {DI_F8_E4M3, DI_F8_E4M3, -1, -1, 3, 30},
    {DI_F8_E4M3, DI_F8_E4M3, -1, -1, -1, 250},   {DI_F8_E4M3, DI_F8_E4M3, 0x7F, -1, 0, -1},
    {DI_F8_E4M3, DI_F8_E4M3, -1, 255, -1, -1},   {DI_F8_E4M3, DI_F8_E4M3, 1, 0, -1, -1},
    {DI_F8_E4M3, DI_F4_E2M1, -1, -1, -1, 255},   {DI_F8_E4M3, DI_F4_E2M1, -1, -1, -1, 1},
    {DI_F8_E4M3, DI_F4_E2M1, -1, -1, -1, 200},   {DI_F8_E4M3, DI_F4_E2M1, 0xFF, -1, -1, -1},
    {DI_F8_E4M3, DI_F4_E2M1, -1, 40, -1, -1},    {DI_F8_E4M3, DI_F4_E2M1, 0x80, 105, 0x88, 127},
    {DI_BF16, DI_BF16, 0x7F80, -1, -1, -1},      {DI_BF16, DI_BF16, -1, -1, 0xFF80, -1},
    {DI_BF16, DI_BF16, 0x7FC0, -1, 0x0001, -1},  {DI_BF16, DI_BF16, 0x0D00, -1, 0x0C00, -1},
    {DI_BF16, DI_BF16, 0x7000, -1, 0x7100, -1},  {DI_BF16, DI_F8_E4M3, 0x0080, -1, 7, 90},
    {DI_BF16, DI_F4_E2M1, 0x8000, -1, 0x11, 73},
};

static void put_code(di_dtype dtype, void *data, int64_t at, int code) {
    if (code >= 0 && dtype == DI_BF16)
        ((uint16_t *)data)[at] = (uint16_t)code;
    else if (code >= 0)
        ((uint8_t *)data)[at] = (uint8_t)code;
}

static void gemm_agrees_on_unusual_values(void **state) {
    (void)state;
    enum { OUT = 70, IN = 288 };
    di_limits limits = ops_mat_limits();
    uint64_t rng = 21;
    const int64_t counts[3] = {1, 9, 40};
    for (size_t c = 0; c < DI_COUNT(unusuals); c++) {
        const unusual *u = &unusuals[c];
        ops_mem mem = {0};
        for (int n = 0; n < 3; n++) {
            di_mat w = ops_mat_random(&mem, &rng, u->w, OUT, IN);
            di_act x = ops_act_random(&mem, &rng, u->x, counts[n], IN);
            put_code(u->w, (void *)(uintptr_t)w.data, 33, u->w_code); /* row 0; packed E2M1: inputs 66 and 67 */
            put_code(u->x, x.data, u->w == DI_F4_E2M1 ? 66 : 33, u->x_code);
            if (u->w_scale >= 0)
                ((uint8_t *)(uintptr_t)w.scale)[u->w == DI_F4_E2M1 ? 2 : 1] = (uint8_t)u->w_scale;
            if (u->x_scale >= 0)
                x.scale[1] = (uint8_t)u->x_scale;
            di_act want = ops_act_empty(&mem, DI_F32, counts[n], OUT);
            for (int variant = 0; variant < ops_rig_variants(); variant++) {
                di_act got = variant ? ops_act_empty(&mem, DI_F32, counts[n], OUT) : want;
                di_gemm_args args = {.x = x, .w = &w, .out = got};
                ops_rig rig;
                ops_rig_open_variant(&rig, variant, &limits);
                assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
                ops_rig_close(&rig);
                for (int64_t i = 0; i < counts[n] * OUT; i++) {
                    float a = ((float *)want.data)[i], b = ((float *)got.data)[i];
                    if (a != b && !(isnan(a) && isnan(b)))
                        fail_msg("case %zu variant %d row %d out %d: %g, expected %g", c, variant, (int)(i / OUT),
                                 (int)(i % OUT), b, a);
                }
            }
        }
        ops_mem_free(&mem);
    }
}

/* Where scratch doesn't hold all rows, they go in passes. */
static void gemm_runs_in_passes(void **state) {
    (void)state;
    di_limits small = ops_mat_limits();
    small.rows_max = 17;
    small.experts_max = 0;
    uint64_t rng = 7;
    ops_mem mem = {0};
    di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, 200, 1024);
    di_mat w = ops_mat_random(&mem, &rng, DI_F8_E4M3, 64, 1024);
    di_act out[2];
    for (int level = 0; level < 2; level++) {
        ops_rig rig;
        ops_rig_open(&rig, level ? di_cpu_level_best() : DI_CPU_REF, 2, &small);
        out[level] = ops_act_empty(&mem, DI_F32, 200, 64);
        di_gemm_args args = {.x = x, .w = &w, .out = out[level]};
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
        ops_rig_close(&rig);
    }
    assert_memory_equal(out[0].data, out[1].data, 200 * 64 * sizeof(float));
    ops_mem_free(&mem);
}

/* Strides wider than the rows: columns beside the block stay as they are. */
static void gemm_keeps_to_its_columns(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    uint64_t rng = 5;
    ops_mem mem = {0};
    di_mat w = ops_mat_random(&mem, &rng, DI_BF16, 40, 64);
    di_act x = ops_act_random(&mem, &rng, DI_BF16, 6, 96);
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        float y[6][50];
        for (int i = 0; i < 300; i++)
            y[i / 50][i % 50] = 77.0f;
        di_act view = x;
        view.n_cols = 64; /* the first 64 of 96 columns */
        di_gemm_args args = {.x = view, .w = &w, .out = {DI_F32, 6, 40, 50, y, NULL}};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
        for (int row = 0; row < 6; row++) {
            float xf[64], wf[64];
            for (int o = 0; o < 40; o++) {
                for (int i = 0; i < 64; i++)
                    xf[i] = (float)ops_act_value(&x, row, i), wf[i] = (float)ops_mat_value(&w, o, i);
                assert_true(y[row][o] == ops_dot32(xf, wf, 64));
            }
            for (int o = 40; o < 50; o++)
                assert_true(y[row][o] == 77.0f);
        }
        ops_rig_close(&rig);
    }
    ops_mem_free(&mem);
}

static void gemm_refuses_what_does_not_fit(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    uint64_t rng = 3;
    ops_mem mem = {0};
    di_mat w = ops_mat_random(&mem, &rng, DI_F8_E4M3, 64, 64);
    di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, 2, 64), out = ops_act_empty(&mem, DI_F32, 2, 64);
    for (int variant = 0; variant < ops_rig_variants(); variant += 3) {
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        di_gemm_args good = {.x = x, .w = &w, .out = out}, bad = good;
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &good), DI_OK);
        bad.x.n_cols = 32; /* not the matrix's inputs */
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &bad), DI_ERR_SHAPE);
        bad = good, bad.out.n_rows = 1;
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &bad), DI_ERR_SHAPE);
        bad = good, bad.n_groups = 3; /* 64 outputs are no 3 groups */
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &bad), DI_ERR_SHAPE);
        bad = good, bad.out.dtype = DI_F8_E4M3;
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &bad), DI_ERR_SHAPE);
        di_mat wide = {DI_BF16, 64, 1 << 20, w.data, NULL}; /* far beyond the limits: refused before anything is read */
        bad = good, bad.w = &wide;
        bad.x.dtype = DI_BF16, bad.x.n_cols = bad.x.stride = wide.n_in;
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &bad), DI_ERR_SHAPE);
        ops_rig_close(&rig);
    }
    ops_mem_free(&mem);
}

/* Without batch-invariant mode sums may be added in any order: within the bound of any order, and in exact numerics or
 * for one row, where nothing is freed, the very sums. */
static void free_order_stays_close(void **state) {
    (void)state;
    enum { N_IN = 288, N_OUT = 70, ROWS = 27 };
    static const struct {
        di_dtype x, w;
    } kinds[] = {{DI_F8_E4M3, DI_F8_E4M3}, {DI_F8_E4M3, DI_F4_E2M1}, {DI_BF16, DI_BF16}, {DI_F32, DI_F8_E4M3}};
    di_limits limits = ops_mat_limits();
    uint64_t rng = 12;
    for (size_t c = 0; c < DI_COUNT(kinds); c++) {
        ops_mem mem = {0};
        di_act x = ops_act_random(&mem, &rng, kinds[c].x, ROWS, N_IN);
        di_mat w = ops_mat_random(&mem, &rng, kinds[c].w, N_OUT, N_IN);
        for (int variant = 0; variant < ops_rig_variants(); variant++) {
            for (int64_t n_rows = ROWS; n_rows > 0; n_rows = n_rows == ROWS ? 1 : 0) {
                ops_rig rig;
                ops_rig_open_variant(&rig, variant, &limits);
                rig.dev->is_order_free = true;
                x.n_rows = n_rows;
                di_act out = ops_act_empty(&mem, DI_F32, n_rows, N_OUT);
                di_gemm_args args = {.x = x, .w = &w, .out = out};
                assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
                for (int64_t row = 0; row < n_rows; row++) {
                    for (int64_t o = 0; o < N_OUT; o++) {
                        float xf[N_IN], wf[N_IN];
                        double exact = 0, size = 0, got = ops_act_value(&out, row, o);
                        for (int64_t i = 0; i < N_IN; i++) {
                            double xv = ops_act_value(&x, row, i), wv = ops_mat_value(&w, o, i);
                            xf[i] = (float)xv, wf[i] = (float)wv;
                            exact += xv * wv, size += fabs(xv * wv);
                        }
                        ops_close(got, exact, ops_sum_bound(N_IN, size));
                        if (kinds[c].x == DI_F32 || n_rows == 1)
                            assert_true(got == (double)ops_dot32(xf, wf, N_IN));
                    }
                }
                ops_rig_close(&rig);
            }
        }
        ops_mem_free(&mem);
    }
}

/* The device takes the mode from its configuration. */
static void free_order_is_asked_for(void **state) {
    (void)state;
    di_error err = {0};
    for (int is_free = 0; is_free < 2; is_free++) {
        di_device *dev;
        di_device_config config = {.n_threads = 1, .is_order_free = is_free};
        di_test_ok(di_cpu_device_ops.open(&dev, &config, &err), &err);
        assert_int_equal(dev->is_order_free, is_free);
        di_cpu_device_ops.close(dev);
    }
}

DI_TEST_GROUP(backend_gemm, cmocka_unit_test(free_order_stays_close), cmocka_unit_test(free_order_is_asked_for),
              cmocka_unit_test(gemm_sums_in_order), cmocka_unit_test(gemm_keeps_the_least_scale),
              cmocka_unit_test(gemm_flushes_subnormals), cmocka_unit_test(gemm_agrees_on_unusual_values),
              cmocka_unit_test(gemm_runs_in_passes), cmocka_unit_test(gemm_is_the_same_at_the_ends_of_scales),
              cmocka_unit_test(gemm_keeps_to_its_columns), cmocka_unit_test(gemm_refuses_what_does_not_fit));
