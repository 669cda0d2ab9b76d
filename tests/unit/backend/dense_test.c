/* embed, rms_norm, quant, rope_table, rope, stream_mean and gather at every level, against their definitions in double.
 */
#include "ops_mat.h"

/* Runs the body for every level and thread count with an open rig. */
#define EACH_VARIANT(rig)                                                                                              \
    for (int variant = 0; variant < ops_rig_variants(); variant++)                                                     \
        for (ops_rig rig = open_variant(variant); rig.dev; ops_rig_close(&rig), rig.dev = NULL)

static ops_rig open_variant(int variant) {
    di_limits limits = ops_mat_limits();
    ops_rig rig;
    ops_rig_open_variant(&rig, variant, &limits);
    return rig;
}

static void embed_copies_rows(void **state) {
    (void)state;
    uint64_t rng = 1;
    ops_mem mem = {0};
    di_mat table = ops_mat_random(&mem, &rng, DI_BF16, 10, 32);
    const int32_t ids[6] = {3, -1, 9, 10, 0, INT32_MAX};
    EACH_VARIANT(rig) {
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            di_act out = ops_act_random(&mem, &rng, is_f32 ? DI_F32 : DI_BF16, 6, 64);
            di_embed_args args = {.table = &table, .ids = ids, .copies = 2, .out = out};
            assert_int_equal(di_cpu_ops.embed(rig.stream, &args), DI_OK);
            for (int row = 0; row < 6; row++) {
                for (int i = 0; i < 64; i++) {
                    bool is_known = ids[row] >= 0 && ids[row] < 10;
                    assert_true(ops_act_value(&out, row, i) ==
                                (is_known ? ops_mat_value(&table, ids[row], i % 32) : 0));
                }
            }
            args.copies = 3; /* 96 columns into 64 */
            assert_int_equal(di_cpu_ops.embed(rig.stream, &args), DI_ERR_SHAPE);
        }
    }
    ops_mem_free(&mem);
}

static void rms_norm_matches_double(void **state) {
    (void)state;
    uint64_t rng = 2;
    ops_mem mem = {0};
    const int64_t widths[4] = {256, 64, 128, 1000};
    EACH_VARIANT(rig) {
        for (int c = 0; c < 4; c++) {
            int64_t n = widths[c];
            di_dtype dtype = c % 2 ? DI_F32 : DI_BF16;
            di_mat weight = ops_mat_random(&mem, &rng, DI_BF16, 1, n);
            di_act x = ops_act_random(&mem, &rng, dtype, 3, n), out = ops_act_empty(&mem, dtype, 3, n);
            memset((uint8_t *)x.data + di_dtype_bytes(dtype, (size_t)(2 * n)), 0, di_dtype_bytes(dtype, (size_t)n));
            float eps = c == 1 ? 1e-6f : 1e-20f;
            di_rms_norm_args args = {.x = x, .out = out, .weight = weight.data, .eps = eps};
            assert_int_equal(di_cpu_ops.rms_norm(rig.stream, &args), DI_OK);
            for (int row = 0; row < 3; row++) {
                double sum = 0;
                for (int64_t i = 0; i < n; i++)
                    sum += pow(ops_act_value(&x, row, i), 2);
                for (int64_t i = 0; i < n; i++) {
                    double want =
                        ops_act_value(&x, row, i) / sqrt(sum / (double)n + eps) * ops_mat_value(&weight, 0, i);
                    /* half the relative error of the sum, a few roundings, and the output's */
                    ops_close(ops_act_value(&out, row, i), want,
                              fabs(want) * (double)(n + 10) * 0x1p-24 + ops_round_bound(dtype, want));
                    if (row == 2)
                        assert_true(ops_act_value(&out, row, i) == 0); /* an all-zero row is no NaN */
                }
            }
        }
    }
    ops_mem_free(&mem);
}

/* Codes and scales of model.md 9, through a whole row. */
static void quant_follows_the_check_values(void **state) {
    (void)state;
    const struct {
        float amax;
        uint8_t scale, code;
    } rows[] = {{448.0f, 127, 0x7E}, {449.0f, 128, 0x76}, {1.0f, 119, 0x78},
                {1e-4f, 105, 0x7D},  {1e-9f, 105, 0x02},  {1e-10f, 105, 0x00}};
    EACH_VARIANT(rig) {
        for (size_t r = 0; r < DI_COUNT(rows); r++) {
            float x[64] = {0};
            uint8_t codes[64], scales[2];
            x[40] = -rows[r].amax;
            di_quant_args args = {.x = {DI_F32, 1, 64, 64, x, NULL}, .out = {DI_F8_E4M3, 1, 64, 64, codes, scales}};
            assert_int_equal(di_cpu_ops.quant(rig.stream, &args), DI_OK);
            assert_int_equal(scales[0], 105); /* zeros: the least scale */
            assert_int_equal(scales[1], rows[r].scale);
            assert_int_equal(codes[40] & 0x7F, rows[r].code);
            for (int i = 0; i < 64; i++)
                assert_true(i == 40 || (codes[i] & 0x7F) == 0);
        }
    }
}

static void quant_keeps_values_of_its_grid(void **state) {
    (void)state;
    uint64_t rng = 4;
    ops_mem mem = {0};
    di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, 5, 96), real = ops_act_empty(&mem, DI_BF16, 5, 96);
    for (int64_t i = 0; i < 5 * 96; i++) {
        ((uint16_t *)real.data)[i] = di_f32_to_bf16((float)ops_act_value(&x, i / 96, i % 96));
    }
    EACH_VARIANT(rig) {
        di_act out = ops_act_empty(&mem, DI_F8_E4M3, 5, 96);
        di_quant_args args = {.x = real, .out = out};
        assert_int_equal(di_cpu_ops.quant(rig.stream, &args), DI_OK);
        for (int64_t i = 0; i < 5 * 96; i++) {
            double want = ops_act_value(&x, i / 96, i % 96);
            double step =
                ldexp(1, out.scale[i / 32] - 127 - 10); /* below the group's smallest code, half of it may be lost */
            ops_close(ops_act_value(&out, i / 96, i % 96), want, step);
        }
        args.out.n_cols = 64;
        assert_int_equal(di_cpu_ops.quant(rig.stream, &args), DI_ERR_SHAPE);
    }
    ops_mem_free(&mem);
}

static void rope_turns_pairs(void **state) {
    (void)state;
    uint64_t rng = 5;
    ops_mem mem = {0};
    enum { ROWS = 4, HEADS = 3, DIM = 24, FREQ = 8 };
    const int32_t pos[ROWS] = {0, 1, 777, 1000000};
    float inv_freq[FREQ], cos_table[ROWS * FREQ], sin_table[ROWS * FREQ];
    for (int j = 0; j < FREQ; j++)
        inv_freq[j] = (float)pow(10000.0, -2.0 * j / (2 * FREQ));
    EACH_VARIANT(rig) {
        di_rope_table_args table = {
            .pos = pos, .n_rows = ROWS, .n_freq = FREQ, .inv_freq = inv_freq, .cos = cos_table, .sin = sin_table};
        assert_int_equal(di_cpu_ops.rope_table(rig.stream, &table), DI_OK);
        for (int i = 0; i < ROWS * FREQ; i++) {
            float angle = (float)pos[i / FREQ] * inv_freq[i % FREQ]; /* the angle is an fp32 product */
            ops_close(cos_table[i], cos(angle), 0x1p-23);
            ops_close(sin_table[i], sin(angle), 0x1p-23);
        }
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            di_dtype dtype = is_f32 ? DI_F32 : DI_BF16;
            di_act x = ops_act_random(&mem, &rng, dtype, ROWS, HEADS * DIM);
            const int64_t all[ROWS] = {0, 1, 2, 3};
            di_act before = ops_act_pick(&mem, &x, all, ROWS);
            di_rope_args args = {
                .x = x, .n_heads = HEADS, .head_dim = DIM, .n_freq = FREQ, .cos = cos_table, .sin = sin_table};
            for (int is_inverse = 0; is_inverse < 2; is_inverse++) {
                args.inverse = is_inverse;
                memcpy(x.data, before.data, di_dtype_bytes(dtype, ROWS * HEADS * DIM));
                assert_int_equal(di_cpu_ops.rope(rig.stream, &args), DI_OK);
                for (int row = 0; row < ROWS; row++) {
                    for (int col = 0; col < HEADS * DIM; col++) {
                        int in_head = col % DIM, j = (in_head - (DIM - 2 * FREQ)) / 2;
                        double want = ops_act_value(&before, row, col);
                        if (in_head >= DIM - 2 * FREQ) {
                            double c = cos_table[row * FREQ + j], s = sin_table[row * FREQ + j] * (is_inverse ? -1 : 1);
                            double a = ops_act_value(&before, row, col & ~1), b = ops_act_value(&before, row, col | 1);
                            want = col % 2 ? a * s + b * c : a * c - b * s;
                        }
                        ops_close(ops_act_value(&x, row, col), want, 8 * 0x1p-24 + ops_round_bound(dtype, want));
                    }
                }
            }
            args.head_dim = 16; /* 48 columns of 72 */
            assert_int_equal(di_cpu_ops.rope(rig.stream, &args), DI_ERR_SHAPE);
        }
    }
    ops_mem_free(&mem);
}

static void stream_mean_writes_its_columns(void **state) {
    (void)state;
    uint64_t rng = 6;
    ops_mem mem = {0};
    EACH_VARIANT(rig) {
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            di_dtype dtype = is_f32 ? DI_F32 : DI_BF16;
            di_act x = ops_act_random(&mem, &rng, dtype, 5, 4 * 32), wide = ops_act_random(&mem, &rng, dtype, 5, 96);
            const int64_t all[5] = {0, 1, 2, 3, 4};
            di_act before = ops_act_pick(&mem, &wide, all, 5), view = wide;
            view.n_cols = 32;
            view.data = (uint8_t *)wide.data + di_dtype_bytes(dtype, 32); /* the middle third */
            di_stream_mean_args args = {.x = x, .m = 4, .out = view};
            assert_int_equal(di_cpu_ops.stream_mean(rig.stream, &args), DI_OK);
            for (int row = 0; row < 5; row++) {
                for (int col = 0; col < 96; col++) {
                    double want = ops_act_value(&before, row, col), bound = 0;
                    if (col >= 32 && col < 64) {
                        want = 0;
                        for (int m = 0; m < 4; m++)
                            want += ops_act_value(&x, row, m * 32 + col - 32) / 4;
                        bound = 8 * 0x1p-24 + ops_round_bound(dtype, want);
                    }
                    ops_close(ops_act_value(&wide, row, col), want, bound);
                }
            }
            args.m = 3;
            assert_int_equal(di_cpu_ops.stream_mean(rig.stream, &args), DI_ERR_SHAPE);
        }
    }
    ops_mem_free(&mem);
}

static void gather_picks_rows(void **state) {
    (void)state;
    uint64_t rng = 7;
    uint8_t x[8 * 13], out[5 * 13];
    const int32_t idx[5] = {7, 0, 3, 3, 6};
    for (size_t i = 0; i < sizeof x; i++)
        x[i] = (uint8_t)di_test_random(&rng);
    EACH_VARIANT(rig) {
        memset(out, 0, sizeof out);
        di_gather_args args = {.x = x, .out = out, .idx = idx, .n = 5, .row_bytes = 13};
        assert_int_equal(di_cpu_ops.gather(rig.stream, &args), DI_OK);
        for (int i = 0; i < 5; i++)
            assert_memory_equal(out + 13 * i, x + 13 * idx[i], 13);
    }
}

DI_TEST_GROUP(backend_dense, cmocka_unit_test(embed_copies_rows), cmocka_unit_test(rms_norm_matches_double),
              cmocka_unit_test(quant_follows_the_check_values), cmocka_unit_test(quant_keeps_values_of_its_grid),
              cmocka_unit_test(rope_turns_pairs), cmocka_unit_test(stream_mean_writes_its_columns),
              cmocka_unit_test(gather_picks_rows));
