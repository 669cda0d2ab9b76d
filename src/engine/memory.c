/* What a sequence holds of KV memory: blocks, a state slot, and the part of both that the prefix cache had already.
 *
 * A sequence that is admitted may start behind a cached prefix. Its blocks up to border H are shared; the window rings
 * are not in blocks, so they come from a snapshot at a border S <= H, or are rebuilt by running the rows before H
 * again:
 *
 *     0 ......... S ================ H ................. n_tokens
 *                 rings from the     rows >= H write pages; rows before H only read them,
 *                 snapshot           and bring the rings from S to H
 *
 * or, where S is far away or missing, from H - span on without rings, which is exact from H on (model.md 3.9). A border
 * H without a snapshot is where paths part: the run takes one there, so that the next request finds it.
 *
 * All copies go through the step that is being formed. Steps run in order, so memory may be given back and handed out
 * again at once, whatever a step in flight still does with it. */
#include "engine_internal.h"

static bool has_free(di_core *c, int64_t n) {
    int64_t lack = n - c->kv.blocks.n_free;
    return lack <= 0 || (lack <= di_prefix_idle(c->prefix) && di_prefix_evict(c->prefix, (int32_t)lack) >= lack);
}

bool di_seq_grow(di_core *c, di_sequence *s, int64_t n_tokens) {
    int32_t n = (int32_t)di_kv_blocks_for(n_tokens) - s->n_blocks;
    DI_ASSERT(s->n_blocks + n <= s->blocks_max);
    if (n <= 0)
        return true;
    if (!has_free(c, n) || !di_kv_pool_alloc(&c->kv.blocks, n, s->blocks + s->n_blocks))
        return false;
    s->n_blocks += n;
    c->stats.blocks_used_max =
        DI_MAX(c->stats.blocks_used_max, di_kv_pool_used(&c->kv.blocks) - di_prefix_idle(c->prefix));
    return true;
}

void di_seq_release(di_core *c, di_sequence *s) {
    if (s->n_blocks)
        di_kv_pool_release(&c->kv.blocks, s->blocks, s->n_blocks);
    if (s->slot >= 0)
        di_kv_pool_release(&c->kv.slots, &s->slot, 1);
    if (s->tap_slot >= 0)
        di_kv_pool_release(&c->tap_slots, &s->tap_slot, 1);
    if (s->ln_slot >= 0)
        di_kv_pool_release(&c->ln_slots, &s->ln_slot, 1);
    di_kv_chain_reset(&s->chain);
    s->n_blocks = 0;
    s->slot = s->tap_slot = s->ln_slot = -1;
    s->n_done = s->n_sched = 0;
    s->is_decoding = false;
    s->valid_start = s->page_from = s->snapshot_at = 0;
    s->epoch++;
}

/* Blocks that may come from the cache: at least one token is run; where replay drops rows, the consumers' rings must be
 * made from the first row that is kept on; log-probabilities need every row. */
static int32_t hit_max(const di_core *c, const di_sequence *s) {
    if (!c->prefix || di_sequence_scores_prompt(s))
        return 0;
    int64_t n = s->n_tokens - 1;
    if (c->keep > 0)
        n = DI_MIN(n, s->rect);
    const di_span *unit;
    while ((unit = di_sequence_unit_at(s, n / DI_PAGE_TOKENS * DI_PAGE_TOKENS)))
        n = unit->at;
    return (int32_t)(n / DI_PAGE_TOKENS);
}

/* Where a sequence starts whose hit is taken, and what has to be copied for it. */
static void start_behind(di_core *c, di_step *step, di_sequence *s, di_kv_hit hit, int32_t snapshot) {
    int64_t border = (int64_t)hit.n_blocks * DI_PAGE_TOKENS, state = (int64_t)hit.n_state * DI_PAGE_TOKENS;
    int64_t rebuild = DI_MAX(border - c->model.window_span, (int64_t)0), start = DI_MAX(state, rebuild);
    /* A unit is run as a whole or not at all: from the start, then, where the pages are known all the same. */
    if (di_sequence_unit_at(s, start))
        start = 0;
    if (snapshot >= 0) {
        if (start > 0 && start == state)
            step->slot_copies[step->n_slot_copies++] = (di_copy){.dst = s->slot, .src = snapshot};
        di_kv_pool_release(&c->kv.slots, &snapshot, 1); /* the copy is in its place on the stream */
    }
    s->valid_start = start == state ? 0 : start;
    s->page_from = border;
    s->snapshot_at = hit.n_state < hit.n_blocks ? border : 0;
    s->n_done = s->n_sched = start;
    c->stats.recomputed_tokens += DI_MAX(border, s->n_lost) - start;
    if (s->gen.n_preempted > 0)
        return;
    s->gen.n_cached = DI_MIN(start, s->gen.n_prompt);
    c->stats.cached_tokens += s->gen.n_cached;
}

static void take_tap_slot(di_core *c, di_sequence *s) {
    if (!c->taps)
        return;
    bool is_taken = di_kv_pool_alloc(&c->tap_slots, 1, &s->tap_slot);
    DI_ASSERT(is_taken); /* there are as many as sequences can run */
}

bool di_seq_admit(di_core *c, di_step *step, di_sequence *s, int64_t n_reserved) {
    int64_t n_blocks = di_kv_blocks_for(s->n_tokens);
    int32_t cap = hit_max(c, s), snapshot = -1;
    if (c->prefix && di_kv_chain_extend(&s->chain, s->tokens, NULL, s->n_tokens, NULL))
        cap = 0; /* no memory for names: then nothing is found */
    cap = DI_MIN(cap, s->chain.n_hashes);
    di_kv_hit hit = di_prefix_peek(c->prefix, &s->chain, cap);
    if (n_blocks - hit.n_blocks + n_reserved > c->kv.blocks.n_free + di_prefix_idle(c->prefix) - hit.n_idle)
        return false;
    if (!di_kv_pool_alloc(&c->kv.slots, 1, &s->slot)) {
        s->slot = -1;
        return false;
    }
    take_tap_slot(c, s);
    if (cap > 0)
        hit = di_prefix_acquire(c->prefix, &s->chain, cap, s->blocks, &snapshot);
    s->n_blocks = hit.n_blocks;
    bool has_grown = di_seq_grow(c, s, n_blocks * DI_PAGE_TOKENS);
    DI_ASSERT(has_grown); /* counted above */
    start_behind(c, step, s, hit, snapshot);
    return true;
}

bool di_seq_fork(di_core *c, di_sequence *s, const di_sequence *leader, int64_t n_reserved) {
    int64_t n = s->gen.n_prompt;
    int32_t n_full = (int32_t)(n / DI_PAGE_TOKENS);
    bool is_cut = n % DI_PAGE_TOKENS != 0;
    if (is_cut + n_reserved > c->kv.blocks.n_free + di_prefix_idle(c->prefix) || (is_cut && !has_free(c, 1)))
        return false;
    if (!di_kv_pool_alloc(&c->kv.slots, 1, &s->slot)) {
        s->slot = -1;
        return false;
    }
    if (di_kv_chain_copy(&s->chain, &leader->chain, NULL)) {
        di_kv_pool_release(&c->kv.slots, &s->slot, 1);
        s->slot = -1;
        return false;
    }
    take_tap_slot(c, s);
    for (int32_t i = 0; i < n_full; i++) {
        s->blocks[i] = leader->blocks[i];
        di_kv_pool_acquire(&c->kv.blocks, s->blocks[i]);
    }
    s->n_blocks = n_full;
    if (is_cut) {
        bool is_taken = di_kv_pool_alloc(&c->kv.blocks, 1, &s->blocks[s->n_blocks++]);
        DI_ASSERT(is_taken);
        c->late_page_copies[c->n_late_page_copies++] =
            (di_copy){.dst = s->blocks[n_full], .src = leader->blocks[n_full]};
    }
    c->late_slot_copies[c->n_late_slot_copies++] = (di_copy){.dst = s->slot, .src = leader->slot};
    s->n_done = s->n_sched = n;
    s->valid_start = leader->valid_start;
    s->page_from = leader->page_from;
    s->gen.n_cached = n;
    c->stats.n_forked++;
    c->stats.cached_tokens += n;
    return true;
}

void di_seq_publish(di_core *c, di_sequence *s) {
    int64_t n_full = s->n_done / DI_PAGE_TOKENS;
    if (!c->prefix || s->chain.n_shared >= n_full)
        return;
    /* Rows that are done have known tokens. */
    if (di_kv_chain_extend(&s->chain, s->tokens, NULL, s->n_done, NULL))
        return;
    while (s->chain.n_shared < n_full) {
        int32_t *block = &s->blocks[s->chain.n_shared];
        *block = di_prefix_publish(c->prefix, &s->chain, *block);
    }
}

/* Which borders are worth a snapshot: where paths parted before, the last one of the prompt, every one of the answer
 * (the next turn of a conversation continues from there), and some on the way. */
static bool wants_snapshot(const di_core *c, const di_sequence *s, int64_t border) {
    if (!c->prefix || c->options.n_snapshots == 0)
        return false;
    if (border < s->page_from)
        return false; /* on the way to a border whose rings may still be inexact */
    if (border / DI_PAGE_TOKENS <= s->chain.n_shared &&
        di_prefix_has_snapshot(c->prefix, &s->chain, (int32_t)(border / DI_PAGE_TOKENS)))
        return false;
    int64_t last = (s->gen.n_prompt - 1) / DI_PAGE_TOKENS * DI_PAGE_TOKENS;
    return border == s->snapshot_at || border >= last || border / DI_PAGE_TOKENS % c->snapshot_every == 0;
}

/* A slot for the snapshot at the border behind n_blocks blocks, if it is worth one and there is one: its place in the
 * step, -1: none. */
static int32_t add_snapshot(di_core *c, di_step *step, di_sequence *s, int64_t n_blocks, bool is_taken) {
    int64_t border = n_blocks * DI_PAGE_TOKENS;
    int32_t slot = wants_snapshot(c, s, border) ? di_prefix_snapshot_reserve(c->prefix) : -1;
    if (slot < 0)
        return -1;
    step->snapshot_of[step->n_snapshots] = (di_step_snapshot){
        .seq = s, .epoch = s->epoch, .slot = slot, .n_blocks = (int32_t)n_blocks, .is_taken = is_taken};
    step->snapshots[step->n_snapshots] = (di_ring_snapshot){.at = border, .slot = slot};
    return step->n_snapshots++;
}

int32_t di_seq_plan_snapshots(di_core *c, di_step *step, di_sequence *s, int64_t pos0, int64_t n_rows) {
    int32_t first = step->n_snapshots;
    for (int64_t b = pos0 / DI_PAGE_TOKENS + 1; b * DI_PAGE_TOKENS <= pos0 + n_rows; b++) {
        int32_t at = add_snapshot(c, step, s, b, true);
        if (at >= 0 && b * DI_PAGE_TOKENS - c->model.window < pos0 && pos0 > 0)
            step->slot_copies[step->n_slot_copies++] = (di_copy){.dst = step->snapshots[at].slot, .src = s->slot};
    }
    return step->n_snapshots - first;
}

int32_t di_seq_plan_snapshot(di_core *c, di_step *step, di_sequence *s, int64_t end) {
    int64_t b = (s->n_tokens - 1) / DI_PAGE_TOKENS + 1;
    return b * DI_PAGE_TOKENS <= end ? add_snapshot(c, step, s, b, false) : -1;
}

void di_step_keep_snapshots(di_core *c, di_step *step) {
    for (int32_t i = 0; i < step->n_snapshots; i++) {
        const di_step_snapshot *t = &step->snapshot_of[i];
        bool is_good =
            t->is_taken && !step->error.code && t->epoch == t->seq->epoch && t->n_blocks <= t->seq->chain.n_shared;
        if (is_good) {
            di_prefix_snapshot_attach(c->prefix, &t->seq->chain, t->n_blocks, t->slot);
        } else {
            di_prefix_snapshot_cancel(c->prefix, t->slot);
        }
    }
}

/* ---- invariants ---------------------------------------------------------------------------------------------------
 */

static const char *check_sequence(const di_core *c, const di_sequence *s) {
    bool is_running = s->state == DI_SEQ_RUNNING;
    if (s->n_coming < 0 || s->n_coming > 1)
        return "a sequence has no or one token on its way";
    if (s->n_flight < 0 || s->n_flight > 1 + !c->in_flight)
        return "between two turns a sequence is in one step at most";
    if (s->n_tokens != s->gen.n_prompt + s->gen.n_tokens || s->gen.n_tokens > s->sampling.max_tokens)
        return "tokens are the prompt and the answer, which is no longer than allowed";
    if (s->n_done > s->n_sched || s->n_sched > s->n_tokens)
        return "rows are done after they were launched, and launched for tokens that exist";
    if (s->is_decoding && (!is_running || s->n_sched + 1 < s->n_tokens))
        return "a sequence that decodes runs, with all its rows but the last";
    if (s->state == DI_SEQ_WAITING && s->item.is_ready != (s->n_flight == 0))
        return "what gave up its memory is admitted again when no step has it";
    if (s->n_done > s->n_tokens)
        return "rows that are done have known tokens";
    if (is_running != (s->slot >= 0) || (!is_running && s->n_blocks > 0))
        return "running sequences, and no others, hold a slot and blocks";
    if (is_running && (c->running[s->run_idx] != s || s->n_sched > (int64_t)s->n_blocks * DI_PAGE_TOKENS))
        return "a running sequence is where it says, with blocks for all its rows";
    if ((s->state == DI_SEQ_WAITING) != s->item.is_queued || (s->state == DI_SEQ_HELD) != (s->leader != NULL))
        return "a sequence is queued when it waits, held when it has a leader";
    if (s->state == DI_SEQ_ENDED ? !di_sequence_is_finished(s) || s->n_flight == 0 : di_sequence_is_finished(s))
        return "what is finished has ended, and is kept only for a step";
    return NULL;
}

/* References of sequences on each block against those that the pool counts; the cache holds the others, one a block. */
static const char *check_blocks(const di_core *c) {
    const di_kv_pool *pool = &c->kv.blocks;
    int32_t n_free = 0, n_idle = 0, *held = c->held;
    memset(held, 0, (size_t)pool->n_units * sizeof *held);
    for (const di_sequence *s = c->all; s; s = s->next) {
        for (int32_t i = 0; i < s->n_blocks; i++)
            held[s->blocks[i]]++;
    }
    for (int32_t b = 0; b < pool->n_units; b++) {
        int32_t by_cache = pool->refs[b] - held[b];
        if (by_cache < 0 || by_cache > (c->prefix ? 1 : 0))
            return "a block's references are those of its sequences and at most one of the cache";
        n_free += pool->refs[b] == 0;
        n_idle += by_cache == 1 && held[b] == 0;
    }
    if (n_free != pool->n_free || n_idle != di_prefix_idle(c->prefix))
        return "blocks that nobody holds are free, those of the cache alone are idle";
    return NULL;
}

const char *di_core_check(const di_core *c) {
    int64_t n_waiting = 0, n_held = 0, n_running = 0;
    for (const di_sequence *s = c->all; s; s = s->next) {
        const char *wrong = check_sequence(c, s);
        if (wrong)
            return wrong;
        n_waiting += s->state == DI_SEQ_WAITING;
        n_held += s->state == DI_SEQ_HELD;
        n_running += s->state == DI_SEQ_RUNNING;
    }
    if (n_waiting != c->queue.n_items || n_held != c->n_held || n_running != c->n_running)
        return "the counts of waiting, held and running sequences";
    di_prefix_stats p;
    di_prefix_stats_get(c->prefix, &p);
    int32_t n_snapshots = p.snapshots + (c->in_flight ? c->in_flight->n_snapshots : 0);
    if (di_kv_pool_used(&c->kv.slots) != n_running + n_snapshots)
        return "slots are of running sequences and snapshots";
    return check_blocks(c);
}
