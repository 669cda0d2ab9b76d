/* Traces: the document that viewers read, parsed again; completeness at every moment; threads; files that can't be
 * written. */
#include "base/base.h"
#include "harness.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

/* The document and its events. */
static di_json *read_trace(const char *path, di_json **events) {
    di_strbuf text = {0};
    di_error err = {0};
    di_test_ok(di_file_read(path, 1 << 30, &text, &err), &err);
    di_json *doc = NULL;
    di_test_ok(di_json_parse(&doc, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    *events = di_json_get(doc, "traceEvents");
    assert_true(di_json_is(*events, DI_JSON_ARRAY));
    return doc;
}

static void assert_field(const di_json *event, const char *key, const char *want) {
    size_t len;
    const char *found = di_json_str(di_json_get(event, key), &len);
    assert_non_null(found);
    assert_string_equal(found, want);
}

static double number(const di_json *event, const char *key) {
    assert_non_null(di_json_get(event, key));
    return di_json_number(di_json_get(event, key));
}

static void events_have_the_fields_of_the_format(void **state) {
    (void)state;
    const char *path = di_test_tmp("trace.json");
    di_trace *trace;
    di_error err = {0};
    di_test_ok(di_trace_open(&trace, path, &err), &err);
    di_trace_thread(trace, 3, "forward \"one\"");
    di_trace_span(trace, 3, "step\n\xC3\xA9", 1234567, 1239568, 2,
                  (di_trace_arg[]){{"rows", 17}, {"least", INT64_MIN}});
    di_trace_instant(trace, 1, "preempted", 2000000, 0, NULL);
    di_trace_counter(trace, "blocks", 2000001, 2, (di_trace_arg[]){{"used", 5}, {"cached", 7}});
    di_trace_span(trace, 3, "backwards", 500, 400, 0, NULL);
    di_test_ok(di_trace_close(trace, &err), &err);

    di_json *events, *doc = read_trace(path, &events);
    assert_int_equal(di_json_array_len(events), 6);
    const di_json *e = di_json_at(events, 0);
    assert_field(e, "ph", "M");
    assert_field(e, "name", "process_name");
    assert_field(di_json_get(e, "args"), "name", "deepinfer");
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(di_json_int(di_json_get(di_json_at(events, i), "pid")), getpid());

    e = di_json_at(events, 1);
    assert_field(e, "ph", "M");
    assert_field(e, "name", "thread_name");
    assert_int_equal(di_json_int(di_json_get(e, "tid")), 3);
    assert_field(di_json_get(e, "args"), "name", "forward \"one\"");

    e = di_json_at(events, 2);
    assert_field(e, "ph", "X");
    assert_field(e, "name", "step\n\xC3\xA9");
    assert_int_equal(di_json_int(di_json_get(e, "tid")), 3);
    assert_true(number(e, "ts") == 1234.567); /* microseconds */
    assert_true(number(e, "dur") == 5.001);
    assert_int_equal(di_json_int(di_json_get(di_json_get(e, "args"), "rows")), 17);
    assert_true(di_json_int(di_json_get(di_json_get(e, "args"), "least")) == INT64_MIN);

    e = di_json_at(events, 3);
    assert_field(e, "ph", "i");
    assert_field(e, "s", "t"); /* of a thread */
    assert_int_equal(di_json_int(di_json_get(e, "tid")), 1);
    assert_true(number(e, "ts") == 2000.0);

    e = di_json_at(events, 4);
    assert_field(e, "ph", "C");
    assert_true(number(e, "ts") == 2000.001);
    assert_int_equal(di_json_object_len(di_json_get(e, "args")), 2);
    assert_int_equal(di_json_int(di_json_get(di_json_get(e, "args"), "cached")), 7);

    assert_true(number(di_json_at(events, 5), "dur") == 0.0);
    di_json_free(doc);
}

/* What a program that dies leaves: the file is whole before close, at any number of events. */
static void the_file_is_complete_while_it_is_written(void **state) {
    (void)state;
    enum { N = 5000, CHECKS = 25 };
    const char *path = di_test_tmp("alive.json");
    di_trace *trace;
    di_error err = {0};
    di_test_ok(di_trace_open(&trace, path, &err), &err);
    size_t n_before = 0;
    for (int i = 0; i <= N; i++) {
        if (i % (N / CHECKS) == 0) {
            di_json *events, *doc = read_trace(path, &events);
            size_t n = di_json_array_len(events);
            assert_in_range(n, DI_MAX(n_before, 1), (size_t)i + 1);
            /* Events come whole and in order. */
            if (n > 1)
                assert_int_equal(number(di_json_at(events, n - 1), "ts"), n - 2);
            n_before = n;
            di_json_free(doc);
        }
        di_trace_instant(trace, 0, "an event with a name", (int64_t)i * 1000, 1, &(di_trace_arg){"i", i});
    }
    assert_true(n_before > N / 2);
    di_test_ok(di_trace_close(trace, &err), &err);
    di_json *events, *doc = read_trace(path, &events);
    assert_int_equal(di_json_array_len(events), N + 2);
    di_json_free(doc);
}

enum { THREADS = 4, SPANS = 2000 };

typedef struct job {
    const di_trace *trace;
    int thread;
} job;

static void *write_spans(void *arg) {
    const job *j = arg;
    for (int i = 0; i < SPANS; i++)
        di_trace_span(j->trace, j->thread, "work", (int64_t)i * 1000, (int64_t)i * 1000 + 500, 1,
                      &(di_trace_arg){"i", i});
    return NULL;
}

static void threads_write_whole_events(void **state) {
    (void)state;
    const char *path = di_test_tmp("threads.json");
    di_trace *trace;
    di_error err = {0};
    di_test_ok(di_trace_open(&trace, path, &err), &err);
    pthread_t threads[THREADS];
    job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (job){trace, i};
        assert_int_equal(pthread_create(&threads[i], NULL, write_spans, &jobs[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    di_test_ok(di_trace_close(trace, &err), &err);
    di_json *events, *doc = read_trace(path, &events);
    assert_int_equal(di_json_array_len(events), 1 + THREADS * SPANS);
    int64_t next[THREADS] = {0};
    for (size_t i = 1; i < di_json_array_len(events); i++) {
        const di_json *e = di_json_at(events, i);
        int64_t thread = di_json_int(di_json_get(e, "tid"));
        assert_in_range(thread, 0, THREADS - 1);
        assert_int_equal(di_json_int(di_json_get(di_json_get(e, "args"), "i")), next[thread]++);
    }
    di_json_free(doc);
}

static void a_trace_that_is_off_takes_everything(void **state) {
    (void)state;
    di_trace_thread(NULL, 0, "x");
    di_trace_span(NULL, 0, "x", 0, 1, 0, NULL);
    di_trace_instant(NULL, 0, "x", 0, 0, NULL);
    di_trace_counter(NULL, "x", 0, 0, NULL);
    assert_int_equal(di_trace_close(NULL, NULL), DI_OK);
}

static void an_old_file_is_replaced(void **state) {
    (void)state;
    const char *path = di_test_tmp("old.json");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < 10000; i++)
        fputs("something longer than a trace\n", file);
    fclose(file);
    di_trace *trace;
    di_error err = {0};
    di_test_ok(di_trace_open(&trace, path, &err), &err);
    di_test_ok(di_trace_close(trace, &err), &err);
    di_json *events, *doc = read_trace(path, &events);
    assert_int_equal(di_json_array_len(events), 1);
    di_json_free(doc);
}

static void a_pipe_gets_its_end_at_close(void **state) {
    (void)state;
    const char *path = di_test_tmp("pipe");
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", ends[1]);
    di_trace *trace;
    di_error err = {0};
    if (di_trace_open(&trace, name, &err))
        di_test_skip("no /proc here: %s", err.message);
    di_trace_instant(trace, 0, "x", 0, 0, NULL);
    di_test_ok(di_trace_close(trace, &err), &err);
    close(ends[1]);
    char text[4096];
    ssize_t n = read(ends[0], text, sizeof text);
    assert_true(n > 0);
    close(ends[0]);
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    assert_int_equal(write(fd, text, (size_t)n), n);
    close(fd);
    di_json *events, *doc = read_trace(path, &events);
    assert_int_equal(di_json_array_len(events), 2);
    di_json_free(doc);
}

static void files_that_cannot_be_written_are_named(void **state) {
    (void)state;
    di_trace *trace = NULL;
    di_error err = {0};
    const char *path = di_test_tmp("no/such/folder.json");
    assert_int_equal(di_trace_open(&trace, path, &err), DI_ERR_IO);
    assert_null(trace);
    assert_contains(err.message, path);

    /* A full disk ends the trace, and close tells. */
    if (!di_path_exists("/dev/full"))
        di_test_skip("no /dev/full here");
    di_test_ok(di_trace_open(&trace, "/dev/full", &err), &err);
    for (int i = 0; i < 5000; i++)
        di_trace_instant(trace, 0, "an event with a name", i, 0, NULL);
    assert_int_equal(di_trace_close(trace, &err), DI_ERR_DISK);
    assert_contains(err.message, "/dev/full");
}

/* One trace into two files, one after the other; names of rows are in both, events between them in none. */
static void a_trace_can_be_started_again(void **state) {
    (void)state;
    const char *first = di_test_tmp("first.json"), *second = di_test_tmp("second.json");
    di_error err = {0};
    di_trace *trace;
    di_strbuf text = {0};
    di_test_ok(di_trace_create(&trace, &err), &err);
    di_trace_thread(trace, 2, "runner");
    di_trace_instant(trace, 2, "before", 1000, 0, NULL);
    di_test_ok(di_trace_start(trace, first, &err), &err);
    assert_int_equal(di_trace_start(trace, second, &err), DI_ERR_BUSY);
    di_trace_instant(trace, 2, "within", 2000, 0, NULL);
    di_test_ok(di_trace_stop(trace, &err), &err);
    di_trace_instant(trace, 2, "between", 3000, 0, NULL);
    di_test_ok(di_trace_stop(trace, &err), &err); /* off already */
    di_test_ok(di_trace_start(trace, second, &err), &err);
    di_test_ok(di_trace_close(trace, &err), &err);
    for (int i = 0; i < 2; i++) {
        di_json *json = NULL;
        di_strbuf_reset(&text);
        di_test_ok(di_file_read(i ? second : first, 1 << 20, &text, &err), &err);
        di_test_ok(di_json_parse(&json, text.data, text.len, &err), &err);
        assert_int_equal(di_json_array_len(di_json_get(json, "traceEvents")), i ? 2 : 3);
        assert_contains(text.data, "\"runner\"");
        assert_int_equal(strstr(text.data, "within") != NULL, !i);
        assert_null(strstr(text.data, "before"));
        assert_null(strstr(text.data, "between"));
        di_json_free(json);
    }
    di_strbuf_deinit(&text);
}

DI_TEST_GROUP(trace, cmocka_unit_test(a_trace_can_be_started_again),
              cmocka_unit_test(events_have_the_fields_of_the_format),
              cmocka_unit_test(the_file_is_complete_while_it_is_written), cmocka_unit_test(threads_write_whole_events),
              cmocka_unit_test(a_trace_that_is_off_takes_everything), cmocka_unit_test(an_old_file_is_replaced),
              cmocka_unit_test(a_pipe_gets_its_end_at_close), cmocka_unit_test(files_that_cannot_be_written_are_named));
