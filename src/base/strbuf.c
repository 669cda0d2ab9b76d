/* String buffers: growth by doubling, one sticky failure flag, a NUL behind the last byte at all times.
 *
 * A failed buffer keeps what it had before the failure; callers look at di_strbuf_status before they use it. */
#include "strbuf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

void di_strbuf_deinit(di_strbuf *sb) {
    free(sb->data);
    *sb = (di_strbuf){0};
}

void di_strbuf_reset(di_strbuf *sb) {
    sb->len = 0;
    sb->failed = false;
    if (sb->data) {
        sb->data[0] = '\0';
    }
}

/* Makes room for n more bytes and the NUL; false when the buffer has failed now or before. */
static bool reserve(di_strbuf *sb, size_t n) {
    if (sb->failed) {
        return false;
    }
    if (n > SIZE_MAX / 4 || sb->len > SIZE_MAX / 4) {
        sb->failed = true;
        return false;
    }
    size_t need = sb->len + n + 1;
    if (need <= sb->cap) {
        return true;
    }
    size_t cap = sb->cap ? sb->cap * 2 : 64;
    if (cap < need) {
        cap = need;
    }
    char *data = realloc(sb->data, cap);
    if (!data) {
        sb->failed = true;
        return false;
    }
    sb->data = data;
    sb->cap = cap;
    return true;
}

void di_strbuf_append(di_strbuf *sb, const char *s, size_t n) {
    if (!reserve(sb, n)) {
        return;
    }
    if (n) {
        memcpy(sb->data + sb->len, s, n);
    }
    sb->len += n;
    sb->data[sb->len] = '\0';
}

void di_strbuf_puts(di_strbuf *sb, const char *s) {
    di_strbuf_append(sb, s, strlen(s));
}

void di_strbuf_putc(di_strbuf *sb, char c) {
    di_strbuf_append(sb, &c, 1);
}

void di_strbuf_printf(di_strbuf *sb, const char *fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0) {
        sb->failed = true;
    } else if (reserve(sb, (size_t)n)) {
        vsnprintf(sb->data + sb->len, (size_t)n + 1, fmt, again);
        sb->len += (size_t)n;
    }
    va_end(again);
}

void di_strbuf_truncate(di_strbuf *sb, size_t len) {
    if (len < sb->len) {
        sb->len = len;
        sb->data[len] = '\0';
    }
}

void di_strbuf_remove(di_strbuf *sb, size_t at, size_t n) {
    if (at >= sb->len) {
        return;
    }
    if (n > sb->len - at) {
        n = sb->len - at;
    }
    /* The NUL moves with the tail. */
    memmove(sb->data + at, sb->data + at + n, sb->len - at - n + 1);
    sb->len -= n;
}

const char *di_strbuf_str(const di_strbuf *sb) {
    return sb->data ? sb->data : "";
}

di_status di_strbuf_status(const di_strbuf *sb, di_error *err) {
    if (sb->failed) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory while building a text of more than %zu bytes", sb->len);
    }
    return DI_OK;
}
