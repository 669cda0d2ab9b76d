/* The plan of a step: the three policies by hand, the cost policy against every prefix-closed plan of small batches,
 * the released engine's algorithm with its two rounds and its table. */
#include "engine/spec/spec.h"
#include "harness.h"

enum { SEQS = 5, DRAFTS = 4, SEQS_MANY = 256, DRAFTS_MANY = 5 };

/* A model that is given instead of learnt. */
static void cost_given(di_spec_cost *c, double base, double row, double expert, double context) {
    di_spec_experts experts = {.n_layers = 3, .n_experts = 16, .n_chosen = 2};
    di_spec_cost_init(c, &experts, &experts, DRAFTS, 4096);
    for (int64_t rows = 1; rows <= 4; rows++)
        for (int k = 0; k < 3; k++)
            di_spec_cost_learn_step(c, rows, 1, 1000);
    c->step.coef[0] = base;
    c->step.coef[1] = row;
    c->step.coef[2] = expert;
    c->step.coef[3] = context;
}

static di_spec_ask ask_of(di_spec_policy policy, const di_spec_seq *seqs, int n_seqs, int n_drafts, void *scratch) {
    return (di_spec_ask){
        .policy = policy, .n_seqs = n_seqs, .seqs = seqs, .n_drafts = n_drafts, .rows_max = 1000, .scratch = scratch};
}

static void assert_lengths(const int32_t *got, int n, const int32_t *want) {
    for (int i = 0; i < n; i++)
        assert_int_equal(got[i], want[i]);
}

static void fixed_takes_all_drafts(void **state) {
    (void)state;
    uint64_t scratch[64];
    const di_spec_seq seqs[3] = {{.n_drafts = 3, .may_speculate = true},
                                 {.n_drafts = 4, .may_speculate = false},
                                 {.n_drafts = 2, .may_speculate = true}};
    assert_true(di_spec_scratch_bytes(3, DRAFTS) <= sizeof scratch);
    int32_t lengths[3];
    di_spec_plan plan;
    di_spec_ask ask = ask_of(DI_SPEC_FIXED, seqs, 3, DRAFTS, scratch);
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 3, (const int32_t[]){3, 0, 2});
    assert_int_equal(plan.n_drafts, 5);
    /* Six rows are three for drafts: a first one each, then a second one of the lower index. */
    ask.rows_max = 6;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 3, (const int32_t[]){2, 0, 1});
    ask.rows_max = 2; /* less than the sequences' own rows */
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 3, (const int32_t[]){0, 0, 0});
    ask.n_drafts = 1;
    ask.rows_max = 100;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 3, (const int32_t[]){1, 0, 1});
    ask.n_seqs = 0;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_int_equal(plan.n_drafts, 0);
}

/* base 100, 10 a row: 1 token at 110, then 1.9 at 120, 2.62 at 130, .. : chance c^j is worth its row while it is above
 * rate * 10. */
static void cost_by_hand(void **state) {
    (void)state;
    uint64_t scratch[64];
    di_spec_cost cost;
    cost_given(&cost, 100, 10, 0, 0);
    const float good[4] = {0.9f, 0.8f, 0.5f, 0.1f}, poor[4] = {0.05f, 1, 1, 1};
    di_spec_seq seq = {.n_drafts = 4, .may_speculate = true, .confidence = good};
    di_spec_ask ask = ask_of(DI_SPEC_COST, &seq, 1, DRAFTS, scratch);
    ask.cost = &cost;
    int32_t length;
    di_spec_plan plan;
    di_spec_plan_make(&ask, &length, &plan);
    /* 1/110, 1.9/120, 2.62/130 = 0.020154, 2.98/140 = 0.021286, 3.016/150 = 0.0201 */
    assert_int_equal(length, 3);
    assert_true(fabs(plan.tokens - 2.98) < 1e-5);
    assert_true(fabs(plan.ns - 140) < 1e-9);
    assert_true(fabs(plan.plain_ns - 110) < 1e-9);
    assert_true(fabs(plan.tokens_per_draft - 10.0 / 110) < 1e-6);
    /* 1.05/120 is less than 1/110, and so is all behind it: 1.2/150. */
    seq.confidence = poor;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 0);
    assert_true(fabs(plan.ns - 110) < 1e-9);
    /* A plan with drafts must be better by the margin: 2.98/140 is 2.34 times 1/110. */
    seq.confidence = good;
    ask.gain_min = 1.33;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 3);
    ask.gain_min = 1.35;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 0);
    ask.gain_min = 0;
    /* The time that the first draft brings along: 2.98/(140 + 180) = 0.00931 still beats 0.00909, 190 does not. */
    ask.drafts_ns = 180;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 3);
    ask.drafts_ns = 190;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 0);
    /* Values that are none count as 0 or 1. */
    const float odd[4] = {2, NAN, 1, 1};
    seq.confidence = odd;
    ask.drafts_ns = 0;
    di_spec_plan_make(&ask, &length, &plan);
    assert_int_equal(length, 1);
    assert_true(fabs(plan.tokens - 2) < 1e-9);
}

static void cost_is_timid_before_it_is_ready(void **state) {
    (void)state;
    uint64_t scratch[SEQS * 8 * 3];
    di_spec_cost cost;
    di_spec_experts none = {0};
    di_spec_cost_init(&cost, &none, &none, DRAFTS, 64);
    const float sure[4] = {1, 1, 1, 1}, fair[4] = {0.9f, 0.85f, 1, 1};
    di_spec_seq seqs[6];
    for (int i = 0; i < 6; i++)
        seqs[i] = (di_spec_seq){.n_drafts = 4, .may_speculate = true, .confidence = i == 1 ? fair : sure};
    di_spec_ask ask = ask_of(DI_SPEC_COST, seqs, 6, DRAFTS, scratch);
    ask.cost = &cost;
    int32_t lengths[6];
    di_spec_plan plan;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 6, (const int32_t[]){2, 1, 2, 2, 0, 0});
    assert_int_equal(plan.n_drafts, 7);
    assert_true(plan.ns == 0);
    assert_true(di_spec_drafting_gain(&ask, lengths) > 1);
}

/* Random batches; confidences from few values too, so that there are ties. */
typedef struct batch {
    di_spec_seq seqs[SEQS_MANY];
    float newest[SEQS_MANY][DRAFTS_MANY], before[SEQS_MANY][DRAFTS_MANY];
} batch;

static void batch_random(batch *b, uint64_t *rng, int n_seqs, int n_drafts, int64_t context_max) {
    bool is_coarse = di_test_random(rng) & 1;
    for (int i = 0; i < n_seqs; i++) {
        for (int j = 0; j < n_drafts; j++) {
            double c = di_test_random_unit(rng), d = di_test_random_unit(rng);
            b->newest[i][j] = (float)(is_coarse ? ceil(c * 4) / 4 : sqrt(c));
            b->before[i][j] = (float)(is_coarse ? ceil(d * 4) / 4 : sqrt(d));
        }
        b->seqs[i] = (di_spec_seq){.n_drafts = (int32_t)di_test_random_range(rng, 0, n_drafts),
                                   .may_speculate = di_test_random_range(rng, 0, 5) > 0,
                                   .n_context = di_test_random_range(rng, 0, context_max),
                                   .confidence = b->newest[i],
                                   .before = b->before[i],
                                   .n_before = (int32_t)di_test_random_range(rng, 0, n_drafts)};
    }
}

static double chance_of(const di_spec_seq *seq, int j) {
    double chance = 1;
    for (int k = 0; k <= j; k++)
        chance *= (double)seq->confidence[k];
    return chance;
}

/* Tokens per time of given lengths, by the formulas. */
static double rate_of(const di_spec_ask *ask, const int32_t *lengths) {
    double tokens = 0, ns = ask->always_ns;
    int64_t rows = ask->other_rows, context = ask->other_context, drafts = 0;
    for (int i = 0; i < ask->n_seqs; i++) {
        tokens += 1;
        drafts += lengths[i];
        rows += 1 + lengths[i];
        for (int j = 0; j <= lengths[i]; j++)
            context += ask->seqs[i].n_context + 1 + j;
        for (int j = 0; j < lengths[i]; j++)
            tokens += chance_of(&ask->seqs[i], j);
    }
    return tokens / (ns + (drafts ? ask->drafts_ns : 0) + di_spec_cost_step_ns(ask->cost, rows, context));
}

DI_PROPERTY(cost_equals_exhaustive_search, 300) {
    static batch b;
    uint64_t rng = seed, scratch[SEQS * DRAFTS * 3];
    int n_seqs = (int)di_test_random_range(&rng, 1, SEQS), n_drafts = (int)di_test_random_range(&rng, 1, DRAFTS);
    di_spec_cost cost;
    cost_given(&cost, 200 * di_test_random_unit(&rng), 60 * di_test_random_unit(&rng),
               di_test_random(&rng) & 1 ? 10 * di_test_random_unit(&rng) : 0,
               di_test_random(&rng) & 1 ? 0.1 * di_test_random_unit(&rng) : 0);
    batch_random(&b, &rng, n_seqs, n_drafts, 1000);
    di_spec_ask ask = ask_of(DI_SPEC_COST, b.seqs, n_seqs, n_drafts, scratch);
    ask.cost = &cost;
    ask.rows_max = di_test_random_range(&rng, 0, n_seqs * (n_drafts + 1));
    ask.other_rows = di_test_random_range(&rng, 0, 3);
    ask.other_context = ask.other_rows * 100;
    ask.always_ns = 20 * di_test_random_unit(&rng);
    ask.drafts_ns = di_test_random(&rng) & 1 ? 50 * di_test_random_unit(&rng) : 0;
    ask.rate_hint = di_test_random(&rng) & 1 ? di_test_random_unit(&rng) : 0; /* however wrong */
    int32_t got[SEQS], lengths[SEQS] = {0};
    di_spec_plan plan;
    di_spec_plan_make(&ask, got, &plan);
    double best = 0;
    for (bool is_more = true; is_more;) {
        int64_t rows = n_seqs;
        for (int i = 0; i < n_seqs; i++)
            rows += lengths[i];
        if (rows == n_seqs || rows <= ask.rows_max)
            best = fmax(best, rate_of(&ask, lengths));
        is_more = false;
        for (int i = 0; i < n_seqs && !is_more; i++) {
            is_more = lengths[i] < (b.seqs[i].may_speculate ? b.seqs[i].n_drafts : 0);
            lengths[i] = is_more ? lengths[i] + 1 : 0;
        }
    }
    double rate = rate_of(&ask, got);
    assert_true(rate <= best * (1 + 1e-9));
    assert_true(rate >= best * (1 - 1e-3));
    assert_true(fabs(plan.tokens / plan.ns / rate - 1) < 1e-5); /* it knows its own rate; chances are floats */
    /* Never predicted to be a loss. */
    int32_t none[SEQS] = {0};
    assert_true(rate >= rate_of(&ask, none) * (1 - 1e-9));
    int64_t total = 0;
    for (int i = 0; i < n_seqs; i++) {
        assert_in_range(got[i], 0, b.seqs[i].may_speculate ? b.seqs[i].n_drafts : 0);
        total += got[i];
    }
    assert_int_equal(total, plan.n_drafts);
    assert_true(total == 0 || n_seqs + total <= ask.rows_max);
}

/* A large batch is sorted another way: no single change of a length may make the plan better. */
DI_PROPERTY(cost_is_a_local_optimum, 40) {
    static batch b;
    static uint64_t scratch[SEQS_MANY * DRAFTS_MANY * 3];
    uint64_t rng = seed;
    int n_seqs = (int)di_test_random_range(&rng, 40, SEQS_MANY);
    di_spec_cost cost;
    cost_given(&cost, 5000 * di_test_random_unit(&rng), 30 * di_test_random_unit(&rng), 100 * di_test_random_unit(&rng),
               di_test_random(&rng) & 1 ? 0.01 * di_test_random_unit(&rng) : 0);
    batch_random(&b, &rng, n_seqs, DRAFTS_MANY, 1000);
    di_spec_ask ask = ask_of(DI_SPEC_COST, b.seqs, n_seqs, DRAFTS_MANY, scratch);
    ask.cost = &cost;
    ask.rows_max = 100000;
    int32_t lengths[SEQS_MANY];
    di_spec_plan plan;
    di_spec_plan_make(&ask, lengths, &plan);
    double rate = rate_of(&ask, lengths);
    for (int i = 0; i < n_seqs; i++) {
        for (int change = -1; change <= 1; change += 2) {
            lengths[i] += change;
            if (lengths[i] >= 0 && lengths[i] <= (b.seqs[i].may_speculate ? b.seqs[i].n_drafts : 0))
                assert_true(rate_of(&ask, lengths) <= rate * (1 + 1e-3));
            lengths[i] -= change;
        }
    }
}

/* With the same drafts, more load leaves less room: a machine whose time grows with rows verifies fewer of each
 * sequence as the batch grows, and none at all where a row costs as much as it can give. */
static void cost_backs_off_under_load(void **state) {
    (void)state;
    static batch b;
    static uint64_t scratch[SEQS_MANY * DRAFTS_MANY * 3];
    di_spec_cost cost;
    cost_given(&cost, 1000, 50, 0, 0);
    double before = 1e9;
    for (int n_seqs = 1; n_seqs <= SEQS_MANY; n_seqs *= 4) {
        for (int i = 0; i < n_seqs; i++) {
            for (int j = 0; j < DRAFTS_MANY; j++)
                b.newest[i][j] = 0.7f;
            b.seqs[i] = (di_spec_seq){.n_drafts = DRAFTS_MANY, .may_speculate = true, .confidence = b.newest[i]};
        }
        di_spec_ask ask = ask_of(DI_SPEC_COST, b.seqs, n_seqs, DRAFTS_MANY, scratch);
        ask.cost = &cost;
        ask.rows_max = 100000;
        int32_t lengths[SEQS_MANY];
        di_spec_plan plan;
        di_spec_plan_make(&ask, lengths, &plan);
        double mean = (double)plan.n_drafts / n_seqs;
        assert_true(mean <= before);
        before = mean;
        if (n_seqs == 1)
            assert_int_equal(plan.n_drafts, DRAFTS_MANY);
        /* At 256 rows a token costs 50 + 1000/256 = 53.9 and a draft's row 50: 0.7 does not pay. */
        if (n_seqs == SEQS_MANY)
            assert_int_equal(plan.n_drafts, 0);
    }
}

/* Two sequences, a table of 2, 4 and 8 rows. */
static void reference_by_hand(void **state) {
    (void)state;
    static di_spec_curve curve;
    uint64_t scratch[64];
    di_error err = {0};
    di_test_ok(di_spec_curve_init(&curve, 3, (const int32_t[]){2, 4, 8}, (const double[]){100, 130, 400}, &err), &err);
    const float old0[3] = {0.9f, 0.5f, 0.5f}, old1[3] = {0.8f, 0.9f, 0.1f};
    const float new0[3] = {0.5f, 0.9f, 0.9f}, new1[3] = {0.5f, 0.5f, 0.5f};
    di_spec_seq seqs[2] = {{.n_drafts = 3, .may_speculate = true, .confidence = new0, .before = old0, .n_before = 3},
                           {.n_drafts = 3, .may_speculate = true, .confidence = new1, .before = old1, .n_before = 3}};
    di_spec_ask ask = ask_of(DI_SPEC_REFERENCE, seqs, 2, 3, scratch);
    ask.curve = &curve;
    int32_t lengths[2];
    di_spec_plan plan;
    di_spec_plan_make(&ask, lengths, &plan);
    /* Old: .9 .8 .72 .45 .225 .072: 2/100, 2.9/130 = .0223, 3.7/130 = .0285, then 4.42/400: two drafts. New: .5 .45
     * .405 of the first, .5 .25 .125 of the second: .5 and .5, ties by index. */
    assert_lengths(lengths, 2, (const int32_t[]){1, 1});
    assert_true(fabs(plan.tokens - 3) < 1e-6);
    assert_true(fabs(plan.ns - 130) < 1e-9);
    /* With the tie broken the other way both drafts are the first sequence's. */
    const float lower[3] = {0.44f, 0.5f, 0.5f};
    seqs[1].confidence = lower;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 2, (const int32_t[]){2, 0});
    /* The whole table is scanned: a dear entry does not end the search. 5.45/140 and 5.75/140 beat 3.7/130. */
    di_test_ok(di_spec_curve_init(&curve, 4, (const int32_t[]){2, 4, 5, 8}, (const double[]){100, 130, 139, 140}, &err),
               &err);
    di_spec_plan_make(&ask, lengths, &plan);
    assert_int_equal(plan.n_drafts, 6);
    /* The table's end is the largest step. */
    di_test_ok(di_spec_curve_init(&curve, 2, (const int32_t[]){2, 4}, (const double[]){100, 101}, &err), &err);
    di_spec_plan_make(&ask, lengths, &plan);
    assert_int_equal(plan.n_drafts, 2);
    /* A round without a record counts 1 for each draft that is there. */
    seqs[0].before = seqs[1].before = NULL;
    seqs[1].n_drafts = 0;
    seqs[1].confidence = NULL;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 2, (const int32_t[]){2, 0});
    /* Without a table, or with more rows than the step may have. */
    ask.curve = NULL;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 2, (const int32_t[]){3, 0});
    ask.rows_max = 3;
    di_spec_plan_make(&ask, lengths, &plan);
    assert_lengths(lengths, 2, (const int32_t[]){1, 0});
}

/* The device form of dspark.md 4.6: an element wins when fewer than the total are ranked before it. */
DI_PROPERTY(reference_equals_ranks, 60) {
    static batch b;
    static di_spec_curve curve;
    static uint64_t scratch[SEQS_MANY * DRAFTS_MANY * 3];
    uint64_t rng = seed;
    di_error err = {0};
    int n_seqs = (int)di_test_random_range(&rng, 1, 60), n_points = 40;
    batch_random(&b, &rng, n_seqs, DRAFTS_MANY, 1000);
    for (int i = 0; i < n_seqs; i++)
        b.seqs[i].n_before = b.seqs[i].n_drafts;
    int32_t rows[40];
    double ns[40];
    for (int k = 0; k < n_points; k++) {
        rows[k] = (k ? rows[k - 1] : 0) + (int32_t)di_test_random_range(&rng, 1, 20);
        ns[k] = (k ? ns[k - 1] : 500) + 1 + 100 * di_test_random_unit(&rng);
    }
    di_test_ok(di_spec_curve_init(&curve, n_points, rows, ns, &err), &err);
    di_spec_ask ask = ask_of(DI_SPEC_REFERENCE, b.seqs, n_seqs, DRAFTS_MANY, scratch);
    ask.curve = &curve;
    ask.rows_max = 100000;
    int32_t got[SEQS_MANY];
    di_spec_plan plan;
    di_spec_plan_make(&ask, got, &plan);
    float rates[2][60 * DRAFTS_MANY];
    int of[60 * DRAFTS_MANY], n = 0;
    for (int i = 0; i < n_seqs; i++) {
        float old = 1, new = 1;
        for (int j = 0; b.seqs[i].may_speculate && j < b.seqs[i].n_drafts; j++) {
            rates[0][n] = old *= b.before[i][j];
            rates[1][n] = new *= b.newest[i][j];
            of[n++] = i;
        }
    }
    /* The total: by repeatedly taking the largest rate that is left, the first of equals. */
    bool is_taken[60 * DRAFTS_MANY] = {false};
    double tokens = n_seqs, best = 0;
    int total = 0;
    for (int k = 0; k <= n; k++) {
        double time = -1;
        for (int g = n_points - 1; g >= 0 && rows[g] >= n_seqs + k; g--)
            time = ns[g];
        if (time > 0 && tokens / time > best) {
            best = tokens / time;
            total = k;
        }
        int at = -1;
        for (int e = 0; e < n; e++)
            if (!is_taken[e] && (at < 0 || rates[0][e] > rates[0][at]))
                at = e;
        if (at >= 0) {
            is_taken[at] = true;
            tokens += (double)rates[0][at];
        }
    }
    int32_t want[60] = {0};
    for (int e = 0; e < n; e++) {
        int rank = 0;
        for (int f = 0; f < n; f++)
            rank += rates[1][f] > rates[1][e] || (f < e && rates[1][f] == rates[1][e]);
        want[of[e]] += rank < total;
    }
    assert_lengths(got, n_seqs, want);
}

static void curve_corrects_itself(void **state) {
    (void)state;
    static di_spec_curve curve;
    di_error err = {0};
    const int32_t rows[3] = {2, 4, 8};
    di_test_ok(di_spec_curve_init(&curve, 3, rows, (const double[]){100, 130, 400}, &err), &err);
    assert_true(di_spec_curve_ns(&curve, 3, 1) == 130);
    assert_true(di_spec_curve_ns(&curve, 9, 1) == -1);
    assert_int_equal(di_spec_curve_rows(&curve, 2), 2);
    assert_int_equal(di_spec_curve_rows(&curve, 3), 4);
    assert_int_equal(di_spec_curve_rows(&curve, 9), -1);
    /* Residuals a row: 5 at 2 rows (by median), 1 at 4, and too few steps of 8. */
    for (int k = 0; k < 10; k++) {
        di_spec_curve_learn(&curve, 2, 1, k < 4 ? 100 : 110, 7);
        di_spec_curve_learn(&curve, 3, 2, 134, 3 + k);
    }
    for (int k = 0; k < 9; k++)
        di_spec_curve_learn(&curve, 8, 2, 4000, 20);
    di_spec_curve_learn(&curve, 9, 2, 1, 1); /* beyond the table */
    assert_true(di_spec_curve_slope(&curve) == 3);
    curve.slope_ns = di_spec_curve_slope(&curve);
    /* Sampling: 7 with one sequence; nine times 20 were the last with two; and of all for others. */
    assert_true(di_spec_curve_ns(&curve, 3, 1) == 130 + 4 * 3 + 7);
    assert_true(di_spec_curve_ns(&curve, 3, 2) == 130 + 4 * 3 + 20);
    assert_true(di_spec_curve_ns(&curve, 3, 3) == 130 + 4 * 3 + 20);
    /* Steps faster than the table give no slope below 0; old ones leave the ring. */
    for (int k = 0; k < DI_SPEC_CURVE_STEPS + 100; k++)
        di_spec_curve_learn(&curve, 2, 1, 50, 1);
    assert_true(di_spec_curve_slope(&curve) == 0);
    assert_true(curve.slope_ns == 0);
    assert_int_equal(di_spec_curve_init(&curve, 2, (const int32_t[]){2, 2}, (const double[]){1, 2}, &err),
                     DI_ERR_RANGE);
    assert_contains(err.message, "entry 1");
    assert_int_equal(di_spec_curve_init(&curve, 2, rows, (const double[]){2, 1}, &err), DI_ERR_RANGE);
    assert_int_equal(di_spec_curve_init(&curve, DI_SPEC_CURVE_POINTS + 1, rows, NULL, &err), DI_ERR_RANGE);
}

/* Drafting pays where what drafts bring covers the round as well. */
static void drafting_has_to_pay(void **state) {
    (void)state;
    uint64_t scratch[64];
    di_spec_cost cost;
    cost_given(&cost, 100, 10, 0, 0);
    for (int k = 0; k < 3; k++)
        di_spec_cost_learn_draft(&cost, 1, 30);
    di_spec_guard guard;
    di_spec_guard_init(&guard, 0.7f);
    float expected[4];
    di_spec_guard_confidence(&guard, 4, expected);
    di_spec_seq seq = {.n_drafts = 4, .may_speculate = true, .confidence = expected};
    di_spec_ask ask = ask_of(DI_SPEC_COST, &seq, 1, DRAFTS, scratch);
    ask.cost = &cost;
    ask.drafts_ns = di_spec_cost_draft_ns(&cost, 1);
    assert_true(fabs(ask.drafts_ns - 30) < 1e-6);
    int32_t length;
    /* 1 + .7 + .49 + .343 + .2401 = 2.77 at 150: 0.01849 against 0.00909; 155 ns more and it does not pay. */
    assert_true(di_spec_drafting_gain(&ask, &length) > 1);
    ask.drafts_ns = 154;
    assert_true(di_spec_drafting_gain(&ask, &length) > 1);
    ask.drafts_ns = 156;
    assert_true(di_spec_drafting_gain(&ask, &length) == 1);
}

/* Steps of 64 sequences and the number of drafts each, on a device: with drafts as long as fixed lengths took, without
 * as long as steps that follow. Given these times, drafts that hold with 0.7 are worth a gain that pays, and one more
 * of each is taken as long as it brings something. In one fit, the plain steps make rows look dearer than they are. */
static void lengths_by_what_a_device_took(void **state) {
    (void)state;
    static const double took_us[6] = {0, 2090, 2370, 2553, 2960, 3230}, round_us = 810, plain_us = 1540;
    enum { N = 64, K = 5 };
    static uint64_t scratch[N * K * 3];
    static float confidence[K] = {0.7f, 0.7f, 0.7f, 0.7f, 0.7f};
    di_spec_experts experts = {.n_layers = 8, .n_experts = 32, .n_chosen = 4};
    di_spec_cost cost;
    di_spec_cost_init(&cost, &experts, &experts, K, N * (1 + K));
    for (int64_t rows = 1; rows <= 8; rows *= 2)
        for (int k = 0; k < 4; k++)
            di_spec_cost_learn_step(&cost, rows, rows, 1530000);
    for (int turn = 0; turn < 20; turn++) {
        for (int k = 1; k <= K; k++)
            di_spec_cost_learn_step(&cost, N * (1 + k), N * (1 + k) * (20 + turn), (int64_t)(1e3 * took_us[k]));
        di_spec_cost_learn_draft(&cost, N, (int64_t)(1e3 * round_us));
        di_spec_cost_learn_plain(&cost, N, N * (20 + turn), (int64_t)(1e3 * plain_us));
    }
    di_spec_seq seqs[N];
    for (int i = 0; i < N; i++)
        seqs[i] = (di_spec_seq){.n_drafts = K, .may_speculate = true, .n_context = 30, .confidence = confidence};
    di_spec_ask ask = ask_of(DI_SPEC_COST, seqs, N, K, scratch);
    ask.cost = &cost;
    double saves_ns = di_spec_cost_plain_saves_ns(&cost, N, N * 31);
    ask.always_ns = -saves_ns;
    ask.drafts_ns = di_spec_cost_draft_ns(&cost, N) + saves_ns;
    int32_t lengths[N];
    double tokens = 1, best = 1, best_of[K + 1] = {1};
    for (int k = 1; k <= K; k++) {
        tokens += pow(0.7, k);
        best_of[k] = tokens * plain_us / (took_us[k] + round_us);
        best = fmax(best, best_of[k]);
    }
    assert_true(fabs(di_spec_drafting_gain(&ask, lengths) / best - 1) < 0.03);
    int64_t n_drafts = 0;
    for (int i = 0; i < N; i++)
        n_drafts += lengths[i];
    assert_true(best_of[(n_drafts + N / 2) / N] > 0.97 * best);
}

static void plain_steps_are_due_where_little_is_gained(void **state) {
    (void)state;
    di_spec_cost cost;
    di_spec_experts none = {0};
    di_spec_cost_init(&cost, &none, &none, DRAFTS, 64);
    assert_true(di_spec_plain_is_due(&cost, 8, 1.1, 5, 1000));
    assert_false(di_spec_plain_is_due(&cost, 8, 1.1, 5, 10));
    assert_true(di_spec_plain_is_due(&cost, 8, 1.9, 5, 1000));
    assert_false(di_spec_plain_is_due(&cost, 8, 2.1, 5000, 5000));
    assert_false(di_spec_plain_is_due(&cost, 8, INFINITY, 5000, 5000));
    for (int k = 0; k < 3; k++)
        di_spec_cost_learn_plain(&cost, 8, 80, 1000);
    assert_false(di_spec_plain_is_due(&cost, 8, 1.1, 5, 1000));
    assert_true(di_spec_plain_is_due(&cost, 8, 1.1, 1500, 1000));
    assert_false(di_spec_plain_is_due(&cost, 8, 1.3, 1500, 1000));
    assert_true(di_spec_plain_is_due(&cost, 16, 1.1, 5, 1000));
}

DI_TEST_GROUP(spec_plan, cmocka_unit_test(fixed_takes_all_drafts), cmocka_unit_test(cost_by_hand),
              cmocka_unit_test(cost_is_timid_before_it_is_ready), cmocka_unit_test(cost_equals_exhaustive_search),
              cmocka_unit_test(cost_is_a_local_optimum), cmocka_unit_test(cost_backs_off_under_load),
              cmocka_unit_test(reference_by_hand), cmocka_unit_test(reference_equals_ranks),
              cmocka_unit_test(curve_corrects_itself), cmocka_unit_test(drafting_has_to_pay),
              cmocka_unit_test(lengths_by_what_a_device_took),
              cmocka_unit_test(plain_steps_are_due_where_little_is_gained))
