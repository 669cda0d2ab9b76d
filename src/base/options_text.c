/* Texts made from the table of options: what a value may be, --help, docs/options.md. */
#include <string.h>

#include "json.h"
#include "options_internal.h"
#include "util.h"

static const struct {
    const char *title, *about;
} groups[DI_GROUP_COUNT] = {
    [DI_GROUP_COMMON] = {"Common options", "Every command takes these."},
    [DI_GROUP_REQUEST] = {"Requests", "What is asked, and in which form."},
    [DI_GROUP_SAMPLING] = {"Sampling", "Defaults of requests that don't name these themselves."},
    [DI_GROUP_ENGINE] = {"Engine", "How requests are run, within which memory."},
    [DI_GROUP_CPU] = {"Processor", "How the processor computes; none of these changes a result."},
    [DI_GROUP_SERVER] = {"Server", "Where it listens, who may ask, and what it puts up with."},
    [DI_GROUP_OUTPUT] = {"Output", "In which form results are printed."},
};

static const char *const command_names[] = {"run",   "chat", "bench",   "tokenize", "encode",
                                            "parse", "info", "version", "grammar",  "serve"};

const char *di_command_name(unsigned command) {
    for (size_t i = 0; i < DI_COUNT(command_names); i++) {
        if (command == 1u << i) {
            return command_names[i];
        }
    }
    return "COMMAND"; /* not one bit: the callers' texts still read well */
}

static void put_double(di_strbuf *out, double v) {
    di_json_write_double(out, v);
    if (out->len >= 2 && strcmp(out->data + out->len - 2, ".0") == 0) {
        di_strbuf_truncate(out, out->len - 2);
    }
}

void di_option_accepted(di_strbuf *out, const di_option_row *row) {
    switch (row->type) {
    case DI_OPTION_INT:
        di_strbuf_printf(out, "an integer from %lld to %lld", (long long)row->int_min, (long long)row->int_max);
        break;
    case DI_OPTION_BYTES:
        di_strbuf_puts(out, "a number of bytes");
        if (row->int_min == 1) {
            di_strbuf_puts(out, " above 0");
        } else if (row->int_min > 1) {
            di_strbuf_printf(out, " from %lld", (long long)row->int_min);
        }
        di_strbuf_puts(out, ", as 1500000, 800M or 6G");
        break;
    case DI_OPTION_U64:
        di_strbuf_puts(out, "an integer");
        break;
    case DI_OPTION_DOUBLE:
        if (row->double_max >= DI_DOUBLE_MAX) {
            di_strbuf_puts(out, "a finite number, ");
            put_double(out, row->double_min);
            di_strbuf_puts(out, " or more");
        } else {
            bool is_open = row->double_min > 0 && row->double_min <= DI_DOUBLE_ABOVE_0;
            di_strbuf_puts(out, is_open ? "a number above " : "a number from ");
            put_double(out, is_open ? 0 : row->double_min);
            di_strbuf_puts(out, is_open ? ", at most " : " to ");
            put_double(out, row->double_max);
        }
        break;
    case DI_OPTION_BOOL:
        di_strbuf_puts(out, "true, false, 1, 0, on, off, yes or no");
        break;
    case DI_OPTION_STRING:
        di_strbuf_puts(out, "a text");
        break;
    case DI_OPTION_LIST:
        di_strbuf_puts(out, "a text that is not empty");
        break;
    case DI_OPTION_CHOICE:
        for (const char *p = row->words; *p; p++) {
            if (*p != '|') {
                di_strbuf_putc(out, *p);
            } else {
                di_strbuf_puts(out, strchr(p + 1, '|') ? ", " : " or ");
            }
        }
        break;
    }
}

/* How the default reads; nothing for a switch that is off. */
static void put_default(di_strbuf *out, const di_option_row *row) {
    if (*row->def_text) {
        di_strbuf_puts(out, row->def_text);
        return;
    }
    switch (row->type) {
    case DI_OPTION_INT:
    case DI_OPTION_BYTES:
        di_strbuf_printf(out, "%lld", (long long)row->def.i);
        break;
    case DI_OPTION_U64:
        di_strbuf_printf(out, "%llu", (unsigned long long)row->def.u);
        break;
    case DI_OPTION_DOUBLE:
        put_double(out, row->def.d);
        break;
    case DI_OPTION_BOOL:
        if (row->def.b) {
            di_strbuf_puts(out, "on");
        }
        break;
    case DI_OPTION_STRING:
    case DI_OPTION_CHOICE:
        di_strbuf_puts(out, row->def.s ? row->def.s : "none");
        break;
    case DI_OPTION_LIST:
        di_strbuf_puts(out, "none");
        break;
    }
}

/* Appends text in lines of at most `width` columns, each but the first behind `indent` spaces. */
static void put_wrapped(di_strbuf *out, const char *text, int indent, int width) {
    int column = indent;
    bool is_line_start = true;
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (!is_line_start && column + 1 + len > width) {
            di_strbuf_printf(out, "\n%*s", indent, "");
            column = indent;
            is_line_start = true;
        }
        if (!is_line_start) {
            di_strbuf_putc(out, ' ');
            column++;
        }
        di_strbuf_append(out, text, (size_t)len);
        column += len;
        is_line_start = false;
        text += len + (text[len] == ' ');
    }
}

void di_options_help(di_strbuf *out, unsigned command) {
    enum { INDENT = 30, WIDTH = 100 };
    for (int group = DI_GROUP_COUNT - 1; group >= 0; group--) {
        /* The options of the command itself come first, those that every command has come last. */
        bool has_title = false;
        for (int id = 0; id < DI_OPT_COUNT; id++) {
            const di_option_row *row = &di_option_rows[id];
            if ((int)row->group != group || !(row->commands & command)) {
                continue;
            }
            if (!has_title) {
                di_strbuf_printf(out, "\n%s:\n", groups[group].title);
                has_title = true;
            }
            size_t start = out->len;
            di_strbuf_printf(out, "  %s%s%s", row->flag, *row->metavar ? " " : "", row->metavar);
            int used = (int)(out->len - start);
            if (used + 2 > INDENT) {
                di_strbuf_printf(out, "\n%*s", INDENT, "");
            } else {
                di_strbuf_printf(out, "%*s", INDENT - used, "");
            }
            di_strbuf text = {0}, shown = {0};
            di_strbuf_puts(&text, row->help);
            if (row->type == DI_OPTION_CHOICE) {
                di_strbuf_puts(&text, ": ");
                di_option_accepted(&text, row);
            }
            put_default(&shown, row);
            if (shown.len > 0) {
                di_strbuf_printf(&text, " (default: %s)", di_strbuf_str(&shown));
            }
            const char *names[2];
            size_t lens[2];
            di_option_env_names(row, names, lens);
            di_strbuf_printf(&text, " [%.*s]", (int)lens[0], names[0]);
            put_wrapped(out, di_strbuf_str(&text), INDENT, WIDTH);
            di_strbuf_putc(out, '\n');
            di_strbuf_deinit(&text);
            di_strbuf_deinit(&shown);
        }
    }
    di_strbuf_printf(out, "  %-*s%s\n", INDENT - 2, "--help, -h", "print this text");
}

/* Appends a cell of a Markdown table: bars would end it. */
static void put_cell(di_strbuf *out, const char *text) {
    for (; *text; text++) {
        if (*text == '|') {
            di_strbuf_putc(out, '\\');
        }
        di_strbuf_putc(out, *text);
    }
}

void di_options_markdown(di_strbuf *out) {
    di_strbuf_puts(
        out, "# Options\n\n"
             "Made from `src/base/options.def` by `ninja -C build/release docs`; a test compares the two.\n\n"
             "A flag beats the environment, which beats the default. `--flag value` and `--flag=value` are the "
             "same; `--` ends the\n"
             "options. An empty variable counts as unset. A bad value is an error (exit status 2) that names the "
             "variable and what is\n"
             "accepted; an unknown `DEEPINFER_` variable is a warning. Where a row has two variables, they are one "
             "option: set to different\n"
             "values they are an error.\n");
    for (int group = 0; group < DI_GROUP_COUNT; group++) {
        di_strbuf_printf(out, "\n## %s\n\n%s\n\n", groups[group].title, groups[group].about);
        di_strbuf_puts(out, "| flag | environment | accepts | default | commands | meaning |\n"
                            "|---|---|---|---|---|---|\n");
        for (int id = 0; id < DI_OPT_COUNT; id++) {
            const di_option_row *row = &di_option_rows[id];
            if ((int)row->group != group) {
                continue;
            }
            di_strbuf_printf(out, "| `%s%s%s` | ", row->flag, *row->metavar ? " " : "", row->metavar);
            const char *names[2];
            size_t lens[2];
            int n_names = di_option_env_names(row, names, lens);
            for (int i = 0; i < n_names; i++) {
                di_strbuf_printf(out, "%s`%.*s`", i ? ", " : "", (int)lens[i], names[i]);
            }
            di_strbuf_puts(out, " | ");
            di_option_accepted(out, row);
            di_strbuf_puts(out, " | ");
            size_t before = out->len;
            put_default(out, row);
            if (out->len == before) {
                di_strbuf_puts(out, "off");
            }
            di_strbuf_puts(out, " | ");
            if (row->commands == DI_COMMANDS_ALL) {
                di_strbuf_puts(out, "all");
            } else {
                bool is_first = true;
                for (size_t i = 0; i < DI_COUNT(command_names); i++) {
                    if (row->commands & 1u << i) {
                        di_strbuf_printf(out, "%s%s", is_first ? "" : ", ", command_names[i]);
                        is_first = false;
                    }
                }
            }
            di_strbuf_puts(out, " | ");
            put_cell(out, row->help);
            di_strbuf_puts(out, " |\n");
        }
    }
}
