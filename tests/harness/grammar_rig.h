/* Grammars of JSON schemas in tests: compiled to an automaton, and texts run through it byte by byte. */
#ifndef DI_TEST_GRAMMAR_RIG_H
#define DI_TEST_GRAMMAR_RIG_H

#include "engine/grammar/pda.h"
#include "harness.h"

/* The automaton of a schema; false, with the message in err, where it is refused. */
static inline bool rig_compile_json(di_pda *p, const di_json *schema, bool is_lax, di_error *err) {
    di_gram g;
    di_gram_init(&g, NULL);
    di_status st = di_gram_schema(&g, schema, is_lax, err);
    if (st == DI_OK)
        st = di_pda_init(p, &g, err);
    di_gram_deinit(&g);
    assert_true(st == DI_OK || st == DI_ERR_REQUEST || st == DI_ERR_RANGE);
    return st == DI_OK;
}

static inline bool rig_compile(di_pda *p, const char *schema, bool is_lax, di_error *err) {
    di_json *json = NULL;
    di_test_ok(di_json_parse(&json, schema, strlen(schema), err), err);
    bool is_compiled = rig_compile_json(p, json, is_lax, err);
    di_json_free(json);
    return is_compiled;
}

/* Bytes of the text that may come, one after another; *is_accepted: it is one of the grammar's as a whole. */
static inline size_t rig_run(di_pda *p, const char *text, size_t len, bool *is_accepted) {
    di_pda_config c = di_pda_start(p);
    size_t n = 0;
    for (; n < len && c >= 0; n++) {
        c = di_pda_step(p, c, (uint8_t)text[n]);
        if (c < 0)
            break;
    }
    assert_int_not_equal(c, DI_PDA_FULL);
    *is_accepted = n == len && c >= 0 && di_pda_accepts(p, c);
    return n;
}

static inline bool rig_accepts(di_pda *p, const char *text, size_t len) {
    bool is_accepted = false;
    rig_run(p, text, len, &is_accepted);
    return is_accepted;
}

#endif
