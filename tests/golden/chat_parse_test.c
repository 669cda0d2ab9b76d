/* The output parser and the replies against tests/data/vectors/chat_parse.jsonl, whose first line says what its fields
 * are and which implementation made them.
 *
 * A `parse` row goes through the parser whole, by its own splits, byte by byte and by random splits, and each way must
 * give its events, message and reason. A `protocol` row goes through the stream of its API, and every event and the
 * response must be equal byte for byte, the order of keys included, but for ids; as server-sent events it must be the
 * same bytes whether pieces of text are written straight or made of values, by whatever splits. */
#include "harness.h"

#include "api/api.h"

enum { N_RANDOM_SPLITS = 8, SPLITS_MAX = 4096 };

typedef struct text {
    const char *data;
    size_t len;
} text;

static text text_of(const di_json *row, const char *key) {
    text t = {0};
    t.data = di_json_str(di_json_get(row, key), &t.len);
    assert_non_null(t.data);
    return t;
}

static const char *name_of(const di_json *row, const char *key) {
    return text_of(row, key).data;
}

/* Calls `use` for every row of a kind and returns how many there were. */
static int for_rows(const char *kind, void (*use)(const di_json *row)) {
    di_strbuf file = {0};
    di_error err;
    di_test_ok(di_file_read(di_test_data("vectors/chat_parse.jsonl"), 16 << 20, &file, &err), &err);
    int n = 0;
    for (const char *line = file.data, *end; *line != '\0'; line = end + 1) {
        end = strchr(line, '\n');
        assert_non_null(end);
        di_json *row = NULL;
        di_test_ok(di_json_parse(&row, line, (size_t)(end - line), &err), &err);
        if (di_json_get(row, "kind") != NULL && strcmp(name_of(row, "kind"), kind) == 0) {
            use(row);
            n++;
        }
        di_json_free(row);
    }
    di_strbuf_deinit(&file);
    return n;
}

static di_chat_stage stage_of(const char *initial) {
    if (initial == NULL) {
        return DI_CHAT_STAGE_CONTENT;
    }
    if (strcmp(initial, "reasoning_start") == 0) {
        return DI_CHAT_STAGE_REASONING;
    }
    if (strcmp(initial, "reasoning_continuation") == 0) {
        return DI_CHAT_STAGE_REASONING_RESUMED;
    }
    assert_string_equal(initial, "content_continuation");
    return DI_CHAT_STAGE_CONTENT_RESUMED;
}

/* Pushes the row's text in pieces that end at the splits. */
static void push(di_parser *parser, text t, const size_t *splits, size_t n_splits) {
    di_error err;
    size_t at = 0;
    for (size_t i = 0; i <= n_splits; i++) {
        size_t end = i < n_splits ? splits[i] : t.len;
        assert_true(at <= end && end <= t.len);
        di_test_ok(di_parser_push(parser, t.data + at, end - at, &err), &err);
        at = end;
    }
    di_test_ok(di_parser_finish(parser, &err), &err);
}

static size_t read_splits(const di_json *row, size_t *splits) {
    const di_json *list = di_json_get(row, "splits");
    size_t n = di_json_array_len(list);
    assert_true(n <= SPLITS_MAX);
    for (size_t i = 0; i < n; i++) {
        splits[i] = (size_t)di_json_int(di_json_at(list, i));
    }
    return n;
}

static di_finish read_finish(const di_json *row) {
    di_finish finish = DI_FINISH_NONE;
    const char *name = di_json_str(di_json_get(row, "finish"), NULL);
    assert_true(name == NULL || di_finish_parse(name, &finish));
    return finish;
}

/* ---- parse rows ---- */

/* Whole-stream events as the vectors write them: adjacent pieces of one text merged. */
typedef struct recorder {
    di_json *events;
    di_reply reply;
    di_strbuf piece;
    di_parser_event_kind kind;
    int64_t call_id;
    int n_done, n_open;
} recorder;

static void end_piece(recorder *r) {
    if (r->piece.len == 0) {
        return;
    }
    di_json *event = di_json_new_array();
    const char *name = r->kind == DI_PARSER_REASONING ? "reasoning"
                       : r->kind == DI_PARSER_CONTENT ? "content"
                                                      : "tool_args";
    assert_true(di_json_append(event, di_json_new_string(name, strlen(name))));
    if (r->kind == DI_PARSER_CALL_ARGS) {
        assert_true(di_json_append(event, di_json_new_int(r->call_id)));
    }
    assert_true(di_json_append(event, di_json_new_string(r->piece.data, r->piece.len)));
    assert_true(di_json_append(r->events, event));
    di_strbuf_reset(&r->piece);
}

static di_status record(void *user, const di_parser_event *event, di_error *err) {
    recorder *r = user;
    assert_int_equal(r->n_done, 0);
    switch (event->kind) {
    case DI_PARSER_REASONING:
    case DI_PARSER_CONTENT:
    case DI_PARSER_CALL_ARGS:
        assert_true(event->len > 0);
        if (event->kind != r->kind || event->call_id != r->call_id) {
            end_piece(r);
        }
        r->kind = event->kind;
        r->call_id = event->call_id;
        di_strbuf_append(&r->piece, event->text, event->len);
        break;
    case DI_PARSER_CALL_BEGIN: {
        end_piece(r);
        assert_int_equal(r->n_open++, 0);
        di_json *begin = di_json_new_array();
        assert_true(di_json_append(begin, di_json_new_string("tool_begin", 10)));
        assert_true(di_json_append(begin, di_json_new_int(event->call_id)));
        assert_true(di_json_append(begin, di_json_new_string(event->text, event->len)));
        assert_true(di_json_append(r->events, begin));
        break;
    }
    case DI_PARSER_CALL_END:
        assert_int_equal(--r->n_open, 0);
        break;
    case DI_PARSER_DONE:
        end_piece(r);
        assert_int_equal(r->n_open, 0);
        r->n_done++;
        break;
    }
    return di_reply_push(&r->reply, event, err);
}

/* A copy of a string without the filler spaces, which stand at its ends. */
static di_json *without_filler(const di_json *string) {
    size_t len;
    const char *s = di_json_str(string, &len);
    while (len > 0 && s[len - 1] == ' ') {
        len--;
    }
    while (len > 0 && s[0] == ' ') {
        s++;
        len--;
    }
    return di_json_new_string(s, len);
}

/* Takes filler out of a message and the list of events; both are replaced. */
static void drop_filler(di_json **message, di_json **events) {
    di_json *plain = di_json_copy(*message), *list = di_json_new_array();
    assert_true(di_json_set(plain, "content", without_filler(di_json_get(plain, "content"))));
    for (size_t i = 0; i < di_json_array_len(*events); i++) {
        di_json *event = di_json_copy(di_json_at(*events, i));
        if (strcmp(di_json_str(di_json_at(event, 0), NULL), "content") == 0) {
            di_json *kept = without_filler(di_json_at(event, 1));
            size_t len;
            di_json_str(kept, &len);
            di_json_free(event);
            event = NULL;
            if (len > 0) {
                event = di_json_new_array();
                assert_true(di_json_append(event, di_json_new_string("content", 7)));
                assert_true(di_json_append(event, kept));
            } else {
                di_json_free(kept);
            }
        }
        if (event != NULL) {
            assert_true(di_json_append(list, event));
        }
    }
    di_json_free(*message);
    di_json_free(*events);
    *message = plain;
    *events = list;
}

static void assert_same(const char *id, const char *what, const di_json *got, const di_json *want) {
    if (!di_json_equal(got, want)) {
        di_strbuf a = {0}, b = {0};
        di_json_write(&a, got, DI_JSON_SPACED);
        di_json_write(&b, want, DI_JSON_SPACED);
        fail_msg("%s: %s\n  got  %s\n  want %s", id, what, di_strbuf_str(&a), di_strbuf_str(&b));
    }
}

/* The rows whose recorded arguments are broken, and the arguments by the specification's better rule for keys. */
static const char *better_arguments(const char *id) {
    static const char *const rows[][2] = {{"cp-a-117", "{\"ship to\": \"Paris\"}"},
                                          {"cp-a-118", "{\"k\\\"q\": \"v\"}"}};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        if (strcmp(rows[i][0], id) == 0) {
            return rows[i][1];
        }
    }
    return NULL;
}

/* Replaces the arguments of the only call. */
static void put_arguments(di_json **message, di_json **events, const char *arguments) {
    di_json *copy = di_json_copy(*message), *list = di_json_copy(*events);
    assert_true(di_json_set(di_json_at(di_json_get(copy, "tool_calls"), 0), "arguments",
                            di_json_new_string(arguments, strlen(arguments))));
    di_json_free(list);
    list = di_json_new_array();
    for (size_t i = 0; i < di_json_array_len(*events); i++) {
        di_json *event = di_json_copy(di_json_at(*events, i));
        if (strcmp(di_json_str(di_json_at(event, 0), NULL), "tool_args") == 0) {
            di_json_free(event);
            event = di_json_new_array();
            assert_true(di_json_append(event, di_json_new_string("tool_args", 9)));
            assert_true(di_json_append(event, di_json_new_int(0)));
            assert_true(di_json_append(event, di_json_new_string(arguments, strlen(arguments))));
        }
        assert_true(di_json_append(list, event));
    }
    di_json_free(*message);
    di_json_free(*events);
    *message = copy;
    *events = list;
}

static void check_parse(const di_json *row, const size_t *splits, size_t n_splits) {
    const char *id = name_of(row, "id");
    const di_json *options = di_json_get(row, "options"), *expect = di_json_get(row, "expect");
    const char *initial = di_json_str(di_json_get(options, "initial"), NULL);
    const di_json *stops = di_json_get(options, "stop");
    const char *stop[8];
    size_t stop_len[8], n_stop = di_json_array_len(stops);
    assert_true(n_stop <= DI_COUNT(stop));
    for (size_t i = 0; i < n_stop; i++) {
        stop[i] = di_json_str(di_json_at(stops, i), &stop_len[i]);
    }
    di_parser_options po = {.stage = stage_of(initial),
                            .has_tools = di_json_bool(di_json_get(options, "parse_tool_calls")),
                            .starts_in_calls = di_json_bool(di_json_get(options, "starts_in_tool_calls")),
                            .is_json = di_json_bool(di_json_get(options, "parse_json_output")),
                            .n_stop = n_stop,
                            .stop = stop,
                            .stop_len = stop_len};
    recorder r = {.events = di_json_new_array()};
    di_reply_init(&r.reply, initial != NULL, 1);
    di_parser *parser;
    di_error err;
    di_test_ok(di_parser_create(&parser, &po, record, &r, &err), &err);
    push(parser, text_of(row, "text"), splits, n_splits);
    assert_int_equal(r.n_done, 1);

    const char *finish = di_finish_name(di_parser_finish_reason(parser, read_finish(row)));
    if (strcmp(finish, name_of(expect, "finish_reason")) != 0) {
        fail_msg("%s: finish_reason %s, expected %s", id, finish, name_of(expect, "finish_reason"));
    }
    di_json *message = di_reply_parsed(&r.reply);
    assert_non_null(message);
    di_json *want_message = di_json_ref(di_json_get(expect, "message"));
    di_json *want_events = di_json_ref(di_json_get(expect, "events"));
    if (di_json_bool(di_json_get(row, "filler"))) {
        drop_filler(&message, &r.events);
        drop_filler(&want_message, &want_events);
    }
    if (di_json_bool(di_json_get(row, "quirk"))) {
        assert_non_null(better_arguments(id));
        put_arguments(&want_message, &want_events, better_arguments(id));
    }
    assert_same(id, "message", message, want_message);
    assert_same(id, "events", r.events, want_events);

    const di_json *is_json = di_json_get(expect, "arguments_json");
    for (size_t i = 0; i < di_json_array_len(is_json); i++) {
        const di_strbuf *arguments = &r.reply.calls[i].arguments;
        di_json *value = NULL;
        bool parses = di_json_parse(&value, di_strbuf_str(arguments), arguments->len, NULL) == DI_OK;
        di_json_free(value);
        assert_true(parses == (di_json_bool(di_json_at(is_json, i)) || di_json_bool(di_json_get(row, "quirk"))));
    }
    di_json_free(message);
    di_json_free(want_message);
    di_json_free(want_events);
    di_json_free(r.events);
    di_strbuf_deinit(&r.piece);
    di_reply_deinit(&r.reply);
    di_parser_destroy(parser);
}

static void parse_row(const di_json *row) {
    static size_t splits[SPLITS_MAX]; /* tests run one after another */
    size_t len = text_of(row, "text").len;
    check_parse(row, NULL, 0);
    check_parse(row, splits, read_splits(row, splits));
    assert_true(len <= SPLITS_MAX);
    for (size_t i = 0; i < len; i++) {
        splits[i] = i + 1;
    }
    check_parse(row, splits, len);
    uint64_t rng = di_hash_fnv1a(name_of(row, "id"), strlen(name_of(row, "id")));
    for (int run = 0; run < N_RANDOM_SPLITS; run++) {
        size_t n = 0, at = 0;
        while ((at += (size_t)di_test_random_range(&rng, 0, run < 4 ? 8 : 60)) < len && n < SPLITS_MAX) {
            splits[n++] = at;
        }
        check_parse(row, splits, n);
    }
}

static void parse_rows_hold_for_any_splits(void **state) {
    (void)state;
    assert_int_equal(for_rows("parse", parse_row), 166);
}

/* ---- protocol rows ---- */

typedef struct sent {
    di_json *events;
    int n_terminal;
} sent;

/* A copy with the values of id fields replaced as the vectors do. */
static di_json *masked(const di_json *value) {
    static const char *const id_keys[] = {"id", "item_id", "call_id", "signature"};
    if (di_json_is(value, DI_JSON_ARRAY)) {
        di_json *array = di_json_new_array();
        for (size_t i = 0; i < di_json_array_len(value); i++) {
            assert_true(di_json_append(array, masked(di_json_at(value, i))));
        }
        return array;
    }
    if (!di_json_is(value, DI_JSON_OBJECT)) {
        return di_json_copy(value);
    }
    di_json *object = di_json_new_object();
    for (void *it = di_json_iter(value); it != NULL; it = di_json_iter_next(value, it)) {
        const char *key = di_json_iter_key(it, NULL);
        bool is_id = false;
        for (size_t i = 0; i < DI_COUNT(id_keys); i++) {
            is_id = is_id || strcmp(key, id_keys[i]) == 0;
        }
        di_json *member = di_json_iter_value(it);
        is_id = is_id && di_json_is(member, DI_JSON_STRING);
        assert_true(di_json_set(object, key, is_id ? di_json_new_string("<id>", 4) : masked(member)));
    }
    return object;
}

static di_status keep_event(void *user, const char *event, const di_json *data, di_error *err) {
    (void)err;
    sent *s = user;
    assert_int_equal(s->n_terminal, 0);
    if (data == NULL) {
        assert_null(event);
        s->n_terminal++;
        return DI_OK;
    }
    di_json *entry = di_json_new_object();
    assert_true(
        di_json_set(entry, "event", event == NULL ? di_json_new_null() : di_json_new_string(event, strlen(event))));
    assert_true(di_json_set(entry, "data", masked(data)));
    assert_true(di_json_append(s->events, entry));
    return DI_OK;
}

static void assert_written_same(const char *id, const char *what, const di_json *got, const di_json *want) {
    di_strbuf a = {0}, b = {0};
    di_json_write(&a, got, DI_JSON_SPACED);
    di_json_write(&b, want, DI_JSON_SPACED);
    if (strcmp(di_strbuf_str(&a), di_strbuf_str(&b)) != 0) {
        fail_msg("%s: %s\n  got  %s\n  want %s", id, what, di_strbuf_str(&a), di_strbuf_str(&b));
    }
    di_strbuf_deinit(&a);
    di_strbuf_deinit(&b);
}

/* Thinking as the body asks for it, each API in its own words. */
static bool asks_for_thinking(const di_json *request) {
    const char *type = di_json_str(di_json_get(di_json_get(request, "thinking"), "type"), NULL);
    const char *effort = di_json_str(di_json_get(di_json_get(request, "reasoning"), "effort"), NULL);
    return type != NULL ? strcmp(type, "enabled") == 0 : strcmp(effort, "none") != 0;
}

static di_reply_protocol protocol_of(const di_json *row) {
    const char *api = name_of(row, "api");
    return strcmp(api, "chat") == 0        ? DI_REPLY_CHAT
           : strcmp(api, "responses") == 0 ? DI_REPLY_RESPONSES
                                           : DI_REPLY_MESSAGES;
}

/* Runs the row's text by these splits through a stream, which the caller destroys. */
static di_reply_stream *run_protocol(const di_json *row, const size_t *splits, size_t n_splits, di_reply_sink sink,
                                     void *user) {
    const di_json *request = di_json_get(row, "request");
    di_reply_protocol protocol = protocol_of(row);
    /* What the recording backend counted: a prompt of 7 tokens, 2 of them cached, and 2 tokens a chunk. */
    di_reply_usage usage = {.prompt_tokens = 7,
                            .cached_tokens = 2,
                            .completion_tokens = 2 * ((int64_t)n_splits + 1),
                            .reasoning_tokens = 0};
    di_reply_head head = {.id = "resp_0",
                          .model = name_of(request, "model"),
                          .has_reasoning = asks_for_thinking(request),
                          .has_chunk_usage = true,
                          .seed = 5,
                          .request = protocol == DI_REPLY_RESPONSES ? request : NULL};
    di_reply_stream *stream;
    di_parser *parser;
    di_error err;
    di_test_ok(di_reply_stream_create(&stream, protocol, &head, sink, user, &err), &err);
    di_parser_options po = {.stage = head.has_reasoning ? DI_CHAT_STAGE_REASONING : DI_CHAT_STAGE_CONTENT,
                            .has_tools = true};
    di_test_ok(di_parser_create(&parser, &po, di_reply_stream_push, stream, &err), &err);
    di_test_ok(di_reply_stream_start(stream, &usage, &err), &err);
    push(parser, text_of(row, "text"), splits, n_splits);
    di_finish finish = di_parser_finish_reason(parser, read_finish(row));
    di_test_ok(di_reply_stream_finish(stream, finish, NULL, &usage, 0, &err), &err);
    di_parser_destroy(parser);
    return stream;
}

static void protocol_row(const di_json *row) {
    static size_t splits[SPLITS_MAX];
    const char *id = name_of(row, "id");
    const di_json *expect = di_json_get(row, "expect");
    size_t n_splits = read_splits(row, splits);
    sent s = {.events = di_json_new_array()};
    di_reply_stream *stream = run_protocol(row, splits, n_splits, keep_event, &s);
    const di_json *events = di_json_get(expect, "events");
    for (size_t i = 0; i < DI_MIN(di_json_array_len(events), di_json_array_len(s.events)); i++) {
        assert_written_same(id, "event", di_json_at(s.events, i), di_json_at(events, i));
    }
    assert_int_equal(di_json_array_len(s.events), di_json_array_len(events));
    assert_int_equal(s.n_terminal, di_json_is(di_json_get(expect, "sse_done"), DI_JSON_STRING) ? 1 : 0);
    di_json *response = di_reply_stream_response(stream), *plain = masked(response);
    assert_written_same(id, "response", plain, di_json_get(expect, "response"));
    di_json_free(response);
    di_json_free(plain);
    di_json_free(s.events);
    di_reply_stream_destroy(stream);
}

static void protocol_rows_give_the_recorded_events(void **state) {
    (void)state;
    assert_int_equal(for_rows("protocol", protocol_row), 36);
}

/* The sink of server-sent events under another address: a stream then makes every event of values. */
static di_status send_values(void *user, const char *event, const di_json *data, di_error *err) {
    return di_reply_sse_sink(user, event, data, err);
}

static void check_written(const di_json *row, const size_t *splits, size_t n_splits) {
    di_strbuf straight = {0}, values = {0};
    di_reply_stream_destroy(run_protocol(row, splits, n_splits, di_reply_sse_sink, &straight));
    di_reply_stream_destroy(run_protocol(row, splits, n_splits, send_values, &values));
    if (strcmp(di_strbuf_str(&straight), di_strbuf_str(&values)) != 0) {
        fail_msg("%s: written\n%s\nof values\n%s", name_of(row, "id"), straight.data, values.data);
    }
    assert_int_equal(straight.len, values.len);
    di_strbuf_deinit(&straight);
    di_strbuf_deinit(&values);
}

static void written_row(const di_json *row) {
    static size_t splits[SPLITS_MAX];
    size_t len = text_of(row, "text").len;
    check_written(row, splits, read_splits(row, splits));
    uint64_t rng = di_hash_fnv1a(name_of(row, "id"), strlen(name_of(row, "id")));
    for (int run = 0; run < N_RANDOM_SPLITS; run++) {
        size_t n = 0, at = 0;
        while ((at += (size_t)di_test_random_range(&rng, run == 0 ? 1 : 0, run < 4 ? 1 + run : 60)) < len &&
               n < SPLITS_MAX) {
            splits[n++] = at;
        }
        check_written(row, splits, n);
    }
}

static void protocol_rows_are_written_as_their_values(void **state) {
    (void)state;
    assert_int_equal(for_rows("protocol", written_row), 36);
}

DI_TEST_GROUP(chat_parse, cmocka_unit_test(parse_rows_hold_for_any_splits),
              cmocka_unit_test(protocol_rows_give_the_recorded_events),
              cmocka_unit_test(protocol_rows_are_written_as_their_values));
