/* Compiled grammars: front end and automaton by kind, the lock, what matching has learnt and when it is forgotten.
 *
 * A compilation makes the automaton and nothing else: configurations, transitions and masks come as texts need them.
 * The limit on what is learnt holds for transitions, slices and masks together; when it is passed, masks go first, then
 * everything, and matchers begin again from their tokens (matcher.c). */
#include "grammar_internal.h"

#include "deepinfer/grammar.h"

/* ---- front ends ---- */

static di_status parse_json(di_json **out, const di_grammar_spec *spec, const char *what, di_error *err) {
    di_error local;
    di_error *e = err ? err : &local;
    di_status st = di_json_parse(out, spec->text, spec->len, e);
    if (st == DI_ERR_FORMAT)
        st = e->code = DI_ERR_REQUEST; /* the fault of who sent it, not of a file of ours */
    return di_error_context(e, st, "the %s is not JSON", what);
}

static di_status read_choice(di_gram *g, const di_grammar_spec *spec, di_error *err) {
    di_json *choices = NULL;
    di_status st = parse_json(&choices, spec, "choice", err);
    if (!st)
        st = di_gram_choice(g, choices, err);
    di_json_free(choices);
    return st;
}

static di_status read_schema(di_gram *g, const di_grammar_spec *spec, di_error *err) {
    static const char any_object[] = "{\"type\":\"object\"}";
    di_grammar_spec object = {.text = any_object, .len = sizeof any_object - 1};
    di_json *schema = NULL;
    di_status st = parse_json(&schema, spec->kind == DI_GRAMMAR_OBJECT ? &object : spec, "schema", err);
    if (!st)
        st = di_gram_schema(g, schema, spec->is_lax, err);
    di_json_free(schema);
    return st;
}

static di_status read_output(di_gram *g, const di_grammar_spec *spec, di_error *err) {
    di_json *output = NULL;
    di_status st = parse_json(&output, spec, "description of an output", err);
    if (!st)
        st = di_gram_output(g, output, err);
    di_json_free(output);
    return st;
}

static di_status read_spec(di_gram *g, const di_grammar_spec *spec, di_error *err) {
    switch (spec->kind) {
    case DI_GRAMMAR_REGEX:
        return di_gram_regex(g, spec->text, spec->len, err);
    case DI_GRAMMAR_EBNF:
        return di_gram_ebnf(g, spec->text, spec->len, err);
    case DI_GRAMMAR_CHOICE:
        return read_choice(g, spec, err);
    case DI_GRAMMAR_SCHEMA:
    case DI_GRAMMAR_OBJECT:
        return read_schema(g, spec, err);
    case DI_GRAMMAR_OUTPUT:
        return read_output(g, spec, err);
    }
    return di_fail(err, DI_ERR_ARG, "grammar kind %d is unknown", (int)spec->kind);
}

/* ---- life ---- */

static void destroy(di_grammar *g) {
    di_mask_caches_destroy(g);
    free(g->infos);
    di_pda_deinit(&g->pda);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

di_status di_grammar_make(di_grammar **out, di_gram *gram, di_error *err) {
    di_grammar *g = calloc(1, sizeof *g);
    if (!g)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a grammar");
    int failed = pthread_mutex_init(&g->lock, NULL);
    if (failed) {
        free(g);
        return di_fail(err, DI_ERR_MEMORY, "no lock for a grammar: %s", strerrordesc_np(failed));
    }
    g->memory_bytes = gram->limits.memory_bytes;
    di_status st = di_pda_init(&g->pda, gram, err);
    if (st) {
        destroy(g);
        return st;
    }
    g->base_bytes = di_pda_bytes(&g->pda);
    di_mask_tables_init(&g->tables, &g->pda);
    atomic_init(&g->n_refs, 1);
    *out = g;
    return DI_OK;
}

di_status di_grammar_compile(di_grammar **out, const di_grammar_spec *spec, const di_grammar_limits *limits,
                             di_error *err) {
    di_gram gram;
    di_gram_init(&gram, limits);
    di_status st = read_spec(&gram, spec, err);
    if (!st)
        st = di_grammar_make(out, &gram, err);
    di_gram_deinit(&gram);
    return st;
}

di_grammar *di_grammar_acquire(di_grammar *g) {
    atomic_fetch_add_explicit(&g->n_refs, 1, memory_order_relaxed);
    return g;
}

void di_grammar_release(di_grammar *g) {
    if (g && atomic_fetch_sub_explicit(&g->n_refs, 1, memory_order_acq_rel) == 1)
        destroy(g);
}

/* ---- memory ---- */

void di_grammar_flush(di_grammar *g) {
    di_mask_forget(g);
    di_pda_flush(&g->pda);
}

bool di_grammar_is_full(di_grammar *g) {
    size_t now = di_pda_bytes(&g->pda), learnt = now > g->base_bytes ? now - g->base_bytes : 0;
    learnt += (size_t)g->n_infos * sizeof *g->infos;
    if (learnt + di_mask_caches_bytes(g) <= g->memory_bytes)
        return false;
    if (learnt <= g->memory_bytes)
        di_mask_caches_shrink(g, g->memory_bytes - learnt);
    return learnt + di_mask_caches_bytes(g) > g->memory_bytes;
}

/* ---- texts ---- */

di_status di_grammar_accepts(di_grammar *g, const char *text, size_t len, bool *accepts, di_error *err) {
    pthread_mutex_lock(&g->lock);
    di_pda_config c = DI_PDA_FULL;
    di_pda_allow(&g->pda, INT64_MAX);
    for (int i = 0; i < 2 && c == DI_PDA_FULL; i++) {
        if (i > 0)
            di_grammar_flush(g);
        c = di_pda_start(&g->pda);
        for (size_t k = 0; k < len && c >= 0; k++)
            c = di_pda_step(&g->pda, c, (uint8_t)text[k]);
    }
    bool is_accepted = c >= 0 && di_pda_accepts(&g->pda, c);
    pthread_mutex_unlock(&g->lock);
    if (c == DI_PDA_FULL)
        return di_fail(err, DI_ERR_RANGE, "the grammar needs more than %zu KiB for a text of %zu bytes",
                       g->memory_bytes >> 10, len);
    *accepts = is_accepted;
    return DI_OK;
}
