/* JSON reader: strict RFC 8259 by recursive descent, into jansson's values.
 *
 * It exists beside jansson's own reader for what chat texts need and that one refuses or loses: integers from 2^63 to
 * 2^64-1, larger ones as doubles, "-0", NUL in keys, a limit of depth that is ours, and messages with a column. */
#include "json.h"

#include <jansson.h>
#include <string.h>

#include "error.h"
#include "util.h"

enum { DEPTH_MAX = 512 };

typedef struct reader {
    const char *text, *p, *end;
    int depth;
    di_strbuf scratch; /* the string being read, when it has escapes; or a number's spelling */
    di_error *err;
    di_status status;
} reader;

/* Records the first error at p with its line and column (in characters); returns NULL for the caller to return. */
static json_t *fail_at(reader *r, const char *at, const char *what) {
    if (r->status) {
        return NULL;
    }
    size_t line = 1, column = 1;
    for (const char *q = r->text; q < at; q++) {
        if (*q == '\n') {
            line++;
            column = 1;
        } else if (((unsigned char)*q & 0xC0) != 0x80) {
            column++;
        }
    }
    r->status = di_fail(r->err, DI_ERR_FORMAT, "invalid JSON at line %zu column %zu: %s", line, column, what);
    return NULL;
}

static json_t *fail_memory(reader *r) {
    if (!r->status) {
        r->status =
            di_fail(r->err, DI_ERR_MEMORY, "out of memory while reading JSON of %zu bytes", (size_t)(r->end - r->text));
    }
    return NULL;
}

static void skip_space(reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\t' || *r->p == '\n' || *r->p == '\r')) {
        r->p++;
    }
}

/* The next byte, or -1 at the end of the text. */
static int peek(const reader *r) {
    return r->p < r->end ? (unsigned char)*r->p : -1;
}

static bool is_digit(int c) {
    return c >= '0' && c <= '9';
}

/* Reads four hexadecimal digits at p; -1 when there are not four. */
static int32_t read_hex4(const reader *r, const char *p) {
    if (r->end - p < 4) {
        return -1;
    }
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        int digit = di_hex_digit(p[i]);
        if (digit < 0) {
            return -1;
        }
        value = value << 4 | digit;
    }
    return value;
}

/* Reads the escape at p (a backslash) into scratch. */
static bool read_escape(reader *r) {
    const char *start = r->p++;
    int c = peek(r);
    r->p++;
    switch (c) {
    case '"':
    case '\\':
    case '/':
        di_strbuf_putc(&r->scratch, (char)c);
        return true;
    case 'b':
        di_strbuf_putc(&r->scratch, '\b');
        return true;
    case 'f':
        di_strbuf_putc(&r->scratch, '\f');
        return true;
    case 'n':
        di_strbuf_putc(&r->scratch, '\n');
        return true;
    case 'r':
        di_strbuf_putc(&r->scratch, '\r');
        return true;
    case 't':
        di_strbuf_putc(&r->scratch, '\t');
        return true;
    case 'u':
        break;
    default:
        fail_at(r, start, "unknown escape in a string");
        return false;
    }
    int32_t unit = read_hex4(r, r->p);
    if (unit < 0) {
        fail_at(r, start, "expected four hexadecimal digits behind \\u");
        return false;
    }
    r->p += 4;
    uint32_t cp = (uint32_t)unit;
    if (cp >= 0xD800 && cp <= 0xDFFF) {
        int32_t low = -1;
        if (cp < 0xDC00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
            low = read_hex4(r, r->p + 2);
        }
        if (low < 0xDC00 || low > 0xDFFF) {
            fail_at(r, start, "lone surrogate in a string");
            return false;
        }
        r->p += 6;
        cp = 0x10000 + ((cp - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
    }
    char bytes[4];
    di_strbuf_append(&r->scratch, bytes, di_utf8_encode(cp, bytes));
    return true;
}

/* Reads the string at p (a quotation mark). *s is a view into the text, or into scratch when there are escapes. */
static bool read_string(reader *r, const char **s, size_t *len) {
    const char *run = ++r->p; /* the part not yet in scratch */
    bool has_escape = false;
    for (;;) {
        int c = peek(r);
        if (c < 0) {
            fail_at(r, r->p, "unexpected end in a string");
            return false;
        }
        if (c == '"') {
            break;
        }
        if (c < 0x20) {
            fail_at(r, r->p, "control character in a string");
            return false;
        }
        if (c == '\\') {
            if (!has_escape) {
                di_strbuf_reset(&r->scratch);
                has_escape = true;
            }
            di_strbuf_append(&r->scratch, run, (size_t)(r->p - run));
            if (!read_escape(r)) {
                return false;
            }
            run = r->p;
        } else if (c < 0x80) {
            r->p++;
        } else {
            size_t n = di_utf8_decode(r->p, (size_t)(r->end - r->p), NULL, NULL);
            if (n == 0) {
                fail_at(r, r->p, "invalid UTF-8 in a string");
                return false;
            }
            r->p += n;
        }
    }
    if (has_escape) {
        di_strbuf_append(&r->scratch, run, (size_t)(r->p - run));
        if (r->scratch.failed) {
            fail_memory(r);
            return false;
        }
        *s = di_strbuf_str(&r->scratch);
        *len = r->scratch.len;
    } else {
        *s = run;
        *len = (size_t)(r->p - run);
    }
    r->p++;
    return true;
}

static json_t *read_number(reader *r) {
    const char *start = r->p;
    bool is_integer = true;
    r->p += *r->p == '-';
    if (!is_digit(peek(r))) {
        return fail_at(r, r->p, "expected a digit");
    }
    if (*r->p == '0') {
        r->p++;
        if (is_digit(peek(r))) {
            return fail_at(r, r->p, "a number starts with 0");
        }
    }
    while (is_digit(peek(r))) {
        r->p++;
    }
    if (peek(r) == '.') {
        is_integer = false;
        r->p++;
        if (!is_digit(peek(r))) {
            return fail_at(r, r->p, "expected a digit behind the decimal point");
        }
        while (is_digit(peek(r))) {
            r->p++;
        }
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        is_integer = false;
        r->p++;
        if (peek(r) == '+' || peek(r) == '-') {
            r->p++;
        }
        if (!is_digit(peek(r))) {
            return fail_at(r, r->p, "expected a digit in the exponent");
        }
        while (is_digit(peek(r))) {
            r->p++;
        }
    }
    di_strbuf_reset(&r->scratch);
    di_strbuf_append(&r->scratch, start, (size_t)(r->p - start));
    if (r->scratch.failed) {
        return fail_memory(r);
    }
    const char *spelling = r->scratch.data;
    json_t *v;
    int64_t i64;
    uint64_t u64;
    double number;
    /* "-0" has no integer that keeps its sign. */
    if (is_integer && strcmp(spelling, "-0") != 0 && di_parse_i64(spelling, &i64)) {
        v = di_json_new_int(i64);
    } else if (is_integer && di_parse_u64(spelling, &u64)) {
        v = di_json_new_uint(u64);
    } else if (di_parse_double(spelling, &number)) {
        v = di_json_new_real(number);
    } else {
        return fail_at(r, start, "a number too large for a double");
    }
    return v ? v : fail_memory(r);
}

static json_t *read_word(reader *r, const char *word, json_t *v) {
    size_t len = strlen(word);
    if ((size_t)(r->end - r->p) < len || memcmp(r->p, word, len) != 0) {
        return fail_at(r, r->p, "expected a value");
    }
    r->p += len;
    return v;
}

static json_t *read_value(reader *r);

static json_t *read_array(reader *r) {
    json_t *array = json_array();
    if (!array) {
        return fail_memory(r);
    }
    r->p++;
    skip_space(r);
    if (peek(r) == ']') {
        r->p++;
        return array;
    }
    for (;;) {
        json_t *v = read_value(r);
        if (!v) {
            break;
        }
        if (json_array_append_new(array, v) != 0) {
            fail_memory(r);
            break;
        }
        skip_space(r);
        int c = peek(r);
        if (c == ']') {
            r->p++;
            return array;
        }
        if (c != ',') {
            fail_at(r, r->p, "expected ',' or ']'");
            break;
        }
        r->p++;
    }
    json_decref(array);
    return NULL;
}

/* Reads one `"key": value` into object. A key that exists keeps its place and takes the new value. */
static bool read_member(reader *r, json_t *object) {
    skip_space(r);
    if (peek(r) != '"') {
        fail_at(r, r->p, "expected a key in quotation marks");
        return false;
    }
    const char *key;
    size_t len;
    if (!read_string(r, &key, &len)) {
        return false;
    }
    /* The value may have strings of its own, which take the scratch buffer over. */
    di_strbuf kept = {0};
    if (key == r->scratch.data) {
        kept = r->scratch;
        r->scratch = (di_strbuf){0};
    }
    bool is_ok = false;
    skip_space(r);
    if (peek(r) != ':') {
        fail_at(r, r->p, "expected ':' behind a key");
    } else {
        r->p++;
        json_t *v = read_value(r);
        if (v) {
            is_ok = json_object_setn_new_nocheck(object, key, len, v) == 0;
            if (!is_ok) {
                fail_memory(r);
            }
        }
    }
    di_strbuf_deinit(&kept);
    return is_ok;
}

static json_t *read_object(reader *r) {
    json_t *object = json_object();
    if (!object) {
        return fail_memory(r);
    }
    r->p++;
    skip_space(r);
    if (peek(r) == '}') {
        r->p++;
        return object;
    }
    while (read_member(r, object)) {
        skip_space(r);
        int c = peek(r);
        if (c == '}') {
            r->p++;
            return object;
        }
        if (c != ',') {
            fail_at(r, r->p, "expected ',' or '}'");
            break;
        }
        r->p++;
    }
    json_decref(object);
    return NULL;
}

static json_t *read_value(reader *r) {
    skip_space(r);
    int c = peek(r);
    if (c == '{' || c == '[') {
        if (r->depth == DEPTH_MAX) {
            return fail_at(r, r->p, "nested deeper than 512");
        }
        r->depth++;
        json_t *v = c == '{' ? read_object(r) : read_array(r);
        r->depth--;
        return v;
    }
    if (c == '"') {
        const char *s;
        size_t len;
        if (!read_string(r, &s, &len)) {
            return NULL;
        }
        json_t *v = json_stringn_nocheck(s, len);
        return v ? v : fail_memory(r);
    }
    if (c == '-' || is_digit(c)) {
        return read_number(r);
    }
    switch (c) {
    case 't':
        return read_word(r, "true", json_true());
    case 'f':
        return read_word(r, "false", json_false());
    case 'n':
        return read_word(r, "null", json_null());
    case -1:
        return fail_at(r, r->p, "unexpected end, expected a value");
    default:
        return fail_at(r, r->p, "expected a value");
    }
}

di_status di_json_parse(di_json **out, const char *text, size_t len, di_error *err) {
    if (len == 0) {
        text = ""; /* NULL is a valid empty text */
    }
    reader r = {.text = text, .p = text, .end = text + len, .err = err};
    json_t *v = read_value(&r);
    if (v) {
        skip_space(&r);
        if (r.p < r.end) {
            json_decref(v);
            v = fail_at(&r, r.p, "text behind the value");
        }
    }
    di_strbuf_deinit(&r.scratch);
    if (!v) {
        return r.status;
    }
    *out = v;
    return DI_OK;
}
