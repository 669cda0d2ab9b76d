/* The guard's states by its drawing, and calibration: temperatures that synthetic drafters have, statistics, parsing.
 */
#include "engine/spec/spec.h"
#include "harness.h"

static void guard_keeps_what_pays(void **state) {
    (void)state;
    di_spec_guard g;
    di_spec_guard_init(&g, 0.7f);
    for (int k = 0; k < 1000; k++) {
        assert_true(di_spec_guard_step(&g));
        di_spec_guard_learn(&g, 5, k % 4, 1.2); /* 1.5 accepted on average */
    }
    assert_int_equal(g.state, DI_SPEC_ON);
    /* Draft 0 held in 3 of 4 rounds, 1 in 2 of those 3, 2 in 1 of these 2, and 3 never. Sums of 1/16-weights over a
     * period of four differ from the mean by less than 0.1. */
    float rates[5];
    di_spec_guard_confidence(&g, 5, rates);
    assert_true(fabs((double)rates[0] - 3.0 / 4) < 0.1);
    assert_true(fabs((double)rates[1] - 2.0 / 3) < 0.1);
    assert_true(fabs((double)rates[2] - 1.0 / 2) < 0.1);
    assert_true((double)rates[3] < 1e-3);
    assert_true(rates[4] == 0.7f); /* never reached */
}

static void guard_turns_off_and_tries_again(void **state) {
    (void)state;
    di_spec_guard g;
    di_spec_guard_init(&g, 0.7f);
    /* Balance is (15/16)^k - 0.5: negative from the 11th round on, and the 18th is the eighth such. */
    for (int k = 0; k < 17; k++)
        di_spec_guard_learn(&g, 3, 0, 0.5);
    assert_int_equal(g.state, DI_SPEC_ON);
    di_spec_guard_learn(&g, 3, 0, 0.5);
    assert_int_equal(g.state, DI_SPEC_OFF);
    /* Waits of 16, 32, .., 512, 512; each trial of four rounds fails. */
    int wait = 16;
    for (int turn = 0; turn < 8; turn++) {
        for (int k = 1; k < wait; k++)
            assert_false(di_spec_guard_step(&g));
        assert_true(di_spec_guard_step(&g));
        assert_int_equal(g.state, DI_SPEC_TRIAL);
        for (int k = 0; k < 4; k++) {
            assert_true(di_spec_guard_step(&g));
            di_spec_guard_learn(&g, 3, k == 0, 0.5); /* one of four rounds brings a token: 0.25 < 0.5 */
        }
        assert_int_equal(g.state, DI_SPEC_OFF);
        wait = wait < 512 ? 2 * wait : 512;
    }
    /* A round that was under way changes rates alone. */
    di_spec_guard_learn(&g, 3, 3, 0.5);
    assert_int_equal(g.state, DI_SPEC_OFF);
    /* A trial that pays turns it on; a failure then waits 16 again. */
    while (!di_spec_guard_step(&g))
        ;
    for (int k = 0; k < 4; k++)
        di_spec_guard_learn(&g, 3, k < 2, 0.5);
    assert_int_equal(g.state, DI_SPEC_ON);
    int rounds = 0;
    for (; g.state == DI_SPEC_ON; rounds++)
        di_spec_guard_learn(&g, 0, 0, 0.3); /* drafts of which none was worth verifying */
    assert_in_range(rounds, 8, 30);
    assert_int_equal(g.wait, 16);
}

static void guard_forgets_old_rates(void **state) {
    (void)state;
    di_spec_guard g;
    di_spec_guard_init(&g, 0.6f);
    for (int k = 0; k < 200; k++)
        di_spec_guard_learn(&g, 2, 0, 0);
    float rate;
    di_spec_guard_confidence(&g, 1, &rate);
    assert_true(rate < 0.01f);
    for (int k = 0; k < 2000; k++)
        di_spec_guard_idle(&g);
    di_spec_guard_confidence(&g, 1, &rate);
    assert_true(rate > 0.59f); /* 0.6 * (1 - (255/256)^2000) = 0.6 * 0.9996 */
}

/* A drafter whose true chance is sigmoid(logit(c) / T_j), with c anywhere: each T_j is found. */
DI_PROPERTY(calibration_converges, 5) {
    uint64_t rng = seed;
    const double want[4] = {0.5, 1, 1.8, 4};
    di_spec_calibration c;
    di_spec_calibration_init(&c, 4, NULL);
    for (int k = 0; k < 30000; k++) {
        float raw[4];
        int n_accepted = 0;
        bool holds = true;
        for (int j = 0; j < 4; j++) {
            raw[j] = (float)(0.3 + 0.69 * di_test_random_unit(&rng));
            double z = log((double)raw[j] / (1 - (double)raw[j]));
            holds = holds && di_test_random_unit(&rng) < 1 / (1 + exp(-z / want[j]));
            n_accepted += holds;
        }
        di_spec_calibration_learn(&c, 4, n_accepted, raw);
    }
    /* A step's weight is 1/512, so about 1000 outcomes are averaged. One tells ln T with an error of 1/sqrt(curvature):
     * that is about 2 for T = 1 and more for what hardly depends on T. */
    for (int j = 0; j < 4; j++)
        assert_true(fabs(log(di_spec_calibration_temperature(&c, j) / want[j])) < (j < 3 ? 0.25 : 0.6));
    /* Then the table's confidences are what was accepted. */
    for (int b = 0; b < DI_SPEC_BINS; b++) {
        double n = (double)c.bins[b].n;
        if (n > 2000)
            assert_true(fabs(c.bins[b].confidence_sum - (double)c.bins[b].n_accepted) / n < 0.05);
    }
}

static void calibration_by_hand(void **state) {
    (void)state;
    di_spec_calibration c;
    di_spec_calibration_init(&c, 2, (const float[]){2, 1});
    c.is_frozen = true;
    const float raw[2] = {0.9f, 0.2f};
    float out[2];
    di_spec_calibrate(&c, 2, raw, out);
    /* logit(0.9) = ln 9, half of it is ln 3: 3/4. */
    assert_true(fabs((double)out[0] - 0.75) < 1e-6);
    assert_true(fabs((double)out[1] - 0.2) < 1e-6);
    di_spec_calibration_learn(&c, 2, 1, raw); /* errors 0.25 and 0.2 */
    di_spec_calibration_learn(&c, 2, 0, raw); /* 0.75; the second draft was not put to the test */
    di_spec_calibration_learn(&c, 1, 1, raw); /* 0.25 */
    assert_true(fabs(di_spec_calibration_error(&c, 0) - 1.25 / 3) < 1e-6);
    assert_true(fabs(di_spec_calibration_error(&c, 1) - 0.2) < 1e-6);
    assert_true(fabs(di_spec_calibration_error(&c, -1) - 1.45 / 4) < 1e-6);
    assert_int_equal(c.n[0], 3);
    assert_int_equal(c.n_accepted[0], 2);
    assert_int_equal(c.n[1], 1);
    assert_int_equal(c.bins[7].n, 3);
    assert_int_equal(c.bins[7].n_accepted, 2);
    assert_true(fabs(di_spec_calibration_temperature(&c, 0) - 2) < 1e-6);
    const float ends[2] = {NAN, 1};
    di_spec_calibrate(&c, 2, ends, out);
    assert_true(out[0] == 0);
    assert_true(out[1] > 0.999f && out[1] <= 1);
}

/* However wrong a drafter is, a step moves ln T by at most 0.05, and T stays within 1/8 .. 8. */
static void calibration_is_bounded(void **state) {
    (void)state;
    di_spec_calibration c;
    di_spec_calibration_init(&c, 1, NULL);
    const float sure = 1;
    double before = di_spec_calibration_temperature(&c, 0);
    for (int k = 0; k < 5000; k++) {
        di_spec_calibration_learn(&c, 1, 0, &sure);
        double now = di_spec_calibration_temperature(&c, 0);
        assert_true(fabs(log(now / before)) <= 0.05 + 1e-12);
        assert_true(now <= 8.0001);
        before = now;
    }
    assert_true(before > 7.9);
    for (int k = 0; k < 50000; k++)
        di_spec_calibration_learn(&c, 1, 1, &sure);
    assert_true(di_spec_calibration_temperature(&c, 0) >= 0.1249);
    float out;
    di_spec_calibrate(&c, 1, &sure, &out);
    assert_true(isfinite(out));
}

static void temperatures_are_parsed(void **state) {
    (void)state;
    float out[3] = {9, 9, 9};
    di_error err = {0};
    di_test_ok(di_spec_temperatures_parse("1.5", 3, out, &err), &err);
    assert_true(out[0] == 1.5f && out[1] == 1.5f && out[2] == 1.5f);
    di_test_ok(di_spec_temperatures_parse("1,2.25,0.5", 3, out, &err), &err);
    assert_true(out[0] == 1 && out[1] == 2.25f && out[2] == 0.5f);
    const char *bad[] = {
        "",       "1,2",   "1,2,3,4",
        "1,2,3,", "1,,3",  "0",
        "-1,1,1", "x",     "nan",
        "1e99",   "1 ",    "inf",
        ",",      "1e-60", "1.00000000000000000000000000000000000000000000000000000000000000000000000"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(di_spec_temperatures_parse(bad[i], 3, out, &err), DI_ERR_ARG);
        assert_contains(err.message, bad[i]);
    }
    assert_true(out[0] == 1 && out[1] == 2.25f && out[2] == 0.5f);
}

DI_TEST_GROUP(spec_guard, cmocka_unit_test(guard_keeps_what_pays), cmocka_unit_test(guard_turns_off_and_tries_again),
              cmocka_unit_test(guard_forgets_old_rates), cmocka_unit_test(calibration_converges),
              cmocka_unit_test(calibration_by_hand), cmocka_unit_test(calibration_is_bounded),
              cmocka_unit_test(temperatures_are_parsed))
