/* Private to server/: the server, a connection, and an exchange, which is one request with its reply.
 *
 * An exchange is made with the first header of a request and goes through these states:
 *
 *   READING   the body comes in ----------------------------------------+
 *   WORKING   suspended: a work thread has it, or the engine             | an error: ANSWERED at the end of the body
 *   ANSWERED  a whole reply is ready                                     |
 *   STREAMED  the head of a stream is due; pieces come as the socket takes them, suspended in between
 *
 * References: one of the connection's (until libmicrohttpd reports the request's end), one of the work queue, one for
 * each sample in the engine. The first to find it suspended under its mutex is the one that resumes the connection, so
 * that a connection is never resumed after its end. */
#ifndef DI_SERVER_INTERNAL_H
#define DI_SERVER_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "api/api.h"

#include "server.h"

typedef struct di_exchange di_exchange;
typedef struct di_connection di_connection;
typedef struct di_route di_route;

/* ---- keys.c ---- */

typedef struct di_key {
    char *secret;                   /* owned */
    char *name;                     /* owned: for logs and fair shares, never the secret */
    int64_t requests_max, rate_max; /* 0: no limit */
    _Atomic int64_t n_refs, n_running;
    pthread_mutex_t mutex;
    double tokens;     /* of the rate's bucket. lock: mutex */
    int64_t filled_ns; /* lock: mutex */
} di_key;

typedef struct di_keys {
    pthread_mutex_t mutex;
    di_key **items; /* owned [n]. lock: mutex */
    size_t n;
    int64_t requests_max, rate_max; /* of keys that name none */
} di_keys;

/* Reads the keys of the configuration; the file may be NULL. Keys that stay keep their counts. DI_ERR_NOT_FOUND,
 * DI_ERR_IO, DI_ERR_FORMAT naming the line; then nothing has changed. */
di_status di_keys_load(di_keys *keys, const char *const *given, size_t n_given, const char *file, di_error *err);
void di_keys_init(di_keys *keys, int64_t requests_max, int64_t rate_max);
void di_keys_deinit(di_keys *keys);
bool di_keys_are_needed(di_keys *keys);
/* The key with this secret, with a reference, in a time that tells nothing about the keys there are; NULL: none. */
di_key *di_keys_find(di_keys *keys, const char *secret, size_t len);
void di_key_release(di_key *key); /* NULL is fine */
/* Counts a request of the key. False when it is over a limit: why, and *retry_s until it is worth trying again. */
bool di_key_enter(di_key *key, int64_t now_ns, const char **why, int64_t *retry_s);
/* Counts n more samples of it. False when it would be over its limit, or over `share` (0: none). */
bool di_key_add(di_key *key, int64_t n, int64_t share, const char **why, int64_t *retry_s);
void di_key_leave(di_key *key, int64_t n);
/* Samples that one key may have where there are several: three quarters of the engine's places. 0: no limit. */
int64_t di_keys_share(di_server *server);

/* ---- metrics.c ---- */

/* Times in fixed buckets, and the last of them for percentiles. */
enum { DI_TIMES_WINDOW = 1024, DI_TIMES_BUCKETS = 24 };

typedef struct di_times {
    const char *name, *help;
    int64_t buckets[DI_TIMES_BUCKETS + 1];
    int64_t n;
    double sum_s;
    float last_ms[DI_TIMES_WINDOW]; /* ring */
} di_times;

typedef enum di_time_kind {
    DI_TIME_FIRST,     /* from submission to the first token */
    DI_TIME_BETWEEN,   /* between two pieces of one output */
    DI_TIME_PER_TOKEN, /* of a whole output, after the first token */
    DI_TIME_WHOLE,
    DI_TIME_QUEUED,
    DI_TIME_KINDS
} di_time_kind;

typedef struct di_metrics {
    pthread_mutex_t mutex;
    di_times times[DI_TIME_KINDS]; /* lock: mutex */
    _Atomic int64_t n_connections, n_connections_total, n_active, n_streams, n_requests;
    _Atomic int64_t n_refused_busy, n_refused_key, n_hung_up, n_cut_off;
    _Atomic int64_t n_replies[6];                    /* by the first digit of the status */
    _Atomic int64_t n_finished[DI_FINISH_ERROR + 1]; /* samples by di_finish */
} di_metrics;

void di_metrics_init(di_metrics *m);
void di_metrics_deinit(di_metrics *m);
void di_metrics_time(di_metrics *m, di_time_kind kind, int64_t ns);
/* /metrics: Prometheus' text format. */
void di_metrics_write(di_server *server, di_strbuf *out);
/* /stats.json. */
void di_stats_write(di_server *server, di_strbuf *out);
/* Whole seconds until a refused request is worth trying again, 1 to 60, by the requests that end now. */
int64_t di_retry_after_s(di_server *server);

/* ---- work.c ---- */

/* Of the threads, at most half are for long bodies and traces at once, so that short requests never wait for them all.
 */
typedef struct di_work {
    pthread_mutex_t mutex;
    pthread_cond_t more;
    di_exchange *first, *last; /* lock: mutex; a reference each */
    int n_long;                /* threads that have long work. lock: mutex */
    bool is_stopping;          /* lock: mutex */
    pthread_t threads[4];
    int n_threads;
} di_work;

di_status di_work_start(di_work *work, di_error *err);
/* Runs what is queued and ends. */
void di_work_stop(di_work *work);
/* Has a thread call x->route->run(x). Takes a reference over. */
void di_work_add(di_work *work, di_exchange *x);

/* ---- connections (connection.c), heads (head.c) and exchanges (exchange.c) ---- */

struct di_connection {
    di_connection *previous, *next; /* lock: server->connections_mutex, as what follows */
    int fd;
    bool is_local;      /* the peer is this machine's loopback */
    bool has_served;    /* a request has been answered on it */
    bool is_cut;        /* by a deadline */
    bool is_busy;       /* a request is there, or the last one ended badly */
    int64_t waiting_ns; /* since when it waits for a request's header; 0: it does not */
    int64_t reading_ns; /* since when a body comes in; 0: none */
    int64_t written;    /* bytes of replies, as the socket counted them after the last one */
};

/* Bytes of replies that the system has been given for the other side, and those that it has acknowledged. */
int64_t di_connection_written(const di_connection *c);
int64_t di_connection_acked(const di_connection *c);
/* What a content reader returns to end a reply in its middle: one byte in buf, which can't be written any more. An
 * error of the reader's would do, but libmicrohttpd 0.9.75 then lets the connection lie, closed and never freed, until
 * others come and go; a write that fails ends it at once. */
ssize_t di_connection_break(const di_connection *c, char *buf);
/* Writes an error past libmicrohttpd, on a connection where it writes nothing and that is about to end. */
void di_connection_write(const di_connection *c, int status, const char *reason, const char *message);

typedef enum di_method { DI_GET = 1, DI_POST = 2, DI_OPTIONS = 4 } di_method;

enum {
    DI_ROUTE_OPEN = 1,     /* needs no key */
    DI_ROUTE_ENGINE = 2,   /* 503 while it is loaded */
    DI_ROUTE_WORK = 4,     /* `run` takes time: on a work thread */
    DI_ROUTE_GENERATE = 8, /* new work: refused while draining, counted by the key's limits */
    DI_ROUTE_LOCAL = 16    /* for this machine's own users alone */
};

struct di_route {
    const char *path; /* a last '*' stands for the rest of the path, which is not empty */
    unsigned methods; /* of di_method; HEAD comes with GET */
    unsigned flags;   /* of DI_ROUTE_ */
    di_api_kind api;  /* whose form errors have, and bodies */
    void (*run)(di_exchange *x);
};

extern const di_route di_routes[];
extern const size_t di_routes_len;

typedef enum di_exchange_state { DI_READING, DI_WORKING, DI_ANSWERED, DI_STREAMED } di_exchange_state;

struct di_exchange {
    di_server *server;
    struct MHD_Connection *http;
    di_connection *connection;
    uint64_t id;
    _Atomic int32_t n_refs;
    const di_route *route; /* NULL: none has the path */
    char *rest;            /* owned: what stands for the route's '*' */
    unsigned method;
    char request_id[160];
    char *origin; /* owned: CORS, "" none */
    bool is_origin_allowed;
    di_key *key;       /* a reference; NULL: none was needed */
    int64_t n_entered; /* samples that the key counts for it */
    di_strbuf body;
    int64_t charged; /* of server->body_bytes */
    int64_t start_ns;
    bool is_dispatched; /* the request is there as a whole */
    bool is_closing;    /* the connection ends behind the reply */
    bool is_last;       /* so the client wishes */
    bool is_active;     /* counted as a generation that runs */
    int64_t discarded;  /* bytes of a body that nobody reads */

    /* The reply: written by one thread at a time, the one that has the exchange. */
    int status; /* 0: none yet */
    di_strbuf reply;
    const char *content_type; /* NULL: JSON */
    const char *static_reply; /* in the place of `reply`; static_len bytes */
    size_t static_len;
    int64_t retry_s;   /* 0: no Retry-After */
    const char *allow; /* NULL: no Allow */

    struct di_generate *generate; /* owned: what the engine does for it; NULL: nothing */

    pthread_mutex_t mutex;
    di_exchange_state state; /* lock: mutex, as what follows */
    bool is_suspended;
    bool is_gone;    /* the client has hung up, or was cut off */
    bool is_replied; /* libmicrohttpd has the reply */
    bool is_written; /* the whole reply is libmicrohttpd's: a client that leaves now has it, or nearly so */
    int64_t acked;   /* bytes that the reader had taken when it was last looked at */
    bool wants_ping;
    int64_t sent_ns;        /* when the socket last took something, or the wait for it began */
    di_exchange *next_work; /* lock: work.mutex */
    di_exchange *next_live; /* lock: server->live_mutex */
};

/* Bytes of a body that nobody wants which are still read, so that the client can see the answer. */
enum { DI_DISCARD_MAX = 64 << 20 };

/* A new exchange for a request whose head is there, with its refusal (status above 0) where there is one; NULL when
 * memory is short. On an HTTP thread. */
di_exchange *di_exchange_begin(di_server *server, struct MHD_Connection *http, const char *url, const char *method,
                               const char *version);
/* Puts it into the table of those that are there; it leaves with its end. */
void di_exchange_enlist(di_exchange *x);
di_exchange *di_exchange_acquire(di_exchange *x);
void di_exchange_release(di_exchange *x);
/* Suspends the connection until it is woken. With the mutex held, on its HTTP thread. False: the server ends, and
 * nobody may be suspended any more. */
bool di_exchange_suspend(di_exchange *x);
/* Its key counts it no longer: the reply is complete. On its HTTP thread. */
void di_exchange_leave_key(di_exchange *x);
/* Resumes the connection if it is suspended. With the mutex held. */
void di_exchange_wake(di_exchange *x);
/* The reply is complete: an error in the form of the route's API, or x->reply as it is. Wakes the connection. */
void di_exchange_fail(di_exchange *x, int status, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void di_exchange_fail_status(di_exchange *x, di_status st, const char *param, const di_error *err);
void di_exchange_answer(di_exchange *x, int status);
/* Puts the text of an error reply together; nothing is woken. */
void di_exchange_write_error(di_exchange *x, int status, const char *param, const char *message);
/* A header of the request; NULL: it has none. Only on HTTP threads. */
const char *di_exchange_header(const di_exchange *x, const char *name);
bool di_exchange_is_gone(di_exchange *x);
/* The client is no longer there, or is_cut: was too slow. Ends what runs for it. */
void di_exchange_hang_up(di_exchange *x, bool is_cut);

/* libmicrohttpd's callbacks. */
enum MHD_Result di_exchange_handle(void *server, struct MHD_Connection *http, const char *url, const char *method,
                                   const char *version, const char *data, size_t *n_data, void **exchange);
void di_exchange_completed(void *server, struct MHD_Connection *http, void **exchange,
                           enum MHD_RequestTerminationCode code);
void di_connection_notify(void *server, struct MHD_Connection *http, void **connection,
                          enum MHD_ConnectionNotificationCode code);

/* ---- generate.c ---- */

/* Routes of the four APIs; on work threads. */
void di_generate_run(di_exchange *x);
/* The reply when the exchange was woken for it, on an HTTP thread: sets state and, for a whole reply, status and text.
 */
void di_generate_reply(di_exchange *x);
/* The next piece of a stream, at most `max` bytes; 0 and a suspended connection when there is none yet. */
ssize_t di_generate_read(void *exchange, uint64_t at, char *buf, size_t max);
/* Ends the samples that still run. */
void di_generate_abort(di_exchange *x);
/* Whether it is a stream that could have a comment now. With the exchange's mutex held. */
bool di_generate_can_ping(const struct di_generate *g);
void di_generate_destroy(struct di_generate *g); /* NULL is fine */
/* The model that a body names: 404 when it is another. */
bool di_generate_check_model(di_exchange *x, const di_request *request);

/* ---- routes.c, tokens.c, web.c ---- */

/* The body as a request of an API, its model checked. NULL: the exchange has its answer. On work threads. */
di_shared_request *di_exchange_open_request(di_exchange *x, di_api_kind api);
/* The body as a JSON object. NULL: the exchange has its answer. */
di_json *di_exchange_parse(di_exchange *x);

/* The route of a path; *rest (a new text) is what its '*' stands for. NULL: none. */
const di_route *di_route_find(const char *path, char **rest);

void di_run_render(di_exchange *x);
void di_run_count_tokens(di_exchange *x);
void di_run_tokenize(di_exchange *x);
void di_run_detokenize(di_exchange *x);

typedef struct di_web_file {
    const char *path; /* name in src/server/web */
    const char *data, *end;
} di_web_file;
/* The embedded file of that name, or of the paths "/" and "/stats"; NULL: none. */
const di_web_file *di_web_find(const char *path);
void di_run_web(di_exchange *x);

/* ---- watch.c ---- */

typedef struct di_watch {
    int epoll_fd, stop_fd;
    pthread_t thread;
    bool has_thread;
} di_watch;

di_status di_watch_start(di_server *server, di_error *err);
void di_watch_stop(di_server *server);
/* Hang-ups of the exchange's connection are told by di_exchange_hang_up from now on. */
void di_watch_add(di_exchange *x);
void di_watch_remove(di_exchange *x);

/* ---- server.c ---- */

enum { DI_LIVE_BUCKETS = 256 };

typedef enum di_server_phase { DI_LOADING, DI_READY, DI_DRAINING, DI_FAILED } di_server_phase;

struct di_server {
    di_server_config config;
    char *model_name; /* owned */
    struct MHD_Daemon *http;
    int listen_fd, port;
    int64_t start_ns, start_s;
    di_strbuf cert, key_text; /* TLS */
    di_keys keys;
    di_metrics metrics;
    di_work work;
    di_watch watch;

    pthread_t loader;
    bool has_loader;
    int ready_fd;
    _Atomic(di_engine *) engine; /* owned; NULL until it is loaded */
    _Atomic bool is_ending;      /* nobody may be suspended any more */
    _Atomic int phase;           /* of di_server_phase */
    di_error load_error;         /* of DI_FAILED */
    _Atomic int64_t body_bytes;  /* of all bodies that are in memory */
    _Atomic bool is_tracing;

    pthread_mutex_t connections_mutex;
    di_connection *connections; /* lock: connections_mutex */
    pthread_mutex_t live_mutex;
    di_exchange *live[DI_LIVE_BUCKETS]; /* lock: live_mutex */
    uint64_t id_last;                   /* lock: live_mutex */
};

const char *di_server_phase_name(di_server_phase phase); /* "loading", "ready", "draining", "failed" */
/* Bytes that all bodies together may take, with what becomes of them. Small ones always have room. */
enum { DI_BODY_SMALL = 65536 };
int64_t di_bodies_max(const di_server *server);

static inline di_server_phase di_server_phase_of(di_server *server) {
    return (di_server_phase)atomic_load(&server->phase);
}

#endif
