/* Tokenizer: opening and closing, looking up entries, and encoding.
 *
 *   text -> repair to UTF-8 -> added tokens split out -> pre-tokenizer -> BPE per piece -> ids
 *
 * The parts are next door: tokenizer_read.c (the file), vocab.c (bytes to entry), pretokenize.c, bpe.c, detokenize.c
 * (ids to text) and engram_map.c. */
#include "tokenizer_internal.h"

#include "deepinfer/text.h"

void di_ids_deinit(di_ids *ids) {
    free(ids->data);
    *ids = (di_ids){0};
}

di_status di_ids_append(di_ids *ids, const int32_t *v, size_t n, di_error *err) {
    if (n == 0) {
        return DI_OK;
    }
    if (n > ids->cap - ids->len) {
        size_t cap = 0, bytes = 0;
        if (!di_size_add(&cap, ids->len, n) || !di_size_mul(&bytes, DI_MAX(cap, 2 * ids->cap), sizeof *ids->data)) {
            return di_fail(err, DI_ERR_RANGE, "too many token ids");
        }
        bytes = DI_MAX(bytes, 16 * sizeof *ids->data);
        int32_t *data = realloc(ids->data, bytes);
        if (!data) {
            return di_fail(err, DI_ERR_MEMORY, "out of memory for %zu token ids", cap);
        }
        ids->data = data;
        ids->cap = bytes / sizeof *ids->data;
    }
    memcpy(ids->data + ids->len, v, n * sizeof *v);
    ids->len += n;
    return DI_OK;
}

di_status di_tokenizer_parse(di_tokenizer **out, const char *text, size_t len, di_error *err) {
    di_tokenizer *tok = calloc(1, sizeof *tok);
    if (!tok) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a tokenizer");
    }
    di_status status = di_tokenizer_read(tok, text, len, err);
    if (!status) {
        tok->whole = calloc((size_t)tok->vocab.n_base, sizeof *tok->whole);
        if (!tok->whole) {
            status = di_fail(err, DI_ERR_MEMORY, "out of memory for a tokenizer");
        }
    }
    if (status) {
        di_tokenizer_close(tok);
        return status;
    }
    *out = tok;
    return DI_OK;
}

di_status di_tokenizer_open(di_tokenizer **out, const char *path, di_error *err) {
    di_mapping map = {0};
    di_status status = di_mapping_open(&map, path, err);
    if (!status) {
        status = di_error_context(err, di_tokenizer_parse(out, (const char *)map.data, map.n_bytes, err), "'%s'", path);
    }
    di_mapping_close(&map);
    return status;
}

void di_tokenizer_close(di_tokenizer *tok) {
    if (!tok) {
        return;
    }
    di_vocab_deinit(&tok->vocab);
    di_merges_deinit(&tok->merges);
    di_pretok_destroy(tok->pretok);
    free(tok->added[0].tokens);
    free(tok->added[1].tokens);
    free(tok->whole);
    free(tok);
}

int32_t di_tokenizer_size(const di_tokenizer *tok) {
    return tok->vocab.n_entries;
}

int32_t di_tokenizer_find(const di_tokenizer *tok, const char *spelling) {
    size_t n = strlen(spelling), n_bytes = 0;
    int64_t id = -1;
    if (n > 0 && di_map_get(&tok->vocab.by_text, spelling, n, &id)) {
        return (int32_t)id;
    }
    /* A byte-map character takes one byte or two in the spelling, so longer ones can't be entries. */
    char bytes[512], *work = bytes;
    if (n > 2 * tok->vocab.longest || (n > sizeof bytes && !(work = malloc(n)))) {
        return -1;
    }
    int32_t found = di_byte_unmap(work, &n_bytes, spelling, n) ? di_vocab_find(&tok->vocab, work, n_bytes) : -1;
    if (work != bytes) {
        free(work);
    }
    return found;
}

static bool has_flag(const di_tokenizer *tok, int32_t id, uint32_t flag) {
    return id >= 0 && id < tok->vocab.n_entries && (tok->vocab.entries[id].flags & flag);
}

bool di_tokenizer_is_special(const di_tokenizer *tok, int32_t id) {
    return has_flag(tok, id, DI_ENTRY_SPECIAL);
}

bool di_tokenizer_is_added(const di_tokenizer *tok, int32_t id) {
    return has_flag(tok, id, DI_ENTRY_ADDED);
}

/* ---- encoding ---------------------------------------------------------------------------------------------------- */

typedef struct encode_run {
    const di_tokenizer *tok;
    di_bpe_scratch scratch; /* owned */
    di_ids *out;
} encode_run;

static di_status encode_piece(void *ctx, const char *piece, size_t n, di_error *err) {
    encode_run *r = ctx;
    const di_tokenizer *tok = r->tok;
    int32_t id = di_vocab_find(&tok->vocab, piece, n);
    if (id < 0) {
        return di_bpe_encode(&tok->merges, tok->byte_ids, &r->scratch, piece, n, r->out, err);
    }
    uint8_t whole = atomic_load_explicit(&tok->whole[id], memory_order_relaxed);
    if (whole == DI_WHOLE_YES) {
        return di_ids_append(r->out, &id, 1, err);
    }
    size_t before = r->out->len;
    di_status status = di_bpe_encode(&tok->merges, tok->byte_ids, &r->scratch, piece, n, r->out, err);
    if (!status && whole == DI_WHOLE_UNKNOWN) {
        bool is_whole = r->out->len == before + 1 && r->out->data[before] == id;
        atomic_store_explicit(&tok->whole[id], is_whole ? DI_WHOLE_YES : DI_WHOLE_NO, memory_order_relaxed);
    }
    return status;
}

static di_status encode_plain(encode_run *r, const char *text, size_t len, di_error *err) {
    return di_pretok_run(r->tok->pretok, text, len, encode_piece, r, err);
}

/* Bound of the tokens in [lo, hi) whose byte at `depth` is below (or, with `after`, not above) `byte`. All of them
 * share the first `depth` bytes and a token that ends there sorts first. */
static size_t narrow(const di_added *tokens, size_t lo, size_t hi, size_t depth, unsigned char byte, bool after) {
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int at = tokens[mid].len > depth ? (unsigned char)tokens[mid].text[depth] : -1;
        if (at < (int)byte || (after && at == (int)byte)) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The longest token of the set that s starts with, or NULL. */
static const di_added *longest_added(const di_added_set *set, const char *s, size_t n) {
    const di_added *found = NULL;
    size_t lo = 0, hi = set->n;
    for (size_t depth = 0; depth < n && lo < hi; depth++) {
        unsigned char byte = (unsigned char)s[depth];
        lo = narrow(set->tokens, lo, hi, depth, byte, false);
        hi = narrow(set->tokens, lo, hi, depth, byte, true);
        if (lo < hi && set->tokens[lo].len == depth + 1) {
            found = &set->tokens[lo];
        }
    }
    return found;
}

/* Splits out the tokens of one set, then of the next one inside what remains. */
static di_status encode_added(encode_run *r, int group, const char *text, size_t len, di_error *err) {
    if (group == 2) {
        return encode_plain(r, text, len, err);
    }
    const di_added_set *set = &r->tok->added[group];
    size_t done = 0, at = 0;
    di_status status = DI_OK;
    while (at < len && set->n > 0) {
        const di_added *token = set->starts[(unsigned char)text[at]] ? longest_added(set, text + at, len - at) : NULL;
        if (!token) {
            at++; /* spellings begin with a lead byte, so none is found inside a character */
            continue;
        }
        if (at > done && (status = encode_added(r, group + 1, text + done, at - done, err))) {
            return status;
        }
        if ((status = di_ids_append(r->out, &token->id, 1, err))) {
            return status;
        }
        done = at += token->len;
    }
    return done < len ? encode_added(r, group + 1, text + done, len - done, err) : DI_OK;
}

di_status di_tokenizer_encode(const di_tokenizer *tok, const char *text, size_t len, bool plain, di_ids *out,
                              di_error *err) {
    if (len > INT32_MAX / 4) {
        return di_fail(err, DI_ERR_RANGE, "a text of %zu bytes, at most %d can be encoded at once", len, INT32_MAX / 4);
    }
    encode_run r = {.tok = tok, .out = out};
    di_strbuf repaired = {0};
    size_t before = out->len;
    di_status status = DI_OK;
    if (!di_utf8_valid(text, len)) {
        di_utf8_repair(&repaired, text, len);
        status = di_strbuf_status(&repaired, err);
        text = di_strbuf_str(&repaired);
        len = repaired.len;
    }
    if (!status) {
        status = plain ? encode_plain(&r, text, len, err) : encode_added(&r, 0, text, len, err);
    }
    if (status) {
        out->len = before;
    }
    di_bpe_scratch_deinit(&r.scratch);
    di_strbuf_deinit(&repaired);
    return status;
}
