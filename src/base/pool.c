/* Thread pool: fixed parts, taken from one counter.
 *
 * The state of a job is one 64-bit ticket, generation in the upper half and next part in the lower. A worker takes
 * parts by compare-and-swap of the ticket, so that a worker that was late can only take parts of the job whose
 * description it has read. Where parts are many it takes a few neighbours at a time, c in the drawing:
 *
 *     caller:  close ticket (gen, CLOSED) -> write fn, ctx, n_parts -> publish (gen + 1, 0), post -> take parts -> wait
 *     worker:  read ticket -> read fn, ctx, n_parts -> swap (gen, i) for (gen, i + c) -> run i.. -> add c to n_done
 *
 * The ticket is closed before the description is rewritten: a worker that has seen any of the new description finds its
 * old ticket gone and starts over. Idle workers spin for a short time, because the operations of a forward pass follow
 * each other closely, and then sleep. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "util.h"

enum { SPIN_NS = 50000, SPINS_PER_CLOCK = 64 };

/* How often each thread comes back for more, where parts are that many: enough to balance parts that differ. */
enum { TAKES_PER_THREAD = 16 };

/* A part number that no job reaches. */
#define CLOSED ((uint64_t)UINT32_MAX)

typedef struct worker {
    di_pool *pool; /* borrowed */
    int index;     /* 1 .. n_threads-1; the caller is 0 */
    pthread_t thread;
} worker;

struct di_pool {
    int n_threads;
    int64_t spin_ns;
    void (*worker_start)(void);
    worker *workers; /* owned, n_threads entries, the first unused */
    int n_started;

    /* Cache lines apart by who writes when: idle workers look at `posted` alone, which is written once a job, so that
     * they don't take the other lines away from a caller that is still writing a job down. */
    _Alignas(64) _Atomic uint32_t posted; /* generation of the last published job */
    _Atomic bool is_stopping;
    _Atomic int n_sleeping;        /* workers in or near `wake` */
    _Atomic bool is_caller_asleep; /* the caller is in or near `done` */

    _Alignas(64) _Atomic(di_pool_fn) fn;
    _Atomic(void *) ctx;
    _Atomic int64_t n_parts;

    _Alignas(64) _Atomic uint64_t ticket;
    _Atomic int64_t n_done;

    _Alignas(64) pthread_mutex_t mutex; /* guards nothing but the sleeping itself */
    pthread_cond_t wake, done;
};

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes and runs parts of the current job until there are none; returns the generation that it saw last. */
static uint32_t work(di_pool *pool, int index) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        int64_t part = (int64_t)(ticket & UINT32_MAX);
        di_pool_fn fn = atomic_load_explicit(&pool->fn, memory_order_acquire);
        void *ctx = atomic_load_explicit(&pool->ctx, memory_order_acquire);
        int64_t n_parts = atomic_load_explicit(&pool->n_parts, memory_order_acquire);
        if (part >= n_parts) {
            return (uint32_t)(ticket >> 32);
        }
        int64_t n_taken = DI_MAX(n_parts / (TAKES_PER_THREAD * pool->n_threads), 1);
        n_taken = DI_MIN(n_taken, n_parts - part);
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket + (uint64_t)n_taken,
                                                   memory_order_acq_rel, memory_order_relaxed)) {
            continue;
        }
        for (int64_t i = part; i < part + n_taken; i++) {
            fn(ctx, i, n_parts, index);
        }
        int64_t n_done = atomic_fetch_add_explicit(&pool->n_done, n_taken, memory_order_seq_cst) + n_taken;
        if (n_done == n_parts && index != 0 && atomic_load(&pool->is_caller_asleep)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static bool has_new_job(di_pool *pool, uint32_t generation) {
    return atomic_load(&pool->posted) != generation || atomic_load(&pool->is_stopping);
}

static bool is_job_done(di_pool *pool, int64_t n_parts) {
    return atomic_load(&pool->n_done) == n_parts;
}

static void *worker_main(void *arg) {
    worker *self = arg;
    di_pool *pool = self->pool;
    (void)pthread_setname_np(pthread_self(), "compute");
    if (pool->worker_start) {
        pool->worker_start();
    }
    uint32_t generation = 0;
    while (!atomic_load(&pool->is_stopping)) {
        generation = work(pool, self->index);
        int64_t deadline = pool->spin_ns ? di_clock_ns() + pool->spin_ns : 0;
        bool is_spinning = pool->spin_ns != 0;
        while (is_spinning && !has_new_job(pool, generation)) {
            for (int i = 0; i < SPINS_PER_CLOCK && !has_new_job(pool, generation); i++) {
                cpu_relax();
            }
            is_spinning = di_clock_ns() < deadline;
        }
        if (has_new_job(pool, generation)) {
            continue;
        }
        pthread_mutex_lock(&pool->mutex);
        /* Announce, then look again: the caller publishes, then looks for sleepers. One of the two sees the other. */
        atomic_fetch_add(&pool->n_sleeping, 1);
        while (!has_new_job(pool, generation)) {
            pthread_cond_wait(&pool->wake, &pool->mutex);
        }
        atomic_fetch_sub(&pool->n_sleeping, 1);
        pthread_mutex_unlock(&pool->mutex);
    }
    return NULL;
}

static void wake_sleepers(di_pool *pool) {
    if (atomic_load(&pool->n_sleeping) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
}

di_status di_pool_create(di_pool **out, int n_threads, void (*worker_start)(void), di_error *err) {
    if (n_threads < 0) {
        return di_fail(err, DI_ERR_RANGE, "threads: found %d, expected 0 or more", n_threads);
    }
    int n_cpus = di_cpu_count();
    if (n_threads == 0) {
        n_threads = n_cpus;
    }
    di_pool *pool = aligned_alloc(_Alignof(di_pool), sizeof *pool);
    worker *workers = calloc((size_t)n_threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return di_fail(err, DI_ERR_MEMORY, "out of memory: a pool of %d threads", n_threads);
    }
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    /* With more threads than processors, spinning takes the time of the one that would end the wait. */
    pool->spin_ns = n_threads <= n_cpus ? SPIN_NS : 0;
    pool->worker_start = worker_start;
    pool->workers = workers;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);

    /* Signals are for the thread that reads the keyboard or the socket, never for a worker. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (int i = 1; i < n_threads && code == 0; i++) {
        workers[i] = (worker){.pool = pool, .index = i};
        code = pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]);
        if (code == 0) {
            pool->n_started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        int n_started = pool->n_started;
        di_pool_destroy(pool);
        return di_fail(err, DI_ERR_MEMORY, "the system refuses thread %d of %d, ask for fewer threads", n_started + 2,
                       n_threads);
    }
    *out = pool;
    return DI_OK;
}

void di_pool_destroy(di_pool *pool) {
    if (!pool) {
        return;
    }
    atomic_store(&pool->is_stopping, true);
    wake_sleepers(pool);
    for (int i = 1; i <= pool->n_started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->workers);
    free(pool);
}

int di_pool_threads(const di_pool *pool) {
    return pool->n_threads;
}

di_status di_pool_pin(di_pool *pool, di_error *err) {
    cpu_set_t usable;
    CPU_ZERO(&usable);
    if (sched_getaffinity(0, sizeof usable, &usable) != 0) {
        return di_fail(err, DI_ERR_DEVICE, "pinning %d threads: the system does not name the processors",
                       pool->n_threads);
    }
    if (CPU_COUNT(&usable) < pool->n_threads) {
        return di_fail(err, DI_ERR_DEVICE, "pinning %d threads: found %d processors, expected one for each",
                       pool->n_threads, CPU_COUNT(&usable));
    }
    int index = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && index < pool->n_threads; cpu++) {
        if (!CPU_ISSET(cpu, &usable)) {
            continue;
        }
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        int code = index ? pthread_setaffinity_np(pool->workers[index].thread, sizeof one, &one) : 0;
        if (code != 0) {
            return di_fail(err, DI_ERR_DEVICE, "pinning thread %d of %d to processor %d: %s", index + 1,
                           pool->n_threads, cpu, strerror(code));
        }
        index++;
    }
    return DI_OK;
}

void di_pool_run(di_pool *pool, di_pool_fn fn, void *ctx, int64_t n_parts) {
    DI_ASSERT(n_parts >= 0 && n_parts <= INT32_MAX);
    if (pool->n_threads == 1 || n_parts <= 1) {
        for (int64_t part = 0; part < n_parts; part++) {
            fn(ctx, part, n_parts, 0);
        }
        return;
    }
    uint64_t generation = atomic_load(&pool->ticket) >> 32;
    atomic_store(&pool->ticket, generation << 32 | CLOSED);
    atomic_store_explicit(&pool->fn, fn, memory_order_release);
    atomic_store_explicit(&pool->ctx, ctx, memory_order_release);
    atomic_store_explicit(&pool->n_parts, n_parts, memory_order_release);
    atomic_store_explicit(&pool->n_done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->ticket, (generation + 1) << 32, memory_order_release);
    atomic_store(&pool->posted, (uint32_t)(generation + 1));
    wake_sleepers(pool);
    work(pool, 0);

    int64_t deadline = pool->spin_ns ? di_clock_ns() + pool->spin_ns : 0;
    while (pool->spin_ns && !is_job_done(pool, n_parts)) {
        for (int i = 0; i < SPINS_PER_CLOCK && !is_job_done(pool, n_parts); i++) {
            cpu_relax();
        }
        if (di_clock_ns() >= deadline) {
            break;
        }
    }
    if (!is_job_done(pool, n_parts)) {
        pthread_mutex_lock(&pool->mutex);
        atomic_store(&pool->is_caller_asleep, true);
        while (!is_job_done(pool, n_parts)) {
            pthread_cond_wait(&pool->done, &pool->mutex);
        }
        atomic_store(&pool->is_caller_asleep, false);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* The processor share that a control group grants, rounded up; 0 when there is no limit or it can't be read. */
static int cgroup_cpu_limit(void) {
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file) {
        return 0;
    }
    char line[64];
    bool has_line = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    /* "<quota> <period>" in microseconds; the quota is the word "max" where there is none, which reads as 0. */
    char *rest = line;
    long long quota = has_line ? strtoll(line, &rest, 10) : 0;
    long long period = quota > 0 ? strtoll(rest, NULL, 10) : 0;
    if (quota <= 0 || period <= 0) {
        return 0;
    }
    long long n_cpus = DI_CEIL_DIV(quota, period);
    return n_cpus > 1 << 16 ? 0 : (int)n_cpus;
}

int di_cpu_count(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    /* A machine with more processors than the fixed set holds makes the call fail. */
    int n_cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    int limit = cgroup_cpu_limit();
    if (limit > 0 && limit < n_cpus) {
        n_cpus = limit;
    }
    return n_cpus > 0 ? n_cpus : 1;
}
