/* `deepinfer chat`: a conversation that keeps its history.
 *
 * On a terminal, lines are edited with libedit and kept in its history for the session; otherwise each line of standard
 * input is a message. A line that begins with / is a command. The history is a list of messages that becomes a request
 * for every turn, so a turn is exactly what `run --input` does with the same messages. Ctrl-C ends the answer, not the
 * program; what was said by then stays. Standard output gets answers, everything else goes to standard error. */
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <unistd.h>

#include "cli_model.h"

typedef struct chat {
    const di_options *opt;
    di_cli_model model;
    di_json *messages;   /* owned array: system, then user and assistant in turn */
    di_strbuf system;    /* owned; empty: none */
    int effort;          /* 0: no thinking */
    bool is_terminal;    /* standard output */
    bool is_interactive; /* standard input and output */
    bool is_interrupted; /* not interactive: Ctrl-C ends the program */
    /* the turn */
    di_reply reply;
    bool is_dimmed;
    di_finish finish;
    di_error error;
    /* input */
    di_line_reader reader;
    EditLine *editor; /* owned; NULL without a terminal */
    History *history; /* owned, with it */
} chat;

/* ---- one turn -----------------------------------------------------------------------------------------------------
 */

static di_status print_piece(chat *c, const char *text, size_t len, bool is_thinking, di_error *err) {
    if (is_thinking && !c->is_terminal)
        return DI_OK;
    di_status st = DI_OK;
    if (is_thinking != c->is_dimmed) {
        const char *change = is_thinking ? "\033[2m" : "\033[0m\n\n";
        st = di_cli_print(change, strlen(change), err);
        c->is_dimmed = is_thinking;
    }
    if (!st)
        st = di_cli_print(text, len, err);
    return st ? st : di_cli_flush(err);
}

static di_status on_turn(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    chat *c = user;
    if (event->kind == DI_CORE_OUTPUT) {
        const di_parser_event *p = event->parsed;
        di_status st = di_reply_push(&c->reply, p, err);
        if (!st && p->kind == DI_PARSER_REASONING)
            st = print_piece(c, p->text, p->len, true, err);
        if (!st && p->kind == DI_PARSER_CONTENT)
            st = print_piece(c, p->text, p->len, false, err);
        return st;
    }
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    c->finish = gen->finish;
    c->error = gen->error;
    if (c->opt->stats)
        di_cli_print_request_stats(gen);
    return DI_OK;
}

static bool add_message(chat *c, const char *role, const char *text, size_t len) {
    di_json *message = di_json_new_object();
    bool done = di_json_set(message, "role", di_json_new_string(role, strlen(role)));
    done = done && di_json_set(message, "content", di_json_new_string(text, len));
    if (done)
        return di_json_append(c->messages, message);
    di_json_free(message);
    return false;
}

/* The history without its last n messages. */
static di_status drop_messages(chat *c, size_t n, di_error *err) {
    di_json *kept = di_json_new_array();
    size_t len = di_json_array_len(c->messages);
    bool done = kept != NULL;
    for (size_t i = 0; done && i + n < len; i++)
        done = di_json_append(kept, di_json_ref(di_json_at(c->messages, i)));
    if (!done) {
        di_json_free(kept);
        return di_fail(err, DI_ERR_MEMORY, "history of %zu messages", len);
    }
    di_json_free(c->messages);
    c->messages = kept;
    return DI_OK;
}

/* The whole conversation as a request body. */
static di_status make_body(const chat *c, di_strbuf *body, di_error *err) {
    di_json *all = di_json_new_array();
    bool done = all != NULL;
    if (done && c->system.len) {
        di_json *message = di_json_new_object();
        done = di_json_set(message, "role", di_json_new_string("system", 6)) &&
               di_json_set(message, "content", di_json_new_string(c->system.data, c->system.len));
        done = di_json_append(all, message) && done;
    }
    for (size_t i = 0; done && i < di_json_array_len(c->messages); i++)
        done = di_json_append(all, di_json_ref(di_json_at(c->messages, i)));
    di_strbuf_puts(body, "{\"messages\":");
    if (done)
        di_json_write(body, all, DI_JSON_COMPACT);
    di_strbuf_putc(body, '}');
    di_json_free(all);
    return done ? di_strbuf_status(body, err) : di_fail(err, DI_ERR_MEMORY, "conversation");
}

static di_status end_line(chat *c, di_error *err) {
    const char *end = c->is_dimmed ? "\033[0m\n" : "\n";
    c->is_dimmed = false;
    di_status st = di_cli_print(end, strlen(end), err);
    return st ? st : di_cli_flush(err);
}

/* Runs the conversation and appends the answer to it. */
static di_status answer(chat *c, di_error *err) {
    di_strbuf body = {0};
    di_request request = {0};
    c->model.defaults.effort_default = c->effort;
    di_status st = make_body(c, &body, err);
    if (!st)
        st = di_request_parse(&request, DI_API_LINE, body.data, body.len, &c->model.defaults, err);
    if (!st) {
        di_reply_init(&c->reply, request.chat.thinking, di_random_u64());
        st = di_cli_submit(&c->model, &request, on_turn, c, NULL, err);
    }
    if (!st) {
        do {
            if (di_interrupt_take()) {
                c->is_interrupted = true;
                di_core_abort_all(c->model.engine);
            }
        } while (di_core_step(c->model.engine));
        if (c->finish == DI_FINISH_ERROR) {
            *err = c->error;
            st = err->code;
            if (c->is_dimmed)
                fputs("\033[0m", stdout);
            c->is_dimmed = false;
        } else {
            st = end_line(c, err);
        }
        if (!st && c->finish == DI_FINISH_LENGTH)
            di_info("the answer was cut: it reached its longest length");
        if (!st && !add_message(c, "assistant", di_strbuf_str(&c->reply.content), c->reply.content.len))
            st = di_fail(err, DI_ERR_MEMORY, "history");
    }
    di_reply_deinit(&c->reply);
    di_request_deinit(&request);
    di_strbuf_deinit(&body);
    return st;
}

/* A message and its answer. A turn that fails leaves the history as it was. */
static di_status take_turn(chat *c, const char *text, size_t len, di_error *err) {
    di_strbuf valid = {0};
    size_t before = di_json_array_len(c->messages);
    di_utf8_repair(&valid, text, len);
    di_status st = di_strbuf_status(&valid, err);
    if (!st && !add_message(c, "user", di_strbuf_str(&valid), valid.len))
        st = di_fail(err, DI_ERR_MEMORY, "history");
    if (!st)
        st = answer(c, err);
    if (st)
        drop_messages(c, di_json_array_len(c->messages) - before, NULL);
    di_strbuf_deinit(&valid);
    return st;
}

/* ---- commands -----------------------------------------------------------------------------------------------------
 */

typedef enum outcome { GO_ON, LEAVE } outcome;

typedef struct chat_command {
    const char *name, *args, *help;
    di_status (*run)(chat *c, const char *arg, outcome *next, di_error *err);
} chat_command;

static di_status do_help(chat *c, const char *arg, outcome *next, di_error *err);

static di_status do_system(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)next;
    di_strbuf_reset(&c->system);
    di_utf8_repair(&c->system, arg, strlen(arg));
    fprintf(stderr, c->system.len ? "system message set\n" : "system message removed\n");
    return di_strbuf_status(&c->system, err);
}

static di_status do_reasoning(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)next;
    if (*arg) {
        di_status st = di_effort_parse(arg, &c->effort, err);
        if (st)
            return st;
    }
    if (c->effort) {
        fprintf(stderr, "thinking with effort %d\n", c->effort);
    } else {
        fprintf(stderr, "no thinking\n");
    }
    return DI_OK;
}

static di_status do_reset(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)arg, (void)next;
    di_status st = drop_messages(c, di_json_array_len(c->messages), err);
    if (!st)
        fprintf(stderr, "history cleared\n");
    return st;
}

static di_status do_retry(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)arg, (void)next;
    size_t n = di_json_array_len(c->messages);
    if (n < 2)
        return di_fail(err, DI_ERR_REQUEST, "/retry: there is no answer yet");
    di_json *last = di_json_ref(di_json_at(c->messages, n - 1));
    di_status st = drop_messages(c, 1, err);
    if (!st)
        st = answer(c, err);
    if (st && di_json_array_len(c->messages) == n - 1) {
        di_json_append(c->messages, last); /* the answer that was there stays */
    } else {
        di_json_free(last);
    }
    return st;
}

/* The conversation as one request line, which `run --input` takes. */
static di_status do_save(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)next;
    if (!*arg)
        return di_fail(err, DI_ERR_REQUEST, "/save: expected the name of a file");
    di_strbuf body = {0};
    di_status st = make_body(c, &body, err);
    di_strbuf_putc(&body, '\n');
    FILE *file = st ? NULL : fopen(arg, "we");
    if (!st && !file)
        st = di_fail(err, DI_ERR_IO, "'%s': %s", arg, strerrordesc_np(errno));
    if (!st) {
        bool done = fwrite(body.data, 1, body.len, file) == body.len;
        int code = errno;
        if (fclose(file) != 0) {
            code = errno;
            done = false;
        }
        if (!done)
            st = di_fail(err, code == ENOSPC ? DI_ERR_DISK : DI_ERR_IO, "'%s': %s", arg, strerrordesc_np(code));
    }
    if (!st)
        fprintf(stderr, "%zu messages saved\n", di_json_array_len(c->messages) + (c->system.len > 0));
    di_strbuf_deinit(&body);
    return st;
}

static di_status do_stats(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)arg, (void)next, (void)err;
    di_cli_print_stats(&c->model);
    return DI_OK;
}

static di_status do_exit(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)c, (void)arg, (void)err;
    *next = LEAVE;
    return DI_OK;
}

static const chat_command chat_commands[] = {
    {"/help", "", "this list", do_help},
    {"/system", "[TEXT]", "set the system message, or remove it", do_system},
    {"/reasoning", "[none|low|high|max|1..100]", "set or show the effort of thinking", do_reasoning},
    {"/retry", "", "answer the last message again", do_retry},
    {"/reset", "", "forget the conversation", do_reset},
    {"/save", "FILE", "write the conversation as a request line", do_save},
    {"/stats", "", "times, speeds and memory so far", do_stats},
    {"/exit", "", "leave; so does Ctrl-D", do_exit},
};

static di_status do_help(chat *c, const char *arg, outcome *next, di_error *err) {
    (void)c, (void)arg, (void)next, (void)err;
    for (size_t i = 0; i < DI_COUNT(chat_commands); i++) {
        int n = fprintf(stderr, "  %s %s", chat_commands[i].name, chat_commands[i].args);
        fprintf(stderr, "%*s%s\n", n < 42 ? 42 - n : 1, "", chat_commands[i].help);
    }
    fprintf(stderr, "  // at the start sends a message that begins with /\n");
    return DI_OK;
}

static di_status run_chat_command(chat *c, const char *line, outcome *next, di_error *err) {
    size_t n = strcspn(line, " \t");
    const char *arg = line + n + strspn(line + n, " \t");
    const char *names[DI_COUNT(chat_commands)];
    char name[32];
    for (size_t i = 0; i < DI_COUNT(chat_commands); i++) {
        names[i] = chat_commands[i].name;
        if (strlen(names[i]) == n && strncmp(line, names[i], n) == 0)
            return chat_commands[i].run(c, arg, next, err);
    }
    snprintf(name, sizeof name, "%.*s", (int)DI_MIN(n, sizeof name - 1), line);
    const char *nearest = di_nearest_name(name, names, DI_COUNT(names));
    return di_fail(err, DI_ERR_REQUEST, "unknown command '%s', %s%s", name,
                   nearest ? "did you mean " : "/help lists them", nearest ? nearest : "");
}

/* ---- input --------------------------------------------------------------------------------------------------------
 */

static const char *prompt_text(EditLine *editor) {
    (void)editor;
    return "> ";
}

static di_status open_editor(chat *c, di_error *err) {
    HistEvent event;
    /* The editor counts columns by the user's character set; numbers stay in the C locale. */
    setlocale(LC_CTYPE, "");
    c->history = history_init();
    c->editor = el_init("deepinfer", stdin, stderr, stderr);
    if (!c->history || !c->editor)
        return di_fail(err, DI_ERR_MEMORY, "line editor");
    history(c->history, &event, H_SETSIZE, 1000);
    el_set(c->editor, EL_HIST, history, c->history);
    el_set(c->editor, EL_PROMPT, prompt_text);
    el_set(c->editor, EL_EDITOR, "emacs");
    el_set(c->editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
    return DI_OK;
}

/* A line from the editor. Ctrl-C drops what was typed. */
static di_line_state edit_line(chat *c, const char **line, size_t *len) {
    int n = 0;
    errno = 0;
    const char *text = el_gets(c->editor, &n);
    if (text && n > 0) {
        HistEvent event;
        *line = text;
        *len = (size_t)n - (text[n - 1] == '\n');
        if (*len)
            history(c->history, &event, H_ENTER, text);
        return DI_LINE_READY;
    }
    if (di_interrupt_take()) {
        el_reset(c->editor);
        fputc('\n', stderr);
        return DI_LINE_NOT_YET;
    }
    fputc('\n', stderr);
    return DI_LINE_END;
}

static di_line_state next_line(chat *c, const char **line, size_t *len, di_error *err) {
    return c->editor ? edit_line(c, line, len) : di_line_reader_next(&c->reader, true, line, len, err);
}

/* ---- the loop -----------------------------------------------------------------------------------------------------
 */

static di_status take_line(chat *c, const char *line, size_t len, outcome *next, di_error *err) {
    di_strbuf copy = {0}; /* ends with NUL, for commands; a message may hold NUL itself */
    while (len && (line[len - 1] == '\r' || line[len - 1] == ' '))
        len--;
    di_strbuf_append(&copy, line, len);
    di_status st = di_strbuf_status(&copy, err);
    if (!st && len > 0) {
        bool is_command = line[0] == '/' && !(len > 1 && line[1] == '/');
        size_t skipped = line[0] == '/' && !is_command; /* of "//" */
        st = is_command ? run_chat_command(c, copy.data, next, err)
                        : take_turn(c, copy.data + skipped, len - skipped, err);
    }
    di_strbuf_deinit(&copy);
    return st;
}

/* Whether the conversation can go on after an error: an output that is gone can't. */
static bool is_fatal(di_status st) {
    return st == DI_ERR_DISK || st == DI_ERR_CANCELLED || st == DI_ERR_IO || st == DI_ERR_MEMORY;
}

static int converse(chat *c) {
    bool has_failed = false;
    for (outcome next = GO_ON; next == GO_ON;) {
        const char *line = NULL;
        size_t len = 0;
        di_error err = {0};
        di_line_state state = next_line(c, &line, &len, &err);
        if (state == DI_LINE_NOT_YET)
            continue;
        if (state == DI_LINE_INTERRUPTED)
            return DI_EXIT_INTERRUPTED;
        if (state == DI_LINE_FAILED)
            return di_cli_fail(&err);
        if (state == DI_LINE_END)
            break;
        di_status st = take_line(c, line, len, &next, &err);
        if (st) {
            int exit_status = di_cli_fail(&err);
            if (is_fatal(st))
                return exit_status;
            has_failed = true;
        }
        if (c->is_interrupted && !c->is_interactive)
            return DI_EXIT_INTERRUPTED;
        c->is_interrupted = false;
    }
    /* At a terminal the user has seen what failed and went on. */
    return has_failed && !c->is_interactive;
}

static void chat_close(chat *c) {
    if (c->editor)
        el_end(c->editor);
    if (c->history)
        history_end(c->history);
    di_interrupt_stop();
    di_line_reader_deinit(&c->reader);
    di_cli_model_close(&c->model);
    di_json_free(c->messages);
    di_strbuf_deinit(&c->system);
}

int di_cmd_chat(const di_options *opt) {
    chat c = {.opt = opt, .reader = {.fd = STDIN_FILENO, .name = "standard input"}};
    di_error err = {0};
    int exit_status;
    c.is_terminal = isatty(STDOUT_FILENO);
    c.is_interactive = c.is_terminal && isatty(STDIN_FILENO);
    c.messages = di_json_new_array();
    di_status st = c.messages ? DI_OK : di_fail(&err, DI_ERR_MEMORY, "history");
    if (opt->system)
        di_utf8_repair(&c.system, opt->system, strlen(opt->system));
    if (!st)
        st = di_strbuf_status(&c.system, &err);
    if (!st)
        st = di_cli_model_open(&c.model, opt, &err);
    c.effort = c.model.defaults.effort_default;
    if (!st)
        st = di_interrupt_start(&err);
    if (!st && c.is_interactive) {
        st = open_editor(&c, &err);
        fprintf(stderr, "Type a message. /help lists commands, Ctrl-C ends an answer, Ctrl-D leaves.\n");
    }
    exit_status = st ? di_cli_fail(&err) : converse(&c);
    if (!st && opt->stats)
        di_cli_print_stats(&c.model);
    chat_close(&c);
    return exit_status;
}
