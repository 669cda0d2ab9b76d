/* The HTTP server: the engine behind the public APIs, for the clients that people already have.
 *
 * Owns: the listening socket, connections and their limits, routes, API keys, streams of server-sent events, metrics,
 * and the two pages that are embedded in the program. Leaves HTTP itself to libmicrohttpd, bodies and replies to api/,
 * and everything about tokens to the engine.
 *
 *   HTTP threads      headers, bodies, writing replies: whatever a socket has or takes ............. (libmicrohttpd)
 *   work threads      reading and encoding a whole request, submitting it, tokenizing .............. (work.c)
 *   engine's thread   puts what comes of a request into the request's own queue, wakes its connection  (generate.c)
 *   watch thread      hang-ups while nothing is written, deadlines, keep-alive comments ............ (watch.c)
 *
 * A connection that waits for something is suspended in libmicrohttpd and costs no thread. */
#ifndef DI_SERVER_H
#define DI_SERVER_H

#include "deepinfer/deepinfer.h"

#include <stdbool.h>

typedef struct di_server di_server;

/* Everything is borrowed for the server's life. */
typedef struct di_server_config {
    const di_engine_config *engine;
    const char *host; /* name or address to listen on; default 127.0.0.1 */
    int port;         /* 0: one that is free */
    size_t n_api_keys;
    const char *const *api_keys;    /* that requests must carry one of; none, and no file: everybody may ask */
    const char *api_key_file;       /* more of them, a line each, with limits of their own; NULL: none */
    int64_t key_requests;           /* that one key may have at once; 0: no limit */
    int64_t key_rate;               /* requests a minute and key; 0: no limit */
    const char *tls_cert, *tls_key; /* files (PEM); both or none */
    const char *model_name;         /* in requests and replies; NULL: name of the model's folder */
    size_t n_cors_origins;
    const char *const *cors_origins; /* web origins whose pages may use the server, "*": all */
    int64_t body_max;                /* bytes of a request's body */
    int64_t connections_max;
    double read_timeout_s;  /* until a request has come as a whole */
    double write_timeout_s; /* a reader that takes nothing for so long is cut off */
    double keep_alive_s;    /* idle connections are closed after this time */
    const char *trace_dir;  /* where traces go that are asked for; NULL: none can be */
} di_server_config;

void di_server_config_init(di_server_config *config);

/* Starts to listen, and to load the model on a thread of its own; until it is there, /health is 503. DI_ERR_ARG for the
 * configuration, DI_ERR_NOT_FOUND, DI_ERR_IO for files and the address. */
di_status di_server_create(const di_server_config *config, di_server **out, di_error *err);
/* The port that it listens on. */
int di_server_port(const di_server *server);
/* The engine, once it is loaded; NULL before. */
di_engine *di_server_engine(di_server *server);
/* Waits until the model is loaded; why it could not be is the engine's error. */
di_status di_server_wait_ready(di_server *server, di_error *err);
/* A descriptor that becomes readable when loading has ended. Owned by the server. */
int di_server_ready_fd(const di_server *server);
/* Reads the key file again. On error the keys stay as they are. */
di_status di_server_reload_keys(di_server *server, di_error *err);
/* From now on new work is refused with 503 and /health is 503; what runs goes on. */
void di_server_drain(di_server *server);
/* Nothing runs or waits, and every reply has been written. */
bool di_server_is_idle(di_server *server);
/* Ends what still runs, and the engine. NULL is fine. */
void di_server_destroy(di_server *server);

#endif
