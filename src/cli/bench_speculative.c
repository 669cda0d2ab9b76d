/* bench speculative: what drafts bring, on the model of --model and the beginnings of stories, greedy.
 *
 *   accepted_length  tokens of a verification, the one that needs no draft included, when every draft is verified
 *   speedup_b1       one request: throughput with drafts by cost, over that without
 *   worst_loss       the largest share of throughput that drafts by cost take, over batches of 1, 4 and 16; below zero
 *                    they bring something everywhere
 *
 * Engines with and without drafts run in turn, with the same requests, and their answers are compared. */
#include "bench_model.h"

enum { BATCHES = 3, BATCH_MAX = 16 };

static const int batches[BATCHES] = {1, 4, BATCH_MAX};

static const char *const beginnings[] = {
    "Once upon a time, there was a little girl named Lily. She",
    "One day, a boy found a red ball in the park. He",
    "The sun was shining and the birds were singing. Tom",
    "Mia wanted to bake a cake with her mom. They",
    "There was a big tree in the garden where the cat",
    "Ben and Sam went to the beach to play. Ben",
    "A little dog named Spot liked to run. One day",
    "The children were sad because the rain",
};

static di_status submit(di_cli_model *m, int which, di_bench_watch *w, di_error *err) {
    const char *text = beginnings[which % (int)DI_COUNT(beginnings)];
    di_ids ids = {0};
    di_status st = di_tokenizer_encode(m->loaded.tok, text, strlen(text), false, &ids, err);
    if (!st)
        st = di_bench_submit(m, ids.data, (int64_t)ids.len, DI_BENCH_ANSWER, NULL, w, err);
    di_ids_deinit(&ids);
    return st;
}

/* Tokens per second of as many requests as there are beginnings or more, n at once. */
static di_status run(di_cli_model *m, int n, di_bench_watch watches[BATCH_MAX], double *rate, di_error *err) {
    int total = DI_MAX(n, (int)DI_COUNT(beginnings));
    int64_t start_ns = di_clock_ns();
    for (int at = 0; at < total; at += n) {
        for (int i = at; i < DI_MIN(at + n, total); i++) {
            di_status st = submit(m, i, &watches[i], err);
            if (st)
                return st;
        }
        di_status st = di_bench_finish(m, watches + at, DI_MIN(at + n, total) - at, err);
        if (st)
            return st;
    }
    *rate = total * DI_BENCH_ANSWER / ((double)(di_clock_ns() - start_ns) * 1e-9);
    return DI_OK;
}

/* Throughput with over without drafts for n requests at once. */
static di_status ratio_of(di_cli_model *with, di_cli_model *without, int n, int turn, double *ratio, di_error *err) {
    di_bench_watch a[BATCH_MAX], b[BATCH_MAX];
    double rate_with = 1, rate_without = 1;
    di_status st = turn % 2 ? run(with, n, a, &rate_with, err) : run(without, n, b, &rate_without, err);
    if (!st)
        st = turn % 2 ? run(without, n, b, &rate_without, err) : run(with, n, a, &rate_with, err);
    for (int i = 0; i < DI_MAX(n, (int)DI_COUNT(beginnings)) && !st; i++) {
        if (memcmp(a[i].tokens, b[i].tokens, sizeof a[i].tokens) != 0)
            st = di_fail(err, DI_ERR_INTERNAL, "request %d has other tokens with drafts than without", i);
    }
    *ratio = rate_with / rate_without;
    return st;
}

static di_status open_with(di_bench *b, di_cli_model *m, int64_t draft_tokens, const char *policy, di_error *err) {
    di_options opt = *b->opt;
    di_bench copy = *b;
    opt.draft_policy = policy;
    opt.no_prefix_cache = true;
    copy.opt = &opt;
    return di_bench_model_open(&copy, m, DI_BENCH_PREFILL, BATCH_MAX, draft_tokens, err);
}

static di_status length_row(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    di_bench_watch w[BATCH_MAX];
    double runs[1] = {0}, rate;
    di_status st = open_with(b, &m, b->opt->draft_tokens, "fixed", err);
    if (!st && m.loaded.plan.engine.draft_tokens == 0)
        st = di_fail(err, DI_ERR_ARG, "the model has no draft module");
    if (!st)
        st = run(&m, 1, w, &rate, err);
    if (!st) {
        di_core_stats s;
        di_core_stats_get(m.engine, &s);
        runs[0] = s.n_draft_rounds ? 1 + (double)s.accepted_tokens / (double)s.n_draft_rounds : 1;
        st = di_bench_row(b, "accepted_length", runs, 1, "tokens", 0, NULL, err);
    }
    di_cli_model_close(&m);
    return st;
}

static di_status speed_rows(di_bench *b, bool wants_speedup, bool wants_loss, di_error *err) {
    di_cli_model with = {0}, without = {0};
    double ratios[BATCHES][DI_BENCH_RUNS] = {{0}}, losses[DI_BENCH_RUNS], ratio = 1;
    int n_batches = wants_loss ? BATCHES : 1;
    di_status st = open_with(b, &with, b->opt->draft_tokens, "cost", err);
    if (!st)
        st = open_with(b, &without, 0, "cost", err);
    for (int r = -1; r < DI_BENCH_RUNS && !st; r++) {
        for (int i = 0; i < n_batches && !st; i++) {
            st = ratio_of(&with, &without, batches[i], r + 1, &ratio, err);
            ratios[i][DI_MAX(r, 0)] = ratio;
        }
    }
    int worst = 0;
    for (int i = 1; i < n_batches && !st; i++)
        worst = di_bench_median(ratios[i], DI_BENCH_RUNS) < di_bench_median(ratios[worst], DI_BENCH_RUNS) ? i : worst;
    for (int r = 0; r < DI_BENCH_RUNS; r++)
        losses[r] = 1 - ratios[worst][r];
    if (!st && wants_speedup)
        st = di_bench_row(b, "speedup_b1", ratios[0], DI_BENCH_RUNS, "ratio", 0, NULL, err);
    if (!st && wants_loss)
        st = di_bench_row(b, "worst_loss", losses, DI_BENCH_RUNS, "fraction", 0, NULL, err);
    di_cli_model_close(&without);
    di_cli_model_close(&with);
    return st;
}

di_status di_bench_speculative(di_bench *b, di_error *err) {
    bool wants_length = di_bench_wants(b, "accepted_length"), wants_speedup = di_bench_wants(b, "speedup_b1");
    bool wants_loss = di_bench_wants(b, "worst_loss");
    di_status st = wants_length ? length_row(b, err) : DI_OK;
    if (!st && (wants_speedup || wants_loss))
        st = speed_rows(b, wants_speedup, wants_loss, err);
    return st ? di_error_context(err, st, "bench speculative") : DI_OK;
}
