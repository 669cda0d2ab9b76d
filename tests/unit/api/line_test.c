/* Result lines: which of several samples, cached tokens, log-probabilities of the prompt, and the lines that have none
 * of these. Expected texts follow the table of keys in docs/interface.md. */
#include <math.h>

#include "harness.h"

#include "api/api.h"

static di_request request_of(const char *body) {
    di_request_options options;
    di_request_options_init(&options, false);
    di_request q;
    di_error err = {0};
    di_test_ok(di_request_parse(&q, DI_API_LINE, body, strlen(body), &options, &err), &err);
    return q;
}

static void assert_line(const char *body, const di_generation *gen, const char *want) {
    di_request q = request_of(body);
    di_strbuf out = {0};
    di_line_result(&out, &q, gen, NULL);
    assert_string_equal(di_strbuf_str(&out), want);
    di_strbuf_deinit(&out);
    di_request_deinit(&q);
}

static const int32_t prompt[] = {0, 70, 8}, tokens[] = {5, 1};

static di_generation two_tokens(void) {
    return (di_generation){.index = 2,
                           .finish = DI_FINISH_STOP,
                           .n_prompt = 3,
                           .n_tokens = 2,
                           .n_cached = 0,
                           .prompt = prompt,
                           .tokens = tokens,
                           .text = "ab",
                           .text_len = 2};
}

static void plain_line(void **state) {
    (void)state;
    di_generation gen = two_tokens();
    gen.index = 0;
    assert_line("{\"id\":\"a\",\"prompt\":\"x\"}", &gen,
                "{\"id\":\"a\",\"text\":\"ab\",\"token_ids\":[5,1],\"finish_reason\":\"stop\",\"usage\":{"
                "\"prompt_tokens\":3,\"completion_tokens\":2,\"cached_tokens\":0,\"draft_tokens\":0,"
                "\"accepted_tokens\":0}}\n");
}

static void samples_say_which_they_are(void **state) {
    (void)state;
    di_generation gen = two_tokens();
    gen.has_seed = true;
    gen.seed = 9;
    gen.n_cached = 2;
    assert_line("{\"id\":7,\"prompt\":\"x\",\"n\":3,\"seed\":7}", &gen,
                "{\"id\":7,\"index\":2,\"text\":\"ab\",\"token_ids\":[5,1],\"finish_reason\":\"stop\",\"seed\":9,"
                "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"cached_tokens\":2,\"draft_tokens\":0,"
                "\"accepted_tokens\":0}}\n");
}

static void prompt_log_probabilities_begin_with_null(void **state) {
    (void)state;
    static const float logprobs[] = {NAN, -0.5f, -2.25f};
    static const di_logprob top[] = {{-1, DI_LOGPROB_FLOOR}, {-1, DI_LOGPROB_FLOOR}, {70, -0.5f}, {3, -1.5f},
                                     {4, -0.125f},           {-1, DI_LOGPROB_FLOOR}};
    di_generation gen = two_tokens();
    gen.prompt_logprobs = logprobs;
    gen.prompt_top = top;
    gen.n_prompt_top = 2;
    gen.n_tokens = 0;
    gen.text_len = 0;
    assert_line("{\"prompt\":\"x\",\"prompt_logprobs\":2}", &gen,
                "{\"id\":null,\"text\":\"\",\"token_ids\":[],\"finish_reason\":\"stop\",\"usage\":{"
                "\"prompt_tokens\":3,\"completion_tokens\":0,\"cached_tokens\":0,\"draft_tokens\":0,"
                "\"accepted_tokens\":0},\"prompt_logprobs\":[null,{\"token_id\":70,\"logprob\":-0.5,"
                "\"top\":[[70,-0.5],[3,-1.5]]},{\"token_id\":8,\"logprob\":-2.25,\"top\":[[4,-0.125]]}]}\n");
    /* Of the tokens alone; and none where the run ended before they were there. */
    gen.prompt_top = NULL;
    gen.n_prompt_top = 0;
    gen.n_prompt = 2;
    assert_line("{\"prompt\":\"x\",\"prompt_logprobs\":0}", &gen,
                "{\"id\":null,\"text\":\"\",\"token_ids\":[],\"finish_reason\":\"stop\",\"usage\":{"
                "\"prompt_tokens\":2,\"completion_tokens\":0,\"cached_tokens\":0,\"draft_tokens\":0,"
                "\"accepted_tokens\":0},\"prompt_logprobs\":[null,{\"token_id\":70,\"logprob\":-0.5,\"top\":[]}]}\n");
    gen.prompt_logprobs = NULL;
    assert_line("{\"prompt\":\"x\",\"prompt_logprobs\":0}", &gen,
                "{\"id\":null,\"text\":\"\",\"token_ids\":[],\"finish_reason\":\"stop\",\"usage\":{"
                "\"prompt_tokens\":2,\"completion_tokens\":0,\"cached_tokens\":0,\"draft_tokens\":0,"
                "\"accepted_tokens\":0}}\n");
}

static void what_can_not_be_done_is_named(void **state) {
    (void)state;
    di_request image = request_of("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\","
                                  "\"image_url\":{\"url\":\"https://a.example/b.png\"}}]}]}");
    di_error err = {0};
    assert_int_equal(di_line_check(&image, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "messages[0]");
    assert_contains(err.message, "is an image");
    di_request_deinit(&image);
    di_request q =
        request_of("{\"prompt\":\"x\",\"n\":2,\"min_p\":0.1,\"logit_bias\":{\"1\":2},\"forced_token_ids\":[1]}");
    assert_int_equal(di_line_check(&q, NULL), DI_OK);
    di_request_deinit(&q);
}

DI_TEST_GROUP(line, cmocka_unit_test(plain_line), cmocka_unit_test(samples_say_which_they_are),
              cmocka_unit_test(prompt_log_probabilities_begin_with_null),
              cmocka_unit_test(what_can_not_be_done_is_named));
