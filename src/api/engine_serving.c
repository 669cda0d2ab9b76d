/* Requests that the engine and a server share, and traces on demand (serving.h). */
#include "engine_api.h"

/* Alternatives to a token that a reply may have: a body of a few bytes must not make one of gigabytes. */
enum { LOGPROBS_MAX = 20 };

di_shared_request *di_shared_request_create(di_error *err) {
    di_shared_request *s = calloc(1, sizeof *s);
    if (s) {
        atomic_store(&s->n_refs, 1);
    } else {
        di_fail(err, DI_ERR_MEMORY, "request");
    }
    return s;
}

const di_request *di_shared_request_get(const di_shared_request *s) {
    return &s->request;
}

di_shared_request *di_shared_request_acquire(di_shared_request *s) {
    atomic_fetch_add(&s->n_refs, 1);
    return s;
}

void di_shared_request_release(di_shared_request *s) {
    if (!s || atomic_fetch_sub(&s->n_refs, 1) > 1)
        return;
    di_request_deinit(&s->request);
    free(s);
}

di_status di_engine_request_check(const di_engine *e, const di_request *q, di_error *err) {
    di_status st = di_line_check(q, err);
    bool is_chat = q->input == DI_INPUT_CHAT;
    int64_t n_samples = q->n * (int64_t)DI_MAX(q->n_prompts, (size_t)1);
    if (!st && e->pending_max > 0 && n_samples > e->pending_max)
        return di_fail(err, DI_ERR_REQUEST,
                       "n: %lld, expected 1 to %lld, the samples of all prompts that the engine takes at once",
                       (long long)n_samples, (long long)e->pending_max);
    if (!st && q->input != DI_INPUT_IDS && !(e->loaded.tok && (e->has_vocab || !is_chat)))
        st = di_fail(err, DI_ERR_REQUEST, "%s", e->vocab_error.message);
    return st;
}

di_status di_engine_request_open(di_engine *e, di_api_kind api, const char *body, size_t len, di_shared_request **out,
                                 di_error *err) {
    di_shared_request *s = *out = di_shared_request_create(err);
    if (!s)
        return DI_ERR_MEMORY;
    di_request_options options = e->defaults;
    options.logprobs_max = LOGPROBS_MAX;
    di_status st = di_request_parse(&s->request, api, body, len, &options, err);
    di_request *q = &s->request;
    if (!st && (st = di_engine_request_check(e, q, err)) && q->n_images == 0 && e->loaded.tok)
        snprintf(q->param, sizeof q->param, "%s", q->n_prompts > 1 ? "prompt" : "n");
    if (st)
        atomic_fetch_add(&e->n_refused_invalid, 1);
    return st;
}

di_status di_engine_request_encode(di_engine *e, const di_shared_request *s, size_t prompt_idx, di_prompt *prompt,
                                   di_ids *ids, di_error *err) {
    return di_request_encode_prompt(&s->request, prompt_idx, e->loaded.tok, &e->vocab, prompt, ids, err);
}

di_status di_engine_ids_check(const di_engine *e, const di_ids *ids, di_error *err) {
    for (size_t i = 0; i < ids->len; i++) {
        if (ids->data[i] < 0 || ids->data[i] >= e->loaded.config.vocab)
            return di_fail(err, DI_ERR_REQUEST, "prompt token %zu is %d, the vocabulary has 0 to %d", i, ids->data[i],
                           e->loaded.config.vocab - 1);
    }
    return DI_OK;
}

di_status di_engine_request_try(di_engine *e, const di_shared_request *s, size_t prompt_idx, di_error *err) {
    di_ids ids = {0};
    di_status st = di_engine_request_encode(e, s, prompt_idx, NULL, &ids, err);
    if (!st)
        st = di_engine_ids_check(e, &ids, err);
    if (!st)
        st = di_engine_prompt_check(e, &s->request, &ids, err);
    di_ids_deinit(&ids);
    if (st && s->request.n_prompts > 1) {
        char where[48];
        snprintf(where, sizeof where, "prompt[%zu]", prompt_idx);
        st = di_error_context(err, st, "%s", where);
    }
    return st;
}

di_status di_engine_warm(di_engine *e, di_error *err) {
    const di_grammar_vocab *vocab;
    return e->loaded.tok ? di_constrainer_vocab(&e->constrainer, &vocab, err) : DI_OK;
}

di_status di_engine_trace_start(di_engine *e, const char *path, di_error *err) {
    return di_trace_start(e->trace, path, err);
}

di_status di_engine_trace_stop(di_engine *e, di_error *err) {
    return di_trace_stop(e->trace, err);
}
