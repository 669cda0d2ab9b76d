/* `deepinfer grammar` as a script sees it: grammars of options and of lines, recorded rows, errors, the exit status. */
#include "program.h"

#include "base/base.h"

static char shown[1 << 20]; /* what the last command printed */

/* Runs the program with options on a file; its output is in shown. Returns the exit status. */
static int run_on_file(const char *options, const char *path) {
    return di_test_shell(shown, sizeof shown, "'%s' grammar %s <'%s' 2>&1", DI_TEST_PROGRAM, options, path);
}

static int run_on(const char *options, const char *input) {
    return run_on_file(options, di_test_write("grammar-input", input));
}

static void lines_follow_the_grammar_of_an_option(void **state) {
    (void)state;
    char options[1024];
    assert_int_equal(run_on("--regex '[ab]+'", "{\"text\":\"abba\"}\n\n{\"text\":\"abc\"}\n{\"text\":\"\"}\n"), 0);
    assert_string_equal(shown, "{\"accept\":true}\n{\"accept\":false}\n{\"accept\":false}\n");
    snprintf(options, sizeof options, "--json-schema '%s'",
             di_test_write("grammar-schema", "{\"type\":\"boolean\"}\n"));
    assert_int_equal(run_on(options, "{\"text\":\"true\"}\n{\"text\":\"0\"}"), 0);
    assert_string_equal(shown, "{\"accept\":true}\n{\"accept\":false}\n");
    snprintf(options, sizeof options, "--ebnf '%s'",
             di_test_write("grammar-ebnf", "root ::= \"a\" root \"b\" | \"\"\n"));
    assert_int_equal(run_on(options, "{\"text\":\"aabb\"}\n{\"text\":\"aab\"}\n"), 0);
    assert_string_equal(shown, "{\"accept\":true}\n{\"accept\":false}\n");
}

static void lines_may_have_their_own(void **state) {
    (void)state;
    assert_int_equal(run_on("",
                            "{\"regex\":\"a|b\",\"text\":\"b\"}\n{\"schema\":{\"enum\":[1,null]},\"text\":\"null\"}\n"
                            "{\"schema\":true,\"text\":\"[]\"}\n{\"ebnf\":\"root ::= [x-z]\",\"text\":\"w\"}\n"),
                     0);
    assert_string_equal(shown, "{\"accept\":true}\n{\"accept\":true}\n{\"accept\":true}\n{\"accept\":false}\n");
    /* One goes before the option's. */
    assert_int_equal(run_on("--regex x", "{\"regex\":\"y\",\"text\":\"y\"}\n{\"text\":\"x\"}\n"), 0);
    assert_string_equal(shown, "{\"accept\":true}\n{\"accept\":true}\n");
    assert_int_equal(run_on("", ""), 0);
    assert_string_equal(shown, "");
}

static void no_model_is_opened(void **state) {
    (void)state;
    assert_int_equal(run_on("--model /nowhere --regex a", "{\"text\":\"a\"}\n"), 0);
    assert_string_equal(shown, "{\"accept\":true}\n");
}

static void bad_lines_have_their_own_errors(void **state) {
    (void)state;
    static const struct {
        const char *line, *message, *param;
    } cases[] = {
        {"nonsense", "the line is not JSON", "null"},
        {"[]", "array, expected an object with 'text'", "null"},
        {"{}", "field 'text': absent, expected a string", "\"text\""},
        {"{\"text\":7,\"regex\":\"a\"}", "field 'text': integer, expected a string", "\"text\""},
        {"{\"text\":\"a\"}", "no grammar", "null"},
        {"{\"text\":\"a\",\"regex\":\"a\",\"ebnf\":\"b\"}", "only one of", "\"ebnf\""},
        {"{\"text\":\"a\",\"regex\":1}", "field 'regex': integer, expected a string", "\"regex\""},
        {"{\"text\":\"a\",\"regex\":\"(a\"}", "", "\"regex\""},
        {"{\"text\":\"a\",\"schema\":7}", "", "\"schema\""},
        {"{\"text\":\"a\",\"ebnf\":\"root ::=\"}", "", "\"ebnf\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char input[256];
        snprintf(input, sizeof input, "%s\n{\"regex\":\"b\",\"text\":\"b\"}\n", cases[i].line);
        assert_int_equal(run_on("", input), 1);
        di_test_assert_line_error(shown, cases[i].message, cases[i].param, "{\"accept\":true}\n");
    }
}

static void a_refused_option_is_the_answer_to_its_lines(void **state) {
    (void)state;
    assert_int_equal(run_on("--regex '(?=a)'", "{\"text\":\"a\"}\n{\"regex\":\"b\",\"text\":\"b\"}\n"), 1);
    assert_contains(shown, "{\"error\":{\"message\":\"");
    assert_contains(shown, "}}\n{\"accept\":true}\n");
    assert_int_equal(run_on("--regex a --ebnf b", ""), 2);
    assert_contains(shown, "only one of --json-schema, --regex and --ebnf");
    assert_int_equal(run_on("--json-schema /nowhere/schema.json", ""), 2);
    assert_contains(shown, "/nowhere/schema.json");
}

DI_TEST_GROUP(grammar_command, cmocka_unit_test(lines_follow_the_grammar_of_an_option),
              cmocka_unit_test(lines_may_have_their_own), cmocka_unit_test(no_model_is_opened),
              cmocka_unit_test(bad_lines_have_their_own_errors),
              cmocka_unit_test(a_refused_option_is_the_answer_to_its_lines));
