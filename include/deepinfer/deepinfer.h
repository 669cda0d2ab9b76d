/* DeepInfer: inference for DeepSeek-V4.1-Flash. This header is the whole public API; text.h, grammar.h and status.h can
 * be used alone. Every function that can fail returns a di_status and takes a `di_error *` last, which may be NULL.
 * Nothing in the library exits or aborts on bad input or writes to standard output.
 *
 * An engine loads a model and runs requests on a thread of its own; what comes of a request is told by a callback:
 *
 *     di_engine_config config;
 *     di_engine_config_init(&config, sizeof config);
 *     config.model = "models/tiny";
 *     if (di_engine_create(&config, &engine, &err)) ...
 *     di_engine_request request;
 *     di_engine_request_init(&request, sizeof request);
 *     request.json = "{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}";
 *     request.json_len = strlen(request.json);
 *     if (di_engine_submit(engine, &request, on_event, user, &id, &err)) ...
 *
 * Structures that the caller fills begin with their size, which the _init function of each sets: fields that a later
 * version appends keep their defaults for programs that were built earlier. */
#ifndef DEEPINFER_DEEPINFER_H
#define DEEPINFER_DEEPINFER_H

#include "deepinfer/grammar.h"
#include "deepinfer/status.h"
#include "deepinfer/text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header, "major.minor.patch". */
#define DI_VERSION "0.1.0"

/* Version of the library, as DI_VERSION of the header that it was built with. */
DI_API const char *di_version(void);

/* Lines of the log up to this level ("error", "warn", "info", "debug") go to standard error from now on; before the
 * first call, those up to "warn". Of the process, not of an engine: call it before the first engine is created.
 * DI_ERR_ARG for another word. */
DI_API di_status di_log_level_set(const char *level, di_error *err);

/* ---- sampling parameters -------------------------------------------------------------------------------------------
 */

/* How tokens are drawn, with the names and meanings of a request line's fields (docs/interface.md). All lists are
 * borrowed for the call that takes the structure. */
typedef struct di_engine_sampling {
    size_t struct_size;
    int32_t n;          /* samples; sample j is what the request alone gives with seed + j. Default 1, at most 1024 */
    int64_t max_tokens; /* 0, the default: 8192, more with thinking; always cut to what the context leaves */
    int64_t min_tokens; /* tokens before an end mark or a stop token can come; default 0 */
    double temperature; /* default 1; below 1e-5 always the most likely token */
    double top_p;       /* above 0, at most 1, the default */
    int64_t top_k;      /* -1, the default, and 0: off */
    double min_p;       /* 0, the default, to 1 */
    double presence_penalty, frequency_penalty; /* -2 to 2; default 0 */
    double repetition_penalty;                  /* above 0; default 1 */
    bool has_seed;                              /* false, the default: a seed is drawn where one is needed */
    bool ignore_eos;                            /* go on behind the model's own end mark */
    bool logprobs_processed;                    /* log-probabilities after temperature, top-p and top-k */
    uint64_t seed;
    int32_t logprobs;        /* n >= 0: of each token and the n most likely ones; -1, the default: none */
    int32_t prompt_logprobs; /* the same for the tokens of the prompt */
    size_t n_stop;           /* stop strings, UTF-8 */
    const char *const *stop; /* [n_stop] */
    const size_t *stop_len;  /* [n_stop]; NULL: each ends with NUL */
    size_t n_stop_tokens;    /* ids that end the output */
    const int32_t *stop_tokens;
    size_t n_bias; /* added to logits */
    const int32_t *bias_tokens;
    const float *bias; /* [n_bias] */
    size_t n_forced;   /* the first output tokens, given */
    const int32_t *forced_tokens;
} di_engine_sampling;

/* Sets the defaults. struct_size is sizeof *sampling. */
DI_API void di_engine_sampling_init(di_engine_sampling *sampling, size_t struct_size);

/* ---- engine -------------------------------------------------------------------------------------------------------
 */

typedef struct di_engine di_engine;

/* What an engine runs and within which limits: the options of the command line (docs/options.md). Strings and lists are
 * borrowed for the call of di_engine_create. */
typedef struct di_engine_config {
    size_t struct_size;
    const char *model;    /* folder with config.json, tokenizer.json and the weights; must be set */
    const char *backend;  /* "auto" (the default), "cpu", "nvidia", "ascend" */
    int32_t threads;      /* that compute; 0, the default: all processors. The results don't depend on it */
    const char *cpu_isa;  /* level of the processor's kernels; default "auto" */
    bool is_pinned;       /* each thread that computes on a processor of its own */
    bool is_dummy;        /* make the weights up from config.json */
    int32_t dummy_layers; /* above 0: no folder, so many layers at the released dimensions with made-up weights */
    const char *numerics; /* "faithful" (the default) or "exact" */
    bool is_order_free; /* sums may depend on what else is in the batch, where that is faster; default false: always the
                           same bits */
    int32_t seqs_max;   /* samples that run at once; default 16 */
    int64_t batch_tokens_max; /* tokens of one step, at least seqs_max; default 2048 */
    int64_t chunk_max;        /* tokens of one prompt in one step; 0, the default: 512, on a GPU batch_tokens_max */
    int64_t context_max;      /* prompt and output of one sample; 0, the default: the model's, or what memory allows */
    int64_t context_sum_max;  /* contexts of all samples of one step; 0, the default: no limit */
    int64_t kv_bytes;         /* memory of the key-value cache; 0, the default: planned */
    const char *replay;       /* "off" (the default), "mask", "compact" */
    int64_t replay_keep;      /* rows at the end of a prompt that the upper layers see; 0, the default: exact */
    int32_t draft_tokens;     /* that the draft module guesses ahead, where the model has one; default 5, 0: none. The
                                 results are the same */
    const char *draft_policy; /* how many of them are verified: "cost" (the default), "reference": by the released
                                 engine's algorithm, or "fixed": all */
    const char *accept;       /* "coupled" (the default): results are the same without drafts; "rejection": their
                                 distribution alone is */
    const char *draft_temperatures; /* of the draft module's confidences: "1.2" or one for each draft, "1.2,1.1,..";
                                       NULL, the default: learnt */
    const char *step_times;         /* folder that keeps what was learnt of step times between runs; NULL, the default:
                                       none */
    int64_t step_times_ttl_s;       /* age from which on it is not read any more; default 604800 */
    bool has_prefix_cache;          /* the default: true */
    bool is_sync;          /* every step is finished before the next is formed. False, the default, is faster */
    int64_t queue_max;     /* samples that wait beyond the seqs_max that can run; more are refused with DI_ERR_BUSY. 0,
                              the default: no limit */
    double ttft_goal_ms;   /* time to first token that the scheduler aims at; 0, the default: none */
    double tpot_goal_ms;   /* time per output token, likewise */
    const char *blacklist; /* tokens that are never drawn: "0..3,7"; NULL, the default: none */
    const char *trace;     /* file that gets what ran when, as JSON for browsers' trace viewers; NULL: none */
    int64_t log_interval_steps; /* steps between lines of statistics in the log (level "info"); default 100, 0: none */
    /* Grammars that outputs follow. */
    int32_t grammar_threads;     /* that compile them; default 2 */
    int64_t grammar_cache_bytes; /* of compiled ones that are kept; default 256 MiB, 0: none */
    double grammar_timeout_s;    /* of one compilation; default 20 */
    /* Defaults of requests. */
    bool vendor_compat;                 /* JSON requests are read as the hosted service does */
    const char *reasoning;              /* of requests that name neither thinking nor effort: "none" (NULL too; with
                                           vendor_compat NULL is "high"), "low", "high", "max", "1" to "100" */
    const di_engine_sampling *sampling; /* of fields that a JSON request does not name (n and forced tokens are not
                                           read); NULL: those of di_engine_sampling_init. Copied */
    /* Called while weights are read, from the thread of di_engine_create; NULL: not at all. */
    void (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_user;
    int32_t device;             /* which of the machine's accelerators; default 0 */
    const char *device_kernels; /* of an accelerator: "auto" (the default; NULL too), "portable", "sm90", "sm100" */
} di_engine_config;

/* Sets the defaults. struct_size is sizeof *config. */
DI_API void di_engine_config_init(di_engine_config *config, size_t struct_size);

/* Loads the model and starts the engine's thread. Engines share nothing: a process may have several. DI_ERR_ARG for the
 * configuration, DI_ERR_NOT_FOUND, DI_ERR_IO, DI_ERR_FORMAT and DI_ERR_UNSUPPORTED for the model's files,
 * DI_ERR_MEMORY saying what is needed and what there is, DI_ERR_DEVICE. Released by di_engine_destroy. */
DI_API di_status di_engine_create(const di_engine_config *config, di_engine **out, di_error *err);

/* Ends what still runs, with a DONE event (finish reason "abort") for each sample, and frees the engine when all these
 * events have been handled. NULL is fine. No other call on the engine may run or come later; inside a callback it does
 * nothing. */
DI_API void di_engine_destroy(di_engine *engine);

/* The model's tokenizer, which lives as long as the engine; NULL when the model has none. Any thread. */
DI_API const di_tokenizer *di_engine_tokenizer(const di_engine *engine);
/* Tokens that prompt and output of a sample can have together. Any thread. */
DI_API int64_t di_engine_context_max(const di_engine *engine);

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

/* Bits of di_engine_request.events. */
enum {
    DI_ENGINE_WANTS_TOKENS = 1 << 0,
    DI_ENGINE_WANTS_TEXT = 1 << 1, /* DI_ENGINE_TEXT and DI_ENGINE_OUTPUT */
    DI_ENGINE_WANTS_ALL = DI_ENGINE_WANTS_TOKENS | DI_ENGINE_WANTS_TEXT
};

/* A request: one of json, text and ids is not NULL. Everything is copied. */
typedef struct di_engine_request {
    size_t struct_size;
    const char *json; /* an object; its fields say how tokens are drawn, `sampling` is not read */
    size_t json_len;
    const char
        *json_api;    /* whose fields: "line" (NULL too: a line of `run --input`), "chat", "responses", "messages" */
    const char *text; /* a plain prompt, UTF-8; added tokens are recognised, the begin mark is put in front */
    size_t text_len;
    const int32_t *ids; /* a prompt of token ids, taken as it is */
    size_t n_ids;
    const di_engine_sampling *sampling; /* with text and ids; NULL: the defaults of di_engine_sampling_init */
    bool has_priority;                  /* takes the place of the JSON's */
    int32_t priority;                   /* lower goes first; default 0 */
    const char *caller;                 /* who asks, for fair shares; NULL: what the JSON says, else nobody */
    const char *cache_salt; /* cached prefixes are shared only with the same salt; NULL: what the JSON says */
    int64_t deadline_ms;    /* from now; a request that takes longer ends with DI_ERR_CANCELLED. 0: never */
    uint32_t events;        /* which events the callback gets, DI_ENGINE_WANTS_ bits; DONE always comes. Default all */
    /* What the output has to follow, with text and ids; at most one is not NULL. JSON requests name it themselves. A
     * grammar is compiled beside the engine; one that can't be ends the request with its error. */
    const char *json_schema, *regex, *ebnf;
} di_engine_request;

/* Sets the defaults. struct_size is sizeof *request. */
DI_API void di_engine_request_init(di_engine_request *request, size_t struct_size);

/* A token with its log-probability. */
typedef struct di_engine_logprob {
    int32_t token;
    float logprob;
} di_engine_logprob;

typedef enum di_engine_event_kind {
    DI_ENGINE_TOKEN,  /* a token was drawn; comes before the text that it releases */
    DI_ENGINE_TEXT,   /* a piece of text that is certain now; requests without messages */
    DI_ENGINE_OUTPUT, /* a piece of a parsed output; requests with messages */
    DI_ENGINE_DONE    /* the last event of every sample of a request that was taken */
} di_engine_event_kind;

typedef enum di_engine_output {
    DI_ENGINE_REASONING,  /* text */
    DI_ENGINE_CONTENT,    /* text */
    DI_ENGINE_CALL_BEGIN, /* a tool call: call_id, text = the function's name */
    DI_ENGINE_CALL_ARGS,  /* call_id, text = a piece of the arguments' JSON text */
    DI_ENGINE_CALL_END    /* call_id; is_cut: the output ended inside the call */
} di_engine_output;

/* What came of a sample. Everything is borrowed for the call of the callback. */
typedef struct di_engine_result {
    size_t struct_size;
    const char *finish_reason; /* "stop", "length", "tool_calls", "abort", "error" */
    di_error error;            /* of "error"; code DI_OK otherwise. DI_ERR_CANCELLED: the deadline passed */
    const char *text;          /* the decoded output as it is, without end mark and stop string; ends with NUL */
    size_t text_len;
    const int32_t *prompt_tokens; /* [n_prompt] */
    int64_t n_prompt;
    const int32_t *tokens; /* [n_tokens], an end mark that ended it included */
    int64_t n_tokens;
    int64_t n_cached;             /* tokens of the prompt that did not have to be run */
    int64_t n_reasoning;          /* tokens of the output that are thinking */
    const float *logprobs;        /* [n_tokens]; NULL unless asked for */
    const di_engine_logprob *top; /* [n_tokens, n_top]; token -1: there are no more. NULL unless asked for */
    int32_t n_top;
    int32_t n_prompt_top;
    const float *prompt_logprobs;        /* [n_prompt], the first is NaN; NULL unless asked for */
    const di_engine_logprob *prompt_top; /* [n_prompt, n_prompt_top] */
    int64_t stop_string;                 /* index of the stop string that ended it, -1: none */
    int32_t stop_token;                  /* the stop token that ended it, -1: none; the model's own end mark is none */
    bool has_seed;                       /* false: no seed was given and none needed */
    uint64_t seed;                       /* of this sample */
    int64_t queued_ns;                   /* from submission to the first step */
    int64_t first_ns;                    /* from submission to the first token */
    int64_t total_ns;                    /* from submission to the last token */
    int32_t n_preempted;                 /* how often others took its memory */
    int64_t n_drafts;                    /* drafts verified for it */
    int64_t n_accepted;                  /* those of them that became output */
} di_engine_result;

/* Everything is borrowed for the call of the callback. */
typedef struct di_engine_event {
    size_t struct_size;
    di_engine_event_kind kind;
    int32_t index; /* which of the request's samples, from 0 */
    uint64_t id;   /* of the request, as given by di_engine_submit */
    /* TOKEN */
    int32_t token;
    float logprob;                /* NaN unless asked for */
    const di_engine_logprob *top; /* [n_top]; token -1: there are no more */
    int32_t n_top;
    /* OUTPUT */
    di_engine_output output;
    int64_t call_id; /* from 0; -1 unless it is about a call */
    bool is_cut;
    /* TEXT, OUTPUT: whole characters, not ended with NUL */
    const char *text;
    size_t text_len;
    /* DONE */
    const di_engine_result *result;
    int64_t n_cached; /* all: tokens of the prompt that did not have to be run */
} di_engine_event;

/* Takes the events of a request, in order, on the engine's thread, which waits meanwhile: be quick. It may submit and
 * abort requests and ask for statistics. Anything but 0 ends the sample at once, with finish reason "abort"; what is
 * returned for DONE is ignored. */
typedef int (*di_engine_callback)(void *user, const di_engine_event *event);

/* Queues a request. Any thread. JSON, texts and parameters are checked and encoded on the caller's thread; on error
 * nothing is queued and no event comes: DI_ERR_REQUEST or DI_ERR_RANGE for what was asked, with a message that can be
 * sent to whoever asked, DI_ERR_BUSY when the queue is full or the engine ends, DI_ERR_ARG for the structure itself.
 * What shows later is told by the DONE events. *id (id may be NULL) is set before the first event. */
DI_API di_status di_engine_submit(di_engine *engine, const di_engine_request *request, di_engine_callback callback,
                                  void *user, uint64_t *id, di_error *err);

/* Ends a request: its samples get their DONE event soon, with finish reason "abort" and the text so far. Any thread.
 * False when no such request is there any more. */
DI_API bool di_engine_abort(di_engine *engine, uint64_t id);

/* The result as one JSON object, a result line of `run --input` without line feed: *json is a new text of *len bytes
 * (len may be NULL) with a NUL behind, released by di_free. Only inside the callback that got the result. */
DI_API di_status di_engine_result_json(const di_engine_result *result, char **json, size_t *len, di_error *err);
/* The same for a request that was refused: the line that stands in its place, with the error. Any thread. */
DI_API di_status di_engine_refusal_json(const di_engine_request *request, const di_error *refused, char **json,
                                        size_t *len, di_error *err);

/* From now on requests are refused as busy; waits until those that are there have had their last event. timeout_ms
 * below 0: as long as it takes. DI_ERR_BUSY when some still run then (they go on, and draining may be asked for again),
 * DI_ERR_ARG inside a callback. Any thread. */
DI_API di_status di_engine_drain(di_engine *engine, int64_t timeout_ms, di_error *err);

/* ---- statistics ---------------------------------------------------------------------------------------------------
 */

/* X(type, kind, name, meaning). counter: only rises, since the start; gauge: now. Times are in nanoseconds. */
#define DI_ENGINE_STATS_LIST(X)                                                                                        \
    X(int64_t, counter, n_steps, "steps run")                                                                          \
    X(int64_t, counter, n_prefill_steps, "steps with tokens of prompts")                                               \
    X(int64_t, counter, n_decode_steps, "steps without")                                                               \
    X(int64_t, counter, n_submitted, "samples taken")                                                                  \
    X(int64_t, counter, n_finished, "samples that ended, for any reason")                                              \
    X(int64_t, counter, n_stop, "samples ended by the model or a stop rule")                                           \
    X(int64_t, counter, n_length, "samples ended by their length")                                                     \
    X(int64_t, counter, n_abort, "samples ended from outside")                                                         \
    X(int64_t, counter, n_error, "samples that failed")                                                                \
    X(int64_t, counter, n_expired, "samples whose deadline passed, among those that failed")                           \
    X(int64_t, counter, n_refused_busy, "requests refused because the queue was full or the engine ended")             \
    X(int64_t, counter, n_refused_invalid, "requests refused for what they asked")                                     \
    X(int64_t, counter, n_dropped, "tokens computed for a sample that had ended")                                      \
    X(int64_t, counter, n_preempted, "samples whose memory was taken for others")                                      \
    X(int64_t, counter, n_forked, "samples that took over another's prompt")                                           \
    X(int64_t, counter, prompt_tokens, "tokens of prompts run")                                                        \
    X(int64_t, counter, cached_tokens, "tokens of prompts that were found in the prefix cache")                        \
    X(int64_t, counter, output_tokens, "tokens drawn")                                                                 \
    X(int64_t, counter, recomputed_tokens, "tokens run again after a preemption or for a window")                      \
    X(int64_t, counter, n_draft_rounds, "rounds in which a sample got drafts")                                         \
    X(int64_t, counter, draft_tokens, "drafts verified")                                                               \
    X(int64_t, counter, accepted_tokens, "drafts that became output")                                                  \
    X(double, gauge, draft_error, "mean distance of a draft's confidence and its outcome")                             \
    X(int64_t, counter, ttft_goal_missed, "samples whose first token came after the goal")                             \
    X(int64_t, counter, tpot_goal_missed, "samples slower per token than the goal")                                    \
    X(int64_t, counter, ttft_gave_way, "steps where the goal of the first token was given up for the other")           \
    X(int64_t, counter, tpot_gave_way, "steps where the goal per token was given up for the other")                    \
    X(int64_t, counter, forward_ns, "time in forward passes")                                                          \
    X(int64_t, counter, sample_ns, "time in sampling")                                                                 \
    X(int64_t, counter, draft_ns, "time in drafting rounds")                                                           \
    X(int64_t, counter, host_ns, "time of the engine's thread, without waiting")                                       \
    X(int64_t, counter, wait_ns, "time that compute waited for the engine's thread")                                   \
    X(int64_t, counter, n_ttft, "first tokens")                                                                        \
    X(int64_t, counter, ttft_sum_ns, "times from submission to first token, added up")                                 \
    X(int64_t, gauge, ttft_max_ns, "longest time from submission to first token")                                      \
    X(int64_t, counter, queue_sum_ns, "times from submission to the first step, added up")                             \
    X(int64_t, counter, finished_prompt_tokens, "tokens of the prompts of ended samples")                              \
    X(int64_t, counter, finished_output_tokens, "tokens of the outputs of ended samples")                              \
    X(int64_t, gauge, context_sum, "contexts of the last step, added up")                                              \
    X(int64_t, gauge, context_max, "longest context of the last step")                                                 \
    X(int64_t, gauge, step_rows, "tokens of the last step")                                                            \
    X(double, gauge, steps_per_s, "steps a second, in the last log interval")                                          \
    X(double, gauge, tokens_per_s, "tokens a second, in the last log interval")                                        \
    X(int64_t, gauge, n_running, "samples that run")                                                                   \
    X(int64_t, gauge, n_waiting, "samples that wait")                                                                  \
    X(int64_t, gauge, n_chunking, "prompts that are partly run")                                                       \
    X(int64_t, gauge, blocks, "blocks of the key-value cache")                                                         \
    X(int64_t, gauge, blocks_used, "blocks that samples hold")                                                         \
    X(int64_t, gauge, blocks_used_max, "blocks that samples held at most")                                             \
    X(int64_t, gauge, blocks_cached, "blocks that the prefix cache alone holds")                                       \
    X(int64_t, gauge, slots, "state slots for samples")                                                                \
    X(int64_t, gauge, slots_used, "state slots that samples hold")                                                     \
    X(int64_t, gauge, snapshots, "state slots that the prefix cache holds")                                            \
    X(int64_t, counter, cache_queries, "prompts looked up in the prefix cache")                                        \
    X(int64_t, counter, cache_hits, "prompts of which a prefix was found")                                             \
    X(int64_t, counter, cache_evicted_blocks, "blocks that the prefix cache gave up")                                  \
    X(int64_t, counter, cache_evicted_snapshots, "snapshots that the prefix cache gave up")                            \
    X(int64_t, gauge, is_replay_exact, "1 unless bounded replay is an approximation")                                  \
    X(int64_t, gauge, replay_keep, "rows that bounded replay keeps; 0: off")                                           \
    X(int64_t, gauge, saved_ns, "time that drafts have saved, by the model of step times; below 0: they cost")         \
    X(int64_t, counter, n_tested, "drafts that acceptance by rejection has tested")                                    \
    X(double, counter, expected_sum, "chances that these would be accepted, added up")                                 \
    X(double, counter, bound_sum, "the least chances that coupled acceptance would have had, added up")

typedef struct di_engine_stats_t {
    size_t struct_size; /* set to sizeof this structure before the call */
#define DI_ENGINE_STATS_FIELD(type, kind, name, meaning) type name;
    DI_ENGINE_STATS_LIST(DI_ENGINE_STATS_FIELD)
#undef DI_ENGINE_STATS_FIELD
} di_engine_stats_t;

/* Counters and state as of the last step. Any thread. */
DI_API void di_engine_stats(const di_engine *engine, di_engine_stats_t *out);
/* The same as a JSON object with a key for each field: a new text of *len bytes (len may be NULL) with a NUL behind,
 * released by di_free. Any thread. */
DI_API di_status di_engine_stats_json(const di_engine *engine, char **json, size_t *len, di_error *err);

#ifdef __cplusplus
}
#endif
#endif
