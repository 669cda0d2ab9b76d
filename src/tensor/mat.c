/* Dtypes, rows of stored matrices, cache records, and the one order of sums.
 *
 * Everything here reads views; nothing owns memory. di_dot32 is the definition of the sum order: fast products in the
 * backends must give its bits, and the tests compare them with it. */
#include "tensor.h"

/* ---- dtypes ------------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    uint8_t bits;
} dtypes[DI_DTYPE_COUNT] = {
    [DI_F32] = {"F32", 32},        [DI_BF16] = {"BF16", 16}, [DI_F8_E4M3] = {"F8_E4M3", 8},
    [DI_F8_E8M0] = {"F8_E8M0", 8}, [DI_F4_E2M1] = {"F4", 4}, [DI_I8] = {"I8", 8},
    [DI_U8] = {"U8", 8},           [DI_I32] = {"I32", 32},   [DI_I64] = {"I64", 64},
};

const char *di_dtype_name(di_dtype dtype) {
    return (unsigned)dtype < DI_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

bool di_dtype_parse(const char *name, size_t len, di_dtype *out) {
    for (int i = 0; i < DI_DTYPE_COUNT; i++) {
        if (strlen(dtypes[i].name) == len && memcmp(dtypes[i].name, name, len) == 0) {
            *out = (di_dtype)i;
            return true;
        }
    }
    return false;
}

size_t di_dtype_bytes(di_dtype dtype, size_t n_elements) {
    unsigned bits = dtypes[dtype].bits;
    return bits == 4 ? n_elements / 2 + n_elements % 2 : n_elements * (bits / 8);
}

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

void di_mat_row(const di_mat *mat, int64_t row, float *out) {
    int64_t n = mat->n_in;
    switch (mat->dtype) {
    case DI_F32:
        memcpy(out, (const float *)mat->data + row * n, (size_t)n * sizeof(float));
        return;
    case DI_BF16: {
        const uint16_t *h = (const uint16_t *)mat->data + row * n;
        for (int64_t i = 0; i < n; i++)
            out[i] = di_bf16_to_f32(h[i]);
        return;
    }
    case DI_F8_E4M3: {
        const uint8_t *codes = (const uint8_t *)mat->data + row * n;
        const uint8_t *scale = mat->scale + row / 32 * DI_CEIL_DIV(n, 32);
        for (int64_t i0 = 0; i0 < n; i0 += 32) {
            float s = di_e8m0_to_f32(scale[i0 / 32]);
            for (int64_t i = i0; i < DI_MIN(i0 + 32, n); i++)
                out[i] = di_e4m3_to_f32(codes[i]) * s;
        }
        return;
    }
    case DI_F4_E2M1:
        di_dequant_qi((const uint8_t *)mat->data + row * (n / 2), mat->scale + row * (n / 32), n, out);
        return;
    default:
        DI_ASSERT(mat->dtype == DI_F32); /* no other dtype makes a matrix */
    }
}

/* ---- cache records ----------------------------------------------------------------------------------------------- */

size_t di_kv_data_bytes(di_kv_format format, int64_t n) {
    switch (format) {
    case DI_KV_F32:
        return (size_t)n * 4;
    case DI_KV_FP8:
        return (size_t)n;
    case DI_KV_FP4:
    case DI_KV_MX4:
        return (size_t)n / 2;
    }
    return 0;
}

size_t di_kv_scale_bytes(di_kv_format format, int64_t n) {
    switch (format) {
    case DI_KV_F32:
        return 0;
    case DI_KV_FP8:
    case DI_KV_MX4:
        return (size_t)n / 32;
    case DI_KV_FP4:
        return (size_t)n / 16;
    }
    return 0;
}

void di_kv_encode(di_kv_format format, const float *x, int64_t n, uint8_t *data, uint8_t *scale) {
    switch (format) {
    case DI_KV_F32:
        memcpy(data, x, (size_t)n * 4);
        break;
    case DI_KV_FP8:
        di_quant_qa(x, n, data, scale);
        break;
    case DI_KV_FP4:
        di_quant_qk(x, n, data, scale);
        break;
    case DI_KV_MX4:
        di_quant_qi(x, n, data, scale);
        break;
    }
}

void di_kv_decode(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t n, float *x) {
    switch (format) {
    case DI_KV_F32:
        memcpy(x, data, (size_t)n * 4);
        break;
    case DI_KV_FP8:
        di_dequant_qa(data, scale, n, x);
        break;
    case DI_KV_FP4:
        di_dequant_qk(data, scale, n, x);
        break;
    case DI_KV_MX4:
        di_dequant_qi(data, scale, n, x);
        break;
    }
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

/* One group: two chains from 0, over the even and over the odd inputs. */
static inline float group_sum(const float *a, const float *b, int n) {
    float even = 0.0f, odd = 0.0f;
    for (int i = 0; i + 1 < n; i += 2) {
        even += a[i] * b[i];
        odd += a[i + 1] * b[i + 1];
    }
    if (n & 1)
        even += a[n - 1] * b[n - 1];
    return even + odd;
}

float di_dot32(const float *a, const float *b, int64_t n) {
    float acc = 0.0f;
    int64_t i = 0;
    /* Four groups at a time: their chains are independent, so that the adder's latency is hidden. */
    for (; i + 128 <= n; i += 128) {
        float e[4] = {0}, o[4] = {0};
        for (int k = 0; k < 32; k += 2) {
            for (int g = 0; g < 4; g++) {
                e[g] += a[i + 32 * g + k] * b[i + 32 * g + k];
                o[g] += a[i + 32 * g + k + 1] * b[i + 32 * g + k + 1];
            }
        }
        for (int g = 0; g < 4; g++)
            acc += e[g] + o[g];
    }
    for (; i < n; i += 32)
        acc += group_sum(a + i, b + i, (int)DI_MIN(32, n - i));
    return acc;
}
