/* Number formats: every code both ways, rounding and ties, the check values of the model's description, and the
 * quantiser vectors of the reference (tests/data/tiny/static.safetensors), byte for byte. */
#include "harness.h"

#include "golden.h"
#include "tensor/tensor.h"

/* ---- single values ----------------------------------------------------------------------------------------------- */

/* E4M3 by its definition, apart from the table. */
static double e4m3_value(int code) {
    int e = code >> 3 & 15, m = code & 7;
    double a = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return code & 128 ? -a : a;
}

static void e4m3_codes_mean_their_definition(void **state) {
    (void)state;
    for (int code = 0; code < 256; code++) {
        if ((code & 0x7F) == 0x7F) {
            assert_true(isnan(di_e4m3_to_f32((uint8_t)code)));
            continue;
        }
        float v = di_e4m3_to_f32((uint8_t)code);
        assert_true(v == e4m3_value(code));
        assert_int_equal(signbit(v) != 0, code >> 7);
        assert_int_equal(di_f32_to_e4m3(v), code);
    }
}

static void e4m3_rounds_to_nearest_even(void **state) {
    (void)state;
    for (int code = 0; code < 0x7E; code++) {
        double lo = e4m3_value(code), hi = e4m3_value(code + 1);
        float mid = (float)((lo + hi) / 2); /* exact */
        int even = code & 1 ? code + 1 : code;
        assert_int_equal(di_f32_to_e4m3(mid), even);
        assert_int_equal(di_f32_to_e4m3(-mid), even | 128);
        assert_int_equal(di_f32_to_e4m3(nextafterf(mid, 0.0f)), code);
        assert_int_equal(di_f32_to_e4m3(nextafterf(mid, 1000.0f)), code + 1);
    }
}

static void e4m3_clamps_and_keeps_nan(void **state) {
    (void)state;
    assert_int_equal(di_f32_to_e4m3(448.0f), 0x7E);
    assert_int_equal(di_f32_to_e4m3(1e30f), 0x7E);
    assert_int_equal(di_f32_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(di_f32_to_e4m3(0.0f), 0x00);
    assert_int_equal(di_f32_to_e4m3(-0.0f), 0x80);
    assert_int_equal(di_f32_to_e4m3(NAN), 0x7F);
    assert_int_equal(di_f32_to_e4m3(-NAN), 0xFF);
    assert_int_equal(di_f32_to_e4m3(1e-20f), 0x00);
}

static void e8m0_is_a_power_of_two(void **state) {
    (void)state;
    for (int b = 0; b < 255; b++)
        assert_true(di_e8m0_to_f32((uint8_t)b) == ldexp(1.0, b - 127));
    assert_true(isnan(di_e8m0_to_f32(255)));
}

static void e2m1_rounds_to_nearest_even(void **state) {
    (void)state;
    static const float grid[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int code = 0; code < 8; code++) {
        assert_true(di_e2m1_to_f32((uint8_t)code) == grid[code]);
        assert_true(di_e2m1_to_f32((uint8_t)(code | 8)) == -grid[code]);
        assert_int_equal(di_f32_to_e2m1(grid[code]), code);
        assert_int_equal(di_f32_to_e2m1(-grid[code]), code | 8); /* negative zero too */
        if (code == 7)
            break;
        float mid = (grid[code] + grid[code + 1]) / 2;
        assert_int_equal(di_f32_to_e2m1(mid), code & 1 ? code + 1 : code);
        assert_int_equal(di_f32_to_e2m1(nextafterf(mid, 0.0f)), code);
        assert_int_equal(di_f32_to_e2m1(nextafterf(mid, 10.0f)), code + 1);
    }
    assert_int_equal(di_f32_to_e2m1(100.0f), 7);
    assert_int_equal(di_f32_to_e2m1(INFINITY), 7);
    assert_int_equal(di_f32_to_e2m1(-INFINITY), 15);
    assert_int_equal(di_f32_to_e2m1(NAN) & 7, 7);
}

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    assert_int_equal(di_f32_to_bf16(1.0f), 0x3F80);
    assert_int_equal(di_f32_to_bf16(di_f32_from_bits(0x3F808000)), 0x3F80); /* tie to even: down */
    assert_int_equal(di_f32_to_bf16(di_f32_from_bits(0x3F818000)), 0x3F82); /* tie to even: up */
    assert_int_equal(di_f32_to_bf16(di_f32_from_bits(0x3F808001)), 0x3F81);
    assert_int_equal(di_f32_to_bf16(di_f32_from_bits(0x7F7FFFFF)), 0x7F80); /* rounds to infinity */
    assert_int_equal(di_f32_to_bf16(-INFINITY), 0xFF80);
    assert_int_equal(di_f32_to_bf16(-0.0f), 0x8000);
    assert_int_equal(di_f32_to_bf16(di_f32_from_bits(0x7F800001)), 0x7FC0); /* NaN that truncation would lose */
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = di_bf16_to_f32((uint16_t)h);
        if (!isnan(f))
            assert_int_equal(di_f32_to_bf16(f), h);
    }
}

/* ---- quantisers -------------------------------------------------------------------------------------------------- */

static void quantiser_scales_are_the_check_values(void **state) {
    (void)state;
    static const struct {
        float amax;
        int byte;
    } qa[] = {{448, 127}, {449, 128}, {1.0f, 119}, {1e-4f, 105}, {1e-9f, 105}, {0, 105}},
      qi[] = {{6, 127}, {6.1f, 128}, {1.0f, 125}, {0, 1}},
      qk[] = {{6, 0x38}, {5, 0x35}, {0.02f, 0x02}, {1e-9f, 0x01}, {3000, 0x7E}};
    uint8_t codes[32], scale[2];
    for (size_t i = 0; i < DI_COUNT(qa); i++) {
        float x[32] = {[7] = -qa[i].amax};
        di_quant_qa(x, 32, codes, scale);
        assert_int_equal(scale[0], qa[i].byte);
    }
    for (size_t i = 0; i < DI_COUNT(qi); i++) {
        float x[32] = {[31] = qi[i].amax};
        di_quant_qi(x, 32, codes, scale);
        assert_int_equal(scale[0], qi[i].byte);
    }
    for (size_t i = 0; i < DI_COUNT(qk); i++) {
        float x[16] = {[3] = -qk[i].amax};
        di_quant_qk(x, 16, codes, scale);
        assert_int_equal(scale[0], qk[i].byte);
    }
}

static void packing_puts_even_elements_low(void **state) {
    (void)state;
    float x[32] = {[0] = 6.0f, [1] = 0.5f, [2] = -1.0f, [3] = 4.0f};
    uint8_t packed[16], scale[2];
    di_quant_qi(x, 32, packed, scale); /* scale 1 */
    assert_int_equal(packed[0], 0x17);
    assert_int_equal(packed[1], 0x6A);
    float back[32];
    di_dequant_qi(packed, scale, 32, back);
    assert_memory_equal(back, x, sizeof x);
}

/* The whole input of the vectors as floats. */
static float *golden_input(const golden *g, int64_t *n) {
    golden_tensor t = golden_get(g, "quant.input");
    float *x = malloc((size_t)t.n * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < t.n; i++)
        x[i] = golden_float(&t, i);
    *n = t.n;
    return x;
}

static void check_bytes(const golden *g, const char *name, const uint8_t *got, size_t n) {
    golden_tensor t = golden_get(g, name);
    assert_int_equal(t.n_bytes, n);
    assert_memory_equal(t.data, got, n);
}

static void check_values(const golden *g, const char *name, const float *got) {
    golden_tensor t = golden_get(g, name);
    for (int64_t i = 0; i < t.n; i++)
        assert_true(golden_float(&t, i) == got[i]);
}

static void quantisers_equal_the_reference(void **state) {
    (void)state;
    golden *g = golden_open(di_test_data("tiny/static.safetensors"));
    int64_t n;
    float *x = golden_input(g, &n), *back = malloc((size_t)n * sizeof *back);
    uint8_t *codes = malloc((size_t)n), *scales = malloc((size_t)n / 16);
    assert_true(back && codes && scales);

    di_quant_block(x, 64, 128, codes, scales);
    check_bytes(g, "quant.fp8_block.code", codes, (size_t)n);
    check_bytes(g, "quant.fp8_block.scale", scales, 8);

    di_quant_qa(x, n, codes, scales);
    check_bytes(g, "quant.fp8_row.code", codes, (size_t)n);
    check_bytes(g, "quant.fp8_row.scale", scales, (size_t)n / 32);
    di_dequant_qa(codes, scales, n, back);
    check_values(g, "quant.fp8_row.value", back);

    di_quant_qi(x, n, codes, scales);
    check_bytes(g, "quant.mxfp4.code", codes, (size_t)n / 2);
    check_bytes(g, "quant.mxfp4.scale", scales, (size_t)n / 32);
    di_dequant_qi(codes, scales, n, back);
    check_values(g, "quant.mxfp4.value", back);

    di_quant_qk(x, n, codes, scales);
    check_bytes(g, "quant.kv4.code", codes, (size_t)n / 2);
    check_bytes(g, "quant.kv4.scale", scales, (size_t)n / 16);
    di_dequant_qk(codes, scales, n, back);
    check_values(g, "quant.kv4.value", back);

    free(x), free(back), free(codes), free(scales);
    golden_close(g);
}

/* Blocks at the edges of a matrix are smaller than 32 and have scales of their own. */
static void block_quantiser_takes_ragged_edges(void **state) {
    (void)state;
    enum { N_OUT = 33, N_IN = 40 };
    float w[N_OUT * N_IN] = {0};
    uint8_t codes[N_OUT * N_IN], scales[4];
    w[0] = 448.0f;                      /* block (0,0): scale 1 */
    w[39] = 1.0f;                       /* block (0,1): 2^-8 */
    w[32 * N_IN] = 449.0f;              /* block (1,0): 2 */
    w[32 * N_IN + 39] = -448.0f * 4.0f; /* block (1,1): 4 */
    di_quant_block(w, N_OUT, N_IN, codes, scales);
    assert_int_equal(scales[0], 127);
    assert_int_equal(scales[1], 119);
    assert_int_equal(scales[2], 128);
    assert_int_equal(scales[3], 129);
    assert_int_equal(codes[0], 0x7E);
    assert_int_equal(codes[32 * N_IN + 39], 0xFE);
}

/* QA, QI and the block format give back their own values; the E4M3 scale of QK need not (never quantise it again). */
DI_PROPERTY(quantisers_keep_their_own_values, 200) {
    uint64_t rng = seed;
    float x[64], once[64], twice[64];
    uint8_t codes[64], scales[2];
    for (int i = 0; i < 64; i++) {
        x[i] = (float)ldexp(di_test_random_unit(&rng) - 0.5, (int)di_test_random_range(&rng, -12, 12));
    }
    di_quant_qa(x, 64, codes, scales);
    di_dequant_qa(codes, scales, 64, once);
    di_quant_qa(once, 64, codes, scales);
    di_dequant_qa(codes, scales, 64, twice);
    assert_memory_equal(once, twice, sizeof once);
    for (int i = 0; i < 64; i++)
        assert_true(di_round_bf16(once[i]) == once[i]); /* bf16 holds it */
    di_quant_qi(x, 64, codes, scales);
    di_dequant_qi(codes, scales, 64, once);
    di_quant_qi(once, 64, codes, scales);
    di_dequant_qi(codes, scales, 64, twice);
    assert_memory_equal(once, twice, sizeof once);
}

static void nan_does_not_become_a_scale(void **state) {
    (void)state;
    float x[32] = {[0] = NAN, [1] = 1.0f};
    uint8_t codes[32], scale[1];
    di_quant_qa(x, 32, codes, scale);
    assert_int_equal(scale[0], 119);
    assert_int_equal(codes[0], 0x7F);
    assert_int_equal(codes[1], 0x78); /* 256 */
}

DI_TEST_GROUP(format, cmocka_unit_test(e4m3_codes_mean_their_definition), cmocka_unit_test(e4m3_rounds_to_nearest_even),
              cmocka_unit_test(e4m3_clamps_and_keeps_nan), cmocka_unit_test(e8m0_is_a_power_of_two),
              cmocka_unit_test(e2m1_rounds_to_nearest_even), cmocka_unit_test(bf16_rounds_to_nearest_even),
              cmocka_unit_test(quantiser_scales_are_the_check_values), cmocka_unit_test(packing_puts_even_elements_low),
              cmocka_unit_test(quantisers_equal_the_reference), cmocka_unit_test(block_quantiser_takes_ragged_edges),
              cmocka_unit_test(quantisers_keep_their_own_values), cmocka_unit_test(nan_does_not_become_a_scale));
