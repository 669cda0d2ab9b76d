/* Schemas to shapes: the alternatives of a value, without applicators.
 *
 * Reading a schema gives the union of the shapes that satisfy it, reading its negation those that don't, with `not`
 * pushed down to single keywords, as far as these have an opposite that a grammar can say; an opposite that has none is
 * left out, so that the union becomes smaller, and noted for the message in case nothing is left. Conjunctions multiply
 * the unions out and drop what contradicts itself: another type, another value of a key that both require, bounds that
 * cross. That is what keeps long lists of `if`/`then` over one discriminator linear, and what tells that the
 * alternatives of a oneOf exclude each other. Schemas inside properties and elements are not read here, except to see
 * whether one that several schemas give to the same required key has any value. */
#include <math.h>

#include "schema_internal.h"

enum {
    SHAPES_MAX = 2048,     /* alternatives of one schema */
    PROBE_DEPTH = 4,       /* nested keys that are looked at to find a contradiction */
    PROBE_VALUES_MAX = 256 /* values of an enum that are tried one by one */
};

struct di_reading {
    di_atom atom;
    bool is_busy, is_done;
    di_shapes shapes;
    di_reading *next;
};

static di_shapes read_schema(di_schema *s, const di_json *schema, bool is_negated);
static bool is_never(di_schema *s, const di_atoms *atoms);

/* ---- types ---- */

int32_t di_schema_type_of(const di_json *value) {
    switch (di_json_kind(value)) {
    case DI_JSON_NULL:
        return DI_TYPE_NULL;
    case DI_JSON_BOOL:
        return di_json_bool(value) ? DI_TYPE_TRUE : DI_TYPE_FALSE;
    case DI_JSON_REAL: {
        double d = di_json_number(value);
        return d == floor(d) ? DI_TYPE_WHOLE : DI_TYPE_FRACTION;
    }
    case DI_JSON_STRING:
        return DI_TYPE_STRING;
    case DI_JSON_ARRAY:
        return DI_TYPE_ARRAY;
    case DI_JSON_OBJECT:
        return DI_TYPE_OBJECT;
    default:
        return DI_TYPE_WHOLE;
    }
}

int32_t di_schema_fact_types(const di_fact *values) {
    if (!values->is_list)
        return di_schema_type_of(values->value);
    int32_t types = 0;
    for (size_t i = 0; i < di_json_array_len(values->value); i++)
        types |= di_schema_type_of(di_json_at(values->value, i));
    return types;
}

static int32_t type_named(const char *name) {
    static const struct {
        const char *name;
        int32_t types;
    } names[] = {{"string", DI_TYPE_STRING}, {"object", DI_TYPE_OBJECT}, {"array", DI_TYPE_ARRAY},
                 {"integer", DI_TYPE_WHOLE}, {"number", DI_TYPE_NUMBER}, {"boolean", DI_TYPE_BOOL},
                 {"null", DI_TYPE_NULL}};
    for (size_t i = 0; name && i < DI_COUNT(names); i++) {
        if (strcmp(name, names[i].name) == 0)
            return names[i].types;
    }
    return 0;
}

/* ---- lists of shapes ---- */

static const di_shape top = {
    .types = DI_TYPE_ALL, .chars_max = INT64_MAX, .items_max = INT64_MAX, .keys_max = INT64_MAX};

static void push(di_schema *s, di_shapes *list, const di_shape *shape) {
    if (list->n == list->cap) {
        int32_t cap = DI_MAX(2 * list->cap, 4);
        const di_shape **grown = di_gram_alloc(s->g, (size_t)cap * sizeof *grown);
        if (!grown)
            return;
        if (list->n)
            memcpy(grown, list->list, (size_t)list->n * sizeof *grown);
        list->list = grown;
        list->cap = cap;
    }
    if (list->n == SHAPES_MAX) {
        di_gram_fail(s->g, DI_ERR_RANGE, "the schema has more than %d combinations of alternatives", SHAPES_MAX);
        return;
    }
    list->list[list->n++] = shape;
}

static void push_copy(di_schema *s, di_shapes *list, const di_shape *shape) {
    di_shape *copy = di_gram_alloc(s->g, sizeof *copy);
    if (!copy)
        return;
    *copy = *shape;
    push(s, list, copy);
}

static void push_all(di_schema *s, di_shapes *list, const di_shapes *more) {
    int32_t n = list->n;
    for (int32_t i = 0; i < more->n && !di_gram_has_failed(s->g); i++) {
        bool is_new = true; /* a definition that is referred to twice is the same shape twice */
        for (int32_t k = 0; k < n && is_new; k++)
            is_new = list->list[k] != more->list[i];
        if (is_new)
            push(s, list, more->list[i]);
    }
}

static void add_fact(di_schema *s, di_shape *shape, di_fact fact) {
    di_fact *copy = di_gram_alloc(s->g, sizeof *copy);
    if (!copy)
        return;
    *copy = fact;
    copy->next = shape->facts;
    shape->facts = copy;
}

/* ---- conjunctions ---- */

static void tighten(di_bound *bound, const di_decimal *value, bool is_exclusive, bool is_low) {
    int order = bound->is_set ? di_decimal_compare(value, &bound->value) : 0;
    if (!bound->is_set || (is_low ? order > 0 : order < 0))
        *bound = (di_bound){true, is_exclusive, *value};
    else if (order == 0)
        bound->is_exclusive |= is_exclusive;
}

/* A guess is that there are values, so that finding none is sure all the same. */
typedef struct probe {
    bool had_guessed;
    const di_json *partial;
    const char *partial_keyword;
} probe;

static probe probe_begin(di_schema *s) {
    probe p = {s->has_guessed, s->partial, s->partial_keyword};
    s->probing++;
    s->has_guessed = false;
    s->partial = NULL;
    return p;
}

static void probe_end(di_schema *s, const probe *p) {
    s->probing--;
    s->has_guessed = p->had_guessed || (s->probing && s->has_guessed);
    s->partial = p->partial;
    s->partial_keyword = p->partial_keyword;
}

/* Values of a list that satisfy the shape: whether there are any. */
static bool has_values(di_schema *s, const di_shape *shape, const di_fact *values) {
    size_t n = values->is_list ? di_json_array_len(values->value) : 1;
    bool has_one = n > PROBE_VALUES_MAX;
    probe p = probe_begin(s);
    for (size_t i = 0; i < n && !has_one; i++) {
        const di_json *value = values->is_list ? di_json_at(values->value, i) : values->value;
        has_one = di_schema_shape_holds(s, shape, value, values);
    }
    has_one |= s->has_guessed || di_gram_has_failed(s->g);
    probe_end(s, &p);
    return has_one;
}

/* Whether a value satisfies all the schemas of a key. Where one of them lists its values these are tried: that is how
 * shapes exclude each other by a discriminator, and must not cost a goal for each pair. */
static bool may_have_value(di_schema *s, const di_atoms *atoms) {
    const di_json *list = NULL;
    bool is_list = true, has_one = false;
    for (int32_t i = 0; i < atoms->n && is_list; i++) {
        if (atoms->list[i].is_negated)
            continue;
        const di_json *constant = di_json_get(atoms->list[i].schema, "const");
        const di_json *values = di_json_get(atoms->list[i].schema, "enum");
        if (constant || (values && (!list || di_json_array_len(values) < di_json_array_len(list)))) {
            list = constant ? constant : values;
            is_list = !constant;
        }
    }
    size_t n = !list ? 0 : is_list ? di_json_array_len(list) : 1;
    if (n == 0 || n > PROBE_VALUES_MAX)
        return !is_never(s, atoms);
    probe p = probe_begin(s);
    for (size_t i = 0; i < n && !has_one; i++) {
        has_one = true;
        for (int32_t k = 0; k < atoms->n && has_one; k++)
            has_one = di_schema_holds(s, atoms->list[k].schema, is_list ? di_json_at(list, i) : list) !=
                      atoms->list[k].is_negated;
    }
    has_one |= s->has_guessed || di_gram_has_failed(s->g);
    probe_end(s, &p);
    return has_one;
}

static bool is_same_key(const di_fact *a, const di_fact *b) {
    return a->len == b->len && memcmp(a->text, b->text, a->len) == 0;
}

/* Whether the keys that must be there can be. */
static bool can_be_object(di_schema *s, const di_shape *shape) {
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind != DI_FACT_KEY_REQUIRED && f->kind != DI_FACT_KEY_FAILS)
            continue;
        bool is_again = false; /* what is said of a key is looked at once */
        for (const di_fact *o = shape->facts; o != f && !is_again; o = o->next)
            is_again = (o->kind == DI_FACT_KEY_REQUIRED || o->kind == DI_FACT_KEY_FAILS) && is_same_key(f, o);
        if (is_again)
            continue;
        for (const di_fact *o = shape->facts; o; o = o->next) {
            if (o->kind == DI_FACT_KEY_ABSENT && is_same_key(f, o))
                return false;
        }
        di_atom room[32];
        di_atoms atoms = {.list = room, .cap = DI_COUNT(room)};
        di_schema_key_atoms(s, shape->facts, f->text, f->len, &atoms);
        if (atoms.is_never)
            return false;
        /* One schema alone is taken to have values: what matters here are schemas that contradict each other. */
        if (atoms.n > 1 && s->probing < PROBE_DEPTH && !may_have_value(s, &atoms))
            return false;
    }
    return true;
}

/* Takes types out of which the shape has no value; `is_joined`: it was made of two. */
static void tidy(di_schema *s, di_shape *shape, bool is_joined) {
    if (shape->low.is_set && shape->high.is_set) {
        int order = di_decimal_compare(&shape->low.value, &shape->high.value);
        if (order > 0 || (order == 0 && (shape->low.is_exclusive || shape->high.is_exclusive)))
            shape->types &= ~DI_TYPE_NUMBER;
        else if (order == 0)
            shape->types &= ~(di_decimal_is_whole(&shape->low.value) ? DI_TYPE_FRACTION : DI_TYPE_WHOLE);
    }
    if (shape->chars_min > shape->chars_max)
        shape->types &= ~DI_TYPE_STRING;
    if (shape->items_min > shape->items_max)
        shape->types &= ~DI_TYPE_ARRAY;
    if (shape->keys_min > shape->keys_max)
        shape->types &= ~DI_TYPE_OBJECT;
    if (!is_joined || !shape->types)
        return;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind != DI_FACT_VALUES || f->is_negated)
            continue;
        if (!has_values(s, shape, f))
            shape->types = 0;
        return; /* values have been held against all other facts */
    }
    if ((shape->types & DI_TYPE_OBJECT) && !can_be_object(s, shape))
        shape->types &= ~DI_TYPE_OBJECT;
}

/* The facts of a, then those of b: the list of a is shared. */
static const di_fact *join_facts(di_schema *s, const di_fact *a, const di_fact *b) {
    const di_fact *first = a, **end = &first;
    if (!a)
        return b;
    for (; b; b = b->next) {
        di_fact *copy = di_gram_alloc(s->g, sizeof *copy);
        if (!copy)
            return a;
        *copy = *b;
        copy->next = a;
        *end = copy;
        end = &copy->next;
    }
    return first;
}

static di_shape join(di_schema *s, const di_shape *a, const di_shape *b) {
    di_shape both = *a;
    both.types &= b->types;
    both.is_closed |= b->is_closed;
    if (!both.types)
        return both;
    if (b->low.is_set)
        tighten(&both.low, &b->low.value, b->low.is_exclusive, true);
    if (b->high.is_set)
        tighten(&both.high, &b->high.value, b->high.is_exclusive, false);
    both.chars_min = DI_MAX(a->chars_min, b->chars_min);
    both.chars_max = DI_MIN(a->chars_max, b->chars_max);
    both.chars_at = a->chars_at ? a->chars_at : b->chars_at;
    both.items_min = DI_MAX(a->items_min, b->items_min);
    both.items_max = DI_MIN(a->items_max, b->items_max);
    both.items_at = a->items_at ? a->items_at : b->items_at;
    both.keys_min = DI_MAX(a->keys_min, b->keys_min);
    both.keys_max = DI_MIN(a->keys_max, b->keys_max);
    both.keys_at = a->keys_at ? a->keys_at : b->keys_at;
    both.facts = join_facts(s, a->facts, b->facts);
    tidy(s, &both, true);
    return both;
}

static di_shapes cross(di_schema *s, const di_shapes *a, const di_shapes *b) {
    if (a->n == 1 && a->list[0] == &top)
        return *b;
    if (b->n == 1 && b->list[0] == &top)
        return *a;
    di_shapes all = {0};
    for (int32_t i = 0; i < a->n && !di_gram_has_failed(s->g); i++) {
        for (int32_t k = 0; k < b->n && !di_gram_status(s->g, NULL); k++) {
            if (!(a->list[i]->types & b->list[k]->types))
                continue;
            di_shape both = join(s, a->list[i], b->list[k]);
            if (both.types)
                push_copy(s, &all, &both);
        }
    }
    return all;
}

static di_shapes everything(di_schema *s) {
    di_shapes all = {0};
    push(s, &all, &top);
    return all;
}

/* One shape of some types, with one fact where its kind isn't negative. */
static di_shapes single(di_schema *s, int32_t types, const di_fact *fact) {
    di_shapes all = {0};
    di_shape shape = top;
    shape.types = types;
    if (fact)
        add_fact(s, &shape, *fact);
    push_copy(s, &all, &shape);
    return all;
}

/* ---- keywords ---- */

typedef enum keyword {
    KEY_REF,
    KEY_ADDITIONAL_ITEMS,
    KEY_ADDITIONAL_PROPERTIES,
    KEY_ALL_OF,
    KEY_ANY_OF,
    KEY_CONST,
    KEY_CONTAINS,
    KEY_DEPENDENCIES,
    KEY_DEPENDENT_REQUIRED,
    KEY_DEPENDENT_SCHEMAS,
    KEY_ELSE,
    KEY_ENUM,
    KEY_EXCLUSIVE_MAXIMUM,
    KEY_EXCLUSIVE_MINIMUM,
    KEY_FORMAT,
    KEY_IF,
    KEY_ITEMS,
    KEY_MAX_CONTAINS,
    KEY_MAX_ITEMS,
    KEY_MAX_LENGTH,
    KEY_MAX_PROPERTIES,
    KEY_MAXIMUM,
    KEY_MIN_CONTAINS,
    KEY_MIN_ITEMS,
    KEY_MIN_LENGTH,
    KEY_MIN_PROPERTIES,
    KEY_MINIMUM,
    KEY_MULTIPLE_OF,
    KEY_NOT,
    KEY_NULLABLE,
    KEY_ONE_OF,
    KEY_PATTERN,
    KEY_PATTERN_PROPERTIES,
    KEY_PREFIX_ITEMS,
    KEY_PROPERTIES,
    KEY_PROPERTY_NAMES,
    KEY_REQUIRED,
    KEY_THEN,
    KEY_TYPE,
    KEY_UNEVALUATED_ITEMS,
    KEY_UNEVALUATED_PROPERTIES,
    KEY_UNIQUE_ITEMS,
    KEY_OTHER /* an annotation */
} keyword;

/* Sorted by name. */
static const struct {
    const char *name;
    keyword id;
} keywords[] = {
    {"$dynamicRef", KEY_REF},
    {"$recursiveRef", KEY_REF},
    {"$ref", KEY_REF},
    {"additionalItems", KEY_ADDITIONAL_ITEMS},
    {"additionalProperties", KEY_ADDITIONAL_PROPERTIES},
    {"allOf", KEY_ALL_OF},
    {"anyOf", KEY_ANY_OF},
    {"const", KEY_CONST},
    {"contains", KEY_CONTAINS},
    {"dependencies", KEY_DEPENDENCIES},
    {"dependentRequired", KEY_DEPENDENT_REQUIRED},
    {"dependentSchemas", KEY_DEPENDENT_SCHEMAS},
    {"else", KEY_ELSE},
    {"enum", KEY_ENUM},
    {"exclusiveMaximum", KEY_EXCLUSIVE_MAXIMUM},
    {"exclusiveMinimum", KEY_EXCLUSIVE_MINIMUM},
    {"format", KEY_FORMAT},
    {"if", KEY_IF},
    {"items", KEY_ITEMS},
    {"maxContains", KEY_MAX_CONTAINS},
    {"maxItems", KEY_MAX_ITEMS},
    {"maxLength", KEY_MAX_LENGTH},
    {"maxProperties", KEY_MAX_PROPERTIES},
    {"maximum", KEY_MAXIMUM},
    {"minContains", KEY_MIN_CONTAINS},
    {"minItems", KEY_MIN_ITEMS},
    {"minLength", KEY_MIN_LENGTH},
    {"minProperties", KEY_MIN_PROPERTIES},
    {"minimum", KEY_MINIMUM},
    {"multipleOf", KEY_MULTIPLE_OF},
    {"not", KEY_NOT},
    {"nullable", KEY_NULLABLE},
    {"oneOf", KEY_ONE_OF},
    {"pattern", KEY_PATTERN},
    {"patternProperties", KEY_PATTERN_PROPERTIES},
    {"prefixItems", KEY_PREFIX_ITEMS},
    {"properties", KEY_PROPERTIES},
    {"propertyNames", KEY_PROPERTY_NAMES},
    {"required", KEY_REQUIRED},
    {"then", KEY_THEN},
    {"type", KEY_TYPE},
    {"unevaluatedItems", KEY_UNEVALUATED_ITEMS},
    {"unevaluatedProperties", KEY_UNEVALUATED_PROPERTIES},
    {"uniqueItems", KEY_UNIQUE_ITEMS},
};

static keyword keyword_of(const char *name) {
    size_t low = 0, high = DI_COUNT(keywords);
    while (low < high) {
        size_t at = (low + high) / 2;
        int order = strcmp(name, keywords[at].name);
        if (order == 0)
            return keywords[at].id;
        if (order < 0)
            high = at;
        else
            low = at + 1;
    }
    return KEY_OTHER;
}

/* One keyword being read. */
typedef struct entry {
    const di_json *schema, *value;
    const char *name;
    keyword id;
    bool is_negated;
} entry;

static bool expect(di_schema *s, const entry *e, bool is_right, const char *expected) {
    if (!is_right)
        di_schema_fail(s, e->schema, e->name, "is %s, expected %s", di_json_kind_name(e->value), expected);
    return is_right;
}

static bool is_schema(const di_json *v) {
    return di_json_is(v, DI_JSON_OBJECT) || di_json_is(v, DI_JSON_BOOL);
}

static bool is_number(const di_json *v) {
    return (di_schema_type_of(v) & DI_TYPE_NUMBER) != 0;
}

static bool expect_schema(di_schema *s, const entry *e) {
    return expect(s, e, is_schema(e->value), "a schema");
}

/* A list of schemas, at least one. */
static bool expect_schemas(di_schema *s, const entry *e) {
    size_t n = di_json_array_len(e->value);
    if (!expect(s, e, n > 0, "a list of schemas"))
        return false;
    for (size_t i = 0; i < n; i++) {
        if (!is_schema(di_json_at(e->value, i))) {
            di_schema_fail(s, e->schema, e->name, "element %zu is %s, expected a schema", i,
                           di_json_kind_name(di_json_at(e->value, i)));
            return false;
        }
    }
    return true;
}

/* An object whose values are schemas (or, of dependencies, lists of keys). */
static bool expect_schema_map(di_schema *s, const entry *e, bool has_schemas, bool has_lists) {
    if (!expect(s, e, di_json_is(e->value, DI_JSON_OBJECT),
                has_schemas ? "an object of schemas" : "an object of lists"))
        return false;
    for (void *it = di_json_iter(e->value); it; it = di_json_iter_next(e->value, it)) {
        const di_json *v = di_json_iter_value(it);
        size_t len = 0;
        const char *key = di_json_iter_key(it, &len);
        bool is_right = (has_schemas && is_schema(v)) || (has_lists && di_json_is(v, DI_JSON_ARRAY));
        for (size_t i = 0; is_right && i < di_json_array_len(v); i++)
            is_right = di_json_is(di_json_at(v, i), DI_JSON_STRING);
        if (!is_right || strlen(key) != len) {
            di_schema_fail(s, e->schema, e->name,
                           !is_right ? "the value of '%s' is %s, expected %s" : "the key '%s' has a NUL behind it", key,
                           di_json_kind_name(v), has_schemas ? "a schema" : "a list of keys");
            return false;
        }
    }
    return true;
}

/* A count: an integer of at least 0, also written as 2.0. */
static bool read_count(di_schema *s, const entry *e, int64_t *out) {
    double d = di_json_number(e->value);
    bool is_right = is_number(e->value) && d >= 0 && d == floor(d);
    if (!expect(s, e, is_right, "an integer of at least 0"))
        return false;
    *out = di_json_is(e->value, DI_JSON_INT) ? di_json_int(e->value) : d < 9e18 ? (int64_t)d : INT64_MAX;
    return true;
}

/* What can't be said of the opposite of a keyword is left out: fewer texts, all of them right. */
static void note_dropped(di_schema *s, const entry *e) {
    if (!s->partial) {
        s->partial = e->schema;
        s->partial_keyword = e->name;
    }
}

static bool read_type(di_schema *s, const entry *e, int32_t *types) {
    size_t n = di_json_array_len(e->value);
    *types = 0;
    if (di_json_is(e->value, DI_JSON_STRING)) {
        *types = type_named(di_json_str(e->value, NULL));
        if (!*types)
            di_schema_fail(s, e->schema, e->name, "'%s' is no type", di_json_str(e->value, NULL));
    } else if (expect(s, e, n > 0, "a type or a list of types")) {
        for (size_t i = 0; i < n; i++) {
            int32_t one = type_named(di_json_str(di_json_at(e->value, i), NULL));
            if (!one) {
                di_schema_fail(s, e->schema, e->name, "element %zu is no type", i);
                return false;
            }
            *types |= one;
        }
    }
    const di_json *nullable = di_json_get(e->schema, "nullable");
    if (di_json_is(nullable, DI_JSON_BOOL) && di_json_bool(nullable))
        *types |= DI_TYPE_NULL;
    return !di_gram_has_failed(s->g);
}

/* A bound: maximum, exclusiveMaximum and so on, and whether it is exclusive by the boolean of draft 4. */
static bool read_bound(di_schema *s, const entry *e, di_decimal *value, bool *is_exclusive, bool *is_low) {
    bool is_own = e->id == KEY_EXCLUSIVE_MAXIMUM || e->id == KEY_EXCLUSIVE_MINIMUM;
    *is_low = e->id == KEY_MINIMUM || e->id == KEY_EXCLUSIVE_MINIMUM;
    if (is_own && di_json_is(e->value, DI_JSON_BOOL))
        return false; /* belongs to the bound beside it */
    if (!expect(s, e, is_number(e->value), "a number"))
        return false;
    const di_json *flag = is_own ? NULL : di_json_get(e->schema, *is_low ? "exclusiveMinimum" : "exclusiveMaximum");
    *is_exclusive = is_own || (di_json_is(flag, DI_JSON_BOOL) && di_json_bool(flag));
    return di_decimal_read(s, value, e->value);
}

static bool read_multiple(di_schema *s, const entry *e, di_fact *fact) {
    if (!expect(s, e, is_number(e->value), "a number above 0") || !di_decimal_read(s, &fact->decimal, e->value))
        return false;
    if (fact->decimal.is_negative || di_json_number(e->value) == 0) {
        di_schema_fail(s, e->schema, e->name, "is not above 0");
        return false;
    }
    return true;
}

static bool is_one(const di_decimal *d) {
    return d->n_whole == 1 && d->n_fraction == 0 && d->digits[0] == '1' && !d->is_negative;
}

/* minItems and its kin: bounds of a count, and where they stand. */
typedef struct count_field {
    int64_t *min, *max;
    const di_json **at;
    int32_t type;
    const char *min_name;
} count_field;

static count_field field_of(di_shape *shape, keyword id) {
    switch (id) {
    case KEY_MIN_LENGTH:
    case KEY_MAX_LENGTH:
        return (count_field){&shape->chars_min, &shape->chars_max, &shape->chars_at, DI_TYPE_STRING, "minLength"};
    case KEY_MIN_ITEMS:
    case KEY_MAX_ITEMS:
        return (count_field){&shape->items_min, &shape->items_max, &shape->items_at, DI_TYPE_ARRAY, "minItems"};
    default:
        return (count_field){&shape->keys_min, &shape->keys_max, &shape->keys_at, DI_TYPE_OBJECT, "minProperties"};
    }
}

static bool is_min(keyword id) {
    return id == KEY_MIN_LENGTH || id == KEY_MIN_ITEMS || id == KEY_MIN_PROPERTIES;
}

/* The counts of contains; false where there is nothing to count. */
static bool read_contains(di_schema *s, const entry *e, di_fact *fact) {
    entry min = {e->schema, di_json_get(e->schema, "minContains"), "minContains", KEY_MIN_CONTAINS, false};
    entry max = {e->schema, di_json_get(e->schema, "maxContains"), "maxContains", KEY_MAX_CONTAINS, false};
    fact->index = 1;
    fact->last = INT64_MAX;
    if (!expect_schema(s, e) || (min.value && !read_count(s, &min, &fact->index)) ||
        (max.value && !read_count(s, &max, &fact->last)))
        return false;
    return true;
}

static bool has_true(const di_json *v) {
    return (di_json_is(v, DI_JSON_BOOL) && di_json_bool(v)) ||
           (di_json_is(v, DI_JSON_OBJECT) && di_json_object_len(v) == 0);
}

/* Checks the keywords of arrays and objects that become one record. */
static bool check_record(di_schema *s, const entry *e) {
    switch (e->id) {
    case KEY_PROPERTIES:
    case KEY_PATTERN_PROPERTIES:
        return expect_schema_map(s, e, true, false);
    case KEY_PREFIX_ITEMS:
        return expect_schemas(s, e);
    case KEY_ITEMS:
        return di_json_is(e->value, DI_JSON_ARRAY) ? di_json_array_len(e->value) == 0 || expect_schemas(s, e)
                                                   : expect_schema(s, e);
    default:
        return expect_schema(s, e);
    }
}

static bool check_required(di_schema *s, const entry *e) {
    if (!expect(s, e, di_json_is(e->value, DI_JSON_ARRAY), "a list of keys"))
        return false;
    for (size_t i = 0; i < di_json_array_len(e->value); i++) {
        size_t len = 0;
        const char *key = di_json_str(di_json_at(e->value, i), &len);
        if (!key || strlen(key) != len) {
            di_schema_fail(s, e->schema, e->name, "element %zu is %s, expected a key", i,
                           di_json_kind_name(di_json_at(e->value, i)));
            return false;
        }
    }
    return true;
}

static di_fact key_fact(di_fact_kind kind, const di_json *schema, const di_json *key) {
    di_fact fact = {.kind = kind, .schema = schema};
    fact.text = di_json_str(key, &fact.len);
    return fact;
}

static di_fact key_fact_of(di_fact_kind kind, const di_json *schema, void *it, const di_json *value) {
    di_fact fact = {.kind = kind, .schema = schema, .value = value};
    fact.text = di_json_iter_key(it, &fact.len);
    return fact;
}

/* ---- a schema as it is ---- */

/* A keyword that says something by itself, as part of the shape that all of them share. */
static void read_fact(di_schema *s, const entry *e, di_shape *shape) {
    di_fact fact = {.schema = e->schema, .value = e->value};
    switch (e->id) {
    case KEY_TYPE: {
        int32_t types = 0;
        if (read_type(s, e, &types))
            shape->types &= types;
        return;
    }
    case KEY_ENUM:
    case KEY_CONST:
        fact.kind = DI_FACT_VALUES;
        fact.is_list = e->id == KEY_ENUM;
        if (fact.is_list && !expect(s, e, di_json_array_len(e->value) > 0, "a list of at least one value"))
            return;
        shape->types &= di_schema_fact_types(&fact);
        add_fact(s, shape, fact);
        return;
    case KEY_MINIMUM:
    case KEY_MAXIMUM:
    case KEY_EXCLUSIVE_MINIMUM:
    case KEY_EXCLUSIVE_MAXIMUM: {
        bool is_exclusive = false, is_low = false;
        if (read_bound(s, e, &fact.decimal, &is_exclusive, &is_low))
            tighten(is_low ? &shape->low : &shape->high, &fact.decimal, is_exclusive, is_low);
        return;
    }
    case KEY_MULTIPLE_OF:
        fact.kind = DI_FACT_MULTIPLE;
        if (!read_multiple(s, e, &fact))
            return;
        if (di_decimal_is_whole(&fact.decimal))
            shape->types &= ~DI_TYPE_FRACTION;
        if (!is_one(&fact.decimal))
            add_fact(s, shape, fact);
        return;
    case KEY_MIN_LENGTH:
    case KEY_MAX_LENGTH:
    case KEY_MIN_ITEMS:
    case KEY_MAX_ITEMS:
    case KEY_MIN_PROPERTIES:
    case KEY_MAX_PROPERTIES: {
        count_field field = field_of(shape, e->id);
        if (read_count(s, e, is_min(e->id) ? field.min : field.max))
            *field.at = e->schema;
        return;
    }
    case KEY_PATTERN:
        fact.kind = DI_FACT_PATTERN;
        fact.text = di_json_str(e->value, &fact.len);
        if (expect(s, e, fact.text != NULL, "a regular expression"))
            add_fact(s, shape, fact);
        return;
    case KEY_FORMAT:
        fact.kind = DI_FACT_FORMAT;
        if (!expect(s, e, di_json_is(e->value, DI_JSON_STRING), "the name of a format"))
            return;
        fact.index = di_schema_format_find(di_json_str(e->value, NULL));
        if (fact.index >= 0)
            add_fact(s, shape, fact);
        return;
    case KEY_CONTAINS:
        fact.kind = DI_FACT_CONTAINS;
        if (read_contains(s, e, &fact) && (fact.index > 0 || fact.last != INT64_MAX))
            add_fact(s, shape, fact);
        return;
    case KEY_UNIQUE_ITEMS:
        fact.kind = DI_FACT_UNIQUE;
        if (expect(s, e, di_json_is(e->value, DI_JSON_BOOL), "true or false") && di_json_bool(e->value))
            add_fact(s, shape, fact);
        return;
    case KEY_PROPERTY_NAMES:
        fact.kind = DI_FACT_NAMES;
        if (expect_schema(s, e) && !has_true(e->value))
            add_fact(s, shape, fact);
        return;
    case KEY_REQUIRED:
        if (!check_required(s, e))
            return;
        for (size_t i = 0; i < di_json_array_len(e->value); i++)
            add_fact(s, shape, key_fact(DI_FACT_KEY_REQUIRED, e->schema, di_json_at(e->value, i)));
        return;
    default:
        return;
    }
}

/* Counts whose bounds cross are a mistake where nothing but that type is meant. */
static void check_counts(di_schema *s, const di_json *schema, di_shape *shape) {
    static const keyword kinds[] = {KEY_MIN_LENGTH, KEY_MIN_ITEMS, KEY_MIN_PROPERTIES};
    for (size_t i = 0; i < DI_COUNT(kinds); i++) {
        count_field field = field_of(shape, kinds[i]);
        if (*field.min > *field.max && shape->types == field.type) {
            di_schema_fail(s, schema, field.min_name, "%lld is more than the maximum, %lld", (long long)*field.min,
                           (long long)*field.max);
        }
    }
    bool is_number = shape->types && !(shape->types & ~DI_TYPE_NUMBER);
    if (is_number && shape->low.is_set && shape->high.is_set &&
        di_decimal_compare(&shape->low.value, &shape->high.value) > 0) {
        bool is_plain = di_json_get(schema, "minimum") != NULL;
        di_schema_fail(s, schema, is_plain ? "minimum" : "exclusiveMinimum", "is more than the maximum");
    }
}

/* The facts of a schema object without its applicators, and which of them it has. */
static di_shape read_facts(di_schema *s, const di_json *schema, bool *has_applicators) {
    di_shape shape = top;
    bool has_array = false, has_object = false, is_closed = false;
    for (void *it = di_json_iter(schema); it && !di_gram_has_failed(s->g); it = di_json_iter_next(schema, it)) {
        entry e = {schema, di_json_iter_value(it), di_json_iter_key(it, NULL), KEY_OTHER, false};
        e.id = keyword_of(e.name);
        switch (e.id) {
        case KEY_OTHER:
        case KEY_NULLABLE:
        case KEY_THEN:
        case KEY_ELSE:
        case KEY_MIN_CONTAINS:
        case KEY_MAX_CONTAINS:
            break;
        case KEY_REF:
        case KEY_ALL_OF:
        case KEY_ANY_OF:
        case KEY_ONE_OF:
        case KEY_NOT:
        case KEY_IF:
        case KEY_DEPENDENCIES:
        case KEY_DEPENDENT_REQUIRED:
        case KEY_DEPENDENT_SCHEMAS:
        case KEY_UNEVALUATED_ITEMS:
        case KEY_UNEVALUATED_PROPERTIES:
            *has_applicators = true;
            break;
        case KEY_PROPERTIES:
        case KEY_PATTERN_PROPERTIES:
        case KEY_ADDITIONAL_PROPERTIES:
            has_object |= check_record(s, &e);
            is_closed |= e.id != KEY_ADDITIONAL_PROPERTIES;
            break;
        case KEY_PREFIX_ITEMS:
        case KEY_ITEMS:
        case KEY_ADDITIONAL_ITEMS:
            has_array |= check_record(s, &e);
            break;
        default:
            read_fact(s, &e, &shape);
        }
    }
    if (has_array)
        add_fact(s, &shape, (di_fact){.kind = DI_FACT_ARRAY, .schema = schema});
    if (has_object)
        add_fact(s, &shape, (di_fact){.kind = DI_FACT_OBJECT, .schema = schema});
    shape.is_closed =
        is_closed && !di_json_get(schema, "additionalProperties") && !di_json_get(schema, "unevaluatedProperties");
    check_counts(s, schema, &shape);
    tidy(s, &shape, false);
    return shape;
}

static di_shapes read_any(di_schema *s, const di_json *list, bool is_negated) {
    di_shapes all = {0};
    for (size_t i = 0; i < di_json_array_len(list) && !di_gram_has_failed(s->g); i++) {
        di_shapes one = read_schema(s, di_json_at(list, i), is_negated);
        push_all(s, &all, &one);
    }
    return all;
}

static di_shapes read_all(di_schema *s, const di_json *list, bool is_negated) {
    di_shapes all = everything(s);
    for (size_t i = 0; i < di_json_array_len(list) && all.n && !di_gram_has_failed(s->g); i++) {
        di_shapes one = read_schema(s, di_json_at(list, i), is_negated);
        all = cross(s, &all, &one);
    }
    return all;
}

/* Exactly one alternative: each as it is where no other overlaps with it, else without those that do. */
static di_shapes read_one(di_schema *s, const entry *e) {
    di_shapes all = {0};
    size_t n = di_json_array_len(e->value);
    di_shapes *each = di_gram_alloc(s->g, n * sizeof *each);
    if (!each)
        return all;
    for (size_t i = 0; i < n; i++)
        each[i] = read_schema(s, di_json_at(e->value, i), false);
    for (size_t i = 0; i < n && !di_gram_has_failed(s->g); i++) {
        di_shapes one = each[i];
        for (size_t k = 0; k < n && one.n && !di_gram_has_failed(s->g); k++) {
            if (k == i || (!each[k].partial && cross(s, &one, &each[k]).n == 0))
                continue;
            note_dropped(s, e); /* if all that overlaps is taken away and nothing is left, this is why */
            if (s->is_lax)
                continue;
            di_shapes other = read_schema(s, di_json_at(e->value, k), true);
            one = cross(s, &one, &other);
        }
        push_all(s, &all, &one);
    }
    return all;
}

static const di_json *keyword_schema(di_schema *s, const di_json *schema, const char *name) {
    const di_json *value = di_json_get(schema, name);
    entry e = {schema, value, name, KEY_OTHER, false};
    return value && expect_schema(s, &e) ? value : NULL;
}

/* (if and then) or (not if and else). Keys that only `if` declares don't close an object. */
static di_shapes read_if(di_schema *s, const entry *e) {
    const di_json *then = keyword_schema(s, e->schema, "then"), *otherwise = keyword_schema(s, e->schema, "else");
    if (!expect_schema(s, e) || (!then && !otherwise))
        return everything(s);
    di_shapes condition = read_schema(s, e->value, e->is_negated), yes = {0};
    for (int32_t i = 0; i < condition.n; i++) {
        di_shape open = *condition.list[i];
        open.is_closed = false;
        push_copy(s, &yes, &open);
    }
    di_shapes no = read_schema(s, e->value, true);
    if (then) {
        di_shapes what = read_schema(s, then, false);
        yes = cross(s, &yes, &what);
    }
    if (otherwise) {
        di_shapes what = read_schema(s, otherwise, false);
        no = cross(s, &no, &what);
    }
    push_all(s, &yes, &no);
    return yes;
}

/* Keys that come with others: each key is absent, or there with what it asks for. */
static di_shapes read_dependents(di_schema *s, const entry *e) {
    di_shapes all = everything(s);
    if (!expect_schema_map(s, e, e->id != KEY_DEPENDENT_REQUIRED, e->id != KEY_DEPENDENT_SCHEMAS))
        return all;
    for (void *it = di_json_iter(e->value); it && !di_gram_has_failed(s->g); it = di_json_iter_next(e->value, it)) {
        const di_json *asked = di_json_iter_value(it);
        di_fact absent = key_fact_of(DI_FACT_KEY_ABSENT, e->schema, it, NULL);
        di_fact there = key_fact_of(DI_FACT_KEY_REQUIRED, e->schema, it, NULL);
        di_shapes either = single(s, DI_TYPE_ALL, &absent), with = {0};
        if (di_json_is(asked, DI_JSON_ARRAY)) {
            di_shape shape = top;
            shape.types = DI_TYPE_OBJECT;
            add_fact(s, &shape, there);
            for (size_t i = 0; i < di_json_array_len(asked); i++)
                add_fact(s, &shape, key_fact(DI_FACT_KEY_REQUIRED, e->schema, di_json_at(asked, i)));
            push_copy(s, &with, &shape);
        } else {
            di_shapes what = read_schema(s, asked, false);
            with = single(s, DI_TYPE_OBJECT, &there);
            with = cross(s, &with, &what);
        }
        push_all(s, &either, &with);
        all = cross(s, &all, &either);
    }
    return all;
}

/* What a double negation says holds, but doesn't count as a look at keys and elements, nor does it declare keys. */
static di_shapes read_not(di_schema *s, const entry *e) {
    di_shapes shapes = read_schema(s, e->value, true), all = {0};
    for (int32_t i = 0; i < shapes.n && !di_gram_has_failed(s->g); i++) {
        bool has_records = shapes.list[i]->is_closed;
        for (const di_fact *f = shapes.list[i]->facts; f && !has_records; f = f->next)
            has_records = f->kind == DI_FACT_OBJECT || f->kind == DI_FACT_ARRAY;
        if (!has_records) {
            push(s, &all, shapes.list[i]);
            continue;
        }
        di_shape shape = *shapes.list[i];
        shape.is_closed = false;
        shape.facts = NULL;
        const di_fact **end = &shape.facts;
        for (const di_fact *f = shapes.list[i]->facts; f; f = f->next) {
            di_fact *copy = di_gram_alloc(s->g, sizeof *copy);
            if (!copy)
                return all;
            *copy = *f;
            copy->is_negated |= f->kind == DI_FACT_OBJECT || f->kind == DI_FACT_ARRAY;
            *end = copy;
            end = &copy->next;
        }
        push_copy(s, &all, &shape);
    }
    return all;
}

/* What no keyword of the schema, nor of those that it applies to the same value, has looked at. */
static di_shapes read_rest(di_schema *s, const entry *e, const di_shapes *shapes) {
    di_shapes all = {0};
    bool is_items = e->id == KEY_UNEVALUATED_ITEMS;
    if (!expect_schema(s, e) || has_true(e->value))
        return *shapes;
    for (int32_t i = 0; i < shapes->n && !di_gram_has_failed(s->g); i++) {
        di_shape shape = *shapes->list[i];
        add_fact(s, &shape,
                 (di_fact){.kind = is_items ? DI_FACT_REST : DI_FACT_OTHERS,
                           .schema = e->schema,
                           .value = e->value,
                           .scope = shapes->list[i]->facts});
        push_copy(s, &all, &shape);
    }
    return all;
}

static di_shapes read_ref(di_schema *s, const entry *e) {
    if (strcmp(e->name, "$ref") != 0 && !di_schema_is_static(s, e->value) &&
        !di_schema_refuse(s, e->schema, e->name, "what it means depends on where it is reached from"))
        return (di_shapes){0};
    const di_json *target = di_schema_resolve(s, e->schema, e->name, e->value);
    return target ? read_schema(s, target, e->is_negated) : (di_shapes){0};
}

static di_shapes read_positive(di_schema *s, const di_json *schema) {
    bool has_applicators = false;
    di_shapes all = {0};
    di_shape facts = read_facts(s, schema, &has_applicators);
    bool is_top = facts.types == DI_TYPE_ALL && !facts.facts && !facts.is_closed && !facts.low.is_set &&
                  !facts.high.is_set && !facts.chars_at && !facts.items_at && !facts.keys_at;
    if (is_top)
        all = everything(s); /* so that a mere reference gives the very shapes that it refers to */
    else if (facts.types)
        push_copy(s, &all, &facts);
    if (!has_applicators)
        return all;
    for (int pass = 0; pass < 2; pass++) { /* unevaluated* look at what the others leave */
        for (void *it = di_json_iter(schema); it && all.n && !di_gram_has_failed(s->g);
             it = di_json_iter_next(schema, it)) {
            entry e = {schema, di_json_iter_value(it), di_json_iter_key(it, NULL), KEY_OTHER, false};
            e.id = keyword_of(e.name);
            di_shapes more;
            if (pass == 1) {
                if (e.id == KEY_UNEVALUATED_ITEMS || e.id == KEY_UNEVALUATED_PROPERTIES)
                    all = read_rest(s, &e, &all);
                continue;
            }
            switch (e.id) {
            case KEY_REF:
                more = read_ref(s, &e);
                break;
            case KEY_ALL_OF:
                more = expect_schemas(s, &e) ? read_all(s, e.value, false) : (di_shapes){0};
                break;
            case KEY_ANY_OF:
                more = expect_schemas(s, &e) ? read_any(s, e.value, false) : (di_shapes){0};
                break;
            case KEY_ONE_OF:
                more = expect_schemas(s, &e) ? read_one(s, &e) : (di_shapes){0};
                break;
            case KEY_NOT:
                more = expect_schema(s, &e) ? read_not(s, &e) : (di_shapes){0};
                break;
            case KEY_IF:
                more = read_if(s, &e);
                break;
            case KEY_DEPENDENCIES:
            case KEY_DEPENDENT_REQUIRED:
            case KEY_DEPENDENT_SCHEMAS:
                more = read_dependents(s, &e);
                break;
            default:
                continue;
            }
            all = cross(s, &all, &more);
        }
    }
    return all;
}

/* ---- a schema negated ---- */

/* The opposite of a count: below its minimum, above its maximum. */
static void negate_count(di_schema *s, const entry *e, di_shapes *all) {
    int64_t n = 0;
    di_shape shape = top;
    count_field field = field_of(&shape, e->id);
    if (!read_count(s, e, &n) || (is_min(e->id) ? n == 0 : n == INT64_MAX))
        return;
    if (is_min(e->id))
        *field.max = n - 1;
    else
        *field.min = n + 1;
    *field.at = e->schema;
    shape.types = field.type;
    push_copy(s, all, &shape);
}

static void negate_values(di_schema *s, const entry *e, di_shapes *all) {
    di_fact fact = {.kind = DI_FACT_VALUES,
                    .is_negated = true,
                    .is_list = e->id == KEY_ENUM,
                    .schema = e->schema,
                    .value = e->value};
    if (fact.is_list && !expect(s, e, di_json_array_len(e->value) > 0, "a list of at least one value"))
        return;
    int32_t types = di_schema_fact_types(&fact);
    if (types & (DI_TYPE_ARRAY | DI_TYPE_OBJECT))
        note_dropped(s, e); /* all arrays but one have no form */
    int32_t left = DI_TYPE_ALL & ~(types & (DI_TYPE_ARRAY | DI_TYPE_OBJECT | DI_TYPE_BOOL | DI_TYPE_NULL));
    di_shapes one = single(s, left, types & (DI_TYPE_STRING | DI_TYPE_NUMBER) ? &fact : NULL);
    push_all(s, all, &one);
}

/* Elements that fail their schema: of a list by their place; of all, by counting. */
static void negate_items(di_schema *s, const entry *e, di_shapes *all) {
    if (!check_record(s, e))
        return;
    size_t n_prefix = di_json_array_len(di_json_get(e->schema, "prefixItems"));
    if (di_json_is(e->value, DI_JSON_ARRAY)) {
        for (size_t i = 0; i < di_json_array_len(e->value); i++) {
            di_fact fact = {
                .kind = DI_FACT_ELEMENT, .schema = e->schema, .value = di_json_at(e->value, i), .index = (int64_t)i};
            di_shapes one = single(s, DI_TYPE_ARRAY, &fact);
            if (!has_true(fact.value))
                push_all(s, all, &one);
        }
    } else if (has_true(e->value)) {
        return;
    } else if (di_json_is(e->value, DI_JSON_BOOL)) { /* no elements: the opposite is to have one */
        di_shape shape = top;
        shape.types = DI_TYPE_ARRAY;
        shape.items_min = (int64_t)n_prefix + 1;
        shape.items_at = e->schema;
        push_copy(s, all, &shape);
    } else if (n_prefix == 0) {
        di_fact fact = {.kind = DI_FACT_CONTAINS,
                        .is_negated = true,
                        .schema = e->schema,
                        .value = e->value,
                        .index = 1,
                        .last = INT64_MAX};
        di_shapes one = single(s, DI_TYPE_ARRAY, &fact);
        push_all(s, all, &one);
    } else {
        note_dropped(s, e);
    }
}

static void negate_contains(di_schema *s, const entry *e, di_shapes *all) {
    di_fact fact = {.kind = DI_FACT_CONTAINS, .schema = e->schema, .value = e->value};
    if (!read_contains(s, e, &fact))
        return;
    int64_t min = fact.index, max = fact.last;
    if (min > 0) {
        fact.index = 0;
        fact.last = min - 1;
        di_shapes one = single(s, DI_TYPE_ARRAY, &fact);
        push_all(s, all, &one);
    }
    if (max != INT64_MAX) {
        fact.index = max + 1;
        fact.last = INT64_MAX;
        di_shapes one = single(s, DI_TYPE_ARRAY, &fact);
        push_all(s, all, &one);
    }
}

/* The opposite of facts about single values of one type. */
static void negate_fact(di_schema *s, const entry *e, di_shapes *all) {
    di_fact fact = {.is_negated = true, .schema = e->schema, .value = e->value};
    di_shape shape = top;
    switch (e->id) {
    case KEY_TYPE: {
        int32_t types = 0;
        if (!read_type(s, e, &types))
            return;
        shape.types = DI_TYPE_ALL & ~types;
        break;
    }
    case KEY_MINIMUM:
    case KEY_MAXIMUM:
    case KEY_EXCLUSIVE_MINIMUM:
    case KEY_EXCLUSIVE_MAXIMUM: {
        bool is_exclusive = false, is_low = false;
        if (!read_bound(s, e, &fact.decimal, &is_exclusive, &is_low))
            return;
        shape.types = DI_TYPE_NUMBER;
        tighten(is_low ? &shape.high : &shape.low, &fact.decimal, !is_exclusive, !is_low);
        break;
    }
    case KEY_MULTIPLE_OF:
        fact.kind = DI_FACT_MULTIPLE;
        if (!read_multiple(s, e, &fact))
            return;
        shape.types = is_one(&fact.decimal) ? DI_TYPE_FRACTION : DI_TYPE_NUMBER;
        if (!is_one(&fact.decimal))
            add_fact(s, &shape, fact);
        break;
    case KEY_PATTERN:
        fact.kind = DI_FACT_PATTERN;
        fact.text = di_json_str(e->value, &fact.len);
        shape.types = DI_TYPE_STRING;
        if (!expect(s, e, fact.text != NULL, "a regular expression"))
            return;
        add_fact(s, &shape, fact);
        break;
    case KEY_FORMAT:
        if (!expect(s, e, di_json_is(e->value, DI_JSON_STRING), "the name of a format"))
            return;
        fact.index = di_schema_format_find(di_json_str(e->value, NULL));
        /* A format takes fewer texts than the standard's where that has room: its opposite would take too many. */
        if (fact.index != -1)
            note_dropped(s, e);
        return;
    default:
        return;
    }
    if (shape.types)
        push_copy(s, all, &shape);
}

static void negate_required(di_schema *s, const entry *e, di_shapes *all) {
    if (!check_required(s, e))
        return;
    for (size_t i = 0; i < di_json_array_len(e->value); i++) {
        di_fact fact = key_fact(DI_FACT_KEY_ABSENT, e->schema, di_json_at(e->value, i));
        di_shapes one = single(s, DI_TYPE_OBJECT, &fact);
        push_all(s, all, &one);
    }
}

static void negate_properties(di_schema *s, const entry *e, di_shapes *all) {
    if (!check_record(s, e))
        return;
    for (void *it = di_json_iter(e->value); it; it = di_json_iter_next(e->value, it)) {
        if (e->id == KEY_PATTERN_PROPERTIES) {
            if (!has_true(di_json_iter_value(it)))
                note_dropped(s, e);
            continue;
        }
        if (has_true(di_json_iter_value(it)))
            continue;
        di_fact fact = key_fact_of(DI_FACT_KEY_FAILS, e->schema, it, di_json_iter_value(it));
        di_shapes one = single(s, DI_TYPE_OBJECT, &fact);
        push_all(s, all, &one);
    }
}

static void negate_dependents(di_schema *s, const entry *e, di_shapes *all) {
    if (!expect_schema_map(s, e, e->id != KEY_DEPENDENT_REQUIRED, e->id != KEY_DEPENDENT_SCHEMAS))
        return;
    for (void *it = di_json_iter(e->value); it && !di_gram_has_failed(s->g); it = di_json_iter_next(e->value, it)) {
        const di_json *asked = di_json_iter_value(it);
        di_fact there = key_fact_of(DI_FACT_KEY_REQUIRED, e->schema, it, NULL);
        di_shapes with = single(s, DI_TYPE_OBJECT, &there), what = {0};
        if (di_json_is(asked, DI_JSON_ARRAY)) {
            entry list = *e;
            list.value = asked;
            negate_required(s, &list, &what);
        } else {
            what = read_schema(s, asked, true);
        }
        what = cross(s, &with, &what);
        push_all(s, all, &what);
    }
}

/* not (if and then, or else): the condition with what `then` excludes, its opposite with what `else` excludes. */
static di_shapes negate_if(di_schema *s, const entry *e) {
    const di_json *then = keyword_schema(s, e->schema, "then"), *otherwise = keyword_schema(s, e->schema, "else");
    di_shapes all = {0};
    if (!expect_schema(s, e))
        return all;
    if (then) {
        di_shapes yes = read_schema(s, e->value, false), what = read_schema(s, then, true);
        yes = cross(s, &yes, &what);
        push_all(s, &all, &yes);
    }
    if (otherwise) {
        di_shapes no = read_schema(s, e->value, true), what = read_schema(s, otherwise, true);
        no = cross(s, &no, &what);
        push_all(s, &all, &no);
    }
    return all;
}

static di_shapes read_negative(di_schema *s, const di_json *schema) {
    di_shapes all = {0}, more;
    for (void *it = di_json_iter(schema); it && !di_gram_has_failed(s->g); it = di_json_iter_next(schema, it)) {
        entry e = {schema, di_json_iter_value(it), di_json_iter_key(it, NULL), KEY_OTHER, true};
        e.id = keyword_of(e.name);
        switch (e.id) {
        case KEY_REF:
            more = read_ref(s, &e);
            push_all(s, &all, &more);
            break;
        case KEY_ALL_OF:
            more = expect_schemas(s, &e) ? read_any(s, e.value, true) : (di_shapes){0};
            push_all(s, &all, &more);
            break;
        case KEY_ONE_OF: /* or two of them: that is left out */
        case KEY_ANY_OF:
            more = expect_schemas(s, &e) ? read_all(s, e.value, true) : (di_shapes){0};
            if (e.id == KEY_ONE_OF)
                note_dropped(s, &e);
            push_all(s, &all, &more);
            break;
        case KEY_NOT:
            more = expect_schema(s, &e) ? read_schema(s, e.value, false) : (di_shapes){0};
            push_all(s, &all, &more);
            break;
        case KEY_IF:
            more = negate_if(s, &e);
            push_all(s, &all, &more);
            break;
        case KEY_DEPENDENCIES:
        case KEY_DEPENDENT_REQUIRED:
        case KEY_DEPENDENT_SCHEMAS:
            negate_dependents(s, &e, &all);
            break;
        case KEY_ENUM:
        case KEY_CONST:
            negate_values(s, &e, &all);
            break;
        case KEY_MIN_LENGTH:
        case KEY_MAX_LENGTH:
        case KEY_MIN_ITEMS:
        case KEY_MAX_ITEMS:
        case KEY_MIN_PROPERTIES:
        case KEY_MAX_PROPERTIES:
            negate_count(s, &e, &all);
            break;
        case KEY_PREFIX_ITEMS:
        case KEY_ITEMS:
            negate_items(s, &e, &all);
            break;
        case KEY_CONTAINS:
            negate_contains(s, &e, &all);
            break;
        case KEY_PROPERTIES:
        case KEY_PATTERN_PROPERTIES:
            negate_properties(s, &e, &all);
            break;
        case KEY_REQUIRED:
            negate_required(s, &e, &all);
            break;
        case KEY_UNIQUE_ITEMS:
            if (expect(s, &e, di_json_is(e.value, DI_JSON_BOOL), "true or false") && di_json_bool(e.value))
                note_dropped(s, &e);
            break;
        case KEY_ADDITIONAL_ITEMS:
        case KEY_ADDITIONAL_PROPERTIES:
        case KEY_PROPERTY_NAMES:
        case KEY_UNEVALUATED_ITEMS:
        case KEY_UNEVALUATED_PROPERTIES:
            if (expect_schema(s, &e) && !has_true(e.value))
                note_dropped(s, &e);
            break;
        default:
            negate_fact(s, &e, &all);
        }
    }
    return all;
}

/* ---- readings ---- */

static di_reading *reading_of(di_schema *s, const di_json *schema, bool is_negated) {
    uint64_t h = di_mix64((uint64_t)(uintptr_t)schema ^ (is_negated ? 1 : 0)) % DI_SCHEMA_BUCKETS;
    di_reading *r = s->readings[h];
    while (r && (r->atom.schema != schema || r->atom.is_negated != is_negated))
        r = r->next;
    if (r || !(r = di_gram_alloc(s->g, sizeof *r)))
        return r;
    *r = (di_reading){.atom = {schema, is_negated}, .next = s->readings[h]};
    s->readings[h] = r;
    return r;
}

static di_shapes read_schema(di_schema *s, const di_json *schema, bool is_negated) {
    if (di_json_is(schema, DI_JSON_BOOL))
        return di_json_bool(schema) != is_negated ? everything(s) : (di_shapes){0};
    di_reading *r = reading_of(s, schema, is_negated);
    if (!r || di_gram_status(s->g, NULL))
        return (di_shapes){0};
    if (r->is_done) {
        if (!s->partial) {
            s->partial = r->shapes.partial;
            s->partial_keyword = r->shapes.partial_keyword;
        }
        return r->shapes;
    }
    if (r->is_busy && s->probing) { /* the schema around the one that is looked at: nothing is known of it yet */
        s->has_guessed = true;
        return everything(s);
    }
    if (r->is_busy) {
        di_schema_fail(s, schema, "", "refers to itself without anything in between");
        return (di_shapes){0};
    }
    if (s->depth >= s->g->limits.depth_max) {
        di_gram_fail(s->g, DI_ERR_RANGE, "the schema is nested deeper than %d", s->g->limits.depth_max);
        return (di_shapes){0};
    }
    r->is_busy = true;
    s->depth++;
    bool had_guessed = s->has_guessed;
    const di_json *partial = s->partial;
    const char *partial_keyword = s->partial_keyword;
    s->has_guessed = false;
    s->partial = NULL;
    di_shapes shapes = is_negated ? read_negative(s, schema) : read_positive(s, schema);
    /* What rests on a guess is good for the one probe that asked. */
    r->is_done = !s->has_guessed;
    shapes.partial = s->partial;
    shapes.partial_keyword = s->partial_keyword;
    s->has_guessed |= had_guessed;
    if (partial) {
        s->partial = partial;
        s->partial_keyword = partial_keyword;
    }
    s->depth--;
    r->is_busy = false;
    r->shapes = shapes;
    return shapes;
}

di_shapes di_schema_shapes(di_schema *s, const di_goal *goal) {
    if (goal->is_never)
        return (di_shapes){0};
    di_shapes all = everything(s);
    const di_json *partial = s->partial;
    s->partial = NULL;
    for (int32_t i = 0; i < goal->n && all.n && !di_gram_has_failed(s->g); i++) {
        di_shapes one = read_schema(s, goal->atoms[i].schema, goal->atoms[i].is_negated);
        all = cross(s, &all, &one);
    }
    all.partial = s->partial;
    all.partial_keyword = s->partial_keyword;
    if (partial)
        s->partial = partial;
    return all;
}

static bool is_never(di_schema *s, const di_atoms *atoms) {
    di_goal *goal = di_schema_goal(s, atoms);
    if (!goal || goal->is_never)
        return goal != NULL;
    probe p = probe_begin(s);
    di_shapes shapes = di_schema_shapes(s, goal);
    probe_end(s, &p);
    return shapes.n == 0 && !shapes.partial && !di_gram_has_failed(s->g);
}

bool di_schema_holds(di_schema *s, const di_json *schema, const di_json *value) {
    di_shapes shapes = read_schema(s, schema, false);
    for (int32_t i = 0; i < shapes.n; i++) {
        if (di_schema_shape_holds(s, shapes.list[i], value, NULL))
            return true;
    }
    if (shapes.partial && !s->probing)
        di_schema_fail(s, shapes.partial, shapes.partial_keyword, "can't be guaranteed of the values of an enum");
    s->has_guessed |= shapes.partial != NULL;
    return shapes.partial != NULL;
}
