/* Fuzz target: tokenizer.json from anyone, and text from anyone.
 *
 * The input up to its first NUL is read as a tokenizer.json; when it is one, the rest is encoded and decoded with it.
 * The whole input is also a text for a tokenizer that is always there. Beyond not crashing, text must come back as its
 * repair and a stream of ids must give the one-shot text. */
#include "text/tokenizer_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool is_true) {
    if (!is_true) {
        abort();
    }
}

/* A byte vocabulary with a few merges and added tokens, split as the released one. */
static di_tokenizer *make_tokenizer(void) {
    static const char *const merges[] = {"a a", "aa aa", "h e", "Ġ t", "Ġ Ġ", "Ã ©", "t h", "th e", "Ġt he"};
    di_strbuf json = {0}, spelling = {0};
    di_tokenizer *tok = NULL;
    di_strbuf_puts(&json, "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    di_strbuf_puts(
        &json, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{N}{1,3}\"},\"behavior\":\"Isolated\"},"
               "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[一-龥\\u3040-ゟ゠-ヿ]+\"},\"behavior\":\"Isolated\"},"
               "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+|"
               " ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\"},"
               "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
               "\"added_tokens\":["
               "{\"id\":266,\"content\":\"<｜x｜>\",\"normalized\":false,\"special\":true},"
               "{\"id\":265,\"content\":\"<x\",\"normalized\":true,\"special\":false}],"
               "\"model\":{\"type\":\"BPE\",\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        di_strbuf_reset(&spelling);
        di_byte_spelling(&spelling, &byte, 1);
        di_json_write_string(&json, spelling.data, spelling.len);
        di_strbuf_printf(&json, ":%d,", b);
    }
    for (int i = 0; i < (int)DI_COUNT(merges); i++) {
        const char *space = strchr(merges[i], ' ');
        di_strbuf_printf(&json, "%s\"%.*s%s\":%d", i ? "," : "", (int)(space - merges[i]), merges[i], space + 1,
                         256 + i);
    }
    di_strbuf_puts(&json, "},\"merges\":[");
    for (int i = 0; i < (int)DI_COUNT(merges); i++) {
        di_strbuf_printf(&json, "%s\"%s\"", i ? "," : "", merges[i]);
    }
    di_strbuf_puts(&json, "]}}");
    di_error err;
    if (di_tokenizer_parse(&tok, json.data, json.len, &err)) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    di_strbuf_deinit(&json);
    di_strbuf_deinit(&spelling);
    return tok;
}

static void try_text(const di_tokenizer *tok, const char *text, size_t len, bool is_plain) {
    di_ids ids = {0};
    di_strbuf decoded = {0}, streamed = {0}, repaired = {0};
    di_detokenizer stream;
    if (di_tokenizer_encode(tok, text, len, is_plain, &ids, NULL) == DI_OK) {
        demand(di_tokenizer_decode(tok, ids.data, ids.len, false, &decoded, NULL) == DI_OK);
        di_detokenizer_init(&stream, tok);
        for (size_t i = 0; i < ids.len; i++) {
            demand(ids.data[i] >= 0 && ids.data[i] < di_tokenizer_size(tok));
            di_detokenizer_push(&stream, ids.data[i], &streamed);
            demand(stream.n_pending <= 3);
        }
        di_detokenizer_flush(&stream, &streamed);
        di_utf8_repair(&repaired, text, len);
        demand(streamed.len == decoded.len &&
               memcmp(di_strbuf_str(&streamed), di_strbuf_str(&decoded), decoded.len) == 0);
        /* An added token may stand for other bytes than it is spelled with, so only the plain mode must give all back.
         */
        demand(!is_plain || (decoded.len == repaired.len &&
                             memcmp(di_strbuf_str(&decoded), di_strbuf_str(&repaired), repaired.len) == 0));
    }
    di_ids_deinit(&ids);
    di_strbuf_deinit(&decoded);
    di_strbuf_deinit(&streamed);
    di_strbuf_deinit(&repaired);
}

static di_tokenizer *fixed;

__attribute__((destructor)) static void close_fixed(void) {
    di_tokenizer_close(fixed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *text = (const char *)data;
    size_t json_len = size ? strnlen(text, size) : 0;
    di_tokenizer *tok = NULL;
    di_error err = {0};
    if (!fixed) {
        fixed = make_tokenizer();
    }
    try_text(fixed, text, size, false);
    try_text(fixed, text, size, true);
    if (di_tokenizer_parse(&tok, text, json_len, &err) == DI_OK) {
        static const char sample[] = "The year 1999:  don't <think>\n\n 日本語 e\u0301 \xFF x_y  ";
        int32_t n_classes = 0;
        int32_t *map = malloc((size_t)di_tokenizer_size(tok) * sizeof *map);
        demand(map && di_tokenizer_engram_map(tok, map, &n_classes, NULL) == DI_OK);
        demand(n_classes > 0 && n_classes <= di_tokenizer_size(tok));
        free(map);
        try_text(tok, sample, sizeof sample - 1, false);
        try_text(tok, sample, sizeof sample - 1, true);
        if (json_len < size) {
            try_text(tok, text + json_len + 1, size - json_len - 1, false);
        }
        di_tokenizer_close(tok);
    } else {
        demand(err.message[0] != '\0' && tok == NULL);
    }
    return 0;
}
