/* Regular expressions and EBNF grammars against golden vectors: verdicts of Python's re.fullmatch and of xgrammar (the
 * files' first lines say which versions). Every text is put to the nodes of the front end, by a span matcher that knows
 * nothing of automata, and to the compiled grammar. */
#include "engine/grammar/grammar.h"
#include "grammar_walk.h"
#include "harness.h"
#include "vectors.h"

/* Rows whose construct no automaton can express. xgrammar reads none of them either. */
static bool is_refused_by_name(const char *id) {
    static const char *const rows[] = {"sr-a-189", "sr-a-190", "sr-a-191", "sr-a-192"};
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        if (strcmp(rows[i], id) == 0)
            return true;
    }
    return false;
}

typedef struct counts {
    int n_refused, n_in, n_out;
} counts;

static void check_row(const di_json *row, di_grammar_kind kind, bool is_in, counts *n) {
    size_t len, text_len;
    const char *id = di_json_str(di_json_get(row, "id"), NULL);
    const char *grammar = di_json_str(di_json_get(row, kind == DI_GRAMMAR_REGEX ? "regex" : "grammar"), &len);
    const char *text = di_json_str(di_json_get(row, "text"), &text_len);
    di_gram g;
    di_grammar *compiled = NULL;
    di_error err;
    assert_true(grammar && text);
    di_gram_init(&g, NULL);
    di_status st =
        kind == DI_GRAMMAR_REGEX ? di_gram_regex(&g, grammar, len, &err) : di_gram_ebnf(&g, grammar, len, &err);
    if (kind == DI_GRAMMAR_REGEX && is_refused_by_name(id)) {
        assert_int_equal(st, DI_ERR_REQUEST);
        assert_contains(err.message, "can't be guaranteed");
        n->n_refused++;
        di_gram_deinit(&g);
        return;
    }
    if (st) {
        fail_msg("%s, '%s': %s", id, grammar, err.message);
    }
    if (walk_matches(&g, g.rules[g.root].node, text, text_len) != is_in) {
        fail_msg("%s: the nodes of '%s' %s '%s'", id, grammar, is_in ? "don't have" : "have", text);
    }
    di_gram_deinit(&g);
    bool accepts = false;
    di_grammar_spec spec = {.kind = kind, .text = grammar, .len = len};
    di_test_ok(di_grammar_compile(&compiled, &spec, NULL, &err), &err);
    di_test_ok(di_grammar_accepts(compiled, text, text_len, &accepts, &err), &err);
    di_grammar_release(compiled);
    if (accepts != is_in) {
        fail_msg("%s: '%s' %s '%s'", id, grammar, accepts ? "accepts" : "doesn't accept", text);
    }
    n->n_in += is_in;
    n->n_out += !is_in;
}

static void check_regex(const di_json *row, void *ctx) {
    const di_json *match = di_json_get(row, "fullmatch");
    assert_true(di_json_is(match, DI_JSON_BOOL));
    check_row(row, DI_GRAMMAR_REGEX, di_json_bool(match), ctx);
}

static void check_ebnf(const di_json *row, void *ctx) {
    check_row(row, DI_GRAMMAR_EBNF, di_json_bool(di_json_get(row, "accept")), ctx);
}

static void regular_expressions_match_as_in_python(void **state) {
    (void)state;
    counts n = {0};
    int n_rows = vectors_each("../grammar/so_regex.jsonl", check_regex, &n);
    assert_int_equal(n_rows, 196);
    assert_int_equal(n.n_refused, 4);
    assert_int_equal(n.n_in + n.n_out, 192);
}

static void ebnf_grammars_match_as_in_xgrammar(void **state) {
    (void)state;
    counts n = {0};
    assert_int_equal(vectors_each("../grammar/so_ebnf.jsonl", check_ebnf, &n), 133);
    assert_int_equal(n.n_in + n.n_out, 133);
}

DI_TEST_GROUP(grammar_text, cmocka_unit_test(regular_expressions_match_as_in_python),
              cmocka_unit_test(ebnf_grammars_match_as_in_xgrammar));
