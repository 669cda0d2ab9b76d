/* bench tokenizer: encoding of prose and code, decoding, on one thread with the tokenizer of --model.
 *
 * The text is about 1 MiB of varied sentences and of varied C, made from templates with other words and numbers each
 * time, so that no piece cache could answer. There is no limit of the machine to name: memory is far away. */
#include "bench.h"

enum { TEXT_BYTES = 1 << 20 };

static const char *const nouns[] = {"harbour",  "window",  "teacher", "engine",  "river",   "garden",  "letter",
                                    "mountain", "kitchen", "signal",  "candle",  "market",  "feather", "bridge",
                                    "station",  "blanket", "compass", "orchard", "thunder", "village"};
static const char *const verbs[] = {"watched",  "carried", "remembered", "painted",  "followed",
                                    "borrowed", "opened",  "measured",   "repaired", "described"};
static const char *const adjectives[] = {"quiet",   "narrow",  "golden",  "forgotten", "heavy",
                                         "curious", "distant", "careful", "broken",    "early"};

static const char *pick(const char *const *words, size_t n, uint64_t *rng) {
    *rng = di_mix64(*rng + 0x9E3779B97F4A7C15u);
    return words[*rng % n];
}

static void prose(di_strbuf *out) {
    uint64_t rng = 1;
    while (out->len < TEXT_BYTES) {
        di_strbuf_printf(out, "The %s %s %s the %s near the %s %s. ", pick(adjectives, DI_COUNT(adjectives), &rng),
                         pick(nouns, DI_COUNT(nouns), &rng), pick(verbs, DI_COUNT(verbs), &rng),
                         pick(nouns, DI_COUNT(nouns), &rng), pick(adjectives, DI_COUNT(adjectives), &rng),
                         pick(nouns, DI_COUNT(nouns), &rng));
        di_strbuf_printf(out, "\"I haven't %s it since %d,\" she said; nobody answered.%s",
                         pick(verbs, DI_COUNT(verbs), &rng), (int)(1900 + rng % 120), rng % 7 ? " " : "\n\n");
    }
}

static void code(di_strbuf *out) {
    uint64_t rng = 2;
    while (out->len < TEXT_BYTES) {
        const char *a = pick(nouns, DI_COUNT(nouns), &rng), *b = pick(nouns, DI_COUNT(nouns), &rng),
                   *v = pick(verbs, DI_COUNT(verbs), &rng);
        di_strbuf_printf(
            out,
            "static int %s_%s(struct %s *self, const char *%s, size_t n) {\n    for (size_t i = 0; i < n; i++) {\n", a,
            v, b, a);
        di_strbuf_printf(out,
                         "        if (self->%s[i] != 0x%04x && %s[i] >= %d)\n            return -%d; /* %s */\n    }\n "
                         "   return 0;\n}\n\n",
                         b, (unsigned)(rng & 0xFFFF), a, (int)(rng % 1000), (int)(rng % 9),
                         pick(adjectives, DI_COUNT(adjectives), &rng));
    }
}

static di_status encode_row(di_bench *b, const di_tokenizer *tok, const char *name, void (*make)(di_strbuf *),
                            di_ids *ids, di_error *err) {
    di_strbuf text = {0};
    double runs[DI_BENCH_RUNS];
    make(&text);
    di_status st = di_strbuf_status(&text, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        ids->len = 0;
        int64_t start_ns = di_clock_ns();
        st = di_tokenizer_encode(tok, text.data, text.len, false, ids, err);
        if (i >= 0)
            runs[i] = (double)text.len / 1e6 / ((double)(di_clock_ns() - start_ns) * 1e-9);
    }
    if (!st)
        st = di_bench_row(b, name, runs, DI_BENCH_RUNS, "MB/s", 0, NULL, err);
    di_strbuf_deinit(&text);
    return st;
}

/* Decodes the ids of the prose. */
static di_status decode_row(di_bench *b, const di_tokenizer *tok, const char *name, di_ids *ids, di_error *err) {
    di_strbuf text = {0};
    double runs[DI_BENCH_RUNS];
    prose(&text);
    ids->len = 0;
    di_status st = di_strbuf_status(&text, err);
    if (!st)
        st = di_tokenizer_encode(tok, text.data, text.len, false, ids, err);
    for (int i = -1; i < DI_BENCH_RUNS && !st; i++) {
        di_strbuf_reset(&text);
        int64_t start_ns = di_clock_ns();
        st = di_tokenizer_decode(tok, ids->data, ids->len, false, &text, err);
        if (i >= 0)
            runs[i] = (double)ids->len / ((double)(di_clock_ns() - start_ns) * 1e-9);
    }
    if (!st)
        st = di_bench_row(b, name, runs, DI_BENCH_RUNS, "tokens/s", 0, NULL, err);
    di_strbuf_deinit(&text);
    return st;
}

di_status di_bench_tokenizer(di_bench *b, di_error *err) {
    di_tokenizer *tok = NULL;
    di_strbuf path = {0};
    di_ids ids = {0};
    di_path_join(&path, b->opt->model, "tokenizer.json");
    di_status st = di_strbuf_status(&path, err);
    if (!st)
        st = di_tokenizer_open(&tok, path.data, err);
    if (!st && di_bench_wants(b, "encode_code"))
        st = encode_row(b, tok, "encode_code", code, &ids, err);
    if (!st && di_bench_wants(b, "encode_prose"))
        st = encode_row(b, tok, "encode_prose", prose, &ids, err);
    if (!st && di_bench_wants(b, "decode"))
        st = decode_row(b, tok, "decode", &ids, err);
    di_tokenizer_close(tok);
    di_ids_deinit(&ids);
    di_strbuf_deinit(&path);
    return st;
}
