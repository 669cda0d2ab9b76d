/* The Engram class map: which token ids the n-gram tables of the model take for the same.
 *
 * An id's key is its text with case, marks, compatibility forms and white space folded away, or its spelling when its
 * bytes are no whole text; equal keys share a class, and classes are numbered by first appearance. Unicode data comes
 * from libunistring: the result is the released table for any version of it, since the vocabulary holds no recent
 * characters.
 *
 * Fold: NFKC; NFD; delete marks; lower case; every run of space, tab, CR, LF to one space; strip White_Space, unless
 * one space is all there is. */
#include <unicase.h>
#include <unictype.h>
#include <uninorm.h>

#include "tokenizer_internal.h"

typedef struct folder {
    di_strbuf text;    /* folded text of one id */
    uint8_t *forms[2]; /* owned: buffers of the two normal forms, grown as needed */
    size_t caps[2];
} folder;

static di_status normalize(folder *f, int which, uninorm_t form, const uint8_t *s, size_t n, const uint8_t **out,
                           size_t *n_out, di_error *err) {
    size_t len = f->caps[which];
    uint8_t *result = u8_normalize(form, s, n, f->forms[which], &len);
    if (!result) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a normal form");
    }
    if (result != f->forms[which]) {
        free(f->forms[which]);
        f->forms[which] = result;
        f->caps[which] = len;
    }
    *out = result;
    *n_out = len;
    return DI_OK;
}

static bool is_ascii(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)s[i] >= 0x80) {
            return false;
        }
    }
    return true;
}

static void strip(di_strbuf *sb) {
    uint32_t cp = 0;
    size_t end = sb->len, begin = 0;
    while (end > 0) {
        size_t start = end - 1;
        while (start > 0 && ((unsigned char)sb->data[start] & 0xC0) == 0x80) {
            start--;
        }
        if (!di_utf8_decode(sb->data + start, end - start, &cp, NULL) || !uc_is_property_white_space(cp)) {
            break;
        }
        end = start;
    }
    di_strbuf_truncate(sb, end);
    while (begin < sb->len) {
        size_t len = di_utf8_decode(sb->data + begin, sb->len - begin, &cp, NULL);
        if (!len || !uc_is_property_white_space(cp)) {
            break;
        }
        begin += len;
    }
    di_strbuf_remove(sb, 0, begin);
}

/* Folds well-formed text into f->text. */
static di_status fold(folder *f, const char *text, size_t n, di_error *err) {
    const uint8_t *s = (const uint8_t *)text;
    bool plain = is_ascii(text, n); /* ASCII is its own normal form and has no marks */
    if (!plain) {
        di_status status = normalize(f, 0, UNINORM_NFKC, s, n, &s, &n, err);
        if (!status) {
            status = normalize(f, 1, UNINORM_NFD, s, n, &s, &n, err);
        }
        if (status) {
            return status;
        }
    }
    di_strbuf_reset(&f->text);
    bool in_space = false;
    for (size_t i = 0; i < n;) {
        uint32_t cp = s[i];
        size_t len = plain ? 1 : di_utf8_decode((const char *)s + i, n - i, &cp, NULL);
        DI_ASSERT(len > 0);
        i += len;
        if (!plain && uc_is_general_category_withtable(cp, UC_CATEGORY_MASK_M)) {
            continue;
        }
        bool is_space = cp == ' ' || cp == '\t' || cp == '\r' || cp == '\n';
        if (is_space) {
            if (!in_space) {
                di_strbuf_putc(&f->text, ' ');
            }
        } else {
            /* The simple mapping is the full one here: the only character whose lower case is several, U+0130, has been
             * decomposed. */
            char lower[4];
            di_strbuf_append(&f->text, lower, di_utf8_encode(uc_tolower(cp), lower));
        }
        in_space = is_space;
    }
    if (!(f->text.len == 1 && f->text.data[0] == ' ')) {
        strip(&f->text);
    }
    return di_strbuf_status(&f->text, err);
}

static bool has_replacement(const char *s, size_t n) {
    return n >= 3 && memmem(s, n, "\xEF\xBF\xBD", 3) != NULL;
}

di_status di_tokenizer_engram_map(const di_tokenizer *tok, int32_t *map, int32_t *n_classes, di_error *err) {
    const di_vocab *v = &tok->vocab;
    folder f = {0};
    di_strbuf spelling = {0};
    di_arena keys = {0};
    di_map classes = {0};
    int32_t n = 0;
    di_status status = di_map_reserve(&classes, (size_t)v->n_entries, err);
    for (int32_t id = 0; !status && id < v->n_entries; id++) {
        const di_entry *e = &v->entries[id];
        const char *key = v->blob + e->at;
        size_t len = e->len;
        if (!(e->flags & DI_ENTRY_UTF8) || has_replacement(key, len)) {
            if (!(e->flags & DI_ENTRY_LITERAL)) {
                di_strbuf_reset(&spelling);
                di_byte_spelling(&spelling, key, len);
                key = di_strbuf_str(&spelling);
                len = spelling.len;
            }
            status = di_strbuf_status(&spelling, err);
        } else if (!(status = fold(&f, key, len, err)) && f.text.len > 0) {
            key = f.text.data;
            len = f.text.len;
        }
        int64_t found = n;
        if (!status && !di_map_get(&classes, key, len, &found)) {
            const char *copy = di_arena_strndup(&keys, key, len);
            status = copy ? di_map_set(&classes, copy, len, n, NULL, err)
                          : di_fail(err, DI_ERR_MEMORY, "out of memory for the classes");
            n++;
        }
        map[id] = (int32_t)found;
    }
    if (!status) {
        *n_classes = n;
    }
    di_map_deinit(&classes);
    di_arena_deinit(&keys);
    di_strbuf_deinit(&spelling);
    di_strbuf_deinit(&f.text);
    free(f.forms[0]);
    free(f.forms[1]);
    return status;
}
