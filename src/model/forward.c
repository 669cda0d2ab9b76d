/* The forward pass: the layer loop of model.md 3.14 over a ragged batch, and what every block shares.
 *
 *   embed -> trunk [n, M, H]
 *   per layer:  + Engram | taps for the draft module | mix -> norm -> attention -> write | mix -> norm -> experts ->
 * write compact replay: at the first consumer layer the compressor still sees every row, then only the kept rows go on
 *   draft main keys from the taps | logits of the rows that asked for them
 */
#include "forward_internal.h"

/* ---- shared by the blocks ---- */

di_act di_act_of(const di_forward *fw, void *data, int64_t n_rows, int64_t n_cols) {
    return (di_act){.dtype = di_act_dtype(fw), .n_rows = n_rows, .n_cols = n_cols, .stride = n_cols, .data = data};
}

di_act di_act_f32(float *data, int64_t n_rows, int64_t n_cols) {
    return (di_act){.dtype = DI_F32, .n_rows = n_rows, .n_cols = n_cols, .stride = n_cols, .data = data};
}

di_act di_codes_of(di_act x, uint8_t *codes, uint8_t *scales) {
    return (di_act){.dtype = DI_F8_E4M3,
                    .n_rows = x.n_rows,
                    .n_cols = x.n_cols,
                    .stride = x.n_cols,
                    .data = codes,
                    .scale = scales};
}

di_status di_act_quant(di_forward *fw, di_act x, uint8_t *codes, uint8_t *scales, di_act *out) {
    if (fw->model->numerics == DI_NUMERICS_EXACT) {
        *out = x;
        return DI_OK;
    }
    *out = di_codes_of(x, codes, scales);
    return fw->model->backend.ops->quant(fw->stream, &(di_quant_args){.x = x, .out = *out});
}

di_status di_input_quant(di_forward *fw, di_act x, di_act *out) {
    if (!fw->has_codes)
        return di_act_quant(fw, x, fw->ws.xq, fw->ws.xq_scale, out);
    *out = di_codes_of(x, fw->ws.xq, fw->ws.xq_scale);
    return DI_OK;
}

di_status di_linear(di_forward *fw, di_act x, const di_mat *w, di_act out) {
    return fw->model->backend.ops->gemm(fw->stream, &(di_gemm_args){.x = x, .w = w, .out = out});
}

di_status di_norm(di_forward *fw, di_act x, const uint16_t *weight, di_act out) {
    return fw->model->backend.ops->rms_norm(
        fw->stream, &(di_rms_norm_args){.x = x, .out = out, .weight = weight, .eps = fw->model->config.rms_eps});
}

di_status di_norm_quantised(di_forward *fw, di_act x, const uint16_t *weight, di_act out, uint8_t *codes,
                            uint8_t *scales, di_act *quantised) {
    const di_model *mo = fw->model;
    if (mo->backend.ops->norm_quant && mo->numerics == DI_NUMERICS_FAITHFUL) {
        *quantised = di_codes_of(out, codes, scales);
        di_status st = mo->backend.ops->norm_quant(
            fw->stream, &(di_norm_quant_args){
                            .x = x, .out = out, .codes = *quantised, .weight = weight, .eps = mo->config.rms_eps});
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(di_norm(fw, x, weight, out));
    return di_act_quant(fw, out, codes, scales, quantised);
}

void di_layer_name(const di_forward *fw, int32_t layer, char out[24]) {
    int32_t n = fw->model->config.n_layers;
    if (layer < n)
        snprintf(out, 24, "layers.%d", layer);
    else
        snprintf(out, 24, "mtp.%d", layer - n);
}

/* The tap reads and may write a host copy; what it wrote goes back to the device. */
di_status di_show(di_forward *fw, const char *layer, const char *name, di_dtype dtype, int64_t n_rows, int64_t n_cols,
                  void *data) {
    if (!fw->tap)
        return DI_OK;
    const di_device_ops *dev = fw->model->backend.device;
    size_t n_bytes = (size_t)(n_rows * n_cols) * di_dtype_bytes(dtype, 1);
    if (n_bytes > fw->tap_host_bytes) {
        uint8_t *grown = realloc(fw->tap_host, n_bytes);
        if (!grown)
            return di_fail(fw->err, DI_ERR_MEMORY, "tap of '%s.%s': %zu bytes", layer, name, n_bytes);
        fw->tap_host = grown;
        fw->tap_host_bytes = n_bytes;
    }
    char full[64];
    snprintf(full, sizeof full, "%s%s%s", layer, *layer ? "." : "", name);
    DI_TRY(dev->stream_sync(fw->stream, fw->err));
    DI_TRY(dev->download(fw->model->device, fw->tap_host, data, n_bytes, fw->err));
    fw->tap(fw->tap_user, full, dtype, n_rows, n_cols, fw->tap_host);
    return dev->upload(fw->model->device, data, fw->tap_host, n_bytes, fw->err);
}

di_status di_side_begin(di_forward *fw, bool is_more) {
    if (!fw->side || fw->tap || fw->set[0].rows.n_rows > DI_SIDE_ROWS)
        return DI_OK;
    if (!is_more || !fw->has_side_work)
        DI_TRY(fw->model->backend.device->stream_follow(fw->side, fw->own, fw->err));
    fw->stream = fw->side;
    fw->has_side_work = true;
    return DI_OK;
}

void di_side_end(di_forward *fw) {
    fw->stream = fw->own;
}

di_status di_side_join(di_forward *fw) {
    if (!fw->has_side_work)
        return DI_OK;
    fw->has_side_work = false;
    return fw->model->backend.device->stream_follow(fw->own, fw->side, fw->err);
}

/* Operations carry no error object: where one refused its arguments, its name becomes the message. */
di_status di_refused(const di_forward *fw, di_status st) {
    if (!st || !fw->err || fw->err->message[0])
        return st;
    const char *op = fw->model->backend.device->stream_refused(fw->stream);
    return di_fail(fw->err, st, "operation '%s' of backend '%s' refused its arguments", op ? op : "?",
                   fw->model->backend.ops->name);
}

/* A buffer of mixes other than these two. */
static float *pre_other(const di_forward *fw, const float *a, const float *b) {
    int i = 0;
    while (fw->ws.pre[i] == a || fw->ws.pre[i] == b)
        i++;
    return fw->ws.pre[i];
}

static di_status gather(di_forward *fw, const void *x, void *out, size_t list, int32_t n, size_t row_bytes) {
    return fw->model->backend.ops->gather(fw->stream,
                                          &(di_gather_args){.x = x,
                                                            .out = out,
                                                            .idx = (const int32_t *)(const void *)(fw->ws.meta + list),
                                                            .n = n,
                                                            .row_bytes = row_bytes});
}

/* z = sum of pre*trunk, and the mixes of the next sub-layer when hc is not NULL. */
static di_status mix(di_forward *fw, di_act trunk, const float *pre_in, const di_hc_weights *hc, di_act z,
                     float *pre_out) {
    const di_config *c = &fw->model->config;
    di_hc_mix_args args = {.x = trunk,
                           .m = c->hc_mult,
                           .pre_in = pre_in,
                           .iters = c->hc_iters,
                           .eps = c->hc_eps,
                           .norm_eps = c->rms_eps,
                           .z = z};
    if (hc) {
        args.fn = hc->fn;
        args.scale = hc->scale;
        args.base = hc->base;
        args.pre_out = pre_out;
        args.post = fw->ws.post;
        args.comb = fw->ws.comb;
    }
    return fw->model->backend.ops->hc_mix(fw->stream, &args);
}

static di_status write_back(di_forward *fw, di_act trunk, di_act f) {
    return fw->model->backend.ops->hc_post(
        fw->stream, &(di_hc_post_args){
                        .x = trunk, .f = f, .m = fw->model->config.hc_mult, .post = fw->ws.post, .comb = fw->ws.comb});
}

di_status di_trunk_settle(di_forward *fw, di_act trunk) {
    if (!fw->has_pending)
        return DI_OK;
    fw->has_pending = false;
    return write_back(fw, trunk, di_act_of(fw, fw->ws.f, trunk.n_rows, fw->model->config.hidden));
}

/* A sub-layer's input x [n, H] from the trunk, and the mixes of its output. What the sub-layer before left is written
 * back on the way, in one pass over the trunk where the backend has it. */
static di_status enter_sublayer(di_forward *fw, di_act trunk, const float *pre_in, const di_hc_weights *hc,
                                const uint16_t *norm, di_act z, di_act x, float *pre_out) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    bool is_faithful = mo->numerics == DI_NUMERICS_FAITHFUL;
    fw->has_codes = false;
    if (mo->backend.ops->hc_step && !fw->tap) {
        di_hc_step_args args = {.x = trunk,
                                .f = di_act_of(fw, fw->has_pending ? fw->ws.f : NULL, trunk.n_rows, c->hidden),
                                .m = c->hc_mult,
                                .post = fw->ws.post,
                                .comb = fw->ws.comb,
                                .pre_in = pre_in,
                                .weight = norm,
                                .eps = c->rms_eps,
                                .out = x};
        if (is_faithful)
            args.codes = di_codes_of(x, fw->ws.xq, fw->ws.xq_scale);
        di_status st = mo->backend.ops->hc_step(fw->stream, &args);
        if (!st) {
            fw->has_pending = false;
            fw->has_codes = is_faithful;
            DI_BESIDE(fw, false, mix(fw, trunk, pre_in, hc, (di_act){0}, pre_out)); /* for the next sub-layer */
            return DI_OK;
        }
        if (st != DI_ERR_SHAPE)
            return st;
    }
    DI_TRY(di_trunk_settle(fw, trunk));
    DI_TRY(mix(fw, trunk, pre_in, hc, z, pre_out));
    return di_norm(fw, z, norm, x);
}

di_status di_block_run(di_forward *fw, int32_t layer, int32_t set, bool compressed_done, uint8_t *trunk_data,
                       float **pre) {
    const di_config *c = &fw->model->config;
    const di_block_weights *w = &fw->model->weights.blocks[layer];
    int64_t n = fw->set[set].rows.n_rows, m = c->hc_mult;
    di_act trunk = di_act_of(fw, trunk_data, n, m * c->hidden), z = di_act_of(fw, fw->ws.z, n, c->hidden);
    di_act x = di_act_of(fw, fw->ws.x, n, c->hidden), f = di_act_of(fw, fw->ws.f, n, c->hidden);
    float *between = pre_other(fw, *pre, NULL), *after = pre_other(fw, *pre, between);
    char name[24];
    di_layer_name(fw, layer, name);

    DI_TRY(enter_sublayer(fw, trunk, *pre, &w->hc_attn, w->attn_norm, z, x, between));
    DI_TRY(di_show(fw, name, "hc_attn_pre", DI_F32, n, m, between));
    DI_TRY(di_show(fw, name, "hc_attn_post", DI_F32, n, m, fw->ws.post));
    DI_TRY(di_show(fw, name, "hc_attn_comb", DI_F32, n, m * m, fw->ws.comb));
    DI_TRY(di_show(fw, name, "attn_in", x.dtype, n, c->hidden, x.data));
    if (layer < c->n_layers)
        DI_TRY(di_block_attention(fw, layer, set, x, compressed_done, f));
    else
        DI_TRY(di_block_draft_attention(fw, layer, x, f));
    DI_TRY(di_show(fw, name, "attn_out", f.dtype, n, c->hidden, f.data));
    fw->has_pending = true;

    DI_TRY(enter_sublayer(fw, trunk, between, &w->hc_ffn, w->ffn_norm, z, x, after));
    DI_TRY(di_show(fw, name, "ffn_in", x.dtype, n, c->hidden, x.data));
    if (layer + 1 < c->n_layers && di_config_engram_index(c, layer + 1) >= 0)
        DI_BESIDE(fw, true, di_block_engram_rows(fw, layer + 1, set));
    DI_TRY(di_block_ffn(fw, layer, set, x, f));
    DI_TRY(di_side_join(fw));
    DI_TRY(di_show(fw, name, "ffn_out", f.dtype, n, c->hidden, f.data));
    fw->has_pending = true;
    if (fw->tap)
        DI_TRY(di_trunk_settle(fw, trunk));
    DI_TRY(di_show(fw, name, "trunk", trunk.dtype, n, trunk.n_cols, trunk.data));
    DI_TRY(di_show(fw, name, "hc_ffn_pre", DI_F32, n, m, after));
    *pre = after;
    return DI_OK;
}

/* ---- the batch ---- */

static di_status rope_tables(di_forward *fw, int k) {
    const di_model *mo = fw->model;
    const di_row_set *rs = &fw->set[k];
    di_rope_table_args a = {.pos = rs->rows.pos, .n_rows = rs->rows.n_rows, .n_freq = mo->config.rope_dim / 2};
    a.inv_freq = mo->freq_window, a.cos = rs->cos_window, a.sin = rs->sin_window;
    DI_TRY(mo->backend.ops->rope_table(fw->stream, &a));
    a.inv_freq = mo->freq_compressed, a.cos = rs->cos_compressed, a.sin = rs->sin_compressed;
    return mo->backend.ops->rope_table(fw->stream, &a);
}

static di_status entry_tables(di_forward *fw, int32_t ratio) {
    const di_model *mo = fw->model;
    if (!fw->entries[ratio].n)
        return DI_OK;
    return mo->backend.ops->rope_table(
        fw->stream, &(di_rope_table_args){.pos = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.ent_pos[ratio]),
                                          .n_rows = fw->entries[ratio].n,
                                          .n_freq = mo->config.rope_dim / 2,
                                          .inv_freq = mo->freq_compressed,
                                          .cos = fw->ws.cos_entries[ratio],
                                          .sin = fw->ws.sin_entries[ratio]});
}

di_status di_forward_start(di_forward *fw, di_act trunk, float **pre) {
    const di_model *mo = fw->model;
    int32_t m = mo->config.hc_mult;
    DI_TRY(mo->backend.ops->embed(fw->stream,
                                  &(di_embed_args){.table = &mo->weights.embed,
                                                   .ids = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.ids),
                                                   .copies = m,
                                                   .out = trunk}));
    DI_TRY(di_show(fw, "", "embed", trunk.dtype, trunk.n_rows, trunk.n_cols, trunk.data));
    fw->has_pending = fw->has_codes = false;
    *pre = fw->ws.one_hot; /* the first sub-layer reads stream 0 alone */
    return DI_OK;
}

/* At the first consumer layer of a compact forward: every row feeds the compressor, then the kept rows go on alone. */
static di_status drop_rows(di_forward *fw, int32_t layer, uint8_t **trunk, float **pre) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    int64_t n = fw->set[0].rows.n_rows;
    di_act all = di_act_of(fw, *trunk, n, (int64_t)c->hc_mult * c->hidden);
    di_act z = di_act_of(fw, fw->ws.z, n, c->hidden), x = di_act_of(fw, fw->ws.x, n, c->hidden);
    DI_TRY(di_trunk_settle(fw, all));
    DI_TRY(mix(fw, all, *pre, NULL, z, NULL));
    DI_TRY(di_norm(fw, z, mo->weights.blocks[layer].attn_norm, x));
    DI_TRY(di_block_compress(fw, layer, x));
    int32_t kept = fw->set[1].rows.n_rows;
    float *to = pre_other(fw, *pre, NULL);
    DI_TRY(gather(fw, *trunk, fw->ws.trunk_kept, fw->ml.keep, kept, (size_t)all.n_cols * di_dtype_bytes(all.dtype, 1)));
    DI_TRY(gather(fw, *pre, to, fw->ml.keep, kept, (size_t)c->hc_mult * 4));
    *trunk = fw->ws.trunk_kept;
    *pre = to;
    return DI_OK;
}

static di_status take_tap(di_forward *fw, int32_t layer, di_act trunk) {
    const di_config *c = &fw->model->config;
    for (int32_t i = 0; i < c->n_draft_targets; i++) {
        if (c->draft_targets[i] != layer)
            continue;
        DI_TRY(di_trunk_settle(fw, trunk));
        int64_t width = (int64_t)c->n_draft_targets * c->hidden;
        di_act out = di_act_of(fw, fw->ws.taps, trunk.n_rows, c->hidden);
        out.stride = width;
        out.data = fw->ws.taps + (size_t)i * (size_t)c->hidden * di_dtype_bytes(out.dtype, 1);
        DI_TRY(fw->model->backend.ops->stream_mean(fw->stream,
                                                   &(di_stream_mean_args){.x = trunk, .m = c->hc_mult, .out = out}));
    }
    return DI_OK;
}

/* The row set that taps are of. */
static int32_t tap_set(const di_config *c) {
    return c->draft_targets[0] >= c->first_consumer;
}

/* Keeps the taps of the rows for a later di_draft_catch_up. */
static di_status keep_taps(di_forward *fw) {
    const di_layout *lay = &fw->model->layout;
    const di_row_set *rs = &fw->set[tap_set(&fw->model->config)];
    di_rows rows = rs->rows;
    rows.slot = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.tap_slot);
    return fw->model->backend.ops->ring_store(
        fw->stream, &(di_ring_store_args){.rows = &rows,
                                          .records = fw->ws.taps,
                                          .store_from = rs->store_from,
                                          .ring = {fw->taps, lay->tap_bytes, 0, lay->tap_record, lay->ring_len}});
}

/* Main-context keys of the draft blocks from the taps (dspark.md 4.3). */
static di_status draft_keys(di_forward *fw) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    int32_t set = tap_set(c);
    const di_row_set *rs = &fw->set[set];
    int64_t n = rs->rows.n_rows, width = (int64_t)c->n_draft_targets * c->hidden;
    di_act taps = di_act_of(fw, fw->ws.taps, n, width), tq, cq;
    di_act proj = di_act_of(fw, fw->ws.z, n, c->hidden), main = di_act_of(fw, fw->ws.x, n, c->hidden);
    DI_TRY(di_show(fw, "", "dspark_features", taps.dtype, n, width, taps.data));
    DI_TRY(di_act_quant(fw, taps, fw->ws.tapsq, fw->ws.tapsq_scale, &tq));
    DI_TRY(di_linear(fw, tq, &mo->weights.main_proj, proj));
    DI_TRY(di_norm_quantised(fw, proj, mo->weights.main_norm, main, fw->ws.xq, fw->ws.xq_scale, &cq));
    for (int32_t l = c->n_layers; l < c->n_layers + c->n_draft_layers; l++) {
        DI_TRY(di_block_window_keys(fw, l, rs, false, cq));
        DI_TRY(di_block_window_store(fw, l, set));
    }
    return DI_OK;
}

/* Head merge, norm and head of the rows that asked for logits (3.11). */
static di_status head(di_forward *fw, const uint8_t *trunk_data, const float *pre) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    int64_t n = fw->set[1].rows.n_rows;
    di_act trunk = di_act_of(fw, (void *)(uintptr_t)trunk_data, n, (int64_t)c->hc_mult * c->hidden);
    di_act z = di_act_of(fw, fw->ws.z, n, c->hidden);
    if (!fw->n_logits)
        return DI_OK;
    DI_TRY(di_trunk_settle(fw, trunk));
    DI_TRY(mix(fw, trunk, pre, NULL, z, NULL));
    DI_TRY(
        gather(fw, z.data, fw->ws.x, fw->ml.logit_rows, fw->n_logits, (size_t)c->hidden * di_dtype_bytes(z.dtype, 1)));
    di_act h = di_act_of(fw, fw->ws.x, fw->n_logits, c->hidden), hn = di_act_of(fw, fw->ws.f, fw->n_logits, c->hidden);
    DI_TRY(di_norm(fw, h, mo->weights.norm, hn));
    DI_TRY(di_show(fw, "", "final_norm", hn.dtype, hn.n_rows, hn.n_cols, hn.data));
    DI_TRY(di_linear(fw, hn, &mo->weights.head, di_act_f32(fw->ws.logits, fw->n_logits, c->vocab)));
    return di_show(fw, "", "logits", DI_F32, fw->n_logits, c->vocab, fw->ws.logits);
}

/* Index scores are shown through a buffer that only taps need. */
static di_status tap_begin(di_forward *fw, const di_batch *batch) {
    const di_model *mo = fw->model;
    fw->tap = batch->tap;
    fw->tap_user = batch->tap_user;
    if (!fw->tap)
        return DI_OK;
    int64_t longest = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++)
        longest = DI_MAX(longest, batch->seqs[s].pos0 + batch->seqs[s].n_rows);
    size_t n_bytes = (size_t)(fw->set[0].rows.n_rows * longest) * 4;
    fw->tap_scores_stride = longest;
    if (n_bytes <= fw->tap_scores_bytes)
        return DI_OK;
    void *grown;
    DI_TRY(mo->backend.device->alloc(mo->device, n_bytes, &grown, fw->err));
    mo->backend.device->free(mo->device, fw->tap_scores);
    fw->tap_scores = grown;
    fw->tap_scores_bytes = n_bytes;
    return DI_OK;
}

/* Tokens of rows that the host does not know yet. */
static di_status feed(di_forward *fw) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    uint8_t *meta = fw->ws.meta;
    return mo->backend.ops->feed(fw->stream,
                                 &(di_feed_args){.from = (const int32_t *)(const void *)(meta + fw->ml.fed_from),
                                                 .tokens = fw->fed,
                                                 .n = fw->set[0].rows.n_rows,
                                                 .n_gram = c->n_engram ? c->engram_ngram : 0,
                                                 .token_map = mo->token_map_device,
                                                 .n_map = mo->token_map ? mo->n_token_map : c->engram_classes,
                                                 .pad = c->n_engram ? di_engram_pad(mo) : 0,
                                                 .ids = (int32_t *)(void *)(meta + fw->ml.ids),
                                                 .grams = (int32_t *)(void *)(meta + fw->ml.grams)});
}

static di_status put_forward(di_forward *fw, int32_t index) {
    (void)index;
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    if (fw->fed)
        DI_TRY(feed(fw));
    DI_TRY(rope_tables(fw, 0));
    DI_TRY(rope_tables(fw, 1));
    if (fw->entries[1].n < fw->set[0].rows.n_rows) /* else an entry is a row, and so are its tables */
        DI_TRY(entry_tables(fw, 1));
    DI_TRY(entry_tables(fw, 2));
    uint8_t *trunk = fw->ws.trunk;
    float *pre;
    int32_t set = 0;
    DI_TRY(di_forward_start(fw, di_act_of(fw, trunk, fw->set[0].rows.n_rows, (int64_t)c->hc_mult * c->hidden), &pre));
    for (int32_t l = 0; l < c->n_layers; l++) {
        bool compressed_done = false;
        if (di_config_engram_index(c, l) >= 0) {
            if (l == 0) /* else the layer before has brought them */
                DI_TRY(di_block_engram_rows(fw, l, set));
            DI_TRY(di_block_engram(fw, l,
                                   di_act_of(fw, trunk, fw->set[set].rows.n_rows, (int64_t)c->hc_mult * c->hidden)));
        }
        if (l == c->first_consumer) {
            set = 1;
            if (fw->compact) {
                DI_TRY(drop_rows(fw, l, &trunk, &pre));
                compressed_done = true;
            }
        }
        if (mo->with_draft)
            DI_TRY(take_tap(fw, l, di_act_of(fw, trunk, fw->set[set].rows.n_rows, (int64_t)c->hc_mult * c->hidden)));
        DI_TRY(di_block_run(fw, l, set, compressed_done, trunk, &pre));
    }
    DI_TRY(head(fw, trunk, pre));
    if (mo->with_draft)
        DI_TRY(fw->taps ? keep_taps(fw) : draft_keys(fw));
    return DI_OK;
}

static di_status run(di_forward *fw, const di_batch *batch) {
    DI_TRY(di_forward_prepare(fw, batch));
    DI_TRY(tap_begin(fw, batch));
    return di_graph_run(fw, DI_RECORD_FORWARD, 0, put_forward);
}

di_stream *di_forward_stream(di_forward *fw) {
    return fw->stream;
}

int64_t di_forward_unrecorded(const di_forward *fw) {
    return fw->n_unrecorded;
}

di_status di_forward_wait(di_forward *fw, di_error *err) {
    return fw->model->backend.device->stream_sync(fw->stream, err);
}

di_status di_forward_run(di_forward *fw, const di_batch *batch, float **logits, di_error *err) {
    di_status st = di_forward_launch(fw, batch, logits, err);
    return st ? st : di_error_context(err, di_forward_wait(fw, err), "forward of %d sequences", batch->n_seqs);
}

di_status di_forward_launch(di_forward *fw, const di_batch *batch, float **logits, di_error *err) {
    fw->err = err;
    fw->fed = batch->fed;
    fw->pages = batch->pages;
    fw->slots = batch->slots;
    fw->taps = batch->taps;
    if (err)
        err->message[0] = 0;
    di_status st = run(fw, batch);
    *logits = fw->ws.logits;
    return di_error_context(err, di_refused(fw, st), "forward of %d sequences", batch->n_seqs);
}

static di_status catch_up(di_forward *fw, const di_batch *batch) {
    const di_model *mo = fw->model;
    int32_t set = tap_set(&mo->config);
    DI_TRY(di_forward_prepare(fw, batch));
    DI_TRY(rope_tables(fw, set));
    DI_TRY(gather(fw, fw->taps, fw->ws.taps, fw->ml.tap_rows, fw->set[set].rows.n_rows, mo->layout.tap_record));
    DI_TRY(draft_keys(fw));
    return mo->backend.device->stream_sync(fw->stream, fw->err);
}

di_status di_draft_catch_up(di_forward *fw, const di_batch *batch, di_error *err) {
    fw->err = err;
    fw->slots = batch->slots;
    fw->taps = batch->taps;
    fw->fed = NULL;
    fw->tap = NULL;
    if (!fw->model->with_draft || !batch->taps)
        return di_fail(err, DI_ERR_ARG, "keys of the draft module: it was not loaded, or nothing was put off");
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        if (batch->seqs[s].n_rows > fw->model->layout.ring_len || batch->seqs[s].n_snapshots > 0)
            return di_fail(err, DI_ERR_RANGE,
                           "sequence %d of the batch: keys of %d rows and %d snapshots, expected at most %d and none",
                           s, batch->seqs[s].n_rows, batch->seqs[s].n_snapshots, fw->model->layout.ring_len);
    }
    if (err)
        err->message[0] = 0;
    di_status st = catch_up(fw, batch);
    return di_error_context(err, di_refused(fw, st), "draft keys of %d sequences", batch->n_seqs);
}

di_status di_forward_sample(di_forward *fw, const di_sample_rows_args *args, di_error *err) {
    const di_backend *backend = &fw->model->backend;
    if (!backend->ops->sample_rows)
        return di_fail(err, DI_ERR_UNSUPPORTED, "drawing on the device: the backend leaves it to the host");
    fw->err = err;
    if (err)
        err->message[0] = 0;
    di_status st = backend->ops->sample_rows(fw->stream, args);
    return di_error_context(err, di_refused(fw, st), "drawing %d rows", args->n_rows);
}

di_status di_forward_copy_units(di_forward *fw, uint8_t *base, size_t unit_bytes, const di_copy *copies, int32_t n,
                                di_error *err) {
    const di_model *mo = fw->model;
    di_status st = DI_OK;
    for (int32_t i = 0; i < n; i++) {
        if (copies[i].dst < 0 || copies[i].src < 0)
            return di_fail(err, DI_ERR_RANGE, "copy %d of %d: unit %d to unit %d, expected ids from 0 on", i, n,
                           copies[i].src, copies[i].dst);
    }
    for (int32_t i = 0; i < n && !st; i++) {
        if (copies[i].dst != copies[i].src)
            st = mo->backend.device->stream_copy(fw->stream, base + (size_t)copies[i].dst * unit_bytes,
                                                 base + (size_t)copies[i].src * unit_bytes, unit_bytes, err);
    }
    return di_error_context(err, st, "copying %d units of %zu bytes", n, unit_bytes);
}
