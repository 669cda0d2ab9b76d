/* Arrays of a JSON schema: elements by place, the rest, bounds of their number, contains.
 *
 * Without contains this is a row of places and a counted rest. With it, states are pairs of how many elements there are
 * and how many of these were counted, each up to where more makes no difference: an element is either one that
 * satisfies what is counted or, where there is a maximum, one that doesn't. Elements that differ from each other can
 * only be guaranteed where there are few values: then states are the sets of values used. */
#include "schema_internal.h"

enum {
    STATES_MAX = 16384,   /* of one array */
    UNIQUE_VALUES_MAX = 8 /* values that an array of unique ones may have */
};

/* Elements that one schema object gives by place. */
static const di_json *places_of(const di_json *schema) {
    const di_json *places = di_json_get(schema, "prefixItems"), *items = di_json_get(schema, "items");
    return places ? places : di_json_is(items, DI_JSON_ARRAY) ? items : NULL;
}

static const di_json *rest_of(const di_json *schema) {
    const di_json *items = di_json_get(schema, "items");
    return di_json_is(items, DI_JSON_ARRAY) ? di_json_get(schema, "additionalItems") : items;
}

int64_t di_schema_prefix(const di_fact *facts) {
    int64_t n = 0;
    for (const di_fact *f = facts; f; f = f->next) {
        if (f->kind == DI_FACT_ARRAY)
            n = DI_MAX(n, (int64_t)di_json_array_len(places_of(f->schema)));
        if (f->kind == DI_FACT_ELEMENT)
            n = DI_MAX(n, f->index + 1);
    }
    return n;
}

void di_schema_element_atoms(di_schema *s, const di_fact *facts, int64_t at, di_atoms *atoms) {
    for (const di_fact *f = facts; f; f = f->next) {
        if (f->kind == DI_FACT_ARRAY) {
            const di_json *places = places_of(f->schema), *rest = rest_of(f->schema);
            bool is_place = at < (int64_t)di_json_array_len(places);
            if (is_place || rest)
                di_atoms_add(s, atoms, is_place ? di_json_at(places, (size_t)at) : rest, false);
        } else if (f->kind == DI_FACT_ELEMENT && f->index == at) {
            di_atoms_add(s, atoms, f->value, true);
        } else if (f->kind == DI_FACT_CONTAINS && f->last == 0) { /* none of them is one that is counted */
            di_atoms_add(s, atoms, f->value, !f->is_negated);
        } else if (f->kind == DI_FACT_REST) {
            bool is_known = false;
            for (const di_fact *o = f->scope; o && !is_known; o = o->next)
                is_known = o->kind == DI_FACT_ARRAY && !o->is_negated &&
                           (rest_of(o->schema) || at < (int64_t)di_json_array_len(places_of(o->schema)));
            if (!is_known)
                di_atoms_add(s, atoms, f->value, false);
        }
    }
}

/* The element at a place with its white space; counted: 1 satisfies `counted`, 0 doesn't, -1 either. NEVER for none. */
static const di_node *element_node(di_schema *s, const di_shape *shape, int64_t at, const di_fact *counted, int how) {
    di_atoms atoms = {0};
    di_schema_element_atoms(s, shape->facts, at, &atoms);
    if (how >= 0)
        di_atoms_add(s, &atoms, counted->value, counted->is_negated != (how == 0));
    di_goal *goal = di_schema_goal(s, &atoms);
    const di_node *node = goal ? di_schema_node(s, goal) : di_node_never();
    return di_node_seq2(s->g, node, di_schema_space(s));
}

static const di_node *token(di_schema *s, const char *text, bool has_space) {
    const di_node *node = di_node_bytes(s->g, text, 1);
    return has_space ? di_node_seq2(s->g, node, di_schema_space(s)) : node;
}

static const di_node *bracketed(di_schema *s, const di_node *inside) {
    const di_node *parts[] = {token(s, "[", true), inside, token(s, "]", false)};
    return di_node_seq(s->g, parts, 3);
}

/* ---- arrays without contains ---- */

static const di_node *plain_node(di_schema *s, const di_shape *shape) {
    di_gram *g = s->g;
    int64_t n_places = di_schema_prefix(shape->facts), min = shape->items_min, max = shape->items_max;
    const di_node *comma = token(s, ",", true);
    n_places = DI_MIN(n_places, max);
    const di_node *rest = max > n_places ? element_node(s, shape, n_places, NULL, -1) : di_node_never();
    if (min > INT32_MAX || (max != INT64_MAX && max > INT32_MAX && rest->kind != DI_NODE_NEVER)) {
        di_schema_fail(s, shape->items_at, min > INT32_MAX ? "minItems" : "maxItems", "is too large");
        return di_node_never();
    }
    /* State i: i places are written; the last one is behind the rest. */
    int32_t n_states = (int32_t)n_places + 2, end = n_states - 1;
    bool *is_accepting = di_gram_alloc(g, (size_t)n_states * sizeof *is_accepting);
    di_graph_edge *edges = di_gram_alloc(g, ((size_t)n_states + 1) * sizeof *edges);
    size_t n_edges = 0;
    if (!is_accepting || !edges)
        return di_node_never();
    memset(is_accepting, 0, (size_t)n_states * sizeof *is_accepting);
    for (int32_t i = 0; i <= (int32_t)n_places; i++) {
        is_accepting[i] = i >= min;
        if (i == (int32_t)n_places)
            break;
        const di_node *one = element_node(s, shape, i, NULL, -1);
        edges[n_edges++] = (di_graph_edge){i, i + 1, i ? di_node_seq2(g, comma, one) : one};
        if (di_gram_status(g, NULL))
            return di_node_never();
    }
    if (rest->kind != DI_NODE_NEVER) {
        const di_node *more = di_node_seq2(g, comma, rest);
        int32_t from = (int32_t)n_places, rest_max = max == INT64_MAX ? -1 : (int32_t)(max - n_places);
        int32_t rest_min = (int32_t)DI_MAX(min - n_places, (int64_t)1);
        if (n_places == 0) /* the first one without a comma */
            more = di_node_seq2(g, rest, di_node_repeat(g, more, rest_min - 1, rest_max < 0 ? -1 : rest_max - 1));
        else
            more = di_node_repeat(g, more, rest_min, rest_max);
        edges[n_edges++] = (di_graph_edge){from, end, more};
        is_accepting[end] = true;
    }
    return bracketed(s, di_node_graph(g, n_states, is_accepting, edges, n_edges));
}

/* ---- arrays of which some elements are counted ---- */

static const di_node *counted_node(di_schema *s, const di_shape *shape, const di_fact *counted) {
    di_gram *g = s->g;
    int64_t n_places = di_schema_prefix(shape->facts);
    bool has_max = shape->items_max != INT64_MAX, has_most = counted->last != INT64_MAX;
    /* Rows by number of elements, columns by number of counted ones; the last of each is "or more" without a bound. */
    int64_t n_rows = DI_MAX(n_places, has_max ? shape->items_max : DI_MAX(shape->items_min, (int64_t)1)) + 1;
    if (has_most && has_max && counted->last >= shape->items_max)
        has_most = false;
    int64_t n_columns = (has_most ? counted->last : counted->index) + 1;
    if (counted->index > shape->items_max || counted->index > counted->last)
        return di_node_never();
    if (n_rows > STATES_MAX || n_columns > STATES_MAX || n_rows * n_columns >= STATES_MAX) {
        di_schema_fail(s, counted->schema, "contains", "can't be guaranteed: takes more than %d states", STATES_MAX);
        return di_node_never();
    }
    int32_t n_states = (int32_t)(n_rows * n_columns) + 1;
    bool *is_accepting = di_gram_alloc(g, (size_t)n_states * sizeof *is_accepting);
    di_graph_edge *edges = di_gram_alloc(g, (size_t)n_states * 2 * sizeof *edges);
    const di_node *comma = token(s, ",", true);
    size_t n_edges = 0;
    if (!is_accepting || !edges)
        return di_node_never();
    memset(is_accepting, 0, (size_t)n_states * sizeof *is_accepting);
    is_accepting[0] = shape->items_min == 0 && counted->index == 0;
    for (int64_t row = 0; row < n_rows && !di_gram_status(g, NULL); row++) {
        if (has_max && row >= shape->items_max) {
            for (int64_t k = counted->index; k < n_columns; k++)
                is_accepting[1 + row * n_columns + k] = row >= shape->items_min;
            break;
        }
        /* Counting exactly needs elements that aren't counted to fail; a minimum alone doesn't. */
        const di_node *yes = element_node(s, shape, row, counted, 1);
        const di_node *no = element_node(s, shape, row, counted, has_most ? 0 : -1);
        if (row > 0) {
            yes = di_node_seq2(g, comma, yes);
            no = di_node_seq2(g, comma, no);
        }
        int64_t next = has_max ? row + 1 : DI_MIN(row + 1, n_rows - 1);
        for (int64_t k = 0; k < n_columns; k++) {
            /* State 0 is row 0, which has nothing counted; other states of it are never reached. */
            int32_t from = row == 0 && k == 0 ? 0 : (int32_t)(1 + row * n_columns + k);
            if (row > 0)
                is_accepting[1 + row * n_columns + k] = row >= shape->items_min && k >= counted->index;
            if (row == 0 && k > 0)
                break;
            int64_t more = has_most ? k + 1 : DI_MIN(k + 1, n_columns - 1);
            edges[n_edges++] = (di_graph_edge){from, (int32_t)(1 + next * n_columns + k), no};
            if (more < n_columns)
                edges[n_edges++] = (di_graph_edge){from, (int32_t)(1 + next * n_columns + more), yes};
        }
    }
    return bracketed(s, di_node_graph(g, n_states, is_accepting, edges, n_edges));
}

/* ---- arrays of unique elements ---- */

/* The few values that the elements of the rest have; 0 where they aren't few. */
static size_t few_values(di_schema *s, const di_shape *shape, const di_json **out) {
    di_atoms atoms = {0};
    size_t n = 0;
    di_schema_element_atoms(s, shape->facts, 0, &atoms);
    di_goal *goal = di_schema_goal(s, &atoms);
    if (!goal)
        return 0;
    di_shapes shapes = di_schema_shapes(s, goal);
    for (int32_t i = 0; i < shapes.n; i++) {
        const di_shape *one = shapes.list[i];
        const di_fact *values = di_schema_values_of(one);
        if (!values && (one->types & ~(DI_TYPE_NULL | DI_TYPE_BOOL)))
            return 0;
        const di_json *list = values ? values->value : s->simple;
        size_t n_values = values && !values->is_list ? 1 : di_json_array_len(list);
        for (size_t k = 0; k < n_values; k++) {
            const di_json *value = values && !values->is_list ? list : di_json_at(list, k);
            if (!di_schema_shape_holds(s, one, value, values))
                continue;
            bool is_new = true;
            for (size_t j = 0; j < n && is_new; j++)
                is_new = !di_schema_equal(s, out[j], value);
            if (is_new && n == UNIQUE_VALUES_MAX)
                return 0;
            if (is_new)
                out[n++] = value;
        }
    }
    return n;
}

static const di_node *unique_node(di_schema *s, const di_shape *shape, const di_json *const *values, size_t n) {
    di_gram *g = s->g;
    size_t n_sets = (size_t)1 << n, n_edges = 0;
    bool *is_accepting = di_gram_alloc(g, n_sets * sizeof *is_accepting);
    di_graph_edge *edges = di_gram_alloc(g, n_sets * n * sizeof *edges);
    if (!is_accepting || !edges)
        return di_node_never();
    const di_node *first[UNIQUE_VALUES_MAX], *later[UNIQUE_VALUES_MAX];
    for (size_t i = 0; i < n; i++) {
        first[i] = di_node_seq2(g, di_schema_literal_value(s, values[i]), di_schema_space(s));
        later[i] = di_node_seq2(g, token(s, ",", true), first[i]);
    }
    for (size_t set = 0; set < n_sets; set++) {
        int64_t n_used = __builtin_popcountll(set);
        is_accepting[set] = n_used >= shape->items_min && n_used <= shape->items_max;
        for (size_t i = 0; i < n && n_used < shape->items_max; i++) {
            if (!(set >> i & 1))
                edges[n_edges++] =
                    (di_graph_edge){(int32_t)set, (int32_t)(set | (size_t)1 << i), set ? later[i] : first[i]};
        }
    }
    return bracketed(s, di_node_graph(g, (int32_t)n_sets, is_accepting, edges, n_edges));
}

const di_node *di_schema_array(di_schema *s, const di_shape *shape) {
    const di_fact *counted = NULL, *unique = NULL;
    di_shape bounded = *shape;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_UNIQUE)
            unique = f;
        if (f->kind == DI_FACT_ELEMENT)
            bounded.items_min = DI_MAX(bounded.items_min, f->index + 1);
        if (f->kind != DI_FACT_CONTAINS || f->last == 0)
            continue;
        if (counted) {
            if (!di_schema_refuse(s, f->schema, "contains", "together with another"))
                return di_node_never();
            continue;
        }
        counted = f;
    }
    if (bounded.items_min > bounded.items_max)
        return di_node_never();
    if (unique && bounded.items_max > 1) {
        const di_json *values[UNIQUE_VALUES_MAX];
        size_t n = counted || di_schema_prefix(shape->facts) ? 0 : few_values(s, shape, values);
        if (n)
            return (int64_t)n >= bounded.items_min ? unique_node(s, &bounded, values, n) : di_node_never();
        if (di_gram_has_failed(s->g) || !di_schema_refuse(s, unique->schema, "uniqueItems", NULL))
            return di_node_never();
    }
    return counted ? counted_node(s, &bounded, counted) : plain_node(s, &bounded);
}
