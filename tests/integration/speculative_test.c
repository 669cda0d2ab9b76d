/* Speculative decoding as the program shows it: what --stats tells of drafts, and rows of `bench speculative` that need
 * no model. No figure is judged. */
#include "program.h"

static char out[65536];

/* Runs "deepinfer <args>" with standard error beside standard output. */
static void run(const char *args) {
    assert_int_equal(di_test_shell(out, sizeof out, "'%s' %s 2>&1", DI_TEST_PROGRAM, args), 0);
}

static void statistics_tell_of_drafts(void **state) {
    (void)state;
    run("run --raw 'Once upon a time' --temperature 0 --max-tokens 40 --ignore-eos --stats --draft-policy fixed");
    assert_contains(out, "tokens a verification; drafting ");
    assert_contains(out, " by the model of step times\n");
    assert_contains(out, "drafts that held with all before them: 1. ");
    assert_contains(out, ", 5. ");
    assert_contains(out, "confidences: off by ");
    assert_null(strstr(out, "rejection: "));
}

static void rejection_tells_what_it_expected(void **state) {
    (void)state;
    run("run --raw 'Once upon a time' --seed 5 --max-tokens 40 --ignore-eos --stats --draft-policy fixed --accept "
        "rejection");
    const char *at = strstr(out, "rejection: ");
    long long n_tested;
    double expected, bound;
    assert_non_null(at);
    assert_int_equal(sscanf(at,
                            "rejection: %lld drafts tested, %lf %% expected to hold by their distributions; shared "
                            "noise would have kept at least %lf %%",
                            &n_tested, &expected, &bound),
                     3);
    assert_true(n_tested > 0);
    assert_true(bound > 0 && bound <= expected && expected <= 100);
}

static void without_drafts_nothing_is_told(void **state) {
    (void)state;
    run("run --raw 'Once upon a time' --temperature 0 --max-tokens 8 --stats --draft-tokens 0");
    assert_contains(out, "tokens: ");
    assert_null(strstr(out, "drafts"));
    assert_null(strstr(out, "confidences"));
}

static void plans_are_timed_without_a_model(void **state) {
    (void)state;
    run("bench speculative plan_256 --json --model /dev/null/none");
    assert_contains(out, "\"name\":\"plan_256\"");
    assert_contains(out, "\"limit\":15,\"limit_kind\":\"most_allowed\"");
}

DI_TEST_GROUP(speculative, cmocka_unit_test(statistics_tell_of_drafts),
              cmocka_unit_test(rejection_tells_what_it_expected), cmocka_unit_test(without_drafts_nothing_is_told),
              cmocka_unit_test(plans_are_timed_without_a_model));
