/* Matchers: where one output stands in a grammar, with the way there, so that tokens can be taken back.
 *
 * The way is the accepted tokens with the configuration behind each. Configurations hold until the grammar is flushed,
 * by whoever uses it; a matcher then goes its tokens again when it is next asked. */
#include "grammar_internal.h"

#include "deepinfer/grammar.h"

/* What one call may work out: a place at which a grammar takes longer is given up, as whoever waits for it has others
 * to serve. */
#define CALL_WORK (DI_PDA_WORK_SECOND / 10)
/* More for a way that is gone again: of each token. */
#define TOKEN_WORK (DI_PDA_WORK_SECOND / 20000)

typedef struct step {
    int32_t token;
    di_pda_config config; /* behind the token */
} step;

struct di_matcher {
    di_grammar *g; /* a reference */
    const di_grammar_vocab *v;
    step *steps; /* owned [n_steps] */
    int64_t n_steps, steps_cap;
    bool is_ended;       /* the last step is the end mark, which leaves the configuration as it was */
    bool is_placed;      /* configurations are those of `generation` */
    uint32_t generation; /* of the automaton */
    di_pda_config start;
};

di_status di_matcher_create(di_matcher **out, di_grammar *g, const di_grammar_vocab *vocab, di_error *err) {
    di_matcher *m = calloc(1, sizeof *m);
    if (!m)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a matcher");
    m->g = di_grammar_acquire(g);
    m->v = vocab;
    *out = m;
    return DI_OK;
}

void di_matcher_destroy(di_matcher *m) {
    if (!m)
        return;
    di_grammar_release(m->g);
    free(m->steps);
    free(m);
}

int64_t di_matcher_count(const di_matcher *m) {
    return m->n_steps;
}

void di_matcher_rollback(di_matcher *m, int64_t n) {
    DI_ASSERT(n >= 0 && n <= m->n_steps);
    m->n_steps -= n;
    if (n > 0)
        m->is_ended = false;
}

/* ---- under the grammar's lock ---- */

static di_pda_config current(const di_matcher *m) {
    return m->n_steps > 0 ? m->steps[m->n_steps - 1].config : m->start;
}

/* Finds the configurations of all steps again. False: memory is full. */
static bool place(di_matcher *m, const di_mask_cache *cache) {
    di_pda *p = &m->g->pda;
    m->is_placed = false;
    di_pda_allow(p, CALL_WORK + m->n_steps * TOKEN_WORK);
    di_pda_config c = m->start = di_pda_start(p);
    for (int64_t i = 0; i < m->n_steps && c >= 0; i++) {
        if (!m->is_ended || i < m->n_steps - 1)
            c = di_mask_step(m->g, cache, m->v, c, m->steps[i].token);
        m->steps[i].config = c;
    }
    if (c < 0)
        return false;
    m->generation = p->generation;
    m->is_placed = true;
    di_pda_allow(p, CALL_WORK);
    return true;
}

static bool is_current(const di_matcher *m) {
    return m->is_placed && m->generation == m->g->pda.generation;
}

static di_status fail_slow(const di_matcher *m, di_error *err) {
    return di_fail(err, DI_ERR_RANGE, "the grammar takes too long behind %lld tokens", (long long)m->n_steps);
}

/* Forgets all that the grammar has learnt, and the matcher goes its way again. That doesn't help where it took too
 * long, which is an error. */
static di_status again(di_matcher *m, const di_mask_cache *cache, di_error *err) {
    if (di_pda_is_slow(&m->g->pda))
        return fail_slow(m, err);
    di_grammar_flush(m->g);
    if (place(m, cache) && !di_grammar_is_full(m->g))
        return DI_OK;
    if (di_pda_is_slow(&m->g->pda))
        return fail_slow(m, err);
    return di_fail(err, DI_ERR_RANGE, "the grammar needs more than %zu KiB for a text of %lld tokens",
                   m->g->memory_bytes >> 10, (long long)m->n_steps);
}

/* The masks of the matcher's vocabulary, with the matcher in its place. */
static di_status enter(di_matcher *m, di_mask_cache **cache, di_error *err) {
    di_status st = di_mask_cache_get(cache, m->g, m->v, err);
    if (st)
        return st;
    di_pda_allow(&m->g->pda, CALL_WORK);
    bool is_full = di_grammar_is_full(m->g);
    if (!is_full && (is_current(m) || place(m, *cache)))
        return DI_OK;
    return again(m, *cache, err);
}

static di_status fail_full(const di_matcher *m, const char *what, di_error *err) {
    if (di_pda_is_slow(&m->g->pda))
        return fail_slow(m, err);
    return di_fail(err, DI_ERR_RANGE, "the grammar needs more than %zu KiB for %s behind %lld tokens",
                   m->g->memory_bytes >> 10, what, (long long)m->n_steps);
}

static di_status step_by(di_matcher *m, int32_t token, di_pda_config *to, di_error *err) {
    di_mask_cache *cache;
    di_status st = enter(m, &cache, err);
    if (st)
        return st;
    if (token == m->v->eos_id) {
        *to = di_pda_accepts(&m->g->pda, current(m)) ? current(m) : DI_PDA_DEAD;
        return DI_OK;
    }
    *to = di_mask_step(m->g, cache, m->v, current(m), token);
    if (*to == DI_PDA_FULL) {
        st = again(m, cache, err);
        if (st)
            return st;
        *to = di_mask_step(m->g, cache, m->v, current(m), token);
    }
    return *to == DI_PDA_FULL ? fail_full(m, "one token", err) : DI_OK;
}

static di_status find_mask(di_matcher *m, uint32_t *mask, int32_t *n_set, int32_t *only, di_error *err) {
    di_mask_cache *cache;
    di_status st = enter(m, &cache, err);
    if (st || di_mask_find(m->g, cache, m->v, current(m), mask, n_set, only))
        return st;
    st = again(m, cache, err);
    if (st || di_mask_find(m->g, cache, m->v, current(m), mask, n_set, only))
        return st;
    return fail_full(m, "the tokens that may come", err);
}

/* ---- with it ---- */

static di_status reserve_step(di_matcher *m, di_error *err) {
    if (m->n_steps < m->steps_cap)
        return DI_OK;
    int64_t cap = DI_MAX(2 * m->steps_cap, 64);
    step *grown = realloc(m->steps, (size_t)cap * sizeof *grown);
    if (!grown)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a matcher of %lld tokens", (long long)cap);
    m->steps = grown;
    m->steps_cap = cap;
    return DI_OK;
}

di_status di_matcher_accept(di_matcher *m, int32_t token, bool *is_allowed, di_error *err) {
    if (m->is_ended || token < 0 || token >= m->v->n_vocab) {
        *is_allowed = false;
        return DI_OK;
    }
    di_pda_config to = DI_PDA_DEAD;
    di_status st = reserve_step(m, err);
    if (st)
        return st;
    pthread_mutex_lock(&m->g->lock);
    st = step_by(m, token, &to, err);
    pthread_mutex_unlock(&m->g->lock);
    if (st)
        return st;
    *is_allowed = to >= 0;
    if (to >= 0) {
        m->steps[m->n_steps++] = (step){token, to};
        m->is_ended = token == m->v->eos_id;
    }
    return DI_OK;
}

di_status di_matcher_mask(di_matcher *m, uint32_t *mask, int32_t *only, di_error *err) {
    int32_t n_set = 0, one = -1;
    if (m->is_ended) {
        memset(mask, 0, m->v->n_words * sizeof *mask);
        if (only)
            *only = -1;
        return DI_OK;
    }
    pthread_mutex_lock(&m->g->lock);
    di_status st = find_mask(m, mask, &n_set, &one, err);
    pthread_mutex_unlock(&m->g->lock);
    if (st)
        return st;
    if (n_set == 0)
        return di_fail(err, DI_ERR_REQUEST, "no token continues the text of %lld tokens by the grammar",
                       (long long)m->n_steps);
    if (only)
        *only = one;
    return DI_OK;
}

bool di_matcher_is_open(di_matcher *m) {
    di_mask_cache *cache;
    if (m->is_ended)
        return false;
    pthread_mutex_lock(&m->g->lock);
    bool is_open = enter(m, &cache, NULL) == DI_OK && di_mask_is_open(m->g, cache, m->v, current(m));
    pthread_mutex_unlock(&m->g->lock);
    return is_open;
}

bool di_matcher_is_complete(di_matcher *m) {
    di_mask_cache *cache;
    pthread_mutex_lock(&m->g->lock);
    bool is_complete = enter(m, &cache, NULL) == DI_OK && di_pda_accepts(&m->g->pda, current(m));
    pthread_mutex_unlock(&m->g->lock);
    return is_complete;
}
