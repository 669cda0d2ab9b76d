/* The runner: a thread that takes steps in order, runs their forward and draws their tokens.
 *
 * Of a step it runs first the copies (forks, restored windows), then the forward, then, once the engine's thread has
 * filled the arguments, the sampling; each drawn token is written into its sequence's token array at once, where the
 * next step's forward reads it. So the next step can start before the engine's thread has looked at this one. Steps run
 * strictly one after another: memory that was given back while a step was here is written by later steps only.
 *
 * Rows are sampled on the device's host threads, each with scratch of its own. Results lie in the step's rows; nothing
 * here knows what a token means. */
#include "engine_internal.h"

/* ---- sampling ---- */

typedef struct sample_job {
    di_runner *runner;
    di_step *step;
    const float *logits; /* device */
} sample_job;

static di_status draw(const sample_job *job, const di_step_row *row, int worker, di_step_result *result,
                      di_error *err) {
    di_runner *r = job->runner;
    const di_sequence *s = row->seq;
    float *logits = r->rows[worker];
    di_status st = r->backend->device->download(r->device, logits, job->logits + (int64_t)row->logits_row * r->n_vocab,
                                                (size_t)r->n_vocab * sizeof *logits, err);
    if (st)
        return st;
    di_logprob *top = row->n_top > 0 ? job->step->tops + row->top_at : NULL;
    if (row->is_prompt)
        return di_logprobs_of(&r->samplers[worker], logits, r->n_vocab, row->forced, DI_MAX(row->n_top, 0),
                              &result->logprob, top, err);
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
        .forced = row->forced,
        .logprob = row->n_top >= 0 ? &result->logprob : NULL,
        .top = top,
    };
    return di_sample(&r->samplers[worker], &args, &result->token, err);
}

static void sample_row(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const sample_job *job = ctx;
    const di_step_row *row = &job->step->samples[part];
    di_step_result *result = &job->step->results[part];
    if (row->is_skipped)
        return;
    result->status = draw(job, row, worker, result, &job->step->errors[part]);
    if (row->is_prompt)
        return;
    /* A forward that is formed already reads a token here; what it makes of a row that failed is dropped. */
    if (result->status)
        result->token = 0;
    row->seq->tokens[row->position] = result->token;
}

static void sample(di_runner *r, di_step *step, const float *logits) {
    sample_job job = {r, step, logits};
    if (step->n_samples > 1 && r->n_workers > 1) {
        r->backend->device->host_run(r->device, sample_row, &job, step->n_samples);
        return;
    }
    for (int32_t i = 0; i < step->n_samples; i++)
        sample_row(&job, i, step->n_samples, 0);
}

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

static di_status forward(const di_runner *r, di_step *step, float **logits) {
    di_error *err = &step->error;
    di_status st = copy_units(r, r->kv->pages, r->kv->page_bytes, step->page_copies, step->n_page_copies, err);
    if (!st)
        st = copy_units(r, r->kv->states, r->kv->slot_bytes, step->slot_copies, step->n_slot_copies, err);
    if (st || step->n_seqs == 0)
        return st;
    di_batch batch = {
        .n_seqs = step->n_seqs,
        .seqs = step->rows,
        .replay = r->replay,
        .pages = r->kv->pages,
        .slots = r->kv->states,
    };
    return r->executor.forward(r->executor.self, &batch, logits, err);
}

static void trace_step(const di_runner *r, const di_step *step) {
    if (!r->trace)
        return;
    di_trace_arg args[] = {{"sequences", step->n_seqs}, {"rows", step->n_rows}, {"prompt_rows", step->n_prompt_rows}};
    di_trace_span(r->trace, DI_TRACE_RUNNER, "forward", step->start_ns, step->forward_ns, (int)DI_COUNT(args), args);
    di_trace_arg drawn[] = {{"rows", step->n_samples}};
    di_trace_span(r->trace, DI_TRACE_RUNNER, "sample", step->sample_ns, step->end_ns, 1, drawn);
}

static void run(di_runner *r, di_step *step) {
    float *logits = NULL;
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
        sample(r, step, logits);
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

di_status di_runner_init(di_runner *r, di_error *err) {
    int n = r->backend->device->host_threads(r->device);
    r->samplers = calloc((size_t)n, sizeof *r->samplers);
    r->rows = calloc((size_t)n, sizeof *r->rows);
    if (!r->samplers || !r->rows)
        return di_fail(err, DI_ERR_MEMORY, "samplers of %d threads", n);
    r->n_workers = n;
    for (int i = 0; i < n; i++) {
        di_status st = di_sampler_reserve(&r->samplers[i], r->n_vocab, err);
        if (st)
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
    *r = (di_runner){0};
}
