/* What the commands that generate share: a loaded model with its engine, requests into it, interruption, statistics. */
#ifndef DI_CLI_MODEL_H
#define DI_CLI_MODEL_H

#include "deepinfer/deepinfer.h"

#include "api/api.h"
#include "cli.h"
#include "engine/engine.h"

typedef struct di_cli_model {
    di_loaded loaded; /* owned */
    di_core *engine;  /* owned */
    di_trace *trace;  /* owned; NULL: off, or another's */
    di_constrainer constrainer;
    di_chat_vocab vocab;
    bool has_vocab; /* false: vocab_error says why messages can't be encoded */
    di_error vocab_error;
    di_request_options defaults; /* of requests, from the command line */
    di_strbuf format;            /* the file that a format of it lies in */
    int64_t start_ns;
} di_cli_model;

/* The engine's part of the options, strings borrowed; without progress. */
di_status di_cli_load_options(di_load_options *out, const di_options *opt, di_error *err);
/* The same for the engine of the public API; defaults of requests' sampling are not set. */
void di_cli_engine_config(di_engine_config *out, const di_options *opt);
/* The options that are defaults of requests. DI_ERR_ARG for what can't be read. */
di_status di_cli_request_options(di_request_options *out, const di_options *opt, di_error *err);

/* Loads the model, with a progress bar on a terminal, and starts the engine. Zeroed storage is valid for close. */
di_status di_cli_model_open(di_cli_model *m, const di_options *opt, di_error *err);
/* The same, with events into a trace of the caller's (NULL: none) instead of the file that --trace names. */
di_status di_cli_model_open_traced(di_cli_model *m, const di_options *opt, const di_trace *trace, di_error *err);
void di_cli_model_close(di_cli_model *m);
/* Opens the file of --trace; NULL without one. */
di_status di_cli_trace_open(di_trace **out, const di_options *opt, di_error *err);
/* Closes a trace, and logs when it is incomplete: what it was about is done and stays done. */
void di_cli_trace_close(di_trace *trace);

/* Checks, renders and queues a request; the callback gets its events. Waits for its grammar, if it has one. */
di_status di_cli_submit(di_cli_model *m, const di_request *request, di_core_callback callback, void *user, uint64_t *id,
                        di_error *err);
/* The same with the job that compiles its grammar (di_constrainer_start), which ends here; NULL: it has none. */
di_status di_cli_submit_job(di_cli_model *m, const di_request *request, di_grammar_job *job, di_core_callback callback,
                            void *user, uint64_t *id, di_error *err);

/* --stats: times, speeds and memory of everything that ran, on standard error. */
void di_cli_print_stats(const di_cli_model *m);
/* Its lines about drafts; none where there were none. */
void di_cli_print_draft_stats(const di_core_stats *s);
/* --stats: one request. */
void di_cli_print_request_stats(const di_generation *gen);

/* ---- interruption ---- */

enum { DI_EXIT_INTERRUPTED = 130 }; /* what a shell reports for a program that Ctrl-C ended */

/* From here on SIGINT and SIGTERM only leave a mark; a second signal before the mark is taken ends the program at once.
 * Called once, before anything that should end cleanly. */
di_status di_interrupt_start(di_error *err);
void di_interrupt_stop(void);
/* Whether a signal has come since the last call. */
bool di_interrupt_take(void);
/* Becomes readable when a signal has come; -1 before start. */
int di_interrupt_fd(void);

/* ---- input by lines ---- */

typedef enum di_line_state {
    DI_LINE_READY,
    DI_LINE_NOT_YET,
    DI_LINE_END,
    DI_LINE_FAILED,
    DI_LINE_INTERRUPTED
} di_line_state;

/* Reads lines of any length from a descriptor. Zeroed storage with fd and name set is a reader at its start. */
typedef struct di_line_reader {
    int fd;           /* borrowed */
    const char *name; /* for messages; borrowed */
    di_strbuf buf;    /* owned */
    size_t at;        /* start of the next line in buf */
    size_t searched;  /* bytes behind `at` that hold no line feed */
    bool is_end;
} di_line_reader;
void di_line_reader_deinit(di_line_reader *r);
/* The next line without its end, borrowed until the next call. may_wait false: DI_LINE_NOT_YET when none is complete. A
 * signal ends the wait. */
di_line_state di_line_reader_next(di_line_reader *r, bool may_wait, const char **line, size_t *len, di_error *err);

#endif
