/* The service of compiled grammars: one compilation for all who ask, what is kept and for how long, who waits for whom,
 * callbacks, cancelling, the end. Compiling is a function of the tests, which counts, waits for a gate, takes its time
 * or fails as the text says; the clock is the tests' own, so that nothing here depends on time. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "engine/grammar/service_internal.h"
#include "harness.h"

enum { SECOND = 1000000000, SLICE = SECOND / 4 };

/* ---- rig ---- */

/* Texts of the rig's compiler: "gate..." stands still until the gate opens, "slow..." takes 5 s of the clock, "bad..."
 * fails for good, "memory..." for want of memory; others are regular expressions. */
typedef struct rig {
    di_grammar_service *s;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* lock: mutex, all below */
    int n_compiled, n_at_gate;
    bool is_open;
    int64_t now_ns;
    int64_t timeout_ns; /* of the last compilation */
    bool has_signals;   /* the thread that compiled last takes SIGTERM, or doesn't take SIGSEGV */
    char order[256];    /* first characters behind the '_' of texts, as they were finished */
} rig;

static bool begins(const di_grammar_spec *spec, const char *word) {
    return spec->len >= strlen(word) && memcmp(spec->text, word, strlen(word)) == 0;
}

static di_status rig_compile(void *ctx, di_grammar **out, const di_grammar_spec *spec, const di_grammar_limits *limits,
                             di_error *err) {
    rig *r = ctx;
    di_status st = DI_OK;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    pthread_mutex_lock(&r->mutex);
    r->has_signals = !sigismember(&blocked, SIGTERM) || sigismember(&blocked, SIGSEGV);
    r->n_compiled++;
    r->timeout_ns = limits->timeout_ns;
    if (begins(spec, "gate")) {
        r->n_at_gate++;
        pthread_cond_broadcast(&r->changed);
        while (!r->is_open)
            pthread_cond_wait(&r->changed, &r->mutex);
    }
    if (begins(spec, "slow")) {
        int64_t limit_ns = limits->timeout_ns ? limits->timeout_ns : 20 * (int64_t)SECOND;
        r->now_ns += limit_ns < 5 * (int64_t)SECOND ? limit_ns : 5 * (int64_t)SECOND;
        if (limit_ns < 5 * (int64_t)SECOND)
            st = di_fail(err, DI_ERR_RANGE, "too long");
    }
    if (begins(spec, "bad"))
        st = di_fail(err, DI_ERR_REQUEST, "bad at %d", r->n_compiled);
    if (begins(spec, "memory"))
        st = di_fail(err, DI_ERR_MEMORY, "no memory");
    const char *mark = spec->len ? memchr(spec->text, '_', spec->len - 1) : NULL;
    if (mark && !st)
        r->order[strlen(r->order)] = mark[1];
    pthread_mutex_unlock(&r->mutex);
    return st ? st : di_grammar_compile(out, spec, NULL, err);
}

static int64_t rig_clock(void *ctx) {
    rig *r = ctx;
    pthread_mutex_lock(&r->mutex);
    int64_t now_ns = r->now_ns;
    pthread_mutex_unlock(&r->mutex);
    return now_ns;
}

typedef di_status compile_fn(void *, di_grammar **, const di_grammar_spec *, const di_grammar_limits *, di_error *);

static rig *rig_open_with(const di_grammar_service_options *options, compile_fn *compile) {
    rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->changed, NULL);
    di_grammar_service_hooks hooks = {.compile = compile, .clock_ns = rig_clock, .ctx = r, .slice_ns = SLICE};
    di_error err;
    di_test_ok(di_grammar_service_make(&r->s, options, &hooks, &err), &err);
    return r;
}

static rig *rig_open(int n_threads, size_t cache_bytes) {
    di_grammar_service_options options = {.n_threads = n_threads, .cache_bytes = cache_bytes};
    return rig_open_with(&options, rig_compile);
}

static void rig_gate(rig *r, bool is_open) {
    pthread_mutex_lock(&r->mutex);
    r->is_open = is_open;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->mutex);
}

static void rig_wait_at_gate(rig *r, int n) {
    pthread_mutex_lock(&r->mutex);
    while (r->n_at_gate < n)
        pthread_cond_wait(&r->changed, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
}

static int rig_compiled(rig *r) {
    pthread_mutex_lock(&r->mutex);
    int n = r->n_compiled;
    pthread_mutex_unlock(&r->mutex);
    return n;
}

static void rig_pass_time(rig *r, int64_t ns) {
    pthread_mutex_lock(&r->mutex);
    r->now_ns += ns;
    pthread_mutex_unlock(&r->mutex);
}

static void rig_free(rig *r) {
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->mutex);
    free(r);
}

static void rig_close(rig *r) {
    di_grammar_service_destroy(r->s);
    rig_free(r);
}

static di_grammar_spec regex(const char *text) {
    return (di_grammar_spec){.kind = DI_GRAMMAR_REGEX, .text = text, .len = strlen(text)};
}

static di_status compile(rig *r, const char *text, di_grammar **out, di_error *err) {
    di_grammar_spec spec = regex(text);
    return di_grammar_service_compile(r->s, &spec, out, err);
}

static di_grammar *compile_ok(rig *r, const char *text) {
    di_grammar *g = NULL;
    di_error err;
    di_test_ok(compile(r, text, &g, &err), &err);
    return g;
}

static di_grammar_job *start(rig *r, const char *text, void (*done)(void *), void *user) {
    di_grammar_spec spec = regex(text);
    di_grammar_job *j = NULL;
    di_error err;
    di_test_ok(di_grammar_job_start(r->s, &spec, done, user, &j, &err), &err);
    return j;
}

static void take_ok(di_grammar_job *j) {
    di_grammar *g = NULL;
    di_error err;
    di_test_ok(di_grammar_job_take(j, &g, &err), &err);
    assert_non_null(g);
    di_grammar_release(g);
}

static di_grammar_service_stats stats_of(rig *r) {
    di_grammar_service_stats stats;
    di_grammar_service_stats_get(r->s, &stats);
    return stats;
}

static void assert_accepts(di_grammar *g, const char *text, bool expected) {
    bool accepts;
    di_error err;
    di_test_ok(di_grammar_accepts(g, text, strlen(text), &accepts, &err), &err);
    assert_int_equal(accepts, expected);
}

/* ---- the cache ---- */

static void the_same_text_is_compiled_once(void **state) {
    (void)state;
    rig *r = rig_open(2, 0);
    char text[] = "a+b";
    di_grammar *first = compile_ok(r, text);
    text[0] = 'x'; /* the text was borrowed for the call */
    di_grammar *other = compile_ok(r, text);
    di_grammar *again = compile_ok(r, "a+b");
    assert_ptr_equal(first, again);
    assert_ptr_not_equal(first, other);
    assert_int_equal(rig_compiled(r), 2);
    di_grammar_service_stats stats = stats_of(r);
    assert_int_equal(stats.n_hits, 1);
    assert_int_equal(stats.n_misses, 2);
    assert_int_equal(stats.n_entries, 2);
    assert_int_equal(stats.n_failures, 0);
    assert_true(stats.bytes > di_grammar_bytes(first) + di_grammar_bytes(other)); /* and the texts */
    assert_accepts(again, "aab", true);
    assert_accepts(again, "xxb", false);
    assert_accepts(other, "xxb", true);
    di_grammar_release(first);
    di_grammar_release(other);
    rig_close(r);
    assert_accepts(again, "aab", true); /* a reference outlives the service */
    di_grammar_release(again);
}

static void kind_and_laxness_tell_texts_apart(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    di_grammar_spec specs[] = {
        {.kind = DI_GRAMMAR_REGEX, .text = "[\"a\"]", .len = 5},
        {.kind = DI_GRAMMAR_CHOICE, .text = "[\"a\"]", .len = 5},
        {.kind = DI_GRAMMAR_SCHEMA, .text = "{}", .len = 2},
        {.kind = DI_GRAMMAR_SCHEMA, .text = "{}", .len = 2, .is_lax = true},
        {.kind = DI_GRAMMAR_OBJECT},
        {.kind = DI_GRAMMAR_REGEX, .text = "a\0b", .len = 3}, /* texts are compared behind a zero, too */
        {.kind = DI_GRAMMAR_REGEX, .text = "a\0c", .len = 3},
        {.kind = DI_GRAMMAR_REGEX, .text = "", .len = 0},
    };
    di_grammar *grammars[DI_COUNT(specs)];
    di_error err;
    for (size_t i = 0; i < DI_COUNT(specs); i++)
        di_test_ok(di_grammar_service_compile(r->s, &specs[i], &grammars[i], &err), &err);
    assert_int_equal(rig_compiled(r), DI_COUNT(specs));
    for (size_t i = 0; i < DI_COUNT(specs); i++) {
        di_grammar *g = NULL;
        di_test_ok(di_grammar_service_compile(r->s, &specs[i], &g, &err), &err);
        assert_ptr_equal(g, grammars[i]);
        di_grammar_release(g);
        di_grammar_release(grammars[i]);
    }
    assert_int_equal(rig_compiled(r), DI_COUNT(specs));
    rig_close(r);
}

static size_t bytes_of_one(void) {
    rig *r = rig_open(1, 0);
    di_grammar_release(compile_ok(r, "a{10}0"));
    size_t n = stats_of(r).bytes;
    rig_close(r);
    return n;
}

static void the_least_recently_used_leave(void **state) {
    (void)state;
    static const char *const texts[] = {"a{10}0", "a{10}1", "a{10}2", "a{10}3"}; /* alike but for a byte */
    size_t one = bytes_of_one();
    rig *r = rig_open(1, 3 * one + one / 2);
    for (int i = 0; i < 3; i++)
        di_grammar_release(compile_ok(r, texts[i]));
    assert_int_equal(stats_of(r).n_entries, 3);
    di_grammar *kept = compile_ok(r, texts[0]);
    di_grammar_release(compile_ok(r, texts[3])); /* takes the place of 1 */
    di_grammar_service_stats stats = stats_of(r);
    assert_int_equal(stats.n_entries, 3);
    assert_int_equal(stats.n_evicted, 1);
    assert_true(stats.bytes <= 3 * one + one / 2);
    assert_int_equal(rig_compiled(r), 4);
    di_grammar_release(compile_ok(r, texts[0]));
    di_grammar_release(compile_ok(r, texts[2]));
    di_grammar_release(compile_ok(r, texts[3]));
    assert_int_equal(rig_compiled(r), 4);
    di_grammar_release(compile_ok(r, texts[1])); /* takes the place of 0, which is in use */
    assert_int_equal(rig_compiled(r), 5);
    assert_accepts(kept, "aaaaaaaaaa0", true);
    di_grammar_release(kept);
    rig_close(r);
}

static void match_letters(di_grammar *g, size_t n) {
    char text[2000];
    memset(text, 'a', sizeof text);
    bool accepts;
    di_error err;
    di_test_ok(di_grammar_accepts(g, text, n, &accepts, &err), &err);
    assert_true(accepts);
}

static void what_is_learnt_counts(void **state) {
    (void)state;
    enum { OTHERS = 8 };
    size_t cache_bytes = 2 * (1 + OTHERS) * bytes_of_one();
    rig *r = rig_open(1, cache_bytes);
    di_grammar *g = compile_ok(r, "(a|b){1,2000}");
    for (int i = 0; i < OTHERS; i++)
        di_grammar_release(compile_ok(r, (char[]){(char)('c' + i), '\0'}));
    size_t before = di_grammar_bytes(g), all_before = stats_of(r).bytes;
    match_letters(g, 100);
    size_t after = di_grammar_bytes(g);
    assert_true(after > before && after < cache_bytes / 2);
    di_grammar_release(compile_ok(r, "c"));
    assert_int_equal(stats_of(r).n_entries, 1 + OTHERS);
    assert_int_equal(stats_of(r).bytes, all_before + after - before);
    match_letters(g, 2000);
    assert_true(di_grammar_bytes(g) > cache_bytes);
    di_grammar_release(compile_ok(r, "c"));
    assert_int_equal(stats_of(r).n_entries, OTHERS); /* it leaves, and alone */
    assert_true(stats_of(r).bytes < cache_bytes);
    di_grammar_release(g);
    rig_close(r);
}

static void a_grammar_larger_than_the_cache_drives_nobody_out(void **state) {
    (void)state;
    rig *r = rig_open(1, 64 << 10);
    di_grammar_release(compile_ok(r, "a"));
    size_t len = 100000;
    char *text = malloc(len + 1);
    assert_non_null(text);
    memset(text, 'x', len);
    text[len] = '\0';
    di_grammar_release(compile_ok(r, text));
    assert_int_equal(stats_of(r).n_entries, 1);
    di_grammar_release(compile_ok(r, text));
    di_grammar_release(compile_ok(r, "a"));
    assert_int_equal(rig_compiled(r), 3);
    free(text);
    rig_close(r);
}

static void without_a_cache_failures_are_kept_all_the_same(void **state) {
    (void)state;
    di_grammar_service_options options = {.is_uncached = true};
    rig *r = rig_open_with(&options, rig_compile);
    di_grammar_release(compile_ok(r, "a"));
    di_grammar_release(compile_ok(r, "a"));
    assert_int_equal(rig_compiled(r), 2);
    assert_int_equal(stats_of(r).n_entries, 0);
    assert_int_equal(stats_of(r).bytes, 0);
    di_error err;
    di_grammar *g = NULL;
    assert_int_equal(compile(r, "bad", &g, &err), DI_ERR_REQUEST);
    assert_int_equal(compile(r, "bad", &g, &err), DI_ERR_REQUEST);
    assert_int_equal(rig_compiled(r), 3);
    rig_close(r);
}

/* ---- failures ---- */

static void failures_are_kept_for_a_while(void **state) {
    (void)state;
    rig *r = rig_open(2, 0);
    di_grammar *g = NULL;
    di_error err, again;
    assert_int_equal(compile(r, "bad", &g, &err), DI_ERR_REQUEST);
    assert_null(g);
    assert_string_equal(err.message, "bad at 1");
    rig_pass_time(r, (DI_GRAMMAR_FAILURE_SECONDS - 1) * (int64_t)SECOND);
    assert_int_equal(compile(r, "bad", &g, &again), DI_ERR_REQUEST);
    assert_int_equal(again.code, DI_ERR_REQUEST);
    assert_string_equal(again.message, "bad at 1");
    assert_int_equal(compile(r, "bad", &g, NULL), DI_ERR_REQUEST);
    rig_pass_time(r, SECOND);
    assert_int_equal(compile(r, "bad", &g, &again), DI_ERR_REQUEST);
    assert_string_equal(again.message, "bad at 2");
    di_grammar_service_stats stats = stats_of(r);
    assert_int_equal(stats.n_failures, 2);
    assert_int_equal(stats.n_hits, 2);
    assert_int_equal(stats.n_failed, 1);
    /* Want of memory passes. */
    assert_int_equal(compile(r, "memory", &g, &err), DI_ERR_MEMORY);
    assert_int_equal(compile(r, "memory", &g, &err), DI_ERR_MEMORY);
    assert_int_equal(rig_compiled(r), 4);
    assert_int_equal(stats_of(r).n_failed, 1);
    rig_close(r);
}

static void few_failures_are_kept(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    di_grammar *g = NULL;
    di_error err;
    char text[32];
    for (int i = 0; i <= DI_GRAMMAR_FAILURES_MAX; i++) {
        snprintf(text, sizeof text, "bad %d", i);
        assert_int_equal(compile(r, text, &g, &err), DI_ERR_REQUEST);
    }
    assert_int_equal(stats_of(r).n_failed, DI_GRAMMAR_FAILURES_MAX);
    assert_int_equal(compile(r, "bad 1", &g, &err), DI_ERR_REQUEST);
    assert_int_equal(rig_compiled(r), DI_GRAMMAR_FAILURES_MAX + 1);
    assert_int_equal(compile(r, "bad 0", &g, &err), DI_ERR_REQUEST);
    assert_int_equal(rig_compiled(r), DI_GRAMMAR_FAILURES_MAX + 2);
    /* Those that are too old make room when another comes. */
    rig_pass_time(r, DI_GRAMMAR_FAILURE_SECONDS * (int64_t)SECOND);
    assert_int_equal(compile(r, "bad new", &g, &err), DI_ERR_REQUEST);
    assert_int_equal(stats_of(r).n_failed, 1);
    /* Nor do they take much memory: 16 MiB. */
    size_t len = (size_t)6 << 20;
    char *large = malloc(len + 1);
    assert_non_null(large);
    memset(large, 'x', len);
    memcpy(large, "bad", 3);
    large[len] = '\0';
    for (int i = 0; i < 3; i++) {
        large[3] = (char)('0' + i);
        assert_int_equal(compile(r, large, &g, &err), DI_ERR_REQUEST);
    }
    assert_int_equal(stats_of(r).n_failed, 2);
    free(large);
    rig_close(r);
}

/* ---- who waits for whom ---- */

static void all_who_ask_at_once_get_one_compilation(void **state) {
    (void)state;
    enum { N = 20 };
    rig *r = rig_open(2, 0);
    di_grammar_job *jobs[N];
    for (int i = 0; i < N; i++)
        jobs[i] = start(r, "gate", NULL, NULL);
    rig_wait_at_gate(r, 1);
    for (int i = 0; i < N; i++)
        assert_false(di_grammar_job_is_done(jobs[i]));
    rig_gate(r, true);
    di_grammar *first = NULL;
    di_error err;
    di_test_ok(di_grammar_job_take(jobs[0], &first, &err), &err);
    for (int i = 1; i < N; i++) {
        di_grammar *g = NULL;
        di_test_ok(di_grammar_job_take(jobs[i], &g, &err), &err);
        assert_ptr_equal(g, first);
        di_grammar_release(g);
    }
    assert_int_equal(rig_compiled(r), 1);
    assert_int_equal(stats_of(r).n_misses, 1);
    assert_int_equal(stats_of(r).n_joined, N - 1);
    di_grammar_release(first);
    rig_close(r);
}

static void what_takes_long_makes_room(void **state) {
    (void)state;
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        rig *r = rig_open(n_threads, 0);
        di_grammar_release(compile_ok(r, "slow"));
        assert_int_equal(rig_compiled(r), 2);
        assert_int_equal(stats_of(r).n_slow, 1);
        assert_int_equal(r->timeout_ns, 0); /* the service's own limit: the default */
        di_grammar_release(compile_ok(r, "slow"));
        assert_int_equal(rig_compiled(r), 2);
        rig_close(r);
    }
}

static void a_single_thread_puts_first_attempts_first(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    di_grammar_job *jobs[5] = {start(r, "gate", NULL, NULL)};
    rig_wait_at_gate(r, 1);
    jobs[1] = start(r, "slow_1", NULL, NULL);
    jobs[2] = start(r, "_2", NULL, NULL);
    jobs[3] = start(r, "slow_3", NULL, NULL);
    jobs[4] = start(r, "_4", NULL, NULL);
    rig_gate(r, true);
    for (int i = 0; i < 5; i++)
        take_ok(jobs[i]);
    assert_string_equal(r->order, "2413");
    rig_close(r);
}

/* Second attempts that stand still hold all threads but one. */
static di_status rig_compile_stuck(void *ctx, di_grammar **out, const di_grammar_spec *spec,
                                   const di_grammar_limits *limits, di_error *err) {
    rig *r = ctx;
    if (begins(spec, "stuck")) {
        if (limits->timeout_ns == SLICE) {
            rig_pass_time(r, SLICE);
            return di_fail(err, DI_ERR_RANGE, "too long");
        }
        di_grammar_spec gate = regex("gate");
        return rig_compile(ctx, out, &gate, limits, err);
    }
    return rig_compile(ctx, out, spec, limits, err);
}

static void hostile_grammars_keep_no_other_waiting(void **state) {
    (void)state;
    di_grammar_service_options options = {.n_threads = 3};
    rig *r = rig_open_with(&options, rig_compile_stuck);
    di_grammar_job *hostile[10];
    char text[32];
    for (int i = 0; i < 10; i++) {
        snprintf(text, sizeof text, "stuck %d", i);
        hostile[i] = start(r, text, NULL, NULL);
    }
    rig_wait_at_gate(r, 2);
    for (int i = 0; i < 100; i++) {
        snprintf(text, sizeof text, "a%d", i);
        di_grammar_release(compile_ok(r, text));
    }
    pthread_mutex_lock(&r->mutex);
    assert_int_equal(r->n_at_gate, 2);
    pthread_mutex_unlock(&r->mutex);
    rig_gate(r, true);
    for (int i = 0; i < 10; i++)
        take_ok(hostile[i]);
    rig_close(r);
}

static void a_short_limit_has_one_attempt(void **state) {
    (void)state;
    di_grammar_service_options options = {.limits.timeout_ns = 2 * SLICE};
    rig *r = rig_open_with(&options, rig_compile);
    di_error err;
    di_grammar *g = NULL;
    assert_int_equal(compile(r, "slow", &g, &err), DI_ERR_RANGE);
    assert_int_equal(rig_compiled(r), 1);
    assert_int_equal(r->timeout_ns, 2 * SLICE);
    rig_close(r);
}

static void threads_take_no_signals_but_their_own(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    di_grammar_release(compile_ok(r, "a"));
    assert_false(r->has_signals);
    sigset_t mine;
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    assert_false(sigismember(&mine, SIGTERM));
    rig_close(r);
}

/* ---- jobs ---- */

typedef struct call {
    pthread_mutex_t mutex;
    pthread_cond_t called;
    int n_calls;
    pthread_t thread;
    di_grammar_job *job; /* to take or cancel from the callback */
    bool is_taking, is_cancelling;
    di_status status;
} call;

static void call_init(call *c) {
    *c = (call){.n_calls = 0};
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->called, NULL);
}

static void call_done(void *user) {
    call *c = user;
    pthread_mutex_lock(&c->mutex);
    if (c->is_taking) {
        di_grammar *g = NULL;
        c->status = di_grammar_job_take(c->job, &g, NULL);
        di_grammar_release(g);
    }
    if (c->is_cancelling)
        di_grammar_job_cancel(c->job);
    c->n_calls++;
    c->thread = pthread_self();
    pthread_cond_signal(&c->called);
    pthread_mutex_unlock(&c->mutex);
}

static void call_wait(call *c) {
    pthread_mutex_lock(&c->mutex);
    while (c->n_calls == 0)
        pthread_cond_wait(&c->called, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

static void call_deinit(call *c) {
    pthread_cond_destroy(&c->called);
    pthread_mutex_destroy(&c->mutex);
}

static void a_job_calls_back_once(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    call c;
    call_init(&c);
    di_grammar_job *j = start(r, "a", call_done, &c);
    call_wait(&c);
    assert_true(di_grammar_job_is_done(j));
    assert_false(pthread_equal(c.thread, pthread_self()));
    take_ok(j);
    assert_int_equal(c.n_calls, 1);
    /* What is known is told at once. */
    j = start(r, "a", call_done, &c);
    assert_int_equal(c.n_calls, 2);
    assert_true(pthread_equal(c.thread, pthread_self()));
    assert_true(di_grammar_job_is_done(j));
    take_ok(j);
    j = start(r, "bad", call_done, &c);
    di_grammar *g = NULL;
    di_error err;
    assert_int_equal(di_grammar_job_take(j, &g, &err), DI_ERR_REQUEST);
    assert_int_equal(c.n_calls, 3); /* it has returned when the job is taken */
    assert_null(g);
    call_deinit(&c);
    rig_close(r);
}

static void a_callback_may_take_or_cancel(void **state) {
    (void)state;
    for (int is_known = 0; is_known < 2; is_known++) {
        for (int is_taking = 0; is_taking < 2; is_taking++) {
            rig *r = rig_open(1, 0);
            call c;
            call_init(&c);
            c.is_taking = is_taking;
            c.is_cancelling = !is_taking;
            if (is_known)
                di_grammar_release(compile_ok(r, "a"));
            di_grammar_spec spec = regex("a");
            di_error err;
            if (!is_known)
                pthread_mutex_lock(&c.mutex); /* so that c.job is set when it is read */
            di_test_ok(di_grammar_job_start(r->s, &spec, call_done, &c, &c.job, &err), &err);
            if (!is_known)
                pthread_mutex_unlock(&c.mutex);
            call_wait(&c);
            assert_int_equal(c.status, DI_OK);
            rig_close(r);
            assert_int_equal(c.n_calls, 1);
            call_deinit(&c);
        }
    }
}

static void a_cancelled_job_is_forgotten(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    call c;
    call_init(&c);
    di_grammar_job_cancel(NULL);
    di_grammar_job *running = start(r, "gate", call_done, &c), *other = start(r, "gate", NULL, NULL);
    rig_wait_at_gate(r, 1);
    di_grammar_job *queued = start(r, "a", call_done, &c), *shared = start(r, "b", call_done, &c);
    di_grammar_job *sharing = start(r, "b", NULL, NULL), *last = start(r, "c", NULL, NULL);
    assert_int_equal(stats_of(r).n_waiting, 3);
    di_grammar_job_cancel(queued);
    assert_int_equal(stats_of(r).n_waiting, 2);
    di_grammar_job_cancel(shared);
    di_grammar_job_cancel(running);
    rig_gate(r, true);
    take_ok(other);
    take_ok(sharing);
    take_ok(last);
    assert_int_equal(c.n_calls, 0);
    assert_int_equal(rig_compiled(r), 3); /* not "a" */
    di_grammar_job_cancel(start(r, "c", NULL, NULL));
    /* Nobody waits: it goes on for the cache, but not into a second attempt. */
    rig_gate(r, false);
    di_grammar_job *alone = start(r, "gate 2", NULL, NULL);
    rig_wait_at_gate(r, 2);
    di_grammar_job_cancel(alone);
    rig_gate(r, true);
    di_grammar_release(compile_ok(r, "gate 2"));
    assert_int_equal(rig_compiled(r), 4);
    call_deinit(&c);
    rig_close(r);
}

/* The first attempt at a text ends late, while nobody waits for it. */
static di_status rig_compile_late(void *ctx, di_grammar **out, const di_grammar_spec *spec,
                                  const di_grammar_limits *limits, di_error *err) {
    rig *r = ctx;
    di_status st = rig_compile(ctx, out, spec, limits, err);
    if (st || limits->timeout_ns != SLICE || !begins(spec, "gate"))
        return st;
    di_grammar_release(*out);
    rig_pass_time(r, SLICE);
    return di_fail(err, DI_ERR_RANGE, "too long");
}

static void nobody_gets_no_second_attempt(void **state) {
    (void)state;
    di_grammar_service_options options = {.n_threads = 1};
    rig *r = rig_open_with(&options, rig_compile_late);
    di_grammar_job *j = start(r, "gate", NULL, NULL);
    rig_wait_at_gate(r, 1);
    di_grammar_job_cancel(j);
    rig_gate(r, true);
    di_grammar_release(compile_ok(r, "a"));
    assert_int_equal(rig_compiled(r), 2);
    di_grammar_release(compile_ok(r, "gate")); /* two attempts */
    assert_int_equal(rig_compiled(r), 4);
    assert_int_equal(stats_of(r).n_slow, 1);
    rig_close(r);
}

/* ---- the end ---- */

static void *destroy_main(void *arg) {
    rig *r = arg;
    di_grammar_service_destroy(r->s);
    return NULL;
}

static void what_has_not_begun_is_cancelled_at_the_end(void **state) {
    (void)state;
    rig *r = rig_open(1, 0);
    call c, taking;
    call_init(&c);
    call_init(&taking);
    taking.is_taking = true;
    di_grammar_job *running = start(r, "gate", NULL, NULL);
    rig_wait_at_gate(r, 1);
    di_grammar_job *queued = start(r, "a", call_done, &c), *other = start(r, "b", NULL, NULL);
    taking.job = start(r, "c", call_done, &taking);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, destroy_main, r), 0);
    call_wait(&c); /* while the compilation that runs still does */
    call_wait(&taking);
    assert_int_equal(taking.status, DI_ERR_CANCELLED);
    rig_gate(r, true);
    pthread_join(thread, NULL);
    di_grammar *g = NULL;
    di_error err;
    assert_int_equal(di_grammar_job_take(queued, &g, &err), DI_ERR_CANCELLED);
    assert_int_equal(err.code, DI_ERR_CANCELLED);
    assert_true(di_grammar_job_is_done(other));
    di_grammar_job_cancel(other);
    take_ok(running); /* the last one, with which the service goes */
    call_deinit(&c);
    call_deinit(&taking);
    rig_free(r);
    di_grammar_service_destroy(NULL);
}

static void bad_options_are_refused(void **state) {
    (void)state;
    di_grammar_service_options options = {.n_threads = -1};
    di_grammar_service *s = NULL;
    di_error err;
    assert_int_equal(di_grammar_service_create(&s, &options, &err), DI_ERR_ARG);
    assert_contains(err.message, "-1 threads");
    assert_null(s);
}

/* ---- many threads, the real compiler ---- */

enum { CALLERS = 6, ROUNDS = 120, TEXTS = 12 };

typedef struct caller {
    di_grammar_service *s;
    uint64_t rng;
    bool is_right;
} caller;

static void count_up(void *user) {
    atomic_fetch_add((_Atomic int *)user, 1);
}

static void *caller_main(void *arg) {
    caller *c = arg;
    c->is_right = true;
    for (int i = 0; i < ROUNDS && c->is_right; i++) {
        int k = (int)di_test_random_range(&c->rng, 0, TEXTS - 1);
        bool is_bad = k % 4 == 3;
        char text[32];
        snprintf(text, sizeof text, is_bad ? "(%d" : "(a|b){%d}", k + 1);
        di_grammar_spec spec = regex(text);
        _Atomic int n_calls = 0;
        di_grammar_job *j = NULL;
        di_grammar *g = NULL;
        di_error err;
        if (di_grammar_job_start(c->s, &spec, i % 2 ? count_up : NULL, &n_calls, &j, &err)) {
            c->is_right = false;
            break;
        }
        if (di_test_random_range(&c->rng, 0, 3) == 0) {
            di_grammar_job_cancel(j);
            c->is_right = atomic_load(&n_calls) <= 1;
            continue;
        }
        di_status st = di_grammar_job_take(j, &g, &err);
        c->is_right = is_bad ? st == DI_ERR_REQUEST : st == DI_OK;
        c->is_right = c->is_right && atomic_load(&n_calls) == i % 2;
        bool accepts = false;
        if (g) {
            st = di_grammar_accepts(g, "abababababababab", (size_t)k + 1, &accepts, &err);
            c->is_right = c->is_right && !st && accepts;
            st = di_grammar_accepts(g, "abababababababab", (size_t)k + 2, &accepts, &err);
            c->is_right = c->is_right && !st && !accepts;
        }
        di_grammar_release(g);
    }
    return NULL;
}

static void many_callers_get_what_they_asked_for(void **state) {
    (void)state;
    size_t one = bytes_of_one();
    for (int n_threads = 1; n_threads <= 4; n_threads += 3) {
        di_grammar_service_options options = {.n_threads = n_threads, .cache_bytes = 6 * one};
        di_grammar_service *s = NULL;
        di_error err;
        di_test_ok(di_grammar_service_create(&s, &options, &err), &err);
        pthread_t threads[CALLERS];
        caller callers[CALLERS];
        for (int i = 0; i < CALLERS; i++) {
            callers[i] = (caller){.s = s, .rng = (uint64_t)(i + 1)};
            assert_int_equal(pthread_create(&threads[i], NULL, caller_main, &callers[i]), 0);
        }
        for (int i = 0; i < CALLERS; i++) {
            pthread_join(threads[i], NULL);
            assert_true(callers[i].is_right);
        }
        di_grammar_service_stats stats;
        di_grammar_service_stats_get(s, &stats);
        assert_int_equal(stats.n_hits + stats.n_joined + stats.n_misses, CALLERS * ROUNDS);
        assert_int_equal(stats.n_waiting, 0);
        di_grammar_service_destroy(s);
    }
}

DI_TEST_GROUP(grammar_service, cmocka_unit_test(the_same_text_is_compiled_once),
              cmocka_unit_test(kind_and_laxness_tell_texts_apart), cmocka_unit_test(the_least_recently_used_leave),
              cmocka_unit_test(what_is_learnt_counts),
              cmocka_unit_test(a_grammar_larger_than_the_cache_drives_nobody_out),
              cmocka_unit_test(without_a_cache_failures_are_kept_all_the_same),
              cmocka_unit_test(failures_are_kept_for_a_while), cmocka_unit_test(few_failures_are_kept),
              cmocka_unit_test(all_who_ask_at_once_get_one_compilation), cmocka_unit_test(what_takes_long_makes_room),
              cmocka_unit_test(a_single_thread_puts_first_attempts_first),
              cmocka_unit_test(hostile_grammars_keep_no_other_waiting), cmocka_unit_test(a_short_limit_has_one_attempt),
              cmocka_unit_test(threads_take_no_signals_but_their_own), cmocka_unit_test(a_job_calls_back_once),
              cmocka_unit_test(a_callback_may_take_or_cancel), cmocka_unit_test(a_cancelled_job_is_forgotten),
              cmocka_unit_test(nobody_gets_no_second_attempt),
              cmocka_unit_test(what_has_not_begun_is_cancelled_at_the_end), cmocka_unit_test(bad_options_are_refused),
              cmocka_unit_test(many_callers_get_what_they_asked_for));
