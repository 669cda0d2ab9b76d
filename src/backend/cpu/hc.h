/* What the hc_mix kernels of every level share: argument check and everything after the dot products. Private to
 * backend/cpu and its tests. */
#ifndef DI_CPU_HC_H
#define DI_CPU_HC_H

#include "cpu.h"

#define DI_CPU_HC_MAX 8 /* streams, at most */

bool di_cpu_hc_mix_fits(const di_hc_mix_args *a);
/* In place on c [m, m] = logits [old][new]: softmax over new + eps, then alternating normalisation, columns last. */
void di_cpu_sinkhorn(float *c, int32_t m, int32_t iters, float eps);
/* Writes pre_out, post and comb of a row from its dots [(2+m)*m] = fn . x and the sum of squares of x. */
void di_cpu_hc_finish(const di_hc_mix_args *a, int64_t row, const float *dots, float sum_squares);

/* Scratch of portable_hc.c. */
void di_cpu_need_portable_hc(const di_limits *limits, di_cpu_need *need);

#endif
