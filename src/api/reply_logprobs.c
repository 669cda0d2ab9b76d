/* Log-probabilities in replies: a token as a value in the two forms that the APIs have, and the gathering of them.
 *
 * Chat completions and Responses name each token by its text and its bytes, since a token may be a part of a character.
 * Completions have four lists side by side and texts alone: there a token that is no text of its own is written as its
 * bytes, `bytes:\xe4\xb8`, so that tokens stay distinct. Numbers are the shortest decimals that read back as the same
 * single-precision value. */
#include <math.h>
#include <stdio.h>

#include "reply_internal.h"

/* ---- values ---- */

static di_json *number_json(float v) {
    double value = (double)v;
    char text[32];
    bool is_found = !isfinite(v);
    for (int digits = 6; digits <= 9 && !is_found; digits++) {
        double back;
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        is_found = di_parse_double(text, &back) && (float)back == v;
        value = is_found ? back : value;
    }
    return di_json_new_real(value); /* NaN is null */
}

static di_json *bytes_json(const char *bytes, size_t len) {
    di_json *list = di_json_new_array();
    for (size_t i = 0; i < len; i++) {
        if (list != NULL && !di_json_append(list, di_json_new_int((unsigned char)bytes[i]))) {
            di_json_free(list);
            list = NULL;
        }
    }
    return list;
}

static bool is_there(const di_logprob *top, int32_t n_top, int32_t i) {
    return top != NULL && i < n_top && top[i].token >= 0;
}

static di_json *alternative_json(const di_tokenizer *tok, const di_logprob *entry) {
    size_t len;
    const char *bytes = di_tokenizer_bytes(tok, entry->token, &len);
    return di_reply_object("token", di_json_new_string(bytes, len), "logprob", number_json(entry->logprob), "bytes",
                           bytes_json(bytes, len), NULL);
}

di_json *di_reply_token_json(const di_reply_token *t) {
    di_json *top = di_json_new_array();
    for (int32_t i = 0; is_there(t->top, t->n_top, i); i++) {
        if (top != NULL && !di_json_append(top, alternative_json(t->tok, &t->top[i]))) {
            di_json_free(top);
            top = NULL;
        }
    }
    size_t len;
    const char *bytes = di_tokenizer_bytes(t->tok, t->token, &len);
    return di_reply_object("token", di_json_new_string(bytes, len), "logprob", number_json(t->logprob), "bytes",
                           bytes_json(bytes, len), "top_logprobs", top, NULL);
}

/* ---- the lists of completions ---- */

/* Appends the token's name: its text, or its bytes where they are no text. */
static void write_name(di_strbuf *out, const di_tokenizer *tok, int32_t token) {
    size_t len;
    const char *bytes = di_tokenizer_bytes(tok, token, &len);
    if (di_utf8_valid(bytes, len) && memchr(bytes, '\0', len) == NULL) {
        di_strbuf_append(out, bytes, len);
        return;
    }
    di_strbuf_puts(out, "bytes:");
    for (size_t i = 0; i < len; i++) {
        di_strbuf_printf(out, "\\x%02x", (unsigned)(unsigned char)bytes[i]);
    }
}

/* Sets the token's log-probability in an object by names, unless one of that name is there. */
static bool set_named(di_json *object, const di_tokenizer *tok, int32_t token, float logprob) {
    di_strbuf name = {0};
    write_name(&name, tok, token);
    bool is_good = !name.failed && (di_json_get(object, di_strbuf_str(&name)) != NULL ||
                                    di_json_set(object, di_strbuf_str(&name), number_json(logprob)));
    di_strbuf_deinit(&name);
    return is_good;
}

/* The likeliest tokens, and the token itself where it is none of them; null for a token without a log-probability. */
static di_json *named_json(const di_reply_token *t) {
    if (isnan(t->logprob)) {
        return di_json_new_null();
    }
    di_json *object = di_json_new_object();
    bool is_good = object != NULL;
    for (int32_t i = 0; is_good && is_there(t->top, t->n_top, i); i++) {
        is_good = set_named(object, t->tok, t->top[i].token, t->top[i].logprob);
    }
    if (!is_good || !set_named(object, t->tok, t->token, t->logprob)) {
        di_json_free(object);
        return NULL;
    }
    return object;
}

bool di_reply_token_lists(di_json **lists, const di_reply_token *t, int64_t text_offset) {
    if (*lists == NULL) {
        *lists = di_reply_object("text_offset", di_json_new_array(), "token_logprobs", di_json_new_array(), "tokens",
                                 di_json_new_array(), "top_logprobs", di_json_new_array(), NULL);
    }
    if (*lists == NULL) {
        return false;
    }
    di_strbuf name = {0};
    write_name(&name, t->tok, t->token);
    bool is_good = di_json_append(di_json_get(*lists, "text_offset"), di_json_new_int(text_offset)) &&
                   di_json_append(di_json_get(*lists, "token_logprobs"), number_json(t->logprob)) && !name.failed &&
                   di_json_append(di_json_get(*lists, "tokens"), di_reply_strbuf(&name)) &&
                   di_json_append(di_json_get(*lists, "top_logprobs"), named_json(t));
    di_strbuf_deinit(&name);
    return is_good;
}

/* ---- gathering ---- */

bool di_reply_extend(di_json **to, const di_json *from) {
    if (from == NULL) {
        return true;
    }
    if (*to == NULL && (*to = di_json_new_array()) == NULL) {
        return false;
    }
    for (size_t i = 0; i < di_json_array_len(from); i++) {
        if (!di_json_append(*to, di_json_ref(di_json_at(from, i)))) {
            return false;
        }
    }
    return true;
}

di_status di_reply_stream_token(di_reply_stream *s, const di_tokenizer *tok, int32_t token, float logprob,
                                const di_logprob *top, int32_t n_top, di_error *err) {
    if (s->ops->token == NULL || s->head.is_echo_only) {
        return DI_OK;
    }
    const di_reply_token t = {.tok = tok, .token = token, .logprob = logprob, .top = top, .n_top = n_top};
    return s->ops->token(s, &t, err);
}
