/* The engine under random traffic: arrivals and aborts at any time, few KV blocks, small budgets.
 *
 * Whatever happens, every request that was accepted gets one DONE event, what it generated is a prefix of what it
 * generates alone, blocks and slots in use never exceed what there is, and all of them are free at the end. */
#include "engine/engine.h"
#include "harness.h"

enum { REQUESTS = 10, TOKENS_MAX = 12, KINDS = 4 };

typedef struct request {
    uint64_t id;
    int kind, n_done;
    int64_t n_tokens, max_tokens;
    int32_t tokens[TOKENS_MAX];
    di_finish finish;
} request;

static di_status on_event(void *user, const di_generation *gen, const di_core_event *event, di_error *err) {
    (void)err;
    request *q = user;
    if (event->kind != DI_CORE_DONE)
        return DI_OK;
    q->n_done++;
    q->finish = gen->finish;
    q->n_tokens = gen->n_tokens;
    assert_true(gen->n_tokens <= TOKENS_MAX);
    memcpy(q->tokens, gen->tokens, (size_t)gen->n_tokens * sizeof *q->tokens);
    return DI_OK;
}

/* Prompts of each kind: 1, 5, 40 and 140 tokens. */
static size_t make_prompt(int kind, int32_t *ids) {
    static const size_t lens[KINDS] = {1, 5, 40, 140};
    for (size_t i = 0; i < lens[kind]; i++)
        ids[i] = i ? 300 + kind * 100 + (int32_t)i : 0;
    return lens[kind];
}

static void submit(di_core *engine, request *q, int kind, int64_t max_tokens) {
    int32_t ids[140];
    size_t n = make_prompt(kind, ids);
    *q = (request){.kind = kind, .max_tokens = max_tokens};
    di_submission sub = {.ids = ids, .n_ids = n, .callback = on_event, .user = q};
    di_sampling_init(&sub.sampling);
    sub.sampling.temperature = kind % 2 ? 0.8 : 0;
    sub.sampling.has_seed = true;
    sub.sampling.seed = (uint64_t)kind;
    sub.sampling.max_tokens = max_tokens;
    sub.sampling.ignore_eos = true;
    di_error err = {0};
    di_test_ok(di_core_submit(engine, &sub, &q->id, &err), &err);
}

static void check_counts(const di_core *engine) {
    di_core_stats s;
    di_core_stats_get(engine, &s);
    assert_in_range(s.blocks_used, 0, s.blocks);
    assert_in_range(s.slots_used, 0, s.slots);
}

static void open_engine(di_loaded *loaded, uint64_t *rng, di_core **engine) {
    di_core_options o = loaded->plan.engine;
    o.n_blocks = (int32_t)di_test_random_range(rng, 2, 6); /* the longest request needs two */
    o.seqs_max = (int32_t)di_test_random_range(rng, 1, 4);
    o.batch_tokens_max = di_test_random_range(rng, o.seqs_max, 64);
    o.chunk_max = di_test_random_range(rng, 1, 64);
    di_error err = {0};
    di_test_ok(di_core_create(engine, loaded->model, &loaded->backend, loaded->device, &loaded->plan.memory,
                              loaded->tok, &o, &err),
               &err);
}

static di_loaded loaded;
static request alone[KINDS];

static void load_once(void) {
    if (loaded.model)
        return;
    di_load_options options = {.dir = di_test_source("models/tiny"),
                               .backend = "cpu",
                               .threads = 1,
                               .seqs_max = 4,
                               .batch_tokens_max = 64,
                               .chunk_max = 64,
                               .context_max = 256};
    di_error err = {0};
    di_test_ok(di_load_open(&loaded, &options, &err), &err);
    di_core *engine;
    di_test_ok(di_load_core(&loaded, &engine, &err), &err);
    for (int k = 0; k < KINDS; k++) {
        submit(engine, &alone[k], k, TOKENS_MAX);
        while (di_core_step(engine)) {
        }
        assert_int_equal(alone[k].n_tokens, TOKENS_MAX);
    }
    di_core_destroy(engine);
}

DI_PROPERTY(random_traffic_leaves_nothing_behind, 5) {
    uint64_t rng = seed;
    load_once();
    di_core *engine;
    open_engine(&loaded, &rng, &engine);
    request requests[REQUESTS] = {0};
    int n = 0;
    while (n < REQUESTS || di_core_pending(engine) > 0) {
        while (n < REQUESTS && di_test_random(&rng) % 3 == 0) {
            submit(engine, &requests[n], (int)di_test_random_range(&rng, 0, KINDS - 1),
                   di_test_random_range(&rng, 1, TOKENS_MAX));
            n++;
        }
        if (n > 0 && di_test_random(&rng) % 12 == 0) {
            const request *q = &requests[di_test_random(&rng) % (uint64_t)n];
            assert_int_equal(di_core_abort(engine, q->id), !q->n_done);
        }
        di_core_step(engine);
        check_counts(engine);
    }
    for (int i = 0; i < n; i++) {
        const request *q = &requests[i];
        assert_int_equal(q->n_done, 1);
        if (q->finish == DI_FINISH_LENGTH) {
            assert_int_equal(q->n_tokens, q->max_tokens);
        } else {
            assert_int_equal(q->finish, DI_FINISH_ABORT);
        }
        assert_memory_equal(q->tokens, alone[q->kind].tokens, (size_t)q->n_tokens * sizeof *q->tokens);
    }
    di_core_stats s;
    di_core_stats_get(engine, &s);
    assert_int_equal(s.blocks_used, 0);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(s.n_finished, REQUESTS);
    di_core_destroy(engine);
}

static int close_all(void **state) {
    (void)state;
    di_load_close(&loaded);
    return 0;
}

DI_TEST_GROUP(engine_property, cmocka_unit_test_teardown(random_traffic_leaves_nothing_behind, close_all));
