/* From ids to text, at once or as ids come.
 *
 * An id stands for bytes that need not end where a character ends. The stream keeps back the tail that may still become
 * a character, at most three bytes, and releases everything else, ill-formed bytes as U+FFFD: what is released is
 * always well-formed, and its concatenation is the one-shot text, which is the same stream run to its end.
 *
 * One tail is kept back that can't become a character: the first two bytes of an encoded surrogate (ED A0..BF). The
 * reference's decoder waits for their third byte too, so that deltas are the same, and they come out as two U+FFFD. */
#include "tokenizer_internal.h"

#include "deepinfer/text.h"

const char *di_tokenizer_bytes(const di_tokenizer *tok, int32_t id, size_t *len) {
    if (id < 0 || id >= tok->vocab.n_entries) {
        *len = 0;
        return "";
    }
    const di_entry *e = &tok->vocab.entries[id];
    *len = e->len;
    return tok->vocab.blob + e->at;
}

size_t di_utf8_open_tail(const char *s, size_t n) {
    for (size_t k = 1; k <= 3 && k <= n; k++) {
        const unsigned char *lead = (const unsigned char *)s + n - k;
        if ((lead[0] & 0xC0) == 0x80) {
            continue;
        }
        if (k == 2 && lead[0] == 0xED && lead[1] >= 0xA0) {
            return 2; /* see above */
        }
        /* Its k bytes are open when they are one ill-formed subpart as a whole and the first is a lead byte at all. */
        size_t skip = 0;
        bool is_lead = lead[0] >= 0xC2 && lead[0] <= 0xF4;
        return is_lead && di_utf8_decode((const char *)lead, k, NULL, &skip) == 0 && skip == k ? k : 0;
    }
    return 0;
}

void di_detokenizer_init(di_detokenizer *d, const di_tokenizer *tok) {
    *d = (di_detokenizer){.tok = tok};
}

/* Releases n bytes that follow the pending ones. */
static void release(di_detokenizer *d, const char *s, size_t n, di_strbuf *out) {
    size_t at = 0;
    while (d->n_pending > 0 && at < n) {
        size_t n_now = (size_t)d->n_pending + 1;
        d->pending[d->n_pending] = s[at];
        if (di_utf8_decode(d->pending, n_now, NULL, NULL) > 0) {
            di_strbuf_append(out, d->pending, n_now);
            d->n_pending = 0;
            at++;
        } else if (di_utf8_open_tail(d->pending, n_now) == n_now) {
            d->n_pending++;
            at++;
        } else {
            di_utf8_repair(out, d->pending, (size_t)d->n_pending); /* this byte starts afresh */
            d->n_pending = 0;
        }
    }
    if (at == n) {
        return;
    }
    size_t tail = di_utf8_open_tail(s + at, n - at);
    di_utf8_repair(out, s + at, n - at - tail);
    memcpy(d->pending, s + n - tail, tail);
    d->n_pending = (int)tail;
}

void di_detokenizer_push(di_detokenizer *d, int32_t id, di_strbuf *out) {
    if (id < 0 || id >= d->tok->vocab.n_entries) {
        return;
    }
    const di_entry *e = &d->tok->vocab.entries[id];
    if (d->n_pending == 0 && (e->flags & DI_ENTRY_UTF8)) {
        di_strbuf_append(out, d->tok->vocab.blob + e->at, e->len);
    } else {
        release(d, d->tok->vocab.blob + e->at, e->len, out);
    }
}

void di_detokenizer_flush(di_detokenizer *d, di_strbuf *out) {
    di_utf8_repair(out, d->pending, (size_t)d->n_pending);
    d->n_pending = 0;
}

di_status di_tokenizer_decode(const di_tokenizer *tok, const int32_t *ids, size_t n, bool skip_special, di_strbuf *out,
                              di_error *err) {
    di_detokenizer d;
    di_detokenizer_init(&d, tok);
    for (size_t i = 0; i < n; i++) {
        if (!skip_special || !di_tokenizer_is_special(tok, ids[i])) {
            di_detokenizer_push(&d, ids[i], out);
        }
    }
    di_detokenizer_flush(&d, out);
    return di_strbuf_status(out, err);
}
