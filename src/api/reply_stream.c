/* The life of a reply stream, and chat completions: chunks, the last chunk with usage, `[DONE]`, the response object.
 *
 * Source of the forms: the chat completions API as the hosted service answers it (chat.md 10); a chunk says `usage`
 * only when the request asked for it, but the last one always does. */
#include "reply_internal.h"

/* ---- the stream ---- */

di_status di_reply_send(di_reply_stream *s, const char *event, di_json *data, di_error *err) {
    if (data == NULL) {
        return di_fail(err, DI_ERR_MEMORY, "reply: no memory for an event");
    }
    di_status st = s->sink == NULL ? DI_OK : s->sink(s->user, event, data, err);
    di_json_free(data);
    return st;
}

const di_reply_call *di_reply_last_call(const di_reply_stream *s) {
    DI_ASSERT(s->reply.n_calls > 0);
    return &s->reply.calls[s->reply.n_calls - 1];
}

di_status di_reply_stream_create(di_reply_stream **out, di_reply_protocol protocol, const di_reply_head *head,
                                 di_reply_sink sink, void *user, di_error *err) {
    static const di_reply_ops *const all_ops[] = {
        [DI_REPLY_CHAT] = &di_reply_chat_ops,
        [DI_REPLY_RESPONSES] = &di_reply_responses_ops,
        [DI_REPLY_MESSAGES] = &di_reply_messages_ops,
    };
    di_reply_stream *s = calloc(1, sizeof *s);
    di_json *items = di_json_new_array();
    if (s == NULL || items == NULL) {
        free(s);
        di_json_free(items);
        return di_fail(err, DI_ERR_MEMORY, "reply: no memory for %zu bytes", sizeof *s);
    }
    s->ops = all_ops[protocol];
    s->head = *head;
    s->sink = sink;
    s->user = user;
    s->items = items;
    di_reply_init(&s->reply, head->has_reasoning, head->seed);
    *out = s;
    return DI_OK;
}

void di_reply_stream_destroy(di_reply_stream *s) {
    if (s == NULL) {
        return;
    }
    di_reply_deinit(&s->reply);
    di_strbuf_deinit(&s->stop_text);
    di_json_free(s->logprobs_new);
    di_json_free(s->logprobs);
    di_json_free(s->items);
    free(s);
}

di_status di_reply_stream_start(di_reply_stream *s, const di_reply_usage *usage, di_error *err) {
    s->usage = *usage;
    s->usage.completion_tokens = 0;
    return s->ops->start(s, err);
}

di_status di_reply_stream_push(void *user, const di_parser_event *event, di_error *err) {
    di_reply_stream *s = user;
    di_status st = di_reply_push(&s->reply, event, err);
    if (st != DI_OK) {
        return st;
    }
    switch (event->kind) {
    case DI_PARSER_REASONING:
        return s->ops->reasoning(s, event->text, event->len, err);
    case DI_PARSER_CONTENT:
        return s->ops->content(s, event->text, event->len, err);
    case DI_PARSER_CALL_BEGIN:
        return s->ops->call_begin(s, err);
    case DI_PARSER_CALL_ARGS:
        return s->ops->call_args(s, event->text, event->len, err);
    case DI_PARSER_CALL_END:
        return s->ops->call_end(s, event->is_cut, err);
    case DI_PARSER_DONE:
        break;
    }
    return DI_OK;
}

/* Appends copies of the references in `from` to *to, which is made when needed. */
static bool extend(di_json **to, const di_json *from) {
    if (*to == NULL && (*to = di_json_new_array()) == NULL) {
        return false;
    }
    for (size_t i = 0; i < di_json_array_len(from); i++) {
        if (!di_json_append(*to, di_json_ref(di_json_at(from, i)))) {
            return false;
        }
    }
    return true;
}

di_status di_reply_stream_logprobs(di_reply_stream *s, di_json *entries, di_error *err) {
    bool is_good = entries != NULL && extend(&s->logprobs_new, entries) && extend(&s->logprobs, entries);
    di_json_free(entries);
    return is_good ? DI_OK : di_fail(err, DI_ERR_MEMORY, "reply: no memory for log-probabilities");
}

di_status di_reply_stream_finish(di_reply_stream *s, di_finish finish, const di_chat_text *stop_text,
                                 const di_reply_usage *usage, int64_t completed_s, di_error *err) {
    DI_ASSERT(!s->is_finished);
    s->is_finished = true;
    s->finish = finish;
    s->has_stop_text = stop_text != NULL;
    if (stop_text != NULL) {
        di_strbuf_append(&s->stop_text, stop_text->data, stop_text->len);
        di_status st = di_strbuf_status(&s->stop_text, err);
        if (st != DI_OK) {
            return st;
        }
    }
    s->has_usage = usage != NULL;
    if (usage != NULL) {
        s->usage = *usage;
    }
    s->completed_s = completed_s;
    return s->ops->finish(s, err);
}

di_status di_reply_stream_fail(di_reply_stream *s, di_status status, const char *message, di_error *err) {
    s->is_finished = true;
    s->finish = DI_FINISH_ERROR;
    return s->ops->fail(s, status, message, err);
}

di_json *di_reply_stream_response(const di_reply_stream *s) {
    DI_ASSERT(s->is_finished);
    return s->ops->response(s);
}

/* ---- chat completions ---- */

static di_json *chat_usage(const di_reply_usage *u) {
    return di_reply_object("prompt_tokens", di_json_new_int(u->prompt_tokens), "completion_tokens",
                           di_json_new_int(u->completion_tokens), "total_tokens",
                           di_json_new_int(u->prompt_tokens + u->completion_tokens), "prompt_tokens_details",
                           di_reply_object("cached_tokens", di_json_new_int(u->cached_tokens), NULL),
                           "prompt_cache_hit_tokens", di_json_new_int(u->cached_tokens), "prompt_cache_miss_tokens",
                           di_json_new_int(u->prompt_tokens - u->cached_tokens), NULL);
}

/* Takes `content` (may be NULL) over. */
static di_json *chat_logprobs(di_json *content) {
    return content == NULL ? di_json_new_null()
                           : di_reply_object("content", content, "refusal", di_json_new_null(), NULL);
}

/* Sends a chunk of `delta`, which it takes over. */
static di_status chat_chunk(di_reply_stream *s, di_json *delta, bool takes_logprobs, bool is_last, di_error *err) {
    const di_reply_head *h = &s->head;
    di_json *logprobs = takes_logprobs ? s->logprobs_new : NULL;
    if (takes_logprobs) {
        s->logprobs_new = NULL;
    }
    di_json *choice = di_reply_object("index", di_json_new_int(h->choice_id), "delta", delta, "logprobs",
                                      chat_logprobs(logprobs), "finish_reason",
                                      is_last ? di_reply_string(di_finish_name(s->finish)) : di_json_new_null(), NULL);
    di_json *chunk =
        di_reply_object("id", di_reply_string(h->id), "object", di_reply_string("chat.completion.chunk"), "created",
                        di_json_new_int(h->created_s), "model", di_reply_string(h->model), "system_fingerprint",
                        di_json_new_null(), "choices", di_reply_array_of(choice), NULL);
    bool says_usage = is_last && s->has_usage;
    if (chunk != NULL && (says_usage || h->has_chunk_usage) &&
        !di_json_set(chunk, "usage", says_usage ? chat_usage(&s->usage) : di_json_new_null())) {
        di_json_free(chunk);
        chunk = NULL;
    }
    return di_reply_send(s, NULL, chunk, err);
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

static di_status chat_start(di_reply_stream *s, di_error *err) {
    di_json *delta = s->head.has_reasoning
                         ? di_reply_object("role", di_reply_string("assistant"), "content", di_json_new_null(),
                                           "reasoning_content", di_reply_string(""), NULL)
                         : di_reply_object("role", di_reply_string("assistant"), "content", di_reply_string(""), NULL);
    return chat_chunk(s, delta, false, false, err);
}

static di_status chat_reasoning(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    di_json *value = di_json_new_string(text, len);
    if (value == NULL) {
        return di_reply_send(s, NULL, NULL, err);
    }
    return chat_chunk(s, chat_text_delta(s, NULL, value), true, false, err);
}

static di_status chat_content(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    di_json *value = di_json_new_string(text, len);
    if (value == NULL) {
        return di_reply_send(s, NULL, NULL, err);
    }
    return chat_chunk(s, chat_text_delta(s, value, NULL), true, false, err);
}

static di_status chat_call_begin(di_reply_stream *s, di_error *err) {
    const di_reply_call *call = di_reply_last_call(s);
    di_json *entry = di_reply_object(
        "index", di_json_new_int((int64_t)s->reply.n_calls - 1), "id", di_reply_string(call->id), "type",
        di_reply_string("function"), "function",
        di_reply_object("name", di_reply_strbuf(&call->name), "arguments", di_reply_string(""), NULL), NULL);
    return chat_chunk(s, di_reply_object("tool_calls", di_reply_array_of(entry), NULL), true, false, err);
}

static di_status chat_call_args(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    di_json *entry = di_reply_object("index", di_json_new_int((int64_t)s->reply.n_calls - 1), "function",
                                     di_reply_object("arguments", di_json_new_string(text, len), NULL), NULL);
    return chat_chunk(s, di_reply_object("tool_calls", di_reply_array_of(entry), NULL), true, false, err);
}

static di_status chat_call_end(di_reply_stream *s, bool is_cut, di_error *err) {
    (void)s;
    (void)is_cut;
    (void)err;
    return DI_OK;
}

static di_status chat_end(di_reply_stream *s, di_error *err) {
    return s->sink == NULL ? DI_OK : s->sink(s->user, NULL, NULL, err);
}

static di_status chat_finish(di_reply_stream *s, di_error *err) {
    di_status st = chat_chunk(s, chat_text_delta(s, di_reply_string(""), NULL), true, true, err);
    return st == DI_OK && s->has_usage ? chat_end(s, err) : st;
}

const char *di_status_error_type(di_status status) {
    if (status == DI_ERR_BUSY)
        return "rate_limit_error";
    return di_status_http(status) < 500 && status != DI_ERR_CANCELLED ? "invalid_request_error" : "server_error";
}

static di_status chat_fail(di_reply_stream *s, di_status status, const char *message, di_error *err) {
    const char *type = di_status_error_type(status);
    di_json *error = di_reply_object("message", di_reply_string(message), "type", di_reply_string(type), "param",
                                     di_json_new_null(), "code", di_reply_string(type), NULL);
    di_status st = di_reply_send(s, NULL, di_reply_object("error", error, NULL), err);
    return st == DI_OK ? chat_end(s, err) : st;
}

static di_json *chat_choice(const di_reply_stream *s) {
    return di_reply_object("index", di_json_new_int(s->head.choice_id), "message", di_reply_message(&s->reply),
                           "logprobs", chat_logprobs(di_json_ref(s->logprobs)), "finish_reason",
                           di_reply_string(di_finish_name(s->finish)), NULL);
}

di_json *di_reply_chat_response(const di_reply_stream *const *choices, size_t n_choices, const di_reply_usage *usage) {
    DI_ASSERT(n_choices > 0);
    const di_reply_head *h = &choices[0]->head;
    di_json *list = di_json_new_array();
    for (size_t i = 0; i < n_choices; i++) {
        if (list != NULL && !di_json_append(list, chat_choice(choices[i]))) {
            di_json_free(list);
            list = NULL;
        }
    }
    return di_reply_object("id", di_reply_string(h->id), "object", di_reply_string("chat.completion"), "created",
                           di_json_new_int(h->created_s), "model", di_reply_string(h->model), "choices", list, "usage",
                           chat_usage(usage), "system_fingerprint", di_json_new_null(), NULL);
}

static di_json *chat_response(const di_reply_stream *s) {
    return di_reply_chat_response(&s, 1, &s->usage);
}

const di_reply_ops di_reply_chat_ops = {
    .start = chat_start,
    .reasoning = chat_reasoning,
    .content = chat_content,
    .call_begin = chat_call_begin,
    .call_args = chat_call_args,
    .call_end = chat_call_end,
    .finish = chat_finish,
    .fail = chat_fail,
    .response = chat_response,
};
