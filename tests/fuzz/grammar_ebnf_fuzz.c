/* EBNF grammars, any bytes: reading one ends in rules or a refusal, within small limits; the compiled grammar and the
 * definition of the nodes agree on a text.
 *
 * The first byte says how many of the others are the text, modulo 32. */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
        check_compiled(DI_GRAMMAR_EBNF, grammar, len, text, text_len,
                       walk_matches(&g, g.rules[g.root].node, text, text_len));
    di_gram_deinit(&g);
    return 0;
}
