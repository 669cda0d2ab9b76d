/* Mixture of experts on Hopper's tensor cores, many rows of an expert: bound by arithmetic.
 *
 * A multiply is 64 outputs (operand A, from registers) by up to 80 rows (operand B) and 32 k, one group of scales. Its
 * sums are added to the accumulators on the ordinary units, times the scales of output and row: two instructions a sum,
 * which take longer than the multiply takes the tensor cores. So a warpgroup has two halves of 64 outputs with sums of
 * their own: while those of one are added, the multiply of the other runs; and a row's scale, once read, is for four
 * outputs of a thread. Two warpgroups multiply.
 *
 * What binds: of ten instructions seven are those two, and the second reads three registers, which takes longer than an
 * instruction's turn. Wider tiles have a smaller share of the rest, but only in multiplies of fewer rows do their sums
 * fit the registers, and more multiplies cost more than that. */
#include "moe_ring_sm90.cuh"

struct many_form {
    static constexpr int WGS = 2, THREADS = (WGS + 1) * RING_GROUP, STAGES = 4;
    static constexpr int SHARES = 2 * WGS, OUTS = SHARES * 64;
    static constexpr int COPY_REGS = 40, REGS = 232; /* all start with 168: 3 * 168 = 2 * 232 + 40 */
    /* A stage. W: rows of outputs, FP8 128 bytes a row, chunk c of row r at c ^ r % 8; FP4 64 bytes. Scales of W: a
     * word of four bytes for a row; FP8 two for a share. */
    static constexpr int X = 0, W = X + FP8_MANY_ROWS * RING_K, FP4_PITCH = 64 + 16, W_SCALES = W + OUTS * RING_K;
    static constexpr int X_SCALES = W_SCALES + OUTS * 4; /* [group][16 rows][lane % 4]: the four that a lane needs */
    static constexpr int STAGE = (X_SCALES + 4 * FP8_MANY_ROWS * 4 + 1023) / 1024 * 1024;
    /* After the ring: of each warpgroup, for what follows the first product. */
    static constexpr int OUT_PITCH = 48, OUT_MOST = FP8_MANY_ROWS * OUT_PITCH; /* [warp][row] */
    static constexpr int OUT_INVERSE = OUT_MOST + 4 * FP8_MANY_ROWS * 4;       /* [row] */
    static constexpr int OUT = OUT_INVERSE + FP8_MANY_ROWS * 4, HEADS = STAGES * STAGE + WGS * OUT;
    static constexpr int BARRIERS = HEADS + STAGES * (int)sizeof(ring_head), BYTES = BARRIERS + 2 * STAGES * 8;
    static_assert(FP8_MANY_ROWS % 16 == 0 && BYTES <= 227 * 1024, "shared memory of a block");

    template <di_dtype T, bool IS_DOWN> struct copy;
    template <bool IS_DOWN>
    __device__ static void begin(const fp8_args &, const moe_ring<many_form> &, const moe_tile *, int) {
    }
    template <bool IS_DOWN>
    __device__ static void unit(const fp8_args &a, moe_ring<many_form> &ring, ring_at<many_form> &at, int unit);
};
typedef many_form M;

/* ---- copying ------------------------------------------------------------------------------------------------------
 */

/* The next stage of one unit, by one thread of the copying warpgroup. T: of the weights. */
template <di_dtype T, bool IS_DOWN> struct many_form::copy {
    static constexpr int CHUNKS = T == DI_F8_E4M3 ? 8 : 4,
                         STEP = RING_GROUP / CHUNKS; /* of a row of W; rows at a time */
    const uint8_t *x, *w, *w_scale[2];
    const float *x_scale;
    uint32_t row_at[FP8_MANY_ROWS / 16]; /* this thread's rows, in 16 bytes from x on */
    int64_t further;                     /* bytes from a row of W to the next of this thread */
    int n_rows;                          /* this thread's rows */
    bool has_scale;                      /* of row t */

    __device__ copy(const fp8_args &a, const moe_ring<M> &, const moe_tile *tile, int32_t part) {
        int t = threadIdx.x % RING_GROUP, m, pair0 = tile->pair0, n = tile->n;
        uint32_t n_in = IS_DOWN ? a.inner : a.h;
        x = (IS_DOWN ? a.act : T == DI_F8_E4M3 ? a.x : a.x_paired) + t % 8 * 16;
        n_rows = (n - t / 8 + 15) / 16;
#pragma unroll
        for (int i = 0; i < FP8_MANY_ROWS / 16; i++) {
            int at = pair0 + DI_MIN(t / 8 + i * 16, n - 1);
            row_at[i] = (uint32_t)(IS_DOWN ? at : a.o.pair_row[at]) * (n_in / 16);
        }
        int row = pair0 + DI_MIN(t, n - 1);
        has_scale = t < n;
        x_scale = (IS_DOWN ? a.act_scale : a.x_scale) + (int64_t)(IS_DOWN ? row : a.o.pair_row[row]) * (n_in / 32);
        int64_t pitch = T == DI_F8_E4M3 ? n_in : n_in / 2, out = ring_row<M, IS_DOWN>(part, t / CHUNKS, &m);
        w = tile->data[m] + out * pitch + t % CHUNKS * 16;
        further = (IS_DOWN ? STEP : STEP / 2) * pitch;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (T == DI_F4_E2M1) {
                out = ring_row<M, IS_DOWN>(part, t + i * RING_GROUP, &m);
            } else {
                m = IS_DOWN ? W2 : t % 2 ? W3 : W1;
                out = part * M::SHARES + t / 2 % M::SHARES;
                out = IS_DOWN ? out * 2 + t % 2 : out;
            }
            w_scale[i] = tile->scale[m] + out * (n_in / 32);
        }
    }
    __device__ void start(uint32_t stage) {
        int t = threadIdx.x % RING_GROUP;
        uint32_t to = stage + M::X + t / 8 * RING_K + (t ^ t / 8) % 8 * 16;
#pragma unroll
        for (int i = 0; i < FP8_MANY_ROWS / 16; i++) {
            if (i < n_rows)
                cu_cp16(to + i * 16 * RING_K, x + (uint64_t)row_at[i] * 16);
        }
        x += RING_K;
        constexpr int PITCH = T == DI_F8_E4M3 ? RING_K : M::FP4_PITCH;
        int r = t / CHUNKS;
        to = stage + M::W + r * PITCH + (T == DI_F8_E4M3 ? (t ^ r) % 8 : t % 4) * 16;
        const uint8_t *from = w;
#pragma unroll
        for (int i = 0; i < M::OUTS / STEP; i++, from += further)
            cu_cp16(to + i * STEP * PITCH, from);
        w += T == DI_F8_E4M3 ? RING_K : RING_K / 2;
        to = stage + M::X_SCALES + (t / 16 * 16 + t % 8 / 2 * 4 + t / 8 % 2 * 2 + t % 2) * 4;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            if (has_scale)
                cu_cp<4>(to + g * FP8_MANY_ROWS * 4, x_scale + g);
        }
        x_scale += 4;
        to = stage + M::W_SCALES + (T == DI_F8_E4M3 ? t / 2 * 64 + t % 2 : t) * 4;
        if (T == DI_F4_E2M1 || t < 2 * M::SHARES)
            cu_cp<4>(to, w_scale[0]);
        if (T == DI_F4_E2M1)
            cu_cp<4>(to + RING_GROUP * 4, w_scale[1]);
        w_scale[0] += 4;
        w_scale[1] += 4;
    }
};

/* ---- multiplying --------------------------------------------------------------------------------------------------
 */

/* The activations of 32 outputs, coded. */
template <int N>
__device__ static inline void many_up_done(const fp8_args &a, uint8_t *own, const ring_head &head, int group,
                                           float (&acc)[N / 2]) {
    int t = threadIdx.x % RING_GROUP, wg = threadIdx.x / RING_GROUP, warp = t / DI_WARP, g = t % DI_WARP / 4, c = t % 4;
    float *most_of = (float *)(void *)(own + M::OUT_MOST), *inverse = (float *)(void *)(own + M::OUT_INVERSE);
    fp8_activate<N>(a, g, c, head.pair0, head.n, most_of + warp * FP8_MANY_ROWS, acc);
    cu_bar_sync(1 + wg, RING_GROUP);
    if (t < head.n) {
        cu_scale s = cu_qa_scale(fmaxf(moe_sm90_most(most_of + t, FP8_MANY_ROWS), 1e-4f));
        inverse[t] = s.inverse;
        a.act_scale[(int64_t)(head.pair0 + t) * (a.inner / 32) + group] = __uint_as_float(s.byte << 23);
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    int slot = fp8_slot(warp * 8 + g, head.is_fp8);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int n = 8 * j + 2 * c + e;
            own[n * M::OUT_PITCH + slot] = (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j + e], inverse[n]), 0.0f);
        }
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    if (t < head.n) {
        const uint4 *from = (const uint4 *)(const void *)(own + t * M::OUT_PITCH);
        uint4 *to = (uint4 *)(void *)(a.act + (int64_t)(head.pair0 + t) * a.inner + group * 32);
        to[0] = from[0];
        to[1] = from[1];
    }
}

template <int N>
__device__ static inline void many_down_done(const fp8_args &a, const ring_head &head, int part,
                                             const float (&acc)[N / 2]) {
    int t = threadIdx.x % RING_GROUP, c = t % 4;
    int64_t out = part * 64 + t / DI_WARP * 16 + t % DI_WARP / 4 * 2;
    fp8_store<N>(a, c, head.pair0, head.n, out, acc);
}

/* Unit i, whose first stage is there. N: its rows, rounded up.
 *
 *   step         0         1     2     3    ..   7     | 0 of the next stage
 *   multiplies   0a        0b    1a    1b        3b    | 0a                    group and half
 *   adds         (3b)      0a    0b    1a        3a    | 3b
 *
 * The sums of a stage's last multiply are added in the next one, so that a loop's turn ends with none under way: else
 * the compiler lets each multiply wait for the one before. */
template <di_dtype T, int N, bool IS_DOWN>
__device__ static inline void many_unit(const fp8_args &a, moe_ring<M> &ring, ring_at<M> &at, int unit) {
    constexpr int RAW = T == DI_F8_E4M3 ? 4 : 2, W_PITCH = T == DI_F8_E4M3 ? RING_K : M::FP4_PITCH;
    constexpr int NEXT_ROW = (T == DI_F4_E2M1 ? 8 : IS_DOWN ? 0 : 1) * 4; /* from the scale of row r = 0 to that of 1 */
    int t = threadIdx.x % RING_GROUP, wg = threadIdx.x / RING_GROUP, lane = t % DI_WARP, warp = t / DI_WARP;
    uint32_t base = cu_smem(ring.shared);
    int n_stages = (IS_DOWN ? a.inner : a.h) / RING_K;
    /* what cu_ldmatrix reads: rows 0-7 and 8-15, FP8 of both halves of a group */
    uint32_t from = base + M::W + (wg * 128 + warp * 16 + lane % 16) * W_PITCH;
    const uint8_t *w_scales = ring.shared + M::W_SCALES +
                              (wg * 128 + (T == DI_F4_E2M1 ? warp * 16 + lane / 4
                                           : IS_DOWN       ? warp / 2
                                                           : 0)) *
                                  4;
    uint32_t x_scales = base + M::X_SCALES + lane % 4 * 16;
    uint32_t raw[2][RAW], w[2][4], sw[2][2] = {}; /* of a half: codes, operand A, scales of a stage */
    float acc[2][N / 2], temp[2][N / 2];          /* of a half */
    float sx[(N + 15) / 16 * 4];                  /* scales of a group's rows */
    auto load = [&](uint32_t stage, int g, int m) {
        uint32_t rows = from + stage * M::STAGE + m * 64 * W_PITCH;
        if constexpr (T == DI_F8_E4M3)
            cu_ldmatrix(raw[m], rows + ((g * 2 + lane / 16) ^ lane % 8) * 16);
        else
            cu_ldmatrix2(raw[m], rows + g * 16);
    };
    auto place = [&](int m) {
        if constexpr (T == DI_F8_E4M3) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[m][i] = raw[m][i];
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++)
                fp8_widen(raw[m][r], w[m][r], w[m][2 + r]);
        }
    };
    /* Half m of group g. After the second half the scales of group `then` of the stage take the place of g's, 16 rows
     * by 16 rows; -1: none. */
    auto add = [&](int m, int g, int then) {
        const float s[2] = {cu_scale_at(sw[m][0], g), cu_scale_at(sw[m][1], g)};
        cu_wgmma_pin(temp[m]);
#pragma unroll
        for (int p = 0; p < (N + 15) / 16; p++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int i = 8 * p + j;
                if (i < N / 2)
                    acc[m][i] = __fmaf_rn(temp[m][i], s[i / 2 % 2] * sx[i / 4 * 2 + i % 2], acc[m][i]);
            }
            if (m == 1 && then >= 0) {
                float4 x = cu_smem_load4(x_scales + at.stage * M::STAGE + (then * FP8_MANY_ROWS + p * 16) * 4);
                sx[4 * p] = x.x;
                sx[4 * p + 1] = x.y;
                sx[4 * p + 2] = x.z;
                sx[4 * p + 3] = x.w;
            }
        }
    };
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[0][i] = acc[1][i] = temp[1][i] = 0.0f; /* the first stage adds sums of zero */
#pragma unroll
    for (int i = 0; i < (N + 15) / 16 * 4; i++)
        sx[i] = 0.0f;
    cu_fence_async();
    load(at.stage, 0, 0);
    place(0);
#pragma unroll 1
    for (int kb = 0; kb < n_stages; kb++) {
        ring_at<M> next = at;
        next.next();
        uint64_t desc = cu_desc_k128(base + at.stage * M::STAGE + M::X);
        const uint8_t *from_w = w_scales + at.stage * M::STAGE;
#pragma unroll
        for (int step = 0; step < 8; step++) {
            int m = step % 2, other = 1 - m; /* multiplied, added */
            cu_wgmma_fence();
            cu_wgmma_e4m3_rs(temp[m], w[m], cu_desc_add(desc, step / 2 * 32), 0);
            cu_wgmma_commit();
            if (step < 7) {
                load(at.stage, (step + 1) / 2, other);
            } else if (kb + 1 < n_stages) {
                cu_mbar_wait(&ring.full[next.stage], next.parity);
                cu_fence_async(); /* others' copies, seen by this thread, before its multiplies */
                load(next.stage, 0, other);
            }
            cu_wgmma_wait<1>();
            add(other, (step + 7) % 8 / 2, step / 2);
            place(other);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (step == 0)
                    sw[i / 2][i % 2] = *(const uint32_t *)(const void *)(from_w + i / 2 * 256 + i % 2 * NEXT_ROW);
            }
        }
        cu_wgmma_wait<0>();
        ring.release(at.stage);
        at = next;
    }
    add(1, 3, -1);
    if (T == DI_F4_E2M1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            acc[0][i] = acc[0][i] * 64.0f;
            acc[1][i] = acc[1][i] * 64.0f;
        }
    }
    const ring_head head = *ring.head(unit); /* not overwritten before the next unit's first stages are released */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        int share = head.part * M::SHARES + wg * 2 + m;
        if (IS_DOWN)
            many_down_done<N>(a, head, share, acc[m]);
        else
            many_up_done<N>(a, ring.shared + M::STAGES * M::STAGE + wg * M::OUT, head, share, acc[m]);
    }
}

/* By the narrowest width that holds n rows, N or less: 8, 16, 24 .. of FP4, 16, 48, 80 of FP8. */
template <di_dtype T, int N, bool IS_DOWN>
__device__ static inline void many_fit(const fp8_args &a, moe_ring<M> &ring, ring_at<M> &at, int unit, int n) {
    constexpr int STEP = T == DI_F8_E4M3 ? 32 : 8;
    if constexpr (N > STEP) {
        if (n <= N - STEP) {
            many_fit<T, N - STEP, IS_DOWN>(a, ring, at, unit, n);
            return;
        }
    }
    many_unit<T, N, IS_DOWN>(a, ring, at, unit);
}

template <bool IS_DOWN>
__device__ inline void many_form::unit(const fp8_args &a, moe_ring<M> &ring, ring_at<M> &at, int unit) {
    int n = ring.head(unit)->n;
    if (ring.head(unit)->is_fp8)
        many_fit<DI_F8_E4M3, FP8_MANY_ROWS, IS_DOWN>(a, ring, at, unit, n);
    else
        many_fit<DI_F4_E2M1, FP8_MANY_ROWS, IS_DOWN>(a, ring, at, unit, n);
}

template <bool IS_DOWN> __global__ void __launch_bounds__(M::THREADS, 1) moe_many(const __grid_constant__ fp8_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    ring_run<M, IS_DOWN>(a, shared);
}

void di_moe_many(const di_stream *stream, const fp8_args &a) {
    unsigned n = (unsigned)stream->dev->n_sms;
    DI_LAUNCH_PDL((moe_many<false>), n, M::THREADS, M::BYTES, stream->stream, a);
    DI_LAUNCH_PDL((moe_many<true>), n, M::THREADS, M::BYTES, stream->stream, a);
}
