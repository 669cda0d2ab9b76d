/* Vocabularies in a form for masks: the bytes of the tokens as tries, whole and by slice (grammar_internal.h).
 *
 * All is made when a vocabulary is created, so that masks only read it. Tokens are sorted by their bytes once for each
 * trie; a node is made where a token leaves the path of the one before it, which gives the order depth first.
 *
 * Added tokens are kept apart: their spelling is no text that a grammar describes, unless it names them. Tokens without
 * bytes are in no trie and may never come, since an output of them would have no end. */
#include "grammar_internal.h"

#include "deepinfer/grammar.h"

enum {
    LARGE_NODES = 64,   /* below a node, beyond which its children are recorded, */
    RECORDED_DEPTH = 16 /* if they are not deeper than that */
};

/* ---- slices ---- */

static bool is_in(uint32_t code, char first, char last) {
    return code >= (uint32_t)first && code <= (uint32_t)last;
}

bool di_slice_has(di_slice_kind kind, uint32_t code) {
    bool is_lower = is_in(code, 'a', 'z'), is_upper = is_in(code, 'A', 'Z'), is_digit = is_in(code, '0', '9');
    switch (kind) {
    case DI_SLICE_TEXT:
        return code != '<';
    case DI_SLICE_STRING:
        return code >= 0x20 && code != '"' && code != '\\';
    case DI_SLICE_ASCII:
        return is_in(code, ' ', '~') && code != '"' && code != '\\';
    case DI_SLICE_NAME:
        return is_lower || is_upper || is_digit || code == '_' || code == '-';
    case DI_SLICE_WORD:
        return is_lower || is_upper || is_digit || code == '_';
    case DI_SLICE_ALNUM:
        return is_lower || is_upper || is_digit;
    case DI_SLICE_LETTER:
        return is_lower || is_upper;
    case DI_SLICE_LOWNUM:
        return is_lower || is_digit;
    case DI_SLICE_LOWER:
        return is_lower;
    case DI_SLICE_UPPER:
        return is_upper;
    case DI_SLICE_HEX:
        return is_digit || is_in(code, 'a', 'f') || is_in(code, 'A', 'F');
    case DI_SLICE_LOWHEX:
        return is_digit || is_in(code, 'a', 'f');
    case DI_SLICE_DIGIT:
        return is_digit;
    default:
        return false;
    }
}

/* A slice in a form for going through all tokens. */
typedef struct slice_set {
    di_slice_kind kind;
    bool is_wide, has[0x80]; /* ASCII characters */
} slice_set;

static slice_set make_set(di_slice_kind kind) {
    slice_set set = {.kind = kind, .is_wide = di_slice_is_wide(kind)};
    for (uint32_t code = 0; code < 0x80; code++)
        set.has[code] = di_slice_has(kind, code);
    return set;
}

/* Length of the characters of the slice that s begins with, at most `limit` of them; *n is their number. */
static uint32_t slice_prefix(const slice_set *set, const char *s, uint32_t len, uint32_t limit, uint32_t *n) {
    uint32_t at = 0;
    for (*n = 0; *n < limit && at < len; (*n)++) {
        uint8_t byte = (uint8_t)s[at];
        size_t size = byte < 0x80 ? set->has[byte] : set->is_wide ? di_utf8_decode(s + at, len - at, NULL, NULL) : 0;
        if (size == 0)
            break;
        at += (uint32_t)size;
    }
    return at;
}

/* ---- tries ---- */

/* What a trie is made of: bytes (borrowed) at which a token ends, in a group. */
typedef struct trie_item {
    const char *bytes;
    uint32_t len;
    int32_t token, group;
} trie_item;

static int compare_items(const void *a, const void *b) {
    const trie_item *x = a, *y = b;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    int order = memcmp(x->bytes, y->bytes, DI_MIN(x->len, y->len));
    if (order != 0)
        return order;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

/* Bytes that two items have in common from their beginning. */
static uint32_t common_length(const trie_item *a, const trie_item *b) {
    uint32_t n = 0, most = a->group == b->group ? DI_MIN(a->len, b->len) : 0;
    while (n < most && a->bytes[n] == b->bytes[n])
        n++;
    return n;
}

static void trie_deinit(di_trie *t) {
    free(t->nodes);
    free(t->tokens);
    free(t->first);
    *t = (di_trie){0};
}

/* Makes a trie of items [n], which it sorts. path: room for the longest item. */
static di_status trie_build(di_trie *t, trie_item *items, size_t n, int32_t n_groups, uint32_t *path, di_error *err) {
    size_t n_nodes = 0;
    qsort(items, n, sizeof *items, compare_items);
    for (size_t i = 0; i < n; i++)
        n_nodes += items[i].len - (i ? common_length(&items[i - 1], &items[i]) : 0);
    if (n_nodes >= UINT32_MAX)
        return di_fail(err, DI_ERR_RANGE, "the vocabulary has more than 2^32 different beginnings of tokens");
    t->nodes = calloc(n_nodes + 1, sizeof *t->nodes);
    t->tokens = calloc(n + 1, sizeof *t->tokens);
    t->first = calloc((size_t)n_groups + 1, sizeof *t->first);
    if (!t->nodes || !t->tokens || !t->first)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary of %zu tokens", n);
    uint32_t at = 0, depth = 0; /* path[0 .. depth - 1]: the open nodes */
    int32_t group = 0;
    for (size_t i = 0; i < n; i++) {
        const trie_item *item = &items[i];
        uint32_t common = i ? common_length(&items[i - 1], item) : 0;
        while (depth > common)
            t->nodes[path[--depth]].end = at;
        while (group < item->group)
            t->first[++group] = at;
        for (; depth < item->len; depth++, at++) {
            t->nodes[at] =
                (di_trie_node){.tokens = (uint32_t)i, .depth = (uint16_t)depth, .byte = (uint8_t)item->bytes[depth]};
            path[depth] = at;
        }
        t->tokens[i] = item->token;
    }
    while (depth > 0)
        t->nodes[path[--depth]].end = at;
    while (group < n_groups)
        t->first[++group] = at;
    t->nodes[at].tokens = (uint32_t)n;
    t->n_nodes = at;
    t->n_tokens = (uint32_t)n;
    t->n_groups = n_groups;
    return DI_OK;
}

/* ---- making ---- */

/* Room that all tries of a vocabulary are made in. */
typedef struct scratch {
    trie_item *items; /* owned [n_vocab + 1] */
    uint32_t *path;   /* owned [length_max + 1] */
} scratch;

static const char *token_bytes(const di_grammar_vocab *v, int32_t token, uint32_t *len) {
    *len = v->starts[token + 1] - v->starts[token];
    return v->bytes + v->starts[token];
}

static bool is_plain(const di_grammar_vocab *v, int32_t token) {
    return v->starts[token + 1] > v->starts[token] && !di_mask_has(v->is_added, token) && token != v->eos_id;
}

static di_status copy_tokens(di_grammar_vocab *v, const di_vocab_token *tokens, int32_t n, di_error *err) {
    size_t n_bytes = 0;
    for (int32_t t = 0; t < n; t++) {
        if (tokens[t].len > UINT16_MAX || !di_size_add(&n_bytes, n_bytes, tokens[t].len) || n_bytes > UINT32_MAX)
            return di_fail(err, DI_ERR_RANGE, "token %d has %zu bytes, expected at most 65535, and 2^32 of all", t,
                           tokens[t].len);
        v->length_max = DI_MAX(v->length_max, (uint32_t)tokens[t].len);
    }
    v->starts = calloc((size_t)v->n_vocab + 1, sizeof *v->starts);
    v->bytes = malloc(n_bytes + 1);
    v->is_added = calloc(v->n_words + 1, sizeof *v->is_added);
    if (!v->starts || !v->bytes || !v->is_added)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary of %d tokens", n);
    uint32_t at = 0;
    for (int32_t t = 0; t < v->n_vocab; t++) {
        v->starts[t] = at;
        if (t >= n)
            continue;
        if (tokens[t].len > 0)
            memcpy(v->bytes + at, tokens[t].bytes, tokens[t].len);
        at += (uint32_t)tokens[t].len;
        if (tokens[t].is_added)
            di_mask_set(v->is_added, t);
    }
    v->starts[v->n_vocab] = at;
    return DI_OK;
}

/* Records of the nodes from .. end - 1 that are not below each other. Gives how many; -1 without memory. */
static int32_t record_nodes(di_grammar_vocab *v, int32_t *n, int32_t *cap, uint32_t from, uint32_t end) {
    int32_t n_before = *n;
    for (uint32_t i = from; i < end; i = v->trie.nodes[i].end) {
        if (*n == *cap) {
            int32_t grown_cap = DI_MAX(2 * *cap, 256);
            di_trie_root *grown = realloc(v->roots, (size_t)grown_cap * sizeof *grown);
            if (!grown)
                return -1;
            v->roots = grown;
            *cap = grown_cap;
        }
        v->roots[(*n)++] = (di_trie_root){.first = i, .end = v->trie.nodes[i].end, .byte = v->trie.nodes[i].byte};
    }
    return *n - n_before;
}

/* The first nodes of the vocabulary's trie, then level by level the children of large ones. */
static di_status make_roots(di_grammar_vocab *v, di_error *err) {
    int32_t n = 0, cap = 0;
    v->n_roots = record_nodes(v, &n, &cap, 0, v->trie.n_nodes);
    bool is_fine = v->n_roots >= 0;
    for (int32_t i = 0; i < n && is_fine; i++) {
        di_trie_root root = v->roots[i];
        if (root.end - root.first <= LARGE_NODES || v->trie.nodes[root.first].depth + 1 >= RECORDED_DEPTH)
            continue;
        int32_t kids = n, n_kids = record_nodes(v, &n, &cap, root.first + 1, root.end);
        is_fine = n_kids >= 0;
        v->roots[i].kids = kids;
        v->roots[i].n_kids = n_kids;
    }
    if (!is_fine)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary");
    return DI_OK;
}

static di_status make_trie(di_grammar_vocab *v, scratch *s, di_error *err) {
    size_t n = 0;
    for (int32_t t = 0; t < v->n_vocab; t++) {
        if (is_plain(v, t)) {
            trie_item *item = &s->items[n++];
            item->bytes = token_bytes(v, t, &item->len);
            item->token = t;
            item->group = 0;
        }
    }
    di_status st = trie_build(&v->trie, s->items, n, 1, s->path, err);
    if (st)
        return st;
    return make_roots(v, err);
}

/* Marks boundaries, and finds what occurs below each node; a node's own bits are its byte and whether a broken token
 * ends there. */
static di_status make_below(di_grammar_vocab *v, di_error *err) {
    const di_trie *t = &v->trie;
    v->below = calloc((size_t)t->n_nodes + 1, sizeof *v->below);
    if (!v->below)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary");
    for (uint32_t i = t->n_nodes; i-- > 0;) { /* what is below a node comes behind it */
        t->nodes[i].is_boundary = true;
        for (uint32_t k = i + 1; k < t->nodes[i].end; k = t->nodes[k].end) {
            t->nodes[i].is_boundary = t->nodes[i].is_boundary && (t->nodes[k].byte & 0xC0) != 0x80;
            v->below[i] |= v->below[k] | di_byte_bit(t->nodes[k].byte);
            uint32_t len;
            if (t->nodes[k].tokens < t->nodes[k + 1].tokens) {
                const char *bytes = token_bytes(v, t->tokens[t->nodes[k].tokens], &len);
                v->below[i] |= di_utf8_valid(bytes, len) ? 0 : DI_ODD_BIT;
            }
        }
    }
    return DI_OK;
}

/* Items of one token; is_merged: of the trie of all rests. */
static size_t slice_item(const di_grammar_vocab *v, const slice_set *set, int32_t token, bool is_merged,
                         trie_item *item) {
    uint32_t n, len;
    const char *bytes = token_bytes(v, token, &len);
    uint32_t at = slice_prefix(set, bytes, len, is_merged ? len : DI_SLICE_CHARS, &n);
    if (at == len || (n == 0 && !set->is_wide))
        return 0;
    *item = (trie_item){bytes + at, len - at, token, is_merged ? 0 : (int32_t)n};
    return 1;
}

/* The byte from which on a token is whole characters of the slice. */
static uint16_t clean_from(const slice_set *set, const char *s, uint32_t len) {
    uint32_t from = 0, n;
    for (uint32_t at = 0; at < len;) {
        uint32_t size = slice_prefix(set, s + at, len - at, 1, &n);
        at += DI_MAX(size, 1);
        if (size == 0)
            from = at;
    }
    return (uint16_t)from;
}

static di_status make_clean(di_grammar_vocab *v, di_slice_kind kind, di_error *err) {
    const slice_set set = make_set(kind);
    uint16_t *clean = calloc((size_t)v->trie.n_tokens + 1, sizeof *clean);
    if (!clean)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary");
    for (uint32_t i = 0; i < v->trie.n_tokens; i++) {
        uint32_t len;
        const char *bytes = token_bytes(v, v->trie.tokens[i], &len);
        clean[i] = clean_from(&set, bytes, len);
    }
    v->slices[kind].clean_from = clean;
    return DI_OK;
}

static di_status make_slice(di_grammar_vocab *v, di_slice_kind kind, scratch *s, di_error *err) {
    const slice_set set = make_set(kind);
    di_slice *slice = &v->slices[kind];
    slice->whole = calloc(((size_t)DI_SLICE_CHARS + 1) * v->n_words + 1, sizeof *slice->whole);
    if (!slice->whole)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary");
    for (int32_t i = 0; i < v->n_roots; i++)
        if (v->roots[i].byte < 0x80 && di_slice_has(kind, v->roots[i].byte))
            slice->root_nodes += v->roots[i].end - v->roots[i].first;
    size_t n_items = 0;
    for (int32_t t = 0; t < v->n_vocab; t++) {
        uint32_t len, n;
        if (!is_plain(v, t))
            continue;
        const char *bytes = token_bytes(v, t, &len);
        if (slice_prefix(&set, bytes, len, len, &n) == len)
            di_mask_set(slice->whole + (size_t)DI_MIN(n - 1, DI_SLICE_CHARS) * v->n_words, t);
        n_items += slice_item(v, &set, t, false, &s->items[n_items]);
    }
    for (size_t k = v->n_words; k < ((size_t)DI_SLICE_CHARS + 1) * v->n_words; k++)
        slice->whole[k] |= slice->whole[k - v->n_words];
    for (size_t k = 0; k < ((size_t)DI_SLICE_CHARS + 1) * v->n_words; k++)
        slice->n_whole[k / v->n_words] += __builtin_popcount(slice->whole[k]);
    di_status st = trie_build(&slice->by_count, s->items, n_items, DI_SLICE_CHARS + 1, s->path, err);
    n_items = 0;
    for (int32_t t = 0; !st && t < v->n_vocab; t++)
        n_items += is_plain(v, t) ? slice_item(v, &set, t, true, &s->items[n_items]) : 0;
    return st ? st : trie_build(&slice->merged, s->items, n_items, 1, s->path, err);
}

di_status di_grammar_vocab_make(di_grammar_vocab **out, const di_vocab_token *tokens, int32_t n, int32_t n_vocab,
                                int32_t eos_id, di_error *err) {
    if (n < 0 || n_vocab < n || eos_id < 0 || eos_id >= n_vocab)
        return di_fail(err, DI_ERR_ARG, "a vocabulary of %d tokens with end mark %d in %d columns", n, eos_id, n_vocab);
    di_grammar_vocab *v = calloc(1, sizeof *v);
    if (!v)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary");
    v->key = di_random_u64();
    v->n_vocab = n_vocab;
    v->eos_id = eos_id;
    v->n_words = ((size_t)n_vocab + 31) / 32;
    scratch s = {0};
    di_status st = copy_tokens(v, tokens, n, err);
    if (!st) {
        s.items = calloc((size_t)n_vocab + 1, sizeof *s.items);
        s.path = calloc((size_t)v->length_max + 1, sizeof *s.path);
        if (!s.items || !s.path)
            st = di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary of %d tokens", n);
    }
    if (!st)
        st = make_trie(v, &s, err);
    if (!st)
        st = make_below(v, err);
    for (int k = 0; k < DI_SLICE_COUNT && !st; k++) {
        st = make_slice(v, (di_slice_kind)k, &s, err);
        if (!st && di_slice_is_wide((di_slice_kind)k))
            st = make_clean(v, (di_slice_kind)k, err);
    }
    free(s.items);
    free(s.path);
    if (st) {
        di_grammar_vocab_destroy(v);
        return st;
    }
    *out = v;
    return DI_OK;
}

di_status di_grammar_vocab_create(di_grammar_vocab **out, const di_tokenizer *tok, int32_t n_vocab, int32_t eos_id,
                                  di_error *err) {
    int32_t n = di_tokenizer_size(tok);
    di_vocab_token *tokens = calloc((size_t)n + 1, sizeof *tokens);
    if (!tokens)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a vocabulary of %d tokens", n);
    for (int32_t t = 0; t < n; t++) {
        tokens[t].bytes = di_tokenizer_bytes(tok, t, &tokens[t].len);
        tokens[t].is_added = di_tokenizer_is_added(tok, t);
    }
    di_status st = di_grammar_vocab_make(out, tokens, n, n_vocab, eos_id, err);
    free(tokens);
    return st;
}

void di_grammar_vocab_destroy(di_grammar_vocab *v) {
    if (!v)
        return;
    for (int k = 0; k < DI_SLICE_COUNT; k++) {
        trie_deinit(&v->slices[k].by_count);
        trie_deinit(&v->slices[k].merged);
        free(v->slices[k].whole);
        free(v->slices[k].clean_from);
    }
    trie_deinit(&v->trie);
    free(v->roots);
    free(v->below);
    free(v->starts);
    free(v->bytes);
    free(v->is_added);
    free(v);
}
