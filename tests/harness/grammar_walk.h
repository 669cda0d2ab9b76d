/* A matcher of grammar nodes by their definition, for tests: which spans of a text does a node match? It shares nothing
 * with the automata of the engine, knows every kind of node and any recursion, and is slow: texts of at most 255 bytes.
 *
 * The ends that a node reaches from a position are a set of bits, remembered by (node, position). A node that comes
 * back to itself sees what is known so far; everything is looked at again until nothing grows. */
#ifndef DI_TEST_GRAMMAR_WALK_H
#define DI_TEST_GRAMMAR_WALK_H

#include "engine/grammar/ir.h"

enum { WALK_TEXT_MAX = 255 };

typedef struct walk_bits {
    uint64_t words[4];
} walk_bits;

typedef struct walk_entry {
    const di_node *node; /* NULL: free */
    size_t at;
    int round; /* when it was looked at last */
    walk_bits ends;
} walk_entry;

typedef struct walk {
    const di_gram *g;
    const char *text;
    size_t len;
    walk_entry *entries; /* owned [cap], a power of two */
    size_t n_entries, cap;
    int round;
    bool has_grown;
} walk;

static inline bool walk_has(const walk_bits *b, size_t i) {
    return b->words[i / 64] >> (i % 64) & 1;
}

static inline void walk_add(walk_bits *b, size_t i) {
    b->words[i / 64] |= (uint64_t)1 << (i % 64);
}

static inline bool walk_union(walk_bits *b, const walk_bits *more) {
    bool has_grown = false;
    for (int i = 0; i < 4; i++) {
        has_grown |= (more->words[i] & ~b->words[i]) != 0;
        b->words[i] |= more->words[i];
    }
    return has_grown;
}

static inline size_t walk_slot(const walk *w, const di_node *node, size_t at) {
    size_t i = di_mix64((uint64_t)(uintptr_t)node * 257 + at) & (w->cap - 1);
    while (w->entries[i].node && (w->entries[i].node != node || w->entries[i].at != at))
        i = (i + 1) & (w->cap - 1);
    return i;
}

static inline void walk_reserve(walk *w) {
    if (w->cap > 2 * (w->n_entries + 1))
        return;
    walk old = *w;
    w->cap = DI_MAX(2 * w->cap, (size_t)256);
    w->entries = calloc(w->cap, sizeof *w->entries);
    DI_ASSERT(w->entries);
    for (size_t i = 0; i < old.cap; i++) {
        if (old.entries[i].node)
            w->entries[walk_slot(w, old.entries[i].node, old.entries[i].at)] = old.entries[i];
    }
    free(old.entries);
}

static inline walk_bits walk_ends(walk *w, const di_node *node, size_t at);

static inline walk_bits walk_all(walk *w, const di_node *node, const walk_bits *from) {
    walk_bits ends = {0};
    for (size_t i = 0; i <= w->len; i++) {
        if (walk_has(from, i)) {
            walk_bits more = walk_ends(w, node, i);
            walk_union(&ends, &more);
        }
    }
    return ends;
}

static inline walk_bits walk_repeat(walk *w, const di_node *node, size_t at) {
    walk_bits ends = {0}, now = {0};
    walk_add(&now, at);
    for (int64_t i = 0;; i++) {
        bool has_grown = i >= node->min && walk_union(&ends, &now);
        if (i == node->max || (i > node->min && !has_grown))
            return ends;
        walk_bits next = walk_all(w, node->nodes[0], &now);
        /* The same again: no number of further rounds changes it. */
        if (i < node->min && memcmp(&next, &now, sizeof now) == 0)
            return now;
        now = next;
    }
}

static inline bool walk_is_at(const walk *w, const di_node *spelling, size_t at) {
    return w->len - at >= (size_t)spelling->n && memcmp(w->text + at, spelling->bytes, (size_t)spelling->n) == 0;
}

/* UNTIL and FREE. */
static inline walk_bits walk_text(walk *w, const di_node *node, size_t at) {
    walk_bits ends = {0};
    size_t character_end = at;
    for (size_t end = at; end <= w->len; end++) {
        for (int32_t i = 0; i < node->n; i++) {
            size_t n = (size_t)node->nodes[i]->n;
            if (end >= at + n && walk_is_at(w, node->nodes[i], end - n)) {
                if (node->kind == DI_NODE_UNTIL)
                    walk_add(&ends, end);
                return ends;
            }
        }
        if (end == character_end) {
            if (node->kind == DI_NODE_FREE)
                walk_add(&ends, end);
            size_t n = end < w->len ? di_utf8_decode(w->text + end, w->len - end, NULL, NULL) : 0;
            if (n == 0)
                return ends;
            character_end = end + n;
        }
    }
    return ends;
}

static inline walk_bits walk_graph(walk *w, const di_node *node, size_t at) {
    walk_bits ends = {0}, *reached = calloc((size_t)node->n_states, sizeof *reached);
    DI_ASSERT(reached);
    walk_add(&reached[0], at);
    for (bool has_grown = true; has_grown;) {
        has_grown = false;
        for (int32_t i = 0; i < node->n; i++) {
            walk_bits more = walk_all(w, node->edges[i].label, &reached[node->edges[i].from]);
            has_grown |= walk_union(&reached[node->edges[i].to], &more);
        }
    }
    for (int32_t i = 0; i < node->n_states; i++) {
        if (node->is_accepting[i])
            walk_union(&ends, &reached[i]);
    }
    free(reached);
    return ends;
}

static inline walk_bits walk_look(walk *w, const di_node *node, size_t at) {
    walk_bits ends = {0};
    uint32_t code;
    size_t n;
    switch (node->kind) {
    case DI_NODE_NEVER:
        break;
    case DI_NODE_EMPTY:
        walk_add(&ends, at);
        break;
    case DI_NODE_BYTES:
    case DI_NODE_SPECIAL:
        if (walk_is_at(w, node, at))
            walk_add(&ends, at + (size_t)node->n);
        break;
    case DI_NODE_CLASS:
        n = at < w->len ? di_utf8_decode(w->text + at, w->len - at, &code, NULL) : 0;
        for (int32_t i = 0; n > 0 && i < node->n; i++) {
            if (code >= node->ranges[i].first && code <= node->ranges[i].last)
                walk_add(&ends, at + n);
        }
        break;
    case DI_NODE_SEQ:
        walk_add(&ends, at);
        for (int32_t i = 0; i < node->n; i++)
            ends = walk_all(w, node->nodes[i], &ends);
        break;
    case DI_NODE_ALT:
        for (int32_t i = 0; i < node->n; i++) {
            walk_bits more = walk_ends(w, node->nodes[i], at);
            walk_union(&ends, &more);
        }
        break;
    case DI_NODE_REPEAT:
        return walk_repeat(w, node, at);
    case DI_NODE_RULE:
        if (w->g->rules[node->rule].node)
            return walk_ends(w, w->g->rules[node->rule].node, at);
        break;
    case DI_NODE_UNTIL:
    case DI_NODE_FREE:
        return walk_text(w, node, at);
    case DI_NODE_GRAPH:
        return walk_graph(w, node, at);
    }
    return ends;
}

static inline walk_bits walk_ends(walk *w, const di_node *node, size_t at) {
    walk_reserve(w);
    walk_entry *e = &w->entries[walk_slot(w, node, at)];
    if (!e->node) {
        *e = (walk_entry){.node = node, .at = at};
        w->n_entries++;
    }
    if (e->round == w->round)
        return e->ends;
    e->round = w->round;
    walk_bits ends = walk_look(w, node, at);
    e = &w->entries[walk_slot(w, node, at)]; /* the table may have moved */
    w->has_grown |= walk_union(&e->ends, &ends);
    return e->ends;
}

/* Whether the whole text is one of the node's. g: of its rules. */
static inline bool walk_matches(const di_gram *g, const di_node *node, const char *text, size_t len) {
    DI_ASSERT(len <= WALK_TEXT_MAX);
    walk w = {.g = g, .text = text, .len = len};
    walk_bits ends;
    do {
        w.round++;
        w.has_grown = false;
        ends = walk_ends(&w, node, 0);
    } while (w.has_grown);
    free(w.entries);
    return walk_has(&ends, len);
}

#endif
