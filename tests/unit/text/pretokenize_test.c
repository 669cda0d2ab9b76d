/* The pre-tokenizer: pieces of the released patterns, what is refused in other patterns, and pieces of any length. */
#include "harness.h"
#include "text/pretokenize.h"

static const char *const released[] = {
    "\\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
     "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
};

static di_pretok *open_patterns(const char *const *patterns, size_t n) {
    size_t lens[DI_PRETOK_STEPS_MAX] = {0};
    di_pretok *p = NULL;
    di_error err;
    for (size_t i = 0; i < n; i++) {
        lens[i] = strlen(patterns[i]);
    }
    di_test_ok(di_pretok_create(&p, patterns, lens, n, &err), &err);
    return p;
}

static di_status show_piece(void *ctx, const char *piece, size_t n, di_error *err) {
    di_strbuf *shown = ctx;
    (void)err;
    if (shown->len > 0) {
        di_strbuf_putc(shown, '~');
    }
    di_strbuf_append(shown, piece, n);
    return DI_OK;
}

/* Checks the pieces of text, shown with ~ between them. */
static void expect_pieces(const di_pretok *p, const char *text, const char *want) {
    di_strbuf shown = {0};
    di_error err;
    di_test_ok(di_pretok_run(p, text, strlen(text), show_piece, &shown, &err), &err);
    assert_string_equal(di_strbuf_str(&shown), want);
    di_strbuf_deinit(&shown);
}

static void released_patterns_cut_as_specified(void **state) {
    (void)state;
    /* Values follow from the rules of the patterns; the vectors check many more against the reference. */
    static const char *const cases[][2] = {
        {"", ""},
        {"1234567", "123~456~7"},
        {"a1b", "a~1~b"},
        {"½Ⅷ٣①", "½Ⅷ٣~①"},
        {"a\n\nb", "a~\n\n~b"},
        {"x   y", "x~  ~ y"},
        {"   5", "   ~5"}, /* the end of the piece is the end of the look-ahead's text */
        {"x  ", "x~  "},
        {"foo.\n\n", "foo~.\n\n"},
        {"don't", "don~'t"},
        {"a_b", "a~_b"},
        {"hello world", "hello~ world"},
        {"hello  world", "hello~ ~ world"},
        {" \n \n x", " \n \n~ x"},
        {"a ... b", "a~ ...~ b"},
        {"日本語のテスト", "日本語のテスト"},
        {"abc日本", "abc~日本"},
        {"龥龦", "龥~龦"}, /* U+9FA5 is in the class, U+9FA6 is a letter like others */
        {"한글 가", "한글~ 가"},
        {"e\u0301x", "e\u0301x"}, /* marks go with letters */
        {"\u0301a", "\u0301a"},
        {"\u200dab", "\u200dab"}, /* a format character may lead letters */
        {"\x01\x02", "\x01\x02"}, /* nothing matches: one piece */
        {"!\x01\x01!", "!~\x01\x01~!"},
        {"\tif", "\tif"},
        {"a\u180e\u180eb", "a~\u180e~\u180eb"}, /* no white space since Unicode 6.3: the last leads letters */
        {"\u180e\n", "\u180e~\n"},
        {"a\u00a0\u3000b", "a~\u00a0~\u3000b"},
        {"$x +=y", "$x~ +=~y"},
        {"x\r\n\r\n", "x~\r\n\r\n"},
        {"😀😀 👍🏽", "😀😀~ 👍🏽"},
    };
    di_pretok *p = open_patterns(released, DI_COUNT(released));
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        expect_pieces(p, cases[i][0], cases[i][1]);
    }
    di_pretok_destroy(p);
}

static void empty_matches_make_no_pieces(void **state) {
    (void)state;
    static const char *const patterns[] = {"a?", "[b]*"};
    di_pretok *p = open_patterns(patterns, 2);
    expect_pieces(p, "xaybbé", "x~a~y~bb~é");
    di_pretok_destroy(p);
}

static void no_patterns_leave_the_text_whole(void **state) {
    (void)state;
    di_pretok *p = open_patterns(NULL, 0);
    expect_pieces(p, "a b", "a b");
    di_pretok_destroy(p);
}

static void refuses_what_another_engine_reads_otherwise(void **state) {
    (void)state;
    static const struct {
        const char *pattern;
        di_status status;
        const char *message;
    } cases[] = {
        {"\\h", DI_ERR_UNSUPPORTED, "escape '\\h' at byte 0"},
        {"a\\1", DI_ERR_UNSUPPORTED, "escape '\\1'"},
        {"\\C", DI_ERR_UNSUPPORTED, "escape '\\C'"},
        {"\\Qa\\E", DI_ERR_UNSUPPORTED, "escape '\\Q'"},
        {"^a", DI_ERR_UNSUPPORTED, "anchor '^'"},
        {"a$", DI_ERR_UNSUPPORTED, "anchor '$'"},
        {"[a[b]]", DI_ERR_UNSUPPORTED, "nested class"},
        {"[a&&b]", DI_ERR_UNSUPPORTED, "intersection"},
        {"[]a]", DI_ERR_UNSUPPORTED, "empty class"},
        {"(?<=a)b", DI_ERR_UNSUPPORTED, "group at byte 0"},
        {"(?R)", DI_ERR_UNSUPPORTED, "group at byte 0"},
        {"(*LIMIT_MATCH=1)a", DI_ERR_UNSUPPORTED, "group at byte 0"},
        {"(a", DI_ERR_FORMAT, "not a valid expression"},
        {"a\\", DI_ERR_FORMAT, "ends in a backslash"},
        {"[z-a]", DI_ERR_FORMAT, "not a valid expression"},
        {"\xFF", DI_ERR_FORMAT, "not a valid expression"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_pretok *p = NULL;
        di_error err = {0};
        size_t len = strlen(cases[i].pattern);
        di_status status = di_pretok_create(&p, &cases[i].pattern, &len, 1, &err);
        if (status != cases[i].status || !strstr(err.message, cases[i].message)) {
            fail_msg("'%s': status %d, '%s', expected %d with '%s'", cases[i].pattern, status, err.message,
                     cases[i].status, cases[i].message);
        }
        assert_null(p);
    }
}

typedef struct piece_sizes {
    size_t n, first, last;
} piece_sizes;

static di_status count_piece(void *ctx, const char *piece, size_t n, di_error *err) {
    piece_sizes *sizes = ctx;
    (void)piece;
    (void)err;
    sizes->first = sizes->n ? sizes->first : n;
    sizes->last = n;
    sizes->n++;
    return DI_OK;
}

static void a_mebibyte_without_a_break_is_one_piece(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    static const struct {
        const char *unit, *end;
        size_t n_pieces, last;
    } cases[] = {
        {"a", "", 1, N}, {" ", "", 1, N},    {" ", "x", 2, 2},         {"\t", "5", 2, 1},    {" \n", "", 1, N},
        {"!", "", 1, N}, {"\x01", "", 1, N}, {"中", "", 1, N / 3 * 3}, {"\u0301", "", 1, N},
    };
    di_pretok *p = open_patterns(released, DI_COUNT(released));
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf text = {0};
        piece_sizes sizes = {0};
        di_error err;
        for (size_t k = 0; k < N / strlen(cases[i].unit); k++) {
            di_strbuf_puts(&text, cases[i].unit);
        }
        di_strbuf_puts(&text, cases[i].end);
        di_test_ok(di_pretok_run(p, text.data, text.len, count_piece, &sizes, &err), &err);
        if (sizes.n != cases[i].n_pieces || sizes.last != cases[i].last) {
            fail_msg("case %zu: %zu pieces, the last of %zu bytes; expected %zu and %zu", i, sizes.n, sizes.last,
                     cases[i].n_pieces, cases[i].last);
        }
        di_strbuf_deinit(&text);
    }
    di_pretok_destroy(p);
}

static void endless_work_is_an_error(void **state) {
    (void)state;
    static const char *const patterns[] = {"(?:a|a)+[bc]"}; /* 2^n ways to fail */
    char text[64];
    piece_sizes sizes = {0};
    di_error err;
    memset(text, 'a', sizeof text);
    di_pretok *p = open_patterns(patterns, 1);
    assert_int_equal(di_pretok_run(p, text, sizeof text, count_piece, &sizes, &err), DI_ERR_UNSUPPORTED);
    assert_contains(err.message, "split 1 of the tokenizer on a piece of 64 bytes");
    di_pretok_destroy(p);
}

static di_status refuse_piece(void *ctx, const char *piece, size_t n, di_error *err) {
    (void)ctx;
    (void)n;
    return *piece == 'b' ? di_fail(err, DI_ERR_RANGE, "no b") : DI_OK;
}

static void a_refused_piece_ends_the_run(void **state) {
    (void)state;
    di_error err;
    di_pretok *p = open_patterns(released, DI_COUNT(released));
    assert_int_equal(di_pretok_run(p, "a\nb\nc", 5, refuse_piece, NULL, &err), DI_ERR_RANGE);
    assert_string_equal(err.message, "no b");
    di_pretok_destroy(p);
}

DI_TEST_GROUP(pretokenize, cmocka_unit_test(released_patterns_cut_as_specified),
              cmocka_unit_test(empty_matches_make_no_pieces), cmocka_unit_test(no_patterns_leave_the_text_whole),
              cmocka_unit_test(refuses_what_another_engine_reads_otherwise),
              cmocka_unit_test(a_mebibyte_without_a_break_is_one_piece), cmocka_unit_test(endless_work_is_an_error),
              cmocka_unit_test(a_refused_piece_ends_the_run));
