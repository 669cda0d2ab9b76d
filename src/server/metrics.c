/* Numbers of the server: counters, times in buckets, and what shows them (/metrics, /stats.json).
 *
 * Names of our own begin with `deepinfer:`; beside them stand the names of vLLM's metrics that routers and dashboards
 * read, with the same meaning. Percentiles are of the last 1,024 times; buckets are for who gathers over more. */
#include "server_internal.h"

#include <math.h>

/* Upper bounds in seconds: 1 ms to 10 minutes, closer where answers usually lie. */
static const double bounds[DI_TIMES_BUCKETS] = {0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02,
                                                0.03,  0.04,  0.06,  0.08,  0.1,   0.15, 0.25,  0.5,
                                                1,     2,     5,     10,    30,    60,   180,   600};

void di_metrics_init(di_metrics *m) {
    static const struct {
        const char *name, *help;
    } times[DI_TIME_KINDS] = {
        [DI_TIME_FIRST] = {"time_to_first_token_seconds", "From submission to the first token."},
        [DI_TIME_BETWEEN] = {"inter_token_latency_seconds", "Between two pieces of an output."},
        [DI_TIME_PER_TOKEN] = {"request_time_per_output_token_seconds", "Of an output, per token after the first."},
        [DI_TIME_WHOLE] = {"e2e_request_latency_seconds", "From submission to the last token."},
        [DI_TIME_QUEUED] = {"request_queue_time_seconds", "From submission to the first step."},
    };
    *m = (di_metrics){0};
    pthread_mutex_init(&m->mutex, NULL);
    for (int i = 0; i < DI_TIME_KINDS; i++) {
        m->times[i].name = times[i].name;
        m->times[i].help = times[i].help;
    }
}

void di_metrics_deinit(di_metrics *m) {
    pthread_mutex_destroy(&m->mutex);
}

void di_metrics_time(di_metrics *m, di_time_kind kind, int64_t ns) {
    double s = (double)ns / 1e9;
    int bucket = 0;
    while (bucket < DI_TIMES_BUCKETS && s > bounds[bucket])
        bucket++;
    pthread_mutex_lock(&m->mutex);
    di_times *t = &m->times[kind];
    t->buckets[bucket]++;
    t->last_ms[t->n % DI_TIMES_WINDOW] = (float)(s * 1e3);
    t->n++;
    t->sum_s += s;
    pthread_mutex_unlock(&m->mutex);
}

/* ---- Prometheus ---------------------------------------------------------------------------------------------------
 */

static void write_number(di_strbuf *out, double v) {
    if (v == (double)(int64_t)v && fabs(v) < 1e15) {
        di_strbuf_printf(out, "%lld\n", (long long)v);
    } else {
        di_strbuf_printf(out, "%.9g\n", v);
    }
}

/* One metric of one value, under a prefix ("deepinfer:" or "vllm:"). */
static void write_metric(di_strbuf *out, const char *prefix, const char *name, const char *type, const char *help,
                         double v) {
    const char *total = strcmp(type, "counter") == 0 ? "_total" : "";
    di_strbuf_printf(out, "# HELP %s%s%s %s\n# TYPE %s%s%s %s\n%s%s%s ", prefix, name, total, help, prefix, name, total,
                     type, prefix, name, total);
    write_number(out, v);
}

static void write_label(di_strbuf *out, const char *text) {
    for (const char *c = text; *c; c++) {
        if (*c == '\n') {
            di_strbuf_puts(out, "\\n");
        } else {
            if (*c == '"' || *c == '\\')
                di_strbuf_putc(out, '\\');
            di_strbuf_putc(out, *c);
        }
    }
}

/* The same with the label that vLLM's metrics have. */
static void write_vllm(di_strbuf *out, const char *model, const char *name, const char *type, const char *help,
                       const char *label, const char *value, double v) {
    if (help)
        di_strbuf_printf(out, "# HELP vllm:%s %s\n# TYPE vllm:%s %s\n", name, help, name, type);
    di_strbuf_printf(out, "vllm:%s{model_name=\"", name);
    write_label(out, model);
    di_strbuf_puts(out, "\",engine=\"0\"");
    if (label)
        di_strbuf_printf(out, ",%s=\"%s\"", label, value);
    di_strbuf_puts(out, "} ");
    write_number(out, v);
}

static void write_times(di_strbuf *out, const char *prefix, const di_times *t) {
    int64_t sum = 0;
    di_strbuf_printf(out, "# HELP %s%s %s\n# TYPE %s%s histogram\n", prefix, t->name, t->help, prefix, t->name);
    for (int i = 0; i <= DI_TIMES_BUCKETS; i++) {
        sum += t->buckets[i];
        if (i < DI_TIMES_BUCKETS) {
            di_strbuf_printf(out, "%s%s_bucket{le=\"%g\"} %lld\n", prefix, t->name, bounds[i], (long long)sum);
        } else {
            di_strbuf_printf(out, "%s%s_bucket{le=\"+Inf\"} %lld\n", prefix, t->name, (long long)sum);
        }
    }
    di_strbuf_printf(out, "%s%s_sum %.9g\n%s%s_count %lld\n", prefix, t->name, t->sum_s, prefix, t->name,
                     (long long)t->n);
}

static double share(int64_t a, int64_t b) {
    return b > 0 ? (double)a / (double)b : 0;
}

static void write_engine(di_strbuf *out, const di_engine_stats_t *s) {
#define WRITE(type, kind, name, meaning)                                                                               \
    write_metric(out, "deepinfer:", strncmp(#name, "n_", 2) == 0 ? &#name[2] : #name, #kind, "Engine: " meaning ".",   \
                 (double)s->name);
    DI_ENGINE_STATS_LIST(WRITE)
#undef WRITE
}

static void write_server(di_server *server, di_strbuf *out) {
    di_metrics *m = &server->metrics;
    static const char d[] = "deepinfer:http_";
    write_metric(out, d, "connections", "gauge", "Open connections.", (double)atomic_load(&m->n_connections));
    write_metric(out, d, "connections_opened", "counter", "Connections since the start.",
                 (double)atomic_load(&m->n_connections_total));
    write_metric(out, d, "active_requests", "gauge", "Generations being served.", (double)atomic_load(&m->n_active));
    write_metric(out, d, "active_streams", "gauge", "Streams being written.", (double)atomic_load(&m->n_streams));
    write_metric(out, d, "requests", "counter", "Requests of any kind.", (double)atomic_load(&m->n_requests));
    write_metric(out, d, "refused_busy", "counter", "Requests refused because the queue was full.",
                 (double)atomic_load(&m->n_refused_busy));
    write_metric(out, d, "refused_key", "counter", "Requests refused for their key or its limits.",
                 (double)atomic_load(&m->n_refused_key));
    write_metric(out, d, "hung_up", "counter", "Clients that left before their reply was complete.",
                 (double)atomic_load(&m->n_hung_up));
    write_metric(out, d, "cut_off", "counter", "Connections ended because the other side was too slow.",
                 (double)atomic_load(&m->n_cut_off));
    write_metric(out, d, "body_bytes", "gauge", "Request bodies in memory.", (double)atomic_load(&server->body_bytes));
    di_strbuf_printf(out,
                     "# HELP %sreplies_total Replies by the first digit of their status.\n"
                     "# TYPE %sreplies_total counter\n",
                     d, d);
    for (int i = 2; i < 6; i++)
        di_strbuf_printf(out, "%sreplies_total{code=\"%dxx\"} %lld\n", d, i, (long long)atomic_load(&m->n_replies[i]));
}

/* What routers and their dashboards ask for by vLLM's names. */
static void write_known(di_server *server, di_strbuf *out, const di_engine_stats_t *s) {
    const char *model = server->model_name;
    const double kv = share(s->blocks_used, s->blocks);
    const struct {
        const char *name, *type, *help;
        double v;
    } rows[] = {
        {"num_requests_running", "gauge", "Samples that run.", (double)s->n_running},
        {"num_requests_waiting", "gauge", "Samples that wait.", (double)s->n_waiting},
        {"kv_cache_usage_perc", "gauge", "Share of the KV blocks that samples hold, 0 to 1.", kv},
        {"gpu_cache_usage_perc", "gauge", "The older name of kv_cache_usage_perc.", kv},
        {"prefix_cache_queries_total", "counter", "Tokens of prompts looked up in the prefix cache.",
         (double)(s->prompt_tokens + s->cached_tokens)},
        {"prefix_cache_hits_total", "counter", "Those of them that were found.", (double)s->cached_tokens},
        {"prompt_tokens_total", "counter", "Tokens of prompts.", (double)(s->prompt_tokens + s->cached_tokens)},
        {"generation_tokens_total", "counter", "Tokens drawn.", (double)s->output_tokens},
        {"num_preemptions_total", "counter", "Samples whose memory was taken for others.", (double)s->n_preempted},
        {"spec_decode_num_drafts_total", "counter", "Drafting rounds.", (double)s->n_draft_rounds},
        {"spec_decode_num_draft_tokens_total", "counter", "Drafts verified.", (double)s->draft_tokens},
        {"spec_decode_num_accepted_tokens_total", "counter", "Drafts accepted.", (double)s->accepted_tokens},
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++)
        write_vllm(out, model, rows[i].name, rows[i].type, rows[i].help, NULL, NULL, rows[i].v);
    for (int f = DI_FINISH_STOP; f <= DI_FINISH_ERROR; f++)
        write_vllm(out, model, "request_success_total", "counter", f == DI_FINISH_STOP ? "Samples that ended." : NULL,
                   "finished_reason", di_finish_name((di_finish)f),
                   (double)atomic_load(&server->metrics.n_finished[f]));
}

void di_metrics_write(di_server *server, di_strbuf *out) {
    di_engine_stats_t s = {.struct_size = sizeof s};
    di_metrics *m = &server->metrics;
    bool is_loaded = di_server_engine(server) != NULL;
    if (is_loaded)
        di_engine_stats(di_server_engine(server), &s);
    write_metric(out, "deepinfer:", "ready", "gauge", "1 when requests are taken.",
                 di_server_phase_of(server) == DI_READY);
    write_metric(out, "deepinfer:", "uptime_seconds", "gauge", "Since the server started.",
                 (double)(di_clock_ns() - server->start_ns) / 1e9);
    write_server(server, out);
    if (is_loaded)
        write_engine(out, &s);
    write_known(server, out, &s);
    pthread_mutex_lock(&m->mutex);
    for (int i = 0; i < DI_TIME_KINDS; i++) {
        write_times(out, "deepinfer:", &m->times[i]);
        write_times(out, "vllm:", &m->times[i]);
    }
    pthread_mutex_unlock(&m->mutex);
}

/* ---- /stats.json --------------------------------------------------------------------------------------------------
 */

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void write_percentiles(di_strbuf *out, const char *name, di_metrics *m, di_time_kind kind) {
    static const int percents[] = {50, 90, 99};
    float *sorted = malloc(DI_TIMES_WINDOW * sizeof *sorted);
    pthread_mutex_lock(&m->mutex);
    const di_times *t = &m->times[kind];
    size_t n = sorted ? (size_t)DI_MIN(t->n, (int64_t)DI_TIMES_WINDOW) : 0;
    if (n > 0)
        memcpy(sorted, t->last_ms, n * sizeof *sorted);
    di_strbuf_printf(out, "\"%s\":{\"n\":%lld", name, (long long)t->n);
    pthread_mutex_unlock(&m->mutex);
    if (n > 0)
        qsort(sorted, n, sizeof *sorted, compare_floats);
    for (size_t i = 0; i < DI_COUNT(percents); i++) {
        di_strbuf_printf(out, ",\"p%d\":", percents[i]);
        if (n > 0) {
            di_strbuf_printf(out, "%.4g", (double)sorted[(n - 1) * (size_t)percents[i] / 100]);
        } else {
            di_strbuf_puts(out, "null");
        }
    }
    di_strbuf_putc(out, '}');
    free(sorted);
}

void di_stats_write(di_server *server, di_strbuf *out) {
    di_metrics *m = &server->metrics;
    char *engine = NULL;
    di_strbuf_printf(out,
                     "{\"time_s\":%lld,\"uptime_s\":%.3f,\"version\":\"%s\",\"model\":", (long long)di_clock_wall_s(),
                     (double)(di_clock_ns() - server->start_ns) / 1e9, di_version());
    di_json_write_string(out, server->model_name, strlen(server->model_name));
    di_strbuf_printf(out, ",\"status\":\"%s\",\"engine\":", di_server_phase_name(di_server_phase_of(server)));
    if (di_server_engine(server) && di_engine_stats_json(di_server_engine(server), &engine, NULL, NULL) == DI_OK) {
        di_strbuf_puts(out, engine);
        di_free(engine);
    } else {
        di_strbuf_puts(out, "null");
    }
    di_strbuf_printf(out,
                     ",\"server\":{\"connections\":%lld,\"active_requests\":%lld,\"active_streams\":%lld,"
                     "\"requests\":%lld,\"refused_busy\":%lld,\"refused_key\":%lld,\"hung_up\":%lld,\"cut_off\":%lld},"
                     "\"latency\":{",
                     (long long)atomic_load(&m->n_connections), (long long)atomic_load(&m->n_active),
                     (long long)atomic_load(&m->n_streams), (long long)atomic_load(&m->n_requests),
                     (long long)atomic_load(&m->n_refused_busy), (long long)atomic_load(&m->n_refused_key),
                     (long long)atomic_load(&m->n_hung_up), (long long)atomic_load(&m->n_cut_off));
    write_percentiles(out, "ttft_ms", m, DI_TIME_FIRST);
    di_strbuf_putc(out, ',');
    write_percentiles(out, "itl_ms", m, DI_TIME_BETWEEN);
    di_strbuf_putc(out, ',');
    write_percentiles(out, "e2e_ms", m, DI_TIME_WHOLE);
    di_strbuf_putc(out, ',');
    write_percentiles(out, "queue_ms", m, DI_TIME_QUEUED);
    di_strbuf_puts(out, "}}");
}

/* A request leaves the engine every (mean time of a request / samples that run): that is when there is room again. */
int64_t di_retry_after_s(di_server *server) {
    di_metrics *m = &server->metrics;
    di_engine_stats_t s = {.struct_size = sizeof s};
    if (!di_server_engine(server))
        return 5;
    di_engine_stats(di_server_engine(server), &s);
    pthread_mutex_lock(&m->mutex);
    const di_times *t = &m->times[DI_TIME_WHOLE];
    double mean_s = t->n > 0 ? t->sum_s / (double)t->n : 1;
    pthread_mutex_unlock(&m->mutex);
    double wait_s = ceil(mean_s / (double)DI_MAX(s.n_running, 1));
    return (int64_t)DI_MIN(DI_MAX(wait_s, 1.0), 60.0);
}
