/* `deepinfer parse` as a script sees it: the recorded rows as they are, defaults, errors of single lines, the exit
 * status. */
#include "program.h"

#include "base/base.h"

static char shown[4 << 20]; /* what the last command printed */

/* Runs the program on a file; its output is in shown. Returns the exit status. */
static int run_on_file(const char *path) {
    return di_test_shell(shown, sizeof shown, "'%s' parse <'%s' 2>&1", DI_TEST_PROGRAM, path);
}

static int run_on(const char *input) {
    return run_on_file(di_test_write("parse-input", input));
}

/* The next line of *at as JSON; *at moves behind it. */
static di_json *next_line(const char **at) {
    const char *end = strchr(*at, '\n');
    assert_non_null(end);
    di_json *value = NULL;
    di_error err;
    di_test_ok(di_json_parse(&value, *at, (size_t)(end - *at), &err), &err);
    *at = end + 1;
    return value;
}

static void recorded_rows_give_their_messages(void **state) {
    (void)state;
    const char *path = di_test_data("vectors/chat_parse.jsonl");
    di_strbuf file = {0};
    di_error err;
    di_test_ok(di_file_read(path, 16 << 20, &file, &err), &err);
    assert_int_equal(run_on_file(path), 1); /* the file's first line describes it and is no output of a model */
    const char *row_at = file.data, *line_at = shown;
    int n_rows = 0, n_equal = 0;
    while (*row_at != '\0') {
        di_json *row = next_line(&row_at), *line = next_line(&line_at);
        const char *kind = di_json_str(di_json_get(row, "kind"), NULL);
        if (kind == NULL) {
            assert_non_null(di_json_get(line, "error"));
        } else if (strcmp(kind, "parse") == 0) {
            const di_json *expect = di_json_get(row, "expect");
            bool is_free = di_json_bool(di_json_get(row, "filler")) || di_json_bool(di_json_get(row, "quirk"));
            assert_true(di_json_equal(di_json_get(line, "finish_reason"), di_json_get(expect, "finish_reason")));
            bool is_equal = di_json_equal(di_json_get(line, "message"), di_json_get(expect, "message"));
            if (!is_equal && !is_free) {
                fail_msg("%s differs", di_json_str(di_json_get(row, "id"), NULL));
            }
            n_rows++;
            n_equal += is_equal;
        } else {
            assert_non_null(di_json_get(line, "message"));
        }
        di_json_free(row);
        di_json_free(line);
    }
    assert_int_equal(*line_at, '\0');
    assert_int_equal(n_rows, 166);
    assert_in_range(n_equal, 166 - 21 - 2, 166);
    di_strbuf_deinit(&file);
}

static void what_is_not_given_has_a_default(void **state) {
    (void)state;
    assert_int_equal(run_on("{\"text\":\"\\n\\nhi\"}\n"
                            "\n"
                            "{\"text\":\"a\",\"splits\":null,\"options\":null,\"finish\":null,\"other\":1}\n"
                            "{\"text\":\"aXb\",\"options\":{\"stop\":\"X\"},\"finish\":\"length\"}\n"
                            "{\"text\":\"a\",\"finish\":\"length\"}"),
                     0);
    assert_string_equal(shown, "{\"message\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}\n"
                               "{\"message\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}\n"
                               "{\"message\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}\n"
                               "{\"message\":{\"content\":\"a\"},\"finish_reason\":\"length\"}\n");
    assert_int_equal(run_on(""), 0);
    assert_string_equal(shown, "");
}

static void bad_lines_have_their_own_errors(void **state) {
    (void)state;
    static const struct {
        const char *line, *message, *param;
    } cases[] = {
        {"nonsense", "the line is not JSON", "null"},
        {"{\"text\":\"\xFF\"}", "the line is not JSON", "null"},
        {"[]", "array, expected an object with 'text'", "null"},
        {"{}", "field 'text': absent, expected a string", "\"text\""},
        {"{\"text\":7}", "field 'text': integer, expected a string", "\"text\""},
        {"{\"text\":\"a\",\"options\":[]}", "field 'options': array, expected an object", "\"options\""},
        {"{\"text\":\"a\",\"options\":{\"initial\":\"x\"}}",
         "field 'options.initial': 'x', expected null, 'reasoning_start'", "\"options.initial\""},
        {"{\"text\":\"a\",\"options\":{\"parse_tool_calls\":1}}",
         "field 'options.parse_tool_calls': integer, expected true or false", "\"options.parse_tool_calls\""},
        {"{\"text\":\"a\",\"options\":{\"stop\":[1]}}", "field 'options.stop': integer, expected strings only",
         "\"options.stop\""},
        {"{\"text\":\"abc\",\"splits\":[2,1]}", "field 'splits': offset 1, expected rising offsets up to 3",
         "\"splits\""},
        {"{\"text\":\"abc\",\"splits\":[4]}", "field 'splits': offset 4, expected rising offsets up to 3",
         "\"splits\""},
        {"{\"text\":\"abc\",\"splits\":[-1]}", "field 'splits': offset -1", "\"splits\""},
        {"{\"text\":\"abc\",\"splits\":[\"1\"]}", "field 'splits': string, expected byte offsets", "\"splits\""},
        {"{\"text\":\"a\",\"finish\":\"eos\"}", "field 'finish': 'eos', expected null, 'stop'", "\"finish\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char input[256];
        snprintf(input, sizeof input, "%s\n{\"text\":\"b\"}\n", cases[i].line);
        assert_int_equal(run_on(input), 1);
        di_test_assert_line_error(shown, cases[i].message, cases[i].param, "{\"message\":{\"content\":\"b\"},");
    }
}

static void a_full_disk_is_status_4(void **state) {
    (void)state;
    int status =
        di_test_shell(shown, sizeof shown, "echo '{\"text\":\"a\"}' | '%s' parse 2>&1 >/dev/full", DI_TEST_PROGRAM);
    assert_int_equal(status, 4);
    assert_contains(shown, "the disk is full");
}

DI_TEST_GROUP(parse_command, cmocka_unit_test(recorded_rows_give_their_messages),
              cmocka_unit_test(what_is_not_given_has_a_default), cmocka_unit_test(bad_lines_have_their_own_errors),
              cmocka_unit_test(a_full_disk_is_status_4));
