/* Log lines on standard error, each by one write, so that lines of several threads don't mix.
 *
 * The level is the one setting of the process that this layer keeps; it is set at start, before threads exist. */
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static _Atomic int log_level = DI_LOG_WARN;

void di_log_set_level(di_log_level level) {
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

di_log_level di_log_get_level(void) {
    return (di_log_level)atomic_load_explicit(&log_level, memory_order_relaxed);
}

void di_log(di_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"error", "warning", "info", "debug"};
    if (level > di_log_get_level()) {
        return;
    }
    char line[2048];
    int n = snprintf(line, sizeof line, "deepinfer: %s: ", names[level]);
    size_t len = (size_t)n;
    va_list args;
    va_start(args, fmt);
    n = vsnprintf(line + len, sizeof line - len, fmt, args);
    va_end(args);
    if (n > 0) {
        /* A longer message is cut; the last byte stays free for the end of the line. */
        len += (size_t)n < sizeof line - len - 1 ? (size_t)n : sizeof line - len - 2;
    }
    line[len++] = '\n';
    int saved_errno = errno;
    /* There is nowhere to report a failed write of a log line. */
    ssize_t written = write(STDERR_FILENO, line, len);
    (void)written;
    errno = saved_errno;
}
