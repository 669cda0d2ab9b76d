/* `deepinfer bench WHAT`: speed beside this machine's limits, measured in the same run.
 *
 * A table on standard output, or with --json one object a line. This file has the list of benches, the rows and the
 * read bandwidth; what is measured is in bench_*.c. */
#include "bench.h"

typedef struct bench_entry {
    const char *name;
    di_status (*run)(di_bench *b, di_error *err);
} bench_entry;

static const bench_entry benches[] = {
    {"kernels", di_bench_kernels}, {"prefill", di_bench_prefill},     {"decode", di_bench_decode},
    {"batch", di_bench_batch},     {"scheduler", di_bench_scheduler}, {"speculative", di_bench_speculative},
    {"grammar", di_bench_grammar}, {"tokenizer", di_bench_tokenizer}, {"serve", di_bench_serve},
};

bool di_bench_wants(di_bench *b, const char *name) {
    const di_string_list *args = &b->opt->args; /* WHAT, then names of rows */
    bool is_wanted = args->n < 2;
    for (size_t i = 1; i < args->n; i++) {
        size_t len = strlen(args->items[i]);
        if (len > 0 && strncmp(name, args->items[i], len) == 0 && (name[len] == '\0' || name[len] == '_')) {
            b->selectors_used |= (uint64_t)1 << i;
            is_wanted = true;
        }
    }
    return is_wanted;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double di_bench_median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

di_status di_bench_row(di_bench *b, const char *name, double *runs, int n, const char *unit, double limit,
                       const char *limit_kind, di_error *err) {
    di_strbuf out = {0};
    double value = di_bench_median(runs, n);
    double spread = value == 0 ? 0 : (runs[n - 1] - runs[0]) / (value < 0 ? -value : value); /* a loss may be a gain */
    if (b->opt->json) {
        di_strbuf_printf(&out, "{\"bench\":\"%s\",\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\",", b->what, name,
                         value, unit);
        if (limit > 0)
            di_strbuf_printf(&out, "\"limit\":%.6g,\"limit_kind\":\"%s\",\"ratio\":%.4g,", limit, limit_kind,
                             value / limit);
        di_strbuf_printf(&out, "\"runs\":%d,\"spread\":%.3g}\n", n, spread);
    } else {
        if (b->n_rows == 0)
            di_strbuf_printf(&out, "%-10s %-20s %12s %-9s %12s %7s %5s %7s\n", "bench", "name", "value", "unit",
                             "limit", "ratio", "runs", "spread");
        di_strbuf_printf(&out, "%-10s %-20s %12.5g %-9s ", b->what, name, value, unit);
        if (limit > 0)
            di_strbuf_printf(&out, "%12.5g %7.3f %5d %6.1f%%  of %s\n", limit, value / limit, n, 100 * spread,
                             limit_kind);
        else
            di_strbuf_printf(&out, "%12s %7s %5d %6.1f%%\n", "-", "-", n, 100 * spread);
    }
    b->n_rows++;
    di_status st = di_strbuf_status(&out, err);
    if (!st)
        st = di_cli_print(out.data, out.len, err);
    if (!st)
        st = di_cli_flush(err);
    di_strbuf_deinit(&out);
    return st;
}

/* ---- read bandwidth ---- */

enum { PIECE_WORDS = 1 << 17 }; /* 1 MiB a part */

typedef struct read_job {
    const uint64_t *words;
    uint64_t *sums; /* [n_parts] */
} read_job;

static void read_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const read_job *job = ctx;
    const uint64_t *w = job->words + part * PIECE_WORDS;
    uint64_t s[8] = {0};
    for (int64_t i = 0; i < PIECE_WORDS; i += 8)
        for (int k = 0; k < 8; k++)
            s[k] ^= w[i + k];
    job->sums[part] = s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

static void fill_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    uint64_t *w = (uint64_t *)ctx + part * PIECE_WORDS;
    for (int64_t i = 0; i < PIECE_WORDS; i++)
        w[i] = di_mix64((uint64_t)(part * PIECE_WORDS + i));
}

/* Of the host's memory. */
static di_status measure_bandwidth(di_bench *b, double *out, di_error *err) {
    enum { PARTS = 1024 }; /* 1 GiB */
    size_t n_bytes = (size_t)PARTS * PIECE_WORDS * 8;
    uint64_t *words = aligned_alloc(4096, n_bytes), sums[PARTS];
    if (!words)
        return di_fail(err, DI_ERR_MEMORY, "the read bandwidth needs %zu bytes", n_bytes);
    di_pool_run(b->pool, fill_part, words, PARTS);
    read_job job = {words, sums};
    double best = 0;
    for (int i = 0; i < DI_BENCH_RUNS; i++) { /* the best: a limit, not a typical value */
        int64_t start_ns = di_clock_ns();
        di_pool_run(b->pool, read_part, &job, PARTS);
        best = DI_MAX(best, (double)n_bytes / ((double)(di_clock_ns() - start_ns) * 1e-9));
    }
    uint64_t all = 0;
    for (int i = 0; i < PARTS; i++)
        all ^= sums[i];
    free(words);
    *out = best;
    return all ? DI_OK : di_fail(err, DI_ERR_INTERNAL, "the read bandwidth: the buffer was not read");
}

di_status di_bench_limits(di_bench *b, const di_device_ops *ops, di_device *device, double *bandwidth, double *peak,
                          di_error *err) {
    di_status st = DI_OK;
    if (!(b->peak > 0))
        st = ops->measure(device, &b->peak, &b->read_bandwidth, err);
    if (!st && !(b->read_bandwidth > 0))
        st = measure_bandwidth(b, &b->read_bandwidth, err);
    *bandwidth = b->read_bandwidth;
    *peak = b->peak;
    return st;
}

int di_cmd_bench(const di_options *opt) {
    di_bench b = {.opt = opt};
    di_error err = {0};
    const char *what = opt->args.n ? opt->args.items[0] : NULL, *names[DI_COUNT(benches)];
    bool is_known = !what;
    di_status st;
    for (size_t i = 0; i < DI_COUNT(benches); i++) {
        names[i] = benches[i].name;
        is_known = is_known || strcmp(what, names[i]) == 0;
    }
    if (!is_known) {
        di_strbuf list = {0};
        for (size_t i = 0; i < DI_COUNT(benches); i++)
            di_strbuf_printf(&list, "%s%s", i ? ", " : "", names[i]);
        const char *near = di_nearest_name(what, names, DI_COUNT(names));
        di_fail(&err, DI_ERR_ARG, "bench '%s', expected %s%s%s%s", what, di_strbuf_str(&list),
                near ? " (did you mean '" : "", near ? near : "", near ? "'?)" : "");
        di_strbuf_deinit(&list);
        return di_cli_fail(&err);
    }
    st = di_cli_trace_open(&b.trace, opt, &err);
    if (!st)
        st = di_pool_create(&b.pool, (int)opt->threads, NULL, &err);
    for (size_t i = 0; i < DI_COUNT(benches) && !st; i++) {
        if (what && strcmp(what, benches[i].name) != 0)
            continue;
        b.what = benches[i].name;
        st = di_error_context(&err, benches[i].run(&b, &err), "bench %s", b.what);
    }
    for (size_t i = 1; i < opt->args.n && !st; i++) {
        if (!(b.selectors_used >> i & 1))
            st = di_fail(&err, DI_ERR_ARG, "bench %s: '%s' is no row nor the first words of one", b.what,
                         opt->args.items[i]);
    }
    di_pool_destroy(b.pool);
    di_cli_trace_close(b.trace);
    return st ? di_cli_fail(&err) : 0;
}
