/* From a ragged batch to the arrays that the operations read: rows, windows, entries that close, n-gram windows.
 *
 * Everything is filled on the host in one block and sent in one copy. Two row sets exist: set 0 has every row and
 * serves the producer layers, set 1 serves the consumer layers, whose windows bounded replay clips and whose rows it
 * may drop (3.9). */
#include "forward_internal.h"

static int32_t *meta_i32(di_forward *fw, size_t offset) {
    return (int32_t *)(void *)(fw->meta + offset);
}

static void set_bind(di_forward *fw, int k, int32_t n_rows, int32_t n_seqs) {
    const uint8_t *d = fw->ws.meta;
    di_row_set *rs = &fw->set[k];
    const di_meta_layout *m = &fw->ml;
    rs->rows = (di_rows){
        .n_rows = n_rows,
        .n_seqs = n_seqs,
        .pos = (const int32_t *)(const void *)(d + m->set[k].pos),
        .seq = (const int32_t *)(const void *)(d + m->set[k].seq),
        .win_lo = (const int32_t *)(const void *)(d + m->set[k].win_lo),
        .win_hi = (const int32_t *)(const void *)(d + m->set[k].win_hi),
        .row0 = (const int32_t *)(const void *)(d + m->set[k].row0),
        .n = (const int32_t *)(const void *)(d + m->set[k].n),
        .pos0 = (const int32_t *)(const void *)(d + m->set[k].pos0),
        .slot = (const int32_t *)(const void *)(d + m->set[k].slot),
        .blocks = (const int32_t *)(const void *)(d + m->blocks),
        .blocks_stride = fw->blocks_stride,
    };
    rs->store_from = (const int32_t *)(const void *)(d + m->set[k].store_from);
    rs->cos_window = fw->ws.cos_window[k];
    rs->sin_window = fw->ws.sin_window[k];
    rs->cos_compressed = fw->ws.cos_compressed[k];
    rs->sin_compressed = fw->ws.sin_compressed[k];
}

/* Rising borders inside the rows can't be more than di_snapshots_max in all. */
static di_status check_snapshots(const di_forward *fw, int32_t s, const di_seq_rows *q) {
    int64_t before = q->pos0;
    for (int32_t k = 0; k < q->n_snapshots; k++) {
        int64_t at = q->snapshots[k].at;
        if (at <= before || at > q->pos0 + q->n_rows || at % DI_PAGE_TOKENS)
            return di_fail(fw->err, DI_ERR_RANGE,
                           "sequence %d of the batch: snapshot at position %lld, expected multiples of %d from %lld to "
                           "%lld, rising",
                           s, (long long)at, DI_PAGE_TOKENS, (long long)before + 1, (long long)q->pos0 + q->n_rows);
        if (q->snapshots[k].slot < 0 || q->snapshots[k].slot == q->slot)
            return di_fail(fw->err, DI_ERR_RANGE,
                           "sequence %d of the batch: snapshot into slot %d, expected a slot other than its own, %d", s,
                           q->snapshots[k].slot, q->slot);
        before = at;
    }
    return DI_OK;
}

static di_status check_seq(const di_forward *fw, const di_batch *batch, int32_t s) {
    const di_model *mo = fw->model;
    const di_seq_rows *q = &batch->seqs[s];
    if (q->n_rows < 1 || q->pos0 < 0 || q->pos0 + q->n_rows > mo->tokens_max)
        return di_fail(
            fw->err, DI_ERR_RANGE,
            "sequence %d of the batch: %d rows from position %lld, expected 1 or more rows within %lld positions", s,
            q->n_rows, (long long)q->pos0, (long long)mo->tokens_max);
    if (q->n_logits < 0 || q->n_logits > q->n_rows)
        return di_fail(fw->err, DI_ERR_RANGE, "sequence %d of the batch: logits of %d rows, it has %d", s, q->n_logits,
                       q->n_rows);
    if ((int64_t)q->n_blocks * DI_PAGE_TOKENS < q->pos0 + q->n_rows || q->n_blocks > fw->blocks_stride)
        return di_fail(fw->err, DI_ERR_RANGE, "sequence %d of the batch: %d KV blocks, expected %lld to %lld", s,
                       q->n_blocks, (long long)DI_CEIL_DIV(q->pos0 + q->n_rows, (int64_t)DI_PAGE_TOKENS),
                       (long long)fw->blocks_stride);
    bool is_fed = batch->fed && q->fed_from >= 0;
    if (is_fed && (q->n_rows != 1 || !mo->backend.ops->feed))
        return di_fail(fw->err, q->n_rows != 1 ? DI_ERR_RANGE : DI_ERR_UNSUPPORTED,
                       "sequence %d of the batch: its token comes from the device; expected one row, found %d, and a "
                       "backend that feeds it",
                       s, q->n_rows);
    for (int32_t i = 0; i < q->n_rows && !is_fed; i++) {
        int64_t p = q->pos0 + i;
        bool image = q->is_image && q->is_image[p];
        if (!image && (q->tokens[p] < 0 || q->tokens[p] >= mo->config.vocab))
            return di_fail(fw->err, DI_ERR_RANGE,
                           "sequence %d of the batch: token id %d at position %lld, expected 0 to %d", s, q->tokens[p],
                           (long long)p, mo->config.vocab - 1);
    }
    return check_snapshots(fw, s, q);
}

/* Bounded replay needs all that consumers read of dropped rows to be made at the first of them (3.9). */
static di_status check_replay(const di_forward *fw, const di_config *c) {
    for (int32_t l = c->first_consumer; l < c->n_layers; l++) {
        if (l > c->first_consumer && di_config_is_kv_source(c, l))
            return di_fail(fw->err, DI_ERR_UNSUPPORTED,
                           "bounded replay: layer %d owns compressed KV behind the first consumer layer %d", l,
                           c->first_consumer);
        if (di_config_engram_index(c, l) >= 0)
            return di_fail(fw->err, DI_ERR_UNSUPPORTED,
                           "bounded replay: layer %d has an Engram table, expected only layers before %d", l,
                           c->first_consumer);
    }
    return DI_OK;
}

/* Class of the token at position p, -1 for a position of an image span or an id that has no class. */
static int32_t class_at(const di_model *mo, const di_seq_rows *q, int64_t p) {
    if (q->is_image && q->is_image[p])
        return -1;
    int32_t t = q->tokens[p];
    if (t < 0)
        return -1;
    if (!mo->token_map)
        return t < mo->config.engram_classes ? t : -1;
    return t < mo->n_token_map ? mo->token_map[t] : -1;
}

/* grams [Ng]: classes of this token (which the device knows, where it is fed) and the ones before it; from the
 * sequence's start or an image on, the pad class (3.2.4). */
static void fill_grams(const di_model *mo, const di_seq_rows *q, int64_t p, bool is_fed, int32_t *grams) {
    const di_config *c = &mo->config;
    int32_t pad = di_engram_pad(mo);
    bool dead = false;
    grams[0] = pad;
    for (int32_t k = is_fed; k < c->engram_ngram; k++) {
        int32_t cls = !dead && p - k >= 0 ? class_at(mo, q, p - k) : -1;
        dead = dead || cls < 0;
        grams[k] = dead ? pad : cls;
    }
}

/* Fills row set k for one sequence: rows from position `first` on. */
static void fill_set(di_forward *fw, int k, int32_t s, const di_seq_rows *q, int64_t first, int64_t rect,
                     int64_t store_lo, int32_t *row) {
    const di_meta_layout *m = &fw->ml;
    int32_t w = fw->model->config.window;
    int64_t end = q->pos0 + q->n_rows;
    meta_i32(fw, m->set[k].row0)[s] = *row;
    meta_i32(fw, m->set[k].n)[s] = (int32_t)(end - first);
    meta_i32(fw, m->set[k].pos0)[s] = (int32_t)first;
    meta_i32(fw, m->set[k].slot)[s] = q->slot;
    meta_i32(fw, m->set[k].store_from)[s] = (int32_t)DI_MAX(store_lo, end - fw->model->layout.ring_len);
    for (int64_t p = first; p < end; p++, (*row)++) {
        int64_t lo = DI_MAX(DI_MAX(p - w + 1, (int64_t)0), DI_MAX(rect, q->valid_start));
        meta_i32(fw, m->set[k].pos)[*row] = (int32_t)p;
        meta_i32(fw, m->set[k].seq)[*row] = s;
        meta_i32(fw, m->set[k].win_lo)[*row] = (int32_t)lo;
        meta_i32(fw, m->set[k].win_hi)[*row] = (int32_t)(p + 1);
        fw->meta[m->skip + (size_t)k * (size_t)m->n_rows + (size_t)*row] = q->is_image && q->is_image[p];
    }
}

static void fill_entries(di_forward *fw, int32_t s, const di_seq_rows *q, int32_t row0) {
    const di_meta_layout *m = &fw->ml;
    for (int r = 1; r <= 2; r++) {
        for (int32_t i = 0; i < q->n_rows; i++) {
            int64_t p = q->pos0 + i;
            if ((p + 1) % r || p < q->page_from)
                continue;
            int32_t at = fw->entries[r].n++;
            meta_i32(fw, m->ent_row[r])[at] = row0 + i;
            meta_i32(fw, m->ent_seq[r])[at] = s;
            meta_i32(fw, m->ent_idx[r])[at] = (int32_t)(p / r);
            meta_i32(fw, m->ent_pos[r])[at] = (int32_t)(p / r * r);
        }
    }
}

/* Regroups the rows of set 0 by snapshot: a border's sequence of rows is the window before it, as far as this forward
 * has it. What lies in no window belongs to one more sequence, which stores nothing. Windows longer than 128 overlap;
 * borders then take turns between the passes. */
static void fill_snapshots(di_forward *fw, const di_batch *batch) {
    const di_model *mo = fw->model;
    const di_meta_layout *m = &fw->ml;
    int32_t n_passes = di_snapshot_passes(&mo->config), n_rows = fw->set[0].rows.n_rows, n = 0;
    const uint8_t *d = fw->ws.meta;
    fw->n_snapshots = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++)
        fw->n_snapshots += batch->seqs[s].n_snapshots;
    if (!fw->n_snapshots)
        return;
    for (int32_t pass = 0; pass < n_passes; pass++)
        for (int32_t i = 0; i < n_rows; i++)
            meta_i32(fw, m->snap.seq)[pass * m->n_rows + i] = fw->n_snapshots;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const di_seq_rows *q = &batch->seqs[s];
        int32_t row0 = meta_i32(fw, m->set[0].row0)[s];
        for (int32_t k = 0; k < q->n_snapshots; k++, n++) {
            int64_t at = q->snapshots[k].at, first = DI_MAX(q->pos0, at - mo->config.window);
            int64_t pass = at / DI_PAGE_TOKENS % n_passes, row = row0 + (first - q->pos0);
            meta_i32(fw, m->snap.row0)[n] = (int32_t)row;
            meta_i32(fw, m->snap.n)[n] = (int32_t)(at - first);
            meta_i32(fw, m->snap.pos0)[n] = (int32_t)first;
            meta_i32(fw, m->snap.slot)[n] = q->snapshots[k].slot;
            meta_i32(fw, m->snap.store_from)[n] = (int32_t)first;
            for (int64_t i = 0; i < at - first; i++)
                meta_i32(fw, m->snap.seq)[pass * m->n_rows + row + i] = n;
        }
    }
    meta_i32(fw, m->snap.row0)[n] = meta_i32(fw, m->snap.n)[n] = meta_i32(fw, m->snap.pos0)[n] = 0;
    meta_i32(fw, m->snap.slot)[n] = 0;
    meta_i32(fw, m->snap.store_from)[n] = INT32_MAX;
    fw->snap.rows = (di_rows){
        .n_rows = n_rows,
        .n_seqs = n + 1,
        .pos = fw->set[0].rows.pos,
        .seq = (const int32_t *)(const void *)(d + m->snap.seq),
        .row0 = (const int32_t *)(const void *)(d + m->snap.row0),
        .n = (const int32_t *)(const void *)(d + m->snap.n),
        .pos0 = (const int32_t *)(const void *)(d + m->snap.pos0),
        .slot = (const int32_t *)(const void *)(d + m->snap.slot),
    };
    fw->snap.store_from = (const int32_t *)(const void *)(d + m->snap.store_from);
}

di_status di_meta_send(di_forward *fw, int32_t n_seqs, int32_t n_blocks) {
    const di_device_ops *dev = fw->model->backend.device;
    size_t stride = (size_t)fw->blocks_stride * 4;
    DI_TRY(dev->stream_upload(fw->stream, fw->ws.meta, fw->meta, fw->ml.n_small, 1, fw->ml.n_small, fw->err));
    return dev->stream_upload(fw->stream, fw->ws.meta + fw->ml.blocks, fw->meta + fw->ml.blocks, (size_t)n_blocks * 4,
                              n_seqs, stride, fw->err);
}

/* Places of the consumer rows' taps among those of all sequences, as records one after another. */
static di_status fill_taps(di_forward *fw, const di_batch *batch) {
    const di_meta_layout *m = &fw->ml;
    int32_t ring_len = fw->model->layout.ring_len, row = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const di_seq_rows *q = &batch->seqs[s];
        int32_t n = meta_i32(fw, m->set[1].n)[s], pos0 = meta_i32(fw, m->set[1].pos0)[s];
        if (q->tap_slot < 0 || q->tap_slot > INT32_MAX / ring_len - 1)
            return di_fail(fw->err, DI_ERR_RANGE, "sequence %d of the batch: taps in slot %d, expected 0 or more", s,
                           q->tap_slot);
        meta_i32(fw, m->tap_slot)[s] = q->tap_slot;
        for (int32_t i = 0; i < n; i++)
            meta_i32(fw, m->tap_rows)[row++] = q->tap_slot * ring_len + (pos0 + i) % ring_len;
    }
    return DI_OK;
}

/* Fills a batch up to a number of rows that comes again. The rows behind its own repeat row 0, in a sequence of theirs
 * that is like the first one but stores nothing: so they choose no experts but those of that row. Entries that the
 * shape has room for are not there; sequences that it has room for have no rows. n_blocks: of the first. */
static void fill_up(di_forward *fw, int32_t n_seqs, int32_t n_rows, int32_t n_blocks, int32_t padded) {
    const di_model *mo = fw->model;
    const di_meta_layout *m = &fw->ml;
    int32_t ng = mo->config.engram_ngram;
    for (int k = 0; k < 2; k++) {
        const size_t rows[] = {m->set[k].pos, m->set[k].win_lo, m->set[k].win_hi};
        const size_t seqs[] = {m->set[k].row0, m->set[k].n, m->set[k].pos0, m->set[k].slot};
        for (size_t i = 0; i < DI_COUNT(rows); i++) {
            for (int32_t row = n_rows; row < padded; row++)
                meta_i32(fw, rows[i])[row] = meta_i32(fw, rows[i])[0];
        }
        for (size_t i = 0; i < DI_COUNT(seqs); i++) {
            meta_i32(fw, seqs[i])[n_seqs] = meta_i32(fw, seqs[i])[0];
            for (int32_t s = n_seqs + 1; s <= mo->seqs_max; s++)
                meta_i32(fw, seqs[i])[s] = 0;
        }
        for (int32_t row = n_rows; row < padded; row++)
            meta_i32(fw, m->set[k].seq)[row] = n_seqs;
        for (int32_t s = n_seqs; s <= mo->seqs_max; s++)
            meta_i32(fw, m->set[k].store_from)[s] = INT32_MAX;
    }
    for (int32_t s = n_seqs; s <= mo->seqs_max; s++) {
        meta_i32(fw, m->pair_store_from)[s] = INT32_MAX;
        meta_i32(fw, m->tap_slot)[s] = 0;
    }
    memcpy(meta_i32(fw, m->blocks) + (int64_t)n_seqs * fw->blocks_stride, meta_i32(fw, m->blocks),
           (size_t)n_blocks * 4);
    for (int32_t row = n_rows; row < padded; row++) {
        meta_i32(fw, m->ids)[row] = meta_i32(fw, m->ids)[0];
        meta_i32(fw, m->fed_from)[row] = meta_i32(fw, m->fed_from)[0];
        memcpy(meta_i32(fw, m->grams) + (int64_t)row * ng, meta_i32(fw, m->grams), (size_t)ng * 4);
        meta_i32(fw, m->keep)[row] = row;
        meta_i32(fw, m->logit_rows)[row] = row;
    }
    for (int r = 1; r <= 2; r++) {
        for (; fw->entries[r].n < padded; fw->entries[r].n++) {
            int32_t at = fw->entries[r].n;
            meta_i32(fw, m->ent_row[r])[at] = -1;
            meta_i32(fw, m->ent_seq[r])[at] = meta_i32(fw, m->ent_idx[r])[at] = meta_i32(fw, m->ent_pos[r])[at] = 0;
        }
    }
}

di_status di_forward_prepare(di_forward *fw, const di_batch *batch) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_meta_layout *m = &fw->ml;
    di_status st;
    int64_t n_rows = 0, n_logits = 0;
    fw->meta = fw->metas[fw->meta == fw->metas[0]];
    if (batch->n_seqs < 1 || batch->n_seqs > mo->seqs_max)
        return di_fail(fw->err, DI_ERR_RANGE, "batch of %d sequences, expected 1 to %d", batch->n_seqs, mo->seqs_max);
    if (batch->replay != DI_REPLAY_OFF && (st = check_replay(fw, c)))
        return st;
    bool image = false;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        if ((st = check_seq(fw, batch, s)))
            return st;
        n_rows += batch->seqs[s].n_rows;
        n_logits += batch->seqs[s].n_logits;
        image = image || batch->seqs[s].is_image;
    }
    if (n_rows > mo->rows_max || n_logits > mo->logits_max)
        return di_fail(fw->err, DI_ERR_RANGE,
                       "batch of %lld rows and %lld rows of logits, expected at most %lld and %lld", (long long)n_rows,
                       (long long)n_logits, (long long)mo->rows_max, (long long)mo->logits_max);

    bool is_decoding = !batch->tap && !image && n_logits == n_rows;
    for (int32_t s = 0; s < batch->n_seqs; s++)
        is_decoding = is_decoding && !batch->seqs[s].n_snapshots && batch->seqs[s].page_from <= batch->seqs[s].pos0;
    int32_t padded = is_decoding ? di_graph_rows(fw, (int32_t)n_rows) : 0;
    fw->is_recordable = padded > 0;
    fw->has_others = !is_decoding;
    padded = DI_MAX(padded, (int32_t)n_rows);
    di_meta_cut(&fw->ml, c, padded, fw->is_recordable ? mo->seqs_max + 1 : batch->n_seqs + 1, fw->blocks_stride,
                fw->is_recordable ? padded : n_logits);

    for (int r = 1; r <= 2; r++) {
        const uint8_t *d = fw->ws.meta;
        fw->entries[r] = (di_entries){.n = 0,
                                      .row = (const int32_t *)(const void *)(d + m->ent_row[r]),
                                      .seq = (const int32_t *)(const void *)(d + m->ent_seq[r]),
                                      .idx = (const int32_t *)(const void *)(d + m->ent_idx[r])};
    }
    int32_t row[2] = {0, 0}, li = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const di_seq_rows *q = &batch->seqs[s];
        int32_t row0 = row[0], kept0 = row[1];
        int64_t rect = batch->replay == DI_REPLAY_OFF ? 0 : q->rect, clip = 0;
        if (batch->replay == DI_REPLAY_COMPACT)
            clip = DI_MIN(DI_MAX(rect - q->pos0, (int64_t)0), (int64_t)q->n_rows - 1);
        if (q->n_logits > q->n_rows - clip)
            return di_fail(fw->err, DI_ERR_RANGE,
                           "sequence %d of the batch: logits of %d rows, compact replay keeps %lld", s, q->n_logits,
                           (long long)(q->n_rows - clip));
        fill_set(fw, 0, s, q, q->pos0, 0, q->pos0, &row[0]);
        fill_set(fw, 1, s, q, q->pos0 + clip, rect, DI_MAX(rect, q->pos0 + clip), &row[1]);
        for (int32_t i = kept0; i < row[1]; i++)
            meta_i32(fw, m->keep)[i] = row0 + (int32_t)clip + (i - kept0);
        for (int32_t i = row[1] - q->n_logits; i < row[1]; i++)
            meta_i32(fw, m->logit_rows)[li++] = i;
        memcpy(meta_i32(fw, m->blocks) + (int64_t)s * fw->blocks_stride, q->blocks, (size_t)q->n_blocks * 4);
        meta_i32(fw, m->pair_store_from)[s] = (int32_t)DI_MAX(q->pos0, q->pos0 + q->n_rows - mo->layout.pair_ring_len);
        for (int32_t i = 0; i < q->n_rows; i++) {
            bool is_fed = batch->fed && q->fed_from >= 0;
            meta_i32(fw, m->ids)[row0 + i] = is_fed ? 0 : q->tokens[q->pos0 + i];
            meta_i32(fw, m->fed_from)[row0 + i] = is_fed ? q->fed_from : -1;
            if (c->n_engram)
                fill_grams(mo, q, q->pos0 + i, is_fed, meta_i32(fw, m->grams) + (int64_t)(row0 + i) * c->engram_ngram);
        }
        fill_entries(fw, s, q, row0);
    }
    if (batch->taps && (st = fill_taps(fw, batch)))
        return st;
    int32_t n_blocks = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++)
        n_blocks = DI_MAX(n_blocks, batch->seqs[s].n_blocks);
    if (fw->is_recordable) {
        fill_up(fw, batch->n_seqs, (int32_t)n_rows, batch->seqs[0].n_blocks, padded);
        row[0] = row[1] = li = padded;
    }
    int32_t n_seqs = fw->is_recordable ? mo->seqs_max + 1 : batch->n_seqs;
    set_bind(fw, 0, row[0], n_seqs);
    set_bind(fw, 1, row[1], n_seqs);
    fill_snapshots(fw, batch);
    fw->compact = row[1] < row[0];
    fw->is_replay = batch->replay != DI_REPLAY_OFF;
    fw->n_logits = li;
    for (int k = 0; k < 2; k++)
        fw->skip_rows[k] = image ? fw->ws.meta + m->skip + (size_t)k * (size_t)m->n_rows : NULL;
    fw->pair_store_from = (const int32_t *)(const void *)(fw->ws.meta + m->pair_store_from);
    return di_meta_send(fw, batch->n_seqs + 1, n_blocks);
}

di_status di_draft_prepare(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_meta_layout *m = &fw->ml;
    if (n_seqs < 1 || n_seqs > mo->seqs_max || n_rows < 1 || n_rows > c->draft_block)
        return di_fail(fw->err, DI_ERR_RANGE,
                       "drafting round of %d sequences and %d rows, expected 1 to %d and 1 to %d", n_seqs, n_rows,
                       mo->seqs_max, c->draft_block);
    int32_t padded = di_graph_rows(fw, n_seqs); /* sequences of the round */
    fw->is_recordable = padded > 0;
    fw->has_others = false;
    padded = DI_MAX(padded, n_seqs);
    if (padded > mo->seqs_max)
        padded = n_seqs;
    di_meta_cut(&fw->ml, c, (int64_t)padded * n_rows, padded, 0, 1);
    for (int32_t s = 0; s < padded; s++) {
        const di_draft_seq *q = &seqs[s < n_seqs ? s : 0]; /* a round is filled up with its first; it stores nothing */
        int64_t a = q->last;
        if (q->token < 0 || q->token >= c->vocab || a < 0 || a + n_rows >= mo->tokens_max)
            return di_fail(fw->err, DI_ERR_RANGE,
                           "draft %d: token id %d after position %lld, expected an id below %d within %lld positions",
                           s, q->token, (long long)a, c->vocab, (long long)mo->tokens_max);
        meta_i32(fw, m->set[0].row0)[s] = s * n_rows;
        meta_i32(fw, m->set[0].n)[s] = n_rows;
        meta_i32(fw, m->set[0].pos0)[s] = (int32_t)(a + 1);
        meta_i32(fw, m->set[0].slot)[s] = q->slot;
        meta_i32(fw, m->chain)[s] = q->token;
        meta_i32(fw, m->chain_from)[s] = s < n_seqs ? s : 0;
        for (int32_t j = 0; j < n_rows; j++) {
            int32_t row = s * n_rows + j;
            meta_i32(fw, m->ids)[row] = j ? c->draft_noise_id : q->token;
            meta_i32(fw, m->set[0].pos)[row] = (int32_t)(a + 1 + j);
            meta_i32(fw, m->set[0].seq)[row] = s;
            meta_i32(fw, m->set[0].win_lo)[row] = (int32_t)DI_MAX(a - c->window + 1, (int64_t)0);
            meta_i32(fw, m->set[0].win_hi)[row] = (int32_t)(a + 1 + n_rows); /* every row sees the whole block */
            meta_i32(fw, m->keep)[j * padded + s] = row;                     /* by draft index, then sequence */
        }
    }
    set_bind(fw, 0, padded * n_rows, padded);
    fw->skip_rows[0] = NULL;
    fw->draft_seqs = padded;
    fw->draft_given = n_seqs;
    fw->draft_rows = n_rows;
    return di_meta_send(fw, 0, 0);
}
