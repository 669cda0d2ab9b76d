/* Server-sent events as a client reads them. Expected events are those of the HTML standard's event stream format, the
 * examples of its section on interpreting a stream included; chunks are in the forms of the OpenAI API. */
#include "harness.h"

#include "cli/bench_sse.h"

typedef struct seen {
    di_strbuf text; /* "name=data|" for each event */
    int n, fail_at;
} seen;

static di_status on_event(void *user, const char *name, const char *data, size_t len, di_error *err) {
    seen *s = user;
    assert_int_equal(data[len], '\0');
    di_strbuf_printf(&s->text, "%s=", name);
    di_strbuf_append(&s->text, data, len);
    di_strbuf_putc(&s->text, '|');
    return ++s->n == s->fail_at ? di_fail(err, DI_ERR_CANCELLED, "enough") : DI_OK;
}

/* What comes of a stream that arrives in these pieces; each piece is a copy of its own, so that reading beyond it
 * shows. */
static void feed(di_sse *sse, const char *text, size_t n) {
    di_error err = {0};
    char *copy = malloc(n ? n : 1);
    assert_non_null(copy);
    memcpy(copy, text, n);
    di_test_ok(di_sse_feed(sse, copy, n, &err), &err);
    free(copy);
}

/* The same events whole, cut in two and in three at every place, and byte by byte. */
static void assert_events(const char *text, const char *expected) {
    size_t n = strlen(text);
    seen s = {0};
    di_sse sse = {.callback = on_event, .user = &s};
    for (size_t a = 0; a <= n; a++) {
        for (size_t b = a; b <= n; b++) {
            di_sse_reset(&sse);
            di_strbuf_reset(&s.text);
            feed(&sse, text, a);
            feed(&sse, text + a, b - a);
            feed(&sse, text + b, n - b);
            assert_string_equal(di_strbuf_str(&s.text), expected);
        }
    }
    di_sse_reset(&sse);
    di_strbuf_reset(&s.text);
    for (size_t i = 0; i < n; i++)
        feed(&sse, text + i, 1);
    assert_string_equal(di_strbuf_str(&s.text), expected);
    di_sse_deinit(&sse);
    di_strbuf_deinit(&s.text);
}

static void events_are_those_of_the_standard(void **state) {
    (void)state;
    assert_events("data: YHOO\ndata: +2\ndata: 10\n\n", "message=YHOO\n+2\n10|");
    assert_events(": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
                  "message=first event|message=second event|message= third event|");
    /* two empty events; the third is not whole */
    assert_events("data\n\ndata\ndata\n\ndata:", "message=|message=\n|");
    assert_events("data:test\n\ndata: test\n\n", "message=test|message=test|");
    assert_events("event: add\ndata: 73857293\n\nevent: remove\ndata: 2153\n\ndata: x\n\n",
                  "add=73857293|remove=2153|message=x|");
}

static void lines_may_end_in_three_ways(void **state) {
    (void)state;
    assert_events("data: a\r\n\r\ndata: b\r\rdata: c\n\n", "message=a|message=b|message=c|");
    assert_events("data: a\r\ndata: b\n\r\n", "message=a\nb|");
    assert_events("\r\n\r\n\n\rdata: a\n\n", "message=a|");
}

static void what_is_no_data_makes_no_event(void **state) {
    (void)state;
    assert_events(": keep-alive\n\n: again\n\n", "");
    assert_events("event: ping\n\ndata: a\n\n", "message=a|"); /* the name goes with its event */
    assert_events("retry: 10\nnonsense: 1\nwithout colon\n\n", "");
    assert_events("\xEF\xBB\xBF"
                  "data: a\n\n\xEF\xBB\xBF"
                  "data: b\n\n",
                  "message=a|"); /* a byte order mark counts at the start alone */
    assert_events("data: {\"a\":\"b: c\"}\n\n", "message={\"a\":\"b: c\"}|");
}

static void a_callback_can_end_the_stream(void **state) {
    (void)state;
    di_error err = {0};
    seen s = {.fail_at = 2};
    di_sse sse = {.callback = on_event, .user = &s};
    const char *text = "data: 1\n\ndata: 2\n\ndata: 3\n\n";
    assert_int_equal(di_sse_feed(&sse, text, strlen(text), &err), DI_ERR_CANCELLED);
    assert_string_equal(di_strbuf_str(&s.text), "message=1|message=2|");
    di_sse_deinit(&sse);
    di_strbuf_deinit(&s.text);
}

static void an_event_without_end_is_refused(void **state) {
    (void)state;
    enum { PIECE = 1 << 20 };
    char *piece = malloc(PIECE);
    assert_non_null(piece);
    memset(piece, 'x', PIECE);
    for (int with_lines = 0; with_lines < 2; with_lines++) {
        di_error err = {0};
        seen s = {0};
        di_sse sse = {.callback = on_event, .user = &s};
        di_status st = DI_OK;
        memcpy(piece, "data:", 5);
        piece[PIECE - 1] = with_lines ? '\n' : 'x';
        int n = 0;
        for (; n < 2 * (DI_SSE_EVENT_MAX / PIECE) && !st; n++)
            st = di_sse_feed(&sse, piece, PIECE, &err);
        assert_int_equal(st, DI_ERR_FORMAT);
        assert_in_range(n, DI_SSE_EVENT_MAX / PIECE, DI_SSE_EVENT_MAX / PIECE + 1);
        di_sse_deinit(&sse);
        di_strbuf_deinit(&s.text);
    }
    free(piece);
}

static di_sse_chunk chunk(const char *data) {
    di_sse_chunk c;
    di_sse_chunk_read(data, strlen(data), &c);
    return c;
}

static void text_is_found_in_every_form(void **state) {
    (void)state;
    static const char *const with[] = {
        "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}",
        "{\"choices\": [{\"index\": 0, \"delta\": {\"role\": \"assistant\", \"content\" : \"a\"}}]}",
        "{\"choices\":[{\"delta\":{\"content\":null,\"reasoning_content\":\"a\"}}]}",
        "{\"choices\":[{\"delta\":{\"content\":\"\",\"reasoning\":\"a\"}}]}",
        "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\"}}]}}]}",
        "{\"choices\":[{\"delta\":{\"content\":\"\"}},{\"delta\":{\"content\":\"b\"}}]}",
        "{\"choices\":[{\"index\":0,\"text\":\"a\",\"logprobs\":null}]}",
        "{\"choices\":[{\"index\":0,\"text\":\"\\\"error\\\":{\"}]}",
    };
    static const char *const without[] = {
        "{\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}",
        "{\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"length\"}]}",
        "{\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}",
        "{\"object\":\"content\",\"choices\":[{\"delta\":{}}]}",
        "{\"object\":\"text\",\"model\":\"content\",\"choices\":[]}",
        "[DONE]",
        "",
    };
    for (size_t i = 0; i < DI_COUNT(with); i++) {
        di_sse_chunk c = chunk(with[i]);
        assert_true(c.has_text);
        assert_false(c.is_end);
        assert_false(c.is_error);
    }
    for (size_t i = 0; i < DI_COUNT(without); i++)
        assert_false(chunk(without[i]).has_text);
}

static void usage_ends_and_errors_are_told(void **state) {
    (void)state;
    di_sse_chunk c =
        chunk("{\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"total_tokens\":46,\"completion_tokens\":34,"
              "\"completion_tokens_details\":{\"reasoning_tokens\":5}}}");
    assert_int_equal(c.prompt_tokens, 12);
    assert_int_equal(c.output_tokens, 34);
    c = chunk("{\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}");
    assert_int_equal(c.prompt_tokens, -1);
    assert_int_equal(c.output_tokens, -1);
    assert_true(chunk("[DONE]").is_end);
    assert_false(chunk("[done]").is_end);
    assert_true(chunk("{\"error\":{\"message\":\"no\",\"code\":500}}").is_error);
    assert_true(chunk("{\"error\": \"no\"}").is_error);
    assert_false(chunk("{\"choices\":[],\"error\":null}").is_error);
    /* what a text says about itself is text: quotation marks in it are escaped */
    c = chunk("{\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":{\\\"completion_tokens\\\":9}\"}}]}");
    assert_int_equal(c.output_tokens, -1);
    assert_false(
        chunk("{\"choices\":[{\"delta\":{\"content\":\"\"},\"note\":\"\\\"content\\\":\\\"x\\\"\"}]}").has_text);
}

DI_TEST_GROUP(bench_sse, cmocka_unit_test(events_are_those_of_the_standard),
              cmocka_unit_test(lines_may_end_in_three_ways), cmocka_unit_test(what_is_no_data_makes_no_event),
              cmocka_unit_test(a_callback_can_end_the_stream), cmocka_unit_test(an_event_without_end_is_refused),
              cmocka_unit_test(text_is_found_in_every_form), cmocka_unit_test(usage_ends_and_errors_are_told));
