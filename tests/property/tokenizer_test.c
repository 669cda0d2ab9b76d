/* Invariants of the tokenizer on random text and random ids, with the tiny model's tokenizer:
 *   decode(encode(text)) is the text after repair;   encode(bytes) is encode(repair(bytes));
 *   a stream's pieces joined are the one-shot text, which is the repair of the joined bytes;
 *   plain and full encoding agree where no added token is spelled. */
#include "harness.h"
#include "text/tokenizer.h"

static di_tokenizer *tiny;

static const di_tokenizer *open_tiny(void) {
    if (!tiny) {
        di_error err;
        di_test_ok(di_tokenizer_open(&tiny, di_test_source("models/tiny/tokenizer.json"), &err), &err);
    }
    return tiny;
}

__attribute__((destructor)) static void close_tiny(void) {
    di_tokenizer_close(tiny);
}

static uint32_t random_char(uint64_t *rng) {
    static const uint32_t bounds[] = {0x80, 0x80, 0x80, 0x300, 0x3100, 0xA000, 0x10000, 0x20000, 0x110000};
    for (;;) {
        uint32_t cp = (uint32_t)(di_test_random(rng) % bounds[di_test_random(rng) % DI_COUNT(bounds)]);
        if (cp < 0xD800 || cp > 0xDFFF) {
            return cp;
        }
    }
}

/* Words, runs, spaces, digits, added tokens and pieces of them, any character. */
static void random_text(di_strbuf *out, uint64_t *rng) {
    static const char *const words[] = {"the ",     " question", "Hello", "don't",   "foo_bar", "  ",         "\n\n",
                                        "\r\n",     "\t",        "123",   "3.14159", "<|",      "|>",         "日本語",
                                        "カタカナ", "한글",      "é",     "e\u0301", "😀",       "<｜User｜>", "<think>",
                                        "</think>", "<｜",       "｜>",   "...",     "=> {",    "\u00a0"};
    int n = (int)di_test_random_range(rng, 0, 30);
    for (int i = 0; i < n; i++) {
        char utf8[4];
        uint32_t cp = random_char(rng);
        int run = 1;
        switch (di_test_random(rng) % 4) {
        case 0:
            di_strbuf_append(out, utf8, di_utf8_encode(cp, utf8));
            break;
        case 1:
            for (run = (int)di_test_random_range(rng, 1, 200); run > 0; run--) {
                di_strbuf_append(out, utf8, di_utf8_encode(cp, utf8));
            }
            break;
        default:
            di_strbuf_puts(out, words[di_test_random(rng) % DI_COUNT(words)]);
        }
    }
}

static void expect_same_text(const di_strbuf *got, const di_strbuf *want) {
    assert_int_equal(got->len, want->len);
    assert_memory_equal(di_strbuf_str(got), di_strbuf_str(want), want->len);
}

static void expect_same_ids(const di_ids *got, const di_ids *want) {
    assert_int_equal(got->len, want->len);
    for (size_t i = 0; i < want->len; i++) {
        assert_int_equal(got->data[i], want->data[i]);
    }
}

DI_PROPERTY(decode_undoes_encode, 600) {
    uint64_t rng = seed;
    const di_tokenizer *tok = open_tiny();
    di_strbuf text = {0}, back = {0};
    di_ids ids = {0};
    di_error err;
    random_text(&text, &rng);
    for (int plain = 0; plain < 2; plain++) {
        ids.len = 0;
        di_strbuf_reset(&back);
        di_test_ok(di_tokenizer_encode(tok, text.data, text.len, plain, &ids, &err), &err);
        di_test_ok(di_tokenizer_decode(tok, ids.data, ids.len, false, &back, &err), &err);
        expect_same_text(&back, &text);
        for (size_t i = 0; plain && i < ids.len; i++) {
            assert_false(di_tokenizer_is_special(tok, ids.data[i]));
        }
    }
    di_ids_deinit(&ids);
    di_strbuf_deinit(&text);
    di_strbuf_deinit(&back);
}

DI_PROPERTY(bytes_encode_like_their_repair, 600) {
    uint64_t rng = seed;
    const di_tokenizer *tok = open_tiny();
    di_strbuf text = {0}, repaired = {0};
    di_ids raw = {0}, valid = {0};
    di_error err;
    random_text(&text, &rng);
    for (int k = 0; k < 4 && text.len > 0; k++) {
        text.data[di_test_random(&rng) % text.len] = (char)(0x80 | di_test_random(&rng));
        di_strbuf_truncate(&text, text.len - di_test_random(&rng) % 2);
    }
    di_utf8_repair(&repaired, di_strbuf_str(&text), text.len);
    bool is_plain = di_test_random(&rng) % 2;
    di_test_ok(di_tokenizer_encode(tok, di_strbuf_str(&text), text.len, is_plain, &raw, &err), &err);
    di_test_ok(di_tokenizer_encode(tok, di_strbuf_str(&repaired), repaired.len, is_plain, &valid, &err), &err);
    expect_same_ids(&raw, &valid);
    di_ids_deinit(&raw);
    di_ids_deinit(&valid);
    di_strbuf_deinit(&text);
    di_strbuf_deinit(&repaired);
}

DI_PROPERTY(stream_gives_the_one_shot_text, 1500) {
    uint64_t rng = seed;
    const di_tokenizer *tok = open_tiny();
    di_strbuf bytes = {0}, want = {0}, streamed = {0}, decoded = {0};
    di_ids ids = {0};
    di_detokenizer stream;
    di_error err;
    di_detokenizer_init(&stream, tok);
    int n = (int)di_test_random_range(&rng, 0, 40);
    for (int i = 0; i < n; i++) {
        /* Mostly single bytes (ids 3 .. 258), where characters break. */
        int32_t id = (int32_t)di_test_random_range(&rng, 3, 258);
        if (di_test_random(&rng) % 4 == 0) {
            id = (int32_t)di_test_random_range(&rng, -2, di_tokenizer_size(tok) + 1);
        }
        size_t len = 0, before = streamed.len;
        const char *s = di_tokenizer_bytes(tok, id, &len);
        di_strbuf_append(&bytes, s, len);
        di_test_ok(di_ids_append(&ids, &id, 1, &err), &err);
        di_detokenizer_push(&stream, id, &streamed);
        assert_true(di_utf8_valid(di_strbuf_str(&streamed) + before, streamed.len - before));
        assert_true(stream.n_pending >= 0 && stream.n_pending <= 3);
    }
    di_detokenizer_flush(&stream, &streamed);
    di_utf8_repair(&want, di_strbuf_str(&bytes), bytes.len);
    di_test_ok(di_tokenizer_decode(tok, ids.data, ids.len, false, &decoded, &err), &err);
    expect_same_text(&streamed, &want);
    expect_same_text(&decoded, &want);
    di_ids_deinit(&ids);
    di_strbuf_deinit(&bytes);
    di_strbuf_deinit(&want);
    di_strbuf_deinit(&streamed);
    di_strbuf_deinit(&decoded);
}

DI_PROPERTY(modes_agree_without_added_tokens, 300) {
    uint64_t rng = seed;
    const di_tokenizer *tok = open_tiny();
    di_strbuf text = {0};
    di_ids full = {0}, plain = {0};
    di_error err;
    random_text(&text, &rng);
    for (size_t i = 0; i < text.len; i++) { /* every added token of the file has an opening bracket or a wide bar */
        if (text.data[i] == '<' || text.data[i] == '\xEF') {
            text.data[i] = ' ';
        }
    }
    di_test_ok(di_tokenizer_encode(tok, text.data, text.len, false, &full, &err), &err);
    di_test_ok(di_tokenizer_encode(tok, text.data, text.len, true, &plain, &err), &err);
    expect_same_ids(&full, &plain);
    di_ids_deinit(&full);
    di_ids_deinit(&plain);
    di_strbuf_deinit(&text);
}

DI_TEST_GROUP(tokenizer_properties, cmocka_unit_test(decode_undoes_encode),
              cmocka_unit_test(bytes_encode_like_their_repair), cmocka_unit_test(stream_gives_the_one_shot_text),
              cmocka_unit_test(modes_agree_without_added_tokens));
