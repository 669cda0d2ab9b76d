/* Small tokenizers made for tests: 256 byte entries (id = byte) and what a test adds, as the text of a tokenizer.json.
 */
#ifndef DI_TEST_MADE_TOKENIZER_H
#define DI_TEST_MADE_TOKENIZER_H

#include "harness.h"
#include "text/tokenizer_internal.h"

/* The released splits. */
#define MADE_SPLIT(regex)                                                                                              \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"Isolated\",\"invert\":false},"
#define MADE_BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}"
#define MADE_SEQUENCE(steps) "{\"type\":\"Sequence\",\"pretokenizers\":[" steps "]}"
#define MADE_RELEASED_SPLITS                                                                                           \
    MADE_SPLIT("\\\\p{N}{1,3}")                                                                                        \
    MADE_SPLIT("[一-龥\\u3040-ゟ゠-ヿ]+")                                                                              \
    MADE_SPLIT("[!\\\"#$%&'()*+,\\\\-./:;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|"                                    \
               "[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+| ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|"                 \
               "\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+")

typedef struct made {
    const char *vocab;         /* more entries, with a comma before: ",\"ab\":256" */
    const char *merges;        /* the list without its brackets */
    const char *added;         /* the list without its brackets */
    const char *pre_tokenizer; /* NULL: the released one */
    const char *model;         /* more keys of the model, with a comma before */
    const char *top;           /* more keys at the top, with a comma before */
    int without_byte;          /* 1 .. 255: leaves this byte out (later ids move down) */
    bool merges_first;         /* merges before vocab in the text */
} made;

#define MADE_ADDED(id, content, special, normalized)                                                                   \
    "{\"id\":" #id ",\"content\":\"" content "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"             \
    "\"normalized\":" #normalized ",\"special\":" #special "}"

static inline const char *made_or(const char *s, const char *otherwise) {
    return s ? s : otherwise;
}

static inline void made_json(di_strbuf *out, const made *m) {
    di_strbuf vocab = {0}, spelling = {0};
    int id = 0;
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        if (b == 0 || b != m->without_byte) {
            di_strbuf_reset(&spelling);
            di_byte_spelling(&spelling, &byte, 1);
            di_strbuf_puts(&vocab, b ? "," : "");
            di_json_write_string(&vocab, spelling.data, spelling.len);
            di_strbuf_printf(&vocab, ":%d", id++);
        }
    }
    di_strbuf_printf(out,
                     "{\"version\":\"1.0\",\"added_tokens\":[%s],\"normalizer\":null,\"pre_tokenizer\":%s%s,"
                     "\"model\":{\"type\":\"BPE\"%s",
                     made_or(m->added, ""),
                     made_or(m->pre_tokenizer, MADE_SEQUENCE(MADE_RELEASED_SPLITS MADE_BYTE_LEVEL)),
                     made_or(m->top, ""), made_or(m->model, ""));
    for (int k = 0; k < 2; k++) {
        if ((k == 0) == m->merges_first) {
            di_strbuf_printf(out, ",\"merges\":[%s]", made_or(m->merges, ""));
        } else {
            di_strbuf_printf(out, ",\"vocab\":{%s%s}", vocab.data, made_or(m->vocab, ""));
        }
    }
    di_strbuf_puts(out, "}}");
    di_strbuf_deinit(&vocab);
    di_strbuf_deinit(&spelling);
}

static inline di_tokenizer *made_open(const made *m) {
    di_strbuf text = {0};
    di_tokenizer *tok = NULL;
    di_error err;
    made_json(&text, m);
    di_test_ok(di_tokenizer_parse(&tok, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    return tok;
}

/* The ids of a text as "1 2 3", in storage that the next call reuses. */
static inline const char *made_ids(const di_tokenizer *tok, const char *text, size_t len, bool plain) {
    static char shown[4096];
    di_ids ids = {0};
    di_error err;
    int n = 0;
    di_test_ok(di_tokenizer_encode(tok, text, len, plain, &ids, &err), &err);
    shown[0] = '\0';
    for (size_t i = 0; i < ids.len && n < (int)sizeof shown - 16; i++) {
        n += snprintf(shown + n, sizeof shown - (size_t)n, "%s%d", i ? " " : "", ids.data[i]);
    }
    di_ids_deinit(&ids);
    return shown;
}
#define MADE_IDS(tok, text) made_ids(tok, text, sizeof(text) - 1, false)

#endif
