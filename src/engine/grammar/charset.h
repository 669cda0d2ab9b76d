/* Sets of code points as the regular expressions build them: ranges in any order, properties of Unicode by name, and
 * what a set grows to when case doesn't count.
 *
 * A set collects; di_node_class puts its ranges in order. Memory is the heap's, so that one set serves for all classes
 * of an expression; a failed allocation sticks in the set. */
#ifndef DI_GRAMMAR_CHARSET_H
#define DI_GRAMMAR_CHARSET_H

#include "ir.h"

typedef struct di_charset {
    di_code_range *ranges; /* owned [n] */
    size_t n, cap;
    bool has_failed;
} di_charset;

void di_charset_deinit(di_charset *set);
void di_charset_reset(di_charset *set);
void di_charset_add(di_charset *set, uint32_t first, uint32_t last);
/* Sorts and joins the ranges. */
void di_charset_tidy(di_charset *set);
/* All code points but those of the set, the surrogates among them. */
void di_charset_negate(di_charset *set);
/* Adds the code points of a property: a general category ("Lu", "Letter"), a script ("Greek"), a binary property
 * ("Alphabetic"), "Any", "Assigned" or "ASCII"; also with "gc=", "General_Category=", "sc=", "Script=" before it. Upper
 * and lower case, spaces, '-' and '_' don't count. False: there is no such property. Takes a few milliseconds. */
bool di_charset_add_property(di_charset *set, const char *name, size_t len);

/* Code points that differ in case alone, in groups: equal simple lower or upper case, and the three pairs that only
 * full case mappings join. */
typedef struct di_case_groups {
    uint32_t *codes; /* owned [n], rising */
    int32_t *group;  /* owned [n] */
    int32_t *next;   /* owned [n]: the next member of the same group, round and round */
    size_t n;
} di_case_groups;

di_status di_case_groups_init(di_case_groups *c, di_error *err);
void di_case_groups_deinit(di_case_groups *c);
/* Adds what differs from members in case alone. */
void di_charset_add_cases(di_charset *set, const di_case_groups *c);
/* The same for A to Z alone. */
void di_charset_add_ascii_cases(di_charset *set);

#endif
