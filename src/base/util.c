/* Clock, randomness, the CPU's name, hashing, UTF-8 and number readers.
 *
 * UTF-8 follows Unicode table 3-7: no surrogates, no overlong forms, nothing above U+10FFFF. Replacement follows the
 * "maximal subpart" practice, one U+FFFD for each, which is what Python, Rust and browsers do. */
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "error.h"

int64_t di_clock_wall_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec;
}

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

/* Value of the first line "key<spaces and tabs>: value", without spaces around it; NULL when there is none or it is
 * empty. */
static const char *line_value(const char *text, const char *key, size_t *len) {
    size_t key_len = strlen(key);
    for (const char *line = text; *line; line += *line == '\n') {
        size_t line_len = strcspn(line, "\n");
        const char *end = line + line_len;
        if (line_len > key_len && memcmp(line, key, key_len) == 0) {
            const char *at = line + key_len + strspn(line + key_len, " \t");
            if (*at == ':') {
                at += 1 + strspn(at + 1, " \t");
                while (end > at && (end[-1] == ' ' || end[-1] == '\t')) {
                    end--;
                }
                *len = (size_t)(end - at);
                return *len > 0 ? at : NULL;
            }
        }
        line += line_len;
    }
    return NULL;
}

void di_cpu_name_from(const char *cpuinfo, char *out, size_t n) {
    size_t len = 0, part_len = 0;
    const char *name = line_value(cpuinfo, "model name", &len);
    if (name) {
        snprintf(out, n, "%.*s", (int)len, name);
        return;
    }
    struct utsname system = {0};
    const char *machine = uname(&system) == 0 ? system.machine : "cpu";
    long n_processors = sysconf(_SC_NPROCESSORS_CONF);
    const char *implementer = line_value(cpuinfo, "CPU implementer", &len);
    const char *part = line_value(cpuinfo, "CPU part", &part_len);
    if (implementer && part) {
        snprintf(out, n, "%s %.*s %.*s, %ld processors", machine, (int)len, implementer, (int)part_len, part,
                 n_processors);
    } else {
        snprintf(out, n, "%s, %ld processors", machine, n_processors);
    }
}

void di_cpu_name(char *out, size_t n) {
    /* All that is asked for stands in the first processor's lines; a machine of many has a file of megabytes. */
    char text[4096];
    size_t n_read = 0;
    int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && n_read < sizeof text - 1) {
        ssize_t got = read(fd, text + n_read, sizeof text - 1 - n_read);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        n_read += (size_t)got;
    }
    if (fd >= 0) {
        close(fd);
    }
    text[n_read] = '\0';
    di_cpu_name_from(text, out, n);
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

int di_hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}
