/* `deepinfer bench`: the choice of rows and what it refuses. No figure is judged here: tests don't time. */
#include "program.h"

static char out[65536];

/* Runs "deepinfer bench <args>" with standard error beside standard output; returns the exit status. */
static int bench(const char *args) {
    return di_test_shell(out, sizeof out, "'%s' bench %s 2>&1", DI_TEST_PROGRAM, args);
}

static int count_rows(void) {
    int n = 0;
    for (const char *at = out; (at = strstr(at, "\"bench\":")) != NULL; at++)
        n++;
    return n;
}

static void only_the_rows_named_are_measured(void **state) {
    (void)state;
    assert_int_equal(bench("tokenizer encode --json"), 0);
    assert_contains(out, "\"name\":\"encode_code\"");
    assert_contains(out, "\"name\":\"encode_prose\"");
    assert_int_equal(count_rows(), 2);
    assert_int_equal(bench("tokenizer encode_prose decode --json"), 0);
    assert_contains(out, "\"name\":\"encode_prose\"");
    assert_contains(out, "\"name\":\"decode\"");
    assert_int_equal(count_rows(), 2);
}

static void a_row_that_is_not_there_is_refused(void **state) {
    (void)state;
    /* a beginning counts in whole words */
    static const char *const args[] = {"tokenizer enc", "tokenizer encode_pros", "tokenizer decode_1", "tokenizer ''",
                                       "batch nothing"};
    for (size_t i = 0; i < sizeof args / sizeof args[0]; i++) {
        assert_int_equal(bench(args[i]), 2);
        assert_contains(out, "is no row nor the first words of one");
    }
    assert_int_equal(bench("tokenise"), 2);
    assert_contains(out, "did you mean 'tokenizer'?");
    assert_int_equal(bench("tokenizer decode --batch-invariant maybe"), 2);
    assert_contains(out, "--batch-invariant: found 'maybe'");
}

static void a_server_is_measured_by_its_clients(void **state) {
    (void)state;
    static const char small[] = "--requests 6 --prompt-tokens 4 --output-tokens 5 --max-model-len 128 --json";
    char args[256];
    snprintf(args, sizeof args, "serve closed --clients 3 %s", small);
    assert_int_equal(bench(args), 0);
    assert_contains(out, "\"name\":\"closed_3_ttft_p50\"");
    assert_contains(out, "\"name\":\"closed_3_throughput\"");
    assert_int_equal(count_rows(), 6);
    snprintf(args, sizeof args, "serve ttft goodput refused --rate 200 %s", small);
    assert_int_equal(bench(args), 0);
    assert_contains(out, "\"name\":\"ttft_p99\"");
    assert_contains(out, "\"name\":\"goodput\"");
    assert_contains(out, "\"name\":\"refused\",\"value\":0,");
    assert_int_equal(count_rows(), 5);
}

static void a_server_that_cannot_be_measured_is_an_error(void **state) {
    (void)state;
    assert_int_equal(bench("serve ttft --url http://127.0.0.1:1/v1/"), 1);
    assert_contains(out, "'http://127.0.0.1:1/v1/models': ");
    /* the C API beside it is there only in one process */
    assert_int_equal(bench("serve serve_cost --url http://127.0.0.1:1"), 2);
    assert_contains(out, "is no row nor the first words of one");
    assert_int_equal(bench("serve --dummy-layers 1"), 2);
    assert_contains(out, "no text to stream");
}

DI_TEST_GROUP(bench, cmocka_unit_test(only_the_rows_named_are_measured),
              cmocka_unit_test(a_row_that_is_not_there_is_refused),
              cmocka_unit_test(a_server_is_measured_by_its_clients),
              cmocka_unit_test(a_server_that_cannot_be_measured_is_an_error));
