/* Drafts in use against the PyTorch program's (tools/oracle): how many hold in each round, for prompts of the
 * validation set, greedy, on exact numerics, with five drafts that are all verified, the first of them right after the
 * prompt. */
#include "accelerator.h"
#include "engine/engine.h"
#include "harness.h"
#include "vectors.h"

enum { DRAFTS = 5, TOKENS_MAX = 64, ROUNDS = 275 }; /* the round that reaches 64 tokens is the last */

typedef struct rig {
    di_core *core;
    int n_rounds, n_accepted;
} rig;

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)event;
    (void)err;
    *(int64_t *)user = gen->n_tokens;
    return DI_OK;
}

/* One request, a step at a time: what was accepted is read from the counters. */
static void check_row(const di_json *row, void *ctx) {
    rig *r = ctx;
    const di_json *prompt = di_json_get(row, "ids"), *want = di_json_get(row, "accepted");
    int32_t ids[512];
    size_t n = di_json_array_len(prompt);
    assert_in_range(n, 1, DI_COUNT(ids));
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)di_json_int(di_json_at(prompt, i));
    int64_t n_tokens = 0;
    uint64_t id;
    di_submission sub = {.ids = ids, .n_ids = n, .callback = on_event, .user = &n_tokens};
    di_sampling_init(&sub.sampling);
    sub.sampling.temperature = 0;
    sub.sampling.max_tokens = TOKENS_MAX + 2 * (1 + DRAFTS); /* no round is cut short */
    di_error err = {0};
    di_test_ok(di_core_submit(r->core, &sub, &id, &err), &err);
    size_t round = 0;
    di_core_stats before, now;
    di_core_stats_get(r->core, &before);
    for (bool goes_on = true; goes_on; before = now) {
        if (n_tokens >= TOKENS_MAX)
            di_core_abort(r->core, id);
        goes_on = di_core_step(r->core);
        di_core_stats_get(r->core, &now);
        if (now.draft_tokens == before.draft_tokens)
            continue;
        int64_t n_accepted = now.accepted_tokens - before.accepted_tokens;
        if (round >= di_json_array_len(want) || n_accepted != di_json_int(di_json_at(want, round)))
            fail_msg("%s, round %zu: %lld drafts accepted", di_json_str(di_json_get(row, "id"), NULL), round,
                     (long long)n_accepted);
        r->n_accepted += (int)n_accepted;
        round++;
    }
    assert_int_equal(round, di_json_array_len(want));
    r->n_rounds += (int)round;
}

static void rounds_are_the_golden_ones(void **state) {
    (void)state;
    if (di_test_is_sanitized())
        di_test_skip("takes minutes under a sanitizer");
    di_load_options options = {.dir = di_test_source("models/tiny"),
                               .backend = di_test_backend(),
                               .threads = 2,
                               .seqs_max = 1,
                               .batch_tokens_max = 512,
                               .chunk_max = 512,
                               .context_max = 1024,
                               .numerics = DI_NUMERICS_EXACT,
                               .draft_tokens = DRAFTS,
                               .draft_policy = DI_SPEC_FIXED,
                               .is_sync = true};
    di_loaded loaded;
    di_error err = {0};
    rig r = {0};
    di_test_ok(di_load_open(&loaded, &options, &err), &err);
    di_test_ok(di_load_core(&loaded, &r.core, &err), &err);
    assert_int_equal(vectors_each("draft_rounds.jsonl", check_row, &r), 32);
    assert_int_equal(r.n_rounds, ROUNDS);
    assert_int_equal(r.n_accepted, 893); /* 3.247 a round */
    di_core_destroy(r.core);
    di_load_close(&loaded);
}

DI_TEST_GROUP(draft_rounds, cmocka_unit_test(rounds_are_the_golden_ones));
