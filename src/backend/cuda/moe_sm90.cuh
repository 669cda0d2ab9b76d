/* What Hopper's forms of the fast mixture of experts share: arguments, units of work, operands, the activation between
 * the products.
 *
 * moe_few_sm90.cu has the form for few rows of an expert and the host's side, moe_wide_sm90.cu that for more. A weight
 * is its code times a power of two, which bf16 holds exactly, and so does it hold an activation. Hence no scale is left
 * for the sums, which stay in the tensor core for all of k: 16 k a multiply, onto one accumulator, in one order. So a
 * row has the same bits whatever form and width it goes through.
 *
 * Weights lie as moe_placed.cuh says and are widened in registers, to 2^-32 of their value; codes of NaN act as 480.
 * Activations are bf16 in memory, in each block of 64 value e of both groups side by side; widened once, and again by
 * the first product. */
#ifndef DI_MOE_SM90_CUH
#define DI_MOE_SM90_CUH

#include "moe.cuh"

#include "moe_placed.cuh"
#include "rows.cuh"
#include "tiles_sm90.cuh"

typedef struct sm90_args : moe_fast_args {
    const uint16_t *x; /* few rows: [rows of the order, h]; else [pairs_max, h], tile by tile (moe_wide_sm90.cu) */
    uint16_t *act;     /* [pairs_max, inner], likewise */
} sm90_args;

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

/* Of a share of 64 rows of w1 and w3: output (0..31) of row g of a warp's octets. */
__device__ static inline int moe_sm90_output(int warp, int g) {
    return warp / 2 * 16 + g * 2 + warp % 2;
}
/* Chunk i of a lane's 16 bytes of both rows, as operands of its two multiplies: a[step]. power: of the rows
 * (moe_powers). */
template <di_dtype T>
__device__ static inline void moe_sm90_operands(const uint4 (&raw)[2], int i, const uint32_t (&power)[2],
                                                uint32_t (&a)[2][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t word[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t v =
                T == DI_F8_E4M3 ? moe_f8_register(word[(2 * i + j / 2) % 4], j % 2) : moe_f4_register(word[i], j);
            a[j / 2][j % 2 * 2 + r] = cu_mul_bf16x2(v, power[r]);
        }
    }
}

/* silu(g)*u*weight after the clamps, of sums that are 2^-32 of g and u, which are rounded to bf16 first. Written step
 * by step, so that all widths give the same bits. */
__device__ static inline float moe_sm90_swiglu(float g, float u, float weight, float limit) {
    uint32_t both = cu_pack_bf16(__fmul_rn(g, 0x1p32f), __fmul_rn(u, 0x1p32f));
    g = __uint_as_float(both << 16);
    u = __uint_as_float(both & 0xFFFF0000u);
    if (limit > 0.0f) {
        g = g > limit ? limit : g; /* NaN stays */
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    float e = cu_exp2_fast(__fmul_rn(g, -0x1.715476p0f)); /* exp(-g) */
    return __fmul_rn(__fmul_rn(__fdividef(g, __fadd_rn(1.0f, e)), u), weight);
}
/* The largest of a row over the four warps, whose values are a pitch apart. */
__device__ static inline float moe_sm90_most(const float *most_of, int pitch) {
    return fmaxf(fmaxf(most_of[0], most_of[pitch]), fmaxf(most_of[2 * pitch], most_of[3 * pitch]));
}
/* Two results of the second product, from their sums. */
__device__ static inline uint32_t moe_sm90_result(float a, float b) {
    return cu_pack_bf16(__fmul_rn(a, 0x1p32f), __fmul_rn(b, 0x1p32f));
}

/* Both products of tiles of 32, 64 or 128 rows, of activations in FP8 [rows of the order, h]. Launches.
 * (moe_wide_sm90.cu) */
enum { WIDE_ROWS_MAX = 128 };
void di_moe_wide(const di_stream *stream, const sm90_args &a, const uint8_t *x, const uint8_t *x_scale);

#endif
