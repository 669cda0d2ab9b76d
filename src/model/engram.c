/* Engram: hashed n-gram rows of a table, projected and added to the trunk through a gate (model.md 3.2.4, 3.2.5).
 *
 * The stored codes and scales of the rows are the quantised input of the projection as they are; nothing is
 * requantised. */
#include "forward_internal.h"

static di_act projected(const di_forward *fw, int64_t n_rows) {
    const di_config *c = &fw->model->config;
    return di_act_of(fw, fw->ws.eg_kv, n_rows, (int64_t)(c->hc_mult + 1) * c->hidden);
}

di_status di_block_engram_rows(di_forward *fw, int32_t layer, int32_t set) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_block_weights *w = &mo->weights.blocks[layer];
    const di_ops *ops = mo->backend.ops;
    const di_engram_consts *e = &mo->engram[di_config_engram_index(c, layer)];
    int64_t n = fw->set[set].rows.n_rows;
    int32_t cols = (c->engram_ngram - 1) * c->engram_heads;
    char name[24];
    di_layer_name(fw, layer, name);
    DI_TRY(ops->engram_hash(fw->stream,
                            &(di_engram_hash_args){.grams = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.grams),
                                                   .n = (int32_t)n,
                                                   .n_gram = c->engram_ngram,
                                                   .n_heads = c->engram_heads,
                                                   .mult = e->mult,
                                                   .primes = e->primes,
                                                   .offsets = e->offsets,
                                                   .rows = fw->ws.eg_rows}));
    DI_TRY(di_show(fw, name, "engram_rows", DI_I64, n, cols, fw->ws.eg_rows));
    int64_t width = (int64_t)cols * c->engram_dim;
    bool exact = mo->numerics == DI_NUMERICS_EXACT;
    di_act rows = {.dtype = exact ? DI_F32 : DI_F8_E4M3,
                   .n_rows = n,
                   .n_cols = width,
                   .stride = width,
                   .data = fw->ws.eg_x,
                   .scale = exact ? NULL : fw->ws.eg_scale};
    DI_TRY(ops->engram_gather(fw->stream, &(di_engram_gather_args){.codes = w->eg_codes,
                                                                   .scales = w->eg_scales,
                                                                   .n_table = w->eg_rows,
                                                                   .dim = c->engram_dim,
                                                                   .n_cols = cols,
                                                                   .rows = fw->ws.eg_rows,
                                                                   .out = rows}));
    return di_linear(fw, rows, &w->eg_wkv, projected(fw, n));
}

di_status di_block_engram(di_forward *fw, int32_t layer, di_act trunk) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    char name[24];
    di_layer_name(fw, layer, name);
    DI_TRY(di_trunk_settle(fw, trunk));
    DI_TRY(mo->backend.ops->engram_gate(fw->stream,
                                        &(di_engram_gate_args){.x = trunk,
                                                               .kv = projected(fw, trunk.n_rows),
                                                               .m = c->hc_mult,
                                                               .qk = mo->engram[di_config_engram_index(c, layer)].qk,
                                                               .skip = fw->skip_rows[0],
                                                               .eps = c->rms_eps,
                                                               .gate = fw->ws.eg_gate}));
    return di_show(fw, name, "engram_gate", DI_F32, trunk.n_rows, c->hc_mult, fw->ws.eg_gate);
}
