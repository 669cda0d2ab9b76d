/* JSON: reading, building and writing. The values are jansson's, behind this header; reader and writer are our own.
 *
 * Parsing is strict RFC 8259 (UTF-8, no trailing text, any value at the top, "\u0000" allowed), keeps the order of
 * keys; a duplicate key keeps its first place and takes the last value. Integers of 64 bits signed or unsigned stay
 * exact, "-0" keeps its sign as a double. Other numbers are doubles; a number that overflows a double is an error.
 * Nesting is limited to 512.
 *
 * Values are reference counted: di_json_free drops the caller's reference; getters return borrowed values. */
#ifndef DI_BASE_JSON_H
#define DI_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "strbuf.h"

typedef struct json_t di_json;

typedef enum di_json_type {
    DI_JSON_NULL,
    DI_JSON_BOOL,
    DI_JSON_INT,  /* fits int64_t */
    DI_JSON_UINT, /* 2^63 .. 2^64-1 */
    DI_JSON_REAL,
    DI_JSON_STRING,
    DI_JSON_ARRAY,
    DI_JSON_OBJECT
} di_json_type;

/* DI_ERR_FORMAT with line, column and what was wrong. */
di_status di_json_parse(di_json **out, const char *text, size_t len, di_error *err);
void di_json_free(di_json *v);    /* NULL is fine */
di_json *di_json_ref(di_json *v); /* one more reference */

di_json_type di_json_kind(const di_json *v);          /* NULL counts as DI_JSON_NULL */
const char *di_json_kind_name(const di_json *v);      /* "string", "integer", ... for messages */
bool di_json_is(const di_json *v, di_json_type type); /* false for NULL */

bool di_json_bool(const di_json *v);
int64_t di_json_int(const di_json *v);                                    /* DI_JSON_INT only, else 0 */
uint64_t di_json_uint(const di_json *v);                                  /* DI_JSON_INT >= 0 or DI_JSON_UINT, else 0 */
double di_json_number(const di_json *v);                                  /* any number as a double, else 0 */
const char *di_json_str(const di_json *v, size_t *len /* may be NULL */); /* NULL when not a string */

size_t di_json_array_len(const di_json *v); /* 0 when not an array */
di_json *di_json_at(const di_json *v, size_t i);
size_t di_json_object_len(const di_json *v);
di_json *di_json_get(const di_json *v, const char *key); /* NULL when absent or not an object */

/* Iteration in key order of the text: for (void *it = di_json_iter(o); it; it = di_json_iter_next(o, it)) */
void *di_json_iter(const di_json *object);
void *di_json_iter_next(const di_json *object, void *it);
const char *di_json_iter_key(void *it, size_t *len /* may be NULL */);
di_json *di_json_iter_value(void *it);

/* Builders; each returns a new reference or NULL when memory is short. set/append steal `v`, accept NULL for it (and
 * then fail), and return false on failure. */
di_json *di_json_new_object(void);
di_json *di_json_new_array(void);
di_json *di_json_new_string(const char *s, size_t len);
di_json *di_json_new_int(int64_t v);
di_json *di_json_new_uint(uint64_t v);
di_json *di_json_new_real(double v);
di_json *di_json_new_bool(bool v);
di_json *di_json_new_null(void);
bool di_json_set(di_json *object, const char *key, di_json *v);
bool di_json_append(di_json *array, di_json *v);
bool di_json_equal(const di_json *a, const di_json *b);
di_json *di_json_copy(const di_json *v); /* deep */

/* Writing. DI_JSON_COMPACT: `,` and `:`; DI_JSON_SPACED: `, ` and `: `. Non-ASCII raw; escapes only \" \\ \b \f \n \r
 * \t and \u00xx (lower case) below 0x20. Doubles in shortest round-trip form: plain with at least one decimal for
 * exponents -4 .. 15, else d.ddde+XX with at least two exponent digits; -0.0 prints as such. */
typedef enum di_json_style { DI_JSON_COMPACT, DI_JSON_SPACED } di_json_style;
void di_json_write(di_strbuf *out, const di_json *v, di_json_style style);
/* A string with quotes and escapes as above. */
void di_json_write_string(di_strbuf *out, const char *s, size_t len);
/* The escapes alone, without the quotes. */
void di_json_write_escaped(di_strbuf *out, const char *s, size_t len);
/* A double in the form above; NaN and infinities print as null. */
void di_json_write_double(di_strbuf *out, double v);

#endif
