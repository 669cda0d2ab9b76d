/* Server-sent events as a client reads them, and what a chunk of a streamed answer says.
 *
 * The parser takes bytes in whatever pieces they come and hands out whole events; it follows the event stream format of
 * the HTML standard. Chunks are looked through for the few keys that a measurement needs instead of being parsed: a
 * client that shares its processors with the server must cost little. Private to cli/, without libcurl. */
#ifndef DI_CLI_BENCH_SSE_H
#define DI_CLI_BENCH_SSE_H

#include "base/base.h"

/* One event: its name ("message" where it has none) and its data, which are borrowed for the call. The data ends with
 * NUL. Another status than DI_OK ends the feed with it. */
typedef di_status (*di_sse_callback)(void *user, const char *name, const char *data, size_t len, di_error *err);

enum { DI_SSE_NAME_MAX = 64, DI_SSE_EVENT_MAX = 16 << 20 }; /* bytes */

/* A stream. Zeroed storage with callback and user set is one at its start. */
typedef struct di_sse {
    di_sse_callback callback;
    void *user;
    di_strbuf line;             /* owned: the beginning of a line whose end has not come */
    di_strbuf data;             /* owned: lines of the event so far, each with a line feed behind */
    char name[DI_SSE_NAME_MAX]; /* "" until the event has one; a longer one is cut */
    bool has_data, is_behind_cr, is_begun;
} di_sse;

void di_sse_deinit(di_sse *sse);
void di_sse_reset(di_sse *sse); /* a new stream in the same memory */
/* DI_ERR_MEMORY; DI_ERR_FORMAT for an event of more than DI_SSE_EVENT_MAX bytes; what the callback returns. An event
 * that the stream ends within is dropped, as the format asks. */
di_status di_sse_feed(di_sse *sse, const char *bytes, size_t n, di_error *err);

/* What a chunk of /v1/chat/completions or /v1/completions says. */
typedef struct di_sse_chunk {
    bool is_end;           /* "[DONE]" */
    bool is_error;         /* an object with "error" */
    bool has_text;         /* text that is not empty, or pieces of a call */
    int64_t prompt_tokens; /* of the usage; -1: not there */
    int64_t output_tokens; /* likewise */
} di_sse_chunk;

/* Reads the data of an event, JSON text in one object, or "[DONE]". In JSON a quotation mark within a string has a
 * backslash before it, so that `"content"` with a colon behind is that key and nothing else. */
void di_sse_chunk_read(const char *data, size_t len, di_sse_chunk *out);

#endif
