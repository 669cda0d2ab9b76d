/* Runs of the whole model that several benches time: a prompt up to its first token, a batch's decoding.
 *
 * Owns the way a bench drives the engine: made-up prompts, greedy, end marks ignored. Leaves rows and limits to the
 * benches. Private to cli/. */
#ifndef DI_CLI_BENCH_MODEL_H
#define DI_CLI_BENCH_MODEL_H

#include "bench.h"

enum { DI_BENCH_PREFILL = 512, DI_BENCH_DECODE = 64, DI_BENCH_BATCH = 16, DI_BENCH_ANSWER = 96 };

/* What came of a request. */
typedef struct di_bench_watch {
    int64_t n_tokens, n_done, first_ns;
    int32_t tokens[DI_BENCH_ANSWER]; /* once it is done: the first of them */
    di_error error;
} di_bench_watch;

/* A greedy request for n_tokens, end marks ignored; w is cleared and follows it. salt NULL: none. */
di_status di_bench_submit(di_cli_model *m, const int32_t *ids, int64_t n, int64_t n_tokens, const char *salt,
                          di_bench_watch *w, di_error *err);
/* The same for any request; sets its callback and user. */
di_status di_bench_follow(di_cli_model *m, di_submission *sub, di_bench_watch *w, di_error *err);
/* Runs steps until n_there of w [n] have n_tokens. */
di_status di_bench_run_until(di_cli_model *m, const di_bench_watch *w, int n, int n_there, int64_t n_tokens,
                             di_error *err);
/* Tokens of w [n] so far. */
int64_t di_bench_tokens(const di_bench_watch *w, int n);
/* Runs until nothing is left. An error unless w [n] have all ended well. */
di_status di_bench_finish(di_cli_model *m, const di_bench_watch *w, int n, di_error *err);

/* Opens the model of the command line for steps of so many tokens and sequences, where its options don't say; with
 * draft_tokens 0 a token takes a row, as the limits have it. */
di_status di_bench_model_open(di_bench *b, di_cli_model *m, int64_t batch_tokens, int32_t seqs, int64_t draft_tokens,
                              di_error *err);

/* One prompt of n tokens: tokens per second up to its first token. Another seed is another prompt. */
di_status di_bench_prefill_run(di_cli_model *m, int64_t n, uint64_t seed, double *rate, di_error *err);

/* n_seqs <= 64 sequences of n_tokens: tokens per second of the steps after all have their first token. */
di_status di_bench_decode_run(di_cli_model *m, int n_seqs, int64_t n_tokens, uint64_t seed, double *rate,
                              di_error *err);

/* The most tokens a second for a step of n_rows rows at pos_mean on average, n_logits of them through the head: by
 * bytes or by operations. */
di_status di_bench_step_limit(di_bench *b, const di_cli_model *m, int64_t n_rows, double pos_mean, int64_t n_logits,
                              double *limit, const char **kind, di_error *err);

/* The rows of bench batch for many requests at once. */
di_status di_bench_arrivals(di_bench *b, di_error *err);

#endif
