/* The sampler against the text of its rule: a full sort, every logarithm taken, on random rows of every awkward kind.
 *
 * Rows have ties, infinities, masks, tiny and huge ranges; parameters are random. Token, log-probabilities and the list
 * of the best must be equal bit for bit. The seed of a failing round is in the message; a round depends on its seed
 * alone. */
#include <math.h>

#include "engine/sample/sample.h"
#include "harness.h"

typedef struct entry {
    float logit;
    int32_t id;
} entry;

static int entry_order(const void *pa, const void *pb) {
    const entry *a = pa, *b = pb;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static uint64_t rng_state;
static uint64_t rng(void) {
    return di_mix64(rng_state += 0x9E3779B97F4A7C15u);
}
static double rng_unit(void) {
    return (double)(rng() >> 11) * 0x1p-53;
}

typedef struct outcome {
    int32_t token;
    float logprob;
    di_logprob top[32];
} outcome;

/* interface.md, "How a token is sampled", line by line. */
static void reference(const di_sampling *s, const float *logits, int64_t n_vocab, uint64_t position,
                      const uint32_t *mask, entry *e, outcome *out) {
    int64_t n = 0;
    for (int64_t i = 0; i < n_vocab; i++) {
        if (mask && !(mask[i / 32] >> (i % 32) & 1))
            continue;
        if (isinf(logits[i]))
            continue;
        e[n++] = (entry){logits[i], (int32_t)i};
    }
    qsort(e, (size_t)n, sizeof *e, entry_order);
    bool is_greedy = s->temperature < 1e-5;
    double temperature = is_greedy ? 1e-5 : s->temperature;
    double largest = e[0].logit / temperature;
    int64_t n_kept = n;
    if (is_greedy) {
        out->token = e[0].id;
    } else {
        uint64_t total = 0, before = 0;
        for (int64_t i = 0; i < n; i++)
            total += (uint64_t)rint(0x1p36 * di_exp(e[i].logit / temperature - largest));
        for (int64_t i = 0; i < n; i++) {
            if (s->top_p < 1 && (double)before > s->top_p * (double)total)
                n_kept = DI_MIN(n_kept, i);
            before += (uint64_t)rint(0x1p36 * di_exp(e[i].logit / temperature - largest));
        }
        if (s->top_k > 0)
            n_kept = DI_MIN(n_kept, s->top_k);
        double best = -INFINITY;
        for (int64_t i = 0; i < n_kept; i++) {
            double score =
                e[i].logit / temperature + di_noise_gumbel(di_noise_bits(s->seed, position, (uint64_t)e[i].id));
            if (score > best || (score == best && e[i].id < out->token)) {
                best = score;
                out->token = e[i].id;
            }
        }
    }
    if (s->n_logprobs < 0)
        return;
    int64_t n_listed = s->logprobs_processed ? n_kept : n;
    double t = s->logprobs_processed ? temperature : 1.0, sum = 0;
    uint8_t *is_listed = calloc((size_t)n_vocab, 1);
    for (int64_t i = 0; i < n_listed; i++)
        is_listed[e[i].id] = 1;
    for (int64_t i = 0; i < n_vocab; i++) {
        if (is_listed[i])
            sum += di_exp(logits[i] / t - e[0].logit / t);
    }
    free(is_listed);
    out->logprob = (float)((logits[out->token] / t - e[0].logit / t) - di_ln(sum));
    for (int i = 0; i < s->n_logprobs; i++) {
        if (i < n_listed) {
            out->top[i] = (di_logprob){e[i].id, (float)((e[i].logit / t - e[0].logit / t) - di_ln(sum))};
        } else {
            out->top[i] = (di_logprob){-1, DI_LOGPROB_FLOOR};
        }
    }
}

static void random_row(float *logits, int64_t n, uint32_t *mask, bool *has_mask) {
    static const double scales[] = {0, 1e-6, 0.5, 3, 3, 3, 40, 1e4, 1e30};
    double scale = scales[rng() % DI_COUNT(scales)];
    double step = rng() % 3 ? 0 : scale / 8; /* a third of the rows on a coarse grid: many ties */
    for (int64_t i = 0; i < n; i++) {
        double x = (rng_unit() + rng_unit() + rng_unit() - 1.5) * 2 * scale;
        if (step > 0)
            x = rint(x / step) * step;
        logits[i] = (float)x;
        if (rng() % 50 == 0)
            logits[i] = -INFINITY;
        if (rng() % 50 == 0)
            logits[i] = -0.0f;
    }
    *has_mask = rng() % 3 == 0;
    for (int64_t i = 0; i < (n + 31) / 32; i++)
        mask[i] = (uint32_t)(rng() & rng());
    int64_t sure = (int64_t)(rng() % (uint64_t)n); /* at least one allowed token */
    mask[sure / 32] |= 1u << (sure % 32);
    if (isinf(logits[sure]))
        logits[sure] = 0;
}

static void random_parameters(di_sampling *s) {
    static const double temperatures[] = {0, 1e-4, 0.3, 0.7, 1, 1, 1.5, 100, 1e8};
    static const double top_ps[] = {1, 1, 0.999999, 0.95, 0.8, 0.3, 1e-12};
    static const int64_t top_ks[] = {-1, -1, 0, 1, 2, 20, 500, 100000};
    di_sampling_init(s);
    s->temperature = temperatures[rng() % DI_COUNT(temperatures)];
    s->top_p = rng() % 4 ? top_ps[rng() % DI_COUNT(top_ps)] : 1 - rng_unit();
    s->top_k = top_ks[rng() % DI_COUNT(top_ks)];
    s->seed = rng() % 2 ? rng() : rng() % 10;
    s->n_logprobs = rng() % 2 ? (int32_t)(rng() % 33) : -1;
    s->logprobs_processed = rng() % 2;
}

static void fast_path_equals_full_sort(void **state) {
    (void)state;
    enum { V = 20000, ROUNDS = 1500 };
    float *logits = malloc(V * sizeof *logits);
    uint32_t *mask = malloc((V / 32 + 1) * sizeof *mask);
    entry *e = malloc(V * sizeof *e);
    di_sampler sampler = {0};
    for (uint64_t round = 0; round < ROUNDS; round++) {
        rng_state = round;
        int64_t n = round % 20 ? 1 + (int64_t)(rng() % 700) : 1 + (int64_t)(rng() % V);
        di_sampling s;
        bool has_mask;
        random_row(logits, n, mask, &has_mask);
        random_parameters(&s);
        uint64_t position = rng() % 1000000;
        outcome want = {.token = -1}, got = {.token = -1};
        reference(&s, logits, n, position, has_mask ? mask : NULL, e, &want);
        di_error err = {0};
        di_status st = di_sample(&sampler, &s, logits, n, position, has_mask ? mask : NULL, &got.token, &got.logprob,
                                 got.top, &err);
        if (st || got.token != want.token) {
            fail_msg("round %llu: token %d, expected %d (%s)", (unsigned long long)round, got.token, want.token,
                     err.message);
        }
        if (s.n_logprobs < 0)
            continue;
        if (di_f32_bits(got.logprob) != di_f32_bits(want.logprob) ||
            memcmp(got.top, want.top, (size_t)s.n_logprobs * sizeof *got.top) != 0) {
            fail_msg("round %llu: log-probabilities differ", (unsigned long long)round);
        }
    }
    di_sampler_deinit(&sampler);
    free(e);
    free(mask);
    free(logits);
}

DI_TEST_GROUP(sample_property, cmocka_unit_test(fast_path_equals_full_sort));
