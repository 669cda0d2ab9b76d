/* gemm of many rows with E4M3 on both sides, by the fp8 multiplies of Hopper's tensor cores.
 *
 * out [rows, n_out] = X . W^T with the codes of both in shared memory as they are stored. A scale belongs to 32 k,
 * which is one multiply: it starts from zero, and its sums are then added to the accumulators, times the scales of row
 * and output, on the ordinary units, while others run.
 *
 * Inside a multiply the hardware lines the 32 products up with the largest and keeps about 13 bits below it: a group's
 * sum is off by at most 32 * 2^-13 of its largest product, in practice by far less than the rounding of the result. The
 * product of the two scales must be a float; a scale 255 (NaN) acts as infinity.
 *
 * The adding binds: one multiply-add for each sum and 32 k, whose three operands the registers give in one and a half
 * cycles. All else is therefore kept away from the warpgroups that add. Output o of 128 lies at row 8*(o%32/2) +
 * 2*(o/32) + o%2 of the operand, so that a thread's accumulators, of a row, are the 32 outputs of one scale. A further
 * warpgroup copies codes and turns scales into floats.
 */
#include "cu.cuh"
#include "gemm.h"
#include "rows.cuh"
#include "sm90.cuh"

enum {
    OUT_TILE = 128,
    BLOCK_K = 128, /* k of a stage: four scale groups */
    GROUPS_K = BLOCK_K / 32,
    WARPGROUP = 128,
    SCALERS = WARPGROUP - 32,
};

/* Shared memory: codes of the stages, their scales (a float for each group of 32 k), of each warpgroup the sums of
 * pieces or a tile on its way to memory, barriers. */
template <int GROUPS, bool CUT> struct fp8_form {
    static constexpr int ROWS = 64 * GROUPS, CONSUMERS = GROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
    static constexpr int TEMPS = GROUPS == 3 ? 1 : 2; /* multiplies of a warpgroup under way: what registers allow */
    static constexpr int CONSUMER_REGS = GROUPS == 3 ? 152 : 224, COPIER_REGS = 56;
    static constexpr int X = 0, W = ROWS * BLOCK_K, BYTES = W + OUT_TILE * BLOCK_K;
    static constexpr int X_SCALE = 0, W_SCALE = ROWS * GROUPS_K * 4, SCALE_BYTES = W_SCALE + OUT_TILE / 32 * 16;
    static constexpr int OUT = 64 * OUT_TILE * (CUT ? 4 : 2); /* of a warpgroup: floats, or bf16 */
    static constexpr int COUNT = (227 * 1024 - 256 - GROUPS * OUT) / (BYTES + SCALE_BYTES);
    static constexpr int OUTS = COUNT * BYTES, SCALES = OUTS + GROUPS * OUT, BARRIERS = SCALES + COUNT * SCALE_BYTES;
    static constexpr int ALL = BARRIERS + 2 * COUNT * 8;
};

/* A place in the ring and the parity of its round. `shared`: where the block's memory begins. */
template <class F> struct fp8_at {
    uint32_t shared, stage = 0, parity = 0;

    __device__ explicit fp8_at(uint32_t shared_) : shared(shared_) {
    }
    __device__ void next() {
        if (++stage == F::COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ uint32_t full() const {
        return shared + F::BARRIERS + stage * 8;
    }
    __device__ uint32_t empty() const {
        return full() + F::COUNT * 8;
    }
};

/* ---- copying -----------------------------------------------------------------------------------------------------
 * The first thread asks the copy engine for codes; the other three warps bring scales, as floats.
 */

/* X: [rows][k]. W: [out%32/2][out/32][out%2][k]. Out: [rows][outputs], where tiles go through shared memory. */
struct fp8_maps {
    cu_map x, w, out;
    bool has_out;
};

static bool fp8_maps_make(fp8_maps *maps, const gemm_job &job, uint32_t n_rows) {
    uint64_t n_in = (uint64_t)job.w.n_in, x_dims[2] = {(uint64_t)job.x.n_cols, (uint64_t)job.x.n_rows};
    uint64_t x_stride[1] = {(uint64_t)job.x.stride}, w_dims[4] = {n_in, 2, (uint64_t)job.w.n_out / 32, 16};
    uint64_t w_strides[3] = {n_in, 32 * n_in, 2 * n_in};
    uint32_t x_box[2] = {BLOCK_K, n_rows}, w_box[4] = {BLOCK_K, 2, OUT_TILE / 32, 16};
    maps->has_out = job.out.dtype == DI_BF16 && job.aligned == 8 && !job.add && !job.codes.data;
    if (maps->has_out) {
        uint64_t dims[2] = {(uint64_t)job.w.n_out * 2, (uint64_t)job.x.n_rows};
        uint64_t stride[1] = {(uint64_t)job.out.stride * 2};
        uint32_t box[2] = {128, 64};
        maps->has_out = cu_map_make(&maps->out, job.out.data, 2, dims, stride, box);
    }
    return cu_map_make(&maps->x, job.x.data, 2, x_dims, x_stride, x_box) &&
           cu_map_make(&maps->w, job.w.data, 4, w_dims, w_strides, w_box);
}

template <class F>
__device__ static inline void fp8_copy_codes(const gemm_job &job, uint8_t *shared, const gemm_tiles &tiles,
                                             const fp8_maps &maps) {
    int n_blocks = (int)(job.w.n_in / BLOCK_K), n_tiles = tiles.count();
    fp8_at<F> at(cu_smem(shared));
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        int64_t row0, out0;
        tiles.at(tile, F::ROWS, OUT_TILE, row0, out0);
        int col = (int)(out0 / (job.w.n_out / job.n_groups) * job.w.n_in);
        for (int kb = 0; kb < n_blocks; kb++, at.next()) {
            uint64_t *full = (uint64_t *)(shared + F::BARRIERS) + at.stage;
            uint32_t to = at.shared + at.stage * F::BYTES;
            cu_mbar_wait(at.empty(), at.parity ^ 1);
            cu_mbar_arrive_expect(full, F::BYTES);
            cu_map_load(to + F::X, maps.x, col + kb * BLOCK_K, (int)row0, full);
            cu_map_load4(to + F::W, maps.w, kb * BLOCK_K, (int)(out0 / 32), full);
        }
    }
}

/* 2^(byte - 127) of the four bytes. */
__device__ static inline float4 fp8_scales(uint32_t word) {
    return make_float4(cu_scale_at(word, 0), cu_scale_at(word, 1), cu_scale_at(word, 2), cu_scale_at(word, 3));
}

/* By threads 0..SCALERS - 1. Words are loaded AHEAD stages before they are stored. */
template <class F>
__device__ static inline void fp8_copy_scales(const gemm_job &job, uint8_t *shared, const gemm_tiles &tiles, int t) {
    constexpr int N = F::ROWS + OUT_TILE / 32, EACH = (N + SCALERS - 1) / SCALERS; /* rows, then blocks of outputs */
    constexpr int AHEAD = 2;
    int n_blocks = (int)(job.w.n_in / BLOCK_K), n_stages = tiles.of_block() * n_blocks;
    int tile = blockIdx.x, kb = n_blocks; /* the next to load; begins with a new tile */
    int64_t last_row = job.x.n_rows - 1, last_out = job.w.n_out - 1;
    const uint8_t *from[EACH];
    uint32_t words[AHEAD][EACH];
    fp8_at<F> at(cu_smem(shared));
    for (int i = 0; i < n_stages + AHEAD; i += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (i > 0 && i + a - AHEAD < n_stages) {
                float4 *to = (float4 *)(shared + F::SCALES + at.stage * F::SCALE_BYTES);
                cu_mbar_wait(at.empty(), at.parity ^ 1);
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    if (t + e * SCALERS < N)
                        to[t + e * SCALERS] = fp8_scales(words[a][e]);
                }
                __syncwarp();
                if (t % DI_WARP == 0)
                    cu_mbar_arrive(at.full());
                at.next();
            }
            if (i + a >= n_stages)
                continue;
            if (kb == n_blocks) {
                int64_t row0, out0;
                tiles.at(tile, F::ROWS, OUT_TILE, row0, out0);
                int64_t col = out0 / (job.w.n_out / job.n_groups) * job.w.n_in;
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    int j = t + e * SCALERS;
                    int64_t row = row0 + j < last_row ? row0 + j : last_row, o = out0 + (j - F::ROWS) * 32;
                    from[e] = j < F::ROWS ? job.x.scale + (row * job.x.n_cols + col) / 32
                                          : job.w.scale + (o < last_out ? o : last_out) / 32 * (job.w.n_in / 32);
                }
                tile += gridDim.x;
                kb = 0;
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                words[a][e] = t + e * SCALERS < N ? *(const uint32_t *)from[e] : 0;
                from[e] += GROUPS_K;
            }
            kb++;
        }
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* Codes of a block of 32 outputs of a row. */
__device__ static inline void fp8_store_codes(const gemm_job &job, int64_t row, int64_t o, const float (&v)[32]) {
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < 32; i++)
        most = fmaxf(most, fabsf(v[i]));
    cu_scale scale = cu_qa_scale(most);
    uint32_t word[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        word[i] = cu_e4m3_codes4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], scale.inverse);
    uint2 *to = (uint2 *)((uint8_t *)job.codes.data + row * job.codes.stride + o);
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = make_uint2(word[2 * i], word[2 * i + 1]);
    job.codes.scale[row * (job.w.n_out / 32) + o / 32] = (uint8_t)scale.byte;
}

/* Eight neighbouring outputs of a row. */
__device__ static inline void fp8_store(const gemm_job &job, int64_t at, int64_t o, float (&v)[8]) {
    if (job.aligned < 8 || o + 8 > job.w.n_out) {
#pragma unroll 1
        for (int i = 0; i < 8 && o + i < job.w.n_out; i++) {
            float y = i < 4   ? i < 2   ? i ? v[1] : v[0]
                                  : i > 2 ? v[3]
                                        : v[2]
                        : i < 6 ? i > 4 ? v[5] : v[4]
                        : i > 6 ? v[7]
                              : v[6];
            y = job.add ? y + job.add[at + i] : y;
            if (job.out.dtype == DI_F32)
                ((float *)job.out.data)[at + i] = y;
            else
                ((uint16_t *)job.out.data)[at + i] = cu_f32_to_bf16(y);
        }
        return;
    }
    if (job.add) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 add = *(const float4 *)(job.add + at + i);
            v[i] += add.x;
            v[i + 1] += add.y;
            v[i + 2] += add.z;
            v[i + 3] += add.w;
        }
    }
    if (job.out.dtype == DI_F32) {
        float4 *to = (float4 *)((float *)job.out.data + at);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *(uint4 *)((uint16_t *)job.out.data + at) = make_uint4(cu_pack_bf16(v[0], v[1]), cu_pack_bf16(v[2], v[3]),
                                                               cu_pack_bf16(v[4], v[5]), cu_pack_bf16(v[6], v[7]));
    }
}

/* A warpgroup has 64 rows, each of its threads two of them and a block of 32 outputs. CUT: sums of pieces of k are
 * added to a total, in shared memory. */
template <class F, bool CUT> struct fp8_consumer {
    float acc[OUT_TILE / 2], temp[F::TEMPS][OUT_TILE / 2];
    float4 x_scale[2], w_scale; /* of a stage, by groups of k */
    /* Where the first stage lies: codes, as descriptors, and this thread's scales. */
    uint32_t x0, w0, x_scale0, w_scale0;

    /* A descriptor of which only the lower half differs, so that it moves by one addition. */
    static __device__ uint64_t desc(uint32_t low) {
        return (uint64_t)(cu_desc_k128(0) >> 32) << 32 | low;
    }
    static __device__ float group_of(const float4 &v, int g) {
        return g == 0 ? v.x : g == 1 ? v.y : g == 2 ? v.z : v.w;
    }
    __device__ void read_scales(uint32_t stage) {
        x_scale[0] = cu_smem_load4(x_scale0 + stage * F::SCALE_BYTES);
        x_scale[1] = cu_smem_load4(x_scale0 + stage * F::SCALE_BYTES + 8 * 16);
        w_scale = cu_smem_load4(w_scale0 + stage * F::SCALE_BYTES);
    }
    __device__ void multiply(float (&to)[OUT_TILE / 2], uint32_t x, uint32_t w) {
        cu_wgmma_fence();
        cu_wgmma_e4m3_ss(to, desc(x), desc(w), 0);
        cu_wgmma_commit();
    }
    /* A stage whose scales are here; those of the next one are read while its last multiply runs. */
    __device__ void stage(fp8_at<F> &at, bool has_next) {
        constexpr int AHEAD = F::TEMPS - 1;
        uint32_t x = x0 + at.stage * (F::BYTES / 16), w = w0 + at.stage * (F::BYTES / 16), empty = at.empty();
        if constexpr (AHEAD > 0)
            multiply(temp[0], x, w);
#pragma unroll
        for (int g = 0; g < GROUPS_K; g++) {
            if (g + AHEAD < GROUPS_K)
                multiply(temp[(g + AHEAD) % F::TEMPS], x + (g + AHEAD) * 2, w + (g + AHEAD) * 2);
            float sw = group_of(w_scale, g), s[2] = {group_of(x_scale[0], g) * sw, group_of(x_scale[1], g) * sw};
            if (g + 1 < GROUPS_K) {
                cu_wgmma_wait<AHEAD>();
            } else {
                at.next();
                if (has_next) {
                    cu_mbar_wait(at.full(), at.parity);
                    read_scales(at.stage);
                }
                cu_wgmma_wait<0>();
                if (cu_elect())
                    cu_mbar_arrive(empty);
            }
            float(&from)[OUT_TILE / 2] = temp[g % F::TEMPS];
            cu_wgmma_pin(from);
#pragma unroll
            for (int i = 0; i < OUT_TILE / 2; i++)
                acc[i] = fmaf(from[i], s[i / 2 % 2], acc[i]);
        }
    }
    /* is_first, is_last: of the tile's pieces. */
    __device__ void piece_done(uint8_t *outs, bool is_first, bool is_last) {
        float4 *total = (float4 *)outs + threadIdx.x % WARPGROUP;
        if (is_first)
            outs_are_free();
#pragma unroll
        for (int i = 0; i < OUT_TILE / 2; i += 4) {
            float4 &to = total[i / 4 * WARPGROUP];
            float4 v = make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
            if (!is_first) {
                float4 all = to;
                v = make_float4(all.x + v.x, all.y + v.y, all.z + v.z, all.w + v.w);
            }
            if (!is_last)
                to = v;
            acc[i] = is_last ? v.x : 0;
            acc[i + 1] = is_last ? v.y : 0;
            acc[i + 2] = is_last ? v.z : 0;
            acc[i + 3] = is_last ? v.w : 0;
        }
    }
    /* Nothing of the warpgroup's last tile is left there to be stored. */
    __device__ static void outs_are_free() {
        if (threadIdx.x % WARPGROUP == 0)
            cu_bulk_wait_read<0>();
        cu_bar_sync(1 + threadIdx.x / WARPGROUP, WARPGROUP);
    }
    /* A tile of bf16 by the copy engine, while the next one is multiplied: its stores would come in one burst from all
     * multiprocessors. Panels of 64 outputs, rows of 128 bytes in the 128-byte swizzle. */
    __device__ void store_tile(const cu_map &out, uint8_t *outs, int64_t row0, int64_t out0) {
        int t = threadIdx.x % WARPGROUP, block = t % 4;
        outs_are_free(); /* of sums, too */
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t row = (uint32_t)(t / 32 * 16 + t % 32 / 4 + r * 8);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                uint32_t w[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    w[k] = cu_pack_bf16(acc[c * 16 + k * 4 + r * 2], acc[c * 16 + k * 4 + r * 2 + 1]);
                *(uint4 *)(outs + cu_sw128(row, (uint32_t)(block * 64 + c * 16), 64)) =
                    make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
        cu_fence_async();
        cu_bar_sync(1 + threadIdx.x / WARPGROUP, WARPGROUP);
        if (t == 0) {
#pragma unroll
            for (int p = 0; p < OUT_TILE / 64; p++)
                cu_map_store(out, (int)(out0 + p * 64) * 2, (int)row0, cu_smem(outs) + (uint32_t)p * 64 * 128);
            cu_bulk_commit();
        }
    }
    __device__ void store(const gemm_job &job, int64_t row0, int64_t out0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t row = row0 + r * 8;
            if (row >= job.x.n_rows)
                continue;
            if (job.codes.data) {
                float v[32];
#pragma unroll
                for (int i = 0; i < 32; i++)
                    v[i] = acc[i / 2 * 4 + r * 2 + i % 2];
                if (out0 < job.w.n_out)
                    fp8_store_codes(job, row, out0, v);
                continue;
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float v[8];
#pragma unroll
                for (int k = 0; k < 8; k++)
                    v[k] = acc[c * 16 + k / 2 * 4 + r * 2 + k % 2];
                fp8_store(job, row * job.out.stride + out0 + c * 8, out0 + c * 8, v);
            }
        }
    }
    __device__ void run(const gemm_job &job, uint8_t *shared, const gemm_tiles &tiles, const gemm_cut &cut,
                        const fp8_maps &maps) {
        uint8_t *outs = shared + F::OUTS + threadIdx.x / WARPGROUP * F::OUT;
        int t = threadIdx.x % WARPGROUP, row = threadIdx.x / WARPGROUP * 64 + t / 32 * 16 + t % 32 / 4;
        /* What all of a warp have alike goes to uniform registers, so that it is computed once. */
        fp8_at<F> at(__shfl_sync(~0u, cu_smem(shared), 0));
        x0 = __shfl_sync(~0u, (uint32_t)cu_desc_k128(at.shared + F::X + threadIdx.x / WARPGROUP * 64 * BLOCK_K), 0);
        w0 = __shfl_sync(~0u, (uint32_t)cu_desc_k128(at.shared + F::W), 0);
        x_scale0 = at.shared + F::SCALES + F::X_SCALE + row * 16;
        w_scale0 = at.shared + F::SCALES + F::W_SCALE + threadIdx.x % 4 * 16;
        int n_tiles = tiles.count(), left = tiles.of_block() * cut.n_blocks;
        int n_pieces = CUT ? cut.cluster * cut.k_ways : 1;
        cu_mbar_wait(at.full(), 0);
        read_scales(0);
        for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
#pragma unroll
            for (int i = 0; i < OUT_TILE / 2; i++)
                acc[i] = 0;
            for (int piece = 0, done = 0; piece < n_pieces; piece++) {
                int end = CUT ? gemm_piece(cut, piece + 1) : cut.n_blocks;
                for (; done < end; done++)
                    stage(at, --left > 0);
                if constexpr (CUT)
                    piece_done(outs, piece == 0, piece + 1 == n_pieces);
            }
            int64_t row0, out0;
            tiles.at(tile, F::ROWS, OUT_TILE, row0, out0);
            if (maps.has_out)
                store_tile(maps.out, outs, row0 + threadIdx.x / WARPGROUP * 64, out0);
            else
                store(job, row0 + row, out0 + threadIdx.x % 4 * 32);
        }
        if (maps.has_out && threadIdx.x % WARPGROUP == 0)
            cu_bulk_wait<0>(); /* shared memory lives as long as the block */
    }
};

template <int GROUPS, bool CUT>
__global__ void __launch_bounds__(GROUPS *WARPGROUP + WARPGROUP, 1)
    gemm_fp8(const __grid_constant__ gemm_job job, const __grid_constant__ gemm_tiles tiles,
             const __grid_constant__ gemm_cut cut, const __grid_constant__ fp8_maps maps) {
    typedef fp8_form<GROUPS, CUT> F;
    DI_DYN_SHARED(uint8_t, shared);
    if (threadIdx.x == 0) {
        uint64_t *full = (uint64_t *)(shared + F::BARRIERS), *empty = full + F::COUNT;
        for (int s = 0; s < F::COUNT; s++) {
            cu_mbar_init(&full[s], 1 + SCALERS / DI_WARP);
            cu_mbar_init(&empty[s], F::CONSUMERS / DI_WARP);
        }
        cu_fence_mbar_init();
    }
    __syncthreads();
    cu_grid_begin();
    if (threadIdx.x >= F::CONSUMERS) {
        cu_regs_give<F::COPIER_REGS>();
        if (threadIdx.x == F::CONSUMERS)
            fp8_copy_codes<F>(job, shared, tiles, maps);
        else if (threadIdx.x >= F::CONSUMERS + DI_WARP)
            fp8_copy_scales<F>(job, shared, tiles, threadIdx.x - F::CONSUMERS - DI_WARP);
    } else {
        cu_regs_take<F::CONSUMER_REGS>();
        fp8_consumer<F, CUT> consumer;
        consumer.run(job, shared, tiles, cut, maps);
    }
}

template <int GROUPS, bool CUT> static bool fp8_launch(di_stream *stream, const gemm_job &job, const gemm_cut &cut) {
    typedef fp8_form<GROUPS, CUT> F;
    gemm_tiles tiles = {(int)gemm_ceil_div(job.x.n_rows, F::ROWS), (int)gemm_ceil_div(job.w.n_out, OUT_TILE)};
    int64_t n_tiles = (int64_t)tiles.n_row_tiles * tiles.n_out_tiles;
    fp8_maps maps;
    if (!fp8_maps_make(&maps, job, F::ROWS))
        return false;
    unsigned grid = (unsigned)(n_tiles < stream->dev->n_sms ? n_tiles : stream->dev->n_sms);
    DI_LAUNCH_PDL((gemm_fp8<GROUPS, CUT>), grid, F::THREADS, F::ALL, stream->stream, job, tiles, cut, maps);
    return true;
}

/* A tile a multiprocessor is a round; one of large tiles takes half again as long as one of small ones. */
bool gemm_sm90_fp8(di_stream *stream, const gemm_job *job, const gemm_cut *cut) {
    int64_t n_out = gemm_ceil_div(job->w.n_out, OUT_TILE), sms = stream->dev->n_sms;
    bool is_large = gemm_ceil_div(gemm_ceil_div(job->x.n_rows, 192) * n_out, sms) * 3 <
                    gemm_ceil_div(gemm_ceil_div(job->x.n_rows, 128) * n_out, sms) * 2;
    if (job->w.n_out % 32)
        return false;
    if (cut->cluster * cut->k_ways > 1)
        return is_large ? fp8_launch<3, true>(stream, *job, *cut) : fp8_launch<2, true>(stream, *job, *cut);
    return is_large ? fp8_launch<3, false>(stream, *job, *cut) : fp8_launch<2, false>(stream, *job, *cut);
}
