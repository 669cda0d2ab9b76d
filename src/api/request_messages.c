/* Bodies of /v1/messages (chat.md 12): content blocks, with calls and results among them.
 *
 * A user message that opens with results becomes one tool message per result, and a user message with what follows.
 * System messages may stand anywhere and may load tools that were deferred. A trailing assistant message is not a
 * prefix. */
#include "request_internal.h"

/* What the messages so far leave to be answered. */
typedef struct turn {
    size_t caller;   /* index in r->messages of the assistant message that was read last */
    bool has_caller; /* it has calls, and the next message must open with their results */
} turn;

/* ------------------------------------------------------------------ blocks */

static di_status refuse_block(di_reader *r, const char *at, di_chat_text type) {
    return di_refuse_body(
        r, di_place_of("%s.type", at).text,
        "unknown variant `%.*s`, expected one of `text`, `image`, `thinking`, `tool_use`, `tool_result`, "
        "`tool_addition`, where the role allows it",
        (int)DI_MIN(type.len, 40), type.data);
}

static di_status block_type(di_reader *r, const di_json *v, const char *at, di_chat_text *type) {
    di_status st = di_need_object(r, v, at);
    return st ? st : di_need_string(r, v, at, "type", type);
}

static di_status read_image(di_reader *r, const di_json *v, const char *at, const char *listed_at, di_chat_part *part) {
    const di_json *source;
    di_chat_text type, media, data;
    di_status st = di_read_object(r, v, at, "source", &source);
    if (st) {
        return st;
    }
    di_place source_at = di_place_of("%s.source", at);
    if (!source) {
        return di_refuse_body(r, source_at.text, "missing field `source` in %s", at);
    }
    if ((st = di_need_string(r, source, source_at.text, "type", &type))) {
        return st;
    }
    part->is_image = true;
    if (di_text_is(type, "url")) {
        st = di_need_string(r, source, source_at.text, "url", &part->text);
    } else if (di_text_is(type, "base64")) {
        if ((st = di_need_string(r, source, source_at.text, "media_type", &media)) ||
            (st = di_need_string(r, source, source_at.text, "data", &data))) {
            return st;
        }
        di_strbuf url = {0};
        di_strbuf_puts(&url, "data:");
        di_strbuf_append(&url, media.data, media.len);
        di_strbuf_puts(&url, ";base64,");
        di_strbuf_append(&url, data.data, data.len);
        st = di_reader_keep(r, &url, &part->text);
    } else {
        st = di_refuse_body(r, di_place_of("%s.type", source_at.text).text,
                            "unknown variant `%.*s`, expected `base64` or `url`", (int)DI_MIN(type.len, 40), type.data);
    }
    if (st) {
        return st;
    }
    const char *path = di_arena_strndup(&r->req->arena, listed_at, strlen(listed_at));
    if (!path) {
        return di_reader_no_memory(r);
    }
    part->path = (di_chat_text){.data = path, .len = strlen(path)};
    return di_add_image(r, part);
}

/* A text or image block; listed_at is where an image is said to be. */
static di_status read_part(di_reader *r, const di_json *v, const char *at, const char *listed_at, di_chat_text type,
                           di_chat_part *part) {
    if (di_text_is(type, "text")) {
        return di_need_string(r, v, at, "text", &part->text);
    }
    return di_text_is(type, "image") ? read_image(r, v, at, listed_at, part) : refuse_block(r, at, type);
}

/* Room for the parts of a content of n blocks. */
static di_status alloc_parts(di_reader *r, size_t n, di_chat_message *m, di_chat_part **parts) {
    *parts = di_arena_calloc(&r->req->arena, n, sizeof **parts);
    m->parts = *parts;
    return *parts ? DI_OK : di_reader_no_memory(r);
}

/* A content that is one string; *is_one is false where it is something else. */
static di_status read_string_content(di_reader *r, const di_json *content, const char *at, di_chat_message *m,
                                     bool *is_one) {
    *is_one = di_json_is(content, DI_JSON_STRING);
    if (*is_one) {
        di_chat_part *part;
        di_status st = alloc_parts(r, 1, m, &part);
        if (st == DI_OK) {
            part->text = di_text_of(content);
            m->n_parts = 1;
        }
        return st;
    }
    if (di_json_is(content, DI_JSON_ARRAY)) {
        return DI_OK;
    }
    return content
               ? di_refuse_body(r, at, "'%s': expected a string or an array, found %s", at, di_json_kind_name(content))
               : di_refuse_body(r, at, "missing field `%s`", at);
}

static di_status add_message(di_reader *r, const di_chat_message *m) {
    di_chat_message *slot = di_list_add(r, &r->messages, sizeof *slot);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = *m;
    return DI_OK;
}

/* ------------------------------------------------------------------ user messages and results */

static di_status read_result(di_reader *r, const di_json *v, const char *at, const char *listed_at) {
    di_chat_message m = {.role = DI_CHAT_TOOL};
    di_status st = di_need_string(r, v, at, "tool_use_id", &m.call_id);
    if (st) {
        return st;
    }
    const di_json *content = di_json_get(v, "content");
    if (content && !di_json_is(content, DI_JSON_NULL)) {
        di_place content_at = di_place_of("%s.content", at);
        bool is_one;
        di_chat_part *parts;
        if ((st = read_string_content(r, content, content_at.text, &m, &is_one))) {
            return st;
        }
        size_t n = is_one ? 0 : di_json_array_len(content);
        if (!is_one && (st = alloc_parts(r, n, &m, &parts))) {
            return st;
        }
        for (size_t i = 0; i < n; i++) {
            di_place part_at = di_place_of("%s[%zu]", content_at.text, i);
            di_chat_text type;
            if ((st = block_type(r, di_json_at(content, i), part_at.text, &type)) ||
                (st = read_part(r, di_json_at(content, i), part_at.text, listed_at, type, &parts[i]))) {
                return st;
            }
            m.n_parts++;
        }
    }
    return add_message(r, &m);
}

static bool is_result(const di_json *v) {
    return di_text_is(di_text_of(di_json_get(v, "type")), "tool_result");
}

/* Compares the results that a message opens with (content's first blocks, none for NULL) to the calls that wait for
 * them. Message i is where they belong. */
static di_status check_results(di_reader *r, const turn *t, const di_json *content, size_t i) {
    const di_chat_message *caller = t->has_caller ? (const di_chat_message *)r->messages.items + t->caller : NULL;
    size_t n_calls = caller ? caller->n_calls : 0;
    di_map results = {0}, calls = {0};
    di_status st = DI_OK;
    size_t n_results = 0;
    for (; is_result(di_json_at(content, n_results)) && st == DI_OK; n_results++) {
        di_chat_text id = di_text_of(di_json_get(di_json_at(content, n_results), "tool_use_id"));
        st = id.data ? di_map_set(&results, id.data, id.len, 1, NULL, r->err) : DI_OK;
    }
    di_strbuf missing = {0};
    for (size_t j = 0; j < n_calls && st == DI_OK; j++) {
        di_chat_text id = caller->calls[j].id;
        int64_t seen;
        if (!di_map_get(&results, id.data, id.len, &seen)) {
            di_strbuf_puts(&missing, missing.len ? ", " : "");
            di_strbuf_append(&missing, id.data, DI_MIN(id.len, 200));
        }
        st = di_map_set(&calls, id.data, id.len, 1, NULL, r->err);
    }
    if (st == DI_OK && missing.len > 0) {
        st = di_refuse(
            r, di_place_of("messages.%zu", i).text,
            "messages.%zu: `tool_use` ids were found without `tool_result` blocks immediately after: %s. Each "
            "`tool_use` block must have a corresponding `tool_result` block in the next message.",
            i, di_strbuf_str(&missing));
    }
    /* A result answers a call that has none yet: 1 waits, 0 is answered. */
    for (size_t j = 0; j < di_json_array_len(content) && st == DI_OK; j++) {
        di_chat_text id = di_text_of(di_json_get(di_json_at(content, j), "tool_use_id"));
        int64_t waits = 0;
        if (!is_result(di_json_at(content, j)) || !id.data) {
            continue;
        }
        if (j >= n_results || !di_map_get(&calls, id.data, id.len, &waits) || waits == 0) {
            st = di_refuse(
                r, di_place_of("messages.%zu.content.%zu", i, j).text,
                "messages.%zu.content.%zu: unexpected `tool_use_id` found in `tool_result` blocks: %.*s. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                i, j, (int)DI_MIN(id.len, 200), id.data);
        } else {
            st = di_map_set(&calls, id.data, id.len, 0, NULL, r->err);
        }
    }
    di_strbuf_deinit(&missing);
    di_map_deinit(&results);
    di_map_deinit(&calls);
    return st;
}

static di_status read_user(di_reader *r, const di_json *content, const char *at) {
    di_chat_message m = {.role = DI_CHAT_USER};
    bool is_one;
    di_chat_part *parts;
    di_status st = read_string_content(r, content, at, &m, &is_one);
    if (st || is_one) {
        return st ? st : add_message(r, &m);
    }
    size_t n = di_json_array_len(content), n_results = 0;
    if ((st = alloc_parts(r, n, &m, &parts))) {
        return st;
    }
    for (size_t i = 0; i < n; i++) {
        const di_json *v = di_json_at(content, i);
        di_place block_at = di_place_of("%s[%zu]", at, i);
        di_chat_text type;
        if ((st = block_type(r, v, block_at.text, &type))) {
            return st;
        }
        if (di_text_is(type, "tool_result")) {
            st = read_result(r, v, block_at.text, block_at.text);
            n_results++;
        } else {
            st = read_part(r, v, block_at.text, block_at.text, type, &parts[m.n_parts]);
            m.n_parts++;
        }
        if (st) {
            return st;
        }
    }
    return m.n_parts > 0 || n_results == 0 ? add_message(r, &m) : DI_OK;
}

/* ------------------------------------------------------------------ assistant messages */

static di_status read_call(di_reader *r, const di_json *v, const char *at, di_chat_call *call) {
    const di_json *input;
    di_status st;
    if ((st = di_need_string(r, v, at, "id", &call->id)) || (st = di_need_string(r, v, at, "name", &call->name)) ||
        (st = di_read_object(r, v, at, "input", &input))) {
        return st;
    }
    di_strbuf arguments = {0};
    if (input) {
        di_json_write(&arguments, input, DI_JSON_COMPACT);
    } else {
        di_strbuf_puts(&arguments, "{}");
    }
    return di_reader_keep(r, &arguments, &call->arguments);
}

static di_status read_assistant(di_reader *r, const di_json *content, const char *at, turn *t) {
    di_chat_message m = {.role = DI_CHAT_ASSISTANT};
    bool is_one;
    di_chat_part *parts;
    di_strbuf thinking = {0};
    di_status st = read_string_content(r, content, at, &m, &is_one);
    size_t n = is_one ? 0 : di_json_array_len(content);
    if (st || (!is_one && (st = alloc_parts(r, n, &m, &parts)))) {
        return st;
    }
    di_chat_call *calls = di_arena_calloc(&r->req->arena, n, sizeof *calls);
    if (!calls) {
        return di_reader_no_memory(r);
    }
    m.calls = calls;
    for (size_t i = 0; i < n && st == DI_OK; i++) {
        const di_json *v = di_json_at(content, i);
        di_place block_at = di_place_of("%s[%zu]", at, i);
        di_chat_text type, text;
        if ((st = block_type(r, v, block_at.text, &type))) {
            break;
        }
        if (di_text_is(type, "text")) {
            st = di_need_string(r, v, block_at.text, "text", &parts[m.n_parts++].text);
        } else if (di_text_is(type, "thinking")) {
            m.has_reasoning = true;
            if ((st = di_need_string(r, v, block_at.text, "thinking", &text)) == DI_OK) {
                di_strbuf_append(&thinking, text.data, text.len);
            }
        } else if (di_text_is(type, "redacted_thinking") && !r->req->vendor_compat) {
            continue; /* another server's, readable by that one only */
        } else if (di_text_is(type, "tool_use")) {
            st = read_call(r, v, block_at.text, &calls[m.n_calls++]);
        } else if (di_text_is(type, "image")) {
            st = di_refuse(r, block_at.text, "Image in assistant message is not supported");
        } else if (di_text_is(type, "server_tool_use") || di_text_is(type, "web_search_tool_result")) {
            st = di_refuse(r, block_at.text, "%s: server tools are not supported", block_at.text);
        } else {
            st = refuse_block(r, block_at.text, type);
        }
    }
    if (st) {
        di_strbuf_deinit(&thinking);
        return st;
    }
    if ((st = di_reader_keep(r, &thinking, &m.reasoning))) {
        return st;
    }
    t->caller = r->messages.n;
    t->has_caller = m.n_calls > 0;
    return add_message(r, &m);
}

/* ------------------------------------------------------------------ system messages */

static di_status read_tool(di_reader *r, const di_json *v, const char *at, di_chat_tool *tool, bool *is_server);

/* {"type":"tool_addition","tool":{"type":"tool_reference","name":...} or
 * {"type":"tool_definition","definition":{...}}}: a deferred tool by name, or a new one. */
static di_status read_addition(di_reader *r, const di_json *v, const char *at, di_chat_tool *out) {
    const di_json *tool, *definition;
    di_place tool_at = di_place_of("%s.tool", at), definition_at = di_place_of("%s.definition", tool_at.text);
    di_chat_text type, name;
    di_status st = di_read_object(r, v, at, "tool", &tool);
    if (st) {
        return st;
    }
    if (!tool) {
        return di_refuse_body(r, tool_at.text, "missing field `tool` in %s", at);
    }
    if ((st = di_need_string(r, tool, tool_at.text, "type", &type))) {
        return st;
    }
    if (di_text_is(type, "tool_definition")) {
        bool is_server;
        if ((st = di_read_object(r, tool, tool_at.text, "definition", &definition))) {
            return st;
        }
        if (!definition) {
            return di_refuse_body(r, definition_at.text, "missing field `definition` in %s", tool_at.text);
        }
        st = read_tool(r, definition, definition_at.text, out, &is_server);
        return st == DI_OK && is_server ? di_refuse(r, at, "%s: server tools are not supported", at) : st;
    }
    if (!di_text_is(type, "tool_reference")) {
        return di_refuse_body(r, di_place_of("%s.type", tool_at.text).text,
                              "unknown variant `%.*s`, expected `tool_reference` or `tool_definition`",
                              (int)DI_MIN(type.len, 40), type.data);
    }
    if ((st = di_need_string(r, tool, tool_at.text, "name", &name))) {
        return st;
    }
    const di_chat_tool *tools = r->tools.items;
    for (size_t i = 0; i < r->tools.n; i++) {
        if (tools[i].name.len == name.len && memcmp(tools[i].name.data, name.data, name.len) == 0) {
            *out = tools[i];
            return DI_OK;
        }
    }
    return di_refuse(r, tool_at.text, "%s: no tool named '%.*s' in 'tools'", tool_at.text, (int)DI_MIN(name.len, 200),
                     name.data);
}

static di_status read_system(di_reader *r, const di_json *content, const char *at) {
    di_chat_message m = {.role = DI_CHAT_SYSTEM};
    bool is_one;
    di_chat_part *parts;
    di_status st = read_string_content(r, content, at, &m, &is_one);
    if (st || is_one) {
        return st ? st : add_message(r, &m);
    }
    size_t n = di_json_array_len(content);
    di_chat_tool *tools = di_arena_calloc(&r->req->arena, n, sizeof *tools);
    if (!tools || alloc_parts(r, n, &m, &parts)) {
        return di_reader_no_memory(r);
    }
    m.tools = tools;
    for (size_t i = 0; i < n && st == DI_OK; i++) {
        const di_json *v = di_json_at(content, i);
        di_place block_at = di_place_of("%s[%zu]", at, i);
        di_chat_text type;
        if ((st = block_type(r, v, block_at.text, &type))) {
            return st;
        }
        if (di_text_is(type, "tool_addition")) {
            st = read_addition(r, v, block_at.text, &tools[m.n_tools++]);
        } else {
            st = read_part(r, v, block_at.text, block_at.text, type, &parts[m.n_parts++]);
        }
    }
    return st ? st : add_message(r, &m);
}

static di_status read_message_list(di_reader *r, const di_json *body) {
    const di_json *system = di_json_get(body, "system"), *list;
    di_status st = DI_OK;
    if (system && !di_json_is(system, DI_JSON_NULL)) {
        st = read_system(r, system, "system");
    }
    if (st || (st = di_read_array(r, body, "", "messages", &list))) {
        return st;
    }
    if (!list) {
        return di_refuse_body(r, "messages", "missing field `messages`");
    }
    size_t n = di_json_array_len(list);
    if (n == 0) {
        return di_refuse(r, "messages", "messages: at least one message is required");
    }
    turn t = {0};
    for (size_t i = 0; i < n && st == DI_OK; i++) {
        const di_json *v = di_json_at(list, i), *content = di_json_get(v, "content");
        di_place at = di_place_of("messages.%zu", i), content_at = di_place_of("%s.content", at.text);
        di_chat_text role;
        if ((st = di_need_object(r, v, at.text)) || (st = di_need_string(r, v, at.text, "role", &role))) {
            return st;
        }
        bool is_user = di_text_is(role, "user");
        if ((st = check_results(r, &t, is_user ? content : NULL, i))) {
            return st;
        }
        t.has_caller = false;
        if (is_user) {
            st = read_user(r, content, content_at.text);
        } else if (di_text_is(role, "assistant")) {
            st = read_assistant(r, content, content_at.text, &t);
        } else if (di_text_is(role, "system")) {
            st = read_system(r, content, content_at.text);
        } else {
            st = di_refuse_body(r, di_place_of("%s.role", at.text).text,
                                "unknown variant `%.*s`, expected one of `user`, `assistant`, `system`",
                                (int)DI_MIN(role.len, 40), role.data);
        }
    }
    return st ? st : check_results(r, &t, NULL, n);
}

/* ------------------------------------------------------------------ tools and the rest */

/* A tool of the client's own has no type, or `custom`; any other type is a tool of the server's. */
static di_status read_tool(di_reader *r, const di_json *v, const char *at, di_chat_tool *tool, bool *is_server) {
    di_chat_text type;
    bool has_type;
    di_status st = di_need_object(r, v, at);
    *is_server = false;
    if (st || (st = di_read_string(r, v, at, "type", &type, &has_type))) {
        return st;
    }
    *is_server = has_type && !di_text_is(type, "custom");
    return *is_server ? DI_OK : di_read_function(r, v, at, "input_schema", tool);
}

static di_status read_tools(di_reader *r, const di_json *body) {
    const di_json *list;
    di_status st = di_read_array(r, body, "", "tools", &list);
    for (size_t i = 0; st == DI_OK && i < di_json_array_len(list); i++) {
        di_place at = di_place_of("tools[%zu]", i);
        di_chat_tool tool;
        bool is_server;
        if ((st = read_tool(r, di_json_at(list, i), at.text, &tool, &is_server))) {
            return st;
        }
        if (!is_server) {
            st = di_add_tool(r, &tool);
        } else if (!r->options->drop_server_tools) {
            st = di_refuse(r, at.text, "%s: server tools are not supported", at.text);
        }
    }
    return st;
}

static di_status read_tool_choice(di_reader *r, const di_json *body) {
    const di_json *v;
    di_chat_text type, name;
    di_status st = di_read_object(r, body, "", "tool_choice", &v);
    if (st || !v) {
        return st ? st : di_apply_tool_choice(r, DI_CHAT_CHOICE_AUTO, NULL);
    }
    if ((st = di_need_string(r, v, "tool_choice", "type", &type))) {
        return st;
    }
    if (di_text_is(type, "auto") || di_text_is(type, "any")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_AUTO, NULL);
    }
    if (di_text_is(type, "none")) {
        return di_apply_tool_choice(r, DI_CHAT_CHOICE_NONE, NULL);
    }
    if (!di_text_is(type, "tool")) {
        return di_refuse_body(r, "tool_choice.type",
                              "unknown variant `%.*s`, expected one of `auto`, `any`, `tool`, `none`",
                              (int)DI_MIN(type.len, 40), type.data);
    }
    st = di_need_string(r, v, "tool_choice", "name", &name);
    return st ? st : di_apply_tool_choice(r, DI_CHAT_CHOICE_REQUIRED, &name);
}

/* Nothing of a conversation is kept, so that one can't be gone on with by an id. */
static di_status check_thread(di_reader *r, const di_json *body) {
    const di_json *thread;
    di_status st = di_read_object(r, body, "", "thread", &thread);
    return st || !thread ? st
                         : di_refuse(r, "thread",
                                     "thread: conversations are not kept on the server, send all messages without it");
}

di_status di_read_messages(di_reader *r, const di_json *body) {
    static const di_field_names names = {
        .max_tokens = "max_tokens", .max_tokens_alias = NULL, .stop = "stop_sequences"};
    const di_json *thinking, *output, *format;
    di_status st;
    if ((st = di_read_model(r, body)) || (st = check_thread(r, body)) ||
        (st = di_read_object(r, body, "", "thinking", &thinking)) ||
        (st = di_read_object(r, body, "", "output_config", &output)) ||
        (st = di_read_thinking(r, thinking, di_json_get(output, "effort"), "output_config.effort", -1)) ||
        (st = read_tools(r, body)) || (st = read_message_list(r, body)) || (st = di_read_sampling(r, body, &names)) ||
        (st = di_read_object(r, output, "output_config", "format", &format)) ||
        (st = di_read_format(r, format, "output_config.format", false)) || (st = di_read_own_constraints(r, body)) ||
        (st = read_tool_choice(r, body))) {
        return st;
    }
    return di_check_reasoning(r);
}
