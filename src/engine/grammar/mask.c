/* Token masks: which tokens may follow in a configuration, and the masks that are kept.
 *
 * Five ways to find one, the first that fits:
 *   narrow   few nodes lie below the first bytes that may come: the trie is walked
 *   slice    each character of a slice leads to one configuration, and so on from there (a chain, which may end or run
 *            into itself): the mask of whole tokens by the chain's length, and for each k the rests behind k characters
 *            walked from the chain's k-th configuration
 *   except   most characters leave the configuration as it is: all tokens of characters of a string, and a walk only
 *            where others come
 *   beside   most first bytes lead to another configuration whose mask is known or has one of the ways above: both are
 *            walked side by side, only where they differ; where they meet, what follows is the same
 *   walk     the whole trie
 *
 * Every one gives exactly the tokens whose bytes the automaton takes. A walk that runs out of memory says so, and the
 * caller flushes the grammar and asks again. All functions run under the grammar's lock. */
#include "grammar_internal.h"

enum {
    SLICE_NODES = 512,    /* nodes that may come, from which on it is worth to look for a slice, */
    BESIDE_NODES = 16384, /* or to find another mask first; */
    SMALL_SHARE = 8,      /* fewer in a small vocabulary: this part of all */
    REST_SHARE = 4,       /* of the nodes that may come: what a slice may leave */
    JUMP_NODES = 24,      /* below a node, from which on it is worth to see whether they need a walk */
    BESIDE_DEPTH = 3,     /* masks that are found for the sake of one */
    MASKS_SHARE = 4,      /* of the memory that a grammar may learn: what masks take at most */
    CACHES_MAX = 4,       /* vocabularies that a grammar has masks for */
    SLOTS_MIN = 64
};

typedef enum outcome { FOUND, NOT_SO, FULL } outcome;

/* What the search for one mask works with. */
typedef struct search {
    di_grammar *g;
    di_mask_cache *cache;
    const di_grammar_vocab *v;
    uint32_t *mask;
    /* What is in the mask: whole tokens of a slice, and the ids in cache->ids, of which the first ids_max are listed.
     */
    int32_t slice, chars, n_ids;
    bool is_mixed;         /* by walk_beside: of other things */
    di_pda_config to[256]; /* by class of the first byte, where the mask is being made */
} search;

/* ---- where the characters of a slice lead ---- */

static const struct {
    uint8_t first, last;
} lead_ranges[DI_LEADS] = {{0xC2, 0xDF}, {0xE0, 0xE0}, {0xE1, 0xEC}, {0xED, 0xED},
                           {0xEE, 0xEF}, {0xF0, 0xF0}, {0xF1, 0xF3}, {0xF4, 0xF4}},
  tail_ranges[DI_TAILS] = {{0x80, 0xBF}, {0xA0, 0xBF}, {0x80, 0x9F}, {0x90, 0xBF}, {0x80, 0x8F}};

/* Second bytes behind a first one (of tail_ranges), and bytes from there to the end of the character. */
static const uint8_t lead_tail[DI_LEADS] = {0, 1, 0, 2, 0, 3, 0, 4}, lead_left[DI_LEADS] = {1, 2, 2, 2, 2, 3, 3, 3};

static void byte_set_add(di_byte_set *set, const di_pda *p, int byte) {
    for (int i = 0; i < set->n; i++)
        if (p->class_of[set->bytes[i]] == p->class_of[byte])
            return;
    set->bytes[set->n++] = (uint8_t)byte;
}

void di_mask_tables_init(di_mask_tables *tables, const di_pda *p) {
    *tables = (di_mask_tables){0};
    for (int byte = 0; byte < 256; byte++)
        tables->byte_of[p->class_of[byte]] = (uint8_t)byte;
    for (int s = 0; s < DI_SLICE_COUNT; s++)
        for (int byte = 0; byte < 0x80; byte++)
            if (di_slice_has((di_slice_kind)s, (uint32_t)byte))
                byte_set_add(&tables->ascii[s], p, byte);
    for (int i = 0; i < DI_LEADS; i++)
        for (int byte = lead_ranges[i].first; byte <= lead_ranges[i].last; byte++)
            byte_set_add(&tables->leads[i], p, byte);
    for (int i = 0; i < DI_TAILS; i++)
        for (int byte = tail_ranges[i].first; byte <= tail_ranges[i].last; byte++)
            byte_set_add(&tables->tails[i], p, byte);
}

/* Whether each of the bytes, with `left` - 1 more continuation bytes, leads from c to `to`. */
static outcome all_lead_to(di_grammar *g, di_pda_config c, const di_byte_set *bytes, int left, di_pda_config to) {
    for (int i = 0; i < bytes->n; i++) {
        di_pda_config next = di_pda_step(&g->pda, c, bytes->bytes[i]);
        if (next == DI_PDA_FULL)
            return FULL;
        if (next == DI_PDA_DEAD || left == 1) {
            if (next != to)
                return NOT_SO;
            continue;
        }
        outcome rest = all_lead_to(g, next, &g->tables.tails[0], left - 1, to);
        if (rest != FOUND)
            return rest;
    }
    return FOUND;
}

/* Whether all characters beyond ASCII lead from c to `to`. */
static outcome all_wide_lead_to(di_grammar *g, di_pda_config c, di_pda_config to) {
    outcome found = FOUND;
    for (int i = 0; i < DI_LEADS && found == FOUND; i++) {
        for (int k = 0; k < g->tables.leads[i].n && found == FOUND; k++) {
            di_pda_config next = di_pda_step(&g->pda, c, g->tables.leads[i].bytes[k]);
            if (next == DI_PDA_FULL)
                found = FULL;
            else if (next == DI_PDA_DEAD)
                found = to == DI_PDA_DEAD ? FOUND : NOT_SO;
            else
                found = all_lead_to(g, next, &g->tables.tails[lead_tail[i]], lead_left[i], to);
        }
    }
    return found;
}

/* Looks where the characters of a slice lead from c. */
static di_pda_config look_after(di_grammar *g, di_pda_config c, di_slice_kind kind) {
    const di_byte_set *ascii = &g->tables.ascii[kind];
    di_pda_config to = di_pda_step(&g->pda, c, ascii->bytes[0]);
    if (to == DI_PDA_FULL)
        return to;
    outcome found = all_lead_to(g, c, ascii, 1, to);
    if (found == FOUND && di_slice_is_wide(kind))
        found = all_wide_lead_to(g, c, to);
    return found == FOUND ? to : found == FULL ? DI_PDA_FULL : DI_NOT_UNIFORM;
}

static bool reserve_infos(di_grammar *g, di_pda_config c) {
    if (c < g->n_infos)
        return true;
    int32_t n = DI_MAX(DI_MAX(2 * g->n_infos, c + 1), SLOTS_MIN);
    di_config_info *grown = realloc(g->infos, (size_t)n * sizeof *grown);
    if (!grown)
        return false;
    for (int32_t i = g->n_infos; i < n; i++)
        for (int s = 0; s < DI_SLICE_COUNT; s++)
            grown[i].after[s] = DI_PDA_UNKNOWN;
    for (int32_t i = g->n_infos; i < n; i++)
        grown[i].spaces = -1;
    g->infos = grown;
    g->n_infos = n;
    return true;
}

/* The same, remembered. */
static di_pda_config after(di_grammar *g, di_pda_config c, di_slice_kind kind) {
    if (!reserve_infos(g, c))
        return DI_PDA_FULL;
    di_pda_config to = g->infos[c].after[kind];
    if (to == DI_PDA_UNKNOWN) {
        to = look_after(g, c, kind);
        if (to != DI_PDA_FULL)
            g->infos[c].after[kind] = to;
    }
    return to;
}

/* ---- white space ----
 *
 * White space between the tokens of JSON is bounded, so that every character of it leads to another configuration, all
 * of which do the same but for what is left of the bound. A walk stays in the first of them and counts. */

static bool is_space(uint8_t byte) {
    return byte <= ' ' && (((uint64_t)1 << ' ' | 1u << '\n' | 1u << '\t' | 1u << '\r') >> byte & 1);
}

/* How many characters of white space c takes in such a row; 0: it isn't of the kind. DI_PDA_FULL. */
static int32_t spaces(di_grammar *g, di_pda_config c) {
    static const uint8_t all[] = {' ', '\n', '\t', '\r'};
    if (!reserve_infos(g, c))
        return DI_PDA_FULL;
    if (g->infos[c].spaces < 0) {
        int32_t n = di_pda_run(&g->pda, c, all, DI_COUNT(all));
        if (n < 0)
            return n;
        g->infos[c].spaces = n;
    }
    return g->infos[c].spaces;
}

/* ---- walks ---- */

static inline void add(search *s, int32_t token) {
    di_mask_set(s->mask, token);
    if (s->n_ids < s->cache->ids_max)
        s->cache->ids[s->n_ids] = token;
    s->n_ids++;
}

/* Whether c takes any characters of a wide slice and stays as it is; then which. DI_SLICE_COUNT: no. */
static outcome find_loop(di_grammar *g, di_pda_config c, di_slice_kind *kind) {
    static const di_slice_kind wide[] = {DI_SLICE_STRING, DI_SLICE_TEXT};
    /* One character tells most apart before all are looked at. */
    di_pda_config one = di_pda_step(&g->pda, c, ' ');
    if (one == c)
        one = di_pda_step(&g->pda, c, 'e');
    if (one != c)
        return one == DI_PDA_FULL ? FULL : NOT_SO;
    for (size_t i = 0; i < DI_COUNT(wide); i++) {
        di_pda_config to = after(g, c, wide[i]);
        if (to == DI_PDA_FULL)
            return FULL;
        if (to == c) {
            *kind = wide[i];
            return FOUND;
        }
    }
    return NOT_SO;
}

/* Adds the tokens of a node of the vocabulary's trie and below, where c, behind the node, a boundary, is a loop of a
 * slice: what is clean from there on is taken as it is, what is not, byte by byte. */
static bool jump(search *s, const di_trie_node *node, di_pda_config c, di_slice_kind kind) {
    const di_grammar_vocab *v = s->v;
    const uint16_t *clean = v->slices[kind].clean_from;
    uint32_t from = node->depth + 1u;
    for (uint32_t k = node->tokens, end = v->trie.nodes[node->end].tokens; k < end; k++) {
        int32_t token = v->trie.tokens[k];
        if (clean[k] > from) {
            di_pda_config to = c;
            for (uint32_t at = v->starts[token] + from; at < v->starts[token + 1] && to >= 0; at++)
                to = di_pda_step(&s->g->pda, to, (uint8_t)v->bytes[at]);
            if (to == DI_PDA_FULL)
                return false;
            if (to == DI_PDA_DEAD)
                continue;
        }
        add(s, token);
    }
    return true;
}

/* Where a byte leads at a depth of the walk, whose stack it takes further. */
static inline di_pda_config step_at(search *s, uint32_t depth, uint8_t byte) {
    di_pda_config *stack = s->cache->stack, to = stack[depth];
    int32_t *n_spaces = s->cache->spaces, run = is_space(byte) ? spaces(s->g, to) : 0;
    if (run == 0) {
        to = di_pda_step(&s->g->pda, to, byte);
        n_spaces[depth + 1] = 0;
    } else if (run < 0) {
        to = DI_PDA_FULL;
    } else {
        to = n_spaces[depth] < run ? to : DI_PDA_DEAD;
        n_spaces[depth + 1] = n_spaces[depth] + 1;
    }
    return stack[depth + 1] = to;
}

/* Takes all that lies below a node of the vocabulary's trie at once, where that can be. */
static outcome jump_from(search *s, const di_trie_node *node, uint32_t n_nodes, di_pda_config c) {
    di_slice_kind kind;
    if (n_nodes <= JUMP_NODES || !node->is_boundary)
        return NOT_SO;
    outcome found = find_loop(s->g, c, &kind);
    return found == FOUND && !jump(s, node, c, kind) ? FULL : found;
}

/* Adds the tokens of the nodes from .. end - 1, which are whole subtrees of one depth, that are taken from the
 * configuration at that depth of the stack. */
static bool walk(search *s, const di_trie *t, uint32_t from, uint32_t end) {
    const di_trie_node *nodes = t->nodes;
    bool can_jump = t == &s->v->trie;
    for (uint32_t i = from; i < end;) {
        const di_trie_node *node = &nodes[i];
        di_pda_config to = step_at(s, node->depth, node->byte);
        if (to < 0) {
            if (to == DI_PDA_FULL)
                return false;
            i = node->end;
            continue;
        }
        if (can_jump) {
            outcome found = jump_from(s, node, node->end - i, to);
            if (found == FULL)
                return false;
            if (found == FOUND) {
                i = node->end;
                continue;
            }
        }
        for (uint32_t k = node->tokens; k < nodes[i + 1].tokens; k++)
            add(s, t->tokens[k]);
        i++;
    }
    return true;
}

static bool walk_group(search *s, const di_trie *t, int group, di_pda_config c) {
    s->cache->stack[0] = c;
    s->cache->spaces[0] = 0;
    return walk(s, t, t->first[group], t->first[group + 1]);
}

/* The same for n records of the vocabulary's trie, which are of one depth. Goes down no deeper than there are records.
 */
static bool walk_records(search *s, const di_trie_root *roots, int32_t n, uint32_t depth) {
    const di_trie *t = &s->v->trie;
    for (int32_t i = 0; i < n; i++) {
        const di_trie_root *root = &roots[i];
        di_pda_config to = step_at(s, depth, root->byte);
        if (to == DI_PDA_FULL)
            return false;
        if (to < 0)
            continue;
        const di_trie_node *node = &t->nodes[root->first];
        outcome found = jump_from(s, node, root->end - root->first, to);
        if (found == FULL)
            return false;
        if (found == FOUND)
            continue;
        for (uint32_t k = node[0].tokens; k < node[1].tokens; k++)
            add(s, t->tokens[k]);
        if (root->n_kids > 0 ? !walk_records(s, s->v->roots + root->kids, root->n_kids, depth + 1)
                             : !walk(s, t, root->first + 1, root->end))
            return false;
    }
    return true;
}

/* The same for the whole of the vocabulary's trie from c, without first bytes of a slice; DI_SLICE_COUNT: with all. */
static bool walk_roots(search *s, di_pda_config c, di_slice_kind without) {
    s->cache->stack[0] = c;
    s->cache->spaces[0] = 0;
    for (int32_t i = 0; i < s->v->n_roots; i++) {
        const di_trie_root *root = &s->v->roots[i];
        if (s->to[s->g->pda.class_of[root->byte]] >= 0 && !di_slice_has(without, root->byte) &&
            !walk_records(s, root, 1, 0))
            return false;
    }
    return true;
}

/* The nodes from .. end - 1, as in walk, of a mask of what `beside` leads along to one of what the stack does. */
static bool walk_differences(search *s, uint32_t from, uint32_t end) {
    di_pda *p = &s->g->pda;
    di_pda_config *stack = s->cache->stack, *beside = stack + s->v->length_max + 2;
    const di_trie *t = &s->v->trie;
    for (uint32_t i = from; i < end;) {
        const di_trie_node *node = &t->nodes[i];
        di_pda_config known = beside[node->depth], to = di_pda_step(p, stack[node->depth], node->byte),
                      other = known >= 0 ? di_pda_step(p, known, node->byte) : DI_PDA_DEAD;
        if (to == DI_PDA_FULL || other == DI_PDA_FULL)
            return false;
        uint32_t next = to == other || to < 0 ? node->end : i + 1;
        if (to != other && to < 0)
            for (uint32_t k = node->tokens; k < t->nodes[next].tokens; k++)
                di_mask_clear(s->mask, t->tokens[k]);
        else if (to != other)
            for (uint32_t k = node->tokens; k < t->nodes[next].tokens; k++)
                di_mask_set(s->mask, t->tokens[k]);
        stack[node->depth + 1] = to;
        beside[node->depth + 1] = other;
        i = next;
    }
    return true;
}

/* Turns the mask of `known` into that of c. */
static bool walk_beside(search *s, di_pda_config c, di_pda_config known) {
    s->cache->stack[0] = c;
    s->cache->stack[s->v->length_max + 2] = known;
    s->is_mixed = true;
    for (int32_t i = 0; i < s->v->n_roots; i++) {
        const di_trie_root *root = &s->v->roots[i];
        di_pda_config to = di_pda_step(&s->g->pda, c, root->byte);
        if (to == DI_PDA_FULL ||
            (to != di_pda_step(&s->g->pda, known, root->byte) && !walk_differences(s, root->first, root->end)))
            return false;
    }
    return true;
}

/* ---- ways to a mask ---- */

/* Begins a mask: empty, or with whole tokens of a slice. */
static void begin(search *s, int slice, int chars) {
    size_t n_words = s->v->n_words;
    s->slice = slice;
    s->chars = chars;
    s->n_ids = 0;
    s->is_mixed = false;
    if (slice < 0)
        memset(s->mask, 0, n_words * sizeof *s->mask);
    else
        memcpy(s->mask, s->v->slices[slice].whole + (size_t)chars * n_words, n_words * sizeof *s->mask);
}

static outcome by_slice(search *s, di_slice_kind kind, di_pda_config c) {
    di_pda_config chain[DI_SLICE_CHARS + 1] = {c};
    int n = 0; /* characters that the chain has */
    bool is_loop = false;
    while (n < DI_SLICE_CHARS && !is_loop) {
        di_pda_config to = after(s->g, chain[n], kind);
        if (to == DI_PDA_FULL)
            return FULL;
        if (to == DI_NOT_UNIFORM || (to == DI_PDA_DEAD && n == 0))
            return NOT_SO;
        if (to == DI_PDA_DEAD)
            break;
        is_loop = to == chain[n];
        chain[++n] = to;
    }
    const di_slice *slice = &s->v->slices[kind];
    bool is_one = is_loop && n == 1; /* c is the whole chain: any number of characters */
    int n_groups = is_loop ? DI_SLICE_CHARS : n;
    begin(s, (int)kind, is_one ? DI_SLICE_CHARS : n_groups - 1);
    if (!di_slice_is_wide(kind) && !walk_roots(s, c, kind))
        return FULL;
    if (is_one)
        return walk_group(s, &slice->merged, 0, c) ? FOUND : FULL;
    for (int k = 0; k <= n_groups; k++)
        if (!walk_group(s, &slice->by_count, k, chain[DI_MIN(k, n)]))
            return FULL;
    return FOUND;
}

/* For a c that most characters leave as it is: all tokens of characters that a string holds, and a walk where others
 * come, or where one does not lead to c. */
static outcome by_exceptions(search *s, di_pda_config c) {
    di_pda *p = &s->g->pda;
    di_pda_config *stack = s->cache->stack;
    const di_trie *t = &s->v->trie;
    uint64_t exceptions = DI_ODD_BIT;
    outcome found = all_wide_lead_to(s->g, c, c);
    for (int byte = 0; byte < 0x80 && found == FOUND; byte++) {
        di_pda_config to = di_pda_step(p, c, (uint8_t)byte);
        if (to == DI_PDA_FULL)
            found = FULL;
        else if (to != c)
            exceptions |= di_byte_bit((uint8_t)byte);
    }
    if (found != FOUND)
        return found;
    begin(s, DI_SLICE_STRING, DI_SLICE_CHARS);
    s->is_mixed = true;
    stack[0] = c;
    uint32_t others_end = 0; /* nodes up to here are behind a character that the slice has not */
    for (uint32_t i = 0; i < t->n_nodes;) {
        const di_trie_node *node = &t->nodes[i];
        di_pda_config to = di_pda_step(p, stack[node->depth], node->byte);
        if (to == DI_PDA_FULL)
            return FULL;
        bool is_same = to == c && node->is_boundary && !(s->v->below[i] & exceptions);
        if (node->byte < 0x80 && !di_slice_has(DI_SLICE_STRING, node->byte))
            others_end = DI_MAX(others_end, node->end);
        uint32_t next = to < 0 || is_same ? node->end : i + 1;
        if (to < 0)
            for (uint32_t k = node->tokens; k < t->nodes[next].tokens; k++)
                di_mask_clear(s->mask, t->tokens[k]);
        else if (!is_same || i < others_end) /* else they are there */
            for (uint32_t k = node->tokens; k < t->nodes[next].tokens; k++)
                di_mask_set(s->mask, t->tokens[k]);
        stack[node->depth + 1] = to;
        i = next;
    }
    return FOUND;
}

/* A third of the tokens begin with a space, which many places take of which few take more: takes the nodes that c,
 * which is behind one, doesn't from *n. Gives c or DI_PDA_FULL. */
static di_pda_config weigh_space(search *s, di_pda_config c, uint32_t *n) {
    for (int32_t class = 0; class < s->g->pda.n_classes; class ++) {
        uint32_t below = s->cache->space_weight[class];
        di_pda_config to = below > 0 ? di_pda_step(&s->g->pda, c, s->g->tables.byte_of[class]) : c;
        if (to == DI_PDA_FULL)
            return to;
        if (to == DI_PDA_DEAD)
            *n -= below;
    }
    return c;
}

/* Steps along first bytes; counts the nodes of the trie below those that c takes, and looks where most of them lead: to
 * *most, if FOUND. */
static outcome step_roots(search *s, di_pda_config c, uint32_t *n_alive, di_pda_config *most) {
    enum { KINDS = 16 };
    struct {
        di_pda_config to;
        uint32_t n;
    } kinds[KINDS];
    int n_kinds = 0;
    uint32_t best = 0;
    *n_alive = 0;
    *most = c;
    for (int32_t class = 0; class < s->g->pda.n_classes; class ++) {
        uint32_t n = s->cache->weight[class];
        di_pda_config to = n > 0 ? di_pda_step(&s->g->pda, c, s->g->tables.byte_of[class]) : DI_PDA_DEAD;
        s->to[class] = to;
        if (to >= 0 && class == s->g->pda.class_of[' '])
            to = weigh_space(s, to, &n);
        if (to < 0) {
            if (to == DI_PDA_FULL)
                return FULL;
            continue;
        }
        *n_alive += n;
        int k = 0;
        while (k < n_kinds && kinds[k].to != to)
            k++;
        if (k == KINDS)
            continue;
        if (k == n_kinds) {
            kinds[k].to = to;
            kinds[n_kinds++].n = 0;
        }
        kinds[k].n += n;
        if (kinds[k].n > best) {
            best = kinds[k].n;
            *most = to;
        }
    }
    return best > *n_alive / 2 ? FOUND : NOT_SO;
}

/* ---- kept masks ---- */

static di_mask_entry *entry_of(const di_mask_cache *cache, di_pda_config c) {
    int32_t slot = c < cache->n_slots ? cache->slot_of[c] : -1;
    return slot >= 0 ? &cache->entries[slot] : NULL;
}

static size_t entry_bytes(const di_mask_entry *e, size_t n_words) {
    return e->n_ids >= 0 ? (size_t)e->n_ids * sizeof(int32_t) : n_words * sizeof(uint32_t);
}

static void unlink_entry(di_mask_cache *cache, const di_mask_entry *e) {
    if (e->newer >= 0)
        cache->entries[e->newer].older = e->older;
    else
        cache->newest = e->older;
    if (e->older >= 0)
        cache->entries[e->older].newer = e->newer;
    else
        cache->oldest = e->newer;
}

static void link_newest(di_mask_cache *cache, int32_t slot) {
    di_mask_entry *e = &cache->entries[slot];
    e->newer = -1;
    e->older = cache->newest;
    if (cache->newest >= 0)
        cache->entries[cache->newest].newer = slot;
    else
        cache->oldest = slot;
    cache->newest = slot;
}

static void drop_oldest(di_mask_cache *cache) {
    int32_t slot = cache->oldest;
    di_mask_entry *e = &cache->entries[slot];
    unlink_entry(cache, e);
    cache->slot_of[e->config] = -1;
    cache->bytes -= entry_bytes(e, cache->n_words);
    free(e->data);
    e->data = NULL;
    e->newer = cache->free;
    cache->free = slot;
}

static bool reserve_slots(di_mask_cache *cache, di_pda_config c) {
    if (c < cache->n_slots)
        return true;
    int32_t n = DI_MAX(DI_MAX(2 * cache->n_slots, c + 1), SLOTS_MIN);
    int32_t *grown = realloc(cache->slot_of, (size_t)n * sizeof *grown);
    if (!grown)
        return false;
    for (int32_t i = cache->n_slots; i < n; i++)
        grown[i] = -1;
    cache->bytes += (size_t)(n - cache->n_slots) * sizeof *grown;
    cache->slot_of = grown;
    cache->n_slots = n;
    return true;
}

/* A slot that is not linked; -1 when there is no memory. */
static int32_t take_slot(di_mask_cache *cache) {
    if (cache->free >= 0) {
        int32_t slot = cache->free;
        cache->free = cache->entries[slot].newer;
        return slot;
    }
    if (cache->n_entries == cache->entries_cap) {
        int32_t cap = DI_MAX(2 * cache->entries_cap, SLOTS_MIN);
        di_mask_entry *grown = realloc(cache->entries, (size_t)cap * sizeof *grown);
        if (!grown)
            return -1;
        cache->bytes += (size_t)(cap - cache->entries_cap) * sizeof *grown;
        cache->entries = grown;
        cache->entries_cap = cap;
    }
    return cache->n_entries++;
}

/* Keeps a mask. Without memory for it it is found again another time, so that nobody need know. */
static void keep(const search *s, di_pda_config c, int32_t n_set, int32_t only) {
    di_mask_cache *cache = s->cache;
    di_mask_entry made = {.config = c, .n_set = n_set, .only = only, .n_ids = -1, .slice = -1};
    if (!s->is_mixed && s->n_ids <= cache->ids_max) {
        made.n_ids = s->n_ids;
        made.slice = (int16_t)s->slice;
        made.chars = (int16_t)s->chars;
    }
    size_t n_bytes = entry_bytes(&made, s->v->n_words);
    if (!reserve_slots(cache, c) || !(made.data = malloc(n_bytes + 1)))
        return;
    int32_t slot = take_slot(cache);
    if (slot < 0) {
        free(made.data);
        return;
    }
    memcpy(made.data, made.n_ids >= 0 ? (const void *)cache->ids : s->mask, n_bytes);
    cache->entries[slot] = made;
    cache->slot_of[c] = slot;
    cache->bytes += n_bytes;
    link_newest(cache, slot);
    if (di_mask_caches_bytes(s->g) > s->g->memory_bytes / MASKS_SHARE)
        di_mask_caches_shrink(s->g, s->g->memory_bytes / MASKS_SHARE);
}

static void use(search *s, di_mask_entry *e) {
    if (e->n_ids >= 0) {
        const int32_t *ids = e->data;
        begin(s, e->slice, e->chars);
        for (int32_t i = 0; i < e->n_ids; i++)
            di_mask_set(s->mask, ids[i]);
    } else {
        memcpy(s->mask, e->data, s->v->n_words * sizeof *s->mask);
    }
    if (e->newer >= 0) {
        int32_t slot = (int32_t)(e - s->cache->entries);
        unlink_entry(s->cache, e);
        link_newest(s->cache, slot);
    }
}

/* ---- finding ---- */

static outcome find_texts(search *s, di_pda_config c, int depth);

/* Tokens without bytes of the text: those that the grammar names, and the end mark. */
static outcome add_marks(search *s, di_pda_config c) {
    int32_t n_specials = di_pda_n_specials(&s->g->pda);
    for (int32_t i = 0; i < n_specials; i++) {
        int32_t token = s->cache->special_tokens[i];
        di_pda_config to = token >= 0 ? di_pda_step_special(&s->g->pda, c, i) : DI_PDA_DEAD;
        if (to == DI_PDA_FULL)
            return FULL;
        if (to != DI_PDA_DEAD)
            add(s, token);
    }
    if (di_pda_accepts(&s->g->pda, c))
        add(s, s->v->eos_id);
    return FOUND;
}

static void clear_marks(const search *s) {
    for (int32_t i = 0; i < di_pda_n_specials(&s->g->pda); i++)
        if (s->cache->special_tokens[i] >= 0)
            di_mask_clear(s->mask, s->cache->special_tokens[i]);
    di_mask_clear(s->mask, s->v->eos_id);
}

/* Tokens of the mask as they are, and the one if it is one. */
static int32_t count_words(const search *s, int32_t *only) {
    int32_t n = 0, last = -1;
    for (size_t i = 0; i < s->v->n_words; i++) {
        if (s->mask[i] != 0) {
            n += __builtin_popcount(s->mask[i]);
            last = (int32_t)(32 * i) + 31 - __builtin_clz(s->mask[i]);
        }
    }
    *only = n == 1 ? last : -1;
    return n;
}

static outcome find(search *s, di_pda_config c, int depth, int32_t *n_set, int32_t *only) {
    di_mask_entry *e = entry_of(s->cache, c);
    if (e) {
        use(s, e);
        *n_set = e->n_set;
        *only = e->only;
        return FOUND;
    }
    outcome found = find_texts(s, c, depth);
    if (found == FOUND)
        found = add_marks(s, c);
    if (found != FOUND)
        return found;
    *n_set = s->n_ids + (s->slice >= 0 ? s->v->slices[s->slice].n_whole[s->chars] : 0);
    if (s->is_mixed || (*n_set == 1 && s->n_ids == 0))
        *n_set = count_words(s, only);
    else
        *only = *n_set == 1 ? s->cache->ids[0] : -1;
    keep(s, c, *n_set, *only);
    return FOUND;
}

/* The tokens that c takes by their bytes. */
static outcome find_texts(search *s, di_pda_config c, int depth) {
    uint32_t n_alive;
    di_pda_config most;
    outcome has_most = step_roots(s, c, &n_alive, &most);
    if (has_most == FULL)
        return FULL;
    uint32_t small = s->v->trie.n_nodes / SMALL_SHARE;
    if (n_alive > DI_MIN(SLICE_NODES, small)) {
        /* A slice must leave little to be walked; a wide one leaves next to nothing. */
        for (int k = 0; k < DI_SLICE_COUNT; k++) {
            if (n_alive - DI_MIN(s->v->slices[k].root_nodes, n_alive) > n_alive / REST_SHARE &&
                !di_slice_is_wide((di_slice_kind)k))
                continue;
            outcome found = by_slice(s, (di_slice_kind)k, c);
            if (found != NOT_SO)
                return found;
        }
        if (n_alive > DI_MIN(BESIDE_NODES, small) && has_most == FOUND && most == c) {
            outcome found = by_exceptions(s, c);
            if (found != NOT_SO)
                return found;
        }
        if (n_alive > DI_MIN(BESIDE_NODES, small) && has_most == FOUND && most != c && depth < BESIDE_DEPTH) {
            int32_t n_set, only;
            outcome found = find(s, most, depth + 1, &n_set, &only);
            clear_marks(s);
            return found != FOUND ? found : walk_beside(s, c, most) ? FOUND : FULL;
        }
    }
    begin(s, -1, 0);
    return walk_roots(s, c, DI_SLICE_COUNT) ? FOUND : FULL;
}

bool di_mask_find(di_grammar *g, di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c, uint32_t *mask,
                  int32_t *n_set, int32_t *only) {
    search s = {.g = g, .cache = cache, .v = v, .mask = mask};
    return find(&s, c, 0, n_set, only) == FOUND;
}

bool di_mask_is_open(di_grammar *g, const di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c) {
    const di_mask_entry *e = entry_of(cache, c);
    if (e)
        return e->n_set > 1;
    int n = di_pda_accepts(&g->pda, c);
    for (int32_t i = 0; i < v->n_roots && n < 2; i++) {
        const di_trie_node *node = &v->trie.nodes[v->roots[i].first];
        if (node[0].tokens < node[1].tokens) {
            di_pda_config to = di_pda_step(&g->pda, c, node->byte);
            if (to == DI_PDA_FULL)
                return false;
            n += to >= 0;
        }
    }
    return n > 1;
}

di_pda_config di_mask_step(di_grammar *g, const di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c,
                           int32_t token) {
    if (di_mask_has(v->is_added, token)) {
        for (int32_t i = 0; i < di_pda_n_specials(&g->pda); i++)
            if (cache->special_tokens[i] == token)
                return di_pda_step_special(&g->pda, c, i);
        return DI_PDA_DEAD;
    }
    uint32_t at = v->starts[token], end = v->starts[token + 1];
    if (at == end)
        return DI_PDA_DEAD;
    for (; at < end && c >= 0; at++)
        c = di_pda_step(&g->pda, c, (uint8_t)v->bytes[at]);
    return c;
}

/* ---- caches ---- */

static void cache_destroy(di_mask_cache *cache) {
    if (!cache)
        return;
    while (cache->oldest >= 0)
        drop_oldest(cache);
    free(cache->entries);
    free(cache->slot_of);
    free(cache->special_tokens);
    free(cache->stack);
    free(cache->spaces);
    free(cache->ids);
    free(cache);
}

static int32_t find_added(const di_grammar_vocab *v, const char *spelling, size_t len) {
    for (int32_t t = 0; t < v->n_vocab; t++) {
        uint32_t n = v->starts[t + 1] - v->starts[t];
        if (di_mask_has(v->is_added, t) && t != v->eos_id && n == len &&
            memcmp(v->bytes + v->starts[t], spelling, len) == 0)
            return t;
    }
    return -1;
}

static di_mask_cache *cache_create(di_grammar *g, const di_grammar_vocab *v) {
    int32_t n_specials = di_pda_n_specials(&g->pda);
    di_mask_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return NULL;
    cache->vocab_key = v->key;
    cache->n_words = v->n_words;
    cache->newest = cache->oldest = cache->free = -1;
    cache->special_tokens = calloc((size_t)n_specials + 1, sizeof *cache->special_tokens);
    cache->stack = calloc(2 * ((size_t)v->length_max + 2), sizeof *cache->stack);
    cache->spaces = calloc((size_t)v->length_max + 2, sizeof *cache->spaces);
    cache->ids_max = (int32_t)(v->n_words / 2) + 1;
    cache->ids = calloc((size_t)cache->ids_max, sizeof *cache->ids);
    if (!cache->special_tokens || !cache->stack || !cache->spaces || !cache->ids) {
        cache_destroy(cache);
        return NULL;
    }
    cache->bytes = sizeof *cache + ((size_t)n_specials + 1) * sizeof *cache->special_tokens +
                   2 * ((size_t)v->length_max + 2) * sizeof *cache->stack +
                   ((size_t)v->length_max + 2) * sizeof *cache->spaces + (size_t)cache->ids_max * sizeof *cache->ids;
    for (int32_t i = 0; i < v->n_roots; i++)
        cache->weight[g->pda.class_of[v->roots[i].byte]] += v->roots[i].end - v->roots[i].first;
    for (int32_t i = 0; i < v->n_roots; i++)
        for (uint32_t k = v->roots[i].first + 1; v->roots[i].byte == ' ' && k < v->roots[i].end;
             k = v->trie.nodes[k].end)
            cache->space_weight[g->pda.class_of[v->trie.nodes[k].byte]] += v->trie.nodes[k].end - k;
    for (int32_t i = 0; i < n_specials; i++) {
        size_t len;
        const char *spelling = di_pda_special(&g->pda, i, &len);
        cache->special_tokens[i] = find_added(v, spelling, len);
    }
    return cache;
}

di_status di_mask_cache_get(di_mask_cache **out, di_grammar *g, const di_grammar_vocab *v, di_error *err) {
    di_mask_cache **at = &g->caches;
    int n = 0;
    while (*at && (*at)->vocab_key != v->key) {
        /* A grammar may outlive vocabularies, and who made them doesn't tell: the one used longest ago goes. */
        if (++n == CACHES_MAX) {
            cache_destroy(*at);
            *at = NULL;
            break;
        }
        at = &(*at)->next;
    }
    di_mask_cache *cache = *at;
    if (cache)
        *at = cache->next;
    else if (!(cache = cache_create(g, v)))
        return di_fail(err, DI_ERR_MEMORY, "out of memory for the masks of a grammar");
    cache->next = g->caches;
    g->caches = cache;
    *out = cache;
    return DI_OK;
}

void di_mask_caches_destroy(di_grammar *g) {
    while (g->caches) {
        di_mask_cache *next = g->caches->next;
        cache_destroy(g->caches);
        g->caches = next;
    }
}

size_t di_mask_caches_bytes(const di_grammar *g) {
    size_t n = 0;
    for (const di_mask_cache *c = g->caches; c; c = c->next)
        n += c->bytes;
    return n;
}

void di_mask_caches_shrink(di_grammar *g, size_t bytes) {
    /* Behind the caches in use come those whose vocabularies may be gone: these are emptied first. */
    di_mask_cache *by_use[CACHES_MAX];
    int n = 0;
    for (di_mask_cache *c = g->caches; c; c = c->next)
        by_use[n++] = c;
    while (n > 0 && di_mask_caches_bytes(g) > bytes) {
        if (by_use[n - 1]->oldest >= 0)
            drop_oldest(by_use[n - 1]);
        else
            n--;
    }
}

void di_mask_forget(di_grammar *g) {
    for (di_mask_cache *c = g->caches; c; c = c->next) {
        while (c->oldest >= 0)
            drop_oldest(c);
        c->bytes -= (size_t)c->n_slots * sizeof *c->slot_of + (size_t)c->entries_cap * sizeof *c->entries;
        free(c->slot_of);
        free(c->entries);
        c->slot_of = NULL;
        c->entries = NULL;
        c->n_slots = c->n_entries = c->entries_cap = 0;
        c->free = -1;
    }
    free(g->infos);
    g->infos = NULL;
    g->n_infos = 0;
}
