/* Messages and protocol events beyond the recorded vectors: ids, bad input, stop strings, cut calls, custom and
 * namespaced tools, several choices, usage, failures. Forms of events that no vector shows follow the public APIs.
 * Completions are in reply_completions_test.c, log-probabilities in reply_logprobs_test.c. */
#include "harness.h"

#include "api/api.h"

#define BAR "\xef\xbd\x9c"
#define OPEN "<" BAR "DSML" BAR
#define CLOSE "</" BAR "DSML" BAR
#define CALL(name, key, is_string, value)                                                                              \
    OPEN " invoke name=\"" name "\">\n" OPEN " parameter name=\"" key "\" string=\"" is_string "\">" value CLOSE       \
         " parameter>\n" CLOSE " invoke>\n"
#define BLOCK(calls) "\n\n" OPEN " calls>\n" calls CLOSE " calls>"

/* Everything that a stream sent, one event a line: `name data`. */
typedef struct wire {
    di_strbuf text;
    int n_events, fail_at;
} wire;

static di_status receive(void *user, const char *event, const di_json *data, di_error *err) {
    wire *w = user;
    if (++w->n_events == w->fail_at) {
        return di_fail(err, DI_ERR_CANCELLED, "the client has gone");
    }
    di_strbuf_puts(&w->text, event == NULL ? "-" : event);
    di_strbuf_putc(&w->text, ' ');
    if (data == NULL) {
        di_strbuf_puts(&w->text, "[DONE]");
    } else {
        di_json_write(&w->text, data, DI_JSON_COMPACT);
    }
    di_strbuf_putc(&w->text, '\n');
    return DI_OK;
}

static const di_reply_usage used = {
    .prompt_tokens = 10, .cached_tokens = 4, .completion_tokens = 6, .reasoning_tokens = 2};

typedef struct rig {
    wire wire;
    di_reply_stream *stream;
    di_parser *parser;
} rig;

static void rig_open(rig *r, di_reply_protocol protocol, const di_reply_head *head) {
    di_error err;
    *r = (rig){0};
    di_test_ok(di_reply_stream_create(&r->stream, protocol, head, receive, &r->wire, &err), &err);
    di_parser_options options = {.stage = head->has_reasoning ? DI_CHAT_STAGE_REASONING : DI_CHAT_STAGE_CONTENT,
                                 .has_tools = true};
    di_test_ok(di_parser_create(&r->parser, &options, di_reply_stream_push, r->stream, &err), &err);
    di_test_ok(di_reply_stream_start(r->stream, &used, &err), &err);
    di_strbuf_reset(&r->wire.text); /* the opening is the vectors' business */
}

static void rig_push(rig *r, const char *text) {
    di_error err;
    di_test_ok(di_parser_push(r->parser, text, strlen(text), &err), &err);
}

static void rig_finish(rig *r, di_finish finish, const di_chat_text *stop_text) {
    di_error err;
    di_test_ok(di_parser_finish(r->parser, &err), &err);
    di_test_ok(
        di_reply_stream_finish(r->stream, di_parser_finish_reason(r->parser, finish), stop_text, &used, 99, &err),
        &err);
}

static void rig_close(rig *r) {
    di_parser_destroy(r->parser);
    di_reply_stream_destroy(r->stream);
    di_strbuf_deinit(&r->wire.text);
}

/* The response as compact text, in a static buffer. */
static const char *response_text(const di_reply_stream *stream) {
    static char text[8192];
    di_json *response = di_reply_stream_response(stream);
    assert_non_null(response);
    di_strbuf out = {0};
    di_json_write(&out, response, DI_JSON_COMPACT);
    assert_true(out.len < sizeof text);
    memcpy(text, out.data, out.len + 1);
    di_strbuf_deinit(&out);
    di_json_free(response);
    return text;
}

static const di_reply_head head_plain = {.id = "id_1", .model = "m", .created_s = 5, .seed = 1};

/* ---- messages ---- */

static void take(di_reply *reply, di_parser_event_kind kind, const char *text, size_t len) {
    di_parser_event event = {.kind = kind, .text = text, .len = len};
    di_error err;
    di_test_ok(di_reply_push(reply, &event, &err), &err);
}

static void message_has_the_form_of_chat_completions(void **state) {
    (void)state;
    di_reply reply;
    di_reply_init(&reply, true, 42);
    take(&reply, DI_PARSER_REASONING, "why", 3);
    take(&reply, DI_PARSER_CALL_BEGIN, "f", 1);
    take(&reply, DI_PARSER_CALL_ARGS, "{", 1);
    take(&reply, DI_PARSER_CALL_ARGS, "}", 1);
    take(&reply, DI_PARSER_CALL_END, "", 0);
    take(&reply, DI_PARSER_CALL_BEGIN, "", 0);
    take(&reply, DI_PARSER_DONE, "", 0);

    di_json *message = di_reply_message(&reply);
    di_strbuf got = {0}, want = {0};
    di_json_write(&got, message, DI_JSON_COMPACT);
    di_strbuf_printf(
        &want,
        "{\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":\"why\",\"tool_calls\":["
        "{\"index\":0,\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}},"
        "{\"index\":1,\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":\"\",\"arguments\":\"\"}}]}",
        reply.calls[0].id, reply.calls[1].id);
    assert_string_equal(got.data, want.data);
    di_json_free(message);

    message = di_reply_parsed(&reply);
    di_strbuf_reset(&got);
    di_json_write(&got, message, DI_JSON_COMPACT);
    assert_string_equal(got.data, "{\"content\":\"\",\"reasoning_content\":\"why\",\"tool_calls\":["
                                  "{\"name\":\"f\",\"arguments\":\"{}\"},{\"name\":\"\",\"arguments\":\"\"}]}");
    di_json_free(message);
    di_strbuf_deinit(&got);
    di_strbuf_deinit(&want);
    di_reply_deinit(&reply);
}

static void message_of_nothing(void **state) {
    (void)state;
    di_reply reply = {0};
    di_json *message = di_reply_message(&reply);
    di_strbuf got = {0};
    di_json_write(&got, message, DI_JSON_COMPACT);
    assert_string_equal(got.data, "{\"role\":\"assistant\",\"content\":\"\"}");
    di_strbuf_deinit(&got);
    di_json_free(message);
    di_reply_deinit(&reply);
}

static void ill_formed_text_is_repaired_as_a_whole(void **state) {
    (void)state;
    di_reply reply = {0};
    take(&reply, DI_PARSER_CONTENT, "a\xe4\xb8", 3);
    take(&reply, DI_PARSER_CONTENT, "\x96\xff", 2);
    di_json *message = di_reply_parsed(&reply);
    assert_string_equal(di_json_str(di_json_get(message, "content"), NULL), "a\xe4\xb8\x96\xef\xbf\xbd");
    di_json_free(message);
    di_reply_deinit(&reply);
}

static void ids_come_from_the_seed(void **state) {
    (void)state;
    di_reply a, b, c;
    di_reply_init(&a, false, 7);
    di_reply_init(&b, false, 7);
    di_reply_init(&c, false, 8);
    for (int i = 0; i < 120; i++) {
        take(&a, DI_PARSER_CALL_BEGIN, "f", 1);
        take(&b, DI_PARSER_CALL_BEGIN, "f", 1);
        take(&c, DI_PARSER_CALL_BEGIN, "f", 1);
    }
    for (size_t i = 0; i < 120; i++) {
        const char *id = a.calls[i].id;
        assert_string_equal(id, b.calls[i].id);
        assert_string_not_equal(id, c.calls[i].id);
        char prefix[16];
        snprintf(prefix, sizeof prefix, "call_%02zu_", i);
        assert_memory_equal(id, prefix, strlen(prefix));
        assert_int_equal(strlen(id), strlen(prefix) + 24);
        assert_int_equal(strspn(id + strlen(prefix), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"),
                         24);
        for (size_t j = 0; j < i; j++) {
            assert_string_not_equal(id + strlen(id) - 24, a.calls[j].id + strlen(a.calls[j].id) - 24);
        }
    }
    di_reply_deinit(&a);
    di_reply_deinit(&b);
    di_reply_deinit(&c);
}

/* ---- chat completions ---- */

static void chat_says_usage_only_when_asked_or_last(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_CHAT, &head_plain);
    rig_push(&r, "hi");
    rig_finish(&r, DI_FINISH_STOP, NULL);
    assert_string_equal(
        r.wire.text.data,
        "- "
        "{\"id\":\"id_1\",\"object\":\"chat.completion.chunk\",\"created\":5,\"model\":\"m\",\"system_fingerprint\":"
        "null,"
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"logprobs\":null,\"finish_reason\":null}]}\n"
        "- "
        "{\"id\":\"id_1\",\"object\":\"chat.completion.chunk\",\"created\":5,\"model\":\"m\",\"system_fingerprint\":"
        "null,"
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
        "\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":6,\"total_tokens\":16,"
        "\"prompt_tokens_details\":{\"cached_tokens\":4},\"prompt_cache_hit_tokens\":4,\"prompt_cache_miss_tokens\":6}}"
        "\n"
        "- [DONE]\n");
    rig_close(&r);
}

static void chat_joins_several_choices(void **state) {
    (void)state;
    rig r[2];
    di_error err;
    for (int i = 0; i < 2; i++) {
        di_reply_head head = head_plain;
        head.choice_id = i;
        rig_open(&r[i], DI_REPLY_CHAT, &head);
        rig_push(&r[i], i == 0 ? "a" : "b");
        di_test_ok(di_parser_finish(r[i].parser, &err), &err);
        di_test_ok(di_reply_stream_finish(r[i].stream, DI_FINISH_STOP, NULL, i == 0 ? NULL : &used, 0, &err), &err);
    }
    assert_null(strstr(r[0].wire.text.data, "usage"));
    assert_null(strstr(r[0].wire.text.data, "[DONE]"));
    assert_contains(r[1].wire.text.data, "\"choices\":[{\"index\":1,");
    assert_contains(r[1].wire.text.data, "[DONE]");
    const di_reply_stream *both[] = {r[0].stream, r[1].stream};
    di_json *response = di_reply_choices_response(both, 2, &used);
    const di_json *choices = di_json_get(response, "choices");
    assert_int_equal(di_json_array_len(choices), 2);
    for (size_t i = 0; i < 2; i++) {
        const di_json *choice = di_json_at(choices, i);
        assert_int_equal(di_json_int(di_json_get(choice, "index")), i);
        assert_string_equal(di_json_str(di_json_get(di_json_get(choice, "message"), "content"), NULL),
                            i == 0 ? "a" : "b");
    }
    di_json_free(response);
    rig_close(&r[0]);
    rig_close(&r[1]);
}

static void chat_usage_has_details_on_demand(void **state) {
    (void)state;
    rig r;
    di_error err;
    di_reply_head head = head_plain;
    head.has_details = true;
    const di_reply_usage usage = {.prompt_tokens = 10,
                                  .cached_tokens = 4,
                                  .completion_tokens = 6,
                                  .reasoning_tokens = 2,
                                  .accepted_tokens = 3,
                                  .rejected_tokens = 1};
    static const char want[] =
        "\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":6,\"total_tokens\":16,"
        "\"prompt_tokens_details\":{\"cached_tokens\":4},\"completion_tokens_details\":{\"reasoning_tokens\":2,"
        "\"accepted_prediction_tokens\":3,\"rejected_prediction_tokens\":1},\"prompt_cache_hit_tokens\":4,";
    rig_open(&r, DI_REPLY_CHAT, &head);
    di_test_ok(di_parser_finish(r.parser, &err), &err);
    di_test_ok(di_reply_stream_finish(r.stream, DI_FINISH_STOP, NULL, &usage, 0, &err), &err);
    assert_contains(r.wire.text.data, want);
    assert_contains(response_text(r.stream), want);
    rig_close(&r);
}

static void chat_failure_is_an_error_object(void **state) {
    (void)state;
    rig r;
    di_error err;
    rig_open(&r, DI_REPLY_CHAT, &head_plain);
    di_test_ok(di_reply_stream_fail(r.stream, DI_ERR_INTERNAL, "it broke", &err), &err);
    assert_string_equal(r.wire.text.data,
                        "- {\"error\":{\"message\":\"it broke\",\"type\":\"server_error\",\"param\":null,"
                        "\"code\":\"server_error\"}}\n- [DONE]\n");
    rig_close(&r);
}

static void a_gone_client_ends_the_parse(void **state) {
    (void)state;
    rig r;
    di_error err = {0};
    rig_open(&r, DI_REPLY_CHAT, &head_plain);
    r.wire.fail_at = r.wire.n_events + 1;
    assert_int_equal(di_parser_push(r.parser, "hi", 2, &err), DI_ERR_CANCELLED);
    assert_string_equal(err.message, "the client has gone");
    rig_close(&r);
}

static void without_a_sink_a_stream_gathers(void **state) {
    (void)state;
    for (int protocol = DI_REPLY_CHAT; protocol <= DI_REPLY_COMPLETIONS; protocol++) {
        di_reply_stream *stream;
        di_parser *parser;
        di_error err;
        di_test_ok(di_reply_stream_create(&stream, (di_reply_protocol)protocol, &head_plain, NULL, NULL, &err), &err);
        di_parser_options options = {.stage = DI_CHAT_STAGE_CONTENT};
        di_test_ok(di_parser_create(&parser, &options, di_reply_stream_push, stream, &err), &err);
        di_test_ok(di_reply_stream_start(stream, &used, &err), &err);
        di_test_ok(di_parser_push(parser, "gathered", 8, &err), &err);
        di_test_ok(di_parser_finish(parser, &err), &err);
        di_test_ok(di_reply_stream_finish(stream, DI_FINISH_STOP, NULL, &used, 0, &err), &err);
        assert_contains(response_text(stream), "gathered");
        di_parser_destroy(parser);
        di_reply_stream_destroy(stream);
    }
}

/* ---- Anthropic messages ---- */

static void messages_name_the_stop_string(void **state) {
    (void)state;
    rig r;
    const di_chat_text stop = {"END", 3};
    rig_open(&r, DI_REPLY_MESSAGES, &head_plain);
    rig_push(&r, "hi");
    rig_finish(&r, DI_FINISH_STOP, &stop);
    assert_contains(r.wire.text.data, "\"delta\":{\"stop_reason\":\"stop_sequence\",\"stop_sequence\":\"END\"},"
                                      "\"usage\":{\"input_tokens\":6,\"cache_creation_input_tokens\":0,"
                                      "\"cache_read_input_tokens\":4,\"output_tokens\":6,");
    assert_contains(response_text(r.stream), "\"stop_reason\":\"stop_sequence\",\"stop_sequence\":\"END\"");
    rig_close(&r);
}

static void messages_input_of_bad_arguments_is_empty(void **state) {
    (void)state;
    static const struct {
        const char *text, *input;
    } cases[] = {{BLOCK(CALL("f", "a", "false", "{broken")), "{}"},
                 {BLOCK(CALL("f", "a", "false", "18446744073709551615")), "{\"a\":18446744073709551615}"},
                 {BLOCK(CALL("f", "a", "true", "x")), "{\"a\":\"x\"}"},
                 {"\n\n" OPEN " calls>\n" OPEN " invoke name=\"f\">", "{}"}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        rig r;
        rig_open(&r, DI_REPLY_MESSAGES, &head_plain);
        rig_push(&r, cases[i].text);
        rig_finish(&r, DI_FINISH_STOP, NULL);
        char want[200];
        snprintf(want, sizeof want, "\"name\":\"f\",\"input\":%s}],\"stop_reason\":\"tool_use\"", cases[i].input);
        assert_contains(response_text(r.stream), want);
        rig_close(&r);
    }
}

static void messages_failure_is_an_error_event(void **state) {
    (void)state;
    static const struct {
        di_status status;
        const char *type;
    } cases[] = {
        {DI_ERR_INTERNAL, "api_error"}, {DI_ERR_BUSY, "overloaded_error"}, {DI_ERR_REQUEST, "invalid_request_error"}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        rig r;
        di_error err;
        char want[200];
        rig_open(&r, DI_REPLY_MESSAGES, &head_plain);
        di_test_ok(di_reply_stream_fail(r.stream, cases[i].status, "it broke", &err), &err);
        snprintf(want, sizeof want, "error {\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":\"it broke\"}}\n",
                 cases[i].type);
        assert_string_equal(r.wire.text.data, want);
        rig_close(&r);
    }
}

/* ---- Responses ---- */

static di_json *parse_json(const char *text) {
    di_json *value;
    di_error err;
    di_test_ok(di_json_parse(&value, text, strlen(text), &err), &err);
    return value;
}

static void responses_tell_a_cut_call(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_RESPONSES, &head_plain);
    rig_push(&r, "\n\n" OPEN " calls>\n" CALL("f", "a", "false", "1") OPEN " invoke name=\"g\">\n" OPEN
                                                                           " parameter name=\"b\" string=\"true\">x");
    rig_finish(&r, DI_FINISH_LENGTH, NULL);
    di_json *response = di_reply_stream_response(r.stream);
    const di_json *output = di_json_get(response, "output");
    assert_int_equal(di_json_array_len(output), 2);
    assert_string_equal(di_json_str(di_json_get(di_json_at(output, 0), "status"), NULL), "completed");
    assert_string_equal(di_json_str(di_json_get(di_json_at(output, 1), "status"), NULL), "incomplete");
    assert_string_equal(di_json_str(di_json_get(di_json_at(output, 1), "arguments"), NULL), "{\"b\": \"x");
    assert_string_equal(di_json_str(di_json_get(response, "status"), NULL), "incomplete");
    assert_contains(r.wire.text.data, "response.incomplete {");
    di_json_free(response);
    rig_close(&r);
}

static void responses_split_namespaces_and_unwrap_custom_tools(void **state) {
    (void)state;
    di_json *request =
        parse_json("{\"tools\":[{\"type\":\"namespace\",\"name\":\"crm\",\"description\":\"d\",\"tools\":["
                   "{\"type\":\"function\",\"name\":\"lookup\"}]},"
                   "{\"type\":\"custom\",\"name\":\"apply_patch\"}]}");
    di_reply_head head = head_plain;
    head.request = request;
    rig r;
    rig_open(&r, DI_REPLY_RESPONSES, &head);
    rig_push(&r, BLOCK(CALL("crm::lookup", "id", "false", "3") CALL("apply_patch", "input", "true", "*** \"x\"\n")
                           CALL("crm::other", "id", "false", "4")));
    rig_finish(&r, DI_FINISH_STOP, NULL);
    assert_contains(r.wire.text.data, "\"delta\":\"*** \\\"x\\\"\\n\"");
    assert_contains(r.wire.text.data,
                    "response.custom_tool_call_input.done {\"type\":\"response.custom_tool_call_input.done\","
                    "\"input\":\"*** \\\"x\\\"\\n\",");
    di_json *response = di_reply_stream_response(r.stream);
    const di_json *output = di_json_get(response, "output"), *call = di_json_at(output, 0);
    assert_int_equal(di_json_array_len(output), 3);
    assert_string_equal(di_json_str(di_json_get(call, "namespace"), NULL), "crm");
    assert_string_equal(di_json_str(di_json_get(call, "name"), NULL), "lookup");
    assert_string_equal(di_json_str(di_json_get(call, "arguments"), NULL), "{\"id\": 3}");
    call = di_json_at(output, 1);
    assert_string_equal(di_json_str(di_json_get(call, "type"), NULL), "custom_tool_call");
    assert_string_equal(di_json_str(di_json_get(call, "input"), NULL), "*** \"x\"\n");
    call = di_json_at(output, 2); /* no such tool in the namespace: the name stays as the model wrote it */
    assert_string_equal(di_json_str(di_json_get(call, "name"), NULL), "crm::other");
    assert_null(di_json_get(call, "namespace"));
    di_json_free(response);
    rig_close(&r);
    di_json_free(request);
}

static void responses_repeat_the_request(void **state) {
    (void)state;
    di_json *request = parse_json(
        "{\"instructions\":\"i\",\"max_output_tokens\":9,\"temperature\":0,\"top_p\":0.5,\"tool_choice\":\"none\","
        "\"text\":{\"format\":{\"type\":\"json_object\"}},\"metadata\":{\"a\":\"b\"},\"user\":null,\"parallel_tool_"
        "calls\":false}");
    di_reply_head head = head_plain;
    head.request = request;
    rig r;
    rig_open(&r, DI_REPLY_RESPONSES, &head);
    rig_finish(&r, DI_FINISH_STOP, NULL);
    const char *text = response_text(r.stream);
    assert_contains(text, "\"created_at\":5,\"status\":\"completed\",\"background\":false,\"completed_at\":99,");
    assert_contains(text, "\"instructions\":\"i\",\"max_output_tokens\":9,");
    assert_contains(text, "\"parallel_tool_calls\":false,");
    assert_contains(text, "\"temperature\":0.0,\"text\":{\"format\":{\"type\":\"json_object\"},\"verbosity\":null},"
                          "\"tool_choice\":\"none\",\"tools\":[],");
    assert_contains(text, "\"top_p\":0.5,");
    assert_contains(text, "\"output_tokens_details\":{\"reasoning_tokens\":2}");
    assert_contains(text, "\"user\":null,\"metadata\":{\"a\":\"b\"}}");
    rig_close(&r);
    di_json_free(request);
}

static void responses_failure_closes_the_item(void **state) {
    (void)state;
    rig r;
    di_error err;
    rig_open(&r, DI_REPLY_RESPONSES, &head_plain);
    rig_push(&r, "par");
    di_strbuf_reset(&r.wire.text);
    di_test_ok(di_reply_stream_fail(r.stream, DI_ERR_INTERNAL, "it broke", &err), &err);
    assert_contains(r.wire.text.data, "response.output_item.done {");
    assert_contains(r.wire.text.data, "\"status\":\"incomplete\",\"role\":\"assistant\"");
    assert_contains(r.wire.text.data, "response.failed {");
    assert_contains(r.wire.text.data, "\"status\":\"failed\",");
    assert_contains(r.wire.text.data, "\"error\":{\"code\":\"server_error\",\"message\":\"it broke\"}");
    rig_close(&r);
}

DI_TEST_GROUP(reply, cmocka_unit_test(message_has_the_form_of_chat_completions), cmocka_unit_test(message_of_nothing),
              cmocka_unit_test(ill_formed_text_is_repaired_as_a_whole), cmocka_unit_test(ids_come_from_the_seed),
              cmocka_unit_test(chat_says_usage_only_when_asked_or_last),
              cmocka_unit_test(chat_usage_has_details_on_demand), cmocka_unit_test(chat_joins_several_choices),
              cmocka_unit_test(chat_failure_is_an_error_object), cmocka_unit_test(a_gone_client_ends_the_parse),
              cmocka_unit_test(without_a_sink_a_stream_gathers), cmocka_unit_test(messages_name_the_stop_string),
              cmocka_unit_test(messages_input_of_bad_arguments_is_empty),
              cmocka_unit_test(messages_failure_is_an_error_event), cmocka_unit_test(responses_tell_a_cut_call),
              cmocka_unit_test(responses_split_namespaces_and_unwrap_custom_tools),
              cmocka_unit_test(responses_repeat_the_request), cmocka_unit_test(responses_failure_closes_the_item));
