/* The engine on the model that ships: tokens against golden ones, stop rules, refusals, aborts, replay, and what a step
 * may allocate. Each test has an engine of its own; the model is loaded once for each set of options. */
#include <float.h>

#include "accelerator.h"
#include "engine/engine.h"
#include "golden.h"
#include "harness.h"

/* ---- rig ----------------------------------------------------------------------------------------------------------
 */

typedef struct rig {
    di_loaded loaded;
    di_core *engine;
} rig;

static di_load_options rig_options(void) {
    return (di_load_options){.dir = di_test_source("models/tiny"),
                             .backend = di_test_backend(),
                             .threads = 2,
                             .seqs_max = 4,
                             .batch_tokens_max = 256,
                             .chunk_max = 64,
                             .context_max = 1024};
}

static void rig_open(rig *r, const di_load_options *options) {
    di_error err = {0};
    di_test_ok(di_load_open(&r->loaded, options, &err), &err);
    di_test_ok(di_load_core(&r->loaded, &r->engine, &err), &err);
}

static void rig_close(rig *r) {
    di_core_destroy(r->engine);
    di_load_close(&r->loaded);
}

/* What came of a request: copies of what its events said. */
typedef struct outcome {
    int n_done;
    di_finish finish;
    di_error error;
    int32_t tokens[600];
    float logprobs[600];
    int64_t n_tokens, n_token_events;
    int64_t stop_hit;
    bool has_seed;
    uint64_t seed;
    di_strbuf text, streamed;
    /* to be done from the callback */
    di_core *engine;
    uint64_t id;
    int64_t abort_at; /* abort after this many tokens; 0: never */
    di_status break_at_text;
} outcome;

static void outcome_reset(outcome *o) {
    di_strbuf_deinit(&o->text);
    di_strbuf_deinit(&o->streamed);
    *o = (outcome){0};
}

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    outcome *o = user;
    if (event->kind == DI_CORE_TEXT) {
        di_strbuf_append(&o->streamed, event->text, event->len);
        if (o->break_at_text)
            return di_fail(err, o->break_at_text, "nobody listens");
    } else if (event->kind == DI_CORE_TOKEN) {
        o->n_token_events++;
        if (o->abort_at == gen->n_tokens)
            assert_true(di_core_abort(o->engine, gen->id));
    } else if (event->kind == DI_CORE_DONE) {
        o->n_done++;
        o->finish = gen->finish;
        o->error = gen->error;
        o->n_tokens = gen->n_tokens;
        o->stop_hit = gen->stop_hit;
        o->has_seed = gen->has_seed;
        o->seed = gen->seed;
        assert_true(gen->n_tokens <= (int64_t)DI_COUNT(o->tokens));
        memcpy(o->tokens, gen->tokens, (size_t)gen->n_tokens * sizeof *o->tokens);
        if (gen->logprobs)
            memcpy(o->logprobs, gen->logprobs, (size_t)gen->n_tokens * sizeof *o->logprobs);
        di_strbuf_append(&o->text, gen->text, gen->text_len);
    }
    return DI_OK;
}

static di_sampling greedy(int64_t max_tokens) {
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = 0;
    s.max_tokens = max_tokens;
    return s;
}

static di_status submit_ids(rig *r, outcome *o, const int32_t *ids, size_t n, const di_sampling *s, di_error *err) {
    outcome_reset(o);
    o->engine = r->engine;
    di_submission sub = {.ids = ids, .n_ids = n, .sampling = *s, .callback = on_event, .user = o};
    return di_core_submit(r->engine, &sub, &o->id, err);
}

static void submit_text(rig *r, outcome *o, const char *text, const di_sampling *s) {
    di_ids ids = {0};
    di_error err = {0};
    di_test_ok(di_tokenizer_encode(r->loaded.tok, text, strlen(text), false, &ids, &err), &err);
    di_test_ok(submit_ids(r, o, ids.data, ids.len, s, &err), &err);
    di_ids_deinit(&ids);
}

static void run_all(rig *r) {
    while (di_core_step(r->engine)) {
    }
    di_core_stats stats;
    di_core_stats_get(r->engine, &stats);
    assert_int_equal(stats.blocks_used, 0); /* every block and slot came back, whatever happened */
    assert_int_equal(stats.slots_used, 0);
    assert_int_equal(di_core_pending(r->engine), 0);
}

static void generate(rig *r, outcome *o, const char *text, const di_sampling *s) {
    submit_text(r, o, text, s);
    run_all(r);
    assert_int_equal(o->n_done, 1);
}

/* ---- golden tokens -------------------------------------------------------------------------------------------------
 */

/* Under a sanitizer long prompts and many tokens, which run the same code for minutes, stay outside: six prompts are
 * left, the longest of 65 tokens, one more than a chunk. */
static bool is_left_out(size_t n_prompt) {
    return di_test_is_sanitized() && n_prompt > 100;
}

/* A number of tokens, or of something else that each takes as many. */
static int64_t fewer(int64_t n, int64_t n_sanitized) {
    return di_test_is_sanitized() ? n_sanitized : n;
}

static void check_golden_tokens(int32_t draft_tokens) {
    const size_t n_new = (size_t)fewer(24, 4);
    di_load_options options = rig_options();
    options.draft_tokens = draft_tokens;
    options.draft_policy = DI_SPEC_FIXED;
    options.numerics = DI_NUMERICS_EXACT;
    rig r;
    rig_open(&r, &options);
    di_strbuf text = {0};
    di_error err = {0};
    di_json *manifest = NULL;
    di_test_ok(di_file_read(di_test_data("tiny/manifest.json"), 1 << 20, &text, &err), &err);
    di_test_ok(di_json_parse(&manifest, text.data, text.len, &err), &err);
    const di_json *prompts = di_json_get(manifest, "prompts"), *files = di_json_get(manifest, "files");
    size_t n_prompts = di_json_array_len(prompts);
    assert_int_equal(n_prompts, 12);
    /* All prompts at once, more than fit: they are batched, chunked and queued. */
    outcome *outcomes = calloc(n_prompts, sizeof *outcomes);
    int32_t ids[2048];
    for (size_t p = 0; p < n_prompts; p++) {
        const di_json *prompt = di_json_at(prompts, p);
        size_t n = di_json_array_len(prompt);
        assert_true(n <= DI_COUNT(ids));
        if (is_left_out(n))
            continue;
        for (size_t i = 0; i < n; i++)
            ids[i] = (int32_t)di_json_int(di_json_at(prompt, i));
        di_sampling s = greedy((int64_t)n_new);
        s.ignore_eos = true;
        di_test_ok(submit_ids(&r, &outcomes[p], ids, n, &s, &err), &err);
    }
    run_all(&r);
    for (size_t p = 0; p < n_prompts; p++) {
        char name[64];
        snprintf(name, sizeof name, "dequant.%zu.safetensors", p);
        const di_json *want = di_json_get(di_json_get(files, name), "greedy");
        assert_int_equal(di_json_array_len(want), 24);
        if (is_left_out(di_json_array_len(di_json_at(prompts, p))))
            continue;
        assert_int_equal(outcomes[p].n_tokens, n_new);
        assert_int_equal(outcomes[p].finish, DI_FINISH_LENGTH);
        for (size_t i = 0; i < n_new; i++) {
            if (outcomes[p].tokens[i] != di_json_int(di_json_at(want, i)))
                fail_msg("prompt %zu, token %zu", p, i);
        }
        outcome_reset(&outcomes[p]);
    }
    free(outcomes);
    di_json_free(manifest);
    di_strbuf_deinit(&text);
    rig_close(&r);
}

static void greedy_tokens_are_the_golden_ones(void **state) {
    (void)state;
    check_golden_tokens(0);
}

static void drafts_change_no_golden_token(void **state) {
    (void)state;
    check_golden_tokens(5);
}

static void raw_log_probabilities_are_the_golden_ones(void **state) {
    (void)state;
    di_load_options options = rig_options();
    options.numerics = DI_NUMERICS_EXACT;
    rig r;
    rig_open(&r, &options);
    golden *g = golden_open(di_test_data("tiny/dequant.0.safetensors"));
    golden_tensor want = golden_get(g, "greedy.logprob");
    const int64_t n_new = fewer(24, 8);
    di_sampling s = greedy(n_new);
    s.ignore_eos = true;
    s.n_logprobs = 3;
    outcome o = {0};
    const int32_t bos = 0; /* prompt 0 is the start mark alone */
    di_error err = {0};
    di_test_ok(submit_ids(&r, &o, &bos, 1, &s, &err), &err);
    run_all(&r);
    assert_int_equal(o.n_tokens, n_new);
    assert_true(want.n >= 24);
    /* Logits agree within 1e-4 of their deviation, 2.9 at most. */
    for (int64_t i = 0; i < n_new; i++)
        assert_true(fabsf(o.logprobs[i] - golden_float(&want, i)) < 6e-4f);
    outcome_reset(&o);
    golden_close(g);
    rig_close(&r);
}

/* ---- independence --------------------------------------------------------------------------------------------------
 */

static const char *const stories[] = {
    "Once upon a time", "What is the capital of France?", "The fox said: \"I am", "1 2 3 4 5 6",
    "Tell me about the sun and the moon and the stars and everything else that there is"};

static void batch_chunks_and_seeds_decide_nothing_else(void **state) {
    (void)state;
    enum { N = 5 };
    outcome alone[N] = {0}, together[N] = {0};
    for (int round = 0; round < 2; round++) {
        di_load_options options = rig_options();
        if (round == 1)
            options.chunk_max = 5, options.batch_tokens_max = 9, options.threads = 1, options.draft_tokens = 3,
            options.draft_policy = DI_SPEC_FIXED;
        rig r;
        rig_open(&r, &options);
        for (int i = 0; i < N; i++) {
            di_sampling s;
            di_sampling_init(&s);
            s.temperature = 0.9;
            s.top_p = 0.95;
            s.has_seed = true;
            s.seed = 1000 + (uint64_t)i;
            s.max_tokens = fewer(20, 4) + i;
            s.n_logprobs = 0;
            submit_text(&r, round ? &together[i] : &alone[i], stories[i], &s);
            if (round == 0)
                run_all(&r);
        }
        run_all(&r);
        rig_close(&r);
    }
    for (int i = 0; i < N; i++) {
        assert_int_equal(alone[i].n_tokens, together[i].n_tokens);
        assert_memory_equal(alone[i].tokens, together[i].tokens, (size_t)alone[i].n_tokens * 4);
        assert_memory_equal(alone[i].logprobs, together[i].logprobs, (size_t)alone[i].n_tokens * 4);
        outcome_reset(&alone[i]);
        outcome_reset(&together[i]);
    }
}

static void drawn_seed_is_named_and_repeats(void **state) {
    (void)state;
    di_load_options options = rig_options();
    rig r;
    rig_open(&r, &options);
    di_sampling s;
    di_sampling_init(&s);
    s.max_tokens = fewer(16, 6);
    outcome first = {0}, again = {0}, other = {0};
    generate(&r, &first, stories[0], &s);
    generate(&r, &other, stories[0], &s);
    assert_true(first.has_seed && other.has_seed);
    assert_true(first.seed < (uint64_t)1 << 53);
    assert_true(first.seed != other.seed);
    s.has_seed = true;
    s.seed = first.seed;
    generate(&r, &again, stories[0], &s);
    assert_int_equal(first.n_tokens, again.n_tokens);
    assert_memory_equal(first.tokens, again.tokens, (size_t)first.n_tokens * 4);
    di_sampling g = greedy(2);
    generate(&r, &other, stories[0], &g);
    assert_false(other.has_seed);
    outcome_reset(&first);
    outcome_reset(&again);
    outcome_reset(&other);
    rig_close(&r);
}

/* ---- stop rules ----------------------------------------------------------------------------------------------------
 */

static void stop_strings_cut_across_tokens(void **state) {
    (void)state;
    di_load_options options = rig_options();
    rig r;
    rig_open(&r, &options);
    outcome whole = {0}, o = {0};
    di_sampling s = greedy(24);
    generate(&r, &whole, stories[0], &s);
    assert_true(whole.text.len > 60);
    assert_string_equal(di_strbuf_str(&whole.streamed), di_strbuf_str(&whole.text));
    /* Every substring of some lengths as a stop string: the text ends before its first occurrence, and what was
     * streamed is never more than that. */
    for (size_t len = 1; len <= 13; len += (size_t)fewer(6, 12)) {
        for (size_t at = 0; at + len <= 60; at += (size_t)fewer(17, 34)) {
            char stop[16] = {0};
            memcpy(stop, whole.text.data + at, len);
            const char *const stops[] = {"never in the text", "", stop};
            const size_t lens[] = {17, 0, len};
            s.n_stop = 3;
            s.stop = stops;
            s.stop_len = lens;
            generate(&r, &o, stories[0], &s);
            size_t first = (size_t)(strstr(whole.text.data, stop) - whole.text.data);
            assert_int_equal(o.finish, DI_FINISH_STOP);
            assert_int_equal(o.stop_hit, 2);
            assert_int_equal(o.text.len, first);
            assert_memory_equal(di_strbuf_str(&o.text), whole.text.data, first);
            assert_string_equal(di_strbuf_str(&o.streamed), di_strbuf_str(&o.text));
        }
    }
    /* The start of a stop string that never completes is held back, and comes out at the end. */
    char almost[64];
    snprintf(almost, sizeof almost, "%.8s#", whole.text.data + whole.text.len - 8);
    const char *const stops[] = {almost};
    const size_t lens[] = {9};
    s.n_stop = 1;
    s.stop = stops;
    s.stop_len = lens;
    generate(&r, &o, stories[0], &s);
    assert_int_equal(o.finish, DI_FINISH_LENGTH);
    assert_string_equal(di_strbuf_str(&o.text), di_strbuf_str(&whole.text));
    assert_string_equal(di_strbuf_str(&o.streamed), di_strbuf_str(&whole.text));
    outcome_reset(&whole);
    outcome_reset(&o);
    rig_close(&r);
}

/* The chat prompt of "What is 47 + 38?"; the answer is "47 + 38 = 85" and the end mark. */
static const char sum_prompt[] =
    "<\xEF\xBD\x9C"
    "begin\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C><\xEF\xBD\x9CUser\xEF\xBD\x9C>What is 47 + 38?"
    "<\xEF\xBD\x9C"
    "Assistant\xEF\xBD\x9C></think>";

static void end_mark_ends_unless_ignored(void **state) {
    (void)state;
    di_load_options options = rig_options();
    rig r;
    rig_open(&r, &options);
    outcome o = {0};
    di_sampling s = greedy(100);
    generate(&r, &o, sum_prompt, &s);
    assert_int_equal(o.finish, DI_FINISH_STOP);
    assert_int_equal(o.stop_hit, -1);
    assert_string_equal(di_strbuf_str(&o.text), "47 + 38 = 85");
    assert_int_equal(o.tokens[o.n_tokens - 1], r.loaded.config.eos_id); /* counted, but not text */
    assert_int_equal(o.n_token_events, o.n_tokens);
    int64_t n = o.n_tokens;
    s.max_tokens = n; /* the end mark comes as the last token that is allowed */
    generate(&r, &o, sum_prompt, &s);
    assert_int_equal(o.finish, DI_FINISH_STOP);
    s.max_tokens = n - 1;
    generate(&r, &o, sum_prompt, &s);
    assert_int_equal(o.finish, DI_FINISH_LENGTH);
    assert_int_equal(o.n_tokens, n - 1);
    s.max_tokens = n + fewer(10, 2);
    s.ignore_eos = true;
    generate(&r, &o, sum_prompt, &s);
    assert_int_equal(o.finish, DI_FINISH_LENGTH);
    assert_int_equal(o.n_tokens, s.max_tokens);
    outcome_reset(&o);
    rig_close(&r);
}

static void tokens_never_exceed_the_context(void **state) {
    (void)state;
    di_load_options options = rig_options();
    options.context_max = 140;
    rig r;
    rig_open(&r, &options);
    outcome o = {0};
    int32_t ids[140];
    for (int i = 0; i < 140; i++)
        ids[i] = i ? 300 + i : 0;
    di_sampling s = greedy(0);
    s.ignore_eos = true;
    di_error err = {0};
    for (size_t n = (size_t)fewer(130, 139); n < 140; n += 9) {
        di_test_ok(submit_ids(&r, &o, ids, n, &s, &err), &err);
        run_all(&r);
        assert_int_equal(o.finish, DI_FINISH_LENGTH);
        assert_int_equal(o.n_tokens, 140 - (int64_t)n);
    }
    assert_int_equal(submit_ids(&r, &o, ids, 140, &s, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "140 tokens");
    outcome_reset(&o);
    rig_close(&r);
}

/* ---- refusals and aborts -------------------------------------------------------------------------------------------
 */

static void bad_requests_fail_alone(void **state) {
    (void)state;
    di_load_options options = rig_options();
    rig r;
    rig_open(&r, &options);
    options.kv_bytes = (int64_t)(r.loaded.plan.state_bytes + 5 * r.loaded.plan.memory.page_bytes);
    rig_close(&r);
    rig_open(&r, &options);
    assert_int_equal(r.loaded.plan.engine.n_blocks, 5);
    outcome good = {0}, bad = {0};
    di_sampling s = greedy(12);
    submit_text(&r, &good, stories[0], &s);
    di_error err = {0};
    const int32_t high[] = {0, r.loaded.config.vocab}, low[] = {0, 5, -1}, fine[] = {0};
    assert_int_equal(submit_ids(&r, &bad, high, 2, &s, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "prompt token 1: id 6144 is outside the vocabulary, expected 0 to 6143");
    assert_int_equal(submit_ids(&r, &bad, low, 3, &s, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "prompt token 2: id -1");
    assert_int_equal(submit_ids(&r, &bad, NULL, 0, &s, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "empty");
    s.temperature = NAN;
    assert_int_equal(submit_ids(&r, &bad, fine, 1, &s, &err), DI_ERR_RANGE);
    assert_contains(err.message, "temperature");
    /* Longer than all KV blocks together, although the context would allow it. */
    s = greedy(1000);
    assert_int_equal(submit_ids(&r, &bad, fine, 1, &s, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "need 8 KV blocks, there are 5");
    assert_contains(err.message, "--kv-memory");
    run_all(&r);
    assert_int_equal(good.n_done, 1);
    assert_int_equal(good.n_tokens, 12);
    assert_int_equal(bad.n_done, 0);
    outcome_reset(&good);
    rig_close(&r);
}

/* On the host; a GPU takes as many as a step has (load.c). */
static void a_chunk_that_nobody_chose_is_512_tokens_or_a_step(void **state) {
    (void)state;
    const int64_t cases[][3] = {{0, 600, 512}, {0, 64, 64}, {48, 600, 48}}; /* asked for, of a step, found */
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        di_load_options options = rig_options();
        options.chunk_max = cases[i][0];
        options.batch_tokens_max = cases[i][1];
        rig r;
        rig_open(&r, &options);
        assert_int_equal(r.loaded.plan.engine.chunk_max, cases[i][2]);
        rig_close(&r);
    }
}

static void aborted_requests_keep_their_text_and_free_everything(void **state) {
    (void)state;
    di_load_options options = rig_options();
    options.seqs_max = 2;
    options.batch_tokens_max = 16;
    options.chunk_max = 4;
    rig r;
    rig_open(&r, &options);
    outcome running = {0}, chunked = {0}, waiting = {0}, whole = {0};
    di_sampling s = greedy(20);
    generate(&r, &whole, stories[0], &s);

    submit_text(&r, &running, stories[0], &s);
    running.abort_at = 10;
    submit_text(&r, &chunked, stories[4], &s);
    submit_text(&r, &waiting, stories[1], &s);
    di_core_step(r.engine);
    /* The second request is between two chunks of its prompt, the third is not admitted. */
    di_core_stats stats;
    di_core_stats_get(r.engine, &stats);
    assert_int_equal(stats.slots_used, 2);
    assert_true(di_core_abort(r.engine, chunked.id));
    assert_true(di_core_abort(r.engine, waiting.id));
    assert_false(di_core_abort(r.engine, 12345));
    di_core_step(r.engine);
    di_core_stats_get(r.engine, &stats);
    assert_int_equal(stats.slots_used, 1);
    assert_int_equal(chunked.n_done, 1);
    assert_int_equal(chunked.finish, DI_FINISH_ABORT);
    assert_int_equal(waiting.n_done, 1);
    assert_int_equal(waiting.finish, DI_FINISH_ABORT);
    assert_int_equal(waiting.n_tokens, 0);
    run_all(&r);
    assert_int_equal(running.n_done, 1);
    assert_int_equal(running.finish, DI_FINISH_ABORT);
    assert_int_equal(running.n_tokens, 10);
    assert_true(running.text.len > 0);
    assert_memory_equal(running.text.data, whole.text.data, running.text.len);
    outcome_reset(&running);
    outcome_reset(&chunked);
    outcome_reset(&waiting);
    outcome_reset(&whole);
    rig_close(&r);
}

static void failing_callback_ends_its_request_alone(void **state) {
    (void)state;
    di_load_options options = rig_options();
    rig r;
    rig_open(&r, &options);
    outcome broken = {0}, good = {0};
    di_sampling s = greedy(12);
    submit_text(&r, &broken, stories[0], &s);
    broken.break_at_text = DI_ERR_DISK;
    submit_text(&r, &good, stories[0], &s);
    run_all(&r);
    assert_int_equal(broken.n_done, 1);
    assert_int_equal(broken.finish, DI_FINISH_ERROR);
    assert_int_equal(broken.error.code, DI_ERR_DISK);
    assert_string_equal(broken.error.message, "nobody listens");
    assert_int_equal(good.finish, DI_FINISH_LENGTH);
    outcome_reset(&broken);
    outcome_reset(&good);
    rig_close(&r);
}

/* ---- replay --------------------------------------------------------------------------------------------------------
 */

static void exact_replay_changes_nothing(void **state) {
    (void)state;
    enum { N = 300 };
    /* Under a sanitizer a tail below the exact bound, which masked and left-out rows agree about too, of a short
     * prompt. */
    const int64_t n = fewer(N, 90), n_new = fewer(12, 3), keep = fewer(253, 70); /* (8 - 4) * (64 - 1) + 1 = 253 */
    const int first = di_test_is_sanitized() ? 1 : 0;
    int32_t ids[N];
    uint64_t rng = 7;
    ids[0] = 0;
    for (int i = 1; i < N; i++)
        ids[i] = (int32_t)di_test_random_range(&rng, 10, 6000);
    outcome o[3] = {0};
    static const di_replay modes[] = {DI_REPLAY_OFF, DI_REPLAY_MASK, DI_REPLAY_COMPACT};
    for (int i = first; i < 3; i++) {
        di_load_options options = rig_options();
        options.replay = modes[i];
        if (di_test_is_sanitized())
            options.replay_keep = keep;
        options.chunk_max = 64 - 7 * i;
        rig r;
        rig_open(&r, &options);
        di_core_stats stats;
        di_core_stats_get(r.engine, &stats);
        assert_int_equal(stats.replay_keep, i ? keep : 0);
        assert_int_equal(stats.is_replay_exact, keep == 253);
        di_sampling s = greedy(n_new);
        s.ignore_eos = true;
        s.n_logprobs = 0;
        di_error err = {0};
        di_test_ok(submit_ids(&r, &o[i], ids, (size_t)n, &s, &err), &err);
        run_all(&r);
        assert_memory_equal(o[i].tokens, o[first].tokens, (size_t)n_new * sizeof(int32_t));
        assert_memory_equal(o[i].logprobs, o[first].logprobs, (size_t)n_new * sizeof(float));
        rig_close(&r);
    }
    for (int i = 0; i < 3; i++)
        outcome_reset(&o[i]);
}

static void replay_keep_below_the_window_is_refused(void **state) {
    (void)state;
    di_load_options options = rig_options();
    options.replay = DI_REPLAY_COMPACT;
    options.replay_keep = 69; /* window 64 and backtracking 6 need 70 */
    di_loaded loaded;
    di_error err = {0};
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_ARG);
    assert_contains(err.message, "--replay-keep 69: expected 70");
    options.replay_keep = 70;
    rig r;
    rig_open(&r, &options);
    di_core_stats stats;
    di_core_stats_get(r.engine, &stats);
    assert_false(stats.is_replay_exact);
    rig_close(&r);
}

/* ---- loading -------------------------------------------------------------------------------------------------------
 */

static void load_errors_say_what_to_do(void **state) {
    (void)state;
    di_loaded loaded;
    di_error err = {0};
    di_load_options options = rig_options();
    options.dir = "/nonexistent/model";
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_NOT_FOUND);
    assert_contains(err.message, "/nonexistent/model");
    options = rig_options();
    options.context_max = 8193;
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_ARG);
    assert_contains(err.message, "8193");
    assert_contains(err.message, "8192");
    options = rig_options();
    options.kv_bytes = 1000;
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_MEMORY);
    assert_contains(err.message, "--kv-memory: 1000 bytes, needed are");
    options = rig_options();
    options.batch_tokens_max = 3;
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_ARG);
    options = rig_options();
    options.backend = "ascend"; /* by name, and never silently another one */
    assert_int_equal(di_load_open(&loaded, &options, &err), DI_ERR_DEVICE);
}

static void plan_adds_up(void **state) {
    (void)state;
    di_load_options options = rig_options();
    options.context_max = 0;
    rig r;
    rig_open(&r, &options);
    const di_load_plan *p = &r.loaded.plan;
    assert_int_equal(p->engine.context_max, 8192);
    assert_int_equal(p->engine.n_blocks, 4 * 64);
    assert_true(p->kv_bytes == (uint64_t)p->engine.n_blocks * p->memory.page_bytes);
    assert_true(p->state_bytes == 4 * (uint64_t)p->memory.slot_bytes);
    assert_true(p->total_bytes == p->kv_bytes + p->state_bytes + p->memory.weight_bytes + p->memory.workspace_bytes +
                                      p->memory.scratch_bytes);
    rig_close(&r);
}

/* ---- allocations ---------------------------------------------------------------------------------------------------
 */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_COUNTER 0
static int64_t n_allocations;
#else
#define HAS_COUNTER 1
/* Every allocation of the program and the layers in it passes here. */
static _Atomic int64_t n_allocations;
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

void *malloc(size_t n) {
    n_allocations++;
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    n_allocations++;
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
    n_allocations++;
    return __libc_realloc(p, n);
}
#endif

static di_status count_only(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)gen, (void)err;
    if (event->kind == DI_CORE_DONE)
        ++*(int *)user;
    return DI_OK;
}

static void decode_steps_allocate_nothing(void **state) {
    (void)state;
    if (!HAS_COUNTER)
        di_test_skip("the sanitizer has the allocator");
    di_load_options options = rig_options();
    options.draft_tokens = 5;
    rig r;
    rig_open(&r, &options);
    int n_done = 0;
    const int32_t ids[] = {0, 300, 301, 302, 303};
    const char *const stops[] = {"never in the text", "nor this"};
    const size_t lens[] = {17, 8};
    for (int i = 0; i < 4; i++) {
        di_sampling s;
        di_sampling_init(&s);
        s.max_tokens = 300;
        s.ignore_eos = true;
        if (i == 0)
            s.temperature = 0;
        if (i == 1)
            s.top_p = 0.9, s.top_k = 50;
        if (i == 2)
            s.n_logprobs = 5;
        if (i == 3)
            s.n_stop = 2, s.stop = stops, s.stop_len = lens;
        di_submission sub = {.ids = ids, .n_ids = 5, .sampling = s, .callback = count_only, .user = &n_done};
        di_error err = {0};
        di_test_ok(di_core_submit(r.engine, &sub, NULL, &err), &err);
    }
    for (int i = 0; i < 8; i++)
        di_core_step(r.engine); /* prompts, and the first steps of every kind */
    int64_t before = n_allocations;
    assert_true(before > 0);
    for (int i = 0; i < 70; i++)
        assert_true(di_core_step(r.engine));
    assert_int_equal(n_allocations - before, 0);
    assert_int_equal(n_done, 0);
    rig_close(&r);
}

DI_TEST_GROUP(engine, cmocka_unit_test(greedy_tokens_are_the_golden_ones),
              cmocka_unit_test(drafts_change_no_golden_token),
              cmocka_unit_test(raw_log_probabilities_are_the_golden_ones),
              cmocka_unit_test(batch_chunks_and_seeds_decide_nothing_else),
              cmocka_unit_test(drawn_seed_is_named_and_repeats), cmocka_unit_test(stop_strings_cut_across_tokens),
              cmocka_unit_test(end_mark_ends_unless_ignored), cmocka_unit_test(tokens_never_exceed_the_context),
              cmocka_unit_test(bad_requests_fail_alone),
              cmocka_unit_test(aborted_requests_keep_their_text_and_free_everything),
              cmocka_unit_test(failing_callback_ends_its_request_alone), cmocka_unit_test(exact_replay_changes_nothing),
              cmocka_unit_test(replay_keep_below_the_window_is_refused), cmocka_unit_test(load_errors_say_what_to_do),
              cmocka_unit_test(plan_adds_up), cmocka_unit_test(a_chunk_that_nobody_chose_is_512_tokens_or_a_step),
              cmocka_unit_test(decode_steps_allocate_nothing));
