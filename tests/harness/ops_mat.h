/* What tests of dense operations share: memory of a test case, random matrices and activations, their values in double
 * by the formats' definitions, and the sum order of model.md 0.3 written out once more.
 *
 * Every block is an allocation of its own, so that a read past its end is seen by the address sanitizer. */
#ifndef DI_TEST_OPS_MAT_H
#define DI_TEST_OPS_MAT_H

#include "ops_rig.h"

typedef struct ops_mem {
    void *blocks[256];
    int n_blocks;
} ops_mem;

static inline void *ops_mem_take(ops_mem *mem, size_t n_bytes) {
    assert_true(mem->n_blocks < (int)DI_COUNT(mem->blocks));
    return mem->blocks[mem->n_blocks++] = ops_rig_alloc(n_bytes);
}
static inline void ops_mem_free(ops_mem *mem) {
    while (mem->n_blocks > 0)
        free(mem->blocks[--mem->n_blocks]);
}

/* Limits that the small cases of these tests stay below. */
static inline di_limits ops_mat_limits(void) {
    return (di_limits){.rows_max = 300,
                       .n_in_max = 1024,
                       .n_out_max = 1024,
                       .entries_max = 64,
                       .keys_max = 64,
                       .head_dim = 64,
                       .n_heads = 8,
                       .index_heads = 4,
                       .index_dim = 64,
                       .experts_max = 16,
                       .experts_per_row_max = 6,
                       .intermediate = 160,
                       .candidate_blocks = 8,
                       .hidden_size = 256};
}

/* ---- matrices
 * ------------------------------------------------------------------------------------------------------------ */

static inline float ops_mat_noise(uint64_t *rng) {
    return (float)(2 * di_test_random_unit(rng) - 1);
}
static inline uint8_t ops_mat_e4m3(uint64_t *rng) {
    uint8_t code = (uint8_t)di_test_random(rng);
    return (code & 0x7F) == 0x7F ? 0x3A : code;
}

/* Any bytes that a checkpoint may hold, scales of moderate size. */
static inline di_mat ops_mat_random(ops_mem *mem, uint64_t *rng, di_dtype dtype, int64_t n_out, int64_t n_in) {
    size_t n = (size_t)(n_out * n_in), n_bytes = di_dtype_bytes(dtype, n), n_scales = 0;
    uint8_t *data = ops_mem_take(mem, n_bytes), *scale = NULL;
    for (size_t i = 0; i < n_bytes; i++)
        data[i] = ops_mat_e4m3(rng);
    for (size_t i = 0; dtype == DI_F32 && i < n; i++)
        ((float *)data)[i] = ops_mat_noise(rng);
    for (size_t i = 0; dtype == DI_BF16 && i < n; i++)
        ((uint16_t *)data)[i] = di_f32_to_bf16(ops_mat_noise(rng));
    if (dtype == DI_F8_E4M3)
        n_scales = (size_t)(DI_CEIL_DIV(n_out, 32) * DI_CEIL_DIV(n_in, 32));
    if (dtype == DI_F4_E2M1)
        n_scales = (size_t)(n_out * (n_in / 32));
    if (n_scales)
        scale = ops_mem_take(mem, n_scales);
    for (size_t i = 0; i < n_scales; i++)
        scale[i] = (uint8_t)di_test_random_range(rng, 117, 122);
    return (di_mat){dtype, n_out, n_in, data, scale};
}

static inline double ops_mat_value(const di_mat *w, int64_t o, int64_t i) {
    int64_t at = o * w->n_in + i;
    if (w->dtype == DI_F32)
        return ((const float *)w->data)[at];
    if (w->dtype == DI_BF16)
        return di_bf16_to_f32(((const uint16_t *)w->data)[at]);
    uint8_t byte = ((const uint8_t *)w->data)[w->dtype == DI_F4_E2M1 ? at / 2 : at];
    if (w->dtype == DI_F8_E4M3) {
        return ops_rig_e4m3(byte) * ldexp(1, w->scale[o / 32 * DI_CEIL_DIV(w->n_in, 32) + i / 32] - 127);
    }
    return ops_rig_e2m1(at % 2 ? byte >> 4 : byte & 15) * ldexp(1, w->scale[o * (w->n_in / 32) + i / 32] - 127);
}

/* ---- activations
 * --------------------------------------------------------------------------------------------------------- */

static inline di_act ops_act_empty(ops_mem *mem, di_dtype dtype, int64_t n_rows, int64_t n_cols) {
    di_act a = {.dtype = dtype, .n_rows = n_rows, .n_cols = n_cols, .stride = n_cols};
    a.data = ops_mem_take(mem, di_dtype_bytes(dtype, (size_t)(n_rows * n_cols)));
    if (dtype == DI_F8_E4M3)
        a.scale = ops_mem_take(mem, (size_t)(n_rows * (n_cols / 32)));
    return a;
}

static inline di_act ops_act_random(ops_mem *mem, uint64_t *rng, di_dtype dtype, int64_t n_rows, int64_t n_cols) {
    di_act a = ops_act_empty(mem, dtype, n_rows, n_cols);
    for (int64_t i = 0; i < n_rows * n_cols; i++) {
        float v = 2 * ops_mat_noise(rng);
        if (dtype == DI_F32)
            ((float *)a.data)[i] = v;
        else if (dtype == DI_BF16)
            ((uint16_t *)a.data)[i] = di_f32_to_bf16(v);
        else
            ((uint8_t *)a.data)[i] = ops_mat_e4m3(rng);
    }
    for (int64_t i = 0; a.scale && i < n_rows * (n_cols / 32); i++)
        a.scale[i] = (uint8_t)di_test_random_range(rng, 116, 119);
    return a;
}

static inline double ops_act_value(const di_act *x, int64_t row, int64_t col) {
    int64_t at = row * x->stride + col;
    if (x->dtype == DI_F32)
        return ((const float *)x->data)[at];
    if (x->dtype == DI_BF16)
        return di_bf16_to_f32(((const uint16_t *)x->data)[at]);
    return ops_rig_e4m3(((const uint8_t *)x->data)[at]) * ldexp(1, x->scale[row * (x->n_cols / 32) + col / 32] - 127);
}

/* Rows of x in the order of `rows`, as a block of its own. */
static inline di_act ops_act_pick(ops_mem *mem, const di_act *x, const int64_t *rows, int64_t n) {
    di_act a = ops_act_empty(mem, x->dtype, n, x->n_cols);
    size_t row_bytes = di_dtype_bytes(x->dtype, (size_t)x->n_cols), scales = (size_t)(x->n_cols / 32);
    for (int64_t i = 0; i < n; i++) {
        memcpy((uint8_t *)a.data + (size_t)i * row_bytes,
               (uint8_t *)x->data + di_dtype_bytes(x->dtype, (size_t)(rows[i] * x->stride)), row_bytes);
        if (a.scale)
            memcpy(a.scale + (size_t)i * scales, x->scale + (size_t)rows[i] * scales, scales);
    }
    return a;
}

/* ---- sums
 * ----------------------------------------------------------------------------------------------------------------- */

/* Groups of 32; in a group one chain over the even and one over the odd inputs, each step rounding product and sum;
 * their sum to the total, groups rising. The volatile keeps a compiler from fusing or reordering anything. */
static inline float ops_dot32(const float *a, const float *b, int64_t n) {
    volatile float total = 0;
    for (int64_t g = 0; g < n; g += 32) {
        volatile float chain[2] = {0, 0};
        for (int64_t i = g; i < g + 32 && i < n; i++) {
            volatile float product = a[i] * b[i];
            chain[i % 2] = chain[i % 2] + product;
        }
        volatile float both = chain[0] + chain[1];
        total = total + both;
    }
    return total;
}

/* Bound of the error of a float sum of n rounded products whose magnitudes sum to `size`, in any order of addition. */
static inline double ops_sum_bound(int64_t n, double size) {
    return (double)(n + 1) * 0x1p-24 * size + 1e-37;
}
/* Half a unit of the last place of the output's format. */
static inline double ops_round_bound(di_dtype dtype, double v) {
    return fabs(v) * (dtype == DI_BF16 ? 0x1p-8 : 0x1p-23) + 1e-37;
}

static inline void ops_close(double got, double want, double bound) {
    if (!(fabs(got - want) <= bound))
        fail_msg("found %.9g, expected %.9g within %.3g", got, want, bound);
}

#endif
