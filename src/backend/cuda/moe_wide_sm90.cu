/* Mixture of experts on Hopper's tensor cores, many rows of an expert, where bits may depend on the batch: in bf16.
 *
 * A weight is its code times a power of two, which bf16 holds exactly; so does it hold an activation. Hence no scale is
 * left for the sums, which stay in the tensor core for all of k, and only multiplies are left to bind. Weights are
 * widened in registers (operand A) as tiles_sm90.cuh says, to 2^-32 of their value so that the exponent of the power
 * that they are multiplied by fits: a scale from 2^-85 to 2^33 is exact, a larger one acts as infinity (of E4M3 weights
 * one above 2^39), codes of NaN as 480. Activations are widened once, by a kernel before and by the first product.
 *
 * Operand A has 16 k a multiply, 32 are a group. A lane gives the multiplies of a group codes 8c .. 8c+7 of its two
 * rows (c = lane%4), which are one word of FP4 codes or two of FP8: to the first one 0, 4, 1, 5, to the second 2, 6, 3,
 * 7. Activations lie in memory in the order that this gives ("wide order"): k = 8c + i of a group at place 8(i%4) + 2c
 * + i/4.
 *
 * After the tensor cores the L2 cache would bind: bf16 activations are four times the bytes of FP4 weights. So four
 * warpgroups share a tile of up to 128 rows of activations, each with 64 rows of W, as many as accumulators have
 * registers for. While one drains its multiplies at the end of a stage, the others' run. */
#include "moe_ring_sm90.cuh"

#include "rows.cuh"
#include "tiles_sm90.cuh"

struct wide_form {
    static constexpr int WGS = 4, SHARES = WGS, THREADS = (WGS + 1) * RING_GROUP, W_ROWS = WGS * 64, STAGES = 3;
    static constexpr int COPY_REGS = 32, REGS = 112; /* all start with 96: 5 * 96 = 4 * 112 + 32 */
    /* A stage. X: two panels of 64 k in the 128-byte swizzle. W: FP8 128 bytes a row, chunk c of row r at c ^ r%4 * 2,
     * FP4 64 bytes. Scales of W: a word of four bytes for a row; FP8 two for a warpgroup. */
    static constexpr int X = 0, X_PANEL = WIDE_ROWS_MAX * 128, W = X + 2 * X_PANEL, FP4_PITCH = 64 + 16;
    static constexpr int SCALES = W + W_ROWS * RING_K, STAGE = SCALES + W_ROWS * 4;
    /* After the ring: of each warpgroup, for what follows the first product. Codes of a row, or first its largest
     * value in each warp; then scales of rows. */
    static constexpr int OUT_PITCH = 48, OUT_SCALES = WIDE_ROWS_MAX * OUT_PITCH, OUT = OUT_SCALES + WIDE_ROWS_MAX * 8;
    static constexpr int HEADS = STAGES * STAGE + WGS * OUT;
    static constexpr int WEIGHTS = HEADS + STAGES * (int)sizeof(ring_head); /* of the units' pairs, in turn */
    static constexpr int ROWS = WEIGHTS + STAGES * WIDE_ROWS_MAX * 4;       /* what copying knows of X */
    static constexpr int BARRIERS = ROWS + WIDE_ROWS_MAX * 4, BYTES = BARRIERS + 2 * STAGES * 8;
    static_assert(STAGE % 1024 == 0 && BYTES <= 227 * 1024, "shared memory of a block");

    template <di_dtype T, bool IS_DOWN> struct copy;
    __device__ static float *weights(const moe_ring<wide_form> &ring, int unit) {
        return (float *)(void *)(ring.shared + WEIGHTS) + unit % STAGES * WIDE_ROWS_MAX;
    }
    template <bool IS_DOWN>
    __device__ static void begin(const wide_args &a, const moe_ring<wide_form> &ring, const moe_tile *tile, int unit) {
        int t = threadIdx.x % RING_GROUP;
        if (!IS_DOWN && t < tile->n)
            cu_cp<4>(cu_smem(weights(ring, unit) + t), a.o.pair_weight + tile->pair0 + t);
    }
    template <bool IS_DOWN>
    __device__ static void unit(const wide_args &a, moe_ring<wide_form> &ring, ring_at<wide_form> &at, int unit);
};
typedef wide_form F;

/* The thread's number; what follows from it takes no registers elsewhere in the kernel. */
__device__ static inline int wide_self() {
    uint32_t t = threadIdx.x;
    cu_pin(t);
    return (int)t;
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* Bytes of scales with those above 160 made so, which is infinity below. Scales seldom are as large as 128. */
__device__ static inline uint32_t wide_scales(uint32_t scales) {
    if (scales & 0x80808080u) {
        uint32_t all = 0;
        for (int i = 0; i < 32; i += 8)
            all |= min(scales >> i & 255u, 161u) << i;
        return all;
    }
    return scales;
}
/* What codes of group g are multiplied by once they are placed, in both halves. scales: four groups, wide_scales. */
template <di_dtype T> __device__ static inline uint32_t wide_power(uint32_t scales, int g) {
    constexpr uint32_t ADD = T == DI_F8_E4M3 ? 127 + 120 - 127 - 32 : 127 + 126 - 127 - 32;
    return cu_permute(scales, 0, 0x4040u + (uint32_t)g * 0x0101u) * 0x80u + ADD * 0x00800080u;
}

/* Codes 0..7 of a row: words 0 and 1 of `to` for the first multiply, 2 and 3 for the second. hi: FP8 only. */
template <di_dtype T>
__device__ static inline void wide_place(uint32_t lo, uint32_t hi, uint32_t power, uint32_t (&to)[4]) {
    if (T == DI_F8_E4M3) {
#pragma unroll
        for (int i = 0; i < 4; i++) /* byte i of both words */
            to[i] = tile_place_e4m3(cu_permute(lo, hi, 0x4000u + (uint32_t)i * 0x1010u));
    } else {
        tile_place_e2m1(lo, to);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = cu_mul_bf16x2(to[i], power);
}

/* A group's two operands, of both rows of a lane: a[step] as cu_wgmma_bf16_rs wants it. */
template <di_dtype T>
__device__ static inline void wide_operands(const uint32_t (&lo)[2], const uint32_t (&hi)[2],
                                            const uint32_t (&power)[2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t w[4];
        wide_place<T>(lo[r], hi[r], power[r], w);
        a[0][r] = w[0];
        a[0][2 + r] = w[1];
        a[1][r] = w[2];
        a[1][2 + r] = w[3];
    }
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Where value k of a group lies. */
__device__ static inline int wide_slot(int k) {
    return 8 * (k % 4) + k / 8 * 2 + k % 8 / 4;
}

/* A chunk of 8 values a thread: i%4 is what k of its group has modulo 4. */
__global__ void __launch_bounds__(256)
    moe_widen(const uint8_t *x, const uint8_t *x_scale, uint16_t *to, int64_t n_chunks) {
    cu_grid_begin();
    int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i >= n_chunks)
        return;
    const uint4 *from = (const uint4 *)(const void *)(x + i / 4 * 32);
    uint4 a = from[0], b = from[1];
    const uint32_t codes[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    uint32_t scale = x_scale[i / 4], pick = (uint32_t)(i % 4) * 0x1010u + 0x4000u, v[4];
#pragma unroll
    for (int c = 0; c < 4; c++)
        v[c] = tile_x_pair(cu_permute(codes[2 * c], codes[2 * c + 1], pick), scale);
    ((uint4 *)(void *)to)[i] = make_uint4(v[0], v[1], v[2], v[3]);
}

void di_moe_widen(const di_stream *stream, const uint8_t *x, const uint8_t *x_scale, uint16_t *to, int64_t n_rows,
                  int64_t h) {
    int64_t n = n_rows * (h / 8);
    DI_LAUNCH_PDL(moe_widen, (unsigned)((n + 255) / 256), 256, 0, stream->stream, x, x_scale, to, n);
}

/* ---- copying ----------------------------------------------------------------------------------------------------- */

/* The next stage of one unit, by one thread of the copying warpgroup. T: of the weights. */
template <di_dtype T, bool IS_DOWN> struct wide_form::copy {
    static constexpr int CHUNKS = T == DI_F8_E4M3 ? 8 : 4, STEP = RING_GROUP / CHUNKS; /* of a row of W; rows at once */
    const uint8_t *x, *w, *scale;
    uint32_t *row_at;                /* of this thread's rows of X, in 16 bytes from x on; shared by half a warp */
    uint32_t further, scale_further; /* bytes from a row of W to the next of this thread; to scales of the 128th */
    int n_rows;                      /* this thread's rows of X */

    __device__ copy(const wide_args &a, const moe_ring<F> &ring, const moe_tile *tile, int32_t part) {
        int t = wide_self() % RING_GROUP, m, pair0 = tile->pair0, n = tile->n;
        uint32_t n_in = IS_DOWN ? a.inner : a.h;
        x = (const uint8_t *)(IS_DOWN ? a.act : a.x) + t % 16 * 16;
        n_rows = (n - t / 16 + 7) / 8;
        row_at = (uint32_t *)(void *)(ring.shared + F::ROWS) + t / 16 * (WIDE_ROWS_MAX / 8);
        int at = pair0 + DI_MIN(t / 16 + t % 16 * 8, n - 1);
        __syncwarp();
        row_at[t % 16] = (uint32_t)(IS_DOWN ? at : a.o.pair_row[at]) * (n_in / 8);
        __syncwarp();
        int64_t pitch = T == DI_F8_E4M3 ? n_in : n_in / 2, out = ring_row<F, IS_DOWN>(part, t / CHUNKS, &m);
        w = tile->data[m] + out * pitch + t % CHUNKS * 16;
        further = (IS_DOWN ? STEP : STEP / 2) * (uint32_t)pitch;
        if (T == DI_F4_E2M1) {
            out = ring_row<F, IS_DOWN>(part, t, &m);
        } else {
            m = IS_DOWN ? W2 : t % 2 ? W3 : W1;
            out = part * (F::W_ROWS / 32 / (IS_DOWN ? 1 : 2)) + t % (2 * F::WGS) / (IS_DOWN ? 1 : 2);
        }
        scale = tile->scale[m] + out * (n_in / 32);
        scale_further = (IS_DOWN ? RING_GROUP : RING_GROUP / 2) * (n_in / 32);
    }
    __device__ void start(uint32_t stage) {
        int t = threadIdx.x % RING_GROUP;
        uint32_t to = stage + F::X + t / 8 % 2 * F::X_PANEL + t / 16 * 128 + (t ^ t / 16) % 8 * 16;
#pragma unroll
        for (int i = 0; i < WIDE_ROWS_MAX / 8; i += 4) {
            uint4 rows = *(const uint4 *)(const void *)(row_at + i);
            const uint32_t at[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (i + j < n_rows)
                    cu_cp16(to + (i + j) * 1024, x + (uint64_t)at[j] * 16);
            }
        }
        x += RING_K * 2;
        constexpr int PITCH = T == DI_F8_E4M3 ? RING_K : F::FP4_PITCH;
        int r = t / CHUNKS;
        to = stage + F::W + r * PITCH + (T == DI_F8_E4M3 ? t % 8 ^ r % 4 * 2 : t % 4) * 16;
        const uint8_t *from = w;
#pragma unroll
        for (int i = 0; i < F::W_ROWS / STEP; i++, from += further)
            cu_cp16(to + i * STEP * PITCH, from);
        w += T == DI_F8_E4M3 ? RING_K : RING_K / 2;
        to = stage + F::SCALES + t * 4;
        if (T == DI_F4_E2M1 || t < 2 * F::WGS)
            cu_cp<4>(to, scale);
        if (T == DI_F4_E2M1)
            cu_cp<4>(to + RING_GROUP * 4, scale + scale_further);
        scale += 4;
    }
};

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* The activations of 32 outputs: coded, and stored as the codes' values. */
template <int N>
__device__ static inline void wide_up_done(const wide_args &a, uint8_t *own, const ring_head &head,
                                           const float *weights, float (&acc)[N / 2]) {
    int self = wide_self(), t = self % RING_GROUP, wg = self / RING_GROUP;
    int warp = t / DI_WARP, g = t % DI_WARP / 4, c = t % 4;
    float *most_of = (float *)(void *)own; /* [warp][row] */
    float *inverse = (float *)(void *)(own + F::OUT_SCALES);
    uint32_t *scales = (uint32_t *)(void *)(inverse + WIDE_ROWS_MAX);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        float most[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* rows 0, 1, 8, 9 */
            int at = 4 * (j + i / 2) + i % 2;
            acc[at] = moe_sm90_swiglu(__fmul_rn(acc[at], 0x1p32f), __fmul_rn(acc[at + 2], 0x1p32f),
                                      weights[8 * j + 2 * c + i / 2 * 8 + i % 2], a.limit);
            most[i] = fabsf(acc[at]);
        }
        /* The largest over the 8 lanes that have these rows: twice a lane passes on half of what it has. */
        bool is_high = g & 4, is_odd = g & 2;
        float give0 = is_high ? most[0] : most[2], give1 = is_high ? most[1] : most[3];
        most[0] = fmaxf(is_high ? most[2] : most[0], __shfl_xor_sync(0xFFFFFFFFu, give0, 16));
        most[1] = fmaxf(is_high ? most[3] : most[1], __shfl_xor_sync(0xFFFFFFFFu, give1, 16));
        give0 = is_odd ? most[0] : most[1];
        most[0] = fmaxf(is_odd ? most[1] : most[0], __shfl_xor_sync(0xFFFFFFFFu, give0, 8));
        most[0] = fmaxf(most[0], __shfl_xor_sync(0xFFFFFFFFu, most[0], 4));
        if (g % 2 == 0)
            most_of[warp * WIDE_ROWS_MAX + 8 * j + 2 * c + g / 4 * 8 + g / 2 % 2] = most[0];
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    if (t < N) {
        cu_scale s = cu_qa_scale(fmaxf(moe_sm90_most(most_of + t, WIDE_ROWS_MAX), 1e-4f));
        inverse[t] = s.inverse;
        scales[t] = s.byte;
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    int slot = wide_slot(warp * 8 + g);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        int n = 8 * j + 2 * c;
        float2 by = *(const float2 *)(const void *)(inverse + n);
        own[n * F::OUT_PITCH + slot] = (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j], by.x), 0.0f);
        own[(n + 1) * F::OUT_PITCH + slot] = (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j + 1], by.y), 0.0f);
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    uint16_t *act = a.act + (int64_t)head.pair0 * a.inner + (head.part * F::WGS + wg) * 32 + t % 4 * 8;
#pragma unroll 1
    for (int n = t / 4; n < head.n; n += RING_GROUP / 4) {
        uint2 codes = *(const uint2 *)(const void *)(own + n * F::OUT_PITCH + t % 4 * 8);
        uint32_t scale = scales[n], v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t two = cu_permute(codes.x, codes.y, 0x1000u + (uint32_t)i * 0x2020u);
            v[i] = tile_x_pair(two, scale);
        }
        *(uint4 *)(void *)(act + (int64_t)n * a.inner) = make_uint4(v[0], v[1], v[2], v[3]);
    }
    cu_bar_sync(1 + wg, RING_GROUP); /* before the next unit's */
}

template <int N>
__device__ static inline void wide_down_done(const wide_args &a, const ring_head &head, const float (&acc)[N / 2]) {
    int t = wide_self(), row = t % 4 * 2; /* warps of all warpgroups have 16 outputs each */
    int out = head.part * F::W_ROWS + t / DI_WARP * 16 + t % DI_WARP / 4 * 2;
    uint16_t *y = a.y + (int64_t)(head.pair0 + row) * a.h + out;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t two = cu_pack_bf16(__fmul_rn(acc[4 * j + e], 0x1p32f), __fmul_rn(acc[4 * j + 2 + e], 0x1p32f));
            if (8 * j + e < head.n - row)
                *(uint32_t *)(void *)(y + e * a.h) = two;
        }
        y += 8 * a.h;
    }
}

/* Operands A of a lane, group by group. */
template <di_dtype T, bool IS_DOWN> struct wide_weights {
    const uint8_t *ring;
    uint32_t from, scale_from; /* in a stage */
    uint32_t scales[2];

    __device__ explicit wide_weights(const moe_ring<F> &r) : ring(r.shared) {
        int t = threadIdx.x, wg = t / RING_GROUP, warp = t / DI_WARP % 4, lane = t % DI_WARP;
        int row = wg * 64 + warp * 16;
        if (T == DI_F4_E2M1) { /* what cu_ldmatrix2 reads: rows 0-7 and 8-15 */
            from = F::W + (row + lane % 16) * F::FP4_PITCH;
            scale_from = F::SCALES + (row + lane / 4) * 4;
        } else {
            from = F::W + (row + lane / 4) * RING_K + lane / 4 % 4 * 32 + lane % 4 * 8;
            scale_from = F::SCALES + (wg * 2 + (IS_DOWN ? warp / 2 : 0)) * 4;
        }
    }
    /* Group g of a stage. */
    __device__ void widen(uint32_t stage, int g, uint32_t (&to)[2][4]) {
        constexpr uint32_t NEXT_ROW = (T == DI_F4_E2M1 ? 8 : IS_DOWN ? 0 : 1) * 4; /* between scales of both rows */
        const uint8_t *at = ring + stage * F::STAGE;
        if (g == 0) {
#pragma unroll
            for (int r = 0; r < 2; r++)
                scales[r] = wide_scales(*(const uint32_t *)(const void *)(at + scale_from + r * NEXT_ROW));
        }
        const uint32_t power[2] = {wide_power<T>(scales[0], g), wide_power<T>(scales[1], g)};
        uint32_t lo[2], hi[2] = {0, 0};
        if (T == DI_F4_E2M1) {
            cu_ldmatrix2(lo, cu_smem(at) + from + g * 16);
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint2 codes = *(const uint2 *)(const void *)(at + (from ^ g * 32) + r * (8 * RING_K));
                lo[r] = codes.x;
                hi[r] = codes.y;
            }
        }
        wide_operands<T>(lo, hi, power, to);
#pragma unroll
        for (int i = 0; i < 8; i++)
            cu_pin(to[i / 4][i % 4]); /* made by now */
    }
};

/* Unit i, whose first stage is there. N: its rows, rounded up. */
template <di_dtype T, int N, bool IS_DOWN>
__device__ static inline void wide_unit(const wide_args &a, moe_ring<F> &ring, ring_at<F> &at, int unit) {
    int n_stages = (IS_DOWN ? a.inner : a.h) / RING_K;
    wide_weights<T, IS_DOWN> weights(ring);
    uint32_t w[2][2][4];
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
    cu_fence_async(); /* others' copies, seen by this thread, before its multiplies */
    weights.widen(at.stage, 0, w[0]);
#pragma unroll 1
    for (int kb = 0; kb < n_stages; kb++) {
        ring_at<F> next = at;
        next.next();
        uint64_t desc = cu_desc_k128(ring.stage(at.stage) + F::X);
#pragma unroll
        for (int g = 0; g < 4; g++) {
            cu_wgmma_fence();
#pragma unroll
            for (int step = 0; step < 2; step++)
                cu_wgmma_bf16_rs<CU_K_MAJOR>(acc, w[g % 2][step],
                                             cu_desc_add(desc, g / 2 * F::X_PANEL + g % 2 * 64 + step * 32), 1);
            cu_wgmma_commit();
            cu_wgmma_wait<1>(); /* those before have read their words */
            if (g < 3) {
                weights.widen(at.stage, g + 1, w[(g + 1) % 2]);
            } else if (kb + 1 < n_stages) {
                cu_mbar_wait(&ring.full[next.stage], next.parity);
                cu_fence_async();
                weights.widen(next.stage, 0, w[0]);
            }
        }
        cu_wgmma_wait<0>();
        ring.release(at.stage);
        at = next;
    }
    cu_wgmma_pin(acc);
    const ring_head head = *ring.head(unit); /* not overwritten before the next unit's first stages are released */
    if (IS_DOWN)
        wide_down_done<N>(a, head, acc);
    else
        wide_up_done<N>(a, ring.shared + F::STAGES * F::STAGE + threadIdx.x / RING_GROUP * F::OUT, head,
                        F::weights(ring, unit), acc);
}

template <bool IS_DOWN>
__device__ inline void wide_form::unit(const wide_args &a, moe_ring<F> &ring, ring_at<F> &at, int unit) {
    int n = ring.head(unit)->n;
    if (ring.head(unit)->is_fp8) {
        if (n <= 64)
            wide_unit<DI_F8_E4M3, 64, IS_DOWN>(a, ring, at, unit);
        else
            wide_unit<DI_F8_E4M3, 128, IS_DOWN>(a, ring, at, unit);
    } else if (n <= 32) {
        wide_unit<DI_F4_E2M1, 32, IS_DOWN>(a, ring, at, unit);
    } else if (n <= 64) {
        wide_unit<DI_F4_E2M1, 64, IS_DOWN>(a, ring, at, unit);
    } else if (n <= 80) {
        wide_unit<DI_F4_E2M1, 80, IS_DOWN>(a, ring, at, unit);
    } else if (n <= 96) {
        wide_unit<DI_F4_E2M1, 96, IS_DOWN>(a, ring, at, unit);
    } else if (n <= 112) {
        wide_unit<DI_F4_E2M1, 112, IS_DOWN>(a, ring, at, unit);
    } else {
        wide_unit<DI_F4_E2M1, 128, IS_DOWN>(a, ring, at, unit);
    }
}

template <bool IS_DOWN> __global__ void __launch_bounds__(F::THREADS, 1) moe_wide(const __grid_constant__ wide_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    ring_run<F, IS_DOWN>(a, shared);
}

void di_moe_wide(const di_stream *stream, const wide_args &a) {
    unsigned n = (unsigned)stream->dev->n_sms;
    DI_LAUNCH_PDL((moe_wide<false>), n, F::THREADS, F::BYTES, stream->stream, a);
    DI_LAUNCH_PDL((moe_wide<true>), n, F::THREADS, F::BYTES, stream->stream, a);
}
