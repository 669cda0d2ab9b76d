/* `deepinfer encode`: request bodies to prompts, one JSON object a line, by the tokenizer of the model alone.
 *
 *   {"messages": [...], ...}   -> {"prompt": "...", "ids": [...]}
 *
 * --api says whose bodies they are. A body that is refused gives {"error": {"message", "type", "param", "code"}}, the
 * error object of the APIs; the others still run and the exit status is 1 then. Every result is written out before the
 * next line is read, so that the command can be driven through a pipe. */
#include <errno.h>

#include "api/api.h"
#include "cli.h"

typedef struct encode_job {
    di_tokenizer *tok; /* owned */
    di_chat_vocab vocab;
    di_request_options options;
    di_api_kind api;
    di_prompt prompt; /* owned: of the current line */
    di_ids ids;       /* owned: of the current line */
    di_strbuf out;    /* owned: its result */
} encode_job;

static void write_prompt(encode_job *job) {
    di_strbuf_puts(&job->out, "{\"prompt\":");
    di_json_write_string(&job->out, di_strbuf_str(&job->prompt.text), job->prompt.text.len);
    di_strbuf_puts(&job->out, ",\"ids\":[");
    for (size_t i = 0; i < job->ids.len; i++) {
        di_strbuf_printf(&job->out, "%s%d", i ? "," : "", job->ids.data[i]);
    }
    di_strbuf_puts(&job->out, "]}\n");
}

/* The line's result into job->out, which is an error object when the status is not DI_OK. */
static di_status do_line(encode_job *job, const char *s, size_t len, di_error *err) {
    di_request request;
    job->ids.len = 0;
    di_status st = di_request_parse(&request, job->api, s, len, &job->options, err);
    if (st == DI_OK) {
        st = di_request_encode(&request, job->tok, &job->vocab, &job->prompt, &job->ids, err);
    }
    di_strbuf_reset(&job->out);
    if (st == DI_OK) {
        write_prompt(job);
    } else {
        di_strbuf_puts(&job->out, "{\"error\":");
        di_request_error_json(&job->out, &request, st, err);
        di_strbuf_puts(&job->out, "}\n");
    }
    di_request_deinit(&request);
    return st;
}

static bool is_blank(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r' && s[i] != '\n') {
            return false;
        }
    }
    return true;
}

static int run_lines(encode_job *job) {
    di_error err;
    char *line = NULL;
    size_t cap = 0;
    int exit_status = 0;
    for (;;) {
        errno = 0;
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) {
            break;
        }
        if (is_blank(line, (size_t)n)) {
            continue;
        }
        if (do_line(job, line, (size_t)n, &err)) {
            exit_status = 1;
        }
        di_status st = di_strbuf_status(&job->out, &err);
        st = st ? st : di_cli_print(job->out.data, job->out.len, &err);
        st = st ? st : di_cli_flush(&err);
        if (st) { /* without an output the other lines are of no use */
            free(line);
            return di_cli_fail(&err);
        }
    }
    if (!feof(stdin)) {
        di_fail(&err, errno == ENOMEM ? DI_ERR_MEMORY : DI_ERR_IO, "standard input: %s", strerrordesc_np(errno));
        exit_status = di_cli_fail(&err);
    }
    free(line);
    return exit_status;
}

static di_status prepare(encode_job *job, const di_options *opt, di_error *err) {
    di_strbuf path = {0};
    di_request_options_init(&job->options, opt->vendor_compat);
    di_status st = DI_OK;
    if (!opt->vendor_compat || di_options_is_set(opt, DI_OPT_reasoning)) {
        st = di_effort_parse(opt->reasoning, &job->options.effort_default, err);
    }
    if (st == DI_OK && !di_api_kind_parse(opt->api, &job->api)) {
        st = di_fail(err, DI_ERR_ARG, "--api '%s', expected chat, responses or messages", opt->api);
    }
    if (st == DI_OK) {
        di_path_join(&path, opt->model, "tokenizer.json");
        st = di_strbuf_status(&path, err);
    }
    if (st == DI_OK && (st = di_tokenizer_open(&job->tok, di_strbuf_str(&path), err)) == DI_OK) {
        st = di_error_context(err, di_chat_vocab_init(&job->vocab, job->tok, err), "'%s'", di_strbuf_str(&path));
    }
    di_strbuf_deinit(&path);
    return st;
}

int di_cmd_encode(const di_options *opt) {
    encode_job job = {0};
    di_error err;
    int exit_status = prepare(&job, opt, &err) ? di_cli_fail(&err) : run_lines(&job);
    di_tokenizer_close(job.tok);
    di_prompt_deinit(&job.prompt);
    di_ids_deinit(&job.ids);
    di_strbuf_deinit(&job.out);
    return exit_status;
}
