/* Nodes and rules of a grammar under construction (ir.h). */
#include "ir.h"

#define MEMORY_DEFAULT ((size_t)64 << 20)
#define TIMEOUT_DEFAULT_NS ((int64_t)20 * 1000000000)
#define DEPTH_DEFAULT 256

enum { LOOK_EVERY = 64 }; /* calls between looks at the clock */

static const di_node never_node = {.kind = DI_NODE_NEVER}, empty_node = {.kind = DI_NODE_EMPTY};

void di_gram_init(di_gram *g, const di_grammar_limits *limits) {
    *g = (di_gram){.root = -1};
    if (limits)
        g->limits = *limits;
    if (g->limits.memory_bytes == 0)
        g->limits.memory_bytes = MEMORY_DEFAULT;
    if (g->limits.timeout_ns == 0)
        g->limits.timeout_ns = TIMEOUT_DEFAULT_NS;
    if (g->limits.depth_max == 0)
        g->limits.depth_max = DEPTH_DEFAULT;
    g->deadline_ns = di_clock_ns() + g->limits.timeout_ns;
}

void di_gram_deinit(di_gram *g) {
    di_arena_deinit(&g->arena);
    free(g->rules);
    *g = (di_gram){0};
}

di_status di_gram_fail(di_gram *g, di_status st, const char *format, ...) {
    if (g->failed)
        return g->failed;
    va_list args;
    va_start(args, format);
    vsnprintf(g->error.message, sizeof g->error.message, format, args);
    va_end(args);
    g->error.code = st;
    return g->failed = st;
}

static void look(di_gram *g) {
    if (g->n_ticks++ % LOOK_EVERY || g->failed)
        return;
    if (g->limits.stop && *g->limits.stop) {
        di_gram_fail(g, DI_ERR_CANCELLED, "the grammar is not wanted any more");
        return;
    }
    size_t used = g->arena.total_bytes + g->rules_cap * sizeof *g->rules;
    if (used > g->limits.memory_bytes)
        di_gram_fail(g, DI_ERR_RANGE, "the grammar takes more than %zu MiB to compile", g->limits.memory_bytes >> 20);
    else if (di_clock_ns() > g->deadline_ns)
        di_gram_fail(g, DI_ERR_RANGE, "the grammar takes longer than %.3g s to compile",
                     (double)g->limits.timeout_ns * 1e-9);
}

di_status di_gram_status(di_gram *g, di_error *err) {
    look(g);
    if (g->failed && err)
        *err = g->error;
    return g->failed;
}

void *di_gram_alloc(di_gram *g, size_t n_bytes) {
    look(g);
    if (g->failed)
        return NULL;
    void *memory = n_bytes <= g->limits.memory_bytes ? di_arena_alloc(&g->arena, n_bytes) : NULL;
    if (!memory)
        di_gram_fail(g, DI_ERR_RANGE, "the grammar takes more than %zu MiB to compile", g->limits.memory_bytes >> 20);
    return memory;
}

void *di_gram_grow(di_gram *g, void *array, size_t *cap, size_t n, size_t size) {
    if (n <= *cap)
        return array;
    size_t wanted = DI_MAX(2 * *cap, DI_MAX(n, (size_t)64)), bytes;
    void *grown = di_size_mul(&bytes, wanted, size) ? realloc(array, bytes) : NULL;
    if (!grown) {
        di_gram_fail(g, DI_ERR_MEMORY, "%zu elements of %zu bytes for a grammar", wanted, size);
        return array;
    }
    *cap = wanted;
    return grown;
}

/* ---- rules ---- */

int32_t di_gram_rule_add(di_gram *g, const char *name, size_t len) {
    char *copy = di_gram_alloc(g, len + 1);
    if (!copy)
        return -1;
    memcpy(copy, name, len);
    copy[len] = '\0';
    g->rules = di_gram_grow(g, g->rules, &g->rules_cap, (size_t)g->n_rules + 1, sizeof *g->rules);
    if (g->failed)
        return -1;
    g->rules[g->n_rules] = (di_gram_rule){.name = copy, .name_len = len};
    return g->n_rules++;
}

void di_gram_rule_define(di_gram *g, int32_t rule, const di_node *node) {
    if (!g->failed)
        g->rules[rule].node = node;
}

/* ---- nodes ---- */

const di_node *di_node_never(void) {
    return &never_node;
}

const di_node *di_node_empty(void) {
    return &empty_node;
}

static di_node *new_node(di_gram *g, di_node_kind kind, size_t n) {
    di_node *node = n <= INT32_MAX ? di_gram_alloc(g, sizeof *node) : NULL;
    if (!node) {
        di_gram_fail(g, DI_ERR_RANGE, "the grammar has a part of %zu elements", n);
        return NULL;
    }
    *node = (di_node){.kind = kind, .n = (int32_t)n};
    return node;
}

static const di_node *new_bytes(di_gram *g, di_node_kind kind, const char *bytes, size_t n) {
    di_node *node = new_node(g, kind, n);
    char *copy = node ? di_gram_alloc(g, n) : NULL;
    if (!copy)
        return &never_node;
    memcpy(copy, bytes, n);
    node->bytes = copy;
    return node;
}

const di_node *di_node_bytes(di_gram *g, const char *bytes, size_t n) {
    return n ? new_bytes(g, DI_NODE_BYTES, bytes, n) : &empty_node;
}

const di_node *di_node_special(di_gram *g, const char *spelling, size_t n) {
    return n ? new_bytes(g, DI_NODE_SPECIAL, spelling, n) : &empty_node;
}

static int compare_ranges(const void *a, const void *b) {
    const di_code_range *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Sorted, joined, or turned around, without surrogates. Room for n + 2 in out. */
static size_t tidy_ranges(const di_code_range *sorted, size_t n, bool is_negated, di_code_range *out) {
    static const di_code_range surrogates = {0xD800, 0xDFFF};
    size_t count = 0;
    uint32_t at = 0; /* negated: first code point that no range so far covers */
    for (size_t i = 0; i < n; i++) {
        di_code_range r = {sorted[i].first, DI_MIN(sorted[i].last, (uint32_t)DI_CODE_MAX)};
        if (r.first > r.last)
            continue;
        if (is_negated) {
            if (r.first > at)
                out[count++] = (di_code_range){at, r.first - 1};
            at = DI_MAX(at, r.last + 1);
        } else if (count && r.first <= out[count - 1].last + 1) {
            out[count - 1].last = DI_MAX(out[count - 1].last, r.last);
        } else {
            out[count++] = r;
        }
    }
    if (is_negated && at <= DI_CODE_MAX)
        out[count++] = (di_code_range){at, DI_CODE_MAX};
    for (size_t i = 0; i < count; i++) { /* at most one range holds surrogates at both of its ends */
        di_code_range *r = &out[i];
        if (r->last < surrogates.first || r->first > surrogates.last)
            continue;
        bool is_left = r->first<surrogates.first, is_right = r->last> surrogates.last;
        if (is_left && is_right) {
            memmove(r + 2, r + 1, (count - i - 1) * sizeof *r);
            count++;
            r[1] = (di_code_range){surrogates.last + 1, r->last};
            r->last = surrogates.first - 1;
            break;
        }
        if (is_left) {
            r->last = surrogates.first - 1;
        } else if (is_right) {
            r->first = surrogates.last + 1;
        } else {
            memmove(r, r + 1, (count - i - 1) * sizeof *r);
            count--;
            i--;
        }
    }
    return count;
}

const di_node *di_node_class(di_gram *g, const di_code_range *ranges, size_t n, bool is_negated) {
    di_code_range *sorted = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof *sorted);
    di_code_range *out = di_gram_alloc(g, (n + 2) * sizeof *out);
    if (!sorted || !out)
        return &never_node;
    if (n)
        memcpy(sorted, ranges, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, compare_ranges);
    size_t count = tidy_ranges(sorted, n, is_negated, out);
    if (count == 0)
        return &never_node;
    di_node *node = new_node(g, DI_NODE_CLASS, count);
    if (!node)
        return &never_node;
    node->ranges = out;
    return node;
}

const di_node *di_node_code(di_gram *g, uint32_t code) {
    return di_node_class(g, &(di_code_range){code, code}, 1, false);
}

/* NULL after a failure. */
static di_node *make_list(di_gram *g, di_node_kind kind, const di_node *const *nodes, size_t n) {
    di_node *node = new_node(g, kind, n);
    const di_node **copy = node ? di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof(di_node *)) : NULL;
    if (!copy)
        return NULL;
    if (n)
        memcpy(copy, nodes, n * sizeof(di_node *));
    node->nodes = copy;
    return node;
}

static const di_node *new_list(di_gram *g, di_node_kind kind, const di_node *const *nodes, size_t n) {
    const di_node *node = make_list(g, kind, nodes, n);
    return node ? node : &never_node;
}

const di_node *di_node_seq(di_gram *g, const di_node *const *nodes, size_t n) {
    const di_node **parts = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof(di_node *));
    if (!parts)
        return &never_node;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i]->kind == DI_NODE_NEVER)
            return &never_node;
        if (nodes[i]->kind != DI_NODE_EMPTY)
            parts[count++] = nodes[i];
    }
    if (count == 0)
        return &empty_node;
    return count == 1 ? parts[0] : new_list(g, DI_NODE_SEQ, parts, count);
}

const di_node *di_node_seq2(di_gram *g, const di_node *a, const di_node *b) {
    return di_node_seq(g, (const di_node *const[]){a, b}, 2);
}

const di_node *di_node_alt(di_gram *g, const di_node *const *nodes, size_t n) {
    const di_node **parts = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof(di_node *));
    if (!parts)
        return &never_node;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i]->kind != DI_NODE_NEVER && (count == 0 || parts[count - 1] != nodes[i]))
            parts[count++] = nodes[i];
    }
    if (count == 0)
        return &never_node;
    return count == 1 ? parts[0] : new_list(g, DI_NODE_ALT, parts, count);
}

const di_node *di_node_alt2(di_gram *g, const di_node *a, const di_node *b) {
    return di_node_alt(g, (const di_node *const[]){a, b}, 2);
}

const di_node *di_node_repeat(di_gram *g, const di_node *node, int32_t min, int32_t max) {
    DI_ASSERT(min >= 0 && (max < 0 || min <= max));
    if (node->kind == DI_NODE_EMPTY || max == 0)
        return &empty_node;
    if (node->kind == DI_NODE_NEVER)
        return min == 0 ? &empty_node : &never_node;
    if (min == 1 && max == 1)
        return node;
    di_node *repeat = make_list(g, DI_NODE_REPEAT, &node, 1);
    if (!repeat)
        return &never_node;
    repeat->min = min;
    repeat->max = max < 0 ? -1 : max;
    return repeat;
}

const di_node *di_node_rule(di_gram *g, int32_t rule) {
    di_node *node = new_node(g, DI_NODE_RULE, 0);
    if (!node)
        return &never_node;
    node->rule = rule;
    return node;
}

const di_node *di_node_until(di_gram *g, const di_node *const *ends, size_t n) {
    return n ? new_list(g, DI_NODE_UNTIL, ends, n) : &never_node;
}

const di_node *di_node_free(di_gram *g, const di_node *const *without, size_t n) {
    return new_list(g, DI_NODE_FREE, without, n);
}

const di_node *di_node_graph(di_gram *g, int32_t n_states, const bool *is_accepting, const di_graph_edge *edges,
                             size_t n_edges) {
    di_node *node = new_node(g, DI_NODE_GRAPH, n_edges);
    bool *accepting = di_gram_alloc(g, (size_t)DI_MAX(n_states, 1) * sizeof *accepting);
    di_graph_edge *copy = di_gram_alloc(g, DI_MAX(n_edges, (size_t)1) * sizeof *copy);
    if (!node || !accepting || !copy)
        return &never_node;
    memcpy(accepting, is_accepting, (size_t)n_states * sizeof *accepting);
    if (n_edges)
        memcpy(copy, edges, n_edges * sizeof *copy);
    node->edges = copy;
    node->n_states = n_states;
    node->is_accepting = accepting;
    return node;
}
