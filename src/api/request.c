/* A request from its body: the way in, the completion of what was read, and the way on to a prompt.
 *
 * The readers of the APIs (request_chat.c, request_responses.c, request_messages.c) fill one di_request; here it gets
 * the clamps of the hosted service, the constraint and the parser's options, which are the same for all of them. */
#include "api.h"

#include "request_internal.h"

/* ------------------------------------------------------------------ names and options */

bool di_api_kind_parse(const char *name, di_api_kind *kind) {
    static const char *const names[] = {[DI_API_CHAT] = "chat",
                                        [DI_API_RESPONSES] = "responses",
                                        [DI_API_MESSAGES] = "messages",
                                        [DI_API_LINE] = "line",
                                        [DI_API_COMPLETIONS] = "completions"};
    for (size_t i = 0; i < DI_COUNT(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *kind = (di_api_kind)i;
            return true;
        }
    }
    return false;
}

void di_request_options_init(di_request_options *options, bool vendor_compat) {
    *options = (di_request_options){.vendor_compat = vendor_compat,
                                    .effort_default = vendor_compat ? DI_CHAT_EFFORT_HIGH : 0,
                                    .logprobs_max = DI_LOGPROBS_MAX};
    di_sampling_init(&options->sampling);
}

di_status di_effort_parse(const char *text, int *effort, di_error *err) {
    int64_t n;
    if (strcmp(text, "none") == 0) {
        *effort = 0;
    } else if (strcmp(text, "low") == 0) {
        *effort = DI_CHAT_EFFORT_LOW;
    } else if (strcmp(text, "high") == 0) {
        *effort = DI_CHAT_EFFORT_HIGH;
    } else if (strcmp(text, "max") == 0) {
        *effort = DI_CHAT_EFFORT_MAX;
    } else if (di_parse_i64(text, &n) && n >= 1 && n <= 100) {
        *effort = (int)n;
    } else {
        return di_fail(err, DI_ERR_ARG, "reasoning '%s', expected none, low, high, max or 1 to 100", text);
    }
    return DI_OK;
}

/* ------------------------------------------------------------------ completion */

static bool is_call_constraint(const di_request *q) {
    return q->constraint == DI_CONSTRAINT_TOOL_CALL || q->constraint == DI_CONSTRAINT_TOOL_CALL_REQUIRED;
}

/* The constraint of the response format, then what is handed to the sampler: a tool call's, where tools are offered. */
static di_status set_constraints(di_reader *r) {
    di_request *q = r->req;
    di_status st = DI_OK;
    if (q->chat.format == DI_CHAT_FORMAT_JSON_OBJECT) {
        q->format_constraint = DI_CONSTRAINT_JSON;
        q->format_text = (di_chat_text){.data = "", .len = 0};
    } else if (q->chat.format == DI_CHAT_FORMAT_JSON_SCHEMA) {
        di_strbuf text = {0};
        di_json_write(&text, q->chat.schema, DI_JSON_COMPACT);
        q->format_constraint = DI_CONSTRAINT_JSON;
        st = di_reader_keep(r, &text, &q->format_text);
    }
    q->constraint = q->format_constraint;
    q->constraint_text = q->format_text;
    if (st == DI_OK && di_chat_offers_tools(&q->chat)) {
        di_strbuf text = {0};
        di_chat_tools_json(&text, q->chat.tools, q->chat.n_tools);
        q->constraint =
            q->chat.tool_choice == DI_CHAT_CHOICE_REQUIRED ? DI_CONSTRAINT_TOOL_CALL_REQUIRED : DI_CONSTRAINT_TOOL_CALL;
        st = di_reader_keep(r, &text, &q->constraint_text);
    }
    return st;
}

/* The caller's format, where the request names none. */
static di_status apply_default_format(di_reader *r) {
    const di_request_options *o = r->options;
    di_request *q = r->req;
    if (o->format == DI_CONSTRAINT_NONE || q->names_format || q->format_constraint != DI_CONSTRAINT_NONE ||
        q->chat.format != DI_CHAT_FORMAT_TEXT)
        return DI_OK;
    if (o->format != DI_CONSTRAINT_JSON) {
        q->format_constraint = o->format;
        q->format_text = o->format_text;
        return DI_OK;
    }
    di_json *schema = NULL;
    di_status st = di_json_parse(&schema, o->format_text.data, o->format_text.len, r->err);
    if (st)
        return di_error_context(r->err, st, "the JSON schema");
    q->chat.format = DI_CHAT_FORMAT_JSON_SCHEMA;
    q->chat.schema = schema;
    return di_reader_own(r, schema);
}

/* A system message may load deferred tools; their calls are parsed like those of tools offered from the start. */
static bool loads_tools(const di_chat *chat) {
    for (size_t i = 0; i < chat->n_messages; i++) {
        if (chat->messages[i].n_tools > 0) {
            return chat->tool_choice != DI_CHAT_CHOICE_NONE;
        }
    }
    return false;
}

/* The hosted service samples as the model's makers advise, whatever the request says. */
static void clamp_sampling(di_request *q) {
    if (q->chat.thinking) {
        q->sampling.temperature = 1;
        q->sampling.top_p = DI_MAX(q->sampling.top_p, 0.95);
    } else {
        q->sampling.top_p = 1;
    }
    q->sampling.top_k = -1;
    q->sampling.min_p = 0;
    q->sampling.presence_penalty = 0;
    q->sampling.frequency_penalty = 0;
    q->sampling.repetition_penalty = 1;
}

di_status di_finish_request(di_reader *r) {
    di_request *q = r->req;
    q->chat.messages = r->messages.items;
    q->chat.n_messages = r->messages.n;
    q->images = r->images.items;
    q->n_images = r->images.n;
    q->namespace_tools = r->spaces.items;
    q->n_namespace_tools = r->spaces.n;
    if (q->vendor_compat && q->input == DI_INPUT_CHAT) {
        clamp_sampling(q);
    }
    di_status st = apply_default_format(r);
    if (!st)
        st = set_constraints(r);
    bool is_forced = is_call_constraint(q) && q->chat.tool_choice == DI_CHAT_CHOICE_REQUIRED;
    q->parse = (di_parser_options){
        .stage = di_chat_stage_of(&q->chat),
        .has_tools = is_call_constraint(q) || loads_tools(&q->chat),
        .starts_in_calls = is_forced && !q->chat.thinking,
        .is_json = q->chat.format == DI_CHAT_FORMAT_JSON_OBJECT,
        .n_stop = q->sampling.n_stop,
        .stop = q->sampling.stop,
        .stop_len = q->sampling.stop_len,
    };
    if (st == DI_OK && di_sampling_check(&q->sampling, r->err) != DI_OK) {
        /* Fields were checked as they were read; what is left are defaults of the caller. */
        q->refusal = DI_REFUSAL_CONVERSION;
        return DI_ERR_REQUEST;
    }
    return st;
}

/* ------------------------------------------------------------------ the way in */

di_status di_request_parse(di_request *request, di_api_kind api, const char *body, size_t len,
                           const di_request_options *options, di_error *err) {
    di_error local;
    *request = (di_request){
        .api = api, .vendor_compat = options->vendor_compat, .sampling = options->sampling, .n = 1, .n_prompts = 1};
    di_reader reader = {.req = request, .options = options, .err = err ? err : &local, .text = body, .len = len};
    di_status st = di_json_parse(&request->body, body, len, reader.err);
    if (st == DI_ERR_MEMORY) {
        return st;
    }
    if (st != DI_OK) {
        request->refusal = DI_REFUSAL_JSON;
        reader.err->code = DI_ERR_REQUEST;
        return di_error_context(err, DI_ERR_REQUEST, "the request is not JSON");
    }
    if (!di_json_is(request->body, DI_JSON_OBJECT)) {
        request->refusal = DI_REFUSAL_JSON;
        return di_fail(err, DI_ERR_REQUEST, "the request is JSON of type %s, expected an object",
                       di_json_kind_name(request->body));
    }
    switch (api) {
    case DI_API_CHAT:
        st = di_read_chat(&reader, request->body);
        break;
    case DI_API_RESPONSES:
        st = di_read_responses(&reader, request->body);
        break;
    case DI_API_MESSAGES:
        st = di_read_messages(&reader, request->body);
        break;
    case DI_API_LINE:
        st = di_read_line(&reader, request->body);
        break;
    case DI_API_COMPLETIONS:
        st = di_read_completions(&reader, request->body);
        break;
    }
    return st == DI_OK ? di_finish_request(&reader) : st;
}

void di_request_deinit(di_request *request) {
    for (size_t i = 0; i < request->n_schemas; i++) {
        di_json_free(request->schemas[i]);
    }
    di_json_free(request->body);
    di_arena_deinit(&request->arena);
    *request = (di_request){0};
}

/* ------------------------------------------------------------------ the way on */

/* A plain prompt: added tokens are recognised, and the text starts with the begin mark exactly once. */
static di_status encode_text(di_chat_text text, bool is_without_bos, const di_tokenizer *tok, di_ids *ids,
                             di_error *err) {
    int32_t bos = is_without_bos ? -1 : di_tokenizer_find(tok, di_chat_special_text(DI_CHAT_BOS));
    size_t at = ids->len;
    di_status st = di_tokenizer_encode(tok, text.len ? text.data : "", text.len, false, ids, err);
    if (st || bos < 0 || (ids->len > at && ids->data[at] == bos)) {
        return st;
    }
    if ((st = di_ids_append(ids, &bos, 1, err))) {
        return st;
    }
    memmove(ids->data + at + 1, ids->data + at, (ids->len - at - 1) * sizeof *ids->data);
    ids->data[at] = bos;
    return DI_OK;
}

static di_status encode_plain(const di_request_prompt *plain, bool is_without_bos, const di_tokenizer *tok,
                              di_prompt *prompt, di_ids *ids, di_error *err) {
    if (prompt) {
        di_prompt_reset(prompt);
        if (plain->text.len > 0) {
            di_strbuf_append(&prompt->text, plain->text.data, plain->text.len);
        }
        di_status st = di_strbuf_status(&prompt->text, err);
        if (st) {
            return st;
        }
    }
    if (!ids) {
        return DI_OK;
    }
    return plain->input == DI_INPUT_IDS ? di_ids_append(ids, plain->ids, plain->n_ids, err)
                                        : encode_text(plain->text, is_without_bos, tok, ids, err);
}

static di_status encode_chat(const di_chat *chat, const di_tokenizer *tok, const di_chat_vocab *vocab,
                             di_prompt *prompt, di_ids *ids, di_error *err) {
    di_prompt local = {0};
    di_prompt *target = prompt ? prompt : &local;
    di_status st = di_chat_render(chat, target, err);
    if (st == DI_OK && ids) {
        st = di_prompt_encode(target, tok, vocab, ids, err);
    }
    di_prompt_deinit(&local);
    return st;
}

di_status di_request_encode_prompt(const di_request *request, size_t prompt_idx, const di_tokenizer *tok,
                                   const di_chat_vocab *vocab, di_prompt *prompt, di_ids *ids, di_error *err) {
    if (request->input == DI_INPUT_CHAT) {
        return encode_chat(&request->chat, tok, vocab, prompt, ids, err);
    }
    const di_request_prompt only = {
        .input = request->input, .text = request->text, .ids = request->ids, .n_ids = request->n_ids};
    DI_ASSERT(prompt_idx == 0 || prompt_idx < request->n_prompts);
    return encode_plain(prompt_idx == 0 ? &only : &request->prompts[prompt_idx], request->is_without_bos, tok, prompt,
                        ids, err);
}

di_status di_request_encode(const di_request *request, const di_tokenizer *tok, const di_chat_vocab *vocab,
                            di_prompt *prompt, di_ids *ids, di_error *err) {
    return di_request_encode_prompt(request, 0, tok, vocab, prompt, ids, err);
}

int64_t di_request_max_tokens(const di_request *request, int64_t n_prompt, int64_t n_context) {
    int64_t limit = request->sampling.max_tokens;
    if (limit <= 0) {
        if (request->input != DI_INPUT_CHAT || !request->chat.thinking) {
            limit = 8192;
        } else {
            limit = request->chat.effort >= DI_CHAT_EFFORT_MAX ? 131072 : 65536;
        }
        limit = DI_MAX(limit, request->sampling.min_tokens);
    }
    int64_t left = n_context > n_prompt ? n_context - n_prompt : 1;
    return DI_MIN(limit, left);
}
