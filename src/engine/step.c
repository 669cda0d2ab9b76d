/* The step loop: end what is over, form and launch the next step, commit the one before, fill the next one's sampling.
 *
 * A step mixes decode rows and chunks of prompts in one forward. Decode rows come first; prompts get what the pace
 * leaves (sched/pace.c), those under way before new ones, new ones as the queue says (sched/queue.c). A sequence whose
 * last token is still being sampled can have its next row formed already: the runner puts the token in its place.
 *
 * A sequence takes blocks for its whole prompt when it is admitted and one at a time while it decodes. Admission leaves
 * blocks free for the sequences that reach a border soon. Where a block is missing all the same, the sequence that goes
 * last by priority and arrival gives its memory up and goes back to the queue; its full blocks stay in the prefix cache
 * as long as nobody needs them, and what it has generated is kept.
 *
 * A stop is seen one step late: the rows that were run in vain are dropped. There is one way out for every sequence,
 * whatever ended it and wherever it stood: retire(). */
#include "engine_internal.h"

enum { BORDER_AHEAD = 16 }; /* rows before a block's end from which on its sequence's next block is kept free */

/* ---- the step's own memory ---- */

di_status di_step_init(di_step *step, const di_core *c, di_error *err) {
    size_t n = (size_t)c->options.seqs_max;
    size_t n_snapshots = (size_t)(c->options.batch_tokens_max / DI_PAGE_TOKENS) + n;
    size_t n_samples = (size_t)c->options.logits_max + n * (2 + (size_t)di_core_ahead_max(c));
    step->seqs = calloc(n, sizeof *step->seqs);
    step->rows = calloc(n, sizeof *step->rows);
    /* Room for the longest tables; what is never used is never touched. */
    size_t table = (size_t)di_kv_blocks_for(c->options.context_max), table_bytes;
    if (!di_size_mul3(&table_bytes, n, table, sizeof *step->blocks))
        return di_fail(err, DI_ERR_RANGE, "block tables of %zu sequences", n);
    step->blocks = malloc(table_bytes);
    step->page_copies = calloc(n, sizeof *step->page_copies);
    step->slot_copies = calloc(2 * n + n_snapshots, sizeof *step->slot_copies);
    step->snapshots = calloc(n_snapshots, sizeof *step->snapshots);
    step->snapshot_of = calloc(n_snapshots, sizeof *step->snapshot_of);
    step->samples = calloc(n_samples, sizeof *step->samples);
    step->results = calloc(n_samples, sizeof *step->results);
    step->errors = calloc(n_samples, sizeof *step->errors);
    step->drawn = calloc(n_samples, sizeof *step->drawn);
    if (!step->blocks || !step->seqs || !step->rows || !step->page_copies || !step->slot_copies || !step->snapshots ||
        !step->snapshot_of || !step->samples || !step->results || !step->errors || !step->drawn)
        return di_fail(err, DI_ERR_MEMORY, "steps of %zu sequences", n);
    return DI_OK;
}

void di_step_deinit(di_step *step) {
    free(step->seqs);
    free(step->rows);
    free(step->blocks);
    free(step->page_copies);
    free(step->slot_copies);
    free(step->snapshots);
    free(step->snapshot_of);
    free(step->samples);
    free(step->results);
    free(step->errors);
    free(step->drawn);
    free(step->tops);
    *step = (di_step){0};
}

static void reset(di_core *c, di_step *step) {
    step->n_seqs = step->n_rows = step->n_samples = step->n_snapshots = 0;
    step->n_blocks = step->n_tops = 0;
    step->n_prompt_rows = step->context_sum = step->context_max = step->n_logits = 0;
    step->follows = false;
    /* Forks of the step before copy what it has left behind, before anything is added to it. */
    memcpy(step->page_copies, c->late_page_copies, (size_t)c->n_late_page_copies * sizeof *step->page_copies);
    memcpy(step->slot_copies, c->late_slot_copies, (size_t)c->n_late_slot_copies * sizeof *step->slot_copies);
    step->n_page_copies = c->n_late_page_copies;
    step->n_slot_copies = c->n_late_slot_copies;
    c->n_late_page_copies = c->n_late_slot_copies = 0; /* forks of this step begin again */
}

/* Block tables are copied, since a sequence's own may change while the step runs. */
static void keep_table(di_step *step, const di_sequence *s, int32_t n_blocks) {
    memcpy(step->blocks + step->n_blocks, s->blocks, (size_t)n_blocks * sizeof *s->blocks);
    step->n_blocks += (size_t)n_blocks;
}

/* ---- ways out -----------------------------------------------------------------------------------------------------
 */

static void leave_running(di_core *c, di_sequence *s) {
    di_sequence *last = c->running[--c->n_running];
    c->running[s->run_idx] = last;
    last->run_idx = s->run_idx;
}

static void enqueue(di_core *c, di_sequence *s) {
    s->state = DI_SEQ_WAITING;
    di_sched_push(&c->queue, &s->item);
}

/* Samples that waited for s go their own way; the prefix cache spares them most of the prompt. */
static void release_held(di_core *c, di_sequence *s) {
    for (di_sequence *held = s->held, *next; held; held = next) {
        next = held->next_held;
        held->leader = held->next_held = NULL;
        c->n_held--;
        enqueue(c, held);
    }
    s->held = NULL;
}

static void leave_leader(di_core *c, di_sequence *s) {
    di_sequence **link = &s->leader->held;
    while (*link != s)
        link = &(*link)->next_held;
    *link = s->next_held;
    s->leader = s->next_held = NULL;
    c->n_held--;
}

static void count_finish(di_core *c, const di_sequence *s) {
    di_core_stats *st = &c->stats;
    st->n_finished++;
    st->finished_prompt_tokens += s->gen.n_prompt;
    st->finished_output_tokens += s->gen.n_tokens;
    switch (s->gen.finish) {
    case DI_FINISH_LENGTH:
        st->n_length++;
        break;
    case DI_FINISH_ABORT:
        st->n_abort++;
        break;
    case DI_FINISH_ERROR:
        st->n_error++;
        break;
    default:
        st->n_stop++;
    }
    int64_t n = s->gen.n_tokens;
    if (c->options.tpot_goal_ns > 0 && n > 1 && (s->gen.last_ns - s->gen.first_ns) / (n - 1) > c->options.tpot_goal_ns)
        st->tpot_goal_missed++;
}

/* The end of a sequence that is finished: it gives back everything, sends its last event, and is freed as soon as no
 * step holds it. The event may submit and abort other requests. */
static void retire(di_core *c, di_sequence *s) {
    switch (s->state) {
    case DI_SEQ_RUNNING:
        leave_running(c, s);
        break;
    case DI_SEQ_WAITING:
        di_sched_remove(&c->queue, &s->item);
        break;
    case DI_SEQ_HELD:
        leave_leader(c, s);
        break;
    case DI_SEQ_ENDED:
        return;
    }
    release_held(c, s);
    di_seq_release(c, s);
    s->state = DI_SEQ_ENDED;
    s->next_held = c->ended;
    c->ended = s;
    count_finish(c, s);
    di_sequence_done(s);
}

/* Frees what no step holds any more. */
static void reap(di_core *c) {
    di_sequence **link = &c->ended;
    while (*link) {
        di_sequence *s = *link;
        if (s->n_flight > 0) {
            link = &s->next_held;
            continue;
        }
        *link = s->next_held;
        di_core_unlink(c, s);
        di_sequence_destroy(s);
    }
}

static void preempt(di_core *c, di_sequence *s) {
    di_seq_publish(c, s);
    release_held(c, s);
    leave_running(c, s);
    c->stats.recomputed_tokens -= DI_MAX(s->n_lost - s->n_sched, 0); /* counted when it was admitted again */
    s->n_lost = DI_MAX(s->n_lost, s->n_sched);
    di_seq_release(c, s);
    s->gen.n_preempted++;
    c->stats.n_preempted++;
    s->item.is_resumed = true;
    s->item.is_ready = s->n_flight == 0; /* what is on its way belongs to what is run again */
    enqueue(c, s);
}

static void end_from_outside(di_core *c) {
    int64_t now_ns = c->deadline_next_ns < INT64_MAX ? di_clock_ns() : 0;
    bool is_late = now_ns >= c->deadline_next_ns;
    if (!c->has_aborted && !is_late)
        return;
    c->has_aborted = false;
    if (is_late)
        c->deadline_next_ns = INT64_MAX;
    for (di_sequence *s = c->all, *next; s; s = next) {
        next = s->next;
        if (s->state == DI_SEQ_ENDED)
            continue;
        if (s->is_aborted) {
            di_sequence_abort(s);
            retire(c, s);
        } else if (is_late && now_ns >= s->deadline_ns) {
            di_error err = {0};
            (void)di_fail(&err, DI_ERR_CANCELLED, "the deadline passed after %lld of at most %lld tokens",
                          (long long)s->gen.n_tokens, (long long)s->sampling.max_tokens);
            di_sequence_fail(s, &err);
            c->stats.n_expired++;
            retire(c, s);
        } else if (is_late) {
            c->deadline_next_ns = DI_MIN(c->deadline_next_ns, s->deadline_ns);
        }
    }
}

/* ---- forming ------------------------------------------------------------------------------------------------------
 */

/* Rows that could be run now: of a prompt, or of what is run again, those that have not been; of a sequence that
 * decodes one, its newest token's, unless the answer is as long as it may be with what is on its way. */
static int64_t rows_left(const di_sequence *s) {
    if (s->is_decoding)
        return s->gen.n_tokens + s->n_coming < s->sampling.max_tokens;
    return s->n_tokens - s->n_sched;
}

/* Rows of a decoding sequence, its next one included, if every draft that is with the runner holds. */
static int64_t rows_at_most(const di_sequence *s) {
    int64_t n = s->n_tokens + (s->n_coming ? 1 + s->drafts_asked : 0);
    return DI_MIN(n, di_sequence_rows_max(s));
}

/* Gives every decoding sequence the block for its next row. */
static void grow_running(di_core *c) {
    for (int32_t i = 0; i < c->n_running;) {
        di_sequence *s = c->running[i];
        int64_t n = s->is_decoding && rows_left(s) ? rows_at_most(s) : 0;
        if (n <= (int64_t)s->n_blocks * DI_PAGE_TOKENS || di_seq_grow(c, s, n)) {
            /* Drafts may reach into a block behind: only where there is plenty. */
            int64_t more = DI_MIN(n + s->ahead_max, di_sequence_rows_max(s));
            if (n > 0 && more > (int64_t)s->n_blocks * DI_PAGE_TOKENS &&
                c->kv.blocks.n_free + di_prefix_idle(c->prefix) > c->n_running)
                (void)di_seq_grow(c, s, more);
            i++;
            continue;
        }
        di_sequence *victim = s;
        for (int32_t k = 0; k < c->n_running; k++) {
            if (di_sched_precedes(&victim->item, &c->running[k]->item))
                victim = c->running[k];
        }
        int32_t at = victim->run_idx;
        preempt(c, victim);
        /* The last sequence of the array has moved to the victim's place; if that was passed already, look again. */
        if (at < i)
            i = at;
    }
}

/* Whether s reaches the end of n_blocks blocks within a few rows and goes on behind it. */
static bool is_near_border(const di_sequence *s, int64_t n_blocks) {
    return n_blocks < s->blocks_max && s->n_tokens + s->n_coming + BORDER_AHEAD > n_blocks * DI_PAGE_TOKENS;
}

/* Blocks that must stay free for sequences that run: those that reach the end of their blocks within a few rows. */
static int64_t reserved_blocks(const di_core *c) {
    int64_t n = 0;
    for (int32_t i = 0; i < c->n_running; i++)
        n += is_near_border(c->running[i], c->running[i]->n_blocks);
    return n;
}

/* The next row of the step's samples. */
static di_step_row *add_sample(di_step *step, di_sequence *s, int32_t seq_idx, int64_t logits_row, int64_t position) {
    di_step_row *row = &step->samples[step->n_samples++];
    row->seq = s;
    row->n_span = 1;
    row->seq_idx = seq_idx;
    row->logits_row = (int32_t)logits_row;
    row->position = position;
    row->is_prompt = row->is_skipped = false;
    row->fork_of = NULL;
    row->n_top = -1;
    row->forced = -1;
    return row;
}

/* Room for what drafts of s are drawn from, where acceptance needs it. Without it s drafts nothing. */
static void keep_draft_ln(di_core *c, di_sequence *s) {
    size_t n_drafts = (size_t)c->options.draft_tokens, n_vocab = (size_t)c->model.n_vocab, bytes;
    if (c->options.accept != DI_SPEC_REJECTION || !s->may_draft || di_sampling_is_greedy(&s->sampling))
        return;
    if (c->draft_ln) { /* one that s had before is no longer its own */
        bool is_taken = di_kv_pool_alloc(&c->ln_slots, 1, &s->ln_slot);
        DI_ASSERT(is_taken); /* there are as many as sequences can run */
        s->draft_ln = c->draft_ln + (size_t)s->ln_slot * n_drafts * n_vocab;
    } else if (!s->draft_ln && di_size_mul3(&bytes, n_drafts, n_vocab, sizeof *s->draft_ln)) {
        s->draft_ln = malloc(bytes);
    }
}

/* Samples beside s, whose prompt ends in this step: they draw their first token from the same row of logits. */
static void fork_held(di_core *c, di_step *step, di_sequence *s, int32_t seq_idx, int64_t logits_row) {
    int64_t n_reserved = reserved_blocks(c);
    for (di_sequence *held = s->held, *next; held; held = next) {
        next = held->next_held;
        n_reserved += is_near_border(held, di_kv_blocks_for(held->n_tokens));
        if (c->n_running == c->options.seqs_max || !di_seq_fork(c, held, s, n_reserved))
            break; /* the rest is queued */
        leave_leader(c, held);
        held->state = DI_SEQ_RUNNING;
        held->run_idx = c->n_running;
        c->running[c->n_running++] = held;
        keep_draft_ln(c, held);
        held->gen.start_ns = s->gen.start_ns;
        held->n_flight++;
        held->n_coming++;
        held->is_decoding = true;
        held->drafts_asked = 0;
        add_sample(step, held, seq_idx, logits_row, held->n_tokens)->fork_of = s;
    }
    release_held(c, s);
}

/* A place in the step for s with its first n_blocks blocks; the rows are the caller's. */
static int32_t add_seq(di_step *step, di_sequence *s, int32_t n_blocks) {
    int32_t k = step->n_seqs++;
    keep_table(step, s, n_blocks);
    step->seqs[k] = (di_step_seq){.seq = s,
                                  .epoch = s->epoch,
                                  .blocks_at = step->n_blocks - (size_t)n_blocks,
                                  .sample_at = -1,
                                  .snapshot_at = -1};
    step->follows = step->follows || s->n_flight > 0;
    s->n_flight++;
    return k;
}

static void count_rows(di_core *c, di_step *step, di_sequence *s, int64_t n, int64_t end) {
    step->n_rows += (int32_t)n;
    step->context_sum += end;
    step->context_max = DI_MAX(step->context_max, end);
    di_sched_charge(&c->queue, &s->item, n);
}

/* Puts the next n rows of a prompt, or of what is run again, into the step. */
static void add_rows(di_core *c, di_step *step, di_sequence *s, int64_t n) {
    int64_t pos0 = s->n_sched, end = pos0 + n;
    bool draws = end == s->n_tokens;
    int64_t n_scored = di_sequence_scores_prompt(s) ? n : 0, n_logits = n_scored > 0 ? n : draws;
    int32_t n_blocks = (int32_t)di_kv_blocks_for(end), first_snapshot = step->n_snapshots;
    int32_t n_snapshots = di_seq_plan_snapshots(c, step, s, pos0, n);
    int32_t k = add_seq(step, s, n_blocks);
    step->rows[k] = (di_seq_rows){
        .tokens = s->tokens,
        .pos0 = pos0,
        .n_rows = (int32_t)n,
        .n_logits = (int32_t)n_logits,
        .slot = s->slot,
        .tap_slot = s->tap_slot,
        .n_blocks = n_blocks,
        .rect = s->rect,
        .valid_start = s->valid_start,
        .page_from = s->page_from,
        .n_snapshots = n_snapshots,
        .snapshots = step->snapshots + first_snapshot,
    };
    count_rows(c, step, s, n, end);
    int64_t in_prompt = DI_MAX(DI_MIN(end, s->n_prompt) - pos0, 0);
    step->n_prompt_rows += in_prompt;
    c->stats.prompt_tokens += in_prompt;
    for (int64_t i = 0; i < n_scored && pos0 + i + 1 < s->n_prompt; i++) {
        di_step_row *row = add_sample(step, s, k, i, pos0 + i + 1);
        row->is_prompt = true;
        row->forced = s->tokens[pos0 + i + 1];
    }
    s->n_sched = end;
    step->n_logits += n_logits;
    if (!draws)
        return;
    add_sample(step, s, k, n_logits - 1, end);
    s->is_decoding = true;
    s->n_coming++;
    s->drafts_asked = 0;
    if (s->held)
        fork_held(c, step, s, k, n_logits - 1);
}

/* Puts the row of a decoding sequence's newest token into the step, and room for drafts behind it. */
static void add_decoding(di_core *c, di_step *step, di_sequence *s) {
    int64_t end = rows_at_most(s);
    int32_t n_drafts = s->ahead_max;
    int32_t snapshot = di_seq_plan_snapshot(c, step, s, end + n_drafts);
    int32_t k = add_seq(step, s, s->n_blocks);
    step->seqs[k].is_decoding = true;
    step->seqs[k].drafts_max = n_drafts;
    step->seqs[k].sample_at = step->n_samples;
    step->seqs[k].snapshot_at = snapshot;
    step->rows[k] = (di_seq_rows){
        .tokens = s->tokens,
        .slot = s->slot,
        .tap_slot = s->tap_slot,
        .n_blocks = s->n_blocks,
        .rect = s->rect,
        .valid_start = s->valid_start,
        .page_from = s->page_from,
    };
    count_rows(c, step, s, 1, end);
    add_sample(step, s, k, 0, 0)->n_span = 1 + n_drafts;
    step->n_samples += n_drafts;
    step->n_logits++;
    s->n_coming++;
    s->drafts_asked = n_drafts;
}

/* What the step may still take. */
typedef struct budget {
    int64_t rows, prompt_rows, logits;
} budget;

/* A chunk of a prompt, as long as the budget allows; false when it allows none. */
static bool add_chunk(di_core *c, di_step *step, di_sequence *s, budget *b) {
    int64_t n = DI_MIN(DI_MIN(rows_left(s), c->options.chunk_max), DI_MIN(b->rows, b->prompt_rows));
    if (di_sequence_scores_prompt(s))
        n = DI_MIN(n, b->logits);
    if (n <= 0 || b->logits <= 0 || step->n_seqs == c->options.seqs_max)
        return false;
    const di_span *unit = di_sequence_unit_at(s, s->n_sched + n);
    if (unit) { /* the chunk ends before the unit, or has all of it; the pace gives way */
        n = unit->at > s->n_sched ? unit->at - s->n_sched : unit->at + unit->n - s->n_sched;
        if (n > b->rows || (di_sequence_scores_prompt(s) && n > b->logits))
            return false;
    }
    if (c->options.context_sum_max > 0 && step->n_seqs > 0 &&
        step->context_sum + s->n_sched + n > c->options.context_sum_max)
        return false;
    int64_t logits_before = step->n_logits;
    add_rows(c, step, s, n);
    b->rows -= n;
    b->prompt_rows -= n;
    b->logits -= step->n_logits - logits_before;
    return true;
}

/* Prompt rows of this step by the pace; `first` is the prompt that has waited longest, NULL: none. */
static int64_t pace(di_core *c, const di_step *step, const di_sequence *first, int64_t rows) {
    if (c->options.tpot_goal_ns <= 0)
        return rows;
    di_pace_ask ask = {
        .rows_max = rows,
        .rows_wanted = rows,
        .n_decode = step->n_seqs,
        .waited_ns = first && first->gen.n_tokens == 0 ? di_clock_ns() - first->gen.submit_ns : -1,
        .rows_to_go = first ? first->n_tokens - first->n_sched : 0,
    };
    return di_pace_rows(&c->pace, &ask);
}

static di_sequence *sequence_of(di_sched_item *item) {
    return item ? (di_sequence *)(void *)((char *)item - offsetof(di_sequence, item)) : NULL;
}

/* Takes in waiting requests while the next one fits; with `over`, only those that are more urgent than it. */
static void admit(di_core *c, di_step *step, budget *b, const di_sequence *over) {
    int64_t n_reserved = reserved_blocks(c);
    while (c->n_running < c->options.seqs_max && step->n_seqs < c->options.seqs_max && b->rows > 0 &&
           b->prompt_rows > 0 && b->logits > 0) {
        di_sequence *s = sequence_of(di_sched_peek(&c->queue));
        if (!s || (over && s->item.priority >= over->item.priority))
            return;
        n_reserved += is_near_border(s, di_kv_blocks_for(s->n_tokens));
        if (!di_seq_admit(c, step, s, n_reserved))
            return;
        di_sched_remove(&c->queue, &s->item);
        s->state = DI_SEQ_RUNNING;
        s->run_idx = c->n_running;
        c->running[c->n_running++] = s;
        keep_draft_ln(c, s);
        if (!s->gen.start_ns) {
            s->gen.start_ns = di_clock_ns();
            c->stats.queue_sum_ns += s->gen.start_ns - s->gen.submit_ns;
        }
        int32_t n_running = c->n_running;
        if (!add_chunk(c, step, s, b))
            return;
        if (c->n_running > n_running) /* forks have joined */
            n_reserved = reserved_blocks(c);
    }
}

static void form(di_core *c, di_step *step) {
    int32_t n_late_pages = c->n_late_page_copies, n_late_slots = c->n_late_slot_copies;
    reset(c, step);
    grow_running(c);
    budget b = {.rows = c->options.batch_tokens_max, .logits = c->options.logits_max};
    di_sequence *first = NULL; /* among prompts under way */
    /* Forks that join meanwhile wait for the token that this step gives them. */
    int32_t n_chunking = 0, n_running = c->n_running;
    for (int32_t i = 0; i < n_running; i++) {
        di_sequence *s = c->running[i];
        int64_t n = rows_left(s);
        if (n > 0 && !s->is_decoding) {
            n_chunking++;
            if (!first || di_sched_precedes(&s->item, &first->item))
                first = s;
        } else if (n > 0) {
            add_decoding(c, step, s);
            b.rows--;
            b.logits--;
        }
    }
    di_sequence *head = sequence_of(di_sched_peek(&c->queue));
    b.prompt_rows = pace(c, step, first ? first : head, b.rows);
    c->stats.n_chunking = n_chunking;
    if (head && first)
        admit(c, step, &b, first);
    /* Prompts under way, oldest first: there are few, and each turn takes the next in order. */
    for (int32_t taken = 0; taken < n_chunking && first; taken++) {
        if (!add_chunk(c, step, first, &b))
            break;
        const di_sequence *last = first;
        first = NULL;
        for (int32_t i = 0; i < c->n_running; i++) {
            di_sequence *s = c->running[i];
            if (!s->is_decoding && rows_left(s) > 0 && di_sched_precedes(&last->item, &s->item) &&
                (!first || di_sched_precedes(&s->item, &first->item)))
                first = s;
        }
    }
    if (head)
        admit(c, step, &b, NULL);
    for (int32_t k = 0; k < step->n_seqs; k++)
        step->rows[k].blocks = step->blocks + step->seqs[k].blocks_at;
    step->spare_rows = DI_MAX(DI_MIN(b.rows, b.logits), 0);
    if (step->n_seqs == 0) { /* not launched, and nothing was forked: the copies wait for the next one */
        c->n_late_page_copies = n_late_pages;
        c->n_late_slot_copies = n_late_slots;
    }
}

/* ---- sampling's arguments ---- */

/* Once the tokens before are committed: what each row of the step is drawn with. Of drafts' rows the runner makes it
 * from the row before them. */
static void fill_samples(di_step *step) {
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        di_step_row *row = &step->samples[i];
        di_sequence *s = row->seq;
        row->is_skipped = di_sequence_is_finished(s);
        if (row->is_skipped)
            continue;
        row->n_top = row->is_prompt ? s->sampling.n_prompt_logprobs : s->sampling.n_logprobs;
        if (!row->is_prompt)
            row->forced = di_sequence_forced(s);
        if (row->n_top <= 0)
            continue;
        size_t n = step->n_tops + (size_t)row->n_top * (size_t)row->n_span;
        if (n > step->tops_cap) {
            size_t cap = DI_MAX(n, 2 * step->tops_cap);
            di_logprob *grown = realloc(step->tops, cap * sizeof *grown);
            if (!grown) {
                di_error err = {0};
                (void)di_fail(&err, DI_ERR_MEMORY, "%zu log-probabilities of a step", n);
                di_sequence_fail(s, &err);
                row->is_skipped = true;
                continue;
            }
            step->tops = grown;
            step->tops_cap = cap;
        }
        row->top_at = step->n_tops;
        step->n_tops = n;
    }
}

/* A step that held s is over. */
static void land(di_sequence *s) {
    s->n_flight--;
    if (s->state == DI_SEQ_WAITING && s->n_flight == 0)
        s->item.is_ready = true;
}

/* ---- committing ---------------------------------------------------------------------------------------------------
 */

static void take_first_token(di_core *c, di_sequence *s) {
    int64_t ttft_ns = s->gen.first_ns - s->gen.submit_ns;
    c->stats.n_ttft++;
    c->stats.ttft_sum_ns += ttft_ns;
    c->stats.ttft_max_ns = DI_MAX(c->stats.ttft_max_ns, ttft_ns);
    if (c->options.ttft_goal_ns > 0 && ttft_ns > c->options.ttft_goal_ns)
        c->stats.ttft_goal_missed++;
}

/* Row i of the step, of the span that begins at `row`. */
static void commit_token(di_core *c, const di_step *step, const di_step_row *row, int32_t i, int64_t now_ns) {
    const di_step_result *result = &step->results[i];
    di_sequence *s = row->seq;
    if (di_sequence_is_finished(s) || row->is_skipped) {
        c->stats.n_dropped++;
        return;
    }
    if (result->status) {
        di_sequence_fail(s, &step->errors[i]);
        return;
    }
    s->gen.last_ns = now_ns;
    if (!s->gen.first_ns) {
        s->gen.first_ns = now_ns;
        take_first_token(c, s);
    }
    c->stats.output_tokens++;
    size_t top_at = row->top_at + (size_t)(&step->samples[i] - row) * (size_t)DI_MAX(row->n_top, 0);
    di_sequence_advance(s, result->token, result->logprob, row->n_top > 0 ? step->tops + top_at : NULL);
}

static void commit_prompt(const di_step *step, int32_t i) {
    const di_step_row *row = &step->samples[i];
    const di_step_result *result = &step->results[i];
    if (di_sequence_is_finished(row->seq) || row->is_skipped)
        return;
    if (result->status)
        di_sequence_fail(row->seq, &step->errors[i]);
    else
        di_sequence_prompt_logprobs(row->seq, row->position, result->logprob,
                                    row->n_top > 0 ? step->tops + row->top_at : NULL);
}

/* The first token behind a prompt. */
static void commit_first(di_core *c, const di_step *step, int32_t i, int64_t now_ns) {
    const di_step_row *row = &step->samples[i];
    di_sequence *s = row->seq;
    s->n_coming--;
    if (row->fork_of)
        land(s);
    if (row->fork_of && s->sampling.n_prompt_logprobs >= 0 && !di_sequence_is_finished(s)) {
        const di_generation *leader = &row->fork_of->gen;
        if (leader->finish == DI_FINISH_ERROR && leader->n_tokens == 0) { /* some of the prompt was not scored */
            di_sequence_fail(s, &leader->error);
            return;
        }
        di_sequence_copy_prompt_logprobs(s, row->fork_of);
    }
    commit_token(c, step, row, i, now_ns);
}

static void commit_decoding(di_core *c, const di_step *step, const di_step_seq *q, int64_t now_ns) {
    di_sequence *s = q->seq;
    di_core_stats *st = &c->stats;
    s->n_coming--;
    if (di_sequence_is_finished(s)) {
        st->n_dropped += q->logits_at >= 0;
        return;
    }
    for (int32_t j = 0; j < q->n_new; j++)
        commit_token(c, step, &step->samples[q->sample_at], q->sample_at + j, now_ns);
    for (int32_t j = 0; j < q->n_drafts && q->n_new > 0; j++) {
        st->verified_at[j]++;
        st->accepted_at[j] += j < q->n_new - 1;
        st->draft_tokens++;
        st->accepted_tokens += j < q->n_new - 1;
    }
    s->gen.n_drafts += q->n_new > 0 ? q->n_drafts : 0;
    s->gen.n_accepted += DI_MAX(q->n_new - 1, 0);
}

static void count_step(di_core *c, const di_step *step) {
    di_core_stats *st = &c->stats;
    st->n_steps++;
    if (step->n_prompt_rows > 0)
        st->n_prefill_steps++;
    else
        st->n_decode_steps++;
    st->forward_ns += step->forward_ns - step->start_ns;
    st->sample_ns += step->drawn_ns - step->sample_ns;
    st->draft_ns += step->end_ns - step->drawn_ns;
    st->n_draft_rounds += step->n_drafters;
    st->draft_error = step->draft_error;
    memcpy(st->calibration_n, step->calibration_n, sizeof st->calibration_n);
    memcpy(st->calibration_held, step->calibration_held, sizeof st->calibration_held);
    memcpy(st->calibration_sum, step->calibration_sum, sizeof st->calibration_sum);
    st->saved_ns = (int64_t)step->saved_ns;
    st->device_busy_ns = step->device_busy_ns;
    st->device_idle_ns = step->device_idle_ns;
    st->n_tested = step->n_tested;
    st->expected_sum = step->expected_sum;
    st->bound_sum = step->bound_sum;
    if (step->follows)
        st->wait_ns += DI_MAX(step->start_ns - c->last_end_ns, 0) + (step->sample_ns - step->forward_ns);
    c->last_end_ns = step->end_ns;
    st->context_sum = step->context_run;
    st->context_max = step->context_max;
    st->step_rows = step->rows_run;
    di_pace_learn(&c->pace, step->n_prompt_rows, step->rows_run - step->n_prompt_rows, step->end_ns - step->start_ns);
}

static void commit(di_core *c, di_step *step) {
    count_step(c, step);
    for (int32_t k = 0; k < step->n_seqs; k++) {
        land(step->seqs[k].seq);
        if (step->error.code)
            di_sequence_fail(step->seqs[k].seq, &step->error);
    }
    int64_t now_ns = di_clock_ns();
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        di_step_row *row = &step->samples[i];
        if (step->error.code) {
            di_sequence_fail(row->seq, &step->error); /* forks have no rows of their own */
            row->is_skipped = true;
        }
        if (row->is_prompt)
            commit_prompt(step, i);
        else if (row->fork_of || !step->seqs[row->seq_idx].is_decoding)
            commit_first(c, step, i, now_ns);
    }
    for (int32_t k = 0; k < step->n_seqs; k++) {
        const di_step_seq *q = &step->seqs[k];
        di_sequence *s = q->seq;
        if (q->is_decoding)
            commit_decoding(c, step, q, now_ns);
        if (step->error.code || q->epoch != s->epoch)
            continue;
        s->n_done = q->is_decoding ? s->n_tokens - 1 : s->n_done + step->rows[k].n_rows;
        s->n_sched = DI_MAX(s->n_sched, s->n_done);
        di_seq_publish(c, s);
    }
    di_step_keep_snapshots(c, step);
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        if (di_sequence_is_finished(step->samples[i].seq))
            retire(c, step->samples[i].seq);
    }
    for (int32_t k = 0; k < step->n_seqs; k++) {
        if (di_sequence_is_finished(step->seqs[k].seq))
            retire(c, step->seqs[k].seq);
    }
    reap(c);
}

/* ---- the turn ---- */

/* Nothing runs and the next request can't be admitted: it never can. */
static void refuse_head(di_core *c) {
    di_sequence *s = sequence_of(di_sched_peek(&c->queue));
    if (!s)
        return;
    di_error err = {0};
    (void)di_fail(&err, DI_ERR_MEMORY, "%lld tokens need %lld KV blocks and a state slot, free are %d of %d blocks",
                  (long long)s->n_tokens, (long long)di_kv_blocks_for(s->n_tokens),
                  c->kv.blocks.n_free + di_prefix_idle(c->prefix), c->kv.blocks.n_units);
    di_sequence_fail(s, &err);
    retire(c, s);
    reap(c);
}

static int64_t finish(di_core *c, di_step *step) {
    int64_t start_ns = di_clock_ns();
    di_runner_wait(&c->runner, step);
    int64_t end_ns = di_clock_ns();
    commit(c, step);
    di_trace_span(c->options.trace, DI_TRACE_ENGINE, "wait", start_ns, end_ns, 0, NULL);
    di_trace_span(c->options.trace, DI_TRACE_ENGINE, "commit", end_ns, di_clock_ns(), 0, NULL);
    return end_ns - start_ns;
}

bool di_core_step(di_core *c) {
    int64_t start_ns = di_clock_ns(), waited_ns = 0;
    end_from_outside(c);
    reap(c);
    di_step *step = &c->steps[c->step_next], *before = c->in_flight;
    form(c, step);
    bool is_formed = step->n_seqs > 0;
    if (is_formed) {
        di_trace_arg args[] = {{"sequences", step->n_seqs}, {"rows", step->n_rows}, {"waiting", c->queue.n_items}};
        di_trace_span(c->options.trace, DI_TRACE_ENGINE, "form", start_ns, di_clock_ns(), (int)DI_COUNT(args), args);
        di_runner_launch(&c->runner, step);
        c->step_next = !c->step_next;
    }
    c->in_flight = is_formed ? step : NULL;
    if (before)
        waited_ns += finish(c, before);
    if (is_formed) {
        fill_samples(step);
        di_runner_sample(&c->runner, step);
    }
    if (is_formed && c->options.is_sync) {
        waited_ns += finish(c, step);
        c->in_flight = NULL;
    }
    if (!is_formed && !before)
        refuse_head(c);
    c->stats.host_ns += di_clock_ns() - start_ns - waited_ns;
#ifdef DEEPINFER_DEBUG
    DI_ASSERT(di_core_check(c) == NULL);
#endif
    di_core_log_stats(c);
    return c->in_flight || di_core_pending(c) > 0;
}
