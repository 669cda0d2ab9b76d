/* The workspace of a forward: every buffer that the blocks write, cut from one allocation.
 *
 * One function walks the buffers in order; with a NULL base it only counts, so that the memory plan and the allocation
 * can't disagree. Buffers are per row; they live for the whole forward, none is shared, so that a tap sees what the
 * block made. */
#include "forward_internal.h"

typedef struct cursor {
    uint8_t *base;
    size_t used;
} cursor;

static void *take(cursor *c, int64_t count, size_t size) {
    size_t at = c->used;
    c->used = DI_ROUND_UP(at + (size_t)count * size, (size_t)64);
    return c->base ? c->base + at : NULL;
}

static size_t take_meta(size_t *used, int64_t count, size_t size) {
    size_t at = *used;
    *used = DI_ROUND_UP(at + (size_t)count * size, (size_t)64);
    return at;
}

int64_t di_workspace_rows(const di_config *c, const di_model_options *opt) {
    int64_t draft = opt->with_draft ? (int64_t)opt->seqs_max * c->draft_block : 0;
    return DI_MAX(opt->rows_max, draft);
}

void di_meta_cut(di_meta_layout *m, const di_config *c, int64_t n, int64_t s, int64_t blocks_stride, int64_t n_logits) {
    size_t used = 0;
    m->n_rows = n;
    for (int k = 0; k < 2; k++) {
        m->set[k].pos = take_meta(&used, n, 4);
        m->set[k].seq = take_meta(&used, n, 4);
        m->set[k].win_lo = take_meta(&used, n, 4);
        m->set[k].win_hi = take_meta(&used, n, 4);
        m->set[k].row0 = take_meta(&used, s, 4);
        m->set[k].n = take_meta(&used, s, 4);
        m->set[k].pos0 = take_meta(&used, s, 4);
        m->set[k].slot = take_meta(&used, s, 4);
        m->set[k].store_from = take_meta(&used, s, 4);
    }
    m->pair_store_from = take_meta(&used, s, 4);
    m->ids = take_meta(&used, n, 4);
    m->fed_from = take_meta(&used, n, 4);
    m->grams = take_meta(&used, n * c->engram_ngram, 4);
    m->keep = take_meta(&used, n, 4);
    m->logit_rows = take_meta(&used, DI_MAX(n_logits, n), 4);
    for (int r = 1; r <= 2; r++) {
        m->ent_row[r] = take_meta(&used, n, 4);
        m->ent_seq[r] = take_meta(&used, n, 4);
        m->ent_idx[r] = take_meta(&used, n, 4);
        m->ent_pos[r] = take_meta(&used, n, 4);
    }
    int64_t n_snap = di_snapshots_max(n, s) + 1;
    m->snap.seq = take_meta(&used, di_snapshot_passes(c) * n, 4);
    m->snap.row0 = take_meta(&used, n_snap, 4);
    m->snap.n = take_meta(&used, n_snap, 4);
    m->snap.pos0 = take_meta(&used, n_snap, 4);
    m->snap.slot = take_meta(&used, n_snap, 4);
    m->snap.store_from = take_meta(&used, n_snap, 4);
    m->chain = take_meta(&used, s, 4);
    m->chain_from = take_meta(&used, s, 4);
    m->tap_slot = take_meta(&used, s, 4);
    m->tap_rows = take_meta(&used, n, 4);
    m->skip = take_meta(&used, 2 * n, 1);
    m->n_small = used;
    m->blocks = take_meta(&used, s * blocks_stride, 4);
    m->n_bytes = used;
}

size_t di_workspace_cut(di_workspace *ws, di_meta_layout *ml, uint8_t *base, const di_config *c,
                        const di_layout *layout, di_numerics numerics, const di_model_options *opt) {
    cursor at = {base, 0};
    size_t es = numerics == DI_NUMERICS_EXACT ? 4 : 2; /* bytes of an activation */
    int64_t n = di_workspace_rows(c, opt), h = c->hidden, m = c->hc_mult, half = c->rope_dim / 2;
    int64_t ad = (int64_t)c->n_heads * c->head_dim, go = (int64_t)c->o_groups * c->o_rank;
    int64_t aidi = (int64_t)c->index_heads * c->index_dim;
    int64_t k_max = DI_MAX(c->n_experts_tok, c->draft_experts_tok);
    int64_t eg_cols = c->n_engram ? (int64_t)(c->engram_ngram - 1) * c->engram_heads : 0;
    int64_t targets = c->n_draft_targets * h, blocks_stride = DI_CEIL_DIV(opt->tokens_max, DI_PAGE_TOKENS);

    di_meta_cut(ml, c, n, opt->seqs_max + 1, blocks_stride, opt->logits_max); /* one more fills a batch up */
    ws->meta = take(&at, (int64_t)ml->n_bytes, 1);
    for (int k = 0; k < 2; k++) {
        ws->cos_window[k] = take(&at, n * half, 4);
        ws->sin_window[k] = take(&at, n * half, 4);
        ws->cos_compressed[k] = take(&at, n * half, 4);
        ws->sin_compressed[k] = take(&at, n * half, 4);
    }
    for (int r = 1; r <= 2; r++) {
        ws->cos_entries[r] = take(&at, n * half, 4);
        ws->sin_entries[r] = take(&at, n * half, 4);
    }

    ws->trunk = take(&at, n * m * h, es);
    ws->trunk_kept = take(&at, n * m * h, es);
    ws->z = take(&at, n * h, es);
    ws->x = take(&at, n * h, es);
    ws->xq = take(&at, n * h, 1);
    ws->xq_scale = take(&at, n * h / 32, 1);
    for (int k = 0; k < 3; k++)
        ws->pre[k] = take(&at, n * m, 4);
    ws->one_hot = take(&at, n * m, 4);
    ws->post = take(&at, n * m, 4);
    ws->comb = take(&at, n * m * m, 4);

    ws->qa = take(&at, n * c->q_rank, es);
    ws->qr = take(&at, n * c->q_rank, es);
    ws->qrq = take(&at, n * c->q_rank, 1);
    ws->qrq_scale = take(&at, n * c->q_rank / 32, 1);
    ws->q = take(&at, n * ad, es);
    ws->kv = take(&at, n * c->head_dim, es);
    ws->kvn = take(&at, n * c->head_dim, es);
    ws->records = take(&at, n, layout->win_bytes);
    ws->cg = take(&at, n * 2 * c->head_dim, 4);
    ws->lat = take(&at, n * c->head_dim, es);
    ws->latn = take(&at, n * c->head_dim, es);
    ws->ikey = take(&at, n * c->index_dim, es);
    ws->ikeyn = take(&at, n * c->index_dim, es);
    ws->iq = take(&at, n * aidi, es);
    ws->iw = take(&at, n * c->index_heads, es);
    ws->idx = take(&at, n * c->index_topk, 4);
    ws->cand = take(&at, c->candidate_layer >= 0 ? n * c->candidate_blocks : 0, 4);
    ws->o = take(&at, n * ad, es);
    ws->oq = take(&at, n * ad, 1);
    ws->oq_scale = take(&at, n * ad / 32, 1);
    ws->y = take(&at, n * go, 4);
    ws->yq = take(&at, n * go, 1);
    ws->yq_scale = take(&at, n * go / 32, 1);
    ws->f = take(&at, n * h, es);
    ws->router_idx = take(&at, n * k_max, 4);
    ws->router_weight = take(&at, n * k_max, 4);

    ws->eg_rows = take(&at, n * eg_cols, 8);
    ws->eg_x = take(&at, n * eg_cols * c->engram_dim, numerics == DI_NUMERICS_EXACT ? 4 : 1);
    ws->eg_scale = take(&at, n * eg_cols * c->engram_dim / 32, 1);
    ws->eg_kv = take(&at, c->n_engram ? n * (m + 1) * h : 0, es);
    ws->eg_gate = take(&at, c->n_engram ? n * m : 0, 4);

    ws->logits = take(&at, opt->logits_max * c->vocab, 4);
    if (opt->with_draft) {
        int64_t s = opt->seqs_max;
        ws->taps = take(&at, n * targets, es);
        ws->tapsq = take(&at, n * targets, 1);
        ws->tapsq_scale = take(&at, n * targets / 32, 1);
        ws->hid = take(&at, n * h, es);
        ws->hid_norm = take(&at, n * h, es);
        ws->emb = take(&at, s * c->draft_rank, es);
        ws->base = take(&at, s * c->draft_block * c->vocab, 4);
        ws->draft_logits = take(&at, s * c->vocab, 4);
        ws->conf = take(&at, s * c->draft_block, 4);
    }
    return at.used;
}

void di_workspace_limits(di_limits *out, const di_config *c, const di_model_options *opt) {
    memset(out, 0, sizeof *out);
    int64_t h = c->hidden, m = c->hc_mult;
    int64_t ins[] = {m * h,
                     (int64_t)c->n_heads * c->head_dim,
                     (int64_t)c->o_groups * c->o_rank,
                     c->q_rank,
                     c->intermediate,
                     h + c->draft_rank,
                     c->n_draft_targets * h,
                     c->n_engram ? (int64_t)(c->engram_ngram - 1) * c->engram_heads * c->engram_dim : 0};
    int64_t outs[] = {(int64_t)c->n_heads * c->head_dim,      (m + 1) * h,     (int64_t)c->o_groups * c->o_rank,
                      (int64_t)c->index_heads * c->index_dim, c->intermediate, (m + 2) * m,
                      DI_MAX(c->n_experts, c->draft_experts)};
    for (size_t i = 0; i < DI_COUNT(ins); i++)
        out->n_in_max = DI_MAX(out->n_in_max, ins[i]);
    for (size_t i = 0; i < DI_COUNT(outs); i++)
        out->n_out_max = DI_MAX(out->n_out_max, outs[i]);
    out->rows_max = di_workspace_rows(c, opt);
    out->entries_max = opt->tokens_max;
    out->keys_max = c->window + DI_MAX(c->index_topk, c->draft_block);
    out->head_dim = c->head_dim;
    out->n_heads = c->n_heads;
    out->index_heads = c->index_heads;
    out->index_dim = c->index_dim;
    out->experts_max = DI_MAX(c->n_experts, c->draft_experts);
    out->experts_per_row_max = DI_MAX(c->n_experts_tok, c->draft_experts_tok);
    out->intermediate = c->intermediate;
    out->hidden_size = c->hidden;
    out->n_vocab = c->vocab;
    out->logits_max = DI_MAX(opt->logits_max, (int64_t)opt->seqs_max); /* of a draft step, one a sequence */
    out->candidate_blocks = c->candidate_layer >= 0 ? c->candidate_blocks : 0;
}
