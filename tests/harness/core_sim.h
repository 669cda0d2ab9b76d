/* A model that costs nothing and forgets nothing: for the engine's properties.
 *
 * The value of a row is a hash of all tokens up to it. A page keeps the values of its positions, a state slot those of
 * its window, twice: for the model and for its draft module, whose part can be put off; logits are made of the row's
 * value. The forward checks that every value which
 * the model would read is there and right, whatever blocks, copies, snapshots and cached prefixes the engine used, and
 * that nothing is written where it must not be. */
#ifndef DI_TEST_CORE_SIM_H
#define DI_TEST_CORE_SIM_H

#include "engine/engine.h"
#include "harness.h"
#include "sample_host.h"

enum { SIM_VOCAB = 48, SIM_WINDOW = 24, SIM_SPAN = 100, SIM_RING = SIM_WINDOW + DI_BACKTRACK, SIM_EOS = 1 };

typedef struct sim {
    di_backend backend;
    di_device *device;
    float *logits;
    int64_t logits_cap;
    int64_t n_rows, n_written; /* rows run; rows whose page value was written */
    int fail_every;            /* a forward in so many fails; 0: none */
    int32_t nan_token;         /* rows of this token have a NaN among their logits; 0: none */
    int32_t unit_token;        /* neighbours of this token may not be run apart ... */
    int64_t units_end;         /* ... in positions below this one */
    bool has_failed;           /* the forward before this one */
    int64_t n_forwards;
    int32_t n_seqs_last, rows_last; /* of the last forward */
    bool draws;                     /* set before sim_core: rows are drawn by the operation sample_rows */
    bool follows;                   /* likewise, with draws: forwards may be fed from draws before them */
    int64_t n_fed, n_chained;       /* rows that were; drafts that were made from drafts on the device */
    int64_t n_drawn;                /* by it */
    bool is_unrecorded;             /* set before sim_core: no forward is one whose time tells anything */
    /* the drafting round */
    bool has_drafts;                          /* set before sim_core: there is a draft module */
    int draft_quality;                        /* of 8 drafts so many are drawn from the right logits */
    int draft_fails;                          /* a round in so many fails; 0: none */
    int64_t n_rounds, n_put_off, n_caught_up; /* rows */
    uint64_t *draft_values;
    float *draft_logits, *draft_conf;
    int32_t n_drafters, drafters_cap;
} sim;

static inline uint64_t sim_value(uint64_t before, int32_t token) {
    return di_mix64(before * 31 + (uint64_t)token + 1);
}

static inline void sim_logits(uint64_t v, float *out) {
    for (int32_t t = 0; t < SIM_VOCAB; t++)
        out[t] = (float)(di_mix64(v + (uint64_t)t * 7919) >> 40) * (8.0f / (1 << 24));
}

/* The forward runs on the core's thread, where a test can't fail: what is wrong goes to stderr and ends the program.
 * Only the forward behind one that failed finds nothing where rows were to be, for sequences that are over already and
 * in flight still: those get garbage and give NaN, as the model would, and nobody may ever see of it. */
#define sim_check(cond)                                                                                                \
    do {                                                                                                               \
        if (!(cond) && m->has_failed) {                                                                                \
            is_lost = true;                                                                                            \
        } else if (!(cond)) {                                                                                          \
            fprintf(stderr,                                                                                            \
                    "core_sim: %s does not hold at position %lld of %lld+%d, pages from %lld, valid from %lld\n",      \
                    #cond, (long long)p, (long long)q->pos0, q->n_rows, (long long)q->page_from,                       \
                    (long long)q->valid_start);                                                                        \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static inline uint64_t *sim_ring(uint8_t *slots, int32_t slot) {
    return (uint64_t *)(void *)(slots + (size_t)slot * 2 * SIM_RING * sizeof(uint64_t));
}

static inline uint64_t *sim_taps(const di_batch *batch, const di_seq_rows *q) {
    return (uint64_t *)(void *)(batch->taps + (size_t)q->tap_slot * SIM_RING * sizeof(uint64_t));
}

/* The token at a position that the sequence has, or that the draw before this forward gives. */
static inline int32_t sim_token(const di_batch *batch, const di_seq_rows *q, int64_t p) {
    return batch->fed && q->fed_from >= 0 && p == q->pos0 ? batch->fed[q->fed_from] : q->tokens[p];
}

static inline void sim_seq(sim *m, const di_batch *batch, const di_seq_rows *q, float **out) {
    uint64_t *ring = sim_ring(batch->slots, q->slot), *draft = ring + SIM_RING;
    uint64_t v = 0x1234;
    int64_t end = q->pos0 + q->n_rows;
    bool is_lost = false;
    if (q->pos0 > 0 && q->pos0 < m->units_end) {
        int64_t p = q->pos0;
        sim_check(sim_token(batch, q, p) != m->unit_token || q->tokens[p - 1] != m->unit_token);
    }
    bool is_fed = batch->fed && q->fed_from >= 0;
    m->n_fed += is_fed;
    for (int64_t p = 0; p < end; p++) {
        int32_t token = sim_token(batch, q, p);
        sim_check(!is_fed || (q->n_rows == 1 && q->n_logits == 1));
        sim_check(token >= 0 && token < SIM_VOCAB);
        v = sim_value(v, token) ^ (is_lost ? 0x5555 : 0);
        uint64_t *page = (uint64_t *)(void *)(batch->pages + (size_t)q->blocks[p / DI_PAGE_TOKENS] * DI_PAGE_TOKENS *
                                                                 sizeof(uint64_t)) +
                         p % DI_PAGE_TOKENS;
        if (p < q->pos0 || p < q->page_from)
            sim_check(*page == v); /* stored by an earlier forward, of whichever sequence */
        if (p < q->pos0) {
            if (p >= q->valid_start && p > q->pos0 - SIM_WINDOW)
                sim_check(ring[p % SIM_RING] == v);
            continue;
        }
        if (p >= q->page_from) {
            /* What is written must be exact: from the start on, or behind a whole span of rebuilt rows. */
            sim_check(q->valid_start == 0 || p >= q->valid_start + SIM_SPAN);
            *page = v;
            m->n_written++;
        }
        ring[p % SIM_RING] = v;
        sim_check(!batch->taps || (q->tap_slot >= 0 && q->n_snapshots == 0));
        if (batch->taps)
            sim_taps(batch, q)[p % SIM_RING] = v;
        else
            draft[p % SIM_RING] = v;
        m->n_put_off += batch->taps != NULL;
        for (int32_t i = 0; i < q->n_snapshots; i++) {
            const di_ring_snapshot *t = &q->snapshots[i];
            sim_check(t->at > q->pos0 && t->at <= end && t->at % DI_PAGE_TOKENS == 0 && t->slot != q->slot);
            if (p < t->at && p >= t->at - SIM_WINDOW)
                sim_ring(batch->slots, t->slot)[p % SIM_RING] =
                    sim_ring(batch->slots, t->slot)[SIM_RING + p % SIM_RING] = v;
        }
        m->n_rows++;
        if (p < end - q->n_logits)
            continue;
        sim_check(q->valid_start == 0 || p >= q->valid_start + SIM_SPAN);
        sim_logits(v, *out);
        if (is_lost || (m->nan_token && token == m->nan_token))
            (*out)[SIM_VOCAB / 2] = NAN;
        *out += SIM_VOCAB;
    }
}

static inline di_status sim_forward(void *self, const di_batch *batch, float **logits, di_error *err) {
    sim *m = self;
    int64_t n = 0;
    m->n_seqs_last = batch->n_seqs;
    m->rows_last = 0;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        n += batch->seqs[s].n_logits;
        m->rows_last += batch->seqs[s].n_rows;
    }
    m->n_forwards++;
    if (m->fail_every && m->n_forwards % m->fail_every == 0) {
        m->has_failed = true;
        return di_fail(err, DI_ERR_DEVICE, "the device has a bad day");
    }
    if (n > m->logits_cap) {
        m->logits_cap = n;
        m->logits = realloc(m->logits, (size_t)n * SIM_VOCAB * sizeof *m->logits);
        if (!m->logits)
            return di_fail(err, DI_ERR_MEMORY, "logits");
    }
    float *out = m->logits;
    for (int32_t s = 0; s < batch->n_seqs; s++)
        sim_seq(m, batch, &batch->seqs[s], &out);
    *logits = m->logits;
    m->has_failed = false;
    return DI_OK;
}

/* The value behind the newest token, from the one that the slot's ring has for the position before. */
static inline di_status sim_draft_begin(void *self, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows,
                                        uint8_t *slots, di_error *err) {
    sim *m = self;
    (void)n_rows;
    m->n_rounds++;
    if (m->draft_fails && m->n_rounds % m->draft_fails == 0)
        return di_fail(err, DI_ERR_DEVICE, "no drafts today");
    if (n_seqs > m->drafters_cap) {
        m->drafters_cap = n_seqs;
        m->draft_values = realloc(m->draft_values, (size_t)n_seqs * sizeof *m->draft_values);
        m->draft_logits = realloc(m->draft_logits, (size_t)n_seqs * SIM_VOCAB * sizeof *m->draft_logits);
        m->draft_conf = realloc(m->draft_conf, (size_t)n_seqs * sizeof *m->draft_conf);
        if (!m->draft_values || !m->draft_logits || !m->draft_conf)
            return di_fail(err, DI_ERR_MEMORY, "drafts");
    }
    m->n_drafters = n_seqs;
    for (int32_t k = 0; k < n_seqs; k++) {
        const uint64_t *ring = sim_ring(slots, seqs[k].slot);
        for (int64_t p = DI_MAX(seqs[k].last - SIM_WINDOW + 1, 0); p <= seqs[k].last; p++) {
            if (ring[p % SIM_RING] != ring[SIM_RING + p % SIM_RING]) {
                fprintf(stderr, "core_sim: a round behind position %lld misses position %lld\n",
                        (long long)seqs[k].last, (long long)p);
                abort();
            }
        }
        m->draft_values[k] = sim_value(ring[seqs[k].last % SIM_RING], seqs[k].token);
    }
    return DI_OK;
}

static inline di_status sim_draft_next(void *self, int32_t i, const int32_t *prev, float **logits, float **conf,
                                       di_error *err) {
    sim *m = self;
    (void)err;
    for (int32_t k = 0; k < m->n_drafters; k++) {
        uint64_t v = i ? sim_value(m->draft_values[k], prev[k]) : m->draft_values[k];
        bool is_right = (int)(di_mix64(v) % 8) < m->draft_quality;
        m->draft_values[k] = v;
        sim_logits(is_right ? v : v + 1, m->draft_logits + (size_t)k * SIM_VOCAB);
        m->draft_conf[k] =
            (float)(0.5 + 0.4 * ((double)(di_mix64(v + 99) % 100) / 100 - 0.5) + (is_right ? 0.3 : -0.3));
    }
    *logits = m->draft_logits;
    *conf = m->draft_conf;
    return DI_OK;
}

/* Tokens that the draws before gave, and that the host has not seen. */
static inline di_status sim_draft_follow(void *self, int32_t i, const int32_t *tokens, float **logits, float **conf,
                                         di_error *err) {
    sim *m = self;
    static const int32_t none[256]; /* where times are measured, nothing is drawn */
    m->n_chained += tokens ? m->n_drafters : 0;
    return sim_draft_next(self, i, tokens ? tokens : none, logits, conf, err);
}

static inline di_status sim_catch_up(void *self, const di_batch *batch, di_error *err) {
    sim *m = self;
    (void)err;
    for (int32_t s = 0; s < batch->n_seqs; s++) {
        const di_seq_rows *q = &batch->seqs[s];
        const uint64_t *taps = sim_taps(batch, q);
        for (int64_t p = q->pos0; p < q->pos0 + q->n_rows; p++)
            sim_ring(batch->slots, q->slot)[SIM_RING + p % SIM_RING] = taps[p % SIM_RING];
        m->n_caught_up += q->n_rows;
    }
    return DI_OK;
}

static inline di_status sim_sample(void *self, const di_sample_rows_args *args, di_error *err) {
    sim *m = self;
    (void)err;
    sample_host(args);
    m->n_drawn += args->n_rows;
    return DI_OK;
}

static inline di_status sim_wait(void *self, di_error *err) {
    (void)self, (void)err;
    return DI_OK;
}

static inline int64_t sim_unrecorded(void *self) {
    const sim *m = self;
    return m->is_unrecorded ? m->n_forwards : 0;
}

static inline void sim_open(sim *m, int threads) {
    di_error err = {0};
    *m = (sim){0};
    di_test_ok(di_backend_find("cpu", &m->backend, &err), &err);
    di_test_ok(m->backend.device->open(&m->device, &(di_device_config){.n_threads = threads}, &err), &err);
}

static inline void sim_close(sim *m) {
    m->backend.device->close(m->device);
    free(m->logits);
    free(m->draft_values);
    free(m->draft_logits);
    free(m->draft_conf);
}

static inline di_core *sim_core(sim *m, const di_core_options *options) {
    di_executor executor = {
        .self = m, .forward = sim_forward, .sample = m->draws ? sim_sample : NULL, .n_unrecorded = sim_unrecorded};
    if (m->draws && m->follows) { /* everything that is put on its stream is done at once */
        executor.launch = sim_forward;
        executor.wait = sim_wait;
    }
    if (m->has_drafts) {
        executor.draft_begin = sim_draft_begin;
        executor.draft_next = sim_draft_next;
        executor.catch_up = sim_catch_up;
    }
    if (m->has_drafts && executor.launch) {
        executor.draft_launch = sim_draft_begin;
        executor.draft_follow = sim_draft_follow;
    }
    di_core_model model = {.n_vocab = SIM_VOCAB,
                           .eos_id = SIM_EOS,
                           .window = SIM_WINDOW,
                           .window_span = SIM_SPAN,
                           .step_experts = {4, 32, 4},
                           .draft_experts = {1, 8, 2}};
    di_memory_plan plan = {.page_bytes = DI_PAGE_TOKENS * sizeof(uint64_t),
                           .slot_bytes = 2 * SIM_RING * sizeof(uint64_t),
                           .tap_bytes = SIM_RING * sizeof(uint64_t)};
    di_core *core = NULL;
    di_error err = {0};
    di_test_ok(di_core_create_on(&core, &executor, &model, &m->backend, m->device, &plan, NULL, options, &err), &err);
    return core;
}

#endif
