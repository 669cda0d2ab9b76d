/* What the hc_mix kernels of every level share: argument check and everything after the dot products. Private to
 * backend/cpu and its tests. */
#ifndef DI_CPU_HC_H
#define DI_CPU_HC_H

#include "cpu.h"

#define DI_CPU_HC_MAX 8 /* streams, at most */

bool di_cpu_hc_mix_fits(const di_hc_mix_args *a);
bool di_cpu_hc_post_fits(const di_stream *stream, const di_hc_post_args *a);
/* In place on c [m, m] = logits [old][new]: softmax over new + eps, then alternating normalisation, columns last. */
void di_cpu_sinkhorn(float *c, int32_t m, int32_t iters, float eps);
/* Writes pre_out, post and comb of a row from its dots [(2+m)*m] = fn . x and the sum of squares of x. */
void di_cpu_hc_finish(const di_hc_mix_args *a, int64_t row, const float *dots, float sum_squares);

/* ---- pieces of rows (hc_body.h), worker scratch ---- */

enum {
    DI_HC_ROWS = 16,       /* rows of a part */
    DI_HC_SPLIT_ROWS = 4,  /* so few rows of 4 streams are cut by columns, */
    DI_HC_SPLIT_DOTS = 32, /* into sums of 24 dots and a square */
    DI_HC_DOTS_MAX = (2 + DI_CPU_HC_MAX) * DI_CPU_HC_MAX
};

/* Bytes of the pieces, in their order: collapsed rows [16, h], a block of the trunk [16, 128], a tile of weights with
 * room to decode it, sums [dots / 32][16, 32]. */
typedef struct di_hc_scratch {
    size_t z, rows, tile, acc;
} di_hc_scratch;

di_hc_scratch di_hc_scratch_for(int64_t h);               /* hc.c */
size_t di_hc_scratch_bytes(int64_t h);                    /* hc.c */
size_t di_hc_split_bytes(int64_t n_rows, int64_t n_cols); /* of shared scratch for these sums; hc.c */
void di_cpu_need_hc_blocks(const di_limits *limits, di_cpu_need *need);

#endif
