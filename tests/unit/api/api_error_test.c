/* Error bodies by HTTP status, in the forms of both families of APIs. The words are those of the public APIs. */
#include "harness.h"

#include "api/api.h"

static void assert_body(di_api_kind api, int http_status, const char *param, const char *want) {
    di_strbuf got = {0};
    di_api_error_json(&got, api, http_status, "it \"broke\"", param, "req_1");
    assert_string_equal(di_strbuf_str(&got), want);
    di_strbuf_deinit(&got);
}

static void openai_bodies_have_type_param_and_code(void **state) {
    (void)state;
    static const struct {
        int http_status;
        const char *param, *type, *code;
    } cases[] = {
        {400, "prompt", "invalid_request_error", "invalid_request_error"},
        {400, "", "invalid_request_error", "invalid_request_error"},
        {401, NULL, "authentication_error", "invalid_api_key"},
        {403, NULL, "permission_error", "permission_error"},
        {404, "model", "invalid_request_error", "model_not_found"},
        {404, NULL, "invalid_request_error", "invalid_request_error"},
        {405, NULL, "invalid_request_error", "invalid_request_error"},
        {408, NULL, "invalid_request_error", "invalid_request_error"},
        {413, NULL, "invalid_request_error", "invalid_request_error"},
        {429, NULL, "rate_limit_error", "rate_limit_error"},
        {500, NULL, "server_error", "server_error"},
        {503, NULL, "server_error", "service_unavailable"},
    };
    static const di_api_kind apis[] = {DI_API_CHAT, DI_API_RESPONSES, DI_API_COMPLETIONS};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        char want[300], param[40] = "null";
        if (cases[i].param && cases[i].param[0]) {
            snprintf(param, sizeof param, "\"%s\"", cases[i].param);
        }
        snprintf(want, sizeof want,
                 "{\"error\":{\"message\":\"it \\\"broke\\\"\",\"type\":\"%s\",\"param\":%s,\"code\":\"%s\"}}",
                 cases[i].type, param, cases[i].code);
        for (size_t j = 0; j < DI_COUNT(apis); j++) {
            assert_body(apis[j], cases[i].http_status, cases[i].param, want);
        }
    }
}

static void anthropic_bodies_have_type_and_request_id(void **state) {
    (void)state;
    static const struct {
        int http_status;
        const char *type;
    } cases[] = {{400, "invalid_request_error"}, {401, "authentication_error"},
                 {403, "permission_error"},      {404, "not_found_error"},
                 {405, "invalid_request_error"}, {413, "request_too_large"},
                 {429, "rate_limit_error"},      {500, "api_error"},
                 {503, "overloaded_error"},      {529, "overloaded_error"}};
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        char want[300];
        snprintf(want, sizeof want,
                 "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":\"it \\\"broke\\\"\"},"
                 "\"request_id\":\"req_1\"}",
                 cases[i].type);
        assert_body(DI_API_MESSAGES, cases[i].http_status, "messages", want);
    }
    /* By this code clients go over to whole conversations. */
    assert_body(DI_API_MESSAGES, 400, "thread",
                "{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"it \\\"broke\\\"\","
                "\"details\":{\"error_code\":\"thread_unsupported_request\"}},\"request_id\":\"req_1\"}");
    di_strbuf got = {0};
    di_api_error_json(&got, DI_API_MESSAGES, 400, "m", NULL, NULL);
    assert_string_equal(got.data,
                        "{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"m\"},"
                        "\"request_id\":null}");
    di_strbuf_deinit(&got);
}

/* A message may quote a body, and a body may be any bytes. */
static void ill_formed_messages_are_repaired(void **state) {
    (void)state;
    di_strbuf got = {0};
    di_api_error_json(&got, DI_API_CHAT, 400, "a\xe4\xb8", "p\n", NULL);
    assert_contains(got.data, "\"message\":\"a\xef\xbf\xbd\",");
    assert_contains(got.data, "\"param\":\"p\\n\"");
    di_strbuf_deinit(&got);
}

DI_TEST_GROUP(api_error, cmocka_unit_test(openai_bodies_have_type_param_and_code),
              cmocka_unit_test(anthropic_bodies_have_type_and_request_id),
              cmocka_unit_test(ill_formed_messages_are_repaired));
