/* Defects that engines of this kind have had, each shown absent: on a model that checks what it is given
 * (core_sim.h), so that a wrong block, ring or copy ends the program. Names of the groups say what of. */
#include <malloc.h>
#include <pthread.h>

#include "core_rig.h"

static di_core_options small_options(void) {
    return (di_core_options){.seqs_max = 4,
                             .batch_tokens_max = 256,
                             .chunk_max = 64,
                             .context_max = 1024,
                             .logits_max = 256,
                             .n_blocks = 32,
                             .n_snapshots = 4};
}

static void steps(di_core *core, int n) {
    for (int i = 0; i < n; i++)
        di_core_step(core);
}

/* ---- memory comes back ---------------------------------------------------------------------------------------------
 */

/* At every place of a prompt that runs in chunks, and of the answer behind it. */
static void abort_between_chunks_frees_all(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = small_options();
        o.is_sync = mode & 1;
        o.has_prefix_cache = mode & 2;
        bench *b = bench_open(&o);
        for (int n_steps = 0; n_steps < 14; n_steps++) {
            call *c = &b->calls[0];
            call_make(c, 600, 4, (uint64_t)n_steps);
            c->sub.n = n_steps % 3 + 1;
            call_start(b->core, c);
            steps(b->core, n_steps);
            bool is_over = c->samples[0].n_done > 0;
            assert_int_equal(di_core_abort(b->core, c->id), !is_over);
            core_run(b->core);
            for (int j = 0; j < c->sub.n; j++) {
                assert_int_equal(c->samples[j].n_done, 1);
                assert_int_equal(c->samples[j].finish, is_over ? DI_FINISH_LENGTH : DI_FINISH_ABORT);
            }
        }
        assert_true(core_stats(b->core).n_abort > 0);
        /* The whole memory is there for one that needs all of it. */
        call_make(&b->calls[1], 900, 124, 99);
        call_start(b->core, &b->calls[1]);
        core_run(b->core);
        call_check_alone(&b->calls[1]);
        bench_close(b);
    }
}

/* ---- one request's fault -------------------------------------------------------------------------------------------
 */

enum { BAD_TOKEN = 7 };
static const int32_t bad_id = BAD_TOKEN;
static const float bad_bias = -100;

/* Neither its prompt nor its output has the token whose rows are damaged. */
static void keep_clean(call *c) {
    for (size_t i = 0; i < c->sub.n_ids; i++)
        c->prompt[i] += c->prompt[i] == BAD_TOKEN;
    c->sub.sampling.n_bias = 1;
    c->sub.sampling.bias_ids = &bad_id;
    c->sub.sampling.bias_values = &bad_bias;
}

/* calls[0] is at fault; the others begin before, with and after it, and are what they are alone. */
static void run_beside_fault(bench *b, void (*make_faulty)(call *c), di_status expected) {
    for (int i = 0; i < 7; i++) {
        call *c = &b->calls[i];
        call_make(c, 40 + 90 * i, 30, (uint64_t)(100 + i));
        keep_clean(c);
    }
    make_faulty(&b->calls[0]);
    for (int i = 1; i < 4; i++)
        call_start(b->core, &b->calls[i]);
    steps(b->core, 3);
    call_start(b->core, &b->calls[0]);
    for (int i = 4; i < 7; i++)
        call_start(b->core, &b->calls[i]);
    core_run(b->core);
    assert_int_equal(b->calls[0].samples[0].n_done, 1);
    assert_int_equal(b->calls[0].samples[0].finish, DI_FINISH_ERROR);
    assert_int_equal(b->calls[0].samples[0].error.code, expected);
    assert_true(strlen(b->calls[0].samples[0].error.message) > 0);
    assert_int_equal(core_stats(b->core).n_error, 1);
    for (int i = 1; i < 7; i++)
        call_check_alone(&b->calls[i]);
}

static void fail_at_third(call *c) {
    c->fail_at = 3;
}
static void fail_at_first(call *c) {
    c->fail_at = 1;
}
static void end_prompt_badly(call *c) {
    c->prompt[c->sub.n_ids - 1] = BAD_TOKEN;
}
static void answer_badly(call *c) {
    static const int32_t forced[] = {3, 4, BAD_TOKEN, 5, 6};
    c->sub.forced_first = forced;
    c->sub.n_forced_first = DI_COUNT(forced);
}
static void score_badly(call *c) {
    c->prompt[c->sub.n_ids / 2] = BAD_TOKEN;
    c->sub.sampling.n_prompt_logprobs = 0;
}

static void one_request_ends_for_its_own_fault(void **state) {
    (void)state;
    static const struct {
        void (*make_faulty)(call *c);
        di_status expected;
    } faults[] = {{fail_at_third, DI_ERR_IO},
                  {fail_at_first, DI_ERR_IO},
                  {end_prompt_badly, DI_ERR_INTERNAL},
                  {answer_badly, DI_ERR_INTERNAL},
                  {score_badly, DI_ERR_INTERNAL}};
    for (size_t i = 0; i < DI_COUNT(faults); i++) {
        for (int mode = 0; mode < 4; mode++) {
            di_core_options o = small_options();
            o.is_sync = mode & 1;
            o.has_prefix_cache = mode & 2;
            bench *b = bench_open(&o);
            b->m.nan_token = BAD_TOKEN;
            run_beside_fault(b, faults[i].make_faulty, faults[i].expected);
            bench_close(b);
        }
    }
}

static void check_refused(bench *b, const call *proto, di_status expected) {
    call *c = &b->calls[11];
    *c = *proto;
    di_error err = {0};
    int64_t before = core_stats(b->core).n_refused_invalid;
    assert_int_equal(call_submit(b->core, c, &err), expected);
    assert_true(strlen(err.message) > 0);
    assert_int_equal(core_stats(b->core).n_refused_invalid, before + 1);
    assert_int_equal(c->samples[0].n_done, 0);
}

/* What can't be done is said at once: it neither vanishes nor reaches a step. */
static void bad_requests_are_refused_and_counted(void **state) {
    (void)state;
    di_core_options o = small_options();
    bench *b = bench_open(&o);
    call *c = &b->calls[0];
    static const int32_t bad[] = {3, SIM_VOCAB}, negative[] = {-1};
    call_make(c, 10, 4, 1);
    c->prompt[4] = SIM_VOCAB;
    check_refused(b, c, DI_ERR_REQUEST);
    c->prompt[4] = -1;
    check_refused(b, c, DI_ERR_REQUEST);
    call_make(c, 10, 4, 1);
    c->sub.forced_first = bad;
    c->sub.n_forced_first = 2;
    check_refused(b, c, DI_ERR_REQUEST);
    call_make(c, 10, 4, 1);
    c->sub.forced_first = negative;
    c->sub.n_forced_first = 1;
    check_refused(b, c, DI_ERR_REQUEST);
    call_make(c, 10, 4, 1);
    c->sub.n_ids = 0;
    check_refused(b, c, DI_ERR_REQUEST);
    call_make(c, 1024, 4, 1); /* the context leaves nothing for an answer */
    check_refused(b, c, DI_ERR_REQUEST);
    call_make(c, 10, 4, 1);
    c->sub.n = DI_SAMPLES_MAX + 1;
    check_refused(b, c, DI_ERR_RANGE);
    c->sub.n = -1;
    check_refused(b, c, DI_ERR_RANGE);
    call_make(c, 10, 4, 1);
    c->sub.sampling.temperature = NAN;
    check_refused(b, c, DI_ERR_RANGE);
    call_make(c, 10, -1, 1);
    check_refused(b, c, DI_ERR_RANGE);
    assert_int_equal(core_stats(b->core).n_submitted, 0);
    call_make(c, 10, 4, 1);
    call_start(b->core, c);
    core_run(b->core);
    call_check_alone(c);
    bench_close(b);
}

/* A forward that fails ends those that are in it; what comes later is right, and so is what was kept from before. */
static void failing_forward_ends_only_who_is_in_it(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = small_options();
        o.is_sync = mode & 1;
        o.has_prefix_cache = mode & 2;
        bench *b = bench_open(&o);
        b->m.fail_every = 9;
        int n_failed = 0;
        for (int round = 0; round < 20; round++) {
            for (int i = 0; i < 6; i++) {
                call *c = &b->calls[i];
                call_make_drawn(c, 100 + 60 * i, 4, (uint64_t)(i % 3), i % 2 + 1);
                call_start(b->core, c);
            }
            core_run(b->core);
            for (int i = 0; i < 6; i++) {
                const call *c = &b->calls[i];
                bool is_whole = true;
                for (int j = 0; j < c->sub.n; j++) {
                    assert_int_equal(c->samples[j].n_done, 1);
                    if (c->samples[j].finish == DI_FINISH_ERROR) {
                        assert_int_equal(c->samples[j].error.code, DI_ERR_DEVICE);
                        is_whole = false;
                        n_failed++;
                    }
                }
                if (is_whole && round % 5 == 0)
                    call_check_alone(c);
            }
        }
        assert_in_range(n_failed, 1, 20 * 9 - 1);
        assert_int_equal(core_stats(b->core).n_error, n_failed);
        bench_close(b);
    }
}

/* ---- preemption ----------------------------------------------------------------------------------------------------
 */

/* No block is free and others wait, but nobody who runs needs one. */
static void full_memory_alone_preempts_nobody(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.n_blocks = 4;
    o.seqs_max = 2;
    o.context_max = 256;
    bench *b = bench_open(&o);
    for (int i = 0; i < 4; i++) {
        call_make(&b->calls[i], 140, 100, (uint64_t)i);
        call_start(b->core, &b->calls[i]);
    }
    int n_full = 0;
    while (di_core_step(b->core))
        n_full += core_stats(b->core).blocks_used == 4;
    assert_true(n_full > 150);
    assert_int_equal(core_stats(b->core).n_preempted, 0);
    for (int i = 0; i < 4; i++)
        call_check_alone(&b->calls[i]);
    bench_close(b);
}

/* Prompts that end at a border: each takes one block at once and needs a second with its first token. */
static void admission_keeps_the_next_blocks_free(void **state) {
    (void)state;
    for (size_t n_prompt = 120; n_prompt <= 128; n_prompt++) {
        for (int32_t n = 1; n <= 3; n++) {
            di_core_options o = small_options();
            o.n_blocks = 8;
            o.seqs_max = 8;
            o.batch_tokens_max = 2048;
            o.chunk_max = 128;
            bench *b = bench_open(&o);
            for (int i = 0; i < 8; i++) {
                call_make_drawn(&b->calls[i], n_prompt, 14, (uint64_t)i, n);
                call_start(b->core, &b->calls[i]);
            }
            core_run(b->core);
            assert_int_equal(core_stats(b->core).n_preempted, 0);
            call_check_alone(&b->calls[7]);
            bench_close(b);
        }
    }
}

/* One runs just below a border when a prompt asks for all that is left. */
static void prompt_does_not_take_the_block_that_a_runner_needs(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.n_blocks = 4;
    o.seqs_max = 3;
    o.context_max = 512;
    bench *b = bench_open(&o);
    call_make(&b->calls[0], 110, 60, 1);
    call_start(b->core, &b->calls[0]);
    steps(b->core, 8);
    call_make(&b->calls[1], 350, 5, 2); /* three blocks: exactly what is free */
    call_start(b->core, &b->calls[1]);
    core_run(b->core);
    assert_int_equal(core_stats(b->core).n_preempted, 0);
    call_check_alone(&b->calls[0]);
    call_check_alone(&b->calls[1]);
    bench_close(b);
}

/* Strangers with small requests arrive without end. One that lost its memory goes on before them: they don't eat up
 * every block that comes free. */
static void preempted_request_is_not_starved_by_newcomers(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.n_blocks = 3;
    o.context_max = 384;
    bench *b = bench_open(&o);
    for (int i = 0; i < 2; i++) {
        call_make(&b->calls[i], 90, 160, (uint64_t)i);
        b->calls[i].sub.caller = "regular";
        b->calls[i].sub.caller_len = 7;
        call_start(b->core, &b->calls[i]);
    }
    char names[10][16];
    int n = 0, n_steps = 0;
    while (!b->calls[0].samples[0].n_done || !b->calls[1].samples[0].n_done) {
        for (int i = 2; i < 12; i++) {
            if (n >= 10 && !b->calls[i].samples[0].n_done)
                continue;
            call_make(&b->calls[i], 10, 20, (uint64_t)n);
            snprintf(names[i - 2], sizeof names[0], "%d", n++);
            b->calls[i].sub.caller = names[i - 2];
            b->calls[i].sub.caller_len = strlen(names[i - 2]);
            call_start(b->core, &b->calls[i]);
        }
        di_core_step(b->core);
        assert_true(++n_steps < 1000);
    }
    assert_true(core_stats(b->core).n_preempted > 0);
    core_run(b->core);
    call_check_alone(&b->calls[0]);
    call_check_alone(&b->calls[1]);
    bench_close(b);
}

static void traffic_that_fits_is_never_preempted(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.n_blocks = 4 * 3; /* four at once of at most three blocks */
    o.has_prefix_cache = true;
    bench *b = bench_open(&o);
    uint64_t rng = 5;
    int n = 0;
    while (n < 200 || di_core_pending(b->core) > 0) {
        if (n < 200 && di_core_pending(b->core) < 10) {
            call *c = &b->calls[n % 12];
            if (n < 12 || c->samples[0].n_done) {
                call_make(c, di_test_random_range(&rng, 1, 300), di_test_random_range(&rng, 1, 80),
                          di_test_random(&rng) % 6);
                call_start(b->core, c);
                n++;
                continue;
            }
        }
        di_core_step(b->core);
    }
    core_run(b->core);
    assert_int_equal(core_stats(b->core).n_preempted, 0);
    assert_int_equal(core_stats(b->core).n_length, 200);
    bench_close(b);
}

/* ---- two engines ---------------------------------------------------------------------------------------------------
 */

static void *run_thread(void *arg) {
    bench *b = arg;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 8; i++) {
            call_make_drawn(&b->calls[i], 30 + 70 * i, 40, (uint64_t)(i + round % 2), i % 3 + 1);
            call_start(b->core, &b->calls[i]);
        }
        while (di_core_step(b->core)) {
        }
    }
    return NULL;
}

static void two_engines_in_two_threads_are_two_engines(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.has_prefix_cache = true;
    o.n_blocks = 12;
    bench *two[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        two[i] = bench_open(&o);
        assert_int_equal(pthread_create(&threads[i], NULL, run_thread, two[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 2; i++) {
        core_check_empty(two[i]->core);
        for (int k = 0; k < 8; k++)
            call_check_alone(&two[i]->calls[k]);
        bench_close(two[i]);
    }
}

/* ---- one request's memory ------------------------------------------------------------------------------------------
 */

static void huge_answers_take_what_the_context_holds(void **state) {
    (void)state;
    static const int64_t asked[] = {INT32_MAX, (int64_t)1 << 31, INT64_MAX, 0};
    di_core_options o = small_options();
    o.context_max = 300;
    o.n_blocks = 3;
    bench *b = bench_open(&o);
    for (size_t i = 0; i < DI_COUNT(asked); i++) {
        call *c = &b->calls[0];
        call_make(c, 20, asked[i], i);
        size_t before = mallinfo2().uordblks;
        call_start(b->core, c);
        if (!di_test_is_sanitized())
            assert_in_range(mallinfo2().uordblks - before, 0, 16 << 10); /* ids, log-probabilities: 300 of each */
        core_run(b->core);
        assert_int_equal(c->samples[0].finish, DI_FINISH_LENGTH);
        assert_int_equal(c->samples[0].n_tokens, 280);
    }
    assert_in_range(core_stats(b->core).blocks_used_max, 1, 3);
    bench_close(b);
}

/* ---- whose turn it is ----------------------------------------------------------------------------------------------
 */

static di_core_options one_at_a_time(void) {
    di_core_options o = small_options();
    o.seqs_max = 1;
    o.is_sync = true;
    return o;
}

static void start_as(bench *b, int i, const char *caller, int32_t priority) {
    call *c = &b->calls[i];
    call_make(c, 50, 10, (uint64_t)i);
    c->sub.caller = caller;
    c->sub.caller_len = strlen(caller);
    c->sub.priority = priority;
    call_start(b->core, c);
}

/* order[k]: the call that is to be the k-th to end */
static void check_order(const bench *b, const int *order, int n) {
    for (int k = 1; k < n; k++)
        assert_true(b->calls[order[k - 1]].samples[0].done_at < b->calls[order[k]].samples[0].done_at);
}

static void priorities_decide(void **state) {
    (void)state;
    di_core_options o = one_at_a_time();
    bench *b = bench_open(&o);
    static const int32_t priorities[] = {0, 3, -2, 0, -2, 7};
    for (int i = 0; i < 6; i++)
        start_as(b, i, "x", priorities[i]);
    core_run(b->core);
    check_order(b, (const int[]){2, 4, 0, 3, 1, 5}, 6);
    bench_close(b);
}

/* A long prompt that takes every row of each step makes way for what is more urgent, and only for that. */
static void urgent_prompt_overtakes_one_under_way(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.batch_tokens_max = o.chunk_max = 64;
    bench *b = bench_open(&o);
    call_make(&b->calls[0], 900, 3, 1);
    call_start(b->core, &b->calls[0]);
    steps(b->core, 2);
    start_as(b, 1, "x", 0);
    start_as(b, 2, "x", -1);
    core_run(b->core);
    for (int i = 0; i < 3; i++)
        call_check_alone(&b->calls[i]);
    assert_true(b->calls[2].samples[0].first_ns < b->calls[0].samples[0].first_ns);
    assert_true(b->calls[2].samples[0].last_ns < b->calls[0].samples[0].first_ns);
    assert_true(b->calls[1].samples[0].first_ns > b->calls[0].samples[0].first_ns);
    bench_close(b);
}

static void callers_take_turns(void **state) {
    (void)state;
    di_core_options o = one_at_a_time();
    bench *b = bench_open(&o);
    for (int i = 0; i < 6; i++)
        start_as(b, i, "many", 0);
    start_as(b, 6, "few", 0);
    start_as(b, 7, "few", 0);
    core_run(b->core);
    check_order(b, (const int[]){0, 6, 1, 7, 2, 3, 4, 5}, 8);
    bench_close(b);
}

static void full_queue_is_busy_and_says_so(void **state) {
    (void)state;
    di_core_options o = one_at_a_time();
    o.queue_max = 3;
    bench *b = bench_open(&o);
    for (int i = 0; i < 3; i++)
        start_as(b, i, "x", 0);
    call_make(&b->calls[3], 50, 4, 3);
    di_error err = {0};
    assert_int_equal(call_submit(b->core, &b->calls[3], &err), DI_ERR_BUSY);
    assert_contains(err.message, "3");
    di_core_step(b->core); /* one runs, there is room for one more but not for two samples */
    b->calls[3].sub.n = 2;
    assert_int_equal(call_submit(b->core, &b->calls[3], &err), DI_ERR_BUSY);
    b->calls[3].sub.n = 1;
    call_start(b->core, &b->calls[3]);
    assert_int_equal(core_stats(b->core).n_refused_busy, 2);
    core_run(b->core);
    assert_int_equal(core_stats(b->core).n_finished, 4);
    bench_close(b);
}

/* The deadline of calls[1] is over while it is queued, while it runs, and while its other samples wait for it. */
static void deadlines_end_requests_wherever_they_are(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 3; n++) {
        for (int n_steps = 0; n_steps < 8; n_steps++) {
            di_core_options o = small_options();
            o.seqs_max = n_steps % 2 ? 1 : 4;
            bench *b = bench_open(&o);
            call_make(&b->calls[0], 200, 30, 1);
            call_start(b->core, &b->calls[0]);
            call *c = &b->calls[1];
            call_make_drawn(c, 300, 100, 2, n);
            c->sub.deadline_ns = di_clock_ns() + 2000000;
            call_start(b->core, c);
            steps(b->core, n_steps);
            while (di_clock_ns() <= c->sub.deadline_ns) {
                struct timespec pause = {.tv_nsec = 200000};
                nanosleep(&pause, NULL);
            }
            core_run(b->core);
            for (int32_t j = 0; j < n; j++) {
                assert_int_equal(c->samples[j].finish, DI_FINISH_ERROR);
                assert_int_equal(c->samples[j].error.code, DI_ERR_CANCELLED);
            }
            assert_int_equal(core_stats(b->core).n_expired, n);
            assert_int_equal(core_stats(b->core).n_error, n);
            call_check_alone(&b->calls[0]);
            bench_close(b);
        }
    }
}

static void deadline_that_is_met_changes_nothing(void **state) {
    (void)state;
    di_core_options o = small_options();
    bench *b = bench_open(&o);
    call_make_drawn(&b->calls[0], 200, 30, 1, 2);
    b->calls[0].sub.deadline_ns = di_clock_ns() + (int64_t)3600 * 1000000000;
    call_start(b->core, &b->calls[0]);
    core_run(b->core);
    assert_int_equal(core_stats(b->core).n_expired, 0);
    call_check_alone(&b->calls[0]);
    bench_close(b);
}

/* ---- prefix cache --------------------------------------------------------------------------------------------------
 */

static void same_prompt_again_comes_from_the_cache(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.has_prefix_cache = true;
    bench *b = bench_open(&o);
    static const char *const salts[] = {"", "", "other", "other", ""};
    for (int i = 0; i < 5; i++) {
        call *c = &b->calls[i];
        call_make_drawn(c, 700, 40, 3, 1);
        c->sub.cache_salt = salts[i];
        c->sub.cache_salt_len = strlen(salts[i]);
        call_start(b->core, c);
        core_run(b->core);
        assert_int_equal(c->samples[0].n_cached, i == 0 || i == 2 ? 0 : 640);
        sample_check_same(&c->samples[0], &b->calls[0].samples[0]);
    }
    call_check_alone(&b->calls[0]);
    di_core_stats s = core_stats(b->core);
    assert_int_equal(s.cached_tokens, 3 * 640);
    assert_int_equal(s.prompt_tokens, 2 * 700 + 3 * 60);
    assert_int_equal(s.cache_hits, 3);
    bench_close(b);
}

/* One whose prompt is in the cache waits for memory: looking is not hitting. */
static void waiting_counts_no_hits(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.has_prefix_cache = true;
    o.n_blocks = 4;
    o.context_max = 512;
    bench *b = bench_open(&o);
    call_make(&b->calls[0], 260, 4, 1);
    call_start(b->core, &b->calls[0]);
    core_run(b->core);
    call_make(&b->calls[1], 200, 50, 2); /* leaves two blocks, both with the first prompt's */
    call_start(b->core, &b->calls[1]);
    steps(b->core, 5);
    call_make(&b->calls[2], 400, 4, 1);
    call_start(b->core, &b->calls[2]);
    core_run(b->core);
    di_core_stats s = core_stats(b->core);
    assert_int_equal(s.cache_queries, 3);
    assert_int_equal(s.cache_hits, 1);
    assert_int_equal(b->calls[2].samples[0].n_cached, 256);
    for (int i = 0; i < 3; i++)
        call_check_alone(&b->calls[i]);
    bench_close(b);
}

static void without_the_cache_every_prompt_is_run(void **state) {
    (void)state;
    di_core_options o = small_options();
    bench *b = bench_open(&o);
    for (int i = 0; i < 2; i++) {
        call_make(&b->calls[i], 700, 10, 3);
        call_start(b->core, &b->calls[i]);
        core_run(b->core);
        assert_int_equal(b->calls[i].samples[0].n_cached, 0);
    }
    assert_int_equal(core_stats(b->core).prompt_tokens, 1400);
    bench_close(b);
}

/* ---- times and counters --------------------------------------------------------------------------------------------
 */

static void times_are_monotonic(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.seqs_max = 2;
    o.n_blocks = 5;
    o.context_max = 400;
    bench *b = bench_open(&o);
    int64_t before_ns = di_clock_ns();
    for (int i = 0; i < 8; i++) {
        call_make_drawn(&b->calls[i], 20 + 30 * i, 60, (uint64_t)i, i % 2 + 1);
        call_start(b->core, &b->calls[i]);
    }
    core_run(b->core);
    int64_t after_ns = di_clock_ns();
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < b->calls[i].sub.n; j++) {
            const call_sample *s = &b->calls[i].samples[j];
            assert_true(before_ns <= s->submit_ns && s->submit_ns <= s->start_ns && s->start_ns <= s->first_ns);
            assert_true(s->first_ns <= s->last_ns && s->last_ns <= after_ns);
        }
    }
    di_core_stats s = core_stats(b->core);
    assert_int_equal(s.n_ttft, s.n_submitted);
    assert_true(s.ttft_max_ns > 0 && s.ttft_max_ns <= after_ns - before_ns);
    assert_true(s.ttft_sum_ns >= s.ttft_max_ns && s.queue_sum_ns >= 0 && s.queue_sum_ns <= s.ttft_sum_ns);
    assert_true(s.forward_ns >= 0 && s.sample_ns >= 0 && s.host_ns > 0 && s.wait_ns >= 0);
    assert_true(s.forward_ns + s.sample_ns <= after_ns - before_ns);
    bench_close(b);
}

/* Goals that nothing can meet: nothing stands still for them, and the counters say so. */
static void missed_goals_are_counted(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.ttft_goal_ns = o.tpot_goal_ns = 1;
    bench *b = bench_open(&o);
    for (int i = 0; i < 6; i++) {
        call_make(&b->calls[i], 20 + 40 * i, i ? 40 : 1, (uint64_t)i);
        call_start(b->core, &b->calls[i]);
        steps(b->core, 5);
    }
    core_run(b->core);
    di_core_stats s = core_stats(b->core);
    assert_int_equal(s.ttft_goal_missed, 6);
    assert_int_equal(s.tpot_goal_missed, 5); /* one has no second token */
    assert_true(s.ttft_gave_way > 0);
    assert_int_equal(s.tpot_gave_way, 0);
    for (int i = 0; i < 6; i++)
        call_check_alone(&b->calls[i]);
    bench_close(b);
}

/* Everything that ends or is turned away is in exactly one counter. */
static void counters_tell_how_everything_ended(void **state) {
    (void)state;
    di_core_options o = small_options();
    o.queue_max = 8;
    bench *b = bench_open(&o);
    b->m.nan_token = BAD_TOKEN;
    for (int i = 0; i < 5; i++) {
        call_make(&b->calls[i], 30, 12, (uint64_t)i);
        keep_clean(&b->calls[i]);
    }
    call *stop = &b->calls[0], *late = &b->calls[1], *broken = &b->calls[2], *gone = &b->calls[3];
    static const int32_t forced[] = {9, SIM_EOS};
    stop->sub.sampling.ignore_eos = false;
    stop->sub.forced_first = forced;
    stop->sub.n_forced_first = 2;
    late->sub.deadline_ns = 1;
    end_prompt_badly(broken);
    gone->abort_at = 5;
    for (int i = 0; i < 5; i++)
        call_start(b->core, &b->calls[i]);
    call *c = &b->calls[5];
    di_error err = {0};
    call_make(c, 10, 4, 5);
    c->sub.n = 4;
    assert_int_equal(call_submit(b->core, c, &err), DI_ERR_BUSY);
    c->sub.n = 1;
    c->prompt[0] = -7;
    assert_int_equal(call_submit(b->core, c, &err), DI_ERR_REQUEST);
    core_run(b->core);
    di_core_stats s = core_stats(b->core);
    assert_int_equal(s.n_submitted, 5);
    assert_int_equal(s.n_finished, 5);
    assert_int_equal(s.n_stop, 1);
    assert_int_equal(s.n_length, 1);
    assert_int_equal(s.n_abort, 1);
    assert_int_equal(s.n_error, 2);
    assert_int_equal(s.n_expired, 1);
    assert_int_equal(s.n_refused_busy, 1);
    assert_int_equal(s.n_refused_invalid, 1);
    /* The stop and the abort were seen one step late, and so was the row that failed. */
    assert_in_range(s.n_dropped, 2, 3);
    assert_int_equal(s.output_tokens, 2 + 5 + 12);
    assert_int_equal(s.finished_output_tokens, 2 + 5 + 12);
    assert_int_equal(s.finished_prompt_tokens, 5 * 30);
    bench_close(b);
}

DI_TEST_GROUP(core_faults, cmocka_unit_test(abort_between_chunks_frees_all),
              cmocka_unit_test(one_request_ends_for_its_own_fault),
              cmocka_unit_test(bad_requests_are_refused_and_counted),
              cmocka_unit_test(failing_forward_ends_only_who_is_in_it));
DI_TEST_GROUP(core_memory, cmocka_unit_test(full_memory_alone_preempts_nobody),
              cmocka_unit_test(admission_keeps_the_next_blocks_free),
              cmocka_unit_test(prompt_does_not_take_the_block_that_a_runner_needs),
              cmocka_unit_test(preempted_request_is_not_starved_by_newcomers),
              cmocka_unit_test(traffic_that_fits_is_never_preempted),
              cmocka_unit_test(two_engines_in_two_threads_are_two_engines),
              cmocka_unit_test(huge_answers_take_what_the_context_holds));
DI_TEST_GROUP(core_turns, cmocka_unit_test(priorities_decide), cmocka_unit_test(urgent_prompt_overtakes_one_under_way),
              cmocka_unit_test(waiting_counts_no_hits), cmocka_unit_test(callers_take_turns),
              cmocka_unit_test(full_queue_is_busy_and_says_so),
              cmocka_unit_test(deadlines_end_requests_wherever_they_are),
              cmocka_unit_test(deadline_that_is_met_changes_nothing),
              cmocka_unit_test(same_prompt_again_comes_from_the_cache),
              cmocka_unit_test(without_the_cache_every_prompt_is_run), cmocka_unit_test(times_are_monotonic),
              cmocka_unit_test(missed_goals_are_counted), cmocka_unit_test(counters_tell_how_everything_ended));
