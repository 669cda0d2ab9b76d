/* What tests of CPU operations share: a device of a given level and thread count, number formats by their definitions
 * in double, and random data that formats store without surprise.
 *
 * Nothing here uses the code under test to know a right value. Inline: a test program takes what it needs. */
#ifndef DI_TEST_OPS_RIG_H
#define DI_TEST_OPS_RIG_H

#include "harness.h"

#include "backend/cpu/cpu.h"

typedef struct ops_rig {
    di_device *dev;
    di_stream *stream;
} ops_rig;

static inline void ops_rig_open(ops_rig *r, di_cpu_level level, int threads, const di_limits *limits) {
    di_error err = {0};
    di_test_ok(di_cpu_device_open(&r->dev, threads, level, &err), &err);
    di_test_ok(di_cpu_device_ops.reserve(r->dev, limits, &err), &err);
    di_test_ok(di_cpu_device_ops.stream_create(r->dev, &r->stream, &err), &err);
}

static inline void ops_rig_close(ops_rig *r) {
    di_cpu_device_ops.stream_destroy(r->stream);
    di_cpu_device_ops.close(r->dev);
}

/* Every level that this machine has, each with 1, 2 and 3 threads. Variant 0 is the reference on one thread. */
static inline int ops_rig_variants(void) {
    return ((int)di_cpu_level_best() + 1) * 3;
}
static inline void ops_rig_open_variant(ops_rig *r, int variant, const di_limits *limits) {
    ops_rig_open(r, (di_cpu_level)(variant / 3), variant % 3 + 1, limits);
}

static inline void *ops_rig_alloc(size_t n_bytes) {
    void *p = calloc(1, n_bytes ? n_bytes : 1);
    assert_non_null(p);
    return p;
}

/* ---- formats by their definitions (model.md 0.1, 5.1) ------------------------------------------------------------ */

static inline double ops_rig_e4m3(uint8_t code) {
    int e = code >> 3 & 15, m = code & 7;
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return code & 128 ? -v : v;
}
static inline double ops_rig_e2m1(uint8_t code) {
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

static inline int64_t ops_rig_data_bytes(di_kv_format f, int64_t n) {
    return f == DI_KV_F32 ? 4 * n : f == DI_KV_FP8 ? n : n / 2;
}
static inline int64_t ops_rig_scale_bytes(di_kv_format f, int64_t n) {
    return f == DI_KV_F32 ? 0 : f == DI_KV_FP4 ? n / 16 : n / 32;
}
static inline int64_t ops_rig_record_bytes(di_kv_format f, int64_t n) {
    return ops_rig_data_bytes(f, n) + ops_rig_scale_bytes(f, n);
}

/* Value i of a record. */
static inline double ops_rig_value(di_kv_format f, const uint8_t *data, const uint8_t *scale, int64_t i) {
    float x;
    uint8_t nibble = 0;
    if (f == DI_KV_FP4 || f == DI_KV_MX4)
        nibble = i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15;
    switch (f) {
    case DI_KV_F32:
        memcpy(&x, data + 4 * i, 4);
        return x;
    case DI_KV_FP8:
        return ops_rig_e4m3(data[i]) * ldexp(1, scale[i / 32] - 127);
    case DI_KV_FP4:
        return ops_rig_e2m1(nibble) * ops_rig_e4m3(scale[i / 16]);
    default:
        return ops_rig_e2m1(nibble) * ldexp(1, scale[i / 32] - 127);
    }
}

/* Fills a record with random codes and scales of moderate size: any bytes that a quantiser could have written. */
static inline void ops_rig_random_record(uint64_t *rng, di_kv_format f, uint8_t *data, uint8_t *scale, int64_t n) {
    if (f == DI_KV_F32) {
        for (int64_t i = 0; i < n; i++) {
            float x = (float)(4 * di_test_random_unit(rng) - 2);
            memcpy(data + 4 * i, &x, 4);
        }
        return;
    }
    for (int64_t i = 0; i < ops_rig_data_bytes(f, n); i++) {
        data[i] = (uint8_t)di_test_random(rng);
        if (f == DI_KV_FP8)
            data[i] = (uint8_t)((data[i] & 0x80) | di_test_random_range(rng, 0, 0x7E));
    }
    for (int64_t i = 0; i < ops_rig_scale_bytes(f, n); i++) {
        if (f == DI_KV_FP4)
            scale[i] = (uint8_t)di_test_random_range(rng, 0x10, 0x30); /* 2^-5 to 0.5 */
        else if (f == DI_KV_FP8)
            scale[i] = (uint8_t)di_test_random_range(rng, 116, 119); /* largest value 0.2 to 1.8 */
        else
            scale[i] = (uint8_t)di_test_random_range(rng, 122, 126);
    }
}

/* n random values of [-size, size], bf16 values in fp32. */
static inline void ops_rig_random_bf16(uint64_t *rng, double size, float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = di_round_bf16((float)(size * (2 * di_test_random_unit(rng) - 1)));
}

/* A block of activations over floats: the floats themselves, or a bf16 copy in buf. */
static inline di_act ops_rig_act(di_dtype dtype, float *x, uint16_t *buf, int64_t n_rows, int64_t n_cols) {
    di_act a = {.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols, .stride = n_cols, .data = x};
    if (dtype == DI_BF16) {
        for (int64_t i = 0; i < n_rows * n_cols; i++)
            buf[i] = di_f32_to_bf16(x[i]);
        a.data = buf;
    }
    return a;
}

#endif
