/* Configurations (pda.h, pda_internal.h): steps worked out, and interned.
 *
 * A configuration keeps the states that read, each over its set of stacks, and whether the text may end here. A step
 * takes the edges that read the byte, then closes in two phases. First states that accept give the frames on top of
 * their stacks back and reading goes on where those say, until nothing new comes. Then calls are entered, in the order
 * of entries: as no entry has the empty text, no frame that was put on here comes off again before a byte is read, and
 * an entry is reached with all that calls it before its own calls are entered.
 *
 * A frame's count is in its place, so a counted repeat costs no states and the same time however high it counts. */
#include "nfa.h"

enum {
    REACHED_MAX = 65536, /* states, frames of one step */
    STEP_WORK = 16,      /* what a step takes however little it looks at */
    EDGES_WORK = 8,      /* edges of bytes that take as long as a frame */
    SORT_SMALL = 24,
    WHOLE_SET = -2 /* di_pda_entering.frame.back */
};

/* ---- making and ending ---- */

static bool make_scratch(di_pda_private *p) {
    int32_t slots_cap = 0, entering_cap = 0, left_cap = 0;
    int64_t n_words = DI_CEIL_DIV((int64_t)p->m.n_entries, 64);
    if (!di_pda_reserve(p, &p->slot_of, &slots_cap, DI_MAX(p->m.n_states, 1), sizeof *p->slot_of, false) ||
        !di_pda_reserve(p, &p->entering_of, &entering_cap, p->m.n_entries, sizeof *p->entering_of, false) ||
        !di_pda_reserve(p, &p->entries_left, &left_cap, n_words, sizeof *p->entries_left, false))
        return false;
    memset(p->slot_of, 0xFF, (size_t)slots_cap * sizeof *p->slot_of);
    memset(p->entering_of, 0xFF, (size_t)entering_cap * sizeof *p->entering_of);
    memset(p->entries_left, 0, (size_t)left_cap * sizeof *p->entries_left);
    return true;
}

di_status di_pda_init(di_pda *p, di_gram *g, di_error *err) {
    *p = (di_pda){0};
    if (di_gram_status(g, err))
        return g->failed;
    di_pda_private *q = calloc(1, sizeof *q);
    if (!q)
        return di_fail(err, DI_ERR_MEMORY, "the automaton of a grammar");
    di_nfa a = {.g = g};
    di_nfa_make(&a);
    if (!di_gram_has_failed(g))
        di_nfa_settle(&a);
    if (!di_gram_has_failed(g))
        di_nfa_close(&a, &q->m);
    di_nfa_deinit(&a);
    q->limit = g->limits.memory_bytes;
    q->work_left = INT64_MAX;
    q->start = DI_PDA_UNKNOWN;
    if (!di_gram_has_failed(g) && !make_scratch(q))
        di_gram_fail(g, DI_ERR_MEMORY, "the automaton of a grammar of %d states", q->m.n_states);
    p->private = q;
    if (di_gram_has_failed(g)) {
        if (err)
            *err = g->error;
        di_pda_deinit(p);
        return g->failed;
    }
    p->n_classes = di_nfa_classes(&q->m, p->class_of, q->byte_of);
    return DI_OK;
}

void di_pda_flush(di_pda *p) {
    di_pda_private *q = p->private;
    free(p->next);
    free(q->frames);
    free(q->sets);
    free(q->set_table);
    free(q->unions);
    free(q->items);
    free(q->keys);
    free(q->key_table);
    p->next = NULL;
    q->frames = NULL;
    q->sets = NULL;
    q->set_table = NULL;
    q->unions = NULL;
    q->items = NULL;
    q->keys = NULL;
    q->key_table = NULL;
    q->n_frames = q->frames_cap = q->n_sets = q->sets_cap = q->set_table_cap = q->n_unions = q->unions_cap = 0;
    q->n_items = q->items_cap = q->keys_cap = q->key_table_cap = q->next_cap = 0;
    q->learned_bytes = 0;
    q->start = DI_PDA_UNKNOWN;
    p->n_configs = 0;
    p->generation++;
}

void di_pda_allow(di_pda *p, int64_t work) {
    p->private->work_left = work;
    p->private->is_slow = false;
}

bool di_pda_is_slow(const di_pda *p) {
    return p->private->is_slow;
}

void di_pda_deinit(di_pda *p) {
    di_pda_private *q = p->private;
    if (q) {
        di_pda_flush(p);
        di_automaton_deinit(&q->m);
        free(q->reached);
        free(q->slot_of);
        free(q->is_waiting);
        free(q->waiting);
        free(q->entering);
        free(q->entering_of);
        free(q->entries_left);
        free(q->gathered);
        free(q->merged);
        free(q->merges);
        free(q);
    }
    *p = (di_pda){0};
}

size_t di_pda_bytes(const di_pda *p) {
    const di_pda_private *q = p->private;
    return q ? sizeof *q + q->m.n_bytes + q->scratch_bytes + q->learned_bytes : 0;
}

/* ---- the first phase: what is reached, and what accepts ---- */

static bool enter(di_pda_private *p, int32_t entry, di_pda_frame frame) {
    if (p->n_entering == REACHED_MAX || !di_pda_has_time(p) ||
        !di_pda_reserve(p, &p->entering, &p->entering_cap, (int64_t)p->n_entering + 1, sizeof *p->entering, false))
        return false;
    if (p->entering_of[entry] < 0)
        p->entries_left[entry >> 6] |= (uint64_t)1 << (entry & 63);
    p->entering[p->n_entering] = (di_pda_entering){frame, p->entering_of[entry]};
    p->entering_of[entry] = p->n_entering++;
    return true;
}

static bool wait_for(di_pda_private *p, int32_t index) {
    if (!di_pda_reserve(p, &p->waiting, &p->waiting_cap, (int64_t)p->n_waiting + 1, sizeof *p->waiting, false))
        return false;
    p->is_waiting[index] = true;
    p->waiting[p->n_waiting++] = index;
    return true;
}

/* A state over a set of stacks; `waits`: it may accept. */
static bool reach(di_pda_private *p, int32_t state, int32_t stacks, bool waits) {
    stacks = di_pda_set_behind(p, state, stacks);
    if (stacks < 0 || !di_pda_has_time(p))
        return false;
    int32_t index = p->slot_of[state];
    if (index >= 0) {
        int32_t both = di_pda_set_join(p, p->reached[index].stacks, stacks);
        if (both < 0)
            return false;
        if (both == p->reached[index].stacks)
            return true;
        p->reached[index].stacks = both;
        return p->is_waiting[index] || wait_for(p, index);
    }
    int64_t n = (int64_t)p->n_reached + 1;
    if (n > REACHED_MAX || !di_pda_reserve(p, &p->reached, &p->reached_cap, n, sizeof *p->reached, false) ||
        !di_pda_reserve(p, &p->is_waiting, &p->is_waiting_cap, n, sizeof *p->is_waiting, false))
        return false;
    index = p->n_reached++;
    p->reached[index] = (di_pda_item){state, stacks};
    p->is_waiting[index] = false;
    p->slot_of[state] = index;
    return !waits || wait_for(p, index);
}

/* Reading goes on where a frame says, once a text of what was called is read. */
static bool give_back(di_pda_private *p, di_pda_frame frame) {
    const di_automaton *m = &p->m;
    p->n_work++;
    if (frame.back < 0) {
        p->accepts = true;
        return true;
    }
    if (frame.back < m->n_states)
        return reach(p, frame.back, frame.below, true);
    const di_auto_site *site = &m->sites[frame.back - m->n_states];
    int32_t count = frame.count;
    if (count >= site->min && !reach(p, site->to, frame.below, true))
        return false;
    if (count == site->max)
        return true;
    if (site->max >= 0 || count < site->min)
        frame.count++;
    return enter(p, site->entry, frame);
}

static bool accept_waiting(di_pda_private *p) {
    const di_automaton *m = &p->m;
    while (p->n_waiting > 0) {
        int32_t index = p->waiting[--p->n_waiting];
        p->is_waiting[index] = false;
        di_pda_item at = p->reached[index];
        for (int32_t i = m->states[at.state].empties; i < m->states[at.state + 1].empties; i++) {
            if (!reach(p, m->empties[i], at.stacks, true))
                return false;
        }
        if (!(m->flags[at.state] & DI_STATE_ACCEPTS))
            continue;
        for (int32_t i = 0; i < p->sets[at.stacks].n; i++) {
            if (!give_back(p, p->frames[p->sets[at.stacks].first + i]))
                return false;
        }
    }
    return true;
}

/* ---- the second phase: calls ---- */

static bool enter_calls(di_pda_private *p, di_pda_item at) {
    const di_automaton *m = &p->m;
    for (int32_t i = m->states[at.state].calls; i < m->states[at.state + 1].calls; i++) {
        const di_auto_call *call = &m->calls[i];
        di_pda_frame frame = {WHOLE_SET, 0, at.stacks};
        if (call->back >= 0) {
            frame.back = call->back;
            frame.count = call->back >= m->n_states;
            if (!frame.count)
                frame.below = di_pda_set_behind(p, call->back, at.stacks);
            if (frame.below < 0)
                return false;
        }
        if (!enter(p, call->entry, frame))
            return false;
    }
    return true;
}

static int compare_frames(const void *x, const void *y) {
    const di_pda_frame *a = x, *b = y;
    if (a->back != b->back)
        return a->back < b->back ? -1 : 1;
    if (a->count != b->count)
        return a->count < b->count ? -1 : 1;
    return (a->below > b->below) - (a->below < b->below);
}

static void sort_frames(di_pda_frame *frames, int32_t n) {
    if (n > SORT_SMALL) {
        qsort(frames, (size_t)n, sizeof *frames, compare_frames);
        return;
    }
    for (int32_t i = 1; i < n; i++) {
        di_pda_frame frame = frames[i];
        int32_t k = i;
        for (; k > 0 && compare_frames(&frame, &frames[k - 1]) < 0; k--)
            frames[k] = frames[k - 1];
        frames[k] = frame;
    }
}

/* The set of the frames gathered[n] in any order; DI_PDA_FULL. */
static int32_t intern_gathered(di_pda_private *p, int32_t n) {
    sort_frames(p->gathered, n);
    int32_t n_frames = 1;
    for (int32_t i = 1; i < n; i++) {
        di_pda_frame *last = &p->gathered[n_frames - 1], frame = p->gathered[i];
        if (frame.back != last->back || frame.count != last->count) {
            p->gathered[n_frames++] = frame;
            continue;
        }
        int32_t below = di_pda_set_join(p, last->below, frame.below);
        if (below < 0)
            return below;
        last->below = below;
    }
    return di_pda_set_intern(p, p->gathered, n_frames);
}

/* The stacks that an entry is called with; DI_PDA_FULL. */
static int32_t gather(di_pda_private *p, int32_t entry) {
    int32_t n = 0, stacks = -1;
    for (int32_t i = p->entering_of[entry]; i >= 0; i = p->entering[i].next) {
        di_pda_frame frame = p->entering[i].frame;
        p->n_work++;
        if (frame.back == WHOLE_SET) {
            stacks = stacks < 0 ? frame.below : di_pda_set_join(p, stacks, frame.below);
            if (stacks < 0)
                return stacks;
            continue;
        }
        if (!di_pda_reserve(p, &p->gathered, &p->gathered_cap, (int64_t)n + 1, sizeof *p->gathered, false))
            return DI_PDA_FULL;
        p->gathered[n++] = frame;
    }
    if (n == 0)
        return stacks;
    int32_t set = intern_gathered(p, n);
    return stacks < 0 || set < 0 ? set : di_pda_set_join(p, stacks, set);
}

static bool enter_all(di_pda_private *p) {
    for (int32_t i = 0, n = p->n_reached; i < n; i++) {
        if (!enter_calls(p, p->reached[i]))
            return false;
    }
    for (int32_t word = 0; word < DI_CEIL_DIV(p->m.n_entries, 64); word++) {
        while (p->entries_left[word]) {
            int32_t entry = 64 * word + __builtin_ctzll(p->entries_left[word]);
            int32_t stacks = gather(p, entry);
            if (stacks < 0)
                return false;
            p->entering_of[entry] = -1;
            p->entries_left[word] &= p->entries_left[word] - 1;
            if (!reach(p, p->m.entries[entry], stacks, false) || !enter_calls(p, p->reached[p->n_reached - 1]))
                return false;
        }
    }
    return true;
}

/* ---- configurations ---- */

static int compare_items(const void *x, const void *y) {
    const di_pda_item *a = x, *b = y;
    return (a->state > b->state) - (a->state < b->state);
}

static void sort_items(di_pda_item *items, int32_t n) {
    if (n > SORT_SMALL) {
        qsort(items, (size_t)n, sizeof *items, compare_items);
        return;
    }
    for (int32_t i = 1; i < n; i++) {
        di_pda_item item = items[i];
        int32_t k = i;
        for (; k > 0 && items[k - 1].state > item.state; k--)
            items[k] = items[k - 1];
        items[k] = item;
    }
}

static di_pda_config intern(di_pda *p, const di_pda_item *items, int32_t n, bool accepts) {
    di_pda_private *q = p->private;
    uint64_t h = (uint64_t)n << 1 | accepts;
    for (int32_t i = 0; i < n; i++) {
        h = (h ^ ((uint64_t)(uint32_t)items[i].state << 32 | (uint32_t)items[i].stacks)) * 0x9E3779B97F4A7C15u;
        h ^= h >> 31;
    }
    uint32_t hash = (uint32_t)(h ^ (h >> 32)), at = 0;
    if (q->key_table_cap > 0) {
        uint32_t mask = (uint32_t)(q->key_table_cap - 1);
        for (at = hash & mask; q->key_table[at] >= 0; at = (at + 1) & mask) {
            const di_pda_key *key = &q->keys[q->key_table[at]];
            if (key->hash == hash && key->n == n && key->accepts == accepts &&
                memcmp(q->items + key->first, items, (size_t)n * sizeof *items) == 0)
                return q->key_table[at];
        }
    }
    if (2 * (int64_t)(p->n_configs + 1) > q->key_table_cap) {
        if (!di_pda_ids_grow(q, &q->key_table, &q->key_table_cap, q->keys, sizeof *q->keys, offsetof(di_pda_key, hash),
                             p->n_configs))
            return DI_PDA_FULL;
        at = di_pda_ids_place(q->key_table, q->key_table_cap, hash);
    }
    int64_t n_configs = (int64_t)p->n_configs + 1;
    if (!di_pda_reserve(q, &q->keys, &q->keys_cap, n_configs, sizeof *q->keys, true) ||
        !di_pda_reserve(q, &q->items, &q->items_cap, (int64_t)q->n_items + n, sizeof *q->items, true) ||
        !di_pda_reserve(q, &p->next, &q->next_cap, n_configs, (size_t)p->n_classes * sizeof *p->next, true))
        return DI_PDA_FULL;
    di_pda_config *row = p->next + (size_t)p->n_configs * (size_t)p->n_classes;
    for (int32_t i = 0; i < p->n_classes; i++)
        row[i] = DI_PDA_UNKNOWN;
    if (n > 0)
        memcpy(q->items + q->n_items, items, (size_t)n * sizeof *items);
    q->keys[p->n_configs] = (di_pda_key){q->n_items, n, hash, accepts};
    q->n_items += n;
    q->key_table[at] = p->n_configs;
    return p->n_configs++;
}

/* Closes what was reached and gives its configuration; whatever comes, nothing of it stays in the scratch. */
static di_pda_config close_reached(di_pda *p, bool is_fine) {
    di_pda_private *q = p->private;
    is_fine = is_fine && di_pda_has_time(q) && accept_waiting(q) && enter_all(q);
    q->work_left -= q->n_work + q->n_reached + STEP_WORK;
    int32_t n = 0;
    for (int32_t i = 0; i < q->n_reached; i++) {
        di_pda_item item = q->reached[i];
        q->slot_of[item.state] = -1;
        if (q->m.flags[item.state] & DI_STATE_READS)
            q->reached[n++] = item;
    }
    di_pda_config config = DI_PDA_FULL;
    if (is_fine && n == 0 && !q->accepts) {
        config = DI_PDA_DEAD;
    } else if (is_fine) {
        sort_items(q->reached, n);
        config = intern(p, q->reached, n, q->accepts);
    } else {
        for (int32_t word = 0; word < DI_CEIL_DIV(q->m.n_entries, 64); word++) {
            for (; q->entries_left[word]; q->entries_left[word] &= q->entries_left[word] - 1)
                q->entering_of[64 * word + __builtin_ctzll(q->entries_left[word])] = -1;
        }
    }
    q->n_reached = q->n_waiting = q->n_entering = 0;
    q->n_work = 0;
    q->accepts = false;
    return config;
}

di_pda_config di_pda_start(di_pda *p) {
    di_pda_private *q = p->private;
    if (q->start >= 0)
        return q->start;
    if (q->n_sets == 0 && di_pda_set_intern(q, &(di_pda_frame){-1, 0, -1}, 1) < 0)
        return DI_PDA_FULL;
    q->accepts = q->m.accepts_empty;
    bool is_fine = q->m.root < 0 || enter(q, q->m.root, (di_pda_frame){WHOLE_SET, 0, DI_STACK_BOTTOM});
    di_pda_config config = close_reached(p, is_fine);
    if (config >= 0)
        q->start = config;
    return config;
}

/* Takes from `same` the bytes that an edge treats otherwise than a byte: the edge reads that one if is_inside. */
static inline void keep_same(uint64_t same[4], const di_auto_byte *edge, bool is_inside) {
    int32_t first = edge->low >> 6, last = edge->high >> 6;
    uint64_t from = UINT64_MAX << (edge->low & 63), to = UINT64_MAX >> (63 - (edge->high & 63));
    if (is_inside) {
        for (int32_t i = 0; i < 4; i++)
            same[i] = i < first || i > last ? 0 : same[i];
        same[first] &= from;
        same[last] &= to;
    } else if (first == last) {
        same[first] &= ~(from & to);
    } else {
        same[first] &= ~from;
        for (int32_t i = first + 1; i < last; i++)
            same[i] = 0;
        same[last] &= ~to;
    }
}

/* What one byte does, all others do that the same edges read: mostly few things happen in a configuration, of which a
 * dead end is the most frequent one. */
di_pda_config di_pda_step_slow(di_pda *p, di_pda_config c, int32_t byte_class) {
    di_pda_private *q = p->private;
    const di_automaton *m = &q->m;
    uint8_t byte = q->byte_of[byte_class];
    uint64_t same[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    bool is_fine = true;
    for (int32_t i = 0; i < q->keys[c].n && is_fine; i++) {
        di_pda_item item = q->items[q->keys[c].first + i];
        q->n_work += (m->states[item.state + 1].bytes - m->states[item.state].bytes) / EDGES_WORK;
        for (int32_t k = m->states[item.state].bytes; k < m->states[item.state + 1].bytes && is_fine; k++) {
            bool is_inside = byte >= m->bytes[k].low && byte <= m->bytes[k].high;
            keep_same(same, &m->bytes[k], is_inside);
            if (is_inside)
                is_fine = reach(q, m->bytes[k].to, item.stacks, true);
        }
    }
    di_pda_config to = close_reached(p, is_fine);
    if (to == DI_PDA_FULL)
        return to;
    di_pda_config *row = p->next + (size_t)c * (size_t)p->n_classes;
    for (int32_t i = 0; i < 4; i++) {
        for (uint64_t bits = same[i]; bits; bits &= bits - 1)
            row[p->class_of[64 * i + __builtin_ctzll(bits)]] = to;
    }
    return to;
}

/* Whether one of the bytes [n] is in an edge of a state (any), or some byte is that isn't one of them (!any). */
static bool reads_some(const di_automaton *m, int32_t state, const uint8_t *bytes, int32_t n, bool any) {
    for (int32_t i = m->states[state].bytes; i < m->states[state + 1].bytes; i++) {
        int32_t n_in = 0;
        for (int32_t k = 0; k < n; k++)
            n_in += bytes[k] >= m->bytes[i].low && bytes[k] <= m->bytes[i].high;
        if (any ? n_in > 0 : n_in <= m->bytes[i].high - m->bytes[i].low)
            return true;
    }
    return false;
}

/* A run: c reads the bytes by one item alone, the start of a counted part, which reads nothing else, and `to`, where
 * that leads, has all the other items of c and the next count. As what follows the part doesn't depend on the count,
 * each further byte changes nothing else, until the count is at its end. */
int32_t di_pda_run(di_pda *p, di_pda_config c, const uint8_t *bytes, int32_t n) {
    const di_pda_private *q = p->private;
    const di_automaton *m = &q->m;
    di_pda_config to = di_pda_step(p, c, bytes[0]);
    for (int32_t i = 1; i < n && to >= 0; i++) {
        di_pda_config other = di_pda_step(p, c, bytes[i]);
        to = other == to || other == DI_PDA_FULL ? other : DI_PDA_DEAD;
    }
    if (to < 0)
        return to == DI_PDA_FULL ? to : 0;
    const di_pda_key *a = &q->keys[c], *b = &q->keys[to];
    int32_t run = 0;
    if (a->n != b->n || a->accepts != b->accepts)
        return 0;
    for (int32_t i = 0; i < a->n; i++) {
        di_pda_item x = q->items[a->first + i], y = q->items[b->first + i];
        if (x.state != y.state || reads_some(m, x.state, bytes, n, x.stacks == y.stacks))
            return 0;
        if (x.stacks == y.stacks)
            continue;
        const di_pda_set *set = &q->sets[x.stacks], *next = &q->sets[y.stacks];
        const di_pda_frame *f = &q->frames[set->first], *g = &q->frames[next->first];
        if (run > 0 || set->n != 1 || next->n != 1 || f->back < m->n_states || g->back != f->back ||
            g->below != f->below || g->count != f->count + 1)
            return 0;
        const di_auto_site *site = &m->sites[f->back - m->n_states];
        if (f->count < site->min || site->max < 0)
            return 0;
        run = site->max - f->count + 1;
    }
    return run;
}

bool di_pda_accepts(di_pda *p, di_pda_config c) {
    return p->private->keys[c].accepts;
}

int32_t di_pda_n_specials(const di_pda *p) {
    return p->private->m.n_specials;
}

const char *di_pda_special(const di_pda *p, int32_t special, size_t *len) {
    const di_automaton *m = &p->private->m;
    *len = (size_t)(m->special_at[special + 1] - m->special_at[special]);
    return m->special_text + m->special_at[special];
}

di_pda_config di_pda_step_special(di_pda *p, di_pda_config c, int32_t special) {
    di_pda_private *q = p->private;
    const di_automaton *m = &q->m;
    bool is_fine = true;
    for (int32_t i = 0; i < q->keys[c].n && is_fine; i++) {
        di_pda_item item = q->items[q->keys[c].first + i];
        for (int32_t k = m->states[item.state].specials; k < m->states[item.state + 1].specials && is_fine; k++) {
            if (m->specials[k].special == special)
                is_fine = reach(q, m->specials[k].to, item.stacks, true);
        }
    }
    return close_reached(p, is_fine);
}
