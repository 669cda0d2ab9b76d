/* What the kernels of the mixture of experts share: the order of pairs and the tiles, on the device.
 *
 * A (row, expert) choice is a pair. Pairs are sorted by expert, rows rising; the shared expert is one more expert (id
 * n_experts), chosen by every row, whose pairs come first. An expert's pairs begin at a multiple of 8. A tile is up to
 * so many consecutive pairs of one expert; products are made tile by tile. Everything is found on the device from the
 * router's choices: launches have the size of the worst case, and blocks without a tile end at once.
 *
 *   pairs   | shared: every row | expert 0   | expert 2      | expert 5 |    row_pairs[row] = a row's pairs, by expert,
 *   tiles   | 0                 | 1     | 2  | 3     | 4     | 5        |    the shared one last: the order of its sum
 *
 * The table that experts_place makes is di_expert[n + 1] in device memory, the shared expert last. */
#ifndef DI_MOE_CUH
#define DI_MOE_CUH

#include "cu.cuh"

enum { DI_MOE_PER_ROW_MAX = 64, DI_MOE_EXPERTS_MAX = 4096 };

/* head[]: the number of tiles. */
enum { MOE_N_TILES, MOE_HEAD };

typedef struct moe_tile {
    int32_t expert, pair0, n;          /* its pairs */
    int32_t first, count;              /* the tiles of its expert: first .. first + count - 1 */
    int32_t tile, pad[2];              /* its own number */
    const uint8_t *data[3], *scale[3]; /* its expert's w1, w3, w2 */
} moe_tile;

typedef struct moe_order {
    const di_expert *table;       /* [n_experts + 1] */
    const int32_t *idx;           /* [n_rows, k] */
    const float *weight;          /* [n_rows, k] */
    int32_t n_rows, k, n_experts; /* as in the call */
    int32_t per_row;              /* pairs of a row: k, and one more with a shared expert */
    int32_t tile_rows;            /* most pairs of a tile, a multiple of 8 */
    int32_t tiles_max;            /* whatever is chosen */
    int32_t *count;               /* [n_experts] */
    int32_t *pair_row;            /* [pairs_max] */
    float *pair_weight;           /* [pairs_max], 1 for the shared expert */
    int32_t *row_pairs;           /* [n_rows, per_row] */
    moe_tile *tiles;              /* [tiles_max], the shared expert's first */
    int32_t *head;                /* [MOE_HEAD] */
} moe_order;

/* Places of n pairs of one expert, or of a tile's. */
__host__ __device__ static inline int32_t moe_places(int32_t n) {
    return (n + 7) / 8 * 8;
}
/* pairs_max above: places of so many rows' pairs, whatever is chosen. */
static inline int64_t di_moe_pairs_max(const di_moe_args *a, int64_t n_rows) {
    int64_t routed = n_rows * a->k;
    return routed + 7 * DI_MIN(routed, (int64_t)a->n_experts) + (a->shared ? n_rows + 7 : 0);
}
/* The order of rows [row0, row0 + n_rows) of a call, with its arrays at base; returns their bytes. base NULL: only
 * that. (moe.cu) */
size_t di_moe_order_cut(const di_moe_args *a, int64_t row0, int64_t n_rows, int32_t tile_rows, uint8_t *base,
                        moe_order *out);
/* Activations as bf16, in the order of placed weights (moe_placed.cuh): in each block of 64, values e of both groups
 * side by side, e = 0..31. A chunk is eight of them. */
typedef struct moe_widening {
    const uint8_t *from, *from_scale;
    uint16_t *to;
    int64_t n_chunks;
} moe_widening;

/* Launches the sorting, and a widening of activations unless it is NULL. */
void di_moe_order_start(const di_stream *stream, const moe_order *o, const moe_widening *widening);
/* out[row0 + row] = the sum of the row's pairs of y [pairs_max, H], in order; y bf16 or fp32. Launches. */
void di_moe_sum(const di_stream *stream, const moe_order *o, const void *y, di_dtype y_dtype, const di_act *out,
                int64_t row0, bool is_rounded);

/* What the fast kernels of any chip take: faithful numerics, weights in FP4 or FP8. Derived types add the activations.
 */
typedef struct moe_fast_args {
    moe_order o;
    int32_t h, inner;
    float limit;
    bool is_fp8, is_fp8_shared; /* weights of routed experts, of the shared one */
    uint16_t *y;                /* [pairs_max, h], bf16 */
} moe_fast_args;

/* Outputs of w1 and w3, which all experts have alike. */
static inline int64_t di_moe_inner(const di_moe_args *a) {
    return (a->k ? &a->experts[0] : a->shared)->w1.n_out;
}

enum { W1, W3, W2 };            /* places of a tile's matrices */
enum { MOE_PASS_ROWS = 32768 }; /* rows at once: bounds the scratch */

/* Whether activations and experts are such, and scales aligned; sizes are each chip's own matter. (moe.cu) */
bool di_moe_fast_fits(const di_moe_args *a, size_t scale_align);
/* All but y, of rows [row0, row0 + n_rows); the order lies at base. (moe.cu) */
void di_moe_fast_begin(const di_moe_args *a, int64_t row0, int64_t n_rows, int32_t tile_rows, uint8_t *base,
                       moe_fast_args *out);

/* The router on Hopper; false: it did not start, the portable one takes it. (route_sm90.cu) */
bool di_moe_route_sm90(const di_stream *stream, const di_moe_route_args *a);

/* Whether experts of such sizes can be placed (moe_placed.cuh): a slab of 32 rows must fit a block's shared memory. */
static inline bool di_moe_placed_fits(int64_t h, int64_t inner) {
    return h % 256 == 0 && inner % 256 == 0 && h <= 7168 && inner <= 7168;
}

/* Hopper's. Bytes: of the scratch for a call of so many rows; of a, which has no rows, k, n_experts and whether there
 * is a shared expert count. (moe_few_sm90.cu) */
bool di_moe_sm90_fits(const di_stream *stream, const di_moe_args *a);
di_status di_moe_sm90(const di_stream *stream, const di_moe_args *a);
size_t di_moe_sm90_bytes(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner);

/* Blackwell's, likewise, taken when asked for. (moe_sm100.cu) */
bool di_moe_sm100_fits(const di_stream *stream, const di_moe_args *a);
di_status di_moe_sm100(const di_stream *stream, const di_moe_args *a);
size_t di_moe_sm100_bytes(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner);

/* silu(g)*u*weight after the clamps, as the reference computes it. */
__device__ static inline float moe_swiglu(float g, float u, float weight, float limit, bool is_faithful) {
    if (is_faithful) {
        g = cu_round_bf16(g);
        u = cu_round_bf16(u);
    }
    if (limit > 0.0f) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    return __fmul_rn(__fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, cu_expf(-g))), u), weight);
}

#endif
