/* Matchers and masks on grammars and tokens that can be checked by eye: what may come, taking back, the end mark, added
 * tokens, memory that runs out, several threads; and the tiny model's tokenizer. */
#include "engine/grammar/grammar_internal.h"
#include "harness.h"

/* ---- rig ---- */

static di_grammar *compile(di_grammar_kind kind, const char *text) {
    di_grammar_spec spec = {.kind = kind, .text = text, .len = text ? strlen(text) : 0};
    di_grammar *g = NULL;
    di_error err;
    di_test_ok(di_grammar_compile(&g, &spec, NULL, &err), &err);
    return g;
}

/* Tokens 0 .. 255 are the bytes; then the given ones; then "</s>" as the end mark and "<call>", added tokens. */
typedef struct vocab_rig {
    di_grammar_vocab *v;
    int32_t first, eos, call, n_vocab;
} vocab_rig;

static vocab_rig make_vocab(const char *const *pieces, int n) {
    static char bytes[256];
    di_vocab_token tokens[400];
    vocab_rig r = {.first = 256, .eos = 256 + n, .call = 257 + n, .n_vocab = 258 + n};
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        tokens[i] = (di_vocab_token){&bytes[i], 1, false};
    }
    for (int i = 0; i < n; i++)
        tokens[256 + i] = (di_vocab_token){pieces[i], strlen(pieces[i]), false};
    tokens[r.eos] = (di_vocab_token){"</s>", 4, true};
    tokens[r.call] = (di_vocab_token){"<call>", 6, true};
    di_error err;
    di_test_ok(di_grammar_vocab_make(&r.v, tokens, r.n_vocab, r.n_vocab, r.eos, &err), &err);
    return r;
}

static di_matcher *make_matcher(di_grammar *g, const di_grammar_vocab *v) {
    di_matcher *m = NULL;
    di_error err;
    di_test_ok(di_matcher_create(&m, g, v, &err), &err);
    return m;
}

static bool accept(di_matcher *m, int32_t token) {
    bool is_allowed;
    di_error err;
    di_test_ok(di_matcher_accept(m, token, &is_allowed, &err), &err);
    return is_allowed;
}

static void accept_text(di_matcher *m, const char *text) {
    for (; *text; text++)
        assert_true(accept(m, (unsigned char)*text));
}

/* The mask as a list; returns its length, *only as di_matcher_mask. */
static int list_mask(di_matcher *m, int32_t n_vocab, int32_t *list, int32_t *only) {
    static uint32_t mask[4096 + 1];
    di_error err;
    int n = 0;
    di_test_ok(di_matcher_mask(m, mask, only, &err), &err);
    for (int32_t t = 0; t < n_vocab; t++)
        if (di_mask_has(mask, t))
            list[n++] = t;
    return n;
}

static void expect_mask(di_matcher *m, const vocab_rig *r, const int32_t *expected, int n) {
    int32_t list[400], only;
    assert_int_equal(list_mask(m, r->n_vocab, list, &only), n);
    for (int i = 0; i < n; i++)
        assert_int_equal(list[i], expected[i]);
    assert_int_equal(only, n == 1 ? expected[0] : -1);
}

/* ---- tests ---- */

static void a_mask_has_what_continues(void **state) {
    (void)state;
    static const char *const pieces[] = {"ye", "yes", "yesno", "es", "n", "", "no", "no"};
    vocab_rig r = make_vocab(pieces, 8);
    di_grammar *g = compile(DI_GRAMMAR_CHOICE, "[\"yes\",\"no\",\"yesterday\"]");
    di_matcher *m = make_matcher(g, r.v);
    expect_mask(m, &r, (int32_t[]){'n', 'y', 256, 257, 260, 262, 263}, 7);
    assert_false(di_matcher_is_complete(m));
    assert_false(accept(m, r.eos));
    assert_false(accept(m, 258)); /* yesno */
    assert_false(accept(m, 261)); /* without bytes */
    assert_false(accept(m, -1));
    assert_false(accept(m, r.n_vocab));
    assert_int_equal(di_matcher_count(m), 0);
    assert_true(accept(m, 257));
    expect_mask(m, &r, (int32_t[]){'t', r.eos}, 2);
    assert_true(di_matcher_is_complete(m));
    assert_true(accept(m, 't'));
    expect_mask(m, &r, (int32_t[]){'e'}, 1);
    assert_false(di_matcher_is_complete(m));
    di_matcher_rollback(m, 2);
    assert_int_equal(di_matcher_count(m), 0);
    expect_mask(m, &r, (int32_t[]){'n', 'y', 256, 257, 260, 262, 263}, 7);
    assert_true(accept(m, 263));
    expect_mask(m, &r, (int32_t[]){r.eos}, 1);
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
}

static void nothing_follows_the_end_mark(void **state) {
    (void)state;
    vocab_rig r = make_vocab(NULL, 0);
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "a*");
    di_matcher *m = make_matcher(g, r.v);
    expect_mask(m, &r, (int32_t[]){'a', r.eos}, 2);
    assert_true(accept(m, 'a'));
    assert_true(accept(m, r.eos));
    assert_int_equal(di_matcher_count(m), 2);
    assert_true(di_matcher_is_complete(m));
    expect_mask(m, &r, NULL, 0);
    assert_false(accept(m, 'a'));
    assert_false(accept(m, r.eos));
    di_matcher_rollback(m, 1);
    expect_mask(m, &r, (int32_t[]){'a', r.eos}, 2);
    di_matcher_destroy(m);
    di_matcher_destroy(NULL);
    di_grammar_release(g);
    di_grammar_release(NULL);
    di_grammar_vocab_destroy(r.v);
}

static void added_tokens_come_only_by_name(void **state) {
    (void)state;
    vocab_rig r = make_vocab(NULL, 0);
    di_gram gram;
    di_grammar *g = NULL;
    di_error err;
    di_gram_init(&gram, NULL);
    gram.root = di_gram_rule_add(&gram, "root", 4);
    const di_node *parts[] = {di_node_bytes(&gram, "<c", 2), di_node_special(&gram, "<call>", 6),
                              di_node_special(&gram, "</s>", 4), di_node_special(&gram, "<gone>", 6)};
    di_gram_rule_define(&gram, gram.root, di_node_alt(&gram, parts, 4));
    di_test_ok(di_grammar_make(&g, &gram, &err), &err);
    di_gram_deinit(&gram);
    di_matcher *m = make_matcher(g, r.v);
    /* The end mark ends texts, also where a grammar spells it. */
    expect_mask(m, &r, (int32_t[]){'<', r.call}, 2);
    assert_true(accept(m, r.call));
    assert_true(di_matcher_is_complete(m));
    di_matcher_rollback(m, 1);
    accept_text(m, "<call>");
    assert_true(di_matcher_is_complete(m));
    di_matcher_destroy(m);
    di_grammar_release(g);
    g = compile(DI_GRAMMAR_REGEX, "(?s:.*)"); /* the spelling is text here, the token is not */
    m = make_matcher(g, r.v);
    assert_false(accept(m, r.call));
    accept_text(m, "<call></s>");
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
}

static void long_tokens_fit_counted_strings(void **state) {
    (void)state;
    char pieces[6][64];
    const char *list[6];
    static const int lengths[] = {15, 16, 17, 20, 21, 40};
    for (int i = 0; i < 6; i++) {
        memset(pieces[i], 'x', (size_t)lengths[i]);
        pieces[i][lengths[i]] = '\0';
        list[i] = pieces[i];
    }
    vocab_rig r = make_vocab(list, 6);
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "[ -~]{18,20}");
    di_matcher *m = make_matcher(g, r.v);
    int32_t allowed[400], only;
    int n = list_mask(m, r.n_vocab, allowed, &only);
    assert_int_equal(n, '~' - ' ' + 1 + 4); /* up to 20 characters */
    assert_int_equal(allowed[n - 1], 256 + 3);
    assert_true(accept(m, 257)); /* 16 of them */
    assert_int_equal(list_mask(m, r.n_vocab, allowed, &only), '~' - ' ' + 1);
    accept_text(m, "yyyy");
    expect_mask(m, &r, (int32_t[]){r.eos}, 1);
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
}

/* White space that is bounded: a token fits by how much of it there was before. */
static void white_space_is_counted_across_tokens(void **state) {
    (void)state;
    static const char *const pieces[] = {"   ",     "     ",    "      ",     " \n\t\"",
                                         "     \"", "      \"", "{   \r \"a", "{      \"a"};
    enum { THREE = 256, FIVE, SIX, THREE_QUOTE, FIVE_QUOTE, SIX_QUOTE, ALL_FIVE, ALL_SIX };
    vocab_rig r = make_vocab(pieces, DI_COUNT(pieces));
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "\\{[ \\n\\t\\r]{0,5}\"a\"[ \\n\\t\\r]{0,5}\\}");
    di_matcher *m = make_matcher(g, r.v);
    expect_mask(m, &r, (int32_t[]){'{', ALL_FIVE}, 2);
    accept_text(m, "{");
    expect_mask(m, &r, (int32_t[]){'\t', '\n', '\r', ' ', '"', THREE, FIVE, THREE_QUOTE, FIVE_QUOTE}, 9);
    accept_text(m, "\n");
    expect_mask(m, &r, (int32_t[]){'\t', '\n', '\r', ' ', '"', THREE, THREE_QUOTE}, 7);
    assert_true(accept(m, THREE));
    expect_mask(m, &r, (int32_t[]){'\t', '\n', '\r', ' ', '"'}, 5);
    accept_text(m, " ");
    expect_mask(m, &r, (int32_t[]){'"'}, 1);
    accept_text(m, "\"a\"");
    expect_mask(m, &r, (int32_t[]){'\t', '\n', '\r', ' ', '}', THREE, FIVE}, 7);
    di_matcher_rollback(m, di_matcher_count(m));
    assert_true(accept(m, ALL_FIVE));
    assert_false(accept(m, SIX));
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
}

static void memory_that_runs_out_is_an_error_or_not_seen(void **state) {
    (void)state;
    vocab_rig r = make_vocab(NULL, 0);
    di_grammar_spec spec = {.kind = DI_GRAMMAR_REGEX, .text = "(a|b){1,5000}", .len = 13};
    di_grammar_limits limits = {.memory_bytes = 256 << 10};
    di_grammar *g = NULL;
    di_error err;
    di_status st = di_grammar_compile(&g, &spec, &limits, &err);
    if (st) { /* as good an answer */
        assert_int_equal(st, DI_ERR_RANGE);
    } else {
        di_matcher *m = make_matcher(g, r.v);
        bool is_allowed = true;
        int i = 0;
        for (; i < 5000 && !st; i++)
            st = di_matcher_accept(m, i % 3 ? 'a' : 'b', &is_allowed, &err);
        assert_true(is_allowed);
        if (st) {
            assert_int_equal(st, DI_ERR_RANGE);
            assert_contains(err.message, "256 KiB");
            assert_int_equal(di_matcher_count(m), i - 1);
        }
        /* A shorter text is served again. */
        di_matcher_rollback(m, di_matcher_count(m) - 3);
        expect_mask(m, &r, (int32_t[]){'a', 'b', r.eos}, 3);
        di_matcher_destroy(m);
    }
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
}

/* A place that would keep everybody waiting is an error of the one request, in a time that is bounded; other places of
 * the same grammar are served. */
static void a_place_that_takes_too_long_is_an_error(void **state) {
    (void)state;
    enum { LENGTH = 40000 };
    char *piece = malloc(LENGTH + 1);
    assert_non_null(piece);
    memset(piece, 'a', LENGTH);
    piece[LENGTH] = '\0';
    vocab_rig r = make_vocab((const char *const[]){piece}, 1);
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "b|((a{2,3}|d){30,4000}c?){20,3000}");
    di_matcher *m = make_matcher(g, r.v);
    static uint32_t mask[400 / 32 + 1];
    di_error err;
    bool is_allowed = true;
    assert_int_equal(di_matcher_accept(m, r.first, &is_allowed, &err), DI_ERR_RANGE);
    assert_contains(err.message, "takes too long");
    assert_int_equal(di_matcher_mask(m, mask, NULL, &err), DI_ERR_RANGE);
    assert_contains(err.message, "takes too long");
    assert_int_equal(di_matcher_count(m), 0);
    assert_true(accept(m, 'b'));
    expect_mask(m, &r, (int32_t[]){r.eos}, 1);
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(r.v);
    free(piece);
}

static void vocabularies_don_t_mix(void **state) {
    (void)state;
    static const char *const one[] = {"aa"}, *const two[] = {"b", "aa"};
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "a*");
    for (int i = 0; i < 12; i++) { /* more than a grammar remembers */
        vocab_rig r = i % 2 ? make_vocab(two, 2) : make_vocab(one, 1);
        di_matcher *m = make_matcher(g, r.v);
        expect_mask(m, &r, (int32_t[]){'a', i % 2 ? 257 : 256, r.eos}, 3);
        di_matcher_destroy(m);
        di_grammar_vocab_destroy(r.v);
    }
    di_grammar_release(g);
    di_grammar_vocab *v = NULL;
    di_error err;
    assert_int_equal(di_grammar_vocab_make(&v, NULL, 0, 4, 4, &err), DI_ERR_ARG);
    assert_null(v);
    di_grammar_vocab_destroy(NULL);
}

static void a_vocabulary_may_have_no_way_on(void **state) {
    (void)state;
    di_vocab_token tokens[] = {{"a", 1, false}, {"</s>", 4, true}};
    di_grammar_vocab *v = NULL;
    uint32_t mask[1];
    di_error err;
    di_test_ok(di_grammar_vocab_make(&v, tokens, 2, 2, 1, &err), &err);
    di_grammar *g = compile(DI_GRAMMAR_REGEX, "ab");
    di_matcher *m = make_matcher(g, v);
    assert_true(accept(m, 0));
    assert_int_equal(di_matcher_mask(m, mask, NULL, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "no token continues");
    di_matcher_destroy(m);
    di_grammar_release(g);
    di_grammar_vocab_destroy(v);
}

/* ---- the tiny model's tokenizer ---- */

typedef struct tiny_rig {
    di_tokenizer *tok;
    di_grammar_vocab *v;
    int32_t eos, n;
} tiny_rig;

static tiny_rig open_tiny(void) {
    tiny_rig r = {0};
    di_error err;
    di_test_ok(di_tokenizer_open(&r.tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    r.n = di_tokenizer_size(r.tok);
    r.eos = di_tokenizer_find(r.tok, "<｜end▁of▁sentence｜>");
    assert_true(r.eos >= 0);
    di_test_ok(di_grammar_vocab_create(&r.v, r.tok, r.n, r.eos, &err), &err);
    return r;
}

static void close_tiny(tiny_rig *r) {
    di_grammar_vocab_destroy(r->v);
    di_tokenizer_close(r->tok);
}

/* Compares the mask with what accept says of every token, and takes `next`. */
static void check_position(const tiny_rig *r, di_matcher *m, int32_t next) {
    static uint32_t mask[4096];
    di_error err;
    di_test_ok(di_matcher_mask(m, mask, NULL, &err), &err);
    for (int32_t t = 0; t < r->n; t++) {
        bool is_allowed = accept(m, t);
        assert_int_equal(is_allowed, di_mask_has(mask, t));
        if (is_allowed)
            di_matcher_rollback(m, 1);
    }
    assert_true(accept(m, next));
}

static void real_tokens_follow_a_schema(void **state) {
    (void)state;
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":24},\"age\":{\"type\":"
        "\"integer\"},\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"id\":{\"type\":\"string\","
        "\"pattern\":\"^[a-z]{3,20}$\"}},\"required\":[\"name\",\"age\",\"tags\",\"id\"],\"additionalProperties\":"
        "false}";
    static const char text[] = "{\"name\":\"Ann \\\"Lee\\\" 日本\",\"age\":-42,\"tags\":[\"quick brown\",\"é\\n\"],"
                               "\"id\":\"something\"}";
    tiny_rig r = open_tiny();
    di_grammar *g = compile(DI_GRAMMAR_SCHEMA, schema);
    di_matcher *m = make_matcher(g, r.v);
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_tokenizer_encode(r.tok, text, sizeof text - 1, true, &ids, &err), &err);
    for (size_t i = 0; i < ids.len; i++)
        check_position(&r, m, ids.data[i]);
    assert_true(di_matcher_is_complete(m));
    check_position(&r, m, r.eos);
    di_ids_deinit(&ids);
    di_matcher_destroy(m);
    di_grammar_release(g);
    close_tiny(&r);
}

/* ---- threads ---- */

enum { THREADS = 8, MATCHERS = 8 }; /* of each thread */

typedef struct thread_job {
    di_grammar *g;
    const tiny_rig *tiny;
    const int32_t *ids;
    size_t n_ids;
    const uint32_t *expected; /* [n_ids + 1, n_words] */
    bool is_right;
} thread_job;

static void *run_matchers(void *ctx) {
    thread_job *job = ctx;
    size_t n_words = job->tiny->v->n_words;
    uint32_t *mask = calloc(n_words, sizeof *mask);
    di_matcher *matchers[MATCHERS] = {0};
    di_error err;
    bool is_right = mask != NULL;
    for (int k = 0; k < MATCHERS; k++)
        is_right = is_right && !di_matcher_create(&matchers[k], job->g, job->tiny->v, &err);
    for (size_t i = 0; i <= job->n_ids && is_right; i++) {
        for (int k = 0; k < MATCHERS && is_right; k++) {
            bool is_allowed = true;
            is_right = !di_matcher_mask(matchers[k], mask, NULL, &err) &&
                       memcmp(mask, job->expected + i * n_words, n_words * sizeof *mask) == 0;
            if (i < job->n_ids && is_right)
                is_right = !di_matcher_accept(matchers[k], job->ids[i], &is_allowed, &err) && is_allowed;
        }
        if (i % 16 == 7) {
            pthread_mutex_lock(&job->g->lock);
            di_grammar_flush(job->g);
            pthread_mutex_unlock(&job->g->lock);
        }
    }
    for (int k = 0; k < MATCHERS; k++)
        di_matcher_destroy(matchers[k]);
    free(mask);
    job->is_right = is_right;
    return NULL;
}

static void many_threads_share_a_grammar(void **state) {
    (void)state;
    static const char text[] = "{\"a\":[1,2.5,\"three four five\",null],\"b\":{\"c\":\"é\"}}";
    tiny_rig r = open_tiny();
    di_grammar *g = compile(DI_GRAMMAR_OBJECT, NULL);
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_tokenizer_encode(r.tok, text, sizeof text - 1, true, &ids, &err), &err);
    uint32_t *expected = calloc((ids.len + 1) * r.v->n_words, sizeof *expected);
    assert_non_null(expected);
    di_matcher *m = make_matcher(g, r.v);
    for (size_t i = 0; i <= ids.len; i++) {
        di_test_ok(di_matcher_mask(m, expected + i * r.v->n_words, NULL, &err), &err);
        assert_true(i == ids.len || accept(m, ids.data[i]));
    }
    di_matcher_destroy(m);
    pthread_t threads[THREADS];
    thread_job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (thread_job){di_grammar_acquire(g), &r, ids.data, ids.len, expected, false};
        assert_int_equal(pthread_create(&threads[i], NULL, run_matchers, &jobs[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_true(jobs[i].is_right);
        di_grammar_release(g);
    }
    free(expected);
    di_ids_deinit(&ids);
    di_grammar_release(g);
    close_tiny(&r);
}

DI_TEST_GROUP(grammar_matcher, cmocka_unit_test(a_mask_has_what_continues),
              cmocka_unit_test(nothing_follows_the_end_mark), cmocka_unit_test(added_tokens_come_only_by_name),
              cmocka_unit_test(long_tokens_fit_counted_strings), cmocka_unit_test(white_space_is_counted_across_tokens),
              cmocka_unit_test(memory_that_runs_out_is_an_error_or_not_seen),
              cmocka_unit_test(a_place_that_takes_too_long_is_an_error), cmocka_unit_test(vocabularies_don_t_mix),
              cmocka_unit_test(a_vocabulary_may_have_no_way_on), cmocka_unit_test(real_tokens_follow_a_schema),
              cmocka_unit_test(many_threads_share_a_grammar));
