/* Mixture of experts on Hopper's tensor cores, faithful numerics: E4M3 activations, experts in FP4 or FP8. The host's
 * side, and the kernels for few rows of an expert; those for more are moe_wide_sm90.cu's.
 *
 * Both products are out^T = W . X^T by bf16 multiplies of 64 x 8 x 16, onto one accumulator for all of k. What weights
 * and activations look like then is in moe_sm90.cuh.
 *
 * A thread holds two rows of W, mma rows l/4 and l/4 + 8 of its warp's 16. In the first product they are the same row
 * of w1 and w3, so that gate and up of an output meet in one thread, and a block's 64 rows are the 32 outputs of one QA
 * group; in the second they are neighbouring outputs, which are stored together.
 *
 * A block is a unit: a tile of up to 8 rows of an expert, 64 rows of W, all k. Copies run ahead through stages of 256 k
 * of FP4 weights or 128 of FP8; each lane reads the weights that it copied, activations are the block's. Memory binds,
 * and the turns of instructions that widen nearly so. Between the products, which are two launches: bf16 [pairs,
 * inner], rounded to E4M3 by groups; after the second: bf16 [pairs, H], which moe.cu adds up.
 *
 * Against the reference: sums of groups are not rounded one by one, the tensor core adds in fp32 without rounding to
 * nearest (g, u and results can differ by a bf16 ulp, an activation then by one E4M3 code), and silu is by fast
 * instructions (a few ulps of fp32). A scale 255 of activations acts as NaN. */
#include "moe_sm90.cuh"

enum {
    FEW_ROWS = 8,      /* of a tile */
    FEW_THREADS = 128, /* a warpgroup */
    FEW_STAGES = 3,
    FEW_BLOCKS = 4,  /* on a multiprocessor */
    FEW_BATCH = 2,   /* chunks (32 k) that are widened while as many before them are multiplied */
    FEW_SLAB = 4096, /* bytes of a slab of W in a stage: two pieces */
    FEW_CODES = 2 * FEW_SLAB,
    /* A stage: X in panels of 64 k, then W, which each warp has for itself. After the stages scales of W, which come
     * all at once when a unit begins: few blocks of memory, read in one piece. */
    FEW_W = FEW_ROWS * 512,
    FEW_STAGE = FEW_W + FEW_CODES,
    FEW_SCALES = FEW_STAGES * FEW_STAGE,
};

/* ---- a unit ------------------------------------------------------------------------------------------------------
 */

typedef struct few_unit {
    int32_t pair0, n, part;
    const uint8_t *data[3], *scale[3];
    bool is_fp8;
} few_unit;

__device__ static inline bool few_find(const sm90_args &a, int32_t parts, few_unit &u) {
    const moe_tile *tile = moe_sm90_find(a.o, (int32_t)blockIdx.x, parts, u.part);
    if (!tile)
        return false;
    u.pair0 = tile->pair0;
    u.n = tile->n;
#pragma unroll
    for (int m = 0; m < 3; m++) {
        u.data[m] = tile->data[m];
        u.scale[m] = tile->scale[m];
    }
    u.is_fp8 = moe_sm90_is_fp8(a, tile->expert);
    return true;
}

/* ---- copies ------------------------------------------------------------------------------------------------------
 */

/* A warp's two octets of W: a lane has four times 16 bytes of a stage, and reads what it copied. */
template <di_dtype T, bool IS_DOWN> struct few_weights {
    static constexpr int SLAB_SCALES = T == DI_F8_E4M3 ? 1 : MOE_SLAB; /* bytes for a group */
    const uint8_t *data[2];
    uint32_t to, from_scale[2];
    int32_t slab_scales; /* bytes */

    __device__ void begin(const few_unit &u, int32_t n_in) {
        int t = threadIdx.x, lane = t % DI_WARP, warp = t / DI_WARP;
        slab_scales = n_in / 32 * SLAB_SCALES;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int slab = IS_DOWN ? warp / 2 : r, octet = IS_DOWN ? warp % 2 * 2 + r : warp; /* of the unit; of the slab */
            data[r] = u.data[IS_DOWN ? W2
                             : r     ? W3
                                     : W1] +
                      (int64_t)(IS_DOWN ? u.part * 2 + slab : u.part) * (n_in * (T == DI_F8_E4M3 ? 32 : 16)) +
                      octet * 512 + lane * 16;
            from_scale[r] =
                FEW_SCALES + (uint32_t)(slab * slab_scales + (T == DI_F8_E4M3 ? 0 : (octet * 8 + lane / 4) * 4));
        }
        to = FEW_W + warp * (FEW_SLAB / 2) + lane * 16;
    }
    /* All scales of the unit's two slabs. */
    __device__ void copy_scales(const few_unit &u, uint32_t shared) {
        const uint8_t *first = u.scale[IS_DOWN ? W2 : W1] + (int64_t)u.part * slab_scales * (IS_DOWN ? 2 : 1);
        const uint8_t *second = IS_DOWN ? first + slab_scales : u.scale[W3] + (int64_t)u.part * slab_scales;
        for (int i = (int)threadIdx.x * 8; i < 2 * slab_scales; i += FEW_THREADS * 8)
            cu_cp<8>(shared + FEW_SCALES + i, i < slab_scales ? first + i : second + (i - slab_scales));
    }
    /* Stage s, to the place at `stage`. */
    __device__ void copy(uint32_t stage, int s) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            cu_cp16(stage + to + i * 512, data[i / 2] + (uint32_t)s * FEW_SLAB + i % 2 * (FEW_SLAB / 2));
    }
    /* Of piece i and octet r. */
    __device__ uint4 codes(const uint8_t *stage, int r, int i) const {
        return *(const uint4 *)(const void *)(stage + to + (r * 2 + i) * 512);
    }
    /* Of stage s: scales of the thread's row r, a word for 128 k. */
    __device__ uint2 scales(const uint8_t *shared, int s, int r) const {
        const uint32_t *at = (const uint32_t *)(const void *)(shared + from_scale[r]);
        return T == DI_F8_E4M3 ? make_uint2(at[s], 0) : make_uint2(at[2 * s * MOE_SLAB], at[(2 * s + 1) * MOE_SLAB]);
    }
};

/* The block's activations: a thread has chunks of 16 bytes (8 values) of some rows. */
template <di_dtype T> struct few_rows {
    static constexpr int K = T == DI_F8_E4M3 ? 128 : 256, CHUNKS = K / 8;      /* of a stage */
    static constexpr int STEP = FEW_THREADS / CHUNKS, SHARE = FEW_ROWS / STEP; /* rows at a time, of a thread */
    const uint16_t *data[SHARE];                                               /* NULL: no such row */
    uint32_t to[SHARE];

    template <bool IS_DOWN> __device__ void begin(const sm90_args &a, const few_unit &u) {
        int t = threadIdx.x, chunk = t % CHUNKS;
        const uint16_t *x = IS_DOWN ? a.act : a.x;
        int64_t n_in = IS_DOWN ? a.inner : a.h;
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int n = t / CHUNKS + i * STEP;
            int64_t row = n >= u.n ? 0 : IS_DOWN ? u.pair0 + n : a.o.pair_row[u.pair0 + n];
            data[i] = n < u.n ? x + row * n_in + chunk * 8 : NULL;
            to[i] = cu_sw128((uint32_t)n, (uint32_t)chunk * 16, FEW_ROWS);
        }
    }
    __device__ void copy(uint32_t stage) {
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            if (data[i]) {
                cu_cp16(stage + to[i], data[i]);
                data[i] += K;
            }
        }
    }
};

/* ---- products ----------------------------------------------------------------------------------------------------
 */

/* acc = 2^-32 of the unit's products of 64 rows of W and the tile's 8. */
template <di_dtype T, bool IS_DOWN>
__device__ static inline void few_multiply(const sm90_args &a, const few_unit &u, uint8_t *shared, float (&acc)[4]) {
    constexpr int K = few_rows<T>::K, CHUNKS = K / 32; /* of a stage */
    constexpr int PER = T == DI_F8_E4M3 ? 2 : 4;       /* chunks of 16 bytes */
    int32_t n_in = IS_DOWN ? a.inner : a.h, n_stages = n_in / K;
    few_weights<T, IS_DOWN> weights;
    few_rows<T> rows;
    uint32_t base = cu_smem(shared);
    weights.begin(u, n_in);
    weights.copy_scales(u, base);
#pragma unroll
    for (int s = 0; s + 1 < FEW_STAGES; s++) {
        if (s < n_stages)
            weights.copy(base + s * FEW_STAGE, s);
    }
    if (IS_DOWN)
        cu_grid_wait(); /* the activations are there */
    rows.template begin<IS_DOWN>(a, u);
#pragma unroll
    for (int s = 0; s + 1 < FEW_STAGES; s++) {
        if (s < n_stages)
            rows.copy(base + s * FEW_STAGE);
        cu_cp_commit();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        acc[i] = 0.0f;
    int in = FEW_STAGES - 1, at = 0;
#pragma unroll 1
    for (int s = 0; s < n_stages; s++) {
        uint8_t *stage = shared + at * FEW_STAGE;
        cu_cp_wait<FEW_STAGES - 2>();
        cu_fence_async();
        __syncthreads(); /* the stage is there; everyone is through with the one before, whose place is filled now */
        if (s + FEW_STAGES - 1 < n_stages) {
            weights.copy(base + in * FEW_STAGE, s + FEW_STAGES - 1);
            rows.copy(base + in * FEW_STAGE);
        }
        cu_cp_commit();
        in = in + 1 == FEW_STAGES ? 0 : in + 1;
        uint2 sw[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            sw[r] = weights.scales(shared, s, r);
        uint64_t desc = cu_desc_k128(base + at * FEW_STAGE);
        uint32_t w[2][FEW_BATCH][2][4], power[2];
        uint4 raw[2] = {};
#pragma unroll
        for (int g0 = 0; g0 < CHUNKS; g0 += FEW_BATCH) {
            int turn = g0 / FEW_BATCH % 2;
            if (g0 / FEW_BATCH > 1)
                cu_wgmma_wait<1>(); /* the words are free */
#pragma unroll
            for (int i = 0; i < FEW_BATCH; i++) {
                int g = g0 + i;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (g % PER == 0)
                        raw[r] = weights.codes(stage, r, g / PER);
                    if (g % 2 == 0)
                        power[r] = moe_powers(g / 4 ? sw[r].y : sw[r].x, g / 2 % 2);
                }
                moe_sm90_operands<T>(raw, g % PER, power, w[turn][i]);
            }
            cu_wgmma_fence();
#pragma unroll
            for (int i = 0; i < FEW_BATCH * 2; i++) {
                int k = g0 * 32 + i * 16;
                cu_wgmma_bf16_rs<CU_K_MAJOR>(acc, w[turn][i / 2][i % 2],
                                             cu_desc_add(desc, k / 64 * (FEW_ROWS * 128) + k % 64 * 2), 1);
            }
            cu_wgmma_commit();
        }
        cu_wgmma_wait<0>();
        at = at + 1 == FEW_STAGES ? 0 : at + 1;
    }
    cu_wgmma_pin(acc);
    cu_cp_wait<0>();
    __syncthreads(); /* shared memory is free */
}

/* The activations of 32 outputs, rounded to E4M3. */
__device__ static inline void few_up_done(const sm90_args &a, const few_unit &u, float *most_of, float (&acc)[4]) {
    int t = threadIdx.x, warp = t / DI_WARP, g = t % DI_WARP / 4, c = t % 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int n = 2 * c + e;
        float weight = a.o.pair_weight[u.pair0 + (n < u.n ? n : 0)];
        float v = moe_sm90_swiglu(acc[e], acc[2 + e], weight, a.limit), most = fabsf(v);
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 4));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 8));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 16));
        if (g == 0)
            most_of[warp * FEW_ROWS + n] = most;
        acc[e] = v;
    }
    __syncthreads();
    uint16_t *act = a.act + (int64_t)u.pair0 * a.inner + u.part / 2 * 64 + moe_sm90_output(warp, g) * 2 + u.part % 2;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int n = 2 * c + e;
        cu_scale s = cu_qa_scale(fmaxf(moe_sm90_most(most_of + n, FEW_ROWS), 1e-4f));
        uint32_t code = cu_pack_e4m3(__fmul_rn(acc[e], s.inverse), 0.0f) & 0xFFu;
        if (n < u.n)
            act[n * (int64_t)a.inner] = (uint16_t)tile_x_pair(code << 8, s.byte, s.byte);
    }
}

__device__ static inline void few_down_done(const sm90_args &a, const few_unit &u, const float (&acc)[4]) {
    int t = threadIdx.x, c = t % 4;
    int64_t out = u.part * 64 + t / DI_WARP * 16 + t % DI_WARP / 4 * 2;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int n = 2 * c + e;
        if (n < u.n)
            *(uint32_t *)(void *)(a.y + (int64_t)(u.pair0 + n) * a.h + out) = moe_sm90_result(acc[e], acc[2 + e]);
    }
}

template <di_dtype T, bool IS_DOWN>
__device__ static inline void few_run(const sm90_args &a, const few_unit &u, uint8_t *shared) {
    float acc[4];
    few_multiply<T, IS_DOWN>(a, u, shared, acc);
    if (IS_DOWN)
        few_down_done(a, u, acc);
    else
        few_up_done(a, u, (float *)(void *)shared, acc);
}

template <bool IS_DOWN>
__global__ void __launch_bounds__(FEW_THREADS, FEW_BLOCKS) moe_few(const __grid_constant__ sm90_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    /* The second product copies weights while the first one ends: the order is two kernels back, and all blocks of the
     * first product had waited for it before this kernel could begin. */
    if (!IS_DOWN)
        cu_grid_wait();
    cu_grid_launch();
    few_unit u;
    if (!few_find(a, IS_DOWN ? a.h / 64 : a.inner / 32, u)) {
        cu_grid_wait();
        return;
    }
    if (u.is_fp8)
        few_run<DI_F8_E4M3, IS_DOWN>(a, u, shared);
    else
        few_run<DI_F4_E2M1, IS_DOWN>(a, u, shared);
}

/* ---- the host's side ---------------------------------------------------------------------------------------------
 */

static void few_products(const di_stream *stream, const sm90_args &f) {
    unsigned tiles = (unsigned)f.o.tiles_max, bytes = FEW_SCALES + 2 * (unsigned)DI_MAX(f.h, f.inner);
    DI_LAUNCH_PDL((moe_few<false>), tiles * (unsigned)(f.inner / 32), FEW_THREADS, bytes, stream->stream, f);
    DI_LAUNCH_PDL((moe_few<true>), tiles * (unsigned)(f.h / 64), FEW_THREADS, bytes, stream->stream, f);
}

bool di_moe_sm90_fits(const di_stream *stream, const di_moe_args *a) {
    return stream->dev->arch == DI_CUDA_SM90 && di_moe_placed_fits(a->x.n_cols, di_moe_inner(a)) &&
           di_moe_fast_fits(a, 8);
}

/* Rows of a tile, by the rows that an expert has on average; it changes no bits. */
static int32_t rows_of_tile(int64_t n_rows, int64_t k, int64_t n_experts) {
    int64_t pairs = n_rows * DI_MAX(k, (int64_t)1), experts = DI_MAX(n_experts, (int64_t)1);
    if (2 * pairs <= 3 * experts)
        return FEW_ROWS;
    return pairs <= 8 * experts ? 32 : pairs <= 40 * experts ? 64 : WIDE_ROWS_MAX;
}

/* Bytes at the scratch. For wide tiles x is in the order of pairs, and y takes its place. */
typedef struct sm90_pieces {
    size_t order, x, act, y;
} sm90_pieces;

static size_t sm90_cut(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner, int32_t tile_rows,
                       sm90_pieces *p) {
    size_t n_pairs = (size_t)di_moe_pairs_max(a, n_rows);
    p->order = di_moe_order_cut(a, 0, n_rows, tile_rows, NULL, NULL);
    p->x = tile_rows > FEW_ROWS ? 0 : di_cuda_piece((size_t)(n_rows * h) * 2);
    p->act = di_cuda_piece(n_pairs * (size_t)inner * 2);
    p->y = di_cuda_piece(n_pairs * (size_t)h * 2);
    return p->order + p->x + p->act + p->y;
}

size_t di_moe_sm90_bytes(const di_moe_args *a, int64_t n_rows, int64_t h, int64_t inner) {
    sm90_pieces p;
    return sm90_cut(a, DI_MIN(n_rows, (int64_t)MOE_PASS_ROWS), h, inner, FEW_ROWS, &p); /* narrow tiles have the most */
}

di_status di_moe_sm90(const di_stream *stream, const di_moe_args *a) {
    int64_t h = a->x.n_cols, inner = di_moe_inner(a);
    for (int64_t row0 = 0; row0 < a->x.n_rows; row0 += MOE_PASS_ROWS) {
        int64_t n = DI_MIN(a->x.n_rows - row0, (int64_t)MOE_PASS_ROWS);
        int32_t tile_rows = rows_of_tile(n, a->k, a->n_experts);
        sm90_pieces p;
        uint8_t *base = (uint8_t *)di_cuda_scratch(stream, sm90_cut(a, n, h, inner, tile_rows, &p));
        if (!base)
            return DI_ERR_SHAPE;
        sm90_args f = {};
        di_moe_fast_begin(a, row0, n, tile_rows, base, &f);
        f.act = (uint16_t *)(void *)(base + p.order + p.x);
        f.y = (uint16_t *)(void *)(base + p.order + p.x + p.act);
        moe_widening widening = {(const uint8_t *)a->x.data + row0 * h, a->x.scale + row0 * (h / 32), NULL,
                                 n * (h / 8)};
        if (tile_rows == FEW_ROWS) {
            f.x = widening.to = (uint16_t *)(void *)(base + p.order);
            di_moe_order_start(stream, &f.o, &widening);
            few_products(stream, f);
        } else {
            f.x = f.y;
            di_moe_order_start(stream, &f.o, NULL);
            di_moe_wide(stream, f, widening.from, widening.from_scale);
        }
        di_moe_sum(stream, &f.o, f.y, DI_BF16, &a->out, row0, true);
    }
    return DI_OK;
}
