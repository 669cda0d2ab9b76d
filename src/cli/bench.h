/* What the benches share: rows with their limit, repeated timing, the machine's own limits.
 *
 * A row gives a figure, the limit that this machine sets, measured in the same run, and their ratio. The figure is the
 * median of the runs; spread is (largest - smallest) / median. Private to cli/. */
#ifndef DI_CLI_BENCH_H
#define DI_CLI_BENCH_H

#include "cli_model.h"

enum { DI_BENCH_RUNS = 7 };

typedef struct di_bench {
    const di_options *opt;
    const char *what;      /* bench that runs now; owned by nobody */
    di_pool *pool;         /* owned; for the machine's limits */
    di_trace *trace;       /* owned; of all models; NULL: none */
    double read_bandwidth; /* bytes per second; 0 = not measured yet */
    double peak;           /* bf16 operations per second; 0 = not measured yet */
    int n_rows;
    uint64_t selectors_used; /* bit i: argument i names a row that this machine can measure */
} di_bench;

/* Whether the command line asks for a row: every row where it names none. A bench asks for all rows of its own before
 * it loads what they need. */
bool di_bench_wants(di_bench *b, const char *name);

/* The median of n values, which are sorted. */
double di_bench_median(double *values, int n);

/* Adds one row: runs [n] are the measured values; limit 0 means that there is none to name. */
di_status di_bench_row(di_bench *b, const char *name, double *runs, int n, const char *unit, double limit,
                       const char *limit_kind, di_error *err);

/* What limits a device: bytes per second that it reads from memory (its own; else all threads together from the host's,
 * a buffer several times the last-level cache), and operations per second of bf16 products, by its own probe. Measured
 * once. */
di_status di_bench_limits(di_bench *b, const di_device_ops *ops, di_device *device, double *bandwidth, double *peak,
                          di_error *err);

/* The benches: kernels, model (prefill, decode), batch, scheduler, speculative, grammar, tokenizer and serve. */
di_status di_bench_kernels(di_bench *b, di_error *err);
di_status di_bench_prefill(di_bench *b, di_error *err);
di_status di_bench_decode(di_bench *b, di_error *err);
di_status di_bench_batch(di_bench *b, di_error *err);
di_status di_bench_scheduler(di_bench *b, di_error *err);
di_status di_bench_speculative(di_bench *b, di_error *err);
di_status di_bench_grammar(di_bench *b, di_error *err);
di_status di_bench_tokenizer(di_bench *b, di_error *err);
di_status di_bench_serve(di_bench *b, di_error *err);
/* The rows of bench grammar that run the model. */
di_status di_bench_grammar_engine(di_bench *b, di_error *err);

#endif
