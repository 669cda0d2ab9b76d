/* Runs of the whole model that several benches time: a prompt up to its first token, a batch's decoding.
 *
 * Owns the way a bench drives the engine: made-up prompts, greedy, end marks ignored. Leaves rows and limits to the
 * benches. Private to cli/. */
#ifndef DI_CLI_BENCH_MODEL_H
#define DI_CLI_BENCH_MODEL_H

#include "bench.h"

enum { DI_BENCH_PREFILL = 512, DI_BENCH_DECODE = 64, DI_BENCH_BATCH = 16 };

/* Opens the model of the command line for steps of so many tokens and sequences, where its options don't say; with
 * draft_tokens 0 a token takes a row, as the limits have it. */
di_status di_bench_model_open(di_bench *b, di_cli_model *m, int64_t batch_tokens, int32_t seqs, int64_t draft_tokens,
                              di_error *err);

/* One prompt of n tokens: tokens per second up to its first token. Another seed is another prompt. */
di_status di_bench_prefill_run(di_cli_model *m, int64_t n, uint64_t seed, double *rate, di_error *err);

/* n_seqs <= DI_BENCH_BATCH sequences of n_tokens: tokens per second of the steps after all have their first token. */
di_status di_bench_decode_run(di_cli_model *m, int n_seqs, int64_t n_tokens, uint64_t seed, double *rate,
                              di_error *err);

/* The most tokens a second for a step of n_rows rows at pos_mean on average, n_logits of them through the head: by
 * bytes or by operations. */
di_status di_bench_step_limit(di_bench *b, const di_cli_model *m, int64_t n_rows, double pos_mean, int64_t n_logits,
                              double *limit, const char **kind, di_error *err);

/* The rows of bench batch for many requests at once. */
di_status di_bench_arrivals(di_bench *b, di_error *err);

#endif
