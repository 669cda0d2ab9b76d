/* bench grammar: compiling JSON schemas, and masks at every position of texts that follow them, on one thread.
 *
 * Rows of --schemas are {"schema", "text"?, "valid"?}; those with one schema share a grammar, and a text that is said
 * to be invalid or that the grammar refuses counts up to there. A schema without a text gets a walk of tokens drawn by
 * its masks. Nothing is learnt before it is timed: every run compiles anew, so that first visits are in the mean as
 * they are in use. With --log-level debug the last run's times are in the log, one by one. The vocabulary is that of
 * --model's tokenizer, whose size is a row, since masks depend on it. Times are those of the thread on its processor,
 * so that what else a machine does isn't in them. */
#include <time.h>

#include "bench.h"
#include "engine/grammar/grammar.h"

enum { WALK_TOKENS = 200, SCHEMAS_BYTES_MAX = 256 << 20 };

/* A schema with the texts that its masks are timed along. */
typedef struct schema_case {
    di_strbuf schema;      /* owned */
    const di_json **texts; /* owned [n_texts], of the rows */
    size_t n_texts, texts_cap;
} schema_case;

/* A time, and what took it: schema, text and token by number. */
typedef struct sample {
    double ms;
    size_t schema, text, token;
} sample;

typedef struct times {
    sample *samples; /* owned [n] */
    size_t n, cap;
} times;

typedef struct grammar_bench {
    di_json **rows; /* owned [n_rows] */
    size_t n_rows, rows_cap;
    schema_case *cases; /* owned [n_cases] */
    size_t n_cases, cases_cap;
    di_tokenizer *tok;       /* owned */
    di_grammar_vocab *vocab; /* owned */
    int32_t eos;
    uint32_t *mask; /* owned [n_words] */
    size_t n_words;
    size_t n_refused;     /* schemas, in the last run */
    times compile, masks; /* of the run */
    sample at;            /* where the run is */
    double compile_median[DI_BENCH_RUNS], compile_p99[DI_BENCH_RUNS], mask_mean[DI_BENCH_RUNS], mask_p99[DI_BENCH_RUNS],
        mask_max[DI_BENCH_RUNS];
} grammar_bench;

/* A list with room for one item more, of `size` bytes; NULL without memory, and the list is as it was. */
static void *grow(void *items, size_t n, size_t *cap, size_t size) {
    if (n < *cap) {
        return items;
    }
    size_t new_cap = DI_MAX(2 * *cap, (size_t)64), bytes;
    void *grown = di_size_mul(&bytes, new_cap, size) ? realloc(items, bytes) : NULL;
    if (grown != NULL) {
        *cap = new_cap;
    }
    return grown;
}

static int64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static di_status fail_memory(di_error *err) {
    return di_fail(err, DI_ERR_MEMORY, "no memory for the schemas");
}

static di_status add_time(times *t, const sample *at, int64_t start_ns, di_error *err) {
    double ms = (double)(cpu_ns() - start_ns) * 1e-6;
    sample *grown = grow(t->samples, t->n, &t->cap, sizeof *t->samples);
    if (grown == NULL) {
        return fail_memory(err);
    }
    t->samples = grown;
    t->samples[t->n] = *at;
    t->samples[t->n++].ms = ms;
    return DI_OK;
}

static int compare_samples(const void *a, const void *b) {
    double x = ((const sample *)a)->ms, y = ((const sample *)b)->ms;
    return (x > y) - (x < y);
}

/* The value that a share of the sorted times lies below. */
static double quantile(const times *t, double share) {
    return t->n > 0 ? t->samples[(size_t)(share * (double)(t->n - 1))].ms : 0;
}

/* ---- schemas ---- */

static di_status add_row(grammar_bench *gb, di_json *row, di_error *err) {
    const di_json *schema = di_json_get(row, "schema"), *valid = di_json_get(row, "valid");
    di_json **rows = grow(gb->rows, gb->n_rows, &gb->rows_cap, sizeof(di_json *));
    if (rows == NULL) {
        di_json_free(row);
        return fail_memory(err);
    }
    gb->rows = rows;
    gb->rows[gb->n_rows++] = row;
    if (schema == NULL) { /* what describes the file */
        return DI_OK;
    }
    di_strbuf text = {0};
    di_json_write(&text, schema, DI_JSON_COMPACT);
    di_status st = di_strbuf_status(&text, err);
    size_t k = 0;
    while (!st && k < gb->n_cases &&
           (gb->cases[k].schema.len != text.len || memcmp(gb->cases[k].schema.data, text.data, text.len) != 0)) {
        k++;
    }
    if (!st && k == gb->n_cases) {
        schema_case *cases = grow(gb->cases, gb->n_cases, &gb->cases_cap, sizeof *cases);
        if (cases == NULL) {
            st = fail_memory(err);
        } else {
            gb->cases = cases;
            gb->cases[gb->n_cases++] = (schema_case){.schema = text};
            text = (di_strbuf){0};
        }
    }
    di_strbuf_deinit(&text);
    if (st || gb->cases == NULL || di_json_str(di_json_get(row, "text"), NULL) == NULL ||
        (di_json_is(valid, DI_JSON_BOOL) && !di_json_bool(valid))) {
        return st;
    }
    schema_case *c = &gb->cases[k];
    const di_json **texts = grow(c->texts, c->n_texts, &c->texts_cap, sizeof *texts);
    if (texts == NULL) {
        return fail_memory(err);
    }
    c->texts = texts;
    c->texts[c->n_texts++] = di_json_get(row, "text");
    return DI_OK;
}

static di_status read_schemas(grammar_bench *gb, const char *path, di_error *err) {
    di_strbuf file = {0};
    di_status st = di_file_read(path, SCHEMAS_BYTES_MAX, &file, err);
    const char *at = di_strbuf_str(&file), *end = at + file.len;
    for (int n_lines = 1; !st && at < end; n_lines++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t len = (size_t)((stop ? stop : end) - at);
        di_json *row = NULL;
        if (len > 0) {
            st = di_error_context(err, di_json_parse(&row, at, len, err), "'%s' line %d", path, n_lines);
            st = st ? st : add_row(gb, row, err);
        }
        at += len + 1;
    }
    di_strbuf_deinit(&file);
    if (!st && gb->n_cases == 0) {
        st = di_fail(err, DI_ERR_FORMAT, "'%s': no line with a schema", path);
    }
    return st;
}

/* ---- positions ---- */

static di_status time_mask(grammar_bench *gb, di_matcher *m, di_error *err) {
    int64_t start_ns = cpu_ns();
    di_status st = di_matcher_mask(m, gb->mask, NULL, err);
    return st ? st : add_time(&gb->masks, &gb->at, start_ns, err);
}

/* Along the tokens of a text, up to the first that the grammar refuses. */
static di_status follow_text(grammar_bench *gb, di_matcher *m, const di_json *text, di_ids *ids, di_error *err) {
    size_t len;
    const char *s = di_json_str(text, &len);
    ids->len = 0;
    di_status st = di_tokenizer_encode(gb->tok, s, len, true, ids, err);
    st = st ? st : di_ids_append(ids, &gb->eos, 1, err);
    bool is_allowed = true;
    for (size_t i = 0; i < ids->len && !st && is_allowed; i++) {
        gb->at.token = i;
        st = time_mask(gb, m, err);
        st = st ? st : di_matcher_accept(m, ids->data[i], &is_allowed, err);
    }
    return st;
}

/* Along tokens drawn by the masks. */
static di_status follow_masks(grammar_bench *gb, di_matcher *m, di_error *err) {
    uint64_t rng = 1;
    di_status st = DI_OK;
    for (size_t i = 0; i < WALK_TOKENS && !st; i++) {
        int64_t n = 0, pick;
        bool is_allowed;
        gb->at.token = i;
        st = time_mask(gb, m, err);
        for (size_t w = 0; w < gb->n_words; w++) {
            n += __builtin_popcount(gb->mask[w]);
        }
        if (st || n == 0) {
            break;
        }
        rng = di_mix64(rng + 0x9E3779B97F4A7C15u);
        pick = (int64_t)(rng % (uint64_t)n);
        int32_t token = -1;
        for (size_t w = 0; w < gb->n_words && token < 0; w++) {
            uint32_t word = gb->mask[w];
            for (; word != 0 && pick > 0; word &= word - 1) {
                pick--;
            }
            token = word != 0 ? (int32_t)(32 * w) + __builtin_ctz(word) : -1;
        }
        st = di_matcher_accept(m, token, &is_allowed, err);
        if (token == gb->eos) {
            break;
        }
    }
    return st;
}

static di_status run_case(grammar_bench *gb, const schema_case *c, di_ids *ids, di_error *err) {
    di_grammar_spec spec = {.kind = DI_GRAMMAR_SCHEMA, .text = c->schema.data, .len = c->schema.len};
    di_grammar *g = NULL;
    int64_t start_ns = cpu_ns();
    di_status st = di_grammar_compile(&g, &spec, NULL, err);
    if (st == DI_ERR_REQUEST || st == DI_ERR_RANGE || st == DI_ERR_UNSUPPORTED) {
        gb->n_refused++;
        return DI_OK;
    }
    st = st ? st : add_time(&gb->compile, &gb->at, start_ns, err);
    for (size_t i = 0; i < DI_MAX(c->n_texts, (size_t)1) && !st; i++) {
        di_matcher *m = NULL;
        gb->at.text = i;
        st = di_matcher_create(&m, g, gb->vocab, err);
        if (!st) {
            st = c->n_texts ? follow_text(gb, m, c->texts[i], ids, err) : follow_masks(gb, m, err);
        }
        di_matcher_destroy(m);
    }
    di_grammar_release(g);
    return st;
}

/* ---- the bench ---- */

static void log_samples(const grammar_bench *gb) {
    for (size_t i = 0; i < gb->compile.n; i++) {
        di_debug("compile %zu: %.6f ms", gb->compile.samples[i].schema, gb->compile.samples[i].ms);
    }
    for (size_t i = 0; i < gb->masks.n; i++) {
        const sample *x = &gb->masks.samples[i];
        di_debug("mask %zu %zu %zu: %.6f ms", x->schema, x->text, x->token, x->ms);
    }
}

static di_status run_all(grammar_bench *gb, int run, di_error *err) {
    di_ids ids = {0};
    di_status st = DI_OK;
    gb->compile.n = gb->masks.n = gb->n_refused = 0;
    for (size_t i = 0; i < gb->n_cases && !st; i++) {
        gb->at = (sample){.schema = i};
        st = di_error_context(err, run_case(gb, &gb->cases[i], &ids, err), "schema %zu", i + 1);
    }
    di_ids_deinit(&ids);
    if (st || run < 0) {
        return st;
    }
    if (run == DI_BENCH_RUNS - 1) {
        log_samples(gb);
    }
    double sum = 0;
    for (size_t i = 0; i < gb->masks.n; i++) {
        sum += gb->masks.samples[i].ms;
    }
    qsort(gb->compile.samples, gb->compile.n, sizeof(sample), compare_samples);
    qsort(gb->masks.samples, gb->masks.n, sizeof(sample), compare_samples);
    gb->compile_median[run] = quantile(&gb->compile, 0.5);
    gb->compile_p99[run] = quantile(&gb->compile, 0.99);
    gb->mask_mean[run] = gb->masks.n ? 1e3 * sum / (double)gb->masks.n : 0;
    gb->mask_p99[run] = 1e3 * quantile(&gb->masks, 0.99);
    gb->mask_max[run] = 1e3 * quantile(&gb->masks, 1);
    return DI_OK;
}

static di_status prepare(grammar_bench *gb, const di_options *opt, di_error *err) {
    di_strbuf path = {0};
    di_path_join(&path, opt->model, "tokenizer.json");
    di_status st = di_strbuf_status(&path, err);
    st = st ? st : di_tokenizer_open(&gb->tok, di_strbuf_str(&path), err);
    di_strbuf_deinit(&path);
    if (st) {
        return st;
    }
    int32_t n_vocab = di_tokenizer_size(gb->tok);
    gb->eos = di_tokenizer_find(gb->tok, "<｜end▁of▁sentence｜>");
    gb->n_words = ((size_t)n_vocab + 31) / 32;
    if (gb->eos < 0) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "the tokenizer has no token '<｜end▁of▁sentence｜>'");
    }
    gb->mask = calloc(gb->n_words, sizeof *gb->mask);
    if (gb->mask == NULL) {
        return fail_memory(err);
    }
    st = di_grammar_vocab_create(&gb->vocab, gb->tok, n_vocab, gb->eos, err);
    return st ? st : read_schemas(gb, opt->schemas ? opt->schemas : DI_CLI_MODEL_DIR "/../../bench/schemas.jsonl", err);
}

static void bench_deinit(grammar_bench *gb) {
    for (size_t i = 0; i < gb->n_cases; i++) {
        di_strbuf_deinit(&gb->cases[i].schema);
        free(gb->cases[i].texts);
    }
    for (size_t i = 0; i < gb->n_rows; i++) {
        di_json_free(gb->rows[i]);
    }
    free(gb->cases);
    free(gb->rows);
    free(gb->compile.samples);
    free(gb->masks.samples);
    free(gb->mask);
    di_grammar_vocab_destroy(gb->vocab);
    di_tokenizer_close(gb->tok);
}

di_status di_bench_grammar(di_bench *b, di_error *err) {
    grammar_bench gb = {0};
    const struct {
        const char *name, *unit;
        double *runs;
    } rows[] = {{"compile_median", "ms", gb.compile_median},
                {"compile_p99", "ms", gb.compile_p99},
                {"mask_mean", "us", gb.mask_mean},
                {"mask_p99", "us", gb.mask_p99},
                {"mask_max", "us", gb.mask_max}};
    bool wants[DI_COUNT(rows)], wants_any = false, wants_sizes = di_bench_wants(b, "sizes");
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        wants[i] = di_bench_wants(b, rows[i].name);
        wants_any = wants_any || wants[i];
    }
    di_status st = di_bench_grammar_engine(b, err);
    if (st || (!wants_any && !wants_sizes)) {
        return st;
    }
    st = prepare(&gb, b->opt, err);
    for (int run = -1; run < DI_BENCH_RUNS && !st; run++) { /* the first warms the machine */
        st = run_all(&gb, run, err);
    }
    for (size_t i = 0; i < DI_COUNT(rows) && !st; i++) {
        if (wants[i]) {
            st = di_bench_row(b, rows[i].name, rows[i].runs, DI_BENCH_RUNS, rows[i].unit, 0, NULL, err);
        }
    }
    if (!st && wants_sizes) {
        double sizes[] = {(double)di_tokenizer_size(gb.tok), (double)gb.n_cases, (double)gb.n_refused,
                          (double)gb.masks.n};
        static const char *const names[] = {"sizes_vocabulary", "sizes_schemas", "sizes_refused", "sizes_positions"};
        static const char *const units[] = {"tokens", "schemas", "schemas", "masks"};
        for (size_t i = 0; i < DI_COUNT(names) && !st; i++) {
            st = di_bench_row(b, names[i], &sizes[i], 1, units[i], 0, NULL, err);
        }
    }
    bench_deinit(&gb);
    return st;
}
