/* The server's life: the socket, libmicrohttpd's threads, loading beside them, and the end.
 *
 * It listens before the model is loaded, so that whoever waits for it sees 503 and not a closed port. The end is in
 * this order: new work is refused; what runs in the engine ends; suspended connections are resumed, which libmicrohttpd
 * needs before it stops; its threads, the work threads and the watch thread end; the engine goes last. */
#include "server_internal.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { HTTP_THREADS = 2, HEADER_BYTES_MAX = 65536, BACKLOG = 1024 };

void di_server_config_init(di_server_config *config) {
    *config = (di_server_config){
        .host = "127.0.0.1",
        .body_max = 64 << 20,
        .connections_max = 4096,
        .read_timeout_s = 60,
        .write_timeout_s = 60,
        .keep_alive_s = 75,
    };
}

/* ---- listening ----------------------------------------------------------------------------------------------------
 */

static int open_socket(const struct addrinfo *a) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int code = errno;
    close(fd);
    errno = code;
    return -1;
}

static int port_of(int fd) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = {0};
    socklen_t len = sizeof a;
    if (getsockname(fd, &a.any, &len) != 0)
        return 0;
    return a.any.sa_family == AF_INET6 ? ntohs(a.v6.sin6_port) : ntohs(a.v4.sin_port);
}

static di_status start_listening(di_server *s, di_error *err) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    char port[16];
    if (s->config.port < 0 || s->config.port > 65535)
        return di_fail(err, DI_ERR_ARG, "port: %d, expected 0 to 65535", s->config.port);
    snprintf(port, sizeof port, "%d", s->config.port);
    int code = getaddrinfo(s->config.host, port, &hints, &list);
    if (code != 0)
        return di_fail(err, DI_ERR_ARG, "host '%s': %s", s->config.host, gai_strerror(code));
    int failure = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; a && s->listen_fd < 0; a = a->ai_next) {
        s->listen_fd = open_socket(a);
        failure = errno;
    }
    freeaddrinfo(list);
    if (s->listen_fd < 0)
        return di_fail(err, DI_ERR_IO, "'%s' port %s: %s", s->config.host, port, strerrordesc_np(failure));
    s->port = port_of(s->listen_fd);
    return DI_OK;
}

static void log_http(void *cls, const char *fmt, va_list args) __attribute__((format(printf, 2, 0)));
static void log_http(void *cls, const char *fmt, va_list args) {
    char text[300];
    (void)cls;
    vsnprintf(text, sizeof text, fmt, args);
    text[strcspn(text, "\n")] = '\0';
    di_debug("http: %s", text);
}

/* %41 becomes A, in place; %00 stays: a path must not end where its reader doesn't expect it. */
static size_t unescape(void *cls, struct MHD_Connection *http, char *text) {
    char *out = text;
    (void)cls;
    (void)http;
    for (const char *in = text; *in; in++) {
        int high = *in == '%' ? di_hex_digit(in[1]) : -1, low = high >= 0 ? di_hex_digit(in[2]) : -1;
        if (low >= 0 && high + low > 0) {
            *out++ = (char)(high << 4 | low);
            in += 2;
        } else {
            *out++ = *in;
        }
    }
    *out = '\0';
    return (size_t)(out - text);
}

static di_status start_http(di_server *s, di_error *err) {
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
                     MHD_USE_TURBO; /* sockets stay open for writing up to the last callback */
    static const char versions[] = "NORMAL:-VERS-TLS1.0:-VERS-TLS1.1";
    struct MHD_OptionItem tls[4] = {{MHD_OPTION_END, 0, NULL}};
    if (s->config.tls_cert) {
        flags |= MHD_USE_TLS;
        tls[0] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_CERT, 0, (void *)(uintptr_t)di_strbuf_str(&s->cert)};
        tls[1] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_KEY, 0, (void *)(uintptr_t)di_strbuf_str(&s->key_text)};
        tls[2] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_PRIORITIES, 0, (void *)(uintptr_t)versions};
        tls[3] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    }
    s->http = MHD_start_daemon(flags, (uint16_t)s->port, NULL, NULL, di_exchange_handle, s, MHD_OPTION_EXTERNAL_LOGGER,
                               log_http, NULL, MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_NOTIFY_COMPLETED,
                               di_exchange_completed, s, MHD_OPTION_NOTIFY_CONNECTION, di_connection_notify, s,
                               MHD_OPTION_CONNECTION_LIMIT, (unsigned)s->config.connections_max,
                               MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES_MAX,
                               MHD_OPTION_CONNECTION_TIMEOUT, 0u, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)HTTP_THREADS,
                               MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
    if (s->http) {
        s->listen_fd = -1; /* libmicrohttpd closes it */
        return DI_OK;
    }
    if (s->config.tls_cert)
        return di_fail(err, DI_ERR_FORMAT, "'%s' and '%s': no certificate and its key, or the threads did not start",
                       s->config.tls_cert, s->config.tls_key);
    return di_fail(err, DI_ERR_MEMORY, "the threads of the HTTP server could not be started");
}

/* ---- loading ------------------------------------------------------------------------------------------------------
 */

static void *run_loader(void *arg) {
    di_server *s = arg;
    di_engine *engine = NULL;
    (void)pthread_setname_np(pthread_self(), "serve-load");
    di_status st = di_engine_create(s->config.engine, &engine, &s->load_error);
    if (!st && (st = di_engine_warm(engine, &s->load_error))) {
        di_engine_destroy(engine);
        engine = NULL;
    }
    atomic_store(&s->engine, engine);
    int loading = DI_LOADING;
    atomic_compare_exchange_strong(&s->phase, &loading, st ? DI_FAILED : DI_READY); /* it may drain already */
    uint64_t one = 1;
    (void)!write(s->ready_fd, &one, sizeof one);
    return NULL;
}

di_status di_server_wait_ready(di_server *s, di_error *err) {
    if (s->has_loader) {
        pthread_join(s->loader, NULL);
        s->has_loader = false;
    }
    bool is_loaded = atomic_load(&s->engine) != NULL;
    if (!is_loaded && err)
        *err = s->load_error;
    return is_loaded ? DI_OK : s->load_error.code;
}

int di_server_ready_fd(const di_server *s) {
    return s->ready_fd;
}

di_engine *di_server_engine(di_server *s) {
    return atomic_load(&s->engine);
}

const char *di_server_phase_name(di_server_phase phase) {
    static const char *const names[] = {
        [DI_LOADING] = "loading", [DI_READY] = "ready", [DI_DRAINING] = "draining", [DI_FAILED] = "failed"};
    return names[phase];
}

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

/* The last part of the model's path that says something. */
static char *name_of_model(const di_server_config *c) {
    const char *path = c->model_name ? c->model_name : c->engine->model ? c->engine->model : "dummy";
    size_t n = strlen(path);
    if (c->model_name)
        return strdup(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    size_t start = n;
    while (start > 0 && path[start - 1] != '/')
        start--;
    return strndup(path + start, n - start);
}

static di_status read_tls(di_server *s, di_error *err) {
    const di_server_config *c = &s->config;
    if (!c->tls_cert != !c->tls_key)
        return di_fail(err, DI_ERR_ARG, "%s without %s, expected both or none", c->tls_cert ? "tls-cert" : "tls-key",
                       c->tls_cert ? "tls-key" : "tls-cert");
    if (!c->tls_cert)
        return DI_OK;
    if (MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES)
        return di_fail(err, DI_ERR_UNSUPPORTED, "tls-cert: this libmicrohttpd was built without TLS");
    di_status st = di_file_read(c->tls_cert, 1 << 20, &s->cert, err);
    return st ? st : di_file_read(c->tls_key, 1 << 20, &s->key_text, err);
}

static di_status check_config(const di_server_config *c, di_error *err) {
    if (c->trace_dir && !di_path_is_dir(c->trace_dir))
        return di_fail(err, DI_ERR_NOT_FOUND, "trace-dir '%s': there is no such folder", c->trace_dir);
    if (c->model_name && !*c->model_name)
        return di_fail(err, DI_ERR_ARG, "served-model-name: an empty name");
    if (c->body_max < 1024 || c->connections_max < 1)
        return di_fail(err, DI_ERR_ARG, "max-body %lld and max-connections %lld, expected at least 1024 and 1",
                       (long long)c->body_max, (long long)c->connections_max);
    return DI_OK;
}

static di_status start(di_server *s, di_error *err) {
    di_status st;
    if ((st = check_config(&s->config, err)) || (st = read_tls(s, err)) || (st = di_server_reload_keys(s, err)) ||
        (st = start_listening(s, err)))
        return st;
    s->model_name = name_of_model(&s->config);
    s->ready_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!s->model_name || s->ready_fd < 0)
        return di_fail(err, DI_ERR_MEMORY, "server");
    if ((st = di_work_start(&s->work, err)) || (st = di_watch_start(s, err)) || (st = start_http(s, err)))
        return st;
    if (pthread_create(&s->loader, NULL, run_loader, s) != 0)
        return di_fail(err, DI_ERR_MEMORY, "the thread that loads the model could not be started");
    s->has_loader = true;
    return DI_OK;
}

di_status di_server_create(const di_server_config *config, di_server **out, di_error *err) {
    di_server *s = calloc(1, sizeof *s);
    sigset_t all, before;
    if (!s)
        return di_fail(err, DI_ERR_MEMORY, "server");
    s->config = *config;
    s->listen_fd = s->ready_fd = s->watch.epoll_fd = s->watch.stop_fd = -1;
    s->start_ns = di_clock_ns();
    s->start_s = di_clock_wall_s();
    pthread_mutex_init(&s->connections_mutex, NULL);
    pthread_mutex_init(&s->live_mutex, NULL);
    di_keys_init(&s->keys, config->key_requests, config->key_rate);
    di_metrics_init(&s->metrics);
    /* Signals are for the program's own thread. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    di_status st = start(s, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (st) {
        di_server_destroy(s);
    } else {
        *out = s;
    }
    return st;
}

int di_server_port(const di_server *s) {
    return s->port;
}

di_status di_server_reload_keys(di_server *s, di_error *err) {
    const di_server_config *c = &s->config;
    return di_keys_load(&s->keys, c->api_keys, c->n_api_keys, c->api_key_file, err);
}

void di_server_drain(di_server *s) {
    atomic_store(&s->phase, DI_DRAINING);
}

int64_t di_bodies_max(const di_server *s) {
    return 16 * s->config.body_max;
}

int64_t di_keys_share(di_server *s) {
    int64_t n = di_engine_places_max(di_server_engine(s));
    pthread_mutex_lock(&s->keys.mutex);
    bool has_others = s->keys.n > 1;
    pthread_mutex_unlock(&s->keys.mutex);
    return has_others && n > 1 ? n - DI_MAX(n / 4, 1) : 0;
}

bool di_server_is_idle(di_server *s) {
    return atomic_load(&s->metrics.n_active) == 0;
}

/* Resumes whatever waits, so that libmicrohttpd can let go of it. */
static void hang_up_all(di_server *s) {
    for (int i = 0; i < DI_LIVE_BUCKETS; i++) {
        pthread_mutex_lock(&s->live_mutex);
        for (di_exchange *x = s->live[i]; x; x = x->next_live) {
            pthread_mutex_lock(&x->mutex);
            x->is_gone = x->is_gone || x->state != DI_ANSWERED; /* a reply that is complete may still be written */
            di_exchange_wake(x);
            pthread_mutex_unlock(&x->mutex);
        }
        pthread_mutex_unlock(&s->live_mutex);
    }
}

static bool has_live(di_server *s) {
    bool has = false;
    pthread_mutex_lock(&s->live_mutex);
    for (int i = 0; i < DI_LIVE_BUCKETS; i++)
        has = has || s->live[i];
    pthread_mutex_unlock(&s->live_mutex);
    return has;
}

void di_server_destroy(di_server *s) {
    di_error ignored;
    if (!s)
        return;
    di_server_drain(s);
    (void)di_server_wait_ready(s, &ignored); /* the loader can't be stopped in the middle */
    if (s->http) {
        if (s->engine)
            (void)di_engine_drain(s->engine, 0, &ignored);
        /* From here on nobody is suspended anew, and who still comes is refused or answered at once.
         * (MHD_quiesce_daemon, which would turn them away, takes the listening socket out of its threads' epoll sets at
         * the same time as they do, and ends the program when one of them was faster.) */
        atomic_store(&s->is_ending, true);
        for (int i = 0; i < 100 && has_live(s); i++) {
            hang_up_all(s);
            const struct timespec pause = {.tv_nsec = 10000000};
            nanosleep(&pause, NULL);
        }
        hang_up_all(s);
        MHD_stop_daemon(s->http);
    }
    di_work_stop(&s->work);
    di_watch_stop(s);
    di_engine_destroy(s->engine); /* the last samples let go of their exchanges */
    if (s->listen_fd >= 0)
        close(s->listen_fd);
    if (s->ready_fd >= 0)
        close(s->ready_fd);
    di_metrics_deinit(&s->metrics);
    di_keys_deinit(&s->keys);
    pthread_mutex_destroy(&s->connections_mutex);
    pthread_mutex_destroy(&s->live_mutex);
    di_strbuf_deinit(&s->cert);
    if (s->key_text.data)
        explicit_bzero(s->key_text.data, s->key_text.len);
    di_strbuf_deinit(&s->key_text);
    free(s->model_name);
    free(s);
}
