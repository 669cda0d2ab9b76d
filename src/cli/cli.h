/* The program: one function a command, and what they share.
 *
 * A command gets its options checked and its default model filled in, prints results to standard output by
 * di_cli_print, everything else to standard error, and returns the exit status. main.c has the table of commands. */
#ifndef DI_CLI_H
#define DI_CLI_H

#include "base/base.h"

/* Each returns the exit status of the program. opt->model is never NULL. */
int di_cmd_run(const di_options *opt);
int di_cmd_chat(const di_options *opt);
int di_cmd_serve(const di_options *opt);
int di_cmd_bench(const di_options *opt);
int di_cmd_tokenize(const di_options *opt);
int di_cmd_encode(const di_options *opt);
int di_cmd_parse(const di_options *opt);
int di_cmd_grammar(const di_options *opt);
int di_cmd_info(const di_options *opt);
int di_cmd_version(const di_options *opt);

/* Prints "deepinfer: <message>" to standard error and returns the exit status of the error's code. */
int di_cli_fail(const di_error *err);

/* Writes n bytes to standard output, buffered. DI_ERR_DISK when the disk is full, DI_ERR_CANCELLED when the reader of a
 * pipe has gone, DI_ERR_IO. */
di_status di_cli_print(const char *s, size_t n, di_error *err);
/* Hands what is buffered to the system; errors as above. */
di_status di_cli_flush(di_error *err);

#endif
