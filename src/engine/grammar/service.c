/* The service: grammars compiled beside the engine, one compilation for all who ask for the same, kept by content.
 *
 * An entry is one content, in a hash table by kind, laxness and text from the first request on:
 *
 *     request -> QUEUED (fresh) -> RUNNING -> READY  (by last use) -> out, when memory is needed
 *                   QUEUED (slow) <-´   `---> FAILED (by age)      -> out, after a while
 *
 * A job is one request. It hangs on its entry until that is done, and has its answer for itself from then on. How long
 * a compilation takes can't be told from its text, so that the first attempt has a short limit; what passes it is begun
 * anew, and has lost little by the first one. Nothing is compiled, measured with waiting, or freed under the lock.
 *
 * How grammars are compiled and what they learn is left to grammar.c. */
#include "service_internal.h"

#include <signal.h>

#include "grammar_internal.h"

enum {
    THREADS_DEFAULT = 2,
    THREADS_MAX = 1024,
    BUCKETS_MIN = 64,
    MEASURED_AT_ONCE = 16 /* grammars that are looked at again with each answer */
};

#define CACHE_DEFAULT ((size_t)256 << 20)
#define FAILURE_BYTES_MAX ((size_t)16 << 20) /* of failures with their texts */
#define SLICE_NS ((int64_t)100 * 1000000)

typedef enum entry_state { QUEUED, RUNNING, READY, FAILED } entry_state;

typedef struct entry {
    struct entry *chain;       /* in the table */
    struct entry *prev, *next; /* in the list of its state, or `next` alone among what is to be freed */
    uint64_t hash;
    di_grammar_spec spec; /* of text below */
    entry_state state;
    bool is_slow;         /* the first attempt was too short */
    uint64_t turn;        /* QUEUED: rises with time */
    di_grammar_job *jobs; /* QUEUED, RUNNING: that wait, chained */
    di_grammar *grammar;  /* READY: a reference */
    size_t bytes;         /* READY: as counted in the service's */
    di_error *error;      /* FAILED: owned */
    int64_t until_ns;     /* FAILED */
    char text[];
} entry;

typedef struct entry_list {
    entry *first, *last; /* oldest and newest */
} entry_list;

struct di_grammar_service {
    /* Read-only. */
    di_grammar_service_hooks hooks; /* with a slice of 0 when there is one attempt only */
    di_grammar_limits limits;
    size_t cache_bytes;
    uint64_t hash_key; /* random */
    int n_threads;
    pthread_t *threads; /* owned [n_started] */
    int n_started;

    _Atomic bool stop; /* compilations that run are to end; set with is_stopping */
    pthread_mutex_t mutex;
    pthread_cond_t work; /* something was queued, or the threads are to end */
    pthread_cond_t done; /* a job is done, or its callback has returned */

    /* lock: mutex, all below */
    entry **table; /* owned [n_buckets], a power of two */
    size_t n_buckets, n_entries;
    entry_list fresh, slow, ready, failed;
    entry *next_measured; /* of `ready`; NULL: its first */
    size_t failed_bytes;
    uint64_t turn;
    int n_entered;    /* threads that have their number */
    int64_t n_jobs;   /* that were not taken or cancelled yet: the last one frees a service that was destroyed */
    bool is_stopping; /* nothing is begun any more */
    bool is_destroyed;
    di_grammar_service_stats stats;
};

typedef enum job_state {
    WAITING,
    CALLING, /* the answer is there, and `done` is called or about to be */
    DONE
} job_state;

struct di_grammar_job {
    di_grammar_service *service;
    /* lock: service->mutex, all below */
    entry *entry;         /* WAITING */
    di_grammar_job *next; /* WAITING: of the same entry; CALLING: that the same thread calls */
    job_state state;
    pthread_t caller;  /* CALLING: the thread that does it */
    bool is_abandoned; /* CALLING: taken or cancelled by the caller, which frees it later */
    void (*done)(void *user);
    void *user;
    di_status status;
    di_grammar *grammar; /* a reference */
    di_error error;
};

/* ---- memory -------------------------------------------------------------------------------------------------------
 */

static size_t bytes_locked(const di_grammar *g) {
    return sizeof *g + di_pda_bytes(&g->pda) + (size_t)g->n_infos * sizeof *g->infos + di_mask_caches_bytes(g);
}

size_t di_grammar_bytes(di_grammar *g) {
    pthread_mutex_lock(&g->lock);
    size_t n = bytes_locked(g);
    pthread_mutex_unlock(&g->lock);
    return n;
}

/* ---- entries: all with the lock held, but what makes and frees them -------------------------------------------------
 */

/* Keyed, which FNV-1a is not: who doesn't know the key can hardly make texts that share a bucket. */
static uint64_t hash_of(uint64_t key, const di_grammar_spec *spec) {
    uint64_t h = di_mix64(key ^ ((uint64_t)spec->kind << 1 | spec->is_lax));
    h = di_mix64(h ^ spec->len);
    for (size_t i = 0; i < spec->len; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, spec->text + i, DI_MIN(sizeof word, spec->len - i));
        h = di_mix64(h ^ word) + key;
    }
    return h;
}

static size_t own_bytes(const entry *e) {
    return sizeof *e + e->spec.len;
}

static entry *entry_create(const di_grammar_spec *spec, uint64_t hash) {
    size_t n_bytes;
    entry *e = di_size_add(&n_bytes, sizeof *e, spec->len) ? malloc(n_bytes) : NULL;
    if (!e)
        return NULL;
    *e = (entry){.hash = hash, .spec = *spec};
    if (spec->text) {
        memcpy(e->text, spec->text, spec->len);
        e->spec.text = e->text;
    }
    return e;
}

/* Frees a chain of entries that are in no list. Without the lock: a large grammar takes its time. */
static void entries_free(entry *e) {
    while (e) {
        entry *next = e->next;
        di_grammar_release(e->grammar);
        free(e->error);
        free(e);
        e = next;
    }
}

static void list_append(entry_list *list, entry *e) {
    e->prev = list->last;
    e->next = NULL;
    *(list->last ? &list->last->next : &list->first) = e;
    list->last = e;
}

static void list_remove(entry_list *list, entry *e) {
    *(e->prev ? &e->prev->next : &list->first) = e->next;
    *(e->next ? &e->next->prev : &list->last) = e->prev;
    e->prev = e->next = NULL;
}

static entry **bucket_of(di_grammar_service *s, uint64_t hash) {
    return &s->table[hash & (s->n_buckets - 1)];
}

static entry *find(di_grammar_service *s, const di_grammar_spec *spec, uint64_t hash) {
    entry *e = *bucket_of(s, hash);
    while (e && !(e->hash == hash && e->spec.kind == spec->kind && e->spec.is_lax == spec->is_lax &&
                  e->spec.len == spec->len && (spec->len == 0 || memcmp(e->text, spec->text, spec->len) == 0)))
        e = e->chain;
    return e;
}

/* Failing to grow only makes chains longer. */
static void grow_table(di_grammar_service *s) {
    size_t n = 2 * s->n_buckets;
    entry **old = s->table, **table = calloc(n, sizeof(entry *));
    if (!table)
        return;
    size_t n_old = s->n_buckets;
    s->table = table;
    s->n_buckets = n;
    for (size_t i = 0; i < n_old; i++) {
        for (entry *e = old[i], *next; e; e = next) {
            next = e->chain;
            e->chain = *bucket_of(s, e->hash);
            *bucket_of(s, e->hash) = e;
        }
    }
    free(old);
}

static void insert(di_grammar_service *s, entry *e) {
    if (s->n_entries >= s->n_buckets)
        grow_table(s);
    e->chain = *bucket_of(s, e->hash);
    *bucket_of(s, e->hash) = e;
    s->n_entries++;
}

static void enqueue(di_grammar_service *s, entry *e) {
    e->state = QUEUED;
    e->turn = ++s->turn;
    list_append(e->is_slow ? &s->slow : &s->fresh, e);
    s->stats.n_waiting++;
    pthread_cond_broadcast(&s->work); /* not every thread takes every entry */
}

static void dequeue(di_grammar_service *s, entry *e) {
    list_remove(e->is_slow ? &s->slow : &s->fresh, e);
    s->stats.n_waiting--;
}

/* Puts e before *dead. */
static void discard(di_grammar_service *s, entry *e, entry **dead) {
    entry **link = bucket_of(s, e->hash);
    while (*link != e)
        link = &(*link)->chain;
    *link = e->chain;
    s->n_entries--;
    switch (e->state) {
    case QUEUED:
        dequeue(s, e);
        break;
    case RUNNING:
        break;
    case READY:
        if (s->next_measured == e)
            s->next_measured = e->next;
        list_remove(&s->ready, e);
        s->stats.bytes -= e->bytes;
        s->stats.n_entries--;
        break;
    case FAILED:
        list_remove(&s->failed, e);
        s->failed_bytes -= e->bytes;
        s->stats.n_failed--;
        break;
    }
    e->next = *dead;
    *dead = e;
}

static void evict(di_grammar_service *s, entry *e, entry **dead) {
    discard(s, e, dead);
    s->stats.n_evicted++;
}

/* Counts what the grammar has become, unless somebody is matching with it right now: then the next time. */
static void measure(di_grammar_service *s, entry *e) {
    if (pthread_mutex_trylock(&e->grammar->lock) != 0)
        return;
    size_t n = own_bytes(e) + bytes_locked(e->grammar);
    pthread_mutex_unlock(&e->grammar->lock);
    s->stats.bytes += n - e->bytes;
    e->bytes = n;
}

/* Brings the cache back to its size. Grammars grow while they are in use; those that grew are among those that were
 * asked for, so that it is enough to look at a few of them, in turn, with every answer. */
static void settle(di_grammar_service *s, entry **dead) {
    entry *e = s->next_measured ? s->next_measured : s->ready.first;
    for (int i = 0; e && i < MEASURED_AT_ONCE; i++) {
        entry *next = e->next;
        measure(s, e);
        if (e->bytes > s->cache_bytes)
            evict(s, e, dead); /* or it would drive out all others */
        e = next;
    }
    s->next_measured = e;
    while (s->stats.bytes > s->cache_bytes && s->ready.first)
        evict(s, s->ready.first, dead);
}

static void keep_grammar(di_grammar_service *s, entry *e, di_grammar *g, entry **dead) {
    e->state = READY;
    e->grammar = g;
    e->bytes = 0;
    list_append(&s->ready, e);
    s->stats.n_entries++;
    measure(s, e);
    if (e->bytes > s->cache_bytes)
        evict(s, e, dead);
    settle(s, dead);
}

/* Whether the same text would fail the same way another time. */
static bool is_lasting(di_status st) {
    return st == DI_ERR_REQUEST || st == DI_ERR_RANGE || st == DI_ERR_ARG || st == DI_ERR_UNSUPPORTED;
}

static void keep_failure(di_grammar_service *s, entry *e, const di_error *err, entry **dead) {
    int64_t now_ns = s->hooks.clock_ns(s->hooks.ctx);
    size_t n = own_bytes(e) + sizeof *err;
    while (s->failed.first && s->failed.first->until_ns <= now_ns)
        discard(s, s->failed.first, dead);
    if (is_lasting(err->code) && n <= FAILURE_BYTES_MAX)
        e->error = malloc(sizeof *err);
    if (!e->error) {
        discard(s, e, dead);
        return;
    }
    *e->error = *err;
    e->state = FAILED;
    e->bytes = n;
    e->until_ns = now_ns + DI_GRAMMAR_FAILURE_SECONDS * (int64_t)1000000000;
    list_append(&s->failed, e);
    s->failed_bytes += n;
    s->stats.n_failed++;
    while (s->stats.n_failed > DI_GRAMMAR_FAILURES_MAX || s->failed_bytes > FAILURE_BYTES_MAX)
        discard(s, s->failed.first, dead);
}

/* ---- jobs ---------------------------------------------------------------------------------------------------------
 */

static void service_free(di_grammar_service *s) {
    pthread_cond_destroy(&s->done);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->mutex);
    free(s->threads);
    free(s->table);
    free(s);
}

static bool is_left(const di_grammar_service *s) {
    return s->is_destroyed && s->n_jobs == 0;
}

/* Gives the job its answer, with the lock held. */
static void answer(di_grammar_job *j, di_status st, di_grammar *g, const di_error *err) {
    j->entry = NULL;
    j->next = NULL;
    j->status = st;
    if (st)
        j->error = *err;
    else
        j->grammar = di_grammar_acquire(g);
    j->state = j->done ? CALLING : DONE;
    j->caller = pthread_self();
}

/* Calls back for jobs that `answer` has left CALLING. The lock is held before and after, not between. */
static void call_back(di_grammar_service *s, di_grammar_job *j) {
    while (j) {
        di_grammar_job *next = j->next;
        if (!j->is_abandoned) { /* as one may be by the callback of another */
            pthread_mutex_unlock(&s->mutex);
            j->done(j->user);
            pthread_mutex_lock(&s->mutex);
        }
        j->state = DONE;
        if (j->is_abandoned) {
            s->n_jobs--;
            free(j);
        }
        j = next;
    }
    pthread_cond_broadcast(&s->done);
}

/* Answers all jobs of an entry; returns those to call back for. */
static di_grammar_job *answer_all(di_grammar_service *s, entry *e, di_status st, di_grammar *g, const di_error *err) {
    di_grammar_job *calls = NULL;
    for (di_grammar_job *j = e->jobs, *next; j; j = next) {
        next = j->next;
        answer(j, st, g, err);
        if (j->state == CALLING) {
            j->next = calls;
            calls = j;
        }
    }
    e->jobs = NULL;
    pthread_cond_broadcast(&s->done);
    return calls;
}

static di_status fail_stopping(di_error *err) {
    return di_fail(err, DI_ERR_CANCELLED, "no grammars are compiled any more");
}

/* The entry for a request, queued when it is new. */
static di_status ask(di_grammar_service *s, const di_grammar_spec *spec, uint64_t hash, entry **out, entry **dead,
                     di_error *err) {
    if (s->is_stopping)
        return fail_stopping(err);
    entry *e = find(s, spec, hash);
    if (e && e->state == FAILED && e->until_ns <= s->hooks.clock_ns(s->hooks.ctx)) {
        discard(s, e, dead);
        e = NULL;
    }
    if (!e) {
        e = entry_create(spec, hash);
        if (!e)
            return di_fail(err, DI_ERR_MEMORY, "a grammar of %zu bytes", spec->len);
        insert(s, e);
        enqueue(s, e);
        s->stats.n_misses++;
    } else if (e->state == READY || e->state == FAILED) {
        s->stats.n_hits++;
    } else {
        s->stats.n_joined++;
    }
    *out = e;
    return DI_OK;
}

/* Hangs the job on its entry, or answers it from there. */
static void attach(di_grammar_service *s, di_grammar_job *j, entry *e, entry **dead) {
    switch (e->state) {
    case QUEUED:
    case RUNNING:
        j->entry = e;
        j->next = e->jobs;
        e->jobs = j;
        break;
    case READY:
        answer(j, DI_OK, e->grammar, NULL);
        if (s->next_measured == e)
            s->next_measured = e->next;
        list_remove(&s->ready, e);
        list_append(&s->ready, e);
        settle(s, dead);
        break;
    case FAILED:
        answer(j, e->error->code, NULL, e->error);
        break;
    }
}

di_status di_grammar_job_start(di_grammar_service *s, const di_grammar_spec *spec, void (*done)(void *user), void *user,
                               di_grammar_job **out, di_error *err) {
    uint64_t hash = hash_of(s->hash_key, spec);
    di_grammar_job *j = calloc(1, sizeof *j);
    if (!j)
        return di_fail(err, DI_ERR_MEMORY, "a job for a grammar");
    *j = (di_grammar_job){.service = s, .done = done, .user = user};
    entry *e = NULL, *dead = NULL;
    pthread_mutex_lock(&s->mutex);
    di_status st = ask(s, spec, hash, &e, &dead, err);
    if (e) {
        s->n_jobs++;
        attach(s, j, e, &dead);
        *out = j;
        if (j->state == CALLING)
            call_back(s, j);
    }
    pthread_mutex_unlock(&s->mutex);
    entries_free(dead);
    if (!e)
        free(j);
    return st;
}

bool di_grammar_job_is_done(di_grammar_job *j) {
    pthread_mutex_lock(&j->service->mutex);
    bool is_done = j->state != WAITING;
    pthread_mutex_unlock(&j->service->mutex);
    return is_done;
}

static bool is_being_called(const di_grammar_job *j) {
    return j->state == CALLING && !pthread_equal(j->caller, pthread_self());
}

/* The end of a job that is not WAITING; gives the lock back. */
static void finish_job(di_grammar_job *j) {
    di_grammar_service *s = j->service;
    if (j->state == CALLING) {
        j->is_abandoned = true; /* within its callback: call_back frees it */
    } else {
        s->n_jobs--;
        free(j);
    }
    bool is_last = is_left(s);
    pthread_mutex_unlock(&s->mutex);
    if (is_last)
        service_free(s);
}

di_status di_grammar_job_take(di_grammar_job *j, di_grammar **out, di_error *err) {
    di_grammar_service *s = j->service;
    pthread_mutex_lock(&s->mutex);
    while (j->state == WAITING || is_being_called(j))
        pthread_cond_wait(&s->done, &s->mutex);
    di_status st = j->status;
    if (!st)
        *out = j->grammar;
    else if (err)
        *err = j->error;
    finish_job(j);
    return st;
}

void di_grammar_job_cancel(di_grammar_job *j) {
    if (!j)
        return;
    di_grammar_service *s = j->service;
    entry *dead = NULL;
    pthread_mutex_lock(&s->mutex);
    while (is_being_called(j))
        pthread_cond_wait(&s->done, &s->mutex);
    if (j->state == WAITING) {
        entry *e = j->entry;
        di_grammar_job **link = &e->jobs;
        while (*link != j)
            link = &(*link)->next;
        *link = j->next;
        if (!e->jobs && e->state == QUEUED)
            discard(s, e, &dead);
        j->state = DONE;
    }
    di_grammar *g = j->grammar;
    finish_job(j);
    di_grammar_release(g);
    entries_free(dead);
}

di_status di_grammar_service_compile(di_grammar_service *s, const di_grammar_spec *spec, di_grammar **out,
                                     di_error *err) {
    di_grammar_job *j = NULL;
    di_status st = di_grammar_job_start(s, spec, NULL, NULL, &j, err);
    return j ? di_grammar_job_take(j, out, err) : st;
}

/* ---- threads ------------------------------------------------------------------------------------------------------
 */

/* The next entry for thread `index`, NULL when it has nothing to do. */
static entry *pick(di_grammar_service *s, int index) {
    entry *fresh = s->fresh.first, *slow = s->slow.first;
    if (s->n_threads > 1 && index == 0)
        return fresh;
    if (s->n_threads > 1 && fresh && slow)
        return fresh->turn < slow->turn ? fresh : slow;
    return fresh ? fresh : slow;
}

/* What comes of a compilation, with the lock held. Takes g. */
static void conclude(di_grammar_service *s, entry *e, di_status st, di_grammar *g, const di_error *err, entry **dead) {
    di_grammar_job *calls = answer_all(s, e, st, g, err);
    if (st) {
        s->stats.n_failures++;
        keep_failure(s, e, err, dead);
    } else {
        keep_grammar(s, e, g, dead);
    }
    call_back(s, calls);
}

/* Compiles e, RUNNING; the lock is held before and after. */
static void run(di_grammar_service *s, entry *e) {
    di_grammar_limits limits = s->limits;
    bool is_slice = !e->is_slow && s->hooks.slice_ns > 0;
    if (is_slice)
        limits.timeout_ns = s->hooks.slice_ns;
    pthread_mutex_unlock(&s->mutex);
    entry *dead = NULL;
    di_grammar *g = NULL;
    di_error err;
    int64_t begin_ns = s->hooks.clock_ns(s->hooks.ctx);
    di_status st = s->hooks.compile(s->hooks.ctx, &g, &e->spec, &limits, &err);
    bool is_late = s->hooks.clock_ns(s->hooks.ctx) - begin_ns >= limits.timeout_ns;
    err.code = st;
    pthread_mutex_lock(&s->mutex);
    bool is_again = st == DI_ERR_RANGE && is_slice && is_late;
    e->is_slow |= is_again;
    if (is_again && !e->jobs) {
        discard(s, e, &dead); /* nobody waits for a second attempt */
    } else if (is_again && !s->is_stopping) {
        s->stats.n_slow++;
        enqueue(s, e);
    } else {
        if (is_again)
            st = fail_stopping(&err);
        conclude(s, e, st, g, &err, &dead);
    }
    if (dead) {
        pthread_mutex_unlock(&s->mutex);
        entries_free(dead);
        pthread_mutex_lock(&s->mutex);
    }
}

static void *thread_main(void *arg) {
    di_grammar_service *s = arg;
    (void)pthread_setname_np(pthread_self(), "engine-grammar");
    pthread_mutex_lock(&s->mutex);
    int index = s->n_entered++;
    while (!s->is_stopping) {
        entry *e = pick(s, index);
        if (e) {
            dequeue(s, e);
            e->state = RUNNING;
            run(s, e);
        } else {
            pthread_cond_wait(&s->work, &s->mutex);
        }
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* Signals from outside are for the program's own threads. Those that a thread causes itself it has to get: blocked,
 * they would end the process without a word. */
static di_status start_threads(di_grammar_service *s, di_error *err) {
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t set, before;
    sigfillset(&set);
    for (size_t i = 0; i < DI_COUNT(own); i++)
        sigdelset(&set, own[i]);
    pthread_sigmask(SIG_BLOCK, &set, &before);
    int failed = 0;
    while (s->n_started < s->n_threads && !failed) {
        failed = pthread_create(&s->threads[s->n_started], NULL, thread_main, s);
        if (!failed)
            s->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return di_fail(err, DI_ERR_MEMORY, "the system refuses thread %d of %d for grammars: %s", s->n_started + 1,
                       s->n_threads, strerrordesc_np(failed));
    return DI_OK;
}

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

static di_status make_locks(di_grammar_service *s, di_error *err) {
    int failed = pthread_mutex_init(&s->mutex, NULL);
    if (failed)
        return di_fail(err, DI_ERR_INTERNAL, "grammars: no lock: %s", strerrordesc_np(failed));
    failed = pthread_cond_init(&s->work, NULL);
    if (!failed) {
        failed = pthread_cond_init(&s->done, NULL);
        if (failed)
            pthread_cond_destroy(&s->work);
    }
    if (failed) {
        pthread_mutex_destroy(&s->mutex);
        return di_fail(err, DI_ERR_INTERNAL, "grammars: no condition: %s", strerrordesc_np(failed));
    }
    return DI_OK;
}

di_status di_grammar_service_make(di_grammar_service **out, const di_grammar_service_options *options,
                                  const di_grammar_service_hooks *hooks, di_error *err) {
    int n_threads = options->n_threads ? options->n_threads : THREADS_DEFAULT;
    if (n_threads < 0 || n_threads > THREADS_MAX)
        return di_fail(err, DI_ERR_ARG, "%d threads for grammars, expected 1 to %d, or 0 for %d", n_threads,
                       (int)THREADS_MAX, (int)THREADS_DEFAULT);
    di_grammar_service *s = calloc(1, sizeof *s);
    if (!s)
        return di_fail(err, DI_ERR_MEMORY, "grammars");
    di_status st = make_locks(s, err);
    if (st) {
        free(s);
        return st;
    }
    s->hooks = *hooks;
    s->limits = options->limits;
    s->limits.stop = &s->stop;
    /* An attempt that is nearly as long as the whole limit is not worth a second one. */
    if (s->limits.timeout_ns > 0 && s->limits.timeout_ns <= 2 * s->hooks.slice_ns)
        s->hooks.slice_ns = 0;
    s->cache_bytes = options->cache_bytes ? options->cache_bytes : CACHE_DEFAULT;
    if (options->is_uncached)
        s->cache_bytes = 0; /* nothing fits */
    s->hash_key = di_random_u64();
    s->n_threads = n_threads;
    s->n_buckets = BUCKETS_MIN;
    s->table = calloc(s->n_buckets, sizeof(entry *));
    s->threads = calloc((size_t)n_threads, sizeof *s->threads);
    if (s->table && s->threads)
        st = start_threads(s, err);
    else
        st = di_fail(err, DI_ERR_MEMORY, "grammars with %d threads", n_threads);
    if (st)
        di_grammar_service_destroy(s);
    else
        *out = s;
    return st;
}

static di_status compile_plainly(void *ctx, di_grammar **out, const di_grammar_spec *spec,
                                 const di_grammar_limits *limits, di_error *err) {
    (void)ctx;
    return di_grammar_compile(out, spec, limits, err);
}

static int64_t clock_plainly(void *ctx) {
    (void)ctx;
    return di_clock_ns();
}

di_status di_grammar_service_create(di_grammar_service **out, const di_grammar_service_options *options,
                                    di_error *err) {
    static const di_grammar_service_hooks hooks = {
        .compile = compile_plainly, .clock_ns = clock_plainly, .slice_ns = SLICE_NS};
    return di_grammar_service_make(out, options, &hooks, err);
}

/* Ends what never ran. */
static void cancel_queued(di_grammar_service *s, entry_list *queue, entry **dead) {
    di_error err;
    fail_stopping(&err);
    while (queue->first) {
        entry *e = queue->first;
        di_grammar_job *calls = answer_all(s, e, err.code, NULL, &err);
        discard(s, e, dead);
        call_back(s, calls);
    }
}

void di_grammar_service_destroy(di_grammar_service *s) {
    if (!s)
        return;
    entry *dead = NULL;
    pthread_mutex_lock(&s->mutex);
    s->is_stopping = true;
    s->stop = true;
    pthread_cond_broadcast(&s->work);
    cancel_queued(s, &s->fresh, &dead);
    cancel_queued(s, &s->slow, &dead);
    pthread_mutex_unlock(&s->mutex);
    for (int i = 0; i < s->n_started; i++)
        pthread_join(s->threads[i], NULL);
    pthread_mutex_lock(&s->mutex);
    while (s->ready.first)
        discard(s, s->ready.first, &dead);
    while (s->failed.first)
        discard(s, s->failed.first, &dead);
    s->is_destroyed = true;
    bool is_last = is_left(s);
    pthread_mutex_unlock(&s->mutex);
    entries_free(dead);
    if (is_last)
        service_free(s);
}

void di_grammar_service_stats_get(di_grammar_service *s, di_grammar_service_stats *out) {
    pthread_mutex_lock(&s->mutex);
    *out = s->stats;
    pthread_mutex_unlock(&s->mutex);
}
