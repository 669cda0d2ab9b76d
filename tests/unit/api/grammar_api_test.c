/* The public grammar API: a small sampler over it, what is refused and with what message, and that the header alone is
 * enough to use it (this file includes nothing of src). */
#include "deepinfer/grammar.h"
#include "harness.h"

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

static bool accepts(di_grammar *g, const char *text) {
    bool is_accepted = false;
    di_error err;
    di_test_ok(di_grammar_accepts(g, text, strlen(text), &is_accepted, &err), &err);
    return is_accepted;
}

typedef di_status (*create_fn)(di_grammar **out, const char *text, size_t len, const di_grammar_options *options,
                               di_error *err);

static void each_kind_has_its_texts(void **state) {
    (void)state;
    static const struct {
        create_fn create;
        const char *grammar, *yes, *no;
    } cases[] = {
        {di_grammar_create_regex, "[a-c]+\\d{2}", "abc42", "abc4"},
        {di_grammar_create_schema, "{\"type\":\"integer\"}", "-17", "\"17\""},
        {di_grammar_create_ebnf, "root ::= \"(\" root \")\" | \"x\"", "((x))", "((x)"},
        {di_grammar_create_choice, "[\"left\",\"right\"]", "right", "righ"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_grammar *g = NULL;
        di_error err;
        di_test_ok(cases[i].create(&g, cases[i].grammar, strlen(cases[i].grammar), NULL, &err), &err);
        assert_true(accepts(g, cases[i].yes));
        assert_false(accepts(g, cases[i].no));
        assert_ptr_equal(di_grammar_acquire(g), g);
        di_grammar_release(g);
        assert_true(accepts(g, cases[i].yes));
        di_grammar_release(g);
    }
    di_grammar_release(NULL);
}

static void what_is_wrong_is_said(void **state) {
    (void)state;
    static const struct {
        create_fn create;
        const char *grammar;
        int64_t memory_bytes, timeout_ms;
        di_status status;
    } cases[] = {
        {di_grammar_create_regex, "(a", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_regex, "(a)\\1", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_schema, "{", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_schema, "false", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_ebnf, "start ::= \"a\"", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_choice, "[]", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_choice, "[1]", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_choice, "nonsense", 0, 0, DI_ERR_REQUEST},
        {di_grammar_create_regex, "(a{1,900}){1,900}(b|c|d){200}", 64, 0, DI_ERR_RANGE},
        {di_grammar_create_regex, "a", -1, 0, DI_ERR_ARG},
        {di_grammar_create_regex, "a", 0, -1, DI_ERR_ARG},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_grammar_options options = {.memory_bytes = cases[i].memory_bytes, .timeout_ms = cases[i].timeout_ms};
        di_grammar *g = NULL;
        di_error err = {0};
        if (cases[i].create(&g, cases[i].grammar, strlen(cases[i].grammar), &options, &err) != cases[i].status)
            fail_msg("'%s': status %d '%s', expected %d", cases[i].grammar, err.code, err.message, cases[i].status);
        assert_int_equal(err.code, cases[i].status);
        assert_null(g);
        assert_true(strlen(err.message) > 0);
        assert_int_equal(cases[i].create(&g, cases[i].grammar, strlen(cases[i].grammar), &options, NULL),
                         cases[i].status);
    }
}

/* Draws tokens at random and always ends in a text of the grammar. */
static void a_sampler_gives_texts_of_the_grammar(void **state) {
    (void)state;
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"id\":{\"type\":\"string\",\"maxLength\":12},\"ok\":"
        "{\"type\":\"boolean\"}},\"required\":[\"id\",\"ok\"],\"additionalProperties\":false}";
    di_tokenizer *tok = open_tiny();
    int32_t n_vocab = di_tokenizer_size(tok) + 7, eos = di_tokenizer_find(tok, "<｜end▁of▁sentence｜>");
    size_t n_words = ((size_t)n_vocab + 31) / 32;
    uint32_t *mask = calloc(n_words, sizeof *mask);
    di_grammar *g = NULL;
    di_grammar_vocab *vocab = NULL;
    di_error err;
    assert_non_null(mask);
    di_test_ok(di_grammar_create_schema(&g, schema, sizeof schema - 1, NULL, &err), &err);
    di_test_ok(di_grammar_vocab_create(&vocab, tok, n_vocab, eos, &err), &err);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t rng = seed;
        int32_t ids[512], only;
        size_t n = 0, len = 0;
        char *text = NULL;
        di_matcher *m = NULL;
        di_test_ok(di_matcher_create(&m, g, vocab, &err), &err);
        while (n == 0 || ids[n - 1] != eos) {
            bool is_allowed = false;
            assert_true(n < 512);
            di_test_ok(di_matcher_mask(m, mask, &only, &err), &err);
            int32_t token = (int32_t)(di_test_random(&rng) % (uint64_t)n_vocab);
            while (!(mask[token / 32] >> (token % 32) & 1))
                token = (token + 1) % n_vocab;
            assert_true(only == -1 || only == token);
            di_test_ok(di_matcher_accept(m, token, &is_allowed, &err), &err);
            assert_true(is_allowed);
            ids[n++] = token;
            assert_int_equal(di_matcher_count(m), n);
        }
        assert_true(di_matcher_is_complete(m));
        di_test_ok(di_tokenizer_detokenize(tok, ids, n - 1, false, &text, &len, &err), &err);
        assert_true(accepts(g, text));
        di_matcher_rollback(m, (int64_t)n);
        assert_int_equal(di_matcher_count(m), 0);
        assert_false(di_matcher_is_complete(m));
        di_matcher_destroy(m);
        di_free(text);
    }
    di_grammar_release(g);
    di_grammar_vocab_destroy(vocab);
    assert_int_equal(di_grammar_vocab_create(&vocab, tok, 3, 0, &err), DI_ERR_ARG);
    di_tokenizer_close(tok);
    free(mask);
}

DI_TEST_GROUP(grammar_api, cmocka_unit_test(each_kind_has_its_texts), cmocka_unit_test(what_is_wrong_is_said),
              cmocka_unit_test(a_sampler_gives_texts_of_the_grammar));
