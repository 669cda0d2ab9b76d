/* The public text API: what it gives away, what it leaves alone on failure, and that the header alone is enough to use
 * it (this file includes nothing of src). */
#include "deepinfer/deepinfer.h"
#include "harness.h"

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

static void version_is_the_project_s(void **state) {
    (void)state;
    char line[256] = "", want[64];
    FILE *file = fopen(di_test_source("CMakeLists.txt"), "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) && strncmp(line, "project(", 8) != 0) {
    }
    fclose(file);
    snprintf(want, sizeof want, "VERSION %s ", di_version());
    assert_contains(line, want);
    assert_string_equal(di_version(), DI_VERSION);
}

static void text_goes_both_ways(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    static const char text[] = "Which is larger?\0<think>é\xFF";
    int32_t *ids = NULL;
    size_t n_ids = 0, len = 0;
    char *back = NULL;
    di_error err;
    di_test_ok(di_tokenizer_tokenize(tok, text, sizeof text - 1, false, &ids, &n_ids, &err), &err);
    di_test_ok(di_tokenizer_detokenize(tok, ids, n_ids, false, &back, &len, &err), &err);
    assert_int_equal(len, sizeof text - 1 + 2);
    assert_memory_equal(back, "Which is larger?\0<think>é\uFFFD", len + 1);
    di_free(ids);
    di_free(back);
    di_tokenizer_close(tok);
    di_tokenizer_close(NULL);
}

static void nothing_is_something_to_free(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    int32_t *ids = NULL;
    size_t n_ids = 1, len = 1;
    char *text = NULL;
    di_error err;
    di_test_ok(di_tokenizer_tokenize(tok, "", 0, true, &ids, &n_ids, &err), &err);
    assert_non_null(ids);
    assert_int_equal(n_ids, 0);
    di_test_ok(di_tokenizer_detokenize(tok, ids, 0, false, &text, &len, &err), &err);
    assert_string_equal(text, "");
    assert_int_equal(len, 0);
    di_free(text);
    di_test_ok(di_tokenizer_detokenize(tok, ids, 0, true, &text, NULL, &err), &err);
    assert_string_equal(text, "");
    di_free(text);
    di_free(ids);
    di_free(NULL);
    di_tokenizer_close(tok);
}

static void stream_releases_whole_characters(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_token_stream *stream = NULL;
    const char *text = NULL;
    size_t len = 9;
    di_error err;
    int32_t lead = di_tokenizer_find(tok, "Ã"), tail = di_tokenizer_find(tok, "©"); /* the bytes of é */
    assert_true(lead > 0 && tail > 0);
    di_test_ok(di_token_stream_create(&stream, tok, &err), &err);
    for (int round = 0; round < 2; round++) {
        di_test_ok(di_token_stream_push(stream, lead, &text, &len, &err), &err);
        assert_string_equal(text, "");
        assert_int_equal(len, 0);
        di_test_ok(di_token_stream_push(stream, tail, &text, &len, &err), &err);
        assert_string_equal(text, "é");
        di_test_ok(di_token_stream_push(stream, lead, &text, &len, &err), &err);
        di_test_ok(di_token_stream_flush(stream, &text, &len, &err), &err);
        assert_string_equal(text, "\uFFFD");
        assert_int_equal(len, 3);
    }
    di_token_stream_destroy(stream);
    di_token_stream_destroy(NULL);
    di_tokenizer_close(tok);
}

static void failure_leaves_outputs_alone(void **state) {
    (void)state;
    di_tokenizer *tok = NULL;
    di_error err = {0};
    assert_int_equal(di_tokenizer_open(&tok, di_test_tmp("absent.json"), &err), DI_ERR_NOT_FOUND);
    assert_contains(err.message, "absent.json");
    assert_int_equal(di_tokenizer_parse(&tok, "{}", 2, &err), DI_ERR_FORMAT);
    assert_string_equal(err.message, "'model' is missing");
    assert_int_equal(di_tokenizer_parse(&tok, "{}", 2, NULL), DI_ERR_FORMAT); /* the error object is optional */
    assert_null(tok);
}

DI_TEST_GROUP(text_api, cmocka_unit_test(version_is_the_project_s), cmocka_unit_test(text_goes_both_ways),
              cmocka_unit_test(nothing_is_something_to_free), cmocka_unit_test(stream_releases_whole_characters),
              cmocka_unit_test(failure_leaves_outputs_alone));
