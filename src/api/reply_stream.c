/* The life of a reply stream: opening, events of the parser, the end; what each API makes of them is behind its table.
 *
 * Everything that comes is gathered as a message first, so that the response object can be made at the end, with a sink
 * or without one. Pieces of text and server-sent events are reply_sse.c's, log-probabilities reply_logprobs.c's. */
#include "reply_internal.h"

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
        [DI_REPLY_COMPLETIONS] = &di_reply_completions_ops,
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
    di_strbuf_deinit(&s->frame.text);
    di_strbuf_deinit(&s->released);
    free(s);
}

di_status di_reply_stream_start(di_reply_stream *s, const di_reply_usage *usage, di_error *err) {
    s->usage = *usage;
    s->usage.completion_tokens = 0;
    return s->ops->start(s, err);
}

di_status di_reply_stream_push(void *user, const di_parser_event *event, di_error *err) {
    di_reply_stream *s = user;
    if (s->head.is_echo_only) {
        return DI_OK;
    }
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

di_json *di_reply_with_seed(const di_reply_stream *s, di_json *object) {
    if (object == NULL || !s->has_seed || !s->head.has_details ||
        di_json_set(object, "seed", di_json_new_uint(s->seed))) {
        return object;
    }
    di_json_free(object);
    return NULL;
}

void di_reply_stream_count(di_reply_stream *s, int64_t n_tokens) {
    s->usage.completion_tokens = n_tokens;
}

void di_reply_stream_seed(di_reply_stream *s, uint64_t seed) {
    s->has_seed = true;
    s->seed = seed;
}

di_status di_reply_stream_finish(di_reply_stream *s, di_finish finish, const di_chat_text *stop_text,
                                 const di_reply_usage *usage, int64_t completed_s, di_error *err) {
    DI_ASSERT(!s->is_finished);
    s->is_finished = true;
    s->finish = s->head.is_echo_only ? DI_FINISH_LENGTH : finish;
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
