/* Packing of rows into panels, decoding of weight tiles, and the inner loops of every portable product.
 *
 * The kernels are written with generic vectors of four floats and fixed numbers of accumulators (eight, which hides the
 * adder's latency and fits sixteen registers): panels of 16 rows x 2 outputs, 8 x 4, 4 x 8. A single row has no lanes
 * to fill, so its kernel runs the four independent chains of two groups side by side instead, for four outputs at a
 * time. */
#include "panel.h"

#include "vec.h"

/* ---- packing ---- */

void di_panel_fill(const float (*rows)[DI_TILE_IN], int lanes, int64_t count, float *dst) {
    for (int r = 0; r < lanes; r += 4) { /* 4 rows x 4 inputs at a time */
        for (int64_t k = 0; k < count; k += 4) {
            for (int64_t j = 0; j < 4; j++) {
                di_f4 v = {rows[r][k + j], rows[r + 1][k + j], rows[r + 2][k + j], rows[r + 3][k + j]};
                di_f4_store(dst + (k + j) * lanes + r, v);
            }
        }
    }
}

void di_panel_pack(const di_act *x, const int32_t *rows, int64_t row0, int n_rows, int lanes, int64_t col0,
                   int64_t n_in, int64_t k0, int64_t k_count, float *panel) {
    float buf[DI_PANEL_LANES][DI_TILE_IN];
    for (int64_t k1 = k0 + k_count; k0 < k1; k0 += DI_TILE_IN) {
        int64_t count = DI_MIN(k1 - k0, DI_TILE_IN), real = DI_MAX(DI_MIN(n_in - k0, count), 0);
        float *dst = panel + k0 * lanes;
        if (lanes == 1) {
            di_cpu_load(x, rows ? rows[0] : row0, col0 + k0, real, dst);
            memset(dst + real, 0, (size_t)(count - real) * sizeof *dst);
            continue;
        }
        for (int r = 0; r < lanes; r++) {
            if (r >= n_rows) {
                memset(buf[r], 0, sizeof buf[r]);
                continue;
            }
            di_cpu_load(x, rows ? rows[r] : row0 + r, col0 + k0, real, buf[r]);
            memset(buf[r] + real, 0, (size_t)(DI_TILE_IN - real) * sizeof *dst);
        }
        di_panel_fill((const float(*)[DI_TILE_IN])buf, lanes, count, dst);
    }
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

/* Inputs [k0, k0 + count) of weight row o as floats, zeros beyond n_in; k0 and count are multiples of 32. */
static void decode_row(const di_mat *w, int64_t o, int64_t k0, int64_t count, float *out) {
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

/* ---- kernels ---- */

/* Eight chains of one parity (0: even inputs, 1: odd) of one group, each from 0. The variables are written out because
 * they must be registers: neither compiler unrolls an array of them reliably. */
#define CHAINS(name) static inline void name(const float *x, const float *w, int64_t ldw, int parity, di_f4 *out)
#define CHAINS_BEGIN di_f4 c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0}, c4 = {0}, c5 = {0}, c6 = {0}, c7 = {0}
#define CHAINS_END                                                                                                     \
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3, out[4] = c4, out[5] = c5, out[6] = c6, out[7] = c7

CHAINS(chains_16x2) {
    CHAINS_BEGIN;
    for (int k = parity; k < 32; k += 2) {
        const float *v = x + k * 16;
        di_f4 v0 = di_f4_load(v), v1 = di_f4_load(v + 4), v2 = di_f4_load(v + 8), v3 = di_f4_load(v + 12);
        di_f4 s = di_f4_splat(w[k]);
        c0 += v0 * s, c1 += v1 * s, c2 += v2 * s, c3 += v3 * s;
        s = di_f4_splat(w[ldw + k]);
        c4 += v0 * s, c5 += v1 * s, c6 += v2 * s, c7 += v3 * s;
    }
    CHAINS_END;
}

CHAINS(chains_8x4) {
    CHAINS_BEGIN;
    for (int k = parity; k < 32; k += 2) {
        di_f4 v0 = di_f4_load(x + k * 8), v1 = di_f4_load(x + k * 8 + 4);
        di_f4 s = di_f4_splat(w[k]);
        c0 += v0 * s, c1 += v1 * s;
        s = di_f4_splat(w[ldw + k]);
        c2 += v0 * s, c3 += v1 * s;
        s = di_f4_splat(w[2 * ldw + k]);
        c4 += v0 * s, c5 += v1 * s;
        s = di_f4_splat(w[3 * ldw + k]);
        c6 += v0 * s, c7 += v1 * s;
    }
    CHAINS_END;
}

CHAINS(chains_4x8) {
    CHAINS_BEGIN;
    const float *w4 = w + 4 * ldw;
    for (int k = parity; k < 32; k += 2) {
        di_f4 v = di_f4_load(x + k * 4);
        c0 += v * di_f4_splat(w[k]), c1 += v * di_f4_splat(w[ldw + k]);
        c2 += v * di_f4_splat(w[2 * ldw + k]), c3 += v * di_f4_splat(w[3 * ldw + k]);
        c4 += v * di_f4_splat(w4[k]), c5 += v * di_f4_splat(w4[ldw + k]);
        c6 += v * di_f4_splat(w4[2 * ldw + k]), c7 += v * di_f4_splat(w4[3 * ldw + k]);
    }
    CHAINS_END;
}

/* acc += even chain + odd chain, group after group, for n_step outputs at a time. */
#define ADD_LANES(name, chains, lanes, n_step)                                                                         \
    static void name(const float *panel, const float *w, int64_t ldw, int n_out, int64_t n_groups, float *acc) {       \
        for (int o = 0; o < n_out; o += n_step) {                                                                      \
            float *a = acc + o * lanes;                                                                                \
            for (int64_t g = 0; g < n_groups; g++) {                                                                   \
                di_f4 even[8], odd[8];                                                                                 \
                chains(panel + g * 32 * lanes, w + o * ldw + g * 32, ldw, 0, even);                                    \
                chains(panel + g * 32 * lanes, w + o * ldw + g * 32, ldw, 1, odd);                                     \
                for (int i = 0; i < 8; i++)                                                                            \
                    di_f4_store(a + 4 * i, di_f4_load(a + 4 * i) + (even[i] + odd[i]));                                \
            }                                                                                                          \
        }                                                                                                              \
    }
ADD_LANES(add_16, chains_16x2, 16, 2)
ADD_LANES(add_8, chains_8x4, 8, 4)
ADD_LANES(add_4, chains_4x8, 4, 8)

/* One row: vector lanes are (even, odd) of a group and (even, odd) of the next. */
static void add_row(const float *x, const float *w, int64_t ldw, int n_out, int64_t n_groups, float *acc) {
    for (int o = 0; o < n_out; o += 4) {
        const float *w0 = w + o * ldw, *w1 = w0 + ldw, *w2 = w1 + ldw, *w3 = w2 + ldw;
        float s0 = acc[o], s1 = acc[o + 1], s2 = acc[o + 2], s3 = acc[o + 3];
        for (int64_t g = 0; g < n_groups; g += 2) {
            /* An odd last group is paired with itself; its second copy is not added. */
            int64_t at = g * 32, next = g + 1 < n_groups ? 32 : 0;
            di_f4 c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0};
            for (int64_t k = at; k < at + 32; k += 2) {
                di_f4 v = di_f4_pairs(x + k, x + k + next);
                c0 += v * di_f4_pairs(w0 + k, w0 + k + next);
                c1 += v * di_f4_pairs(w1 + k, w1 + k + next);
                c2 += v * di_f4_pairs(w2 + k, w2 + k + next);
                c3 += v * di_f4_pairs(w3 + k, w3 + k + next);
            }
            s0 += c0[0] + c0[1], s1 += c1[0] + c1[1], s2 += c2[0] + c2[1], s3 += c3[0] + c3[1];
            if (next)
                s0 += c0[2] + c0[3], s1 += c1[2] + c1[3], s2 += c2[2] + c2[3], s3 += c3[2] + c3[3];
        }
        acc[o] = s0, acc[o + 1] = s1, acc[o + 2] = s2, acc[o + 3] = s3;
    }
}

void di_panel_add(const float *panel, int lanes, const float *w, int64_t ldw, int n_out, int64_t n_groups, float *acc) {
    switch (lanes) {
    case 16:
        add_16(panel, w, ldw, n_out, n_groups, acc);
        break;
    case 8:
        add_8(panel, w, ldw, n_out, n_groups, acc);
        break;
    case 4:
        add_4(panel, w, ldw, n_out, n_groups, acc);
        break;
    default:
        add_row(panel, w, ldw, n_out, n_groups, acc);
        break;
    }
}

void di_panel_tile(const di_mat *w, int64_t o0, int n_out, const float *packed, int64_t n_rows, float *decoded,
                   float *acc) {
    int64_t n_in = w->n_in, padded = DI_ROUND_UP(n_in, 32);
    memset(acc, 0, sizeof *acc * DI_TILE_OUT * (size_t)di_panel_rows(n_rows));
    for (int64_t k0 = 0; k0 < padded; k0 += DI_TILE_IN) {
        int64_t count = DI_MIN(padded - k0, DI_TILE_IN);
        const float *tile = decoded;
        int64_t ldw = DI_TILE_IN;
        if (w->dtype == DI_F32 && n_out % 8 == 0 && k0 + count <= n_in) { /* floats are read where they are */
            tile = (const float *)w->data + o0 * n_in + k0;
            ldw = n_in;
        } else {
            for (int o = 0; o < n_out; o++)
                decode_row(w, o0 + o, k0, count, decoded + o * ldw);
            for (int o = n_out; o % 8; o++)
                memset(decoded + o * ldw, 0, (size_t)count * sizeof *decoded);
        }
        float *a = acc;
        for (int64_t r = 0; r < n_rows;) {
            int lanes = di_panel_lanes(n_rows - r);
            di_panel_add(packed + r * padded + k0 * lanes, lanes, tile, ldw, n_out, count / 32, a);
            a += DI_TILE_OUT * lanes;
            r += lanes;
        }
    }
}
