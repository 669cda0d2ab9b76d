/* bench prefill and decode: the whole model through the engine, as `run` uses it.
 *
 * On the model of --model (the rows are named after the one that ships), then on two layers at the released dimensions
 * with made-up weights (--dummy-layers), where they fit. A prefill run is one prompt of 512 tokens up to its first
 * sampled token. A decode run is B sequences with prompts of 32 tokens and the steps after all of them have their first
 * token. Greedy, end marks ignored; prompts are made-up ids, so that caches and experts see varied input. The limit is
 * what takes longer: reading the weights that a step needs at least, at the measured read bandwidth, or its operations
 * at the measured peak. bench_batch.c measures by the same runs. */
#include "bench_model.h"

enum { PROMPT_TOKENS = 32, LAYERS_BATCH = 64 };

static void fill_prompt(int32_t *ids, int64_t n, int32_t vocab, uint64_t seed) {
    ids[0] = 0;
    for (int64_t i = 1; i < n; i++)
        ids[i] = (int32_t)(4 + di_mix64(seed * 1000003 + (uint64_t)i) % (uint64_t)(vocab - 4));
}

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)err;
    di_bench_watch *w = user;
    if (event->kind == DI_CORE_TOKEN) {
        w->n_tokens++;
        w->first_ns = w->first_ns ? w->first_ns : di_clock_ns();
    } else if (event->kind == DI_CORE_DONE) {
        w->n_done++;
        memcpy(w->tokens, gen->tokens, (size_t)DI_MIN(gen->n_tokens, DI_BENCH_ANSWER) * sizeof *w->tokens);
        if (gen->finish == DI_FINISH_ERROR)
            w->error = gen->error;
    }
    return DI_OK;
}

di_status di_bench_follow(di_cli_model *m, di_submission *sub, di_bench_watch *w, di_error *err) {
    *w = (di_bench_watch){0};
    sub->callback = on_event;
    sub->user = w;
    return di_core_submit(m->engine, sub, NULL, err);
}

di_status di_bench_submit(di_cli_model *m, const int32_t *ids, int64_t n, int64_t n_tokens, const char *salt,
                          di_bench_watch *w, di_error *err) {
    di_submission sub = {.ids = ids, .n_ids = (size_t)n, .cache_salt = salt, .cache_salt_len = salt ? strlen(salt) : 0};
    di_sampling_init(&sub.sampling);
    sub.sampling.temperature = 0;
    sub.sampling.ignore_eos = true;
    sub.sampling.max_tokens = n_tokens;
    return di_bench_follow(m, &sub, w, err);
}

di_status di_bench_finish(di_cli_model *m, const di_bench_watch *w, int n, di_error *err) {
    while (di_core_step(m->engine)) {
    }
    for (int i = 0; i < n; i++) {
        if (w[i].n_done != 1 || w[i].error.code)
            return di_fail(err, DI_ERR_INTERNAL, "request %d: %s", i, w[i].error.message);
    }
    return DI_OK;
}

/* Bytes of weights that a step of n_rows rows reads at least: everything but Engram tables, draft module and the
 * embedding, and of the routed experts those that rows choose, were the choice even. */
static double step_bytes(const di_cli_model *m, int64_t n_rows) {
    const di_config *c = &m->loaded.config;
    double bytes = 0, missed = 1, per_row = (double)c->n_experts_tok / c->n_experts;
    for (int64_t i = 0; i < n_rows; i++)
        missed *= 1 - per_row;
    for (size_t i = 0; i < di_checkpoint_count(m->loaded.ckpt); i++) {
        const di_stored_tensor *t = di_checkpoint_at(m->loaded.ckpt, i);
        switch (t->kind) {
        case DI_KIND_EXPERT:
            bytes += (1 - missed) * (double)t->n_bytes;
            break;
        case DI_KIND_ENGRAM_TABLE:
        case DI_KIND_DRAFT:
        case DI_KIND_VISION:
            break;
        case DI_KIND_EMBED:
            bytes += strncmp(t->name, "head.", 5) ? 0 : (double)t->n_bytes;
            break;
        default:
            bytes += (double)t->n_bytes;
        }
    }
    return bytes;
}

di_status di_bench_run_until(di_cli_model *m, const di_bench_watch *w, int n, int n_there, int64_t n_tokens,
                             di_error *err) {
    for (bool is_more = true;; is_more = di_core_step(m->engine)) {
        int there = 0;
        for (int i = 0; i < n; i++) {
            if (w[i].error.code)
                return di_fail(err, w[i].error.code, "%s", w[i].error.message);
            there += w[i].n_tokens >= n_tokens;
        }
        if (there >= n_there)
            return DI_OK;
        if (!is_more)
            return di_fail(err, DI_ERR_INTERNAL, "a sequence ended early");
    }
}

int64_t di_bench_tokens(const di_bench_watch *w, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += w[i].n_tokens;
    return sum;
}

di_status di_bench_model_open(di_bench *b, di_cli_model *m, int64_t batch_tokens, int32_t seqs, int64_t draft_tokens,
                              di_error *err) {
    di_options opt = *b->opt;
    opt.draft_tokens = draft_tokens;
    if (!di_options_is_set(b->opt, DI_OPT_max_batched_tokens))
        opt.max_batched_tokens = batch_tokens;
    if (!di_options_is_set(b->opt, DI_OPT_chunk))
        opt.chunk = batch_tokens;
    if (!di_options_is_set(b->opt, DI_OPT_max_seqs))
        opt.max_seqs = seqs;
    return di_cli_model_open_traced(m, &opt, b->trace, err);
}

/* ---- what a step costs -------------------------------------------------------------------------------------------
 */

/* Operations of one row at position `pos`, two a multiply-add; the head, which prompts need once, left out. */
static double row_operations(const di_config *c, double pos) {
    double h = c->hidden, ad = (double)c->n_heads * c->head_dim, m = c->hc_mult, macs = 0;
    for (int32_t l = 0; l < c->n_layers; l++) {
        double keys = DI_MIN(pos, c->window), entries = c->ratio[l] ? pos / c->ratio[l] : 0;
        macs += h * c->q_rank + c->q_rank * ad + h * c->head_dim;                      /* queries, window keys */
        macs += ad * c->o_rank + (double)c->o_groups * c->o_rank * h;                  /* output projection */
        macs += 2 * ad * (keys + DI_MIN(entries, c->index_topk));                      /* attention */
        macs += 2 * (2 + m) * m * m * h;                                               /* hyper-connections */
        macs += h * c->n_experts + 3.0 * (c->n_experts_tok + 1) * h * c->intermediate; /* router, experts */
        if (di_config_is_kv_source(c, l))
            macs += h * c->head_dim * c->ratio[l] + (double)c->head_dim * c->index_dim;
        if (di_config_is_index_source(c, l))
            macs += (double)c->index_heads * c->index_dim * (c->q_rank + entries) + h * c->index_heads;
    }
    return 2 * macs;
}

di_status di_bench_step_limit(di_bench *b, const di_cli_model *m, int64_t n_rows, double pos_mean, int64_t n_logits,
                              double *limit, const char **kind, di_error *err) {
    const di_config *c = &m->loaded.config;
    double bandwidth, peak;
    di_status st = di_bench_limits(b, m->loaded.backend.device, m->loaded.device, &bandwidth, &peak, err);
    if (st)
        return st;
    double operations =
        (double)n_rows * row_operations(c, pos_mean) + 2.0 * (double)n_logits * (double)c->hidden * c->vocab;
    double by_bytes = (double)n_rows * bandwidth / step_bytes(m, n_rows);
    double by_operations = (double)n_rows * peak / operations;
    *limit = DI_MIN(by_bytes, by_operations);
    *kind = by_operations < by_bytes ? "peak_bf16" : "read_bandwidth";
    return DI_OK;
}

/* ---- prefill ------------------------------------------------------------------------------------------------------
 */

di_status di_bench_prefill_run(di_cli_model *m, int64_t n, uint64_t seed, double *rate, di_error *err) {
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    di_bench_watch c;
    if (!ids)
        return di_fail(err, DI_ERR_MEMORY, "a prompt of %lld tokens", (long long)n);
    fill_prompt(ids, n, m->loaded.config.vocab, seed);
    int64_t start_ns = di_clock_ns();
    di_status st = di_bench_submit(m, ids, n, 1, NULL, &c, err);
    if (!st && !(st = di_bench_run_until(m, &c, 1, 1, 1, err)))
        *rate = (double)n / ((double)(di_clock_ns() - start_ns) * 1e-9);
    while (!st && di_core_step(m->engine)) {
    }
    free(ids);
    return st;
}

/* Times prompts of n tokens up to their first token; runs[0]: of the first. */
static di_status prefill_row(di_bench *b, di_cli_model *m, const char *name, int64_t n, int n_runs,
                             double runs[DI_BENCH_RUNS], di_error *err) {
    double limit;
    const char *kind;
    di_status st = di_bench_step_limit(b, m, n, (double)n / 2, 1, &limit, &kind, err);
    for (int i = -1; i < n_runs && !st; i++) /* one run to warm up */
        st = di_bench_prefill_run(m, n, (uint64_t)i + 1, &runs[DI_MAX(i, 0)], err);
    return st ? di_error_context(err, st, "%s", name)
              : di_bench_row(b, name, runs, n_runs, "tokens/s", limit, kind, err);
}

static bool is_host(const di_cli_model *m) {
    return !m->loaded.backend.device->graph_launch;
}

/* Opens the layers at the released dimensions; false, with a line on standard error, where nobody asked for them and
 * they don't fit. */
static bool open_layers(di_bench *b, di_cli_model *m, int64_t batch_tokens, di_status *st, di_error *err) {
    di_options opt = *b->opt;
    bool is_asked = opt.dummy_layers > 0 || opt.args.n > 1;
    opt.dummy_layers = opt.dummy_layers > 0 ? opt.dummy_layers : 2;
    opt.max_batched_tokens = batch_tokens;
    opt.chunk = batch_tokens;
    opt.max_seqs = LAYERS_BATCH;
    opt.draft_tokens = 0;
    opt.max_model_len = batch_tokens + 256;
    *st = di_cli_model_open_traced(m, &opt, b->trace, err);
    if (*st == DI_ERR_MEMORY && !is_asked) {
        fprintf(stderr, "deepinfer: bench %s: no rows of layers at the released dimensions: %s\n", b->what,
                err->message);
        *st = DI_OK;
        return false;
    }
    return !*st;
}

/* What batch invariance costs a GPU that prefills 8192 tokens, `on` a second with it: 1 - on/off. On the host that
 * takes minutes, and `bench batch` says it with the small model. */
static di_status invariance_row(di_bench *b, double on, di_error *err) {
    di_cli_model m = {0};
    di_options opt = *b->opt;
    di_bench mode = *b;
    di_status st = DI_OK;
    double off = 1;
    opt.batch_invariant = "off";
    mode.opt = &opt;
    if (!open_layers(&mode, &m, 8192, &st, err))
        return st;
    for (uint64_t seed = 0; seed < 2 && !st; seed++) /* the first to warm up */
        st = di_bench_prefill_run(&m, 8192, seed, &off, err);
    double cost = 1 - on / off;
    di_cli_model_close(&m);
    return st ? di_error_context(err, st, "layers_8192_invariance")
              : di_bench_row(b, "layers_8192_invariance", &cost, 1, "fraction", 0.1, "most_allowed", err);
}

di_status di_bench_prefill(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    double runs[DI_BENCH_RUNS] = {0};
    di_status st = DI_OK;
    if (!b->opt->dummy_layers && di_bench_wants(b, "tiny_512")) {
        st = di_bench_model_open(b, &m, DI_BENCH_PREFILL, DI_BENCH_BATCH, 0, err);
        if (!st)
            st = prefill_row(b, &m, "tiny_512", DI_BENCH_PREFILL, DI_BENCH_RUNS, runs, err);
        di_cli_model_close(&m);
    }
    if (!st && di_bench_wants(b, "layers_1024") && open_layers(b, &m, 1024, &st, err)) {
        st = prefill_row(b, &m, "layers_1024", 1024, 3, runs, err);
        di_cli_model_close(&m);
    }
    if (!st && di_bench_wants(b, "layers_8192") && open_layers(b, &m, 8192, &st, err)) {
        bool runs_on_host = is_host(&m);
        st = prefill_row(b, &m, "layers_8192", 8192, 1, runs, err);
        di_cli_model_close(&m);
        if (!st && !runs_on_host && strcmp(b->opt->batch_invariant, "off") != 0)
            st = invariance_row(b, runs[0], err);
    }
    return st;
}

/* ---- decode -------------------------------------------------------------------------------------------------------
 */

di_status di_bench_decode_run(di_cli_model *m, int n_seqs, int64_t n_tokens, uint64_t seed, double *rate,
                              di_error *err) {
    di_bench_watch c[LAYERS_BATCH] = {0};
    int32_t ids[PROMPT_TOKENS];
    di_status st = DI_OK;
    for (int s = 0; s < n_seqs && !st; s++) {
        fill_prompt(ids, PROMPT_TOKENS, m->loaded.config.vocab, seed * LAYERS_BATCH + (uint64_t)s);
        st = di_bench_submit(m, ids, PROMPT_TOKENS, n_tokens + 1, NULL, &c[s], err);
    }
    if (st || (st = di_bench_run_until(m, c, n_seqs, n_seqs, 1, err)))
        return st;
    int64_t start_ns = di_clock_ns(), before = di_bench_tokens(c, n_seqs);
    while (di_core_step(m->engine)) {
    }
    *rate = (double)(di_bench_tokens(c, n_seqs) - before) / ((double)(di_clock_ns() - start_ns) * 1e-9);
    return DI_OK;
}

/* The part of the time that a device with a stream of its own waited for the host between steps. */
static di_status idle_row(di_bench *b, di_cli_model *m, const char *name, const di_core_stats *before, di_error *err) {
    di_core_stats after;
    char idle_name[64];
    di_core_stats_get(m->engine, &after);
    double idle_ns = (double)(after.device_idle_ns - before->device_idle_ns);
    double all_ns = idle_ns + (double)(after.device_busy_ns - before->device_busy_ns);
    if (all_ns <= 0)
        return DI_OK;
    double idle = idle_ns / all_ns;
    snprintf(idle_name, sizeof idle_name, "%s_idle", name);
    return di_bench_row(b, idle_name, &idle, 1, "fraction", 0.02, "most_allowed", err);
}

static di_status decode_row(di_bench *b, di_cli_model *m, const char *name, int n_seqs, int n_runs, int64_t n_tokens,
                            di_error *err) {
    double runs[DI_BENCH_RUNS], limit;
    const char *kind;
    di_core_stats before = {0};
    di_status st = di_bench_step_limit(b, m, n_seqs, PROMPT_TOKENS + (double)n_tokens / 2, n_seqs, &limit, &kind, err);
    for (int i = -1; i < n_runs && !st; i++) {
        if (i == 0)
            di_core_stats_get(m->engine, &before);
        st = di_bench_decode_run(m, n_seqs, n_tokens, (uint64_t)i + 1, &runs[DI_MAX(i, 0)], err);
    }
    if (st)
        return di_error_context(err, st, "%s", name);
    st = di_bench_row(b, name, runs, n_runs, "tokens/s", limit, kind, err);
    return st ? st : idle_row(b, m, name, &before, err);
}

typedef struct decode_case {
    const char *name;
    int n_seqs;
} decode_case;

static di_status decode_rows(di_bench *b, di_cli_model *m, const decode_case *cases, int n_cases, int n_runs,
                             int64_t n_tokens, di_error *err) {
    di_status st = DI_OK;
    for (int i = 0; i < n_cases && !st; i++) {
        if (di_bench_wants(b, cases[i].name))
            st = decode_row(b, m, cases[i].name, cases[i].n_seqs, n_runs, n_tokens, err);
    }
    return st;
}

di_status di_bench_decode(di_bench *b, di_error *err) {
    static const decode_case tiny[2] = {{"tiny_b1", 1}, {"tiny_b16", DI_BENCH_BATCH}},
                             layers[3] = {{"layers_b1", 1}, {"layers_b8", 8}, {"layers_b64", LAYERS_BATCH}};
    di_cli_model m = {0};
    di_status st = DI_OK;
    /* Each is asked for, whatever the others say: asking marks the selectors that name something. */
    int n_tiny = di_bench_wants(b, tiny[0].name) + di_bench_wants(b, tiny[1].name);
    int n_layers = 0;
    for (size_t i = 0; i < DI_COUNT(layers); i++)
        n_layers += di_bench_wants(b, layers[i].name);
    if (!b->opt->dummy_layers && n_tiny > 0) {
        st = di_bench_model_open(b, &m, DI_BENCH_PREFILL, DI_BENCH_BATCH, 0, err);
        if (!st)
            st = decode_rows(b, &m, tiny, DI_COUNT(tiny), DI_BENCH_RUNS, DI_BENCH_DECODE, err);
        di_cli_model_close(&m);
    }
    if (!st && n_layers > 0 && open_layers(b, &m, 512, &st, err)) {
        /* On the host so many rows take minutes: only for who asks for layers. */
        bool runs_on_host = is_host(&m);
        int n_cases = runs_on_host && b->opt->args.n < 2 ? 2 : (int)DI_COUNT(layers);
        st = decode_rows(b, &m, layers, n_cases, 3, runs_on_host ? 16 : 64, err);
        di_cli_model_close(&m);
    }
    return st;
}
