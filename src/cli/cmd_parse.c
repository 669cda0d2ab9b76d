/* `deepinfer parse`: outputs of the model to messages, a JSON line each.
 *
 * A line is {"text", "splits"?, "options"?, "finish"?}; its answer {"message", "finish_reason"}, or {"error"} for a
 * line that is wrong, which the exit status then tells. Splits are the byte offsets at which the text arrives in
 * pieces: they never change the answer. Options: `initial` (null, "reasoning_start", "reasoning_continuation",
 * "content_continuation"), `parse_tool_calls` (true unless given), `starts_in_tool_calls`, `parse_json_output`, `stop`.
 * Every answer is written out before the next line is read, so that the command can be driven through a pipe. */
#include "api/api.h"
#include "lines.h"

/* One line, read. Texts are borrowed from the JSON. */
typedef struct parse_line {
    di_parser_options options;
    const char *text;
    size_t len;
    bool is_thinking;
    di_finish finish;
    const di_json *splits; /* NULL = none */
    const char **stop;     /* owned, as stop_len */
    size_t *stop_len;
    const char *param; /* the field that is wrong, NULL = none meant */
} parse_line;

static di_status fail_type(parse_line *line, const char *param, const di_json *value, const char *expected,
                           di_error *err) {
    line->param = param;
    return di_fail(err, DI_ERR_REQUEST, "field '%s': %s, expected %s", param,
                   value == NULL ? "absent" : di_json_kind_name(value), expected);
}

/* null counts as absent. */
static const di_json *field_of(const di_json *object, const char *key) {
    const di_json *value = di_json_get(object, key);
    return di_json_is(value, DI_JSON_NULL) ? NULL : value;
}

static di_status read_flag(parse_line *line, const di_json *options, const char *key, const char *param, bool *flag,
                           di_error *err) {
    const di_json *value = field_of(options, key);
    if (value == NULL) {
        return DI_OK;
    }
    if (!di_json_is(value, DI_JSON_BOOL)) {
        return fail_type(line, param, value, "true or false", err);
    }
    *flag = di_json_bool(value);
    return DI_OK;
}

static di_status read_initial(parse_line *line, const di_json *options, di_error *err) {
    static const struct {
        const char *name;
        di_chat_stage stage;
    } stages[] = {{"reasoning_start", DI_CHAT_STAGE_REASONING},
                  {"reasoning_continuation", DI_CHAT_STAGE_REASONING_RESUMED},
                  {"content_continuation", DI_CHAT_STAGE_CONTENT_RESUMED}};
    const di_json *value = field_of(options, "initial");
    if (value == NULL) {
        line->options.stage = DI_CHAT_STAGE_CONTENT;
        return DI_OK;
    }
    const char *name = di_json_str(value, NULL);
    for (size_t i = 0; name != NULL && i < DI_COUNT(stages); i++) {
        if (strcmp(stages[i].name, name) == 0) {
            line->options.stage = stages[i].stage;
            line->is_thinking = true;
            return DI_OK;
        }
    }
    if (name != NULL) {
        line->param = "options.initial";
        return di_fail(
            err, DI_ERR_REQUEST,
            "field 'options.initial': '%.40s', expected null, 'reasoning_start', 'reasoning_continuation' or "
            "'content_continuation'",
            name);
    }
    return fail_type(line, "options.initial", value, "null or a string", err);
}

static di_status read_stop(parse_line *line, const di_json *options, di_error *err) {
    const di_json *value = field_of(options, "stop");
    if (value == NULL) {
        return DI_OK;
    }
    bool is_one = di_json_is(value, DI_JSON_STRING);
    if (!is_one && !di_json_is(value, DI_JSON_ARRAY)) {
        return fail_type(line, "options.stop", value, "a string or an array of strings", err);
    }
    size_t n = is_one ? 1 : di_json_array_len(value);
    line->stop = calloc(n + 1, sizeof *line->stop);
    line->stop_len = calloc(n + 1, sizeof *line->stop_len);
    if (line->stop == NULL || line->stop_len == NULL) {
        return di_fail(err, DI_ERR_MEMORY, "no memory for %zu stop strings", n);
    }
    for (size_t i = 0; i < n; i++) {
        const di_json *item = is_one ? value : di_json_at(value, i);
        line->stop[i] = di_json_str(item, &line->stop_len[i]);
        if (line->stop[i] == NULL) {
            return fail_type(line, "options.stop", item, "strings only", err);
        }
    }
    line->options.n_stop = n;
    line->options.stop = line->stop;
    line->options.stop_len = line->stop_len;
    return DI_OK;
}

static di_status read_splits(parse_line *line, const di_json *json, di_error *err) {
    const di_json *splits = field_of(json, "splits");
    if (splits == NULL) {
        return DI_OK;
    }
    if (!di_json_is(splits, DI_JSON_ARRAY)) {
        return fail_type(line, "splits", splits, "an array of byte offsets", err);
    }
    int64_t before = 0;
    for (size_t i = 0; i < di_json_array_len(splits); i++) {
        const di_json *item = di_json_at(splits, i);
        if (!di_json_is(item, DI_JSON_INT)) {
            return fail_type(line, "splits", item, "byte offsets", err);
        }
        int64_t at = di_json_int(item);
        if (at < before || (uint64_t)at > line->len) {
            line->param = "splits";
            return di_fail(err, DI_ERR_REQUEST, "field 'splits': offset %lld, expected rising offsets up to %zu",
                           (long long)at, line->len);
        }
        before = at;
    }
    line->splits = splits;
    return DI_OK;
}

static di_status read_finish(parse_line *line, const di_json *json, di_error *err) {
    const di_json *value = field_of(json, "finish");
    const char *name = di_json_str(value, NULL);
    if (value == NULL || (name != NULL && di_finish_parse(name, &line->finish))) {
        return DI_OK;
    }
    if (name != NULL) {
        line->param = "finish";
        return di_fail(
            err, DI_ERR_REQUEST,
            "field 'finish': '%.40s', expected null, 'stop', 'length', 'content_filter', 'tool_calls', 'abort' or "
            "'error'",
            name);
    }
    return fail_type(line, "finish", value, "null or a string", err);
}

static di_status read_line(parse_line *line, const di_json *json, di_error *err) {
    di_status st;
    if (!di_json_is(json, DI_JSON_OBJECT)) {
        return di_fail(err, DI_ERR_REQUEST, "%s, expected an object with 'text'", di_json_kind_name(json));
    }
    const di_json *text = di_json_get(json, "text"), *options = field_of(json, "options");
    line->text = di_json_str(text, &line->len);
    if (line->text == NULL) {
        return fail_type(line, "text", text, "a string", err);
    }
    if (options != NULL && !di_json_is(options, DI_JSON_OBJECT)) {
        return fail_type(line, "options", options, "an object", err);
    }
    line->options.has_tools = true;
    if ((st = read_initial(line, options, err)) != DI_OK ||
        (st = read_flag(line, options, "parse_tool_calls", "options.parse_tool_calls", &line->options.has_tools,
                        err)) != DI_OK ||
        (st = read_flag(line, options, "starts_in_tool_calls", "options.starts_in_tool_calls",
                        &line->options.starts_in_calls, err)) != DI_OK ||
        (st = read_flag(line, options, "parse_json_output", "options.parse_json_output", &line->options.is_json,
                        err)) != DI_OK ||
        (st = read_stop(line, options, err)) != DI_OK || (st = read_splits(line, json, err)) != DI_OK) {
        return st;
    }
    return read_finish(line, json, err);
}

/* Parses the text of a line and appends its answer. */
static di_status answer_line(const parse_line *line, di_strbuf *out, di_error *err) {
    di_reply reply;
    di_parser *parser = NULL;
    di_reply_init(&reply, line->is_thinking, 0); /* ids are not printed */
    di_status st = di_parser_create(&parser, &line->options, di_reply_push, &reply, err);
    size_t at = 0, n_splits = di_json_array_len(line->splits);
    for (size_t i = 0; st == DI_OK && i <= n_splits; i++) {
        size_t end = i < n_splits ? (size_t)di_json_int(di_json_at(line->splits, i)) : line->len;
        st = di_parser_push(parser, line->text + at, end - at, err);
        at = end;
    }
    if (st == DI_OK) {
        st = di_parser_finish(parser, err);
    }
    if (st == DI_OK) {
        di_json *message = di_reply_parsed(&reply);
        if (message == NULL) {
            st = di_fail(err, DI_ERR_MEMORY, "no memory for the message");
        } else {
            di_strbuf_puts(out, "{\"message\":");
            di_json_write(out, message, DI_JSON_COMPACT);
            di_strbuf_printf(out, ",\"finish_reason\":\"%s\"}\n",
                             di_finish_name(di_parser_finish_reason(parser, line->finish)));
            st = di_strbuf_status(out, err);
            di_json_free(message);
        }
    }
    di_parser_destroy(parser);
    di_reply_deinit(&reply);
    return st;
}

static void append_error(di_strbuf *out, const parse_line *line, const di_error *error) {
    const char *type = di_status_http(error->code) < 500 ? "invalid_request_error" : "server_error";
    di_strbuf_puts(out, "{\"error\":{\"message\":");
    di_json_write_string(out, error->message, strlen(error->message));
    di_strbuf_printf(out, ",\"type\":\"%s\",\"param\":", type);
    if (line->param != NULL) {
        di_json_write_string(out, line->param, strlen(line->param));
    } else {
        di_strbuf_puts(out, "null");
    }
    di_strbuf_printf(out, ",\"code\":\"%s\"}}\n", type);
}

/* Appends the answer or the error of a line; false for an error. */
static bool do_line(void *ctx, const char *text, size_t len, di_strbuf *out) {
    (void)ctx;
    di_json *json = NULL;
    di_error error;
    parse_line line = {0};
    di_status st = di_error_context(&error, di_json_parse(&json, text, len, &error), "the line is not JSON");
    if (st == DI_ERR_FORMAT) {
        error.code = st = DI_ERR_REQUEST; /* the fault of who sent it, not of a file of ours */
    }
    if (st == DI_OK) {
        st = read_line(&line, json, &error);
    }
    if (st == DI_OK) {
        st = answer_line(&line, out, &error);
    }
    if (st != DI_OK) {
        di_strbuf_reset(out);
        append_error(out, &line, &error);
    }
    free(line.stop);
    free(line.stop_len);
    di_json_free(json);
    return st == DI_OK;
}

int di_cmd_parse(const di_options *opt) {
    (void)opt; /* the format is the same for every model */
    return di_cli_answer_lines(do_line, NULL);
}
