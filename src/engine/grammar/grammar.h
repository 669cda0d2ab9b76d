/* Grammars: outputs that follow a regular expression, a JSON schema, an EBNF grammar, a list of choices or the
 * tool-call format, compiled to an automaton that says for every position which tokens may come.
 *
 * Owns: the front ends, the form that they share (ir.h), the automaton (pda.h), token masks, matchers with rollback,
 * the cache of compiled grammars. Leaves when masks are filled to the step loop and what they do to logits to sample/.
 *
 * A grammar describes texts as bytes of UTF-8. A token may come when the text so far, with the token's bytes added, is
 * the beginning of a text of the grammar; the end mark when the text so far is one. So any tokenization of an accepted
 * text is accepted, and the model, not the grammar, chooses it. */
#ifndef DI_GRAMMAR_H
#define DI_GRAMMAR_H

#include "base/base.h"
#include "text/text.h"

/* ---- what a grammar is made of ------------------------------------------------------------------------------------
 */

typedef enum di_grammar_kind {
    DI_GRAMMAR_REGEX,  /* text: the expression, matched as a whole */
    DI_GRAMMAR_SCHEMA, /* text: a JSON schema (an object, true or false) as JSON */
    DI_GRAMMAR_EBNF,   /* text: rules, of which `root` is the start */
    DI_GRAMMAR_CHOICE, /* text: a JSON array of strings */
    DI_GRAMMAR_OBJECT, /* any JSON object; no text */
    DI_GRAMMAR_OUTPUT  /* text: a whole output of the chat format with thinking and calls, see output.c */
} di_grammar_kind;

/* Bounds of one compilation and of what it leaves; zeroed fields mean these defaults. */
typedef struct di_grammar_limits {
    size_t memory_bytes;      /* 64 MiB: that compiling takes, and again that matching adds */
    int64_t timeout_ns;       /* 20 s */
    int32_t depth_max;        /* 256: nesting of groups, schemas, references */
    const _Atomic bool *stop; /* borrowed; ends the compilation with DI_ERR_CANCELLED once it is true. NULL: never */
} di_grammar_limits;

typedef struct di_grammar_spec {
    di_grammar_kind kind;
    const char *text; /* borrowed for the call */
    size_t len;
    bool is_lax; /* SCHEMA: keywords that can't be guaranteed are left out instead of refused */
} di_grammar_spec;

/* ---- compiled grammars --------------------------------------------------------------------------------------------
 *
 * Reference counted; any thread may use one. Matching learns (states, transitions, masks) under a lock of the grammar's
 * own; what was learnt is given up when it passes the limit and made again where it is needed. */

typedef struct di_grammar di_grammar;

/* DI_ERR_REQUEST for a grammar that is malformed, has no text at all, or uses what can't be guaranteed: the message
 * names the place (offset in a regular expression, line and column of EBNF, JSON pointer of a schema's keyword).
 * DI_ERR_RANGE when it passes a limit. */
di_status di_grammar_compile(di_grammar **out, const di_grammar_spec *spec, const di_grammar_limits *limits,
                             di_error *err);
di_grammar *di_grammar_acquire(di_grammar *g);
void di_grammar_release(di_grammar *g); /* NULL is fine */
/* Whether text is one of the grammar's. DI_ERR_RANGE when that can't be told within the limits. */
di_status di_grammar_accepts(di_grammar *g, const char *text, size_t len, bool *accepts, di_error *err);

/* ---- vocabulary ---------------------------------------------------------------------------------------------------
 */

/* The tokens of a tokenizer in a form for masks. Read-only after it was made: any thread. */
typedef struct di_grammar_vocab di_grammar_vocab;
/* tok is borrowed for the call. n_vocab: columns of the logits, at least the tokenizer's size; ids behind that are
 * never allowed. */
di_status di_grammar_vocab_create(di_grammar_vocab **out, const di_tokenizer *tok, int32_t n_vocab, int32_t eos_id,
                                  di_error *err);
void di_grammar_vocab_destroy(di_grammar_vocab *v); /* NULL is fine */

/* ---- matchers -----------------------------------------------------------------------------------------------------
 */

/* Where one output stands in a grammar. One thread at a time. */
typedef struct di_matcher di_matcher;

/* Takes a reference of the grammar; vocab is borrowed. */
di_status di_matcher_create(di_matcher **out, di_grammar *g, const di_grammar_vocab *vocab, di_error *err);
void di_matcher_destroy(di_matcher *m); /* NULL is fine */
/* Tokens accepted so far, the end mark included. */
int64_t di_matcher_count(const di_matcher *m);
/* The next token; *is_allowed false: it may not come here, and nothing has changed. DI_ERR_RANGE when the text needs
 * more memory than the grammar has, or more work at this place than one call may do (about a tenth of a second). */
di_status di_matcher_accept(di_matcher *m, int32_t token, bool *is_allowed, di_error *err);
/* Takes the last n tokens back, n <= count. */
void di_matcher_rollback(di_matcher *m, int64_t n);
/* Bit t of 32-bit words [(n_vocab + 31) / 32]: token t may come next. *only, where not NULL: the token if there is just
 * one, else -1. After the end mark all bits are 0. DI_ERR_RANGE as above; DI_ERR_REQUEST when the vocabulary has no
 * token that goes on with the text, and mask may then have any bits. */
di_status di_matcher_mask(di_matcher *m, uint32_t *mask, int32_t *only, di_error *err);
/* Whether the text so far is one of the grammar's; false where memory doesn't allow to tell. */
bool di_matcher_is_complete(di_matcher *m);
/* Whether more than one token may come next, as far as that shows without making a mask; false where it doesn't. */
bool di_matcher_is_open(di_matcher *m);

/* ---- service ------------------------------------------------------------------------------------------------------
 *
 * Compiles grammars on threads of its own and keeps them by content. Whoever asks for a grammar that is being compiled
 * waits for that compilation; there is one at a time for each content. Grammars that were not asked for longest leave
 * when all together pass the cache's size, with what matching has taught them; those in use live on by their
 * references. The last failures are kept for a minute, so that a grammar that takes its whole limit to fail is not
 * tried again with every request.
 *
 * A grammar that takes long keeps no other waiting: what isn't done within a tenth of a second makes room, and is tried
 * again with its whole limit, behind the others of its kind. With two threads or more one of them takes first
 * attempts alone; a single thread turns to second attempts when there are no first ones.
 *
 * Any thread may call any of these, but destroy, after which nothing else of the service may be called but take, cancel
 * and is_done for jobs that are left. */

/* Memory that a grammar takes now, what it has learnt included: what the cache counts. */
size_t di_grammar_bytes(di_grammar *g);

typedef struct di_grammar_service di_grammar_service;

/* Zeroed fields mean the defaults. */
typedef struct di_grammar_service_options {
    int n_threads;      /* 2 */
    size_t cache_bytes; /* 256 MiB: of grammars and their texts */
    bool is_uncached;   /* no grammar is kept, whatever cache_bytes; failures are */
    di_grammar_limits limits;
} di_grammar_service_options;

typedef struct di_grammar_service_stats {
    int64_t n_hits;     /* answers from what was kept, failures included */
    int64_t n_joined;   /* requests that waited for a compilation begun for another */
    int64_t n_misses;   /* requests that a compilation was begun for */
    int64_t n_failures; /* compilations that failed */
    int64_t n_slow;     /* compilations that were tried a second time, with the whole limit */
    int64_t n_evicted;  /* grammars that left for want of memory */
    int64_t n_waiting;  /* compilations that have not begun, or wait for their second attempt */
    int64_t n_entries;  /* grammars that are kept */
    int64_t n_failed;   /* failures that are kept */
    size_t bytes;       /* of the grammars that are kept, as of when each was looked at last */
} di_grammar_service_stats;

di_status di_grammar_service_create(di_grammar_service **out, const di_grammar_service_options *options, di_error *err);
/* Jobs that are not done end with DI_ERR_CANCELLED; waits for compilations that run, which end soon. NULL is fine. */
void di_grammar_service_destroy(di_grammar_service *s);
void di_grammar_service_stats_get(di_grammar_service *s, di_grammar_service_stats *out);
/* Waits. *out is a reference. Errors as di_grammar_compile, and DI_ERR_CANCELLED when the service is destroyed. */
di_status di_grammar_service_compile(di_grammar_service *s, const di_grammar_spec *spec, di_grammar **out,
                                     di_error *err);

/* A request that doesn't wait. It is taken or cancelled once, also after the service was destroyed. */
typedef struct di_grammar_job di_grammar_job;

/* done (may be NULL) is called once, when the job is done: by this call, after *out was set, when the answer is known
 * already; else by a thread of the service, or by the one that destroys it. It may take or cancel the job, and not
 * destroy the service. It is called without locks; while it runs it delays other compilations. */
di_status di_grammar_job_start(di_grammar_service *s, const di_grammar_spec *spec, void (*done)(void *user), void *user,
                               di_grammar_job **out, di_error *err);
bool di_grammar_job_is_done(di_grammar_job *j);
/* Waits for the job to be done, and for `done` to return unless that is the caller. Frees the job. *out and errors as
 * di_grammar_service_compile. */
di_status di_grammar_job_take(di_grammar_job *j, di_grammar **out, di_error *err);
/* Frees the job; NULL is fine. `done` is not called afterwards; if it is being called, by another thread, it has
 * returned. A compilation that has begun goes on, for others and for the cache; another one is dropped when nobody else
 * waits for it. */
void di_grammar_job_cancel(di_grammar_job *j);

#endif
