/* What the fuzz targets of texts of grammars have in common: small limits, and that a compiled grammar accepts what the
 * definition of its nodes does. */
#ifndef DI_TESTS_GRAMMAR_FUZZ_H
#define DI_TESTS_GRAMMAR_FUZZ_H

#include "engine/grammar/grammar.h"

#include "../harness/grammar_walk.h"

static const di_grammar_limits limits = {
    .memory_bytes = (size_t)8 << 20, .timeout_ns = (int64_t)2 * 1000000000, .depth_max = 32};

static void check_compiled(di_grammar_kind kind, const char *grammar, size_t len, const char *text, size_t text_len,
                           bool is_in) {
    di_grammar *compiled = NULL;
    di_error err = {0};
    bool accepts;
    di_grammar_spec spec = {.kind = kind, .text = grammar, .len = len};
    di_status st = di_grammar_compile(&compiled, &spec, &limits, &err);
    DI_ASSERT(st == DI_OK || st == DI_ERR_RANGE || (st == DI_ERR_REQUEST && !is_in));
    if (!st && di_grammar_accepts(compiled, text, text_len, &accepts, &err) == DI_OK)
        DI_ASSERT(accepts == is_in);
    di_grammar_release(compiled);
}

#endif
