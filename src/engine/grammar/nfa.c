/* Nodes to nets (nfa.h): states and edges for every node that the root of a grammar reaches.
 *
 * A node is written between two states, and never leads back to the first or on from the second, so that parts fit
 * together without copies. Three kinds of nodes become nets of their own: rules (small ones without calls are copied
 * where they are used), bodies of repeats that are counted because a copy for each time would be large, and parts that
 * are met again, so that a node of many uses is written twice at most. Very deep nodes become nets too, which bounds
 * the recursion here. Classes, until and free are left to nfa_text.c. */
#include "nfa.h"

enum {
    COPY_STATES = 12,   /* parts of up to so many states are copied wherever they are used */
    UNROLL_STATES = 48, /* repeats that take up to so many states are unrolled */
    LOOP_STATES = 48,   /* bodies of loops of up to so many states are written where they loop */
    DEPTH_MAX = 64      /* of nodes in one net */
};

/* ---- storage ---- */

static void fail_memory(di_nfa *a) {
    di_gram_fail(a->g, DI_ERR_RANGE, "the grammar takes more than %zu MiB to compile", a->g->limits.memory_bytes >> 20);
}

bool di_nfa_reserve(di_nfa *a, void *array, int32_t *cap, int64_t n, size_t size) {
    if (di_gram_has_failed(a->g))
        return false;
    if (n <= *cap)
        return true;
    int64_t cap_new = DI_MAX(n, DI_MAX(2 * (int64_t)*cap, 64));
    size_t more = (size_t)(cap_new - *cap) * size;
    if (cap_new > INT32_MAX || a->n_bytes + more > a->g->limits.memory_bytes) {
        fail_memory(a);
        return false;
    }
    void *old, *grown;
    memcpy(&old, array, sizeof old);
    grown = realloc(old, (size_t)cap_new * size);
    if (!grown) {
        di_gram_fail(a->g, DI_ERR_MEMORY, "%zu bytes for the automaton of a grammar", (size_t)cap_new * size);
        return false;
    }
    memcpy(array, &grown, sizeof grown);
    *cap = (int32_t)cap_new;
    a->n_bytes += more;
    return true;
}

void *di_nfa_scratch(di_nfa *a, int64_t n, size_t size) {
    if (di_gram_status(a->g, NULL))
        return NULL;
    size_t n_bytes;
    if (!di_size_mul(&n_bytes, (size_t)DI_MAX(n, 1), size) || n_bytes > a->g->limits.memory_bytes) {
        fail_memory(a);
        return NULL;
    }
    void *memory = calloc(1, n_bytes);
    if (!memory)
        di_gram_fail(a->g, DI_ERR_MEMORY, "%zu bytes for the automaton of a grammar", n_bytes);
    return memory;
}

void di_nfa_deinit(di_nfa *a) {
    free(a->states);
    free(a->edges);
    free(a->nets);
    free(a->counts);
    free(a->calls);
    free(a->specials);
    free(a->seen);
    free(a->rule_nets);
    free(a->order);
    *a = (di_nfa){0};
}

int32_t di_nfa_state_add(di_nfa *a) {
    if (di_gram_status(a->g, NULL) ||
        !di_nfa_reserve(a, &a->states, &a->states_cap, (int64_t)a->n_states + 1, sizeof *a->states))
        return 0;
    a->states[a->n_states] = (di_nfa_state){.first = -1, .end_of = -1};
    return a->n_states++;
}

int32_t di_nfa_net_add(di_nfa *a, const di_node *node) {
    int32_t start = di_nfa_state_add(a), end = di_nfa_state_add(a);
    if (!di_nfa_reserve(a, &a->nets, &a->nets_cap, (int64_t)a->n_nets + 1, sizeof *a->nets))
        return 0;
    a->nets[a->n_nets] = (di_nfa_net){.node = node, .start = start, .end = end, .callers = -1};
    a->states[end].end_of = a->n_nets;
    return a->n_nets++;
}

int32_t di_nfa_special_find(di_nfa *a, const char *text, int32_t len) {
    for (int32_t i = 0; i < a->n_specials; i++) {
        if (a->specials[i].len == len && memcmp(a->specials[i].text, text, (size_t)len) == 0)
            return i;
    }
    if (!di_nfa_reserve(a, &a->specials, &a->specials_cap, (int64_t)a->n_specials + 1, sizeof *a->specials))
        return 0;
    a->specials[a->n_specials] = (di_nfa_special){text, len};
    return a->n_specials++;
}

int32_t di_nfa_count_add(di_nfa *a, di_nfa_count count) {
    if (!di_nfa_reserve(a, &a->counts, &a->counts_cap, (int64_t)a->n_counts + 1, sizeof *a->counts))
        return 0;
    a->counts[a->n_counts] = count;
    return a->n_counts++;
}

int32_t di_nfa_edge_add(di_nfa *a, int32_t from, di_nfa_edge edge) {
    if (!di_nfa_reserve(a, &a->edges, &a->edges_cap, (int64_t)a->n_edges + 1, sizeof *a->edges))
        return 0;
    edge.next = a->states[from].first;
    a->edges[a->n_edges] = edge;
    a->states[from].first = a->n_edges;
    return a->n_edges++;
}

/* A call that nfa_settle.c hears of when it learns what the net reads. */
static void add_call(di_nfa *a, int32_t from, di_nfa_edge edge, int32_t net) {
    int32_t index = di_nfa_edge_add(a, from, edge);
    if (!di_nfa_reserve(a, &a->calls, &a->calls_cap, (int64_t)a->n_calls + 1, sizeof *a->calls))
        return;
    a->calls[a->n_calls] = (di_nfa_call){.from = from, .edge = index, .next = a->nets[net].callers};
    a->nets[net].callers = a->n_calls++;
}

/* ---- nodes that were met ---- */

static di_nfa_seen *find_seen(di_nfa_seen *table, int32_t cap, const di_node *node) {
    uint64_t at = di_mix64((uint64_t)(uintptr_t)node);
    for (;; at++) {
        di_nfa_seen *entry = &table[at & (uint64_t)(cap - 1)];
        if (!entry->node || entry->node == node)
            return entry;
    }
}

/* The entry of a node; *was_seen: it was there. NULL after a failure. */
static di_nfa_seen *see(di_nfa *a, const di_node *node, bool *was_seen) {
    if (2 * (int64_t)(a->n_seen + 1) > a->seen_cap) {
        int32_t cap = DI_MAX(2 * a->seen_cap, 256);
        di_nfa_seen *table = cap > 0 ? di_nfa_scratch(a, cap, sizeof *table) : NULL;
        if (!table)
            return NULL;
        for (int32_t i = 0; i < a->seen_cap; i++) {
            if (a->seen[i].node)
                *find_seen(table, cap, a->seen[i].node) = a->seen[i];
        }
        free(a->seen);
        a->seen = table;
        a->seen_cap = cap;
    }
    di_nfa_seen *entry = find_seen(a->seen, a->seen_cap, node);
    *was_seen = entry->node != NULL;
    if (!entry->node) {
        *entry = (di_nfa_seen){.node = node, .net = -1};
        a->n_seen++;
    }
    return entry;
}

/* About how many states a node takes; a number above the budget where it is more than that. *calls (may be NULL)
 * becomes true when a rule is met. */
static int64_t measure(const di_node *node, int64_t budget, bool *calls) {
    int64_t size = 1;
    if (budget <= 0)
        return 1;
    switch (node->kind) {
    case DI_NODE_NEVER:
    case DI_NODE_EMPTY:
        return 1;
    case DI_NODE_BYTES:
    case DI_NODE_SPECIAL:
        return node->n;
    case DI_NODE_CLASS:
        return node->ranges[node->n - 1].last < 0x80 ? 1 : 4 + (int64_t)node->n;
    case DI_NODE_RULE:
        if (calls)
            *calls = true;
        return 1;
    case DI_NODE_SEQ:
    case DI_NODE_ALT:
        for (int32_t i = 0; i < node->n && size <= budget; i++)
            size += measure(node->nodes[i], budget - size, calls);
        return size;
    case DI_NODE_REPEAT: {
        int64_t body = measure(node->nodes[0], budget - 1, calls);
        return 1 + DI_MIN(body, budget) * DI_MAX(1, DI_MAX(node->min, node->max));
    }
    case DI_NODE_GRAPH:
        size += node->n_states;
        for (int32_t i = 0; i < node->n && size <= budget; i++)
            size += measure(node->edges[i].label, budget - size, calls);
        return size;
    case DI_NODE_UNTIL:
    case DI_NODE_FREE:
        break;
    }
    return budget + 1;
}

/* ---- nodes to edges ---- */

static void write_node(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth);

static int32_t rule_net(di_nfa *a, int32_t rule) {
    if (a->rule_nets[rule] < 0) {
        int32_t net = di_nfa_net_add(a, a->g->rules[rule].node);
        if (di_gram_has_failed(a->g))
            return 0;
        a->rule_nets[rule] = net;
    }
    return a->rule_nets[rule];
}

/* The net that holds just this node. */
static int32_t node_net(di_nfa *a, const di_node *node) {
    bool was_seen;
    di_nfa_seen *entry = see(a, node, &was_seen);
    if (!entry)
        return 0;
    if (entry->net < 0)
        entry->net = di_nfa_net_add(a, node);
    return entry->net;
}

/* Whether a node is one that is better called than written once more. */
static bool is_called(di_nfa *a, const di_node *node) {
    if (measure(node, COPY_STATES, NULL) <= COPY_STATES)
        return false;
    bool was_seen = false;
    return see(a, node, &was_seen) && was_seen;
}

static void call_net(di_nfa *a, int32_t net, int32_t from, int32_t to) {
    add_call(a, from, (di_nfa_edge){.kind = DI_EDGE_CALL, .to = to, .arg = net}, net);
}

static bool has_rule(di_nfa *a, const di_node *node) {
    const di_gram_rule *rule = &a->g->rules[node->rule];
    if (!rule->node)
        di_gram_fail(a->g, DI_ERR_REQUEST, "rule '%.200s' is used, but not defined", rule->name);
    return rule->node != NULL;
}

static void write_rule(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth) {
    if (!has_rule(a, node))
        return;
    const di_node *body = a->g->rules[node->rule].node;
    bool calls = false;
    if (measure(body, COPY_STATES, &calls) <= COPY_STATES && !calls)
        write_node(a, body, from, to, depth + 1);
    else
        call_net(a, rule_net(a, node->rule), from, to);
}

static void write_bytes(di_nfa *a, const char *bytes, int32_t n, int32_t from, int32_t to) {
    for (int32_t i = 0; i < n; i++) {
        int32_t next = i + 1 < n ? di_nfa_state_add(a) : to;
        di_nfa_byte(a, from, (uint8_t)bytes[i], (uint8_t)bytes[i], next);
        from = next;
    }
}

static void write_special(di_nfa *a, const di_node *node, int32_t from, int32_t to) {
    int32_t special = di_nfa_special_find(a, node->bytes, node->n);
    di_nfa_edge_add(a, from, (di_nfa_edge){.kind = DI_EDGE_SPECIAL, .to = to, .arg = special});
    write_bytes(a, node->bytes, node->n, from, to);
}

static void write_list(di_nfa *a, const di_node *const *nodes, int32_t n, int32_t from, int32_t to, int32_t depth) {
    for (int32_t i = 0; i < n && !di_gram_has_failed(a->g); i++) {
        int32_t next = i + 1 < n ? di_nfa_state_add(a) : to;
        write_node(a, nodes[i], from, next, depth + 1);
        from = next;
    }
}

/* The bytes that a node begins with, where they are plain to see. */
static const di_node *leading_bytes(const di_node *node) {
    if (node->kind == DI_NODE_SEQ)
        node = node->nodes[0];
    return node->kind == DI_NODE_BYTES ? node : NULL;
}

static int compare_leading(const void *x, const void *y) {
    const di_node *a = leading_bytes(*(const di_node *const *)x), *b = leading_bytes(*(const di_node *const *)y);
    int order = memcmp(a->bytes, b->bytes, (size_t)DI_MIN(a->n, b->n));
    return order ? order : (a->n > b->n) - (a->n < b->n);
}

/* Alternatives that begin with bytes share what they have in common, as a tree: an enumeration of many words stands in
 * few places at once then. */
static void write_tree(di_nfa *a, const di_node **nodes, int32_t n, int32_t from, int32_t to, int32_t depth) {
    qsort(nodes, (size_t)n, sizeof(di_node *), compare_leading);
    int32_t len_max = 0;
    for (int32_t i = 0; i < n; i++)
        len_max = DI_MAX(len_max, leading_bytes(nodes[i])->n);
    int32_t *path = di_nfa_scratch(a, (int64_t)len_max + 1, sizeof *path); /* states by length of the prefix */
    if (!path)
        return;
    path[0] = from;
    const di_node *last = NULL;
    int32_t n_path = 0; /* path[0 .. n_path] is that of the word before */
    for (int32_t i = 0; i < n && !di_gram_has_failed(a->g); i++) {
        const di_node *word = leading_bytes(nodes[i]);
        bool has_rest = nodes[i] != word;
        int32_t n_states = has_rest ? word->n : word->n - 1, same = 0;
        while (last && same < DI_MIN(n_path, n_states) && last->bytes[same] == word->bytes[same])
            same++;
        for (int32_t k = same; k < n_states; k++) {
            path[k + 1] = di_nfa_state_add(a);
            di_nfa_byte(a, path[k], (uint8_t)word->bytes[k], (uint8_t)word->bytes[k], path[k + 1]);
        }
        if (has_rest)
            write_list(a, nodes[i]->nodes + 1, nodes[i]->n - 1, path[word->n], to, depth);
        else
            di_nfa_byte(a, path[n_states], (uint8_t)word->bytes[n_states], (uint8_t)word->bytes[n_states], to);
        last = word;
        n_path = n_states;
    }
    free(path);
}

static void write_alternatives(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth) {
    const di_node **words = di_nfa_scratch(a, node->n, sizeof *words);
    int32_t n_words = 0;
    for (int32_t i = 0; words && i < node->n && !di_gram_status(a->g, NULL); i++) {
        const di_node *alternative = node->nodes[i];
        if (leading_bytes(alternative) && (alternative->kind == DI_NODE_BYTES || !is_called(a, alternative)))
            words[n_words++] = alternative;
        else
            write_node(a, alternative, from, to, depth + 1);
    }
    if (n_words > 0)
        write_tree(a, words, n_words, from, to, depth);
    free(words);
}

static void write_counted(di_nfa *a, const di_node *node, int32_t from, int32_t to) {
    const di_node *body = node->nodes[0];
    if (body->kind == DI_NODE_RULE && !has_rule(a, body))
        return;
    int32_t net = body->kind == DI_NODE_RULE ? rule_net(a, body->rule) : node_net(a, body);
    int32_t count = di_nfa_count_add(a, (di_nfa_count){.net = net, .min = node->min, .max = node->max});
    if (!di_gram_has_failed(a->g))
        add_call(a, from, (di_nfa_edge){.kind = DI_EDGE_COUNT, .to = to, .arg = count}, net);
}

static void write_repeat(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth) {
    const di_node *body = node->nodes[0];
    int64_t size = measure(body, DI_MAX((int)UNROLL_STATES, (int)LOOP_STATES), NULL);
    int32_t min = node->min, max = node->max;
    bool is_small = size * DI_MAX(min, max) <= UNROLL_STATES;
    if (max < 0 && (min <= 1 || is_small)) {
        for (int32_t i = 1; i < min; i++) {
            int32_t next = di_nfa_state_add(a);
            write_node(a, body, from, next, depth + 1);
            from = next;
        }
        int32_t loop = di_nfa_state_add(a), done = min ? di_nfa_state_add(a) : loop;
        di_nfa_empty(a, from, loop);
        /* The characters of a string, say, are read without a call for each of them. */
        write_node(a, body, loop, done, size <= LOOP_STATES ? 0 : depth + 1);
        di_nfa_empty(a, done, to);
        if (done != loop)
            di_nfa_empty(a, done, loop);
    } else if (max == 1 || (max > 0 && is_small)) {
        for (int32_t i = 0; i < max; i++) {
            int32_t next = i + 1 < max ? di_nfa_state_add(a) : to;
            if (i >= min)
                di_nfa_empty(a, from, to);
            write_node(a, body, from, next, depth + 1);
            from = next;
        }
    } else {
        write_counted(a, node, from, to);
    }
}

static void write_graph(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth) {
    int32_t base = a->n_states;
    for (int32_t i = 0; i < node->n_states; i++) {
        int32_t state = di_nfa_state_add(a);
        if (node->is_accepting[i])
            di_nfa_empty(a, state, to);
    }
    di_nfa_empty(a, from, base);
    for (int32_t i = 0; i < node->n && !di_gram_has_failed(a->g); i++) {
        const di_graph_edge *edge = &node->edges[i];
        write_node(a, edge->label, base + edge->from, base + edge->to, depth + 1);
    }
}

static void write_node(di_nfa *a, const di_node *node, int32_t from, int32_t to, int32_t depth) {
    if (di_gram_status(a->g, NULL))
        return;
    switch (node->kind) {
    case DI_NODE_NEVER:
        return;
    case DI_NODE_EMPTY:
        di_nfa_empty(a, from, to);
        return;
    case DI_NODE_BYTES:
        write_bytes(a, node->bytes, node->n, from, to);
        return;
    case DI_NODE_SPECIAL:
        write_special(a, node, from, to);
        return;
    case DI_NODE_RULE:
        write_rule(a, node, from, to, depth);
        return;
    default:
        break;
    }
    /* Depth 0 is the net of the node itself. */
    if (depth > 0 && (depth >= DEPTH_MAX || is_called(a, node))) {
        int32_t net = node_net(a, node);
        if (!di_gram_has_failed(a->g))
            call_net(a, net, from, to);
        return;
    }
    switch (node->kind) {
    case DI_NODE_CLASS:
        di_nfa_class(a, node, from, to);
        return;
    case DI_NODE_SEQ:
        write_list(a, node->nodes, node->n, from, to, depth);
        return;
    case DI_NODE_ALT:
        write_alternatives(a, node, from, to, depth);
        return;
    case DI_NODE_REPEAT:
        write_repeat(a, node, from, to, depth);
        return;
    case DI_NODE_GRAPH:
        write_graph(a, node, from, to, depth);
        return;
    default:
        di_nfa_until(a, node, from, to);
    }
}

void di_nfa_make(di_nfa *a) {
    di_gram *g = a->g;
    a->rule_nets = di_nfa_scratch(a, g->n_rules, sizeof *a->rule_nets);
    if (!a->rule_nets)
        return;
    for (int32_t i = 0; i < g->n_rules; i++)
        a->rule_nets[i] = -1;
    DI_ASSERT(g->root >= 0 && g->root < g->n_rules);
    if (!has_rule(a, &(di_node){.kind = DI_NODE_RULE, .rule = g->root}))
        return;
    rule_net(a, g->root);
    for (int32_t i = 0; i < a->n_nets && !di_gram_has_failed(g); i++)
        write_node(a, a->nets[i].node, a->nets[i].start, a->nets[i].end, 0);
}
