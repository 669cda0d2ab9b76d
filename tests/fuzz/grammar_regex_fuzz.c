/* Regular expressions, any bytes: reading one ends in a set of texts or a refusal, within small limits; the automaton
 * of the set, the compiled grammar and the definition of the nodes agree on a text.
 *
 * The first byte says how many of the others are the text, modulo 32, and whether the expression is a `pattern`. */
#include "grammar_fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || data[0] % 32 > size - 1)
        return 0;
    size_t text_len = data[0] % 32, len = size - 1 - text_len;
    bool is_search = data[0] & 32;
    const char *text = (const char *)data + 1, *regex = text + text_len;
    di_gram g;
    di_error err = {0};
    di_gram_init(&g, &limits);
    const di_node *node = di_node_regex(&g, regex, len, is_search);
    di_status st = di_gram_status(&g, &err);
    if (st) {
        DI_ASSERT((st == DI_ERR_REQUEST || st == DI_ERR_RANGE) && strstr(err.message, "regular"));
    } else if (di_utf8_valid(text, text_len)) {
        bool is_in = walk_matches(&g, node, text, text_len);
        const di_regular *a = di_regular_make(&g, node);
        if (!di_gram_has_failed(&g)) {
            DI_ASSERT(di_regular_matches(a, text, text_len) == is_in);
            DI_ASSERT(walk_matches(&g, di_regular_node(&g, a), text, text_len) == is_in);
        }
        if (!is_search)
            check_compiled(DI_GRAMMAR_REGEX, regex, len, text, text_len, is_in);
    }
    di_gram_deinit(&g);
    return 0;
}
