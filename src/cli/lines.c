/* The loop of the commands that answer standard input line by line (lines.h).
 *
 * Lines come from the reader that run and chat use; a blank line has no answer. Without an output the other lines are
 * of no use, so that a failed write ends the command. */
#include "lines.h"

#include <unistd.h>

#include "cli_model.h"

static bool is_blank(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r') {
            return false;
        }
    }
    return true;
}

int di_cli_answer_lines(di_cli_line_fn answer, void *ctx) {
    di_line_reader reader = {.fd = STDIN_FILENO, .name = "standard input"};
    di_strbuf out = {0};
    di_error err = {0};
    di_status st = DI_OK;
    int exit_status = 0;
    while (st == DI_OK) {
        const char *line;
        size_t len;
        di_line_state state = di_line_reader_next(&reader, true, &line, &len, &err);
        if (state == DI_LINE_FAILED) {
            st = err.code;
        }
        if (state != DI_LINE_READY) {
            break;
        }
        if (is_blank(line, len)) {
            continue;
        }
        di_strbuf_reset(&out);
        if (!answer(ctx, line, len, &out)) {
            exit_status = 1;
        }
        st = di_strbuf_status(&out, &err);
        st = st ? st : di_cli_print(out.data, out.len, &err);
        st = st ? st : di_cli_flush(&err);
    }
    di_line_reader_deinit(&reader);
    di_strbuf_deinit(&out);
    return st ? di_cli_fail(&err) : exit_status;
}
