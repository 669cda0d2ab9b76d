/* What the readers of request bodies share: refusals that name their field, typed getters, growing lists in the
 * request's arena, and the fields that all APIs have in common.
 *
 * A reader function returns DI_OK or the status to hand on; a refusal has then been recorded in the request. Absent
 * fields and `null` are the same thing, as clients send both. */
#ifndef DI_REQUEST_INTERNAL_H
#define DI_REQUEST_INTERNAL_H

#include "api.h"

/* A list in an arena that doubles as it grows; the old copies stay in the arena until the request ends. */
typedef struct di_list {
    void *items;
    size_t n, cap;
} di_list;

typedef struct di_reader {
    di_request *req;
    const di_request_options *options;
    di_error *err;
    const char *text; /* the body as it came, for numbers beyond 64 bits */
    size_t len;
    di_list messages; /* of di_chat_message */
    di_list images;   /* of const di_chat_part * */
    di_list tools;    /* of di_chat_tool */
    di_list spaces;   /* of di_namespace_tool */
} di_reader;

/* A field's place in the body, for refusals: di_place("messages[%zu]", i).text. */
typedef struct di_place {
    char text[96];
} di_place;
di_place di_place_of(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* The body has a field of the wrong type or a name that does not exist. */
di_status di_refuse_body(di_reader *r, const char *param, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The body is well-formed and can't be done. */
di_status di_refuse(di_reader *r, const char *param, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
di_status di_reader_no_memory(di_reader *r);

/* One more zeroed item at the end of a list; NULL when memory is short. */
void *di_list_add(di_reader *r, di_list *list, size_t item_bytes);
/* A string buffer's text copied into the arena (and the buffer freed). */
di_status di_reader_keep(di_reader *r, di_strbuf *sb, di_chat_text *out);
/* A value that the request frees; NULL is short memory. */
di_status di_reader_own(di_reader *r, di_json *value);
di_chat_text di_text_of(const di_json *string); /* {NULL, 0} when it is not a string */
bool di_text_is(di_chat_text text, const char *s);

/* Getters of object[key]; `at` is the object's place ("" at the top). *has (may be NULL) tells whether it is there;
 * outputs are untouched when it is not. need_*: absent is a refusal. */
di_status di_read_object(di_reader *r, const di_json *object, const char *at, const char *key, const di_json **out);
di_status di_read_array(di_reader *r, const di_json *object, const char *at, const char *key, const di_json **out);
di_status di_read_string(di_reader *r, const di_json *object, const char *at, const char *key, di_chat_text *out,
                         bool *has);
di_status di_need_string(di_reader *r, const di_json *object, const char *at, const char *key, di_chat_text *out);
di_status di_read_bool(di_reader *r, const di_json *object, const char *at, const char *key, bool *out, bool *has);
di_status di_read_number(di_reader *r, const di_json *object, const char *at, const char *key, double *out, bool *has);
/* An integer; beyond int64_t it is clamped to INT64_MAX. */
di_status di_read_int(di_reader *r, const di_json *object, const char *at, const char *key, int64_t *out, bool *has);
/* A list of token ids, which is at `at`. */
di_status di_read_token_ids(di_reader *r, const di_json *list, const char *at, const int32_t **out, size_t *n);
/* The value must be an object. */
di_status di_need_object(di_reader *r, const di_json *value, const char *at);

/* Names of the fields that mean the same in all APIs. */
typedef struct di_field_names {
    const char *max_tokens;
    const char *max_tokens_alias; /* read where max_tokens is absent; may be NULL */
    const char *stop;             /* may be NULL */
} di_field_names;
extern const di_field_names di_chat_field_names; /* of chat and of plain prompts */
/* temperature ... stream into req; the hosted service's clamps come with di_finish_request. */
di_status di_read_sampling(di_reader *r, const di_json *body, const di_field_names *names);
/* thinking (an object or NULL) and effort (a name or number, or NULL) with their places, into req->chat. flag: 1 or 0
 * where thinking is switched on or off by something that only counts without the object, else -1. */
di_status di_read_thinking(di_reader *r, const di_json *thinking, const di_json *effort, const char *effort_at,
                           int flag);
/* `model`, which the hosted service compares. */
di_status di_read_model(di_reader *r, const di_json *body);
/* regex, ebnf and choice: our own fields, beside response_format. */
di_status di_read_own_constraints(di_reader *r, const di_json *body);
/* `response_format`, or one of the fields above. */
di_status di_read_response_format(di_reader *r, const di_json *body);
/* An object with `type` text, json_object, json_schema or regex; nested: json_schema has its schema one level deeper.
 */
di_status di_read_format(di_reader *r, const di_json *format, const char *at, bool is_nested);
di_status di_read_detail(di_reader *r, const di_json *object, const char *at, di_chat_detail *detail);

/* Adds an image part's record (images are listed in prompt order). */
di_status di_add_image(di_reader *r, const di_chat_part *part);
/* Adds a tool to the list; di_apply_tool_choice checks that names are unique. */
di_status di_add_tool(di_reader *r, const di_chat_tool *tool);
/* Reads {name, description, <parameters_key>, strict, defer_loading} into tool, with the checks of name and parameters.
 */
di_status di_read_function(di_reader *r, const di_json *function, const char *at, const char *parameters_key,
                           di_chat_tool *tool);
/* Applies a tool choice to the tools; name is set for a named one. Ignored without tools. */
di_status di_apply_tool_choice(di_reader *r, di_chat_tool_choice choice, const di_chat_text *name);

/* Checks that every call has exactly one result right after it, in the words of the API. */
di_status di_check_results(di_reader *r);
/* The hosted service's rule on json_object: some message must have the word; `at` is the format's place. */
di_status di_check_json_word(di_reader *r, const char *at);
/* options.require_reasoning: see there. */
di_status di_check_reasoning(di_reader *r);
/* Completes req from what was read: clamps, constraints, parser options. */
di_status di_finish_request(di_reader *r);

di_status di_read_chat(di_reader *r, const di_json *body);
di_status di_read_line(di_reader *r, const di_json *body);
di_status di_read_responses(di_reader *r, const di_json *body);
di_status di_read_messages(di_reader *r, const di_json *body);
di_status di_read_completions(di_reader *r, const di_json *body);

#endif
