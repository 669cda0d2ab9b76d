/* bench kernels: single operations of the backend at the released shapes, through the operation table as the model
 * calls them.
 *
 * Products: activations quantised as in faithful numerics, weights made up. GEMV rows walk over 1 GiB of matrices of
 * one shape, so that every weight comes from memory; their limit is the read bandwidth, or the peak of bf16 arithmetic
 * where that is reached first. GEMM rows use few matrices again and again; their limit is the peak. Each row's result
 * is checked against the sum in its definition.
 *
 * The indexer's selection stands beside a partial sort of the same scores, on one thread each: the device's last step
 * of the operation alone, since making the scores takes far longer. Both must choose the same entries. */
#include "bench.h"

enum { OUT = 2304, IN = 5120, ROWS_MAX = 512, GEMV_BYTES = 1 << 30 };
enum { SCORES = 65536, BEST = 512, LISTS = 16 };

typedef struct kernels {
    di_bench *b;
    di_backend backend;
    di_device *device;
    di_stream *stream;
    uint8_t *weights, *scales, *codes, *x_scales;
    float *y;
    size_t weight_bytes, scale_bytes; /* of one matrix */
    int64_t n_mats;
} kernels;

static di_mat mat_of(const kernels *k, di_dtype dtype, int64_t i) {
    return (di_mat){.dtype = dtype,
                    .n_out = OUT,
                    .n_in = IN,
                    .data = k->weights + (size_t)i * k->weight_bytes,
                    .scale = k->scales + (size_t)i * k->scale_bytes};
}

typedef struct fill_job {
    uint8_t *p;
    uint64_t seed, and_mask, add;
} fill_job;

static void fill_bytes(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const fill_job *j = ctx;
    uint64_t *w = (uint64_t *)(void *)(j->p + part * (1 << 16));
    for (int i = 0; i < (1 << 13); i++)
        w[i] = (di_mix64(j->seed + (uint64_t)part * (1 << 13) + (uint64_t)i) & j->and_mask) + j->add;
}

/* Pseudo-random bytes, each (byte & and_mask) + add. n is rounded up to 64 KiB, which every buffer here leaves room
 * for. */
static void fill(const kernels *k, uint8_t *p, size_t n, uint64_t seed, uint8_t and_mask, uint8_t add) {
    fill_job job = {p, seed << 32, and_mask * 0x0101010101010101u, add * 0x0101010101010101u};
    di_pool_run(k->b->pool, fill_bytes, &job, (int64_t)DI_CEIL_DIV(n, (size_t)1 << 16));
}

static di_status take(const kernels *k, size_t n, void *out, di_error *err) {
    return k->backend.device->alloc(k->device, n + (1 << 16), out, err);
}

static di_status open_kernels(kernels *k, di_bench *b, di_error *err) {
    *k = (kernels){.b = b};
    di_load_options load;
    di_status st = di_cli_load_options(&load, b->opt, err);
    if (st)
        return st;
    di_device_config config = di_load_device_config(&load);
    di_limits limits = {.rows_max = ROWS_MAX,
                        .hidden_size = IN,
                        .n_in_max = IN,
                        .n_out_max = OUT,
                        .entries_max = 65536,
                        .keys_max = 640,
                        .head_dim = 512,
                        .n_heads = 64,
                        .index_heads = 32,
                        .index_dim = 128,
                        .experts_max = 384,
                        .experts_per_row_max = 6,
                        .intermediate = OUT};
    load.backend = strcmp(load.backend, "auto") == 0 ? "cpu" : load.backend;
    if (strcmp(load.backend, "cpu") != 0)
        return di_fail(
            err, DI_ERR_UNSUPPORTED,
            "bench kernels: its rows are of the processor's kernels, found backend '%s'; those of a GPU have "
            "programs of their own (docs/nvidia.md)",
            load.backend);
    st = di_backend_find(load.backend, &k->backend, err);
    if (st || (st = k->backend.device->open(&k->device, &config, err)) ||
        (st = k->backend.device->reserve(k->device, &limits, err)) ||
        (st = k->backend.device->stream_create(k->device, &k->stream, err)) ||
        (st = take(k, (size_t)GEMV_BYTES + (size_t)GEMV_BYTES / 8, &k->weights, err)) ||
        (st = take(k, (size_t)GEMV_BYTES / 8, &k->scales, err)) ||
        (st = take(k, (size_t)ROWS_MAX * IN, &k->codes, err)) ||
        (st = take(k, (size_t)ROWS_MAX * IN / 32, &k->x_scales, err)) ||
        (st = take(k, sizeof(float) * ROWS_MAX * OUT, &k->y, err)))
        return st;
    fill(k, k->codes, (size_t)ROWS_MAX * IN, 1, 0x9F, 0x20); /* E4M3, exponent field 4 to 7 */
    fill(k, k->x_scales, (size_t)ROWS_MAX * IN / 32, 2, 0x01, 0x7F);
    return DI_OK;
}

static void close_kernels(kernels *k) {
    const di_device_ops *dev = k->backend.device;
    if (!k->device)
        return;
    dev->free(k->device, k->weights);
    dev->free(k->device, k->scales);
    dev->free(k->device, k->codes);
    dev->free(k->device, k->x_scales);
    dev->free(k->device, k->y);
    if (k->stream)
        dev->stream_destroy(k->stream);
    dev->close(k->device);
}

/* Fills as many matrices of one format as GEMV_BYTES hold. */
static void make_weights(kernels *k, di_dtype dtype) {
    k->weight_bytes = di_dtype_bytes(dtype, (size_t)OUT * IN);
    k->scale_bytes = dtype == DI_F4_E2M1 ? (size_t)OUT * IN / 32 : (size_t)OUT * IN / 1024;
    k->n_mats = (int64_t)(GEMV_BYTES / k->weight_bytes);
    bool is_fp4 = dtype == DI_F4_E2M1;
    fill(k, k->weights, (size_t)k->n_mats * k->weight_bytes, 3, is_fp4 ? 0xFF : 0x9F, is_fp4 ? 0 : 0x20);
    fill(k, k->scales, (size_t)k->n_mats * k->scale_bytes, 4, 0x01, 0x7A);
}

static di_status product(const kernels *k, di_dtype dtype, int64_t i, int64_t rows) {
    di_mat w = mat_of(k, dtype, i);
    di_act x = {
        .dtype = DI_F8_E4M3, .n_rows = rows, .n_cols = IN, .stride = IN, .data = k->codes, .scale = k->x_scales};
    di_act y = {.dtype = DI_F32, .n_rows = rows, .n_cols = OUT, .stride = OUT, .data = k->y};
    return k->backend.ops->gemm(k->stream, &(di_gemm_args){.x = x, .w = &w, .out = y});
}

/* The last product once more, a few outputs of it, by the definition in tensor.h. */
static di_status check(const kernels *k, di_dtype dtype, int64_t i, int64_t rows, di_error *err) {
    float w[IN], x[IN];
    di_mat mat = mat_of(k, dtype, i);
    for (int n = 0; n < 8; n++) {
        int64_t row = (rows - 1) * n / 7, out = (OUT - 1) * n / 7;
        di_mat_row(&mat, out, w);
        di_dequant_qa(k->codes + row * IN, k->x_scales + row * IN / 32, IN, x);
        float want = di_dot32(x, w, IN), got = k->y[row * OUT + out];
        if (want != got)
            return di_fail(err, DI_ERR_INTERNAL, "row %lld, output %lld: %.9g, expected %.9g", (long long)row,
                           (long long)out, (double)got, (double)want);
    }
    return DI_OK;
}

static di_status gemv_row(const kernels *k, const char *name, di_dtype dtype, int64_t rows, di_error *err) {
    double runs[DI_BENCH_RUNS], bandwidth, peak;
    di_status st = di_bench_limits(k->b, k->backend.device, k->device, &bandwidth, &peak, err);
    double bytes = (double)(k->weight_bytes + k->scale_bytes);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        int64_t start_ns = di_clock_ns();
        for (int64_t m = 0; m < k->n_mats && !st; m++)
            st = product(k, dtype, m, rows);
        if (i >= 0)
            runs[i] = (double)k->n_mats * bytes / (double)(di_clock_ns() - start_ns);
    }
    if (!st)
        st = check(k, dtype, k->n_mats - 1, rows, err);
    if (st)
        return di_error_context(err, st, "%s", name);
    double arithmetic = peak * bytes / (2.0 * (double)rows * OUT * IN); /* bytes a second at the peak */
    return di_bench_row(k->b, name, runs, DI_BENCH_RUNS, "GB/s", DI_MIN(bandwidth, arithmetic) * 1e-9,
                        arithmetic < bandwidth ? "peak_bf16" : "read_bandwidth", err);
}

static di_status gemm_row(const kernels *k, const char *name, di_dtype dtype, di_error *err) {
    double runs[DI_BENCH_RUNS], bandwidth, peak;
    di_status st = di_bench_limits(k->b, k->backend.device, k->device, &bandwidth, &peak, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        enum { TIMES = 8 };
        int64_t start_ns = di_clock_ns();
        for (int64_t m = 0; m < TIMES && !st; m++)
            st = product(k, dtype, m, ROWS_MAX);
        if (i >= 0)
            runs[i] = 2.0 * TIMES * ROWS_MAX * OUT * IN / (double)(di_clock_ns() - start_ns);
    }
    if (!st)
        st = check(k, dtype, 7, ROWS_MAX, err);
    if (st)
        return di_error_context(err, st, "%s", name);
    return di_bench_row(k->b, name, runs, DI_BENCH_RUNS, "GFLOP/s", peak * 1e-9, "peak_bf16", err);
}

/* ---- the indexer's selection ---- */

typedef struct scored {
    float score;
    int32_t idx;
} scored;

/* Whether a is worse than b: a lower score, or the same at a higher index. */
static bool is_worse(scored a, scored b) {
    return a.score < b.score || (a.score == b.score && a.idx > b.idx);
}

/* Puts `v` into the heap of n, from its top down; the worst is at the top. */
static void sift(scored *heap, int32_t n, int32_t at, scored v) {
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= n)
            break;
        if (child + 1 < n && is_worse(heap[child + 1], heap[child]))
            child++;
        if (!is_worse(heap[child], v))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = v;
}

/* The peer: the k best by a heap of the best so far, as the partial sort of C++ finds them, the best first. */
static void partial_sort(const float *s, int32_t n, int32_t k, scored *heap) {
    for (int32_t i = 0; i < k; i++)
        heap[i] = (scored){s[i], i};
    for (int32_t i = k / 2 - 1; i >= 0; i--)
        sift(heap, k, i, heap[i]);
    for (int32_t i = k; i < n; i++) {
        if (s[i] > heap[0].score) /* an equal one has the higher index */
            sift(heap, k, 0, (scored){s[i], i});
    }
    for (int32_t i = k - 1; i > 0; i--) {
        scored last = heap[i];
        heap[i] = heap[0];
        sift(heap, i, 0, last);
    }
}

/* Whether idx, ascending, has the entries of `best`. */
static bool is_same(const int32_t *idx, const scored *best, uint8_t *is_chosen) {
    memset(is_chosen, 0, SCORES);
    for (int32_t i = 0; i < BEST; i++)
        is_chosen[best[i].idx] = 1;
    for (int32_t i = 0; i < BEST; i++) {
        if (idx[i] < 0 || idx[i] >= SCORES || !is_chosen[idx[i]] || (i && idx[i] <= idx[i - 1]))
            return false;
    }
    return true;
}

/* Scores as the indexer makes them in faithful numerics: rounded to bf16, so that some tie. */
static void fill_scores(float *s, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = di_mix64((uint64_t)i + 77);
        s[i] = di_round_bf16((float)((r & 0xFFFF) + (r >> 16 & 0xFFFF) + (r >> 32 & 0xFFFF)) * 0x1p-14f - 6.0f);
    }
}

static di_status topk_row(const kernels *k, const char *name, di_error *err) {
    const di_device_ops *dev = k->backend.device;
    double runs[DI_BENCH_RUNS], peer[DI_BENCH_RUNS];
    float *s = NULL;
    int32_t *idx = NULL;
    scored *best = malloc((size_t)LISTS * BEST * sizeof *best);
    uint8_t *is_chosen = malloc(SCORES);
    di_status st = DI_OK;
    if (!best || !is_chosen)
        st = di_fail(err, DI_ERR_MEMORY, "%s: no memory", name);
    if (!st && !(st = take(k, sizeof *s * LISTS * SCORES, &s, err)))
        st = take(k, sizeof *idx * LISTS * BEST, &idx, err);
    if (!st)
        fill_scores(s, (int64_t)LISTS * SCORES);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        int64_t start_ns = di_clock_ns();
        for (int64_t l = 0; l < LISTS; l++)
            dev->topk(k->device, s + l * SCORES, SCORES, BEST, idx + l * BEST);
        int64_t between_ns = di_clock_ns();
        for (int64_t l = 0; l < LISTS; l++)
            partial_sort(s + l * SCORES, SCORES, BEST, best + l * BEST);
        int64_t end_ns = di_clock_ns();
        if (i >= 0) {
            runs[i] = 1e3 * LISTS * SCORES / (double)(between_ns - start_ns);
            peer[i] = 1e3 * LISTS * SCORES / (double)(end_ns - between_ns);
        }
        for (int64_t l = 0; l < LISTS && !st; l++) {
            if (!is_same(idx + l * BEST, best + l * BEST, is_chosen))
                st = di_fail(err, DI_ERR_INTERNAL, "%s: list %d: not the entries of the partial sort", name, (int)l);
        }
    }
    if (!st)
        st = di_bench_row(k->b, name, runs, DI_BENCH_RUNS, "Mscore/s", di_bench_median(peer, DI_BENCH_RUNS),
                          "partial_sort", err);
    if (s)
        dev->free(k->device, s);
    if (idx)
        dev->free(k->device, idx);
    free(best);
    free(is_chosen);
    return st;
}

/* ---- the rows ---- */

static di_status limit_rows(kernels *k, di_error *err) {
    double bandwidth = 0, peak = 0;
    bool wants_bandwidth = di_bench_wants(k->b, "read_bandwidth"), wants_peak = di_bench_wants(k->b, "peak_bf16");
    di_status st = DI_OK;
    if (wants_bandwidth || wants_peak)
        st = di_bench_limits(k->b, k->backend.device, k->device, &bandwidth, &peak, err);
    bandwidth *= 1e-9;
    peak *= 1e-9;
    if (!st && wants_bandwidth)
        st = di_bench_row(k->b, "read_bandwidth", &bandwidth, 1, "GB/s", 0, NULL, err);
    if (!st && wants_peak)
        st = di_bench_row(k->b, "peak_bf16", &peak, 1, "GFLOP/s", 0, NULL, err);
    return st;
}

di_status di_bench_kernels(di_bench *b, di_error *err) {
    static const struct {
        const char *name;
        di_dtype dtype;
        int64_t rows;
    } products[] = {{"gemv_mxfp4_m1", DI_F4_E2M1, 1}, {"gemv_mxfp4_m4", DI_F4_E2M1, 4},
                    {"gemv_mxfp4_m8", DI_F4_E2M1, 8}, {"gemm_mxfp4_m512", DI_F4_E2M1, ROWS_MAX},
                    {"gemv_fp8_m1", DI_F8_E4M3, 1},   {"gemv_fp8_m4", DI_F8_E4M3, 4},
                    {"gemv_fp8_m8", DI_F8_E4M3, 8},   {"gemm_fp8_m512", DI_F8_E4M3, ROWS_MAX}};
    kernels k = {0};
    bool has_weights = false;
    di_dtype dtype = DI_F32; /* of the weights made last, where has_weights */
    di_status st = open_kernels(&k, b, err);
    if (!st)
        st = limit_rows(&k, err);
    for (size_t i = 0; i < DI_COUNT(products) && !st; i++) {
        if (!di_bench_wants(b, products[i].name))
            continue;
        if (!has_weights || dtype != products[i].dtype)
            make_weights(&k, products[i].dtype);
        has_weights = true;
        dtype = products[i].dtype;
        st = products[i].rows == ROWS_MAX ? gemm_row(&k, products[i].name, dtype, err)
                                          : gemv_row(&k, products[i].name, dtype, products[i].rows, err);
    }
    if (!st && di_bench_wants(b, "topk_512_of_65536")) {
        if (k.backend.device->topk)
            st = topk_row(&k, "topk_512_of_65536", err);
        else
            fprintf(stderr, "deepinfer: bench kernels: no row of the selection: the backend doesn't take it apart\n");
    }
    close_kernels(&k);
    return st;
}
