/* The arithmetic of a load: percentiles beside numpy's, times of arrival beside the exponential distribution, and what
 * is counted as good. */
#include "harness.h"

#include "cli/bench_load.h"

static void assert_near(double value, double expected) {
    if (!(fabs(value - expected) <= 1e-12 * DI_MAX(1, fabs(expected)))) /* a few roundings */
        fail_msg("%.17g, expected %.17g", value, expected);
}

static void quantiles_are_those_of_numpy(void **state) {
    (void)state;
    /* numpy.quantile([15, 20, 35, 40, 50], [..]), its default method: linear */
    double v[] = {15, 20, 35, 40, 50};
    static const double parts[] = {0, 0.05, 0.3, 0.4, 0.5, 0.9, 0.99, 1};
    static const double expected[] = {15, 16, 23, 29, 35, 46, 49.6, 50};
    for (size_t i = 0; i < DI_COUNT(parts); i++)
        assert_near(di_bench_load_quantile(v, 5, parts[i]), expected[i]);
    assert_near(di_bench_load_quantile(v, 1, 0.99), 15);
    assert_true(isnan(di_bench_load_quantile(v, 0, 0.5)));

    double mixed[] = {40, 15, 50, 35, 20};
    di_bench_load_spread s;
    di_bench_load_spread_of(mixed, 5, &s);
    assert_int_equal(s.n, 5);
    assert_near(s.mean, 32);
    assert_near(s.at[DI_LOAD_P50], 35);
    assert_near(s.at[DI_LOAD_P90], 46);
    assert_near(s.at[DI_LOAD_P99], 49.6);
    di_bench_load_spread_of(NULL, 0, &s);
    assert_int_equal(s.n, 0);
    assert_true(isnan(s.mean) && isnan(s.at[DI_LOAD_P50]));
}

static void arrivals_are_a_poisson_process(void **state) {
    (void)state;
    enum { N = 100000 };
    for (uint64_t seed = 0; seed < 4; seed++) {
        double sum = 0, squares = 0, products = 0, before = 1;
        int above = 0;
        for (int64_t i = 0; i < N; i++) {
            double gap = di_bench_load_interval(seed, i);
            assert_true(gap > 0 && isfinite(gap));
            assert_true(gap == di_bench_load_interval(seed, i)); /* the same again */
            sum += gap;
            squares += gap * gap;
            products += (gap - 1) * (before - 1);
            above += gap > 2;
            before = gap;
        }
        /* exponential: mean 1, second moment 2 (its own variance is 20), 1 - F(2) = e^-2, neighbours independent; five
         * standard errors */
        double five = 5 / sqrt(N);
        assert_true(fabs(sum / N - 1) < five);
        assert_true(fabs(squares / N - 2) < five * sqrt(20));
        assert_true(fabs((double)above / N - exp(-2)) < five * sqrt(exp(-2) * (1 - exp(-2))));
        assert_true(fabs(products / N) < five);
    }
}

static void seeds_are_different_processes(void **state) {
    (void)state;
    int same = 0;
    for (int64_t i = 0; i < 1000; i++)
        for (uint64_t seed = 1; seed < 4; seed++)
            for (int64_t shift = -2; shift <= 2; shift++)
                same += i + shift >= 0 && di_bench_load_interval(seed, i) == di_bench_load_interval(0, i + shift);
    assert_int_equal(same, 0);
}

static void figures_are_of_answered_requests(void **state) {
    (void)state;
    enum { MS = 1000000 };
    di_error err = {0};
    di_bench_load load = {0};
    di_bench_load_sample samples[] = {
        {.due_ns = 0, .first_ns = 100 * MS, .last_ns = 500 * MS, .prompt_tokens = 7, .output_tokens = 5, .n_chunks = 4},
        {.due_ns = 50 * MS, .first_ns = 350 * MS, .last_ns = 750 * MS, .output_tokens = 3, .n_chunks = 3},
        /* one token: there is no time per further token, and none to be too slow by */
        {.due_ns = 100 * MS, .first_ns = 300 * MS, .last_ns = 300 * MS, .output_tokens = 1, .n_chunks = 1},
        {.due_ns = 100 * MS, .output_tokens = 2}, /* answered without text */
        {.due_ns = 0, .outcome = DI_LOAD_REFUSED, .first_ns = 1 * MS, .last_ns = 1 * MS, .output_tokens = 1},
        {.due_ns = 0, .outcome = DI_LOAD_FAILED, .first_ns = 1 * MS, .last_ns = 9 * MS, .output_tokens = 100},
    };
    di_bench_load_gap gaps[] = {{400 * MS, 0.3}, {500 * MS, 0.1}, {700 * MS, 0.2}};
    load.samples = malloc(sizeof samples);
    load.gaps = malloc(sizeof gaps);
    assert_true(load.samples && load.gaps);
    memcpy(load.samples, samples, sizeof samples);
    memcpy(load.gaps, gaps, sizeof gaps);
    load.n_samples = DI_COUNT(samples);
    load.n_gaps = DI_COUNT(gaps);
    load.wall_ns = 2000 * MS;

    di_bench_load_figures f;
    di_test_ok(di_bench_load_figures_of(&load, 0.25, 0.15, &f, &err), &err);
    assert_int_equal(f.n_ok, 4);
    assert_int_equal(f.ttft.n, 3); /* 100, 300, 200 ms */
    assert_near(f.ttft.at[DI_LOAD_P50], 0.2);
    assert_near(f.ttft.mean, 0.2);
    assert_int_equal(f.tpot.n, 2); /* 400 ms for 4 further tokens, 400 ms for 2 */
    assert_near(f.tpot.at[DI_LOAD_P50], 0.15);
    assert_near(f.total.at[DI_LOAD_P50], 0.5); /* 500, 700, 200 ms */
    assert_near(f.gap.at[DI_LOAD_P50], 0.2);
    assert_near(f.tokens_per_s, 11 / 2.0);
    assert_near(f.requests_per_s, 4 / 2.0);
    assert_near(f.prompt_tokens, 7);
    assert_int_equal(f.n_good, 2); /* the first and the one of one token */
    assert_near(f.good_per_s, 1);
    di_test_ok(di_bench_load_figures_of(&load, 0.31, 0.21, &f, &err), &err);
    assert_int_equal(f.n_good, 3);
    di_bench_load_spread part; /* a gap counts when it lies within the time as a whole */
    di_test_ok(di_bench_load_gaps_of(&load, 390 * MS, 700 * MS, &part, &err), &err);
    assert_int_equal(part.n, 2);
    assert_near(part.at[DI_LOAD_P50], 0.15);
    di_test_ok(di_bench_load_gaps_of(&load, 90 * MS, 690 * MS, &part, &err), &err);
    assert_int_equal(part.n, 2);
    assert_near(part.at[DI_LOAD_P50], 0.2);
    di_bench_load_deinit(&load);

    di_test_ok(di_bench_load_figures_of(&load, 1, 1, &f, &err), &err);
    assert_int_equal(f.n_ok, 0);
    assert_true(isnan(f.ttft.at[DI_LOAD_P99]));
}

DI_TEST_GROUP(bench_load, cmocka_unit_test(quantiles_are_those_of_numpy),
              cmocka_unit_test(arrivals_are_a_poisson_process), cmocka_unit_test(seeds_are_different_processes),
              cmocka_unit_test(figures_are_of_answered_requests));
