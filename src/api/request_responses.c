/* Bodies of /v1/responses (chat.md 11): a list of items instead of messages.
 *
 * Reasoning, message and calls in a row form one assistant message; `instructions` is the first system message. Tools
 * of a namespace are shown as `namespace::tool` and split back in replies. */
#include "reply_internal.h"
#include "request_internal.h"

/* What is put together across items: reasoning that waits for its assistant message, and that message's growing lists.
 */
typedef struct assembly {
    bool has_reasoning;
    di_strbuf reasoning;
    di_list calls;     /* of di_chat_call: the current assistant message's */
    bool is_assistant; /* the last message is an assistant's, which may take more calls */
} assembly;

/* ------------------------------------------------------------------ content */

static di_status copy_text(di_reader *r, const char *s, size_t n, di_chat_text *out) {
    const char *copy = di_arena_strndup(&r->req->arena, s, n);
    if (!copy) {
        return di_reader_no_memory(r);
    }
    *out = (di_chat_text){.data = copy, .len = n};
    return DI_OK;
}

static di_status read_image(di_reader *r, const di_json *v, const char *at, const char *item_at, di_chat_part *part) {
    const di_json *url = di_json_get(v, "image_url");
    part->is_image = true;
    di_status st;
    if (di_json_is(url, DI_JSON_OBJECT)) {
        /* Chat's spelling, which clients send here too. */
        st = di_need_string(r, url, di_place_of("%s.image_url", at).text, "url", &part->text);
    } else {
        st = di_need_string(r, v, at, "image_url", &part->text);
    }
    if (st || (st = di_read_detail(r, v, at, &part->detail)) ||
        (st = copy_text(r, item_at, strlen(item_at), &part->path))) {
        return st;
    }
    return di_add_image(r, part);
}

/* Reads a string or a list of parts; texts may be called by any of the names that requests and replies use. */
static di_status read_content(di_reader *r, const di_json *content, const char *at, const char *item_at,
                              di_chat_message *m) {
    bool is_one = di_json_is(content, DI_JSON_STRING);
    if (!is_one && !di_json_is(content, DI_JSON_ARRAY)) {
        return content ? di_refuse_body(r, at, "'%s': expected a string or an array, found %s", at,
                                        di_json_kind_name(content))
                       : di_refuse_body(r, at, "missing field `%s`", at);
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
        const di_json *v = di_json_at(content, i);
        di_place part_at = di_place_of("%s[%zu]", at, i);
        di_chat_text type;
        di_status st = di_need_object(r, v, part_at.text);
        if (st || (st = di_need_string(r, v, part_at.text, "type", &type))) {
            return st;
        }
        if (di_text_is(type, "input_text") || di_text_is(type, "output_text") || di_text_is(type, "text")) {
            st = di_need_string(r, v, part_at.text, "text", &parts[i].text);
        } else if (di_text_is(type, "refusal")) {
            st = di_need_string(r, v, part_at.text, "refusal", &parts[i].text);
        } else if (!di_text_is(type, "input_image")) {
            st = di_refuse_body(r, di_place_of("%s.type", part_at.text).text,
                                "unknown variant `%.*s`, expected `input_text`, `output_text` or `input_image`",
                                (int)DI_MIN(type.len, 40), type.data);
        } else if (m->role == DI_CHAT_ASSISTANT) {
            st = di_refuse(r, part_at.text, "Image in assistant message is not supported");
        } else {
            st = read_image(r, v, part_at.text, item_at, &parts[i]);
        }
        if (st) {
            return st;
        }
    }
    return DI_OK;
}

/* ------------------------------------------------------------------ items */

static di_chat_message *add_message(di_reader *r, di_chat_role role) {
    di_chat_message *m = di_list_add(r, &r->messages, sizeof *m);
    if (m) {
        m->role = role;
    }
    return m;
}

/* Hands waiting reasoning to an assistant message, behind what it already has. */
static di_status take_reasoning(di_reader *r, assembly *a, di_chat_message *m) {
    if (!a->has_reasoning) {
        return DI_OK;
    }
    di_strbuf joined = {0};
    di_strbuf_append(&joined, m->reasoning.len ? m->reasoning.data : "", m->reasoning.len);
    di_strbuf_append(&joined, di_strbuf_str(&a->reasoning), a->reasoning.len);
    joined.failed = joined.failed || a->reasoning.failed;
    di_strbuf_reset(&a->reasoning);
    a->has_reasoning = false;
    m->has_reasoning = true;
    return di_reader_keep(r, &joined, &m->reasoning);
}

static di_status read_message_item(di_reader *r, const di_json *v, const char *at, assembly *a) {
    di_chat_text role;
    di_status st = di_need_string(r, v, at, "role", &role);
    if (st) {
        return st;
    }
    di_chat_message m = {0};
    if (di_text_is(role, "user")) {
        m.role = DI_CHAT_USER;
    } else if (di_text_is(role, "assistant")) {
        m.role = DI_CHAT_ASSISTANT;
    } else if (di_text_is(role, "system") || di_text_is(role, "developer")) {
        m.role = DI_CHAT_SYSTEM;
    } else {
        return di_refuse_body(r, di_place_of("%s.role", at).text,
                              "unknown variant `%.*s`, expected one of `user`, `assistant`, `system`, `developer`",
                              (int)DI_MIN(role.len, 40), role.data);
    }
    if ((st = read_content(r, di_json_get(v, "content"), di_place_of("%s.content", at).text, at, &m))) {
        return st;
    }
    if (m.role == DI_CHAT_ASSISTANT && (st = take_reasoning(r, a, &m))) {
        return st;
    }
    di_chat_message *slot = add_message(r, m.role);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = m;
    a->is_assistant = m.role == DI_CHAT_ASSISTANT;
    a->calls = (di_list){0};
    return DI_OK;
}

static di_status read_reasoning_item(di_reader *r, const di_json *v, const char *at, assembly *a) {
    const di_json *content;
    di_status st = di_read_array(r, v, at, "content", &content);
    a->has_reasoning = true;
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(content); i++) {
        di_place part_at = di_place_of("%s.content[%zu]", at, i);
        di_chat_text text;
        if ((st = di_need_object(r, di_json_at(content, i), part_at.text)) ||
            (st = di_need_string(r, di_json_at(content, i), part_at.text, "text", &text))) {
            return st;
        }
        di_strbuf_append(&a->reasoning, text.data, text.len);
    }
    return st;
}

/* The full name of a tool: its own, or behind the namespace that the item names. */
static di_status full_name(di_reader *r, const di_json *v, const char *at, di_chat_text *name) {
    di_chat_text space;
    bool has_space;
    di_status st = di_need_string(r, v, at, "name", name);
    if (st || (st = di_read_string(r, v, at, "namespace", &space, &has_space)) || !has_space) {
        return st;
    }
    di_strbuf full = {0};
    di_strbuf_append(&full, space.data, space.len);
    di_strbuf_puts(&full, "::");
    di_strbuf_append(&full, name->data, name->len);
    return di_reader_keep(r, &full, name);
}

/* A call joins the assistant message that it follows, or begins one. */
static di_status read_call_item(di_reader *r, const di_json *v, const char *at, bool is_custom, assembly *a) {
    di_chat_call call = {0};
    di_status st = di_need_string(r, v, at, "call_id", &call.id);
    if (st || (st = full_name(r, v, at, &call.name))) {
        return st;
    }
    if (is_custom) {
        di_chat_text input;
        di_strbuf arguments = {0};
        if ((st = di_need_string(r, v, at, "input", &input))) {
            return st;
        }
        di_strbuf_puts(&arguments, "{\"input\":");
        di_json_write_string(&arguments, input.data, input.len);
        di_strbuf_puts(&arguments, "}");
        st = di_reader_keep(r, &arguments, &call.arguments);
    } else {
        st = di_need_string(r, v, at, "arguments", &call.arguments);
    }
    if (st) {
        return st;
    }
    if (!a->is_assistant) {
        if (!add_message(r, DI_CHAT_ASSISTANT)) {
            return DI_ERR_MEMORY;
        }
        a->is_assistant = true;
        a->calls = (di_list){0};
    }
    di_chat_message *m = (di_chat_message *)r->messages.items + (r->messages.n - 1);
    di_chat_call *slot = di_list_add(r, &a->calls, sizeof *slot);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = call;
    m->calls = a->calls.items;
    m->n_calls = a->calls.n;
    return take_reasoning(r, a, m);
}

static di_status read_output_item(di_reader *r, const di_json *v, const char *at, assembly *a) {
    di_chat_message m = {.role = DI_CHAT_TOOL};
    di_status st = di_need_string(r, v, at, "call_id", &m.call_id);
    if (st || (st = read_content(r, di_json_get(v, "output"), di_place_of("%s.output", at).text, at, &m))) {
        return st;
    }
    di_chat_message *slot = add_message(r, m.role);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = m;
    a->is_assistant = false;
    return DI_OK;
}

static di_status read_item(di_reader *r, const di_json *v, size_t i, assembly *a) {
    di_place at = di_place_of("input[%zu]", i);
    di_chat_text type;
    bool has_type;
    di_status st = di_need_object(r, v, at.text);
    if (st || (st = di_read_string(r, v, at.text, "type", &type, &has_type))) {
        return st;
    }
    if (!has_type || di_text_is(type, "message")) {
        return read_message_item(r, v, at.text, a);
    }
    if (di_text_is(type, "reasoning")) {
        return read_reasoning_item(r, v, at.text, a);
    }
    if (di_text_is(type, "function_call") || di_text_is(type, "custom_tool_call")) {
        return read_call_item(r, v, at.text, di_text_is(type, "custom_tool_call"), a);
    }
    if (di_text_is(type, "function_call_output") || di_text_is(type, "custom_tool_call_output")) {
        return read_output_item(r, v, at.text, a);
    }
    return di_refuse_body(r, di_place_of("%s.type", at.text).text,
                          "unknown variant `%.*s`, expected one of `message`, `reasoning`, `function_call`, "
                          "`function_call_output`, `custom_tool_call`, `custom_tool_call_output`",
                          (int)DI_MIN(type.len, 40), type.data);
}

static di_status add_text_message(di_reader *r, di_chat_role role, di_chat_text text) {
    di_chat_message *m = add_message(r, role);
    di_chat_part *part = m ? di_arena_calloc(&r->req->arena, 1, sizeof *part) : NULL;
    if (!part) {
        return di_reader_no_memory(r);
    }
    part->text = text;
    m->parts = part;
    m->n_parts = 1;
    return DI_OK;
}

static di_status read_input(di_reader *r, const di_json *body) {
    di_chat_text instructions;
    bool has;
    di_status st = di_read_string(r, body, "", "instructions", &instructions, &has);
    if (st || (has && instructions.len > 0 && (st = add_text_message(r, DI_CHAT_SYSTEM, instructions)))) {
        return st;
    }
    const di_json *input = di_json_get(body, "input");
    if (di_json_is(input, DI_JSON_STRING)) {
        return add_text_message(r, DI_CHAT_USER, di_text_of(input));
    }
    if (!di_json_is(input, DI_JSON_ARRAY)) {
        return input && !di_json_is(input, DI_JSON_NULL)
                   ? di_refuse_body(r, "input", "'input': expected a string or an array, found %s",
                                    di_json_kind_name(input))
                   : di_refuse_body(r, "input", "missing field `input`");
    }
    if (di_json_array_len(input) == 0) {
        return di_refuse(r, "input", "Input items array must not be empty");
    }
    assembly a = {0};
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(input); i++) {
        st = read_item(r, di_json_at(input, i), i, &a);
    }
    di_strbuf_deinit(&a.reasoning);
    return st;
}

/* ------------------------------------------------------------------ tools */

/* A namespace's tool: `space::tool`, with the namespace's description before its own. */
static di_status qualify(di_reader *r, const di_json *space, const char *at, di_chat_tool *tool) {
    di_chat_text name, description;
    bool has_description;
    di_status st = di_need_string(r, space, at, "name", &name);
    if (st || (st = di_read_string(r, space, at, "description", &description, &has_description))) {
        return st;
    }
    di_namespace_tool *slot = di_list_add(r, &r->spaces, sizeof *slot);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    slot->space = name;
    slot->tool = tool->name;
    di_strbuf text = {0};
    di_strbuf_append(&text, name.data, name.len);
    di_strbuf_puts(&text, "::");
    di_strbuf_append(&text, tool->name.data, tool->name.len);
    if ((st = di_reader_keep(r, &text, &tool->name))) {
        return st;
    }
    slot->full = tool->name;
    if (!has_description) {
        return DI_OK;
    }
    di_strbuf_append(&text, description.data, description.len);
    di_strbuf_puts(&text, "\n");
    di_strbuf_append(&text, tool->description.len ? tool->description.data : "", tool->description.len);
    tool->has_description = true;
    return di_reader_keep(r, &text, &tool->description);
}

static di_status read_namespace(di_reader *r, const di_json *space, const char *at) {
    const di_json *list;
    di_status st = di_read_array(r, space, at, "tools", &list);
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(list); i++) {
        const di_json *v = di_json_at(list, i);
        di_place tool_at = di_place_of("%s.tools[%zu]", at, i);
        di_chat_text type;
        bool has_type;
        di_chat_tool tool;
        if ((st = di_need_object(r, v, tool_at.text)) ||
            (st = di_read_string(r, v, tool_at.text, "type", &type, &has_type))) {
            return st;
        }
        if (has_type && !di_text_is(type, "function")) {
            return di_refuse_body(r, di_place_of("%s.type", tool_at.text).text,
                                  "unknown variant `%.*s`, expected `function`", (int)DI_MIN(type.len, 40), type.data);
        }
        if ((st = di_read_function(r, v, tool_at.text, "parameters", &tool)) || (st = qualify(r, space, at, &tool))) {
            return st;
        }
        st = di_add_tool(r, &tool);
    }
    return st;
}

/* The one custom tool there is: a function with one string. */
static di_status read_custom(di_reader *r, const di_json *v, const char *at) {
    static const char schema_text[] =
        "{\"type\":\"object\",\"properties\":{\"input\":{\"type\":\"string\"}},\"required\":[\"input\"]}";
    di_chat_tool tool = {0};
    di_status st = di_need_string(r, v, at, "name", &tool.name);
    if (st) {
        return st;
    }
    if (!di_text_is(tool.name, "apply_patch")) {
        return di_refuse(r, di_place_of("%s.name", at).text,
                         "Unsupported custom tool: '%.*s'. Only 'apply_patch' is supported.",
                         (int)DI_MIN(tool.name.len, 200), tool.name.data);
    }
    if ((st = di_read_string(r, v, at, "description", &tool.description, &tool.has_description))) {
        return st;
    }
    di_json *schema = NULL;
    if ((st = di_json_parse(&schema, schema_text, sizeof schema_text - 1, r->err)) || (st = di_reader_own(r, schema))) {
        return st;
    }
    tool.parameters = schema;
    return di_add_tool(r, &tool);
}

static di_status read_tools(di_reader *r, const di_json *body) {
    const di_json *list;
    di_status st = di_read_array(r, body, "", "tools", &list);
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(list); i++) {
        const di_json *v = di_json_at(list, i);
        di_place at = di_place_of("tools[%zu]", i);
        di_chat_text type;
        if ((st = di_need_object(r, v, at.text)) || (st = di_need_string(r, v, at.text, "type", &type))) {
            return st;
        }
        if (di_text_is(type, "function")) {
            di_chat_tool tool;
            st = di_read_function(r, v, at.text, "parameters", &tool);
            st = st ? st : di_add_tool(r, &tool);
        } else if (di_text_is(type, "namespace")) {
            st = read_namespace(r, v, at.text);
        } else if (di_text_is(type, "custom")) {
            st = read_custom(r, v, at.text);
        } else if (type.len >= 10 && memcmp(type.data, "web_search", 10) == 0) {
            /* The client's own default list has it: dropped, so that the rest of the request can run. */
            st = r->options->refuse_web_search ? di_refuse(r, at.text, "Server tools are not supported") : DI_OK;
        } else {
            st = di_refuse_body(
                r, di_place_of("%s.type", at.text).text,
                "unknown variant `%.*s`, expected one of `function`, `custom`, `namespace`, `web_search`",
                (int)DI_MIN(type.len, 40), type.data);
        }
    }
    return st;
}

static di_status read_tool_choice(di_reader *r, const di_json *body) {
    const di_json *v = di_json_get(body, "tool_choice");
    di_chat_text text = di_text_of(v), type, name;
    if (!v || di_json_is(v, DI_JSON_NULL) || di_text_is(text, "auto")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_AUTO, NULL);
    }
    if (di_text_is(text, "none")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_NONE, NULL);
    }
    if (di_text_is(text, "required")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_REQUIRED, NULL);
    }
    type = di_text_of(di_json_get(v, "type"));
    if (!di_text_is(type, "function") && !di_text_is(type, "custom")) {
        return di_refuse_body(r, "tool_choice", "expected one of `none`, `auto`, `required` or a tool");
    }
    di_status st = full_name(r, v, "tool_choice", &name);
    return st ? st : di_apply_tool_choice(r, DI_CHAT_CHOICE_REQUIRED, &name);
}

/* `include` asks for log-probabilities of the text; what else it can name is in every reply or of other services. */
static di_status read_include(di_reader *r, const di_json *body) {
    const di_json *list;
    di_status st = di_read_array(r, body, "", "include", &list);
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(list); i++) {
        if (di_text_is(di_text_of(di_json_at(list, i)), DI_INCLUDE_LOGPROBS)) {
            r->req->sampling.n_logprobs = DI_MAX(r->req->sampling.n_logprobs, 0);
        }
    }
    return st;
}

di_status di_read_responses(di_reader *r, const di_json *body) {
    static const di_field_names names = {.max_tokens = "max_output_tokens", .max_tokens_alias = NULL, .stop = NULL};
    const di_json *reasoning, *text, *format;
    di_status st;
    if ((st = di_read_model(r, body)) || (st = di_read_object(r, body, "", "reasoning", &reasoning)) ||
        (st = di_read_thinking(r, NULL, di_json_get(reasoning, "effort"), "reasoning.effort", -1)) ||
        (st = read_input(r, body)) || (st = di_read_sampling(r, body, &names)) || (st = read_include(r, body)) ||
        (st = di_read_object(r, body, "", "text", &text)) ||
        (st = di_read_object(r, text, "text", "format", &format)) ||
        (st = di_read_format(r, format, "text.format", false)) || (st = di_read_own_constraints(r, body)) ||
        (st = read_tools(r, body)) || (st = read_tool_choice(r, body)) || (st = di_check_results(r)) ||
        (st = di_check_json_word(r, "text.format"))) {
        return st;
    }
    return di_check_reasoning(r);
}
