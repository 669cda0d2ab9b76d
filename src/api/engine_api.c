/* The engine of the public API: a loaded model, a core, and the thread that drives it.
 *
 * A request is checked and encoded on its caller's thread, takes a place for each of its samples (that is the bound of
 * the queue) and goes into the inbox. The engine's thread hands what is there to the core, runs a step, and sleeps when
 * there is nothing to do. A sample leaves its place with its DONE event, whichever way it ended; a request is freed
 * with the last one. */
#include "engine_api.h"

#include <math.h>
#include <signal.h>

/* ---- places -------------------------------------------------------------------------------------------------------
 */

static di_status fail_busy(di_engine *e, di_error *err) {
    atomic_fetch_add(&e->n_refused_busy, 1);
    if (atomic_load(&e->is_closed))
        return di_fail(err, DI_ERR_BUSY, "the engine is shutting down and takes no new requests");
    return di_fail(err, DI_ERR_BUSY, "%lld requests run or wait, more than %lld are not taken: try again later",
                   (long long)atomic_load(&e->n_pending), (long long)e->pending_max);
}

/* Whether nothing at all would be taken now, so that nobody has to read the request first. */
static bool is_full(di_engine *e) {
    return atomic_load(&e->is_closed) || (e->pending_max > 0 && atomic_load(&e->n_pending) >= e->pending_max);
}

static void give_places_back(di_engine *e, int32_t n) {
    if (atomic_fetch_sub(&e->n_pending, n) > n)
        return;
    pthread_mutex_lock(&e->mutex);
    pthread_cond_broadcast(&e->idle);
    pthread_mutex_unlock(&e->mutex);
}

static bool take_places(di_engine *e, int32_t n) {
    int64_t before = atomic_fetch_add(&e->n_pending, n);
    if (e->pending_max == 0 || before + n <= e->pending_max)
        return true;
    give_places_back(e, n);
    return false;
}

/* ---- tickets ------------------------------------------------------------------------------------------------------
 */

static void ticket_destroy(di_engine_ticket *t) {
    if (!t)
        return;
    for (int32_t i = 0; t->samples && i < t->n; i++)
        di_reply_deinit(&t->samples[i].reply);
    free(t->samples);
    free(t->caller);
    di_ids_deinit(&t->ids);
    di_shared_request_release(t->shared);
    free(t);
}

static di_engine_ticket **bucket_of(di_engine *e, uint64_t id) {
    return &e->live[id % DI_ENGINE_BUCKETS];
}

/* The last sample is done: nobody finds the ticket any more. */
static void ticket_retire(di_engine *e, di_engine_ticket *t) {
    pthread_mutex_lock(&e->mutex);
    di_engine_ticket **link = bucket_of(e, t->id);
    while (*link != t)
        link = &(*link)->next_live;
    *link = t->next_live;
    for (link = &e->aborted; *link; link = &(*link)->next_aborted) {
        if (*link == t) {
            *link = t->next_aborted;
            break;
        }
    }
    pthread_mutex_unlock(&e->mutex);
    ticket_destroy(t);
}

/* What the core would refuse later is refused here where it takes no more than a look. */
di_status di_engine_prompt_check(const di_engine *e, const di_request *q, const di_ids *ids, di_error *err) {
    int64_t context = e->loaded.plan.engine.context_max;
    if (ids->len == 0)
        return di_fail(err, DI_ERR_REQUEST, "the prompt is empty: expected at least one token");
    if (ids->len >= (uint64_t)context)
        return di_fail(err, DI_ERR_REQUEST, "the prompt has %zu tokens, the context holds %lld with the answer",
                       ids->len, (long long)context);
    return di_sampling_check_vocab(&q->sampling, e->loaded.config.vocab, err);
}

/* Everything but who gets the events. */
static di_status ticket_fill(di_engine *e, di_engine_ticket *t, size_t prompt_idx, di_error *err) {
    const di_request *q = &t->shared->request;
    di_status st = di_engine_request_encode(e, t->shared, prompt_idx, NULL, &t->ids, err);
    if (!st)
        st = di_engine_prompt_check(e, q, &t->ids, err);
    if (st)
        return st;
    t->max_tokens = di_request_max_tokens(q, (int64_t)t->ids.len, e->loaded.plan.engine.context_max);
    t->n = t->n_left = (int32_t)q->n;
    t->samples = calloc((size_t)t->n, sizeof *t->samples);
    if (!t->samples)
        return di_fail(err, DI_ERR_MEMORY, "request of %d samples", t->n);
    for (int32_t i = 0; q->input == DI_INPUT_CHAT && i < t->n; i++)
        di_reply_init(&t->samples[i].reply, q->chat.thinking, di_random_u64());
    return DI_OK;
}

/* With the lock held. */
static void put_into_inbox(di_engine *e, di_engine_ticket *t) {
    if (e->inbox_last) {
        e->inbox_last->next = t;
    } else {
        e->inbox = t;
    }
    e->inbox_last = t;
    t->is_in_inbox = true;
    pthread_cond_signal(&e->work);
}

/* Gives the ticket its number; false: the engine is closed. It comes into the inbox unless its grammar is to come
 * first. From here on it may be gone any time. */
static bool enqueue(di_engine *e, di_engine_ticket *t, uint64_t *id) {
    pthread_mutex_lock(&e->mutex);
    bool is_open = !atomic_load(&e->is_closed);
    if (is_open) {
        di_engine_ticket **bucket;
        t->id = ++e->id_last;
        if (id)
            *id = t->id;
        bucket = bucket_of(e, t->id);
        t->next_live = *bucket;
        *bucket = t;
        t->is_known = true;
        if (!t->compiling || t->is_compiled)
            put_into_inbox(e, t);
    }
    pthread_mutex_unlock(&e->mutex);
    return is_open;
}

static void on_compiled(void *user) {
    di_engine_ticket *t = user;
    di_engine *e = t->engine;
    pthread_mutex_lock(&e->mutex);
    t->is_compiled = true;
    if (t->is_known)
        put_into_inbox(e, t);
    pthread_mutex_unlock(&e->mutex);
}

/* A ticket for one prompt of a request, of which it takes a reference of its own. NULL: *st and err say why not. */
static di_engine_ticket *ticket_create(di_engine *e, di_shared_request *shared, size_t prompt_idx, di_status *st,
                                       di_error *err) {
    di_engine_ticket *t = calloc(1, sizeof *t);
    if (!t) {
        *st = di_fail(err, DI_ERR_MEMORY, "request");
        return NULL;
    }
    t->engine = e;
    t->shared = di_shared_request_acquire(shared);
    *st = ticket_fill(e, t, prompt_idx, err);
    if (*st == DI_OK)
        return t;
    atomic_fetch_add(&e->n_refused_invalid, 1);
    ticket_destroy(t);
    return NULL;
}

/* Lets a ticket go whose places are taken; on error it is freed, and its places are given back. */
static di_status ticket_submit(di_engine *e, di_engine_ticket *t, uint64_t *id, di_error *err) {
    int32_t n = t->n;
    di_status st = DI_OK;
    if (di_request_is_constrained(&t->shared->request))
        st = di_constrainer_start(&e->constrainer, &t->shared->request, on_compiled, t, &t->compiling, err);
    if (st || !enqueue(e, t, id)) {
        di_grammar_job_cancel(t->compiling);
        give_places_back(e, n);
        ticket_destroy(t);
        return st ? st : fail_busy(e, err);
    }
    return DI_OK;
}

di_status di_engine_places_take(di_engine *e, int64_t n, di_error *err) {
    return !atomic_load(&e->is_closed) && take_places(e, (int32_t)n) ? DI_OK : fail_busy(e, err);
}

di_status di_engine_look(di_engine *e, di_error *err) {
    return is_full(e) ? fail_busy(e, err) : DI_OK;
}

int64_t di_engine_places_max(const di_engine *e) {
    return e->pending_max;
}

void di_engine_places_give_back(di_engine *e, int64_t n) {
    if (n > 0)
        give_places_back(e, (int32_t)n);
}

di_status di_engine_request_submit(di_engine *e, di_shared_request *shared, size_t prompt_idx,
                                   const di_serving_options *options, di_engine_callback callback, void *user,
                                   di_serving_ticket *ticket, di_error *err) {
    di_status st;
    di_engine_ticket *t = ticket_create(e, shared, prompt_idx, &st, err);
    if (t && options->caller && !(t->caller = strdup(options->caller))) {
        ticket_destroy(t);
        t = NULL;
        st = di_fail(err, DI_ERR_MEMORY, "request");
    }
    if (!t) {
        give_places_back(e, (int32_t)shared->request.n);
        return st;
    }
    t->callback = callback;
    t->user = user;
    t->events = options->events;
    t->priority_min = options->priority_min;
    ticket->n_prompt = (int64_t)t->ids.len;
    return ticket_submit(e, t, &ticket->id, err);
}

di_status di_engine_submit(di_engine *e, const di_engine_request *request, di_engine_callback callback, void *user,
                           uint64_t *id, di_error *err) {
    di_engine_request given;
    di_engine_ticket *t = NULL;
    di_status st = di_engine_request_read(&given, request, err);
    if (st)
        return st;
    if (!callback)
        return di_fail(err, DI_ERR_ARG, "di_engine_submit: callback is NULL, expected a function");
    if (is_full(e))
        return fail_busy(e, err);
    di_shared_request *shared = di_shared_request_create(err);
    if (!shared)
        return DI_ERR_MEMORY;
    st = di_engine_request_parse(&shared->request, &given, &e->defaults, err);
    if (!st)
        st = di_engine_request_check(e, &shared->request, err);
    if (st) {
        atomic_fetch_add(&e->n_refused_invalid, 1);
    } else {
        t = ticket_create(e, shared, 0, &st, err);
    }
    di_shared_request_release(shared);
    if (!t)
        return st;
    t->callback = callback;
    t->user = user;
    t->events = given.events;
    t->deadline_ns = given.deadline_ms > 0 ? di_clock_ns() + given.deadline_ms * 1000000 : 0;
    t->priority_min = INT32_MIN;
    if (!take_places(e, t->n)) {
        ticket_destroy(t);
        return fail_busy(e, err);
    }
    return ticket_submit(e, t, id, err);
}

bool di_engine_abort(di_engine *e, uint64_t id) {
    pthread_mutex_lock(&e->mutex);
    di_engine_ticket *t = *bucket_of(e, id);
    while (t && t->id != id)
        t = t->next_live;
    if (t && !t->is_aborted) {
        t->is_aborted = true;
        t->next_aborted = e->aborted;
        e->aborted = t;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->mutex);
    return t != NULL;
}

/* ---- events -------------------------------------------------------------------------------------------------------
 */

/* A result as the caller sees it, and what its JSON is made from. */
typedef struct result_view {
    di_engine_result result; /* first: the caller's pointer is the view's */
    const di_request *request;
    const di_generation *gen;
    const di_reply *reply; /* NULL without messages */
} result_view;

/* The sampler's pairs are handed out as they are. */
_Static_assert(sizeof(di_engine_logprob) == sizeof(di_logprob) &&
                   offsetof(di_engine_logprob, logprob) == offsetof(di_logprob, logprob),
               "di_engine_logprob has the layout of di_logprob");
static const di_engine_logprob *pairs_of(const di_logprob *top) {
    return (const di_engine_logprob *)(const void *)top;
}

static int send(const di_engine_ticket *t, di_engine_event *event, const di_generation *gen) {
    event->struct_size = sizeof *event;
    event->id = t->id;
    event->index = gen->index;
    event->n_cached = gen->n_cached;
    return t->callback(t->user, event);
}

static int send_token(const di_engine_ticket *t, const di_generation *gen) {
    int64_t last = gen->n_tokens - 1;
    return send(t,
                &(di_engine_event){
                    .kind = DI_ENGINE_TOKEN,
                    .token = gen->tokens[last],
                    .logprob = gen->logprobs ? gen->logprobs[last] : NAN,
                    .top = gen->top ? pairs_of(gen->top + last * gen->n_top) : NULL,
                    .n_top = gen->top ? gen->n_top : 0,
                    .call_id = -1,
                },
                gen);
}

static int send_output(const di_engine_ticket *t, const di_generation *gen, const di_parser_event *parsed) {
    static const di_engine_output outputs[] = {
        [DI_PARSER_REASONING] = DI_ENGINE_REASONING,   [DI_PARSER_CONTENT] = DI_ENGINE_CONTENT,
        [DI_PARSER_CALL_BEGIN] = DI_ENGINE_CALL_BEGIN, [DI_PARSER_CALL_ARGS] = DI_ENGINE_CALL_ARGS,
        [DI_PARSER_CALL_END] = DI_ENGINE_CALL_END,
    };
    if (parsed->kind == DI_PARSER_DONE)
        return 0;
    return send(t,
                &(di_engine_event){
                    .kind = DI_ENGINE_OUTPUT,
                    .output = outputs[parsed->kind],
                    .call_id = parsed->call_id,
                    .is_cut = parsed->is_cut,
                    .text = parsed->text,
                    .text_len = parsed->len,
                },
                gen);
}

static int64_t since(int64_t start_ns, int64_t end_ns) {
    return end_ns > start_ns ? end_ns - start_ns : 0;
}

static void send_done(const di_engine_ticket *t, const di_generation *gen, const di_reply *reply) {
    result_view view = {
        .request = &t->shared->request,
        .gen = gen,
        .reply = reply,
        .result =
            {
                .struct_size = sizeof view.result,
                .finish_reason = di_finish_name(gen->finish),
                .text = gen->text,
                .text_len = gen->text_len,
                .prompt_tokens = gen->prompt,
                .n_prompt = gen->n_prompt,
                .tokens = gen->tokens,
                .n_tokens = gen->n_tokens,
                .n_cached = gen->n_cached,
                .n_reasoning = gen->reasoning_tokens,
                .logprobs = gen->logprobs,
                .top = pairs_of(gen->top),
                .n_top = gen->n_top,
                .n_prompt_top = gen->n_prompt_top,
                .prompt_logprobs = gen->prompt_logprobs,
                .prompt_top = pairs_of(gen->prompt_top),
                .stop_string = gen->stop_hit,
                .stop_token = gen->stop_token,
                .has_seed = gen->has_seed,
                .seed = gen->seed,
                .queued_ns = since(gen->submit_ns, gen->start_ns),
                .first_ns = since(gen->submit_ns, gen->first_ns),
                .total_ns = since(gen->submit_ns, gen->last_ns),
                .n_preempted = gen->n_preempted,
                .n_drafts = gen->n_drafts,
                .n_accepted = gen->n_accepted,
            },
    };
    if (gen->finish == DI_FINISH_ERROR)
        view.result.error = gen->error;
    send(t, &(di_engine_event){.kind = DI_ENGINE_DONE, .call_id = -1, .result = &view.result}, gen);
}

/* Sends a sample's last event, gives its place back, and frees the ticket with the last sample. */
static void end_sample(di_engine_ticket *t, const di_generation *gen) {
    di_engine *e = t->engine;
    di_engine_sample *sample = &t->samples[gen->index];
    send_done(t, gen, t->shared->request.input == DI_INPUT_CHAT ? &sample->reply : NULL);
    di_reply_deinit(&sample->reply);
    if (--t->n_left == 0)
        ticket_retire(e, t);
    give_places_back(e, 1);
}

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    di_engine_ticket *t = user;
    di_engine_sample *sample = &t->samples[gen->index];
    di_status st = DI_OK;
    int stop = 0;
    switch (event->kind) {
    case DI_CORE_TOKEN:
        if (t->events & DI_ENGINE_WANTS_TOKENS)
            stop = send_token(t, gen);
        break;
    case DI_CORE_TEXT:
        if (t->events & DI_ENGINE_WANTS_TEXT)
            stop = send(
                t,
                &(di_engine_event){.kind = DI_ENGINE_TEXT, .call_id = -1, .text = event->text, .text_len = event->len},
                gen);
        break;
    case DI_CORE_OUTPUT:
        st = di_reply_push(&sample->reply, event->parsed, err);
        if (!st && t->events & DI_ENGINE_WANTS_TEXT)
            stop = send_output(t, gen, event->parsed);
        break;
    case DI_CORE_DONE:
        if (sample->is_cut && gen->finish == DI_FINISH_ERROR) {
            di_generation shown = *gen; /* the core knows no other way to end one sample */
            shown.finish = DI_FINISH_ABORT;
            shown.error = (di_error){0};
            t->engine->n_cut++;
            end_sample(t, &shown);
        } else {
            end_sample(t, gen);
        }
        return DI_OK;
    }
    if (!st && stop) {
        sample->is_cut = true;
        st = di_fail(err, DI_ERR_CANCELLED, "ended by its callback");
    }
    return st;
}

/* ---- the engine's thread ------------------------------------------------------------------------------------------
 */

/* A request that the core refuses ends like any other, and one that was aborted before (err NULL). */
static void refuse_ticket(di_engine_ticket *t, di_status st, const di_error *err) {
    static const int32_t none[1]; /* lists without items are not NULL */
    static const di_error no_error;
    di_generation gen = {
        .finish = err ? DI_FINISH_ERROR : DI_FINISH_ABORT,
        .error = err ? *err : no_error,
        .text = "",
        .prompt = none,
        .tokens = none,
        .stop_hit = -1,
        .stop_token = -1,
    };
    gen.error.code = st;
    for (int32_t i = 0, n = t->n; i < n; i++) {
        gen.index = i;
        end_sample(t, &gen);
    }
}

/* The grammar that the ticket's output follows, compiled by now; NULL: none. */
static di_status take_grammar(di_engine *e, di_engine_ticket *t, di_grammar **grammar, di_grammar_source *source,
                              const di_constraint_source **constraint, di_error *err) {
    const di_grammar_vocab *vocab;
    *grammar = NULL;
    *constraint = NULL;
    if (!t->compiling)
        return DI_OK;
    di_grammar_job *job = t->compiling;
    t->compiling = NULL;
    di_status st = di_constrain_context(&t->shared->request, di_grammar_job_take(job, grammar, err), err);
    if (!st)
        st = di_constrainer_vocab(&e->constrainer, &vocab, err);
    if (!st)
        *constraint = di_grammar_source_init(source, *grammar, vocab);
    return st;
}

static void hand_over(di_engine *e, di_engine_ticket *t, bool is_aborted) {
    const di_request *q = &t->shared->request;
    di_error err = {0};
    di_grammar *grammar;
    di_grammar_source source;
    const di_constraint_source *constraint;
    di_status st = take_grammar(e, t, &grammar, &source, &constraint, &err);
    if (st) {
        di_grammar_release(grammar);
        refuse_ticket(t, st, &err);
        return;
    }
    di_submission submission = {
        .ids = t->ids.data,
        .n_ids = t->ids.len,
        .sampling = q->sampling,
        .n = t->n,
        .parse = q->input == DI_INPUT_CHAT ? &q->parse : NULL,
        .constraint = constraint,
        .forced_first = q->forced,
        .n_forced_first = q->n_forced,
        .priority = DI_MAX(q->priority, t->priority_min),
        .caller = t->caller ? t->caller : q->caller.data,
        .caller_len = t->caller ? strlen(t->caller) : q->caller.len,
        .cache_salt = q->cache_salt.data,
        .cache_salt_len = q->cache_salt.len,
        .deadline_ns = t->deadline_ns,
        .callback = on_event,
        .user = t,
    };
    submission.sampling.max_tokens = t->max_tokens;
    st = di_core_submit(e->core, &submission, &t->core_id, &err);
    di_grammar_release(grammar);
    if (st) {
        refuse_ticket(t, st, &err);
        return;
    }
    di_ids_deinit(&t->ids);
    if (is_aborted)
        di_core_abort(e->core, t->core_id);
}

/* Ends a request that waits for its grammar; one whose grammar has just come is in the inbox instead, and ends there.
 */
static void end_compiling(di_engine *e, di_engine_ticket *t) {
    if (!t->compiling)
        return;
    di_grammar_job_cancel(t->compiling);
    t->compiling = NULL;
    pthread_mutex_lock(&e->mutex);
    bool is_in_inbox = t->is_in_inbox;
    pthread_mutex_unlock(&e->mutex);
    if (!is_in_inbox)
        refuse_ticket(t, DI_OK, NULL);
}

/* Nobody submits any more: what waits for a grammar ends now. */
static void end_all_compiling(di_engine *e) {
    for (int i = 0; i < DI_ENGINE_BUCKETS; i++) {
        for (di_engine_ticket *t = e->live[i], *next; t; t = next) {
            next = t->next_live;
            if (!t->core_id)
                end_compiling(e, t);
        }
    }
}

/* Waits until there is something to do, unless the core has work, and takes it. A request that was aborted before it
 * got here is handed over all the same, so that it ends in the one way that there is. */
static bool take_work(di_engine *e, bool is_busy) {
    pthread_mutex_lock(&e->mutex);
    while (!is_busy && !e->inbox && !e->aborted && !e->is_stopping)
        pthread_cond_wait(&e->work, &e->mutex);
    di_engine_ticket *inbox = e->inbox, *aborted = e->aborted;
    e->inbox = e->inbox_last = e->aborted = NULL;
    bool is_stopping = e->is_stopping;
    for (di_engine_ticket *t = aborted; t; t = t->next_aborted) {
        if (t->core_id)
            di_core_abort(e->core, t->core_id);
    }
    pthread_mutex_unlock(&e->mutex);
    for (di_engine_ticket *t = aborted, *next; t; t = next) {
        next = t->next_aborted;
        if (!t->core_id)
            end_compiling(e, t);
    }
    for (di_engine_ticket *t = inbox, *next; t; t = next) {
        next = t->next;
        pthread_mutex_lock(&e->mutex);
        bool is_aborted = t->is_aborted;
        pthread_mutex_unlock(&e->mutex);
        hand_over(e, t, is_aborted);
    }
    return is_stopping;
}

static void *run_engine(void *arg) {
    di_engine *e = arg;
    bool is_busy = false, is_stopping = false;
    (void)pthread_setname_np(pthread_self(), "engine");
    while (is_busy || !is_stopping) {
        is_stopping = take_work(e, is_busy);
        if (is_stopping) {
            end_all_compiling(e);
            take_work(e, true); /* requests whose grammars have come since, the last that come here */
            di_core_abort_all(e->core);
        }
        is_busy = di_core_step(e->core);
        di_engine_stats_publish(e);
    }
    return NULL;
}

static bool is_engine_thread(const di_engine *e) {
    return e->has_thread && pthread_equal(pthread_self(), e->thread);
}

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

static di_status make_locks(di_engine *e, di_error *err) {
    pthread_condattr_t attr;
    bool done = pthread_condattr_init(&attr) == 0;
    /* Draining waits by the monotonic clock, which nobody sets. */
    done = done && pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0;
    done = done && pthread_mutex_init(&e->mutex, NULL) == 0 && pthread_mutex_init(&e->stats_mutex, NULL) == 0 &&
           pthread_cond_init(&e->work, &attr) == 0 && pthread_cond_init(&e->idle, &attr) == 0;
    e->has_locks = done;
    pthread_condattr_destroy(&attr);
    return done ? DI_OK : di_fail(err, DI_ERR_MEMORY, "locks of an engine");
}

static di_status open_engine(di_engine *e, const di_engine_config *config, di_error *err) {
    di_load_options load;
    di_status st;
    if ((st = di_engine_load_options(&load, config, err)) ||
        (st = di_engine_defaults(&e->defaults, config, &e->memory, err)) || (st = make_locks(e, err)))
        return st;
    if ((st = di_trace_create(&e->trace, err)) ||
        (config->trace && (st = di_trace_start(e->trace, config->trace, err))))
        return st;
    load.trace = e->trace;
    const di_constrain_options constrain = {
        .n_threads = config->grammar_threads,
        .cache_bytes = (size_t)config->grammar_cache_bytes,
        .timeout_ns = (int64_t)llround(config->grammar_timeout_s * 1e9),
    };
    if ((st = di_load_open(&e->loaded, &load, err)) || (st = di_load_core(&e->loaded, &e->core, err)) ||
        (st = di_constrainer_init(&e->constrainer, &e->loaded, &constrain, err)))
        return st;
    e->pending_max = config->queue_max > 0 ? config->queue_max + config->seqs_max : 0;
    if (e->loaded.tok) {
        e->has_vocab = di_chat_vocab_init(&e->vocab, e->loaded.tok, &e->vocab_error) == DI_OK;
    } else {
        di_fail(&e->vocab_error, DI_ERR_REQUEST, "the model has no tokenizer: only prompts of token ids can be run");
    }
    di_engine_stats_publish(e);
    if (pthread_create(&e->thread, NULL, run_engine, e) != 0)
        return di_fail(err, DI_ERR_MEMORY, "the engine's thread could not be started");
    e->has_thread = true;
    return DI_OK;
}

static void close_engine(di_engine *e) {
    di_error err = {0};
    di_core_destroy(e->core);
    di_constrainer_deinit(&e->constrainer);
    di_load_close(&e->loaded);
    if (di_trace_close(e->trace, &err))
        di_warn("%s", err.message);
    di_arena_deinit(&e->memory);
    if (e->has_locks) {
        pthread_cond_destroy(&e->idle);
        pthread_cond_destroy(&e->work);
        pthread_mutex_destroy(&e->stats_mutex);
        pthread_mutex_destroy(&e->mutex);
    }
    free(e);
}

/* Signals from outside belong to the program's own threads: those of an engine are made with all of them blocked but
 * the ones that a thread causes itself. */
static void block_signals(sigset_t *before) {
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < DI_COUNT(own); i++)
        sigdelset(&set, own[i]);
    pthread_sigmask(SIG_BLOCK, &set, before);
}

di_status di_engine_create(const di_engine_config *config, di_engine **out, di_error *err) {
    di_engine_config read;
    di_status st = di_engine_config_read(&read, config, err);
    if (st)
        return st;
    di_engine *e = calloc(1, sizeof *e);
    if (!e)
        return di_fail(err, DI_ERR_MEMORY, "engine");
    sigset_t before;
    block_signals(&before);
    st = open_engine(e, &read, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (st) {
        close_engine(e);
    } else {
        *out = e;
    }
    return st;
}

void di_engine_destroy(di_engine *e) {
    if (!e || is_engine_thread(e))
        return;
    pthread_mutex_lock(&e->mutex);
    atomic_store(&e->is_closed, true);
    e->is_stopping = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->mutex);
    pthread_join(e->thread, NULL);
    close_engine(e);
}

di_status di_engine_drain(di_engine *e, int64_t timeout_ms, di_error *err) {
    if (is_engine_thread(e))
        return di_fail(err, DI_ERR_ARG, "di_engine_drain: called from a callback, which it would wait for");
    int64_t end_ns = di_clock_ns() + DI_MIN(timeout_ms, INT64_MAX / 4000000) * 1000000;
    struct timespec end = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    int code = 0;
    pthread_mutex_lock(&e->mutex);
    atomic_store(&e->is_closed, true);
    while (atomic_load(&e->n_pending) > 0 && code == 0) {
        code =
            timeout_ms < 0 ? pthread_cond_wait(&e->idle, &e->mutex) : pthread_cond_timedwait(&e->idle, &e->mutex, &end);
    }
    int64_t n_left = atomic_load(&e->n_pending);
    pthread_mutex_unlock(&e->mutex);
    if (n_left == 0)
        return DI_OK;
    return di_fail(err, DI_ERR_BUSY, "%lld requests still run or wait after %lld ms", (long long)n_left,
                   (long long)timeout_ms);
}

const di_tokenizer *di_engine_tokenizer(const di_engine *e) {
    return e->loaded.tok;
}

int64_t di_engine_context_max(const di_engine *e) {
    return e->loaded.plan.engine.context_max;
}

/* ---- results as JSON ----------------------------------------------------------------------------------------------
 */

/* Hands a line out without its line feed. */
static di_status give_line(di_strbuf *line, char **json, size_t *len, di_error *err) {
    di_status st = di_strbuf_status(line, err);
    if (st) {
        di_strbuf_deinit(line);
        return st;
    }
    di_strbuf_truncate(line, line->len - 1);
    *json = line->data;
    if (len)
        *len = line->len;
    return DI_OK;
}

di_status di_engine_result_json(const di_engine_result *result, char **json, size_t *len, di_error *err) {
    const result_view *view = (const result_view *)(const void *)result;
    di_strbuf line = {0};
    di_line_result(&line, view->request, view->gen, view->reply);
    return give_line(&line, json, len, err);
}

di_status di_engine_refusal_json(const di_engine_request *request, const di_error *refused, char **json, size_t *len,
                                 di_error *err) {
    di_engine_request given;
    di_status st = di_engine_request_read(&given, request, err);
    if (st)
        return st;
    /* Read once more for its id and the place of what was wrong. */
    di_request q;
    di_request_options options;
    di_strbuf line = {0};
    di_request_options_init(&options, false);
    (void)di_engine_request_parse(&q, &given, &options, NULL);
    di_line_error(&line, &q, refused->code, refused);
    di_request_deinit(&q);
    return give_line(&line, json, len, err);
}
