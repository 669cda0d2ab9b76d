/* bench batch, the rows of many requests at once, on the model of --model:
 *
 *   arrivals_64    64 requests that arrive at random, against the same one after the other: ratio of throughputs. At
 *                  least 6 is wanted, or 60 % of what steps of 64 rows can reach on this machine where that is less.
 *   arrivals_rate  the same in tokens a second, prompts and answers, beside that bound
 *   engine_wait    share of a step that the threads that compute wait for the engine's own thread, 64 running
 *   prefix_hit     a prompt of 2,000 tokens that are known and 50 that are not: time to its first token against that
 *                  of the same prompt unknown; the answers are compared
 */
#include <time.h>

#include "bench_model.h"

enum { REQUESTS = 64, ANSWER = 64, PROMPT_MIN = 16, PROMPT_MAX = 192, SHARED = 2000, OWN = 50, PREFIX_ANSWER = 8 };

static int32_t random_id(const di_cli_model *m, uint64_t seed) {
    return (int32_t)(4 + di_mix64(seed) % (uint64_t)(m->loaded.config.vocab - 4));
}

/* ---- arrivals ---- */

typedef struct load {
    int32_t prompts[REQUESTS][PROMPT_MAX];
    int64_t lens[REQUESTS];
    di_bench_watch watches[REQUESTS];
    double waits; /* share of the last run */
} load;

static void make_load(const di_cli_model *m, load *l, uint64_t seed) {
    for (int i = 0; i < REQUESTS; i++) {
        uint64_t z = di_mix64(seed * 1000 + (uint64_t)i);
        l->lens[i] = PROMPT_MIN + (int64_t)(z % (PROMPT_MAX - PROMPT_MIN));
        for (int64_t k = 0; k < l->lens[i]; k++)
            l->prompts[i][k] = random_id(m, z + (uint64_t)k);
    }
}

/* Seconds for all requests, one after the other. */
static di_status one_by_one(di_cli_model *m, load *l, double *seconds, di_error *err) {
    int64_t start_ns = di_clock_ns();
    for (int i = 0; i < REQUESTS; i++) {
        di_status st = di_bench_submit(m, l->prompts[i], l->lens[i], ANSWER, "a", &l->watches[i], err);
        if (!st)
            st = di_bench_finish(m, &l->watches[i], 1, err);
        if (st)
            return st;
    }
    *seconds = (double)(di_clock_ns() - start_ns) * 1e-9;
    return DI_OK;
}

/* Seconds for all requests, which arrive at random within `span` seconds. Tokens are those of one_by_one. */
static di_status arriving(di_cli_model *m, load *l, double span, uint64_t seed, double *seconds, di_error *err) {
    di_bench_watch *alone = malloc(sizeof l->watches);
    int64_t at_ns[REQUESTS], start_ns = di_clock_ns();
    bool is_in[REQUESTS] = {false};
    int n_in = 0;
    di_status st = DI_OK;
    if (!alone)
        return di_fail(err, DI_ERR_MEMORY, "%d answers", REQUESTS);
    memcpy(alone, l->watches, sizeof l->watches);
    for (int i = 0; i < REQUESTS; i++)
        at_ns[i] = start_ns + (int64_t)((double)(di_mix64(seed + (uint64_t)i) >> 11) * 0x1p-53 * span * 1e9);
    di_core_stats before, after;
    di_core_stats_get(m->engine, &before);
    while (n_in < REQUESTS && !st) {
        int64_t now_ns = di_clock_ns();
        for (int i = 0; i < REQUESTS && !st; i++) {
            if (is_in[i] || at_ns[i] > now_ns)
                continue;
            is_in[i] = true;
            n_in++;
            st = di_bench_submit(m, l->prompts[i], l->lens[i], ANSWER, "b", &l->watches[i], err);
        }
        if (!st && !di_core_step(m->engine))
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    if (!st)
        st = di_bench_finish(m, l->watches, REQUESTS, err);
    *seconds = (double)(di_clock_ns() - start_ns) * 1e-9;
    di_core_stats_get(m->engine, &after);
    l->waits = (double)(after.wait_ns - before.wait_ns) /
               (double)(after.forward_ns - before.forward_ns + after.sample_ns - before.sample_ns);
    for (int i = 0; i < REQUESTS && !st; i++) {
        if (memcmp(alone[i].tokens, l->watches[i].tokens, sizeof alone[i].tokens) != 0)
            st = di_fail(err, DI_ERR_INTERNAL, "request %d has other tokens among others than alone", i);
    }
    free(alone);
    return st;
}

static double tokens_of(const load *l) {
    double n = 0;
    for (int i = 0; i < REQUESTS; i++)
        n += (double)l->lens[i] + ANSWER;
    return n;
}

/* Which rows are asked for. */
typedef struct wishes {
    bool ratio, rate, wait;
} wishes;

static di_status arrivals_rows(di_bench *b, di_cli_model *m, const wishes *wants, di_error *err) {
    load *l = calloc(1, sizeof *l);
    double ratios[DI_BENCH_RUNS], rates[DI_BENCH_RUNS], waits[DI_BENCH_RUNS], alone_rates[DI_BENCH_RUNS], bound;
    const char *kind;
    if (!l)
        return di_fail(err, DI_ERR_MEMORY, "%d requests", REQUESTS);
    di_status st =
        di_bench_step_limit(b, m, REQUESTS, (PROMPT_MIN + PROMPT_MAX + ANSWER) / 2.0, REQUESTS, &bound, &kind, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) { /* one run to warm up */
        double alone = 0, together = 0;
        make_load(m, l, (uint64_t)i + 2);
        st = one_by_one(m, l, &alone, err);
        if (!st)
            st = arriving(m, l, alone / 20, (uint64_t)i + 77, &together, err);
        if (st || i < 0)
            continue;
        ratios[i] = alone / together;
        rates[i] = tokens_of(l) / together;
        alone_rates[i] = tokens_of(l) / alone;
        waits[i] = l->waits;
    }
    free(l);
    if (!st && wants->ratio) {
        double most = 0.6 * bound / di_bench_median(alone_rates, DI_BENCH_RUNS);
        st = di_bench_row(b, "arrivals_64", ratios, DI_BENCH_RUNS, "ratio", DI_MIN(6, most), "least_wanted", err);
    }
    if (!st && wants->rate)
        st = di_bench_row(b, "arrivals_rate", rates, DI_BENCH_RUNS, "tokens/s", bound, kind, err);
    if (!st && wants->wait)
        st = di_bench_row(b, "engine_wait", waits, DI_BENCH_RUNS, "fraction", 0.02, "most_allowed", err);
    return st;
}

/* ---- prefix ---- */

static di_status first_token(di_cli_model *m, const int32_t *ids, const char *salt, di_bench_watch *w, double *seconds,
                             di_error *err) {
    int64_t start_ns = di_clock_ns();
    di_status st = di_bench_submit(m, ids, SHARED + OWN, PREFIX_ANSWER, salt, w, err);
    if (!st)
        st = di_bench_finish(m, w, 1, err);
    *seconds = (double)(w->first_ns - start_ns) * 1e-9;
    return st;
}

static di_status prefix_run(di_cli_model *m, uint64_t seed, double *ratio, di_error *err) {
    int32_t ids[SHARED + OWN];
    char salt[2][32];
    di_bench_watch warm, cold;
    double warm_s = 0, cold_s = 1;
    snprintf(salt[0], sizeof salt[0], "%llu", (unsigned long long)seed);
    snprintf(salt[1], sizeof salt[1], "%llu again", (unsigned long long)seed);
    for (int i = 0; i < SHARED + OWN; i++)
        ids[i] = random_id(m, seed * 100000 + (uint64_t)i);
    di_status st = first_token(m, ids, salt[0], &cold, &cold_s, err);
    for (int i = SHARED; i < SHARED + OWN; i++)
        ids[i] = random_id(m, seed * 100000 + 50000 + (uint64_t)i);
    if (!st)
        st = first_token(m, ids, salt[0], &warm, &warm_s, err);
    if (!st)
        st = first_token(m, ids, salt[1], &cold, &cold_s, err);
    if (!st && memcmp(warm.tokens, cold.tokens, PREFIX_ANSWER * sizeof *warm.tokens) != 0)
        st = di_fail(err, DI_ERR_INTERNAL, "a known prefix gives other tokens than an unknown one");
    *ratio = warm_s / cold_s;
    return st;
}

static di_status prefix_row(di_bench *b, di_error *err) {
    di_cli_model m = {0};
    double runs[DI_BENCH_RUNS] = {0}, ratio;
    di_status st = di_bench_model_open(b, &m, 512, DI_BENCH_BATCH, 0, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        st = prefix_run(&m, (uint64_t)i + 2, &ratio, err);
        runs[DI_MAX(i, 0)] = ratio;
    }
    if (!st)
        st = di_bench_row(b, "prefix_hit", runs, DI_BENCH_RUNS, "ratio", 0.1, "most_allowed", err);
    di_cli_model_close(&m);
    return st;
}

di_status di_bench_arrivals(di_bench *b, di_error *err) {
    wishes wants = {di_bench_wants(b, "arrivals_64"), di_bench_wants(b, "arrivals_rate"),
                    di_bench_wants(b, "engine_wait")};
    bool wants_prefix = di_bench_wants(b, "prefix_hit");
    di_status st = DI_OK;
    if (wants.ratio || wants.rate || wants.wait) {
        di_cli_model m = {0};
        st = di_bench_model_open(b, &m, 512, REQUESTS, 0, err);
        if (!st)
            st = arrivals_rows(b, &m, &wants, err);
        di_cli_model_close(&m);
    }
    if (!st && wants_prefix)
        st = prefix_row(b, err);
    return st;
}
