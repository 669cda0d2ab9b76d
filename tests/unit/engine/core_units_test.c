/* Units: spans of a prompt that one step runs as a whole, whatever chunks, budgets and cached prefixes would have it.
 * The model of core_sim.h ends the program when one is split. */
#include "core_rig.h"
#include "harness.h"

enum { UNIT = 1 }; /* a token that prompts of core_rig.h don't have */

static void put_unit(call *c, const di_span *unit) {
    for (int64_t i = unit->at; i < unit->at + unit->n; i++)
        c->prompt[i] = UNIT;
}

static void units_are_run_whole(void **state) {
    (void)state;
    sim m;
    sim_open(&m, 1);
    m.unit_token = UNIT;
    m.units_end = 500;
    di_core_options o = core_ample();
    o.seqs_max = 3;
    o.batch_tokens_max = 100;
    o.chunk_max = 64;
    o.has_prefix_cache = true;
    o.n_snapshots = 8;
    o.is_sync = false;
    di_core *core = sim_core(&m, &o);
    static const di_span units[] = {{0, 10}, {60, 20}, {120, 30}, {251, 64}, {400, 1}};
    call *c = calloc(4, sizeof *c);
    assert_non_null(c);
    for (int i = 0; i < 4; i++) {
        call_make(&c[i], 500 + (size_t)i * 7, 30, 1); /* one stem: later ones start behind what is known of it */
        for (size_t k = 0; k < DI_COUNT(units); k++)
            put_unit(&c[i], &units[k]);
        c[i].sub.units = units;
        c[i].sub.n_units = DI_COUNT(units);
        call_start(core, &c[i]);
        if (i == 0)
            core_run(core);
    }
    core_run(core);
    for (int i = 0; i < 4; i++)
        call_check_alone(&c[i]);
    assert_true(c[3].samples[0].n_cached > 0);
    free(c);
    di_core_destroy(core);
    sim_close(&m);
}

static void units_that_fit_no_step_are_refused(void **state) {
    (void)state;
    sim m;
    sim_open(&m, 1);
    di_core_options o = core_ample();
    o.seqs_max = 4;
    o.batch_tokens_max = 50;
    di_core *core = sim_core(&m, &o);
    static const struct {
        di_span units[2];
        size_t n;
        const char *want;
    } cases[] = {
        {{{3, 48}}, 1, "unit 0: 48 tokens that must be run at once, a step has room for 47"},
        {{{90, 11}}, 1, "unit 0: 11 positions from 90, expected rising spans within a prompt of 100 tokens"},
        {{{-1, 4}}, 1, "unit 0: 4 positions from -1"},
        {{{5, 0}}, 1, "unit 0: 0 positions from 5"},
        {{{5, 10}, {14, 3}}, 2, "unit 1: 3 positions from 14"},
        {{{5, INT64_MAX}}, 1, "unit 0: 9223372036854775807 positions from 5"},
    };
    call *c = calloc(1, sizeof *c);
    assert_non_null(c);
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_error err = {.message = ""};
        call_make(c, 100, 4, 1);
        c->sub.units = cases[i].units;
        c->sub.n_units = cases[i].n;
        assert_int_equal(call_submit(core, c, &err), DI_ERR_REQUEST);
        assert_non_null(strstr(err.message, cases[i].want));
    }
    free(c);
    di_core_destroy(core);
    sim_close(&m);
}

DI_TEST_GROUP(core_units, cmocka_unit_test(units_are_run_whole), cmocka_unit_test(units_that_fit_no_step_are_refused));
