/* Step times before there are any: what the policy of drafts knows of this machine when the first request comes.
 *
 * Steps of a few sizes are run on memory that no sequence has yet, for as long as the options allow; what they leave in
 * it is written over before anything reads it. With DI_SPEC_COST they are the first steps that the model of costs
 * learns from, which goes on with every step that follows, so that a machine which was busy meanwhile does no lasting
 * harm. With DI_SPEC_REFERENCE they make the table of times (dspark.md 4.6.1: one warm-up, then the mean of the middle
 * three of five). */
#include "engine_internal.h"

enum { ROUNDS = 4, TABLE_RUNS = 5, COST_RUNS = 4, COST_ROWS_MAX = 8 };

typedef struct rig {
    di_core *core;
    int64_t end_ns;
    int32_t *tokens, *blocks; /* owned [rows_max], [seqs_max] */
    di_seq_rows *rows;        /* owned [seqs_max] */
    int32_t n_seqs_max, rows_max;
} rig;

static di_status rig_init(rig *g, di_core *c) {
    const di_core_options *o = &c->options;
    int64_t rows = DI_MIN((int64_t)o->seqs_max * (1 + o->draft_tokens), DI_MIN(o->batch_tokens_max, o->logits_max));
    *g = (rig){.core = c, .end_ns = di_clock_ns() + o->measure_ns};
    g->n_seqs_max = DI_MIN(DI_MIN(o->seqs_max, o->n_blocks), c->kv.slots.n_units);
    g->rows_max = (int32_t)DI_MIN(rows, (int64_t)g->n_seqs_max * DI_PAGE_TOKENS);
    g->tokens = malloc((size_t)g->rows_max * sizeof *g->tokens);
    g->blocks = malloc((size_t)g->n_seqs_max * sizeof *g->blocks);
    g->rows = calloc((size_t)g->n_seqs_max, sizeof *g->rows);
    if (!g->tokens || !g->blocks || !g->rows)
        return DI_ERR_MEMORY;
    /* Two tokens by turns: rows of one text choose experts that are alike. Where that makes drafts look cheaper than
     * they are, steps with drafts tell; where they looked dearer, there would be none to tell. */
    for (int32_t i = 0; i < g->rows_max; i++)
        g->tokens[i] = (int32_t)(di_mix64((uint64_t)(i % 2)) % (uint64_t)c->model.n_vocab);
    for (int32_t i = 0; i < g->n_seqs_max; i++)
        g->blocks[i] = i;
    return DI_OK;
}

static void rig_deinit(rig *g) {
    free(g->tokens);
    free(g->blocks);
    free(g->rows);
}

/* Draws n rows of logits, as a step does. */
static di_status draw_rows(di_runner *r, const float *logits, int32_t n) {
    di_sampling sampling;
    di_sampling_init(&sampling);
    di_status st = r->executor.sample ? di_drawer_begin(r, n, NULL) : DI_OK;
    for (int32_t i = 0; i < n && !st; i++) {
        int32_t token;
        di_sample_args args = {.sampling = &sampling, .n_vocab = r->n_vocab, .eos_id = -1, .forced = -1};
        if (r->executor.sample) {
            st = di_sample_pack_add(&r->drawer.pack, &args, NULL, i, 0, NULL);
            continue;
        }
        args.logits = r->rows[0];
        st = r->backend->device->download(r->device, r->rows[0], logits + (int64_t)i * r->n_vocab,
                                          (size_t)r->n_vocab * sizeof(float), NULL);
        if (!st)
            st = di_sample(&r->samplers[0], &args, &token, NULL);
    }
    return !st && r->executor.sample ? di_drawer_run(r, logits, NULL, NULL) : st;
}

/* A step of n rows, over as many sequences as there can be; its time and that of drawing. */
static di_status run_step(rig *g, int32_t n, int64_t *forward_ns, int64_t *draw_ns) {
    di_runner *r = &g->core->runner;
    int32_t n_seqs = DI_MIN(n, g->n_seqs_max), at = 0;
    for (int32_t k = 0; k < n_seqs; k++) {
        int32_t rows = n / n_seqs + (k < n % n_seqs);
        g->rows[k] = (di_seq_rows){.tokens = g->tokens + at,
                                   .n_rows = rows,
                                   .n_logits = rows,
                                   .slot = k,
                                   .blocks = &g->blocks[k],
                                   .n_blocks = 1};
        at += rows;
    }
    di_batch batch = {.n_seqs = n_seqs, .seqs = g->rows, .pages = r->kv->pages, .slots = r->kv->states};
    float *logits;
    int64_t start_ns = di_clock_ns();
    di_status st = r->executor.forward(r->executor.self, &batch, &logits, NULL);
    int64_t middle_ns = di_clock_ns();
    if (!st)
        st = draw_rows(r, logits, n);
    int n_beside = r->executor.sample ? 1 : DI_MIN(r->n_workers, n); /* the host's threads draw rows side by side */
    *forward_ns = middle_ns - start_ns;
    *draw_ns = (di_clock_ns() - middle_ns) / n_beside;
    return st;
}

static di_status run_round(rig *g, int32_t n, int64_t *ns) {
    di_runner *r = &g->core->runner;
    int64_t start_ns = di_clock_ns();
    for (int32_t k = 0; k < n; k++) {
        r->draft_seqs[k] = (di_draft_seq){.token = g->tokens[k], .last = 0, .slot = k};
        r->draft_prev[k] = g->tokens[k];
    }
    bool waits = !r->executor.draft_launch;
    di_status st = (waits ? r->executor.draft_begin : r->executor.draft_launch)(r->executor.self, r->draft_seqs, n,
                                                                                r->n_drafts, r->kv->states, NULL);
    for (int32_t i = 0; i < r->n_drafts && !st; i++) {
        float *logits, *conf;
        st = waits ? r->executor.draft_next(r->executor.self, i, r->draft_prev, &logits, &conf, NULL)
                   : r->executor.draft_follow(r->executor.self, i, NULL, &logits, &conf, NULL);
    }
    if (!st && !waits)
        st = r->executor.wait(r->executor.self, NULL);
    *ns = di_clock_ns() - start_ns;
    return st;
}

static bool is_over(const rig *g) {
    return di_clock_ns() >= g->end_ns;
}

/* The least of a few runs behind a warm-up counts for all of them: what else runs on the machine only adds to it. */
static void measure_cost(rig *g) {
    di_spec_cost *cost = &g->core->runner.cost;
    int64_t forward_ns, draw_ns, round_ns;
    for (int32_t n = 1; n <= DI_MIN(g->rows_max, (int32_t)COST_ROWS_MAX); n *= 2) {
        int64_t step_ns = INT64_MAX, least_ns = INT64_MAX;
        for (int run = -1; run < COST_RUNS; run++) {
            if (is_over(g) || run_step(g, n, &forward_ns, &draw_ns))
                return;
            if (run >= 0)
                step_ns = DI_MIN(step_ns, forward_ns + draw_ns);
        }
        for (int run = 0; run < COST_RUNS; run++)
            di_spec_cost_learn_step(cost, n, n, step_ns);
        if (n > DI_MIN(2, g->n_seqs_max))
            continue;
        for (int run = -1; run < ROUNDS; run++) {
            if (is_over(g) || run_round(g, n, &round_ns))
                return;
            if (run >= 0)
                least_ns = DI_MIN(least_ns, round_ns);
        }
        for (int run = 0; run < ROUNDS; run++)
            di_spec_cost_learn_draft(cost, n, least_ns);
    }
}

/* The mean of the middle three of five; false when time is over. */
static bool measure_point(rig *g, int32_t n, double *ns) {
    int64_t times[TABLE_RUNS], draw_ns, least = INT64_MAX, most = 0, sum = 0;
    for (int run = -1; run < TABLE_RUNS; run++) {
        if (is_over(g) || run_step(g, n, &times[DI_MAX(run, 0)], &draw_ns))
            return false;
    }
    for (int run = 0; run < TABLE_RUNS; run++) {
        least = DI_MIN(least, times[run]);
        most = DI_MAX(most, times[run]);
        sum += times[run];
    }
    *ns = (double)(sum - least - most) / (TABLE_RUNS - 2);
    return true;
}

/* Sizes rise by one, then by a quarter, up to the largest step. */
static void measure_table(rig *g) {
    int32_t rows[DI_SPEC_CURVE_POINTS], n_points = 0;
    double ns[DI_SPEC_CURVE_POINTS];
    for (int32_t n = 1; n_points < DI_SPEC_CURVE_POINTS; n = DI_MIN(n + DI_MAX(n / 4, 1), g->rows_max)) {
        if (!measure_point(g, n, &ns[n_points]))
            break;
        if (n_points > 0) /* more rows never take less: what is below is noise */
            ns[n_points] = DI_MAX(ns[n_points], ns[n_points - 1] * (1 + 1e-9));
        rows[n_points++] = n;
        if (n == g->rows_max)
            break;
    }
    di_error err = {0};
    if (di_spec_curve_init(g->core->runner.curve, n_points, rows, ns, &err))
        di_warn("no table of step times, so all drafts are verified: %s", err.message);
}

void di_core_measure(di_core *c) {
    rig g;
    if (c->options.measure_ns <= 0 || c->runner.n_drafts == 0 || c->options.draft_policy == DI_SPEC_FIXED)
        return;
    if (!rig_init(&g, c)) {
        if (c->options.draft_policy == DI_SPEC_REFERENCE)
            measure_table(&g);
        else
            measure_cost(&g);
    }
    rig_deinit(&g);
}
