/* The grammar of a whole output of the chat format: thinking, content, tool calls.
 *
 *   output   = [thinking </think>] (content | content calls | calls)
 *   calls    = <|DSML| calls> LF  invoke (LF invoke)*  LF </|DSML| calls>
 *   invoke   = <|DSML| invoke name="NAME"> LF  [parameter (LF parameter)*]  LF </|DSML| invoke>
 *   parameter= <|DSML| parameter name="KEY" string="true"> TEXT </|DSML| parameter>
 *            | <|DSML| parameter name="KEY" string="false"> JSON </|DSML| parameter>
 *
 * Thinking is free up to its end mark. Content is free, or follows a format; what opens a block of calls ends it. The
 * parameters of an invocation follow its tool's schema: a string stands there as it is, everything else as JSON, in the
 * order of the schema, with those that are not required left out or not. Nothing comes behind the block.
 *
 * What is read is a JSON object:
 *   thinking  true: the output begins inside the thinking
 *   opened    true: the prompt ends behind the line that opens the block of calls
 *   calls     "none", "auto" or "required"
 *   tools     [{"name": .., "parameters": {..}?, "strict": true?}], with calls other than none; each may be the
 *             value of a key "function"
 *   content   {"schema": ..} | {"regex": ".."} | {"ebnf": ".."} | {"choice": [..]} | {"object": true}; absent: free
 *   lax       true: of the content's schema, keywords that can't be guaranteed are left out
 * A tool's schema is taken as it can be had unless the tool is strict: the model is to have its way rather than the
 * request to be refused. */
#include "ir.h"

#define DSML                                                                                                           \
    "\xef\xbd\x9c"                                                                                                     \
    "DSML"                                                                                                             \
    "\xef\xbd\x9c"
#define KEY_CODES_MAX 256 /* of a parameter's name where the schema names none */

static const di_node *text_of(di_gram *g, const char *text) {
    return di_node_bytes(g, text, strlen(text));
}

/* "<|DSML| rest" or "</|DSML| rest" */
static const di_node *tag(di_gram *g, bool is_end, const char *rest) {
    const di_node *parts[] = {text_of(g, is_end ? "</" : "<"), di_node_special(g, DSML, strlen(DSML)),
                              text_of(g, rest)};
    return di_node_seq(g, parts, DI_COUNT(parts));
}

/* Any text in which no tag begins, or (is_end) none that closes something. */
static const di_node *text_without_tags(di_gram *g, bool is_end) {
    const di_node *marks[] = {text_of(g, is_end ? "</" DSML : "<" DSML), text_of(g, "</think>")};
    return di_node_free(g, marks, is_end ? 1 : 2);
}

/* ---- parameters ---- */

static const di_node *parameter(di_gram *g, const di_node *name, const di_json *root, const di_json *schema,
                                bool is_lax) {
    const di_node *strings = di_node_schema_part(g, root, schema, is_lax, true, text_without_tags(g, true));
    const di_node *others = di_node_schema_part(g, root, schema, is_lax, false, NULL);
    const di_node *values[] = {di_node_seq2(g, text_of(g, "true\">"), strings),
                               di_node_seq2(g, text_of(g, "false\">"), others)};
    const di_node *parts[] = {tag(g, false, " parameter name=\""), name, text_of(g, "\" string=\""),
                              di_node_alt(g, values, DI_COUNT(values)), tag(g, true, " parameter>")};
    return di_node_seq(g, parts, DI_COUNT(parts));
}

static bool is_in(const di_json *list, const char *text, size_t len) {
    for (size_t i = 0; i < di_json_array_len(list); i++) {
        size_t n;
        const char *s = di_json_str(di_json_at(list, i), &n);
        if (s && n == len && memcmp(s, text, len) == 0)
            return true;
    }
    return false;
}

/* A name that the schema doesn't have. Quotes and angle brackets would end it early. */
static const di_node *other_name(di_gram *g, const di_json *properties) {
    static const di_code_range out[] = {{0, 0x1F}, {'"', '"'}, {'<', '<'}, {'>', '>'}};
    const di_node *any = di_node_repeat(g, di_node_class(g, out, DI_COUNT(out), true), 1, KEY_CODES_MAX);
    size_t n = 0, n_properties = di_json_object_len(properties);
    if (n_properties == 0)
        return any;
    const di_node **names = di_gram_alloc(g, n_properties * sizeof(di_node *));
    if (!names)
        return di_node_never();
    for (void *it = di_json_iter(properties); it; it = di_json_iter_next(properties, it)) {
        size_t len;
        const char *key = di_json_iter_key(it, &len);
        names[n++] = di_node_bytes(g, key, len);
    }
    /* The bound on the length comes on top: as part of the automaton it would multiply its states. */
    const di_node *unbounded = di_node_repeat(g, di_node_class(g, out, DI_COUNT(out), true), 1, -1);
    return di_regular_node(
        g, di_regular_subtract(g, di_regular_make(g, unbounded), di_regular_make(g, di_node_alt(g, names, n))));
}

/* Declared parameters in their order, then others where the schema lets them in. States 2i and 2i + 1: before parameter
 * i, nothing was written yet, or something was; edges behind something begin with a line feed. */
static const di_node *parameters(di_gram *g, const di_json *schema, bool is_lax) {
    const di_json *properties = di_json_get(schema, "properties"), *required = di_json_get(schema, "required");
    const di_json *additional = di_json_get(schema, "additionalProperties");
    int32_t n = (int32_t)di_json_object_len(properties), n_states = 2 * (n + 1);
    bool is_open = additional ? !(di_json_is(additional, DI_JSON_BOOL) && !di_json_bool(additional)) : n == 0;
    di_graph_edge *edges = di_gram_alloc(g, (size_t)(4 * n + 2) * sizeof *edges);
    bool *accepting = di_gram_alloc(g, (size_t)n_states * sizeof *accepting);
    if (!edges || !accepting)
        return di_node_never();
    memset(accepting, 0, (size_t)n_states * sizeof *accepting);
    accepting[2 * n] = accepting[2 * n + 1] = true;
    size_t n_edges = 0;
    int32_t i = 0;
    const di_node *lf = text_of(g, "\n");
    for (void *it = di_json_iter(properties); it; it = di_json_iter_next(properties, it), i++) {
        size_t len;
        const char *key = di_json_iter_key(it, &len);
        const di_node *p = parameter(g, di_node_bytes(g, key, len), schema, di_json_iter_value(it), is_lax);
        edges[n_edges++] = (di_graph_edge){2 * i, 2 * i + 3, p};
        edges[n_edges++] = (di_graph_edge){2 * i + 1, 2 * i + 3, di_node_seq2(g, lf, p)};
        if (is_in(required, key, len))
            continue;
        edges[n_edges++] = (di_graph_edge){2 * i, 2 * i + 2, di_node_empty()};
        edges[n_edges++] = (di_graph_edge){2 * i + 1, 2 * i + 3, di_node_empty()};
    }
    if (is_open) {
        const di_node *p = parameter(g, other_name(g, properties), schema, additional, is_lax);
        edges[n_edges++] = (di_graph_edge){2 * n, 2 * n + 1, p};
        edges[n_edges++] = (di_graph_edge){2 * n + 1, 2 * n + 1, di_node_seq2(g, lf, p)};
    }
    return di_node_graph(g, n_states, accepting, edges, n_edges);
}

/* ---- calls ---- */

/* Whether parameters by this schema can be compiled, tried in a grammar of its own. */
static bool can_be_had(di_gram *g, const di_json *schema) {
    di_gram trial;
    di_gram_init(&trial, &g->limits);
    trial.deadline_ns = DI_MIN(trial.deadline_ns, g->deadline_ns);
    const di_node *node = parameters(&trial, schema, true);
    bool is_good = di_gram_status(&trial, NULL) == DI_OK && node->kind != DI_NODE_NEVER;
    di_gram_deinit(&trial);
    return is_good;
}

/* A keyword of the parameters' schema that `parameters` does not follow; NULL: there is none. */
static const char *unfollowed(const di_json *schema) {
    static const char *const keys[] = {"$ref",
                                       "$dynamicRef",
                                       "$recursiveRef",
                                       "allOf",
                                       "anyOf",
                                       "oneOf",
                                       "not",
                                       "if",
                                       "const",
                                       "enum",
                                       "propertyNames",
                                       "dependentSchemas",
                                       "dependentRequired",
                                       "dependencies",
                                       "patternProperties",
                                       "minProperties",
                                       "maxProperties",
                                       "unevaluatedProperties"};
    size_t i = 0;
    while (i < DI_COUNT(keys) && !di_json_get(schema, keys[i]))
        i++;
    return i < DI_COUNT(keys) ? keys[i] : NULL;
}

static const di_node *invocation(di_gram *g, const di_json *tool) {
    size_t len = 0;
    if (di_json_get(tool, "function")) /* as requests have them */
        tool = di_json_get(tool, "function");
    const char *name = di_json_str(di_json_get(tool, "name"), &len);
    if (!name || len == 0) {
        di_gram_fail(g, DI_ERR_REQUEST, "tools: a tool without a name");
        return di_node_never();
    }
    const di_json *schema = di_json_get(tool, "parameters");
    if (di_json_object_len(schema) == 0)
        schema = NULL;
    bool is_strict = di_json_bool(di_json_get(tool, "strict"));
    if (schema && !is_strict && !can_be_had(g, schema))
        schema = NULL;
    const char *key = is_strict ? unfollowed(schema) : NULL;
    if (key) {
        di_gram_fail(g, DI_ERR_REQUEST, "tools: tool '%.*s': /%s: can't be guaranteed beside a tool's parameters",
                     (int)DI_MIN(len, (size_t)64), name, key);
        return di_node_never();
    }
    bool had_failed = di_gram_has_failed(g);
    const di_node *parts[] = {tag(g, false, " invoke name=\""),
                              di_node_bytes(g, name, len),
                              text_of(g, "\">\n"),
                              parameters(g, schema, !is_strict),
                              text_of(g, "\n"),
                              tag(g, true, " invoke>")};
    if (!had_failed)
        (void)di_error_context(&g->error, g->failed, "tools: tool '%.*s'", (int)DI_MIN(len, (size_t)64), name);
    return di_node_seq(g, parts, DI_COUNT(parts));
}

/* Everything behind the line that opens the block. */
static const di_node *calls_behind_opening(di_gram *g, const di_json *tools) {
    size_t n = di_json_array_len(tools);
    const di_node **invocations = di_gram_alloc(g, DI_MAX(n, (size_t)1) * sizeof(di_node *));
    if (!invocations)
        return di_node_never();
    for (size_t i = 0; i < n && !di_gram_status(g, NULL); i++)
        invocations[i] = invocation(g, di_json_at(tools, i));
    if (di_gram_has_failed(g))
        return di_node_never();
    int32_t rule = di_gram_rule_add(g, "invocation", strlen("invocation"));
    if (rule < 0)
        return di_node_never();
    di_gram_rule_define(g, rule, di_node_alt(g, invocations, n));
    const di_node *one = di_node_rule(g, rule);
    const di_node *parts[] = {one, di_node_repeat(g, di_node_seq2(g, text_of(g, "\n"), one), 0, -1), text_of(g, "\n"),
                              tag(g, true, " calls>")};
    return di_node_seq(g, parts, DI_COUNT(parts));
}

/* ---- content ---- */

static di_status content(di_gram *g, const di_json *format, bool is_lax, const di_node **out, di_error *err) {
    const di_json *schema = di_json_get(format, "schema"), *choice = di_json_get(format, "choice");
    size_t len = 0;
    const char *text;
    di_status st;
    if (!format || di_json_object_len(format) == 0) {
        *out = text_without_tags(g, false);
        return DI_OK;
    }
    if (schema)
        st = di_gram_schema(g, schema, is_lax, err);
    else if (choice)
        st = di_gram_choice(g, choice, err);
    else if ((text = di_json_str(di_json_get(format, "regex"), &len)))
        st = di_gram_regex(g, text, len, err);
    else if ((text = di_json_str(di_json_get(format, "ebnf"), &len)))
        st = di_gram_ebnf(g, text, len, err);
    else
        st = di_gram_object(g, err);
    if (!st)
        *out = di_node_rule(g, g->root);
    return st;
}

di_status di_gram_output(di_gram *g, const di_json *output, di_error *err) {
    const di_json *format = di_json_get(output, "content");
    const char *calls = di_json_str(di_json_get(output, "calls"), NULL);
    bool has_calls = calls && strcmp(calls, "none") != 0, is_required = calls && strcmp(calls, "required") == 0;
    const di_node *rest = NULL;
    di_status st = DI_OK;
    if (!is_required)
        st = content(g, format, di_json_bool(di_json_get(output, "lax")), &rest, err);
    if (st)
        return st;
    if (has_calls) {
        const di_node *block = calls_behind_opening(g, di_json_get(output, "tools"));
        if (!di_json_bool(di_json_get(output, "opened")))
            block = di_node_seq2(g, tag(g, false, " calls>\n"), block);
        /* Line feeds before the block belong to free content; before one that stands alone they are let in. */
        const di_node *lfs = di_node_repeat(g, text_of(g, "\n"), 0, 2);
        if (is_required)
            rest = di_json_bool(di_json_get(output, "opened")) ? block : di_node_seq2(g, lfs, block);
        else if (format)
            rest = di_node_alt2(g, rest, di_node_seq2(g, lfs, block));
        else
            rest = di_node_seq2(g, rest, di_node_repeat(g, block, 0, 1));
    }
    if (di_json_bool(di_json_get(output, "thinking"))) {
        const di_node *mark = di_node_special(g, "</think>", strlen("</think>"));
        rest = di_node_seq2(g, di_node_until(g, &mark, 1), rest);
    }
    g->root = di_gram_rule_add(g, "output", strlen("output"));
    if (g->root >= 0)
        di_gram_rule_define(g, g->root, rest);
    return di_gram_status(g, err);
}
