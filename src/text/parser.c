/* The output parser: one state machine over bytes, as chat.md 9 draws it.
 *
 * Each state looks for a few markers with Knuth, Morris and Pratt's automaton. Text that is passed on goes through
 * `hold`: a byte leaves it as soon as no marker of the state can include it. What leaves is collected in `run` and
 * becomes one event at the end of the chunk or when another kind of text begins. Stop strings are stop.c's. */
#include "parser.h"

#include "stop.h"

/* U+FF5C, the bar of the special spellings. */
#define BAR "\xef\xbd\x9c"
#define DSML BAR "DSML" BAR

typedef enum marker_id {
    MARK_CALLS,     /* swallows the line feeds before it */
    MARK_END_THINK, /* the same in Reasoning */
    MARK_CLOSE,     /* the start of every closing tag */
    MARK_INVOKE,
    MARK_CALLS_END,
    MARK_TOOL_CALLS_END, /* as earlier models spell it */
    MARK_PARAMETER,
    MARK_TRUE,
    MARK_FALSE,
    MARK_FENCE_JSON,
    MARK_FENCE,
    MARK_FENCE_END,
    N_MARKERS
} marker_id;

static const char *const marker_texts[N_MARKERS] = {
    [MARK_CALLS] = "<" DSML,
    [MARK_END_THINK] = "</think>",
    [MARK_CLOSE] = "</" DSML,
    [MARK_INVOKE] = "invoke name=\"",
    [MARK_CALLS_END] = "</" DSML " calls>",
    [MARK_TOOL_CALLS_END] = "</" DSML "tool_calls>",
    [MARK_PARAMETER] = "parameter name=",
    [MARK_TRUE] = "true\">",
    [MARK_FALSE] = "false\">",
    [MARK_FENCE_JSON] = "```json\n",
    [MARK_FENCE] = "```\n",
    [MARK_FENCE_END] = "\n```",
};

enum { MARKER_MAX = 32 };

/* A marker and how much of it the text's end spells. */
typedef struct marker {
    uint8_t text[MARKER_MAX];
    uint8_t fail[MARKER_MAX]; /* [k]: the longest proper prefix of text[0..k) that is its suffix too */
    size_t len, matched;
    size_t n_lf; /* line feeds directly before the matched part */
} marker;

/*
 *     Reasoning --</think>--> Content --stop string--> Done
 *         |                      |
 *         +------<|DSML|---------+
 *                  v
 *                Calls --invoke name="--> Name --"--> Args --parameter name=--> Key --> Type --true">--> Value
 *                  |  ^                                 |  ^                                                |
 *                  |  +-----------</|DSML|--------------+  +-------------------</|DSML|---------------------+
 *                  +--</|DSML| calls>--> Finished
 *
 * In JSON mode Content is replaced by JsonBefore --{, [, fence--> Json --fence--> JsonAfter. */
typedef enum state {
    STATE_REASONING,
    STATE_CONTENT,
    STATE_JSON_BEFORE,
    STATE_JSON,
    STATE_JSON_AFTER,
    STATE_CALLS,
    STATE_NAME,
    STATE_ARGS,
    STATE_KEY,
    STATE_TYPE,
    STATE_VALUE,
    STATE_FINISHED, /* after the call block: everything is dropped */
    STATE_DONE
} state;

/* Where in a parameter's key the parser is. A quote inside is part of the key unless an attribute follows it. */
typedef enum key_state {
    KEY_OPEN,     /* nothing seen */
    KEY_RAW,      /* no opening quote, or a tag that ends without attribute: up to the first space, as it is */
    KEY_TEXT,     /* inside the quotes */
    KEY_QUOTE,    /* a quote waits */
    KEY_SPACE,    /* a quote and spaces */
    KEY_ATTRIBUTE /* a quote, spaces and the start of an attribute's name */
} key_state;

struct di_parser {
    di_parser_sink sink;
    void *user;
    state state;
    key_state key;
    bool has_tools, is_json;
    bool is_leading;   /* line feeds are still dropped */
    bool is_first;     /* no parameter of this call yet */
    bool is_string;    /* the value is a string */
    bool has_filler;   /* the space for this run of text around the JSON value is out */
    bool has_finished; /* DONE was emitted */
    bool has_open_call;
    int64_t n_calls;
    size_t n_lf; /* line feeds at the end of the text of this state */
    marker markers[N_MARKERS];
    di_stop_matcher stop;
    di_strbuf hold; /* bytes from hold_at on wait for a decision */
    size_t hold_at;
    di_strbuf run; /* decided text of the kind run_kind, not yet an event */
    di_parser_event_kind run_kind;
    di_strbuf name;
    di_status status; /* the first failure, sticky */
    di_error *err;    /* of the call in progress */
};

/* ---- events ---- */

static void emit(di_parser *p, di_parser_event_kind kind, const char *text, size_t len) {
    if (p->status != DI_OK) {
        return;
    }
    bool is_call = kind == DI_PARSER_CALL_BEGIN || kind == DI_PARSER_CALL_ARGS;
    di_parser_event event = {.kind = kind, .call_id = is_call ? p->n_calls - 1 : -1, .text = text, .len = len};
    p->status = p->sink(p->user, &event, p->err);
}

/* Turns the first n bytes of the run into an event and keeps the rest. */
static void emit_run(di_parser *p, size_t n) {
    if (n > 0) {
        emit(p, p->run_kind, p->run.data, n);
        di_strbuf_remove(&p->run, 0, n);
    }
}

static void flush_run(di_parser *p) {
    emit_run(p, p->run.len);
}

/* Length of an unfinished, so far well-formed character at the end of s: 0 to 3. */
static size_t unfinished_tail(const char *s, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        uint8_t lead = (uint8_t)s[n - back];
        if (lead >= 0xc0) {
            size_t need = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2, skip = 0;
            /* di_utf8_decode takes a truncated sequence as one ill-formed part of all its bytes if its start is
             * well-formed. */
            return need > back && di_utf8_decode(s + n - back, back, NULL, &skip) == 0 && skip == back ? back : 0;
        }
        if (lead < 0x80) {
            return 0;
        }
    }
    return 0;
}

/* The end of a chunk: what is decided goes out, whole characters only. A key goes out as a whole, as its last quote has
 * to wait anyway. */
static void flush_chunk(di_parser *p) {
    if (p->run.len > 0 && p->state != STATE_KEY) {
        emit_run(p, p->run.len - unfinished_tail(p->run.data, p->run.len));
    }
}

static void add_run(di_parser *p, di_parser_event_kind kind, const char *text, size_t len) {
    if (p->run_kind != kind) {
        flush_run(p);
        p->run_kind = kind;
    }
    di_strbuf_append(&p->run, text, len);
}

static void add_escaped(di_parser *p, const char *text, size_t len) {
    if (p->run_kind != DI_PARSER_CALL_ARGS) {
        flush_run(p);
        p->run_kind = DI_PARSER_CALL_ARGS;
    }
    di_json_write_escaped(&p->run, text, len);
}

/* A piece of arguments that the parser itself adds: an event of its own. */
static void add_literal(di_parser *p, const char *text) {
    flush_run(p);
    emit(p, DI_PARSER_CALL_ARGS, text, strlen(text));
}

/* Passes on text of the current state, by the state's rule. */
static void release(di_parser *p, const char *text, size_t len) {
    if (len == 0) {
        return;
    }
    switch (p->state) {
    case STATE_REASONING:
        add_run(p, DI_PARSER_REASONING, text, len);
        break;
    case STATE_CONTENT:
    case STATE_JSON:
        add_run(p, DI_PARSER_CONTENT, text, len);
        break;
    case STATE_JSON_BEFORE:
    case STATE_JSON_AFTER:
        /* One space for all of it: a client sees that something comes, and chunks do not matter. */
        if (!p->has_filler) {
            p->has_filler = true;
            add_run(p, DI_PARSER_CONTENT, " ", 1);
        }
        break;
    case STATE_VALUE:
        if (p->is_string) {
            add_escaped(p, text, len);
        } else {
            add_run(p, DI_PARSER_CALL_ARGS, text, len);
        }
        break;
    default:
        break;
    }
}

/* Releases the first n waiting bytes. */
static void release_hold(di_parser *p, size_t n) {
    release(p, p->hold.data + p->hold_at, n);
    p->hold_at += n;
    if (p->hold_at == p->hold.len) {
        di_strbuf_reset(&p->hold);
        p->hold_at = 0;
    } else if (p->hold_at >= 256 && p->hold_at > p->hold.len / 2) {
        di_strbuf_remove(&p->hold, 0, p->hold_at);
        p->hold_at = 0;
    }
}

/* ---- markers ---- */

static void marker_init(marker *m, const char *text) {
    m->len = strlen(text);
    DI_ASSERT(m->len < MARKER_MAX);
    memcpy(m->text, text, m->len);
    size_t k = 0;
    for (size_t i = 1; i < m->len; i++) {
        while (k > 0 && m->text[i] != m->text[k]) {
            k = m->fail[k];
        }
        if (m->text[i] == m->text[k]) {
            k++;
        }
        m->fail[i + 1] = (uint8_t)k;
    }
}

/* Takes a byte that n_lf line feeds precede; true when the marker is complete. */
static bool marker_step(marker *m, uint8_t byte, size_t n_lf) {
    size_t before = m->matched;
    while (m->matched > 0 && m->text[m->matched] != byte) {
        m->matched = m->fail[m->matched];
    }
    if (m->text[m->matched] == byte) {
        m->matched++;
    }
    if (m->matched <= before || before == 0) {
        /* The match begins elsewhere now. Markers that swallow line feeds begin with '<' and hold neither a second one
         * nor a line feed: a new match begins at this byte. */
        m->n_lf = m->matched > 0 ? n_lf : 0;
    }
    return m->matched == m->len;
}

static void enter(di_parser *p, state next) {
    p->state = next;
    p->n_lf = 0;
    di_strbuf_reset(&p->hold);
    p->hold_at = 0;
    for (int i = 0; i < N_MARKERS; i++) {
        p->markers[i].matched = 0;
        p->markers[i].n_lf = 0;
    }
    di_stop_matcher_reset(&p->stop);
}

/* A marker of len bytes is complete at the end of hold: what comes before it is text of the current state. */
static void leave(di_parser *p, size_t len, state next) {
    size_t waiting = p->hold.len - p->hold_at;
    DI_ASSERT(len <= waiting); /* what may become a marker never leaves hold */
    release_hold(p, waiting - len);
    enter(p, next);
}

/* How many bytes at the end of hold may become part of m, with the line feeds before it if it swallows them. */
static size_t marker_held(const di_parser *p, const marker *m, bool swallows_lf) {
    if (m->matched > 0) {
        return m->matched + (swallows_lf ? m->n_lf : 0);
    }
    return swallows_lf ? p->n_lf : 0;
}

/* ---- the states ---- */

/* The states whose text goes somewhere: the byte joins hold, markers are tried in the order of the specification, and
 * what none of them can use any more leaves. */
static void step_text(di_parser *p, uint8_t byte) {
    marker *calls = &p->markers[MARK_CALLS], *end_think = &p->markers[MARK_END_THINK];
    bool is_reasoning = p->state == STATE_REASONING;
    bool takes_calls = p->has_tools && p->state != STATE_JSON && p->state != STATE_VALUE;
    bool takes_stop = p->state == STATE_CONTENT || p->state == STATE_JSON;
    bool takes_end_think = is_reasoning || p->state == STATE_CONTENT;
    size_t n_lf = p->n_lf, held = 0;
    char c = (char)byte;

    di_strbuf_append(&p->hold, &c, 1);
    if (p->hold.failed) {
        return; /* push reports it */
    }
    if (takes_stop) {
        size_t stop_len = di_stop_matcher_step(&p->stop, byte);
        if (stop_len > 0) {
            size_t found = p->stop.found;
            leave(p, stop_len, STATE_DONE);
            p->stop.found = found;
            return;
        }
        held = DI_MAX(held, di_stop_matcher_held(&p->stop));
    }
    if (p->is_leading && byte == '\n') {
        enter(p, p->state);
        return;
    }
    if (takes_calls && marker_step(calls, byte, n_lf)) {
        leave(p, calls->len + calls->n_lf, STATE_CALLS);
        return;
    }
    p->is_leading = false;
    if (takes_end_think && marker_step(end_think, byte, n_lf)) {
        if (is_reasoning) {
            leave(p, end_think->len + end_think->n_lf, p->is_json ? STATE_JSON_BEFORE : STATE_CONTENT);
            p->is_leading = true;
        } else {
            leave(p, end_think->len, STATE_CONTENT);
        }
        return;
    }
    if (p->state == STATE_JSON_BEFORE) {
        for (marker_id id = MARK_FENCE_JSON; id <= MARK_FENCE; id++) {
            marker *fence = &p->markers[id];
            if (marker_step(fence, byte, 0)) {
                leave(p, fence->len, STATE_JSON);
                return;
            }
            held = DI_MAX(held, fence->matched);
        }
        if (byte == '{' || byte == '[') {
            leave(p, 1, STATE_JSON);
            release(p, &c, 1);
            return;
        }
    } else if (p->state == STATE_JSON) {
        marker *fence = &p->markers[MARK_FENCE_END];
        if (marker_step(fence, byte, 0)) {
            leave(p, fence->len, STATE_JSON_AFTER);
            p->has_filler = false;
            return;
        }
        held = DI_MAX(held, fence->matched);
    } else if (p->state == STATE_VALUE) {
        marker *close = &p->markers[MARK_CLOSE];
        if (marker_step(close, byte, 0)) {
            leave(p, close->len, STATE_ARGS);
            if (p->is_string) {
                add_literal(p, "\"");
            }
            p->is_first = false;
            return;
        }
        held = DI_MAX(held, close->matched);
    }
    p->n_lf = byte == '\n' ? n_lf + 1 : 0;
    if (takes_calls) {
        held = DI_MAX(held, marker_held(p, calls, true));
    }
    if (takes_end_think) {
        held = DI_MAX(held, marker_held(p, end_think, is_reasoning));
    }
    release_hold(p, p->hold.len - p->hold_at - held);
}

static void end_call(di_parser *p, bool is_cut) {
    flush_run(p);
    p->has_open_call = false;
    if (p->status == DI_OK) {
        di_parser_event event = {.kind = DI_PARSER_CALL_END, .call_id = p->n_calls - 1, .text = "", .is_cut = is_cut};
        p->status = p->sink(p->user, &event, p->err);
    }
}

static void step_calls(di_parser *p, uint8_t byte) {
    bool is_invoke = marker_step(&p->markers[MARK_INVOKE], byte, 0);
    bool is_end = marker_step(&p->markers[MARK_CALLS_END], byte, 0);
    bool is_other_end = marker_step(&p->markers[MARK_TOOL_CALLS_END], byte, 0);
    if (is_invoke) {
        enter(p, STATE_NAME);
        di_strbuf_reset(&p->name);
    } else if (is_end || is_other_end) {
        enter(p, STATE_FINISHED);
    }
}

static void step_name(di_parser *p, uint8_t byte) {
    if (byte != '"') {
        di_strbuf_putc(&p->name, (char)byte);
        return;
    }
    enter(p, STATE_ARGS);
    p->is_first = true;
    p->has_open_call = true;
    flush_run(p);
    p->n_calls++;
    emit(p, DI_PARSER_CALL_BEGIN, di_strbuf_str(&p->name), p->name.len);
}

static void step_args(di_parser *p, uint8_t byte) {
    if (marker_step(&p->markers[MARK_PARAMETER], byte, 0)) {
        enter(p, STATE_KEY);
        p->key = KEY_OPEN;
        add_literal(p, p->is_first ? "{" : ", ");
    } else if (marker_step(&p->markers[MARK_CLOSE], byte, 0)) {
        enter(p, STATE_CALLS);
        add_literal(p, p->is_first ? "{}" : "}");
        end_call(p, false);
    }
}

static void end_key(di_parser *p, bool is_quoted) {
    if (is_quoted) {
        add_run(p, DI_PARSER_CALL_ARGS, "\"", 1);
    }
    add_literal(p, ": ");
    enter(p, STATE_TYPE);
}

static bool is_attribute_byte(uint8_t byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte == '_' || byte == '-';
}

/* A key ends at the quote that an attribute follows: `" string=` in every well-formed tag. Quotes, spaces and
 * backslashes before it belong to the key and are escaped. A tag that closes without any attribute ends its key at the
 * first space, as does a key without quotes. */
static void step_key(di_parser *p, uint8_t byte) {
    char c = (char)byte;
    switch (p->key) {
    case KEY_OPEN:
        p->key = byte == '"' ? KEY_TEXT : KEY_RAW;
        if (byte == '"') {
            add_run(p, DI_PARSER_CALL_ARGS, &c, 1);
            return;
        }
        break;
    case KEY_RAW:
    case KEY_TEXT:
        break;
    case KEY_QUOTE:
        if (byte == '>') {
            add_run(p, DI_PARSER_CALL_ARGS, "\">", 2);
            di_strbuf_reset(&p->hold);
            p->key = KEY_RAW;
            return;
        }
        if (byte == ' ') {
            p->key = KEY_SPACE;
            di_strbuf_putc(&p->hold, c);
            return;
        }
        break;
    case KEY_SPACE:
    case KEY_ATTRIBUTE:
        if (byte == '>' || (byte == '=' && p->key == KEY_ATTRIBUTE)) {
            end_key(p, true);
            return;
        }
        if (is_attribute_byte(byte) || (byte == ' ' && p->key == KEY_SPACE)) {
            p->key = byte == ' ' ? KEY_SPACE : KEY_ATTRIBUTE;
            di_strbuf_putc(&p->hold, c);
            return;
        }
        break;
    }
    if (p->key == KEY_RAW) {
        if (byte == ' ') {
            end_key(p, false);
        } else {
            add_run(p, DI_PARSER_CALL_ARGS, &c, 1);
        }
        return;
    }
    /* What waited is part of the key; another quote may be its end. */
    if (p->hold.len > 0) {
        add_escaped(p, p->hold.data, p->hold.len);
        di_strbuf_reset(&p->hold);
    }
    if (byte == '"') {
        p->key = KEY_QUOTE;
        di_strbuf_putc(&p->hold, c);
    } else {
        p->key = KEY_TEXT;
        add_escaped(p, &c, 1);
    }
}

static void step_type(di_parser *p, uint8_t byte) {
    bool is_true = marker_step(&p->markers[MARK_TRUE], byte, 0);
    bool is_false = marker_step(&p->markers[MARK_FALSE], byte, 0);
    if (is_true || is_false) {
        enter(p, STATE_VALUE);
        p->is_string = is_true;
        if (is_true) {
            add_literal(p, "\"");
        }
    }
}

static void step(di_parser *p, uint8_t byte) {
    switch (p->state) {
    case STATE_REASONING:
    case STATE_CONTENT:
    case STATE_JSON_BEFORE:
    case STATE_JSON:
    case STATE_JSON_AFTER:
    case STATE_VALUE:
        step_text(p, byte);
        break;
    case STATE_CALLS:
        step_calls(p, byte);
        break;
    case STATE_NAME:
        step_name(p, byte);
        break;
    case STATE_ARGS:
        step_args(p, byte);
        break;
    case STATE_KEY:
        step_key(p, byte);
        break;
    case STATE_TYPE:
        step_type(p, byte);
        break;
    case STATE_FINISHED:
    case STATE_DONE:
        break;
    }
}

/* ---- the parser ---- */

di_status di_parser_create(di_parser **out, const di_parser_options *options, di_parser_sink sink, void *user,
                           di_error *err) {
    di_parser *p = calloc(1, sizeof *p);
    if (p == NULL) {
        return di_fail(err, DI_ERR_MEMORY, "output parser: no memory for %zu bytes", sizeof *p);
    }
    di_status st = di_stop_matcher_init(&p->stop, options->stop, options->stop_len, options->n_stop, err);
    if (st != DI_OK) {
        free(p);
        return st;
    }
    for (int i = 0; i < N_MARKERS; i++) {
        marker_init(&p->markers[i], marker_texts[i]);
    }
    p->sink = sink;
    p->user = user;
    p->has_tools = options->has_tools;
    p->is_json = options->is_json;
    p->is_leading = !options->starts_in_calls &&
                    (options->stage == DI_CHAT_STAGE_CONTENT || options->stage == DI_CHAT_STAGE_REASONING);
    bool is_reasoning = options->stage == DI_CHAT_STAGE_REASONING || options->stage == DI_CHAT_STAGE_REASONING_RESUMED;
    enter(p, options->starts_in_calls ? STATE_CALLS
             : is_reasoning           ? STATE_REASONING
             : options->is_json       ? STATE_JSON_BEFORE
                                      : STATE_CONTENT);
    *out = p;
    return DI_OK;
}

void di_parser_destroy(di_parser *p) {
    if (p == NULL) {
        return;
    }
    di_stop_matcher_deinit(&p->stop);
    di_strbuf_deinit(&p->hold);
    di_strbuf_deinit(&p->run);
    di_strbuf_deinit(&p->name);
    free(p);
}

/* The failure of this call, if any: the sink's, or memory. */
static di_status outcome(di_parser *p) {
    p->err = NULL;
    return p->status;
}

static void check_memory(di_parser *p) {
    if (p->status == DI_OK && (p->hold.failed || p->run.failed || p->name.failed)) {
        p->status = di_fail(p->err, DI_ERR_MEMORY, "output parser: no memory for the text that waits");
    }
}

static void emit_done(di_parser *p) {
    p->has_finished = true;
    flush_run(p);
    emit(p, DI_PARSER_DONE, "", 0);
}

di_status di_parser_push(di_parser *p, const char *text, size_t len, di_error *err) {
    p->err = err;
    for (size_t i = 0; i < len && p->state != STATE_DONE && p->status == DI_OK; i++) {
        step(p, (uint8_t)text[i]);
        check_memory(p);
    }
    if (p->status == DI_OK) {
        flush_chunk(p);
    }
    if (p->status == DI_OK && p->state == STATE_DONE && !p->has_finished) {
        emit_done(p);
    }
    return outcome(p);
}

di_status di_parser_finish(di_parser *p, di_error *err) {
    p->err = err;
    if (p->status != DI_OK || p->has_finished) {
        return outcome(p);
    }
    if (p->state == STATE_KEY) {
        if (p->key == KEY_QUOTE) {
            add_run(p, DI_PARSER_CALL_ARGS, "\"", 1);
        } else if (p->key == KEY_SPACE || p->key == KEY_ATTRIBUTE) {
            end_key(p, true);
        }
    } else {
        release_hold(p, p->hold.len - p->hold_at);
    }
    check_memory(p);
    if (p->has_open_call) {
        end_call(p, true);
    }
    p->state = STATE_DONE;
    emit_done(p);
    return outcome(p);
}

bool di_parser_is_done(const di_parser *p) {
    return p->state == STATE_DONE;
}

bool di_parser_is_reasoning(const di_parser *p) {
    return p->state == STATE_REASONING;
}

int64_t di_parser_stop_hit(const di_parser *p) {
    return di_stop_matcher_hit(&p->stop);
}

int64_t di_parser_n_calls(const di_parser *p) {
    return p->n_calls;
}

di_finish di_parser_finish_reason(const di_parser *p, di_finish engine) {
    if (engine == DI_FINISH_NONE || di_parser_stop_hit(p) >= 0) {
        return DI_FINISH_STOP;
    }
    return engine == DI_FINISH_STOP && p->n_calls > 0 ? DI_FINISH_TOOL_CALLS : engine;
}

/* ---- names of reasons ---- */

static const char *const finish_names[] = {
    [DI_FINISH_NONE] = "stop",
    [DI_FINISH_STOP] = "stop",
    [DI_FINISH_LENGTH] = "length",
    [DI_FINISH_CONTENT_FILTER] = "content_filter",
    [DI_FINISH_TOOL_CALLS] = "tool_calls",
    [DI_FINISH_ABORT] = "abort",
    [DI_FINISH_ERROR] = "error",
};

const char *di_finish_name(di_finish finish) {
    return finish_names[finish];
}

bool di_finish_parse(const char *name, di_finish *finish) {
    for (int i = DI_FINISH_STOP; i <= DI_FINISH_ERROR; i++) {
        if (strcmp(finish_names[i], name) == 0) {
            *finish = (di_finish)i;
            return true;
        }
    }
    return false;
}
