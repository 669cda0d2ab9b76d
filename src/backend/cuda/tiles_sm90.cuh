/* The product of a tile of weights and a tile of activations by warpgroup multiplies, for kernels of products.
 *
 * out^T [n_out, rows] = W [n_out, k] . X^T [k, rows]. A warpgroup has 64 rows of W (operand A, from registers) and N
 * rows of activations (operand B, in shared memory), and adds all k into one accumulator of N/2 floats a thread, in
 * rising blocks of 128 k and, inside a block, in the order below: a row of activations gives the same bits for every N.
 *
 *   weights      E2M1 with a scale for 32. They go from device memory to registers once, 16 bytes a load, several
 * blocks ahead; codes become bf16 there, by placing their bits and one multiplication by a power of two that holds
 * their scale. The result is exact: an E2M1 value times a power of two is a bf16 value (beyond bf16's range it
 * saturates to infinity or loses subnormal bits). activations  lie in a ring of stages in shared memory, a block of 128
 * k each, as bf16. A producer fills it from rows of E4M3.
 *
 * Order of k inside a block. A thread of the multiply has the slots 2c, 2c+1, 2c+8, 2c+9 (c = lane % 4) of each of the
 * eight steps of 16; k is dealt out so that these are 16 contiguous bytes of memory, and the four c of a row 64:
 * k = 32c + (8t + 0..7), where word t of the 16 bytes is steps 2t (pairs 04 15) and 2t+1 (pairs 26 37).
 *
 * A kernel gives a plan (below): which units of work its block does. Consumers and producer walk the same units; loads
 * of weights run on into the next unit, so that memory is never idle between two. */
#ifndef DI_TILES_SM90_CUH
#define DI_TILES_SM90_CUH

#include "cu.cuh"
#include "sm90.cuh"

enum { TILE_K = 128, TILE_W_ROWS = 64 /* of a warpgroup */, TILE_GROUP = 128 /* threads of a warpgroup */ };

/* A plan is a struct with these members; i counts the units of this block of threads from 0.
 *
 *   int n_blocks(int i)                       blocks of 128 k of unit i; 0: there is no unit i
 *   void rows(int i, tile_rows &r)            the calling consumer thread's two rows of W at the unit's first block, by
 *                                             r.set(0 or 1, ...): mma rows lane/4 and lane/4 + 8 of the warp's 16. Any
 *                                             two rows of memory; out of range is not allowed (repeat another row)
 *   void done(int i, const float (&acc)[N / 2])   takes the sums, all threads of a warpgroup together: acc[4j + 2r + e]
 *                                             is row r (0, 1) of the thread's two and column 8j + 2*(lane%4) + e. Not
 *                                             written to: the compiler would wait for multiplies at every block
 *   int x_row(int i, int n)                   row of the activations of column n < N; -1: zeros
 *   int x_col(int i)                          the unit's first column there, a multiple of 128 */

/* ---- weights ---------------------------------------------------------------------------------------------------- */

/* A scale b multiplies placed bits by 2^(b + BIAS - 127). */
template <di_dtype T> struct tile_type;
template <> struct tile_type<DI_F4_E2M1> { static constexpr uint32_t BIAS = 126; };
template <> struct tile_type<DI_F8_E4M3> { static constexpr uint32_t BIAS = 120; };

enum { TILE_W_BYTES = TILE_K / 2 /* of a row and block */ };

/* A thread's two rows of W. */
struct tile_rows {
    const uint8_t *data[2];  /* this thread's first 16 bytes */
    const uint8_t *scale[2]; /* of the row's block of 128: four bytes, aligned to 4 */

    /* Row `row` of w, from column `col` (a multiple of 128) on. n_in is a multiple of 128, w.data aligned to 16,
     * w.scale to 4. */
    __device__ void set(int r, const di_mat &w, int64_t row, int64_t col) {
        data[r] = (const uint8_t *)w.data + (row * w.n_in + col) / 128 * TILE_W_BYTES + threadIdx.x % 4 * 16;
        scale[r] = w.scale + (row * w.n_in + col) / 32;
    }
    __device__ void next() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            data[r] += TILE_W_BYTES;
            scale[r] += 4;
        }
    }
};

/* A thread's share of a block as it comes from memory. */
struct tile_raw {
    uint4 w[2];
    uint32_t s[2];

    __device__ void load(const tile_rows &rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w[r] = cu_load16_once(rows.data[r]);
            s[r] = __ldg((const uint32_t *)rows.scale[r]);
        }
    }
};

/* Two codes in bytes 1 and 3 to bf16 * 2^-120: sign, then exponent and mantissa at bits 10..4. */
__device__ static inline uint32_t tile_place_e4m3(uint32_t w) {
    return (w & 0x80008000u) | (w >> 4 & 0x07F007F0u);
}
/* The 8 codes of a word to bf16 * 2^-126, pair j = codes j and j + 4. A multiplication by two powers of two puts a copy
 * of the code where its sign must be and another where the rest must be; the mask keeps both. */
__device__ static inline void tile_place_e2m1(uint32_t w, uint32_t (&pair)[4]) {
    uint32_t high = w >> 8;
    pair[0] = ((w & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
    pair[1] = ((w & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
    pair[2] = ((high & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
    pair[3] = ((high & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
}

/* The factor for scale b as a pair of bf16, and a second one for scales whose factor alone is beyond bf16. */
template <di_dtype T> __device__ static inline uint32_t tile_factor(uint32_t b) {
    return (b + tile_type<T>::BIAS) * 0x00800080u;
}
template <di_dtype T> __device__ static inline bool tile_is_large(uint32_t b) {
    return b > 254 - tile_type<T>::BIAS;
}
template <di_dtype T> __device__ static inline void tile_factors_large(uint32_t b, uint32_t &f, uint32_t &f2) {
    f2 = 0x3F803F80u;
    if (tile_is_large<T>(b)) {
        f = b == 255 ? 0x7FC07FC0u : 254 * 0x00800080u;
        f2 = b == 255 ? 0x3F803F80u : (b - (254 - tile_type<T>::BIAS) + 127) * 0x00800080u;
    }
}

/* Half a block (HALF 0, 1) as operand A of its four steps. All lanes of the warp together. */
template <int HALF> __device__ static inline void tile_widen(tile_raw &raw, uint32_t (&a)[4][4]) {
    constexpr di_dtype T = DI_F4_E2M1;
    uint32_t c = threadIdx.x % 4, b[2], f[2]; /* a row's 16 bytes are one group */
    /* Not before the wait that frees a: what follows depends on this. */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        cu_pin(HALF ? raw.w[r].z : raw.w[r].x);
        cu_pin(HALF ? raw.w[r].w : raw.w[r].y);
        b[r] = raw.s[r] >> c * 8 & 255;
        f[r] = tile_factor<T>(b[r]);
    }
    bool is_large = __any_sync(0xFFFFFFFFu, tile_is_large<T>(b[0]) || tile_is_large<T>(b[1]));
    uint32_t f2[2] = {0x3F803F80u, 0x3F803F80u};
    if (is_large) {
        tile_factors_large<T>(b[0], f[0], f2[0]);
        tile_factors_large<T>(b[1], f[1], f2[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint4 &v = raw.w[r];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            uint32_t pair[4];
            tile_place_e2m1(HALF ? t ? v.w : v.z : t ? v.y : v.x, pair);
            a[2 * t][r] = cu_mul_bf16x2(pair[0], f[r]);
            a[2 * t][2 + r] = cu_mul_bf16x2(pair[1], f[r]);
            a[2 * t + 1][r] = cu_mul_bf16x2(pair[2], f[r]);
            a[2 * t + 1][2 + r] = cu_mul_bf16x2(pair[3], f[r]);
        }
    }
    if (is_large) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[s][i] = cu_mul_bf16x2(a[s][i], f2[i % 2]);
        }
    }
}

/* ---- the ring of activations -------------------------------------------------------------------------------------
 * A stage is one tile: N rows of 128 slots, two panels of 64, each row 128 bytes with the 128-byte swizzle. */

template <int N> struct tile_x_bytes { static constexpr int STAGE = N * TILE_K * 2; };

template <int N, int STAGES> struct tile_ring {
    uint8_t *stages; /* [STAGES][N*256], aligned to 1024 */
    uint64_t *full, *empty;

    static constexpr size_t BYTES = (size_t)STAGES * tile_x_bytes<N>::STAGE + 2 * STAGES * sizeof(uint64_t);

    /* From BYTES bytes of shared memory, aligned to 1024. */
    __device__ explicit tile_ring(uint8_t *shared)
        : stages(shared), full((uint64_t *)(shared + STAGES * tile_x_bytes<N>::STAGE)), empty(full + STAGES) {
    }
    /* By one thread, before a barrier of the block. n_uses: warps of consumers that read a stage. */
    __device__ void init(int n_uses) {
        for (int s = 0; s < STAGES; s++) {
            cu_mbar_init(&full[s], TILE_GROUP / DI_WARP); /* warps of tile_convert */
            cu_mbar_init(&empty[s], n_uses);
        }
        cu_fence_mbar_init();
    }
};

/* A place in the ring and the parity of its round. */
template <int STAGES> struct tile_at {
    uint32_t stage = 0, parity = 0;

    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* ---- consumers --------------------------------------------------------------------------------------------------- */

/* What loads weights ahead of the multiplies, through all units. */
template <class Plan> struct tile_feed {
    tile_rows rows;
    int unit = 0, left = 0; /* left: blocks of the unit */
    bool is_over = false;

    __device__ void load(Plan &plan, tile_raw &raw) {
        if (__builtin_expect(left == 0, 0)) {
            if (is_over)
                return;
            left = plan.n_blocks(unit);
            is_over = left == 0;
            if (is_over)
                return;
            plan.rows(unit++, rows);
        }
        raw.load(rows);
        rows.next();
        left--;
    }
};

/* All units of the plan by one warpgroup. DEPTH: blocks of weights under way. */
template <int N, int STAGES, int DEPTH, class Plan> struct tile_consumer {
    const tile_ring<N, STAGES> &ring;
    Plan &plan;
    tile_feed<Plan> feed;
    tile_raw raw[DEPTH];
    float acc[N / 2];
    uint32_t a[2][4][4]; /* operand A of the halves of a block: one is made while the other is multiplied */
    uint64_t desc0;
    tile_at<STAGES> at;
    int unit, left, keep; /* keep: 0 where a unit begins */
    uint32_t before;      /* stage of the block before, not yet released while keep is set */

    __device__ tile_consumer(const tile_ring<N, STAGES> &r, Plan &p) : ring(r), plan(p) {
        fill<0>();
        desc0 = cu_desc_k128(cu_smem(ring.stages));
        unit = keep = 0;
        before = 0;
        left = plan.n_blocks(0);
    }
    template <int D> __device__ void fill() {
        feed.load(plan, raw[D]);
        if constexpr (D + 1 < DEPTH)
            fill<D + 1>();
    }
    __device__ void release(uint32_t stage) {
        if (threadIdx.x % DI_WARP == 0)
            cu_mbar_arrive(&ring.empty[stage]);
    }
    template <int HALF> __device__ void multiply(uint64_t desc) {
        /* The words of A are there before the fence, not made between multiplies. */
#pragma unroll
        for (int i = 0; i < 16; i++)
            cu_pin(a[HALF][i / 4][i % 4]);
        cu_wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
            cu_wgmma_bf16_rs(acc, a[HALF][s], cu_desc_add(desc, HALF * N * 128 + s * 32), HALF || s ? 1 : keep);
        cu_wgmma_commit();
    }
    /* Blocks from the one whose weights are in raw[D] on, to raw[DEPTH - 1]; false after the last unit. The end of a
     * unit is here for every D: a common place for it would make the compiler wait for multiplies at each block. */
    template <int D> __device__ bool blocks() {
        uint64_t desc = cu_desc_add(desc0, at.stage * tile_x_bytes<N>::STAGE);
        cu_wgmma_wait<1>(); /* a[0] is free: the first half of the block before is done */
        tile_widen<0>(raw[D], a[0]);
        cu_mbar_wait(&ring.full[at.stage], at.parity);
        multiply<0>(desc);
        cu_wgmma_wait<1>(); /* so is a[1], and with it the stage of the block before */
        if (keep)
            release(before);
        tile_widen<1>(raw[D], a[1]);
        feed.load(plan, raw[D]);
        multiply<1>(desc);
        before = at.stage;
        keep = 1;
        at.next();
        if (__builtin_expect(--left == 0, 0)) {
            cu_wgmma_wait<0>();
            cu_wgmma_pin(acc);
            release(before);
            plan.done(unit, (const float(&)[N / 2]) acc);
            keep = 0;
            left = plan.n_blocks(++unit);
            if (left == 0)
                return false;
        }
        if constexpr (D + 1 < DEPTH)
            return blocks<D + 1>();
        return true;
    }
    __device__ void run() {
        if (left == 0)
            return;
        while (blocks<0>()) {
        }
    }
};

template <int N, int STAGES, int DEPTH, class Plan>
__device__ static inline void tile_consume(const tile_ring<N, STAGES> &ring, Plan &plan) {
    tile_consumer<N, STAGES, DEPTH, Plan> consumer(ring, plan);
    consumer.run();
}

/* ---- activations into tiles -------------------------------------------------------------------------------------- */

/* The low half of one word, the high half of another. */
__device__ static inline uint32_t tile_halves(uint32_t lo, uint32_t hi) {
    return (lo & 0xFFFFu) | (hi & 0xFFFF0000u);
}
/* Two codes in bytes 1 and 3 times their scales, exact; NaN stays NaN. */
__device__ static inline uint32_t tile_x_pair(uint32_t w, uint32_t b_lo, uint32_t b_hi) {
    constexpr di_dtype T = DI_F8_E4M3;
    uint32_t f_lo = tile_factor<T>(b_lo), f_hi = tile_factor<T>(b_hi), v = tile_place_e4m3(w);
    uint32_t nan = (((v & 0x07F007F0u) + 0x00100010u) & 0x08000800u) >> 11; /* 1 where the code is 7F or FF */
    v |= nan * 0x7FC0u;
    if (tile_is_large<T>(b_lo) || tile_is_large<T>(b_hi)) {
        uint32_t lo, hi;
        tile_factors_large<T>(b_lo, f_lo, lo);
        tile_factors_large<T>(b_hi, f_hi, hi);
        v = cu_mul_bf16x2(v, tile_halves(lo, hi));
    }
    return cu_mul_bf16x2(v, tile_halves(f_lo, f_hi));
}
/* Four codes of each of two groups, pair by pair. */
__device__ static inline uint4 tile_x_pairs(uint32_t lo, uint32_t hi, uint32_t b_lo, uint32_t b_hi) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = tile_x_pair(cu_permute(lo, hi, 0x4000u + (uint32_t)i * 0x1010u), b_lo, b_hi);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

/* What one thread converts: 4 pieces of a row and block hold 32 values each. */
struct tile_piece {
    static constexpr int PIECES = 4; /* of a row and block */
    uint2 v[4];                      /* of c = 0..3 */
    uint32_t scales;                 /* of the block's four groups */

    /* Piece p of the block of 128 values that starts at data (aligned to 16); scale: its four bytes, aligned to 4.
     * data NULL: zeros. */
    __device__ void load(const uint8_t *data, const uint8_t *scale, int p) {
        if (!data) {
#pragma unroll
            for (int c = 0; c < 4; c++)
                v[c] = uint2{};
            scales = 0;
            return;
        }
        const uint2 *at = (const uint2 *)data;
#pragma unroll
        for (int c = 0; c < 4; c++)
            v[c] = at[c * 4 + p];
        scales = *(const uint32_t *)scale;
    }

    /* Writes it to row n of a tile of n_rows rows. */
    __device__ void store(uint8_t *tile, int n_rows, int n, int p) const {
#pragma unroll
        for (int j = 0; j < 4; j++) { /* codes j and j + 4 of the eight */
            uint32_t sel = (uint32_t)(j << 4 | (4 + j) << 12), q[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                q[c] = tile_x_pair(__byte_perm(v[c].x, v[c].y, sel), scales >> c * 8 & 255, scales >> c * 8 & 255);
            *(uint4 *)(tile + cu_sw128(n, p * 64 + j * 16, n_rows)) = make_uint4(q[0], q[1], q[2], q[3]);
        }
    }
};

/* Whether the rows of x can be read by pieces: n_cols is a multiple of 128. Host. */
static inline bool tile_fits_act(const di_act *x) {
    int64_t size = x->dtype == DI_BF16 ? 2 : 1;
    return x->n_cols % TILE_K == 0 && (uintptr_t)x->data % 16 == 0 && x->stride * size % 16 == 0 &&
           (uintptr_t)x->scale % 4 == 0;
}
/* Whether the rows of w can be read by 16 bytes and its scales by 4. Host. */
static inline bool tile_fits_mat(const di_mat *w) {
    return (w->dtype == DI_F8_E4M3 || w->dtype == DI_F4_E2M1 || w->dtype == DI_BF16) && w->n_in % TILE_K == 0 &&
           (uintptr_t)w->data % 16 == 0 && (uintptr_t)w->scale % 4 == 0;
}

/* Block kb of row `row` of x as data and scale of tile_piece::load; row -1: zeros. */
struct tile_x_row {
    const uint8_t *data, *scale;

    __device__ void set(const di_act &x, int64_t row, int64_t col) {
        data = scale = NULL;
        if (row >= 0) {
            data = (const uint8_t *)x.data + row * x.stride + col;
            scale = x.scale + (row * x.n_cols + col) / 32;
        }
    }
    __device__ const uint8_t *data_at(int kb) const {
        return data ? data + (size_t)kb * TILE_K : NULL;
    }
    __device__ const uint8_t *scale_at(int kb) const {
        return scale + (size_t)kb * (TILE_K / 32);
    }
};

/* Fills the ring for all units of the plan from rows of x; one warpgroup (tid 0..127). */
template <int N, int STAGES, class Plan>
__device__ static inline void tile_convert(const tile_ring<N, STAGES> &ring, Plan &plan, const di_act &x, int tid) {
    constexpr int P = tile_piece::PIECES, SHARE = (N * P + TILE_GROUP - 1) / TILE_GROUP;
    tile_x_row row[SHARE];
    tile_piece now[SHARE], ahead[SHARE];
    int unit = 0, n = plan.n_blocks(0), kb = 0;
    auto set_rows = [&]() {
        int col = plan.x_col(unit);
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int at = tid + i * TILE_GROUP;
            row[i].set(x, at < N * P ? plan.x_row(unit, at / P) : -1, col);
        }
    };
    auto load = [&](tile_piece(&piece)[SHARE]) {
#pragma unroll
        for (int i = 0; i < SHARE; i++)
            piece[i].load(row[i].data_at(kb), row[i].scale_at(kb), (tid + i * TILE_GROUP) % P);
    };
    if (n == 0)
        return;
    set_rows();
    load(now);
    tile_at<STAGES> at;
    for (;;) {
        if (++kb == n) {
            n = plan.n_blocks(++unit);
            kb = 0;
            if (n)
                set_rows();
        }
        if (n)
            load(ahead);
        cu_mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        uint8_t *tile = ring.stages + (size_t)at.stage * tile_x_bytes<N>::STAGE;
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int q = tid + i * TILE_GROUP;
            if (N * P % TILE_GROUP == 0 || q < N * P)
                now[i].store(tile, N, q / P, q % P);
        }
        cu_fence_async();
        __syncwarp();
        if (tid % DI_WARP == 0)
            cu_mbar_arrive(&ring.full[at.stage]);
        if (n == 0)
            return;
        at.next();
#pragma unroll
        for (int i = 0; i < SHARE; i++)
            now[i] = ahead[i];
    }
}

#endif
