/* Engram's operations on the NVIDIA backend against the CPU reference: the same bits. */
#include "twin.h"

static di_limits limits(void) {
    return (di_limits){.rows_max = 512, .n_in_max = 65536, .n_out_max = 64, .hidden_size = 5120};
}

DI_PROPERTY(engram_hash_has_the_reference_rows, 3) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 6; i++) {
        ops_mem mem = {0};
        int32_t n = (int32_t)di_test_random_range(&rng, 1, 300),
                n_gram = i ? (int32_t)di_test_random_range(&rng, 2, 5) : 4;
        int32_t heads = i ? (int32_t)di_test_random_range(&rng, 1, 9) : 8, cols = (n_gram - 1) * heads;
        size_t bytes = (size_t)n * (size_t)cols * 8;
        int32_t *grams = ops_mem_take(&mem, (size_t)(n * n_gram) * 4);
        int64_t *mult = ops_mem_take(&mem, (size_t)n_gram * 8), *primes = ops_mem_take(&mem, (size_t)cols * 8);
        int64_t *offsets = ops_mem_take(&mem, (size_t)cols * 8), *want = ops_mem_take(&mem, bytes);
        int64_t *got = ops_mem_take(&mem, bytes);
        for (int32_t k = 0; k < n * n_gram; k++)
            grams[k] = (int32_t)di_test_random_range(&rng, 0, 99091);
        for (int32_t k = 0; k < n_gram; k++)
            mult[k] = 2 * di_test_random_range(&rng, 0, 46539438283890) + 1;
        for (int32_t k = 0; k < cols; k++) {
            primes[k] = di_test_random_range(&rng, 3, 16000889);
            offsets[k] = k ? offsets[k - 1] + primes[k - 1] : 0;
        }
        di_engram_hash_args a = {grams, n, n_gram, heads, mult, primes, offsets, want}, d = a;
        d.grams = twin_in(&t, grams, (size_t)(n * n_gram) * 4);
        d.mult = twin_in(&t, mult, (size_t)n_gram * 8);
        d.primes = twin_in(&t, primes, (size_t)cols * 8);
        d.offsets = twin_in(&t, offsets, (size_t)cols * 8);
        d.rows = twin_out(&t, bytes);
        assert_int_equal(di_cpu_ops.engram_hash(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->engram_hash(t.stream, &d), DI_OK);
        twin_back(&t, got, d.rows, bytes);
        twin_same(got, want, bytes, "engram_hash");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

/* Every kind of result, ids beyond the table, the smallest scale; the table in device memory and in the host's. */
DI_PROPERTY(engram_gather_has_the_reference_bits, 3) {
    uint64_t rng = seed;
    const di_dtype kinds[3] = {DI_F8_E4M3, DI_F32, DI_BF16};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 18; i++) {
        ops_mem mem = {0};
        di_error err = {0};
        int32_t dim = i % 4 ? 256 : 32 * (int32_t)di_test_random_range(&rng, 1, 5), cols = i % 4 ? 24 : 6;
        int64_t n_table = 100, n_rows = di_test_random_range(&rng, 1, 40), n_groups = dim / 32, width = cols * dim;
        size_t n_codes = (size_t)(n_table * dim), n_scales = (size_t)(n_table * n_groups);
        uint8_t *codes = ops_mem_take(&mem, n_codes), *scales = ops_mem_take(&mem, n_scales);
        int64_t *rows = ops_mem_take(&mem, (size_t)(n_rows * cols) * 8);
        for (size_t k = 0; k < n_codes; k++)
            codes[k] = ops_mat_e4m3(&rng);
        for (size_t k = 0; k < n_scales; k++)
            scales[k] = (uint8_t)(k % 9 ? di_test_random_range(&rng, 100, 130) : di_test_random_range(&rng, 0, 9));
        for (int64_t k = 0; k < n_rows * cols; k++)
            rows[k] = di_test_random_range(&rng, -2, n_table + 2);
        di_engram_gather_args a = {codes, scales, n_table, dim, cols, rows, {0}}, d = a;
        a.out = ops_act_empty(&mem, kinds[i % 3], n_rows, width + (i % 5 == 4 ? 32 : 0));
        a.out.n_cols = width;
        d.out = twin_act_out(&t, &a.out);
        d.rows = twin_in(&t, rows, (size_t)(n_rows * cols) * 8);
        void *host = NULL;
        if (i & 1) {
            di_test_ok(t.gpu.device->alloc_host(t.dev, n_codes + n_scales, &host, &err), &err);
            memcpy(host, codes, n_codes);
            memcpy((uint8_t *)host + n_codes, scales, n_scales);
            d.codes = host;
            d.scales = (uint8_t *)host + n_codes;
        } else {
            d.codes = twin_in(&t, codes, n_codes);
            d.scales = twin_in(&t, scales, n_scales);
        }
        assert_int_equal(di_cpu_ops.engram_gather(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->engram_gather(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.out, &a.out, "engram_gather");
        if (host)
            t.gpu.device->free_host(t.dev, host);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(engram_gate_has_the_reference_bits, 3) {
    uint64_t rng = seed;
    const int64_t shapes[6][2] = {{4, 5120}, {4, 256}, {3, 33}, {4, 1000}, {2, 10240}, {1, 20000}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 12; i++) {
        ops_mem mem = {0};
        int64_t m = shapes[i % 6][0], h = shapes[i % 6][1], n_rows = di_test_random_range(&rng, 1, h > 5000 ? 20 : 100);
        di_dtype dtype = di_test_random(&rng) % 3 ? DI_BF16 : DI_F32;
        di_mat qk = ops_mat_random(&mem, &rng, DI_F32, m, h);
        uint8_t *skip = ops_mem_take(&mem, (size_t)n_rows);
        float *want = ops_mem_take(&mem, (size_t)(n_rows * m) * 4), *got = ops_mem_take(&mem, (size_t)(n_rows * m) * 4);
        for (int64_t r = 0; r < n_rows; r++)
            skip[r] = di_test_random(&rng) % 4 == 0;
        di_engram_gate_args a = {.x = ops_act_random(&mem, &rng, dtype, n_rows, m * h),
                                 .kv = ops_act_random(&mem, &rng, dtype, n_rows, (m + 1) * h),
                                 .m = (int32_t)m,
                                 .qk = qk.data,
                                 .skip = i % 3 ? skip : NULL,
                                 .eps = 1e-20f,
                                 .gate = i % 4 == 3 ? NULL : want};
        for (int64_t k = 0; i % 3 == 0 && k < h && k < n_rows * a.x.n_cols;
             k++) /* a dot of zero: the gate is still open */
            memset((uint8_t *)a.x.data + di_dtype_bytes(dtype, (size_t)k), 0, di_dtype_bytes(dtype, 1));
        di_engram_gate_args d = a;
        d.x = twin_act_in(&t, &a.x);
        d.kv = twin_act_in(&t, &a.kv);
        d.qk = twin_in(&t, qk.data, (size_t)(m * h) * 4);
        d.skip = twin_in(&t, a.skip, (size_t)n_rows);
        d.gate = a.gate ? twin_out(&t, (size_t)(n_rows * m) * 4) : NULL;
        assert_int_equal(di_cpu_ops.engram_gate(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->engram_gate(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.x, &a.x, "engram_gate");
        if (a.gate) {
            twin_back(&t, got, d.gate, (size_t)(n_rows * m) * 4);
            twin_same(got, want, (size_t)(n_rows * m) * 4, "gates");
        }
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_engram, cmocka_unit_test(engram_hash_has_the_reference_rows),
              cmocka_unit_test(engram_gather_has_the_reference_bits),
              cmocka_unit_test(engram_gate_has_the_reference_bits));
