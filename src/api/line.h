/* Results of `run --input`: one JSON object a line (interface.md, A result line).
 *
 * Request lines are read by di_request_parse with DI_API_LINE; here are what such a request hands to the engine and
 * what comes back as text. Included by api.h. */
#ifndef DI_API_LINE_H
#define DI_API_LINE_H

#include "engine/engine.h"

typedef struct di_request di_request;
typedef struct di_reply di_reply;

/* DI_ERR_REQUEST when the request asks for something that the engine doesn't do yet; the message names it. */
di_status di_line_check(const di_request *request, di_error *err);

/* Appends the result of a request that ran, with a line feed. reply: its message, NULL for prompts without messages. */
void di_line_result(di_strbuf *out, const di_request *request, const di_generation *gen, const di_reply *reply);
/* Appends the result of a line that was refused: no text, no tokens, the error. */
void di_line_error(di_strbuf *out, const di_request *request, di_status status, const di_error *err);

#endif
