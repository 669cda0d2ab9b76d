/* bench batch: what treating every row alike costs and gains.
 *
 * invariance_cost: the share of throughput that batch-invariant mode takes, 1 - on/off, of a prefill and of decoding in
 * a batch, the larger of the two; both modes run in turn on the model of --model. At most a tenth is allowed. */
#include "bench_model.h"

enum { MODES = 2 }; /* on, off */

/* One run of either work in each mode: costs of prefill and decoding. */
static di_status cost_run(di_cli_model m[MODES], uint64_t seed, double costs[2], di_error *err) {
    double prefill[MODES] = {1, 1}, decode[MODES] = {1, 1};
    for (int i = 0; i < MODES; i++) {
        di_cli_model *turn = &m[(i + (int)seed) % MODES]; /* each mode goes first in every other run */
        int at = (int)(turn - m);
        di_status st = di_bench_prefill_run(turn, DI_BENCH_PREFILL, seed, &prefill[at], err);
        if (!st)
            st = di_bench_decode_run(turn, DI_BENCH_BATCH, DI_BENCH_DECODE, seed, &decode[at], err);
        if (st)
            return st;
    }
    costs[0] = 1 - prefill[0] / prefill[1];
    costs[1] = 1 - decode[0] / decode[1];
    return DI_OK;
}

static di_status invariance_row(di_bench *b, const char *name, di_error *err) {
    static const char *const words[MODES] = {"on", "off"};
    di_cli_model m[MODES] = {{.start_ns = 0}};
    di_options opt = *b->opt;
    di_bench mode = *b;
    mode.opt = &opt;
    double costs[2] = {0}, of_prefill[DI_BENCH_RUNS], of_decode[DI_BENCH_RUNS];
    di_status st = DI_OK;
    for (int i = 0; i < MODES && !st; i++) {
        opt.batch_invariant = words[i];
        st = di_bench_model_open(&mode, &m[i], DI_BENCH_PREFILL, DI_BENCH_BATCH, 0, err);
    }
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        st = cost_run(m, (uint64_t)i + 1, costs, err);
        of_prefill[DI_MAX(i, 0)] = costs[0];
        of_decode[DI_MAX(i, 0)] = costs[1];
    }
    if (!st) {
        bool is_prefill = di_bench_median(of_prefill, DI_BENCH_RUNS) > di_bench_median(of_decode, DI_BENCH_RUNS);
        st = di_bench_row(b, name, is_prefill ? of_prefill : of_decode, DI_BENCH_RUNS, "fraction", 0.1, "most_allowed",
                          err);
    }
    for (int i = 0; i < MODES; i++)
        di_cli_model_close(&m[i]);
    return st ? di_error_context(err, st, "%s", name) : DI_OK;
}

di_status di_bench_batch(di_bench *b, di_error *err) {
    di_status st = di_bench_arrivals(b, err);
    return !st && di_bench_wants(b, "invariance_cost") ? invariance_row(b, "invariance_cost", err) : st;
}
