/* The frame of the kernels for more rows of an expert than a few: blocks that stay, units in turn, a ring of stages.
 *
 * A block stays on its multiprocessor and takes units (a tile of rows, some shares of 64 rows of W, all k) in turn.
 * Four threads, one of each warp of a last warpgroup, keep the copy engine busy through a ring of stages, on into the
 * next unit while the sums of one are stored; a barrier of a stage counts the bytes that come. (One thread alone would
 * be late: a copy takes it some ten instructions.)
 *
 * A form F gives the sizes: WGS warpgroups that multiply, SHARES of a unit, STAGES of STAGE bytes at the start of
 * shared memory, of k<T>() k for weights of type T, places HEADS and BARRIERS behind them, BYTES in all; COPY_REGS and
 * REGS, registers of a thread that copies and of one that multiplies; and what brings a stage and takes it:
 *   F::copy<T, IS_DOWN>(args, tile, part)    of one unit and the type T of its weights; start(stage, barrier) asks for
 *                                            the thread's part of the next stage
 *   F::unit<IS_DOWN>(args, ring, at, unit)   multiplies all stages of one, the first of which is there, and stores
 *                                            what comes out */
#ifndef DI_MOE_RING_SM90_CUH
#define DI_MOE_RING_SM90_CUH

#include "moe_sm90.cuh"

enum { RING_GROUP = 128 /* threads of a warpgroup */, RING_COPIERS = RING_GROUP / DI_WARP };

/* What multiplying knows of a unit. n 0: there are no more. As many as stages, so that all are through with a head,
 * which they read with the unit's first stage, before its place is taken. */
typedef struct ring_head {
    int32_t n, pair0, part, is_fp8;
    const uint8_t *scale[2]; /* FP8 only: of w1 and w3, or of w2 */
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

/* Which of those that copy this thread is. */
__device__ static inline int ring_copier() {
    return (int)threadIdx.x / DI_WARP % RING_COPIERS;
}

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
                cu_mbar_init(&full[s], RING_COPIERS);
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

template <class F, di_dtype T, bool IS_DOWN>
__device__ static inline void ring_produce(const sm90_args &a, const moe_ring<F> &ring, ring_at<F> &at,
                                           const moe_tile *tile, int32_t part) {
    typename F::template copy<T, IS_DOWN> copy(a, tile, part);
    int n_stages = (IS_DOWN ? a.inner : a.h) / F::template k<T>();
#pragma unroll 1
    for (int kb = 0; kb < n_stages; kb++, at.next()) {
        cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        copy.start(ring.stage(at.stage), &ring.full[at.stage]);
    }
}

/* All units of the block, by the threads that copy. */
template <class F, bool IS_DOWN>
__device__ static inline void ring_copy_all(const sm90_args &a, const moe_ring<F> &ring) {
    static_assert(F::SHARES == 4, "h and inner are multiples of 256");
    int32_t parts = (IS_DOWN ? a.h / 64 : a.inner / 32) / F::SHARES, part, i = 0;
    ring_at<F> at;
    const moe_tile *tile;
    for (; (tile = moe_sm90_find(a.o, (int32_t)(blockIdx.x + i * gridDim.x), parts, part)); i++) {
        bool is_fp8 = moe_sm90_is_fp8(a, tile->expert);
        cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        if (ring_copier() == 0)
            *ring.head(i) =
                ring_head{tile->n, tile->pair0, part, is_fp8, {tile->scale[IS_DOWN ? W2 : W1], tile->scale[W3]}};
        if (is_fp8)
            ring_produce<F, DI_F8_E4M3, IS_DOWN>(a, ring, at, tile, part);
        else
            ring_produce<F, DI_F4_E2M1, IS_DOWN>(a, ring, at, tile, part);
    }
    cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
    if (ring_copier() == 0)
        ring.head(i)->n = 0;
    cu_mbar_arrive(&ring.full[at.stage]);
}

/* The kernel of a form. */
template <class F, bool IS_DOWN> __device__ static inline void ring_run(const sm90_args &a, uint8_t *shared) {
    moe_ring<F> ring(shared);
    ring.init();
    cu_grid_begin();
    if (threadIdx.x >= F::WGS * RING_GROUP) {
        cu_regs_give<F::COPY_REGS>();
        if (threadIdx.x % DI_WARP == 0)
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
