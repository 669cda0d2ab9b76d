/* Products by panels: the fast form of the sum order of model.md 0.3 in plain C. Private to backend/cpu.
 *
 * The sums of one output are a fixed chain, so speed comes from running many outputs side by side. Rows of activations
 * are packed into panels of 16, 8, 4 or 1 rows, input-major: element k of the panel's rows lies side by side and fills
 * vector lanes. Weights are decoded to floats tile by tile (32 outputs x 128 inputs, L1-sized), once for up to 128
 * rows, and each weight is multiplied into all lanes. Each lane adds in the order of di_dot32: every width gives the
 * same bits, so a row's result depends neither on the panel it falls into nor on the rows beside it.
 *
 *     rows 0..15   | k=0: r0 .. r15 | k=1: r0 .. r15 | ...      panel of 16
 *     rows 16..20  | k=0: r16 .. r20 0 0 0 | k=1: ...           panel of 8, padded by zeros
 *
 * Inputs are padded with zeros to a multiple of 32, which adds +0 to chains and changes nothing. */
#ifndef DI_CPU_PANEL_H
#define DI_CPU_PANEL_H

#include "cpu.h"

enum {
    DI_TILE_OUT = 32,   /* outputs of a tile: also the height of a weight's scale block and the group of QA */
    DI_TILE_IN = 128,   /* inputs decoded at a time */
    DI_ROW_BLOCK = 128, /* rows that share a decoded tile */
    DI_PANEL_LANES = 16 /* rows of a full panel */
};

/* Lanes of the next panel when n rows are left. */
static inline int di_panel_lanes(int64_t n) {
    return n >= 13 ? 16 : n >= 5 ? 8 : n >= 2 ? 4 : 1;
}
/* Lanes of all panels of n rows together: only the last panel has more lanes than rows, by 3 at most. The panel that
 * starts at row r starts at float r * round_up(n_in, 32). */
static inline int64_t di_panel_rows(int64_t n) {
    int64_t full = n / DI_PANEL_LANES * DI_PANEL_LANES;
    for (n -= full; n > 0; n -= di_panel_lanes(n))
        full += di_panel_lanes(n);
    return full;
}

/* Packs columns [col0 + k0, col0 + k0 + k_count) of the rows that rows[0..n_rows) name (NULL: row0, row0+1, ...) into a
 * panel of `lanes` lanes, at inputs k0.. of it. Inputs at or beyond n_in are zeros. k0 and k_count are multiples of 32.
 */
void di_panel_pack(const di_act *x, const int32_t *rows, int64_t row0, int n_rows, int lanes, int64_t col0,
                   int64_t n_in, int64_t k0, int64_t k_count, float *panel);

/* The transposition alone: dst[k * lanes + r] = rows[r][k] for k < count (a multiple of 4); all `lanes` rows are read,
 * and lanes is 4, 8 or 16. */
void di_panel_fill(const float (*rows)[DI_TILE_IN], int lanes, int64_t count, float *dst);

/* Products of n_out <= 32 rows of w from o0 on with n_rows <= 128 packed rows. acc: panel after panel [32][lanes], all
 * written for the first n_out. decoded: DI_TILE_OUT * DI_TILE_IN floats of scratch. */
void di_panel_tile(const di_mat *w, int64_t o0, int n_out, const float *packed, int64_t n_rows, float *decoded,
                   float *acc);

/* acc += products over n_groups groups of 32 inputs of one packed panel and n_out weight rows of floats with stride
 * ldw; rows up to round_up(n_out, 8) must be readable. acc [32][lanes]. */
void di_panel_add(const float *panel, int lanes, const float *w, int64_t ldw, int n_out, int64_t n_groups, float *acc);

/* Bytes of scratch that a worker needs for di_panel_tile with `n_acc` accumulator blocks. */
static inline size_t di_panel_worker_bytes(int n_acc) {
    return di_cpu_piece(sizeof(float) * DI_TILE_OUT * DI_TILE_IN) +
           (size_t)n_acc * di_cpu_piece(sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
}

/* gemm with its packed rows in `scratch`. Where it doesn't hold all rows they go in several passes; DI_ERR_SHAPE when
 * it doesn't hold 16. (portable_gemm.c) */
di_status di_panel_gemm(di_stream *stream, const di_gemm_args *a, uint8_t *scratch, size_t scratch_bytes);
size_t di_panel_gemm_bytes(int64_t rows_max, int64_t n_in_max); /* scratch for it; capped, so passes may be needed */

bool di_cpu_gemm_fits(const di_gemm_args *a);                               /* ref_gemm.c */
void di_cpu_need_portable_gemm(const di_limits *limits, di_cpu_need *need); /* portable_gemm.c */

#endif
