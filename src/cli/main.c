/* The front of the program: which command, its options, its help, and the exit status.
 *
 * Exit status: 0 done, 1 the run failed, 2 usage, 3 the model's files, 4 a resource is short. SIGPIPE is ignored, so
 * that a reader that goes away is an error of a write; SIGINT is left to the commands that run long. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "backend/backend.h"
#include "cli.h"

typedef struct command {
    const char *name;
    unsigned bit;     /* DI_COMMAND_ */
    const char *args; /* how the positional arguments read in --help */
    size_t n_args_max;
    const char *help;  /* one line */
    const char *about; /* more lines of `COMMAND --help`, or "" */
    int (*run)(const di_options *opt);
} command;

/* clang-format off */
static const command commands[] = {
    {"run", DI_COMMAND_RUN, "[PROMPT]", 1, "answer one prompt, or a batch of requests",
     "PROMPT is one user message, - reads it from standard input, and the answer is streamed to standard output.\n"
     "With --input, each line of FILE is a request and each line of the output its result. Without PROMPT, standard\n"
     "input is read when it is not a terminal. --logprobs goes to standard error. Ctrl-C ends the answer: what there is\n"
     "by then is kept, and the exit status is 130.\n", di_cmd_run},
    {"chat", DI_COMMAND_CHAT, "", 0, "an interactive conversation",
     "Type a message; /help lists what else can be typed. Ctrl-C stops an answer, Ctrl-D ends.\n", di_cmd_chat},
    {"serve", DI_COMMAND_SERVE, "", 0, "the HTTP server: OpenAI's and Anthropic's APIs, and a chat page",
     "Prints the address that it listens on, which is also the address of the chat page, and answers 503 until the model\n"
     "is loaded. SIGTERM or Ctrl-C lets what runs end and then ends; the second one ends at once. SIGHUP reads the key\n"
     "file again.\n",
     di_cmd_serve},
    {"bench", DI_COMMAND_BENCH, "[WHAT [ROW]...]", 33, "measure speed beside this machine's limits",
     "WHAT is kernels, prefill, decode, batch, scheduler, speculative, grammar, tokenizer or serve; all of them without\n"
     "it. ROW is the name of a row or its first words, as gemv or gemv_fp8: only these rows are measured, and only what\n"
     "they need is loaded.\n",
     di_cmd_bench},
    {"tokenize", DI_COMMAND_TOKENIZE, "", 0, "texts to token ids and back, as JSON lines",
     "Reads {\"text\":...} or {\"ids\":[...]} a line from standard input, writes {\"ids\":[...]} or {\"text\":...}.\n",
     di_cmd_tokenize},
    {"encode", DI_COMMAND_ENCODE, "", 0, "request bodies to prompts, as JSON lines",
     "Reads one request body a line from standard input, writes {\"prompt\":...,\"ids\":[...]} or {\"error\":...}.\n",
     di_cmd_encode},
    {"parse", DI_COMMAND_PARSE, "", 0, "model outputs to messages, as JSON lines",
     "Reads {\"text\":...} a line from standard input, writes {\"message\":...,\"finish_reason\":...}.\n", di_cmd_parse},
    {"grammar", DI_COMMAND_GRAMMAR, "", 0, "texts against a grammar, as JSON lines",
     "Reads {\"text\":...} a line from standard input, with the grammar of an option or with its own as \"schema\", \"regex\"\n"
     "or \"ebnf\" beside the text; writes {\"accept\":true}, {\"accept\":false} or, for a refused grammar, {\"error\":...}.\n",
     di_cmd_grammar},
    {"info", DI_COMMAND_INFO, "", 0, "what a model is, and the memory that it needs", "", di_cmd_info},
    {"version", DI_COMMAND_VERSION, "", 0, "version, backends and instruction sets", "", di_cmd_version},
};
/* clang-format on */

int di_cli_fail(const di_error *err) {
    fflush(stdout);
    fprintf(stderr, "deepinfer: %s\n", err->message);
    return di_status_exit(err->code);
}

static di_status fail_output(di_error *err, int code) {
    switch (code) {
    case ENOSPC:
    case EDQUOT:
        return di_fail(err, DI_ERR_DISK, "standard output: the disk is full");
    case EPIPE:
        return di_fail(err, DI_ERR_CANCELLED, "standard output: its reader has gone");
    default:
        return di_fail(err, DI_ERR_IO, "standard output: %s", code ? strerrordesc_np(code) : "an earlier write failed");
    }
}

di_status di_cli_print(const char *s, size_t n, di_error *err) {
    errno = 0;
    if (n > 0 && fwrite(s, 1, n, stdout) != n) {
        return fail_output(err, errno);
    }
    return DI_OK;
}

di_status di_cli_flush(di_error *err) {
    errno = 0;
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return fail_output(err, errno);
    }
    return DI_OK;
}

/* Appends the path of the model that ships: in the tree that the program was built from or installed into, else at the
 * place that the build knew. */
static void find_default_model(di_strbuf *out) {
    static const char *const places[] = {"../../models/tiny", "../models/tiny", "../share/deepinfer/models/tiny"};
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n > 0) {
        exe[n] = '\0';
        char *slash = strrchr(exe, '/');
        if (slash) {
            *slash = '\0';
            for (size_t i = 0; i < DI_COUNT(places); i++) {
                di_path_join(out, exe, places[i]);
                if (di_path_is_dir(di_strbuf_str(out))) {
                    char *plain = realpath(di_strbuf_str(out), NULL); /* without the dots, for messages */
                    if (plain) {
                        di_strbuf_reset(out);
                        di_strbuf_puts(out, plain);
                        free(plain);
                    }
                    return;
                }
            }
        }
    }
    di_strbuf_reset(out);
    di_strbuf_puts(out, DI_CLI_MODEL_DIR);
}

static void print_help(FILE *file) {
    fprintf(file,
            "deepinfer %s: inference of DeepSeek-V4.1-Flash\n\nusage: deepinfer COMMAND [OPTION]... [ARGUMENT]...\n\n",
            DI_CLI_VERSION);
    for (size_t i = 0; i < DI_COUNT(commands); i++) {
        fprintf(file, "  %-10s %s\n", commands[i].name, commands[i].help);
    }
    fprintf(
        file,
        "\n'deepinfer COMMAND --help' lists the options of a command.\n"
        "Exit status: 0 done, 1 a request or the run failed, 2 usage, 3 the model's files, 4 a resource is short.\n");
}

static di_status print_command_help(const command *cmd, di_error *err) {
    di_strbuf out = {0};
    di_strbuf_printf(&out, "usage: deepinfer %s [OPTION]...%s%s\n\n%s%s\n%s", cmd->name, *cmd->args ? " " : "",
                     cmd->args, cmd->help, *cmd->about ? "." : "", cmd->about);
    di_options_help(&out, cmd->bit);
    di_status st = di_strbuf_status(&out, err);
    if (!st) {
        st = di_cli_print(out.data, out.len, err);
    }
    di_strbuf_deinit(&out);
    return st;
}

static const command *find_command(const char *name) {
    for (size_t i = 0; i < DI_COUNT(commands); i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static int fail_unknown_command(const char *name) {
    const char *names[DI_COUNT(commands)];
    for (size_t i = 0; i < DI_COUNT(commands); i++) {
        names[i] = commands[i].name;
    }
    const char *nearest = di_nearest_name(name, names, DI_COUNT(names));
    di_error err;
    if (nearest) {
        di_fail(&err, DI_ERR_ARG, "unknown command '%s', did you mean '%s'?", name, nearest);
    } else {
        di_fail(&err, DI_ERR_ARG, "unknown command '%s', 'deepinfer --help' lists them", name);
    }
    return di_cli_fail(&err);
}

/* Prints each line as a warning. */
static void log_warnings(di_strbuf *warnings) {
    char *line = warnings->data;
    while (line && *line) {
        char *end = strchr(line, '\n');
        if (!end) {
            break;
        }
        *end = '\0';
        di_warn("%s", line);
        line = end + 1;
    }
}

static di_log_level parse_log_level(const char *word) {
    static const char *const words[] = {"error", "warn", "info", "debug"};
    size_t level = DI_LOG_ERROR;
    while (level < DI_LOG_DEBUG && strcmp(words[level], word) != 0) {
        level++;
    }
    return (di_log_level)level;
}

static int run_command(const command *cmd, int argc, char **argv) {
    di_options opt;
    di_strbuf warnings = {0}, model = {0};
    di_error err;
    int exit_status;
    if (di_options_read(&opt, cmd->bit, argc, argv, NULL, &warnings, &err)) {
        exit_status = di_cli_fail(&err);
    } else if (opt.is_help) {
        exit_status = print_command_help(cmd, &err) ? di_cli_fail(&err) : 0;
    } else if (opt.args.n > cmd->n_args_max) {
        char at_most[48];
        snprintf(at_most, sizeof at_most, "at most %zu arguments", cmd->n_args_max);
        di_fail(&err, DI_ERR_ARG, "'deepinfer %s' takes %s, found '%s'", cmd->name,
                cmd->n_args_max > 1 ? at_most
                : cmd->n_args_max   ? "one argument (quote a text with spaces)"
                                    : "no arguments",
                opt.args.items[cmd->n_args_max]);
        exit_status = di_cli_fail(&err);
    } else {
        di_log_set_level(parse_log_level(opt.log_level));
        log_warnings(&warnings);
        di_backend_set_dir(opt.backend_dir);
        if (!opt.model) {
            find_default_model(&model);
            opt.model = di_strbuf_str(&model);
        }
        exit_status = cmd->run(&opt);
    }
    if (di_cli_flush(&err) && exit_status == 0) {
        exit_status = di_cli_fail(&err);
    }
    di_strbuf_deinit(&warnings);
    di_strbuf_deinit(&model);
    di_options_deinit(&opt);
    return exit_status;
}

/* A program that starts without standard descriptors must not get them from the first files that it opens: what is
 * missing becomes /dev/null, the outputs for reading only, so that writing to them still fails. */
static void fill_standard_descriptors(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDONLY) < 0) {
            return;
        }
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    fill_standard_descriptors();
    if (argc < 2) {
        print_help(stderr);
        return di_status_exit(DI_ERR_ARG);
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        di_error err;
        print_help(stdout);
        return di_cli_flush(&err) ? di_cli_fail(&err) : 0;
    }
    if (strcmp(name, "--version") == 0) {
        name = "version";
    }
    const command *cmd = find_command(name);
    return cmd ? run_command(cmd, argc - 2, argv + 2) : fail_unknown_command(name);
}
