/* The engine's state: made for a model, fed with requests, asked for numbers.
 *
 * Everything that a step needs is allocated here, for the largest step; the steps themselves are in step.c, a request's
 * own life in sequence.c. */
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

static di_status create(di_core *e, const di_memory_plan *plan, di_error *err) {
    const di_core_options *o = &e->options;
    if (o->seqs_max < 1 || o->chunk_max < 1 || o->context_max < 2 || o->n_blocks < 1)
        return di_fail(err, DI_ERR_ARG,
                       "engine limits of %d sequences, chunks of %lld, a context of %lld and %d KV blocks", o->seqs_max,
                       (long long)o->chunk_max, (long long)o->context_max, o->n_blocks);
    if (o->batch_tokens_max < o->seqs_max)
        return di_fail(err, DI_ERR_ARG, "--max-batched-tokens %lld: expected at least --max-seqs (%d)",
                       (long long)o->batch_tokens_max, o->seqs_max);
    const di_config *c = di_model_config(e->model);
    di_status st = di_replay_settle(c, o->replay, o->replay_keep, &e->keep, err);
    if (st)
        return st;
    e->stats.replay_keep = e->keep;
    e->stats.is_replay_exact = e->keep == 0 || e->keep >= di_config_replay_exact(c);
    size_t n = (size_t)o->seqs_max;
    e->running = calloc(n, sizeof(di_sequence *));
    e->rows = calloc(n, sizeof *e->rows);
    e->batch = calloc(n, sizeof(di_sequence *));
    e->logits = malloc((size_t)e->n_vocab * sizeof *e->logits);
    if (!e->running || !e->rows || !e->batch || !e->logits)
        return di_fail(err, DI_ERR_MEMORY, "engine for %d sequences", o->seqs_max);
    if ((st = di_sampler_reserve(&e->sampler, e->n_vocab, err)))
        return st;
    if ((st = di_kv_init(&e->kv, e->backend, e->device, plan, o->n_blocks, o->seqs_max, err)))
        return st;
    return di_forward_create(&e->forward, e->model, err);
}

di_status di_core_create(di_core **out, di_model *model, const di_backend *backend, di_device *device,
                         const di_memory_plan *plan, const di_tokenizer *tok, const di_core_options *options,
                         di_error *err) {
    di_core *e = calloc(1, sizeof *e);
    if (!e)
        return di_fail(err, DI_ERR_MEMORY, "engine");
    e->model = model;
    e->backend = backend;
    e->device = device;
    e->tok = tok;
    e->options = *options;
    e->n_vocab = di_model_config(model)->vocab;
    e->eos_id = di_model_config(model)->eos_id;
    di_status st = create(e, plan, err);
    if (st) {
        di_core_destroy(e);
    } else {
        *out = e;
    }
    return di_error_context(err, st, "starting the engine");
}

void di_core_destroy(di_core *e) {
    if (!e)
        return;
    for (int32_t i = 0; i < e->n_running; i++)
        di_sequence_destroy(e->running[i]);
    for (di_sequence *s = e->waiting, *next; s; s = next) {
        next = s->next;
        di_sequence_destroy(s);
    }
    di_forward_destroy(e->forward);
    di_kv_deinit(&e->kv);
    di_sampler_deinit(&e->sampler);
    free(e->running);
    free(e->rows);
    free(e->batch);
    free(e->logits);
    free(e);
}

di_status di_core_submit(di_core *e, const di_submission *submission, uint64_t *id, di_error *err) {
    di_sequence *s = NULL;
    di_status st = di_sequence_create(&s, e, submission, err);
    if (st)
        return st;
    s->gen.id = ++e->id_last;
    if (id)
        *id = s->gen.id;
    if (e->waiting_last) {
        e->waiting_last->next = s;
    } else {
        e->waiting = s;
    }
    e->waiting_last = s;
    e->n_waiting++;
    return DI_OK;
}

bool di_core_abort(di_core *e, uint64_t id) {
    for (int32_t i = 0; i < e->n_running; i++) {
        if (e->running[i]->gen.id == id)
            return e->running[i]->is_aborted = true;
    }
    for (di_sequence *s = e->waiting; s; s = s->next) {
        if (s->gen.id == id)
            return s->is_aborted = true;
    }
    return false;
}

void di_core_abort_all(di_core *e) {
    for (int32_t i = 0; i < e->n_running; i++)
        e->running[i]->is_aborted = true;
    for (di_sequence *s = e->waiting; s; s = s->next)
        s->is_aborted = true;
}

int64_t di_core_pending(const di_core *e) {
    return e->n_waiting + e->n_running;
}

void di_core_stats_get(const di_core *e, di_core_stats *out) {
    *out = e->stats;
    out->blocks = e->kv.blocks.n_units;
    out->blocks_used = di_kv_pool_used(&e->kv.blocks);
    out->slots = e->kv.slots.n_units;
    out->slots_used = di_kv_pool_used(&e->kv.slots);
}
