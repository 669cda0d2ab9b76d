/* `deepinfer grammar`: texts against a grammar, a JSON line each.
 *
 * A line is {"text"} with the grammar of --json-schema, --regex or --ebnf, or has its own beside the text as "schema",
 * "regex" or "ebnf", which goes before the option's. Its answer is {"accept":true} or {"accept":false}, or {"error"}
 * for a line or a grammar that is wrong, which the exit status then tells. A text is bytes here: no model and no
 * tokenizer is opened. Lines in a row with the same grammar compile it once. */
#include "engine/grammar/grammar.h"

#include "lines.h"

enum { GRAMMAR_BYTES_MAX = 64 << 20 };

/* A grammar, or what is wrong with it. Zeroed storage is none. */
typedef struct compiled {
    bool is_there;
    di_grammar_kind kind;
    di_strbuf text;      /* owned */
    di_grammar *grammar; /* owned; NULL: refused */
    di_error refusal;
} compiled;

typedef struct grammar_job {
    compiled of_option, of_line;
} grammar_job;

static void compile(compiled *c, di_grammar_kind kind) {
    di_grammar_spec spec = {.kind = kind, .text = di_strbuf_str(&c->text), .len = c->text.len};
    c->is_there = true;
    c->kind = kind;
    if (di_strbuf_status(&c->text, &c->refusal) != DI_OK ||
        di_grammar_compile(&c->grammar, &spec, NULL, &c->refusal) != DI_OK) {
        c->grammar = NULL;
    }
}

static void compiled_deinit(compiled *c) {
    di_grammar_release(c->grammar);
    di_strbuf_deinit(&c->text);
    *c = (compiled){0};
}

/* The grammar of a line's text, unless it is the one of the line before. */
static void compile_line(compiled *c, di_grammar_kind kind, di_strbuf *text) {
    if (!c->is_there || c->kind != kind || c->text.len != text->len ||
        memcmp(di_strbuf_str(&c->text), di_strbuf_str(text), text->len) != 0) {
        compiled_deinit(c);
        c->text = *text;
        *text = (di_strbuf){0};
        compile(c, kind);
    }
}

static di_status read_own(compiled *c, const di_json *json, bool *has, const char **param, di_error *err) {
    static const struct {
        const char *key;
        di_grammar_kind kind;
    } keys[] = {{"schema", DI_GRAMMAR_SCHEMA}, {"regex", DI_GRAMMAR_REGEX}, {"ebnf", DI_GRAMMAR_EBNF}};
    di_strbuf text = {0};
    *has = false;
    for (size_t i = 0; i < DI_COUNT(keys); i++) {
        const di_json *value = di_json_get(json, keys[i].key);
        if (value == NULL) {
            continue;
        }
        *param = keys[i].key;
        if (*has) {
            return di_fail(err, DI_ERR_REQUEST, "field '%s': only one of 'schema', 'regex' and 'ebnf' can be given",
                           keys[i].key);
        }
        *has = true;
        if (keys[i].kind == DI_GRAMMAR_SCHEMA) {
            di_json_write(&text, value, DI_JSON_COMPACT);
        } else {
            size_t len;
            const char *s = di_json_str(value, &len);
            if (s == NULL) {
                return di_fail(err, DI_ERR_REQUEST, "field '%s': %s, expected a string", keys[i].key,
                               di_json_kind_name(value));
            }
            di_strbuf_append(&text, s, len);
        }
        compile_line(c, keys[i].kind, &text);
        di_strbuf_deinit(&text);
    }
    return DI_OK;
}

static di_status answer_line(grammar_job *job, const di_json *json, bool *accepts, const char **param, di_error *err) {
    size_t len;
    bool has_own;
    if (!di_json_is(json, DI_JSON_OBJECT)) {
        return di_fail(err, DI_ERR_REQUEST, "%s, expected an object with 'text'", di_json_kind_name(json));
    }
    const di_json *value = di_json_get(json, "text");
    const char *text = di_json_str(value, &len);
    if (text == NULL) {
        *param = "text";
        return di_fail(err, DI_ERR_REQUEST, "field 'text': %s, expected a string",
                       value == NULL ? "absent" : di_json_kind_name(value));
    }
    di_status st = read_own(&job->of_line, json, &has_own, param, err);
    if (st != DI_OK) {
        return st;
    }
    const compiled *c = has_own ? &job->of_line : &job->of_option;
    if (!c->is_there) {
        return di_fail(err, DI_ERR_REQUEST,
                       "no grammar: expected 'schema', 'regex' or 'ebnf' beside 'text', or --json-schema, --regex or "
                       "--ebnf");
    }
    if (c->grammar == NULL) {
        *err = c->refusal;
        return err->code;
    }
    return di_grammar_accepts(c->grammar, text, len, accepts, err);
}

static void append_error(di_strbuf *out, const char *param, const di_error *error) {
    const char *type = di_status_http(error->code) < 500 ? "invalid_request_error" : "server_error";
    di_strbuf_puts(out, "{\"error\":{\"message\":");
    di_json_write_string(out, error->message, strlen(error->message));
    di_strbuf_printf(out, ",\"type\":\"%s\",\"param\":", type);
    if (param != NULL) {
        di_json_write_string(out, param, strlen(param));
    } else {
        di_strbuf_puts(out, "null");
    }
    di_strbuf_printf(out, ",\"code\":\"%s\"}}\n", type);
}

static bool do_line(void *ctx, const char *line, size_t len, di_strbuf *out) {
    di_json *json = NULL;
    di_error error;
    bool accepts = false;
    const char *param = NULL;
    di_status st = di_error_context(&error, di_json_parse(&json, line, len, &error), "the line is not JSON");
    if (st == DI_ERR_FORMAT) {
        error.code = st = DI_ERR_REQUEST; /* the fault of who sent it, not of a file of ours */
    }
    if (st == DI_OK) {
        st = answer_line(ctx, json, &accepts, &param, &error);
    }
    if (st == DI_OK) {
        di_strbuf_printf(out, "{\"accept\":%s}\n", accepts ? "true" : "false");
    } else {
        append_error(out, param, &error);
    }
    di_json_free(json);
    return st == DI_OK;
}

/* The grammar of the command line. One that is refused is the answer to the lines that use it. */
static di_status prepare(compiled *c, const di_options *opt, di_error *err) {
    int n_given = (opt->json_schema != NULL) + (opt->regex != NULL) + (opt->ebnf != NULL);
    if (n_given > 1) {
        return di_fail(err, DI_ERR_ARG, "only one of --json-schema, --regex and --ebnf can be given");
    }
    if (n_given == 0) {
        return DI_OK;
    }
    if (opt->regex != NULL) {
        di_strbuf_puts(&c->text, opt->regex);
    } else {
        const char *path = opt->json_schema != NULL ? opt->json_schema : opt->ebnf;
        di_status st = di_file_read(path, GRAMMAR_BYTES_MAX, &c->text, err);
        if (st == DI_ERR_NOT_FOUND) { /* of the model's files that is another fault */
            err->code = st = DI_ERR_ARG;
        }
        if (st != DI_OK) {
            return di_error_context(err, st, "%s", opt->json_schema != NULL ? "--json-schema" : "--ebnf");
        }
    }
    compile(c, opt->json_schema != NULL ? DI_GRAMMAR_SCHEMA : opt->regex != NULL ? DI_GRAMMAR_REGEX : DI_GRAMMAR_EBNF);
    return DI_OK;
}

int di_cmd_grammar(const di_options *opt) {
    grammar_job job = {0};
    di_error err;
    int exit_status = prepare(&job.of_option, opt, &err) ? di_cli_fail(&err) : di_cli_answer_lines(do_line, &job);
    compiled_deinit(&job.of_option);
    compiled_deinit(&job.of_line);
    return exit_status;
}
