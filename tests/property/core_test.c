/* The engine under random traffic, on a model that checks what it is given (core_sim.h).
 *
 * Arrivals, lengths, chunks, few blocks, preemption, aborts at any point, cached prefixes, forks, priorities, callers,
 * penalties, filters, log-probabilities, constraints, drafts of any quality under every policy: every sample that
 * finishes has exactly the tokens and log-probabilities of its request run alone, what was cut short has a prefix of
 * them, each gets one DONE event, and at the end nothing is held. */
#include "core_sim.h"
#include "engine/engine_internal.h"
#include "toy_grammar.h"

enum { REQUESTS_MAX = 40, TOKENS_MAX = 160, PROMPT_MAX = 700, SAMPLES_MAX = 3, TOP = 2 };

typedef struct sample {
    int n_done;
    di_finish finish;
    di_status error;
    int64_t n_tokens;
    int32_t tokens[TOKENS_MAX];
    float logprobs[TOKENS_MAX];
    float prompt_sum; /* of the prompt's log-probabilities */
} sample;

typedef struct request {
    uint64_t id;
    int32_t prompt[PROMPT_MAX];
    size_t n_prompt;
    di_sampling sampling;
    int32_t n;
    char caller[4], salt[4];
    int32_t priority;
    bool is_aborted, has_grammar;
    toy_grammar grammar;
    sample samples[SAMPLES_MAX];
} request;

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)err;
    request *q = user;
    assert_true(gen->index < q->n);
    sample *s = &q->samples[gen->index];
    assert_int_equal(s->n_done, 0);
    if (event->kind == DI_CORE_TOKEN)
        assert_int_equal(gen->n_tokens, ++s->n_tokens);
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    s->n_done = 1;
    s->finish = gen->finish;
    s->error = gen->error.code;
    assert_int_equal(s->n_tokens, gen->n_tokens);
    assert_true(gen->seed == q->sampling.seed + (uint64_t)gen->index);
    memcpy(s->tokens, gen->tokens, (size_t)gen->n_tokens * sizeof *s->tokens);
    memcpy(s->logprobs, gen->logprobs, (size_t)gen->n_tokens * sizeof *s->logprobs);
    for (int64_t i = 1; gen->prompt_logprobs && gen->n_tokens > 0 && i < gen->n_prompt; i++)
        s->prompt_sum += gen->prompt_logprobs[i];
    return DI_OK;
}

/* A prompt shares its beginning with many others: one of three stems, cut anywhere, and an end of its own. */
static void make_request(request *q, uint64_t *rng, size_t prompt_max) {
    *q = (request){.n = 1};
    uint64_t stem = di_test_random(rng) % 3;
    q->n_prompt = (size_t)di_test_random_range(rng, 1, (int64_t)prompt_max);
    size_t shared = (size_t)di_test_random_range(rng, 0, (int64_t)q->n_prompt);
    for (size_t i = 0; i < q->n_prompt; i++)
        q->prompt[i] = (int32_t)(i < shared ? di_mix64(stem * 1000 + i) % SIM_VOCAB : di_test_random(rng) % SIM_VOCAB);
    di_sampling_init(&q->sampling);
    q->sampling.temperature = di_test_random(rng) % 2 ? 0.9 : 0;
    q->sampling.has_seed = true;
    q->sampling.seed = di_test_random(rng) % 1000;
    q->sampling.max_tokens =
        di_test_random(rng) % 3 ? di_test_random_range(rng, 1, 20) : di_test_random_range(rng, 1, TOKENS_MAX);
    q->sampling.ignore_eos = di_test_random(rng) % 4 != 0;
    q->sampling.n_logprobs = TOP;
    if (di_test_random(rng) % 4 == 0)
        q->sampling.presence_penalty = 0.7, q->sampling.repetition_penalty = 1.2;
    if (di_test_random(rng) % 4 == 0)
        q->sampling.top_p = 0.8, q->sampling.top_k = (int64_t)(di_test_random(rng) % 12);
    if (di_test_random(rng) % 8 == 0)
        q->sampling.min_p = 0.05;
    if (di_test_random(rng) % 8 == 0)
        q->sampling.n_prompt_logprobs = 1;
    q->has_grammar = di_test_random(rng) % 3 == 0;
    toy_init(&q->grammar, SIM_VOCAB, SIM_EOS, di_test_random(rng) % 4);
    if (di_test_random(rng) % 5 == 0)
        q->n = (int32_t)di_test_random_range(rng, 2, SAMPLES_MAX);
    q->priority = (int32_t)di_test_random_range(rng, -1, 1);
    snprintf(q->caller, sizeof q->caller, "%d", (int)(di_test_random(rng) % 3));
    snprintf(q->salt, sizeof q->salt, "%d", (int)(di_test_random(rng) % 2));
}

static di_status submit(di_core *core, request *q, int32_t n, uint64_t seed, di_error *err) {
    di_submission sub = {.ids = q->prompt,
                         .n_ids = q->n_prompt,
                         .sampling = q->sampling,
                         .n = n,
                         .constraint = q->has_grammar ? &q->grammar.source : NULL,
                         .priority = q->priority,
                         .caller = q->caller,
                         .caller_len = strlen(q->caller),
                         .cache_salt = q->salt,
                         .cache_salt_len = strlen(q->salt),
                         .callback = on_event,
                         .user = q};
    sub.sampling.seed = seed;
    return di_core_submit(core, &sub, &q->id, err);
}

static di_core_options ample(void) {
    return (di_core_options){.seqs_max = 1,
                             .batch_tokens_max = 4096,
                             .chunk_max = 4096,
                             .context_max = 2048,
                             .logits_max = 4096,
                             .n_blocks = 32,
                             .is_sync = true};
}

/* Each sample of q as a request of its own, with nothing else around. */
static void run_alone(di_core *core, const request *q, sample *out) {
    for (int32_t j = 0; j < q->n; j++) {
        request one = *q;
        one.n = 1;
        one.sampling.seed = q->sampling.seed + (uint64_t)j;
        memset(one.samples, 0, sizeof one.samples);
        di_error err = {0};
        di_test_ok(submit(core, &one, 1, one.sampling.seed, &err), &err);
        while (di_core_step(core)) {
        }
        assert_int_equal(one.samples[0].n_done, 1);
        out[j] = one.samples[0];
    }
}

static void check_counts(const di_core *core, const di_core_options *o) {
    const char *wrong = di_core_check(core);
    if (wrong)
        fail_msg("does not hold: %s", wrong);
    di_core_stats s;
    di_core_stats_get(core, &s);
    assert_in_range(s.blocks_used, 0, s.blocks);
    assert_in_range(s.blocks_used + s.blocks_cached, 0, s.blocks);
    assert_in_range(s.slots_used, 0, o->seqs_max + o->n_snapshots);
    assert_in_range(s.n_running, 0, o->seqs_max);
}

static di_core_options random_options(uint64_t *rng, size_t *prompt_max) {
    di_core_options o = {0};
    o.seqs_max = (int32_t)di_test_random_range(rng, 1, 9);
    o.n_blocks = (int32_t)di_test_random_range(
        rng, 2, di_test_random(rng) % 2 ? 8 : 30); /* the longest request may need them all */
    o.batch_tokens_max = di_test_random_range(rng, o.seqs_max, 600);
    o.chunk_max = di_test_random_range(rng, 1, 400);
    o.context_max = o.n_blocks * DI_PAGE_TOKENS;
    o.logits_max = di_test_random_range(rng, o.seqs_max, 64);
    o.has_prefix_cache = di_test_random(rng) % 4 != 0;
    o.n_snapshots = (int32_t)di_test_random_range(rng, 0, 12);
    o.is_sync = di_test_random(rng) % 4 == 0;
    o.context_sum_max = di_test_random(rng) % 4 ? 0 : 500;
    if (di_test_random(rng) % 3 == 0)
        o.tpot_goal_ns = 1, o.ttft_goal_ns = 1000000;
    *prompt_max = (size_t)DI_MIN(o.n_blocks * DI_PAGE_TOKENS - TOKENS_MAX - 1, PROMPT_MAX);
    return o;
}

/* What all runs together went through: traffic that misses one of these shows nothing about it. */
static di_core_stats total;
static int64_t n_put_off, n_caught_up, n_drawn, n_fed, n_chained;

static void add_total(const di_core_stats *s) {
    total.n_finished += s->n_finished;
    total.n_stop += s->n_stop;
    total.n_length += s->n_length;
    total.n_abort += s->n_abort;
    total.n_dropped += s->n_dropped;
    total.n_preempted += s->n_preempted;
    total.n_forked += s->n_forked;
    total.cached_tokens += s->cached_tokens;
    total.recomputed_tokens += s->recomputed_tokens;
    total.cache_hits += s->cache_hits;
    total.cache_evicted_blocks += s->cache_evicted_blocks;
    total.cache_evicted_snapshots += s->cache_evicted_snapshots;
    total.snapshots += s->snapshots;
    total.draft_tokens += s->draft_tokens;
    total.accepted_tokens += s->accepted_tokens;
}

static void traffic_went_through_everything(void **state) {
    (void)state;
    assert_true(total.n_stop > 0 && total.n_length > 0 && total.n_abort > 0 && total.n_dropped > 0);
    assert_true(total.n_preempted > 0 && total.n_forked > 0);
    assert_true(total.cached_tokens > 0 && total.recomputed_tokens > 0 && total.cache_hits > 0);
    assert_true(total.cache_evicted_blocks > 0 && total.cache_evicted_snapshots > 0 && total.snapshots > 0);
    assert_true(total.accepted_tokens > 0 && total.draft_tokens > total.accepted_tokens);
    assert_true(n_put_off > n_caught_up && n_caught_up > 0 && n_drawn > 0 && n_fed > 0);
    assert_true(n_chained > 0);
    print_message("drafts verified %lld, accepted %lld\n", (long long)total.draft_tokens,
                  (long long)total.accepted_tokens);
    print_message("samples %lld, preempted %lld, forked %lld, cached tokens %lld, run again %lld\n",
                  (long long)total.n_finished, (long long)total.n_preempted, (long long)total.n_forked,
                  (long long)total.cached_tokens, (long long)total.recomputed_tokens);
}

DI_PROPERTY(every_sample_is_what_it_is_alone, 150) {
    uint64_t rng = seed;
    size_t prompt_max;
    di_core_options o = random_options(&rng, &prompt_max), all = ample();
    sim m, m_alone;
    sim_open(&m, (int)di_test_random_range(&rng, 1, 2));
    m.has_drafts = di_test_random(&rng) % 4 != 0;
    m.draft_quality = (int)di_test_random_range(&rng, 0, 8);
    m.draft_fails = di_test_random(&rng) % 4 ? 0 : 7;
    o.draft_tokens = m.has_drafts ? (int32_t)di_test_random_range(&rng, 0, 5) : 0;
    o.draft_policy = (di_spec_policy)(di_test_random(&rng) % 3);
    for (int i = 0; seed % 4 == 0 && i < o.draft_tokens; i++)
        o.draft_temperatures[i] = 2;
    if (di_test_random(&rng) % 6 == 0) { /* by rejection drafts change the text, and nothing else may */
        o.accept = all.accept = DI_SPEC_REJECTION;
        o.draft_tokens = 0;
    }
    sim_open(&m_alone, 1);
    /* Rows drawn by the operation, as a device has it, and those drawn on the host are the same. */
    m.draws = di_test_random(&rng) % 2;
    m.follows = di_test_random(&rng) % 4 != 0;
    di_core *core = sim_core(&m, &o), *alone = sim_core(&m_alone, &all);
    request *requests = calloc(REQUESTS_MAX, sizeof *requests);
    assert_non_null(requests);
    int n = 0, n_requests = (int)di_test_random_range(&rng, 1, REQUESTS_MAX);
    while (n < n_requests || di_core_pending(core) > 0) {
        while (n < n_requests && di_test_random(&rng) % 3 == 0) {
            request *q = &requests[n++];
            make_request(q, &rng, prompt_max);
            di_error err = {0};
            di_test_ok(submit(core, q, q->n, q->sampling.seed, &err), &err);
        }
        if (n > 0 && di_test_random(&rng) % 20 == 0) {
            request *q = &requests[di_test_random(&rng) % (uint64_t)n];
            q->is_aborted |= di_core_abort(core, q->id);
        }
        di_core_step(core);
        check_counts(core, &o);
    }
    di_core_step(core);
    for (int i = 0; i < n; i++) {
        const request *q = &requests[i];
        sample want[SAMPLES_MAX];
        run_alone(alone, q, want);
        for (int32_t j = 0; j < q->n; j++) {
            const sample *got = &q->samples[j];
            assert_int_equal(got->n_done, 1);
            if (got->finish != DI_FINISH_ABORT) {
                assert_int_equal(got->finish, want[j].finish);
                assert_int_equal(got->n_tokens, want[j].n_tokens);
                assert_true(got->prompt_sum == want[j].prompt_sum);
            } else {
                assert_true(q->is_aborted && got->n_tokens <= want[j].n_tokens);
            }
            assert_memory_equal(got->tokens, want[j].tokens, (size_t)got->n_tokens * sizeof *got->tokens);
            assert_memory_equal(got->logprobs, want[j].logprobs, (size_t)got->n_tokens * sizeof *got->logprobs);
            if (q->has_grammar)
                assert_true(toy_follows(&q->grammar, got->tokens, got->n_tokens));
        }
    }
    di_core_stats s;
    di_core_stats_get(core, &s);
    assert_int_equal(s.blocks_used, 0);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(s.n_finished, s.n_submitted);
    assert_int_equal(s.n_stop + s.n_length + s.n_abort + s.n_error, s.n_finished);
    add_total(&s);
    n_put_off += m.n_put_off;
    n_caught_up += m.n_caught_up;
    n_drawn += m.n_drawn;
    n_fed += m.n_fed;
    n_chained += m.n_chained;
    di_core_destroy(core);
    di_core_destroy(alone);
    sim_close(&m);
    sim_close(&m_alone);
    free(requests);
}

DI_TEST_GROUP(core, cmocka_unit_test(every_sample_is_what_it_is_alone),
              cmocka_unit_test(traffic_went_through_everything));
