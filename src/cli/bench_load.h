/* A load on a server of the OpenAI API, and what its clients see of it.
 *
 * Open loop: requests come at random, as many a second as asked, whether earlier ones are done or not. Closed loop: N
 * clients, each of which sends its next request when its last one is answered. One thread drives all connections, by
 * libcurl's socket interface over epoll.
 *
 * Times of a request count from the moment that it was due, not from when the generator came to send it: a client that
 * falls behind must not make the server look faster. What is read in one turn of the loop came at one time. Private to
 * cli/; bench_load.c has the connections, bench_load_figures.c the arithmetic, without libcurl. */
#ifndef DI_CLI_BENCH_LOAD_H
#define DI_CLI_BENCH_LOAD_H

#include "base/base.h"

/* ---- what is asked ---- */

typedef struct di_bench_load_plan {
    const char *url;  /* scheme, host and port, without a slash behind; borrowed, like all texts here */
    const char *path; /* of the route */
    const char *key;  /* sent as bearer; NULL: none */
    double rate;      /* requests a second, open loop; 0: closed loop of n_clients */
    int n_clients;
    int64_t n_requests; /* in all; 0: as many as begin within duration_s */
    double duration_s;  /* nothing begins later; 0: no such end */
    uint64_t seed;      /* of the times of arrival */
    /* Appends the body of request i, whose answer must be a stream. */
    di_status (*body)(void *user, int64_t i, di_strbuf *out, di_error *err);
    void *user;
} di_bench_load_plan;

/* ---- what is seen ---- */

typedef enum di_bench_load_outcome {
    DI_LOAD_OK,
    DI_LOAD_REFUSED, /* 429 or 503: the server has said that it is busy */
    DI_LOAD_FAILED   /* anything else, a stream without its end included */
} di_bench_load_outcome;

typedef struct di_bench_load_sample {
    di_bench_load_outcome outcome;
    int http;                             /* status; 0: there was no answer */
    int64_t due_ns, first_ns, last_ns;    /* since the start; first and last text; 0: there was none */
    int64_t prompt_tokens, output_tokens; /* by the usage, else 0 and the number of chunks with text */
    int64_t n_chunks;                     /* with text */
} di_bench_load_sample;

/* A time in which a stream brought nothing, from one text to the next. */
typedef struct di_bench_load_gap {
    int64_t end_ns; /* since the start */
    double seconds;
} di_bench_load_gap;

typedef struct di_bench_load {
    di_bench_load_sample *samples; /* owned [n_samples], in the order in which they were due */
    int64_t n_samples, samples_cap;
    di_bench_load_gap *gaps; /* owned [n_gaps], in the order of their ends */
    int64_t n_gaps, gaps_cap;
    int64_t n_refused, n_failed;
    int64_t wall_ns;      /* from the start to the end of the last answer */
    int64_t late_max_ns;  /* the longest that a request was sent after it was due */
    di_error first_error; /* of the first that failed */
} di_bench_load;

/* Once in a process, before anything of what follows, and after it. DI_ERR_MEMORY. */
di_status di_bench_load_start(di_error *err);
void di_bench_load_stop(void);

/* Runs the whole plan. Requests that fail are counted; the status is of the generator itself: DI_ERR_MEMORY, DI_ERR_IO,
 * DI_ERR_ARG, what the body says. Needs a deinit on error too. */
di_status di_bench_load_run(const di_bench_load_plan *plan, di_bench_load *out, di_error *err);
void di_bench_load_deinit(di_bench_load *load); /* zeroes it; zeroed storage is valid */

/* The body of a GET, appended, and its status. DI_ERR_IO where there is no answer. */
di_status di_bench_load_get(const char *url, const char *path, const char *key, di_strbuf *body, int *http,
                            di_error *err);

/* ---- arithmetic ---- */

/* Time from arrival i to arrival i + 1 of a Poisson process with one arrival a second on average: seconds, the same for
 * the same seed everywhere. */
double di_bench_load_interval(uint64_t seed, int64_t i);

/* The q-th part (0 to 1) of n sorted values, between two of them in proportion, as numpy's default; NaN for none. */
double di_bench_load_quantile(const double *sorted, int64_t n, double q);

enum { DI_LOAD_P50, DI_LOAD_P90, DI_LOAD_P99, DI_LOAD_QUANTILES };

typedef struct di_bench_load_spread {
    int64_t n;
    double mean, at[DI_LOAD_QUANTILES]; /* NaN for none */
} di_bench_load_spread;

/* Sorts the values. */
void di_bench_load_spread_of(double *values, int64_t n, di_bench_load_spread *out);

/* Seconds, of the requests that were answered. */
typedef struct di_bench_load_figures {
    int64_t n_ok, n_good;            /* good: within both limits */
    di_bench_load_spread ttft, tpot; /* first token; each further one on average over an answer (2 tokens and more) */
    di_bench_load_spread gap, total; /* between texts of a stream; to the last text */
    double prompt_tokens, output_tokens;
    double tokens_per_s, requests_per_s, good_per_s; /* over the whole time */
} di_bench_load_figures;

/* Of the gaps that lie between two times since the start. DI_ERR_MEMORY. */
di_status di_bench_load_gaps_of(const di_bench_load *load, int64_t from_ns, int64_t to_ns, di_bench_load_spread *out,
                                di_error *err);

/* ttft_limit, tpot_limit: seconds within which a request is good. DI_ERR_MEMORY. */
di_status di_bench_load_figures_of(const di_bench_load *load, double ttft_limit, double tpot_limit,
                                   di_bench_load_figures *out, di_error *err);

#endif
