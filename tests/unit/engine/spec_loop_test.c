/* All decisions together on simulated machines and drafters: what the step loop does with them, with times and outcomes
 * from a random generator. Whatever the machine and the drafts are worth, once the first steps have been learnt from
 * the result is at most 2 % below no drafts and 5 % below the best fixed length. */
#include "engine/spec/spec.h"
#include "harness.h"

enum { SEQS = 64, DRAFTS = 5, STEPS = 1500, WARM = 100 };

typedef struct world {
    const char *name;
    double base, row, expert, context; /* ns */
    double draft_base, draft_row;      /* a drafting round, and a sequence in it */
    double hold_low, hold_high;        /* a draft holds with a chance somewhere between these */
    double temperature;                /* the model's confidence is this much sharper than the truth */
    double noise;
    double plain; /* a step takes so much less where neither it nor the one before has drafts */
} world;

static const di_spec_experts experts = {.n_layers = 10, .n_experts = 64, .n_chosen = 4};
static const di_spec_experts draft_experts = {.n_layers = 3, .n_experts = 32, .n_chosen = 3};

static double step_ns(const world *w, int64_t rows, int64_t context) {
    return w->base + w->row * (double)rows + w->expert * di_spec_experts_touched(&experts, (double)rows) +
           w->context * (double)context;
}

static double draft_ns(const world *w, int n) {
    return n ? w->draft_base + w->draft_row * n : 0;
}

/* One in 50 is an outlier. */
static double measured(const world *w, double ns, uint64_t *rng) {
    double outlier = di_test_random_unit(rng) < 0.02 ? 3 : 1;
    return ns * outlier * (1 + w->noise * (2 * di_test_random_unit(rng) - 1));
}

typedef struct drafter {
    float raw[DRAFTS];
    double hold[DRAFTS];
    bool has_drafts;
    di_spec_guard guard;
    int64_t length;
} drafter;

static void draft(const world *w, drafter *d, uint64_t *rng) {
    for (int j = 0; j < DRAFTS; j++) {
        double chance = w->hold_low + (w->hold_high - w->hold_low) * di_test_random_unit(rng);
        d->hold[j] = chance;
        double z = log(chance / (1 - chance)) * w->temperature;
        d->raw[j] = (float)(1 / (1 + exp(-z)));
    }
    d->has_drafts = true;
}

static int accepted(const drafter *d, int n_verified, uint64_t *rng) {
    int n = 0;
    while (n < n_verified && di_test_random_unit(rng) < d->hold[n])
        n++;
    return n;
}

/* Tokens per ns of a policy of fixed length, 0 for none; times without noise and outliers, which hit all alike. */
static double run_fixed(const world *w, int n_seqs, int n_fixed, uint64_t seed) {
    uint64_t rng = seed;
    drafter d = {0};
    double tokens = 0, ns = 0;
    for (int step = 0; step < STEPS; step++) {
        int64_t rows = (int64_t)n_seqs * (1 + n_fixed);
        for (int i = 0; i < n_seqs; i++) {
            draft(w, &d, &rng);
            tokens += 1 + accepted(&d, n_fixed, &rng);
        }
        ns += step_ns(w, rows, rows * 500) + (n_fixed ? draft_ns(w, n_seqs) : -w->plain);
    }
    return tokens / ns;
}

static double run_scheduled(const world *w, int n_seqs, uint64_t seed) {
    static drafter seqs[SEQS];
    static uint64_t scratch[SEQS * DRAFTS * 3];
    static di_spec_seq ask_seqs[SEQS];
    static float confidence[SEQS][DRAFTS];
    uint64_t rng = seed;
    di_spec_cost cost;
    di_spec_cost_init(&cost, &experts, &draft_experts, DRAFTS, 1024);
    di_spec_calibration calibration;
    di_spec_calibration_init(&calibration, DRAFTS, NULL);
    for (int64_t rows = 1; rows <= 64; rows *= 2) /* measured at start */
        for (int k = 0; k < 2; k++)
            di_spec_cost_learn_step(&cost, rows, rows * 500, (int64_t)measured(w, step_ns(w, rows, rows * 500), &rng));
    for (int i = 0; i < n_seqs; i++) {
        seqs[i] = (drafter){0};
        di_spec_guard_init(&seqs[i].guard, 0.7f);
    }
    di_spec_ask ask = {.policy = DI_SPEC_COST,
                       .n_seqs = n_seqs,
                       .seqs = ask_seqs,
                       .n_drafts = DRAFTS,
                       .rows_max = 1024,
                       .cost = &cost,
                       .gain_min = 0.01,
                       .scratch = scratch};
    double tokens = 0, ns = 0;
    bool is_drafting = true;
    int last_plain = 0, last_try = 0, n_tries = 0;
    for (int step = 0; step < STEPS + WARM; step++) {
        int32_t lengths[SEQS];
        int n_with = 0;
        /* Whether drafting after this step pays, by what drafts have been worth. */
        int n_may = 0;
        bool may[SEQS];
        for (int i = 0; i < n_seqs; i++) {
            may[i] = di_spec_guard_step(&seqs[i].guard);
            n_may += may[i];
            di_spec_guard_confidence(&seqs[i].guard, DRAFTS, confidence[i]);
            ask_seqs[i] = (di_spec_seq){
                .n_drafts = DRAFTS, .may_speculate = may[i], .n_context = 500, .confidence = confidence[i]};
        }
        double saves_ns = di_spec_cost_plain_saves_ns(&cost, n_seqs, (int64_t)n_seqs * 501);
        ask.always_ns = -saves_ns;
        ask.drafts_ns = di_spec_cost_draft_ns(&cost, n_may) + saves_ns;
        double gain = n_may > 0 ? di_spec_drafting_gain(&ask, lengths) : 1;
        bool pays = gain > 1;
        if (pays && w->plain > 0 && di_spec_plain_is_due(&cost, n_seqs, gain, step - last_plain, step - last_try)) {
            last_try = step;
            n_tries = 4;
        }
        pays = pays && n_tries-- <= 0;
        double round_ns = pays ? draft_ns(w, n_may) : 0;
        /* The step itself. */
        ask.always_ns = pays ? di_spec_cost_draft_ns(&cost, n_may) : 0;
        ask.drafts_ns = 0;
        for (int i = 0; i < n_seqs; i++) {
            di_spec_calibrate(&calibration, DRAFTS, seqs[i].raw, confidence[i]);
            ask_seqs[i].n_drafts = seqs[i].has_drafts ? DRAFTS : 0;
            ask_seqs[i].may_speculate = true;
            n_with += seqs[i].has_drafts;
        }
        di_spec_plan plan;
        di_spec_plan_make(&ask, lengths, &plan);
        int64_t rows = n_seqs + plan.n_drafts;
        double rate = plan.plain_ns > 0 ? n_seqs / plan.plain_ns : 0;
        double share = n_with ? rate * di_spec_cost_draft_ns(&cost, n_with) / n_with : 0;
        bool is_plain = w->plain > 0 && !pays && !is_drafting;
        is_drafting = pays;
        double spent = step_ns(w, rows, rows * 500) - (is_plain ? w->plain : 0);
        for (int i = 0; i < n_seqs; i++) {
            int n = accepted(&seqs[i], lengths[i], &rng);
            tokens += step >= WARM ? 1 + n : 0;
            di_spec_calibration_learn(&calibration, lengths[i], n, seqs[i].raw);
            if (seqs[i].has_drafts)
                di_spec_guard_learn(&seqs[i].guard, lengths[i], n, share + plan.tokens_per_draft * lengths[i]);
            seqs[i].has_drafts = false;
            if (may[i] && pays)
                draft(w, &seqs[i], &rng);
            else if (may[i])
                di_spec_guard_idle(&seqs[i].guard);
        }
        int64_t spent_ns = (int64_t)measured(w, spent, &rng);
        last_plain = is_plain ? step : last_plain;
        if (is_plain)
            di_spec_cost_learn_plain(&cost, rows, rows * 500, spent_ns);
        else
            di_spec_cost_learn_step(&cost, rows, rows * 500, spent_ns);
        if (pays)
            di_spec_cost_learn_draft(&cost, n_may, (int64_t)measured(w, round_ns, &rng));
        ns += step >= WARM ? spent + round_ns : 0;
    }
    return tokens / ns;
}

static void is_never_a_loss(void **state) {
    (void)state;
    const world worlds[] = {
        {"rows are free", 1e7, 1e4, 0, 0, 1e6, 1e4, 0.6, 0.95, 1, 0.02, 0},
        {"rows are free, poor drafts", 1e7, 1e4, 0, 0, 1e6, 1e4, 0.02, 0.1, 1, 0.02, 0},
        {"rows are all", 1e5, 1e6, 0, 0, 2e5, 1e5, 0.6, 0.95, 1, 0.02, 0},
        {"rows are all, poor drafts", 1e5, 1e6, 0, 0, 2e5, 1e5, 0.02, 0.3, 1, 0.02, 0},
        {"experts are all", 1e6, 1e4, 2e4, 0, 1e6, 1e5, 0.5, 0.95, 1, 0.05, 0},
        {"experts, sharp confidence", 1e6, 1e4, 2e4, 0, 1e6, 1e5, 0.3, 0.95, 2.5, 0.05, 0},
        {"context matters", 1e6, 1e5, 1e4, 100, 5e5, 1e5, 0.3, 0.95, 1, 0.05, 0},
        {"drafting is dear", 1e6, 1e5, 1e4, 0, 8e6, 2e6, 0.6, 0.95, 1, 0.05, 0},
        {"following saves a little", 1.5e6, 4.5e3, 0, 0.1, 4e5, 6e3, 0.5, 0.9, 1, 0.03, 1e5},
        {"following saves much", 1.5e6, 4.5e3, 0, 0.1, 4e5, 6e3, 0.5, 0.9, 1, 0.03, 6e5},
        {"following saves more than drafts", 1.5e6, 1.5e4, 0, 0.1, 1.2e6, 1e4, 0.5, 0.8, 1, 0.03, 6e5},
    };
    bool is_fine = true;
    for (size_t k = 0; k < sizeof worlds / sizeof *worlds; k++) {
        const world *w = &worlds[k];
        for (int n_seqs = 1; n_seqs <= SEQS; n_seqs *= di_test_is_sanitized() ? 16 : 4) {
            double none = run_fixed(w, n_seqs, 0, 5), fixed = 0;
            for (int n = 1; n <= DRAFTS; n++)
                fixed = fmax(fixed, run_fixed(w, n_seqs, n, 5));
            double got = run_scheduled(w, n_seqs, 5);
            print_message("%-28s %2d sequences: %.3f of none, %.3f of the best fixed length\n", w->name, n_seqs,
                          got / none, got / fixed);
            is_fine = is_fine && got >= 0.98 * none && got >= 0.95 * fixed;
        }
    }
    assert_true(is_fine);
}

DI_TEST_GROUP(spec_loop, cmocka_unit_test(is_never_a_loss))
