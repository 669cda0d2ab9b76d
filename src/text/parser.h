/* The parser of the model's output (chat.md 9) and the matcher of stop strings.
 *
 * A state machine over bytes: decoded text goes in by chunks cut anywhere, events come out, and neither their order nor
 * their joined texts depend on the cuts. Text that may be the start of a marker waits until it is decided. Memory grows
 * with what waits (a marker, a run of line feeds, a stop string), not with what has passed.
 * Turning events into messages and protocol events is api/'s business (api/reply.h). */
#ifndef DI_PARSER_H
#define DI_PARSER_H

#include "base/base.h"

#include "chat.h"

/* Why an output ended. The engine knows NONE (cut off), STOP (end of text or a stop string), LENGTH, CONTENT_FILTER,
 * ABORT and ERROR; TOOL_CALLS is the parser's. */
typedef enum di_finish {
    DI_FINISH_NONE,
    DI_FINISH_STOP,
    DI_FINISH_LENGTH,
    DI_FINISH_CONTENT_FILTER,
    DI_FINISH_TOOL_CALLS,
    DI_FINISH_ABORT,
    DI_FINISH_ERROR
} di_finish;
/* "stop", "length", "content_filter", "tool_calls", "abort", "error"; "stop" for DI_FINISH_NONE. */
const char *di_finish_name(di_finish finish);
/* The value of a name; false for another one. */
bool di_finish_parse(const char *name, di_finish *finish);

/* Several stop strings at once over streamed text (Aho-Corasick). The first that is complete wins; of those that end at
 * the same byte the one listed first. Bytes that may be the start of a stop string are held back: always the longest
 * suffix of the text that is a prefix of one. Usable alone, for plain prompts. Zeroed storage is a valid matcher
 * without strings. */
typedef struct di_stop_node di_stop_node;
typedef struct di_stop_matcher {
    di_stop_node *nodes; /* owned; the strings as a trie with the root first */
    size_t n_nodes;
    char *bytes;  /* owned: the strings one after another */
    size_t node;  /* where the text so far leads; the path to it is what is held back */
    size_t found; /* 1 + index of the stop string that was found, 0 = none yet */
} di_stop_matcher;

/* Copies what it needs; empty strings are ignored but counted in the indices. n_stop = 0 is fine. */
di_status di_stop_matcher_init(di_stop_matcher *m, const char *const *stop, const size_t *stop_len, size_t n_stop,
                               di_error *err);
void di_stop_matcher_deinit(di_stop_matcher *m);
void di_stop_matcher_reset(di_stop_matcher *m); /* for a new text */
/* Appends to out what is decided by now. Returns true when a stop string is complete: out then has all text before it,
 * the rest is dropped, as is everything pushed later. */
bool di_stop_matcher_push(di_stop_matcher *m, const char *text, size_t len, di_strbuf *out);
/* End of the text: appends what was held back. */
void di_stop_matcher_finish(di_stop_matcher *m, di_strbuf *out);
int64_t di_stop_matcher_hit(const di_stop_matcher *m); /* index of the stop string that was found, -1 = none */

typedef struct di_parser_options {
    di_chat_stage stage;
    bool has_tools;       /* tools are offered: call blocks are parsed */
    bool starts_in_calls; /* the prompt ended inside the block (tool choice `required`); stage is then ignored */
    bool is_json;         /* JSON mode: content is the JSON value alone, each run of text around it one space */
    size_t n_stop;        /* stop strings, for content only; borrowed during di_parser_create */
    const char *const *stop;
    const size_t *stop_len;
} di_parser_options;

typedef enum di_parser_event_kind {
    DI_PARSER_REASONING,  /* text */
    DI_PARSER_CONTENT,    /* text */
    DI_PARSER_CALL_BEGIN, /* call_id, text = the name */
    DI_PARSER_CALL_ARGS,  /* call_id, text = the next piece of the arguments' JSON text */
    DI_PARSER_CALL_END,   /* call_id; every call that began ends, at the latest before DONE */
    DI_PARSER_DONE        /* once, by a stop string or di_parser_finish */
} di_parser_event_kind;

/* One event; text is never empty but for a call's empty name, and borrowed for the call of the sink. Texts are cut only
 * between characters, so that well-formed input gives well-formed pieces. */
typedef struct di_parser_event {
    di_parser_event_kind kind;
    int64_t call_id; /* from 0; -1 for events that are not of a call */
    const char *text;
    size_t len;
    bool is_cut; /* CALL_END: the output ended inside the call */
} di_parser_event;

/* A status other than DI_OK ends the parse and is what push or finish return. */
typedef di_status (*di_parser_sink)(void *user, const di_parser_event *event, di_error *err);

typedef struct di_parser di_parser;

di_status di_parser_create(di_parser **out, const di_parser_options *options, di_parser_sink sink, void *user,
                           di_error *err);
void di_parser_destroy(di_parser *p); /* NULL is fine */
/* Takes the next chunk. After a stop string (di_parser_is_done) text is ignored. DI_ERR_MEMORY or the sink's status;
 * the parser can only be destroyed then. */
di_status di_parser_push(di_parser *p, const char *text, size_t len, di_error *err);
/* End of the output: releases what waits, ends an open call, emits DONE. Further calls do nothing. */
di_status di_parser_finish(di_parser *p, di_error *err);

bool di_parser_is_done(const di_parser *p);      /* a stop string was found, or finish was called */
bool di_parser_is_reasoning(const di_parser *p); /* the next byte would be reasoning: for counting reasoning tokens */
int64_t di_parser_stop_hit(const di_parser *p);  /* index of the stop string that was found, -1 = none */
int64_t di_parser_n_calls(const di_parser *p);   /* calls announced so far */
/* The reason to report, given the engine's: a stop string gives STOP; STOP with calls gives TOOL_CALLS; NONE gives
 * STOP; others pass. */
di_finish di_parser_finish_reason(const di_parser *p, di_finish engine);

#endif
