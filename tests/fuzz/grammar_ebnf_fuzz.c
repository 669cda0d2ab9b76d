/* EBNF grammars, any bytes: reading one ends in rules or a refusal, within small limits; the compiled grammar and the
 * definition of the nodes agree on a text.
 *
 * The first byte says how many of the others are the text, modulo 32. */
#include "engine/grammar/grammar.h"
#include "../harness/grammar_walk.h"

static const di_grammar_limits limits = {
    .memory_bytes = (size_t)8 << 20, .timeout_ns = (int64_t)2 * 1000000000, .depth_max = 32};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_compiled(const char *grammar, size_t len, const char *text, size_t text_len, bool is_in) {
    di_grammar *compiled = NULL;
    di_error err = {0};
    bool accepts;
    di_grammar_spec spec = {.kind = DI_GRAMMAR_EBNF, .text = grammar, .len = len};
    di_status st = di_grammar_compile(&compiled, &spec, &limits, &err);
    DI_ASSERT(st == DI_OK || st == DI_ERR_RANGE || (st == DI_ERR_REQUEST && !is_in));
    if (!st && di_grammar_accepts(compiled, text, text_len, &accepts, &err) == DI_OK)
        DI_ASSERT(accepts == is_in);
    di_grammar_release(compiled);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || data[0] % 32 > size - 1)
        return 0;
    size_t text_len = data[0] % 32, len = size - 1 - text_len;
    const char *text = (const char *)data + 1, *grammar = text + text_len;
    di_gram g;
    di_error err = {0};
    di_gram_init(&g, &limits);
    di_status st = di_gram_ebnf(&g, grammar, len, &err);
    if (st)
        DI_ASSERT((st == DI_ERR_REQUEST || st == DI_ERR_RANGE) && err.message[0]);
    else
        check_compiled(grammar, len, text, text_len, walk_matches(&g, g.rules[g.root].node, text, text_len));
    di_gram_deinit(&g);
    return 0;
}
