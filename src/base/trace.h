/* Traces: what ran when, as a file in the trace event format (JSON) that browsers' trace viewers open.
 *
 * Spans with a begin and an end, instants and counters, by thread and in microseconds of the monotonic clock. Events
 * are gathered in a buffer and written when it is full; the file is readable up to its last whole event even when the
 * program dies. A write that fails ends the trace, not the program: close reports it. Every function takes a NULL trace
 * as one that is off. Threads: any. */
#ifndef DI_BASE_TRACE_H
#define DI_BASE_TRACE_H

#include <stdint.h>

#include "deepinfer/status.h"

/* Written through pointers to const: who is given one may add events, but not close it. */
typedef struct di_trace di_trace;

/* A number shown with an event. */
typedef struct di_trace_arg {
    const char *key;
    int64_t value;
} di_trace_arg;

/* A trace that is off until it is started. */
di_status di_trace_create(di_trace **out, di_error *err);
/* Creates or empties the file and puts events into it from now on. DI_ERR_IO names it, DI_ERR_BUSY: there is one. */
di_status di_trace_start(di_trace *trace, const char *path, di_error *err);
/* Completes the file; the trace may be started again. Nothing is done to one that is off. Errors as di_trace_close. */
di_status di_trace_stop(di_trace *trace, di_error *err);
/* Both at once. */
di_status di_trace_open(di_trace **out, const char *path, di_error *err);
/* Completes the file and frees the trace. DI_ERR_IO or DI_ERR_DISK when anything could not be written. */
di_status di_trace_close(di_trace *trace, di_error *err);

/* Names the row that the events of `thread` are shown in; `thread` is the caller's choice, a small number. Also while
 * the trace is off: the first 16 names are written into every file. */
void di_trace_thread(const di_trace *trace, int thread, const char *name);
/* Times are of di_clock_ns. Names and keys are UTF-8; args [n_args]. All are copied. */
void di_trace_span(const di_trace *trace, int thread, const char *name, int64_t start_ns, int64_t end_ns, int n_args,
                   const di_trace_arg *args);
void di_trace_instant(const di_trace *trace, int thread, const char *name, int64_t at_ns, int n_args,
                      const di_trace_arg *args);
/* A curve for each arg. */
void di_trace_counter(const di_trace *trace, const char *name, int64_t at_ns, int n_args, const di_trace_arg *args);

#endif
