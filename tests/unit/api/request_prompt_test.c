/* Bodies of /v1/completions: every form of a prompt, the fields that only this API has, and what is refused. */
#include "harness.h"

#include "api/api.h"

typedef struct outcome {
    di_request request;
    di_error err;
    di_status status;
} outcome;

static outcome parse(const char *body, int64_t logprobs_max) {
    di_request_options options;
    di_request_options_init(&options, false);
    options.logprobs_max = logprobs_max;
    outcome o = {0};
    o.status = di_request_parse(&o.request, DI_API_COMPLETIONS, body, strlen(body), &options, &o.err);
    return o;
}

/* A body that must be taken; the caller frees the request. */
static di_request take(const char *body) {
    outcome o = parse(body, DI_LOGPROBS_MAX);
    if (o.status) {
        fail_msg("%s: %s", body, o.err.message);
    }
    return o.request;
}

static void assert_refused(const char *body, const char *param, const char *message) {
    outcome o = parse(body, 20);
    if (o.status != DI_ERR_REQUEST) {
        fail_msg("%s: status %d", body, o.status);
    }
    assert_string_equal(o.request.param, param);
    assert_contains(o.err.message, message);
    di_request_deinit(&o.request);
}

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

/* The ids of prompt i: a begin mark and the text, or the text alone. */
static void assert_encodes(const di_request *q, size_t i, const di_tokenizer *tok, bool has_bos, const char *want) {
    di_ids ids = {0};
    di_prompt prompt = {0};
    di_strbuf text = {0};
    di_error err;
    di_test_ok(di_request_encode_prompt(q, i, tok, NULL, &prompt, &ids, &err), &err);
    assert_string_equal(di_strbuf_str(&prompt.text), want);
    assert_true(ids.len >= has_bos);
    assert_true(!has_bos || ids.data[0] == 0);
    di_test_ok(di_tokenizer_decode(tok, ids.data + has_bos, ids.len - has_bos, false, &text, &err), &err);
    assert_string_equal(di_strbuf_str(&text), want);
    di_strbuf_deinit(&text);
    di_prompt_deinit(&prompt);
    di_ids_deinit(&ids);
}

static void prompts_come_in_four_forms(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_request q = take("{\"prompt\":\"Once\"}");
    assert_int_equal(q.n_prompts, 1);
    assert_int_equal(q.input, DI_INPUT_TEXT);
    assert_int_equal(q.constraint, DI_CONSTRAINT_NONE);
    assert_encodes(&q, 0, tok, true, "Once");
    di_request_deinit(&q);

    q = take("{\"prompt\":[\"Once\",\"\",\"upon a time\"],\"n\":2}");
    assert_int_equal(q.n_prompts, 3);
    assert_int_equal(q.n, 2);
    assert_int_equal(q.text.len, 4);
    assert_encodes(&q, 0, tok, true, "Once");
    assert_encodes(&q, 1, tok, true, "");
    assert_encodes(&q, 2, tok, true, "upon a time");
    di_request_deinit(&q);

    q = take("{\"prompt\":[5,6,7]}");
    assert_int_equal(q.n_prompts, 1);
    assert_int_equal(q.input, DI_INPUT_IDS);
    assert_int_equal(q.n_ids, 3);
    assert_int_equal(q.ids[2], 7);
    di_request_deinit(&q);

    q = take("{\"prompt\":[[5,6],[7],\"x\"]}");
    assert_int_equal(q.n_prompts, 3);
    assert_int_equal(q.n_ids, 2);
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_request_encode_prompt(&q, 1, tok, NULL, NULL, &ids, &err), &err);
    assert_int_equal(ids.len, 1);
    assert_int_equal(ids.data[0], 7);
    di_ids_deinit(&ids);
    assert_encodes(&q, 2, tok, true, "x");
    di_request_deinit(&q);
    di_tokenizer_close(tok);
}

static void the_begin_mark_can_be_left_out(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_request q = take("{\"prompt\":\"Once\",\"add_special_tokens\":false}");
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_request_encode(&q, tok, NULL, NULL, &ids, &err), &err);
    assert_true(ids.len > 0 && ids.data[0] != 0);
    di_ids_deinit(&ids);
    assert_encodes(&q, 0, tok, false, "Once");
    di_request_deinit(&q);
    di_tokenizer_close(tok);
}

static void the_fields_of_chat_that_sample_are_here_too(void **state) {
    (void)state;
    di_request q = take("{\"prompt\":\"x\",\"model\":\"m\",\"temperature\":0.5,\"top_p\":0.9,\"top_k\":3,\"min_p\":0.1,"
                        "\"max_tokens\":7,\"seed\":9,\"stop\":[\"a\",\"b\"],\"stream\":true,"
                        "\"stream_options\":{\"include_usage\":true},\"user\":\"u\",\"presence_penalty\":1,"
                        "\"logit_bias\":{\"3\":-5},\"ignore_eos\":true,\"priority\":2,\"response_format\":null}");
    assert_true(q.sampling.temperature == 0.5 && q.sampling.top_p == 0.9 && q.sampling.min_p == 0.1);
    assert_int_equal(q.sampling.top_k, 3);
    assert_int_equal(q.sampling.max_tokens, 7);
    assert_int_equal(q.sampling.seed, 9);
    assert_int_equal(q.sampling.n_stop, 2);
    assert_true(q.is_stream && q.stream_usage && q.sampling.ignore_eos);
    assert_int_equal(q.sampling.n_bias, 1);
    assert_int_equal(q.priority, 2);
    assert_int_equal(q.model.len, 1);
    assert_int_equal(q.caller.len, 1);
    di_request_deinit(&q);

    q = take("{\"prompt\":\"x\",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\","
             "\"schema\":{\"type\":\"object\"}}}}");
    assert_int_equal(q.constraint, DI_CONSTRAINT_JSON);
    di_request_deinit(&q);
    q = take("{\"prompt\":\"x\",\"regex\":\"[ab]+\"}");
    assert_int_equal(q.constraint, DI_CONSTRAINT_REGEX);
    di_request_deinit(&q);
    q = take("{\"prompt\":\"x\",\"choice\":[\"yes\",\"no\"]}");
    assert_int_equal(q.constraint, DI_CONSTRAINT_CHOICE);
    di_request_deinit(&q);
}

static void logprobs_are_a_number(void **state) {
    (void)state;
    di_request q = take("{\"prompt\":\"x\"}");
    assert_int_equal(q.sampling.n_logprobs, -1);
    di_request_deinit(&q);
    q = take("{\"prompt\":\"x\",\"logprobs\":0}");
    assert_int_equal(q.sampling.n_logprobs, 0);
    assert_int_equal(q.sampling.n_prompt_logprobs, -1);
    di_request_deinit(&q);
    /* What comes back of the prompt has them too. */
    q = take("{\"prompt\":\"x\",\"logprobs\":5,\"echo\":true}");
    assert_true(q.echo && !q.is_echo_only);
    assert_int_equal(q.sampling.n_logprobs, 5);
    assert_int_equal(q.sampling.n_prompt_logprobs, 5);
    di_request_deinit(&q);
    q = take("{\"prompt\":\"x\",\"echo\":true}");
    assert_int_equal(q.sampling.n_prompt_logprobs, -1);
    di_request_deinit(&q);
}

/* Clients that score a text ask for no new token at all. */
static void a_prompt_can_be_scored_alone(void **state) {
    (void)state;
    di_request q = take("{\"prompt\":\"x\",\"logprobs\":1,\"echo\":true,\"max_tokens\":0}");
    assert_true(q.is_echo_only);
    assert_int_equal(di_request_max_tokens(&q, 10, 100), 1);
    di_request_deinit(&q);
    assert_refused("{\"prompt\":\"x\",\"max_tokens\":0}", "max_tokens", "expected 1 or more");
}

static void what_cannot_be_done_is_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *body, *param, *message;
    } cases[] = {
        {"{}", "prompt", "missing field"},
        {"{\"prompt\":null}", "prompt", "missing field"},
        {"{\"prompt\":5}", "prompt", "found integer"},
        {"{\"prompt\":[]}", "prompt", "an empty list"},
        {"{\"prompt\":[[]]}", "prompt[0]", "an empty prompt"},
        {"{\"prompt\":[\"a\",null]}", "prompt[1]", "expected a string or a list of token ids, found null"},
        {"{\"prompt\":[\"a\",5]}", "prompt[1]", "found integer"},
        {"{\"prompt\":[5,\"a\"]}", "prompt[1]", "expected a token id, found string"},
        {"{\"prompt\":[5,-1]}", "prompt[1]", "expected a token id"},
        {"{\"prompt\":[[5,1.5]]}", "prompt[0][1]", "expected a token id"},
        {"{\"prompt\":\"\",\"add_special_tokens\":false}", "prompt", "an empty text"},
        {"{\"prompt\":\"x\",\"echo\":1}", "echo", "true or false"},
        {"{\"prompt\":\"x\",\"suffix\":\"y\"}", "suffix", "not supported"},
        {"{\"prompt\":\"x\",\"best_of\":3}", "best_of", "expected n, which is 1"},
        {"{\"prompt\":\"x\",\"n\":3,\"best_of\":2}", "best_of", "expected n, which is 3"},
        {"{\"prompt\":\"x\",\"logprobs\":true}", "logprobs", "expected an integer"},
        {"{\"prompt\":\"x\",\"logprobs\":-1}", "logprobs", "expected 0 to 20"},
        {"{\"prompt\":\"x\",\"logprobs\":21}", "logprobs", "expected 0 to 20"},
        {"{\"prompt\":\"x\",\"prompt_logprobs\":21}", "prompt_logprobs", "expected -1 to 20"},
        {"{\"prompt\":[\"x\",\"y\",\"z\"],\"n\":2000}", "n", "2000 samples of 3 prompts"},
        {"{\"prompt\":\"x\",\"temperature\":-1}", "temperature", "-1"},
        {"{\"prompt\":\"x\",\"stream_options\":5}", "stream_options", "an object"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        assert_refused(cases[i].body, cases[i].param, cases[i].message);
    }
    di_request q = take("{\"prompt\":\"x\",\"suffix\":\"\",\"best_of\":2,\"n\":2}");
    di_request_deinit(&q);
}

/* The hosted service has no completions: its clamps are not for them. */
static void the_hosted_services_rules_do_not_apply(void **state) {
    (void)state;
    static const char body[] = "{\"prompt\":\"x\",\"n\":2,\"top_p\":0.5,\"model\":\"other\"}";
    di_request_options options;
    di_request_options_init(&options, true);
    di_request q;
    di_error err;
    di_test_ok(di_request_parse(&q, DI_API_COMPLETIONS, body, strlen(body), &options, &err), &err);
    assert_int_equal(q.n, 2);
    assert_true(q.sampling.top_p == 0.5);
    di_request_deinit(&q);
}

static void the_name_is_known_and_not_one_of_chat(void **state) {
    (void)state;
    di_api_kind kind;
    assert_true(di_api_kind_parse("completions", &kind));
    assert_int_equal(kind, DI_API_COMPLETIONS);
}

DI_TEST_GROUP(request_prompt, cmocka_unit_test(prompts_come_in_four_forms),
              cmocka_unit_test(the_begin_mark_can_be_left_out),
              cmocka_unit_test(the_fields_of_chat_that_sample_are_here_too), cmocka_unit_test(logprobs_are_a_number),
              cmocka_unit_test(a_prompt_can_be_scored_alone), cmocka_unit_test(what_cannot_be_done_is_refused_by_name),
              cmocka_unit_test(the_hosted_services_rules_do_not_apply),
              cmocka_unit_test(the_name_is_known_and_not_one_of_chat));
