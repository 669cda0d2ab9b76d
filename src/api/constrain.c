/* From requests to grammars (constrain.h).
 *
 * A plain prompt with one format needs that format alone. A conversation may think first, call tools, or begin inside a
 * block of calls: its grammar is of the whole output (engine/grammar/output.c). Where tools are offered, calls follow
 * the tools' schemas whatever the choice is, so that what the parser takes apart is always well-formed. */
#include "api.h"

bool di_request_is_constrained(const di_request *q) {
    return q->constraint != DI_CONSTRAINT_NONE;
}

static bool has_calls(const di_request *q) {
    return q->constraint == DI_CONSTRAINT_TOOL_CALL || q->constraint == DI_CONSTRAINT_TOOL_CALL_REQUIRED;
}

static bool is_thinking(const di_request *q) {
    return q->input == DI_INPUT_CHAT && !q->parse.starts_in_calls && q->parse.stage != DI_CHAT_STAGE_CONTENT;
}

static const char *field_of(const di_request *q) {
    switch (q->format_constraint) {
    case DI_CONSTRAINT_REGEX:
        return q->chat.format == DI_CHAT_FORMAT_REGEX ? "response_format" : "regex";
    case DI_CONSTRAINT_EBNF:
        return "ebnf";
    case DI_CONSTRAINT_CHOICE:
        return "choice";
    case DI_CONSTRAINT_JSON:
        return q->api == DI_API_RESPONSES  ? "text.format"
               : q->api == DI_API_MESSAGES ? "output_config.format"
                                           : "response_format";
    default:
        return "tools";
    }
}

/* ---- the grammar as text ---- */

static void put_string(di_strbuf *out, const char *key, di_chat_text text) {
    di_strbuf_printf(out, "{\"%s\":", key);
    di_json_write_string(out, text.len ? text.data : "", text.len);
    di_strbuf_putc(out, '}');
}

static void put_value(di_strbuf *out, const char *key, di_chat_text json) {
    di_strbuf_printf(out, "{\"%s\":", key);
    di_strbuf_append(out, json.data, json.len);
    di_strbuf_putc(out, '}');
}

static void put_content(di_strbuf *out, const di_request *q) {
    di_strbuf_puts(out, ",\"content\":");
    switch (q->format_constraint) {
    case DI_CONSTRAINT_JSON:
        if (q->format_text.len > 0)
            put_value(out, "schema", q->format_text);
        else
            di_strbuf_puts(out, "{\"object\":true}");
        break;
    case DI_CONSTRAINT_REGEX:
        put_string(out, "regex", q->format_text);
        break;
    case DI_CONSTRAINT_EBNF:
        put_string(out, "ebnf", q->format_text);
        break;
    default:
        put_value(out, "choice", q->format_text);
    }
}

static void put_output(di_strbuf *out, const di_request *q) {
    static const char *const calls[] = {"none", "auto", "required"};
    bool is_required = q->constraint == DI_CONSTRAINT_TOOL_CALL_REQUIRED;
    di_strbuf_printf(out, "{\"thinking\":%s,\"opened\":%s,\"calls\":\"%s\",\"lax\":%s",
                     is_thinking(q) ? "true" : "false", q->parse.starts_in_calls ? "true" : "false",
                     calls[has_calls(q) + is_required], q->is_format_lax ? "true" : "false");
    if (has_calls(q)) {
        di_strbuf_puts(out, ",\"tools\":");
        di_strbuf_append(out, q->constraint_text.data, q->constraint_text.len);
    }
    if (q->format_constraint != DI_CONSTRAINT_NONE)
        put_content(out, q);
    di_strbuf_putc(out, '}');
}

/* The text of spec is memory's. */
static di_status make_spec(const di_request *q, di_strbuf *memory, di_grammar_spec *spec, di_error *err) {
    static const di_grammar_kind kinds[] = {
        [DI_CONSTRAINT_JSON] = DI_GRAMMAR_SCHEMA,
        [DI_CONSTRAINT_REGEX] = DI_GRAMMAR_REGEX,
        [DI_CONSTRAINT_EBNF] = DI_GRAMMAR_EBNF,
        [DI_CONSTRAINT_CHOICE] = DI_GRAMMAR_CHOICE,
    };
    if (has_calls(q) || is_thinking(q)) {
        put_output(memory, q);
        *spec = (di_grammar_spec){.kind = DI_GRAMMAR_OUTPUT, .text = memory->data, .len = memory->len};
        return di_strbuf_status(memory, err);
    }
    *spec = (di_grammar_spec){.kind = kinds[q->format_constraint],
                              .text = q->format_text.data,
                              .len = q->format_text.len,
                              .is_lax = q->is_format_lax};
    if (q->format_constraint == DI_CONSTRAINT_JSON && q->format_text.len == 0)
        *spec = (di_grammar_spec){.kind = DI_GRAMMAR_OBJECT, .text = ""};
    return DI_OK;
}

di_status di_constrain_context(const di_request *q, di_status st, di_error *err) {
    static const char tools[] = "tools: ";
    const char *field = field_of(q);
    size_t n = strlen(field);
    /* What says itself where it is needs no more. */
    if (err && (strncmp(err->message, tools, sizeof tools - 1) == 0 ||
                (strncmp(err->message, field, n) == 0 && strchr(":, ", err->message[n]))))
        return st;
    return di_error_context(err, st, "%s", field);
}

/* ---- the service and the vocabulary ---- */

di_status di_constrainer_init(di_constrainer *c, const di_loaded *loaded, const di_constrain_options *options,
                              di_error *err) {
    *c = (di_constrainer){.loaded = loaded};
    di_grammar_service_options so = {
        .n_threads = options->n_threads,
        .cache_bytes = options->cache_bytes,
        .is_uncached = options->cache_bytes == 0,
        .limits = {.timeout_ns = options->timeout_ns},
    };
    if (pthread_mutex_init(&c->mutex, NULL))
        return di_fail(err, DI_ERR_INTERNAL, "grammars: no lock");
    c->has_mutex = true;
    return di_grammar_service_create(&c->service, &so, err);
}

void di_constrainer_deinit(di_constrainer *c) {
    di_grammar_service_destroy(c->service);
    di_grammar_vocab_destroy(c->vocab);
    if (c->has_mutex)
        pthread_mutex_destroy(&c->mutex);
    *c = (di_constrainer){0};
}

di_status di_constrainer_vocab(di_constrainer *c, const di_grammar_vocab **out, di_error *err) {
    if (!c->loaded->tok)
        return di_fail(err, DI_ERR_REQUEST, "the model has no tokenizer, so its outputs can't follow a format");
    pthread_mutex_lock(&c->mutex);
    di_status st = DI_OK;
    if (!c->vocab)
        st = di_grammar_vocab_create(&c->vocab, c->loaded->tok, c->loaded->config.vocab, c->loaded->config.eos_id, err);
    *out = c->vocab;
    pthread_mutex_unlock(&c->mutex);
    return st;
}

di_status di_constrainer_compile(di_constrainer *c, const di_request *q, di_grammar **out, di_error *err) {
    *out = NULL;
    if (!di_request_is_constrained(q))
        return DI_OK;
    di_strbuf memory = {0};
    di_grammar_spec spec;
    di_status st = make_spec(q, &memory, &spec, err);
    if (!st)
        st = di_constrain_context(q, di_grammar_service_compile(c->service, &spec, out, err), err);
    di_strbuf_deinit(&memory);
    return st;
}

di_status di_constrainer_start(di_constrainer *c, const di_request *q, void (*done)(void *user), void *user,
                               di_grammar_job **job, di_error *err) {
    di_strbuf memory = {0};
    di_grammar_spec spec;
    di_status st = make_spec(q, &memory, &spec, err);
    /* Made on the caller's thread, since whoever takes the job may be a thread that runs steps. */
    const di_grammar_vocab *vocab;
    if (!st && c->loaded->tok)
        st = di_constrainer_vocab(c, &vocab, err);
    if (!st)
        st = di_grammar_job_start(c->service, &spec, done, user, job, err);
    di_strbuf_deinit(&memory);
    return st;
}
