/* `deepinfer encode`: request bodies to prompts, one JSON object a line, by the tokenizer of the model alone.
 *
 *   {"messages": [...], ...}   -> {"prompt": "...", "ids": [...]}
 *
 * --api says whose bodies they are. A body that is refused gives {"error": {"message", "type", "param", "code"}}, the
 * error object of the APIs; the others still run and the exit status is 1 then. Every result is written out before the
 * next line is read, so that the command can be driven through a pipe. */
#include "api/api.h"
#include "lines.h"

typedef struct encode_job {
    di_tokenizer *tok; /* owned */
    di_chat_vocab vocab;
    di_request_options options;
    di_api_kind api;
    di_prompt prompt; /* owned: of the current line */
    di_ids ids;       /* owned: of the current line */
} encode_job;

static void write_prompt(const encode_job *job, di_strbuf *out) {
    di_strbuf_puts(out, "{\"prompt\":");
    di_json_write_string(out, di_strbuf_str(&job->prompt.text), job->prompt.text.len);
    di_strbuf_puts(out, ",\"ids\":[");
    for (size_t i = 0; i < job->ids.len; i++) {
        di_strbuf_printf(out, "%s%d", i ? "," : "", job->ids.data[i]);
    }
    di_strbuf_puts(out, "]}\n");
}

/* The line's prompt, or an error object. */
static bool answer(void *ctx, const char *s, size_t len, di_strbuf *out) {
    encode_job *job = ctx;
    di_request request;
    di_error err;
    job->ids.len = 0;
    di_status st = di_request_parse(&request, job->api, s, len, &job->options, &err);
    if (st == DI_OK) {
        st = di_request_encode(&request, job->tok, &job->vocab, &job->prompt, &job->ids, &err);
    }
    if (st == DI_OK) {
        write_prompt(job, out);
    } else {
        di_strbuf_puts(out, "{\"error\":");
        di_request_error_json(out, &request, st, &err);
        di_strbuf_puts(out, "}\n");
    }
    di_request_deinit(&request);
    return st == DI_OK;
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
    int exit_status = prepare(&job, opt, &err) ? di_cli_fail(&err) : di_cli_answer_lines(answer, &job);
    di_tokenizer_close(job.tok);
    di_prompt_deinit(&job.prompt);
    di_ids_deinit(&job.ids);
    return exit_status;
}
