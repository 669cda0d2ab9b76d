/* Commands that answer standard input line by line: tokenize, encode, parse, grammar. */
#ifndef DI_CLI_LINES_H
#define DI_CLI_LINES_H

#include "cli.h"

/* Appends the answer to one line, its line feed too, to out, which is empty; false when the answer is an error. */
typedef bool (*di_cli_line_fn)(void *ctx, const char *line, size_t len, di_strbuf *out);

/* Answers every line of standard input that is not blank, and returns the exit status: 1 where an answer was an error.
 * An answer is written out before the next line is read, so that the command can be driven through a pipe. */
int di_cli_answer_lines(di_cli_line_fn answer, void *ctx);

#endif
