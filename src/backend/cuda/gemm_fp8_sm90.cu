/* gemm of some or many rows with E4M3 on both sides, by the fp8 multiplies of Hopper's tensor cores.
 *
 * out [rows, n_out] = X . W^T with the codes of both in shared memory as they are stored. A scale belongs to 32 k,
 * which is one multiply: it starts from zero, and its sums are then added to the accumulators, times the scales of row
 * and output, on the ordinary units, while others run. Pieces of k are those of gemm_few_sm90.cu, added in the same
 * order: by a block of threads in turn, or, where rows are some, by gemm_sum_pieces.
 *
 * Inside a multiply the hardware lines the 32 products up with the largest and keeps about 13 bits below it: a group's
 * sum is off by at most 32 * 2^-13 of its largest product, in practice by far less than the rounding of the result. The
 * product of the two scales must be a float; a scale 255 (NaN) acts as infinity.
 *
 * The adding binds: one multiply-add for each sum and 32 k, whose three operands the registers give in one and a half
 * cycles. All else is therefore kept away from the warpgroups that add. Output o of 128 lies at row 8*(o%32/2) +
 * 2*(o/32) + o%2 of the operand, so that a thread's accumulators, of a row, are the 32 outputs of one scale; with 64
 * outputs at row 8*(o%32/4) + 4*(o/32) + o%4, and two threads have those of a scale. A further warpgroup copies codes
 * and turns scales into floats. */
#include "cu.cuh"
#include "gemm_ring.cuh"
#include "gemm_store.cuh"

enum {
    BLOCK_K = 128, /* k of a stage: four scale groups */
    GROUPS_K = BLOCK_K / 32,
    WARPGROUP = 128,
    SCALERS = WARPGROUP - 32,
    APART_ROWS = 64
};

/* IN_TURN: a block of threads does a tile's pieces of k one after the other; APART: each is a unit of its own, of few
 * rows. WHOLE: k is not cut. */
enum fp8_pieces { WHOLE, IN_TURN, APART };

/* Shared memory: codes of the stages, of each warpgroup the sums of pieces or a tile on its way to memory, scales of
 * the stages (a float for each group of 32 k), barriers. */
template <int ROWS_, fp8_pieces PIECES_> struct fp8_form {
    static constexpr int ROWS = ROWS_, N = PIECES_ == APART ? 64 : 128; /* N: outputs of a warpgroup */
    static constexpr fp8_pieces PIECES = PIECES_;
    static constexpr bool IS_APART = PIECES == APART;
    static constexpr int STAGES = 1; /* of a block of k */
    static constexpr int GROUPS = PIECES == APART ? 2 : ROWS / 64, CONSUMERS = GROUPS * WARPGROUP,
                         THREADS = CONSUMERS + WARPGROUP;
    static constexpr int OUTS = PIECES == APART ? 2 * N : N; /* of a tile, whose rows or outputs warpgroups share */
    static constexpr int EACH = N / 4;                       /* of a thread, in a row */
    /* Multiplies of a warpgroup under way: what registers allow. */
    static constexpr int TEMPS = PIECES == APART ? 4 : GROUPS == 3 ? 1 : 2;
    static constexpr int CONSUMER_REGS = GROUPS == 3 ? 152 : 224, COPIER_REGS = 56;
    static constexpr int X = 0, W = ROWS * BLOCK_K, BYTES = W + OUTS * BLOCK_K;
    static constexpr int X_SCALE = 0, W_SCALE = ROWS * GROUPS_K * 4, SCALE_BYTES = W_SCALE + OUTS / 32 * 16;
    static constexpr int LEFT = PIECES == APART ? 0 : 64 * N * (PIECES == IN_TURN ? 4 : 2); /* of a warpgroup */
    static constexpr int ROOM = (227 * 1024 - 256 - GROUPS * LEFT) / (BYTES + SCALE_BYTES);
    static constexpr int COUNT = ROOM < 8 ? ROOM : 8;
    static constexpr int LEFTS = COUNT * BYTES, SCALES = LEFTS + GROUPS * LEFT, BARRIERS = SCALES + COUNT * SCALE_BYTES;
    static constexpr int ALL = BARRIERS + 2 * COUNT * 8;
};

/* ---- copying -----------------------------------------------------------------------------------------------------
 * The first thread asks the copy engine for codes; the other three warps bring scales, as floats.
 */

/* X: [rows][k]. W, of the outputs of a warpgroup: [out%32/2][out/32][out%2][k] where a thread has all 32 of a scale; or
 * [out%32/4][out/32][out%4][k], where two have every other pair of outputs. Out: [rows][outputs], where tiles go
 * through shared memory. */
struct fp8_maps {
    cu_map x, w, out;
    bool has_out;
};

template <class F> static bool fp8_maps_make(fp8_maps *maps, const gemm_job &job, uint32_t box_rows) {
    uint64_t n_in = (uint64_t)job.w.n_in, x_dims[2] = {(uint64_t)job.x.n_cols, (uint64_t)job.x.n_rows};
    uint64_t x_stride[1] = {(uint64_t)job.x.stride};
    constexpr uint32_t NEXT = 64 / F::EACH; /* neighbouring outputs that lie together */
    uint64_t w_dims[4] = {n_in, NEXT, (uint64_t)job.w.n_out / 32, 32 / NEXT};
    uint64_t w_strides[3] = {n_in, 32 * n_in, NEXT * n_in};
    uint32_t x_box[2] = {BLOCK_K, box_rows}, w_box[4] = {BLOCK_K, NEXT, F::N / 32, 32 / NEXT};
    maps->has_out = F::LEFT && job.out.dtype == DI_BF16 && job.aligned == 8 && !job.add && !job.codes.data;
    if (maps->has_out) {
        uint64_t dims[2] = {(uint64_t)job.w.n_out * 2, (uint64_t)job.x.n_rows};
        uint64_t stride[1] = {(uint64_t)job.out.stride * 2};
        uint32_t box[2] = {128, 64};
        maps->has_out = cu_map_make(&maps->out, job.out.data, 2, dims, stride, box);
    }
    return cu_map_make(&maps->x, job.x.data, 2, x_dims, x_stride, x_box) &&
           cu_map_make(&maps->w, job.w.data, 4, w_dims, w_strides, w_box);
}

/* 2^(byte - 127) of the four bytes. */
__device__ static inline float4 fp8_scales(uint32_t word) {
    return make_float4(cu_scale_at(word, 0), cu_scale_at(word, 1), cu_scale_at(word, 2), cu_scale_at(word, 3));
}

/* By threads 0..SCALERS - 1. Words are loaded AHEAD stages before they are stored. */
template <class F>
__device__ static inline void fp8_copy_scales(const gemm_job &job, uint8_t *shared, const gemm_units &units, int t) {
    constexpr int N = F::ROWS + F::OUTS / 32, EACH = (N + SCALERS - 1) / SCALERS; /* rows, then blocks of outputs */
    constexpr int AHEAD = 2;
    int64_t last_row = job.x.n_rows - 1, last_out = job.w.n_out - 1;
    const uint8_t *from[EACH];
    uint32_t words[AHEAD][EACH];
    int unit = blockIdx.x, left = 0; /* blocks of k of the unit that are yet to load; 0: of the next one */
    bool is_there[AHEAD] = {};
    gemm_at<F> at(cu_smem(shared));
    auto load = [&](uint32_t(&to)[EACH]) { /* false: there is no more */
                                           if (left == 0) {
                                               if (unit >= units.count())
                                                   return false;
                                               gemm_unit<F> u(units, unit);
                                               int64_t col = u.group * job.w.n_in;
#pragma unroll
                                               for (int e = 0; e < EACH; e++) {
                                                   int j = t + e * SCALERS;
                                                   int64_t row = DI_MIN(u.row0 + j, last_row),
                                                           o = DI_MIN(u.out0 + (j - F::ROWS) * 32, last_out);
                                                   from[e] = j < F::ROWS ? job.x.scale + (row * job.x.n_cols + col) / 32
                                                                         : job.w.scale + o / 32 * (job.w.n_in / 32);
                                                   from[e] += u.begin * GROUPS_K;
                                               }
                                               left = u.end - u.begin;
                                               unit += gridDim.x;
                                           }
#pragma unroll
                                           for (int e = 0; e < EACH; e++) {
                                               to[e] = t + e * SCALERS < N ? *(const uint32_t *)from[e] : 0;
                                               from[e] += GROUPS_K;
                                           }
                                           left--;
                                           return true;
    };
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        is_there[a] = load(words[a]);
    while (is_there[0]) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (!is_there[a])
                return;
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
            is_there[a] = load(words[a]);
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
    uint2 *to = (uint2 *)((uint8_t *)job.codes.data + row * job.codes.stride + o);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *w = v + 8 * i;
        to[i] = make_uint2(cu_e4m3_codes4(w[0], w[1], w[2], w[3], scale.inverse),
                           cu_e4m3_codes4(w[4], w[5], w[6], w[7], scale.inverse));
    }
    job.codes.scale[row * (job.w.n_out / 32) + o / 32] = (uint8_t)scale.byte;
}

/* A warpgroup has 64 rows, each of its threads two of them and a block of EACH outputs, which have one scale. Sums of
 * pieces of k that a block of threads has in turn are added to a total, in shared memory. */
template <class F> struct fp8_consumer {
    enum { SUMS = F::N / 2 };
    float acc[SUMS], temp[F::TEMPS][SUMS];
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
    __device__ void multiply(float (&to)[SUMS], uint32_t x, uint32_t w) {
        cu_wgmma_fence();
        cu_wgmma_e4m3_ss(to, desc(x), desc(w), 0);
        cu_wgmma_commit();
    }
    /* A stage whose scales are here; those of the next one are read while its last multiply runs. */
    __device__ void stage(gemm_at<F> &at, bool has_next) {
        constexpr int AHEAD = F::TEMPS - 1;
        uint32_t x = x0 + at.stage * (F::BYTES / 16), w = w0 + at.stage * (F::BYTES / 16), empty = at.empty();
#pragma unroll
        for (int g = 0; g < AHEAD; g++)
            multiply(temp[g], x + g * 2, w + g * 2);
#pragma unroll
        for (int g = 0; g < GROUPS_K; g++) {
            if (g + AHEAD < GROUPS_K)
                multiply(temp[(g + AHEAD) % F::TEMPS], x + (g + AHEAD) * 2, w + (g + AHEAD) * 2);
            float sw = group_of(w_scale, g), s[2] = {group_of(x_scale[0], g) * sw, group_of(x_scale[1], g) * sw};
            if (g + 1 < GROUPS_K) {
                if (AHEAD >= 3 && g == 0)
                    cu_wgmma_wait<3>();
                else if (AHEAD >= 2 && g <= 1)
                    cu_wgmma_wait<2>();
                else
                    cu_wgmma_wait<(AHEAD > 0)>();
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
            float(&from)[SUMS] = temp[g % F::TEMPS];
            cu_wgmma_pin(from);
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                acc[i] = fmaf(from[i], s[i / 2 % 2], acc[i]);
        }
    }
    /* is_first, is_last: of the tile's pieces. */
    __device__ void piece_done(uint8_t *outs, bool is_first, bool is_last) {
        float4 *total = (float4 *)outs + threadIdx.x % WARPGROUP;
        if (is_first)
            outs_are_free();
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
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
            for (int p = 0; p < F::N / 64; p++)
                cu_map_store(out, (int)(out0 + p * 64) * 2, (int)row0, cu_smem(outs) + (uint32_t)p * 64 * 128);
            cu_bulk_commit();
        }
    }
    /* row0, o: of the thread's block. */
    __device__ void store(const gemm_job &job, int64_t row0, int64_t o) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float v[32];
            int64_t row = row0 + r * 8;
            if (row >= job.x.n_rows || o >= job.w.n_out)
                continue;
#pragma unroll
            for (int i = 0; i < 32; i++)
                v[i] = acc[i / 2 * 4 + r * 2 + i % 2];
            if (job.codes.data) {
                fp8_store_codes(job, row, o, v);
                continue;
            }
#pragma unroll 1 /* through local memory: the kernel keeps its registers */
            for (int i = 0; i < 32; i += 4)
                gemm_store(job, row, o + i, make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
        }
    }
    /* Where two threads have the outputs of a scale: they exchange, so that each has eight neighbours and again eight.
     * sums: [row][n_out], or NULL. */
    __device__ void store_pair(const gemm_job &job, float *sums, int64_t row0, int64_t o) {
        bool is_odd = threadIdx.x & 1;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t row = row0 + r * 8;
#pragma unroll
            for (int i = 0; i < 2; i++) { /* of outputs o + 16i .. the even thread keeps the first eight */
                float v[8];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int keep = (4 * i + k / 2) * 4 + r * 2 + k % 2, other = keep + 8;
                    float mine = is_odd ? acc[other] : acc[keep], given = is_odd ? acc[keep] : acc[other];
                    float got = __shfl_xor_sync(~0u, given, 1);
                    v[k / 2 * 4 + k % 2] = is_odd ? got : mine;
                    v[k / 2 * 4 + 2 + k % 2] = is_odd ? mine : got;
                }
                int64_t at = o + i * 16 + (is_odd ? 8 : 0);
                if (row >= job.x.n_rows || o >= job.w.n_out)
                    continue;
                if (sums) {
                    float4 *to = (float4 *)(sums + row * job.w.n_out + at);
                    to[0] = make_float4(v[0], v[1], v[2], v[3]);
                    to[1] = make_float4(v[4], v[5], v[6], v[7]);
                } else {
                    gemm_store8(job, row, at, v);
                }
            }
        }
    }
    __device__ void run(const gemm_job &job, uint8_t *shared, const gemm_units &units, const fp8_maps &maps,
                        float *sums) {
        int t = threadIdx.x % WARPGROUP, group = threadIdx.x / WARPGROUP;
        int row = (F::IS_APART ? 0 : group * 64) + t / 32 * 16 + t % 32 / 4;
        int out = F::IS_APART ? group * F::N + t % 4 / 2 * 32 : t % 4 * 32; /* where the thread's scale begins */
        uint8_t *outs = shared + F::LEFTS + group * F::LEFT;
        /* What all of a warp have alike goes to uniform registers, so that it is computed once. */
        gemm_at<F> at(__shfl_sync(~0u, cu_smem(shared), 0));
        x0 = __shfl_sync(~0u, (uint32_t)cu_desc_k128(at.shared + F::X + (F::IS_APART ? 0 : group * 64 * BLOCK_K)), 0);
        w0 = __shfl_sync(~0u, (uint32_t)cu_desc_k128(at.shared + F::W + (F::IS_APART ? group * F::N * BLOCK_K : 0)), 0);
        x_scale0 = at.shared + F::SCALES + F::X_SCALE + row * 16;
        w_scale0 = at.shared + F::SCALES + F::W_SCALE + out / 32 * 16;
        int n_units = units.count(), n_pieces = F::PIECES == IN_TURN ? units.n_pieces : 1;
        cu_mbar_wait(at.full(), 0);
        read_scales(0);
        for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
            gemm_unit<F> u(units, unit);
            bool is_last = unit + (int)gridDim.x >= n_units;
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                acc[i] = 0;
            for (int piece = 0, done = u.begin; piece < n_pieces; piece++) {
                int end = F::PIECES == IN_TURN ? units.begin(piece + 1) : u.end;
                for (; done < end; done++)
                    stage(at, !is_last || done + 1 < u.end);
                if constexpr (F::PIECES == IN_TURN)
                    piece_done(outs, piece == 0, piece + 1 == n_pieces);
            }
            if constexpr (F::IS_APART)
                store_pair(job, sums ? sums + u.piece * job.x.n_rows * job.w.n_out : NULL, u.row0 + row, u.out0 + out);
            else if (maps.has_out)
                store_tile(maps.out, outs, u.row0 + group * 64, u.out0);
            else
                store(job, u.row0 + row, u.out0 + out);
        }
        if (F::LEFT && maps.has_out && t == 0)
            cu_bulk_wait<0>(); /* shared memory lives as long as the block */
    }
};

template <class F>
__global__ void __launch_bounds__(F::THREADS, 1)
    gemm_fp8(const __grid_constant__ gemm_job job, const __grid_constant__ gemm_units units,
             const __grid_constant__ fp8_maps maps, float *sums) {
    DI_DYN_SHARED(uint8_t, shared);
    if (threadIdx.x == 0)
        gemm_ring_init<F>(shared, 1 + SCALERS / DI_WARP, F::CONSUMERS / DI_WARP);
    __syncthreads();
    if (threadIdx.x >= F::CONSUMERS) {
        cu_regs_give<F::COPIER_REGS>();
        if (threadIdx.x == F::CONSUMERS) {
            gemm_fill<F>(shared, units, maps.x, [&](uint32_t to, int byte, int out0, uint64_t *full) {
#pragma unroll
                for (int i = 0; i < F::OUTS / F::N; i++)
                    cu_map_load4(to + (uint32_t)(i * F::N * BLOCK_K), maps.w, byte, (out0 + i * F::N) / 32, full);
            });
        } else if (threadIdx.x >= F::CONSUMERS + DI_WARP) {
            cu_grid_wait();
            fp8_copy_scales<F>(job, shared, units, threadIdx.x - F::CONSUMERS - DI_WARP);
        }
    } else {
        cu_regs_take<F::CONSUMER_REGS>();
        cu_grid_wait(); /* the kernels before may still read what is written here */
        fp8_consumer<F> consumer;
        consumer.run(job, shared, units, maps, sums);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

/* sums: where those of pieces go, or NULL. */
template <class F>
static bool fp8_launch(const di_stream *stream, const gemm_job &job, const gemm_cut &cut, float *sums) {
    int64_t n_units;
    gemm_units units = gemm_units_of<F>(job, gemm_pieces(cut), &n_units);
    fp8_maps maps;
    if (!fp8_maps_make<F>(&maps, job, (uint32_t)units.box_rows))
        return false;
    DI_LAUNCH_PDL((gemm_fp8<F>), (unsigned)DI_MIN(n_units, (int64_t)stream->dev->n_sms), F::THREADS, F::ALL,
                  stream->stream, job, units, maps, sums);
    return true;
}

/* A tile a multiprocessor is a round; one of large tiles takes half again as long as one of small ones. */
bool gemm_sm90_fp8(const di_stream *stream, const gemm_job *job, const gemm_cut *cut) {
    int64_t n_out = gemm_ceil_div(job->w.n_out, 128), sms = stream->dev->n_sms;
    bool is_large = gemm_ceil_div(gemm_ceil_div(job->x.n_rows, 192) * n_out, sms) * 3 <
                    gemm_ceil_div(gemm_ceil_div(job->x.n_rows, 128) * n_out, sms) * 2;
    if (gemm_pieces(*cut) > 1)
        return is_large ? fp8_launch<fp8_form<192, IN_TURN>>(stream, *job, *cut, NULL)
                        : fp8_launch<fp8_form<128, IN_TURN>>(stream, *job, *cut, NULL);
    return is_large ? fp8_launch<fp8_form<192, WHOLE>>(stream, *job, *cut, NULL)
                    : fp8_launch<fp8_form<128, WHOLE>>(stream, *job, *cut, NULL);
}

bool gemm_sm90_fp8_apart(const di_stream *stream, const gemm_job *job, const gemm_cut *cut) {
    typedef fp8_form<APART_ROWS, APART> F;
    int n_pieces = gemm_pieces(*cut);
    if (n_pieces == 1)
        return fp8_launch<F>(stream, *job, *cut, NULL);
    float *sums = (float *)di_cuda_scratch(stream, (size_t)(n_pieces * job->x.n_rows * job->w.n_out) * sizeof(float));
    if (!sums || !fp8_launch<F>(stream, *job, *cut, sums))
        return false;
    gemm_sum_pieces(stream, job, sums, n_pieces);
    return true;
}

/* The shortest of three times, in hundredths of a microsecond, by what an H200 took: a start, and for each round of
 * units over the multiprocessors the blocks of k of a unit. FEW has four warpgroups a block of threads. */
gemm_fp8_form gemm_fp8_pick(const di_device *dev, const gemm_job *job, const gemm_cut *cut) {
    int64_t n = job->x.n_rows, n_out = job->w.n_out, n_pieces = gemm_pieces(*cut);
    int64_t steps = gemm_ceil_div(cut->n_blocks, n_pieces), n_128 = gemm_ceil_div(n_out, 128);
    auto rounds = [&](int64_t units) { return gemm_ceil_div(units, dev->n_sms); };
    int64_t few_units = gemm_ceil_div(gemm_ceil_div(n_out, 64), 4 / cut->k_ways) * cut->cluster;
    int64_t few = 350 + rounds(few_units * gemm_ceil_div(n, 64)) * steps * (n <= 16 ? 70 : n <= 32 ? 95 : 155);
    int64_t apart_units = gemm_ceil_div(n, APART_ROWS) * n_128 * n_pieces;
    int64_t apart = 500 + rounds(apart_units) * steps * 62 + (n_pieces > 1 ? 220 : 0);
    int64_t many = 400 + rounds(gemm_ceil_div(n, 128) * n_128) * cut->n_blocks * 67;
    if (n_out % 32)
        return GEMM_FP8_FEW;
    bool has_apart = n_pieces > 1 || !job->codes.data;
    if (has_apart && apart < few && apart < many)
        return GEMM_FP8_APART;
    return few <= many ? GEMM_FP8_FEW : GEMM_FP8_MANY;
}
