/* Strings of a JSON schema: what a string may hold, as code points, and how JSON writes it.
 *
 * A character is written as it is, by its short escape, or as \uXXXX, with two of them beyond the BMP. Patterns and
 * lengths count code points, so they are settled over code points first; the node that is left is then mapped class by
 * class to its spellings. Keys that a schema does not declare are all strings but the declared ones: a graph along the
 * trie of the declared names, which a key leaves at its first other character. */
#include "schema_internal.h"

enum {
    /* Nobody writes keys as \uXXXX, and states for all these spellings cost more than the rest of a large schema: only
     * the first code points of keys and enums have them, and the first classes of patterns. */
    LITERAL_CODES_MAX = 64,
    ESCAPED_CLASSES_MAX = 8,
    ESCAPED_RANGES_MAX = 8, /* ranges of a class that is offered as \uXXXX too */
    LENGTH_EXACT_MAX = 256, /* lengths that are always counted exactly */
    ROUNDS_MIN = 16,
    LENGTH_SET_MAX = 1024 /* length bounds that are counted by an automaton together with a pattern */
};

struct di_compiled {
    const char *text;
    size_t len;
    const di_node *node;
    const di_regular *set;
    di_compiled *next;
};

int64_t di_schema_code_points(const char *text, size_t len) {
    int64_t n = 0;
    for (size_t i = 0; i < len; i++)
        n += ((unsigned char)text[i] & 0xC0) != 0x80;
    return n;
}

/* ---- classes as JSON writes them ---- */

static const struct {
    uint32_t code;
    char letter;
} short_escapes[] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'\b', 'b'},
                     {'\f', 'f'}, {'\n', 'n'},  {'\r', 'r'}, {'\t', 't'}};

static bool has_code(const di_code_range *ranges, size_t n, uint32_t code) {
    for (size_t i = 0; i < n; i++) {
        if (code >= ranges[i].first && code <= ranges[i].last)
            return true;
    }
    return false;
}

/* One hexadecimal digit of low .. high in either case. */
static const di_node *hex_node(di_gram *g, uint32_t low, uint32_t high) {
    di_code_range ranges[3];
    size_t n = 0;
    if (low < 10)
        ranges[n++] = (di_code_range){'0' + low, '0' + DI_MIN(high, 9U)};
    if (high >= 10) {
        uint32_t first = DI_MAX(low, 10U) - 10, last = high - 10;
        ranges[n++] = (di_code_range){'a' + first, 'a' + last};
        ranges[n++] = (di_code_range){'A' + first, 'A' + last};
    }
    return di_node_class(g, ranges, n, false);
}

/* Numbers first .. last of `n_digits` hexadecimal digits. */
static const di_node *hex_range(di_gram *g, uint32_t first, uint32_t last, int n_digits) {
    const di_node *parts[4], *alternatives[3];
    uint32_t unit = 1U << (4 * (n_digits - 1)), low = first / unit, high = last / unit;
    if (n_digits == 1)
        return hex_node(g, low, high);
    if (low == high)
        return di_node_seq2(g, hex_node(g, low, low), hex_range(g, first % unit, last % unit, n_digits - 1));
    size_t n = 0;
    if (first % unit) { /* the first leading digit with what is left of it, then whole ones, then the last */
        alternatives[n++] = di_node_seq2(g, hex_node(g, low, low), hex_range(g, first % unit, unit - 1, n_digits - 1));
        low++;
    }
    bool is_cut = last % unit != unit - 1;
    if (is_cut)
        high--;
    if (low <= high) {
        parts[0] = hex_node(g, low, high);
        parts[1] = di_node_repeat(g, hex_node(g, 0, 15), n_digits - 1, n_digits - 1);
        alternatives[n++] = di_node_seq2(g, parts[0], parts[1]);
    }
    if (is_cut)
        alternatives[n++] =
            di_node_seq2(g, hex_node(g, high + 1, high + 1), hex_range(g, 0, last % unit, n_digits - 1));
    return di_node_alt(g, alternatives, n);
}

static const di_node *unit_node(di_gram *g, uint32_t first, uint32_t last) {
    return di_node_seq2(g, di_node_bytes(g, "\\u", 2), hex_range(g, first, last, 4));
}

/* Code points first .. last, all in the BMP or all beyond it, as \uXXXX. */
static const di_node *escape_node(di_gram *g, uint32_t first, uint32_t last) {
    if (last < 0x10000)
        return unit_node(g, first, last);
    const di_node *alternatives[3];
    size_t n = 0;
    first -= 0x10000;
    last -= 0x10000;
    uint32_t low = first >> 10, high = last >> 10, from = first & 0x3FF, to = last & 0x3FF;
    if (low == high)
        return di_node_seq2(g, unit_node(g, 0xD800 + low, 0xD800 + low), unit_node(g, 0xDC00 + from, 0xDC00 + to));
    if (from) {
        alternatives[n++] =
            di_node_seq2(g, unit_node(g, 0xD800 + low, 0xD800 + low), unit_node(g, 0xDC00 + from, 0xDFFF));
        low++;
    }
    bool is_cut = to != 0x3FF;
    if (is_cut)
        high--;
    if (low <= high)
        alternatives[n++] = di_node_seq2(g, unit_node(g, 0xD800 + low, 0xD800 + high), unit_node(g, 0xDC00, 0xDFFF));
    if (is_cut)
        alternatives[n++] =
            di_node_seq2(g, unit_node(g, 0xD800 + high + 1, 0xD800 + high + 1), unit_node(g, 0xDC00, 0xDC00 + to));
    return di_node_alt(g, alternatives, n);
}

/* A class of code points as JSON writes it inside a string. Control characters have no other spelling than escapes, so
 * those are always offered for them. */
static const di_node *class_text(di_gram *g, const di_code_range *ranges, size_t n, bool has_escapes) {
    const di_node *alternatives[2 + 2 * ESCAPED_RANGES_MAX + 2];
    di_code_range letters[DI_COUNT(short_escapes)];
    size_t n_alternatives = 0, n_letters = 0, n_raw = 0;
    di_code_range *raw = di_gram_alloc(g, (n + 3) * sizeof *raw);
    if (!raw)
        return di_node_never();
    static const di_code_range plain[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, DI_CODE_MAX}};
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < DI_COUNT(plain); k++) {
            di_code_range r = {DI_MAX(ranges[i].first, plain[k].first), DI_MIN(ranges[i].last, plain[k].last)};
            if (r.first <= r.last && n_raw < n + 3)
                raw[n_raw++] = r;
        }
    }
    if (n_raw)
        alternatives[n_alternatives++] = di_node_class(g, raw, n_raw, false);
    for (size_t k = 0; k < DI_COUNT(short_escapes); k++) {
        if (has_code(ranges, n, short_escapes[k].code))
            letters[n_letters++] =
                (di_code_range){(unsigned char)short_escapes[k].letter, (unsigned char)short_escapes[k].letter};
    }
    if (n_letters)
        alternatives[n_alternatives++] =
            di_node_seq2(g, di_node_bytes(g, "\\", 1), di_node_class(g, letters, n_letters, false));
    bool is_whole = has_escapes && n <= ESCAPED_RANGES_MAX;
    for (size_t i = 0; i < n && (is_whole || ranges[i].first < 0x20); i++) {
        uint32_t first = ranges[i].first, last = is_whole ? ranges[i].last : DI_MIN(ranges[i].last, 0x1FU);
        if (!is_whole && n_alternatives == DI_COUNT(alternatives))
            break; /* a class of more than a dozen single control characters keeps its short escapes */
        if (first < 0x10000)
            alternatives[n_alternatives++] = escape_node(g, first, DI_MIN(last, 0xFFFFU));
        if (last >= 0x10000)
            alternatives[n_alternatives++] = escape_node(g, DI_MAX(first, 0x10000U), last);
    }
    return di_node_alt(g, alternatives, n_alternatives);
}

static const di_node *any_char(di_schema *s) {
    static const di_code_range all[] = {{0, 0xD7FF}, {0xE000, DI_CODE_MAX}};
    if (!s->any_char)
        s->any_char = class_text(s->g, all, 2, true);
    return s->any_char;
}

static bool is_any_class(const di_node *node) {
    return node->kind == DI_NODE_CLASS && node->n == 2 && node->ranges[0].first == 0 &&
           node->ranges[0].last == 0xD7FF && node->ranges[1].last == DI_CODE_MAX;
}

/* One code point of a literal, in all its spellings. */
static const di_node *code_text(di_schema *s, uint32_t code) {
    if (code < DI_COUNT(s->ascii) && s->ascii[code])
        return s->ascii[code];
    const di_node *node = class_text(s->g, &(di_code_range){code, code}, 1, true);
    if (code < DI_COUNT(s->ascii))
        s->ascii[code] = node;
    return node;
}

static const di_node *bytes_text(di_schema *s, const char *bytes, size_t len) {
    const di_node **parts = di_gram_alloc(s->g, len * sizeof *parts);
    size_t n = 0;
    if (!parts)
        return di_node_never();
    for (size_t i = 0; i < len;) {
        uint32_t code = 0;
        size_t k = di_utf8_decode(bytes + i, len - i, &code, NULL);
        parts[n++] = code_text(s, code);
        i += DI_MAX(k, (size_t)1);
    }
    return di_node_seq(s->g, parts, n);
}

const di_node *di_schema_json_text(di_schema *s, const di_node *node, bool has_escapes) {
    di_gram *g = s->g;
    if (di_gram_has_failed(g))
        return di_node_never();
    switch (node->kind) {
    case DI_NODE_NEVER:
    case DI_NODE_EMPTY:
        return node;
    case DI_NODE_CLASS:
        if (is_any_class(node))
            return any_char(s);
        has_escapes &= s->n_escaped_classes < ESCAPED_CLASSES_MAX;
        s->n_escaped_classes += has_escapes;
        return class_text(g, node->ranges, (size_t)node->n, has_escapes);
    case DI_NODE_BYTES:
        return bytes_text(s, node->bytes, (size_t)node->n);
    case DI_NODE_SEQ:
    case DI_NODE_ALT: {
        const di_node **parts = di_gram_alloc(g, (size_t)node->n * sizeof *parts);
        if (!parts)
            return di_node_never();
        for (int32_t i = 0; i < node->n; i++)
            parts[i] = di_schema_json_text(s, node->nodes[i], has_escapes);
        return node->kind == DI_NODE_SEQ ? di_node_seq(g, parts, (size_t)node->n)
                                         : di_node_alt(g, parts, (size_t)node->n);
    }
    case DI_NODE_REPEAT:
        return di_node_repeat(g, di_schema_json_text(s, node->nodes[0], has_escapes), node->min, node->max);
    case DI_NODE_GRAPH: {
        di_graph_edge *edges = di_gram_alloc(g, DI_MAX((size_t)node->n, (size_t)1) * sizeof *edges);
        if (!edges)
            return di_node_never();
        for (int32_t i = 0; i < node->n; i++) {
            edges[i] = node->edges[i];
            edges[i].label = di_schema_json_text(s, node->edges[i].label, has_escapes);
        }
        return di_node_graph(g, node->n_states, node->is_accepting, edges, (size_t)node->n);
    }
    default:
        di_gram_fail(g, DI_ERR_INTERNAL, "a node of kind %d inside a JSON string", (int)node->kind);
        return di_node_never();
    }
}

static const di_node *quoted(di_schema *s, const di_node *inside) {
    const di_node *quote = di_node_bytes(s->g, "\"", 1);
    return di_node_seq(s->g, (const di_node *const[]){quote, inside, quote}, 3);
}

const di_node *di_schema_any_string(di_schema *s) {
    if (!s->any_string)
        s->any_string = quoted(s, di_node_repeat(s->g, any_char(s), 0, -1));
    return s->any_string;
}

const di_node *di_schema_literal(di_schema *s, const char *text, size_t len) {
    int64_t n_codes = di_schema_code_points(text, len);
    if (n_codes && s->literal_codes + n_codes <= LITERAL_CODES_MAX) {
        s->literal_codes += (int32_t)n_codes;
        return quoted(s, bytes_text(s, text, len));
    }
    di_strbuf spelling = {0};
    di_json_write_string(&spelling, text, len);
    const di_node *node = di_node_bytes(s->g, di_strbuf_str(&spelling), spelling.len);
    if (spelling.failed)
        di_gram_fail(s->g, DI_ERR_MEMORY, "a string of %zu bytes in a schema", len);
    di_strbuf_deinit(&spelling);
    return node;
}

/* ---- strings other than some ---- */

/* Trie of names over code points; children are a list. */
typedef struct trie_node {
    uint32_t code;
    int32_t child, sibling; /* -1: none */
    bool is_name;
} trie_node;

/* A character other than those of some children, where a key leaves the trie. Its \uXXXX spellings are left out: they
 * would have to go around the children's own. */
static const di_node *other_char(di_schema *s, const trie_node *trie, int32_t at) {
    di_gram *g = s->g;
    size_t n = 0, n_letters = 0;
    for (int32_t c = trie[at].child; c >= 0; c = trie[c].sibling)
        n++;
    di_code_range *without = di_gram_alloc(g, (n + 3) * sizeof *without), letters[DI_COUNT(short_escapes)];
    if (!without)
        return di_node_never();
    n = 0;
    for (int32_t c = trie[at].child; c >= 0; c = trie[c].sibling)
        without[n++] = (di_code_range){trie[c].code, trie[c].code};
    for (size_t k = 0; k < DI_COUNT(short_escapes); k++) {
        if (!has_code(without, n, short_escapes[k].code))
            letters[n_letters++] =
                (di_code_range){(unsigned char)short_escapes[k].letter, (unsigned char)short_escapes[k].letter};
    }
    without[n++] = (di_code_range){0, 0x1F};
    without[n++] = (di_code_range){'"', '"'};
    without[n++] = (di_code_range){'\\', '\\'};
    const di_node *raw = di_node_class(g, without, n, true);
    if (n_letters == 0)
        return raw;
    return di_node_alt2(g, raw,
                        di_node_seq2(g, di_node_bytes(g, "\\", 1), di_node_class(g, letters, n_letters, false)));
}

const di_node *di_schema_other_strings(di_schema *s, const char *const *texts, const size_t *lens, size_t n) {
    di_gram *g = s->g;
    if (n == 0)
        return di_schema_any_string(s);
    size_t room = 1, n_edges = 0;
    for (size_t i = 0; i < n; i++)
        room += lens[i];
    trie_node *trie = di_gram_alloc(g, room * sizeof *trie);
    di_graph_edge *edges = di_gram_alloc(g, (3 * room + 4) * sizeof *edges);
    bool *is_accepting = di_gram_alloc(g, (room + 3) * sizeof *is_accepting);
    if (!trie || !edges || !is_accepting)
        return di_node_never();
    int32_t n_nodes = 1;
    trie[0] = (trie_node){.child = -1, .sibling = -1};
    for (size_t i = 0; i < n; i++) {
        int32_t at = 0;
        for (size_t k = 0; k < lens[i];) {
            uint32_t code = 0;
            size_t step = di_utf8_decode(texts[i] + k, lens[i] - k, &code, NULL);
            k += DI_MAX(step, (size_t)1);
            int32_t c = trie[at].child;
            while (c >= 0 && trie[c].code != code)
                c = trie[c].sibling;
            if (c < 0) {
                c = n_nodes++;
                trie[c] = (trie_node){.code = code, .child = -1, .sibling = trie[at].child};
                trie[at].child = c;
            }
            at = c;
        }
        trie[at].is_name = true;
    }
    /* State 0: before the opening quote; i + 1: trie node i; then one for keys that have left the trie, one for the
     * end. */
    int32_t n_states = n_nodes + 3, away = n_nodes + 1, end = n_nodes + 2;
    memset(is_accepting, 0, (size_t)n_states * sizeof *is_accepting);
    is_accepting[end] = true;
    const di_node *quote = di_node_bytes(g, "\"", 1);
    edges[n_edges++] = (di_graph_edge){0, 1, quote};
    for (int32_t i = 0; i < n_nodes; i++) {
        for (int32_t c = trie[i].child; c >= 0; c = trie[c].sibling)
            edges[n_edges++] = (di_graph_edge){i + 1, c + 1, code_text(s, trie[c].code)};
        edges[n_edges++] = (di_graph_edge){i + 1, away, other_char(s, trie, i)};
        if (!trie[i].is_name)
            edges[n_edges++] = (di_graph_edge){i + 1, end, quote};
    }
    edges[n_edges++] = (di_graph_edge){away, away, any_char(s)};
    edges[n_edges++] = (di_graph_edge){away, end, quote};
    return di_node_graph(g, n_states, is_accepting, edges, n_edges);
}

/* ---- patterns ---- */

static di_compiled *compile(di_schema *s, const di_json *schema, const char *keyword, const char *text, size_t len) {
    di_compiled *c = s->patterns;
    while (c && (c->len != len || memcmp(c->text, text, len) != 0))
        c = c->next;
    if (c || di_gram_has_failed(s->g) || !(c = di_gram_alloc(s->g, sizeof *c)))
        return c;
    *c = (di_compiled){.text = text, .len = len, .node = di_node_regex(s->g, text, len, true), .next = s->patterns};
    if (di_gram_has_failed(s->g)) {
        if (s->g->failed == DI_ERR_REQUEST) { /* where the pattern is, before what is wrong with it */
            di_error why = s->g->error;
            s->g->failed = DI_OK;
            di_schema_fail(s, schema, keyword, "%s", why.message);
        }
        return NULL;
    }
    s->patterns = c;
    return c;
}

const di_node *di_schema_pattern_node(di_schema *s, const di_json *schema, const char *keyword, const char *text,
                                      size_t len) {
    const di_compiled *c = compile(s, schema, keyword, text, len);
    return c ? c->node : di_node_never();
}

const di_regular *di_schema_pattern_set(di_schema *s, const di_json *schema, const char *keyword, const char *text,
                                        size_t len) {
    di_compiled *c = compile(s, schema, keyword, text, len);
    if (c && !c->set)
        c->set = di_regular_make(s->g, c->node);
    return c ? c->set : NULL;
}

/* ---- strings of a shape ---- */

/* Bounds of the lengths of a node's texts in code points; INT64_MAX: none. */
typedef struct lengths {
    int64_t min, max;
} lengths;

static int64_t add_lengths(int64_t a, int64_t b) {
    return a == INT64_MAX || b == INT64_MAX ? INT64_MAX : a + b;
}

static lengths lengths_of(const di_node *node) {
    lengths all = {0, 0};
    switch (node->kind) {
    case DI_NODE_EMPTY:
        return all;
    case DI_NODE_CLASS:
        return (lengths){1, 1};
    case DI_NODE_BYTES:
        all.min = all.max = di_schema_code_points(node->bytes, (size_t)node->n);
        return all;
    case DI_NODE_SEQ:
        for (int32_t i = 0; i < node->n; i++) {
            lengths one = lengths_of(node->nodes[i]);
            all.min += one.min;
            all.max = add_lengths(all.max, one.max);
        }
        return all;
    case DI_NODE_ALT:
        all.min = INT64_MAX;
        for (int32_t i = 0; i < node->n; i++) {
            lengths one = lengths_of(node->nodes[i]);
            all.min = DI_MIN(all.min, one.min);
            all.max = DI_MAX(all.max, one.max);
        }
        return all;
    case DI_NODE_REPEAT: {
        lengths one = lengths_of(node->nodes[0]);
        all.min = one.min * node->min;
        bool is_bounded = node->max >= 0 && one.max <= INT32_MAX && one.max * node->max <= INT32_MAX;
        all.max = one.max == 0 ? 0 : is_bounded ? one.max * node->max : INT64_MAX;
        all.min = DI_MIN(all.min, (int64_t)INT32_MAX);
        return all;
    }
    default:
        return (lengths){0, INT64_MAX};
    }
}

static const di_node *any_code(di_gram *g) {
    return di_node_class(g, NULL, 0, true);
}

static const di_node *length_node(di_schema *s, const di_shape *shape, const di_node *one) {
    if (shape->chars_min > INT32_MAX || (shape->chars_max != INT64_MAX && shape->chars_max > INT32_MAX)) {
        di_schema_fail(s, shape->chars_at, shape->chars_min > INT32_MAX ? "minLength" : "maxLength", "is too large");
        return di_node_never();
    }
    return di_node_repeat(s->g, one, (int32_t)shape->chars_min,
                          shape->chars_max == INT64_MAX ? -1 : (int32_t)shape->chars_max);
}

/* The node with at most k rounds of whatever has no bound: fewer texts, of bounded length. */
static const di_node *bound_node(di_gram *g, const di_node *node, int32_t k) {
    if (node->kind == DI_NODE_REPEAT) {
        int32_t max = node->max < 0 ? DI_MAX(k, node->min) : node->max;
        return di_node_repeat(g, bound_node(g, node->nodes[0], k), node->min, max);
    }
    if (node->kind != DI_NODE_SEQ && node->kind != DI_NODE_ALT)
        return node;
    const di_node **parts = di_gram_alloc(g, (size_t)node->n * sizeof *parts);
    if (!parts)
        return di_node_never();
    for (int32_t i = 0; i < node->n; i++)
        parts[i] = bound_node(g, node->nodes[i], k);
    return node->kind == DI_NODE_SEQ ? di_node_seq(g, parts, (size_t)node->n) : di_node_alt(g, parts, (size_t)node->n);
}

static const di_node *fact_node(di_schema *s, const di_fact *f) {
    return f->kind == DI_FACT_FORMAT ? di_schema_format_node(s, (int32_t)f->index)
                                     : di_schema_pattern_node(s, f->schema, "pattern", f->text, f->len);
}

static const di_regular *fact_set(di_schema *s, const di_fact *f) {
    return f->kind == DI_FACT_FORMAT ? di_schema_format_set(s, (int32_t)f->index)
                                     : di_schema_pattern_set(s, f->schema, "pattern", f->text, f->len);
}

/* Strings among the values of a fact, as one node; NEVER for none. */
static const di_node *strings_of(di_schema *s, const di_fact *f) {
    size_t n = f->is_list ? di_json_array_len(f->value) : 1, n_strings = 0;
    const di_node **list = di_gram_alloc(s->g, DI_MAX(n, (size_t)1) * sizeof *list);
    if (!list)
        return di_node_never();
    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        const char *text = di_json_str(f->is_list ? di_json_at(f->value, i) : f->value, &len);
        if (text)
            list[n_strings++] = di_node_bytes(s->g, text, len);
    }
    return di_node_alt(s->g, list, n_strings);
}

/* The only fact that says anything of strings, besides their length; NULL where there are none or several. */
static const di_fact *single_fact(const di_shape *shape, int *n) {
    const di_fact *only = NULL;
    *n = 0;
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_PATTERN || f->kind == DI_FACT_FORMAT ||
            (f->kind == DI_FACT_VALUES && f->is_negated && (di_schema_fact_types(f) & DI_TYPE_STRING))) {
            bool is_same = only && f->kind == DI_FACT_PATTERN && only->kind == f->kind && !f->is_negated &&
                           !only->is_negated && f->len == only->len && memcmp(f->text, only->text, f->len) == 0;
            *n += !is_same;
            only = f;
        }
    }
    return *n == 1 && !only->is_negated ? only : NULL;
}

const di_node *di_schema_string_texts(di_schema *s, const di_shape *shape) {
    di_gram *g = s->g;
    bool has_lengths = shape->chars_min > 0 || shape->chars_max != INT64_MAX;
    int n_facts = 0;
    const di_fact *only = single_fact(shape, &n_facts);
    if (n_facts == 0)
        return has_lengths ? length_node(s, shape, any_code(g)) : NULL;
    if (only) {
        const di_node *node = fact_node(s, only);
        lengths l = lengths_of(node);
        if (l.min >= shape->chars_min && l.max <= shape->chars_max)
            return node;
        bool is_repeat = node->kind == DI_NODE_REPEAT && node->nodes[0]->kind == DI_NODE_CLASS;
        if (is_repeat) { /* such as ^[a-z]*$ */
            int64_t min = DI_MAX(shape->chars_min, (int64_t)node->min), max = shape->chars_max;
            max = node->max < 0 ? max : DI_MIN(max, (int64_t)node->max);
            if (min > max)
                return di_node_never();
            di_shape both = *shape;
            both.chars_min = min;
            both.chars_max = max;
            return length_node(s, &both, node->nodes[0]);
        }
        /* Counting characters along a pattern takes states by the thousand; with a high limit, bounding the rounds of
         * its parts instead leaves all texts of usual length. */
        for (int32_t k = LENGTH_SET_MAX; k >= ROUNDS_MIN && shape->chars_max > LENGTH_EXACT_MAX; k /= 4) {
            const di_node *bounded = bound_node(g, node, k);
            l = lengths_of(bounded);
            if (l.min >= shape->chars_min && l.max <= shape->chars_max)
                return bounded;
        }
    }
    const di_regular *set = NULL;
    for (const di_fact *f = shape->facts; f; f = f->next) { /* what strings must match comes first */
        if ((f->kind == DI_FACT_PATTERN || f->kind == DI_FACT_FORMAT) && !f->is_negated) {
            const di_regular *one = fact_set(s, f);
            set = set ? di_regular_intersect(g, set, one) : one;
        }
    }
    if (has_lengths) {
        /* A longer text than that can't be counted together with a pattern, so that it isn't offered. */
        di_shape counted = *shape;
        if (shape->chars_max != INT64_MAX)
            counted.chars_max = DI_MIN(shape->chars_max, DI_MAX(shape->chars_min, (int64_t)LENGTH_SET_MAX));
        if (shape->chars_min > LENGTH_SET_MAX) {
            di_schema_fail(s, shape->chars_at, "minLength", "can't be guaranteed together with a pattern: more than %d",
                           LENGTH_SET_MAX);
            return di_node_never();
        }
        const di_regular *one = di_regular_make(g, length_node(s, &counted, any_code(g)));
        set = set ? di_regular_intersect(g, set, one) : one;
    }
    if (!set)
        set = di_regular_make(g, di_node_repeat(g, any_code(g), 0, -1));
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if ((f->kind == DI_FACT_PATTERN || f->kind == DI_FACT_FORMAT) && f->is_negated)
            set = di_regular_subtract(g, set, fact_set(s, f));
        if (f->kind == DI_FACT_VALUES && f->is_negated)
            set = di_regular_subtract(g, set, di_regular_make(g, strings_of(s, f)));
    }
    return set && !di_gram_has_failed(g) ? di_regular_node(g, set) : di_node_never();
}

/* Strings among a list of values that satisfy the shape. */
static const di_node *listed_texts(di_schema *s, const di_shape *shape, const di_fact *values) {
    size_t n_values = values->is_list ? di_json_array_len(values->value) : 1, n = 0;
    const di_node **texts = di_gram_alloc(s->g, DI_MAX(n_values, (size_t)1) * sizeof *texts);
    for (size_t i = 0; texts && i < n_values; i++) {
        const di_json *value = values->is_list ? di_json_at(values->value, i) : values->value;
        size_t len = 0;
        const char *text = di_json_str(value, &len);
        if (text && di_schema_shape_holds(s, shape, value, values))
            texts[n++] = di_node_bytes(s->g, text, len);
    }
    return texts ? di_node_alt(s->g, texts, n) : di_node_never();
}

const di_node *di_schema_texts(di_schema *s, const di_goal *goal, const di_node *any_text) {
    di_shapes shapes = di_schema_shapes(s, goal);
    const di_node **list = di_gram_alloc(s->g, DI_MAX((size_t)shapes.n, (size_t)1) * sizeof *list);
    size_t n = 0;
    for (int32_t i = 0; list && i < shapes.n; i++) {
        const di_shape *shape = shapes.list[i];
        const di_fact *values = di_schema_values_of(shape);
        if (!(shape->types & DI_TYPE_STRING))
            continue;
        const di_node *texts = values ? listed_texts(s, shape, values) : di_schema_string_texts(s, shape);
        if (!texts && !any_text)
            return NULL;
        list[n++] = texts ? texts : any_text;
    }
    return list ? di_node_alt(s->g, list, n) : di_node_never();
}

const di_node *di_schema_string(di_schema *s, const di_shape *shape) {
    int n_facts = 0;
    const di_fact *only = single_fact(shape, &n_facts);
    if (n_facts == 0 && shape->chars_min == 0 && shape->chars_max == INT64_MAX)
        return di_schema_any_string(s);
    if (n_facts == 0)
        return quoted(s, length_node(s, shape, any_char(s)));
    /* The characters of a format are plain ones: offering their escapes would only make the automaton larger. */
    const di_node *texts = di_schema_string_texts(s, shape);
    return quoted(s, di_schema_json_text(s, texts, !only || only->kind != DI_FACT_FORMAT));
}
