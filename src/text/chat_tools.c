/* Tools in the chat format: the instruction block, the tool lines, strict schemas and the tool list for grammars.
 *
 * The block is the renderer's own text, so the DSML and think spellings in it are special tokens, as in the prompts
 * that the released encoder makes; the lines between its head and tail come with a request and are plain. Schemas print
 * in the order in which they came, so that the same request always gives the same prompt. */
#include "chat.h"

#include "chat_internal.h"

static const char block_head[] =
    "\n\n## Tools\n"
    "\n"
    "You have access to a set of tools to help answer the user's question. "
    "You can invoke tools by writing a \"<｜DSML｜ calls>\" block like the following:\n"
    "\n"
    "<｜DSML｜ calls>\n"
    "<｜DSML｜ invoke name=\"$TOOL_NAME\">\n"
    "<｜DSML｜ parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜ parameter>\n"
    "...\n"
    "</｜DSML｜ invoke>\n"
    "<｜DSML｜ invoke name=\"$TOOL_NAME2\">\n"
    "...\n"
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>\n"
    "\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, "
    "arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n"
    "\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> BEFORE any tool calls or final response.\n"
    "\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n"
    "\n"
    "### Available Tool Schemas\n"
    "\n";

static const char block_tail[] = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to "
                                 "invoke tool calls.\n";

void di_prompt_tool_lines(di_prompt *prompt, const di_chat_tool *tools, size_t n_tools, bool with_deferred) {
    bool is_first = true;
    for (size_t i = 0; i < n_tools; i++) {
        const di_chat_tool *tool = &tools[i];
        if (tool->is_deferred && !with_deferred) {
            continue;
        }
        di_prompt_text(prompt, is_first ? "{\"name\": " : "\n{\"name\": ");
        is_first = false;
        di_json_write_string(&prompt->text, tool->name.len ? tool->name.data : "", tool->name.len);
        di_prompt_text(prompt, ", \"description\": ");
        di_json_write_string(&prompt->text, tool->description.len ? tool->description.data : "", tool->description.len);
        di_prompt_text(prompt, ", \"parameters\": ");
        if (tool->parameters) {
            di_json_write(&prompt->text, tool->parameters, DI_JSON_SPACED);
        } else {
            di_prompt_text(prompt, "{}");
        }
        di_prompt_text(prompt, "}");
    }
}

/* Appends text of our own, in which the spellings of DSML, think and /think are special tokens. */
static void put_marked(di_prompt *prompt, const char *text) {
    static const di_chat_special marks[] = {DI_CHAT_DSML, DI_CHAT_THINK, DI_CHAT_END_THINK};
    for (;;) {
        const char *next = NULL;
        di_chat_special special = DI_CHAT_DSML;
        for (size_t i = 0; i < DI_COUNT(marks); i++) {
            const char *found = strstr(text, di_chat_special_text(marks[i]));
            if (found && (!next || found < next)) {
                next = found;
                special = marks[i];
            }
        }
        if (!next) {
            break;
        }
        di_prompt_bytes(prompt, text, (size_t)(next - text));
        di_prompt_special(prompt, special);
        text = next + strlen(di_chat_special_text(special));
    }
    di_prompt_text(prompt, text);
}

void di_prompt_tool_block(di_prompt *prompt, const di_chat_tool *tools, size_t n_tools) {
    put_marked(prompt, block_head);
    di_prompt_tool_lines(prompt, tools, n_tools, false);
    di_prompt_text(prompt, block_tail);
}

void di_chat_tools_json(di_strbuf *out, const di_chat_tool *tools, size_t n_tools) {
    bool is_first = true;
    di_strbuf_puts(out, "[");
    for (size_t i = 0; i < n_tools; i++) {
        const di_chat_tool *tool = &tools[i];
        if (tool->is_deferred) {
            continue;
        }
        di_strbuf_puts(out, is_first ? "{" : ",{");
        is_first = false;
        di_strbuf_puts(out, "\"type\":\"function\",\"function\":{\"name\":");
        di_json_write_string(out, tool->name.len ? tool->name.data : "", tool->name.len);
        di_strbuf_puts(out, ",\"description\":");
        if (tool->has_description) {
            di_json_write_string(out, tool->description.len ? tool->description.data : "", tool->description.len);
        } else {
            di_strbuf_puts(out, "null");
        }
        di_strbuf_puts(out, ",\"parameters\":");
        if (tool->parameters) {
            di_json_write(out, tool->parameters, DI_JSON_COMPACT);
        } else {
            di_strbuf_puts(out, "{}");
        }
        di_strbuf_puts(out, ",\"strict\":");
        di_strbuf_puts(out, !tool->has_strict ? "null" : tool->strict ? "true" : "false");
        di_strbuf_puts(out, "}}");
    }
    di_strbuf_puts(out, "]");
}

/* ------------------------------------------------------------------ strict schemas */

typedef enum schema_place {
    PLACE_SCHEMA, /* the value is a schema */
    PLACE_MAP,    /* an object whose values are schemas (properties, $defs) */
    PLACE_DATA    /* data that only looks like a schema (enum, const, default): copied as it is */
} schema_place;

/* What a keyword's value is. Lists of schemas need no case of their own: arrays are walked in either place. */
static schema_place place_of(const char *key) {
    static const char *const maps[] = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"};
    static const char *const schemas[] = {"items", "prefixItems", "contains", "anyOf", "oneOf",          "allOf",
                                          "not",   "if",          "then",     "else",  "additionalItems"};
    for (size_t i = 0; i < DI_COUNT(maps); i++) {
        if (strcmp(key, maps[i]) == 0) {
            return PLACE_MAP;
        }
    }
    for (size_t i = 0; i < DI_COUNT(schemas); i++) {
        if (strcmp(key, schemas[i]) == 0) {
            return PLACE_SCHEMA;
        }
    }
    return PLACE_DATA;
}

static bool is_object_schema(const di_json *schema) {
    const di_json *type = di_json_get(schema, "type");
    const char *name = di_json_str(type, NULL);
    if (name) {
        return strcmp(name, "object") == 0;
    }
    for (size_t i = 0; i < di_json_array_len(type); i++) {
        name = di_json_str(di_json_at(type, i), NULL);
        if (name && strcmp(name, "object") == 0) {
            return true;
        }
    }
    return !type && di_json_is(di_json_get(schema, "properties"), DI_JSON_OBJECT);
}

static di_json *property_names(const di_json *schema) {
    di_json *names = di_json_new_array();
    const di_json *properties = di_json_get(schema, "properties");
    for (void *it = di_json_iter(properties); it && names; it = di_json_iter_next(properties, it)) {
        size_t len;
        const char *key = di_json_iter_key(it, &len);
        if (!di_json_append(names, di_json_new_string(key, len))) {
            di_json_free(names);
            names = NULL;
        }
    }
    return names;
}

static di_json *normalise(const di_json *value, schema_place place);

static di_json *normalise_array(const di_json *value, schema_place place) {
    di_json *out = di_json_new_array();
    for (size_t i = 0; out && i < di_json_array_len(value); i++) {
        if (!di_json_append(out, normalise(di_json_at(value, i), place))) {
            di_json_free(out);
            return NULL;
        }
    }
    return out;
}

static di_json *normalise(const di_json *value, schema_place place) {
    if (place != PLACE_DATA && di_json_is(value, DI_JSON_ARRAY)) {
        return normalise_array(value, place);
    }
    if (place == PLACE_DATA || !di_json_is(value, DI_JSON_OBJECT)) {
        return di_json_copy(value);
    }
    bool is_object = place == PLACE_SCHEMA && is_object_schema(value);
    di_json *out = di_json_new_object();
    bool ok = out != NULL;
    for (void *it = di_json_iter(value); it && ok; it = di_json_iter_next(value, it)) {
        size_t key_len;
        const char *key = di_json_iter_key(it, &key_len);
        if (strlen(key) != key_len) {
            /* A key with NUL can't be set: such a schema stays as it came. */
            di_json_free(out);
            return di_json_copy(value);
        }
        if (is_object && strcmp(key, "required") == 0) {
            continue;
        }
        if (is_object && strcmp(key, "additionalProperties") == 0) {
            ok = di_json_set(out, key, di_json_new_bool(false));
        } else {
            schema_place inner = place == PLACE_MAP ? PLACE_SCHEMA : place_of(key);
            ok = di_json_set(out, key, normalise(di_json_iter_value(it), inner));
        }
    }
    if (ok && is_object) {
        ok = di_json_set(out, "additionalProperties", di_json_new_bool(false)) &&
             di_json_set(out, "required", property_names(value));
    }
    if (!ok) {
        di_json_free(out);
        return NULL;
    }
    return out;
}

di_json *di_chat_strict_schema(const di_json *schema) {
    return normalise(schema, PLACE_SCHEMA);
}
