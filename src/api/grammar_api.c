/* The public grammar API: a function for each kind of grammar.
 *
 * The other functions of include/deepinfer/grammar.h take and give plain values: they are those of src/engine/grammar
 * themselves. */
#include "deepinfer/deepinfer.h"
#include "engine/grammar/grammar.h"

static di_status create(di_grammar **out, di_grammar_kind kind, const char *text, size_t len,
                        const di_grammar_options *options, di_error *err) {
    const di_grammar_options given = options ? *options : (di_grammar_options){0};
    if (given.memory_bytes < 0 || given.timeout_ms < 0 || given.timeout_ms > INT64_MAX / 1000000) {
        return di_fail(err, DI_ERR_ARG, "a grammar with %lld bytes and %lld ms, expected limits from 0 on",
                       (long long)given.memory_bytes, (long long)given.timeout_ms);
    }
    di_grammar_spec spec = {.kind = kind, .text = text, .len = len, .is_lax = given.is_lax};
    di_grammar_limits limits = {.memory_bytes = (size_t)given.memory_bytes, .timeout_ns = given.timeout_ms * 1000000};
    return di_grammar_compile(out, &spec, &limits, err);
}

di_status di_grammar_create_regex(di_grammar **out, const char *text, size_t len, const di_grammar_options *options,
                                  di_error *err) {
    return create(out, DI_GRAMMAR_REGEX, text, len, options, err);
}

di_status di_grammar_create_schema(di_grammar **out, const char *text, size_t len, const di_grammar_options *options,
                                   di_error *err) {
    return create(out, DI_GRAMMAR_SCHEMA, text, len, options, err);
}

di_status di_grammar_create_ebnf(di_grammar **out, const char *text, size_t len, const di_grammar_options *options,
                                 di_error *err) {
    return create(out, DI_GRAMMAR_EBNF, text, len, options, err);
}

di_status di_grammar_create_choice(di_grammar **out, const char *text, size_t len, const di_grammar_options *options,
                                   di_error *err) {
    return create(out, DI_GRAMMAR_CHOICE, text, len, options, err);
}
