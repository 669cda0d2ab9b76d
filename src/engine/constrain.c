/* Grammars as constraints of outputs: a matcher for each sample (grammar/grammar.h) behind what the step loop asks. */
#include "engine_internal.h"

static int64_t count(const void *self) {
    return di_matcher_count(self);
}

static di_status accept(void *self, int32_t token, bool *is_allowed, di_error *err) {
    return di_matcher_accept(self, token, is_allowed, err);
}

static void rollback(void *self, int64_t n) {
    di_matcher_rollback(self, n);
}

static di_status mask(void *self, uint32_t *out, int32_t *only, di_error *err) {
    return di_matcher_mask(self, out, only, err);
}

static bool is_open(void *self) {
    return di_matcher_is_open(self);
}

static void destroy(void *self) {
    di_matcher_destroy(self);
}

static di_status open_matcher(void *self, di_constraint *out, di_error *err) {
    const di_grammar_source *s = self;
    di_matcher *m = NULL;
    di_status st = di_matcher_create(&m, s->grammar, s->vocab, err);
    if (!st)
        *out = (di_constraint){.self = m,
                               .count = count,
                               .accept = accept,
                               .rollback = rollback,
                               .mask = mask,
                               .is_open = is_open,
                               .destroy = destroy};
    return st;
}

const di_constraint_source *di_grammar_source_init(di_grammar_source *s, di_grammar *grammar,
                                                   const di_grammar_vocab *vocab) {
    *s = (di_grammar_source){.grammar = grammar, .vocab = vocab};
    s->source = (di_constraint_source){.self = s, .open = open_matcher};
    return &s->source;
}
