/* `deepinfer run`: one prompt whose answer streams to standard output, or a batch of request lines.
 *
 * One prompt becomes a request line itself (messages, or a plain prompt with --raw) and goes the way of every other.
 * With thinking, a terminal sees the thinking dimmed; a pipe gets the answer alone. The answer ends with a line feed of
 * ours.
 *
 * A batch keeps its results in the order of its lines: each line is a job in a list, with a result for each of its
 * samples, and results are written from the front as far as they are done. Lines are read as long as the engine has
 * room, without waiting for input while there is work. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "cli_model.h"

#define PROMPT_BYTES_MAX ((size_t)1 << 30)
#define JOBS_MAX 1024 /* lines of a batch that are in memory at once */
#define HELD_MAX 16   /* of those, lines that wait for their grammar or for room in the engine's queue */

/* ---- one prompt ---------------------------------------------------------------------------------------------------
 */

typedef struct single {
    const di_options *opt;
    const di_cli_model *model;
    bool is_terminal, is_dimmed;
    di_finish finish;
    di_error error; /* of finish ERROR */
} single;

static di_status print_text(single *one, const char *text, size_t len, bool is_thinking, di_error *err) {
    if (is_thinking && !one->is_terminal)
        return DI_OK;
    di_status st = DI_OK;
    if (is_thinking != one->is_dimmed) {
        const char *change = is_thinking ? "\033[2m" : "\033[0m\n\n";
        st = di_cli_print(change, strlen(change), err);
        one->is_dimmed = is_thinking;
    }
    if (!st)
        st = di_cli_print(text, len, err);
    return st ? st : di_cli_flush(err);
}

static void print_token(const single *one, int32_t id, float logprob, const char *indent) {
    di_strbuf text = {0};
    size_t len = 0;
    const char *bytes = one->model->loaded.tok ? di_tokenizer_bytes(one->model->loaded.tok, id, &len) : "";
    di_strbuf_puts(&text, indent);
    di_strbuf_printf(&text, "%7d %10.5f  ", id, (double)logprob);
    di_strbuf repaired = {0};
    di_utf8_repair(&repaired, bytes, len);
    di_json_write_string(&text, di_strbuf_str(&repaired), repaired.len);
    fprintf(stderr, "%s\n", di_strbuf_str(&text));
    di_strbuf_deinit(&repaired);
    di_strbuf_deinit(&text);
}

/* --logprobs: a line a token on standard error, its alternatives indented below. */
static void print_logprobs(const single *one, const di_generation *gen) {
    for (int64_t i = 0; gen->logprobs && i < gen->n_tokens; i++) {
        print_token(one, gen->tokens[i], gen->logprobs[i], "");
        const di_logprob *top = gen->n_top ? &gen->top[i * gen->n_top] : NULL;
        for (int32_t k = 0; k < gen->n_top && top[k].token >= 0; k++)
            print_token(one, top[k].token, top[k].logprob, "    ");
    }
}

static di_status on_single(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    single *one = user;
    switch (event->kind) {
    case DI_CORE_TEXT:
        return print_text(one, event->text, event->len, false, err);
    case DI_CORE_OUTPUT:
        if (event->parsed->kind == DI_PARSER_REASONING)
            return print_text(one, event->parsed->text, event->parsed->len, true, err);
        if (event->parsed->kind == DI_PARSER_CONTENT)
            return print_text(one, event->parsed->text, event->parsed->len, false, err);
        return DI_OK;
    case DI_CORE_TOKEN:
        return DI_OK;
    case DI_CORE_DONE:
        one->finish = gen->finish;
        one->error = gen->error;
        if (gen->finish != DI_FINISH_ERROR) {
            const char *end = one->is_dimmed ? "\033[0m\n" : "\n";
            di_status st = di_cli_print(end, strlen(end), &one->error);
            if (!st)
                st = di_cli_flush(&one->error);
            if (st)
                one->finish = DI_FINISH_ERROR;
        } else if (one->is_dimmed) {
            fputs("\033[0m", stdout);
        }
        print_logprobs(one, gen);
        if (one->opt->stats)
            di_cli_print_request_stats(gen);
        return DI_OK;
    }
    return DI_OK;
}

static void add_message(di_strbuf *out, const char *role, const char *text, size_t len) {
    di_strbuf valid = {0};
    di_utf8_repair(&valid, text, len);
    di_strbuf_printf(out, "{\"role\":\"%s\",\"content\":", role);
    di_json_write_string(out, di_strbuf_str(&valid), valid.len);
    di_strbuf_putc(out, '}');
    out->failed |= valid.failed;
    di_strbuf_deinit(&valid);
}

/* The prompt as a request line. */
static di_status make_line(const di_options *opt, const char *text, size_t len, di_strbuf *line, di_error *err) {
    if (len == 0)
        return di_fail(err, DI_ERR_REQUEST, "the prompt is empty, expected some text");
    if (opt->raw) {
        di_strbuf valid = {0};
        di_utf8_repair(&valid, text, len);
        di_strbuf_puts(line, "{\"prompt\":");
        di_json_write_string(line, di_strbuf_str(&valid), valid.len);
        line->failed |= valid.failed;
        di_strbuf_deinit(&valid);
    } else {
        di_strbuf_puts(line, "{\"messages\":[");
        if (opt->system) {
            add_message(line, "system", opt->system, strlen(opt->system));
            di_strbuf_putc(line, ',');
        }
        add_message(line, "user", text, len);
        di_strbuf_putc(line, ']');
    }
    di_strbuf_putc(line, '}');
    return di_strbuf_status(line, err);
}

static di_status read_prompt(const di_options *opt, di_strbuf *text, di_error *err) {
    if (opt->args.n && strcmp(opt->args.items[0], "-") != 0) {
        di_strbuf_puts(text, opt->args.items[0]);
        return di_strbuf_status(text, err);
    }
    if (!opt->args.n && isatty(STDIN_FILENO))
        return di_fail(err, DI_ERR_ARG, "run: expected a PROMPT, - for standard input, or --input FILE");
    di_status st = di_file_read("-", PROMPT_BYTES_MAX, text, err);
    /* The line feed that ends the last line belongs to the file, not to the message. */
    if (!st && text->len && text->data[text->len - 1] == '\n')
        di_strbuf_truncate(text, text->len - 1);
    return st;
}

static di_status submit_single(di_cli_model *model, single *one, const di_strbuf *line, di_request *request,
                               di_error *err) {
    di_status st = di_request_parse(request, DI_API_LINE, di_strbuf_str(line), line->len, &model->defaults, err);
    return st ? st : di_cli_submit(model, request, on_single, one, NULL, err);
}

static int run_single(const di_options *opt) {
    di_cli_model model = {0};
    di_request request = {0};
    di_strbuf text = {0}, line = {0};
    di_error err = {0};
    single one = {.opt = opt, .model = &model, .is_terminal = isatty(STDOUT_FILENO)};
    bool is_interrupted = false;
    int exit_status;
    di_status st;
    if ((st = read_prompt(opt, &text, &err)))
        goto out;
    if ((st = make_line(opt, di_strbuf_str(&text), text.len, &line, &err)))
        goto out;
    if ((st = di_cli_model_open(&model, opt, &err)))
        goto out;
    if ((st = di_interrupt_start(&err)))
        goto out;
    if ((st = submit_single(&model, &one, &line, &request, &err)))
        goto out;
    do {
        if (di_interrupt_take()) {
            is_interrupted = true;
            di_core_abort_all(model.engine);
        }
    } while (di_core_step(model.engine));
    if (opt->stats)
        di_cli_print_stats(&model);
    if (one.finish == DI_FINISH_ERROR) {
        st = one.error.code;
        err = one.error;
    }
out:
    exit_status = st ? di_cli_fail(&err) : is_interrupted ? DI_EXIT_INTERRUPTED : 0;
    di_interrupt_stop();
    di_request_deinit(&request);
    di_cli_model_close(&model);
    di_strbuf_deinit(&text);
    di_strbuf_deinit(&line);
    return exit_status;
}

/* ---- a batch ------------------------------------------------------------------------------------------------------
 */

/* One sample of a line. */
typedef struct job_sample {
    di_reply reply; /* of messages */
    di_strbuf result;
} job_sample;

typedef struct job job;
struct job {
    job *next, *next_held;
    struct batch *batch;
    di_request request;
    job_sample *samples;       /* owned [n]; NULL when the line was refused */
    di_strbuf refused;         /* the result of a line that was */
    di_grammar_job *compiling; /* its grammar, before it is handed to the engine; NULL: has none, or none any more */
    int32_t n, n_left;         /* samples, and those that still run */
};

typedef struct batch {
    di_cli_model model;
    di_line_reader reader;
    job *first, *last; /* in the order of the lines */
    job *held;         /* the first in a list of those that wait, for a grammar or for room in the engine's queue */
    int64_t n_jobs;
    int32_t n_held;
    bool is_end, is_interrupted, has_failed;
    const di_options *opt;
} batch;

static void job_destroy(job *j) {
    for (int32_t i = 0; j->samples && i < j->n; i++) {
        di_reply_deinit(&j->samples[i].reply);
        di_strbuf_deinit(&j->samples[i].result);
    }
    free(j->samples);
    di_request_deinit(&j->request);
    di_strbuf_deinit(&j->refused);
    free(j);
}

static di_status on_job(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    job *j = user;
    job_sample *sample = &j->samples[gen->index];
    if (event->kind == DI_CORE_OUTPUT)
        return di_reply_push(&sample->reply, event->parsed, err);
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    di_line_result(&sample->result, &j->request, gen, j->request.input == DI_INPUT_CHAT ? &sample->reply : NULL);
    j->n_left--;
    if (gen->finish == DI_FINISH_ERROR)
        j->batch->has_failed = true;
    return DI_OK;
}

static bool is_blank(const char *line, size_t len) {
    for (size_t i = 0; i < len; i++) {
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r')
            return false;
    }
    return true;
}

/* Memory for the samples of a request that was read. */
static di_status make_samples(job *j, di_error *err) {
    j->samples = calloc((size_t)j->request.n, sizeof *j->samples);
    if (!j->samples)
        return di_fail(err, DI_ERR_MEMORY, "request of %lld samples", (long long)j->request.n);
    j->n = j->n_left = (int32_t)j->request.n;
    for (int32_t i = 0; i < j->n; i++)
        di_reply_init(&j->samples[i].reply, j->request.chat.thinking, di_random_u64());
    return DI_OK;
}

static void refuse_job(job *j, di_status st, const di_error *err) {
    di_line_error(&j->refused, &j->request, st, err);
    j->n_left = 0;
    j->batch->has_failed = true;
}

/* Whether the engine's queue has no room for n samples and will have some later. */
static bool is_queue_full(const batch *b, int32_t n) {
    if (b->opt->max_queue == 0 || di_core_pending(b->model.engine) == 0)
        return false;
    di_core_stats s;
    di_core_stats_get(b->model.engine, &s);
    return s.n_waiting + n > b->opt->max_queue;
}

/* Hands a job to the engine; false: it has to wait, as its grammar is not compiled or the queue is full. With nothing
 * else to do its grammar is waited for here. */
static bool submit_job(batch *b, job *j) {
    di_error err = {0};
    di_status st = DI_OK;
    if (b->opt->max_queue > 0 && j->n > b->opt->max_queue)
        st = di_fail(&err, DI_ERR_REQUEST, "n: %d, expected 1 to %lld: --max-queue has room for no more", j->n,
                     (long long)b->opt->max_queue);
    else if (is_queue_full(b, j->n) ||
             (j->compiling && di_core_pending(b->model.engine) > 0 && !di_grammar_job_is_done(j->compiling)))
        return false;
    if (!st) {
        di_grammar_job *compiled = j->compiling;
        j->compiling = NULL;
        st = di_cli_submit_job(&b->model, &j->request, compiled, on_job, j, NULL, &err);
    }
    if (st)
        refuse_job(j, st, &err);
    return true;
}

/* Tries the jobs that wait, in order. */
static void submit_held(batch *b) {
    int32_t n_held = 0;
    for (job **link = &b->held; *link;) {
        job *j = *link;
        if (submit_job(b, j)) {
            *link = j->next_held;
        } else {
            link = &j->next_held;
            n_held++;
        }
    }
    b->n_held = n_held;
}

static void hold(batch *b, job *j) {
    job **link = &b->held;
    while (*link)
        link = &(*link)->next_held;
    *link = j;
    j->next_held = NULL;
    b->n_held++;
}

/* A line becomes a job; one that can't run has its result at once. */
static di_status add_job(batch *b, const char *line, size_t len, di_error *err) {
    job *j = calloc(1, sizeof *j);
    if (!j)
        return di_fail(err, DI_ERR_MEMORY, "request line of %zu bytes", len);
    j->batch = b;
    if (b->last) {
        b->last->next = j;
    } else {
        b->first = j;
    }
    b->last = j;
    b->n_jobs++;
    di_error refused = {0};
    di_status st = di_request_parse(&j->request, DI_API_LINE, line, len, &b->model.defaults, &refused);
    if (!st)
        st = make_samples(j, &refused);
    if (!st && di_request_is_constrained(&j->request))
        st = di_constrainer_start(&b->model.constrainer, &j->request, NULL, NULL, &j->compiling, &refused);
    if (st) {
        refuse_job(j, st, &refused);
    } else if (!submit_job(b, j)) {
        hold(b, j);
    }
    return DI_OK;
}

static di_status read_lines(batch *b, di_error *err) {
    submit_held(b);
    while (b->n_held < HELD_MAX && !b->is_end && b->n_jobs < JOBS_MAX &&
           di_core_pending(b->model.engine) < 2 * b->opt->max_seqs) {
        const char *line;
        size_t len;
        /* Results that are ready must not wait for the next line: those are written first. */
        bool may_wait = di_core_pending(b->model.engine) == 0 && b->n_jobs == 0;
        switch (di_line_reader_next(&b->reader, may_wait, &line, &len, err)) {
        case DI_LINE_READY:
            if (!is_blank(line, len)) {
                di_status st = add_job(b, line, len, err);
                if (st)
                    return st;
            }
            break;
        case DI_LINE_NOT_YET:
        case DI_LINE_INTERRUPTED:
            return DI_OK;
        case DI_LINE_END:
            b->is_end = true;
            break;
        case DI_LINE_FAILED:
            return err->code;
        }
    }
    return DI_OK;
}

static di_status write_line(const di_strbuf *line, di_error *err) {
    di_status st = di_strbuf_status(line, err);
    return st ? st : di_cli_print(line->data, line->len, err);
}

/* The results of a job: its refusal, or one line for each sample. */
static di_status write_job(const job *j, di_error *err) {
    di_status st = j->refused.len || j->refused.failed ? write_line(&j->refused, err) : DI_OK;
    if (j->refused.len)
        return st;
    for (int32_t i = 0; i < j->n && !st; i++)
        st = write_line(&j->samples[i].result, err);
    return st;
}

static di_status write_results(batch *b, di_error *err) {
    bool is_any = false;
    while (b->first && b->first->n_left == 0) {
        job *j = b->first;
        di_status st = write_job(j, err);
        if (st)
            return st;
        b->first = j->next;
        if (!b->first)
            b->last = NULL;
        b->n_jobs--;
        job_destroy(j);
        is_any = true;
    }
    return is_any ? di_cli_flush(err) : DI_OK;
}

/* Jobs that never reached the engine have the result of one that was ended before its first token. */
static void abort_held(batch *b) {
    for (job *j = b->held; j; j = j->next_held) {
        di_grammar_job_cancel(j->compiling);
        j->compiling = NULL;
        for (int32_t i = 0; i < j->n; i++) {
            di_generation gen = {.index = i, .finish = DI_FINISH_ABORT, .text = "", .stop_hit = -1, .stop_token = -1};
            on_job(j, &gen, &(di_core_event){.kind = DI_CORE_DONE}, NULL);
        }
    }
    b->held = NULL;
    b->n_held = 0;
}

static di_status run_jobs(batch *b, di_error *err) {
    di_status st = DI_OK;
    while (!st && !(b->is_end && b->n_jobs == 0)) {
        if (di_interrupt_take()) {
            /* Lines that were not read have no result; those that were keep what they have. */
            b->is_interrupted = b->is_end = true;
            abort_held(b);
            di_core_abort_all(b->model.engine);
        }
        if ((st = read_lines(b, err)))
            break;
        di_core_step(b->model.engine);
        st = write_results(b, err);
    }
    return st;
}

static di_status open_input(batch *b, di_error *err) {
    const char *path = b->opt->input;
    bool is_stdin = strcmp(path, "-") == 0;
    b->reader.name = is_stdin ? "standard input" : path;
    b->reader.fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (b->reader.fd >= 0)
        return DI_OK;
    return di_fail(err, errno == ENOENT ? DI_ERR_ARG : DI_ERR_IO, "--input '%s': %s", path, strerrordesc_np(errno));
}

static int run_batch(const di_options *opt) {
    batch b = {.opt = opt, .reader.fd = -1};
    di_error err = {0};
    di_status st = open_input(&b, &err);
    if (!st)
        st = di_cli_model_open(&b.model, opt, &err);
    if (!st)
        st = di_interrupt_start(&err);
    if (!st)
        st = run_jobs(&b, &err);
    if (!st && opt->stats)
        di_cli_print_stats(&b.model);
    int exit_status = st ? di_cli_fail(&err) : b.is_interrupted ? DI_EXIT_INTERRUPTED : b.has_failed;
    di_interrupt_stop();
    for (job *j = b.first; j; j = j->next) {
        di_grammar_job_cancel(j->compiling);
        j->compiling = NULL;
    }
    di_cli_model_close(&b.model); /* before the jobs, which its requests point into */
    while (b.first) {
        job *next = b.first->next;
        job_destroy(b.first);
        b.first = next;
    }
    if (b.reader.fd > STDERR_FILENO)
        close(b.reader.fd);
    di_line_reader_deinit(&b.reader);
    return exit_status;
}

int di_cmd_run(const di_options *opt) {
    di_error err;
    if (opt->input && (opt->args.n || opt->raw || opt->system)) {
        di_fail(&err, DI_ERR_ARG, "run: --input takes its prompts from the file, expected no %s",
                opt->args.n ? "PROMPT"
                : opt->raw  ? "--raw"
                            : "--system");
        return di_cli_fail(&err);
    }
    if (opt->raw && opt->system) {
        di_fail(&err, DI_ERR_ARG, "run: --raw has no messages, expected no --system");
        return di_cli_fail(&err);
    }
    return opt->input ? run_batch(opt) : run_single(opt);
}
