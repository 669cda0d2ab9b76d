/* Drafts in the engine's core, on a model that checks what it is given: the distribution under rejection, every policy,
 * rows that are drawn on the device, steps that are measured before the first request, what is kept of them between
 * runs, constraints. */
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core_rig.h"
#include "engine/engine_internal.h"
#include "toy_grammar.h"

static di_core_options options_of(int32_t n_drafts, di_spec_policy policy) {
    return (di_core_options){.seqs_max = 4,
                             .batch_tokens_max = 256,
                             .chunk_max = 64,
                             .context_max = 1024,
                             .logits_max = 64,
                             .n_blocks = 32,
                             .draft_tokens = n_drafts,
                             .draft_policy = policy};
}

/* draws: by the operation sample_rows, as a device has it. */
static bench *open_drawing(const di_core_options *o, int quality, bool draws) {
    bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    sim_open(&b->m, 1);
    b->m.draws = b->m.follows = draws;
    b->m.has_drafts = true;
    b->m.draft_quality = quality;
    b->core = sim_core(&b->m, o);
    return b;
}

static bench *open_drafting(const di_core_options *o, int quality) {
    return open_drawing(o, quality, false);
}

/* ---- rejection ----------------------------------------------------------------------------------------------------
 */

enum { TOKENS = 3, GROUP = 16 };

/* A sanitizer looks at the steps, not at the distribution. */
static int n_samples(void) {
    return di_test_is_sanitized() ? 2000 : 20000;
}

/* The chances of tokens behind the value v, at a temperature. */
static void chances_of(uint64_t v, double temperature, double *p) {
    float logits[SIM_VOCAB];
    double sum = 0, most = -1e9;
    sim_logits(v, logits);
    for (int t = 0; t < SIM_VOCAB; t++)
        most = fmax(most, (double)logits[t]);
    for (int t = 0; t < SIM_VOCAB; t++)
        sum += p[t] = exp(((double)logits[t] - most) / temperature);
    for (int t = 0; t < SIM_VOCAB; t++)
        p[t] /= sum;
}

/* The exact distribution of each of the first three tokens behind a prompt. */
static void exact_marginals(uint64_t v, double temperature, double out[TOKENS][SIM_VOCAB]) {
    double first[SIM_VOCAB], second[SIM_VOCAB], third[SIM_VOCAB];
    memset(out, 0, sizeof(double) * TOKENS * SIM_VOCAB);
    chances_of(v, temperature, first);
    for (int a = 0; a < SIM_VOCAB; a++) {
        out[0][a] += first[a];
        uint64_t va = sim_value(v, a);
        chances_of(va, temperature, second);
        for (int b = 0; b < SIM_VOCAB; b++) {
            out[1][b] += first[a] * second[b];
            chances_of(sim_value(va, b), temperature, third);
            for (int c = 0; c < SIM_VOCAB; c++)
                out[2][c] += first[a] * second[b] * third[c];
        }
    }
}

/* Standard normal deviate that a chi-square value is about as unlikely as (Wilson and Hilferty). Cells of less than
 * eight expected are put together. */
static double deviate(const int *counts, const double *chances, int total) {
    double sum = 0, rest = 0, rest_count = 0;
    int cells = 0;
    for (int t = 0; t < SIM_VOCAB; t++) {
        double want = chances[t] * total;
        if (want < 8) {
            rest += want;
            rest_count += counts[t];
            continue;
        }
        sum += (counts[t] - want) * (counts[t] - want) / want;
        cells++;
    }
    if (rest >= 8) {
        sum += (rest_count - rest) * (rest_count - rest) / rest;
        cells++;
    }
    assert_true(cells >= 8);
    double n = cells - 1;
    return (cbrt(sum / n) - (1 - 2 / (9 * n))) / sqrt(2 / (9 * n));
}

static int counts[TOKENS][SIM_VOCAB];

static di_status count_tokens(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)user;
    (void)err;
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    assert_int_equal(gen->n_tokens, TOKENS);
    for (int i = 0; i < TOKENS; i++)
        counts[i][gen->tokens[i]]++;
    return DI_OK;
}

/* Three tokens each of many requests that differ in their seeds alone. */
static void check_distribution(di_spec_policy policy, int quality, bool is_sync) {
    const double temperature = 2;
    di_core_options o = options_of(3, policy);
    o.accept = DI_SPEC_REJECTION;
    o.is_sync = is_sync;
    o.seqs_max = GROUP;
    bench *b = open_drafting(&o, quality);
    int32_t prompt[] = {5, 7, 9, 11};
    uint64_t v = 0x1234; /* where the model begins */
    for (size_t i = 0; i < DI_COUNT(prompt); i++)
        v = sim_value(v, prompt[i]);
    double want[TOKENS][SIM_VOCAB];
    exact_marginals(v, temperature, want);
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < n_samples(); i++) {
        di_submission sub = {.ids = prompt, .n_ids = DI_COUNT(prompt), .callback = count_tokens};
        di_sampling_init(&sub.sampling);
        sub.sampling.temperature = temperature;
        sub.sampling.has_seed = true;
        sub.sampling.seed = (uint64_t)i + 1000000 * (uint64_t)policy;
        sub.sampling.max_tokens = TOKENS;
        sub.sampling.ignore_eos = true;
        di_error err = {0};
        di_test_ok(di_core_submit(b->core, &sub, NULL, &err), &err);
        if (i % GROUP == GROUP - 1)
            core_run(b->core);
    }
    core_run(b->core);
    for (int i = 0; i < TOKENS; i++) {
        double z = deviate(counts[i], want[i], n_samples());
        if (fabs(z) > 4)
            fail_msg("policy %d, quality %d, token %d: %g standard deviations off", (int)policy, quality, i, z);
    }
    /* Some held and some did not, or nothing was shown. How many the cost policy takes is the machine's affair. */
    di_core_stats s = core_stats(b->core);
    if (policy != DI_SPEC_COST) {
        assert_true(s.draft_tokens > n_samples() / 4);
        assert_true(s.accepted_tokens > 0 && s.accepted_tokens < s.draft_tokens);
    }
    bench_close(b);
}

static void rejection_keeps_the_distribution(void **state) {
    (void)state;
    check_distribution(DI_SPEC_FIXED, 0, true);
    check_distribution(DI_SPEC_FIXED, 6, false);
    check_distribution(DI_SPEC_COST, 8, false);
    check_distribution(DI_SPEC_REFERENCE, 4, true);
}

/* Greedy draws nothing, so that both ways agree; a seed draws the same without drafts in any company. */
static void rejection_without_chance_is_the_same(void **state) {
    (void)state;
    for (int mode = 0; mode < 2; mode++) {
        di_core_options o = options_of(4, DI_SPEC_FIXED);
        o.accept = mode ? DI_SPEC_REJECTION : DI_SPEC_COUPLED;
        bench *b = open_drafting(&o, 5);
        for (int i = 0; i < 6; i++) {
            call_make(&b->calls[i], 40 + i, 60, (uint64_t)i);
            call_start(b->core, &b->calls[i]);
        }
        core_run(b->core);
        for (int i = 0; i < 6; i++)
            call_check_alone(&b->calls[i]);
        assert_true(core_stats(b->core).accepted_tokens > 0);
        bench_close(b);
    }
}

/* ---- drawn on the device ------------------------------------------------------------------------------------------
 */

enum { DRAWN_CALLS = 8 };

/* Requests of every kind, by the host or by sample_rows: filters, penalties, bias, a minimum, a constraint, forks. */
static void draw_calls(const di_core_options *o, bool draws, const toy_grammar *g, call_sample *out,
                       di_core_stats *stats) {
    static const int32_t bias_ids[] = {9, 3, 9, 40};
    static const float bias_values[] = {2, -1, 0.5f, 3};
    bench *b = open_drawing(o, 5, draws);
    for (int i = 0; i < DRAWN_CALLS; i++) {
        call *c = &b->calls[i];
        call_make_drawn(c, 20 + 30 * i, 50, (uint64_t)i, i == 5 ? 3 : 1);
        di_sampling *s = &c->sub.sampling;
        s->n_logprobs = i % 3;
        s->logprobs_processed = i % 2;
        s->top_p = i % 4 == 1 ? 0.7 : 1;
        s->min_p = i % 4 == 2 ? 0.05 : 0;
        s->frequency_penalty = i % 4 == 3 ? 0.5 : 0;
        s->repetition_penalty = i == 3 ? 1.3 : 1;
        s->n_bias = i == 6 ? DI_COUNT(bias_ids) : 0;
        s->bias_ids = bias_ids;
        s->bias_values = bias_values;
        s->ignore_eos = false;
        s->min_tokens = i == 7 ? 30 : 0;
        c->sub.constraint = i == 4 ? &g->source : NULL;
        s->temperature = i == 2 ? 0 : 0.9;
        call_start(b->core, c);
    }
    core_run(b->core);
    for (int i = 0; i < DRAWN_CALLS; i++) {
        assert_int_not_equal(b->calls[i].samples[0].finish, DI_FINISH_ERROR);
        out[i] = b->calls[i].samples[0];
    }
    out[DRAWN_CALLS] = b->calls[5].samples[2];
    *stats = core_stats(b->core);
    assert_true((b->m.n_drawn > 0) == draws);
    bench_close(b);
}

/* Tokens, their log-probabilities and what held are the same, by either way of accepting drafts. */
static void drawing_on_the_device_is_the_same(void **state) {
    (void)state;
    toy_grammar g;
    toy_init(&g, SIM_VOCAB, SIM_EOS, 1);
    uint32_t blacklist[SIM_VOCAB / 32 + 1] = {1u << 11 | 1u << 30};
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = options_of(mode % 2 ? 4 : 0, DI_SPEC_FIXED);
        o.accept = mode / 2 ? DI_SPEC_REJECTION : DI_SPEC_COUPLED;
        o.blacklist = blacklist;
        o.n_blocks = 6; /* some lose their memory, and with it what drafts were drawn from */
        o.is_sync = true;
        call_sample(*samples)[DRAWN_CALLS + 1] = calloc(2, sizeof *samples);
        assert_non_null(samples);
        di_core_stats stats[2];
        for (int draws = 0; draws < 2; draws++)
            draw_calls(&o, draws, &g, samples[draws], &stats[draws]);
        for (int i = 0; i <= DRAWN_CALLS; i++)
            sample_check_same(&samples[1][i], &samples[0][i]);
        assert_int_equal(stats[1].accepted_tokens, stats[0].accepted_tokens);
        assert_int_equal(stats[1].draft_tokens, stats[0].draft_tokens);
        assert_true(stats[1].expected_sum == stats[0].expected_sum && stats[1].bound_sum == stats[0].bound_sum);
        assert_true(mode % 2 == 0 || stats[0].accepted_tokens > 0);
        assert_true(mode != 3 || stats[0].n_tested > 0);
        free(samples);
    }
}

/* ---- measured before the first request ----------------------------------------------------------------------------
 */

/* Memory that was measured on is as good as new, whatever was left in it; the sums of the first steps are known. */
static void measuring_leaves_nothing_behind(void **state) {
    (void)state;
    for (int policy = DI_SPEC_COST; policy <= DI_SPEC_REFERENCE; policy++) {
        di_core_options o = options_of(5, (di_spec_policy)policy);
        o.measure_ns = (int64_t)20 * 1000000000;
        o.has_prefix_cache = true;
        o.n_snapshots = 2;
        bench *b = open_drafting(&o, 7);
        assert_true(b->m.n_forwards > 10);
        if (policy == DI_SPEC_COST)
            assert_true(di_spec_cost_is_ready(&b->core->runner.cost) &&
                        di_spec_cost_draft_is_ready(&b->core->runner.cost));
        else
            assert_int_equal(di_spec_curve_rows(b->core->runner.curve, 4 * 6), 4 * 6);
        for (int i = 0; i < 8; i++) {
            call_make_drawn(&b->calls[i], 150 + 20 * i, 40, (uint64_t)i, 1);
            call_start(b->core, &b->calls[i]);
        }
        core_run(b->core);
        for (int i = 0; i < 8; i++)
            call_check_alone(&b->calls[i]);
        bench_close(b);
    }
}

/* The table ends before the steps do, or there is none: nobody reads behind its end. */
static void a_table_may_be_too_short(void **state) {
    (void)state;
    for (int n_points = 0; n_points <= 2; n_points++) {
        di_core_options o = options_of(5, DI_SPEC_REFERENCE);
        bench *b = open_drafting(&o, 7);
        const int32_t rows[] = {1, 2};
        const double ns[] = {1000, 1100};
        di_error err = {0};
        di_test_ok(di_spec_curve_init(b->core->runner.curve, n_points, rows, ns, &err), &err);
        for (int i = 0; i < 8; i++) {
            call_make_drawn(&b->calls[i], 10 + i, 60, (uint64_t)i, 1);
            call_start(b->core, &b->calls[i]);
        }
        core_run(b->core);
        for (int i = 0; i < 8; i++)
            call_check_alone(&b->calls[i]);
        /* Without a table all are verified; with one that ends at two rows, none of several sequences'. */
        if (n_points == 0)
            assert_true(core_stats(b->core).draft_tokens > 0);
        bench_close(b);
    }
}

/* ---- when drafts are decided on -----------------------------------------------------------------------------------
 */

/* Nothing but what is given of step times. The runner is idle between requests. */
static void forget_times(bench *b) {
    di_spec_cost *cost = &b->core->runner.cost;
    di_spec_experts step = cost->step_experts, draft = cost->draft_experts;
    di_spec_cost_init(cost, &step, &draft, cost->n_drafts, cost->rows_max);
}

/* As long as nothing is known, drafts are worth trying: an answer shorter than the steps that may follow in a row has
 * them too, also behind one that ended. */
static void an_answer_drafts_from_its_first_token(void **state) {
    (void)state;
    di_core_options o = options_of(5, DI_SPEC_COST);
    bench *b = open_drawing(&o, 8, true);
    for (int i = 0; i < 3; i++) {
        int64_t n_before = b->m.n_rounds;
        forget_times(b);
        call_make_drawn(&b->calls[i], 20, 12, (uint64_t)i, 1);
        b->calls[i].sub.sampling.ignore_eos = true;
        call_start(b->core, &b->calls[i]);
        core_run(b->core);
        call_check_alone(&b->calls[i]);
        assert_true(b->m.n_rounds - n_before >= 2);
    }
    bench_close(b);
}

/* Steps that follow, those that draft, and those whose time is none that comes again, are told apart. */
static void times_of_one_kind_are_learnt_together(void **state) {
    (void)state;
    for (int is_unrecorded = 0; is_unrecorded <= 1; is_unrecorded++) {
        di_core_options o = options_of(5, DI_SPEC_COST);
        bench *b = calloc(1, sizeof *b);
        assert_non_null(b);
        sim_open(&b->m, 1);
        b->m.draws = b->m.follows = b->m.has_drafts = true;
        b->m.draft_quality = 4;
        b->m.is_unrecorded = is_unrecorded;
        b->core = sim_core(&b->m, &o);
        di_spec_cost *cost = &b->core->runner.cost;
        for (int k = 0; k < 8; k++) { /* drafts are hopeless, so that all but probes follows */
            di_spec_cost_learn_step(cost, 1 + k % 2, 20, 1000000 * (1 + k % 2));
            di_spec_cost_learn_draft(cost, 1, 1000000000);
        }
        /* How many follow is the scheduling's matter: on a busy machine few of an answer's. */
        for (int i = 0; i < (int)DI_COUNT(b->calls) && b->m.n_fed < 100; i++) {
            call_make_drawn(&b->calls[i], 20, 200, (uint64_t)i, 1);
            b->calls[i].sub.sampling.ignore_eos = true;
            call_start(b->core, &b->calls[i]);
            core_run(b->core);
            call_check_alone(&b->calls[i]);
        }
        assert_true(b->m.n_fed >= 20);
        assert_int_equal(di_spec_cost_plain_is_seen(cost, 1), !is_unrecorded);
        int64_t n_learnt = cost->step.n_steps - 8;
        assert_true(is_unrecorded ? n_learnt == 0 : n_learnt > 0 && n_learnt <= b->m.n_forwards - b->m.n_fed);
        bench_close(b);
    }
}

/* ---- kept between runs --------------------------------------------------------------------------------------------
 */

static void check_file(const char *dir, const char *name, const char *text) {
    char path[512];
    di_strbuf read = {0};
    di_error err = {0};
    snprintf(path, sizeof path, "%s/%s", dir, name);
    di_test_ok(di_file_read(path, 1 << 10, &read, &err), &err);
    assert_string_equal(di_strbuf_str(&read), text);
    di_strbuf_deinit(&read);
    assert_int_equal(unlink(path), 0);
}

static void write_file(const char *dir, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0 && fclose(f) == 0);
}

static void run_once(const di_core_options *o, bool expects_measuring) {
    bench *b = open_drafting(o, 7);
    assert_true((b->m.n_forwards > 0) == expects_measuring);
    assert_true(di_spec_cost_is_ready(&b->core->runner.cost));
    for (int i = 0; i < 8; i++) {
        call_make_drawn(&b->calls[i], 20, 60, (uint64_t)i, 1);
        call_start(b->core, &b->calls[i]);
    }
    core_run(b->core);
    bench_close(b);
}

/* What one engine has learnt the next one knows, of the same machine and model alone; other files of the folder stay as
 * they are, whatever they are called. */
static void step_times_outlive_an_engine(void **state) {
    (void)state;
    static const char *const foreign[] = {"notes.txt", "00000000000000000000000000000000.cost", "a.cost.tmp"};
    const char *dir = di_test_tmp("step_times");
    assert_int_equal(mkdir(dir, 0700), 0);
    for (size_t i = 0; i < DI_COUNT(foreign); i++)
        write_file(dir, foreign[i], "mine");
    di_core_options o = options_of(5, DI_SPEC_COST);
    o.measure_ns = (int64_t)20 * 1000000000;
    o.step_times_dir = dir;
    o.step_times_ttl_s = 1000;
    o.step_times_key[0] = 1;
    run_once(&o, true);
    run_once(&o, false);
    o.step_times_key[0] = 2; /* another machine */
    run_once(&o, true);
    for (size_t i = 0; i < DI_COUNT(foreign); i++)
        check_file(dir, foreign[i], "mine");
}

/* ---- constraints --------------------------------------------------------------------------------------------------
 */

/* Tokens that are certain need no step of their own, without a draft module too. */
static void certain_tokens_come_along(void **state) {
    (void)state;
    di_core_options o = options_of(0, DI_SPEC_COST);
    bench *b = bench_open(&o);
    toy_grammar g;
    toy_init(&g, SIM_VOCAB, SIM_EOS, 2);
    call *c = &b->calls[0];
    call_make_drawn(c, 30, 200, 3, 1);
    c->sub.constraint = &g.source;
    call_start(b->core, c);
    core_run(b->core);
    assert_int_equal(c->samples[0].n_done, 1);
    assert_true(toy_follows(&g, c->samples[0].tokens, c->samples[0].n_tokens));
    di_core_stats s = core_stats(b->core);
    assert_true(s.accepted_tokens > 0);
    assert_int_equal(s.accepted_tokens, s.draft_tokens);
    int64_t n_tokens = c->samples[0].n_tokens;
    assert_true(s.n_steps <= n_tokens - s.accepted_tokens + 2);
    bench_close(b);
}

/* A constraint that breaks, or that what is given breaks, ends its own request. */
static di_status fail_mask(void *self, uint32_t *mask, int32_t *only, di_error *err) {
    toy_matcher *m = self;
    if (m->n >= 5)
        return di_fail(err, DI_ERR_RANGE, "the grammar takes too much");
    return toy_mask(self, mask, only, err);
}

static di_status open_failing(void *self, di_constraint *out, di_error *err) {
    di_status st = toy_open(self, out, err);
    out->mask = fail_mask;
    return st;
}

static void a_constraint_fails_alone(void **state) {
    (void)state;
    for (int n_drafts = 0; n_drafts <= 4; n_drafts += 4) {
        di_core_options o = options_of(n_drafts, DI_SPEC_FIXED);
        bench *b = open_drafting(&o, 7);
        toy_grammar g;
        toy_init(&g, SIM_VOCAB, SIM_EOS, 2);
        di_constraint_source failing = {.self = &g, .open = open_failing};
        int32_t given[3] = {0};
        while (toy_allows(&g, 0, given[0]))
            given[0]++;
        for (int i = 0; i < 4; i++) {
            call_make_drawn(&b->calls[i], 30, 40, 10 + (uint64_t)i, 1);
            b->calls[i].sub.constraint = i == 1 ? &failing : &g.source;
            if (i == 2)
                b->calls[i].sub.forced_first = given, b->calls[i].sub.n_forced_first = 1;
            call_start(b->core, &b->calls[i]);
        }
        core_run(b->core);
        for (int i = 0; i < 4; i += 3) {
            assert_int_not_equal(b->calls[i].samples[0].finish, DI_FINISH_ERROR);
            assert_true(toy_follows(&g, b->calls[i].samples[0].tokens, b->calls[i].samples[0].n_tokens));
        }
        assert_int_equal(b->calls[1].samples[0].error.code, DI_ERR_RANGE);
        assert_non_null(strstr(b->calls[1].samples[0].error.message, "the grammar takes too much"));
        assert_int_equal(b->calls[2].samples[0].error.code, DI_ERR_REQUEST);
        assert_non_null(strstr(b->calls[2].samples[0].error.message, "does not allow it"));
        bench_close(b);
    }
}

/* An end mark that the constraint allows ends the output, also where the request would go on behind one. */
static void an_end_mark_ends_what_is_constrained(void **state) {
    (void)state;
    int n_stopped = 0;
    for (int n_drafts = 0; n_drafts <= 5; n_drafts += 5) {
        di_core_options o = options_of(n_drafts, DI_SPEC_FIXED);
        bench *b = open_drafting(&o, 8);
        toy_grammar g;
        toy_init(&g, SIM_VOCAB, SIM_EOS, 6);
        for (int i = 0; i < 12; i++) {
            call_make_drawn(&b->calls[i], 30, 300, 50 + (uint64_t)i, 1);
            b->calls[i].sub.sampling.ignore_eos = i % 2;
            b->calls[i].sub.sampling.temperature = 3;
            b->calls[i].sub.constraint = &g.source;
            call_start(b->core, &b->calls[i]);
        }
        core_run(b->core);
        for (int i = 0; i < 12; i++) {
            const call_sample *s = &b->calls[i].samples[0];
            assert_int_not_equal(s->finish, DI_FINISH_ERROR);
            assert_true(toy_follows(&g, s->tokens, s->n_tokens));
            n_stopped += s->finish == DI_FINISH_STOP;
            if (s->finish == DI_FINISH_STOP)
                assert_int_equal(s->tokens[s->n_tokens - 1], SIM_EOS);
        }
        bench_close(b);
    }
    assert_true(n_stopped > 4);
}

DI_TEST_GROUP(core_rejection, cmocka_unit_test(rejection_keeps_the_distribution),
              cmocka_unit_test(rejection_without_chance_is_the_same));
DI_TEST_GROUP(core_drawing, cmocka_unit_test(drawing_on_the_device_is_the_same));
DI_TEST_GROUP(core_drafting, cmocka_unit_test(an_answer_drafts_from_its_first_token),
              cmocka_unit_test(times_of_one_kind_are_learnt_together));
DI_TEST_GROUP(core_step_times, cmocka_unit_test(measuring_leaves_nothing_behind),
              cmocka_unit_test(a_table_may_be_too_short), cmocka_unit_test(step_times_outlive_an_engine));
DI_TEST_GROUP(core_constraint, cmocka_unit_test(certain_tokens_come_along), cmocka_unit_test(a_constraint_fails_alone),
              cmocka_unit_test(an_end_mark_ends_what_is_constrained));
