/* Weights of experts as Hopper's kernels want them, laid out anew in place when a model is loaded (moe.cu,
 * experts_place). Two things are gained: what a warp reads at once lies in one piece, and codes become bf16 by a few
 * instructions, most of them by one mask.
 *
 * A slab is 32 rows of a matrix and, in FP4, their scales. Its rows 2i and 2i + 1 are rows i of octets 0 and 1, and
 * rows 16 + 2i and 17 + 2i of octets 2 and 3 (two octets are mma rows 0..7 and 8..15 of a warp). A slab is pieces of
 * 2 KiB, 128 k of FP4 or 64 of FP8, which have the four octets in turn, 16 bytes for each lane of a warp, whose row is
 * l/4.
 *
 *   slab     | k 0..127                                  | k 128..255 | ..
 *   piece    | octet 0            | octet 1 | 2 | octet 3 |
 *   octet    | lane 0: 16 bytes | lane 1 | .. lane 31    |
 *
 * Of a block of 64 k, which is two groups of scales, value e of both groups, e = 0..31, is a pair: the low and the high
 * half of a register of operand A, so that one multiplication by two powers of two applies both scales. Lane c = l%4 of
 * a row has pairs 8s + c and 8s + c + 4 of step s = 0..3 (16 k of a multiply: 8 pairs), which makes eight registers; a
 * chunk of the block is four of them, two steps. A lane's 16 bytes are four chunks of FP4 codes, a word each, or two of
 * FP8 codes, two words each:
 *
 *   FP4: codes of a word's four registers lie so that the mask, after a rotation by 0, 3 and 6 bits or a multiplication
 *   by three powers of two, leaves bf16 numbers: sign at bits 15 and 31, exponent and mantissa at 8..6 and 24..22,
 *   2^-126 of the value.
 *   FP8: two registers in a word; sign and bits 10..4 of a half, 2^-120.
 *
 * Scales of four groups are a word: exponents in bf16's place, groups 0 and 1 after a mask, 2 and 3 after a rotation by
 * 8 and the mask. In FP4 a piece has 32 of them, one for each row of its octets in turn; in FP8 there is one for the
 * rows of a slab and 128 k. An exponent takes back 2^-126 or 2^-120 and makes values 2^-32 of what they are, so that it
 * fits; larger scales than that allows are refused, values below 2^-94 may lose bits. */
#ifndef DI_MOE_PLACED_CUH
#define DI_MOE_PLACED_CUH

#include "cu.cuh"

/* Formats of placed weights beside di_dtype's, in the device's table of experts only. */
enum { MOE_F4_PLACED = 64, MOE_F8_PLACED };
enum { MOE_SLAB = 32 };

enum { MOE_F4_EXPONENT = 126 - 32, MOE_F8_EXPONENT = 120 - 32 }; /* what is added to a stored scale */
static constexpr uint32_t MOE_F4_MASK = 0x81C081C0u, MOE_F8_MASK = 0x87F087F0u, MOE_SCALE_MASK = 0x7F807F80u;

__device__ static inline uint32_t moe_rotate(uint32_t w, uint32_t right) {
    return __funnelshift_r(w, w, right);
}

/* Registers i of a chunk's word of FP4 codes (0..3), of a word of FP8 codes (0, 1). */
__device__ static inline uint32_t moe_f4_register(uint32_t w, int i) {
    switch (i) {
    case 0:
        return w & MOE_F4_MASK;
    case 1:
        return moe_rotate(w, 3) & MOE_F4_MASK;
    case 2:
        return moe_rotate(w, 6) & MOE_F4_MASK;
    default: /* bits 1, 0, 4, 3 of a half to 15, 8, 7, 6 */
        return (w & 0x001B001Bu) * (1u << 14 | 1u << 8 | 1u << 3) & MOE_F4_MASK;
    }
}
__device__ static inline uint32_t moe_f8_register(uint32_t w, int i) {
    return i == 0 ? w & MOE_F8_MASK /* bits 11, 14..12 and 3..0 of a half to 15, 10..8 and 7..4 */
                  : (w << 4 & 0x80F080F0u) | (w >> 4 & 0x07000700u);
}
/* Powers of two of groups 2i and 2i + 1 as a pair. */
__device__ static inline uint32_t moe_powers(uint32_t scales, int i) {
    return (i ? moe_rotate(scales, 24) : scales) & MOE_SCALE_MASK;
}

/* ---- the slow way, value by value ---- */

/* Of value k of a block of 64: its register (j: of the lane's eight), lane of the row, half. */
typedef struct moe_place {
    int j, c, half;
} moe_place;
__device__ static inline moe_place moe_place_of(int k) {
    return moe_place{k % 32 / 8 * 2 + k % 8 / 4, k % 4, k / 32};
}
/* Where that register lies in its row's words of the block, chunk by chunk and lane by lane. */
__device__ static inline int moe_place_word(const moe_place &p, bool is_f8) {
    return is_f8 ? (p.j / 4 * 4 + p.c) * 2 + p.j % 4 / 2 : p.j / 4 * 4 + p.c;
}
/* A code's bits in that word, and the code again. */
__device__ static inline uint32_t moe_place_bits(const moe_place &p, bool is_f8, uint32_t code) {
    int i = p.j % (is_f8 ? 2 : 4);
    uint32_t bits;
    if (is_f8)
        bits = i == 0 ? (code & 0x80u) << 8 | (code & 0x7Fu) << 4
                      : (code & 0x80u) << 4 | (code & 0x70u) << 8 | (code & 15u);
    else if (i < 3)
        bits = moe_rotate((code & 8u) << 12 | (code & 7u) << 6, (32u - 3u * (uint32_t)i) % 32u);
    else
        bits = (code & 8u) >> 2 | (code & 4u) >> 2 | (code & 3u) << 3;
    return moe_rotate(bits, 16u * (uint32_t)p.half);
}
__device__ static inline uint32_t moe_place_code(const moe_place &p, bool is_f8, uint32_t word) {
    uint32_t pair = is_f8 ? moe_f8_register(word, p.j % 2) : moe_f4_register(word, p.j % 4), v = pair >> 16 * p.half;
    return is_f8 ? (v >> 8 & 0x80u) | (v >> 4 & 0x7Fu) : (v >> 12 & 8u) | (v >> 6 & 7u);
}
/* Where such a word of block b of row i lies in the words of the slab. */
__device__ static inline int32_t moe_place_at(int i, int32_t b, int word, bool is_f8) {
    int c = is_f8 ? word / 2 % 4 : word % 4, chunk = word / (is_f8 ? 8 : 4), lane = i % 16 / 2 * 4 + c;
    int32_t octet = (is_f8 ? b : b / 2) * 4 + i / 16 * 2 + i % 2;
    return octet * 128 + lane * 4 + (is_f8 ? chunk * 2 + word % 2 : b % 2 * 2 + chunk);
}
/* Of FP4: where the scales of piece p of row i lie in the slab's. */
__device__ static inline int32_t moe_place_scale(int i, int32_t p) {
    return p * MOE_SLAB + (i / 16 * 2 + i % 2) * 8 + i % 16 / 2;
}

/* Value (o, i) of a matrix, placed or not. */
__device__ static inline float moe_mat_load(const di_mat &w, int64_t o, int64_t i) {
    if (w.dtype != (di_dtype)MOE_F4_PLACED && w.dtype != (di_dtype)MOE_F8_PLACED)
        return cu_mat_load(w, o, i);
    bool is_f8 = w.dtype == (di_dtype)MOE_F8_PLACED;
    const uint32_t *slab = (const uint32_t *)w.data + o / MOE_SLAB * (w.n_in * (is_f8 ? 8 : 4));
    moe_place p = moe_place_of((int)(i % 64));
    int row = (int)(o % MOE_SLAB), piece = (int)(i / 128);
    uint32_t word = slab[moe_place_at(row, (int32_t)(i / 64), moe_place_word(p, is_f8), is_f8)];
    uint32_t code = moe_place_code(p, is_f8, word);
    const uint32_t *slab_scales = (const uint32_t *)(const void *)w.scale + o / MOE_SLAB * (w.n_in / (is_f8 ? 128 : 4));
    uint32_t scales = slab_scales[is_f8 ? piece : moe_place_scale(row, piece)];
    uint32_t exponent = moe_powers(scales, (int)(i % 128 / 64)) >> (i % 64 < 32 ? 7 : 23) & 255u;
    uint8_t scale = (uint8_t)(exponent - (is_f8 ? MOE_F8_EXPONENT : MOE_F4_EXPONENT));
    return cu_scaled(is_f8 ? cu_e4m3_to_f32((uint8_t)code) : cu_e2m1_to_f32(code), scale);
}

#endif
