/* Reading fields: refusals that name what was found and expected, typed getters, and lists in the request's arena.
 *
 * The hosted service tells a body that does not fit its types from one that can't be converted; so do these refusals.
 */
#include "request_internal.h"

di_place di_place_of(const char *fmt, ...) {
    di_place place;
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(place.text, sizeof place.text, fmt, args);
    va_end(args);
    return place;
}

/* Records the refusal; `prefix` goes before the message. */
static di_status record(di_reader *r, di_refusal_kind kind, const char *param, const char *prefix, const char *fmt,
                        va_list args) __attribute__((format(printf, 5, 0)));

static di_status record(di_reader *r, di_refusal_kind kind, const char *param, const char *prefix, const char *fmt,
                        va_list args) {
    di_strbuf message = {0};
    char text[sizeof r->err->message];
    (void)vsnprintf(text, sizeof text, fmt, args);
    /* A message that was cut may end inside a character. */
    di_utf8_repair(&message, text, strlen(text));
    r->req->refusal = kind;
    (void)snprintf(r->req->param, sizeof r->req->param, "%s", param);
    di_status st = di_fail(r->err, DI_ERR_REQUEST, "%s%s", prefix, di_strbuf_str(&message));
    di_strbuf_deinit(&message);
    return st;
}

di_status di_refuse_body(di_reader *r, const char *param, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    di_status st = record(r, DI_REFUSAL_BODY, param, r->req->vendor_compat ? "invalid request body: " : "", fmt, args);
    va_end(args);
    return st;
}

di_status di_refuse(di_reader *r, const char *param, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    di_status st = record(r, DI_REFUSAL_CONVERSION, param, "", fmt, args);
    va_end(args);
    return st;
}

di_status di_reader_no_memory(di_reader *r) {
    return di_fail(r->err, DI_ERR_MEMORY, "reading a request of %zu bytes", r->len);
}

void *di_list_add(di_reader *r, di_list *list, size_t item_bytes) {
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 8;
        void *items = di_arena_calloc(&r->req->arena, cap, item_bytes);
        if (!items) {
            (void)di_reader_no_memory(r);
            return NULL;
        }
        if (list->n > 0) {
            memcpy(items, list->items, list->n * item_bytes);
        }
        list->items = items;
        list->cap = cap;
    }
    return (char *)list->items + list->n++ * item_bytes;
}

di_status di_reader_keep(di_reader *r, di_strbuf *sb, di_chat_text *out) {
    const char *copy = sb->failed ? NULL : di_arena_strndup(&r->req->arena, di_strbuf_str(sb), sb->len);
    size_t len = sb->len;
    di_strbuf_deinit(sb);
    if (!copy) {
        return di_reader_no_memory(r);
    }
    *out = (di_chat_text){.data = copy, .len = len};
    return DI_OK;
}

di_chat_text di_text_of(const di_json *string) {
    di_chat_text text = {0};
    text.data = di_json_str(string, &text.len);
    if (!text.data) {
        text.len = 0;
    }
    return text;
}

bool di_text_is(di_chat_text text, const char *s) {
    size_t n = strlen(s);
    return text.data && text.len == n && memcmp(text.data, s, n) == 0;
}

/* ------------------------------------------------------------------ getters */

static di_place join(const char *at, const char *key) {
    return *at ? di_place_of("%s.%s", at, key) : di_place_of("%s", key);
}

/* object[key], or NULL when it is absent or null. */
static const di_json *value_of(const di_json *object, const char *key) {
    const di_json *v = di_json_get(object, key);
    return v && !di_json_is(v, DI_JSON_NULL) ? v : NULL;
}

static di_status wrong_type(di_reader *r, const char *place, const char *expected, const di_json *found) {
    return di_refuse_body(r, place, "'%s': expected %s, found %s", place, expected, di_json_kind_name(found));
}

static di_status read_kind(di_reader *r, const di_json *object, const char *at, const char *key, di_json_type type,
                           const char *expected, const di_json **out) {
    const di_json *v = value_of(object, key);
    *out = v;
    return !v || di_json_is(v, type) ? DI_OK : wrong_type(r, join(at, key).text, expected, v);
}

di_status di_read_object(di_reader *r, const di_json *object, const char *at, const char *key, const di_json **out) {
    return read_kind(r, object, at, key, DI_JSON_OBJECT, "an object", out);
}

di_status di_read_array(di_reader *r, const di_json *object, const char *at, const char *key, const di_json **out) {
    return read_kind(r, object, at, key, DI_JSON_ARRAY, "an array", out);
}

di_status di_read_string(di_reader *r, const di_json *object, const char *at, const char *key, di_chat_text *out,
                         bool *has) {
    const di_json *v;
    di_status st = read_kind(r, object, at, key, DI_JSON_STRING, "a string", &v);
    if (st == DI_OK && v) {
        *out = di_text_of(v);
    }
    if (has) {
        *has = v != NULL;
    }
    return st;
}

di_status di_need_string(di_reader *r, const di_json *object, const char *at, const char *key, di_chat_text *out) {
    bool has;
    di_status st = di_read_string(r, object, at, key, out, &has);
    if (st == DI_OK && !has) {
        di_place place = join(at, key);
        return di_refuse_body(r, place.text, "missing field `%s`%s%s", key, *at ? " in " : "", at);
    }
    return st;
}

di_status di_read_bool(di_reader *r, const di_json *object, const char *at, const char *key, bool *out, bool *has) {
    const di_json *v;
    di_status st = read_kind(r, object, at, key, DI_JSON_BOOL, "true or false", &v);
    if (st == DI_OK && v) {
        *out = di_json_bool(v);
    }
    if (has) {
        *has = v != NULL;
    }
    return st;
}

di_status di_read_number(di_reader *r, const di_json *object, const char *at, const char *key, double *out, bool *has) {
    const di_json *v = value_of(object, key);
    *has = v != NULL;
    if (!v) {
        return DI_OK;
    }
    di_json_type kind = di_json_kind(v);
    if (kind != DI_JSON_INT && kind != DI_JSON_UINT && kind != DI_JSON_REAL) {
        return wrong_type(r, join(at, key).text, "a number", v);
    }
    *out = di_json_number(v);
    return DI_OK;
}

di_status di_read_int(di_reader *r, const di_json *object, const char *at, const char *key, int64_t *out, bool *has) {
    const di_json *v = value_of(object, key);
    *has = v != NULL;
    if (!v) {
        return DI_OK;
    }
    if (di_json_is(v, DI_JSON_INT)) {
        *out = di_json_int(v);
    } else if (di_json_is(v, DI_JSON_UINT)) {
        *out = INT64_MAX;
    } else {
        return wrong_type(r, join(at, key).text, "an integer", v);
    }
    return DI_OK;
}

di_status di_need_object(di_reader *r, const di_json *value, const char *at) {
    return di_json_is(value, DI_JSON_OBJECT) ? DI_OK : wrong_type(r, at, "an object", value);
}
