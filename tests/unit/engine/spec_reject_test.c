/* Acceptance by rejection: published uniforms, the test and the draws by hand, and the distribution that results. */
#include "engine/spec/spec.h"
#include "harness.h"

static void uniforms_are_the_published_ones(void **state) {
    (void)state;
    /* model.md 9 */
    assert_true(di_spec_uniform(7, 10, DI_SPEC_DRAW) == 0.1847424639716264);
    assert_true(di_spec_uniform(7, 10, DI_SPEC_REDRAW) == 0.49609991659072894);
    assert_true(di_spec_uniform(7, 10, DI_SPEC_TEST) == 0.383183470679777);
    assert_true(di_spec_uniform(0, 0, DI_SPEC_DRAW) == 0.8833108082136426);
    assert_true(di_spec_uniform(UINT64_MAX, 131072, DI_SPEC_DRAW) == 0.8015986993882009);
    /* Rows are 10000019 apart, wrapping in 32 bits: 300 * 10000019 = 3000005700 = 2^32 - 1294961596. */
    assert_int_equal(di_spec_position(5, 0), 5);
    assert_int_equal(di_spec_position(5, 2), 20000043);
    assert_int_equal(di_spec_position(0, 300), -1294961596);
}

static void test_by_hand(void **state) {
    (void)state;
    const float half = logf(0.5f), tenth = logf(0.1f);
    assert_true(di_spec_accepts(0.5f, half, 0.999));   /* p = q: always */
    assert_true(di_spec_accepts(0.9f, half, 0.999));   /* p > q */
    assert_true(di_spec_accepts(0.25f, half, 0.4999)); /* chance 1/2 */
    assert_false(di_spec_accepts(0.25f, half, 0.5001));
    assert_true(di_spec_accepts(0.01f, tenth, 0.0999));
    assert_false(di_spec_accepts(0.01f, tenth, 0.1001));
    assert_false(di_spec_accepts(0, half, 0)); /* masked */
    assert_false(di_spec_accepts(0, -INFINITY, 0));
    assert_false(di_spec_accepts(0.5f, NAN, 0));
}

static void draws_by_hand(void **state) {
    (void)state;
    const float p[4] = {0, 0.25f, 0.5f, 0.25f};
    assert_int_equal(di_spec_draw(p, 4, 0), 1);
    assert_int_equal(di_spec_draw(p, 4, 0.2499), 1);
    assert_int_equal(di_spec_draw(p, 4, 0.25), 2); /* the cumulative one has to exceed it */
    assert_int_equal(di_spec_draw(p, 4, 0.7499), 2);
    assert_int_equal(di_spec_draw(p, 4, 0.75), 3);
    assert_int_equal(di_spec_draw(p, 4, 1 - 0x1p-53), 3);
    const float zero[2] = {0, 0};
    assert_int_equal(di_spec_draw(zero, 2, 0.5), -1);
    /* q = .1 .6 .1 .2: residuals 0 0 .4 .05, all a little more: 5e-5 of q. */
    const float ln_q[4] = {logf(0.1f), logf(0.6f), logf(0.1f), logf(0.2f)};
    double residual;
    assert_int_equal(di_spec_redraw(p, ln_q, 4, 0, &residual), 2);
    assert_true(fabs(residual - 0.45 - 0.3 * 5e-5) < 1e-7);
    assert_int_equal(di_spec_redraw(p, ln_q, 4, 0.888, NULL), 2); /* 0.4 / 0.45 = 0.8889 */
    assert_int_equal(di_spec_redraw(p, ln_q, 4, 0.89, NULL), 3);
    /* p = q: the penalty leaves 5e-5 of each. */
    const float same[4] = {-INFINITY, logf(0.25f), logf(0.5f), logf(0.25f)};
    assert_int_equal(di_spec_redraw(p, same, 4, 0.3, &residual), 2);
    assert_true(fabs(residual / 5e-5 - 1) < 0.02); /* ulps of p are 6e-8 / 5e-5 of it */
    /* Nothing left anywhere: the first maximum of p. */
    const float above[4] = {0, 0, 0, 0}, level[4] = {0.2f, 0.4f, 0.4f, 0};
    assert_int_equal(di_spec_redraw(level, above, 4, 0.99, &residual), 1);
    assert_true(residual == 0);
    /* Without a stored distribution p alone. */
    assert_int_equal(di_spec_redraw(p, NULL, 4, 0.8, &residual), 3);
    assert_true(residual == 1);
}

static void rows_take_their_own_uniforms(void **state) {
    (void)state;
    const float p[2] = {0.5f, 0.5f}, ln_q[2] = {0, -INFINITY};
    int n_accepted = 0;
    for (uint64_t seed = 0; seed < 200; seed++) {
        di_spec_row row = {.seed = seed, .first = 10, .row = 2, .n_vocab = 2, .p = p, .draft = 0, .ln_q = ln_q};
        int32_t token = -1;
        bool is_accepted = di_spec_row_token(&row, &token);
        /* Accepted with chance 1/2; a rejected one becomes the token that the draft never gives. */
        assert_true(is_accepted == (di_spec_uniform(seed, 20000048, DI_SPEC_TEST) < 0.5));
        assert_int_equal(token, is_accepted ? 0 : 1);
        n_accepted += is_accepted;
        row.is_last = true;
        assert_false(di_spec_row_token(&row, &token));
        assert_int_equal(token, di_spec_uniform(seed, 20000048, DI_SPEC_DRAW) < 0.5 ? 0 : 1);
        row.is_last = false;
        row.draft = -1; /* none: rejected, and drawn by case 1 */
        row.ln_q = NULL;
        assert_false(di_spec_row_token(&row, &token));
        assert_int_equal(token, di_spec_uniform(seed, 20000048, DI_SPEC_REDRAW) < 0.5 ? 0 : 1);
    }
    assert_in_range(n_accepted, 70, 130); /* 100 +- 4 sigma of 7 */
}

enum { VOCAB = 9, DRAFTS = 3, ROUNDS = 60000 };

/* A distribution that depends on the token before it; some tokens have none of it, as after top-k. */
static void distribution_random(uint64_t *rng, float *p) {
    double sum = 0, w[VOCAB];
    for (int t = 0; t < VOCAB; t++) {
        double u = di_test_random_unit(rng);
        w[t] = u < 0.2 ? 0 : u * u;
        sum += w[t];
    }
    w[0] += sum > 0 ? 0 : 1;
    sum += sum > 0 ? 0 : 1;
    for (int t = 0; t < VOCAB; t++)
        p[t] = (float)(w[t] / sum);
}

/* Chi-square of counts against chances; *cells is what it has. Cells of less than five expected are put together. */
static double chi_square(const int *counts, const double *chances, int n, int total, int *cells) {
    double sum = 0, rest_count = 0, rest = 0;
    *cells = 0;
    for (int i = 0; i < n; i++) {
        double want = chances[i] * total;
        if (want < 5) {
            rest += want;
            rest_count += counts[i];
            if (want == 0)
                assert_int_equal(counts[i], 0);
            continue;
        }
        sum += (counts[i] - want) * (counts[i] - want) / want;
        (*cells)++;
    }
    if (rest >= 5) {
        sum += (rest_count - rest) * (rest_count - rest) / rest;
        (*cells)++;
    }
    return sum;
}

/* Rounds of three drafts from one chain of distributions, verified against another. The first two tokens of a round's
 * output, with what the next round would draw where it was one token only, are distributed as the target's chain. */
DI_PROPERTY(output_has_the_target_distribution, 6) {
    uint64_t rng = seed;
    static float p[VOCAB][VOCAB], q[VOCAB][VOCAB], ln_q[VOCAB][VOCAB];
    for (int t = 0; t < VOCAB; t++) {
        distribution_random(&rng, p[t]);
        distribution_random(&rng, q[t]);
        for (int k = 0; k < VOCAB; k++) {
            q[t][k] = 0.5f * (p[t][k] + q[t][k]); /* related, so that several drafts in a row are accepted */
            ln_q[t][k] = logf(q[t][k]);
        }
    }
    int n_rounds = di_test_is_sanitized() ? ROUNDS / 6 : ROUNDS;
    int first[VOCAB] = {0}, pairs[VOCAB * VOCAB] = {0};
    double expected = 0;
    int n_accepted = 0;
    for (int round = 0; round < n_rounds; round++) {
        uint64_t id = seed * 1000003 + (uint64_t)round;
        int32_t drafts[DRAFTS], tokens[DRAFTS + 1], before = 0;
        for (int j = 0; j < DRAFTS; j++) {
            drafts[j] = di_spec_draw(q[before], VOCAB, di_spec_uniform(id + DI_SPEC_DRAFT_SEED, 100 + j, DI_SPEC_DRAW));
            before = drafts[j];
        }
        int n = 0;
        before = 0;
        for (bool goes_on = true; goes_on; n++) {
            di_spec_row row = {.seed = id, .first = 100, .row = n, .n_vocab = VOCAB, .p = p[before]};
            row.is_last = n == DRAFTS;
            row.draft = row.is_last ? -1 : drafts[n];
            row.ln_q = row.is_last ? NULL : ln_q[before];
            if (n == 0) {
                double residual;
                di_spec_redraw(row.p, row.ln_q, VOCAB, 0, &residual);
                expected += 1 - residual;
            }
            goes_on = di_spec_row_token(&row, &tokens[n]);
            before = tokens[n];
            n_accepted += n == 0 && goes_on;
        }
        if (n == 1) /* the next round's first token */
            tokens[1] = di_spec_draw(p[tokens[0]], VOCAB, di_spec_uniform(id, 101, DI_SPEC_DRAW));
        first[tokens[0]]++;
        pairs[tokens[0] * VOCAB + tokens[1]]++;
    }
    double chances[VOCAB], pair_chances[VOCAB * VOCAB];
    for (int t = 0; t < VOCAB; t++) {
        chances[t] = (double)p[0][t];
        for (int k = 0; k < VOCAB; k++)
            pair_chances[t * VOCAB + k] = (double)p[0][t] * (double)p[t][k];
    }
    /* Chi-square has mean k and variance 2k with k degrees of freedom: five sigmas are below 1 in 10000 here. */
    int cells;
    double chi = chi_square(first, chances, VOCAB, n_rounds, &cells);
    assert_true(chi < cells - 1 + 5 * sqrt(2.0 * DI_MAX(cells - 1, 1)));
    chi = chi_square(pairs, pair_chances, VOCAB * VOCAB, n_rounds, &cells);
    assert_true(chi < cells - 1 + 5 * sqrt(2.0 * DI_MAX(cells - 1, 1)));
    /* As many are accepted as the residuals say, within five sigmas. */
    assert_true(fabs(n_accepted - expected) < 5 * sqrt(0.25 * n_rounds));
}

DI_TEST_GROUP(spec_reject, cmocka_unit_test(uniforms_are_the_published_ones), cmocka_unit_test(test_by_hand),
              cmocka_unit_test(draws_by_hand), cmocka_unit_test(rows_take_their_own_uniforms),
              cmocka_unit_test(output_has_the_target_distribution))
