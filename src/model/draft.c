/* The draft module's forward (dspark.md 4.4): one block of B rows per sequence through the mtp layers, then a Markov
 * chain of B steps that turns the rows' logits into dependent draft distributions.
 *
 * Rows of a round see the ring context up to the last certain position and all rows of their own block. The chain is
 * driven by the caller, who draws each draft, since drawing is sampling: on the host, or on the device, where a draft
 * is fed to the next step of the chain and the host waits for the round alone. Nothing of a round is stored in the
 * rings. */
#include "forward_internal.h"

static di_status put_begin(di_forward *fw, int32_t index) {
    (void)index;
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_ops *ops = mo->backend.ops;
    int64_t n = (int64_t)fw->draft_seqs * fw->draft_rows, m = c->hc_mult;
    size_t es = di_dtype_bytes(di_act_dtype(fw), 1);
    const di_row_set *rs = &fw->set[0];
    DI_TRY(ops->rope_table(fw->stream, &(di_rope_table_args){.pos = rs->rows.pos,
                                                             .n_rows = rs->rows.n_rows,
                                                             .n_freq = c->rope_dim / 2,
                                                             .inv_freq = mo->freq_window,
                                                             .cos = rs->cos_window,
                                                             .sin = rs->sin_window}));
    float *pre;
    di_act trunk = di_act_of(fw, fw->ws.trunk, n, m * c->hidden);
    DI_TRY(di_forward_start(fw, trunk, &pre));
    for (int32_t l = c->n_layers; l < c->n_layers + c->n_draft_layers; l++)
        DI_TRY(di_block_run(fw, l, 0, true, fw->ws.trunk, &pre));
    di_act z = di_act_of(fw, fw->ws.z, n, c->hidden);
    DI_TRY(di_trunk_settle(fw, trunk));
    DI_TRY(ops->hc_mix(fw->stream, &(di_hc_mix_args){.x = trunk, .m = c->hc_mult, .pre_in = pre, .z = z}));
    /* From here on rows are ordered by draft index, then sequence, so that a step of the chain reads one block. */
    DI_TRY(ops->gather(fw->stream, &(di_gather_args){.x = z.data,
                                                     .out = fw->ws.hid,
                                                     .idx = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.keep),
                                                     .n = (int32_t)n,
                                                     .row_bytes = (size_t)c->hidden * es}));
    di_act hid = di_act_of(fw, fw->ws.hid, n, c->hidden), norm = di_act_of(fw, fw->ws.hid_norm, n, c->hidden);
    DI_TRY(di_norm(fw, hid, mo->weights.draft_norm, norm));
    return di_linear(fw, norm, &mo->weights.head, di_act_f32(fw->ws.base, n, c->vocab));
}

static di_status begin(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows) {
    DI_TRY(di_draft_prepare(fw, seqs, n_seqs, n_rows));
    return di_graph_run(fw, DI_RECORD_DRAFT_BEGIN, 0, put_begin);
}

di_status di_draft_launch(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                          di_tap_fn tap, void *tap_user, di_error *err) {
    fw->err = err;
    fw->slots = slots;
    fw->tap = tap;
    fw->tap_user = tap_user;
    if (!fw->model->with_draft)
        return di_fail(err, DI_ERR_ARG, "a drafting round: the model was loaded without its draft module");
    if (err)
        err->message[0] = 0;
    di_status st = begin(fw, seqs, n_seqs, n_rows);
    return di_error_context(err, di_refused(fw, st), "drafting round of %d sequences", n_seqs);
}

di_status di_draft_begin(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                         di_tap_fn tap, void *tap_user, di_error *err) {
    di_status st = di_draft_launch(fw, seqs, n_seqs, n_rows, slots, tap, tap_user, err);
    return st ? st : di_forward_wait(fw, err);
}

static di_status put_next(di_forward *fw, int32_t i) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_ops *ops = mo->backend.ops;
    int64_t n = fw->draft_seqs;
    size_t es = di_dtype_bytes(di_act_dtype(fw), 1);
    int32_t *ids = (int32_t *)(void *)(fw->ws.meta + fw->ml.chain);
    di_act emb = di_act_of(fw, fw->ws.emb, n, c->draft_rank);
    di_act hid = di_act_of(fw, fw->ws.hid + (size_t)(i * n * c->hidden) * es, n, c->hidden);
    DI_TRY(ops->embed(fw->stream,
                      &(di_embed_args){.table = &mo->weights.markov_embed, .ids = ids, .copies = 1, .out = emb}));
    DI_TRY(ops->gemm(fw->stream, &(di_gemm_args){.x = emb,
                                                 .w = &mo->weights.markov_head,
                                                 .add = fw->ws.base + i * n * c->vocab,
                                                 .out = di_act_f32(fw->ws.draft_logits, n, c->vocab)}));
    return ops->confidence(
        fw->stream,
        &(di_confidence_args){
            .hid = hid, .emb = emb, .w = &mo->weights.confidence, .tau = 1.0f, .conf = fw->ws.conf + i * n});
}

/* Tokens from the host. */
static di_status give(di_forward *fw, const int32_t *prev) {
    int32_t *ids = (int32_t *)(void *)(fw->meta + fw->ml.chain);
    for (int32_t s = 0; s < fw->draft_seqs; s++)
        ids[s] = prev[s < fw->draft_given ? s : 0];
    size_t n_bytes = (size_t)fw->draft_seqs * 4;
    return fw->model->backend.device->stream_upload(fw->stream, fw->ws.meta + fw->ml.chain, ids, n_bytes, 1, n_bytes,
                                                    fw->err);
}

/* Tokens that are on the device. */
static di_status feed(di_forward *fw, const int32_t *tokens) {
    return fw->model->backend.ops->feed(
        fw->stream, &(di_feed_args){.from = (const int32_t *)(const void *)(fw->ws.meta + fw->ml.chain_from),
                                    .tokens = tokens,
                                    .n = fw->draft_seqs,
                                    .ids = (int32_t *)(void *)(fw->ws.meta + fw->ml.chain)});
}

static di_status check_step(di_forward *fw, int32_t i, di_error *err) {
    fw->err = err;
    if (err)
        err->message[0] = 0;
    if (i >= 0 && i < fw->draft_rows)
        return DI_OK;
    return di_fail(err, DI_ERR_RANGE, "draft step %d, the round has %d rows", i, fw->draft_rows);
}

static di_status run_step(di_forward *fw, int32_t i, di_status st, float **logits, float **conf) {
    if (!st)
        st = di_graph_run(fw, DI_RECORD_DRAFT_NEXT, i, put_next);
    *logits = fw->ws.draft_logits;
    *conf = fw->ws.conf + i * fw->draft_seqs;
    return di_error_context(fw->err, di_refused(fw, st), "draft step %d", i);
}

di_status di_draft_next(di_forward *fw, int32_t i, const int32_t *prev, float **logits, float **conf, di_error *err) {
    di_status st = check_step(fw, i, err);
    if (st)
        return st;
    st = run_step(fw, i, give(fw, prev), logits, conf);
    return st ? st : di_forward_wait(fw, err);
}

di_status di_draft_follow(di_forward *fw, int32_t i, const int32_t *tokens, float **logits, float **conf,
                          di_error *err) {
    di_status st = check_step(fw, i, err);
    if (st)
        return st;
    if (tokens && !fw->model->backend.ops->feed)
        return di_fail(err, DI_ERR_UNSUPPORTED, "draft step %d: the backend feeds no tokens on the device", i);
    return run_step(fw, i, tokens ? feed(fw, tokens) : DI_OK, logits, conf);
}
