/* What tests of the engine's core on the model of core_sim.h share: requests that record what their events said.
 *
 * A call is one request with all its samples. It is made, changed by the test, submitted, and read after its DONE
 * events. Inline: a test program takes what it needs. */
#ifndef DI_TEST_CORE_RIG_H
#define DI_TEST_CORE_RIG_H

#include "core_sim.h"

enum { CALL_SAMPLES_MAX = 24, CALL_TOKENS_MAX = 400, CALL_PROMPT_MAX = 1600 };

typedef struct call_sample {
    int n_done;
    di_finish finish;
    di_error error;
    int64_t n_tokens, n_cached;
    int32_t n_preempted, stop_token;
    int32_t tokens[CALL_TOKENS_MAX];
    float logprobs[CALL_TOKENS_MAX];
    double prompt_sum; /* of the prompt's log-probabilities */
    int64_t submit_ns, start_ns, first_ns, last_ns;
    int64_t done_at; /* the how many-th DONE event of its program this was */
} call_sample;

typedef struct call {
    di_core *core;
    uint64_t id;
    int32_t prompt[CALL_PROMPT_MAX];
    di_submission sub;
    call_sample samples[CALL_SAMPLES_MAX];
    /* done from the callback, at that many tokens of any sample; 0: never */
    int64_t abort_at, fail_at;
    int32_t only_index;     /* fail_at concerns this sample alone; -1: all */
    struct call *submit_at; /* submitted at the first token of sample 0; NULL: none */
    struct call *submit_done;
} call;

/* Engines of several threads count together. */
static inline int64_t call_count_done(void) {
    static _Atomic int64_t n;
    return ++n;
}

static inline di_status call_submit(di_core *core, call *c, di_error *err);

static inline di_status call_on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    call *c = user;
    call_sample *s = &c->samples[gen->index];
    assert_int_equal(s->n_done, 0); /* DONE is the last */
    if (event->kind == DI_CORE_TOKEN) {
        assert_int_equal(gen->n_tokens, ++s->n_tokens);
        if (c->submit_at && gen->index == 0 && gen->n_tokens == 1)
            di_test_ok(call_submit(c->core, c->submit_at, err), err);
        if (c->abort_at == gen->n_tokens)
            assert_true(di_core_abort(c->core, gen->id));
        if (c->fail_at == gen->n_tokens && (c->only_index < 0 || c->only_index == gen->index))
            return di_fail(err, DI_ERR_IO, "nobody listens");
        return DI_OK;
    }
    assert_int_equal(event->kind, DI_CORE_DONE);
    s->n_done++;
    s->done_at = call_count_done();
    s->finish = gen->finish;
    s->error = gen->error;
    s->n_cached = gen->n_cached;
    s->n_preempted = gen->n_preempted;
    s->stop_token = gen->stop_token;
    s->submit_ns = gen->submit_ns;
    s->start_ns = gen->start_ns;
    s->first_ns = gen->first_ns;
    s->last_ns = gen->last_ns;
    assert_int_equal(s->n_tokens, gen->n_tokens);
    assert_in_range(gen->n_tokens, 0, CALL_TOKENS_MAX);
    memcpy(s->tokens, gen->tokens, (size_t)gen->n_tokens * sizeof *s->tokens);
    if (gen->logprobs)
        memcpy(s->logprobs, gen->logprobs, (size_t)gen->n_tokens * sizeof *s->logprobs);
    for (int64_t i = 1; gen->prompt_logprobs && gen->n_tokens > 0 && i < gen->n_prompt; i++)
        s->prompt_sum += (double)gen->prompt_logprobs[i];
    if (c->submit_done && gen->index == 0)
        di_test_ok(call_submit(c->core, c->submit_done, err), err);
    return DI_OK;
}

/* A greedy request of its own kind: another number gives another prompt. */
static inline void call_make(call *c, int64_t n_prompt, int64_t max_tokens, uint64_t kind) {
    assert_in_range(n_prompt, 1, CALL_PROMPT_MAX);
    *c = (call){.only_index = -1};
    for (int64_t i = 0; i < n_prompt; i++)
        c->prompt[i] = 2 + (int32_t)(di_mix64(kind * 100000 + (uint64_t)i) % (SIM_VOCAB - 2));
    c->sub = (di_submission){.n_ids = (size_t)n_prompt, .n = 1, .callback = call_on_event};
    di_sampling_init(&c->sub.sampling);
    c->sub.sampling.temperature = 0;
    c->sub.sampling.max_tokens = max_tokens;
    c->sub.sampling.ignore_eos = true;
    c->sub.sampling.n_logprobs = 0;
}

/* The same with tokens that are drawn. */
static inline void call_make_drawn(call *c, int64_t n_prompt, int64_t max_tokens, uint64_t kind, int32_t n) {
    call_make(c, n_prompt, max_tokens, kind);
    c->sub.sampling.temperature = 0.9;
    c->sub.sampling.has_seed = true;
    c->sub.sampling.seed = kind;
    c->sub.n = n;
}

static inline di_status call_submit(di_core *core, call *c, di_error *err) {
    c->core = core;
    c->sub.ids = c->prompt;
    c->sub.user = c;
    memset(c->samples, 0, sizeof c->samples);
    return di_core_submit(core, &c->sub, &c->id, err);
}

static inline void call_start(di_core *core, call *c) {
    di_error err = {0};
    di_test_ok(call_submit(core, c, &err), &err);
}

/* Nothing is held by any sequence. */
static inline void core_check_empty(const di_core *core) {
    di_core_stats s;
    di_core_stats_get(core, &s);
    assert_int_equal(di_core_pending(core), 0);
    assert_int_equal(s.blocks_used, 0);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(s.n_finished, s.n_submitted);
    assert_int_equal(s.n_stop + s.n_length + s.n_abort + s.n_error, s.n_finished);
}

static inline void core_run(di_core *core) {
    for (int64_t turn = 0; di_core_step(core); turn++)
        assert_true(turn < 1000000); /* the engine goes round in circles */
    core_check_empty(core);
}

static inline di_core_stats core_stats(const di_core *core) {
    di_core_stats s;
    di_core_stats_get(core, &s);
    return s;
}

/* A core on a model of its own, with a few calls. */
typedef struct bench {
    sim m;
    di_core *core;
    call calls[12];
} bench;

static inline bench *bench_open(const di_core_options *options) {
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    sim_open(&b->m, 1);
    b->core = sim_core(&b->m, options);
    return b;
}

static inline void bench_close(bench *b) {
    di_core_destroy(b->core);
    sim_close(&b->m);
    free(b);
}

/* Room for everything, one request at a time, every prompt in one piece. */
static inline di_core_options core_ample(void) {
    return (di_core_options){.seqs_max = 1,
                             .batch_tokens_max = 4096,
                             .chunk_max = 4096,
                             .context_max = 2048,
                             .logits_max = 4096,
                             .n_blocks = 32,
                             .is_sync = true};
}

static inline void sample_check_same(const call_sample *got, const call_sample *want) {
    assert_int_equal(got->n_done, 1);
    assert_int_equal(got->finish, want->finish);
    assert_int_equal(got->n_tokens, want->n_tokens);
    assert_memory_equal(got->tokens, want->tokens, (size_t)got->n_tokens * sizeof *got->tokens);
    assert_memory_equal(got->logprobs, want->logprobs, (size_t)got->n_tokens * sizeof *got->logprobs);
    assert_true(got->prompt_sum == want->prompt_sum);
}

/* Every sample of c is what its request gives alone. */
static inline void call_check_alone(const call *c) {
    sim m;
    sim_open(&m, 1);
    di_core_options o = core_ample();
    di_core *core = sim_core(&m, &o);
    call *one = calloc(1, sizeof *one);
    assert_non_null(one);
    for (int32_t j = 0; j < DI_MAX(c->sub.n, 1); j++) {
        *one = *c;
        one->sub.n = 1;
        one->sub.deadline_ns = 0;
        one->abort_at = one->fail_at = 0;
        one->submit_at = one->submit_done = NULL;
        if (one->sub.sampling.has_seed)
            one->sub.sampling.seed = c->sub.sampling.seed + (uint64_t)j;
        call_start(core, one);
        core_run(core);
        sample_check_same(&c->samples[j], &one->samples[0]);
    }
    free(one);
    di_core_destroy(core);
    sim_close(&m);
}

#endif
