/* Status tables and error messages.
 *
 * The tables come from the X-macro list of deepinfer/status.h, so that a code can't lack its text or its exit status.
 * Messages are cut to the fixed buffer at a border of UTF-8 sequences, because they travel into JSON replies. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util.h"

typedef struct status_row {
    const char *text;
    int http, exit_status;
} status_row;

static const status_row status_rows[DI_STATUS_COUNT] = {
#define STATUS_ROW(code, text, http, exit_status) [code] = {text, http, exit_status},
    DI_STATUS_LIST(STATUS_ROW)
#undef STATUS_ROW
};

static const status_row *row_of(di_status status) {
    /* A code from outside the list is a bug of the caller; it reads as an internal error rather than as memory. */
    return &status_rows[(unsigned)status < DI_STATUS_COUNT ? status : DI_ERR_INTERNAL];
}

const char *di_status_text(di_status status) {
    return row_of(status)->text;
}

int di_status_http(di_status status) {
    return row_of(status)->http;
}

int di_status_exit(di_status status) {
    return row_of(status)->exit_status;
}

/* Drops the incomplete UTF-8 sequence that a cut may leave at the end of a full buffer. */
static void trim_cut_sequence(char *message, size_t size) {
    size_t len = strnlen(message, size);
    if (len + 1 < size) {
        return;
    }
    size_t start = len;
    while (start > 0 && len - start < 3 && ((unsigned char)message[start - 1] & 0xC0) == 0x80) {
        start--;
    }
    if (start > 0 && ((unsigned char)message[start - 1] & 0xC0) == 0xC0 &&
        di_utf8_decode(message + start - 1, len - start + 1, NULL, NULL) != len - start + 1) {
        message[start - 1] = '\0';
    }
}

di_status di_fail(di_error *err, di_status code, const char *fmt, ...) {
    if (err) {
        /* The arguments may point into err itself, so the text is made beside it. */
        char text[sizeof err->message];
        va_list args;
        va_start(args, fmt);
        vsnprintf(text, sizeof text, fmt, args);
        va_end(args);
        trim_cut_sequence(text, sizeof text);
        memcpy(err->message, text, sizeof text);
        err->code = code;
    }
    return code;
}

di_status di_error_context(di_error *err, di_status status, const char *fmt, ...) {
    if (err && status != DI_OK) {
        char text[2 * sizeof err->message];
        va_list args;
        va_start(args, fmt);
        int n = vsnprintf(text, sizeof err->message, fmt, args);
        va_end(args);
        size_t len = DI_MIN((size_t)DI_MAX(n, 0), sizeof err->message - 1);
        snprintf(text + len, sizeof text - len, ": %s", err->message);
        memcpy(err->message, text, sizeof err->message - 1);
        err->message[sizeof err->message - 1] = '\0';
        trim_cut_sequence(err->message, sizeof err->message);
    }
    return status;
}

_Noreturn void di_assert_failed(const char *cond, const char *file, int line) {
    fprintf(stderr, "deepinfer: internal error: %s:%d: '%s' does not hold\n", file, line, cond);
    abort();
}
