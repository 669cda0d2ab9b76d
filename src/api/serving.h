/* An engine for the programs inside: requests that are read once and held by several (the engine, and the server that
 * writes their replies), and traces on demand. Included by api.h.
 *
 * Where the public API takes a body and keeps what it read to itself, a server has to know what was asked: whether the
 * reply is streamed, in whose form, with which tools. So it opens a request, looks at it, and submits it, once for each
 * of its prompts. Threads: any. */
#ifndef DI_API_SERVING_H
#define DI_API_SERVING_H

#include "deepinfer/deepinfer.h"

#include "engine/engine.h"
#include "text/text.h"

/* How an engine loads its model; strings are borrowed from the configuration. Without trace. DI_ERR_ARG. */
di_status di_engine_load_options(di_load_options *out, const di_engine_config *config, di_error *err);

/* Read-only from open on; freed with its last reference. */
typedef struct di_shared_request di_shared_request;

/* Reads a body by the engine's defaults. *out is set on a refusal too (request->refusal and param say more), and NULL
 * only when memory is short. Checks what needs no prompt: images, and that the model has a tokenizer where one is
 * needed. */
di_status di_engine_request_open(di_engine *engine, di_api_kind api, const char *body, size_t len,
                                 di_shared_request **out, di_error *err);
const di_request *di_shared_request_get(const di_shared_request *shared);
di_shared_request *di_shared_request_acquire(di_shared_request *shared);
void di_shared_request_release(di_shared_request *shared); /* NULL is fine */

/* Renders and encodes one of its prompts, as di_request_encode_prompt. */
di_status di_engine_request_encode(di_engine *engine, const di_shared_request *shared, size_t prompt_idx,
                                   di_prompt *prompt, di_ids *ids, di_error *err);

/* Whether the model has all of these ids; the engine itself finds out when it takes a prompt. DI_ERR_REQUEST. */
di_status di_engine_ids_check(const di_engine *engine, const di_ids *ids, di_error *err);

/* Whether the engine would take one of its prompts, by its ids and length. */
di_status di_engine_request_try(di_engine *engine, const di_shared_request *shared, size_t prompt_idx, di_error *err);

/* What a server adds to what the body says. */
typedef struct di_serving_options {
    const char *caller;   /* who asks, for fair shares; NULL: what the body says */
    int32_t priority_min; /* the body can't have a lower one, which would go first */
    uint32_t events;      /* DI_ENGINE_WANTS_ bits */
} di_serving_options;

/* Takes places for n samples, or none: DI_ERR_BUSY. Each is given back by the sample's end, by the submission that
 * fails, or here. */
di_status di_engine_places_take(di_engine *engine, int64_t n, di_error *err);
void di_engine_places_give_back(di_engine *engine, int64_t n);
/* Places that there are in all; 0: no limit. */
int64_t di_engine_places_max(const di_engine *engine);
/* Whether nothing at all would be taken now, so that nobody has to read a body first: DI_ERR_BUSY. */
di_status di_engine_look(di_engine *engine, di_error *err);

/* A prompt that was taken. */
typedef struct di_serving_ticket {
    uint64_t id; /* for di_engine_abort; set before the first event */
    int64_t n_prompt;
} di_serving_ticket;

/* Queues one of its prompts (all of its samples), as di_engine_submit does, into places that the caller has taken: they
 * are the engine's from here on, also on error. The engine takes a reference of its own. */
di_status di_engine_request_submit(di_engine *engine, di_shared_request *shared, size_t prompt_idx,
                                   const di_serving_options *options, di_engine_callback callback, void *user,
                                   di_serving_ticket *ticket, di_error *err);

/* Makes what the first request with a grammar would have to wait for. */
di_status di_engine_warm(di_engine *engine, di_error *err);

/* Starts and ends a trace of what runs, in a file at `path`. DI_ERR_BUSY: one is being written. */
di_status di_engine_trace_start(di_engine *engine, const char *path, di_error *err);
di_status di_engine_trace_stop(di_engine *engine, di_error *err);

#endif
