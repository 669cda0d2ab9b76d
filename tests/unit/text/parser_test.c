/* The output parser and the stop matcher: what the recorded vectors do not show (events, chunk edges inside characters,
 * memory that does not grow, ends inside every state, the better rule for keys). */
#include "harness.h"

#include "text/text.h"

/* What came out of a parse: all events as text, one a line, pieces as they came. */
typedef struct event_log {
    di_strbuf text;
    int64_t n_events;
    int fail_at; /* the sink fails at this event, 0 = never */
} event_log;

static di_status write_log(void *user, const di_parser_event *event, di_error *err) {
    static const char names[] = {'r', 'c', 'b', 'a', 'e', 'd'};
    event_log *l = user;
    if (++l->n_events == l->fail_at) {
        return di_fail(err, DI_ERR_CANCELLED, "no more");
    }
    di_strbuf_putc(&l->text, names[event->kind]);
    if (event->kind == DI_PARSER_CALL_BEGIN || event->kind == DI_PARSER_CALL_ARGS ||
        event->kind == DI_PARSER_CALL_END) {
        di_strbuf_printf(&l->text, "%d", (int)event->call_id);
    } else {
        assert_int_equal(event->call_id, -1);
    }
    if (event->is_cut) {
        assert_int_equal(event->kind, DI_PARSER_CALL_END);
        di_strbuf_puts(&l->text, " cut");
    }
    if (event->len > 0) {
        di_strbuf_putc(&l->text, ' ');
        di_strbuf_append(&l->text, event->text, event->len);
    }
    di_strbuf_putc(&l->text, '\n');
    return DI_OK;
}

static di_parser *make(const di_parser_options *options, event_log *l) {
    di_parser *p;
    di_error err;
    di_test_ok(di_parser_create(&p, options, write_log, l, &err), &err);
    return p;
}

static void push(di_parser *p, const char *text) {
    di_error err;
    di_test_ok(di_parser_push(p, text, strlen(text), &err), &err);
}

static void finish(di_parser *p) {
    di_error err;
    di_test_ok(di_parser_finish(p, &err), &err);
}

/* Parses pieces (up to NULL) and compares the log. */
static void check(const di_parser_options *options, const char *const *pieces, const char *want) {
    event_log l = {0};
    di_parser *p = make(options, &l);
    for (size_t i = 0; pieces[i] != NULL; i++) {
        push(p, pieces[i]);
    }
    finish(p);
    assert_string_equal(di_strbuf_str(&l.text), want);
    di_parser_destroy(p);
    di_strbuf_deinit(&l.text);
}

#define PIECES(...) ((const char *const[]){__VA_ARGS__, NULL})
#define BAR "\xef\xbd\x9c"
#define OPEN "<" BAR "DSML" BAR
#define CLOSE "</" BAR "DSML" BAR

static const di_parser_options plain = {.stage = DI_CHAT_STAGE_CONTENT, .has_tools = true};
static const di_parser_options thinking = {.stage = DI_CHAT_STAGE_REASONING, .has_tools = true};
static const di_parser_options inside = {.starts_in_calls = true, .has_tools = true};
static const di_parser_options json = {.stage = DI_CHAT_STAGE_CONTENT, .has_tools = true, .is_json = true};

static void text_is_released_at_the_end_of_its_chunk(void **state) {
    (void)state;
    check(&plain, PIECES("Hello", " there"), "c Hello\nc  there\nd\n");
    check(&thinking, PIECES("a", "b</th", "ink>c"), "r a\nr b\nc c\nd\n");
}

static void possible_markers_wait(void **state) {
    (void)state;
    event_log l = {0};
    di_parser *p = make(&thinking, &l);
    push(p, "think\n\n</thin");
    assert_string_equal(di_strbuf_str(&l.text), "r think\n");
    assert_true(di_parser_is_reasoning(p));
    push(p, "g>");
    assert_string_equal(di_strbuf_str(&l.text), "r think\nr \n\n</thing>\n");
    push(p, "\n</think>");
    assert_false(di_parser_is_reasoning(p));
    push(p, "\n\n");
    push(p, "a\n");
    push(p, "\nb\n");
    finish(p);
    assert_string_equal(di_strbuf_str(&l.text), "r think\nr \n\n</thing>\nc a\nc \n\nb\nc \n\nd\n");
    di_parser_destroy(p);
    di_strbuf_deinit(&l.text);
}

static void line_feeds_belong_to_the_marker_behind_them(void **state) {
    (void)state;
    check(&thinking, PIECES("a\n\n\n</think>\n\nb\n\n" OPEN " calls>"), "r a\nc b\nd\n");
    /* not the ones before a marker that turned out to be none, nor before a stray end of thinking */
    check(&plain,
          PIECES("a\n<" BAR "DS"
                 "\n" OPEN),
          "c a\n<" BAR "DS\nd\n");
    check(&plain, PIECES("a\n</think>b"), "c a\nb\nd\n");
    check(&plain, PIECES("a<", OPEN), "c a\nc <\nd\n");
}

static void without_tools_a_call_block_is_text(void **state) {
    (void)state;
    const di_parser_options options = {.stage = DI_CHAT_STAGE_CONTENT};
    check(&options, PIECES("a\n\n" OPEN " calls>"), "c a\n\n" OPEN " calls>\nd\n");
}

static void resumed_stages_keep_line_feeds(void **state) {
    (void)state;
    const di_parser_options reasoning = {.stage = DI_CHAT_STAGE_REASONING_RESUMED};
    const di_parser_options content = {.stage = DI_CHAT_STAGE_CONTENT_RESUMED};
    check(&reasoning, PIECES("\na</think>\nb"), "r \na\nc b\nd\n");
    check(&content, PIECES("\n", "a"), "c \n\nc a\nd\n");
}

static void characters_are_not_cut(void **state) {
    (void)state;
    check(&plain, PIECES("a\xe4", "\xb8", "\x96\xe7\x95\x8c"), "c a\nc \xe4\xb8\x96\xe7\x95\x8c\nd\n");
    check(&plain, PIECES("\xf0\x9f\x98", "\x80"), "c \xf0\x9f\x98\x80\nd\n");
    /* what can never become a character does not wait, and an unfinished one is released at the end */
    check(&plain, PIECES("a\x80\x80", "b\xe4\xb8"), "c a\x80\x80\nc b\nc \xe4\xb8\nd\n");
}

#define CALL_A                                                                                                         \
    OPEN " invoke name=\"f\">\n" OPEN " parameter name=\"k\" string=\"true\">v" CLOSE " parameter>\n" CLOSE " invoke>" \
         "\n"

static void calls_are_announced_and_ended(void **state) {
    (void)state;
    check(&inside, PIECES(CALL_A OPEN " invoke name=\"g\">\n\n" CLOSE " invoke>\n" CLOSE " calls>tail"),
          "b0 f\na0 {\na0 \"k\"\na0 : \na0 \"\na0 v\na0 \"\na0 }\ne0\nb1 g\na1 {}\ne1\nd\n");
}

/* A cut call: its arguments so far, and its end tells. */
static void ends_inside_a_call(void **state) {
    (void)state;
    const char *start = OPEN " invoke name=\"f\">\n";
    check(&inside, PIECES(OPEN " invoke name=\"f"), "d\n");
    check(&inside, PIECES(start), "b0 f\ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name="), "b0 f\na0 {\ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name=\"ke"), "b0 f\na0 {\na0 \"ke\ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name=\"key\""), "b0 f\na0 {\na0 \"key\"\ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name=\"key\" "), "b0 f\na0 {\na0 \"key\"\na0 : \ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name=\"key\" stri"), "b0 f\na0 {\na0 \"key\"\na0 : \ne0 cut\nd\n");
    check(&inside, PIECES(start, OPEN " parameter name=\"key\" string=\"true\">a\"</" BAR),
          "b0 f\na0 {\na0 \"key\"\na0 : \na0 \"\na0 a\\\"\na0 </" BAR "\ne0 cut\nd\n");
}

/* The joined arguments of one parameter tag. */
static void check_key(const char *tag, const char *want) {
    event_log l = {0};
    di_parser *p = make(&inside, &l);
    push(p, OPEN " invoke name=\"f\">\n");
    push(p, tag);
    push(p, "v" CLOSE " parameter>\n" CLOSE " invoke>");
    finish(p);
    di_strbuf arguments = {0};
    for (const char *line = di_strbuf_str(&l.text), *end; *line != '\0'; line = end + 1) {
        end = strchr(line, '\n');
        if (strncmp(line, "a0 ", 3) == 0) {
            di_strbuf_append(&arguments, line + 3, (size_t)(end - line - 3));
        }
    }
    assert_string_equal(di_strbuf_str(&arguments), want);
    di_strbuf_deinit(&arguments);
    di_strbuf_deinit(&l.text);
    di_parser_destroy(p);
}

static void keys_end_at_the_quote_before_an_attribute(void **state) {
    (void)state;
    check_key(OPEN " parameter name=\"ship to\" string=\"true\">", "{\"ship to\": \"v\"}");
    check_key(OPEN " parameter name=\"k\"q\" string=\"true\">", "{\"k\\\"q\": \"v\"}");
    check_key(OPEN " parameter name=\"a\" b\" string=\"false\">", "{\"a\\\" b\": v}");
    check_key(OPEN " parameter name=\"a\\b\tc\" string=\"true\">", "{\"a\\\\b\\tc\": \"v\"}");
    check_key(OPEN " parameter name=\"\" string=\"true\">", "{\"\": \"v\"}");
    check_key(OPEN " parameter name=\"\"\" string=\"true\">", "{\"\\\"\": \"v\"}");
    /* attributes in another order or of another name, and more than one space */
    check_key(OPEN " parameter name=\"a\" type=\"x\" string=\"true\">", "{\"a\": \"v\"}");
    check_key(OPEN " parameter name=\"a\"  string=\"true\">", "{\"a\": \"v\"}");
    /* no quotes: up to the first space, as it is */
    check_key(OPEN " parameter name=a string=\"true\">", "{a: \"v\"}");
    /* no attribute at all: the parser waits for one that never comes */
    check_key(OPEN " parameter name=\"a\">", "{\"a\">v" CLOSE ": ");
    check_key(OPEN " parameter name=\"a\" >", "{\"a\": ");
    check_key(OPEN " parameter name=\"a\" string=true>", "{\"a\": ");
}

static void stop_strings_end_content(void **state) {
    (void)state;
    static const char *const stop[] = {"", "END", "\n\n"};
    static const size_t stop_len[] = {0, 3, 2};
    const di_parser_options options = {
        .stage = DI_CHAT_STAGE_REASONING, .has_tools = true, .n_stop = 3, .stop = stop, .stop_len = stop_len};
    event_log l = {0};
    di_parser *p = make(&options, &l);
    push(p, "END</think>aEN");
    assert_int_equal(di_parser_stop_hit(p), -1);
    assert_string_equal(di_strbuf_str(&l.text), "r END\nc a\n");
    push(p, "Db");
    assert_string_equal(di_strbuf_str(&l.text), "r END\nc a\nd\n");
    assert_true(di_parser_is_done(p));
    assert_int_equal(di_parser_stop_hit(p), 1);
    push(p, "more");
    finish(p);
    assert_string_equal(di_strbuf_str(&l.text), "r END\nc a\nd\n");
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_LENGTH), DI_FINISH_STOP);
    di_parser_destroy(p);
    di_strbuf_deinit(&l.text);
    /* line feeds at the start are dropped before a stop string of two can be complete */
    check(&options, PIECES("</think>\n\n\na\n\nb"), "c a\nd\n");
    check(&options, PIECES("</think>a\n", "\nb"), "c a\nd\n");
}

static void finish_reasons(void **state) {
    (void)state;
    event_log l = {0};
    di_parser *p = make(&inside, &l);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_STOP), DI_FINISH_STOP);
    push(p, CALL_A);
    assert_int_equal(di_parser_n_calls(p), 1);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_STOP), DI_FINISH_TOOL_CALLS);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_NONE), DI_FINISH_STOP);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_LENGTH), DI_FINISH_LENGTH);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_CONTENT_FILTER), DI_FINISH_CONTENT_FILTER);
    assert_int_equal(di_parser_finish_reason(p, DI_FINISH_ABORT), DI_FINISH_ABORT);
    di_parser_destroy(p);
    di_strbuf_deinit(&l.text);

    di_finish finish_value;
    for (int i = DI_FINISH_STOP; i <= DI_FINISH_ERROR; i++) {
        assert_true(di_finish_parse(di_finish_name((di_finish)i), &finish_value));
        assert_int_equal(finish_value, i);
    }
    assert_string_equal(di_finish_name(DI_FINISH_NONE), "stop");
    assert_false(di_finish_parse("eos", &finish_value));
}

/* Text around the JSON value is one space each, whatever the chunks. */
static void json_mode_replaces_what_is_around(void **state) {
    (void)state;
    check(&json, PIECES("\n\nHere", " it", " is:\n```json\n", "{\"a\":1}", "\n``", "`\nDone", "."),
          "c  \nc {\"a\":1}\nc  \nd\n");
    check(&json, PIECES("[1]\n"), "c [1]\nc \n\nd\n");
    check(&json, PIECES("```\n[1]\n```"), "c [1]\nd\n");
    check(&json, PIECES("``` {}"), "c  {}\nd\n");
    check(&json, PIECES("no"), "c  \nd\n");
    check(&json, PIECES("x\n\n" OPEN " calls>\n" CALL_A),
          "c  \nb0 f\na0 {\na0 \"k\"\na0 : \na0 \"\na0 v\na0 \"\na0 }\ne0\nd\n");
}

static void a_failing_sink_ends_the_parse(void **state) {
    (void)state;
    event_log l = {.fail_at = 2};
    di_parser *p = make(&plain, &l);
    di_error err = {0};
    push(p, "a");
    assert_int_equal(di_parser_push(p, "b", 1, &err), DI_ERR_CANCELLED);
    assert_string_equal(err.message, "no more");
    assert_int_equal(di_parser_push(p, "c", 1, &err), DI_ERR_CANCELLED);
    assert_int_equal(di_parser_finish(p, NULL), DI_ERR_CANCELLED);
    assert_string_equal(di_strbuf_str(&l.text), "c a\n");
    di_parser_destroy(p);
    di_strbuf_deinit(&l.text);
}

static void nothing_in_nothing_out(void **state) {
    (void)state;
    check(&plain, PIECES("", ""), "d\n");
    di_parser_destroy(NULL);
}

/* Counts bytes only: a sink for long texts. */
static di_status count(void *user, const di_parser_event *event, di_error *err) {
    (void)err;
    *(size_t *)user += event->len;
    return DI_OK;
}

/* A stop string of which every position of the text is a possible start. */
static void what_waits_stays_small(void **state) {
    (void)state;
    static const char *const stop[] = {"aaab"};
    static const size_t stop_len[] = {4};
    di_parser_options options = {.stage = DI_CHAT_STAGE_CONTENT, .n_stop = 1, .stop = stop, .stop_len = stop_len};
    size_t n = 0;
    di_parser *p;
    di_error err;
    di_test_ok(di_parser_create(&p, &options, count, &n, &err), &err);
    char chunk[1000];
    memset(chunk, 'a', sizeof chunk);
    for (int i = 0; i < 1000; i++) {
        di_test_ok(di_parser_push(p, chunk, sizeof chunk, &err), &err);
        assert_int_equal(n, (i + 1) * sizeof chunk - 3);
    }
    di_test_ok(di_parser_finish(p, &err), &err);
    assert_int_equal(n, 1000 * sizeof chunk);
    di_parser_destroy(p);
}

/* ---- the stop matcher alone ---- */

static void check_stop(const char *const *stop, size_t n_stop, const char *const *pieces, const char *want,
                       int64_t hit) {
    size_t len[8];
    di_stop_matcher m;
    di_error err;
    di_strbuf out = {0};
    for (size_t i = 0; i < n_stop; i++) {
        len[i] = strlen(stop[i]);
    }
    di_test_ok(di_stop_matcher_init(&m, stop, len, n_stop, &err), &err);
    for (int run = 0; run < 2; run++) { /* the second time after a reset */
        di_strbuf_reset(&out);
        bool is_hit = false;
        for (size_t i = 0; pieces[i] != NULL; i++) {
            is_hit = di_stop_matcher_push(&m, pieces[i], strlen(pieces[i]), &out);
        }
        assert_true(is_hit == (hit >= 0));
        di_stop_matcher_finish(&m, &out);
        assert_string_equal(di_strbuf_str(&out), want);
        assert_int_equal(di_stop_matcher_hit(&m), hit);
        di_stop_matcher_reset(&m);
    }
    di_strbuf_deinit(&out);
    di_stop_matcher_deinit(&m);
}

static void stop_matcher_finds_the_first(void **state) {
    (void)state;
    check_stop(PIECES("STOP"), 1, PIECES("abcST", "OPdef"), "abc", 0);
    check_stop(PIECES("STOP"), 1, PIECES("abcSTO", "?"), "abcSTO?", -1);
    check_stop(PIECES("STOP"), 1, PIECES("abcSTO"), "abcSTO", -1);
    check_stop(PIECES("zzz", "", "STOP"), 3, PIECES("SSTOP"), "S", 2);
    check_stop(PIECES("ABCD", "AB"), 2, PIECES("xABCD"), "x", 1);
    check_stop(PIECES("ABCD", "BC"), 2, PIECES("xABCD"), "xA", 1);
    check_stop(PIECES("aabaabaa"), 1, PIECES("xaabaabaabaab", "aab"), "x", 0);
    check_stop(PIECES("ABCD", "CD"), 2, PIECES("ABCD"), "", 0);
    check_stop(PIECES("CD", "ABCD"), 2, PIECES("ABCD"), "AB", 0);
    check_stop(PIECES("ABX", "BCX", "C"), 3, PIECES("AB", "C"), "AB", 2);
    check_stop(PIECES("x", "x"), 2, PIECES("ax"), "a", 0);
    check_stop(PIECES("", ""), 2, PIECES("ax"), "ax", -1);
}

static void stop_matcher_holds_back_the_longest_suffix(void **state) {
    (void)state;
    const char *const stop[] = {"abab!", "b\n"};
    const size_t len[] = {5, 2};
    di_stop_matcher m;
    di_error err;
    di_strbuf out = {0};
    di_test_ok(di_stop_matcher_init(&m, stop, len, 2, &err), &err);
    di_stop_matcher_push(&m, "xababa", 6, &out);
    assert_string_equal(di_strbuf_str(&out), "xab"); /* "aba" may go on */
    di_stop_matcher_push(&m, "b", 1, &out);
    assert_string_equal(di_strbuf_str(&out), "xab");
    di_stop_matcher_push(&m, "b", 1, &out);
    assert_string_equal(di_strbuf_str(&out), "xababab"); /* the last "b" may begin "b\n" */
    di_stop_matcher_push(&m, "c", 1, &out);
    assert_string_equal(di_strbuf_str(&out), "xabababbc");
    di_strbuf_deinit(&out);
    di_stop_matcher_deinit(&m);
}

static void stop_matcher_without_strings(void **state) {
    (void)state;
    di_stop_matcher m = {0};
    di_strbuf out = {0};
    assert_false(di_stop_matcher_push(&m, "abc", 3, &out));
    di_stop_matcher_finish(&m, &out);
    assert_string_equal(di_strbuf_str(&out), "abc");
    assert_int_equal(di_stop_matcher_hit(&m), -1);
    di_strbuf_deinit(&out);
    di_stop_matcher_deinit(&m);
}

DI_TEST_GROUP(parser, cmocka_unit_test(text_is_released_at_the_end_of_its_chunk),
              cmocka_unit_test(possible_markers_wait), cmocka_unit_test(line_feeds_belong_to_the_marker_behind_them),
              cmocka_unit_test(without_tools_a_call_block_is_text), cmocka_unit_test(resumed_stages_keep_line_feeds),
              cmocka_unit_test(characters_are_not_cut), cmocka_unit_test(calls_are_announced_and_ended),
              cmocka_unit_test(ends_inside_a_call), cmocka_unit_test(keys_end_at_the_quote_before_an_attribute),
              cmocka_unit_test(stop_strings_end_content), cmocka_unit_test(finish_reasons),
              cmocka_unit_test(json_mode_replaces_what_is_around), cmocka_unit_test(a_failing_sink_ends_the_parse),
              cmocka_unit_test(nothing_in_nothing_out), cmocka_unit_test(what_waits_stays_small),
              cmocka_unit_test(stop_matcher_finds_the_first),
              cmocka_unit_test(stop_matcher_holds_back_the_longest_suffix),
              cmocka_unit_test(stop_matcher_without_strings));
