/* Products by tiles: the fast form of the sum order of model.md 0.3. Private to backend/cpu.
 *
 * The sums of one output are a fixed chain, so speed comes from running many outputs side by side. Weights are decoded
 * into a tile [128 inputs][32 outputs], L1-sized, once for up to 128 rows; outputs fill vector lanes, and each
 * activation is multiplied into all of them. Each lane adds in the order of di_dot32, so that neither the width of a
 * vector nor the rows beside a row can change a bit.
 *
 *     activations, as floats:  [block of 128 inputs][row][128]       inputs padded with zeros to a multiple of 32
 *     tile of weights:         [128 inputs][32 outputs]
 *     sums:                    [row][32 outputs], tile after tile
 *
 * Where activations are E4M3 codes and weights E4M3 or E2M1, the tile holds the weights' codes without their scales. A
 * scale is a power of two and belongs to a whole group of 32 inputs, so it multiplies the group's sum instead of its
 * terms: nothing in between rounds otherwise as long as all lies far from the ends of the exponents' range. Both scales
 * are checked for that; the few that fail take the way of exact activations, term by term. In the checked range a
 * product of two codes is exact and normal, and a fused step gives the bits of two. */
#ifndef DI_CPU_PANEL_H
#define DI_CPU_PANEL_H

#include "cpu.h"

enum {
    DI_TILE_OUT = 32,   /* outputs of a tile: also the height of a weight's scale block and the group of QA */
    DI_TILE_IN = 128,   /* inputs decoded at a time */
    DI_ROW_BLOCK = 128, /* rows that share a decoded tile */
    DI_PART_TILES = 4,  /* tiles that a part of gemm makes of many rows, so that these come out of the second-level */
    DI_PART_ROWS = 64,  /* cache for all but the first; many: more than this */
    DI_PACK_ROWS = 16,  /* rows and inputs that a part of a job packs */
    DI_PACK_IN = 1024,
    /* E8M0 bytes between which scales may be left to the end of a group; the lowest of activations is QA's least. Codes
     * are multiples of 2^-9, so with a scale of 2^-22 and one of 2^-86 no term lies below 2^-126; at the upper end sums
     * stay below 2^90. */
    DI_X_SCALE_LOW = 105,
    DI_W_SCALE_LOW = 41,
    DI_SCALE_HIGH = 160
};

/* Floats of n rows of n_in inputs, packed. */
static inline int64_t di_panel_floats(int64_t n_rows, int64_t n_in) {
    return n_rows * DI_ROUND_UP(n_in, DI_TILE_IN);
}

/* Bytes of scratch that a worker needs for products with `n_acc` blocks of sums. */
static inline size_t di_panel_worker_bytes(int n_acc) {
    size_t tile = di_cpu_piece(sizeof(float) * DI_TILE_OUT * DI_TILE_IN);
    return tile + di_cpu_piece(sizeof(float) * DI_TILE_OUT * (DI_TILE_IN / 32)) +
           di_cpu_piece(sizeof(float) * 4 * DI_TILE_IN) +
           (size_t)n_acc * di_cpu_piece(sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
}

/* Whether the scales of activations allow leaving those of the weights to the end of a group. */
static inline bool di_panel_x_fits(const uint8_t *scale, int64_t n) {
    uint8_t least = 255, most = 0;
    for (int64_t i = 0; i < n; i++) {
        least = scale[i] < least ? scale[i] : least;
        most = scale[i] > most ? scale[i] : most;
    }
    return n == 0 || (least >= DI_X_SCALE_LOW && most <= DI_SCALE_HIGH);
}

/* Scratch of gemm's packed rows; capped, so passes may be needed. (panel.c) */
size_t di_panel_gemm_bytes(int64_t rows_max, int64_t n_in_max);
void di_cpu_need_panel_gemm(const di_limits *limits, di_cpu_need *need); /* panel.c */
/* Inputs [k0, k0 + count) of weight row o as floats, zeros beyond n_in; k0 and count are multiples of 32. (panel.c) */
void di_panel_decode_row(const di_mat *w, int64_t o, int64_t k0, int64_t count, float *out);

bool di_cpu_gemm_fits(const di_gemm_args *a); /* ref_gemm.c */

#endif
