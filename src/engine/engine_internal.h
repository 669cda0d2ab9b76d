/* Private to engine/: the sequence and the engine's state. */
#ifndef DI_ENGINE_INTERNAL_H
#define DI_ENGINE_INTERNAL_H

#include "engine.h"

/* A request inside the engine.
 *
 *   submit -> waiting -> running -> DONE event -> freed
 *
 * tokens holds prompt and output; its first n_done rows have been run. A running sequence has n_done < n_tokens: what
 * is left of the prompt, or the one token that was sampled last. */
typedef struct di_sequence di_sequence;
struct di_sequence {
    di_generation gen; /* what callbacks see; pointers into the fields below */
    di_sequence *next; /* in the waiting list */
    di_core *engine;
    di_core_callback callback;
    void *user;

    di_sampling sampling; /* max_tokens settled; stop strings owned (stop_memory) */
    int32_t *tokens;      /* owned [n_prompt + max_tokens] */
    int64_t n_tokens, n_done;
    float *logprobs;      /* owned, grows */
    di_logprob *top;      /* owned, grows */
    int64_t logprobs_cap; /* tokens that both have room for */
    bool is_aborted;

    int32_t *blocks; /* owned [blocks_max]; held while running */
    int32_t n_blocks, blocks_max, slot;
    int64_t rect; /* first position that consumer layers keep (bounded replay); 0: all */

    di_detokenizer detok;
    di_strbuf piece; /* what the last token released */
    di_strbuf text;
    di_stop_matcher stop; /* plain text */
    di_parser *parser;    /* owned; NULL: plain text */
    void *stop_memory;    /* owned: copies of the stop strings */
    int32_t *force_ids;   /* owned [n_force] */
    size_t n_force, n_forced;
    int32_t force_after;
    bool is_forcing;
};

struct di_core {
    di_model *model; /* borrowed, with backend, device and tok */
    const di_backend *backend;
    di_device *device;
    const di_tokenizer *tok;
    di_core_options options;
    int64_t keep; /* of the replay; 0 = off */
    int32_t n_vocab, eos_id;
    di_forward *forward;
    di_kv kv;
    di_sampler sampler;

    di_sequence *waiting, *waiting_last; /* oldest first */
    di_sequence **running;               /* owned [seqs_max], oldest first */
    int32_t n_running;
    int64_t n_waiting;
    uint64_t id_last;

    di_seq_rows *rows;   /* owned [seqs_max]: the batch of a step, and its sequences */
    di_sequence **batch; /* owned [seqs_max] */
    float *logits;       /* owned [n_vocab]: one row on the host */
    di_core_stats stats;
};

/* Rows at the end of a prompt that consumer layers run on: keep, or the exact bound for 0; 0 when replay is off.
 * DI_ERR_ARG when the model has no consumers or keep is below window + backtracking. */
di_status di_replay_settle(const di_config *config, di_replay replay, int64_t keep, int64_t *settled, di_error *err);

/* Checks the submission and makes a sequence of it. */
di_status di_sequence_create(di_sequence **out, di_core *engine, const di_submission *submission, di_error *err);
void di_sequence_destroy(di_sequence *s);

/* Samples (or forces) the next token from logits [n_vocab] on the host, appends it, sends its events and applies the
 * stop rules. The sequence is finished when gen.finish is no longer NONE. */
void di_sequence_advance(di_sequence *s, const float *logits);
/* Ends it for a reason from outside; text that was held back is released. Does nothing when it is finished. */
void di_sequence_abort(di_sequence *s);
void di_sequence_fail(di_sequence *s, const di_error *error);
/* Sends the DONE event. */
void di_sequence_done(di_sequence *s);

#endif
