/* Routes that turn texts and requests into ids and back, without running anything: tokenize, detokenize, count, render.
 */
#include "server_internal.h"

static void write_ids(di_strbuf *out, const di_ids *ids) {
    di_strbuf_putc(out, '[');
    for (size_t i = 0; i < ids->len; i++)
        di_strbuf_printf(out, "%s%d", i ? "," : "", ids->data[i]);
    di_strbuf_putc(out, ']');
}

/* What the values of a JSON text take in memory, at most: one for each separator. */
static int64_t memory_of_values(const di_strbuf *text) {
    enum { VALUE_BYTES = 56 };
    int64_t n = 1;
    for (size_t i = 0; i < text->len; i++)
        n += text->data[i] == ',' || text->data[i] == ':' || text->data[i] == '[' || text->data[i] == '{';
    return n * VALUE_BYTES;
}

/* Counts the memory of what is about to be parsed, up to the exchange's end. False: it is too much. */
static bool charge_values(di_exchange *x) {
    di_server *server = x->server;
    if (x->body.len <= DI_BODY_SMALL)
        return true;
    int64_t n = memory_of_values(&x->body), most = di_bodies_max(server);
    if (n + (int64_t)x->body.len > most / 2) {
        di_exchange_fail(x, 413, NULL, "the body has too many values: they would take %lld MiB, at most %lld are taken",
                         (long long)(n >> 20), (long long)(most >> 21));
        return false;
    }
    if (atomic_fetch_add(&server->body_bytes, n) + n > most) {
        atomic_fetch_sub(&server->body_bytes, n);
        x->retry_s = 1;
        di_exchange_fail(x, 503, NULL, "too many long bodies are there at once: try again later");
        return false;
    }
    x->charged += n;
    return true;
}

di_shared_request *di_exchange_open_request(di_exchange *x, di_api_kind api) {
    di_error err = {0};
    di_shared_request *shared;
    if (!charge_values(x))
        return NULL;
    di_status st =
        di_engine_request_open(di_server_engine(x->server), api, di_strbuf_str(&x->body), x->body.len, &shared, &err);
    if (st)
        di_exchange_fail_status(x, st, shared ? di_shared_request_get(shared)->param : NULL, &err);
    if (!st && di_generate_check_model(x, di_shared_request_get(shared)))
        return shared;
    di_shared_request_release(shared);
    return NULL;
}

/* ---- render and count ---------------------------------------------------------------------------------------------
 */

static di_status write_prompt(di_exchange *x, di_shared_request *shared, size_t at, di_error *err) {
    const di_request *q = di_shared_request_get(shared);
    di_prompt prompt = {0};
    di_ids ids = {0};
    di_status st = di_engine_request_encode(di_server_engine(x->server), shared, at, &prompt, &ids, err);
    if (!st)
        st = di_engine_ids_check(di_server_engine(x->server), &ids, err);
    const di_tokenizer *tok = di_engine_tokenizer(di_server_engine(x->server));
    if (!st && tok && prompt.text.len == 0 && q->input != DI_INPUT_CHAT)
        st = di_tokenizer_decode(tok, ids.data, ids.len, false, &prompt.text, err);
    if (!st) {
        di_strbuf_puts(&x->reply, "{\"prompt\":");
        di_json_write_string(&x->reply, di_strbuf_str(&prompt.text), prompt.text.len);
        di_strbuf_puts(&x->reply, ",\"token_ids\":");
        write_ids(&x->reply, &ids);
        di_strbuf_putc(&x->reply, '}');
    }
    di_ids_deinit(&ids);
    di_prompt_deinit(&prompt);
    return st;
}

void di_run_render(di_exchange *x) {
    di_error err = {0};
    di_shared_request *shared = di_exchange_open_request(x, x->route->api);
    if (!shared)
        return;
    size_t n = di_shared_request_get(shared)->n_prompts;
    di_status st = DI_OK;
    if (n > 1)
        di_strbuf_putc(&x->reply, '[');
    for (size_t i = 0; !st && i < n; i++) {
        if (i > 0)
            di_strbuf_putc(&x->reply, ',');
        st = write_prompt(x, shared, i, &err);
    }
    if (n > 1)
        di_strbuf_putc(&x->reply, ']');
    di_shared_request_release(shared);
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
    } else {
        di_exchange_answer(x, 200);
    }
}

void di_run_count_tokens(di_exchange *x) {
    di_error err = {0};
    di_ids ids = {0};
    di_shared_request *shared = di_exchange_open_request(x, x->route->api);
    if (!shared)
        return;
    di_status st = di_engine_request_encode(di_server_engine(x->server), shared, 0, NULL, &ids, &err);
    di_shared_request_release(shared);
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
    } else {
        di_strbuf_printf(&x->reply, "{\"input_tokens\":%zu}", ids.len);
        di_exchange_answer(x, 200);
    }
    di_ids_deinit(&ids);
}

/* ---- tokenize -----------------------------------------------------------------------------------------------------
 */

static void write_token_strings(di_exchange *x, const di_ids *ids) {
    di_strbuf_putc(&x->reply, '[');
    for (size_t i = 0; i < ids->len; i++) {
        di_strbuf text = {0};
        size_t n;
        const char *bytes = di_tokenizer_bytes(di_engine_tokenizer(di_server_engine(x->server)), ids->data[i], &n);
        di_utf8_repair(&text, bytes, n);
        if (i > 0)
            di_strbuf_putc(&x->reply, ',');
        di_json_write_string(&x->reply, di_strbuf_str(&text), text.len);
        di_strbuf_deinit(&text);
    }
    di_strbuf_putc(&x->reply, ']');
}

static void answer_tokenize(di_exchange *x, const di_ids *ids, bool has_strings) {
    di_strbuf_printf(&x->reply, "{\"count\":%zu,\"max_model_len\":%lld,\"tokens\":", ids->len,
                     (long long)di_engine_context_max(di_server_engine(x->server)));
    write_ids(&x->reply, ids);
    di_strbuf_puts(&x->reply, ",\"token_strs\":");
    if (has_strings) {
        write_token_strings(x, ids);
    } else {
        di_strbuf_puts(&x->reply, "null");
    }
    di_strbuf_putc(&x->reply, '}');
    di_exchange_answer(x, 200);
}

di_json *di_exchange_parse(di_exchange *x) {
    di_json *body = NULL;
    di_error err = {0};
    if (!charge_values(x))
        return NULL;
    di_status st = di_json_parse(&body, di_strbuf_str(&x->body), x->body.len, &err);
    if (st == DI_ERR_MEMORY) {
        di_exchange_fail_status(x, st, NULL, &err);
    } else if (st) {
        di_exchange_fail(x, 400, NULL, "the request is not JSON: %s", err.message);
    } else if (!di_json_is(body, DI_JSON_OBJECT)) {
        di_exchange_fail(x, 400, NULL, "the request is JSON of type %s, expected an object", di_json_kind_name(body));
        di_json_free(body);
        body = NULL;
    }
    return body;
}

void di_run_tokenize(di_exchange *x) {
    di_json *body = di_exchange_parse(x);
    if (!body)
        return;
    bool is_chat = di_json_get(body, "messages") != NULL, has_strings = false;
    const di_json *strings = di_json_get(body, "return_token_strs"), *prompt = di_json_get(body, "prompt");
    has_strings = di_json_bool(strings);
    const char *problem = NULL;
    if (strings && !di_json_is(strings, DI_JSON_BOOL) && !di_json_is(strings, DI_JSON_NULL)) {
        problem = "return_token_strs: expected true or false";
    } else if (!is_chat && !di_json_is(prompt, DI_JSON_STRING)) {
        problem = prompt ? "prompt: expected a string" : "expected prompt or messages";
    }
    di_json_free(body);
    if (problem) {
        di_exchange_fail(x, 400, strings && strncmp(problem, "return", 6) == 0 ? "return_token_strs" : "prompt", "%s",
                         problem);
        return;
    }
    di_shared_request *shared = di_exchange_open_request(x, is_chat ? DI_API_CHAT : DI_API_COMPLETIONS);
    if (!shared)
        return;
    di_error err = {0};
    di_ids ids = {0};
    di_status st = di_engine_request_encode(di_server_engine(x->server), shared, 0, NULL, &ids, &err);
    di_shared_request_release(shared);
    if (st) {
        di_exchange_fail_status(x, st, NULL, &err);
    } else {
        answer_tokenize(x, &ids, has_strings);
    }
    di_ids_deinit(&ids);
}

/* ---- detokenize ---------------------------------------------------------------------------------------------------
 */

static di_status read_tokens(const di_json *list, int32_t n_vocab, di_ids *ids, di_error *err) {
    if (!di_json_is(list, DI_JSON_ARRAY))
        return di_fail(err, DI_ERR_REQUEST, "tokens: %s, expected a list of integers", di_json_kind_name(list));
    for (size_t i = 0; i < di_json_array_len(list); i++) {
        const di_json *v = di_json_at(list, i);
        int64_t id = di_json_int(v);
        if (!di_json_is(v, DI_JSON_INT))
            return di_fail(err, DI_ERR_REQUEST, "tokens[%zu]: %s, expected an integer", i, di_json_kind_name(v));
        if (id < 0 || id >= n_vocab)
            return di_fail(err, DI_ERR_REQUEST, "tokens[%zu]: %lld, the vocabulary has 0 to %d", i, (long long)id,
                           n_vocab - 1);
        int32_t value = (int32_t)id;
        di_status st = di_ids_append(ids, &value, 1, err);
        if (st)
            return st;
    }
    return DI_OK;
}

void di_run_detokenize(di_exchange *x) {
    const di_tokenizer *tok = di_engine_tokenizer(di_server_engine(x->server));
    di_error err = {0};
    di_ids ids = {0};
    di_strbuf text = {0};
    di_json *body = di_exchange_parse(x);
    if (!body)
        return;
    const di_json *model = di_json_get(body, "model");
    di_request named = {0};
    named.model.data = di_json_str(model, &named.model.len);
    if (model && !named.model.data && !di_json_is(model, DI_JSON_NULL)) {
        di_exchange_fail(x, 400, "model", "model: %s, expected a string", di_json_kind_name(model));
        di_json_free(body);
        return;
    }
    if (!di_generate_check_model(x, &named)) {
        di_json_free(body);
        return;
    }
    di_status st = tok ? DI_OK : di_fail(&err, DI_ERR_REQUEST, "the model has no tokenizer");
    if (!st)
        st = read_tokens(di_json_get(body, "tokens"), di_tokenizer_size(tok), &ids, &err);
    if (!st)
        st = di_tokenizer_decode(tok, ids.data, ids.len, false, &text, &err);
    if (st) {
        di_exchange_fail_status(x, st, "tokens", &err);
    } else {
        di_strbuf_puts(&x->reply, "{\"prompt\":");
        di_json_write_string(&x->reply, di_strbuf_str(&text), text.len);
        di_strbuf_putc(&x->reply, '}');
        di_exchange_answer(x, 200);
    }
    di_strbuf_deinit(&text);
    di_ids_deinit(&ids);
    di_json_free(body);
}
