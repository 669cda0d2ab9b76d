/* Dtypes, rows of stored matrices, cache records, and the order of sums. */
#include "harness.h"

#include "tensor/tensor.h"

static void dtypes_have_the_container_s_names(void **state) {
    (void)state;
    static const struct {
        di_dtype dtype;
        const char *name;
        size_t bytes; /* of 5 elements */
    } rows[] = {{DI_F32, "F32", 20},        {DI_BF16, "BF16", 10}, {DI_F8_E4M3, "F8_E4M3", 5},
                {DI_F8_E8M0, "F8_E8M0", 5}, {DI_F4_E2M1, "F4", 3}, {DI_I8, "I8", 5},
                {DI_U8, "U8", 5},           {DI_I32, "I32", 20},   {DI_I64, "I64", 40}};
    assert_int_equal(DI_COUNT(rows), DI_DTYPE_COUNT);
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_dtype got = DI_DTYPE_COUNT;
        assert_string_equal(di_dtype_name(rows[i].dtype), rows[i].name);
        assert_true(di_dtype_parse(rows[i].name, strlen(rows[i].name), &got));
        assert_int_equal(got, rows[i].dtype);
        assert_int_equal(di_dtype_bytes(rows[i].dtype, 5), rows[i].bytes);
    }
    di_dtype none;
    assert_false(di_dtype_parse("F16", 3, &none));
    assert_false(di_dtype_parse("F3", 2, &none));
    assert_false(di_dtype_parse("F322", 4, &none));
}

static void rows_of_matrices_are_exact(void **state) {
    (void)state;
    float row[64];
    const uint16_t bf[4] = {0x3F80, 0xC000, 0x4040, 0x0000};
    di_mat m = {.dtype = DI_BF16, .n_out = 2, .n_in = 2, .data = bf};
    di_mat_row(&m, 1, row);
    assert_true(row[0] == 3.0f && row[1] == 0.0f);

    /* E4M3: row 33 uses the second row of scales; column 32 the second column. */
    uint8_t *codes = calloc(40, 64), scale[4] = {127, 127, 128, 130};
    assert_non_null(codes);
    codes[33 * 64 + 1] = 0x38;  /* 1 */
    codes[33 * 64 + 40] = 0xC0; /* -2 */
    m = (di_mat){.dtype = DI_F8_E4M3, .n_out = 40, .n_in = 64, .data = codes, .scale = scale};
    di_mat_row(&m, 33, row);
    assert_true(row[1] == 2.0f && row[40] == -16.0f && row[0] == 0.0f);
    free(codes);

    /* E2M1: one scale per 32 inputs of a row. */
    uint8_t packed[2 * 32] = {[32 + 0] = 0x2F, [32 + 16] = 0x01}, row_scale[4] = {127, 127, 128, 126};
    m = (di_mat){.dtype = DI_F4_E2M1, .n_out = 2, .n_in = 64, .data = packed, .scale = row_scale};
    di_mat_row(&m, 1, row);
    assert_true(row[0] == -12.0f && row[1] == 2.0f && row[32] == 0.25f && row[33] == 0.0f);
}

static void cache_records_have_the_stated_sizes(void **state) {
    (void)state;
    assert_int_equal(di_kv_record_bytes(DI_KV_FP8, 512), 528);
    assert_int_equal(di_kv_record_bytes(DI_KV_FP4, 512), 288);
    assert_int_equal(di_kv_record_bytes(DI_KV_MX4, 128), 68);
    assert_int_equal(di_kv_data_bytes(DI_KV_MX4, 128), 64);
    assert_int_equal(di_kv_record_bytes(DI_KV_F32, 512), 2048);
}

static void cache_records_are_the_quantisers_bytes(void **state) {
    (void)state;
    static const di_kv_format formats[] = {DI_KV_F32, DI_KV_FP8, DI_KV_FP4, DI_KV_MX4};
    float x[64], back[64], want[64];
    for (int i = 0; i < 64; i++)
        x[i] = (float)(i - 20) * 0.37f;
    for (size_t f = 0; f < DI_COUNT(formats); f++) {
        uint8_t data[256], scale[8], codes[64], scales[8];
        di_kv_encode(formats[f], x, 64, data, scale);
        di_kv_decode(formats[f], data, scale, 64, back);
        switch (formats[f]) {
        case DI_KV_F32:
            memcpy(want, x, sizeof x);
            break;
        case DI_KV_FP8:
            di_quant_qa(x, 64, codes, scales);
            di_dequant_qa(codes, scales, 64, want);
            assert_memory_equal(scale, scales, 2);
            break;
        case DI_KV_FP4:
            di_quant_qk(x, 64, codes, scales);
            di_dequant_qk(codes, scales, 64, want);
            assert_memory_equal(scale, scales, 4);
            break;
        case DI_KV_MX4:
            di_quant_qi(x, 64, codes, scales);
            di_dequant_qi(codes, scales, 64, want);
            assert_memory_equal(scale, scales, 2);
            break;
        }
        assert_memory_equal(back, want, sizeof want);
    }
}

/* The order as the description has it, one statement a step. */
static float dot_by_definition(const float *a, const float *b, int64_t n) {
    float acc = 0.0f;
    for (int64_t g = 0; g < n; g += 32) {
        float even = 0.0f, odd = 0.0f;
        for (int64_t i = g; i < g + 32 && i < n; i++) {
            volatile float product = a[i] * b[i];
            volatile float sum = ((i & 1) ? odd : even) + product;
            if (i & 1) {
                odd = sum;
            } else {
                even = sum;
            }
        }
        volatile float pair = even + odd;
        volatile float total = acc + pair;
        acc = total;
    }
    return acc;
}

DI_PROPERTY(dot32_adds_in_the_stated_order, 300) {
    uint64_t rng = seed;
    int64_t n = di_test_random_range(&rng, 1, 700);
    float *a = malloc((size_t)n * sizeof *a), *b = malloc((size_t)n * sizeof *b);
    assert_true(a && b);
    for (int64_t i = 0; i < n; i++) {
        a[i] = (float)(di_test_random_unit(&rng) - 0.5);
        b[i] = (float)ldexp(di_test_random_unit(&rng) - 0.5, (int)di_test_random_range(&rng, -6, 6));
    }
    float got = di_dot32(a, b, n), want = dot_by_definition(a, b, n);
    assert_int_equal(di_f32_bits(got), di_f32_bits(want));
    free(a), free(b);
}

DI_TEST_GROUP(mat, cmocka_unit_test(dtypes_have_the_container_s_names), cmocka_unit_test(rows_of_matrices_are_exact),
              cmocka_unit_test(cache_records_have_the_stated_sizes),
              cmocka_unit_test(cache_records_are_the_quantisers_bytes),
              cmocka_unit_test(dot32_adds_in_the_stated_order));
