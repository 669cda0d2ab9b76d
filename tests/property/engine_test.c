/* The engine under random traffic on the model that ships.
 *
 * Arrivals and aborts at any time, chunks and budgets of any size, blocks so few that running requests lose theirs,
 * cached prefixes, samples that share a prompt, one and two threads, steps that overlap or not, every kind of replay:
 * each sample that finishes has exactly the tokens and log-probabilities of its request run alone, one at a time and in
 * one piece, with a tail of the same length kept by replay (the exact bound is as good as no replay); what was aborted
 * has a prefix of them; at the end nothing is held. */
#include <pthread.h>

#include "accelerator.h"
#include "engine/engine.h"
#include "harness.h"

enum { KINDS = 7, SAMPLES = 2, TOKENS_MAX = 56, REQUESTS = 9, TOP = 1, CONTEXT = 640 };

/* ---- requests: few kinds, so that what each gives alone is computed once -------------------------------------------
 */

typedef struct sample {
    int n_done;
    di_finish finish;
    int64_t n_tokens;
    int32_t tokens[TOKENS_MAX];
    float logprobs[TOKENS_MAX];
    double prompt_sum; /* of the prompt's log-probabilities */
} sample;

typedef struct request {
    uint64_t id;
    int kind;
    int32_t n;
    int64_t max_tokens;
    bool is_aborted;
    sample samples[SAMPLES];
} request;

static const size_t prompt_lens[KINDS] = {1, 80, 100, 128, 215, 340, 500};

/* Under a sanitizer the longest prompts and most of the tokens, which run the same code for minutes, stay outside. */
static int n_kinds(void) {
    return di_test_is_sanitized() ? 5 : KINDS;
}
static int64_t tokens_max(void) {
    return di_test_is_sanitized() ? 24 : TOKENS_MAX;
}

/* All kinds begin alike, so that each finds what another left in the cache. */
static size_t make_prompt(int kind, int32_t *ids) {
    size_t n = prompt_lens[kind], shared = n - n / 8;
    for (size_t i = 0; i < n; i++)
        ids[i] = 300 + (int32_t)(di_mix64((i < shared ? 1 : (uint64_t)kind + 10) * 10000 + i) % 5000);
    return n;
}

static bool scores_prompt(int kind, di_replay replay) {
    return kind % 4 == 2 && replay == DI_REPLAY_OFF;
}

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)err;
    request *q = user;
    sample *s = &q->samples[gen->index];
    assert_int_equal(s->n_done, 0);
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    s->n_done++;
    s->finish = gen->finish;
    s->n_tokens = gen->n_tokens;
    assert_in_range(gen->n_tokens, 0, q->max_tokens);
    memcpy(s->tokens, gen->tokens, (size_t)gen->n_tokens * sizeof *s->tokens);
    memcpy(s->logprobs, gen->logprobs, (size_t)gen->n_tokens * sizeof *s->logprobs);
    for (int64_t i = 1; gen->prompt_logprobs && gen->n_tokens > 0 && i < gen->n_prompt; i++)
        s->prompt_sum += (double)gen->prompt_logprobs[i];
    return DI_OK;
}

static void submit(di_core *core, request *q, int first_sample, di_replay replay) {
    int32_t ids[CONTEXT];
    di_submission sub = {.ids = ids, .n = q->n, .callback = on_event, .user = q};
    sub.n_ids = make_prompt(q->kind, ids);
    di_sampling_init(&sub.sampling);
    sub.sampling.temperature = q->kind % 3 ? 0.9 : 0;
    sub.sampling.has_seed = true;
    sub.sampling.seed = 100 * (uint64_t)q->kind + (uint64_t)first_sample;
    sub.sampling.max_tokens = q->max_tokens;
    sub.sampling.n_logprobs = TOP;
    sub.sampling.presence_penalty = q->kind % 4 == 3 ? 0.4 : 0;
    sub.sampling.n_prompt_logprobs = scores_prompt(q->kind, replay) ? 0 : -1;
    di_error err = {0};
    di_test_ok(di_core_submit(core, &sub, &q->id, &err), &err);
}

/* ---- engines ------------------------------------------------------------------------------------------------------
 */

static di_loaded loaded[2]; /* with one thread and with two */

static void load_once(void) {
    for (int i = 0; i < 2 && !loaded[i].model; i++) {
        di_load_options options = {.dir = di_test_source("models/tiny"),
                                   .backend = di_test_backend(),
                                   .threads = i + 1,
                                   .seqs_max = 6,
                                   .batch_tokens_max = CONTEXT,
                                   .chunk_max = CONTEXT,
                                   .context_max = CONTEXT,
                                   .draft_tokens = 5,
                                   .has_prefix_cache = true};
        di_error err = {0};
        di_test_ok(di_load_open(&loaded[i], &options, &err), &err);
    }
}

static int close_all(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++)
        di_load_close(&loaded[i]);
    return 0;
}

static di_core *open_core(di_loaded *l, const di_core_options *o) {
    di_core *core = NULL;
    di_error err = {0};
    di_test_ok(di_core_create(&core, l->model, &l->backend, l->device, &l->plan.memory, l->tok, o, &err), &err);
    return core;
}

/* Replay off; the exact bound (keep 0), which changes nothing; tails so short that the result depends on them, but not
 * on whether the rows before are masked or left out. */
typedef struct setting {
    di_replay replay;
    int64_t keep;
} setting;

static const setting settings[] = {
    {DI_REPLAY_OFF, 0}, {DI_REPLAY_MASK, 0}, {DI_REPLAY_COMPACT, 0}, {DI_REPLAY_MASK, 70}, {DI_REPLAY_COMPACT, 70}};

/* What each kind gives alone: one sequence at a time, the prompt in one piece, one thread, nothing cached. */
static const sample *alone(bool is_short, int kind, int index) {
    static sample known[2][KINDS][SAMPLES];
    sample *s = &known[is_short][kind][index];
    if (s->n_done)
        return s;
    di_core_options o = loaded[0].plan.engine;
    o.seqs_max = 1;
    o.has_prefix_cache = false;
    o.draft_tokens = 0;
    o.is_sync = true;
    o.replay = is_short ? DI_REPLAY_MASK : DI_REPLAY_OFF;
    o.replay_keep = is_short ? 70 : 0;
    di_core *core = open_core(&loaded[0], &o);
    request q = {.kind = kind, .n = 1, .max_tokens = tokens_max()};
    submit(core, &q, index, o.replay);
    while (di_core_step(core)) {
    }
    assert_int_equal(q.samples[0].n_done, 1);
    assert_int_not_equal(q.samples[0].finish, DI_FINISH_ERROR);
    *s = q.samples[0];
    di_core_destroy(core);
    return s;
}

static void check_sample(const request *q, int index, const sample *want) {
    const sample *got = &q->samples[index];
    assert_int_equal(got->n_done, 1);
    if (got->finish == DI_FINISH_ABORT) {
        assert_true(q->is_aborted && got->n_tokens <= want->n_tokens);
    } else if (want->n_tokens <= q->max_tokens && want->finish == DI_FINISH_STOP) {
        assert_int_equal(got->finish, DI_FINISH_STOP);
        assert_int_equal(got->n_tokens, want->n_tokens);
    } else {
        assert_int_equal(got->finish, DI_FINISH_LENGTH);
        assert_int_equal(got->n_tokens, q->max_tokens);
    }
    assert_memory_equal(got->tokens, want->tokens, (size_t)got->n_tokens * sizeof *got->tokens);
    assert_memory_equal(got->logprobs, want->logprobs, (size_t)got->n_tokens * sizeof *got->logprobs);
    if (got->finish != DI_FINISH_ABORT && got->prompt_sum != 0)
        assert_true(got->prompt_sum == want->prompt_sum);
}

static di_core_options random_options(uint64_t *rng, const di_loaded *l, const setting *set) {
    di_core_options o = l->plan.engine;
    o.seqs_max = (int32_t)di_test_random_range(rng, 1, l->plan.engine.seqs_max);
    o.n_blocks = (int32_t)di_test_random_range(rng, 5, di_test_random(rng) % 4 ? 5 : 16); /* the longest needs five */
    o.batch_tokens_max = di_test_random_range(rng, o.seqs_max, di_test_random(rng) % 2 ? 80 : CONTEXT);
    o.chunk_max = di_test_random_range(rng, 8, di_test_random(rng) % 2 ? 80 : CONTEXT);
    o.has_prefix_cache = di_test_random(rng) % 4 != 0;
    o.n_snapshots = di_test_random(rng) % 3 ? (int32_t)di_test_random_range(rng, 1, 8) : 0;
    o.is_sync = di_test_random(rng) % 3 == 0;
    o.draft_tokens = di_test_random(rng) % 3 ? (int32_t)di_test_random_range(rng, 1, 5) : 0;
    o.draft_policy = di_test_random(rng) % 2 ? DI_SPEC_FIXED : DI_SPEC_COST;
    o.replay = set->replay;
    o.replay_keep = set->keep;
    return o;
}

/* What all runs went through: traffic that misses one of these shows nothing about it. */
static di_core_stats total;
static int64_t n_preempted_replay;

static void add_total(const di_core_stats *s, const setting *set) {
    total.n_abort += s->n_abort;
    total.n_length += s->n_length;
    total.n_preempted += s->n_preempted;
    total.n_forked += s->n_forked;
    total.n_dropped += s->n_dropped;
    total.cached_tokens += s->cached_tokens;
    total.recomputed_tokens += s->recomputed_tokens;
    total.snapshots += s->snapshots;
    total.prompt_tokens += s->prompt_tokens;
    n_preempted_replay += set->keep > 0 ? s->n_preempted : 0;
}

static void run_traffic(uint64_t seed) {
    uint64_t rng = seed;
    load_once();
    const setting *set = &settings[di_test_random(&rng) % DI_COUNT(settings)];
    di_loaded *l = &loaded[di_test_random(&rng) % 2];
    di_core_options o = random_options(&rng, l, set);
    di_core *core = open_core(l, &o);
    request requests[REQUESTS] = {0};
    int n = 0;
    while (n < REQUESTS || di_core_pending(core) > 0) {
        while (n < REQUESTS && di_test_random(&rng) % 3 == 0) {
            request *q = &requests[n++];
            *q = (request){.kind = (int)di_test_random_range(&rng, 0, di_test_random(&rng) % 4 ? 4 : n_kinds() - 1),
                           .n = di_test_random(&rng) % 4 ? 1 : (int32_t)di_test_random_range(&rng, 2, SAMPLES),
                           .max_tokens = di_test_random_range(&rng, di_test_random(&rng) % 2 ? 1 : tokens_max() - 16,
                                                              tokens_max())};
            submit(core, q, 0, set->replay);
        }
        if (n > 0 && di_test_random(&rng) % 30 == 0) {
            request *q = &requests[di_test_random(&rng) % (uint64_t)n];
            q->is_aborted |= di_core_abort(core, q->id);
        }
        di_core_step(core);
    }
    while (di_core_step(core)) {
    }
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < requests[i].n; j++)
            check_sample(&requests[i], j, alone(set->keep > 0, requests[i].kind, j));
    }
    di_core_stats s;
    di_core_stats_get(core, &s);
    assert_int_equal(s.blocks_used, 0);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(s.n_finished, s.n_submitted);
    assert_int_equal(s.n_error, 0);
    add_total(&s, set);
    di_core_destroy(core);
}

DI_PROPERTY(every_sample_is_what_it_is_alone, 14) {
    static int n_runs; /* a sanitizer sees as much in a few, and takes twenty times as long */
    if (!di_test_is_sanitized() || n_runs++ < 2)
        run_traffic(seed);
}

DI_PROPERTY(every_sample_is_what_it_is_alone_for_long, 400) {
    run_traffic(seed);
}

static void traffic_went_through_everything(void **state) {
    (void)state;
    if (di_test_is_sanitized())
        di_test_skip("few runs under a sanitizer");
    print_message(
        "prompt rows %lld, cached %lld, run again %lld, preempted %lld (replay cut short %lld), forked %lld\n",
        (long long)total.prompt_tokens, (long long)total.cached_tokens, (long long)total.recomputed_tokens,
        (long long)total.n_preempted, (long long)n_preempted_replay, (long long)total.n_forked);
    assert_true(total.n_length > 0 && total.n_abort > 0 && total.n_dropped > 0);
    assert_true(total.n_preempted > 0 && n_preempted_replay > 0 && total.n_forked > 0);
    assert_true(total.cached_tokens > 0 && total.recomputed_tokens > 0 && total.snapshots > 0);
}

/* ---- two engines in one process -----------------------------------------------------------------------------------
 */

typedef struct job {
    di_core *core;
    request requests[KINDS];
} job;

static void *run_job(void *arg) {
    job *j = arg;
    for (int k = 0; k < n_kinds(); k++)
        submit(j->core, &j->requests[k], 0, DI_REPLAY_OFF);
    while (di_core_step(j->core)) {
    }
    return NULL;
}

static void two_engines_at_the_same_time_give_the_same(void **state) {
    (void)state;
    load_once();
    job *jobs = calloc(2, sizeof *jobs);
    assert_non_null(jobs);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        di_core_options o = loaded[i].plan.engine;
        o.chunk_max = i ? 100 : 64;
        jobs[i].core = open_core(&loaded[i], &o);
        for (int k = 0; k < n_kinds(); k++)
            jobs[i].requests[k] = (request){.kind = k, .n = 1, .max_tokens = 12};
        assert_int_equal(pthread_create(&threads[i], NULL, run_job, &jobs[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 2; i++) {
        di_core_destroy(jobs[i].core);
        for (int k = 0; k < n_kinds(); k++)
            check_sample(&jobs[i].requests[k], 0, alone(false, k, 0));
    }
    free(jobs);
}

DI_TEST_GROUP(engine_property, cmocka_unit_test(every_sample_is_what_it_is_alone),
              cmocka_unit_test(traffic_went_through_everything),
              cmocka_unit_test_teardown(two_engines_at_the_same_time_give_the_same, close_all));
DI_TEST_GROUP(long_engine_property, cmocka_unit_test_teardown(every_sample_is_what_it_is_alone_for_long, close_all));
