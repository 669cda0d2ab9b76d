/* One step: end what was aborted, admit what fits, run one ragged forward, give every sequence its token.
 *
 * Admission is first come, first served and reserves all blocks that a request can ever need, so that a running
 * sequence never waits for memory. The batch takes the decode rows first (one a sequence), then chunks of prompts,
 * oldest first, as far as the budget of rows goes: a long prompt delays others by at most one budget's worth of rows.
 *
 * There is one way out for every sequence, whatever ended it and wherever it stood: retire(). */
#include "engine_internal.h"

static void hold(di_sequence *s) {
    di_core *e = s->engine;
    s->n_blocks = s->blocks_max;
    e->stats.blocks_used_max = DI_MAX(e->stats.blocks_used_max, di_kv_pool_used(&e->kv.blocks));
    s->gen.start_ns = di_clock_ns();
}

/* Gives back what a finished sequence holds, sends its last event and frees it. It is in no list any more. */
static void retire(di_sequence *s) {
    di_core *e = s->engine;
    if (s->n_blocks)
        di_kv_pool_release(&e->kv.blocks, s->blocks, s->n_blocks);
    if (s->slot >= 0)
        di_kv_pool_release(&e->kv.slots, &s->slot, 1);
    s->n_blocks = 0;
    s->slot = -1;
    e->stats.n_finished++;
    di_sequence_done(s);
    di_sequence_destroy(s);
}

static void retire_finished(di_core *e) {
    int32_t kept = 0;
    for (int32_t i = 0; i < e->n_running; i++) {
        if (e->running[i]->gen.finish == DI_FINISH_NONE) {
            di_sequence *s = e->running[i];
            e->running[i] = e->running[kept];
            e->running[kept++] = s;
        }
    }
    /* The finished ones now stand behind the others, in order only by chance of the swaps; oldest first again below.
     * They leave the list before their events, which may submit or abort requests. */
    int32_t n = e->n_running;
    e->n_running = kept;
    while (n > kept) {
        int32_t oldest = kept;
        for (int32_t i = kept + 1; i < n; i++) {
            if (e->running[i]->gen.id < e->running[oldest]->gen.id)
                oldest = i;
        }
        di_sequence *s = e->running[oldest];
        e->running[oldest] = e->running[--n];
        retire(s);
    }
}

static void end_aborted(di_core *e) {
    bool is_any = false;
    for (int32_t i = 0; i < e->n_running; i++) {
        if (!e->running[i]->is_aborted)
            continue;
        di_sequence_abort(e->running[i]);
        is_any = true;
    }
    if (is_any)
        retire_finished(e);
    /* Aborted ones leave the waiting list first and end afterwards: their events may change the list. */
    di_sequence *aborted = NULL, **aborted_end = &aborted, **link = &e->waiting;
    e->waiting_last = NULL;
    while (*link) {
        di_sequence *s = *link;
        if (!s->is_aborted) {
            e->waiting_last = s;
            link = &s->next;
            continue;
        }
        *link = s->next;
        s->next = NULL;
        *aborted_end = s;
        aborted_end = &s->next;
        e->n_waiting--;
    }
    for (di_sequence *s = aborted, *next; s; s = next) {
        next = s->next;
        di_sequence_abort(s);
        retire(s);
    }
}

static void admit(di_core *e) {
    while (e->waiting && e->n_running < e->options.seqs_max) {
        di_sequence *s = e->waiting;
        if (!di_kv_pool_alloc(&e->kv.slots, 1, &s->slot))
            return;
        if (!di_kv_pool_alloc(&e->kv.blocks, s->blocks_max, s->blocks)) {
            di_kv_pool_release(&e->kv.slots, &s->slot, 1);
            s->slot = -1;
            return;
        }
        hold(s);
        e->waiting = s->next;
        if (!e->waiting)
            e->waiting_last = NULL;
        s->next = NULL;
        e->n_waiting--;
        e->running[e->n_running++] = s;
    }
}

static void add_rows(di_core *e, di_sequence *s, int64_t n_rows, int32_t *n_seqs) {
    e->batch[*n_seqs] = s;
    e->rows[*n_seqs] = (di_seq_rows){
        .tokens = s->tokens,
        .pos0 = s->n_done,
        .n_rows = (int32_t)n_rows,
        .n_logits = s->n_done + n_rows == s->n_tokens,
        .slot = s->slot,
        .blocks = s->blocks,
        .n_blocks = s->n_blocks,
        .rect = s->rect,
    };
    ++*n_seqs;
}

static int32_t form_batch(di_core *e) {
    int64_t budget = e->options.batch_tokens_max;
    int32_t n_seqs = 0;
    for (int32_t i = 0; i < e->n_running; i++) {
        di_sequence *s = e->running[i];
        if (s->n_tokens - s->n_done != 1)
            continue;
        add_rows(e, s, 1, &n_seqs);
        budget--;
    }
    for (int32_t i = 0; i < e->n_running && budget > 0; i++) {
        di_sequence *s = e->running[i];
        int64_t left = s->n_tokens - s->n_done;
        if (left <= 1)
            continue;
        int64_t n = DI_MIN(left, DI_MIN(e->options.chunk_max, budget));
        add_rows(e, s, n, &n_seqs);
        budget -= n;
    }
    return n_seqs;
}

/* Every sequence of the batch advances by its rows; those with logits get a token. Logits come in the order of the
 * rows. */
static void commit(di_core *e, int32_t n_seqs, const float *logits) {
    int64_t row = 0;
    for (int32_t i = 0; i < n_seqs; i++) {
        di_sequence *s = e->batch[i];
        int64_t in_prompt = DI_MIN(e->rows[i].n_rows, DI_MAX(0, s->gen.n_prompt - s->n_done));
        e->stats.prompt_tokens += in_prompt;
        s->n_done += e->rows[i].n_rows;
        if (!e->rows[i].n_logits)
            continue;
        di_error err = {0};
        err.code = e->backend->device->download(e->device, e->logits, logits + row * e->n_vocab,
                                                (size_t)e->n_vocab * sizeof *e->logits, &err);
        row++;
        if (err.code) {
            di_sequence_fail(s, &err);
            continue;
        }
        di_sequence_advance(s, e->logits);
        e->stats.output_tokens++;
    }
}

static void run(di_core *e, int32_t n_seqs) {
    di_batch batch = {
        .n_seqs = n_seqs,
        .seqs = e->rows,
        .replay = e->options.replay,
        .pages = e->kv.pages,
        .slots = e->kv.states,
    };
    float *logits = NULL;
    di_error err = {0};
    int64_t start_ns = di_clock_ns();
    err.code = di_forward_run(e->forward, &batch, &logits, &err);
    int64_t forward_ns = di_clock_ns();
    e->stats.forward_ns += forward_ns - start_ns;
    e->stats.n_steps++;
    if (err.code) {
        for (int32_t i = 0; i < n_seqs; i++)
            di_sequence_fail(e->batch[i], &err);
        return;
    }
    commit(e, n_seqs, logits);
    e->stats.sample_ns += di_clock_ns() - forward_ns;
}

bool di_core_step(di_core *e) {
    end_aborted(e);
    admit(e);
    int32_t n_seqs = form_batch(e);
    if (n_seqs > 0) {
        run(e, n_seqs);
        retire_finished(e);
    }
    return di_core_pending(e) > 0;
}
