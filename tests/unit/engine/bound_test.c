/* What speculation can bring by the model of costs, against sums by hand. */
#include "core_rig.h"
#include "engine/engine_internal.h"

enum { DRAFTS = 4 };

static bench *open_core(int32_t n_drafts) {
    di_core_options o = {.seqs_max = 2,
                         .batch_tokens_max = 64,
                         .chunk_max = 64,
                         .context_max = 256,
                         .logits_max = 16,
                         .n_blocks = 8,
                         .draft_tokens = n_drafts,
                         .draft_policy = DI_SPEC_COST};
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    sim_open(&b->m, 1);
    b->m.has_drafts = n_drafts > 0;
    b->core = sim_core(&b->m, &o);
    return b;
}

/* A machine on which a step takes 10 and one for each row, and a drafting round `draft`, in tenths of ms. */
static void set_times(di_core *core, int64_t draft) {
    di_spec_cost *cost = &core->runner.cost;
    di_spec_experts dense = {0};
    di_spec_cost_init(cost, &dense, &dense, DRAFTS, 64);
    for (int run = 0; run < 4; run++) {
        for (int64_t n = 1; n <= 8; n *= 2)
            di_spec_cost_learn_step(cost, n, n, (10 + n) * 100000);
        di_spec_cost_learn_draft(cost, 1, draft * 100000);
    }
}

static void bound_is_that_of_the_best_length(void **state) {
    (void)state;
    bench *b = open_core(DRAFTS);
    /* Chances with all before: 0.9, 0.5, 0.25, 0.01. */
    di_core_stats held = {.verified_at = {1000, 1000, 1000, 1000}, .accepted_at = {900, 500, 250, 10}};
    set_times(b->core, 2);
    /* Three drafts: (1 + 0.9 + 0.5 + 0.25) tokens in 14 + 2, against one in 11; two: 2.4 in 15; four: 2.66 in 17. */
    assert_float_equal(di_core_speedup_bound(b->core, &held, 0), 2.65 * 11 / 16, 1e-3);
    /* What was never verified ends the list. */
    held.verified_at[1] = 0;
    assert_float_equal(di_core_speedup_bound(b->core, &held, 0), 1.9 * 11 / 14, 1e-3);
    bench_close(b);
}

static void drafts_that_do_not_pay_are_left_out(void **state) {
    (void)state;
    bench *b = open_core(DRAFTS);
    di_core_stats held = {.verified_at = {1000, 1000}, .accepted_at = {400, 100}};
    set_times(b->core, 40);
    assert_float_equal(di_core_speedup_bound(b->core, &held, 0), 1, 0);
    bench_close(b);
    b = open_core(0); /* no draft module */
    assert_float_equal(di_core_speedup_bound(b->core, &held, 0), 1, 0);
    bench_close(b);
}

static void nothing_is_said_before_times_are_known(void **state) {
    (void)state;
    bench *b = open_core(DRAFTS); /* without measuring */
    di_core_stats held = {.verified_at = {1000}, .accepted_at = {900}};
    assert_float_equal(di_core_speedup_bound(b->core, &held, 0), 0, 0);
    bench_close(b);
}

DI_TEST_GROUP(bound, cmocka_unit_test(bound_is_that_of_the_best_length),
              cmocka_unit_test(drafts_that_do_not_pay_are_left_out),
              cmocka_unit_test(nothing_is_said_before_times_are_known));
