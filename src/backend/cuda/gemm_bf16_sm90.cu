/* gemm with bf16 on both sides, by Hopper's tensor cores: few rows and many.
 *
 * out [rows, n_out] = X . W^T. The copy engine brings boxes of both into a ring of stages of 64 k, which two warpgroups
 * multiply from shared memory. A tile is 64 rows, whose outputs the warpgroups share, or 128, of which each has half.
 *
 * k is cut into pieces by the matrix's shape alone: a piece is one chain of multiplies from zero, and sums of pieces
 * are added in rising order. So a row has the same bits in every batch:
 *
 *   in turn    a block of threads does all pieces of a tile and keeps their total in registers
 *   apart      few rows: every piece is a unit of its own, whose sums go to device memory; who reads them adds them up,
 *              gemm_sum_pieces or the router's choice (route_sm90.cu)
 *
 * With order-free sums a batch that has its tiles in turn has k whole. Products of two bf16 values are exact, sums are
 * the tensor core's, in fp32. Source: model.md 0.3. */
#include "cu.cuh"
#include "gemm.h"
#include "sm90.cuh"

enum {
    STAGE_K = 64, /* 128 bytes of a row */
    WARPGROUP = 128,
    CONSUMERS = 2 * WARPGROUP,
    THREADS = CONSUMERS + WARPGROUP,
    COPIER_REGS = 40,
    CONSUMER_REGS = 232,
    APART_ROWS = 64, /* of a tile in pieces */
    APART_OUTS = 64,
    APART_ROUNDS = 5, /* units a multiprocessor */
    BLOCK_K = 128,    /* what k is cut by */
    PIECES_MAX = 64
};

template <int ROWS_, int OUTS_, bool APART_> struct bf16_form {
    static constexpr int ROWS = ROWS_, OUTS = OUTS_, N = ROWS == 128 ? OUTS : OUTS / 2; /* N: outputs of a warpgroup */
    static constexpr bool APART = APART_;
    static constexpr int X = 0, W = ROWS * 128, BYTES = W + OUTS * 128;
    static constexpr int ROOM = (227 * 1024 - 256) / BYTES, COUNT = ROOM < 10 ? ROOM : 10;
    static constexpr int BARRIERS = COUNT * BYTES, ALL = BARRIERS + 2 * COUNT * 8;
    static_assert(W % 1024 == 0 && N * 128 % 1024 == 0, "operands begin at whole atoms of the swizzle");
};

/* The units of a block of threads: tiles, or their pieces. */
struct bf16_units {
    gemm_tiles tiles;
    int n_blocks;          /* of 128 k */
    int n_pieces, n_apart; /* n_apart: n_pieces or 1 */
    int group_out;         /* outputs of a group of columns; a multiple of a tile's, or all */
    int stage_bytes;       /* that come: a box of fewer rows leaves what lay in the others, whose sums nobody reads */

    __device__ int count() const {
        return tiles.count() * n_apart;
    }
    __device__ int begin(int piece) const { /* in stages */
        return n_blocks * piece / n_pieces * (BLOCK_K / STAGE_K);
    }
};
struct bf16_maps {
    cu_map x, w;
};

/* What the copier asks for next. */
template <class F> struct bf16_cursor {
    const bf16_units &units;
    int unit, stage = 0, end = 0;       /* stages of k */
    int row0 = 0, out0 = 0, group0 = 0; /* group0: the group's first byte in a row */

    __device__ explicit bf16_cursor(const bf16_units &u) : units(u), unit(blockIdx.x) {
        set();
    }
    __device__ bool is_over() const {
        return unit >= units.count();
    }
    __device__ void set() {
        if (is_over())
            return;
        int64_t row, out;
        units.tiles.at(unit / units.n_apart, F::ROWS, F::OUTS, row, out);
        row0 = (int)row, out0 = (int)out;
        group0 = out0 / units.group_out * units.n_blocks * BLOCK_K * 2;
        int piece = unit % units.n_apart;
        stage = F::APART ? units.begin(piece) : 0;
        end = F::APART ? units.begin(piece + 1) : units.n_blocks * (BLOCK_K / STAGE_K);
    }
    __device__ void next() {
        if (++stage < end)
            return;
        unit += gridDim.x;
        set();
    }
};

template <class F>
__device__ static inline void bf16_copy(uint8_t *shared, const bf16_units &units, const bf16_maps &maps) {
    uint64_t *full = (uint64_t *)(shared + F::BARRIERS), *empty = full + F::COUNT;
    bf16_cursor<F> w(units), x(units);
    int n = 0; /* stages whose weights are on their way: these don't depend on the kernels before */
    for (; n < F::COUNT && !w.is_over(); n++, w.next()) {
        cu_mbar_arrive_expect(&full[n], units.stage_bytes);
        cu_map_load(cu_smem(shared) + n * F::BYTES + F::W, maps.w, w.stage * 128, w.out0, &full[n]);
    }
    cu_grid_begin();
    for (int s = 0; s < n; s++, x.next())
        cu_map_load(cu_smem(shared) + s * F::BYTES + F::X, maps.x, x.group0 + x.stage * 128, x.row0, &full[s]);
    for (int s = 0, parity = 0; !w.is_over(); w.next()) {
        uint32_t to = cu_smem(shared) + s * F::BYTES;
        cu_mbar_wait(&empty[s], parity);
        cu_mbar_arrive_expect(&full[s], units.stage_bytes);
        cu_map_load(to + F::W, maps.w, w.stage * 128, w.out0, &full[s]);
        cu_map_load(to + F::X, maps.x, w.group0 + w.stage * 128, w.row0, &full[s]);
        if (++s == F::COUNT)
            s = 0, parity ^= 1;
    }
}

/* Sums of outputs o and o + 1 of a row; at: of the first, in out. */
__device__ static inline void bf16_store(const gemm_job &job, int64_t at, int64_t o, float v0, float v1) {
    if (job.aligned >= 2 && o + 1 < job.w.n_out) {
        if (job.add) {
            float2 add = *(const float2 *)(job.add + at);
            v0 += add.x;
            v1 += add.y;
        }
        if (job.out.dtype == DI_F32)
            *(float2 *)((float *)job.out.data + at) = make_float2(v0, v1);
        else
            *(uint32_t *)((uint16_t *)job.out.data + at) = cu_pack_bf16(v0, v1);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float v = i ? v1 : v0;
        if (o + i >= job.w.n_out)
            continue;
        if (job.add)
            v += job.add[at + i];
        if (job.out.dtype == DI_F32)
            ((float *)job.out.data)[at + i] = v;
        else
            ((uint16_t *)job.out.data)[at + i] = cu_f32_to_bf16(v);
    }
}

template <class F> struct bf16_consumer {
    float acc[F::N / 2], total[F::APART ? 1 : F::N / 2];
    uint8_t *shared;
    uint32_t stage = 0, parity = 0;

    __device__ void release(uint32_t s) {
        if (cu_elect())
            cu_mbar_arrive(cu_smem(shared) + F::BARRIERS + (F::COUNT + s) * 8);
    }
    /* n stages into acc, from zero. */
    __device__ void piece(int n, uint32_t x0, uint32_t w0) {
        uint32_t before = 0;
        for (int i = 0; i < n; i++) {
            uint64_t x = cu_desc_k128(x0 + stage * F::BYTES), w = cu_desc_k128(w0 + stage * F::BYTES);
            cu_mbar_wait(cu_smem(shared) + F::BARRIERS + stage * 8, parity);
            cu_wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                cu_wgmma_bf16_ss<CU_K_MAJOR, CU_K_MAJOR>(acc, cu_desc_add(x, k * 32), cu_desc_add(w, k * 32),
                                                         k || i ? 1 : 0);
            cu_wgmma_commit();
            if (i) {
                cu_wgmma_wait<1>();
                release(before);
            }
            before = stage;
            if (++stage == F::COUNT) {
                stage = 0;
                parity ^= 1;
            }
        }
        cu_wgmma_wait<0>();
        cu_wgmma_pin(acc);
        release(before);
    }
    /* At `base` in out. */
    template <int L>
    __device__ void store(const gemm_job &job, int64_t base, int64_t row0, int64_t out0, const float (&v)[L]) {
        int t = threadIdx.x % WARPGROUP;
#pragma unroll
        for (int i = 0; i < L; i += 2) {
            int64_t row = row0 + cu_acc_row(t, i), o = out0 + cu_acc_col(t, i);
            if (row < job.x.n_rows && o < job.w.n_out)
                bf16_store(job, base + row * job.out.stride + o, o, v[i], v[i + 1]);
        }
    }
    __device__ void run(const gemm_job &job, const bf16_units &units) {
        int group = threadIdx.x / WARPGROUP, row = F::ROWS == 128 ? group * 64 : 0,
            out = F::ROWS == 128 ? 0 : group * F::N;
        uint32_t x0 = __shfl_sync(~0u, cu_smem(shared) + F::X + row * 128, 0);
        uint32_t w0 = __shfl_sync(~0u, cu_smem(shared) + F::W + out * 128, 0);
        for (int u = blockIdx.x; u < units.count(); u += gridDim.x) {
            int64_t row0, out0;
            units.tiles.at(u / units.n_apart, F::ROWS, F::OUTS, row0, out0);
            if constexpr (F::APART) {
                int p = u % units.n_apart;
                piece(units.begin(p + 1) - units.begin(p), x0, w0);
                store(job, p * job.x.n_rows * job.w.n_out, row0 + row, out0 + out, acc);
            } else {
                for (int p = 0; p < units.n_pieces; p++) {
                    piece(units.begin(p + 1) - units.begin(p), x0, w0);
#pragma unroll
                    for (int i = 0; i < F::N / 2; i++)
                        total[i] = p ? total[i] + acc[i] : acc[i];
                }
                store(job, 0, row0 + row, out0 + out, total);
            }
        }
    }
};

template <class F>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_bf16(const __grid_constant__ gemm_job job, const __grid_constant__ bf16_units units,
              const __grid_constant__ bf16_maps maps) {
    DI_DYN_SHARED(uint8_t, shared);
    if (threadIdx.x == 0) {
        uint64_t *full = (uint64_t *)(shared + F::BARRIERS), *empty = full + F::COUNT;
        for (int s = 0; s < F::COUNT; s++) {
            cu_mbar_init(&full[s], 1);
            cu_mbar_init(&empty[s], CONSUMERS / DI_WARP);
        }
        cu_fence_mbar_init();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        cu_regs_give<COPIER_REGS>();
        if (threadIdx.x == CONSUMERS)
            bf16_copy<F>(shared, units, maps);
    } else {
        cu_regs_take<CONSUMER_REGS>();
        cu_grid_wait(); /* the kernels before may still read what is written here */
        bf16_consumer<F> consumer;
        consumer.shared = shared;
        consumer.run(job, units);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

static bool bf16_maps_make(bf16_maps *maps, const gemm_job &job, uint32_t n_rows, uint32_t n_outs) {
    uint64_t x_dims[2] = {(uint64_t)job.x.n_cols * 2, (uint64_t)job.x.n_rows},
             x_stride[1] = {(uint64_t)job.x.stride * 2};
    uint64_t w_dims[2] = {(uint64_t)job.w.n_in * 2, (uint64_t)job.w.n_out}, w_stride[1] = {w_dims[0]};
    uint32_t x_box[2] = {128, n_rows}, w_box[2] = {128, n_outs};
    return cu_map_make(&maps->x, job.x.data, 2, x_dims, x_stride, x_box) &&
           cu_map_make(&maps->w, job.w.data, 2, w_dims, w_stride, w_box);
}

template <class F> static bool bf16_launch(const di_stream *stream, const gemm_job &job, int n_pieces) {
    bf16_units units = {};
    units.tiles = {(int)gemm_ceil_div(job.x.n_rows, F::ROWS), (int)gemm_ceil_div(job.w.n_out, F::OUTS)};
    units.n_blocks = (int)(job.w.n_in / BLOCK_K);
    units.n_pieces = n_pieces;
    units.n_apart = F::APART ? n_pieces : 1;
    units.group_out = (int)(job.w.n_out / job.n_groups);
    int64_t box_rows = DI_MIN((int64_t)F::ROWS, gemm_ceil_div(job.x.n_rows, 8) * 8);
    units.stage_bytes = (int)(box_rows + F::OUTS) * 128;
    bf16_maps maps;
    if (!bf16_maps_make(&maps, job, (uint32_t)box_rows, F::OUTS))
        return false;
    int64_t n_units = (int64_t)units.tiles.n_row_tiles * units.tiles.n_out_tiles * units.n_apart;
    DI_LAUNCH_PDL((gemm_bf16<F>), (unsigned)DI_MIN(n_units, (int64_t)stream->dev->n_sms), THREADS, F::ALL,
                  stream->stream, job, units, maps);
    return true;
}

/* Pieces for tiles of n_blocks blocks of k: the count that gives the shortest time, in blocks, when a unit costs its
 * blocks and two more, and the multiprocessors go round by round. */
int gemm_bf16_pieces(const di_device *dev, const di_mat *w) {
    int64_t n_tiles = gemm_ceil_div(w->n_out, APART_OUTS), n_blocks = w->n_in / BLOCK_K, best_time = INT64_MAX;
    int best = 1;
    for (int n = 1; n <= n_blocks && n <= PIECES_MAX; n++) {
        int64_t time = gemm_ceil_div(n_tiles * n, dev->n_sms) * (gemm_ceil_div(n_blocks, n) + 2);
        if (time < best_time) {
            best_time = time;
            best = n;
        }
    }
    return best;
}

bool gemm_bf16_is_apart(const di_device *dev, int64_t n_rows, const di_mat *w) {
    int64_t n_pieces = gemm_bf16_pieces(dev, w);
    int64_t units = gemm_ceil_div(n_rows, APART_ROWS) * gemm_ceil_div(w->n_out, APART_OUTS) * n_pieces;
    return n_pieces > 1 && w->n_out % 4 == 0 && units <= APART_ROUNDS * dev->n_sms;
}

size_t gemm_bf16_apart_bytes(const di_device *dev) {
    return (size_t)APART_ROUNDS * (size_t)dev->n_sms * APART_ROWS * APART_OUTS * sizeof(float);
}

bool gemm_sm90_bf16_apart(const di_stream *stream, const gemm_job *given, float *sums) {
    gemm_job job = *given;
    job.out = {DI_F32, job.x.n_rows, job.w.n_out, job.w.n_out, sums, NULL};
    job.add = NULL;
    job.aligned = 2;
    return bf16_launch<bf16_form<APART_ROWS, APART_OUTS, true>>(stream, job, gemm_bf16_pieces(stream->dev, &job.w));
}

bool gemm_sm90_bf16_turn(const di_stream *stream, const gemm_job *job) {
    int n_pieces = stream->dev->is_order_free ? 1 : gemm_bf16_pieces(stream->dev, &job->w);
    /* Tiles a multiprocessor, times the nanoseconds that a stage of them took there. */
    auto time = [&](int64_t rows, int64_t outs, int64_t stage) {
        int64_t n_tiles = gemm_ceil_div(job->x.n_rows, rows) * gemm_ceil_div(job->w.n_out, outs);
        return gemm_ceil_div(n_tiles, stream->dev->n_sms) * stage;
    };
    int64_t small = time(64, 64, 170), wide = time(64, 128, 240), square = time(128, 128, 450);
    int64_t large = job->n_groups == 1 ? time(128, 192, 650) : square;
    int64_t least = DI_MIN(DI_MIN(small, wide), DI_MIN(square, large));
    if (small == least)
        return bf16_launch<bf16_form<64, 64, false>>(stream, *job, n_pieces);
    if (wide == least)
        return bf16_launch<bf16_form<64, 128, false>>(stream, *job, n_pieces);
    return square == least ? bf16_launch<bf16_form<128, 128, false>>(stream, *job, n_pieces)
                           : bf16_launch<bf16_form<128, 192, false>>(stream, *job, n_pieces);
}

bool gemm_sm90_bf16(const di_stream *stream, const gemm_job *job) {
    int64_t n_rows = job->x.n_rows, n_out = job->w.n_out;
    int n_pieces = gemm_bf16_pieces(stream->dev, &job->w);
    bool is_apart = gemm_bf16_is_apart(stream->dev, n_rows, &job->w);
    float *sums =
        is_apart ? (float *)di_cuda_scratch(stream, (size_t)(n_pieces * n_rows * n_out) * sizeof(float)) : NULL;
    if (!sums)
        return gemm_sm90_bf16_turn(stream, job);
    if (!gemm_sm90_bf16_apart(stream, job, sums))
        return false;
    gemm_sum_pieces(stream, job, sums, n_pieces);
    return true;
}
