/* The front of the program: help, usage errors, exit statuses and what happens when standard output can't be written.
 *
 * Commands go through the shell, with an environment that has no DEEPINFER_ variable but those a test sets. */
#include "program.h"

#include <unistd.h>

/* Runs "<env> deepinfer <args>" with standard error beside standard output; returns the exit status. */
static int run(const char *env, const char *args, char *out, size_t size) {
    return di_test_shell(out, size, "%s '%s' %s 2>&1", env, DI_TEST_PROGRAM, args);
}

static char out[65536];

static void help_lists_the_commands(void **state) {
    (void)state;
    assert_int_equal(run("", "--help", out, sizeof out), 0);
    static const char *const names[] = {"run",    "chat",  "serve",   "bench", "tokenize",
                                        "encode", "parse", "grammar", "info",  "version"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char line[32], args[32];
        snprintf(line, sizeof line, "\n  %-10s ", names[i]);
        assert_contains(out, line);
        snprintf(args, sizeof args, "%s --help", names[i]);
        static char help[65536];
        assert_int_equal(run("", args, help, sizeof help), 0);
        char usage[64];
        snprintf(usage, sizeof usage, "usage: deepinfer %s [OPTION]...", names[i]);
        assert_contains(help, usage);
        static const char *const common[] = {"--model DIR", "--backend NAME", "--threads N", "--log-level LEVEL"};
        for (size_t c = 0; c < 4; c++) {
            assert_contains(help, common[c]);
        }
    }
    assert_null(strstr(out, "download")); /* a command is listed from the day that it works */
}

static void no_command_is_a_usage_error(void **state) {
    (void)state;
    assert_int_equal(run("", "", out, sizeof out), 2);
    assert_contains(out, "usage: deepinfer COMMAND");
}

static void unknown_commands_are_refused_with_the_nearest(void **state) {
    (void)state;
    assert_int_equal(run("", "tokenise", out, sizeof out), 2);
    assert_string_equal(out, "deepinfer: unknown command 'tokenise', did you mean 'tokenize'?\n");
    assert_int_equal(run("", "download", out, sizeof out), 2);
    assert_contains(out, "unknown command 'download', 'deepinfer --help' lists them");
}

static void usage_errors_have_status_2(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"run --temprature 1 x", "did you mean '--temperature'?"},
        {"run --temperature -0.5 x", "--temperature: found '-0.5'"},
        {"run --temperature nan x", "--temperature: found 'nan'"},
        {"run --temperature inf x", "--temperature: found 'inf'"},
        {"run --max-tokens 0 x", "--max-tokens: found '0'"},
        {"run --accept always x", "--accept: found 'always'"},
        {"run --draft-policy none x", "--draft-policy: found 'none'"},
        {"run --regex a --ebnf f x", "--regex and --ebnf: expected one of them"},
        {"run one two", "found 'two'"},
        {"version extra", "'deepinfer version' takes no arguments, found 'extra'"},
        {"serve --port 70000", "--port: found '70000', expected an integer from 0 to 65535"},
        {"serve --max-body 10", "expected a number of bytes from 1024"},
        {"serve --api-key ''", "--api-key: found ''"},
        {"serve --tls-cert x --port 0", "tls-cert without tls-key"},
        {"serve --served-model-name '' --port 0", "served-model-name: an empty name"},
        {"version --raw", "option '--raw' is not one of 'deepinfer version'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(run("", cases[i][0], out, sizeof out), 2);
        assert_contains(out, cases[i][1]);
    }
}

/* A secret that came out empty doesn't open a server to everybody. */
static void an_empty_list_of_keys_is_an_error(void **state) {
    (void)state;
    assert_int_equal(run("DEEPINFER_API_KEY=", "serve --port 0", out, sizeof out), 2);
    assert_contains(out, "DEEPINFER_API_KEY: found nothing");
}

static void version_names_backends_and_instruction_sets(void **state) {
    (void)state;
    assert_int_equal(run("", "version", out, sizeof out), 0);
    assert_int_equal(strncmp(out, "deepinfer ", 10), 0);
    assert_contains(out, "cpu");
    assert_contains(out, "instruction-set levels found: ref portable");
    assert_contains(out, "instruction-set levels in use: ref portable");
    static char again[65536];
    assert_int_equal(run("", "--version", again, sizeof again), 0);
    assert_string_equal(again, out);
    assert_int_equal(run("DEEPINFER_CPU_ISA=portable", "version", out, sizeof out), 0);
    assert_contains(out, "in use: ref portable\n");
    assert_int_equal(run("", "version --cpu-isa sse9", out, sizeof out), 2);
    assert_contains(out, "--cpu-isa: found 'sse9'");
}

static void variables_are_read_and_checked(void **state) {
    (void)state;
    assert_int_equal(run("DEEPINFER_TOP_P=2", "version", out, sizeof out), 2);
    assert_contains(out, "DEEPINFER_TOP_P: found '2', expected a number above 0, at most 1");
    assert_int_equal(run("DEEPINFER_TOP_PP=2", "version", out, sizeof out), 0);
    assert_contains(out, "deepinfer: warning: unknown environment variable 'DEEPINFER_TOP_PP', did you mean "
                         "'DEEPINFER_TOP_P'?");
    assert_int_equal(run("DEEPINFER_TOP_PP=2", "version --log-level error", out, sizeof out), 0);
    assert_null(strstr(out, "warning"));
}

static void a_full_disk_is_status_4(void **state) {
    (void)state;
    if (access("/dev/full", W_OK) != 0) {
        di_test_skip("this system has no /dev/full");
    }
    assert_int_equal(run("", "version 3>&1 >/dev/full", out, sizeof out), 4);
    assert_int_equal(di_test_shell(out, sizeof out, "'%s' --help 2>&1 >/dev/full", DI_TEST_PROGRAM), 4);
    assert_string_equal(out, "deepinfer: standard output: the disk is full\n");
}

static void a_reader_that_goes_away_is_status_1(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    close(ends[0]);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(STDERR_FILENO);
        execl(DI_TEST_PROGRAM, DI_TEST_PROGRAM, "run", "--help", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status)); /* not killed by SIGPIPE */
    assert_int_equal(WEXITSTATUS(status), 1);
}

DI_TEST_GROUP(cli, cmocka_unit_test(help_lists_the_commands), cmocka_unit_test(no_command_is_a_usage_error),
              cmocka_unit_test(unknown_commands_are_refused_with_the_nearest),
              cmocka_unit_test(usage_errors_have_status_2), cmocka_unit_test(an_empty_list_of_keys_is_an_error),
              cmocka_unit_test(version_names_backends_and_instruction_sets),
              cmocka_unit_test(variables_are_read_and_checked), cmocka_unit_test(a_full_disk_is_status_4),
              cmocka_unit_test(a_reader_that_goes_away_is_status_1))
