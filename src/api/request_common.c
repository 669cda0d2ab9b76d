/* The fields that all APIs have in common beside sampling: thinking and effort, response format, tools and their
 * results.
 *
 * Two sets of rules meet here. Our own does what a request asks for and refuses only what is malformed or out of range;
 * the hosted service's (vendor_compat) has narrower ranges and its own words, which its clients may compare. */
#include "request_internal.h"

/* ------------------------------------------------------------------ thinking, model, formats */

/* Effort by the names that requests use; -1 for another one. */
static int effort_of(di_chat_text name) {
    static const struct {
        const char *name;
        int effort;
    } efforts[] = {
        {"none", 0},
        {"minimal", DI_CHAT_EFFORT_LOW},
        {"low", DI_CHAT_EFFORT_LOW},
        {"medium", DI_CHAT_EFFORT_HIGH},
        {"high", DI_CHAT_EFFORT_HIGH},
        {"xhigh", DI_CHAT_EFFORT_HIGH},
        {"ultra", DI_CHAT_EFFORT_MAX},
        {"max", DI_CHAT_EFFORT_MAX},
    };
    for (size_t i = 0; i < DI_COUNT(efforts); i++) {
        if (di_text_is(name, efforts[i].name)) {
            return efforts[i].effort;
        }
    }
    return -1;
}

/* `thinking`: *forced becomes 1 for on, 0 for off. */
static di_status read_thinking_type(di_reader *r, const di_json *thinking, int *forced) {
    di_chat_text type;
    di_status st = di_need_string(r, thinking, "thinking", "type", &type);
    if (st) {
        return st;
    }
    if (di_text_is(type, "enabled") || di_text_is(type, "adaptive")) {
        *forced = 1;
    } else if (di_text_is(type, "disabled")) {
        *forced = 0;
    } else {
        return di_refuse_body(r, "thinking.type",
                              "unknown variant `%.*s`, expected one of `adaptive`, `enabled`, `disabled`",
                              (int)DI_MIN(type.len, 40), type.data);
    }
    return DI_OK;
}

/* A name, or a number from 1 to 100: *level, 0 for none. */
static di_status read_effort(di_reader *r, const di_json *effort, const char *at, int *level) {
    if (di_json_is(effort, DI_JSON_STRING)) {
        di_chat_text name = di_text_of(effort);
        int64_t n;
        *level = effort_of(name);
        if (*level < 0 && !r->req->vendor_compat && di_parse_i64(name.data, &n) && n >= 1 && n <= 100) {
            *level = (int)n; /* clients with typed effort can only send strings */
        }
        if (*level < 0) {
            return di_refuse_body(r, at,
                                  "unknown variant `%.*s`, expected one of `none`, `minimal`, `low`, `medium`, `high`, "
                                  "`xhigh`, `ultra`, `max`",
                                  (int)DI_MIN(name.len, 40), name.data);
        }
        return DI_OK;
    }
    if (r->req->vendor_compat || !di_json_is(effort, DI_JSON_INT)) {
        return di_refuse_body(r, at, "'%s': expected a name%s, found %s", at,
                              r->req->vendor_compat ? "" : " or an integer from 1 to 100", di_json_kind_name(effort));
    }
    int64_t n = di_json_int(effort);
    if (n < 1 || n > 100) {
        return di_refuse(r, at, "%s: %lld, expected 1 to 100", at, (long long)n);
    }
    *level = (int)n;
    return DI_OK;
}

di_status di_read_thinking(di_reader *r, const di_json *thinking, const di_json *effort, const char *effort_at,
                           int flag) {
    int forced = flag, level = -1;
    di_status st = thinking ? read_thinking_type(r, thinking, &forced) : DI_OK;
    if (st == DI_OK && effort && !di_json_is(effort, DI_JSON_NULL)) {
        st = read_effort(r, effort, effort_at, &level);
    }
    if (st) {
        return st;
    }
    int standard = r->options->effort_default;
    bool is_on = forced >= 0 ? forced == 1 : level >= 0 ? level > 0 : standard > 0;
    r->req->chat.thinking = is_on;
    /* Thinking that is asked for without an effort, or with the effort `none`, has the standard one. */
    r->req->chat.effort = !is_on ? 0 : level > 0 ? level : level < 0 && standard > 0 ? standard : DI_CHAT_EFFORT_HIGH;
    return DI_OK;
}

di_status di_read_model(di_reader *r, const di_json *body) {
    static const char *const names[] = {"DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"};
    di_chat_text model;
    bool has;
    di_status st = di_read_string(r, body, "", "model", &model, &has);
    if (st || !has) {
        return st;
    }
    r->req->model = model;
    if (!r->req->vendor_compat || (r->options->model_name && di_text_is(model, r->options->model_name))) {
        return DI_OK;
    }
    for (size_t i = 0; i < DI_COUNT(names); i++) {
        if (di_text_is(model, names[i])) {
            return DI_OK;
        }
    }
    return di_refuse(r, "model", "The supported API model names are %s, %s, but you passed %.*s.", names[0], names[1],
                     (int)DI_MIN(model.len, 200), model.data);
}

/* At most one of the fields that constrain the output may be given. */
static di_status set_format(di_reader *r, const char *at, di_constraint_kind kind, di_chat_text text) {
    if (r->req->format_constraint != DI_CONSTRAINT_NONE || r->req->chat.format != DI_CHAT_FORMAT_TEXT) {
        return di_refuse(r, at, "%s: only one of response_format, regex, ebnf and choice can be given", at);
    }
    r->req->format_constraint = kind;
    r->req->format_text = text;
    return DI_OK;
}

di_status di_read_own_constraints(di_reader *r, const di_json *body) {
    di_chat_text text;
    bool has;
    const di_json *choice;
    di_status st;
    if (r->req->vendor_compat) {
        return DI_OK;
    }
    if ((st = di_read_string(r, body, "", "regex", &text, &has)) ||
        (has && (st = set_format(r, "regex", DI_CONSTRAINT_REGEX, text))) ||
        (st = di_read_string(r, body, "", "ebnf", &text, &has)) ||
        (has && (st = set_format(r, "ebnf", DI_CONSTRAINT_EBNF, text))) ||
        (st = di_read_array(r, body, "", "choice", &choice)) || !choice) {
        return st;
    }
    for (size_t i = 0; i < di_json_array_len(choice); i++) {
        if (!di_json_is(di_json_at(choice, i), DI_JSON_STRING)) {
            return di_refuse_body(r, di_place_of("choice[%zu]", i).text, "'choice[%zu]': expected a string, found %s",
                                  i, di_json_kind_name(di_json_at(choice, i)));
        }
    }
    if (di_json_array_len(choice) == 0) {
        return di_refuse(r, "choice", "choice: an empty list, expected one string or more");
    }
    di_strbuf list = {0};
    di_json_write(&list, choice, DI_JSON_COMPACT);
    if ((st = di_reader_keep(r, &list, &text))) {
        return st;
    }
    return set_format(r, "choice", DI_CONSTRAINT_CHOICE, text);
}

di_status di_read_format(di_reader *r, const di_json *format, const char *at, bool is_nested) {
    if (!format) {
        return DI_OK;
    }
    di_chat_text type, text = {0};
    r->req->names_format = true;
    di_status st = di_need_string(r, format, at, "type", &type);
    if (st || di_text_is(type, "text")) {
        return st;
    }
    if (di_text_is(type, "regex")) {
        if ((st = di_need_string(r, format, at, "regex", &text)) ||
            (st = set_format(r, at, DI_CONSTRAINT_REGEX, text))) {
            return st;
        }
        r->req->chat.format = DI_CHAT_FORMAT_REGEX;
        return DI_OK;
    }
    if (di_text_is(type, "json_object")) {
        if ((st = set_format(r, at, DI_CONSTRAINT_JSON, text))) {
            return st;
        }
        r->req->chat.format = DI_CHAT_FORMAT_JSON_OBJECT;
        return DI_OK;
    }
    if (!di_text_is(type, "json_schema")) {
        return di_refuse_body(r, di_place_of("%s.type", at).text,
                              "unknown variant `%.*s`, expected one of `json_object`, `json_schema`, `regex`, `text`",
                              (int)DI_MIN(type.len, 40), type.data);
    }
    const di_json *holder = format, *schema;
    if (is_nested) {
        if ((st = di_read_object(r, format, at, "json_schema", &holder))) {
            return st;
        }
        if (!holder) {
            return di_refuse_body(r, di_place_of("%s.json_schema", at).text, "missing field `json_schema` in %s", at);
        }
    }
    di_place place = is_nested ? di_place_of("%s.json_schema", at) : di_place_of("%s", at);
    schema = di_json_get(holder, "schema");
    /* A schema is an object, or true or false. */
    if (!di_json_is(schema, DI_JSON_OBJECT) && !di_json_is(schema, DI_JSON_BOOL)) {
        return di_refuse_body(r, di_place_of("%s.schema", place.text).text,
                              "'%s.schema': expected a JSON schema, found %s", place.text, di_json_kind_name(schema));
    }
    if ((st = set_format(r, at, DI_CONSTRAINT_JSON, text))) {
        return st;
    }
    bool is_strict = true;
    if ((st = di_read_bool(r, holder, place.text, "strict", &is_strict, NULL))) {
        return st;
    }
    r->req->is_format_lax = !is_strict;
    r->req->chat.format = DI_CHAT_FORMAT_JSON_SCHEMA;
    r->req->chat.schema = schema;
    return DI_OK;
}

di_status di_read_detail(di_reader *r, const di_json *object, const char *at, di_chat_detail *detail) {
    static const char *const names[] = {[DI_CHAT_DETAIL_HIGH] = "high",
                                        [DI_CHAT_DETAIL_LOW] = "low",
                                        [DI_CHAT_DETAIL_ORIGINAL] = "original",
                                        [DI_CHAT_DETAIL_AUTO] = "auto"};
    di_chat_text name;
    bool has;
    di_status st = di_read_string(r, object, at, "detail", &name, &has);
    *detail = DI_CHAT_DETAIL_HIGH;
    if (st || !has) {
        return st;
    }
    for (size_t i = 0; i < DI_COUNT(names); i++) {
        if (di_text_is(name, names[i])) {
            *detail = (di_chat_detail)i;
            return DI_OK;
        }
    }
    return di_refuse_body(r, di_place_of("%s.detail", at).text,
                          "unknown variant `%.*s`, expected one of `low`, `high`, `original`, `auto`",
                          (int)DI_MIN(name.len, 40), name.data);
}

di_status di_add_image(di_reader *r, const di_chat_part *part) {
    const di_chat_part **slot = di_list_add(r, &r->images, sizeof *slot);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = part;
    return DI_OK;
}

/* ------------------------------------------------------------------ tools */

static bool is_tool_name(di_chat_text name) {
    for (size_t i = 0; i < name.len; i++) {
        char c = name.data[i];
        bool is_word =
            (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
        if (!is_word) {
            return false;
        }
    }
    return name.len > 0;
}

/* Parameters are a schema of an object. Our own rule lets an absent type pass: the schema then allows objects too. */
static di_status check_parameters(di_reader *r, const di_chat_tool *tool, const char *at) {
    const di_json *schema = tool->parameters;
    const di_json *type = di_json_get(schema, "type");
    di_chat_text name = di_text_of(type);
    if (!schema || di_text_is(name, "object")) {
        return DI_OK;
    }
    if (!r->req->vendor_compat && di_json_is(schema, DI_JSON_OBJECT) && !type) {
        return DI_OK;
    }
    di_strbuf found = {0};
    if (di_json_is(schema, DI_JSON_OBJECT) && type) {
        di_json_write(&found, type, DI_JSON_COMPACT);
    } else {
        di_strbuf_puts(&found, "null");
    }
    di_status st = di_refuse(r, at,
                             "Invalid schema for function '%.*s': schema must be a JSON Schema of 'type: \"object\"', "
                             "got 'type: %s'.",
                             (int)DI_MIN(tool->name.len, 200), tool->name.data, di_strbuf_str(&found));
    di_strbuf_deinit(&found);
    return st;
}

di_status di_read_function(di_reader *r, const di_json *function, const char *at, const char *parameters_key,
                           di_chat_tool *tool) {
    *tool = (di_chat_tool){0};
    di_status st = di_need_string(r, function, at, "name", &tool->name);
    if (st) {
        return st;
    }
    di_place name_at = di_place_of("%s.name", at);
    if (!is_tool_name(tool->name)) {
        return di_refuse(r, name_at.text,
                         "Invalid '%s': string does not match pattern. Expected a string that matches the pattern "
                         "'^[a-zA-Z0-9_-]+$'.",
                         name_at.text);
    }
    if ((st = di_read_string(r, function, at, "description", &tool->description, &tool->has_description)) ||
        (st = di_read_bool(r, function, at, "strict", &tool->strict, &tool->has_strict)) ||
        (st = di_read_bool(r, function, at, "defer_loading", &tool->is_deferred, NULL))) {
        return st;
    }
    const di_json *parameters = di_json_get(function, parameters_key);
    tool->parameters = di_json_is(parameters, DI_JSON_NULL) ? NULL : parameters;
    if ((st = check_parameters(r, tool, di_place_of("%s.%s", at, parameters_key).text))) {
        return st;
    }
    if (tool->strict && tool->parameters) {
        di_json *schema = di_chat_strict_schema(tool->parameters);
        tool->parameters = schema;
        return di_reader_own(r, schema);
    }
    return DI_OK;
}

di_status di_reader_own(di_reader *r, di_json *value) {
    di_list schemas = {.items = r->req->schemas, .n = r->req->n_schemas, .cap = r->req->cap_schemas};
    di_json **slot = value ? di_list_add(r, &schemas, sizeof *slot) : NULL;
    if (!slot) {
        di_json_free(value);
        return di_reader_no_memory(r);
    }
    *slot = value;
    r->req->schemas = schemas.items;
    r->req->n_schemas = schemas.n;
    r->req->cap_schemas = schemas.cap;
    return DI_OK;
}

di_status di_add_tool(di_reader *r, const di_chat_tool *tool) {
    di_chat_tool *slot = di_list_add(r, &r->tools, sizeof *slot);
    if (!slot) {
        return DI_ERR_MEMORY;
    }
    *slot = *tool;
    return DI_OK;
}

static di_status check_unique_names(di_reader *r) {
    const di_chat_tool *tools = r->tools.items;
    di_map seen = {0};
    di_status st = DI_OK;
    for (size_t i = 0; i < r->tools.n && st == DI_OK; i++) {
        bool was;
        st = di_map_set(&seen, tools[i].name.data, tools[i].name.len, 1, &was, r->err);
        if (st == DI_OK && was) {
            st = di_refuse(r, "tools", "Tool names must be unique.");
        }
    }
    di_map_deinit(&seen);
    return st;
}

di_status di_apply_tool_choice(di_reader *r, di_chat_tool_choice choice, const di_chat_text *name) {
    di_chat *chat = &r->req->chat;
    di_status st = check_unique_names(r);
    if (st) {
        return st;
    }
    chat->tools = r->tools.items;
    chat->n_tools = r->tools.n;
    if (r->tools.n == 0) {
        chat->tool_choice = choice == DI_CHAT_CHOICE_NONE ? choice : DI_CHAT_CHOICE_AUTO;
        return DI_OK;
    }
    chat->tool_choice = choice;
    if (name) {
        size_t i = 0;
        while (i < chat->n_tools && !(chat->tools[i].name.len == name->len &&
                                      memcmp(chat->tools[i].name.data, name->data, name->len) == 0)) {
            i++;
        }
        if (i == chat->n_tools) {
            return di_refuse(r, "tool_choice",
                             "Invalid value for 'tool_call': no function named '%.*s' was specified in the 'tools' "
                             "parameter.",
                             (int)DI_MIN(name->len, 200), name->data);
        }
        /* The one tool that may be called is the one that is shown; asked for by name, it is no longer deferred. */
        di_chat_tool *only = di_arena_calloc(&r->req->arena, 1, sizeof *only);
        if (!only) {
            return di_reader_no_memory(r);
        }
        *only = chat->tools[i];
        only->is_deferred = false;
        chat->tools = only;
        chat->n_tools = 1;
    }
    if (choice == DI_CHAT_CHOICE_REQUIRED && chat->thinking && r->req->vendor_compat) {
        return di_refuse(r, "tool_choice", "Thinking mode does not support this tool_choice");
    }
    return DI_OK;
}

/* ------------------------------------------------------------------ results of calls */

/* Ids of an assistant message's calls that still wait for their result, with how many of each. */
static di_status wait_for_calls(di_reader *r, di_map *waiting, const di_chat_message *m) {
    for (size_t i = 0; i < m->n_calls; i++) {
        int64_t n = 0;
        (void)di_map_get(waiting, m->calls[i].id.data, m->calls[i].id.len, &n);
        di_status st = di_map_set(waiting, m->calls[i].id.data, m->calls[i].id.len, n + 1, NULL, r->err);
        if (st) {
            return st;
        }
    }
    return DI_OK;
}

static di_status refuse_orphan(di_reader *r, di_chat_text id) {
    if (r->req->api == DI_API_RESPONSES) {
        return di_refuse(r, "input", "No tool call found for function call output with call_id %.*s.",
                         (int)DI_MIN(id.len, 200), id.data);
    }
    return di_refuse(r, "messages",
                     "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'");
}

static di_status refuse_unknown(di_reader *r, di_chat_text id) {
    if (r->req->api == DI_API_RESPONSES) {
        return refuse_orphan(r, id);
    }
    return di_refuse(r, "messages",
                     "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                     "'tool_call_id', The following tool_call_ids did not have response messages: %.*s",
                     (int)DI_MIN(id.len, 200), id.data);
}

static di_status refuse_missing(di_reader *r, const di_chat_message *m, const di_map *waiting) {
    if (r->req->api != DI_API_RESPONSES) {
        return di_refuse(r, "messages",
                         "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                         "'tool_call_id'. (insufficient tool messages following tool_calls message)");
    }
    di_chat_text id = m->calls[0].id;
    for (size_t i = 0; i < m->n_calls; i++) {
        int64_t n = 0;
        if (di_map_get(waiting, m->calls[i].id.data, m->calls[i].id.len, &n) && n > 0) {
            id = m->calls[i].id;
            break;
        }
    }
    return di_refuse(r, "input", "No tool output found for tool call %.*s.", (int)DI_MIN(id.len, 200), id.data);
}

/* The results of one message's calls: as many tool messages as calls, right behind it, each with the id of a call that
 * has none yet. *next is the first message behind them. */
static di_status check_results_of(di_reader *r, const di_chat_message *messages, size_t n, size_t at, size_t *next) {
    const di_chat_message *m = &messages[at];
    di_map waiting = {0};
    di_status st = wait_for_calls(r, &waiting, m);
    size_t i = at + 1;
    for (size_t left = m->n_calls; left > 0 && st == DI_OK; left--, i++) {
        if (i >= n || messages[i].role != DI_CHAT_TOOL) {
            st = refuse_missing(r, m, &waiting);
            break;
        }
        di_chat_text id = messages[i].call_id;
        int64_t count = 0;
        if (!di_map_get(&waiting, id.data, id.len, &count) || count == 0) {
            st = refuse_unknown(r, id);
            break;
        }
        st = di_map_set(&waiting, id.data, id.len, count - 1, NULL, r->err);
    }
    di_map_deinit(&waiting);
    *next = i;
    return st;
}

di_status di_check_results(di_reader *r) {
    const di_chat_message *messages = r->messages.items;
    size_t n = r->messages.n;
    for (size_t i = 0; i < n;) {
        if (messages[i].role == DI_CHAT_TOOL) {
            return refuse_orphan(r, messages[i].call_id);
        }
        size_t next = i + 1;
        if (messages[i].role == DI_CHAT_ASSISTANT && messages[i].n_calls > 0) {
            di_status st = check_results_of(r, messages, n, i, &next);
            if (st) {
                return st;
            }
        }
        i = next;
    }
    return DI_OK;
}
