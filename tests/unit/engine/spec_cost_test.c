/* The model of step times: coefficients of synthetic machines with noise, outliers and changes, and what it promises
 * whatever it was given. */
#include "engine/spec/spec.h"
#include "harness.h"

/* A machine that is what the model says. */
typedef struct machine {
    double coef[4];
    di_spec_experts experts;
} machine;

static double machine_ns(const machine *m, int64_t rows, int64_t context) {
    return m->coef[0] + m->coef[1] * (double)rows + m->coef[2] * di_spec_experts_touched(&m->experts, (double)rows) +
           m->coef[3] * (double)context;
}

static const di_spec_experts tiny_experts = {.n_layers = 10, .n_experts = 32, .n_chosen = 4};

static double noise(uint64_t *rng, double width) {
    return 1 + width * (2 * di_test_random_unit(rng) - 1);
}

static void touched_by_hand(void **state) {
    (void)state;
    const di_spec_experts e = {.n_layers = 2, .n_experts = 4, .n_chosen = 1};
    assert_true(di_spec_experts_touched(&e, 0) == 0);
    assert_true(fabs(di_spec_experts_touched(&e, 1) - 2) < 1e-12); /* one a layer */
    assert_true(fabs(di_spec_experts_touched(&e, 2) - 2 * (1 + 0.75)) < 1e-12);
    assert_true(fabs(di_spec_experts_touched(&e, 1000) - 8) < 1e-9);
    const di_spec_experts all = {.n_layers = 1, .n_experts = 3, .n_chosen = 3}, none = {0};
    assert_true(di_spec_experts_touched(&all, 1) == 3);
    assert_true(di_spec_experts_touched(&none, 5) == 0);
}

static void is_ready_after_two_sizes(void **state) {
    (void)state;
    di_spec_cost c;
    di_spec_cost_init(&c, &tiny_experts, &tiny_experts, 5, 64);
    assert_true(di_spec_cost_step_ns(&c, 3, 10) == 0);
    assert_true(di_spec_cost_draft_ns(&c, 3) == 0);
    for (int k = 0; k < 20; k++)
        di_spec_cost_learn_step(&c, 1, 100, 1000000);
    assert_false(di_spec_cost_is_ready(&c));
    assert_true(fabs(di_spec_cost_step_ns(&c, 1, 100) / 1e6 - 1) < 1e-6);
    di_spec_cost_learn_step(&c, 65, 1, 1000000); /* more rows than it is for, and what is no time */
    di_spec_cost_learn_step(&c, 2, 1, 0);
    di_spec_cost_learn_step(&c, 0, 1, 5);
    assert_int_equal(c.step.n_steps, 20);
    di_spec_cost_learn_step(&c, 2, 200, 1500000);
    di_spec_cost_learn_step(&c, 2, 200, 1500000);
    assert_true(di_spec_cost_is_ready(&c));
    for (int k = 0; k < 3; k++) {
        assert_false(di_spec_cost_draft_is_ready(&c));
        di_spec_cost_learn_draft(&c, 1, 300000);
    }
    assert_true(di_spec_cost_draft_is_ready(&c));
}

/* Rows 1..48 and contexts that vary: 2 % noise, and every 20th step takes four times as long. */
DI_PROPERTY(recovers_coefficients, 20) {
    uint64_t rng = seed;
    machine m = {.experts = tiny_experts};
    m.coef[0] = 1e6 * di_test_random_unit(&rng);
    m.coef[1] = 1e4 + 1e5 * di_test_random_unit(&rng);
    m.coef[2] = 1e3 + 1e4 * di_test_random_unit(&rng);
    m.coef[3] = 1 + 10 * di_test_random_unit(&rng);
    di_spec_cost c;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 64);
    for (int k = 0; k < 4000; k++) {
        int64_t rows = di_test_random_range(&rng, 1, 48), context = rows * di_test_random_range(&rng, 1, 4000);
        double ns = machine_ns(&m, rows, context) * noise(&rng, 0.02) * (k % 20 == 19 ? 4 : 1);
        di_spec_cost_learn_step(&c, rows, context, (int64_t)ns);
    }
    /* Predictions within 4 %: outliers, being one step of 20 with weight 1/12 and clipped at +50 %, pull by up to
     * 0.05 * 0.083 * 50 % = 0.2 %, noise is averaged over some hundred steps, and the rest is margin for the ends. */
    for (int64_t rows = 1; rows <= 48; rows++)
        for (int64_t length = 100; length <= 3100; length += 1000)
            assert_true(fabs(di_spec_cost_step_ns(&c, rows, rows * length) / machine_ns(&m, rows, rows * length) - 1) <
                        0.04);
    /* Coefficients: those that make up much of the time are known best. */
    double typical[4] = {1, 24, di_spec_experts_touched(&m.experts, 24), 24 * 2000.0};
    for (int i = 0; i < 4; i++)
        assert_true(fabs(c.step.coef[i] - m.coef[i]) * typical[i] < 0.12 * machine_ns(&m, 24, 24 * 2000));
}

/* Without noise the coefficients are exact, up to the rounding to whole ns. */
static void recovers_exactly_without_noise(void **state) {
    (void)state;
    machine m = {.coef = {3e6, 2e5, 3e4, 7}, .experts = tiny_experts};
    di_spec_cost c;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 64);
    for (int k = 0; k < 600; k++) {
        int64_t rows = 1 + k % 40, context = rows * (100 + 37 * (k % 13));
        di_spec_cost_learn_step(&c, rows, context, (int64_t)machine_ns(&m, rows, context));
        di_spec_cost_learn_draft(
            &c, 1 + k % 16,
            (int64_t)(1e6 + 1e5 * (1 + k % 16) + 2e3 * di_spec_experts_touched(&m.experts, 5 * (1 + k % 16))));
    }
    for (int i = 0; i < 4; i++)
        assert_true(fabs(c.step.coef[i] / m.coef[i] - 1) < 1e-3);
    assert_true(fabs(c.draft.coef[0] / 1e6 - 1) < 1e-3);
    assert_true(fabs(c.draft.coef[1] / 1e5 - 1) < 1e-3);
    assert_true(fabs(c.draft.coef[2] / 2e3 - 1) < 1e-3);
    assert_true(c.draft.coef[3] == 0);
}

static void single_outlier_counts_little(void **state) {
    (void)state;
    machine m = {.coef = {1e6, 1e5, 1e4, 1}, .experts = tiny_experts};
    di_spec_cost c;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 64);
    for (int k = 0; k < 200; k++)
        di_spec_cost_learn_step(&c, 1 + k % 8, 1000, (int64_t)machine_ns(&m, 1 + k % 8, 1000));
    double before = di_spec_cost_step_ns(&c, 4, 1000);
    di_spec_cost_learn_step(&c, 4, 1000, (int64_t)(4 * before));
    assert_true(di_spec_cost_step_ns(&c, 4, 1000) < 1.01 * before);
    di_spec_cost_learn_step(&c, 4, 1000, (int64_t)(1000 * before));
    assert_true(di_spec_cost_step_ns(&c, 4, 1000) < 1.02 * before);
}

/* The machine becomes 2.5 times slower and later as fast as before, while only few batch sizes come: the others follow
 * too. */
static void follows_a_change(void **state) {
    (void)state;
    machine m = {.coef = {1e6, 1e5, 1e4, 1}, .experts = tiny_experts};
    di_spec_cost c;
    uint64_t rng = 1;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 64);
    for (int k = 0; k < 2000; k++) {
        int64_t rows = di_test_random_range(&rng, 1, 32);
        di_spec_cost_learn_step(&c, rows, rows * 100, (int64_t)(machine_ns(&m, rows, rows * 100) * noise(&rng, 0.03)));
    }
    for (int turn = 0; turn < 2; turn++) {
        double factor = turn ? 1 : 2.5;
        for (int k = 0; k < 60; k++) {
            int64_t rows = di_test_random_range(&rng, 4, 6);
            di_spec_cost_learn_step(&c, rows, rows * 100,
                                    (int64_t)(factor * machine_ns(&m, rows, rows * 100) * noise(&rng, 0.03)));
        }
        for (int64_t rows = 4; rows <= 6; rows++)
            assert_true(
                fabs(di_spec_cost_step_ns(&c, rows, rows * 100) / machine_ns(&m, rows, rows * 100) / factor - 1) < 0.1);
        for (int64_t rows = 1; rows <= 32; rows++)
            assert_true(fabs(di_spec_cost_step_ns(&c, rows, rows * 100) / machine_ns(&m, rows, rows * 100) / factor -
                             1) < 0.35);
    }
}

/* One batch size for long does not make the model forget the others. */
static void keeps_what_other_sizes_take(void **state) {
    (void)state;
    machine m = {.coef = {1e6, 1e5, 1e4, 1}, .experts = tiny_experts};
    di_spec_cost c;
    uint64_t rng = 1;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 64);
    for (int k = 0; k < 400; k++) {
        int64_t rows = di_test_random_range(&rng, 1, 32);
        di_spec_cost_learn_step(&c, rows, rows * 100, (int64_t)(machine_ns(&m, rows, rows * 100) * noise(&rng, 0.03)));
    }
    for (int k = 0; k < 20000; k++)
        di_spec_cost_learn_step(&c, 8, 800, (int64_t)(machine_ns(&m, 8, 800) * noise(&rng, 0.03)));
    for (int64_t rows = 1; rows <= 32; rows++)
        assert_true(fabs(di_spec_cost_step_ns(&c, rows, rows * 100) / machine_ns(&m, rows, rows * 100) - 1) < 0.06);
}

/* Steps of sequences that draft have many rows; those that follow on the device have few, and take a quarter less than
 * rows explain. That is no price of rows: the other steps are predicted as if there were no plain ones. */
static void plain_steps_are_another_kind(void **state) {
    (void)state;
    machine m = {.coef = {1.5e6, 5e3, 0, 80}, .experts = tiny_experts};
    di_spec_cost c;
    uint64_t rng = 3;
    di_spec_cost_init(&c, &m.experts, &m.experts, 5, 400);
    assert_true(di_spec_cost_plain_saves_ns(&c, 64, 64) == 0);
    for (int k = 0; k < 400; k++) {
        int64_t rows = 64 * di_test_random_range(&rng, 2, 5), length = di_test_random_range(&rng, 20, 200);
        assert_false(di_spec_cost_plain_is_seen(&c, 32));
        di_spec_cost_learn_step(&c, rows, rows * length,
                                (int64_t)(machine_ns(&m, rows, rows * length) * noise(&rng, 0.02)));
        length = di_test_random_range(&rng, 20, 200);
        double ns = (machine_ns(&m, 64, 64 * length) - 5e5) * noise(&rng, 0.02) * (k % 20 == 19 ? 4 : 1);
        di_spec_cost_learn_plain(&c, 64, 64 * length, (int64_t)ns);
    }
    for (int64_t rows = 64; rows <= 384; rows += 32)
        assert_true(fabs(di_spec_cost_step_ns(&c, rows, rows * 100) / machine_ns(&m, rows, rows * 100) - 1) < 0.02);
    assert_true(di_spec_cost_plain_is_seen(&c, 64) && !di_spec_cost_plain_is_seen(&c, 32));
    /* Of 1.8 to 2.9 ms, 2 % noise averaged over 32 steps, and outliers as above; of other sizes likewise. */
    for (int64_t rows = 1; rows <= 384; rows *= 2)
        assert_true(fabs(di_spec_cost_plain_saves_ns(&c, rows, rows * 100) - 5e5) < 4e4);
    /* A change of the machine is one of both kinds. */
    for (int k = 0; k < 200; k++)
        di_spec_cost_learn_step(&c, 256, 25600, (int64_t)(2 * machine_ns(&m, 256, 25600)));
    assert_true(fabs(di_spec_cost_plain_saves_ns(&c, 64, 6400) - 1e6) < 3e5);
}

/* Where the fit is wrong about a size, plain steps of that size are predicted by what they took. */
static void plain_steps_are_right_where_they_were_seen(void **state) {
    (void)state;
    di_spec_cost c;
    di_spec_cost_init(&c, &tiny_experts, &tiny_experts, 5, 400);
    for (int k = 0; k < 10; k++) { /* no line goes through these */
        di_spec_cost_learn_step(&c, 1, 100, 1000000);
        di_spec_cost_learn_step(&c, 32, 3200, 1100000);
        di_spec_cost_learn_step(&c, 48, 4800, 2500000);
        di_spec_cost_learn_plain(&c, 32, 3200, 900000);
        di_spec_cost_learn_plain(&c, 2, 200, 1200000);
    }
    assert_true(fabs(di_spec_cost_step_ns(&c, 32, 3200) - 1100000) > 1e5);
    assert_true(fabs(di_spec_cost_step_ns(&c, 32, 3200) - di_spec_cost_plain_saves_ns(&c, 32, 3200) - 900000) < 1);
    assert_true(fabs(di_spec_cost_step_ns(&c, 2, 200) - di_spec_cost_plain_saves_ns(&c, 2, 200) - 1200000) < 1);
    /* No size makes a step of another one take less than half. */
    for (int64_t rows = 1; rows <= 384; rows++)
        assert_true(fabs(di_spec_cost_plain_saves_ns(&c, rows, 0)) <= 0.5 * di_spec_cost_step_ns(&c, rows, 0));
    di_spec_cost_learn_plain(&c, 0, 1, 5); /* what is no step, and more rows than it is for */
    di_spec_cost_learn_plain(&c, 5, 1, 0);
    di_spec_cost_learn_plain(&c, 401, 1, 5);
    assert_false(di_spec_cost_plain_is_seen(&c, 5) || di_spec_cost_plain_is_seen(&c, 401) ||
                 di_spec_cost_plain_is_seen(&c, 0));
}

/* Whatever times come: no coefficient below 0, so no prediction falls with rows or context, and none is not a number.
 */
DI_PROPERTY(is_sane_on_nonsense, 30) {
    uint64_t rng = seed;
    di_spec_cost c;
    di_spec_cost_init(&c, &tiny_experts, &tiny_experts, 5, INT64_MAX);
    for (int k = 0; k < 300; k++) {
        int shift = (int)di_test_random_range(&rng, 0, 62);
        int64_t rows = di_test_random_range(&rng, -1, 1) + (int64_t)(1ull << di_test_random_range(&rng, 0, 40));
        di_spec_cost_learn_step(&c, rows, (int64_t)(di_test_random(&rng) >> di_test_random_range(&rng, 1, 63)),
                                (int64_t)(1ull << shift));
        di_spec_cost_learn_draft(&c, (int32_t)(di_test_random(&rng) >> 34), (int64_t)(1ull << shift));
        di_spec_cost_learn_plain(&c, rows, (int64_t)(di_test_random(&rng) >> di_test_random_range(&rng, 1, 63)),
                                 (int64_t)(1ull << di_test_random_range(&rng, 0, 62)));
        for (int i = 0; i < 4; i++) {
            assert_true(c.step.coef[i] >= 0 && isfinite(c.step.coef[i]));
            assert_true(c.draft.coef[i] >= 0 && isfinite(c.draft.coef[i]));
        }
    }
    double before = 0;
    for (int64_t n = 1; n < 2000; n += 7) {
        double ns = di_spec_cost_step_ns(&c, n, n * 50);
        assert_true(ns >= before && isfinite(ns));
        assert_true(fabs(di_spec_cost_plain_saves_ns(&c, n, n * 50)) <= 0.5 * ns);
        before = ns;
    }
}

DI_TEST_GROUP(spec_cost, cmocka_unit_test(touched_by_hand), cmocka_unit_test(is_ready_after_two_sizes),
              cmocka_unit_test(recovers_coefficients), cmocka_unit_test(recovers_exactly_without_noise),
              cmocka_unit_test(single_outlier_counts_little), cmocka_unit_test(follows_a_change),
              cmocka_unit_test(keeps_what_other_sizes_take), cmocka_unit_test(plain_steps_are_another_kind),
              cmocka_unit_test(plain_steps_are_right_where_they_were_seen), cmocka_unit_test(is_sane_on_nonsense))
