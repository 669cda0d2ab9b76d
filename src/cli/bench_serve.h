/* What the files of bench serve share: the server under load, request bodies, processor time by thread.
 *
 * The server is one of the bench's own in this process, or the one of --url. Private to cli/; bench_load.h has the load
 * itself. */
#ifndef DI_CLI_BENCH_SERVE_H
#define DI_CLI_BENCH_SERVE_H

#include "server/server.h"

#include "bench.h"
#include "bench_load.h"

/* ---- the server ---- */

typedef struct di_bench_server {
    di_server *server; /* owned; NULL: that of --url */
    di_strbuf url;     /* owned: scheme, host, port */
    di_strbuf model;   /* owned: the first that it has */
    const char *key;   /* of requests; NULL: none */
} di_bench_server;

/* Starts one on a free port of the loopback, with the model of the options, and waits for it; or asks that of --url for
 * its model. seqs: requests that run at once, where the options don't say. Zeroed storage is valid for close, and what
 * an error leaves too. */
di_status di_bench_server_open(di_bench *b, di_bench_server *s, int32_t seqs, di_error *err);
void di_bench_server_close(di_bench_server *s);

/* ---- requests ---- */

/* Greedy chats of one size, without end marks, which have no text and would look like a pause of the stream; which
 * words a prompt has depends on `seed` and its number alone. */
typedef struct di_bench_asks {
    const char *model;
    int64_t n_prompt; /* short words, most of which are one token each; the chat format adds a few */
    int64_t n_output; /* tokens */
    uint64_t seed;
    uint64_t salt; /* whom cached prefixes are shared with; 0: everybody */
} di_bench_asks;

/* A body for di_bench_load_plan; user is a di_bench_asks. */
di_status di_bench_ask(void *user, int64_t i, di_strbuf *out, di_error *err);

/* The load as planned, on that server with such bodies. Requests that failed are an error, refused ones too unless
 * may_refuse. */
di_status di_bench_load_on(const di_bench_server *s, const di_bench_load_plan *plan, bool may_refuse,
                           di_bench_load *load, di_error *err);

/* ---- processor time ---- */

/* Nanoseconds of this process's threads: of those that are the server's own by their names, of the calling one, which
 * is the client, and of the engine's own. Those that compute wait for work by spinning and say nothing. */
typedef struct di_bench_cpu {
    double server, client, engine;
} di_bench_cpu;

/* Threads that have ended are not counted. DI_ERR_IO. */
di_status di_bench_cpu_read(di_bench_cpu *out, di_error *err);

/* ---- the rows ---- */

di_status di_bench_serve_cost(di_bench *b, di_error *err);        /* HTTP beside the C API */
di_status di_bench_serve_connections(di_bench *b, di_error *err); /* a thousand connections */

#endif
