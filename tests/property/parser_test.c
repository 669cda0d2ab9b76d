/* The output parser on random soups of markers, fragments of markers and plain text.
 *
 * Its result must not depend on the cuts, and must be that of a naive parser, written here straight from the table of
 * the specification: it has the whole text at hand, and at every byte asks for every marker whether the text of the
 * state now ends with it. */
#include "harness.h"

#include "text/text.h"

#define BAR "\xef\xbd\x9c"
#define DSML BAR "DSML" BAR

/* ---- what comes out: events as one text, pieces of one kind joined ---- */

typedef struct result {
    di_strbuf text;
    int kind;
    int64_t call_id;
} result;

static void add(result *r, int kind, int64_t call_id, const char *text, size_t len) {
    bool is_piece = kind == DI_PARSER_REASONING || kind == DI_PARSER_CONTENT || kind == DI_PARSER_CALL_ARGS;
    if (is_piece && len == 0) {
        return;
    }
    if (!is_piece || kind != r->kind || call_id != r->call_id) {
        di_strbuf_printf(&r->text, "\n[%d %d] ", kind, (int)call_id);
    }
    di_strbuf_append(&r->text, text, len);
    r->kind = kind;
    r->call_id = call_id;
}

static di_status record(void *user, const di_parser_event *event, di_error *err) {
    (void)err;
    result *r = user;
    add(r, event->kind, event->call_id, event->text, event->len);
    if (event->is_cut) {
        di_strbuf_puts(&r->text, "cut");
    }
    return DI_OK;
}

/* ---- the naive parser ---- */

typedef struct naive {
    const di_parser_options *options;
    const char *text;
    size_t len, at; /* the next byte */
    size_t start;   /* of the text of this state */
    bool is_leading, has_filler;
    int64_t n_calls, hit;
    result *out;
} naive;

/* The text of the state ends with marker. */
static bool ends_with(const naive *n, const char *marker, size_t len) {
    return n->at - n->start >= len && memcmp(n->text + n->at - len, marker, len) == 0;
}

/* Start of the run of line feeds that ends at `end`. */
static size_t before_lf(const naive *n, size_t end) {
    while (end > n->start && n->text[end - 1] == '\n') {
        end--;
    }
    return end;
}

typedef enum mode { REASONING, CONTENT, JSON_BEFORE, JSON, JSON_AFTER, CALLS, DONE } mode;

static void put(naive *n, mode m, size_t end) {
    size_t len = end - n->start;
    if (m == REASONING) {
        add(n->out, DI_PARSER_REASONING, -1, n->text + n->start, len);
    } else if (m == CONTENT || m == JSON) {
        add(n->out, DI_PARSER_CONTENT, -1, n->text + n->start, len);
    } else if (len > 0 && !n->has_filler) {
        n->has_filler = true;
        add(n->out, DI_PARSER_CONTENT, -1, " ", 1);
    }
}

/* Runs one of the states of text until a marker is complete or the text ends. */
static mode naive_text(naive *n, mode m) {
    const di_parser_options *o = n->options;
    n->start = n->at;
    while (n->at < n->len) {
        char c = n->text[n->at++];
        if (m == CONTENT || m == JSON) {
            for (size_t i = 0; i < o->n_stop; i++) {
                if (o->stop_len[i] > 0 && ends_with(n, o->stop[i], o->stop_len[i])) {
                    n->hit = (int64_t)i;
                    put(n, m, n->at - o->stop_len[i]);
                    return DONE;
                }
            }
        }
        if (n->is_leading && c == '\n') {
            n->start = n->at;
            continue;
        }
        n->is_leading = false;
        if (o->has_tools && m != JSON && ends_with(n, "<" DSML, 11)) {
            put(n, m, before_lf(n, n->at - 11));
            return CALLS;
        }
        if (m == REASONING && ends_with(n, "</think>", 8)) {
            put(n, m, before_lf(n, n->at - 8));
            n->is_leading = true;
            return o->is_json ? JSON_BEFORE : CONTENT;
        }
        if (m == CONTENT && ends_with(n, "</think>", 8)) {
            put(n, m, n->at - 8);
            n->start = n->at;
        }
        if (m == JSON_BEFORE) {
            if (ends_with(n, "```json\n", 8) || ends_with(n, "```\n", 4)) {
                put(n, m, n->at - (ends_with(n, "```json\n", 8) ? 8 : 4));
                return JSON;
            }
            if (c == '{' || c == '[') {
                put(n, m, n->at - 1);
                add(n->out, DI_PARSER_CONTENT, -1, &c, 1);
                return JSON;
            }
        }
        if (m == JSON && ends_with(n, "\n```", 4)) {
            put(n, m, n->at - 4);
            n->has_filler = false;
            return JSON_AFTER;
        }
    }
    put(n, m, n->len);
    return DONE;
}

/* Moves behind the next of two markers; returns which, -1 at the end of the text. */
static int skip_to(naive *n, const char *a, const char *b) {
    n->start = n->at;
    while (n->at < n->len) {
        n->at++;
        if (ends_with(n, a, strlen(a))) {
            return 0;
        }
        if (ends_with(n, b, strlen(b))) {
            return 1;
        }
    }
    return -1;
}

static void args(naive *n, const char *text, size_t len, bool is_escaped) {
    di_strbuf escaped = {0};
    if (is_escaped) {
        di_json_write_escaped(&escaped, text, len);
        text = di_strbuf_str(&escaped);
        len = escaped.len;
    }
    add(n->out, DI_PARSER_CALL_ARGS, n->n_calls - 1, text, len);
    di_strbuf_deinit(&escaped);
}

static bool is_name_byte(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
}

/* Reads a key: with the whole text at hand, a quote ends it if ` attribute=` or ` >` follows (or could, at the end). */
static void naive_key(naive *n) {
    bool is_raw = n->at < n->len && n->text[n->at] != '"';
    if (!is_raw && n->at < n->len) {
        args(n, "\"", 1, false);
        n->at++;
    }
    while (n->at < n->len) {
        const char *c = n->text + n->at;
        if (is_raw) {
            n->at++;
            if (*c == ' ') {
                args(n, ": ", 2, false);
                return;
            }
            args(n, c, 1, false);
            continue;
        }
        if (*c == '"') {
            size_t spaces = n->at + 1, name;
            while (spaces < n->len && n->text[spaces] == ' ') {
                spaces++;
            }
            name = spaces;
            while (name < n->len && is_name_byte(n->text[name])) {
                name++;
            }
            bool has_space = spaces > n->at + 1;
            bool is_end =
                has_space && (name == n->len || n->text[name] == '>' || (n->text[name] == '=' && name > spaces));
            if (is_end) {
                args(n, "\": ", 3, false);
                n->at = DI_MIN(name + 1, n->len);
                return;
            }
            if (n->at + 1 == n->len || n->text[n->at + 1] == '>') {
                args(n, "\">", n->at + 1 == n->len ? 1 : 2, false);
                n->at = DI_MIN(n->at + 2, n->len);
                is_raw = true;
                continue;
            }
        }
        args(n, c, 1, true);
        n->at++;
    }
}

/* One call, behind its name's opening; false when the text ended. */
static bool naive_call(naive *n) {
    const char *quote = memchr(n->text + n->at, '"', n->len - n->at);
    if (quote == NULL) {
        return false;
    }
    n->n_calls++;
    add(n->out, DI_PARSER_CALL_BEGIN, n->n_calls - 1, n->text + n->at, (size_t)(quote - n->text) - n->at);
    n->at = (size_t)(quote - n->text) + 1;
    for (bool is_first = true;; is_first = false) {
        int which = skip_to(n, "parameter name=", "</" DSML);
        if (which == 1) {
            args(n, is_first ? "{}" : "}", is_first ? 2 : 1, false);
            add(n->out, DI_PARSER_CALL_END, n->n_calls - 1, "", 0);
            return true;
        }
        if (which == 0) {
            args(n, is_first ? "{" : ", ", is_first ? 1 : 2, false);
            naive_key(n);
            int type = skip_to(n, "true\">", "false\">");
            if (type >= 0) {
                bool is_string = type == 0;
                args(n, "\"", is_string ? 1 : 0, false);
                size_t begin = n->at;
                if (skip_to(n, "</" DSML, "</" DSML) == 0) {
                    args(n, n->text + begin, n->at - 12 - begin, is_string);
                    args(n, "\"", is_string ? 1 : 0, false);
                    continue;
                }
                args(n, n->text + begin, n->len - begin, is_string);
            }
        }
        add(n->out, DI_PARSER_CALL_END, n->n_calls - 1, "", 0);
        di_strbuf_puts(&n->out->text, "cut");
        return false;
    }
}

static void naive_calls(naive *n) {
    for (;;) {
        size_t begin = n->at;
        n->start = begin;
        bool has_call = false;
        while (n->at < n->len && !has_call) {
            n->at++;
            if (ends_with(n, "</" DSML " calls>", 19) || ends_with(n, "</" DSML "tool_calls>", 23)) {
                return;
            }
            has_call = ends_with(n, "invoke name=\"", 13);
        }
        if (!has_call || !naive_call(n)) {
            return;
        }
    }
}

static int64_t naive_parse(const di_parser_options *o, const char *text, size_t len, result *out, int64_t *hit) {
    naive n = {.options = o, .text = text, .len = len, .hit = -1, .out = out};
    bool is_reasoning = o->stage == DI_CHAT_STAGE_REASONING || o->stage == DI_CHAT_STAGE_REASONING_RESUMED;
    n.is_leading = o->stage == DI_CHAT_STAGE_REASONING || o->stage == DI_CHAT_STAGE_CONTENT;
    mode m = o->starts_in_calls ? CALLS : is_reasoning ? REASONING : o->is_json ? JSON_BEFORE : CONTENT;
    while (m != DONE && m != CALLS) {
        m = naive_text(&n, m);
    }
    if (m == CALLS) {
        naive_calls(&n);
    }
    add(out, DI_PARSER_DONE, -1, "", 0);
    *hit = n.hit;
    return n.n_calls;
}

/* ---- soups ---- */

static const char *const ingredients[] = {
    "\n",
    "\n\n",
    "<",
    "</",
    ">",
    "\"",
    " ",
    "=",
    "a",
    "ab",
    "aab",
    "b",
    BAR,
    "DSML",
    "\\",
    "\t",
    "{",
    "}",
    "[",
    "`",
    "```",
    "```\n",
    "```json\n",
    "\n```",
    "<think>",
    "</think>",
    "</thin",
    "<" BAR "DSM",
    "<" DSML,
    "</" DSML,
    "<" DSML " calls>\n",
    "</" DSML " calls>",
    "</" DSML "tool_calls>",
    "invoke name=\"",
    "invoke name=\"f\">\n",
    "<" DSML " invoke name=\"f\">\n",
    "parameter name=",
    "<" DSML " parameter name=\"k\" string=\"true\">",
    "<" DSML " parameter name=\"k\" string=\"false\">",
    "</" DSML " parameter>\n",
    "</" DSML " invoke>\n",
    "string=",
    "\" string=\"",
    "true\">",
    "false\">",
    "true",
    "\" x>",
    "\xe4\xb8\x96",
    "\xf0\x9f\x98\x80",
    "\xff",
    "STOP",
    "ST",
};

static void soup(uint64_t *rng, di_strbuf *text) {
    int64_t n = di_test_random_range(rng, 0, 60);
    int64_t from = di_test_random_range(rng, 0, 1) ? 0 : (int64_t)DI_COUNT(ingredients) / 2; /* some are rich in tags */
    for (int64_t i = 0; i < n; i++) {
        di_strbuf_puts(text, ingredients[di_test_random_range(rng, from, (int64_t)DI_COUNT(ingredients) - 1)]);
    }
}

static int64_t parse(const di_parser_options *o, const di_strbuf *text, uint64_t *rng, int64_t step_max, result *out,
                     int64_t *hit) {
    di_parser *p;
    di_error err;
    di_test_ok(di_parser_create(&p, o, record, out, &err), &err);
    for (size_t at = 0; at < text->len;) {
        size_t step = step_max == 0 ? text->len : (size_t)di_test_random_range(rng, 1, step_max);
        step = DI_MIN(step, text->len - at);
        di_test_ok(di_parser_push(p, text->data + at, step, &err), &err);
        at += step;
    }
    di_test_ok(di_parser_finish(p, &err), &err);
    int64_t n_calls = di_parser_n_calls(p);
    *hit = di_parser_stop_hit(p);
    di_parser_destroy(p);
    return n_calls;
}

DI_PROPERTY(cuts_do_not_matter_and_the_table_holds, 4000) {
    static const char *const stops[] = {"STOP", "aab", "ab", "\n\n", "", "b\n", "</think>", "aaba"};
    uint64_t rng = seed;
    const char *stop[3];
    size_t stop_len[3];
    di_parser_options o = {.stage = (di_chat_stage)di_test_random_range(&rng, 0, 3),
                           .has_tools = di_test_random_range(&rng, 0, 3) > 0,
                           .starts_in_calls = di_test_random_range(&rng, 0, 3) == 0,
                           .is_json = di_test_random_range(&rng, 0, 3) == 0,
                           .n_stop = (size_t)di_test_random_range(&rng, 0, 3),
                           .stop = stop,
                           .stop_len = stop_len};
    for (size_t i = 0; i < o.n_stop; i++) {
        stop[i] = stops[di_test_random_range(&rng, 0, (int64_t)DI_COUNT(stops) - 1)];
        stop_len[i] = strlen(stop[i]);
    }
    di_strbuf text = {0};
    soup(&rng, &text);

    result want = {.kind = -1}, got = {.kind = -1};
    int64_t want_hit, hit;
    int64_t want_calls = naive_parse(&o, di_strbuf_str(&text), text.len, &want, &want_hit);
    static const int64_t steps[] = {0, 1, 3, 40};
    for (size_t i = 0; i < DI_COUNT(steps); i++) {
        di_strbuf_reset(&got.text);
        got.kind = -1;
        int64_t n_calls = parse(&o, &text, &rng, steps[i], &got, &hit);
        if (strcmp(di_strbuf_str(&got.text), di_strbuf_str(&want.text)) != 0) {
            fail_msg("steps up to %d, stage %d, tools %d, inside %d, json %d, %zu stops\ntext:%s\n\ngot:%s\n\nwant:%s",
                     (int)steps[i], o.stage, o.has_tools, o.starts_in_calls, o.is_json, o.n_stop, di_strbuf_str(&text),
                     di_strbuf_str(&got.text), di_strbuf_str(&want.text));
        }
        assert_int_equal(n_calls, want_calls);
        assert_int_equal(hit, want_hit);
    }
    di_strbuf_deinit(&want.text);
    di_strbuf_deinit(&got.text);
    di_strbuf_deinit(&text);
}

/* The stop matcher against a search over the whole text. */
DI_PROPERTY(stop_matcher_finds_what_a_search_finds, 4000) {
    uint64_t rng = seed;
    char letters[8][6];
    const char *stop[8];
    size_t stop_len[8], n_stop = (size_t)di_test_random_range(&rng, 0, 8);
    for (size_t i = 0; i < n_stop; i++) {
        stop_len[i] = (size_t)di_test_random_range(&rng, 0, 6);
        for (size_t j = 0; j < stop_len[i]; j++) {
            letters[i][j] = (char)('a' + di_test_random_range(&rng, 0, 2));
        }
        stop[i] = letters[i];
    }
    char text[64];
    size_t len = (size_t)di_test_random_range(&rng, 0, (int64_t)sizeof text);
    for (size_t i = 0; i < len; i++) {
        text[i] = (char)('a' + di_test_random_range(&rng, 0, 2));
    }
    size_t want_len = len;
    int64_t want_hit = -1;
    for (size_t end = 1; end <= len && want_hit < 0; end++) {
        for (size_t i = 0; i < n_stop && want_hit < 0; i++) {
            if (stop_len[i] > 0 && stop_len[i] <= end && memcmp(text + end - stop_len[i], stop[i], stop_len[i]) == 0) {
                want_hit = (int64_t)i;
                want_len = end - stop_len[i];
            }
        }
    }
    di_stop_matcher m;
    di_error err;
    di_strbuf out = {0};
    di_test_ok(di_stop_matcher_init(&m, stop, stop_len, n_stop, &err), &err);
    for (size_t at = 0; at < len;) {
        size_t step = (size_t)di_test_random_range(&rng, 1, 9);
        step = DI_MIN(step, len - at);
        di_stop_matcher_push(&m, text + at, step, &out);
        at += step;
        /* What is held back is the longest suffix that may go on. */
        size_t held = 0;
        for (size_t i = 0; i < n_stop; i++) {
            for (size_t k = DI_MIN(stop_len[i], at); k > held; k--) {
                if (k < stop_len[i] && memcmp(text + at - k, stop[i], k) == 0) {
                    held = k;
                }
            }
        }
        if (di_stop_matcher_hit(&m) < 0) {
            assert_int_equal(out.len, at - held);
        }
    }
    di_stop_matcher_finish(&m, &out);
    assert_int_equal(di_stop_matcher_hit(&m), want_hit);
    assert_int_equal(out.len, want_len);
    assert_memory_equal(di_strbuf_str(&out), text, want_len);
    di_strbuf_deinit(&out);
    di_stop_matcher_deinit(&m);
}

DI_TEST_GROUP(parser_soup, cmocka_unit_test(cuts_do_not_matter_and_the_table_holds),
              cmocka_unit_test(stop_matcher_finds_what_a_search_finds));
