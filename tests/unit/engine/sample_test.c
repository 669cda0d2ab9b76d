/* Sampling: the noise's published check values, ties, limits, masks, bias, penalties, log-probabilities, and the
 * distribution that results. Expected numbers are worked out by hand or by double arithmetic beside them. */
#include <math.h>

#include "engine/sample/sample.h"
#include "harness.h"

static di_sample_args args_of(const di_sampling *s, const float *logits, int64_t n, uint64_t position,
                              const uint32_t *mask) {
    return (di_sample_args){.sampling = s,
                            .logits = logits,
                            .n_vocab = n,
                            .seed = s->seed,
                            .position = position,
                            .eos_id = -1,
                            .mask = mask,
                            .forced = -1};
}

static int32_t sample_of(const di_sample_args *a) {
    di_sampler sampler = {0};
    int32_t token = -1;
    di_error err = {0};
    di_test_ok(di_sample(&sampler, a, &token, &err), &err);
    di_sampler_deinit(&sampler);
    return token;
}

static int32_t sample_one(const di_sampling *s, const float *logits, int64_t n, uint64_t position,
                          const uint32_t *mask) {
    di_sample_args a = args_of(s, logits, n, position, mask);
    return sample_of(&a);
}

/* The tokens, as bits, that come in 300 draws. */
static unsigned survivors_of(const di_sample_args *args) {
    unsigned seen = 0;
    di_sample_args a = *args;
    for (a.seed = 0; a.seed < 300; a.seed++)
        seen |= 1u << sample_of(&a);
    return seen;
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
        di_sample_args a = args_of(&s, logits, 4, 1, NULL);
        assert_int_equal(survivors_of(&a), rows[i].survivors);
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
    di_sample_args a = args_of(&s, logits, 3, 7, &none);
    assert_int_equal(di_sample(&sampler, &a, &token, &err), DI_ERR_REQUEST);
    assert_non_null(strstr(err.message, "position 7"));
    const float nan[] = {1, NAN, 3};
    a = args_of(&s, nan, 3, 7, NULL);
    assert_int_equal(di_sample(&sampler, &a, &token, &err), DI_ERR_INTERNAL);
    assert_non_null(strstr(err.message, "position 7"));
    const float infinite[] = {1, INFINITY, 3};
    a.logits = infinite;
    assert_int_equal(di_sample(&sampler, &a, &token, &err), DI_ERR_INTERNAL);
    float logprob;
    assert_int_equal(di_logprobs_of(&sampler, nan, 3, 0, 0, &logprob, NULL, &err), DI_ERR_INTERNAL);
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
    di_sample_args a = args_of(&s, logits, 5, 9, &mask);
    a.logprob = &logprob;
    a.top = top;
    assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
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
    assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
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
            di_sample_args a = args_of(&s, logits, 4, 1, NULL);
            a.logprob = &drawn;
            a.top = top_drawn;
            assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
            a.forced = token;
            a.logprob = &forced;
            a.top = top_forced;
            assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
            assert_int_equal(token, a.forced);
            assert_int_equal(di_f32_bits(drawn), di_f32_bits(forced));
            assert_memory_equal(top_drawn, top_forced, sizeof top_drawn);
        }
        float none;
        int32_t token;
        di_sample_args a = args_of(&s, logits, 4, 1, NULL);
        a.forced = 0;
        a.logprob = &none;
        assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
        assert_int_equal(token, 0);
        assert_true(processed ? none == DI_LOGPROB_FLOOR : none > -10); /* token 0 falls to top-k */
        di_sampler_deinit(&sampler);
    }
}

static void bad_parameters_name_field_and_value(void **state) {
    (void)state;
    struct {
        di_sampling s;
        const char *names;
    } rows[29];
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
    rows[n].s.n_prompt_logprobs = -2, rows[n++].names = "'prompt_logprobs': -2";
    rows[n].s.min_p = -0.1, rows[n++].names = "'min_p': -0.1";
    rows[n].s.min_p = 1.01, rows[n++].names = "'min_p': 1.01";
    rows[n].s.min_p = NAN, rows[n++].names = "'min_p': nan";
    rows[n].s.top_p = NAN, rows[n++].names = "'top_p': nan";
    rows[n].s.presence_penalty = 2.5, rows[n++].names = "'presence_penalty': 2.5, expected -2 to 2";
    rows[n].s.presence_penalty = NAN, rows[n++].names = "'presence_penalty': nan";
    rows[n].s.frequency_penalty = -2.5, rows[n++].names = "'frequency_penalty': -2.5, expected -2 to 2";
    rows[n].s.frequency_penalty = NAN, rows[n++].names = "'frequency_penalty': nan";
    rows[n].s.repetition_penalty = 0, rows[n++].names = "'repetition_penalty': 0";
    rows[n].s.repetition_penalty = INFINITY, rows[n++].names = "'repetition_penalty': inf";
    rows[n].s.repetition_penalty = NAN, rows[n++].names = "'repetition_penalty': nan";
    rows[n].s.min_tokens = -1, rows[n++].names = "'min_tokens': -1";
    rows[n].s.max_tokens = 3;
    rows[n].s.min_tokens = 4, rows[n++].names = "'min_tokens': 4, expected 0 to max_tokens, which is 3";
    static const int32_t seven = 7, negative = -7;
    static const float not_a_number = NAN, infinite = -INFINITY, one = 1;
    for (int i = 0; i < 3; i++) {
        rows[n + i].s.n_bias = 1;
        rows[n + i].s.bias_ids = i == 2 ? &negative : &seven;
        rows[n + i].s.bias_values = i == 2 ? &one : i ? &infinite : &not_a_number;
    }
    rows[n++].names = "'logit_bias': nan for token 7";
    rows[n++].names = "'logit_bias': -inf for token 7";
    rows[n++].names = "'logit_bias': token id -7";
    rows[n].s.n_stop_tokens = 1;
    rows[n].s.stop_tokens = &negative, rows[n++].names = "'stop_token_ids': -7";
    rows[n].s.n_logprobs = -2, rows[n++].names = "'logprobs': -2";
    rows[n].s.repetition_penalty = -1, rows[n++].names = "'repetition_penalty': -1";
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
    good.min_p = 1, good.presence_penalty = -2, good.frequency_penalty = 2, good.repetition_penalty = 1e-9;
    good.min_tokens = 5; /* max_tokens 0 is not settled yet */
    assert_int_equal(di_sampling_check(&good, NULL), DI_OK);
    good.max_tokens = 5;
    good.n_bias = 1, good.bias_ids = &seven, good.bias_values = &one;
    assert_int_equal(di_sampling_check(&good, NULL), DI_OK);
    di_error err;
    assert_int_equal(di_sampling_check_vocab(&good, 8, &err), DI_OK);
    assert_int_equal(di_sampling_check_vocab(&good, 7, &err), DI_ERR_RANGE);
    assert_non_null(strstr(err.message, "'logit_bias': token id 7 is outside the vocabulary, expected 0 to 6"));
}

/* ---- masks, bias, penalties, min-p ---------------------------------------------------------------------------------
 */

static void min_p_keeps_a_share_of_the_best(void **state) {
    (void)state;
    /* Probabilities 1/2, 1/4, 1/8, 1/8 with ids 2, 0, 3, 1. The logit of 1/4 is a float just below -log(2): its weight
     * is 34359738302.6, under the 2^35 of a half. */
    const float log2f_ = 0x1.62e43p-1f, below = 0x1.62e42ep-1f;
    const float logits[] = {-log2f_, -2 * log2f_, 0, -2 * log2f_};
    static const struct {
        double min_p, top_p;
        int64_t top_k;
        unsigned survivors;
    } rows[] = {{0, 1, -1, 0xF},      {0.2, 1, -1, 0xF},   {0.26, 1, -1, 0x5}, {0.49, 1, -1, 0x5},
                {0.5, 1, -1, 0x4},    {1, 1, -1, 0x4},     {0.2, 1, 2, 0x5},   {0.2, 0.76, -1, 0x7},
                {0.3, 0.76, -1, 0x5}, {0.2, 0.76, 2, 0x5}, {1e-12, 1, -1, 0xF}};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.min_p = rows[i].min_p;
        s.top_p = rows[i].top_p;
        s.top_k = rows[i].top_k;
        di_sample_args a = args_of(&s, logits, 4, 1, NULL);
        assert_int_equal(survivors_of(&a), rows[i].survivors);
    }
    /* One float less and the weight is 34359740350.6, above 2^35. */
    di_sampling s;
    di_sampling_init(&s);
    s.min_p = 0.5;
    const float near[] = {0, -below, -log2f_};
    di_sample_args a = args_of(&s, near, 3, 1, NULL);
    assert_int_equal(survivors_of(&a), 0x3);
    /* 1 keeps what is as likely as the best. */
    s.min_p = 1;
    const float equal[] = {1, 3, 2.9999f, 3};
    a = args_of(&s, equal, 4, 1, NULL);
    assert_int_equal(survivors_of(&a), 0xA);
}

static void min_p_is_of_rounded_weights(void **state) {
    (void)state;
    /* At these temperatures 2^36 * exp(-1/t) is 999.6 and 999.4, of which only the first rounds to 1000. */
    const float logits[] = {0, -1};
    static const double temperatures[] = {0.05541411625368768, 0.05541350180841675};
    for (int i = 0; i < 2; i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.temperature = temperatures[i];
        s.min_p = 1000 * 0x1p-36;
        s.n_logprobs = 2;
        s.logprobs_processed = true;
        di_sampler sampler = {0};
        int32_t token;
        float logprob;
        di_logprob top[2];
        di_sample_args a = args_of(&s, logits, 2, 1, NULL);
        a.logprob = &logprob;
        a.top = top;
        assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
        assert_int_equal(top[0].token, 0);
        assert_int_equal(top[1].token, i == 0 ? 1 : -1);
        /* 1/t is 18.0459; the token that falls is no part of the sum. */
        assert_true(i == 0 ? fabs(top[1].logprob + 18.0459) < 1e-4 : top[0].logprob == 0);
        di_sampler_deinit(&sampler);
    }
}

static void end_marks_wait_for_min_tokens(void **state) {
    (void)state;
    const float logits[] = {1, 9, 3, 8, 7};
    static const int32_t stops[] = {3, 1000};
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0;
    s.min_tokens = 3;
    s.n_stop_tokens = 2;
    s.stop_tokens = stops;
    s.n_logprobs = 5;
    float logprob;
    di_logprob top[5];
    di_sampler sampler = {0};
    static const int32_t want[] = {4, 4, 4, 1, 1};
    for (int64_t n = 0; n < 5; n++) {
        di_sample_args a = args_of(&s, logits, 5, 10, NULL);
        a.eos_id = 1;
        a.n_output = n;
        a.logprob = &logprob;
        a.top = top;
        int32_t token;
        assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
        assert_int_equal(token, want[n]);
        /* The masks come before the raw log-probabilities. */
        double sum = exp(1) + exp(3) + exp(7) + (n < 3 ? 0 : exp(8) + exp(9));
        assert_true(fabs(logprob - (logits[token] - log(sum))) < 1e-6);
        assert_int_equal(top[3].token, n < 3 ? -1 : 2);
    }
    /* A mask that leaves an end mark alone can't be met. */
    const uint32_t only_end = 1u << 1 | 1u << 3;
    di_sample_args a = args_of(&s, logits, 5, 10, &only_end);
    a.eos_id = 1;
    int32_t token;
    assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_ERR_REQUEST);
    di_sampler_deinit(&sampler);
}

static void masks_and_blacklist_are_joined(void **state) {
    (void)state;
    float logits[70];
    for (int i = 0; i < 70; i++)
        logits[i] = (float)i;
    uint32_t mask[3] = {UINT32_MAX, UINT32_MAX, 0x7}, blacklist[3] = {0, 1u << 31, 0x4};
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0;
    di_sample_args a = args_of(&s, logits, 70, 0, NULL);
    assert_int_equal(sample_of(&a), 69);
    a.blacklist = blacklist;
    assert_int_equal(sample_of(&a), 69);
    a.mask = mask; /* up to 66 */
    assert_int_equal(sample_of(&a), 65);
    mask[2] = 0;
    assert_int_equal(sample_of(&a), 62);
    s.min_tokens = 1;
    a.eos_id = 62;
    assert_int_equal(sample_of(&a), 61);
    /* A forced token is taken, and a token that the masks forbid has no probability. */
    s.n_logprobs = 0;
    float logprob;
    a.forced = 63;
    a.logprob = &logprob;
    assert_int_equal(sample_of(&a), 63);
    assert_true(logprob == DI_LOGPROB_FLOOR);
}

static void bias_is_added_and_cut(void **state) {
    (void)state;
    const float logits[] = {1, 2, 3, -INFINITY};
    static const int32_t ids[] = {0, 2, 3, 0, 9};
    static const float values[] = {1.5f, -1, 50, 0.25f, 7};
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0;
    s.n_bias = 5;
    s.bias_ids = ids;
    s.bias_values = values;
    s.n_logprobs = 4;
    s.logprobs_processed = false;
    di_sampler sampler = {0};
    int32_t token;
    float logprob;
    di_logprob top[4];
    di_sample_args a = args_of(&s, logits, 4, 0, NULL);
    a.logprob = &logprob;
    a.top = top;
    /* 2.75, 2, 2: the raw log-probabilities are of 1, 2, 3. */
    assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
    assert_int_equal(token, 0);
    assert_true(fabs(logprob - (1 - log(exp(1) + exp(2) + exp(3)))) < 1e-6);
    assert_int_equal(top[0].token, 2);
    s.temperature = 1;
    s.logprobs_processed = true;
    assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
    static const int32_t order[] = {0, 1, 2, -1};
    for (int i = 0; i < 4; i++)
        assert_int_equal(top[i].token, order[i]);
    assert_true(fabs(top[2].logprob - (2 - log(exp(2.75) + 2 * exp(2)))) < 1e-6);
    /* 1000 counts as 100, which does not reach from -200 to 3. */
    const float far[] = {-200, 2, 3};
    static const int32_t zero = 0;
    static const float much = 1000;
    s.temperature = 0;
    s.n_bias = 1;
    s.bias_ids = &zero;
    s.bias_values = &much;
    assert_int_equal(sample_one(&s, far, 3, 0, NULL), 2);
    di_sampler_deinit(&sampler);
}

/* Processed log-probabilities at temperature 1 against the logits that the penalties should leave. */
static void assert_leaves(const di_sample_args *given, const double *want) {
    di_sample_args a = *given;
    di_sampling s = *a.sampling;
    s.n_logprobs = (int32_t)a.n_vocab;
    s.logprobs_processed = true;
    s.temperature = 1;
    float logprob;
    di_logprob top[16];
    a.sampling = &s;
    a.logprob = &logprob;
    a.top = top;
    double sum = 0;
    for (int64_t i = 0; i < a.n_vocab; i++)
        sum += exp(want[i]);
    sample_of(&a);
    for (int64_t i = 0; i < a.n_vocab; i++)
        assert_true(fabs(top[i].logprob - (want[top[i].token] - log(sum))) < 1e-6);
    s.temperature = 0;
    s.n_logprobs = -1;
    int32_t best = 0;
    for (int32_t i = 0; i < a.n_vocab; i++)
        best = want[i] > want[best] ? i : best;
    assert_int_equal(sample_of(&a), best);
}

static void penalties_are_those_of_vllm(void **state) {
    (void)state;
    /* Token 0 in the prompt, 1 twice in the output, 2 in both, 3 in the output, 4 nowhere, 5 in the prompt. */
    const float logits[] = {4, 6, -2, -1, 3, -0.5f};
    static const int32_t prompt[] = {0, 2, 0, 5, 700000}, output[] = {1, 2, 1, 3};
    di_history h = {0};
    di_error err;
    di_test_ok(di_history_add_prompt(&h, prompt, 5, &err), &err);
    di_test_ok(di_history_add_output(&h, output, 4, &err), &err);
    static const struct {
        double presence, frequency, repetition, want[6];
    } rows[] = {
        {0.5, 0, 1, {4, 5.5, -2.5, -1.5, 3, -0.5}},
        {-2, 0, 1, {4, 8, 0, 1, 3, -0.5}},
        {0, 1.5, 1, {4, 3, -3.5, -2.5, 3, -0.5}},
        {0, 0, 2, {2, 3, -4, -2, 3, -1}},         /* positive divided, negative multiplied */
        {0, 0, 0.5, {8, 12, -1, -0.5, 3, -0.25}}, /* below 1 it rewards */
        {1, 0.5, 2, {2, 1, -5.5, -3.5, 3, -1}},   /* repetition first, then the others */
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.presence_penalty = rows[i].presence;
        s.frequency_penalty = rows[i].frequency;
        s.repetition_penalty = rows[i].repetition;
        assert_true(di_sampling_needs_history(&s));
        assert_int_equal(di_sampling_needs_prompt_history(&s), rows[i].repetition != 1);
        di_sample_args a = args_of(&s, logits, 6, 9, NULL);
        a.history = &h;
        assert_leaves(&a, rows[i].want);
    }
    di_history_deinit(&h);
}

static void bias_comes_before_penalties(void **state) {
    (void)state;
    const float logits[] = {1, -1, 0};
    static const int32_t ids[] = {0, 1}, output[] = {0, 1};
    static const float values[] = {-3, 3};
    di_history h = {0};
    assert_int_equal(di_history_add_output(&h, output, 2, NULL), DI_OK);
    di_sampling s;
    di_sampling_init(&s);
    s.n_bias = 2;
    s.bias_ids = ids;
    s.bias_values = values;
    s.repetition_penalty = 2;
    di_sample_args a = args_of(&s, logits, 3, 9, NULL);
    a.history = &h;
    assert_leaves(&a, (const double[]){-4, 1, 0}); /* -2 is doubled, 2 halved */
    di_history_deinit(&h);
}

static void drafts_count_as_output(void **state) {
    (void)state;
    const float logits[] = {4, 6, -2, -1, 3};
    static const int32_t prompt[] = {0, 3}, output[] = {1}, drafts[] = {2, 1, 3, 2};
    di_sampling s;
    di_sampling_init(&s);
    s.presence_penalty = 1;
    s.frequency_penalty = 0.5;
    s.repetition_penalty = 2;
    di_history h = {0};
    assert_int_equal(di_history_add_prompt(&h, prompt, 2, NULL), DI_OK);
    assert_int_equal(di_history_add_output(&h, output, 1, NULL), DI_OK);
    di_sample_args a = args_of(&s, logits, 5, 9, NULL);
    a.history = &h;
    assert_leaves(&a, (const double[]){2, 1.5, -2, -2, 3});
    a.drafts = drafts;
    a.n_drafts = 4; /* 0: prompt; 1: twice; 2: twice, new; 3: once, and in the prompt */
    assert_leaves(&a, (const double[]){2, 1, -6, -3.5, 3});
    /* The same as when they are committed, and after a step back as before. */
    assert_int_equal(di_history_add_output(&h, drafts, 4, NULL), DI_OK);
    a.n_drafts = 0;
    assert_leaves(&a, (const double[]){2, 1, -6, -3.5, 3});
    di_history_step_back(&h, drafts, 4);
    assert_leaves(&a, (const double[]){2, 1.5, -2, -2, 3});
    /* Without a history at all. */
    a.history = NULL;
    a.n_drafts = 2;
    assert_leaves(&a, (const double[]){4, 1.5, -5.5, -1, 3});
    di_history_deinit(&h);
}

static void penalties_leave_finite_logits_finite(void **state) {
    (void)state;
    static const double repetitions[] = {1e-300, 1e300};
    const float logits[] = {3, -3, 0, -INFINITY};
    static const int32_t output[] = {0, 1, 2, 3};
    for (int i = 0; i < 2; i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.temperature = 0;
        s.repetition_penalty = repetitions[i];
        di_history h = {0};
        assert_int_equal(di_history_add_output(&h, output, 4, NULL), DI_OK);
        di_sample_args a = args_of(&s, logits, 4, 9, NULL);
        a.history = &h;
        assert_int_equal(sample_of(&a), 0);
        di_history_deinit(&h);
    }
}

static void prompt_log_probabilities(void **state) {
    (void)state;
    const float logits[] = {1, 3, 2, 3, -INFINITY};
    double sum = exp(1) + 2 * exp(3) + exp(2);
    di_sampler sampler = {0};
    float logprob;
    di_logprob top[5];
    assert_int_equal(di_logprobs_of(&sampler, logits, 5, 2, 5, &logprob, top, NULL), DI_OK);
    assert_true(fabs(logprob - (2 - log(sum))) < 1e-6);
    static const int32_t order[] = {1, 3, 2, 0, -1};
    for (int i = 0; i < 5; i++)
        assert_int_equal(top[i].token, order[i]);
    assert_int_equal(di_logprobs_of(&sampler, logits, 5, 4, 0, &logprob, NULL, NULL), DI_OK);
    assert_true(logprob == DI_LOGPROB_FLOOR);
    const float nothing[] = {-INFINITY, -INFINITY};
    assert_int_equal(di_logprobs_of(&sampler, nothing, 2, 0, 1, &logprob, top, NULL), DI_OK);
    assert_true(logprob == DI_LOGPROB_FLOOR && top[0].token == -1);
    di_sampler_deinit(&sampler);
}

/* ---- token sets ----------------------------------------------------------------------------------------------------
 */

static void token_ranges(void **state) {
    (void)state;
    uint32_t bits[4];
    di_error err;
    di_test_ok(di_token_ranges_parse("0..3,7", 100, bits, &err), &err);
    assert_true(bits[0] == 0x8F && bits[1] == 0 && bits[2] == 0 && bits[3] == 0);
    di_test_ok(di_token_ranges_parse(" 30 .. 33 , 99", 100, bits, &err), &err);
    assert_true(bits[0] == 0xC0000000u && bits[1] == 0x3 && bits[2] == 0 && bits[3] == 0x8);
    di_test_ok(di_token_ranges_parse("5..5", 100, bits, &err), &err);
    assert_true(bits[0] == 0x20 && bits[3] == 0);
    static const struct {
        const char *text, *names;
    } bad[] = {{"a", "character 1, expected an id"},
               {"1,,2", "character 3, expected an id"},
               {"1,", "a comma at the end"},
               {"1..", "character 4, expected the end of a range"},
               {"1...3", "character 4, expected the end of a range"},
               {"3..1", "1 after 3, expected strictly rising ids"},
               {"4,4", "4 after 4, expected strictly rising ids"},
               {"0..7,7", "7 after 7, expected strictly rising ids"},
               {"100", "100 is outside the vocabulary, expected 0 to 99"},
               {"5..99999999999999999999", "outside the vocabulary"},
               {"-1", "expected an id"},
               {"1;2", "character 2, expected a comma"},
               {"1 2", "character 3, expected a comma"}};
    for (size_t i = 0; i < DI_COUNT(bad); i++) {
        bits[0] = 0xABCD;
        assert_int_equal(di_token_ranges_parse(bad[i].text, 100, bits, &err), DI_ERR_ARG);
        if (!strstr(err.message, bad[i].names))
            fail_msg("'%s': %s", bad[i].text, err.message);
        assert_int_equal(bits[0], 0xABCD);
    }
    di_test_ok(di_token_ranges_parse("", 100, bits, &err), &err);
    assert_true(bits[0] == 0 && bits[3] == 0);
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
                di_sample_args a = args_of(&s, logits, V, i, NULL);
                assert_int_equal(di_sample(&sampler, &a, &token, NULL), DI_OK);
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
              cmocka_unit_test(bad_parameters_name_field_and_value), cmocka_unit_test(min_p_keeps_a_share_of_the_best),
              cmocka_unit_test(min_p_is_of_rounded_weights), cmocka_unit_test(end_marks_wait_for_min_tokens),
              cmocka_unit_test(masks_and_blacklist_are_joined), cmocka_unit_test(bias_is_added_and_cut),
              cmocka_unit_test(penalties_are_those_of_vllm), cmocka_unit_test(bias_comes_before_penalties),
              cmocka_unit_test(drafts_count_as_output), cmocka_unit_test(penalties_leave_finite_logits_finite),
              cmocka_unit_test(prompt_log_probabilities), cmocka_unit_test(token_ranges),
              cmocka_unit_test(distribution_passes_chi_square));
