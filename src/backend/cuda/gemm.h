/* What gemm's host side and its fast kernels agree on. Private to gemm*.cu. */
#ifndef DI_GEMM_H
#define DI_GEMM_H

#include "cuda.h"

/* The product as kernels read it. */
typedef struct gemm_job {
    di_act x, out;
    di_mat w;
    const float *add;
    int n_groups;
    /* What follows the product (in gemm_few alone): rope of bf16 heads, or codes of fp32 sums in place of out. */
    int head_dim, n_freq;   /* multiples of 8 */
    const float *cos, *sin; /* [rows, n_freq], 16-byte aligned; NULL: no rope */
    di_act codes;           /* data NULL: none */
    int aligned;            /* so many neighbouring columns of out, and of add, are one aligned access: 1, 2, 8 */
} gemm_job;

/* gemm_sm90.cu: whether its kernels take this product, and the scratch that they may want. */
bool gemm_sm90_fits(const di_device *dev, const gemm_job *job);
size_t gemm_sm90_need(const di_device *dev, const di_limits *limits);
di_status gemm_sm90(di_stream *stream, const gemm_job *job);

static inline int64_t gemm_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* How k is cut where both sides are E4M3, by the matrix's shape alone: pieces of whole blocks of 128 k are summed apart
 * and then added in rising order. */
typedef struct gemm_cut {
    int cluster, k_ways; /* blocks of threads, and warpgroups of each, that share a tile */
    int n_blocks;        /* of 128 k */
} gemm_cut;

__host__ __device__ static inline int gemm_piece(const gemm_cut &cut, int piece) { /* its first block of k */
    return cut.n_blocks * piece / (cut.cluster * cut.k_ways);
}

/* gemm_few_sm90.cu, gemm_fp8_sm90.cu: E4M3 weights and activations of a product that gemm_sm90_fits, for few and for
 * many rows; the bits are the same. */
gemm_cut gemm_fp8_cut(const di_device *dev, const di_mat *w);
bool gemm_fp8_is_few(const di_device *dev, const gemm_job *job, const gemm_cut *cut);
void gemm_sm90_few(di_stream *stream, const gemm_job *job, const gemm_cut *cut);
bool gemm_sm90_fp8(di_stream *stream, const gemm_job *job, const gemm_cut *cut); /* false: takes the other form */

/* gemm_sm100.cu: likewise, whether its kernel takes this product; false of the other: it did not start. */
bool gemm_sm100_fits(const di_device *dev, const gemm_job *job);
bool gemm_sm100(di_stream *stream, const gemm_job *job);

#endif
