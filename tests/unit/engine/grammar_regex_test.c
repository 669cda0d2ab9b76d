/* Regular expressions as grammars. What matches is what Python's re says (fullmatch under re.ASCII), for `pattern` what
 * ECMA 262 says of a search; places of faults are counted by hand. */
#include "grammar_walk.h"
#include "harness.h"

typedef struct regex_case {
    const char *regex;
    const char *in[6], *out[6]; /* up to NULL */
} regex_case;

static void open_regex(di_gram *g, const char *regex, bool is_search, const di_node **node) {
    di_error err;
    di_gram_init(g, NULL);
    *node = di_node_regex(g, regex, strlen(regex), is_search);
    if (di_gram_status(g, &err)) {
        fail_msg("'%s': %s", regex, err.message);
    }
}

static void check_cases(const regex_case *cases, size_t n, bool is_search) {
    for (size_t i = 0; i < n; i++) {
        const regex_case *c = &cases[i];
        const di_node *node;
        di_gram g;
        open_regex(&g, c->regex, is_search, &node);
        for (int k = 0; k < 6 && c->in[k]; k++) {
            if (!walk_matches(&g, node, c->in[k], strlen(c->in[k]))) {
                fail_msg("'%s' doesn't match '%s'", c->regex, c->in[k]);
            }
        }
        for (int k = 0; k < 6 && c->out[k]; k++) {
            if (walk_matches(&g, node, c->out[k], strlen(c->out[k]))) {
                fail_msg("'%s' matches '%s'", c->regex, c->out[k]);
            }
        }
        di_gram_deinit(&g);
    }
}

static void reads_the_syntax_of_python(void **state) {
    (void)state;
    static const regex_case cases[] = {
        {"a{,2}b", {"b", "ab", "aab"}, {"aaab"}},
        {"a{,}", {"", "aaaa"}, {"b"}},
        {"a{}|a{x}|{", {"a{}", "a{x}", "{"}, {"a", "aa"}},
        {"a{2}?", {"aa"}, {"a", "aaa"}},
        {"[]a]+", {"]", "a]"}, {""}},
        {"[^]a]", {"b"}, {"]", "a"}},
        {"[a^-]+", {"a^-"}, {"b"}},
        {"[\\d\\-x]+", {"1-x"}, {"y"}},
        {"[[a]", {"[", "a"}, {"]"}},
        {"[\\b]\\a\\f\\v", {"\b\a\f\v"}, {"b"}},
        {"\\012\\101[\\1]", {"\nA\1"}, {NULL}},
        {"\\x{1F600}|\\u{1F600}a|\\U0001F600b", {"😀", "😀a", "😀b"}, {"x"}},
        {"\\ud83d\\ude00", {"😀"}, {"\xED\xA0\xBD\xED\xB8\x80"}},
        {"\\cJ", {"\n"}, {"J"}},
        {"(?P<year>\\d{4})(?<x>-)(?:z)", {"2024-z"}, {"2024z"}},
        {"a(?#any text)*", {"", "aaa"}, {"a("}},
        {"(?x) a b # comment\n c", {"abc"}, {"a b c"}},
        {"(?x)[ #]\\ a", {"  a", "# a"}, {"a"}},
        {"(?s).", {"\n", "a"}, {""}},
        {".", {"\r", "é", "😀"}, {"\n", "ab"}},
        {"(?s:.).", {"\na"}, {"a\n"}},
        {"}]", {"}]"}, {""}},
        {"\\/\\-\\_\\\"\\é", {"/-_\"é"}, {NULL}},
        {"\\s", {" ", "\t", "\xC2\xA0", "\xE3\x80\x80", "\xEF\xBB\xBF"}, {"a", "\xE2\x80\x8B"}},
        {"(?a)\\s", {" ", "\v"}, {"\xC2\xA0"}},
        {"\\w", {"a", "_", "9"}, {"é", "-"}},
        {"(?u)\\w\\d", {"é1", "九٣"}, {"-1", "éa"}},
        {"(|a)(b|)", {"", "a", "b", "ab"}, {"ba"}},
        {"(a*)*(b?){3}", {"", "aabbb"}, {"bbbb"}},
    };
    check_cases(cases, DI_COUNT(cases), false);
}

static void ignores_case(void **state) {
    (void)state;
    static const regex_case cases[] = {
        {"(?i)straße", {"StrAẞe", "STRAßE"}, {"STRASSE"}}, /* by characters, not by texts */
        {"(?i)k", {"k", "K", "\xE2\x84\xAA"}, {"j"}},      /* the sign of Kelvin */
        {"(?ai)k", {"k", "K"}, {"\xE2\x84\xAA"}},
        {"(?i)[a-c]x(?-i:Y)", {"BXY", "bxY"}, {"bxy"}},
        {"(?i)[^a]", {"b", "B"}, {"a", "A"}},
        {"(?i)σ", {"σ", "Σ", "ς"}, {"s"}},
        {"(?i:a)b", {"Ab", "ab"}, {"AB"}},
        {"(?i)\\w\\p{Lu}", {"aa", "aA"}, {"a1"}},
        {"(?i)a{2}1", {"aA1"}, {"a1"}},
    };
    check_cases(cases, DI_COUNT(cases), false);
}

static void knows_properties_of_unicode(void **state) {
    (void)state;
    static const regex_case cases[] = {
        {"\\p{Lu}\\pl\\P{L}", {"Aa1", "Éé!"}, {"aa1", "Aab"}},
        {"\\p{Letter}\\p{gc=Nd}\\p{Decimal_Number}", {"é1٣"}, {"11a"}},
        {"\\p{Greek}\\p{Script=Han}\\p{sc=cyrillic}", {"α好я"}, {"a好я", "αaя"}},
        {"\\p{Alphabetic}\\p{white space}\\p{^L}", {"a 1"}, {"1 1", "a a"}},
        {"[\\p{L}\\d_]+[^\\p{L}]", {"aé1_-"}, {"a"}},
        {"\\p{Any}\\p{ASCII}", {"\na", "é\n"}, {"aé"}},
        {"[^\\P{Lu}]", {"A", "É"}, {"a"}},
    };
    check_cases(cases, DI_COUNT(cases), false);
}

static void decides_anchors(void **state) {
    (void)state;
    static const regex_case cases[] = {
        {"^a$|\\Ab\\Z|c\\z", {"a", "b", "c"}, {"a\n", ""}},
        {"a$\\n", {"a\n"}, {"a", "a\n\n"}}, /* Python's $ also holds before a line end that ends the text */
        {"a$\\n?", {"a", "a\n"}, {"aa"}},
        {"a\\Z\\n?", {"a"}, {"a\n"}},
        {"(^a|b)+", {"a", "ab", "abb", "bb"}, {"aa", "ba"}},
        {"(a^b|c)", {"c"}, {"ab"}},
        {"x*^a", {"a"}, {"xa"}},
        {"(a$|b)*", {"", "a", "ba", "bb"}, {"ab"}},
        {"(?:^|,)a(?:,|$)", {"a", ",a", "a,", ",a,"}, {"ba"}},
        {"(?m)(a$\\n?|^b\\n?)*", {"a\nb", "a\n", "b\na\n", "b\n"}, {"ab"}},
        {"(yes|no)\\b.*", {"yes", "no!", "yes no"}, {"yess", "no1"}},
        {"\\bfoo\\b|a\\Bb", {"foo", "ab"}, {"a"}},
        {"(\\w+\\b ?)+", {"a", "ab c", "a "}, {" a"}},
        {"\\b", {NULL}, {"", "a"}},
    };
    check_cases(cases, DI_COUNT(cases), false);
}

static void searches_for_patterns(void **state) {
    (void)state;
    static const regex_case cases[] = {
        {"b", {"b", "abc", "\nb\n"}, {"", "a"}},
        {"^a|b$", {"a", "ax", "xb", "a\nb"}, {"xa", "bx", "b\n"}},
        {"^[a-z]+$", {"abc"}, {"abc\n", "1a", ""}},
        {"^$", {""}, {"\n", "a"}},
        {"", {"", "abc"}, {NULL}},
        {"(^|-)x(-|$)", {"x", "a-x", "x-b", "-x-"}, {"ax", "xb"}},
        {"^(?:a$|b)", {"a", "b", "bc"}, {"ab", "xa"}},
        {"\\bcat\\b", {"cat", "a cat!", "cat\n"}, {"cats", "concat"}},
        {"^[\\w-.]+$", {"a-b.c"}, {"a b"}}, /* ECMA: '-' beside a set is a member */
        {"[]|a", {"a"}, {"b"}},             /* ECMA: a class of no members */
        {"^.$", {"a"}, {"\r", "\xE2\x80\xA8", "\n"}},
        {"^\\u{61}$", {"a"}, {"b"}},
    };
    check_cases(cases, DI_COUNT(cases), true);
}

static void names_what_is_wrong_and_where(void **state) {
    (void)state;
    static const struct {
        const char *regex, *part;
        int position;
    } cases[] = {
        {"a(?=b)", "look-ahead", 1},
        {"a(?!b)", "look-ahead", 1},
        {"(?<=a)b", "look-behind", 0},
        {"é(?<!a)b", "look-behind", 1}, /* positions count characters */
        {"(a)\\1", "back-references", 3},
        {"(?P<n>a)(?P=n)", "back-references", 8},
        {"(?<n>a)\\k<n>", "back-references", 7},
        {"(a)?(?(1)b|c)", "conditions", 4},
        {"a(?R)?", "recursion", 1},
        {"(?1)", "recursion", 0},
        {"(?&n)", "recursion", 0},
        {"(?>a)", "atomic", 0},
        {"ab*+", "possessive", 2},
        {"a{2}+", "possessive", 1},
        {"(?L)a", "locale", 0},
        {"(ab", "'(' has no ')'", 0},
        {"ab)", "')' has no '('", 2},
        {"a[bc", "'[' has no ']'", 1},
        {"[z-a]", "'z-a'", 1},
        {"[a-\\d]", "'a-\\d'", 1},
        {"x|*", "nothing to repeat", 2},
        {"^*", "nothing to repeat", 1},
        {"a**", "nothing to repeat", 2},
        {"a{3,2}", "at least 3 and at most 2", 1},
        {"\\q", "'\\q'", 0},
        {"a\\", "backslash at the end", 1},
        {"\\p{Foo}", "'Foo'", 0},
        {"\\p{Lu", "no '}'", 0},
        {"\\x4", "2 hexadecimal digits", 0},
        {"\\u{110000}", "0 to 10FFFF", 0},
        {"a(?i)b", "must come first", 1},
        {"(?i", "a flag of 'aimsux'", 3},
        {"(?iz)", "found 'z'", 3},
        {"(?P<1>a)", "name of a group", 4},
        {"(?au)a", "exclude each other", 3},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_gram g;
        di_error err = {0};
        char where[32];
        snprintf(where, sizeof where, "position %d:", cases[i].position);
        di_gram_init(&g, NULL);
        di_status st = di_gram_regex(&g, cases[i].regex, strlen(cases[i].regex), &err);
        if (st != DI_ERR_REQUEST || !strstr(err.message, cases[i].part) || !strstr(err.message, where)) {
            fail_msg("'%s': status %d, '%s', expected '%s ... %s'", cases[i].regex, st, err.message, where,
                     cases[i].part);
        }
        di_gram_deinit(&g);
    }
    di_gram g;
    di_error err;
    di_gram_init(&g, NULL);
    assert_int_equal(di_gram_regex(&g, "ab\xFF", 3, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "byte 2");
    di_gram_deinit(&g);
}

static char *repeated(const char *part, size_t n) {
    size_t len = strlen(part);
    char *s = malloc(n * len + 1);
    assert_non_null(s);
    for (size_t i = 0; i < n; i++)
        memcpy(s + i * len, part, len);
    s[n * len] = '\0';
    return s;
}

static void stays_within_its_limits(void **state) {
    (void)state;
    static const struct {
        const char *part;
        size_t n;
        di_status status;
    } cases[] = {
        {"(", 100000, DI_ERR_RANGE},       {"(?:a|", 300, DI_ERR_RANGE}, {"^", 200000, DI_OK},
        {"[", 200000, DI_ERR_REQUEST},     {"a|", 100000, DI_OK},        {"\\b", 1000, DI_OK},
        {"\\p{L}", 2000, DI_OK},           {"(?i:k)", 2000, DI_OK},      {"a{1000000}", 1000, DI_OK},
        {"\\ba{99999}", 10, DI_ERR_RANGE},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        char *regex = repeated(cases[i].part, cases[i].n);
        di_gram g;
        di_error err = {0};
        di_gram_init(&g, &(di_grammar_limits){.timeout_ns = (int64_t)60 * 1000000000});
        di_status st = di_gram_regex(&g, regex, strlen(regex), &err);
        if (st != cases[i].status) {
            fail_msg("%zu times '%s': status %d: %s", cases[i].n, cases[i].part, st, err.message);
        }
        di_gram_deinit(&g);
        free(regex);
    }
}

DI_TEST_GROUP(grammar_regex, cmocka_unit_test(reads_the_syntax_of_python), cmocka_unit_test(ignores_case),
              cmocka_unit_test(knows_properties_of_unicode), cmocka_unit_test(decides_anchors),
              cmocka_unit_test(searches_for_patterns), cmocka_unit_test(names_what_is_wrong_and_where),
              cmocka_unit_test(stays_within_its_limits));
