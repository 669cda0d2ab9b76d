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
#include "engine_internal.h"

#define RATE_LEARN 0.02 /* weight of the newest verification in the running share of drafts that hold */

/* ---- planning ---- */

/* A decoding sequence without rows in the step. */
static bool is_void(const di_step_seq *q) {
    return q->is_decoding && di_sequence_is_whole(q->seq);
}

static void ask_plan(di_runner *r, di_step *step, int32_t n, int64_t other_rows, int64_t other_context) {
    di_spec_plan plan;
    double draft_ns = di_spec_cost_draft_ns(&r->cost, n);
    di_spec_ask ask = {
        .policy = r->policy,
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
        .scratch = r->plan_scratch,
    };
    di_spec_plan_make(&ask, r->plan, &plan);
    r->rate_hint = plan.ns > 0 ? plan.tokens / plan.ns : 0;
    int32_t at = 0;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        if (!q->is_decoding || is_void(q))
            continue;
        q->n_drafts = r->plan[at++];
        q->seq->round_cost = plan.plain_ns > 0 ? q->n_drafts * plan.tokens_per_draft + draft_ns / plan.plain_ns : 0;
    }
}

void di_step_plan(di_runner *r, di_step *step) {
    int32_t n = 0, n_ready = 0;
    int64_t other_rows = 0, other_context = 0;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        di_sequence *s = q->seq;
        const di_seq_rows *rows = &step->rows[k];
        q->n_drafts = q->n_new = 0;
        if (!q->is_decoding) {
            other_rows += rows->n_rows;
            other_context += rows->pos0 + rows->n_rows;
            continue;
        }
        if (is_void(q) || r->n_drafts == 0)
            continue;
        /* Rows end with the block table, too. */
        int64_t n_rows = DI_MIN(di_sequence_rows_max(s), (int64_t)rows->n_blocks * DI_PAGE_TOKENS) - s->golden;
        int64_t room = DI_MIN((int64_t)DI_MIN(s->n_drafts, q->drafts_max), n_rows - 1);
        r->plan_seqs[n++] = (di_spec_seq){
            .n_drafts = (int32_t)DI_MAX(room, 0),
            .may_speculate = room > 0,
            .n_context = s->golden,
            .confidence = s->chances,
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

static di_status draw(const draw_job *job, const di_step_row *row, int worker, di_step_result *result, di_error *err) {
    di_runner *r = job->runner;
    const di_sequence *s = row->seq;
    const di_step_seq *q = &job->step->seqs[row->seq_idx];
    float *logits = r->rows[worker];
    di_status st = fetch(r, logits, job->logits, q->logits_at + row->logits_row, err);
    if (st)
        return st;
    di_logprob *top = row->n_top > 0 ? job->step->tops + row->top_at : NULL;
    if (row->is_prompt)
        return di_logprobs_of(&r->samplers[worker], logits, r->n_vocab, row->forced, DI_MAX(row->n_top, 0),
                              &result->logprob, top, err);
    bool has_drafts = q->is_decoding && row->logits_row > 0;
    di_sample_args args = {
        .sampling = &s->sampling,
        .logits = logits,
        .n_vocab = r->n_vocab,
        .seed = s->seed,
        .position = (uint64_t)row->position,
        .n_output = row->position - s->n_prompt,
        .eos_id = r->eos_id,
        .blacklist = r->blacklist,
        .history = s->has_history ? &s->history : NULL,
        .drafts = has_drafts ? s->tokens + s->golden + 1 : NULL,
        .n_drafts = has_drafts ? row->logits_row : 0,
        .forced = row->forced,
        .logprob = row->n_top >= 0 ? &result->logprob : NULL,
        .top = top,
    };
    return di_sample(&r->samplers[worker], &args, &result->token, err);
}

static void draw_row(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const draw_job *job = ctx;
    const di_step_row *row = &job->step->samples[part];
    const di_step_seq *q = &job->step->seqs[row->seq_idx];
    di_step_result *result = &job->step->results[part];
    if (row->is_skipped || q->logits_at < 0 || (q->is_decoding && row->logits_row > q->n_drafts))
        return;
    result->status = draw(job, row, worker, result, &job->step->errors[part]);
    /* A forward that is formed already reads a token here; what it makes of a row that failed is dropped. */
    if (result->status)
        result->token = 0;
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
    if (q->n_drafts > 0)
        r->rate += RATE_LEARN * ((double)n / q->n_drafts - r->rate);
    if (s->n_drafts > 0) {
        di_spec_guard_learn(&s->guard, q->n_drafts, n, s->round_cost);
        di_spec_calibration_learn(&r->calibration, q->n_drafts, n, s->raw);
    }
    s->golden += 1 + n;
    s->tokens[s->golden] = result[n].token;
    s->n_drafts = 0;
}

static void begin_decoding(di_runner *r, di_sequence *s, int64_t position, int32_t token) {
    s->golden = position;
    s->tokens[position] = token;
    s->n_drafts = 0;
    if (r->n_drafts)
        di_spec_guard_init(&s->guard, (float)r->rate);
}

void di_step_draw(di_runner *r, di_step *step, const float *logits) {
    draw_job job = {r, step, logits};
    run_parts(r, draw_row, &job, step->n_samples);
    for (int32_t i = 0; i < step->n_samples; i++) {
        const di_step_row *row = &step->samples[i];
        if (!row->is_prompt && !row->is_skipped && (row->fork_of || !step->seqs[row->seq_idx].is_decoding))
            begin_decoding(r, row->seq, row->position, step->results[i].token);
    }
    for (int32_t k = 0; k < step->n_seqs; k++) {
        di_step_seq *q = &step->seqs[k];
        if (q->is_decoding)
            accept(r, step, q);
    }
}

/* ---- drafting ---- */

/* Whether s goes on for long enough that a draft can be of use, as far as its newest token tells. */
static bool can_draft(const di_runner *r, const di_sequence *s) {
    bool has_ended = s->tokens[s->golden] == r->eos_id && !s->sampling.ignore_eos;
    return s->may_draft && !has_ended && s->golden + 1 < di_sequence_rows_max(s) &&
           s->golden - 1 + r->n_drafts < r->context_max;
}

static void add_drafter(di_runner *r, di_step *step, di_sequence *s, int32_t slot) {
    if (!can_draft(r, s) || !di_spec_guard_step(&s->guard))
        return;
    int32_t n = step->n_drafters++;
    r->drafters[n] = s;
    r->draft_seqs[n] = (di_draft_seq){.token = s->tokens[s->golden], .last = s->golden - 1, .slot = slot};
    di_spec_guard_confidence(&s->guard, r->n_drafts, s->chances);
    r->plan_seqs[n] =
        (di_spec_seq){.n_drafts = r->n_drafts, .may_speculate = true, .n_context = s->golden, .confidence = s->chances};
}

static bool pays(di_runner *r, const di_step *step) {
    if (r->policy != DI_SPEC_COST)
        return true;
    di_spec_ask ask = {
        .policy = r->policy,
        .n_seqs = step->n_drafters,
        .seqs = r->plan_seqs,
        .n_drafts = r->n_drafts,
        .rows_max = step->n_drafters + step->spare_rows,
        .cost = &r->cost,
        .drafts_ns = di_spec_cost_draft_ns(&r->cost, step->n_drafters),
        .scratch = r->plan_scratch,
    };
    return di_spec_drafting_pays(&ask, r->plan);
}

typedef struct draft_job {
    di_runner *runner;
    const float *logits; /* device [n, n_vocab] */
    int32_t i;
} draft_job;

static void draft_row(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const draft_job *job = ctx;
    di_runner *r = job->runner;
    di_sequence *s = r->drafters[part];
    di_error *err = &r->draft_errors[part];
    int64_t position = s->golden + 1 + job->i;
    int32_t token = 0;
    err->code = fetch(r, r->rows[worker], job->logits, part, err);
    di_sample_args args = {
        .sampling = &s->sampling,
        .logits = r->rows[worker],
        .n_vocab = r->n_vocab,
        .seed = s->seed,
        .position = (uint64_t)position,
        .n_output = position - s->n_prompt,
        .eos_id = -1,
        .forced = -1,
    };
    if (!err->code)
        err->code = di_sample(&r->samplers[worker], &args, &token, err);
    s->tokens[position] = r->draft_prev[part] = token;
}

/* Draft i of every drafter. */
static di_status draft_next(di_runner *r, int32_t n, int32_t i, di_error *err) {
    float *logits, *conf;
    di_status st = r->executor.draft_next(r->executor.self, i, r->draft_prev, &logits, &conf, err);
    if (st)
        return st;
    if ((st = r->backend->device->download(r->device, r->draft_conf, conf, (size_t)n * sizeof *conf, err)))
        return st;
    draft_job job = {r, logits, i};
    run_parts(r, draft_row, &job, n);
    for (int32_t k = 0; k < n; k++) {
        r->drafters[k]->raw[i] = r->draft_conf[k];
        if (r->draft_errors[k].code)
            return r->draft_errors[k].code;
    }
    return DI_OK;
}

void di_step_draft(di_runner *r, di_step *step) {
    step->n_drafters = 0;
    if (r->n_drafts == 0 || step->error.code)
        return;
    for (int32_t i = 0; i < step->n_samples; i++) {
        const di_step_row *row = &step->samples[i];
        const di_step_seq *q = &step->seqs[row->seq_idx];
        if (row->is_prompt || row->is_skipped || step->results[i].status)
            continue;
        if (row->fork_of || !q->is_decoding)
            add_drafter(r, step, row->seq, step->rows[row->seq_idx].slot);
        else if (i == q->sample_at && q->n_new > 0 && !step->results[i + q->n_new - 1].status)
            add_drafter(r, step, q->seq, step->rows[row->seq_idx].slot);
    }
    int32_t n = step->n_drafters;
    if (n == 0)
        return;
    if (!pays(r, step)) {
        for (int32_t k = 0; k < n; k++)
            di_spec_guard_idle(&r->drafters[k]->guard);
        step->n_drafters = 0;
        return;
    }
    di_error err = {.message = ""};
    int64_t start_ns = di_clock_ns();
    di_status st = r->executor.draft_begin(r->executor.self, r->draft_seqs, n, r->n_drafts, r->kv->states, &err);
    for (int32_t k = 0; k < n; k++)
        r->draft_prev[k] = r->draft_seqs[k].token;
    for (int32_t i = 0; i < r->n_drafts && !st; i++)
        st = draft_next(r, n, i, &err);
    if (st) { /* a round is a help, not a need: nobody suffers but for the time */
        if (r->n_draft_fails++ == 0)
            di_warn("a drafting round failed, as others may without another word: %s", err.message);
        step->n_drafters = 0;
        return;
    }
    for (int32_t k = 0; k < n; k++) {
        di_sequence *s = r->drafters[k];
        s->n_drafts = r->n_drafts;
        di_spec_calibrate(&r->calibration, r->n_drafts, s->raw, s->chances);
    }
    di_spec_cost_learn_draft(&r->cost, n, di_clock_ns() - start_ns);
}
