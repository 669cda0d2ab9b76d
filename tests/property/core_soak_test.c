/* The engine's core over a long time and under pressure, on the model of core_sim.h.
 *
 * Thousands of requests, aborts at any moment: memory in use after them is what it was after the first ones, and every
 * block and slot is back. Memory so short that running requests lose theirs again and again: each sample is what it is
 * alone all the same. The long_ group does the same for a hundred thousand requests and ten thousand aborts. */
#include <malloc.h>
#include <unistd.h>

#include "core_rig.h"

/* ---- many requests -------------------------------------------------------------------------------------------------
 */

enum { LIVE_MAX = 24 };

/* What malloc keeps for a thread and counts as in use: 7 pieces of each of 64 sizes up to 1 KiB. */
enum { MALLOC_CACHE = 7 * 64 * 528 };

typedef struct live {
    uint64_t id; /* 0: free */
    int n_left;  /* DONE events to come */
} live;

typedef struct soak {
    sim m;
    di_core *core;
    uint64_t rng;
    live live[LIVE_MAX];
    int64_t n_started, n_aborted;
} soak;

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)err;
    live *l = user;
    assert_true(l->n_left > 0);
    if (event->kind == DI_CORE_DONE && --l->n_left == 0)
        l->id = 0;
    else if (event->kind == DI_CORE_DONE)
        assert_int_equal(l->id, gen->id);
    return DI_OK;
}

static void start_one(soak *k, live *l) {
    int32_t prompt[260];
    char caller[16], salt[8];
    uint64_t *rng = &k->rng;
    size_t n = (size_t)di_test_random_range(rng, 1, di_test_random(rng) % 8 ? 60 : 260), shared = n / 2;
    uint64_t stem = di_test_random(rng) % 4;
    for (size_t i = 0; i < n; i++)
        prompt[i] = (int32_t)((i < shared ? di_mix64(stem * 1000 + i) : di_test_random(rng)) % SIM_VOCAB);
    snprintf(caller, sizeof caller, "%lld", (long long)(k->n_started % 977)); /* most are seen once in a while */
    snprintf(salt, sizeof salt, "%d", (int)(di_test_random(rng) % 3));
    di_submission sub = {.ids = prompt,
                         .n_ids = n,
                         .n = di_test_random(rng) % 6 ? 1 : 3,
                         .priority = (int32_t)di_test_random_range(rng, -1, 1),
                         .caller = caller,
                         .caller_len = strlen(caller),
                         .cache_salt = salt,
                         .cache_salt_len = strlen(salt),
                         .callback = on_event,
                         .user = l};
    di_sampling_init(&sub.sampling);
    sub.sampling.max_tokens = di_test_random_range(rng, 1, di_test_random(rng) % 4 ? 12 : 200);
    sub.sampling.ignore_eos = di_test_random(rng) % 2;
    sub.sampling.n_logprobs = (int32_t)di_test_random_range(rng, -1, 2);
    sub.sampling.presence_penalty = di_test_random(rng) % 3 ? 0 : 0.5;
    sub.sampling.n_prompt_logprobs = di_test_random(rng) % 9 ? -1 : 0;
    di_error err = {0};
    l->n_left = sub.n;
    di_test_ok(di_core_submit(k->core, &sub, &l->id, &err), &err);
    k->n_started++;
}

static void soak_open(soak *k) {
    di_core_options o = {.seqs_max = 6,
                         .batch_tokens_max = 128,
                         .chunk_max = 50,
                         .context_max = 420,
                         .logits_max = 40,
                         .n_blocks = 7,
                         .n_snapshots = 5,
                         .has_prefix_cache = true};
    *k = (soak){.rng = 11};
    sim_open(&k->m, 1);
    k->core = sim_core(&k->m, &o);
}

static void soak_close(soak *k) {
    di_core_destroy(k->core);
    sim_close(&k->m);
}

/* Goes on until so many requests have begun, and then to the end of them all. */
static void soak_until(soak *k, int64_t n_requests, int abort_every) {
    while (k->n_started < n_requests || di_core_pending(k->core) > 0) {
        live *l = &k->live[di_test_random(&k->rng) % LIVE_MAX];
        if (!l->id && k->n_started < n_requests)
            start_one(k, l);
        else if (l->id && abort_every && di_test_random(&k->rng) % (uint64_t)abort_every == 0)
            k->n_aborted += di_core_abort(k->core, l->id);
        if (di_test_random(&k->rng) % 2)
            di_core_step(k->core);
    }
    core_run(k->core); /* and nothing is held */
    for (int i = 0; i < LIVE_MAX; i++)
        assert_int_equal(k->live[i].n_left, 0);
}

static int64_t resident_bytes(void) {
    char line[128], *resident;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f)); /* pages: of the program, resident, ... */
    fclose(f);
    assert_non_null(resident = strchr(line, ' '));
    return strtoll(resident, NULL, 10) * sysconf(_SC_PAGESIZE);
}

static void run_soak(int64_t n_requests) {
    soak k;
    soak_open(&k);
    soak_until(&k, n_requests / 5, 0);
    size_t heap = mallinfo2().uordblks;
    int64_t resident = resident_bytes();
    soak_until(&k, n_requests, 0);
    if (!di_test_is_sanitized()) { /* which counts otherwise, and keeps what was freed */
        assert_true(mallinfo2().uordblks <= heap + MALLOC_CACHE);
        assert_true(resident_bytes() <= resident + (2 << 20));
    }
    di_core_stats s = core_stats(k.core);
    assert_true(s.n_finished >= n_requests && s.n_preempted > 0 && s.n_forked > 0 && s.cache_evicted_blocks > 0);
    print_message("%lld samples, %lld preempted\n", (long long)s.n_finished, (long long)s.n_preempted);
    soak_close(&k);
}

static void run_aborts(int64_t n_aborts) {
    soak k;
    soak_open(&k);
    while (k.n_aborted < n_aborts)
        soak_until(&k, k.n_started + 200, 4);
    di_core_stats s = core_stats(k.core);
    assert_true(s.n_abort >= n_aborts && s.n_dropped > 0);
    /* All of it is there: one request takes every block. */
    call *c = malloc(sizeof *c);
    assert_non_null(c);
    call_make(c, 380, 40, 1);
    call_start(k.core, c);
    core_run(k.core);
    call_check_alone(c);
    free(c);
    print_message("%lld requests, %lld aborted\n", (long long)k.n_started, (long long)k.n_aborted);
    soak_close(&k);
}

static void memory_does_not_grow(void **state) {
    (void)state;
    run_soak(5000);
}
static void aborts_leave_nothing(void **state) {
    (void)state;
    run_aborts(1000);
}
static void memory_does_not_grow_over_a_hundred_thousand(void **state) {
    (void)state;
    run_soak(100000);
}
static void ten_thousand_aborts_leave_nothing(void **state) {
    (void)state;
    run_aborts(10000);
}

/* ---- pressure ------------------------------------------------------------------------------------------------------
 */

static int64_t n_preempted_in_all;

DI_PROPERTY(what_is_preempted_is_what_it_is_alone, 40) {
    enum { N = 7 };
    uint64_t rng = seed;
    di_core_options o = {.n_blocks = (int32_t)di_test_random_range(&rng, 4, 7),
                         .seqs_max = (int32_t)di_test_random_range(&rng, 2, 7),
                         .chunk_max = di_test_random_range(&rng, 1, 200),
                         .context_max = 512,
                         .has_prefix_cache = di_test_random(&rng) % 2,
                         .n_snapshots = (int32_t)di_test_random_range(&rng, 0, 4),
                         .is_sync = di_test_random(&rng) % 3 == 0};
    o.batch_tokens_max = di_test_random_range(&rng, o.seqs_max, 200);
    o.logits_max = di_test_random_range(&rng, o.seqs_max, 60);
    sim m;
    sim_open(&m, (int)di_test_random_range(&rng, 1, 2));
    di_core *core = sim_core(&m, &o);
    call *calls = calloc(N, sizeof *calls);
    assert_non_null(calls);
    int n = 0;
    while (n < N || di_core_pending(core) > 0) {
        if (n < N && di_test_random(&rng) % 8 == 0) {
            call *c = &calls[n++];
            call_make_drawn(c, di_test_random_range(&rng, 1, 110), di_test_random_range(&rng, 60, 380),
                            di_test_random(&rng) % 4, di_test_random(&rng) % 4 ? 1 : 2);
            c->sub.priority = (int32_t)di_test_random_range(&rng, 0, 1);
            c->sub.sampling.n_prompt_logprobs = di_test_random(&rng) % 3 ? -1 : 1;
            c->sub.sampling.frequency_penalty = di_test_random(&rng) % 3 ? 0 : 0.3;
            call_start(core, c);
        }
        di_core_step(core);
    }
    core_run(core);
    for (int i = 0; i < N; i++)
        call_check_alone(&calls[i]);
    int64_t n_preempted = 0;
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < calls[i].sub.n; j++)
            n_preempted += calls[i].samples[j].n_preempted;
    }
    assert_int_equal(n_preempted, core_stats(core).n_preempted);
    n_preempted_in_all += n_preempted;
    di_core_destroy(core);
    sim_close(&m);
    free(calls);
}

static void preemption_did_bite(void **state) {
    (void)state;
    assert_true(n_preempted_in_all > 40);
    print_message("%lld preemptions\n", (long long)n_preempted_in_all);
}

DI_TEST_GROUP(core_soak, cmocka_unit_test(memory_does_not_grow), cmocka_unit_test(aborts_leave_nothing));
DI_TEST_GROUP(core_pressure, cmocka_unit_test(what_is_preempted_is_what_it_is_alone),
              cmocka_unit_test(preemption_did_bite));
DI_TEST_GROUP(long_core_soak, cmocka_unit_test(memory_does_not_grow_over_a_hundred_thousand),
              cmocka_unit_test(ten_thousand_aborts_leave_nothing));
