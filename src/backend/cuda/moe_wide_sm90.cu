/* Mixture of experts on Hopper's tensor cores, more rows of an expert than a few: both products in bf16.
 *
 * What weights and activations look like is in moe_sm90.cuh. Weights are widened in registers (operand A). After the
 * tensor cores the L2 cache would bind: bf16 activations are four times the bytes of FP4 weights. So four warpgroups
 * share a tile of up to ROWS rows of activations, each with 64 rows of W, as many as accumulators have registers for.
 * While one drains its multiplies at the end of a stage, the others' run. Narrower tiles leave room for larger stages,
 * which they need: then memory binds.
 *
 * A stage is a few pieces of memory, which four threads ask for: were 128 to ask for 16 bytes at a time, that would
 * bind. W lies so (moe_placed.cuh). Activations are gathered first, into the order of pairs: a tile's rows, rounded
 * up to eight, are panels of 64 k, a panel is what operand B wants in shared memory (rows of 128 bytes in the 128-byte
 * swizzle). The first product stores its results in the same form. */
#include "moe_ring_sm90.cuh"

template <int TILE_ROWS> struct wide_form {
    static constexpr int ROWS = TILE_ROWS, WGS = 4, SHARES = WGS, THREADS = (WGS + 1) * RING_GROUP, W_ROWS = WGS * 64;
    static constexpr int F4_K = ROWS == 128 ? 128 : 256, F8_K = F4_K / 2; /* of a stage */
    static constexpr int STAGES = ROWS == 64 ? 3 : 4;
    static constexpr int COPY_REGS = 32, REGS = 112; /* all start with 96: 5 * 96 = 4 * 112 + 32 */
    template <di_dtype T> __host__ __device__ static constexpr int k() {
        return T == DI_F8_E4M3 ? F8_K : F4_K;
    }
    /* A stage. X: panels of 64 k. W: slabs in turn, in the first product those of w1, then those of w3; scales of W in
     * FP4 likewise. */
    static constexpr int X = 0, X_PANEL = ROWS * 128, W = X + F4_K / 64 * X_PANEL, SLABS = W_ROWS / MOE_SLAB;
    static constexpr int W_SLAB = MOE_SLAB * F4_K / 2, SCALES = W + SLABS * W_SLAB;
    static constexpr int SLAB_SCALES = MOE_SLAB * F4_K / 32,
                         STAGE = (SCALES + SLABS * SLAB_SCALES + 1023) / 1024 * 1024;
    /* After the ring: of each warpgroup, for what follows the first product. Codes of a row, or first its largest
     * value in each warp; then of rows the scale's inverse, its byte, the weight. */
    static constexpr int OUT_PITCH = 48, OUT_SCALES = ROWS * OUT_PITCH, OUT = OUT_SCALES + ROWS * 12;
    static constexpr int HEADS = STAGES * STAGE + WGS * OUT;
    static constexpr int BARRIERS = HEADS + STAGES * (int)sizeof(ring_head), BYTES = BARRIERS + 2 * STAGES * 8;
    static_assert(ROWS % 32 == 0 && STAGE % 1024 == 0 && BYTES <= 227 * 1024, "shared memory of a block");

    template <di_dtype T, bool IS_DOWN> struct copy;
    template <bool IS_DOWN>
    __device__ static void unit(const sm90_args &a, moe_ring<wide_form> &ring, ring_at<wide_form> &at, int unit);
};

/* The thread's number; what follows from it takes no registers elsewhere in the kernel. */
__device__ static inline int wide_self() {
    uint32_t t = threadIdx.x;
    cu_pin(t);
    return (int)t;
}

/* ---- copying ----------------------------------------------------------------------------------------------------- */

/* Four codes of each of two groups a thread, widened: chunk q of a panel's row. blockIdx: eight panels, tile. */
__global__ void __launch_bounds__(256) wide_gather(const __grid_constant__ moe_order o, const uint8_t *x,
                                                   const uint8_t *x_scale, uint16_t *to, int32_t h) {
    cu_grid_begin();
    if ((int32_t)blockIdx.y >= o.head[MOE_N_TILES])
        return;
    const moe_tile *tile = &o.tiles[blockIdx.y];
    int n = tile->n, pair0 = tile->pair0, rows = moe_places(n), q = threadIdx.x % 8;
    int panel = (int)blockIdx.x * 8 + (int)threadIdx.x / 8 % 8;
    if (panel >= h / 64)
        return;
    uint8_t *out = (uint8_t *)(to + (int64_t)pair0 * h) + (int64_t)panel * rows * 128;
    for (int i = threadIdx.x / 64; i < n; i += 4) {
        int64_t row = o.pair_row[pair0 + i];
        const uint32_t *from = (const uint32_t *)(const void *)(x + row * h + panel * 64) + q;
        uint32_t scales = ((const uint16_t *)(const void *)(x_scale + row * (h / 32)))[panel];
        *(uint4 *)(void *)(out + i * 128 + (q ^ i % 8) * 16) =
            tile_x_pairs(__ldg(from), __ldg(from + 8), scales & 255u, scales >> 8);
    }
}

/* The stages of one unit: two slabs of W and some panels of X by each thread that copies. T: of the weights. */
template <int TILE_ROWS> template <di_dtype T, bool IS_DOWN> struct wide_form<TILE_ROWS>::copy {
    typedef wide_form<TILE_ROWS> F;
    static constexpr int K = F::k<T>(), OWN = F::SLABS / RING_COPIERS;
    static constexpr int W_BYTES = MOE_SLAB * K / (T == DI_F8_E4M3 ? 1 : 2); /* of a slab in a stage */
    static constexpr int SCALE_BYTES = T == DI_F8_E4M3 ? 0 : F::SLAB_SCALES;
    const uint8_t *x, *w, *scale;
    uint32_t further, scale_further; /* from a slab to the next */
    uint32_t panel;                  /* bytes of a panel of X */

    __device__ copy(const sm90_args &a, const moe_tile *tile, int32_t part) {
        uint32_t n_in = IS_DOWN ? a.inner : a.h;
        int own = ring_copier() * OWN, m = IS_DOWN ? W2 : own < F::SLABS / 2 ? W1 : W3;
        int64_t slab = IS_DOWN ? part * F::SLABS + own : part * (F::SLABS / 2) + own % (F::SLABS / 2);
        panel = moe_places(tile->n) * 128;
        x = (const uint8_t *)((IS_DOWN ? a.act : a.x) + (int64_t)tile->pair0 * n_in);
        further = n_in * (T == DI_F8_E4M3 ? MOE_SLAB : MOE_SLAB / 2);
        scale_further = n_in;
        w = tile->data[m] + slab * further;
        scale = tile->scale[m] + slab * scale_further;
    }
    __device__ void start(uint32_t stage, uint64_t *bar) {
        constexpr int PANELS = K / 64;
        int copier = ring_copier(), n_panels = (PANELS - copier + RING_COPIERS - 1) / RING_COPIERS;
        cu_mbar_arrive_expect(bar, n_panels * panel + OWN * (W_BYTES + SCALE_BYTES));
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int slab = copier * OWN + i;
            cu_bulk_load(stage + F::W + slab * F::W_SLAB, w + (uint32_t)i * further, W_BYTES, bar);
            if (T == DI_F4_E2M1)
                cu_bulk_load(stage + F::SCALES + slab * F::SLAB_SCALES, scale + (uint32_t)i * scale_further,
                             SCALE_BYTES, bar);
        }
        w += W_BYTES;
        scale += SCALE_BYTES;
#pragma unroll
        for (int p = 0; p < PANELS; p += RING_COPIERS) {
            if (p + copier < PANELS)
                cu_bulk_load(stage + F::X + (p + copier) * F::X_PANEL, x + (uint32_t)(p + copier) * panel, panel, bar);
        }
        x += (uint32_t)PANELS * panel;
    }
};

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* The activations of 32 outputs: coded, and stored as the codes' values together with the neighbouring warpgroup's.
 * outs: of the first warpgroup. */
template <class F, int N>
__device__ static inline void wide_up_done(const sm90_args &a, uint8_t *outs, const ring_head &head, float weight,
                                           float (&acc)[N / 2]) {
    int self = wide_self(), t = self % RING_GROUP, wg = self / RING_GROUP;
    int warp = t / DI_WARP, g = t % DI_WARP / 4, c = t % 4;
    uint8_t *own = outs + wg * F::OUT;
    float *most_of = (float *)(void *)own; /* [warp][row] */
    float *inverse = (float *)(void *)(own + F::OUT_SCALES);
    uint32_t *scales = (uint32_t *)(void *)(inverse + F::ROWS);
    float *weights = (float *)(void *)(scales + F::ROWS);
    if (t < F::ROWS)
        weights[t] = weight;
    cu_bar_sync(1 + wg, RING_GROUP);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        float most[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* rows 0, 1, 8, 9 */
            int at = 4 * (j + i / 2) + i % 2;
            acc[at] = moe_sm90_swiglu(acc[at], acc[at + 2], weights[8 * j + 2 * c + i / 2 * 8 + i % 2], a.limit);
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
            most_of[warp * F::ROWS + 8 * j + 2 * c + g / 4 * 8 + g / 2 % 2] = most[0];
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    if (t < N) {
        cu_scale s = cu_qa_scale(fmaxf(moe_sm90_most(most_of + t, F::ROWS), 1e-4f));
        inverse[t] = s.inverse;
        scales[t] = s.byte;
    }
    cu_bar_sync(1 + wg, RING_GROUP);
    int slot = moe_sm90_output(warp, g);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        int n = 8 * j + 2 * c;
        float2 by = *(const float2 *)(const void *)(inverse + n);
        own[n * F::OUT_PITCH + slot] = (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j], by.x), 0.0f);
        own[(n + 1) * F::OUT_PITCH + slot] = (uint8_t)cu_pack_e4m3(__fmul_rn(acc[4 * j + 1], by.y), 0.0f);
    }
    int both = 1 + F::WGS + wg / 2, of_both = self % (2 * RING_GROUP), chunk = of_both % 8;
    cu_bar_sync(both, 2 * RING_GROUP);
    const uint8_t *codes = outs + wg / 2 * 2 * F::OUT;
    const uint32_t *codes_scales = (const uint32_t *)(const void *)(codes + F::OUT_SCALES) + F::ROWS;
    int panel = head.part * (F::WGS / 2) + wg / 2;
    uint8_t *act = (uint8_t *)(a.act + (int64_t)head.pair0 * a.inner) + (int64_t)panel * moe_places(head.n) * 128;
#pragma unroll 1
    for (int n = of_both / 8; n < head.n; n += 2 * RING_GROUP / 8) {
        const uint8_t *from = codes + n * F::OUT_PITCH + chunk * 4;
        *(uint4 *)(void *)(act + n * 128 + (chunk ^ n % 8) * 16) =
            tile_x_pairs(*(const uint32_t *)(const void *)from, *(const uint32_t *)(const void *)(from + F::OUT),
                         codes_scales[n], codes_scales[n + F::OUT / 4]);
    }
    cu_bar_sync(both, 2 * RING_GROUP); /* before the next unit's */
}

template <class F, int N>
__device__ static inline void wide_down_done(const sm90_args &a, const ring_head &head, const float (&acc)[N / 2]) {
    int t = wide_self(), row = t % 4 * 2; /* warps of all warpgroups have 16 outputs each */
    int out = head.part * F::W_ROWS + t / DI_WARP * 16 + t % DI_WARP / 4 * 2;
    uint16_t *y = a.y + (int64_t)(head.pair0 + row) * a.h + out;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t two = moe_sm90_result(acc[4 * j + e], acc[4 * j + 2 + e]);
            if (8 * j + e < head.n - row)
                *(uint32_t *)(void *)(y + e * a.h) = two;
        }
        y += 8 * a.h;
    }
}

/* Operands A of a lane, chunk by chunk: load, then widen. */
template <class F, di_dtype T, bool IS_DOWN> struct wide_weights {
    static constexpr int PER = T == DI_F8_E4M3 ? 2 : 4; /* chunks of 16 bytes */
    /* From the lane's row of w1 to that of w3, or to the next of w2. */
    static constexpr int NEXT = IS_DOWN ? 512 : F::SLABS / 2 * F::W_SLAB;
    static constexpr int NEXT_SCALES = IS_DOWN ? 8 * 4 : F::SLABS / 2 * F::SLAB_SCALES;
    const uint8_t *ring;
    uint32_t from, scale_from;     /* in a stage */
    const uint32_t *fp8_scales[2]; /* from k = 0 on */
    uint32_t scales[2], power[2];
    uint4 raw[2];

    __device__ wide_weights(const sm90_args &a, const moe_ring<F> &r, const ring_head &head) : ring(r.shared) {
        int t = threadIdx.x, wg = t / RING_GROUP, warp = t / DI_WARP % 4, lane = t % DI_WARP;
        int slab = IS_DOWN ? wg * 2 + warp / 2 : wg, octet = IS_DOWN ? warp % 2 * 2 : warp;
        from = F::W + slab * F::W_SLAB + octet * 512 + lane * 16;
        scale_from = F::SCALES + slab * F::SLAB_SCALES + (octet * 8 + lane / 4) * 4;
        if (T == DI_F8_E4M3) {
            int64_t words =
                (int64_t)(head.part * (F::SLABS / (IS_DOWN ? 1 : 2)) + slab) * ((IS_DOWN ? a.inner : a.h) / 128);
#pragma unroll
            for (int m = 0; m < 2; m++)
                fp8_scales[m] = (const uint32_t *)(const void *)head.scale[IS_DOWN ? 0 : m] + words;
        }
    }
    /* What chunk g of stage kb, which lies at `stage`, needs and is not there yet. */
    __device__ void load(uint32_t stage, int kb, int g) {
        const uint8_t *at = ring + stage * F::STAGE;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (T == DI_F4_E2M1 && g % 4 == 0)
                scales[r] =
                    *(const uint32_t *)(const void *)(at + scale_from + g / 4 * (MOE_SLAB * 4) + r * NEXT_SCALES);
            if (T == DI_F8_E4M3 && g % 4 == 0) {
                scales[r] = __ldg(fp8_scales[r] + kb * F::F8_K / 128);
                if (F::F8_K == 64 && kb % 2) /* the second half of 128 k */
                    scales[r] = moe_rotate(scales[r], 24);
            }
            if (g % PER == 0)
                raw[r] = *(const uint4 *)(const void *)(at + from + r * NEXT + g / PER * 2048);
        }
    }
    __device__ void widen(int g, uint32_t (&to)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (g % 2 == 0)
                power[r] = moe_powers(scales[r], g / 2 % 2);
        }
        moe_sm90_operands<T>(raw, g % PER, power, to);
#pragma unroll
        for (int i = 0; i < 8; i++)
            cu_pin(to[i / 4][i % 4]); /* made by now */
    }
};

/* Unit i, whose first stage is there. N: its rows, rounded up. While chunks are multiplied the next ones are widened:
 * BATCH at a time where registers allow it. */
template <class F, di_dtype T, int N, bool IS_DOWN>
__device__ static inline void wide_unit(const sm90_args &a, moe_ring<F> &ring, ring_at<F> &at, int unit) {
    constexpr int K = F::template k<T>(), CHUNKS = K / 32, BATCH = F::ROWS == 128 || CHUNKS == 2 ? 1 : 2;
    static_assert(CHUNKS / BATCH % 2 == 0, "a stage begins with the first operands");
    int n_stages = (IS_DOWN ? a.inner : a.h) / K;
    const ring_head head = *ring.head(unit); /* not overwritten before the next unit's first stages are released */
    wide_weights<F, T, IS_DOWN> weights(a, ring, head);
    int self = wide_self() % RING_GROUP;
    float weight = IS_DOWN ? 0.0f : a.o.pair_weight[head.pair0 + DI_MIN(self, head.n - 1)];
    uint32_t w[2][BATCH][2][4];
    float acc[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
    weights.load(at.stage, 0, 0);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
        weights.widen(i, w[0][i]);
#pragma unroll 1
    for (int kb = 0; kb < n_stages; kb++) {
        ring_at<F> next = at;
        next.next();
        uint64_t desc = cu_desc_k128(ring.stage(at.stage) + F::X);
#pragma unroll
        for (int g = 0; g < CHUNKS; g += BATCH) {
            int turn = g / BATCH % 2;
            bool is_more = true;
            if (g + BATCH < CHUNKS) {
                weights.load(at.stage, kb, g + BATCH);
            } else if ((is_more = kb + 1 < n_stages)) {
                cu_mbar_wait(&ring.full[next.stage], next.parity);
                weights.load(next.stage, kb + 1, 0);
            }
            cu_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2 * BATCH; i++) {
                int k = g * 32 + i * 16;
                cu_wgmma_bf16_rs<CU_K_MAJOR>(acc, w[turn][i / 2][i % 2],
                                             cu_desc_add(desc, k / 64 * F::X_PANEL + k % 64 * 2), 1);
            }
            cu_wgmma_commit();
            cu_wgmma_wait<1>(); /* those before have read their words */
            if (is_more) {
#pragma unroll
                for (int i = 0; i < BATCH; i++)
                    weights.widen((g + BATCH) % CHUNKS + i, w[1 - turn][i]);
            }
        }
        cu_wgmma_wait<0>();
        ring.release(at.stage);
        at = next;
    }
    cu_wgmma_pin(acc);
    if (IS_DOWN)
        wide_down_done<F, N>(a, head, acc);
    else
        wide_up_done<F, N>(a, ring.shared + F::STAGES * F::STAGE, head, weight, acc);
}

/* By the narrowest width that holds n rows, N or less. */
template <class F, di_dtype T, int N, bool IS_DOWN>
__device__ static inline void wide_fit(const sm90_args &a, moe_ring<F> &ring, ring_at<F> &at, int unit, int n) {
    constexpr int STEP = T == DI_F8_E4M3 || N <= 32 ? N / 2 : 16;
    if constexpr (N - STEP >= F::ROWS / 4 && N > 16) {
        if (n <= N - STEP) {
            wide_fit<F, T, N - STEP, IS_DOWN>(a, ring, at, unit, n);
            return;
        }
    }
    wide_unit<F, T, N, IS_DOWN>(a, ring, at, unit);
}

template <int TILE_ROWS>
template <bool IS_DOWN>
__device__ inline void wide_form<TILE_ROWS>::unit(const sm90_args &a, moe_ring<wide_form> &ring, ring_at<wide_form> &at,
                                                  int unit) {
    int n = ring.head(unit)->n;
    if (ring.head(unit)->is_fp8)
        wide_fit<wide_form, DI_F8_E4M3, TILE_ROWS, IS_DOWN>(a, ring, at, unit, n);
    else
        wide_fit<wide_form, DI_F4_E2M1, TILE_ROWS, IS_DOWN>(a, ring, at, unit, n);
}

template <int TILE_ROWS, bool IS_DOWN>
__global__ void __launch_bounds__(wide_form<TILE_ROWS>::THREADS, 1) moe_wide(const __grid_constant__ sm90_args a) {
    DI_DYN_SHARED(uint8_t, shared);
    ring_run<wide_form<TILE_ROWS>, IS_DOWN>(a, shared);
}

template <int TILE_ROWS> static void wide_launch(const di_stream *stream, const sm90_args &a) {
    typedef wide_form<TILE_ROWS> F;
    unsigned n = (unsigned)stream->dev->n_sms;
    DI_LAUNCH_PDL((moe_wide<TILE_ROWS, false>), n, F::THREADS, F::BYTES, stream->stream, a);
    DI_LAUNCH_PDL((moe_wide<TILE_ROWS, true>), n, F::THREADS, F::BYTES, stream->stream, a);
}

void di_moe_wide(const di_stream *stream, const sm90_args &a, const uint8_t *x, const uint8_t *x_scale) {
    dim3 grid((unsigned)(a.h / 64 + 7) / 8, (unsigned)a.o.tiles_max);
    DI_LAUNCH_PDL(wide_gather, grid, 256, 0, stream->stream, a.o, x, x_scale, (uint16_t *)a.x, a.h);
    if (a.o.tile_rows <= 32)
        wide_launch<32>(stream, a);
    else if (a.o.tile_rows <= 64)
        wide_launch<64>(stream, a);
    else
        wide_launch<128>(stream, a);
}
