/* Engram's hash by the check values of model.md 9, the lookup beyond the table, the gate in double and its edges. */
#include "ops_mat.h"

static void hash_rows(const int32_t *grams, int32_t n_heads, const int64_t *mult, const int64_t *primes, int variant,
                      int64_t *rows) {
    int64_t offsets[24], sum = 0;
    for (int c = 0; c < 3 * n_heads; c++) {
        offsets[c] = sum;
        sum += primes[c];
    }
    di_limits limits = ops_mat_limits();
    di_engram_hash_args args = {.grams = grams,
                                .n = 1,
                                .n_gram = 4,
                                .n_heads = n_heads,
                                .mult = mult,
                                .primes = primes,
                                .offsets = offsets,
                                .rows = rows};
    ops_rig rig;
    ops_rig_open_variant(&rig, variant, &limits);
    assert_int_equal(di_cpu_ops.engram_hash(rig.stream, &args), DI_OK);
    ops_rig_close(&rig);
}

static void hash_check_values(void **state) {
    (void)state;
    const int64_t tiny_mult[4] = {8437364068238481, 532881113154025, 3959239832743293, 8146170270474473};
    const int64_t tiny_primes[6] = {1009, 1013, 1019, 1021, 1031, 1033};
    const int64_t tiny_a[6] = {376, 1898, 2794, 3621, 4766, 5527}, tiny_b[6] = {141, 1409, 2816, 3248, 4462, 5932};
    const int64_t mult[4] = {76632096046245, 4839876093313, 35959672319349, 73987337458391};
    const int64_t primes[24] = {16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
                                16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
                                16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463};
    const int64_t want[24] = {6961830,   31143904,  34796895,  48021142,  75858929,  90471933,  97778503,  125113896,
                              128920094, 146640906, 168356892, 188372380, 206667341, 223815044, 225536255, 253542237,
                              267226692, 284872852, 289916976, 308439827, 331455479, 349978782, 360629759, 372696692};
    const int32_t gram[4] = {5, 7, 11, 13}, start[4] = {5, 0, 0, 0};
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        int64_t rows[24];
        hash_rows(gram, 2, tiny_mult, tiny_primes, variant, rows);
        assert_memory_equal(rows, tiny_a, sizeof tiny_a);
        hash_rows(start, 2, tiny_mult, tiny_primes, variant, rows);
        assert_memory_equal(rows, tiny_b, sizeof tiny_b);
        hash_rows(gram, 8, mult, primes, variant, rows);
        assert_memory_equal(rows, want, sizeof want);
    }
}

static void gather_reads_beyond_the_table_as_zero(void **state) {
    (void)state;
    uint64_t rng = 1;
    ops_mem mem = {0};
    enum { TABLE = 5, DIM = 64, COLS = 3 };
    di_act table = ops_act_random(&mem, &rng, DI_F8_E4M3, TABLE, DIM);
    const int64_t rows[2][COLS] = {{4, 0, TABLE}, {-1, 2, INT64_MAX}};
    di_limits limits = ops_mat_limits();
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        ops_rig rig;
        ops_rig_open_variant(&rig, variant, &limits);
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            di_act out = ops_act_random(&mem, &rng, is_f32 ? DI_F32 : DI_F8_E4M3, 2, COLS * DIM);
            di_engram_gather_args args = {.codes = table.data,
                                          .scales = table.scale,
                                          .n_table = TABLE,
                                          .dim = DIM,
                                          .n_cols = COLS,
                                          .rows = rows[0],
                                          .out = out};
            assert_int_equal(di_cpu_ops.engram_gather(rig.stream, &args), DI_OK);
            for (int i = 0; i < 2 * COLS * DIM; i++) {
                int64_t id = rows[i / (COLS * DIM)][i / DIM % COLS];
                bool is_stored = id >= 0 && id < TABLE;
                assert_true(ops_act_value(&out, i / (COLS * DIM), i % (COLS * DIM)) ==
                            (is_stored ? ops_act_value(&table, id, i % DIM) : 0));
                if (is_f32)
                    continue;
                assert_int_equal(((uint8_t *)out.data)[i], is_stored ? ((uint8_t *)table.data)[id * DIM + i % DIM] : 0);
                assert_int_equal(out.scale[i / 32], is_stored ? table.scale[id * 2 + i / 32 % 2] : 127);
            }
            args.dim = 48;
            assert_int_equal(di_cpu_ops.engram_gather(rig.stream, &args), DI_ERR_SHAPE);
        }
        ops_rig_close(&rig);
    }
    ops_mem_free(&mem);
}

static void gate_matches_double(void **state) {
    (void)state;
    enum { N = 7, M = 4, H = 96 };
    di_limits limits = ops_mat_limits();
    uint64_t rng = 2;
    const uint8_t skip[N] = {0, 0, 1, 0, 0, 0, 1};
    for (int variant = 0; variant < ops_rig_variants(); variant++) {
        for (int is_f32 = 0; is_f32 < 2; is_f32++) {
            ops_mem mem = {0};
            di_dtype dtype = is_f32 ? DI_F32 : DI_BF16;
            di_act x = ops_act_random(&mem, &rng, dtype, N, M * H),
                   kv = ops_act_random(&mem, &rng, dtype, N, (M + 1) * H);
            di_mat qk = ops_mat_random(&mem, &rng, DI_F32, M, H);
            /* Row 4 has zero keys: the product is +0, its gate sigmoid(+1e-3). */
            memset((uint8_t *)kv.data + di_dtype_bytes(dtype, 4 * (M + 1) * H), 0, di_dtype_bytes(dtype, M * H));
            const int64_t all[N] = {0, 1, 2, 3, 4, 5, 6};
            di_act before = ops_act_pick(&mem, &x, all, N);
            float gate[N * M];
            di_engram_gate_args args = {
                .x = x, .kv = kv, .m = M, .qk = qk.data, .skip = skip, .eps = 1e-20f, .gate = gate};
            ops_rig rig;
            ops_rig_open_variant(&rig, variant, &limits);
            assert_int_equal(di_cpu_ops.engram_gate(rig.stream, &args), DI_OK);
            for (int row = 0; row < N; row++) {
                for (int m = 0; m < M; m++) {
                    double dot = 0, xx = 0, kk = 0, size = 0;
                    for (int i = 0; i < H; i++) {
                        double xv = ops_act_value(&before, row, m * H + i), k = ops_act_value(&kv, row, m * H + i);
                        dot += xv * ops_mat_value(&qk, m, i) * k, size += fabs(xv * ops_mat_value(&qk, m, i) * k);
                        xx += xv * xv, kk += k * k;
                    }
                    double norm = 1 / sqrt(xx / H + 1e-20) / sqrt(kk / H + 1e-20) / sqrt(H);
                    double z = copysign(sqrt(fmax(fabs(dot * norm), 1e-6)), dot), g = 1 / (1 + exp(-z));
                    if (skip[row])
                        g = 0;
                    /* An error d of a dot near 0 moves its root by up to sqrt(d). */
                    double loose = row == 4 ? 1e-7 : sqrt(ops_sum_bound(H + 8, size) * norm) / 4 + 1e-6;
                    ops_close(gate[row * M + m], g, loose);
                    for (int i = 0; i < H; i++) {
                        double old = ops_act_value(&before, row, m * H + i), value = ops_act_value(&kv, row, M * H + i);
                        double want = skip[row] ? old : old + (double)gate[row * M + m] * value;
                        ops_close(ops_act_value(&x, row, m * H + i), want,
                                  skip[row] ? 0
                                            : 4 * 0x1p-24 * (fabs(old) + fabs(value)) + ops_round_bound(dtype, want));
                    }
                }
            }
            ops_close(gate[4 * M], 1 / (1 + exp(-1e-3)), 1e-7);
            ops_rig_close(&rig);
            ops_mem_free(&mem);
        }
    }
}

DI_TEST_GROUP(backend_engram, cmocka_unit_test(hash_check_values),
              cmocka_unit_test(gather_reads_beyond_the_table_as_zero), cmocka_unit_test(gate_matches_double));
