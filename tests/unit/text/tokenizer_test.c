/* Reading tokenizer.json, looking up entries, added tokens and the order of merges, on tokenizers made for the purpose.
 */
#include "made_tokenizer.h"

static void merges_by_rank_then_from_the_left(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(
        &(made){.vocab = ",\"bc\":256,\"ab\":257,\"aa\":258,\"abc\":259", .merges = "\"b c\",\"a b\",\"a a\""});
    assert_string_equal(MADE_IDS(tok, "abc"), "97 256"); /* b c comes first, and no merge gives abc from a, bc */
    assert_string_equal(MADE_IDS(tok, "ab"), "257");
    assert_string_equal(MADE_IDS(tok, "aaa"), "258 97");
    assert_string_equal(MADE_IDS(tok, "aab"), "97 257");
    assert_string_equal(MADE_IDS(tok, ""), "");
    di_tokenizer_close(tok);
}

static void merges_may_be_pairs_and_come_first(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){.vocab = ",\"bc\":256,\"\\u0120a\":257",
                                          .merges = "[\"b\",\"c\"], [ \"\\u0120\" , \"a\" ]",
                                          .merges_first = true});
    assert_string_equal(MADE_IDS(tok, "bc a"), "256 257");
    di_tokenizer_close(tok);
}

static void repeated_merge_takes_its_last_rank(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){.vocab = ",\"bc\":256,\"ab\":257", .merges = "\"b c\",\"a b\",\"b c\""});
    assert_string_equal(MADE_IDS(tok, "abc"), "257 99");
    di_tokenizer_close(tok);
}

static void added_tokens_are_found_leftmost_longest(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(
        &(made){.added = MADE_ADDED(256, "<a>", false, false) "," MADE_ADDED(257, "<a>b", true, false) "," MADE_ADDED(
                    258, "<x", false, true) "," MADE_ADDED(259, "｜é｜", false, true)});
    assert_int_equal(di_tokenizer_size(tok), 260);
    assert_string_equal(MADE_IDS(tok, "<a><a>b<a>c"), "256 257 256 99");
    assert_string_equal(MADE_IDS(tok, "<<x<a"), "60 258 60 97");
    assert_string_equal(MADE_IDS(tok, "z｜é｜"), "122 259");
    assert_string_equal(made_ids(tok, "<a>", 3, true), "60 97 62");
    assert_int_equal(di_tokenizer_find(tok, "<a>b"), 257);
    assert_int_equal(di_tokenizer_find(tok, "<a>bc"), -1);
    assert_true(di_tokenizer_is_special(tok, 257));
    assert_false(di_tokenizer_is_special(tok, 256));
    assert_false(di_tokenizer_is_special(tok, 97));
    assert_false(di_tokenizer_is_special(tok, -1));
    assert_false(di_tokenizer_is_special(tok, 260));
    di_tokenizer_close(tok);
}

static void tokens_that_are_not_normalized_go_first(void **state) {
    (void)state;
    /* "abc" begins before "cd", and yet the whole text is searched for the latter first. */
    di_tokenizer *tok =
        made_open(&(made){.added = MADE_ADDED(256, "abc", false, true) "," MADE_ADDED(257, "cd", false, false)});
    assert_string_equal(MADE_IDS(tok, "abcd"), "97 98 257");
    assert_string_equal(MADE_IDS(tok, "abc"), "256");
    di_tokenizer_close(tok);
}

static void entries_are_found_by_spelling(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){
        .vocab = ",\"Ġt\":256,\"<｜x｜>\":257", .merges = "\"Ġ t\"", .added = MADE_ADDED(257, "<｜x｜>", true, false)});
    size_t len = 0;
    assert_int_equal(di_tokenizer_size(tok), 258);
    assert_int_equal(di_tokenizer_find(tok, "Ġt"), 256);
    assert_int_equal(di_tokenizer_find(tok, " t"), -1);
    assert_int_equal(di_tokenizer_find(tok, "<｜x｜>"), 257);
    assert_int_equal(di_tokenizer_find(tok, ""), -1);
    assert_int_equal(di_tokenizer_find(tok, "Ń"), 0xAD); /* U+0143, the last moved byte */
    assert_memory_equal(di_tokenizer_bytes(tok, 256, &len), " t", 2);
    assert_int_equal(len, 2);
    assert_string_equal(di_tokenizer_bytes(tok, 258, &len), "");
    assert_int_equal(len, 0);
    assert_string_equal(di_tokenizer_bytes(tok, -1, &len), "");
    assert_int_equal(len, 0);
    di_tokenizer_close(tok);
}

static void byte_map_goes_both_ways(void **state) {
    (void)state;
    di_strbuf spelling = {0};
    char bytes[256], back[512];
    size_t n = 0;
    for (int b = 0; b < 256; b++) {
        bytes[b] = (char)b;
    }
    di_byte_spelling(&spelling, bytes, 256);
    assert_int_equal(spelling.len, 94 + 2 * 162); /* the ASCII ones and all others */
    assert_true(di_byte_unmap(back, &n, spelling.data, spelling.len));
    assert_int_equal(n, 256);
    assert_memory_equal(back, bytes, 256);
    /* tokenizer.json's own: space, line feed, the first and the last moved ones, and what is outside. */
    assert_int_equal(di_byte_of_char(0x120), 0x20);
    assert_int_equal(di_byte_of_char(0x10A), 0x0A);
    assert_int_equal(di_byte_of_char(0x100), 0x00);
    assert_int_equal(di_byte_of_char(0x121), 0x7F);
    assert_int_equal(di_byte_of_char(0x143), 0xAD);
    assert_int_equal(di_byte_of_char(0x144), -1);
    assert_int_equal(di_byte_of_char(0x20), -1);
    assert_int_equal(di_byte_of_char(0xAD), -1);
    di_strbuf_deinit(&spelling);
}

static void invalid_utf8_is_repaired_first(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){.added = MADE_ADDED(256, "<a>", false, false)});
    assert_string_equal(MADE_IDS(tok, "\xFFz"), "239 191 189 122");
    assert_string_equal(MADE_IDS(tok, "\xE4\xBD"), "239 191 189"); /* one subpart */
    assert_string_equal(MADE_IDS(tok, "\xED\xA0\x80"), "239 191 189 239 191 189 239 191 189");
    assert_string_equal(MADE_IDS(tok, "<\xC3<a>"), "60 239 191 189 256");
    assert_string_equal(MADE_IDS(tok, "a\0b"), "97 0 98");
    di_tokenizer_close(tok);
}

static void long_pieces_are_not_cut(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    di_tokenizer *tok = made_open(&(made){.vocab = ",\"aa\":256,\"aaaa\":257", .merges = "\"a a\",\"aa aa\""});
    char *text = malloc(N + 1);
    di_ids ids = {0};
    di_error err;
    assert_non_null(text);
    memset(text, 'a', N + 1);
    di_test_ok(di_tokenizer_encode(tok, text, N + 1, false, &ids, &err), &err);
    assert_int_equal(ids.len, N / 4 + 1);
    for (size_t i = 0; i < N / 4; i++) {
        assert_int_equal(ids.data[i], 257);
    }
    assert_int_equal(ids.data[N / 4], 'a');
    di_ids_deinit(&ids);
    free(text);
    di_tokenizer_close(tok);
}

static void encode_appends(void **state) {
    (void)state;
    di_tokenizer *tok = made_open(&(made){0});
    di_ids ids = {0};
    di_error err;
    di_test_ok(di_tokenizer_encode(tok, "x", 1, false, &ids, &err), &err);
    di_test_ok(di_tokenizer_encode(tok, NULL, 0, false, &ids, &err), &err);
    di_test_ok(di_tokenizer_encode(tok, "y", 1, true, &ids, &err), &err);
    assert_int_equal(ids.len, 2);
    assert_int_equal(ids.data[0], 'x');
    assert_int_equal(ids.data[1], 'y');
    di_ids_deinit(&ids);
    di_tokenizer_close(tok);
}

typedef struct refusal {
    made m;
    di_status status;
    const char *message; /* a part of it */
} refusal;

static void refuses_with_a_message(void **state) {
    (void)state;
    static const refusal cases[] = {
        {{.vocab = ",\"ab\":300"}, DI_ERR_FORMAT, "id 256 has none"},
        {{.vocab = ",\"ab\":7"}, DI_ERR_FORMAT, "id 7 has two spellings"},
        {{.vocab = ",\"a\":256"}, DI_ERR_FORMAT, "ids 97 and 256 have the same spelling"},
        {{.vocab = ",\"ab\":2000000000"}, DI_ERR_FORMAT, "ids have no gaps"},
        {{.vocab = ",\"ab\":3000000000"}, DI_ERR_FORMAT, "expected an id"},
        {{.vocab = ",\"ab\":-1"}, DI_ERR_FORMAT, "expected an id"},
        {{.vocab = ",\"ab\":256.5"}, DI_ERR_FORMAT, "found '.'"},
        {{.vocab = ",\"ab\""}, DI_ERR_FORMAT, "expected ':'"},
        {{.vocab = ",\"\":256"}, DI_ERR_FORMAT, "not empty"},
        {{.vocab = ",\"\xFF\":256"}, DI_ERR_FORMAT, "in UTF-8"},
        {{.vocab = ",\"\\ud800\":256"}, DI_ERR_FORMAT, "a pair of surrogates"},
        {{.vocab = ",\"\\x\":256"}, DI_ERR_FORMAT, "an escape sequence"},
        {{.vocab = ",\"a\nb\":256"}, DI_ERR_FORMAT, "the rest of a string, found byte 0x0a"},
        {{.without_byte = 65}, DI_ERR_FORMAT, "no entry for byte 0x41"},
        {{.merges = "\"a b\""}, DI_ERR_FORMAT, "merge 0: byte"},
        {{.merges = "\"a b\""}, DI_ERR_FORMAT, "the result of the merge is not in the vocabulary"},
        {{.vocab = ",\"ab\":256", .merges = "\"a b\",\"xx b\""}, DI_ERR_FORMAT, "'merges': merge 1"},
        {{.vocab = ",\"ab\":256", .merges = "\"ab\""}, DI_ERR_FORMAT, "two spellings with a space between"},
        {{.vocab = ",\"ab\":256", .merges = "\"a  b\""}, DI_ERR_FORMAT, "second part"},
        {{.merges = "7"}, DI_ERR_FORMAT, "expected a string"},
        {{.model = ",\"ignore_merges\":true"}, DI_ERR_UNSUPPORTED, "'model': 'ignore_merges' is set"},
        {{.model = ",\"byte_fallback\":true"}, DI_ERR_UNSUPPORTED, "'byte_fallback' is set"},
        {{.model = ",\"dropout\":0.1"}, DI_ERR_UNSUPPORTED, "'dropout' is set"},
        {{.model = ",\"unk_token\":\"a\""}, DI_ERR_UNSUPPORTED, "'unk_token' is set"},
        {{.model = ",\"type\":\"Unigram\""}, DI_ERR_UNSUPPORTED, "'Unigram', only 'BPE'"},
        {{.model = ",\"vocab\":{\"a\":0}"}, DI_ERR_FORMAT, "no entry for byte"},
        {{.top = ",\"truncation\":{}"}, DI_ERR_UNSUPPORTED, "'truncation': is set"},
        {{.top = ",\"normalizer\":{\"type\":\"NFC\"}"}, DI_ERR_UNSUPPORTED, "'NFC', only 'Sequence'"},
        {{.top = ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{}]}"}, DI_ERR_UNSUPPORTED, "has steps"},
        {{.top = ",\"post_processor\":{\"type\":\"TemplateProcessing\"}"}, DI_ERR_UNSUPPORTED, "only 'ByteLevel'"},
        {{.top = ",\"decoder\":{\"type\":\"WordPiece\"}"}, DI_ERR_UNSUPPORTED, "only 'ByteLevel'"},
        {{.top = ",\"model\":{}"}, DI_ERR_FORMAT, "'type' is missing"},
        {{.pre_tokenizer = "null"}, DI_ERR_UNSUPPORTED, "'null', only 'Sequence'"},
        {{.pre_tokenizer = MADE_SEQUENCE("{\"type\":\"Whitespace\"}," MADE_BYTE_LEVEL)},
         DI_ERR_UNSUPPORTED,
         "step 0: "},
        {{.pre_tokenizer = MADE_SEQUENCE("{\"type\":\"Digits\"}")},
         DI_ERR_UNSUPPORTED,
         "only 'ByteLevel' is supported"},
        {{.pre_tokenizer = MADE_SEQUENCE(MADE_SPLIT("\\\\h") MADE_BYTE_LEVEL)},
         DI_ERR_UNSUPPORTED,
         "split 1: pattern has"},
        {{.added = MADE_ADDED(300, "x", false, false)}, DI_ERR_FORMAT, "ids without gaps end at 256"},
        {{.added = MADE_ADDED(97, "b", false, false)}, DI_ERR_FORMAT, "spells id 97 otherwise"},
        {{.added = MADE_ADDED(256, "", false, false)}, DI_ERR_FORMAT, "'added_tokens': token 0"},
        {{.added = MADE_ADDED(256, "x", false, false) "," MADE_ADDED(257, "x", false, false)},
         DI_ERR_FORMAT,
         "appears twice"},
        {{.added = MADE_ADDED(256, "x", false, false) "," MADE_ADDED(256, "y", false, false)},
         DI_ERR_FORMAT,
         "token 1: id"},
        {{.added = "{\"id\":256,\"content\":\"x\",\"lstrip\":true}"}, DI_ERR_UNSUPPORTED, "'lstrip' is set"},
        {{.added = "{\"id\":256,\"content\":\"x\"}"}, DI_ERR_FORMAT, "'special' or 'normalized'"},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_strbuf text = {0};
        di_tokenizer *tok = NULL;
        di_error err = {0};
        made_json(&text, &cases[i].m);
        di_status status = di_tokenizer_parse(&tok, text.data, text.len, &err);
        if (status != cases[i].status || !strstr(err.message, cases[i].message)) {
            fail_msg("case %zu: status %d, '%s', expected %d with '%s'", i, status, err.message, cases[i].status,
                     cases[i].message);
        }
        assert_null(tok);
        di_strbuf_deinit(&text);
    }
}

static void every_truncation_is_an_error(void **state) {
    (void)state;
    di_strbuf text = {0};
    made_json(&text,
              &(made){.vocab = ",\"ab\":256", .merges = "\"a b\"", .added = MADE_ADDED(257, "<x>", true, false)});
    for (size_t len = 0; len < text.len; len++) {
        di_tokenizer *tok = NULL;
        di_error err = {0};
        char *part = malloc(len + 1); /* exact, so that a sanitizer sees a read behind the end */
        assert_non_null(part);
        memcpy(part, text.data, len);
        char *exact = realloc(part, len ? len : 1);
        assert_int_equal(di_tokenizer_parse(&tok, exact, len, &err), DI_ERR_FORMAT);
        assert_true(err.message[0] != '\0');
        free(exact);
    }
    di_strbuf_puts(&text, " x");
    di_tokenizer *tok = NULL;
    di_error err;
    assert_int_equal(di_tokenizer_parse(&tok, text.data, text.len, &err), DI_ERR_FORMAT);
    assert_contains(err.message, "expected the end of the file, found 'x'");
    di_strbuf_deinit(&text);
}

static void open_names_the_file(void **state) {
    (void)state;
    di_tokenizer *tok = NULL;
    di_error err;
    assert_int_equal(di_tokenizer_open(&tok, di_test_tmp("absent.json"), &err), DI_ERR_NOT_FOUND);
    assert_contains(err.message, "absent.json");
    const char *path = di_test_tmp("empty.json");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    assert_int_equal(di_tokenizer_open(&tok, path, &err), DI_ERR_FORMAT);
    assert_contains(err.message, "empty.json");
    assert_null(tok);
}

DI_TEST_GROUP(tokenizer, cmocka_unit_test(merges_by_rank_then_from_the_left),
              cmocka_unit_test(merges_may_be_pairs_and_come_first),
              cmocka_unit_test(repeated_merge_takes_its_last_rank),
              cmocka_unit_test(added_tokens_are_found_leftmost_longest),
              cmocka_unit_test(tokens_that_are_not_normalized_go_first),
              cmocka_unit_test(entries_are_found_by_spelling), cmocka_unit_test(byte_map_goes_both_ways),
              cmocka_unit_test(invalid_utf8_is_repaired_first), cmocka_unit_test(long_pieces_are_not_cut),
              cmocka_unit_test(encode_appends), cmocka_unit_test(refuses_with_a_message),
              cmocka_unit_test(every_truncation_is_an_error), cmocka_unit_test(open_names_the_file));
