/* EBNF: rules `name ::= body`, of which `root` is the start. The syntax is that of GBNF as xgrammar reads it.
 *
 *     body     branches divided by '|'; an empty branch is the empty text
 *     branch   elements with a repeat: * + ? {n} {n,} {n,m}
 *     element  "text", [a-z] or [^a-z], the name of a rule, ( body ), Regex("expression")
 *     space    blanks, tabs, line ends and # comments, anywhere between; a rule's name is the first word of its line
 *
 * Escapes: \n \r \t \\ \" \' \? \a \b \f \v \e \0, \x with any number of digits, \uXXXX, \UXXXXXXXX; in classes those
 * of regular expressions too. A look-ahead `(= ...)` at the end of a rule says what follows anyway where the rule is
 * used: it is read, and changes nothing. The other macros of xgrammar work on token ids and are refused by name. */
#include "ir.h"

enum { ATTRIBUTES_MAX = 512 }; /* bytes between the brackets behind a rule's name */

typedef struct place {
    size_t at;
    int32_t line, column; /* from 1; columns count characters */
} place;

typedef struct use {
    int32_t rule;
    place where;
} use;

typedef struct parser {
    di_gram *g;
    const char *text;
    size_t len;
    place now, word_end; /* where reading stands; the end of what was read last, before spaces */
    int32_t depth;
    di_map rule_of; /* keys in text */
    use *uses;      /* owned: rules that were used before they were defined */
    size_t n_uses, uses_cap;
    const di_node **nodes; /* owned: of the open branches and bodies, one above the other */
    size_t n_nodes, nodes_cap;
    di_code_range *ranges; /* owned: of the class in the making */
    size_t n_ranges, ranges_cap;
    di_strbuf bytes; /* of the string in the making */
} parser;

#define refuse(p, where, format, ...)                                                                                  \
    di_gram_fail((p)->g, DI_ERR_REQUEST, "ebnf, line %d, column %d: " format, (where).line, (where).column, __VA_ARGS__)

static bool failed(const parser *p) {
    return di_gram_has_failed(p->g);
}

/* ---- characters ---- */

static char peek(const parser *p, size_t ahead) {
    return p->now.at + ahead < p->len ? p->text[p->now.at + ahead] : '\0';
}

static bool at_end(const parser *p) {
    return p->now.at >= p->len;
}

static bool peek_text(const parser *p, const char *s) {
    size_t n = strlen(s);
    return p->len - p->now.at >= n && memcmp(p->text + p->now.at, s, n) == 0;
}

/* n bytes on, which end with a character. */
static void advance(parser *p, size_t n) {
    for (size_t end = p->now.at + n; p->now.at < end && !at_end(p); p->now.at++) {
        unsigned char c = (unsigned char)p->text[p->now.at];
        if (c == '\n' || (c == '\r' && peek(p, 1) != '\n')) {
            p->now.line++;
            p->now.column = 1;
        } else {
            p->now.column += (c & 0xC0) != 0x80;
        }
    }
    p->word_end = p->now;
}

static void skip_space(parser *p) {
    place end = p->word_end;
    while (!at_end(p)) {
        char c = peek(p, 0);
        if (c == '#') {
            while (!at_end(p) && peek(p, 0) != '\n' && peek(p, 0) != '\r')
                advance(p, 1);
        } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
            advance(p, 1);
        } else {
            break;
        }
    }
    p->word_end = end;
}

static bool take(parser *p, const char *s) {
    if (!peek_text(p, s))
        return false;
    advance(p, strlen(s));
    return true;
}

typedef struct quoted {
    char text[8];
} quoted;

/* What stands here, for messages. */
static quoted found_here(const parser *p) {
    quoted q = {"the end"};
    if (!at_end(p)) {
        memset(q.text, 0, sizeof q.text);
        unsigned char c = (unsigned char)peek(p, 0);
        if (c == '\n' || c == '\r') {
            memcpy(q.text, "newline", 7);
        } else {
            size_t n = di_utf8_decode(p->text + p->now.at, p->len - p->now.at, NULL, NULL);
            q.text[0] = '\'';
            memcpy(q.text + 1, p->text + p->now.at, n);
            q.text[n + 1] = '\'';
        }
    }
    return q;
}

static bool is_name_start(char c) {
    return c == '_' || c == '-' || c == '.' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static size_t name_len(const parser *p) {
    size_t n = 0;
    if (is_name_start(peek(p, 0))) {
        while (is_name_start(peek(p, n)) || is_digit(peek(p, n)))
            n++;
    }
    return n;
}

static void push(parser *p, const di_node *node) {
    p->nodes = di_gram_grow(p->g, p->nodes, &p->nodes_cap, p->n_nodes + 1, sizeof(di_node *));
    if (!failed(p))
        p->nodes[p->n_nodes++] = node;
}

/* ---- strings and classes ---- */

static uint32_t parse_hex(parser *p, char letter, place start) {
    size_t n = 0, wanted = letter == 'u' ? 4 : 8;
    uint32_t code = 0;
    while (di_hex_digit(peek(p, n)) >= 0 && (letter == 'x' || n < wanted)) {
        code = DI_MIN(code * 16 + (uint32_t)di_hex_digit(peek(p, n)), (uint32_t)DI_CODE_MAX + 1);
        n++;
    }
    if (letter == 'x' ? n == 0 : n != wanted) {
        refuse(p, start, "'\\%c' needs %s hexadecimal digits", letter,
               letter == 'x' ? "some"
               : wanted == 4 ? "4"
                             : "8");
    } else if (code > DI_CODE_MAX || (code >= 0xD800 && code <= 0xDFFF)) {
        refuse(p, start, "'\\%c%.*s' is no code point of a text", letter, (int)DI_MIN(n, (size_t)16),
               p->text + p->now.at);
    }
    advance(p, n);
    return code;
}

/* A character or an escape, taken. more: letters that stand for themselves behind a backslash. */
static uint32_t parse_code(parser *p, const char *more) {
    static const char letters[] = "nrt\\\"'?abfve0", meanings[] = "\n\r\t\\\"'?\a\b\f\v\033\0";
    place start = p->now;
    uint32_t code = 0;
    if (peek(p, 0) != '\\') {
        advance(p, di_utf8_decode(p->text + p->now.at, p->len - p->now.at, &code, NULL));
        return code;
    }
    char c = peek(p, 1);
    const char *known = c ? strchr(letters, c) : NULL;
    if (known || (c && strchr(more, c))) {
        advance(p, 2);
        return (unsigned char)(known ? meanings[known - letters] : c);
    }
    if (c == 'x' || c == 'u' || c == 'U') {
        advance(p, 2);
        return parse_hex(p, c, start);
    }
    advance(p, 1);
    refuse(p, start, "a backslash before %s is no escape that is known here", found_here(p).text);
    return 0;
}

/* At '"': into p->bytes. */
static void parse_string(parser *p) {
    place start = p->now;
    advance(p, 1);
    di_strbuf_reset(&p->bytes);
    while (!failed(p) && !take(p, "\"")) {
        if (at_end(p) || peek(p, 0) == '\n' || peek(p, 0) == '\r') {
            refuse(p, start, "a string has no closing '\"' on its line%s", "");
            return;
        }
        char bytes[4];
        uint32_t code = parse_code(p, "");
        if (!failed(p))
            di_strbuf_append(&p->bytes, bytes, di_utf8_encode(code, bytes));
    }
    di_error err;
    if (di_strbuf_status(&p->bytes, &err))
        di_gram_fail(p->g, err.code, "%s", err.message);
}

static void add_range(parser *p, uint32_t first, uint32_t last) {
    p->ranges = di_gram_grow(p->g, p->ranges, &p->ranges_cap, p->n_ranges + 1, sizeof *p->ranges);
    if (!failed(p))
        p->ranges[p->n_ranges++] = (di_code_range){first, last};
}

/* At '['. */
static const di_node *parse_class(parser *p) {
    static const char escapes[] = "^$\\.*+?()[]{}|/-";
    place start = p->now;
    advance(p, 1);
    bool is_negated = take(p, "^");
    p->n_ranges = 0;
    while (!failed(p) && !take(p, "]")) {
        if (at_end(p) || peek(p, 0) == '\n' || peek(p, 0) == '\r') {
            refuse(p, start, "a class has no closing ']' on its line%s", "");
            break;
        }
        place at = p->now;
        if (peek(p, 0) == '\\' && peek(p, 1) && strchr("dDwWsS", peek(p, 1))) {
            refuse(p, at, "'\\%c' is no part of an ebnf class; a class of a Regex(\"...\") may have it", peek(p, 1));
            break;
        }
        uint32_t first = parse_code(p, escapes), last = first;
        if (!failed(p) && peek(p, 0) == '-' && peek(p, 1) && !strchr("]\n\r", peek(p, 1))) {
            advance(p, 1);
            last = parse_code(p, escapes);
        }
        if (!failed(p) && last < first)
            refuse(p, at, "a range of characters from U+%04X to U+%04X", first, last);
        add_range(p, first, last);
    }
    return failed(p) ? di_node_never() : di_node_class(p->g, p->ranges, p->n_ranges, is_negated);
}

/* ---- rules ---- */

/* The number of the rule of a name; one that isn't there yet is added, to be defined later. */
static int32_t rule_of(parser *p, const char *name, size_t len) {
    int64_t known;
    if (di_map_get(&p->rule_of, name, len, &known))
        return (int32_t)known;
    int32_t rule = di_gram_rule_add(p->g, name, len);
    di_error err;
    if (rule >= 0 && di_map_set(&p->rule_of, name, len, rule, NULL, &err))
        di_gram_fail(p->g, err.code, "%s", err.message);
    return rule;
}

/* Whether a rule's head begins here: a name that `::=` follows, with attributes between, perhaps. */
static bool is_head(const parser *p) {
    size_t n = name_len(p);
    if (n == 0)
        return false;
    if (peek(p, n) == '[') {
        size_t at = n;
        while (at < n + ATTRIBUTES_MAX && peek(p, at) && peek(p, at) != ']' && peek(p, at) != '\n')
            at++;
        if (peek(p, at) == ']') {
            for (at++; peek(p, at) == ' ' || peek(p, at) == '\t'; at++) {
            }
            if (peek(p, at) == ':' && peek(p, at + 1) == ':' && peek(p, at + 2) == '=')
                return true;
        }
    }
    /* Spaces, line ends and comments may come before the sign. */
    parser ahead = *p;
    advance(&ahead, n);
    skip_space(&ahead);
    return peek_text(&ahead, "::=");
}

static const di_node *parse_body(parser *p);

static const di_node *parse_group(parser *p) {
    place start = p->now;
    if (++p->depth > p->g->limits.depth_max) {
        di_gram_fail(p->g, DI_ERR_RANGE, "ebnf, line %d, column %d: groups nest deeper than %d", start.line,
                     start.column, p->g->limits.depth_max);
        return di_node_never();
    }
    advance(p, 1);
    const di_node *node = parse_body(p);
    p->depth--;
    if (!failed(p) && !take(p, ")"))
        refuse(p, p->now, "expected ')' for the '(' of line %d, column %d, found %s", start.line, start.column,
               found_here(p).text);
    return node;
}

/* At the name of a macro and '('. */
static const di_node *parse_macro(parser *p, const char *name, size_t len) {
    place start = p->now;
    bool is_regex = len == strlen("Regex") && memcmp(name, "Regex", len) == 0;
    if (!is_regex) {
        refuse(p, start, "the macro '%.*s' is not supported", (int)len, name);
        return di_node_never();
    }
    advance(p, len);
    skip_space(p);
    advance(p, 1);
    skip_space(p);
    if (peek(p, 0) != '"') {
        refuse(p, p->now, "expected a string with a regular expression, found %s", found_here(p).text);
        return di_node_never();
    }
    parse_string(p);
    skip_space(p);
    if (!failed(p) && !take(p, ")"))
        refuse(p, p->now, "expected ')' behind a regular expression, found %s", found_here(p).text);
    if (failed(p))
        return di_node_never();
    const di_node *node = di_node_regex(p->g, di_strbuf_str(&p->bytes), p->bytes.len, false);
    if (failed(p))
        di_error_context(&p->g->error, p->g->failed, "ebnf, line %d, column %d", start.line, start.column);
    return node;
}

/* Before '(' these names are macros, even where a rule has one of them. */
static bool is_macro(const parser *p, size_t len) {
    static const char *const macros[] = {"Regex",        "TagDispatch",      "Token",
                                         "ExcludeToken", "TokenTagDispatch", "Substring"};
    const char *name = p->text + p->now.at;
    bool is_known = false;
    for (size_t i = 0; i < DI_COUNT(macros); i++)
        is_known |= len == strlen(macros[i]) && memcmp(name, macros[i], len) == 0;
    if (!is_known)
        return false;
    parser ahead = *p;
    advance(&ahead, len);
    skip_space(&ahead);
    return peek(&ahead, 0) == '(';
}

static const di_node *parse_name(parser *p) {
    size_t len = name_len(p);
    const char *name = p->text + p->now.at;
    if (is_macro(p, len))
        return parse_macro(p, name, len);
    int32_t rule = rule_of(p, name, len);
    if (rule < 0)
        return di_node_never();
    if (!p->g->rules[rule].node) {
        p->uses = di_gram_grow(p->g, p->uses, &p->uses_cap, p->n_uses + 1, sizeof *p->uses);
        if (!failed(p))
            p->uses[p->n_uses++] = (use){rule, p->now};
    }
    advance(p, len);
    return di_node_rule(p->g, rule);
}

/* NULL: no element begins here. */
static const di_node *parse_element(parser *p) {
    switch (peek(p, 0)) {
    case '"':
        parse_string(p);
        return failed(p) ? di_node_never() : di_node_bytes(p->g, di_strbuf_str(&p->bytes), p->bytes.len);
    case '[':
        return parse_class(p);
    case '(':
        return peek(p, 1) == '=' ? NULL : parse_group(p);
    default:
        return name_len(p) > 0 && !is_head(p) ? parse_name(p) : NULL;
    }
}

/* ---- repeats ---- */

static int32_t parse_count(parser *p) {
    place start = p->now;
    int64_t n = 0;
    if (!is_digit(peek(p, 0))) {
        refuse(p, start, "expected a count, found %s", found_here(p).text);
        return 0;
    }
    while (is_digit(peek(p, 0))) {
        n = n * 10 + (peek(p, 0) - '0');
        if (n > INT32_MAX) {
            di_gram_fail(p->g, DI_ERR_RANGE, "ebnf, line %d, column %d: a count above %d", start.line, start.column,
                         INT32_MAX);
            return 0;
        }
        advance(p, 1);
    }
    skip_space(p);
    return (int32_t)n;
}

/* At '{'. */
static const di_node *parse_braces(parser *p, const di_node *node) {
    place start = p->now;
    advance(p, 1);
    skip_space(p);
    int32_t min = parse_count(p), max = min;
    if (!failed(p) && take(p, ",")) {
        skip_space(p);
        max = -1;
        if (!take(p, "-1") && peek(p, 0) != '}') /* -1 is how xgrammar prints "any number" */
            max = parse_count(p);
        skip_space(p);
    }
    if (!failed(p) && !take(p, "}"))
        refuse(p, p->now, "expected '}' behind a count, found %s", found_here(p).text);
    if (!failed(p) && max >= 0 && max < min)
        refuse(p, start, "a count of at least %d and at most %d", min, max);
    return failed(p) ? di_node_never() : di_node_repeat(p->g, node, min, max);
}

static const di_node *parse_repeat(parser *p, const di_node *node) {
    skip_space(p);
    if (take(p, "*"))
        return di_node_repeat(p->g, node, 0, -1);
    if (take(p, "+"))
        return di_node_repeat(p->g, node, 1, -1);
    if (take(p, "?"))
        return di_node_repeat(p->g, node, 0, 1);
    return peek(p, 0) == '{' ? parse_braces(p, node) : node;
}

static const di_node *parse_branch(parser *p) {
    size_t base = p->n_nodes;
    while (!failed(p)) {
        skip_space(p);
        const di_node *element = parse_element(p);
        if (!element || failed(p))
            break;
        push(p, parse_repeat(p, element));
        di_gram_status(p->g, NULL);
    }
    size_t n = p->n_nodes - base;
    const di_node *node = failed(p) || n == 0 ? di_node_empty() : di_node_seq(p->g, p->nodes + base, n);
    p->n_nodes = base;
    return node;
}

static const di_node *parse_body(parser *p) {
    size_t base = p->n_nodes;
    do {
        push(p, parse_branch(p));
        skip_space(p);
    } while (!failed(p) && take(p, "|"));
    const di_node *node = failed(p) ? di_node_never() : di_node_alt(p->g, p->nodes + base, p->n_nodes - base);
    p->n_nodes = base;
    return node;
}

/* `[capture]`, `[capture="name"]`: names what a rule has matched for who reads it, and changes nothing. */
static void parse_attributes(parser *p) {
    if (!take(p, "["))
        return;
    do {
        skip_space(p);
        place start = p->now;
        size_t len = name_len(p);
        bool is_capture = len == strlen("capture") && peek_text(p, "capture");
        if (!is_capture) {
            refuse(p, start, "the attribute '%.*s' of a rule is not supported", (int)DI_MIN(len, (size_t)64),
                   p->text + start.at);
            return;
        }
        advance(p, len);
        skip_space(p);
        if (take(p, "=")) {
            skip_space(p);
            if (peek(p, 0) != '"') {
                refuse(p, p->now, "expected a string with a name, found %s", found_here(p).text);
                return;
            }
            parse_string(p);
            skip_space(p);
        }
    } while (!failed(p) && take(p, ","));
    if (!failed(p) && !take(p, "]"))
        refuse(p, p->now, "expected ']' behind the attributes of a rule, found %s", found_here(p).text);
}

/* `(= ...)` behind a body. */
static void skip_lookahead(parser *p) {
    place start = p->now;
    advance(p, 2);
    p->depth++; /* as any group; one more than the limit does no harm */
    parse_body(p);
    p->depth--;
    if (!failed(p) && !take(p, ")"))
        refuse(p, p->now, "expected ')' for the '(=' of line %d, column %d, found %s", start.line, start.column,
               found_here(p).text);
    skip_space(p);
}

static void parse_rule(parser *p) {
    place start = p->now, end_before = p->word_end;
    size_t len = name_len(p);
    const char *name = p->text + p->now.at;
    if (len == 0) {
        refuse(p, start, "expected the name of a rule, found %s", found_here(p).text);
        return;
    }
    if (end_before.at > 0 && end_before.line == start.line) {
        refuse(p, start, "the rule '%.*s' doesn't begin its line", (int)DI_MIN(len, (size_t)64), name);
        return;
    }
    advance(p, len);
    parse_attributes(p);
    if (failed(p))
        return;
    skip_space(p);
    if (!take(p, "::=")) {
        refuse(p, p->now, "expected '::=' behind '%.*s', found %s", (int)DI_MIN(len, (size_t)64), name,
               found_here(p).text);
        return;
    }
    int32_t rule = rule_of(p, name, len);
    if (rule < 0)
        return;
    if (p->g->rules[rule].node) {
        refuse(p, start, "the rule '%.*s' is defined twice", (int)DI_MIN(len, (size_t)64), name);
        return;
    }
    skip_space(p);
    if (at_end(p) || is_head(p)) {
        refuse(p, start, "the rule '%.*s' has no body", (int)DI_MIN(len, (size_t)64), name);
        return;
    }
    const di_node *node = parse_body(p);
    if (!failed(p) && peek_text(p, "(="))
        skip_lookahead(p);
    if (failed(p))
        return;
    if (!at_end(p) && !is_head(p)) {
        refuse(p, p->now, "expected an element, '|' or the next rule, found %s", found_here(p).text);
        return;
    }
    di_gram_rule_define(p->g, rule, node);
}

static void read_rules(parser *p) {
    for (size_t at = 0, n; at < p->len; at += n) {
        n = di_utf8_decode(p->text + at, p->len - at, NULL, NULL);
        if (n == 0 || p->text[at] == '\0') {
            advance(p, at);
            refuse(p, p->now, "byte %zu is no UTF-8 text", at);
            return;
        }
    }
    skip_space(p);
    while (!failed(p) && !at_end(p))
        parse_rule(p);
    for (size_t i = 0; i < p->n_uses && !failed(p); i++) {
        const di_gram_rule *rule = &p->g->rules[p->uses[i].rule];
        if (!rule->node)
            refuse(p, p->uses[i].where, "the rule '%.*s' is not defined", (int)DI_MIN(rule->name_len, (size_t)64),
                   rule->name);
    }
}

di_status di_gram_ebnf(di_gram *g, const char *text, size_t len, di_error *err) {
    parser p = {.g = g, .text = text, .len = len, .now = {0, 1, 1}, .word_end = {0, 1, 1}};
    int64_t root;
    read_rules(&p);
    if (!failed(&p)) {
        if (di_map_get(&p.rule_of, "root", strlen("root"), &root))
            g->root = (int32_t)root;
        else
            di_gram_fail(g, DI_ERR_REQUEST, "ebnf: there is no rule 'root'");
    }
    di_map_deinit(&p.rule_of);
    free(p.uses);
    free(p.nodes);
    free(p.ranges);
    di_strbuf_deinit(&p.bytes);
    return di_gram_status(g, err);
}
