/* The form that the front ends share: a grammar as rules over nodes, in an arena.
 *
 * A node is a set of texts, as code points or bytes of UTF-8. Nodes are immutable and may be used in any number of
 * places. Constructors simplify what is obvious (empty parts, nested sequences and alternatives, repeats of once),
 * never what the grammar means.
 *
 * Failures stick: when memory or a limit is passed, constructors give some node and di_gram_status has the error, so
 * that front ends check once, at the end and in loops of unbounded length. One thread at a time. */
#ifndef DI_GRAMMAR_IR_H
#define DI_GRAMMAR_IR_H

#include "grammar.h"

#define DI_CODE_MAX 0x10FFFF

typedef struct di_node di_node;

/* Code points first .. last. Surrogates (D800 .. DFFF) have no UTF-8 and are taken out of every set. */
typedef struct di_code_range {
    uint32_t first, last;
} di_code_range;

typedef enum di_node_kind {
    DI_NODE_NEVER,   /* no text */
    DI_NODE_EMPTY,   /* the empty text */
    DI_NODE_BYTES,   /* bytes [n], n >= 1 */
    DI_NODE_CLASS,   /* one code point of ranges [n], n >= 1, rising and apart */
    DI_NODE_SEQ,     /* nodes [n] one after another, n >= 2 */
    DI_NODE_ALT,     /* one of nodes [n], n >= 2 */
    DI_NODE_REPEAT,  /* nodes[0], min to max times; max -1: any number */
    DI_NODE_RULE,    /* rule `rule` */
    DI_NODE_SPECIAL, /* an added token by its spelling, bytes [n]: the token itself or its spelling in other tokens */
    DI_NODE_UNTIL,   /* any code points up to and with the first place where one of nodes [n] (BYTES or SPECIAL) ends */
    DI_NODE_FREE,    /* any code points in which none of nodes [n] (BYTES or SPECIAL) occurs; n may be 0 */
    DI_NODE_GRAPH    /* a walk from state 0 to an accepting one along edges [n] */
} di_node_kind;

typedef struct di_graph_edge {
    int32_t from, to;
    const di_node *label; /* may be any node */
} di_graph_edge;

struct di_node {
    di_node_kind kind;
    int32_t n;
    union {
        const char *bytes;
        const di_code_range *ranges;
        const di_node *const *nodes;
        const di_graph_edge *edges;
    };
    int32_t rule;
    int32_t min, max;         /* REPEAT */
    int32_t n_states;         /* GRAPH */
    const bool *is_accepting; /* GRAPH [n_states] */
};

typedef struct di_gram_rule {
    const char *name;
    size_t name_len;
    const di_node *node; /* NULL: not defined (yet) */
} di_gram_rule;

typedef struct di_gram {
    di_arena arena;
    di_grammar_limits limits; /* settled */
    int64_t deadline_ns;
    di_gram_rule *rules; /* owned [n_rules] */
    int32_t n_rules;
    size_t rules_cap;
    int32_t root; /* rule; set by the front end */
    int64_t n_ticks;
    di_status failed; /* with error */
    di_error error;
} di_gram;

/* limits may be NULL. */
void di_gram_init(di_gram *g, const di_grammar_limits *limits);
void di_gram_deinit(di_gram *g);
/* Records the first failure; returns its status. */
di_status di_gram_fail(di_gram *g, di_status st, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The failure, if any, copied into err. Every 64th call or so looks at the clock and the memory in use. */
di_status di_gram_status(di_gram *g, di_error *err);
static inline bool di_gram_has_failed(const di_gram *g) {
    return g->failed != DI_OK;
}
/* Scratch and strings of the arena; NULL after a failure. */
void *di_gram_alloc(di_gram *g, size_t n_bytes);
/* An array of the caller's own (from malloc, NULL for none) with room for n elements of `size` bytes. After a failure
 * it is what it was, and the room may be missing. */
void *di_gram_grow(di_gram *g, void *array, size_t *cap, size_t n, size_t size);

/* Rules. `name` (copied) is for messages; the same name may come twice. */
int32_t di_gram_rule_add(di_gram *g, const char *name, size_t len); /* -1 after a failure */
void di_gram_rule_define(di_gram *g, int32_t rule, const di_node *node);

/* Nodes: arrays are copied. */
const di_node *di_node_never(void);
const di_node *di_node_empty(void);
const di_node *di_node_bytes(di_gram *g, const char *bytes, size_t n);
/* Ranges in any order, overlapping or not; is_negated: all code points but these. */
const di_node *di_node_class(di_gram *g, const di_code_range *ranges, size_t n, bool is_negated);
const di_node *di_node_code(di_gram *g, uint32_t code);
const di_node *di_node_seq(di_gram *g, const di_node *const *nodes, size_t n);
const di_node *di_node_seq2(di_gram *g, const di_node *a, const di_node *b);
const di_node *di_node_alt(di_gram *g, const di_node *const *nodes, size_t n);
const di_node *di_node_alt2(di_gram *g, const di_node *a, const di_node *b);
/* 0 <= min <= max, or max -1. */
const di_node *di_node_repeat(di_gram *g, const di_node *node, int32_t min, int32_t max);
const di_node *di_node_rule(di_gram *g, int32_t rule);
const di_node *di_node_special(di_gram *g, const char *spelling, size_t n);
const di_node *di_node_until(di_gram *g, const di_node *const *ends, size_t n);
const di_node *di_node_free(di_gram *g, const di_node *const *without, size_t n);
/* One of the texts, as a trie (choice.c); the texts' bytes are copied. */
const di_node *di_node_choice(di_gram *g, const char *const *texts, const size_t *lens, size_t n);
/* State 0 is the start. */
const di_node *di_node_graph(di_gram *g, int32_t n_states, const bool *is_accepting, const di_graph_edge *edges,
                             size_t n_edges);

/* ---- front ends ----
 *
 * Each defines rules and sets g->root. Errors as di_grammar_compile; DI_OK means that g has not failed. */

di_status di_gram_regex(di_gram *g, const char *text, size_t len, di_error *err);
di_status di_gram_ebnf(di_gram *g, const char *text, size_t len, di_error *err);
di_status di_gram_schema(di_gram *g, const di_json *schema, bool is_lax, di_error *err);
/* Any JSON object. */
di_status di_gram_object(di_gram *g, di_error *err);
/* A whole output of the chat format, as output.c describes it. */
di_status di_gram_output(di_gram *g, const di_json *output, di_error *err);
/* A JSON array of strings, of which the text is one. */
di_status di_gram_choice(di_gram *g, const di_json *choices, di_error *err);
/* A regular expression's texts as a node, for schemas: `pattern` matches anywhere unless it is anchored. */
const di_node *di_node_regex(di_gram *g, const char *text, size_t len, bool is_search);
/* The values of a schema as a node. */
const di_node *di_node_schema(di_gram *g, const di_json *schema, bool is_lax);
/* Half of the values of a schema `part` (NULL: of any value), which lies inside `root`. is_text: its strings, as they
 * are, without quotes and escapes; any_text in their place where nothing restricts them. Else the JSON text of all
 * other values. NEVER where there are none. */
const di_node *di_node_schema_part(di_gram *g, const di_json *root, const di_json *part, bool is_lax, bool is_text,
                                   const di_node *any_text);

/* ---- regular sets (regular.c) ----
 *
 * Finite automata over code points, for what needs more than the constructors above. Only of nodes without RULE,
 * SPECIAL, UNTIL and FREE, and with BYTES of whole code points; else g fails. NULL after a failure; all functions take
 * NULL. */

typedef struct di_regular di_regular; /* in the grammar's arena; deterministic */
const di_regular *di_regular_make(di_gram *g, const di_node *node);
const di_regular *di_regular_intersect(di_gram *g, const di_regular *a, const di_regular *b);
const di_regular *di_regular_subtract(di_gram *g, const di_regular *a, const di_regular *b);
/* The texts of a without the code points of ranges. */
const di_regular *di_regular_erase(di_gram *g, const di_regular *a, const di_code_range *ranges, size_t n);
bool di_regular_is_never(const di_regular *a);
bool di_regular_matches(const di_regular *a, const char *text, size_t len); /* UTF-8 */
/* The same texts, as a GRAPH of classes (or something simpler). */
const di_node *di_regular_node(di_gram *g, const di_regular *a);

#endif
