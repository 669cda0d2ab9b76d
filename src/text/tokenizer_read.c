/* Reading tokenizer.json.
 *
 * The released file has 128,000 entries and 127,741 merges: as a tree of JSON values they would cost a quarter of a
 * second at every start. So a small cursor walks the file once and takes these two straight from the text; every other
 * value is small and goes through the JSON reader. What the file asks for beyond the pipeline that is implemented (byte
 * level BPE, isolated splits, no normalizer) is refused, never ignored. */
#include "tokenizer_internal.h"

enum { FILE_BYTES_MAX = 1 << 30, SKIP_DEPTH_MAX = 512, KEY_BYTES = 32 };

typedef struct cursor {
    const char *text;
    size_t at, len;
    di_strbuf unescaped; /* owned: the last string that had escapes */
    di_error *err;
} cursor;

typedef struct raw_merge {
    int32_t left, right, result;
} raw_merge;

/* What is known while the file is read, in any order of its keys. */
typedef struct reader {
    di_tokenizer *tok;
    cursor cur;
    size_t blob_used;
    size_t merges_at;  /* where a merge list begins that comes before its vocabulary; 0 = none */
    raw_merge *merges; /* owned */
    size_t n_merges, merges_cap;
    char *work; /* owned: bytes of one merge */
    size_t work_cap;
    di_json *added; /* owned */
    bool has_model, has_vocab, has_merges, has_type;
} reader;

static di_status fail_at(cursor *c, const char *expected) {
    if (c->at >= c->len) {
        return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: expected %s, found the end of the file", c->at, expected);
    }
    unsigned char found = (unsigned char)c->text[c->at];
    if (found > 0x20 && found < 0x7F) {
        return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: expected %s, found '%c'", c->at, expected, found);
    }
    return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: expected %s, found byte 0x%02x", c->at, expected, found);
}

static void skip_space(cursor *c) {
    while (c->at < c->len &&
           (c->text[c->at] == ' ' || c->text[c->at] == '\n' || c->text[c->at] == '\r' || c->text[c->at] == '\t')) {
        c->at++;
    }
}

/* Takes one character after white space; false leaves the cursor on what is there instead. */
static bool take(cursor *c, char want) {
    skip_space(c);
    if (c->at < c->len && c->text[c->at] == want) {
        c->at++;
        return true;
    }
    return false;
}

static bool hex4(const char *s, uint32_t *out) {
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) {
        int digit = di_hex_digit(s[i]);
        if (digit < 0) {
            return false;
        }
        v = v << 4 | (uint32_t)digit;
    }
    *out = v;
    return true;
}

/* One escape; the cursor is on its backslash. */
static di_status read_escape(cursor *c) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *s = c->text + c->at;
    size_t left = c->len - c->at;
    const char *name = left >= 2 && s[1] ? strchr(names, s[1]) : NULL;
    if (name) {
        di_strbuf_putc(&c->unescaped, values[name - names]);
        c->at += 2;
        return DI_OK;
    }
    uint32_t high = 0, low = 0;
    if (left < 6 || s[1] != 'u' || !hex4(s + 2, &high)) {
        return fail_at(c, "an escape sequence");
    }
    size_t used = 6;
    if (high >= 0xD800 && high <= 0xDFFF) {
        if (high > 0xDBFF || left < 12 || s[6] != '\\' || s[7] != 'u' || !hex4(s + 8, &low) || low < 0xDC00 ||
            low > 0xDFFF) {
            return fail_at(c, "a pair of surrogates");
        }
        high = 0x10000 + ((high - 0xD800) << 10 | (low - 0xDC00));
        used = 12;
    }
    char utf8[4];
    di_strbuf_append(&c->unescaped, utf8, di_utf8_encode(high, utf8));
    c->at += used;
    return DI_OK;
}

/* One string: a view of the text, or of c->unescaped when it has escapes. Whether it is UTF-8 is left to the caller,
 * who looks at the characters anyway. */
static di_status read_string(cursor *c, const char **s, size_t *n) {
    if (!take(c, '"')) {
        return fail_at(c, "a string");
    }
    size_t begin = c->at;
    bool has_escapes = false;
    for (;;) {
        size_t at = c->at;
        while (at < c->len && (unsigned char)c->text[at] >= 0x20 && c->text[at] != '"' && c->text[at] != '\\') {
            at++;
        }
        c->at = at;
        if (c->at < c->len && c->text[c->at] == '\\') {
            if (!has_escapes) {
                di_strbuf_reset(&c->unescaped);
                has_escapes = true;
            }
            di_strbuf_append(&c->unescaped, c->text + begin, c->at - begin);
            di_status status = read_escape(c);
            if (status) {
                return status;
            }
            begin = c->at;
            continue;
        }
        if (c->at == c->len || c->text[c->at] != '"') {
            return fail_at(c, "the rest of a string");
        }
        break;
    }
    if (has_escapes) {
        di_strbuf_append(&c->unescaped, c->text + begin, c->at - begin);
        *s = di_strbuf_str(&c->unescaped);
        *n = c->unescaped.len;
    } else {
        *s = c->text + begin;
        *n = c->at - begin;
    }
    c->at++;
    return has_escapes ? di_strbuf_status(&c->unescaped, c->err) : DI_OK;
}

/* The key of an object's next member and the colon behind it. A key that is too long to be known reads as "". */
static di_status read_key(cursor *c, char key[KEY_BYTES]) {
    const char *s = NULL;
    size_t n = 0;
    di_status status = read_string(c, &s, &n);
    if (status) {
        return status;
    }
    bool is_short = s && n < KEY_BYTES && !memchr(s, 0, n);
    snprintf(key, KEY_BYTES, "%.*s", is_short ? (int)n : 0, is_short ? s : "");
    return take(c, ':') ? DI_OK : fail_at(c, "':'");
}

static di_status read_id(cursor *c, int32_t *out) {
    skip_space(c);
    size_t begin = c->at;
    int64_t v = 0;
    while (c->at < c->len && c->text[c->at] >= '0' && c->text[c->at] <= '9' && v <= INT32_MAX) {
        v = v * 10 + (c->text[c->at++] - '0');
    }
    bool has_zero = c->at > begin + 1 && c->text[begin] == '0';
    if (c->at == begin || has_zero || v > INT32_MAX) {
        c->at = begin;
        return fail_at(c, "an id of 0 to 2147483647");
    }
    *out = (int32_t)v;
    return DI_OK;
}

/* Passes over a value by its brackets and strings; who uses it reads it properly. */
static di_status skip_value(cursor *c) {
    const char *s;
    size_t n, depth = 0;
    do {
        skip_space(c);
        char ch = c->at < c->len ? c->text[c->at] : 0;
        if (ch == '"') {
            di_status status = read_string(c, &s, &n);
            if (status) {
                return status;
            }
        } else if (ch == '{' || ch == '[') {
            if (++depth > SKIP_DEPTH_MAX) {
                return fail_at(c, "at most 512 levels of nesting");
            }
            c->at++;
        } else if (depth > 0 && (ch == '}' || ch == ']')) {
            depth--;
            c->at++;
        } else if (depth > 0 && (ch == ',' || ch == ':')) {
            c->at++;
        } else {
            size_t begin = c->at;
            while (c->at < c->len &&
                   (strchr("+-.", c->text[c->at]) || (c->text[c->at] >= '0' && c->text[c->at] <= '9') ||
                    (c->text[c->at] >= 'a' && c->text[c->at] <= 'z') || c->text[c->at] == 'E') &&
                   c->text[c->at]) {
                c->at++;
            }
            if (c->at == begin) {
                return fail_at(c, "a value");
            }
        }
    } while (depth > 0);
    return DI_OK;
}

static di_status read_small(cursor *c, di_json **out) {
    skip_space(c);
    size_t begin = c->at;
    di_status status = skip_value(c);
    if (status) {
        return status;
    }
    return di_error_context(c->err, di_json_parse(out, c->text + begin, c->at - begin, c->err), "value at byte %zu",
                            begin);
}

/* ---- model ------------------------------------------------------------------------------------------------------- */

/* Every entry is "spelling": id. Ids may come in any order, but the base vocabulary has no gaps. */
static di_status read_vocab(reader *r) {
    cursor *c = &r->cur;
    di_vocab *v = &r->tok->vocab;
    if (!take(c, '{')) {
        return fail_at(c, "an object of spellings and ids");
    }
    /* Bytes never outnumber the characters that spell them; only the pages that are written become memory. */
    v->blob = malloc(c->len + 1);
    if (!v->blob) {
        return di_fail(c->err, DI_ERR_MEMORY, "out of memory for the vocabulary");
    }
    size_t cap = 0;
    int32_t id_max = -1;
    di_status status = DI_OK;
    if (take(c, '}')) {
        return di_fail(c->err, DI_ERR_FORMAT, "the vocabulary is empty");
    }
    while (!status) {
        const char *s = NULL;
        size_t n = 0, n_bytes = 0;
        int32_t id = 0;
        if ((status = read_string(c, &s, &n))) {
            break;
        }
        uint32_t flags = 0;
        if (!di_byte_unmap(v->blob + r->blob_used, &n_bytes, s, n)) {
            if (!s || !di_utf8_valid(s, n)) {
                status = fail_at(c, "a spelling in UTF-8 before this byte");
                break;
            }
            memcpy(v->blob + r->blob_used, s, n);
            n_bytes = n;
            flags = DI_ENTRY_LITERAL;
        }
        if (n == 0) {
            status = fail_at(c, "a spelling that is not empty before this byte");
            break;
        }
        if (!take(c, ':')) {
            status = fail_at(c, "':'");
            break;
        }
        if ((status = read_id(c, &id))) {
            break;
        }
        if ((size_t)id >= c->len / 5) { /* "x":0, */
            status = di_fail(c->err, DI_ERR_FORMAT, "id %d in a file of %zu bytes: ids have no gaps", id, c->len);
            break;
        }
        if ((size_t)id >= cap) {
            size_t grown = DI_MAX(2 * cap, DI_MAX((size_t)id + 1, 4096));
            di_entry *entries = realloc(v->entries, grown * sizeof *entries);
            if (!entries) {
                status = di_fail(c->err, DI_ERR_MEMORY, "out of memory for %zu entries", grown);
                break;
            }
            memset(entries + cap, 0, (grown - cap) * sizeof *entries);
            v->entries = entries;
            cap = grown;
        }
        if (v->entries[id].len) {
            status = di_fail(c->err, DI_ERR_FORMAT, "id %d has two spellings", id);
            break;
        }
        if (di_utf8_valid(v->blob + r->blob_used, n_bytes)) {
            flags |= DI_ENTRY_UTF8;
        }
        v->entries[id] = (di_entry){.at = (uint32_t)r->blob_used, .len = (uint32_t)n_bytes, .flags = flags};
        r->blob_used += n_bytes;
        id_max = DI_MAX(id_max, id);
        v->n_base++;
        if (!take(c, ',')) {
            if (!take(c, '}')) {
                status = fail_at(c, "',' or '}'");
            }
            break;
        }
    }
    if (status) {
        return status;
    }
    if (id_max + 1 != v->n_base) {
        int32_t gap = 0;
        while (v->entries[gap].len) {
            gap++;
        }
        return di_fail(c->err, DI_ERR_FORMAT, "the vocabulary has %d entries and ids up to %d: id %d has none",
                       v->n_base, id_max, gap);
    }
    v->n_entries = v->n_base;
    if ((status = di_vocab_index(v, c->err))) {
        return status;
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        r->tok->byte_ids[b] = di_vocab_find(v, &byte, 1);
        if (r->tok->byte_ids[b] < 0) {
            return di_fail(c->err, DI_ERR_FORMAT, "the vocabulary has no entry for byte 0x%02x", (unsigned)b);
        }
    }
    r->has_vocab = true;
    return DI_OK;
}

/* Room for n bytes of a merge. */
static di_status reserve_work(reader *r, size_t n) {
    if (n > r->work_cap) {
        size_t grown = DI_MAX(2 * r->work_cap, n + 64);
        char *work = realloc(r->work, grown);
        if (!work) {
            return di_fail(r->cur.err, DI_ERR_MEMORY, "out of memory for a merge of %zu bytes", n);
        }
        r->work = work;
        r->work_cap = grown;
    }
    return DI_OK;
}

/* Puts one half of a merge into r->work from offset `at`; returns its entry, -1 when there is none. */
static int32_t merge_part(reader *r, size_t at, const char *s, size_t n, size_t *n_bytes) {
    *n_bytes = 0;
    if (!di_byte_unmap(r->work + at, n_bytes, s, n)) {
        return -1;
    }
    return di_vocab_find(&r->tok->vocab, r->work + at, *n_bytes);
}

/* A merge is "A B" or ["A", "B"]; its result is the entry spelled AB. */
static di_status read_merge(reader *r, raw_merge *m, int32_t likely) {
    cursor *c = &r->cur;
    const di_vocab *v = &r->tok->vocab;
    const char *s = NULL;
    size_t n = 0, n_left = 0, n_right = 0;
    size_t begin = c->at;
    di_status status = DI_OK;
    if (take(c, '[')) {
        if ((status = read_string(c, &s, &n)) || (status = reserve_work(r, n))) {
            return status;
        }
        m->left = merge_part(r, 0, s, n, &n_left);
        if (!take(c, ',')) {
            return fail_at(c, "','");
        }
        if ((status = read_string(c, &s, &n)) || (status = reserve_work(r, n_left + n))) {
            return status;
        }
        m->right = merge_part(r, n_left, s, n, &n_right);
        if (!take(c, ']')) {
            return fail_at(c, "']'");
        }
    } else {
        if ((status = read_string(c, &s, &n)) || (status = reserve_work(r, n))) {
            return status;
        }
        const char *space = memchr(s, ' ', n);
        if (!space) {
            return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: expected two spellings with a space between", begin);
        }
        m->left = merge_part(r, 0, s, (size_t)(space - s), &n_left);
        m->right = merge_part(r, n_left, space + 1, n - (size_t)(space - s) - 1, &n_right);
    }
    if (m->left < 0 || m->right < 0) {
        return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: the %s part of the merge is not in the vocabulary", begin,
                       m->left < 0 ? "first" : "second");
    }
    /* Results usually have rising ids, which saves most of the searches. */
    size_t n_bytes = n_left + n_right;
    if (likely < v->n_base && v->entries[likely].len == n_bytes && !(v->entries[likely].flags & DI_ENTRY_LITERAL) &&
        memcmp(v->blob + v->entries[likely].at, r->work, n_bytes) == 0) {
        m->result = likely;
    } else {
        m->result = di_vocab_find(v, r->work, n_bytes);
    }
    if (m->result < 0) {
        return di_fail(c->err, DI_ERR_FORMAT, "byte %zu: the result of the merge is not in the vocabulary", begin);
    }
    return DI_OK;
}

static di_status read_merges(reader *r) {
    cursor *c = &r->cur;
    if (!take(c, '[')) {
        return fail_at(c, "a list of merges");
    }
    int32_t likely = 0;
    bool is_empty = take(c, ']');
    while (!is_empty) {
        if (r->n_merges == r->merges_cap) {
            size_t grown = DI_MAX(2 * r->merges_cap, DI_MAX((size_t)r->tok->vocab.n_base, 1024));
            raw_merge *merges = realloc(r->merges, grown * sizeof *merges);
            if (!merges) {
                return di_fail(c->err, DI_ERR_MEMORY, "out of memory for %zu merges", grown);
            }
            r->merges = merges;
            r->merges_cap = grown;
        }
        raw_merge *m = &r->merges[r->n_merges];
        di_status status = di_error_context(c->err, read_merge(r, m, likely), "merge %zu", r->n_merges);
        if (status) {
            return status;
        }
        likely = m->result + 1;
        r->n_merges++;
        if (!take(c, ',')) {
            if (!take(c, ']')) {
                return fail_at(c, "',' or ']'");
            }
            break;
        }
    }
    di_status status = di_merges_reserve(&r->tok->merges, r->n_merges, c->err);
    if (status) {
        return status;
    }
    for (size_t i = 0; i < r->n_merges; i++) {
        di_merges_add(&r->tok->merges, r->merges[i].left, r->merges[i].right, (uint32_t)i, r->merges[i].result);
    }
    r->has_merges = true;
    return DI_OK;
}

static bool is_off(const di_json *v) {
    switch (di_json_kind(v)) {
    case DI_JSON_NULL:
        return true;
    case DI_JSON_BOOL:
        return !di_json_bool(v);
    case DI_JSON_INT:
    case DI_JSON_REAL:
        return di_json_number(v) == 0;
    case DI_JSON_STRING:
        return di_json_str(v, NULL)[0] == 0;
    default:
        return false;
    }
}

static di_status check_type(const di_json *v, const char *what, const char *want, di_error *err) {
    const char *type = di_json_is(v, DI_JSON_OBJECT) ? di_json_str(di_json_get(v, "type"), NULL) : NULL;
    if (!type || strcmp(type, want) != 0) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "'%s' is of type '%.60s', only '%s' is supported", what,
                       type ? type : di_json_kind_name(v), want);
    }
    return DI_OK;
}

static di_status read_model(reader *r) {
    static const char *const must_be_off[] = {
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"};
    cursor *c = &r->cur;
    if (!take(c, '{')) {
        return fail_at(c, "an object");
    }
    bool is_empty = take(c, '}');
    while (!is_empty) {
        char key[KEY_BYTES];
        di_status status = read_key(c, key);
        if (status) {
            return status;
        }
        bool is_vocab = strcmp(key, "vocab") == 0, is_merges = strcmp(key, "merges") == 0;
        if ((is_vocab && r->has_vocab) || (is_merges && (r->has_merges || r->merges_at))) {
            return di_fail(c->err, DI_ERR_FORMAT, "'%s' appears twice", key);
        }
        if (is_vocab) {
            status = di_error_context(c->err, read_vocab(r), "'vocab'");
        } else if (is_merges && r->has_vocab) {
            status = di_error_context(c->err, read_merges(r), "'merges'");
        } else if (is_merges) {
            skip_space(c);
            r->merges_at = c->at;
            status = skip_value(c);
        } else {
            di_json *v = NULL;
            status = read_small(c, &v);
            if (!status && strcmp(key, "type") == 0) {
                const char *type = di_json_str(v, NULL);
                r->has_type = type && strcmp(type, "BPE") == 0;
                if (!r->has_type) {
                    status = di_fail(c->err, DI_ERR_UNSUPPORTED, "'type' is '%.60s', only 'BPE' is supported",
                                     type ? type : di_json_kind_name(v));
                }
            }
            for (size_t i = 0; !status && i < DI_COUNT(must_be_off); i++) {
                if (strcmp(key, must_be_off[i]) == 0 && !is_off(v)) {
                    status = di_fail(c->err, DI_ERR_UNSUPPORTED, "'%s' is set, which is not supported", key);
                }
            }
            di_json_free(v);
        }
        if (status) {
            return status;
        }
        if (!take(c, ',')) {
            if (!take(c, '}')) {
                return fail_at(c, "',' or '}'");
            }
            break;
        }
    }
    if (!r->has_type || !r->has_vocab || !(r->has_merges || r->merges_at)) {
        return di_fail(c->err, DI_ERR_FORMAT, "'%s' is missing",
                       !r->has_type    ? "type"
                       : !r->has_vocab ? "vocab"
                                       : "merges");
    }
    if (!r->has_merges) {
        size_t end = c->at;
        c->at = r->merges_at;
        di_status status = di_error_context(c->err, read_merges(r), "'merges'");
        if (status) {
            return status;
        }
        c->at = end;
    }
    r->has_model = true;
    return DI_OK;
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

static di_status read_pre_tokenizer(di_tokenizer *tok, const di_json *v, di_error *err) {
    const char *patterns[DI_PRETOK_STEPS_MAX];
    size_t lens[DI_PRETOK_STEPS_MAX];
    di_status status = check_type(v, "pre_tokenizer", "Sequence", err);
    if (status) {
        return status;
    }
    const di_json *list = di_json_get(v, "pretokenizers");
    size_t n_steps = di_json_array_len(list);
    if (n_steps < 1 || n_steps - 1 > DI_PRETOK_STEPS_MAX) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "'pretokenizers' has %zu steps, 1 to %d are supported", n_steps,
                       DI_PRETOK_STEPS_MAX + 1);
    }
    for (size_t i = 0; i + 1 < n_steps; i++) {
        const di_json *step = di_json_at(list, i);
        if ((status = check_type(step, "pretokenizers", "Split", err))) {
            return di_error_context(err, status, "step %zu", i);
        }
        const char *behavior = di_json_str(di_json_get(step, "behavior"), NULL);
        patterns[i] = di_json_str(di_json_get(di_json_get(step, "pattern"), "Regex"), &lens[i]);
        if (!patterns[i] || !behavior || strcmp(behavior, "Isolated") != 0 || !is_off(di_json_get(step, "invert"))) {
            return di_fail(err, DI_ERR_UNSUPPORTED,
                           "step %zu: only a split by a 'Regex' with behavior 'Isolated', not inverted, is supported",
                           i);
        }
    }
    const di_json *last = di_json_at(list, n_steps - 1);
    if ((status = check_type(last, "pretokenizers", "ByteLevel", err))) {
        return di_error_context(err, status, "step %zu", n_steps - 1);
    }
    const di_json *prefix = di_json_get(last, "add_prefix_space"), *regex = di_json_get(last, "use_regex");
    if (!di_json_is(prefix, DI_JSON_BOOL) || di_json_bool(prefix) || !di_json_is(regex, DI_JSON_BOOL) ||
        di_json_bool(regex)) {
        return di_fail(err, DI_ERR_UNSUPPORTED,
                       "step %zu: 'add_prefix_space' and 'use_regex' must be false, other values are not supported",
                       n_steps - 1);
    }
    return di_pretok_create(&tok->pretok, patterns, lens, n_steps - 1, err);
}

static di_status check_normalizer(const di_json *v, di_error *err) {
    if (di_json_kind(v) == DI_JSON_NULL) {
        return DI_OK;
    }
    di_status status = check_type(v, "normalizer", "Sequence", err);
    if (!status && di_json_array_len(di_json_get(v, "normalizers")) > 0) {
        status = di_fail(err, DI_ERR_UNSUPPORTED, "the normalizer has steps, only an empty one is supported");
    }
    return status;
}

static int added_compare(const void *a, const void *b) {
    const di_added *x = a, *y = b;
    int order = memcmp(x->text, y->text, DI_MIN(x->len, y->len));
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

/* Checks one added token and puts its entry into place. Its text is in the blob already. */
static di_status place_added(di_tokenizer *tok, const di_json *v, di_added token, bool *seen, di_error *err) {
    static const char *const must_be_off[] = {"single_word", "lstrip", "rstrip"};
    di_vocab *vocab = &tok->vocab;
    for (size_t i = 0; i < DI_COUNT(must_be_off); i++) {
        if (!is_off(di_json_get(v, must_be_off[i]))) {
            return di_fail(err, DI_ERR_UNSUPPORTED, "'%s' is set, which is not supported", must_be_off[i]);
        }
    }
    const di_json *special = di_json_get(v, "special"), *normalized = di_json_get(v, "normalized");
    if (!di_json_is(special, DI_JSON_BOOL) || !di_json_is(normalized, DI_JSON_BOOL)) {
        return di_fail(err, DI_ERR_FORMAT, "'special' or 'normalized' is missing or not a boolean");
    }
    uint32_t offset = (uint32_t)(token.text - vocab->blob);
    di_entry *entry = &vocab->entries[token.id];
    if (seen[token.id]) {
        return di_fail(err, DI_ERR_FORMAT, "id %d appears twice", token.id);
    }
    seen[token.id] = true;
    if (token.id < vocab->n_base) {
        /* Such an entry is spelled outside the byte map, so that no merge gives it. */
        if (!(entry->flags & DI_ENTRY_LITERAL) || entry->len != token.len ||
            memcmp(vocab->blob + entry->at, token.text, token.len) != 0) {
            return di_fail(err, DI_ERR_FORMAT, "the vocabulary spells id %d otherwise", token.id);
        }
    } else {
        /* A spelling inside the byte map stands for the bytes that it maps to, as the reference decodes it; they follow
         * the text. */
        size_t n_bytes = 0;
        char *bytes = vocab->blob + offset + token.len;
        *entry = (di_entry){.at = offset, .len = (uint32_t)token.len, .flags = DI_ENTRY_LITERAL};
        if (di_byte_unmap(bytes, &n_bytes, token.text, token.len)) {
            *entry = (di_entry){.at = offset + (uint32_t)token.len, .len = (uint32_t)n_bytes};
        }
        if (di_utf8_valid(vocab->blob + entry->at, entry->len)) {
            entry->flags |= DI_ENTRY_UTF8;
        }
    }
    entry->flags |= DI_ENTRY_ADDED | (di_json_bool(special) ? DI_ENTRY_SPECIAL : 0u);
    di_added_set *set = &tok->added[di_json_bool(normalized)];
    set->tokens[set->n++] = token;
    set->starts[(unsigned char)token.text[0]] = true;
    bool was = false;
    di_status status = di_map_set(&vocab->by_text, token.text, token.len, token.id, &was, err);
    if (!status && was) {
        status = di_fail(err, DI_ERR_FORMAT, "'%.*s' appears twice", (int)DI_MIN(token.len, 100), token.text);
    }
    return status;
}

static di_status read_added(di_tokenizer *tok, size_t blob_used, const di_json *list, di_error *err) {
    di_vocab *v = &tok->vocab;
    size_t n = di_json_array_len(list), n_new = 0, n_bytes = 0;
    if (list && !di_json_is(list, DI_JSON_ARRAY)) {
        return di_fail(err, DI_ERR_FORMAT, "expected a list, found %s", di_json_kind_name(list));
    }
    for (size_t i = 0; i < n; i++) {
        const di_json *token = di_json_at(list, i), *id = di_json_get(token, "id");
        size_t len = 0;
        const char *text = di_json_str(di_json_get(token, "content"), &len);
        if (!text || len == 0 || !di_json_is(id, DI_JSON_INT) || di_json_int(id) < 0) {
            return di_fail(err, DI_ERR_FORMAT, "token %zu: 'content' or 'id' is missing, empty or out of range", i);
        }
        n_new += di_json_int(id) >= v->n_base;
        n_bytes += 2 * len;
    }
    v->blob_bytes = blob_used + n_bytes;
    if (v->blob_bytes > UINT32_MAX || n_new > (size_t)(INT32_MAX - v->n_base)) {
        return di_fail(err, DI_ERR_RANGE, "%zu tokens are too many", n);
    }
    v->n_entries = v->n_base + (int32_t)n_new;
    char *blob = realloc(v->blob, v->blob_bytes + 1);
    v->blob = blob ? blob : v->blob;
    di_entry *entries = realloc(v->entries, (size_t)v->n_entries * sizeof *entries);
    v->entries = entries ? entries : v->entries;
    bool *seen = calloc((size_t)v->n_entries, sizeof *seen);
    for (int g = 0; g < 2; g++) {
        tok->added[g].tokens = calloc(n + 1, sizeof *tok->added[g].tokens);
        tok->added[g].cap = n;
    }
    di_status status = DI_OK;
    if (!blob || !entries || !seen || !tok->added[0].tokens || !tok->added[1].tokens) {
        v->n_entries = v->n_base;
        status = di_fail(err, DI_ERR_MEMORY, "out of memory for %zu tokens", n);
        goto out;
    }
    memset(entries + v->n_base, 0, n_new * sizeof *entries);
    for (size_t i = 0; !status && i < n; i++) {
        const di_json *token = di_json_at(list, i);
        int64_t id = di_json_int(di_json_get(token, "id"));
        size_t len = 0;
        const char *text = di_json_str(di_json_get(token, "content"), &len);
        if (!text || id >= v->n_entries) { /* texts were checked above */
            status =
                di_fail(err, DI_ERR_FORMAT, "id %lld, but ids without gaps end at %d", (long long)id, v->n_entries - 1);
        } else {
            memcpy(v->blob + blob_used, text, len);
            di_added added = {.text = v->blob + blob_used, .len = len, .id = (int32_t)id};
            blob_used += 2 * len;
            status = place_added(tok, token, added, seen, err);
        }
        status = di_error_context(err, status, "token %zu", i);
    }
    for (int32_t id = 0; !status && id < v->n_base; id++) {
        const di_entry *e = &v->entries[id];
        bool was = false;
        if ((e->flags & (DI_ENTRY_LITERAL | DI_ENTRY_ADDED)) == DI_ENTRY_LITERAL) {
            status = di_map_set(&v->by_text, v->blob + e->at, e->len, id, &was, err);
            if (!status && was) {
                status = di_fail(err, DI_ERR_FORMAT, "id %d has the spelling of another entry", id);
            }
        }
    }
    for (int g = 0; !status && g < 2; g++) {
        qsort(tok->added[g].tokens, tok->added[g].n, sizeof *tok->added[g].tokens, added_compare);
    }
out:
    free(seen);
    return status;
}

/* One value at the top of the file other than the model. */
static di_status read_part(reader *r, const char *key, di_json *v) {
    di_error *err = r->cur.err;
    if (strcmp(key, "added_tokens") == 0) {
        di_json_free(r->added);
        r->added = di_json_ref(v);
    } else if (strcmp(key, "normalizer") == 0) {
        return check_normalizer(v, err);
    } else if (strcmp(key, "pre_tokenizer") == 0) {
        return r->tok->pretok ? di_fail(err, DI_ERR_FORMAT, "appears twice") : read_pre_tokenizer(r->tok, v, err);
    } else if (strcmp(key, "post_processor") == 0 && di_json_kind(v) != DI_JSON_NULL) {
        /* The byte-level post-processor moves offsets only; any other may add tokens. */
        return check_type(v, key, "ByteLevel", err);
    } else if (strcmp(key, "decoder") == 0) {
        return check_type(v, key, "ByteLevel", err);
    } else if ((strcmp(key, "truncation") == 0 || strcmp(key, "padding") == 0) && !is_off(v)) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "is set, which is not supported");
    }
    return DI_OK;
}

static di_status read_top(reader *r) {
    cursor *c = &r->cur;
    if (!take(c, '{')) {
        return fail_at(c, "an object");
    }
    bool is_empty = take(c, '}');
    while (!is_empty) {
        char key[KEY_BYTES];
        di_status status = read_key(c, key);
        if (status) {
            return status;
        }
        if (strcmp(key, "model") == 0) {
            status = r->has_model ? di_fail(c->err, DI_ERR_FORMAT, "appears twice") : read_model(r);
        } else {
            di_json *v = NULL;
            status = read_small(c, &v);
            if (!status) {
                status = read_part(r, key, v);
            }
            di_json_free(v);
        }
        if (status) {
            return di_error_context(c->err, status, "'%s'", key);
        }
        if (!take(c, ',')) {
            if (!take(c, '}')) {
                return fail_at(c, "',' or '}'");
            }
            break;
        }
    }
    skip_space(c);
    if (c->at < c->len) {
        return fail_at(c, "the end of the file");
    }
    if (!r->has_model || !r->tok->pretok) {
        return di_fail(c->err, DI_ERR_FORMAT, "'%s' is missing", r->has_model ? "pre_tokenizer" : "model");
    }
    return di_error_context(c->err, read_added(r->tok, r->blob_used, r->added, c->err), "'added_tokens'");
}

di_status di_tokenizer_read(di_tokenizer *tok, const char *text, size_t len, di_error *err) {
    if (len > FILE_BYTES_MAX) {
        return di_fail(err, DI_ERR_RANGE, "a tokenizer of %zu bytes, at most %d are supported", len, FILE_BYTES_MAX);
    }
    reader r = {.tok = tok, .cur = {.text = text, .len = len, .err = err}};
    di_status status = read_top(&r);
    di_strbuf_deinit(&r.cur.unescaped);
    di_json_free(r.added);
    free(r.merges);
    free(r.work);
    return status;
}
