/* Regular expressions to nodes: the syntax that users of Python's re and of JSON schema's `pattern` (ECMA 262) know.
 *
 * What an expression matches is a set of texts, so greedy and lazy read the same, and groups only group. \d, \w, \b are
 * ASCII (under (?u) Unicode), \s is ECMA's: Unicode's spaces, line ends and U+FEFF (under (?a) ASCII). What no set of
 * texts can express or what would need a search (look-around, back-references, conditions, recursion, possessive and
 * atomic matching) is refused by name.
 *
 * Anchors have two ways. Where each stands at an end of its branch, what it means follows from the place, and the tree
 * is turned into nodes as it is. Otherwise (word boundaries, lines, an anchor behind what may be empty) each becomes a
 * mark in the text, a surrogate, which no text has; the set of marked texts is intersected with those in which every
 * mark is right, and the marks are erased (regular.c). That is exact for any use, but unrolls counted repeats. */
#include "charset.h"

typedef enum dialect { PYTHON, ECMA } dialect;

/* ---- the tree -----------------------------------------------------------------------------------------------------
 *
 * A part without anchors is a node at once; a tree is kept only over anchors. */

typedef enum width {
    WIDTH_NONE,
    WIDTH_SOME,
    WIDTH_ANY
} width; /* texts: only the empty one, never it, both or unsure */

typedef enum tree_kind { TREE_MARK, TREE_SEQ, TREE_ALT, TREE_REPEAT } tree_kind;

typedef enum mark {
    MARK_START,      /* \A, ^ */
    MARK_END,        /* \Z, and ECMA's $ */
    MARK_LAST_LINE,  /* Python's $: at the end, or before a line end that ends the text */
    MARK_LINE_START, /* ^ of lines */
    MARK_LINE_END,   /* $ of lines */
    MARK_BOUNDARY,   /* \b */
    MARK_NO_BOUNDARY /* \B */
} mark;

struct tree;
typedef struct part {
    const di_node *node;     /* where it has no anchors */
    const struct tree *tree; /* else */
    width width;
} part;

typedef struct tree {
    tree_kind kind;
    mark mark;
    int32_t min, max;
    const part *parts; /* [n] */
    size_t n;
} tree;

/* ---- parsing ---- */

typedef struct flags {
    bool is_caseless, is_multiline, is_dotall, is_verbose, is_ascii, is_unicode;
} flags;

enum { PROPERTIES_KEPT = 16, CODE_NONE = -1 };

typedef struct parser {
    di_gram *g;
    dialect dialect;
    const char *text;
    size_t len, at;
    flags flags;
    int32_t depth;
    part *parts; /* owned: of the open branches, one above the other */
    size_t n_parts, parts_cap;
    char *literal; /* owned: characters that have not become a node yet */
    size_t literal_len, literal_cap;
    di_charset set, plain_set, scratch; /* a class in the making: items whose case counts not, items as they are */
    di_case_groups cases;               /* from the first use on */
    struct {
        const char *name; /* in text */
        size_t len;
        di_charset set;
    } properties[PROPERTIES_KEPT];
    size_t n_properties;
    bool has_marks, is_word_unicode;
} parser;

/* Python counts characters. */
static size_t position_of(const parser *p, size_t at) {
    size_t n = 0;
    for (size_t i = 0; i < at && i < p->len; i++)
        n += ((unsigned char)p->text[i] & 0xC0) != 0x80;
    return n;
}

#define refuse(p, at, format, ...)                                                                                     \
    di_gram_fail((p)->g, DI_ERR_REQUEST, "regular expression, position %zu: " format, position_of(p, at), __VA_ARGS__)

static bool failed(const parser *p) {
    return di_gram_has_failed(p->g);
}

static bool peek_is(const parser *p, char c) {
    return p->at < p->len && p->text[p->at] == c;
}

static bool peek_text(const parser *p, const char *s) {
    size_t n = strlen(s);
    return p->len - p->at >= n && memcmp(p->text + p->at, s, n) == 0;
}

static bool take(parser *p, char c) {
    bool is_there = peek_is(p, c);
    p->at += is_there;
    return is_there;
}

/* The next character; the text is known to be UTF-8 and not at its end. */
static uint32_t take_code(parser *p) {
    uint32_t code = 0;
    p->at += di_utf8_decode(p->text + p->at, p->len - p->at, &code, NULL);
    return code;
}

/* What stands at p->at, for messages: a character or the end. */
typedef struct found {
    char text[8];
} found;

static found found_at(const parser *p, size_t at) {
    found f = {"the end"};
    if (at < p->len) {
        size_t n = di_utf8_decode(p->text + at, p->len - at, NULL, NULL);
        memset(f.text, 0, sizeof f.text);
        f.text[0] = '\'';
        memcpy(f.text + 1, p->text + at, n);
        f.text[n + 1] = '\'';
    }
    return f;
}

static void push(parser *p, part x) {
    p->parts = di_gram_grow(p->g, p->parts, &p->parts_cap, p->n_parts + 1, sizeof *p->parts);
    if (!failed(p))
        p->parts[p->n_parts++] = x;
}

static void flush_literal(parser *p) {
    if (p->literal_len == 0)
        return;
    const di_node *node = di_node_bytes(p->g, p->literal, p->literal_len);
    p->literal_len = 0;
    push(p, (part){.node = node, .width = WIDTH_SOME});
}

static void add_literal(parser *p, const char bytes[4], size_t n) {
    p->literal = di_gram_grow(p->g, p->literal, &p->literal_cap, p->literal_len + n, 1);
    if (failed(p))
        return;
    memcpy(p->literal + p->literal_len, bytes, n);
    p->literal_len += n;
}

static part plain(const di_node *node, width w) {
    return (part){.node = node, .width = w};
}

static part new_tree(parser *p, tree t, width w) {
    tree *made = di_gram_alloc(p->g, sizeof *made);
    part *copy = t.n ? di_gram_alloc(p->g, t.n * sizeof *copy) : NULL;
    if (!made || (t.n && !copy))
        return plain(di_node_never(), WIDTH_SOME);
    if (copy)
        memcpy(copy, t.parts, t.n * sizeof *copy);
    *made = t;
    made->parts = copy;
    return (part){.tree = made, .width = w};
}

static part new_mark(parser *p, mark m) {
    p->has_marks |= m == MARK_LINE_START || m == MARK_LINE_END || m == MARK_BOUNDARY || m == MARK_NO_BOUNDARY;
    p->is_word_unicode |= p->flags.is_unicode;
    return new_tree(p, (tree){.kind = TREE_MARK, .mark = m}, WIDTH_NONE);
}

/* The parts from `base` on as one, and off the stack. */
static part join(parser *p, size_t base, tree_kind kind) {
    size_t n = p->n_parts - base;
    p->n_parts = base;
    if (n == 0)
        return kind == TREE_SEQ ? plain(di_node_empty(), WIDTH_NONE) : plain(di_node_never(), WIDTH_SOME);
    const part *parts = p->parts + base;
    if (n == 1)
        return parts[0];
    bool has_trees = false;
    width w = parts[0].width;
    for (size_t i = 0; i < n; i++) {
        has_trees |= parts[i].tree != NULL;
        if (kind == TREE_ALT)
            w = parts[i].width == w ? w : WIDTH_ANY;
        else if (w != WIDTH_SOME)
            w = parts[i].width == WIDTH_NONE ? w : parts[i].width;
    }
    if (has_trees)
        return new_tree(p, (tree){.kind = kind, .parts = parts, .n = n}, w);
    const di_node **nodes = di_gram_alloc(p->g, n * sizeof(di_node *));
    if (!nodes)
        return plain(di_node_never(), WIDTH_SOME);
    for (size_t i = 0; i < n; i++)
        nodes[i] = parts[i].node;
    return plain(kind == TREE_SEQ ? di_node_seq(p->g, nodes, n) : di_node_alt(p->g, nodes, n), w);
}

/* ---- characters and classes ---- */

static void add_ranges(di_charset *set, const di_code_range *ranges, size_t n) {
    for (size_t i = 0; i < n; i++)
        di_charset_add(set, ranges[i].first, ranges[i].last);
}

/* The set of a property, kept for its next use: looking one up takes milliseconds. */
static const di_charset *property(parser *p, const char *name, size_t len) {
    for (size_t i = 0; i < p->n_properties; i++) {
        if (p->properties[i].len == len && memcmp(p->properties[i].name, name, len) == 0)
            return &p->properties[i].set;
    }
    if (p->n_properties == PROPERTIES_KEPT) {
        p->n_properties--;
        di_charset_deinit(&p->properties[p->n_properties].set);
    }
    di_charset set = {0};
    if (!di_charset_add_property(&set, name, len))
        return NULL;
    size_t k = p->n_properties++;
    p->properties[k].name = name;
    p->properties[k].len = len;
    p->properties[k].set = set;
    return &p->properties[k].set;
}

static void add_property(parser *p, di_charset *set, const char *name) {
    const di_charset *members = property(p, name, strlen(name));
    add_ranges(set, members->ranges, members->n);
    set->has_failed |= members->has_failed;
}

/* \d \w \s and their opposites, by letter. */
static void add_shorthand(parser *p, di_charset *set, char letter) {
    static const di_code_range word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
    static const di_code_range ascii_space[] = {{'\t', '\r'}, {' ', ' '}};
    static const di_code_range space[] = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                                          {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                          {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    di_charset *into = &p->scratch;
    di_charset_reset(into);
    switch (letter | 0x20) {
    case 'd':
        if (p->flags.is_unicode)
            add_property(p, into, "Nd");
        else
            di_charset_add(into, '0', '9');
        break;
    case 'w':
        add_ranges(into, word, DI_COUNT(word));
        if (p->flags.is_unicode) {
            add_property(p, into, "L");
            add_property(p, into, "N");
        }
        break;
    default:
        if (p->flags.is_ascii)
            add_ranges(into, ascii_space, DI_COUNT(ascii_space));
        else
            add_ranges(into, space, DI_COUNT(space));
        break;
    }
    if (letter < 'a')
        di_charset_negate(into);
    add_ranges(set, into->ranges, into->n);
    set->has_failed |= into->has_failed;
}

/* Behind "\p" or "\P". */
static void parse_property(parser *p, di_charset *set, bool is_negated, size_t start) {
    const char *name = p->text + p->at;
    size_t len = 1;
    if (take(p, '{')) {
        const char *end = memchr(p->text + p->at, '}', p->len - p->at);
        if (!end) {
            refuse(p, start, "the name of '\\%c{' has no '}'", p->text[start + 1]);
            return;
        }
        name = p->text + p->at;
        len = (size_t)(end - name);
        p->at += len + 1;
        if (len && name[0] == '^') {
            is_negated = !is_negated;
            name++;
            len--;
        }
    } else if (p->at < p->len && (unsigned char)*name < 0x80) {
        p->at++;
    } else {
        refuse(p, start, "'\\%c' has no name of a property", p->text[start + 1]);
        return;
    }
    const di_charset *members = property(p, name, len);
    if (!members) {
        refuse(p, start, "'%.*s' is no property of Unicode that is known here", (int)DI_MIN(len, (size_t)64), name);
        return;
    }
    if (is_negated) {
        di_charset_reset(&p->scratch);
        add_ranges(&p->scratch, members->ranges, members->n);
        di_charset_negate(&p->scratch);
        p->scratch.has_failed |= members->has_failed;
        members = &p->scratch;
    }
    add_ranges(set, members->ranges, members->n);
    set->has_failed |= members->has_failed;
}

/* Exactly n hexadecimal digits at p->at. */
static bool take_hex(parser *p, int n, uint32_t *code) {
    uint32_t v = 0;
    for (int i = 0; i < n; i++) {
        int digit = p->at + (size_t)i < p->len ? di_hex_digit(p->text[p->at + (size_t)i]) : -1;
        if (digit < 0)
            return false;
        v = v * 16 + (uint32_t)digit;
    }
    p->at += (size_t)n;
    *code = v;
    return true;
}

/* Behind "\x", "\u" or "\U". */
static uint32_t parse_hex(parser *p, char letter, size_t start) {
    uint32_t code = 0;
    if (letter != 'U' && peek_is(p, '{')) {
        size_t at = p->at + 1;
        while (at < p->len && di_hex_digit(p->text[at]) >= 0 && code <= DI_CODE_MAX)
            code = code * 16 + (uint32_t)di_hex_digit(p->text[at++]);
        if (at == p->at + 1 || at >= p->len || p->text[at] != '}' || code > DI_CODE_MAX) {
            refuse(p, start, "'\\%c{' needs a code point of 0 to 10FFFF and '}'", letter);
            return 0;
        }
        p->at = at + 1;
        return code;
    }
    int n = letter == 'x' ? 2 : letter == 'u' ? 4 : 8;
    if (!take_hex(p, n, &code) || code > DI_CODE_MAX) {
        refuse(p, start, "'\\%c' needs %d hexadecimal digits of a code point", letter, n);
        return 0;
    }
    /* JSON and ECMA write what lies above U+FFFF as two surrogates. */
    uint32_t low;
    if (letter == 'u' && code >= 0xD800 && code <= 0xDBFF && peek_text(p, "\\u")) {
        size_t back = p->at;
        p->at += 2;
        if (take_hex(p, 4, &low) && low >= 0xDC00 && low <= 0xDFFF)
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        p->at = back;
    }
    return code;
}

/* Behind a backslash, at a digit. Python: \0 with up to two octal digits more, \ddd octal; in a class all are octal. */
static uint32_t parse_octal(parser *p, bool is_in_class, size_t start) {
    size_t n = 0;
    uint32_t code = 0;
    while (n < 3 && p->at + n < p->len && p->text[p->at + n] >= '0' && p->text[p->at + n] <= '7')
        code = code * 8 + (uint32_t)(p->text[p->at + n++] - '0');
    bool is_octal = p->text[p->at] == '0' || n == 3 || (is_in_class && n > 0);
    if (!is_octal) {
        size_t digits = 0;
        while (digits < 2 && p->at + digits < p->len && p->text[p->at + digits] >= '0' &&
               p->text[p->at + digits] <= '9')
            digits++;
        if (is_in_class)
            refuse(p, start, "'\\%.*s' is no octal number", (int)digits, p->text + p->at);
        else
            refuse(p, start, "back-references ('\\%.*s') can't be guaranteed", (int)digits, p->text + p->at);
        return 0;
    }
    if (code > 0377)
        refuse(p, start, "'\\%.*s' is above '\\377'", (int)n, p->text + p->at);
    p->at += n;
    return code;
}

/* Behind a backslash: the code point that it stands for, or CODE_NONE after adding a set of them to plain_set, or after
 * a failure. Anchors are dealt with before. */
static int64_t parse_escape(parser *p, bool is_in_class, di_charset *folded, size_t start) {
    if (p->at == p->len) {
        refuse(p, start, "%s", "a backslash at the end");
        return CODE_NONE;
    }
    char c = p->text[p->at];
    if (c >= '0' && c <= '9')
        return parse_octal(p, is_in_class, start);
    uint32_t code = take_code(p);
    switch (c) {
    case 'a':
        return '\a';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    case 'v':
        return '\v';
    case 'd':
    case 'D':
    case 'w':
    case 'W':
    case 's':
    case 'S':
        add_shorthand(p, &p->plain_set, c);
        return CODE_NONE;
    case 'p':
    case 'P':
        parse_property(p, folded, c == 'P', start);
        return CODE_NONE;
    case 'x':
    case 'u':
    case 'U':
        return parse_hex(p, c, start);
    case 'b':
        if (is_in_class)
            return '\b';
        break;
    case 'c':
        if (p->at < p->len && ((p->text[p->at] | 0x20) >= 'a' && (p->text[p->at] | 0x20) <= 'z'))
            return p->text[p->at++] & 31;
        refuse(p, start, "'\\c' needs a letter of A to Z, found %s", found_at(p, p->at).text);
        return CODE_NONE;
    case 'k':
    case 'g':
        refuse(p, start, "back-references ('\\%c') can't be guaranteed", c);
        return CODE_NONE;
    default:
        break;
    }
    if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) {
        refuse(p, start, "'\\%c' is no escape that is known here", c);
        return CODE_NONE;
    }
    return code;
}

/* What `set`, whose case counts where the flags say so, and plain_set make together. */
static const di_node *finish_class(parser *p, bool is_negated) {
    if (p->flags.is_caseless && p->flags.is_ascii) {
        di_charset_add_ascii_cases(&p->set);
    } else if (p->flags.is_caseless && p->set.n) {
        if (!p->cases.n) {
            di_error err = {0};
            if (di_case_groups_init(&p->cases, &err))
                di_gram_fail(p->g, err.code, "%s", err.message);
        }
        di_charset_add_cases(&p->set, &p->cases);
    }
    add_ranges(&p->set, p->plain_set.ranges, p->plain_set.n);
    if (p->set.has_failed || p->plain_set.has_failed)
        di_gram_fail(p->g, DI_ERR_MEMORY, "a class of %zu ranges", p->set.n);
    return failed(p) ? di_node_never() : di_node_class(p->g, p->set.ranges, p->set.n, is_negated);
}

/* One end of a range of a class, or a set. CODE_NONE: a set was added. */
static int64_t parse_class_item(parser *p) {
    size_t start = p->at;
    if (take(p, '\\'))
        return parse_escape(p, true, &p->set, start);
    return take_code(p);
}

/* Behind '['. */
static const di_node *parse_class(parser *p, size_t start) {
    di_charset_reset(&p->set);
    di_charset_reset(&p->plain_set);
    bool is_negated = take(p, '^');
    /* To Python, a ']' that comes first is a member; to ECMA, it ends a class of no members. */
    bool is_first = p->dialect == PYTHON;
    while (!failed(p)) {
        if (p->at == p->len) {
            refuse(p, start, "%s", "'[' has no ']'");
            break;
        }
        if (!is_first && take(p, ']'))
            break;
        is_first = false;
        size_t at = p->at;
        int64_t first = parse_class_item(p);
        if (failed(p))
            break;
        bool is_range = peek_is(p, '-') && p->at + 1 < p->len && p->text[p->at + 1] != ']';
        if (!is_range) {
            if (first != CODE_NONE)
                di_charset_add(&p->set, (uint32_t)first, (uint32_t)first);
            continue;
        }
        p->at++;
        int64_t last = parse_class_item(p);
        if (failed(p))
            break;
        bool has_set = first == CODE_NONE || last == CODE_NONE;
        if (has_set && p->dialect == ECMA) { /* '-' is a member like any other then */
            di_charset_add(&p->set, '-', '-');
            if (first != CODE_NONE)
                di_charset_add(&p->set, (uint32_t)first, (uint32_t)first);
            if (last != CODE_NONE)
                di_charset_add(&p->set, (uint32_t)last, (uint32_t)last);
        } else if (has_set || first > last) {
            int shown = (int)DI_MIN(p->at - at, (size_t)32);
            refuse(p, at, "'%.*s' is no range of characters", shown, p->text + at);
        } else {
            di_charset_add(&p->set, (uint32_t)first, (uint32_t)last);
        }
    }
    return finish_class(p, is_negated);
}

static const di_node *dot(parser *p) {
    static const di_code_range line_ends[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
    if (p->flags.is_dotall)
        return di_node_class(p->g, NULL, 0, true);
    return di_node_class(p->g, line_ends, p->dialect == PYTHON ? 1 : DI_COUNT(line_ends), true);
}

/* A character in one of its cases, and whether it has others; NULL where it has none. */
static const di_node *caseless_code(parser *p, uint32_t code) {
    di_charset_reset(&p->set);
    di_charset_reset(&p->plain_set);
    di_charset_add(&p->set, code, code);
    const di_node *node = finish_class(p, false);
    return p->set.n > 1 ? node : NULL;
}

/* ---- quantifiers ---- */

typedef struct bounds {
    int32_t min, max;
} bounds;

static bool take_count(parser *p, size_t *at, int32_t *count, size_t start) {
    int64_t n = 0;
    size_t first = *at;
    while (*at < p->len && p->text[*at] >= '0' && p->text[*at] <= '9') {
        n = n * 10 + (p->text[(*at)++] - '0');
        if (n > INT32_MAX) {
            di_gram_fail(p->g, DI_ERR_RANGE, "regular expression, position %zu: a count above %d",
                         position_of(p, start), INT32_MAX);
            return false;
        }
    }
    if (*at > first)
        *count = (int32_t)n;
    return true;
}

/* A quantifier at p->at, taken. '{' that doesn't begin one is a character like others, as in Python and ECMA. */
static bool take_quantifier(parser *p, bounds *b) {
    size_t start = p->at, at = p->at + 1;
    char c = p->at < p->len ? p->text[p->at] : '\0';
    if (c == '*' || c == '+' || c == '?') {
        *b = (bounds){c == '+', c == '?' ? 1 : -1};
        p->at++;
    } else if (c == '{') {
        if (at < p->len && p->text[at] == '}')
            return false;
        *b = (bounds){0, -1};
        size_t digits = at;
        if (!take_count(p, &at, &b->min, start))
            return false;
        if (at < p->len && p->text[at] == ',') {
            at++;
            if (!take_count(p, &at, &b->max, start))
                return false;
        } else if (at > digits) {
            b->max = b->min;
        } else {
            return false;
        }
        if (at >= p->len || p->text[at] != '}')
            return false;
        p->at = at + 1;
        if (b->max >= 0 && b->max < b->min) {
            refuse(p, start, "a count of at least %d and at most %d", b->min, b->max);
            return false;
        }
    } else {
        return false;
    }
    if (peek_is(p, '+')) {
        refuse(p, start, "possessive repeats ('%.*s') can't be guaranteed", (int)DI_MIN(p->at + 1 - start, (size_t)32),
               p->text + start);
        return false;
    }
    take(p, '?'); /* lazy: the same texts */
    return true;
}

static part repeat(parser *p, part x, bounds b) {
    width w = b.min == 0 && x.width != WIDTH_NONE ? WIDTH_ANY : x.width;
    if (b.max == 0)
        return plain(di_node_empty(), WIDTH_NONE);
    if (x.tree)
        return new_tree(p, (tree){.kind = TREE_REPEAT, .min = b.min, .max = b.max, .parts = &x, .n = 1}, w);
    return plain(di_node_repeat(p->g, x.node, b.min, b.max), w);
}

/* Comments, and under (?x) spaces. */
static void skip_blank(parser *p) {
    while (p->at < p->len) {
        char c = p->text[p->at];
        if (peek_text(p, "(?#")) {
            const char *end = memchr(p->text + p->at, ')', p->len - p->at);
            if (!end) {
                refuse(p, p->at, "%s", "a comment has no ')'");
                return;
            }
            p->at = (size_t)(end - p->text) + 1;
        } else if (p->flags.is_verbose && c == '#') {
            const char *end = memchr(p->text + p->at, '\n', p->len - p->at);
            p->at = end ? (size_t)(end - p->text) + 1 : p->len;
        } else if (p->flags.is_verbose && (c == ' ' || (c >= '\t' && c <= '\r'))) {
            p->at++;
        } else {
            break;
        }
    }
}

/* ---- groups ---- */

static part parse_alternatives(parser *p, bool is_whole);

static bool set_flag(flags *f, char c, bool value) {
    switch (c) {
    case 'i':
        f->is_caseless = value;
        return true;
    case 'm':
        f->is_multiline = value;
        return true;
    case 's':
        f->is_dotall = value;
        return true;
    case 'x':
        f->is_verbose = value;
        return true;
    case 'a':
        f->is_ascii = true;
        return value && !f->is_unicode;
    case 'u':
        f->is_unicode = true;
        return value && !f->is_ascii;
    default:
        break;
    }
    return false;
}

/* Behind "(?" at a letter or '-': flags up to ')' or ':'. False after a failure. */
static bool parse_flags(parser *p, flags *f, bool *is_scoped) {
    bool value = true;
    while (p->at < p->len) {
        char c = p->text[p->at];
        if (c == ')' || c == ':') {
            p->at++;
            *is_scoped = c == ':';
            return true;
        }
        if (c == '-' && value) {
            value = false;
        } else if (!set_flag(f, c, value)) {
            break;
        }
        p->at++;
    }
    if (f->is_ascii && f->is_unicode)
        refuse(p, p->at, "%s", "the flags 'a' and 'u' exclude each other");
    else
        refuse(p, p->at, "expected a flag of 'aimsux', ')' or ':', found %s", found_at(p, p->at).text);
    return false;
}

/* Behind "(?": refuses by name what is none of the groups that are read. */
static void refuse_group(parser *p, size_t start) {
    static const struct {
        const char *text, *name;
    } known[] = {
        {"=", "look-ahead"},        {"!", "look-ahead"},       {"<=", "look-behind"},  {"<!", "look-behind"},
        {">", "atomic groups"},     {"P=", "back-references"}, {"P>", "recursion"},    {"(", "conditions"},
        {"R", "recursion"},         {"&", "recursion"},        {"|", "branch resets"}, {"0", "recursion"},
        {"L", "flags of a locale"},
    };
    for (size_t i = 0; i < DI_COUNT(known); i++) {
        if (peek_text(p, known[i].text)) {
            refuse(p, start, "%s ('(?%s') can't be guaranteed", known[i].name, known[i].text);
            return;
        }
    }
    if (p->at < p->len && ((p->text[p->at] >= '1' && p->text[p->at] <= '9') || p->text[p->at] == '+'))
        refuse(p, start, "recursion ('(?%c') can't be guaranteed", p->text[p->at]);
    else
        refuse(p, start, "'(?' is followed by %s, which is no group that is known here", found_at(p, p->at).text);
}

/* The name of a group up to '>'. */
static bool skip_name(parser *p) {
    size_t at = p->at;
    while (at < p->len) {
        char c = p->text[at];
        bool is_letter = ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '_' || c == '$' || (unsigned char)c >= 0x80;
        bool is_digit = c >= '0' && c <= '9' && at > p->at;
        if (!is_letter && !is_digit)
            break;
        at++;
    }
    if (at == p->at || at >= p->len || p->text[at] != '>') {
        refuse(p, at, "expected the name of a group and '>', found %s", found_at(p, at).text);
        return false;
    }
    p->at = at + 1;
    return true;
}

/* Behind '('. False where it was no group but flags. is_first: nothing has come before in the text. */
static bool parse_group(parser *p, part *out, size_t start, bool is_first) {
    flags before = p->flags;
    if (take(p, '?')) {
        char c = p->at < p->len ? p->text[p->at] : '\0';
        char after = p->at + 1 < p->len ? p->text[p->at + 1] : '\0';
        if (c == 'P' && after == '<') {
            p->at += 2;
            if (!skip_name(p))
                return false;
        } else if (c == '<' && after != '=' && after != '!') {
            p->at++;
            if (!skip_name(p))
                return false;
        } else if (c == ':') {
            p->at++;
        } else if (c && strchr("aimsux-", c)) {
            bool is_scoped;
            flags f = p->flags;
            if (!parse_flags(p, &f, &is_scoped))
                return false;
            p->flags = f;
            if (!is_scoped) {
                if (!is_first)
                    refuse(p, start, "%s", "flags for the whole expression must come first, for a group '(?i:...)'");
                return false;
            }
        } else {
            refuse_group(p, start);
            return false;
        }
    }
    if (++p->depth > p->g->limits.depth_max) {
        di_gram_fail(p->g, DI_ERR_RANGE, "regular expression, position %zu: groups nest deeper than %d",
                     position_of(p, start), p->g->limits.depth_max);
        return false;
    }
    *out = parse_alternatives(p, false);
    p->depth--;
    if (!failed(p) && !take(p, ')'))
        refuse(p, start, "%s", "'(' has no ')'");
    p->flags = before;
    return true;
}

/* ---- branches ---- */

/* Behind a backslash: an anchor, taken. */
static bool take_anchor(parser *p, mark *m) {
    char c = p->at < p->len ? p->text[p->at] : '\0';
    switch (c) {
    case 'A':
        *m = MARK_START;
        break;
    case 'Z':
    case 'z':
        *m = MARK_END;
        break;
    case 'b':
        *m = MARK_BOUNDARY;
        break;
    case 'B':
        *m = MARK_NO_BOUNDARY;
        break;
    default:
        return false;
    }
    p->at++;
    return true;
}

static mark line_mark(const parser *p, char c) {
    if (c == '^')
        return p->flags.is_multiline ? MARK_LINE_START : MARK_START;
    return p->flags.is_multiline ? MARK_LINE_END : p->dialect == PYTHON ? MARK_LAST_LINE : MARK_END;
}

/* A character or a set that is no group: pushed with the quantifier behind it. */
static void parse_single(parser *p) {
    size_t start = p->at;
    bounds b;
    const di_node *node = NULL;
    int64_t code = CODE_NONE;
    char c = p->text[p->at];
    mark m;
    if (c == '^' || c == '$') {
        p->at++;
        flush_literal(p);
        push(p, new_mark(p, line_mark(p, c)));
        return;
    }
    if (c == '\\') {
        p->at++;
        if (take_anchor(p, &m)) {
            flush_literal(p);
            push(p, new_mark(p, m));
            return;
        }
        di_charset_reset(&p->set);
        di_charset_reset(&p->plain_set);
        code = parse_escape(p, false, &p->set, start);
        if (code == CODE_NONE)
            node = finish_class(p, false);
    } else if (c == '[') {
        p->at++;
        node = parse_class(p, start);
    } else if (c == '.') {
        p->at++;
        node = dot(p);
    } else {
        code = take_code(p);
    }
    if (code != CODE_NONE && p->flags.is_caseless)
        node = caseless_code(p, (uint32_t)code);
    if (code >= 0xD800 && code <= 0xDFFF)
        node = di_node_never();
    if (failed(p))
        return;
    skip_blank(p);
    bool is_repeated = take_quantifier(p, &b);
    if (failed(p))
        return;
    char bytes[4];
    size_t n = node ? 0 : di_utf8_encode((uint32_t)code, bytes);
    if (!node && !is_repeated) {
        add_literal(p, bytes, n);
        return;
    }
    flush_literal(p);
    part x = plain(node ? node : di_node_bytes(p->g, bytes, n), WIDTH_SOME);
    push(p, is_repeated ? repeat(p, x, b) : x);
}

static part parse_branch(parser *p, bool is_whole) {
    size_t base = p->n_parts;
    while (!failed(p)) {
        skip_blank(p);
        if (p->at == p->len || peek_is(p, '|') || peek_is(p, ')'))
            break;
        size_t start = p->at;
        bounds b;
        if (take_quantifier(p, &b)) {
            bool is_twice = start > 0 && p->n_parts > base;
            refuse(p, start, "'%.*s' has nothing to repeat%s", (int)DI_MIN(p->at - start, (size_t)32), p->text + start,
                   is_twice ? " (an anchor or a repeat comes before)" : "");
            break;
        }
        if (failed(p))
            break;
        if (take(p, '(')) {
            bool is_first = is_whole && p->n_parts == base && p->literal_len == 0;
            part x;
            flush_literal(p);
            if (!parse_group(p, &x, start, is_first) || failed(p))
                continue;
            skip_blank(p);
            bool is_repeated = take_quantifier(p, &b);
            push(p, is_repeated ? repeat(p, x, b) : x);
        } else {
            parse_single(p);
        }
        di_gram_status(p->g, NULL);
    }
    flush_literal(p);
    return join(p, base, TREE_SEQ);
}

static part parse_alternatives(parser *p, bool is_whole) {
    size_t base = p->n_parts;
    do {
        part x = parse_branch(p, is_whole);
        is_whole = false;
        push(p, x);
    } while (!failed(p) && take(p, '|'));
    return join(p, base, TREE_ALT);
}

/* ---- anchors by their place ---- */

/* Where a part may stand: at the end of the text, surely not, or now so and now so. */
typedef enum place { PLACE_END, PLACE_INSIDE, PLACE_UNSURE } place;

static place move(place from, width over) {
    return over == WIDTH_NONE || from == PLACE_INSIDE ? from : over == WIDTH_SOME ? PLACE_INSIDE : PLACE_UNSURE;
}

/* Of each part of a sequence. NULL after a failure. */
static place *places_from_right(di_gram *g, const tree *t, place right) {
    place *places = di_gram_alloc(g, t->n * sizeof *places);
    for (size_t i = t->n; places && i > 0; i--) {
        places[i - 1] = right;
        right = move(right, t->parts[i - 1].width);
    }
    return places;
}

/* Whether an anchor of the tree needs more than its place. */
static bool is_undecided(di_gram *g, const part *x, place left, place right) {
    const tree *t = x->tree;
    if (!t)
        return false;
    switch (t->kind) {
    case TREE_MARK:
        /* Python's $ also holds before the last line end, whatever stands for it. */
        return t->mark == MARK_START ? left == PLACE_UNSURE
               : t->mark == MARK_END ? right == PLACE_UNSURE
                                     : t->mark != MARK_LAST_LINE || right != PLACE_END;
    case TREE_ALT:
        for (size_t i = 0; i < t->n; i++) {
            if (is_undecided(g, &t->parts[i], left, right))
                return true;
        }
        return false;
    case TREE_REPEAT:
        if (t->max != 1) {
            left = left == PLACE_INSIDE ? left : PLACE_UNSURE;
            right = right == PLACE_INSIDE ? right : PLACE_UNSURE;
        }
        return is_undecided(g, &t->parts[0], left, right);
    case TREE_SEQ:
        break;
    }
    place *rights = places_from_right(g, t, right);
    for (size_t i = 0; rights && i < t->n; i++) {
        if (is_undecided(g, &t->parts[i], left, rights[i]))
            return true;
        left = move(left, t->parts[i].width);
    }
    return false;
}

typedef struct lowering {
    di_gram *g;
    bool is_marked; /* anchors become marks */
} lowering;

static const di_node *lower(lowering *w, const part *x, place left, place right);

/* A code point that no text has. The constructors would take it out. */
static const di_node *mark_node(di_gram *g, uint32_t code) {
    di_node *node = di_gram_alloc(g, sizeof *node);
    di_code_range *range = di_gram_alloc(g, sizeof *range);
    if (!node || !range)
        return di_node_never();
    *range = (di_code_range){code, code};
    *node = (di_node){.kind = DI_NODE_CLASS, .n = 1, .ranges = range};
    return node;
}

#define MARKS_FIRST 0xD800u

static const di_node *lower_seq(lowering *w, const tree *t, place left, place right) {
    const di_node **nodes = di_gram_alloc(w->g, t->n * sizeof(di_node *));
    const place *rights = places_from_right(w->g, t, right);
    if (!nodes || !rights)
        return di_node_never();
    for (size_t i = 0; i < t->n; i++) {
        nodes[i] = lower(w, &t->parts[i], left, rights[i]);
        left = move(left, t->parts[i].width);
    }
    return di_node_seq(w->g, nodes, t->n);
}

static const di_node *lower(lowering *w, const part *x, place left, place right) {
    const tree *t = x->tree;
    if (!t)
        return x->node;
    switch (t->kind) {
    case TREE_MARK:
        if (w->is_marked)
            return mark_node(w->g, MARKS_FIRST + (uint32_t)t->mark);
        return (t->mark == MARK_START ? left : right) == PLACE_END ? di_node_empty() : di_node_never();
    case TREE_SEQ:
        return lower_seq(w, t, left, right);
    case TREE_REPEAT:
        return di_node_repeat(w->g, lower(w, &t->parts[0], left, right), t->min, t->max);
    case TREE_ALT:
        break;
    }
    const di_node **nodes = di_gram_alloc(w->g, t->n * sizeof(di_node *));
    if (!nodes)
        return di_node_never();
    for (size_t i = 0; i < t->n; i++)
        nodes[i] = lower(w, &t->parts[i], left, right);
    return di_node_alt(w->g, nodes, t->n);
}

/* ---- anchors by marks -----------------------------------------------------------------------------------------------
 *
 * The automaton of rightly marked texts. A state is what came last and what the marks since then allow to come next. */

enum { LAST_START, LAST_WORD, LAST_LINE_END, LAST_OTHER, N_LAST };
enum {
    NEXT_END = 1,
    NEXT_WORD = 2,
    NEXT_LAST_LINE_END = 4, /* a line end that ends the text */
    NEXT_LINE_END = 8,
    NEXT_OTHER = 16,
    NEXT_ANY = 31
};

static int allow(mark m, int last, int next) {
    int words = last == LAST_WORD ? next & ~NEXT_WORD : next & NEXT_WORD; /* what makes a boundary here */
    switch (m) {
    case MARK_START:
        return last == LAST_START ? next : 0;
    case MARK_END:
        return next & NEXT_END;
    case MARK_LAST_LINE:
        return next & (NEXT_END | NEXT_LAST_LINE_END);
    case MARK_LINE_START:
        return last == LAST_START || last == LAST_LINE_END ? next : 0;
    case MARK_LINE_END:
        return next & (NEXT_END | NEXT_LAST_LINE_END | NEXT_LINE_END);
    case MARK_BOUNDARY:
        return words;
    case MARK_NO_BOUNDARY:
        break;
    }
    return next & ~words;
}

static const di_node *rightly_marked(parser *p) {
    enum { N_NEXT = NEXT_ANY + 1, N_STATES = N_LAST * N_NEXT, N_EDGES = N_STATES * (MARK_NO_BOUNDARY + 4) };
    di_gram *g = p->g;
    static const di_code_range line_end = {'\n', '\n'};
    di_charset_reset(&p->set);
    p->flags = (flags){.is_unicode = p->is_word_unicode};
    add_shorthand(p, &p->set, 'w');
    const di_node *word = di_node_class(g, p->set.ranges, p->set.n, false);
    di_charset_add(&p->set, '\n', '\n');
    const di_node *other = di_node_class(g, p->set.ranges, p->set.n, true);
    const di_node *newline = di_node_class(g, &line_end, 1, false);
    const di_node *marks[MARK_NO_BOUNDARY + 1];
    for (int m = 0; m <= MARK_NO_BOUNDARY; m++)
        marks[m] = mark_node(g, MARKS_FIRST + (uint32_t)m);
    di_graph_edge *edges = di_gram_alloc(g, N_EDGES * sizeof *edges);
    if (!edges)
        return di_node_never();
    /* State 0 must be the start, which is last = START, next = ANY: states are numbered from ANY down. */
    bool is_accepting[N_STATES];
    size_t n = 0;
    for (int s = 0; s < N_STATES; s++) {
        int last = s / N_NEXT, next = NEXT_ANY - s % N_NEXT;
        is_accepting[s] = next & NEXT_END;
        for (int m = 0; m <= MARK_NO_BOUNDARY; m++) {
            int allowed = allow((mark)m, last, next);
            if (allowed)
                edges[n++] = (di_graph_edge){s, last * N_NEXT + NEXT_ANY - allowed, marks[m]};
        }
        if (next & NEXT_WORD)
            edges[n++] = (di_graph_edge){s, LAST_WORD * N_NEXT, word};
        if (next & NEXT_OTHER)
            edges[n++] = (di_graph_edge){s, LAST_OTHER * N_NEXT, other};
        /* Where the line end must be the last one, only the end may follow. */
        if (next & (NEXT_LINE_END | NEXT_LAST_LINE_END)) {
            int after = next & NEXT_LINE_END ? NEXT_ANY : NEXT_END;
            edges[n++] = (di_graph_edge){s, LAST_LINE_END * N_NEXT + NEXT_ANY - after, newline};
        }
    }
    return di_node_graph(g, N_STATES, is_accepting, edges, n);
}

static const di_node *anywhere(di_gram *g, const di_node *node) {
    const di_node *any = di_node_repeat(g, di_node_class(g, NULL, 0, true), 0, -1);
    return di_node_seq(g, (const di_node *const[]){any, node, any}, 3);
}

static const di_node *lower_marked(parser *p, const part *x, bool is_search) {
    di_gram *g = p->g;
    lowering w = {.g = g, .is_marked = true};
    const di_node *node = lower(&w, x, PLACE_END, PLACE_END);
    const di_regular *all = di_regular_make(g, is_search ? anywhere(g, node) : node);
    const di_regular *right = di_regular_intersect(g, all, di_regular_make(g, rightly_marked(p)));
    const di_regular *bare =
        di_regular_erase(g, right, &(di_code_range){MARKS_FIRST, MARKS_FIRST + MARK_NO_BOUNDARY}, 1);
    return di_regular_node(g, bare);
}

static const di_node *lower_placed(di_gram *g, const part *x, bool is_search) {
    lowering w = {.g = g};
    const di_node *exact = lower(&w, x, PLACE_END, PLACE_END);
    if (!is_search)
        return exact;
    if (!x->tree)
        return anywhere(g, exact);
    /* The match begins at the start or behind something, and ends at the end or before something. */
    const di_node *more = di_node_repeat(g, di_node_class(g, NULL, 0, true), 1, -1);
    const di_node *first = lower(&w, x, PLACE_END, PLACE_INSIDE), *last = lower(&w, x, PLACE_INSIDE, PLACE_END);
    const di_node *middle = lower(&w, x, PLACE_INSIDE, PLACE_INSIDE);
    const di_node *ways[] = {exact, di_node_seq2(g, first, more), di_node_seq2(g, more, last),
                             di_node_seq(g, (const di_node *const[]){more, middle, more}, 3)};
    return di_node_alt(g, ways, DI_COUNT(ways));
}

static const di_node *to_node(parser *p, const part *x, bool is_search) {
    bool is_marked = p->has_marks;
    for (int i = 0; !is_marked && i < (is_search ? 4 : 1); i++)
        is_marked = is_undecided(p->g, x, i & 1 ? PLACE_INSIDE : PLACE_END, i & 2 ? PLACE_INSIDE : PLACE_END);
    return is_marked ? lower_marked(p, x, is_search) : lower_placed(p->g, x, is_search);
}

static const di_node *read_regex(di_gram *g, const char *text, size_t len, dialect d, bool is_search) {
    parser p = {.g = g, .dialect = d, .text = text, .len = len};
    const di_node *node = di_node_never();
    for (size_t at = 0, n; at < len; at += n) {
        n = di_utf8_decode(text + at, len - at, NULL, NULL);
        if (n == 0) {
            di_gram_fail(g, DI_ERR_REQUEST, "regular expression, byte %zu: no UTF-8", at);
            return node;
        }
    }
    part x = parse_alternatives(&p, true);
    if (!failed(&p) && p.at < p.len)
        refuse(&p, p.at, "%s", "')' has no '('");
    if (!failed(&p))
        node = to_node(&p, &x, is_search);
    free(p.parts);
    free(p.literal);
    di_charset_deinit(&p.set);
    di_charset_deinit(&p.plain_set);
    di_charset_deinit(&p.scratch);
    di_case_groups_deinit(&p.cases);
    for (size_t i = 0; i < p.n_properties; i++)
        di_charset_deinit(&p.properties[i].set);
    return failed(&p) ? di_node_never() : node;
}

const di_node *di_node_regex(di_gram *g, const char *text, size_t len, bool is_search) {
    return read_regex(g, text, len, is_search ? ECMA : PYTHON, is_search);
}

di_status di_gram_regex(di_gram *g, const char *text, size_t len, di_error *err) {
    int32_t root = di_gram_rule_add(g, "root", strlen("root"));
    const di_node *node = di_node_regex(g, text, len, false);
    if (root >= 0)
        di_gram_rule_define(g, root, node);
    g->root = root;
    return di_gram_status(g, err);
}
