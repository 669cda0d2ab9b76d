/* The confidence head on the NVIDIA backend against the CPU reference: the same bits. */
#include "twin.h"

DI_PROPERTY(confidence_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t shapes[6][2] = {{5120, 256}, {256, 32}, {33, 5}, {8, 8}, {24, 16}, {3000, 700}};
    const float taus[3] = {1.0f, 0.7f, 0.001f}; /* the last one reaches the clamp */
    di_limits l = {.rows_max = 512, .n_in_max = 65536, .n_out_max = 64, .hidden_size = 5120};
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 24; i++) {
        ops_mem mem = {0};
        int64_t h = shapes[i % 6][0], rank = shapes[i % 6][1], n_rows = di_test_random_range(&rng, 1, 70);
        di_dtype dtype = i % 3 ? DI_BF16 : DI_F32;
        di_mat w = ops_mat_random(&mem, &rng, i % 4 == 3 ? DI_F32 : DI_BF16, 1, h + rank), w_dev = twin_mat_in(&t, &w);
        float *want = ops_mem_take(&mem, (size_t)n_rows * 4), *got = ops_mem_take(&mem, (size_t)n_rows * 4);
        di_confidence_args a = {.hid = ops_act_random(&mem, &rng, dtype, n_rows, h),
                                .emb = ops_act_random(&mem, &rng, i % 5 == 4 ? DI_F32 : dtype, n_rows, rank),
                                .w = &w,
                                .tau = taus[i / 8],
                                .conf = want};
        di_confidence_args d = a;
        d.hid = twin_act_in(&t, &a.hid);
        d.emb = twin_act_in(&t, &a.emb);
        d.w = &w_dev;
        d.conf = twin_out(&t, (size_t)n_rows * 4);
        assert_int_equal(di_cpu_ops.confidence(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->confidence(t.stream, &d), DI_OK);
        twin_back(&t, got, d.conf, (size_t)n_rows * 4);
        twin_same(got, want, (size_t)n_rows * 4, "confidence");
        w_dev.n_in++;
        assert_int_equal(t.gpu.ops->confidence(t.stream, &d), DI_ERR_SHAPE);
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_draft, cmocka_unit_test(confidence_has_the_reference_bits));
