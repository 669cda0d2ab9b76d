/* Completions as text_completion objects: chunks, the last one, several choices, echo, failures; and the fast way of
 * writing them beside the general one. The forms are those of the public API. */
#include "harness.h"

#include "api/api.h"

static const di_reply_head head_plain = {.id = "cmpl-1", .model = "m", .created_s = 5};
static const di_reply_usage used = {.prompt_tokens = 3, .completion_tokens = 2, .cached_tokens = 1};

#define CHUNK(text, logprobs, finish)                                                                                  \
    "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\",\"system_fingerprint\":"    \
    "null,\"choices\":[{\"text\":\"" text "\",\"index\":0,\"logprobs\":" logprobs ",\"finish_reason\":" finish "}]"
#define USAGE                                                                                                          \
    "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5,\"prompt_tokens_details\":{"            \
    "\"cached_tokens\":1},\"prompt_cache_hit_tokens\":1,\"prompt_cache_miss_tokens\":2}"

static di_reply_stream *open_stream(const di_reply_head *head, di_reply_sink sink, void *user) {
    di_reply_stream *s = NULL;
    di_error err;
    di_test_ok(di_reply_stream_create(&s, DI_REPLY_COMPLETIONS, head, sink, user, &err), &err);
    di_test_ok(di_reply_stream_start(s, &used, &err), &err);
    return s;
}

static void push(di_reply_stream *s, const char *text, size_t len) {
    const di_parser_event event = {.kind = DI_PARSER_CONTENT, .call_id = -1, .text = text, .len = len};
    di_error err;
    di_test_ok(di_reply_stream_push(s, &event, &err), &err);
}

static void finish(di_reply_stream *s, di_finish reason, const di_reply_usage *usage) {
    di_error err;
    di_test_ok(di_reply_stream_finish(s, reason, NULL, usage, 0, &err), &err);
}

static void assert_response(const di_reply_stream *s, const char *want) {
    di_json *response = di_reply_stream_response(s);
    di_strbuf text = {0};
    di_json_write(&text, response, DI_JSON_COMPACT);
    assert_string_equal(di_strbuf_str(&text), want);
    di_strbuf_deinit(&text);
    di_json_free(response);
}

static di_tokenizer *open_tiny(void) {
    di_tokenizer *tok = NULL;
    di_error err;
    di_test_ok(di_tokenizer_open(&tok, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    return tok;
}

/* The ids of a begin mark and the text. */
static di_ids encode(const di_tokenizer *tok, const char *text) {
    di_ids ids = {0};
    di_error err;
    int32_t bos = 0;
    di_test_ok(di_ids_append(&ids, &bos, 1, &err), &err);
    di_test_ok(di_tokenizer_encode(tok, text, strlen(text), false, &ids, &err), &err);
    return ids;
}

static void chunks_and_response_have_text(void **state) {
    (void)state;
    di_strbuf wire = {0};
    di_reply_stream *s = open_stream(&head_plain, di_reply_sse_sink, &wire);
    push(s, "a \"b\"", 5);
    push(s, "\n\xe4\xb8\x96", 4);
    finish(s, DI_FINISH_LENGTH, &used);
    assert_string_equal(
        wire.data, CHUNK("a \\\"b\\\"", "null", "null") "}\n\n" CHUNK("\\n\xe4\xb8\x96", "null", "null") "}\n\n" CHUNK(
                       "", "null", "\"length\"") "," USAGE "}\n\ndata: [DONE]\n\n");
    assert_response(s, "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\",\"choices\":["
                       "{\"text\":\"a \\\"b\\\"\\n\xe4\xb8\x96\",\"index\":0,\"logprobs\":null,\"finish_reason\":"
                       "\"length\"}]," USAGE ",\"system_fingerprint\":null}");
    di_reply_stream_destroy(s);
    di_strbuf_deinit(&wire);
}

/* Text has no calls, whatever a parser that ran over it would say. */
static void calls_are_no_finish_reason(void **state) {
    (void)state;
    di_reply_stream *s = open_stream(&head_plain, NULL, NULL);
    finish(s, DI_FINISH_TOOL_CALLS, &used);
    di_json *response = di_reply_stream_response(s);
    assert_string_equal(
        di_json_str(di_json_get(di_json_at(di_json_get(response, "choices"), 0), "finish_reason"), NULL), "stop");
    di_json_free(response);
    di_reply_stream_destroy(s);
}

static void several_choices_share_a_response(void **state) {
    (void)state;
    di_strbuf wire = {0};
    di_reply_stream *s[3];
    for (int i = 0; i < 3; i++) {
        di_reply_head head = head_plain;
        head.choice_id = i;
        head.has_chunk_usage = true;
        s[i] = open_stream(&head, di_reply_sse_sink, &wire);
        push(s[i], "xyz" + i, 1);
    }
    for (int i = 2; i >= 0; i--) {
        finish(s[i], DI_FINISH_STOP, i == 0 ? &used : NULL);
    }
    assert_contains(wire.data, "\"text\":\"z\",\"index\":2,\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}");
    assert_null(strstr(strstr(wire.data, "[DONE]") + 1, "[DONE]"));
    assert_non_null(strstr(wire.data, USAGE));
    di_json *response = di_reply_choices_response((const di_reply_stream *const *)s, 3, &used);
    assert_int_equal(di_json_array_len(di_json_get(response, "choices")), 3);
    assert_string_equal(di_json_str(di_json_get(di_json_at(di_json_get(response, "choices"), 1), "text"), NULL), "y");
    di_json_free(response);
    for (int i = 0; i < 3; i++) {
        di_reply_stream_destroy(s[i]);
    }
    di_strbuf_deinit(&wire);
}

static void failures_are_error_objects(void **state) {
    (void)state;
    di_strbuf wire = {0};
    di_error err;
    di_reply_stream *s = open_stream(&head_plain, di_reply_sse_sink, &wire);
    di_test_ok(di_reply_stream_fail(s, DI_ERR_INTERNAL, "it broke", &err), &err);
    assert_string_equal(wire.data,
                        "data: {\"error\":{\"message\":\"it broke\",\"type\":\"server_error\",\"param\":null,"
                        "\"code\":\"server_error\"}}\n\ndata: [DONE]\n\n");
    di_reply_stream_destroy(s);
    di_strbuf_deinit(&wire);
}

static void echo_puts_the_prompt_in_front(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_ids ids = encode(tok, "Once <\xef\xbd\x9cUser\xef\xbd\x9c>");
    di_strbuf wire = {0};
    di_error err;
    di_reply_stream *s = open_stream(&head_plain, di_reply_sse_sink, &wire);
    di_test_ok(di_reply_stream_echo(s, tok, ids.data, ids.len, NULL, NULL, 0, &err), &err);
    assert_string_equal(wire.data, CHUNK("Once <\xef\xbd\x9cUser\xef\xbd\x9c>", "null", "null") "}\n\n");
    push(s, "!", 1);
    finish(s, DI_FINISH_STOP, &used);
    assert_contains(wire.data, CHUNK("!", "null", "null"));
    di_json *response = di_reply_stream_response(s);
    assert_string_equal(di_json_str(di_json_get(di_json_at(di_json_get(response, "choices"), 0), "text"), NULL),
                        "Once <\xef\xbd\x9cUser\xef\xbd\x9c>!");
    di_json_free(response);
    di_reply_stream_destroy(s);
    di_ids_deinit(&ids);
    di_strbuf_deinit(&wire);
    di_tokenizer_close(tok);
}

/* A prompt that is only scored: the token that the engine had to draw is not there. */
static void a_scored_prompt_has_no_answer(void **state) {
    (void)state;
    di_tokenizer *tok = open_tiny();
    di_ids ids = encode(tok, "Once");
    float *logprobs = calloc(ids.len, sizeof *logprobs);
    di_reply_head head = head_plain;
    di_error err;
    for (size_t i = 0; i < ids.len; i++) {
        logprobs[i] = i == 0 ? NAN : -(float)i;
    }
    head.is_echo_only = true;
    for (int with_sink = 0; with_sink < 2; with_sink++) {
        di_strbuf wire = {0};
        di_reply_stream *s = open_stream(&head, with_sink ? di_reply_sse_sink : NULL, &wire);
        di_test_ok(di_reply_stream_echo(s, tok, ids.data, ids.len, logprobs, NULL, 0, &err), &err);
        di_test_ok(di_reply_stream_token(s, tok, ids.data[1], -1, NULL, 0, &err), &err);
        push(s, "dropped", 7);
        finish(s, DI_FINISH_STOP, &used);
        di_json *response = di_reply_stream_response(s);
        di_strbuf text = {0};
        di_json_write(&text, response, DI_JSON_COMPACT);
        const char *all = with_sink ? wire.data : text.data;
        assert_contains(all, "\"text\":\"Once\"");
        assert_contains(all, "\"token_logprobs\":[null,-1.0");
        assert_contains(all, "\"finish_reason\":\"length\"");
        assert_contains(all, "\"completion_tokens\":0,\"total_tokens\":3,");
        assert_null(strstr(all, "dropped"));
        if (!with_sink) {
            const di_json *choice = di_json_at(di_json_get(response, "choices"), 0);
            assert_int_equal(di_json_array_len(di_json_get(di_json_get(choice, "logprobs"), "tokens")), ids.len);
        }
        di_strbuf_deinit(&text);
        di_json_free(response);
        di_reply_stream_destroy(s);
        di_strbuf_deinit(&wire);
    }
    free(logprobs);
    di_ids_deinit(&ids);
    di_tokenizer_close(tok);
}

/* ---- writing ---- */

/* The same sink under another address, so that every event is made of values. */
static di_status general_sink(void *user, const char *event, const di_json *data, di_error *err) {
    return di_reply_sse_sink(user, event, data, err);
}

/* Any bytes in any pieces, ill-formed ones too: both ways write the same. */
DI_PROPERTY(pieces_are_written_as_their_values, 200) {
    uint64_t rng = seed;
    static const di_reply_sink sinks[] = {di_reply_sse_sink, general_sink};
    di_reply_head head = {.id = "a\"b\xff", .model = "b\\a", .created_s = 1};
    head.has_chunk_usage = di_test_random_range(&rng, 0, 1) == 1;
    di_strbuf wire[2] = {{0}};
    di_reply_stream *s[2];
    for (int i = 0; i < 2; i++) {
        s[i] = open_stream(&head, sinks[i], &wire[i]);
    }
    for (int64_t n = di_test_random_range(&rng, 0, 20); n > 0; n--) {
        char text[40];
        size_t len = (size_t)di_test_random_range(&rng, 1, sizeof text);
        int64_t most = di_test_random_range(&rng, 0, 2) == 0 ? 255 : 127;
        for (size_t i = 0; i < len; i++) {
            text[i] = (char)di_test_random_range(&rng, 0, most);
        }
        push(s[0], text, len);
        push(s[1], text, len);
    }
    for (int i = 0; i < 2; i++) {
        finish(s[i], DI_FINISH_STOP, &used);
        di_reply_stream_destroy(s[i]);
    }
    assert_int_equal(wire[0].len, wire[1].len);
    assert_memory_equal(wire[0].data, wire[1].data, wire[0].len);
    di_strbuf_deinit(&wire[0]);
    di_strbuf_deinit(&wire[1]);
}

/* A sample's seed stands in its choice, exact up to 64 bits, where the head asks for details. */
static void choices_name_their_seed(void **state) {
    (void)state;
    di_reply_head head = head_plain;
    for (int has_details = 0; has_details < 2; has_details++) {
        di_strbuf wire = {0};
        head.has_details = has_details != 0;
        di_reply_stream *s = open_stream(&head, di_reply_sse_sink, &wire);
        push(s, "a", 1);
        di_reply_stream_seed(s, UINT64_MAX);
        finish(s, DI_FINISH_STOP, &used);
        bool names_it = strstr(wire.data, "\"finish_reason\":\"stop\",\"seed\":18446744073709551615}") != NULL;
        assert_int_equal(names_it, head.has_details);
        assert_null(strstr(wire.data, "\"finish_reason\":null,\"seed\""));
        di_reply_stream_destroy(s);
        di_strbuf_deinit(&wire);
    }
}

/* With running usage every chunk says the tokens so far, and the last one all of them. */
static void usage_can_run_along(void **state) {
    (void)state;
    di_strbuf wire = {0};
    di_reply_head head = head_plain;
    head.has_chunk_usage = head.has_running_usage = true;
    di_reply_stream *s = open_stream(&head, di_reply_sse_sink, &wire);
    di_reply_stream_count(s, 1);
    push(s, "a", 1);
    di_reply_stream_count(s, 4);
    push(s, "b", 1);
    finish(s, DI_FINISH_STOP, &used);
    const char *first = strstr(wire.data, "\"completion_tokens\":1,\"total_tokens\":4");
    assert_non_null(first);
    const char *second = strstr(first, "\"completion_tokens\":4,\"total_tokens\":7");
    assert_non_null(second);
    assert_non_null(strstr(second, "\"completion_tokens\":2,\"total_tokens\":5"));
    di_reply_stream_destroy(s);
    di_strbuf_deinit(&wire);
}

DI_TEST_GROUP(reply_completions, cmocka_unit_test(usage_can_run_along), cmocka_unit_test(choices_name_their_seed),
              cmocka_unit_test(chunks_and_response_have_text), cmocka_unit_test(calls_are_no_finish_reason),
              cmocka_unit_test(several_choices_share_a_response), cmocka_unit_test(failures_are_error_objects),
              cmocka_unit_test(echo_puts_the_prompt_in_front), cmocka_unit_test(a_scored_prompt_has_no_answer),
              cmocka_unit_test(pieces_are_written_as_their_values));
