/* Log-probabilities in replies, token by token, in the form of each API: which text they come with, how tokens are
 * named that are no text, where they begin, and that nobody gets them who has not asked. */
#include "harness.h"

#include "api/api.h"

typedef struct rig {
    di_tokenizer *tok;
    di_strbuf wire;
    di_reply_stream *stream;
} rig;

static void rig_open(rig *r, di_reply_protocol protocol, const di_json *request, bool has_sink) {
    di_error err;
    const di_reply_head head = {.id = "id", .model = "m", .created_s = 5, .request = request, .has_reasoning = true};
    const di_reply_usage usage = {.prompt_tokens = 1};
    *r = (rig){0};
    di_test_ok(di_tokenizer_open(&r->tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    di_test_ok(di_reply_stream_create(&r->stream, protocol, &head, has_sink ? di_reply_sse_sink : NULL, &r->wire, &err),
               &err);
    di_test_ok(di_reply_stream_start(r->stream, &usage, &err), &err);
    di_strbuf_reset(&r->wire);
}

static void rig_close(rig *r) {
    di_reply_stream_destroy(r->stream);
    di_strbuf_deinit(&r->wire);
    di_tokenizer_close(r->tok);
}

static void rig_push(rig *r, di_parser_event_kind kind, const char *text) {
    const di_parser_event event = {.kind = kind, .call_id = -1, .text = text, .len = strlen(text)};
    di_error err;
    di_test_ok(di_reply_stream_push(r->stream, &event, &err), &err);
}

static void rig_token(rig *r, int32_t token, float logprob, const di_logprob *top, int32_t n_top) {
    di_error err;
    di_test_ok(di_reply_stream_token(r->stream, r->tok, token, logprob, top, n_top, &err), &err);
}

static void rig_finish(rig *r) {
    di_error err;
    const di_reply_usage usage = {.prompt_tokens = 1, .completion_tokens = 2};
    di_test_ok(di_reply_stream_finish(r->stream, DI_FINISH_STOP, NULL, &usage, 0, &err), &err);
}

/* The response as compact text; the caller frees it. */
static di_strbuf response_text(const rig *r) {
    di_json *response = di_reply_stream_response(r->stream);
    di_strbuf text = {0};
    di_json_write(&text, response, DI_JSON_COMPACT);
    di_json_free(response);
    return text;
}

/* The id of a token with this spelling of its bytes. */
static int32_t id_of(const di_tokenizer *tok, const char *bytes) {
    for (int32_t id = 0; id < di_tokenizer_size(tok); id++) {
        size_t len;
        const char *have = di_tokenizer_bytes(tok, id, &len);
        if (len == strlen(bytes) && memcmp(have, bytes, len) == 0) {
            return id;
        }
    }
    fail_msg("no token '%s'", bytes);
    return -1;
}

#define ENTRY(token, logprob, bytes) "\"token\":\"" token "\",\"logprob\":" logprob ",\"bytes\":[" bytes "]"

static void chat_names_text_and_bytes(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_CHAT, NULL, true);
    const di_logprob top[] = {{id_of(r.tok, "b"), -0.1f}, {id_of(r.tok, "\xe4"), -2.5f}, {-1, 0}};
    rig_token(&r, id_of(r.tok, "a"), -0.25f, top, 3);
    rig_token(&r, id_of(r.tok, "\xe4"), -9999.0f, NULL, 0);
    rig_push(&r, DI_PARSER_CONTENT, "a");
    assert_contains(
        r.wire.data,
        "\"logprobs\":{\"content\":[{" ENTRY("a", "-0.25", "97") ",\"top_logprobs\":[{" ENTRY(
            "b", "-0.1", "98") "},{" ENTRY("\xef\xbf\xbd", "-2.5",
                                           "228") "}]},{" ENTRY("\xef\xbf\xbd", "-9999.0",
                                                                "228") ",\"top_logprobs\":[]}],\"refusal\":null}");
    di_strbuf_reset(&r.wire);
    rig_push(&r, DI_PARSER_CONTENT, "b");
    assert_contains(r.wire.data, "\"logprobs\":null");
    /* What comes behind the last text goes with the last chunk. */
    di_strbuf_reset(&r.wire);
    rig_token(&r, id_of(r.tok, "b"), -1.0f, NULL, 0);
    rig_finish(&r);
    assert_contains(r.wire.data, "\"content\":[{" ENTRY("b", "-1.0", "98"));
    rig_close(&r);
}

static void chat_responses_have_all_tokens(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_CHAT, NULL, false);
    rig_token(&r, id_of(r.tok, "a"), -1.5f, NULL, 0);
    rig_push(&r, DI_PARSER_CONTENT, "a");
    rig_token(&r, id_of(r.tok, "b"), -0.3f, NULL, 0);
    rig_push(&r, DI_PARSER_CONTENT, "b");
    rig_finish(&r);
    di_strbuf text = response_text(&r);
    assert_contains(text.data, "\"logprobs\":{\"content\":[{" ENTRY("a", "-1.5", "97") ",\"top_logprobs\":[]},{" ENTRY(
                                   "b", "-0.3", "98") ",\"top_logprobs\":[]}],\"refusal\":null}");
    di_strbuf_deinit(&text);
    rig_close(&r);
}

static void completions_have_lists(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_COMPLETIONS, NULL, true);
    const di_logprob top[] = {{id_of(r.tok, "b"), -0.1f}, {id_of(r.tok, "a"), -0.25f}};
    rig_token(&r, id_of(r.tok, "a"), -0.25f, top, 2);
    rig_token(&r, id_of(r.tok, "c"), -3.0f, top, 2);
    rig_push(&r, DI_PARSER_CONTENT, "ac");
    assert_contains(r.wire.data, "\"logprobs\":{\"text_offset\":[0,1],\"token_logprobs\":[-0.25,-3.0],\"tokens\":["
                                 "\"a\",\"c\"],\"top_logprobs\":[{\"b\":-0.1,\"a\":-0.25},{\"b\":-0.1,\"a\":-0.25,"
                                 "\"c\":-3.0}]}");
    di_strbuf_reset(&r.wire);
    rig_token(&r, id_of(r.tok, "b"), -1.0f, NULL, 0);
    rig_finish(&r);
    assert_contains(r.wire.data,
                    "\"text\":\"\",\"index\":0,\"logprobs\":{\"text_offset\":[2],\"token_logprobs\":[-1.0],"
                    "\"tokens\":[\"b\"],\"top_logprobs\":[{\"b\":-1.0}]},\"finish_reason\":\"stop\"");
    rig_close(&r);
}

/* Parts of a character are named by their bytes and stand where the character does. */
static void completions_count_characters(void **state) {
    (void)state;
    static const char *const tokens[] = {"a", "\xf0", "\x9f", "\x98", "\x80", "b"};
    rig r;
    rig_open(&r, DI_REPLY_COMPLETIONS, NULL, false);
    for (size_t i = 0; i < DI_COUNT(tokens); i++) {
        rig_token(&r, id_of(r.tok, tokens[i]), -1.0f, NULL, 0);
    }
    rig_push(&r, DI_PARSER_CONTENT,
             "a\xf0\x9f\x98\x80"
             "b");
    rig_finish(&r);
    di_strbuf text = response_text(&r);
    assert_contains(text.data, "\"text_offset\":[0,1,1,1,1,2]");
    assert_contains(text.data, "\"tokens\":[\"a\",\"bytes:\\\\xf0\",\"bytes:\\\\x9f\",\"bytes:\\\\x98\","
                               "\"bytes:\\\\x80\",\"b\"]");
    assert_contains(text.data, "{\"bytes:\\\\xf0\":-1.0}");
    di_strbuf_deinit(&text);
    rig_close(&r);
}

static void echoed_prompts_have_theirs_in_front(void **state) {
    (void)state;
    rig r;
    rig_open(&r, DI_REPLY_COMPLETIONS, NULL, true);
    const int32_t ids[] = {0, id_of(r.tok, "a"), id_of(r.tok, "\xe4")};
    const float logprobs[] = {NAN, -0.5f, -0.75f};
    const di_logprob top[] = {{-1, 0}, {ids[1], -0.5f}, {ids[1], -0.125f}};
    di_error err;
    di_test_ok(di_reply_stream_echo(r.stream, r.tok, ids, 3, logprobs, top, 1, &err), &err);
    assert_contains(r.wire.data,
                    "\"text\":\"a\xef\xbf\xbd\",\"index\":0,\"logprobs\":{\"text_offset\":[0,0,1],\"token_logprobs\":["
                    "null,-0.5,-0.75],\"tokens\":[\"<\xef\xbd\x9c"
                    "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>\",\"a\",\"bytes:\\\\xe4\"],"
                    "\"top_logprobs\":[null,{\"a\":-0.5},{\"a\":-0.125,\"bytes:\\\\xe4\":-0.75}]}");
    di_strbuf_reset(&r.wire);
    rig_token(&r, ids[1], -2.0f, NULL, 0);
    rig_push(&r, DI_PARSER_CONTENT, "a");
    assert_contains(r.wire.data, "\"text_offset\":[2],\"token_logprobs\":[-2.0]");
    rig_close(&r);
}

static di_json *include_logprobs(void) {
    static const char body[] = "{\"include\":[\"reasoning.encrypted_content\",\"message.output_text.logprobs\"]}";
    di_json *request = NULL;
    di_error err;
    di_test_ok(di_json_parse(&request, body, strlen(body), &err), &err);
    return request;
}

/* Reasoning, marks and calls have tokens, too; the part is of the text alone. */
static void responses_have_those_of_the_text(void **state) {
    (void)state;
    di_json *request = include_logprobs();
    rig r;
    rig_open(&r, DI_REPLY_RESPONSES, request, true);
    rig_token(&r, id_of(r.tok, "r"), -4.0f, NULL, 0);
    rig_push(&r, DI_PARSER_REASONING, "r");
    rig_token(&r, id_of(r.tok, "</think>"), -5.0f, NULL, 0);
    const di_logprob top[] = {{id_of(r.tok, "b"), -0.125f}};
    rig_token(&r, id_of(r.tok, "a"), -0.25f, top, 1);
    rig_push(&r, DI_PARSER_CONTENT, "a");
    rig_token(&r, id_of(r.tok, "b"), -0.5f, NULL, 0);
    rig_push(&r, DI_PARSER_CONTENT, "b");
    rig_token(&r, id_of(r.tok, "f"), -6.0f, NULL, 0);
    rig_push(&r, DI_PARSER_CALL_BEGIN, "f");
    rig_push(&r, DI_PARSER_CALL_END, "");
    rig_finish(&r);
#define A "{" ENTRY("a", "-0.25", "97") ",\"top_logprobs\":[{" ENTRY("b", "-0.125", "98") "}]}"
#define B "{" ENTRY("b", "-0.5", "98") ",\"top_logprobs\":[]}"
    assert_contains(r.wire.data, "\"delta\":\"a\",\"item_id\":");
    assert_contains(r.wire.data, "\"logprobs\":[" A "],\"output_index\":1");
    assert_contains(r.wire.data, "\"logprobs\":[" B "],\"output_index\":1");
    assert_contains(r.wire.data,
                    "\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[" A "," B "],\"text\":\"ab\"");
    assert_null(strstr(r.wire.data, "-4.0"));
    assert_null(strstr(r.wire.data, "-5.0"));
    assert_null(strstr(r.wire.data, "-6.0"));
    di_strbuf text = response_text(&r);
    assert_contains(text.data, "\"logprobs\":[" A "," B "],\"text\":\"ab\"");
    di_strbuf_deinit(&text);
    rig_close(&r);
    di_json_free(request);
}

static void who_has_not_asked_gets_none(void **state) {
    (void)state;
    static const di_reply_protocol protocols[] = {DI_REPLY_RESPONSES, DI_REPLY_MESSAGES};
    for (size_t i = 0; i < DI_COUNT(protocols); i++) {
        rig r;
        rig_open(&r, protocols[i], NULL, true);
        rig_token(&r, id_of(r.tok, "a"), -0.25f, NULL, 0);
        rig_push(&r, DI_PARSER_CONTENT, "a");
        rig_finish(&r);
        assert_null(strstr(r.wire.data, "-0.25"));
        rig_close(&r);
    }
}

DI_TEST_GROUP(reply_logprobs, cmocka_unit_test(chat_names_text_and_bytes),
              cmocka_unit_test(chat_responses_have_all_tokens), cmocka_unit_test(completions_have_lists),
              cmocka_unit_test(completions_count_characters), cmocka_unit_test(echoed_prompts_have_theirs_in_front),
              cmocka_unit_test(responses_have_those_of_the_text), cmocka_unit_test(who_has_not_asked_gets_none));
