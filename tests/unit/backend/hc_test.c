/* hc_mix and hc_post at every level: the Sinkhorn check value, the formulas in double, the head merge. */
#include "ops_mat.h"

/* model.md 9: logits through base alone, because fn is zero. */
static void sinkhorn_check_value(void **state) {
    (void)state;
    const float in[16] = {2, 0, 0, -1, 0, 1, 0, 0, 1, 0, 3, 0, 0, 0.5f, 0, 2};
    const double want[16] = {.6993364, .1642940, .0841595, .0522090, .1233461, .5820218, .1096801, .1849510,
                             .1141476, .0728954, .7499892, .0629666, .0631688, .1807878, .0561701, .6998724};
    di_limits limits = ops_mat_limits();
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        float x[4 * 32], z[32], fn[24 * 4 * 32] = {0}, base[24] = {0}, pre[4], post[4], comb[16];
        const float scale[3] = {1, 1, 1}, pre_in[4] = {1, 0, 0, 0};
        for (int i = 0; i < 128; i++)
            x[i] = (float)(i % 5) - 2;
        memcpy(base + 8, in, sizeof in);
        di_hc_mix_args args = {.x = {DI_F32, 1, 128, 128, x, NULL},
                               .m = 4,
                               .pre_in = pre_in,
                               .fn = fn,
                               .scale = scale,
                               .base = base,
                               .iters = 20,
                               .eps = 1e-6f,
                               .norm_eps = 1e-20f,
                               .z = {DI_F32, 1, 32, 32, z, NULL},
                               .pre_out = pre,
                               .post = post,
                               .comb = comb};
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        assert_int_equal(di_cpu_ops.hc_mix(rig.stream, &args), DI_OK);
        for (int i = 0; i < 16; i++)
            ops_close(comb[i], want[i], 1e-6); /* seven printed digits */
        for (int i = 0; i < 4; i++) {
            ops_close(pre[i], 0.5 + 1e-6, 1e-7);
            ops_close(post[i], 1.0, 1e-7);
        }
        assert_memory_equal(z, x, sizeof z); /* the first sub-layer reads stream 0 */
        ops_rig_close(&rig);
    }
}

static void sinkhorn_in_double(double *c, int m, int iters, double eps) {
    for (int a = 0; a < m; a++) {
        double sum = 0;
        for (int b = 0; b < m; b++)
            sum += exp(c[a * m + b]);
        for (int b = 0; b < m; b++)
            c[a * m + b] = exp(c[a * m + b]) / sum + eps;
    }
    for (int i = 0; i < iters; i++) {
        for (int a = 0; a < m && i; a++) {
            double sum = eps;
            for (int b = 0; b < m; b++)
                sum += c[a * m + b];
            for (int b = 0; b < m; b++)
                c[a * m + b] /= sum;
        }
        for (int b = 0; b < m; b++) {
            double sum = eps;
            for (int a = 0; a < m; a++)
                sum += c[a * m + b];
            for (int a = 0; a < m; a++)
                c[a * m + b] /= sum;
        }
    }
}

static void hc_mix_matches_double(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    uint64_t rng = 2;
    /* streams and widths: the usual four, and ones that fill neither a kernel's outputs nor a tile's columns */
    const struct {
        int32_t m;
        int64_t h, n_rows;
        di_dtype dtype;
    } cases[] = {{4, 256, 21, DI_BF16}, {4, 256, 1, DI_BF16}, {4, 128, 3, DI_F32}, {4, 64, 1, DI_F32},
                 {3, 32, 5, DI_F32},    {1, 96, 3, DI_BF16},  {2, 40, 18, DI_F32}};
    for (size_t c = 0; c < DI_COUNT(cases); c++) {
        int32_t m = cases[c].m, n_dots = (2 + m) * m;
        int64_t h = cases[c].h, n = cases[c].n_rows, width = m * h;
        ops_mem mem = {0};
        di_act x = ops_act_random(&mem, &rng, cases[c].dtype, n, width),
               pre_in = ops_act_random(&mem, &rng, DI_F32, n, m);
        di_mat fn = ops_mat_random(&mem, &rng, DI_F32, n_dots, width),
               base = ops_mat_random(&mem, &rng, DI_F32, 1, n_dots);
        const float scale[3] = {0.3f, 0.7f, 0.5f};
        for (int variant = 0; variant < ops_rig_variants(); variant++) {
            di_act z = ops_act_empty(&mem, cases[c].dtype, n, h), pre = ops_act_empty(&mem, DI_F32, n, m);
            di_act post = ops_act_empty(&mem, DI_F32, n, m), comb = ops_act_empty(&mem, DI_F32, n, m * m);
            di_hc_mix_args args = {.x = x,
                                   .m = m,
                                   .pre_in = pre_in.data,
                                   .fn = fn.data,
                                   .scale = scale,
                                   .base = base.data,
                                   .iters = 20,
                                   .eps = 1e-6f,
                                   .norm_eps = 1e-6f,
                                   .z = z,
                                   .pre_out = pre.data,
                                   .post = post.data,
                                   .comb = comb.data};
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            assert_int_equal(di_cpu_ops.hc_mix(rig.stream, &args), DI_OK);
            for (int64_t row = 0; row < n; row++) {
                double squares = 0, y[80], want[64];
                for (int64_t i = 0; i < width; i++)
                    squares += pow(ops_act_value(&x, row, i), 2);
                for (int o = 0; o < n_dots; o++) {
                    y[o] = 0;
                    for (int64_t i = 0; i < width; i++)
                        y[o] += ops_mat_value(&fn, o, i) * ops_act_value(&x, row, i);
                    y[o] /= sqrt(squares / (double)width + 1e-6);
                    y[o] = y[o] * scale[o < m ? 0 : o < 2 * m ? 1 : 2] + ops_mat_value(&base, 0, o);
                }
                /* y reaches about 20 for sums of 1,000 terms: absolute errors of 1e-4, damped by the sigmoid */
                for (int i = 0; i < m; i++) {
                    ops_close(ops_act_value(&pre, row, i), 1 / (1 + exp(-y[i])) + 1e-6, 1e-5);
                    ops_close(ops_act_value(&post, row, i), 2 / (1 + exp(-y[m + i])), 2e-5);
                }
                memcpy(want, y + 2 * m, sizeof *want * (size_t)(m * m));
                sinkhorn_in_double(want, m, 20, 1e-6);
                for (int i = 0; i < m * m; i++)
                    ops_close(ops_act_value(&comb, row, i), want[i], 1e-4);
                for (int64_t i = 0; i < h; i++) {
                    double v = 0, size = 0;
                    for (int s = 0; s < m; s++) {
                        double term = ops_act_value(&pre_in, row, s) * ops_act_value(&x, row, s * h + i);
                        v += term, size += fabs(term);
                    }
                    ops_close(ops_act_value(&z, row, i), v, ops_sum_bound(m, size) + ops_round_bound(z.dtype, v));
                }
            }
            /* Without fn only the collapse is made, the same one. */
            di_act merged = ops_act_empty(&mem, cases[c].dtype, n, h);
            di_hc_mix_args merge = {.x = x, .m = m, .pre_in = pre_in.data, .z = merged};
            assert_int_equal(di_cpu_ops.hc_mix(rig.stream, &merge), DI_OK);
            assert_memory_equal(merged.data, z.data, di_dtype_bytes(z.dtype, (size_t)(n * h)));
            args.m = m + 1;
            assert_int_equal(di_cpu_ops.hc_mix(rig.stream, &args), DI_ERR_SHAPE);
            ops_rig_close(&rig);
        }
        ops_mem_free(&mem);
    }
}

static void hc_post_mixes_old_into_new(void **state) {
    (void)state;
    di_limits limits = ops_mat_limits();
    uint64_t rng = 3;
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            di_dtype dtype = is_f32 ? DI_F32 : DI_BF16;
            enum { N = 9, M = 4, H = 64 };
            ops_mem mem = {0};
            di_act x = ops_act_random(&mem, &rng, dtype, N, M * H), f = ops_act_random(&mem, &rng, dtype, N, H);
            di_act post = ops_act_random(&mem, &rng, DI_F32, N, M), comb = ops_act_random(&mem, &rng, DI_F32, N, M * M);
            const int64_t all[N] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
            di_act before = ops_act_pick(&mem, &x, all, N);
            di_hc_post_args args = {.x = x, .f = f, .m = M, .post = post.data, .comb = comb.data};
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            assert_int_equal(di_cpu_ops.hc_post(rig.stream, &args), DI_OK);
            for (int row = 0; row < N; row++) {
                for (int i = 0; i < M * H; i++) {
                    int b = i / H;
                    double v = ops_act_value(&post, row, b) * ops_act_value(&f, row, i % H), size = fabs(v);
                    for (int a = 0; a < M; a++) {
                        double term = ops_act_value(&comb, row, a * M + b) * ops_act_value(&before, row, a * H + i % H);
                        v += term, size += fabs(term);
                    }
                    ops_close(ops_act_value(&x, row, i), v, ops_sum_bound(M + 1, size) + ops_round_bound(dtype, v));
                }
            }
            args.f.n_cols = 32;
            assert_int_equal(di_cpu_ops.hc_post(rig.stream, &args), DI_ERR_SHAPE);
            ops_rig_close(&rig);
            ops_mem_free(&mem);
        }
    }
}

DI_TEST_GROUP(backend_hc, cmocka_unit_test(sinkhorn_check_value), cmocka_unit_test(hc_mix_matches_double),
              cmocka_unit_test(hc_post_mixes_old_into_new));
