/* Options: defaults, flags, environment, refusals with their words, and the texts made from the table. */
#include "harness.h"

#include "base/base.h"

/* Reads "flag flag ..." (ending in NULL) and an environment (ending in NULL) as one command. */
static di_status read_options(di_options *opt, unsigned command, const char *const *flags, const char *const *env,
                              di_strbuf *warnings, di_error *err) {
    static char *const no_env[] = {NULL};
    int argc = 0;
    while (flags && flags[argc]) {
        argc++;
    }
    return di_options_read(opt, command, argc, (char *const *)(uintptr_t)flags,
                           env ? (char *const *)(uintptr_t)env : no_env, warnings, err);
}

#define FLAGS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define ENV(...) ((const char *const[]){__VA_ARGS__, NULL})

static void defaults_are_the_documented_ones(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_RUN, NULL, NULL, NULL, &err), &err);
    assert_null(opt.model);
    assert_string_equal(opt.backend, "auto");
    assert_int_equal(opt.threads, 0);
    assert_string_equal(opt.log_level, "warn");
    assert_true(opt.temperature == 1.0);
    assert_true(opt.top_p == 1.0);
    assert_int_equal(opt.top_k, -1);
    assert_false(opt.ignore_eos);
    assert_int_equal(opt.logprobs, -1);
    assert_string_equal(opt.logprobs_mode, "raw");
    assert_string_equal(opt.reasoning, "none");
    assert_string_equal(opt.numerics, "faithful");
    assert_string_equal(opt.replay, "off");
    assert_int_equal(opt.replay_keep, 0);
    assert_string_equal(opt.api, "chat");
    assert_int_equal(opt.stop.n, 0);
    assert_int_equal(opt.args.n, 0);
    assert_false(opt.is_help);
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        assert_false(di_options_is_set(&opt, (di_option_id)id));
    }
    di_options_deinit(&opt);
}

static void flags_take_both_forms(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_RUN,
                            FLAGS("--temperature", "0.5", "--top-k=-1", "hello", "--raw", "--seed=-1", "--stop", "a",
                                  "--stop=b=c", "--ignore-eos=false", "--reasoning", "050", "--kv-memory=2G", "-", "--",
                                  "--raw"),
                            NULL, NULL, &err),
               &err);
    assert_true(opt.temperature == 0.5);
    assert_int_equal(opt.top_k, -1);
    assert_true(opt.raw);
    assert_true(opt.seed == UINT64_MAX);
    assert_int_equal(opt.stop.n, 2);
    assert_string_equal(opt.stop.items[0], "a");
    assert_string_equal(opt.stop.items[1], "b=c");
    assert_false(opt.ignore_eos);
    assert_string_equal(opt.reasoning, "50");
    assert_int_equal(opt.kv_memory, 2LL << 30);
    assert_int_equal(opt.args.n, 3);
    assert_string_equal(opt.args.items[0], "hello");
    assert_string_equal(opt.args.items[1], "-");
    assert_string_equal(opt.args.items[2], "--raw");
    assert_true(di_options_is_set(&opt, DI_OPT_seed));
    assert_int_equal(opt.source[DI_OPT_seed], DI_SOURCE_FLAG);
    assert_false(di_options_is_set(&opt, DI_OPT_top_p));
    di_options_deinit(&opt);
}

static void the_last_flag_wins(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_RUN, FLAGS("--top-k", "5", "--top-k", "6"), NULL, NULL, &err), &err);
    assert_int_equal(opt.top_k, 6);
    di_options_deinit(&opt);
}

static void seeds_are_taken_modulo_2_to_64(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t seed;
    } cases[] = {
        {"0", 0},
        {"18446744073709551615", UINT64_MAX},
        {"18446744073709551616", 0},
        {"-18446744073709551615", 1},
        {"100000000000000000000000000000000000000", 687399551400673280u},
        {"-1", UINT64_MAX},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_options opt;
        di_error err;
        di_test_ok(read_options(&opt, DI_COMMAND_RUN, FLAGS("--seed", cases[i].text), NULL, NULL, &err), &err);
        assert_true(opt.seed == cases[i].seed);
        di_options_deinit(&opt);
    }
}

static void bytes_take_suffixes(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t value; /* 0: refused */
    } cases[] = {
        {"1", 1},
        {"1500000", 1500000},
        {"4K", 4096},
        {"4k", 4096},
        {"512M", 512LL << 20},
        {"1G", 1LL << 30},
        {"1GiB", 1LL << 30},
        {"2gb", 2LL << 30},
        {"3T", 3LL << 40},
        {"100B", 100},
        {"0", 0},
        {"", 0},
        {"G", 0},
        {"1.5G", 0},
        {"-1", 0},
        {"1X", 0},
        {"1GG", 0},
        {"1iB", 0},
        {"9223372036854775807", INT64_MAX},
        {"9223372036854775807K", 0},
        {"99999999999999999999", 0},
        {"8388608T", 0},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_options opt;
        di_error err;
        di_status st = read_options(&opt, DI_COMMAND_RUN, FLAGS("--kv-memory", cases[i].text), NULL, NULL, &err);
        assert_int_equal(st, cases[i].value ? DI_OK : DI_ERR_ARG);
        if (st == DI_OK) {
            assert_int_equal(opt.kv_memory, cases[i].value);
        }
        di_options_deinit(&opt);
    }
}

static void bad_values_are_named_with_what_is_accepted(void **state) {
    (void)state;
    static const struct {
        const char *flag, *value, *want;
    } cases[] = {
        {"--temperature", "-1", "--temperature: found '-1', expected a finite number, 0 or more"},
        {"--temperature", "nan", "found 'nan'"},
        {"--temperature", "inf", "found 'inf'"},
        {"--temperature", "1e999", "found '1e999'"},
        {"--temperature", "warm", "found 'warm'"},
        {"--top-p", "0", "--top-p: found '0', expected a number above 0, at most 1"},
        {"--top-p", "1.5", "found '1.5'"},
        {"--top-p", "nan", "found 'nan'"},
        {"--top-k", "-2", "--top-k: found '-2', expected an integer from -1 to 2147483647"},
        {"--top-k", "2.0", "found '2.0'"},
        {"--top-k", "9999999999999999999999", "found '9999999999999999999999'"},
        {"--max-tokens", "0", "--max-tokens: found '0', expected an integer from 1"},
        {"--max-tokens", "", "found ''"},
        {"--seed", "x", "--seed: found 'x', expected an integer"},
        {"--seed", "-", "found '-'"},
        {"--seed", "1.5", "found '1.5'"},
        {"--stop", "", "--stop: found '', expected a text that is not empty"},
        {"--numerics", "Exact", "--numerics: found 'Exact', expected faithful or exact"},
        {"--backend", "gpu", "--backend: found 'gpu', expected auto, cpu, nvidia or ascend"},
        {"--reasoning", "0", "expected none, low, high, max or 1..100"},
        {"--reasoning", "101", "found '101'"},
        {"--reasoning", "medium", "found 'medium'"},
        {"--reasoning", "1..100", "found '1..100'"},
        {"--reasoning", "low|high", "found 'low|high'"},
        {"--threads", "0", "expected an integer from 1 to 4096"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_options opt;
        di_error err = {.message = ""};
        assert_int_equal(read_options(&opt, DI_COMMAND_RUN, FLAGS(cases[i].flag, cases[i].value), NULL, NULL, &err),
                         DI_ERR_ARG);
        assert_contains(err.message, cases[i].want);
        di_options_deinit(&opt);
    }
    di_options opt;
    di_error err;
    assert_int_equal(read_options(&opt, DI_COMMAND_RUN, FLAGS("--raw=maybe"), NULL, NULL, &err), DI_ERR_ARG);
    assert_contains(err.message, "--raw: found 'maybe', expected true, false");
    di_options_deinit(&opt);
}

static void unknown_options_are_refused_with_the_nearest(void **state) {
    (void)state;
    static const struct {
        const char *flag, *want;
    } cases[] = {
        {"--temprature", "unknown option '--temprature', did you mean '--temperature'?"},
        {"--max-token=5", "unknown option '--max-token', did you mean '--max-tokens'?"},
        {"--api", "option '--api' is not one of 'deepinfer run'"},
        {"-x", "unknown option '-x', see 'deepinfer run --help'"},
        {"--model", "option '--model' needs a value: DIR"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_options opt;
        di_error err = {.message = ""};
        assert_int_equal(read_options(&opt, DI_COMMAND_RUN, FLAGS(cases[i].flag), NULL, NULL, &err), DI_ERR_ARG);
        assert_contains(err.message, cases[i].want);
        di_options_deinit(&opt);
    }
}

static void the_environment_comes_behind_the_flags(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_RUN, FLAGS("--top-k", "7", "--stop", "flag"),
                            ENV("DEEPINFER_TOP_K=3", "DEEPINFER_TOP_P=0.5", "DEEPINFER_ACCELERATOR=cpu",
                                "DEEPINFER_MODEL=/m", "DEEPINFER_STOP=x\n\ny", "DEEPINFER_RAW=1",
                                "DEEPINFER_SEED=", "HOME=/root", "DEEPINFER_IGNORE_EOS=0"),
                            NULL, &err),
               &err);
    assert_int_equal(opt.top_k, 7);
    assert_true(opt.top_p == 0.5);
    assert_int_equal(opt.source[DI_OPT_top_p], DI_SOURCE_ENVIRONMENT);
    assert_string_equal(opt.backend, "cpu");
    assert_string_equal(opt.model, "/m");
    assert_true(opt.raw);
    assert_false(opt.ignore_eos);
    assert_false(di_options_is_set(&opt, DI_OPT_seed)); /* empty is unset */
    assert_int_equal(opt.stop.n, 1);
    assert_string_equal(opt.stop.items[0], "flag");
    di_options_deinit(&opt);

    di_test_ok(read_options(&opt, DI_COMMAND_RUN, NULL, ENV("DEEPINFER_STOP=x\n\ny"), NULL, &err), &err);
    assert_int_equal(opt.stop.n, 2);
    assert_string_equal(opt.stop.items[0], "x");
    assert_string_equal(opt.stop.items[1], "y");
    di_options_deinit(&opt);
}

/* Names that other engines' users have in their environment say on and off in other words. */
static void a_switch_takes_the_words_of_switches(void **state) {
    (void)state;
    static const char *const words[][2] = {{"1", "on"}, {"0", "off"}, {"true", "on"}, {"False", "off"}, {"off", "off"}};
    for (size_t i = 0; i < DI_COUNT(words); i++) {
        di_options opt;
        di_error err;
        char variable[64];
        snprintf(variable, sizeof variable, "DEEPINFER_ZERO_OVERHEAD_SCHEDULING=%s", words[i][0]);
        di_test_ok(read_options(&opt, DI_COMMAND_RUN, NULL, ENV(variable), NULL, &err), &err);
        assert_string_equal(opt.async, words[i][1]);
        di_options_deinit(&opt);
    }
    di_options opt;
    di_error err;
    assert_int_equal(read_options(&opt, DI_COMMAND_RUN, FLAGS("--async", "often"), NULL, NULL, &err), DI_ERR_ARG);
    assert_string_equal(err.message, "--async: found 'often', expected on or off");
    di_options_deinit(&opt);
}

static void bad_variables_are_errors(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    assert_int_equal(read_options(&opt, DI_COMMAND_INFO, NULL, ENV("DEEPINFER_REPLAY=maybe"), NULL, &err), DI_ERR_ARG);
    assert_string_equal(err.message, "DEEPINFER_REPLAY: found 'maybe', expected compact, mask or off");
    di_options_deinit(&opt);
    assert_int_equal(
        read_options(&opt, DI_COMMAND_INFO, NULL, ENV("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS=-4"), NULL, &err),
        DI_ERR_ARG);
    assert_contains(err.message, "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS: found '-4'");
    di_options_deinit(&opt);
}

static void aliases_work_and_must_agree(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_INFO, NULL,
                            ENV("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact",
                                "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS=140", "DEEPINFER_REPLAY_KEEP=140"),
                            NULL, &err),
               &err);
    assert_string_equal(opt.replay, "compact");
    assert_int_equal(opt.replay_keep, 140);
    di_options_deinit(&opt);
    assert_int_equal(read_options(&opt, DI_COMMAND_INFO, NULL,
                                  ENV("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact", "DEEPINFER_REPLAY=mask"), NULL,
                                  &err),
                     DI_ERR_ARG);
    assert_contains(err.message, "DEEPINFER_REPLAY is 'mask'");
    assert_contains(err.message, "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE is 'compact'");
    di_options_deinit(&opt);
}

static void unknown_variables_are_warnings(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_strbuf warnings = {0};
    di_test_ok(read_options(&opt, DI_COMMAND_INFO, NULL,
                            ENV("DEEPINFER_TEMPERATUR=1", "DEEPINFER_SOMETHING_ELSE=1", "OTHER=1"), &warnings, &err),
               &err);
    assert_string_equal(di_strbuf_str(&warnings), "unknown environment variable 'DEEPINFER_TEMPERATUR', did you mean "
                                                  "'DEEPINFER_TEMPERATURE'?\n"
                                                  "unknown environment variable 'DEEPINFER_SOMETHING_ELSE'\n");
    di_strbuf_deinit(&warnings);
    di_options_deinit(&opt);
}

static void help_wins_over_errors(void **state) {
    (void)state;
    di_options opt;
    di_error err;
    di_test_ok(read_options(&opt, DI_COMMAND_RUN, FLAGS("--nonsense", "--help"), NULL, NULL, &err), &err);
    assert_true(opt.is_help);
    di_options_deinit(&opt);
    di_test_ok(read_options(&opt, DI_COMMAND_RUN, FLAGS("--", "--help"), NULL, NULL, &err), &err);
    assert_false(opt.is_help);
    assert_int_equal(opt.args.n, 1);
    di_options_deinit(&opt);
}

static void nearest_names(void **state) {
    (void)state;
    static const char *const names[] = {"run", "chat", "bench", "tokenize"};
    assert_string_equal(di_nearest_name("rnu", names, 4), "run");
    assert_string_equal(di_nearest_name("tokenise", names, 4), "tokenize");
    assert_string_equal(di_nearest_name("bensh", names, 4), "bench");
    assert_null(di_nearest_name("serve", names, 4));
    assert_null(di_nearest_name("", names, 0));
    char text[300];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    assert_null(di_nearest_name(text, names, 4));
}

static void help_lists_the_options_of_a_command(void **state) {
    (void)state;
    di_strbuf out = {0};
    di_options_help(&out, DI_COMMAND_ENCODE);
    assert_contains(out.data, "--api NAME");
    assert_contains(out.data, "--model DIR");
    assert_contains(out.data, "[DEEPINFER_ACCELERATOR]");
    assert_contains(out.data, "--help");
    assert_null(strstr(out.data, "--temperature"));
    di_strbuf_reset(&out);
    di_options_help(&out, DI_COMMAND_RUN);
    assert_contains(out.data, "(default: exact bound)");
    for (const char *line = out.data; *line; line = strchr(line, '\n') + 1) {
        assert_true(strcspn(line, "\n") <= 100);
    }
    di_strbuf_deinit(&out);
}

static void the_documented_table_is_current(void **state) {
    (void)state;
    di_strbuf want = {0}, found = {0};
    di_error err;
    di_options_markdown(&want);
    di_test_ok(di_file_read(di_test_source("docs/options.md"), 1 << 20, &found, &err), &err);
    if (strcmp(want.data, di_strbuf_str(&found)) != 0) {
        fail_msg("docs/options.md differs from src/base/options.def: build the target 'docs'");
    }
    di_strbuf_deinit(&want);
    di_strbuf_deinit(&found);
}

DI_TEST_GROUP(options, cmocka_unit_test(defaults_are_the_documented_ones), cmocka_unit_test(flags_take_both_forms),
              cmocka_unit_test(the_last_flag_wins), cmocka_unit_test(seeds_are_taken_modulo_2_to_64),
              cmocka_unit_test(bytes_take_suffixes), cmocka_unit_test(bad_values_are_named_with_what_is_accepted),
              cmocka_unit_test(unknown_options_are_refused_with_the_nearest),
              cmocka_unit_test(the_environment_comes_behind_the_flags),
              cmocka_unit_test(a_switch_takes_the_words_of_switches), cmocka_unit_test(bad_variables_are_errors),
              cmocka_unit_test(aliases_work_and_must_agree), cmocka_unit_test(unknown_variables_are_warnings),
              cmocka_unit_test(help_wins_over_errors), cmocka_unit_test(nearest_names),
              cmocka_unit_test(help_lists_the_options_of_a_command), cmocka_unit_test(the_documented_table_is_current))
