/* Mixture of experts on Hopper's tensor cores, faithful numerics: E4M3 activations, experts in FP4 or FP8. The host's
 * side, and the kernels for few rows of an expert; those for more than ten or so are moe_many_sm90.cu's.
 *
 * Both products are out^T = W . X^T by E4M3 multiplies of 64 x N x 32: 32 k are one scale group, so a multiply starts
 * from zero and its sums are added to the accumulators in float, times the scales of weight and activation. What the
 * weights look like then, and activations with them, is in moe_sm90.cuh.
 *
 * A thread holds two rows of W, mma rows l/4 and l/4 + 8 of its warp's 16. In the first product they are the same row
 * of w1 and w3, so that gate and up of an output meet in one thread, and a warpgroup's 64 rows are the 32 outputs of
 * one QA group; in the second they are neighbouring outputs, which are stored together.
 *
 * A block is a unit: a tile of up to 8 or 16 rows of an expert, 64 rows of W, all k; the multiply is as wide as the
 * tile's own rows need, since experts differ and adding groups for rows that are not there is what a wide multiply
 * costs. Copies run ahead through stages of 128 bytes of each row of W; each warp reads the weights that it copied,
 * activations are the block's. A row's sum is one accumulator over groups in rising k, whatever N: bits don't depend on
 * the batch. Memory and the turns of instructions bind alike. Between the products, which are two launches: codes and
 * scales [pairs, inner]; after the second: bf16 [pairs, H], which moe.cu adds up. Scales of activations are floats in
 * memory, so that no block of the many that read one converts it.
 *
 * Against the reference: inside a group the tensor core keeps about 13 bits below the largest product; groups are added
 * without the reference's roundings (g, u and results can differ by a bf16 ulp, an activation then by one E4M3 code),
 * and silu is by fast instructions (a few ulps of fp32). A scale 255 of weights acts as infinity, of activations as
 * NaN. */
#include "moe_sm90.cuh"

enum {
    FP8_THREADS = 128, /* a warpgroup */
    FP8_ROW = 128,     /* bytes of a row of W in a stage */
    FP8_PITCH = 128 + 16,
    FP8_CODES = 64 * FP8_PITCH,
};

/* What a width has: a ring of STAGES, BLOCKS on a multiprocessor. Scales of weights come all at once when a unit
 * begins: few blocks of memory, read in one piece. */
template <int N> struct fp8_shape {
    static constexpr int STAGES = 3, BLOCKS = N == 8 ? 5 : 4;
    static constexpr int X = 0, W = N * 256, STAGE = (W + FP8_CODES + 1023) / 1024 * 1024;
    static constexpr int TABLE = 8 * N * 4; /* scales of a stage's activations, [group][row] */
    static constexpr int TABLES = STAGES * STAGE, SCALES = TABLES + STAGES * TABLE;

    static int bytes(int32_t h, int32_t inner) {
        return SCALES + 2 * DI_MAX(h, inner);
    }
};

/* ---- a unit ------------------------------------------------------------------------------------------------------
 */

typedef struct fp8_unit {
    int32_t expert, pair0, n, part;
    const uint8_t *data[3], *scale[3];
    bool is_fp8;
} fp8_unit;

__device__ static inline bool fp8_find_unit(const fp8_args &a, int32_t parts, fp8_unit &u) {
    const moe_tile *tile = moe_sm90_find(a.o, (int32_t)blockIdx.x, parts, u.part);
    if (!tile)
        return false;
    u.expert = tile->expert;
    u.pair0 = tile->pair0;
    u.n = tile->n;
#pragma unroll
    for (int m = 0; m < 3; m++) {
        u.data[m] = tile->data[m];
        u.scale[m] = tile->scale[m];
    }
    u.is_fp8 = moe_sm90_is_fp8(a, u.expert);
    return true;
}

/* ---- copies ------------------------------------------------------------------------------------------------------
 */

/* A warp's 16 rows of W: a lane has chunk lane%8 of rows lane/8 + 0, 4, 8, 12, and the scales of row `lane`. */
template <di_dtype T, int N, bool IS_DOWN> struct fp8_weights {
    typedef fp8_shape<N> S;
    static constexpr int SCALES = T == DI_F8_E4M3 ? 4 : 8; /* of a stage: bytes of a row */
    const uint8_t *data[2];
    int64_t further; /* bytes from a row to the fourth after it */
    uint32_t to, from_scale[2];
    int32_t groups;

    __device__ void begin(const fp8_unit &u, int32_t n_in) {
        int lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
        int64_t pitch = T == DI_F8_E4M3 ? n_in : n_in / 2;
        groups = n_in / 32;
        auto row_of = [&](int m) { /* of mma row m */
                                   return (int64_t)(IS_DOWN ? u.part * 64 + warp * 16 + m % 8 * 2 + m / 8
                                                            : u.part * 32 + warp * 8 + m % 8);
        };
#pragma unroll
        for (int r = 0; r < 2; r++)
            data[r] = u.data[IS_DOWN ? W2 : r ? W3 : W1] + row_of(lane / 8 + r * 8) * pitch + lane % 8 * 16;
        further = (IS_DOWN ? 8 : 4) * pitch;
        to = S::W + (uint32_t)(warp * 16 + lane / 8) * FP8_PITCH + lane % 8 * 16;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = T == DI_F8_E4M3 ? (IS_DOWN ? warp / 2 : r)
                                      : (IS_DOWN ? warp * 16 + lane / 4 * 2 + r : r * 32 + warp * 8 + lane / 4);
            from_scale[r] = S::SCALES + (uint32_t)(row * groups);
        }
    }
    /* All scales of the block's rows: two stretches. */
    __device__ void copy_scales(const fp8_unit &u, uint32_t shared) {
        int bytes = (T == DI_F8_E4M3 ? 1 : 32) * groups;
        int64_t at = (int64_t)u.part * bytes * (IS_DOWN ? 2 : 1);
        const uint8_t *first = u.scale[IS_DOWN ? W2 : W1] + at;
        const uint8_t *second = IS_DOWN ? first + bytes : u.scale[W3] + at;
        for (int i = (int)threadIdx.x * 8; i < 2 * bytes; i += FP8_THREADS * 8)
            cu_cp<8>(shared + S::SCALES + i, i < bytes ? first + i : second + (i - bytes));
    }
    __device__ void copy(uint32_t stage) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            cu_cp16(stage + to + j * 4 * FP8_PITCH, data[j / 2] + j % 2 * further);
        data[0] += FP8_ROW;
        data[1] += FP8_ROW;
    }
    /* Of stage s: scales of the thread's row r. */
    __device__ uint2 scales(const uint8_t *shared, int s, int r) const {
        const uint8_t *at = shared + from_scale[r] + s * SCALES;
        return T == DI_F8_E4M3 ? make_uint2(*(const uint32_t *)(const void *)at, 0) : *(const uint2 *)(const void *)at;
    }
};

/* The block's activations, N rows of which u.n are there: a thread has one chunk of 16 bytes of some, and the scale of
 * one group of some. */
template <di_dtype T, int N> struct fp8_rows {
    static constexpr int K = T == DI_F8_E4M3 ? 128 : 256; /* of a stage, bytes of a row */
    static constexpr int STEP = FP8_THREADS / (K / 16);   /* rows at a time */
    static constexpr int SHARE = N / STEP > 0 ? N / STEP : 1;
    static constexpr int GROUPS = K / 32, SCALE_STEP = FP8_THREADS / GROUPS;
    static constexpr int SCALE_SHARE = N / SCALE_STEP > 0 ? N / SCALE_STEP : 1;
    const uint8_t *data[SHARE]; /* NULL: no such row */
    const float *scale[SCALE_SHARE];
    uint32_t to, to_scale;

    template <bool IS_DOWN> __device__ void begin(const fp8_args &a, const fp8_unit &u) {
        int t = threadIdx.x, chunk = t % (K / 16), n0 = t / (K / 16);
        const uint8_t *x = IS_DOWN ? a.act : T == DI_F8_E4M3 ? a.x : a.x_paired;
        int64_t n_in = IS_DOWN ? a.inner : a.h;
        auto row_of = [&](int n) { return (int64_t)(IS_DOWN ? u.pair0 + n : a.o.pair_row[u.pair0 + n]); };
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int n = n0 + i * STEP;
            data[i] = n < u.n && n < N ? x + row_of(n) * n_in + chunk * 16 : NULL;
        }
#pragma unroll
        for (int i = 0; i < SCALE_SHARE; i++) {
            int n = t / GROUPS + i * SCALE_STEP;
            scale[i] =
                n < u.n && n < N ? (IS_DOWN ? a.act_scale : a.x_scale) + row_of(n) * (n_in / 32) + t % GROUPS : NULL;
        }
        to_scale = (uint32_t)(t % GROUPS * N + t / GROUPS) * 4;
        to = cu_sw128(n0, chunk * 16, N); /* STEP is a multiple of 8: rows of a thread have one swizzle */
    }
    __device__ void copy(uint32_t stage, uint32_t scales) {
        static_assert(STEP % 8 == 0, "one swizzle");
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            if (data[i]) {
                cu_cp16(stage + to + i * STEP * 128, data[i]);
                data[i] += K;
            }
        }
#pragma unroll
        for (int i = 0; i < SCALE_SHARE; i++) {
            if (scale[i]) {
                cu_cp<4>(scales + to_scale + i * SCALE_STEP * 4, scale[i]);
                scale[i] += GROUPS;
            }
        }
    }
};

/* ---- products ----------------------------------------------------------------------------------------------------
 */

/* acc += the unit's products of 64 rows of W and N columns of a tile; blocks run with shapes of NS >= N. */
template <di_dtype T, int N, int NS, bool IS_DOWN>
__device__ static inline void fp8_multiply(const fp8_args &a, const fp8_unit &u, uint8_t *shared, float (&acc)[N / 2]) {
    typedef fp8_shape<NS> S;
    constexpr int HALVES = T == DI_F8_E4M3 ? 1 : 2; /* blocks of 128 k in a stage */
    int lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP, c = lane % 4;
    int32_t n_in = IS_DOWN ? a.inner : a.h, n_stages = n_in / (128 * HALVES);
    fp8_weights<T, NS, IS_DOWN> weights;
    fp8_rows<T, N> rows;
    uint32_t base = cu_smem(shared);
    weights.begin(u, n_in);
    weights.copy_scales(u, base);
#pragma unroll
    for (int s = 0; s + 1 < S::STAGES; s++) {
        if (s < n_stages)
            weights.copy(base + s * S::STAGE);
    }
    if (IS_DOWN)
        cu_grid_wait(); /* the activations are there */
    rows.template begin<IS_DOWN>(a, u);
#pragma unroll
    for (int s = 0; s + 1 < S::STAGES; s++) {
        if (s < n_stages)
            rows.copy(base + s * S::STAGE, base + S::TABLES + s * S::TABLE);
        cu_cp_commit();
    }
    /* what cu_ldmatrix reads: FP4 rows 0-7 of four groups (and 8-15); FP8 both halves of rows and of a group */
    uint32_t from = S::W + (T == DI_F8_E4M3 ? lane / 16 : lane / 8) * 16 +
                    (uint32_t)(warp * 16 + lane % 8 + (T == DI_F8_E4M3 ? lane / 8 % 2 * 8 : 0)) * FP8_PITCH;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
    int in = S::STAGES - 1, at = 0;
    float temp[4][N / 2];
#pragma unroll 1
    for (int s = 0; s < n_stages; s++) {
        const float *x_scale = (const float *)(const void *)(shared + S::TABLES + at * S::TABLE) + 2 * c;
        cu_cp_wait<S::STAGES - 2>();
        cu_fence_async();
        __syncthreads(); /* the stage is there; everyone is through with the one before, whose place is filled now */
        if (s + S::STAGES - 1 < n_stages) {
            weights.copy(base + in * S::STAGE);
            rows.copy(base + in * S::STAGE, base + S::TABLES + in * S::TABLE);
        }
        cu_cp_commit();
        in = in + 1 == S::STAGES ? 0 : in + 1;
        uint2 sw[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            sw[r] = weights.scales(shared, s, r);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            uint64_t desc = cu_desc_k128(base + at * S::STAGE + half * (N * 128));
            uint32_t raw[2][4], w[4][4];
            if (T == DI_F4_E2M1) {
#pragma unroll
                for (int r = 0; r < 2; r++)
                    cu_ldmatrix(raw[r], base + at * S::STAGE + from + r * 8 * FP8_PITCH + half * 64);
            }
#pragma unroll
            for (int g = 0; g < 4; g++) {
                if (T == DI_F4_E2M1) {
                    fp8_widen(raw[0][g], w[g][0], w[g][2]);
                    fp8_widen(raw[1][g], w[g][1], w[g][3]);
                } else {
                    cu_ldmatrix(w[g], base + at * S::STAGE + from + g * 32);
                }
            }
            cu_wgmma_fence();
#pragma unroll
            for (int g = 0; g < 4; g++)
                cu_wgmma_e4m3_rs(temp[g], w[g], cu_desc_add(desc, g * 32), 0);
            cu_wgmma_commit();
            cu_wgmma_wait<0>(); /* other warps work meanwhile */
#pragma unroll
            for (int g = 0; g < 4; g++) {
                float s0 = cu_scale_at(half ? sw[0].y : sw[0].x, g), s1 = cu_scale_at(half ? sw[1].y : sw[1].x, g);
                cu_wgmma_pin(temp[g]);
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    float2 sx = *(const float2 *)(const void *)(x_scale + (half * 4 + g) * N + j * 8);
                    acc[4 * j] = __fmaf_rn(temp[g][4 * j], s0 * sx.x, acc[4 * j]);
                    acc[4 * j + 1] = __fmaf_rn(temp[g][4 * j + 1], s0 * sx.y, acc[4 * j + 1]);
                    acc[4 * j + 2] = __fmaf_rn(temp[g][4 * j + 2], s1 * sx.x, acc[4 * j + 2]);
                    acc[4 * j + 3] = __fmaf_rn(temp[g][4 * j + 3], s1 * sx.y, acc[4 * j + 3]);
                }
            }
        }
        at = at + 1 == S::STAGES ? 0 : at + 1;
    }
    cu_cp_wait<0>();
    __syncthreads(); /* shared memory is free */
    if (T == DI_F4_E2M1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            acc[i] = acc[i] * 64.0f;
    }
}

/* The activations of 32 outputs, coded: output col of a group lies where the second product's weights want it. */
template <int N>
__device__ static inline void fp8_up_done(const fp8_args &a, const fp8_unit &u, float *most_of, float (&acc)[N / 2]) {
    int t = threadIdx.x, warp = t / DI_WARP, g = t % DI_WARP / 4, c = t % 4;
    fp8_activate<N>(a, g, c, u.pair0, u.n, most_of + warp * N, acc);
    __syncthreads();
    int slot = fp8_slot(warp * 8 + g, u.is_fp8);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int n = 8 * j + 2 * c + e;
            if (n >= u.n)
                continue;
            int64_t pair = u.pair0 + n;
            cu_scale s = cu_qa_scale(fmaxf(moe_sm90_most(most_of + n, N), 1e-4f));
            a.act[pair * a.inner + u.part * 32 + slot] =
                (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j + e], s.inverse), 0.0f);
            if (warp == 0 && g == 0)
                a.act_scale[pair * (a.inner / 32) + u.part] = __uint_as_float(s.byte << 23);
        }
    }
}

template <int N>
__device__ static inline void fp8_down_done(const fp8_args &a, const fp8_unit &u, const float (&acc)[N / 2]) {
    int t = threadIdx.x, c = t % 4;
    int64_t out = u.part * 64 + t / DI_WARP * 16 + t % DI_WARP / 4 * 2;
    fp8_store<N>(a, c, u.pair0, u.n, out, acc);
}

template <di_dtype T, int N, int NS, bool IS_DOWN>
__device__ static inline void fp8_run(const fp8_args &a, const fp8_unit &u, uint8_t *shared) {
    float acc[N / 2];
    fp8_multiply<T, N, NS, IS_DOWN>(a, u, shared, acc);
    if (IS_DOWN)
        fp8_down_done<N>(a, u, acc);
    else
        fp8_up_done<N>(a, u, (float *)(void *)shared, acc);
}

template <int N, bool IS_DOWN>
__global__ void __launch_bounds__(FP8_THREADS, fp8_shape<N>::BLOCKS) moe_fp8(const __grid_constant__ fp8_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    /* The second product copies weights while the first one ends: the order is two kernels back, and all blocks of the
     * first product had waited for it before this kernel could begin. */
    if (!IS_DOWN)
        cu_grid_wait();
    cu_grid_launch();
    fp8_unit u;
    if (!fp8_find_unit(a, IS_DOWN ? a.h / 64 : a.inner / 32, u)) {
        cu_grid_wait();
        return;
    }
    if (u.is_fp8)
        fp8_run<DI_F8_E4M3, N, N, IS_DOWN>(a, u, shared);
    else if (u.n <= 8)
        fp8_run<DI_F4_E2M1, 8, N, IS_DOWN>(a, u, shared);
    else
        fp8_run<DI_F4_E2M1, N, N, IS_DOWN>(a, u, shared);
}

/* ---- the host's side ---------------------------------------------------------------------------------------------
 */

template <int N> static void fp8_launch(const di_stream *stream, const fp8_args &f) {
    typedef fp8_shape<N> S;
    unsigned tiles = (unsigned)f.o.tiles_max, bytes = (unsigned)S::bytes(f.h, f.inner);
    DI_LAUNCH_PDL((moe_fp8<N, false>), tiles * (unsigned)(f.inner / 32), FP8_THREADS, bytes, stream->stream, f);
    DI_LAUNCH_PDL((moe_fp8<N, true>), tiles * (unsigned)(f.h / 64), FP8_THREADS, bytes, stream->stream, f);
}

bool di_moe_sm90_fits(const di_stream *stream, const di_moe_args *a) {
    return stream->dev->arch == DI_CUDA_SM90 && di_moe_fast_fits(a, 256, 256, 8);
}

/* Rows of a tile, by the rows that an expert has on average. */
static int32_t rows_of_tile(const di_device *dev, int64_t n_rows, int64_t k, int64_t n_experts) {
    int64_t pairs = n_rows * DI_MAX(k, (int64_t)1), experts = DI_MAX(n_experts, (int64_t)1);
    if (dev->is_order_free && pairs > 24 * experts)
        return WIDE_ROWS_MAX;
    if (pairs <= experts)
        return 8;
    return pairs <= 10 * experts ? 16 : FP8_MANY_ROWS;
}

/* Bytes at the scratch: x and act are codes, of which scales are floats, or bf16. */
typedef struct fp8_pieces {
    size_t order, x, x_scale, act, act_scale, y;
} fp8_pieces;

static size_t fp8_cut(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner, int32_t tile_rows,
                      fp8_pieces *p) {
    size_t n = (size_t)n_rows, n_pairs = n * (size_t)(a->k + (a->shared ? 1 : 0));
    size_t size = tile_rows == WIDE_ROWS_MAX ? 2 : 1;
    p->order = di_moe_order_cut(a, 0, n_rows, tile_rows, NULL, NULL);
    p->x = di_cuda_piece(n * (size_t)h * size);
    p->x_scale = size == 1 ? di_cuda_piece(n * (size_t)(h / 32) * sizeof(float)) : 0;
    p->act = di_cuda_piece(n_pairs * (size_t)inner * size);
    p->act_scale = size == 1 ? di_cuda_piece(n_pairs * (size_t)(inner / 32) * sizeof(float)) : 0;
    p->y = di_cuda_piece(n_pairs * (size_t)h * 2);
    return p->order + p->x + p->x_scale + p->act + p->act_scale + p->y;
}

size_t di_moe_sm90_bytes(const di_device *dev, const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner) {
    fp8_pieces p;
    int64_t n = DI_MIN(n_rows, (int64_t)MOE_PASS_ROWS);
    size_t narrow = fp8_cut(a, n, h, inner, 8, &p), wide = fp8_cut(a, n, h, inner, WIDE_ROWS_MAX, &p);
    return dev->is_order_free ? DI_MAX(narrow, wide) : narrow;
}

static void fp8_products(const di_stream *stream, const moe_fast_args &common, const di_moe_args *a, int64_t row0,
                         uint8_t *base, const fp8_pieces &p) {
    fp8_args f = {};
    (moe_fast_args &)f = common;
    float *x_scale = (float *)(void *)(base + p.order + p.x);
    f.x = (const uint8_t *)a->x.data + row0 * f.h;
    f.x_paired = base + p.order;
    f.x_scale = x_scale;
    f.act = base + p.order + p.x + p.x_scale;
    f.act_scale = (float *)(void *)(f.act + p.act);
    moe_pairing pairing = {f.x, a->x.scale + row0 * (f.h / 32), base + p.order, x_scale,
                           (int64_t)f.o.n_rows * (f.h / 32)};
    di_moe_order_start(stream, &f.o, &pairing);
    switch (f.o.tile_rows) {
    case 8:
        fp8_launch<8>(stream, f);
        break;
    case 16:
        fp8_launch<16>(stream, f);
        break;
    default:
        di_moe_many(stream, f);
    }
}

static void wide_products(const di_stream *stream, const moe_fast_args &common, const di_moe_args *a, int64_t row0,
                          uint8_t *base, const fp8_pieces &p) {
    wide_args w = {};
    (moe_fast_args &)w = common;
    uint16_t *x = (uint16_t *)(void *)(base + p.order);
    w.x = x;
    w.act = (uint16_t *)(void *)(base + p.order + p.x + p.x_scale);
    di_moe_order_start(stream, &w.o, NULL);
    di_moe_widen(stream, (const uint8_t *)a->x.data + row0 * w.h, a->x.scale + row0 * (w.h / 32), x, w.o.n_rows, w.h);
    di_moe_wide(stream, w);
}

di_status di_moe_sm90(const di_stream *stream, const di_moe_args *a) {
    int64_t h = a->x.n_cols, inner = di_moe_inner(a);
    for (int64_t row0 = 0; row0 < a->x.n_rows; row0 += MOE_PASS_ROWS) {
        int64_t n = DI_MIN(a->x.n_rows - row0, (int64_t)MOE_PASS_ROWS);
        int32_t tile_rows = rows_of_tile(stream->dev, n, a->k, a->n_experts);
        fp8_pieces p;
        size_t bytes = fp8_cut(a, n, h, inner, tile_rows, &p);
        uint8_t *base = (uint8_t *)di_cuda_scratch(stream, bytes);
        if (!base)
            return DI_ERR_SHAPE;
        moe_fast_args common = {};
        di_moe_fast_begin(a, row0, n, tile_rows, base, &common);
        common.y = (uint16_t *)(void *)(base + bytes - p.y);
        if (tile_rows == WIDE_ROWS_MAX)
            wide_products(stream, common, a, row0, base, p);
        else
            fp8_products(stream, common, a, row0, base, p);
        di_moe_sum(stream, &common.o, common.y, DI_BF16, &a->out, row0, true);
    }
    return DI_OK;
}
