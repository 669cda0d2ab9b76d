/* JSON values and the writer; the reader is json_parse.c.
 *
 * Values are jansson's (ordered objects, reference counts, deep copies). Jansson has no unsigned 64-bit integer, so
 * 2^63 .. 2^64-1 is kept as a string of one byte 0xFF and the decimal digits: every other string is valid UTF-8, which
 * has no such byte, so nothing from outside can look like one. */
#include "json.h"

#include <jansson.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "util.h"

static const char uint_mark = (char)0xFF;

static bool is_uint(const di_json *v) {
    return json_is_string(v) && json_string_length(v) > 0 && json_string_value(v)[0] == uint_mark;
}

void di_json_free(di_json *v) {
    json_decref(v);
}

di_json *di_json_ref(di_json *v) {
    return json_incref(v);
}

di_json_type di_json_kind(const di_json *v) {
    if (!v) {
        return DI_JSON_NULL;
    }
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return DI_JSON_OBJECT;
    case JSON_ARRAY:
        return DI_JSON_ARRAY;
    case JSON_STRING:
        return is_uint(v) ? DI_JSON_UINT : DI_JSON_STRING;
    case JSON_INTEGER:
        return DI_JSON_INT;
    case JSON_REAL:
        return DI_JSON_REAL;
    case JSON_TRUE:
    case JSON_FALSE:
        return DI_JSON_BOOL;
    case JSON_NULL:
        break;
    }
    return DI_JSON_NULL;
}

const char *di_json_kind_name(const di_json *v) {
    static const char *const names[] = {"null", "boolean", "integer", "integer", "number", "string", "array", "object"};
    return v ? names[di_json_kind(v)] : "nothing";
}

bool di_json_is(const di_json *v, di_json_type type) {
    return v && di_json_kind(v) == type;
}

bool di_json_bool(const di_json *v) {
    return json_is_true(v);
}

int64_t di_json_int(const di_json *v) {
    return json_is_integer(v) ? (int64_t)json_integer_value(v) : 0;
}

uint64_t di_json_uint(const di_json *v) {
    if (json_is_integer(v)) {
        return json_integer_value(v) >= 0 ? (uint64_t)json_integer_value(v) : 0;
    }
    uint64_t value = 0;
    if (is_uint(v) && !di_parse_u64(json_string_value(v) + 1, &value)) {
        value = 0;
    }
    return value;
}

double di_json_number(const di_json *v) {
    return is_uint(v) ? (double)di_json_uint(v) : json_number_value(v);
}

const char *di_json_str(const di_json *v, size_t *len) {
    if (!di_json_is(v, DI_JSON_STRING)) {
        return NULL;
    }
    if (len) {
        *len = json_string_length(v);
    }
    return json_string_value(v);
}

size_t di_json_array_len(const di_json *v) {
    return json_array_size(v);
}

di_json *di_json_at(const di_json *v, size_t i) {
    return json_array_get(v, i);
}

size_t di_json_object_len(const di_json *v) {
    return json_object_size(v);
}

di_json *di_json_get(const di_json *v, const char *key) {
    return json_object_get(v, key);
}

/* Jansson's iteration takes a pointer to non-const; it changes nothing. */
static json_t *mutable(const di_json *v) {
    return (json_t *)(uintptr_t)v;
}

void *di_json_iter(const di_json *object) {
    return json_object_iter(mutable(object));
}

void *di_json_iter_next(const di_json *object, void *it) {
    return json_object_iter_next(mutable(object), it);
}

const char *di_json_iter_key(void *it, size_t *len) {
    if (len) {
        *len = json_object_iter_key_len(it);
    }
    return json_object_iter_key(it);
}

di_json *di_json_iter_value(void *it) {
    return json_object_iter_value(it);
}

di_json *di_json_new_object(void) {
    return json_object();
}

di_json *di_json_new_array(void) {
    return json_array();
}

di_json *di_json_new_string(const char *s, size_t len) {
    if (di_utf8_valid(s, len)) {
        return json_stringn_nocheck(len ? s : "", len);
    }
    di_strbuf repaired = {0};
    di_utf8_repair(&repaired, s, len);
    di_json *v = repaired.failed ? NULL : json_stringn_nocheck(repaired.data, repaired.len);
    di_strbuf_deinit(&repaired);
    return v;
}

di_json *di_json_new_int(int64_t v) {
    return json_integer(v);
}

di_json *di_json_new_uint(uint64_t v) {
    if (v <= INT64_MAX) {
        return json_integer((json_int_t)v);
    }
    char text[24];
    int n = snprintf(text, sizeof text, "%c%llu", uint_mark, (unsigned long long)v);
    return json_stringn_nocheck(text, (size_t)n);
}

di_json *di_json_new_real(double v) {
    /* Jansson refuses NaN and the infinities; JSON has no spelling for them, so that they become null. */
    return isfinite(v) ? json_real(v) : json_null();
}

di_json *di_json_new_bool(bool v) {
    return json_boolean(v);
}

di_json *di_json_new_null(void) {
    return json_null();
}

bool di_json_set(di_json *object, const char *key, di_json *v) {
    return json_object_set_new(object, key, v) == 0;
}

bool di_json_append(di_json *array, di_json *v) {
    return json_array_append_new(array, v) == 0;
}

/* Jansson's own comparison and copy of objects end keys at a NUL; these two don't. */
bool di_json_equal(const di_json *a, const di_json *b) {
    if (json_is_array(a) && json_is_array(b)) {
        bool is_equal = json_array_size(a) == json_array_size(b);
        for (size_t i = 0; is_equal && i < json_array_size(a); i++) {
            is_equal = di_json_equal(json_array_get(a, i), json_array_get(b, i));
        }
        return is_equal;
    }
    if (json_is_object(a) && json_is_object(b)) {
        bool is_equal = json_object_size(a) == json_object_size(b);
        for (void *it = di_json_iter(a); is_equal && it; it = di_json_iter_next(a, it)) {
            size_t len;
            const char *key = di_json_iter_key(it, &len);
            is_equal = di_json_equal(di_json_iter_value(it), json_object_getn(b, key, len));
        }
        return is_equal;
    }
    return json_equal(a, b) != 0;
}

di_json *di_json_copy(const di_json *v) {
    if (!json_is_array(v) && !json_is_object(v)) {
        return json_deep_copy(v);
    }
    json_t *copy = json_is_array(v) ? json_array() : json_object();
    bool is_ok = copy != NULL;
    for (size_t i = 0; is_ok && i < json_array_size(v); i++) {
        is_ok = json_array_append_new(copy, di_json_copy(json_array_get(v, i))) == 0;
    }
    for (void *it = is_ok ? di_json_iter(v) : NULL; is_ok && it; it = di_json_iter_next(v, it)) {
        size_t len;
        const char *key = di_json_iter_key(it, &len);
        is_ok = json_object_setn_new_nocheck(copy, key, len, di_json_copy(di_json_iter_value(it))) == 0;
    }
    if (!is_ok) {
        json_decref(copy);
        return NULL;
    }
    return copy;
}

void di_json_write_escaped(di_strbuf *out, const char *s, size_t len) {
    if (len == 0) {
        return;
    }
    size_t start = 0; /* of the run not yet appended */
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') {
            continue;
        }
        di_strbuf_append(out, s + start, i - start);
        start = i + 1;
        switch (c) {
        case '"':
            di_strbuf_append(out, "\\\"", 2);
            break;
        case '\\':
            di_strbuf_append(out, "\\\\", 2);
            break;
        case '\b':
            di_strbuf_append(out, "\\b", 2);
            break;
        case '\f':
            di_strbuf_append(out, "\\f", 2);
            break;
        case '\n':
            di_strbuf_append(out, "\\n", 2);
            break;
        case '\r':
            di_strbuf_append(out, "\\r", 2);
            break;
        case '\t':
            di_strbuf_append(out, "\\t", 2);
            break;
        default:
            di_strbuf_printf(out, "\\u%04x", c);
            break;
        }
    }
    di_strbuf_append(out, s + start, len - start);
}

void di_json_write_string(di_strbuf *out, const char *s, size_t len) {
    di_strbuf_putc(out, '"');
    di_json_write_escaped(out, s, len);
    di_strbuf_putc(out, '"');
}

/* Digits and exponent of |v| rounded to n digits: |v| ~ d.ddd * 10^exponent. Independent of the locale's decimal point.
 */
static void round_digits(double v, int n, char digits[32], int *exponent) {
    char text[48];
    snprintf(text, sizeof text, "%.*e", n - 1, fabs(v));
    int n_digits = 0;
    const char *p = text;
    for (; *p != 'e'; p++) {
        if (*p >= '0' && *p <= '9') {
            digits[n_digits++] = *p;
        }
    }
    digits[n_digits] = '\0';
    *exponent = (int)strtol(p + 1, NULL, 10);
}

/* The next decimal of the same number of digits, away from zero. */
static void increment_digits(char *digits, int *exponent) {
    size_t i = strlen(digits);
    while (i > 0 && digits[i - 1] == '9') {
        digits[--i] = '0';
    }
    if (i > 0) {
        digits[i - 1]++;
    } else {
        digits[0] = '1';
        (*exponent)++;
    }
}

static bool digits_read_back(double v, const char *digits, int exponent) {
    char text[64];
    snprintf(text, sizeof text, "%se%d", digits, exponent - ((int)strlen(digits) - 1));
    double back;
    return di_parse_double(text, &back) && back == fabs(v);
}

void di_json_write_double(di_strbuf *out, double v) {
    if (!isfinite(v)) {
        di_strbuf_puts(out, "null");
        return;
    }
    char digits[32];
    int exponent = 0;
    for (int n = 1; n <= 17; n++) {
        round_digits(v, n, digits, &exponent);
        if (digits_read_back(v, digits, exponent)) {
            break;
        }
        /* Below a power of two doubles lie twice as dense as above it. There the nearest decimal may be too far below
         * while its upper neighbour still reads back; that one is the shortest form then. */
        increment_digits(digits, &exponent);
        if (digits_read_back(v, digits, exponent)) {
            break;
        }
    }
    int n_digits = (int)strlen(digits);
    while (n_digits > 1 && digits[n_digits - 1] == '0') {
        digits[--n_digits] = '\0';
    }
    if (signbit(v)) {
        di_strbuf_putc(out, '-');
    }
    if (exponent < -4 || exponent > 15) {
        di_strbuf_putc(out, digits[0]);
        if (n_digits > 1) {
            di_strbuf_putc(out, '.');
            di_strbuf_puts(out, digits + 1);
        }
        di_strbuf_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        di_strbuf_append(out, "0.000", (size_t)(1 - exponent));
        di_strbuf_puts(out, digits);
    } else {
        for (int i = 0; i <= exponent; i++) {
            di_strbuf_putc(out, i < n_digits ? digits[i] : '0');
        }
        di_strbuf_putc(out, '.');
        di_strbuf_puts(out, n_digits > exponent + 1 ? digits + exponent + 1 : "0");
    }
}

void di_json_write(di_strbuf *out, const di_json *v, di_json_style style) {
    const char *comma = style == DI_JSON_SPACED ? ", " : ",";
    const char *colon = style == DI_JSON_SPACED ? ": " : ":";
    switch (di_json_kind(v)) {
    case DI_JSON_NULL:
        di_strbuf_puts(out, "null");
        break;
    case DI_JSON_BOOL:
        di_strbuf_puts(out, di_json_bool(v) ? "true" : "false");
        break;
    case DI_JSON_INT:
        di_strbuf_printf(out, "%lld", (long long)di_json_int(v));
        break;
    case DI_JSON_UINT:
        di_strbuf_puts(out, json_string_value(v) + 1);
        break;
    case DI_JSON_REAL:
        di_json_write_double(out, json_real_value(v));
        break;
    case DI_JSON_STRING:
        di_json_write_string(out, json_string_value(v), json_string_length(v));
        break;
    case DI_JSON_ARRAY:
        di_strbuf_putc(out, '[');
        for (size_t i = 0; i < json_array_size(v); i++) {
            if (i > 0) {
                di_strbuf_puts(out, comma);
            }
            di_json_write(out, json_array_get(v, i), style);
        }
        di_strbuf_putc(out, ']');
        break;
    case DI_JSON_OBJECT: {
        bool is_first = true;
        di_strbuf_putc(out, '{');
        for (void *it = di_json_iter(v); it; it = di_json_iter_next(v, it)) {
            size_t len;
            const char *key = di_json_iter_key(it, &len);
            if (!is_first) {
                di_strbuf_puts(out, comma);
            }
            is_first = false;
            di_json_write_string(out, key, len);
            di_strbuf_puts(out, colon);
            di_json_write(out, di_json_iter_value(it), style);
        }
        di_strbuf_putc(out, '}');
        break;
    }
    }
}
