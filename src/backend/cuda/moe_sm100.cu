/* Mixture of experts by the block-scaled multiplies of Blackwell's tensor cores: E4M3 activations, experts in FP4 or
 * FP8.
 *
 * Both products are out^T = W . X^T of 128 x N: 128 rows of W, a tile of up to N rows of an expert (moe.cuh). Codes go
 * to the tensor core as they are stored, E2M1 too, and so do scales, of 32 k of a row of W and of a row of X: sums stay
 * in tensor memory from the first k to the last. The first product has 64 rows of w1 and the same 64 of w3, so that
 * gate and up of 64 outputs are one block's, two QA groups; it leaves codes and scales [pairs, inner], the second one
 * bf16 [pairs, H], which moe.cu adds up.
 *
 *   warps 0-3   copy a stage, 16 bytes of 8 rows of W a thread, then those of X, then scales; at the end take the sums
 *   warp 4      has the tensor memory, multiplies
 *
 * E2M1 codes lie in shared memory as 8 bytes of each 16: 16 codes and padding (PTX ISA, tcgen05, "packing formats":
 * 4-bit elements of kind::mxf8f6f4), so that a line of 128 k has 128 bytes in either format.
 *
 * A row's bits don't depend on its batch as long as a multiply's sums don't depend on N. Compiled and run over the
 * emulation, never on a chip; what is not known is said in gemm_sm100.cu. */
#include "moe.cuh"
#include "rows.cuh"
#include "tiles_sm100.cuh"

enum {
    COPIERS = 128, /* threads */
    THREADS = COPIERS + DI_WARP,
    MULTIPLIER = COPIERS / DI_WARP, /* warp */
    STEP = COPIERS / 8,             /* rows that threads copy at once, a chunk of 16 bytes each */
    LANES = 16,                     /* columns of sums that a thread reads at once */
};

typedef struct moe100_args : moe_fast_args {
    const uint8_t *x, *x_scale; /* of the order's first row */
    uint8_t *act, *act_scale;
} moe100_args;

/* A block's part: rows of W, of one matrix or of two halves. */
template <int N, bool IS_DOWN> struct moe100_block {
    typedef tc_shape<N> S;
    const moe100_args &a;
    const moe_tile &tile; /* in memory */
    tc_ring<N> ring;
    int32_t pair0, n_pairs, n_in;
    bool is_fp8;

    __device__ moe100_block(const moe100_args &args, uint8_t *shared)
        : a(args), tile(args.o.tiles[blockIdx.y]), ring(shared), pair0(tile.pair0), n_pairs(tile.n),
          n_in(IS_DOWN ? args.inner : args.h),
          is_fp8(tile.expert == args.o.n_experts ? args.is_fp8_shared : args.is_fp8) {
    }

    /* Row m of the block's 128: its matrix, its row there. */
    __device__ static int matrix(int m) {
        return IS_DOWN ? W2 : m < TC_M / 2 ? W1 : W3;
    }
    __device__ static int64_t row_of(int m) {
        return IS_DOWN ? (int64_t)blockIdx.x * TC_M + m : (int64_t)blockIdx.x * (TC_M / 2) + m % (TC_M / 2);
    }

    /* BYTES: 16 codes of W, and what they take of a row. Stages become full some blocks of k behind the copies: the
     * tensor core sees what a thread wrote after its fence. What is beyond the tile's rows is not written, and not
     * read. */
    template <int BYTES> __device__ void copy() {
        constexpr int BEHIND = S::COUNT - 2, X_EACH = N / STEP, W_HALF = TC_M / 2 / STEP;
        int t = threadIdx.x, r0 = t / 8, chunk = t % 8, n = n_in / TC_K;
        int64_t pitch = (int64_t)n_in / 16 * BYTES;
        const uint8_t *w[2], *x[X_EACH], *w_scale, *x_scale = NULL;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int m = r0 + i * (TC_M / 2);
            w[i] = tile.data[matrix(m)] + row_of(m) * pitch + chunk * BYTES;
        }
        w_scale = tile.scale[matrix(t)] + (BYTES == 16 ? row_of(t) / 32 : row_of(t)) * (n_in / 32);
        auto x_row = [&](int r) { return (int64_t)(IS_DOWN ? pair0 + r : a.o.pair_row[pair0 + r]); };
#pragma unroll
        for (int i = 0; i < X_EACH; i++) {
            int r = r0 + i * STEP;
            x[i] = r < n_pairs ? (IS_DOWN ? a.act : a.x) + x_row(r) * n_in + chunk * 16 : NULL;
        }
        if (t < n_pairs)
            x_scale = (IS_DOWN ? a.act_scale : a.x_scale) + x_row(t) * (n_in / 32);
        tc_at<S::COUNT> at, behind;
        for (int kb = 0; kb < n + BEHIND; kb++) {
            if (kb < n) {
                uint32_t to = ring.stage(at.stage);
                cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
#pragma unroll
                for (int i = 0; i < 2 * W_HALF; i++)
                    cu_cp<BYTES>(to + S::A + cu_sw128(r0 + i * STEP, chunk * 16, TC_M),
                                 w[i / W_HALF] + i % W_HALF * STEP * pitch + kb * (8 * BYTES));
#pragma unroll
                for (int i = 0; i < X_EACH; i++) {
                    if (x[i])
                        cu_cp<16>(to + S::B + cu_sw128(r0 + i * STEP, chunk * 16, N), x[i] + kb * TC_K);
                }
                cu_cp<4>(to + S::A_SCALES + cu_tc_scale_at(t), w_scale + kb * 4);
                if (x_scale)
                    cu_cp<4>(to + S::B_SCALES + cu_tc_scale_at(t), x_scale + kb * 4);
                at.next();
            }
            cu_cp_commit(); /* at the end of nothing, so that what is waited for is the same */
            if (kb >= BEHIND) {
                cu_cp_wait<BEHIND>();
                cu_fence_async();
                cu_mbar_arrive(&ring.full[behind.stage]);
                behind.next();
            }
        }
    }

    /* Sums of the thread's row of W, 16 rows of X at a time. */
    template <class Take> __device__ void sums(uint32_t tmem, Take take) {
        for (int r0 = 0; r0 < n_pairs; r0 += LANES) {
            float v[LANES];
            cu_tmem_load16(v, tmem + cu_tmem_lane(threadIdx.x / DI_WARP * DI_WARP) + r0);
#pragma unroll
            for (int i = 0; i < LANES; i++) {
                if (r0 + i < n_pairs)
                    take(r0 + i, v[i]);
            }
        }
    }
    /* Gate and up are in the lanes of different warps: they meet in shared memory, where the stages were. Then a warp
     * has a QA group of a row. */
    __device__ void finish_up(uint32_t tmem) {
        float *both = (float *)ring.shared; /* [row][gate, up] */
        int t = threadIdx.x, lane = t % DI_WARP, warp = t / DI_WARP;
        sums(tmem, [&](int r, float v) { both[r * TC_M + t] = v; });
        cu_bar_sync(1, COPIERS);
        int64_t group = (int64_t)blockIdx.x * 2 + warp % 2;
        for (int r = warp / 2; r < n_pairs; r += 2) {
            int64_t pair = pair0 + r;
            const float *gate = both + r * TC_M + warp % 2 * 32 + lane;
            float v = moe_swiglu(gate[0], gate[TC_M / 2], a.o.pair_weight[pair], a.limit, true);
            cu_scale s = cu_qa_scale(cu_lanes_max<DI_WARP>(fmaxf(fabsf(v), 1e-4f)));
            a.act[pair * a.inner + group * 32 + lane] = (uint8_t)cu_e4m3_codes4(v, v, v, v, s.inverse);
            if (lane == 0)
                a.act_scale[pair * (a.inner / 32) + group] = (uint8_t)s.byte;
        }
    }
    __device__ void finish_down(uint32_t tmem) {
        uint16_t *y = a.y + (int64_t)pair0 * a.h + row_of(threadIdx.x);
        sums(tmem, [&](int r, float v) { y[(int64_t)r * a.h] = cu_f32_to_bf16(v); });
    }
};

/* Grid: parts of W; tiles, as many as there could be. Tensor memory is taken before the next kernel may begin, whose
 * blocks would else have it first and wait for this one. */
template <int N, bool IS_DOWN>
__global__ void __launch_bounds__(THREADS) moe100(const __grid_constant__ moe100_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    cu_grid_wait();
    if ((int32_t)blockIdx.y >= a.o.head[MOE_N_TILES])
        return;
    moe100_block<N, IS_DOWN> block(a, shared);
    uint32_t tmem = block.ring.begin(MULTIPLIER, COPIERS);
    cu_grid_launch();
    if (threadIdx.x < COPIERS) {
        if (block.is_fp8)
            block.template copy<16>();
        else
            block.template copy<8>();
        block.ring.wait();
        if (IS_DOWN)
            block.finish_down(tmem);
        else
            block.finish_up(tmem);
    } else if (cu_elect()) {
        uint32_t n = (uint32_t)(block.n_pairs + 15) / 16 * 16; /* no more than there are */
        block.ring.multiply(tmem, cu_tc_kind(block.is_fp8 ? CU_TC_E4M3 : CU_TC_E2M1, CU_TC_E4M3, n), block.n_in / TC_K);
    }
    __syncwarp();
    block.ring.end(MULTIPLIER, tmem);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

bool di_moe_sm100_fits(const di_stream *stream, const di_moe_args *a) {
    return stream->dev->arch == DI_CUDA_SM100 && a->x.n_cols % TC_M == 0 && di_moe_inner(a) % TC_K == 0 &&
           di_moe_fast_fits(a, 4);
}

/* Rows of a tile, by the rows that an expert has on average; it is the batch's choice, and changes no bits. */
static int32_t moe100_choose(int64_t n_rows, int64_t k, int64_t n_experts) {
    int64_t pairs = n_rows * DI_MAX(k, (int64_t)1), experts = DI_MAX(n_experts, (int64_t)1);
    return pairs <= 8 * experts ? 16 : pairs <= 20 * experts ? 32 : pairs <= 48 * experts ? 64 : 128;
}

typedef struct moe100_pieces {
    size_t order, act, scale, y;
} moe100_pieces;

static moe100_pieces moe100_cut(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner, int32_t tile_rows) {
    size_t n_pairs = (size_t)di_moe_pairs_max(a, n_rows);
    return moe100_pieces{di_moe_order_cut(a, 0, n_rows, tile_rows, NULL, NULL), di_cuda_piece(n_pairs * (size_t)inner),
                         di_cuda_piece(n_pairs * (size_t)(inner / 32)), di_cuda_piece(n_pairs * (size_t)h * 2)};
}

size_t di_moe_sm100_bytes(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner) {
    moe100_pieces p = moe100_cut(a, DI_MIN(n_rows, (int64_t)MOE_PASS_ROWS), h, inner, 16);
    return p.order + p.act + p.scale + p.y;
}

template <int N> static void moe100_launch(const di_stream *stream, const moe100_args &f) {
    unsigned tiles = (unsigned)f.o.tiles_max;
    DI_LAUNCH_PDL((moe100<N, false>), dim3((unsigned)(f.inner / (TC_M / 2)), tiles), THREADS, tc_shape<N>::ALL,
                  stream->stream, f);
    DI_LAUNCH_PDL((moe100<N, true>), dim3((unsigned)(f.h / TC_M), tiles), THREADS, tc_shape<N>::ALL, stream->stream, f);
}

di_status di_moe_sm100(const di_stream *stream, const di_moe_args *a) {
    int64_t h = a->x.n_cols, inner = di_moe_inner(a);
    for (int64_t row0 = 0; row0 < a->x.n_rows; row0 += MOE_PASS_ROWS) {
        int64_t n = DI_MIN(a->x.n_rows - row0, (int64_t)MOE_PASS_ROWS);
        int32_t tile_rows = moe100_choose(n, a->k, a->n_experts);
        moe100_pieces p = moe100_cut(a, n, h, inner, tile_rows);
        uint8_t *base = (uint8_t *)di_cuda_scratch(stream, p.order + p.act + p.scale + p.y);
        if (!base)
            return DI_ERR_SHAPE;
        moe100_args f = {};
        di_moe_fast_begin(a, row0, n, tile_rows, base, &f);
        f.x = (const uint8_t *)a->x.data + row0 * h;
        f.x_scale = a->x.scale + row0 * (h / 32);
        f.act = base + p.order;
        f.act_scale = f.act + p.act;
        f.y = (uint16_t *)(void *)(f.act_scale + p.scale);
        di_moe_order_start(stream, &f.o, NULL);
        switch (tile_rows) {
        case 16:
            moe100_launch<16>(stream, f);
            break;
        case 32:
            moe100_launch<32>(stream, f);
            break;
        case 64:
            moe100_launch<64>(stream, f);
            break;
        default:
            moe100_launch<128>(stream, f);
        }
        di_moe_sum(stream, &f.o, f.y, DI_BF16, &a->out, row0, true);
    }
    return DI_OK;
}
