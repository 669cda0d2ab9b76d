/* bench prefill and decode: the whole model through the engine, as `run` uses it.
 *
 * A prefill run is one prompt of 512 tokens up to its first sampled token. A decode run is B sequences with prompts of
 * 32 tokens and the steps after all of them have their first token. Greedy, end marks ignored; prompts are made-up ids,
 * so that caches and experts see varied input. The limits: the bytes of weights that a step must read at least, at the
 * measured read bandwidth. */
#include "bench.h"

enum { PREFILL_TOKENS = 512, PROMPT_TOKENS = 32, DECODE_TOKENS = 64, BATCH_MAX = 16 };

typedef struct counter {
    int64_t n; /* tokens so far */
    di_error error;
} counter;

static di_status count_token(void *user, const di_generation *gen, const di_engine_event *event, di_error *err) {
    counter *c = user;
    if (event->kind == DI_ENGINE_TOKEN)
        c->n++;
    if (event->kind == DI_ENGINE_DONE && gen->finish == DI_FINISH_ERROR)
        c->error = gen->error;
    (void)err;
    return DI_OK;
}

static void fill_prompt(int32_t *ids, int64_t n, int32_t vocab, uint64_t seed) {
    ids[0] = 0;
    for (int64_t i = 1; i < n; i++)
        ids[i] = (int32_t)(4 + di_mix64(seed * 1000003 + (uint64_t)i) % (uint64_t)(vocab - 4));
}

static di_status submit(di_cli_model *m, const int32_t *ids, int64_t n, int64_t new_tokens, counter *c, di_error *err) {
    di_submission s = {.ids = ids, .n_ids = (size_t)n, .callback = count_token, .user = c};
    uint64_t id;
    di_sampling_init(&s.sampling);
    s.sampling.temperature = 0;
    s.sampling.ignore_eos = true;
    s.sampling.max_tokens = new_tokens;
    return di_engine_submit(m->engine, &s, &id, err);
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

/* Runs steps until every counter has reached n. */
static di_status run_until(di_cli_model *m, const counter *c, int n_seqs, int64_t n, di_error *err) {
    for (bool is_more = true;; is_more = di_engine_step(m->engine)) {
        bool is_there = true;
        for (int i = 0; i < n_seqs; i++) {
            if (c[i].error.code)
                return di_fail(err, c[i].error.code, "%s", c[i].error.message);
            is_there = is_there && c[i].n >= n;
        }
        if (is_there)
            return DI_OK;
        if (!is_more)
            return di_fail(err, DI_ERR_INTERNAL, "a sequence ended early");
    }
}

static di_status open_for(di_bench *b, di_cli_model *m, int64_t batch_tokens, int32_t seqs, di_error *err) {
    di_options opt = *b->opt;
    if (!di_options_is_set(b->opt, DI_OPT_max_batched_tokens))
        opt.max_batched_tokens = batch_tokens;
    if (!di_options_is_set(b->opt, DI_OPT_chunk))
        opt.chunk = batch_tokens;
    if (!di_options_is_set(b->opt, DI_OPT_max_seqs))
        opt.max_seqs = seqs;
    return di_cli_model_open(m, &opt, err);
}

di_status di_bench_prefill(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    int32_t ids[PREFILL_TOKENS];
    double runs[DI_BENCH_RUNS], bandwidth = 0;
    di_status st = open_for(b, &m, PREFILL_TOKENS, BATCH_MAX, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) { /* one run to warm up */
        counter c = {0};
        fill_prompt(ids, PREFILL_TOKENS, m.loaded.config.vocab, (uint64_t)(i + 1));
        int64_t start_ns = di_clock_ns();
        if ((st = submit(&m, ids, PREFILL_TOKENS, 1, &c, err)) || (st = run_until(&m, &c, 1, 1, err)))
            break;
        if (i >= 0)
            runs[i] = PREFILL_TOKENS / ((double)(di_clock_ns() - start_ns) * 1e-9);
        while (di_engine_step(m.engine)) {
        }
    }
    if (!st)
        st = di_bench_bandwidth(b, &bandwidth, err);
    if (!st)
        st = di_bench_row(b, "tiny_512", runs, DI_BENCH_RUNS, "tokens/s",
                          PREFILL_TOKENS * bandwidth / step_bytes(&m, PREFILL_TOKENS), "read_bandwidth", err);
    di_cli_model_close(&m);
    return st;
}

static di_status decode_row(di_bench *b, di_cli_model *m, const char *name, int n_seqs, di_error *err) {
    double runs[DI_BENCH_RUNS], bandwidth;
    di_status st = DI_OK;
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        counter c[BATCH_MAX] = {{0}};
        int32_t ids[PROMPT_TOKENS];
        for (int s = 0; s < n_seqs && !st; s++) {
            fill_prompt(ids, PROMPT_TOKENS, m->loaded.config.vocab, (uint64_t)((i + 1) * BATCH_MAX + s));
            st = submit(m, ids, PROMPT_TOKENS, DECODE_TOKENS + 1, &c[s], err);
        }
        if (st || (st = run_until(m, c, n_seqs, 1, err)))
            return st;
        int64_t start_ns = di_clock_ns(), before = 0, after = 0;
        for (int s = 0; s < n_seqs; s++)
            before += c[s].n;
        while (di_engine_step(m->engine)) {
        }
        for (int s = 0; s < n_seqs; s++)
            after += c[s].n;
        if (i >= 0)
            runs[i] = (double)(after - before) / ((double)(di_clock_ns() - start_ns) * 1e-9);
    }
    if (st || (st = di_bench_bandwidth(b, &bandwidth, err)))
        return st;
    return di_bench_row(b, name, runs, DI_BENCH_RUNS, "tokens/s", n_seqs * bandwidth / step_bytes(m, n_seqs),
                        "read_bandwidth", err);
}

di_status di_bench_decode(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    di_status st = open_for(b, &m, PREFILL_TOKENS, BATCH_MAX, err);
    if (!st)
        st = decode_row(b, &m, "tiny_b1", 1, err);
    if (!st)
        st = decode_row(b, &m, "tiny_b16", BATCH_MAX, err);
    di_cli_model_close(&m);
    return st;
}
