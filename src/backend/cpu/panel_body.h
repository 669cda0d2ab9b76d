/* The inner loops of products by tiles (panel.h), at the width of the level that includes this.
 *
 * A block is a few rows by a few vectors of outputs, whose chains are registers: per input one load of each weight
 * vector and one broadcast of each row's activation. Even and odd chains go side by side where both fit the registers,
 * else one after the other. Included after lanes_<level>.h. */
#ifndef DI_CPU_PANEL_BODY_H
#define DI_CPU_PANEL_BODY_H

#include "act_body.h"
#include "panel.h"

#if DI_HAS_BYTES
#include "lanes_bytes.h"
#endif

/* ---- packing ---- */

/* Inputs [k0, k0 + count) of a row, from column col0 on, into a packed block whose row begins at dst; k0 is a multiple
 * of DI_TILE_IN, inputs at or beyond n_in are zeros up to a multiple of 32. block: floats from a block to the next. */
static inline void panel_pack(const di_act *x, int64_t row, int64_t col0, int64_t n_in, int64_t k0, int64_t count,
                              int64_t block, float *dst) {
    for (int64_t k = k0; k < k0 + count; k += DI_TILE_IN, dst += block) {
        int64_t real = DI_MAX(DI_MIN(n_in - k, DI_TILE_IN), 0);
        row_load(x, row, col0 + k, real, dst);
        for (int64_t i = real; i % 32; i++)
            dst[i] = 0.0f;
    }
}

/* ---- tiles ---- */

/* tile[k][o] = rows[o][k] for four outputs and a multiple of 4 of inputs. */
static inline void transpose_4(const float *rows, int64_t stride, int64_t count, float *tile) {
    for (int64_t k = 0; k < count; k += 4) {
        di_f4 a = di_f4_load(rows + k), b = di_f4_load(rows + stride + k);
        di_f4 c = di_f4_load(rows + 2 * stride + k), d = di_f4_load(rows + 3 * stride + k);
        di_f4 ab_lo = di_f4_shuffle(a, b, 0, 4, 1, 5), ab_hi = di_f4_shuffle(a, b, 2, 6, 3, 7);
        di_f4 cd_lo = di_f4_shuffle(c, d, 0, 4, 1, 5), cd_hi = di_f4_shuffle(c, d, 2, 6, 3, 7);
        float *out = tile + k * DI_TILE_OUT;
        di_f4_store(out, di_f4_shuffle(ab_lo, cd_lo, 0, 1, 4, 5));
        di_f4_store(out + DI_TILE_OUT, di_f4_shuffle(ab_lo, cd_lo, 2, 3, 6, 7));
        di_f4_store(out + 2 * DI_TILE_OUT, di_f4_shuffle(ab_hi, cd_hi, 0, 1, 4, 5));
        di_f4_store(out + 3 * DI_TILE_OUT, di_f4_shuffle(ab_hi, cd_hi, 2, 3, 6, 7));
    }
}

/* Any weights as floats with their scales, row by row. buf [4 * DI_TILE_IN]. */
static void tile_floats(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, float *buf, float *tile) {
    for (int o = 0; o < n_out; o += 4) {
        int n = DI_MIN(n_out - o, 4);
        if (w->dtype == DI_F32 && n == 4 && k0 + count <= w->n_in) { /* floats are read where they are */
            transpose_4((const float *)w->data + (o0 + o) * w->n_in + k0, w->n_in, count, tile + o);
            continue;
        }
        for (int i = 0; i < 4; i++)
            di_panel_decode_row(w, o0 + o + (i < n ? i : 0), k0, count, buf + i * DI_TILE_IN);
        transpose_4(buf, DI_TILE_IN, count, tile + o);
    }
}

#if DI_HAS_BYTES
/* The groups' scales [group][output] times 2^up; false when one of them is too near the ends of its range. */
static bool tile_scales(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, int up, float *out) {
    int64_t n = count / 32, per_row = w->n_in / 32;
    uint8_t least = 255, most = 0;
    if (w->dtype == DI_F8_E4M3 && o0 % 32 == 0) { /* one scale block */
        const uint8_t *scale = w->scale + o0 / 32 * per_row + k0 / 32;
        for (int64_t g = 0; g < n; g++) {
            least = DI_MIN(least, scale[g]);
            most = DI_MAX(most, scale[g]);
            di_v s = di_v_splat(di_f32_from_bits((uint32_t)(scale[g] + up) << 23));
            for (int o = 0; o < DI_TILE_OUT; o += DI_LANES)
                di_v_store(out + g * DI_TILE_OUT + o, s);
        }
        return least >= DI_W_SCALE_LOW && most <= DI_SCALE_HIGH;
    }
    int32_t bytes[DI_TILE_OUT]; /* the scales of a row's four groups */
    for (int o = 0; o < DI_TILE_OUT; o++) {
        int64_t row = row_of(o0, n_out, o);
        const uint8_t *scale = w->scale + (w->dtype == DI_F8_E4M3 ? row / 32 : row) * per_row + k0 / 32;
        if (n == 4)
            memcpy(&bytes[o], scale, 4);
        else
            memcpy(&bytes[o], (uint8_t[4]){scale[0], scale[n > 1], scale[n > 2 ? 2 : 0], 127}, 4);
    }
    di_vi is_out_of_range = {0};
    for (int64_t g = 0; g < n; g++) {
        for (int o = 0; o < DI_TILE_OUT; o += DI_LANES) {
            di_vi b;
            memcpy(&b, bytes + o, sizeof b);
            b = (b >> (int32_t)(8 * g)) & 255;
            is_out_of_range |= (b < DI_W_SCALE_LOW) | (b > DI_SCALE_HIGH);
            di_v_store(out + g * DI_TILE_OUT + o, (di_v)((b + up) << 23));
        }
    }
    for (int i = 0; i < DI_LANES; i++)
        most |= is_out_of_range[i] != 0;
    return most == 0;
}

/* Codes without scales, where weights and activations allow it. They are made as fp16 in the upper half of the tile and
 * widened from its start on, so that a value is read before its place is written: for the rows of a block, widening
 * them again and again would take more time than the wider loads. */
static bool tile_codes(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, float *tile, float *scale) {
    uint16_t *halves = (uint16_t *)(void *)tile + DI_TILE_OUT * DI_TILE_IN;
    if (k0 + count > w->n_in || w->n_in % 32)
        return false;
    if (w->dtype == DI_F4_E2M1) {
        if (!tile_scales(w, o0, n_out, k0, count, 0, scale))
            return false;
        halves_of_e2m1(w, o0, n_out, k0, count, halves);
    } else if (w->dtype != DI_F8_E4M3 || !tile_scales(w, o0, n_out, k0, count, 8, scale) ||
               !halves_of_e4m3(w, o0, n_out, k0, count, halves)) {
        return false;
    }
    for (int64_t i = 0; i < count * DI_TILE_OUT; i += DI_LANES)
        di_v_store(tile + i, di_v_load_half(halves + i));
    return true;
}
#else
static bool tile_codes(const di_mat *w, int64_t o0, int n_out, int64_t k0, int64_t count, float *tile, float *scale) {
    (void)w, (void)o0, (void)n_out, (void)k0, (void)count, (void)tile, (void)scale;
    return false;
}
#endif

/* ---- blocks ---- */

#define UNROLLED _Pragma("GCC unroll 16")

typedef struct chains {
    di_v v[DI_BLOCK_ROWS][DI_BLOCK_VECS];
} chains;

/* One input: is_fused is exact for codes, and allowed in free order. */
DI_INLINE void add_input(chains *c, const float *x, const float *tile, int64_t k, int n_rows, bool is_fused) {
    di_v w[DI_BLOCK_VECS];
    UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) w[i] = di_v_load(tile + k * DI_TILE_OUT + i * DI_LANES);
    UNROLLED for (int r = 0; r < n_rows; r++) {
        di_v s = di_v_splat(x[r * DI_TILE_IN + k]);
        UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) {
#if DI_HAS_BYTES
            c->v[r][i] = is_fused ? di_v_fma(s, w[i], c->v[r][i]) : c->v[r][i] + s * w[i];
#else
            (void)is_fused;
            c->v[r][i] += s * w[i];
#endif
        }
    }
}

/* acc[row][output] += even chain + odd chain, times the group's scale where is_coded, group after group. n_rows and
 * is_coded are constants where this is called. */
DI_INLINE void add_block(const float *x, const float *tile, const float *scale, int64_t n_groups, int n_rows,
                         bool is_coded, float *acc) {
    for (int64_t g = 0; g < n_groups; g++) {
        const float *xg = x + g * 32, *tg = tile + g * 32 * DI_TILE_OUT;
        chains even, odd;
        UNROLLED for (int r = 0; r < n_rows; r++) {
            UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) even.v[r][i] = odd.v[r][i] = (di_v){0};
        }
        if (n_rows <= 2 || 2 * n_rows <= DI_BLOCK_ROWS) {
            for (int k = 0; k < 32; k += 2) {
                add_input(&even, xg, tg, k, n_rows, is_coded);
                add_input(&odd, xg, tg, k + 1, n_rows, is_coded);
            }
        } else {
            for (int k = 0; k < 32; k += 2)
                add_input(&even, xg, tg, k, n_rows, is_coded);
            for (int k = 1; k < 32; k += 2)
                add_input(&odd, xg, tg, k, n_rows, is_coded);
        }
        UNROLLED for (int r = 0; r < n_rows; r++) {
            UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) {
                float *at = acc + r * DI_TILE_OUT + i * DI_LANES;
                di_v sum = even.v[r][i] + odd.v[r][i], all = di_v_load(at);
#if DI_HAS_BYTES
                if (is_coded) /* the product is exact: fused or not, the sum is the same */
                    all = di_v_fma(sum, di_v_load(scale + g * DI_TILE_OUT + i * DI_LANES), all);
                else
                    all += sum;
#else
                (void)scale;
                all += sum;
#endif
                di_v_store(at, all);
            }
        }
    }
}

/* acc[row][output] += all products in one chain of each output. */
DI_INLINE void add_block_free(const float *x, const float *tile, int64_t n_groups, int n_rows, float *acc) {
    chains c;
    UNROLLED for (int r = 0; r < n_rows; r++) {
        UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) c.v[r][i] = (di_v){0};
    }
    for (int64_t k = 0; k < 32 * n_groups; k++)
        add_input(&c, x, tile, k, n_rows, true);
    UNROLLED for (int r = 0; r < n_rows; r++) {
        UNROLLED for (int i = 0; i < DI_BLOCK_VECS; i++) {
            float *at = acc + r * DI_TILE_OUT + i * DI_LANES;
            di_v_store(at, di_v_load(at) + c.v[r][i]);
        }
    }
}

/* How a tile is added. */
typedef enum panel_kind {
    PANEL_FLOATS, /* in order, each product rounded */
    PANEL_CODES,  /* in order; products are exact, and each group's sum is multiplied by its scale */
    PANEL_FREE    /* in whatever order is fastest; blocks of one or two rows stay in order */
} panel_kind;

#define ADD_BLOCK(rows)                                                                                                \
    static __attribute__((noinline)) void add_block_##rows(const float *x, const float *tile, const float *scale,      \
                                                           int64_t n_groups, panel_kind kind, float *acc) {            \
        if (kind == PANEL_CODES)                                                                                       \
            add_block(x, tile, scale, n_groups, rows, true, acc);                                                      \
        else if (kind == PANEL_FREE && rows > 2)                                                                       \
            add_block_free(x, tile, n_groups, rows, acc);                                                              \
        else                                                                                                           \
            add_block(x, tile, scale, n_groups, rows, false, acc);                                                     \
    }
ADD_BLOCK(1)
ADD_BLOCK(2)
#if DI_BLOCK_ROWS >= 4
ADD_BLOCK(4)
#endif
#if DI_BLOCK_ROWS >= 6
ADD_BLOCK(6)
#endif
#if DI_BLOCK_ROWS >= 12
ADD_BLOCK(12)
#endif

/* acc [n_rows][32] += products of n_groups groups of rows, packed [row][DI_TILE_IN], with a tile. */
static void panel_add(const float *x, int64_t n_rows, const float *tile, const float *scale, int64_t n_groups,
                      int n_out, panel_kind kind, float *acc) {
    enum { BLOCK_OUT = DI_BLOCK_VECS * DI_LANES };
    for (int o = 0; o < n_out; o += BLOCK_OUT) {
        const float *t = tile + o, *s = scale + o;
        int64_t r = 0;
#define WHILE_ROWS(rows)                                                                                               \
    for (; n_rows - r >= rows; r += rows)                                                                              \
    add_block_##rows(x + r * DI_TILE_IN, t, s, n_groups, kind, acc + r * DI_TILE_OUT + o)
#if DI_BLOCK_ROWS >= 12
        if (kind != PANEL_CODES) /* those are faster with both chains in registers */
            WHILE_ROWS(12);
#endif
#if DI_BLOCK_ROWS >= 6
        WHILE_ROWS(6);
#endif
#if DI_BLOCK_ROWS >= 4
        WHILE_ROWS(4);
#endif
        WHILE_ROWS(2);
        WHILE_ROWS(1);
#undef WHILE_ROWS
    }
}

/* ---- products ---- */

/* A worker's scratch for them. */
typedef struct panel_scratch {
    float *tile, *scale, *rows;
} panel_scratch;

static inline panel_scratch panel_scratch_take(uint8_t **at) {
    panel_scratch s;
    s.tile = di_cpu_take(at, sizeof(float) * DI_TILE_OUT * DI_TILE_IN);
    s.scale = di_cpu_take(at, sizeof(float) * DI_TILE_OUT * (DI_TILE_IN / 32));
    s.rows = di_cpu_take(at, sizeof(float) * 4 * DI_TILE_IN);
    return s;
}

/* Codes times their groups' scales. */
static void tile_scale(float *tile, const float *scale, int64_t count) {
    for (int64_t k = 0; k < count; k++, tile += DI_TILE_OUT) {
        for (int o = 0; o < DI_TILE_OUT; o += DI_LANES)
            di_v_store(tile + o, di_v_load(tile + o) * di_v_load(scale + k / 32 * DI_TILE_OUT + o));
    }
}

/* acc [n_rows][32] = products of n_out rows of w from o0 on with n_rows <= 128 rows packed at x, whose blocks lie
 * `block` floats apart; every 32 rows of w have sums of their own, [DI_ROW_BLOCK][32] apart. is_coded: the activations
 * are E4M3 codes whose scales fit (di_panel_x_fits). is_free: the order of sums is not promised. */
static inline void panel_product(const di_mat *w, int64_t o0, int n_out, const float *x, int64_t block, int64_t n_rows,
                                 bool is_coded, bool is_free, const panel_scratch *s, float *acc) {
    int64_t padded = DI_ROUND_UP(w->n_in, 32);
    for (int o = 0; o < n_out; o += DI_TILE_OUT)
        memset(acc + o * DI_ROW_BLOCK, 0, sizeof *acc * DI_TILE_OUT * (size_t)n_rows);
    for (int64_t k0 = 0; k0 < padded; k0 += DI_TILE_IN, x += block) {
        int64_t count = DI_MIN(padded - k0, DI_TILE_IN);
        for (int o = 0; o < n_out; o += DI_TILE_OUT) {
            int n = DI_MIN(n_out - o, DI_TILE_OUT);
            panel_kind kind = is_free ? PANEL_FREE : PANEL_FLOATS;
            bool has_codes = is_coded && tile_codes(w, o0 + o, n, k0, count, s->tile, s->scale);
            if (!has_codes) {
#if DI_HAS_BYTES
                if (w->dtype == DI_BF16 && k0 + count <= w->n_in)
                    floats_of_bf16(w, o0 + o, n, k0, count, s->tile);
                else
#endif
                    tile_floats(w, o0 + o, n, k0, count, s->rows, s->tile);
            }
            if (has_codes && is_free && n_rows > 2)
                tile_scale(s->tile, s->scale, count);
            else if (has_codes)
                kind = PANEL_CODES;
            panel_add(x, n_rows, s->tile, s->scale, count / 32, n, kind, acc + o * DI_ROW_BLOCK);
        }
    }
}

#endif
