/* The elementary functions against long double: the bounds that tensor.h states, special values, and the inline form.
 *
 * The reference is the C library's long double functions, whose own error on a 64-bit significand is below 2^-10 ulp of
 * a double, so that a measured error is the function's. Points come from a fixed linear congruential sequence. */
#include <float.h>
#include <math.h>

#include "harness.h"
#include "tensor/math_inline.h"
#include "tensor/tensor.h"

static uint64_t lcg_state;

static double lcg_unit(void) {
    lcg_state = lcg_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(lcg_state >> 11) * 0x1p-53;
}

/* Size of the last place of a double of r's magnitude; of a subnormal the smallest double. */
static double ulp_of(double r) {
    int e;
    frexp(r, &e);
    return ldexp(1.0, (e < -1021 ? -1021 : e) - 53);
}

static double error_ulps(double got, long double want) {
    return (double)(fabsl((long double)got - want) / ulp_of((double)want));
}

static void exp_error_below_bound(void **state) {
    (void)state;
    lcg_state = 1;
    for (int i = 0; i < 300000; i++) {
        double x = lcg_unit() * 1454.8 - 745.1;
        long double want = expl((long double)x);
        /* A subnormal result is rounded twice: 1 ulp + 0.5. */
        if (want < (long double)DBL_MAX)
            assert_true(error_ulps(di_exp(x), want) < (want < DBL_MIN ? 1.5 : 1.0));
        x = (lcg_unit() - 0.5) * 3;
        assert_true(error_ulps(di_exp(x), expl((long double)x)) < 1.0);
    }
}

static void ln_error_below_bound(void **state) {
    (void)state;
    lcg_state = 2;
    for (int i = 0; i < 300000; i++) {
        double x = ldexp(1 + lcg_unit(), (int)(lcg_unit() * 2090) - 1070);
        assert_true(error_ulps(di_ln(x), logl((long double)x)) < 1.0);
        x = 0.3 + lcg_unit() * 2;
        assert_true(error_ulps(di_ln(x), logl((long double)x)) < 1.0);
    }
}

static void log1p_error_below_bound(void **state) {
    (void)state;
    lcg_state = 3;
    for (int i = 0; i < 300000; i++) {
        double x = ldexp(1 + lcg_unit(), (int)(lcg_unit() * 200) - 100);
        assert_true(error_ulps(di_log1p(x), log1pl((long double)x)) < 1.0);
        x = lcg_unit() * 4;
        assert_true(error_ulps(di_log1p(x), log1pl((long double)x)) < 1.0);
    }
}

static void expf_error_below_two_ulps(void **state) {
    (void)state;
    /* Every 97th float of the range: all exponents and both signs. */
    for (uint64_t b = 0; b <= 0xFFFFFFFFu; b += 97) {
        float x = di_f32_from_bits((uint32_t)b);
        if (!(x >= DI_EXPF_MIN && x <= DI_EXPF_MAX))
            continue;
        if (fabsf(x) < 0x1p-30f && (b / 97) % 64)
            continue; /* tiny arguments all give 1: thinned out */
        double want = exp((double)x);
        int e;
        frexp(want, &e);
        assert_true(fabs((double)di_expf(x) - want) < 2 * ldexp(1.0, e - 24));
    }
}

static void special_values(void **state) {
    (void)state;
    assert_true(di_exp(0.0) == 1.0);
    assert_true(di_exp(-0.0) == 1.0);
    assert_true(isinf(di_exp(709.79)) && isinf(di_exp(1e300)) && isinf(di_exp(INFINITY)));
    assert_true(isfinite(di_exp(709.78)));
    assert_true(di_exp(-745.3) == 0.0 && di_exp(-INFINITY) == 0.0);
    assert_true(di_exp(-745.1) == 0x1p-1074);
    assert_true(isnan(di_exp(NAN)));

    assert_true(di_ln(1.0) == 0.0);
    assert_true(isinf(di_ln(0.0)) && di_ln(0.0) < 0);
    assert_true(isnan(di_ln(-1.0)) && isnan(di_ln(NAN)));
    assert_true(isinf(di_ln(INFINITY)));

    assert_true(di_log1p(0.0) == 0.0);
    assert_true(di_log1p(0x1p-1074) == 0x1p-1074);
    assert_true(isinf(di_log1p(INFINITY)) && isnan(di_log1p(NAN)));

    assert_true(di_expf(0.0f) == 1.0f);
    assert_true(di_expf(-87.4f) == 0.0f && di_expf(-INFINITY) == 0.0f);
    assert_true(isinf(di_expf(88.8f)) && isinf(di_expf(INFINITY)));
    assert_true(isfinite(di_expf(DI_EXPF_MAX)));
    assert_true(di_expf(DI_EXPF_MIN) >= 0x1p-126f);
    assert_true(isnan(di_expf(NAN)));
}

static void inline_form_vectorised_gives_the_same_bits(void **state) {
    (void)state;
    enum { N = 4096 };
    static float x[N], y[N];
    lcg_state = 4;
    for (int round = 0; round < 32; round++) {
        for (int i = 0; i < N; i++)
            x[i] = (float)((lcg_unit() - 0.5) * 200);
        x[0] = NAN;
        x[1] = INFINITY;
        x[2] = -INFINITY;
        for (int i = 0; i < N; i++)
            y[i] = di_expf_inline(x[i]);
        for (int i = 1; i < N; i++)
            assert_int_equal(di_f32_bits(y[i]), di_f32_bits(di_expf(x[i])));
        assert_true(isnan(y[0]));
    }
}

static void block_form_gives_the_same_bits(void **state) {
    (void)state;
    lcg_state = 5;
    for (int round = 0; round < 200000; round++) {
        double x[DI_EXP_BLOCK], y[DI_EXP_BLOCK];
        for (int i = 0; i < DI_EXP_BLOCK; i++) {
            double u = lcg_unit();
            int kind = (int)(lcg_unit() * 8);
            x[i] = kind == 0   ? -u
                   : kind == 1 ? -u * 40
                   : kind == 2 ? -u * 800
                   : kind == 3 ? -700 - u * 50 /* subnormal results and the end */
                   : kind == 4 ? -ldexp(u, -(int)(lcg_unit() * 1070))
                   : kind == 5 ? -INFINITY
                   : kind == 6 ? -0.0
                               : -u * 1e300;
        }
        memcpy(y, x, sizeof y);
        di_exp_block(y);
        for (int i = 0; i < DI_EXP_BLOCK; i++) {
            double want = di_exp(x[i]);
            assert_memory_equal(&y[i], &want, sizeof want);
        }
    }
}

DI_TEST_GROUP(math, cmocka_unit_test(exp_error_below_bound), cmocka_unit_test(ln_error_below_bound),
              cmocka_unit_test(log1p_error_below_bound), cmocka_unit_test(expf_error_below_two_ulps),
              cmocka_unit_test(special_values), cmocka_unit_test(inline_form_vectorised_gives_the_same_bits),
              cmocka_unit_test(block_form_gives_the_same_bits));
