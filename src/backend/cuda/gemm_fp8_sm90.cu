/* gemm of many rows with E4M3 on both sides, by the fp8 multiplies of Hopper's tensor cores.
 *
 * out [rows, n_out] = X . W^T with the codes of both in shared memory as they are stored. A scale belongs to 32 k,
 * which is one multiply: it starts from zero, and its sums are then added to the accumulators, times the scales of row
 * and output, on the ordinary units, while the next one runs.
 *
 * Inside a multiply the hardware lines the 32 products up with the largest and keeps about 13 bits below it: a group's
 * sum is off by at most 32 * 2^-13 of its largest product, in practice by far less than the rounding of the result. The
 * product of the two scales must be a float; a scale 255 (NaN) acts as infinity.
 *
 * A block of threads has 128*M rows (two warpgroups of M tiles of 64) and 128 outputs; a third warpgroup copies. Output
 * o of 32 lies at row 8*(o%8/2) + 2*(o/8) + o%2 of the operand, so that accumulators of a thread are eight neighbours.
 */
#include "cu.cuh"
#include "gemm.h"
#include "sm90.cuh"

enum {
    OUT_TILE = 128,
    BLOCK_K = 128,   /* k of a stage: four scale groups */
    CONSUMERS = 256, /* threads */
    THREADS = 384,   /* and a warpgroup that copies */
    WARPGROUP = 128,
    SCALERS = WARPGROUP - 32,
    BAND = 8, /* row tiles */
};

template <int M> struct fp8_stage {
    static constexpr int ROWS = 128 * M, X = 0, W = ROWS * BLOCK_K, X_SCALE = W + OUT_TILE * BLOCK_K;
    static constexpr int W_SCALE = X_SCALE + ROWS * 4;
    static constexpr int BYTES = (W_SCALE + 16 + 1023) / 1024 * 1024;
    static constexpr int COUNT = M == 2 ? 4 : 6;
    static constexpr size_t ALL = (size_t)COUNT * BYTES + 2 * COUNT * sizeof(uint64_t);
};

template <int M> struct fp8_ring {
    uint8_t *stages;
    uint64_t *full, *empty;

    __device__ explicit fp8_ring(uint8_t *shared)
        : stages(shared), full((uint64_t *)(shared + fp8_stage<M>::COUNT * fp8_stage<M>::BYTES)),
          empty(full + fp8_stage<M>::COUNT) {
    }
};

/* A place in the ring and the parity of its round. */
template <int COUNT> struct fp8_at {
    uint32_t stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* The tiles of a product. Bands of 8 row tiles, inside a band output by output, so that what runs together shares rows
 * of both operands. */
struct fp8_tiles {
    int n_row_tiles, n_out_tiles;

    __device__ int count() const {
        return n_row_tiles * n_out_tiles;
    }
    template <int M> __device__ void at(int t, int64_t &row0, int64_t &out0) const {
        int per_band = BAND * n_out_tiles, first = t / per_band * BAND, in_band = t % per_band;
        int n = n_row_tiles - first < BAND ? n_row_tiles - first : BAND;
        row0 = (int64_t)(first + in_band % n) * fp8_stage<M>::ROWS;
        out0 = (int64_t)(in_band / n) * OUT_TILE;
    }
};

/* ---- copying -----------------------------------------------------------------------------------------------------
 * The first thread asks the copy engine for codes; the other three warps copy scales, whose rows are too short for it.
 */

/* X: [rows][k]. W: [out/32][out%8/2][out/8%4][out%2][k]. */
struct fp8_maps {
    cu_map x, w;
};

static bool fp8_maps_make(fp8_maps *maps, const gemm_job &job, uint32_t n_rows) {
    uint64_t n_in = (uint64_t)job.w.n_in, x_dims[2] = {(uint64_t)job.x.n_cols, (uint64_t)job.x.n_rows};
    uint64_t x_stride[1] = {(uint64_t)job.x.stride}, w_dims[5] = {n_in, 2, 4, 4, (uint64_t)job.w.n_out / 32};
    uint64_t w_strides[4] = {n_in, 8 * n_in, 2 * n_in, 32 * n_in};
    uint32_t x_box[2] = {BLOCK_K, n_rows}, w_box[5] = {BLOCK_K, 2, 4, 4, OUT_TILE / 32};
    return cu_map_make(&maps->x, job.x.data, 2, x_dims, x_stride, x_box) &&
           cu_map_make(&maps->w, job.w.data, 5, w_dims, w_strides, w_box);
}

template <int M>
__device__ static inline void fp8_copy_codes(const gemm_job &job, const fp8_ring<M> &ring, const fp8_tiles &tiles,
                                             const fp8_maps &maps) {
    typedef fp8_stage<M> S;
    int n_blocks = (int)(job.w.n_in / BLOCK_K), n_tiles = tiles.count();
    fp8_at<S::COUNT> at;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        int64_t row0, out0;
        tiles.at<M>(tile, row0, out0);
        int col = (int)(out0 / (job.w.n_out / job.n_groups) * job.w.n_in);
        for (int kb = 0; kb < n_blocks; kb++, at.next()) {
            cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
            uint64_t *full = &ring.full[at.stage];
            uint32_t to = cu_smem(ring.stages) + at.stage * S::BYTES;
            cu_mbar_arrive_expect(full, S::X_SCALE);
            cu_map_load(to + S::X, maps.x, col + kb * BLOCK_K, (int)row0, full);
            cu_map_load5(to + S::W, maps.w, kb * BLOCK_K, (int)(out0 / 32), full);
        }
    }
}

/* By threads 0..SCALERS - 1. */
template <int M>
__device__ static inline void fp8_copy_scales(const gemm_job &job, const fp8_ring<M> &ring, const fp8_tiles &tiles,
                                              int t) {
    typedef fp8_stage<M> S;
    constexpr int EACH = (S::ROWS + SCALERS - 1) / SCALERS;
    int n_blocks = (int)(job.w.n_in / BLOCK_K), n_tiles = tiles.count();
    int64_t last_row = job.x.n_rows - 1, last_out = job.w.n_out - 1;
    fp8_at<S::COUNT> at;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        int64_t row0, out0;
        tiles.at<M>(tile, row0, out0);
        int64_t col = out0 / (job.w.n_out / job.n_groups) * job.w.n_in;
        const uint8_t *x[EACH], *w = NULL;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int64_t row = row0 + t + i * SCALERS;
            x[i] = job.x.scale + ((row < last_row ? row : last_row) * job.x.n_cols + col) / 32;
        }
        if (t < OUT_TILE / 32) {
            int64_t o = out0 + t * 32 < last_out ? out0 + t * 32 : last_out;
            w = job.w.scale + o / 32 * (job.w.n_in / 32);
        }
        for (int kb = 0; kb < n_blocks; kb++, at.next()) {
            cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
            uint32_t to = cu_smem(ring.stages) + at.stage * S::BYTES;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (t + i * SCALERS < S::ROWS)
                    cu_cp<4>(to + S::X_SCALE + (t + i * SCALERS) * 4, x[i]);
                x[i] += BLOCK_K / 32;
            }
            if (w) {
                cu_cp<4>(to + S::W_SCALE + t * 4, w);
                w += BLOCK_K / 32;
            }
            cu_mbar_arrive_cp(&ring.full[at.stage]);
        }
    }
    cu_cp_wait<0>();
}

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* Eight neighbouring outputs of a row. */
__device__ static inline void fp8_store(const gemm_job &job, int64_t row, int64_t o, const float (&v)[8]) {
    int64_t at = row * job.out.stride + o;
    if (job.aligned >= 8 && o + 8 <= job.w.n_out) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 add = job.add ? *(const float4 *)(job.add + at + i) : make_float4(0, 0, 0, 0);
            y[i] = v[i] + add.x;
            y[i + 1] = v[i + 1] + add.y;
            y[i + 2] = v[i + 2] + add.z;
            y[i + 3] = v[i + 3] + add.w;
        }
        if (job.out.dtype == DI_F32) {
            float4 *to = (float4 *)((float *)job.out.data + at);
            to[0] = make_float4(y[0], y[1], y[2], y[3]);
            to[1] = make_float4(y[4], y[5], y[6], y[7]);
        } else {
            *(uint4 *)((uint16_t *)job.out.data + at) = make_uint4(cu_pack_bf16(y[0], y[1]), cu_pack_bf16(y[2], y[3]),
                                                                   cu_pack_bf16(y[4], y[5]), cu_pack_bf16(y[6], y[7]));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (o + i < job.w.n_out)
            cu_act_store(job.out, row, o + i, job.add ? v[i] + job.add[at + i] : v[i]);
    }
}

/* A stage is 8*M multiplies of 64 outputs: group by group, tile by tile, half by half. The next one runs while the sums
 * of the one before are added. CUT: sums of pieces of k are added to a total. */
template <int M, bool CUT> struct fp8_consumer {
    typedef fp8_stage<M> S;
    static constexpr int HALF = OUT_TILE / 2, UNITS = 8 * M;
    float acc[M][2][HALF / 2], temp[2][HALF / 2], total[CUT ? M : 1][2][CUT ? HALF / 2 : 1];
    uint32_t x_scale[M][2], w_scale[4]; /* of a stage's four groups, a byte each */

    static __device__ float scale_at(uint32_t word, int g) { /* 2^(byte - 127) */
        return __uint_as_float((g < 3 ? word << (23 - 8 * g) : word >> 1) & 0x7F800000u);
    }
    /* Of the stage at `stage`; x_at: where this warpgroup's rows begin. */
    template <int U> __device__ void multiply(uint32_t stage, uint32_t x_at) {
        constexpr int H = U % 2, I = U / 2 % M, G = U / 2 / M;
        cu_wgmma_fence();
        cu_wgmma_e4m3_ss(temp[U % 2], cu_desc_k128(stage + S::X + x_at + I * 64 * BLOCK_K + G * 32),
                         cu_desc_k128(stage + S::W + H * HALF * BLOCK_K + G * 32), 0);
        cu_wgmma_commit();
    }
    template <int U> __device__ void promote() {
        constexpr int H = U % 2, I = U / 2 % M, G = U / 2 / M;
        float sx[2] = {scale_at(x_scale[I][0], G), scale_at(x_scale[I][1], G)};
        cu_wgmma_pin(temp[U % 2]);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float sw = scale_at(w_scale[H * 2 + q], G), s[2] = {sx[0] * sw, sx[1] * sw};
#pragma unroll
            for (int k = 0; k < 16; k++)
                acc[I][H][q * 16 + k] = fmaf(temp[U % 2][q * 16 + k], s[k / 2 % 2], acc[I][H][q * 16 + k]);
        }
    }
    template <int U> __device__ void steps(uint32_t stage, uint32_t x_at, uint64_t *empty) {
        if constexpr (U + 1 < UNITS) {
            multiply<U + 1>(stage, x_at);
            cu_wgmma_wait<1>();
            promote<U>();
            steps<U + 1>(stage, x_at, empty);
        } else {
            cu_wgmma_wait<0>();
            if (threadIdx.x % DI_WARP == 0)
                cu_mbar_arrive(empty);
            promote<U>();
        }
    }
    __device__ void piece_done(bool is_first) {
#pragma unroll
        for (int i = 0; i < M * HALF; i++) {
            float &sum = acc[i / HALF][i / (HALF / 2) % 2][i % (HALF / 2)];
            float &all = total[i / HALF][i / (HALF / 2) % 2][i % (HALF / 2)];
            all = is_first ? sum : all + sum;
            sum = 0;
        }
    }
    __device__ float result(int m, int i) const {
        if constexpr (CUT)
            return total[m][i / (HALF / 2)][i % (HALF / 2)];
        else
            return acc[m][i / (HALF / 2)][i % (HALF / 2)];
    }
    __device__ void store(const gemm_job &job, int64_t row0, int64_t out0) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int64_t row = row0 + m * 64 + r * 8;
                if (row >= job.x.n_rows)
                    continue;
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    float v[8];
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        v[k] = result(m, q * 16 + k / 2 * 4 + r * 2 + k % 2);
                    fp8_store(job, row, out0 + q * 32 + threadIdx.x % 4 * 8, v);
                }
            }
        }
    }
    __device__ void run(const gemm_job &job, const fp8_ring<M> &ring, const fp8_tiles &tiles, const gemm_cut &cut) {
        int group = threadIdx.x / WARPGROUP, t = threadIdx.x % WARPGROUP;
        int r0 = group * 64 * M + t / 32 * 16 + t % 32 / 4; /* this thread's first row of the block's */
        uint32_t x_at = group * 64 * M * BLOCK_K, stages = cu_smem(ring.stages);
        int n_blocks = cut.n_blocks, n_tiles = tiles.count();
        fp8_at<S::COUNT> at;
        for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
#pragma unroll
            for (int i = 0; i < M * HALF; i++)
                acc[i / HALF][i / (HALF / 2) % 2][i % (HALF / 2)] = 0;
            [[maybe_unused]] int piece = 0;
            for (int kb = 0; kb < n_blocks; kb++, at.next()) {
                const uint8_t *stage = ring.stages + at.stage * S::BYTES;
                cu_mbar_wait(&ring.full[at.stage], at.parity);
                multiply<0>(stages + at.stage * S::BYTES, x_at);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    x_scale[m][0] = *(const uint32_t *)(stage + S::X_SCALE + (r0 + m * 64) * 4);
                    x_scale[m][1] = *(const uint32_t *)(stage + S::X_SCALE + (r0 + m * 64 + 8) * 4);
                }
                uint4 ws = *(const uint4 *)(stage + S::W_SCALE);
                w_scale[0] = ws.x;
                w_scale[1] = ws.y;
                w_scale[2] = ws.z;
                w_scale[3] = ws.w;
                steps<0>(stages + at.stage * S::BYTES, x_at, &ring.empty[at.stage]);
                if constexpr (CUT) {
                    if (kb + 1 == gemm_piece(cut, piece + 1))
                        piece_done(piece++ == 0);
                }
            }
            int64_t row0, out0;
            tiles.at<M>(tile, row0, out0);
            store(job, row0 + r0, out0);
        }
    }
};

template <int M, bool CUT>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_fp8(const __grid_constant__ gemm_job job, const __grid_constant__ fp8_tiles tiles,
             const __grid_constant__ gemm_cut cut, const __grid_constant__ fp8_maps maps) {
    typedef fp8_stage<M> S;
    DI_DYN_SHARED(uint8_t, shared);
    fp8_ring<M> ring(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::COUNT; s++) {
            cu_mbar_init(&ring.full[s], 1 + SCALERS);
            cu_mbar_init(&ring.empty[s], CONSUMERS / DI_WARP);
        }
        cu_fence_mbar_init();
    }
    __syncthreads();
    cu_grid_begin();
    if (threadIdx.x >= CONSUMERS) {
        cu_regs_give<56>();
        if (threadIdx.x == CONSUMERS)
            fp8_copy_codes<M>(job, ring, tiles, maps);
        else if (threadIdx.x >= CONSUMERS + DI_WARP)
            fp8_copy_scales<M>(job, ring, tiles, threadIdx.x - CONSUMERS - DI_WARP);
    } else {
        cu_regs_take<224>();
        fp8_consumer<M, CUT> consumer;
        consumer.run(job, ring, tiles, cut);
    }
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

template <int M, bool CUT> static bool fp8_launch(di_stream *stream, const gemm_job &job, const gemm_cut &cut) {
    fp8_tiles tiles = {(int)ceil_div(job.x.n_rows, fp8_stage<M>::ROWS), (int)ceil_div(job.w.n_out, OUT_TILE)};
    int64_t n_tiles = (int64_t)tiles.n_row_tiles * tiles.n_out_tiles;
    fp8_maps maps;
    if (!fp8_maps_make(&maps, job, fp8_stage<M>::ROWS))
        return false;
    unsigned grid = (unsigned)(n_tiles < stream->dev->n_sms ? n_tiles : stream->dev->n_sms);
    DI_LAUNCH_PDL((gemm_fp8<M, CUT>), grid, THREADS, fp8_stage<M>::ALL, stream->stream, job, tiles, cut, maps);
    return true;
}

/* The larger tile reads less from L2 and has the better rate, about by a tenth, but no room for a second sum; the
 * smaller one fills the last round of multiprocessors better. */
bool gemm_sm90_fp8(di_stream *stream, const gemm_job *job, const gemm_cut *cut) {
    int64_t n_out = ceil_div(job->w.n_out, OUT_TILE), sms = stream->dev->n_sms;
    int64_t large = ceil_div(ceil_div(job->x.n_rows, 256) * n_out, sms) * 20;
    int64_t small = ceil_div(ceil_div(job->x.n_rows, 128) * n_out, sms) * 11;
    if (job->w.n_out % 32)
        return false;
    if (cut->cluster * cut->k_ways > 1)
        return fp8_launch<1, true>(stream, *job, *cut);
    return large <= small ? fp8_launch<2, false>(stream, *job, *cut) : fp8_launch<1, false>(stream, *job, *cut);
}
