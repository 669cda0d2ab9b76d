/* sample_rows on the NVIDIA backend against di_sample on the host: the same tokens and the same bits of everything
 * else.
 *
 * Every row of a case has logits and parameters of its own kind: ties, infinities, NaN, masks that allow a few tokens
 * or none, tiny and huge scales, every filter at its edges, penalties, bias, drafts, given tokens, all rules of
 * drawing. There is no tolerance. Vocabularies from one token to the released model's; the rows of a case go in one
 * call. */
#include <float.h>
#include <math.h>

#include "engine/sample/sample.h"
#include "engine/spec/spec.h"
#include "twin.h"

#ifdef DI_TWIN_EMU
enum { IS_EMULATED = 1 };
#else
enum { IS_EMULATED = 0 };
#endif

enum { VOCAB = 129280, LIST_MAX = 200, DRAFTS_MAX = 6, TOP_MAX = 1000 };

static uint64_t rng_state;
static uint64_t rng(void) {
    return di_mix64(rng_state += 0x9E3779B97F4A7C15u);
}
static double rng_unit(void) {
    return (double)(rng() >> 11) * 0x1p-53;
}

/* ---- cases --------------------------------------------------------------------------------------------------------
 */

typedef struct sample_case {
    di_sampling s;
    int64_t n;
    int32_t logits_row;
    uint32_t *mask; /* owned; NULL: none */
    di_history history;
    int32_t drafts[DRAFTS_MAX], n_drafts;
    int32_t bias_ids[LIST_MAX], stop_tokens[LIST_MAX];
    float bias_values[LIST_MAX];
    uint64_t seed, position;
    int64_t n_output;
    int32_t eos_id, forced;
    bool is_prompt;
    di_sample_how how;
    bool has_how;
    float *ln_q, *ln_p;         /* owned: host memory */
    float *ln_q_dev, *ln_p_dev; /* on the device */
    int64_t top_at;
    /* wanted */
    di_status st;
    int32_t token;
    float logprob, distance;
    di_logprob *top; /* owned */
} sample_case;

static void random_logits(float *x, int64_t n) {
    static const double scales[] = {0, 1e-6, 0.5, 3, 3, 3, 40, 1e4, 1e30};
    double scale = scales[rng() % DI_COUNT(scales)], step = rng() % 3 ? 0 : scale / 8;
    bool has_gaps = rng() % 2;
    for (int64_t i = 0; i < n; i++) {
        double v = (rng_unit() + rng_unit() + rng_unit() - 1.5) * 2 * scale;
        x[i] = (float)(step > 0 ? rint(v / step) * step : v);
        if (has_gaps && rng() % 50 == 0)
            x[i] = rng() % 2 ? -INFINITY : -0.0f;
    }
    if (rng() % 3 == 0) /* a few that stand out */
        x[rng() % (uint64_t)n] += (float)(8 * scale);
    if (rng() % 40 == 0)
        x[rng() % (uint64_t)n] = rng() % 2 ? NAN : INFINITY;
    if (!IS_EMULATED && rng() % 10 == 0) /* the emulation takes subnormals for zero */
        x[rng() % (uint64_t)n] = rng() % 2 ? 1e-40f : -1e-42f;
}

static int32_t random_token(int64_t n) {
    return (int32_t)(rng() % (uint64_t)(rng() % 3 ? DI_MIN(n, 30) : n + 5));
}

static void random_parameters(di_sampling *s) {
    static const double temperatures[] = {0, 1e-4, 0.3, 0.7, 1, 1, 1.5, 100, 1e8, 1e300};
    static const double top_ps[] = {1, 1, 0.999999, 0.95, 0.8, 0.3, 1e-12};
    static const int64_t top_ks[] = {-1, -1, 0, 1, 2, 20, 500, 6000, 100000, INT32_MAX};
    static const double min_ps[] = {0, 0, 0, 1, 0.5, 0.1, 0.01, 1e-6, 1e-11, 3e-12};
    static const double repetitions[] = {1, 1, 1.1, 2, 0.5, 30, 1e-300};
    di_sampling_init(s);
    s->temperature = temperatures[rng() % DI_COUNT(temperatures)];
    s->top_p = rng() % 4 ? top_ps[rng() % DI_COUNT(top_ps)] : 1 - rng_unit();
    s->top_k = top_ks[rng() % DI_COUNT(top_ks)];
    s->min_p = rng() % 4 ? min_ps[rng() % DI_COUNT(min_ps)] : rng_unit();
    s->presence_penalty = rng() % 2 ? 0 : rng_unit() * 4 - 2;
    s->frequency_penalty = rng() % 2 ? 0 : rng_unit() * 4 - 2;
    /* The last one makes subnormal logits, which the emulation takes for zero. */
    s->repetition_penalty = repetitions[rng() % (DI_COUNT(repetitions) - IS_EMULATED)];
    s->n_logprobs = rng() % 2 ? (int32_t)(rng() % 4 ? rng() % 21 : rng() % (TOP_MAX + 1)) : -1;
    s->logprobs_processed = rng() % 2;
}

static void random_mask(sample_case *c) {
    size_t n = (size_t)DI_CEIL_DIV(c->n, 32);
    int density = (int)(rng() % 4);
    c->mask = ops_rig_alloc(n * sizeof *c->mask);
    for (size_t i = 0; i < n; i++) {
        uint64_t few = rng() & rng() & rng() & rng() & rng();
        c->mask[i] = (uint32_t)(density == 0 ? few & rng() & rng() : density == 1 ? few : rng() | rng());
    }
    if (rng() % 20 == 0)
        memset(c->mask, 0, n * sizeof *c->mask);
}

static void random_lists(sample_case *c) {
    int n_prompt = (int)(rng() % 400), n_output = (int)(rng() % 400);
    di_error err = {0};
    for (int i = 0; i < n_prompt + n_output; i++) {
        int32_t token = random_token(c->n);
        di_test_ok(i < n_prompt ? di_history_add_prompt(&c->history, &token, 1, &err)
                                : di_history_add_output(&c->history, &token, 1, &err),
                   &err);
    }
    c->n_drafts = rng() % 2 ? (int32_t)(rng() % (DRAFTS_MAX + 1)) : 0;
    for (int i = 0; i < c->n_drafts; i++)
        c->drafts[i] = random_token(c->n);
    for (int i = 0; i < LIST_MAX; i++) {
        c->bias_ids[i] = random_token(c->n);
        c->stop_tokens[i] = random_token(c->n);
        c->bias_values[i] = (float)(rng() % 5 ? (rng_unit() - 0.5) * 8 : (rng_unit() - 0.5) * 600);
    }
    c->s.n_bias = rng() % 3 ? 0 : rng() % LIST_MAX;
    c->s.bias_ids = c->bias_ids;
    c->s.bias_values = c->bias_values;
    c->s.n_stop_tokens = rng() % 8 ? rng() % 4 : rng() % LIST_MAX;
    c->s.stop_tokens = c->stop_tokens;
    c->eos_id = rng() % 2 ? random_token(c->n) : -1;
    c->n_output = (int64_t)(rng() % 6);
    c->s.min_tokens = rng() % 3 ? 0 : (int64_t)(rng() % 6);
}

/* Draws by rejection: from p alone, or a draft that is tested against another row's distribution. */
static void random_how(sample_case *c, const float *other) {
    c->has_how = true;
    c->how = (di_sample_how){.rule = rng() % 2 ? DI_SAMPLE_DRAW : DI_SAMPLE_TEST,
                             .u = rng() % 8   ? rng_unit()
                                  : rng() % 2 ? 0
                                              : 1 - 0x1p-53,
                             .u_test = rng_unit()};
    if (rng() % 2)
        c->ln_p = ops_rig_alloc((size_t)c->n * sizeof *c->ln_p);
    if (c->how.rule == DI_SAMPLE_DRAW)
        return;
    double most = -1e300, sum = 0, temperature = 0.3 + 2 * rng_unit();
    c->ln_q = ops_rig_alloc((size_t)c->n * sizeof *c->ln_q);
    for (int64_t i = 0; i < c->n; i++)
        most = isfinite(other[i]) ? fmax(most, (double)other[i] / temperature) : most;
    for (int64_t i = 0; i < c->n; i++)
        sum += isfinite(other[i]) ? exp((double)other[i] / temperature - most) : 0;
    for (int64_t i = 0; i < c->n; i++)
        c->ln_q[i] = isfinite(other[i]) ? (float)((double)other[i] / temperature - most - log(sum)) : -INFINITY;
    c->how.draft = (int32_t)(rng() % (uint64_t)c->n);
    for (int i = 0; i < 20; i++) { /* rather one that is likely */
        int32_t token = (int32_t)(rng() % (uint64_t)c->n);
        if (c->ln_q[token] > c->ln_q[c->how.draft])
            c->how.draft = token;
    }
}

static void random_case(sample_case *c, const float *logits, int64_t n, int32_t n_logits) {
    *c = (sample_case){.n = n, .forced = -1};
    c->logits_row = (int32_t)(rng() % (uint64_t)n_logits);
    random_parameters(&c->s);
    random_lists(c);
    if (rng() % 3 == 0)
        random_mask(c);
    c->seed = rng() % 2 ? rng() : rng() % 10;
    c->position = rng() % 1000000;
    if (rng() % 8 == 0)
        c->forced = random_token(n);
    else if (rng() % 3 == 0)
        random_how(c, rng() % 3 ? logits + (int64_t)c->logits_row * n : logits);
    c->is_prompt = rng() % 12 == 0;
    if (c->is_prompt)
        c->s.n_logprobs = (int32_t)(rng() % 5);
}

static void drop_case(sample_case *c) {
    di_history_deinit(&c->history);
    free(c->mask);
    free(c->ln_q);
    free(c->ln_p);
    free(c->top);
}

/* ---- on the host --------------------------------------------------------------------------------------------------
 */

static int32_t choose(void *ctx, const float *p, int64_t n_vocab) {
    sample_case *c = ctx;
    if (c->how.rule == DI_SAMPLE_DRAW)
        return di_spec_draw(p, n_vocab, c->how.u);
    c->distance = (float)di_spec_distance(p, c->ln_q, n_vocab);
    if (di_spec_accepts(p[c->how.draft], c->ln_q[c->how.draft], c->how.u_test))
        return c->how.draft;
    return di_spec_redraw(p, c->ln_q, n_vocab, c->how.u, NULL);
}

static di_sample_args args_of(sample_case *c, const float *logits, const uint32_t *blacklist) {
    return (di_sample_args){.sampling = &c->s,
                            .logits = logits + (int64_t)c->logits_row * c->n,
                            .n_vocab = c->n,
                            .seed = c->seed,
                            .position = c->position,
                            .n_output = c->n_output,
                            .eos_id = c->eos_id,
                            .mask = c->mask,
                            .blacklist = blacklist,
                            .history = &c->history,
                            .drafts = c->drafts,
                            .n_drafts = c->n_drafts,
                            .forced = c->forced,
                            .choose = c->has_how ? choose : NULL,
                            .choose_ctx = c,
                            .ln_p = c->ln_p,
                            .logprob = c->s.n_logprobs >= 0 ? &c->logprob : NULL,
                            .top = c->s.n_logprobs > 0 ? c->top : NULL};
}

static void run_on_host(di_sampler *sm, sample_case *c, const float *logits, const uint32_t *blacklist) {
    di_error err = {0};
    c->top = ops_rig_alloc((size_t)DI_MAX(c->s.n_logprobs, 1) * sizeof *c->top);
    if (c->is_prompt) {
        c->token = DI_MAX(c->forced, 0);
        c->st = di_logprobs_of(sm, logits + (int64_t)c->logits_row * c->n, c->n, c->token, c->s.n_logprobs, &c->logprob,
                               c->s.n_logprobs > 0 ? c->top : NULL, &err);
        return;
    }
    di_sample_args a = args_of(c, logits, blacklist);
    c->st = di_sample(sm, &a, &c->token, &err);
}

/* ---- on the device ------------------------------------------------------------------------------------------------
 */

/* A place on the device for what drafts were drawn from, and for what comes of draws. */
static void place_ln(twin *t, sample_case *cases, int n) {
    size_t n_vocab = (size_t)cases[0].n, n_places = 0, bytes;
    for (int i = 0; i < n; i++)
        n_places += (cases[i].ln_q != NULL) + (cases[i].ln_p != NULL);
    bytes = n_places * n_vocab * sizeof(float);
    float *host = ops_rig_alloc(bytes), *at = host;
    memset(host, TWIN_POISON, bytes);
    for (int i = 0; i < n; i++) {
        if (cases[i].ln_q)
            memcpy(at, cases[i].ln_q, n_vocab * sizeof *at);
        at += cases[i].ln_q ? n_vocab : 0;
        at += cases[i].ln_p ? n_vocab : 0;
    }
    float *device = twin_in(t, host, bytes);
    for (int i = 0; i < n; i++) {
        cases[i].ln_q_dev = cases[i].ln_q ? device : NULL;
        device += cases[i].ln_q ? n_vocab : 0;
        cases[i].ln_p_dev = cases[i].ln_p ? device : NULL;
        device += cases[i].ln_p ? n_vocab : 0;
    }
    free(host);
}

static void pack_case(di_sample_pack *pack, sample_case *c, const uint32_t *blacklist) {
    di_error err = {0};
    if (c->is_prompt) {
        di_sample_pack_prompt(pack, c->token, c->s.n_logprobs, c->logits_row, c->top_at);
        return;
    }
    di_sample_args a = args_of(c, NULL, blacklist);
    c->how.ln_q = c->ln_q_dev;
    c->how.ln_p = c->ln_p_dev;
    di_test_ok(di_sample_pack_add(pack, &a, c->has_how ? &c->how : NULL, c->logits_row, c->top_at, &err), &err);
}

static void check_float(float got, float want, int i, const char *what) {
    if (di_f32_bits(got) != di_f32_bits(want))
        fail_msg("row %d: %s %.9g (%08x), the host has %.9g (%08x)", i, what, (double)got, di_f32_bits(got),
                 (double)want, di_f32_bits(want));
}

static void check_case(twin *t, const sample_case *c, int i, const di_sample_result *got, int32_t token,
                       const di_logprob *top) {
    di_sample_status want = c->st == DI_OK            ? DI_SAMPLE_OK
                            : c->st == DI_ERR_REQUEST ? DI_SAMPLE_NOTHING_ALLOWED
                                                      : DI_SAMPLE_NOT_FINITE;
    if (got->status != (int32_t)want)
        fail_msg("row %d: status %d, the host has %d", i, got->status, (int)want);
    assert_int_equal(got->token, token);
    if (want) {
        assert_int_equal(got->token, 0);
        return;
    }
    if (got->token != c->token)
        fail_msg("row %d: token %d, the host has %d (temperature %g, top_p %g, top_k %lld, min_p %g, rule %d)", i,
                 got->token, c->token, c->s.temperature, c->s.top_p, (long long)c->s.top_k, c->s.min_p,
                 c->has_how ? (int)c->how.rule : 0);
    if (c->s.n_logprobs >= 0)
        check_float(got->logprob, c->logprob, i, "log-probability");
    for (int k = 0; k < c->s.n_logprobs; k++) {
        if (top[k].token != c->top[k].token)
            fail_msg("row %d: place %d has token %d, the host has %d", i, k, top[k].token, c->top[k].token);
        check_float(top[k].logprob, c->top[k].logprob, i, "log-probability in the list");
    }
    if (c->has_how && !c->is_prompt && c->forced < 0)
        check_float(got->distance, c->distance, i, "distance");
    if (c->ln_p && !c->is_prompt && c->forced < 0) {
        float *ln_p = ops_rig_alloc((size_t)c->n * sizeof *ln_p);
        twin_back(t, ln_p, c->ln_p_dev, (size_t)c->n * sizeof *ln_p);
        for (int64_t k = 0; k < c->n; k++)
            check_float(ln_p[k], c->ln_p[k], i, "ln p");
        free(ln_p);
    }
}

/* All cases of one vocabulary in one call, on n_logits rows of logits. */
static void run_cases(twin *t, sample_case *cases, int n, const float *logits, int32_t n_logits,
                      const uint32_t *blacklist) {
    int64_t n_vocab = cases[0].n, n_top = 0;
    size_t words = (size_t)DI_CEIL_DIV(n_vocab, 32) * sizeof(uint32_t);
    di_sampler sm = {0};
    di_sample_pack pack = {0};
    di_error err = {0};
    for (int i = 0; i < n; i++) {
        cases[i].top_at = n_top;
        n_top += DI_MAX(cases[i].s.n_logprobs, 0);
        run_on_host(&sm, &cases[i], logits, blacklist);
    }
    di_test_ok(di_sample_pack_begin(&pack, n, n_vocab, &err), &err);
    place_ln(t, cases, n);
    for (int i = 0; i < n; i++)
        pack_case(&pack, &cases[i], blacklist);
    uint8_t *memory = twin_in(t, pack.memory, di_sample_pack_bytes(&pack));
    size_t top_bytes = (size_t)DI_MAX(n_top, 1) * sizeof(di_sample_top);
    di_sample_rows_args args = {
        .logits = twin_in(t, logits, (size_t)n_logits * (size_t)n_vocab * sizeof *logits),
        .n_vocab = n_vocab,
        .n_rows = n,
        .rows = (const di_sample_row *)(const void *)memory,
        .plan = di_sample_pack_rows(&pack),
        .words = (const uint32_t *)(const void *)(memory + di_sample_pack_words_at(&pack)),
        .blacklist = twin_in(t, blacklist, words),
        .results = twin_out(t, (size_t)n * sizeof(di_sample_result)),
        .tokens = twin_out(t, (size_t)n * sizeof(int32_t)),
        .top = twin_out(t, top_bytes),
    };
    assert_int_equal(t->gpu.ops->sample_rows(t->stream, &args), DI_OK);
    di_sample_result *results = ops_rig_alloc((size_t)n * sizeof *results);
    int32_t *tokens = ops_rig_alloc((size_t)n * sizeof *tokens);
    di_logprob *top = ops_rig_alloc(top_bytes);
    twin_back(t, results, args.results, (size_t)n * sizeof *results);
    twin_back(t, tokens, args.tokens, (size_t)n * sizeof *tokens);
    twin_back(t, top, args.top, top_bytes);
    for (int i = 0; i < n; i++)
        check_case(t, &cases[i], i, &results[i], tokens[i], top + cases[i].top_at);
    for (int i = 0; i < n; i++)
        drop_case(&cases[i]);
    twin_drop(t);
    di_sample_pack_deinit(&pack);
    di_sampler_deinit(&sm);
    free(results);
    free(tokens);
    free(top);
}

static di_limits limits_of(int64_t n_vocab, int64_t rows) {
    return (di_limits){.rows_max = 16,
                       .n_in_max = 64,
                       .n_out_max = 64,
                       .entries_max = 64,
                       .keys_max = 64,
                       .head_dim = 64,
                       .n_heads = 1,
                       .index_heads = 1,
                       .index_dim = 64,
                       .experts_max = 8,
                       .experts_per_row_max = 2,
                       .intermediate = 64,
                       .n_vocab = n_vocab,
                       .logits_max = rows};
}

static uint32_t *random_blacklist(int64_t n) {
    size_t words = (size_t)DI_CEIL_DIV(n, 32);
    if (rng() % 2)
        return NULL;
    uint32_t *bits = ops_rig_alloc(words * sizeof *bits);
    for (size_t i = 0; i < words; i++)
        bits[i] = (uint32_t)(rng() & rng() & rng());
    return bits;
}

static void run_round(twin *t, uint64_t seed, int64_t n_vocab, int n, int32_t n_logits) {
    rng_state = seed;
    print_message("seed %llu: %d rows of %lld tokens\n", (unsigned long long)seed, n, (long long)n_vocab);
    float *logits = ops_rig_alloc((size_t)n_logits * (size_t)n_vocab * sizeof *logits);
    for (int32_t r = 0; r < n_logits; r++)
        random_logits(logits + r * n_vocab, n_vocab);
    uint32_t *blacklist = random_blacklist(n_vocab);
    sample_case *cases = ops_rig_alloc((size_t)n * sizeof *cases);
    for (int i = 0; i < n; i++)
        random_case(&cases[i], logits, n_vocab, n_logits);
    run_cases(t, cases, n, logits, n_logits, blacklist);
    free(cases);
    free(blacklist);
    free(logits);
}

/* ---- tests --------------------------------------------------------------------------------------------------------
 */

static void small_vocabularies(void **state) {
    (void)state;
    twin t;
    di_limits limits = limits_of(5000, 64);
    twin_open(&t, &limits, "auto");
    for (uint64_t round = 0; round < (IS_EMULATED ? 25 : 60); round++) {
        rng_state = 77 + round;
        int64_t n = round % 5 == 0 ? 1 + (int64_t)(rng() % 40) : 1 + (int64_t)(rng() % 5000);
        run_round(&t, 1000 + round, n, 1 + (int)(rng() % 40), 1 + (int32_t)(rng() % 8));
    }
    twin_close(&t);
}

static void the_released_vocabulary(void **state) {
    (void)state;
    twin t;
    di_limits limits = limits_of(VOCAB, 64);
    twin_open(&t, &limits, "auto");
    for (uint64_t round = 0; round < (IS_EMULATED ? 3 : 12); round++)
        run_round(&t, 5000 + round, VOCAB, IS_EMULATED ? 10 : 60, 8);
    twin_close(&t);
}

/* More rows than share scratch memory, and more changed ones than have copies at a time. */
static void many_rows(void **state) {
    (void)state;
    twin t;
    di_limits limits = limits_of(1000, 300);
    twin_open(&t, &limits, "auto");
    run_round(&t, 9000, 999, IS_EMULATED ? 280 : 700, 40);
    run_round(&t, 9001, 4, 300, 40);
    twin_close(&t);
}

/* Rows in which the search by slices finds everything in one slice: a single value, two values, a slope. */
static void crowded_slices(void **state) {
    (void)state;
    twin t;
    di_limits limits = limits_of(VOCAB, 16);
    twin_open(&t, &limits, "auto");
    int64_t n = IS_EMULATED ? 20001 : VOCAB;
    float *logits = ops_rig_alloc((size_t)(3 * n) * sizeof *logits);
    for (int64_t i = 0; i < n; i++) {
        logits[i] = 1.5f;
        logits[n + i] = i % 3 ? 1e-3f : 2e-3f;
        logits[2 * n + i] = (float)i * 1e-9f;
    }
    static const double top_ps[] = {1, 0.5, 0.9, 1e-9};
    static const int64_t top_ks[] = {-1, 7, 5000, 19000};
    sample_case *cases = ops_rig_alloc(48 * sizeof *cases);
    rng_state = 1;
    for (int i = 0; i < 48; i++) {
        cases[i] = (sample_case){.n = n, .forced = -1, .eos_id = -1, .logits_row = i % 3, .seed = (uint64_t)i};
        di_sampling_init(&cases[i].s);
        cases[i].s.top_p = top_ps[i / 3 % 4];
        cases[i].s.top_k = top_ks[i / 12];
        cases[i].s.n_logprobs = i % 2 ? 1000 : 3;
        cases[i].s.logprobs_processed = i % 4 < 2;
    }
    run_cases(&t, cases, 48, logits, 3, NULL);
    free(cases);
    free(logits);
    twin_close(&t);
}

static void refused_arguments(void **state) {
    (void)state;
    twin t;
    di_limits limits = limits_of(100, 16);
    twin_open(&t, &limits, "auto");
    di_sample_row row = {.temperature = 1, .top_p = 1, .repetition = 1, .mask_at = -1, .changed_at = -1};
    di_sample_result result = {0};
    float logits[101] = {0};
    uint32_t words[4] = {0};
    di_sample_rows_args good = {.logits = logits,
                                .n_vocab = 100,
                                .n_rows = 1,
                                .rows = &row,
                                .plan = &row,
                                .words = words,
                                .results = &result},
                        a = good;
    a.n_rows = 0;
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &a), DI_OK);
    a = good, a.n_vocab = 101; /* more than was reserved for */
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &a), DI_ERR_SHAPE);
    a = good, a.results = NULL;
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &a), DI_ERR_SHAPE);
    row.rule = DI_SAMPLE_TEST;
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &good), DI_ERR_SHAPE);
    row.rule = DI_SAMPLE_NOISE, row.changed_at = 1;
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &good), DI_ERR_SHAPE);
    row.changed_at = -1, row.n_top = 1, row.flags = DI_SAMPLE_LOGPROBS;
    assert_int_equal(t.gpu.ops->sample_rows(t.stream, &good), DI_ERR_SHAPE);
    twin_close(&t);
}

DI_TEST_GROUP(cuda_sample, cmocka_unit_test(small_vocabularies), cmocka_unit_test(the_released_vocabulary),
              cmocka_unit_test(many_rows), cmocka_unit_test(crowded_slices), cmocka_unit_test(refused_arguments));
