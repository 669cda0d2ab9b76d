/* The guard of a sequence: speculation off where its drafts keep failing, tried again later (spec.h). */
#include "spec.h"

#define RATE_LEARN (1.0f / 16)  /* weight of the newest outcome in an acceptance rate */
#define RATE_RELAX (1.0f / 256) /* how fast a rate without outcomes goes back to what it was at the start */
#define BALANCE_LEARN (1.0 / 16)
#define BALANCE_START 0.5
#define ROUNDS_BAD 8
#define ROUNDS_TRIAL 4
#define WAIT_FIRST 16
#define WAIT_MAX 512

void di_spec_guard_init(di_spec_guard *g, float rate) {
    *g = (di_spec_guard){.state = DI_SPEC_ON, .wait_next = WAIT_FIRST, .rate_start = rate, .balance = BALANCE_START};
    for (int j = 0; j < DI_SPEC_DRAFTS_MAX; j++)
        g->rate[j] = rate;
}

void di_spec_guard_idle(di_spec_guard *g) {
    for (int j = 0; j < DI_SPEC_DRAFTS_MAX; j++)
        g->rate[j] += RATE_RELAX * (g->rate_start - g->rate[j]);
}

bool di_spec_guard_step(di_spec_guard *g) {
    if (g->state != DI_SPEC_OFF)
        return true;
    if (--g->wait > 0) {
        di_spec_guard_idle(g);
        return false;
    }
    g->state = DI_SPEC_TRIAL;
    g->n_rounds = 0;
    g->balance = 0;
    return true;
}

static void turn_off(di_spec_guard *g) {
    g->state = DI_SPEC_OFF;
    g->n_rounds = 0;
    g->wait = g->wait_next;
    g->wait_next = DI_MIN(2 * g->wait_next, WAIT_MAX);
}

void di_spec_guard_learn(di_spec_guard *g, int32_t n_verified, int32_t n_accepted, double cost_tokens) {
    for (int32_t j = 0; j < n_verified && j <= n_accepted && j < DI_SPEC_DRAFTS_MAX; j++)
        g->rate[j] += RATE_LEARN * ((j < n_accepted ? 1.0f : 0.0f) - g->rate[j]);
    double gain = n_accepted - cost_tokens;
    switch (g->state) {
    case DI_SPEC_ON:
        g->balance += BALANCE_LEARN * (gain - g->balance);
        g->n_rounds = g->balance < 0 ? g->n_rounds + 1 : 0;
        if (g->n_rounds >= ROUNDS_BAD)
            turn_off(g);
        break;
    case DI_SPEC_TRIAL:
        g->balance += gain / ROUNDS_TRIAL;
        if (++g->n_rounds < ROUNDS_TRIAL)
            break;
        if (g->balance < 0) {
            turn_off(g);
        } else {
            g->state = DI_SPEC_ON;
            g->n_rounds = 0;
            g->wait_next = WAIT_FIRST;
        }
        break;
    case DI_SPEC_OFF: /* a round that was under way when it was turned off */
        break;
    }
}

void di_spec_guard_confidence(const di_spec_guard *g, int32_t n, float *out) {
    DI_ASSERT(n <= DI_SPEC_DRAFTS_MAX);
    for (int32_t j = 0; j < n; j++)
        out[j] = g->rate[j];
}
