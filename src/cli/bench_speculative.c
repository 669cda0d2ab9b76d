/* bench speculative: what drafts bring, on the model of --model and the beginnings of stories.
 *
 *   accepted_length       tokens of a verification, the one that needs no draft included: greedy, every draft verified.
 *                         Which drafts hold is a matter of tests: tests/golden/draft_rounds_test.c counts them round by
 *                         round beside another program's, on prompts of its own
 *   acceptance_rejection  at temperature 1, five drafts, all verified: share of the rounds whose first draft holds
 *   acceptance_coupled    the same with the noise that draft and target share, beside acceptance by rejection
 *   accepted_rejection, accepted_coupled  accepted drafts a round, of the same runs
 *   acceptance_bound      mean of (1 - d) / (1 + d) over all drafts that rejection has tested, d the distance of
 * target's and draft's distributions: what shared noise keeps at least. Beside the mean of 1 - d, which rejection
 * keeps: their ratio is the least that theory allows for coupled over rejection acceptance_error      standard error of
 * the ratio of acceptance_coupled, over groups of requests plan_256              choosing the lengths of 256 sequences
 * by cost
 *
 * and the rows over batch sizes, which are bench_draft_sizes.c's. */
#include <math.h>

#include "bench_speculative.h"

enum { DRAFTS = 5 };

static const char *const beginnings[DI_BENCH_STORIES] = {
    "Once upon a time, there was a little girl named Lily. She",
    "One day, a boy found a red ball in the park. He",
    "The sun was shining and the birds were singing. Tom",
    "Mia wanted to bake a cake with her mom. They",
    "There was a big tree in the garden where the cat",
    "Ben and Sam went to the beach to play. Ben",
    "A little dog named Spot liked to run. One day",
    "The children were sad because the rain",
};

di_status di_bench_story(di_cli_model *m, int which, double temperature, int64_t n_tokens, di_bench_watch *w,
                         di_error *err) {
    const char *text = beginnings[which % DI_BENCH_STORIES];
    di_ids ids = {0};
    di_status st = di_tokenizer_encode(m->loaded.tok, text, strlen(text), false, &ids, err);
    if (!st) {
        di_submission sub = {.ids = ids.data, .n_ids = ids.len};
        di_sampling_init(&sub.sampling);
        sub.sampling.temperature = temperature;
        sub.sampling.has_seed = true;
        sub.sampling.seed = (uint64_t)which;
        sub.sampling.ignore_eos = true;
        sub.sampling.max_tokens = n_tokens;
        st = di_bench_follow(m, &sub, w, err);
    }
    di_ids_deinit(&ids);
    return st;
}

di_status di_bench_drafts_open(di_bench *b, di_cli_model *m, const di_bench_drafting *drafting, int32_t n_seqs,
                               di_error *err) {
    di_options opt = *b->opt;
    di_bench copy = *b;
    opt.draft_policy = drafting->policy;
    opt.accept = drafting->accept;
    opt.no_prefix_cache = true;
    copy.opt = &opt;
    di_status st = di_bench_model_open(&copy, m, DI_BENCH_PREFILL, n_seqs, drafting->n_drafts, err);
    int32_t n_drafts = st ? 0 : m->loaded.plan.engine.draft_tokens;
    if (!st && n_drafts < drafting->n_drafts)
        st =
            di_fail(err, DI_ERR_ARG, "the model drafts %d tokens, expected %d", (int)n_drafts, (int)drafting->n_drafts);
    if (!st && !m->loaded.tok)
        st = di_fail(err, DI_ERR_ARG, "the model has no tokenizer");
    return st;
}

/* ---- which drafts hold --------------------------------------------------------------------------------------------
 */

static di_status length_row(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    double runs[1] = {0};
    di_bench_drafting fixed = {"fixed", "coupled", DRAFTS};
    di_status st = di_bench_drafts_open(b, &m, &fixed, 1, err);
    for (int i = 0; i < DI_BENCH_STORIES && !st; i++) {
        di_bench_watch w;
        st = di_bench_story(&m, i, 0, DI_BENCH_ANSWER, &w, err);
        if (!st)
            st = di_bench_finish(&m, &w, 1, err);
    }
    if (!st) {
        di_core_stats s;
        di_core_stats_get(m.engine, &s);
        runs[0] = 1 + (double)s.accepted_tokens / (double)DI_MAX(s.verified_at[0], 1);
        st = di_bench_row(b, "accepted_length", runs, 1, "tokens", 0, NULL, err);
    }
    di_cli_model_close(&m);
    return st;
}

/* Stories are drawn at temperature 1 and cut at several places; each piece is continued by samples whose seeds differ,
 * the same ones under both rules. Compared piece by piece, the difference has no part of how hard the pieces are. */
enum { STORIES = 32, CUTS = 6, CUT_EVERY = DI_BENCH_ANSWER / CUTS, PIECES_MAX = STORIES * CUTS, SAMPLES = 16 };
enum { PIECE_MAX = 128, SAMPLE_TOKENS = 8 };

typedef struct pieces {
    int32_t ids[PIECES_MAX][PIECE_MAX];
    size_t len[PIECES_MAX];
    int n;
} pieces;

typedef struct acceptance {
    double shares[PIECES_MAX]; /* of rounds whose first draft held */
    double share;              /* mean of these */
    double per_round;          /* drafts that hold, of five */
    double expected, bound;    /* means of 1 - d and (1 - d) / (1 + d); rejection's alone */
} acceptance;

/* What lies before the end mark of a story, in pieces. */
static di_status cut(const di_cli_model *m, pieces *p, int which, const di_bench_watch *w, di_error *err) {
    const char *text = beginnings[which % DI_BENCH_STORIES];
    di_ids ids = {0};
    di_status st = di_tokenizer_encode(m->loaded.tok, text, strlen(text), false, &ids, err);
    for (size_t n = CUT_EVERY; n <= DI_BENCH_ANSWER && !st && ids.len + n <= PIECE_MAX; n += CUT_EVERY) {
        bool has_ended = false;
        for (size_t i = 0; i < n; i++)
            has_ended = has_ended || w->tokens[i] == m->loaded.config.eos_id;
        if (has_ended)
            break;
        memcpy(p->ids[p->n], ids.data, ids.len * sizeof *ids.data);
        memcpy(p->ids[p->n] + ids.len, w->tokens, n * sizeof *w->tokens);
        p->len[p->n++] = ids.len + n;
    }
    di_ids_deinit(&ids);
    return st;
}

static di_status make_pieces(di_cli_model *m, pieces *p, di_error *err) {
    di_bench_watch w[DI_BENCH_BATCH];
    di_status st = DI_OK;
    p->n = 0;
    for (int at = 0; at < STORIES && !st; at += DI_BENCH_BATCH) {
        for (int i = 0; i < DI_BENCH_BATCH && !st; i++)
            st = di_bench_story(m, at + i, 1, DI_BENCH_ANSWER, &w[i], err);
        if (!st)
            st = di_bench_finish(m, w, DI_BENCH_BATCH, err);
        for (int i = 0; i < DI_BENCH_BATCH && !st; i++)
            st = cut(m, p, at + i, &w[i], err);
    }
    return st || p->n > 1 ? st : di_fail(err, DI_ERR_INTERNAL, "the model's stories end at once");
}

static di_status continue_piece(di_cli_model *m, const pieces *p, int i, di_error *err) {
    di_bench_watch w;
    di_submission sub = {.ids = p->ids[i], .n_ids = p->len[i], .n = SAMPLES};
    di_sampling_init(&sub.sampling);
    sub.sampling.has_seed = true;
    sub.sampling.seed = (uint64_t)i * SAMPLES;
    sub.sampling.max_tokens = SAMPLE_TOKENS;
    di_status st = di_bench_follow(m, &sub, &w, err);
    while (!st && di_core_step(m->engine)) {
    }
    if (!st && (w.n_done != SAMPLES || w.error.code))
        st = di_fail(err, DI_ERR_INTERNAL, "piece %d: %s", i, w.error.message);
    return st;
}

static di_status measure_acceptance(di_bench *b, const char *accept, pieces *p, acceptance *out, di_error *err) {
    di_cli_model m = {0};
    di_core_stats start = {0}, before, s = {0};
    di_bench_drafting fixed = {"fixed", accept, DRAFTS};
    di_status st = di_bench_drafts_open(b, &m, &fixed, DI_BENCH_BATCH, err);
    if (!st && p->n == 0)
        st = make_pieces(&m, p, err);
    if (!st)
        di_core_stats_get(m.engine, &start);
    before = start;
    *out = (acceptance){0};
    for (int i = 0; i < p->n && !st; i++) {
        if ((st = continue_piece(&m, p, i, err)))
            break;
        di_core_stats_get(m.engine, &s);
        out->shares[i] = (double)(s.accepted_at[0] - before.accepted_at[0]) /
                         (double)DI_MAX(s.verified_at[0] - before.verified_at[0], 1);
        out->share += out->shares[i] / p->n;
        before = s;
    }
    if (!st) {
        double tested = (double)DI_MAX(s.n_tested - start.n_tested, 1);
        for (int j = 0; j < DRAFTS; j++) /* the last rounds are shorter */
            out->per_round += (double)(s.accepted_at[j] - start.accepted_at[j]) /
                              (double)DI_MAX(s.verified_at[j] - start.verified_at[j], 1);
        out->expected = (s.expected_sum - start.expected_sum) / tested;
        out->bound = (s.bound_sum - start.bound_sum) / tested;
    }
    di_cli_model_close(&m);
    return st;
}

/* Standard error of the ratio of the shares' means. */
static double ratio_error(const pieces *p, const acceptance *coupled, const acceptance *rejection) {
    double ratio = coupled->share / rejection->share, squares = 0;
    for (int i = 0; i < p->n; i++) { /* the means of these are zero */
        double off = coupled->shares[i] - ratio * rejection->shares[i];
        squares += off * off;
    }
    return sqrt(squares / ((double)p->n * (p->n - 1))) / rejection->share;
}

/* A row of one run, where it is wanted. */
static di_status one(di_bench *b, bool wants, const char *name, double value, const char *unit, double limit,
                     const char *limit_kind, di_error *err) {
    return wants ? di_bench_row(b, name, &value, 1, unit, limit, limit_kind, err) : DI_OK;
}

static di_status acceptance_rows(di_bench *b, di_error *err) {
    bool rejection = di_bench_wants(b, "acceptance_rejection"), coupled = di_bench_wants(b, "acceptance_coupled");
    bool n_rejection = di_bench_wants(b, "accepted_rejection"), n_coupled = di_bench_wants(b, "accepted_coupled");
    bool bound = di_bench_wants(b, "acceptance_bound"), error = di_bench_wants(b, "acceptance_error");
    if (!(rejection || coupled || n_rejection || n_coupled || bound || error))
        return DI_OK;
    struct {
        pieces pieces;
        acceptance r, c;
    } *a = calloc(1, sizeof *a);
    if (!a)
        return di_fail(err, DI_ERR_MEMORY, "pieces of %d stories", (int)STORIES);
    acceptance *r = &a->r, *c = &a->c;
    di_status st = measure_acceptance(b, "rejection", &a->pieces, r, err);
    if (!st && (coupled || n_coupled || error))
        st = measure_acceptance(b, "coupled", &a->pieces, c, err);
    if (!st)
        st = one(b, rejection, "acceptance_rejection", r->share, "fraction", 0, NULL, err);
    if (!st)
        st = one(b, coupled, "acceptance_coupled", c->share, "fraction", r->share, "rejection", err);
    if (!st)
        st = one(b, n_rejection, "accepted_rejection", r->per_round, "tokens", 0, NULL, err);
    if (!st)
        st = one(b, n_coupled, "accepted_coupled", c->per_round, "tokens", r->per_round, "rejection", err);
    if (!st)
        st = one(b, bound, "acceptance_bound", r->bound, "fraction", r->expected, "expected", err);
    if (!st)
        st = one(b, error, "acceptance_error", ratio_error(&a->pieces, c, r), "ratio", 0, NULL, err);
    free(a);
    return st;
}

/* ---- choosing lengths ---------------------------------------------------------------------------------------------
 */

enum { PLAN_SEQS = 256, PLANS = 64, PLAN_TURNS = 8 };

typedef struct planning {
    di_spec_cost cost;
    di_spec_seq seqs[PLAN_SEQS];
    float confidence[PLANS][PLAN_SEQS][DRAFTS];
    int32_t n_verify[PLAN_SEQS];
    max_align_t scratch[];
} planning;

/* Steps of a machine on which some drafts pay and others don't, and confidences of all kinds. */
static void make_planning(planning *p) {
    di_spec_experts experts = {.n_layers = 40, .n_experts = 256, .n_chosen = 6}, draft_experts = {3, 64, 4};
    di_spec_cost_init(&p->cost, &experts, &draft_experts, DRAFTS, 4096);
    for (int run = 0; run < 4; run++) {
        for (int64_t n = 1; n <= 1024; n *= 2) {
            double ns =
                2e6 + 2e4 * (double)n + 500 * di_spec_experts_touched(&experts, (double)n) + 5 * 1000.0 * (double)n;
            di_spec_cost_learn_step(&p->cost, n, 1000 * n, (int64_t)ns);
            di_spec_cost_learn_draft(&p->cost, (int32_t)n, (int64_t)(3e5 + 1e4 * (double)n));
        }
    }
    uint64_t at = 0;
    for (int k = 0; k < PLANS; k++)
        for (int i = 0; i < PLAN_SEQS; i++)
            for (int j = 0; j < DRAFTS; j++)
                p->confidence[k][i][j] = (float)((double)(di_mix64(at++) >> 40) * 0x1p-24);
    for (int i = 0; i < PLAN_SEQS; i++)
        p->seqs[i] = (di_spec_seq){
            .n_drafts = DRAFTS, .may_speculate = true, .n_context = (int64_t)(di_mix64((uint64_t)i) % 2000)};
}

/* Microseconds a plan, the median. Each is made for other confidences, from the rate of the one before, as the engine
 * does. */
static di_status time_plans(planning *p, double *us, di_error *err) {
    int64_t n_drafts = 0;
    double times[PLANS * PLAN_TURNS];
    double rate = 0;
    for (int k = 0; k < PLANS * PLAN_TURNS; k++) {
        di_spec_plan plan;
        for (int i = 0; i < PLAN_SEQS; i++)
            p->seqs[i].confidence = p->confidence[k % PLANS][i];
        di_spec_ask ask = {.policy = DI_SPEC_COST,
                           .n_seqs = PLAN_SEQS,
                           .seqs = p->seqs,
                           .n_drafts = DRAFTS,
                           .rows_max = PLAN_SEQS * (1 + DRAFTS),
                           .cost = &p->cost,
                           .always_ns = di_spec_cost_draft_ns(&p->cost, PLAN_SEQS),
                           .gain_min = 0.01,
                           .rate_hint = rate,
                           .scratch = p->scratch};
        int64_t start_ns = di_clock_ns();
        di_spec_plan_make(&ask, p->n_verify, &plan);
        times[k] = (double)(di_clock_ns() - start_ns) * 1e-3;
        rate = plan.ns > 0 ? plan.tokens / plan.ns : 0;
        n_drafts += plan.n_drafts;
    }
    *us = di_bench_median(times, PLANS * PLAN_TURNS);
    if (n_drafts == 0 || n_drafts == (int64_t)PLANS * PLAN_TURNS * PLAN_SEQS * DRAFTS)
        return di_fail(err, DI_ERR_INTERNAL, "plan_256: nothing was chosen among %lld drafts", (long long)n_drafts);
    return DI_OK;
}

static di_status plan_row(di_bench *b, di_error *err) {
    planning *p = calloc(1, sizeof *p + di_spec_scratch_bytes(PLAN_SEQS, DRAFTS));
    if (!p)
        return di_fail(err, DI_ERR_MEMORY, "plans for %d sequences", (int)PLAN_SEQS);
    make_planning(p);
    double runs[DI_BENCH_RUNS];
    di_status st = DI_OK;
    for (int r = -1; r < DI_BENCH_RUNS && !st; r++)
        st = time_plans(p, &runs[DI_MAX(r, 0)], err);
    free(p);
    return st ? st : di_bench_row(b, "plan_256", runs, DI_BENCH_RUNS, "us", 15, "most_allowed", err);
}

di_status di_bench_speculative(di_bench *b, di_error *err) {
    di_status st = di_bench_wants(b, "plan_256") ? plan_row(b, err) : DI_OK;
    if (!st && di_bench_wants(b, "accepted_length"))
        st = length_row(b, err);
    if (!st)
        st = acceptance_rows(b, err);
    return st ? st : di_bench_draft_sizes(b, err);
}
