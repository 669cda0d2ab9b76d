/* The engine: requests over time, from prompt ids to text, on one model.
 *
 * Owns: sequences and their states, admission, the step loop that mixes prompt chunks and decode rows in one forward,
 * KV blocks and state slots (kv/), sampling (sample/), stop rules, incremental text; opening a model folder with
 * everything that running it needs (di_load). Knows no JSON and no protocol; never sees a weight.
 *
 * The engine is synchronous: di_core_step runs one forward and tells callbacks what came of it. One thread at a time
 * may use an engine. A request that can't be done fails alone, at submit or by its DONE event; the engine goes on. */
#ifndef DI_ENGINE_H
#define DI_ENGINE_H

#include "kv/kv.h"
#include "model/model.h"
#include "sample/sample.h"
#include "text/text.h"

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

/* A request as far as it has come. Borrowed by callbacks; everything in it is gone after the DONE event. */
typedef struct di_generation {
    uint64_t id;      /* as given by di_core_submit */
    di_finish finish; /* NONE while it runs; STOP, LENGTH, ABORT or ERROR in the DONE event, TOOL_CALLS with a parser */
    di_error error;   /* of ERROR */
    int64_t n_prompt, n_tokens;
    const int32_t *tokens; /* output [n_tokens], an end mark that ended it included */
    const float *logprobs; /* [n_tokens]; NULL unless asked for */
    const di_logprob *top; /* [n_tokens, n_top]; entries with token -1 are not there; NULL unless asked for */
    int32_t n_top;
    const char *text; /* decoded output that is certain, without end mark and stop string */
    size_t text_len;
    int64_t stop_hit; /* index of the stop string that ended it, -1 = none */
    int64_t reasoning_tokens;
    bool has_seed; /* false: greedy, and none was given */
    uint64_t seed;
    int64_t submit_ns, start_ns, first_ns,
        last_ns; /* monotonic: submitted, admitted, first and last token; 0 = not yet */
} di_generation;

typedef enum di_core_event_kind {
    DI_CORE_TEXT,   /* text: a piece of the output that is certain now (requests without a parser) */
    DI_CORE_OUTPUT, /* parsed: an event of the output parser */
    DI_CORE_TOKEN,  /* a token was added; comes before the text that it releases */
    DI_CORE_DONE    /* the last event of every request that was submitted */
} di_core_event_kind;

typedef struct di_core_event {
    di_core_event_kind kind;
    const char *text;
    size_t len;
    const di_parser_event *parsed;
} di_core_event;

/* Called from di_core_step. It may submit and abort requests. A status other than DI_OK ends the request with that
 * error (its DONE event follows); the status for DONE is ignored. */
typedef di_status (*di_core_callback)(void *user, const di_generation *gen, const di_core_event *event, di_error *err);

typedef struct di_submission {
    const int32_t *ids; /* prompt [n_ids]; copied */
    size_t n_ids;
    di_sampling sampling; /* max_tokens 0: 8192; always cut to what the context leaves. Stop strings are copied */
    const di_parser_options *parse; /* NULL: plain text. Its stop strings are ignored for those of sampling. Copied */
    /* When the token force_after has been sampled, force_ids [n_force] follow, once; n_force 0: never. Copied. */
    int32_t force_after;
    const int32_t *force_ids;
    size_t n_force;
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
    int32_t n_blocks;         /* KV blocks */
    di_replay replay;
    int64_t replay_keep; /* 0: the exact bound */
} di_core_options;

/* model and tok (NULL: no text, outputs are ids) are borrowed. The plan is that of the model's options. DI_ERR_ARG for
 * a replay that the model can't do. */
di_status di_core_create(di_core **out, di_model *model, const di_backend *backend, di_device *device,
                         const di_memory_plan *plan, const di_tokenizer *tok, const di_core_options *options,
                         di_error *err);
/* Requests that still run vanish without an event. */
void di_core_destroy(di_core *engine);

/* Queues a request, first come first served. On error nothing is queued and no event comes: DI_ERR_REQUEST for an empty
 * prompt, an id outside the vocabulary, a prompt that the context or the KV memory can never hold; DI_ERR_RANGE for bad
 * parameters. */
di_status di_core_submit(di_core *engine, const di_submission *submission, uint64_t *id, di_error *err);
/* Takes effect before the next forward; the request keeps the text that it has. False when there is no such request. */
bool di_core_abort(di_core *engine, uint64_t id);
void di_core_abort_all(di_core *engine);

/* One step: ends aborted requests, admits waiting ones, runs one forward. False when nothing is left to do. What goes
 * wrong is told by the events of the requests that it concerns. */
bool di_core_step(di_core *engine);
/* Requests that are queued or running. */
int64_t di_core_pending(const di_core *engine);

typedef struct di_core_stats {
    int64_t n_steps, n_finished;
    int64_t prompt_tokens, output_tokens; /* rows of prompts that were run; tokens that were sampled */
    int64_t forward_ns, sample_ns;
    int32_t blocks, blocks_used, blocks_used_max;
    int32_t slots, slots_used;
    bool is_replay_exact; /* also when there is no replay */
    int64_t replay_keep;  /* 0: off */
} di_core_stats;
void di_core_stats_get(const di_core *engine, di_core_stats *out);

/* ---- opening a model folder ----------------------------------------------------------------------------------------
 */

typedef struct di_load_options {
    const char *dir;
    const char *backend;  /* "auto", "cpu", ... */
    int threads;          /* 0: all */
    const char *cpu_isa;  /* level of the processor's kernels; NULL and "auto": the best */
    bool is_pinned;       /* one processor for each worker thread */
    bool dummy;           /* make the weights up */
    int32_t dummy_layers; /* above 0: no folder, that many layers at the released dimensions; with `dummy` */
    bool with_draft;      /* load the draft module too */
    di_numerics numerics;
    int32_t seqs_max;
    int64_t batch_tokens_max, chunk_max;
    int64_t context_max; /* 0: the model's, cut to what memory allows */
    int64_t kv_bytes;    /* 0: planned */
    di_replay replay;
    int64_t replay_keep;
    void (*progress)(void *user, uint64_t done, uint64_t total); /* of the weights; NULL: none */
    void *user;
} di_load_options;

/* How these options open the device. */
static inline di_device_config di_load_device_config(const di_load_options *o) {
    return (di_device_config){.n_threads = o->threads, .is_pinned = o->is_pinned, .isa = o->cpu_isa};
}

/* The configuration alone: of the folder, or of dummy_layers. */
di_status di_load_config(di_config *config, const di_load_options *options, di_error *err);

/* What a model takes on this machine. */
typedef struct di_load_plan {
    di_core_options engine;
    di_memory_plan memory;
    uint64_t kv_bytes, state_bytes; /* all blocks, all slots */
    uint64_t total_bytes;           /* weights (mapped), caches, workspace and scratch */
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
    int64_t load_ns;
} di_loaded;

di_status di_load_open(di_loaded *out, const di_load_options *options, di_error *err);
void di_load_close(di_loaded *loaded);
/* The engine of a loaded model, by its plan. */
di_status di_load_core(const di_loaded *loaded, di_core **out, di_error *err);

#endif
