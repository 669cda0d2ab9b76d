/* Any bytes as a JSON schema, strictly and laxly: a refusal has a message that is valid UTF-8, and what compiles only
 * has texts that are JSON. The texts are walks through the automaton, steered by a hash of the input. */
#include <stdlib.h>

#include "engine/grammar/pda.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { WALKS = 4, WALK_BYTES_MAX = 400 };

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void walk(di_pda *p, uint64_t seed) {
    char text[WALK_BYTES_MAX];
    size_t n = 0;
    di_pda_config c = di_pda_start(p);
    while (n < sizeof text && c >= 0) {
        seed = di_mix64(seed);
        if (di_pda_accepts(p, c) && seed % 4 == 0) {
            break;
        }
        /* Tokens of JSON are tried first: among all bytes, quotes would never end a string. */
        static const char liked[] = "\"}],:0{[tfn";
        di_pda_config next = DI_PDA_DEAD;
        for (size_t i = 0; i < 1000 && next == DI_PDA_DEAD; i++) {
            uint64_t r = di_mix64(seed + i);
            uint8_t byte = i < 8 ? (uint8_t)liked[r % (sizeof liked - 1)]
                                 : (uint8_t)(i < 744 ? r >> 8 : i); /* the last 256 tries are all bytes */
            text[n] = (char)byte;
            next = di_pda_step(p, c, byte);
        }
        if (next == DI_PDA_FULL) {
            return;
        }
        /* An automaton has no dead ends. */
        require(next >= 0 || di_pda_accepts(p, c));
        if (next < 0) {
            break;
        }
        c = next;
        n++;
    }
    if (c >= 0 && di_pda_accepts(p, c)) {
        di_json *value = NULL;
        require(di_json_parse(&value, text, n, NULL) == DI_OK);
        di_json_free(value);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_json *schema = NULL;
    if (di_json_parse(&schema, (const char *)data, size, NULL)) {
        return 0;
    }
    for (int is_lax = 0; is_lax < 2; is_lax++) {
        const di_grammar_limits limits = {.memory_bytes = (size_t)8 << 20, .timeout_ns = 2000000000};
        di_gram g;
        di_pda p = {0};
        di_error err = {0};
        di_gram_init(&g, &limits);
        di_status st = di_gram_schema(&g, schema, is_lax, &err);
        if (st == DI_OK) {
            st = di_pda_init(&p, &g, &err);
        }
        di_gram_deinit(&g);
        if (st == DI_OK) {
            for (uint64_t i = 0; i < WALKS; i++) {
                walk(&p, di_hash_fnv1a(data, size) + i);
            }
        } else {
            require(st == DI_ERR_REQUEST || st == DI_ERR_RANGE);
            require(err.message[0] && di_utf8_valid(err.message, strlen(err.message)));
        }
        di_pda_deinit(&p);
    }
    di_json_free(schema);
    return 0;
}
