/* Private to engine/: the sequence, the step, the runner and the engine's state.
 *
 * Two threads meet here. The engine's thread (whoever calls di_core_step) owns sequences, queues, pools and the prefix
 * cache; the runner's thread runs forwards and draws tokens. A step is formed by the first, run by the second and
 * committed by the first; while it is with the runner, the engine's thread reads and writes nothing of it, and of its
 * sequences neither the token that is to come nor the memory behind it:
 *
 *   engine's thread   form N+1 | commit N, rows of N+1 for the sampler | form N+2 | commit N+1 ...
 *   runner            ... forward N, sample N | forward N+1 ............ | sample N+1 | forward N+2 ...
 */
#ifndef DI_ENGINE_INTERNAL_H
#define DI_ENGINE_INTERNAL_H

#include <pthread.h>

#include "base/base.h"
#include "engine.h"
#include "sched/sched.h"

/* Rows of the trace. */
enum { DI_TRACE_ENGINE = 1, DI_TRACE_RUNNER = 2 };

/* Tokens that follow for certain, because a constraint allows nothing else, and that are verified like drafts where
 * there is no draft module. */
enum { DI_SURE_MAX = 5 };

typedef struct di_sequence di_sequence;
typedef struct di_step di_step;

/* ---- sequence -----------------------------------------------------------------------------------------------------
 */

typedef enum di_seq_state {
    DI_SEQ_HELD,    /* waits for sample 0 of its request to run the prompt */
    DI_SEQ_WAITING, /* in the queue */
    DI_SEQ_RUNNING, /* has a state slot and blocks */
    DI_SEQ_ENDED    /* its DONE event was sent; kept until no step holds it any more */
} di_seq_state;

/* The masks of the rows that come next in a sequence with a constraint (mask.c). The constraint stands n_ahead tokens
 * behind position: drafts that it has accepted for the rows' sake. */
typedef struct di_mask_rows {
    di_constraint constraint; /* owned */
    int64_t position;         /* of the token that row 0 gives */
    int32_t n_ahead;
    int32_t n_rows; /* rows that are filled */
    bool has_ended; /* there is no further row: the draft behind the last one can't come, or ends it */
    int32_t only[DI_SPEC_DRAFTS_MAX + 1]; /* the one token that a row allows; -1: more */
    di_status status;                     /* with error: no row behind the filled ones can be made */
    di_error error;
    size_t n_words; /* of a row */
    uint32_t words[];
} di_mask_rows;

/* One sample of a request inside the engine.
 *
 *   submit -> (held) -> waiting <-> running -> DONE event -> ended -> freed
 *
 * tokens holds prompt and output. Rows [0, n_done) have been run by finished steps, [n_done, n_sched) are with the
 * runner; with n_coming 1 the next token (and
 * what drafts add to it) is being sampled and not known yet:
 *
 *   tokens  0 ......... n_done ......... n_sched
 *
 * While it decodes, where a step's rows begin depends on how many drafts the step before has accepted: the runner knows
 * (golden), the engine's thread only that it is at most drafts_asked further on.
 */
struct di_sequence {
    /* What the runner reads. Fields that change with every token lie further on, in other cache lines. */
    di_core *core;
    int32_t *tokens;      /* owned [n_prompt + max_tokens] */
    di_sampling sampling; /* max_tokens settled; lists owned (memory) */
    uint64_t seed;        /* of this sample */
    int64_t n_prompt;
    bool has_history;
    di_history history;
    void *memory;        /* owned: copies of stop strings, bias, stop tokens, forced tokens, units */
    bool may_draft;      /* the draft module may draft for it: nothing of it is given beforehand */
    int32_t ahead_max;   /* rows behind its newest token's that a step may have */
    di_mask_rows *masks; /* owned; the runner's while it is running; NULL: no constraint */
    /* [drafts, n_vocab], from its admission on: what drafts were drawn from; NULL: not kept. Owned, or, where the
     * device draws, the core's device memory at ln_slot. */
    float *draft_ln;
    di_core_callback callback;
    void *user;
    const di_span *units; /* [n_units] */
    size_t n_units;
    const int32_t *forced_first;
    size_t n_forced_first;

    /* The runner's own, while a step has the sequence: where its decoding stands. */
    int64_t golden;                /* position of its newest token, whose row comes next */
    int32_t coming_row;            /* of the draw that is on the device: where its next token will be; -1: nowhere */
    int64_t coming_at;             /* position of that token */
    int32_t n_drafts;              /* tokens behind it that are drafts */
    int64_t put_off, put_off_end;  /* rows whose keys for the draft module are put off */
    float raw[DI_SPEC_DRAFTS_MAX]; /* their confidences */
    float chances[DI_SPEC_DRAFTS_MAX]; /* calibrated */
    float before[DI_SPEC_DRAFTS_MAX];  /* those of the round before */
    int32_t n_before;                  /* 0: there was none */
    bool has_chances;                  /* of this decoding */
    int32_t n_unsure;                  /* its first drafts, of which not all were certain anyway */
    bool is_drafted;                   /* by the module, not by a constraint alone */
    di_spec_guard guard;
    double round_cost; /* tokens that the round's time is worth */

    di_sched_item item;
    di_sequence *prev, *next; /* in the list of all sequences */
    di_sequence *held;        /* of sample 0: the samples that wait for it, in a list by next_held */
    di_sequence *next_held;   /* in such a list; of an ended one, in the core's */
    di_sequence *leader;      /* of a held sample */
    di_seq_state state;
    bool is_aborted;

    int64_t n_tokens; /* known to the engine's thread */
    int64_t n_done, n_sched;
    bool is_decoding;           /* its prompt was launched whole: each step has its newest token's row, and drafts */
    int32_t drafts_asked;       /* at most, in the step that is with the runner */
    int64_t n_lost;             /* rows that had been run when its memory was taken */
    int32_t n_coming, n_flight; /* tokens that are being sampled; steps that hold the sequence */
    uint32_t epoch;             /* rises when its rows are given up: results of earlier steps bring a token at most */
    int64_t deadline_ns;

    float *logprobs;      /* owned, grows */
    di_logprob *top;      /* owned, grows */
    int64_t logprobs_cap; /* tokens that both have room for */
    float *prompt_logprobs;
    di_logprob *prompt_top;

    int32_t *blocks; /* owned [blocks_max]; held while running */
    int32_t n_blocks, blocks_max, slot, tap_slot, ln_slot;
    int32_t run_idx;     /* index in core->running */
    int64_t rect;        /* first position that consumer layers keep (bounded replay); 0: all */
    int64_t valid_start; /* window keys before it don't exist */
    int64_t page_from;   /* pages before it were found in the cache */
    int64_t snapshot_at; /* border that proved to be a branching point; 0: none */

    di_kv_chain chain; /* contents of its full blocks, and how many of them the cache knows */

    di_detokenizer detok;
    di_strbuf text;
    di_stop_matcher stop; /* plain text */
    di_parser *parser;    /* owned; NULL: plain text */
    di_generation gen;    /* what callbacks see; pointers into the fields above. Last, its error is rarely touched */
};

/* ---- step ---------------------------------------------------------------------------------------------------------
 */

/* A token to draw, or (is_prompt) the log-probabilities of a token of the prompt. */
typedef struct di_step_row {
    di_sequence *seq;
    int32_t n_span;       /* this row and those of drafts behind it, which the runner fills from it */
    di_sequence *fork_of; /* the leader: the sequence has no rows of its own in this step; else NULL */
    int64_t position;     /* of the token that the row gives; the runner's where the sequence decodes */
    size_t top_at;        /* in the step's tops */
    int32_t seq_idx;      /* of the sequence, or the leader, in the step */
    int32_t logits_row;   /* among those of that sequence */
    int32_t n_top;        /* -1: no log-probabilities */
    int32_t forced;       /* the token, where it is given (always in a prompt); -1: draw one */
    bool is_prompt, is_skipped;
} di_step_row;

/* A sequence in a step, beside its di_seq_rows. */
typedef struct di_step_seq {
    di_sequence *seq;
    uint32_t epoch;
    bool is_decoding;
    int32_t drafts_max; /* that may be verified */
    int32_t sample_at;  /* first of its rows among the samples: 1 + drafts_max of them where it decodes */
    size_t blocks_at;
    int32_t snapshot_at; /* its snapshot in the step where it decodes; -1: none */
    /* the runner's */
    int32_t logits_at; /* its first row of logits; -1: it has no rows in the batch */
    int32_t n_drafts;  /* verified */
    int32_t n_new;     /* tokens that came of it: accepted drafts and one more */
} di_step_seq;

/* What came of a row: apart, so that the two threads write to few lines that the other reads. */
typedef struct di_step_result {
    int32_t token;
    float logprob;
    float distance;   /* of the target's and the draft's distributions, where rejection tests a draft */
    di_status status; /* what is wrong is in the step's errors, which are touched by failures alone */
} di_step_result;

/* A window snapshot that the step takes: where it belongs once the step is done. */
typedef struct di_step_snapshot {
    di_sequence *seq;
    uint32_t epoch;
    int32_t slot;
    int32_t n_blocks; /* of the border */
    bool is_taken;    /* false: the rows did not reach the border */
} di_step_snapshot;

struct di_step {
    /* formed by the engine's thread */
    int32_t n_seqs, n_rows;
    int64_t n_prompt_rows, context_sum, context_max;
    di_step_seq *seqs; /* owned [seqs_max] */
    di_seq_rows *rows; /* owned [seqs_max]; of decoding ones the runner sets where they begin and how many they are */
    int32_t *blocks;   /* owned [seqs_max, blocks of the longest context]: tables one after another */
    size_t n_blocks;
    di_copy *page_copies; /* owned [seqs_max]; run before the forward, as are slot copies */
    di_copy *slot_copies; /* owned [seqs_max + snapshots_max] */
    int32_t n_page_copies, n_slot_copies;
    di_ring_snapshot *snapshots;   /* owned [snapshots_max] */
    di_step_snapshot *snapshot_of; /* owned, beside them */
    int32_t n_snapshots;
    int64_t n_logits;
    di_step_row *samples;    /* owned: a row of logits each, forks and drafts' rows beside them */
    int32_t *drawn;          /* owned: the runner's list of those that are there */
    di_step_result *results; /* owned, beside them */
    di_error *errors;        /* owned, beside them */
    int32_t n_samples;
    di_logprob *tops; /* owned, grows */
    size_t n_tops, tops_cap;
    int64_t spare_rows; /* rows that drafts may take */
    bool follows;       /* some sequence was in the step before: the runner should not have had to wait */
    /* lock: runner->mutex */
    bool is_sampling_ready, is_done;
    /* written by the runner while the step is with it */
    di_error error;                                            /* of the whole step */
    int64_t start_ns, forward_ns, sample_ns, drawn_ns, end_ns; /* begun, forward done, sampling begun and done, drafts
                                                                  done */
    int64_t rows_run, context_run, row_context;                /* rows; contexts of sequences, and of all their rows */
    bool is_unrecorded;                                        /* its time is none that comes again */
    bool puts_off;                                             /* the draft module's keys of its rows */
    bool is_launched;                                          /* its forward is on the device already, behind ... */
    float *logits;                                             /* ... the draw of the step before; its logits */
    bool is_followed;                                          /* the next one's is: it drafts nothing */
    int32_t n_drawn;
    di_status draw_status; /* of its draw on the device, with draw_error */
    di_error draw_error;
    int32_t n_decoding, n_verified, n_held; /* decoding sequences with rows; drafts verified, and held */
    int32_t n_drafters;                     /* sequences with new drafts */
    double draft_error;
    int64_t calibration_n[DI_SPEC_BINS], calibration_held[DI_SPEC_BINS]; /* so far */
    double calibration_sum[DI_SPEC_BINS];
    double saved_ns; /* that drafts have saved so far */
    int64_t device_busy_ns, device_idle_ns;
    int64_t n_tested;
    double expected_sum, bound_sum;
};

/* ---- runner -------------------------------------------------------------------------------------------------------
 */

/* Drawing on the device (draw_device.c); zeroed where the host draws. */
typedef struct di_drawer {
    di_sample_pack pack;         /* the rows of this draw */
    void *input, *output, *tops; /* owned device memory */
    void *tokens;                /* owned device memory: int32_t of each row of the last draw */
    void *results, *top;         /* owned memory of alloc_host: what came of output and tops */
    void *confidences;           /* owned memory of alloc_host: float, of the drafts of a round */
    size_t input_bytes, output_bytes, tops_bytes, tokens_bytes, results_bytes, top_bytes, confidences_bytes;
    di_event *is_drawn;  /* owned: behind the downloads */
    uint32_t *blacklist; /* owned device memory; NULL: none */
} di_drawer;

/* Steps that follow in a row before it is asked again whether drafts pay. */
enum { DI_FOLLOW_MAX = 15 };

/* Time of the device (device_clock.c); zeroed where it has no stream of its own. */
enum { DI_DEVICE_SPANS = 4 };
typedef struct di_device_clock {
    di_event *begins[DI_DEVICE_SPANS], *ends[DI_DEVICE_SPANS]; /* owned; of the last spans */
    bool follows[DI_DEVICE_SPANS];                             /* the time before the span is a gap between spans */
    int64_t n_begun, n_ended, n_settled;
    int64_t busy_ns, idle_ns;
} di_device_clock;

typedef struct di_runner {
    di_executor executor;
    const di_backend *backend; /* borrowed, with device */
    di_device *device;
    di_kv *kv;
    di_replay replay;
    int32_t n_vocab, eos_id;
    const uint32_t *blacklist;
    const struct di_trace *trace;

    /* speculation */
    int32_t n_drafts; /* of a round; 0: none */
    uint8_t *taps;    /* borrowed; NULL: keys are never put off */
    int64_t ring_rows, rows_max;
    int32_t *drafter_rows; /* owned [seqs_max]: the drafters' rows in the step */
    bool is_drafting;      /* the last step had a drafting round */
    /* Where drafting has not paid for a while, a round is made and verified all the same: else a model of costs that
     * has gone wrong would never be put right. */
    bool is_probing;
    int32_t steps_idle, probe_after; /* steps without a round; so many until the next probe */
    int32_t n_followed;              /* steps in a row that were followed, so that they could not draft */
    int32_t n_going;                 /* sequences that go on behind the last step */
    int32_t n_asked, n_changed;      /* those when drafts were last decided on; as many have begun or ended since */
    int64_t plain_step, plain_tried; /* n_steps of the last plain step, and when some were last made on purpose */
    di_spec_accept accept;
    const float *temperatures;     /* borrowed [n_drafts]; 0 in the first: not given */
    di_spec_curve *curve;          /* owned; NULL but for DI_SPEC_REFERENCE */
    struct di_masker *masker;      /* owned; fills masks beside forwards. Made with the first constraint */
    struct di_mask_job *mask_jobs; /* owned [seqs_max] */
    int32_t n_mask_jobs;
    int64_t context_max, n_steps, n_draft_fails;
    int64_t last_drawn_ns, last_end_ns; /* end of the last step's draw, and of the step */
    int64_t turn_ns;                    /* what the host took between a step that drafted and the one behind it, where
                                           a step that drafts nothing could have been launched ahead */
    double rate;                        /* running chance that a draft holds if those before it do */
    int64_t n_tried;                    /* drafts that it was learnt from */
    double saved_ns;
    int64_t n_tested;               /* drafts that rejection tested */
    double expected_sum, bound_sum; /* of 1 - d and (1 - d) / (1 + d), d being their distances */
    double rate_hint;
    di_spec_policy policy;
    di_spec_cost cost;
    di_spec_calibration calibration;
    di_spec_seq *plan_seqs; /* owned [seqs_max], as are those below */
    int32_t *plan;
    void *plan_scratch;
    di_draft_seq *draft_seqs;
    di_sequence **drafters;
    di_sequence **sure; /* sequences that may have tokens that are certain */
    int32_t n_sure;
    int32_t *draft_prev;
    bool *draft_is_drawn; /* drafters that draw their next draft, where the device draws */
    float *draft_conf;
    di_error *draft_errors;
    di_seq_rows *batch;

    int32_t seqs_max;
    di_drawer drawer;
    di_device_clock clock;
    di_sampler *samplers; /* owned [n_workers], with a row of logits each; NULL where the device draws */
    float **rows;
    int n_workers;

    pthread_t thread;
    bool has_thread, has_locks;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    di_step *queue[2]; /* lock: mutex */
    int n_queued;      /* lock: mutex */
    bool is_stopping;  /* lock: mutex */
} di_runner;

di_status di_runner_init(di_runner *r, di_error *err); /* the fields before samplers are set */
void di_runner_deinit(di_runner *r);                   /* finishes what was launched first; zeroed storage is fine */
void di_runner_launch(di_runner *r, di_step *step);
/* The rows' arguments are filled: the step may sample. */
void di_runner_sample(di_runner *r, di_step *step);
void di_runner_wait(di_runner *r, di_step *step);
static inline int64_t di_runner_unrecorded(const di_runner *r) {
    return r->executor.n_unrecorded ? r->executor.n_unrecorded(r->executor.self) : 0;
}
/* Makes the draft module's keys of rows that were put off, of sequences [n] whose rows in the step are at `at` [n]. On
 * failure they are put off still. Called by the runner's thread. */
di_status di_runner_catch_up(di_runner *r, const di_step *step, di_sequence *const *seqs, const int32_t *at, int32_t n,
                             di_error *err);

/* ---- mask.c: constraints ---- */
/* A place for the masks of n_rows rows; takes the constraint over, on failure too. */
di_status di_masks_create(di_mask_rows **out, const di_constraint *constraint, int32_t n_vocab, int32_t n_rows,
                          int64_t position, di_error *err);
void di_masks_destroy(di_mask_rows *m); /* NULL is fine */
/* The next row of s gives the token of `position`; the tokens before it are known. `anew`: nothing is known of what was
 * accepted so far. */
void di_masks_begin(di_sequence *s, int64_t position, bool anew);
/* Fills rows up to n_rows, as far as the drafts behind the first position go. */
void di_masks_fill(di_sequence *s, int32_t n_rows);
/* Both for one sequence. */
typedef struct di_mask_job {
    di_sequence *seq;
    int64_t position;
    int32_t n_rows;
    bool anew;
} di_mask_job;
void di_masks_run(const di_mask_job *job);
/* Threads that fill masks while a forward runs. */
typedef struct di_masker di_masker;
di_status di_masker_create(di_masker **out, int n_threads, di_error *err);
void di_masker_destroy(di_masker *k); /* NULL is fine */
/* Starts jobs [n] of different sequences; all that they concern stays as it is until di_masker_wait. */
void di_masker_start(di_masker *k, const di_mask_job *jobs, int32_t n);
void di_masker_wait(di_masker *k);

/* ---- draw_device.c: rows drawn on the device, where the executor has `sample` ---- */
di_status di_drawer_init(di_runner *r, di_error *err);
void di_drawer_deinit(di_runner *r);
/* A draw of at most n_rows rows begins; they are added to r->drawer.pack. */
di_status di_drawer_begin(di_runner *r, int32_t n_rows, di_error *err);
/* Puts it on the stream; tokens are in r->drawer.tokens for what comes behind it there. */
di_status di_drawer_launch(di_runner *r, const float *logits, di_error *err);
/* Its parts, for rows that are drawn a few at a time: all rows are sent to the device, rows [first, first + n) are
 * drawn from `logits`, and what came of all of them comes back. */
di_status di_drawer_send(di_runner *r, di_error *err);
di_status di_drawer_put(di_runner *r, const float *logits, int32_t first, int32_t n, di_error *err);
di_status di_drawer_fetch(di_runner *r, di_error *err);
/* Between send and fetch: confidences [n] (device) of the drafts that rows from `first` on draw come along. */
di_status di_drawer_fetch_confidences(di_runner *r, const float *conf, int32_t first, int32_t n, di_error *err);
/* Waits for it: di_drawer_results, and lists of the best into `top` (host), as far as the rows ask for them. */
di_status di_drawer_wait(di_runner *r, di_logprob *top, di_error *err);
/* Both. */
di_status di_drawer_run(di_runner *r, const float *logits, di_logprob *top, di_error *err);
static inline const di_sample_result *di_drawer_results(const di_runner *r) {
    return r->drawer.results;
}
static inline const float *di_drawer_confidences(const di_runner *r) {
    return r->drawer.confidences;
}

/* ---- device_clock.c: how long the device works and waits, where the executor has `launch` ---- */
di_status di_device_clock_init(di_runner *r, di_error *err);
void di_device_clock_deinit(di_runner *r);
/* A span of work begins on the stream; follows: there was no reason for the device to wait since the one before. */
void di_device_clock_begin(di_runner *r, bool follows);
void di_device_clock_end(di_runner *r);
/* Adds up the spans that are over. */
void di_device_clock_settle(di_runner *r);

/* ---- draw.c: from logits to tokens and drafts; called by the runner's thread ---- */
/* Sum of the contexts of n rows from pos0 on: of the row at position p, p + 1. */
static inline int64_t di_step_row_context(int64_t pos0, int64_t n) {
    return n * pos0 + n * (n + 1) / 2;
}
/* How many drafts each decoding sequence of the step verifies. */
void di_step_plan(di_runner *r, di_step *step);
/* Draws the step's rows, decides which drafts hold and writes tokens where the next forward reads them. */
void di_step_draw_begin(di_runner *r, di_step *step, const float *logits);
/* Behind begin, which puts the draw on the device's stream where it has one: what stands there is waited for. */
void di_step_draw_end(di_runner *r, di_step *step);
/* Whether the next round that is not made because it does not pay is made all the same. */
bool di_step_probe_is_due(const di_runner *r);
/* A drafting round for the sequences that go on. */
void di_step_draft(di_runner *r, di_step *step);

/* ---- the engine's state ------------------------------------------------------------------------------------------
 */

struct di_core {
    const di_backend *backend; /* borrowed, with device and tok */
    di_device *device;
    const di_tokenizer *tok;
    di_core_options options;
    di_core_model model;
    di_forward *forward; /* owned; NULL with an executor from outside */
    int64_t keep;        /* of the replay; 0 = off */
    di_kv kv;
    uint8_t *taps; /* owned device memory [seqs_max, tap_bytes]; NULL: the draft module's keys are never put off */
    di_kv_pool tap_slots;   /* of it */
    float *draft_ln;        /* owned device memory [seqs_max, drafts, n_vocab], where the device draws; else NULL */
    di_kv_pool ln_slots;    /* of it */
    di_prefix *prefix;      /* owned; NULL: no prefix cache */
    int32_t snapshot_every; /* blocks between the snapshots of a long prompt */

    di_strbuf piece; /* what the token that is committed has released */
    di_sched_queue queue;
    di_pace pace;
    di_sequence *all;      /* every sequence that is not freed */
    di_sequence **running; /* owned [seqs_max]: in no order */
    int32_t n_running;
    int64_t n_held;
    di_sequence *ended; /* sequences that only a step holds, by next_held */
    uint64_t id_last, arrival_last;
    bool is_draining, has_aborted;
    int64_t deadline_next_ns; /* no deadline is earlier; INT64_MAX: none */

    di_runner runner;
    di_step steps[2];
    int step_next;                                /* the one to form next */
    di_step *in_flight;                           /* launched and not committed */
    int32_t *held;                                /* owned [n_blocks]: di_core_check counts there */
    di_copy *late_page_copies, *late_slot_copies; /* owned [seqs_max]: forks, for the next step */
    int32_t n_late_page_copies, n_late_slot_copies;
    int64_t last_end_ns; /* of the last step that was committed */
    di_core_stats stats;
    int64_t log_steps, log_tokens, log_ns, log_forward_ns, log_sample_ns; /* at the last line of statistics */
};

/* Rows at the end of a prompt that consumer layers run on: keep, or the exact bound for 0; 0 when replay is off.
 * DI_ERR_ARG when the model has no consumers or keep is below window + backtracking. */
di_status di_replay_settle(const di_config *config, di_replay replay, int64_t keep, int64_t *settled, di_error *err);

/* ---- sequence.c ---- */
/* Checks the submission and makes sample `index` of it. */
di_status di_sequence_create(di_sequence **out, di_core *core, const di_submission *submission, int32_t index,
                             di_error *err);
void di_sequence_destroy(di_sequence *s);
/* The next token where it is given; -1: to be drawn. */
int32_t di_sequence_forced(const di_sequence *s);
/* Appends the token that was drawn, with its log-probabilities, sends its events and applies the stop rules. The
 * sequence is finished when gen.finish is no longer NONE. */
void di_sequence_advance(di_sequence *s, int32_t token, float logprob, const di_logprob *top);
/* Log-probabilities of the prompt's token at `position`. */
void di_sequence_prompt_logprobs(di_sequence *s, int64_t position, float logprob, const di_logprob *top);
/* A fork has the prompt of its leader. */
void di_sequence_copy_prompt_logprobs(di_sequence *s, const di_sequence *leader);
/* Ends it for a reason from outside; text that was held back is released. Does nothing when it is finished. */
void di_sequence_abort(di_sequence *s);
void di_sequence_fail(di_sequence *s, const di_error *error);
/* Sends the DONE event. */
void di_sequence_done(di_sequence *s);
static inline bool di_sequence_is_finished(const di_sequence *s) {
    return s->gen.finish != DI_FINISH_NONE;
}
/* A constraint has nothing to say behind an end mark. */
static inline bool di_sequence_ends_at_eos(const di_sequence *s) {
    return !s->sampling.ignore_eos || s->masks;
}
/* Positions that may have a row: the last token of the longest answer is never run. */
static inline int64_t di_sequence_rows_max(const di_sequence *s) {
    return s->n_prompt + s->sampling.max_tokens - 1;
}
/* Whether the prompt's log-probabilities are still to be made, for which every row of it is run. */
static inline bool di_sequence_scores_prompt(const di_sequence *s) {
    return s->sampling.n_prompt_logprobs >= 0 && s->gen.n_tokens + s->n_coming == 0;
}
/* Whether the sequence has as many tokens as it may, so that its newest needs no row: only the runner can tell. */
static inline bool di_sequence_is_whole(const di_sequence *s) {
    return s->golden >= di_sequence_rows_max(s);
}

/* The unit that position p lies in behind its first position; NULL: none. */
const di_span *di_sequence_unit_at(const di_sequence *s, int64_t p);

/* ---- memory.c: blocks, slots and cached prefixes of sequences ---- */
/* Blocks for n_tokens rows in all, cached ones evicted where needed; false, with nothing changed: not now. */
bool di_seq_grow(di_core *c, di_sequence *s, int64_t n_tokens);
/* Looks for the longest cached prefix, takes a slot and blocks for all known tokens beside n_reserved blocks that stay
 * free, and sets where to start; what must be copied goes into the step. False, with nothing held: not now. */
bool di_seq_admit(di_core *c, di_step *step, di_sequence *s, int64_t n_reserved);
/* A sample beside its leader, whose prompt the step finishes: shares full blocks; the last one and the slot are copied
 * before the next step; n_reserved blocks stay free. False, with nothing held: not now. */
bool di_seq_fork(di_core *c, di_sequence *s, const di_sequence *leader, int64_t n_reserved);
/* Gives back what it holds. What a step in flight still does with it comes before all later steps. */
void di_seq_release(di_core *c, di_sequence *s);
/* Blocks that finished steps have filled become known to the prefix cache. */
void di_seq_publish(di_core *c, di_sequence *s);
/* Adds to the step the snapshots that the rows from pos0 on shall take, and returns how many. */
int32_t di_seq_plan_snapshots(di_core *c, di_step *step, di_sequence *s, int64_t pos0, int64_t n_rows);
/* The snapshot that a decoding sequence may take at its next border, if rows up to `end` can reach it: its place in the
 * step, -1: none. */
int32_t di_seq_plan_snapshot(di_core *c, di_step *step, di_sequence *s, int64_t end);
/* What does not hold of sequences, blocks and slots between two steps ; NULL: all does. Looks at
 * everything: for tests and debug builds. */
const char *di_core_check(const di_core *c);
/* After the step: its snapshots become the cache's, or their slots are given back. */
void di_step_keep_snapshots(di_core *c, di_step *step);

/* ---- step.c ---- */
di_status di_step_init(di_step *step, const di_core *c, di_error *err);
void di_step_deinit(di_step *step);

/* ---- measure.c ---- */
/* Measures steps for the policy of drafts, within options.measure_ns. Before the first request. */
void di_core_measure(di_core *c);

/* ---- core.c ---- */
/* Rows that a step may have behind the newest token's of any sequence. */
static inline int32_t di_core_ahead_max(const di_core *c) {
    return DI_MAX(c->options.draft_tokens, (int32_t)DI_SURE_MAX);
}
/* Takes a sequence out of the list of all. */
void di_core_unlink(di_core *c, di_sequence *s);
/* A line of statistics in the log when enough steps have passed since the last. */
void di_core_log_stats(di_core *c);

#endif
