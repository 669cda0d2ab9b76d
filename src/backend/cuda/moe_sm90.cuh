/* What the forms of the fast mixture of experts share: arguments, units of work, the activation between the products.
 *
 * moe_fp8_sm90.cu has the form for few rows of an expert and the host's side, moe_many_sm90.cu that for many. Both give
 * a row the same bits: the same codes in the same order of k, and each group's sum added by the same steps. Where bits
 * may depend on the batch (is_order_free) many rows go to moe_wide_sm90.cu, which multiplies in bf16.
 *
 * E2M1 values are E4M3 values: a word of eight codes becomes two words of operand A by placing bits (2^-6 of the
 * value), codes at even places, then those at odd ones; activations for FP4 experts lie in memory with the same order
 * inside each group of 32 ("paired", moe.cuh). FP8 experts take them as they are. An E2M1 0.5 must stay the subnormal
 * number that placing makes of it: the tensor core lines products up by the exponents of their factors, and a normal
 * number of the same value changes what it drops. So scales of weights can't go into the codes. */
#ifndef DI_MOE_SM90_CUH
#define DI_MOE_SM90_CUH

#include "moe.cuh"

#include "rows.cuh"
#include "sm90.cuh"

typedef struct fp8_args : moe_fast_args {
    const uint8_t *x, *x_paired; /* of the order's first row */
    const float *x_scale;
    uint8_t *act; /* [pairs, inner], paired for FP4 */
    float *act_scale;
} fp8_args;

/* Units follow each other expert by expert, in an expert all tiles of rows for one part of W, so that what is read by
 * several blocks is read at the same time. NULL: there is no such unit. */
__device__ static inline const moe_tile *moe_sm90_find(const moe_order &o, int32_t unit, int32_t parts, int32_t &part) {
    int32_t t = unit / parts, n_tiles = o.head[MOE_N_TILES];
    const moe_tile *tile = &o.tiles[t < o.tiles_max ? t : 0];
    int32_t first = tile->first, count = tile->count; /* if it is none: what lies there */
    if (t >= n_tiles)
        return NULL;
    int32_t at = unit - first * parts;
    part = at / count;
    return &o.tiles[first + at - part * count];
}
__device__ static inline bool moe_sm90_is_fp8(const moe_fast_args &a, int32_t expert) {
    return expert == a.o.n_experts ? a.is_fp8_shared : a.is_fp8;
}

/* Eight E2M1 codes as E4M3 values, times 2^-6: those of even places, then those of odd ones. */
__device__ static inline void fp8_widen(uint32_t codes, uint32_t &even, uint32_t &odd) {
    even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu);
    odd = (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
}

/* silu(g)*u*weight after the clamps, g and u rounded to bf16 first. Written step by step, so that all widths give the
 * same bits. */
__device__ static inline float moe_sm90_swiglu(float g, float u, float weight, float limit) {
    uint32_t both = cu_pack_bf16(g, u);
    g = __uint_as_float(both << 16);
    u = __uint_as_float(both & 0xFFFF0000u);
    if (limit > 0.0f) {
        g = g > limit ? limit : g; /* NaN stays */
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    float e = cu_exp2_fast(__fmul_rn(g, -0x1.715476p0f)); /* exp(-g) */
    return __fmul_rn(__fmul_rn(__fdividef(g, __fadd_rn(1.0f, e)), u), weight);
}

/* Of N rows, of which n are there, from pair0 on: gate and up in a thread's acc, rows 4j + e and 4j + 2 + e of it, to
 * the activation in place of the gate; the largest of the warp's eight outputs to most_of[row]. g, c: the lane by
 * 4, and what is left. */
template <int N>
__device__ static inline void fp8_activate(const moe_fast_args &a, int g, int c, int32_t pair0, int32_t n,
                                           float *most_of, float (&acc)[N / 2]) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = 8 * j + 2 * c + e;
            float weight = a.o.pair_weight[pair0 + (row < n ? row : 0)];
            float v = moe_sm90_swiglu(acc[4 * j + e], acc[4 * j + 2 + e], weight, a.limit), most = fabsf(v);
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 4));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 8));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 16));
            if (g == 0)
                most_of[row] = most;
            acc[4 * j + e] = v;
        }
    }
}
/* The largest of a row over the four warps, whose values are a pitch apart. */
__device__ static inline float moe_sm90_most(const float *most_of, int pitch) {
    return fmaxf(fmaxf(most_of[0], most_of[pitch]), fmaxf(most_of[2 * pitch], most_of[3 * pitch]));
}

/* The second product's sums of N rows, of which n are there; out: the first of the thread's two outputs. */
template <int N>
__device__ static inline void fp8_store(const moe_fast_args &a, int c, int32_t pair0, int32_t n, int64_t out,
                                        const float (&acc)[N / 2]) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = 8 * j + 2 * c + e;
            if (row < n)
                *(uint32_t *)(void *)(a.y + (int64_t)(pair0 + row) * a.h + out) =
                    cu_pack_bf16(acc[4 * j + e], acc[4 * j + 2 + e]);
        }
    }
}

/* Where output col of a group of 32 lies, as the second product's weights want it. */
__device__ static inline int fp8_slot(int col, bool is_fp8) {
    return is_fp8 ? col : col % 2 * 16 + col / 2;
}

/* Many rows: both products of tiles of up to so many. Launch. (moe_many_sm90.cu) */
enum { FP8_MANY_ROWS = 80 };
void di_moe_many(const di_stream *stream, const fp8_args &a);

/* Many rows, bits that depend on the batch: likewise, activations too. (moe_wide_sm90.cu) */
enum { WIDE_ROWS_MAX = 128 };
typedef struct wide_args : moe_fast_args {
    const uint16_t *x; /* bf16 [rows of the order, h], wide order */
    uint16_t *act;     /* bf16 [pairs, inner], wide order */
} wide_args;
/* x, x_scale: E4M3 [n_rows, h] and its scales. to: bf16 [n_rows, h] in wide order. */
void di_moe_widen(const di_stream *stream, const uint8_t *x, const uint8_t *x_scale, uint16_t *to, int64_t n_rows,
                  int64_t h);
void di_moe_wide(const di_stream *stream, const wide_args &a);

#endif
