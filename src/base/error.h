/* Making errors: a status is made where the fault is seen, its callers add where it happened. */
#ifndef DI_BASE_ERROR_H
#define DI_BASE_ERROR_H

#include <stdarg.h>

#include "deepinfer/status.h"

/* Writes the formatted message into err (which may be NULL) and returns code. */
di_status di_fail(di_error *err, di_status code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "<formatted context>: " before the message of err (which may be NULL) and returns status unchanged. Does nothing
 * when status is DI_OK, so that it can wrap a return. */
di_status di_error_context(di_error *err, di_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Our own bugs only, never reachable from input. Stays on in release builds: prints the condition and aborts. */
#define DI_ASSERT(cond) ((cond) ? (void)0 : di_assert_failed(#cond, __FILE__, __LINE__))
_Noreturn void di_assert_failed(const char *cond, const char *file, int line);

#endif
