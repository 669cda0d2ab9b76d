/* The runner: a thread that takes steps in order, runs their forward and draws their tokens.
 *
 * Of a step it runs first the copies (forks, restored windows), then the forward, then, once the engine's thread has
 * filled the arguments, the sampling (draw.c) and a drafting round; each token is written into its sequence's token
 * array at once, where the next step's forward reads it. So the next step can start before the engine's thread has
 * looked at this one. Where a decoding sequence stands is known here alone: how many drafts it verifies and at which
 * position its rows begin is settled when its step starts. Steps run strictly one after another: memory that was given
 * back while a step was here is written by later steps only.
 *
 * Rows are sampled on the device's host threads, each with scratch of its own. Results lie beside the step's rows;
 * nothing here knows what a token means. */
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

/* The rows of a decoding sequence, now that it is known where they begin; false: none are needed. */
static di_status settle(di_runner *r, di_step *step, int32_t k, bool *is_there) {
    di_step_seq *q = &step->seqs[k];
    di_seq_rows *rows = &step->rows[k];
    const di_sequence *s = q->seq;
    *is_there = true;
    if (!q->is_decoding)
        return DI_OK;
    *is_there = !di_sequence_is_whole(s);
    if (!*is_there)
        return DI_OK;
    rows->pos0 = s->golden;
    rows->n_rows = rows->n_logits = 1 + q->n_drafts;
    rows->n_snapshots = 0;
    for (int32_t j = 0; j <= q->n_drafts; j++)
        step->samples[q->sample_at + j].position = s->golden + 1 + j;
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

static di_status forward(di_runner *r, di_step *step, float **logits) {
    di_error *err = &step->error;
    di_status st = copy_units(r, r->kv->pages, r->kv->page_bytes, step->page_copies, step->n_page_copies, err);
    if (!st)
        st = copy_units(r, r->kv->states, r->kv->slot_bytes, step->slot_copies, step->n_slot_copies, err);
    if (st)
        return st;
    di_step_plan(r, step);
    int32_t n = 0, n_logits = 0;
    step->rows_run = step->context_run = 0;
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
    };
    return r->executor.forward(r->executor.self, &batch, logits, err);
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

static void run(di_runner *r, di_step *step) {
    float *logits = NULL;
    r->n_steps++;
    step->start_ns = di_clock_ns();
    step->error.code = forward(r, step, &logits);
    step->forward_ns = di_clock_ns();
    pthread_mutex_lock(&r->mutex);
    bool waits = !step->is_sampling_ready;
    while (!step->is_sampling_ready)
        pthread_cond_wait(&r->work, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
    step->sample_ns = waits ? di_clock_ns() : step->forward_ns;
    if (!step->error.code && step->n_samples > 0)
        di_step_draw(r, step, logits);
    step->drawn_ns = di_clock_ns();
    if (!step->error.code && r->n_drafts > 0)
        di_spec_cost_learn_step(&r->cost, step->rows_run, step->context_run,
                                step->forward_ns - step->start_ns + step->drawn_ns - step->sample_ns);
    di_step_draft(r, step);
    step->draft_error = di_spec_calibration_error(&r->calibration, -1);
    step->end_ns = di_clock_ns();
    trace_step(r, step);
}

static void *runner_main(void *arg) {
    di_runner *r = arg;
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
    r->draft_prev = calloc(n, sizeof *r->draft_prev);
    r->draft_conf = calloc(n, sizeof *r->draft_conf);
    r->draft_errors = calloc(n, sizeof *r->draft_errors);
    if (!r->batch || !r->plan_seqs || !r->plan || !r->plan_scratch || !r->draft_seqs || !r->drafters ||
        !r->draft_prev || !r->draft_conf || !r->draft_errors)
        return di_fail(err, DI_ERR_MEMORY, "drafting for %zu sequences", n);
    r->rate = 0.7;
    if (r->n_drafts > 0)
        di_spec_calibration_init(&r->calibration, r->n_drafts, NULL);
    return DI_OK;
}

di_status di_runner_init(di_runner *r, di_error *err) {
    int n = r->backend->device->host_threads(r->device);
    di_status st = make_drafting(r, err);
    if (st)
        return st;
    r->samplers = calloc((size_t)n, sizeof *r->samplers);
    r->rows = calloc((size_t)n, sizeof *r->rows);
    if (!r->samplers || !r->rows)
        return di_fail(err, DI_ERR_MEMORY, "samplers of %d threads", n);
    r->n_workers = n;
    for (int i = 0; i < n; i++) {
        if ((st = di_sampler_reserve(&r->samplers[i], r->n_vocab, err)))
            return st;
        if (!(r->rows[i] = malloc((size_t)r->n_vocab * sizeof(float))))
            return di_fail(err, DI_ERR_MEMORY, "a row of %d logits", r->n_vocab);
    }
    return start(r, err);
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
    for (int i = 0; i < r->n_workers; i++) {
        di_sampler_deinit(&r->samplers[i]);
        free(r->rows[i]);
    }
    free(r->samplers);
    free(r->rows);
    free(r->batch);
    free(r->plan_seqs);
    free(r->plan);
    free(r->plan_scratch);
    free(r->draft_seqs);
    free(r->drafters);
    free(r->draft_prev);
    free(r->draft_conf);
    free(r->draft_errors);
    *r = (di_runner){0};
}
