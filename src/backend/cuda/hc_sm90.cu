/* Sums of hc_mix on Hopper: 24 dot products and the sum of squares of each row, with bf16 inputs and fp32 weights.
 *
 * A weight is exactly the sum of three bf16 numbers of 8 bits each, and a product of bf16 numbers is exact in fp32, so
 * that the tensor cores make the dots with nothing lost but in the additions: a multiply has 72 columns, the weights'
 * first, second and third parts. The three sums of a dot come to the same thread.
 *
 *            24 columns      24 columns      24 columns
 *          +------------+  +------------+  +------------+
 *   x  *   |   first    |  |   second   |  |   third    |    dot = first + (second + third)
 *          +------------+  +------------+  +------------+
 *
 * The columns of x are cut into pieces of 128, each an accumulation from zero, and pieces into spans of 4, by the width
 * alone. Sums of pieces are added in rising order to that of their span, those of spans in rising order to the whole:
 * here or by finish_parts_kernel (hc.cu), whichever suits the number of rows, with the same bits. A block of threads
 * has one piece, or a span one piece after the other, of 64 or 128 rows. Nothing runs ahead inside a block; the several
 * that share a multiprocessor do that for each other. */
#include "hc.h"
#include "rows.cuh"

enum {
    TILE = 64,   /* rows of a warpgroup */
    GROUP = 128, /* its threads */
    W_ROWS = 3 * HC_DOTS,
    STEP = 16 /* columns of a multiply */
};

/* Shared memory: rows of x, then the weights' parts, both as multiplies read them. */
template <int GROUPS> struct tile_shape {
    static constexpr int ROWS = TILE * GROUPS, THREADS = GROUP * GROUPS, RESIDENT = GROUPS == 1 ? 6 : 4;
    static constexpr int X = ROWS * HC_PIECE * 2, BYTES = X + W_ROWS * HC_PIECE * 2;
    static constexpr int X_LANES = HC_PIECE / 8, X_STEP = THREADS / X_LANES, X_EACH = ROWS / X_STEP;
    static constexpr int W_LANES = HC_PIECE / 4, W_STEP = THREADS / W_LANES, W_EACH = HC_DOTS / W_STEP;
    static_assert(X_STEP % 8 == 0 && HC_DOTS % 8 == 0, "rows of x, and of a weight's parts, have the same swizzle");
};

/* The next part of four weights: their bf16 values, which are taken off. */
__device__ static inline uint2 next_part(float4 &w) {
    uint2 part = make_uint2(cu_pack_bf16(w.x, w.y), cu_pack_bf16(w.z, w.w));
    w.x = w.x - __uint_as_float(part.x << 16);
    w.y = w.y - __uint_as_float(part.x & 0xFFFF0000u);
    w.z = w.z - __uint_as_float(part.y << 16);
    w.w = w.w - __uint_as_float(part.y & 0xFFFF0000u);
    return part;
}

/* Grid (parts, tiles of rows). PIECES of a part: 1 or HC_SPAN. */
template <int GROUPS, int PIECES>
__global__ void __launch_bounds__(tile_shape<GROUPS>::THREADS, tile_shape<GROUPS>::RESIDENT)
    sums_kernel(di_act x, const float *fn, int64_t row0, int64_t row_end, hc_parts parts) {
    typedef tile_shape<GROUPS> S;
    DI_DYN_SHARED(uint8_t, smem);
    int tid = (int)threadIdx.x, t = tid % GROUP, group = tid / GROUP, lane = tid % DI_WARP;
    int64_t n = x.n_cols, first = row0 + (int64_t)blockIdx.y * S::ROWS, col = (int64_t)blockIdx.x * PIECES * HC_PIECE;
    int n_here = (int)(row_end - first < S::ROWS ? row_end - first : (int64_t)S::ROWS);

    /* What a thread copies: 16 bytes of some rows, four weights of some outputs. */
    int x_row = tid / S::X_LANES, w_row = tid / S::W_LANES;
    const uint16_t *x_from = (const uint16_t *)x.data + (first + x_row) * x.stride + col + tid % S::X_LANES * 8;
    const float *w_from = fn + w_row * n + col + tid % S::W_LANES * 4;
    uint32_t x_to = cu_smem(smem) + cu_sw128((uint32_t)x_row, (uint32_t)(tid % S::X_LANES * 16), S::ROWS);
    float4 w[S::W_EACH];
    auto load_w = [&] {
#pragma unroll
        for (int i = 0; i < S::W_EACH; i++)
            w[i] = __ldg((const float4 *)(w_from + i * S::W_STEP * n));
        w_from += HC_PIECE;
    };
    /* Rows that don't exist stay noise, which meets no other row. */
    auto copy_x = [&] {
#pragma unroll
        for (int i = 0; i < S::X_EACH; i++) {
            if (x_row + i * S::X_STEP < n_here)
                cu_cp16(x_to + (uint32_t)(i * S::X_STEP * 128), x_from + i * S::X_STEP * x.stride);
        }
        cu_cp_commit();
        x_from += HC_PIECE;
    };

    /* Squares: a lane has half of a row, that of one panel, and the row is one of its warp's. */
    int own_row = group * TILE + t / DI_WARP * 16 + lane % 16;
    const uint8_t *own = smem + lane / 16 * (S::ROWS * 128) + own_row * 128;
    uint32_t x_at = cu_smem(smem) + (uint32_t)(group * TILE * 128), w_at = cu_smem(smem) + S::X;
    float sum[HC_DOTS / 2] = {}, square = 0.0f;
    load_w();
    cu_grid_wait();
    copy_x();
    cu_grid_launch();
#pragma unroll 1
    for (int piece = 0;; piece++) {
#pragma unroll
        for (int i = 0; i < S::W_EACH; i++) {
            int row = w_row + i * S::W_STEP;
            uint8_t *to = smem + S::X + cu_sw128((uint32_t)row, (uint32_t)(tid % S::W_LANES * 8), W_ROWS);
#pragma unroll
            for (int part = 0; part < 3; part++)
                *(uint2 *)(to + part * HC_DOTS * 128) = next_part(w[i]);
        }
        cu_cp_wait<0>();
        cu_fence_async();
        __syncthreads();
        float d[W_ROWS / 2];
        cu_wgmma_fence();
#pragma unroll
        for (int s = 0; s < HC_PIECE / STEP; s++)
            cu_wgmma_bf16_ss(d, cu_desc_k128(x_at + (uint32_t)(s / 4 * S::ROWS * 128 + s % 4 * 32)),
                             cu_desc_k128(w_at + (uint32_t)(s / 4 * W_ROWS * 128 + s % 4 * 32)), s > 0);
        cu_wgmma_commit();
        float even = 0.0f, odd = 0.0f;
#pragma unroll 2
        for (int c = 0; c < 8; c++) {
            uint4 q = *(const uint4 *)(own + ((c ^ (own_row & 7)) << 4));
            const uint32_t u[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float a = __uint_as_float(u[i] << 16), b = __uint_as_float(u[i] & 0xFFFF0000u);
                even = fmaf(a, a, even);
                odd = fmaf(b, b, odd);
            }
        }
        float half = even + odd, both = half + __shfl_down_sync(0xFFFFFFFFu, half, 16);
        cu_wgmma_wait<0>();
        cu_wgmma_pin(d);
        square = square + both;
#pragma unroll
        for (int i = 0; i < HC_DOTS / 2; i++)
            sum[i] = sum[i] + (d[i] + (d[i + HC_DOTS / 2] + d[i + HC_DOTS]));
        if (PIECES == 1 || piece + 1 == PIECES || col + (piece + 1) * HC_PIECE == n)
            break;
        load_w();
        __syncthreads(); /* all have read the tile */
        copy_x();
    }

    float *at = parts.sums + (first - row0) * parts.pitch;
    if (lane < 16 && own_row < n_here)
        at[(int64_t)own_row * parts.pitch + parts.n * HC_DOTS + (int)blockIdx.x] = square;
    at += (int)blockIdx.x * HC_DOTS + cu_acc_col(t, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = group * TILE + cu_acc_row(t, 2 * half);
        if (row >= n_here)
            continue;
#pragma unroll
        for (int j = 0; j < HC_DOTS / 8; j++)
            *(float2 *)(at + (int64_t)row * parts.pitch + j * 8) =
                make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
    }
}

/* ---- host side ---- */

enum {
    SHORT_ROWS_MAX = 64,   /* that one warpgroup takes */
    PIECE_ROWS_MAX = 1024, /* above, spans are enough to fill the chip, with a quarter of the sums to store */
    TURN_ROWS_MAX = 8192,  /* whose sums, 32 MB at the released width, L2 has room for */
    COLS_MAX = 65536       /* the sums of a row's pieces are in shared memory at once */
};

static size_t row_bytes(int64_t n_cols, bool are_spans) {
    return (size_t)hc_parts_of(NULL, n_cols, are_spans).pitch * sizeof(float);
}

size_t hc_sm90_need(const di_device *dev, const di_limits *limits) {
    int64_t n = limits->hidden_size > 0 ? HC_STREAMS * limits->hidden_size : limits->n_in_max;
    int64_t rows = limits->rows_max > 0 ? limits->rows_max : 1;
    if (dev->arch != DI_CUDA_SM90 || n > COLS_MAX)
        return 0;
    return (size_t)(rows < PIECE_ROWS_MAX ? rows : (int64_t)PIECE_ROWS_MAX) * row_bytes(n, false);
}

bool hc_sm90_fits(const di_stream *stream, const di_hc_mix_args *a) {
    return stream->dev->arch == DI_CUDA_SM90 && a->x.dtype == DI_BF16 && a->x.n_cols % HC_PIECE == 0 &&
           a->x.n_cols <= COLS_MAX && row_bytes(a->x.n_cols, false) <= di_cuda_scratch_bytes(stream);
}

template <int GROUPS, int PIECES>
static void sums_launch(di_stream *stream, const di_hc_mix_args *a, int64_t row0, int64_t row_end,
                        const hc_parts *parts) {
    typedef tile_shape<GROUPS> S;
    dim3 grid((unsigned)parts->n, (unsigned)((row_end - row0 + S::ROWS - 1) / S::ROWS));
    DI_LAUNCH_PDL((sums_kernel<GROUPS, PIECES>), grid, S::THREADS, S::BYTES, stream->stream, a->x, a->fn, row0, row_end,
                  *parts);
}

void hc_sm90(di_stream *stream, const di_hc_mix_args *a) {
    int64_t n_rows = a->x.n_rows;
    bool are_spans = n_rows > PIECE_ROWS_MAX;
    hc_parts parts = hc_parts_of((float *)di_cuda_scratch(stream, 0), a->x.n_cols, are_spans);
    int64_t at_once = (int64_t)(di_cuda_scratch_bytes(stream) / row_bytes(a->x.n_cols, are_spans));
    at_once = at_once < TURN_ROWS_MAX ? at_once : (int64_t)TURN_ROWS_MAX;
    if (at_once > 2 * TILE)
        at_once = at_once / (2 * TILE) * (2 * TILE);
    for (int64_t row0 = 0; row0 < n_rows; row0 += at_once) {
        int64_t end = row0 + at_once < n_rows ? row0 + at_once : n_rows;
        if (are_spans)
            sums_launch<2, HC_SPAN>(stream, a, row0, end, &parts);
        else if (n_rows > SHORT_ROWS_MAX)
            sums_launch<2, 1>(stream, a, row0, end, &parts);
        else
            sums_launch<1, 1>(stream, a, row0, end, &parts);
        hc_finish_parts(stream, a, row0, end, &parts);
    }
}
