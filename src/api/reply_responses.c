/* The Responses API: output items as numbered events, and the response object.
 *
 * Items come one after another, `reasoning`, `message`, then one for each call. An item is open from its first event to
 * the next item or the end; closing it fixes its final form, which goes into s->items and with them into the response.
 * A message is `commentary` when calls follow and `final_answer` otherwise, which is known when it closes. Calls of a
 * custom tool carry the text of their one argument `input`; calls of a tool in a namespace name both. Source of the
 * forms: the Responses API as the hosted service answers it (chat.md 11). */
#include "reply_internal.h"

/* ---- events ---- */

/* The next sequence number; every event takes one. */
static di_json *number(di_reply_stream *s) {
    return di_json_new_int(s->n_sent++);
}

static int64_t output_index(const di_reply_stream *s) {
    return s->n_parts - 1;
}

/* An event about the open item's only content part, which is taken over. */
static di_status send_part(di_reply_stream *s, const char *event, di_json *part, di_error *err) {
    di_json *data = di_reply_object("type", di_reply_string(event), "content_index", di_json_new_int(0), "item_id",
                                    di_reply_string(s->item_id), "output_index", di_json_new_int(output_index(s)),
                                    "part", part, "sequence_number", number(s), NULL);
    return di_reply_send(s, event, data, err);
}

/* An event about the open call: `key` and its value, taken over. */
static di_json *call_json(const di_reply_stream *s, const char *event, const char *key, di_json *value,
                          int64_t number_of_event) {
    return di_reply_object("type", di_reply_string(event), key, value, "item_id", di_reply_string(s->item_id),
                           "output_index", di_json_new_int(output_index(s)), "sequence_number",
                           di_json_new_int(number_of_event), NULL);
}

static di_status send_call(di_reply_stream *s, const char *event, const char *key, di_json *value, di_error *err) {
    return di_reply_send(s, event, call_json(s, event, key, value, s->n_sent++), err);
}

static di_json *responses_piece(const di_reply_stream *s, di_reply_part part, const di_reply_piece *piece,
                                const char **event) {
    if (part == DI_REPLY_CALL) {
        *event = "response.function_call_arguments.delta";
        return call_json(s, *event, "delta", piece->text, piece->number);
    }
    if (part == DI_REPLY_REASONING) {
        *event = "response.reasoning_text.delta";
        return di_reply_object("type", di_reply_string(*event), "content_index", di_json_new_int(0), "delta",
                               piece->text, "item_id", di_reply_string(s->item_id), "output_index",
                               di_json_new_int(output_index(s)), "sequence_number", di_json_new_int(piece->number),
                               NULL);
    }
    *event = "response.output_text.delta";
    return di_reply_object("type", di_reply_string(*event), "content_index", di_json_new_int(0), "delta", piece->text,
                           "item_id", di_reply_string(s->item_id), "logprobs",
                           piece->logprobs != NULL ? piece->logprobs : di_json_new_array(), "output_index",
                           di_json_new_int(output_index(s)), "sequence_number", di_json_new_int(piece->number), NULL);
}

static di_status send_item(di_reply_stream *s, const char *event, di_json *item, di_error *err) {
    di_json *data = di_reply_object("type", di_reply_string(event), "item", item, "output_index",
                                    di_json_new_int(output_index(s)), "sequence_number", number(s), NULL);
    return di_reply_send(s, event, data, err);
}

/* ---- items ---- */

static di_json *reasoning_part(di_json *text) {
    return di_reply_object("type", di_reply_string("reasoning_text"), "text", text, NULL);
}

/* Those of the whole text so far. */
static di_json *logprobs_json(const di_reply_stream *s) {
    return s->logprobs != NULL ? di_json_ref(s->logprobs) : di_json_new_array();
}

static di_json *text_part(const di_reply_stream *s, di_json *text) {
    return di_reply_object("type", di_reply_string("output_text"), "annotations", di_json_new_array(), "logprobs",
                           logprobs_json(s), "text", text, NULL);
}

/* `content` is taken over. The encrypted content is only a name: nothing is kept on the server, and clients send it
 * back. */
static di_json *reasoning_item(const di_reply_stream *s, const char *status, di_json *content) {
    di_strbuf name = {0};
    di_strbuf_printf(&name, "%s-%lld", s->head.id, (long long)output_index(s));
    di_json *item = di_reply_object("type", di_reply_string("reasoning"), "id", di_reply_string(s->item_id), "status",
                                    di_reply_string(status), "content", content, "summary", di_json_new_array(),
                                    "encrypted_content", di_reply_strbuf(&name), NULL);
    di_strbuf_deinit(&name);
    return item;
}

static di_json *message_item(const di_reply_stream *s, const char *status, const char *phase, di_json *content) {
    return di_reply_object("type", di_reply_string("message"), "id", di_reply_string(s->item_id), "status",
                           di_reply_string(status), "role", di_reply_string("assistant"), "phase",
                           di_reply_string(phase), "content", content, NULL);
}

static bool is_named(const di_json *object, const char *key, const char *text, size_t len) {
    size_t n;
    const char *value = di_json_str(di_json_get(object, key), &n);
    return value != NULL && n == len && memcmp(value, text, n) == 0;
}

static bool is_of_type(const di_json *tool, const char *type) {
    return is_named(tool, "type", type, strlen(type));
}

/* The call is of a custom tool of the request. */
static bool is_custom(const di_reply_stream *s, const di_reply_call *call) {
    const di_json *tools = di_json_get(s->head.request, "tools");
    for (size_t i = 0; i < di_json_array_len(tools); i++) {
        const di_json *tool = di_json_at(tools, i);
        if (is_of_type(tool, "custom") && is_named(tool, "name", di_strbuf_str(&call->name), call->name.len)) {
            return true;
        }
    }
    return false;
}

/* Length of the namespace in `namespace::tool`, 0 when the request has no such namespace with such a tool. */
static size_t namespace_len(const di_reply_stream *s, const di_reply_call *call) {
    const char *name = di_strbuf_str(&call->name);
    const di_json *tools = di_json_get(s->head.request, "tools");
    for (size_t i = 0; i < di_json_array_len(tools); i++) {
        const di_json *space = di_json_at(tools, i), *members = di_json_get(space, "tools");
        size_t n;
        const char *space_name = di_json_str(di_json_get(space, "name"), &n);
        if (!is_of_type(space, "namespace") || space_name == NULL || call->name.len < n + 2 ||
            memcmp(name, space_name, n) != 0 || memcmp(name + n, "::", 2) != 0) {
            continue;
        }
        for (size_t j = 0; j < di_json_array_len(members); j++) {
            if (is_named(di_json_at(members, j), "name", name + n + 2, call->name.len - n - 2)) {
                return n;
            }
        }
    }
    return 0;
}

/* `key` is `arguments` or, for a custom tool, `input`; its value is taken over. */
static di_json *call_item(const di_reply_stream *s, const char *status, di_json *value) {
    const di_reply_call *call = di_reply_last_call(s);
    bool is_tool_custom = is_custom(s, call);
    size_t n_space = namespace_len(s, call);
    const char *name = di_strbuf_str(&call->name);
    const char *type = is_tool_custom ? "custom_tool_call" : "function_call";
    const char *key = is_tool_custom ? "input" : "arguments";
    if (n_space > 0) {
        return di_reply_object("type", di_reply_string(type), "id", di_reply_string(s->item_id), "status",
                               di_reply_string(status), "call_id", di_reply_string(call->id), "namespace",
                               di_json_new_string(name, n_space), "name",
                               di_json_new_string(name + n_space + 2, call->name.len - n_space - 2), key, value, NULL);
    }
    return di_reply_object("type", di_reply_string(type), "id", di_reply_string(s->item_id), "status",
                           di_reply_string(status), "call_id", di_reply_string(call->id), "name",
                           di_reply_strbuf(&call->name), key, value, NULL);
}

/* The `input` of a custom tool's call; arguments that do not have it are the input as they are. */
static di_json *custom_input(const di_reply_call *call) {
    di_json *arguments = NULL, *input = NULL;
    if (di_json_parse(&arguments, di_strbuf_str(&call->arguments), call->arguments.len, NULL) == DI_OK) {
        const di_json *member = di_json_get(arguments, "input");
        size_t n;
        const char *text = di_json_str(member, &n);
        input = text == NULL ? NULL : di_json_new_string(text, n);
        di_json_free(arguments);
    }
    return input != NULL ? input : di_reply_strbuf(&call->arguments);
}

/* Sends the closing events of a part and of its item, and keeps the item; text and item are taken over. */
static di_status close_text(di_reply_stream *s, di_json *text, di_json *part, di_json *item, di_error *err) {
    bool is_message = s->part == DI_REPLY_TEXT;
    const char *done = is_message ? "response.output_text.done" : "response.reasoning_text.done";
    di_json *data =
        is_message ? di_reply_object("type", di_reply_string(done), "content_index", di_json_new_int(0), "item_id",
                                     di_reply_string(s->item_id), "logprobs", logprobs_json(s), "output_index",
                                     di_json_new_int(output_index(s)), "sequence_number", number(s), "text", text, NULL)
                   : di_reply_object("type", di_reply_string(done), "content_index", di_json_new_int(0), "item_id",
                                     di_reply_string(s->item_id), "output_index", di_json_new_int(output_index(s)),
                                     "sequence_number", number(s), "text", text, NULL);
    di_status st = di_reply_send(s, done, data, err);
    if (st == DI_OK) {
        st = send_part(s, "response.content_part.done", part, err);
    } else {
        di_json_free(part);
    }
    if (st != DI_OK) {
        di_json_free(item);
        return st;
    }
    if (item == NULL || !di_json_append(s->items, di_json_ref(item))) {
        di_json_free(item);
        item = NULL;
    }
    return send_item(s, "response.output_item.done", item, err);
}

static di_status close_call(di_reply_stream *s, const char *status, di_error *err) {
    const di_reply_call *call = di_reply_last_call(s);
    di_status st;
    di_json *item;
    if (is_custom(s, call)) {
        /* The input is known only now: its text is a JSON string inside the arguments. */
        di_json *input = custom_input(call);
        st = send_call(s, "response.custom_tool_call_input.delta", "delta", di_json_ref(input), err);
        if (st == DI_OK) {
            st = send_call(s, "response.custom_tool_call_input.done", "input", di_json_ref(input), err);
        }
        item = call_item(s, status, input);
    } else {
        st = send_call(s, "response.function_call_arguments.done", "arguments", di_reply_strbuf(&call->arguments), err);
        item = call_item(s, status, di_reply_strbuf(&call->arguments));
    }
    if (st != DI_OK) {
        di_json_free(item);
        return st;
    }
    if (item == NULL || !di_json_append(s->items, di_json_ref(item))) {
        di_json_free(item);
        item = NULL;
    }
    return send_item(s, "response.output_item.done", item, err);
}

static di_status close_item(di_reply_stream *s, const char *status, const char *phase, di_error *err) {
    di_status st = DI_OK;
    if (s->part == DI_REPLY_REASONING) {
        const di_strbuf *text = &s->reply.reasoning;
        di_json *content = di_reply_array_of(reasoning_part(di_reply_strbuf(text)));
        st = close_text(s, di_reply_strbuf(text), reasoning_part(di_reply_strbuf(text)),
                        reasoning_item(s, status, content), err);
    } else if (s->part == DI_REPLY_TEXT) {
        const di_strbuf *text = &s->reply.content;
        di_json *content = di_reply_array_of(text_part(s, di_reply_strbuf(text)));
        st = close_text(s, di_reply_strbuf(text), text_part(s, di_reply_strbuf(text)),
                        message_item(s, status, phase, content), err);
    } else if (s->part == DI_REPLY_CALL) {
        st = close_call(s, status, err);
    }
    s->part = DI_REPLY_NO_PART;
    return st;
}

/* Closes what is open and begins an item: gives it its place and id. */
static di_status begin_item(di_reply_stream *s, di_reply_part part, const char *phase_before, di_error *err) {
    di_status st = close_item(s, "completed", phase_before, err);
    if (st != DI_OK) {
        return st;
    }
    const char *prefix = part == DI_REPLY_REASONING ? "rs_" : part == DI_REPLY_TEXT ? "msg_" : "fc_";
    if (part == DI_REPLY_CALL && is_custom(s, di_reply_last_call(s))) {
        prefix = "ctc_";
    }
    s->part = part;
    s->n_parts++;
    /* Calls draw their ids from the same seed with small numbers. */
    di_reply_make_id(s->item_id, prefix, s->head.seed, UINT64_C(1) << 32 | s->n_item_ids++);
    return DI_OK;
}

/* ---- the response object ---- */

/* A reference to the request's field, or `other`, which is taken over. */
static di_json *echo(const di_reply_stream *s, const char *key, di_json *other) {
    di_json *value = di_json_get(s->head.request, key);
    if (value == NULL || di_json_is(value, DI_JSON_NULL)) {
        return other;
    }
    di_json_free(other);
    return di_json_ref(value);
}

static di_json *echo_number(const di_reply_stream *s, const char *key, double other) {
    di_json *value = di_json_get(s->head.request, key);
    di_json_type kind = di_json_kind(value);
    bool is_number = kind == DI_JSON_INT || kind == DI_JSON_UINT || kind == DI_JSON_REAL;
    return di_json_new_real(is_number ? di_json_number(value) : other);
}

/* A member of a request's object field, or null. */
static di_json *echo_member(const di_reply_stream *s, const char *key, const char *member) {
    di_json *value = di_json_get(di_json_get(s->head.request, key), member);
    return value == NULL ? di_json_new_null() : di_json_ref(value);
}

static di_json *member_or_null(const di_json *object, const char *key) {
    di_json *value = di_json_get(object, key);
    return value == NULL ? di_json_new_null() : di_json_ref(value);
}

/* The request's tools; functions with all their fields. */
static di_json *tools_json(const di_reply_stream *s) {
    const di_json *tools = di_json_get(s->head.request, "tools");
    di_json *list = di_json_new_array();
    for (size_t i = 0; list != NULL && i < di_json_array_len(tools); i++) {
        di_json *tool = di_json_at(tools, i);
        di_json *shown =
            !is_of_type(tool, "function")
                ? di_json_ref(tool)
                : di_reply_object("type", di_reply_string("function"), "name", member_or_null(tool, "name"),
                                  "description", member_or_null(tool, "description"), "parameters",
                                  member_or_null(tool, "parameters"), "strict", member_or_null(tool, "strict"), NULL);
        if (!di_json_append(list, shown)) {
            di_json_free(list);
            list = NULL;
        }
    }
    return list;
}

static di_json *format_json(const di_reply_stream *s) {
    di_json *format = di_json_get(di_json_get(s->head.request, "text"), "format");
    return di_json_is(format, DI_JSON_OBJECT) ? di_json_ref(format)
                                              : di_reply_object("type", di_reply_string("text"), NULL);
}

static di_json *usage_json(const di_reply_stream *s) {
    const di_reply_usage *u = &s->usage;
    di_json *input = di_reply_object("cached_tokens", di_json_new_int(u->cached_tokens), NULL);
    if (input != NULL && s->head.has_details && !di_json_set(input, "cache_write_tokens", di_json_new_int(0))) {
        di_json_free(input);
        input = NULL;
    }
    return di_reply_object("input_tokens", di_json_new_int(u->prompt_tokens), "input_tokens_details", input,
                           "output_tokens", di_json_new_int(u->completion_tokens), "output_tokens_details",
                           di_reply_object("reasoning_tokens", di_json_new_int(u->reasoning_tokens), NULL),
                           "total_tokens", di_json_new_int(u->prompt_tokens + u->completion_tokens), NULL);
}

static bool is_incomplete(const di_reply_stream *s) {
    return s->finish == DI_FINISH_LENGTH || s->finish == DI_FINISH_CONTENT_FILTER;
}

static const char *status_text(const di_reply_stream *s) {
    if (!s->is_finished) {
        return "in_progress";
    }
    if (s->finish == DI_FINISH_ERROR || s->finish == DI_FINISH_ABORT) {
        return s->finish == DI_FINISH_ABORT ? "cancelled" : "failed";
    }
    return is_incomplete(s) ? "incomplete" : "completed";
}

static di_json *responses_response(const di_reply_stream *s) {
    di_json *details = di_json_new_null(), *error = di_json_new_null();
    if (s->is_finished && is_incomplete(s)) {
        di_json_free(details);
        details = di_reply_object(
            "reason", di_reply_string(s->finish == DI_FINISH_LENGTH ? "max_output_tokens" : "content_filter"), NULL);
    }
    if (s->failure != NULL) {
        di_json_free(error);
        error = di_reply_object("code", di_reply_string("server_error"), "message", di_reply_string(s->failure), NULL);
    }
    di_json *response = di_reply_object(
        "id", di_reply_string(s->head.id), "object", di_reply_string("response"), "created_at",
        di_json_new_int(s->head.created_s), "status", di_reply_string(status_text(s)), "background",
        di_json_new_bool(false), "completed_at",
        s->is_finished && s->has_usage ? di_json_new_int(s->completed_s) : di_json_new_null(), "content_filters",
        di_json_new_null(), "error", error, "frequency_penalty", echo_number(s, "frequency_penalty", 0.0),
        "incomplete_details", details, "instructions", echo(s, "instructions", di_json_new_null()), "max_output_tokens",
        echo(s, "max_output_tokens", di_json_new_null()), "max_tool_calls",
        echo(s, "max_tool_calls", di_json_new_null()), "model", di_reply_string(s->head.model), "moderation",
        di_json_new_null(), "output", di_json_copy(s->items), "parallel_tool_calls",
        echo(s, "parallel_tool_calls", di_json_new_bool(true)), "presence_penalty",
        echo_number(s, "presence_penalty", 0.0), "previous_response_id",
        echo(s, "previous_response_id", di_json_new_null()), "prompt_cache_key",
        echo(s, "prompt_cache_key", di_json_new_null()), "prompt_cache_retention",
        echo(s, "prompt_cache_retention", di_json_new_null()), "reasoning",
        di_reply_object("effort", echo_member(s, "reasoning", "effort"), "summary",
                        echo_member(s, "reasoning", "summary"), NULL),
        "safety_identifier", echo(s, "safety_identifier", di_json_new_null()), "service_tier",
        di_reply_string("default"), "store", di_json_new_bool(false), "temperature", echo_number(s, "temperature", 1.0),
        "text", di_reply_object("format", format_json(s), "verbosity", echo_member(s, "text", "verbosity"), NULL),
        "tool_choice", echo(s, "tool_choice", di_reply_string("auto")), "tools", tools_json(s), "top_logprobs",
        echo(s, "top_logprobs", di_json_new_int(0)), "top_p", echo_number(s, "top_p", 1.0), "truncation",
        echo(s, "truncation", di_reply_string("disabled")), "usage",
        s->is_finished && s->has_usage ? usage_json(s) : di_json_new_null(), "user",
        echo(s, "user", di_json_new_null()), "metadata", echo(s, "metadata", di_json_new_object()), NULL);
    return s->is_finished ? di_reply_with_seed(s, response) : response;
}

/* ---- the stream ---- */

static di_status send_response(di_reply_stream *s, const char *event, di_error *err) {
    di_json *data = di_reply_object("type", di_reply_string(event), "response", responses_response(s),
                                    "sequence_number", number(s), NULL);
    return di_reply_send(s, event, data, err);
}

static di_status responses_start(di_reply_stream *s, di_error *err) {
    di_status st = send_response(s, "response.created", err);
    return st == DI_OK ? send_response(s, "response.in_progress", err) : st;
}

/* ---- log-probabilities ---- */

static bool wants_logprobs(const di_reply_stream *s) {
    const di_json *include = di_json_get(s->head.request, "include");
    for (size_t i = 0; i < di_json_array_len(include); i++) {
        const char *name = di_json_str(di_json_at(include, i), NULL);
        if (name != NULL && strcmp(name, DI_INCLUDE_LOGPROBS) == 0) {
            return true;
        }
    }
    return false;
}

/* Waits for the text that it brings. Marks of the format bring none. */
static di_status responses_token(di_reply_stream *s, const di_reply_token *token, di_error *err) {
    if (di_tokenizer_is_added(token->tok, token->token) || !wants_logprobs(s)) {
        return DI_OK;
    }
    if (s->logprobs_new == NULL) {
        s->logprobs_new = di_json_new_array();
    }
    return s->logprobs_new != NULL && di_json_append(s->logprobs_new, di_reply_token_json(token))
               ? DI_OK
               : di_fail(err, DI_ERR_MEMORY, "reply: no memory for log-probabilities");
}

/* What waited belongs to something else than the text of a message. */
static void drop_logprobs(di_reply_stream *s) {
    di_json_free(s->logprobs_new);
    s->logprobs_new = NULL;
}

/* ---- parts ---- */

static di_status responses_reasoning(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    di_status st = DI_OK;
    drop_logprobs(s);
    if (s->part != DI_REPLY_REASONING) {
        if ((st = begin_item(s, DI_REPLY_REASONING, "final_answer", err)) != DI_OK ||
            (st = send_item(s, "response.output_item.added", reasoning_item(s, "in_progress", di_json_new_array()),
                            err)) != DI_OK ||
            (st = send_part(s, "response.content_part.added", reasoning_part(di_reply_string("")), err)) != DI_OK) {
            return st;
        }
    }
    return di_reply_send_piece(s, DI_REPLY_REASONING, text, len, err);
}

static di_status responses_content(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    di_status st = DI_OK;
    if (s->part != DI_REPLY_TEXT) {
        if ((st = begin_item(s, DI_REPLY_TEXT, "final_answer", err)) != DI_OK ||
            (st = send_item(s, "response.output_item.added",
                            message_item(s, "in_progress", "final_answer", di_json_new_array()), err)) != DI_OK ||
            (st = send_part(s, "response.content_part.added", text_part(s, di_reply_string("")), err)) != DI_OK) {
            return st;
        }
    }
    if (!di_reply_extend(&s->logprobs, s->logprobs_new)) {
        return di_fail(err, DI_ERR_MEMORY, "reply: no memory for log-probabilities");
    }
    return di_reply_send_piece(s, DI_REPLY_TEXT, text, len, err);
}

static di_status responses_call_begin(di_reply_stream *s, di_error *err) {
    drop_logprobs(s);
    di_status st = begin_item(s, DI_REPLY_CALL, "commentary", err);
    if (st != DI_OK) {
        return st;
    }
    return send_item(s, "response.output_item.added", call_item(s, "in_progress", di_reply_string("")), err);
}

static di_status responses_call_args(di_reply_stream *s, const char *text, size_t len, di_error *err) {
    drop_logprobs(s);
    if (is_custom(s, di_reply_last_call(s))) {
        return DI_OK; /* comes whole when the call closes */
    }
    return di_reply_send_piece(s, DI_REPLY_CALL, text, len, err);
}

static di_status responses_call_end(di_reply_stream *s, bool is_cut, di_error *err) {
    return close_item(s, is_cut ? "incomplete" : "completed", "commentary", err);
}

static di_status responses_finish(di_reply_stream *s, di_error *err) {
    if (s->finish == DI_FINISH_ERROR || s->finish == DI_FINISH_ABORT) {
        s->failure = s->finish == DI_FINISH_ABORT ? "the request was aborted" : "the run failed";
    }
    di_status st =
        close_item(s, is_incomplete(s) || s->failure != NULL ? "incomplete" : "completed", "final_answer", err);
    if (st == DI_OK) {
        st = send_response(s,
                           s->failure != NULL ? "response.failed"
                           : is_incomplete(s) ? "response.incomplete"
                                              : "response.completed",
                           err);
    }
    return st;
}

static di_status responses_fail(di_reply_stream *s, di_status status, const char *message, di_error *err) {
    (void)status; /* the code of every failure after the response began is server_error */
    s->failure = message;
    di_status st = close_item(s, "incomplete", "final_answer", err);
    if (st == DI_OK) {
        st = send_response(s, "response.failed", err);
    }
    s->failure = NULL; /* borrowed */
    return st;
}

const di_reply_ops di_reply_responses_ops = {
    .start = responses_start,
    .reasoning = responses_reasoning,
    .content = responses_content,
    .call_begin = responses_call_begin,
    .call_args = responses_call_args,
    .call_end = responses_call_end,
    .finish = responses_finish,
    .fail = responses_fail,
    .response = responses_response,
    .piece = responses_piece,
    .token = responses_token,
};
