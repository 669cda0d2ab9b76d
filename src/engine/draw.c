/* From logits to tokens: drawing a step's rows, acceptance of drafts, the next drafts; all on the runner's thread.
 *
 * A decoding sequence has the row of its newest token (golden) and those of the drafts behind it. Row j gives the token
 * of the position behind draft j-1, drawn as it would be without drafts: its noise is of its seed and position alone. A
 * draft holds when it is that token, so what comes out is the same whether there are drafts or not:
 *
 *     rows    golden   d1    d2    d3          tokens of the step: d1 d2 x, when the third row draws x and not d3
 *     draws   d1       d2    x     ...         x is golden in the next step
 *
 * Drafts are drawn from the draft module's logits with the same noise, so that both draw the same token wherever their
 * distributions nearly agree (Gumbel-max coupling). Rejected rows leave bytes behind in pages and rings, at positions
 * behind golden that later rows write again before anything reads them. */
#include <math.h>

#include "engine_internal.h"

/* Weight of a draft in the running chance that a draft holds if those before it do. Where all sequences draft it has a
 * long memory: of sequences that began together, those whose drafts fail run longest, and what they say last is not
 * what the next ones may expect. Probes are few, and are there to find out. */
#define RATE_LEARN (1.0 / 512)
#define RATE_LEARN_PROBE (1.0 / 32)
#define RATE_PRIOR 32 /* drafts that the chance at the start stands for */

/* ---- planning ---- */

/* A decoding sequence without rows in the step. */
static bool is_void(const di_step_seq *q) {
    return q->is_decoding && di_sequence_is_whole(q->seq);
}

static void apply_plan(di_runner *r, di_step *step, const di_spec_plan *plan, double draft_ns) {
    int32_t at = 0;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        if (!q->is_decoding || is_void(q))
            continue;
        q->n_drafts = r->plan[at++];
        step->n_verified += q->n_drafts;
        if (plan)
            q->seq->round_cost =
                plan->plain_ns > 0 ? q->n_drafts * plan->tokens_per_draft + draft_ns / plan->plain_ns : 0;
    }
}

static void ask_plan(di_runner *r, di_step *step, int32_t n, int64_t other_rows, int64_t other_context) {
    di_spec_plan plan;
    if (r->n_drafts == 0) { /* tokens that are certain: all, as long as there is room */
        int64_t spare = step->spare_rows;
        for (int32_t i = 0; i < n; i++) {
            r->plan[i] = (int32_t)DI_MIN((int64_t)r->plan_seqs[i].n_drafts, spare);
            spare -= r->plan[i];
        }
        apply_plan(r, step, NULL, 0);
        return;
    }
    double draft_ns = di_spec_cost_draft_ns(&r->cost, n);
    di_spec_ask ask = {
        .policy = r->is_probing ? DI_SPEC_FIXED : r->policy,
        .n_seqs = n,
        .seqs = r->plan_seqs,
        .n_drafts = r->n_drafts,
        .rows_max = n + step->spare_rows,
        .cost = &r->cost,
        .other_rows = other_rows,
        .other_context = other_context,
        .always_ns = draft_ns,
        .gain_min = 0.01,
        .rate_hint = r->rate_hint,
        .curve = r->curve,
        .scratch = r->plan_scratch,
    };
    di_spec_plan_make(&ask, r->plan, &plan);
    r->rate_hint = plan.ns > 0 ? plan.tokens / plan.ns : 0;
    apply_plan(r, step, &plan, draft_ns);
}

void di_step_plan(di_runner *r, di_step *step) {
    int32_t n = 0, n_ready = 0;
    int64_t other_rows = 0, other_context = 0;
    step->n_decoding = step->n_verified = step->n_held = 0;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        di_sequence *s = q->seq;
        const di_seq_rows *rows = &step->rows[k];
        q->n_drafts = q->n_new = 0;
        if (!q->is_decoding) {
            other_rows += rows->n_rows;
            other_context += di_step_row_context(rows->pos0, rows->n_rows);
            continue;
        }
        if (is_void(q))
            continue;
        step->n_decoding++;
        /* Rows end with the block table, too. */
        int64_t n_rows = DI_MIN(di_sequence_rows_max(s), (int64_t)rows->n_blocks * DI_PAGE_TOKENS) - s->golden;
        int64_t room = DI_MIN((int64_t)DI_MIN(s->n_drafts, q->drafts_max), n_rows - 1);
        r->plan_seqs[n++] = (di_spec_seq){
            .n_drafts = (int32_t)DI_MAX(room, 0),
            .may_speculate = room > 0,
            .n_context = s->golden,
            .confidence = s->chances,
            .before = s->n_before > 0 ? s->before : NULL,
            .n_before = s->n_before,
        };
        n_ready += room > 0;
    }
    if (n_ready > 0)
        ask_plan(r, step, n, other_rows, other_context);
}

/* ---- drawing ---- */

/* fn for every part, on the device's host threads where there is something to share. */
static void run_parts(const di_runner *r, di_pool_fn fn, void *ctx, int32_t n) {
    if (n > 1 && r->n_workers > 1) {
        r->backend->device->host_run(r->device, fn, ctx, n);
        return;
    }
    for (int32_t i = 0; i < n; i++)
        fn(ctx, i, n, 0);
}

typedef struct draw_job {
    di_runner *runner;
    di_step *step;
    const float *logits; /* device */
} draw_job;

static di_status fetch(const di_runner *r, float *row, const float *logits, int64_t at, di_error *err) {
    return r->backend->device->download(r->device, row, logits + at * r->n_vocab, (size_t)r->n_vocab * sizeof *row,
                                        err);
}

/* What a token of s at `position` is drawn with, drafts of the same step or round before it included. `mask_row` is its
 * place among the rows of the next step. */
static di_sample_args args_of(const di_runner *r, const di_sequence *s, const float *logits, int64_t position,
                              int64_t n_known, int32_t mask_row) {
    int64_t n_drafts = position - s->n_prompt - n_known;
    const di_mask_rows *m = s->masks;
    return (di_sample_args){
        .sampling = &s->sampling,
        .logits = logits,
        .n_vocab = r->n_vocab,
        .seed = s->seed,
        .position = (uint64_t)position,
        .n_output = position - s->n_prompt,
        .eos_id = r->eos_id,
        .mask = m ? m->words + (size_t)mask_row * m->n_words : NULL,
        .blacklist = r->blacklist,
        .history = s->has_history ? &s->history : NULL,
        .drafts = s->has_history && n_drafts > 0 ? s->tokens + s->n_prompt + n_known : NULL,
        .n_drafts = s->has_history ? (int32_t)n_drafts : 0,
        .forced = -1,
    };
}

typedef struct row_choice {
    di_spec_row row;
    float distance;
} row_choice;

static int32_t choose_row(void *ctx, const float *p, int64_t n_vocab) {
    row_choice *choice = ctx;
    di_spec_row *row = &choice->row;
    int32_t token;
    row->p = p;
    row->n_vocab = n_vocab;
    (void)di_spec_row_token(row, &token);
    if (row->ln_q)
        choice->distance = (float)di_spec_distance(p, row->ln_q, n_vocab);
    return token;
}

/* Acceptance by rejection: row j tests draft j against what it was drawn from, the last one draws. Tokens that are
 * certain anyway need no test, and leave no trace in the uniforms behind them. */
static di_spec_row rejection_row(const di_runner *r, const di_sequence *s, const di_step_seq *q,
                                 const di_step_row *row) {
    bool has_drafts = q->is_decoding && q->n_drafts > 0 && s->is_drafted;
    int32_t j = has_drafts ? row->logits_row : 0;
    bool is_test = has_drafts && j < q->n_drafts;
    return (di_spec_row){
        .seed = s->seed,
        .first = (int32_t)(row->position - j),
        .row = j,
        .draft = is_test ? s->tokens[row->position] : -1,
        .ln_q = is_test ? s->draft_ln + (size_t)j * (size_t)r->n_vocab : NULL,
        .is_last = !is_test,
    };
}

/* What choose_row decides by, as numbers for the device. */
static di_sample_how how_of(const di_spec_row *row) {
    int32_t position = di_spec_position(row->first, row->row);
    if (row->is_last)
        return (di_sample_how){.rule = DI_SAMPLE_DRAW, .u = di_spec_uniform(row->seed, position, DI_SPEC_DRAW)};
    return (di_sample_how){
        .rule = DI_SAMPLE_TEST,
        .u = di_spec_uniform(row->seed, position, DI_SPEC_REDRAW),
        .u_test = di_spec_uniform(row->seed, position, DI_SPEC_TEST),
        .draft = row->draft,
        .ln_q = row->ln_q,
    };
}

/* Without a mask the row can't be drawn: either its constraint has failed, or it lies behind an end mark or behind a
 * draft that can't come, and nobody will look at it. */
static di_status no_mask(const di_runner *r, const di_mask_rows *m, int64_t position, int32_t *token, di_error *err) {
    *token = r->eos_id;
    if (!m->status)
        return DI_OK;
    *err = m->error;
    return di_error_context(err, m->status, "position %lld", (long long)position);
}

/* The row's place among those that its sequence's masks are for. */
static int32_t mask_row_of(const di_step *step, const di_step_row *row) {
    return step->seqs[row->seq_idx].is_decoding ? row->logits_row : 0;
}

static bool lacks_mask(const di_step *step, const di_step_row *row) {
    return !row->is_prompt && row->seq->masks && mask_row_of(step, row) >= row->seq->masks->n_rows;
}

static bool is_by_rejection(const di_runner *r, const di_sequence *s) {
    return r->accept == DI_SPEC_REJECTION && !di_sampling_is_greedy(&s->sampling);
}

static di_status draw(const draw_job *job, const di_step_row *row, int worker, di_step_result *result, di_error *err) {
    di_runner *r = job->runner;
    const di_sequence *s = row->seq;
    const di_step_seq *q = &job->step->seqs[row->seq_idx];
    int32_t mask_row = mask_row_of(job->step, row);
    if (lacks_mask(job->step, row))
        return no_mask(r, s->masks, row->position, &result->token, err);
    float *logits = r->rows[worker];
    di_status st = fetch(r, logits, job->logits, q->logits_at + row->logits_row, err);
    if (st)
        return st;
    di_logprob *top = row->n_top > 0 ? job->step->tops + row->top_at : NULL;
    if (row->is_prompt)
        return di_logprobs_of(&r->samplers[worker], logits, r->n_vocab, row->forced, DI_MAX(row->n_top, 0),
                              &result->logprob, top, err);
    di_sample_args args = args_of(r, s, logits, row->position, row->position - s->n_prompt - mask_row, mask_row);
    args.forced = row->forced;
    args.logprob = row->n_top >= 0 ? &result->logprob : NULL;
    args.top = top;
    if (!is_by_rejection(r, s))
        return di_sample(&r->samplers[worker], &args, &result->token, err);
    row_choice choice = {.row = rejection_row(r, s, q, row)};
    args.choose = choose_row;
    args.choose_ctx = &choice;
    st = di_sample(&r->samplers[worker], &args, &result->token, err);
    result->distance = choice.distance;
    return st;
}

static void draw_row(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const draw_job *job = ctx;
    int32_t i = job->step->drawn[part];
    di_step_result *result = &job->step->results[i];
    result->status = draw(job, &job->step->samples[i], worker, result, &job->step->errors[i]);
    /* A forward that is formed already reads a token here; what it makes of a row that failed is dropped. */
    if (result->status)
        result->token = 0;
}

/* ---- drawing on the device ---- */

/* A row of the step for the device; what a row without a mask gives is decided behind it. */
static di_status pack_row(di_runner *r, const di_step *step, const di_step_row *row, di_step_result *result,
                          di_error *err) {
    const di_sequence *s = row->seq;
    const di_step_seq *q = &step->seqs[row->seq_idx];
    int32_t mask_row = mask_row_of(step, row);
    int64_t logits_row = q->logits_at + row->logits_row;
    if (row->is_prompt) {
        di_sample_pack_prompt(&r->drawer.pack, row->forced, DI_MAX(row->n_top, 0), logits_row, (int64_t)row->top_at);
        return DI_OK;
    }
    bool is_maskless = lacks_mask(step, row);
    di_sample_args args =
        args_of(r, s, NULL, row->position, row->position - s->n_prompt - mask_row, is_maskless ? 0 : mask_row);
    args.forced = is_maskless ? r->eos_id : row->forced;
    args.logprob = row->n_top >= 0 && !is_maskless ? &result->logprob : NULL;
    args.top = args.logprob && row->n_top > 0 ? step->tops + row->top_at : NULL;
    if (is_maskless || !is_by_rejection(r, s))
        return di_sample_pack_add(&r->drawer.pack, &args, NULL, logits_row, (int64_t)row->top_at, err);
    di_spec_row test = rejection_row(r, s, q, row);
    di_sample_how how = how_of(&test);
    return di_sample_pack_add(&r->drawer.pack, &args, &how, logits_row, (int64_t)row->top_at, err);
}

/* Puts the draw of the step's n listed rows on the stream. A sequence of which one row is drawn goes on behind the
 * token of that row, wherever it is until then. */
static di_status launch_drawn(di_runner *r, di_step *step, const float *logits, int32_t n, di_error *err) {
    di_status st = di_drawer_begin(r, n, err);
    for (int32_t k = 0; k < n && !st; k++) {
        int32_t i = step->drawn[k];
        const di_step_row *row = &step->samples[i];
        st = pack_row(r, step, row, &step->results[i], err);
        if (!row->is_prompt) {
            row->seq->coming_row = k;
            row->seq->coming_at = row->position;
        }
    }
    return st ? st : di_drawer_launch(r, logits, err);
}

static void take_drawn(di_runner *r, di_step *step) {
    if (!step->draw_status)
        step->draw_status = di_drawer_wait(r, step->tops, &step->draw_error);
    for (int32_t k = 0; k < step->n_drawn; k++) {
        int32_t i = step->drawn[k];
        const di_step_row *row = &step->samples[i];
        di_step_result *result = &step->results[i];
        row->seq->coming_row = -1;
        if (step->draw_status) {
            step->errors[i] = step->draw_error;
            result->status = step->draw_status;
        } else if (lacks_mask(step, row)) {
            result->status = no_mask(r, row->seq->masks, row->position, &result->token, &step->errors[i]);
        } else {
            const di_sample_result *got = &di_drawer_results(r)[k];
            *result = (di_step_result){.token = got->token, .logprob = got->logprob, .distance = got->distance};
            result->status = di_sample_failure(got->status, !row->is_prompt, (uint64_t)row->position, &step->errors[i]);
        }
        if (result->status)
            result->token = 0;
    }
}

/* Lists the rows that are drawn, those of drafts made from the one before them; returns their number. */
static int32_t list_rows(di_step *step) {
    int32_t n = 0;
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        const di_step_row *row = &step->samples[i];
        const di_step_seq *q = &step->seqs[row->seq_idx];
        if (row->is_skipped || q->logits_at < 0)
            continue;
        step->drawn[n++] = i;
        for (int32_t j = 1; row->n_span > 1 && j <= q->n_drafts; j++) {
            di_step_row *next = &step->samples[i + j];
            *next = *row;
            next->position += j;
            next->logits_row += j;
            next->top_at += (size_t)j * (size_t)DI_MAX(row->n_top, 0);
            next->forced = -1;
            step->drawn[n++] = i + j;
        }
    }
    return n;
}

/* The drafts that hold are in their places already; the token behind them is new. */
static void accept(di_runner *r, di_step *step, di_step_seq *q) {
    di_sequence *s = q->seq;
    const di_step_result *result = &step->results[q->sample_at];
    if (step->samples[q->sample_at].is_skipped || q->logits_at < 0)
        return;
    int32_t n = 0;
    while (n < q->n_drafts && !result[n].status && result[n].token == s->tokens[s->golden + 1 + n])
        n++;
    q->n_new = n + 1;
    step->n_held += n;
    bool is_tested = r->accept == DI_SPEC_REJECTION && s->draft_ln && s->is_drafted;
    for (int32_t j = 0; j < DI_MIN(n + 1, q->n_drafts) && is_tested; j++) {
        double d = (double)result[j].distance;
        r->n_tested++;
        r->expected_sum += 1 - d;
        r->bound_sum += (1 - d) / (1 + d);
    }
    if (s->n_drafts > 0 && s->is_drafted) {
        /* Of the drafts whose predecessors held: what is behind the first one that does not was not tried. */
        int32_t n_tried = DI_MIN(n + 1, q->n_drafts);
        double weight = DI_MAX(1.0 / (RATE_PRIOR + (double)r->n_tried), RATE_LEARN);
        r->rate += (r->is_probing ? RATE_LEARN_PROBE : weight) * (n - n_tried * r->rate);
        r->n_tried += n_tried;
        di_spec_guard_learn(&s->guard, q->n_drafts, n, s->round_cost);
        di_spec_calibration_learn(&r->calibration, DI_MIN(q->n_drafts, s->n_unsure), DI_MIN(n, s->n_unsure), s->raw);
    }
    s->golden += 1 + n;
    s->tokens[s->golden] = result[n].token;
    s->n_drafts = 0;
}

/* Whether the row gives a sequence the first token that it decodes behind. */
static bool begins_decoding(const di_step *step, const di_step_row *row) {
    return !row->is_prompt && !row->is_skipped && (row->fork_of || !step->seqs[row->seq_idx].is_decoding);
}

/* Before its next row can be launched, which may be before its token is known. */
static void begin_decoding(di_runner *r, di_sequence *s) {
    s->n_drafts = s->n_before = 0;
    s->put_off = s->put_off_end = 0;
    s->has_chances = false;
    if (r->n_drafts == 0)
        return;
    r->n_changed++;
    di_spec_guard_init(&s->guard, (float)r->rate);
}

void di_step_draw_begin(di_runner *r, di_step *step, const float *logits) {
    draw_job job = {r, step, logits};
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        if (begins_decoding(step, &step->samples[i]))
            begin_decoding(r, step->samples[i].seq);
    }
    step->n_drawn = list_rows(step);
    if (r->executor.sample)
        step->draw_status = launch_drawn(r, step, logits, step->n_drawn, &step->draw_error);
    else
        run_parts(r, draw_row, &job, step->n_drawn);
}

void di_step_draw_end(di_runner *r, di_step *step) {
    if (r->executor.sample)
        take_drawn(r, step);
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        const di_step_row *row = &step->samples[i];
        if (!begins_decoding(step, row))
            continue;
        row->seq->golden = row->position;
        row->seq->tokens[row->position] = step->results[i].token;
    }
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        if (q->is_decoding)
            accept(r, step, q);
    }
}

/* ---- drafting ---- */

/* Whether s goes on, as far as its newest token tells. */
static bool goes_on(const di_runner *r, const di_sequence *s) {
    bool has_ended = s->tokens[s->golden] == r->eos_id && di_sequence_ends_at_eos(s);
    return !has_ended && s->golden + 1 < di_sequence_rows_max(s);
}

static bool can_draft(const di_runner *r, di_sequence *s) {
    bool needs_ln = r->accept == DI_SPEC_REJECTION && !di_sampling_is_greedy(&s->sampling);
    if (!s->may_draft || s->golden - 1 + r->n_drafts >= r->context_max || (needs_ln && !s->draft_ln))
        return false;
    return r->policy != DI_SPEC_COST || di_spec_guard_step(&s->guard);
}

/* A sequence that drafts nothing; what its constraint makes certain comes along all the same. */
static void add_sure_sequence(di_runner *r, di_sequence *s) {
    if (s->masks)
        r->sure[r->n_sure++] = s;
}

static void add_sequence(di_runner *r, di_step *step, di_sequence *s, int32_t at) {
    if (!goes_on(r, s)) {
        r->n_changed += r->n_drafts > 0;
        return;
    }
    r->n_going++;
    if (!can_draft(r, s)) {
        add_sure_sequence(r, s);
        return;
    }
    int32_t n = step->n_drafters++;
    r->drafters[n] = s;
    r->draft_seqs[n] =
        (di_draft_seq){.token = s->tokens[s->golden], .last = s->golden - 1, .slot = step->rows[at].slot};
    r->drafter_rows[n] = at;
    if (r->policy != DI_SPEC_COST)
        return;
    di_spec_guard_confidence(&s->guard, r->n_drafts, s->chances);
    r->plan_seqs[n] =
        (di_spec_seq){.n_drafts = r->n_drafts, .may_speculate = true, .n_context = s->golden, .confidence = s->chances};
}

/* The sequences that the step gave a token: those that may draft, and others with a constraint. */
static void collect(di_runner *r, di_step *step) {
    step->n_drafters = r->n_sure = r->n_going = 0;
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        const di_step_row *row = &step->samples[i];
        const di_step_seq *q = &step->seqs[row->seq_idx];
        if (row->is_prompt || row->is_skipped || step->results[i].status)
            continue;
        if (row->fork_of || !q->is_decoding || (q->n_new > 0 && !step->results[i + q->n_new - 1].status))
            add_sequence(r, step, row->seq, row->seq_idx);
    }
}

enum { PROBE_FIRST = 64, PROBE_LAST = 1024, PROBE_ROUNDS = 8, PROBE_SEQS = 2 };

static int32_t probe_wait(const di_runner *r) {
    return DI_MAX(r->probe_after, (int32_t)PROBE_FIRST);
}

bool di_step_probe_is_due(const di_runner *r) {
    return r->steps_idle >= probe_wait(r);
}

/* Whether a round is due that does not pay: a few in a row, for a few sequences. They become rarer as long as they
 * bring nothing new. */
static bool probes(di_runner *r, di_step *step) {
    int32_t wait = probe_wait(r);
    r->is_probing = r->steps_idle++ >= wait;
    if (!r->is_probing)
        return false;
    if (r->steps_idle >= wait + PROBE_ROUNDS) {
        r->steps_idle = 0;
        r->probe_after = DI_MIN(2 * wait, (int32_t)PROBE_LAST);
    }
    while (step->n_drafters > PROBE_SEQS)
        add_sure_sequence(r, r->drafters[--step->n_drafters]);
    return true;
}

static double gain_of(di_runner *r, const di_step *step) {
    if (r->policy != DI_SPEC_COST)
        return INFINITY;
    int64_t context = 0;
    for (int32_t k = 0; k < step->n_drafters; k++)
        context += r->drafters[k]->golden + 1;
    double saves_ns = di_spec_cost_plain_saves_ns(&r->cost, step->n_drafters, context);
    di_spec_ask ask = {
        .policy = r->policy,
        .n_seqs = step->n_drafters,
        .seqs = r->plan_seqs,
        .n_drafts = r->n_drafts,
        .rows_max = step->n_drafters + step->spare_rows,
        .cost = &r->cost,
        .always_ns = -saves_ns,
        .drafts_ns = di_spec_cost_draft_ns(&r->cost, step->n_drafters) + saves_ns,
        .scratch = r->plan_scratch,
    };
    return di_spec_drafting_gain(&ask, r->plan);
}

enum { PLAIN_STEPS = 3 };

/* Whether a few steps go without drafts for the sake of what is learnt of them. */
static bool tries_plain(di_runner *r, const di_step *step, double gain) {
    if (!r->executor.launch || !di_spec_plain_is_due(&r->cost, step->n_drafters, gain, r->n_steps - r->plain_step,
                                                     r->n_steps - r->plain_tried))
        return false;
    r->plain_tried = r->n_steps;
    r->n_followed = DI_FOLLOW_MAX - PLAIN_STEPS;
    return true;
}

static bool is_worth_it(di_runner *r, const di_step *step) {
    double gain = gain_of(r, step);
    if (!(gain > 1))
        return false;
    r->steps_idle = r->probe_after = 0;
    return !tries_plain(r, step, gain);
}

typedef struct draft_job {
    di_runner *runner;
    const float *logits; /* device [n, n_vocab] */
    int32_t i;
} draft_job;

/* Under rejection a draft is drawn with noise of its own. */
typedef struct draft_draw {
    uint64_t seed;
    int64_t position;
} draft_draw;

static int32_t choose_draft(void *ctx, const float *p, int64_t n_vocab) {
    const draft_draw *d = ctx;
    double u = di_spec_uniform(d->seed + DI_SPEC_DRAFT_SEED, (int32_t)d->position, DI_SPEC_DRAW);
    return di_spec_draw(p, n_vocab, u);
}

/* The mask of draft i; false: there is none, since the draft before ends the output or could not come. */
static bool has_mask(di_sequence *s, int32_t i) {
    if (!s->masks)
        return true;
    di_masks_begin(s, s->golden + 1, false);
    di_masks_fill(s, i + 1);
    if (s->masks->n_rows <= i)
        return false;
    if (s->masks->only[i] >= 0)
        s->n_unsure = DI_MIN(s->n_unsure, i);
    return true;
}

static di_status draw_draft(di_runner *r, di_sequence *s, int32_t i, const float *logits, int worker, int32_t *token,
                            di_error *err) {
    int64_t position = s->golden + 1 + i;
    di_sample_args args = args_of(r, s, logits, position, s->gen.n_tokens, i);
    draft_draw own = {s->seed, position};
    if (s->draft_ln) {
        args.choose = choose_draft;
        args.choose_ctx = &own;
        args.ln_p = s->draft_ln + (size_t)i * (size_t)r->n_vocab;
    }
    return di_sample(&r->samplers[worker], &args, token, err);
}

static void draft_row(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const draft_job *job = ctx;
    di_runner *r = job->runner;
    di_sequence *s = r->drafters[part];
    di_error *err = &r->draft_errors[part];
    int32_t token = r->eos_id; /* what follows where nothing can: never verified */
    err->code = DI_OK;
    if (s->n_drafts == job->i && has_mask(s, job->i)) {
        err->code = fetch(r, r->rows[worker], job->logits, part, err);
        if (!err->code)
            err->code = draw_draft(r, s, job->i, r->rows[worker], worker, &token, err);
        s->n_drafts += err->code == DI_OK;
        if (err->code == DI_ERR_REQUEST) /* its own constraints leave nothing: the verification will tell */
            err->code = DI_OK;
    }
    s->tokens[s->golden + 1 + job->i] = r->draft_prev[part] = token;
}

/* ---- drafts drawn on the device ---- */

static void mask_draft(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const draft_job *job = ctx;
    di_sequence *s = job->runner->drafters[part];
    job->runner->draft_is_drawn[part] = s->n_drafts == job->i && has_mask(s, job->i);
}

/* Draft i of the k-th drafter, to be drawn from that row of the chain's logits. */
static di_status pack_draft(di_runner *r, int32_t k, int32_t i, di_error *err) {
    const di_sequence *s = r->drafters[k];
    int64_t position = s->golden + 1 + i;
    di_sample_args args = args_of(r, s, NULL, position, s->gen.n_tokens, i);
    di_sample_how how = {.rule = DI_SAMPLE_DRAW};
    if (s->draft_ln) {
        how.u = di_spec_uniform(s->seed + DI_SPEC_DRAFT_SEED, (int32_t)position, DI_SPEC_DRAW);
        how.ln_p = s->draft_ln + (size_t)i * (size_t)r->n_vocab;
    }
    return di_sample_pack_add(&r->drawer.pack, &args, s->draft_ln ? &how : NULL, k, 0, err);
}

/* What came of draft i of a sequence whose drafts before are there; NULL: it was not drawn. */
static di_status take_draft(di_runner *r, int32_t k, int32_t i, const di_sample_result *got, di_error *err) {
    di_sequence *s = r->drafters[k];
    int32_t token = r->eos_id; /* what follows where nothing can: never verified */
    di_status st = DI_OK;
    if (got && got->status == DI_SAMPLE_OK) {
        token = got->token;
        s->n_drafts++;
    } else if (got && got->status != DI_SAMPLE_NOTHING_ALLOWED) { /* else the verification will tell */
        st = di_sample_failure(got->status, true, (uint64_t)(s->golden + 1 + i), err);
    }
    s->tokens[s->golden + 1 + i] = r->draft_prev[k] = token;
    return st;
}

static di_status draft_on_device(di_runner *r, const float *logits, int32_t n, int32_t i, di_error *err) {
    draft_job job = {r, logits, i};
    run_parts(r, mask_draft, &job, n);
    di_status st = di_drawer_begin(r, n, err);
    for (int32_t k = 0; k < n && !st; k++) {
        if (r->draft_is_drawn[k])
            st = pack_draft(r, k, i, err);
    }
    di_device_clock_begin(r, true);
    if (!st)
        st = di_drawer_run(r, logits, NULL, err);
    di_device_clock_end(r);
    di_device_clock_settle(r);
    const di_sample_result *got = di_drawer_results(r);
    for (int32_t k = 0; k < n && !st; k++)
        st = take_draft(r, k, i, r->draft_is_drawn[k] ? got++ : NULL, err);
    return st;
}

/* Whether the drafts of a round can be drawn without the host: no mask and no penalty depends on the ones before. */
static bool can_chain(const di_runner *r, int32_t n) {
    for (int32_t k = 0; k < n; k++) {
        if (r->drafters[k]->masks || r->drafters[k]->has_history)
            return false;
    }
    return r->executor.draft_follow != NULL;
}

/* A whole round on the device: each draft is drawn there and feeds the next step of the chain. A draft that fails feeds
 * token 0, and what is behind it counts for nothing. */
static di_status run_chain(di_runner *r, int32_t n, di_error *err) {
    int32_t n_drafts = r->n_drafts;
    di_device_clock_begin(r, true);
    di_status st = r->executor.draft_launch(r->executor.self, r->draft_seqs, n, n_drafts, r->kv->states, err);
    if (!st)
        st = di_drawer_begin(r, n * n_drafts, err);
    for (int32_t at = 0; at < n * n_drafts && !st; at++) {
        if (at % n == 0)
            di_sample_pack_part(&r->drawer.pack);
        st = pack_draft(r, at % n, at / n, err);
    }
    if (!st)
        st = di_drawer_send(r, err);
    for (int32_t i = 0; i < n_drafts && !st; i++) {
        const int32_t *before = i ? (const int32_t *)r->drawer.tokens + (i - 1) * n : NULL;
        float *logits, *conf;
        st = r->executor.draft_follow(r->executor.self, i, before, &logits, &conf, err);
        if (!st)
            st = di_drawer_put(r, logits, i * n, n, err);
        if (!st)
            st = di_drawer_fetch_confidences(r, conf, i * n, n, err);
    }
    if (!st)
        st = di_drawer_fetch(r, err);
    di_device_clock_end(r);
    if (!st)
        st = di_drawer_wait(r, NULL, err);
    for (int32_t at = 0; at < n * n_drafts && !st; at++) {
        int32_t k = at % n, i = at / n;
        r->drafters[k]->raw[i] = di_drawer_confidences(r)[at];
        st = take_draft(r, k, i, r->drafters[k]->n_drafts == i ? &di_drawer_results(r)[at] : NULL, err);
    }
    return st;
}

/* Draft i of every drafter. */
static di_status draft_next(di_runner *r, int32_t n, int32_t i, di_error *err) {
    float *logits, *conf;
    di_device_clock_begin(r, true);
    di_status st = r->executor.draft_next(r->executor.self, i, r->draft_prev, &logits, &conf, err);
    di_device_clock_end(r);
    if (st)
        return st;
    if ((st = r->backend->device->download(r->device, r->draft_conf, conf, (size_t)n * sizeof *conf, err)))
        return st;
    draft_job job = {r, logits, i};
    if (r->executor.sample)
        st = draft_on_device(r, logits, n, i, err);
    else
        run_parts(r, draft_row, &job, n);
    for (int32_t k = 0; k < n && !st; k++) {
        r->drafters[k]->raw[i] = r->draft_conf[k];
        if (!r->executor.sample && r->draft_errors[k].code) {
            *err = r->draft_errors[k];
            return err->code;
        }
    }
    return st;
}

/* A round in which the host draws, or must know each draft before the next. What it does in between is no work of the
 * device. */
static di_status run_steps(di_runner *r, int32_t n, di_error *err) {
    di_device_clock_begin(r, true);
    di_status st = r->executor.draft_begin(r->executor.self, r->draft_seqs, n, r->n_drafts, r->kv->states, err);
    di_device_clock_end(r);
    di_device_clock_settle(r);
    for (int32_t i = 0; i < r->n_drafts && !st; i++)
        st = draft_next(r, n, i, err);
    return st;
}

/* What to expect of the drafts of a round. Under rejection the decision to verify a draft must not depend on what comes
 * behind it, so that older rounds alone decide (spec.h). */
static void set_chances(di_runner *r, di_sequence *s) {
    if (s->has_chances && r->policy == DI_SPEC_REFERENCE) {
        memcpy(s->before, s->chances, sizeof s->before);
        s->n_before = r->n_drafts;
    }
    s->has_chances = true;
    if (r->policy == DI_SPEC_COST && r->accept == DI_SPEC_REJECTION)
        di_spec_guard_confidence(&s->guard, r->n_drafts, s->chances);
    else
        di_spec_calibrate(&r->calibration, r->n_drafts, s->raw, s->chances);
    for (int32_t j = 0; s->masks && j < s->n_drafts; j++) {
        if (s->masks->only[j] >= 0)
            s->chances[j] = 1;
    }
}

static void run_round(di_runner *r, di_step *step) {
    int32_t n = step->n_drafters;
    di_error err = {.message = ""};
    di_status st = di_runner_catch_up(r, step, r->drafters, r->drafter_rows, n, &err);
    int64_t start_ns = di_clock_ns();
    for (int32_t k = 0; k < n; k++) {
        r->draft_prev[k] = r->draft_seqs[k].token;
        r->drafters[k]->n_drafts = 0;
        r->drafters[k]->n_unsure = r->n_drafts;
        r->drafters[k]->is_drafted = true;
    }
    int64_t n_unrecorded = di_runner_unrecorded(r);
    if (!st)
        st = can_chain(r, n) ? run_chain(r, n, &err) : run_steps(r, n, &err);
    di_device_clock_settle(r);
    if (st) { /* a round is a help, not a need: nobody suffers but for the time */
        if (r->n_draft_fails++ == 0)
            di_warn("a drafting round failed, as others may without another word: %s", err.message);
        for (int32_t k = 0; k < n; k++)
            r->drafters[k]->n_drafts = 0;
        step->n_drafters = 0;
        return;
    }
    for (int32_t k = 0; k < n; k++)
        set_chances(r, r->drafters[k]);
    if (di_runner_unrecorded(r) == n_unrecorded)
        di_spec_cost_learn_draft(&r->cost, n, di_clock_ns() - start_ns + r->turn_ns);
}

/* Where a constraint leaves one token only, that token follows: it is verified like a draft, and always holds. */
static void add_sure(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    (void)worker;
    const di_runner *r = ctx;
    di_sequence *s = r->sure[part];
    di_mask_rows *m = s->masks;
    int64_t room = DI_MIN((int64_t)s->ahead_max, di_sequence_rows_max(s) - s->golden - 1);
    s->n_drafts = 0;
    s->is_drafted = false;
    di_masks_begin(s, s->golden + 1, false);
    while (s->n_drafts < room && !m->status) {
        if (s->n_drafts == 0 && m->constraint.is_open && m->constraint.is_open(m->constraint.self))
            return; /* its mask can be made beside the forward */
        di_masks_fill(s, s->n_drafts + 1);
        if (m->n_rows <= s->n_drafts || m->only[s->n_drafts] < 0 || m->only[s->n_drafts] == r->eos_id)
            return;
        s->tokens[s->golden + 1 + s->n_drafts] = m->only[s->n_drafts];
        s->chances[s->n_drafts++] = 1;
    }
}

void di_step_draft(di_runner *r, di_step *step) {
    step->n_drafters = 0;
    if (step->error.code)
        return;
    collect(r, step);
    r->is_probing = false;
    r->n_followed = step->is_followed ? DI_MIN(r->n_followed + 1, DI_FOLLOW_MAX) : 0;
    r->steps_idle += step->is_followed && r->n_drafts > 0;
    if (step->n_drafters > 0 && !step->is_followed && (is_worth_it(r, step) || probes(r, step))) {
        run_round(r, step);
    } else {
        for (int32_t k = 0; k < step->n_drafters; k++) {
            di_spec_guard_idle(&r->drafters[k]->guard);
            add_sure_sequence(r, r->drafters[k]);
        }
        step->n_drafters = 0;
    }
    r->is_drafting = step->n_drafters > 0;
    if (!step->is_followed) {
        r->n_asked = r->n_going;
        r->n_changed = 0;
    }
    if (r->n_sure > 0)
        run_parts(r, add_sure, r, r->n_sure);
}
