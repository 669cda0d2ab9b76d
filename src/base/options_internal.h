/* The table of options as data, for the reader and for the texts made from it. Private to base/. */
#ifndef DI_BASE_OPTIONS_INTERNAL_H
#define DI_BASE_OPTIONS_INTERNAL_H

#include "options.h"

typedef enum di_option_type {
    DI_OPTION_INT,
    DI_OPTION_BYTES,
    DI_OPTION_U64,
    DI_OPTION_DOUBLE,
    DI_OPTION_BOOL,
    DI_OPTION_STRING,
    DI_OPTION_CHOICE,
    DI_OPTION_LIST
} di_option_type;

typedef struct di_option_row {
    di_option_type type;
    size_t offset; /* of the field in di_options */
    union {
        int64_t i;
        uint64_t u;
        double d;
        bool b;
        const char *s;
    } def;
    int64_t int_min, int_max;
    double double_min, double_max;
    const char *words; /* accepted words of a choice, between bars */
    const char *flag, *env;
    di_option_group group;
    unsigned commands;
    const char *metavar, *def_text, *help;
} di_option_row;

extern const di_option_row di_option_rows[DI_OPT_COUNT];

/* Names in the environment, main name first; returns how many there are (1 or 2). */
int di_option_env_names(const di_option_row *row, const char *names[2], size_t lens[2]);
/* Appends what the option accepts: "an integer from 1 to 4096". */
void di_option_accepted(di_strbuf *out, const di_option_row *row);

#endif
