/* Values of a JSON schema: enum and const as texts, and whether a value satisfies a schema.
 *
 * A list of values is a finite language, so all that a schema says besides is settled by looking at each value; what
 * is left is written out with white space between its tokens. */
#include "schema_internal.h"

/* ---- equality: numbers by value, objects without order ---- */

bool di_schema_equal(di_schema *s, const di_json *a, const di_json *b) {
    di_json_type kind = di_json_kind(a);
    if ((di_schema_type_of(a) & DI_TYPE_NUMBER) && (di_schema_type_of(b) & DI_TYPE_NUMBER)) {
        if (kind == DI_JSON_INT && di_json_kind(b) == DI_JSON_INT)
            return di_json_int(a) == di_json_int(b);
        di_decimal x, y;
        return di_decimal_read(s, &x, a) && di_decimal_read(s, &y, b) && di_decimal_compare(&x, &y) == 0;
    }
    if (kind != di_json_kind(b))
        return false;
    switch (kind) {
    case DI_JSON_BOOL:
        return di_json_bool(a) == di_json_bool(b);
    case DI_JSON_STRING: {
        size_t n_a = 0, n_b = 0;
        const char *x = di_json_str(a, &n_a), *y = di_json_str(b, &n_b);
        return n_a == n_b && memcmp(x, y, n_a) == 0;
    }
    case DI_JSON_ARRAY:
        if (di_json_array_len(a) != di_json_array_len(b))
            return false;
        for (size_t i = 0; i < di_json_array_len(a); i++) {
            if (!di_schema_equal(s, di_json_at(a, i), di_json_at(b, i)))
                return false;
        }
        return true;
    case DI_JSON_OBJECT:
        if (di_json_object_len(a) != di_json_object_len(b))
            return false;
        for (void *it = di_json_iter(a); it; it = di_json_iter_next(a, it)) {
            const di_json *other = di_json_get(b, di_json_iter_key(it, NULL));
            if (!other || !di_schema_equal(s, di_json_iter_value(it), other))
                return false;
        }
        return true;
    default:
        return true; /* null */
    }
}

bool di_schema_has_value(di_schema *s, const di_fact *values, const di_json *value) {
    if (!values->is_list)
        return di_schema_equal(s, values->value, value);
    for (size_t i = 0; i < di_json_array_len(values->value); i++) {
        if (di_schema_equal(s, di_json_at(values->value, i), value))
            return true;
    }
    return false;
}

/* ---- values against shapes ---- */

static bool atoms_hold(di_schema *s, const di_atoms *atoms, const di_json *value) {
    if (atoms->is_never)
        return false;
    for (int32_t i = 0; i < atoms->n; i++) {
        if (di_schema_holds(s, atoms->list[i].schema, value) == atoms->list[i].is_negated)
            return false;
    }
    return true;
}

static bool number_holds(di_schema *s, const di_shape *shape, const di_json *value) {
    di_decimal d;
    if (!di_decimal_read(s, &d, value))
        return false;
    int low = shape->low.is_set ? di_decimal_compare(&d, &shape->low.value) : 1;
    int high = shape->high.is_set ? di_decimal_compare(&d, &shape->high.value) : -1;
    if (low < 0 || (low == 0 && shape->low.is_exclusive) || high > 0 || (high == 0 && shape->high.is_exclusive))
        return false;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        bool is_known = true;
        if (f->kind == DI_FACT_MULTIPLE && di_decimal_is_multiple(&d, &f->decimal, &is_known) == f->is_negated)
            return false;
        if (!is_known) {
            di_schema_fail(s, f->schema, "multipleOf", "can't be guaranteed: takes too many states");
            return false;
        }
    }
    return true;
}

static bool string_holds(di_schema *s, const di_shape *shape, const di_json *value) {
    size_t len = 0;
    const char *text = di_json_str(value, &len);
    int64_t n = di_schema_code_points(text, len);
    if (n < shape->chars_min || n > shape->chars_max)
        return false;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        const di_regular *set = NULL;
        if (f->kind == DI_FACT_PATTERN)
            set = di_schema_pattern_set(s, f->schema, "pattern", f->text, f->len);
        else if (f->kind == DI_FACT_FORMAT)
            set = di_schema_format_set(s, (int32_t)f->index);
        else
            continue;
        if (!set || di_regular_matches(set, text, len) == f->is_negated)
            return false;
    }
    return true;
}

static bool array_holds(di_schema *s, const di_shape *shape, const di_json *value) {
    int64_t n = (int64_t)di_json_array_len(value);
    if (n < shape->items_min || n > shape->items_max)
        return false;
    for (int64_t i = 0; i < n; i++) {
        di_atoms atoms = {0};
        di_schema_element_atoms(s, shape->facts, i, &atoms);
        if (!atoms_hold(s, &atoms, di_json_at(value, (size_t)i)))
            return false;
    }
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_ELEMENT && f->index >= n)
            return false;
        if (f->kind == DI_FACT_CONTAINS) {
            int64_t count = 0;
            for (int64_t i = 0; i < n; i++)
                count += di_schema_holds(s, f->value, di_json_at(value, (size_t)i)) != f->is_negated;
            if (count < f->index || count > f->last)
                return false;
        }
        for (int64_t i = 0; f->kind == DI_FACT_UNIQUE && i < n; i++) {
            for (int64_t k = 0; k < i; k++) {
                if (di_schema_equal(s, di_json_at(value, (size_t)i), di_json_at(value, (size_t)k)))
                    return false;
            }
        }
    }
    return true;
}

static bool object_holds(di_schema *s, const di_shape *shape, const di_json *value) {
    int64_t n = (int64_t)di_json_object_len(value);
    if (n < shape->keys_min || n > shape->keys_max)
        return false;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        bool is_key = f->kind == DI_FACT_KEY_REQUIRED || f->kind == DI_FACT_KEY_ABSENT || f->kind == DI_FACT_KEY_FAILS;
        if (is_key && !di_json_get(value, f->text) == (f->kind != DI_FACT_KEY_ABSENT))
            return false;
    }
    for (void *it = di_json_iter(value); it; it = di_json_iter_next(value, it)) {
        size_t len = 0;
        const char *key = di_json_iter_key(it, &len);
        di_atoms atoms = {0};
        di_schema_key_atoms(s, shape->facts, key, len, &atoms);
        if (!atoms_hold(s, &atoms, di_json_iter_value(it)) || !di_schema_key_fits(s, shape->facts, key, len))
            return false;
    }
    return true;
}

bool di_schema_shape_holds(di_schema *s, const di_shape *shape, const di_json *value, const di_fact *except) {
    int32_t type = di_schema_type_of(value);
    if (!(shape->types & type))
        return false;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_VALUES && f != except && di_schema_has_value(s, f, value) == f->is_negated)
            return false;
    }
    if (type & DI_TYPE_NUMBER)
        return number_holds(s, shape, value);
    if (type == DI_TYPE_STRING)
        return string_holds(s, shape, value);
    if (type == DI_TYPE_ARRAY)
        return array_holds(s, shape, value);
    return type != DI_TYPE_OBJECT || object_holds(s, shape, value);
}

/* ---- values as texts ---- */

static const di_node *bytes(di_schema *s, const char *text) {
    return di_node_bytes(s->g, text, strlen(text));
}

/* A number as JSON writes it: whole ones without a point. */
static const di_node *number_text(di_schema *s, const di_json *value) {
    di_decimal d;
    if (!di_decimal_read(s, &d, value))
        return di_node_never();
    di_strbuf text = {0};
    if (d.is_negative)
        di_strbuf_putc(&text, '-');
    di_strbuf_append(&text, d.digits, (size_t)d.n_whole);
    if (d.n_fraction) {
        di_strbuf_putc(&text, '.');
        di_strbuf_append(&text, d.digits + d.n_whole, (size_t)d.n_fraction);
    }
    const di_node *node = di_node_bytes(s->g, di_strbuf_str(&text), text.len);
    di_strbuf_deinit(&text);
    return node;
}

const di_node *di_schema_literal_value(di_schema *s, const di_json *value) {
    di_gram *g = s->g;
    switch (di_json_kind(value)) {
    case DI_JSON_NULL:
        return bytes(s, "null");
    case DI_JSON_BOOL:
        return bytes(s, di_json_bool(value) ? "true" : "false");
    case DI_JSON_STRING: {
        size_t len = 0;
        const char *text = di_json_str(value, &len);
        return di_schema_literal(s, text, len);
    }
    case DI_JSON_ARRAY:
    case DI_JSON_OBJECT: {
        bool is_array = di_json_is(value, DI_JSON_ARRAY);
        size_t n = is_array ? di_json_array_len(value) : di_json_object_len(value), k = 0;
        const di_node **parts = di_gram_alloc(g, (8 * n + 3) * sizeof *parts), *space = di_schema_space(s);
        if (!parts)
            return di_node_never();
        parts[k++] = bytes(s, is_array ? "[" : "{");
        parts[k++] = space;
        void *it = is_array ? NULL : di_json_iter(value);
        for (size_t i = 0; i < n; i++) {
            if (i > 0) {
                parts[k++] = bytes(s, ",");
                parts[k++] = space;
            }
            if (!is_array) {
                size_t len = 0;
                const char *key = di_json_iter_key(it, &len);
                parts[k++] = di_schema_literal(s, key, len);
                parts[k++] = space;
                parts[k++] = bytes(s, ":");
                parts[k++] = space;
            }
            parts[k++] = di_schema_literal_value(s, is_array ? di_json_at(value, i) : di_json_iter_value(it));
            parts[k++] = space;
            it = is_array ? NULL : di_json_iter_next(value, it);
        }
        parts[k++] = bytes(s, is_array ? "]" : "}");
        return di_node_seq(g, parts, k);
    }
    default:
        return number_text(s, value);
    }
}

const di_node *di_schema_values(di_schema *s, const di_shape *shape, const di_fact *values) {
    size_t n = values->is_list ? di_json_array_len(values->value) : 1, n_kept = 0;
    const di_node **list = di_gram_alloc(s->g, DI_MAX(n, (size_t)1) * sizeof *list);
    if (!list)
        return di_node_never();
    for (size_t i = 0; i < n && !di_gram_status(s->g, NULL); i++) {
        const di_json *value = values->is_list ? di_json_at(values->value, i) : values->value;
        if (di_schema_shape_holds(s, shape, value, values))
            list[n_kept++] = di_schema_literal_value(s, value);
    }
    return di_node_alt(s->g, list, n_kept);
}
