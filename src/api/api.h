/* The API layer: request bodies in, replies out, and the implementation of include/deepinfer/.
 *
 * Owns: reading a body of /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages or a line of `run --input`
 * into one di_request (conversation or prompts, sampling parameters, parser options), the refusals with their exact
 * texts, the defaults of our own behaviour and of the hosted service (`--vendor-compat`), and, in reply.h, results and
 * events. Leaves running a request to engine/, printing to cli/ and listening to server/.
 *
 * Ownership: a di_request owns an arena and the JSON that its parts point into. Everything that hangs off it (messages,
 * texts, stop strings, schemas) lives until di_request_deinit; nothing in it points at the caller's body text. One
 * request is used by one thread at a time. */
#ifndef DI_API_H
#define DI_API_H

#include "engine/sample/sample.h"
#include "text/text.h"

#include "constrain.h"
#include "line.h"
#include "reply.h"

typedef enum di_api_kind {
    DI_API_CHAT,       /* /v1/chat/completions */
    DI_API_RESPONSES,  /* /v1/responses */
    DI_API_MESSAGES,   /* /v1/messages */
    DI_API_LINE,       /* a line of `run --input`: `messages` as in chat, or `prompt`, or `prompt_token_ids` */
    DI_API_COMPLETIONS /* /v1/completions: one prompt or several, texts or ids */
} di_api_kind;

/* "chat", "responses", "messages", "line", "completions"; false for another name. */
bool di_api_kind_parse(const char *name, di_api_kind *kind);

/* What the sampler is asked to enforce, as the hosted service hands it on. */
typedef enum di_constraint_kind {
    DI_CONSTRAINT_NONE,
    DI_CONSTRAINT_JSON,              /* text: the schema, empty for any JSON */
    DI_CONSTRAINT_REGEX,             /* text: the expression */
    DI_CONSTRAINT_EBNF,              /* text: the grammar (our own field `ebnf`) */
    DI_CONSTRAINT_CHOICE,            /* text: a JSON array of strings (our own field `choice`) */
    DI_CONSTRAINT_TOOL_CALL,         /* text: the tool list; content or calls */
    DI_CONSTRAINT_TOOL_CALL_REQUIRED /* text: the tool list; calls only */
} di_constraint_kind;

/* How bodies are read. */
typedef struct di_request_options {
    bool vendor_compat;     /* the hosted service's defaults, clamps and refusals */
    int effort_default;     /* of requests that name neither thinking nor effort: 0 = no thinking, else 1..100 */
    bool require_reasoning; /* refuse a history with tools in thinking mode whose assistant messages lack reasoning */
    bool refuse_web_search; /* responses: refuse the server tool that is dropped otherwise */
    bool drop_server_tools; /* messages: drop the server tools that are refused otherwise */
    const char *model_name; /* vendor_compat: accepted beside the service's own names; may be NULL; borrowed */
    int64_t logprobs_max;   /* most alternatives a token that a request may ask for; DI_LOGPROBS_MAX unless set */
    di_sampling sampling;   /* defaults of fields that a request does not name (the command line's) */
    /* The format of requests that name none: JSON (a schema), REGEX or EBNF; text is borrowed. */
    di_constraint_kind format;
    di_chat_text format_text;
} di_request_options;

/* Our own behaviour (thinking off) or the hosted service's (thinking on, effort 75). */
void di_request_options_init(di_request_options *options, bool vendor_compat);

/* `none`, `low`, `high`, `max`, `1`..`100`, as of --reasoning: 0 for none, else the effort. DI_ERR_ARG otherwise. */
di_status di_effort_parse(const char *text, int *effort, di_error *err);

typedef enum di_input_kind { DI_INPUT_CHAT, DI_INPUT_TEXT, DI_INPUT_IDS } di_input_kind;

/* Why a body was refused, filled when di_request_parse fails. */
typedef enum di_refusal_kind {
    DI_REFUSAL_NONE,
    DI_REFUSAL_JSON,      /* not JSON, or not an object */
    DI_REFUSAL_BODY,      /* a field of the wrong type, or a name that does not exist */
    DI_REFUSAL_CONVERSION /* well-formed, and can't be done */
} di_refusal_kind;

/* One of the prompts of completions. */
typedef struct di_request_prompt {
    di_input_kind input; /* DI_INPUT_TEXT or DI_INPUT_IDS */
    di_chat_text text;   /* DI_INPUT_TEXT; may be empty: the begin mark alone */
    const int32_t *ids;  /* DI_INPUT_IDS, at least one */
    size_t n_ids;
} di_request_prompt;

/* A tool of a namespace, so that output names can be split back (responses). */
typedef struct di_namespace_tool {
    di_chat_text full, space, tool; /* "crm::lookup", "crm", "lookup" */
} di_namespace_tool;

/* What a body asks for. Zeroed storage is valid for di_request_deinit. Read-only after di_request_parse. */
typedef struct di_request {
    di_arena arena;    /* owned */
    di_json *body;     /* owned */
    di_json **schemas; /* arena array of owned values */
    size_t n_schemas, cap_schemas;

    di_api_kind api;
    bool vendor_compat;
    const di_json *id;  /* lines: the `id` as it came, NULL when absent; read even when the rest is refused */
    di_chat_text model; /* {NULL, 0} when absent: the server compares it */

    di_input_kind input;
    di_chat chat;       /* DI_INPUT_CHAT */
    di_chat_text text;  /* DI_INPUT_TEXT */
    const int32_t *ids; /* DI_INPUT_IDS */
    size_t n_ids;
    /* Completions: all prompts in order, the first of which is input, text and ids above too. Prompt p's sample j is
     * choice p * n + j. Other APIs: n_prompts 1, prompts NULL. */
    size_t n_prompts;
    const di_request_prompt *prompts;
    bool echo;           /* completions: the prompt's text comes in front of the answer's */
    bool is_echo_only;   /* max_tokens 0 with echo: sampling.max_tokens is 1, and that token is no part of the reply */
    bool is_without_bos; /* add_special_tokens false: text prompts get no begin mark */

    di_sampling sampling; /* complete: the request's fields over the options' defaults; max_tokens 0 = not named */
    bool has_temperature, has_top_p, has_top_k, has_max_tokens; /* named by the request (has_seed is in sampling) */
    int64_t n;                                                  /* completions asked for, >= 1 */
    const int32_t *forced;                                      /* [n_forced] the first output tokens, given */
    size_t n_forced;
    int32_t priority;        /* lower goes first */
    di_chat_text cache_salt; /* {NULL, 0} when absent, else not empty: who shares cached prefixes */
    di_chat_text caller;     /* {NULL, 0} when absent: who asks (`user`; of messages, metadata.user_id) */

    di_parser_options parse; /* how the output is to be parsed; its stop strings are sampling.stop */
    di_constraint_kind constraint;
    di_chat_text constraint_text;
    /* What content must match, also where tools make `constraint` a tool call's: NONE, JSON, REGEX, EBNF or CHOICE. */
    di_constraint_kind format_constraint;
    di_chat_text format_text;
    bool names_format;  /* also where it is plain text: then no default format applies */
    bool is_format_lax; /* of a schema, keywords that can't be guaranteed are left out instead of refused */

    bool is_stream, stream_usage;
    bool stream_counts; /* stream_options.continuous_usage_stats: with stream_usage, each chunk has the tokens so far */
    size_t n_images;
    const di_chat_part **images; /* in prompt order; a model without vision must refuse n_images > 0 */
    size_t n_namespace_tools;
    const di_namespace_tool *namespace_tools;

    /* On failure. */
    di_refusal_kind refusal;
    char param[96]; /* the offending field ("messages[2].tool_call_id"), "" when none is meant */
} di_request;

/* Reads a body. DI_ERR_REQUEST (or DI_ERR_MEMORY) with a message that can be sent to the client; refusal and param say
 * more. Call di_request_deinit in any case. */
di_status di_request_parse(di_request *request, di_api_kind api, const char *body, size_t len,
                           const di_request_options *options, di_error *err);
void di_request_deinit(di_request *request);

/* Renders the request (DI_INPUT_CHAT by the chat format, DI_INPUT_TEXT as it is) into prompt (may be NULL) and appends
 * its ids (ids may be NULL): chat input by the chat vocabulary, text with added tokens recognised and one BOS in front
 * (none where is_without_bos), ids as given. tok and vocab may be NULL when ids is. */
di_status di_request_encode(const di_request *request, const di_tokenizer *tok, const di_chat_vocab *vocab,
                            di_prompt *prompt, di_ids *ids, di_error *err);

/* The same of prompt prompt_idx, below request->n_prompts; the function above is that of 0. */
di_status di_request_encode_prompt(const di_request *request, size_t prompt_idx, const di_tokenizer *tok,
                                   const di_chat_vocab *vocab, di_prompt *prompt, di_ids *ids, di_error *err);

/* How many tokens may be generated after n_prompt tokens in a context of n_context: what the request names, else the
 * default (chat: 8192, with thinking 65536, at effort 100 131072; other prompts: 8192) or min_tokens where that is
 * more, cut to what the context leaves, at least 1. */
int64_t di_request_max_tokens(const di_request *request, int64_t n_prompt, int64_t n_context);

/* Appends the error object of a refused body: {"message", "type", "param", "code"}. */
void di_request_error_json(di_strbuf *out, const di_request *request, di_status status, const di_error *err);

/* Appends the whole body of an answer with an HTTP status of 400 or more, in the form of the API's family: Anthropic's
 * for DI_API_MESSAGES, {"type": "error", "error": {"type", "message"}, "request_id"}, else OpenAI's, {"error":
 * {"message", "type", "param", "code"}}. param: the field that is meant, NULL or "" for none (always, where the hosted
 * service is imitated); with 404 and "model" it is the model that is unknown; with 400 and "thread" Anthropic's form
 * says by a code that conversations are not kept. request_id: NULL for none. */
void di_api_error_json(di_strbuf *out, di_api_kind api, int http_status, const char *message, const char *param,
                       const char *request_id);

#include "serving.h"

#endif
