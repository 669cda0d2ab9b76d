/* The compressor of a kv source: latents of tokens or of pairs of tokens, stored as compressed entries and index keys
 * (model.md 3.6, 3.7).
 *
 * With ratio 2 a pair closes at its odd position; the partner may lie in an earlier forward, then its gate scores and
 * latent come from the compressor ring of the state slot. Runs for all rows of the forward, also for those that bounded
 * replay drops afterwards; rows whose entries are in the pages already (page_from) serve as partners alone. */
#include "forward_internal.h"

/* Pools the pairs that close in this forward into lat, then keeps the newest rows for later pairs. */
static di_status pool_pairs(di_forward *fw, int32_t layer, di_act x, di_act lat) {
    const di_model *mo = fw->model;
    const di_block_weights *w = &mo->weights.blocks[layer];
    const di_rows *rows = &fw->set[0].rows;
    int64_t d = mo->config.head_dim;
    di_act gate = {.dtype = DI_F32, .n_rows = rows->n_rows, .n_cols = d, .stride = 2 * d, .data = fw->ws.cg};
    di_act latent = gate;
    latent.data = fw->ws.cg + d;
    di_ring ring = {fw->slots, mo->layout.slot_bytes, mo->layout.pair_offset[layer], mo->layout.pair_bytes,
                    mo->layout.pair_ring_len};
    DI_TRY(di_linear(fw, x, &w->c_wgate, gate));
    DI_TRY(di_linear(fw, x, &w->c_wkv, latent));
    if (fw->entries[2].n)
        DI_TRY(mo->backend.ops->compress_pool(
            fw->stream, &(di_compress_pool_args){
                            .rows = rows, .entries = fw->entries[2], .cg = fw->ws.cg, .ring = ring, .out = lat}));
    return mo->backend.ops->ring_store(fw->stream, &(di_ring_store_args){.rows = rows,
                                                                         .records = (const uint8_t *)fw->ws.cg,
                                                                         .store_from = fw->pair_store_from,
                                                                         .ring = ring});
}

/* Rotates and stores entries: rows of x, normed first where weight is not NULL (then x is left as it is and `rotated`
 * has room for the result). */
typedef struct stored {
    di_act x, rotated;
    const uint16_t *weight;
    const float *cos, *sin;
    size_t offset;
    di_kv_format format;
    const char *name; /* of what a tap sees */
} stored;

static di_status store(di_forward *fw, int32_t layer, di_entries entries, const stored *s) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_ops *ops = mo->backend.ops;
    int32_t n_values = (int32_t)s->x.n_cols;
    di_paged dst = {fw->pages, mo->layout.page_bytes, s->offset, DI_PAGE_TOKENS / c->ratio[layer], s->format, n_values};
    if (ops->key_store && !fw->tap) {
        di_status st = ops->key_store(fw->stream, &(di_key_store_args){.x = s->x,
                                                                       .weight = s->weight,
                                                                       .eps = c->rms_eps,
                                                                       .n_freq = c->rope_dim / 2,
                                                                       .cos = s->cos,
                                                                       .sin = s->sin,
                                                                       .rows = &fw->set[0].rows,
                                                                       .entries = entries,
                                                                       .dst = dst});
        if (st != DI_ERR_SHAPE)
            return st;
    }
    di_act x = s->x;
    char name[24];
    di_layer_name(fw, layer, name);
    if (s->weight) {
        x = s->rotated;
        DI_TRY(di_norm(fw, s->x, s->weight, x));
    }
    DI_TRY(ops->rope(
        fw->stream,
        &(di_rope_args){
            .x = x, .n_heads = 1, .head_dim = n_values, .n_freq = c->rope_dim / 2, .cos = s->cos, .sin = s->sin}));
    DI_TRY(di_show(fw, name, s->name, x.dtype, x.n_rows, x.n_cols, x.data));
    return ops->page_store(fw->stream,
                           &(di_page_store_args){.rows = &fw->set[0].rows, .entries = entries, .x = x, .dst = dst});
}

/* The rows of x that make an entry. x was made from ws.z, which is free again. */
static di_status entry_rows(di_forward *fw, di_entries entries, di_act x, di_act *out) {
    *out = di_act_of(fw, fw->ws.z, entries.n, x.n_cols);
    return fw->model->backend.ops->gather(fw->stream,
                                          &(di_gather_args){.x = x.data,
                                                            .out = out->data,
                                                            .idx = entries.row,
                                                            .n = entries.n,
                                                            .row_bytes = di_dtype_bytes(x.dtype, (size_t)x.n_cols)});
}

di_status di_block_compress(di_forward *fw, int32_t layer, di_act x) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_block_weights *w = &mo->weights.blocks[layer];
    int32_t ratio = c->ratio[layer];
    di_entries entries = fw->entries[ratio];
    bool is_whole = ratio == 1 && entries.n == x.n_rows; /* every row is an entry */
    di_act lat = di_act_of(fw, fw->ws.lat, entries.n, c->head_dim),
           n = di_act_of(fw, fw->ws.latn, entries.n, c->head_dim);
    const float *cosv = is_whole ? fw->set[0].cos_compressed : fw->ws.cos_entries[ratio];
    const float *sinv = is_whole ? fw->set[0].sin_compressed : fw->ws.sin_entries[ratio];
    if (ratio == 2)
        DI_TRY(pool_pairs(fw, layer, x, lat));
    if (!entries.n)
        return DI_OK;
    if (ratio == 1) {
        di_act own = x;
        if (!is_whole)
            DI_TRY(entry_rows(fw, entries, x, &own));
        DI_TRY(di_linear(fw, own, &w->c_wkv, lat));
    }
    DI_TRY(di_norm(fw, lat, w->c_norm, n));
    if (di_config_is_index_k_source(c, layer)) { /* from the vector before RoPE */
        di_act k = di_act_of(fw, fw->ws.ikey, entries.n, c->index_dim);
        DI_TRY(di_linear(fw, n, &w->ix_wk, k));
        DI_TRY(store(fw, layer, entries,
                     &(stored){.x = k,
                               .rotated = di_act_of(fw, fw->ws.ikeyn, entries.n, c->index_dim),
                               .weight = w->ix_k_norm,
                               .cos = cosv,
                               .sin = sinv,
                               .offset = mo->layout.index_offset[layer],
                               .format = mo->layout.index_format,
                               .name = "index_k_raw"}));
    }
    return store(fw, layer, entries,
                 &(stored){.x = n,
                           .cos = cosv,
                           .sin = sinv,
                           .offset = mo->layout.main_offset[layer],
                           .format = mo->layout.main_format,
                           .name = "compressed_kv_raw"});
}
