/* JSON schemas (draft 2020-12 and the older spellings that are still sent) as grammars.
 *
 * Here are the front end's entry points, goals and their nodes, errors with JSON pointers, and what $ref means. The
 * rest is in the schema_*.c files; schema_internal.h says how they work together.
 *
 * Choices: keys come in the schema's order; an object with `properties` and without additionalProperties has no other
 * keys; white space between tokens is bounded, with none around the value; numbers have their canonical spelling. */
#include <ctype.h>

#include "schema_internal.h"

/* Indentation of a deep line fits; a model that only writes spaces is stopped. */
enum { INDENT_MAX = 24 };

/* ---- errors ---- */

/* Appends the pointer of `schema` below `at`; false, and nothing appended, where it isn't there. */
static bool find_pointer(const di_json *at, const di_json *schema, di_strbuf *out) {
    if (at == schema)
        return true;
    size_t len = out->len;
    if (di_json_is(at, DI_JSON_ARRAY)) {
        for (size_t i = 0; i < di_json_array_len(at); i++) {
            di_strbuf_printf(out, "/%zu", i);
            if (find_pointer(di_json_at(at, i), schema, out))
                return true;
            di_strbuf_truncate(out, len);
        }
    }
    for (void *it = di_json_is(at, DI_JSON_OBJECT) ? di_json_iter(at) : NULL; it; it = di_json_iter_next(at, it)) {
        size_t n = 0;
        const char *key = di_json_iter_key(it, &n);
        di_strbuf_putc(out, '/');
        for (size_t i = 0; i < n; i++) {
            if (key[i] == '~' || key[i] == '/')
                di_strbuf_puts(out, key[i] == '~' ? "~0" : "~1");
            else
                di_strbuf_putc(out, key[i]);
        }
        if (find_pointer(di_json_iter_value(it), schema, out))
            return true;
        di_strbuf_truncate(out, len);
    }
    return false;
}

void di_schema_fail(di_schema *s, const di_json *schema, const char *keyword, const char *format, ...) {
    if (di_gram_has_failed(s->g))
        return;
    char message[512];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    di_strbuf pointer = {0};
    /* Only objects are told apart by where they are: true and false are the same value everywhere. */
    if (di_json_is(schema, DI_JSON_OBJECT))
        find_pointer(s->root, schema, &pointer);
    if (*keyword)
        di_strbuf_printf(&pointer, "/%s", keyword);
    bool has_pointer = pointer.len > 0;
    di_gram_fail(s->g, DI_ERR_REQUEST, "%.400s: %s", has_pointer ? di_strbuf_str(&pointer) : "the schema", message);
    di_strbuf_deinit(&pointer);
}

bool di_schema_refuse(di_schema *s, const di_json *schema, const char *keyword, const char *why) {
    if (s->is_lax)
        return true;
    di_schema_fail(s, schema, keyword, why ? "can't be guaranteed: %s" : "can't be guaranteed", why);
    return false;
}

/* ---- references ---- */

static const char *id_of(const di_json *schema) {
    const char *id = di_json_str(di_json_get(schema, "$id"), NULL);
    return id ? id : di_json_str(di_json_get(schema, "id"), NULL);
}

/* Keywords whose values are data, in which nothing is a schema. */
static bool is_data(const char *key) {
    return strcmp(key, "enum") == 0 || strcmp(key, "const") == 0 || strcmp(key, "default") == 0 ||
           strcmp(key, "examples") == 0 || strcmp(key, "example") == 0;
}

static bool has_scheme(const char *uri) {
    size_t n = strspn(uri, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+.-");
    return n > 0 && uri[n] == ':';
}

/* ref, which has n bytes, as seen from base; without a fragment. */
static void resolve_uri(di_strbuf *out, const char *base, const char *ref, size_t n) {
    size_t base_len = base ? strcspn(base, "#") : 0;
    size_t authority = 0; /* end of it */
    if (base && has_scheme(base)) {
        authority = strcspn(base, ":") + 1;
        if (strncmp(base + authority, "//", 2) == 0)
            authority += 2 + strcspn(base + authority + 2, "/?#");
    }
    if (n == 0)
        di_strbuf_append(out, base, base_len);
    else if (!base || has_scheme(ref)) {
        di_strbuf_append(out, ref, n);
    } else if (ref[0] == '/') {
        bool has_authority = n > 1 && ref[1] == '/';
        di_strbuf_append(out, base, has_authority && authority ? strcspn(base, ":") + 1 : authority);
        di_strbuf_append(out, ref, n);
    } else {
        size_t end = base_len;
        while (end > authority && base[end - 1] != '/')
            end--;
        di_strbuf_append(out, base, end);
        size_t skip = n > 2 && ref[0] == '.' && ref[1] == '/' ? 2 : 0;
        di_strbuf_append(out, ref + skip, n - skip);
    }
}

/* A search through all schemas of a document: for one that has an id, an anchor, or for the resource around one. */
typedef struct search {
    const char *uri; /* NULL: any nested id will do */
    const char *anchor;
    size_t anchor_len;
    const di_json *around; /* look for the resource that this is in */
    const di_json *found;
    di_strbuf base; /* of the resource found for `around` */
} search;

/* Anchors belong to the resource that they are in: a search for one starts at it and stays there. */
static void look_through(search *q, const di_json *at, const di_json *resource, const char *base, bool is_root) {
    if (q->found)
        return;
    di_strbuf own = {0};
    if (di_json_is(at, DI_JSON_OBJECT)) {
        const char *id = id_of(at);
        if (id && *id != '#') {
            resolve_uri(&own, base, id, strcspn(id, "#"));
            base = di_strbuf_str(&own);
            resource = at;
            if (q->anchor && !is_root)
                goto out;
            bool is_it = q->uri ? strcmp(base, q->uri) == 0 : !q->anchor && !q->around && !is_root;
            if (is_it)
                q->found = at;
        }
        static const char *const anchors[] = {"$anchor", "$dynamicAnchor"};
        for (size_t i = 0; i < DI_COUNT(anchors) && q->anchor; i++) {
            size_t len = 0;
            const char *anchor = di_json_str(di_json_get(at, anchors[i]), &len);
            if (anchor && len == q->anchor_len && memcmp(anchor, q->anchor, len) == 0)
                q->found = at;
        }
        if (q->anchor && id && *id == '#' && strlen(id + 1) == q->anchor_len &&
            memcmp(id + 1, q->anchor, q->anchor_len) == 0)
            q->found = at; /* draft 4 */
        if (q->around == at) {
            q->found = resource;
            di_strbuf_puts(&q->base, base ? base : "");
        }
        for (void *it = di_json_iter(at); it && !q->found; it = di_json_iter_next(at, it)) {
            if (!is_data(di_json_iter_key(it, NULL)))
                look_through(q, di_json_iter_value(it), resource, base, false);
        }
    }
    for (size_t i = 0; i < di_json_array_len(at) && !q->found; i++)
        look_through(q, di_json_at(at, i), resource, base, false);
out:
    di_strbuf_deinit(&own);
}

static void look_for_ids(di_schema *s) {
    if (s->has_looked_for_ids)
        return;
    search q = {0};
    look_through(&q, s->root, s->root, NULL, true);
    s->has_ids = q.found != NULL;
    s->has_looked_for_ids = true;
}

bool di_schema_is_static(di_schema *s, const di_json *ref) {
    look_for_ids(s);
    return !s->has_ids || !di_json_is(ref, DI_JSON_STRING); /* within one resource the first anchor is the only one */
}

/* Follows a JSON pointer with its %XX escapes; NULL where it leads nowhere. */
static const di_json *follow(const di_json *at, const char *pointer) {
    di_strbuf key = {0};
    while (at && *pointer == '/') {
        di_strbuf_reset(&key);
        for (pointer++; *pointer && *pointer != '/'; pointer++) {
            unsigned char c = (unsigned char)*pointer;
            if (c == '%' && isxdigit((unsigned char)pointer[1]) && isxdigit((unsigned char)pointer[2])) {
                char hex[3] = {pointer[1], pointer[2], 0};
                c = (unsigned char)strtoul(hex, NULL, 16);
                pointer += 2;
            }
            if (c == '~' && (pointer[1] == '0' || pointer[1] == '1'))
                c = *++pointer == '0' ? '~' : '/';
            di_strbuf_putc(&key, (char)c);
        }
        int64_t index = 0;
        if (di_json_is(at, DI_JSON_ARRAY))
            at = di_parse_i64(di_strbuf_str(&key), &index) && index >= 0 ? di_json_at(at, (size_t)index) : NULL;
        else
            at = di_json_get(at, di_strbuf_str(&key));
    }
    di_strbuf_deinit(&key);
    return at;
}

const di_json *di_schema_resolve(di_schema *s, const di_json *schema, const char *keyword, const di_json *ref) {
    const char *text = di_json_str(ref, NULL);
    if (!text) {
        di_schema_fail(s, schema, keyword, "is %s, expected a reference", di_json_kind_name(ref));
        return NULL;
    }
    const char *hash = strchr(text, '#'), *fragment = hash ? hash + 1 : "";
    size_t uri_len = hash ? (size_t)(hash - text) : strlen(text);
    look_for_ids(s);
    const di_json *resource = s->root;
    if (uri_len > 0 || s->has_ids) {
        search around = {.around = schema}, q = {0};
        di_strbuf uri = {0};
        look_through(&around, s->root, s->root, NULL, true);
        resource = around.found;
        if (uri_len > 0) {
            resolve_uri(&uri, around.base.len ? di_strbuf_str(&around.base) : NULL, text, uri_len);
            q.uri = di_strbuf_str(&uri);
            look_through(&q, s->root, s->root, NULL, true);
            resource = q.found;
        }
        di_strbuf_deinit(&uri);
        di_strbuf_deinit(&around.base);
    }
    const di_json *target = resource;
    if (resource && *fragment == '/') {
        target = follow(resource, fragment);
    } else if (resource && *fragment) {
        search q = {.anchor = fragment, .anchor_len = strlen(fragment)};
        look_through(&q, resource, resource, NULL, true);
        target = q.found;
    }
    if (target && !di_json_is(target, DI_JSON_OBJECT) && !di_json_is(target, DI_JSON_BOOL)) {
        di_schema_fail(s, schema, keyword, "'%.200s' is %s, expected a schema", text, di_json_kind_name(target));
        return NULL;
    }
    if (!target) {
        if (!resource && s->is_lax)
            return di_json_at(s->simple, 2); /* true: nothing is known of a schema elsewhere */
        di_schema_fail(s, schema, keyword,
                       resource ? "'%.200s' is not in the schema"
                                : "can't be guaranteed: '%.200s' is not part of the schema",
                       text);
    }
    return target;
}

/* ---- goals ---- */

void di_atoms_add(di_schema *s, di_atoms *atoms, const di_json *schema, bool is_negated) {
    if (di_json_is(schema, DI_JSON_BOOL) || (!is_negated && di_json_object_len(schema) == 0)) {
        bool holds = di_json_is(schema, DI_JSON_BOOL) ? di_json_bool(schema) : true;
        atoms->is_never |= holds == is_negated;
        return;
    }
    for (int32_t i = 0; i < atoms->n; i++) {
        if (atoms->list[i].schema == schema) {
            atoms->is_never |= atoms->list[i].is_negated != is_negated;
            return;
        }
    }
    if (atoms->n == atoms->cap) {
        int32_t cap = DI_MAX(2 * atoms->cap, 4);
        di_atom *grown = di_gram_alloc(s->g, (size_t)cap * sizeof *grown);
        if (!grown)
            return;
        if (atoms->n)
            memcpy(grown, atoms->list, (size_t)atoms->n * sizeof *grown);
        atoms->list = grown;
        atoms->cap = cap;
    }
    /* Sorted, so that the same set is found again. */
    int32_t at = atoms->n++;
    for (; at > 0 && (uintptr_t)atoms->list[at - 1].schema > (uintptr_t)schema; at--)
        atoms->list[at] = atoms->list[at - 1];
    atoms->list[at] = (di_atom){schema, is_negated};
}

di_goal *di_schema_goal(di_schema *s, const di_atoms *atoms) {
    int32_t n = atoms->is_never ? 0 : atoms->n;
    uint64_t h = di_mix64(atoms->is_never ? 1 : 2);
    for (int32_t i = 0; i < n; i++)
        h = di_mix64(h ^ (uint64_t)(uintptr_t)atoms->list[i].schema ^ (atoms->list[i].is_negated ? 1 : 0));
    di_goal **bucket = &s->goals[h % DI_SCHEMA_BUCKETS];
    for (di_goal *goal = *bucket; goal; goal = goal->next) {
        bool is_same = goal->n == n && goal->is_never == atoms->is_never;
        for (int32_t i = 0; i < n && is_same; i++)
            is_same = goal->atoms[i].schema == atoms->list[i].schema &&
                      goal->atoms[i].is_negated == atoms->list[i].is_negated;
        if (is_same)
            return goal;
    }
    di_goal *goal = di_gram_alloc(s->g, sizeof *goal + (size_t)n * sizeof *atoms->list);
    if (!goal)
        return NULL;
    di_atom *copy = (di_atom *)(goal + 1);
    if (n)
        memcpy(copy, atoms->list, (size_t)n * sizeof *copy);
    *goal = (di_goal){.is_never = atoms->is_never, .n = n, .atoms = copy, .rule = -1, .next = *bucket};
    return *bucket = goal;
}

const di_fact *di_schema_values_of(const di_shape *shape) {
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_VALUES && !f->is_negated)
            return f;
    }
    return NULL;
}

/* Without the types of `without`. */
static const di_node *goal_node(di_schema *s, const di_goal *goal, int32_t without) {
    di_gram *g = s->g;
    di_shapes shapes = di_schema_shapes(s, goal);
    const di_node **list = di_gram_alloc(g, (4 * (size_t)shapes.n + 3) * sizeof *list);
    size_t n = 0;
    int32_t plain = 0;
    if (!list)
        return di_node_never();
    for (int32_t i = 0; i < shapes.n && !di_gram_status(g, NULL); i++) {
        di_shape rest = *shapes.list[i];
        const di_shape *shape = &rest;
        const di_fact *values = di_schema_values_of(shape);
        rest.types &= ~without;
        if (values) {
            list[n++] = di_schema_values(s, shape, values);
            continue;
        }
        plain |= shape->types;
        if (shape->types & DI_TYPE_STRING)
            list[n++] = di_schema_string(s, shape);
        if (shape->types & DI_TYPE_NUMBER)
            list[n++] = di_schema_number(s, shape);
        if (shape->types & DI_TYPE_ARRAY)
            list[n++] = di_schema_array(s, shape);
        if (shape->types & DI_TYPE_OBJECT)
            list[n++] = di_schema_object(s, shape);
    }
    static const struct {
        int32_t type;
        const char *text;
    } words[] = {{DI_TYPE_NULL, "null"}, {DI_TYPE_FALSE, "false"}, {DI_TYPE_TRUE, "true"}};
    for (size_t i = 0; i < DI_COUNT(words); i++) {
        if (plain & words[i].type)
            list[n++] = di_node_bytes(g, words[i].text, strlen(words[i].text));
    }
    const di_node *node = di_node_alt(g, list, n);
    if (node->kind == DI_NODE_NEVER && shapes.partial)
        di_schema_fail(s, shapes.partial, shapes.partial_keyword, "can't be guaranteed");
    return node;
}

/* Where nothing satisfies a schema, the innermost one is named, unless it isn't needed. */
static void note_empty(di_schema *s, const di_goal *goal) {
    if (!s->empty && goal->n && !di_gram_has_failed(s->g))
        s->empty = goal->atoms[goal->n - 1].schema;
}

const di_node *di_schema_node(di_schema *s, di_goal *goal) {
    di_gram *g = s->g;
    if (!goal || goal->is_never || di_gram_has_failed(g))
        return di_node_never();
    if (goal->state == DI_GOAL_DONE)
        return goal->node;
    if (goal->state == DI_GOAL_BUSY) {
        if (goal->rule < 0)
            goal->rule = di_gram_rule_add(g, "value", 5);
        return di_node_rule(g, goal->rule);
    }
    if (s->depth >= g->limits.depth_max) {
        di_gram_fail(g, DI_ERR_RANGE, "the schema is nested deeper than %d", g->limits.depth_max);
        return di_node_never();
    }
    goal->state = DI_GOAL_BUSY;
    s->depth++;
    const di_node *node = goal_node(s, goal, 0);
    s->depth--;
    if (node->kind == DI_NODE_NEVER)
        note_empty(s, goal);
    if (goal->rule >= 0) {
        di_gram_rule_define(g, goal->rule, node);
        if (node->kind != DI_NODE_NEVER)
            node = di_node_rule(g, goal->rule);
    }
    goal->node = node;
    goal->state = DI_GOAL_DONE;
    return node;
}

/* White space between tokens: one blank, and a new line with its indentation. That is what people and models write; and
 * a model that has nothing to say can't go on with blanks for ever. */
const di_node *di_schema_space(di_schema *s) {
    static const di_code_range blanks[] = {{'\t', '\t'}, {'\r', '\r'}, {' ', ' '}},
                               indents[] = {{'\t', '\t'}, {' ', ' '}};
    if (!s->space) {
        const di_node *blank = di_node_repeat(s->g, di_node_class(s->g, blanks, DI_COUNT(blanks), false), 0, 1);
        const di_node *indent =
            di_node_repeat(s->g, di_node_class(s->g, indents, DI_COUNT(indents), false), 0, INDENT_MAX);
        const di_node *line = di_node_seq2(s->g, di_node_code(s->g, '\n'), indent);
        s->space = di_node_seq2(s->g, blank, di_node_repeat(s->g, line, 0, 1));
    }
    return s->space;
}

/* ---- entry points ---- */

static bool init(di_schema *s, di_gram *g, const di_json *root, bool is_lax) {
    static const char simple[] = "[null,false,true]";
    size_t bytes = DI_SCHEMA_BUCKETS * sizeof(void *);
    *s = (di_schema){.g = g, .root = root, .is_lax = is_lax};
    s->goals = di_gram_alloc(g, bytes);
    s->readings = di_gram_alloc(g, bytes);
    if (!s->goals || !s->readings)
        return false;
    memset(s->goals, 0, bytes);
    memset(s->readings, 0, bytes);
    if (di_json_parse(&s->simple, simple, sizeof simple - 1, NULL)) {
        di_gram_fail(g, DI_ERR_MEMORY, "three values");
        return false;
    }
    return true;
}

const di_node *di_node_schema(di_gram *g, const di_json *schema, bool is_lax) {
    di_schema *s = di_gram_alloc(g, sizeof *s);
    const di_node *node = di_node_never();
    if (!s)
        return node;
    if (!di_json_is(schema, DI_JSON_OBJECT) && !di_json_is(schema, DI_JSON_BOOL)) {
        di_gram_fail(g, DI_ERR_REQUEST, "the schema is %s, expected an object, true or false",
                     di_json_kind_name(schema));
        return node;
    }
    if (!init(s, g, schema, is_lax))
        goto out;
    di_atoms atoms = {0};
    di_atoms_add(s, &atoms, schema, false);
    node = di_schema_node(s, di_schema_goal(s, &atoms));
    if (node->kind == DI_NODE_NEVER)
        di_schema_fail(s, s->empty ? s->empty : schema, "", "no value satisfies it");
out:
    di_json_free(s->simple);
    return node;
}

const di_node *di_node_schema_part(di_gram *g, const di_json *root, const di_json *part, bool is_lax, bool is_text,
                                   const di_node *any_text) {
    di_schema *s = di_gram_alloc(g, sizeof *s);
    const di_node *node = di_node_never();
    if (!s)
        return node;
    if (part && !di_json_is(part, DI_JSON_OBJECT) && !di_json_is(part, DI_JSON_BOOL)) {
        di_gram_fail(g, DI_ERR_REQUEST, "the schema is %s, expected an object, true or false", di_json_kind_name(part));
        return node;
    }
    if (init(s, g, root, is_lax)) {
        di_atoms atoms = {0};
        if (part)
            di_atoms_add(s, &atoms, part, false);
        const di_goal *goal = di_schema_goal(s, &atoms);
        if (goal && !goal->is_never)
            node = is_text ? di_schema_texts(s, goal, any_text) : goal_node(s, goal, DI_TYPE_STRING);
    }
    di_json_free(s->simple);
    return node ? node : di_node_never();
}

di_status di_gram_schema(di_gram *g, const di_json *schema, bool is_lax, di_error *err) {
    const di_node *node = di_node_schema(g, schema, is_lax);
    g->root = di_gram_rule_add(g, "root", 4);
    if (g->root >= 0)
        di_gram_rule_define(g, g->root, node);
    return di_gram_status(g, err);
}

di_status di_gram_object(di_gram *g, di_error *err) {
    static const char text[] = "{\"type\":\"object\"}";
    di_json *schema = NULL;
    di_status st = di_json_parse(&schema, text, sizeof text - 1, err);
    if (st == DI_OK)
        st = di_gram_schema(g, schema, false, err);
    di_json_free(schema);
    return st;
}
