/* `deepinfer tokenize` as a script sees it: lines in, lines out, the exit status and what goes to standard error. */
#include "program.h"

static char shown[4 << 20]; /* what the last command printed */

/* Runs the program with a shell's redirections; its output is in shown. Returns the exit status. */
static int run_program(const char *args, const char *input) {
    const char *path = di_test_write("tokenize-input", input);
    return di_test_shell(shown, sizeof shown, "'%s' tokenize %s <'%s' 2>&1", DI_TEST_PROGRAM, args, path);
}

static void lines_go_both_ways(void **state) {
    (void)state;
    /* Ids and text of the model's evaluation prompts. */
    assert_int_equal(run_program("", "{\"text\":\"What is 8 x 3? Think step by step.\"}\n"
                                     "{\"ids\":[434,310,223,26,689,223,21,33,3416,1138,488,1138,16]}\n"
                                     "\n"
                                     "{\"text\":\"\"}\n"
                                     "{\"ids\":[]}"),
                     0);
    assert_string_equal(shown, "{\"ids\":[434,310,223,26,689,223,21,33,3416,1138,488,1138,16]}\n"
                               "{\"text\":\"What is 8 x 3? Think step by step.\"}\n"
                               "{\"ids\":[]}\n"
                               "{\"text\":\"\"}\n");
}

static void added_tokens_can_be_plain_or_left_out(void **state) {
    (void)state;
    assert_int_equal(run_program("", "{\"text\":\"<think>\"}\n{\"ids\":[0,6085],\"skip_special\":true}\n"
                                     "{\"text\":\"<think>\",\"plain\":true}\n"),
                     0);
    assert_contains(shown, "{\"ids\":[6102]}\n{\"text\":\"<｜Assistant｜>\"}\n{\"ids\":[");
    assert_null(strstr(strstr(shown, "\"text\""), "6102"));
}

static void bad_lines_have_their_own_errors(void **state) {
    (void)state;
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"nonsense", "the line is not JSON"},
        {"{\"text\":\"\xFF\"}", "the line is not JSON"},
        {"[]", "the line must be an object, found array"},
        {"{}", "must have 'text' or 'ids', found neither"},
        {"{\"text\":\"a\",\"ids\":[]}", "must have 'text' or 'ids', found both"},
        {"{\"text\":7}", "'text' must be a string, found integer"},
        {"{\"ids\":7}", "'ids' must be a list of integers, found integer"},
        {"{\"ids\":[3,\"a\"]}", "'ids[1]' must be an integer, found string"},
        {"{\"ids\":[3,6144]}", "'ids[1]' is 6144, the vocabulary has 0 to 6143"},
        {"{\"ids\":[-1]}", "'ids[0]' is -1, the vocabulary has 0 to 6143"},
        {"{\"text\":\"a\",\"plain\":1}", "'plain' must be true or false"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char input[256];
        snprintf(input, sizeof input, "%s\n{\"ids\":[3]}\n", cases[i].line);
        assert_int_equal(run_program("", input), 1);
        assert_int_equal(strncmp(shown, "{\"error\":{\"type\":\"invalid_request_error\",\"message\":", 51), 0);
        assert_contains(shown, cases[i].message);
        assert_contains(shown, "}}\n{\"text\":\"!\"}\n"); /* the other line still ran */
    }
}

static void a_missing_model_is_status_3(void **state) {
    (void)state;
    char args[2048];
    snprintf(args, sizeof args, "--model '%s'", di_test_tmp("no-model"));
    assert_int_equal(run_program(args, ""), 3);
    assert_contains(shown, "no-model/tokenizer.json");
}

static void a_mebibyte_without_spaces_is_one_line(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    static const char head[] = "{\"text\":\"", tail[] = "\"}\n";
    char *input = malloc(N + sizeof head + sizeof tail);
    assert_non_null(input);
    memcpy(input, head, sizeof head - 1);
    memset(input + sizeof head - 1, 'a', N);
    memcpy(input + sizeof head - 1 + N, tail, sizeof tail);
    assert_int_equal(run_program("", input), 0);
    assert_int_equal(strncmp(shown, "{\"ids\":[", 8), 0);
    assert_string_equal(strchr(shown, ']'), "]}\n");
    free(input);
}

DI_TEST_GROUP(tokenize, cmocka_unit_test(lines_go_both_ways), cmocka_unit_test(added_tokens_can_be_plain_or_left_out),
              cmocka_unit_test(bad_lines_have_their_own_errors), cmocka_unit_test(a_missing_model_is_status_3),
              cmocka_unit_test(a_mebibyte_without_spaces_is_one_line));
