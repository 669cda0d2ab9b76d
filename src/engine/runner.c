/* The runner: a thread that takes steps in order, runs their forward and draws their tokens.
 *
 * Of a step it runs first the copies (forks, restored windows), then the forward, then, once the engine's thread has
 * filled the arguments, the sampling (draw.c) and a drafting round; each token is written into its sequence's token
 * array at once, where the next step's forward reads it. So the next step can start before the engine's thread has
 * looked at this one. Where a decoding sequence stands is known here alone: how many drafts it verifies and at which
 * position its rows begin is settled when its step starts. Steps run strictly one after another: memory that was given
 * back while a step was here is written by later steps only.
 *
 * Rows are sampled on the device, or on its host threads, each with scratch of its own. Results lie beside the step's
 * rows; nothing here knows what a token means.
 *
 * The draft module has keys of its own for every row. While nothing is drafted they are put off: a step keeps what they
 * are made of, and they are made for the last window of rows at once when a sequence drafts again, or before a step
 * that makes them anyway or takes a snapshot. */
#include "engine_internal.h"

/* ---- one step ---- */

static di_status copy_units(const di_runner *r, uint8_t *base, size_t unit_bytes, const di_copy *copies, int32_t n,
                            di_error *err) {
    if (n > 0 && r->executor.copy)
        return r->executor.copy(r->executor.self, base, unit_bytes, copies, n, err);
    for (int32_t i = 0; i < n; i++) {
        di_status st = r->backend->device->copy(r->device, base + (size_t)copies[i].dst * unit_bytes,
                                                base + (size_t)copies[i].src * unit_bytes, unit_bytes, err);
        if (st)
            return st;
    }
    return DI_OK;
}

/* The rows of a decoding sequence, now that it is known where they begin; false: none are needed. Where its newest
 * token is still being drawn, the forward takes it from there. */
static di_status settle(di_runner *r, di_step *step, int32_t k, bool *is_there) {
    di_step_seq *q = &step->seqs[k];
    di_seq_rows *rows = &step->rows[k];
    const di_sequence *s = q->seq;
    int64_t golden = s->coming_row >= 0 ? s->coming_at : s->golden;
    *is_there = true;
    rows->fed_from = -1;
    if (!q->is_decoding)
        return DI_OK;
    *is_there = golden < di_sequence_rows_max(s);
    if (!*is_there)
        return DI_OK;
    rows->fed_from = s->coming_row;
    rows->pos0 = golden;
    rows->n_rows = rows->n_logits = 1 + q->n_drafts;
    rows->n_snapshots = 0;
    step->samples[q->sample_at].position = golden + 1;
    if (q->snapshot_at < 0)
        return DI_OK;
    const di_ring_snapshot *snapshot = &step->snapshots[q->snapshot_at];
    if (snapshot->at <= rows->pos0 || snapshot->at > rows->pos0 + rows->n_rows)
        return DI_OK;
    rows->snapshots = snapshot;
    rows->n_snapshots = 1;
    step->snapshot_of[q->snapshot_at].is_taken = true;
    di_copy copy = {.dst = snapshot->slot, .src = rows->slot};
    return copy_units(r, r->kv->states, r->kv->slot_bytes, &copy, 1, &step->error);
}

static void add_mask_job(di_runner *r, di_sequence *s, int64_t position, int32_t n_rows, bool anew) {
    if (s->masks)
        r->mask_jobs[r->n_mask_jobs++] = (di_mask_job){.seq = s, .position = position, .n_rows = n_rows, .anew = anew};
}

/* Masks for the rows that the step draws from are made while its forward runs. */
static void start_masks(di_runner *r, const di_step *step) {
    r->n_mask_jobs = 0;
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        const di_step_row *row = &step->samples[i];
        const di_step_seq *q = &step->seqs[row->seq_idx];
        if (row->is_prompt)
            continue;
        if (row->fork_of || !q->is_decoding)
            add_mask_job(r, row->seq, row->position, 1, true);
        else if (q->logits_at >= 0)
            add_mask_job(r, row->seq, row->position, 1 + q->n_drafts, false);
    }
    if (r->n_mask_jobs == 0)
        return;
    if (!r->masker && di_masker_create(&r->masker, DI_MAX(r->n_workers / 2, 1), NULL)) {
        for (int32_t i = 0; i < r->n_mask_jobs; i++) /* no thread: then here */
            di_masks_run(&r->mask_jobs[i]);
        return;
    }
    di_masker_start(r->masker, r->mask_jobs, r->n_mask_jobs);
}

/* ---- keys that are put off ---- */

static di_status run_catch_up(di_runner *r, int32_t n, di_error *err) {
    di_batch batch = {.n_seqs = n,
                      .seqs = r->batch,
                      .replay = r->replay,
                      .pages = r->kv->pages,
                      .slots = r->kv->states,
                      .taps = r->taps};
    return n ? r->executor.catch_up(r->executor.self, &batch, err) : DI_OK;
}

di_status di_runner_catch_up(di_runner *r, const di_step *step, di_sequence *const *seqs, const int32_t *at, int32_t n,
                             di_error *err) {
    int32_t n_seqs = 0;
    int64_t n_rows = 0;
    di_status st = DI_OK;
    for (int32_t i = 0; i < n && !st && r->taps; i++) {
        int64_t end = seqs[i]->put_off_end, pos = DI_MAX(seqs[i]->put_off, end - r->ring_rows);
        while (pos < end && !st) {
            if (n_rows == r->rows_max || n_seqs == r->seqs_max) {
                st = run_catch_up(r, n_seqs, err);
                n_seqs = 0;
                n_rows = 0;
                continue;
            }
            int64_t count = DI_MIN(end - pos, r->rows_max - n_rows);
            di_seq_rows *rows = &r->batch[n_seqs++];
            *rows = step->rows[at[i]];
            rows->pos0 = pos;
            rows->n_rows = (int32_t)count;
            rows->n_logits = rows->n_snapshots = 0;
            pos += count;
            n_rows += count;
        }
    }
    if (!st)
        st = run_catch_up(r, n_seqs, err);
    for (int32_t i = 0; i < n && !st; i++)
        seqs[i]->put_off = seqs[i]->put_off_end;
    return st;
}

/* Whether the step's rows need no keys of the draft module now: it is not in use, all of them are newest tokens, which
 * stay, and no snapshot wants them. Else what was put off before is made first, so that it never has gaps. */
static di_status settle_keys(di_runner *r, di_step *step) {
    step->puts_off = r->taps && !r->is_drafting;
    for (int32_t k = 0; k < step->n_seqs && step->puts_off; k++) {
        const di_step_seq *q = &step->seqs[k];
        step->puts_off = q->is_decoding && q->snapshot_at < 0 && (q->n_drafts == 0 || !q->seq->is_drafted);
    }
    int32_t n = 0;
    for (int32_t k = 0; k < step->n_seqs && r->taps && !step->puts_off; k++) {
        di_sequence *s = step->seqs[k].seq;
        if (!step->seqs[k].is_decoding || s->put_off == s->put_off_end)
            continue;
        r->drafters[n] = s;
        r->drafter_rows[n++] = k;
    }
    return di_runner_catch_up(r, step, r->drafters, r->drafter_rows, n, &step->error);
}

static void note_put_off(di_step *step) {
    for (int32_t k = 0; k < step->n_seqs && step->puts_off; k++) {
        const di_seq_rows *rows = &step->rows[k];
        di_sequence *s = step->seqs[k].seq;
        if (step->seqs[k].logits_at < 0)
            continue;
        if (s->put_off == s->put_off_end)
            s->put_off = s->put_off_end = rows->pos0;
        DI_ASSERT(s->put_off_end == rows->pos0);
        s->put_off_end = rows->pos0 + rows->n_rows;
    }
}

/* Runs the forward of a step, or puts it on the device's stream where there is one. */
static di_status forward(di_runner *r, di_step *step, float **logits) {
    di_error *err = &step->error;
    di_status st = copy_units(r, r->kv->pages, r->kv->page_bytes, step->page_copies, step->n_page_copies, err);
    if (!st)
        st = copy_units(r, r->kv->states, r->kv->slot_bytes, step->slot_copies, step->n_slot_copies, err);
    if (st)
        return st;
    di_step_plan(r, step);
    if ((st = settle_keys(r, step)))
        return st;
    int32_t n = 0, n_logits = 0;
    step->rows_run = step->context_run = step->row_context = 0;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        bool is_there;
        if ((st = settle(r, step, k, &is_there)))
            return st;
        step->seqs[k].logits_at = is_there ? n_logits : -1;
        if (!is_there)
            continue;
        r->batch[n] = step->rows[k];
        n_logits += r->batch[n].n_logits;
        step->rows_run += r->batch[n].n_rows;
        step->context_run += r->batch[n].pos0 + r->batch[n].n_rows;
        step->row_context += di_step_row_context(r->batch[n].pos0, r->batch[n].n_rows);
        n++;
    }
    if (n == 0)
        return DI_OK;
    di_batch batch = {
        .n_seqs = n,
        .seqs = r->batch,
        .replay = r->replay,
        .pages = r->kv->pages,
        .slots = r->kv->states,
        .taps = step->puts_off ? r->taps : NULL,
        .fed = step->is_launched ? r->drawer.tokens : NULL,
    };
    start_masks(r, step);
    int64_t n_unrecorded = di_runner_unrecorded(r);
    st = (r->executor.launch ? r->executor.launch : r->executor.forward)(r->executor.self, &batch, logits, err);
    step->is_unrecorded = di_runner_unrecorded(r) != n_unrecorded;
    if (r->masker && r->n_mask_jobs > 0)
        di_masker_wait(r->masker);
    if (!st)
        note_put_off(step);
    return st;
}

static void trace_step(const di_runner *r, const di_step *step) {
    if (!r->trace)
        return;
    di_trace_arg args[] = {{"sequences", step->n_seqs}, {"rows", step->rows_run}, {"prompt_rows", step->n_prompt_rows}};
    di_trace_span(r->trace, DI_TRACE_RUNNER, "forward", step->start_ns, step->forward_ns, (int)DI_COUNT(args), args);
    di_trace_arg drawn[] = {{"rows", step->n_samples}};
    di_trace_span(r->trace, DI_TRACE_RUNNER, "sample", step->sample_ns, step->drawn_ns, 1, drawn);
    di_trace_arg drafted[] = {{"sequences", step->n_drafters}};
    if (step->n_drafters > 0)
        di_trace_span(r->trace, DI_TRACE_RUNNER, "draft", step->drawn_ns, step->end_ns, 1, drafted);
}

/* On a device with a stream, steps are of two kinds: those of sequences that draft, which the host starts, and those
 * that follow, which put keys off too. One that the host starts and that puts keys off is of neither kind. Without a
 * stream all are alike. */
static void learn_time(di_runner *r, const di_step *step, int64_t ns) {
    if (step->is_unrecorded)
        return;
    if (step->is_launched) {
        di_spec_cost_learn_plain(&r->cost, step->rows_run, step->row_context, ns);
        r->plain_step = r->n_steps;
    } else if (!r->executor.launch || !step->puts_off) {
        di_spec_cost_learn_step(&r->cost, step->rows_run, step->row_context, ns);
    }
}

static void learn(di_runner *r, di_step *step) {
    int64_t forward_ns = step->forward_ns - step->start_ns, draw_ns = step->drawn_ns - step->sample_ns;
    learn_time(r, step, forward_ns + draw_ns);
    if (r->curve && step->n_prompt_rows == 0)
        di_spec_curve_learn(r->curve, step->rows_run, step->n_seqs, forward_ns, draw_ns);
    if (step->n_verified == 0 || !di_spec_cost_is_ready(&r->cost))
        return;
    /* Without its drafts the step would have taken less, and the tokens that they brought steps of their own. */
    int64_t rows = step->rows_run - step->n_verified, context = step->row_context * rows / DI_MAX(step->rows_run, 1);
    double plain_ns =
        di_spec_cost_step_ns(&r->cost, rows, context) - di_spec_cost_plain_saves_ns(&r->cost, rows, context);
    r->saved_ns += plain_ns * (double)step->n_held / step->n_decoding - ((double)(forward_ns + draw_ns) - plain_ns);
}

/* What the step's counters show of speculation so far. */
static void report(di_runner *r, di_step *step) {
    const di_spec_calibration *c = &r->calibration;
    if (step->n_drafters > 0)
        r->saved_ns -= (double)(step->end_ns - step->drawn_ns);
    step->saved_ns = r->saved_ns;
    step->device_busy_ns = r->clock.busy_ns;
    step->device_idle_ns = r->clock.idle_ns;
    step->n_tested = r->n_tested;
    step->expected_sum = r->expected_sum;
    step->bound_sum = r->bound_sum;
    step->draft_error = di_spec_calibration_error(c, -1);
    for (int i = 0; i < DI_SPEC_BINS; i++) {
        step->calibration_n[i] = c->bins[i].n;
        step->calibration_held[i] = c->bins[i].n_accepted;
        step->calibration_sum[i] = c->bins[i].confidence_sum;
    }
}

/* ---- steps that follow on the device -----------------------------------------------------------------------------
 *
 * Where the device draws and nothing about the next step depends on what it draws but the tokens themselves, the next
 * forward is put on the stream behind the draw, before the host knows the tokens: the device goes on while the host
 * takes the results, commits them and forms the step after.
 *
 *   device   forward N | draw N | forward N+1 ............ | draw N+1 | forward N+2
 *   host     ... launch N+1 | wait for draw N | commit N, form N+2 | launch N+2 | wait for draw N+1
 *
 * Whether drafts pay is decided between a draw and the next forward. As long as they don't, it is asked once in a few
 * steps, and the others follow; it is asked at once where an eighth of the sequences are others than when it was
 * last. A constraint's next tokens may be certain, which saves more than following does. */

enum { CHANGED_SHARE = 8 };

static bool may_skip_drafts(const di_runner *r) {
    return r->n_drafts == 0 || (r->policy == DI_SPEC_COST && !r->is_drafting && r->n_followed < DI_FOLLOW_MAX &&
                                CHANGED_SHARE * (int64_t)r->n_changed <= r->n_asked && !di_step_probe_is_due(r));
}

/* Of drafts and masks the next rows depend on the tokens; so do sequences that go on behind rows of drafts. */
static bool can_follow(const di_runner *r, const di_step *step) {
    if (!r->executor.launch || step->error.code || step->draw_status)
        return false;
    for (int32_t k = 0; k < step->n_seqs; k++) {
        if (step->seqs[k].seq->masks || step->seqs[k].n_drafts > 0)
            return false;
    }
    for (int32_t i = 0; i < step->n_samples; i += step->samples[i].n_span) {
        if (step->samples[i].seq->masks)
            return false;
    }
    return true;
}

/* The forward of the step behind this one, where it is there and can follow. */
static void launch_next(di_runner *r, di_step *step) {
    if (!may_skip_drafts(r) || !can_follow(r, step))
        return;
    pthread_mutex_lock(&r->mutex);
    di_step *next = r->n_queued > 0 ? r->queue[0] : NULL;
    pthread_mutex_unlock(&r->mutex);
    if (!next)
        return;
    next->n_drawn = 0;
    next->draw_status = DI_OK;
    if (!can_follow(r, next))
        return;
    step->is_followed = next->is_launched = true;
    next->start_ns = di_clock_ns();
    di_device_clock_begin(r, next->follows);
    next->error.code = forward(r, next, &next->logits);
}

/* The times of a step whose parts the device runs without the host: it ends when its tokens are there, and begins when
 * it was launched or the step before ended. */
static void settle_times(const di_runner *r, di_step *step) {
    step->start_ns = DI_MAX(step->start_ns, r->last_drawn_ns);
    step->forward_ns = step->sample_ns = step->drawn_ns;
}

static void run(di_runner *r, di_step *step) {
    r->n_steps++;
    if (!step->is_launched) {
        step->start_ns = di_clock_ns();
        if (r->executor.launch && r->is_drafting && step->follows)
            r->turn_ns = step->start_ns - r->last_end_ns;
        di_device_clock_begin(r, step->follows);
        step->error.code = forward(r, step, &step->logits);
    }
    if (r->executor.launch && !step->error.code && step->n_samples == 0) {
        di_device_clock_end(r);
        step->error.code = r->executor.wait(r->executor.self, &step->error);
    }
    step->forward_ns = di_clock_ns();
    pthread_mutex_lock(&r->mutex);
    bool waits = !step->is_sampling_ready;
    while (!step->is_sampling_ready)
        pthread_cond_wait(&r->work, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    step->sample_ns = waits ? di_clock_ns() : step->forward_ns;
    if (!step->error.code && step->n_samples > 0) {
        di_step_draw_begin(r, step, step->logits);
        di_device_clock_end(r);
        launch_next(r, step);
        di_step_draw_end(r, step);
    }
    di_device_clock_settle(r);
    step->drawn_ns = di_clock_ns();
    if (r->executor.launch)
        settle_times(r, step);
    r->last_drawn_ns = step->drawn_ns;
    if (!step->error.code && r->n_drafts > 0)
        learn(r, step);
    di_step_draft(r, step);
    step->end_ns = r->last_end_ns = di_clock_ns();
    report(r, step);
    trace_step(r, step);
}

static void *runner_main(void *arg) {
    di_runner *r = arg;
    (void)pthread_setname_np(pthread_self(), "engine-run");
    pthread_mutex_lock(&r->mutex);
    for (;;) {
        while (r->n_queued == 0 && !r->is_stopping)
            pthread_cond_wait(&r->work, &r->mutex);
        if (r->n_queued == 0)
            break;
        di_step *step = r->queue[0];
        r->queue[0] = r->queue[1];
        r->n_queued--;
        pthread_mutex_unlock(&r->mutex);
        run(r, step);
        pthread_mutex_lock(&r->mutex);
        step->is_done = true;
        pthread_cond_signal(&r->done);
    }
    pthread_mutex_unlock(&r->mutex);
    return NULL;
}

/* ---- the engine's side ---- */

void di_runner_launch(di_runner *r, di_step *step) {
    step->error = (di_error){0};
    step->is_launched = step->is_followed = false;
    step->logits = NULL;
    pthread_mutex_lock(&r->mutex);
    DI_ASSERT(r->n_queued < 2);
    step->is_done = step->is_sampling_ready = false;
    r->queue[r->n_queued++] = step;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->mutex);
}

void di_runner_sample(di_runner *r, di_step *step) {
    pthread_mutex_lock(&r->mutex);
    step->is_sampling_ready = true;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->mutex);
}

void di_runner_wait(di_runner *r, di_step *step) {
    pthread_mutex_lock(&r->mutex);
    while (!step->is_done)
        pthread_cond_wait(&r->done, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
}

static di_status start(di_runner *r, di_error *err) {
    int e = pthread_mutex_init(&r->mutex, NULL);
    if (e)
        return di_fail(err, DI_ERR_INTERNAL, "runner: no lock: %s", strerror(e));
    if ((e = pthread_cond_init(&r->work, NULL))) {
        pthread_mutex_destroy(&r->mutex);
        return di_fail(err, DI_ERR_INTERNAL, "runner: no condition: %s", strerror(e));
    }
    if ((e = pthread_cond_init(&r->done, NULL))) {
        pthread_cond_destroy(&r->work);
        pthread_mutex_destroy(&r->mutex);
        return di_fail(err, DI_ERR_INTERNAL, "runner: no condition: %s", strerror(e));
    }
    r->has_locks = true;
    e = pthread_create(&r->thread, NULL, runner_main, r);
    r->has_thread = e == 0;
    return e ? di_fail(err, DI_ERR_INTERNAL, "runner: no thread: %s", strerror(e)) : DI_OK;
}

static di_status make_drafting(di_runner *r, di_error *err) {
    size_t n = (size_t)r->seqs_max;
    r->batch = calloc(n, sizeof *r->batch);
    r->plan_seqs = calloc(n, sizeof *r->plan_seqs);
    r->plan = calloc(n, sizeof *r->plan);
    r->plan_scratch = malloc(di_spec_scratch_bytes(r->seqs_max, DI_MAX(r->n_drafts, 1)));
    r->draft_seqs = calloc(n, sizeof *r->draft_seqs);
    r->drafters = calloc(n, sizeof(di_sequence *));
    r->drafter_rows = calloc(n, sizeof *r->drafter_rows);
    r->sure = calloc(n, sizeof(di_sequence *));
    r->draft_prev = calloc(n, sizeof *r->draft_prev);
    r->draft_is_drawn = calloc(n, sizeof *r->draft_is_drawn);
    r->draft_conf = calloc(n, sizeof *r->draft_conf);
    r->draft_errors = calloc(n, sizeof *r->draft_errors);
    r->mask_jobs = calloc(n, sizeof *r->mask_jobs);
    if (r->policy == DI_SPEC_REFERENCE && r->n_drafts > 0 && !(r->curve = calloc(1, sizeof *r->curve)))
        return di_fail(err, DI_ERR_MEMORY, "a table of step times");
    if (!r->batch || !r->plan_seqs || !r->plan || !r->plan_scratch || !r->draft_seqs || !r->drafters ||
        !r->drafter_rows || !r->sure || !r->draft_prev || !r->draft_is_drawn || !r->draft_conf || !r->draft_errors ||
        !r->mask_jobs)
        return di_fail(err, DI_ERR_MEMORY, "drafting for %zu sequences", n);
    r->rate = 0.7;
    if (r->n_drafts == 0)
        return DI_OK;
    bool is_given = r->temperatures[0] > 0;
    di_spec_calibration_init(&r->calibration, r->n_drafts, is_given ? r->temperatures : NULL);
    r->calibration.is_frozen = is_given || r->policy == DI_SPEC_REFERENCE;
    return DI_OK;
}

/* Scratch and a row of logits for every thread that draws. */
static di_status make_samplers(di_runner *r, di_error *err) {
    int n = r->n_workers;
    di_status st;
    r->samplers = calloc((size_t)n, sizeof *r->samplers);
    r->rows = calloc((size_t)n, sizeof *r->rows);
    if (!r->samplers || !r->rows)
        return di_fail(err, DI_ERR_MEMORY, "samplers of %d threads", n);
    for (int i = 0; i < n; i++) {
        if ((st = di_sampler_reserve(&r->samplers[i], r->n_vocab, err)))
            return st;
        if (!(r->rows[i] = malloc((size_t)r->n_vocab * sizeof(float))))
            return di_fail(err, DI_ERR_MEMORY, "a row of %d logits", r->n_vocab);
    }
    return DI_OK;
}

di_status di_runner_init(di_runner *r, di_error *err) {
    r->n_workers = r->backend->device->host_threads(r->device);
    di_status st = make_drafting(r, err);
    if (!st)
        st = r->executor.sample ? di_drawer_init(r, err) : make_samplers(r, err);
    if (!st && r->executor.launch)
        st = di_device_clock_init(r, err);
    return st ? st : start(r, err);
}

void di_runner_deinit(di_runner *r) {
    if (r->has_thread) {
        pthread_mutex_lock(&r->mutex);
        r->is_stopping = true;
        pthread_cond_signal(&r->work);
        pthread_mutex_unlock(&r->mutex);
        pthread_join(r->thread, NULL);
    }
    if (r->has_locks) {
        pthread_cond_destroy(&r->done);
        pthread_cond_destroy(&r->work);
        pthread_mutex_destroy(&r->mutex);
    }
    for (int i = 0; i < r->n_workers && r->samplers && r->rows; i++) {
        di_sampler_deinit(&r->samplers[i]);
        free(r->rows[i]);
    }
    if (r->backend) {
        di_device_clock_deinit(r);
        di_drawer_deinit(r);
    }
    free(r->samplers);
    free(r->rows);
    free(r->batch);
    free(r->plan_seqs);
    free(r->plan);
    free(r->plan_scratch);
    free(r->draft_seqs);
    free(r->drafters);
    free(r->drafter_rows);
    free(r->sure);
    free(r->draft_prev);
    free(r->draft_is_drawn);
    free(r->draft_conf);
    free(r->draft_errors);
    free(r->mask_jobs);
    free(r->curve);
    di_masker_destroy(r->masker);
    *r = (di_runner){0};
}
