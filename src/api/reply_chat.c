/* Chat completions and completions: chunks, the last chunk with usage, `[DONE]`, the response object with its choices.
 *
 * Source of the forms: the chat completions API as the hosted service answers it (chat.md 10), and OpenAI's older
 * completions API; a chunk says `usage` only when the request asked for it, but the last one always does. Completions
 * have text where chat has a message, no opening chunk, and lists where chat has objects for log-probabilities. */
#include "reply_internal.h"

/* ---- what both have ---- */

static di_json *details_json(const di_reply_usage *u) {
    return di_reply_object("reasoning_tokens", di_json_new_int(u->reasoning_tokens), "accepted_prediction_tokens",
                           di_json_new_int(u->accepted_tokens), "rejected_prediction_tokens",
                           di_json_new_int(u->rejected_tokens), NULL);
}

static di_json *usage_json(const di_reply_head *head, const di_reply_usage *u) {
    int64_t n = head->is_echo_only ? 0 : u->completion_tokens;
    di_json *usage =
        di_reply_object("prompt_tokens", di_json_new_int(u->prompt_tokens), "completion_tokens", di_json_new_int(n),
                        "total_tokens", di_json_new_int(u->prompt_tokens + n), "prompt_tokens_details",
                        di_reply_object("cached_tokens", di_json_new_int(u->cached_tokens), NULL), NULL);
    bool is_good = usage != NULL;
    if (is_good && head->has_details) {
        is_good = di_json_set(usage, "completion_tokens_details", details_json(u));
    }
    is_good = is_good && di_json_set(usage, "prompt_cache_hit_tokens", di_json_new_int(u->cached_tokens)) &&
              di_json_set(usage, "prompt_cache_miss_tokens", di_json_new_int(u->prompt_tokens - u->cached_tokens));
    if (!is_good) {
        di_json_free(usage);
        return NULL;
    }
    return usage;
}

static di_json *finish_json(const di_reply_stream *s, bool is_last) {
    return is_last ? di_reply_string(di_finish_name(s->finish)) : di_json_new_null();
}

/* A chunk of a choice, which it takes over. */
static di_json *chunk_json(const di_reply_stream *s, di_json *choice, bool is_last) {
    const di_reply_head *h = &s->head;
    di_json *chunk =
        di_reply_object("id", di_reply_string(h->id), "object", di_reply_string(s->ops->chunk_object), "created",
                        di_json_new_int(h->created_s), "model", di_reply_string(h->model), "system_fingerprint",
                        di_json_new_null(), "choices", di_reply_array_of(choice), NULL);
    bool says_usage = (is_last && s->has_usage) || (h->has_chunk_usage && h->has_running_usage);
    if (chunk != NULL && (says_usage || h->has_chunk_usage) &&
        !di_json_set(chunk, "usage", says_usage ? usage_json(h, &s->usage) : di_json_new_null())) {
        di_json_free(chunk);
        return NULL;
    }
    return chunk;
}

static di_json *take_logprobs(di_reply_stream *s) {
    di_json *logprobs = s->logprobs_new;
    s->logprobs_new = NULL;
    return logprobs;
}

static di_status send_end(di_reply_stream *s, di_error *err) {
    return s->sink == NULL ? DI_OK : s->sink(s->user, NULL, NULL, err);
}

static di_status fail_chunks(di_reply_stream *s, di_status status, const char *message, di_error *err) {
    const char *type = di_status_error_type(status);
    di_json *error = di_reply_object("message", di_reply_string(message), "type", di_reply_string(type), "param",
                                     di_json_new_null(), "code", di_reply_string(type), NULL);
    di_status st = di_reply_send(s, NULL, di_reply_object("error", error, NULL), err);
    return st == DI_OK ? send_end(s, err) : st;
}

di_json *di_reply_choices_response(const di_reply_stream *const *choices, size_t n_choices,
                                   const di_reply_usage *usage) {
    DI_ASSERT(n_choices > 0);
    const di_reply_head *h = &choices[0]->head;
    di_json *list = di_json_new_array();
    for (size_t i = 0; i < n_choices; i++) {
        DI_ASSERT(choices[i]->ops->choice != NULL);
        if (list != NULL && !di_json_append(list, choices[i]->ops->choice(choices[i]))) {
            di_json_free(list);
            list = NULL;
        }
    }
    return di_reply_object("id", di_reply_string(h->id), "object", di_reply_string(choices[0]->ops->object), "created",
                           di_json_new_int(h->created_s), "model", di_reply_string(h->model), "choices", list, "usage",
                           usage_json(h, usage), "system_fingerprint", di_json_new_null(), NULL);
}

static di_json *one_choice_response(const di_reply_stream *s) {
    return di_reply_choices_response(&s, 1, &s->usage);
}

/* ---- chat completions ---- */

/* Takes `content` (may be NULL) over. */
static di_json *chat_logprobs(di_json *content) {
    return content == NULL ? di_json_new_null()
                           : di_reply_object("content", content, "refusal", di_json_new_null(), NULL);
}

/* A chunk of a delta; it and the log-probabilities (NULL: none) are taken over. */
static di_json *chat_chunk(const di_reply_stream *s, di_json *delta, di_json *logprobs, bool is_last) {
    di_json *choice = di_reply_object("index", di_json_new_int(s->head.choice_id), "delta", delta, "logprobs",
                                      chat_logprobs(logprobs), "finish_reason", finish_json(s, is_last), NULL);
    return chunk_json(s, is_last ? di_reply_with_seed(s, choice) : choice, is_last);
}

/* A delta of content or reasoning, taken over; with thinking on every text delta has both keys. */
static di_json *chat_text_delta(const di_reply_stream *s, di_json *content, di_json *reasoning) {
    if (s->head.has_reasoning) {
        return di_reply_object("content", content != NULL ? content : di_json_new_null(), "reasoning_content",
                               reasoning != NULL ? reasoning : di_json_new_null(), NULL);
    }
    di_json_free(reasoning);
    return di_reply_object("content", content, NULL);
}

/* A delta with one entry about the last call, taken over. */
static di_json *chat_call_delta(di_json *entry) {
    return di_reply_object("tool_calls", di_reply_array_of(entry), NULL);
}

static di_json *chat_piece(const di_reply_stream *s, di_reply_part part, const di_reply_piece *piece,
                           const char **event) {
    di_json *delta;
    *event = NULL;
    if (part == DI_REPLY_CALL) {
        delta = chat_call_delta(di_reply_object("index", di_json_new_int((int64_t)s->reply.n_calls - 1), "function",
                                                di_reply_object("arguments", piece->text, NULL), NULL));
    } else if (part == DI_REPLY_REASONING) {
        delta = chat_text_delta(s, NULL, piece->text);
    } else {
        delta = chat_text_delta(s, piece->text, NULL);
    }
    return chat_chunk(s, delta, piece->logprobs, false);
}

static di_status chat_start(di_reply_stream *s, di_error *err) {
    di_json *delta = s->head.has_reasoning
                         ? di_reply_object("role", di_reply_string("assistant"), "content", di_json_new_null(),
                                           "reasoning_content", di_reply_string(""), NULL)
                         : di_reply_object("role", di_reply_string("assistant"), "content", di_reply_string(""), NULL);
    return di_reply_send(s, NULL, chat_chunk(s, delta, NULL, false), err);
}

static di_status chat_reasoning(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    return di_reply_send_piece(s, DI_REPLY_REASONING, text, len, err);
}

static di_status chat_content(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    return di_reply_send_piece(s, DI_REPLY_TEXT, text, len, err);
}

static di_status chat_call_begin(di_reply_stream *s, di_error *err) {
    const di_reply_call *call = di_reply_last_call(s);
    di_json *entry = di_reply_object(
        "index", di_json_new_int((int64_t)s->reply.n_calls - 1), "id", di_reply_string(call->id), "type",
        di_reply_string("function"), "function",
        di_reply_object("name", di_reply_strbuf(&call->name), "arguments", di_reply_string(""), NULL), NULL);
    return di_reply_send(s, NULL, chat_chunk(s, chat_call_delta(entry), take_logprobs(s), false), err);
}

static di_status chat_call_args(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    return di_reply_send_piece(s, DI_REPLY_CALL, text, len, err);
}

static di_status chat_call_end(di_reply_stream *s, bool is_cut, di_error *err) {
    (void)s;
    (void)is_cut;
    (void)err;
    return DI_OK;
}

static di_status chat_finish(di_reply_stream *s, di_error *err) {
    di_json *delta = chat_text_delta(s, di_reply_string(""), NULL);
    di_status st = di_reply_send(s, NULL, chat_chunk(s, delta, take_logprobs(s), true), err);
    return st == DI_OK && s->has_usage ? send_end(s, err) : st;
}

static di_status chat_token(di_reply_stream *s, const di_reply_token *token, di_error *err) {
    /* One of the two lists: what is streamed is not needed again. */
    di_json **list = s->sink == NULL ? &s->logprobs : &s->logprobs_new;
    if (*list == NULL) {
        *list = di_json_new_array();
    }
    return *list != NULL && di_json_append(*list, di_reply_token_json(token))
               ? DI_OK
               : di_fail(err, DI_ERR_MEMORY, "reply: no memory for log-probabilities");
}

static di_json *chat_choice(const di_reply_stream *s) {
    di_json *choice =
        di_reply_object("index", di_json_new_int(s->head.choice_id), "message", di_reply_message(&s->reply), "logprobs",
                        chat_logprobs(di_json_ref(s->logprobs)), "finish_reason", finish_json(s, true), NULL);
    return di_reply_with_seed(s, choice);
}

const di_reply_ops di_reply_chat_ops = {
    .start = chat_start,
    .reasoning = chat_reasoning,
    .content = chat_content,
    .call_begin = chat_call_begin,
    .call_args = chat_call_args,
    .call_end = chat_call_end,
    .finish = chat_finish,
    .fail = fail_chunks,
    .response = one_choice_response,
    .piece = chat_piece,
    .token = chat_token,
    .choice = chat_choice,
    .object = "chat.completion",
    .chunk_object = "chat.completion.chunk",
};

/* ---- completions ---- */

/* Text and log-probabilities (NULL: none) are taken over. */
static di_json *text_choice(const di_reply_stream *s, di_json *text, di_json *logprobs, bool is_last) {
    di_json *choice = di_reply_object("text", text, "index", di_json_new_int(s->head.choice_id), "logprobs",
                                      logprobs != NULL ? logprobs : di_json_new_null(), "finish_reason",
                                      finish_json(s, is_last), NULL);
    return is_last ? di_reply_with_seed(s, choice) : choice;
}

static di_json *text_piece(const di_reply_stream *s, di_reply_part part, const di_reply_piece *piece,
                           const char **event) {
    (void)part; /* there is one text */
    *event = NULL;
    return chunk_json(s, text_choice(s, piece->text, piece->logprobs, false), false);
}

static di_status text_start(di_reply_stream *s, di_error *err) {
    (void)s;
    (void)err;
    return DI_OK;
}

static di_status text_content(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    return di_reply_send_piece(s, DI_REPLY_TEXT, text, len, err);
}

/* A completion is its text; nothing of it is parsed. */
static di_status text_reasoning(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    (void)text;
    (void)len;
    (void)s;
    return di_fail(err, DI_ERR_INTERNAL, "reply: a completion with parsed parts");
}

static di_status text_call(di_reply_stream *s, di_error *err) {
    return text_reasoning(s, NULL, 0, err);
}

static di_status text_call_end(di_reply_stream *s, bool is_cut, di_error *err) {
    (void)is_cut;
    return text_call(s, err);
}

static di_status text_finish(di_reply_stream *s, di_error *err) {
    if (s->finish == DI_FINISH_TOOL_CALLS) {
        s->finish = DI_FINISH_STOP;
    }
    di_json *choice = text_choice(s, di_reply_string(""), take_logprobs(s), true);
    di_status st = di_reply_send(s, NULL, chunk_json(s, choice, true), err);
    return st == DI_OK && s->has_usage ? send_end(s, err) : st;
}

/* Counts the characters that have come out whole. */
static di_status count_released(di_reply_stream *s, di_error *err) {
    for (size_t i = 0; i < s->released.len; i++) {
        s->n_chars += ((unsigned char)s->released.data[i] & 0xC0) != 0x80;
    }
    di_status st = di_strbuf_status(&s->released, err);
    di_strbuf_reset(&s->released);
    return st;
}

/* Appends a token to the lists. A token within a character stands where the character does. has_text: the token is in
 * the text, so that those behind it stand further on. */
static di_status add_token(di_reply_stream *s, const di_reply_token *token, bool has_text, di_error *err) {
    if (!s->has_places) {
        di_detokenizer_init(&s->places, token->tok);
        s->has_places = true;
    }
    if (!di_reply_token_lists(s->sink == NULL ? &s->logprobs : &s->logprobs_new, token, s->n_chars)) {
        return di_fail(err, DI_ERR_MEMORY, "reply: no memory for log-probabilities");
    }
    if (has_text) {
        di_detokenizer_push(&s->places, token->token, &s->released);
    }
    return count_released(s, err);
}

static di_status text_token(di_reply_stream *s, const di_reply_token *token, di_error *err) {
    return add_token(s, token, true, err);
}

/* The prompt's tokens with their log-probabilities; the first has_bos of them are no part of the text. */
static di_status add_prompt(di_reply_stream *s, const di_tokenizer *tok, const int32_t *ids, size_t n_ids, bool has_bos,
                            const float *logprobs, const di_logprob *top, int32_t n_top, di_error *err) {
    for (size_t i = 0; i < n_ids; i++) {
        const di_reply_token token = {.tok = tok,
                                      .token = ids[i],
                                      .logprob = logprobs[i],
                                      .top = top != NULL ? top + i * (size_t)n_top : NULL,
                                      .n_top = n_top};
        di_status st = add_token(s, &token, i > 0 || !has_bos, err);
        if (st != DI_OK) {
            return st;
        }
    }
    if (!s->has_places) {
        return DI_OK;
    }
    /* The answer's text begins anew, whatever the prompt left unfinished. */
    di_detokenizer_flush(&s->places, &s->released);
    return count_released(s, err);
}

di_status di_reply_stream_echo(di_reply_stream *s, const di_tokenizer *tok, const int32_t *ids, size_t n_ids,
                               const float *logprobs, const di_logprob *top, int32_t n_top, di_error *err) {
    DI_ASSERT(s->ops == &di_reply_completions_ops && s->reply.content.len == 0);
    bool has_bos = n_ids > 0 && ids[0] == di_tokenizer_find(tok, di_chat_special_text(DI_CHAT_BOS));
    di_strbuf text = {0};
    di_status st = di_tokenizer_decode(tok, ids + has_bos, n_ids - has_bos, false, &text, err);
    if (st == DI_OK && logprobs != NULL) {
        st = add_prompt(s, tok, ids, n_ids, has_bos, logprobs, top, n_top, err);
    }
    if (st == DI_OK && text.len > 0) {
        const di_parser_event event = {.kind = DI_PARSER_CONTENT, .call_id = -1, .text = text.data, .len = text.len};
        if ((st = di_reply_push(&s->reply, &event, err)) == DI_OK) {
            st = text_content(s, text.data, text.len, err);
        }
    }
    di_strbuf_deinit(&text);
    return st;
}

static di_json *text_response_choice(const di_reply_stream *s) {
    return text_choice(s, di_reply_strbuf(&s->reply.content), di_json_ref(s->logprobs), true);
}

const di_reply_ops di_reply_completions_ops = {
    .start = text_start,
    .reasoning = text_reasoning,
    .content = text_content,
    .call_begin = text_call,
    .call_args = text_reasoning,
    .call_end = text_call_end,
    .finish = text_finish,
    .fail = fail_chunks,
    .response = one_choice_response,
    .piece = text_piece,
    .token = text_token,
    .choice = text_response_choice,
    .object = "text_completion",
    .chunk_object = "text_completion",
};
