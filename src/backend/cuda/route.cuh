/* The choice of experts by their scores, which both routers' kernels end with (route.cu, route_sm90.cu). */
#ifndef DI_ROUTE_CUH
#define DI_ROUTE_CUH

#include "moe.cuh"

typedef struct route_out {
    const float *bias, *bias_vl;
    const uint8_t *is_image;
    int32_t n_experts, k;
    float factor;
    int32_t *idx;
    float *weight;
} route_out;

static inline route_out route_out_of(const di_moe_route_args *a) {
    return route_out{a->bias, a->bias_vl, a->is_image, (int32_t)a->gate->n_out, a->k, a->factor, a->idx, a->weight};
}

/* Rises with v, above 0; zeros are equal, and NaN counts as the least. */
__device__ static inline uint32_t route_key(float v) {
    uint32_t u = __float_as_uint(v == v ? __fadd_rn(v, 0.0f) : __uint_as_float(0xFF800000u));
    return u ^ (u >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

/* A block is a row: every thread makes scores, score_of(expert), the first warp picks the best k times, the lowest
 * expert of equals. A lane knows the best of experts lane, lane + 32, ..; the one whose best was chosen looks for its
 * next. The key of a chosen expert becomes 0. score: shared memory of two words for each expert. */
template <class F> __device__ static inline void route_choose(const route_out &o, float *score, F score_of) {
    uint32_t *key = (uint32_t *)(void *)(score + o.n_experts);
    int64_t row = blockIdx.x;
    uint8_t is_image = o.is_image ? o.is_image[row] : 0;
    for (int e = (int)threadIdx.x; e < o.n_experts; e += (int)blockDim.x) {
        float s = score_of(e), bias = o.bias[e];
        if (o.is_image) { /* read without knowing whether it is needed, so that no load waits for another */
            float other = o.bias_vl[e];
            bias = is_image ? other : bias;
        }
        score[e] = s;
        key[e] = route_key(__fadd_rn(s, bias));
    }
    __syncthreads();
    if (threadIdx.x >= DI_WARP)
        return;
    int lane = (int)threadIdx.x, best_e = 0;
    uint32_t best = 0;
    auto look = [&] {
        best = 0;
#pragma unroll 4
        for (int e = lane; e < o.n_experts; e += DI_WARP) {
            uint32_t v = key[e];
            if (v > best)
                best = v, best_e = e;
        }
    };
    look();
    float sum = 0.0f, mine[DI_MOE_PER_ROW_MAX / DI_WARP] = {}; /* choice i is kept by lane i % 32 */
    int32_t mine_idx[DI_MOE_PER_ROW_MAX / DI_WARP] = {};
    for (int i = 0; i < o.k; i++) {
        uint32_t most = __reduce_max_sync(0xFFFFFFFFu, best);
        int e = (int)__reduce_min_sync(0xFFFFFFFFu, best == most ? (unsigned)best_e : 0xFFFFFFFFu);
        float s = score[e];
        sum = __fadd_rn(sum, s);
        if (e % DI_WARP == lane) { /* its lane alone reads the key */
            key[e] = 0;
            look();
        }
#pragma unroll
        for (int j = 0; j < DI_MOE_PER_ROW_MAX / DI_WARP; j++) {
            if (i == lane + j * DI_WARP)
                mine[j] = s, mine_idx[j] = e;
        }
    }
    float total = __fadd_rn(sum, 1e-20f);
#pragma unroll
    for (int j = 0; j < DI_MOE_PER_ROW_MAX / DI_WARP; j++) {
        int i = lane + j * DI_WARP;
        if (i < o.k) {
            o.idx[row * o.k + i] = mine_idx[j];
            o.weight[row * o.k + i] = __fmul_rn(__fdiv_rn(mine[j], total), o.factor);
        }
    }
}

#endif
