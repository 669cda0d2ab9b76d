/* Scheduling decisions: whose request comes next, and how many prompt rows a step may have.
 *
 * Owns: the waiting queue (priorities, fair shares between callers, arrival order) and the pace (a model of what a step
 * costs on this machine, and the goals for first tokens and later ones). Knows neither KV memory nor tokens: whether
 * something fits and what a batch is made of is the step loop's business (engine/step.c).
 *
 * Threads: one, the engine's. Nothing here reads a clock; time comes in. */
#ifndef DI_SCHED_H
#define DI_SCHED_H

#include "base/base.h"

/* ---- waiting queue ------------------------------------------------------------------------------------------------
 *
 * The next item is, among those that are ready: the lowest priority value; then what ran before and was interrupted;
 * then the caller that has been served least; then the earliest arrival. "Served" counts rows that were computed for a
 * caller, prompt rows and output tokens alike, within one priority: shares are among equals. Virtual time moves with
 * every row, by its share for each caller that is there, so it is what an even division would have given; a caller that
 * is new or comes back after a pause starts from it. So idling earns nothing, and callers that come once and go,
 * however many, can't keep one that was served before from its turn for ever. Items that are not ready are passed over
 * and keep their place. */

typedef struct di_sched_caller di_sched_caller; /* of one priority */
typedef struct di_sched_class di_sched_class;   /* the callers of one priority */

/* Lives inside the caller's own object; zeroed storage is an item that is in no queue. */
typedef struct di_sched_item {
    struct di_sched_item *prev, *next; /* in its caller's list: by priority, then arrival */
    di_sched_caller *caller;           /* reference held from attach to detach */
    int32_t priority;                  /* lower goes first */
    uint64_t arrival;                  /* unique; rises with time */
    bool is_ready;
    bool is_resumed; /* it ran before and gave up its memory: first among those of its priority */
    bool is_queued;
} di_sched_item;

typedef struct di_sched_queue {
    di_sched_caller **table; /* owned: hash table of callers, chained; cap is a power of two */
    size_t n_callers, cap;
    di_sched_caller *active; /* callers with queued items, in a ring-free list */
    di_sched_class *classes; /* those with callers, in a list */
    int64_t n_items;
} di_sched_queue;

di_status di_sched_queue_init(di_sched_queue *q, di_error *err);
void di_sched_queue_deinit(di_sched_queue *q); /* zeroed storage is fine; no item may be attached any more */

/* Binds an item, whose priority is set, to a caller by name (NULL and "" are the same caller) until detach; it is not
 * queued yet. */
di_status di_sched_attach(di_sched_queue *q, di_sched_item *item, const char *caller, size_t len, di_error *err);
void di_sched_detach(di_sched_queue *q, di_sched_item *item); /* an item that was never attached is fine */

void di_sched_push(di_sched_queue *q, di_sched_item *item);
void di_sched_remove(di_sched_queue *q, di_sched_item *item);
/* The next item, which stays queued; NULL when none is ready. */
di_sched_item *di_sched_peek(di_sched_queue *q);
/* Rows that were computed for the item's caller. */
void di_sched_charge(di_sched_queue *q, di_sched_item *item, int64_t n_rows);
/* Calls fn for every queued item; fn may remove the item that it is given, and no other. */
void di_sched_each(di_sched_queue *q, void (*fn)(void *user, di_sched_item *item), void *user);
/* Whether a goes before b by priority, then arrival: the order in which running requests keep their memory. */
static inline bool di_sched_precedes(const di_sched_item *a, const di_sched_item *b) {
    return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
}

/* ---- pace ---------------------------------------------------------------------------------------------------------
 *
 * A step of d decode rows and p prompt rows is modelled as base + p * prompt_row, with base the time of the last steps
 * without prompt rows and prompt_row learnt from those with them, both as running means. Under a goal for the time per
 * output token a step may have only as many prompt rows as keep it within the goal. A first token whose goal can still
 * be met, but only by more rows than that, gets them (the time per token gives way); one that is too late in any case
 * does not slow the others further (the time to first token gives way). */

typedef struct di_pace {
    int64_t ttft_goal_ns, tpot_goal_ns; /* 0: none */
    double base_ns, prompt_row_ns;      /* 0: not measured yet */
    int64_t ttft_gave_way, tpot_gave_way;
} di_pace;

typedef struct di_pace_ask {
    int64_t rows_max;    /* what the budget leaves for prompt rows */
    int32_t n_decode;    /* rows of sequences that have their first token */
    int64_t waited_ns;   /* of the prompt that has waited longest, since it was submitted; -1: none waits */
    int64_t rows_to_go;  /* prompt rows that it still needs */
    int64_t rows_wanted; /* prompt rows that could be run now */
} di_pace_ask;

/* Prompt rows for the next step, at least 16 when rows_max allows them. */
int64_t di_pace_rows(di_pace *p, const di_pace_ask *ask);
/* What a step took. */
void di_pace_learn(di_pace *p, int64_t n_prompt_rows, int64_t n_decode_rows, int64_t step_ns);

#endif
