/* Text: the tokenizer of a checkpoint, usable without its model.
 *
 * A tokenizer is read-only after opening: any number of threads may use one. Texts are bytes with a length and may hold
 * NUL; input that is not well-formed UTF-8 is repaired first (U+FFFD for each maximal ill-formed subpart), output
 * always is well-formed. What a function gives to the caller by a pointer to pointer is released by di_free, objects by
 * the function that is named beside them. On failure outputs are untouched. */
#ifndef DEEPINFER_TEXT_H
#define DEEPINFER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "deepinfer/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Releases memory that a function of this library gave away; NULL is fine. */
DI_API void di_free(void *memory);

/* ---- tokenizer ----------------------------------------------------------------------------------------------------
 */

typedef struct di_tokenizer di_tokenizer;

/* Reads a tokenizer.json. DI_ERR_NOT_FOUND or DI_ERR_IO for the file, DI_ERR_FORMAT for what is damaged or missing in
 * it, DI_ERR_UNSUPPORTED for a pipeline other than byte-level BPE with isolated splits. Released by di_tokenizer_close.
 */
DI_API di_status di_tokenizer_open(di_tokenizer **out, const char *path, di_error *err);
/* The same from the bytes of the file, which are not needed afterwards. */
DI_API di_status di_tokenizer_parse(di_tokenizer **out, const char *text, size_t len, di_error *err);
DI_API void di_tokenizer_close(di_tokenizer *tok); /* NULL is fine */

/* Number of ids, added tokens included: ids are 0 .. size-1. */
DI_API int32_t di_tokenizer_size(const di_tokenizer *tok);
/* Id of an entry by its spelling in the file (added tokens first, then byte-map characters), -1 when there is none. */
DI_API int32_t di_tokenizer_find(const di_tokenizer *tok, const char *spelling);
/* Whether id is an added token with the special flag: what a decode with skip_special drops. */
DI_API bool di_tokenizer_is_special(const di_tokenizer *tok, int32_t id);
/* The bytes that an id stands for, which need not be whole characters; "" with length 0 for an unknown id. A view into
 * the tokenizer. */
DI_API const char *di_tokenizer_bytes(const di_tokenizer *tok, int32_t id, size_t *len);

/* Encodes text: *ids is a new array of *n_ids ids. No begin-of-sentence token is added. With plain, the spellings of
 * added tokens ("<|User|>" and the like) are ordinary text: use it for text that others wrote. */
DI_API di_status di_tokenizer_tokenize(const di_tokenizer *tok, const char *text, size_t len, bool plain, int32_t **ids,
                                       size_t *n_ids, di_error *err);
/* Decodes ids: *text is a new text of *len bytes (len may be NULL) with a NUL behind. Unknown ids give nothing. */
DI_API di_status di_tokenizer_detokenize(const di_tokenizer *tok, const int32_t *ids, size_t n_ids, bool skip_special,
                                         char **text, size_t *len, di_error *err);

/* Decoding of ids as they come: what is released is always whole characters, and all of it together is what
 * di_tokenizer_detokenize gives. The stream borrows the tokenizer; one thread at a time. */
typedef struct di_token_stream di_token_stream;
DI_API di_status di_token_stream_create(di_token_stream **out, const di_tokenizer *tok, di_error *err);
DI_API void di_token_stream_destroy(di_token_stream *stream); /* NULL is fine */
/* *text is what id releases, possibly nothing: *len bytes with a NUL behind, valid until the next call on the stream.
 */
DI_API di_status di_token_stream_push(di_token_stream *stream, int32_t id, const char **text, size_t *len,
                                      di_error *err);
/* End of the stream: *text has U+FFFD for a character that is unfinished, else nothing. The stream can be used again.
 */
DI_API di_status di_token_stream_flush(di_token_stream *stream, const char **text, size_t *len, di_error *err);

/* ---- chat ---------------------------------------------------------------------------------------------------------
 */

/* How a request body is read. Zeroed storage is the default. */
typedef struct di_chat_encode_options {
    const char *api;       /* whose bodies: "chat" (NULL too), "responses" or "messages" */
    bool vendor_compat;    /* the hosted service's defaults, clamps and refusals */
    const char *reasoning; /* of requests that name neither thinking nor effort: "none", "low", "high", "max" or "1" to
                            * "100"; NULL is "none", with vendor_compat "high" */
} di_chat_encode_options;

/* Renders the body of a chat request (JSON) to the prompt that the model sees: *prompt is a new text of *prompt_len
 * bytes (prompt_len may be NULL) with a NUL behind, *ids a new array of *n_ids ids. Text of the request never becomes a
 * special token, whatever it spells. options may be NULL. DI_ERR_REQUEST for a body that is malformed or can't be
 * rendered, with a message that can be sent to whoever wrote it; DI_ERR_ARG for the options; DI_ERR_UNSUPPORTED for a
 * tokenizer that lacks a token of the format. */
DI_API di_status di_chat_encode(const di_tokenizer *tok, const char *body, size_t len,
                                const di_chat_encode_options *options, char **prompt, size_t *prompt_len, int32_t **ids,
                                size_t *n_ids, di_error *err);

#ifdef __cplusplus
}
#endif
#endif
