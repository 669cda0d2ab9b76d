/* Grammars: which tokens may come next when an output has to follow a regular expression, a JSON schema, an EBNF
 * grammar or a list of choices. Usable without a model: a sampler of one's own asks a matcher for a mask before each
 * token and tells it the token that was drawn.
 *
 *     if (di_grammar_create_schema(&grammar, schema, schema_len, NULL, &err)) ...
 *     if (di_grammar_vocab_create(&vocab, tokenizer, n_vocab, eos_id, &err)) ...
 *     if (di_matcher_create(&matcher, grammar, vocab, &err)) ...
 *     for (;;) {
 *         if (di_matcher_mask(matcher, mask, NULL, &err)) ...
 *         token = draw among the tokens whose bit is set;
 *         if (di_matcher_accept(matcher, token, &is_allowed, &err)) ...
 *     }
 *
 * A token may come when the text so far, with the token's bytes added, is the beginning of a text of the grammar; the
 * end mark when the text so far is one. Any thread may use a grammar or a vocabulary; a matcher serves one thread at a
 * time. On failure outputs are untouched, unless it says otherwise. */
#ifndef DEEPINFER_GRAMMAR_H
#define DEEPINFER_GRAMMAR_H

#include "deepinfer/status.h"
#include "deepinfer/text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- grammars -----------------------------------------------------------------------------------------------------
 */

typedef struct di_grammar di_grammar; /* reference counted */

/* Bounds of one grammar. Zeroed storage is the default. */
typedef struct di_grammar_options {
    int64_t memory_bytes; /* of the compiled form, and again of what matching adds to it; 0: 64 MiB */
    int64_t timeout_ms;   /* of compiling; 0: 20 s */
    bool is_lax;          /* schemas: keywords that can't be guaranteed are left out instead of refused */
} di_grammar_options;

/* The texts of a grammar, as UTF-8 of len bytes, which are not needed afterwards; options may be NULL. DI_ERR_REQUEST
 * for a grammar that is malformed, describes no text at all, or uses what can't be guaranteed: the message names the
 * place and can be sent to whoever wrote it. DI_ERR_RANGE when it passes a limit. Released by di_grammar_release. */

/* A regular expression as Python writes it, matched as a whole; look-around and back-references are refused. */
DI_API di_status di_grammar_create_regex(di_grammar **out, const char *text, size_t len,
                                         const di_grammar_options *options, di_error *err);
/* A JSON schema, draft 2020-12, as JSON. */
DI_API di_status di_grammar_create_schema(di_grammar **out, const char *text, size_t len,
                                          const di_grammar_options *options, di_error *err);
/* Rules in EBNF, of which `root` is the start. */
DI_API di_status di_grammar_create_ebnf(di_grammar **out, const char *text, size_t len,
                                        const di_grammar_options *options, di_error *err);
/* A JSON array of strings: one of them. */
DI_API di_status di_grammar_create_choice(di_grammar **out, const char *text, size_t len,
                                          const di_grammar_options *options, di_error *err);
DI_API di_grammar *di_grammar_acquire(di_grammar *grammar); /* one more reference */
DI_API void di_grammar_release(di_grammar *grammar);        /* NULL is fine */
/* Whether a text is one of the grammar's. DI_ERR_RANGE when that can't be told within the grammar's memory. */
DI_API di_status di_grammar_accepts(di_grammar *grammar, const char *text, size_t len, bool *accepts, di_error *err);

/* ---- vocabularies -------------------------------------------------------------------------------------------------
 */

/* The tokens of a tokenizer in a form for masks. */
typedef struct di_grammar_vocab di_grammar_vocab;
/* The tokenizer is borrowed for the call. n_vocab: bits of a mask, at least the tokenizer's size; ids behind that may
 * never come. eos_id: the end mark. Added tokens of the tokenizer (marks of the chat format and the like) may not come
 * as text. DI_ERR_ARG when the numbers don't fit together. */
DI_API di_status di_grammar_vocab_create(di_grammar_vocab **out, const di_tokenizer *tok, int32_t n_vocab,
                                         int32_t eos_id, di_error *err);
DI_API void di_grammar_vocab_destroy(di_grammar_vocab *vocab); /* NULL is fine */

/* ---- matchers -----------------------------------------------------------------------------------------------------
 */

/* Where one output stands in a grammar. */
typedef struct di_matcher di_matcher;
/* Takes a reference of the grammar; the vocabulary is borrowed as long as the matcher lives. */
DI_API di_status di_matcher_create(di_matcher **out, di_grammar *grammar, const di_grammar_vocab *vocab, di_error *err);
DI_API void di_matcher_destroy(di_matcher *matcher); /* NULL is fine */
/* Tokens accepted so far, the end mark included. */
DI_API int64_t di_matcher_count(const di_matcher *matcher);
/* The next token; *is_allowed false: it may not come here, and nothing has changed. DI_ERR_RANGE when the output needs
 * more memory than the grammar has. */
DI_API di_status di_matcher_accept(di_matcher *matcher, int32_t token, bool *is_allowed, di_error *err);
/* Takes the last n tokens back; n is at most the count. */
DI_API void di_matcher_rollback(di_matcher *matcher, int64_t n);
/* Bit t % 32 of mask[t / 32], (n_vocab + 31) / 32 words: token t may come next. *only (may be NULL): the token if it is
 * the only one, else -1. After the end mark all bits are 0. DI_ERR_RANGE as above, DI_ERR_REQUEST when the vocabulary
 * has no token that continues the text; mask may then have any bits. */
DI_API di_status di_matcher_mask(di_matcher *matcher, uint32_t *mask, int32_t *only, di_error *err);
/* Whether the text so far is one of the grammar's. */
DI_API bool di_matcher_is_complete(di_matcher *matcher);

#ifdef __cplusplus
}
#endif
#endif
