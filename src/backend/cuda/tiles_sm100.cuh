/* What the kernels of Blackwell share: a ring of stages in shared memory, and a block's part of tensor memory.
 *
 * A stage is 128 k of a tile: 128 rows of the one operand (weights: the M of a multiply), up to N of the other (rows of
 * activations), and the scales of both.
 *
 *   stage           codes of the 128 rows | codes of N rows | scales of the 128 | scales of the N
 *   tensor memory   sums [N] | stage 0: scales of the 128 [4], of the N [4] | stage 1 ..          (columns)
 *
 * Codes lie by cu_sw128, scales by cu_tc_scale_at. Scales have columns for each stage: they are written again only when
 * the multiplies that read them are done. */
#ifndef DI_TILES_SM100_CUH
#define DI_TILES_SM100_CUH

#include "sm100.cuh"

enum { TC_M = 128, TC_K = 128 };

/* Two blocks share a multiprocessor: a third would wait for tensor memory, and in a cluster perhaps for ever, so none
 * has less than a third of the shared memory, and none more than half of either. */
template <int N> struct tc_shape {
    static constexpr int A = 0, B = TC_M * TC_K, A_SCALES = B + N * TC_K, B_SCALES = A_SCALES + CU_TC_SCALES;
    static constexpr int STAGE = B_SCALES + CU_TC_SCALES, COUNT = N <= 32 ? 5 : N == 64 ? 4 : 3;
    static constexpr int BARRIERS = COUNT * STAGE, N_BARRIERS = 2 * COUNT + 1;
    static constexpr int ALL = BARRIERS + N_BARRIERS * 8 + 8;
    static constexpr uint32_t STAGE_COLUMNS = 2 * CU_TC_SCALE_COLUMNS;
    static constexpr uint32_t COLUMNS = N == 16 ? 64 : N <= 64 ? 128 : 256;
    static_assert(STAGE % 1024 == 0 && N % 16 == 0 && N <= 128, "a stage begins an atom; scales of N in one copy");
    static_assert(N + COUNT * STAGE_COLUMNS <= COLUMNS, "sums and scales in tensor memory");
    static_assert(ALL > 228 * 1024 / 3 && ALL <= 113 * 1024, "two blocks, and no third");
    static_assert(N * TC_M * 4 <= COUNT * STAGE, "sums, taken out, have room where the stages were");
};

/* A place in the ring and the parity of its round. */
template <int COUNT> struct tc_at {
    uint32_t stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* full: codes and scales of a stage are there, in the eyes of the tensor core; empty: they have been multiplied;
 * done: so has all. */
template <int N> struct tc_ring {
    typedef tc_shape<N> S;
    uint8_t *shared;
    uint64_t *full, *empty, *done;
    uint32_t *tmem_at;

    __device__ explicit tc_ring(uint8_t *smem)
        : shared(smem), full((uint64_t *)(smem + S::BARRIERS)), empty(full + S::COUNT), done(empty + S::COUNT),
          tmem_at((uint32_t *)(done + 1)) {
    }
    __device__ uint32_t stage(uint32_t i) const {
        return cu_smem(shared) + i * S::STAGE;
    }
    /* All threads; the given warp takes tensor memory. Returns where it is. */
    __device__ uint32_t begin(uint32_t warp, uint32_t n_fill) const {
        if (threadIdx.x == 0) {
            for (int s = 0; s < S::COUNT; s++) {
                cu_mbar_init(&full[s], n_fill);
                cu_mbar_init(&empty[s], 1);
            }
            cu_mbar_init(done, 1);
            cu_fence_mbar_init();
        }
        if (threadIdx.x / 32 == warp) {
            cu_tmem_take(tmem_at, S::COLUMNS);
            cu_tmem_done();
        }
        cu_tc_fence_before();
        __syncthreads();
        cu_tc_fence_after();
        return *tmem_at;
    }
    /* Whole warps, until all multiplies are done: the sums can be loaded. */
    __device__ void wait() const {
        cu_mbar_wait(done, 0);
        __syncwarp();
        cu_tc_fence_after();
    }
    /* All threads, when all have what they want of it. */
    __device__ void end(uint32_t warp, uint32_t tmem) const {
        cu_tc_fence_before();
        __syncthreads();
        cu_tc_fence_after();
        if (threadIdx.x / 32 == warp)
            cu_tmem_give(tmem, S::COLUMNS);
    }
    /* Multiplies n stages as they come. By one thread. */
    __device__ void multiply(uint32_t tmem, uint32_t kind, int n) const {
        tc_at<S::COUNT> at;
        for (int kb = 0; kb < n; kb++, at.next()) {
            uint32_t from = stage(at.stage);
            uint32_t a_scales = tmem + N + at.stage * S::STAGE_COLUMNS, b_scales = a_scales + CU_TC_SCALE_COLUMNS;
            cu_mbar_wait(&full[at.stage], at.parity);
            cu_tc_fence_after();
            cu_tc_scales(a_scales, cu_tc_desc_scales(from + S::A_SCALES));
            cu_tc_scales(b_scales, cu_tc_desc_scales(from + S::B_SCALES));
#pragma unroll
            for (uint32_t g = 0; g < TC_K / 32; g++)
                cu_tc_multiply(tmem, cu_tc_desc_k128(from + S::A + g * 32), cu_tc_desc_k128(from + S::B + g * 32),
                               cu_tc_kind_group(kind, g), a_scales, b_scales, kb > 0 || g > 0);
            cu_tc_commit(&empty[at.stage]);
        }
        cu_tc_commit(done);
    }
};

#endif
