/* gemm with E4M3 on both sides by the block-scaled multiplies of Blackwell's tensor cores.
 *
 * out^T [n_out, rows] = W . X^T. 128 outputs are the M of a multiply, up to 128 rows its N, so that few rows cost
 * little and one kernel serves decoding and prefill. A multiply takes 32 k, which is what a scale stands for in both
 * operands: codes and scales go to the tensor core as they are stored, and sums stay in its memory from the first k to
 * the last.
 *
 *   warp 0   asks the copy engine for codes          stage: W 128 x 128 | X N x 128 | scales of W, of X
 *   warp 1   copies scales, multiplies               full: codes and scales are there; empty: they have been multiplied
 *   warp 2   copies scales to the stage
 *   warp 3   has the tensor memory                   columns: sums [N] | stage 0: scales of W [4], of X [4] | stage 1
 * .. all      take the sums, a lane (an output) a thread, and store them
 *
 * A block of threads is a tile. Where the tiles don't fill the chip, the blocks of a cluster have a piece of k each,
 * cut by the matrix's shape alone; they read each other's sums and add them in rising order, so that a row has the same
 * bits in any batch as long as a multiply's sums don't depend on its N.
 *
 * Compiled and run over the emulation (tests/harness/cuda_emu_sm100.h), never on a chip. Not known from documents: how
 * many bits the tensor core keeps while it adds, and whether a sum's bits depend on N. */
#include "cu.cuh"
#include "gemm.h"
#include "sm100.cuh"

enum {
    OUT_TILE = 128,
    BLOCK_K = 128, /* k of a stage: four multiplies */
    THREADS = 128,
    CLUSTER_MAX = 8,
    LANES = 16, /* columns of sums that a thread reads at once */
};

/* Two blocks share a multiprocessor: a third would wait for tensor memory, and in a cluster perhaps for ever, so none
 * has less than a third of the shared memory, and none more than half of either. */
template <int N> struct gemm100_shape {
    static constexpr int W = 0, X = OUT_TILE * BLOCK_K, W_SCALES = X + N * BLOCK_K, X_SCALES = W_SCALES + CU_TC_SCALES;
    static constexpr int STAGE = X_SCALES + CU_TC_SCALES, COUNT = N <= 32 ? 5 : N == 64 ? 4 : 3;
    static constexpr int BARRIERS = COUNT * STAGE, N_BARRIERS = 2 * COUNT + 1;
    static constexpr int ALL = BARRIERS + N_BARRIERS * 8 + 8;
    static constexpr uint32_t STAGE_COLUMNS = 2 * CU_TC_SCALE_COLUMNS;
    static constexpr uint32_t COLUMNS = N == 16 ? 64 : N <= 64 ? 128 : 256;
    static_assert(STAGE % 1024 == 0 && N % 16 == 0 && N <= 128, "a stage begins an atom; scales of N in one copy");
    static_assert(N + COUNT * STAGE_COLUMNS <= COLUMNS, "sums and scales in tensor memory");
    static_assert(ALL > 228 * 1024 / 3 && ALL <= 113 * 1024, "two blocks, and no third");
    static_assert(N * OUT_TILE * 4 <= COUNT * STAGE, "sums take the place of the stages");
};

/* A place in the ring and the parity of its round. */
template <int COUNT> struct gemm100_at {
    uint32_t stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int N> struct gemm100_block {
    typedef gemm100_shape<N> S;
    uint8_t *shared;
    uint64_t *full, *empty, *done;
    uint32_t *tmem_at;
    int64_t out0, row0, col; /* col: of X where k begins */
    int first, n;            /* blocks of k */

    __device__ gemm100_block(uint8_t *smem, const gemm_job &job, const gemm_cut &cut) : shared(smem) {
        int rank = blockIdx.x % cut.cluster;
        full = (uint64_t *)(smem + S::BARRIERS);
        empty = full + S::COUNT;
        done = empty + S::COUNT;
        tmem_at = (uint32_t *)(done + 1);
        out0 = (int64_t)(blockIdx.x / cut.cluster) * OUT_TILE;
        row0 = (int64_t)blockIdx.y * N;
        col = out0 / (job.w.n_out / job.n_groups) * job.w.n_in;
        first = gemm_piece(cut, rank);
        n = gemm_piece(cut, rank + 1) - first;
    }
    __device__ uint32_t stage_at(uint32_t stage) const {
        return cu_smem(shared) + stage * S::STAGE;
    }

    /* By one thread. What a box has beyond the arrays comes as zeros. */
    __device__ void copy_codes(const cu_map &w, const cu_map &x) {
        gemm100_at<S::COUNT> at;
        for (int kb = first; kb < first + n; kb++, at.next()) {
            uint32_t to = stage_at(at.stage);
            uint64_t *bar = &full[at.stage];
            cu_mbar_wait(&empty[at.stage], at.parity ^ 1);
            cu_mbar_arrive_expect(bar, S::W_SCALES);
            cu_map_load(to + S::W, w, kb * BLOCK_K, (int)out0, bar);
            cu_map_load(to + S::X, x, (int)col + kb * BLOCK_K, (int)row0, bar);
        }
    }

    /* By a warp: the words, four scales each, of 128 outputs and of N rows; a scale of W is one of 32 outputs. Outputs
     * and rows beyond the last have the last one's, their codes are zeros. The tensor core sees what a thread wrote
     * after its fence: stages become full one block of k behind the copies. */
    __device__ void copy_scales(const gemm_job &job) {
        constexpr int X_EACH = (N + 31) / 32;
        int lane = threadIdx.x % DI_WARP;
        const uint8_t *w[4], *x[X_EACH];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int64_t o = DI_MIN(out0 + i * 32, job.w.n_out - 1);
            w[i] = job.w.scale + (o / 32 * job.w.n_in + first * BLOCK_K) / 32;
        }
#pragma unroll
        for (int i = 0; i < X_EACH; i++) {
            int64_t row = DI_MIN(row0 + lane + i * 32, job.x.n_rows - 1);
            x[i] = job.x.scale + (row * job.x.n_cols + col + first * BLOCK_K) / 32;
        }
        gemm100_at<S::COUNT> at, behind;
        for (int kb = 0; kb < n; kb++, at.next()) {
            uint32_t to = stage_at(at.stage);
            cu_mbar_wait(&empty[at.stage], at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < 4; i++)
                cu_cp<4>(to + S::W_SCALES + cu_tc_scale_at(lane + i * 32), w[i] + kb * 4);
#pragma unroll
            for (int i = 0; i < X_EACH; i++)
                cu_cp<4>(to + S::X_SCALES + cu_tc_scale_at(lane + i * 32), x[i] + kb * 4);
            cu_cp_commit();
            if (kb > 0) {
                cu_cp_wait<1>();
                cu_fence_async();
                cu_mbar_arrive(&full[behind.stage]);
                behind.next();
            }
        }
        cu_cp_wait<0>();
        cu_fence_async();
        cu_mbar_arrive(&full[behind.stage]);
    }

    /* By one thread. */
    __device__ void multiply(uint32_t tmem) {
        constexpr uint32_t KIND = cu_tc_kind(CU_TC_E4M3, CU_TC_E4M3, N);
        gemm100_at<S::COUNT> at;
        for (int kb = 0; kb < n; kb++, at.next()) {
            uint32_t from = stage_at(at.stage);
            uint32_t w_scales = tmem + N + at.stage * S::STAGE_COLUMNS, x_scales = w_scales + CU_TC_SCALE_COLUMNS;
            cu_mbar_wait(&full[at.stage], at.parity);
            cu_tc_fence_after();
            cu_tc_scales(w_scales, cu_tc_desc_scales(from + S::W_SCALES));
            cu_tc_scales(x_scales, cu_tc_desc_scales(from + S::X_SCALES));
#pragma unroll
            for (uint32_t g = 0; g < BLOCK_K / 32; g++)
                cu_tc_multiply(tmem, cu_tc_desc_k128(from + S::W + g * 32), cu_tc_desc_k128(from + S::X + g * 32),
                               cu_tc_kind_group(KIND, g), w_scales, x_scales, kb > 0 || g > 0);
            cu_tc_commit(&empty[at.stage]);
        }
        cu_tc_commit(done);
    }

    __device__ void store(const gemm_job &job, int r, float v) {
        int64_t row = row0 + r, o = out0 + threadIdx.x;
        if (row < job.x.n_rows && o < job.w.n_out)
            cu_act_store(job.out, row, o, job.add ? v + job.add[row * job.out.stride + o] : v);
    }
    /* All threads; neighbours have neighbouring outputs of a row. In a cluster the sums go to shared memory first,
     * where the stages were: all copies have come, and all multiplies are done. */
    __device__ void finish(const gemm_job &job, const gemm_cut &cut, uint32_t tmem) {
        float *sums = (float *)shared; /* [row][output] */
        for (int r0 = 0; r0 < N; r0 += LANES) {
            float v[LANES];
            cu_tmem_load16(v, tmem + cu_tmem_lane(threadIdx.x / DI_WARP * DI_WARP) + r0);
#pragma unroll
            for (int i = 0; i < LANES; i++) {
                if (cut.cluster == 1)
                    store(job, r0 + i, v[i]);
                else
                    sums[(r0 + i) * OUT_TILE + threadIdx.x] = v[i];
            }
        }
        if (cut.cluster == 1)
            return;
        cu_cluster_sync();
        for (int r = cu_cluster_rank(); r < N; r += cut.cluster) {
            uint32_t from = cu_smem(&sums[r * OUT_TILE + threadIdx.x]);
            float v[CLUSTER_MAX]; /* under way together */
#pragma unroll
            for (int p = 0; p < CLUSTER_MAX; p++)
                v[p] = p < cut.cluster ? cu_dsmem_load(cu_mapa(from, p)) : 0.0f;
            float sum = v[0];
#pragma unroll
            for (int p = 1; p < CLUSTER_MAX; p++)
                sum = p < cut.cluster ? sum + v[p] : sum;
            store(job, r, sum);
        }
        cu_cluster_sync(); /* nobody leaves while its sums are read */
    }
};

/* Grid: (pieces of k, tiles of outputs; tiles of rows); a cluster is the pieces of a tile. Tensor memory is taken
 * before the next kernel may begin, whose blocks would else have it first and wait for this one. */
template <int N>
__global__ void __launch_bounds__(THREADS)
    gemm100(const __grid_constant__ gemm_job job, const __grid_constant__ gemm_cut cut,
            const __grid_constant__ cu_map w, const __grid_constant__ cu_map x) {
    typedef gemm100_shape<N> S;
    DI_DYN_SHARED(uint8_t, shared);
    gemm100_block<N> block(shared, job, cut);
    int warp = threadIdx.x / DI_WARP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::COUNT; s++) {
            cu_mbar_init(&block.full[s], 1 + DI_WARP);
            cu_mbar_init(&block.empty[s], 1);
        }
        cu_mbar_init(block.done, 1);
        cu_fence_mbar_init();
    }
    if (warp == 3) {
        cu_tmem_take(block.tmem_at, S::COLUMNS);
        cu_tmem_done();
    }
    cu_tc_fence_before();
    __syncthreads();
    cu_tc_fence_after();
    uint32_t tmem = *block.tmem_at;
    cu_grid_begin();
    if (warp == 0) {
        if (cu_elect())
            block.copy_codes(w, x);
    } else if (warp == 1) {
        if (cu_elect())
            block.multiply(tmem);
    } else if (warp == 2) {
        block.copy_scales(job);
    }
    __syncwarp();
    cu_mbar_wait(block.done, 0);
    cu_tc_fence_after();
    block.finish(job, cut, tmem);
    cu_tc_fence_before();
    __syncthreads();
    cu_tc_fence_after();
    if (warp == 3)
        cu_tmem_give(tmem, S::COLUMNS);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

bool gemm_sm100_fits(const di_device *dev, const gemm_job *job) {
    const di_act *x = &job->x;
    const di_mat *w = &job->w;
    return dev->arch == DI_CUDA_SM100 && x->dtype == DI_F8_E4M3 && w->dtype == DI_F8_E4M3 && w->n_in % BLOCK_K == 0 &&
           x->stride % 16 == 0 && ((uintptr_t)x->data | (uintptr_t)w->data) % 16 == 0 &&
           ((uintptr_t)x->scale | (uintptr_t)w->scale) % 4 == 0 &&
           (job->n_groups == 1 || w->n_out / job->n_groups % OUT_TILE == 0) && x->n_cols < INT32_MAX &&
           x->n_rows <= 65535 * (int64_t)128 && w->n_out < INT32_MAX / CLUSTER_MAX;
}

/* Pieces of k: the shortest time in blocks of k, where a round costs its blocks and two more, and a cluster two more
 * for each further block that it adds. */
static gemm_cut gemm100_cut(const di_device *dev, const di_mat *w) {
    gemm_cut best = {1, 1, (int)(w->n_in / BLOCK_K)};
    int64_t best_time = INT64_MAX;
    for (int cluster = 1; cluster <= CLUSTER_MAX && (cluster == 1 || cluster * 2 <= best.n_blocks); cluster *= 2) {
        int64_t rounds = ceil_div(ceil_div(w->n_out, OUT_TILE) * cluster, dev->n_sms);
        int64_t time = rounds * (ceil_div(best.n_blocks, cluster) + 2) + (cluster - 1) * 2;
        if (time < best_time) {
            best_time = time;
            best.cluster = cluster;
        }
    }
    return best;
}

template <int N> static bool gemm100_launch(di_stream *stream, const gemm_job &job) {
    typedef gemm100_shape<N> S;
    gemm_cut cut = gemm100_cut(stream->dev, &job.w);
    uint64_t w_dims[2] = {(uint64_t)job.w.n_in, (uint64_t)job.w.n_out}, w_stride = (uint64_t)job.w.n_in;
    uint64_t x_dims[2] = {(uint64_t)job.x.n_cols, (uint64_t)job.x.n_rows}, x_stride = (uint64_t)job.x.stride;
    uint32_t w_box[2] = {BLOCK_K, OUT_TILE}, x_box[2] = {BLOCK_K, N};
    cu_map w, x;
    if (!cu_map_make(&w, job.w.data, 2, w_dims, &w_stride, w_box) ||
        !cu_map_make(&x, job.x.data, 2, x_dims, &x_stride, x_box))
        return false;
    dim3 grid((unsigned)(ceil_div(job.w.n_out, OUT_TILE) * cut.cluster), (unsigned)ceil_div(job.x.n_rows, N));
    DI_LAUNCH_CLUSTER_PDL((gemm100<N>), dim3((unsigned)cut.cluster), grid, THREADS, S::ALL, stream->stream, job, cut, w,
                          x);
    return true;
}

bool gemm_sm100(di_stream *stream, const gemm_job *job) {
    int64_t n = job->x.n_rows;
    return n <= 16   ? gemm100_launch<16>(stream, *job)
           : n <= 32 ? gemm100_launch<32>(stream, *job)
           : n <= 64 ? gemm100_launch<64>(stream, *job)
                     : gemm100_launch<128>(stream, *job);
}
