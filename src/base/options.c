/* The reader of options: flags, environment, checks.
 *
 * Everything works from one table made of options.def. Values go through one function, whether they come from a flag or
 * from the environment, so that both accept the same and refuse with the same words. The texts made from the table
 * (--help, docs/options.md) are in options_text.c. This is the only file that looks at the environment. */
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "options_internal.h"
#include "util.h"

/* clang-format off */
const di_option_row di_option_rows[DI_OPT_COUNT] = {
#define OPT_INT(f, def, lo, hi, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_INT, offsetof(di_options, f), {.i = def}, lo, hi, 0, 0, NULL, flag, env, group, cmds, metavar, def_text, help},
#define OPT_BYTES(f, def, lo, hi, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_BYTES, offsetof(di_options, f), {.i = def}, lo, hi, 0, 0, NULL, flag, env, group, cmds, metavar, def_text, help},
#define OPT_U64(f, def, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_U64, offsetof(di_options, f), {.u = def}, 0, 0, 0, 0, NULL, flag, env, group, cmds, metavar, def_text, help},
#define OPT_DOUBLE(f, def, lo, hi, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_DOUBLE, offsetof(di_options, f), {.d = def}, 0, 0, lo, hi, NULL, flag, env, group, cmds, metavar, def_text, help},
#define OPT_BOOL(f, def, flag, env, group, cmds, help) \
    {DI_OPTION_BOOL, offsetof(di_options, f), {.b = def}, 0, 0, 0, 0, NULL, flag, env, group, cmds, "", "", help},
#define OPT_STRING(f, def, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_STRING, offsetof(di_options, f), {.s = def}, 0, 0, 0, 0, NULL, flag, env, group, cmds, metavar, def_text, help},
#define OPT_CHOICE(f, def, words, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_CHOICE, offsetof(di_options, f), {.s = def}, 0, 0, 0, 0, words, flag, env, group, cmds, metavar, def_text, help},
#define OPT_LIST(f, flag, env, group, cmds, metavar, def_text, help) \
    {DI_OPTION_LIST, offsetof(di_options, f), {.s = NULL}, 0, 0, 0, 0, NULL, flag, env, group, cmds, metavar, def_text, help},
#include "options.def"
#undef OPT_INT
#undef OPT_BYTES
#undef OPT_U64
#undef OPT_DOUBLE
#undef OPT_BOOL
#undef OPT_STRING
#undef OPT_CHOICE
#undef OPT_LIST
};
/* clang-format on */

static void *field_of(di_options *opt, int id) {
    return (char *)opt + di_option_rows[id].offset;
}

void di_options_init(di_options *opt) {
    *opt = (di_options){0};
    di_arena_init(&opt->memory, 1024);
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        const di_option_row *row = &di_option_rows[id];
        void *field = field_of(opt, id);
        switch (row->type) {
        case DI_OPTION_INT:
        case DI_OPTION_BYTES:
            *(int64_t *)field = row->def.i;
            break;
        case DI_OPTION_U64:
            *(uint64_t *)field = row->def.u;
            break;
        case DI_OPTION_DOUBLE:
            *(double *)field = row->def.d;
            break;
        case DI_OPTION_BOOL:
            *(bool *)field = row->def.b;
            break;
        case DI_OPTION_STRING:
        case DI_OPTION_CHOICE:
            *(const char **)field = row->def.s;
            break;
        case DI_OPTION_LIST:
            break;
        }
    }
}

void di_options_deinit(di_options *opt) {
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        if (di_option_rows[id].type == DI_OPTION_LIST) {
            free(((di_string_list *)field_of(opt, id))->items);
        }
    }
    free(opt->args.items);
    di_arena_deinit(&opt->memory);
    di_options_init(opt);
}

bool di_options_is_set(const di_options *opt, di_option_id id) {
    return opt->source[id] != DI_SOURCE_DEFAULT;
}

static di_status list_add(di_string_list *list, const char *s, di_error *err) {
    const char **items = realloc(list->items, (list->n + 1) * sizeof *items);
    if (!items) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory while reading the options");
    }
    items[list->n++] = s;
    list->items = items;
    return DI_OK;
}

/* A copy of n bytes that lives as long as opt; NULL when memory is short. */
static const char *keep_copy(di_options *opt, const char *s, size_t n, di_error *err) {
    const char *copy = di_arena_strndup(&opt->memory, s, n);
    if (!copy) {
        di_fail(err, DI_ERR_MEMORY, "out of memory while reading the options");
    }
    return copy;
}

/* The part of a word list "a|b|1..100" at *p, which moves behind it. */
static bool next_word(const char **p, const char **word, size_t *len) {
    if (!**p) {
        return false;
    }
    *word = *p;
    *len = strcspn(*p, "|");
    *p += *len + ((*p)[*len] == '|');
    return true;
}

/* The canonical spelling of value among the accepted words, or NULL. */
static const char *match_choice(di_options *opt, const char *words, const char *value, di_error *err) {
    const char *p = words, *word;
    size_t len;
    while (next_word(&p, &word, &len)) {
        const char *dots = memmem(word, len, "..", 2);
        if (!dots) {
            if (strlen(value) == len && memcmp(word, value, len) == 0) {
                return keep_copy(opt, word, len, err);
            }
            continue;
        }
        /* The table is ours: both ends of a range are integers. */
        int64_t low = strtoll(word, NULL, 10), high = strtoll(dots + 2, NULL, 10), number;
        if (di_parse_i64(value, &number) && number >= low && number <= high) {
            char text[24];
            snprintf(text, sizeof text, "%lld", (long long)number);
            return keep_copy(opt, text, strlen(text), err);
        }
    }
    return NULL;
}

/* A whole number of bytes with an optional K, M or G (powers of 1024, an iB or B behind it is fine). */
static bool parse_bytes(const char *s, int64_t *out) {
    char digits[24];
    size_t n = strspn(s, "0123456789");
    if (n == 0 || n >= sizeof digits) {
        return false;
    }
    memcpy(digits, s, n);
    digits[n] = '\0';
    int64_t value;
    if (!di_parse_i64(digits, &value)) {
        return false;
    }
    static const char suffixes[] = "KMGT";
    const char *suffix = s + n;
    int shift = 0;
    if (*suffix) {
        const char *at = strchr(suffixes, *suffix & ~0x20);
        if (at && *at) {
            shift = 10 * (int)(at - suffixes + 1);
            suffix++;
        }
        if (*suffix && strcasecmp(suffix, "b") != 0 && !(shift && strcasecmp(suffix, "ib") == 0)) {
            return false;
        }
    }
    if (value > INT64_MAX >> shift) {
        return false;
    }
    *out = value << shift;
    return true;
}

/* Any integer, of any length and sign, modulo 2^64. */
static bool parse_modular(const char *s, uint64_t *out) {
    bool is_negative = *s == '-';
    s += is_negative;
    uint64_t value = 0;
    if (!*s) {
        return false;
    }
    for (; *s; s++) {
        if (*s < '0' || *s > '9') {
            return false;
        }
        value = value * 10 + (uint64_t)(*s - '0');
    }
    *out = is_negative ? 0 - value : value;
    return true;
}

static bool parse_bool(const char *s, bool *out) {
    static const char *const words[] = {"false", "true", "0", "1", "off", "on", "no", "yes"};
    for (size_t i = 0; i < DI_COUNT(words); i++) {
        if (strcasecmp(s, words[i]) == 0) {
            *out = i % 2 == 1;
            return true;
        }
    }
    return false;
}

/* Sets option id from text. name is what the user wrote: the flag or the variable. */
static di_status set_value(di_options *opt, int id, const char *name, const char *text, di_option_source source,
                           di_error *err) {
    const di_option_row *row = &di_option_rows[id];
    void *field = field_of(opt, id);
    bool is_ok = false;
    switch (row->type) {
    case DI_OPTION_INT:
    case DI_OPTION_BYTES: {
        int64_t value;
        is_ok = (row->type == DI_OPTION_INT ? di_parse_i64(text, &value) : parse_bytes(text, &value)) &&
                value >= row->int_min && value <= row->int_max;
        if (is_ok) {
            *(int64_t *)field = value;
        }
        break;
    }
    case DI_OPTION_U64:
        is_ok = parse_modular(text, field);
        break;
    case DI_OPTION_DOUBLE: {
        double value;
        is_ok = di_parse_double(text, &value) && value >= row->double_min && value <= row->double_max;
        if (is_ok) {
            *(double *)field = value;
        }
        break;
    }
    case DI_OPTION_BOOL:
        is_ok = parse_bool(text, field);
        break;
    case DI_OPTION_STRING:
        *(const char **)field = text;
        is_ok = true;
        break;
    case DI_OPTION_CHOICE: {
        di_error memory = {.code = DI_OK};
        const char *word = match_choice(opt, row->words, text, &memory);
        if (memory.code) {
            return di_fail(err, memory.code, "%s", memory.message);
        }
        bool is_on;
        if (!word && strcmp(row->words, "on|off") == 0 && parse_bool(text, &is_on)) {
            word = is_on ? "on" : "off"; /* a switch that reads as a word takes what other switches take */
        }
        if (!word && row == &di_option_rows[DI_OPT_draft_policy] && parse_bool(text, &is_on)) {
            word = is_on ? "cost" : "fixed"; /* its other name is a switch in the released engine */
        }
        is_ok = word != NULL;
        if (is_ok) {
            *(const char **)field = word;
        }
        break;
    }
    case DI_OPTION_LIST: {
        is_ok = *text != '\0';
        di_status st = is_ok ? list_add(field, text, err) : DI_OK;
        if (st) {
            return st;
        }
        break;
    }
    }
    if (!is_ok) {
        di_strbuf accepted = {0};
        di_option_accepted(&accepted, row);
        di_status st = di_fail(err, DI_ERR_ARG, "%s: found '%s', expected %s", name, text, di_strbuf_str(&accepted));
        di_strbuf_deinit(&accepted);
        return st;
    }
    opt->source[id] = source;
    return DI_OK;
}

static int find_flag(const char *flag, size_t len) {
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        if (strlen(di_option_rows[id].flag) == len && memcmp(di_option_rows[id].flag, flag, len) == 0) {
            return id;
        }
    }
    return -1;
}

/* Splits "A B" into its names; returns how many there are. */
int di_option_env_names(const di_option_row *row, const char *names[2], size_t lens[2]) {
    int n = 0;
    for (const char *p = row->env; *p && n < 2;) {
        size_t len = strcspn(p, " ");
        names[n] = p;
        lens[n++] = len;
        p += len + (p[len] == ' ');
    }
    return n;
}

static int find_env(const char *name, size_t len) {
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        const char *names[2];
        size_t lens[2];
        int n = di_option_env_names(&di_option_rows[id], names, lens);
        for (int i = 0; i < n; i++) {
            if (lens[i] == len && memcmp(names[i], name, len) == 0) {
                return id;
            }
        }
    }
    return -1;
}

/* Edit distance of a and b with neighbours swapped counting once; more than 63 bytes count as far apart. */
static int edit_distance(const char *a, const char *b) {
    enum { LEN_MAX = 63 };
    size_t n = strlen(a), m = strlen(b);
    if (n > LEN_MAX || m > LEN_MAX) {
        return LEN_MAX;
    }
    int rows[3][LEN_MAX + 1];
    int *before = rows[0], *last = rows[1], *row = rows[2];
    for (size_t j = 0; j <= m; j++) {
        last[j] = (int)j;
        before[j] = (int)j;
    }
    for (size_t i = 1; i <= n; i++) {
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            best = DI_MIN(best, last[j] + 1);
            best = DI_MIN(best, row[j - 1] + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                best = DI_MIN(best, before[j - 2] + 1);
            }
            row[j] = best;
        }
        int *oldest = before;
        before = last;
        last = row;
        row = oldest;
    }
    return last[m];
}

const char *di_nearest_name(const char *name, const char *const *names, size_t n) {
    const char *nearest = NULL;
    int best = 0;
    for (size_t i = 0; i < n; i++) {
        int distance = edit_distance(name, names[i]);
        int allowed = 1 + (int)strlen(names[i]) / 5;
        if (distance <= allowed && (!nearest || distance < best)) {
            nearest = names[i];
            best = distance;
        }
    }
    return nearest;
}

static di_status unknown_flag(const char *arg, size_t len, unsigned command, di_error *err) {
    const char *flags[DI_OPT_COUNT];
    size_t n = 0;
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        if (di_option_rows[id].commands & command) {
            flags[n++] = di_option_rows[id].flag;
        }
    }
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)DI_MIN(len, sizeof name - 1), arg);
    const char *nearest = di_nearest_name(name, flags, n);
    if (nearest) {
        return di_fail(err, DI_ERR_ARG, "unknown option '%s', did you mean '%s'?", name, nearest);
    }
    return di_fail(err, DI_ERR_ARG, "unknown option '%s', see 'deepinfer %s --help'", name, di_command_name(command));
}

static di_status read_flags(di_options *opt, unsigned command, int argc, char *const *argv, di_error *err) {
    di_status st;
    bool is_only_args = false;
    for (int i = 0; i < argc; i++) {
        const char *arg = argv[i];
        if (is_only_args || arg[0] != '-' || arg[1] == '\0') {
            if ((st = list_add(&opt->args, arg, err))) {
                return st;
            }
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            is_only_args = true;
            continue;
        }
        if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
            opt->is_help = true;
            continue;
        }
        size_t len = strcspn(arg, "=");
        int id = find_flag(arg, len);
        if (id < 0) {
            return unknown_flag(arg, len, command, err);
        }
        const di_option_row *row = &di_option_rows[id];
        if (!(row->commands & command)) {
            return di_fail(err, DI_ERR_ARG, "option '%s' is not one of 'deepinfer %s'", row->flag,
                           di_command_name(command));
        }
        const char *value;
        if (arg[len] == '=') {
            value = arg + len + 1;
        } else if (row->type == DI_OPTION_BOOL) {
            value = "true";
        } else if (i + 1 < argc) {
            value = argv[++i];
        } else {
            return di_fail(err, DI_ERR_ARG, "option '%s' needs a value: %s", row->flag, row->metavar);
        }
        /* A list given by flags replaces the one of the environment, which is read before. */
        if (row->type == DI_OPTION_LIST && opt->source[id] != DI_SOURCE_FLAG) {
            ((di_string_list *)field_of(opt, id))->n = 0;
        }
        if ((st = set_value(opt, id, row->flag, value, DI_SOURCE_FLAG, err))) {
            return st;
        }
    }
    return DI_OK;
}

static const char *env_value(char *const *envp, const char *name, size_t len) {
    for (; *envp; envp++) {
        if (strncmp(*envp, name, len) == 0 && (*envp)[len] == '=') {
            return *envp + len + 1;
        }
    }
    return NULL;
}

/* Sets a list from a variable, one entry a line. */
static di_status set_lines(di_options *opt, int id, const char *name, const char *text, di_error *err) {
    if (text[strspn(text, "\n")] == '\0') {
        return di_fail(err, DI_ERR_ARG, "%s: found nothing, expected a text a line, or the name unset", name);
    }
    while (*text) {
        size_t len = strcspn(text, "\n");
        if (len > 0) {
            const char *line = keep_copy(opt, text, len, err);
            if (!line) {
                return DI_ERR_MEMORY;
            }
            di_status st = set_value(opt, id, name, line, DI_SOURCE_ENVIRONMENT, err);
            if (st) {
                return st;
            }
        }
        text += len + (text[len] == '\n');
    }
    return DI_OK;
}

static void warn_unknown(const char *name, size_t len, di_strbuf *warnings) {
    const char *known[2 * DI_OPT_COUNT];
    char copies[2 * DI_OPT_COUNT][64];
    size_t n = 0;
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        const char *names[2];
        size_t lens[2];
        int n_names = di_option_env_names(&di_option_rows[id], names, lens);
        for (int i = 0; i < n_names; i++) {
            snprintf(copies[n], sizeof copies[n], "%.*s", (int)lens[i], names[i]);
            known[n] = copies[n];
            n++;
        }
    }
    char text[64];
    snprintf(text, sizeof text, "%.*s", (int)DI_MIN(len, sizeof text - 1), name);
    const char *nearest = di_nearest_name(text, known, n);
    di_strbuf_printf(warnings, "unknown environment variable '%s'", text);
    if (nearest) {
        di_strbuf_printf(warnings, ", did you mean '%s'?", nearest);
    }
    di_strbuf_putc(warnings, '\n');
}

static di_status read_environment(di_options *opt, char *const *envp, di_strbuf *warnings, di_error *err) {
    for (int id = 0; id < DI_OPT_COUNT; id++) {
        const di_option_row *row = &di_option_rows[id];
        const char *names[2], *value = NULL, *value_name = NULL;
        size_t lens[2], value_name_len = 0;
        int n = di_option_env_names(row, names, lens);
        for (int i = 0; i < n; i++) {
            const char *found = env_value(envp, names[i], lens[i]);
            if (!found || (!*found && row->type != DI_OPTION_LIST)) {
                continue; /* empty is unset, but for lists: a secret that came out empty must not open a server */
            }
            if (value && strcmp(value, found) != 0) {
                return di_fail(err, DI_ERR_ARG, "%.*s is '%s' and %.*s is '%s': they are one option, set one of them",
                               (int)value_name_len, value_name, value, (int)lens[i], names[i], found);
            }
            if (!value) {
                value = found;
                value_name = names[i];
                value_name_len = lens[i];
            }
        }
        if (!value) {
            continue;
        }
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)value_name_len, value_name);
        di_status st = row->type == DI_OPTION_LIST ? set_lines(opt, id, name, value, err)
                                                   : set_value(opt, id, name, value, DI_SOURCE_ENVIRONMENT, err);
        if (st) {
            return st;
        }
    }
    static const char prefix[] = "DEEPINFER_";
    for (; warnings && *envp; envp++) {
        size_t len = strcspn(*envp, "=");
        if (strncmp(*envp, prefix, sizeof prefix - 1) == 0 && find_env(*envp, len) < 0) {
            warn_unknown(*envp, len, warnings);
        }
    }
    return DI_OK;
}

di_status di_options_read(di_options *opt, unsigned command, int argc, char *const *argv, char *const *envp,
                          di_strbuf *warnings, di_error *err) {
    di_options_init(opt);
    /* Somebody who asks for help gets it, whatever else is wrong. */
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            opt->is_help = true;
            return DI_OK;
        }
    }
    di_status st = read_environment(opt, envp ? envp : environ, warnings, err);
    return st ? st : read_flags(opt, command, argc, argv, err);
}
