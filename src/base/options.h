/* Options: one table (options.def) for flags, environment, --help and docs/options.md.
 *
 * Read once at start, then passed as const. The order is flag, environment, default. A bad value is an error that names
 * the variable, the value and what is accepted; an unknown DEEPINFER_ name is a warning with the nearest known one; two
 * names of one option in the environment with different values are an error. Strings are borrowed from argv and the
 * environment, which live as long as the process. */
#ifndef DI_BASE_OPTIONS_H
#define DI_BASE_OPTIONS_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arena.h"
#include "strbuf.h"

/* Commands, as a set of bits. */
enum {
    DI_COMMAND_RUN = 1 << 0,
    DI_COMMAND_CHAT = 1 << 1,
    DI_COMMAND_BENCH = 1 << 2,
    DI_COMMAND_TOKENIZE = 1 << 3,
    DI_COMMAND_ENCODE = 1 << 4,
    DI_COMMAND_PARSE = 1 << 5,
    DI_COMMAND_INFO = 1 << 6,
    DI_COMMAND_VERSION = 1 << 7,
    DI_COMMAND_GRAMMAR = 1 << 8,
    DI_COMMAND_SERVE = 1 << 9,
    DI_COMMANDS_ALL = (1 << 10) - 1,
    DI_COMMANDS_GENERATE = DI_COMMAND_RUN | DI_COMMAND_CHAT,
    DI_COMMANDS_ENGINE = DI_COMMAND_RUN | DI_COMMAND_CHAT | DI_COMMAND_SERVE | DI_COMMAND_BENCH | DI_COMMAND_INFO
};

typedef enum di_option_group {
    DI_GROUP_COMMON,
    DI_GROUP_REQUEST,
    DI_GROUP_SAMPLING,
    DI_GROUP_ENGINE,
    DI_GROUP_CPU,
    DI_GROUP_SERVER,
    DI_GROUP_OUTPUT,
    DI_GROUP_COUNT
} di_option_group;

/* Limits of OPT_DOUBLE: any finite value, and "above 0" (the least positive double). */
#define DI_DOUBLE_MAX DBL_MAX
#define DI_DOUBLE_ABOVE_0 DBL_TRUE_MIN

typedef struct di_string_list {
    const char **items; /* owned array of strings that the options hold or that live as long as the process */
    size_t n;
} di_string_list;

/* DI_OPT_<field>: the number of an option. */
typedef enum di_option_id {
#define OPT_INT(field, ...) DI_OPT_##field,
#define OPT_BYTES(field, ...) DI_OPT_##field,
#define OPT_U64(field, ...) DI_OPT_##field,
#define OPT_DOUBLE(field, ...) DI_OPT_##field,
#define OPT_BOOL(field, ...) DI_OPT_##field,
#define OPT_STRING(field, ...) DI_OPT_##field,
#define OPT_CHOICE(field, ...) DI_OPT_##field,
#define OPT_LIST(field, ...) DI_OPT_##field,
#include "options.def"
#undef OPT_INT
#undef OPT_BYTES
#undef OPT_U64
#undef OPT_DOUBLE
#undef OPT_BOOL
#undef OPT_STRING
#undef OPT_CHOICE
#undef OPT_LIST
    DI_OPT_COUNT
} di_option_id;

typedef enum di_option_source { DI_SOURCE_DEFAULT, DI_SOURCE_ENVIRONMENT, DI_SOURCE_FLAG } di_option_source;

/* One field a row of options.def: int64_t (OPT_INT, OPT_BYTES), uint64_t, double, bool, a string (NULL when not given),
 * a choice (the accepted word, or the integer's canonical spelling), a list. */
typedef struct di_options {
#define OPT_INT(field, ...) int64_t field;
#define OPT_BYTES(field, ...) int64_t field;
#define OPT_U64(field, ...) uint64_t field;
#define OPT_DOUBLE(field, ...) double field;
#define OPT_BOOL(field, ...) bool field;
#define OPT_STRING(field, ...) const char *field;
#define OPT_CHOICE(field, ...) const char *field;
#define OPT_LIST(field, ...) di_string_list field;
#include "options.def"
#undef OPT_INT
#undef OPT_BYTES
#undef OPT_U64
#undef OPT_DOUBLE
#undef OPT_BOOL
#undef OPT_STRING
#undef OPT_CHOICE
#undef OPT_LIST
    di_option_source source[DI_OPT_COUNT]; /* where the value of DI_OPT_<field> comes from */
    bool is_help;                          /* --help or -h was given; the rest is not checked then */
    di_string_list args;                   /* positional arguments in order */
    di_arena memory;                       /* copies made while reading */
} di_options;

/* The defaults, without flags or environment. */
void di_options_init(di_options *opt);
void di_options_deinit(di_options *opt);

/* Reads argv [argc] (behind the command's name) and the environment into opt, which needs no init before and a deinit
 * after, on error too. command is one DI_COMMAND_ bit: a flag of another command is an error. envp NULL is the
 * process's environment. Warnings (may be NULL) gets one line for each. DI_ERR_ARG, DI_ERR_MEMORY. */
di_status di_options_read(di_options *opt, unsigned command, int argc, char *const *argv, char *const *envp,
                          di_strbuf *warnings, di_error *err);

/* Whether flag or environment gave the option. */
bool di_options_is_set(const di_options *opt, di_option_id id);

/* Name of one DI_COMMAND_ bit: "run". */
const char *di_command_name(unsigned command);

/* The option part of `deepinfer COMMAND --help`, lines of at most 100 columns. Appended. */
void di_options_help(di_strbuf *out, unsigned command);
/* docs/options.md, whole. Appended. */
void di_options_markdown(di_strbuf *out);

/* The entry of names [n] that is nearest to name by edit distance; NULL when none is close enough to be a slip of the
 * keyboard. */
const char *di_nearest_name(const char *name, const char *const *names, size_t n);

#endif
