/* The same operation on the CPU's reference level and on the NVIDIA backend: both devices, mirrored memory, comparison.
 *
 * A test makes its arguments in host memory (ops_mat.h), runs them on the reference, mirrors every array with twin_in
 * and its kin, runs the same struct with the mirrored pointers, and compares what came back. With DI_TWIN_EMU the
 * second device is the emulation of tests/harness/cuda_emu.h, which runs the same kernels on the CPU; without it a
 * machine that has no GPU skips every test, by name. */
#ifndef DI_TEST_TWIN_H
#define DI_TEST_TWIN_H

#include "accelerator.h"
#include "ops_mat.h"

enum { TWIN_BLOCKS = 256, TWIN_POISON = 0xA5 };

typedef struct twin {
    di_device *cpu;
    di_stream *cpu_stream;
    di_backend gpu; /* tables */
    di_device *dev;
    di_stream *stream;
    void *blocks[TWIN_BLOCKS]; /* device memory */
    int n_blocks;
} twin;

#ifdef DI_TWIN_EMU
#include "cuda_emu_api.h"
extern di_backend di_emu_backend(void); /* the emulation's tables */
static inline bool twin_find(di_backend *out, di_error *err) {
    (void)err;
    *out = di_emu_backend();
    return true;
}
#else
static inline bool twin_find(di_backend *out, di_error *err) {
    di_test_find_modules();
    return di_backend_find("nvidia", out, err) == DI_OK;
}
#endif

/* Opens both; kernels is "auto", "portable" or "sm90". False: there is no such device, with the reason in err. */
static inline bool twin_try_open(twin *t, const di_limits *limits, const char *kernels, bool is_order_free,
                                 di_error *err) {
    memset(t, 0, sizeof *t);
    if (!twin_find(&t->gpu, err))
        return false;
    di_device_config config = {.kernels = kernels, .is_order_free = is_order_free};
    if (t->gpu.device->open(&t->dev, &config, err))
        return false;
    di_test_ok(t->gpu.device->reserve(t->dev, limits, err), err);
    di_test_ok(t->gpu.device->stream_create(t->dev, &t->stream, err), err);
    di_test_ok(di_cpu_device_open(&t->cpu, 0, DI_CPU_REF, err), err);
    di_test_ok(di_cpu_device_ops.reserve(t->cpu, limits, err), err);
    di_test_ok(di_cpu_device_ops.stream_create(t->cpu, &t->cpu_stream, err), err);
    return true;
}

/* The same, or the test is skipped. */
#define twin_open(t, limits, kernels)                                                                                  \
    do {                                                                                                               \
        di_error twin_err = {0};                                                                                       \
        if (!twin_try_open((t), (limits), (kernels), false, &twin_err))                                                \
            di_test_skip("%s", twin_err.message);                                                                      \
    } while (0)

/* Opens a device of compute capability 10.0; emulated, the device is one for this while. */
static inline bool twin_try_open_blackwell(twin *t, const di_limits *limits, const char *kernels, di_error *err) {
#ifdef DI_TWIN_EMU
    di_emu_set_capability(10);
    bool has = twin_try_open(t, limits, kernels, false, err);
    di_emu_set_capability(9);
    return has;
#else
    return twin_try_open(t, limits, kernels, false, err);
#endif
}
/* With Blackwell's kernels, or the test is skipped. */
#define twin_open_sm100(t, limits)                                                                                     \
    do {                                                                                                               \
        di_error twin_err = {0};                                                                                       \
        if (!twin_try_open_blackwell((t), (limits), "sm100", &twin_err))                                               \
            di_test_skip("%s", twin_err.message);                                                                      \
    } while (0)
/* Turn i of several: emulated threads take turns in another order, copies and tensor cores are late or early. Turn 1 is
 * the usual one. */
static inline void twin_turn(uint64_t seed, int i) {
#ifdef DI_TWIN_EMU
    di_emu_set_schedule(i % 4 < 2 ? 0 : seed + (uint64_t)i, i % 2);
#else
    (void)seed;
    (void)i;
#endif
}

/* Frees the mirrored memory of a case. */
static inline void twin_drop(twin *t) {
    while (t->n_blocks > 0)
        t->gpu.device->free(t->dev, t->blocks[--t->n_blocks]);
}

static inline void twin_close(twin *t) {
    twin_drop(t);
    t->gpu.device->stream_destroy(t->stream);
    t->gpu.device->close(t->dev);
    di_cpu_device_ops.stream_destroy(t->cpu_stream);
    di_cpu_device_ops.close(t->cpu);
}

/* Device memory with the contents of a host array; NULL for NULL. */
static inline void *twin_in(twin *t, const void *host, size_t n_bytes) {
    di_error err = {0};
    if (!host)
        return NULL;
    assert_true(t->n_blocks < TWIN_BLOCKS);
    void **p = &t->blocks[t->n_blocks++];
    di_test_ok(t->gpu.device->alloc(t->dev, n_bytes, p, &err), &err);
    di_test_ok(t->gpu.device->upload(t->dev, *p, host, n_bytes, &err), &err);
    return *p;
}

/* Device memory that holds no sensible value yet. */
static inline void *twin_out(twin *t, size_t n_bytes) {
    uint8_t *poison = ops_rig_alloc(n_bytes);
    memset(poison, TWIN_POISON, n_bytes);
    void *p = twin_in(t, poison, n_bytes);
    free(poison);
    return p;
}

/* Waits for the stream and brings n bytes back. */
static inline void twin_back(twin *t, void *host, const void *device, size_t n_bytes) {
    di_error err = {0};
    di_test_ok(t->gpu.device->stream_sync(t->stream, &err), &err);
    di_test_ok(t->gpu.device->download(t->dev, host, device, n_bytes, &err), &err);
}

static inline size_t twin_act_bytes(const di_act *x) {
    return x->n_rows ? di_dtype_bytes(x->dtype, (size_t)((x->n_rows - 1) * x->stride + x->n_cols)) : 0;
}
static inline size_t twin_act_scales(const di_act *x) {
    return x->scale ? (size_t)(x->n_rows * (x->n_cols / 32)) : 0;
}

/* A block with its contents, and one of the same shape with poison. */
static inline di_act twin_act_in(twin *t, const di_act *x) {
    di_act d = *x;
    d.data = twin_in(t, x->data, twin_act_bytes(x));
    d.scale = twin_in(t, x->scale, twin_act_scales(x));
    return d;
}
static inline di_act twin_act_out(twin *t, const di_act *x) {
    di_act d = *x;
    d.data = twin_out(t, twin_act_bytes(x));
    d.scale = x->scale ? twin_out(t, twin_act_scales(x)) : NULL;
    return d;
}
static inline di_mat twin_mat_in(twin *t, const di_mat *w) {
    di_mat d = *w;
    size_t n = (size_t)(w->n_out * w->n_in);
    size_t scales = w->dtype == DI_F8_E4M3 ? (size_t)(DI_CEIL_DIV(w->n_out, 32) * DI_CEIL_DIV(w->n_in, 32)) : n / 32;
    d.data = twin_in(t, w->data, di_dtype_bytes(w->dtype, n));
    d.scale = w->scale ? twin_in(t, w->scale, scales) : NULL;
    return d;
}
/* All arrays of a batch; blocks has n_seqs*blocks_stride entries. */
static inline di_rows twin_rows_in(twin *t, const di_rows *r) {
    di_rows d = *r;
    size_t n = (size_t)r->n_rows * 4, s = (size_t)r->n_seqs * 4;
    d.pos = twin_in(t, r->pos, n);
    d.seq = twin_in(t, r->seq, n);
    d.win_lo = twin_in(t, r->win_lo, n);
    d.win_hi = twin_in(t, r->win_hi, n);
    d.row0 = twin_in(t, r->row0, s);
    d.n = twin_in(t, r->n, s);
    d.pos0 = twin_in(t, r->pos0, s);
    d.slot = twin_in(t, r->slot, s);
    d.blocks = twin_in(t, r->blocks, s * (size_t)r->blocks_stride);
    return d;
}

/* The same bytes. */
static inline void twin_same(const void *got, const void *want, size_t n_bytes, const char *what) {
    const uint8_t *g = got, *w = want;
    for (size_t i = 0; i < n_bytes; i++) {
        if (g[i] != w[i])
            fail_msg("%s: byte %zu of %zu is %02x, the reference has %02x", what, i, n_bytes, g[i], w[i]);
    }
}

/* What came back of block `d` on the device has the bits of `want` (host), codes and scales, row by row: what lies
 * between rows is not looked at. */
static inline void twin_act_same(twin *t, const di_act *d, const di_act *want, const char *what) {
    uint8_t *got = ops_rig_alloc(twin_act_bytes(want)), *scale = ops_rig_alloc(twin_act_scales(want));
    size_t row = di_dtype_bytes(want->dtype, (size_t)want->n_cols);
    twin_back(t, got, d->data, twin_act_bytes(want));
    for (int64_t i = 0; i < want->n_rows; i++) {
        size_t at = di_dtype_bytes(want->dtype, (size_t)(i * want->stride));
        twin_same(got + at, (const uint8_t *)want->data + at, row, what);
    }
    if (want->scale) {
        twin_back(t, scale, d->scale, twin_act_scales(want));
        twin_same(scale, want->scale, twin_act_scales(want), what);
    }
    free(got);
    free(scale);
}

/* Values as double, for comparisons within bounds. */
static inline double *twin_act_values(twin *t, const di_act *d) {
    double *v = ops_rig_alloc((size_t)(d->n_rows * d->n_cols) * sizeof *v);
    di_act host = *d;
    host.data = ops_rig_alloc(twin_act_bytes(d));
    host.scale = d->scale ? ops_rig_alloc(twin_act_scales(d)) : NULL;
    twin_back(t, host.data, d->data, twin_act_bytes(d));
    if (d->scale)
        twin_back(t, host.scale, d->scale, twin_act_scales(d));
    for (int64_t i = 0; i < d->n_rows * d->n_cols; i++)
        v[i] = ops_act_value(&host, i / d->n_cols, i % d->n_cols);
    free(host.data);
    free(host.scale);
    return v;
}

#endif
