/* Tokenizer against golden vectors: encoding, streaming decode and the Engram classes of the released tokenizer, made
 * by Hugging Face tokenizers 0.23.3 (the files' first lines say how); and the tiny model's own prompts and class table,
 * which its training wrote. Everything is exact. */
#include "vectors.h"

#include "harness.h"

static void expect_ids(const di_json *row, const char *what, const di_ids *got, const di_json *want) {
    const char *id = di_json_str(di_json_get(row, "id"), NULL);
    if (got->len != di_json_array_len(want)) {
        fail_msg("%s, %s: %zu ids, expected %zu", id, what, got->len, di_json_array_len(want));
    }
    for (size_t i = 0; i < got->len; i++) {
        if (got->data[i] != di_json_int(di_json_at(want, i))) {
            fail_msg("%s, %s: ids[%zu] is %d, expected %lld", id, what, i, got->data[i],
                     (long long)di_json_int(di_json_at(want, i)));
        }
    }
}

static void expect_text(const di_json *row, const char *what, const di_strbuf *got, const di_json *want) {
    size_t len = 0;
    const char *s = di_json_str(want, &len);
    if (!s || got->len != len || memcmp(di_strbuf_str(got), s, len) != 0) {
        fail_msg("%s, %s: '%s', expected '%s'", di_json_str(di_json_get(row, "id"), NULL), what, di_strbuf_str(got),
                 s ? s : "(none)");
    }
}

static void check_encode(const di_json *row, void *ctx) {
    const di_tokenizer *tok = ctx;
    const di_json *ids = di_json_get(row, "ids"), *plain = di_json_get(row, "ids_plain");
    const char *bytes = di_json_str(di_json_get(row, "bytes_b64"), NULL);
    size_t len = 0;
    const char *text = di_json_str(di_json_get(row, "text"), &len);
    di_ids got = {0};
    di_error err;
    assert_non_null(text);
    di_test_ok(di_tokenizer_encode(tok, text, len, false, &got, &err), &err);
    expect_ids(row, "full", &got, ids);
    got.len = 0;
    di_test_ok(di_tokenizer_encode(tok, text, len, true, &got, &err), &err);
    expect_ids(row, "plain", &got, plain ? plain : ids);
    if (bytes) {
        di_strbuf raw = {0};
        vectors_base64(&raw, bytes);
        got.len = 0;
        di_test_ok(di_tokenizer_encode(tok, raw.data, raw.len, false, &got, &err), &err);
        expect_ids(row, "invalid bytes", &got, ids);
        di_strbuf_deinit(&raw);
    }
    di_ids_deinit(&got);
}

static void encodes_every_vector(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_official_tokenizer();
    if (!tok) {
        di_test_skip(VECTORS_NO_OFFICIAL);
    }
    assert_int_equal(vectors_each("tokenize.jsonl", check_encode, (void *)tok), 653);
}

static void check_stream(const di_json *row, void *ctx) {
    const di_tokenizer *tok = ctx;
    const di_json *ids = di_json_get(row, "ids"), *deltas = di_json_get(row, "deltas");
    const di_json *skipped = di_json_get(row, "text_skip_special");
    size_t n = di_json_array_len(ids);
    di_detokenizer stream;
    di_strbuf delta = {0}, all = {0};
    di_ids list = {0};
    di_error err;
    di_detokenizer_init(&stream, tok);
    assert_int_equal(n, di_json_array_len(deltas));
    for (size_t i = 0; i < n; i++) {
        int32_t id = (int32_t)di_json_int(di_json_at(ids, i));
        di_test_ok(di_ids_append(&list, &id, 1, &err), &err);
        di_strbuf_reset(&delta);
        di_detokenizer_push(&stream, id, &delta);
        assert_true(stream.n_pending <= 3);
        expect_text(row, "delta", &delta, di_json_at(deltas, i));
    }
    di_strbuf_reset(&delta);
    di_detokenizer_flush(&stream, &delta);
    expect_text(row, "flush", &delta, di_json_get(row, "flush"));
    di_test_ok(di_tokenizer_decode(tok, list.data, list.len, false, &all, &err), &err);
    expect_text(row, "text", &all, di_json_get(row, "text"));
    di_strbuf_reset(&all);
    di_test_ok(di_tokenizer_decode(tok, list.data, list.len, true, &all, &err), &err);
    expect_text(row, "text without specials", &all, skipped ? skipped : di_json_get(row, "text"));
    di_strbuf_deinit(&delta);
    di_strbuf_deinit(&all);
    di_ids_deinit(&list);
}

static void streams_every_vector(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_official_tokenizer();
    if (!tok) {
        di_test_skip(VECTORS_NO_OFFICIAL);
    }
    assert_int_equal(vectors_each("detokenize_stream.jsonl", check_stream, (void *)tok), 122);
}

typedef struct engram_case {
    const di_tokenizer *tok;
    const int32_t *map;
} engram_case;

static void check_class(const di_json *row, void *ctx) {
    const engram_case *c = ctx;
    int32_t id = (int32_t)di_json_int(di_json_get(row, "id"));
    di_strbuf text = {0};
    di_error err;
    if (c->map[id] != di_json_int(di_json_get(row, "compressed"))) {
        fail_msg("id %d: class %d, expected %lld", id, c->map[id],
                 (long long)di_json_int(di_json_get(row, "compressed")));
    }
    assert_int_equal(di_tokenizer_find(c->tok, di_json_str(di_json_get(row, "token"), NULL)), id);
    di_test_ok(di_tokenizer_decode(c->tok, &id, 1, false, &text, &err), &err);
    assert_string_equal(di_strbuf_str(&text), di_json_str(di_json_get(row, "text"), NULL));
    di_strbuf_deinit(&text);
}

static void engram_classes_are_the_released_ones(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_official_tokenizer();
    if (!tok) {
        di_test_skip(VECTORS_NO_OFFICIAL);
    }
    int32_t n = di_tokenizer_size(tok), n_classes = 0;
    char sha256[65];
    di_error err;
    assert_int_equal(n, 129280);
    int32_t *map = malloc((size_t)n * sizeof *map);
    assert_non_null(map);
    di_test_ok(di_tokenizer_engram_map(tok, map, &n_classes, &err), &err);
    assert_int_equal(n_classes, 99092);
    assert_int_equal(map[2], 2);
    assert_int_equal(map[di_tokenizer_find(tok, "<｜System｜>")], 98611);
    assert_int_equal(map[di_tokenizer_find(tok, "<｜User｜>")], 98615);
    assert_int_equal(map[129279], 99091);
    engram_case c = {.tok = tok, .map = map};
    assert_int_equal(vectors_each("engram_compress.jsonl", check_class, &c), 613);
    uint8_t *table = malloc((size_t)n * 4); /* little-endian on any machine */
    assert_non_null(table);
    for (int32_t i = 0; i < n; i++) {
        for (int b = 0; b < 4; b++) {
            table[4 * i + b] = (uint8_t)((uint32_t)map[i] >> 8 * b);
        }
    }
    vectors_sha256(table, (size_t)n * 4, sha256);
    assert_string_equal(sha256, "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481");
    free(table);
    free(map);
}

static void special_flags_are_the_released_ones(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_official_tokenizer();
    if (!tok) {
        di_test_skip(VECTORS_NO_OFFICIAL);
    }
    for (int32_t id = 0; id < di_tokenizer_size(tok); id++) {
        bool is_special = id <= 2 || (id >= 128000 && id <= 128798) || id == 128846 || (id >= 128847 && id <= 129261) ||
                          id == 129262 || id == 129263 || (id >= 129271 && id <= 129279);
        if (di_tokenizer_is_special(tok, id) != is_special) {
            fail_msg("id %d: special is %d, expected %d", id, !is_special, is_special);
        }
    }
}

static di_json *read_json(const char *path) {
    di_strbuf text = {0};
    di_json *v = NULL;
    di_error err;
    di_test_ok(di_file_read(path, 1 << 24, &text, &err), &err);
    di_test_ok(di_json_parse(&v, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    return v;
}

static void tiny_engram_classes_are_the_model_s(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_tiny_tokenizer();
    di_json *want = read_json(di_test_source("models/tiny/engram_token_map.json"));
    int32_t n = di_tokenizer_size(tok), n_classes = 0;
    int64_t largest = -1;
    di_error err;
    int32_t *map = malloc((size_t)n * sizeof *map);
    assert_non_null(map);
    di_test_ok(di_tokenizer_engram_map(tok, map, &n_classes, &err), &err);
    assert_int_equal(di_json_array_len(want), n);
    for (int32_t i = 0; i < n; i++) {
        if (map[i] != di_json_int(di_json_at(want, (size_t)i))) {
            fail_msg("id %d: class %d, expected %lld", i, map[i], (long long)di_json_int(di_json_at(want, (size_t)i)));
        }
        largest = DI_MAX(largest, di_json_int(di_json_at(want, (size_t)i)));
    }
    assert_int_equal(n_classes, largest + 1);
    free(map);
    di_json_free(want);
}

static void tiny_prompts_go_both_ways(void **state) {
    (void)state;
    const di_tokenizer *tok = vectors_tiny_tokenizer();
    FILE *file = fopen(di_test_source("models/tiny/eval/prompts.jsonl"), "r");
    assert_non_null(file);
    char *line = NULL;
    size_t cap = 0;
    int n_rows = 0;
    for (ssize_t n; (n = getline(&line, &cap, file)) > 0; n_rows++) {
        di_json *row = NULL;
        di_ids ids = {0};
        di_strbuf text = {0};
        di_error err;
        size_t len = 0;
        di_test_ok(di_json_parse(&row, line, (size_t)n, &err), &err);
        const char *prompt = di_json_str(di_json_get(row, "prompt"), &len);
        assert_non_null(prompt);
        di_test_ok(di_tokenizer_encode(tok, prompt, len, false, &ids, &err), &err);
        expect_ids(row, "prompt", &ids, di_json_get(row, "prompt_token_ids"));
        di_test_ok(di_tokenizer_decode(tok, ids.data, ids.len, false, &text, &err), &err);
        expect_text(row, "decoded prompt", &text, di_json_get(row, "prompt"));
        di_strbuf_deinit(&text);
        di_ids_deinit(&ids);
        di_json_free(row);
    }
    assert_int_equal(n_rows, 64);
    free(line);
    fclose(file);
}

static void sha256_is_the_standard_s(void **state) {
    (void)state;
    char out[65];
    vectors_sha256("abc", 3, out); /* FIPS 180-4, example B.1 */
    assert_string_equal(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

DI_TEST_GROUP(tokenizer_vectors, cmocka_unit_test(sha256_is_the_standard_s), cmocka_unit_test(encodes_every_vector),
              cmocka_unit_test(streams_every_vector), cmocka_unit_test(engram_classes_are_the_released_ones),
              cmocka_unit_test(special_flags_are_the_released_ones),
              cmocka_unit_test(tiny_engram_classes_are_the_model_s), cmocka_unit_test(tiny_prompts_go_both_ways));
