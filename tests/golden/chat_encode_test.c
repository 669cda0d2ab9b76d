/* Request bodies against tests/data/vectors/chat_encode.jsonl, whose first line says what its fields are and which
 * implementation made them, and image sizes against image_tokens.jsonl.
 *
 * The rows record the hosted service: under vendor_compat every row gives its prompt, special ranges, parser options,
 * sampling parameters, constraint and images, or its refusal. By our own rules, prompt and ids are the same for every
 * row that states its thinking mode and is not refused. Ids need the official tokenizer, which is not part of the
 * repository. */
#include "harness.h"

#include "api/api.h"
#include "vectors.h"

enum { N_ROWS = 323, N_REFUSED = 69, N_IMAGE_ROWS = 349 };

static const di_json *need(const di_json *object, const char *key) {
    const di_json *v = di_json_get(object, key);
    assert_non_null(v);
    return v;
}

static const char *string_of(const di_json *object, const char *key) {
    const char *s = di_json_str(need(object, key), NULL);
    assert_non_null(s);
    return s;
}

static void assert_text(di_chat_text got, const char *want) {
    assert_int_equal(got.len, strlen(want));
    assert_memory_equal(got.len ? got.data : "", want, got.len);
}

/* The row at work, named where a test fails. */
static char row_id[32];

static void note_row(const di_json *row) {
    (void)snprintf(row_id, sizeof row_id, "%s", string_of(row, "id"));
}

static int say_row(void **state) {
    (void)state;
    print_message("[   ROWS   ] to %s\n", row_id);
    return 0;
}

/* ------------------------------------------------------------------ rows as requests */

static di_request_options options_of(const di_json *row, bool vendor_compat) {
    const di_json *given = need(row, "options");
    di_request_options options;
    di_request_options_init(&options, vendor_compat);
    const di_json *thinking = di_json_get(given, "default_thinking");
    if (thinking && !di_json_bool(thinking)) {
        options.effort_default = 0;
    }
    options.require_reasoning = di_json_get(given, "reasoning_content") != NULL;
    options.refuse_web_search = di_json_get(given, "responses_web_search") != NULL;
    options.drop_server_tools = di_json_get(given, "messages_web_search") != NULL;
    return options;
}

static di_status parse_row(const di_json *row, bool vendor_compat, di_request *request, di_error *err) {
    di_request_options options = options_of(row, vendor_compat);
    di_api_kind api;
    assert_true(di_api_kind_parse(string_of(row, "api"), &api));
    di_strbuf body = {0};
    di_json_write(&body, need(row, "request"), DI_JSON_COMPACT);
    di_status st = di_request_parse(request, api, body.data, body.len, &options, err);
    di_strbuf_deinit(&body);
    return st;
}

static void check_refusal(const di_json *row, const di_request *request, di_status st, const di_error *err) {
    const di_json *want = need(need(row, "expect"), "error");
    assert_int_equal(st, DI_ERR_REQUEST);
    if (strcmp(string_of(want, "kind"), "invalid_body") == 0) {
        assert_int_equal(request->refusal, DI_REFUSAL_BODY);
        assert_contains(err->message, "invalid request body: ");
        assert_true(request->param[0] != '\0');
        return;
    }
    assert_int_equal(request->refusal, DI_REFUSAL_CONVERSION);
    assert_int_equal(di_status_http(st), di_json_int(need(want, "status")));
    di_strbuf got_text = {0};
    di_json *got = NULL;
    di_error local;
    di_request_error_json(&got_text, request, st, err);
    di_test_ok(di_json_parse(&got, got_text.data, got_text.len, &local), &local);
    const di_json *body = need(need(want, "body"), "error");
    assert_string_equal(string_of(got, "message"), string_of(body, "message"));
    assert_true(di_json_equal(got, body));
    di_json_free(got);
    di_strbuf_deinit(&got_text);
}

static void check_prompt(const di_json *want, const di_prompt *prompt) {
    size_t len;
    const char *text = di_json_str(need(want, "prompt"), &len);
    assert_string_equal(di_strbuf_str(&prompt->text), text);
    assert_int_equal(prompt->text.len, len);
    const di_json *special = need(want, "special");
    assert_int_equal(prompt->n_marks, di_json_array_len(special));
    for (size_t i = 0; i < prompt->n_marks; i++) {
        const di_json *range = di_json_at(special, i);
        assert_int_equal(prompt->marks[i].begin, di_json_int(di_json_at(range, 0)));
        assert_int_equal(prompt->marks[i].end, di_json_int(di_json_at(range, 1)));
    }
}

static void check_ids(const di_json *want, const di_ids *got) {
    const di_json *ids = need(want, "ids");
    assert_int_equal(got->len, di_json_array_len(ids));
    for (size_t i = 0; i < got->len; i++) {
        assert_int_equal(got->data[i], di_json_int(di_json_at(ids, i)));
    }
}

/* ------------------------------------------------------------------ what a row says beside its prompt */

static void check_parse(const di_json *want, const di_parser_options *got) {
    static const char *const stages[] = {[DI_CHAT_STAGE_REASONING] = "reasoning_start",
                                         [DI_CHAT_STAGE_REASONING_RESUMED] = "reasoning_continuation",
                                         [DI_CHAT_STAGE_CONTENT_RESUMED] = "content_continuation"};
    const char *initial = di_json_str(need(want, "initial"), NULL);
    if (initial) {
        assert_non_null(stages[got->stage]);
        assert_string_equal(stages[got->stage], initial);
    } else {
        assert_int_equal(got->stage, DI_CHAT_STAGE_CONTENT);
    }
    assert_int_equal(got->has_tools, di_json_bool(need(want, "parse_tool_calls")));
    assert_int_equal(got->starts_in_calls, di_json_bool(need(want, "starts_in_tool_calls")));
    assert_int_equal(got->is_json, di_json_bool(need(want, "parse_json_output")));
    const di_json *stop = need(want, "stop");
    assert_int_equal(got->n_stop, di_json_array_len(stop));
    for (size_t i = 0; i < got->n_stop; i++) {
        assert_text((di_chat_text){got->stop[i], got->stop_len[i]}, di_json_str(di_json_at(stop, i), NULL));
    }
}

static void check_sampling(const di_json *want, const di_request *got) {
    const di_sampling *s = &got->sampling;
    assert_int_equal(s->max_tokens, di_json_int(need(want, "max_tokens"))); /* null: 0 */
    assert_true(s->temperature == di_json_number(need(want, "temperature")));
    assert_true(s->top_p == di_json_number(need(want, "top_p")));
    bool has_logprobs = di_json_bool(need(want, "logprobs"));
    assert_int_equal(s->n_logprobs, has_logprobs ? di_json_int(need(want, "top_logprobs")) : -1);
    assert_int_equal(s->has_seed, di_json_is(need(want, "seed"), DI_JSON_INT));
    assert_int_equal(s->seed, di_json_uint(need(want, "seed")));
    assert_int_equal(got->n, 1);
}

static void check_constraint(const di_json *want, const di_request *got) {
    static const char *const kinds[] = {[DI_CONSTRAINT_JSON] = "json",
                                        [DI_CONSTRAINT_REGEX] = "regex",
                                        [DI_CONSTRAINT_TOOL_CALL] = "tool_call",
                                        [DI_CONSTRAINT_TOOL_CALL_REQUIRED] = "tool_call_required"};
    if (di_json_is(want, DI_JSON_NULL)) {
        assert_int_equal(got->constraint, DI_CONSTRAINT_NONE);
        return;
    }
    assert_non_null(kinds[got->constraint]);
    assert_string_equal(kinds[got->constraint], string_of(want, "kind"));
    assert_text(got->constraint_text, string_of(want, "schema"));
}

static void check_images(const di_json *want, const di_request *got) {
    static const char *const details[] = {[DI_CHAT_DETAIL_HIGH] = "high",
                                          [DI_CHAT_DETAIL_LOW] = "low",
                                          [DI_CHAT_DETAIL_ORIGINAL] = "original",
                                          [DI_CHAT_DETAIL_AUTO] = "auto"};
    assert_int_equal(got->n_images, di_json_array_len(want));
    for (size_t i = 0; i < got->n_images; i++) {
        const di_json *image = di_json_at(want, i);
        assert_text(got->images[i]->text, string_of(image, "source"));
        assert_text(got->images[i]->path, string_of(image, "path"));
        assert_string_equal(details[got->images[i]->detail], string_of(image, "detail"));
    }
}

static void check_namespaces(const di_json *want, const di_request *got) {
    assert_int_equal(got->n_namespace_tools, di_json_object_len(want));
    for (size_t i = 0; i < got->n_namespace_tools; i++) {
        const di_namespace_tool *tool = &got->namespace_tools[i];
        const di_json *names = need(want, tool->full.data);
        assert_text(tool->space, di_json_str(di_json_at(names, 0), NULL));
        assert_text(tool->tool, di_json_str(di_json_at(names, 1), NULL));
    }
}

static void check_request(const di_json *want, const di_request *got) {
    static const char *const choices[] = {
        [DI_CHAT_CHOICE_AUTO] = "auto", [DI_CHAT_CHOICE_NONE] = "none", [DI_CHAT_CHOICE_REQUIRED] = "required"};
    static const struct {
        const char *name;
        int effort;
    } efforts[] = {{"low", 50}, {"high", 75}, {"xhigh", 75}, {"max", 100}};
    assert_int_equal(got->chat.thinking, di_json_bool(need(want, "thinking")));
    const char *effort = di_json_str(need(want, "effort"), NULL);
    if (effort) {
        size_t i = 0;
        while (strcmp(efforts[i].name, effort) != 0) {
            assert_true(++i < sizeof efforts / sizeof efforts[0]);
        }
        assert_int_equal(got->chat.effort, efforts[i].effort);
    }
    assert_string_equal(choices[got->chat.tool_choice], string_of(want, "tool_choice"));
    check_parse(need(want, "parse"), &got->parse);
    check_sampling(need(want, "sampling"), got);
    check_constraint(need(want, "constraint"), got);
    check_images(need(want, "images"), got);
    check_namespaces(di_json_get(want, "namespace_tools"), got);
    assert_int_equal(got->is_stream, di_json_bool(need(want, "stream")));
    int64_t default_tokens = di_json_int(need(want, "default_max_tokens_4k_prompt_1m_ctx"));
    assert_int_equal(di_request_max_tokens(got, 4096, 1 << 20), default_tokens);
}

/* ------------------------------------------------------------------ tests */

typedef struct context {
    const di_tokenizer *tok; /* NULL: ids are not compared */
    di_chat_vocab vocab;
    int n_refused, n_same; /* rows refused, and compared by our own rules */
} context;

static void run_vendor_row(const di_json *row, void *user) {
    context *c = user;
    const di_json *want = need(row, "expect");
    di_request request;
    di_error err = {0};
    note_row(row);
    di_status st = parse_row(row, true, &request, &err);
    if (di_json_get(want, "error")) {
        check_refusal(row, &request, st, &err);
        c->n_refused++;
        di_request_deinit(&request);
        return;
    }
    di_test_ok(st, &err);
    check_request(want, &request);
    di_prompt prompt = {0};
    di_ids ids = {0};
    di_test_ok(di_request_encode(&request, c->tok, &c->vocab, &prompt, c->tok ? &ids : NULL, &err), &err);
    check_prompt(want, &prompt);
    if (c->tok) {
        check_ids(want, &ids);
    }
    di_ids_deinit(&ids);
    di_prompt_deinit(&prompt);
    di_request_deinit(&request);
}

static bool is_there(const di_json *v) {
    return v && !di_json_is(v, DI_JSON_NULL);
}

static bool states_thinking(const di_json *request) {
    return is_there(di_json_get(request, "thinking")) || is_there(di_json_get(request, "reasoning_effort")) ||
           is_there(di_json_get(di_json_get(request, "reasoning"), "effort")) ||
           is_there(di_json_get(di_json_get(request, "output_config"), "effort"));
}

static void run_own_row(const di_json *row, void *user) {
    context *c = user;
    const di_json *want = need(row, "expect");
    if (di_json_get(want, "error") || !states_thinking(need(row, "request"))) {
        return;
    }
    di_request request;
    di_error err = {0};
    note_row(row);
    di_test_ok(parse_row(row, false, &request, &err), &err);
    di_prompt prompt = {0};
    di_ids ids = {0};
    di_test_ok(di_request_encode(&request, c->tok, &c->vocab, &prompt, c->tok ? &ids : NULL, &err), &err);
    check_prompt(want, &prompt);
    if (c->tok) {
        check_ids(want, &ids);
    }
    c->n_same++;
    di_ids_deinit(&ids);
    di_prompt_deinit(&prompt);
    di_request_deinit(&request);
}

static void vendor_rows_match(void **state) {
    (void)state;
    context c = {0};
    assert_int_equal(vectors_each("chat_encode.jsonl", run_vendor_row, &c), N_ROWS);
    assert_int_equal(c.n_refused, N_REFUSED);
}

static void own_rows_match(void **state) {
    (void)state;
    context c = {0};
    assert_int_equal(vectors_each("chat_encode.jsonl", run_own_row, &c), N_ROWS);
    assert_true(c.n_same > 100);
}

static void ids_of_all_rows_match(void **state) {
    (void)state;
    context c = {.tok = vectors_official_tokenizer()};
    if (!c.tok) {
        di_test_skip(VECTORS_NO_OFFICIAL);
    }
    di_error err;
    di_test_ok(di_chat_vocab_init(&c.vocab, c.tok, &err), &err);
    assert_int_equal(vectors_each("chat_encode.jsonl", run_vendor_row, &c), N_ROWS);
    assert_int_equal(vectors_each("chat_encode.jsonl", run_own_row, &c), N_ROWS);
}

static void image_sizes_match(void **state) {
    (void)state;
    FILE *file = fopen(di_test_data("vectors/image_tokens.jsonl"), "r");
    assert_non_null(file);
    char *line = NULL;
    size_t cap = 0;
    int n_rows = 0;
    for (ssize_t n; (n = getline(&line, &cap, file)) > 0;) {
        di_json *row = NULL;
        di_error err;
        di_test_ok(di_json_parse(&row, line, (size_t)n, &err), &err);
        if (di_json_get(row, "width")) { /* the first line describes the file */
            di_image_grid grid;
            int64_t width = di_json_int(need(row, "width")), height = di_json_int(need(row, "height"));
            di_test_ok(di_image_grid_of(width, height, &grid, &err), &err);
            assert_int_equal(grid.n_positions, di_json_int(need(row, "tokens")));
            n_rows++;
        }
        di_json_free(row);
    }
    free(line);
    fclose(file);
    assert_int_equal(n_rows, N_IMAGE_ROWS);
}

DI_TEST_GROUP(chat_encode, cmocka_unit_test_teardown(vendor_rows_match, say_row),
              cmocka_unit_test_teardown(own_rows_match, say_row),
              cmocka_unit_test_teardown(ids_of_all_rows_match, say_row), cmocka_unit_test(image_sizes_match));
