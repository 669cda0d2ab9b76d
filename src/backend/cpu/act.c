/* Rows of activations as floats and back, matrix rows as floats, and the fast form of di_dot32.
 *
 * Every kernel reads its inputs as floats and stores them rounded once, through these functions, so that the element
 * formats are decided in one place. All of it holds under flush-to-zero. */
#include "cpu.h"
#include "vec.h"

void di_cpu_bf16_to_f32(const uint16_t *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = di_bf16_to_f32(x[i]);
}

void di_cpu_f32_to_bf16(const float *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = di_f32_to_bf16(x[i]);
}

void di_cpu_load(const di_act *x, int64_t row, int64_t col, int64_t n, float *out) {
    int64_t at = row * x->stride + col;
    if (x->dtype == DI_F32) {
        memcpy(out, (const float *)x->data + at, (size_t)n * sizeof *out);
    } else if (x->dtype == DI_BF16) {
        di_cpu_bf16_to_f32((const uint16_t *)x->data + at, n, out);
    } else {
        const uint8_t *codes = (const uint8_t *)x->data + at;
        const uint8_t *scale = x->scale + row * (x->n_cols / 32) + col / 32;
        for (int64_t i = 0; i < n; i += 32)
            di_cpu_e4m3_32(codes + i, scale[i / 32], out + i);
    }
}

const float *di_cpu_row(const di_act *x, int64_t row, int64_t col, int64_t n, float *buf) {
    if (x->dtype == DI_F32)
        return (const float *)x->data + row * x->stride + col;
    di_cpu_load(x, row, col, n, buf);
    return buf;
}

void di_cpu_store(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v) {
    int64_t at = row * out->stride + col;
    if (out->dtype == DI_F32) {
        memcpy((float *)out->data + at, v, (size_t)n * sizeof *v);
    } else {
        di_cpu_f32_to_bf16(v, n, (uint16_t *)out->data + at);
    }
}

void di_cpu_mat_row(const di_mat *mat, int64_t row, float *out) {
    int64_t n = mat->n_in;
    switch (mat->dtype) {
    case DI_F32:
        memcpy(out, (const float *)mat->data + row * n, (size_t)n * sizeof *out);
        break;
    case DI_BF16:
        di_cpu_bf16_to_f32((const uint16_t *)mat->data + row * n, n, out);
        break;
    case DI_F8_E4M3: {
        const uint8_t *codes = (const uint8_t *)mat->data + row * n;
        const uint8_t *scale = mat->scale + row / 32 * DI_CEIL_DIV(n, 32);
        for (int64_t i = 0; i < n; i++)
            out[i] = di_cpu_scaled(di_e4m3_to_f32(codes[i]), scale[i / 32]);
        break;
    }
    default: { /* DI_F4_E2M1, by di_cpu_is_mat */
        const uint8_t *packed = (const uint8_t *)mat->data + row * (n / 2);
        const uint8_t *scale = mat->scale + row * (n / 32);
        for (int64_t i = 0; i < n; i++) {
            uint8_t code = i % 2 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
            out[i] = di_cpu_scaled(di_e2m1_to_f32(code), scale[i / 32]);
        }
        break;
    }
    }
}

/* Two groups of 32 run side by side in one vector, as (even, odd) of the first and (even, odd) of the second: chains of
 * different groups don't depend on each other, so the order of every sum is di_dot32's. */
float di_cpu_dot32(const float *a, const float *b, int64_t n) {
    float sum = 0.0f;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        di_f4 chain = {0};
        for (int k = 0; k < 32; k += 2) {
            chain += di_f4_pairs(a + i + k, a + i + k + 32) * di_f4_pairs(b + i + k, b + i + k + 32);
        }
        sum += chain[0] + chain[1];
        sum += chain[2] + chain[3];
    }
    for (; i < n; i += 32) {
        float chain[2] = {0.0f, 0.0f};
        int64_t end = DI_MIN(i + 32, n);
        for (int64_t k = i; k < end; k++)
            chain[(k - i) & 1] += a[k] * b[k];
        sum += chain[0] + chain[1];
    }
    return sum;
}

void di_cpu_dot32_rows(const float *a, const float *b, int64_t stride, int64_t n, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const float *b0 = b + i * stride, *b1 = b0 + stride, *b2 = b1 + stride, *b3 = b2 + stride;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int64_t at = 0;
        for (; at + 64 <= n; at += 64) {
            di_f4 c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0};
            for (int64_t k = at; k < at + 32; k += 2) {
                di_f4 v = di_f4_pairs(a + k, a + k + 32);
                c0 += v * di_f4_pairs(b0 + k, b0 + k + 32);
                c1 += v * di_f4_pairs(b1 + k, b1 + k + 32);
                c2 += v * di_f4_pairs(b2 + k, b2 + k + 32);
                c3 += v * di_f4_pairs(b3 + k, b3 + k + 32);
            }
            sum[0] += c0[0] + c0[1], sum[0] += c0[2] + c0[3];
            sum[1] += c1[0] + c1[1], sum[1] += c1[2] + c1[3];
            sum[2] += c2[0] + c2[1], sum[2] += c2[2] + c2[3];
            sum[3] += c3[0] + c3[1], sum[3] += c3[2] + c3[3];
        }
        for (; at < n; at += 32) {
            int64_t left = DI_MIN(n - at, 32);
            for (int j = 0; j < 4; j++) {
                float chain[2] = {0.0f, 0.0f};
                for (int64_t k = 0; k < left; k++)
                    chain[k & 1] += a[at + k] * b[(i + j) * stride + at + k];
                sum[j] += chain[0] + chain[1];
            }
        }
        memcpy(out + i, sum, sizeof sum);
    }
    for (; i < count; i++)
        out[i] = di_cpu_dot32(a, b + i * stride, n);
}
