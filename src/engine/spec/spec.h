/* Speculation's decisions: how many drafts of each sequence the next step verifies, whether drafting pays, and what
 * becomes of a draft under acceptance by rejection.
 *
 * Owns: the plan of a step, the model of what steps and drafting rounds cost on this machine, the guard of a sequence
 * whose drafts keep failing, the calibration of confidences, the arithmetic of rejection (dspark.md 4.5, model.md 7.1).
 * Leaves tokens, rows, memory and the order of steps to the step loop, coupled acceptance to sample/.
 *
 * All of it but the store is pure: numbers in, numbers out; no clock, no thread, no allocation. A structure may be used
 * by one thread at a time and has no pointers, so that it can be copied. Times are in ns and only have to be of one
 * clock. */
#ifndef DI_SPEC_H
#define DI_SPEC_H

#include "base/base.h"

#define DI_SPEC_DRAFTS_MAX 16  /* K, drafts of a sequence in one round, is at most this */
#define DI_SPEC_SEQS_MAX 65536 /* sequences in one step */

/* ---- what steps cost ----------------------------------------------------------------------------------------------
 *
 * A step of b rows takes base + b * per_row + experts(b) * per_expert + context * per_context, where context is the sum
 * of the rows' context lengths and experts(b) = n_layers * E * (1 - (1 - k/E)^b) is how many experts b rows touch when
 * they choose k of E independently: the bytes that a machine with little compute waits for. A drafting round of n
 * sequences takes the same in n (one row here is a sequence's whole block, which touches experts(n * K)), without
 * context. Both are least squares of the relative error with non-negative coefficients, so predicted time never falls
 * when rows or context rise.
 *
 * Old steps fade in favour of new ones of about as many rows, so that a batch size that has not been seen for long is
 * not forgotten because another came often. A step far from its prediction counts little (weight 0.25 over its relative
 * distance, and never as if it were further than half the prediction off); only when steps are off the same way for a
 * while is everything scaled: the machine has become faster or slower. */

enum { DI_SPEC_FEATURES = 4, DI_SPEC_BUCKETS = 32 };

typedef struct di_spec_bucket { /* steps of about as many rows, each divided by its prediction: sums with weights */
    double weight;
    double xx[DI_SPEC_FEATURES * (DI_SPEC_FEATURES + 1) / 2]; /* of x_i * x_j, i <= j, row by row */
    double xy[DI_SPEC_FEATURES];
} di_spec_bucket;

typedef struct di_spec_fit {
    di_spec_bucket buckets[DI_SPEC_BUCKETS];
    double coef[DI_SPEC_FEATURES]; /* base, per_row, per_expert, per_context; in ns, none negative */
    double drift;                  /* running mean of ln(measured / predicted), each within +-0.5 */
    int32_t settling;              /* steps to go since the machine changed */
    int64_t n_steps;
} di_spec_fit;

typedef struct di_spec_experts { /* of the backbone, or of the draft module; zeroed: dense */
    double n_layers;             /* layers with experts */
    double n_experts;            /* E */
    double n_chosen;             /* k */
} di_spec_experts;

/* Where nothing is drafted, a device may run a step behind the one before without the host, and less may be done in it.
 * Such plain steps are another kind, and in one fit with the others they would pass for what rows cost: batches are
 * small in the one kind and large in the other. So they are kept apart, and what counts is by how much they differ from
 * what the fit says of as many rows: near the size that was seen that is exact, however wrong the fit is there, and
 * elsewhere rows cost what they cost in any step. */
typedef struct di_spec_plain {  /* plain steps of about as many rows: sums with weights */
    double x[DI_SPEC_FEATURES]; /* of the features; the first one is 1, so that its sum is the weight */
    double ns;
} di_spec_plain;

typedef struct di_spec_cost {
    di_spec_experts step_experts, draft_experts;
    int32_t n_drafts; /* K: rows of a sequence in a drafting round */
    int64_t rows_max; /* steps of more rows are not learnt from: long prompt chunks run at other rates */
    di_spec_fit step, draft;
    di_spec_plain plain[DI_SPEC_BUCKETS];
} di_spec_cost;

/* Experts that n_rows touch, in all layers. */
double di_spec_experts_touched(const di_spec_experts *e, double n_rows);

/* An empty model. n_drafts 1..DI_SPEC_DRAFTS_MAX, rows_max >= 1. */
void di_spec_cost_init(di_spec_cost *c, const di_spec_experts *step, const di_spec_experts *draft, int32_t n_drafts,
                       int64_t rows_max);
/* What a step took from its forward's start to its tokens, drafting apart: n_rows of all kinds and the sum of their
 * context lengths (position + 1). A few steps of 1, 2, 4, .. rows that are measured at start are given here like any
 * other and make the model ready. Times and rows that are not above 0 are ignored. */
void di_spec_cost_learn_step(di_spec_cost *c, int64_t n_rows, int64_t context, int64_t step_ns);
/* What a plain step took, from the tokens of the step before to its own. */
void di_spec_cost_learn_plain(di_spec_cost *c, int64_t n_rows, int64_t context, int64_t step_ns);
/* What a drafting round of n_seqs sequences took. */
void di_spec_cost_learn_draft(di_spec_cost *c, int32_t n_seqs, int64_t draft_ns);

/* Predictions in ns; 0 for 0 rows or sequences, and before anything was learnt. */
double di_spec_cost_step_ns(const di_spec_cost *c, int64_t n_rows, int64_t context);
double di_spec_cost_draft_ns(const di_spec_cost *c, int32_t n_seqs);
/* By how much a plain step is below the prediction for its rows, by plain steps of the nearest size that was seen;
 * below 0 where they take longer. Within half of the prediction; 0 where no plain step was seen. */
double di_spec_cost_plain_saves_ns(const di_spec_cost *c, int64_t n_rows, int64_t context);
/* Whether plain steps of about as many rows were seen. */
bool di_spec_cost_plain_is_seen(const di_spec_cost *c, int64_t n_rows);
/* Whether steps were seen often enough, and at two sizes at least, that a prediction of another size means something.
 * The drafting round needs to have been seen three times. */
bool di_spec_cost_is_ready(const di_spec_cost *c);
bool di_spec_cost_draft_is_ready(const di_spec_cost *c);

/* ---- the released engine's time table -----------------------------------------------------------------------------
 *
 * For DI_SPEC_REFERENCE (dspark.md 4.6): times by number of rows, a batch of b rows costing what the smallest entry of
 * at least b rows costs, corrected while running by a slope per row and by the time of sampling. */

enum { DI_SPEC_CURVE_POINTS = 128, DI_SPEC_CURVE_STEPS = 5000, DI_SPEC_SAMPLER_STEPS = 9, DI_SPEC_SAMPLER_SEQS = 1024 };

typedef struct di_spec_recent { /* the last times of sampling, in a ring */
    float ns[DI_SPEC_SAMPLER_STEPS];
    int32_t n; /* so far; from 18 on it is 9 again, which is as good */
} di_spec_recent;

typedef struct di_spec_curve {
    int32_t n_points;                   /* 0: no table */
    int32_t rows[DI_SPEC_CURVE_POINTS]; /* rising */
    double ns[DI_SPEC_CURVE_POINTS];    /* rising */
    double slope_ns;                    /* a row; from the residuals below */
    struct {
        float per_row_ns; /* (measured - table) / rows of the entry */
        int32_t point;
    } steps[DI_SPEC_CURVE_STEPS];                     /* ring */
    int64_t n_steps;                                  /* ever */
    di_spec_recent sampler[DI_SPEC_SAMPLER_SEQS + 1]; /* by number of sequences; [0]: of all */
} di_spec_curve;

/* Sets the table, with nothing learnt. DI_ERR_RANGE unless n is 0..DI_SPEC_CURVE_POINTS and rows and times are above 0
 * and rise strictly. */
di_status di_spec_curve_init(di_spec_curve *c, int32_t n, const int32_t *rows, const double *ns, di_error *err);
/* What a decode step took: the forward, and its sampling. Steps with more rows than the table has are ignored. The
 * slope is worked out anew at every 64th step. */
void di_spec_curve_learn(di_spec_curve *c, int64_t n_rows, int32_t n_seqs, int64_t forward_ns, int64_t sampler_ns);
/* max(0, the median over the entries with 10 steps and more of the medians of their residuals); 0 without any. */
double di_spec_curve_slope(const di_spec_curve *c);
/* Predicted ns of n_rows; -1 where the table ends before. */
double di_spec_curve_ns(const di_spec_curve *c, int64_t n_rows, int32_t n_seqs);
/* Rows of the entry that n_rows fall into: up to so many rows time is the same; -1 where the table ends before. */
int64_t di_spec_curve_rows(const di_spec_curve *c, int64_t n_rows);

/* ---- plan of a step -----------------------------------------------------------------------------------------------
 */

typedef enum di_spec_policy {
    DI_SPEC_COST,      /* expected tokens per time, by the cost model */
    DI_SPEC_REFERENCE, /* the released engine's algorithm, by the time table */
    DI_SPEC_FIXED      /* every draft */
} di_spec_policy;

typedef enum di_spec_accept {
    DI_SPEC_COUPLED,  /* a draft holds when it is the token that would have been drawn: the output has no trace of it */
    DI_SPEC_REJECTION /* rejection sampling: the output's distribution has no trace of it */
} di_spec_accept;

typedef struct di_spec_seq { /* a sequence that gets a token in the step: it has one row for that in any case */
    int32_t n_drafts;        /* that it has and could use, 0..K; fewer where its length or its output ends before */
    bool may_speculate;      /* false: no draft of it is verified */
    int64_t n_context;       /* positions before its first row */
    /* [n_drafts] chance that draft j is accepted if those before it are, calibrated; what is not a number within 0..1
     * counts as the nearest, NaN as 0. NULL: no record, 1 each under DI_SPEC_REFERENCE, else 0.5. Of the same drafts:
     * the newest round, N-1. */
    const float *confidence;
    /* DI_SPEC_REFERENCE: of round N-2, [n_before]; NULL: no record, so 1 for each draft that the sequence has. */
    const float *before;
    int32_t n_before;
} di_spec_seq;

typedef struct di_spec_ask {
    di_spec_policy policy;
    int32_t n_seqs;
    const di_spec_seq *seqs; /* [n_seqs], those that have waited longest first: ties go to the lower index */
    int32_t n_drafts;        /* K, 1..DI_SPEC_DRAFTS_MAX */
    int64_t rows_max;        /* rows of the step that are for these sequences, their own n_seqs included */
    /* DI_SPEC_COST */
    const di_spec_cost *cost;
    int64_t other_rows, other_context; /* of prompts in the same step */
    double always_ns; /* time that every plan adds: of a drafting round that follows in any case, of the host. May be
                         below 0 */
    double drafts_ns; /* time that a plan adds if it verifies any draft */
    double gain_min;  /* a plan with drafts must be this much better than the one without: 0.02 is 2 % */
    double rate_hint; /* tokens / ns of the last plan, to start from; 0: none. Saves time, not more */
    /* DI_SPEC_REFERENCE */
    const di_spec_curve *curve;
    void *scratch; /* di_spec_scratch_bytes(n_seqs, K), aligned for any type; nothing in it is kept */
} di_spec_ask;

typedef struct di_spec_plan {
    int64_t n_drafts;        /* verified in all */
    double tokens, ns;       /* expected of the plan; ns 0 where nothing is predicted */
    double plain_ns;         /* of the step without drafts, always_ns included; 0 as above */
    double tokens_per_draft; /* COST: how many tokens the time that a draft of the plan takes, on average (of the first
                                one, where there is none), is worth at the rate without drafts, n_seqs / plain_ns; 0
                                without a prediction */
} di_spec_plan;

size_t di_spec_scratch_bytes(int32_t n_seqs, int32_t n_drafts);

/* Writes into n_verify [n_seqs] how many leading drafts of each sequence the step verifies, 0..n_drafts each.
 *
 * DI_SPEC_FIXED: all of all that may speculate; where rows are short, draft by draft in turns (every sequence's first,
 * then every second), the lower index first.
 *
 * DI_SPEC_COST: the plan with the most expected tokens per time. The chance that draft j and all before it are accepted
 * is the product of their confidences. A draft's row adds to rows, experts and context; so, for a rate r of tokens per
 * ns, a draft is worth its chance less r times what its context takes, and for every number of drafts the best ones
 * are those worth most, always a prefix of a sequence's since neither part gets better along it. The whole range of
 * numbers is evaluated and r becomes the best rate found, until that rises no more (Dinkelbach's method: the optimum
 * over all prefix-closed plans, within 0.1 %). The plan without drafts is one of those compared and wins ties.
 * Until the cost model is ready only drafts whose chance is at least 0.8 are verified, two a sequence and in at most
 * four sequences: steps of different sizes have to be seen to learn what they take, at little risk.
 *
 * DI_SPEC_REFERENCE: dspark.md 4.6. Without a table: all drafts, as DI_SPEC_FIXED. Rows that the split gives to drafts
 * that a sequence does not have (its newer round is shorter than the older) are left out.
 *
 * With coupled acceptance any decision is exact. Under rejection the decision to verify a draft may depend on the
 * chance of it and those before it, but on nothing that its token is known from: the confidences behind it.
 * DI_SPEC_COST weighs all of the newest round against each other, so under rejection its confidences must be what
 * drafts of the sequence have been worth on average (di_spec_guard_confidence), which older rounds alone decide. */
void di_spec_plan_make(const di_spec_ask *ask, int32_t *n_verify, di_spec_plan *plan);

/* What the drafting round after this step brings: tokens per time with it over that without, 1 where no drafts are
 * better. The plan is made for seqs whose confidences are what drafts of the sequence have been worth on average
 * (di_spec_guard_confidence), with the round's predicted time in drafts_ns, over a model that is ready. What a plain
 * step saves is taken from always_ns and added to drafts_ns. Infinite before the model is ready. Uses n_verify [n_seqs]
 * as room. */
double di_spec_drafting_gain(const di_spec_ask *ask, int32_t *n_verify);

/* Whether a few plain steps are due though drafting brings `gain`, since what they save may be worth more: where none
 * of about n_rows rows was seen and the gain is below 2, which is all that they can save; and where none was seen for
 * 1024 steps and the gain is below 1.25. At most once in 64 steps: steps may be unable to follow. n_since and
 * n_since_try count steps since the last plain one, and since this was last true. */
bool di_spec_plain_is_due(const di_spec_cost *c, int64_t n_rows, double gain, int64_t n_since, int64_t n_since_try);

/* ---- guard of a sequence ------------------------------------------------------------------------------------------
 *
 *        balance < 0 for 8 rounds             wait is over
 *   ON ------------------------------> OFF -----------------> TRIAL (4 rounds)
 *    ^                                  ^                       |  |
 *    |                                  +-- balance < 0, wait doubles
 *    +-------------------------------------- balance >= 0, wait is 16 again
 *
 * Balance is the running mean (weight 1/16, from 0.5 on) of accepted drafts less what the round cost in tokens: slow
 * enough that good drafts with the luck of a few rounds against them stay on. In a trial it is the mean of its rounds.
 * The first wait is 16 steps, the longest 512. */

typedef enum di_spec_guard_state { DI_SPEC_ON, DI_SPEC_OFF, DI_SPEC_TRIAL } di_spec_guard_state;

typedef struct di_spec_guard {
    float rate[DI_SPEC_DRAFTS_MAX]; /* running mean of "draft j was accepted", where those before it were */
    di_spec_guard_state state;
    float rate_start;
    double balance;
    int32_t n_rounds;        /* ON: in a row with a negative balance; TRIAL: done */
    int32_t wait, wait_next; /* OFF: steps to go; the length of the wait */
} di_spec_guard;

/* ON, with every rate at `rate` (0..1; what other sequences have had, or 0.7). */
void di_spec_guard_init(di_spec_guard *g, float rate);
/* Once for each step of the sequence, before it may draft for the next one: whether it may. Counts the wait down. */
bool di_spec_guard_step(di_spec_guard *g);
/* For a step after which the sequence could have drafted but drafting did not pay: its rates go back to where they
 * started by 1/256, so that what was measured long ago does not keep drafting off for ever. */
void di_spec_guard_idle(di_spec_guard *g);
/* What became of a round's drafts: n_accepted of the n_verified, and what the round cost in tokens at the rate without
 * drafts: its share of the drafting round's time * n_seqs / plain_ns, and n_verified * tokens_per_draft of the plan.
 * Call it for rounds of which nothing was verified too. */
void di_spec_guard_learn(di_spec_guard *g, int32_t n_verified, int32_t n_accepted, double cost_tokens);
/* out [n]: what to expect of drafts to come. */
void di_spec_guard_confidence(const di_spec_guard *g, int32_t n, float *out);

/* ---- calibration --------------------------------------------------------------------------------------------------
 *
 * The calibrated confidence of draft j is sigmoid(logit(c) / T_j), where c is the model's at temperature 1. T_j follows
 * acceptance by stochastic Newton steps on the log-loss in ln(1/T): each outcome moves it by gradient over a running
 * mean of the curvature, times max(1/(n + 16), 1/512), at most 0.05 a step, within 1/8 .. 8. */

enum { DI_SPEC_BINS = 10 };

typedef struct di_spec_calibration {
    int32_t n_drafts;
    bool is_frozen;                         /* T stays as given; statistics are taken all the same */
    double log_inverse[DI_SPEC_DRAFTS_MAX]; /* ln(1/T) */
    double curvature[DI_SPEC_DRAFTS_MAX];
    int64_t n[DI_SPEC_DRAFTS_MAX], n_accepted[DI_SPEC_DRAFTS_MAX]; /* outcomes: drafts whose predecessors all held */
    double error_sum[DI_SPEC_DRAFTS_MAX]; /* of |calibrated confidence - (1 if accepted, else 0)| */
    struct {
        int64_t n, n_accepted;
        double confidence_sum;
    } bins[DI_SPEC_BINS]; /* by calibrated confidence: [0, 0.1), .., [0.9, 1] */
} di_spec_calibration;

/* temperatures [n_drafts], each above 0; NULL: 1 each. */
void di_spec_calibration_init(di_spec_calibration *c, int32_t n_drafts, const float *temperatures);
double di_spec_calibration_temperature(const di_spec_calibration *c, int32_t draft);
/* raw [n] to out [n], n <= n_drafts; may be the same. NaN becomes 0. */
void di_spec_calibrate(const di_spec_calibration *c, int32_t n, const float *raw, float *out);
/* The outcome of a round: raw [n_verified] confidences, of which the first n_accepted drafts held. */
void di_spec_calibration_learn(di_spec_calibration *c, int32_t n_verified, int32_t n_accepted, const float *raw);
/* Mean of |confidence - outcome| of draft j; of all for -1; 0 without outcomes. */
double di_spec_calibration_error(const di_spec_calibration *c, int32_t draft);

/* Reads "1.2" (for every draft) or "1.2,1.3,.." (n_drafts of them) into out [n_drafts]. DI_ERR_ARG saying what is wrong
 * for another count, or a temperature that is not a finite number above 0; out is then untouched. */
di_status di_spec_temperatures_parse(const char *text, int32_t n_drafts, float *out, di_error *err);

/* ---- what was learnt, from one run to the next --------------------------------------------------------------------
 *
 * The one part of this folder that touches files. What is learnt about a model on a machine is one file in a folder,
 * named '<32 hex digits of its key>.cost'. Nothing else in that folder is opened, listed, renamed or removed: it may be
 * anyone's. The file is of 64-bit words, the lowest byte first:
 *
 *     "DI-COST\n" | version | sizes of the arrays | key, 2 words | saved at, in s
 *     every number, in the order of the structures | FNV-1a of all bytes before
 *
 * Times of saving are the caller's, in seconds of a clock that goes on between runs; with one that was set back, a file
 * from the future is as useless as one that is too old. Any thread, and several processes at once: a file is replaced
 * as a whole, and the last one saved stays. */

#define DI_SPEC_KEY_BYTES 16

/* The key of n strings, each up to its NUL: all that times depend on, of model, numerics, machine and program. Where
 * one string ends and the next begins is part of it. */
void di_spec_store_key(uint8_t out[DI_SPEC_KEY_BYTES], const char *const *parts, size_t n);

/* Reads what was saved in `dir` under `key`, at most ttl_s before now_s, in place of cost and calibration. These say
 * what is asked for, as their _init left them: the same experts, drafts and rows_max, and the same temperatures where
 * they are frozen. From there on all goes on as if the process had: old steps keep their weight and fade as usual.
 * False, with both untouched, when there is nothing usable: no regular file, one too old, of the future, of another
 * version or key, damaged, of other things than asked for, or with numbers that can't be. Never an error: the caller
 * begins anew. */
bool di_spec_store_load(const char *dir, const uint8_t key[DI_SPEC_KEY_BYTES], int64_t now_s, int64_t ttl_s,
                        di_spec_cost *cost, di_spec_calibration *calibration);
/* Saves both, in place of what was saved under the key before. Makes `dir` if only its last part is missing. What is
 * at the file's name and no regular file is left alone: DI_ERR_IO. DI_ERR_RANGE for numbers that a load would refuse,
 * DI_ERR_DISK without room. After an error what was saved before is still there. */
di_status di_spec_store_save(const char *dir, const uint8_t key[DI_SPEC_KEY_BYTES], int64_t now_s,
                             const di_spec_cost *cost, const di_spec_calibration *calibration, di_error *err);

/* ---- acceptance by rejection --------------------------------------------------------------------------------------
 *
 * dspark.md 4.5, with uniforms of model.md 7.1. p is the target's processed distribution, q the draft's. Tokens that a
 * filter removed have p = 0 and ln q = -infinity. Weights, below 1024, are added as integers in units of 2^-52 (cut),
 * so that no order of adding matters. Any thread. */

typedef enum di_spec_case { DI_SPEC_DRAW = 0, DI_SPEC_REDRAW = 1, DI_SPEC_TEST = 2 } di_spec_case;

#define DI_SPEC_DRAFT_SEED 1000000007u /* added to a sequence's seed where drafts are drawn */

/* u in [0, 1) of (seed, position, case). */
double di_spec_uniform(uint64_t seed, int32_t position, di_spec_case which);
/* Position key of row j of a step, wrapping in 32 bits: first is the index of the token that row 0 gives. */
int32_t di_spec_position(int32_t first, int32_t row);

/* exp(min(0, ln p - ln q)) > u, in float; p is the target's probability of the draft, ln_q the draft's stored one. */
bool di_spec_accepts(float p, float ln_q, double u);
/* The first id whose cumulative p exceeds u times the total; p [n] >= 0. -1 when all are 0. */
int32_t di_spec_draw(const float *p, int64_t n, double u);
/* The same over max(p - exp(ln q - 5e-5), 0); where that is 0 everywhere, the first maximum of p. ln_q NULL: there is
 * no stored distribution, so p alone. residual (may be NULL) gets the sum: 1 - it is the expected acceptance. */
int32_t di_spec_redraw(const float *p, const float *ln_q, int64_t n, double u, double *residual);

/* Sum of max(p - exp(ln q - 5e-5), 0): the distance d of the two distributions (their total variation). A draft is
 * accepted with chance 1 - d by rejection, and at least (1 - d) / (1 + d) where both are drawn with the same noise. */
double di_spec_distance(const float *p, const float *ln_q, int64_t n);

typedef struct di_spec_row {
    uint64_t seed; /* of the sequence */
    int32_t first; /* index, in prompt + output, of the token that row 0 of the step gives */
    int32_t row;   /* j */
    int64_t n_vocab;
    const float *p;    /* [n_vocab] */
    int32_t draft;     /* token that the row tests; -1: none was made, rejected in any case */
    const float *ln_q; /* [n_vocab] of that draft; NULL with draft -1 */
    bool is_last;      /* behind the last verified draft: it tests none and draws */
} di_spec_row;

/* The token of a row: the draft (true), or a replacement or, in the last row, a draw (false). */
bool di_spec_row_token(const di_spec_row *r, int32_t *token);

#endif
