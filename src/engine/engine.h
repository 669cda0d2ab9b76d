/* The engine: requests over time, from prompt ids to text, on one model.
 *
 * Owns: sequences and their states, the scheduler (sched/: admission, fairness, batch forming, preemption), KV blocks,
 * state slots and the prefix cache (kv/), the step loop that overlaps the host's work with the forward that runs,
 * sampling (sample/), stop rules, incremental text; opening a model folder with everything that running it needs
 * (di_load). Knows no JSON and no protocol; never sees a weight.
 *
 * One thread at a time may use a core; the forward and the sampling run on a thread of the core's own, one step behind
 * (or ahead, seen from there). A request that can't be done fails alone, at submit or by its DONE event; the engine
 * goes on. Two cores in one process share nothing. */
#ifndef DI_ENGINE_H
#define DI_ENGINE_H

#include "grammar/grammar.h"
#include "kv/kv.h"
#include "model/model.h"
#include "sample/sample.h"
#include "spec/spec.h"
#include "text/text.h"

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

/* A sample of a request as far as it has come. Borrowed by callbacks; everything in it is gone after the DONE event. */
typedef struct di_generation {
    uint64_t id;      /* of the request, as given by di_core_submit */
    int32_t index;    /* which of its n samples, from 0 */
    di_finish finish; /* NONE while it runs; STOP, LENGTH, ABORT or ERROR in the DONE event, TOOL_CALLS with a parser */
    int64_t n_prompt, n_tokens;
    int64_t n_cached;      /* prompt tokens that came from the prefix cache or from sample 0 */
    const int32_t *prompt; /* [n_prompt] */
    const int32_t *tokens; /* output [n_tokens], an end mark that ended it included */
    const float *logprobs; /* [n_tokens]; NULL unless asked for */
    const di_logprob *top; /* [n_tokens, n_top]; entries with token -1 are not there; NULL unless asked for */
    int32_t n_top;
    const float *prompt_logprobs; /* [n_prompt], the first is NaN; whole from the first TOKEN event on; NULL unless
                                     asked for */
    const di_logprob *prompt_top; /* [n_prompt, n_prompt_top]; the first row has no entries */
    int32_t n_prompt_top;
    const char *text; /* decoded output that is certain, without end mark and stop string */
    size_t text_len;
    int64_t stop_hit;   /* index of the stop string that ended it, -1 = none */
    int32_t stop_token; /* the stop token id that ended it, -1 = none; the model's own end mark is none */
    int64_t reasoning_tokens;
    bool has_seed; /* false: greedy, and none was given */
    uint64_t seed; /* of this sample: the request's seed + index */
    int64_t submit_ns, start_ns, first_ns,
        last_ns;                  /* monotonic: submitted, admitted, first and last token; 0 = not yet */
    int32_t n_preempted;          /* how often its memory was taken for others */
    int64_t n_drafts, n_accepted; /* drafts that were verified, and those of them that became output */
    di_error error;               /* of ERROR: DI_ERR_CANCELLED when the deadline passed */
} di_generation;

typedef enum di_core_event_kind {
    DI_CORE_TEXT,   /* text: a piece of the output that is certain now (requests without a parser) */
    DI_CORE_OUTPUT, /* parsed: an event of the output parser */
    DI_CORE_TOKEN,  /* a token was added; comes before the text that it releases */
    DI_CORE_DONE    /* the last event of every sample of a request that was submitted */
} di_core_event_kind;

typedef struct di_core_event {
    di_core_event_kind kind;
    const char *text;
    size_t len;
    const di_parser_event *parsed;
} di_core_event;

/* Called from di_core_step. It may submit and abort requests. A status other than DI_OK ends the sample with that
 * error (its DONE event follows); the status for DONE is ignored. */
typedef di_status (*di_core_callback)(void *user, const di_generation *gen, const di_core_event *event, di_error *err);

#define DI_SAMPLES_MAX 1024 /* of one request */

/* What an output has to follow: says for each position which tokens may come. Called by one thread at a time, yet not
 * always the same. An end mark that it allows ends the output, with ignore_eos too. */
typedef struct di_constraint {
    void *self; /* owned */
    /* Tokens that were accepted. */
    int64_t (*count)(const void *self);
    /* The next token; *is_allowed false: it may not come here, and nothing has changed. */
    di_status (*accept)(void *self, int32_t token, bool *is_allowed, di_error *err);
    /* Takes the last n accepted tokens back: drafts that did not hold, or everything. */
    void (*rollback)(void *self, int64_t n);
    /* Bit t of 32-bit words [(n_vocab + 31) / 32]: token t may come next; none after an end mark. *only, where not
     * NULL: the token if there is just one, else -1. */
    di_status (*mask)(void *self, uint32_t *mask, int32_t *only, di_error *err);
    /* Whether more than one token may come next, if that is known without a mask: then the mask can wait. May be NULL.
     */
    bool (*is_open)(void *self);
    void (*destroy)(void *self);
} di_constraint;

/* Makes the constraint of one sample of a request. */
typedef struct di_constraint_source {
    void *self;
    di_status (*open)(void *self, di_constraint *out, di_error *err);
} di_constraint_source;

/* Positions [at, at + n) of a prompt. */
typedef struct di_span {
    int64_t at, n;
} di_span;

/* The source of a grammar's constraints: each sample has a matcher, with a reference of the grammar. */
typedef struct di_grammar_source {
    di_grammar *grammar; /* borrowed, with vocab, as long as the source is in use */
    const di_grammar_vocab *vocab;
    di_constraint_source source;
} di_grammar_source;
/* Returns &s->source, which points back to s. */
const di_constraint_source *di_grammar_source_init(di_grammar_source *s, di_grammar *grammar,
                                                   const di_grammar_vocab *vocab);

typedef struct di_submission {
    const int32_t *ids; /* prompt [n_ids]; copied */
    size_t n_ids;
    di_sampling sampling; /* max_tokens 0: 8192; always cut to what the context leaves. Its lists are copied */
    int32_t n;            /* samples; 0 is 1. Sample j is what the request alone gives with seed + j */
    const di_parser_options *parse; /* NULL: plain text. Its stop strings are ignored for those of sampling. Copied */
    /* The first output tokens, given; n_forced_first 0: none. Copied. */
    const int32_t *forced_first;
    size_t n_forced_first;

    const di_constraint_source *constraint; /* of the output; used during the call alone. NULL: none */

    /* Spans of the prompt that one step runs as a whole (images), rising and apart; none by default. Copied. */
    const di_span *units;
    size_t n_units;

    int32_t priority;   /* lower goes first */
    const char *caller; /* who asks, for fair shares; NULL: nobody in particular. Copied */
    size_t caller_len;
    const char *cache_salt; /* requests share cached prefixes only with the same salt. Copied */
    size_t cache_salt_len;
    int64_t deadline_ns; /* monotonic time after which the request ends with DI_ERR_CANCELLED; 0: none */
    di_core_callback callback;
    void *user;
} di_submission;

/* ---- the engine ---------------------------------------------------------------------------------------------------
 */

typedef struct di_core di_core;

typedef struct di_core_options {
    int32_t seqs_max;         /* sequences that run at once */
    int64_t batch_tokens_max; /* rows of one step, at least seqs_max */
    int64_t chunk_max;        /* prompt rows of one sequence in one step */
    int64_t context_max;      /* prompt and output of one sequence */
    int64_t context_sum_max;  /* sum of the contexts of the rows of one step; 0: no limit */
    int64_t logits_max;       /* rows of one step that can have logits; at least seqs_max */
    int32_t n_blocks;         /* KV blocks */
    int32_t n_snapshots;      /* state slots for window snapshots of the prefix cache */
    int64_t queue_max;        /* samples that wait; more are refused as busy. 0: no limit */
    di_replay replay;
    int64_t replay_keep;         /* 0: the exact bound */
    int32_t draft_tokens;        /* drafts of a round, at most DI_SPEC_DRAFTS_MAX; 0: no speculation */
    di_spec_policy draft_policy; /* how many of them are verified */
    di_spec_accept accept;       /* how it is decided whether a draft holds */
    /* Of the confidence head, by place in the round; 0 in the first: learnt from what holds (cost), 1 (reference). */
    float draft_temperatures[DI_SPEC_DRAFTS_MAX];
    int64_t measure_ns; /* time that may be spent at the start on measuring steps for the policy; 0: none */
    /* Where what was learnt of step times is kept between runs, under this key (di_spec_store_key); NULL: nowhere. */
    const char *step_times_dir; /* borrowed */
    uint8_t step_times_key[DI_SPEC_KEY_BYTES];
    int64_t step_times_ttl_s;
    bool has_prefix_cache;
    bool is_sync;                 /* every step is finished before the next is formed */
    int64_t ttft_goal_ns;         /* time to first token that the scheduler aims at; 0: none */
    int64_t tpot_goal_ns;         /* time per output token, likewise */
    int64_t log_interval_steps;   /* steps between lines of statistics in the log; 0: none */
    const struct di_trace *trace; /* borrowed; NULL: none */
    const uint32_t *blacklist;    /* [(n_vocab + 31) / 32] bits of ids that are never drawn; borrowed; NULL: none */
    uint8_t identity[16];         /* of model, numerics and replay setting: part of every prefix hash */
} di_core_options;

/* model, device and tok (NULL: no text, outputs are ids) are borrowed; one core at a time may run on a device. The plan
 * is that of the model's options. DI_ERR_ARG for a replay that the model can't do. */
di_status di_core_create(di_core **out, di_model *model, const di_backend *backend, di_device *device,
                         const di_memory_plan *plan, const di_tokenizer *tok, const di_core_options *options,
                         di_error *err);
/* What runs a batch: the model's forward, or in tests and benches something that costs nothing. Called from the core's
 * own thread, one call at a time. */
typedef struct di_executor {
    void *self;
    /* Writes pages, rings and snapshots of the batch, and *logits: device memory [sum of n_logits, n_vocab], valid
     * until the next call. */
    di_status (*forward)(void *self, const di_batch *batch, float **logits, di_error *err);
    /* Copies units (KV pages, state slots) by id, in order with the forwards; NULL: the device's own copy does. */
    di_status (*copy)(void *self, uint8_t *base, size_t unit_bytes, const di_copy *copies, int32_t n, di_error *err);
    /* A drafting round, as di_draft_begin and di_draft_next; NULL: there is no draft module. */
    di_status (*draft_begin)(void *self, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                             di_error *err);
    di_status (*draft_next)(void *self, int32_t i, const int32_t *prev, float **logits, float **conf, di_error *err);
    /* Work for the draft module that was put off (batch->taps), as di_draft_catch_up; NULL: nothing can be. */
    di_status (*catch_up)(void *self, const di_batch *batch, di_error *err);
    /* Draws rows of the last logits on the device, as di_forward_sample: put on the stream; NULL: the host draws. */
    di_status (*sample)(void *self, const di_sample_rows_args *args, di_error *err);
    /* With sample: forward put on the stream, and the wait for all that is there (di_forward_launch, di_forward_wait);
     * the stream itself. batch->fed may name tokens that `sample` draws before. NULL: forward is all there is. */
    di_status (*launch)(void *self, const di_batch *batch, float **logits, di_error *err);
    di_status (*wait)(void *self, di_error *err);
    di_stream *stream;
    /* With launch: a drafting round put on the stream, as di_draft_launch and di_draft_follow; NULL: never. */
    di_status (*draft_launch)(void *self, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                              di_error *err);
    di_status (*draft_follow)(void *self, int32_t i, const int32_t *tokens, float **logits, float **conf,
                              di_error *err);
    /* Forwards and steps of rounds so far whose times say nothing about later ones, as di_forward_unrecorded; NULL:
     * none. */
    int64_t (*n_unrecorded)(void *self);
} di_executor;

/* What a core must know of a model. */
typedef struct di_core_model {
    int32_t n_vocab, eos_id, window;
    int64_t window_span; /* rows before a border after which all rings of the border are exact */
    di_spec_experts step_experts, draft_experts; /* for the cost of steps and drafting rounds */
} di_core_model;

/* A core on any executor. options->replay_keep is taken as it is. */
di_status di_core_create_on(di_core **out, const di_executor *executor, const di_core_model *model,
                            const di_backend *backend, di_device *device, const di_memory_plan *plan,
                            const di_tokenizer *tok, const di_core_options *options, di_error *err);
/* Requests that still run vanish without an event. */
void di_core_destroy(di_core *core);

/* Queues a request. On error nothing is queued and no event comes: DI_ERR_REQUEST for an empty prompt, an id outside
 * the vocabulary, a prompt that the context or the KV memory can never hold; DI_ERR_RANGE for bad parameters;
 * DI_ERR_BUSY when the queue is full or the core drains. */
di_status di_core_submit(di_core *core, const di_submission *submission, uint64_t *id, di_error *err);
/* Takes effect before the next step is formed; the request keeps the text that it has. False when there is no such
 * request. */
bool di_core_abort(di_core *core, uint64_t id);
void di_core_abort_all(di_core *core);
/* From now on submissions are refused; what is queued and running goes on to its end. */
void di_core_drain(di_core *core);

/* One turn of the loop: ends aborted and late requests, admits waiting ones, launches the next step and finishes the
 * one before. False when nothing is left to do. What goes wrong is told by the events of the requests that it concerns.
 */
bool di_core_step(di_core *core);
/* Samples that are queued or running. */
int64_t di_core_pending(const di_core *core);

/* Counters since the start and the state now (docs/engine.md, Statistics). */
typedef struct di_core_stats {
    int64_t n_steps, n_prefill_steps, n_decode_steps; /* a step with prompt rows counts as prefill */
    int64_t n_submitted, n_finished;                  /* samples; finished in any way */
    int64_t n_stop, n_length, n_abort, n_error;       /* by reason */
    int64_t n_refused_busy, n_refused_invalid;        /* at submit */
    int64_t n_expired;                                /* deadline passed; part of n_error */
    int64_t n_dropped;                                /* tokens computed for a sample that had ended meanwhile */
    int64_t n_preempted, n_forked;
    int64_t prompt_tokens, cached_tokens, output_tokens; /* prompt rows run, prompt tokens not run, tokens sampled */
    int64_t recomputed_tokens;                           /* rows run again after a preemption or for a window */
    int64_t ttft_goal_missed, tpot_goal_missed;          /* samples */
    int64_t ttft_gave_way, tpot_gave_way;                /* steps where one goal was given up for the other */
    int64_t draft_tokens, accepted_tokens;               /* drafts verified, and accepted */
    int64_t verified_at[DI_SPEC_DRAFTS_MAX], accepted_at[DI_SPEC_DRAFTS_MAX]; /* by place in the round */
    int64_t n_draft_rounds;                                                   /* of a sequence */
    double draft_error;                   /* mean distance of confidence and outcome */
    int64_t calibration_n[DI_SPEC_BINS],  /* drafts whose predecessors held, by calibrated confidence in tenths, */
        calibration_held[DI_SPEC_BINS];   /* and those that held */
    double calibration_sum[DI_SPEC_BINS]; /* of their confidences */
    int64_t n_tested;                     /* drafts that rejection has tested; sums over them: */
    double expected_sum, /* chance of acceptance, 1 - d with the distance d of target's and draft's distributions */
        bound_sum;       /* (1 - d) / (1 + d): what coupled acceptance has at least */
    int64_t saved_ns;    /* time that drafts have saved by the cost model; below 0: they cost */
    int64_t forward_ns, sample_ns, draft_ns; /* on the core's own thread */
    int64_t host_ns;                         /* of the loop, without waiting */
    int64_t wait_ns;                         /* the core's thread had nothing to run while requests were running */
    int64_t device_busy_ns, device_idle_ns;  /* of the device that has a stream: at work, and between one piece of work
                                                and the next while requests were running; 0 for others */
    int64_t ttft_sum_ns, ttft_max_ns, n_ttft;
    int64_t queue_sum_ns;                                   /* submit to admission, of n_ttft samples */
    int64_t finished_prompt_tokens, finished_output_tokens; /* of finished samples */
    int64_t context_sum, context_max;                       /* of the last step's rows: sum of k, largest k */
    int64_t step_rows;                                      /* rows of the last step */
    double steps_per_s, tokens_per_s;                       /* of the last log interval */
    int32_t n_running, n_waiting, n_chunking;               /* chunking: prompts that are partly run */
    int32_t blocks, blocks_used, blocks_used_max,
        blocks_cached; /* used: by sequences; cached: held by the cache alone */
    int32_t slots, slots_used, snapshots;
    int64_t cache_queries, cache_hits, cache_evicted_blocks, cache_evicted_snapshots;
    bool is_replay_exact; /* also when there is no replay */
    int64_t replay_keep;  /* 0: off */
} di_core_stats;
void di_core_stats_get(const di_core *core, di_core_stats *out);

/* The largest ratio of one sequence's speed with drafts to that without that a fixed number of verified drafts can
 * have, by the core's model of costs at this context and the chances of drafts as `held` has counted them (of this
 * core, or of one that verifies them all); 1: none pays, 0: too little is known of times. Only while nothing is
 * pending. */
double di_core_speedup_bound(const di_core *core, const di_core_stats *held, int64_t context);

/* ---- opening a model folder ----------------------------------------------------------------------------------------
 */

typedef struct di_load_options {
    const char *dir;
    const char *backend;  /* "auto", "cpu", ... */
    int threads;          /* 0: all */
    const char *cpu_isa;  /* level of the processor's kernels; NULL and "auto": the best */
    bool is_pinned;       /* one processor for each worker thread */
    bool is_order_free;   /* not batch-invariant: sums may depend on what else is in the batch */
    bool dummy;           /* make the weights up */
    int32_t dummy_layers; /* above 0: no folder, that many layers at the released dimensions; with `dummy` */
    int32_t draft_tokens; /* drafts of a round, cut to what the draft module makes; 0: it is not loaded */
    di_spec_policy draft_policy;
    di_spec_accept accept;
    const char *draft_temperatures; /* of the confidence head: one, or one for each draft; NULL: learnt */
    const char *step_times_dir;     /* NULL: what is learnt of step times is not kept */
    int64_t step_times_ttl_s;
    di_numerics numerics;
    int32_t seqs_max;
    int64_t batch_tokens_max;
    int64_t chunk_max;   /* 0: CHUNK_HOST of load.c, on a GPU batch_tokens_max */
    int64_t context_max; /* 0: the model's, cut to what memory allows */
    int64_t kv_bytes;    /* 0: planned */
    di_replay replay;
    int64_t replay_keep;
    bool has_prefix_cache;
    bool is_sync;
    int64_t queue_max, context_sum_max, ttft_goal_ns, tpot_goal_ns, log_interval_steps;
    const struct di_trace *trace;
    const char *blacklist;                                       /* ids that are never drawn, "0..3,7"; NULL: none */
    void (*progress)(void *user, uint64_t done, uint64_t total); /* of the weights; NULL: none */
    void *user;
    int32_t device_index;       /* which of the machine's accelerators */
    const char *device_kernels; /* level of an accelerator's kernels; NULL and "auto": the best */
} di_load_options;

/* How these options open the device. */
static inline di_device_config di_load_device_config(const di_load_options *o) {
    return (di_device_config){.n_threads = o->threads,
                              .is_pinned = o->is_pinned,
                              .is_order_free = o->is_order_free,
                              .isa = o->cpu_isa,
                              .device_index = o->device_index,
                              .kernels = o->device_kernels};
}

/* The configuration alone: of the folder, or of dummy_layers. */
di_status di_load_config(di_config *config, const di_load_options *options, di_error *err);

/* What a model takes on this machine. */
typedef struct di_load_plan {
    di_core_options engine;
    di_memory_plan memory;
    uint64_t kv_bytes, state_bytes; /* all blocks, all slots */
    uint64_t draft_bytes;           /* of running sequences: taps that are put off, and by rejection what drafts were
                                       drawn from */
    bool weights_are_copied;        /* to the device's own memory; else they are mapped */
    uint64_t host_bytes;            /* of weights, those that stay in the host's memory */
    uint64_t total_bytes;           /* weights (but for host_bytes), caches, workspace and scratch */
    uint64_t free_bytes;            /* of the device when the plan was made */
} di_load_plan;

/* Plans context, blocks and working memory from the options and the device's free memory. DI_ERR_ARG for options that
 * don't fit together or the model, DI_ERR_MEMORY saying what is needed and what there is. */
di_status di_load_plan_make(di_load_plan *plan, const di_config *config, const di_load_options *options,
                            const di_backend *backend, di_device *device, di_error *err);

/* A model that is ready to run. Zeroed storage is valid for di_load_close. */
typedef struct di_loaded {
    di_config config;
    di_tokenizer *tok; /* NULL when the folder has none, with `dummy` alone */
    di_backend backend;
    di_device *device;
    di_load_plan plan;
    di_checkpoint *ckpt;
    di_model *model;
    uint32_t *blacklist; /* owned; NULL: none */
    int64_t load_ns;
} di_loaded;

di_status di_load_open(di_loaded *out, const di_load_options *options, di_error *err);
void di_load_close(di_loaded *loaded);
/* The engine of a loaded model, by its plan. */
di_status di_load_core(const di_loaded *loaded, di_core **out, di_error *err);

#endif
