/* Bodies of /v1/chat/completions (chat.md 10).
 *
 * Roles, content parts, call histories and prefix completion are read here; what the format does with them is
 * text/chat.c's business, and fields that other APIs have too are request_common.c's. */
#include "request_internal.h"

/* ------------------------------------------------------------------ content */

static const char *role_noun(di_chat_role role) {
    return role == DI_CHAT_ASSISTANT ? "assistant" : "latest_reminder";
}

static di_status read_part(di_reader *r, const di_json *v, const char *at, const char *message_at, di_chat_role role,
                           di_chat_part *part) {
    di_chat_text type;
    di_status st = di_need_object(r, v, at);
    if (st || (st = di_need_string(r, v, at, "type", &type))) {
        return st;
    }
    if (di_text_is(type, "text")) {
        return di_need_string(r, v, at, "text", &part->text);
    }
    if (!di_text_is(type, "image_url")) {
        return di_refuse_body(r, di_place_of("%s.type", at).text,
                              "unknown variant `%.*s`, expected `text` or `image_url`", (int)DI_MIN(type.len, 40),
                              type.data);
    }
    const di_json *image;
    if ((st = di_read_object(r, v, at, "image_url", &image))) {
        return st;
    }
    di_place image_at = di_place_of("%s.image_url", at);
    if (!image) {
        return di_refuse_body(r, image_at.text, "missing field `image_url` in %s", at);
    }
    part->is_image = true;
    if ((st = di_need_string(r, image, image_at.text, "url", &part->text)) ||
        (st = di_read_detail(r, image, image_at.text, &part->detail))) {
        return st;
    }
    if (role == DI_CHAT_ASSISTANT || role == DI_CHAT_REMINDER) {
        return di_refuse(r, at, "Image in %s message is not supported", role_noun(role));
    }
    di_place path = di_place_of(".%s", message_at);
    const char *copy = di_arena_strndup(&r->req->arena, path.text, strlen(path.text));
    if (!copy) {
        return di_reader_no_memory(r);
    }
    part->path = (di_chat_text){.data = copy, .len = strlen(copy)};
    return di_add_image(r, part);
}

/* Reads `content` into m; *has tells whether it is there at all. */
static di_status read_content(di_reader *r, const di_json *v, const char *at, di_chat_message *m, bool *has) {
    const di_json *content = di_json_get(v, "content");
    di_place content_at = di_place_of("%s.content", at);
    *has = content && !di_json_is(content, DI_JSON_NULL);
    if (!*has) {
        return DI_OK;
    }
    bool is_one = di_json_is(content, DI_JSON_STRING);
    if (!is_one && !di_json_is(content, DI_JSON_ARRAY)) {
        return di_refuse_body(r, content_at.text, "'%s': content should be a string or a list", content_at.text);
    }
    size_t n = is_one ? 1 : di_json_array_len(content);
    di_chat_part *parts = di_arena_calloc(&r->req->arena, n, sizeof *parts);
    if (!parts) {
        return di_reader_no_memory(r);
    }
    m->parts = parts;
    m->n_parts = n;
    if (is_one) {
        parts[0].text = di_text_of(content);
        return DI_OK;
    }
    for (size_t i = 0; i < n; i++) {
        di_place part_at = di_place_of("%s[%zu]", content_at.text, i);
        di_status st = read_part(r, di_json_at(content, i), part_at.text, at, m->role, &parts[i]);
        if (st) {
            return st;
        }
    }
    return DI_OK;
}

static bool is_empty(const di_chat_message *m) {
    return m->n_parts == 0 || (m->n_parts == 1 && !m->parts[0].is_image && m->parts[0].text.len == 0);
}

/* ------------------------------------------------------------------ messages */

static di_status read_calls(di_reader *r, const di_json *v, const char *at, di_chat_message *m) {
    const di_json *list;
    di_status st = di_read_array(r, v, at, "tool_calls", &list);
    size_t n = di_json_array_len(list);
    if (st || n == 0) {
        return st;
    }
    di_chat_call *calls = di_arena_calloc(&r->req->arena, n, sizeof *calls);
    if (!calls) {
        return di_reader_no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        const di_json *call = di_json_at(list, i), *function;
        di_place call_at = di_place_of("%s.tool_calls[%zu]", at, i),
                 function_at = di_place_of("%s.function", call_at.text);
        di_chat_text type;
        bool has_type;
        if ((st = di_need_object(r, call, call_at.text)) ||
            (st = di_need_string(r, call, call_at.text, "id", &calls[i].id)) ||
            (st = di_read_string(r, call, call_at.text, "type", &type, &has_type)) ||
            (st = di_read_object(r, call, call_at.text, "function", &function))) {
            return st;
        }
        if (has_type && !di_text_is(type, "function")) {
            return di_refuse_body(r, di_place_of("%s.type", call_at.text).text,
                                  "unknown variant `%.*s`, expected `function`", (int)DI_MIN(type.len, 40), type.data);
        }
        if (!function) {
            return di_refuse_body(r, function_at.text, "missing field `function` in %s", call_at.text);
        }
        if ((st = di_need_string(r, function, function_at.text, "name", &calls[i].name)) ||
            (st = di_need_string(r, function, function_at.text, "arguments", &calls[i].arguments))) {
            return st;
        }
    }
    m->calls = calls;
    m->n_calls = n;
    return DI_OK;
}

static di_status read_role(di_reader *r, const di_json *v, const char *at, di_chat_role *role) {
    static const struct {
        const char *name;
        di_chat_role role;
    } roles[] = {
        {"system", DI_CHAT_SYSTEM},
        {"user", DI_CHAT_USER},
        {"assistant", DI_CHAT_ASSISTANT},
        {"tool", DI_CHAT_TOOL},
        {"latest_reminder", DI_CHAT_REMINDER},
        {"developer", DI_CHAT_SYSTEM}, /* the newer name of the same thing; the hosted service doesn't know it */
    };
    di_chat_text name;
    di_status st = di_need_string(r, v, at, "role", &name);
    if (st) {
        return st;
    }
    size_t n = DI_COUNT(roles) - (r->req->vendor_compat ? 1 : 0);
    for (size_t i = 0; i < n; i++) {
        if (di_text_is(name, roles[i].name)) {
            *role = roles[i].role;
            return DI_OK;
        }
    }
    return di_refuse_body(
        r, di_place_of("%s.role", at).text,
        "unknown variant `%.*s`, expected one of `system`, `user`, `assistant`, `tool`, `latest_reminder`",
        (int)DI_MIN(name.len, 40), name.data);
}

/* Reads message i of the body into m. */
static di_status read_message(di_reader *r, const di_json *v, size_t i, di_chat_message *m) {
    di_place at = di_place_of("messages[%zu]", i);
    bool has_content, is_prefix = false;
    di_status st = di_need_object(r, v, at.text);
    if (st || (st = read_role(r, v, at.text, &m->role)) || (st = read_content(r, v, at.text, m, &has_content)) ||
        (st = di_read_bool(r, v, at.text, "prefix", &is_prefix, NULL))) {
        return st;
    }
    m->is_prefix = is_prefix;
    if (m->role == DI_CHAT_ASSISTANT) {
        if ((st = read_calls(r, v, at.text, m)) ||
            (st = di_read_string(r, v, at.text, "reasoning_content", &m->reasoning, &m->has_reasoning)) ||
            (!m->has_reasoning && !r->req->vendor_compat &&
             (st = di_read_string(r, v, at.text, "reasoning", &m->reasoning, &m->has_reasoning)))) {
            return st; /* `reasoning` is other servers' name of it */
        }
        if (!has_content && m->n_calls == 0) {
            return di_refuse(r, di_place_of("%s.content", at.text).text,
                             "Invalid assistant message: content or tool_calls must be set");
        }
        return DI_OK;
    }
    if (!has_content) {
        di_place content_at = di_place_of("%s.content", at.text);
        return di_json_get(v, "content")
                   ? di_refuse_body(r, content_at.text, "'%s': content should be a string or a list", content_at.text)
                   : di_refuse_body(r, content_at.text, "missing field `content` in %s", at.text);
    }
    return m->role == DI_CHAT_TOOL ? di_need_string(r, v, at.text, "tool_call_id", &m->call_id) : DI_OK;
}

/* Whether the last message stays open, in the words of vLLM's clients: the other way to say `prefix`. */
static di_status read_continuation(di_reader *r, const di_json *body, bool *is_continued) {
    bool has_prompt, adds_prompt = true;
    *is_continued = false;
    if (r->req->vendor_compat) {
        return DI_OK;
    }
    di_status st = di_read_bool(r, body, "", "continue_final_message", is_continued, NULL);
    if (st || (st = di_read_bool(r, body, "", "add_generation_prompt", &adds_prompt, &has_prompt))) {
        return st;
    }
    if (*is_continued && has_prompt && adds_prompt) {
        return di_refuse(r, "add_generation_prompt",
                         "add_generation_prompt and continue_final_message can't both be true");
    }
    if (!*is_continued && !adds_prompt) {
        return di_refuse(r, "add_generation_prompt",
                         "add_generation_prompt: false, expected true where continue_final_message is not");
    }
    return DI_OK;
}

/* Decides whether message i of n, the last one read, is a prefix that the model goes on with. */
static di_status read_prefix(di_reader *r, size_t i, size_t n, bool is_continued, di_chat_message *m) {
    bool is_last = i + 1 == n, is_assistant = m->role == DI_CHAT_ASSISTANT;
    if (m->is_prefix && !(is_last && is_assistant)) {
        return di_refuse(r, di_place_of("messages[%zu].prefix", i).text,
                         "Invalid completion message: prefix set true with message which is not final message or "
                         "message role is not assistant");
    }
    if (is_last && is_continued && !is_assistant) {
        return di_refuse(r, "continue_final_message",
                         "continue_final_message: the last message is not the assistant's, so there is none to go on");
    }
    m->is_prefix = m->is_prefix || (is_last && is_continued);
    return DI_OK;
}

static di_status read_message_list(di_reader *r, const di_json *body) {
    const di_json *list;
    bool is_continued;
    di_status st = di_read_array(r, body, "", "messages", &list);
    if (st || (st = read_continuation(r, body, &is_continued))) {
        return st;
    }
    if (!list) {
        return di_refuse_body(r, "messages", "missing field `messages`");
    }
    size_t n = di_json_array_len(list);
    if (n == 0) {
        return di_refuse(r, "messages", "Empty input messages");
    }
    for (size_t i = 0; i < n; i++) {
        di_chat_message m = {0};
        if ((st = read_message(r, di_json_at(list, i), i, &m)) || (st = read_prefix(r, i, n, is_continued, &m))) {
            return st;
        }
        if (m.role == DI_CHAT_SYSTEM && is_empty(&m)) {
            continue; /* wherever it stands, so that its neighbours become adjacent */
        }
        di_chat_message *slot = di_list_add(r, &r->messages, sizeof *slot);
        if (!slot) {
            return DI_ERR_MEMORY;
        }
        *slot = m;
    }
    return DI_OK;
}

/* ------------------------------------------------------------------ tools */

static di_status read_tools(di_reader *r, const di_json *body) {
    const di_json *list;
    di_status st = di_read_array(r, body, "", "tools", &list);
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(list); i++) {
        const di_json *v = di_json_at(list, i), *function;
        di_place at = di_place_of("tools[%zu]", i), function_at = di_place_of("%s.function", at.text);
        di_chat_text type;
        if ((st = di_need_object(r, v, at.text)) || (st = di_need_string(r, v, at.text, "type", &type))) {
            return st;
        }
        if (!di_text_is(type, "function")) {
            return di_refuse_body(r, di_place_of("%s.type", at.text).text,
                                  "unknown variant `%.*s`, expected `function`", (int)DI_MIN(type.len, 40), type.data);
        }
        if ((st = di_read_object(r, v, at.text, "function", &function))) {
            return st;
        }
        if (!function) {
            return di_refuse_body(r, function_at.text, "missing field `function` in %s", at.text);
        }
        di_chat_tool tool;
        bool is_deferred = false;
        if ((st = di_read_function(r, function, function_at.text, "parameters", &tool)) ||
            (st = di_read_bool(r, v, at.text, "defer_loading", &is_deferred, NULL))) {
            return st;
        }
        tool.is_deferred = tool.is_deferred || is_deferred;
        st = di_add_tool(r, &tool);
    }
    return st;
}

static di_status read_tool_choice(di_reader *r, const di_json *body) {
    const di_json *v = di_json_get(body, "tool_choice");
    di_chat_text text = di_text_of(v), name;
    if (!v || di_json_is(v, DI_JSON_NULL) || di_text_is(text, "auto")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_AUTO, NULL);
    }
    if (di_text_is(text, "none")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_NONE, NULL);
    }
    if (di_text_is(text, "required")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_REQUIRED, NULL);
    }
    const di_json *function = di_json_get(v, "function");
    if (!di_text_is(di_text_of(di_json_get(v, "type")), "function") || !di_json_is(function, DI_JSON_OBJECT)) {
        return di_refuse_body(r, "tool_choice", "expected one of `none`, `auto`, `required` or a tool");
    }
    di_status st = di_need_string(r, function, "tool_choice.function", "name", &name);
    return st ? st : di_apply_tool_choice(r, DI_CHAT_CHOICE_REQUIRED, &name);
}

/* ------------------------------------------------------------------ rules over the whole body */

static di_status check_prefix(di_reader *r) {
    const di_chat_message *messages = r->messages.items;
    size_t n = r->messages.n;
    if (n == 0 || !messages[n - 1].is_prefix) {
        return DI_OK;
    }
    bool has_tools = r->tools.n > 0 || messages[n - 1].n_calls > 0;
    for (size_t i = 0; i < n && !has_tools; i++) {
        has_tools = messages[i].role == DI_CHAT_TOOL;
    }
    return has_tools ? di_refuse(r, "messages", "Function call should not be used with prefix") : DI_OK;
}

static bool has_word_json(di_chat_text text) {
    for (size_t i = 0; i + 4 <= text.len; i++) {
        const char *p = text.data + i;
        if ((p[0] | 0x20) == 'j' && (p[1] | 0x20) == 's' && (p[2] | 0x20) == 'o' && (p[3] | 0x20) == 'n') {
            return true;
        }
    }
    return false;
}

di_status di_check_json_word(di_reader *r, const char *at) {
    if (!r->req->vendor_compat || r->req->chat.format != DI_CHAT_FORMAT_JSON_OBJECT) {
        return DI_OK;
    }
    const di_chat_message *messages = r->messages.items;
    for (size_t i = 0; i < r->messages.n; i++) {
        for (size_t j = 0; j < messages[i].n_parts; j++) {
            const di_chat_part *part = &messages[i].parts[j];
            if (!part->is_image && has_word_json(part->text)) {
                return DI_OK;
            }
        }
    }
    return di_refuse(
        r, at, "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'.");
}

di_status di_check_reasoning(di_reader *r) {
    if (!r->options->require_reasoning || !r->req->chat.thinking || !di_chat_offers_tools(&r->req->chat)) {
        return DI_OK;
    }
    const di_chat_message *messages = r->messages.items;
    for (size_t i = 0; i < r->messages.n; i++) {
        if (messages[i].role == DI_CHAT_ASSISTANT && !messages[i].has_reasoning) {
            return di_refuse(r, "messages",
                             "The `reasoning_content` in the thinking mode must be passed back to the API.");
        }
    }
    return DI_OK;
}

const di_field_names di_chat_field_names = {
    .max_tokens = "max_tokens", .max_tokens_alias = "max_completion_tokens", .stop = "stop"};

di_status di_read_response_format(di_reader *r, const di_json *body) {
    const di_json *format;
    di_status st = di_read_object(r, body, "", "response_format", &format);
    if (st || (st = di_read_format(r, format, "response_format", true))) {
        return st;
    }
    return di_read_own_constraints(r, body);
}

/* What clients of other servers send, who switch thinking by a variable of a chat template: *flag becomes 1 for on, 0
 * for off and stays where nothing is said. */
static di_status read_template_fields(di_reader *r, const di_json *body, const di_json *kwargs, int *flag) {
    static const char kwargs_at[] = "chat_template_kwargs";
    bool is_on = false, has;
    di_status st;
    if ((st = di_read_bool(r, kwargs, kwargs_at, "thinking", &is_on, &has)) ||
        (!has && (st = di_read_bool(r, kwargs, kwargs_at, "enable_thinking", &is_on, &has))) ||
        (!has && (st = di_read_bool(r, body, "", "enable_thinking", &is_on, &has)))) {
        return st;
    }
    if (has) {
        *flag = is_on;
    }
    return DI_OK;
}

static bool is_named(const di_json *v) {
    return v && !di_json_is(v, DI_JSON_NULL);
}

/* Thinking by whichever field names it: the `thinking` object, then an effort, then what other servers take. */
static di_status read_thinking(di_reader *r, const di_json *body) {
    const di_json *thinking, *reasoning, *kwargs, *effort = di_json_get(body, "reasoning_effort");
    const char *effort_at = "reasoning_effort";
    int flag = -1;
    di_status st = di_read_object(r, body, "", "thinking", &thinking);
    if (st || r->req->vendor_compat) {
        return st ? st : di_read_thinking(r, thinking, effort, effort_at, flag);
    }
    if ((st = di_read_object(r, body, "", "reasoning", &reasoning)) ||
        (st = di_read_object(r, body, "", "chat_template_kwargs", &kwargs))) {
        return st;
    }
    if (!is_named(effort)) {
        effort = di_json_get(reasoning, "effort");
        effort_at = "reasoning.effort";
    }
    if (!is_named(effort)) {
        effort = di_json_get(kwargs, "reasoning_effort");
        effort_at = "chat_template_kwargs.reasoning_effort";
        if ((st = read_template_fields(r, body, kwargs, &flag))) {
            return st;
        }
    }
    return di_read_thinking(r, thinking, effort, effort_at, flag);
}

di_status di_read_chat(di_reader *r, const di_json *body) {
    di_status st;
    if ((st = di_read_model(r, body)) || (st = read_thinking(r, body)) || (st = read_message_list(r, body)) ||
        (st = di_read_sampling(r, body, &di_chat_field_names)) || (st = di_read_response_format(r, body)) ||
        (st = read_tools(r, body)) || (st = read_tool_choice(r, body)) || (st = check_prefix(r)) ||
        (st = di_check_results(r)) || (st = di_check_json_word(r, "response_format"))) {
        return st;
    }
    return di_check_reasoning(r);
}
