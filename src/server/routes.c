/* The table of routes, and those that need no engine and little time. */
#include "server_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK_TOKENS = 128 }; /* of a KV block (docs/formats.md) */

/* ---- looking ------------------------------------------------------------------------------------------------------
 */

static void run_health(di_exchange *x) {
    di_server_phase phase = di_server_phase_of(x->server);
    if (phase == DI_READY) {
        di_strbuf_puts(&x->reply, "{\"status\":\"ok\"}");
        di_exchange_answer(x, 200);
        return;
    }
    di_strbuf_printf(&x->reply, "{\"status\":\"%s\"}", di_server_phase_name(phase));
    x->retry_s = 1;
    di_exchange_answer(x, 503);
}

static void run_version(di_exchange *x) {
    di_strbuf_printf(&x->reply, "{\"version\":\"%s\"}", di_version());
    di_exchange_answer(x, 200);
}

static void run_metrics(di_exchange *x) {
    di_metrics_write(x->server, &x->reply);
    x->content_type = "text/plain; version=0.0.4; charset=utf-8";
    di_exchange_answer(x, 200);
}

static void run_stats(di_exchange *x) {
    di_stats_write(x->server, &x->reply);
    di_exchange_answer(x, 200);
}

/* One entry of /v1/models, with the keys of both the OpenAI and the Anthropic API. */
static void write_model(di_server *server, di_strbuf *out) {
    char date[32];
    time_t created = (time_t)server->start_s;
    struct tm tm;
    gmtime_r(&created, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &tm);
    const char *name = server->model_name;
    di_strbuf_puts(out, "{\"id\":");
    di_json_write_string(out, name, strlen(name));
    di_strbuf_printf(out, ",\"object\":\"model\",\"type\":\"model\",\"created\":%lld,\"created_at\":\"%s\",",
                     (long long)server->start_s, date);
    di_strbuf_puts(out, "\"owned_by\":\"deepinfer\",\"display_name\":");
    di_json_write_string(out, name, strlen(name));
    di_strbuf_puts(out, ",\"root\":");
    di_json_write_string(out, name, strlen(name));
    di_strbuf_printf(out, ",\"parent\":null,\"max_model_len\":%lld}",
                     (long long)di_engine_context_max(di_server_engine(server)));
}

static void run_models(di_exchange *x) {
    const char *name = x->server->model_name;
    di_strbuf_puts(&x->reply, "{\"object\":\"list\",\"data\":[");
    write_model(x->server, &x->reply);
    di_strbuf_puts(&x->reply, "],\"has_more\":false,\"first_id\":");
    di_json_write_string(&x->reply, name, strlen(name));
    di_strbuf_puts(&x->reply, ",\"last_id\":");
    di_json_write_string(&x->reply, name, strlen(name));
    di_strbuf_putc(&x->reply, '}');
    di_exchange_answer(x, 200);
}

static void run_model(di_exchange *x) {
    if (strcmp(x->rest, x->server->model_name) != 0) {
        di_exchange_fail(x, 404, "model", "model '%.200s' is not here, expected '%s'",
                         di_utf8_valid(x->rest, strlen(x->rest)) ? x->rest : "?", x->server->model_name);
        return;
    }
    write_model(x->server, &x->reply);
    di_exchange_answer(x, 200);
}

/* What routers read before they send work: names and sizes. */
static void run_server_info(di_exchange *x) {
    di_server *server = x->server;
    const di_engine_config *e = server->config.engine;
    di_engine_stats_t s = {.struct_size = sizeof s};
    di_strbuf *out = &x->reply;
    di_engine_stats(di_server_engine(server), &s);
    const int64_t n_tokens = s.blocks * BLOCK_TOKENS;
    di_strbuf_puts(out, "{\"model_path\":");
    di_json_write_string(out, server->model_name, strlen(server->model_name));
    di_strbuf_puts(out, ",\"served_model_name\":");
    di_json_write_string(out, server->model_name, strlen(server->model_name));
    di_strbuf_puts(out, ",\"tokenizer_path\":");
    di_json_write_string(out, server->model_name, strlen(server->model_name));
    di_strbuf_printf(out,
                     ",\"version\":\"%s\",\"is_generation\":true,\"has_image_understanding\":false,\"dp_size\":1,"
                     "\"tp_size\":1,\"pp_size\":1,\"disaggregation_mode\":\"null\",\"model_type\":\"deepseek_v41\","
                     "\"context_length\":%lld,\"max_model_len\":%lld,\"max_running_requests\":%d,"
                     "\"max_queued_requests\":%lld,\"max_total_num_tokens\":%lld,\"block_size\":%d,"
                     "\"num_blocks\":%lld,\"numerics\":\"%s\",\"replay\":\"%s\",\"draft_tokens\":%d,"
                     "\"uptime_s\":%.3f}",
                     di_version(), (long long)di_engine_context_max(di_server_engine(server)),
                     (long long)di_engine_context_max(di_server_engine(server)), e->seqs_max, (long long)e->queue_max,
                     (long long)n_tokens, BLOCK_TOKENS, (long long)s.blocks, e->numerics, e->replay, e->draft_tokens,
                     (double)(di_clock_ns() - server->start_ns) / 1e9);
    di_exchange_answer(x, 200);
}

static void write_load(di_server *server, di_strbuf *out) {
    di_engine_stats_t s = {.struct_size = sizeof s};
    di_engine_stats(di_server_engine(server), &s);
    const int64_t used = s.blocks_used * BLOCK_TOKENS, all = s.blocks * BLOCK_TOKENS, n = s.n_running + s.n_waiting;
    di_strbuf_printf(out,
                     "{\"dp_rank\":0,\"num_reqs\":%lld,\"num_running_reqs\":%lld,\"num_waiting_reqs\":%lld,"
                     "\"num_tokens\":%lld,\"num_used_tokens\":%lld,\"max_total_num_tokens\":%lld,\"token_usage\":%.6g}",
                     (long long)n, (long long)s.n_running, (long long)s.n_waiting, (long long)used, (long long)used,
                     (long long)all, s.blocks > 0 ? (double)s.blocks_used / (double)s.blocks : 0.0);
}

static void run_loads(di_exchange *x) {
    di_strbuf_printf(&x->reply, "{\"version\":\"%s\",\"dp_rank_count\":1,\"loads\":[", di_version());
    write_load(x->server, &x->reply);
    di_strbuf_puts(&x->reply, "]}");
    di_exchange_answer(x, 200);
}

static void run_load(di_exchange *x) {
    di_strbuf_putc(&x->reply, '[');
    write_load(x->server, &x->reply);
    di_strbuf_putc(&x->reply, ']');
    di_exchange_answer(x, 200);
}

/* ---- traces -------------------------------------------------------------------------------------------------------
 */

enum { TRACE_STEPS_MAX = 50, TRACE_STEPS = 20, TRACE_START_S = 30, TRACE_S = 600 };

/* The one key there is; any other is refused, so that nobody believes to have chosen a place. False: the exchange has
 * its answer. */
static bool read_trace_body(di_exchange *x, int64_t *n_steps) {
    *n_steps = TRACE_STEPS;
    if (x->body.len == 0)
        return true;
    di_json *body = di_exchange_parse(x);
    bool is_good = body != NULL;
    for (void *it = body ? di_json_iter(body) : NULL; it && is_good; it = di_json_iter_next(body, it)) {
        const di_json *v = di_json_iter_value(it);
        const char *key = di_json_iter_key(it, NULL);
        *n_steps = di_json_int(v);
        is_good = strcmp(key, "num_steps") == 0 && *n_steps >= 1 && *n_steps <= TRACE_STEPS_MAX;
        if (!is_good)
            di_exchange_fail(x, 400, key, "'%.60s': expected num_steps alone, 1 to %d", key, TRACE_STEPS_MAX);
    }
    di_json_free(body);
    return is_good;
}

/* The first name of its kind that is not taken: trace-1.json, trace-2.json ... */
static di_status make_trace_path(const char *dir, di_strbuf *path, char name[32], di_error *err) {
    for (int i = 1; i <= 100000; i++) {
        snprintf(name, 32, "trace-%d.json", i);
        di_path_join(path, dir, name);
        int fd = open(di_strbuf_str(path), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
        if (fd >= 0) {
            close(fd);
            return DI_OK;
        }
        if (errno != EEXIST)
            return di_fail(err, DI_ERR_IO, "the folder of traces: %s", strerrordesc_np(errno));
    }
    return di_fail(err, DI_ERR_DISK, "the folder of traces is full");
}

/* Waits until so many steps have run; false: none began, or it takes too long. */
static bool wait_steps(di_exchange *x, int64_t n_steps) {
    di_engine_stats_t s = {.struct_size = sizeof s};
    const struct timespec pause = {.tv_nsec = 5000000};
    di_engine_stats(di_server_engine(x->server), &s);
    int64_t first = s.n_steps, start_ns = di_clock_ns();
    for (;;) {
        di_engine_stats(di_server_engine(x->server), &s);
        if (s.n_steps >= first + n_steps)
            return true;
        int64_t limit_s = s.n_steps > first ? TRACE_S : TRACE_START_S;
        if (di_clock_ns() - start_ns > limit_s * 1000000000 || di_exchange_is_gone(x) ||
            di_server_phase_of(x->server) == DI_DRAINING)
            return false;
        nanosleep(&pause, NULL);
    }
}

static void run_trace(di_exchange *x) {
    di_server *server = x->server;
    di_strbuf path = {0};
    di_error err = {0};
    char name[32];
    int64_t n_steps;
    if (!server->config.trace_dir) {
        di_exchange_fail(x, 404, NULL, "traces are off: the server was started without --trace-dir");
        return;
    }
    if (!read_trace_body(x, &n_steps))
        return;
    if (atomic_exchange(&server->is_tracing, true)) {
        di_exchange_fail(x, 409, NULL, "a trace is being written already");
        return;
    }
    di_status st = make_trace_path(server->config.trace_dir, &path, name, &err);
    if (!st && (st = di_engine_trace_start(di_server_engine(server), di_strbuf_str(&path), &err)))
        unlink(di_strbuf_str(&path));
    if (st) {
        atomic_store(&server->is_tracing, false);
        di_exchange_fail(x, st == DI_ERR_BUSY ? 409 : di_status_http(st), NULL, "%s", err.message);
        di_strbuf_deinit(&path);
        return;
    }
    bool is_whole = wait_steps(x, n_steps);
    st = di_engine_trace_stop(di_server_engine(server), &err);
    atomic_store(&server->is_tracing, false);
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
    } else if (!is_whole) {
        unlink(di_strbuf_str(&path));
        di_exchange_fail(x, 503, NULL, "no trace: %lld steps did not run in time", (long long)n_steps);
    } else {
        di_strbuf_printf(&x->reply, "{\"status\":\"ok\",\"message\":\"%lld steps\",\"file\":\"%s\"}",
                         (long long)n_steps, name);
        di_exchange_answer(x, 200);
    }
    di_strbuf_deinit(&path);
}

/* ---- the table ----------------------------------------------------------------------------------------------------
 */

/* Work on texts, and work for the engine. */
enum {
    TEXT = DI_ROUTE_ENGINE | DI_ROUTE_WORK,
    GENERATE = DI_ROUTE_ENGINE | DI_ROUTE_WORK | DI_ROUTE_GENERATE,
};

/* clang-format off */
const di_route di_routes[] = {
    {"/v1/chat/completions",          DI_POST, GENERATE,               DI_API_CHAT,          di_generate_run},
    {"/v1/completions",               DI_POST, GENERATE,               DI_API_COMPLETIONS,   di_generate_run},
    {"/v1/responses",                 DI_POST, GENERATE,               DI_API_RESPONSES,     di_generate_run},
    {"/v1/messages",                  DI_POST, GENERATE,               DI_API_MESSAGES,      di_generate_run},
    {"/v1/chat/completions/render",   DI_POST, TEXT,                   DI_API_CHAT,          di_run_render},
    {"/v1/completions/render",        DI_POST, TEXT,                   DI_API_COMPLETIONS,   di_run_render},
    {"/v1/responses/render",          DI_POST, TEXT,                   DI_API_RESPONSES,     di_run_render},
    {"/v1/messages/render",           DI_POST, TEXT,                   DI_API_MESSAGES,      di_run_render},
    {"/v1/messages/count_tokens",     DI_POST, TEXT,                   DI_API_MESSAGES,      di_run_count_tokens},
    {"/tokenize",                     DI_POST, TEXT,                   DI_API_CHAT,          di_run_tokenize},
    {"/detokenize",                   DI_POST, TEXT,                   DI_API_CHAT,          di_run_detokenize},
    {"/trace",                        DI_POST, TEXT | DI_ROUTE_LOCAL,  DI_API_CHAT,          run_trace},
    {"/v1/models",                    DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_models},
    {"/v1/models/*",                  DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_model},
    {"/v1/loads",                     DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_loads},
    {"/get_load",                     DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_load},
    {"/server_info",                  DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_server_info},
    {"/get_server_info",              DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_server_info},
    {"/model_info",                   DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_server_info},
    {"/get_model_info",               DI_GET,  DI_ROUTE_ENGINE,        DI_API_CHAT,          run_server_info},
    {"/stats.json",                   DI_GET,  0,                      DI_API_CHAT,          run_stats},
    {"/health",                       DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          run_health},
    {"/version",                      DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          run_version},
    {"/metrics",                      DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          run_metrics},
    {"/",                             DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          di_run_web},
    {"/stats",                        DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          di_run_web},
    {"/web/*",                        DI_GET,  DI_ROUTE_OPEN,          DI_API_CHAT,          di_run_web},
};
/* clang-format on */
const size_t di_routes_len = DI_COUNT(di_routes);

const di_route *di_route_find(const char *path, char **rest) {
    for (size_t i = 0; i < di_routes_len; i++) {
        const char *own = di_routes[i].path;
        size_t n = strlen(own);
        if (own[n - 1] == '*' && strncmp(path, own, n - 1) == 0 && path[n - 1]) {
            *rest = strdup(path + n - 1);
            return *rest ? &di_routes[i] : NULL;
        }
        if (strcmp(path, own) == 0) {
            *rest = strdup(path);
            return *rest ? &di_routes[i] : NULL;
        }
    }
    return NULL;
}
