/* Private to model/: the weight map and the cache layout. */
#ifndef DI_MODEL_INTERNAL_H
#define DI_MODEL_INTERNAL_H

#include "model.h"

/* ---- the tensors that a config implies (tensors.c) ---- */

/* Calls fn for every tensor of model.md section 2 (stored names without "model."), in a fixed order. fn returns a
 * status; the first that is not DI_OK stops and is returned. */
typedef struct di_tensor_spec {
    char name[112];
    di_dtype dtype;
    int32_t n_dims;
    int64_t shape[4];
    di_tensor_kind kind;
} di_tensor_spec;
typedef di_status (*di_tensor_spec_fn)(void *user, const di_tensor_spec *spec);
di_status di_tensors_each(const di_config *config, di_tensor_spec_fn fn, void *user);

/* ---- made-up weights (dummy.c) ---- */

/* Bytes [first, first + n) of tensor `spec` (dummy.md). Pure function of config, seed and name. */
void di_dummy_fill(const di_config *config, const di_tensor_spec *spec, size_t first, size_t n, uint8_t *out);
/* Makes all tensors in one anonymous mapping of *map_bytes and sets their data pointers; shape, dtype, name and size
 * are set by the caller. DI_ERR_MEMORY when less is available than needed. */
di_status di_dummy_make(const di_config *config, di_stored_tensor *tensors, size_t n_tensors,
                        const di_checkpoint_options *opt, void **map, size_t *map_bytes, di_error *err);

/* ---- weight map (weights.c) ---- */

typedef struct di_hc_weights {
    const float *fn, *scale, *base;
} di_hc_weights;

typedef struct di_block_weights {
    const uint16_t *attn_norm, *ffn_norm; /* BF16 */
    di_mat wq_a, wq_b, wkv, wo_a, wo_b;
    const uint16_t *q_norm, *kv_norm;
    const float *sink;
    di_hc_weights hc_attn, hc_ffn;
    di_mat gate;
    const float *gate_bias, *gate_bias_vl;
    di_expert shared;
    di_expert *experts; /* [n_experts], owned by the map */
    int32_t n_experts, n_experts_tok;
    void *expert_table; /* the device's own, owned by the model; NULL: it needs none */
    /* kv sources */
    di_mat c_wkv, c_wgate; /* c_wgate.data NULL for r = 1 */
    const uint16_t *c_norm;
    /* index sources */
    di_mat ix_wq_b, ix_weights;
    /* index-key sources */
    di_mat ix_wk;
    const uint16_t *ix_k_norm;
    /* Engram layers */
    const uint8_t *eg_codes, *eg_scales;
    int64_t eg_rows;
    di_mat eg_wkv;
    const uint16_t *eg_q, *eg_k; /* [M, H] */
} di_block_weights;

typedef struct di_weights {
    di_mat embed, head;
    const uint16_t *norm;
    di_block_weights *blocks; /* [n_layers + n_draft_layers] */
    /* draft module */
    di_mat main_proj;
    const uint16_t *main_norm, *draft_norm;
    di_mat markov_embed, markov_head, confidence;
} di_weights;

/* Fills the map with views into ckpt, or of `placed` (one pointer for each of its tensors; NULL: in place); memory of
 * its own arrays comes from arena. with_draft false leaves the draft part zeroed. */
di_status di_weights_bind(di_weights *out, const di_config *config, const di_checkpoint *ckpt, uint8_t *const *placed,
                          bool with_draft, di_arena *arena, di_error *err);

/* ---- cache layout (layout.c) ---- */

typedef struct di_layout {
    di_kv_format win_format, main_format, index_format;
    size_t page_bytes, slot_bytes;
    size_t index_offset[DI_LAYERS_MAX], main_offset[DI_LAYERS_MAX]; /* in the page; kv (index-key) sources only */
    size_t ring_offset[DI_LAYERS_MAX];                              /* in the slot; every layer, draft layers too */
    size_t pair_offset[DI_LAYERS_MAX];                              /* compressor ring; kv sources with r = 2 */
    int32_t ring_len, pair_ring_len;
    size_t win_bytes, pair_bytes; /* records */
    size_t tap_record, tap_bytes; /* taps of a row, and of a ring of them; 0 without the draft module */
} di_layout;
void di_layout_init(di_layout *out, const di_config *config, di_numerics numerics, bool with_draft);

#endif
