/* Anthropic messages: content blocks as events, and the message object.
 *
 * Blocks come one after another, `thinking`, `text`, then `tool_use`; each opens with its first event and closes when
 * the next begins or the output ends. A ping follows the first block's start. A thinking block's signature is the
 * response's id: nothing is verified with it, but clients send it back. Source of the forms: the Anthropic messages API
 * (chat.md 12). */
#include "reply_internal.h"

static di_json *usage_json(const di_reply_stream *s) {
    return di_reply_object(
        "input_tokens", di_json_new_int(s->usage.prompt_tokens - s->usage.cached_tokens), "cache_creation_input_tokens",
        di_json_new_int(0), "cache_read_input_tokens", di_json_new_int(s->usage.cached_tokens), "output_tokens",
        di_json_new_int(s->usage.completion_tokens), "service_tier", di_reply_string("standard"), NULL);
}

/* The message object around `content`, which it takes over. */
static di_json *message_json(const di_reply_stream *s, di_json *content, di_json *stop_reason, di_json *stop_sequence) {
    return di_reply_object("id", di_reply_string(s->head.id), "type", di_reply_string("message"), "role",
                           di_reply_string("assistant"), "model", di_reply_string(s->head.model), "content", content,
                           "stop_reason", stop_reason, "stop_sequence", stop_sequence, "usage", usage_json(s), NULL);
}

static di_status messages_start(di_reply_stream *s, di_error *err) {
    di_json *message = message_json(s, di_json_new_array(), di_json_new_null(), di_json_new_null());
    return di_reply_send(s, "message_start",
                         di_reply_object("type", di_reply_string("message_start"), "message", message, NULL), err);
}

/* A delta of the open block with one value, taken over. */
static di_json *delta_json(const di_reply_stream *s, const char *type, const char *key, di_json *value) {
    di_json *delta = di_reply_object("type", di_reply_string(type), key, value, NULL);
    return di_reply_object("type", di_reply_string("content_block_delta"), "index", di_json_new_int(s->n_parts - 1),
                           "delta", delta, NULL);
}

static di_json *messages_piece(const di_reply_stream *s, di_reply_part part, const di_reply_piece *piece,
                               const char **event) {
    *event = "content_block_delta";
    switch (part) {
    case DI_REPLY_REASONING:
        return delta_json(s, "thinking_delta", "thinking", piece->text);
    case DI_REPLY_CALL:
        return delta_json(s, "input_json_delta", "partial_json", piece->text);
    default:
        return delta_json(s, "text_delta", "text", piece->text);
    }
}

static di_status close_block(di_reply_stream *s, di_error *err) {
    if (s->part == DI_REPLY_NO_PART) {
        return DI_OK;
    }
    if (s->part == DI_REPLY_REASONING) {
        di_json *delta = delta_json(s, "signature_delta", "signature", di_reply_string(s->head.id));
        di_status st = di_reply_send(s, "content_block_delta", delta, err);
        if (st != DI_OK) {
            return st;
        }
    }
    s->part = DI_REPLY_NO_PART;
    return di_reply_send(
        s, "content_block_stop",
        di_reply_object("type", di_reply_string("content_block_stop"), "index", di_json_new_int(s->n_parts - 1), NULL),
        err);
}

/* Closes what is open and opens `block`, which it takes over. */
static di_status open_block(di_reply_stream *s, di_reply_part part, di_json *block, di_error *err) {
    di_status st = close_block(s, err);
    if (st != DI_OK) {
        di_json_free(block);
        return st;
    }
    s->part = part;
    s->n_parts++;
    st = di_reply_send(s, "content_block_start",
                       di_reply_object("type", di_reply_string("content_block_start"), "index",
                                       di_json_new_int(s->n_parts - 1), "content_block", block, NULL),
                       err);
    if (st == DI_OK && s->n_parts == 1) {
        st = di_reply_send(s, "ping", di_reply_object("type", di_reply_string("ping"), NULL), err);
    }
    return st;
}

static di_json *thinking_block(const di_reply_stream *s, di_json *text) {
    return di_reply_object("type", di_reply_string("thinking"), "thinking", text, "signature",
                           di_reply_string(s->head.id), NULL);
}

static di_json *text_block(di_json *text) {
    return di_reply_object("type", di_reply_string("text"), "text", text, NULL);
}

static di_json *tool_block(const di_reply_call *call, di_json *input) {
    return di_reply_object("type", di_reply_string("tool_use"), "id", di_reply_string(call->id), "name",
                           di_reply_strbuf(&call->name), "input", input, NULL);
}

static di_status messages_reasoning(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    if (s->part != DI_REPLY_REASONING) {
        di_status st = open_block(s, DI_REPLY_REASONING, thinking_block(s, di_reply_string("")), err);
        if (st != DI_OK) {
            return st;
        }
    }
    return di_reply_send_piece(s, DI_REPLY_REASONING, text, len, err);
}

static di_status messages_content(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    if (s->part != DI_REPLY_TEXT) {
        di_status st = open_block(s, DI_REPLY_TEXT, text_block(di_reply_string("")), err);
        if (st != DI_OK) {
            return st;
        }
    }
    return di_reply_send_piece(s, DI_REPLY_TEXT, text, len, err);
}

static di_status messages_call_begin(di_reply_stream *s, di_error *err) {
    return open_block(s, DI_REPLY_CALL, tool_block(di_reply_last_call(s), di_json_new_object()), err);
}

static di_status messages_call_args(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    return di_reply_send_piece(s, DI_REPLY_CALL, text, len, err);
}

static di_status messages_call_end(di_reply_stream *s, bool is_cut, di_error *err) {
    (void)is_cut;
    return close_block(s, err);
}

/* Why the message stopped; *sequence becomes the stop string or null. */
static di_json *stop_json(const di_reply_stream *s, di_json **sequence) {
    bool is_sequence = s->finish == DI_FINISH_STOP && s->has_stop_text;
    const char *reason = "end_turn";
    if (is_sequence) {
        reason = "stop_sequence";
    } else if (s->finish == DI_FINISH_TOOL_CALLS) {
        reason = "tool_use";
    } else if (s->finish == DI_FINISH_LENGTH) {
        reason = "max_tokens";
    } else if (s->finish == DI_FINISH_CONTENT_FILTER) {
        reason = "refusal";
    }
    *sequence = is_sequence ? di_reply_strbuf(&s->stop_text) : di_json_new_null();
    return di_reply_string(reason);
}

static di_status messages_finish(di_reply_stream *s, di_error *err) {
    di_status st = close_block(s, err);
    if (st != DI_OK) {
        return st;
    }
    di_json *sequence, *reason = stop_json(s, &sequence);
    di_json *delta = di_reply_object("stop_reason", reason, "stop_sequence", sequence, NULL);
    st = di_reply_send(s, "message_delta",
                       di_reply_with_seed(s, di_reply_object("type", di_reply_string("message_delta"), "delta", delta,
                                                             "usage", usage_json(s), NULL)),
                       err);
    if (st != DI_OK) {
        return st;
    }
    return di_reply_send(s, "message_stop", di_reply_object("type", di_reply_string("message_stop"), NULL), err);
}

static di_status messages_fail(di_reply_stream *s, di_status status, const char *message, di_error *err) {
    int http = di_status_http(status);
    const char *type = status == DI_ERR_BUSY || http == 503 ? "overloaded_error"
                       : http < 500                         ? "invalid_request_error"
                                                            : "api_error";
    di_json *error = di_reply_object("type", di_reply_string(type), "message", di_reply_string(message), NULL);
    return di_reply_send(s, "error", di_reply_object("type", di_reply_string("error"), "error", error, NULL), err);
}

/* The arguments as an object; text that is not one gives {}. */
static di_json *input_json(const di_reply_call *call) {
    di_json *input = NULL;
    if (di_json_parse(&input, di_strbuf_str(&call->arguments), call->arguments.len, NULL) != DI_OK) {
        input = NULL;
    }
    if (!di_json_is(input, DI_JSON_OBJECT)) {
        di_json_free(input);
        input = di_json_new_object();
    }
    return input;
}

static di_json *messages_response(const di_reply_stream *s) {
    di_json *content = di_json_new_array();
    bool is_good = content != NULL;
    if (is_good && s->reply.reasoning.len > 0) {
        is_good = di_json_append(content, thinking_block(s, di_reply_strbuf(&s->reply.reasoning)));
    }
    if (is_good && s->reply.content.len > 0) {
        is_good = di_json_append(content, text_block(di_reply_strbuf(&s->reply.content)));
    }
    for (size_t i = 0; is_good && i < s->reply.n_calls; i++) {
        const di_reply_call *call = &s->reply.calls[i];
        is_good = di_json_append(content, tool_block(call, input_json(call)));
    }
    if (!is_good) {
        di_json_free(content);
        return NULL;
    }
    di_json *sequence, *reason = stop_json(s, &sequence);
    return di_reply_with_seed(s, message_json(s, content, reason, sequence));
}

const di_reply_ops di_reply_messages_ops = {
    .start = messages_start,
    .reasoning = messages_reasoning,
    .content = messages_content,
    .call_begin = messages_call_begin,
    .call_args = messages_call_args,
    .call_end = messages_call_end,
    .finish = messages_finish,
    .fail = messages_fail,
    .response = messages_response,
    .piece = messages_piece,
};
