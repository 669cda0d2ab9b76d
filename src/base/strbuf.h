/* String buffers: growing bytes, always NUL-terminated once something was appended.
 *
 * A failed allocation is sticky: later appends do nothing and di_strbuf_status reports it, so that a renderer checks
 * once at its end. Bytes may hold NUL; len is the truth. */
#ifndef DI_BASE_STRBUF_H
#define DI_BASE_STRBUF_H

#include <stdbool.h>
#include <stddef.h>

#include "deepinfer/status.h"

typedef struct di_strbuf {
    char *data; /* owned; NULL while empty */
    size_t len, cap;
    bool failed;
} di_strbuf;

void di_strbuf_deinit(di_strbuf *sb); /* zeroes it; zeroed storage is a valid empty buffer */
void di_strbuf_reset(di_strbuf *sb);  /* keeps the memory */
void di_strbuf_append(di_strbuf *sb, const char *s, size_t n);
void di_strbuf_puts(di_strbuf *sb, const char *s);
void di_strbuf_putc(di_strbuf *sb, char c);
void di_strbuf_printf(di_strbuf *sb, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void di_strbuf_truncate(di_strbuf *sb, size_t len);
/* Removes n bytes at offset `at` (n clipped to what is there). */
void di_strbuf_remove(di_strbuf *sb, size_t at, size_t n);
/* The text as a C string: "" while empty. */
const char *di_strbuf_str(const di_strbuf *sb);
/* DI_ERR_MEMORY when an append failed. */
di_status di_strbuf_status(const di_strbuf *sb, di_error *err);

#endif
