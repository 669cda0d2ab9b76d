/* One request's life: made from a submission, given a token at a time, ended by a stop rule or from outside.
 *
 * A token goes through three filters: the detokenizer holds back incomplete characters, then either the stop matcher
 * (plain text) or the output parser (chat) holds back what may begin a stop string or a marker. Only text that is
 * certain reaches gen.text and the events. All memory is taken at submit, for the longest output that the request may
 * have, so that a step allocates nothing; the exceptions grow by doubling: very long texts, log-probabilities of very
 * long outputs, and what the parser holds back. */
#include <math.h>

#include "engine_internal.h"

#define MAX_TOKENS_DEFAULT 8192
#define TEXT_RESERVE_BYTES (64 << 10)
#define LOGPROBS_RESERVE 16384 /* entries */

/* ---- making -------------------------------------------------------------------------------------------------------
 */

static di_status check_ids(const di_core *c, const char *what, const int32_t *ids, size_t n, di_error *err) {
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= c->model.n_vocab)
            return di_fail(err, DI_ERR_REQUEST, "%s token %zu: id %d is outside the vocabulary, expected 0 to %d", what,
                           i, ids[i], c->model.n_vocab - 1);
    }
    return DI_OK;
}

/* A unit must fit into one step beside a row of every other sequence, or it could wait for ever. */
static di_status check_units(const di_core *c, const di_submission *sub, di_error *err) {
    int64_t end = 0, n_max = DI_MIN(c->options.chunk_max, c->options.batch_tokens_max - c->options.seqs_max + 1);
    for (size_t i = 0; i < sub->n_units; i++) {
        const di_span *u = &sub->units[i];
        if (u->at < end || u->n < 1 || u->n > (int64_t)sub->n_ids - u->at)
            return di_fail(err, DI_ERR_REQUEST,
                           "unit %zu: %lld positions from %lld, expected rising spans within a prompt of %zu tokens", i,
                           (long long)u->n, (long long)u->at, sub->n_ids);
        if (u->n > n_max)
            return di_fail(
                err, DI_ERR_REQUEST,
                "unit %zu: %lld tokens that must be run at once, a step has room for %lld: raise --chunk and "
                "--max-batched-tokens",
                i, (long long)u->n, (long long)n_max);
        end = u->at + u->n;
    }
    return DI_OK;
}

const di_span *di_sequence_unit_at(const di_sequence *s, int64_t p) {
    for (size_t i = 0; i < s->n_units && s->units[i].at < p; i++) {
        if (p < s->units[i].at + s->units[i].n)
            return &s->units[i];
    }
    return NULL;
}

static di_status check(const di_core *c, const di_submission *sub, di_error *err) {
    di_status st = di_sampling_check(&sub->sampling, err);
    if (!st)
        st = di_sampling_check_vocab(&sub->sampling, c->model.n_vocab, err);
    if (st)
        return st;
    if (sub->n_ids == 0)
        return di_fail(err, DI_ERR_REQUEST, "the prompt is empty: expected at least one token");
    if (sub->n_ids >= (uint64_t)c->options.context_max)
        return di_fail(
            err, DI_ERR_REQUEST,
            "the prompt has %zu tokens, the context holds %lld with the answer: shorten it or raise --max-model-len",
            sub->n_ids, (long long)c->options.context_max);
    if ((st = check_ids(c, "prompt", sub->ids, sub->n_ids, err)))
        return st;
    if ((st = check_ids(c, "forced_token_ids:", sub->forced_first, sub->n_forced_first, err)))
        return st;
    if ((st = check_units(c, sub, err)))
        return st;
    if (!c->tok && (sub->sampling.n_stop > 0 || sub->parse))
        return di_fail(err, DI_ERR_REQUEST, "stop strings and messages need a tokenizer, and the model has none");
    if (sub->sampling.n_prompt_logprobs >= 0 && c->keep > 0)
        return di_fail(err, DI_ERR_REQUEST,
                       "log-probabilities of the prompt need every row of it, and bounded replay leaves rows out: run "
                       "with --replay off");
    return DI_OK;
}

/* A cursor over the one allocation that holds copies of the request's lists. */
static void *take(char **at, const void *from, size_t n_bytes) {
    void *copy = *at;
    if (n_bytes)
        memcpy(copy, from, n_bytes);
    *at += DI_ROUND_UP(n_bytes, sizeof(void *));
    return copy;
}

/* Copies of everything that the request only lends: stop strings (pointers, lengths, bytes), bias, stop tokens, forced
 * tokens. */
static di_status copy_lists(di_sequence *s, const di_submission *sub, di_error *err) {
    const di_sampling *from = &sub->sampling;
    di_sampling *to = &s->sampling;
    const size_t sizes[] = {
        from->n_stop * sizeof(char *),  from->n_stop * sizeof(size_t),         from->n_bias * sizeof(int32_t),
        from->n_bias * sizeof(float),   from->n_stop_tokens * sizeof(int32_t), sub->n_forced_first * sizeof(int32_t),
        sub->n_units * sizeof(di_span),
    };
    size_t bytes = 0;
    bool fits = DI_MAX(DI_MAX(from->n_stop, from->n_bias),
                       DI_MAX(from->n_stop_tokens, DI_MAX(sub->n_forced_first, sub->n_units))) < SIZE_MAX / 64;
    for (size_t i = 0; i < DI_COUNT(sizes) && fits; i++)
        fits = di_size_add(&bytes, bytes, DI_ROUND_UP(sizes[i], sizeof(void *)));
    for (size_t i = 0; i < from->n_stop && fits; i++)
        fits = di_size_add(&bytes, bytes, from->stop_len[i]);
    if (!fits || (bytes && !(s->memory = malloc(bytes))))
        return di_fail(err, DI_ERR_MEMORY, "lists of a request");
    char *at = s->memory;
    if (!at)
        return DI_OK;
    const char **stop = take(&at, from->stop, sizes[0]);
    size_t *stop_len = take(&at, from->stop_len, sizes[1]);
    to->stop = stop;
    to->stop_len = stop_len;
    to->bias_ids = take(&at, from->bias_ids, sizes[2]);
    to->bias_values = take(&at, from->bias_values, sizes[3]);
    to->stop_tokens = take(&at, from->stop_tokens, sizes[4]);
    s->forced_first = take(&at, sub->forced_first, sizes[5]);
    s->units = take(&at, sub->units, sizes[6]);
    for (size_t i = 0; i < from->n_stop; i++) {
        stop[i] = at;
        if (stop_len[i])
            memcpy(at, from->stop[i], stop_len[i]);
        at += stop_len[i];
    }
    return DI_OK;
}

static di_status reserve_text(di_strbuf *sb, size_t n, di_error *err) {
    char zeros[256] = {0};
    for (size_t done = 0; done < n; done += sizeof zeros)
        di_strbuf_append(sb, zeros, sizeof zeros);
    di_status st = di_strbuf_status(sb, err);
    di_strbuf_reset(sb);
    return st;
}

static di_status grow_logprobs(di_sequence *s, int64_t cap, di_error *err) {
    size_t n_top = (size_t)s->gen.n_top, n = (size_t)cap;
    float *logprobs = realloc(s->logprobs, n * sizeof *logprobs);
    if (logprobs)
        s->logprobs = logprobs;
    di_logprob *top = n_top ? realloc(s->top, n * n_top * sizeof *top) : NULL;
    if (top)
        s->top = top;
    if (!logprobs || (n_top && !top))
        return di_fail(err, DI_ERR_MEMORY, "log-probabilities of %lld tokens with %zu alternatives", (long long)cap,
                       n_top);
    s->logprobs_cap = cap;
    s->gen.logprobs = s->logprobs;
    s->gen.top = s->top;
    return DI_OK;
}

static di_status make_logprobs(di_sequence *s, di_error *err) {
    di_status st = DI_OK;
    if (s->sampling.n_logprobs >= 0) {
        s->gen.n_top = s->sampling.n_logprobs;
        int64_t cap = DI_MIN(s->sampling.max_tokens, LOGPROBS_RESERVE / (s->gen.n_top + 1) + 1);
        st = grow_logprobs(s, cap, err);
    }
    if (st || s->sampling.n_prompt_logprobs < 0)
        return st;
    size_t n = (size_t)s->gen.n_prompt, n_top = (size_t)s->sampling.n_prompt_logprobs, bytes;
    if (!di_size_mul3(&bytes, n, n_top, sizeof *s->prompt_top) ||
        !(s->prompt_logprobs = malloc(n * sizeof *s->prompt_logprobs)) || (n_top && !(s->prompt_top = malloc(bytes))))
        return di_fail(err, DI_ERR_MEMORY, "log-probabilities of %zu prompt tokens with %zu alternatives", n, n_top);
    s->prompt_logprobs[0] = NAN; /* nothing comes before the first token */
    for (size_t i = 0; i < n_top; i++)
        s->prompt_top[i] = (di_logprob){.token = -1, .logprob = DI_LOGPROB_FLOOR};
    s->gen.n_prompt_top = s->sampling.n_prompt_logprobs;
    s->gen.prompt_logprobs = s->prompt_logprobs;
    s->gen.prompt_top = s->prompt_top;
    return DI_OK;
}

static di_status on_parsed(void *user, const di_parser_event *parsed, di_error *err) {
    di_sequence *s = user;
    if (!s->callback || parsed->kind == DI_PARSER_DONE)
        return DI_OK;
    return s->callback(s->user, &s->gen, &(di_core_event){.kind = DI_CORE_OUTPUT, .parsed = parsed}, err);
}

static di_status make_text(di_sequence *s, const di_submission *sub, di_error *err) {
    if (!s->core->tok)
        return DI_OK;
    di_detokenizer_init(&s->detok, s->core->tok);
    size_t expected = (size_t)s->sampling.max_tokens * 8;
    di_status st = reserve_text(&s->text, DI_MIN(expected, TEXT_RESERVE_BYTES), err);
    if (st)
        return st;
    if (!sub->parse)
        return di_stop_matcher_init(&s->stop, s->sampling.stop, s->sampling.stop_len, s->sampling.n_stop, err);
    di_parser_options parse = *sub->parse;
    parse.n_stop = s->sampling.n_stop;
    parse.stop = s->sampling.stop;
    parse.stop_len = s->sampling.stop_len;
    return di_parser_create(&s->parser, &parse, on_parsed, s, err);
}

static di_status make_tokens(di_sequence *s, const di_submission *sub, di_error *err) {
    di_core *c = s->core;
    int64_t n_prompt = (int64_t)sub->n_ids;
    int64_t max_tokens = s->sampling.max_tokens > 0 ? s->sampling.max_tokens : MAX_TOKENS_DEFAULT;
    max_tokens = DI_MIN(max_tokens, c->options.context_max - n_prompt);
    s->sampling.max_tokens = max_tokens;
    int64_t n_tokens = n_prompt + max_tokens;
    /* The last token is never run; whoever is alone must be able to end. */
    int64_t n_blocks = di_kv_blocks_for(n_tokens - 1);
    if (n_blocks > c->kv.blocks.n_units)
        return di_fail(
            err, DI_ERR_REQUEST,
            "prompt of %lld tokens and up to %lld more need %lld KV blocks, there are %d: lower max_tokens or "
            "raise --kv-memory",
            (long long)n_prompt, (long long)max_tokens, (long long)n_blocks, c->kv.blocks.n_units);
    s->blocks_max = (int32_t)n_blocks;
    s->tokens = malloc((size_t)(n_tokens + di_core_ahead_max(c) + 1) * sizeof *s->tokens);
    s->blocks = malloc((size_t)n_blocks * sizeof *s->blocks);
    if (!s->tokens || !s->blocks)
        return di_fail(err, DI_ERR_MEMORY, "sequence of %lld tokens", (long long)n_tokens);
    memcpy(s->tokens, sub->ids, sub->n_ids * sizeof *s->tokens);
    s->n_tokens = n_prompt;
    s->gen.n_prompt = s->n_prompt = n_prompt;
    s->gen.prompt = s->tokens;
    s->gen.tokens = s->tokens + n_prompt;
    /* Fixed here from the prompt's own length (model.md 3.9), so that running it again gives the same. */
    s->rect = c->keep > 0 && n_prompt > c->keep ? n_prompt - c->keep : 0;
    return DI_OK;
}

static di_status make_masks(di_sequence *s, const di_submission *sub, di_error *err) {
    di_constraint constraint;
    if (!sub->constraint)
        return DI_OK;
    di_status st = sub->constraint->open(sub->constraint->self, &constraint, err);
    if (st)
        return st;
    return di_masks_create(&s->masks, &constraint, s->core->model.n_vocab, 1 + di_core_ahead_max(s->core), s->n_prompt,
                           err);
}

static void set_seed(di_sequence *s, int32_t index) {
    s->gen.index = index;
    s->gen.has_seed = s->sampling.has_seed;
    s->gen.seed = s->seed = s->sampling.seed + (uint64_t)index;
}

static di_status fill(di_sequence *s, const di_submission *sub, int32_t index, di_error *err) {
    di_core *c = s->core;
    di_status st;
    set_seed(s, index);
    if ((st = make_tokens(s, sub, err)))
        return st;
    if ((st = make_masks(s, sub, err)))
        return st;
    if ((st = copy_lists(s, sub, err)))
        return st;
    if ((st = make_text(s, sub, err)))
        return st;
    if ((st = make_logprobs(s, err)))
        return st;
    s->n_forced_first = sub->n_forced_first;
    bool is_given = s->n_forced_first > 0;
    s->may_draft = c->options.draft_tokens > 0 && !is_given;
    s->ahead_max = s->may_draft ? c->options.draft_tokens : s->masks && !is_given ? DI_SURE_MAX : 0;
    s->n_units = sub->n_units;
    s->has_history = di_sampling_needs_history(&s->sampling);
    if (s->has_history && di_sampling_needs_prompt_history(&s->sampling) &&
        (st = di_history_add_prompt(&s->history, sub->ids, sub->n_ids, err)))
        return st;
    if ((st = di_kv_chain_init(&s->chain, c->prefix, c->options.identity, sub->cache_salt, sub->cache_salt_len,
                               c->prefix ? s->blocks_max : 0, err)))
        return st;
    return di_sched_attach(&c->queue, &s->item, sub->caller, sub->caller_len, err);
}

di_status di_sequence_create(di_sequence **out, di_core *core, const di_submission *sub, int32_t index, di_error *err) {
    di_status st = check(core, sub, err);
    if (st)
        return st;
    di_sequence *s = calloc(1, sizeof *s);
    if (!s)
        return di_fail(err, DI_ERR_MEMORY, "sequence");
    s->core = core;
    s->callback = sub->callback;
    s->user = sub->user;
    s->sampling = sub->sampling;
    s->coming_row = -1;
    s->slot = s->tap_slot = s->ln_slot = s->coming_row = -1;
    s->item.priority = sub->priority;
    s->item.is_ready = true;
    s->deadline_ns = sub->deadline_ns > 0 ? sub->deadline_ns : INT64_MAX;
    s->gen.stop_hit = s->gen.stop_token = -1;
    s->gen.text = "";
    s->gen.submit_ns = di_clock_ns();
    if ((st = fill(s, sub, index, err))) {
        di_sequence_destroy(s);
    } else {
        *out = s;
    }
    return st;
}

void di_sequence_destroy(di_sequence *s) {
    if (!s)
        return;
    di_sched_detach(&s->core->queue, &s->item);
    di_kv_chain_deinit(&s->chain);
    di_history_deinit(&s->history);
    di_parser_destroy(s->parser);
    di_stop_matcher_deinit(&s->stop);
    di_strbuf_deinit(&s->text);
    di_masks_destroy(s->masks);
    if (!s->core->draft_ln)
        free(s->draft_ln);
    free(s->memory);
    free(s->logprobs);
    free(s->top);
    free(s->prompt_logprobs);
    free(s->prompt_top);
    free(s->tokens);
    free(s->blocks);
    free(s);
}

/* ---- text ---------------------------------------------------------------------------------------------------------
 */

static bool is_finished(const di_sequence *s) {
    return s->gen.finish != DI_FINISH_NONE;
}

static void finish(di_sequence *s, di_finish reason) {
    s->gen.finish = s->parser ? di_parser_finish_reason(s->parser, reason) : reason;
}

static void fail(di_sequence *s, di_status st, const di_error *err) {
    s->gen.finish = DI_FINISH_ERROR;
    s->gen.error = *err;
    s->gen.error.code = st;
}

static void show_text(di_sequence *s) {
    s->gen.text = di_strbuf_str(&s->text);
    s->gen.text_len = s->text.len;
}

static di_status send_text(di_sequence *s, size_t from, di_error *err) {
    show_text(s);
    if (!s->callback || s->text.len == from)
        return DI_OK;
    di_core_event event = {.kind = DI_CORE_TEXT, .text = s->gen.text + from, .len = s->text.len - from};
    return s->callback(s->user, &s->gen, &event, err);
}

/* Plain text: what the matcher releases. A stop string ends the request. */
static di_status take_plain(di_sequence *s, const char *text, size_t len, di_error *err) {
    size_t before = s->text.len;
    bool is_hit = di_stop_matcher_push(&s->stop, text, len, &s->text);
    di_status st = di_strbuf_status(&s->text, err);
    if (!st)
        st = send_text(s, before, err);
    if (!st && is_hit) {
        s->gen.stop_hit = di_stop_matcher_hit(&s->stop);
        finish(s, DI_FINISH_STOP);
    }
    return st;
}

/* Chat: the parser decides. With stop strings it is fed byte by byte, so that the place where one ends is known: the
 * text before it is the output. */
static di_status take_parsed(di_sequence *s, const char *text, size_t len, di_error *err) {
    size_t step = s->sampling.n_stop ? 1 : len;
    di_status st = DI_OK;
    for (size_t i = 0; i < len && !st && !is_finished(s); i += step) {
        di_strbuf_append(&s->text, text + i, step);
        if ((st = di_strbuf_status(&s->text, err)))
            break;
        show_text(s);
        if ((st = di_parser_push(s->parser, text + i, step, err)))
            break;
        int64_t hit = di_parser_stop_hit(s->parser);
        if (hit < 0)
            continue;
        s->gen.stop_hit = hit;
        size_t stop_len = s->sampling.stop_len[hit];
        di_strbuf_truncate(&s->text, s->text.len - DI_MIN(stop_len, s->text.len));
        show_text(s);
        finish(s, DI_FINISH_STOP);
    }
    return st;
}

static di_status take_text(di_sequence *s, di_error *err) {
    di_status st = di_strbuf_status(&s->core->piece, err);
    if (st || s->core->piece.len == 0)
        return st;
    return s->parser ? take_parsed(s, s->core->piece.data, s->core->piece.len, err)
                     : take_plain(s, s->core->piece.data, s->core->piece.len, err);
}

/* The output is over: everything that waits comes out. A stop string can still appear in it. */
static di_status end_text(di_sequence *s, di_error *err) {
    if (!s->core->tok)
        return DI_OK;
    di_strbuf_reset(&s->core->piece);
    di_detokenizer_flush(&s->detok, &s->core->piece);
    di_status st = take_text(s, err);
    if (st || is_finished(s))
        return st;
    if (s->parser)
        return di_parser_finish(s->parser, err);
    size_t before = s->text.len;
    di_stop_matcher_finish(&s->stop, &s->text);
    st = di_strbuf_status(&s->text, err);
    return st ? st : send_text(s, before, err);
}

/* Ends the text and then the request, unless the rest of the text ends it in its own way. */
static void end(di_sequence *s, di_finish reason) {
    di_error err = {0};
    di_status st = end_text(s, &err);
    if (st) {
        fail(s, st, &err);
    } else if (!is_finished(s)) {
        finish(s, reason);
    }
}

/* ---- advancing ----------------------------------------------------------------------------------------------------
 */

int32_t di_sequence_forced(const di_sequence *s) {
    size_t n = (size_t)s->gen.n_tokens;
    return n < s->n_forced_first ? s->forced_first[n] : -1;
}

static di_status keep_logprobs(di_sequence *s, float logprob, const di_logprob *top, di_error *err) {
    int64_t n = s->gen.n_tokens, n_top = s->gen.n_top;
    if (n == s->logprobs_cap) {
        di_status st = grow_logprobs(s, DI_MIN(n * 2, s->sampling.max_tokens), err);
        if (st)
            return st;
    }
    s->logprobs[n] = logprob;
    if (n_top)
        memcpy(s->top + n * n_top, top, (size_t)n_top * sizeof *top);
    return DI_OK;
}

void di_sequence_prompt_logprobs(di_sequence *s, int64_t position, float logprob, const di_logprob *top) {
    int64_t n_top = s->gen.n_prompt_top;
    s->prompt_logprobs[position] = logprob;
    if (n_top)
        memcpy(s->prompt_top + position * n_top, top, (size_t)n_top * sizeof *top);
}

void di_sequence_copy_prompt_logprobs(di_sequence *s, const di_sequence *leader) {
    size_t n = (size_t)s->gen.n_prompt, n_top = (size_t)s->gen.n_prompt_top;
    if (!s->prompt_logprobs)
        return;
    memcpy(s->prompt_logprobs, leader->prompt_logprobs, n * sizeof *s->prompt_logprobs);
    if (n_top)
        memcpy(s->prompt_top, leader->prompt_top, n * n_top * sizeof *s->prompt_top);
}

static bool is_stop_token(const di_sequence *s, int32_t token) {
    for (size_t i = 0; i < s->sampling.n_stop_tokens; i++) {
        if (s->sampling.stop_tokens[i] == token)
            return true;
    }
    return false;
}

static di_status advance(di_sequence *s, int32_t token, float logprob, const di_logprob *top, di_error *err) {
    di_status st;
    if (s->sampling.n_logprobs >= 0 && (st = keep_logprobs(s, logprob, top, err)))
        return st;
    if (s->has_history && (st = di_history_add_output(&s->history, &token, 1, err)))
        return st;
    s->n_tokens++; /* the runner has written it */
    s->gen.n_tokens++;
    if (s->parser && di_parser_is_reasoning(s->parser))
        s->gen.reasoning_tokens++;
    if (s->callback && (st = s->callback(s->user, &s->gen, &(di_core_event){.kind = DI_CORE_TOKEN}, err)))
        return st;

    if (token == s->core->model.eos_id && di_sequence_ends_at_eos(s)) {
        end(s, DI_FINISH_STOP);
        return DI_OK;
    }
    if (s->sampling.n_stop_tokens && is_stop_token(s, token)) {
        s->gen.stop_token = token;
        end(s, DI_FINISH_STOP);
        return DI_OK;
    }
    if (s->core->tok) {
        di_strbuf_reset(&s->core->piece);
        di_detokenizer_push(&s->detok, token, &s->core->piece);
        if ((st = take_text(s, err)))
            return st;
    }
    if (!is_finished(s) && s->gen.n_tokens >= s->sampling.max_tokens)
        end(s, DI_FINISH_LENGTH);
    return DI_OK;
}

void di_sequence_advance(di_sequence *s, int32_t token, float logprob, const di_logprob *top) {
    di_error err; /* not cleared: it is a kilobyte, for every token */
    err.code = DI_OK;
    err.message[0] = '\0';
    di_status st = advance(s, token, logprob, top, &err);
    if (st)
        fail(s, st, &err);
}

void di_sequence_abort(di_sequence *s) {
    if (!is_finished(s))
        end(s, DI_FINISH_ABORT);
}

void di_sequence_fail(di_sequence *s, const di_error *error) {
    if (!is_finished(s))
        fail(s, error->code, error);
}

void di_sequence_done(di_sequence *s) {
    if (s->callback)
        s->callback(s->user, &s->gen, &(di_core_event){.kind = DI_CORE_DONE}, NULL);
}
