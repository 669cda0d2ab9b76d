/* Invariants of token masks and matchers, for random grammars and random small vocabularies (pieces of several
 * characters, parts of characters, duplicates, tokens without bytes, added tokens):
 *   a mask has exactly the tokens whose bytes the automaton takes, one by one, at every place of a random walk;
 *   a walk along masks that ends is a text of the grammar, and so is taken in any other tokenization;
 *   taking tokens back is never having come; forgetting all that was learnt changes nothing. */
#include "engine/grammar/grammar_internal.h"
#include "engine/grammar/pda_internal.h"
#include "harness.h"

/* ---- random grammars ---- */

enum { RULES = 3, DEPTH = 4 };

typedef struct maker {
    di_gram gram;
    uint64_t *rng;
    int32_t rules[RULES];
} maker;

static const char *const words[] = {"a",  "ab", "\"", "\\n", "<",  "</a>", "{",  "1",       "true", "é",
                                    "日", "😀",  " ",  ", ",  "ba", "aaa",  "\n", "name\":", "_Z9",  "zz"};

static const di_node *random_class(maker *m) {
    static const di_code_range json[] = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}, less[] = {{'<', '<'}},
                               lower[] = {{'a', 'z'}}, word[] = {{'a', 'z'}, {'A', 'Z'}, {'0', '9'}, {'_', '_'}},
                               ascii[] = {{' ', '!'}, {'#', '['}, {']', '~'}}, odd[] = {{'b', 'y'}, {0xE8, 0x3042}};
    switch (di_test_random(m->rng) % 7) {
    case 0:
        return di_node_class(&m->gram, less, 1, true);
    case 1:
        return di_node_class(&m->gram, lower, 1, false);
    case 2:
        return di_node_class(&m->gram, word, 4, false);
    case 3:
        return di_node_class(&m->gram, ascii, 3, false);
    case 4:
        return di_node_class(&m->gram, odd, 2, false);
    default:
        return di_node_class(&m->gram, json, 3, true);
    }
}

static const di_node *random_word(maker *m) {
    const char *w = words[di_test_random(m->rng) % DI_COUNT(words)];
    return di_node_bytes(&m->gram, w, strlen(w));
}

static const di_node *random_special(maker *m) {
    static const char *const spellings[] = {"<s>", "</t>", "<none>"};
    const char *s = spellings[di_test_random(m->rng) % DI_COUNT(spellings)];
    return di_node_special(&m->gram, s, strlen(s));
}

static const di_node *random_node(maker *m, int depth) {
    const di_node *parts[3];
    size_t n = 2 + di_test_random(m->rng) % 2;
    int kind = (int)(di_test_random(m->rng) % (depth > 0 ? 12 : 4));
    int32_t min = (int32_t)(di_test_random(m->rng) % 3), max;
    switch (kind) {
    case 0:
    case 1:
        return random_word(m);
    case 2:
    case 3:
        return random_class(m);
    case 4:
    case 5:
    case 6:
        for (size_t i = 0; i < n; i++)
            parts[i] = random_node(m, depth - 1);
        return kind == 6 ? di_node_alt(&m->gram, parts, n) : di_node_seq(&m->gram, parts, n);
    case 7:
    case 8:
        max = di_test_random(m->rng) % 2 ? -1 : min + (int32_t)(di_test_random(m->rng) % 30);
        return di_node_repeat(&m->gram, di_test_random(m->rng) % 2 ? random_class(m) : random_node(m, depth - 1), min,
                              max);
    case 9:
        return di_node_rule(&m->gram, m->rules[di_test_random(m->rng) % RULES]);
    case 10:
        return random_special(m);
    default:
        parts[0] = di_test_random(m->rng) % 2 ? random_special(m) : di_node_bytes(&m->gram, "<a", 2);
        return di_test_random(m->rng) % 2 ? di_node_until(&m->gram, parts, 1) : di_node_free(&m->gram, parts, 1);
    }
}

/* NULL for a grammar that has no text or is too large, which random ones may be. */
static di_grammar *random_grammar(uint64_t *rng) {
    maker m = {.rng = rng};
    di_grammar *g = NULL;
    di_error err;
    di_gram_init(&m.gram, NULL);
    for (int i = 0; i < RULES; i++)
        m.rules[i] = di_gram_rule_add(&m.gram, "r", 1);
    for (int i = 0; i < RULES; i++)
        di_gram_rule_define(&m.gram, m.rules[i], random_node(&m, DEPTH));
    m.gram.root = m.rules[0];
    di_status st = di_gram_status(&m.gram, &err);
    if (!st)
        st = di_grammar_make(&g, &m.gram, &err);
    if (st)
        assert_true(st == DI_ERR_REQUEST || st == DI_ERR_RANGE);
    di_gram_deinit(&m.gram);
    return g;
}

/* ---- random vocabularies ---- */

enum { TOKENS_MAX = 600, TOKEN_BYTES_MAX = 80 };

typedef struct token_list {
    di_vocab_token tokens[TOKENS_MAX];
    char bytes[TOKENS_MAX][TOKEN_BYTES_MAX];
    int32_t n, n_vocab, eos;
    bool has_all_bytes;
} token_list;

static void add_token(token_list *t, const char *bytes, size_t len, bool is_added) {
    memcpy(t->bytes[t->n], bytes, len);
    t->tokens[t->n] = (di_vocab_token){t->bytes[t->n], len, is_added};
    t->n++;
}

static void random_tokens(token_list *t, uint64_t *rng) {
    static const char *const added[] = {"<s>", "</t>", "<eos>", "a", "<s>"};
    t->n = 0;
    t->has_all_bytes = di_test_random(rng) % 8 != 0;
    for (int byte = 0; byte < 256; byte++) {
        char c = (char)byte;
        if (t->has_all_bytes || di_test_random(rng) % 2)
            add_token(t, &c, 1, false);
    }
    int n = (int)di_test_random_range(rng, 0, 300);
    for (int i = 0; i < n; i++) {
        char text[TOKEN_BYTES_MAX];
        size_t len = 0;
        int n_parts = (int)di_test_random_range(rng, 0, 4);
        for (int k = 0; k < n_parts; k++) {
            const char *w = words[di_test_random(rng) % DI_COUNT(words)];
            int run = di_test_random(rng) % 12 ? 1 : (int)di_test_random_range(rng, 2, 20);
            for (; run > 0 && len + strlen(w) < sizeof text; run--) {
                memcpy(text + len, w, strlen(w));
                len += strlen(w);
            }
        }
        /* Cut, so that tokens begin and end inside of characters. */
        size_t from = di_test_random(rng) % 4 ? 0 : di_test_random(rng) % (len + 1);
        size_t to = di_test_random(rng) % 4 ? len : from + di_test_random(rng) % (len - from + 1);
        add_token(t, text + from, to - from, false);
    }
    for (size_t i = 0; i < DI_COUNT(added); i++) {
        if (i == 2)
            t->eos = t->n;
        add_token(t, added[i], strlen(added[i]), true);
    }
    t->n_vocab = t->n + (int32_t)(di_test_random(rng) % 40);
}

static di_grammar_vocab *make_vocab(const token_list *t) {
    di_grammar_vocab *v = NULL;
    di_error err;
    di_test_ok(di_grammar_vocab_make(&v, t->tokens, t->n, t->n_vocab, t->eos, &err), &err);
    return v;
}

/* ---- the rig ---- */

typedef struct rig {
    di_grammar *g;
    di_grammar_vocab *v;
    token_list t;
} rig;

static bool rig_init(rig *r, uint64_t *rng) {
    r->g = random_grammar(rng);
    if (!r->g)
        return false;
    random_tokens(&r->t, rng);
    r->v = make_vocab(&r->t);
    return true;
}

static void rig_deinit(rig *r) {
    di_grammar_release(r->g);
    di_grammar_vocab_destroy(r->v);
}

static di_matcher *make_matcher(const rig *r) {
    di_matcher *m = NULL;
    di_error err;
    di_test_ok(di_matcher_create(&m, r->g, r->v, &err), &err);
    return m;
}

static void flush(const rig *r) {
    pthread_mutex_lock(&r->g->lock);
    di_grammar_flush(r->g);
    pthread_mutex_unlock(&r->g->lock);
}

/* Where a token leads by the definition, without tries or slices. */
static di_pda_config follow(const rig *r, di_pda_config c, int32_t token) {
    di_pda *p = &r->g->pda;
    const di_vocab_token *t = &r->t.tokens[token];
    if (t->is_added) {
        for (int32_t i = 0; i < di_pda_n_specials(p); i++) {
            size_t len;
            const char *spelling = di_pda_special(p, i, &len);
            /* Of added tokens with one spelling the first is the grammar's. */
            int32_t first = 0;
            while (!r->t.tokens[first].is_added || r->t.tokens[first].len != len ||
                   memcmp(r->t.tokens[first].bytes, spelling, len) != 0)
                if (++first == r->t.n)
                    break;
            if (first == token)
                return di_pda_step_special(p, c, i);
        }
        return DI_PDA_DEAD;
    }
    if (t->len == 0)
        return DI_PDA_DEAD;
    for (size_t i = 0; i < t->len && c >= 0; i++)
        c = di_pda_step(p, c, (uint8_t)t->bytes[i]);
    return c;
}

static di_pda_config follow_all(const rig *r, const int32_t *tokens, size_t n) {
    di_pda_config c = di_pda_start(&r->g->pda);
    for (size_t i = 0; i < n; i++)
        c = follow(r, c, tokens[i]);
    assert_true(c >= 0);
    return c;
}

enum { STEPS = 60, WORDS = (TOKENS_MAX + 64) / 32 };

/* The mask of a matcher, and one of its tokens; -1: none. */
static int32_t draw(di_matcher *m, const rig *r, uint32_t *mask, int32_t *only, uint64_t *rng) {
    di_error err;
    di_status st = di_matcher_mask(m, mask, only, &err);
    if (st == DI_ERR_REQUEST && !r->t.has_all_bytes) /* such a vocabulary may be at its end */
        return -1;
    di_test_ok(st, &err);
    int32_t allowed[TOKENS_MAX + 64], n = 0;
    for (int32_t t = 0; t < r->t.n_vocab; t++)
        if (di_mask_has(mask, t))
            allowed[n++] = t;
    assert_true(n > 0);
    if (di_mask_has(mask, r->t.eos) && di_test_random(rng) % 3 == 0)
        return r->t.eos;
    return allowed[di_test_random(rng) % (uint64_t)n];
}

static void accept(di_matcher *m, int32_t token, bool expected) {
    bool is_allowed = !expected;
    di_error err;
    int64_t before = di_matcher_count(m);
    di_test_ok(di_matcher_accept(m, token, &is_allowed, &err), &err);
    assert_int_equal(is_allowed, expected);
    assert_int_equal(di_matcher_count(m), before + expected);
}

/* ---- properties ---- */

DI_PROPERTY(masks_are_what_the_automaton_takes, 400) {
    uint64_t rng = seed;
    static rig r;
    uint32_t mask[WORDS];
    int32_t way[STEPS], only;
    if (!rig_init(&r, &rng))
        return;
    di_matcher *m = make_matcher(&r);
    for (size_t n = 0; n < STEPS; n++) {
        if (di_test_random(&rng) % 16 == 0)
            flush(&r);
        memset(mask, 0xFF, sizeof mask);
        bool was_open = di_matcher_is_open(m);
        int32_t token = draw(m, &r, mask, &only, &rng);
        if (token < 0)
            break;
        di_pda_config c = follow_all(&r, way, n);
        int32_t n_set = 0, last = -1;
        for (int32_t t = 0; t < r.t.n_vocab; t++) {
            bool expected = t == r.t.eos ? di_pda_accepts(&r.g->pda, c) : t < r.t.n && follow(&r, c, t) >= 0;
            if (di_mask_has(mask, t) != expected)
                fail_msg("token %d behind %zu tokens: %d, expected %d", t, n, !expected, expected);
            n_set += expected;
            last = expected ? t : last;
        }
        assert_int_equal(only, n_set == 1 ? last : -1);
        assert_true(!was_open || n_set > 1);
        assert_int_equal(di_matcher_is_open(m), n_set > 1); /* its mask is there now */
        assert_int_equal(di_matcher_is_complete(m), di_mask_has(mask, r.t.eos));
        int32_t any = (int32_t)(di_test_random(&rng) % (uint64_t)r.t.n_vocab);
        if (!di_mask_has(mask, any))
            accept(m, any, false);
        accept(m, token, true);
        way[n] = token;
        if (token == r.t.eos) {
            assert_true(di_matcher_is_complete(m));
            di_error err;
            di_test_ok(di_matcher_mask(m, mask, &only, &err), &err);
            for (size_t i = 0; i < r.v->n_words; i++)
                assert_int_equal(mask[i], 0);
            assert_int_equal(only, -1);
            accept(m, any, false);
            break;
        }
    }
    di_matcher_destroy(m);
    rig_deinit(&r);
}

static bool is_text(const rig *r, const di_strbuf *text) {
    bool accepts;
    di_error err;
    di_test_ok(di_grammar_accepts(r->g, di_strbuf_str(text), text->len, &accepts, &err), &err);
    return accepts;
}

/* Goes through text by random tokens of the vocabulary, which has all bytes. */
static void take_by_any_tokens(const rig *r, const di_strbuf *text, uint64_t *rng) {
    di_matcher *m = make_matcher(r);
    for (size_t at = 0; at < text->len;) {
        int32_t fitting[TOKENS_MAX], n = 0;
        for (int32_t t = 0; t < r->t.n; t++) {
            const di_vocab_token *x = &r->t.tokens[t];
            if (!x->is_added && x->len > 0 && x->len <= text->len - at &&
                memcmp(x->bytes, text->data + at, x->len) == 0)
                fitting[n++] = t;
        }
        int32_t token = fitting[di_test_random(rng) % (uint64_t)n];
        accept(m, token, true);
        at += r->t.tokens[token].len;
    }
    accept(m, r->t.eos, true);
    di_matcher_destroy(m);
}

DI_PROPERTY(walks_that_end_are_texts_in_any_tokens, 400) {
    uint64_t rng = seed;
    static rig r;
    uint32_t mask[WORDS];
    di_strbuf text = {0};
    if (!rig_init(&r, &rng))
        return;
    di_matcher *m = make_matcher(&r);
    for (int i = 0; i < 2 * STEPS; i++) {
        int32_t token = draw(m, &r, mask, NULL, &rng);
        if (token < 0)
            break;
        accept(m, token, true);
        if (token == r.t.eos) {
            assert_true(is_text(&r, &text));
            if (r.t.has_all_bytes)
                take_by_any_tokens(&r, &text, &rng);
            break;
        }
        di_strbuf_append(&text, r.t.tokens[token].bytes, r.t.tokens[token].len);
        assert_int_equal(is_text(&r, &text), di_matcher_is_complete(m));
    }
    di_matcher_destroy(m);
    di_strbuf_deinit(&text);
    rig_deinit(&r);
}

DI_PROPERTY(taking_back_is_never_having_come, 200) {
    uint64_t rng = seed;
    static rig r;
    uint32_t mask[WORDS], again[WORDS];
    int32_t way[STEPS], only, only_again;
    size_t n = 0;
    if (!rig_init(&r, &rng))
        return;
    di_matcher *m = make_matcher(&r);
    for (int i = 0; i < 40; i++) {
        while (n < STEPS) {
            int32_t token = draw(m, &r, mask, NULL, &rng);
            if (token < 0)
                break;
            accept(m, token, true);
            way[n++] = token;
            if (token == r.t.eos || di_test_random(&rng) % 4 == 0)
                break;
        }
        int64_t back = (int64_t)(di_test_random(&rng) % (n + 1));
        di_matcher_rollback(m, back);
        n -= (size_t)back;
        if (di_test_random(&rng) % 8 == 0)
            flush(&r);
        di_matcher *fresh = make_matcher(&r);
        for (size_t k = 0; k < n; k++)
            accept(fresh, way[k], true);
        di_error err;
        di_status st = di_matcher_mask(m, mask, &only, &err);
        assert_int_equal(di_matcher_mask(fresh, again, &only_again, &err), st);
        if (!st) {
            assert_int_equal(only, only_again);
            assert_memory_equal(mask, again, r.v->n_words * sizeof *mask);
        }
        di_matcher_destroy(fresh);
        if (n > 0 && way[n - 1] == r.t.eos) {
            di_matcher_rollback(m, 1);
            n--;
        }
    }
    di_matcher_destroy(m);
    rig_deinit(&r);
}

/* The same walk with little memory: nothing differs until an error says that it isn't enough. */
DI_PROPERTY(little_memory_changes_nothing, 400) {
    uint64_t rng = seed, same = seed;
    static rig r, little;
    uint32_t mask[WORDS], other_mask[WORDS];
    int32_t only, other_only;
    if (!rig_init(&r, &rng))
        return;
    little = r;
    little.g = random_grammar(&same);
    if (little.g) {
        /* What the automaton may learn, and what all together may: either can be the one that is passed. */
        little.g->pda.private->limit = (size_t)di_test_random_range(&rng, 1 << 8, 1 << 14);
        little.g->memory_bytes = (size_t)di_test_random_range(&rng, 1 << 10, 1 << 16);
        di_matcher *m = make_matcher(&r), *other = make_matcher(&little);
        di_status st = DI_OK;
        for (int i = 0; i < 2 * STEPS && !st; i++) {
            di_error err;
            int32_t token = draw(m, &r, mask, &only, &rng);
            if (token < 0)
                break;
            st = di_matcher_mask(other, other_mask, &other_only, &err);
            if (!st) {
                assert_int_equal(only, other_only);
                assert_memory_equal(mask, other_mask, r.v->n_words * sizeof *mask);
                bool is_allowed = true;
                accept(m, token, true);
                st = di_matcher_accept(other, token, &is_allowed, &err);
                assert_true(is_allowed);
            }
            if (st)
                assert_int_equal(st, DI_ERR_RANGE);
            if (token == r.t.eos)
                break;
        }
        di_matcher_destroy(m);
        di_matcher_destroy(other);
        di_grammar_release(little.g);
    }
    rig_deinit(&r);
}

DI_TEST_GROUP(grammar_masks, cmocka_unit_test(masks_are_what_the_automaton_takes),
              cmocka_unit_test(walks_that_end_are_texts_in_any_tokens),
              cmocka_unit_test(taking_back_is_never_having_come), cmocka_unit_test(little_memory_changes_nothing));
