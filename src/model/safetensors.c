/* The safetensors container: header and index.
 *
 *   [8 bytes: header length N, little-endian][N bytes: JSON, name -> {dtype, shape, data_offsets}][data]
 *
 * The JSON is scanned here, not by the general reader: that one keeps one of two equal keys, and a tensor that is there
 * twice is a fault that must be seen; a checkpoint has 10^5 tensors, and one pass without a tree is fast. Which tensors
 * ought to be there is checkpoint.c's matter. */
#include "safetensors.h"

#include <inttypes.h>

#define NESTING_MAX 64 /* of values that are skipped */

/* ---- scanning JSON ----------------------------------------------------------------------------------------------- */

typedef struct scan {
    const char *text, *p, *end;
    di_arena *arena;
    di_error *err;
} scan;

static di_status bad(const scan *s, const char *expected) {
    size_t at = (size_t)(s->p - s->text);
    if (s->p >= s->end)
        return di_fail(s->err, DI_ERR_FORMAT, "bad JSON: ends at byte %zu, expected %s", at, expected);
    unsigned char c = (unsigned char)*s->p;
    if (c > 0x20 && c < 0x7F)
        return di_fail(s->err, DI_ERR_FORMAT, "bad JSON at byte %zu: found '%c', expected %s", at, c, expected);
    return di_fail(s->err, DI_ERR_FORMAT, "bad JSON at byte %zu: found byte 0x%02x, expected %s", at, c, expected);
}

static void skip_space(scan *s) {
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

/* Takes c, with space before it, if it is next. */
static bool take(scan *s, char c) {
    skip_space(s);
    if (s->p >= s->end || *s->p != c)
        return false;
    s->p++;
    return true;
}

static bool take_hex4(scan *s, uint32_t *out) {
    uint32_t v = 0;
    if (s->end - s->p < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        int digit = di_hex_digit(s->p[i]);
        if (digit < 0)
            return false;
        v = v << 4 | (uint32_t)digit;
    }
    s->p += 4;
    *out = v;
    return true;
}

/* The rest of a string that has escapes; first is where its characters begin, s->p at the first backslash. */
static di_status string_escaped(scan *s, const char *first, const char **out, size_t *len) {
    const char *close = s->p; /* the decoded text is never longer than the spelled one */
    while (close < s->end && *close != '"')
        close += *close == '\\' && s->end - close > 1 ? 2 : 1;
    if (close == s->end) {
        s->p = s->end;
        return bad(s, "the end of a string");
    }
    char *buf = di_arena_alloc(s->arena, (size_t)(close - first) + 4);
    if (!buf)
        return di_fail(s->err, DI_ERR_MEMORY, "out of memory for a name of %zu bytes", (size_t)(close - first));
    size_t n = (size_t)(s->p - first);
    memcpy(buf, first, n);
    while (s->p < close) {
        char c = *s->p;
        if (c != '\\') {
            if ((unsigned char)c < 0x20)
                return bad(s, "no control character");
            buf[n++] = c;
            s->p++;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *at = s->p[1] ? strchr(from, s->p[1]) : NULL;
        if (at) {
            buf[n++] = to[at - from];
            s->p += 2;
            continue;
        }
        uint32_t cp = 0, low = 0;
        bool good = s->p[1] == 'u';
        if (good) {
            s->p += 2;
            good = take_hex4(s, &cp);
        }
        if (good && cp >= 0xD800 && cp < 0xDC00) { /* the first half of a pair */
            good = s->end - s->p > 2 && s->p[0] == '\\' && s->p[1] == 'u';
            if (good) {
                s->p += 2;
                good = take_hex4(s, &low) && low >= 0xDC00 && low < 0xE000;
                cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
            }
        } else {
            good = good && !(cp >= 0xDC00 && cp < 0xE000);
        }
        if (!good)
            return bad(s, "an escape");
        n += di_utf8_encode(cp, buf + n);
    }
    s->p = close + 1;
    *out = buf;
    *len = n;
    return DI_OK;
}

static di_status take_string(scan *s, const char **out, size_t *len, const char *expected) {
    *out = "";
    *len = 0;
    if (!take(s, '"'))
        return bad(s, expected);
    const char *first = s->p;
    while (s->p < s->end && *s->p != '"' && *s->p != '\\') {
        if ((unsigned char)*s->p < 0x20)
            return bad(s, "no control character");
        s->p++;
    }
    if (s->p >= s->end)
        return bad(s, "the end of a string");
    if (*s->p == '\\') {
        di_status st = string_escaped(s, first, out, len);
        if (st)
            return st;
    } else {
        *out = first;
        *len = (size_t)(s->p - first);
        s->p++;
    }
    if (!di_utf8_valid(*out, *len))
        return di_fail(s->err, DI_ERR_FORMAT, "bad JSON: a string is not valid UTF-8");
    return DI_OK;
}

static di_status take_u64(scan *s, uint64_t *out) {
    skip_space(s);
    const char *first = s->p;
    uint64_t v = 0;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9') {
        if (v > (INT64_MAX - 9) / 10)
            return bad(s, "a smaller number");
        v = v * 10 + (uint64_t)(*s->p - '0');
        s->p++;
    }
    bool ends = s->p >= s->end || !(*s->p == '.' || *s->p == 'e' || *s->p == 'E');
    if (s->p == first || (*first == '0' && s->p - first > 1) || !ends)
        return bad(s, "a non-negative integer");
    *out = v;
    return DI_OK;
}

/* [ u64, ... ] of at most max entries. */
static di_status take_list(scan *s, uint64_t *out, int32_t max, int32_t *n, const char *expected) {
    *n = 0;
    if (!take(s, '['))
        return bad(s, expected);
    if (take(s, ']'))
        return DI_OK;
    do {
        if (*n == max)
            return bad(s, expected);
        di_status st = take_u64(s, &out[(*n)++]);
        if (st)
            return st;
    } while (take(s, ','));
    return take(s, ']') ? DI_OK : bad(s, "',' or ']'");
}

static di_status skip_value(scan *s, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    const char *str;
    size_t len;
    if (depth > NESTING_MAX)
        return bad(s, "less nesting");
    skip_space(s);
    if (s->p < s->end && *s->p == '"')
        return take_string(s, &str, &len, "a string");
    bool is_object = take(s, '{');
    if (is_object || take(s, '[')) {
        char close = is_object ? '}' : ']';
        if (take(s, close))
            return DI_OK;
        do {
            di_status st = DI_OK;
            if (is_object && !(st = take_string(s, &str, &len, "a key")) && !take(s, ':'))
                st = bad(s, "':'");
            if (!st)
                st = skip_value(s, depth + 1);
            if (st)
                return st;
        } while (take(s, ','));
        return take(s, close) ? DI_OK : bad(s, is_object ? "',' or '}'" : "',' or ']'");
    }
    for (size_t i = 0; i < DI_COUNT(words); i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(s->end - s->p) >= n && memcmp(s->p, words[i], n) == 0) {
            s->p += n;
            return DI_OK;
        }
    }
    const char *first = s->p;
    while (s->p < s->end && (strchr("+-.eE", *s->p) ? *s->p != 0 : *s->p >= '0' && *s->p <= '9'))
        s->p++;
    return s->p > first ? DI_OK : bad(s, "a value");
}

static bool same(const char *s, size_t len, const char *want) {
    return len == strlen(want) && memcmp(s, want, len) == 0;
}

/* ---- header ------------------------------------------------------------------------------------------------------ */

/* {"dtype": ..., "shape": [...], "data_offsets": [b, e]}; other keys are ignored. */
static di_status take_entry(scan *s, di_safetensor *t) {
    bool dtype = false, shape = false, offsets = false;
    if (!take(s, '{'))
        return bad(s, "an object");
    if (!take(s, '}')) {
        do {
            const char *key, *str;
            size_t len, n;
            uint64_t list[DI_SAFETENSOR_DIMS_MAX] = {0};
            int32_t count;
            di_status st = take_string(s, &key, &len, "a key");
            if (!st && !take(s, ':'))
                st = bad(s, "':'");
            if (st)
                return st;
            if (same(key, len, "dtype") && !dtype) {
                if ((st = take_string(s, &str, &n, "a dtype")))
                    return st;
                t->has_dtype = di_dtype_parse(str, n, &t->dtype);
                snprintf(t->dtype_name, sizeof t->dtype_name, "%.*s", (int)DI_MIN(n, sizeof t->dtype_name - 1), str);
                dtype = true;
            } else if (same(key, len, "shape") && !shape) {
                if ((st = take_list(s, list, DI_SAFETENSOR_DIMS_MAX, &count, "a list of at most 8 dimensions")))
                    return st;
                t->n_dims = count;
                for (int32_t i = 0; i < count; i++)
                    t->shape[i] = (int64_t)list[i];
                shape = true;
            } else if (same(key, len, "data_offsets") && !offsets) {
                if ((st = take_list(s, list, 2, &count, "a list of two offsets")))
                    return st;
                if (count != 2)
                    return bad(s, "a list of two offsets");
                t->begin = list[0];
                t->end = list[1];
                offsets = true;
            } else if (same(key, len, "dtype") || same(key, len, "shape") || same(key, len, "data_offsets")) {
                return di_fail(s->err, DI_ERR_FORMAT, "key '%.*s' twice", (int)len, key);
            } else if ((st = skip_value(s, 0))) {
                return st;
            }
        } while (take(s, ','));
        if (!take(s, '}'))
            return bad(s, "',' or '}'");
    }
    if (dtype && shape && offsets)
        return DI_OK;
    return di_fail(s->err, DI_ERR_FORMAT, "no '%s' in the header",
                   !dtype   ? "dtype"
                   : !shape ? "shape"
                            : "data_offsets");
}

/* Bytes that dtype and shape need; false on overflow or where the dtype is not ours. */
static bool bytes_of(const di_safetensor *t, uint64_t *out) {
    size_t n = 1;
    if (!t->has_dtype)
        return false;
    for (int32_t i = 0; i < t->n_dims; i++) {
        if (!di_size_mul(&n, n, (size_t)t->shape[i]))
            return false;
    }
    if (n > SIZE_MAX / 8)
        return false;
    *out = di_dtype_bytes(t->dtype, n);
    return true;
}

typedef struct extent {
    uint64_t begin, end;
    const di_safetensor *tensor;
} extent;

static int by_begin(const void *pa, const void *pb) {
    const extent *a = pa, *b = pb;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

static di_status check_offsets(const di_safetensors *f, di_arena *arena, di_error *err) {
    uint64_t total = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const di_safetensor *t = &f->tensors[i];
        uint64_t want;
        if (t->begin > t->end) {
            return di_fail(err, DI_ERR_FORMAT,
                           "tensor '%.*s': data_offsets [%" PRIu64 ",%" PRIu64 "] are in falling order",
                           (int)t->name_len, t->name, t->begin, t->end);
        }
        bool sized = bytes_of(t, &want);
        if (t->has_dtype && (!sized || t->end - t->begin != want)) {
            return di_fail(err, DI_ERR_FORMAT,
                           "tensor '%.*s': data_offsets span %" PRIu64 " bytes, expected %s%" PRIu64 " by its shape",
                           (int)t->name_len, t->name, t->end - t->begin, sized ? "" : "more than ",
                           sized ? want : (uint64_t)INT64_MAX);
        }
        total += DI_MIN(t->end - t->begin, UINT64_MAX - total);
    }
    /* Fewer bytes than the tensors have together is a file cut short; enough bytes, but not where an offset points,
     * is a damaged header. */
    if (total > f->data_bytes) {
        return di_fail(err, DI_ERR_FORMAT,
                       "truncated: %" PRIu64 " bytes of data, expected %" PRIu64 " for its %zu tensors", f->data_bytes,
                       total, f->n_tensors);
    }
    extent *order = di_arena_calloc(arena, f->n_tensors + 1, sizeof *order);
    size_t n = 0;
    if (!order)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for %zu tensors", f->n_tensors);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const di_safetensor *t = &f->tensors[i];
        if (t->end > f->data_bytes) {
            return di_fail(err, DI_ERR_FORMAT,
                           "tensor '%.*s': data_offsets [%" PRIu64 ",%" PRIu64
                           "] reach past the end of the data, %" PRIu64 " bytes",
                           (int)t->name_len, t->name, t->begin, t->end, f->data_bytes);
        }
        if (t->begin < t->end)
            order[n++] = (extent){t->begin, t->end, t};
    }
    qsort(order, n, sizeof *order, by_begin);
    for (size_t i = 1; i < n; i++) { /* up to the first overlap, each one ends before the next begins */
        const di_safetensor *t = order[i].tensor, *before = order[i - 1].tensor;
        if (t->begin < before->end) {
            return di_fail(err, DI_ERR_FORMAT,
                           "tensor '%.*s': data_offsets [%" PRIu64 ",%" PRIu64 "] overlap tensor '%.*s' at [%" PRIu64
                           ",%" PRIu64 "]",
                           (int)t->name_len, t->name, t->begin, t->end, (int)before->name_len, before->name,
                           before->begin, before->end);
        }
    }
    return DI_OK;
}

static di_status parse_header(di_safetensors *f, scan *s, di_map *names) {
    size_t cap = 0;
    if (!take(s, '{'))
        return bad(s, "an object");
    if (!take(s, '}')) {
        do {
            const char *name;
            size_t len;
            di_status st = take_string(s, &name, &len, "a tensor name");
            if (!st && !take(s, ':'))
                st = bad(s, "':'");
            if (st)
                return st;
            bool was = false;
            if ((st = di_map_set(names, name, len, 0, &was, s->err)))
                return st;
            if (was)
                return di_fail(s->err, DI_ERR_FORMAT, "tensor '%.*s' twice in the header", (int)len, name);
            if (same(name, len, "__metadata__")) {
                if ((st = skip_value(s, 0)))
                    return st;
                continue;
            }
            if (f->n_tensors == cap) { /* doubled: what the arena keeps of older arrays is at most as much again */
                size_t grown = cap ? 2 * cap : 64;
                di_safetensor *more = di_arena_calloc(s->arena, grown, sizeof *more);
                if (!more)
                    return di_fail(s->err, DI_ERR_MEMORY, "out of memory for %zu tensors", grown);
                if (cap)
                    memcpy(more, f->tensors, cap * sizeof *more);
                f->tensors = more;
                cap = grown;
            }
            di_safetensor *t = &f->tensors[f->n_tensors];
            t->name = name;
            t->name_len = len;
            if ((st = take_entry(s, t)))
                return di_error_context(s->err, st, "tensor '%.*s'", (int)len, name);
            f->n_tensors++;
        } while (take(s, ','));
        if (!take(s, '}'))
            return bad(s, "',' or '}'");
    }
    skip_space(s); /* writers pad with spaces */
    return s->p == s->end ? DI_OK : bad(s, "the end of the header");
}

di_status di_safetensors_parse(di_safetensors *out, const uint8_t *file, size_t n_bytes, di_arena *arena,
                               di_error *err) {
    *out = (di_safetensors){0};
    if (n_bytes < 8)
        return di_fail(err, DI_ERR_FORMAT, "truncated: %zu bytes, expected a header length of 8 bytes", n_bytes);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--)
        header = header << 8 | file[i];
    if (header > n_bytes - 8) {
        return di_fail(err, DI_ERR_FORMAT,
                       "truncated or no safetensors file: header of %" PRIu64 " bytes in a file of %zu", header,
                       n_bytes);
    }
    di_safetensors f = {.data = file + 8 + header, .data_bytes = n_bytes - 8 - header};
    const char *text = (const char *)file + 8;
    scan s = {.text = text, .p = text, .end = text + header, .arena = arena, .err = err};
    di_map names = {0};
    di_status st = parse_header(&f, &s, &names);
    di_map_deinit(&names);
    if (st)
        return di_error_context(err, st, "header");
    if ((st = check_offsets(&f, arena, err)))
        return st;
    *out = f;
    return DI_OK;
}

/* ---- index ------------------------------------------------------------------------------------------------------- */

static di_status take_weight_map(scan *s, di_weight_map_fn fn, void *user) {
    if (!take(s, '{'))
        return bad(s, "an object (weight_map)");
    if (take(s, '}'))
        return DI_OK;
    do {
        const char *name, *file;
        size_t name_len, file_len;
        di_status st = take_string(s, &name, &name_len, "a tensor name");
        if (!st && !take(s, ':'))
            st = bad(s, "':'");
        if (!st)
            st = take_string(s, &file, &file_len, "a file name");
        if (!st)
            st = fn(user, name, name_len, file, file_len, s->err);
        if (st)
            return st;
    } while (take(s, ','));
    return take(s, '}') ? DI_OK : bad(s, "',' or '}'");
}

di_status di_weight_map_parse(const char *text, size_t len, di_weight_map_fn fn, void *user, di_arena *arena,
                              di_error *err) {
    scan s = {.text = text, .p = text, .end = text + len, .arena = arena, .err = err};
    bool found = false;
    if (!take(&s, '{'))
        return bad(&s, "an object");
    if (!take(&s, '}')) {
        do {
            const char *key;
            size_t key_len;
            di_status st = take_string(&s, &key, &key_len, "a key");
            if (!st && !take(&s, ':'))
                st = bad(&s, "':'");
            if (!st && same(key, key_len, "weight_map")) {
                if (found)
                    return di_fail(err, DI_ERR_FORMAT, "key 'weight_map' twice");
                found = true;
                st = take_weight_map(&s, fn, user);
            } else if (!st) {
                st = skip_value(&s, 0);
            }
            if (st)
                return st;
        } while (take(&s, ','));
        if (!take(&s, '}'))
            return bad(&s, "',' or '}'");
    }
    skip_space(&s);
    if (s.p != s.end)
        return bad(&s, "the end of the index");
    return found ? DI_OK
                 : di_fail(err, DI_ERR_FORMAT,
                           "key 'weight_map' is missing, expected an object of tensor and file names");
}
