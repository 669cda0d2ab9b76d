/* The public chat API over the tiny model's tokenizer: results are the caller's, options are checked, refusals say why.
 */
#include "harness.h"

#include "deepinfer/text.h"

static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}";

typedef struct result {
    char *prompt;
    size_t prompt_len;
    int32_t *ids;
    size_t n_ids;
    di_error err;
} result;

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

static di_status encode(const di_tokenizer *tok, const char *text, const di_chat_encode_options *options, result *r) {
    *r = (result){0};
    return di_chat_encode(tok, text, strlen(text), options, &r->prompt, &r->prompt_len, &r->ids, &r->n_ids, &r->err);
}

static void drop(result *r) {
    di_free(r->prompt);
    di_free(r->ids);
}

static void bodies_become_prompts(void **state) {
    (void)state;
    static const struct {
        di_chat_encode_options options;
        const char *text, *want;
    } cases[] = {
        {{0}, body, "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"},
        {{.reasoning = "7"},
         body,
         "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 7 (range 1-100, the higher the value, the more thorough "
         "the "
         "reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"},
        {{.vendor_compat = true},
         body,
         "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the more "
         "thorough the "
         "reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"},
        {{.api = "messages"}, body, "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"},
        {{.api = "responses"}, "{\"input\":\"Hi\"}", "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"},
    };
    di_tokenizer *tok = open_tiny();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        result r;
        di_test_ok(encode(tok, cases[i].text, &cases[i].options, &r), &r.err);
        assert_string_equal(r.prompt, cases[i].want);
        assert_int_equal(r.prompt_len, strlen(cases[i].want));
        assert_int_equal(r.ids[0], 0);
        char *text = NULL;
        di_test_ok(di_tokenizer_detokenize(tok, r.ids, r.n_ids, false, &text, NULL, &r.err), &r.err);
        assert_string_equal(text, cases[i].want);
        di_free(text);
        drop(&r);
    }
    di_tokenizer_close(tok);
}

static void refusals_say_why_and_leave_outputs_alone(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    result r;
    assert_int_equal(encode(tok, "{", NULL, &r), DI_ERR_REQUEST);
    assert_contains(r.err.message, "not JSON");
    assert_int_equal(encode(tok, "{\"messages\":[]}", NULL, &r), DI_ERR_REQUEST);
    assert_contains(r.err.message, "Empty input messages");
    assert_int_equal(encode(tok, body, &(di_chat_encode_options){.api = "line"}, &r), DI_ERR_ARG);
    assert_contains(r.err.message, "'line'");
    assert_int_equal(encode(tok, body, &(di_chat_encode_options){.reasoning = "101"}, &r), DI_ERR_ARG);
    assert_contains(r.err.message, "'101'");
    assert_int_equal(
        encode(tok,
               "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":"
               "\"data:\"}}]}]}",
               NULL, &r),
        DI_ERR_UNSUPPORTED);
    assert_null(r.prompt);
    assert_null(r.ids);
    di_tokenizer_close(tok);
}

DI_TEST_GROUP(chat_api, cmocka_unit_test(bodies_become_prompts),
              cmocka_unit_test(refusals_say_why_and_leave_outputs_alone));
