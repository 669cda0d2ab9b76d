/* What the two kernels for Hopper share: tiles of keys widened to bf16, scores and probabilities of a tile, the store.
 *
 * A row's result is the same from both: the same tiles in the same order, and of each tile the same operations on the
 * same numbers; only who does them differs. attention_sm90.cu has the meaning. Source: model.md 3.8, 5.1. */
#ifndef DI_ATTENTION_SM90_CUH
#define DI_ATTENTION_SM90_CUH

#include "attention.cuh"
#include "sm90.cuh"

enum {
    DIM = 512,
    HEADS = 64,
    KEYS = 64,               /* of a tile */
    PANEL = KEYS * 128,      /* bytes of 64 values of all keys of a tile, and of all heads of Q */
    TILE = DIM / 64 * PANEL, /* bytes */
    GROUP = 128,             /* threads of a warpgroup */
    WINDOW_BYTES = DIM + DIM / 32,
};

/* Numbers that kernels want beside the arguments. */
typedef struct shape {
    float scale2; /* of scores to powers of two */
    int32_t n_rows;
    int32_t topk;  /* 0 without a list */
    int32_t tiles; /* of one row at most */
} shape;

/* The kernel for few rows: whether it takes them, and its launch. (attention_few_sm90.cu) */
enum { FEW_ROWS = 16, FEW_TILES = 12 };
size_t attention_few_scratch(void);
bool attention_few_fits(const di_stream *stream, const shape *z);
void attention_few_launch(di_stream *stream, const attention_job *job, const shape *z, void *scratch);

/* ---- widening ----------------------------------------------------------------------------------------------------
 * Halves are put together from a word of high and a word of low bytes: byte i of each makes half i. */

/* (low, high) bytes 0 1 and 2 3 as bf16 pairs, times scale. */
__device__ static inline uint32_t join_low(uint32_t low, uint32_t high, uint32_t scale) {
    return cu_mul_bf16x2(__byte_perm(low, high, 0x5140), scale);
}
__device__ static inline uint32_t join_high(uint32_t low, uint32_t high, uint32_t scale) {
    return cu_mul_bf16x2(__byte_perm(low, high, 0x7362), scale);
}

/* Eight E2M1 codes, times scale. A code's bits placed in a bf16 are 2^-126 of the value, subnormal or not: the sign at
 * the top, the others from bit 6 on. A multiply puts both copies of two codes in their places at once; the even codes
 * and the odd ones are bytes without their top bit, which the byte permutation can spread to a byte of zeros. */
__device__ static inline uint4 widen_e2m1(uint32_t w, uint32_t scale) {
    uint32_t even = w & 0x0F0F0F0Fu, odd = w >> 4 & 0x0F0F0F0Fu;
    auto two = [&](uint32_t pick) { return cu_mul_bf16x2(cu_permute(even, odd, pick) * 0x1040u & 0x81C081C0u, scale); };
    return make_uint4(two(0xC480u), two(0xD591u), two(0xE6A2u), two(0xF7B3u));
}

/* Four E4M3 codes, whose bits placed in a bf16 are 2^-120 of the value, subnormal or not. */
__device__ static inline uint2 widen_e4m3(uint32_t w, uint32_t scale) {
    uint32_t high = (w & 0x80808080u) | (w >> 4 & 0x07070707u), low = w << 4 & 0xF0F0F0F0u;
    return make_uint2(join_low(low, high, scale), join_high(low, high, scale));
}

/* A scale as both halves of a factor. Of E2M1 codes: 2^(126 - 16) times an E4M3, in two steps from 2^-120. Of E4M3
 * codes: 2^(s - 127 + 120 - 16); beyond bf16 it gives infinite keys or NaN. */
__device__ static inline uint32_t widen_e4m3_scale(uint32_t s) {
    uint32_t code = ((s & 0x7Fu) << 4 | (s & 0x80u) << 8) * 0x10001u;
    return cu_mul_bf16x2(cu_mul_bf16x2(code, 0x79007900u), 0x79007900u); /* 2^115 */
}
__device__ static inline uint32_t widen_e8m0_scale(uint32_t s) {
    return min(s + 104u, 255u) * 0x00800080u;
}

/* One key as the lanes of a warp hold it: lane l has values 16l .. 16l+15 and their scale. widen gives them as two
 * chunks of 8 in the order of their writing: lanes 4..7 of every 8 write the second one first, so that 8 lanes, which
 * write at once to two panels, meet all banks. key_at says where a lane's first chunk goes; the other is at ^ 16. */
template <int FORMAT> struct raw_key;

template <> struct raw_key<DI_KV_FP4> {
    enum { BYTES = DIM / 2 + DIM / 16 };
    uint2 codes;
    uint32_t s;
    __device__ inline void load(const uint8_t *record, int lane) {
        codes = cu_load8_once(record + 8 * lane);
        s = __ldg(record + 256 + lane);
    }
    __device__ inline void load_shared(const uint8_t *record, int lane) {
        codes = *(const uint2 *)(record + 8 * lane);
        s = record[256 + lane];
    }
    __device__ inline void widen(int lane, uint4 &first, uint4 &second) const {
        uint32_t scale = widen_e4m3_scale(s);
        bool is_turned = lane & 4;
        first = widen_e2m1(is_turned ? codes.y : codes.x, scale);
        second = widen_e2m1(is_turned ? codes.x : codes.y, scale);
    }
};

template <> struct raw_key<DI_KV_FP8> {
    enum { BYTES = WINDOW_BYTES };
    uint4 codes;
    uint32_t s;
    __device__ inline void load(const uint8_t *record, int lane) {
        codes = cu_load16_once(record + 16 * lane);
        s = __ldg(record + 512 + lane / 2);
    }
    __device__ inline void load_shared(const uint8_t *record, int lane) {
        codes = *(const uint4 *)(record + 16 * lane);
        s = record[512 + lane / 2];
    }
    __device__ inline void widen(int lane, uint4 &first, uint4 &second) const {
        uint32_t scale = widen_e8m0_scale(s);
        bool is_turned = lane & 4;
        uint2 v = widen_e4m3(is_turned ? codes.z : codes.x, scale),
              w = widen_e4m3(is_turned ? codes.w : codes.y, scale);
        first = make_uint4(v.x, v.y, w.x, w.y);
        v = widen_e4m3(is_turned ? codes.x : codes.z, scale), w = widen_e4m3(is_turned ? codes.y : codes.w, scale);
        second = make_uint4(v.x, v.y, w.x, w.y);
    }
};

/* Byte of a tile where a lane's first chunk of key k goes. */
__device__ static inline uint32_t key_at(int lane, int k) {
    return (uint32_t)(lane >> 2) * PANEL + k * 128 + ((((lane & 3) * 2 + (lane >> 2 & 1)) ^ (k & 7)) << 4);
}

static __device__ uint4
    attention_no_record[(WINDOW_BYTES + 15) / 16]; /* zeros: what is read for a key that is not there */

/* ---- scores of a tile --------------------------------------------------------------------------------------------
 * A thread of the warpgroup has heads `head` and head + 8, and of these the keys 8i + 2*quad and the next. */

/* S = Q K^T, unscaled, of one warpgroup; waits for it. */
__device__ static inline void multiply_scores(float (&s)[32], uint32_t q_at, uint32_t key_at) {
    /* Through a shuffle, so that 64 descriptors aren't kept in registers from tile to tile. */
    uint64_t q_desc = cu_desc_k128(__shfl_sync(0xFFFFFFFFu, q_at, 0));
    uint64_t key_desc = cu_desc_k128(__shfl_sync(0xFFFFFFFFu, key_at, 0));
    cu_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t at = k / 4 * PANEL + k % 4 * 32;
        cu_wgmma_bf16_ss<CU_K_MAJOR, CU_K_MAJOR>(s, cu_desc_add(q_desc, at), cu_desc_add(key_desc, at), k > 0);
    }
    cu_wgmma_commit();
    cu_wgmma_wait<0>();
    cu_wgmma_pin(s);
}

/* Scores of keys that are not there become -infinity. Bit k of there: key k. */
__device__ static inline void mask_scores(float (&s)[32], uint64_t there, int quad) {
    if (there == ~(uint64_t)0)
        return;
    uint32_t low = (uint32_t)(there >> 2 * quad), high = (uint32_t)(there >> (2 * quad + 32));
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int bit = i / 4 * 8 + i % 2;
        if (!((bit < 32 ? low : high) >> bit % 32 & 1))
            s[i] = -INFINITY;
    }
}

__device__ static inline float quad_sum(float v) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2);
}

/* The largest score of head (r = 0) or head + 8 (r = 1), in all four lanes that share it. */
__device__ static inline float top_score(const float (&s)[32], int r) {
    float top = s[2 * r];
#pragma unroll
    for (int i = 0; i < 32; i += 4)
        top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    return cu_lanes_max<4>(top);
}

/* Writes P = 2^(score - most) of a head in bf16 to its row of the tile [64 heads, 64 keys]; returns the thread's share
 * of their sum, before rounding. */
__device__ static inline float put_probabilities(const float (&s)[32], int r, float scale2, float most, uint8_t *p,
                                                 int head, int quad) {
    float part[2] = {};
    uint8_t *at = p + (head + 8 * r) * 128 + quad * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a = cu_exp2_fast(fmaf(s[4 * i + 2 * r], scale2, -most));
        float b = cu_exp2_fast(fmaf(s[4 * i + 2 * r + 1], scale2, -most));
        part[0] += a;
        part[1] += b;
        *(uint32_t *)(at + ((i ^ (head & 7)) << 4)) = cu_pack_bf16(a, b);
    }
    return part[0] + part[1];
}

/* The state of a head's softmax before any key: the sink, whose weight 2^0 one lane of four counts. */
__device__ static inline float first_most(const attention_job &job, int head) {
    return fmaxf(job.a.sink[head] * 0x1.715476p0f, -1e30f);
}
__device__ static inline float first_sum(int quad) {
    return quad ? 0.0f : 1.0f;
}
/* What a row's sums of 2^-16 P V are to be multiplied by. sum: of the four lanes. */
__device__ static inline float last_factor(float sum) {
    return 65536.0f / quad_sum(sum);
}

/* ---- the store ---------------------------------------------------------------------------------------------------
 */

/* Word i of the result of lane l is word l of lane i's argument, lanes taken by fours. */
__device__ static inline void transpose4(uint32_t (&w)[4], int quad) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, quad & 1 ? w[i] : w[i + 1], 1);
        w[i] = quad & 1 ? got : w[i];
        w[i + 1] = quad & 1 ? w[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, quad & 2 ? w[i] : w[i + 2], 2);
        w[i] = quad & 2 ? got : w[i];
        w[i + 2] = quad & 2 ? w[i + 2] : got;
    }
}

/* Eight neighbouring values of bf16, two a word, coded with the group of 32 that four lanes have. */
__device__ static inline void store_codes(const di_act &codes, int32_t row, int32_t column, int quad,
                                          const uint32_t (&w)[4]) {
    float v[8];
    cu_unpack8(make_uint4(w[0], w[1], w[2], w[3]), v);
    cu_scale scale = cu_qa_scale(cu_lanes_max<4>(cu_abs_max8(v, 1e-4f)));
    *(uint2 *)((uint8_t *)codes.data + row * codes.stride + column) = cu_e4m3_codes8(v, scale.inverse);
    if (quad == 0)
        codes.scale[row * (codes.n_cols / 32) + column / 32] = (uint8_t)scale.byte;
}

/* Divides, rotates back and stores what the thread has of a row, or its codes: columns first .. first + 2n - 1 of two
 * heads. */
template <int N>
__device__ static inline void store_columns(const attention_job &job, int32_t row, int32_t head, int32_t first,
                                            int quad, float (&o)[N], float low, float high) {
    const di_attention_args &a = job.a;
    uint16_t *out = (uint16_t *)a.out.data + row * a.out.stride + head * DIM + first;
    /* Angle of the thread's first pair; it has every fourth. Negative: in front of the rotated values. */
    int32_t angle = (first - DIM) / 2 + a.n_freq + quad;
    const float *cos = a.cos + (int64_t)row * a.n_freq + angle, *sin = a.sin + (int64_t)row * a.n_freq + angle;
#pragma unroll
    for (int g = 0; g < N / 16; g++) { /* 32 columns: 8 columns for each lane of four, after the turn */
        uint32_t w[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *v = o + 16 * g + 4 * i;
            float x0 = v[0] * low, y0 = v[1] * low, x1 = v[2] * high, y1 = v[3] * high;
            if (angle + g * 16 + i * 4 >= 0) {
                float cs = cos[g * 16 + i * 4], sn = sin[g * 16 + i * 4], x = x0;
                x0 = fmaf(x, cs, y0 * sn) + 0.0f; /* a row without keys gives 0, not -0 */
                y0 = fmaf(y0, cs, -x * sn) + 0.0f;
                x = x1;
                x1 = fmaf(x, cs, y1 * sn) + 0.0f;
                y1 = fmaf(y1, cs, -x * sn) + 0.0f;
            }
            w[0][i] = cu_pack_bf16(x0, y0);
            w[1][i] = cu_pack_bf16(x1, y1);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            transpose4(w[r], quad);
            if (job.codes.data)
                store_codes(job.codes, row, (head + r * 8) * DIM + first + g * 32 + quad * 8, quad, w[r]);
            else
                *(uint4 *)(out + r * 8 * DIM + g * 32 + quad * 8) = make_uint4(w[r][0], w[r][1], w[r][2], w[r][3]);
        }
    }
}

#endif
