/* bench grammar, the row that runs the model: what following a grammar takes off the engine's throughput.
 *
 *   throughput_cost         1 - tokens a second with a grammar / without one, of the grammar that costs more
 *   throughput_cost_regex   of a regular expression that nearly every text of the model follows: all masks are large
 *   throughput_cost_schema  of a schema for long lists of objects: masks are of all sizes, and some text is certain
 *
 * 64 requests run at once, from submission to the last one's end, the same ones with each grammar and without. All have
 * 64 tokens: no text that short is a whole list of the schema, and min_tokens keeps the end mark out of the others. A
 * grammar changes texts, so experts and drafts that hold differ too, as they do in use. Grammars are compiled and have
 * met other texts before, as those in the cache have: the first turn is not counted. With --log-level debug the speeds
 * are in the log, with the processor time of a token, which says more on a machine that does other things too. */
#include <sys/resource.h>

#include "bench_model.h"

enum { SEQS = 64, TOKENS = 64, TURNS = 9, GRAMMARS = 2, KINDS = 1 + GRAMMARS }; /* kind 0 has no grammar */

static const char *const beginnings[] = {
    "Once upon a time, there was a little",
    "One day, a boy found",
    "The dog and the cat",
    "Mia wanted to bake a cake. She",
};

static const struct {
    const char *row;
    di_grammar_kind kind;
    const char *text;
} grammars[GRAMMARS] = {
    {"throughput_cost_regex", DI_GRAMMAR_REGEX, "[A-Za-z ,.;:!?'\"\\n-]*"},
    {"throughput_cost_schema", DI_GRAMMAR_SCHEMA,
     "{\"type\":\"array\",\"minItems\":1000,\"items\":{\"type\":\"object\",\"properties\":{"
     "\"name\":{\"type\":\"string\"},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":130},"
     "\"animal\":{\"enum\":[\"cat\",\"dog\",\"bird\",\"fish\"]},"
     "\"words\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":40}}},"
     "\"required\":[\"name\",\"age\",\"animal\",\"words\"]}}"},
};

typedef struct engine_bench {
    di_cli_model model;                   /* owned */
    di_grammar *compiled[GRAMMARS];       /* owned */
    const di_grammar_vocab *vocab;        /* the model's */
    di_ids prompts[DI_COUNT(beginnings)]; /* owned */
    di_bench_watch watches[SEQS];
    double rates[KINDS][TURNS]; /* tokens a second */
} engine_bench;

static double processor_us(void) {
    struct rusage use = {0};
    getrusage(RUSAGE_SELF, &use);
    return 1e6 * (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static di_status submit(engine_bench *e, int kind, int turn, int i, di_error *err) {
    const di_ids *prompt = &e->prompts[i % (int)DI_COUNT(beginnings)];
    di_grammar_source source;
    di_submission sub = {.ids = prompt->data, .n_ids = prompt->len};
    di_sampling_init(&sub.sampling);
    sub.sampling.has_seed = true;
    sub.sampling.seed = (uint64_t)turn * SEQS + (uint64_t)i;
    sub.sampling.min_tokens = sub.sampling.max_tokens = TOKENS;
    if (kind > 0)
        sub.constraint = di_grammar_source_init(&source, e->compiled[kind - 1], e->vocab);
    return di_bench_follow(&e->model, &sub, &e->watches[i], err);
}

static di_status run_kind(engine_bench *e, int kind, int turn, double *rate, di_error *err) {
    di_status st = DI_OK;
    double start_us = processor_us();
    int64_t start_ns = di_clock_ns();
    for (int i = 0; i < SEQS && !st; i++)
        st = submit(e, kind, turn, i, err);
    if (!st)
        st = di_bench_finish(&e->model, e->watches, SEQS, err);
    *rate = (double)SEQS * TOKENS / ((double)(di_clock_ns() - start_ns) * 1e-9);
    di_debug("throughput, turn %d, %s: %.1f tokens/s, %.1f us of processors a token", turn,
             kind > 0 ? grammars[kind - 1].row : "no grammar", *rate, (processor_us() - start_us) / (SEQS * TOKENS));
    for (int i = 0; i < SEQS && !st; i++) {
        if (e->watches[i].n_tokens != TOKENS)
            st = di_fail(err, DI_ERR_INTERNAL, "request %d has %lld tokens, expected %d", i,
                         (long long)e->watches[i].n_tokens, (int)TOKENS);
    }
    return kind > 0 ? di_error_context(err, st, "%s", grammars[kind - 1].row) : st;
}

static di_status prepare(engine_bench *e, di_bench *b, di_error *err) {
    di_options opt = *b->opt;
    di_bench copy = *b;
    opt.no_prefix_cache = true;
    copy.opt = &opt;
    di_status st = di_bench_model_open(&copy, &e->model, DI_BENCH_PREFILL, SEQS, opt.draft_tokens, err);
    if (!st)
        st = di_constrainer_vocab(&e->model.constrainer, &e->vocab, err);
    for (size_t i = 0; i < DI_COUNT(beginnings) && !st; i++)
        st = di_tokenizer_encode(e->model.loaded.tok, beginnings[i], strlen(beginnings[i]), false, &e->prompts[i], err);
    for (int i = 0; i < GRAMMARS && !st; i++) {
        di_grammar_spec spec = {.kind = grammars[i].kind, .text = grammars[i].text, .len = strlen(grammars[i].text)};
        st = di_grammar_compile(&e->compiled[i], &spec, NULL, err);
    }
    return st;
}

/* The losses of a kind, turn by turn; returns their median. */
static double losses_of(const engine_bench *e, int kind, double losses[TURNS]) {
    double sorted[TURNS];
    for (int t = 0; t < TURNS; t++)
        sorted[t] = losses[t] = 1 - e->rates[kind][t] / e->rates[0][t];
    return di_bench_median(sorted, TURNS);
}

di_status di_bench_grammar_engine(di_bench *b, di_error *err) {
    bool wants[KINDS] = {di_bench_wants(b, "throughput_cost")};
    for (int i = 0; i < GRAMMARS; i++)
        wants[1 + i] = di_bench_wants(b, grammars[i].row);
    if (b->opt->dummy_layers || !(wants[0] || wants[1] || wants[2]))
        return DI_OK;
    engine_bench *e = calloc(1, sizeof *e);
    if (!e)
        return di_fail(err, DI_ERR_MEMORY, "%d requests", (int)SEQS);
    di_status st = prepare(e, b, err);
    for (int turn = -1; turn < TURNS && !st; turn++) { /* the first one warms up */
        int slot = DI_MAX(turn, 0);
        for (int i = 0; i < KINDS && !st; i++) {
            int kind = (i + slot) % KINDS;
            st = run_kind(e, kind, turn + 1, &e->rates[kind][slot], err);
        }
    }
    double losses[TURNS], worst = 0;
    int worst_kind = 1;
    for (int kind = 1; kind < KINDS && !st; kind++) {
        double loss = losses_of(e, kind, losses);
        if (kind == 1 || loss > worst) {
            worst = loss;
            worst_kind = kind;
        }
        if (wants[kind])
            st = di_bench_row(b, grammars[kind - 1].row, losses, TURNS, "fraction", 0, NULL, err);
    }
    if (!st && wants[0]) {
        losses_of(e, worst_kind, losses);
        st = di_bench_row(b, "throughput_cost", losses, TURNS, "fraction", 0.03, "most_allowed", err);
    }
    for (size_t i = 0; i < DI_COUNT(beginnings); i++)
        di_ids_deinit(&e->prompts[i]);
    di_cli_model_close(&e->model); /* ends what runs, which uses the grammars */
    for (int i = 0; i < GRAMMARS; i++)
        di_grammar_release(e->compiled[i]);
    free(e);
    return st;
}
