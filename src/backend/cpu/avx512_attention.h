/* Attention with heads in the lanes: sizes and scratch, and the steps that the avx512 and amx levels do differently.
 *
 * avx512_attention.c owns the operation; amx_attention.c lends it another way to make scores. The sizes are here, as
 * inline functions, because files without the levels' flags need them too (ref_attention.c asks for the scratch).
 * Private to backend/cpu. */
#ifndef DI_CPU_AVX512_ATTENTION_H
#define DI_CPU_AVX512_ATTENTION_H

#include "attention.h"

enum {
    DI_HEAD_LANES = 16,  /* heads of a vector */
    DI_KEY_BLOCK = 48,   /* keys widened at a time: with their scores and sums they fit the first-level cache */
    DI_VALUE_PANEL = 64, /* values of a key widened at a time */
    DI_KEY_ROWS = 8,     /* rows of a part, at most */
    DI_KEY_SPARE = 32    /* scores that a step may write past the last key */
};

/* Sizes of the work on `heads` heads (a multiple of 16) over up to keys_max keys of d values. */
typedef struct di_attention_sizes {
    int64_t d, heads;
    int64_t cap; /* key slots: a part's further rows add window keys, and whole tiles are read */
    int64_t n_scores;
} di_attention_sizes;

static inline di_attention_sizes di_attention_sizes_of(int64_t keys_max, int64_t n_heads, int64_t d) {
    di_attention_sizes z;
    z.d = d;
    z.heads = DI_ROUND_UP(n_heads, DI_HEAD_LANES);
    z.cap = keys_max + DI_KEY_ROWS + DI_KEY_SPARE;
    z.n_scores = keys_max + DI_KEY_SPARE;
    return z;
}

/* The pieces, in the order in which they are taken. Keys have room for floats; quantised ones are kept as bf16. */
static inline size_t di_attention_keys_bytes(const di_attention_sizes *z) {
    return di_cpu_piece((size_t)(z->cap * z->d) * sizeof(float));
}
static inline size_t di_attention_lists_bytes(const di_attention_sizes *z) {
    return di_cpu_piece(3 * (size_t)z->cap * sizeof(int32_t));
}
static inline size_t di_attention_query_bytes(const di_attention_sizes *z) {
    return di_cpu_piece((size_t)(z->heads * z->d) * sizeof(float));
}
static inline size_t di_attention_score_bytes(const di_attention_sizes *z) {
    return di_cpu_piece((size_t)(z->n_scores * z->heads) * sizeof(float));
}
static inline size_t di_attention_panel_bytes(void) {
    return di_cpu_piece(DI_KEY_BLOCK * DI_VALUE_PANEL * sizeof(float));
}
static inline size_t di_attention_sums_bytes(const di_attention_sizes *z) {
    return di_cpu_piece((size_t)(z->heads * DI_VALUE_PANEL) * sizeof(float)) +
           di_cpu_piece((size_t)z->heads * sizeof(float));
}

static inline void di_cpu_need_avx512_attention(const di_limits *limits, di_cpu_need *need) {
    di_attention_sizes z = di_attention_sizes_of(limits->keys_max, limits->n_heads, limits->head_dim);
    size_t keys = di_attention_keys_bytes(&z) + di_attention_lists_bytes(&z);
    di_cpu_need_raise(need, keys,
                      keys + di_attention_query_bytes(&z) + di_attention_score_bytes(&z) + di_attention_panel_bytes() +
                          di_attention_sums_bytes(&z));
}

/* Some heads of one row at work. */
typedef struct di_attention_part {
    const di_attention_args *a;
    int64_t row, head, n_heads; /* of the operation */
    int64_t d, heads;           /* n_heads padded to a multiple of 16 */
    bool is_bf16;               /* keys are bf16 values, kept as such; else floats */
    bool is_fused;              /* queries are bf16 values too: products are exact, fused steps give the same bits */
    void *q;                    /* as the level's `load` leaves the queries; room for [heads, d] floats */
    float *panel;               /* [DI_KEY_BLOCK, DI_VALUE_PANEL] */
} di_attention_part;

/* What a level does its way. Scores are [n, heads]: heads in the lanes. */
typedef struct di_attention_steps {
    void (*load)(const di_attention_part *t); /* brings the queries into t->q */
    /* s[k][h] = q[h] . key k in the order of di_dot32, for n consecutive keys; up to DI_KEY_SPARE further rows of s
     * may be written and as many keys be read. */
    void (*score)(const di_attention_part *t, const void *keys, int64_t n, float *s);
} di_attention_steps;

/* The operation, by these steps where queries and keys are bf16 values. (avx512_attention.c) */
di_status di_cpu_attention_lanes(di_stream *stream, const di_attention_args *a, const di_attention_steps *bf16_steps);

#endif
