/* Fuzzes the output parser: the text parsed whole and in pieces must give the same events, message and reason.
 *
 * Input: one byte of options (bits 0-1 stage, 2 tools, 3 inside a call block, 4 JSON mode, 5-6 number of stop strings),
 * one byte that seeds the cuts, each stop string as a length byte and its bytes, then the text. */
#include <stdlib.h>

#include "api/api.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { STOPS_MAX = 3 };

/* Ends the run in a way that the fuzzer takes for a find. */
static void require(bool condition) {
    if (!condition) {
        abort();
    }
}

/* All events, pieces of one kind joined, and the message that they make. */
typedef struct result {
    di_strbuf events;
    di_parser_event_kind kind;
    int64_t call_id;
    bool has_event;
    int n_done;
    di_reply reply;
    di_finish finish;
    int64_t hit;
} result;

static di_status record(void *user, const di_parser_event *event, di_error *err) {
    result *r = user;
    require(r->n_done == 0);
    bool is_piece =
        event->kind == DI_PARSER_REASONING || event->kind == DI_PARSER_CONTENT || event->kind == DI_PARSER_CALL_ARGS;
    require(event->len > 0 || !is_piece);
    if (!is_piece || !r->has_event || event->kind != r->kind || event->call_id != r->call_id) {
        di_strbuf_printf(&r->events, "\n%d %lld %d ", event->kind, (long long)event->call_id, event->is_cut);
    }
    di_strbuf_append(&r->events, event->text, event->len);
    r->has_event = true;
    r->kind = event->kind;
    r->call_id = event->call_id;
    r->n_done += event->kind == DI_PARSER_DONE;
    return di_reply_push(&r->reply, event, err);
}

/* cuts 0: whole; 1: byte by byte; else pieces by a generator with this seed. */
static void parse(result *r, const di_parser_options *options, const char *text, size_t len, uint32_t cuts) {
    di_parser *parser;
    *r = (result){0};
    di_reply_init(&r->reply, true, 1);
    require(di_parser_create(&parser, options, record, r, NULL) == DI_OK);
    for (size_t at = 0; at < len;) {
        cuts = cuts <= 1 ? cuts : cuts * 1664525u + 1013904223u;
        size_t step = cuts == 0 ? len : cuts == 1 ? 1 : (size_t)(cuts >> 28) + 1;
        step = DI_MIN(step, len - at);
        require(di_parser_push(parser, text + at, step, NULL) == DI_OK);
        at += step;
    }
    require(di_parser_finish(parser, NULL) == DI_OK);
    require(r->n_done == 1 && (int64_t)r->reply.n_calls == di_parser_n_calls(parser));
    r->finish = di_parser_finish_reason(parser, DI_FINISH_STOP);
    r->hit = di_parser_stop_hit(parser);
    di_parser_destroy(parser);
}

static void release(result *r) {
    di_strbuf_deinit(&r->events);
    di_reply_deinit(&r->reply);
}

static void require_same(const result *a, const result *b) {
    require(a->events.len == b->events.len && memcmp(a->events.data, b->events.data, a->events.len) == 0);
    require(a->finish == b->finish && a->hit == b->hit);
    di_json *x = di_reply_message(&a->reply), *y = di_reply_message(&b->reply);
    require(x != NULL && y != NULL && di_json_equal(x, y));
    di_json_free(x);
    di_json_free(y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) {
        return 0;
    }
    uint8_t bits = data[0], seed = data[1];
    const char *text = (const char *)data + 2, *stop[STOPS_MAX];
    size_t len = size - 2, stop_len[STOPS_MAX], n_stop = (bits >> 5) & 3;
    for (size_t i = 0; i < n_stop; i++) {
        size_t n = len > 0 ? (uint8_t)*text : 0;
        text += len > 0;
        len -= len > 0;
        stop_len[i] = DI_MIN(n, len);
        stop[i] = text;
        text += stop_len[i];
        len -= stop_len[i];
    }
    di_parser_options options = {.stage = (di_chat_stage)(bits & 3),
                                 .has_tools = (bits & 4) != 0,
                                 .starts_in_calls = (bits & 8) != 0,
                                 .is_json = (bits & 16) != 0,
                                 .n_stop = n_stop,
                                 .stop = stop,
                                 .stop_len = stop_len};
    result whole, bytes, pieces;
    parse(&whole, &options, text, len, 0);
    parse(&bytes, &options, text, len, 1);
    parse(&pieces, &options, text, len, seed + 2u);
    require_same(&whole, &bytes);
    require_same(&whole, &pieces);
    release(&whole);
    release(&bytes);
    release(&pieces);
    return 0;
}
