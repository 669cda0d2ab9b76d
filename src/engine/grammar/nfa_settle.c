/* What nets can read, and left recursion (nfa.h).
 *
 * First, which nets have the empty text and which have others, by spreading from starts along edges and from ends to
 * callers. A call of a net with the empty text gets an empty edge beside it and means the other texts from then on; a
 * call of a net without other texts goes away, and so does every edge to a state from which no end can be reached.
 *
 * Then starts lose their empty edges, which shows what each net calls before it reads anything; where that leads back
 * to the net, it is turned into reading on behind its end (see below). */
#include "nfa.h"

typedef struct settler {
    di_nfa *a;
    uint8_t *reached; /* owned [n_states]: DI_NET_* of the ways from the start of the net */
    int32_t *stack;   /* owned [2 n_states]: states whose edges are to be followed */
    int32_t n_stack;
} settler;

/* ---- what nets read ---- */

/* `bits` beyond an edge. */
static uint8_t cross(const di_nfa *a, const di_nfa_edge *edge, uint8_t bits) {
    uint8_t reads = DI_NET_TEXT;
    bool is_skipped = false;
    switch ((di_nfa_edge_kind)edge->kind) {
    case DI_EDGE_NONE:
        return 0;
    case DI_EDGE_EMPTY:
        return bits;
    case DI_EDGE_BYTE:
    case DI_EDGE_SPECIAL:
        return DI_NET_TEXT;
    case DI_EDGE_CALL:
        reads = a->nets[edge->arg].reads;
        break;
    case DI_EDGE_COUNT:
        reads = a->nets[a->counts[edge->arg].net].reads;
        is_skipped = a->counts[edge->arg].min == 0;
        break;
    }
    uint8_t beyond = reads & DI_NET_TEXT;
    return (is_skipped || reads & DI_NET_EMPTY) ? beyond | bits : beyond;
}

static void reach(settler *s, int32_t state, uint8_t bits) {
    if (bits & ~s->reached[state]) {
        s->reached[state] |= bits;
        s->stack[s->n_stack++] = state;
    }
}

static void learn_reads(settler *s) {
    di_nfa *a = s->a;
    for (int32_t i = 0; i < a->n_nets; i++)
        reach(s, a->nets[i].start, DI_NET_EMPTY);
    while (s->n_stack > 0 && !di_gram_status(a->g, NULL)) {
        int32_t state = s->stack[--s->n_stack], end_of = a->states[state].end_of;
        uint8_t bits = s->reached[state];
        for (int32_t e = a->states[state].first; e >= 0; e = a->edges[e].next)
            reach(s, a->edges[e].to, cross(a, &a->edges[e], bits));
        if (end_of < 0 || !(bits & ~a->nets[end_of].reads))
            continue;
        a->nets[end_of].reads |= bits;
        for (int32_t c = a->nets[end_of].callers; c >= 0; c = a->calls[c].next) {
            const di_nfa_edge *edge = &a->edges[a->calls[c].edge];
            if (s->reached[a->calls[c].from])
                reach(s, edge->to, cross(a, edge, s->reached[a->calls[c].from]));
        }
    }
}

/* Calls mean texts that aren't empty from here on. */
static void part_calls(di_nfa *a) {
    for (int32_t c = 0; c < a->n_calls && !di_gram_status(a->g, NULL); c++) {
        di_nfa_edge *edge = &a->edges[a->calls[c].edge];
        int32_t to = edge->to, net = edge->arg;
        bool is_skipped = false;
        if (edge->kind == DI_EDGE_COUNT) {
            di_nfa_count *count = &a->counts[edge->arg];
            net = count->net;
            if (a->nets[net].reads & DI_NET_EMPTY)
                count->min = 0;
            is_skipped = count->min == 0;
        }
        if (!(a->nets[net].reads & DI_NET_TEXT))
            edge->kind = DI_EDGE_NONE;
        if (is_skipped || a->nets[net].reads & DI_NET_EMPTY)
            di_nfa_empty(a, a->calls[c].from, to);
    }
}

/* Takes the edges away that lead to no end. */
static void prune(settler *s) {
    di_nfa *a = s->a;
    int32_t *firsts = di_nfa_scratch(a, (int64_t)a->n_states + 1, sizeof *firsts);
    int32_t *sources = di_nfa_scratch(a, a->n_edges, sizeof *sources);
    bool *is_live = di_nfa_scratch(a, a->n_states, sizeof *is_live);
    if (!firsts || !sources || !is_live)
        goto out;
    for (int32_t e = 0; e < a->n_edges; e++)
        firsts[a->edges[e].to] += a->edges[e].kind != DI_EDGE_NONE;
    for (int32_t i = 0; i < a->n_states; i++)
        firsts[i + 1] += firsts[i];
    for (int32_t i = 0; i < a->n_states; i++) {
        for (int32_t e = a->states[i].first; e >= 0; e = a->edges[e].next) {
            if (a->edges[e].kind != DI_EDGE_NONE)
                sources[--firsts[a->edges[e].to]] = i;
        }
    }
    s->n_stack = 0;
    for (int32_t i = 0; i < a->n_nets; i++) {
        is_live[a->nets[i].end] = true;
        s->stack[s->n_stack++] = a->nets[i].end;
    }
    while (s->n_stack > 0) {
        int32_t state = s->stack[--s->n_stack];
        for (int32_t i = firsts[state]; i < firsts[state + 1]; i++) {
            if (!is_live[sources[i]]) {
                is_live[sources[i]] = true;
                s->stack[s->n_stack++] = sources[i];
            }
        }
    }
    for (int32_t i = 0; i < a->n_states; i++) {
        int32_t *link = &a->states[i].first;
        while (*link >= 0) {
            const di_nfa_edge *edge = &a->edges[*link];
            if (edge->kind == DI_EDGE_NONE || !is_live[edge->to])
                *link = edge->next;
            else
                link = &a->edges[*link].next;
        }
    }
out:
    free(firsts);
    free(sources);
    free(is_live);
}

/* ---- empty edges of starts ---- */

typedef struct walk {
    int32_t *marks; /* owned [n_states]: number of the last walk that came here */
    int32_t *stack; /* owned [n_states] */
    int32_t n_states, mark;
} walk;

/* Copies the edges other than empty ones of all states that empty edges reach from `from` to the state `to`, which has
 * none. Gives whether an end is among those states. */
static bool copy_reach(di_nfa *a, walk *w, int32_t from, int32_t to) {
    int32_t n = 0;
    bool is_end = false;
    w->mark++;
    w->marks[from] = w->mark;
    w->stack[n++] = from;
    while (n > 0 && !di_gram_status(a->g, NULL)) {
        int32_t state = w->stack[--n];
        is_end |= a->states[state].end_of >= 0;
        for (int32_t e = a->states[state].first, next; e >= 0; e = next) {
            di_nfa_edge edge = a->edges[e];
            next = edge.next;
            if (edge.kind == DI_EDGE_NONE)
                continue;
            if (edge.kind != DI_EDGE_EMPTY) {
                di_nfa_edge_add(a, to, edge);
            } else if (w->marks[edge.to] != w->mark) {
                w->marks[edge.to] = w->mark;
                w->stack[n++] = edge.to;
            }
        }
    }
    return is_end;
}

static void open_start(di_nfa *a, walk *w, int32_t start) {
    bool is_plain = true;
    for (int32_t e = a->states[start].first; e >= 0 && is_plain; e = a->edges[e].next)
        is_plain = a->edges[e].kind != DI_EDGE_EMPTY && a->edges[e].kind != DI_EDGE_NONE;
    if (is_plain)
        return;
    int32_t state = di_nfa_state_add(a);
    copy_reach(a, w, start, state);
    /* No edge leads to the new state, which only holds the list. */
    a->states[start].first = a->states[state].first;
    a->states[state].first = -1;
}

/* ---- nets that begin with each other ---- */

typedef struct leftmost { /* of a net, for Tarjan's algorithm */
    int32_t index, low;
    int32_t edge;  /* to follow next */
    int32_t group; /* -1: not known yet */
} leftmost;

static int32_t callee(const di_nfa *a, const di_nfa_edge *edge) {
    return edge->kind == DI_EDGE_CALL ? edge->arg : edge->kind == DI_EDGE_COUNT ? a->counts[edge->arg].net : -1;
}

typedef struct grouping {
    leftmost *nets;              /* owned [n_nets] */
    int32_t *path, *open;        /* owned [n_nets]: nets being visited; those whose group isn't known */
    int32_t *members;            /* owned [n_nets]: by group, callees first */
    int32_t *groups;             /* owned [n_nets + 1]: the first of `members` */
    int32_t n_groups, n_members; /* groups[n_groups] is n_members */
} grouping;

static void visit(di_nfa *a, grouping *q, int32_t net, int32_t *n_index) {
    int32_t n_path = 0, n_open = 0;
    q->nets[net] = (leftmost){++*n_index, *n_index, a->states[a->nets[net].start].first, -1};
    q->path[n_path++] = q->open[n_open++] = net;
    while (n_path > 0 && !di_gram_status(a->g, NULL)) {
        int32_t at = q->path[n_path - 1];
        leftmost *l = &q->nets[at];
        if (l->edge >= 0) {
            int32_t to = callee(a, &a->edges[l->edge]);
            l->edge = a->edges[l->edge].next;
            if (to < 0)
                continue;
            if (q->nets[to].index == 0) {
                q->nets[to] = (leftmost){++*n_index, *n_index, a->states[a->nets[to].start].first, -1};
                q->path[n_path++] = q->open[n_open++] = to;
            } else if (q->nets[to].group < 0) {
                l->low = DI_MIN(l->low, q->nets[to].index);
            }
            continue;
        }
        n_path--;
        if (n_path > 0)
            q->nets[q->path[n_path - 1]].low = DI_MIN(q->nets[q->path[n_path - 1]].low, l->low);
        if (l->low != l->index)
            continue;
        int32_t member;
        do {
            member = q->open[--n_open];
            q->nets[member].group = q->n_groups;
            q->members[q->n_members++] = member;
        } while (member != at);
        q->groups[++q->n_groups] = q->n_members;
    }
}

/* ---- left recursion ----
 *
 * A net that calls itself, A = A x | b, is read as b x x ...: the call goes, and the end leads on to where the call
 * came back. Nets A, B, ... that call each other get a start that reads what any of them begins with and then climbs: a
 * state for each net B says "a text of B is read", and leads to that of C over the rest of C behind a leading call of
 * B, until the net that is wanted is read. A rest is called as a net of its own, a twin of the state at which it
 * begins, so that nothing is copied. */

/* A counted call that stands first and leads back to its net: the first time is a call, the others are counted. */
static void peel_counts(di_nfa *a, const grouping *q, int32_t net) {
    for (int32_t e = a->states[a->nets[net].start].first, next; e >= 0; e = next) {
        di_nfa_edge edge = a->edges[e];
        next = edge.next;
        if (edge.kind != DI_EDGE_COUNT || q->nets[callee(a, &edge)].group != q->nets[net].group)
            continue;
        di_nfa_count count = a->counts[edge.arg];
        int32_t once = di_nfa_state_add(a);
        a->edges[e].kind = DI_EDGE_CALL;
        a->edges[e].arg = count.net;
        a->edges[e].to = once;
        if (count.min <= 1)
            di_nfa_empty(a, once, edge.to);
        if (count.max == 1)
            continue;
        count.min = DI_MAX(count.min - 1, 0);
        count.max = count.max < 0 ? -1 : count.max - 1;
        edge.arg = di_nfa_count_add(a, count);
        di_nfa_edge_add(a, once, edge);
    }
}

/* A = A x | b: the end of A goes on with x. */
static void turn_around(di_nfa *a, int32_t net) {
    for (int32_t e = a->states[a->nets[net].start].first; e >= 0; e = a->edges[e].next) {
        if (a->edges[e].kind != DI_EDGE_CALL || a->edges[e].arg != net)
            continue;
        a->edges[e].kind = DI_EDGE_NONE;
        di_nfa_empty(a, a->nets[net].end, a->edges[e].to);
    }
}

typedef struct rest { /* of a net, from a state on */
    int32_t twin;     /* net; -1: only the empty text, or not known */
    bool is_known, is_end;
} rest;

typedef struct climber {
    di_nfa *a;
    walk *w;
    rest *rests;    /* owned [n_rests], by state */
    int32_t *climb; /* owned [n_nets]: the state that says that a text of the net is read */
    int32_t n_rests;
} climber;

static rest find_rest(climber *c, int32_t state) {
    di_nfa *a = c->a;
    rest *r = &c->rests[state];
    if (r->is_known)
        return *r;
    *r = (rest){.twin = -1, .is_known = true};
    int32_t start = di_nfa_state_add(a);
    r->is_end = copy_reach(a, c->w, state, start);
    if (a->states[start].first < 0 ||
        !di_nfa_reserve(a, &a->nets, &a->nets_cap, (int64_t)a->n_nets + 1, sizeof *a->nets))
        return *r;
    a->nets[a->n_nets] = (di_nfa_net){.start = start, .end = -1, .callers = -1, .reads = DI_NET_TEXT};
    r->twin = a->n_nets++;
    return *r;
}

/* Paths from `from` to `to` that read what is left of a net from `state` on. */
static void write_rest(climber *c, int32_t state, int32_t from, int32_t to) {
    rest r = find_rest(c, state);
    if (r.is_end)
        di_nfa_empty(c->a, from, to);
    if (r.twin >= 0)
        di_nfa_edge_add(c->a, from, (di_nfa_edge){.kind = DI_EDGE_CALL, .to = to, .arg = r.twin});
}

/* The new start of a net of a group, as a state that holds its edges. */
static int32_t climb_to(climber *c, const grouping *q, const int32_t *members, int32_t n, int32_t net) {
    di_nfa *a = c->a;
    int32_t start = di_nfa_state_add(a);
    for (int32_t i = 0; i < n; i++)
        c->climb[members[i]] = di_nfa_state_add(a);
    di_nfa_empty(a, c->climb[net], a->nets[net].end);
    for (int32_t i = 0; i < n; i++) {
        int32_t done = c->climb[members[i]];
        for (int32_t e = a->states[a->nets[members[i]].start].first, next; e >= 0; e = next) {
            di_nfa_edge edge = a->edges[e];
            next = edge.next;
            if (di_gram_status(a->g, NULL))
                return start;
            if (edge.kind == DI_EDGE_NONE)
                continue;
            int32_t rest_of = edge.to;
            if (edge.kind == DI_EDGE_CALL && q->nets[edge.arg].group == q->nets[net].group) {
                write_rest(c, rest_of, c->climb[edge.arg], done);
                continue;
            }
            edge.to = di_nfa_state_add(a);
            di_nfa_edge_add(a, start, edge);
            write_rest(c, rest_of, edge.to, done);
        }
    }
    return start;
}

static void untangle(climber *c, const grouping *q, const int32_t *members, int32_t n) {
    di_nfa *a = c->a;
    int32_t *starts = di_nfa_scratch(a, n, sizeof *starts);
    for (int32_t i = 0; starts && i < n; i++)
        starts[i] = climb_to(c, q, members, n, members[i]);
    for (int32_t i = 0; starts && i < n && !di_gram_has_failed(a->g); i++) {
        int32_t start = a->nets[members[i]].start;
        a->states[start].first = a->states[starts[i]].first;
        a->states[starts[i]].first = -1;
    }
    free(starts);
}

/* Walks may go through states made since; those have no empty edges that matter before they are closed, but marks
 * must cover them. */
static bool grow_walk(di_nfa *a, walk *w) {
    if (w->marks && a->n_states <= w->n_states)
        return true;
    int32_t *marks = di_nfa_scratch(a, a->n_states, sizeof *marks);
    int32_t *stack = di_nfa_scratch(a, a->n_states, sizeof *stack);
    if (!marks || !stack) {
        free(marks);
        free(stack);
        return false;
    }
    free(w->marks);
    free(w->stack);
    *w = (walk){.marks = marks, .stack = stack, .n_states = a->n_states};
    return true;
}

static bool is_recursive(const di_nfa *a, const grouping *q, int32_t group) {
    int32_t first = q->members[q->groups[group]];
    if (q->groups[group + 1] - q->groups[group] > 1)
        return true;
    for (int32_t e = a->states[a->nets[first].start].first; e >= 0; e = a->edges[e].next) {
        if (callee(a, &a->edges[e]) == first)
            return true;
    }
    return false;
}

/* Groups are worked on from callees to callers, but don't touch each other: a group changes only starts, ends and new
 * states of its own. */
static void remove_recursion(di_nfa *a, const grouping *q, walk *w) {
    climber c = {.a = a, .w = w};
    for (int32_t i = 0; i < q->n_groups && !di_gram_has_failed(a->g); i++) {
        if (!is_recursive(a, q, i))
            continue;
        const int32_t *members = q->members + q->groups[i];
        int32_t n = q->groups[i + 1] - q->groups[i];
        for (int32_t k = 0; k < n; k++)
            peel_counts(a, q, members[k]);
        if (n == 1) {
            turn_around(a, members[0]);
            continue;
        }
        if (!c.climb)
            c.climb = di_nfa_scratch(a, a->n_nets, sizeof *c.climb);
        free(c.rests);
        c.n_rests = a->n_states;
        c.rests = di_nfa_scratch(a, c.n_rests, sizeof *c.rests);
        if (!c.climb || !c.rests || !grow_walk(a, w))
            break;
        untangle(&c, q, members, n);
    }
    free(c.climb);
    free(c.rests);
}

static void group_nets(di_nfa *a, grouping *q) {
    q->nets = di_nfa_scratch(a, a->n_nets, sizeof *q->nets);
    q->path = di_nfa_scratch(a, a->n_nets, sizeof *q->path);
    q->open = di_nfa_scratch(a, a->n_nets, sizeof *q->open);
    q->members = di_nfa_scratch(a, a->n_nets, sizeof *q->members);
    q->groups = di_nfa_scratch(a, (int64_t)a->n_nets + 1, sizeof *q->groups);
    int32_t n_index = 0;
    for (int32_t i = 0; i < a->n_nets && !di_gram_has_failed(a->g); i++) {
        if (q->nets[i].index == 0)
            visit(a, q, i, &n_index);
    }
}

/* Twins first: only states behind a start call them. */
static void order_nets(di_nfa *a, const grouping *q) {
    a->order = di_nfa_scratch(a, a->n_nets, sizeof *a->order);
    if (!a->order)
        return;
    int32_t n = 0;
    for (int32_t i = q->n_members; i < a->n_nets; i++)
        a->order[n++] = i;
    for (int32_t i = q->n_members - 1; i >= 0; i--)
        a->order[n++] = q->members[i];
}

void di_nfa_settle(di_nfa *a) {
    settler s = {.a = a};
    walk w = {0};
    grouping q = {0};
    s.reached = di_nfa_scratch(a, a->n_states, sizeof *s.reached);
    s.stack = di_nfa_scratch(a, 2 * (int64_t)a->n_states, sizeof *s.stack);
    if (!s.reached || !s.stack)
        goto out;
    learn_reads(&s);
    if (!di_gram_has_failed(a->g) && !a->nets[0].reads)
        di_gram_fail(a->g, DI_ERR_REQUEST, "no text matches the grammar");
    part_calls(a);
    if (di_gram_has_failed(a->g))
        goto out;
    prune(&s);
    if (!grow_walk(a, &w))
        goto out;
    for (int32_t i = 0; i < a->n_nets && !di_gram_has_failed(a->g); i++)
        open_start(a, &w, a->nets[i].start);
    group_nets(a, &q);
    if (di_gram_has_failed(a->g))
        goto out;
    remove_recursion(a, &q, &w);
    order_nets(a, &q);
out:
    free(s.reached);
    free(s.stack);
    free(w.marks);
    free(w.stack);
    free(q.nets);
    free(q.path);
    free(q.open);
    free(q.members);
    free(q.groups);
}
