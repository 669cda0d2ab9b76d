/* The four APIs: a body into samples of the engine, and what comes of them into a reply or a stream.
 *
 * The engine's thread must not wait for anybody, so its callback only copies what came into the exchange's queue of
 * records and wakes the connection. An HTTP thread takes the queue and writes the reply's JSON. While it writes, pieces
 * of one text gather in one record, so that a reader who is slower than the engine gets fewer and longer pieces and
 * costs nobody anything.
 *
 *   record   kind, choice, call, length | text, or a token with its log-probabilities, or how a sample ended
 */
#include "server_internal.h"

#include <math.h>

typedef enum record_kind {
    RECORD_REASONING,
    RECORD_CONTENT,
    RECORD_CALL_BEGIN,
    RECORD_CALL_ARGS,
    RECORD_CALL_END, /* one byte: is_cut */
    RECORD_TOKEN,    /* a token_record and its pairs */
    RECORD_DONE      /* a done_record and the error's message */
} record_kind;

typedef struct record {
    int32_t kind, choice;
    int64_t call_id;
    size_t len;
} record;

typedef struct token_record {
    int32_t token, n_top;
    float logprob;
} token_record;

typedef struct done_record {
    di_finish finish;
    di_status status; /* of DI_FINISH_ERROR */
    int64_t stop_string;
    uint64_t seed;
    bool has_seed;
    di_reply_usage usage;
} done_record;

/* One prompt: a request of the engine. */
typedef struct part {
    di_exchange *x;
    int32_t first_choice;
    uint64_t id; /* lock: x->mutex; 0: not submitted */
    int64_t n_prompt;
    di_ids ids; /* of the prompt, for `echo` */
} part;

/* One sample. */
typedef struct choice {
    const part *part;
    di_reply_stream *stream; /* owned */
    bool is_started;
    int64_t n_tokens; /* so far, where they are told */
    int64_t n_cached; /* of the prompt. lock: x->mutex */
    int64_t last_ns;  /* when its last piece came; the engine's thread alone */
    /* For `echo`, copied when the sample has ended: [n_prompt], [n_prompt, n_top]. */
    float *prompt_logprobs;
    di_logprob *prompt_top;
    int32_t n_prompt_top;
} choice;

struct di_generate {
    di_shared_request *shared; /* one reference */
    const di_request *q;
    char id[DI_REPLY_ID_MAX];
    part *parts; /* owned [n_parts] */
    size_t n_parts;
    choice *choices; /* owned [n_choices] */
    size_t n_choices;
    bool waits_for_all; /* nothing can be written before every sample has ended */
    /* Of the thread that writes the reply. */
    di_strbuf out;   /* server-sent events that the socket has not taken */
    size_t out_at;   /* taken already */
    di_strbuf taken; /* records being written */
    size_t n_ended;  /* samples */
    bool is_ended;
    di_reply_usage usage; /* of all samples that have ended */
    di_error failure;     /* of a whole reply */
    /* lock: x->mutex */
    di_strbuf records;
    size_t last_record; /* where the last one begins */
    int32_t n_left;     /* samples without their end */
    bool is_open;       /* all parts are submitted: the connection may be woken */
    bool is_refused;    /* a part was refused: nobody reads what comes of the others */
    bool has_failed;    /* a sample ended by an error */
};

/* ---- from the engine ----------------------------------------------------------------------------------------------
 */

static void put_record(struct di_generate *g, record_kind kind, int32_t choice_idx, int64_t call_id, const void *a,
                       size_t n_a, const void *b, size_t n_b) {
    record head = {.kind = (int32_t)kind, .choice = choice_idx, .call_id = call_id, .len = n_a + n_b};
    if (g->records.failed)
        return; /* write_records will see it */
    if (kind <= RECORD_CONTENT && g->records.len > 0) {
        record last;
        memcpy(&last, g->records.data + g->last_record, sizeof last);
        if (last.kind == head.kind && last.choice == choice_idx) {
            last.len += n_a;
            memcpy(g->records.data + g->last_record, &last, sizeof last);
            di_strbuf_append(&g->records, a, n_a);
            return;
        }
    }
    g->last_record = g->records.len;
    di_strbuf_append(&g->records, (const char *)&head, sizeof head);
    if (n_a > 0)
        di_strbuf_append(&g->records, a, n_a);
    if (n_b > 0)
        di_strbuf_append(&g->records, b, n_b);
}

static void put_output(struct di_generate *g, int32_t at, const di_engine_event *event) {
    static const record_kind kinds[] = {
        [DI_ENGINE_REASONING] = RECORD_REASONING,   [DI_ENGINE_CONTENT] = RECORD_CONTENT,
        [DI_ENGINE_CALL_BEGIN] = RECORD_CALL_BEGIN, [DI_ENGINE_CALL_ARGS] = RECORD_CALL_ARGS,
        [DI_ENGINE_CALL_END] = RECORD_CALL_END,
    };
    if (event->output == DI_ENGINE_CALL_END) {
        const char is_cut = (char)event->is_cut;
        put_record(g, RECORD_CALL_END, at, event->call_id, &is_cut, 1, NULL, 0);
    } else {
        put_record(g, kinds[event->output], at, event->call_id, event->text, event->text_len, NULL, 0);
    }
}

static void put_token(struct di_generate *g, int32_t at, const di_engine_event *event) {
    const token_record token = {.token = event->token, .n_top = event->n_top, .logprob = event->logprob};
    put_record(g, RECORD_TOKEN, at, -1, &token, sizeof token, event->top, (size_t)event->n_top * sizeof *event->top);
}

static void keep_prompt_logprobs(choice *c, const di_engine_result *r) {
    size_t n = (size_t)r->n_prompt, n_top = n * (size_t)r->n_prompt_top;
    if (!r->prompt_logprobs)
        return;
    c->prompt_logprobs = malloc(n * sizeof *c->prompt_logprobs);
    c->prompt_top = n_top ? malloc(n_top * sizeof *c->prompt_top) : NULL;
    if (!c->prompt_logprobs || (n_top && !c->prompt_top))
        return; /* the reply then has none */
    memcpy(c->prompt_logprobs, r->prompt_logprobs, n * sizeof *c->prompt_logprobs);
    if (n_top)
        memcpy(c->prompt_top, r->prompt_top, n_top * sizeof *c->prompt_top);
    c->n_prompt_top = r->n_prompt_top;
}

static void put_done(struct di_generate *g, int32_t at, const di_engine_result *r) {
    done_record done = {
        .finish = DI_FINISH_ERROR,
        .status = r->error.code,
        .stop_string = r->stop_string,
        .seed = r->seed,
        .has_seed = r->has_seed,
        .usage =
            {
                .prompt_tokens = r->n_prompt,
                .completion_tokens = r->n_tokens,
                .cached_tokens = r->n_cached,
                .reasoning_tokens = r->n_reasoning,
                .accepted_tokens = r->n_accepted,
                .rejected_tokens = r->n_drafts - r->n_accepted,
            },
    };
    (void)di_finish_parse(r->finish_reason, &done.finish);
    if (done.finish == DI_FINISH_ERROR || done.finish == DI_FINISH_ABORT)
        g->has_failed = true;
    if (g->q->echo)
        keep_prompt_logprobs(&g->choices[at], r);
    put_record(g, RECORD_DONE, at, -1, &done, sizeof done, r->error.message, strlen(r->error.message));
}

static void count_done(di_server *server, const di_engine_result *r) {
    di_metrics *m = &server->metrics;
    di_finish finish = DI_FINISH_ERROR;
    (void)di_finish_parse(r->finish_reason, &finish);
    atomic_fetch_add(&m->n_finished[finish], 1);
    if (r->n_tokens == 0)
        return;
    di_metrics_time(m, DI_TIME_FIRST, r->first_ns);
    di_metrics_time(m, DI_TIME_WHOLE, r->total_ns);
    di_metrics_time(m, DI_TIME_QUEUED, r->queued_ns);
    if (r->n_tokens > 1)
        di_metrics_time(m, DI_TIME_PER_TOKEN, (r->total_ns - r->first_ns) / (r->n_tokens - 1));
}

static void count_piece(di_server *server, choice *c) {
    int64_t now = di_clock_ns();
    if (c->last_ns)
        di_metrics_time(&server->metrics, DI_TIME_BETWEEN, now - c->last_ns);
    c->last_ns = now;
}

/* Whether there is something that an HTTP thread could do. With the mutex held. */
static bool is_ripe(const struct di_generate *g) {
    if (!g->is_open || g->is_refused)
        return false;
    if (g->n_left == 0 || g->has_failed)
        return true;
    return g->q->is_stream && !g->waits_for_all && g->records.len > 0;
}

static int on_event(void *user, const di_engine_event *event) {
    part *p = user;
    di_exchange *x = p->x;
    struct di_generate *g = x->generate;
    int32_t at = p->first_choice + event->index;
    if (event->kind == DI_ENGINE_DONE) {
        count_done(x->server, event->result);
    } else if (event->kind != DI_ENGINE_TOKEN) {
        count_piece(x->server, &g->choices[at]);
    }
    pthread_mutex_lock(&x->mutex);
    bool is_unread = x->is_gone || g->is_refused;
    g->choices[at].n_cached = event->n_cached;
    switch (event->kind) {
    case DI_ENGINE_TOKEN:
        if (!is_unread)
            put_token(g, at, event);
        break;
    case DI_ENGINE_TEXT:
        if (!is_unread)
            put_record(g, RECORD_CONTENT, at, -1, event->text, event->text_len, NULL, 0);
        break;
    case DI_ENGINE_OUTPUT:
        if (!is_unread)
            put_output(g, at, event);
        break;
    case DI_ENGINE_DONE:
        put_done(g, at, event->result);
        g->n_left--;
        break;
    }
    if (is_ripe(g))
        di_exchange_wake(x);
    pthread_mutex_unlock(&x->mutex);
    if (event->kind == DI_ENGINE_DONE)
        di_exchange_release(x);
    return is_unread;
}

/* ---- submission ---------------------------------------------------------------------------------------------------
 */

static const char *const id_prefixes[] = {[DI_API_CHAT] = "chatcmpl-",
                                          [DI_API_RESPONSES] = "resp_",
                                          [DI_API_MESSAGES] = "msg_",
                                          [DI_API_COMPLETIONS] = "cmpl-"};
static const di_reply_protocol protocols[] = {[DI_API_CHAT] = DI_REPLY_CHAT,
                                              [DI_API_RESPONSES] = DI_REPLY_RESPONSES,
                                              [DI_API_MESSAGES] = DI_REPLY_MESSAGES,
                                              [DI_API_COMPLETIONS] = DI_REPLY_COMPLETIONS};

bool di_generate_check_model(di_exchange *x, const di_request *q) {
    const char *name = x->server->model_name;
    if (!q->model.data || (q->model.len == strlen(name) && memcmp(q->model.data, name, q->model.len) == 0))
        return true;
    /* The hosted service's own names have been checked where its behaviour is asked for. */
    if (q->vendor_compat)
        return true;
    di_exchange_fail(x, 404, "model", "model '%.*s' is not here, expected '%s'", (int)DI_MIN(q->model.len, 200u),
                     q->model.data, name);
    return false;
}

static di_status make_choices(di_exchange *x, struct di_generate *g, di_error *err) {
    const di_request *q = g->q;
    const di_reply_head head = {
        .id = g->id,
        .model = x->server->model_name,
        .created_s = di_clock_wall_s(),
        .has_reasoning = q->input == DI_INPUT_CHAT && q->chat.thinking,
        .has_chunk_usage = q->stream_usage,
        .has_running_usage = q->stream_counts,
        .has_details = !q->vendor_compat,
        .is_echo_only = q->is_echo_only,
        .request = q->api == DI_API_RESPONSES ? q->body : NULL,
    };
    for (size_t i = 0; i < g->n_choices; i++) {
        di_reply_head own = head;
        own.choice_id = (int64_t)i;
        own.seed = di_random_u64();
        g->choices[i].part = &g->parts[i / (size_t)q->n];
        di_status st = di_reply_stream_create(&g->choices[i].stream, protocols[q->api], &own,
                                              q->is_stream ? di_reply_sse_sink : NULL, &g->out, err);
        if (st)
            return st;
    }
    return DI_OK;
}

/* Publishes it when it is complete: from then on the watch thread may look at it. */
static di_status make_generate(di_exchange *x, di_shared_request *shared, di_error *err) {
    const di_request *q = di_shared_request_get(shared);
    struct di_generate *g = calloc(1, sizeof *g);
    if (!g)
        return di_fail(err, DI_ERR_MEMORY, "request");
    g->shared = di_shared_request_acquire(shared);
    g->q = q;
    g->n_parts = q->n_prompts;
    g->n_choices = q->n_prompts * (size_t)q->n;
    g->parts = calloc(g->n_parts, sizeof *g->parts);
    g->choices = calloc(g->n_choices, sizeof *g->choices);
    g->waits_for_all = q->echo && q->sampling.n_prompt_logprobs >= 0;
    di_reply_make_id(g->id, id_prefixes[q->api], di_random_u64(), 0);
    di_status st = g->parts && g->choices ? make_choices(x, g, err)
                                          : di_fail(err, DI_ERR_MEMORY, "request of %zu samples", g->n_choices);
    if (st) {
        di_generate_destroy(g);
        return st;
    }
    pthread_mutex_lock(&x->mutex);
    x->generate = g;
    pthread_mutex_unlock(&x->mutex);
    return DI_OK;
}

static di_status submit_part(di_exchange *x, size_t at, di_error *err) {
    struct di_generate *g = x->generate;
    di_engine *engine = di_server_engine(x->server);
    const di_request *q = g->q;
    part *p = &g->parts[at];
    const di_serving_options options = {
        .caller = x->key ? x->key->name : NULL,
        .priority_min = x->key ? 0 : INT32_MIN, /* keys share evenly: none goes before the others by its own word */
        .events = DI_ENGINE_WANTS_TEXT | (q->sampling.n_logprobs >= 0 || q->stream_counts ? DI_ENGINE_WANTS_TOKENS : 0),
    };
    p->x = x;
    p->first_choice = (int32_t)(at * (size_t)q->n);
    di_status st = q->echo ? di_engine_request_encode(engine, g->shared, at, NULL, &p->ids, err) : DI_OK;
    if (st) {
        di_engine_places_give_back(engine, q->n);
        return st;
    }
    for (int64_t i = 0; i < q->n; i++)
        di_exchange_acquire(x);
    pthread_mutex_lock(&x->mutex);
    g->n_left += (int32_t)q->n;
    pthread_mutex_unlock(&x->mutex);
    di_serving_ticket ticket = {0};
    st = di_engine_request_submit(engine, g->shared, at, &options, on_event, p, &ticket, err);
    pthread_mutex_lock(&x->mutex);
    if (st) {
        g->n_left -= (int32_t)q->n;
        g->is_refused = true;
    } else {
        p->id = ticket.id;
        p->n_prompt = ticket.n_prompt;
    }
    pthread_mutex_unlock(&x->mutex);
    for (int64_t i = 0; st && i < q->n; i++)
        di_exchange_release(x);
    return st;
}

/* Submits the prompts one by one into places that are there for all of them; those that are left go back. */
static di_status submit_parts(di_exchange *x, di_shared_request *shared, di_error *err) {
    const di_request *q = di_shared_request_get(shared);
    di_engine *engine = di_server_engine(x->server);
    int64_t n = (int64_t)q->n_prompts * q->n;
    di_status st = DI_OK;
    /* Before any of several is begun, all are known to be good: what is refused has begun nothing. */
    for (size_t i = 0; !st && q->n_prompts > 1 && i < q->n_prompts && !di_exchange_is_gone(x); i++)
        st = di_engine_request_try(engine, shared, i, err);
    if (!st)
        st = di_engine_places_take(engine, n, err);
    if (st)
        return st;
    st = make_generate(x, shared, err);
    for (size_t i = 0; !st && i < q->n_prompts && !di_exchange_is_gone(x); i++, n -= q->n)
        st = submit_part(x, i, err);
    di_engine_places_give_back(engine, n); /* of what was not tried: the rest are the engine's */
    return st;
}

static void submit(di_exchange *x, di_shared_request *shared) {
    di_error err = {0};
    di_status st = submit_parts(x, shared, &err);
    if (st) {
        if (x->generate) {
            pthread_mutex_lock(&x->mutex);
            x->generate->is_refused = true;
            pthread_mutex_unlock(&x->mutex);
            di_generate_abort(x);
        }
        di_exchange_fail_status(x, st, NULL, &err);
        return;
    }
    pthread_mutex_lock(&x->mutex);
    x->generate->is_open = true;
    bool is_gone = x->is_gone;
    if (is_ripe(x->generate))
        di_exchange_wake(x);
    pthread_mutex_unlock(&x->mutex);
    if (is_gone)
        di_generate_abort(x);
}

/* Replies have them with `echo` alone; elsewhere they would be computed for nobody. */
static bool check_prompt_logprobs(di_exchange *x, const di_request *q) {
    if (q->sampling.n_prompt_logprobs < 0 || q->echo)
        return true;
    di_exchange_fail(x, 400, "prompt_logprobs",
                     "prompt_logprobs: these replies have none; completions have them with echo and logprobs");
    return false;
}

/* Without a tokenizer there are ids and no texts: of what a reply shows of tokens, nothing. */
static bool check_texts(di_exchange *x, const di_request *q) {
    if (di_engine_tokenizer(di_server_engine(x->server)) || (q->sampling.n_logprobs < 0 && !q->echo))
        return true;
    di_exchange_fail(x, 400, q->echo ? "echo" : "logprobs", "%s: the model has no tokenizer to name tokens by",
                     q->echo ? "echo" : "logprobs");
    return false;
}

/* Log-probabilities are what makes replies large: those of a whole reply are in memory at once, as JSON of about a
 * kilobyte each; those of a stream only where its reader is slow. */
static bool check_logprobs(di_exchange *x, const di_request *q) {
    const int64_t most = q->is_stream ? 16 << 20 : 256 << 10;
    if (q->sampling.n_logprobs < 0 || q->api == DI_API_MESSAGES)
        return true;
    int64_t n_tokens = di_request_max_tokens(q, 0, di_engine_context_max(di_server_engine(x->server)));
    int64_t n_samples = (int64_t)q->n_prompts * q->n, n_each = q->sampling.n_logprobs + 1;
    if (n_tokens <= most / n_each / n_samples)
        return true;
    di_exchange_fail(x, 400, "logprobs",
                     "logprobs: %lld tokens of %lld samples with %lld each, expected at most %lld in one %s: fewer "
                     "alternatives, a smaller max_tokens%s",
                     (long long)n_tokens, (long long)n_samples, (long long)n_each, (long long)most,
                     q->is_stream ? "stream" : "reply", q->is_stream ? "" : ", or a stream");
    return false;
}

/* A request of several samples is as much of its key's as several requests. */
static bool check_share(di_exchange *x, const di_request *q) {
    const char *why;
    int64_t n = (int64_t)q->n_prompts * q->n - 1;
    if (!x->key || di_key_add(x->key, n, di_keys_share(x->server), &why, &x->retry_s)) {
        x->n_entered += x->key ? n : 0;
        return true;
    }
    atomic_fetch_add(&x->server->metrics.n_refused_key, 1);
    di_exchange_fail(x, 429, NULL, "%s", why);
    return false;
}

void di_generate_run(di_exchange *x) {
    di_error err = {0};
    di_status st = di_engine_look(di_server_engine(x->server), &err);
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
        return;
    }
    di_shared_request *shared = di_exchange_open_request(x, x->route->api);
    if (!shared)
        return;
    di_strbuf_deinit(&x->body); /* the request has what it needs of it */
    const di_request *q = di_shared_request_get(shared);
    if (check_texts(x, q) && check_prompt_logprobs(x, q) && check_logprobs(x, q) && check_share(x, q))
        submit(x, shared);
    di_shared_request_release(shared);
}

void di_generate_abort(di_exchange *x) {
    pthread_mutex_lock(&x->mutex);
    struct di_generate *g = x->generate;
    pthread_mutex_unlock(&x->mutex);
    for (size_t i = 0; g && i < g->n_parts; i++) {
        pthread_mutex_lock(&x->mutex);
        uint64_t id = g->n_left > 0 ? g->parts[i].id : 0;
        pthread_mutex_unlock(&x->mutex);
        if (id)
            di_engine_abort(di_server_engine(x->server), id);
    }
}

bool di_generate_can_ping(const struct di_generate *g) {
    return g->q->is_stream && g->is_open && !g->is_refused && g->n_left > 0;
}

void di_generate_destroy(struct di_generate *g) {
    if (!g)
        return;
    for (size_t i = 0; g->choices && i < g->n_choices; i++) {
        di_reply_stream_destroy(g->choices[i].stream);
        free(g->choices[i].prompt_logprobs);
        free(g->choices[i].prompt_top);
    }
    for (size_t i = 0; g->parts && i < g->n_parts; i++)
        di_ids_deinit(&g->parts[i].ids);
    free(g->choices);
    free(g->parts);
    di_strbuf_deinit(&g->out);
    di_strbuf_deinit(&g->taken);
    di_strbuf_deinit(&g->records);
    di_shared_request_release(g->shared);
    free(g);
}

/* ---- records into a reply -----------------------------------------------------------------------------------------
 */

static di_status start_choice(di_exchange *x, struct di_generate *g, choice *c, di_error *err) {
    di_reply_usage usage = {.prompt_tokens = c->part->n_prompt};
    pthread_mutex_lock(&x->mutex);
    usage.cached_tokens = c->n_cached;
    pthread_mutex_unlock(&x->mutex);
    c->is_started = true;
    di_status st = di_reply_stream_start(c->stream, &usage, err);
    if (!st && g->q->echo)
        st = di_reply_stream_echo(c->stream, di_engine_tokenizer(di_server_engine(x->server)), c->part->ids.data,
                                  c->part->ids.len, c->prompt_logprobs, c->prompt_top, c->n_prompt_top, err);
    return st;
}

static void add_usage(struct di_generate *g, const choice *c, const di_reply_usage *u) {
    bool is_first = c == &g->choices[c->part->first_choice]; /* samples of one prompt have it together */
    g->usage.prompt_tokens += is_first ? u->prompt_tokens : 0;
    g->usage.cached_tokens += is_first ? u->cached_tokens : 0;
    g->usage.completion_tokens += u->completion_tokens;
    g->usage.reasoning_tokens += u->reasoning_tokens;
    g->usage.accepted_tokens += u->accepted_tokens;
    g->usage.rejected_tokens += u->rejected_tokens;
}

static void read_failure(di_error *out, const done_record *done, const char *text, size_t len) {
    if (done->finish == DI_FINISH_ABORT) {
        di_fail(out, DI_ERR_CANCELLED, "the server is shutting down");
    } else {
        di_fail(out, done->status ? done->status : DI_ERR_INTERNAL, "%.*s", (int)len, text);
    }
}

/* A sample has ended by an error, or from outside: so does the reply. */
static di_status end_failed(di_exchange *x, struct di_generate *g, choice *c, const done_record *done, const char *text,
                            size_t len, di_error *err) {
    read_failure(&g->failure, done, text, len);
    g->is_ended = true;
    di_generate_abort(x);
    return g->q->is_stream ? di_reply_stream_fail(c->stream, g->failure.code, g->failure.message, err) : DI_OK;
}

static di_status end_choice(di_exchange *x, struct di_generate *g, choice *c, const char *data, size_t len,
                            di_error *err) {
    done_record done;
    memcpy(&done, data, sizeof done);
    if (done.finish == DI_FINISH_ERROR || done.finish == DI_FINISH_ABORT)
        return end_failed(x, g, c, &done, data + sizeof done, len - sizeof done, err);
    add_usage(g, c, &done.usage);
    if (done.has_seed)
        di_reply_stream_seed(c->stream, done.seed);
    g->is_ended = ++g->n_ended == g->n_choices;
    const di_sampling *s = &g->q->sampling;
    di_chat_text stop = {0};
    bool has_stop = done.stop_string >= 0 && (size_t)done.stop_string < s->n_stop;
    if (has_stop)
        stop = (di_chat_text){.data = s->stop[done.stop_string], .len = s->stop_len[done.stop_string]};
    return di_reply_stream_finish(c->stream, done.finish, has_stop ? &stop : NULL, g->is_ended ? &g->usage : NULL,
                                  di_clock_wall_s(), err);
}

static di_status take_token(di_exchange *x, choice *c, const char *data, di_error *err) {
    token_record token;
    di_logprob top[64], *pairs = top;
    memcpy(&token, data, sizeof token);
    size_t n_bytes = (size_t)token.n_top * sizeof *pairs;
    if ((size_t)token.n_top > DI_COUNT(top) && !(pairs = malloc(n_bytes)))
        return di_fail(err, DI_ERR_MEMORY, "log-probabilities");
    if (n_bytes > 0)
        memcpy(pairs, data + sizeof token, n_bytes);
    di_status st = di_reply_stream_token(c->stream, di_engine_tokenizer(di_server_engine(x->server)), token.token,
                                         token.logprob, pairs, token.n_top, err);
    if (pairs != top)
        free(pairs);
    return st;
}

static di_status take_record(di_exchange *x, struct di_generate *g, const record *r, const char *data, di_error *err) {
    static const di_parser_event_kind kinds[] = {
        [RECORD_REASONING] = DI_PARSER_REASONING,   [RECORD_CONTENT] = DI_PARSER_CONTENT,
        [RECORD_CALL_BEGIN] = DI_PARSER_CALL_BEGIN, [RECORD_CALL_ARGS] = DI_PARSER_CALL_ARGS,
        [RECORD_CALL_END] = DI_PARSER_CALL_END,
    };
    choice *c = &g->choices[r->choice];
    di_status st = c->is_started ? DI_OK : start_choice(x, g, c, err);
    if (st)
        return st;
    if (r->kind == RECORD_TOKEN) {
        di_reply_stream_count(c->stream, ++c->n_tokens);
        return g->q->sampling.n_logprobs >= 0 ? take_token(x, c, data, err) : DI_OK;
    }
    if (r->kind == RECORD_DONE)
        return end_choice(x, g, c, data, r->len, err);
    di_parser_event event = {.kind = kinds[r->kind], .call_id = r->call_id, .text = data, .len = r->len};
    if (r->kind == RECORD_CALL_END) {
        event.is_cut = data[0] != 0;
        event.text = NULL;
        event.len = 0;
    }
    return di_reply_stream_push(c->stream, &event, err);
}

/* Moves the queue to this thread. With the mutex held. */
static void take_records(struct di_generate *g) {
    di_strbuf free_one = g->taken;
    di_strbuf_reset(&free_one);
    g->taken = g->records;
    g->records = free_one;
    g->last_record = 0;
}

static di_status write_records(di_exchange *x, struct di_generate *g, di_error *err) {
    di_status st = di_strbuf_status(&g->taken, err);
    for (size_t at = 0; !st && !g->is_ended && at < g->taken.len;) {
        record r;
        memcpy(&r, g->taken.data + at, sizeof r);
        st = take_record(x, g, &r, g->taken.data + at + sizeof r, err);
        at += sizeof r + r.len;
    }
    return st ? st : di_strbuf_status(&g->out, err);
}

/* ---- replies ------------------------------------------------------------------------------------------------------
 */

static void answer_whole(di_exchange *x, struct di_generate *g) {
    di_error err = {0};
    pthread_mutex_lock(&x->mutex);
    take_records(g);
    pthread_mutex_unlock(&x->mutex);
    di_status st = write_records(x, g, &err);
    if (!st && g->failure.code) {
        err = g->failure;
        st = err.code;
    }
    di_json *response = NULL;
    if (!st) {
        const di_reply_stream **streams = malloc(g->n_choices * sizeof *streams);
        for (size_t i = 0; streams && i < g->n_choices; i++)
            streams[i] = g->choices[i].stream;
        if (streams && g->n_choices > 1) {
            response = di_reply_choices_response(streams, g->n_choices, &g->usage);
        } else if (streams) {
            response = di_reply_stream_response(streams[0]);
        }
        free(streams);
        if (!response)
            st = di_fail(&err, DI_ERR_MEMORY, "the reply");
    }
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
        return;
    }
    di_json_write(&x->reply, response, DI_JSON_COMPACT);
    di_json_free(response);
    di_exchange_answer(x, 200);
}

/* Whether the first that came is an error: then there is still time to say so by a status. With the mutex held. */
static bool begins_with_failure(const struct di_generate *g) {
    record r;
    if (!g->has_failed || g->records.len == 0)
        return false;
    memcpy(&r, g->records.data, sizeof r);
    return r.kind == RECORD_DONE;
}

/* The field that a message of the engine begins with, where the body has it: "logit_bias: ...". NULL: none. */
static const char *field_of(const di_request *q, const char *message, char *out, size_t size) {
    size_t n = strspn(message, "abcdefghijklmnopqrstuvwxyz_");
    if (n == 0 || n >= size || (message[n] != ':' && message[n] != '.'))
        return NULL;
    memcpy(out, message, n);
    out[n] = '\0';
    return di_json_get(q->body, out) ? out : NULL;
}

static void fail_first(di_exchange *x, struct di_generate *g) {
    di_error err = {0};
    record r;
    done_record done;
    pthread_mutex_lock(&x->mutex);
    take_records(g);
    pthread_mutex_unlock(&x->mutex);
    memcpy(&r, g->taken.data, sizeof r);
    memcpy(&done, g->taken.data + sizeof r, sizeof done);
    read_failure(&err, &done, g->taken.data + sizeof r + sizeof done, r.len - sizeof done);
    g->is_ended = true;
    di_generate_abort(x);
    char param[64];
    di_exchange_fail_status(x, err.code, field_of(g->q, err.message, param, sizeof param), &err);
}

void di_generate_reply(di_exchange *x) {
    struct di_generate *g = x->generate;
    if (!g->q->is_stream) {
        answer_whole(x, g);
        return;
    }
    pthread_mutex_lock(&x->mutex);
    bool is_failure = begins_with_failure(g);
    if (!is_failure) {
        x->state = DI_STREAMED;
        x->sent_ns = di_clock_ns();
    }
    pthread_mutex_unlock(&x->mutex);
    if (is_failure)
        fail_first(x, g);
}

ssize_t di_generate_read(void *exchange, uint64_t at, char *buf, size_t max) {
    di_exchange *x = exchange;
    struct di_generate *g = x->generate;
    di_error err;
    (void)at;
    while (g->out_at == g->out.len) {
        di_strbuf_reset(&g->out);
        g->out_at = 0;
        pthread_mutex_lock(&x->mutex);
        if (g->is_ended) {
            x->is_written = true;
            pthread_mutex_unlock(&x->mutex);
            return MHD_CONTENT_READER_END_OF_STREAM;
        }
        bool is_gone = x->is_gone, is_ping = x->wants_ping, has_records = g->records.len > 0 && is_ripe(g);
        if (!is_gone && !is_ping && !has_records) {
            is_gone = !di_exchange_suspend(x);
        } else if (has_records) {
            take_records(g);
        } else {
            di_strbuf_reset(&g->taken);
        }
        x->wants_ping = false;
        pthread_mutex_unlock(&x->mutex);
        if (is_gone)
            return di_connection_break(x->connection, buf);
        if (!is_ping && !has_records)
            return 0;
        if (is_ping)
            di_strbuf_puts(&g->out, ": keep-alive\n\n");
        if (write_records(x, g, &err))
            return di_connection_break(x->connection, buf);
        if (g->is_ended)
            di_exchange_leave_key(x);
    }
    size_t n = DI_MIN(max, g->out.len - g->out_at);
    memcpy(buf, g->out.data + g->out_at, n);
    g->out_at += n;
    pthread_mutex_lock(&x->mutex);
    x->sent_ns = di_clock_ns();
    pthread_mutex_unlock(&x->mutex);
    return (ssize_t)n;
}
