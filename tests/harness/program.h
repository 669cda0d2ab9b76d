/* The program as a script sees it: shell commands with what they print, files for them to read, and the error that
 * answers a bad line of input. */
#ifndef DI_TESTS_PROGRAM_H
#define DI_TESTS_PROGRAM_H

#include <sys/wait.h>

#include "harness.h"

/* Runs a shell command, put together as by printf. What it writes to standard output (behind "2>&1": to standard error
 * too) is in out[size] as text, cut to fit. Returns the exit status. */
__attribute__((format(printf, 3, 4))) static inline int di_test_shell(char *out, size_t size, const char *format, ...) {
    char command[16384];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(command, sizeof command, format, args);
    va_end(args);
    assert_true(n > 0 && (size_t)n < sizeof command);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    out[fread(out, 1, size - 1, pipe)] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* The path of a file with that text, as di_test_tmp. */
static inline const char *di_test_write(const char *name, const char *text) {
    const char *path = di_test_tmp(name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    return path;
}

/* The first line of `shown` is the error of a request, with that message within and that `param` (JSON); the next one
 * begins with `next`, so that another line still ran. */
static inline void di_test_assert_line_error(const char *shown, const char *message, const char *param,
                                             const char *next) {
    char text[512];
    assert_int_equal(strncmp(shown, "{\"error\":{\"message\":\"", 21), 0);
    assert_contains(shown, message);
    snprintf(text, sizeof text, "\"param\":%s,\"code\":\"invalid_request_error\"}}\n%s", param, next);
    assert_contains(shown, text);
}

#endif
