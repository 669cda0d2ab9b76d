/* Streaming decode: what is released when, and that it is well-formed. */
#include "made_tokenizer.h"

static di_tokenizer *open_bytes(void) {
    return made_open(&(made){.vocab = ",\"ä½łå\":256", /* E4 BD A0 E5 */
                             .merges = "",
                             .added = MADE_ADDED(257, "<｜x｜>", true, false)});
}

/* Pushes ids and shows what each released, with / between, then the flush behind |. */
static const char *stream(const di_tokenizer *tok, const int32_t *ids, size_t n) {
    static char shown[512];
    di_detokenizer d;
    di_strbuf out = {0};
    di_detokenizer_init(&d, tok);
    for (size_t i = 0; i < n; i++) {
        size_t before = out.len;
        di_detokenizer_push(&d, ids[i], &out);
        assert_true(di_utf8_valid(di_strbuf_str(&out) + before, out.len - before));
        assert_true(d.n_pending <= 3);
        di_strbuf_putc(&out, i + 1 < n ? '/' : '|');
    }
    di_detokenizer_flush(&d, &out);
    di_detokenizer_flush(&d, &out); /* a second one has nothing left */
    snprintf(shown, sizeof shown, "%s", di_strbuf_str(&out));
    di_strbuf_deinit(&out);
    return shown;
}
#define STREAM(tok, ...)                                                                                               \
    stream(tok, (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void releases_whole_characters(void **state) {
    (void)state;
    di_tokenizer *tok = open_bytes();
    assert_string_equal(STREAM(tok, 'a', 0xC3, 0xA9, 'b'), "a//é/b|");
    assert_string_equal(STREAM(tok, 0xF0, 0x9F, 0x98, 0x80), "///😀|");
    assert_string_equal(STREAM(tok, 256, 0xA5, 0xBD), "你//好|");
    assert_string_equal(STREAM(tok, 256, 256), "你/\uFFFD你|\uFFFD");
    di_tokenizer_close(tok);
}

static void ill_formed_bytes_come_out_as_soon_as_they_are_known(void **state) {
    (void)state;
    di_tokenizer *tok = open_bytes();
    assert_string_equal(STREAM(tok, 0xFF, 0x80), "\uFFFD/\uFFFD|");
    assert_string_equal(STREAM(tok, 0xE4, 0xBD, 'a'), "//\uFFFDa|");
    assert_string_equal(STREAM(tok, 0xF4, 0x90), "/\uFFFD\uFFFD|");
    assert_string_equal(STREAM(tok, 0xE0, 0x80), "/\uFFFD\uFFFD|");
    assert_string_equal(STREAM(tok, 0xC3, 0xC3, 0xA9), "/\uFFFD/é|");
    assert_string_equal(STREAM(tok, 0xF0, 0x9F, 257), "//\uFFFD<｜x｜>|");
    assert_string_equal(STREAM(tok, 0xF0, 0x9F, 0x98), "//|\uFFFD");
    assert_string_equal(STREAM(tok, 0xED, 0xA0, 0x80), "//\uFFFD\uFFFD\uFFFD|"); /* a surrogate waits for its end */
    assert_string_equal(STREAM(tok, 0xED, 0xA0), "/|\uFFFD\uFFFD");
    assert_string_equal(STREAM(tok, 0xED, 0xA0, 'z'), "//\uFFFD\uFFFDz|");
    di_tokenizer_close(tok);
}

static void unknown_ids_give_nothing(void **state) {
    (void)state;
    di_tokenizer *tok = open_bytes();
    assert_string_equal(STREAM(tok, 0xC3, 258, -5, 0xA9), "///é|");
    di_tokenizer_close(tok);
}

static void decode_can_skip_special_tokens(void **state) {
    (void)state;
    di_tokenizer *tok = open_bytes();
    static const int32_t ids[] = {257, 'a', 0xC3, 257, 0xA9};
    di_strbuf out = {0};
    di_error err;
    di_test_ok(di_tokenizer_decode(tok, ids, 5, false, &out, &err), &err);
    assert_string_equal(out.data, "<｜x｜>a\uFFFD<｜x｜>\uFFFD");
    di_strbuf_reset(&out);
    di_test_ok(di_tokenizer_decode(tok, ids, 5, true, &out, &err), &err);
    assert_string_equal(out.data, "aé"); /* dropped before bytes are put together */
    di_strbuf_deinit(&out);
    di_tokenizer_close(tok);
}

static void added_spellings_in_the_byte_map_decode_by_it(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){.added = MADE_ADDED(256, "éa", false, false)});
    static const int32_t id = 256;
    di_strbuf out = {0};
    di_error err;
    assert_string_equal(MADE_IDS(tok, "éa"), "256");
    di_test_ok(di_tokenizer_decode(tok, &id, 1, false, &out, &err), &err);
    assert_string_equal(out.data, "\uFFFDa"); /* byte 0xE9 is no character */
    di_strbuf_deinit(&out);
    di_tokenizer_close(tok);
}

DI_TEST_GROUP(detokenize, cmocka_unit_test(releases_whole_characters),
              cmocka_unit_test(ill_formed_bytes_come_out_as_soon_as_they_are_known),
              cmocka_unit_test(unknown_ids_give_nothing), cmocka_unit_test(decode_can_skip_special_tokens),
              cmocka_unit_test(added_spellings_in_the_byte_map_decode_by_it));
