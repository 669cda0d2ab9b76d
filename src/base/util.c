/* Clock, randomness, hashing, UTF-8 and number readers.
 *
 * UTF-8 follows Unicode table 3-7: no surrogates, no overlong forms, nothing above U+10FFFF. Replacement follows the
 * "maximal subpart" practice, one U+FFFD for each, which is what Python, Rust and browsers do. */
#include "util.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "error.h"

int64_t di_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

uint64_t di_random_u64(void) {
    uint64_t value = 0;
    while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) {
        /* Up to 256 bytes are delivered whole once the pool is ready; only a signal before that gets here. */
        DI_ASSERT(errno == EINTR);
    }
    return value;
}

uint64_t di_hash_fnv1a(const void *data, size_t n) {
    const uint8_t *bytes = data;
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001B3u;
    }
    return hash;
}

uint64_t di_mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

size_t di_utf8_decode(const char *s, size_t n, uint32_t *cp, size_t *skip) {
    const uint8_t *b = (const uint8_t *)s;
    if (skip) {
        *skip = 1;
    }
    if (n == 0) {
        return 0;
    }
    if (b[0] < 0x80) {
        if (cp) {
            *cp = b[0];
        }
        return 1;
    }
    /* The range of the second byte is what rules out overlong forms, surrogates and values above U+10FFFF. */
    size_t len;
    uint8_t low = 0x80, high = 0xBF;
    uint32_t value;
    if (b[0] >= 0xC2 && b[0] <= 0xDF) {
        len = 2;
        value = b[0] & 0x1Fu;
    } else if ((b[0] & 0xF0) == 0xE0) {
        len = 3;
        value = b[0] & 0x0Fu;
        low = b[0] == 0xE0 ? 0xA0 : 0x80;
        high = b[0] == 0xED ? 0x9F : 0xBF;
    } else if (b[0] >= 0xF0 && b[0] <= 0xF4) {
        len = 4;
        value = b[0] & 0x07u;
        low = b[0] == 0xF0 ? 0x90 : 0x80;
        high = b[0] == 0xF4 ? 0x8F : 0xBF;
    } else {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if (i >= n || b[i] < low || b[i] > high) {
            if (skip) {
                *skip = i;
            }
            return 0;
        }
        value = value << 6 | (b[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    if (cp) {
        *cp = value;
    }
    return len;
}

size_t di_utf8_encode(uint32_t cp, char out[4]) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | (cp >> 18 & 0x07));
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

bool di_utf8_valid(const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        size_t len = di_utf8_decode(s + i, n - i, NULL, NULL);
        if (len == 0) {
            return false;
        }
        i += len;
    }
    return true;
}

void di_utf8_repair(di_strbuf *out, const char *s, size_t n) {
    if (n == 0) {
        return; /* s may be NULL then, to which even 0 must not be added */
    }
    size_t start = 0; /* of the well-formed run not yet appended */
    for (size_t i = 0; i < n;) {
        size_t skip;
        size_t len = di_utf8_decode(s + i, n - i, NULL, &skip);
        if (len) {
            i += len;
            continue;
        }
        di_strbuf_append(out, s + start, i - start);
        di_strbuf_append(out, "\xEF\xBF\xBD", 3);
        i += skip;
        start = i;
    }
    di_strbuf_append(out, s + start, n - start);
}

/* Whether s starts as a plain decimal number does: strto* would also take spaces, "+" and nothing at all. */
static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

bool di_parse_i64(const char *s, int64_t *out) {
    if (!is_digit(s[s[0] == '-'])) {
        return false;
    }
    char *end;
    errno = 0;
    long long value = strtoll(s, &end, 10);
    if (errno || *end) {
        return false;
    }
    *out = value;
    return true;
}

bool di_parse_u64(const char *s, uint64_t *out) {
    if (!is_digit(s[0])) {
        return false;
    }
    char *end;
    errno = 0;
    unsigned long long value = strtoull(s, &end, 10);
    if (errno || *end) {
        return false;
    }
    *out = value;
    return true;
}

bool di_parse_double(const char *s, double *out) {
    const char *body = s + (s[0] == '-' || s[0] == '+');
    if (!is_digit(body[0]) && !(body[0] == '.' && is_digit(body[1])) && strcasecmp(body, "nan") != 0 &&
        strcasecmp(body, "inf") != 0 && strcasecmp(body, "infinity") != 0) {
        return false;
    }
    if (body[0] == '0' && (body[1] == 'x' || body[1] == 'X')) {
        return false;
    }
    /* The "C" locale is a constant object of the C library: making and freeing it allocates nothing. */
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c_locale) {
        return false;
    }
    char *end;
    errno = 0;
    double value = strtod_l(s, &end, c_locale);
    /* A result too small for a double is its nearest one, 0 or subnormal; one too large has none. */
    bool is_overflow = errno == ERANGE && fabs(value) > 1.0;
    freelocale(c_locale);
    if (*end || is_overflow) {
        return false;
    }
    *out = value;
    return true;
}
