/* Replies: parser events turned into messages, and into the response objects and stream events of the four APIs.
 *
 * di_reply gathers one output as a message. di_reply_stream does the same and, as events come in, hands out the events
 * of one API: chunks of chat completions and completions, named events of Responses and of Anthropic messages. Both are
 * sinks of di_parser. What is sent is JSON values for a sink of the caller's; di_reply_sse_sink writes them as
 * server-sent events, and pieces of text then without making values. Ids of calls and items are drawn from a seed, so
 * that a reply can be made again. */
#ifndef DI_REPLY_H
#define DI_REPLY_H

#include "engine/sample/sample.h"
#include "text/text.h"

/* ---- one output as a message ---- */

enum { DI_REPLY_ID_MAX = 48 };

/* Writes `prefix` and 24 random letters and digits, by (seed, n) alone. */
void di_reply_make_id(char out[DI_REPLY_ID_MAX], const char *prefix, uint64_t seed, uint64_t n);

typedef struct di_reply_call {
    char id[DI_REPLY_ID_MAX]; /* call_NN_ and 24 random characters */
    di_strbuf name, arguments;
} di_reply_call;

/* Zeroed storage is a valid empty reply without reasoning. */
typedef struct di_reply {
    bool has_reasoning; /* thinking is on: the message has reasoning_content, empty or not */
    uint64_t seed;      /* of the ids */
    di_strbuf reasoning, content;
    di_reply_call *calls; /* owned */
    size_t n_calls, cap_calls;
} di_reply;

/* seed: di_random_u64() of the caller. */
void di_reply_init(di_reply *reply, bool has_reasoning, uint64_t seed);
void di_reply_deinit(di_reply *reply);
/* Takes an event; a di_parser_sink whose user is the reply. */
di_status di_reply_push(void *reply, const di_parser_event *event, di_error *err);

/* The `message` of chat completions: role, content ("" when there are only calls), reasoning_content (thinking on),
 * tool_calls (when there are any) with index, id, type, function. A new value; ill-formed UTF-8 as U+FFFD. NULL when
 * memory is short. */
di_json *di_reply_message(const di_reply *reply);
/* The message as `parse` prints it: content, reasoning_content and tool_calls of name and arguments, and nothing
 * random. */
di_json *di_reply_parsed(const di_reply *reply);

/* ---- one output as events of an API ---- */

typedef enum di_reply_protocol {
    DI_REPLY_CHAT,       /* /v1/chat/completions */
    DI_REPLY_RESPONSES,  /* /v1/responses */
    DI_REPLY_MESSAGES,   /* /v1/messages */
    DI_REPLY_COMPLETIONS /* /v1/completions: the text comes as DI_PARSER_CONTENT events, there are no others */
} di_reply_protocol;

typedef struct di_reply_usage {
    int64_t prompt_tokens, completion_tokens;
    int64_t cached_tokens;    /* of the prompt */
    int64_t reasoning_tokens; /* of the completion */
    int64_t accepted_tokens;  /* drafts that became part of the completion */
    int64_t rejected_tokens;  /* drafts that were verified in vain */
} di_reply_usage;

/* What a response says about its request; borrowed for the stream's life. */
typedef struct di_reply_head {
    const char *id; /* of the response: "chatcmpl-...", "cmpl-...", "resp_...", "msg_..." */
    const char *model;
    int64_t created_s;      /* Unix time */
    bool has_reasoning;     /* thinking is on */
    bool has_chunk_usage;   /* chat, completions: stream_options.include_usage, every chunk has the key `usage` */
    bool has_running_usage; /* chat, completions: it says what there is by then, by di_reply_stream_count */
    /* usage says all that clients' types have: chat, completions: completion_tokens_details (reasoning, drafts);
     * Responses: cache_write_tokens, which is 0. And the end of a sample names its seed. */
    bool has_details;
    bool is_echo_only;      /* completions: di_request's; what comes behind the echo is left out */
    int64_t choice_id;      /* chat, completions: index of the choice */
    uint64_t seed;          /* of call and item ids */
    const di_json *request; /* Responses: the body, whose fields the response repeats; else NULL */
} di_reply_head;

/* Takes an event to send: its name (NULL in chat completions and completions) and data, borrowed for the call. data
 * NULL is the terminal line `[DONE]` of these two. */
typedef di_status (*di_reply_sink)(void *user, const char *event, const di_json *data, di_error *err);

/* A sink whose user is a di_strbuf: appends the event as a server-sent one, `event: NAME` where it has a name, `data: `
 * and the JSON or `[DONE]`, and an empty line. A stream that is created with this very function writes pieces of text
 * (the bulk of any stream) straight into the buffer, byte for byte as the values would be. DI_ERR_MEMORY when the
 * buffer has failed. */
di_status di_reply_sse_sink(void *strbuf, const char *event, const di_json *data, di_error *err);

typedef struct di_reply_stream di_reply_stream;

/* sink may be NULL: then the stream only gathers for di_reply_stream_response. */
di_status di_reply_stream_create(di_reply_stream **out, di_reply_protocol protocol, const di_reply_head *head,
                                 di_reply_sink sink, void *user, di_error *err);
void di_reply_stream_destroy(di_reply_stream *s); /* NULL is fine */

/* The opening events, once the prompt's tokens are known (completion_tokens is not read). */
di_status di_reply_stream_start(di_reply_stream *s, const di_reply_usage *usage, di_error *err);
/* Takes an event; a di_parser_sink whose user is the stream. */
di_status di_reply_stream_push(void *s, const di_parser_event *event, di_error *err);
/* Log-probabilities of one output token, before the push of the text that it brings: the token's own and those of the
 * n_top likeliest (entries with token -1 are not there). They go with the next piece of text or the last chunk; chat:
 * {token, logprob, bytes, top_logprobs}; completions: the legacy lists; Responses: into the text's deltas and part,
 * where the request asked for it by `include`, and not those of reasoning, calls and marks; messages: nothing. The
 * response object has those of all tokens; in chat and completions only without a sink, as they are many times larger
 * than the text. tok is used until the stream ends. */
di_status di_reply_stream_token(di_reply_stream *s, const di_tokenizer *tok, int32_t token, float logprob,
                                const di_logprob *top, int32_t n_top, di_error *err);
/* Completions' `echo`, before anything else: the prompt's text, without a begin mark at its start, and, unless logprobs
 * is NULL, the log-probabilities of its tokens: logprobs [n_ids] with NaN (null) for the first, top [n_ids, n_top] or
 * NULL. Sent as the first chunk. */
di_status di_reply_stream_echo(di_reply_stream *s, const di_tokenizer *tok, const int32_t *ids, size_t n_ids,
                               const float *logprobs, const di_logprob *top, int32_t n_top, di_error *err);
/* Tokens of the output so far, for has_running_usage. */
void di_reply_stream_count(di_reply_stream *s, int64_t n_tokens);
/* The seed that the sample's tokens were drawn with, which the choice (chat, completions), the response (Responses), or
 * the message and its last delta (messages) then name (has_details). */
void di_reply_stream_seed(di_reply_stream *s, uint64_t seed);
/* The closing events. finish is di_parser_finish_reason's; stop_text the stop string that was found, else NULL;
 * completed_s the time (Responses). usage NULL: another choice of the same response still runs, so neither usage nor
 * `[DONE]`. */
di_status di_reply_stream_finish(di_reply_stream *s, di_finish finish, const di_chat_text *stop_text,
                                 const di_reply_usage *usage, int64_t completed_s, di_error *err);
/* The events that end a stream whose run failed; nothing may follow. */
di_status di_reply_stream_fail(di_reply_stream *s, di_status status, const char *message, di_error *err);

/* The complete response object, after finish. A new value, NULL when memory is short. */
di_json *di_reply_stream_response(const di_reply_stream *s);
/* The response object of chat completions or completions with several choices, in the order given; all streams are of
 * one of these two protocols. */
di_json *di_reply_choices_response(const di_reply_stream *const *choices, size_t n_choices,
                                   const di_reply_usage *usage);

/* Type of a status in error objects of chat completions and Responses: "invalid_request_error" for what the request
 * asks, "rate_limit_error" when busy, "server_error" for the rest. */
const char *di_status_error_type(di_status status);

#endif
