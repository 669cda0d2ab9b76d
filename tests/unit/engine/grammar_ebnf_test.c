/* EBNF grammars: what the notation means, where faults are reported, lists of choices. Right values are those of the
 * notation's description (GBNF and xgrammar's dialect of it); lines and columns are counted by hand. */
#include "grammar_walk.h"
#include "harness.h"

typedef struct ebnf_case {
    const char *grammar;
    const char *in[6], *out[6]; /* up to NULL */
} ebnf_case;

static void reads_the_notation(void **state) {
    (void)state;
    static const ebnf_case cases[] = {
        {"root ::= \"a\"\n  | b # or\n\n  \"c\"\nb ::= \"b\"", {"a", "bc"}, {"b", "ac"}},
        {"\n# first\r\nroot::=x-1.y\r\nx-1.y ::= \"k\"", {"k"}, {"x"}},
        {"root\n::= \"a\"", {"a"}, {""}},
        {"root ::= | \"a\" root", {"", "a", "aaa"}, {"b"}},
        {"root ::= () \"a\" ( \"b\" | ) ", {"a", "ab"}, {"b"}},
        {"root ::= \"\\x1F600\" \"\\e\\a\\?\"", {"😀\033\a?"}, {"\x1F"}},
        {"root ::= [a-c-]{2} [^\\]\\\\] [\\^\\.\\/]", {"a-x^", "--é."}, {"ab]^", "abx!"}},
        {"root ::= [-a] [a-] [+--]", {"-a+", "a--"}, {"b--"}},
        {"root ::= [^]", {"a", "\n", "😀"}, {"", "ab"}},
        {"root ::= [] | \"b\"", {"b"}, {""}},
        {"root ::= \"a\" { 2 , 3 } \"b\" {1} \"c\"{0,} \"d\"{1,-1}", {"aabd", "aaabccdd"}, {"abd", "aab"}},
        {"root ::= (\"a\" | \"b\"){0}", {""}, {"a"}},
        {"root ::= b (= \"x\")\nb ::= \"b\" (=[a-z] root | \"k\")", {"b"}, {"bx"}},
        {"root ::= e\ne ::= e \"+\" n | n\nn ::= [0-9]", {"1", "1+2+3"}, {"1+", "+1"}},
        {"root ::= a b\na ::= b? a? \"x\"\nb ::= \"\"", {"x", "xx"}, {""}},
        {"root ::= Regex(\"[ab]{2}\\\\d\") \"!\"", {"ab1!"}, {"a1!"}},
        {"root ::= Token \"a\"\nToken ::= \"t\"", {"ta"}, {"a"}},
        {"root[capture] ::= x\nx[capture=\"n\"] ::= \"a\" [b]", {"ab"}, {"a"}},
        {"root ::= \"\" unused\nunused ::= \"u\"\nnever ::= never", {"u"}, {""}},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        const ebnf_case *c = &cases[i];
        di_gram g;
        di_error err;
        di_gram_init(&g, NULL);
        if (di_gram_ebnf(&g, c->grammar, strlen(c->grammar), &err)) {
            fail_msg("'%s': %s", c->grammar, err.message);
        }
        const di_node *node = g.rules[g.root].node;
        for (int k = 0; k < 6 && c->in[k]; k++) {
            if (!walk_matches(&g, node, c->in[k], strlen(c->in[k]))) {
                fail_msg("'%s' doesn't match '%s'", c->grammar, c->in[k]);
            }
        }
        for (int k = 0; k < 6 && c->out[k]; k++) {
            if (walk_matches(&g, node, c->out[k], strlen(c->out[k]))) {
                fail_msg("'%s' matches '%s'", c->grammar, c->out[k]);
            }
        }
        di_gram_deinit(&g);
    }
}

static void reads_a_zero_byte_in_a_string(void **state) {
    (void)state;
    static const char grammar[] = "root ::= \"a\\0b\"";
    di_gram g;
    di_error err;
    di_gram_init(&g, NULL);
    di_test_ok(di_gram_ebnf(&g, grammar, strlen(grammar), &err), &err);
    assert_true(walk_matches(&g, g.rules[g.root].node, "a\0b", 3));
    di_gram_deinit(&g);
}

static void names_what_is_wrong_and_where(void **state) {
    (void)state;
    static const struct {
        const char *grammar, *part;
        int line, column;
    } cases[] = {
        {"root ::= \"a", "no closing '\"'", 1, 10},
        {"root ::= \"é\" \"a\nb\"", "no closing '\"'", 1, 14},
        {"root ::= [a", "no closing ']'", 1, 10},
        {"root ::= \"a\"\n  | [z-a]", "U+007A to U+0061", 2, 6},
        {"root ::= [\\d]", "'\\d'", 1, 11},
        {"root ::= \"\\q\"", "'q'", 1, 11},
        {"root ::= \"\\u12\"", "4 hexadecimal digits", 1, 11},
        {"root ::= \"\\ud800\"", "no code point", 1, 11},
        {"root ::= \"\\x110000\"", "no code point", 1, 11},
        {"root ::= (\"a\" | \"b\"\nx ::= \"c\"", "expected ')' for the '(' of line 1, column 10", 2, 1},
        {"root ::= \"a\")", "found ')'", 1, 13},
        {"root ::= \"a\"{x}", "expected a count, found 'x'", 1, 14},
        {"root ::= \"a\"{3,2}", "at least 3 and at most 2", 1, 13},
        {"root ::= \"a\"{1;", "expected '}'", 1, 15},
        {"root ::= \"a\"**", "found '*'", 1, 14},
        {"root ::= \"a\"\nx = \"b\"", "found '='", 2, 3},
        {"root ::= b\n\nc ::= \"c\"", "'b' is not defined", 1, 10},
        {"root ::= \"a\"\nroot ::= \"b\"", "'root' is defined twice", 2, 1},
        {"root ::= \"a\" b ::= \"c\"", "'b' doesn't begin its line", 1, 14},
        {"root ::=\nb ::= \"b\"", "'root' has no body", 1, 1},
        {"root ::= ", "'root' has no body", 1, 1},
        {"::= \"a\"", "name of a rule", 1, 1},
        {"root \"a\"", "expected '::='", 1, 6},
        {"root ::= 'a'", "found '''", 1, 10},
        {"root ::= TagDispatch((\"a\", b))", "macro 'TagDispatch'", 1, 10},
        {"root ::= \"a\"\n | Regex(\"(?=a)\")", "look-ahead", 2, 4},
        {"root ::= Token (\"a\")\nToken ::= \"t\"", "macro 'Token'", 1, 10},
        {"root ::= Regex(x)", "expected a string", 1, 16},
        {"root[max_tokens=3] ::= \"a\"", "'max_tokens'", 1, 6},
        {"root ::= \"a\" (= \"b\"", "'(=' of line 1, column 14", 1, 20},
        {"root ::= \"a\" (= \"b\") \"c\"", "expected an element", 1, 22},
        {"root ::= \"\xFF\"", "no UTF-8", 1, 11},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_gram g;
        di_error err = {0};
        char where[48];
        snprintf(where, sizeof where, "line %d, column %d:", cases[i].line, cases[i].column);
        di_gram_init(&g, NULL);
        di_status st = di_gram_ebnf(&g, cases[i].grammar, strlen(cases[i].grammar), &err);
        if (st != DI_ERR_REQUEST || !strstr(err.message, cases[i].part) || !strstr(err.message, where)) {
            fail_msg("'%s': status %d, '%s', expected '%s ... %s'", cases[i].grammar, st, err.message, where,
                     cases[i].part);
        }
        di_gram_deinit(&g);
    }
    di_gram g;
    di_error err;
    di_gram_init(&g, NULL);
    assert_int_equal(di_gram_ebnf(&g, "main ::= \"a\"", 12, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "no rule 'root'");
    di_gram_deinit(&g);
}

static void repeat(di_strbuf *out, const char *head, const char *part, size_t n, const char *tail) {
    di_strbuf_puts(out, head);
    for (size_t i = 0; i < n; i++)
        di_strbuf_puts(out, part);
    di_strbuf_puts(out, tail);
    assert_false(out->failed);
}

static void stays_within_its_limits(void **state) {
    (void)state;
    static const struct {
        const char *head, *part;
        size_t n;
        const char *tail;
        di_status status;
    } cases[] = {
        {"root ::= ", "(", 100000, "", DI_ERR_RANGE},
        {"root ::= ", "root[a", 100000, "]", DI_OK},
        {"root ::= a", " | a", 100000, "\na ::= \"a\"", DI_OK},
        {"root ::= a", " # a\n a", 100000, "\na ::= \"a\"", DI_OK},
        {"root ::= \"a\"{2147483647}", "", 0, "", DI_OK},
        {"root ::= \"a\"{2147483648}", "", 0, "", DI_ERR_RANGE},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf grammar = {0};
        repeat(&grammar, cases[i].head, cases[i].part, cases[i].n, cases[i].tail);
        di_gram g;
        di_error err = {0};
        di_gram_init(&g, NULL);
        di_status st = di_gram_ebnf(&g, grammar.data, grammar.len, &err);
        if (st != cases[i].status) {
            fail_msg("%zu times '%s': status %d: %s", cases[i].n, cases[i].part, st, err.message);
        }
        di_gram_deinit(&g);
        di_strbuf_deinit(&grammar);
    }
}

static void takes_one_of_the_choices(void **state) {
    (void)state;
    static const char json[] = "[\"yes\",\"no\",\"yesterday\",\"ye\",\"\",\"né\",\"n\xC3\xA8\",\"no\",\"好\",\"奻\"]";
    static const char *const out[] = {"y", "yest", "yesy", "n", "n\xC3", "x", "好好"};
    di_json *choices;
    di_error err;
    di_gram g;
    di_gram_init(&g, NULL);
    di_test_ok(di_json_parse(&choices, json, strlen(json), &err), &err);
    di_test_ok(di_gram_choice(&g, choices, &err), &err);
    const di_node *node = g.rules[g.root].node;
    for (size_t i = 0; i < di_json_array_len(choices); i++) {
        size_t len;
        const char *s = di_json_str(di_json_at(choices, i), &len);
        if (!walk_matches(&g, node, s, len)) {
            fail_msg("'%s' isn't taken", s);
        }
    }
    for (size_t i = 0; i < DI_COUNT(out); i++) {
        if (walk_matches(&g, node, out[i], strlen(out[i]))) {
            fail_msg("'%s' is taken", out[i]);
        }
    }
    di_json_free(choices);
    di_gram_deinit(&g);
}

static void refuses_choices_that_are_none(void **state) {
    (void)state;
    static const struct {
        const char *json, *part;
    } cases[] = {{"[]", "found none"}, {"\"a\"", "found string"}, {"[\"a\",1]", "choice[1]: expected a string"}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_json *choices;
        di_error err;
        di_gram g;
        di_gram_init(&g, NULL);
        di_test_ok(di_json_parse(&choices, cases[i].json, strlen(cases[i].json), &err), &err);
        assert_int_equal(di_gram_choice(&g, choices, &err), DI_ERR_REQUEST);
        assert_contains(err.message, cases[i].part);
        di_json_free(choices);
        di_gram_deinit(&g);
    }
}

DI_TEST_GROUP(grammar_ebnf, cmocka_unit_test(reads_the_notation), cmocka_unit_test(reads_a_zero_byte_in_a_string),
              cmocka_unit_test(names_what_is_wrong_and_where), cmocka_unit_test(stays_within_its_limits));
DI_TEST_GROUP(grammar_choice, cmocka_unit_test(takes_one_of_the_choices),
              cmocka_unit_test(refuses_choices_that_are_none));
