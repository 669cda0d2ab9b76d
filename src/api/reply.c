/* One output as a message: gathering of parser events, the message objects, and the small builders that all replies
 * use.
 *
 * Texts are kept as bytes and become JSON strings at the end, where ill-formed UTF-8 is repaired: a caller may feed the
 * parser with something else than a detokenizer's text. */
#include "reply_internal.h"

/* ---- builders ---- */

di_json *di_reply_object(const char *key, ...) {
    di_json *object = di_json_new_object();
    bool is_good = object != NULL;
    va_list args;
    va_start(args, key);
    for (const char *k = key; k != NULL; k = va_arg(args, const char *)) {
        di_json *value = va_arg(args, di_json *);
        if (object != NULL) {
            is_good = di_json_set(object, k, value) && is_good;
        } else {
            di_json_free(value);
        }
    }
    va_end(args);
    if (!is_good) {
        di_json_free(object);
        return NULL;
    }
    return object;
}

di_json *di_reply_array_of(di_json *value) {
    di_json *array = di_json_new_array();
    if (array == NULL) {
        di_json_free(value);
        return NULL;
    }
    if (!di_json_append(array, value)) {
        di_json_free(array);
        return NULL;
    }
    return array;
}

di_json *di_reply_string(const char *text) {
    return di_json_new_string(text, strlen(text));
}

di_json *di_reply_strbuf(const di_strbuf *text) {
    return di_json_new_string(di_strbuf_str(text), text->len);
}

void di_reply_make_id(char out[DI_REPLY_ID_MAX], const char *prefix, uint64_t seed, uint64_t n) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    enum { N_RANDOM = 24 };
    size_t at = strlen(prefix);
    DI_ASSERT(at + N_RANDOM < DI_REPLY_ID_MAX);
    memcpy(out, prefix, at);
    uint64_t state = di_mix64(seed + n * UINT64_C(0x9e3779b97f4a7c15));
    for (uint64_t i = 0; i < N_RANDOM; i++) {
        uint64_t bits = di_mix64(state + (i + 1) * UINT64_C(0x9e3779b97f4a7c15));
        out[at++] = alphabet[(bits >> 32) % (sizeof alphabet - 1)];
    }
    out[at] = '\0';
}

/* ---- the message ---- */

void di_reply_init(di_reply *reply, bool has_reasoning, uint64_t seed) {
    *reply = (di_reply){.has_reasoning = has_reasoning, .seed = seed};
}

void di_reply_deinit(di_reply *reply) {
    for (size_t i = 0; i < reply->n_calls; i++) {
        di_strbuf_deinit(&reply->calls[i].name);
        di_strbuf_deinit(&reply->calls[i].arguments);
    }
    free(reply->calls);
    di_strbuf_deinit(&reply->reasoning);
    di_strbuf_deinit(&reply->content);
    *reply = (di_reply){0};
}

static di_status add_call(di_reply *reply, const di_parser_event *event, di_error *err) {
    if (reply->n_calls == reply->cap_calls) {
        size_t cap = reply->cap_calls == 0 ? 4 : reply->cap_calls * 2, bytes;
        di_reply_call *calls = di_size_mul(&bytes, cap, sizeof *calls) ? realloc(reply->calls, bytes) : NULL;
        if (calls == NULL) {
            return di_fail(err, DI_ERR_MEMORY, "reply: no memory for %zu tool calls", cap);
        }
        reply->calls = calls;
        reply->cap_calls = cap;
    }
    di_reply_call *call = &reply->calls[reply->n_calls];
    *call = (di_reply_call){0};
    char prefix[DI_REPLY_ID_MAX];
    /* Two digits by the hosted service's form; a model that makes more than a hundred calls in one reply gets longer
     * ids. */
    snprintf(prefix, 20, "call_%02zu_", reply->n_calls % 1000000);
    di_reply_make_id(call->id, prefix, reply->seed, (uint64_t)reply->n_calls);
    di_strbuf_append(&call->name, event->text, event->len);
    reply->n_calls++;
    return di_strbuf_status(&call->name, err);
}

di_status di_reply_push(void *user, const di_parser_event *event, di_error *err) {
    di_reply *reply = user;
    switch (event->kind) {
    case DI_PARSER_REASONING:
        di_strbuf_append(&reply->reasoning, event->text, event->len);
        return di_strbuf_status(&reply->reasoning, err);
    case DI_PARSER_CONTENT:
        di_strbuf_append(&reply->content, event->text, event->len);
        return di_strbuf_status(&reply->content, err);
    case DI_PARSER_CALL_BEGIN:
        return add_call(reply, event, err);
    case DI_PARSER_CALL_ARGS: {
        DI_ASSERT(reply->n_calls > 0);
        di_strbuf *arguments = &reply->calls[reply->n_calls - 1].arguments;
        di_strbuf_append(arguments, event->text, event->len);
        return di_strbuf_status(arguments, err);
    }
    case DI_PARSER_CALL_END:
    case DI_PARSER_DONE:
        break;
    }
    return DI_OK;
}

/* Sets key to value on *object; on failure frees the object and makes it NULL, so that a chain of calls needs one
 * check. */
static void set_or_drop(di_json **object, const char *key, di_json *value) {
    if (*object == NULL) {
        di_json_free(value);
    } else if (!di_json_set(*object, key, value)) {
        di_json_free(*object);
        *object = NULL;
    }
}

static void append_or_drop(di_json **array, di_json *value) {
    if (*array == NULL) {
        di_json_free(value);
    } else if (!di_json_append(*array, value)) {
        di_json_free(*array);
        *array = NULL;
    }
}

/* The parts of both forms of a message that are the same; `calls` is taken over. */
static di_json *finish_message(di_json *message, const di_reply *reply, di_json *calls) {
    set_or_drop(&message, "content", di_reply_strbuf(&reply->content));
    if (reply->has_reasoning) {
        set_or_drop(&message, "reasoning_content", di_reply_strbuf(&reply->reasoning));
    }
    if (reply->n_calls > 0) {
        set_or_drop(&message, "tool_calls", calls);
    } else {
        di_json_free(calls);
    }
    return message;
}

di_json *di_reply_message(const di_reply *reply) {
    di_json *calls = di_json_new_array();
    for (size_t i = 0; i < reply->n_calls; i++) {
        const di_reply_call *call = &reply->calls[i];
        di_json *function =
            di_reply_object("name", di_reply_strbuf(&call->name), "arguments", di_reply_strbuf(&call->arguments), NULL);
        append_or_drop(&calls, di_reply_object("index", di_json_new_int((int64_t)i), "id", di_reply_string(call->id),
                                               "type", di_reply_string("function"), "function", function, NULL));
    }
    return finish_message(di_reply_object("role", di_reply_string("assistant"), NULL), reply, calls);
}

di_json *di_reply_parsed(const di_reply *reply) {
    di_json *calls = di_json_new_array();
    for (size_t i = 0; i < reply->n_calls; i++) {
        const di_reply_call *call = &reply->calls[i];
        append_or_drop(&calls, di_reply_object("name", di_reply_strbuf(&call->name), "arguments",
                                               di_reply_strbuf(&call->arguments), NULL));
    }
    return finish_message(di_json_new_object(), reply, calls);
}
