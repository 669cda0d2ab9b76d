/* bench serve: what streaming over HTTP costs beside the same requests through the C API, in one process and on one
 * engine, in turns. 64 requests at once, the same bodies but for the salt of the prefix cache; without drafts unless
 * --draft-tokens asks for them, because how many there are depends on the times of earlier steps.
 *
 *   throughput_64       tokens a second over HTTP, beside those of the C API
 *   overhead_per_token  microseconds that a token takes longer over HTTP
 *   serve_cost          the share of throughput that HTTP takes: 1 - http / c_api
 *   server_cpu          processor time of the server's own threads for a token
 *   client_cpu          the same of the client that the bench is: on one machine it takes from the same processors
 *   engine_cpu          what the engine's own thread takes more for a token than under the C API: the callbacks, in
 *                       which replies are put together, and whatever others in the caches cost it
 *   server_share        these two parts of the server in all processor time that there was: what is lost where the
 *                       client is elsewhere and processors are all that binds */
#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

#include "bench_serve.h"

enum { STREAMS = 64, OUTPUT = 128, PROMPT = 16 };

/* ---- processor time -----------------------------------------------------------------------------------------------
 */

/* The beginnings of the names of the server's threads: its own, and those that libmicrohttpd names itself. */
static const char *const server_threads[] = {"http", "serve", "MHD"};

static bool read_text(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    size_t n = fread(text, 1, size - 1, file);
    text[n] = '\0';
    fclose(file);
    return n > 0;
}

static void add_thread(di_bench_cpu *cpu, const char *id) {
    char path[128], name[64], times[128], *space;
    double *to = NULL;
    int64_t ns, tid;
    snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", id); /* the name and a line feed */
    bool is_there = read_text(path, name, sizeof name);
    snprintf(path, sizeof path, "/proc/self/task/%.20s/schedstat", id); /* "RUN_NS WAIT_NS SLICES" */
    if (!is_there || !read_text(path, times, sizeof times) || !(space = strchr(times, ' ')))
        return; /* it has just ended */
    *space = '\0';
    if (!di_parse_i64(times, &ns) || !di_parse_i64(id, &tid))
        return;
    if (tid == gettid()) {
        to = &cpu->client;
    } else if (strcmp(name, "engine\n") == 0) {
        to = &cpu->engine;
    }
    for (size_t i = 0; i < DI_COUNT(server_threads) && !to; i++)
        if (strncmp(name, server_threads[i], strlen(server_threads[i])) == 0)
            to = &cpu->server;
    if (to)
        *to += (double)ns;
}

di_status di_bench_cpu_read(di_bench_cpu *out, di_error *err) {
    *out = (di_bench_cpu){0};
    DIR *threads = opendir("/proc/self/task");
    if (!threads)
        return di_fail(err, DI_ERR_IO, "'/proc/self/task' can't be read");
    for (struct dirent *d; (d = readdir(threads)) != NULL;)
        if (d->d_name[0] != '.')
            add_thread(out, d->d_name);
    closedir(threads);
    return DI_OK;
}

/* ---- either way ---------------------------------------------------------------------------------------------------
 */

/* Nanoseconds for a token. */
typedef struct cost {
    double wall;
    di_bench_cpu cpu;
} cost;

static void per_token(cost *out, int64_t wall_ns, const di_bench_cpu *before, const di_bench_cpu *after,
                      double n_tokens) {
    out->wall = (double)wall_ns / n_tokens;
    out->cpu.server = (after->server - before->server) / n_tokens;
    out->cpu.client = (after->client - before->client) / n_tokens;
    out->cpu.engine = (after->engine - before->engine) / n_tokens;
}

static di_status over_http(const di_bench_server *s, di_bench_asks *asks, cost *out, di_error *err) {
    di_bench_load load = {0};
    di_bench_load_plan plan = {.n_clients = STREAMS, .n_requests = STREAMS, .user = asks};
    di_bench_cpu before, after;
    di_status st = di_bench_cpu_read(&before, err);
    if (!st)
        st = di_bench_load_on(s, &plan, false, &load, err);
    if (!st)
        st = di_bench_cpu_read(&after, err);
    for (int64_t i = 0; i < load.n_samples && !st; i++) {
        if (load.samples[i].output_tokens != asks->n_output)
            st = di_fail(err, DI_ERR_INTERNAL, "stream %lld has %lld tokens, expected %lld", (long long)i,
                         (long long)load.samples[i].output_tokens, (long long)asks->n_output);
    }
    if (!st)
        per_token(out, load.wall_ns, &before, &after, (double)(STREAMS * asks->n_output));
    di_bench_load_deinit(&load);
    return st;
}

/* What comes of the requests through the C API. */
typedef struct gathering {
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int n_done; /* lock: mutex, as what follows */
    int64_t n_tokens;
    di_error error;
} gathering;

static int on_event(void *user, const di_engine_event *event) {
    gathering *g = user;
    if (event->kind != DI_ENGINE_DONE)
        return 0;
    pthread_mutex_lock(&g->mutex);
    g->n_done++;
    g->n_tokens += event->result->n_tokens;
    if (event->result->error.code)
        g->error = event->result->error;
    pthread_cond_signal(&g->done);
    pthread_mutex_unlock(&g->mutex);
    return 0;
}

static di_status over_api(const di_bench_server *s, di_bench_asks *asks, cost *out, di_error *err) {
    gathering g = {.mutex = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};
    di_engine *engine = di_server_engine(s->server);
    di_bench_cpu before, after;
    di_strbuf body = {0};
    int n_sent = 0;
    di_status st = di_bench_cpu_read(&before, err);
    int64_t start_ns = di_clock_ns();
    for (; n_sent < STREAMS && !st; n_sent += !st) {
        di_engine_request request;
        di_strbuf_reset(&body);
        st = di_bench_ask(asks, n_sent, &body, err);
        di_engine_request_init(&request, sizeof request);
        request.json = di_strbuf_str(&body);
        request.json_len = body.len;
        request.json_api = "chat";
        if (!st)
            st = di_engine_submit(engine, &request, on_event, &g, NULL, err);
    }
    pthread_mutex_lock(&g.mutex); /* of those that were taken the end is awaited, whatever came after */
    while (g.n_done < n_sent)
        pthread_cond_wait(&g.done, &g.mutex);
    pthread_mutex_unlock(&g.mutex);
    int64_t wall_ns = di_clock_ns() - start_ns;
    if (!st)
        st = di_bench_cpu_read(&after, err);
    if (!st && g.error.code)
        st = di_fail(err, g.error.code, "%s", g.error.message);
    const int64_t n_expected = (int64_t)STREAMS * asks->n_output;
    if (!st && g.n_tokens != n_expected)
        st = di_fail(err, DI_ERR_INTERNAL, "%lld tokens, expected %lld", (long long)g.n_tokens, (long long)n_expected);
    if (!st)
        per_token(out, wall_ns, &before, &after, (double)g.n_tokens);
    pthread_mutex_destroy(&g.mutex);
    pthread_cond_destroy(&g.done);
    di_strbuf_deinit(&body);
    return st;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------
 */

enum { THROUGHPUT, OVERHEAD, COST, SERVER_CPU, CLIENT_CPU, ENGINE_CPU, SERVER_SHARE, N_ROWS };

static const struct {
    const char *name, *unit;
} rows[N_ROWS] = {
    [THROUGHPUT] = {"throughput_64", "tokens/s"},  [OVERHEAD] = {"overhead_per_token", "us"},
    [COST] = {"serve_cost", "fraction"},           [SERVER_CPU] = {"server_cpu", "us"},
    [CLIENT_CPU] = {"client_cpu", "us"},           [ENGINE_CPU] = {"engine_cpu", "us"},
    [SERVER_SHARE] = {"server_share", "fraction"},
};

typedef struct pairs {
    double values[N_ROWS][DI_BENCH_RUNS], api_rates[DI_BENCH_RUNS];
} pairs;

static di_status pair(const di_bench_server *s, di_bench_asks *asks, int n_processors, int turn, pairs *out,
                      di_error *err) {
    cost http = {0}, api = {0};
    di_status st = DI_OK;
    asks->seed = (uint64_t)turn + 2;
    for (int i = 0; i < 2 && !st; i++) { /* each way goes first in every other pair */
        asks->salt = 2 * asks->seed + (uint64_t)i;
        st = (i + turn) % 2 ? over_api(s, asks, &api, err) : over_http(s, asks, &http, err);
    }
    if (st || turn < 0)
        return st;
    out->values[THROUGHPUT][turn] = 1e9 / http.wall;
    out->api_rates[turn] = 1e9 / api.wall;
    out->values[OVERHEAD][turn] = 1e-3 * (http.wall - api.wall);
    out->values[COST][turn] = 1 - api.wall / http.wall;
    out->values[SERVER_CPU][turn] = 1e-3 * http.cpu.server;
    out->values[CLIENT_CPU][turn] = 1e-3 * http.cpu.client;
    out->values[ENGINE_CPU][turn] = 1e-3 * (http.cpu.engine - api.cpu.engine);
    out->values[SERVER_SHARE][turn] =
        (http.cpu.server + DI_MAX(http.cpu.engine - api.cpu.engine, 0)) / (http.wall * n_processors);
    return DI_OK;
}

static di_status cost_rows(di_bench *b, const bool wanted[N_ROWS], pairs *p, di_error *err) {
    di_status st = DI_OK;
    for (int k = 0; k < N_ROWS && !st; k++) {
        double limit = 0;
        const char *limit_kind = NULL;
        if (!wanted[k])
            continue;
        if (k == THROUGHPUT) {
            limit = di_bench_median(p->api_rates, DI_BENCH_RUNS);
            limit_kind = "c_api";
        } else if (k == COST || k == SERVER_SHARE) {
            limit = 0.03;
            limit_kind = "most_allowed";
        }
        st = di_bench_row(b, rows[k].name, p->values[k], DI_BENCH_RUNS, rows[k].unit, limit, limit_kind, err);
    }
    return st;
}

di_status di_bench_serve_cost(di_bench *b, di_error *err) {
    di_options opt = *b->opt;
    di_bench plain = *b;
    di_bench_server s;
    pairs p = {0};
    bool wanted[N_ROWS], is_wanted = false;
    for (int k = 0; k < N_ROWS; k++) {
        wanted[k] = di_bench_wants(b, rows[k].name);
        is_wanted = is_wanted || wanted[k];
    }
    if (!is_wanted)
        return DI_OK;
    if (!di_options_is_set(b->opt, DI_OPT_draft_tokens))
        opt.draft_tokens = 0;
    plain.opt = &opt;
    di_status st = di_bench_server_open(&plain, &s, STREAMS, err);
    di_bench_asks asks = {.model = di_strbuf_str(&s.model),
                          .n_prompt = di_options_is_set(b->opt, DI_OPT_prompt_tokens) ? opt.prompt_tokens : PROMPT,
                          .n_output = di_options_is_set(b->opt, DI_OPT_output_tokens) ? opt.output_tokens : OUTPUT};
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) /* one pair to warm up */
        st = pair(&s, &asks, di_cpu_count(), i, &p, err);
    if (!st)
        st = cost_rows(b, wanted, &p, err);
    di_bench_server_close(&s);
    return st;
}
