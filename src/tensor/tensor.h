/* Number formats and tensor views.
 *
 * Owns: dtypes, exact conversions between stored formats and float, the quantisers by name, views over memory that
 * somebody else owns, the exp and log that every backend uses. Leaves memory and kernels to backend/.
 *
 * One vocabulary of dimensions, used in every header and comment:
 *   H hidden_size, L num_hidden_layers, V vocab_size, A num_attention_heads, D head_dim, R qk_rope_head_dim,
 *   Q q_lora_rank, G o_groups, O o_lora_rank, W sliding_window, E n_routed_experts, K num_experts_per_tok,
 *   I moe_intermediate_size, M hc_mult, Ai index_n_heads, Di index_head_dim, T index_topk, r compress ratio,
 *   Ng engram_max_ngram_size, He engram_n_heads, De engram_head_dim, B dspark_block_size, P0 first consumer layer. */
#ifndef DI_TENSOR_H
#define DI_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/base.h"

typedef enum di_dtype {
    DI_F32,
    DI_BF16,
    DI_F8_E4M3, /* OCP "fn": bias 7, largest 448, no infinities, NaN 0x7F and 0xFF */
    DI_F8_E8M0, /* a power of two: 2^(b-127); 255 = NaN */
    DI_F4_E2M1, /* two per byte: even element in the low nibble */
    DI_I8,      /* what safetensors calls packed E2M1 */
    DI_U8,
    DI_I32,
    DI_I64,
    DI_DTYPE_COUNT
} di_dtype;

const char *di_dtype_name(di_dtype dtype); /* safetensors' spelling: "F32", "BF16", "F8_E4M3", "F8_E8M0", "I8", ... */
bool di_dtype_parse(const char *name, size_t len, di_dtype *out);
/* Bytes of n elements (DI_F4_E2M1: two a byte, rounded up). */
size_t di_dtype_bytes(di_dtype dtype, size_t n_elements);

/* A matrix as the model's products read it; a view, never freed. Scales by dtype:
 *   DI_F8_E4M3: one E8M0 per 32x32 block, [ceil(n_out/32), ceil(n_in/32)]
 *   DI_F4_E2M1: one E8M0 per 32 consecutive inputs of a row, [n_out, n_in/32]; n_in counts elements, two a byte
 *   DI_BF16, DI_F32: none (NULL) */
typedef struct di_mat {
    di_dtype dtype;
    int64_t n_out, n_in;
    const void *data;     /* [n_out, n_in] row-major */
    const uint8_t *scale; /* see above */
} di_mat;

/* ---- exact conversions -------------------------------------------------------------------------------------- */

static inline float di_f32_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static inline uint32_t di_f32_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}
static inline float di_bf16_to_f32(uint16_t h) {
    return di_f32_from_bits((uint32_t)h << 16);
}
/* Round to nearest even; NaN stays NaN (quiet). */
static inline uint16_t di_f32_to_bf16(float f) {
    uint32_t u = di_f32_bits(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
static inline float di_round_bf16(float f) {
    return di_bf16_to_f32(di_f32_to_bf16(f));
}

extern const float di_e4m3_table[256]; /* value of every code */
extern const float di_e2m1_table[16];
static inline float di_e4m3_to_f32(uint8_t code) {
    return di_e4m3_table[code];
}
uint8_t di_f32_to_e4m3(float f); /* clamped to +-448, then round to nearest even; NaN gives 0x7F with f's sign */
/* 2^(b-127); b = 0 is 2^-127, a subnormal: flush-to-zero must be off where it matters; 255 gives NaN */
static inline float di_e8m0_to_f32(uint8_t b) {
    if (b == 255)
        return di_f32_from_bits(0x7FC00000u);
    return b ? di_f32_from_bits((uint32_t)b << 23) : di_f32_from_bits(0x00400000u);
}
static inline float di_e2m1_to_f32(uint8_t code) {
    return di_e2m1_table[code & 15];
}
uint8_t di_f32_to_e2m1(float f); /* nearest even on 0 .5 1 1.5 2 3 4 6, saturating at 6; NaN and infinities give 6 */

/* ---- quantisers (model.md 0.2 names): x [n] with n a multiple of the group ------------------------------------- */

/* QA: E4M3 codes [n] and one E8M0 per 32. s = max(max|x|, 1e-4)/448 rounded up to a power of two. */
void di_quant_qa(const float *x, int64_t n, uint8_t *codes, uint8_t *scales);
/* QI: packed E2M1 [n/2] and one E8M0 per 32. s = max(max|x|, 6*2^-126)/6 rounded up to a power of two. */
void di_quant_qi(const float *x, int64_t n, uint8_t *packed, uint8_t *scales);
/* QK: packed E2M1 [n/2] and one E4M3 per 16. s = e4m3(min(max(max|x|, 6*2^-9) * (1/6), 448)); codes of x * (1/s). */
void di_quant_qk(const float *x, int64_t n, uint8_t *packed, uint8_t *scales);
/* Weights: 32x32 blocks of w [n_out, n_in], codes [n_out, n_in], scales [ceil(n_out/32), ceil(n_in/32)]. */
void di_quant_block(const float *w, int64_t n_out, int64_t n_in, uint8_t *codes, uint8_t *scales);

void di_dequant_qa(const uint8_t *codes, const uint8_t *scales, int64_t n, float *x);
void di_dequant_qi(const uint8_t *packed, const uint8_t *scales, int64_t n, float *x);
void di_dequant_qk(const uint8_t *packed, const uint8_t *scales, int64_t n, float *x);
/* Row `row` of a stored matrix as floats [n_in] (exact: every value is a bf16 value, or f32 as stored). */
void di_mat_row(const di_mat *mat, int64_t row, float *out);

/* ---- cache record formats -------------------------------------------------------------------------------------- */

typedef enum di_kv_format {
    DI_KV_F32, /* n floats, not quantised: exact numerics */
    DI_KV_FP8, /* QA: n E4M3 codes, then n/32 E8M0 (window records, and main records without FP4) */
    DI_KV_FP4, /* QK: n/2 bytes of E2M1 pairs, then n/16 E4M3 (main records) */
    DI_KV_MX4  /* QI: n/2 bytes of E2M1 pairs, then n/32 E8M0 (index keys) */
} di_kv_format;

/* Bytes of codes and of scales of one record of n values, and their sum. */
size_t di_kv_data_bytes(di_kv_format format, int64_t n);
size_t di_kv_scale_bytes(di_kv_format format, int64_t n);
static inline size_t di_kv_record_bytes(di_kv_format format, int64_t n) {
    return di_kv_data_bytes(format, n) + di_kv_scale_bytes(format, n);
}
/* One record between floats [n] and its codes and scales, which need not be adjacent (paged index keys). */
void di_kv_encode(di_kv_format format, const float *x, int64_t n, uint8_t *data, uint8_t *scale);
void di_kv_decode(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t n, float *x);

/* ---- elementary functions ---------------------------------------------------------------------------------------
 * Our own, of IEEE operations in a written order (no fused operation), so that every backend and level gives the same
 * bits. Errors: di_exp and di_ln below 1 ulp + 0.5 over their whole range, di_expf below 2 ulp. */
double di_exp(double x);   /* overflow gives infinity, below -745.2 zero */
double di_ln(double x);    /* natural logarithm; x > 0 normal or subnormal; 0 gives -infinity, negative NaN */
double di_log1p(double x); /* x >= 0 */
float di_expf(float x);    /* below -87.3 zero (no subnormal results), above 88.7 infinity */

/* The sum order of every product and norm (model.md 0.3): inputs in groups of 32; per group two chains from 0, over the
 * even and over the odd inputs; their sum is added to the accumulator; groups in rising order. Each step rounds the
 * product, then the sum; where both factors are bf16 values the product is exact, and a fused step gives the same bits.
 */
float di_dot32(const float *a, const float *b, int64_t n);

#endif
