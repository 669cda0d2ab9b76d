/* Objects of a JSON schema: declared keys in their order, each at most once, then undeclared ones.
 *
 * One graph of linear size. Before key i there are two states: K(i), behind the opening brace or a comma, where one of
 * the keys from i on has to come, and B(i), behind a value, where a comma or the closing brace comes. A key that may be
 * left out is an empty edge from K(i) to K(i + 1):
 *
 *     { --> K(0) --key 0--> B(1) --,--> K(1) --key 1--> B(2) ...    K(n) --another key--> B(n)
 *             \______________________/^   (empty)                     B(i) --}--> end, where no key from i on is
 * required
 *
 * Where keys are counted there is a layer of such states for each count. Undeclared keys can't be told apart from each
 * other, so that for a minimum they count once. */
#include "schema_internal.h"

enum {
    STATES_MAX = 65536,  /* of one object */
    PATTERNS_MAX = 12,   /* patternProperties of one object */
    KEY_CLASSES_MAX = 64 /* sets of undeclared keys that match the same patterns */
};

/* One schema object's say on keys: which of its keywords looks at `key`. */
static bool record_atoms(di_schema *s, const di_json *schema, const char *key, size_t len, di_atoms *atoms) {
    const di_json *own = di_json_get(di_json_get(schema, "properties"), key);
    const di_json *patterns = di_json_get(schema, "patternProperties");
    const di_json *others = di_json_get(schema, "additionalProperties");
    bool is_known = own != NULL;
    if (own && atoms)
        di_atoms_add(s, atoms, own, false);
    for (void *it = patterns ? di_json_iter(patterns) : NULL; it; it = di_json_iter_next(patterns, it)) {
        size_t n = 0;
        const char *pattern = di_json_iter_key(it, &n);
        const di_regular *set = di_schema_pattern_set(s, schema, "patternProperties", pattern, n);
        if (!set || !di_regular_matches(set, key, len))
            continue;
        is_known = true;
        if (atoms)
            di_atoms_add(s, atoms, di_json_iter_value(it), false);
    }
    if (!is_known && others) {
        is_known = true;
        if (atoms)
            di_atoms_add(s, atoms, others, false);
    }
    return is_known;
}

void di_schema_key_atoms(di_schema *s, const di_fact *facts, const char *key, size_t len, di_atoms *atoms) {
    for (const di_fact *f = facts; f; f = f->next) {
        if (f->kind == DI_FACT_OBJECT) {
            record_atoms(s, f->schema, key, len, atoms);
        } else if (f->kind == DI_FACT_KEY_FAILS && f->len == len && memcmp(f->text, key, len) == 0) {
            di_atoms_add(s, atoms, f->value, true);
        } else if (f->kind == DI_FACT_OTHERS) {
            bool is_known = false;
            for (const di_fact *o = f->scope; o && !is_known; o = o->next)
                is_known = o->kind == DI_FACT_OBJECT && !o->is_negated && record_atoms(s, o->schema, key, len, NULL);
            if (!is_known)
                di_atoms_add(s, atoms, f->value, false);
        }
    }
}

bool di_schema_key_fits(di_schema *s, const di_fact *facts, const char *key, size_t len) {
    bool fits = true;
    for (const di_fact *f = facts; f && fits; f = f->next) {
        if (f->kind != DI_FACT_NAMES)
            continue;
        di_json *text = di_json_new_string(key, len);
        if (!text)
            di_gram_fail(s->g, DI_ERR_MEMORY, "a key of %zu bytes", len);
        fits = text && di_schema_holds(s, f->value, text);
        di_json_free(text);
    }
    return fits;
}

/* ---- the keys of an object ---- */

typedef struct key {
    const char *text;
    size_t len;
    bool is_required, is_declared, is_absent;
    const di_node *pair; /* NULL: doesn't come */
} key;

typedef struct keys {
    key *list; /* in the arena */
    size_t n, cap;
    di_map map; /* index by text */
} keys;

static key *find_key(di_schema *s, keys *all, const char *text, size_t len) {
    int64_t at = 0;
    if (di_map_get(&all->map, text, len, &at))
        return &all->list[at];
    if (all->n == all->cap) {
        size_t cap = DI_MAX(2 * all->cap, (size_t)16);
        key *grown = di_gram_alloc(s->g, cap * sizeof *grown);
        if (!grown)
            return NULL;
        if (all->n)
            memcpy(grown, all->list, all->n * sizeof *grown);
        all->list = grown;
        all->cap = cap;
    }
    if (di_map_set(&all->map, text, len, (int64_t)all->n, NULL, NULL)) {
        di_gram_fail(s->g, DI_ERR_MEMORY, "%zu keys of a schema", all->n);
        return NULL;
    }
    all->list[all->n] = (key){.text = text, .len = len};
    return &all->list[all->n++];
}

/* The facts about keys, in the order in which they were said. */
static const di_fact **key_facts(di_schema *s, const di_shape *shape, size_t *n) {
    *n = 0;
    for (const di_fact *f = shape->facts; f; f = f->next)
        ++*n;
    const di_fact **list = di_gram_alloc(s->g, DI_MAX(*n, (size_t)1) * sizeof *list);
    size_t i = *n;
    for (const di_fact *f = shape->facts; f && list; f = f->next)
        list[--i] = f;
    return list;
}

/* Declared keys first, then those that are only asked for. */
static void gather_keys(di_schema *s, const di_shape *shape, keys *all) {
    size_t n = 0;
    const di_fact **facts = key_facts(s, shape, &n);
    for (size_t i = 0; i < n && facts; i++) {
        const di_fact *f = facts[i];
        const di_json *properties = f->kind == DI_FACT_OBJECT ? di_json_get(f->schema, "properties") : NULL;
        for (void *it = properties ? di_json_iter(properties) : NULL; it; it = di_json_iter_next(properties, it)) {
            size_t len = 0;
            const char *text = di_json_iter_key(it, &len);
            key *k = find_key(s, all, text, len);
            if (!k)
                return;
            k->is_declared = true;
        }
    }
    for (size_t i = 0; i < n && facts; i++) {
        const di_fact *f = facts[i];
        if (f->kind != DI_FACT_KEY_REQUIRED && f->kind != DI_FACT_KEY_ABSENT && f->kind != DI_FACT_KEY_FAILS)
            continue;
        key *k = find_key(s, all, f->text, f->len);
        if (!k)
            return;
        k->is_declared |= f->kind == DI_FACT_KEY_REQUIRED;
        k->is_required |= f->kind != DI_FACT_KEY_ABSENT;
        k->is_absent |= f->kind == DI_FACT_KEY_ABSENT;
    }
}

/* key : value, with the white space behind it. */
static const di_node *pair_node(di_schema *s, const di_node *name, di_goal *goal) {
    di_gram *g = s->g;
    const di_node *value = di_schema_node(s, goal), *space = di_schema_space(s);
    if (value->kind == DI_NODE_NEVER)
        return NULL;
    const di_node *parts[] = {name, space, di_node_bytes(g, ":", 1), space, value, space};
    return di_node_seq(g, parts, DI_COUNT(parts));
}

/* ---- undeclared keys ---- */

/* Keys that match the same patterns. */
typedef struct key_class {
    const di_regular *set;
    uint32_t matched; /* bits of patterns */
} key_class;

typedef struct pattern {
    const di_json *schema; /* the record that has it */
    const char *text;
    size_t len;
    const di_json *value;
} pattern;

/* What records and unevaluatedProperties say of keys that match these patterns and are not declared. */
static di_goal *class_goal(di_schema *s, const di_shape *shape, const pattern *patterns, size_t n, uint32_t matched) {
    di_atoms atoms = {0};
    for (const di_fact *f = shape->facts; f; f = f->next) {
        bool is_known = false;
        const di_fact *scope = f->kind == DI_FACT_OBJECT ? f : f->kind == DI_FACT_OTHERS ? f->scope : NULL;
        for (const di_fact *o = scope; o; o = f->kind == DI_FACT_OBJECT ? NULL : o->next) {
            if (o->kind != DI_FACT_OBJECT || (f != o && o->is_negated))
                continue;
            bool is_matched = false;
            for (size_t i = 0; i < n; i++) {
                if (patterns[i].schema != o->schema || !(matched >> i & 1))
                    continue;
                is_matched = true;
                if (f == o)
                    di_atoms_add(s, &atoms, patterns[i].value, false);
            }
            const di_json *others = di_json_get(o->schema, "additionalProperties");
            if (f == o && !is_matched && others)
                di_atoms_add(s, &atoms, others, false);
            is_known |= is_matched || others;
        }
        if (f->kind == DI_FACT_OTHERS && !is_known)
            di_atoms_add(s, &atoms, f->value, false);
    }
    return di_schema_goal(s, &atoms);
}

/* The set of keys that propertyNames allows; NULL: all. */
static const di_node *names_node(di_schema *s, const di_shape *shape) {
    di_atoms atoms = {0};
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_NAMES)
            di_atoms_add(s, &atoms, f->value, false);
    }
    if (atoms.n == 0 && !atoms.is_never)
        return NULL;
    di_goal *goal = di_schema_goal(s, &atoms);
    return goal ? di_schema_texts(s, goal, NULL) : di_node_never();
}

static size_t gather_patterns(di_schema *s, const di_shape *shape, pattern *out) {
    size_t n = 0;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        const di_json *patterns = f->kind == DI_FACT_OBJECT ? di_json_get(f->schema, "patternProperties") : NULL;
        for (void *it = patterns ? di_json_iter(patterns) : NULL; it; it = di_json_iter_next(patterns, it)) {
            if (n == PATTERNS_MAX) {
                di_schema_fail(s, f->schema, "patternProperties", "are more than %d for one object", PATTERNS_MAX);
                return 0;
            }
            out[n] = (pattern){.schema = f->schema, .value = di_json_iter_value(it)};
            out[n].text = di_json_iter_key(it, &out[n].len);
            n++;
        }
    }
    return n;
}

static const di_node *quoted(di_schema *s, const di_node *texts) {
    const di_node *quote = di_node_bytes(s->g, "\"", 1);
    return di_node_seq(s->g, (const di_node *const[]){quote, di_schema_json_text(s, texts, true), quote}, 3);
}

/* Divides the keys of each class by whether they match a pattern. */
static size_t split_classes(di_schema *s, key_class *classes, size_t n, const pattern *p, size_t index) {
    const di_regular *set = di_schema_pattern_set(s, p->schema, "patternProperties", p->text, p->len);
    size_t n_before = n;
    for (size_t i = 0; i < n_before && !di_gram_has_failed(s->g); i++) {
        const di_regular *in = di_regular_intersect(s->g, classes[i].set, set);
        if (!in || di_regular_is_never(in))
            continue;
        const di_regular *out = di_regular_subtract(s->g, classes[i].set, set);
        uint32_t matched = classes[i].matched | 1U << index;
        if (!out || di_regular_is_never(out)) {
            classes[i].matched = matched;
        } else if (n == KEY_CLASSES_MAX) {
            di_schema_fail(s, p->schema, "patternProperties", "overlap in too many ways");
        } else {
            classes[i].set = out;
            classes[n++] = (key_class){in, matched};
        }
    }
    return n;
}

/* A key that isn't declared, with its value; NULL where there is none. */
static const di_node *others_node(di_schema *s, const di_shape *shape, const keys *declared) {
    di_gram *g = s->g;
    pattern patterns[PATTERNS_MAX];
    size_t n_patterns = gather_patterns(s, shape, patterns);
    if (n_patterns == 0 && shape->is_closed)
        return NULL;
    const di_node *names = names_node(s, shape);
    if (n_patterns == 0 && !names) { /* much the most frequent case, without automata over code points */
        const char **texts = di_gram_alloc(g, DI_MAX(declared->n, (size_t)1) * sizeof *texts);
        size_t *lens = di_gram_alloc(g, DI_MAX(declared->n, (size_t)1) * sizeof *lens);
        di_goal *goal = class_goal(s, shape, patterns, 0, 0);
        if (!texts || !lens || !goal || goal->is_never)
            return NULL;
        for (size_t i = 0; i < declared->n; i++) {
            texts[i] = declared->list[i].text;
            lens[i] = declared->list[i].len;
        }
        return pair_node(s, di_schema_other_strings(s, texts, lens, declared->n), goal);
    }
    if (n_patterns == 0 && declared->n == 0) {
        di_goal *goal = class_goal(s, shape, patterns, 0, 0);
        return goal && !goal->is_never ? pair_node(s, quoted(s, names), goal) : NULL;
    }
    key_class classes[KEY_CLASSES_MAX];
    const di_node *any = di_node_repeat(g, di_node_class(g, NULL, 0, true), 0, -1);
    const di_node **texts = di_gram_alloc(g, DI_MAX(declared->n, (size_t)1) * sizeof *texts);
    if (!texts)
        return NULL;
    for (size_t i = 0; i < declared->n; i++)
        texts[i] = di_node_bytes(g, declared->list[i].text, declared->list[i].len);
    classes[0] = (key_class){di_regular_make(g, names ? names : any), 0};
    if (declared->n)
        classes[0].set = di_regular_subtract(g, classes[0].set, di_regular_make(g, di_node_alt(g, texts, declared->n)));
    size_t n = 1, n_pairs = 0;
    for (size_t i = 0; i < n_patterns; i++)
        n = split_classes(s, classes, n, &patterns[i], i);
    const di_node *pairs[KEY_CLASSES_MAX];
    for (size_t i = 0; i < n && !di_gram_has_failed(g); i++) {
        if (!classes[i].set || di_regular_is_never(classes[i].set) || (shape->is_closed && !classes[i].matched))
            continue;
        di_goal *goal = class_goal(s, shape, patterns, n_patterns, classes[i].matched);
        if (!goal || goal->is_never)
            continue;
        const di_node *pair = pair_node(s, quoted(s, di_regular_node(g, classes[i].set)), goal);
        if (pair)
            pairs[n_pairs++] = pair;
    }
    return n_pairs ? di_node_alt(g, pairs, n_pairs) : NULL;
}

/* ---- the graph ---- */

typedef struct graph {
    di_gram *g;
    di_graph_edge *edges; /* owned */
    size_t n_edges, cap;
} graph;

static void add_edge(graph *a, int64_t from, int64_t to, const di_node *label) {
    a->edges = di_gram_grow(a->g, a->edges, &a->cap, a->n_edges + 1, sizeof *a->edges);
    if (a->n_edges == a->cap)
        return;
    a->edges[a->n_edges++] = (di_graph_edge){(int32_t)from, (int32_t)to, label};
}

/* How many keys there may be. With `others` the counts of the declared ones alone are in the layers. */
typedef struct counts {
    int64_t min, max; /* max -1: no bound */
    int64_t n_layers;
} counts;

static const di_node *graph_node(di_schema *s, const keys *all, const di_node *others, const counts *c) {
    di_gram *g = s->g;
    int64_t n = (int64_t)all->n, top = c->n_layers - 1, width = n + 1;
    int64_t n_states = 3 + 2 * width * c->n_layers;
    if (n_states > STATES_MAX) {
        di_gram_fail(g, DI_ERR_RANGE, "an object of the schema takes %lld states", (long long)n_states);
        return di_node_never();
    }
    /* States: 0 the start, 1 behind the brace, 2 the end, then K(i) and B(i) of each layer. */
    enum { OPEN = 1, END = 2 };
    graph a = {.g = g};
    const di_node *space = di_schema_space(s);
    const di_node *brace = di_node_seq2(g, di_node_bytes(g, "{", 1), space), *close = di_node_bytes(g, "}", 1);
    const di_node *comma = di_node_seq2(g, di_node_bytes(g, ",", 1), space), *empty = di_node_empty();
    int64_t last_required = -1;
    for (int64_t i = 0; i < n; i++) {
        if (all->list[i].is_required)
            last_required = i;
    }
    add_edge(&a, 0, OPEN, brace);
    if (last_required < 0 && c->min <= 0)
        add_edge(&a, OPEN, END, close);
    add_edge(&a, OPEN, 3, empty);
    for (int64_t layer = 0; layer <= top; layer++) {
        int64_t keys_at = 3 + 2 * width * layer, behind_at = keys_at + width;
        /* One key more; the last layer stays where there is no maximum. */
        bool is_full = c->max >= 0 && layer >= c->max;
        int64_t next = DI_MIN(layer + 1, top);
        int64_t next_behind = 3 + 2 * width * next + width;
        for (int64_t i = 0; i < n; i++) {
            const key *k = &all->list[i];
            if (k->pair && !is_full)
                add_edge(&a, keys_at + i, next_behind + i + 1, k->pair);
            if (!k->is_required)
                add_edge(&a, keys_at + i, keys_at + i + 1, empty);
            if (layer > 0 || top == 0) {
                add_edge(&a, behind_at + i, keys_at + i, comma);
                if (i > last_required && layer >= c->min)
                    add_edge(&a, behind_at + i, END, close);
            }
        }
        if (n > last_required && layer >= c->min)
            add_edge(&a, behind_at + n, END, close);
        if (!others)
            continue;
        add_edge(&a, behind_at + n, keys_at + n, comma);
        /* All undeclared keys at once, one after another: they count once for the minimum. */
        int64_t left = c->max < 0 ? -1 : c->max - layer;
        if (left == 0 || layer + 1 < c->min)
            continue;
        const di_node *more = di_node_seq2(g, comma, others);
        int32_t more_max = left < 0 || left > INT32_MAX ? -1 : (int32_t)left - 1;
        add_edge(&a, keys_at + n, END,
                 di_node_seq(g, (const di_node *const[]){others, di_node_repeat(g, more, 0, more_max), close}, 3));
    }
    bool *is_accepting = di_gram_alloc(g, (size_t)n_states * sizeof *is_accepting);
    const di_node *node = di_node_never();
    if (is_accepting && !di_gram_has_failed(g)) {
        memset(is_accepting, 0, (size_t)n_states * sizeof *is_accepting);
        is_accepting[END] = true;
        node = di_node_graph(g, (int32_t)n_states, is_accepting, a.edges, a.n_edges);
    }
    free(a.edges);
    return node;
}

const di_node *di_schema_object(di_schema *s, const di_shape *shape) {
    keys all = {0};
    const di_node *node = di_node_never();
    gather_keys(s, shape, &all);
    const di_node *others = di_gram_has_failed(s->g) ? NULL : others_node(s, shape, &all);
    int64_t n_required = 0;
    keys offered = all;
    offered.n = 0;
    for (size_t i = 0; i < all.n && !di_gram_status(s->g, NULL); i++) {
        key *k = &all.list[i];
        di_atoms atoms = {0};
        if (!k->is_absent && (k->is_declared || !shape->is_closed) &&
            di_schema_key_fits(s, shape->facts, k->text, k->len)) {
            di_schema_key_atoms(s, shape->facts, k->text, k->len, &atoms);
            di_goal *goal = di_schema_goal(s, &atoms);
            if (goal && !goal->is_never)
                k->pair = pair_node(s, di_schema_literal(s, k->text, k->len), goal);
        }
        if (!k->pair && k->is_required)
            goto out;
        n_required += k->is_required;
        if (k->pair)
            offered.list[offered.n++] = *k;
    }
    if (di_gram_has_failed(s->g))
        goto out;
    int64_t n = (int64_t)offered.n;
    counts c = {.min = shape->keys_min, .max = shape->keys_max == INT64_MAX ? -1 : shape->keys_max};
    if (c.min <= n_required)
        c.min = 0;
    if (!others && c.max >= n)
        c.max = -1;
    if (c.min > n + (others ? 1 : 0)) {
        /* Undeclared keys may be the same one twice, so that they can't make up for more than one. */
        if (!others || !di_schema_refuse(s, shape->keys_at, "minProperties", NULL))
            goto out;
        c.min = n + 1;
    }
    if (c.max >= 0 && (c.max < n_required || c.max < c.min))
        goto out;
    c.n_layers = 1 + DI_MAX(c.min, DI_MIN(c.max, n));
    node = graph_node(s, &offered, others, &c);
out:
    di_map_deinit(&all.map);
    return node;
}
