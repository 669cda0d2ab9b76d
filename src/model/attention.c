/* The attention sub-layer: queries, window keys, indexer, sparse attention, grouped output projection
 * (model.md 3.5-3.8).
 *
 * Order inside a layer: queries, window keys, compressed entries of a kv source (compressor.c), selection of an index
 * source, attention, and only then the rings, since a chunk may overwrite slots that its first rows still read. */
#include <math.h>

#include "forward_internal.h"

static di_paged paged(const di_forward *fw, size_t offset, int32_t ratio, di_kv_format format, int32_t n_values) {
    return (di_paged){.pages = fw->pages,
                      .page_bytes = fw->model->layout.page_bytes,
                      .offset = offset,
                      .per_block = DI_PAGE_TOKENS / ratio,
                      .format = format,
                      .n_values = n_values};
}

static di_ring window_ring(const di_forward *fw, int32_t layer) {
    const di_layout *lay = &fw->model->layout;
    return (di_ring){fw->slots, lay->slot_bytes, lay->ring_offset[layer], lay->win_bytes, lay->ring_len};
}

/* out = x . W^T, of which RoPE turns heads of head_dim. */
static di_status rotated(di_forward *fw, di_act x, const di_mat *w, int32_t head_dim, const di_row_set *rs,
                         bool compressed, di_act out) {
    const di_ops *ops = fw->model->backend.ops;
    di_rope_args rope = {.x = out,
                         .n_heads = (int32_t)(out.n_cols / head_dim),
                         .head_dim = head_dim,
                         .n_freq = fw->model->config.rope_dim / 2,
                         .cos = compressed ? rs->cos_compressed : rs->cos_window,
                         .sin = compressed ? rs->sin_compressed : rs->sin_window};
    if (ops->gemm_chain) {
        di_status st = ops->gemm_chain(fw->stream, &(di_gemm_chain_args){.gemm = {.x = x, .w = w, .out = out},
                                                                         .head_dim = head_dim,
                                                                         .n_freq = rope.n_freq,
                                                                         .cos = rope.cos,
                                                                         .sin = rope.sin});
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(di_linear(fw, x, w, out));
    return ops->rope(fw->stream, &rope);
}

/* q [n, A*D] with RoPE, and the quantised low-rank query that the indexer shares. */
static di_status queries(di_forward *fw, int32_t layer, const di_row_set *rs, bool compressed, di_act xq, di_act *qrq,
                         di_act *q) {
    const di_config *c = &fw->model->config;
    const di_block_weights *w = &fw->model->weights.blocks[layer];
    int64_t n = rs->rows.n_rows;
    di_act qa = di_act_of(fw, fw->ws.qa, n, c->q_rank), qr = di_act_of(fw, fw->ws.qr, n, c->q_rank);
    DI_TRY(di_linear(fw, xq, &w->wq_a, qa));
    DI_TRY(di_norm_quantised(fw, qa, w->q_norm, qr, fw->ws.qrq, fw->ws.qrq_scale, qrq));
    *q = di_act_of(fw, fw->ws.q, n, (int64_t)c->n_heads * c->head_dim);
    return rotated(fw, *qrq, &w->wq_b, c->head_dim, rs, compressed, *q);
}

di_status di_block_window_keys(di_forward *fw, int32_t layer, const di_row_set *rs, bool compressed, di_act xq) {
    const di_config *c = &fw->model->config;
    const di_block_weights *w = &fw->model->weights.blocks[layer];
    const di_ops *ops = fw->model->backend.ops;
    int64_t n = rs->rows.n_rows;
    di_act kv = di_act_of(fw, fw->ws.kv, n, c->head_dim), kvn = di_act_of(fw, fw->ws.kvn, n, c->head_dim);
    char name[24];
    di_layer_name(fw, layer, name);
    DI_TRY(di_linear(fw, xq, &w->wkv, kv));
    if (ops->key_store && !fw->tap) {
        di_status st = ops->key_store(fw->stream, &(di_key_store_args){
                                                      .x = kv,
                                                      .weight = w->kv_norm,
                                                      .eps = c->rms_eps,
                                                      .n_freq = c->rope_dim / 2,
                                                      .cos = compressed ? rs->cos_compressed : rs->cos_window,
                                                      .sin = compressed ? rs->sin_compressed : rs->sin_window,
                                                      .format = fw->model->layout.win_format,
                                                      .records = fw->ws.records,
                                                  });
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(di_norm(fw, kv, w->kv_norm, kvn));
    DI_TRY(ops->rope(fw->stream, &(di_rope_args){.x = kvn,
                                                 .n_heads = 1,
                                                 .head_dim = c->head_dim,
                                                 .n_freq = c->rope_dim / 2,
                                                 .cos = compressed ? rs->cos_compressed : rs->cos_window,
                                                 .sin = compressed ? rs->sin_compressed : rs->sin_window}));
    DI_TRY(di_show(fw, name, "window_kv_raw", kvn.dtype, n, c->head_dim, kvn.data));
    DI_TRY(ops->kv_encode(
        fw->stream, &(di_kv_encode_args){.x = kvn, .format = fw->model->layout.win_format, .records = fw->ws.records}));
    return di_show(fw, name, "window_records", DI_U8, n, (int64_t)fw->model->layout.win_bytes, fw->ws.records);
}

di_status di_block_window_store(di_forward *fw, int32_t layer, int32_t set) {
    const di_ops *ops = fw->model->backend.ops;
    const di_row_set *rs = &fw->set[set];
    di_ring_store_args args = {
        .rows = &rs->rows, .records = fw->ws.records, .store_from = rs->store_from, .ring = window_ring(fw, layer)};
    DI_TRY(ops->ring_store(fw->stream, &args));
    if (!fw->n_snapshots || (set && fw->is_replay)) /* without replay both sets have the same rows */
        return DI_OK;
    di_rows rows = fw->snap.rows;
    args.rows = &rows;
    args.store_from = fw->snap.store_from;
    for (int32_t pass = 0; pass < di_snapshot_passes(&fw->model->config); pass++, rows.seq += fw->ml.n_rows)
        DI_TRY(ops->ring_store(fw->stream, &args));
    return DI_OK;
}

static di_act index_weight(const di_forward *fw, int64_t n_rows) {
    return di_act_of(fw, fw->ws.iw, n_rows, fw->model->config.index_heads);
}

/* Scores the visible entries of the key source, by index_weight, and keeps the best; ws.idx serves the layers of the
 * group after it. */
static di_status select_entries(di_forward *fw, int32_t layer, const di_row_set *rs, di_act qrq) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_block_weights *w = &mo->weights.blocks[layer];
    const di_ops *ops = mo->backend.ops;
    int64_t n = rs->rows.n_rows;
    int32_t ratio = c->ratio[layer], keys = c->index_k_source[layer];
    di_act iq = di_act_of(fw, fw->ws.iq, n, (int64_t)c->index_heads * c->index_dim);
    di_act iw = index_weight(fw, n);
    char name[24];
    di_layer_name(fw, layer, name);
    DI_TRY(rotated(fw, qrq, &w->ix_wq_b, c->index_dim, rs, true, iq));
    DI_TRY(di_show(fw, name, "index_q_raw", iq.dtype, n, iq.n_cols, iq.data));
    DI_TRY(di_show(fw, name, "index_weight", iw.dtype, n, iw.n_cols, iw.data));
    bool source = layer == c->candidate_layer, inside = c->candidate_layer >= 0 && layer > c->candidate_layer;
    DI_TRY(ops->index_select(fw->stream, &(di_index_select_args){.rows = &rs->rows,
                                                                 .q = iq,
                                                                 .w = iw,
                                                                 .n_heads = c->index_heads,
                                                                 .dim = c->index_dim,
                                                                 .ratio = ratio,
                                                                 .keys = paged(fw, mo->layout.index_offset[keys], ratio,
                                                                               mo->layout.index_format, c->index_dim),
                                                                 .round_bf16 = mo->numerics == DI_NUMERICS_FAITHFUL,
                                                                 .topk = c->index_topk,
                                                                 .idx = fw->ws.idx,
                                                                 .cand_block = c->candidate_block,
                                                                 .n_cand = source || inside ? c->candidate_blocks : 0,
                                                                 .cand_in = inside ? fw->ws.cand : NULL,
                                                                 .cand_out = source ? fw->ws.cand : NULL,
                                                                 .scores = fw->tap ? fw->tap_scores : NULL,
                                                                 .scores_stride = fw->tap_scores_stride}));
    if (fw->tap)
        DI_TRY(di_show(fw, name, "index_score", DI_F32, n, fw->tap_scores_stride, fw->tap_scores));
    if (source)
        DI_TRY(di_show(fw, name, "candidate_blocks", DI_I32, n, c->candidate_blocks, fw->ws.cand));
    return di_show(fw, name, "index_selected", DI_I32, n, c->index_topk, fw->ws.idx);
}

/* QA(wo_a . oq), oq in G groups of heads. */
static di_status project_groups(di_forward *fw, const di_block_weights *w, di_act oq, di_act *yq) {
    const di_config *c = &fw->model->config;
    const di_ops *ops = fw->model->backend.ops;
    di_gemm_args args = {.x = oq,
                         .w = &w->wo_a,
                         .n_groups = c->o_groups,
                         .out = di_act_f32(fw->ws.y, oq.n_rows, (int64_t)c->o_groups * c->o_rank)};
    if (ops->gemm_chain && fw->model->numerics == DI_NUMERICS_FAITHFUL) {
        *yq = di_codes_of(args.out, fw->ws.yq, fw->ws.yq_scale);
        di_status st = ops->gemm_chain(fw->stream, &(di_gemm_chain_args){.gemm = args, .codes = *yq});
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(ops->gemm(fw->stream, &args));
    return di_act_quant(fw, args.out, fw->ws.yq, fw->ws.yq_scale, yq);
}

/* f = wo_b . QA(wo_a . oq). */
static di_status project_out(di_forward *fw, int32_t layer, di_act oq, di_act f) {
    const di_block_weights *w = &fw->model->weights.blocks[layer];
    di_act yq;
    DI_TRY(project_groups(fw, w, oq, &yq));
    return di_linear(fw, yq, &w->wo_b, f);
}

/* *oq = QA(attention). */
static di_status attend(di_forward *fw, int32_t layer, const di_row_set *rs, bool compressed, bool sparse, di_act q,
                        di_act *oq) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_ops *ops = mo->backend.ops;
    di_act o = di_act_of(fw, fw->ws.o, q.n_rows, q.n_cols);
    di_attention_args args = {.rows = &rs->rows,
                              .q = q,
                              .n_heads = c->n_heads,
                              .head_dim = c->head_dim,
                              .win_format = mo->layout.win_format,
                              .records = fw->ws.records,
                              .ring = window_ring(fw, layer),
                              .sink = mo->weights.blocks[layer].sink,
                              .scale = (float)(1.0 / sqrt((double)c->head_dim)),
                              .cos = compressed ? rs->cos_compressed : rs->cos_window,
                              .sin = compressed ? rs->sin_compressed : rs->sin_window,
                              .n_freq = c->rope_dim / 2,
                              .out = o};
    if (sparse) {
        int32_t src = c->kv_source[layer];
        args.idx = fw->ws.idx;
        args.topk = c->index_topk;
        args.main = paged(fw, mo->layout.main_offset[src], c->ratio[layer], mo->layout.main_format, c->head_dim);
    }
    if (ops->attention_quant && mo->numerics == DI_NUMERICS_FAITHFUL) {
        *oq = di_codes_of(o, fw->ws.oq, fw->ws.oq_scale);
        di_status st = ops->attention_quant(fw->stream, &(di_attention_quant_args){.attention = args, .codes = *oq});
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(ops->attention(fw->stream, &args));
    return di_act_quant(fw, o, fw->ws.oq, fw->ws.oq_scale, oq);
}

/* What attention needs that does not come from queries: window keys, the entries of a kv source, the weights of an
 * index source's heads. */
static di_status keys(di_forward *fw, int32_t layer, const di_row_set *rs, bool has_entries, di_act x, di_act xq) {
    const di_config *c = &fw->model->config;
    DI_TRY(di_block_window_keys(fw, layer, rs, c->ratio[layer] > 0, xq));
    if (has_entries)
        DI_TRY(di_block_compress(fw, layer, x));
    return di_config_is_index_source(c, layer)
               ? di_linear(fw, x, &fw->model->weights.blocks[layer].ix_weights, index_weight(fw, x.n_rows))
               : DI_OK;
}

di_status di_block_attention(di_forward *fw, int32_t layer, int32_t set, di_act x, bool compressed_done, di_act f) {
    const di_config *c = &fw->model->config;
    const di_row_set *rs = &fw->set[set];
    bool sparse = c->ratio[layer] > 0, has_entries = di_config_is_kv_source(c, layer) && !compressed_done;
    bool is_more = fw->has_codes; /* else the codes are made first */
    di_act xq, qrq, q, oq;
    DI_TRY(di_input_quant(fw, x, &xq));
    DI_BESIDE(fw, is_more, keys(fw, layer, rs, has_entries, x, xq));
    DI_TRY(queries(fw, layer, rs, sparse, xq, &qrq, &q));
    DI_TRY(di_side_join(fw));
    if (di_config_is_index_source(c, layer))
        DI_TRY(select_entries(fw, layer, rs, qrq));
    DI_TRY(attend(fw, layer, rs, sparse, sparse, q, &oq));
    DI_BESIDE(fw, false, di_block_window_store(fw, layer, set));
    return project_out(fw, layer, oq, f);
}

di_status di_block_draft_attention(di_forward *fw, int32_t layer, di_act x, di_act f) {
    const di_row_set *rs = &fw->set[0];
    bool is_more = fw->has_codes;
    di_act xq, qrq, q, oq;
    DI_TRY(di_input_quant(fw, x, &xq));
    DI_BESIDE(fw, is_more, di_block_window_keys(fw, layer, rs, false, xq));
    DI_TRY(queries(fw, layer, rs, false, xq, &qrq, &q));
    DI_TRY(di_side_join(fw));
    DI_TRY(attend(fw, layer, rs, false, false, q, &oq));
    return project_out(fw, layer, oq, f);
}
