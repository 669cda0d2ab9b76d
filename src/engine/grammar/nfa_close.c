/* Nets to the form that runs (nfa.h, pda_internal.h): states that the root reaches, numbered as they are met, with
 * the edges of all states that empty edges lead to.
 *
 * Empty edges stay where taking their place would copy too much: a chain of many parts that may all be left out. Equal
 * edges become one and neighbouring ranges of bytes are joined; a call behind which nothing is left to read needs no
 * frame. Classes of bytes come from the same edges. */
#include "nfa.h"

enum {
    CLOSE_STATES = 128, /* states whose edges one state takes over */
    CLOSE_EDGES = 1024,
    LOOP_STATES = 64, /* how far the search for other accepting states goes */
    HOPS_MAX = 64,
    SORT_SMALL = 24
};

typedef struct site_of { /* the sites of a count, by where they go on */
    int32_t site, next;
} site_of;

typedef struct closer {
    di_nfa *a;
    di_automaton *out;
    int32_t *ids;   /* owned [a->n_states]: by state, -1: not met */
    int32_t *queue; /* owned: states by number */
    int32_t *ranks; /* owned [a->n_nets]: place in a->order */
    int32_t *site_firsts, *site_nexts;
    int32_t *marks, *stack; /* owned [a->n_states] */
    bool *is_start;         /* owned [a->n_states]: of a net */
    int32_t *twins;         /* owned: by number, a state with the same edges, itself if it is the first such */
    int32_t *twin_table;    /* owned: those states by hash of their edges, -1: free */
    uint64_t *twin_hashes;  /* owned: by number */
    int32_t twins_cap, twin_hashes_cap, twin_table_cap;
    di_nfa_edge *edges; /* owned: of the state at hand */
    int32_t mark, n_edges, edges_cap;
    int32_t states_cap, flags_cap, bytes_cap, specials_cap, calls_cap, empties_cap, sites_cap, nexts_cap, queue_cap;
    int32_t n_bytes, n_specials, n_calls, n_empties;
} closer;

void di_automaton_deinit(di_automaton *m) {
    free(m->states);
    free(m->flags);
    free(m->bytes);
    free(m->specials);
    free(m->calls);
    free(m->empties);
    free(m->sites);
    free(m->entries);
    free(m->special_text);
    free(m->special_at);
    *m = (di_automaton){0};
}

/* ---- edges of one state ---- */

/* Past states that only have one empty edge. */
static int32_t resolve(const di_nfa *a, int32_t state) {
    for (int32_t hops = 0; hops < HOPS_MAX && a->states[state].end_of < 0; hops++) {
        int32_t to = -1, n = 0;
        for (int32_t e = a->states[state].first; e >= 0 && n < 2; e = a->edges[e].next) {
            if (a->edges[e].kind == DI_EDGE_NONE)
                continue;
            n += a->edges[e].kind == DI_EDGE_EMPTY ? 1 : 2;
            to = a->edges[e].to;
        }
        if (n != 1)
            break;
        state = to;
    }
    return state;
}

static void collect(closer *c, di_nfa_edge edge) {
    if (!di_nfa_reserve(c->a, &c->edges, &c->edges_cap, (int64_t)c->n_edges + 1, sizeof *c->edges))
        return;
    edge.to = resolve(c->a, edge.to);
    if (edge.kind != DI_EDGE_BYTE)
        edge.low = edge.high = 0;
    if (edge.kind == DI_EDGE_BYTE || edge.kind == DI_EDGE_EMPTY)
        edge.arg = 0;
    c->edges[c->n_edges++] = edge;
}

/* Gathers the edges of a state and those beyond its empty edges, or its own where that is too many. Gives whether it
 * accepts. */
static bool collect_edges(closer *c, int32_t from) {
    const di_nfa *a = c->a;
    bool accepts = false, is_large = false;
    int32_t n = 0, n_seen = 1;
    c->n_edges = 0;
    c->marks[from] = ++c->mark;
    c->stack[n++] = from;
    while (n > 0 && !di_gram_status(a->g, NULL)) {
        int32_t state = c->stack[--n];
        accepts |= a->states[state].end_of >= 0;
        for (int32_t e = a->states[state].first; e >= 0; e = a->edges[e].next) {
            const di_nfa_edge *edge = &a->edges[e];
            if (edge->kind == DI_EDGE_NONE)
                continue;
            if (edge->kind != DI_EDGE_EMPTY) {
                if (n_seen > 1 && c->n_edges > CLOSE_EDGES)
                    break;
                collect(c, *edge);
            } else if (c->marks[edge->to] != c->mark) {
                c->marks[edge->to] = c->mark;
                c->stack[n++] = edge->to;
                n_seen++;
            }
        }
        if (n_seen > 1 && (n_seen > CLOSE_STATES || c->n_edges > CLOSE_EDGES)) {
            is_large = true;
            break;
        }
    }
    if (!is_large)
        return accepts;
    c->n_edges = 0;
    for (int32_t e = a->states[from].first; e >= 0; e = a->edges[e].next) {
        if (a->edges[e].kind != DI_EDGE_NONE)
            collect(c, a->edges[e]);
    }
    return a->states[from].end_of >= 0;
}

static int compare_edges(const void *x, const void *y) {
    const di_nfa_edge *a = x, *b = y;
    if (a->kind != b->kind)
        return a->kind < b->kind ? -1 : 1;
    if (a->to != b->to)
        return a->to < b->to ? -1 : 1;
    if (a->arg != b->arg)
        return a->arg < b->arg ? -1 : 1;
    return (a->low > b->low) - (a->low < b->low);
}

/* Equal edges, and ranges that meet, become one. */
static void tidy_edges(closer *c) {
    if (c->n_edges < 2)
        return;
    if (c->n_edges > SORT_SMALL) {
        qsort(c->edges, (size_t)c->n_edges, sizeof *c->edges, compare_edges);
    } else {
        for (int32_t i = 1; i < c->n_edges; i++) {
            di_nfa_edge edge = c->edges[i];
            int32_t k = i;
            for (; k > 0 && compare_edges(&edge, &c->edges[k - 1]) < 0; k--)
                c->edges[k] = c->edges[k - 1];
            c->edges[k] = edge;
        }
    }
    int32_t n = 1;
    for (int32_t i = 1; i < c->n_edges; i++) {
        di_nfa_edge *last = &c->edges[n - 1];
        const di_nfa_edge *edge = &c->edges[i];
        if (edge->kind == last->kind && edge->to == last->to && edge->arg == last->arg && edge->low <= last->high + 1)
            last->high = DI_MAX(last->high, edge->high);
        else
            c->edges[n++] = *edge;
    }
    c->n_edges = n;
}

/* ---- numbers ---- */

static int32_t number_state(closer *c, int32_t state) {
    if (c->ids[state] < 0) {
        int32_t n = c->out->n_states;
        if (!di_nfa_reserve(c->a, &c->queue, &c->queue_cap, (int64_t)n + 1, sizeof *c->queue))
            return 0;
        c->ids[state] = n;
        c->queue[c->out->n_states++] = state;
    }
    return c->ids[state];
}

static int32_t number_entry(closer *c, int32_t net) {
    int32_t rank = c->ranks[net];
    c->out->entries[rank] = number_state(c, c->a->nets[net].start);
    return rank;
}

/* The site of a counted call, one for all edges that count the same and go on in the same place. */
static int32_t number_site(closer *c, int32_t count, int32_t to) {
    di_automaton *out = c->out;
    for (int32_t s = c->site_firsts[count]; s >= 0; s = c->site_nexts[s]) {
        if (out->sites[s].to == to)
            return s;
    }
    int64_t n = (int64_t)out->n_sites + 1;
    if (!di_nfa_reserve(c->a, &out->sites, &c->sites_cap, n, sizeof *out->sites) ||
        !di_nfa_reserve(c->a, &c->site_nexts, &c->nexts_cap, n, sizeof *c->site_nexts))
        return 0;
    const di_nfa_count *what = &c->a->counts[count];
    int32_t site = out->n_sites++;
    out->sites[site] = (di_auto_site){number_entry(c, what->net), what->min, what->max, to};
    c->site_nexts[site] = c->site_firsts[count];
    c->site_firsts[count] = site;
    return site;
}

/* ---- the whole ---- */

static void write_edge(closer *c, const di_nfa_edge *edge) {
    di_nfa *a = c->a;
    di_automaton *out = c->out;
    int32_t to = number_state(c, edge->to);
    switch ((di_nfa_edge_kind)edge->kind) {
    case DI_EDGE_BYTE:
        if (di_nfa_reserve(a, &out->bytes, &c->bytes_cap, (int64_t)c->n_bytes + 1, sizeof *out->bytes))
            out->bytes[c->n_bytes++] = (di_auto_byte){to, edge->low, edge->high};
        break;
    case DI_EDGE_SPECIAL:
        if (di_nfa_reserve(a, &out->specials, &c->specials_cap, (int64_t)c->n_specials + 1, sizeof *out->specials))
            out->specials[c->n_specials++] = (di_auto_special){edge->arg, to};
        break;
    case DI_EDGE_EMPTY:
        if (di_nfa_reserve(a, &out->empties, &c->empties_cap, (int64_t)c->n_empties + 1, sizeof *out->empties))
            out->empties[c->n_empties++] = to;
        break;
    case DI_EDGE_CALL:
    case DI_EDGE_COUNT:
        if (di_nfa_reserve(a, &out->calls, &c->calls_cap, (int64_t)c->n_calls + 1, sizeof *out->calls)) {
            di_auto_call call = {0};
            if (edge->kind == DI_EDGE_CALL) {
                call = (di_auto_call){number_entry(c, edge->arg), to};
            } else {
                /* n_states isn't known yet: sites are numbered downwards from -2 until it is. */
                int32_t site = number_site(c, edge->arg, to);
                if (!di_gram_has_failed(a->g))
                    call = (di_auto_call){out->sites[site].entry, -2 - site};
            }
            out->calls[c->n_calls++] = call;
        }
        break;
    case DI_EDGE_NONE:
        break;
    }
}

/* ---- equal states ----
 *
 * States with the same edges are one: the first and the other characters of a string, say, which would otherwise be
 * worked out each for itself. The starts of nets stay apart, since each is reached just once in a step. */

static inline uint64_t mix(uint64_t h, int32_t a, int32_t b) {
    h = (h ^ ((uint64_t)(uint32_t)a << 32 | (uint32_t)b)) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

static uint64_t hash_state(const closer *c, int32_t state) {
    const di_automaton *out = c->out;
    const di_auto_state *e = &out->states[state];
    uint64_t h = out->flags[state];
    for (int32_t i = e->bytes; i < c->n_bytes; i++)
        h = mix(h, out->bytes[i].to, out->bytes[i].low << 8 | out->bytes[i].high);
    for (int32_t i = e->specials; i < c->n_specials; i++)
        h = mix(h, out->specials[i].to, out->specials[i].special);
    for (int32_t i = e->calls; i < c->n_calls; i++)
        h = mix(h, out->calls[i].back, out->calls[i].entry);
    for (int32_t i = e->empties; i < c->n_empties; i++)
        h = mix(h, out->empties[i], 0);
    return h;
}

/* Whether the edges from .. end - 1 of one state are the edges first .. first_end - 1 of another. */
static bool are_equal(const void *edges, int32_t first, int32_t first_end, int32_t from, int32_t end, size_t size) {
    const char *bytes = edges;
    return end - from == first_end - first &&
           (end == from ||
            memcmp(bytes + (size_t)first * size, bytes + (size_t)from * size, (size_t)(end - from) * size) == 0);
}

static bool is_twin(const closer *c, int32_t state, int32_t other) {
    const di_automaton *out = c->out;
    const di_auto_state *e = &out->states[state], *o = &out->states[other];
    int32_t n = o[1].bytes - o->bytes;
    if (out->flags[state] != out->flags[other] || n != c->n_bytes - e->bytes)
        return false;
    for (int32_t i = 0; i < n; i++) {
        const di_auto_byte *x = &out->bytes[e->bytes + i], *y = &out->bytes[o->bytes + i];
        if (x->to != y->to || x->low != y->low || x->high != y->high)
            return false;
    }
    return are_equal(out->specials, o->specials, o[1].specials, e->specials, c->n_specials, sizeof *out->specials) &&
           are_equal(out->calls, o->calls, o[1].calls, e->calls, c->n_calls, sizeof *out->calls) &&
           are_equal(out->empties, o->empties, o[1].empties, e->empties, c->n_empties, sizeof *out->empties);
}

static bool grow_twin_table(closer *c, int32_t n) {
    if (2 * (int64_t)n < c->twin_table_cap)
        return true;
    int32_t cap = c->twin_table_cap ? 2 * c->twin_table_cap : 256;
    int32_t *fresh = di_nfa_scratch(c->a, cap, sizeof *fresh);
    if (!fresh)
        return false;
    memset(fresh, 0xFF, (size_t)cap * sizeof *fresh);
    for (int32_t i = 0; i < c->twin_table_cap; i++) {
        if (c->twin_table[i] < 0)
            continue;
        uint64_t at = c->twin_hashes[c->twin_table[i]];
        while (fresh[at & (uint64_t)(cap - 1)] >= 0)
            at++;
        fresh[at & (uint64_t)(cap - 1)] = c->twin_table[i];
    }
    free(c->twin_table);
    c->twin_table = fresh;
    c->twin_table_cap = cap;
    return true;
}

/* Looks for a state like this one, whose edges were written just now, and takes them back if there is one. */
static void find_twin(closer *c, int32_t state) {
    int32_t n = state + 1;
    if (!di_nfa_reserve(c->a, &c->twins, &c->twins_cap, n, sizeof *c->twins) ||
        !di_nfa_reserve(c->a, &c->twin_hashes, &c->twin_hashes_cap, n, sizeof *c->twin_hashes) ||
        !grow_twin_table(c, n))
        return;
    c->twins[state] = state;
    if (c->is_start[c->queue[state]])
        return;
    uint64_t at = c->twin_hashes[state] = hash_state(c, state), mask = (uint64_t)c->twin_table_cap - 1;
    for (; c->twin_table[at & mask] >= 0; at++) {
        int32_t other = c->twin_table[at & mask];
        if (c->twin_hashes[other] != c->twin_hashes[state] || !is_twin(c, state, other))
            continue;
        const di_auto_state *e = &c->out->states[state];
        c->twins[state] = other;
        c->n_bytes = e->bytes;
        c->n_specials = e->specials;
        c->n_calls = e->calls;
        c->n_empties = e->empties;
        c->out->flags[state] = 0;
        return;
    }
    c->twin_table[at & mask] = state;
}

/* Edges lead to the first of equal states. */
static void join_twins(closer *c) {
    di_automaton *out = c->out;
    if (!c->twins)
        return;
    for (int32_t i = 0; i < c->n_bytes; i++)
        out->bytes[i].to = c->twins[out->bytes[i].to];
    for (int32_t i = 0; i < c->n_specials; i++)
        out->specials[i].to = c->twins[out->specials[i].to];
    for (int32_t i = 0; i < c->n_calls; i++)
        out->calls[i].back = out->calls[i].back >= 0 ? c->twins[out->calls[i].back] : out->calls[i].back;
    for (int32_t i = 0; i < c->n_empties; i++)
        out->empties[i] = c->twins[out->empties[i]];
    for (int32_t i = 0; i < out->n_sites; i++)
        out->sites[i].to = c->twins[out->sites[i].to];
}

/* ---- all states ---- */

static void write_states(closer *c) {
    di_nfa *a = c->a;
    di_automaton *out = c->out;
    for (int32_t i = 0; i <= out->n_states && !di_gram_status(a->g, NULL); i++) {
        if (!di_nfa_reserve(a, &out->states, &c->states_cap, (int64_t)i + 1, sizeof *out->states) ||
            !di_nfa_reserve(a, &out->flags, &c->flags_cap, (int64_t)i + 1, sizeof *out->flags))
            return;
        out->states[i] = (di_auto_state){c->n_bytes, c->n_specials, c->n_calls, c->n_empties};
        out->flags[i] = 0;
        if (i == out->n_states)
            break;
        if (collect_edges(c, c->queue[i]))
            out->flags[i] |= DI_STATE_ACCEPTS;
        tidy_edges(c);
        for (int32_t k = 0; k < c->n_edges; k++)
            write_edge(c, &c->edges[k]);
        if (c->n_bytes > out->states[i].bytes || c->n_specials > out->states[i].specials)
            out->flags[i] |= DI_STATE_READS;
        find_twin(c, i);
    }
    if (!di_gram_has_failed(a->g))
        join_twins(c);
}

/* Whether no accepting state but this one can be reached from it. */
static bool is_loop(closer *c, int32_t state) {
    const di_automaton *out = c->out;
    int32_t n = 0, at = 0, n_edges = 0;
    c->stack[n++] = state;
    c->marks[state] = ++c->mark;
    while (at < n) {
        int32_t s = c->stack[at++];
        const di_auto_state *e = &out->states[s];
        if (s != state && out->flags[s] & DI_STATE_ACCEPTS)
            return false;
        int32_t n_bytes = e[1].bytes - e->bytes, n_specials = e[1].specials - e->specials;
        int32_t n_calls = e[1].calls - e->calls, n_empties = e[1].empties - e->empties;
        n_edges += n_bytes + n_specials + n_calls + n_empties;
        if (n > LOOP_STATES || n_edges > CLOSE_EDGES)
            return false;
        for (int32_t i = 0; i < n_bytes + n_specials + n_calls + n_empties; i++) {
            int32_t k = i, to;
            if (k < n_bytes)
                to = out->bytes[e->bytes + k].to;
            else if ((k -= n_bytes) < n_specials)
                to = out->specials[e->specials + k].to;
            else if ((k -= n_specials) < n_calls)
                to = out->calls[e->calls + k].back;
            else
                to = out->empties[e->empties + k - n_calls];
            if (to >= out->n_states)
                to = out->sites[to - out->n_states].to;
            if (to >= 0 && c->marks[to] != c->mark) {
                c->marks[to] = c->mark;
                c->stack[n++] = to;
            }
        }
    }
    return true;
}

/* Places of counted calls, calls without a frame, loops. */
static void finish_calls(closer *c) {
    di_automaton *out = c->out;
    for (int32_t i = 0; i < c->n_calls; i++) {
        if (out->calls[i].back < -1)
            out->calls[i].back = out->n_states + (-2 - out->calls[i].back);
    }
    for (int32_t i = 0; i < c->n_calls && !di_gram_status(c->a->g, NULL); i++) {
        int32_t back = out->calls[i].back;
        if (back < out->n_states && out->flags[back] & DI_STATE_ACCEPTS && !(out->flags[back] & DI_STATE_LOOPS) &&
            is_loop(c, back))
            out->flags[back] |= DI_STATE_LOOPS;
    }
    for (int32_t i = 0; i < c->n_calls; i++) {
        int32_t back = out->calls[i].back;
        if (back >= out->n_states || !(out->flags[back] & DI_STATE_ACCEPTS))
            continue;
        const di_auto_state *e = &out->states[back];
        if (e[0].bytes == e[1].bytes && e[0].specials == e[1].specials && e[0].calls == e[1].calls &&
            e[0].empties == e[1].empties)
            out->calls[i].back = -1;
    }
}

static void write_specials(closer *c) {
    const di_nfa *a = c->a;
    di_automaton *out = c->out;
    size_t n_bytes = 0;
    for (int32_t i = 0; i < a->n_specials; i++)
        n_bytes += (size_t)a->specials[i].len;
    out->special_text = n_bytes <= INT32_MAX ? di_nfa_scratch(c->a, (int64_t)n_bytes, 1) : NULL;
    out->special_at = di_nfa_scratch(c->a, (int64_t)a->n_specials + 1, sizeof *out->special_at);
    if (!out->special_text || !out->special_at)
        return;
    for (int32_t i = 0; i < a->n_specials; i++) {
        memcpy(out->special_text + out->special_at[i], a->specials[i].text, (size_t)a->specials[i].len);
        out->special_at[i + 1] = out->special_at[i] + a->specials[i].len;
    }
    out->n_specials = a->n_specials;
    out->n_bytes += n_bytes + (size_t)(a->n_specials + 1) * sizeof *out->special_at;
}

void di_nfa_close(di_nfa *a, di_automaton *out) {
    closer c = {.a = a, .out = out};
    c.ids = di_nfa_scratch(a, a->n_states, sizeof *c.ids);
    c.marks = di_nfa_scratch(a, a->n_states, sizeof *c.marks);
    c.stack = di_nfa_scratch(a, (int64_t)a->n_states + CLOSE_EDGES, sizeof *c.stack);
    c.ranks = di_nfa_scratch(a, a->n_nets, sizeof *c.ranks);
    c.site_firsts = di_nfa_scratch(a, a->n_counts, sizeof *c.site_firsts);
    c.is_start = di_nfa_scratch(a, a->n_states, sizeof *c.is_start);
    out->entries = di_nfa_scratch(a, a->n_nets, sizeof *out->entries);
    if (di_gram_has_failed(a->g))
        goto out;
    for (int32_t i = 0; i < a->n_states; i++)
        c.ids[i] = -1;
    for (int32_t i = 0; i < a->n_counts; i++)
        c.site_firsts[i] = -1;
    out->n_entries = a->n_nets;
    for (int32_t i = 0; i < a->n_nets; i++) {
        c.ranks[a->order[i]] = i;
        c.is_start[a->nets[i].start] = true;
        out->entries[i] = -1;
    }
    out->root = a->nets[0].reads & DI_NET_TEXT ? number_entry(&c, 0) : -1;
    out->accepts_empty = a->nets[0].reads & DI_NET_EMPTY;
    write_states(&c);
    if (!di_gram_has_failed(a->g))
        finish_calls(&c);
    write_specials(&c);
    out->n_bytes += (size_t)c.states_cap * sizeof *out->states + (size_t)c.flags_cap +
                    (size_t)c.bytes_cap * sizeof *out->bytes + (size_t)c.specials_cap * sizeof *out->specials +
                    (size_t)c.calls_cap * sizeof *out->calls + (size_t)c.empties_cap * sizeof *out->empties +
                    (size_t)c.sites_cap * sizeof *out->sites + (size_t)out->n_entries * sizeof *out->entries;
out:
    free(c.ids);
    free(c.queue);
    free(c.ranks);
    free(c.site_firsts);
    free(c.site_nexts);
    free(c.marks);
    free(c.stack);
    free(c.is_start);
    free(c.twins);
    free(c.twin_hashes);
    free(c.twin_table);
    free(c.edges);
}

/* ---- classes of bytes ---- */

enum { SETS = 256 }; /* sets of several ranges that are known to be told apart */

typedef struct byte_set {
    uint64_t bits[4];
} byte_set;

typedef struct classifier {
    uint8_t *class_of;
    int32_t sizes[256], n;
    byte_set known[SETS];
    uint32_t ranges[256][8]; /* bits of [low][high]: ranges that are told apart */
} classifier;

static void split(classifier *c, const byte_set *set) {
    int32_t inside[256] = {0}, fresh[256] = {0};
    for (int32_t i = 0; i < 4; i++) {
        for (uint64_t bits = set->bits[i]; bits; bits &= bits - 1)
            inside[c->class_of[64 * i + __builtin_ctzll(bits)]]++;
    }
    for (int32_t i = 0; i < 4; i++) {
        for (uint64_t bits = set->bits[i]; bits; bits &= bits - 1) {
            uint8_t *k = &c->class_of[64 * i + __builtin_ctzll(bits)];
            if (inside[*k] == c->sizes[*k])
                continue; /* the whole class is in the set, or this is a part that was just made */
            if (fresh[*k] == 0) {
                fresh[*k] = c->n++;
                c->sizes[fresh[*k]] = 0;
                inside[fresh[*k]] = 0;
            }
            c->sizes[*k]--;
            inside[*k]--;
            *k = (uint8_t)fresh[*k];
            c->sizes[*k]++;
            inside[*k]++;
        }
    }
}

static void add_range(byte_set *set, int32_t low, int32_t high) {
    for (int32_t byte = low; byte <= high; byte++)
        set->bits[byte >> 6] |= (uint64_t)1 << (byte & 63);
}

/* Edges of a state that lead to the same place. */
static void split_edges(classifier *c, const di_auto_byte *edges, int32_t n) {
    byte_set set = {{0}};
    if (n == 1) {
        uint32_t *known = &c->ranges[edges->low][edges->high >> 5], bit = 1u << (edges->high & 31);
        if (*known & bit)
            return;
        *known |= bit;
        add_range(&set, edges->low, edges->high);
    } else {
        for (int32_t i = 0; i < n; i++)
            add_range(&set, edges[i].low, edges[i].high);
        byte_set *known =
            &c->known[di_mix64(set.bits[0] ^ di_mix64(set.bits[1] ^ di_mix64(set.bits[2] ^ set.bits[3]))) % SETS];
        if (memcmp(known, &set, sizeof set) == 0)
            return;
        *known = set;
    }
    split(c, &set);
}

int32_t di_nfa_classes(const di_automaton *m, uint8_t class_of[256], uint8_t byte_of[256]) {
    classifier c = {.class_of = class_of, .n = 1};
    memset(class_of, 0, 256);
    c.sizes[0] = 256;
    for (int32_t i = 0; i < m->n_states && c.n < 256; i++) {
        const di_auto_byte *edges = m->bytes + m->states[i].bytes;
        int32_t n = m->states[i + 1].bytes - m->states[i].bytes;
        for (int32_t from = 0, to; from < n; from = to) {
            to = from + 1;
            while (to < n && edges[to].to == edges[from].to)
                to++;
            split_edges(&c, edges + from, to - from);
        }
    }
    for (int32_t byte = 255; byte >= 0; byte--)
        byte_of[class_of[byte]] = (uint8_t)byte;
    return c.n;
}
