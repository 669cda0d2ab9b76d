/* A constraint of a few states over token ids, for the engine's tests: which tokens may come depends on the state, the
 * state on the tokens so far. In some states one token alone may come, in others the end mark too. */
#ifndef DI_TEST_TOY_GRAMMAR_H
#define DI_TEST_TOY_GRAMMAR_H

#include "engine/engine.h"
#include "harness.h"

enum { TOY_STATES = 6, TOY_TOKENS_MAX = 4096 };

typedef struct toy_grammar {
    int32_t n_vocab, eos_id;
    uint64_t salt;  /* grammars of different salts differ */
    bool is_secret; /* is_open is not told */
    di_constraint_source source;
} toy_grammar;

typedef struct toy_matcher {
    const toy_grammar *grammar;
    int32_t states[TOY_TOKENS_MAX]; /* before each token, and now */
    int32_t n;
    bool has_ended[TOY_TOKENS_MAX];
} toy_matcher;

static inline uint64_t toy_hash(const toy_grammar *g, int32_t state, int32_t token) {
    return di_mix64(g->salt * 1000003 + (uint64_t)state * 1009 + (uint64_t)token + 7);
}

/* In states 1 and 4 a single token. */
static inline int32_t toy_only(const toy_grammar *g, int32_t state) {
    int32_t token = state % 3 == 1 ? (int32_t)(toy_hash(g, state, -1) % (uint64_t)g->n_vocab) : -1;
    return token == g->eos_id ? (token + 1) % g->n_vocab : token;
}

static inline bool toy_allows(const toy_grammar *g, int32_t state, int32_t token) {
    int32_t only = toy_only(g, state);
    if (only >= 0)
        return token == only;
    if (token == g->eos_id)
        return state == 5;
    return toy_hash(g, state, token) % 3 != 0;
}

static inline int32_t toy_next(const toy_grammar *g, int32_t state, int32_t token) {
    return (int32_t)(toy_hash(g, state, token + 5000) % TOY_STATES);
}

/* Whether tokens [n] follow the grammar, as far as they go. */
static inline bool toy_follows(const toy_grammar *g, const int32_t *tokens, int64_t n) {
    int32_t state = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!toy_allows(g, state, tokens[i]) || (i > 0 && tokens[i - 1] == g->eos_id))
            return false;
        state = toy_next(g, state, tokens[i]);
    }
    return true;
}

static inline int64_t toy_count(const void *self) {
    return ((const toy_matcher *)self)->n;
}

static inline di_status toy_accept(void *self, int32_t token, bool *is_allowed, di_error *err) {
    toy_matcher *m = self;
    const toy_grammar *g = m->grammar;
    int32_t state = m->states[m->n];
    *is_allowed = !m->has_ended[m->n] && toy_allows(g, state, token);
    if (!*is_allowed)
        return DI_OK;
    if (m->n + 1 == TOY_TOKENS_MAX)
        return di_fail(err, DI_ERR_RANGE, "more than %d tokens", (int)TOY_TOKENS_MAX);
    m->states[++m->n] = toy_next(g, state, token);
    m->has_ended[m->n] = token == g->eos_id;
    return DI_OK;
}

static inline void toy_rollback(void *self, int64_t n) {
    toy_matcher *m = self;
    assert_in_range(n, 0, m->n);
    m->n -= (int32_t)n;
}

static inline di_status toy_mask(void *self, uint32_t *mask, int32_t *only, di_error *err) {
    const toy_matcher *m = self;
    (void)err;
    int32_t n = 0, last = -1;
    memset(mask, 0, (size_t)DI_CEIL_DIV(m->grammar->n_vocab, 32) * sizeof *mask);
    for (int32_t t = 0; t < m->grammar->n_vocab && !m->has_ended[m->n]; t++) {
        if (!toy_allows(m->grammar, m->states[m->n], t))
            continue;
        mask[t / 32] |= 1u << (t % 32);
        last = t;
        n++;
    }
    if (only)
        *only = n == 1 ? last : -1;
    return DI_OK;
}

static inline bool toy_is_open(void *self) {
    const toy_matcher *m = self;
    return !m->has_ended[m->n] && toy_only(m->grammar, m->states[m->n]) < 0;
}

static inline di_status toy_open(void *self, di_constraint *out, di_error *err) {
    toy_matcher *m = calloc(1, sizeof *m);
    if (!m)
        return di_fail(err, DI_ERR_MEMORY, "a toy");
    m->grammar = self;
    *out = (di_constraint){.self = m,
                           .count = toy_count,
                           .accept = toy_accept,
                           .rollback = toy_rollback,
                           .mask = toy_mask,
                           .is_open = m->grammar->is_secret ? NULL : toy_is_open,
                           .destroy = free};
    return DI_OK;
}

static inline void toy_init(toy_grammar *g, int32_t n_vocab, int32_t eos_id, uint64_t salt) {
    *g = (toy_grammar){.n_vocab = n_vocab, .eos_id = eos_id, .salt = salt, .is_secret = salt % 2};
    g->source = (di_constraint_source){.self = g, .open = toy_open};
}

#endif
