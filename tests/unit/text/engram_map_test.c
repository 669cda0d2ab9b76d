/* Engram classes: the rules one by one, on entries made to differ by exactly one of them. */
#include "made_tokenizer.h"

typedef struct fold_case {
    const char *a, *b;
    bool is_same;
} fold_case;

/* Writes the byte-map spelling of a text as a JSON string. */
static void add_entry(di_strbuf *vocab, const char *text, int id) {
    di_strbuf spelling = {0};
    di_byte_spelling(&spelling, text, strlen(text));
    di_strbuf_puts(vocab, ",");
    di_json_write_string(vocab, spelling.data, spelling.len);
    di_strbuf_printf(vocab, ":%d", id);
    di_strbuf_deinit(&spelling);
}

static void folds_by_the_rules(void **state) {
    (void)state;
    static const fold_case cases[] = {
        {"the", "The", true},      {"the", " THE\n", true},  {"the", "the.", false},
        {"éa", "ea", true},        {"e\u0301a", "EA", true}, {"ﬁx", "fix", true}, /* compatibility */
        {"①x", "1x", true},        {"ａｂ", "ab", true},     {"Σσ", "σσ", true},
        {"ΑΣ", "ας", false}, /* no rule of context for the last sigma, which is a letter of its own */
        {"İx", "ix", true},        {"ßx", "ssx", false},     {"Ⅷx", "viiix", true},
        {"a b", "a\t\r\nb", true}, {"a b", "ab", false},     {"a\u00a0b", "a b", true}, /* NFKC makes it a space */
        {"\u3000xx", "xx", true},  {"ab\u1680", "ab", true}, {"\n\n", "  ", true},
        {"\u20ddxx", "xx", true}, /* an enclosing mark */
        {"कि", "क", true},         {"가각", "각가", false},  {"\vxx", "xx", true},
        {"\x1cxx", "xx", false}, /* a separator that is not White_Space */
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf vocab = {0};
        di_error err;
        int32_t map[258], n_classes = 0;
        add_entry(&vocab, cases[i].a, 256);
        add_entry(&vocab, cases[i].b, 257);
        di_tokenizer *tok = made_open(&(made){.vocab = vocab.data});
        di_test_ok(di_tokenizer_engram_map(tok, map, &n_classes, &err), &err);
        if ((map[256] == map[257]) != cases[i].is_same) {
            fail_msg("case %zu, '%s' and '%s': classes %d and %d", i, cases[i].a, cases[i].b, map[256], map[257]);
        }
        di_tokenizer_close(tok);
        di_strbuf_deinit(&vocab);
    }
}

static void numbers_classes_by_first_appearance(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){0});
    int32_t map[256], n_classes = 0;
    di_error err;
    di_test_ok(di_tokenizer_engram_map(tok, map, &n_classes, &err), &err);
    for (int id = 0; id < 9; id++) {
        assert_int_equal(map[id], id);
    }
    assert_int_equal(map['\t'], map['\n']); /* one space */
    assert_int_equal(map[' '], map['\t']);
    assert_int_equal(map['A'], map['a']);
    assert_int_equal(map[0x80], map[0x7F] + 1); /* incomplete bytes: their spelling, never folded */
    assert_int_not_equal(map[0xC9], map[0xE9]);
    assert_int_not_equal(map[0xE9], map['e']);
    int32_t largest = 0;
    for (int id = 0; id < 256; id++) {
        assert_true(map[id] <= largest + 1);
        largest = DI_MAX(largest, map[id]);
    }
    assert_int_equal(n_classes, largest + 1);
    di_tokenizer_close(tok);
}

static void what_folds_to_nothing_keeps_its_text(void **state) {
    (void)state;
    di_strbuf vocab = {0};
    int32_t map[259], n_classes = 0;
    di_error err;
    add_entry(&vocab, "\u0301", 256); /* a mark alone */
    add_entry(&vocab, "\u0300", 257);
    add_entry(&vocab, "\u2003", 258); /* NFKC makes it a space, and one space stays */
    di_tokenizer *tok = made_open(&(made){.vocab = vocab.data});
    di_test_ok(di_tokenizer_engram_map(tok, map, &n_classes, &err), &err);
    assert_int_not_equal(map[256], map[257]);
    assert_int_equal(map[258], map[' ']);
    di_tokenizer_close(tok);
    di_strbuf_deinit(&vocab);
}

DI_TEST_GROUP(engram_map, cmocka_unit_test(folds_by_the_rules), cmocka_unit_test(numbers_classes_by_first_appearance),
              cmocka_unit_test(what_folds_to_nothing_keeps_its_text));
