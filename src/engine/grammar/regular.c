/* Regular sets as deterministic automata over code points: intersection, difference, erasing, emptiness.
 *
 * The alphabet of an automaton is cut into classes of code points that it never tells apart, so that its transitions
 * are a table [n_states, n_classes]. Automata come out of the subset construction over one without order (nfa below) or
 * out of a product; each is then reduced: states that lead nowhere go, equal ones are joined (Hopcroft), classes with
 * equal columns are joined. State 0 is the start; an automaton without states is the empty set.
 *
 * Sizes are bounded by the numbers below and by the memory of the grammar; what passes them is DI_ERR_RANGE. */
#include "ir.h"

enum { DEAD = -1, STATES_MAX = 1 << 17, TABLE_MAX = 1 << 21, NFA_STATES_MAX = 1 << 18, NFA_EDGES_MAX = 1 << 20 };

typedef struct cut {
    uint32_t first; /* code points from here to the next cut are of this class */
    int32_t class_id;
} cut;

struct di_regular {
    int32_t n_states, n_classes;
    size_t n_cuts;
    const cut *cuts;          /* [n_cuts], the first at 0 */
    const int32_t *next;      /* [n_states, n_classes], DEAD where no text goes on */
    const bool *is_accepting; /* [n_states] */
};

static void fail_size(di_gram *g) {
    di_gram_fail(g, DI_ERR_RANGE,
                 "a regular set in the grammar takes too large an automaton (counts are unrolled there)");
}

/* ---- growing arrays and numbered lists ------------------------------------------------------------------------------
 */

/* Scratch memory of the heap. False, and a failure of g, when it is short. Four arrays or so are large at a time, so
 * each may have a quarter of the grammar's memory. */
static bool grow(di_gram *g, void *array, size_t *cap, size_t n, size_t size) {
    if (n <= *cap)
        return !di_gram_has_failed(g);
    void **at = array;
    if (di_gram_status(g, NULL))
        return false;
    size_t n_max = g->limits.memory_bytes / 4 / size;
    if (n > n_max) {
        fail_size(g);
        return false;
    }
    size_t wanted = DI_MIN(DI_MAX(2 * *cap, DI_MAX(n, (size_t)64)), n_max);
    void *grown = realloc(*at, wanted * size);
    if (!grown) {
        di_gram_fail(g, DI_ERR_MEMORY, "%zu bytes for a regular set", wanted * size);
        return false;
    }
    *at = grown;
    *cap = wanted;
    return true;
}

typedef struct ints {
    int32_t *data; /* owned */
    size_t n, cap;
} ints;

static void push(di_gram *g, ints *a, int32_t v) {
    if (grow(g, &a->data, &a->cap, a->n + 1, sizeof *a->data))
        a->data[a->n++] = v;
}

static int compare_ints(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

/* Lists of integers, each with a number of its own: equal lists have one. */
typedef struct lists {
    ints pool;
    size_t *start; /* owned [n + 1] */
    size_t n, cap;
    int32_t *table; /* owned [table_cap], of numbers + 1; table_cap is 0 or a power of two */
    size_t table_cap;
} lists;

static void lists_deinit(lists *l) {
    free(l->pool.data);
    free(l->start);
    free(l->table);
}

static size_t lists_len(const lists *l, int32_t id) {
    return l->start ? l->start[id + 1] - l->start[id] : 0;
}

static const int32_t *lists_at(const lists *l, int32_t id) {
    return l->start ? l->pool.data + l->start[id] : NULL;
}

static uint64_t hash_ints(const int32_t *data, size_t n) {
    uint64_t h = n;
    for (size_t i = 0; i < n; i++)
        h = di_mix64(h ^ (uint32_t)data[i]);
    return h;
}

static bool lists_rehash(di_gram *g, lists *l) {
    size_t cap = DI_MAX(2 * l->table_cap, (size_t)256);
    int32_t *table = calloc(cap, sizeof *table);
    if (!table) {
        di_gram_fail(g, DI_ERR_MEMORY, "%zu states of a regular set", cap);
        return false;
    }
    for (size_t i = 0; i < l->n; i++) {
        size_t at = hash_ints(lists_at(l, (int32_t)i), lists_len(l, (int32_t)i)) & (cap - 1);
        while (table[at])
            at = (at + 1) & (cap - 1);
        table[at] = (int32_t)i + 1;
    }
    free(l->table);
    l->table = table;
    l->table_cap = cap;
    return true;
}

/* The number of the list, new or known; -1 after a failure. */
static int32_t lists_add(di_gram *g, lists *l, const int32_t *data, size_t n) {
    if (2 * (l->n + 1) > l->table_cap && !lists_rehash(g, l))
        return -1;
    size_t at = hash_ints(data, n) & (l->table_cap - 1);
    for (; l->table[at]; at = (at + 1) & (l->table_cap - 1)) {
        int32_t id = l->table[at] - 1;
        if (lists_len(l, id) == n && (n == 0 || memcmp(lists_at(l, id), data, n * sizeof *data) == 0))
            return id;
    }
    if (!grow(g, &l->start, &l->cap, l->n + 2, sizeof *l->start) ||
        !grow(g, &l->pool.data, &l->pool.cap, l->pool.n + n, sizeof *l->pool.data))
        return -1;
    if (n)
        memcpy(l->pool.data + l->pool.n, data, n * sizeof *data);
    l->start[l->n] = l->pool.n;
    l->pool.n += n;
    l->start[l->n + 1] = l->pool.n;
    l->table[at] = (int32_t)l->n + 1;
    return (int32_t)l->n++;
}

/* ---- partitions: a set of 0 .. n - 1 in blocks, refined by marking members and splitting the blocks ---- */

typedef struct partition {
    int32_t *members;              /* [n], block by block */
    int32_t *where, *block;        /* [n]: place in members, block */
    int32_t *first, *end, *marked; /* [n_blocks]: bounds in members; marked ones come first */
    int32_t *touched;              /* [n_touched] blocks with marks */
    int32_t n, n_blocks, n_touched;
} partition;

static void partition_deinit(partition *p) {
    free(p->members);
    *p = (partition){0};
}

static bool partition_init(di_gram *g, partition *p, int32_t n) {
    *p = (partition){.n = n, .n_blocks = n > 0};
    int32_t *all = calloc((size_t)DI_MAX(n, 1) * 7, sizeof *all);
    if (!all) {
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", n);
        return false;
    }
    p->members = all;
    p->where = all + n;
    p->block = p->where + n;
    p->first = p->block + n;
    p->end = p->first + n;
    p->marked = p->end + n;
    p->touched = p->marked + n;
    for (int32_t i = 0; i < n; i++)
        p->members[i] = p->where[i] = i;
    if (n > 0)
        p->end[0] = n;
    return true;
}

static void partition_mark(partition *p, int32_t member) {
    int32_t b = p->block[member], at = p->where[member], to = p->first[b] + p->marked[b];
    if (at < to)
        return; /* already */
    if (p->marked[b]++ == 0)
        p->touched[p->n_touched++] = b;
    int32_t other = p->members[to];
    p->members[to] = member;
    p->members[at] = other;
    p->where[member] = to;
    p->where[other] = at;
}

/* Splits block b into what is marked and the rest; the smaller becomes the new block, which is returned. -1: no split.
 */
static int32_t partition_split(partition *p, int32_t b) {
    int32_t middle = p->first[b] + p->marked[b], made = p->n_blocks;
    p->marked[b] = 0;
    if (middle == p->end[b])
        return -1;
    if (middle - p->first[b] <= p->end[b] - middle) {
        p->first[made] = p->first[b];
        p->end[made] = middle;
        p->first[b] = middle;
    } else {
        p->first[made] = middle;
        p->end[made] = p->end[b];
        p->end[b] = middle;
    }
    p->marked[made] = 0;
    p->n_blocks++;
    for (int32_t i = p->first[made]; i < p->end[made]; i++)
        p->block[p->members[i]] = made;
    return made;
}

/* ---- reducing -------------------------------------------------------------------------------------------------------
 */

/* An automaton in the making, of the heap. */
typedef struct table {
    int32_t n_states, n_classes;
    ints next;      /* [n_states, n_classes] */
    ints accepting; /* [n_states] of 0 and 1 */
    cut *cuts;      /* owned */
    size_t n_cuts, cuts_cap;
} table;

static void table_deinit(table *t) {
    free(t->next.data);
    free(t->accepting.data);
    free(t->cuts);
}

static void add_cut(di_gram *g, table *t, uint32_t first, int32_t class_id) {
    if (t->n_cuts && t->cuts[t->n_cuts - 1].class_id == class_id)
        return;
    if (grow(g, &t->cuts, &t->cuts_cap, t->n_cuts + 1, sizeof *t->cuts))
        t->cuts[t->n_cuts++] = (cut){first, class_id};
}

static int32_t add_state(di_gram *g, table *t, bool is_accepting) {
    if (t->n_states == STATES_MAX || (int64_t)(t->n_states + 1) * t->n_classes > TABLE_MAX) {
        fail_size(g);
        return DEAD;
    }
    push(g, &t->accepting, is_accepting);
    for (int32_t k = 0; k < t->n_classes; k++)
        push(g, &t->next, DEAD);
    return di_gram_has_failed(g) ? DEAD : t->n_states++;
}

/* Which states lead to an accepting one. live [n_states] zeroed. from: transitions turned around, as sorted below. */
typedef struct inverse {
    int32_t *start; /* owned [n_classes * (n_states + 1) + 1] */
    int32_t *from;  /* owned */
} inverse;

static void inverse_deinit(inverse *v) {
    free(v->start);
    free(v->from);
}

/* States that go to s by class k: from[start[k * (n + 1) + s] .. start[k * (n + 1) + s + 1]), DEAD being state n. */
static bool inverse_init(di_gram *g, inverse *v, const table *t) {
    size_t n = (size_t)t->n_states + 1, n_slots = n * (size_t)t->n_classes;
    *v = (inverse){calloc(n_slots + 2, sizeof *v->start), malloc((n_slots + 1) * sizeof *v->from)};
    if (!v->start || !v->from) {
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", t->n_states);
        return false;
    }
    int32_t *count = v->start + 1;
    for (size_t s = 0; s < n; s++) {
        for (size_t k = 0; k < (size_t)t->n_classes; k++) {
            int32_t to = s + 1 < n ? t->next.data[s * (size_t)t->n_classes + k] : DEAD;
            count[k * n + (to == DEAD ? n - 1 : (size_t)to)]++;
        }
    }
    for (size_t i = 1; i <= n_slots; i++)
        v->start[i] += v->start[i - 1];
    /* Filling moves each start to its end, which is the next one's start: they are moved back afterwards. */
    for (size_t s = 0; s < n; s++) {
        for (size_t k = 0; k < (size_t)t->n_classes; k++) {
            int32_t to = s + 1 < n ? t->next.data[s * (size_t)t->n_classes + k] : DEAD;
            v->from[v->start[k * n + (to == DEAD ? n - 1 : (size_t)to)]++] = (int32_t)s;
        }
    }
    for (size_t i = n_slots; i > 0; i--)
        v->start[i] = v->start[i - 1];
    v->start[0] = 0;
    return true;
}

/* Hopcroft's partition refinement over the states and one dead state, number n_states. */
static bool refine(di_gram *g, partition *p, const table *t, const inverse *v) {
    int32_t n = t->n_states + 1;
    ints todo = {0}, snapshot = {0};
    bool *is_waiting = calloc((size_t)n, sizeof *is_waiting);
    for (int32_t s = 0; s < t->n_states; s++) {
        if (t->accepting.data[s])
            partition_mark(p, s);
    }
    while (p->n_touched > 0)
        partition_split(p, p->touched[--p->n_touched]);
    if (!is_waiting)
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", n);
    for (int32_t b = 0; b < p->n_blocks && is_waiting; b++) {
        push(g, &todo, b);
        is_waiting[b] = true;
    }
    while (todo.n > 0 && !di_gram_status(g, NULL)) {
        int32_t splitter = todo.data[--todo.n];
        is_waiting[splitter] = false;
        snapshot.n = 0;
        for (int32_t i = p->first[splitter]; i < p->end[splitter]; i++)
            push(g, &snapshot, p->members[i]);
        for (int32_t k = 0; k < t->n_classes && !di_gram_has_failed(g); k++) {
            for (size_t i = 0; i < snapshot.n; i++) {
                const int32_t *start = v->start + (size_t)k * (size_t)n + (size_t)snapshot.data[i];
                for (int32_t j = start[0]; j < start[1]; j++)
                    partition_mark(p, v->from[j]);
            }
            while (p->n_touched > 0) {
                int32_t b = p->touched[--p->n_touched], made = partition_split(p, b);
                if (made < 0)
                    continue;
                /* The new block is the smaller one, which is enough, unless the old one waits for its turn as well. */
                is_waiting[made] = true;
                push(g, &todo, made);
            }
        }
    }
    free(todo.data);
    free(snapshot.data);
    free(is_waiting);
    return !di_gram_has_failed(g);
}

/* Blocks become states, in the order in which they are reached from the start; those equal to the dead state vanish. */
static void number_blocks(di_gram *g, const partition *p, const table *t, int32_t *state_of_block, ints *order) {
    int32_t dead = p->block[t->n_states];
    for (int32_t b = 0; b < p->n_blocks; b++)
        state_of_block[b] = DEAD;
    if (t->n_states == 0 || p->block[0] == dead)
        return;
    state_of_block[p->block[0]] = 0;
    push(g, order, 0);
    for (size_t i = 0; i < order->n && !di_gram_has_failed(g); i++) {
        const int32_t *row = t->next.data + (size_t)order->data[i] * (size_t)t->n_classes;
        for (int32_t k = 0; k < t->n_classes; k++) {
            int32_t b = row[k] == DEAD ? dead : p->block[row[k]];
            if (b == dead || state_of_block[b] != DEAD)
                continue;
            state_of_block[b] = (int32_t)order->n;
            push(g, order, row[k]);
        }
    }
}

/* Classes with equal columns get one number. Returns how many there are; columns of -1 alone count too. */
static int32_t join_classes(di_gram *g, const int32_t *next, int32_t n_states, int32_t n_classes, int32_t *joined) {
    lists columns = {0};
    ints column = {0};
    for (int32_t k = 0; k < n_classes && !di_gram_has_failed(g); k++) {
        column.n = 0;
        for (int32_t s = 0; s < n_states; s++)
            push(g, &column, next[(size_t)s * (size_t)n_classes + (size_t)k]);
        joined[k] = lists_add(g, &columns, column.data, column.n);
    }
    int32_t n = (int32_t)columns.n;
    free(column.data);
    lists_deinit(&columns);
    return n;
}

/* The finished automaton, in the arena. */
static const di_regular *settle(di_gram *g, const table *t, const int32_t *next, const ints *order) {
    int32_t n_states = (int32_t)order->n;
    int32_t *joined = di_gram_alloc(g, (size_t)DI_MAX(t->n_classes, 1) * sizeof *joined);
    if (!joined)
        return NULL;
    int32_t n_classes = join_classes(g, next, n_states, t->n_classes, joined);
    if (di_gram_has_failed(g))
        return NULL;
    di_regular *a = di_gram_alloc(g, sizeof *a);
    cut *cuts = di_gram_alloc(g, DI_MAX(t->n_cuts, (size_t)1) * sizeof *cuts);
    int32_t *rows = di_gram_alloc(g, (size_t)DI_MAX(n_states * n_classes, 1) * sizeof *rows);
    bool *accepting = di_gram_alloc(g, (size_t)DI_MAX(n_states, 1) * sizeof *accepting);
    if (!a || !cuts || !rows || !accepting)
        return NULL;
    size_t n_cuts = 0;
    for (size_t i = 0; i < t->n_cuts; i++) {
        int32_t k = joined[t->cuts[i].class_id];
        if (n_cuts == 0 || cuts[n_cuts - 1].class_id != k)
            cuts[n_cuts++] = (cut){t->cuts[i].first, k};
    }
    for (int32_t s = 0; s < n_states; s++) {
        accepting[s] = t->accepting.data[order->data[s]];
        for (int32_t k = 0; k < t->n_classes; k++)
            rows[(size_t)s * (size_t)n_classes + (size_t)joined[k]] =
                next[(size_t)s * (size_t)t->n_classes + (size_t)k];
    }
    *a = (di_regular){n_states, n_classes, n_cuts, cuts, rows, accepting};
    return a;
}

static const di_regular *reduce(di_gram *g, const table *t) {
    const di_regular *a = NULL;
    partition p = {0};
    inverse v = {0};
    ints order = {0};
    int32_t *state_of_block = NULL, *next = NULL;
    if (di_gram_has_failed(g) || !partition_init(g, &p, t->n_states + 1) || !inverse_init(g, &v, t) ||
        !refine(g, &p, t, &v))
        goto out;
    state_of_block = malloc(((size_t)p.n_blocks + 1) * sizeof *state_of_block);
    if (!state_of_block) {
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", p.n_blocks);
        goto out;
    }
    number_blocks(g, &p, t, state_of_block, &order);
    size_t n_classes = (size_t)t->n_classes;
    next = malloc(DI_MAX(order.n * n_classes, (size_t)1) * sizeof *next);
    if (!next) {
        di_gram_fail(g, DI_ERR_MEMORY, "%zu states of a regular set", order.n);
        goto out;
    }
    for (size_t s = 0; s < order.n; s++) {
        const int32_t *row = t->next.data + (size_t)order.data[s] * n_classes;
        for (size_t k = 0; k < n_classes; k++)
            next[s * n_classes + k] = row[k] == DEAD ? DEAD : state_of_block[p.block[row[k]]];
    }
    a = settle(g, t, next, &order);
out:
    partition_deinit(&p);
    inverse_deinit(&v);
    free(order.data);
    free(state_of_block);
    free(next);
    return di_gram_has_failed(g) ? NULL : a;
}

/* ---- automata without order -----------------------------------------------------------------------------------------
 */

typedef struct nfa_edge {
    int32_t from, to;
    int32_t set; /* -1: by no text */
} nfa_edge;

typedef struct nfa {
    di_gram *g;
    nfa_edge *edges; /* owned */
    size_t n_edges, edges_cap;
    int32_t n_states, start, end;
    lists sets;             /* ranges as first, last, first, ... */
    int32_t ascii_set[128]; /* number + 1 */
    int32_t depth;
} nfa;

static void nfa_deinit(nfa *m) {
    free(m->edges);
    lists_deinit(&m->sets);
}

static int32_t nfa_state(nfa *m) {
    if (m->n_states == NFA_STATES_MAX) {
        fail_size(m->g);
        return 0;
    }
    return m->n_states++;
}

static void nfa_edge_add(nfa *m, int32_t from, int32_t to, int32_t set) {
    if (m->n_edges == NFA_EDGES_MAX) {
        fail_size(m->g);
        return;
    }
    if (grow(m->g, &m->edges, &m->edges_cap, m->n_edges + 1, sizeof *m->edges))
        m->edges[m->n_edges++] = (nfa_edge){from, to, set};
}

static int32_t nfa_set(nfa *m, const di_code_range *ranges, size_t n) {
    ints flat = {0};
    for (size_t i = 0; i < n; i++) {
        push(m->g, &flat, (int32_t)ranges[i].first);
        push(m->g, &flat, (int32_t)ranges[i].last);
    }
    int32_t id = di_gram_has_failed(m->g) ? -1 : lists_add(m->g, &m->sets, flat.data, flat.n);
    free(flat.data);
    return id;
}

static int32_t nfa_code_set(nfa *m, uint32_t code) {
    if (code < DI_COUNT(m->ascii_set) && m->ascii_set[code])
        return m->ascii_set[code] - 1;
    int32_t id = nfa_set(m, &(di_code_range){code, code}, 1);
    if (code < DI_COUNT(m->ascii_set))
        m->ascii_set[code] = id + 1;
    return id;
}

static void build(nfa *m, const di_node *node, int32_t from, int32_t to);

static void build_bytes(nfa *m, const di_node *node, int32_t from, int32_t to) {
    size_t len = (size_t)node->n;
    for (size_t at = 0, n; at < len && !di_gram_has_failed(m->g); at += n) {
        uint32_t code;
        n = di_utf8_decode(node->bytes + at, len - at, &code, NULL);
        if (n == 0) {
            di_gram_fail(m->g, DI_ERR_REQUEST, "a regular set of the grammar has bytes that are no UTF-8");
            return;
        }
        int32_t next = at + n == len ? to : nfa_state(m);
        nfa_edge_add(m, from, next, nfa_code_set(m, code));
        from = next;
    }
}

/* Counts are unrolled: min copies, then the rest, each of which may be the last. */
static void build_repeat(nfa *m, const di_node *node, int32_t from, int32_t to) {
    int32_t n_copies = node->max < 0 ? node->min : node->max;
    for (int32_t i = 0; i < n_copies && !di_gram_status(m->g, NULL); i++) {
        if (i >= node->min)
            nfa_edge_add(m, from, to, -1);
        int32_t next = nfa_state(m);
        build(m, node->nodes[0], from, next);
        from = next;
    }
    if (node->max < 0) {
        /* A state of its own, as others may come back to `from`. */
        int32_t loop = nfa_state(m), back = nfa_state(m);
        nfa_edge_add(m, from, loop, -1);
        build(m, node->nodes[0], loop, back);
        nfa_edge_add(m, back, loop, -1);
        from = loop;
    }
    nfa_edge_add(m, from, to, -1);
}

static void build_graph(nfa *m, const di_node *node, int32_t from, int32_t to) {
    int32_t base = m->n_states;
    for (int32_t i = 0; i < node->n_states; i++) {
        int32_t s = nfa_state(m);
        if (node->is_accepting[i])
            nfa_edge_add(m, s, to, -1);
    }
    if (di_gram_has_failed(m->g))
        return;
    nfa_edge_add(m, from, base, -1);
    for (int32_t i = 0; i < node->n && !di_gram_status(m->g, NULL); i++)
        build(m, node->edges[i].label, base + node->edges[i].from, base + node->edges[i].to);
}

/* Texts of node lead from `from` to `to`. Nothing built for a node ever leads back into `from` or out of `to`, save by
 * what the caller adds. */
static void build(nfa *m, const di_node *node, int32_t from, int32_t to) {
    di_gram *g = m->g;
    if (di_gram_has_failed(g))
        return;
    /* The levels of a front end's nesting are a few nodes each. */
    if (m->depth > 8 * (g->limits.depth_max + 8)) {
        di_gram_fail(g, DI_ERR_RANGE, "a regular set of the grammar nests too deep");
        return;
    }
    m->depth++;
    switch (node->kind) {
    case DI_NODE_NEVER:
        break;
    case DI_NODE_EMPTY:
        nfa_edge_add(m, from, to, -1);
        break;
    case DI_NODE_BYTES:
        build_bytes(m, node, from, to);
        break;
    case DI_NODE_CLASS:
        nfa_edge_add(m, from, to, nfa_set(m, node->ranges, (size_t)node->n));
        break;
    case DI_NODE_SEQ:
        for (int32_t i = 0; i < node->n && !di_gram_status(g, NULL); i++) {
            int32_t next = i + 1 == node->n ? to : nfa_state(m);
            build(m, node->nodes[i], from, next);
            from = next;
        }
        break;
    case DI_NODE_ALT:
        for (int32_t i = 0; i < node->n && !di_gram_status(g, NULL); i++)
            build(m, node->nodes[i], from, to);
        break;
    case DI_NODE_REPEAT:
        build_repeat(m, node, from, to);
        break;
    case DI_NODE_GRAPH:
        build_graph(m, node, from, to);
        break;
    case DI_NODE_RULE:
    case DI_NODE_SPECIAL:
    case DI_NODE_UNTIL:
    case DI_NODE_FREE:
        di_gram_fail(g, DI_ERR_REQUEST, "a part of the grammar that must be regular refers to rules or tokens");
        break;
    }
    m->depth--;
}

/* ---- making them deterministic ---- */

static int compare_codes(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static size_t lower_bound(const uint32_t *codes, size_t n, uint32_t code) {
    size_t low = 0;
    while (n > 0) {
        size_t half = n / 2;
        if (codes[low + half] < code) {
            low += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return low;
}

/* The classes of code points that the sets tell apart, as t's cuts; classes_of: per set the classes, as a list. */
static void find_classes(const nfa *m, table *t, lists *members, int32_t *classes_of) {
    di_gram *g = m->g;
    size_t n_codes = 0, n_points = m->sets.pool.n + 1;
    partition p = {0};
    ints classes = {0};
    uint32_t *codes = malloc(n_points * sizeof *codes);
    if (!codes) {
        di_gram_fail(g, DI_ERR_MEMORY, "%zu ranges of a regular set", n_points);
        return;
    }
    codes[n_codes++] = 0;
    for (size_t i = 0; i < m->sets.pool.n; i++) {
        uint32_t code = (uint32_t)m->sets.pool.data[i] + (i & 1); /* where a range begins, where it has ended */
        if (code <= DI_CODE_MAX)
            codes[n_codes++] = code;
    }
    qsort(codes, n_codes, sizeof *codes, compare_codes);
    size_t n = 1;
    for (size_t i = 1; i < n_codes; i++) {
        if (codes[i] != codes[n - 1])
            codes[n++] = codes[i];
    }
    if (!partition_init(g, &p, (int32_t)n))
        goto out;
    for (size_t i = 0; i < m->sets.n && !di_gram_status(g, NULL); i++) {
        const int32_t *ranges = lists_at(&m->sets, (int32_t)i);
        for (size_t k = 0; k < lists_len(&m->sets, (int32_t)i); k += 2) {
            size_t at = lower_bound(codes, n, (uint32_t)ranges[k]);
            for (; at < n && codes[at] <= (uint32_t)ranges[k + 1]; at++)
                partition_mark(&p, (int32_t)at);
        }
        while (p.n_touched > 0)
            partition_split(&p, p.touched[--p.n_touched]);
    }
    t->n_classes = p.n_blocks;
    for (size_t i = 0; i < n; i++)
        add_cut(g, t, codes[i], p.block[i]);
    for (size_t i = 0; i < m->sets.n && !di_gram_status(g, NULL); i++) {
        const int32_t *ranges = lists_at(&m->sets, (int32_t)i);
        classes.n = 0;
        for (size_t k = 0; k < lists_len(&m->sets, (int32_t)i); k += 2) {
            size_t at = lower_bound(codes, n, (uint32_t)ranges[k]);
            for (; at < n && codes[at] <= (uint32_t)ranges[k + 1]; at++) {
                /* A class counts once, at its first code point. */
                int32_t b = p.block[at];
                if (p.members[p.first[b]] == (int32_t)at)
                    push(g, &classes, b);
            }
        }
        classes_of[i] = lists_add(g, members, classes.data, classes.n);
    }
out:
    partition_deinit(&p);
    free(classes.data);
    free(codes);
}

/* The edges of m by the state that they leave: edges[start[s] .. start[s + 1]). */
static void sort_edges(const nfa *m, int32_t *start, nfa_edge *edges) {
    memset(start, 0, ((size_t)m->n_states + 2) * sizeof *start);
    for (size_t i = 0; i < m->n_edges; i++)
        start[m->edges[i].from + 2]++;
    for (int32_t s = 1; s <= m->n_states + 1; s++)
        start[s] += start[s - 1];
    for (size_t i = 0; i < m->n_edges; i++)
        edges[start[m->edges[i].from + 1]++] = m->edges[i];
}

typedef struct subset {
    const nfa *m;
    int32_t *start; /* owned, with edges: see sort_edges */
    nfa_edge *edges;
    int32_t *seen, stamp; /* owned [n_states] */
    lists members;        /* lists of classes */
    int32_t *classes_of;  /* owned [sets] */
    lists kernels;        /* lists of states, before following edges without text */
    ints state_of_kernel;
    lists closures; /* the same with them, as states of the result */
    ints closure, stack;
    ints *targets; /* owned [n_classes] */
} subset;

/* The state of the result for a list of states, new or known. */
static int32_t subset_state(subset *b, table *t, int32_t *list, size_t n) {
    di_gram *g = b->m->g;
    qsort(list, n, sizeof *list, compare_ints);
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (count == 0 || list[count - 1] != list[i])
            list[count++] = list[i];
    }
    size_t known = b->kernels.n;
    int32_t kernel = lists_add(g, &b->kernels, list, count);
    if (kernel < 0)
        return DEAD;
    if ((size_t)kernel < known)
        return b->state_of_kernel.data[kernel];
    /* What matters of a state is what it reads and whether it is the end. */
    b->closure.n = b->stack.n = 0;
    b->stamp++;
    bool is_accepting = false;
    for (size_t i = 0; i < count; i++) {
        b->seen[list[i]] = b->stamp;
        push(g, &b->stack, list[i]);
    }
    while (b->stack.n > 0 && !di_gram_has_failed(g)) {
        int32_t s = b->stack.data[--b->stack.n];
        bool is_reading = s == b->m->end;
        is_accepting |= s == b->m->end;
        for (int32_t i = b->start[s]; i < b->start[s + 1]; i++) {
            nfa_edge e = b->edges[i];
            if (e.set >= 0) {
                is_reading = true;
            } else if (b->seen[e.to] != b->stamp) {
                b->seen[e.to] = b->stamp;
                push(g, &b->stack, e.to);
            }
        }
        if (is_reading)
            push(g, &b->closure, s);
    }
    if (di_gram_has_failed(g))
        return DEAD;
    if (b->closure.n)
        qsort(b->closure.data, b->closure.n, sizeof *b->closure.data, compare_ints);
    known = b->closures.n;
    int32_t state = lists_add(g, &b->closures, b->closure.data, b->closure.n);
    if (state >= 0 && (size_t)state == known)
        add_state(g, t, is_accepting);
    push(g, &b->state_of_kernel, state);
    return di_gram_has_failed(g) ? DEAD : state;
}

static void subset_run(subset *b, table *t) {
    di_gram *g = b->m->g;
    int32_t first = b->m->start;
    subset_state(b, t, &first, 1);
    for (int32_t s = 0; s < t->n_states && !di_gram_status(g, NULL); s++) {
        size_t n = lists_len(&b->closures, s);
        for (size_t i = 0; i < n; i++) {
            int32_t from = lists_at(&b->closures, s)[i];
            for (int32_t e = b->start[from]; e < b->start[from + 1]; e++) {
                if (b->edges[e].set < 0)
                    continue;
                int32_t list = b->classes_of[b->edges[e].set];
                const int32_t *classes = lists_at(&b->members, list);
                for (size_t k = 0; k < lists_len(&b->members, list); k++)
                    push(g, &b->targets[classes[k]], b->edges[e].to);
            }
        }
        for (int32_t k = 0; k < t->n_classes && !di_gram_has_failed(g); k++) {
            ints *targets = &b->targets[k];
            if (targets->n == 0)
                continue;
            int32_t to = subset_state(b, t, targets->data, targets->n);
            targets->n = 0;
            if (!di_gram_has_failed(g))
                t->next.data[(size_t)s * (size_t)t->n_classes + (size_t)k] = to;
        }
    }
}

static const di_regular *determinize(nfa *m) {
    di_gram *g = m->g;
    const di_regular *a = NULL;
    table t = {0};
    subset b = {.m = m};
    if (di_gram_has_failed(g))
        return NULL;
    b.start = malloc(((size_t)m->n_states + 2) * sizeof *b.start);
    b.edges = malloc(DI_MAX(m->n_edges, (size_t)1) * sizeof *b.edges);
    b.seen = calloc((size_t)m->n_states + 1, sizeof *b.seen);
    b.classes_of = calloc(m->sets.n + 1, sizeof *b.classes_of);
    if (!b.start || !b.edges || !b.seen || !b.classes_of) {
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", m->n_states);
        goto out;
    }
    sort_edges(m, b.start, b.edges);
    find_classes(m, &t, &b.members, b.classes_of);
    b.targets = calloc((size_t)t.n_classes + 1, sizeof *b.targets);
    if (!b.targets)
        di_gram_fail(g, DI_ERR_MEMORY, "%d classes of a regular set", t.n_classes);
    if (!di_gram_has_failed(g))
        subset_run(&b, &t);
    a = reduce(g, &t);
out:
    for (int32_t k = 0; b.targets && k < t.n_classes; k++)
        free(b.targets[k].data);
    free(b.targets);
    free(b.start);
    free(b.edges);
    free(b.seen);
    free(b.classes_of);
    lists_deinit(&b.members);
    lists_deinit(&b.kernels);
    lists_deinit(&b.closures);
    free(b.state_of_kernel.data);
    free(b.closure.data);
    free(b.stack.data);
    table_deinit(&t);
    return a;
}

const di_regular *di_regular_make(di_gram *g, const di_node *node) {
    if (di_gram_has_failed(g))
        return NULL;
    nfa m = {.g = g};
    m.start = nfa_state(&m);
    m.end = nfa_state(&m);
    build(&m, node, m.start, m.end);
    const di_regular *a = determinize(&m);
    nfa_deinit(&m);
    return a;
}

static int32_t class_of(const di_regular *a, uint32_t code) {
    size_t low = 0, high = a->n_cuts; /* the last cut that begins at or before code */
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (a->cuts[middle].first <= code)
            low = middle;
        else
            high = middle;
    }
    return a->cuts[low].class_id;
}

static uint32_t cut_last(const di_regular *a, size_t i) {
    return i + 1 < a->n_cuts ? a->cuts[i + 1].first - 1 : DI_CODE_MAX;
}

/* The code points from `first` on, up to `last` at most, of which the ranges hold all or none. */
static uint32_t piece_end(const di_code_range *ranges, size_t n, uint32_t first, uint32_t last, bool *is_inside) {
    *is_inside = false;
    for (size_t i = 0; i < n; i++) {
        if (first >= ranges[i].first && first <= ranges[i].last) {
            *is_inside = true;
            return DI_MIN(last, ranges[i].last);
        }
        if (ranges[i].first > first)
            last = DI_MIN(last, ranges[i].first - 1);
    }
    return last;
}

const di_regular *di_regular_erase(di_gram *g, const di_regular *a, const di_code_range *ranges, size_t n) {
    if (!a || di_gram_has_failed(g))
        return NULL;
    nfa m = {.g = g, .n_states = a->n_states + 2, .start = a->n_states, .end = a->n_states + 1};
    if (a->n_states > 0)
        nfa_edge_add(&m, m.start, 0, -1);
    /* Each class in pieces, kept and erased ones; edges of a class share its set. */
    ints kept = {0}; /* set, class */
    bool *is_erased = calloc((size_t)a->n_classes + 1, sizeof *is_erased);
    if (!is_erased)
        di_gram_fail(g, DI_ERR_MEMORY, "%d classes of a regular set", a->n_classes);
    for (size_t i = 0; i < a->n_cuts && !di_gram_status(g, NULL); i++) {
        uint32_t last = cut_last(a, i), piece_last;
        for (uint32_t first = a->cuts[i].first; first <= last && is_erased; first = piece_last + 1) {
            bool is_inside;
            piece_last = piece_end(ranges, n, first, last, &is_inside);
            if (is_inside) {
                is_erased[a->cuts[i].class_id] = true;
                continue;
            }
            push(g, &kept, nfa_set(&m, &(di_code_range){first, piece_last}, 1));
            push(g, &kept, a->cuts[i].class_id);
        }
    }
    for (int32_t s = 0; s < a->n_states && !di_gram_status(g, NULL); s++) {
        const int32_t *row = a->next + (size_t)s * (size_t)a->n_classes;
        if (a->is_accepting[s])
            nfa_edge_add(&m, s, m.end, -1);
        for (size_t i = 0; i < kept.n; i += 2) {
            if (row[kept.data[i + 1]] != DEAD)
                nfa_edge_add(&m, s, row[kept.data[i + 1]], kept.data[i]);
        }
        for (int32_t k = 0; k < a->n_classes; k++) {
            if (is_erased[k] && row[k] != DEAD)
                nfa_edge_add(&m, s, row[k], -1);
        }
    }
    const di_regular *erased = determinize(&m);
    free(kept.data);
    free(is_erased);
    nfa_deinit(&m);
    return erased;
}

/* ---- products -------------------------------------------------------------------------------------------------------
 */

/* Classes of the product: pairs of classes, numbered; cuts at the cuts of either. */
static void product_classes(di_gram *g, const di_regular *a, const di_regular *b, table *t, lists *pairs) {
    size_t i = 0, j = 0;
    while (i < a->n_cuts && j < b->n_cuts && !di_gram_has_failed(g)) {
        int32_t pair[2] = {a->cuts[i].class_id, b->cuts[j].class_id};
        add_cut(g, t, DI_MAX(a->cuts[i].first, b->cuts[j].first), lists_add(g, pairs, pair, 2));
        uint32_t last_a = cut_last(a, i), last_b = cut_last(b, j);
        i += last_a <= last_b;
        j += last_b <= last_a;
    }
    t->n_classes = (int32_t)pairs->n;
}

/* Texts of a that are in b (is_difference: that are not). */
static const di_regular *product(di_gram *g, const di_regular *a, const di_regular *b, bool is_difference) {
    if (!a || !b || di_gram_has_failed(g))
        return NULL;
    if (a->n_states == 0 || (is_difference && b->n_states == 0))
        return a;
    if (b->n_states == 0)
        return b;
    table t = {0};
    lists pairs = {0}, states = {0};
    product_classes(g, a, b, &t, &pairs);
    if (!di_gram_has_failed(g)) {
        lists_add(g, &states, (int32_t[]){0, 0}, 2);
        add_state(g, &t, a->is_accepting[0] && b->is_accepting[0] != is_difference);
    }
    for (int32_t s = 0; s < t.n_states && !di_gram_status(g, NULL); s++) {
        int32_t sa = lists_at(&states, s)[0], sb = lists_at(&states, s)[1];
        for (int32_t k = 0; k < t.n_classes && !di_gram_has_failed(g); k++) {
            const int32_t *pair = lists_at(&pairs, k);
            int32_t to[2] = {a->next[(size_t)sa * (size_t)a->n_classes + (size_t)pair[0]],
                             sb == DEAD ? DEAD : b->next[(size_t)sb * (size_t)b->n_classes + (size_t)pair[1]]};
            if (to[0] == DEAD || (to[1] == DEAD && !is_difference))
                continue;
            int32_t id = lists_add(g, &states, to, 2);
            bool is_in_b = to[1] != DEAD && b->is_accepting[to[1]];
            if (id == t.n_states)
                add_state(g, &t, a->is_accepting[to[0]] && is_in_b != is_difference);
            if (!di_gram_has_failed(g))
                t.next.data[(size_t)s * (size_t)t.n_classes + (size_t)k] = id;
        }
    }
    const di_regular *result = reduce(g, &t);
    table_deinit(&t);
    lists_deinit(&pairs);
    lists_deinit(&states);
    return result;
}

const di_regular *di_regular_intersect(di_gram *g, const di_regular *a, const di_regular *b) {
    return product(g, a, b, false);
}

const di_regular *di_regular_subtract(di_gram *g, const di_regular *a, const di_regular *b) {
    return product(g, a, b, true);
}

/* ---- looking ---- */

bool di_regular_is_never(const di_regular *a) {
    return !a || a->n_states == 0; /* a reduced automaton keeps no state that leads nowhere */
}

bool di_regular_matches(const di_regular *a, const char *text, size_t len) {
    if (di_regular_is_never(a))
        return false;
    int32_t s = 0;
    for (size_t at = 0, n; at < len; at += n) {
        uint32_t code;
        n = di_utf8_decode(text + at, len - at, &code, NULL);
        if (n == 0)
            return false;
        s = a->next[(size_t)s * (size_t)a->n_classes + (size_t)class_of(a, code)];
        if (s == DEAD)
            return false;
    }
    return a->is_accepting[s];
}

/* One node for the code points of the classes in `row` that lead to `to`. */
static const di_node *label(di_gram *g, const di_regular *a, const int32_t *row, int32_t to, di_code_range *scratch) {
    size_t n = 0;
    for (size_t i = 0; i < a->n_cuts; i++) {
        if (row[a->cuts[i].class_id] == to)
            scratch[n++] = (di_code_range){a->cuts[i].first, cut_last(a, i)};
    }
    return di_node_class(g, scratch, n, false);
}

/* The classes of a row by the state that they lead to: first[to], then next[class], up to -1. order: the states. */
typedef struct fans {
    int32_t *first; /* owned [n_states] of -1 between rows, with next and order */
    int32_t *next;  /* [n_classes] */
    int32_t *order; /* [n] */
    int32_t n;
} fans;

static void sort_row(fans *f, const int32_t *row, int32_t n_classes) {
    f->n = 0;
    for (int32_t k = n_classes - 1; k >= 0; k--) {
        if (row[k] == DEAD)
            continue;
        if (f->first[row[k]] < 0)
            f->order[f->n++] = row[k];
        f->next[k] = f->first[row[k]];
        f->first[row[k]] = k;
    }
}

const di_node *di_regular_node(di_gram *g, const di_regular *a) {
    if (di_regular_is_never(a) || di_gram_has_failed(g))
        return di_node_never();
    size_t n_classes = (size_t)a->n_classes, n_edges = 0, edges_cap = 0, labels_cap = 0;
    di_graph_edge *edges = NULL;
    const di_node *node, **labels = NULL;
    lists signatures = {0}; /* sets of classes that have a node, so that equal labels are one node */
    ints classes = {0};
    di_code_range *scratch = di_gram_alloc(g, a->n_cuts * sizeof *scratch);
    fans f = {.first = malloc(((size_t)a->n_states + 2 * n_classes) * sizeof *f.first)};
    if (!f.first) {
        di_gram_fail(g, DI_ERR_MEMORY, "%d states of a regular set", a->n_states);
        return di_node_never();
    }
    for (int32_t s = 0; s < a->n_states; s++)
        f.first[s] = -1;
    f.next = f.first + a->n_states;
    f.order = f.next + n_classes;
    for (int32_t s = 0; s < a->n_states && !di_gram_status(g, NULL); s++) {
        const int32_t *row = a->next + (size_t)s * n_classes;
        sort_row(&f, row, a->n_classes);
        for (int32_t i = f.n - 1; i >= 0; i--) {
            int32_t to = f.order[i];
            classes.n = 0;
            for (int32_t k = f.first[to]; k >= 0; k = f.next[k])
                push(g, &classes, k);
            f.first[to] = -1;
            size_t known = signatures.n;
            int32_t id = lists_add(g, &signatures, classes.data, classes.n);
            if (id < 0 || !grow(g, &labels, &labels_cap, signatures.n, sizeof *labels) ||
                !grow(g, &edges, &edges_cap, n_edges + 1, sizeof *edges) || !labels || !edges)
                continue;
            if ((size_t)id == known)
                labels[id] = label(g, a, row, to, scratch);
            if (labels[id]->kind != DI_NODE_NEVER)
                edges[n_edges++] = (di_graph_edge){s, to, labels[id]};
        }
    }
    if (di_gram_has_failed(g))
        node = di_node_never();
    else if (n_edges == 0)
        node = a->is_accepting[0] ? di_node_empty() : di_node_never();
    else
        node = di_node_graph(g, a->n_states, a->is_accepting, edges, n_edges);
    free(f.first);
    free(edges);
    free(labels);
    free(classes.data);
    lists_deinit(&signatures);
    return node;
}
