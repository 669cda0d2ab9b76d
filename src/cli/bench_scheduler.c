/* bench scheduler: what the engine's own thread does for a decode step, on a model that costs no processor time.
 *
 * Forming the step, filling the sampler's arguments, committing tokens, stop rules, text of every sequence and a
 * callback for each event; without the forward, which sleeps for as long as a fast device would compute, without the
 * drawing of tokens, which the runner's thread does, and without waiting for either. step_256: 256 sequences;
 * per_sequence: what each of 256 more adds. */
#include <time.h>

#include "bench.h"

enum { VOCAB = 64, PROMPT = 32, CONTEXT = 2048, WARM = 40, STEPS = 200, FORWARD_NS = 500000 };

/* A forward whose rows all have the same logits, with the maximum at another token each time. */
typedef struct free_model {
    float *logits; /* [seqs_max, VOCAB] */
    int64_t n_rows;
    int turn;
} free_model;

static di_status forward(void *self, const di_batch *batch, float **logits, di_error *err) {
    free_model *m = self;
    (void)batch, (void)err;
    int was = m->turn;
    m->turn = (m->turn + 1) % VOCAB;
    for (int64_t i = 0; i < m->n_rows; i++) {
        m->logits[i * VOCAB + was] = 0;
        m->logits[i * VOCAB + m->turn] = 1;
    }
    *logits = m->logits;
    (void)nanosleep(&(struct timespec){.tv_nsec = FORWARD_NS}, NULL);
    return DI_OK;
}

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)gen, (void)err;
    int64_t *bytes = user;
    if (event->kind == DI_CORE_TEXT)
        *bytes += (int64_t)event->len;
    return DI_OK;
}

static di_status fill(di_core *core, int32_t n, int64_t *bytes, di_error *err) {
    int32_t ids[PROMPT];
    for (int32_t s = 0; s < n; s++) {
        for (int i = 0; i < PROMPT; i++)
            ids[i] = (s * 7 + i * 3) % VOCAB;
        di_submission sub = {.ids = ids, .n_ids = PROMPT, .callback = on_event, .user = bytes};
        di_sampling_init(&sub.sampling);
        sub.sampling.temperature = 0;
        sub.sampling.ignore_eos = true;
        sub.sampling.max_tokens = CONTEXT - PROMPT;
        di_status st = di_core_submit(core, &sub, NULL, err);
        if (st)
            return st;
    }
    return DI_OK;
}

/* Microseconds of the engine's thread a step, run by run. */
static di_status measure(const di_backend *backend, di_device *device, const di_tokenizer *tok, int32_t n,
                         double runs[DI_BENCH_RUNS], di_error *err) {
    free_model m = {.n_rows = n, .logits = calloc((size_t)n * VOCAB, sizeof *m.logits)};
    if (!m.logits)
        return di_fail(err, DI_ERR_MEMORY, "logits of %d rows", n);
    di_executor executor = {.self = &m, .forward = forward};
    di_core_model model = {.n_vocab = VOCAB, .eos_id = 1, .window = 64, .window_span = 512};
    di_memory_plan plan = {.page_bytes = 64, .slot_bytes = 64};
    di_core_options o = {.seqs_max = n,
                         .batch_tokens_max = DI_MAX(2048, n),
                         .chunk_max = 512,
                         .context_max = CONTEXT,
                         .n_blocks = n * (CONTEXT / DI_PAGE_TOKENS),
                         .n_snapshots = n,
                         .has_prefix_cache = true};
    di_core *core = NULL;
    int64_t bytes = 0;
    di_status st = di_core_create_on(&core, &executor, &model, backend, device, &plan, tok, &o, err);
    if (!st)
        st = fill(core, n, &bytes, err);
    for (int i = 0; i < WARM && !st; i++)
        di_core_step(core);
    for (int r = 0; r < DI_BENCH_RUNS && !st; r++) {
        di_core_stats before, after;
        di_core_stats_get(core, &before);
        for (int i = 0; i < STEPS; i++)
            di_core_step(core);
        di_core_stats_get(core, &after);
        int64_t n_steps = after.n_steps - before.n_steps;
        if (after.output_tokens - before.output_tokens != n_steps * n || bytes == 0)
            st = di_fail(err, DI_ERR_INTERNAL, "%lld tokens in %lld steps of %d sequences",
                         (long long)(after.output_tokens - before.output_tokens), (long long)n_steps, n);
        runs[r] = (double)(after.host_ns - before.host_ns) * 1e-3 / (double)n_steps;
    }
    di_core_destroy(core);
    free(m.logits);
    return st;
}

static di_status rows(di_bench *b, const di_backend *backend, di_device *device, const di_tokenizer *tok,
                      di_error *err) {
    double few[DI_BENCH_RUNS] = {0}, many[DI_BENCH_RUNS] = {0}, each[DI_BENCH_RUNS];
    bool wants_step = di_bench_wants(b, "step_256"), wants_each = di_bench_wants(b, "per_sequence");
    di_status st = DI_OK;
    if (wants_step || wants_each)
        st = measure(backend, device, tok, 256, few, err);
    if (!st && wants_each)
        st = measure(backend, device, tok, 512, many, err);
    for (int i = 0; i < DI_BENCH_RUNS && wants_each; i++)
        each[i] = (many[i] - few[i]) / 256;
    if (!st && wants_step)
        st = di_bench_row(b, "step_256", few, DI_BENCH_RUNS, "us", 50, "most_allowed", err);
    if (!st && wants_each)
        st = di_bench_row(b, "per_sequence", each, DI_BENCH_RUNS, "us", 0.15, "most_allowed", err);
    return st;
}

di_status di_bench_scheduler(di_bench *b, di_error *err) {
    di_backend backend;
    di_device *device = NULL;
    di_tokenizer *tok = NULL;
    di_strbuf path = {0};
    di_load_options load;
    di_status st = di_cli_load_options(&load, b->opt, err);
    if (st)
        return st;
    di_device_config config = di_load_device_config(&load);
    di_path_join(&path, load.dir, "tokenizer.json");
    st = di_strbuf_status(&path, err);
    if (!st)
        st = di_tokenizer_open(&tok, di_strbuf_str(&path), err);
    if (!st)
        st = di_backend_find("cpu", &backend, err);
    if (!st)
        st = backend.device->open(&device, &config, err);
    if (!st)
        st = rows(b, &backend, device, tok, err);
    if (device)
        backend.device->close(device);
    di_tokenizer_close(tok);
    di_strbuf_deinit(&path);
    return st;
}
