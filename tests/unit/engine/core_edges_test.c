/* The engine's core at its edges: late stops, forks in every situation, lengths at borders, memory for exactly one,
 * what callbacks may do, and ends at any moment. On the model of core_sim.h; what is expected is what each request
 * gives alone with ample memory. */
#include "core_rig.h"

static di_core_options edge_options(int mode) {
    return (di_core_options){.seqs_max = 4,
                             .batch_tokens_max = 256,
                             .chunk_max = 48,
                             .context_max = 1024,
                             .logits_max = 4,
                             .n_blocks = 40,
                             .n_snapshots = 4,
                             .is_sync = mode & 1,
                             .has_prefix_cache = mode & 2};
}

static void start_and_run(bench *b, int n) {
    for (int i = 0; i < n; i++)
        call_start(b->core, &b->calls[i]);
    core_run(b->core);
}

/* What c gives with nothing special about it. */
static call *alone_of(const call *c) {
    call *one = malloc(sizeof *one);
    assert_non_null(one);
    *one = *c;
    sim m;
    sim_open(&m, 1);
    di_core_options o = core_ample();
    di_core *core = sim_core(&m, &o);
    call_start(core, one);
    core_run(core);
    di_core_destroy(core);
    sim_close(&m);
    return one;
}

/* ---- stops ---------------------------------------------------------------------------------------------------------
 */

/* The row behind the stop was run in vain: its token is dropped, and what its blocks held is nobody's. */
static void late_stop_leaves_no_trace(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        bench *b = bench_open(&o);
        for (int i = 0; i < 4; i++) /* answers that end around the border of a block */
            call_make(&b->calls[i], 120 + i, 60, (uint64_t)i);
        call *free_run = alone_of(&b->calls[1]);
        int64_t at = 0;
        int32_t stop_id = -1;
        for (int64_t i = 5; i < 10 && stop_id < 0; i++) { /* one that has not come before */
            stop_id = free_run->samples[0].tokens[i];
            for (int64_t k = 0; k < i; k++)
                stop_id = free_run->samples[0].tokens[k] == stop_id ? -1 : stop_id;
            at = i;
        }
        assert_true(stop_id >= 0);
        b->calls[1].sub.sampling.stop_tokens = &stop_id;
        b->calls[1].sub.sampling.n_stop_tokens = 1;
        start_and_run(b, 4);
        const call_sample *s = &b->calls[1].samples[0];
        assert_int_equal(s->finish, DI_FINISH_STOP);
        assert_int_equal(s->stop_token, stop_id);
        assert_int_equal(s->n_tokens, at + 1);
        assert_memory_equal(s->tokens, free_run->samples[0].tokens, (size_t)(at + 1) * sizeof *s->tokens);
        assert_int_equal(core_stats(b->core).n_dropped, o.is_sync ? 0 : 1);
        for (int i = 0; i < 4; i++)
            call_check_alone(&b->calls[i]);
        free(free_run);
        bench_close(b);
    }
}

static void stop_tokens_wait_for_min_tokens(void **state) {
    (void)state;
    di_core_options o = edge_options(2);
    bench *b = bench_open(&o);
    int32_t most[SIM_VOCAB - 4];
    for (int32_t t = 0; t < (int32_t)DI_COUNT(most); t++)
        most[t] = t + 4; /* all but ids 0 to 3 end the answer, the end mark (1) too */
    for (int i = 0; i < 3; i++) {
        call *c = &b->calls[i];
        call_make_drawn(c, 100, 60, (uint64_t)i, 2);
        c->sub.sampling.ignore_eos = false;
        c->sub.sampling.min_tokens = 12 + i;
        c->sub.sampling.stop_tokens = most;
        c->sub.sampling.n_stop_tokens = DI_COUNT(most);
    }
    start_and_run(b, 3);
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 2; j++) {
            const call_sample *s = &b->calls[i].samples[j];
            assert_true(s->n_tokens > 12 + i);
            for (int k = 0; k < 12 + i; k++)
                assert_true(s->tokens[k] < 4 && s->tokens[k] != SIM_EOS);
        }
        call_check_alone(&b->calls[i]);
    }
    bench_close(b);
}

static void forced_tokens_come_first_and_the_rest_follows_from_them(void **state) {
    (void)state;
    static const int32_t forced[] = {11, 12, 13, 11, 12};
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        bench *b = bench_open(&o);
        call *c = &b->calls[0], *longer = &b->calls[1];
        call_make(c, 126, 30, 4);
        call_make(longer, 126, 25, 4);
        memcpy(longer->prompt + 126, forced, sizeof forced);
        longer->sub.n_ids += DI_COUNT(forced);
        c->sub.forced_first = forced;
        c->sub.n_forced_first = DI_COUNT(forced);
        start_and_run(b, 2);
        const call_sample *s = &c->samples[0], *rest = &longer->samples[0];
        assert_int_equal(s->n_tokens, 30);
        assert_memory_equal(s->tokens, forced, sizeof forced);
        assert_memory_equal(s->tokens + DI_COUNT(forced), rest->tokens, 25 * sizeof *s->tokens);
        assert_memory_equal(s->logprobs + DI_COUNT(forced), rest->logprobs, 25 * sizeof *s->logprobs);
        call_check_alone(c);
        /* More forced tokens than the answer may have. */
        call_make(c, 20, 3, 5);
        c->sub.forced_first = forced;
        c->sub.n_forced_first = DI_COUNT(forced);
        start_and_run(b, 1);
        assert_int_equal(c->samples[0].n_tokens, 3);
        assert_int_equal(c->samples[0].finish, DI_FINISH_LENGTH);
        assert_memory_equal(c->samples[0].tokens, forced, 3 * sizeof *forced);
        bench_close(b);
    }
}

/* ---- forks ---------------------------------------------------------------------------------------------------------
 */

/* Samples that end by themselves, at any time, the first among them. */
static void leader_that_ends_early_leaves_the_others(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        o.seqs_max = 9;
        o.logits_max = 9;
        bench *b = bench_open(&o);
        int n_early = 0;
        for (uint64_t kind = 0; kind < 12; kind++) {
            call *c = &b->calls[0];
            call_make_drawn(c, 100 + 14 * (size_t)(kind % 3), 50, kind, 8);
            c->sub.sampling.ignore_eos = false;
            call_make(&b->calls[1], 200, 30, kind);
            start_and_run(b, 2);
            call_check_alone(c);
            call_check_alone(&b->calls[1]);
            n_early += c->samples[0].n_tokens < 50;
        }
        assert_true(n_early > 3);
        bench_close(b);
    }
}

static void leader_that_fails_at_its_first_token_leaves_the_others(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        for (size_t n_prompt = 127; n_prompt <= 129; n_prompt++) {
            di_core_options o = edge_options(mode);
            bench *b = bench_open(&o);
            call *c = &b->calls[0];
            call_make_drawn(c, n_prompt, 20, 3, 4);
            c->sub.sampling.n_prompt_logprobs = 1;
            c->fail_at = 1;
            c->only_index = 0;
            start_and_run(b, 1);
            assert_int_equal(c->samples[0].finish, DI_FINISH_ERROR);
            assert_int_equal(c->samples[0].error.code, DI_ERR_IO);
            call *alone = malloc(sizeof *alone);
            assert_non_null(alone);
            *alone = *c;
            alone->fail_at = 0;
            call_start(b->core, alone);
            core_run(b->core);
            for (int j = 1; j < 4; j++)
                sample_check_same(&c->samples[j], &alone->samples[j]);
            call_check_alone(alone);
            free(alone);
            bench_close(b);
        }
    }
}

static void whole_request_is_aborted_wherever_its_leader_is(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        for (int n_steps = 0; n_steps < 12; n_steps++) {
            di_core_options o = edge_options(mode);
            bench *b = bench_open(&o);
            call_make(&b->calls[0], 150, 40, 1);
            call_start(b->core, &b->calls[0]);
            call *c = &b->calls[1];
            call_make_drawn(c, 300, 30, 2, 5);
            call_start(b->core, c);
            for (int i = 0; i < n_steps; i++)
                di_core_step(b->core);
            assert_true(di_core_abort(b->core, c->id));
            core_run(b->core);
            for (int j = 0; j < 5; j++)
                assert_int_equal(c->samples[j].finish, DI_FINISH_ABORT);
            assert_false(di_core_abort(b->core, c->id));
            call_check_alone(&b->calls[0]);
            bench_close(b);
        }
    }
}

/* The prompt of a leader is half done when an older request takes its memory. */
static void leader_preempted_in_its_prompt_frees_its_samples(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        o.n_blocks = 5;
        o.context_max = 640;
        o.chunk_max = 8;
        bench *b = bench_open(&o);
        call_make(&b->calls[0], 90, 100, 1);
        call_start(b->core, &b->calls[0]);
        for (int i = 0; i < 14; i++)
            di_core_step(b->core);
        call_make_drawn(&b->calls[1], 480, 12, 2, 3);
        call_start(b->core, &b->calls[1]);
        core_run(b->core);
        di_core_stats s = core_stats(b->core);
        assert_true(s.n_preempted > 0);
        /* Rows that were run, forks' prompts and the last tokens (never run) apart: what was needed, what the rest
         * found in the cache, and what had to be run again. */
        int64_t n_needed = 90 + 480 + 2 * 480 + 99 + 3 * 11 - s.cached_tokens + s.recomputed_tokens;
        assert_in_range(b->m.n_rows, n_needed, n_needed + s.n_dropped);
        call_check_alone(&b->calls[0]);
        call_check_alone(&b->calls[1]);
        bench_close(b);
    }
}

static void more_samples_than_can_run_take_turns(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        for (size_t n_prompt = 127; n_prompt <= 129; n_prompt++) {
            di_core_options o = edge_options(mode);
            o.seqs_max = 3;
            bench *b = bench_open(&o);
            call_make_drawn(&b->calls[0], n_prompt, 9, 6, 20);
            start_and_run(b, 1);
            call_check_alone(&b->calls[0]);
            assert_int_equal(core_stats(b->core).n_forked, 2);
            bench_close(b);
        }
    }
}

/* There is memory for one sample and no more: the others come after it. */
static void forks_without_room_come_later(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        o.n_blocks = 2;
        o.context_max = 256;
        bench *b = bench_open(&o);
        call_make_drawn(&b->calls[0], 200, 50, 6, 3);
        start_and_run(b, 1);
        call_check_alone(&b->calls[0]);
        bench_close(b);
    }
}

/* ---- lengths -------------------------------------------------------------------------------------------------------
 */

static void lengths_at_borders_are_like_all_others(void **state) {
    (void)state;
    static const size_t lens[] = {1, 2, 127, 128, 129, 255, 256, 257, 384, 512};
    static const int64_t answers[] = {1, 2, 128, 129};
    for (int mode = 0; mode < 4; mode++) {
        for (size_t i = 0; i < DI_COUNT(lens); i++) {
            di_core_options o = edge_options(mode);
            bench *b = bench_open(&o);
            for (size_t k = 0; k < DI_COUNT(answers); k++)
                call_make_drawn(&b->calls[k], lens[i], answers[k], lens[i] + k % 2, (int32_t)k % 2 + 1);
            start_and_run(b, (int)DI_COUNT(answers));
            for (size_t k = 0; k < DI_COUNT(answers); k++) {
                assert_int_equal(b->calls[k].samples[0].n_tokens, answers[k]);
                call_check_alone(&b->calls[k]);
            }
            bench_close(b);
        }
    }
}

static void prompt_that_fills_the_context_but_for_one_gets_one_token(void **state) {
    (void)state;
    di_core_options o = edge_options(2);
    o.context_max = 385;
    o.n_blocks = 3; /* the last token is never run */
    bench *b = bench_open(&o);
    call_make_drawn(&b->calls[0], 384, 100, 1, 2);
    start_and_run(b, 1);
    assert_int_equal(b->calls[0].samples[0].n_tokens, 1);
    assert_int_equal(b->calls[0].samples[0].finish, DI_FINISH_LENGTH);
    assert_int_equal(b->calls[0].samples[1].n_tokens, 1);
    bench_close(b);
}

static void memory_for_exactly_one_request_is_enough(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        for (int32_t n_blocks = 1; n_blocks <= 4; n_blocks++) {
            di_core_options o = edge_options(mode);
            o.n_blocks = n_blocks;
            o.context_max = n_blocks * DI_PAGE_TOKENS + 1;
            bench *b = bench_open(&o);
            for (int i = 0; i < 4; i++)
                call_make_drawn(&b->calls[i], n_blocks * DI_PAGE_TOKENS - 30 - i % 2, 31, (uint64_t)(i / 2), i % 2 + 1);
            start_and_run(b, 4);
            for (int i = 0; i < 4; i++)
                call_check_alone(&b->calls[i]);
            di_error err = {0};
            call *c = &b->calls[4];
            call_make(c, n_blocks * DI_PAGE_TOKENS + 1, 5, 1);
            assert_int_equal(call_submit(b->core, c, &err), DI_ERR_REQUEST);
            bench_close(b);
        }
    }
}

static void hits_without_snapshots_rebuild_the_window(void **state) {
    (void)state;
    di_core_options o = edge_options(2);
    o.n_snapshots = 0;
    bench *b = bench_open(&o);
    for (int i = 0; i < 3; i++) {
        call_make_drawn(&b->calls[i], 600, 40, 1, 1);
        b->calls[i].prompt[520 + i] = 2 + i;
        call_start(b->core, &b->calls[i]);
        core_run(b->core);
        call_check_alone(&b->calls[i]);
        /* The hit ends at 512, and the span before it is run again. */
        assert_int_equal(b->calls[i].samples[0].n_cached, i ? 512 - SIM_SPAN : 0);
    }
    assert_int_equal(core_stats(b->core).recomputed_tokens, 2 * SIM_SPAN);
    bench_close(b);
}

static void prompts_are_scored_in_chunks_of_any_size(void **state) {
    (void)state;
    static const int64_t chunks[] = {1, 3, 48, 300};
    static const int64_t logits[] = {4, 5, 64};
    for (size_t i = 0; i < DI_COUNT(chunks); i++) {
        for (size_t k = 0; k < DI_COUNT(logits); k++) {
            di_core_options o = edge_options((int)(i + k) % 4);
            o.chunk_max = chunks[i];
            o.logits_max = logits[k];
            bench *b = bench_open(&o);
            for (int c = 0; c < 4; c++) {
                call_make_drawn(&b->calls[c], 1 + 60 * c, 5, (uint64_t)c / 2, c % 3 + 1);
                b->calls[c].sub.sampling.n_prompt_logprobs = c % 3;
            }
            start_and_run(b, 4);
            for (int c = 0; c < 4; c++) {
                assert_true(c == 0 || b->calls[c].samples[0].prompt_sum < 0);
                call_check_alone(&b->calls[c]);
            }
            bench_close(b);
        }
    }
}

/* A row of the prompt that can't be scored: no sample of the request shows numbers that were never computed. */
static void samples_of_a_prompt_that_failed_fail_with_it(void **state) {
    (void)state;
    enum { BAD = 7 };
    for (int mode = 0; mode < 4; mode++) {
        for (size_t at = 40; at < 100; at += 9) {
            di_core_options o = edge_options(mode);
            o.logits_max = 64;
            bench *b = bench_open(&o);
            b->m.nan_token = BAD;
            call *c = &b->calls[0];
            call_make_drawn(c, 100, 5, 2, 3);
            for (size_t i = 0; i < 100; i++)
                c->prompt[i] += c->prompt[i] == BAD;
            c->prompt[at] = BAD;
            c->sub.sampling.n_prompt_logprobs = 0;
            start_and_run(b, 1);
            for (int j = 0; j < 3; j++)
                assert_int_equal(c->samples[j].finish, DI_FINISH_ERROR);
            bench_close(b);
        }
    }
}

/* ---- callbacks -----------------------------------------------------------------------------------------------------
 */

static void callback_may_abort_its_request(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        bench *b = bench_open(&o);
        for (int i = 0; i < 4; i++)
            call_make_drawn(&b->calls[i], 60 + i * 50, 40, (uint64_t)i, 1);
        b->calls[1].abort_at = 1;
        b->calls[2].abort_at = 17;
        start_and_run(b, 4);
        assert_int_equal(b->calls[1].samples[0].finish, DI_FINISH_ABORT);
        assert_int_equal(b->calls[1].samples[0].n_tokens, 1);
        assert_int_equal(b->calls[2].samples[0].n_tokens, 17);
        call_check_alone(&b->calls[0]);
        call_check_alone(&b->calls[3]);
        bench_close(b);
    }
}

static void callbacks_may_submit(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        di_core_options o = edge_options(mode);
        bench *b = bench_open(&o);
        for (int i = 0; i < 5; i++)
            call_make_drawn(&b->calls[i], 60 + i * 50, 20, (uint64_t)i, i % 2 + 1);
        b->calls[0].submit_at = &b->calls[1];
        b->calls[1].submit_done = &b->calls[2];
        b->calls[2].submit_done = &b->calls[3];
        b->calls[3].submit_at = &b->calls[4];
        call_start(b->core, &b->calls[0]);
        core_run(b->core);
        for (int i = 0; i < 5; i++)
            call_check_alone(&b->calls[i]);
        /* From the event of an abort too. */
        call_make(&b->calls[0], 300, 20, 1);
        call_make(&b->calls[1], 50, 20, 2);
        b->calls[0].submit_done = &b->calls[1];
        call_start(b->core, &b->calls[0]);
        di_core_step(b->core);
        assert_true(di_core_abort(b->core, b->calls[0].id));
        core_run(b->core);
        assert_int_equal(b->calls[0].samples[0].finish, DI_FINISH_ABORT);
        call_check_alone(&b->calls[1]);
        bench_close(b);
    }
}

/* ---- ends ----------------------------------------------------------------------------------------------------------
 */

static void draining_finishes_what_is_there(void **state) {
    (void)state;
    di_core_options o = edge_options(2);
    o.seqs_max = 2;
    bench *b = bench_open(&o);
    for (int i = 0; i < 5; i++) {
        call_make_drawn(&b->calls[i], 60 + i * 50, 20, (uint64_t)i, i % 3 + 1);
        call_start(b->core, &b->calls[i]);
    }
    di_core_step(b->core);
    di_core_drain(b->core);
    call_make(&b->calls[5], 10, 4, 9);
    di_error err = {0};
    assert_int_equal(call_submit(b->core, &b->calls[5], &err), DI_ERR_BUSY);
    assert_int_equal(core_stats(b->core).n_refused_busy, 1);
    core_run(b->core);
    for (int i = 0; i < 5; i++)
        call_check_alone(&b->calls[i]);
    assert_false(di_core_step(b->core));
    bench_close(b);
}

/* After any number of steps, with one in flight that takes snapshots, forks or has just ended something. */
static void destroying_needs_no_end_of_anything(void **state) {
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        for (int n_steps = 0; n_steps < 16; n_steps++) {
            di_core_options o = edge_options(mode);
            o.n_blocks = 9;
            bench *b = bench_open(&o);
            for (int i = 0; i < 4; i++) {
                call_make_drawn(&b->calls[i], 30 + 110 * i, 8 + i, (uint64_t)i % 2, i % 3 + 1);
                call_start(b->core, &b->calls[i]);
            }
            for (int i = 0; i < n_steps; i++)
                di_core_step(b->core);
            if (n_steps % 3 == 0)
                di_core_abort_all(b->core);
            bench_close(b);
        }
    }
}

static void aborting_all_ends_all(void **state) {
    (void)state;
    di_core_options o = edge_options(2);
    o.seqs_max = 2;
    bench *b = bench_open(&o);
    for (int i = 0; i < 5; i++) {
        call_make_drawn(&b->calls[i], 60 + i * 50, 20, (uint64_t)i, i % 3 + 1);
        call_start(b->core, &b->calls[i]);
    }
    for (int i = 0; i < 4; i++)
        di_core_step(b->core);
    di_core_abort_all(b->core);
    core_run(b->core);
    assert_true(core_stats(b->core).n_abort > 5);
    bench_close(b);
}

DI_TEST_GROUP(core_stops, cmocka_unit_test(late_stop_leaves_no_trace),
              cmocka_unit_test(stop_tokens_wait_for_min_tokens),
              cmocka_unit_test(forced_tokens_come_first_and_the_rest_follows_from_them));
DI_TEST_GROUP(core_forks, cmocka_unit_test(leader_that_ends_early_leaves_the_others),
              cmocka_unit_test(leader_that_fails_at_its_first_token_leaves_the_others),
              cmocka_unit_test(whole_request_is_aborted_wherever_its_leader_is),
              cmocka_unit_test(leader_preempted_in_its_prompt_frees_its_samples),
              cmocka_unit_test(more_samples_than_can_run_take_turns), cmocka_unit_test(forks_without_room_come_later),
              cmocka_unit_test(samples_of_a_prompt_that_failed_fail_with_it));
DI_TEST_GROUP(core_lengths, cmocka_unit_test(lengths_at_borders_are_like_all_others),
              cmocka_unit_test(prompt_that_fills_the_context_but_for_one_gets_one_token),
              cmocka_unit_test(memory_for_exactly_one_request_is_enough),
              cmocka_unit_test(hits_without_snapshots_rebuild_the_window),
              cmocka_unit_test(prompts_are_scored_in_chunks_of_any_size));
DI_TEST_GROUP(core_ends, cmocka_unit_test(callback_may_abort_its_request), cmocka_unit_test(callbacks_may_submit),
              cmocka_unit_test(draining_finishes_what_is_there), cmocka_unit_test(destroying_needs_no_end_of_anything),
              cmocka_unit_test(aborting_all_ends_all));
