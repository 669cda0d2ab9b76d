/* The sampler against the text of its rule: a full sort, every logarithm taken, on random rows of every awkward kind.
 *
 * The second computation here shares nothing with the first but the rule: noise, exp and log are its own (in long
 * double, rounded to double where the rule computes in double), counts are made by looking at all tokens, the order by
 * qsort. Rows have ties, infinities, masks, tiny and huge ranges; parameters are random. Tokens and the lists of the
 * best must be equal; log-probabilities may differ by one unit in the last place of a float, or by 1e-12 where the
 * logarithm is that close to zero: the sum of up to 20,000 terms in double is off by less. The seed of a failing round
 * is in the message; a round depends on its seed alone. */
#include <float.h>
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

enum { V = 20000, TOKENS_MAX = 400, LIST_MAX = 40, TOP_MAX = 32 };

/* One row with everything that its token depends on. */
typedef struct round_case {
    di_sampling s;
    float logits[V];
    int64_t n;
    uint32_t mask[V / 32 + 1], blacklist[V / 32 + 1];
    bool has_mask, has_blacklist;
    uint64_t seed, position;
    int64_t n_output;
    int32_t eos_id, forced;
    int32_t prompt[TOKENS_MAX], output[TOKENS_MAX], drafts[8];
    int n_prompt, n_committed, n_drafts;
    int32_t bias_ids[LIST_MAX], stop_tokens[LIST_MAX];
    float bias_values[LIST_MAX];
} round_case;

typedef struct outcome {
    int32_t token;
    float logprob;
    di_logprob top[TOP_MAX];
} outcome;

/* ---- interface.md, "How a token is sampled", line by line ----------------------------------------------------------
 */

static double gumbel(uint64_t seed, uint64_t position, uint64_t token) {
    uint64_t q = (position * 4294967296u + token) * 0x9E3779B97F4A7C15u;
    uint64_t z = seed + (q ^ q << 13) + 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    long double u = ((long double)(z >> 12) + 0.5L) * 0x1p-52L;
    return (double)-logl(-logl(u));
}

static bool is_masked(const round_case *c, int64_t id) {
    if (c->has_mask && !(c->mask[id / 32] >> (id % 32) & 1))
        return true;
    if (c->has_blacklist && (c->blacklist[id / 32] >> (id % 32) & 1))
        return true;
    if (c->n_output >= c->s.min_tokens)
        return false;
    bool is_stop = id == c->eos_id;
    for (size_t i = 0; i < c->s.n_stop_tokens; i++)
        is_stop = is_stop || c->stop_tokens[i] == id;
    return is_stop;
}

static int count(const int32_t *tokens, int n, int64_t id) {
    int found = 0;
    for (int i = 0; i < n; i++)
        found += tokens[i] == id;
    return found;
}

static float cut(float x) {
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

/* Steps 2 and 3, in single precision as vLLM has them. */
static float changed(const round_case *c, int64_t id) {
    float x = c->logits[id];
    for (size_t i = 0; i < c->s.n_bias; i++) {
        if (c->bias_ids[i] == id)
            x = cut(x + fmaxf(-100, fminf(100, c->bias_values[i])));
    }
    int n_output = count(c->output, c->n_committed, id) + count(c->drafts, c->n_drafts, id);
    bool is_repeated = n_output > 0 || count(c->prompt, c->n_prompt, id) > 0;
    float repetition = (float)c->s.repetition_penalty;
    if (is_repeated && x > 0)
        x = x / repetition;
    else if (is_repeated)
        x = x * repetition;
    x -= (float)c->s.frequency_penalty * (float)n_output;
    x -= n_output > 0 ? (float)c->s.presence_penalty : 0;
    return cut(x);
}

/* Log-softmax over e [n], falling, at a temperature; logits of ids are those of e. */
static void list_probabilities(const round_case *c, const entry *e, int64_t n, double temperature, outcome *out) {
    long double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += expl((long double)e[i].logit / temperature - (long double)e[0].logit / temperature);
    out->logprob = DI_LOGPROB_FLOOR;
    for (int64_t i = 0; i < n; i++) {
        float p = (float)((long double)e[i].logit / temperature - (long double)e[0].logit / temperature - logl(sum));
        if (e[i].id == out->token)
            out->logprob = p;
        if (i < c->s.n_logprobs)
            out->top[i] = (di_logprob){e[i].id, p};
    }
    for (int64_t i = n; i < c->s.n_logprobs; i++)
        out->top[i] = (di_logprob){-1, DI_LOGPROB_FLOOR};
}

static double weight(double distance) {
    return rint((double)(0x1p36L * expl(distance)));
}

static void reference(const round_case *c, outcome *out) {
    const di_sampling *s = &c->s;
    entry *raw = malloc(2 * V * sizeof *raw), *e = raw + V;
    int64_t n = 0;
    for (int64_t i = 0; i < c->n; i++) {
        if (is_masked(c, i) || isinf(c->logits[i]))
            continue;
        raw[n] = (entry){c->logits[i], (int32_t)i};
        e[n++] = (entry){changed(c, i), (int32_t)i};
    }
    qsort(raw, (size_t)n, sizeof *raw, entry_order);
    qsort(e, (size_t)n, sizeof *e, entry_order);
    bool is_greedy = s->temperature < 1e-5;
    double temperature = is_greedy ? 1e-5 : s->temperature;
    double largest = e[0].logit / temperature;
    int64_t n_kept = n;
    out->token = e[0].id;
    if (!is_greedy) {
        double total = 0, before = 0, best = -INFINITY;
        for (int64_t i = 0; i < n; i++)
            total += weight(e[i].logit / temperature - largest);
        for (int64_t i = 0; i < n; i++) {
            if (s->top_p < 1 && before > s->top_p * total)
                n_kept = DI_MIN(n_kept, i);
            before += weight(e[i].logit / temperature - largest);
        }
        if (s->top_k > 0)
            n_kept = DI_MIN(n_kept, s->top_k);
        int64_t n_heavy = 0;
        for (int64_t i = 0; i < n_kept; i++) {
            if (weight(e[i].logit / temperature - largest) >= s->min_p * 0x1p36)
                e[n_heavy++] = e[i];
        }
        n_kept = n_heavy;
        for (int64_t i = 0; i < n_kept; i++) {
            double score = e[i].logit / temperature + gumbel(c->seed, c->position, (uint64_t)e[i].id);
            if (score > best || (score == best && e[i].id < out->token)) {
                best = score;
                out->token = e[i].id;
            }
        }
    }
    if (c->forced >= 0)
        out->token = c->forced;
    if (s->n_logprobs >= 0 && s->logprobs_processed)
        list_probabilities(c, e, n_kept, temperature, out);
    else if (s->n_logprobs >= 0)
        list_probabilities(c, raw, n, 1, out);
    free(raw);
}

/* ---- random rounds
 * --------------------------------------------------------------------------------------------------- */

static void random_row(round_case *c) {
    static const double scales[] = {0, 1e-6, 0.5, 3, 3, 3, 40, 1e4, 1e30};
    double scale = scales[rng() % DI_COUNT(scales)];
    double step = rng() % 3 ? 0 : scale / 8; /* a third of the rows on a coarse grid: many ties */
    for (int64_t i = 0; i < c->n; i++) {
        double x = (rng_unit() + rng_unit() + rng_unit() - 1.5) * 2 * scale;
        if (step > 0)
            x = rint(x / step) * step;
        c->logits[i] = (float)x;
        if (rng() % 50 == 0)
            c->logits[i] = -INFINITY;
        if (rng() % 50 == 0)
            c->logits[i] = -0.0f;
    }
    c->has_mask = rng() % 3 == 0;
    c->has_blacklist = rng() % 4 == 0;
    for (int64_t i = 0; i < (c->n + 31) / 32; i++) {
        c->mask[i] = (uint32_t)(rng() & rng());
        c->blacklist[i] = (uint32_t)(rng() & rng() & rng());
    }
}

static int32_t random_token(const round_case *c) {
    return (int32_t)(rng() % (uint64_t)(rng() % 3 ? DI_MIN(c->n, 30) : c->n + 5)); /* some are no token of the row */
}

static void random_lists(round_case *c) {
    c->n_prompt = (int)(rng() % TOKENS_MAX);
    c->n_committed = (int)(rng() % TOKENS_MAX);
    c->n_drafts = rng() % 2 ? (int)(rng() % DI_COUNT(c->drafts)) : 0;
    for (int i = 0; i < c->n_prompt; i++)
        c->prompt[i] = random_token(c);
    for (int i = 0; i < c->n_committed; i++)
        c->output[i] = random_token(c);
    for (int i = 0; i < c->n_drafts; i++)
        c->drafts[i] = random_token(c);
    for (int i = 0; i < LIST_MAX; i++) {
        c->bias_ids[i] = random_token(c);
        c->stop_tokens[i] = random_token(c);
        c->bias_values[i] = (float)(rng() % 5 ? (rng_unit() - 0.5) * 8 : (rng_unit() - 0.5) * 600);
    }
    c->s.n_bias = rng() % 3 ? 0 : rng() % LIST_MAX;
    c->s.bias_ids = c->bias_ids;
    c->s.bias_values = c->bias_values;
    c->s.n_stop_tokens = rng() % 4;
    c->s.stop_tokens = c->stop_tokens;
    c->eos_id = rng() % 2 ? random_token(c) : -1;
    c->n_output = (int64_t)(rng() % 6);
    c->s.min_tokens = rng() % 3 ? 0 : (int64_t)(rng() % 6);
}

static void random_parameters(di_sampling *s) {
    static const double temperatures[] = {0, 1e-4, 0.3, 0.7, 1, 1, 1.5, 100, 1e8};
    static const double top_ps[] = {1, 1, 0.999999, 0.95, 0.8, 0.3, 1e-12};
    static const int64_t top_ks[] = {-1, -1, 0, 1, 2, 20, 500, 100000};
    static const double min_ps[] = {0, 0, 0, 1, 0.5, 0.1, 0.01, 1e-6, 1e-11, 3e-12};
    static const double repetitions[] = {1, 1, 1.1, 2, 0.5, 30};
    di_sampling_init(s);
    s->temperature = temperatures[rng() % DI_COUNT(temperatures)];
    s->top_p = rng() % 4 ? top_ps[rng() % DI_COUNT(top_ps)] : 1 - rng_unit();
    s->top_k = top_ks[rng() % DI_COUNT(top_ks)];
    s->min_p = rng() % 4 ? min_ps[rng() % DI_COUNT(min_ps)] : rng_unit();
    s->presence_penalty = rng() % 2 ? 0 : rng_unit() * 4 - 2;
    s->frequency_penalty = rng() % 2 ? 0 : rng_unit() * 4 - 2;
    s->repetition_penalty = repetitions[rng() % DI_COUNT(repetitions)];
    s->n_logprobs = rng() % 2 ? (int32_t)(rng() % (TOP_MAX + 1)) : -1;
    s->logprobs_processed = rng() % 2;
}

/* At least one token stays allowed. */
static void allow_one(round_case *c) {
    int64_t sure = (int64_t)(rng() % (uint64_t)c->n);
    c->mask[sure / 32] |= 1u << (sure % 32);
    c->blacklist[sure / 32] &= ~(1u << (sure % 32));
    if (isinf(c->logits[sure]))
        c->logits[sure] = 0;
    if (is_masked(c, sure))
        c->s.min_tokens = 0;
}

static bool is_close(float a, float b) {
    return fabs((double)a - (double)b) <= fmax(1e-12, (double)(nextafterf(fabsf(b), INFINITY) - fabsf(b)));
}

static void compare(uint64_t round, const round_case *c, const outcome *got, const outcome *want) {
    unsigned long long at = round;
    if (got->token != want->token)
        fail_msg("round %llu: token %d, expected %d", at, got->token, want->token);
    if (c->s.n_logprobs < 0)
        return;
    if (!is_close(got->logprob, want->logprob))
        fail_msg("round %llu: log-probability %.9g, expected %.9g", at, (double)got->logprob, (double)want->logprob);
    for (int i = 0; i < c->s.n_logprobs; i++) {
        if (got->top[i].token != want->top[i].token || !is_close(got->top[i].logprob, want->top[i].logprob))
            fail_msg("round %llu: place %d is token %d with %.9g, expected %d with %.9g", at, i, got->top[i].token,
                     (double)got->top[i].logprob, want->top[i].token, (double)want->top[i].logprob);
    }
}

static void fast_path_equals_full_sort(void **state) {
    (void)state;
    enum { ROUNDS = 3000 };
    round_case *c = malloc(sizeof *c);
    di_sampler sampler = {0};
    for (uint64_t round = 0; round < ROUNDS; round++) {
        rng_state = round;
        c->n = round % 30 ? 1 + (int64_t)(rng() % 700) : 1 + (int64_t)(rng() % V);
        random_row(c);
        random_parameters(&c->s);
        random_lists(c);
        allow_one(c);
        c->seed = rng() % 2 ? rng() : rng() % 10;
        c->position = rng() % 1000000;
        c->forced = rng() % 8 ? -1 : random_token(c);
        outcome want = {.token = -1}, got = {.token = -1};
        reference(c, &want);
        di_history h = {0};
        di_error err = {0};
        di_test_ok(di_history_add_prompt(&h, c->prompt, (size_t)c->n_prompt, &err), &err);
        di_test_ok(di_history_add_output(&h, c->output, (size_t)c->n_committed, &err), &err);
        di_sample_args a = {.sampling = &c->s,
                            .logits = c->logits,
                            .n_vocab = c->n,
                            .seed = c->seed,
                            .position = c->position,
                            .n_output = c->n_output,
                            .eos_id = c->eos_id,
                            .mask = c->has_mask ? c->mask : NULL,
                            .blacklist = c->has_blacklist ? c->blacklist : NULL,
                            .history = &h,
                            .drafts = c->drafts,
                            .n_drafts = c->n_drafts,
                            .forced = c->forced,
                            .logprob = &got.logprob,
                            .top = got.top};
        if (di_sample(&sampler, &a, &got.token, &err))
            fail_msg("round %llu: %s", (unsigned long long)round, err.message);
        compare(round, c, &got, &want);
        di_history_deinit(&h);
    }
    di_sampler_deinit(&sampler);
    free(c);
}

/* ---- history
 * --------------------------------------------------------------------------------------------------------- */

static void assert_counts(const di_history *h, const int32_t *prompt, int n_prompt, const int32_t *output, int n_output,
                          int n_ids) {
    for (int32_t id = 0; id < n_ids; id++) {
        const di_history_entry *e = di_history_find(h, id);
        assert_int_equal(e ? e->n_output : 0, count(output, n_output, id));
        assert_int_equal(e ? e->is_in_prompt : 0, count(prompt, n_prompt, id) > 0);
    }
}

/* Random additions, steps back and forks against counting all tokens anew. */
DI_PROPERTY(history_counts_tokens, 60) {
    rng_state = seed;
    enum { N = 600 };
    int32_t prompt[N], output[N];
    int n_ids = 1 + (int)(rng() % 300), n_prompt = (int)(rng() % N), n_output = 0;
    di_history h = {0}, fork = {0};
    di_error err = {0};
    assert_null(di_history_find(&h, 0));
    for (int i = 0; i < n_prompt; i++)
        prompt[i] = (int32_t)(rng() % (uint64_t)n_ids);
    di_test_ok(di_history_reserve(&h, rng() % 100, &err), &err);
    di_test_ok(di_history_add_prompt(&h, prompt, (size_t)n_prompt, &err), &err);
    for (int step = 0; step < 200; step++) {
        int k = (int)(rng() % 8);
        if (rng() % 3 == 0) {
            k = DI_MIN(k, n_output);
            n_output -= k;
            di_history_step_back(&h, output + n_output, (size_t)k);
        } else if (n_output + k <= N) {
            for (int i = 0; i < k; i++)
                output[n_output + i] = (int32_t)(rng() % (uint64_t)n_ids);
            di_test_ok(di_history_add_output(&h, output + n_output, (size_t)k, &err), &err);
            n_output += k;
        }
        if (rng() % 20 == 0) { /* go on with a copy */
            di_test_ok(di_history_copy(&fork, &h, &err), &err);
            di_history swap = fork;
            fork = h;
            h = swap;
        }
        if (rng() % 10 == 0)
            assert_counts(&h, prompt, n_prompt, output, n_output, n_ids);
    }
    assert_counts(&h, prompt, n_prompt, output, n_output, n_ids);
    di_history_deinit(&h);
    di_history_deinit(&fork);
}

DI_TEST_GROUP(sample_property, cmocka_unit_test(fast_path_equals_full_sort), cmocka_unit_test(history_counts_tokens));
