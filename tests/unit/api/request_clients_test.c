/* What clients and routers of other servers send: other names of thinking and reasoning, messages that go on, fields
 * that mean nothing here and must not be in the way, and the forms that the official clients' helpers send. */
#include "harness.h"

#include "api/api.h"

#define USER_HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define BEGIN "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"

static di_request take(di_api_kind api, const char *body) {
    di_request_options options;
    di_request q;
    di_error err;
    di_request_options_init(&options, false);
    if (di_request_parse(&q, api, body, strlen(body), &options, &err)) {
        fail_msg("%s: %s", body, err.message);
    }
    return q;
}

static void assert_taken(di_api_kind api, const char *body) {
    di_request q = take(api, body);
    di_request_deinit(&q);
}

static void assert_refused(di_api_kind api, const char *body, const char *param, const char *message) {
    di_request_options options;
    di_request q;
    di_error err = {0};
    di_request_options_init(&options, false);
    if (di_request_parse(&q, api, body, strlen(body), &options, &err) != DI_ERR_REQUEST) {
        fail_msg("%s: not refused", body);
    }
    assert_string_equal(q.param, param);
    assert_contains(err.message, message);
    di_request_deinit(&q);
}

static void assert_prompt(const di_request *request, const char *want) {
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_request_encode(request, NULL, NULL, &prompt, NULL, &err), &err);
    assert_string_equal(di_strbuf_str(&prompt.text), want);
    di_prompt_deinit(&prompt);
}

/* ------------------------------------------------------------------ thinking by other names */

static void thinking_has_many_names(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        int effort; /* 0: no thinking; 75: high */
    } cases[] = {
        {"\"chat_template_kwargs\":{\"thinking\":true}", 75},
        {"\"chat_template_kwargs\":{\"enable_thinking\":true}", 75},
        {"\"enable_thinking\":true", 75},
        {"\"enable_thinking\":false", 0},
        {"\"chat_template_kwargs\":{}", 0},
        {"\"chat_template_kwargs\":null,\"enable_thinking\":null,\"reasoning\":null", 0},
        {"\"chat_template_kwargs\":{\"thinking\":true,\"reasoning_effort\":20}", 20},
        {"\"chat_template_kwargs\":{\"reasoning_effort\":\"20\"}", 20},
        {"\"chat_template_kwargs\":{\"thinking\":false,\"reasoning_effort\":20}", 0},
        {"\"chat_template_kwargs\":{\"other\":[1],\"thinking\":null},\"enable_thinking\":true", 75},
        {"\"reasoning\":{\"effort\":\"high\"}", 75},
        {"\"reasoning\":{\"effort\":20,\"summary\":\"auto\"}", 20},
        {"\"reasoning\":{\"effort\":\"none\"}", 0},
        {"\"reasoning\":{}", 0},
        /* The object goes before an effort, an effort before the rest, the top before what is inside. */
        {"\"thinking\":{\"type\":\"disabled\"},\"enable_thinking\":true", 0},
        {"\"thinking\":{\"type\":\"enabled\"},\"chat_template_kwargs\":{\"thinking\":false}", 75},
        {"\"thinking\":{\"type\":\"enabled\"},\"chat_template_kwargs\":{\"reasoning_effort\":30}", 30},
        {"\"reasoning_effort\":\"none\",\"enable_thinking\":true", 0},
        {"\"reasoning_effort\":40,\"chat_template_kwargs\":{\"thinking\":false,\"reasoning_effort\":20}", 40},
        {"\"reasoning_effort\":40,\"reasoning\":{\"effort\":20}", 40},
        {"\"reasoning\":{\"effort\":20},\"chat_template_kwargs\":{\"reasoning_effort\":30}", 20},
        {"\"chat_template_kwargs\":{\"thinking\":false},\"enable_thinking\":true", 0},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        char body[400];
        snprintf(body, sizeof body, "{" USER_HI ",%s}", cases[i].fields);
        di_request q = take(DI_API_CHAT, body);
        if (q.chat.thinking != (cases[i].effort > 0) || q.chat.effort != cases[i].effort) {
            fail_msg("%s: thinking %d, effort %d", body, q.chat.thinking, q.chat.effort);
        }
        di_request_deinit(&q);
    }
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"chat_template_kwargs\":5}", "chat_template_kwargs", "an object");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"chat_template_kwargs\":{\"thinking\":1}}",
                   "chat_template_kwargs.thinking", "true or false");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"chat_template_kwargs\":{\"reasoning_effort\":200}}",
                   "chat_template_kwargs.reasoning_effort", "1 to 100");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"enable_thinking\":\"yes\"}", "enable_thinking", "true or false");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"reasoning\":{\"effort\":\"most\"}}", "reasoning.effort",
                   "unknown variant");
}

/* The hosted service does not know these fields, so they mean nothing there. */
static void the_hosted_service_does_not_know_them(void **state) {
    (void)state;
    static const char body[] = "{" USER_HI ",\"thinking\":{\"type\":\"enabled\"},\"enable_thinking\":5,"
                               "\"chat_template_kwargs\":5,\"reasoning\":5,\"continue_final_message\":5}";
    di_request_options options;
    di_request q;
    di_error err;
    di_request_options_init(&options, true);
    di_test_ok(di_request_parse(&q, DI_API_CHAT, body, strlen(body), &options, &err), &err);
    assert_true(q.chat.thinking);
    di_request_deinit(&q);
}

static void reasoning_of_history_has_two_names(void **state) {
    (void)state;
    static const char *const fields[] = {"\"reasoning_content\":\"why\"", "\"reasoning\":\"why\"",
                                         "\"reasoning_content\":null,\"reasoning\":\"why\"",
                                         "\"reasoning_content\":\"why\",\"reasoning\":\"other\""};
    for (size_t i = 0; i < DI_COUNT(fields); i++) {
        char body[400];
        snprintf(body, sizeof body,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"x\",%s},"
                 "{\"role\":\"user\",\"content\":\"y\"}]}",
                 fields[i]);
        di_request q = take(DI_API_CHAT, body);
        assert_true(q.chat.messages[1].has_reasoning);
        assert_int_equal(q.chat.messages[1].reasoning.len, 3);
        assert_memory_equal(q.chat.messages[1].reasoning.data, "why", 3);
        di_request_deinit(&q);
    }
    assert_refused(DI_API_CHAT,
                   "{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"reasoning\":{}},{\"role\":\"user\","
                   "\"content\":\"y\"}]}",
                   "messages[0].reasoning", "expected a string");
}

/* ------------------------------------------------------------------ messages that go on */

static void the_last_message_can_go_on(void **state) {
    (void)state;
    di_request q = take(DI_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
                                     "\"content\":\"Well,\"}],\"continue_final_message\":true,"
                                     "\"add_generation_prompt\":false}");
    assert_prompt(&q, BEGIN "</think>Well,");
    di_request_deinit(&q);
    q = take(DI_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
                          "\"content\":\"Well,\",\"reasoning\":\"so\"}],\"continue_final_message\":true,"
                          "\"enable_thinking\":true}");
    assert_int_equal(q.parse.stage, DI_CHAT_STAGE_CONTENT_RESUMED);
    di_request_deinit(&q);
    /* Said by the message itself as well. */
    q = take(DI_API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":"
                          "\"Well,\",\"prefix\":true}],\"continue_final_message\":true}");
    assert_prompt(&q, BEGIN "</think>Well,");
    di_request_deinit(&q);
    q = take(DI_API_CHAT, "{" USER_HI ",\"continue_final_message\":false,\"add_generation_prompt\":true}");
    assert_prompt(&q, BEGIN "</think>");
    di_request_deinit(&q);

    assert_refused(DI_API_CHAT, "{" USER_HI ",\"continue_final_message\":true}", "continue_final_message",
                   "not the assistant's");
    assert_refused(DI_API_CHAT,
                   "{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\"}],\"continue_final_message\":true,"
                   "\"add_generation_prompt\":true}",
                   "add_generation_prompt", "can't both be true");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"add_generation_prompt\":false}", "add_generation_prompt",
                   "continue_final_message");
    assert_refused(DI_API_CHAT, "{" USER_HI ",\"continue_final_message\":\"yes\"}", "continue_final_message",
                   "true or false");
}

/* ------------------------------------------------------------------ routers */

/* Bodies with what routers add on the way, for one worker and for prefill and decode apart, in the forms of vLLM and of
 * SGLang. */
static void fields_of_routers_are_taken(void **state) {
    (void)state;
    static const char *const added[] = {
        "\"no_stop_trim\":false,\"ignore_eos\":false,\"continue_final_message\":false,\"skip_special_tokens\":true,"
        "\"separate_reasoning\":true,\"stream_reasoning\":true,\"return_hidden_states\":false,"
        "\"include_reasoning\":true",
        "\"stream\":false,\"max_tokens\":1,\"min_tokens\":1,\"kv_transfer_params\":{\"do_remote_decode\":true,"
        "\"do_remote_prefill\":false,\"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,"
        "\"remote_port\":null}",
        "\"stream\":true,\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
        "\"remote_block_ids\":[1,2],\"remote_engine_id\":\"e\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,"
        "\"tp_size\":1}",
        "\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":8998,\"bootstrap_room\":9223372036854775807,"
        "\"max_completion_tokens\":5",
        "\"transfer_id\":\"t\",\"remote_bootstrap_addr\":\"127.0.0.1:1\",\"remote_engine_id\":\"e\"",
        "\"session_params\":{\"session_id\":\"s\"},\"session_id\":\"s\",\"user_id\":\"u\",\"user\":\"u\"",
        "\"rid\":\"r\",\"lora_path\":null,\"regex\":null,\"ebnf\":null,\"stop\":null,\"stop_token_ids\":null,"
        "\"logit_bias\":null,\"top_k\":-1,\"min_p\":0.0,\"repetition_penalty\":1.0,\"priority\":0,"
        "\"frequency_penalty\":0.0,\"presence_penalty\":0.0,\"stream_options\":null,\"tools\":null,"
        "\"tool_choice\":null,\"response_format\":null,\"logprobs\":null,\"top_logprobs\":null,\"n\":null,"
        "\"seed\":null,\"metadata\":null",
    };
    for (size_t i = 0; i < DI_COUNT(added); i++) {
        char body[1000];
        snprintf(body, sizeof body, "{" USER_HI ",\"model\":\"m\",%s}", added[i]);
        assert_taken(DI_API_CHAT, body);
        snprintf(body, sizeof body, "{\"prompt\":\"x\",\"model\":\"m\",%s}", added[i]);
        assert_taken(DI_API_COMPLETIONS, body);
        snprintf(body, sizeof body, "{\"input\":\"x\",\"model\":\"m\",%s}", added[i]);
        assert_taken(DI_API_RESPONSES, body);
        snprintf(body, sizeof body, "{" USER_HI ",\"max_tokens\":5,\"model\":\"m\",%s}", added[i]);
        assert_taken(DI_API_MESSAGES, body);
    }
}

/* ------------------------------------------------------------------ official clients */

#define SCHEMA                                                                                                         \
    "{\"$defs\":{\"Step\":{\"properties\":{\"output\":{\"title\":\"Output\",\"type\":\"string\"}},\"required\":["      \
    "\"output\"],\"title\":\"Step\",\"type\":\"object\",\"additionalProperties\":false}},\"properties\":{\"steps\":{"  \
    "\"items\":{\"$ref\":\"#/$defs/Step\"},\"title\":\"Steps\",\"type\":\"array\"}},\"required\":[\"steps\"],"         \
    "\"title\":\"Out\",\"type\":\"object\",\"additionalProperties\":false}"

static void schemas_of_the_helpers_are_constraints(void **state) {
    (void)state;
    static const struct {
        di_api_kind api;
        const char *body;
    } cases[] = {
        {DI_API_CHAT, "{" USER_HI ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":" SCHEMA
                      ",\"name\":\"Out\",\"strict\":true}}}"},
        {DI_API_RESPONSES, "{\"input\":\"hi\",\"text\":{\"format\":{\"type\":\"json_schema\",\"strict\":true,"
                           "\"name\":\"Out\",\"schema\":" SCHEMA "}}}"},
        {DI_API_MESSAGES, "{" USER_HI ",\"max_tokens\":9,\"output_config\":{\"format\":{\"type\":\"json_schema\","
                          "\"schema\":" SCHEMA "}}}"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_request q = take(cases[i].api, cases[i].body);
        assert_int_equal(q.constraint, DI_CONSTRAINT_JSON);
        assert_int_equal(q.constraint_text.len, strlen(SCHEMA));
        assert_memory_equal(q.constraint_text.data, SCHEMA, strlen(SCHEMA));
        assert_false(q.is_format_lax);
        di_request_deinit(&q);
    }
}

static void what_claude_clients_send_is_taken(void **state) {
    (void)state;
    di_request q = take(
        DI_API_MESSAGES,
        "{\"model\":\"m\",\"max_tokens\":9,\"betas\":[\"context-1m\"],\"metadata\":{\"user_id\":\"u\"},"
        "\"service_tier\":\"auto\",\"container\":null,\"context_management\":{\"edits\":[]},"
        "\"cache_control\":{\"type\":\"ephemeral\"},\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024},"
        "\"output_config\":{\"effort\":\"low\"},"
        "\"system\":[{\"type\":\"text\",\"text\":\"s\",\"cache_control\":{\"type\":\"ephemeral\",\"ttl\":\"1h\"}}],"
        "\"tools\":[{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"},\"cache_control\":{\"type\":\"ephemeral\"},"
        "\"eager_input_streaming\":true},{\"type\":\"custom\",\"name\":\"g\",\"input_schema\":{\"type\":\"object\"},"
        "\"strict\":true}],\"tool_choice\":{\"type\":\"auto\",\"disable_parallel_tool_use\":true},"
        "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":["
        "{\"type\":\"thinking\",\"thinking\":\"why\",\"signature\":\"msg_1\"},"
        "{\"type\":\"redacted_thinking\",\"data\":\"zz\"},{\"type\":\"text\",\"text\":\"t\",\"citations\":null},"
        "{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":{},\"caller\":{\"type\":\"direct\"}}]},"
        "{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"is_error\":false,"
        "\"content\":[{\"type\":\"text\",\"text\":\"r\"}],\"cache_control\":{\"type\":\"ephemeral\"}},"
        "{\"type\":\"text\",\"text\":\"go on\",\"cache_control\":{\"type\":\"ephemeral\"}}]}]}");
    assert_true(q.chat.thinking);
    assert_int_equal(q.chat.n_tools, 2);
    assert_int_equal(q.caller.len, 1);
    const di_chat_message *m = q.chat.messages;
    assert_int_equal(q.chat.n_messages, 5);
    assert_int_equal(m[0].role, DI_CHAT_SYSTEM);
    assert_true(m[2].has_reasoning && m[2].n_calls == 1 && m[2].n_parts == 1);
    assert_memory_equal(m[2].reasoning.data, "why", 3);
    assert_int_equal(m[3].role, DI_CHAT_TOOL);
    assert_int_equal(m[4].role, DI_CHAT_USER);
    di_request_deinit(&q);
}

/* A turn that goes on with a conversation on the server must not be taken for a whole conversation. */
static void conversations_on_the_server_are_refused(void **state) {
    (void)state;
    assert_refused(DI_API_MESSAGES, "{" USER_HI ",\"max_tokens\":9,\"thread\":{\"type\":\"create\"}}", "thread",
                   "not kept");
    assert_refused(DI_API_MESSAGES,
                   "{" USER_HI
                   ",\"max_tokens\":9,\"thread\":{\"type\":\"continue\",\"previous_message_id\":\"msg_1\"}}",
                   "thread", "not kept");
    assert_taken(DI_API_MESSAGES, "{" USER_HI ",\"max_tokens\":9,\"thread\":null}");
}

static void responses_ask_for_logprobs_by_include(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        int n_logprobs;
    } cases[] = {{"", -1},
                 {",\"include\":[]", -1},
                 {",\"include\":[\"reasoning.encrypted_content\"]", -1},
                 {",\"include\":[\"message.output_text.logprobs\"]", 0},
                 {",\"include\":[\"message.output_text.logprobs\"],\"top_logprobs\":3", 3}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        char body[200];
        snprintf(body, sizeof body, "{\"input\":\"hi\"%s}", cases[i].fields);
        di_request q = take(DI_API_RESPONSES, body);
        assert_int_equal(q.sampling.n_logprobs, cases[i].n_logprobs);
        di_request_deinit(&q);
    }
    assert_refused(DI_API_RESPONSES, "{\"input\":\"hi\",\"include\":\"x\"}", "include", "an array");
}

/* `n` belongs to chat and completions: elsewhere it is a field that nobody knows. */
static void samples_are_asked_for_where_replies_have_choices(void **state) {
    (void)state;
    static const struct {
        di_api_kind api;
        const char *body;
        int64_t n;
    } cases[] = {{DI_API_CHAT, "{" USER_HI ",\"n\":3}", 3},
                 {DI_API_COMPLETIONS, "{\"prompt\":\"hi\",\"n\":3}", 3},
                 {DI_API_RESPONSES, "{\"input\":\"hi\",\"n\":3}", 1},
                 {DI_API_MESSAGES, "{" USER_HI ",\"max_tokens\":9,\"n\":3}", 1}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_request q = take(cases[i].api, cases[i].body);
        assert_int_equal(q.n, cases[i].n);
        di_request_deinit(&q);
    }
}

DI_TEST_GROUP(request_clients, cmocka_unit_test(samples_are_asked_for_where_replies_have_choices),
              cmocka_unit_test(thinking_has_many_names), cmocka_unit_test(the_hosted_service_does_not_know_them),
              cmocka_unit_test(reasoning_of_history_has_two_names), cmocka_unit_test(the_last_message_can_go_on),
              cmocka_unit_test(fields_of_routers_are_taken), cmocka_unit_test(schemas_of_the_helpers_are_constraints),
              cmocka_unit_test(what_claude_clients_send_is_taken),
              cmocka_unit_test(conversations_on_the_server_are_refused),
              cmocka_unit_test(responses_ask_for_logprobs_by_include));
