/* The inside of reply streams: the state that all four APIs share and the table of what each does with an event.
 *
 * reply.c gathers messages, reply_stream.c owns the life of a stream, reply_sse.c writes pieces of text,
 * reply_logprobs.c makes values of log-probabilities; reply_chat.c holds chat completions and completions,
 * reply_responses.c and reply_messages.c the other two APIs. Values are built with di_reply_object, which fails as a
 * whole. */
#ifndef DI_REPLY_INTERNAL_H
#define DI_REPLY_INTERNAL_H

#include "reply.h"

/* What a body of Responses names in `include` to get log-probabilities. */
#define DI_INCLUDE_LOGPROBS "message.output_text.logprobs"

/* The part of the output that is open: a content block (messages), an output item (Responses). */
typedef enum di_reply_part { DI_REPLY_NO_PART, DI_REPLY_REASONING, DI_REPLY_TEXT, DI_REPLY_CALL } di_reply_part;

/* What differs between the events of two pieces of one text. */
typedef struct di_reply_piece {
    di_json *text;
    di_json *logprobs; /* NULL: none */
    int64_t number;    /* Responses: the event's place in the sequence */
} di_reply_piece;

/* A token with its log-probabilities. */
typedef struct di_reply_token {
    const di_tokenizer *tok;
    int32_t token;
    float logprob; /* NaN: there is none */
    const di_logprob *top;
    int32_t n_top;
} di_reply_token;

/* What one API does. Each function sends its events through di_reply_send, texts through di_reply_send_piece. */
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
    /* The event of a piece of the text of a part (of a call: its arguments) and its name; takes the piece's values
     * over. Any two pieces of a part that is open give the same bytes but for text and number, which comes behind the
     * text. */
    di_json *(*piece)(const di_reply_stream *s, di_reply_part part, const di_reply_piece *piece, const char **event);
    /* Keeps a token's log-probabilities; NULL: the API has none. */
    di_status (*token)(di_reply_stream *s, const di_reply_token *token, di_error *err);
    /* Of chat completions and completions: the choice of a response, and what responses and chunks are called. */
    di_json *(*choice)(const di_reply_stream *s);
    const char *object, *chunk_object;
} di_reply_ops;

extern const di_reply_ops di_reply_chat_ops, di_reply_responses_ops, di_reply_messages_ops, di_reply_completions_ops;

/* The event of a piece of text as it is written, made once for a part: all bytes but the text and the number. */
typedef struct di_reply_frame {
    di_strbuf text;   /* owned */
    size_t text_at;   /* where the text belongs */
    size_t number_at; /* where the number belongs; 0: there is none */
    bool is_ready;
    di_reply_part part; /* whose it is, with what tells two parts of one kind apart */
    int64_t n_parts;
    size_t n_calls;
} di_reply_frame;

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
    bool has_seed; /* the seed of the tokens is named where the sample ends */
    uint64_t seed;
    di_reply_usage usage;
    di_json *logprobs_new; /* owned; of tokens whose text is not sent yet, NULL = none */
    di_json *logprobs;     /* owned; what goes into the response, NULL = none. Completions: an object of lists, else a
                              list of objects */
    di_reply_frame frame;
    di_detokenizer places; /* completions: where tokens begin in the text */
    bool has_places;
    int64_t n_chars;    /* completions: characters so far, by the tokens */
    di_strbuf released; /* completions: scratch of places */
    int64_t n_sent;     /* Responses: the next sequence number */
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
/* What tells of the sample's end, with its seed where there is one to be named; taken over, NULL stays NULL. */
di_json *di_reply_with_seed(const di_reply_stream *s, di_json *object);
/* Strings, as di_json_new_string makes them. */
di_json *di_reply_string(const char *text);
di_json *di_reply_strbuf(const di_strbuf *text);

/* Sends data, which it takes over; NULL is DI_ERR_MEMORY. Without a sink it only frees. */
di_status di_reply_send(di_reply_stream *s, const char *event, di_json *data, di_error *err);

/* Sends a piece of the text of a part that is open, with the log-probabilities that wait. */
di_status di_reply_send_piece(di_reply_stream *s, di_reply_part part, const char *text, size_t len, di_error *err);

/* A token as {token, logprob, bytes, top_logprobs}. */
di_json *di_reply_token_json(const di_reply_token *token);
/* Appends the token to the four lists of *lists, made when it is NULL: text_offset, token_logprobs, tokens,
 * top_logprobs. False when memory is short. */
bool di_reply_token_lists(di_json **lists, const di_reply_token *token, int64_t text_offset);
/* Appends references to the elements of `from` (NULL: none) to *to, made when it is NULL. */
bool di_reply_extend(di_json **to, const di_json *from);

/* The last call. */
const di_reply_call *di_reply_last_call(const di_reply_stream *s);

#endif
