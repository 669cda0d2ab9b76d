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
size_t gemm_sm90_need(const di_device *dev);
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

__host__ __device__ static inline int gemm_pieces(const gemm_cut &cut) {
    return cut.cluster * cut.k_ways;
}
__host__ __device__ static inline int gemm_piece(const gemm_cut &cut, int piece) { /* its first block of k */
    return cut.n_blocks * piece / gemm_pieces(cut);
}

/* The sums of a thread's W neighbouring outputs from those of pieces, `step` floats apart, in rising order. */
template <int W>
__device__ static inline void gemm_add_pieces(float (&sum)[W], const float *from, int64_t step, int n_pieces) {
    enum { AHEAD = 8 }; /* pieces that are read at once */
    static_assert(W == 1 || W == 4, "one access");
    for (int p0 = 0; p0 < n_pieces; p0 += AHEAD) {
        float v[AHEAD][W];
#pragma unroll
        for (int p = 0; p < AHEAD; p++) {
            if (p0 + p >= n_pieces)
                continue;
            const float *at = from + (p0 + p) * step;
            if constexpr (W == 4) {
                float4 four = *(const float4 *)at;
                v[p][0] = four.x, v[p][1] = four.y, v[p][2] = four.z, v[p][3] = four.w;
            } else {
                v[p][0] = *at;
            }
        }
#pragma unroll
        for (int p = 0; p < AHEAD; p++) {
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[i] = p0 + p == 0 ? v[p][i] : p0 + p < n_pieces ? sum[i] + v[p][i] : sum[i];
        }
    }
}

/* gemm_bf16_sm90.cu: bf16 on both sides of a product that gemm_sm90_fits. A matrix's k is cut into so many pieces; the
 * bits are the same in both forms. False: it did not start.
 *   _turn    one after another
 *   _apart   for few rows: leaves the pieces' sums as fp32 [piece][row][n_out]; a call takes at most so many bytes */
int gemm_bf16_pieces(const di_device *dev, const di_mat *w);
bool gemm_sm90_bf16_turn(const di_stream *stream, const gemm_job *job, int n_pieces);
bool gemm_bf16_is_apart(const di_device *dev, int64_t n_rows, const di_mat *w, int n_pieces);
bool gemm_sm90_bf16_apart(const di_stream *stream, const gemm_job *job, int n_pieces, float *sums);
size_t gemm_bf16_apart_bytes(const di_device *dev);
bool gemm_sm90_bf16(const di_stream *stream, const gemm_job *job); /* whichever is faster */

/* gemm_sm90.cu: pieces for n_tiles tiles of n_blocks blocks of k, where no more than units_max units are wanted. */
int gemm_splits(int64_t n_tiles, int n_blocks, int n_sms, int64_t units_max);
/* gemm_sm90.cu: the results from sums of pieces, [piece][row][n_out]. n_out % 4 == 0. Launches. */
void gemm_sum_pieces(const di_stream *stream, const gemm_job *job, const float *sums, int n_pieces);

/* gemm_few_sm90.cu, gemm_fp8_sm90.cu: E4M3 weights and activations of a product that gemm_sm90_fits; the bits are the
 * same in all forms. False: it did not start.
 *   FEW     few rows; clusters of blocks exchange sums of pieces
 *   APART   some rows; sums of pieces go through scratch
 *   MANY    many rows, and no rope; its cut may be whole */
typedef enum gemm_fp8_form { GEMM_FP8_FEW, GEMM_FP8_APART, GEMM_FP8_MANY } gemm_fp8_form;
gemm_cut gemm_fp8_cut(const di_device *dev, const di_mat *w);
gemm_fp8_form gemm_fp8_pick(const di_device *dev, const gemm_job *job, const gemm_cut *cut);
void gemm_sm90_few(const di_stream *stream, const gemm_job *job, const gemm_cut *cut);
bool gemm_sm90_fp8_apart(const di_stream *stream, const gemm_job *job, const gemm_cut *cut);
bool gemm_sm90_fp8(const di_stream *stream, const gemm_job *job, const gemm_cut *cut);

/* gemm_sm100.cu: likewise, whether its kernel takes this product; false of the other: it did not start. */
bool gemm_sm100_fits(const di_device *dev, const gemm_job *job);
bool gemm_sm100(di_stream *stream, const gemm_job *job);

#endif
