/* gemm with E4M3 on both sides by the block-scaled multiplies of Blackwell's tensor cores.
 *
 * out^T [n_out, rows] = W . X^T. 128 outputs are the M of a multiply, up to 128 rows its N, so that few rows cost
 * little and one kernel serves decoding and prefill. A multiply takes 32 k, which is what a scale stands for in both
 * operands: codes and scales go to the tensor core as they are stored, and sums stay in its memory from the first k to
 * the last.
 *
 *   warp 0   asks the copy engine for codes
 *   warp 1   multiplies
 *   warp 2   copies scales
 *   warp 3   has the tensor memory
 *   all      take the sums, a lane (an output) a thread, and store them
 *
 * A block of threads is a tile. Where the tiles don't fill the chip, the blocks of a cluster have a piece of k each,
 * cut by the matrix's shape alone; they read each other's sums and add them in rising order, so that a row has the same
 * bits in any batch as long as a multiply's sums don't depend on its N.
 *
 * Compiled and run over the emulation (tests/harness/cuda_emu_sm100.h), never on a chip. Not known from documents: how
 * many bits the tensor core keeps while it adds, and whether a sum's bits depend on N. */
#include "cu.cuh"
#include "gemm.h"
#include "tiles_sm100.cuh"

enum {
    THREADS = 128,
    HOLDER = 3, /* warp that has the tensor memory */
    CLUSTER_MAX = 8,
    LANES = 16, /* columns of sums that a thread reads at once */
};

template <int N> struct gemm100_block {
    typedef tc_shape<N> S;
    tc_ring<N> ring;
    int64_t out0, row0, col; /* col: of X where k begins */
    int first, n;            /* blocks of k */

    __device__ gemm100_block(uint8_t *shared, const gemm_job &job, const gemm_cut &cut) : ring(shared) {
        int rank = blockIdx.x % cut.cluster;
        out0 = (int64_t)(blockIdx.x / cut.cluster) * TC_M;
        row0 = (int64_t)blockIdx.y * N;
        col = out0 / (job.w.n_out / job.n_groups) * job.w.n_in;
        first = gemm_piece(cut, rank);
        n = gemm_piece(cut, rank + 1) - first;
    }

    /* By one thread. What a box has beyond the arrays comes as zeros. */
    __device__ void copy_codes(const cu_map &w, const cu_map &x) {
        tc_at<S::COUNT> at;
        for (int kb = first; kb < first + n; kb++, at.next()) {
            uint32_t to = ring.stage(at.stage);
            uint64_t *bar = &ring.full[at.stage];
            cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
            cu_mbar_arrive_expect(bar, S::A_SCALES);
            cu_map_load(to + S::A, w, kb * TC_K, (int)out0, bar);
            cu_map_load(to + S::B, x, (int)col + kb * TC_K, (int)row0, bar);
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
            w[i] = job.w.scale + (o / 32 * job.w.n_in + first * TC_K) / 32;
        }
#pragma unroll
        for (int i = 0; i < X_EACH; i++) {
            int64_t row = DI_MIN(row0 + lane + i * 32, job.x.n_rows - 1);
            x[i] = job.x.scale + (row * job.x.n_cols + col + first * TC_K) / 32;
        }
        tc_at<S::COUNT> at, behind;
        for (int kb = 0; kb < n; kb++, at.next()) {
            uint32_t to = ring.stage(at.stage);
            cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < 4; i++)
                cu_cp<4>(to + S::A_SCALES + cu_tc_scale_at(lane + i * 32), w[i] + kb * 4);
#pragma unroll
            for (int i = 0; i < X_EACH; i++)
                cu_cp<4>(to + S::B_SCALES + cu_tc_scale_at(lane + i * 32), x[i] + kb * 4);
            cu_cp_commit();
            if (kb > 0) {
                cu_cp_wait<1>();
                cu_fence_async();
                cu_mbar_arrive(&ring.full[behind.stage]);
                behind.next();
            }
        }
        cu_cp_wait<0>();
        cu_fence_async();
        cu_mbar_arrive(&ring.full[behind.stage]);
    }

    __device__ void store(const gemm_job &job, int r, float v) {
        int64_t row = row0 + r, o = out0 + threadIdx.x;
        if (row < job.x.n_rows && o < job.w.n_out)
            cu_act_store(job.out, row, o, job.add ? v + job.add[row * job.out.stride + o] : v);
    }
    /* All threads; neighbours have neighbouring outputs of a row. In a cluster the sums go to shared memory first,
     * where the stages were: all copies have come, and all multiplies are done. */
    __device__ void finish(const gemm_job &job, const gemm_cut &cut, uint32_t tmem) {
        float *sums = (float *)ring.shared; /* [row][output] */
        for (int r0 = 0; r0 < N; r0 += LANES) {
            float v[LANES];
            cu_tmem_load16(v, tmem + cu_tmem_lane(threadIdx.x / DI_WARP * DI_WARP) + r0);
#pragma unroll
            for (int i = 0; i < LANES; i++) {
                if (cut.cluster == 1)
                    store(job, r0 + i, v[i]);
                else
                    sums[(r0 + i) * TC_M + threadIdx.x] = v[i];
            }
        }
        if (cut.cluster == 1)
            return;
        cu_cluster_sync();
        for (int r = cu_cluster_rank(); r < N; r += cut.cluster) {
            uint32_t from = cu_smem(&sums[r * TC_M + threadIdx.x]);
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
    DI_DYN_SHARED(uint8_t, shared);
    gemm100_block<N> block(shared, job, cut);
    int warp = threadIdx.x / DI_WARP;
    uint32_t tmem = block.ring.begin(HOLDER, 1 + DI_WARP);
    cu_grid_begin();
    if (warp == 0) {
        if (cu_elect())
            block.copy_codes(w, x);
    } else if (warp == 1) {
        if (cu_elect())
            block.ring.multiply(tmem, cu_tc_kind(CU_TC_E4M3, CU_TC_E4M3, N), block.n);
    } else if (warp == 2) {
        block.copy_scales(job);
    }
    __syncwarp();
    block.ring.wait();
    block.finish(job, cut, tmem);
    block.ring.end(HOLDER, tmem);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

bool gemm_sm100_fits(const di_device *dev, const gemm_job *job) {
    const di_act *x = &job->x;
    const di_mat *w = &job->w;
    return dev->arch == DI_CUDA_SM100 && x->dtype == DI_F8_E4M3 && w->dtype == DI_F8_E4M3 && w->n_in % TC_K == 0 &&
           x->stride % 16 == 0 && ((uintptr_t)x->data | (uintptr_t)w->data) % 16 == 0 &&
           ((uintptr_t)x->scale | (uintptr_t)w->scale) % 4 == 0 &&
           (job->n_groups == 1 || w->n_out / job->n_groups % TC_M == 0) && x->n_cols < INT32_MAX &&
           x->n_rows <= 65535 * (int64_t)128 && w->n_out < INT32_MAX / CLUSTER_MAX;
}

/* Pieces of k: the shortest time in blocks of k, where a round costs its blocks and two more, and a cluster two more
 * for each further block that it adds. */
static gemm_cut gemm100_cut(const di_device *dev, const di_mat *w) {
    gemm_cut best = {1, 1, (int)(w->n_in / TC_K)};
    int64_t best_time = INT64_MAX;
    for (int cluster = 1; cluster <= CLUSTER_MAX && (cluster == 1 || cluster * 2 <= best.n_blocks); cluster *= 2) {
        int64_t rounds = gemm_ceil_div(gemm_ceil_div(w->n_out, TC_M) * cluster, dev->n_sms);
        int64_t time = rounds * (gemm_ceil_div(best.n_blocks, cluster) + 2) + (cluster - 1) * 2;
        if (time < best_time) {
            best_time = time;
            best.cluster = cluster;
        }
    }
    return best;
}

template <int N> static bool gemm100_launch(di_stream *stream, const gemm_job &job) {
    gemm_cut cut = gemm100_cut(stream->dev, &job.w);
    uint64_t w_dims[2] = {(uint64_t)job.w.n_in, (uint64_t)job.w.n_out}, w_stride = (uint64_t)job.w.n_in;
    uint64_t x_dims[2] = {(uint64_t)job.x.n_cols, (uint64_t)job.x.n_rows}, x_stride = (uint64_t)job.x.stride;
    uint32_t w_box[2] = {TC_K, TC_M}, x_box[2] = {TC_K, N};
    cu_map w, x;
    if (!cu_map_make(&w, job.w.data, 2, w_dims, &w_stride, w_box) ||
        !cu_map_make(&x, job.x.data, 2, x_dims, &x_stride, x_box))
        return false;
    dim3 grid((unsigned)(gemm_ceil_div(job.w.n_out, TC_M) * cut.cluster), (unsigned)gemm_ceil_div(job.x.n_rows, N));
    DI_LAUNCH_CLUSTER_PDL((gemm100<N>), dim3((unsigned)cut.cluster), grid, THREADS, tc_shape<N>::ALL, stream->stream,
                          job, cut, w, x);
    return true;
}

bool gemm_sm100(di_stream *stream, const gemm_job *job) {
    int64_t n = job->x.n_rows;
    return n <= 16   ? gemm100_launch<16>(stream, *job)
           : n <= 32 ? gemm100_launch<32>(stream, *job)
           : n <= 64 ? gemm100_launch<64>(stream, *job)
                     : gemm100_launch<128>(stream, *job);
}
