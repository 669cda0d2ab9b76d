/* bench serve: the server as its clients see it. A server of the bench's own, or the one of --url, under the load of
 * bench_load.h:
 *
 *   ttft_p50, ttft_p99, tpot_p50, tpot_p99  time to the first token, and for each further one as the mean of an answer,
 *                          at --rate requests a second, by default half of the capacity: what 64 clients get that each
 *                          send one request after the other
 *   itl_p50, itl_p99       between two moments at which a stream brings text
 *   goodput                requests a second within --ttft-goal and --tpot-goal, of those that came
 *   open_P_*               the same at P percent of the capacity, with what was offered and what came of it
 *   closed_N_*             N clients: tokens a second in all and for each user
 *
 * What HTTP costs is bench_serve_cost.c's, many connections bench_serve_connections.c's. */
#include "bench_serve.h"

enum { SEQS = 64, REQUESTS = 200, RUNS = 3, TTFT_LIMIT_MS = 1000, TPOT_LIMIT_MS = 50 };

/* ---- the server ---------------------------------------------------------------------------------------------------
 */

static di_status start_server(di_bench *b, di_bench_server *s, int32_t seqs, di_error *err) {
    di_options opt = *b->opt;
    di_engine_config engine;
    di_server_config config;
    if (!di_options_is_set(b->opt, DI_OPT_max_seqs))
        opt.max_seqs = seqs;
    opt.trace = NULL; /* the bench has the file */
    di_cli_engine_config(&engine, &opt);
    di_server_config_init(&config);
    config.engine = &engine;
    config.port = 0;
    config.connections_max = 8192;
    di_status st = di_server_create(&config, &s->server, err);
    if (!st)
        st = di_server_wait_ready(s->server, err);
    if (!st)
        di_strbuf_printf(&s->url, "http://127.0.0.1:%d", di_server_port(s->server));
    return st;
}

/* The server's address without what clients like to put behind it. */
static void take_url(di_bench_server *s, const char *url) {
    size_t n = strlen(url);
    while (n > 0 && url[n - 1] == '/')
        n--;
    if (n > 3 && memcmp(url + n - 3, "/v1", 3) == 0)
        n -= 3;
    di_strbuf_append(&s->url, url, n);
}

static di_status ask_model(di_bench_server *s, di_error *err) {
    di_strbuf body = {0};
    di_json *v = NULL;
    int http = 0;
    di_status st = di_bench_load_get(di_strbuf_str(&s->url), "/v1/models", s->key, &body, &http, err);
    if (!st && http != 200)
        st = di_fail(err, DI_ERR_IO, "'%s/v1/models': status %d: %.200s", di_strbuf_str(&s->url), http,
                     di_strbuf_str(&body));
    if (!st)
        st = di_json_parse(&v, di_strbuf_str(&body), body.len, err);
    if (!st) {
        size_t n = 0;
        const char *id = di_json_str(di_json_get(di_json_at(di_json_get(v, "data"), 0), "id"), &n);
        di_strbuf_append(&s->model, id ? id : "", n);
        st = id ? di_strbuf_status(&s->model, err)
                : di_fail(err, DI_ERR_FORMAT, "'%s/v1/models' names no model", di_strbuf_str(&s->url));
    }
    di_json_free(v);
    di_strbuf_deinit(&body);
    return st;
}

di_status di_bench_server_open(di_bench *b, di_bench_server *s, int32_t seqs, di_error *err) {
    di_status st = DI_OK;
    *s = (di_bench_server){0};
    if (b->opt->url) {
        s->key = b->opt->api_key.n > 0 ? b->opt->api_key.items[0] : NULL;
        take_url(s, b->opt->url);
    } else {
        st = start_server(b, s, seqs, err);
    }
    return st ? st : ask_model(s, err);
}

void di_bench_server_close(di_bench_server *s) {
    di_server_destroy(s->server);
    di_strbuf_deinit(&s->url);
    di_strbuf_deinit(&s->model);
    *s = (di_bench_server){0};
}

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

static void write_words(di_strbuf *out, uint64_t seed, int64_t n) {
    static const char *const words[] = {"the", "cat",  "dog",  "little", "big",   "red",    "ball", "tree",
                                        "day", "sun",  "girl", "boy",    "happy", "sad",    "play", "park",
                                        "mom", "dad",  "went", "to",     "and",   "was",    "very", "they",
                                        "saw", "bird", "fish", "said",   "house", "friend", "toy",  "water"};
    for (int64_t i = 0; i < n; i++)
        di_strbuf_printf(out, "%s%s", i ? " " : "", words[di_mix64(seed + (uint64_t)i) % DI_COUNT(words)]);
}

di_status di_bench_ask(void *user, int64_t i, di_strbuf *out, di_error *err) {
    const di_bench_asks *a = user;
    uint64_t seed = di_mix64(a->seed * 1000003 + (uint64_t)i);
    di_strbuf_puts(out, "{\"model\":");
    di_json_write_string(out, a->model, strlen(a->model));
    di_strbuf_puts(out, ",\"messages\":[{\"role\":\"user\",\"content\":\"");
    write_words(out, seed, a->n_prompt);
    di_strbuf_puts(out, "\"}]");
    di_strbuf_printf(out,
                     ",\"max_tokens\":%lld,\"min_tokens\":%lld,\"ignore_eos\":true,\"temperature\":0,\"stream\":true,"
                     "\"stream_options\":{\"include_usage\":true}",
                     (long long)a->n_output, (long long)a->n_output);
    if (a->salt)
        di_strbuf_printf(out, ",\"cache_salt\":\"%016llx\"", (unsigned long long)a->salt);
    di_strbuf_puts(out, "}");
    return di_strbuf_status(out, err);
}

di_status di_bench_load_on(const di_bench_server *s, const di_bench_load_plan *plan, bool may_refuse,
                           di_bench_load *load, di_error *err) {
    di_bench_load_plan p = *plan;
    p.url = di_strbuf_str(&s->url);
    p.key = s->key;
    p.path = "/v1/chat/completions";
    p.body = di_bench_ask;
    di_status st = di_bench_load_run(&p, load, err);
    if (!st && load->n_failed > 0) {
        if (err)
            *err = load->first_error;
        return di_error_context(err, load->first_error.code, "%lld of %lld requests failed, the first",
                                (long long)load->n_failed, (long long)load->n_samples);
    }
    if (!st && load->n_refused > 0 && !may_refuse)
        return di_fail(err, DI_ERR_BUSY, "%lld of %lld requests were refused: let more run (--max-seqs) or wait",
                       (long long)load->n_refused, (long long)load->n_samples);
    return st;
}

/* ---- loads --------------------------------------------------------------------------------------------------------
 */

typedef struct session {
    di_bench *b;
    di_bench_server server;
    di_bench_asks asks;
    double ttft_limit, tpot_limit; /* seconds */
    double capacity;               /* requests a second of a closed loop; 0: not measured yet */
} session;

/* One load and its figures: open at `rate`, or closed with n clients. */
static di_status run(session *s, double rate, int n_clients, int64_t n_requests, di_bench_load *load,
                     di_bench_load_figures *f, di_error *err) {
    const di_options *opt = s->b->opt;
    bool has_time = di_options_is_set(opt, DI_OPT_duration);
    di_bench_load_plan plan = {.rate = rate,
                               .n_clients = n_clients,
                               .n_requests = di_options_is_set(opt, DI_OPT_requests) ? opt->requests
                                             : has_time                              ? 0
                                                                                     : n_requests,
                               .duration_s = has_time ? opt->duration : 0,
                               .seed = s->asks.seed,
                               .user = &s->asks};
    s->asks.seed++; /* other prompts, and other times */
    di_status st = di_bench_load_on(&s->server, &plan, true, load, err);
    if (!st)
        st = di_bench_load_figures_of(load, s->ttft_limit, s->tpot_limit, f, err);
    if (!st && f->n_ok == 0)
        st = di_fail(err, DI_ERR_BUSY, "all of %lld requests were refused", (long long)load->n_samples);
    if (!st && f->ttft.n == 0)
        st = di_fail(err, DI_ERR_FORMAT, "%lld answers, and no text in any", (long long)f->n_ok);
    return st;
}

static di_status measure_capacity(session *s, di_error *err) {
    di_bench_load load = {0};
    di_bench_load_figures f;
    di_status st = DI_OK;
    for (int i = 0; i < 2 && !st && s->capacity == 0; i++) { /* the first warms up */
        di_bench_load_deinit(&load);
        st = run(s, 0, SEQS, (i ? 3 : 1) * SEQS, &load, &f, err);
        if (!st && i)
            s->capacity = f.requests_per_s;
    }
    di_bench_load_deinit(&load);
    return st;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------
 */

typedef enum figure {
    TTFT_P50,
    TTFT_P90,
    TTFT_P99,
    TPOT_P50,
    TPOT_P90,
    TPOT_P99,
    ITL_P50,
    ITL_P99,
    GOODPUT,
    THROUGHPUT,
    USER,
    OFFERED,
    REFUSED,
    N_FIGURES
} figure;

static const struct {
    const char *name, *unit;
    bool is_open, is_closed; /* whether the sweep has it */
} kinds[N_FIGURES] = {
    [TTFT_P50] = {"ttft_p50", "ms", true, true},        [TTFT_P90] = {"ttft_p90", "ms", false, false},
    [TTFT_P99] = {"ttft_p99", "ms", true, true},        [TPOT_P50] = {"tpot_p50", "ms", true, true},
    [TPOT_P90] = {"tpot_p90", "ms", false, false},      [TPOT_P99] = {"tpot_p99", "ms", true, true},
    [ITL_P50] = {"itl_p50", "ms", false, false},        [ITL_P99] = {"itl_p99", "ms", false, false},
    [GOODPUT] = {"goodput", "requests/s", true, false}, [THROUGHPUT] = {"throughput", "tokens/s", true, true},
    [USER] = {"user", "tokens/s", false, true},         [OFFERED] = {"rate", "requests/s", true, false},
    [REFUSED] = {"refused", "fraction", true, false},
};

static double value_of(figure kind, const di_bench_load *load, const di_bench_load_figures *f) {
    switch (kind) {
    case TTFT_P50:
        return 1e3 * f->ttft.at[DI_LOAD_P50];
    case TTFT_P90:
        return 1e3 * f->ttft.at[DI_LOAD_P90];
    case TTFT_P99:
        return 1e3 * f->ttft.at[DI_LOAD_P99];
    case TPOT_P50:
        return 1e3 * f->tpot.at[DI_LOAD_P50];
    case TPOT_P90:
        return 1e3 * f->tpot.at[DI_LOAD_P90];
    case TPOT_P99:
        return 1e3 * f->tpot.at[DI_LOAD_P99];
    case ITL_P50:
        return 1e3 * f->gap.at[DI_LOAD_P50];
    case ITL_P99:
        return 1e3 * f->gap.at[DI_LOAD_P99];
    case GOODPUT:
        return f->good_per_s;
    case THROUGHPUT:
        return f->tokens_per_s;
    case USER:
        return 1 / f->tpot.at[DI_LOAD_P50];
    case OFFERED: /* what the generator did send, until the last was due */
        return (double)load->n_samples / ((double)load->samples[load->n_samples - 1].due_ns * 1e-9);
    case REFUSED:
        return (double)load->n_refused / (double)load->n_samples;
    case N_FIGURES:
        break;
    }
    return 0;
}

/* Which rows of a group are asked for: bits by figure. */
static unsigned wishes(di_bench *b, const char *prefix, bool is_open, bool is_closed) {
    unsigned set = 0;
    for (int k = 0; k < N_FIGURES; k++) {
        char name[64];
        if ((is_open && !kinds[k].is_open) || (is_closed && !kinds[k].is_closed))
            continue;
        snprintf(name, sizeof name, "%s%s", prefix, kinds[k].name);
        if (di_bench_wants(b, name))
            set |= 1u << k;
    }
    return set;
}

/* The figures of one point, as rows of n_runs loads. */
static di_status point(session *s, const char *prefix, unsigned wanted, double rate, int n_clients, int64_t n_requests,
                       int n_runs, di_error *err) {
    double runs[N_FIGURES][RUNS];
    di_status st = DI_OK;
    for (int r = 0; r < n_runs && !st; r++) {
        di_bench_load load = {0};
        di_bench_load_figures f;
        st = run(s, rate, n_clients, n_requests, &load, &f, err);
        for (int k = 0; k < N_FIGURES && !st; k++)
            runs[k][r] = value_of((figure)k, &load, &f);
        if (!st && load.late_max_ns > 20000000)
            fprintf(stderr, "deepinfer: bench serve: %.3g requests/s: some were sent up to %.0f ms late\n", rate,
                    (double)load.late_max_ns * 1e-6);
        di_bench_load_deinit(&load);
    }
    for (int k = 0; k < N_FIGURES && !st; k++) {
        char name[64];
        double limit = 0;
        const char *limit_kind = NULL;
        if (!(wanted >> k & 1))
            continue;
        if (k == GOODPUT) {
            limit = di_bench_median(runs[OFFERED], n_runs);
            limit_kind = "offered";
        } else if ((k == TTFT_P50 || k == TTFT_P99) && di_options_is_set(s->b->opt, DI_OPT_ttft_goal)) {
            limit = 1e3 * s->ttft_limit;
            limit_kind = "goal";
        } else if ((k == TPOT_P50 || k == TPOT_P99) && di_options_is_set(s->b->opt, DI_OPT_tpot_goal)) {
            limit = 1e3 * s->tpot_limit;
            limit_kind = "goal";
        }
        snprintf(name, sizeof name, "%s%s", prefix, kinds[k].name);
        st = di_bench_row(s->b, name, runs[k], n_runs, kinds[k].unit, limit, limit_kind, err);
    }
    if (rate > 0)
        return di_error_context(err, st, "%.3g requests/s", rate);
    return di_error_context(err, st, "%d clients", n_clients);
}

/* ---- the points ---------------------------------------------------------------------------------------------------
 */

static const int percents[] = {25, 50, 75, 90, 110}, clients[] = {1, 2, 4, 8, 16, 32, 64};

typedef struct plan {
    unsigned at_rate; /* the rows of the named rate, bits by figure */
    unsigned open[DI_COUNT(percents)], closed[DI_COUNT(clients)];
    unsigned asked; /* the closed loop of --clients */
} plan;

static void make_plan(di_bench *b, plan *p, bool *is_empty) {
    char prefix[32];
    unsigned all = 0;
    *p = (plan){0};
    bool has_rate = di_options_is_set(b->opt, DI_OPT_rate), has_clients = di_options_is_set(b->opt, DI_OPT_clients);
    if (!has_clients)
        all |= p->at_rate = wishes(b, "", false, false) & ~(1u << USER);
    for (size_t i = 0; i < DI_COUNT(percents) && !has_rate && !has_clients; i++) {
        snprintf(prefix, sizeof prefix, "open_%d_", percents[i]);
        all |= p->open[i] = wishes(b, prefix, true, false);
    }
    for (size_t i = 0; i < DI_COUNT(clients) && !has_rate && !has_clients; i++) {
        snprintf(prefix, sizeof prefix, "closed_%d_", clients[i]);
        all |= p->closed[i] = wishes(b, prefix, false, true);
    }
    if (has_clients) {
        snprintf(prefix, sizeof prefix, "closed_%lld_", (long long)b->opt->clients);
        all |= p->asked = wishes(b, prefix, false, true);
    }
    *is_empty = all == 0;
}

static di_status run_plan(session *s, const plan *p, di_error *err) {
    const di_options *opt = s->b->opt;
    char prefix[32];
    unsigned any_open = p->at_rate;
    di_status st = DI_OK;
    for (size_t i = 0; i < DI_COUNT(percents); i++)
        any_open |= p->open[i];
    if (any_open && !di_options_is_set(opt, DI_OPT_rate))
        st = measure_capacity(s, err);
    if (!st && p->at_rate) {
        double rate = di_options_is_set(opt, DI_OPT_rate) ? opt->rate : s->capacity / 2;
        st = point(s, "", p->at_rate, rate, 0, REQUESTS, RUNS, err);
    }
    for (size_t i = 0; i < DI_COUNT(percents) && !st; i++) {
        snprintf(prefix, sizeof prefix, "open_%d_", percents[i]);
        if (p->open[i])
            st = point(s, prefix, p->open[i], s->capacity * percents[i] / 100, 0, REQUESTS, 1, err);
    }
    for (size_t i = 0; i < DI_COUNT(clients) && !st; i++) {
        snprintf(prefix, sizeof prefix, "closed_%d_", clients[i]);
        if (p->closed[i])
            st = point(s, prefix, p->closed[i], 0, clients[i], DI_MAX(24, 4 * clients[i]), 1, err);
    }
    if (!st && p->asked) {
        snprintf(prefix, sizeof prefix, "closed_%lld_", (long long)opt->clients);
        st = point(s, prefix, p->asked, 0, (int)opt->clients, DI_MAX(REQUESTS, 4 * opt->clients), 1, err);
    }
    return st;
}

static di_status loads(di_bench *b, di_error *err) {
    const di_options *opt = b->opt;
    plan p;
    bool is_empty;
    make_plan(b, &p, &is_empty);
    if (is_empty)
        return DI_OK;
    session s = {.b = b,
                 .ttft_limit = (opt->ttft_goal > 0 ? opt->ttft_goal : TTFT_LIMIT_MS) * 1e-3,
                 .tpot_limit = (opt->tpot_goal > 0 ? opt->tpot_goal : TPOT_LIMIT_MS) * 1e-3};
    di_status st = di_bench_server_open(b, &s.server, (int32_t)DI_MAX(SEQS, opt->clients), err);
    s.asks = (di_bench_asks){.model = di_strbuf_str(&s.server.model),
                             .n_prompt = opt->prompt_tokens,
                             .n_output = opt->output_tokens,
                             .seed = 1};
    if (!st)
        st = run_plan(&s, &p, err);
    di_bench_server_close(&s.server);
    return st;
}

di_status di_bench_serve(di_bench *b, di_error *err) {
    if (b->opt->dummy_layers > 0) {
        static const char why[] = "--dummy-layers have no tokenizer and so no text to stream: expected --dummy with a "
                                  "--model that has one";
        if (b->opt->args.n > 0)
            return di_fail(err, DI_ERR_ARG, "%s", why);
        fprintf(stderr, "deepinfer: no bench serve: %s\n", why);
        return DI_OK;
    }
    di_status st = di_bench_load_start(err);
    if (st)
        return st;
    if (!b->opt->url)
        st = di_bench_serve_cost(b, err);
    if (!st)
        st = loads(b, err);
    if (!st && !b->opt->url)
        st = di_bench_serve_connections(b, err);
    di_bench_load_stop();
    return st;
}
