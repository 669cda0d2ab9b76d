/* The operations of a backend: one argument struct each. All run on a stream, in order; none allocates.
 *
 * Rows are tokens of the current forward, in any mix of prefill chunks, decode and verification rows. Every operation
 * treats a row alone, so that a row's result depends on nothing else in the batch. Matrices are row-major. Activations
 * are of one of two kinds throughout: DI_F32 (exact numerics: nothing is rounded or quantised) or DI_BF16 (faithful:
 * rounded to nearest even where a tensor is stored; arithmetic is fp32). Sums over inputs are in the order of di_dot32;
 * all other sums are sequential in rising index, fp32, product rounded before the addition.
 *
 * Formulas: model.md and dspark.md section numbers in parentheses. */
#ifndef DI_OPS_H
#define DI_OPS_H

#include "tensor/tensor.h"

typedef struct di_stream di_stream;

/* A block of activations [n_rows, n_cols] with a row stride. DI_F8_E4M3 carries QA scales [n_rows, n_cols/32] (stride
 * n_cols/32); the others have scale NULL. */
typedef struct di_act {
    di_dtype dtype; /* DI_F32, DI_BF16, DI_F8_E4M3 */
    int64_t n_rows, n_cols;
    int64_t stride; /* elements between rows, >= n_cols */
    void *data;
    uint8_t *scale;
} di_act;

/* The rows of a forward, grouped by sequence; sequence s has the consecutive rows row0[s] .. row0[s]+n[s]-1 at the
 * consecutive positions pos0[s] .. . All arrays are device memory. */
typedef struct di_rows {
    int32_t n_rows, n_seqs;
    const int32_t *pos; /* [n_rows] position in the sequence */
    const int32_t *seq; /* [n_rows] index of the sequence */
    const int32_t *win_lo,
        *win_hi; /* [n_rows] window keys are the positions win_lo <= p < win_hi; empty when lo >= hi */
    const int32_t *row0, *n, *pos0; /* [n_seqs] */
    const int32_t *slot;            /* [n_seqs] state slot */
    const int32_t *blocks;          /* [n_seqs, blocks_stride] KV block of every 128 positions */
    int64_t blocks_stride;
} di_rows;

/* Per-sequence rings inside the state slots: element `pos mod ring_len` of the ring at
 * slots + slot*slot_bytes + offset, record_bytes each. */
typedef struct di_ring {
    uint8_t *slots;
    size_t slot_bytes, offset, record_bytes;
    int32_t ring_len;
} di_ring;

/* One paged section: entry j of a sequence lies in block j / per_block, at entry j mod per_block of the section that
 * starts at pages + block*page_bytes + offset. DI_KV_MX4 sections keep all codes of a block first, then all scales; the
 * other formats keep record after record. */
typedef struct di_paged {
    uint8_t *pages;
    size_t page_bytes, offset;
    int32_t per_block; /* 128 / r */
    di_kv_format format;
    int32_t n_values; /* D, or Di for index keys */
} di_paged;

/* Compressed entries that close in this forward. Where row is -1 there is none: nothing is stored, and whatever an
 * operation puts into its row of a result is read by nobody. */
typedef struct di_entries {
    int32_t n;
    const int32_t *row; /* [n] row that closes the entry: position (j+1)*r - 1; or -1 */
    const int32_t *seq; /* [n] */
    const int32_t *idx; /* [n] j */
} di_entries;

/* ---- dense ---------------------------------------------------------------------------------------------------- */

/* out[i] = row ids[i] of table [n, n_cols] (DI_BF16), zeros for an id outside [0, n); repeated `copies` times along the
 * row: out [n_rows, copies*n_cols]. (3.1) */
typedef struct di_embed_args {
    const di_mat *table;
    const int32_t *ids; /* [out.n_rows] */
    int32_t copies;
    di_act out;
} di_embed_args;

/* out = x * (1/sqrt(mean(x^2) + eps)) * weight, fp32, rounded once. weight DI_BF16 [n_cols]. (3.3) */
typedef struct di_rms_norm_args {
    di_act x, out;
    const void *weight;
    float eps;
} di_rms_norm_args;

/* out (DI_F8_E4M3 + scales) = QA(x), x DI_F32 or DI_BF16. (0.2) */
typedef struct di_quant_args {
    di_act x, out;
} di_quant_args;

/* out = x . W^T. x may be of any activation kind (codes are taken as code*scale). n_groups g > 1: the input is g blocks
 * of n_in columns, the rows of W are g blocks of n_out/g, block i of the output reads block i of the input (wo_a, 3.8).
 * out DI_F32 or DI_BF16. add (may be NULL): fp32 [n_rows, n_out], stride out.stride, added to the fp32 sum before
 * rounding. (0.3) */
typedef struct di_gemm_args {
    di_act x;
    const di_mat *w;
    int32_t n_groups; /* 0 and 1 mean one */
    const float *add;
    di_act out;
} di_gemm_args;

/* cos and sin of fp32(pos)*inv_freq [n_rows, n_freq]. (3.4) */
typedef struct di_rope_table_args {
    const int32_t *pos;
    int32_t n_rows, n_freq;
    const float *inv_freq;
    float *cos, *sin;
} di_rope_table_args;

/* Rotates the last 2*n_freq values of each of n_heads heads of head_dim, adjacent pairs: (a,b) -> (a cos - b sin,
 * a sin + b cos); in place, fp32 inside. Row i uses table row i. (3.4) */
typedef struct di_rope_args {
    di_act x; /* n_cols = n_heads*head_dim */
    int32_t n_heads, head_dim, n_freq;
    const float *cos, *sin; /* [n_rows, n_freq] */
    bool inverse;
} di_rope_args;

/* ---- hyper-connections (3.3) --------------------------------------------------------------------------------------
 */

/* From the trunk x [n, M*H] and the previous sub-layer's pre_in [n, M]: z = sum_m pre_in[m]*x[m] (out z, [n, H]); and,
 * when fn is not NULL, y = (fn . x) / sqrt(mean(x^2) + norm_eps), pre_out, post [n, M], comb [n, M, M] (old, new) after
 * Sinkhorn. With fn NULL only z is made (head merge); with z.data NULL, for backends with hc_step, all but z. */
typedef struct di_hc_mix_args {
    di_act x;
    int32_t m;
    const float *pre_in;
    const float *fn, *scale, *base; /* [(2+M)*M, M*H], [3], [(2+M)*M] */
    int32_t iters;
    float eps, norm_eps;
    di_act z;
    float *pre_out, *post, *comb;
} di_hc_mix_args;

/* x'[b] = post[b]*f + sum_a comb[a][b]*x[a], in place in x [n, M*H]; f [n, H]. The sum starts with post[b]*f, then
 * rising a. */
typedef struct di_hc_post_args {
    di_act x, f;
    int32_t m;
    const float *post, *comb;
} di_hc_post_args;

/* out = mean over the M streams of x [n, M*H], written at column out_col of out (taps, dspark 4.2). Sum over rising m,
 * then times 1/M. */
typedef struct di_stream_mean_args {
    di_act x;
    int32_t m;
    di_act out; /* [n, H] view inside a wider block */
} di_stream_mean_args;

/* out row i = x row idx[i]; raw copy, any dtype (row_bytes each). A row with idx[i] < 0 stays as it is. */
typedef struct di_gather_args {
    const void *x;
    void *out;
    const int32_t *idx; /* [n] */
    int32_t n;
    size_t row_bytes;
} di_gather_args;

/* ---- Engram (3.2) ----------------------------------------------------------------------------------------------- */

/* rows [n, (Ng-1)*He] of the table from compressed ids: grams [n, Ng], grams[i][s] = class s tokens back (already
 * padded). h = grams[0]*mult[0]; for s >= 1: h ^= grams[s]*mult[s]; column (s-1)*He + head: h mod prime + offset. */
typedef struct di_engram_hash_args {
    const int32_t *grams;
    int32_t n, n_gram, n_heads;
    const int64_t *mult;    /* [Ng] */
    const int64_t *primes;  /* [(Ng-1)*He] */
    const int64_t *offsets; /* [(Ng-1)*He] */
    int64_t *rows;
} di_engram_hash_args;

/* out [n, n_cols_per_row*De] = the stored rows side by side. DI_F8_E4M3 out: codes and scales as stored; DI_F32:
 * dequantised. Rows beyond the table read as zero with scale 1. */
typedef struct di_engram_gather_args {
    const uint8_t *codes, *scales; /* [n_table, De], [n_table, De/32] */
    int64_t n_table;
    int32_t dim;         /* De */
    int32_t n_cols;      /* (Ng-1)*He */
    const int64_t *rows; /* [n, n_cols] */
    di_act out;
} di_engram_gather_args;

/* Gate and add, in place in the trunk x [n, M*H]; kv [n, (M+1)*H] = M keys, then the value. Per stream
 * dot = sum(x*qk*key) * rsqrt(mean(x^2)+eps) * rsqrt(mean(key^2)+eps) * H^-1/2, with the sum of (x*qk)*key in dot32
 * order; z = copysign(sqrt(max(|dot|,1e-6)), dot); g = sigmoid(z); x += g*value. Rows with skip[i] != 0 stay as they
 * are. */
typedef struct di_engram_gate_args {
    di_act x, kv;
    int32_t m;
    const float *qk;     /* [M, H] fp32 product of q_weight and k_weight */
    const uint8_t *skip; /* [n] or NULL */
    float eps;
    float *gate; /* [n, M] or NULL */
} di_engram_gate_args;

/* ---- caches (3.5, 3.6, 5) ------------------------------------------------------------------------------------------
 */

/* records[i] = encoding of row i of x. */
typedef struct di_kv_encode_args {
    di_act x;
    di_kv_format format;
    uint8_t *records; /* [n_rows, record bytes] */
} di_kv_encode_args;

/* Puts records of this forward into the rings: row i with position p goes to element p mod ring_len when
 * p >= store_from[seq]. records [n_rows, ring.record_bytes]. */
typedef struct di_ring_store_args {
    const di_rows *rows;
    const uint8_t *records;
    const int32_t *store_from; /* [n_seqs] */
    di_ring ring;
} di_ring_store_args;

/* Pools pairs of tokens (r = 2). cg [n_rows, 2*D] fp32: gate scores, then latents, of this forward's rows; the partner
 * at position p-1 comes from cg when it lies in this forward, else from the ring (same record: 2*D fp32). Per channel:
 * weights = softmax over the two scores, out = sum of weight*latent. out [entries.n, D]. (3.6) */
typedef struct di_compress_pool_args {
    const di_rows *rows;
    di_entries entries;
    const float *cg;
    di_ring ring;
    di_act out;
} di_compress_pool_args;

/* Encodes row i of x [entries.n, n_values] into entry idx[i] of sequence seq[i]. */
typedef struct di_page_store_args {
    const di_rows *rows; /* for the block tables */
    di_entries entries;
    di_act x;
    di_paged dst;
} di_page_store_args;

/* ---- indexer (3.7) --------------------------------------------------------------------------------------------------
 */

/* For each row at position p, over the visible entries j < n = (p+1)/r: score = sum_h w[h]*relu(q[h] . key_j), the dots
 * in dot32 order, heads in rising order; rounded to bf16 when round_bf16. q [n, Ai*Di] is quantised by QI first unless
 * keys are DI_KV_F32. Keeps the topk best (ties: lower index), ascending, padded with -1. cand_in (may be NULL) [n,
 * n_cand]: only entries of these blocks (ascending, -1 padded) take part. cand_out (may be NULL) [n, n_cand]: the best
 * n_cand blocks of cand_block entries by the largest score of a visible entry, capped to the largest finite bf16, the
 * newest visible block always first; ties lower block; ascending, -1 padded. scores (may be NULL) [n, scores_stride]:
 * the scores, -inf where absent or beyond n. */
typedef struct di_index_select_args {
    const di_rows *rows;
    di_act q, w; /* [n, Ai*Di], [n, Ai] */
    int32_t n_heads, dim, ratio;
    di_paged keys;
    bool round_bf16;
    int32_t topk;
    int32_t *idx; /* [n, topk] */
    int32_t cand_block, n_cand;
    const int32_t *cand_in;
    int32_t *cand_out;
    float *scores;
    int64_t scores_stride;
} di_index_select_args;

/* ---- attention (3.8, dspark 4.4)
 * --------------------------------------------------------------------------------------- */

/* q [n, A*D] against K = V: window keys at positions win_lo .. win_hi-1 (a position >= pos0 of the sequence from
 * `records` of this forward, row row0 + position - pos0; an earlier one from the ring), oldest first; then, when idx is
 * not NULL, the main entries idx[row, 0..topk) >= 0 of the sequence, in list order. s = (q . k) * scale (dot32 order);
 * mx = max over s and sink; o = sum exp(s-mx)*k / (sum exp(s-mx) + exp(sink-mx)), keys in order; no key: zeros. Then
 * the inverse rotation of the last 2*n_freq values per head by the row's cos and sin, fp32, and rounding to out's
 * dtype. */
typedef struct di_attention_args {
    const di_rows *rows;
    di_act q;
    int32_t n_heads, head_dim;
    di_kv_format win_format;
    const uint8_t *records; /* [n_rows, record bytes] */
    di_ring ring;
    const int32_t *idx; /* [n, topk] or NULL */
    int32_t topk;
    di_paged main;
    const float *sink; /* [A] */
    float scale;
    const float *cos, *sin; /* [n, n_freq] */
    int32_t n_freq;
    di_act out; /* [n, A*D] */
} di_attention_args;

/* ---- mixture of experts (3.10)
 * -------------------------------------------------------------------------------------------- */

/* logits = x . gate^T fp32; s = sqrt(softplus(logits)); the k best of s + bias (bias_vl for rows with is_image), best
 * first, ties lower expert; weight = s / (sum of the selected s, best first, + 1e-20) * factor. */
typedef struct di_moe_route_args {
    di_act x;
    const di_mat *gate; /* [E, H] DI_BF16 */
    const float *bias, *bias_vl;
    const uint8_t *is_image; /* [n] or NULL */
    int32_t k;
    float factor;
    int32_t *idx;  /* [n, k] */
    float *weight; /* [n, k] */
} di_moe_route_args;

/* One expert's three matrices: w1 gate [I,H], w3 up [I,H], w2 down [H,I]. */
typedef struct di_expert {
    di_mat w1, w3, w2;
} di_expert;

/* out = sum over the row's experts, ascending expert id, of w2 . QA(silu(g)*u*weight), g = min(w1.x, limit),
 * u = clamp(w3.x, -limit, limit); the shared expert (weight 1) added last. Faithful (x is DI_F8_E4M3): g, u and every
 * expert's result are rounded to bf16, sums fp32, the total rounded to bf16. Exact (x is DI_F32): no rounding, no QA.
 * Each expert's weights are read once per call; experts nobody chose are not touched. limit <= 0: no clamp. */
typedef struct di_moe_args {
    di_act x; /* [n, H] */
    const int32_t *idx;
    const float *weight;
    int32_t k, n_experts;
    const di_expert *experts; /* [E], host memory */
    const di_expert *shared;
    const void *table; /* what the device's experts_place made of both; NULL where it makes nothing */
    float limit;
    di_act out; /* [n, H] */
} di_moe_args;

/* ---- draft heads (dspark 4.4.2)
 * ---------------------------------------------------------------------------------------------- */

/* conf[i] = sigmoid(clamp((w . concat(hid[i], emb[i])) / tau, -60, 60)), w [1, H + rank] DI_BF16, the dot over the
 * concatenation in dot32 order. */
typedef struct di_confidence_args {
    di_act hid, emb;
    const di_mat *w;
    float tau;
    float *conf; /* [n] */
} di_confidence_args;

/* ---- chains of operations as one (optional) ----------------------------------------------------------------------
 *
 * What the model runs back to back, without the trips through memory between. Each gives the bits of the operations
 * that it stands for, run one after the other; what only the chain's next step would read is written where its place is
 * given. DI_ERR_SHAPE also where the shape is not one that it is made for: then the caller runs the operations. */

/* hc_post, then the collapse of hc_mix, then rms_norm, then quant:
 *   x'[b] = post[b]*f + sum_a comb[a][b]*x[a], in place in x      (f.data NULL: x stays as it is)
 *   z = sum_m pre_in[m]*x'[m]                                     (z.data NULL: not kept)
 *   out = rms_norm(z, weight, eps)                                (out.data NULL: not kept)
 *   codes = QA(out)                                               (codes.data NULL: none)
 * The mixes of the next sub-layer are hc_mix's other half: hc_mix with z.data NULL. (3.3) */
typedef struct di_hc_step_args {
    di_act x, f;
    int32_t m;
    const float *post, *comb; /* of the sub-layer that made f */
    const float *pre_in;      /* of the sub-layer before it */
    const void *weight;       /* DI_BF16 [H] */
    float eps;
    di_act z, out, codes;
} di_hc_step_args;

/* rms_norm, then quant: out = rms_norm(x) (out.data NULL: not kept), codes = QA(out). */
typedef struct di_norm_quant_args {
    di_act x, out, codes;
    const void *weight;
    float eps;
} di_norm_quant_args;

/* gemm, then rope (cos not NULL) of its output's heads of head_dim, or quant (codes.data not NULL), of which gemm.out
 * is room for what is quantised and is not kept. */
typedef struct di_gemm_chain_args {
    di_gemm_args gemm;
    int32_t head_dim, n_freq;
    const float *cos, *sin; /* [n_rows, n_freq] */
    di_act codes;
} di_gemm_chain_args;

/* attention, then quant: codes = QA(attention.out), which is not kept. */
typedef struct di_attention_quant_args {
    di_attention_args attention;
    di_act codes;
} di_attention_quant_args;

/* rms_norm (weight NULL: none), rope with one head, then kv_encode into records, or page_store into entries where
 * records is NULL. x stays as it is; out, the rotated rows, is kept where out.data is not NULL. */
typedef struct di_key_store_args {
    di_act x, out;
    const void *weight;
    float eps;
    int32_t n_freq;
    const float *cos, *sin; /* [n_rows, n_freq] */
    di_kv_format format;    /* of records; entries have dst's */
    uint8_t *records;
    const di_rows *rows;
    di_entries entries; /* x has their rows */
    di_paged dst;
} di_key_store_args;

/* ---- tokens that stay on the device (optional) ---------------------------------------------------------------------
 */

/* Tokens that an operation drew become the input of the forward behind it, before the host knows them: for each row
 * with from[i] >= 0, ids[i] = tokens[from[i]] and grams[i][0] is its class; where it has none, all of grams[i] is the
 * pad class. Other rows stay as they are. (3.2.4) */
typedef struct di_feed_args {
    const int32_t *from, *tokens; /* [n], [any] */
    int32_t n, n_gram;            /* n_gram 0: no n-grams */
    const int32_t *token_map;     /* [n_map] class of an id, or -1; NULL: the id itself */
    int64_t n_map;                /* ids from here on have no class */
    int32_t pad;                  /* class */
    int32_t *ids, *grams;         /* [n], [n, n_gram] */
} di_feed_args;

/* ---- sampling (optional) ------------------------------------------------------------------------------------------
 *
 * One token from each row of logits by the rule of engine/sample/sample.c, with the same result in every bit: a
 * backend without this operation leaves it to that file, on rows that are downloaded. */

/* How the token is found among the survivors of masks, top-p, top-k and min-p; p are their probabilities. */
typedef enum di_sample_rule {
    DI_SAMPLE_NOISE, /* the largest logit/temperature + g(seed, position, token); at greedy the largest logit */
    DI_SAMPLE_DRAW,  /* the first whose cumulative p exceeds u times the total (spec/reject.c) */
    DI_SAMPLE_TEST,  /* `token`, a draft, if its test against ln_q holds by u_test; else by u from what p has above q */
    DI_SAMPLE_GIVEN  /* `token` */
} di_sample_rule;

enum {
    DI_SAMPLE_GREEDY = 1,     /* temperature is that of processed log-probabilities */
    DI_SAMPLE_LOGPROBS = 2,   /* of the token, and of the n_top best */
    DI_SAMPLE_PROCESSED = 4,  /* they are of the survivors; else of the model's logits behind the masks */
    DI_SAMPLE_UNLISTED = 8,   /* the blacklist is not applied (tokens of prompts) */
    DI_SAMPLE_FORBID_MAX = 32 /* entries of a row's list */
};

/* One row. The lists lie in the operation's words, *_at is where they begin. */
typedef struct di_sample_row {
    uint64_t seed, position;
    double temperature, top_p, min_p; /* top_p 1 and min_p 0: off */
    double u, u_test;
    const float *ln_q; /* [n_vocab] device memory: what the draft was drawn from */
    float *ln_p;       /* out [n_vocab] device memory, ln of p, by any rule but the given; NULL: not kept */
    int64_t top_at;    /* first of its entries of top */
    int32_t logits_row;
    int32_t rule, flags;
    int32_t token;                 /* given, or the draft */
    int32_t top_k;                 /* 0: off */
    int32_t n_top;                 /* entries of top */
    int32_t mask_at;               /* bit t of the words: token t is allowed; -1: all are */
    int32_t forbid_at, n_forbid;   /* ids in the vocabulary that are not allowed */
    int32_t bias_at, n_bias;       /* pairs of id and value (float bits); those of one id side by side, in order */
    int32_t history_at, n_history; /* pairs: id, bit 31 set: it is in the prompt; times in the output. Ids differ */
    int32_t drafts_at, n_drafts;   /* ids that count as output too, bit 31 set: the history has the id */
    int32_t changed_at;            /* rows with bias, history or drafts are numbered from 0; -1: none of them */
    float presence, frequency, repetition;
} di_sample_row;

typedef enum di_sample_status {
    DI_SAMPLE_OK,
    DI_SAMPLE_NOTHING_ALLOWED, /* and no token is given */
    DI_SAMPLE_NOT_FINITE       /* logits with NaN or +infinity; a given token without log-probabilities is not tried */
} di_sample_status;

typedef struct di_sample_result {
    int32_t token;
    int32_t status; /* with another than OK nothing else is defined but the token: 0 */
    float logprob;
    float distance; /* of p and q, where a draft was tested; else 0 */
} di_sample_result;

typedef struct di_sample_top {
    int32_t token; /* -1: there are no more tokens with a probability */
    float logprob;
} di_sample_top;

/* All arrays but `plan` are device memory. */
typedef struct di_sample_rows_args {
    const float *logits; /* [*, n_vocab] */
    int64_t n_vocab;
    int32_t n_rows;
    const di_sample_row *rows;
    const di_sample_row *plan; /* the rows once more, in host memory: they decide what is launched */
    const uint32_t *words;
    const uint32_t *blacklist; /* bit t: token t is not allowed; NULL: none */
    di_sample_result *results; /* out [n_rows] */
    int32_t *tokens;           /* out [n_rows]: the tokens alone, for the operations that read them next; may be NULL */
    di_sample_top *top;        /* out, where rows ask for it */
} di_sample_rows_args;

/* X(operation): the argument struct of operation `f` is di_<f>_args. */
#define DI_OPS_LIST(X)                                                                                                 \
    X(embed)                                                                                                           \
    X(rms_norm)                                                                                                        \
    X(quant)                                                                                                           \
    X(gemm)                                                                                                            \
    X(rope_table)                                                                                                      \
    X(rope)                                                                                                            \
    X(hc_mix)                                                                                                          \
    X(hc_post)                                                                                                         \
    X(stream_mean)                                                                                                     \
    X(gather)                                                                                                          \
    X(engram_hash)                                                                                                     \
    X(engram_gather)                                                                                                   \
    X(engram_gate)                                                                                                     \
    X(kv_encode)                                                                                                       \
    X(ring_store)                                                                                                      \
    X(compress_pool)                                                                                                   \
    X(page_store)                                                                                                      \
    X(index_select)                                                                                                    \
    X(attention)                                                                                                       \
    X(moe_route)                                                                                                       \
    X(moe)                                                                                                             \
    X(confidence)

/* Entries that a backend may leave NULL: whoever wants them has another way. */
#define DI_OPS_OPTIONAL_LIST(X)                                                                                        \
    X(hc_step) X(norm_quant) X(gemm_chain) X(attention_quant) X(key_store) X(feed) X(sample_rows)

/* An entry may be NULL while a backend grows; di_backend_find names what is missing. DI_ERR_SHAPE for arguments that
 * don't fit together or exceed the reserved limits. */
typedef struct di_ops {
    uint32_t abi, size; /* DI_BACKEND_ABI, sizeof(di_ops) */
    const char *name;
#define DI_OPS_FIELD(f) di_status (*f)(di_stream * stream, const di_##f##_args *args);
    DI_OPS_LIST(DI_OPS_FIELD)
    DI_OPS_OPTIONAL_LIST(DI_OPS_FIELD)
#undef DI_OPS_FIELD
} di_ops;

#endif
