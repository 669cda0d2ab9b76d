/* The row-wise operations on the NVIDIA backend against the CPU reference: the same bits.
 *
 * Tables of cosines are the exception: the reference takes them from the C library, whose last bit is its own; the
 * device rounds the double's, so that both lie within one unit of the last place of each other. */
#include "twin.h"

#define RUN_BOTH(t, op, host, dev)                                                                                     \
    do {                                                                                                               \
        assert_int_equal(di_cpu_ops.op((t)->cpu_stream, (host)), DI_OK);                                               \
        assert_int_equal((t)->gpu.ops->op((t)->stream, (dev)), DI_OK);                                                 \
    } while (0)

static di_limits limits(void) {
    return (di_limits){.rows_max = 512, .n_in_max = 65536, .n_out_max = 64, .hidden_size = 5120};
}

/* Random values in the rows of a block whose rows lie `stride` apart. */
static di_act act_strided(ops_mem *mem, uint64_t *rng, di_dtype dtype, int64_t n_rows, int64_t n_cols, int64_t stride) {
    di_act a = ops_act_random(mem, rng, dtype, n_rows, stride);
    a.n_cols = n_cols;
    return a;
}
/* A block that nobody has written yet. */
static di_act act_poisoned(ops_mem *mem, di_dtype dtype, int64_t n_rows, int64_t n_cols, int64_t stride) {
    di_act a = ops_act_empty(mem, dtype, n_rows, stride);
    memset(a.data, TWIN_POISON, di_dtype_bytes(dtype, (size_t)(n_rows * stride)));
    a.n_cols = n_cols;
    return a;
}
/* Contiguous, or with a distance that keeps or breaks the alignment of rows. */
static int64_t pick_stride(uint64_t *rng, int64_t n_cols) {
    const int64_t more[4] = {0, 0, 8, 3};
    return n_cols + more[di_test_random(rng) & 3];
}
static di_dtype pick_real(uint64_t *rng) {
    return di_test_random(rng) % 3 ? DI_BF16 : DI_F32;
}
static int64_t pick_rows(uint64_t *rng) {
    const int64_t rows[6] = {1, 2, 5, 33, 130, 300};
    return rows[di_test_random(rng) % 6];
}

DI_PROPERTY(embed_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t widths[5] = {5120, 256, 8, 33, 1000};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 20; i++) {
        ops_mem mem = {0};
        int64_t n_cols = widths[i % 5], n_rows = i % 7 ? pick_rows(&rng) : 1;
        int32_t copies = i & 1 ? 4 : (int32_t)di_test_random_range(&rng, 1, 3);
        di_mat table = ops_mat_random(&mem, &rng, DI_BF16, 50, n_cols), table_dev = twin_mat_in(&t, &table);
        int32_t *ids = ops_mem_take(&mem, (size_t)n_rows * 4);
        for (int64_t r = 0; r < n_rows; r++)
            ids[r] = (int32_t)di_test_random_range(&rng, -2, 52);
        di_embed_args a = {.table = &table, .ids = ids, .copies = copies}, d = a;
        a.out = act_poisoned(&mem, pick_real(&rng), n_rows, copies * n_cols, pick_stride(&rng, copies * n_cols));
        d.table = &table_dev;
        d.ids = twin_in(&t, ids, (size_t)n_rows * 4);
        d.out = twin_act_out(&t, &a.out);
        RUN_BOTH(&t, embed, &a, &d);
        twin_act_same(&t, &d.out, &a.out, "embed");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(rms_norm_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t widths[12] = {5120, 1280, 512, 128, 5120, 32, 1, 100, 333, 9000, 20480, 40000};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 36; i++) {
        ops_mem mem = {0};
        int64_t n = widths[i % 12], n_rows = n > 5120 ? di_test_random_range(&rng, 1, 5) : pick_rows(&rng);
        di_dtype dtype = pick_real(&rng);
        di_mat weight = ops_mat_random(&mem, &rng, DI_BF16, 1, n);
        di_rms_norm_args a = {.x = act_strided(&mem, &rng, dtype, n_rows, n, pick_stride(&rng, n)),
                              .weight = weight.data,
                              .eps = i & 1 ? 1e-20f : 1e-6f};
        a.out = act_poisoned(&mem, i % 5 ? dtype : DI_F32, n_rows, n, pick_stride(&rng, n));
        di_rms_norm_args d = a;
        d.x = twin_act_in(&t, &a.x);
        d.out = twin_act_out(&t, &a.out);
        d.weight = twin_in(&t, weight.data, (size_t)n * 2);
        RUN_BOTH(&t, rms_norm, &a, &d);
        twin_act_same(&t, &d.out, &a.out, "rms_norm");
        d.out.n_cols = n - 1;
        assert_int_equal(t.gpu.ops->rms_norm(t.stream, &d), DI_ERR_SHAPE);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

/* Values at which the codes are hard: ties, both zeros, NaN of both signs, the smallest and the largest. */
static float hard_value(uint64_t *rng) {
    const float values[12] = {0.0f,     -0.0f,  1.0625f, -1.1875f,     0x1p-10f, 0x3p-11f,
                              -0x1p-9f, 448.0f, 3e38f,   -0x1.8p-126f, 1e-5f,    464.0f};
    uint64_t k = di_test_random(rng) % 14;
    return k < 12 ? values[k] : di_f32_from_bits(k == 12 ? 0x7FC00000u : 0xFFC00000u);
}

DI_PROPERTY(quant_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t widths[6] = {5120, 1280, 32768, 32, 96, 8192};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 24; i++) {
        ops_mem mem = {0};
        int64_t n = widths[i % 6], n_rows = n > 5120 ? di_test_random_range(&rng, 1, 9) : pick_rows(&rng);
        di_quant_args a = {.x = act_strided(&mem, &rng, pick_real(&rng), n_rows, n, pick_stride(&rng, n))};
        for (int64_t k = 0; i % 3 == 0 && k < n_rows * n / 20; k++) {
            int64_t at = di_test_random_range(&rng, 0, n_rows - 1) * a.x.stride + di_test_random_range(&rng, 0, n - 1);
            if (a.x.dtype == DI_F32)
                ((float *)a.x.data)[at] = hard_value(&rng);
            else
                ((uint16_t *)a.x.data)[at] = di_f32_to_bf16(hard_value(&rng));
        }
        a.out = ops_act_empty(&mem, DI_F8_E4M3, n_rows, n + (i % 4 == 3 ? 32 : 0) + (i % 8 == 5));
        a.out.n_cols = n;
        di_quant_args d = {.x = twin_act_in(&t, &a.x), .out = twin_act_out(&t, &a.out)};
        RUN_BOTH(&t, quant, &a, &d);
        twin_act_same(&t, &d.out, &a.out, "quant");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(rope_tables_are_within_an_ulp, 2) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 6; i++) {
        ops_mem mem = {0};
        int32_t n_rows = (int32_t)pick_rows(&rng), n_freq = i & 1 ? 32 : (int32_t)di_test_random_range(&rng, 1, 40);
        size_t n = (size_t)n_rows * (size_t)n_freq;
        int32_t *pos = ops_mem_take(&mem, (size_t)n_rows * 4);
        float *freq = ops_mem_take(&mem, (size_t)n_freq * 4);
        for (int32_t r = 0; r < n_rows; r++)
            pos[r] = (int32_t)di_test_random_range(&rng, 0, r & 1 ? 1 << 20 : 300);
        for (int32_t j = 0; j < n_freq; j++)
            freq[j] = (float)pow(10000, -(double)j / n_freq);
        float *want[2] = {ops_mem_take(&mem, n * 4), ops_mem_take(&mem, n * 4)};
        float *got[2] = {ops_mem_take(&mem, n * 4), ops_mem_take(&mem, n * 4)};
        di_rope_table_args a = {pos, n_rows, n_freq, freq, want[0], want[1]}, d = a;
        d.pos = twin_in(&t, pos, (size_t)n_rows * 4);
        d.inv_freq = twin_in(&t, freq, (size_t)n_freq * 4);
        d.cos = twin_out(&t, n * 4);
        d.sin = twin_out(&t, n * 4);
        RUN_BOTH(&t, rope_table, &a, &d);
        twin_back(&t, got[0], d.cos, n * 4);
        twin_back(&t, got[1], d.sin, n * 4);
        for (size_t k = 0; k < 2 * n; k++) {
            float g = got[k / n][k % n], w = want[k / n][k % n];
            int64_t apart = (int64_t)di_f32_bits(g) - (int64_t)di_f32_bits(w);
            if (apart < -1 || apart > 1)
                fail_msg("table %d, entry %d: %.9g, the reference has %.9g", (int)(k / n), (int)(k % n), g, w);
        }
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(rope_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int32_t shapes[5][3] = {{64, 512, 32}, {1, 512, 32}, {32, 128, 32}, {3, 7, 3}, {2, 24, 8}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 20; i++) {
        ops_mem mem = {0};
        int32_t heads = shapes[i % 5][0], dim = shapes[i % 5][1], n_freq = shapes[i % 5][2];
        int64_t n_rows = heads > 3 ? di_test_random_range(&rng, 1, 20) : pick_rows(&rng), n = (int64_t)heads * dim;
        size_t table = (size_t)(n_rows * n_freq) * 4;
        float *c = ops_mem_take(&mem, table), *s = ops_mem_take(&mem, table);
        for (int64_t k = 0; k < n_rows * n_freq; k++) {
            double angle = 7 * di_test_random_unit(&rng);
            c[k] = (float)cos(angle), s[k] = (float)sin(angle);
        }
        di_rope_args a = {.x = act_strided(&mem, &rng, pick_real(&rng), n_rows, n, pick_stride(&rng, n)),
                          .n_heads = heads,
                          .head_dim = dim,
                          .n_freq = n_freq,
                          .cos = c,
                          .sin = s,
                          .inverse = i % 3 == 1};
        di_rope_args d = a;
        d.x = twin_act_in(&t, &a.x);
        d.cos = twin_in(&t, c, table);
        d.sin = twin_in(&t, s, table);
        RUN_BOTH(&t, rope, &a, &d);
        twin_act_same(&t, &d.x, &a.x, "rope");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(stream_mean_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t shapes[5][2] = {{4, 5120}, {4, 256}, {3, 33}, {2, 8}, {4, 1000}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 15; i++) {
        ops_mem mem = {0};
        int64_t m = shapes[i % 5][0], h = shapes[i % 5][1], n_rows = h > 1000 ? 20 : pick_rows(&rng);
        di_dtype dtype = pick_real(&rng);
        di_stream_mean_args a = {.x = ops_act_random(&mem, &rng, dtype, n_rows, m * h), .m = (int32_t)m};
        a.out = act_poisoned(&mem, dtype, n_rows, h, 3 * h); /* a view of a wider block */
        di_stream_mean_args d = {.x = twin_act_in(&t, &a.x), .m = a.m, .out = twin_act_out(&t, &a.out)};
        RUN_BOTH(&t, stream_mean, &a, &d);
        twin_act_same(&t, &d.out, &a.out, "stream_mean");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(gather_copies_and_leaves_what_has_no_source, 2) {
    uint64_t rng = seed;
    const size_t bytes[6] = {40960, 16, 4, 33, 10240, 528};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 12; i++) {
        ops_mem mem = {0};
        size_t row = bytes[i % 6];
        int32_t n = (int32_t)pick_rows(&rng), n_from = 40;
        uint8_t *x = ops_mem_take(&mem, row * (size_t)n_from), *want = ops_mem_take(&mem, row * (size_t)n);
        uint8_t *got = ops_mem_take(&mem, row * (size_t)n);
        int32_t *idx = ops_mem_take(&mem, (size_t)n * 4);
        for (size_t k = 0; k < row * (size_t)n_from; k++)
            x[k] = (uint8_t)di_test_random(&rng);
        for (int32_t k = 0; k < n; k++)
            idx[k] = (int32_t)di_test_random_range(&rng, -1, n_from - 1);
        memset(want, TWIN_POISON, row * (size_t)n);
        di_gather_args a = {x, want, idx, n, row}, d = a;
        d.x = twin_in(&t, x, row * (size_t)n_from);
        d.out = twin_out(&t, row * (size_t)n);
        d.idx = twin_in(&t, idx, (size_t)n * 4);
        RUN_BOTH(&t, gather, &a, &d);
        twin_back(&t, got, d.out, row * (size_t)n);
        twin_same(got, want, row * (size_t)n, "gather");
        d.n = 0;
        assert_int_equal(t.gpu.ops->gather(t.stream, &d), DI_OK);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_dense, cmocka_unit_test(embed_has_the_reference_bits),
              cmocka_unit_test(rms_norm_has_the_reference_bits), cmocka_unit_test(quant_has_the_reference_bits),
              cmocka_unit_test(rope_tables_are_within_an_ulp), cmocka_unit_test(rope_has_the_reference_bits),
              cmocka_unit_test(stream_mean_has_the_reference_bits),
              cmocka_unit_test(gather_copies_and_leaves_what_has_no_source));
