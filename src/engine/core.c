/* The engine's state: made for a model, fed with requests, asked for numbers.
 *
 * Everything that a step needs is allocated here, for the largest step; the steps themselves are in step.c, what they
 * hold of KV memory in memory.c, the thread that runs them in runner.c, a request's own life in sequence.c. */
#include "engine_internal.h"

di_status di_replay_settle(const di_config *c, di_replay replay, int64_t keep, int64_t *settled, di_error *err) {
    int64_t exact = di_config_replay_exact(c), least = (int64_t)c->window + DI_BACKTRACK;
    *settled = 0;
    if (replay == DI_REPLAY_OFF)
        return DI_OK;
    if (c->first_consumer >= c->n_layers)
        return di_fail(err, DI_ERR_ARG, "--replay: the model has no consumer layers, expected off");
    if (keep > 0 && keep < least)
        return di_fail(err, DI_ERR_ARG,
                       "--replay-keep %lld: expected %lld (window and backtracking) or more; %lld is exact",
                       (long long)keep, (long long)least, (long long)exact);
    *settled = keep > 0 ? keep : DI_MAX(exact, least);
    return DI_OK;
}

/* ---- making -------------------------------------------------------------------------------------------------------
 */

static di_status check(const di_core_options *o, di_error *err) {
    if (o->seqs_max < 1 || o->chunk_max < 1 || o->context_max < 2 || o->n_blocks < 1)
        return di_fail(err, DI_ERR_ARG,
                       "engine limits of %d sequences, chunks of %lld, a context of %lld and %d KV blocks", o->seqs_max,
                       (long long)o->chunk_max, (long long)o->context_max, o->n_blocks);
    if (o->batch_tokens_max < o->seqs_max)
        return di_fail(err, DI_ERR_ARG, "--max-batched-tokens %lld: expected at least --max-seqs (%d)",
                       (long long)o->batch_tokens_max, o->seqs_max);
    if (o->logits_max < o->seqs_max)
        return di_fail(err, DI_ERR_ARG, "logits of %lld rows: expected at least --max-seqs (%d)",
                       (long long)o->logits_max, o->seqs_max);
    if (o->draft_tokens < 0 || o->draft_tokens > DI_SPEC_DRAFTS_MAX)
        return di_fail(err, DI_ERR_ARG, "--draft-tokens %d: expected 0 to %d", o->draft_tokens, DI_SPEC_DRAFTS_MAX);
    return DI_OK;
}

/* Where drafting pays now and then only, the draft module's keys are made when it is about to. */
static di_status make_taps(di_core *c, size_t tap_bytes, di_error *err) {
    size_t n = (size_t)c->options.seqs_max, bytes;
    if (c->options.draft_tokens == 0 || c->options.draft_policy != DI_SPEC_COST || tap_bytes == 0)
        return DI_OK;
    if (!di_size_mul(&bytes, n, tap_bytes))
        return di_fail(err, DI_ERR_RANGE, "taps of %zu sequences", n);
    void *memory = NULL;
    di_status st = c->backend->device->alloc(c->device, bytes, &memory, err);
    c->taps = memory;
    if (st)
        return di_error_context(err, st, "taps of %zu sequences", n);
    return di_kv_pool_init(&c->tap_slots, c->options.seqs_max, err);
}

/* Room on the device for what drafts are drawn from, where it draws them and acceptance needs it. */
static di_status make_draft_ln(di_core *c, const di_executor *executor, di_error *err) {
    const di_core_options *o = &c->options;
    size_t n = (size_t)o->seqs_max * (size_t)o->draft_tokens, bytes;
    if (!executor->sample || o->accept != DI_SPEC_REJECTION || n == 0)
        return DI_OK;
    if (!di_size_mul3(&bytes, n, (size_t)c->model.n_vocab, sizeof *c->draft_ln))
        return di_fail(err, DI_ERR_RANGE, "distributions of %zu drafts", n);
    void *memory = NULL;
    di_status st = c->backend->device->alloc(c->device, bytes, &memory, err);
    c->draft_ln = memory;
    if (st)
        return di_error_context(err, st, "distributions of %zu drafts", n);
    return di_kv_pool_init(&c->ln_slots, o->seqs_max, err);
}

static di_status make_memory(di_core *c, const di_executor *executor, const di_memory_plan *plan, di_error *err) {
    const di_core_options *o = &c->options;
    di_status st = di_kv_init(&c->kv, c->backend, c->device, plan, o->n_blocks, o->seqs_max + o->n_snapshots, err);
    if (!st)
        st = make_taps(c, plan->tap_bytes, err);
    if (!st)
        st = make_draft_ln(c, executor, err);
    if (st || !o->has_prefix_cache)
        return st;
    /* A snapshot every so many blocks of a long prompt: about a quarter of the memory of the blocks between. */
    size_t between = 4 * DI_MAX(plan->page_bytes, (size_t)1);
    c->snapshot_every = (int32_t)DI_MAX(DI_CEIL_DIV(plan->slot_bytes, between), (size_t)1);
    di_prefix_options po = {.snapshots_max = o->n_snapshots, .rebuild_rows = c->model.window_span};
    return di_prefix_create(&c->prefix, &c->kv, &po, err);
}

static di_status make_tables(di_core *c, di_error *err) {
    size_t n = (size_t)c->options.seqs_max;
    c->running = calloc(n, sizeof(di_sequence *));
    c->held = malloc((size_t)c->options.n_blocks * sizeof *c->held);
    c->late_page_copies = calloc(n, sizeof *c->late_page_copies);
    c->late_slot_copies = calloc(n, sizeof *c->late_slot_copies);
    if (!c->running || !c->held || !c->late_page_copies || !c->late_slot_copies)
        return di_fail(err, DI_ERR_MEMORY, "engine for %zu sequences", n);
    di_status st = di_step_init(&c->steps[0], c, err);
    if (!st)
        st = di_step_init(&c->steps[1], c, err);
    return st ? st : di_sched_queue_init(&c->queue, err);
}

static di_status make_runner(di_core *c, const di_executor *executor, di_error *err) {
    c->runner.executor = *executor;
    c->runner.backend = c->backend;
    c->runner.device = c->device;
    c->runner.kv = &c->kv;
    c->runner.taps = executor->catch_up ? c->taps : NULL;
    c->runner.ring_rows = c->model.window + DI_BACKTRACK;
    c->runner.rows_max = c->options.batch_tokens_max;
    c->runner.replay = c->options.replay;
    c->runner.n_vocab = c->model.n_vocab;
    c->runner.eos_id = c->model.eos_id;
    c->runner.blacklist = c->options.blacklist;
    c->runner.trace = c->options.trace;
    c->runner.seqs_max = c->options.seqs_max;
    c->runner.context_max = c->options.context_max;
    c->runner.n_drafts = c->options.draft_tokens;
    c->runner.policy = c->options.draft_policy;
    c->runner.accept = c->options.accept;
    c->runner.temperatures = c->options.draft_temperatures;
    if (c->options.draft_tokens > 0)
        di_spec_cost_init(&c->runner.cost, &c->model.step_experts, &c->model.draft_experts, c->options.draft_tokens,
                          (int64_t)c->options.seqs_max * (1 + c->options.draft_tokens));
    di_trace_thread(c->options.trace, DI_TRACE_ENGINE, "engine");
    di_trace_thread(c->options.trace, DI_TRACE_RUNNER, "runner");
    return di_runner_init(&c->runner, err);
}

static bool keeps_step_times(const di_core *c) {
    return c->options.step_times_dir && c->runner.n_drafts > 0 && c->options.draft_policy == DI_SPEC_COST;
}

/* What the policy of drafts knows of this machine: from an earlier run, else from a few steps now. */
static void prepare_policy(di_core *c) {
    const di_core_options *o = &c->options;
    if (!keeps_step_times(c) || !di_spec_store_load(o->step_times_dir, o->step_times_key, di_clock_wall_s(),
                                                    o->step_times_ttl_s, &c->runner.cost, &c->runner.calibration))
        di_core_measure(c);
}

static void keep_step_times(di_core *c) {
    di_error err = {0};
    if (keeps_step_times(c) && di_spec_cost_is_ready(&c->runner.cost) &&
        di_spec_store_save(c->options.step_times_dir, c->options.step_times_key, di_clock_wall_s(), &c->runner.cost,
                           &c->runner.calibration, &err))
        di_warn("step times are not kept: %s", err.message);
}

di_status di_core_create_on(di_core **out, const di_executor *executor, const di_core_model *model,
                            const di_backend *backend, di_device *device, const di_memory_plan *plan,
                            const di_tokenizer *tok, const di_core_options *options, di_error *err) {
    di_core *c = calloc(1, sizeof *c);
    if (!c)
        return di_fail(err, DI_ERR_MEMORY, "engine");
    c->model = *model;
    c->backend = backend;
    c->device = device;
    c->tok = tok;
    c->options = *options;
    if (c->options.logits_max == 0)
        c->options.logits_max = c->options.seqs_max;
    if (!c->options.has_prefix_cache)
        c->options.n_snapshots = 0;
    if (!executor->draft_begin || !executor->draft_next)
        c->options.draft_tokens = 0;
    c->keep = options->replay == DI_REPLAY_OFF ? 0 : options->replay_keep;
    c->stats.replay_keep = c->keep;
    c->stats.is_replay_exact = true;
    c->deadline_next_ns = INT64_MAX;
    c->pace = (di_pace){.ttft_goal_ns = options->ttft_goal_ns, .tpot_goal_ns = options->tpot_goal_ns};
    c->log_ns = di_clock_ns();
    di_status st = check(&c->options, err);
    if (!st)
        st = make_memory(c, executor, plan, err);
    if (!st)
        st = make_tables(c, err);
    if (!st)
        st = make_runner(c, executor, err);
    if (st) {
        di_core_destroy(c);
        return di_error_context(err, st, "starting the engine");
    }
    prepare_policy(c);
    *out = c;
    return DI_OK;
}

static di_status model_forward(void *self, const di_batch *batch, float **logits, di_error *err) {
    return di_forward_run(self, batch, logits, err);
}

static di_status model_copy(void *self, uint8_t *base, size_t unit_bytes, const di_copy *copies, int32_t n,
                            di_error *err) {
    return di_forward_copy_units(self, base, unit_bytes, copies, n, err);
}

static di_status model_launch(void *self, const di_batch *batch, float **logits, di_error *err) {
    return di_forward_launch(self, batch, logits, err);
}

static di_status model_wait(void *self, di_error *err) {
    return di_forward_wait(self, err);
}

static di_status model_sample(void *self, const di_sample_rows_args *args, di_error *err) {
    return di_forward_sample(self, args, err);
}

static di_status model_draft_begin(void *self, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                                   di_error *err) {
    return di_draft_begin(self, seqs, n_seqs, n_rows, slots, NULL, NULL, err);
}

static di_status model_catch_up(void *self, const di_batch *batch, di_error *err) {
    return di_draft_catch_up(self, batch, err);
}

static di_status model_draft_next(void *self, int32_t i, const int32_t *prev, float **logits, float **conf,
                                  di_error *err) {
    return di_draft_next(self, i, prev, logits, conf, err);
}

static di_status model_draft_launch(void *self, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows,
                                    uint8_t *slots, di_error *err) {
    return di_draft_launch(self, seqs, n_seqs, n_rows, slots, NULL, NULL, err);
}

static di_status model_draft_follow(void *self, int32_t i, const int32_t *tokens, float **logits, float **conf,
                                    di_error *err) {
    return di_draft_follow(self, i, tokens, logits, conf, err);
}

static int64_t model_unrecorded(void *self) {
    return di_forward_unrecorded(self);
}

di_status di_core_create(di_core **out, di_model *model, const di_backend *backend, di_device *device,
                         const di_memory_plan *plan, const di_tokenizer *tok, const di_core_options *options,
                         di_error *err) {
    const di_config *config = di_model_config(model);
    di_core_options o = *options;
    di_core_model m = {
        .n_vocab = config->vocab,
        .eos_id = config->eos_id,
        .window = config->window,
        .window_span = di_config_window_span(config, o.replay != DI_REPLAY_OFF, o.draft_tokens > 0),
        .step_experts = {config->n_layers, config->n_experts, config->n_experts_tok},
        .draft_experts = {config->n_draft_layers, config->draft_experts, config->draft_experts_tok},
    };
    di_status st = di_replay_settle(config, o.replay, o.replay_keep, &o.replay_keep, err);
    if (st)
        return di_error_context(err, st, "starting the engine");
    di_forward *forward = NULL;
    if ((st = di_forward_create(&forward, model, err)))
        return di_error_context(err, st, "starting the engine");
    di_executor executor = {.self = forward, .forward = model_forward, .copy = model_copy};
    executor.n_unrecorded = model_unrecorded;
    if (backend->ops->sample_rows) {
        executor.sample = model_sample;
        executor.wait = model_wait;
        executor.stream = di_forward_stream(forward);
        if (backend->ops->feed)
            executor.launch = model_launch;
    }
    if (o.draft_tokens > 0) {
        executor.draft_begin = model_draft_begin;
        executor.draft_next = model_draft_next;
        executor.catch_up = model_catch_up;
        executor.draft_launch = executor.launch ? model_draft_launch : NULL;
        executor.draft_follow = executor.launch ? model_draft_follow : NULL;
    }
    if ((st = di_core_create_on(out, &executor, &m, backend, device, plan, tok, &o, err))) {
        di_forward_destroy(forward);
        return st;
    }
    (*out)->forward = forward;
    (*out)->stats.is_replay_exact = o.replay_keep == 0 || o.replay_keep >= di_config_replay_exact(config);
    return DI_OK;
}

void di_core_destroy(di_core *c) {
    if (!c)
        return;
    if (c->in_flight) { /* its sampling may be due still */
        di_runner_sample(&c->runner, c->in_flight);
        di_runner_wait(&c->runner, c->in_flight);
        di_step_keep_snapshots(c, c->in_flight);
    }
    keep_step_times(c);
    di_runner_deinit(&c->runner);
    for (di_sequence *s = c->all, *next; s; s = next) {
        next = s->next;
        if (s->item.is_queued)
            di_sched_remove(&c->queue, &s->item);
        di_sequence_destroy(s);
    }
    di_step_deinit(&c->steps[0]);
    di_step_deinit(&c->steps[1]);
    di_sched_queue_deinit(&c->queue);
    di_prefix_destroy(c->prefix);
    if (c->taps)
        c->backend->device->free(c->device, c->taps);
    di_kv_pool_deinit(&c->tap_slots);
    if (c->draft_ln)
        c->backend->device->free(c->device, c->draft_ln);
    di_kv_pool_deinit(&c->ln_slots);
    di_kv_deinit(&c->kv);
    di_forward_destroy(c->forward);
    di_strbuf_deinit(&c->piece);
    free(c->running);
    free(c->held);
    free(c->late_page_copies);
    free(c->late_slot_copies);
    free(c);
}

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

static void link_sequence(di_core *c, di_sequence *s) {
    s->next = c->all;
    if (c->all)
        c->all->prev = s;
    c->all = s;
}

void di_core_unlink(di_core *c, di_sequence *s) {
    if (s->prev) {
        s->prev->next = s->next;
    } else {
        c->all = s->next;
    }
    if (s->next)
        s->next->prev = s->prev;
}

static di_status refuse(di_core *c, di_status st) {
    if (st == DI_ERR_BUSY) {
        c->stats.n_refused_busy++;
    } else {
        c->stats.n_refused_invalid++;
    }
    return st;
}

static di_status check_room(const di_core *c, int32_t n, di_error *err) {
    int64_t waiting = c->queue.n_items + c->n_held;
    if (c->is_draining)
        return di_fail(err, DI_ERR_BUSY, "the engine is shutting down and takes no new requests");
    if (c->options.queue_max > 0 && n > c->options.queue_max)
        return di_fail(err, DI_ERR_RANGE, "n %d: the queue holds %lld requests", n, (long long)c->options.queue_max);
    if (c->options.queue_max > 0 && waiting + n > c->options.queue_max)
        return di_fail(err, DI_ERR_BUSY, "%lld requests wait, the queue holds %lld: try again later",
                       (long long)waiting, (long long)c->options.queue_max);
    return DI_OK;
}

/* All samples of a request, or none. The first runs the prompt, the others wait for it. */
static di_status make_samples(di_core *c, const di_submission *sub, int32_t n, di_sequence **leader, di_error *err) {
    *leader = NULL;
    for (int32_t i = n - 1; i >= 0; i--) {
        di_sequence *s = NULL;
        di_status st = di_sequence_create(&s, c, sub, i, err);
        if (st) {
            for (di_sequence *made = *leader, *next; made; made = next) {
                next = made->next_held;
                di_sequence_destroy(made);
            }
            return st;
        }
        s->next_held = *leader;
        *leader = s;
    }
    DI_ASSERT(*leader); /* n is 1 or more */
    (*leader)->held = (*leader)->next_held;
    (*leader)->next_held = NULL;
    return DI_OK;
}

di_status di_core_submit(di_core *c, const di_submission *submission, uint64_t *id, di_error *err) {
    di_submission sub = *submission;
    di_sequence *leader;
    int32_t n = sub.n > 0 ? sub.n : 1;
    if (sub.n < 0 || n > DI_SAMPLES_MAX)
        return refuse(c, di_fail(err, DI_ERR_RANGE, "n %d: expected 1 to %d", sub.n, DI_SAMPLES_MAX));
    di_status st = check_room(c, n, err);
    if (st)
        return refuse(c, st);
    if (!sub.sampling.has_seed && !di_sampling_is_greedy(&sub.sampling)) {
        sub.sampling.seed = di_random_u64() >> 11; /* 53 bits: any JSON reader can hand them back */
        sub.sampling.has_seed = true;
    }
    if ((st = make_samples(c, &sub, n, &leader, err)))
        return refuse(c, st);
    DI_ASSERT(leader);
    c->id_last++;
    for (di_sequence *s = leader, *next; s; s = next) {
        next = s == leader ? s->held : s->next_held;
        s->gen.id = c->id_last;
        s->item.arrival = ++c->arrival_last;
        c->deadline_next_ns = DI_MIN(c->deadline_next_ns, s->deadline_ns);
        link_sequence(c, s);
        if (s == leader)
            continue;
        s->state = DI_SEQ_HELD;
        s->leader = leader;
        c->n_held++;
    }
    leader->state = DI_SEQ_WAITING;
    di_sched_push(&c->queue, &leader->item);
    c->stats.n_submitted += n;
    if (id)
        *id = c->id_last;
    return DI_OK;
}

bool di_core_abort(di_core *c, uint64_t id) {
    bool is_found = false;
    for (di_sequence *s = c->all; s; s = s->next) {
        if (s->gen.id == id && s->state != DI_SEQ_ENDED)
            is_found = s->is_aborted = c->has_aborted = true;
    }
    return is_found;
}

void di_core_abort_all(di_core *c) {
    for (di_sequence *s = c->all; s; s = s->next)
        s->is_aborted = c->has_aborted = true;
}

void di_core_drain(di_core *c) {
    c->is_draining = true;
}

int64_t di_core_pending(const di_core *c) {
    return c->queue.n_items + c->n_held + c->n_running;
}

/* ---- numbers ------------------------------------------------------------------------------------------------------
 */

void di_core_stats_get(const di_core *c, di_core_stats *out) {
    di_prefix_stats p;
    di_prefix_stats_get(c->prefix, &p);
    *out = c->stats;
    out->ttft_gave_way = c->pace.ttft_gave_way;
    out->tpot_gave_way = c->pace.tpot_gave_way;
    out->n_running = c->n_running;
    out->n_waiting = (int32_t)DI_MIN(c->queue.n_items + c->n_held, INT32_MAX);
    out->blocks = c->kv.blocks.n_units;
    out->blocks_cached = p.idle_blocks;
    out->blocks_used = di_kv_pool_used(&c->kv.blocks) - p.idle_blocks;
    out->slots = c->options.seqs_max;
    out->slots_used = di_kv_pool_used(&c->kv.slots) - p.snapshots;
    out->snapshots = p.snapshots;
    out->cache_queries = p.queries;
    out->cache_hits = p.hits;
    out->cache_evicted_blocks = p.evicted_blocks;
    out->cache_evicted_snapshots = p.evicted_snapshots;
}

static double percent(double part, double whole) {
    return whole > 0 ? 100 * part / whole : 0;
}

void di_core_log_stats(di_core *c) {
    di_core_stats *st = &c->stats;
    int64_t n_steps = st->n_steps - c->log_steps;
    if (c->options.log_interval_steps <= 0 || n_steps < c->options.log_interval_steps)
        return;
    int64_t now_ns = di_clock_ns();
    double seconds = DI_MAX((double)(now_ns - c->log_ns) * 1e-9, 1e-9);
    st->steps_per_s = (double)n_steps / seconds;
    st->tokens_per_s = (double)(st->prompt_tokens + st->output_tokens - c->log_tokens) / seconds;
    c->log_steps = st->n_steps;
    c->log_tokens = st->prompt_tokens + st->output_tokens;
    c->log_ns = now_ns;
    di_core_stats s;
    di_core_stats_get(c, &s);
    di_info(
        "steps %lld (%.1f/s), tokens %.1f/s (prompts %lld, cached %lld, output %lld), running %d, waiting %d, "
        "in chunks %d, last step %lld rows (%.0f %% of the budget), KV blocks %d of %d used and %d cached, slots %d "
        "of %d, snapshots %d, cache hits %lld of %lld, first token %.1f ms on average and %.1f at most, finished "
        "%lld, preempted %lld, aborted %lld, failed %lld, refused %lld, forward %.1f %% and sampling %.1f %% of "
        "the time",
        (long long)s.n_steps, s.steps_per_s, s.tokens_per_s, (long long)s.prompt_tokens, (long long)s.cached_tokens,
        (long long)s.output_tokens, s.n_running, s.n_waiting, s.n_chunking, (long long)s.step_rows,
        percent((double)s.step_rows, (double)c->options.batch_tokens_max), s.blocks_used, s.blocks, s.blocks_cached,
        s.slots_used, s.slots, s.snapshots, (long long)s.cache_hits, (long long)s.cache_queries,
        s.n_ttft ? (double)s.ttft_sum_ns / (double)s.n_ttft * 1e-6 : 0.0, (double)s.ttft_max_ns * 1e-6,
        (long long)s.n_finished, (long long)s.n_preempted, (long long)s.n_abort, (long long)s.n_error,
        (long long)(s.n_refused_busy + s.n_refused_invalid),
        percent((double)(st->forward_ns - c->log_forward_ns), seconds * 1e9),
        percent((double)(st->sample_ns - c->log_sample_ns), seconds * 1e9));
    c->log_forward_ns = st->forward_ns;
    c->log_sample_ns = st->sample_ns;
}
