/* What the rows of bench speculative share: the beginnings of stories as requests, engines that differ in their drafts
 * alone. Private to cli/. */
#ifndef DI_CLI_BENCH_SPECULATIVE_H
#define DI_CLI_BENCH_SPECULATIVE_H

#include "bench_model.h"

enum { DI_BENCH_STORIES = 8 };

/* How an engine drafts. */
typedef struct di_bench_drafting {
    const char *policy; /* --draft-policy */
    const char *accept; /* --accept */
    int64_t n_drafts;   /* 0: none */
} di_bench_drafting;

/* Opens the model of --model for n_seqs sequences, without a prefix cache. DI_ERR_ARG where drafts are wanted and the
 * model makes none, or not so many. */
di_status di_bench_drafts_open(di_bench *b, di_cli_model *m, const di_bench_drafting *drafting, int32_t n_seqs,
                               di_error *err);

/* Request `which`: the beginning which mod DI_BENCH_STORIES continued by n_tokens, end marks ignored, with `which` as
 * its seed; w follows it. */
di_status di_bench_story(di_cli_model *m, int which, double temperature, int64_t n_tokens, di_bench_watch *w,
                         di_error *err);

/* The rows over batch sizes. */
di_status di_bench_draft_sizes(di_bench *b, di_error *err);

#endif
