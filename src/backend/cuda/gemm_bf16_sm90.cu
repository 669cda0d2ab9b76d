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
#include "gemm_ring.cuh"

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
    BLOCK_K = 128     /* what k is cut by */
};

template <int ROWS_, int OUTS_, bool APART_> struct bf16_form {
    static constexpr int ROWS = ROWS_, OUTS = OUTS_, N = ROWS == 128 ? OUTS : OUTS / 2; /* N: outputs of a warpgroup */
    static constexpr bool IS_APART = APART_;
    static constexpr int STAGES = 128 / STAGE_K; /* of a block of k */
    static constexpr int X = 0, W = ROWS * 128, BYTES = W + OUTS * 128;
    static constexpr int ROOM = (227 * 1024 - 256) / BYTES, COUNT = ROOM < 10 ? ROOM : 10;
    static constexpr int BARRIERS = COUNT * BYTES, ALL = BARRIERS + 2 * COUNT * 8;
    static_assert(W % 1024 == 0 && N * 128 % 1024 == 0, "operands begin at whole atoms of the swizzle");
};

struct bf16_maps {
    cu_map x, w;
};

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
    float acc[F::N / 2], total[F::IS_APART ? 1 : F::N / 2];
    gemm_at<F> at;

    __device__ explicit bf16_consumer(uint32_t shared) : at(shared) {
    }
    static __device__ void release(uint32_t empty) {
        if (cu_elect())
            cu_mbar_arrive(empty);
    }
    /* n stages into acc, from zero. */
    __device__ void piece(int n, uint32_t x0, uint32_t w0) {
        uint32_t before = 0;
        for (int i = 0; i < n; i++) {
            uint64_t x = cu_desc_k128(x0 + at.stage * F::BYTES), w = cu_desc_k128(w0 + at.stage * F::BYTES);
            cu_mbar_wait(at.full(), at.parity);
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
            before = at.empty();
            at.next();
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
    __device__ void run(const gemm_job &job, const gemm_units &units) {
        int group = threadIdx.x / WARPGROUP, row = F::ROWS == 128 ? group * 64 : 0,
            out = F::ROWS == 128 ? 0 : group * F::N;
        uint32_t x0 = __shfl_sync(~0u, at.shared + F::X + row * 128, 0);
        uint32_t w0 = __shfl_sync(~0u, at.shared + F::W + out * 128, 0);
        for (int unit = blockIdx.x; unit < units.count(); unit += gridDim.x) {
            gemm_unit<F> u(units, unit);
            if constexpr (F::IS_APART) {
                piece((u.end - u.begin) * F::STAGES, x0, w0);
                store(job, u.piece * job.x.n_rows * job.w.n_out, u.row0 + row, u.out0 + out, acc);
            } else {
                for (int p = 0; p < units.n_pieces; p++) {
                    piece((units.begin(p + 1) - units.begin(p)) * F::STAGES, x0, w0);
#pragma unroll
                    for (int i = 0; i < F::N / 2; i++)
                        total[i] = p ? total[i] + acc[i] : acc[i];
                }
                store(job, 0, u.row0 + row, u.out0 + out, total);
            }
        }
    }
};

template <class F>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_bf16(const __grid_constant__ gemm_job job, const __grid_constant__ gemm_units units,
              const __grid_constant__ bf16_maps maps) {
    DI_DYN_SHARED(uint8_t, shared);
    if (threadIdx.x == 0)
        gemm_ring_init<F>(shared, 1, CONSUMERS / DI_WARP);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        cu_regs_give<COPIER_REGS>();
        if (threadIdx.x == CONSUMERS)
            gemm_fill<F>(shared, units, maps.x, [&](uint32_t to, int byte, int out0, uint64_t *full) {
                cu_map_load(to, maps.w, byte, out0, full);
            });
    } else {
        cu_regs_take<CONSUMER_REGS>();
        cu_grid_wait(); /* the kernels before may still read what is written here */
        bf16_consumer<F>(cu_smem(shared)).run(job, units);
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
    int64_t n_units;
    gemm_units units = gemm_units_of<F>(job, n_pieces, &n_units);
    bf16_maps maps;
    if (!bf16_maps_make(&maps, job, (uint32_t)units.box_rows, F::OUTS))
        return false;
    DI_LAUNCH_PDL((gemm_bf16<F>), (unsigned)DI_MIN(n_units, (int64_t)stream->dev->n_sms), THREADS, F::ALL,
                  stream->stream, job, units, maps);
    return true;
}

int gemm_bf16_pieces(const di_device *dev, const di_mat *w) {
    return gemm_splits(gemm_ceil_div(w->n_out, APART_OUTS), (int)(w->n_in / BLOCK_K), dev->n_sms, INT64_MAX);
}

bool gemm_bf16_is_apart(const di_device *dev, int64_t n_rows, const di_mat *w, int n_pieces) {
    int64_t units = gemm_ceil_div(n_rows, APART_ROWS) * gemm_ceil_div(w->n_out, APART_OUTS) * n_pieces;
    return n_pieces > 1 && w->n_out % 4 == 0 && units <= APART_ROUNDS * dev->n_sms;
}

size_t gemm_bf16_apart_bytes(const di_device *dev) {
    return (size_t)APART_ROUNDS * (size_t)dev->n_sms * APART_ROWS * APART_OUTS * sizeof(float);
}

bool gemm_sm90_bf16_apart(const di_stream *stream, const gemm_job *given, int n_pieces, float *sums) {
    gemm_job job = *given;
    job.out = {DI_F32, job.x.n_rows, job.w.n_out, job.w.n_out, sums, NULL};
    job.add = NULL;
    job.aligned = 2;
    return bf16_launch<bf16_form<APART_ROWS, APART_OUTS, true>>(stream, job, n_pieces);
}

bool gemm_sm90_bf16_turn(const di_stream *stream, const gemm_job *job, int n_pieces) {
    n_pieces = stream->dev->is_order_free ? 1 : n_pieces;
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
    bool is_apart = gemm_bf16_is_apart(stream->dev, n_rows, &job->w, n_pieces);
    float *sums =
        is_apart ? (float *)di_cuda_scratch(stream, (size_t)(n_pieces * n_rows * n_out) * sizeof(float)) : NULL;
    if (!sums)
        return gemm_sm90_bf16_turn(stream, job, n_pieces);
    if (!gemm_sm90_bf16_apart(stream, job, n_pieces, sums))
        return false;
    gemm_sum_pieces(stream, job, sums, n_pieces);
    return true;
}
