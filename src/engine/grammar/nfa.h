/* Private to the automaton: the nondeterministic automata of a grammar while it is compiled.
 *
 * A net is one automaton with a start that no edge leads to and an end that no edge leaves: of a rule, of a repeated
 * part that is counted, of a part that is used in several places. Nets share one space of states. An edge reads a byte
 * or a special token, reads nothing, or calls a net, once or a counted number of times.
 *
 * The steps, in order: nfa.c makes nets of nodes, nfa_text.c those of classes, until and free; nfa_settle.c finds out
 * which nets have the empty text, removes what has no text, and left recursion; nfa_close.c removes empty edges and
 * writes the form that pda.c runs (pda_internal.h). Failures stick in the di_gram. */
#ifndef DI_GRAMMAR_NFA_H
#define DI_GRAMMAR_NFA_H

#include "pda_internal.h"

typedef enum di_nfa_edge_kind {
    DI_EDGE_NONE, /* removed */
    DI_EDGE_EMPTY,
    DI_EDGE_BYTE,    /* a byte of low .. high */
    DI_EDGE_SPECIAL, /* special token `arg` */
    DI_EDGE_CALL,    /* net `arg`; once nfa_settle.c is through, only its texts that aren't empty */
    DI_EDGE_COUNT    /* counts[arg] */
} di_nfa_edge_kind;

typedef struct di_nfa_edge {
    int32_t next; /* edge of the same state, -1: last */
    int32_t to;
    int32_t arg;
    uint8_t kind, low, high;
} di_nfa_edge;

typedef struct di_nfa_state {
    int32_t first;  /* edge, -1: none */
    int32_t end_of; /* net, -1: not an end */
} di_nfa_state;

/* What a net can read. */
#define DI_NET_EMPTY 1
#define DI_NET_TEXT 2

typedef struct di_nfa_net {
    const di_node *node; /* borrowed */
    int32_t start, end;  /* end -1: of a twin, which shares the end of another net */
    int32_t callers;     /* first of `calls`, -1: none */
    uint8_t reads;       /* DI_NET_* */
} di_nfa_net;

typedef struct di_nfa_count {
    int32_t net, min, max; /* max -1: no bound */
} di_nfa_count;

typedef struct di_nfa_call { /* an edge that calls a net */
    int32_t from, edge, next;
} di_nfa_call;

typedef struct di_nfa_seen { /* a node that was met, and its net */
    const di_node *node;
    int32_t net; /* -1: none yet */
} di_nfa_seen;

typedef struct di_nfa_special {
    const char *text; /* borrowed of a node */
    int32_t len;
} di_nfa_special;

typedef struct di_nfa {
    di_gram *g;
    size_t n_bytes; /* in the arrays below, each owned */
    di_nfa_state *states;
    di_nfa_edge *edges;
    di_nfa_net *nets;
    di_nfa_count *counts;
    di_nfa_call *calls;
    di_nfa_special *specials;
    di_nfa_seen *seen;  /* hash table [seen_cap] */
    int32_t *rule_nets; /* [g->n_rules]; -1: none yet */
    int32_t *order;     /* nets, a caller before what it calls without reading first; set by di_nfa_settle */
    int32_t n_states, states_cap, n_edges, edges_cap, n_nets, nets_cap, n_counts, counts_cap, n_calls, calls_cap,
        n_specials, specials_cap, n_seen, seen_cap;
} di_nfa;

/* Room for n elements of `size` bytes in an array that a owns; false after a failure. */
bool di_nfa_reserve(di_nfa *a, void *array, int32_t *cap, int64_t n, size_t size);
/* Zeroed scratch that the caller frees; NULL after a failure. */
void *di_nfa_scratch(di_nfa *a, int64_t n, size_t size);
void di_nfa_deinit(di_nfa *a);

/* All give 0, and change nothing, after a failure. */
int32_t di_nfa_state_add(di_nfa *a);
int32_t di_nfa_net_add(di_nfa *a, const di_node *node);
int32_t di_nfa_special_find(di_nfa *a, const char *text, int32_t len); /* adds it where it is new */
int32_t di_nfa_count_add(di_nfa *a, di_nfa_count count);
/* Gives the edge. */
int32_t di_nfa_edge_add(di_nfa *a, int32_t from, di_nfa_edge edge);
static inline void di_nfa_empty(di_nfa *a, int32_t from, int32_t to) {
    di_nfa_edge_add(a, from, (di_nfa_edge){.kind = DI_EDGE_EMPTY, .to = to});
}
static inline void di_nfa_byte(di_nfa *a, int32_t from, int32_t low, int32_t high, int32_t to) {
    di_nfa_edge_add(a, from, (di_nfa_edge){.kind = DI_EDGE_BYTE, .low = (uint8_t)low, .high = (uint8_t)high, .to = to});
}

/* nfa.c: the nets of all that the root reaches. Net 0 is the root's. */
void di_nfa_make(di_nfa *a);
/* nfa_text.c: paths from `from` to `to` that read one code point of a CLASS, a text of an UNTIL or a FREE. */
void di_nfa_class(di_nfa *a, const di_node *node, int32_t from, int32_t to);
void di_nfa_until(di_nfa *a, const di_node *node, int32_t from, int32_t to);
/* nfa_settle.c */
void di_nfa_settle(di_nfa *a);
/* nfa_close.c: out owns what it gets, also after a failure. */
void di_nfa_close(di_nfa *a, di_automaton *out);
/* Bytes of one class are in the same edges everywhere; byte_of has one byte of each of the classes. Gives how many. */
int32_t di_nfa_classes(const di_automaton *m, uint8_t class_of[256], uint8_t byte_of[256]);
void di_automaton_deinit(di_automaton *m);

#endif
