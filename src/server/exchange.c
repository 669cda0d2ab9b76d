/* Exchanges: one request with its reply, from the judged head (head.c) to the last byte.
 *
 * libmicrohttpd calls the handler for the head, for each piece of the body, at the body's end, and again whenever the
 * connection was resumed; what happens in between is drawn in server_internal.h. */
#include "server_internal.h"

#include <stdarg.h>

enum { WHOLE_REPLY_MAX = 32768, READ_BLOCK = 16384 };

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

di_exchange *di_exchange_acquire(di_exchange *x) {
    atomic_fetch_add(&x->n_refs, 1);
    return x;
}

void di_exchange_release(di_exchange *x) {
    if (atomic_fetch_sub(&x->n_refs, 1) > 1)
        return;
    di_generate_destroy(x->generate);
    atomic_fetch_sub(&x->server->body_bytes, x->charged);
    di_strbuf_deinit(&x->body);
    di_strbuf_deinit(&x->reply);
    pthread_mutex_destroy(&x->mutex);
    di_exchange_leave_key(x);
    di_key_release(x->key);
    free(x->rest);
    free(x->origin);
    free(x);
}

void di_exchange_leave_key(di_exchange *x) {
    if (x->n_entered > 0)
        di_key_leave(x->key, x->n_entered);
    x->n_entered = 0;
}

bool di_exchange_suspend(di_exchange *x) {
    if (atomic_load(&x->server->is_ending))
        return false;
    x->is_suspended = true;
    MHD_suspend_connection(x->http);
    return true;
}

void di_exchange_wake(di_exchange *x) {
    if (!x->is_suspended)
        return;
    x->is_suspended = false;
    MHD_resume_connection(x->http);
}

bool di_exchange_is_gone(di_exchange *x) {
    pthread_mutex_lock(&x->mutex);
    bool is_gone = x->is_gone;
    pthread_mutex_unlock(&x->mutex);
    return is_gone;
}

void di_exchange_hang_up(di_exchange *x, bool is_cut) {
    pthread_mutex_lock(&x->mutex);
    bool is_first = !x->is_gone && !x->is_written;
    x->is_gone = true;
    if (is_first)
        di_exchange_wake(x);
    pthread_mutex_unlock(&x->mutex);
    if (is_first) {
        atomic_fetch_add(is_cut ? &x->server->metrics.n_cut_off : &x->server->metrics.n_hung_up, 1);
        di_generate_abort(x);
    }
}

const char *di_exchange_header(const di_exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, name);
}

void di_exchange_enlist(di_exchange *x) {
    di_server *server = x->server;
    pthread_mutex_lock(&server->live_mutex);
    x->id = ++server->id_last;
    di_exchange **bucket = &server->live[x->id % DI_LIVE_BUCKETS];
    x->next_live = *bucket;
    *bucket = x;
    pthread_mutex_unlock(&server->live_mutex);
}

static void strike_off(di_exchange *x) {
    di_server *server = x->server;
    pthread_mutex_lock(&server->live_mutex);
    di_exchange **link = &server->live[x->id % DI_LIVE_BUCKETS];
    while (*link != x)
        link = &(*link)->next_live;
    *link = x->next_live;
    pthread_mutex_unlock(&server->live_mutex);
}

/* ---- replies ------------------------------------------------------------------------------------------------------
 */

void di_exchange_write_error(di_exchange *x, int status, const char *param, const char *message) {
    x->status = status;
    x->content_type = NULL;
    if (x->server->config.engine->vendor_compat)
        param = NULL; /* the hosted service never names it */
    di_strbuf_reset(&x->reply);
    di_api_error_json(&x->reply, x->route ? x->route->api : DI_API_CHAT, status, message, param, x->request_id);
}

void di_exchange_answer(di_exchange *x, int status) {
    pthread_mutex_lock(&x->mutex);
    x->status = status;
    x->state = DI_ANSWERED;
    di_exchange_wake(x);
    pthread_mutex_unlock(&x->mutex);
}

void di_exchange_fail(di_exchange *x, int status, const char *param, const char *fmt, ...) {
    char message[1000];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    if (status == 429 || status == 503)
        x->retry_s = x->retry_s ? x->retry_s : di_retry_after_s(x->server);
    di_exchange_write_error(x, status, param, message);
    di_exchange_answer(x, status);
}

void di_exchange_fail_status(di_exchange *x, di_status st, const char *param, const di_error *err) {
    int status = di_status_http(st);
    if (st == DI_ERR_CANCELLED)
        status = 503;
    if (st == DI_ERR_BUSY && di_server_phase_of(x->server) != DI_READY)
        status = 503;
    if (st == DI_ERR_BUSY)
        atomic_fetch_add(&x->server->metrics.n_refused_busy, 1);
    if (status >= 500 && status != 503)
        di_warn("request %s: %s", x->request_id, err->message);
    param = param && *param ? param : NULL;
    /* Anthropic's errors have no place for the field but their text. */
    bool names_it = !param || x->route->api != DI_API_MESSAGES || strstr(err->message, param);
    di_exchange_fail(x, status, param, "%s%s%s", names_it ? "" : param, names_it ? "" : ": ", err->message);
}

static ssize_t read_reply(void *exchange, uint64_t at, char *buf, size_t max) {
    di_exchange *x = exchange;
    size_t n = DI_MIN(max, x->reply.len - (size_t)at);
    memcpy(buf, x->reply.data + at, n);
    pthread_mutex_lock(&x->mutex);
    x->sent_ns = di_clock_ns();
    x->is_written = at + n == x->reply.len;
    bool is_gone = x->is_gone;
    pthread_mutex_unlock(&x->mutex);
    return is_gone ? di_connection_break(x->connection, buf) : (ssize_t)n;
}

static void release_exchange(void *exchange) {
    di_exchange_release(exchange);
}

static void add_cors(di_exchange *x, struct MHD_Response *r) {
    if (x->server->config.n_cors_origins > 0)
        MHD_add_response_header(r, "Vary", "Origin");
    if (!x->origin || !x->is_origin_allowed)
        return;
    MHD_add_response_header(r, "Access-Control-Allow-Origin", x->origin);
    MHD_add_response_header(r, "Access-Control-Expose-Headers", "x-request-id, request-id, retry-after");
    if (x->method != DI_OPTIONS)
        return;
    const char *headers = di_exchange_header(x, "Access-Control-Request-Headers");
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    if (headers)
        MHD_add_response_header(r, "Access-Control-Allow-Headers", headers);
    MHD_add_response_header(r, "Access-Control-Max-Age", "86400");
}

static void add_headers(di_exchange *x, struct MHD_Response *r, const char *type) {
    char number[24];
    if (type)
        MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "x-request-id", x->request_id);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (x->route && x->route->api == DI_API_MESSAGES)
        MHD_add_response_header(r, "request-id", x->request_id);
    if (x->retry_s) {
        snprintf(number, sizeof number, "%lld", (long long)x->retry_s);
        MHD_add_response_header(r, "Retry-After", number);
    }
    if (x->allow)
        MHD_add_response_header(r, "Allow", x->allow);
    if (x->status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (x->is_closing || di_server_phase_of(x->server) == DI_DRAINING)
        MHD_add_response_header(r, "Connection", "close");
    if (type && strncmp(type, "text/html", 9) == 0) {
        MHD_add_response_header(r, "Content-Security-Policy",
                                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
                                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
        MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    }
    add_cors(x, r);
}

static struct MHD_Response *whole_response(di_exchange *x) {
    if (x->static_reply)
        return MHD_create_response_from_buffer(x->static_len, (void *)(uintptr_t)x->static_reply,
                                               MHD_RESPMEM_PERSISTENT);
    if (x->reply.len <= WHOLE_REPLY_MAX)
        return MHD_create_response_from_buffer(x->reply.len, (void *)(uintptr_t)di_strbuf_str(&x->reply),
                                               MHD_RESPMEM_MUST_COPY);
    struct MHD_Response *r =
        MHD_create_response_from_callback(x->reply.len, READ_BLOCK, read_reply, x, release_exchange);
    if (r)
        di_exchange_acquire(x);
    return r;
}

/* Hands the reply to libmicrohttpd. */
static enum MHD_Result send_reply(di_exchange *x, bool is_stream) {
    struct MHD_Response *r;
    if (is_stream) {
        r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, READ_BLOCK, di_generate_read, x, release_exchange);
        if (r)
            di_exchange_acquire(x);
        x->status = 200;
    } else {
        r = whole_response(x);
    }
    if (!r)
        return MHD_NO;
    add_headers(x, r,
                is_stream          ? "text/event-stream; charset=utf-8"
                : x->content_type  ? x->content_type
                : x->status == 204 ? NULL
                                   : "application/json");
    if (is_stream) {
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        MHD_add_response_header(r, "X-Accel-Buffering", "no");
        atomic_fetch_add(&x->server->metrics.n_streams, 1);
    }
    atomic_fetch_add(&x->server->metrics.n_replies[DI_MIN(x->status / 100, 5)], 1);
    if (!is_stream)
        di_exchange_leave_key(x); /* before the client can know, and ask again */
    pthread_mutex_lock(&x->mutex);
    x->is_replied = true;
    x->sent_ns = di_clock_ns();
    x->is_written = !is_stream && x->reply.len <= WHOLE_REPLY_MAX;
    pthread_mutex_unlock(&x->mutex);
    enum MHD_Result result = MHD_queue_response(x->http, (unsigned)x->status, r);
    MHD_destroy_response(r);
    return result;
}

/* ---- the body -----------------------------------------------------------------------------------------------------
 */

static void take_body(di_exchange *x, const char *data, size_t n) {
    di_server *server = x->server;
    if (x->status) {
        x->discarded += (int64_t)n;
        return;
    }
    if (x->body.len + n > (uint64_t)server->config.body_max) {
        char message[120];
        snprintf(message, sizeof message, "the body has more than %lld bytes", (long long)server->config.body_max);
        di_exchange_write_error(x, 413, NULL, message);
    } else if (x->body.len + n > DI_BODY_SMALL &&
               atomic_load(&server->body_bytes) + (int64_t)n > di_bodies_max(server)) {
        x->retry_s = 1;
        di_exchange_write_error(x, 503, NULL, "too many long bodies are coming in at once: try again later");
    } else {
        di_strbuf_append(&x->body, data, n);
        if (!x->body.failed) {
            x->charged += (int64_t)n;
            atomic_fetch_add(&server->body_bytes, (int64_t)n);
            return;
        }
        di_exchange_write_error(x, 503, NULL, "out of memory");
    }
    atomic_fetch_sub(&server->body_bytes, x->charged);
    x->charged = 0;
    di_strbuf_deinit(&x->body);
}

/* The request is there: runs it, or has a work thread do so. True: the connection is suspended, and the handler will be
 * called again when there is something to send. */
static bool dispatch(di_exchange *x) {
    di_server *server = x->server;
    x->is_dispatched = true;
    pthread_mutex_lock(&server->connections_mutex);
    x->connection->reading_ns = 0;
    pthread_mutex_unlock(&server->connections_mutex);
    if (x->status) {
        pthread_mutex_lock(&x->mutex); /* di_server_destroy may look */
        x->state = DI_ANSWERED;
        pthread_mutex_unlock(&x->mutex);
        return false;
    }
    if (!(x->route->flags & DI_ROUTE_WORK)) {
        x->route->run(x);
        return false;
    }
    pthread_mutex_lock(&x->mutex);
    x->state = DI_WORKING;
    x->sent_ns = x->start_ns;
    x->is_gone = !di_exchange_suspend(x);
    bool is_gone = x->is_gone;
    pthread_mutex_unlock(&x->mutex);
    if (is_gone)
        return false;
    di_watch_add(x);
    di_work_add(&server->work, di_exchange_acquire(x));
    return true;
}

/* ---- libmicrohttpd's callbacks ------------------------------------------------------------------------------------
 */

enum MHD_Result di_exchange_handle(void *cls, struct MHD_Connection *http, const char *url, const char *method,
                                   const char *version, const char *data, size_t *n_data, void **context) {
    di_exchange *x = *context;
    if (!x) {
        x = di_exchange_begin(cls, http, url, method, version);
        *context = x;
        if (!x)
            return MHD_NO;
        /* Who waits for a word before the body gets it now. */
        x->is_closing |= x->status >= 400 && di_exchange_header(x, "Expect");
        return x->status && x->is_closing ? send_reply(x, false) : MHD_YES;
    }
    if (x->is_replied)
        return MHD_YES;
    if (*n_data > 0) {
        take_body(x, data, *n_data);
        *n_data = 0;
        return x->discarded > DI_DISCARD_MAX ? MHD_NO : MHD_YES; /* no answer fits between the chunks of a body */
    }
    if (!x->is_dispatched && dispatch(x))
        return MHD_YES;
    pthread_mutex_lock(&x->mutex);
    bool is_gone = x->is_gone, is_answered = x->state == DI_ANSWERED;
    pthread_mutex_unlock(&x->mutex);
    if (is_gone)
        return MHD_NO;
    if (!is_answered)
        di_generate_reply(x);
    return send_reply(x, x->state == DI_STREAMED);
}

/* One line a request, without anything that it or its reply said. */
static void log_request(const di_exchange *x, enum MHD_RequestTerminationCode code) {
    di_info("%s %s: %d, %.1f ms, key '%s'%s", x->request_id, x->route ? x->route->path : "(no route)",
            x->is_replied ? x->status : 499, (double)(di_clock_ns() - x->start_ns) / 1e6, x->key ? x->key->name : "",
            code == MHD_REQUEST_TERMINATED_COMPLETED_OK ? "" : ", not written whole");
}

void di_exchange_completed(void *cls, struct MHD_Connection *http, void **context,
                           enum MHD_RequestTerminationCode code) {
    di_server *server = cls;
    di_exchange *x = *context;
    (void)http;
    if (!x)
        return;
    *context = NULL;
    di_watch_remove(x);
    strike_off(x);
    if (code == MHD_REQUEST_TERMINATED_COMPLETED_OK) {
        pthread_mutex_lock(&x->mutex);
        x->is_gone = true; /* what still comes is not read */
        pthread_mutex_unlock(&x->mutex);
        di_generate_abort(x);
    } else {
        di_exchange_hang_up(x, false);
    }
    log_request(x, code);
    if (x->is_active)
        atomic_fetch_sub(&server->metrics.n_active, 1);
    if (x->is_replied && x->state == DI_STREAMED)
        atomic_fetch_sub(&server->metrics.n_streams, 1);
    pthread_mutex_lock(&server->connections_mutex);
    di_connection *c = x->connection;
    c->is_busy = code != MHD_REQUEST_TERMINATED_COMPLETED_OK || x->is_last || x->is_closing ||
                 di_server_phase_of(server) == DI_DRAINING;
    c->has_served = true;
    c->waiting_ns = di_clock_ns();
    c->reading_ns = 0;
    c->written = di_connection_written(c);
    pthread_mutex_unlock(&server->connections_mutex);
    di_exchange_release(x);
}
