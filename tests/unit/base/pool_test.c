/* The thread pool: every part runs once, on one worker at a time, and results don't depend on the thread count. Run
 * under the thread sanitizer as well. */
#include "harness.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/base.h"

typedef struct job {
    int n_parts;
    int n_runs[4096];              /* plain: a part that ran twice at once is a race for the sanitizer to see */
    _Atomic int busy[64];          /* workers inside the function now */
    _Atomic bool is_worker_shared; /* two parts ran as one worker at once */
    _Atomic bool is_part_wrong;
    int n_threads;
} job;

static void count_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    job *j = ctx;
    if (n_parts != j->n_parts || part < 0 || part >= n_parts || worker < 0 || worker >= j->n_threads) {
        atomic_store(&j->is_part_wrong, true);
        return;
    }
    if (atomic_fetch_add(&j->busy[worker], 1) != 0) {
        atomic_store(&j->is_worker_shared, true);
    }
    j->n_runs[part]++;
    atomic_fetch_sub(&j->busy[worker], 1);
}

static void run_and_check(di_pool *pool, int n_parts) {
    static job j;
    j = (job){.n_parts = n_parts, .n_threads = di_pool_threads(pool)};
    di_pool_run(pool, count_part, &j, n_parts);
    assert_false(j.is_part_wrong);
    assert_false(j.is_worker_shared);
    for (int i = 0; i < n_parts; i++) {
        assert_int_equal(j.n_runs[i], 1);
    }
}

static void every_part_runs_once(void **state) {
    (void)state;
    static const int thread_counts[] = {1, 2, 3, 8};
    for (size_t t = 0; t < DI_COUNT(thread_counts); t++) {
        di_pool *pool = NULL;
        di_error err;
        di_test_ok(di_pool_create(&pool, thread_counts[t], NULL, &err), &err);
        assert_int_equal(di_pool_threads(pool), thread_counts[t]);
        static const int part_counts[] = {0, 1, 2, 3, 7, 64, 1000, 4096};
        for (size_t p = 0; p < DI_COUNT(part_counts); p++) {
            run_and_check(pool, part_counts[p]);
        }
        di_pool_destroy(pool);
    }
}

/* Jobs of changing size and context, close together: a worker that is late for one must not take a part of the next by
 * the description of the last. */
static void jobs_follow_each_other(void **state) {
    (void)state;
    for (int n_threads = 2; n_threads <= 4; n_threads += 2) {
        di_pool *pool = NULL;
        di_error err;
        di_test_ok(di_pool_create(&pool, n_threads, NULL, &err), &err);
        uint64_t rng = 3;
        for (int i = 0; i < 3000; i++) {
            run_and_check(pool, (int)di_test_random_range(&rng, 1, 9));
        }
        di_pool_destroy(pool);
    }
}

static void workers_wake_after_sleeping(void **state) {
    (void)state;
    di_pool *pool = NULL;
    di_error err;
    di_test_ok(di_pool_create(&pool, 3, NULL, &err), &err);
    for (int i = 0; i < 20; i++) {
        usleep(2000); /* longer than workers spin */
        run_and_check(pool, 100);
    }
    di_pool_destroy(pool);
}

typedef struct meeting {
    _Atomic int n_here;
} meeting;

/* Waits until all four parts are running: fails to end unless four threads really work. */
static void meet(void *ctx, int64_t part, int64_t n_parts, int worker) {
    meeting *m = ctx;
    (void)part;
    (void)worker;
    atomic_fetch_add(&m->n_here, 1);
    while (atomic_load(&m->n_here) < n_parts) {
        sched_yield();
    }
}

static void all_threads_work(void **state) {
    (void)state;
    di_pool *pool = NULL;
    di_error err;
    di_test_ok(di_pool_create(&pool, 4, NULL, &err), &err);
    for (int i = 0; i < 50; i++) {
        meeting m = {0};
        di_pool_run(pool, meet, &m, 4);
        assert_int_equal(m.n_here, 4);
    }
    di_pool_destroy(pool);
}

static void slow_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    if (part == 0) {
        usleep(1000); /* whoever has it, the others wait beyond their spinning */
    }
    ((int *)ctx)[part] = (int)part + 1;
}

static void the_caller_waits_for_the_last_part(void **state) {
    (void)state;
    di_pool *pool = NULL;
    di_error err;
    di_test_ok(di_pool_create(&pool, 2, NULL, &err), &err);
    for (int i = 0; i < 50; i++) {
        int done[3] = {0};
        di_pool_run(pool, slow_part, done, 3);
        assert_int_equal(done[0], 1);
        assert_int_equal(done[1], 2);
        assert_int_equal(done[2], 3);
    }
    di_pool_destroy(pool);
}

static _Atomic int n_started;

static void note_start(void) {
    atomic_fetch_add(&n_started, 1);
}

static void worker_start_runs_on_every_worker(void **state) {
    (void)state;
    di_pool *pool = NULL;
    di_error err;
    atomic_store(&n_started, 0);
    di_test_ok(di_pool_create(&pool, 4, note_start, &err), &err);
    di_pool_destroy(pool);
    assert_int_equal(n_started, 3); /* the caller is not a worker thread */
}

static void sizes_are_checked_or_chosen(void **state) {
    (void)state;
    di_pool *pool = NULL;
    di_error err;
    assert_int_equal(di_pool_create(&pool, -1, NULL, &err), DI_ERR_RANGE);
    assert_contains(err.message, "-1");
    assert_null(pool);
    di_test_ok(di_pool_create(&pool, 0, NULL, &err), &err);
    assert_int_equal(di_pool_threads(pool), di_cpu_count());
    assert_true(di_cpu_count() >= 1);
    di_pool_destroy(pool);
    di_pool_destroy(NULL);
}

/* Pinned workers compute as before, each where it was put; more threads than processors can't be pinned. */
static void pinned_workers_work(void **state) {
    (void)state;
    di_error err = {0};
    cpu_set_t usable;
    assert_int_equal(sched_getaffinity(0, sizeof usable, &usable), 0);
    di_pool *pool;
    di_test_ok(di_pool_create(&pool, CPU_COUNT(&usable), NULL, &err), &err);
    di_test_ok(di_pool_pin(pool, &err), &err);
    run_and_check(pool, 100);
    di_pool_destroy(pool);
    di_test_ok(di_pool_create(&pool, CPU_COUNT(&usable) + 1, NULL, &err), &err);
    assert_int_equal(di_pool_pin(pool, &err), DI_ERR_DEVICE);
    assert_contains(err.message, "processors");
    di_pool_destroy(pool);
    cpu_set_t after; /* the caller's own thread moves as it did */
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_true(CPU_EQUAL(&usable, &after));
}

static void sum_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    float sum = 0;
    for (int i = 0; i < 1000; i++) {
        sum += 1.0f / (float)(part * 1000 + i + 1);
    }
    ((float *)ctx)[part] = sum;
}

static void results_do_not_depend_on_the_thread_count(void **state) {
    (void)state;
    float want[37], got[37];
    for (int n_threads = 1; n_threads <= 5; n_threads++) {
        di_pool *pool = NULL;
        di_error err;
        di_test_ok(di_pool_create(&pool, n_threads, NULL, &err), &err);
        di_pool_run(pool, sum_part, n_threads == 1 ? want : got, 37);
        di_pool_destroy(pool);
        if (n_threads > 1) {
            assert_memory_equal(got, want, sizeof want);
        }
    }
}

DI_TEST_GROUP(pool, cmocka_unit_test(every_part_runs_once), cmocka_unit_test(jobs_follow_each_other),
              cmocka_unit_test(workers_wake_after_sleeping), cmocka_unit_test(all_threads_work),
              cmocka_unit_test(the_caller_waits_for_the_last_part), cmocka_unit_test(worker_start_runs_on_every_worker),
              cmocka_unit_test(sizes_are_checked_or_chosen), cmocka_unit_test(pinned_workers_work),
              cmocka_unit_test(results_do_not_depend_on_the_thread_count))
