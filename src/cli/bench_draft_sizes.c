/* bench speculative, the rows over batch sizes: requests that run at once, every other one greedy and the rest at
 * temperature 1, on engines that differ in their drafts alone.
 *
 *   off_bN                      tokens a second without drafts, N requests at once
 *   fixed1_bN .. fixed5_bN      so many drafts, all of them verified: speed over off's
 *   scheduled_bN                up to five drafts, as many verified as the cost model says: likewise
 *   fixedK_bN_accepted, scheduled_bN_accepted  accepted drafts a step of a sequence
 *   speedup_b1                  scheduled over off for one request, beside the best that a fixed number of drafts can
 *                               reach by the cost model (cost_model)
 *   worst_loss                  1 - scheduled / off at the batch size where that is largest; below 0 drafts bring
 *                               something everywhere
 *   worst_loss_fixed            likewise, beside the best of the fixed lengths
 *
 * Engines run in turn, with the same requests, and their answers are compared: none may have other tokens. A pair of
 * scheduled and off runs in every turn, the fixed lengths in every third one. Timed is what comes behind the prompts,
 * while all requests of a batch run: from when all have their first token to when the first one ends. With drafts the
 * others end one by one, and where a step of one request takes as long as one of many, as on a GPU, the last ones would
 * be most of the time. Answers are shorter in large batches, so that a turn takes about as long as for small ones. */
#include "bench_speculative.h"

enum { OFF, SCHEDULED, FIXED, FIXED_LENGTHS = 5, CONFIGS = FIXED + FIXED_LENGTHS };
enum { TURNS = 9, FIXED_EVERY = 3, FIXED_TURNS = TURNS / FIXED_EVERY, BATCH_MAX = 64, CONTEXT = 64 };

typedef struct batch_size {
    int n, n_requests;
    int64_t answer;
} batch_size;

static const batch_size sizes[] = {{1, 3, 96},   {2, 4, 96},   {4, 8, 80},  {8, 16, 64},
                                   {16, 16, 64}, {32, 32, 48}, {64, 64, 32}};
enum { SIZES = DI_COUNT(sizes) };

typedef struct outcome {
    double rates[CONFIGS][TURNS]; /* tokens a second; of fixed lengths the first FIXED_TURNS */
    double accepted[CONFIGS];     /* drafts, a step of a sequence */
} outcome;

typedef struct sweep {
    di_bench *bench;
    di_cli_model models[CONFIGS]; /* owned */
    bool has_fixed, is_exact;     /* is_exact: answers can be compared */
    outcome outcomes[SIZES];
    double bound; /* of speedup_b1; 0: unknown */
    di_bench_watch watches[BATCH_MAX];
    int32_t answers[BATCH_MAX][DI_BENCH_ANSWER]; /* of the turn's first engine */
} sweep;

static const char *name_of(int config, char out[16]) {
    if (config >= FIXED)
        snprintf(out, 16, "fixed%d", config - FIXED + 1);
    else
        snprintf(out, 16, "%s", config == OFF ? "off" : "scheduled");
    return out;
}

/* Runs the requests of a size, n at once; other ones in every turn. */
static di_status run_batches(sweep *s, int config, const batch_size *size, int turn, double *rate, di_error *err) {
    di_cli_model *m = &s->models[config];
    int64_t n_tokens = 0, ns = 0;
    for (int at = 0; at < size->n_requests; at += size->n) {
        di_bench_watch *w = s->watches + at;
        int n = DI_MIN(size->n, size->n_requests - at);
        di_status st = DI_OK;
        for (int i = 0; i < n && !st; i++) {
            int which = turn * BATCH_MAX + at + i;
            st = di_bench_story(m, which, (at + i) % 2, size->answer, &w[i], err);
        }
        if (!st)
            st = di_bench_run_until(m, w, n, n, 1, err);
        int64_t start_ns = di_clock_ns(), before = di_bench_tokens(w, n);
        if (!st)
            st = di_bench_run_until(m, w, n, 1, size->answer, err);
        if (st)
            return st;
        ns += di_clock_ns() - start_ns;
        n_tokens += di_bench_tokens(w, n) - before;
        if ((st = di_bench_finish(m, w, n, err)))
            return st;
    }
    *rate = (double)n_tokens / ((double)ns * 1e-9);
    return DI_OK;
}

/* Every engine gives the same tokens. */
static di_status compare(sweep *s, int config, const batch_size *size, bool is_first, di_error *err) {
    char name[16];
    for (int i = 0; i < size->n_requests; i++) {
        size_t n_bytes = (size_t)size->answer * sizeof(int32_t);
        if (is_first)
            memcpy(s->answers[i], s->watches[i].tokens, n_bytes);
        else if (s->is_exact && memcmp(s->answers[i], s->watches[i].tokens, n_bytes) != 0)
            return di_fail(err, DI_ERR_INTERNAL, "request %d of %d at once has other tokens with drafts '%s'", i,
                           size->n, name_of(config, name));
    }
    return DI_OK;
}

static di_status run_turn(sweep *s, int k, int turn, di_error *err) {
    const batch_size *size = &sizes[k];
    outcome *o = &s->outcomes[k];
    int slot = DI_MAX(turn, 0); /* turn -1 warms up */
    int n_configs = s->has_fixed && (turn < 0 || turn % FIXED_EVERY == 0) ? CONFIGS : FIXED;
    di_status st = DI_OK;
    for (int i = 0; i < n_configs && !st; i++) {
        int config = (i + slot) % n_configs;
        double *rate = &o->rates[config][config < FIXED ? slot : slot / FIXED_EVERY];
        st = run_batches(s, config, size, slot, rate, err);
        if (!st)
            st = compare(s, config, size, i == 0, err);
    }
    return st;
}

static di_status run_size(sweep *s, int k, di_error *err) {
    di_core_stats before[CONFIGS], after;
    int n_configs = s->has_fixed ? CONFIGS : FIXED;
    di_status st = run_turn(s, k, -1, err);
    for (int i = 0; i < n_configs && !st; i++)
        di_core_stats_get(s->models[i].engine, &before[i]);
    for (int turn = 0; turn < TURNS && !st; turn++)
        st = run_turn(s, k, turn, err);
    for (int i = 0; i < n_configs && !st; i++) {
        di_core_stats_get(s->models[i].engine, &after);
        /* A sequence's step gives a token beside those that were accepted; the first token is a prompt's. */
        int64_t n_accepted = after.accepted_tokens - before[i].accepted_tokens;
        int64_t n_steps =
            after.output_tokens - before[i].output_tokens - n_accepted - (after.n_submitted - before[i].n_submitted);
        s->outcomes[k].accepted[i] = (double)n_accepted / (double)DI_MAX(n_steps, 1);
    }
    return st;
}

static di_status open_all(sweep *s, di_error *err) {
    di_status st = DI_OK;
    for (int i = 0; i < (s->has_fixed ? CONFIGS : FIXED) && !st; i++) {
        di_bench_drafting drafting = {.policy = i >= FIXED ? "fixed" : "cost", .accept = "coupled"};
        drafting.n_drafts = i == OFF ? 0 : i == SCHEDULED ? FIXED_LENGTHS : i - FIXED + 1;
        st = di_bench_drafts_open(s->bench, &s->models[i], &drafting, BATCH_MAX, err);
    }
    return st;
}

/* ---- rows ---- */

static double median_of(const double *values, int n) {
    double copy[TURNS];
    memcpy(copy, values, (size_t)n * sizeof *values);
    return di_bench_median(copy, n);
}

/* runs [n] of config over off, turn by turn. */
static int ratios_of(const outcome *o, int config, double *runs) {
    int n = config < FIXED ? TURNS : FIXED_TURNS, every = config < FIXED ? 1 : FIXED_EVERY;
    for (int i = 0; i < n; i++)
        runs[i] = o->rates[config][i] / o->rates[OFF][i * every];
    return n;
}

/* What scheduling loses to the best fixed length, in the turns where these ran. */
static double fixed_losses(const outcome *o, double *losses) {
    int best = FIXED;
    for (int i = FIXED; i < CONFIGS; i++)
        best = median_of(o->rates[i], FIXED_TURNS) > median_of(o->rates[best], FIXED_TURNS) ? i : best;
    for (int i = 0; i < FIXED_TURNS; i++)
        losses[i] = 1 - o->rates[SCHEDULED][i * FIXED_EVERY] / o->rates[best][i];
    return median_of(losses, FIXED_TURNS);
}

static double off_losses(const outcome *o, double *losses) {
    int n = ratios_of(o, SCHEDULED, losses);
    for (int i = 0; i < n; i++)
        losses[i] = 1 - losses[i];
    return median_of(losses, n);
}

/* The losses at the batch size where they are largest. */
static di_status loss_row(sweep *s, const char *name, double (*losses_of)(const outcome *, double *), int n_runs,
                          di_error *err) {
    double losses[TURNS], most = 0;
    int worst = 0;
    for (int k = 0; k < (int)SIZES; k++) {
        double loss = losses_of(&s->outcomes[k], losses);
        worst = k == 0 || loss > most ? k : worst;
        most = k == 0 ? loss : DI_MAX(most, loss);
    }
    (void)losses_of(&s->outcomes[worst], losses);
    return di_bench_row(s->bench, name, losses, n_runs, "fraction", 0, NULL, err);
}

typedef struct wanted {
    bool rows[SIZES][CONFIGS][2]; /* speed, accepted drafts */
    bool is_any_of[SIZES], is_any_fixed;
    bool speedup, loss, loss_fixed;
} wanted;

static void name_row(char out[48], int config, int k, bool is_accepted) {
    char name[16];
    snprintf(out, 48, "%s_b%d%s", name_of(config, name), sizes[k].n, is_accepted ? "_accepted" : "");
}

/* Every row is asked for, whatever the others say: asking marks the selectors that name something. */
static bool ask_rows(di_bench *b, wanted *w) {
    char name[48];
    bool is_any = false;
    *w = (wanted){.speedup = di_bench_wants(b, "speedup_b1"),
                  .loss = di_bench_wants(b, "worst_loss"),
                  .loss_fixed = di_bench_wants(b, "worst_loss_fixed")};
    for (int k = 0; k < (int)SIZES; k++) {
        w->is_any_of[k] = w->loss || w->loss_fixed || (w->speedup && k == 0);
        for (int i = 0; i < CONFIGS; i++) {
            for (int what = 0; what < (i == OFF ? 1 : 2); what++) {
                name_row(name, i, k, what);
                w->rows[k][i][what] = di_bench_wants(b, name);
                w->is_any_of[k] |= w->rows[k][i][what];
                w->is_any_fixed |= i >= FIXED && w->rows[k][i][what];
            }
        }
        is_any |= w->is_any_of[k];
    }
    /* The bound needs chances of drafts that did not depend on how likely they were. */
    w->is_any_fixed |= w->loss_fixed || w->speedup;
    return is_any;
}

static di_status size_rows(sweep *s, const wanted *w, int k, di_error *err) {
    char name[48];
    double runs[TURNS];
    di_status st = DI_OK;
    for (int i = 0; i < CONFIGS && !st; i++) {
        if (w->rows[k][i][0]) {
            int n = ratios_of(&s->outcomes[k], i, runs);
            if (i == OFF)
                memcpy(runs, s->outcomes[k].rates[OFF], sizeof runs);
            name_row(name, i, k, false);
            st = di_bench_row(s->bench, name, runs, n, i == OFF ? "tokens/s" : "ratio", 0, NULL, err);
        }
        if (!st && w->rows[k][i][1]) {
            runs[0] = s->outcomes[k].accepted[i];
            name_row(name, i, k, true);
            st = di_bench_row(s->bench, name, runs, 1, "tokens", 0, NULL, err);
        }
    }
    return st;
}

static di_status last_rows(sweep *s, const wanted *w, di_error *err) {
    double runs[TURNS];
    di_status st = DI_OK;
    if (w->speedup) {
        int n = ratios_of(&s->outcomes[0], SCHEDULED, runs);
        st = di_bench_row(s->bench, "speedup_b1", runs, n, "ratio", s->bound, "cost_model", err);
    }
    if (!st && w->loss)
        st = loss_row(s, "worst_loss", off_losses, TURNS, err);
    if (!st && w->loss_fixed)
        st = loss_row(s, "worst_loss_fixed", fixed_losses, FIXED_TURNS, err);
    return st;
}

di_status di_bench_draft_sizes(di_bench *b, di_error *err) {
    wanted w;
    if (!ask_rows(b, &w))
        return DI_OK;
    sweep *s = calloc(1, sizeof *s);
    if (!s)
        return di_fail(err, DI_ERR_MEMORY, "the answers of %d requests", (int)BATCH_MAX);
    s->bench = b;
    s->has_fixed = w.is_any_fixed;
    s->is_exact = strcmp(b->opt->batch_invariant, "off") != 0;
    di_status st = open_all(s, err);
    for (int k = 0; k < (int)SIZES && !st; k++) {
        if (!w.is_any_of[k])
            continue;
        st = run_size(s, k, err);
        if (!st && k == 0 && s->has_fixed) {
            di_core_stats held;
            di_core_stats_get(s->models[CONFIGS - 1].engine, &held);
            s->bound = di_core_speedup_bound(s->models[SCHEDULED].engine, &held, CONTEXT);
        }
        if (!st)
            st = size_rows(s, &w, k, err);
    }
    if (!st)
        st = last_rows(s, &w, err);
    for (int i = 0; i < CONFIGS; i++)
        di_cli_model_close(&s->models[i]);
    free(s);
    return st;
}
