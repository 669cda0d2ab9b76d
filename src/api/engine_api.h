/* Private to api/: the engine of the public API, whose parts are in engine_api.c (the thread, requests, events),
 * engine_config.c (what the caller's structures say) and engine_stats.c (numbers).
 *
 * Any thread may submit and abort; the engine's own thread alone calls di_core_*. They meet in an inbox:
 *
 *   caller's thread   check, encode, take a place, put into the inbox ........ | put into the chain of aborts
 *   engine's thread   ... take inbox and chain, hand them to the core, step, callbacks, publish numbers | ...
 *
 * A request whose output follows a grammar comes into the inbox when the grammar is compiled, from a thread of the
 * compiling service.
 *
 * No lock is held while a callback runs. */
#ifndef DI_ENGINE_API_H
#define DI_ENGINE_API_H

#include <pthread.h>
#include <stdatomic.h>

#include "api.h"

#include "deepinfer/deepinfer.h"

/* One sample of a request. Belongs to the engine's thread. */
typedef struct di_engine_sample {
    di_reply reply; /* of messages */
    bool is_cut;    /* its callback returned something else than 0 */
} di_engine_sample;

/* A request from submission to the last DONE event. */
typedef struct di_engine_ticket di_engine_ticket;
struct di_engine_ticket {
    di_engine *engine;
    uint64_t id;
    di_shared_request *shared; /* one reference */
    char *caller;              /* owned; in the place of the request's; NULL: that one */
    int32_t priority_min;
    di_ids ids; /* owned; empty once the core has its copies */
    /* Compiles its grammar: owned, from before others know the ticket to the moment that the engine's thread takes or
     * cancels it. NULL: it has none, or none any more. */
    di_grammar_job *compiling;
    uint32_t events;
    int64_t max_tokens, deadline_ns;
    int32_t n, n_left; /* samples; those without their DONE event */
    di_engine_callback callback;
    void *user;
    di_engine_sample *samples; /* owned [n] */
    uint64_t core_id;          /* 0: not submitted to the core */
    /* lock: engine->mutex */
    di_engine_ticket *next;                              /* in the inbox */
    di_engine_ticket *next_aborted;                      /* in the chain of aborts */
    di_engine_ticket *next_live;                         /* in a bucket of the table of ids */
    bool is_aborted, is_known, is_compiled, is_in_inbox; /* known: it has its number */
};

enum { DI_ENGINE_BUCKETS = 1024 };

struct di_engine {
    di_loaded loaded; /* owned, with core and trace; not written after create */
    di_core *core;
    di_constrainer constrainer;
    di_trace *trace;
    di_chat_vocab vocab;
    bool has_vocab; /* false: vocab_error says why messages can't be encoded */
    di_error vocab_error;
    di_request_options defaults; /* of requests; its lists live in memory */
    di_arena memory;             /* owned */
    int64_t pending_max;         /* samples that may be in the engine; 0: no limit */

    _Atomic int64_t n_pending; /* samples that have a place */
    _Atomic int64_t n_refused_busy, n_refused_invalid;
    _Atomic bool is_closed; /* no new requests */

    pthread_t thread;
    bool has_thread, has_locks;
    pthread_mutex_t mutex;
    pthread_cond_t work; /* something for the engine's thread */
    pthread_cond_t idle; /* n_pending has become 0 */
    /* lock: mutex */
    di_engine_ticket *inbox, *inbox_last;
    di_engine_ticket *aborted;
    di_engine_ticket *live[DI_ENGINE_BUCKETS];
    uint64_t id_last;
    bool is_stopping;
    /* Of the engine's thread alone. */
    int64_t n_cut; /* samples that callbacks ended: the core counts them as failed */
    pthread_mutex_t stats_mutex;
    di_core_stats stats; /* lock: stats_mutex; as of the last step */
};

/* ---- engine_config.c ---- */

/* The caller's structure over the defaults, whatever version of this header it was built with. DI_ERR_ARG for a size
 * that is none. */
di_status di_engine_config_read(di_engine_config *out, const di_engine_config *given, di_error *err);
di_status di_engine_request_read(di_engine_request *out, const di_engine_request *given, di_error *err);
/* Defaults of requests; lists are copied into memory. DI_ERR_ARG, DI_ERR_MEMORY. */
di_status di_engine_defaults(di_request_options *out, const di_engine_config *config, di_arena *memory, di_error *err);
/* A request as api/ knows it. Needs a di_request_deinit on error too. */
di_status di_engine_request_parse(di_request *out, const di_engine_request *given, const di_request_options *defaults,
                                  di_error *err);

/* ---- engine_serving.c ---- */

struct di_shared_request {
    di_request request;
    _Atomic int32_t n_refs;
};

/* An empty one with one reference; NULL when memory is short. */
di_shared_request *di_shared_request_create(di_error *err);
/* What can be seen of a prompt without running it. */
di_status di_engine_prompt_check(const di_engine *engine, const di_request *request, const di_ids *ids, di_error *err);
/* What this engine can't do, of all that a request may ask for. */
di_status di_engine_request_check(const di_engine *engine, const di_request *request, di_error *err);

/* ---- engine_stats.c ---- */

/* Makes the numbers of the last step readable for other threads. */
void di_engine_stats_publish(di_engine *engine);

#endif
