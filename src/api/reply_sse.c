/* Server-sent events, and pieces of text written without making values.
 *
 * Nearly all events of a stream are the same bytes around a few characters of text. For a sink that writes into a
 * buffer these bytes are taken once a part, from the very values that a general sink would get: the event is written
 * with two texts and two numbers, and where the results differ is where text and number belong. So the fast way can't
 * drift from the general one. */
#include "reply_internal.h"

di_status di_reply_sse_sink(void *user, const char *event, const di_json *data, di_error *err) {
    di_strbuf *out = user;
    if (event != NULL) {
        di_strbuf_puts(out, "event: ");
        di_strbuf_puts(out, event);
        di_strbuf_putc(out, '\n');
    }
    di_strbuf_puts(out, "data: ");
    if (data != NULL) {
        di_json_write(out, data, DI_JSON_COMPACT);
    } else {
        di_strbuf_puts(out, "[DONE]");
    }
    di_strbuf_append(out, "\n\n", 2);
    return di_strbuf_status(out, err);
}

/* ---- frames ---- */

/* Writes the event of a piece with this text and number. */
static di_status write_sample(di_reply_stream *s, di_reply_part part, const char *text, int64_t number, di_strbuf *out,
                              di_error *err) {
    const char *event = NULL;
    const di_reply_piece piece = {.text = di_reply_string(text), .number = number};
    di_json *data = s->ops->piece(s, part, &piece, &event);
    if (data == NULL) {
        return di_fail(err, DI_ERR_MEMORY, "reply: no memory for an event");
    }
    di_status st = di_reply_sse_sink(out, event, data, err);
    di_json_free(data);
    return st;
}

/* The first byte in which two texts of one length differ; their length when they don't. */
static size_t first_difference(const di_strbuf *a, const di_strbuf *b) {
    size_t i = 0;
    DI_ASSERT(a->len == b->len);
    while (i < a->len && a->data[i] == b->data[i]) {
        i++;
    }
    return i;
}

static di_status make_frame(di_reply_stream *s, di_reply_part part, di_error *err) {
    di_reply_frame *f = &s->frame;
    di_strbuf other_text = {0}, other_number = {0};
    di_strbuf_reset(&f->text);
    f->is_ready = false;
    di_status st = write_sample(s, part, "a", 0, &f->text, err);
    if (st == DI_OK && (st = write_sample(s, part, "b", 0, &other_text, err)) == DI_OK &&
        (st = write_sample(s, part, "a", 1, &other_number, err)) == DI_OK) {
        f->text_at = first_difference(&f->text, &other_text);
        f->number_at = first_difference(&f->text, &other_number);
        DI_ASSERT(f->text_at < f->number_at);
        if (f->number_at < f->text.len) {
            di_strbuf_remove(&f->text, f->number_at, 1);
            f->number_at--; /* the text's byte goes too */
        } else {
            f->number_at = 0;
        }
        di_strbuf_remove(&f->text, f->text_at, 1);
        f->part = part;
        f->n_parts = s->n_parts;
        f->n_calls = s->reply.n_calls;
        f->is_ready = true;
    }
    di_strbuf_deinit(&other_text);
    di_strbuf_deinit(&other_number);
    return st;
}

static void write_number(di_strbuf *out, int64_t v) {
    char digits[24];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    di_strbuf_append(out, digits + at, sizeof digits - at);
}

static di_status write_piece(di_reply_stream *s, di_reply_part part, const char *text, size_t len, di_error *err) {
    di_reply_frame *f = &s->frame;
    di_strbuf *out = s->user;
    if (!f->is_ready || f->part != part || f->n_parts != s->n_parts || f->n_calls != s->reply.n_calls) {
        di_status st = make_frame(s, part, err);
        if (st != DI_OK) {
            return st;
        }
    }
    const char *bytes = di_strbuf_str(&f->text);
    size_t at = f->text_at;
    di_strbuf_append(out, bytes, at);
    di_json_write_escaped(out, text, len);
    if (f->number_at > 0) {
        di_strbuf_append(out, bytes + at, f->number_at - at);
        write_number(out, s->n_sent);
        at = f->number_at;
    }
    di_strbuf_append(out, bytes + at, f->text.len - at);
    s->n_sent++;
    return di_strbuf_status(out, err);
}

/* ---- pieces ---- */

di_status di_reply_send_piece(di_reply_stream *s, di_reply_part part, const char *text, size_t len, di_error *err) {
    if (s->sink == NULL) {
        di_json_free(s->logprobs_new);
        s->logprobs_new = NULL;
        return DI_OK;
    }
    if (s->sink == di_reply_sse_sink && s->logprobs_new == NULL && !s->head.has_running_usage &&
        di_utf8_valid(text, len)) {
        return write_piece(s, part, text, len, err);
    }
    const char *event = NULL;
    const di_reply_piece piece = {
        .text = di_json_new_string(text, len), .logprobs = s->logprobs_new, .number = s->n_sent++};
    s->logprobs_new = NULL;
    if (piece.text == NULL) {
        di_json_free(piece.logprobs);
        return di_reply_send(s, NULL, NULL, err);
    }
    di_json *data = s->ops->piece(s, part, &piece, &event);
    return di_reply_send(s, event, data, err);
}
