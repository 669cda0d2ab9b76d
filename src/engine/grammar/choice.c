/* Lists of texts, of which one is chosen: a trie, so that what is still open after a few characters is one place of the
 * automaton and not every text that is left. Serves the `choice` of requests and the `enum` of schemas. */
#include "ir.h"

typedef struct text {
    const char *s;
    size_t len;
} text;

static int compare_texts(const void *a, const void *b) {
    const text *x = a, *y = b;
    int order = memcmp(x->s, y->s, DI_MIN(x->len, y->len));
    return order ? order : x->len < y->len ? -1 : x->len > y->len;
}

/* Length of what both begin with, not ending inside a character. */
static size_t common_prefix(const text *a, const text *b) {
    size_t n = 0, max = DI_MIN(a->len, b->len);
    while (n < max && a->s[n] == b->s[n])
        n++;
    while (n > 0 && n < b->len && ((unsigned char)b->s[n] & 0xC0) == 0x80)
        n--;
    return n;
}

/* One place of the trie on the way to the text that was added last. */
typedef struct place {
    size_t depth; /* bytes of that text */
    int32_t state;
} place;

typedef struct trie {
    di_gram *g;
    place *path; /* [n_path], the root first */
    size_t n_path;
    di_graph_edge *edges;
    size_t n_edges;
    bool *is_accepting;
    int32_t n_states;
} trie;

static int32_t new_state(trie *t, bool is_accepting) {
    t->is_accepting[t->n_states] = is_accepting;
    return t->n_states++;
}

/* Leaves places deeper than `depth`, of which each gets its edge, and makes one at `depth`, if there is none. */
static void climb(trie *t, const text *along, size_t depth) {
    while (t->path[t->n_path - 1].depth > depth) {
        place last = t->path[--t->n_path];
        if (t->path[t->n_path - 1].depth < depth)
            t->path[t->n_path++] = (place){depth, new_state(t, false)};
        place from = t->path[t->n_path - 1];
        const di_node *label = di_node_bytes(t->g, along->s + from.depth, last.depth - from.depth);
        t->edges[t->n_edges++] = (di_graph_edge){from.state, last.state, label};
    }
}

const di_node *di_node_choice(di_gram *g, const char *const *texts, const size_t *lens, size_t n) {
    if (n == 0 || di_gram_has_failed(g))
        return di_node_never();
    if (n == 1)
        return di_node_bytes(g, texts[0], lens[0]);
    if (n > INT32_MAX / 2) {
        di_gram_fail(g, DI_ERR_RANGE, "a choice of %zu texts", n);
        return di_node_never();
    }
    /* A text brings at most two places (its own and one where it leaves another) and two edges. */
    text *sorted = di_gram_alloc(g, n * sizeof *sorted);
    trie t = {.g = g,
              .path = di_gram_alloc(g, (2 * n + 1) * sizeof *t.path),
              .edges = di_gram_alloc(g, 2 * n * sizeof *t.edges),
              .is_accepting = di_gram_alloc(g, (2 * n + 1) * sizeof *t.is_accepting)};
    if (!sorted || !t.path || !t.edges || !t.is_accepting)
        return di_node_never();
    for (size_t i = 0; i < n; i++)
        sorted[i] = (text){texts[i], lens[i]};
    qsort(sorted, n, sizeof *sorted, compare_texts);
    t.path[t.n_path++] = (place){0, new_state(&t, false)};
    const text *before = NULL;
    for (size_t i = 0; i < n; i++) {
        const text *x = &sorted[i];
        if (before && compare_texts(before, x) == 0)
            continue;
        if (before)
            climb(&t, before, common_prefix(before, x));
        if (x->len == 0)
            t.is_accepting[0] = true;
        else
            t.path[t.n_path++] = (place){x->len, new_state(&t, true)};
        before = x;
    }
    climb(&t, before, 0);
    return di_gram_has_failed(g) ? di_node_never() : di_node_graph(g, t.n_states, t.is_accepting, t.edges, t.n_edges);
}

di_status di_gram_choice(di_gram *g, const di_json *choices, di_error *err) {
    size_t n = di_json_array_len(choices);
    if (!di_json_is(choices, DI_JSON_ARRAY))
        di_gram_fail(g, DI_ERR_REQUEST, "choice: expected an array of strings, found %s", di_json_kind_name(choices));
    else if (n == 0)
        di_gram_fail(g, DI_ERR_REQUEST, "choice: expected at least one string, found none");
    const char **texts = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof *texts);
    size_t *lens = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof *lens);
    g->root = di_gram_rule_add(g, "root", strlen("root"));
    if (!texts || !lens || g->root < 0)
        return di_gram_status(g, err);
    for (size_t i = 0; i < n && !di_gram_has_failed(g); i++) {
        const di_json *v = di_json_at(choices, i);
        texts[i] = di_json_str(v, &lens[i]);
        if (!texts[i])
            di_gram_fail(g, DI_ERR_REQUEST, "choice[%zu]: expected a string, found %s", i, di_json_kind_name(v));
    }
    di_gram_rule_define(g, g->root, di_node_choice(g, texts, lens, n));
    return di_gram_status(g, err);
}
