/* Sampling: the noise's published check values, ties, limits, log-probabilities, and the distribution that results. */
#include <math.h>

#include "engine/sample/sample.h"
#include "harness.h"

static int32_t sample_one(const di_sampling *s, const float *logits, int64_t n, uint64_t position,
                          const uint32_t *mask) {
    di_sampler sampler = {0};
    int32_t token = -1;
    di_error err = {0};
    assert_int_equal(di_sample(&sampler, s, logits, n, position, mask, &token, NULL, NULL, &err), DI_OK);
    di_sampler_deinit(&sampler);
    return token;
}

static void noise_check_values(void **state) {
    (void)state;
    static const struct {
        uint64_t seed, position, token, z;
        double g;
    } rows[] = {
        {7, 10, 0, 0x366f00d02a3252fe, -0.43709020199648},
        {8, 10, 0, 0xb71890dbeefe61a0, 1.09312619849257},
        {7, 10, 1, 0xb3dd9150ec85fffe, 1.04137758614073},
        {UINT64_MAX, 131072, 129279, 0x4e1f893c9b242183, -0.17133688950525},
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        assert_true(di_noise_bits(rows[i].seed, rows[i].position, rows[i].token) == rows[i].z);
        assert_true(fabs(di_noise_gumbel(rows[i].z) - rows[i].g) < 6e-15); /* the values have 14 decimals */
    }
}

static void noise_ends_are_finite_and_rising(void **state) {
    (void)state;
    /* u = 2^-53 and 1 - 2^-53. */
    assert_true(fabs(di_noise_gumbel(0) - -log(53 * log(2.0))) < 1e-14);
    assert_true(fabs(di_noise_gumbel(UINT64_MAX) - 53 * log(2.0)) < 1e-14);
    double before = di_noise_gumbel(0);
    for (uint64_t i = 1; i < 4096; i++) {
        double g = di_noise_gumbel(i << 52 | 0xFFFFFFFFFFFFFu);
        assert_true(g > before);
        before = g;
    }
}

static void greedy_takes_the_largest_and_the_lower_id(void **state) {
    (void)state;
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0;
    const float logits[] = {1, 5, -2, 5, 4.5f, -INFINITY};
    assert_int_equal(sample_one(&s, logits, 6, 3, NULL), 1);
    const uint32_t mask = ~2u;
    assert_int_equal(sample_one(&s, logits, 6, 3, &mask), 3);
    s.temperature = 0.99e-5; /* still greedy */
    assert_int_equal(sample_one(&s, logits, 6, 3, NULL), 1);
    const float zeros[] = {-1, -0.0f, 0.0f};
    assert_int_equal(sample_one(&s, zeros, 3, 0, NULL), 1); /* equal, so the lower id */
}

static void sampled_token_is_the_largest_sum(void **state) {
    (void)state;
    /* By hand from the check values: position 10, tokens 0 and 1, seed 7: noise -0.437 and 1.041. */
    di_sampling s;
    di_sampling_init(&s);
    s.seed = 7;
    const float near[] = {1.4f, 0};
    assert_int_equal(sample_one(&s, near, 2, 10, NULL), 1); /* 0.963 < 1.041 */
    const float far[] = {1.5f, 0};
    assert_int_equal(sample_one(&s, far, 2, 10, NULL), 0); /* 1.063 > 1.041 */
    s.temperature = 2;
    assert_int_equal(sample_one(&s, far, 2, 10, NULL), 1); /* 0.313 < 1.041 */
    s.top_k = 1;
    assert_int_equal(sample_one(&s, far, 2, 10, NULL), 0);
}

static void top_p_and_top_k_keep_the_right_tokens(void **state) {
    (void)state;
    /* Probabilities 1/2, 1/4, 1/8, 1/8 with ids 2, 0, 3, 1: a token falls when the mass before it exceeds top_p. */
    const float log2f_ = 0.6931472f;
    const float logits[] = {log2f_, 0, 2 * log2f_, 0};
    static const struct {
        double top_p;
        int64_t top_k;
        unsigned survivors;
    } rows[] = {{1, -1, 0xF},    {1, 0, 0xF},     {0.49, -1, 0x4}, {0.51, -1, 0x5}, {0.74, -1, 0x5},
                {0.76, -1, 0x7}, {0.88, -1, 0xF}, {1, 1, 0x4},     {1, 2, 0x5},     {1, 3, 0x7},
                {0.76, 2, 0x5},  {0.3, 3, 0x4},   {1, 100, 0xF}};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.top_p = rows[i].top_p;
        s.top_k = rows[i].top_k;
        unsigned seen = 0;
        for (s.seed = 0; s.seed < 300; s.seed++)
            seen |= 1u << sample_one(&s, logits, 4, 1, NULL);
        assert_int_equal(seen, rows[i].survivors);
    }
}

static void impossible_rows_are_errors(void **state) {
    (void)state;
    di_sampling s;
    di_sampling_init(&s);
    di_sampler sampler = {0};
    di_error err;
    int32_t token;
    const float logits[] = {1, 2, 3};
    const uint32_t none = 0;
    assert_int_equal(di_sample(&sampler, &s, logits, 3, 7, &none, &token, NULL, NULL, &err), DI_ERR_REQUEST);
    const float nan[] = {1, NAN, 3};
    assert_int_equal(di_sample(&sampler, &s, nan, 3, 7, NULL, &token, NULL, NULL, &err), DI_ERR_INTERNAL);
    assert_non_null(strstr(err.message, "position 7"));
    const float infinite[] = {1, INFINITY, 3};
    assert_int_equal(di_sample(&sampler, &s, infinite, 3, 7, NULL, &token, NULL, NULL, &err), DI_ERR_INTERNAL);
    di_sampler_deinit(&sampler);
}

static void log_probabilities_raw_and_processed(void **state) {
    (void)state;
    const float logits[] = {1, 3, 2, 3, -4};
    const uint32_t mask = 0x1F & ~8u; /* token 3 is not allowed */
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0.5;
    s.top_k = 2;
    s.n_logprobs = 5;
    di_sampler sampler = {0};
    int32_t token;
    float logprob;
    di_logprob top[5];
    assert_int_equal(di_sample(&sampler, &s, logits, 5, 9, &mask, &token, &logprob, top, NULL), DI_OK);
    /* Raw: softmax of the logits after the mask, whatever temperature and top-k say. */
    double sum = exp(1) + exp(3) + exp(2) + exp(-4);
    static const int32_t order[] = {1, 2, 0, 4};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(top[i].token, order[i]);
        assert_true(fabs(top[i].logprob - (logits[order[i]] - log(sum))) < 1e-6);
    }
    assert_int_equal(top[4].token, -1);
    assert_true(fabs(logprob - (logits[token] - log(sum))) < 1e-6);
    /* Processed: of the two survivors, at temperature 0.5. */
    s.logprobs_processed = true;
    assert_int_equal(di_sample(&sampler, &s, logits, 5, 9, &mask, &token, &logprob, top, NULL), DI_OK);
    double scaled = log(exp(6) + exp(4));
    assert_int_equal(top[0].token, 1);
    assert_int_equal(top[1].token, 2);
    assert_int_equal(top[2].token, -1);
    assert_true(fabs(top[0].logprob - (6 - scaled)) < 1e-6);
    assert_true(fabs(top[1].logprob - (4 - scaled)) < 1e-6);
    di_sampler_deinit(&sampler);
}

static void forced_token_has_the_values_of_a_drawn_one(void **state) {
    (void)state;
    const float logits[] = {1, 3, 2, 2.5f};
    for (int processed = 0; processed < 2; processed++) {
        di_sampling s;
        di_sampling_init(&s);
        s.n_logprobs = 4;
        s.top_k = 3;
        s.logprobs_processed = processed;
        di_sampler sampler = {0};
        for (s.seed = 0; s.seed < 20; s.seed++) {
            int32_t token;
            float drawn, forced;
            di_logprob top_drawn[4], top_forced[4];
            assert_int_equal(di_sample(&sampler, &s, logits, 4, 1, NULL, &token, &drawn, top_drawn, NULL), DI_OK);
            assert_int_equal(di_sample_forced(&sampler, &s, logits, 4, 1, NULL, token, &forced, top_forced, NULL),
                             DI_OK);
            assert_int_equal(di_f32_bits(drawn), di_f32_bits(forced));
            assert_memory_equal(top_drawn, top_forced, sizeof top_drawn);
        }
        float none;
        assert_int_equal(di_sample_forced(&sampler, &s, logits, 4, 1, NULL, 0, &none, NULL, NULL), DI_OK);
        assert_true(processed ? none == DI_LOGPROB_FLOOR : none > -10); /* token 0 falls to top-k */
        di_sampler_deinit(&sampler);
    }
}

static void bad_parameters_name_field_and_value(void **state) {
    (void)state;
    struct {
        di_sampling s;
        const char *names;
    } rows[9];
    for (size_t i = 0; i < DI_COUNT(rows); i++)
        di_sampling_init(&rows[i].s);
    size_t n = 0;
    rows[n].s.temperature = -0.5, rows[n++].names = "'temperature': -0.5";
    rows[n].s.temperature = NAN, rows[n++].names = "'temperature'";
    rows[n].s.temperature = INFINITY, rows[n++].names = "'temperature': inf";
    rows[n].s.top_p = 0, rows[n++].names = "'top_p': 0";
    rows[n].s.top_p = 1.5, rows[n++].names = "'top_p': 1.5";
    rows[n].s.top_k = -2, rows[n++].names = "'top_k': -2";
    rows[n].s.top_k = (int64_t)INT32_MAX + 1, rows[n++].names = "'top_k': 2147483648";
    rows[n].s.max_tokens = -1, rows[n++].names = "'max_tokens': -1";
    rows[n].s.n_logprobs = 1001, rows[n++].names = "'logprobs': 1001";
    assert_int_equal(n, DI_COUNT(rows));
    for (size_t i = 0; i < n; i++) {
        di_error err = {0};
        assert_int_equal(di_sampling_check(&rows[i].s, &err), DI_ERR_RANGE);
        assert_non_null(strstr(err.message, rows[i].names));
    }
    di_sampling good;
    di_sampling_init(&good);
    assert_int_equal(di_sampling_check(&good, NULL), DI_OK);
    good.temperature = 0, good.top_k = 0, good.top_p = 1e-9;
    assert_int_equal(di_sampling_check(&good, NULL), DI_OK);
}

/* Pearson's statistic of N draws over the positions of one request, against the softmax after the filters. 19 degrees
 * of freedom: 43.8 is passed with probability 0.1 %; seeds are fixed, so the test can't flicker. */
static void distribution_passes_chi_square(void **state) {
    (void)state;
    enum { V = 20, N = 20000 };
    float logits[V];
    for (int i = 0; i < V; i++)
        logits[i] = (float)((i * 7) % V) * 0.15f;
    static const uint64_t seeds[] = {1, 42, 123456789, 0xFFFFFFFFFFFFFFFFu};
    static const struct {
        double temperature, top_p;
        int64_t top_k;
    } params[] = {{1, 1, -1}, {0.7, 1, -1}, {1.3, 0.8, -1}, {1, 1, 8}};
    for (size_t p = 0; p < DI_COUNT(params); p++) {
        /* Expected: sort by falling logit, cut, renormalise. */
        double prob[V], total = 0, before = 0;
        int order[V];
        for (int i = 0; i < V; i++)
            order[(V - 1) - (i * 7) % V] = i;
        for (int i = 0; i < V; i++)
            total += prob[i] = exp(logits[i] / params[p].temperature);
        double kept = 0;
        int n_kept = 0;
        for (int r = 0; r < V; r++) {
            double mass = prob[order[r]] / total;
            bool drop =
                (params[p].top_p < 1 && before > params[p].top_p) || (params[p].top_k > 0 && r >= params[p].top_k);
            before += mass;
            prob[order[r]] = drop ? 0 : mass;
            kept += drop ? 0 : mass;
            n_kept += !drop;
        }
        for (size_t k = 0; k < DI_COUNT(seeds); k++) {
            di_sampling s;
            di_sampling_init(&s);
            s.temperature = params[p].temperature;
            s.top_p = params[p].top_p;
            s.top_k = params[p].top_k;
            s.seed = seeds[k];
            int count[V] = {0};
            di_sampler sampler = {0};
            for (uint64_t i = 0; i < N; i++) {
                int32_t token;
                assert_int_equal(di_sample(&sampler, &s, logits, V, i, NULL, &token, NULL, NULL, NULL), DI_OK);
                count[token]++;
            }
            di_sampler_deinit(&sampler);
            double chi = 0;
            for (int i = 0; i < V; i++) {
                double expected = prob[i] / kept * N;
                if (prob[i] == 0) {
                    assert_int_equal(count[i], 0);
                } else {
                    chi += (count[i] - expected) * (count[i] - expected) / expected;
                }
            }
            /* Mean n-1, deviation sqrt(2(n-1)): four deviations above is about 0.1 % for these n. */
            assert_true(chi < (n_kept - 1) + 4 * sqrt(2.0 * (n_kept - 1)));
        }
    }
}

DI_TEST_GROUP(sample, cmocka_unit_test(noise_check_values), cmocka_unit_test(noise_ends_are_finite_and_rising),
              cmocka_unit_test(greedy_takes_the_largest_and_the_lower_id),
              cmocka_unit_test(sampled_token_is_the_largest_sum),
              cmocka_unit_test(top_p_and_top_k_keep_the_right_tokens), cmocka_unit_test(impossible_rows_are_errors),
              cmocka_unit_test(log_probabilities_raw_and_processed),
              cmocka_unit_test(forced_token_has_the_values_of_a_drawn_one),
              cmocka_unit_test(bad_parameters_name_field_and_value), cmocka_unit_test(distribution_passes_chi_square));
