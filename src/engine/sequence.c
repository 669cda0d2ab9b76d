/* One request's life: made from a submission, given a token at a time, ended by a stop rule or from outside.
 *
 * A token goes through three filters: the detokenizer holds back incomplete characters, then either the stop matcher
 * (plain text) or the output parser (chat) holds back what may begin a stop string or a marker. Only text that is
 * certain reaches gen.text and the events. All memory is taken at submit, for the longest output that the request may
 * have, so that a step allocates nothing; the exceptions grow by doubling: very long texts, log-probabilities of very
 * long outputs, and what the parser holds back. */
#include "engine_internal.h"

#define MAX_TOKENS_DEFAULT 8192
#define TEXT_RESERVE_BYTES (64 << 10)
#define LOGPROBS_RESERVE 16384 /* entries */

/* ---- making -------------------------------------------------------------------------------------------------------
 */

static di_status check_prompt(const di_core *e, const di_submission *sub, di_error *err) {
    if (sub->n_ids == 0)
        return di_fail(err, DI_ERR_REQUEST, "the prompt is empty: expected at least one token");
    if (sub->n_ids >= (uint64_t)e->options.context_max)
        return di_fail(
            err, DI_ERR_REQUEST,
            "the prompt has %zu tokens, the context holds %lld with the answer: shorten it or raise --max-model-len",
            sub->n_ids, (long long)e->options.context_max);
    for (size_t i = 0; i < sub->n_ids; i++) {
        if (sub->ids[i] < 0 || sub->ids[i] >= e->n_vocab)
            return di_fail(err, DI_ERR_REQUEST, "prompt token %zu: id %d is outside the vocabulary, expected 0 to %d",
                           i, sub->ids[i], e->n_vocab - 1);
    }
    for (size_t i = 0; i < sub->n_force; i++) {
        if (sub->force_ids[i] < 0 || sub->force_ids[i] >= e->n_vocab)
            return di_fail(err, DI_ERR_REQUEST, "forced token %zu: id %d is outside the vocabulary, expected 0 to %d",
                           i, sub->force_ids[i], e->n_vocab - 1);
    }
    if (!e->tok && (sub->sampling.n_stop > 0 || sub->parse))
        return di_fail(err, DI_ERR_REQUEST, "stop strings and messages need a tokenizer, and the model has none");
    return DI_OK;
}

/* Stop strings as one allocation: pointers, lengths, bytes. */
static di_status copy_stops(di_sequence *s, const di_sampling *from, di_error *err) {
    size_t n = from->n_stop, bytes = 0;
    s->sampling.stop = NULL;
    s->sampling.stop_len = NULL;
    if (n == 0)
        return DI_OK;
    bool fits = di_size_mul(&bytes, n, sizeof(char *) + sizeof(size_t));
    for (size_t i = 0; i < n && fits; i++)
        fits = di_size_add(&bytes, bytes, from->stop_len[i]);
    if (!fits || !(s->stop_memory = malloc(bytes)))
        return di_fail(err, DI_ERR_MEMORY, "%zu stop strings", n);
    const char **stop = s->stop_memory;
    size_t *len = (size_t *)(stop + n);
    char *data = (char *)(len + n);
    for (size_t i = 0; i < n; i++) {
        stop[i] = data;
        len[i] = from->stop_len[i];
        if (len[i])
            memcpy(data, from->stop[i], len[i]);
        data += len[i];
    }
    s->sampling.stop = stop;
    s->sampling.stop_len = len;
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

static di_status on_parsed(void *user, const di_parser_event *parsed, di_error *err) {
    di_sequence *s = user;
    if (!s->callback || parsed->kind == DI_PARSER_DONE)
        return DI_OK;
    return s->callback(s->user, &s->gen, &(di_core_event){.kind = DI_CORE_OUTPUT, .parsed = parsed}, err);
}

static di_status make_text(di_sequence *s, const di_submission *sub, di_error *err) {
    if (!s->engine->tok)
        return DI_OK;
    di_detokenizer_init(&s->detok, s->engine->tok);
    size_t expected = (size_t)s->sampling.max_tokens * 8;
    di_status st = reserve_text(&s->text, DI_MIN(expected, TEXT_RESERVE_BYTES), err);
    if (!st)
        st = reserve_text(&s->piece, 1024, err);
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

static di_status fill(di_sequence *s, const di_submission *sub, di_error *err) {
    di_core *e = s->engine;
    int64_t n_prompt = (int64_t)sub->n_ids;
    int64_t max_tokens = s->sampling.max_tokens > 0 ? s->sampling.max_tokens : MAX_TOKENS_DEFAULT;
    max_tokens = DI_MIN(max_tokens, e->options.context_max - n_prompt);
    s->sampling.max_tokens = max_tokens;
    int64_t n_tokens = n_prompt + max_tokens, n_blocks = di_kv_blocks_for(n_tokens);
    if (n_blocks > e->kv.blocks.n_units)
        return di_fail(
            err, DI_ERR_REQUEST,
            "prompt of %lld tokens and up to %lld more need %lld KV blocks, there are %d: lower max_tokens or "
            "raise --kv-memory",
            (long long)n_prompt, (long long)max_tokens, (long long)n_blocks, e->kv.blocks.n_units);
    s->blocks_max = (int32_t)n_blocks;
    s->tokens = malloc((size_t)n_tokens * sizeof *s->tokens);
    s->blocks = malloc((size_t)n_blocks * sizeof *s->blocks);
    if (!s->tokens || !s->blocks)
        return di_fail(err, DI_ERR_MEMORY, "sequence of %lld tokens", (long long)n_tokens);
    memcpy(s->tokens, sub->ids, sub->n_ids * sizeof *s->tokens);
    s->n_tokens = n_prompt;
    s->gen.n_prompt = n_prompt;
    s->gen.tokens = s->tokens + n_prompt;
    /* Fixed here from the prompt's own length (model.md 3.9). */
    s->rect = e->keep > 0 && n_prompt > e->keep ? n_prompt - e->keep : 0;

    if (!s->sampling.has_seed && !di_sampling_is_greedy(&s->sampling)) {
        s->sampling.seed = di_random_u64() >> 11; /* 53 bits: any JSON reader can hand them back */
        s->sampling.has_seed = true;
    }
    s->gen.has_seed = s->sampling.has_seed;
    s->gen.seed = s->sampling.seed;

    di_status st = copy_stops(s, &sub->sampling, err);
    if (!st)
        st = make_text(s, sub, err);
    if (st)
        return st;
    if (s->sampling.n_logprobs >= 0) {
        s->gen.n_top = s->sampling.n_logprobs;
        int64_t cap = DI_MIN(max_tokens, LOGPROBS_RESERVE / (s->gen.n_top + 1) + 1);
        if ((st = grow_logprobs(s, cap, err)))
            return st;
    }
    if (sub->n_force) {
        s->force_ids = malloc(sub->n_force * sizeof *s->force_ids);
        if (!s->force_ids)
            return di_fail(err, DI_ERR_MEMORY, "%zu forced tokens", sub->n_force);
        memcpy(s->force_ids, sub->force_ids, sub->n_force * sizeof *s->force_ids);
        s->n_force = sub->n_force;
        s->force_after = sub->force_after;
    }
    return DI_OK;
}

di_status di_sequence_create(di_sequence **out, di_core *engine, const di_submission *sub, di_error *err) {
    di_status st = di_sampling_check(&sub->sampling, err);
    if (st || (st = check_prompt(engine, sub, err)))
        return st;
    di_sequence *s = calloc(1, sizeof *s);
    if (!s)
        return di_fail(err, DI_ERR_MEMORY, "sequence");
    s->engine = engine;
    s->callback = sub->callback;
    s->user = sub->user;
    s->sampling = sub->sampling;
    s->slot = -1;
    s->gen.stop_hit = -1;
    s->gen.text = "";
    s->gen.submit_ns = di_clock_ns();
    if ((st = fill(s, sub, err))) {
        di_sequence_destroy(s);
    } else {
        *out = s;
    }
    return st;
}

void di_sequence_destroy(di_sequence *s) {
    if (!s)
        return;
    di_parser_destroy(s->parser);
    di_stop_matcher_deinit(&s->stop);
    di_strbuf_deinit(&s->piece);
    di_strbuf_deinit(&s->text);
    free(s->force_ids);
    free(s->stop_memory);
    free(s->logprobs);
    free(s->top);
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
    di_status st = di_strbuf_status(&s->piece, err);
    if (st || s->piece.len == 0)
        return st;
    return s->parser ? take_parsed(s, s->piece.data, s->piece.len, err)
                     : take_plain(s, s->piece.data, s->piece.len, err);
}

/* The output is over: everything that waits comes out. A stop string can still appear in it. */
static di_status end_text(di_sequence *s, di_error *err) {
    if (!s->engine->tok)
        return DI_OK;
    di_strbuf_reset(&s->piece);
    di_detokenizer_flush(&s->detok, &s->piece);
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

static di_status next_token(di_sequence *s, const float *logits, int32_t *token, di_error *err) {
    di_core *e = s->engine;
    int64_t n = s->gen.n_tokens;
    float *logprob = NULL;
    di_logprob *top = NULL;
    if (s->sampling.n_logprobs >= 0) {
        if (n == s->logprobs_cap) {
            di_status st = grow_logprobs(s, DI_MIN(n * 2, s->sampling.max_tokens), err);
            if (st)
                return st;
        }
        logprob = &s->logprobs[n];
        top = s->gen.n_top ? &s->top[n * s->gen.n_top] : NULL;
    }
    uint64_t position = (uint64_t)s->n_tokens;
    if (!s->is_forcing)
        return di_sample(&e->sampler, &s->sampling, logits, e->n_vocab, position, NULL, token, logprob, top, err);
    *token = s->force_ids[s->n_forced];
    return di_sample_forced(&e->sampler, &s->sampling, logits, e->n_vocab, position, NULL, *token, logprob, top, err);
}

static void track_forcing(di_sequence *s, int32_t token) {
    if (s->is_forcing) {
        s->is_forcing = ++s->n_forced < s->n_force;
    } else if (s->n_force > s->n_forced && token == s->force_after) {
        s->is_forcing = true;
    }
}

static di_status advance(di_sequence *s, const float *logits, di_error *err) {
    int32_t token;
    di_status st = next_token(s, logits, &token, err);
    if (st)
        return st;
    track_forcing(s, token);
    s->tokens[s->n_tokens++] = token;
    s->gen.n_tokens++;
    s->gen.last_ns = di_clock_ns();
    if (!s->gen.first_ns)
        s->gen.first_ns = s->gen.last_ns;
    if (s->parser && di_parser_is_reasoning(s->parser))
        s->gen.reasoning_tokens++;
    if (s->callback && (st = s->callback(s->user, &s->gen, &(di_core_event){.kind = DI_CORE_TOKEN}, err)))
        return st;

    if (token == s->engine->eos_id && !s->sampling.ignore_eos) {
        end(s, DI_FINISH_STOP);
        return DI_OK;
    }
    if (s->engine->tok) {
        di_strbuf_reset(&s->piece);
        di_detokenizer_push(&s->detok, token, &s->piece);
        if ((st = take_text(s, err)))
            return st;
    }
    if (!is_finished(s) && s->gen.n_tokens >= s->sampling.max_tokens)
        end(s, DI_FINISH_LENGTH);
    return DI_OK;
}

void di_sequence_advance(di_sequence *s, const float *logits) {
    di_error err = {0};
    di_status st = advance(s, logits, &err);
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
