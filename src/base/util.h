/* Small things: monotonic clock, system randomness, the CPU's name, FNV-1a and splitmix, UTF-8, digits, minimum and
 * maximum. */
#ifndef DI_BASE_UTIL_H
#define DI_BASE_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "strbuf.h"

#define DI_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DI_MAX(a, b) ((a) > (b) ? (a) : (b))
#define DI_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define DI_CEIL_DIV(a, b) (((a) + (b)-1) / (b))
#define DI_ROUND_UP(a, b) (DI_CEIL_DIV(a, b) * (b))

int64_t di_clock_ns(void);     /* monotonic */
int64_t di_clock_wall_s(void); /* since 1970; can be set and jump: for dates of files alone */
uint64_t di_random_u64(void);  /* from the system */

/* The CPU's model name, to tell machines apart by: "Intel(R) Xeon(R) Gold 6430". Where the system knows none, as on
 * most ARM machines, its architecture, what it calls the core, and the number of processors: "aarch64 0x41 0xd0c, 64
 * processors". Cut to n - 1 bytes, never empty for n > 1. */
void di_cpu_name(char *out, size_t n);
/* The same from the beginning of a /proc/cpuinfo, as text. */
void di_cpu_name_from(const char *cpuinfo, char *out, size_t n);

uint64_t di_hash_fnv1a(const void *data, size_t n);
uint64_t di_mix64(uint64_t z); /* the finaliser of splitmix64 */

/* Length of the well-formed UTF-8 sequence at s (1..4), 0 when ill-formed; *cp (may be NULL) is its code point. When
 * ill-formed, *skip (may be NULL) is the length of the maximal ill-formed subpart (>= 1) that one U+FFFD replaces. */
size_t di_utf8_decode(const char *s, size_t n, uint32_t *cp, size_t *skip);
/* Writes cp (a scalar value) to out, returns 1..4. */
size_t di_utf8_encode(uint32_t cp, char out[4]);
bool di_utf8_valid(const char *s, size_t n);
/* Appends s with each maximal ill-formed subpart replaced by U+FFFD. */
void di_utf8_repair(di_strbuf *out, const char *s, size_t n);

/* Whole-string number readers: false unless all of s is one number in range. No locale, no leading space. */
bool di_parse_i64(const char *s, int64_t *out);
bool di_parse_u64(const char *s, uint64_t *out);
bool di_parse_double(const char *s, double *out);

/* The value of a hexadecimal digit, 0 .. 15; -1: it is none. */
int di_hex_digit(char c);

#endif
