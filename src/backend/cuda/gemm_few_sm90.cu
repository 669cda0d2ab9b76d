/* gemm of few rows with E4M3 on both sides: the codes are multiplied as they are stored, nothing is widened.
 *
 * out^T [n_out, rows] = W . X^T. A warpgroup has 64 outputs, a tile of up to 64 rows and a piece of k; it copies what
 * it multiplies, several blocks of k ahead, and the four of a block of threads overlap. As in gemm_fp8_sm90.cu each
 * scale group of 32 k is one multiply from zero, whose sums are added to the accumulators times both scales: the same
 * products in the same places, so that a row has the same bits in either form.
 *
 * Where the tiles don't fill the chip k is cut into pieces, by the matrix's shape alone: between the warpgroups of a
 * block and between the blocks of a cluster, which read each other's sums and add them in rising order. */
#include "gemm_store.cuh"
#include "sm90.cuh"

enum {
    OUT_TILE = 64,
    BLOCK_K = 128, /* k of a stage: four scale groups */
    WARPGROUP = 128,
    WARPGROUPS = 4,
    THREADS = WARPGROUP * WARPGROUPS,
    CLUSTER_MAX = 4,
    BATCH = 8,               /* sums of pieces that are read at once */
    SUM_PITCH = OUT_TILE + 4 /* floats between rows of sums that are exchanged */
};

template <int N> struct few_stage {
    static constexpr int W = 0, X = OUT_TILE * BLOCK_K, BYTES = X + N * BLOCK_K;
    /* Apart, at the end: X's four floats of each row by group, before them the words that they are made of. */
    static constexpr int X_WORD = 0, W_WORD = N * 4, X_SCALE = N * 4 + 16, SCALES = X_SCALE + 4 * N * 4;
    static constexpr int COUNT = N <= 16 ? 5 : N == 32 ? 4 : 3;
    static constexpr int TEMPS = N <= 32 ? 4 : 1;
    static constexpr size_t ALL = (size_t)WARPGROUPS * COUNT * (BYTES + SCALES);
    static_assert(N * SUM_PITCH * 4 <= COUNT * BYTES, "sums take the place of a warpgroup's stages");
};

/* What a warpgroup reads, a block of k after the other. */
template <int N> struct few_source {
    typedef few_stage<N> S;
    static constexpr int W_EACH = OUT_TILE * 8 / WARPGROUP, X_EACH = (N * 8 + WARPGROUP - 1) / WARPGROUP;
    const uint8_t *w[W_EACH], *x[X_EACH], *scale; /* scale: the word that this thread copies, or NULL */
    int scale_to;

    __device__ void set(const gemm_job &job, int64_t out0, int64_t row0, int64_t k0) {
        int t = threadIdx.x % WARPGROUP, chunk = t % 8 * 16;
        int64_t last_out = job.w.n_out - 1, last_row = job.x.n_rows - 1;
        int64_t col = k0;
        if (job.n_groups > 1)
            col += (int)out0 / ((int)job.w.n_out / job.n_groups) * job.w.n_in;
#pragma unroll
        for (int i = 0; i < W_EACH; i++) {
            int64_t o = out0 + t / 8 + i * 16;
            w[i] = (const uint8_t *)job.w.data + (o < last_out ? o : last_out) * job.w.n_in + k0 + chunk;
        }
#pragma unroll
        for (int i = 0; i < X_EACH; i++) {
            int64_t row = row0 + t / 8 + i * 16;
            x[i] = (const uint8_t *)job.x.data + (row < last_row ? row : last_row) * job.x.stride + col + chunk;
        }
        scale = NULL;
        scale_to = 0;
        if (t < N) {
            int64_t row = row0 + t < last_row ? row0 + t : last_row;
            scale = job.x.scale + (row * job.x.n_cols + col) / 32;
            scale_to = S::X_WORD + t * 4;
        } else if (t >= WARPGROUP - OUT_TILE / 32) {
            int q = t - (WARPGROUP - OUT_TILE / 32);
            int64_t o = out0 + q * 32 < last_out ? out0 + q * 32 : last_out;
            scale = job.w.scale + (o / 32 * job.w.n_in + k0) / 32;
            scale_to = S::W_WORD + q * 4;
        }
    }
    __device__ void copy_w(uint32_t stage) {
        int t = threadIdx.x % WARPGROUP, chunk = t % 8 * 16;
#pragma unroll
        for (int i = 0; i < W_EACH; i++) {
            cu_cp16(stage + S::W + cu_sw128(t / 8 + i * 16, chunk, OUT_TILE), w[i]);
            w[i] += BLOCK_K;
        }
    }
    __device__ void copy_x(uint32_t stage, uint32_t scales) {
        int t = threadIdx.x % WARPGROUP, chunk = t % 8 * 16;
#pragma unroll
        for (int i = 0; i < X_EACH; i++) {
            if (N >= 16 || t < N * 8)
                cu_cp16(stage + S::X + cu_sw128(t / 8 + i * 16, chunk, N), x[i]);
            x[i] += BLOCK_K;
        }
        if (scale) {
            cu_cp<4>(scales + scale_to, scale);
            scale += BLOCK_K / 32;
        }
    }
    /* A thread widens the word that it has copied itself, which no one else needs to see. */
    __device__ static void widen(uint8_t *scales) {
        int t = threadIdx.x % WARPGROUP;
        if (t < N) {
            uint32_t word = *(const uint32_t *)(scales + S::X_WORD + t * 4);
#pragma unroll
            for (int g = 0; g < 4; g++)
                *(float *)(scales + S::X_SCALE + (g * N + t) * 4) = cu_scale_at(word, g);
        }
    }
};

/* Groups G, G+1, .. of a stage whose multiplies are complete. */
template <int N> struct few_sums {
    typedef few_stage<N> S;
    float acc[N / 2], temp[S::TEMPS][N / 2];

    __device__ void block(uint32_t stage, const uint8_t *scales) {
        int t = threadIdx.x % WARPGROUP;
        uint32_t sw = *(const uint32_t *)(scales + S::W_WORD + t / 64 * 4);
        const uint8_t *xs = scales + S::X_SCALE + t % 4 * 8;
#pragma unroll
        for (int g0 = 0; g0 < 4; g0 += S::TEMPS) {
            cu_wgmma_fence();
#pragma unroll
            for (int i = 0; i < S::TEMPS; i++)
                cu_wgmma_e4m3_ss(temp[i], cu_desc_k128(stage + S::W + (g0 + i) * 32),
                                 cu_desc_k128(stage + S::X + (g0 + i) * 32), 0);
            cu_wgmma_commit();
            cu_wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < S::TEMPS; i++) {
                cu_wgmma_pin(temp[i]);
                float w = cu_scale_at(sw, g0 + i);
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    float2 x = *(const float2 *)(xs + (g0 + i) * N * 4 + j * 32);
                    float s0 = x.x * w, s1 = x.y * w;
                    acc[4 * j] = fmaf(temp[i][4 * j], s0, acc[4 * j]);
                    acc[4 * j + 1] = fmaf(temp[i][4 * j + 1], s1, acc[4 * j + 1]);
                    acc[4 * j + 2] = fmaf(temp[i][4 * j + 2], s0, acc[4 * j + 2]);
                    acc[4 * j + 3] = fmaf(temp[i][4 * j + 3], s1, acc[4 * j + 3]);
                }
            }
        }
    }
};

/* Grid: (blocks of a cluster, groups of output tiles; row tiles). */
template <int N>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_few(const __grid_constant__ gemm_job job, const __grid_constant__ gemm_cut cut) {
    typedef few_stage<N> S;
    DI_DYN_SHARED(uint8_t, shared);
    int t = threadIdx.x % WARPGROUP, group = threadIdx.x / WARPGROUP;
    int rank = blockIdx.x % cut.cluster, piece = rank * cut.k_ways + group % cut.k_ways, place = group / cut.k_ways;
    int64_t out0 = ((int64_t)(blockIdx.x / cut.cluster) * (WARPGROUPS / cut.k_ways) + place) * OUT_TILE;
    int64_t row0 = (int64_t)blockIdx.y * N;
    int k0 = gemm_piece(cut, piece), n = out0 < job.w.n_out ? gemm_piece(cut, piece + 1) - k0 : 0;
    uint8_t *mine = shared + group * S::COUNT * S::BYTES;
    uint8_t *scales = shared + (WARPGROUPS * S::BYTES + group * S::SCALES) * S::COUNT;
    few_source<N> source;
    source.set(job, out0, row0, (int64_t)k0 * BLOCK_K);
#pragma unroll
    for (int s = 0; s < S::COUNT - 1; s++) { /* weights don't depend on the kernels before */
        if (s < n)
            source.copy_w(cu_smem(mine) + s * S::BYTES);
    }
    cu_grid_wait();
    cu_grid_launch();
#pragma unroll
    for (int s = 0; s < S::COUNT - 1; s++) {
        if (s < n)
            source.copy_x(cu_smem(mine) + s * S::BYTES, cu_smem(scales) + s * S::SCALES);
        cu_cp_commit();
    }
    few_sums<N> sums;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        sums.acc[i] = 0;
    int now = 0, next = S::COUNT - 1;
    for (int kb = 0; kb < n; kb++) {
        cu_cp_wait<S::COUNT - 2>();
        cu_fence_async();
        source.widen(scales + now * S::SCALES);
        cu_bar_sync(1 + group, WARPGROUP); /* the block is there, and everyone is done with the one before */
        if (kb + S::COUNT - 1 < n) {
            source.copy_w(cu_smem(mine) + next * S::BYTES);
            source.copy_x(cu_smem(mine) + next * S::BYTES, cu_smem(scales) + next * S::SCALES);
        }
        cu_cp_commit();
        sums.block(cu_smem(mine) + now * S::BYTES, scales + now * S::SCALES);
        now = now + 1 == S::COUNT ? 0 : now + 1;
        next = next + 1 == S::COUNT ? 0 : next + 1;
    }
    cu_bar_sync(1 + group, WARPGROUP);
    float *left = (float *)mine; /* [row][output] */
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        left[cu_acc_col(t, i) * SUM_PITCH + cu_acc_row(t, i)] = sums.acc[i];
    if (cut.cluster > 1)
        cu_cluster_sync();
    else
        __syncthreads();
    int n_pieces = cut.cluster * cut.k_ways;
    /* Warps by turns over the blocks of the cluster, so that all of them read. */
    int share = (t / DI_WARP * cut.k_ways + group % cut.k_ways) * cut.cluster + rank;
    for (int e = share * DI_WARP + t % DI_WARP; e < N * OUT_TILE / 4; e += n_pieces * WARPGROUP) {
        int64_t row = row0 + e / (OUT_TILE / 4), o = out0 + e % (OUT_TILE / 4) * 4;
        int at = e / (OUT_TILE / 4) * SUM_PITCH + e % (OUT_TILE / 4) * 4;
        if (row >= job.x.n_rows || o >= job.w.n_out)
            continue;
        float4 sum = {};
        for (int p0 = 0; p0 < n_pieces; p0 += BATCH) {
            float4 v[BATCH]; /* under way together */
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int p = p0 + i, r = p / cut.k_ways, k = p % cut.k_ways;
                if (p < n_pieces) {
                    uint32_t from = cu_smem(shared) + (place * cut.k_ways + k) * S::COUNT * S::BYTES + at * 4;
                    v[i] = cut.cluster == 1 ? *(const float4 *)(shared + (from - cu_smem(shared)))
                                            : cu_dsmem_load4(cu_mapa(from, (uint32_t)r));
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (p0 + i < n_pieces) {
                    bool is_first = p0 + i == 0;
                    sum.x = is_first ? v[i].x : sum.x + v[i].x;
                    sum.y = is_first ? v[i].y : sum.y + v[i].y;
                    sum.z = is_first ? v[i].z : sum.z + v[i].z;
                    sum.w = is_first ? v[i].w : sum.w + v[i].w;
                }
            }
        }
        gemm_store(job, row, o, sum);
    }
    if (cut.cluster > 1)
        cu_cluster_sync(); /* nobody leaves while its sums are read */
}

/* The shortest time, in blocks of k: a round costs its blocks and two more, and two more for each
 * further block of a cluster. */
gemm_cut gemm_fp8_cut(const di_device *dev, const di_mat *w) {
    gemm_cut best = {};
    int64_t n_tiles = gemm_ceil_div(w->n_out, OUT_TILE), n_blocks = w->n_in / BLOCK_K, best_time = INT64_MAX;
    for (int cluster = 1; cluster <= CLUSTER_MAX; cluster++) {
        for (int ways = 1; ways <= WARPGROUPS; ways *= 2) {
            int pieces = cluster * ways;
            int64_t blocks = gemm_ceil_div(n_tiles, WARPGROUPS / ways) * cluster;
            int64_t room = cluster > 1 ? dev->n_sms * 5 / 6 : dev->n_sms; /* clusters leave some unused */
            int64_t time = gemm_ceil_div(blocks, room) * (gemm_ceil_div(n_blocks, pieces) + 2) + (cluster - 1) * 2;
            if ((pieces > 1 && pieces * 2 > n_blocks) || time >= best_time)
                continue;
            best_time = time;
            best = {cluster, ways, (int)n_blocks};
        }
    }
    return best;
}

template <int N> static void few_launch(const di_stream *stream, const gemm_job &job, const gemm_cut &cut) {
    int64_t groups = gemm_ceil_div(gemm_ceil_div(job.w.n_out, OUT_TILE), WARPGROUPS / cut.k_ways);
    dim3 grid((unsigned)(groups * cut.cluster), (unsigned)gemm_ceil_div(job.x.n_rows, N));
    if (cut.cluster > 1) {
        DI_LAUNCH_CLUSTER_PDL((gemm_few<N>), dim3((unsigned)cut.cluster), grid, THREADS, few_stage<N>::ALL,
                              stream->stream, job, cut);
    } else {
        DI_LAUNCH_PDL((gemm_few<N>), grid, THREADS, few_stage<N>::ALL, stream->stream, job, cut);
    }
}

void gemm_sm90_few(const di_stream *stream, const gemm_job *job, const gemm_cut *cut) {
    int64_t n = job->x.n_rows;
    if (n <= 8)
        few_launch<8>(stream, *job, *cut);
    else if (n <= 16)
        few_launch<16>(stream, *job, *cut);
    else if (n <= 32)
        few_launch<32>(stream, *job, *cut);
    else
        few_launch<64>(stream, *job, *cut);
}
