/* bench kernels: single operations of the backend at the released shapes, through the operation table as the model
 * calls them.
 *
 * Products: activations quantised as in faithful numerics, weights made up. GEMV rows walk over 1 GiB of matrices of
 * one shape, so that every weight comes from memory; their limit is the read bandwidth. GEMM rows use one matrix again
 * and again; their limit is the peak of bf16 arithmetic. Each row's result is checked against the sum in its
 * definition. */
#include <math.h>

#include "bench.h"

enum { OUT = 2304, IN = 5120, ROWS_MAX = 512, GEMV_BYTES = 1 << 30 };

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

static di_status take(kernels *k, size_t n, void *out, di_error *err) {
    return k->backend.device->alloc(k->device, n + (1 << 16), out, err);
}

static di_status open_kernels(kernels *k, di_bench *b, di_error *err) {
    *k = (kernels){.b = b};
    di_load_options load;
    di_cli_load_options(&load, b->opt);
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
    di_status st = di_backend_find(load.backend, &k->backend, err);
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

static di_status product(kernels *k, di_dtype dtype, int64_t i, int64_t rows) {
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

static di_status gemv_row(kernels *k, const char *name, di_dtype dtype, int64_t rows, di_error *err) {
    double runs[DI_BENCH_RUNS], bandwidth;
    di_status st = di_bench_bandwidth(k->b, &bandwidth, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        int64_t start_ns = di_clock_ns();
        for (int64_t m = 0; m < k->n_mats && !st; m++)
            st = product(k, dtype, m, rows);
        if (i >= 0)
            runs[i] =
                (double)k->n_mats * (double)(k->weight_bytes + k->scale_bytes) / (double)(di_clock_ns() - start_ns);
    }
    if (!st)
        st = check(k, dtype, k->n_mats - 1, rows, err);
    if (st)
        return di_error_context(err, st, "%s", name);
    return di_bench_row(k->b, name, runs, DI_BENCH_RUNS, "GB/s", bandwidth * 1e-9, "read_bandwidth", err);
}

static di_status gemm_row(kernels *k, const char *name, di_dtype dtype, di_error *err) {
    double runs[DI_BENCH_RUNS], peak;
    di_status st = di_bench_peak(k->b, k->backend.device, k->device, &peak, err);
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

di_status di_bench_kernels(di_bench *b, di_error *err) {
    kernels k = {0};
    double bandwidth = 0, peak = 0;
    static const struct {
        const char *m1, *m4, *m8, *m512;
        di_dtype dtype;
    } formats[] = {{"gemv_mxfp4_m1", "gemv_mxfp4_m4", "gemv_mxfp4_m8", "gemm_mxfp4_m512", DI_F4_E2M1},
                   {"gemv_fp8_m1", "gemv_fp8_m4", "gemv_fp8_m8", "gemm_fp8_m512", DI_F8_E4M3}};
    di_status st = di_bench_bandwidth(b, &bandwidth, err);
    if (!st && !(st = open_kernels(&k, b, err)))
        st = di_bench_peak(b, k.backend.device, k.device, &peak, err);
    bandwidth *= 1e-9;
    peak *= 1e-9;
    if (!st)
        st = di_bench_row(b, "read_bandwidth", &bandwidth, 1, "GB/s", 0, NULL, err);
    if (!st)
        st = di_bench_row(b, "peak_bf16", &peak, 1, "GFLOP/s", 0, NULL, err);
    for (size_t i = 0; i < DI_COUNT(formats) && !st; i++) {
        make_weights(&k, formats[i].dtype);
        if ((st = gemv_row(&k, formats[i].m1, formats[i].dtype, 1, err)) ||
            (st = gemv_row(&k, formats[i].m4, formats[i].dtype, 4, err)) ||
            (st = gemv_row(&k, formats[i].m8, formats[i].dtype, 8, err)))
            break;
        st = gemm_row(&k, formats[i].m512, formats[i].dtype, err);
    }
    close_kernels(&k);
    return st;
}
