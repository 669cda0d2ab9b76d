/* What the parts of the JSON schema front end share.
 *
 * A schema is read in three steps. A goal is a set of schemas, each taken as it is or negated, that one value has to
 * satisfy all at once: the schema of a property that two records declare, say. Reading a goal's schemas gives shapes:
 * the alternatives of its value, each a conjunction of facts without any applicator left (schema_shape.c; this is where
 * allOf, oneOf, not, if and $ref go). Writing a shape gives nodes, by type (schema_object.c, schema_array.c,
 * schema_string.c, schema_number.c, schema_value.c), which ask for the nodes of the goals inside them. Goals are
 * interned and have their node once, so that recursion ends in a rule and shared definitions are written once.
 *
 * Whatever is left out on the way makes the language smaller, never larger: a text of the grammar is valid. */
#ifndef DI_GRAMMAR_SCHEMA_INTERNAL_H
#define DI_GRAMMAR_SCHEMA_INTERNAL_H

#include "ir.h"

/* ---- types of values: numbers are apart by whether they are whole ---- */
enum {
    DI_TYPE_NULL = 1,
    DI_TYPE_FALSE = 2,
    DI_TYPE_TRUE = 4,
    DI_TYPE_WHOLE = 8,
    DI_TYPE_FRACTION = 16,
    DI_TYPE_STRING = 32,
    DI_TYPE_ARRAY = 64,
    DI_TYPE_OBJECT = 128,
    DI_TYPE_BOOL = DI_TYPE_FALSE | DI_TYPE_TRUE,
    DI_TYPE_NUMBER = DI_TYPE_WHOLE | DI_TYPE_FRACTION,
    DI_TYPE_ALL = 255
};

/* ---- decimals: numbers as they are written, of any magnitude ---- */
typedef struct di_decimal {
    bool is_negative;   /* never for 0 */
    int32_t n_whole;    /* digits before the point, at least one, no leading zeros but for 0 itself */
    int32_t n_fraction; /* digits behind it, no zeros at their end */
    const char *digits; /* [n_whole + n_fraction] */
} di_decimal;

/* ---- facts and shapes ---- */
typedef enum di_fact_kind {
    DI_FACT_MULTIPLE,     /* decimal: multipleOf; may be negated */
    DI_FACT_PATTERN,      /* text: pattern; may be negated */
    DI_FACT_FORMAT,       /* index: format; may be negated */
    DI_FACT_VALUES,       /* value: array of enum, or the value of const if !is_list; may be negated */
    DI_FACT_ARRAY,        /* schema with prefixItems, items, additionalItems; negated: of a double negation */
    DI_FACT_ELEMENT,      /* element number `index` exists and fails schema `value` */
    DI_FACT_CONTAINS,     /* index .. last elements satisfy `value`, or its negation */
    DI_FACT_UNIQUE,       /* uniqueItems */
    DI_FACT_REST,         /* unevaluatedItems: elements behind those of scope's arrays satisfy `value` */
    DI_FACT_OBJECT,       /* schema with properties, patternProperties, additionalProperties; negated likewise */
    DI_FACT_KEY_REQUIRED, /* text: a key that must be there */
    DI_FACT_KEY_ABSENT,   /* text: a key that must not */
    DI_FACT_KEY_FAILS,    /* text: a key that is there, with a value that fails schema `value` */
    DI_FACT_NAMES,        /* value: propertyNames */
    DI_FACT_OTHERS        /* unevaluatedProperties: keys that no record of scope knows satisfy `value` */
} di_fact_kind;

/* Facts are immutable lists that share their tails; what was said last comes first. */
typedef struct di_fact di_fact;
struct di_fact {
    di_fact_kind kind;
    bool is_negated, is_list;
    const di_json *schema; /* the schema object that says so */
    const di_json *value;
    const char *text; /* borrowed from the schema */
    size_t len;
    int64_t index, last;
    di_decimal decimal;
    const di_fact *scope, *next;
};

typedef struct di_bound {
    bool is_set, is_exclusive;
    di_decimal value;
} di_bound;

typedef struct di_shape {
    int32_t types;
    bool is_closed;     /* keys that no record declares are not offered */
    di_bound low, high; /* numbers */
    int64_t chars_min, chars_max, items_min, items_max, keys_min, keys_max; /* max: INT64_MAX for none */
    const di_json *chars_at, *items_at, *keys_at; /* the schemas that set the bounds, for messages */
    const di_fact *facts;
} di_shape;

typedef struct di_shapes {
    const di_shape **list;
    int32_t n, cap;
    /* Where not NULL, an opposite that has no form was left out here: there may be more values. */
    const di_json *partial;
    const char *partial_keyword;
} di_shapes;

/* ---- goals ---- */
typedef struct di_atom {
    const di_json *schema;
    bool is_negated;
} di_atom;

typedef enum di_goal_state { DI_GOAL_NEW, DI_GOAL_BUSY, DI_GOAL_DONE } di_goal_state;

typedef struct di_goal {
    bool is_never;
    di_goal_state state;
    int32_t n;
    const di_atom *atoms; /* sorted */
    int32_t rule;         /* -1: none so far */
    const di_node *node;
    struct di_goal *next; /* of its bucket */
} di_goal;

/* Atoms on the way to a goal. */
typedef struct di_atoms {
    di_atom *list;
    int32_t n, cap;
    bool is_never;
} di_atoms;

/* ---- one schema being read ---- */
#define DI_SCHEMA_FORMATS 32

typedef struct di_reading di_reading;   /* schema_shape.c: an atom's shapes */
typedef struct di_compiled di_compiled; /* schema_string.c: a pattern's texts */

typedef struct di_schema {
    di_gram *g;
    const di_json *root;
    bool is_lax;
    di_goal **goals; /* buckets, in the arena */
    di_reading **readings;
    int32_t n_goals, depth;
    const di_json *partial; /* of the reading under way */
    const char *partial_keyword;
    const di_json *empty; /* the first schema that turned out to have no values */
    int32_t probing;      /* looking whether a goal has values at all: nothing is an error then */
    bool has_guessed;     /* a probe met a reading that isn't finished */
    bool has_ids, has_looked_for_ids;
    int32_t literal_codes;     /* code points of literals that have all their spellings */
    int32_t n_escaped_classes; /* classes of patterns that do */
    const di_node *space, *any_value, *any_char, *any_string, *whole, *number; /* NULL until used */
    const di_node *ascii[128];
    di_json *simple; /* owned: [null, false, true] */
    di_compiled *patterns;
    const di_node *formats[DI_SCHEMA_FORMATS];
    const di_regular *format_sets[DI_SCHEMA_FORMATS];
} di_schema;

enum { DI_SCHEMA_BUCKETS = 512 };

/* schema.c */
/* Records that a keyword of a schema object is wrong: "<pointer of the keyword>: <message>". */
void di_schema_fail(di_schema *s, const di_json *schema, const char *keyword, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Refuses a keyword that can't be guaranteed; true when the schema is read laxly and the keyword is left out. */
bool di_schema_refuse(di_schema *s, const di_json *schema, const char *keyword, const char *why);
/* The schema that a $ref of `schema` means; NULL after a failure. */
const di_json *di_schema_resolve(di_schema *s, const di_json *schema, const char *keyword, const di_json *ref);
/* Whether a $dynamicRef or $recursiveRef means the same from wherever it is reached. */
bool di_schema_is_static(di_schema *s, const di_json *ref);
void di_atoms_add(di_schema *s, di_atoms *atoms, const di_json *schema, bool is_negated);
di_goal *di_schema_goal(di_schema *s, const di_atoms *atoms);
/* Its values; di_node_never() for none. */
const di_node *di_schema_node(di_schema *s, di_goal *goal);
/* The list of values that a shape has; NULL for none. */
const di_fact *di_schema_values_of(const di_shape *shape);
/* White space between tokens. */
const di_node *di_schema_space(di_schema *s);

/* schema_shape.c */
/* The alternatives of a goal, none of which is known to be empty. The list is empty after a failure. */
di_shapes di_schema_shapes(di_schema *s, const di_goal *goal);
int32_t di_schema_type_of(const di_json *value);
int32_t di_schema_fact_types(const di_fact *values); /* types among the values of a VALUES fact */

/* schema_object.c, schema_array.c, schema_value.c: the nodes of one type of a shape */
const di_node *di_schema_object(di_schema *s, const di_shape *shape);
const di_node *di_schema_array(di_schema *s, const di_shape *shape);
const di_node *di_schema_values(di_schema *s, const di_shape *shape, const di_fact *values);
/* Atoms of the value of a key: what the records of the shape, up to `end`, say of it. */
void di_schema_key_atoms(di_schema *s, const di_fact *facts, const char *key, size_t len, di_atoms *atoms);
/* Whether a key is one that propertyNames allows. */
bool di_schema_key_fits(di_schema *s, const di_fact *facts, const char *key, size_t len);
/* The same for the element at an index; from the shape's di_schema_prefix on all have the same. */
void di_schema_element_atoms(di_schema *s, const di_fact *facts, int64_t at, di_atoms *atoms);
int64_t di_schema_prefix(const di_fact *facts);
/* Whether a value satisfies a schema, a shape. */
bool di_schema_holds(di_schema *s, const di_json *schema, const di_json *value);
/* `except`: a fact that is known to hold, or NULL. */
bool di_schema_shape_holds(di_schema *s, const di_shape *shape, const di_json *value, const di_fact *except);
/* Whether a list of values (or the value of const) has one that is equal to `value`. */
bool di_schema_has_value(di_schema *s, const di_fact *values, const di_json *value);
bool di_schema_equal(di_schema *s, const di_json *a, const di_json *b);
const di_node *di_schema_literal_value(di_schema *s, const di_json *value);

/* schema_number.c */
bool di_decimal_read(di_schema *s, di_decimal *out, const di_json *number); /* false after a failure */
int di_decimal_compare(const di_decimal *a, const di_decimal *b);
bool di_decimal_is_whole(const di_decimal *a);
/* Whether a is a multiple of m; *is_known false where m is too large to tell. */
bool di_decimal_is_multiple(const di_decimal *a, const di_decimal *m, bool *is_known);
const di_node *di_schema_number(di_schema *s, const di_shape *shape);

/* schema_string.c */
const di_node *di_schema_string(di_schema *s, const di_shape *shape);
/* The strings of a shape as code points, without quotes; NULL: any string. */
const di_node *di_schema_string_texts(di_schema *s, const di_shape *shape);
/* The strings of a goal as code points; any_text where nothing restricts them (NULL: then NULL). */
const di_node *di_schema_texts(di_schema *s, const di_goal *goal, const di_node *any_text);
/* A string with its quotes. */
const di_node *di_schema_literal(di_schema *s, const char *text, size_t len);
/* A node over code points as the inside of a JSON string. */
const di_node *di_schema_json_text(di_schema *s, const di_node *node, bool has_escapes);
const di_node *di_schema_any_string(di_schema *s);
/* Strings, with quotes, that are none of these. */
const di_node *di_schema_other_strings(di_schema *s, const char *const *texts, const size_t *lens, size_t n);
/* The set of texts that a pattern is found in. NULL after a failure, which names the keyword. */
const di_regular *di_schema_pattern_set(di_schema *s, const di_json *schema, const char *keyword, const char *text,
                                        size_t len);
const di_node *di_schema_pattern_node(di_schema *s, const di_json *schema, const char *keyword, const char *text,
                                      size_t len);
int64_t di_schema_code_points(const char *text, size_t len);

/* schema_format.c */
/* The number of a format; -1 for those that say nothing of a string's text. */
int32_t di_schema_format_find(const char *name);
const di_node *di_schema_format_node(di_schema *s, int32_t format);
const di_regular *di_schema_format_set(di_schema *s, int32_t format);

#endif
