/* `deepinfer serve`: the HTTP server until somebody ends it.
 *
 * SIGTERM and SIGINT let what runs end and then end the program (status 0); a second one ends at once (status 1).
 * SIGHUP reads the key file again. Signals are taken by the program's one thread, which does nothing else. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli_model.h"
#include "server/server.h"

enum { QUEUE_MAX = 512, OTHER_DESCRIPTORS = 256, TICK_MS = 50 };

static di_status open_signals(int *fd, di_error *err) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, NULL);
    *fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return *fd >= 0 ? DI_OK : di_fail(err, DI_ERR_IO, "signalfd: %s", strerrordesc_np(errno));
}

/* A descriptor for each connection. */
static void raise_descriptors(int64_t *connections_max) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    rlim_t wanted = (rlim_t)*connections_max + OTHER_DESCRIPTORS;
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = DI_MIN(wanted, limit.rlim_max);
        (void)setrlimit(RLIMIT_NOFILE, &limit);
        (void)getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < wanted && limit.rlim_cur > 2 * OTHER_DESCRIPTORS) {
        di_warn("max-connections %lld is lowered to %lld: the system allows %lld open files",
                (long long)*connections_max, (long long)limit.rlim_cur - OTHER_DESCRIPTORS, (long long)limit.rlim_cur);
        *connections_max = (int64_t)limit.rlim_cur - OTHER_DESCRIPTORS;
    }
}

static void read_options(di_server_config *out, di_engine_config *engine, const di_options *opt) {
    di_cli_engine_config(engine, opt);
    if (engine->queue_max == 0)
        engine->queue_max = QUEUE_MAX;
    di_server_config_init(out);
    out->engine = engine;
    out->host = opt->host;
    out->port = (int)opt->port;
    out->api_keys = opt->api_key.items;
    out->n_api_keys = opt->api_key.n;
    out->api_key_file = opt->api_key_file;
    out->key_requests = opt->key_requests;
    out->key_rate = opt->key_rate;
    out->tls_cert = opt->tls_cert;
    out->tls_key = opt->tls_key;
    out->model_name = opt->served_model_name;
    out->cors_origins = opt->cors_origin.items;
    out->n_cors_origins = opt->cors_origin.n;
    out->body_max = opt->max_body;
    out->connections_max = opt->max_connections;
    out->read_timeout_s = opt->read_timeout;
    out->write_timeout_s = opt->write_timeout;
    out->keep_alive_s = opt->keep_alive;
    out->trace_dir = opt->trace_dir;
    raise_descriptors(&out->connections_max);
}

static di_status print_address(const di_server_config *config, int port, di_error *err) {
    char line[400];
    bool is_v6 = strchr(config->host, ':') != NULL;
    int n = snprintf(line, sizeof line, "listening on %s://%s%s%s:%d\n", config->tls_cert ? "https" : "http",
                     is_v6 ? "[" : "", config->host, is_v6 ? "]" : "", port);
    di_status st = di_cli_print(line, (size_t)n, err);
    return st ? st : di_cli_flush(err);
}

typedef struct serve_state {
    di_server *server;
    int signal_fd;
    bool is_loaded, is_draining, is_ended;
    int exit_status;
} serve_state;

static void take_signal(serve_state *s, uint32_t number) {
    di_error err = {0};
    if (number == SIGHUP) {
        if (di_server_reload_keys(s->server, &err)) {
            di_error_log("%s: the keys stay as they were", err.message);
        } else {
            di_info("keys read again");
        }
    } else if (!s->is_loaded) {
        di_info("ended while the model was being loaded");
        _exit(0); /* nothing runs, and loading can't be stopped in its middle */
    } else if (s->is_draining) {
        di_warn("ending at once");
        s->is_ended = true;
        s->exit_status = 1;
    } else {
        di_info("no new requests; what runs goes on to its end");
        di_server_drain(s->server);
        s->is_draining = true;
    }
}

/* The model is there, or it never will be. */
static void take_ready(serve_state *s) {
    di_error err = {0};
    s->is_loaded = true;
    if (di_server_wait_ready(s->server, &err)) {
        s->exit_status = di_cli_fail(&err);
        s->is_ended = true;
    } else {
        di_info("ready");
    }
}

static void run_until_ended(serve_state *s) {
    while (!s->is_ended && !(s->is_draining && s->is_loaded && di_server_is_idle(s->server))) {
        struct pollfd fds[] = {{.fd = s->signal_fd, .events = POLLIN},
                               {.fd = s->is_loaded ? -1 : di_server_ready_fd(s->server), .events = POLLIN}};
        struct signalfd_siginfo info;
        if (poll(fds, 2, s->is_draining ? TICK_MS : -1) <= 0)
            continue;
        while (fds[0].revents && read(s->signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
            take_signal(s, info.ssi_signo);
        if (fds[1].revents)
            take_ready(s);
    }
}

int di_cmd_serve(const di_options *opt) {
    di_engine_config engine;
    di_server_config config;
    serve_state s = {.signal_fd = -1};
    di_error err = {0};
    read_options(&config, &engine, opt);
    di_status st = open_signals(&s.signal_fd, &err);
    if (!st)
        st = di_server_create(&config, &s.server, &err);
    if (!st)
        st = print_address(&config, di_server_port(s.server), &err);
    if (st) {
        s.exit_status = di_cli_fail(&err);
    } else {
        run_until_ended(&s);
    }
    di_server_destroy(s.server);
    if (s.signal_fd >= 0)
        close(s.signal_fd);
    return s.exit_status;
}
