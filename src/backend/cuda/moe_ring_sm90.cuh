/* The frame of the kernels for many rows of an expert: blocks that stay, units in turn, a ring of stages.
 *
 * A block stays on its multiprocessor and takes units (a tile of rows, some shares of 64 rows of W, all k) in turn. A
 * last warpgroup copies through a ring of stages of 128 k, on into the next unit while the sums of one are stored. A
 * barrier of a stage counts the copies themselves: nobody waits for memory before asking for more.
 *
 * A form F gives the sizes: WGS warpgroups that multiply, SHARES of a unit, STAGES of STAGE bytes at the start of
 * shared memory, places HEADS and BARRIERS behind them, BYTES in all; COPY_REGS and REGS, registers of a thread that
 * copies and of one that multiplies; and what brings a stage and takes it:
 *   F::copy<T, IS_DOWN>(args, ring, tile, part)   of one unit and the type T of its weights; start(stage) copies the
 *                                                 next stage to that address, by cp.async
 *   F::begin<IS_DOWN>(args, ring, tile, unit)     what else a unit needs, with its first stage
 *   F::unit<IS_DOWN>(args, ring, at, unit)        multiplies all stages of one, the first of which is there, and stores
 *                                                 what comes out */
#ifndef DI_MOE_RING_SM90_CUH
#define DI_MOE_RING_SM90_CUH

#include "moe_sm90.cuh"

enum { RING_GROUP = 128 /* threads of a warpgroup */, RING_K = 128 /* of a stage */ };

/* What multiplying knows of a unit. n 0: there are no more. As many as stages: a unit has two of those at least, so
 * that all are through with a head before its place is taken. */
typedef struct ring_head {
    int32_t n, pair0, part, is_fp8;
} ring_head;

template <class F> struct ring_at {
    uint32_t stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == F::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <class F> struct moe_ring {
    uint8_t *shared;
    uint64_t *full, *empty;

    __device__ explicit moe_ring(uint8_t *s)
        : shared(s), full((uint64_t *)(void *)(s + F::BARRIERS)), empty(full + F::STAGES) {
    }
    /* By all threads, at the kernel's start. */
    __device__ void init() {
        if (threadIdx.x == 0) {
            for (int s = 0; s < F::STAGES; s++) {
                cu_mbar_init(&full[s], RING_GROUP + 1);
                cu_mbar_init(&empty[s], F::WGS * 4);
            }
            cu_fence_mbar_init();
        }
        __syncthreads();
    }
    __device__ uint32_t stage(uint32_t i) const {
        return cu_smem(shared) + i * F::STAGE;
    }
    __device__ ring_head *head(int unit) const {
        return (ring_head *)(void *)(shared + F::HEADS) + unit % F::STAGES;
    }
    /* By a warp, of whose multiplies those of the stage are complete. */
    __device__ void release(uint32_t i) {
        __syncwarp();
        if (threadIdx.x % DI_WARP == 0)
            cu_mbar_arrive(&empty[i]);
    }
};

/* Row of the matrix that lies at row i of a block's; *m: of which matrix. */
template <class F, bool IS_DOWN> __device__ static inline int64_t ring_row(int part, int i, int *m) {
    int r = i % 16, warp = i / 16 % 4, own = part * F::SHARES + i / 64;
    *m = IS_DOWN ? W2 : r < 8 ? W1 : W3;
    return IS_DOWN ? own * 64 + warp * 16 + r % 8 * 2 + r / 8 : own * 32 + warp * 8 + r % 8;
}
/* Shares of a matrix, a multiple of four: h and inner are multiples of 256. */
template <bool IS_DOWN> __device__ static inline int32_t ring_shares(const moe_fast_args &a) {
    return IS_DOWN ? a.h / 64 : a.inner / 32;
}

template <class F, di_dtype T, bool IS_DOWN, class A>
__device__ static inline void ring_produce(const A &a, const moe_ring<F> &ring, ring_at<F> &at, const moe_tile *tile,
                                           int32_t part) {
    typename F::template copy<T, IS_DOWN> copy(a, ring, tile, part);
    int n_stages = (IS_DOWN ? a.inner : a.h) / RING_K;
#pragma unroll 1
    for (int kb = 0; kb < n_stages; kb++, at.next()) {
        cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        copy.start(ring.stage(at.stage));
        cu_mbar_arrive_cp(&ring.full[at.stage]);
        if (threadIdx.x % RING_GROUP == 0)
            cu_mbar_arrive(&ring.full[at.stage]); /* for what it wrote itself: the unit's head */
    }
}

/* All units of the block, by its last warpgroup. */
template <class F, bool IS_DOWN, class A>
__device__ static inline void ring_copy_all(const A &a, const moe_ring<F> &ring) {
    int t = threadIdx.x % RING_GROUP;
    int32_t parts = (ring_shares<IS_DOWN>(a) + F::SHARES - 1) / F::SHARES, part, i = 0;
    ring_at<F> at;
    const moe_tile *tile;
    for (; (tile = moe_sm90_find(a.o, (int32_t)(blockIdx.x + i * gridDim.x), parts, part)); i++) {
        bool is_fp8 = moe_sm90_is_fp8(a, tile->expert);
        cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        if (t == 0)
            *ring.head(i) = ring_head{tile->n, tile->pair0, part, is_fp8};
        F::template begin<IS_DOWN>(a, ring, tile, i);
        if (is_fp8)
            ring_produce<F, DI_F8_E4M3, IS_DOWN>(a, ring, at, tile, part);
        else
            ring_produce<F, DI_F4_E2M1, IS_DOWN>(a, ring, at, tile, part);
    }
    cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
    if (t == 0) {
        ring.head(i)->n = 0;
        cu_mbar_arrive(&ring.full[at.stage]);
    }
    cu_mbar_arrive(&ring.full[at.stage]);
    cu_cp_wait<0>();
}

/* The kernel of a form. */
template <class F, bool IS_DOWN, class A> __device__ static inline void ring_run(const A &a, uint8_t *shared) {
    moe_ring<F> ring(shared);
    ring.init();
    cu_grid_begin();
    if (threadIdx.x >= F::WGS * RING_GROUP) {
        cu_regs_give<F::COPY_REGS>();
        ring_copy_all<F, IS_DOWN>(a, ring);
        return;
    }
    cu_regs_take<F::REGS>();
    ring_at<F> at;
    for (int unit = 0;; unit++) {
        cu_mbar_wait(&ring.full[at.stage], at.parity);
        if (ring.head(unit)->n == 0)
            return;
        F::template unit<IS_DOWN>(a, ring, at, unit);
    }
}

#endif
