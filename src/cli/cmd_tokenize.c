/* `deepinfer tokenize`: texts to token ids and back, one JSON object a line, by the tokenizer of the model alone.
 *
 *   {"text": "..."}   -> {"ids": [...]}      with "plain": true, the spellings of added tokens are ordinary text
 *   {"ids": [...]}    -> {"text": "..."}     with "skip_special": true, special tokens are left out
 *
 * A line that can't be done gives {"error": {"type", "message"}}; the others still run and the exit status is 1 then.
 * Every result is written out before the next line is read, so that the command can be driven through a pipe. */
#include "lines.h"
#include "text/text.h"

typedef struct tokenize_job {
    di_tokenizer *tok; /* owned */
    di_ids ids;        /* owned: of the current line */
    di_strbuf text;    /* owned: of the current line */
    di_strbuf *out;    /* borrowed: its answer */
} tokenize_job;

static di_status read_flag(const di_json *line, const char *name, bool *out, di_error *err) {
    const di_json *v = di_json_get(line, name);
    *out = di_json_bool(v);
    if (v && !di_json_is(v, DI_JSON_BOOL) && !di_json_is(v, DI_JSON_NULL)) {
        return di_fail(err, DI_ERR_REQUEST, "'%s' must be true or false, found %s", name, di_json_kind_name(v));
    }
    return DI_OK;
}

static di_status do_text(tokenize_job *job, const di_json *line, const di_json *text, di_error *err) {
    bool is_plain = false;
    size_t len = 0;
    di_status st = read_flag(line, "plain", &is_plain, err);
    if (st) {
        return st;
    }
    const char *s = di_json_str(text, &len);
    if (!s) {
        return di_fail(err, DI_ERR_REQUEST, "'text' must be a string, found %s", di_json_kind_name(text));
    }
    if ((st = di_tokenizer_encode(job->tok, s, len, is_plain, &job->ids, err))) {
        return st;
    }
    di_strbuf_puts(job->out, "{\"ids\":[");
    for (size_t i = 0; i < job->ids.len; i++) {
        di_strbuf_printf(job->out, "%s%d", i ? "," : "", job->ids.data[i]);
    }
    di_strbuf_puts(job->out, "]}\n");
    return di_strbuf_status(job->out, err);
}

static di_status do_ids(tokenize_job *job, const di_json *line, const di_json *ids, di_error *err) {
    bool skips_special = false;
    di_status st = read_flag(line, "skip_special", &skips_special, err);
    if (st) {
        return st;
    }
    if (!di_json_is(ids, DI_JSON_ARRAY)) {
        return di_fail(err, DI_ERR_REQUEST, "'ids' must be a list of integers, found %s", di_json_kind_name(ids));
    }
    for (size_t i = 0; i < di_json_array_len(ids); i++) {
        const di_json *v = di_json_at(ids, i);
        int64_t id = di_json_int(v);
        if (!di_json_is(v, DI_JSON_INT)) {
            return di_fail(err, DI_ERR_REQUEST, "'ids[%zu]' must be an integer, found %s", i, di_json_kind_name(v));
        }
        if (id < 0 || id >= di_tokenizer_size(job->tok)) {
            return di_fail(err, DI_ERR_REQUEST, "'ids[%zu]' is %lld, the vocabulary has 0 to %d", i, (long long)id,
                           di_tokenizer_size(job->tok) - 1);
        }
        int32_t value = (int32_t)id;
        if ((st = di_ids_append(&job->ids, &value, 1, err))) {
            return st;
        }
    }
    if ((st = di_tokenizer_decode(job->tok, job->ids.data, job->ids.len, skips_special, &job->text, err))) {
        return st;
    }
    di_strbuf_puts(job->out, "{\"text\":");
    di_json_write_string(job->out, di_strbuf_str(&job->text), job->text.len);
    di_strbuf_puts(job->out, "}\n");
    return di_strbuf_status(job->out, err);
}

static di_status do_line(tokenize_job *job, const char *s, size_t len, di_error *err) {
    di_json *line = NULL;
    di_status st = di_json_parse(&line, s, len, err);
    if (st) {
        return di_error_context(err, st, "the line is not JSON");
    }
    const di_json *text = di_json_get(line, "text"), *ids = di_json_get(line, "ids");
    job->ids.len = 0;
    di_strbuf_reset(&job->text);
    if (!di_json_is(line, DI_JSON_OBJECT)) {
        st = di_fail(err, DI_ERR_REQUEST, "the line must be an object, found %s", di_json_kind_name(line));
    } else if (!text == !ids) {
        st = di_fail(err, DI_ERR_REQUEST, "the line must have 'text' or 'ids', found %s", text ? "both" : "neither");
    } else {
        st = text ? do_text(job, line, text, err) : do_ids(job, line, ids, err);
    }
    di_json_free(line);
    return st;
}

static void write_error(di_strbuf *out, di_status st, const di_error *err) {
    bool is_ours = st == DI_ERR_MEMORY || st == DI_ERR_INTERNAL;
    di_strbuf_reset(out);
    di_strbuf_printf(out,
                     "{\"error\":{\"type\":\"%s\",\"message\":", is_ours ? "server_error" : "invalid_request_error");
    di_json_write_string(out, err->message, strlen(err->message));
    di_strbuf_puts(out, "}}\n");
}

/* The line's answer, or its error. */
static bool answer(void *ctx, const char *s, size_t len, di_strbuf *out) {
    tokenize_job *job = ctx;
    di_error err;
    job->out = out;
    di_status st = do_line(job, s, len, &err);
    if (st) {
        write_error(out, st, &err);
    }
    return !st;
}

int di_cmd_tokenize(const di_options *opt) {
    tokenize_job job = {0};
    di_strbuf path = {0};
    di_error err;
    di_path_join(&path, opt->model, "tokenizer.json");
    di_status st = di_strbuf_status(&path, &err);
    if (!st) {
        st = di_tokenizer_open(&job.tok, di_strbuf_str(&path), &err);
    }
    int exit_status = st ? di_cli_fail(&err) : di_cli_answer_lines(answer, &job);
    di_tokenizer_close(job.tok);
    di_ids_deinit(&job.ids);
    di_strbuf_deinit(&job.text);
    di_strbuf_deinit(&path);
    return exit_status;
}
