/* Request bodies by our own rules: defaults, what is done though the hosted service refuses it, refusals that name
 * their field, lines of a batch; and the rules of the hosted service that the recorded vectors don't show. */
#include "harness.h"

#include "api/api.h"

#define USER_HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TOOL(name) "{\"type\":\"function\",\"function\":{\"name\":\"" name "\"}}"

typedef struct outcome {
    di_request request;
    di_error err;
    di_status status;
} outcome;

static outcome parse_with(di_api_kind api, const char *body, const di_request_options *options) {
    outcome o = {0};
    o.status = di_request_parse(&o.request, api, body, strlen(body), options, &o.err);
    return o;
}

static outcome parse(di_api_kind api, const char *body) {
    di_request_options options;
    di_request_options_init(&options, false);
    return parse_with(api, body, &options);
}

/* A body that must be taken; the caller frees the request. */
static di_request take(di_api_kind api, const char *body) {
    outcome o = parse(api, body);
    if (o.status) {
        fail_msg("%s: %s", body, o.err.message);
    }
    return o.request;
}

static void assert_refused(di_api_kind api, bool vendor_compat, const char *body, const char *param,
                           const char *message) {
    di_request_options options;
    di_request_options_init(&options, vendor_compat);
    outcome o = parse_with(api, body, &options);
    if (o.status != DI_ERR_REQUEST) {
        fail_msg("%s: status %d", body, o.status);
    }
    assert_int_not_equal(o.request.refusal, DI_REFUSAL_NONE);
    assert_string_equal(o.request.param, param);
    assert_contains(o.err.message, message);
    di_request_deinit(&o.request);
}

static void assert_prompt(const di_request *request, const char *want) {
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_request_encode(request, NULL, NULL, &prompt, NULL, &err), &err);
    assert_string_equal(di_strbuf_str(&prompt.text), want);
    di_prompt_deinit(&prompt);
}

static void assert_text(di_chat_text got, const char *want) {
    assert_int_equal(got.len, strlen(want));
    assert_memory_equal(got.len ? got.data : "", want, got.len);
}

/* ------------------------------------------------------------------ defaults */

static void defaults_are_ours(void **state) {
    (void)state;
    di_request q = take(DI_API_CHAT, "{" USER_HI "}");
    assert_false(q.chat.thinking);
    assert_true(q.sampling.temperature == 1 && q.sampling.top_p == 1);
    assert_int_equal(q.sampling.top_k, -1);
    assert_int_equal(q.sampling.n_logprobs, -1);
    assert_false(q.sampling.has_seed);
    assert_int_equal(q.n, 1);
    assert_true(q.sampling.min_p == 0 && q.sampling.presence_penalty == 0 && q.sampling.frequency_penalty == 0);
    assert_true(q.sampling.repetition_penalty == 1);
    assert_int_equal(q.sampling.min_tokens, 0);
    assert_int_equal(q.sampling.n_prompt_logprobs, -1);
    assert_int_equal(q.sampling.n_bias + q.sampling.n_stop_tokens + q.n_forced, 0);
    assert_int_equal(q.priority, 0);
    assert_true(q.cache_salt.len == 0 && q.caller.len == 0);
    assert_int_equal(q.parse.stage, DI_CHAT_STAGE_CONTENT);
    assert_prompt(&q, "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>");
    di_request_deinit(&q);
}

static void the_callers_defaults_hold_where_nothing_is_named(void **state) {
    (void)state;
    di_request_options options;
    di_request_options_init(&options, false);
    options.effort_default = 20;
    options.sampling.temperature = 0.5;
    options.sampling.has_seed = true;
    options.sampling.seed = 9;
    options.sampling.max_tokens = 3;
    outcome o = parse_with(DI_API_CHAT, "{" USER_HI ",\"seed\":null,\"temperature\":null}", &options);
    assert_int_equal(o.status, DI_OK);
    assert_true(o.request.chat.thinking);
    assert_int_equal(o.request.chat.effort, 20);
    assert_true(o.request.sampling.temperature == 0.5);
    assert_int_equal(o.request.sampling.seed, 9);
    assert_int_equal(di_request_max_tokens(&o.request, 10, 100), 3);
    di_request_deinit(&o.request);
    o = parse_with(DI_API_CHAT, "{" USER_HI ",\"seed\":1,\"temperature\":0,\"max_tokens\":50}", &options);
    assert_int_equal(o.request.sampling.seed, 1);
    assert_true(o.request.sampling.temperature == 0 && o.request.has_temperature);
    assert_int_equal(di_request_max_tokens(&o.request, 10, 100), 50);
    di_request_deinit(&o.request);
}

static void thinking_and_effort_decide_together(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        int with_none, with_20; /* the effort that comes out, 0 = no thinking, by the default none and 20 */
    } cases[] = {
        {"", 0, 20},
        {",\"thinking\":null,\"reasoning_effort\":null", 0, 20},
        {",\"thinking\":{\"type\":\"enabled\"}", 75, 20},
        {",\"thinking\":{\"type\":\"adaptive\"},\"reasoning_effort\":\"none\"", 75, 75},
        {",\"thinking\":{\"type\":\"disabled\"},\"reasoning_effort\":\"max\"", 0, 0},
        {",\"reasoning_effort\":\"none\"", 0, 0},
        {",\"reasoning_effort\":\"minimal\"", 50, 50},
        {",\"reasoning_effort\":\"medium\"", 75, 75},
        {",\"reasoning_effort\":\"xhigh\"", 75, 75},
        {",\"reasoning_effort\":\"ultra\"", 100, 100},
        {",\"reasoning_effort\":1", 1, 1},
        {",\"reasoning_effort\":100", 100, 100},
        {",\"reasoning_effort\":\"37\"", 37, 37},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[256];
        (void)snprintf(body, sizeof body, "{" USER_HI "%s}", cases[i].fields);
        for (int j = 0; j < 2; j++) {
            di_request_options options;
            di_request_options_init(&options, false);
            options.effort_default = j ? 20 : 0;
            outcome o = parse_with(DI_API_CHAT, body, &options);
            int want = j ? cases[i].with_20 : cases[i].with_none;
            assert_int_equal(o.status, DI_OK);
            assert_int_equal(o.request.chat.thinking, want > 0);
            assert_int_equal(o.request.chat.effort, want);
            di_request_deinit(&o.request);
        }
    }
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"reasoning_effort\":0}", "reasoning_effort", "1 to 100");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"reasoning_effort\":101}", "reasoning_effort", "1 to 100");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"reasoning_effort\":50.5}", "reasoning_effort", "found number");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"reasoning_effort\":\"extreme\"}", "reasoning_effort",
                   "`extreme`");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"thinking\":{}}", "thinking.type", "missing field `type`");
}

static void efforts_of_the_command_line_are_read(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int effort;
    } cases[] = {{"none", 0}, {"low", 50}, {"high", 75}, {"max", 100}, {"1", 1}, {"100", 100}};
    di_error err;
    int effort;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        di_test_ok(di_effort_parse(cases[i].text, &effort, &err), &err);
        assert_int_equal(effort, cases[i].effort);
    }
    static const char *const bad[] = {"", "0", "101", "-1", "medium ", "1.5"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(di_effort_parse(bad[i], &effort, &err), DI_ERR_ARG);
    }
}

static void default_lengths_follow_the_mode(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        int64_t want;
    } cases[] = {{"", 8192},
                 {",\"reasoning_effort\":99", 65536},
                 {",\"reasoning_effort\":\"max\"", 131072},
                 {",\"max_completion_tokens\":7", 7},
                 {",\"max_tokens\":5,\"max_completion_tokens\":7", 5},
                 {",\"max_tokens\":18446744073709551615", 1000000 - 10}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[256];
        (void)snprintf(body, sizeof body, "{" USER_HI "%s}", cases[i].fields);
        di_request q = take(DI_API_CHAT, body);
        assert_int_equal(di_request_max_tokens(&q, 10, 1000000), cases[i].want);
        assert_int_equal(di_request_max_tokens(&q, 10, 12), cases[i].want < 2 ? cases[i].want : 2);
        assert_int_equal(di_request_max_tokens(&q, 12, 12), 1);
        di_request_deinit(&q);
    }
    di_request q = take(DI_API_LINE, "{\"prompt\":\"x\"}");
    assert_int_equal(di_request_max_tokens(&q, 10, 1000000), 8192);
    assert_int_equal(di_request_max_tokens(&q, 10, 1000), 990);
    di_request_deinit(&q);
}

/* ------------------------------------------------------------------ done though the hosted service refuses it */

static void sampling_holds_with_thinking_too(void **state) {
    (void)state;
    di_request q =
        take(DI_API_CHAT, "{" USER_HI ",\"reasoning_effort\":\"high\",\"temperature\":5.5,\"top_p\":0.3,\"top_k\":0}");
    assert_true(q.chat.thinking);
    assert_true(q.sampling.temperature == 5.5 && q.sampling.top_p == 0.3);
    assert_int_equal(q.sampling.top_k, 0);
    di_request_deinit(&q);
    di_request_options options;
    di_request_options_init(&options, true);
    outcome o =
        parse_with(DI_API_CHAT, "{" USER_HI ",\"temperature\":0.5,\"top_p\":0.3,\"top_k\":4,\"seed\":2}", &options);
    assert_true(o.request.sampling.temperature == 1 && o.request.sampling.top_p == 0.95);
    assert_int_equal(o.request.sampling.top_k, -1);
    assert_int_equal(o.request.sampling.seed, 2);
    di_request_deinit(&o.request);
}

static void seeds_are_taken_modulo_2_to_the_64(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t seed;
    } cases[] = {{"0", 0},
                 {"-1", UINT64_MAX},
                 {"9223372036854775808", UINT64_C(1) << 63},
                 {"18446744073709551615", UINT64_MAX},
                 {"18446744073709551616", 0},
                 {"18446744073709551623", 7},
                 {"-18446744073709551617", UINT64_MAX},
                 {"100000000000000000000", UINT64_C(7766279631452241920)}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[256];
        (void)snprintf(body, sizeof body, "{\"x\":{\"seed\":3}, \"seed\" :\n%s, \"y\":\"seed\"," USER_HI "}",
                       cases[i].text);
        di_request q = take(DI_API_CHAT, body);
        assert_true(q.sampling.has_seed);
        assert_int_equal(q.sampling.seed, cases[i].seed);
        di_request_deinit(&q);
    }
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"seed\":1.0}", "seed", "an integer");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"seed\":1e30}", "seed", "an integer");
    assert_refused(DI_API_CHAT, false, "{" USER_HI ",\"seed\":\"7\"}", "seed", "an integer");
}

static void fields_of_vllm_reach_the_sampler(void **state) {
    (void)state;
    static const di_api_kind kinds[] = {DI_API_CHAT, DI_API_LINE};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        di_request q =
            take(kinds[i],
                 "{" USER_HI ",\"n\":3,\"min_p\":0.25,\"presence_penalty\":-2,\"frequency_penalty\":0.5,"
                 "\"repetition_penalty\":1.5,\"logit_bias\":{\"5\":1,\"0\":-0.5,\"2147483647\":1e300},\"min_tokens\":4,"
                 "\"max_tokens\":4,\"stop_token_ids\":[3,129279],\"forced_token_ids\":[7,0,7],\"prompt_logprobs\":2,"
                 "\"priority\":-5,\"cache_salt\":\"salt\",\"user\":\"someone\"}");
        const di_sampling *p = &q.sampling;
        assert_int_equal(q.n, 3);
        assert_true(p->min_p == 0.25 && p->presence_penalty == -2 && p->frequency_penalty == 0.5);
        assert_true(p->repetition_penalty == 1.5);
        assert_int_equal(p->n_bias, 3);
        assert_true(p->bias_ids[0] == 5 && p->bias_ids[1] == 0 && p->bias_ids[2] == INT32_MAX);
        assert_true(p->bias_values[0] == 1 && p->bias_values[1] == -0.5f && p->bias_values[2] > 100);
        assert_int_equal(p->min_tokens, 4);
        assert_int_equal(p->n_stop_tokens, 2);
        assert_true(p->stop_tokens[0] == 3 && p->stop_tokens[1] == 129279);
        assert_int_equal(q.n_forced, 3);
        assert_true(q.forced[0] == 7 && q.forced[1] == 0 && q.forced[2] == 7);
        assert_int_equal(p->n_prompt_logprobs, 2);
        assert_int_equal(q.priority, -5);
        assert_text(q.cache_salt, "salt");
        assert_text(q.caller, "someone");
        di_request_deinit(&q);
    }
}

static void absent_null_and_neutral_ask_for_nothing(void **state) {
    (void)state;
    static const char *const bodies[] = {
        "{" USER_HI ",\"n\":1,\"min_p\":0,\"presence_penalty\":0.0,\"repetition_penalty\":1,\"logit_bias\":{},"
        "\"min_tokens\":0,\"stop_token_ids\":[],\"forced_token_ids\":[],\"prompt_logprobs\":-1,\"priority\":0}",
        "{" USER_HI ",\"n\":null,\"min_p\":null,\"presence_penalty\":null,\"repetition_penalty\":null,"
        "\"logit_bias\":null,\"min_tokens\":null,\"stop_token_ids\":null,\"forced_token_ids\":null,"
        "\"prompt_logprobs\":null,\"priority\":null,\"cache_salt\":null,\"user\":null}"};
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        di_request q = take(DI_API_CHAT, bodies[i]);
        assert_int_equal(q.n, 1);
        assert_false(di_sampling_needs_history(&q.sampling));
        assert_int_equal(q.sampling.n_bias + q.sampling.n_stop_tokens + q.n_forced, 0);
        assert_int_equal(q.sampling.n_prompt_logprobs, -1);
        assert_true(q.sampling.min_p == 0 && q.sampling.min_tokens == 0 && q.priority == 0);
        assert_true(q.cache_salt.len == 0 && q.caller.len == 0);
        di_request_deinit(&q);
    }
}

static void defaults_of_the_caller_and_named_fields(void **state) {
    (void)state;
    di_request_options options;
    di_request_options_init(&options, false);
    options.sampling.min_p = 0.1;
    options.sampling.repetition_penalty = 1.2;
    options.sampling.n_prompt_logprobs = 3;
    options.sampling.min_tokens = 9000;
    outcome o = parse_with(DI_API_CHAT, "{" USER_HI ",\"min_p\":0.2,\"prompt_logprobs\":-1}", &options);
    assert_int_equal(o.status, DI_OK);
    assert_true(o.request.sampling.min_p == 0.2 && o.request.sampling.repetition_penalty == 1.2);
    assert_int_equal(o.request.sampling.n_prompt_logprobs, -1);
    /* A length that nobody named is long enough for min_tokens. */
    assert_int_equal(di_request_max_tokens(&o.request, 10, 100000), 9000);
    assert_int_equal(di_request_max_tokens(&o.request, 10, 100), 90);
    di_request_deinit(&o.request);
    o = parse_with(DI_API_CHAT, "{" USER_HI ",\"max_tokens\":5}", &options);
    assert_int_equal(o.status, DI_ERR_REQUEST);
    assert_string_equal(o.request.param, "min_tokens");
    di_request_deinit(&o.request);
    /* The hosted service reads none of these and samples in its own way. */
    options.vendor_compat = true;
    options.sampling.min_tokens = 0;
    o = parse_with(DI_API_CHAT,
                   "{" USER_HI ",\"min_p\":0.2,\"presence_penalty\":9,\"logit_bias\":5,\"priority\":\"x\",\"user\":1}",
                   &options);
    assert_int_equal(o.status, DI_OK);
    assert_true(o.request.sampling.min_p == 0 && !di_sampling_needs_history(&o.request.sampling));
    di_request_deinit(&o.request);
}

static void callers_of_anthropic_requests_are_in_the_metadata(void **state) {
    (void)state;
    di_request q = take(DI_API_MESSAGES, "{\"max_tokens\":5," USER_HI ",\"metadata\":{\"user_id\":\"who\"}}");
    assert_text(q.caller, "who");
    di_request_deinit(&q);
    assert_refused(DI_API_MESSAGES, false, "{\"max_tokens\":5," USER_HI ",\"metadata\":{\"user_id\":5}}",
                   "metadata.user_id", "a string, found integer");
}

static void developer_any_stops_and_plain_json_mode_are_done(void **state) {
    (void)state;
    di_request q =
        take(DI_API_CHAT, "{\"messages\":[{\"role\":\"developer\",\"content\":\"d\"}],"
                          "\"stop\":[\"1\",\"\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
                          "\"13\",\"14\",\"15\",\"16\",\"17\"],\"response_format\":{\"type\":\"json_object\"}}");
    assert_int_equal(q.sampling.n_stop, 17); /* the empty one stops nothing */
    assert_text((di_chat_text){q.parse.stop[1], q.parse.stop_len[1]}, "2");
    assert_true(q.parse.is_json);
    assert_int_equal(q.constraint, DI_CONSTRAINT_JSON);
    assert_int_equal(q.format_constraint, DI_CONSTRAINT_JSON);
    assert_prompt(
        &q, "<｜begin▁of▁sentence｜><｜System｜>d\n\n## Response Format:\n\nYou MUST strictly adhere to the following "
            "schema to reply:\n{\"type\": \"json_object\"}<｜Assistant｜></think>");
    di_request_deinit(&q);
}

static void required_with_thinking_parses_calls_behind_it(void **state) {
    (void)state;
    di_request q = take(DI_API_CHAT, "{" USER_HI ",\"reasoning_effort\":5,\"tools\":[" TOOL("f") "," TOOL(
                                         "g") "],"
                                              "\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}}");
    assert_false(q.parse.starts_in_calls);
    assert_true(q.parse.has_tools);
    assert_int_equal(q.parse.stage, DI_CHAT_STAGE_REASONING);
    assert_int_equal(q.chat.n_tools, 1);
    assert_text(q.chat.tools[0].name, "g");
    assert_int_equal(q.constraint, DI_CONSTRAINT_TOOL_CALL_REQUIRED);
    assert_text(q.constraint_text, "[{\"type\":\"function\",\"function\":{\"name\":\"g\",\"description\":null,"
                                   "\"parameters\":{},\"strict\":null}}]");
    di_request_deinit(&q);
}

/* ------------------------------------------------------------------ refusals */

static void bad_fields_are_named(void **state) {
    (void)state;
    static const struct {
        const char *fields, *param, *message;
    } cases[] = {
        {"\"temperature\":-1", "temperature", "-1"},
        {"\"temperature\":\"hot\"", "temperature", "a number, found string"},
        {"\"top_p\":0", "top_p", "(0, 1]"},
        {"\"top_p\":1.5", "top_p", "1.5"},
        {"\"top_k\":-2", "top_k", "-1"},
        {"\"top_k\":1.5", "top_k", "an integer"},
        {"\"max_tokens\":0", "max_tokens", "1 or more"},
        {"\"max_completion_tokens\":0", "max_completion_tokens", "1 or more"},
        {"\"n\":0", "n", "expected 1 to"},
        {"\"stop\":5", "stop", "found integer"},
        {"\"stop\":[\"a\",5]", "stop[1]", "found integer"},
        {"\"stream\":1", "stream", "true or false"},
        {"\"stream_options\":[]", "stream_options", "an object"},
        {"\"logprobs\":true,\"top_logprobs\":1001", "top_logprobs", "[0, 1000]"},
        {"\"top_logprobs\":2", "top_logprobs", "logprobs must be set"},
        {"\"logprobs_mode\":\"x\"", "logprobs_mode", "raw or processed"},
        {"\"ignore_eos\":\"yes\"", "ignore_eos", "true or false"},
        {"\"presence_penalty\":3", "presence_penalty", "[-2, 2]"},
        {"\"repetition_penalty\":0", "repetition_penalty", "above 0"},
        {"\"repetition_penalty\":1e999", "", "not JSON"},
        {"\"frequency_penalty\":-2.01", "frequency_penalty", "-2.01, expected a number in [-2, 2]"},
        {"\"min_p\":1.5", "min_p", "1.5, expected a number in [0, 1]"},
        {"\"min_p\":\"x\"", "min_p", "a number, found string"},
        {"\"min_tokens\":-1", "min_tokens", "-1, expected 0 or more"},
        {"\"min_tokens\":4,\"max_tokens\":3", "min_tokens", "4, expected 0 to max_tokens, which is 3"},
        {"\"n\":4097", "n", "4097, expected 1 to 4096"},
        {"\"n\":1.5", "n", "an integer"},
        {"\"prompt_logprobs\":1001", "prompt_logprobs", "1001, expected -1 to 1000"},
        {"\"prompt_logprobs\":true", "prompt_logprobs", "an integer"},
        {"\"logit_bias\":[]", "logit_bias", "an object"},
        {"\"logit_bias\":{\"x\":1}", "logit_bias", "key 'x', expected a token id"},
        {"\"logit_bias\":{\"-1\":1}", "logit_bias", "key '-1', expected a token id"},
        {"\"logit_bias\":{\"\":1}", "logit_bias", "key '', expected a token id"},
        {"\"logit_bias\":{\"05\":1}", "logit_bias", "key '05', expected a token id"},
        {"\"logit_bias\":{\"2147483648\":1}", "logit_bias", "key '2147483648', expected a token id"},
        {"\"logit_bias\":{\"5\":\"1\"}", "logit_bias.5", "a number, found string"},
        {"\"stop_token_ids\":5", "stop_token_ids", "an array"},
        {"\"stop_token_ids\":[5,-1]", "stop_token_ids[1]", "-1, expected a token id"},
        {"\"stop_token_ids\":[\"5\"]", "stop_token_ids[0]", "a token id, found string"},
        {"\"forced_token_ids\":[2147483648]", "forced_token_ids[0]", "2147483648, expected a token id"},
        {"\"forced_token_ids\":[1.5]", "forced_token_ids[0]", "a token id, found"},
        {"\"priority\":2147483648", "priority", "expected -2147483648 to 2147483647"},
        {"\"priority\":\"high\"", "priority", "an integer, found string"},
        {"\"cache_salt\":\"\"", "cache_salt", "an empty string"},
        {"\"cache_salt\":7", "cache_salt", "a string, found integer"},
        {"\"user\":7", "user", "a string, found integer"},
        {"\"model\":5", "model", "a string"},
        {"\"response_format\":{\"type\":\"xml\"}", "response_format.type", "`xml`"},
        {"\"response_format\":{\"type\":\"json_schema\"}", "response_format.json_schema", "missing field"},
        {"\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"x\"}}",
         "response_format.json_schema.schema", "a JSON schema"},
        {"\"response_format\":{\"type\":\"regex\"}", "response_format.regex", "missing field"},
        {"\"response_format\":{\"type\":\"json_object\"},\"ebnf\":\"x\"", "ebnf", "only one of"},
        {"\"regex\":\"a\",\"choice\":[\"b\"]", "choice", "only one of"},
        {"\"choice\":[]", "choice", "empty list"},
        {"\"choice\":[1]", "choice[0]", "a string"},
        {"\"tools\":{}", "tools", "an array"},
        {"\"tools\":[5]", "tools[0]", "an object"},
        {"\"tools\":[{\"type\":\"function\"}]", "tools[0].function", "missing field `function`"},
        {"\"tools\":[" TOOL("a b") "]", "tools[0].function.name", "pattern"},
        {"\"tools\":[" TOOL("a") "," TOOL("a") "]", "tools", "unique"},
        {"\"tools\":[" TOOL("a") "],\"tool_choice\":\"some\"", "tool_choice", "expected one of"},
        {"\"tools\":[" TOOL("a") "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"b\"}}",
         "tool_choice", "'b'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[512];
        (void)snprintf(body, sizeof body, "{" USER_HI ",%s}", cases[i].fields);
        assert_refused(DI_API_CHAT, false, body, cases[i].param, cases[i].message);
    }
}

static void bad_messages_are_named(void **state) {
    (void)state;
    static const struct {
        const char *messages, *param, *message;
    } cases[] = {
        {"5", "messages", "an array"},
        {"[]", "messages", "Empty input"},
        {"[5]", "messages[0]", "an object"},
        {"[{\"content\":\"x\"}]", "messages[0].role", "missing field `role`"},
        {"[{\"role\":\"function\",\"content\":\"x\"}]", "messages[0].role", "`function`"},
        {"[{\"role\":\"user\"}]", "messages[0].content", "missing field `content`"},
        {"[{\"role\":\"user\",\"content\":5}]", "messages[0].content", "a string or a list"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"audio\"}]}]", "messages[0].content[0].type", "`audio`"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0].text",
         "missing field `text`"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\",\"detail\":\"y\"}}]}]",
         "messages[0].content[0].image_url.detail", "`y`"},
        {"[{\"role\":\"assistant\",\"content\":null}]", "messages[0].content", "content or tool_calls"},
        {"[{\"role\":\"tool\",\"content\":\"x\"}]", "messages[0].tool_call_id", "missing field"},
        {"[{\"role\":\"assistant\",\"content\":\"x\",\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\"}}]}]",
         "messages[0].tool_calls[0].function.arguments", "missing field"},
        {"[{\"role\":\"user\",\"content\":\"x\",\"prefix\":true}]", "messages[0].prefix", "prefix"},
        {"[{\"role\":\"latest_reminder\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]",
         "messages[0].content[0]", "Image in latest_reminder message"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[512];
        (void)snprintf(body, sizeof body, "{\"messages\":%s}", cases[i].messages);
        assert_refused(DI_API_CHAT, false, body, cases[i].param, cases[i].message);
    }
    assert_refused(DI_API_CHAT, false, "{}", "messages", "missing field `messages`");
}

static void what_is_no_object_is_refused(void **state) {
    (void)state;
    static const char *const bodies[] = {"", "nonsense", "{\"messages\":", "\xff", "{} {}"};
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        assert_refused(DI_API_CHAT, false, bodies[i], "", "not JSON");
    }
    assert_refused(DI_API_CHAT, false, "[1]", "", "expected an object");
    assert_refused(DI_API_LINE, false, "7", "", "expected an object");
}

static void unknown_fields_are_ignored(void **state) {
    (void)state;
    di_request q =
        take(DI_API_CHAT, "{" USER_HI ",\"frobnicate\":[1],\"user\":\"u\",\"metadata\":{},\"model\":\"any\"}");
    assert_text(q.model, "any");
    di_request_deinit(&q);
}

static void error_objects_name_the_field_by_our_own_rules(void **state) {
    (void)state;
    outcome o = parse(DI_API_CHAT, "{" USER_HI ",\"top_k\":\"x\"}");
    di_strbuf text = {0};
    di_request_error_json(&text, &o.request, o.status, &o.err);
    assert_string_equal(di_strbuf_str(&text), "{\"message\":\"'top_k': expected an integer, found string\","
                                              "\"type\":\"invalid_request_error\",\"param\":\"top_k\","
                                              "\"code\":\"invalid_request_error\"}");
    di_strbuf_reset(&text);
    di_fail(&o.err, DI_ERR_MEMORY, "no memory");
    o.request.param[0] = '\0';
    di_request_error_json(&text, &o.request, DI_ERR_MEMORY, &o.err);
    assert_string_equal(
        di_strbuf_str(&text),
        "{\"message\":\"no memory\",\"type\":\"server_error\",\"param\":null,\"code\":\"server_error\"}");
    di_strbuf_deinit(&text);
    di_request_deinit(&o.request);
}

/* ------------------------------------------------------------------ constraints */

static void constraints_are_kept(void **state) {
    (void)state;
    static const struct {
        const char *fields;
        di_constraint_kind kind;
        const char *text;
    } cases[] = {
        {"\"regex\":\"a+\"", DI_CONSTRAINT_REGEX, "a+"},
        {"\"response_format\":{\"type\":\"regex\",\"regex\":\"b\"}", DI_CONSTRAINT_REGEX, "b"},
        {"\"ebnf\":\"root ::= x\"", DI_CONSTRAINT_EBNF, "root ::= x"},
        {"\"choice\":[\"a\", \"b\"]", DI_CONSTRAINT_CHOICE, "[\"a\",\"b\"]"},
        {"\"response_format\":{\"type\":\"json_object\"}", DI_CONSTRAINT_JSON, ""},
        {"\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"a\": 1}}}", DI_CONSTRAINT_JSON,
         "{\"a\":1}"},
        {"\"response_format\":{\"type\":\"text\"}", DI_CONSTRAINT_NONE, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int with_tools = 0; with_tools < 2; with_tools++) {
            char body[512];
            (void)snprintf(body, sizeof body, "{" USER_HI ",%s%s}", cases[i].fields,
                           with_tools ? ",\"tools\":[" TOOL("f") "]" : "");
            di_request q = take(DI_API_CHAT, body);
            assert_int_equal(q.format_constraint, cases[i].kind);
            assert_text(q.format_text, cases[i].text);
            assert_int_equal(q.constraint, with_tools ? DI_CONSTRAINT_TOOL_CALL : cases[i].kind);
            di_request_deinit(&q);
        }
    }
}

/* ------------------------------------------------------------------ lines of a batch */

static void lines_take_prompts_ids_and_messages(void **state) {
    (void)state;
    di_request q =
        take(DI_API_LINE, "{\"id\":\"a\",\"prompt\":\"<think>x\",\"logprobs\":5,\"ignore_eos\":true,\"max_tokens\":2}");
    assert_int_equal(q.input, DI_INPUT_TEXT);
    assert_text(q.text, "<think>x");
    assert_string_equal(di_json_str(q.id, NULL), "a");
    assert_int_equal(q.sampling.n_logprobs, 5);
    assert_true(q.sampling.ignore_eos);
    assert_prompt(&q, "<think>x");
    di_request_deinit(&q);
    q = take(DI_API_LINE, "{\"prompt_token_ids\":[0,5,7],\"logprobs\":0}");
    assert_int_equal(q.input, DI_INPUT_IDS);
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_request_encode(&q, NULL, NULL, NULL, &ids, &err), &err);
    assert_int_equal(ids.len, 3);
    assert_int_equal(ids.data[2], 7);
    assert_int_equal(q.sampling.n_logprobs, 0);
    di_ids_deinit(&ids);
    di_request_deinit(&q);
    q = take(DI_API_LINE, "{\"id\":4," USER_HI ",\"reasoning_effort\":3,\"logprobs\":true}");
    assert_int_equal(q.input, DI_INPUT_CHAT);
    assert_int_equal(di_json_int(q.id), 4);
    assert_int_equal(q.chat.effort, 3);
    di_request_deinit(&q);
}

static void bad_lines_are_named(void **state) {
    (void)state;
    assert_refused(DI_API_LINE, false, "{}", "messages", "expected exactly one");
    assert_refused(DI_API_LINE, false, "{\"prompt\":\"x\",\"prompt_token_ids\":[1]}", "prompt", "expected exactly one");
    assert_refused(DI_API_LINE, false, "{\"prompt\":\"\"}", "prompt", "empty");
    assert_refused(DI_API_LINE, false, "{\"prompt_token_ids\":[]}", "prompt_token_ids", "empty");
    assert_refused(DI_API_LINE, false, "{\"prompt_token_ids\":[1,-1]}", "prompt_token_ids[1]", "a token id");
    assert_refused(DI_API_LINE, false, "{\"prompt_token_ids\":[1,1.0]}", "prompt_token_ids[1]", "a token id");
    assert_refused(DI_API_LINE, false, "{\"prompt\":\"x\",\"max_tokens\":0}", "max_tokens", "1 or more");
    outcome o = parse(DI_API_LINE, "{\"id\":\"keep\",\"prompt\":5}");
    assert_int_equal(o.status, DI_ERR_REQUEST);
    assert_string_equal(di_json_str(o.request.id, NULL), "keep"); /* the result line needs it */
    di_request_deinit(&o.request);
}

/* ------------------------------------------------------------------ the other APIs */

static void responses_join_items(void **state) {
    (void)state;
    di_request q = take(
        DI_API_RESPONSES,
        "{\"input\":[{\"role\":\"user\",\"content\":\"u\"},"
        "{\"type\":\"reasoning\",\"content\":[{\"type\":\"reasoning_text\",\"text\":\"r\"}]},"
        "{\"type\":\"message\",\"role\":\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":\"m\"}]},"
        "{\"type\":\"function_call\",\"call_id\":\"1\",\"name\":\"lookup\",\"namespace\":\"crm\",\"arguments\":\"{}\"},"
        "{\"type\":\"custom_tool_call\",\"call_id\":\"2\",\"name\":\"apply_patch\",\"input\":\"a\\nb\"},"
        "{\"type\":\"custom_tool_call_output\",\"call_id\":\"2\",\"output\":\"two\"},"
        "{\"type\":\"function_call_output\",\"call_id\":\"1\",\"output\":\"one\"}],"
        "\"tools\":[{\"type\":\"custom\",\"name\":\"apply_patch\"},{\"type\":\"web_search\"},"
        "{\"type\":\"namespace\",\"name\":\"crm\",\"tools\":[{\"name\":\"lookup\",\"type\":\"function\"}]}],"
        "\"reasoning\":{\"effort\":40},\"temperature\":0.5,\"top_p\":0.5}");
    assert_int_equal(q.chat.n_messages, 4);
    const di_chat_message *m = &q.chat.messages[1];
    assert_int_equal(m->role, DI_CHAT_ASSISTANT);
    assert_text(m->reasoning, "r");
    assert_int_equal(m->n_calls, 2);
    assert_text(m->calls[0].name, "crm::lookup");
    assert_text(m->calls[1].arguments, "{\"input\":\"a\\nb\"}");
    assert_int_equal(q.chat.n_tools, 2);
    assert_text(q.chat.tools[1].name, "crm::lookup");
    assert_false(q.chat.tools[1].has_description);
    assert_int_equal(q.n_namespace_tools, 1);
    assert_int_equal(q.chat.effort, 40);
    assert_true(q.sampling.temperature == 0.5 && q.sampling.top_p == 0.5);
    di_request_deinit(&q);
    assert_refused(DI_API_RESPONSES, false, "{}", "input", "missing field `input`");
    assert_refused(DI_API_RESPONSES, false, "{\"input\":[{\"type\":\"item_reference\",\"id\":\"x\"}]}", "input[0].type",
                   "`item_reference`");
    assert_refused(DI_API_RESPONSES, false,
                   "{\"input\":[{\"type\":\"function_call_output\",\"call_id\":\"9\",\"output\":\"x\"}]}", "input",
                   "call_id 9");
    assert_refused(DI_API_RESPONSES, false, "{\"input\":\"x\",\"max_output_tokens\":0}", "max_output_tokens",
                   "1 or more");
}

static void messages_load_deferred_tools(void **state) {
    (void)state;
    di_request q = take(
        DI_API_MESSAGES,
        "{\"tools\":[{\"name\":\"now\",\"input_schema\":{\"type\":\"object\"}},"
        "{\"name\":\"later\",\"input_schema\":{\"type\":\"object\"},\"defer_loading\":true}],"
        "\"messages\":[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"system\",\"content\":["
        "{\"type\":\"text\",\"text\":\"s\"},"
        "{\"type\":\"tool_addition\",\"tool\":{\"type\":\"tool_reference\",\"name\":\"later\"}},"
        "{\"type\":\"tool_addition\",\"tool\":{\"type\":\"tool_definition\",\"definition\":{\"name\":\"new\"}}}]}]}");
    di_prompt prompt = {0};
    di_error err;
    di_test_ok(di_request_encode(&q, NULL, NULL, &prompt, NULL, &err), &err);
    assert_contains(di_strbuf_str(&prompt.text),
                    "### Available Tool Schemas\n\n{\"name\": \"now\", \"description\": \"\", "
                    "\"parameters\": {\"type\": \"object\"}}\n\nYou MUST");
    assert_contains(
        di_strbuf_str(&prompt.text),
        "s\n\n### Updated Tool Schemas\n\n{\"name\": \"later\", \"description\": \"\", \"parameters\": {\"type\": "
        "\"object\"}}\n{\"name\": \"new\", \"description\": \"\", \"parameters\": {}}<｜Assistant｜>");
    assert_true(q.parse.has_tools);
    di_prompt_deinit(&prompt);
    di_request_deinit(&q);
    assert_refused(DI_API_MESSAGES, false,
                   "{\"messages\":[{\"role\":\"system\",\"content\":[{\"type\":\"tool_addition\",\"tool\":{\"type\":"
                   "\"tool_reference\",\"name\":\"none\"}}]}]}",
                   "messages.0.content[0].tool", "'none'");
}

static void messages_sample_as_asked(void **state) {
    (void)state;
    di_request q =
        take(DI_API_MESSAGES, "{" USER_HI ",\"top_k\":5,\"top_p\":0.9,\"temperature\":0.2,\"max_tokens\":999999,"
                              "\"stop_sequences\":[\"END\"],\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1}}");
    assert_int_equal(q.sampling.top_k, 5);
    assert_true(q.sampling.top_p == 0.9 && q.sampling.temperature == 0.2);
    assert_int_equal(q.sampling.max_tokens, 999999);
    assert_int_equal(q.parse.n_stop, 1);
    assert_true(q.chat.thinking);
    di_request_deinit(&q);
}

static void message_results_answer_their_calls(void **state) {
    (void)state;
    static const char calls[] =
        "{\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"a\",\"name\":"
        "\"f\",\"input\":{}},{\"type\":\"tool_use\",\"id\":\"b\",\"name\":\"f\",\"input\":{}}]}%s]}";
    static const struct {
        const char *rest, *param, *message;
    } cases[] = {
        {"", "messages.1", "after: a, b."},
        {",{\"role\":\"system\",\"content\":\"x\"}", "messages.1", "after: a, b."},
        {",{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"b\"}]}", "messages.1",
         "after: a."},
        {",{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\"},{\"type\":\"tool_result\","
         "\"tool_use_id\":\"b\"},{\"type\":\"tool_result\",\"tool_use_id\":\"a\"}]}",
         "messages.1.content.2", "unexpected `tool_use_id`"},
        {",{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\"},{\"type\":\"tool_result\","
         "\"tool_use_id\":\"b\"}]},{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\"}]}",
         "messages.2.content.0", "unexpected `tool_use_id`"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[1024];
        (void)snprintf(body, sizeof body, calls, cases[i].rest);
        assert_refused(DI_API_MESSAGES, false, body, cases[i].param, cases[i].message);
    }
}

/* ------------------------------------------------------------------ the hosted service */

static void the_hosted_service_compares_models(void **state) {
    (void)state;
    di_request_options options;
    di_request_options_init(&options, true);
    options.model_name = "mine";
    static const char *const models[] = {"DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro", "mine"};
    for (size_t i = 0; i < 3; i++) {
        char body[128];
        (void)snprintf(body, sizeof body, "{" USER_HI ",\"model\":\"%s\"}", models[i]);
        outcome o = parse_with(DI_API_CHAT, body, &options);
        assert_int_equal(o.status, DI_OK);
        di_request_deinit(&o.request);
    }
    assert_refused(DI_API_CHAT, true, "{" USER_HI ",\"model\":\"mine\"}", "model", "but you passed mine.");
}

static void the_hosted_service_refuses_what_we_do(void **state) {
    (void)state;
    assert_refused(DI_API_CHAT, true,
                   "{" USER_HI ",\"thinking\":{\"type\":\"disabled\"},\"tools\":[{\"type\":\"function\",\"function\":{"
                   "\"name\":\"f\",\"parameters\":{}}}]}",
                   "tools[0].function.parameters", "got 'type: null'");
    assert_refused(DI_API_RESPONSES, true, "{\"input\":\"x\",\"max_output_tokens\":0}", "max_output_tokens",
                   "Invalid max_output_tokens value");
    assert_refused(DI_API_MESSAGES, true, "{" USER_HI ",\"max_tokens\":0}", "max_tokens", "Invalid max_tokens value");
    assert_refused(DI_API_RESPONSES, true, "{\"input\":\"x\",\"text\":{\"format\":{\"type\":\"json_object\"}}}",
                   "text.format", "the word 'json'");
    di_request q =
        take(DI_API_CHAT,
             "{" USER_HI ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}]}");
    di_request_deinit(&q);
}

/* A plain prompt starts with the begin mark once, whether its text spells it or not. */
static void plain_prompts_begin_once(void **state) {
    (void)state;
    static const char *lines[] = {"{\"prompt\":\"Once upon a time\"}",
                                  "{\"prompt\":\"<｜begin▁of▁sentence｜>Once upon a time\"}"};
    di_tokenizer *tok;
    di_error err = {0};
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    for (int i = 0; i < 2; i++) {
        di_request q = take(DI_API_LINE, lines[i]);
        di_ids ids = {0};
        di_strbuf text = {0};
        di_test_ok(di_request_encode(&q, tok, NULL, NULL, &ids, &err), &err);
        assert_true(ids.len > 1);
        assert_int_equal(ids.data[0], 0);
        di_test_ok(di_tokenizer_decode(tok, ids.data + 1, ids.len - 1, false, &text, &err), &err);
        assert_string_equal(di_strbuf_str(&text), "Once upon a time");
        di_strbuf_deinit(&text);
        di_ids_deinit(&ids);
        di_request_deinit(&q);
    }
    di_tokenizer_close(tok);
}

DI_TEST_GROUP(request, cmocka_unit_test(plain_prompts_begin_once), cmocka_unit_test(defaults_are_ours),
              cmocka_unit_test(the_callers_defaults_hold_where_nothing_is_named),
              cmocka_unit_test(thinking_and_effort_decide_together),
              cmocka_unit_test(efforts_of_the_command_line_are_read), cmocka_unit_test(default_lengths_follow_the_mode),
              cmocka_unit_test(sampling_holds_with_thinking_too), cmocka_unit_test(seeds_are_taken_modulo_2_to_the_64),
              cmocka_unit_test(fields_of_vllm_reach_the_sampler),
              cmocka_unit_test(absent_null_and_neutral_ask_for_nothing),
              cmocka_unit_test(defaults_of_the_caller_and_named_fields),
              cmocka_unit_test(callers_of_anthropic_requests_are_in_the_metadata),
              cmocka_unit_test(developer_any_stops_and_plain_json_mode_are_done),
              cmocka_unit_test(required_with_thinking_parses_calls_behind_it), cmocka_unit_test(bad_fields_are_named),
              cmocka_unit_test(bad_messages_are_named), cmocka_unit_test(what_is_no_object_is_refused),
              cmocka_unit_test(unknown_fields_are_ignored),
              cmocka_unit_test(error_objects_name_the_field_by_our_own_rules), cmocka_unit_test(constraints_are_kept),
              cmocka_unit_test(lines_take_prompts_ids_and_messages), cmocka_unit_test(bad_lines_are_named),
              cmocka_unit_test(responses_join_items), cmocka_unit_test(messages_load_deferred_tools),
              cmocka_unit_test(messages_sample_as_asked), cmocka_unit_test(message_results_answer_their_calls),
              cmocka_unit_test(the_hosted_service_compares_models),
              cmocka_unit_test(the_hosted_service_refuses_what_we_do));
