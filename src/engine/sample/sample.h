/* Sampling: from a row of logits to one token, by request parameters, seed, position and the tokens before it alone.
 *
 * Owns: the parameters and their validation, masks, logit bias, penalties and the counts that they need, the noise,
 * top-p, top-k and min-p without a full sort, log-probabilities. Leaves the choice of rows, stop rules and text to
 * engine/, grammars to grammar/. The rule is interface.md's "How a token is sampled": masks, bias, penalties,
 * temperature, top-p, top-k, min-p, then the largest x + g(seed, position, token). */
#ifndef DI_SAMPLE_H
#define DI_SAMPLE_H

#include "backend/backend.h"
#include "tensor/tensor.h"

/* ---- parameters ---------------------------------------------------------------------------------------------------
 */

typedef struct di_sampling {
    double temperature; /* default 1; below 1e-5 is greedy */
    double top_p;       /* default 1: off */
    int64_t top_k;      /* default -1; -1 and 0: off */
    double min_p;       /* default 0: off; tokens below this share of the most likely one's probability fall */
    /* As vLLM defines them; 0, 0 and 1 are off. Presence and frequency are over the output, repetition over prompt and
     * output. */
    double presence_penalty, frequency_penalty, repetition_penalty;
    size_t n_bias; /* logit bias; an id that comes twice gets both values */
    const int32_t *bias_ids;
    const float *bias_values; /* cut to -100 .. 100 where they are added */
    bool has_seed;
    uint64_t seed;
    int64_t max_tokens; /* 0: the caller's default */
    int64_t min_tokens; /* so many output tokens come before an end mark or a stop token can */
    bool ignore_eos;
    int32_t n_logprobs;        /* -1: none; n >= 0: of the token and the n best */
    int32_t n_prompt_logprobs; /* the same of the prompt's tokens */
    bool logprobs_processed;   /* of the output's tokens */
    size_t n_stop;             /* stop strings; empty ones are ignored */
    const char *const *stop;   /* these and the other lists are borrowed for the request's life */
    const size_t *stop_len;
    size_t n_stop_tokens; /* ids that end the output; ones outside the vocabulary never come */
    const int32_t *stop_tokens;
} di_sampling;

#define DI_LOGPROBS_MAX 1000
/* What processed log-probabilities of greedy rows are made with (model.md 7). */
#define DI_SAMPLE_GREEDY_TEMPERATURE 1e-5
#define DI_LOGPROB_FLOOR (-9999.0f) /* what stands for the logarithm of zero */

void di_sampling_init(di_sampling *s); /* the defaults */
bool di_sampling_is_greedy(const di_sampling *s);
/* Whether a penalty is on, so that sampling needs the counts of a di_history; whether the prompt's tokens matter. */
bool di_sampling_needs_history(const di_sampling *s);
bool di_sampling_needs_prompt_history(const di_sampling *s);
/* DI_ERR_RANGE naming field, value and range: temperature finite and >= 0, 0 < top_p <= 1, top_k -1 .. 2^31-1,
 * 0 <= min_p <= 1, presence and frequency -2 .. 2, repetition above 0 and finite, bias values finite, max_tokens >= 0,
 * min_tokens 0 .. max_tokens (any, where max_tokens is 0), n_logprobs and n_prompt_logprobs -1 .. 1000, ids of stop
 * tokens >= 0. */
di_status di_sampling_check(const di_sampling *s, di_error *err);
/* DI_ERR_RANGE for a bias on an id outside the vocabulary. */
di_status di_sampling_check_vocab(const di_sampling *s, int64_t n_vocab, di_error *err);

/* ---- what a sequence's tokens count for penalties ------------------------------------------------------------------
 */

/* How often each token stands in prompt and output. One a sequence, where di_sampling_needs_history. Zeroed storage is
 * an empty one. Grows by doubling, so that a step rarely allocates. */
typedef struct di_history_entry {
    int32_t token;
    int32_t n_output;
    bool is_in_prompt;
} di_history_entry;

typedef struct di_history {
    di_history_entry *entries; /* owned [n], in order of first appearance; counts can be zero after a step back */
    int32_t *slots;            /* owned [n_slots]: open addressing into entries, -1 = free */
    size_t n, n_slots;         /* n_slots is 0 or a power of two, entries has room for half of it */
} di_history;

void di_history_deinit(di_history *h);
/* Room for n more distinct tokens. DI_ERR_MEMORY, with h as it was. */
di_status di_history_reserve(di_history *h, size_t n, di_error *err);
/* Appends tokens [n] (ids >= 0) of the prompt, or of the output. DI_ERR_MEMORY, with a part of them counted. */
di_status di_history_add_prompt(di_history *h, const int32_t *tokens, size_t n, di_error *err);
di_status di_history_add_output(di_history *h, const int32_t *tokens, size_t n, di_error *err);
/* Takes the last n tokens of the output back; tokens [n] are these tokens. */
void di_history_step_back(di_history *h, const int32_t *tokens, size_t n);
/* Makes `to` (valid or zeroed) a copy. DI_ERR_MEMORY, with `to` as it was. */
di_status di_history_copy(di_history *to, const di_history *from, di_error *err);
/* The counts of a token; NULL when it never came. */
const di_history_entry *di_history_find(const di_history *h, int32_t token);

/* ---- noise --------------------------------------------------------------------------------------------------------
 */

/* Noise of (seed, position, token): z as in interface.md, and g = -log(-log(u)). */
uint64_t di_noise_bits(uint64_t seed, uint64_t position, uint64_t token);
double di_noise_gumbel(uint64_t z);

/* ---- sampling -----------------------------------------------------------------------------------------------------
 */

typedef struct di_logprob {
    int32_t token;
    float logprob;
} di_logprob;

/* Reusable scratch, of one thread at a time; zeroed storage is valid. */
typedef struct di_sampler {
    void *memory; /* owned */
    size_t n_bytes;
} di_sampler;
void di_sampler_deinit(di_sampler *sm);
di_status di_sampler_reserve(di_sampler *sm, int64_t n_vocab, di_error *err);

/* One row. All pointers are borrowed for the call. */
typedef struct di_sample_args {
    const di_sampling *sampling;
    const float *logits; /* [n_vocab], host memory; -infinity: not allowed */
    int64_t n_vocab;
    uint64_t seed;             /* of this sample; sampling->seed is not read */
    uint64_t position;         /* of the token to come, in prompt + output, from 0 */
    int64_t n_output;          /* output tokens before this position, drafts too: for min_tokens */
    int32_t eos_id;            /* the end mark, -1 = none: not allowed under min_tokens */
    const uint32_t *mask;      /* bit t of 32-bit words set: token t is allowed; NULL: all */
    const uint32_t *blacklist; /* bit t set: token t is not allowed; NULL: none */
    const di_history *history; /* of the committed tokens; NULL: none, which does for sampling without penalties */
    const int32_t *drafts;     /* [n_drafts] tokens between those and this position, counted as output */
    int32_t n_drafts;
    int32_t forced; /* the token, given; -1: draw one */
    /* Draws instead of the rule above, where not NULL: from p [n_vocab], the probabilities of what survives (0 for the
     * rest, 1 for the best token at greedy), which are valid during the call. */
    int32_t (*choose)(void *ctx, const float *p, int64_t n_vocab);
    void *choose_ctx;
    float *ln_p;     /* out [n_vocab], with choose: ln of p, -infinity for 0; may be NULL */
    float *logprob;  /* out, where sampling->n_logprobs >= 0; may be NULL */
    di_logprob *top; /* out [n_logprobs] by falling probability, ties by lower id; may be NULL. Entries past the tokens
                        of non-zero probability have token -1 */
} di_sample_args;

/* One token. A forced token has the log-probabilities that drawing it would have had: the model's, after the masks; a
 * token without probability has DI_LOGPROB_FLOOR. Allocates nothing after di_sampler_reserve. DI_ERR_REQUEST when no
 * token is allowed (and none is forced), DI_ERR_INTERNAL for logits with NaN or +infinity. */
di_status di_sample(di_sampler *sm, const di_sample_args *a, int32_t *token, di_error *err);

/* Log-softmax of a row as the model gave it, for prompts: of `token`, and of the n_top best into top (NULL with n_top 0
 * only), as in di_sample_args. DI_ERR_INTERNAL for logits with NaN or +infinity. */
di_status di_logprobs_of(di_sampler *sm, const float *logits, int64_t n_vocab, int32_t token, int32_t n_top,
                         float *logprob, di_logprob *top, di_error *err);

/* ---- sampling on a device -----------------------------------------------------------------------------------------
 *
 * Rows and their lists for the operation sample_rows (backend/ops.h), in one block of memory that is uploaded as it is:
 * the rows, then the words. */

typedef struct di_sample_pack {
    uint8_t *memory; /* owned */
    size_t cap;
    int64_t n_vocab;
    int32_t rows_max, n_rows, n_words, n_changed;
    int64_t n_top; /* entries behind the last row's */
    /* Lists that rows of one sequence share: those of the last row that had one, and whose they are. */
    const di_sampling *bias_of, *forbid_of, *counted_by;
    const di_history *history_of;
    int32_t bias_at, n_bias, forbid_at, n_forbid, history_at, n_history;
} di_sample_pack; /* zeroed storage is valid */

/* How a row's token is chosen where not by noise: what `choose` of di_sample_args does on the host. */
typedef struct di_sample_how {
    di_sample_rule rule; /* DI_SAMPLE_DRAW or DI_SAMPLE_TEST */
    double u, u_test;
    int32_t draft;
    const float *ln_q; /* device memory, as is ln_p */
    float *ln_p;
} di_sample_how;

void di_sample_pack_deinit(di_sample_pack *pack);
/* Begins anew, for at most rows_max rows. */
di_status di_sample_pack_begin(di_sample_pack *pack, int32_t rows_max, int64_t n_vocab, di_error *err);
/* Appends a row that gives the token of di_sample with these arguments, of which logits, choose and ln_p are not read,
 * top and logprob for being there alone; how NULL: by noise. top_at: its place in the operation's top. */
di_status di_sample_pack_add(di_sample_pack *pack, const di_sample_args *a, const di_sample_how *how,
                             int64_t logits_row, int64_t top_at, di_error *err);
/* Appends a row of di_logprobs_of. */
void di_sample_pack_prompt(di_sample_pack *pack, int32_t token, int32_t n_top, int64_t logits_row, int64_t top_at);
/* Rows from here on are drawn by a call of their own, which numbers its changed rows anew. */
static inline void di_sample_pack_part(di_sample_pack *pack) {
    pack->n_changed = 0;
}
static inline const di_sample_row *di_sample_pack_rows(const di_sample_pack *pack) {
    return (const di_sample_row *)(const void *)pack->memory;
}
static inline size_t di_sample_pack_words_at(const di_sample_pack *pack) {
    return (size_t)pack->rows_max * sizeof(di_sample_row);
}
static inline size_t di_sample_pack_bytes(const di_sample_pack *pack) {
    return di_sample_pack_words_at(pack) + (size_t)pack->n_words * sizeof(uint32_t);
}
/* What di_sample (has_position) or di_logprobs_of would have failed with. */
di_status di_sample_failure(int32_t status, bool has_position, uint64_t position, di_error *err);

/* ---- token sets ---------------------------------------------------------------------------------------------------
 */

/* Sets the bits of the ids that text names in out [(n_vocab + 31) / 32 words] and clears the others: "0..3,7", ids and
 * ranges with both ends included, separated by commas, strictly rising; blanks around numbers are ignored, an empty
 * text names none. DI_ERR_ARG saying what is wrong and where, with out untouched. */
di_status di_token_ranges_parse(const char *text, int64_t n_vocab, uint32_t *out, di_error *err);

#endif
