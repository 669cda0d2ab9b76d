/* Server-sent events: the parser and the look into a chunk (bench_sse.h).
 *
 * Lines end with CR LF, LF or CR. A CR ends its line at once; a LF that comes next, perhaps with the next bytes, is
 * skipped. Lines that are whole within the bytes at hand are not copied. */
#include "bench_sse.h"

void di_sse_deinit(di_sse *sse) {
    di_strbuf_deinit(&sse->line);
    di_strbuf_deinit(&sse->data);
}

void di_sse_reset(di_sse *sse) {
    di_strbuf_reset(&sse->line);
    di_strbuf_reset(&sse->data);
    sse->name[0] = '\0';
    sse->has_data = sse->is_behind_cr = sse->is_begun = false;
}

/* An empty line: the event is whole. One without data is none. */
static di_status end_event(di_sse *sse, di_error *err) {
    di_status st = DI_OK;
    if (sse->has_data) {
        di_strbuf_truncate(&sse->data, sse->data.len - 1); /* the last line feed */
        st = di_strbuf_status(&sse->data, err);
        if (!st)
            st = sse->callback(sse->user, sse->name[0] ? sse->name : "message", di_strbuf_str(&sse->data),
                               sse->data.len, err);
    }
    di_strbuf_reset(&sse->data);
    sse->name[0] = '\0';
    sse->has_data = false;
    return st;
}

static bool is_field(const char *line, size_t n, const char *field) {
    return n == strlen(field) && memcmp(line, field, n) == 0;
}

static di_status take_line(di_sse *sse, const char *line, size_t n, di_error *err) {
    if (!sse->is_begun) {
        sse->is_begun = true;
        if (n >= 3 && memcmp(line, "\xEF\xBB\xBF", 3) == 0) {
            line += 3;
            n -= 3;
        }
    }
    if (n == 0)
        return end_event(sse, err);
    const char *colon = memchr(line, ':', n);
    size_t n_field = colon ? (size_t)(colon - line) : n;
    const char *value = colon ? colon + 1 : line + n;
    size_t n_value = (size_t)(line + n - value);
    if (n_value > 0 && value[0] == ' ') {
        value++;
        n_value--;
    }
    if (is_field(line, n_field, "data")) {
        if (sse->data.len + n_value >= DI_SSE_EVENT_MAX)
            return di_fail(err, DI_ERR_FORMAT, "an event of more than %d bytes", (int)DI_SSE_EVENT_MAX);
        di_strbuf_append(&sse->data, value, n_value);
        di_strbuf_putc(&sse->data, '\n');
        sse->has_data = true;
    } else if (is_field(line, n_field, "event")) {
        n_value = DI_MIN(n_value, DI_SSE_NAME_MAX - 1);
        memcpy(sse->name, value, n_value);
        sse->name[n_value] = '\0';
    } /* comments (no field name), id, retry and unknown fields say nothing here */
    return DI_OK;
}

di_status di_sse_feed(di_sse *sse, const char *bytes, size_t n, di_error *err) {
    const char *at = bytes, *end = bytes + n;
    while (at < end) {
        if (sse->is_behind_cr && *at == '\n')
            at++;
        sse->is_behind_cr = false;
        const char *stop = at;
        while (stop < end && *stop != '\n' && *stop != '\r')
            stop++;
        size_t len = (size_t)(stop - at);
        bool is_whole = stop < end;
        if (!is_whole || sse->line.len > 0) {
            if (sse->line.len + len >= DI_SSE_EVENT_MAX)
                return di_fail(err, DI_ERR_FORMAT, "an event of more than %d bytes", (int)DI_SSE_EVENT_MAX);
            di_strbuf_append(&sse->line, at, len);
            if (di_strbuf_status(&sse->line, err))
                return DI_ERR_MEMORY;
        }
        if (!is_whole)
            return DI_OK;
        sse->is_behind_cr = *stop == '\r';
        bool is_joined = sse->line.len > 0;
        di_status st = take_line(sse, is_joined ? sse->line.data : at, is_joined ? sse->line.len : len, err);
        if (st)
            return st;
        di_strbuf_reset(&sse->line);
        at = stop + 1;
    }
    return DI_OK;
}

/* ---- chunks -------------------------------------------------------------------------------------------------------
 */

static const char *skip_space(const char *s) {
    while (*s == ' ' || *s == '\n' || *s == '\t' || *s == '\r')
        s++;
    return s;
}

/* The value behind the first `"key":` at or after `from`; NULL: there is none. The text ends with NUL. */
static const char *value_of(const char *from, const char *key, size_t n_key) {
    for (const char *at = from; (at = strstr(at, key)) != NULL; at += n_key) {
        const char *colon = skip_space(at + n_key);
        if (*colon == ':')
            return skip_space(colon + 1);
    }
    return NULL;
}

#define VALUE(from, key) value_of(from, "\"" key "\"", sizeof key + 1)

static bool is_text(const char *value) {
    return value && value[0] == '"' && value[1] != '"';
}

/* Whether any of the values of this key is a text that is not empty. */
static bool has_text(const char *data, const char *key, size_t n_key) {
    for (const char *value = data; (value = value_of(value, key, n_key)) != NULL;)
        if (is_text(value))
            return true;
    return false;
}

#define HAS_TEXT(data, key) has_text(data, "\"" key "\"", sizeof key + 1)

static int64_t count_of(const char *value) {
    int64_t n = 0;
    if (!value || *value < '0' || *value > '9')
        return -1;
    for (; *value >= '0' && *value <= '9' && n < INT64_MAX / 16; value++)
        n = n * 10 + (*value - '0');
    return n;
}

void di_sse_chunk_read(const char *data, size_t len, di_sse_chunk *out) {
    *out = (di_sse_chunk){.prompt_tokens = -1, .output_tokens = -1};
    if (len == 6 && memcmp(data, "[DONE]", 6) == 0) {
        out->is_end = true;
        return;
    }
    /* chat: the text is in the delta, and nowhere before it; completions: the choice has it */
    const char *delta = VALUE(data, "delta");
    if (delta) {
        out->has_text = HAS_TEXT(delta, "content") || HAS_TEXT(delta, "reasoning_content") ||
                        HAS_TEXT(delta, "reasoning") || HAS_TEXT(delta, "arguments");
    } else {
        out->has_text = HAS_TEXT(data, "text");
        const char *error = VALUE(data, "error");
        out->is_error = error && (*error == '{' || *error == '"');
    }
    const char *usage = VALUE(data, "usage");
    if (usage && *usage == '{') {
        out->prompt_tokens = count_of(VALUE(usage, "prompt_tokens"));
        out->output_tokens = count_of(VALUE(usage, "completion_tokens"));
    }
}
