/* `--trace FILE` of the program: a file that viewers open, with the steps of what was run; files that can't be made. */
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "harness.h"

/* The exit status of `deepinfer run --trace path`, three tokens long, with its standard error in the file `log`. */
static int run_traced(const char *path, const char *log) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR), err = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        execl(DI_TEST_PROGRAM, DI_TEST_PROGRAM, "run", "--trace", path, "--threads", "1", "--max-tokens", "3", "hello",
              (char *)NULL);
        _exit(127);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void read_text(const char *path, di_strbuf *text) {
    di_error err = {0};
    di_test_ok(di_file_read(path, 1 << 24, text, &err), &err);
}

static void a_run_leaves_its_steps(void **state) {
    (void)state;
    const char *path = di_test_tmp("run.json"), *log = di_test_tmp("run.log");
    int64_t before_ns = di_clock_ns();
    assert_int_equal(run_traced(path, log), 0);
    int64_t after_ns = di_clock_ns();
    di_strbuf text = {0};
    read_text(path, &text);
    di_json *doc;
    di_error err = {0};
    di_test_ok(di_json_parse(&doc, text.data, text.len, &err), &err);
    const di_json *events = di_json_get(doc, "traceEvents");
    int n_spans = 0;
    for (size_t i = 0; i < di_json_array_len(events); i++) {
        const di_json *e = di_json_at(events, i);
        const char *phase = di_json_str(di_json_get(e, "ph"), NULL);
        assert_non_null(phase);
        assert_non_null(di_json_str(di_json_get(e, "name"), NULL));
        if (strcmp(phase, "X") != 0)
            continue;
        /* Within the program's life, on the monotonic clock, in microseconds; half of one for rounding. */
        double start_us = di_json_number(di_json_get(e, "ts")), span_us = di_json_number(di_json_get(e, "dur"));
        assert_true(start_us >= (double)before_ns / 1000 - 0.5 && span_us >= 0);
        assert_true(start_us + span_us <= (double)after_ns / 1000 + 0.5);
        n_spans++;
    }
    assert_true(n_spans >= 3); /* one forward a token at least */
    di_json_free(doc);
    di_strbuf_deinit(&text);
}

static void what_cannot_be_written_is_told(void **state) {
    (void)state;
    const char *path = di_test_tmp("no/folder/run.json"), *log = di_test_tmp("bad.log");
    di_strbuf text = {0};
    assert_int_not_equal(run_traced(path, log), 0); /* before the model is loaded */
    read_text(log, &text);
    assert_contains(di_strbuf_str(&text), path);
    if (di_path_exists("/dev/full")) {
        di_strbuf_reset(&text);
        assert_int_equal(run_traced("/dev/full", log), 0); /* the answer is worth more than its trace */
        read_text(log, &text);
        assert_contains(di_strbuf_str(&text), "/dev/full");
    }
    di_strbuf_deinit(&text);
}

DI_TEST_GROUP(trace_file, cmocka_unit_test(a_run_leaves_its_steps), cmocka_unit_test(what_cannot_be_written_is_told));
