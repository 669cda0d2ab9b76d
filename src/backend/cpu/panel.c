/* What products by panels of every level share: weight rows as floats, and sizes of scratch. */
#include "panel.h"

#include "vec.h"

enum { PACKED_BYTES_MAX = 64 << 20 };

size_t di_panel_gemm_bytes(int64_t rows_max, int64_t n_in_max) {
    size_t row = (size_t)di_panel_floats(1, n_in_max) * sizeof(float);
    return DI_MAX(DI_MIN((size_t)rows_max * row, (size_t)PACKED_BYTES_MAX), row);
}

void di_cpu_need_panel_gemm(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need_raise(need, di_panel_gemm_bytes(limits->rows_max, limits->n_in_max),
                      di_panel_worker_bytes(DI_PART_TILES));
}

/* ---- decoding ---- */

/* Both values of a byte of two E2M1 codes, the low nibble's first. */
#define PAIR(lo, hi)                                                                                                   \
    { lo, hi }
#define PAIR_ROW(hi)                                                                                                   \
    PAIR(0.0f, hi), PAIR(0.5f, hi), PAIR(1.0f, hi), PAIR(1.5f, hi), PAIR(2.0f, hi), PAIR(3.0f, hi), PAIR(4.0f, hi),    \
        PAIR(6.0f, hi), PAIR(-0.0f, hi), PAIR(-0.5f, hi), PAIR(-1.0f, hi), PAIR(-1.5f, hi), PAIR(-2.0f, hi),           \
        PAIR(-3.0f, hi), PAIR(-4.0f, hi), PAIR(-6.0f, hi)
static const float e2m1_pairs[256][2] = {
    PAIR_ROW(0.0f),  PAIR_ROW(0.5f),  PAIR_ROW(1.0f),  PAIR_ROW(1.5f),  PAIR_ROW(2.0f),  PAIR_ROW(3.0f),
    PAIR_ROW(4.0f),  PAIR_ROW(6.0f),  PAIR_ROW(-0.0f), PAIR_ROW(-0.5f), PAIR_ROW(-1.0f), PAIR_ROW(-1.5f),
    PAIR_ROW(-2.0f), PAIR_ROW(-3.0f), PAIR_ROW(-4.0f), PAIR_ROW(-6.0f),
};
#undef PAIR_ROW
#undef PAIR

static void decode_e2m1_32(const uint8_t *packed, uint8_t scale, float *out) {
    if (scale == 0) {
        for (int i = 0; i < 32; i++)
            out[i] = di_cpu_scaled(e2m1_pairs[packed[i / 2]][i & 1], 0);
        return;
    }
    di_f4 s = di_f4_splat(di_e8m0_to_f32(scale));
    for (int i = 0; i < 16; i += 2) {
        di_f4_store(out + 2 * i, di_f4_pairs(e2m1_pairs[packed[i]], e2m1_pairs[packed[i + 1]]) * s);
    }
}

void di_panel_decode_row(const di_mat *w, int64_t o, int64_t k0, int64_t count, float *out) {
    int64_t n_in = w->n_in, real = DI_MIN(n_in - k0, count), at = o * n_in + k0;
    switch (w->dtype) {
    case DI_F32:
        memcpy(out, (const float *)w->data + at, (size_t)real * sizeof *out);
        break;
    case DI_BF16:
        di_cpu_bf16_to_f32((const uint16_t *)w->data + at, real, out);
        break;
    case DI_F8_E4M3: {
        const uint8_t *codes = (const uint8_t *)w->data + at;
        const uint8_t *scale = w->scale + o / 32 * DI_CEIL_DIV(n_in, 32) + k0 / 32;
        int64_t k = 0;
        for (; k + 32 <= real; k += 32)
            di_cpu_e4m3_32(codes + k, scale[k / 32], out + k);
        for (; k < real; k++)
            out[k] = di_cpu_scaled(di_e4m3_to_f32(codes[k]), scale[k / 32]);
        break;
    }
    default: { /* DI_F4_E2M1: n_in is a multiple of 32 */
        const uint8_t *packed = (const uint8_t *)w->data + at / 2;
        const uint8_t *scale = w->scale + o * (n_in / 32) + k0 / 32;
        for (int64_t k = 0; k < real; k += 32)
            decode_e2m1_32(packed + k / 2, scale[k / 32], out + k);
        break;
    }
    }
    if (real < count)
        memset(out + real, 0, (size_t)(count - real) * sizeof *out);
}
