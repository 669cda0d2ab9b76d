/* Connections, and exchanges from the first header to the last byte of the reply.
 *
 * Headers are judged before a body is read, but the answer waits for the body where that is not too long: a connection
 * that is closed while the client still sends is reset, and the client never sees why. What libmicrohttpd would close
 * without a word (a line that is no request) gets its 400 here. */
#include "server_internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <linux/sockios.h>
#include <linux/tcp.h>

enum { WHOLE_REPLY_MAX = 32768, READ_BLOCK = 16384, DISCARD_MAX = 64 << 20 };

/* ---- connections --------------------------------------------------------------------------------------------------
 */

static bool is_loopback(const struct sockaddr *a) {
    if (!a)
        return false;
    if (a->sa_family == AF_INET) {
        uint32_t ip = ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr);
        return ip >> 24 == 127;
    }
    if (a->sa_family != AF_INET6)
        return false;
    const struct in6_addr *ip = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(ip) || (IN6_IS_ADDR_V4MAPPED(ip) && ip->s6_addr[12] == 127);
}

/* Bytes that the system has been given for the peer. */
static int64_t written_on(int fd) {
    struct tcp_info info;
    socklen_t len = sizeof info;
    int unsent = 0;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 || len < offsetof(struct tcp_info, tcpi_bytes_retrans))
        return 0;
    (void)ioctl(fd, SIOCOUTQNSD, &unsent);
    return (int64_t)(info.tcpi_bytes_sent - info.tcpi_bytes_retrans) + unsent;
}

int64_t di_connection_acked(const di_connection *c) {
    struct tcp_info info;
    socklen_t len = sizeof info;
    if (getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 ||
        len < offsetof(struct tcp_info, tcpi_bytes_received))
        return 0;
    return (int64_t)info.tcpi_bytes_acked;
}

void di_connection_write(const di_connection *c, int status, const char *reason, const char *message) {
    char text[512], body[256];
    int n_body = snprintf(body, sizeof body,
                          "{\"error\":{\"message\":\"%s\",\"type\":\"invalid_request_error\",\"param\":null,"
                          "\"code\":\"invalid_request_error\"}}",
                          message);
    int n = snprintf(
        text, sizeof text,
        "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status,
        reason, n_body, body);
    (void)!send(c->fd, text, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* libmicrohttpd has given a connection up. Where the client has sent what is no request and nobody has answered, it
 * learns so. */
static void say_goodbye(di_server *server, const di_connection *c) {
    char byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    bool is_there = n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
    if (is_there && !c->is_cut && !c->is_busy && !server->config.tls_cert && written_on(c->fd) == c->written)
        di_connection_write(c, 400, "Bad Request", "this is no HTTP request");
}

void di_connection_notify(void *cls, struct MHD_Connection *http, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    di_server *server = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *fd = MHD_get_connection_info(http, MHD_CONNECTION_INFO_CONNECTION_FD);
        const union MHD_ConnectionInfo *peer = MHD_get_connection_info(http, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
        di_connection *c = calloc(1, sizeof *c);
        *context = c;
        if (!c || !fd)
            return;
        c->fd = fd->connect_fd;
        c->is_local = peer && is_loopback(peer->client_addr);
        c->waiting_ns = di_clock_ns();
        int on = 1;
        (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        atomic_fetch_add(&server->metrics.n_connections, 1);
        atomic_fetch_add(&server->metrics.n_connections_total, 1);
        pthread_mutex_lock(&server->connections_mutex);
        c->next = server->connections;
        if (c->next)
            c->next->previous = c;
        server->connections = c;
        pthread_mutex_unlock(&server->connections_mutex);
        return;
    }
    di_connection *c = *context;
    if (!c)
        return;
    pthread_mutex_lock(&server->connections_mutex);
    if (c->previous) {
        c->previous->next = c->next;
    } else {
        server->connections = c->next;
    }
    if (c->next)
        c->next->previous = c->previous;
    pthread_mutex_unlock(&server->connections_mutex);
    say_goodbye(server, c);
    atomic_fetch_sub(&server->metrics.n_connections, 1);
    free(c);
    *context = NULL;
}

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
    return is_gone ? MHD_CONTENT_READER_END_WITH_ERROR : (ssize_t)n;
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

/* ---- the head of a request ----------------------------------------------------------------------------------------
 */

static void take_request_id(di_exchange *x) {
    const char *given = di_exchange_header(x, "x-request-id");
    size_t n = given ? strlen(given) : 0;
    bool is_good = n > 0 && n < sizeof x->request_id;
    for (size_t i = 0; is_good && i < n; i++)
        is_good = given[i] > ' ' && given[i] < 0x7F;
    if (is_good) {
        memcpy(x->request_id, given, n + 1);
    } else {
        snprintf(x->request_id, sizeof x->request_id, "req_%016llx%08llx", (unsigned long long)di_random_u64(),
                 (unsigned long long)(di_random_u64() >> 32));
    }
}

typedef struct header_check {
    int n_lengths, n_encodings, n_hosts;
    const char *length, *problem;
    size_t length_len;
} header_check;

static bool is_token(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c <= ' ' || c >= 0x7F || strchr("()<>@,;:\\\"/[]?={}", c))
            return false;
    }
    return n > 0;
}

static enum MHD_Result check_header(void *cls, enum MHD_ValueKind kind, const char *key, size_t n_key,
                                    const char *value, size_t n_value) {
    header_check *check = cls;
    (void)kind;
    if (!is_token(key, n_key))
        check->problem = "a header's name has characters that can't be in it";
    for (size_t i = 0; i < n_value; i++) {
        if ((unsigned char)value[i] < ' ' && value[i] != '\t')
            check->problem = "a header's value has control characters";
    }
    if (strcasecmp(key, "Content-Length") == 0) {
        check->n_lengths++;
        if (check->length && (check->length_len != n_value || memcmp(check->length, value, n_value) != 0))
            check->problem = "two Content-Length headers say different things";
        check->length = value;
        check->length_len = n_value;
    } else if (strcasecmp(key, "Transfer-Encoding") == 0) {
        check->n_encodings++;
        if (strcasecmp(value, "chunked") != 0)
            check->problem = "Transfer-Encoding: only chunked is understood";
    } else if (strcasecmp(key, "Host") == 0) {
        check->n_hosts++;
    }
    return MHD_YES;
}

/* What two readers of the same bytes could take for different requests is refused, and the connection ends. */
static const char *find_framing_problem(di_exchange *x, const char *version) {
    header_check check = {0};
    MHD_get_connection_values_n(x->http, MHD_HEADER_KIND, check_header, &check);
    if (check.problem)
        return check.problem;
    if (check.n_encodings > 1 || (check.n_encodings && check.n_lengths))
        return "the length of the body is given twice, by Content-Length and Transfer-Encoding";
    if (check.n_encodings && strcmp(version, "HTTP/1.0") == 0)
        return "Transfer-Encoding in a request of HTTP/1.0";
    if (check.n_hosts > 1)
        return "more than one Host header";
    if (check.n_hosts == 0 && strcmp(version, "HTTP/1.1") == 0)
        return "no Host header";
    return NULL;
}

static void take_origin(di_exchange *x) {
    const char *origin = di_exchange_header(x, "Origin");
    const di_server_config *c = &x->server->config;
    if (!origin || strlen(origin) > 500)
        return;
    x->origin = strdup(origin);
    for (size_t i = 0; i < c->n_cors_origins; i++)
        x->is_origin_allowed |= strcmp(c->cors_origins[i], "*") == 0 || strcmp(c->cors_origins[i], origin) == 0;
}

/* Whether a name, with or without a port, is one of the loopback's or the one that the server was told to listen on. */
static bool is_own_name(const di_exchange *x, const char *host) {
    const char *own = x->server->config.host;
    size_t n = *host == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
    return (n == 9 && strncasecmp(host, "localhost", n) == 0) || (n > 4 && strncmp(host, "127.", 4) == 0) ||
           (n == 5 && strncmp(host, "[::1]", n) == 0) || (n == strlen(own) && strncasecmp(host, own, n) == 0);
}

/* Whether a page of another origin asks. Browsers say so on trustworthy addresses; elsewhere the page's origin and the
 * name that was asked for tell. A server on loopback without keys also looks at the name: a page whose own name leads
 * here, by a name server that its author has, would be of the same origin. */
static bool is_foreign_page(const di_exchange *x) {
    const char *site = di_exchange_header(x, "Sec-Fetch-Site"), *host = di_exchange_header(x, "Host");
    if (x->is_origin_allowed || (!x->origin && !site))
        return false;
    if (host && x->connection->is_local && !di_keys_are_needed(&x->server->keys) && !is_own_name(x, host))
        return true;
    if (site)
        return strcmp(site, "cross-site") == 0 || strcmp(site, "same-site") == 0;
    const char *authority = strstr(x->origin, "://");
    return !host || !authority || strcasecmp(authority + 3, host) != 0;
}

/* Whether the client is on this machine: not somebody behind a proxy that is. */
static bool is_from_here(const di_exchange *x) {
    static const char *const marks[] = {"Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"};
    for (size_t i = 0; i < DI_COUNT(marks); i++) {
        if (di_exchange_header(x, marks[i]))
            return false;
    }
    const char *host = di_exchange_header(x, "Host");
    return x->connection->is_local && (!host || is_own_name(x, host));
}

static void refuse(di_exchange *x, int status, const char *param, const char *message) {
    if (x->status == 0)
        di_exchange_write_error(x, status, param, message);
}

static void check_key(di_exchange *x) {
    di_server *server = x->server;
    if (!di_keys_are_needed(&server->keys) || (x->route->flags & DI_ROUTE_OPEN))
        return;
    const char *secret = di_exchange_header(x, "Authorization");
    if (secret && strncasecmp(secret, "Bearer ", 7) == 0) {
        secret += 7;
        secret += strspn(secret, " ");
    } else {
        secret = di_exchange_header(x, "x-api-key");
    }
    x->key = secret ? di_keys_find(&server->keys, secret, strlen(secret)) : NULL;
    if (x->key)
        return;
    atomic_fetch_add(&server->metrics.n_refused_key, 1);
    refuse(x, 401, NULL,
           secret ? "the API key is not known here"
                  : "no API key: expected a header 'Authorization: Bearer KEY' or 'x-api-key: KEY'");
}

static void check_limits(di_exchange *x) {
    const char *why;
    if (!x->key || !(x->route->flags & DI_ROUTE_WORK) || x->status)
        return;
    if (di_key_enter(x->key, x->start_ns, &why, &x->retry_s)) {
        x->n_entered = 1;
        return;
    }
    atomic_fetch_add(&x->server->metrics.n_refused_key, 1);
    refuse(x, 429, NULL, why);
}

static void check_phase(di_exchange *x) {
    static const char *const why[] = {[DI_LOADING] = "the model is still being loaded",
                                      [DI_DRAINING] = "the server is shutting down",
                                      [DI_FAILED] = "the model could not be loaded"};
    di_server_phase phase = di_server_phase_of(x->server);
    bool is_refused = (x->route->flags & DI_ROUTE_ENGINE) && !di_server_engine(x->server);
    is_refused = is_refused || (phase == DI_DRAINING && (x->route->flags & DI_ROUTE_GENERATE));
    if (!is_refused || x->status)
        return;
    x->retry_s = 5;
    refuse(x, 503, NULL, phase == DI_READY ? why[DI_LOADING] : why[phase]);
}

static void check_length(di_exchange *x) {
    const char *text = di_exchange_header(x, "Content-Length");
    uint64_t n;
    if (!text || !di_parse_u64(text, &n) || n <= (uint64_t)x->server->config.body_max)
        return;
    x->is_closing |= n > DISCARD_MAX; /* nobody waits for so much that is not wanted */
    char message[160];
    snprintf(message, sizeof message, "the body has %s bytes, at most %lld are taken", text,
             (long long)x->server->config.body_max);
    refuse(x, 413, NULL, message);
}

static const char *allow_of(unsigned methods) {
    return methods == DI_GET ? "GET, HEAD, OPTIONS" : methods == DI_POST ? "POST, OPTIONS" : "GET, HEAD, POST, OPTIONS";
}

static unsigned method_of(const char *name, bool *is_head) {
    *is_head = strcmp(name, "HEAD") == 0;
    if (*is_head || strcmp(name, "GET") == 0)
        return DI_GET;
    return strcmp(name, "POST") == 0 ? DI_POST : strcmp(name, "OPTIONS") == 0 ? DI_OPTIONS : 0;
}

static void check_route(di_exchange *x, const char *url, const char *method) {
    char message[300];
    if (strcmp(url, "*") == 0 && x->method == DI_OPTIONS) {
        x->status = 204;
        return;
    }
    if (strncasecmp(url, "http://", 7) == 0 || strncasecmp(url, "https://", 8) == 0)
        url = strchr(strchr(url, '/') + 2, '/'); /* the form that proxies get */
    x->route = url ? di_route_find(url, &x->rest) : NULL;
    if (!x->route) {
        url = url ? url : "/";
        snprintf(message, sizeof message, "there is nothing at '%.200s'", url);
        if (!di_utf8_valid(message, strlen(message)))
            snprintf(message, sizeof message, "there is nothing at this path");
        refuse(x, 404, NULL, message);
        return;
    }
    x->allow = allow_of(x->route->methods);
    if (x->method == DI_OPTIONS) {
        x->status = 204;
        return;
    }
    if (!(x->route->methods & x->method)) {
        snprintf(message, sizeof message, "method %.20s at '%.200s', expected %s", method, x->route->path, x->allow);
        refuse(x, 405, NULL, message);
        return;
    }
    x->allow = NULL;
}

static void put_live(di_exchange *x) {
    di_server *server = x->server;
    pthread_mutex_lock(&server->live_mutex);
    x->id = ++server->id_last;
    di_exchange **bucket = &server->live[x->id % DI_LIVE_BUCKETS];
    x->next_live = *bucket;
    *bucket = x;
    pthread_mutex_unlock(&server->live_mutex);
}

static void take_live(di_exchange *x) {
    di_server *server = x->server;
    pthread_mutex_lock(&server->live_mutex);
    di_exchange **link = &server->live[x->id % DI_LIVE_BUCKETS];
    while (*link != x)
        link = &(*link)->next_live;
    *link = x->next_live;
    pthread_mutex_unlock(&server->live_mutex);
}

static di_exchange *begin(di_server *server, struct MHD_Connection *http, const char *url, const char *method,
                          const char *version) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(http, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    di_exchange *x = calloc(1, sizeof *x);
    if (!x || !info || !info->socket_context) {
        free(x);
        return NULL;
    }
    x->server = server;
    x->http = http;
    x->connection = info->socket_context;
    x->start_ns = di_clock_ns();
    x->method = method_of(method, &x->is_head);
    atomic_store(&x->n_refs, 1);
    pthread_mutex_init(&x->mutex, NULL);
    put_live(x);
    atomic_fetch_add(&server->metrics.n_requests, 1);
    pthread_mutex_lock(&server->connections_mutex);
    x->connection->is_busy = true;
    x->connection->waiting_ns = 0;
    x->connection->reading_ns = x->start_ns;
    pthread_mutex_unlock(&server->connections_mutex);

    const char *wish = di_exchange_header(x, "Connection");
    x->is_last = wish ? strcasecmp(wish, "close") == 0 : strcmp(version, "HTTP/1.0") == 0;
    take_request_id(x);
    const char *problem = find_framing_problem(x, version);
    if (problem) {
        refuse(x, 400, NULL, problem);
        x->is_closing = true;
        return x;
    }
    take_origin(x);
    check_route(x, url, method);
    if (x->route && !x->status) {
        if (x->method == DI_POST && is_foreign_page(x))
            refuse(x, 403, NULL, "a page of another origin: --cors-origin allows it");
        if ((x->route->flags & DI_ROUTE_LOCAL) && !is_from_here(x))
            refuse(x, 403, NULL, "this is for users of the machine itself, on its loopback address");
        check_key(x);
        check_phase(x);
        check_limits(x);
    }
    check_length(x);
    x->is_active = !x->status && (x->route->flags & DI_ROUTE_GENERATE);
    if (x->is_active)
        atomic_fetch_add(&server->metrics.n_active, 1);
    return x;
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
        refuse(x, 413, NULL, message);
    } else if (x->body.len + n > DI_BODY_SMALL &&
               atomic_load(&server->body_bytes) + (int64_t)n > di_bodies_max(server)) {
        x->retry_s = 1;
        refuse(x, 503, NULL, "too many long bodies are coming in at once: try again later");
    } else {
        di_strbuf_append(&x->body, data, n);
        if (!x->body.failed) {
            x->charged += (int64_t)n;
            atomic_fetch_add(&server->body_bytes, (int64_t)n);
            return;
        }
        refuse(x, 503, NULL, "out of memory");
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
        x->state = DI_ANSWERED;
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
        x = begin(cls, http, url, method, version);
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
        return x->discarded > DISCARD_MAX ? MHD_NO : MHD_YES; /* no answer fits between the chunks of a body */
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
    take_live(x);
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
    c->written = written_on(c->fd);
    pthread_mutex_unlock(&server->connections_mutex);
    di_exchange_release(x);
}
