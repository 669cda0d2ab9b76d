/* The head of a request: who asks, for what, and whether it may.
 *
 * Headers are judged before a body is read, but the answer waits for the body where that is not too long: a connection
 * that is closed while the client still sends is reset, and the client never sees why. What two readers of the same
 * bytes could take for different requests ends the connection. */
#include "server_internal.h"

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
    x->is_closing |= n > DI_DISCARD_MAX; /* nobody waits for so much that is not wanted */
    char message[160];
    snprintf(message, sizeof message, "the body has %s bytes, at most %lld are taken", text,
             (long long)x->server->config.body_max);
    refuse(x, 413, NULL, message);
}

static const char *allow_of(unsigned methods) {
    return methods == DI_GET ? "GET, HEAD, OPTIONS" : methods == DI_POST ? "POST, OPTIONS" : "GET, HEAD, POST, OPTIONS";
}

static unsigned method_of(const char *name) {
    if (strcmp(name, "GET") == 0 || strcmp(name, "HEAD") == 0)
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

di_exchange *di_exchange_begin(di_server *server, struct MHD_Connection *http, const char *url, const char *method,
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
    x->method = method_of(method);
    atomic_store(&x->n_refs, 1);
    pthread_mutex_init(&x->mutex, NULL);
    di_exchange_enlist(x);
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
    x->is_active = !x->status && x->route && (x->route->flags & DI_ROUTE_GENERATE);
    if (x->is_active)
        atomic_fetch_add(&server->metrics.n_active, 1);
    return x;
}
