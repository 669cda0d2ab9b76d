/* The arithmetic of a load: times of arrival, percentiles, what its samples come to (bench_load.h).
 *
 * Time per token is the mean over an answer, from its first to its last text, so that tokens that come together count
 * as the reader has them; gaps are what the reader sees of single steps. A request is good when its first token and its
 * mean time per token are both within their limits; those that were refused or failed are not. */
#include <math.h>

#include "bench_load.h"

double di_bench_load_interval(uint64_t seed, int64_t i) {
    uint64_t z = di_mix64(seed * 0x9E3779B97F4A7C15u + di_mix64((uint64_t)i + 1));
    double u = ((double)(z >> 12) + 0.5) * 0x1p-52; /* above 0, below 1 */
    return -log(u);
}

double di_bench_load_quantile(const double *sorted, int64_t n, double q) {
    if (n == 0)
        return NAN;
    double at = q * (double)(n - 1), below = floor(at);
    int64_t i = (int64_t)below;
    if (i + 1 >= n)
        return sorted[n - 1];
    return sorted[i] + (at - below) * (sorted[i + 1] - sorted[i]);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void di_bench_load_spread_of(double *values, int64_t n, di_bench_load_spread *out) {
    static const double parts[DI_LOAD_QUANTILES] = {0.5, 0.9, 0.99};
    *out = (di_bench_load_spread){.n = n, .mean = NAN};
    if (n > 0) {
        double sum = 0;
        qsort(values, (size_t)n, sizeof *values, compare);
        for (int64_t i = 0; i < n; i++)
            sum += values[i];
        out->mean = sum / (double)n;
    }
    for (int k = 0; k < DI_LOAD_QUANTILES; k++)
        out->at[k] = di_bench_load_quantile(values, n, parts[k]);
}

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

di_status di_bench_load_gaps_of(const di_bench_load *load, int64_t from_ns, int64_t to_ns, di_bench_load_spread *out,
                                di_error *err) {
    double *values = malloc((size_t)DI_MAX(load->n_gaps, 1) * sizeof *values);
    int64_t n = 0;
    if (!values)
        return di_fail(err, DI_ERR_MEMORY, "%lld times", (long long)load->n_gaps);
    for (int64_t i = 0; i < load->n_gaps; i++) {
        const di_bench_load_gap *g = &load->gaps[i];
        if (g->end_ns <= to_ns && (double)g->end_ns - g->seconds * 1e9 >= (double)from_ns)
            values[n++] = g->seconds;
    }
    di_bench_load_spread_of(values, n, out);
    free(values);
    return DI_OK;
}

di_status di_bench_load_figures_of(const di_bench_load *load, double ttft_limit, double tpot_limit,
                                   di_bench_load_figures *out, di_error *err) {
    size_t n = (size_t)DI_MAX(load->n_samples, 1);
    double *firsts = malloc(3 * n * sizeof *firsts);
    if (!firsts)
        return di_fail(err, DI_ERR_MEMORY, "times of %lld requests", (long long)load->n_samples);
    double *means = firsts + n, *totals = means + n;
    int64_t n_first = 0, n_mean = 0;
    *out = (di_bench_load_figures){0};
    for (int64_t i = 0; i < load->n_samples; i++) {
        const di_bench_load_sample *s = &load->samples[i];
        if (s->outcome != DI_LOAD_OK)
            continue;
        double first = seconds(s->first_ns - s->due_ns), mean = 0;
        out->n_ok++;
        out->prompt_tokens += (double)s->prompt_tokens;
        out->output_tokens += (double)s->output_tokens;
        if (s->n_chunks == 0)
            continue; /* it ended without a text: no time to speak of, and not good */
        firsts[n_first] = first;
        totals[n_first++] = seconds(s->last_ns - s->due_ns);
        if (s->output_tokens > 1) {
            mean = seconds(s->last_ns - s->first_ns) / (double)(s->output_tokens - 1);
            means[n_mean++] = mean;
        }
        out->n_good += first <= ttft_limit && mean <= tpot_limit;
    }
    di_bench_load_spread_of(firsts, n_first, &out->ttft);
    di_bench_load_spread_of(totals, n_first, &out->total);
    di_bench_load_spread_of(means, n_mean, &out->tpot);
    free(firsts);
    di_status st = di_bench_load_gaps_of(load, 0, INT64_MAX, &out->gap, err);
    double wall = seconds(DI_MAX(load->wall_ns, 1));
    out->tokens_per_s = out->output_tokens / wall;
    out->requests_per_s = (double)out->n_ok / wall;
    out->good_per_s = (double)out->n_good / wall;
    return st;
}

void di_bench_load_deinit(di_bench_load *load) {
    free(load->samples);
    free(load->gaps);
    *load = (di_bench_load){0};
}
