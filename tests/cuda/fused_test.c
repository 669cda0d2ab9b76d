/* Fused operations of the NVIDIA backend against the operations that they stand for, run one after the other by the CPU
 * reference: the same bits, and what is not asked for is not written. */
#include "twin.h"

static di_limits limits(void) {
    return (di_limits){.rows_max = 640, .n_in_max = 65536, .n_out_max = 64, .hidden_size = 5120, .head_dim = 1024};
}

static float *floats(ops_mem *mem, uint64_t *rng, int64_t n, float high) {
    float *v = ops_mem_take(mem, (size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        v[i] = high * (float)di_test_random_unit(rng);
    return v;
}
static di_act poisoned(ops_mem *mem, di_dtype dtype, int64_t n_rows, int64_t n_cols) {
    di_act a = ops_act_empty(mem, dtype, n_rows, n_cols);
    memset(a.data, TWIN_POISON, twin_act_bytes(&a));
    return a;
}

DI_PROPERTY(hc_step_is_its_operations, 2) {
    uint64_t rng = seed;
    const int64_t widths[5] = {5120, 256, 32, 1280, 96};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 21; i++) {
        ops_mem mem = {0};
        /* the last: so many rows that blocks go through some */
        int64_t h = i < 20 ? widths[i % 5] : 2080,
                n_rows = i < 20 ? di_test_random_range(&rng, 1, h > 2000 ? 20 : 90) : 600;
        di_dtype dtype = i % 3 == 2 ? DI_F32 : DI_BF16;
        bool with_f = i % 4 != 3, with_z = i & 1, with_codes = dtype == DI_BF16;
        di_mat weight = ops_mat_random(&mem, &rng, DI_BF16, 1, h);
        di_act x = ops_act_random(&mem, &rng, dtype, n_rows, 4 * h), f = ops_act_random(&mem, &rng, dtype, n_rows, h);
        di_act z = poisoned(&mem, dtype, n_rows, h), out = poisoned(&mem, dtype, n_rows, h);
        di_act codes = ops_act_empty(&mem, DI_F8_E4M3, n_rows, h);
        float *post = floats(&mem, &rng, n_rows * 4, 2), *comb = floats(&mem, &rng, n_rows * 16, 1);
        float *pre = floats(&mem, &rng, n_rows * 4, 1);
        di_hc_step_args d = {.x = twin_act_in(&t, &x), .m = 4, .eps = 1e-20f};
        d.f = with_f ? twin_act_in(&t, &f) : (di_act){0};
        d.post = twin_in(&t, post, (size_t)n_rows * 16), d.comb = twin_in(&t, comb, (size_t)n_rows * 64);
        d.pre_in = twin_in(&t, pre, (size_t)n_rows * 16), d.weight = twin_in(&t, weight.data, (size_t)h * 2);
        d.z = with_z ? twin_act_out(&t, &z) : (di_act){0};
        d.out = twin_act_out(&t, &out);
        d.codes = with_codes ? twin_act_out(&t, &codes) : (di_act){0};
        if (with_f)
            assert_int_equal(di_cpu_ops.hc_post(t.cpu_stream,
                                                &(di_hc_post_args){.x = x, .f = f, .m = 4, .post = post, .comb = comb}),
                             DI_OK);
        assert_int_equal(di_cpu_ops.hc_mix(t.cpu_stream, &(di_hc_mix_args){.x = x, .m = 4, .pre_in = pre, .z = z}),
                         DI_OK);
        assert_int_equal(
            di_cpu_ops.rms_norm(t.cpu_stream,
                                &(di_rms_norm_args){.x = z, .out = out, .weight = weight.data, .eps = 1e-20f}),
            DI_OK);
        assert_int_equal(di_cpu_ops.quant(t.cpu_stream, &(di_quant_args){.x = out, .out = codes}), DI_OK);
        assert_int_equal(t.gpu.ops->hc_step(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.x, &x, "hc_step: trunk");
        twin_act_same(&t, &d.out, &out, "hc_step: norm");
        if (with_z)
            twin_act_same(&t, &d.z, &z, "hc_step: z");
        if (with_codes)
            twin_act_same(&t, &d.codes, &codes, "hc_step: codes");
        d.m = 3;
        assert_int_equal(t.gpu.ops->hc_step(t.stream, &d), DI_ERR_SHAPE);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(norm_quant_is_its_operations, 2) {
    uint64_t rng = seed;
    const int64_t widths[5] = {5120, 1280, 512, 32, 8192};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 15; i++) {
        ops_mem mem = {0};
        int64_t n = widths[i % 5], n_rows = di_test_random_range(&rng, 1, 60);
        di_dtype dtype = i % 3 == 2 ? DI_F32 : DI_BF16;
        di_mat weight = ops_mat_random(&mem, &rng, DI_BF16, 1, n);
        di_act x = ops_act_random(&mem, &rng, dtype, n_rows, n), out = poisoned(&mem, dtype, n_rows, n);
        di_act codes = ops_act_empty(&mem, DI_F8_E4M3, n_rows, n);
        di_norm_quant_args d = {.x = twin_act_in(&t, &x), .codes = twin_act_out(&t, &codes), .eps = 1e-6f};
        d.out = i & 1 ? twin_act_out(&t, &out) : (di_act){0};
        d.weight = twin_in(&t, weight.data, (size_t)n * 2);
        assert_int_equal(
            di_cpu_ops.rms_norm(t.cpu_stream,
                                &(di_rms_norm_args){.x = x, .out = out, .weight = weight.data, .eps = 1e-6f}),
            DI_OK);
        assert_int_equal(di_cpu_ops.quant(t.cpu_stream, &(di_quant_args){.x = out, .out = codes}), DI_OK);
        assert_int_equal(t.gpu.ops->norm_quant(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.codes, &codes, "norm_quant: codes");
        if (d.out.data)
            twin_act_same(&t, &d.out, &out, "norm_quant: norm");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(key_store_is_its_operations, 2) {
    uint64_t rng = seed;
    const int64_t widths[4] = {512, 128, 64, 1024};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 32; i++) {
        ops_mem mem = {0};
        int64_t n = widths[i / 8], n_rows = di_test_random_range(&rng, 1, 60);
        di_kv_format format = (di_kv_format)(i % 4);
        bool with_norm = di_test_random(&rng) & 1, with_out = di_test_random(&rng) & 1, in_pages = i & 4;
        int32_t n_freq = n == 64 ? 8 : 32;
        di_dtype dtype = i % 3 == 2 ? DI_F32 : DI_BF16;
        di_mat weight = ops_mat_random(&mem, &rng, DI_BF16, 1, n);
        di_act x = ops_act_random(&mem, &rng, dtype, n_rows, n), y = x, out = poisoned(&mem, dtype, n_rows, n);
        float *c = floats(&mem, &rng, n_rows * n_freq, 1), *s = floats(&mem, &rng, n_rows * n_freq, 1);
        size_t table = (size_t)(n_rows * n_freq) * 4, record = di_kv_record_bytes(format, n);
        int32_t row[64], seq[64] = {0}, idx[64], blocks[2] = {1, 0};
        for (int32_t k = 0; k < n_rows; k++) {
            row[k] = di_test_random(&rng) % 5 ? k : -1;
            idx[k] = (int32_t)(n_rows - k);
        }
        di_rows rows = {.n_seqs = 1, .blocks = blocks, .blocks_stride = 2}, rows_dev = rows;
        di_paged dst = {.offset = 64, .per_block = 32, .format = format, .n_values = (int32_t)n};
        dst.page_bytes = DI_ROUND_UP(64 + 32 * record, (size_t)64);
        size_t n_bytes = in_pages ? 2 * dst.page_bytes : record * (size_t)n_rows;
        uint8_t *want = ops_mem_take(&mem, n_bytes), *got = ops_mem_take(&mem, n_bytes);
        memset(want, TWIN_POISON, n_bytes);
        di_key_store_args d = {.x = twin_act_in(&t, &x), .eps = 1e-20f, .n_freq = n_freq, .format = format};
        d.weight = with_norm ? twin_in(&t, weight.data, (size_t)n * 2) : NULL;
        d.out = with_out ? twin_act_out(&t, &out) : (di_act){0};
        d.cos = twin_in(&t, c, table), d.sin = twin_in(&t, s, table);
        uint8_t *device = twin_out(&t, n_bytes);
        if (in_pages) {
            rows_dev.blocks = twin_in(&t, blocks, sizeof blocks);
            d.rows = &rows_dev;
            d.entries = (di_entries){(int32_t)n_rows, twin_in(&t, row, sizeof row), twin_in(&t, seq, sizeof seq),
                                     twin_in(&t, idx, sizeof idx)};
            d.dst = dst;
            d.dst.pages = device;
        } else {
            d.records = device;
        }
        if (with_norm) {
            y = poisoned(&mem, dtype, n_rows, n);
            assert_int_equal(
                di_cpu_ops.rms_norm(t.cpu_stream,
                                    &(di_rms_norm_args){.x = x, .out = y, .weight = weight.data, .eps = 1e-20f}),
                DI_OK);
        }
        assert_int_equal(
            di_cpu_ops.rope(
                t.cpu_stream,
                &(di_rope_args){.x = y, .n_heads = 1, .head_dim = (int32_t)n, .n_freq = n_freq, .cos = c, .sin = s}),
            DI_OK);
        if (in_pages) {
            dst.pages = want;
            di_page_store_args p = {.rows = &rows, .entries = {(int32_t)n_rows, row, seq, idx}, .x = y, .dst = dst};
            assert_int_equal(di_cpu_ops.page_store(t.cpu_stream, &p), DI_OK);
        } else {
            assert_int_equal(
                di_cpu_ops.kv_encode(t.cpu_stream, &(di_kv_encode_args){.x = y, .format = format, .records = want}),
                DI_OK);
        }
        assert_int_equal(t.gpu.ops->key_store(t.stream, &d), DI_OK);
        twin_back(&t, got, device, n_bytes);
        twin_same(got, want, n_bytes, "key_store");
        if (with_out)
            twin_act_same(&t, &d.out, &y, "key_store: rotated");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_fused, cmocka_unit_test(hc_step_is_its_operations), cmocka_unit_test(norm_quant_is_its_operations),
              cmocka_unit_test(key_store_is_its_operations));
