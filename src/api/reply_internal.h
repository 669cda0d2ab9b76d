/* The inside of reply streams: the state that all three APIs share and the table of what each does with an event.
 *
 * reply.c gathers messages, reply_stream.c owns the life of a stream and chat completions, reply_responses.c and
 * reply_messages.c hold the other two APIs. Values are built with di_reply_object, which fails as a whole. */
#ifndef DI_REPLY_INTERNAL_H
#define DI_REPLY_INTERNAL_H

#include "reply.h"

/* What one API does. Each function sends its events through di_reply_send. */
typedef struct di_reply_ops {
    di_status (*start)(di_reply_stream *s, di_error *err);
    di_status (*reasoning)(di_reply_stream *s, const char *text, size_t len, di_error *err);
    di_status (*content)(di_reply_stream *s, const char *text, size_t len, di_error *err);
    di_status (*call_begin)(di_reply_stream *s, di_error *err); /* of the last call of s->reply, as all about calls */
    di_status (*call_args)(di_reply_stream *s, const char *text, size_t len, di_error *err);
    di_status (*call_end)(di_reply_stream *s, bool is_cut, di_error *err);
    di_status (*finish)(di_reply_stream *s, di_error *err);
    di_status (*fail)(di_reply_stream *s, di_status status, const char *message, di_error *err);
    di_json *(*response)(const di_reply_stream *s);
} di_reply_ops;

extern const di_reply_ops di_reply_chat_ops, di_reply_responses_ops, di_reply_messages_ops;

/* The part of the output that is open: a content block (messages), an output item (Responses). */
typedef enum di_reply_part { DI_REPLY_NO_PART, DI_REPLY_REASONING, DI_REPLY_TEXT, DI_REPLY_CALL } di_reply_part;

struct di_reply_stream {
    const di_reply_ops *ops;
    di_reply_head head;
    di_reply_sink sink;
    void *user;
    di_reply reply;     /* everything so far */
    di_reply_part part; /* open */
    int64_t n_parts;    /* begun */
    bool is_finished;
    di_finish finish;
    bool has_stop_text;
    di_strbuf stop_text; /* the stop string that was found */
    bool has_usage;
    di_reply_usage usage;
    di_json *logprobs_new; /* chat: owned; of tokens not yet sent, NULL = none */
    di_json *logprobs;     /* chat: owned; of all tokens, NULL = not asked for */
    int64_t n_sent;        /* Responses: the next sequence number */
    int64_t completed_s;
    char item_id[DI_REPLY_ID_MAX]; /* Responses: of the open item */
    uint64_t n_item_ids;
    di_json *items;      /* Responses: owned; array of the finished items */
    const char *failure; /* Responses: why the run failed, during di_reply_stream_fail */
};

/* An object of (key, di_json *) pairs up to a NULL key; takes the values over. NULL when memory is short or a value is
 * NULL. */
di_json *di_reply_object(const char *key, ...) __attribute__((sentinel));
/* An array of one value, which it takes over. */
di_json *di_reply_array_of(di_json *value);
/* Strings, as di_json_new_string makes them. */
di_json *di_reply_string(const char *text);
di_json *di_reply_strbuf(const di_strbuf *text);

/* Sends data, which it takes over; NULL is DI_ERR_MEMORY. Without a sink it only frees. */
di_status di_reply_send(di_reply_stream *s, const char *event, di_json *data, di_error *err);

/* Writes `prefix` and 24 random letters and digits, by (seed, n) alone. */
void di_reply_make_id(char out[DI_REPLY_ID_MAX], const char *prefix, uint64_t seed, uint64_t n);

/* The last call. */
const di_reply_call *di_reply_last_call(const di_reply_stream *s);

#endif
