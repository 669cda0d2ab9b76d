/* Grammars of requests: what an output has to follow by its request's formats and tools, compiled beside the engine.
 *
 * Owns: the way from a request to a grammar (which text, what may come before and behind it), and what an engine needs
 * once to hold outputs to grammars: the compiling service with its cache, and the vocabulary, which is made with the
 * first request that has a grammar. Leaves grammars to engine/grammar. */
#ifndef DI_API_CONSTRAIN_H
#define DI_API_CONSTRAIN_H

#include <pthread.h>

#include "engine/engine.h"

struct di_request;

typedef struct di_constrain_options {
    int n_threads;      /* that compile; 0: 2 */
    size_t cache_bytes; /* of compiled grammars; 0: none are kept */
    int64_t timeout_ns; /* of one compilation; 0: 20 s */
} di_constrain_options;

/* Zeroed storage is valid for deinit. Any thread may ask it. */
typedef struct di_constrainer {
    di_grammar_service *service; /* owned */
    const di_loaded *loaded;     /* borrowed */
    pthread_mutex_t mutex;
    bool has_mutex;
    di_grammar_vocab *vocab; /* owned; lock: mutex. NULL until it is needed */
} di_constrainer;

di_status di_constrainer_init(di_constrainer *c, const di_loaded *loaded, const di_constrain_options *options,
                              di_error *err);
void di_constrainer_deinit(di_constrainer *c);

/* Whether the request's output has to follow a grammar. */
bool di_request_is_constrained(const struct di_request *request);
/* Compiles it, or finds it in the cache: waits. *out is a reference, NULL where the output is free. DI_ERR_REQUEST
 * naming the field and what is wrong with it, DI_ERR_RANGE where it passes a limit. */
di_status di_constrainer_compile(di_constrainer *c, const struct di_request *request, di_grammar **out, di_error *err);
/* The same without waiting, as di_grammar_job_start; done may be NULL. Only for constrained requests. The first one
 * makes the vocabulary. */
di_status di_constrainer_start(di_constrainer *c, const struct di_request *request, void (*done)(void *user),
                               void *user, di_grammar_job **job, di_error *err);
/* Puts the field that asked for the grammar before the message of a job's error; di_constrainer_compile has done so.
 */
di_status di_constrain_context(const struct di_request *request, di_status st, di_error *err);
/* The vocabulary that outputs are made of, made where it isn't there yet: takes its time then. DI_ERR_REQUEST where the
 * model has no tokenizer. */
di_status di_constrainer_vocab(di_constrainer *c, const di_grammar_vocab **out, di_error *err);

#endif
