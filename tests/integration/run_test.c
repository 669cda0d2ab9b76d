/* `deepinfer run` and `chat` as programs, on the model that ships: what goes to which stream, exit statuses, batches
 * with bad lines, interruption, outputs that are full or gone. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "harness.h"

/* ---- running the program --------------------------------------------------------------------------------------------
 */

typedef struct program {
    const char *args[24];    /* behind the program's name; NULL ends */
    const char *input;       /* standard input; NULL: /dev/null */
    size_t input_len;        /* 0: strlen(input) */
    const char *output_path; /* opened for standard output; NULL: read into out */
    bool closes_output;      /* no standard output at all */
    size_t hang_up_after;    /* close the reading end after this many bytes; 0: never */
    size_t signal_after;     /* send SIGINT after this many bytes of output; 0: never */
    /* results */
    int exit_status; /* -1: ended by a signal */
    di_strbuf out, err;
} program;

static void program_free(program *p) {
    di_strbuf_deinit(&p->out);
    di_strbuf_deinit(&p->err);
}

static void exec_program(program *p, int in, int out, int err) {
    const char *argv[26] = {DI_TEST_PROGRAM};
    for (int i = 0; i < 24 && p->args[i]; i++)
        argv[i + 1] = p->args[i];
    dup2(in, STDIN_FILENO);
    dup2(err, STDERR_FILENO);
    if (p->closes_output) {
        close(STDOUT_FILENO);
    } else {
        dup2(out, STDOUT_FILENO);
    }
    setenv("LC_ALL", "C", 1);
    execv(DI_TEST_PROGRAM, (char *const *)argv);
    _exit(127);
}

static void run(program *p) {
    int in[2], out[2], err[2];
    assert_int_equal(pipe2(in, O_CLOEXEC) | pipe2(out, O_CLOEXEC) | pipe2(err, O_CLOEXEC), 0);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int file = p->output_path ? open(p->output_path, O_WRONLY | O_CLOEXEC) : -1;
    assert_true(!p->output_path || file >= 0);
    signal(SIGPIPE, SIG_IGN);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGPIPE, SIG_DFL);
        exec_program(p, p->input ? in[0] : null, file >= 0 ? file : out[1], err[1]);
    }
    close(in[0]), close(out[1]), close(err[1]), close(null);
    if (file >= 0)
        close(file);
    size_t written = 0, len = !p->input ? 0 : p->input_len ? p->input_len : strlen(p->input);
    if (written == len)
        close(in[1]), in[1] = -1;
    bool is_signalled = false;
    while (out[0] >= 0 || err[0] >= 0 || in[1] >= 0) {
        struct pollfd fds[3] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}, {in[1], POLLOUT, 0}};
        assert_true(poll(fds, 3, 120000) > 0);
        char chunk[65536];
        for (int i = 0; i < 2; i++) {
            int *fd = i ? &err[0] : &out[0];
            if (*fd < 0 || !fds[i].revents)
                continue;
            ssize_t n = read(*fd, chunk, i ? sizeof chunk : 4096);
            if (n > 0)
                di_strbuf_append(i ? &p->err : &p->out, chunk, (size_t)n);
            if (n <= 0 || (i == 0 && p->hang_up_after && p->out.len >= p->hang_up_after))
                close(*fd), *fd = -1;
        }
        if (p->signal_after && !is_signalled && p->out.len >= p->signal_after) {
            kill(pid, SIGINT);
            is_signalled = true;
        }
        if (in[1] >= 0 && fds[2].revents) {
            ssize_t n = write(in[1], p->input + written, len - written);
            if (n > 0)
                written += (size_t)n;
            if (n < 0 || written == len)
                close(in[1]), in[1] = -1;
        }
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    p->exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define RUN(p, ...)                                                                                                    \
    program p = {.args = {__VA_ARGS__}};                                                                               \
    run(&p)

/* Line i of the output as JSON. */
static di_json *line_of(const program *p, int i) {
    const char *at = di_strbuf_str(&p->out);
    for (; i > 0; i--) {
        at = strchr(at, '\n');
        assert_non_null(at);
        at++;
    }
    const char *end = strchr(at, '\n');
    assert_non_null(end);
    di_json *v = NULL;
    di_error err = {0};
    di_test_ok(di_json_parse(&v, at, (size_t)(end - at), &err), &err);
    return v;
}

static int count_lines(const program *p) {
    int n = 0;
    for (size_t i = 0; i < p->out.len; i++)
        n += p->out.data[i] == '\n';
    return n;
}

static const char *text_of(const di_json *v, const char *key) {
    const char *s = di_json_str(di_json_get(v, key), NULL);
    return s ? s : "(none)";
}

/* ---- one prompt ----------------------------------------------------------------------------------------------------
 */

static void prompt_streams_an_answer(void **state) {
    (void)state;
    RUN(p, "run", "What is 47 + 38?", "--temperature", "0");
    assert_int_equal(p.exit_status, 0);
    assert_string_equal(di_strbuf_str(&p.out), "47 + 38 = 85\n");
    assert_string_equal(di_strbuf_str(&p.err), "");
    program_free(&p);
}

static void prompt_comes_from_standard_input(void **state) {
    (void)state;
    program p = {.args = {"run", "-", "--temperature", "0"}, .input = "What is 47 + 38?\n"};
    run(&p);
    assert_int_equal(p.exit_status, 0);
    assert_string_equal(di_strbuf_str(&p.out), "47 + 38 = 85\n");
    program_free(&p);
}

static void thinking_is_left_out_of_a_pipe(void **state) {
    (void)state;
    RUN(p, "run", "What is 47 + 38?", "--temperature", "0", "--reasoning", "high");
    assert_int_equal(p.exit_status, 0);
    assert_string_equal(di_strbuf_str(&p.out), "47 + 38 = 85\n");
    program_free(&p);
}

static void raw_prompt_is_continued(void **state) {
    (void)state;
    RUN(p, "run", "--raw", "Once upon a", "--temperature", "0", "--max-tokens", "6", "--stats");
    assert_int_equal(p.exit_status, 0);
    assert_memory_equal(di_strbuf_str(&p.out), " time", 5);
    assert_contains(di_strbuf_str(&p.err), "finish reason length");
    assert_contains(di_strbuf_str(&p.err), "tokens/s");
    program_free(&p);
}

static void seed_gives_the_same_answer(void **state) {
    (void)state;
    RUN(a, "run", "Tell me a story.", "--seed", "7", "--max-tokens", "24");
    RUN(b, "run", "Tell me a story.", "--seed", "7", "--max-tokens", "24", "--threads", "1");
    RUN(c, "run", "Tell me a story.", "--seed", "8", "--max-tokens", "24");
    assert_int_equal(a.exit_status, 0);
    assert_string_equal(di_strbuf_str(&a.out), di_strbuf_str(&b.out));
    assert_string_not_equal(di_strbuf_str(&a.out), di_strbuf_str(&c.out));
    program_free(&a);
    program_free(&b);
    program_free(&c);
}

static void stop_string_of_the_command_line(void **state) {
    (void)state;
    RUN(p, "run", "What is 47 + 38?", "--temperature", "0", "--stop", " = 8", "--stop", "xyz");
    assert_int_equal(p.exit_status, 0);
    assert_string_equal(di_strbuf_str(&p.out), "47 + 38\n");
    program_free(&p);
}

static void log_probabilities_go_to_standard_error(void **state) {
    (void)state;
    RUN(p, "run", "What is 47 + 38?", "--temperature", "0", "--max-tokens", "2", "--logprobs", "1");
    assert_int_equal(p.exit_status, 0);
    assert_contains(di_strbuf_str(&p.err), "\"4\"");
    program_free(&p);
}

static void bad_values_are_usage_errors(void **state) {
    (void)state;
    static const struct {
        const char *args[4], *names;
    } rows[] = {
        {{"run", "hi", "--temperature", "-1"}, "--temperature"},
        {{"run", "hi", "--temperature", "nan"}, "--temperature"},
        {{"run", "hi", "--temperature", "inf"}, "--temperature"},
        {{"run", "hi", "--max-tokens", "0"}, "--max-tokens"},
        {{"run", "hi", "--top-p", "0"}, "--top-p"},
        {{"run", "hi", "--top-p", "1.1"}, "--top-p"},
        {{"run", "hi", "--top-k", "-2"}, "--top-k"},
        {{"run", "hi", "--unknown-option"}, "--unknown-option"},
        {{"run", "hi", "--replay", "sometimes"}, "--replay"},
        {{"run", "hi", "--max-model-len", "8193"}, "8192"},
        {{"run", "hi", "--input", "x.jsonl"}, "--input"},
        {{"run", "--input", "/nonexistent.jsonl"}, "/nonexistent.jsonl"},
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        RUN(p, rows[i].args[0], rows[i].args[1], rows[i].args[2], rows[i].args[3]);
        if (p.exit_status != 2)
            fail_msg("row %zu: exit status %d: %s", i, p.exit_status, di_strbuf_str(&p.err));
        assert_contains(di_strbuf_str(&p.err), rows[i].names);
        assert_int_equal(p.out.len, 0);
        program_free(&p);
    }
}

static void faults_have_their_exit_status(void **state) {
    (void)state;
    RUN(model, "run", "hi", "--model", "/nonexistent");
    assert_int_equal(model.exit_status, 3);
    assert_contains(di_strbuf_str(&model.err), "/nonexistent");
    RUN(device, "run", "hi", "--backend", "ascend");
    assert_int_equal(device.exit_status, 4);
    assert_contains(di_strbuf_str(&device.err), "ascend");
    RUN(memory, "run", "hi", "--kv-memory", "1K");
    assert_int_equal(memory.exit_status, 4);
    assert_contains(di_strbuf_str(&memory.err), "1024 bytes, needed are");
    RUN(empty, "run", "");
    assert_int_equal(empty.exit_status, 1);
    assert_contains(di_strbuf_str(&empty.err), "empty");
    program nothing = {.args = {"run", "-"}, .input = ""};
    run(&nothing);
    assert_int_equal(nothing.exit_status, 1);
    program_free(&model);
    program_free(&device);
    program_free(&memory);
    program_free(&empty);
    program_free(&nothing);
}

static void long_and_broken_texts_are_fine(void **state) {
    (void)state;
    size_t n = 1 << 20;
    char *text = malloc(n);
    assert_non_null(text);
    memset(text, 'a', n);
    program big = {.args = {"run", "-"}, .input = text, .input_len = n};
    run(&big);
    assert_int_equal(big.exit_status, 1); /* understood, and longer than the context */
    assert_contains(di_strbuf_str(&big.err), "context");
    program broken = {.args = {"run", "-", "--max-tokens", "3"}, .input = "What\xFF\xC0 is \xE2\x82?"};
    run(&broken);
    assert_int_equal(broken.exit_status, 0);
    program_free(&big);
    program_free(&broken);
    free(text);
}

static void full_or_closed_output_is_an_error(void **state) {
    (void)state;
    program full = {.args = {"run", "hi", "--max-tokens", "20"}, .output_path = "/dev/full"};
    run(&full);
    assert_int_equal(full.exit_status, 4);
    assert_contains(di_strbuf_str(&full.err), "full");
    program closed = {.args = {"run", "hi", "--max-tokens", "20"}, .closes_output = true};
    run(&closed);
    assert_int_equal(closed.exit_status, 1);
    assert_contains(di_strbuf_str(&closed.err), "standard output");
    program gone = {.args = {"run", "hi", "--ignore-eos", "--max-tokens", "4000"}, .hang_up_after = 1};
    run(&gone);
    assert_int_equal(gone.exit_status, 1);
    assert_contains(di_strbuf_str(&gone.err), "reader has gone");
    program_free(&full);
    program_free(&closed);
    program_free(&gone);
}

static void interrupt_keeps_what_there_is(void **state) {
    (void)state;
    program p = {
        .args = {"run", "Tell me a story.", "--ignore-eos", "--max-tokens", "4000", "--temperature", "0", "--stats"},
        .signal_after = 10};
    run(&p);
    assert_int_equal(p.exit_status, 130);
    assert_true(p.out.len >= 10);
    assert_int_equal(p.out.data[p.out.len - 1], '\n');
    assert_contains(di_strbuf_str(&p.err), "finish reason abort");
    program_free(&p);
}

/* ---- a batch -------------------------------------------------------------------------------------------------------
 */

static const char batch_lines[] =
    "{\"id\":\"long\",\"prompt\":\"Once upon a time\",\"max_tokens\":40,\"temperature\":0,\"ignore_eos\":true}\n"
    "this is not JSON\n"
    "{\"id\":3,\"messages\":[{\"role\":\"user\",\"content\":\"What is 47 + 38?\"}],\"temperature\":0,\"logprobs\":2}\n"
    "\n"
    "{\"id\":\"ids\",\"prompt_token_ids\":[0,5,999999]}\n"
    "{\"id\":\"empty\",\"prompt\":\"\"}\n"
    "{\"id\":\"none\"}\n"
    "{\"id\":\"max\",\"prompt\":\"x\",\"max_tokens\":0}\n"
    "{\"id\":\"cold\",\"prompt\":\"x\",\"temperature\":-1}\n"
    "{\"id\":\"top\",\"prompt\":\"x\",\"top_p\":2}\n"
    "{\"id\":\"seed\",\"prompt\":\"Once\",\"max_tokens\":3,\"seed\":18446744073709551615}\n"
    "{\"id\":\"drawn\",\"prompt_token_ids\":[0],\"max_tokens\":3}\n"
    "{\"id\":\"think\",\"messages\":[{\"role\":\"user\",\"content\":\"What is 47 + "
    "38?\"}],\"reasoning_effort\":\"high\",\"temperature\":0}\n"
    "{\"id\":\"last\",\"prompt\":\"x\",\"max_tokens\":1}";

static void batch_answers_every_line_in_order(void **state) {
    (void)state;
    const char *path = di_test_tmp("batch.jsonl");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(batch_lines, file);
    fclose(file);
    RUN(p, "run", "--input", path);
    assert_int_equal(p.exit_status, 1); /* some lines failed */
    static const char *const ids[] = {"\"long\"",  "null",      "3",        "\"ids\"", "\"empty\"",
                                      "\"none\"",  "\"max\"",   "\"cold\"", "\"top\"", "\"seed\"",
                                      "\"drawn\"", "\"think\"", "\"last\""};
    static const char *const finish[] = {"length", "error", "stop",   "error",  "error", "error", "error",
                                         "error",  "error", "length", "length", "stop",  "length"};
    assert_int_equal(count_lines(&p), DI_COUNT(ids));
    for (int i = 0; i < (int)DI_COUNT(ids); i++) {
        di_json *v = line_of(&p, i);
        di_strbuf id = {0};
        di_json_write(&id, di_json_get(v, "id"), DI_JSON_COMPACT);
        assert_string_equal(di_strbuf_str(&id), ids[i]);
        assert_string_equal(text_of(v, "finish_reason"), finish[i]);
        bool is_error = strcmp(finish[i], "error") == 0;
        const di_json *error = di_json_get(v, "error");
        assert_int_equal(error != NULL, is_error);
        if (is_error)
            assert_string_equal(text_of(error, "type"), "invalid_request_error");
        assert_true(di_json_is(di_json_get(v, "text"), DI_JSON_STRING));
        assert_true(di_json_is(di_json_get(v, "token_ids"), DI_JSON_ARRAY));
        assert_int_equal(di_json_int(di_json_get(di_json_get(v, "usage"), "completion_tokens")),
                         di_json_array_len(di_json_get(v, "token_ids")));
        di_strbuf_deinit(&id);
        di_json_free(v);
    }
    di_json *v = line_of(&p, 0);
    assert_int_equal(di_json_array_len(di_json_get(v, "token_ids")), 40);
    assert_null(di_json_get(v, "seed")); /* greedy, and none was given */
    assert_null(di_json_get(v, "message"));
    di_json_free(v);
    v = line_of(&p, 2);
    assert_string_equal(text_of(v, "text"), "47 + 38 = 85");
    assert_string_equal(text_of(di_json_get(v, "message"), "content"), "47 + 38 = 85");
    const di_json *entry = di_json_at(di_json_get(v, "logprobs"), 0);
    assert_int_equal(di_json_array_len(di_json_get(v, "logprobs")), di_json_array_len(di_json_get(v, "token_ids")));
    assert_int_equal(di_json_array_len(di_json_get(entry, "top")), 2);
    assert_int_equal(di_json_int(di_json_get(entry, "token_id")),
                     di_json_int(di_json_at(di_json_at(di_json_get(entry, "top"), 0), 0)));
    di_json_free(v);
    v = line_of(&p, 9);
    assert_true(di_json_uint(di_json_get(v, "seed")) == UINT64_MAX);
    di_json_free(v);
    v = line_of(&p, 10);
    assert_true(di_json_uint(di_json_get(v, "seed")) < (uint64_t)1 << 53);
    di_json_free(v);
    v = line_of(&p, 11);
    assert_string_equal(text_of(di_json_get(v, "message"), "content"), "47 + 38 = 85");
    assert_contains(text_of(di_json_get(v, "message"), "reasoning_content"), "47");
    assert_contains(text_of(v, "text"), "</think>");
    di_json_free(v);
    program_free(&p);
}

/* A request of n samples has n lines in a row, in the place of its own, also where the queue holds few at once. */
static void samples_are_lines_in_a_row(void **state) {
    (void)state;
    static const char input[] = "{\"id\":\"a\",\"prompt\":\"The fox\",\"seed\":5,\"n\":3,\"max_tokens\":12}\n"
                                "{\"id\":\"b\",\"prompt\":\"The fox\",\"n\":9}\n"
                                "{\"id\":\"c\",\"prompt\":\"The fox\",\"seed\":6,\"max_tokens\":12,\"priority\":-5}\n"
                                "{\"id\":\"d\",\"prompt\":\"The fox\",\"seed\":7,\"max_tokens\":12}\n";
    program p = {.args = {"run", "--input", "-", "--max-queue", "3", "--max-seqs", "2", "--stats"}, .input = input};
    run(&p);
    assert_int_equal(p.exit_status, 1);
    assert_int_equal(count_lines(&p), 6);
    di_json *lines[6];
    for (int i = 0; i < 6; i++)
        lines[i] = line_of(&p, i);
    static const char *const ids[] = {"a", "a", "a", "b", "c", "d"};
    for (int i = 0; i < 6; i++) {
        assert_string_equal(text_of(lines[i], "id"), ids[i]);
        assert_int_equal(di_json_get(lines[i], "index") != NULL, i < 3);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(di_json_int(di_json_get(lines[i], "index")), i);
        assert_int_equal(di_json_int(di_json_get(lines[i], "seed")), 5 + i);
    }
    assert_contains(text_of(di_json_get(lines[3], "error"), "message"), "n: 9, expected 1 to 3");
    assert_true(di_json_equal(di_json_get(lines[1], "token_ids"), di_json_get(lines[4], "token_ids")));
    assert_true(di_json_equal(di_json_get(lines[2], "token_ids"), di_json_get(lines[5], "token_ids")));
    assert_contains(di_strbuf_str(&p.err), "prefix cache: ");
    assert_contains(di_strbuf_str(&p.err), "requests: 5 in ");
    for (int i = 0; i < 6; i++)
        di_json_free(lines[i]);
    program_free(&p);
}

/* What is only about speed and memory: the same answer under every setting. */
static void engine_options_change_no_answer(void **state) {
    (void)state;
    static const char input[] = "{\"id\":1,\"prompt\":\"Once upon a time\",\"seed\":5,\"max_tokens\":16}\n"
                                "{\"id\":2,\"prompt\":\"Once upon a time\",\"seed\":6,\"max_tokens\":16}\n";
    static const char *const options[][2] = {
        {"--no-prefix-cache", NULL}, {"--async", "off"},      {"--max-context-sum", "20"}, {"--ttft-goal", "1"},
        {"--tpot-goal", "0.5"},      {"--log-interval", "1"}, {"--max-queue", "1"},
    };
    /* How many drafts are verified by their cost is the machine's affair, and part of a result's usage. */
    program plain = {.args = {"run", "--input", "-", "--draft-policy", "fixed"}, .input = input};
    run(&plain);
    assert_int_equal(plain.exit_status, 0);
    for (size_t i = 0; i < DI_COUNT(options); i++) {
        program p = {.args = {"run", "--input", "-", "--draft-policy", "fixed", "--log-level", "info", options[i][0],
                              options[i][1]},
                     .input = input};
        run(&p);
        assert_int_equal(p.exit_status, 0);
        assert_string_equal(di_strbuf_str(&p.out), di_strbuf_str(&plain.out));
        if (strcmp(options[i][0], "--log-interval") == 0)
            assert_contains(di_strbuf_str(&p.err), "info: steps ");
        program_free(&p);
    }
    program_free(&plain);
}

/* Outputs follow their formats; what can't be compiled is refused by name, and only that. */
static void outputs_follow_their_formats(void **state) {
    (void)state;
#define SCHEMA                                                                                                         \
    "{\"type\":\"object\",\"properties\":{\"ok\":{\"type\":\"boolean\"},\"n\":{\"type\":\"integer\",\"minimum\":3,"    \
    "\"maximum\":17}},\"required\":[\"ok\",\"n\"],\"additionalProperties\":false}"
    static const struct {
        const char *fields, *error;
    } rows[] = {
        {"\"prompt\":\"x\",\"regex\":\"(ab|c){3}\"", NULL},
        {"\"prompt\":\"x\",\"regex\":\"(a\"", "regex: "},
        {"\"prompt\":\"x\",\"ebnf\":\"root ::= \\\"no\\\" | \\\"yes\\\" root\"", NULL},
        {"\"prompt\":\"x\",\"ebnf\":\"root ::= nothing\"", "ebnf, line 1, column 10: "},
        {"\"prompt\":\"x\",\"choice\":[\"red\",\"green\"]", NULL},
        {"\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"response_format\":{\"type\":\"json_schema\","
         "\"json_schema\":{\"name\":\"a\",\"schema\":" SCHEMA "}}",
         NULL},
        {"\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"response_format\":{\"type\":\"json_schema\","
         "\"json_schema\":{\"name\":\"a\",\"schema\":{\"type\":\"array\",\"uniqueItems\":true}}}",
         "response_format: /uniqueItems"},
        {"\"prompt\":\"x\"", NULL},
    };
    di_strbuf input = {0};
    for (size_t i = 0; i < DI_COUNT(rows); i++)
        di_strbuf_printf(&input, "{\"id\":%zu,\"max_tokens\":90,\"temperature\":0.3,\"seed\":%zu,%s}\n", i, i,
                         rows[i].fields);
    program p = {.args = {"run", "--input", "-"}, .input = di_strbuf_str(&input)};
    run(&p);
    assert_int_equal(p.exit_status, 1);
    assert_int_equal(count_lines(&p), DI_COUNT(rows));
    for (int i = 0; i < (int)DI_COUNT(rows); i++) {
        di_json *v = line_of(&p, i);
        const char *text = text_of(v, "text"), *finish = text_of(v, "finish_reason");
        if (rows[i].error) {
            assert_string_equal(finish, "error");
            assert_contains(text_of(di_json_get(v, "error"), "message"), rows[i].error);
        } else if (strcmp(finish, "stop") == 0 && i == 0) {
            for (const char *at = text; *at; at += *at == 'c' ? 1 : 2)
                assert_true(*at == 'c' || strncmp(at, "ab", 2) == 0);
        } else if (strcmp(finish, "stop") == 0 && i == 4) {
            assert_true(strcmp(text, "red") == 0 || strcmp(text, "green") == 0);
        } else if (strcmp(finish, "stop") == 0 && i == 5) {
            di_json *answer = NULL;
            di_error err = {0};
            di_test_ok(di_json_parse(&answer, text, strlen(text), &err), &err);
            assert_true(di_json_is(di_json_get(answer, "ok"), DI_JSON_BOOL));
            assert_in_range(di_json_int(di_json_get(answer, "n")), 3, 17);
            di_json_free(answer);
        }
        if (i == 0 || i == 4 || i == 5) /* these end by themselves */
            assert_string_equal(finish, "stop");
        di_json_free(v);
    }
    di_strbuf_deinit(&input);
    program_free(&p);
}

static void good_batch_exits_with_zero(void **state) {
    (void)state;
    program p = {.args = {"run", "--input", "-", "--temperature", "0", "--max-tokens", "2"},
                 .input = "{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n"};
    run(&p);
    assert_int_equal(p.exit_status, 0);
    assert_int_equal(count_lines(&p), 2);
    program empty = {.args = {"run", "--input", "-"}, .input = ""};
    run(&empty);
    assert_int_equal(empty.exit_status, 0);
    assert_int_equal(empty.out.len, 0);
    program_free(&p);
    program_free(&empty);
}

static void interrupted_batch_reports_what_it_has(void **state) {
    (void)state;
    program p = {.args = {"run", "--input", "-", "--max-seqs", "1"},
                 .input = "{\"id\":1,\"prompt\":\"a\",\"max_tokens\":1}\n"
                          "{\"id\":2,\"prompt\":\"b\",\"max_tokens\":4000,\"ignore_eos\":true}\n"
                          "{\"id\":3,\"prompt\":\"c\",\"max_tokens\":4000,\"ignore_eos\":true}\n",
                 .signal_after = 10};
    run(&p);
    assert_int_equal(p.exit_status, 130);
    for (int i = 1; i < count_lines(&p); i++) {
        di_json *v = line_of(&p, i);
        assert_string_equal(text_of(v, "finish_reason"), "abort");
        di_json_free(v);
    }
    program_free(&p);
}

/* ---- chat ----------------------------------------------------------------------------------------------------------
 */

static void chat_keeps_its_history(void **state) {
    (void)state;
    const char *path = di_test_tmp("chat.jsonl");
    di_strbuf input = {0};
    di_strbuf_printf(
        &input, "What is 47 + 38?\n/reasoning high\nWhat is 2 + 3?\n/bogus\n/save %s\n/reset\n/help\n/exit\nnot read\n",
        path);
    program p = {.args = {"chat", "--temperature", "0", "--system", "You are calm."}, .input = di_strbuf_str(&input)};
    run(&p);
    assert_int_equal(p.exit_status, 1); /* one command was unknown */
    assert_memory_equal(di_strbuf_str(&p.out), "47 + 38 = 85\n", 13);
    assert_int_equal(count_lines(&p), 2);
    assert_contains(di_strbuf_str(&p.err), "unknown command '/bogus'");
    assert_contains(di_strbuf_str(&p.err), "thinking with effort 75");
    assert_contains(di_strbuf_str(&p.err), "/system");
    di_strbuf saved = {0};
    di_error err = {0};
    di_json *v = NULL;
    di_test_ok(di_file_read(path, 1 << 20, &saved, &err), &err);
    di_test_ok(di_json_parse(&v, saved.data, saved.len, &err), &err);
    const di_json *messages = di_json_get(v, "messages");
    static const char *const roles[] = {"system", "user", "assistant", "user", "assistant"};
    assert_int_equal(di_json_array_len(messages), 5);
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(text_of(di_json_at(messages, i), "role"), roles[i]);
    assert_string_equal(text_of(di_json_at(messages, 2), "content"), "47 + 38 = 85");
    di_json_free(v);
    di_strbuf_deinit(&saved);
    di_strbuf_deinit(&input);
    program_free(&p);
}

DI_TEST_GROUP(run, cmocka_unit_test(prompt_streams_an_answer), cmocka_unit_test(prompt_comes_from_standard_input),
              cmocka_unit_test(thinking_is_left_out_of_a_pipe), cmocka_unit_test(raw_prompt_is_continued),
              cmocka_unit_test(seed_gives_the_same_answer), cmocka_unit_test(stop_string_of_the_command_line),
              cmocka_unit_test(log_probabilities_go_to_standard_error), cmocka_unit_test(bad_values_are_usage_errors),
              cmocka_unit_test(faults_have_their_exit_status), cmocka_unit_test(long_and_broken_texts_are_fine),
              cmocka_unit_test(full_or_closed_output_is_an_error), cmocka_unit_test(interrupt_keeps_what_there_is),
              cmocka_unit_test(batch_answers_every_line_in_order), cmocka_unit_test(samples_are_lines_in_a_row),
              cmocka_unit_test(engine_options_change_no_answer), cmocka_unit_test(outputs_follow_their_formats),
              cmocka_unit_test(good_batch_exits_with_zero), cmocka_unit_test(interrupted_batch_reports_what_it_has),
              cmocka_unit_test(chat_keeps_its_history));
