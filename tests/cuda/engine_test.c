/* The engine on the GPU beside the engine on the CPU: in exact numerics the same requests give the same tokens, greedy
 * and drawn, with and without drafts, however many run at once. Both add in one order; only the sines of positions may
 * differ in a last bit. */
#include <pthread.h>

#include "accelerator.h"

#include "deepinfer/deepinfer.h"

enum { REQUESTS = 40, TOKENS = 24 };

typedef struct answer {
    int32_t tokens[TOKENS];
    int64_t n_tokens;
    char error[256];
} answer;

static int on_event(void *user, const di_engine_event *event) {
    answer *a = user;
    if (event->kind != DI_ENGINE_DONE)
        return 0;
    a->n_tokens = DI_MIN(event->result->n_tokens, (int64_t)TOKENS);
    memcpy(a->tokens, event->result->tokens, (size_t)a->n_tokens * sizeof *a->tokens);
    snprintf(a->error, sizeof a->error, "%.200s", event->result->error.code ? event->result->error.message : "");
    return 0;
}

/* All requests at once. False: there is no such device. */
static bool run_all(const char *backend, const char *kernels, int32_t draft_tokens, answer *answers, di_error *err) {
    static const char *const prompts[] = {"Once upon a time", "The little fox", "Tom and his dog went to",
                                          "One day, a girl named Lily", "It was raining, so"};
    di_engine_config config;
    di_engine *engine;
    di_engine_config_init(&config, sizeof config);
    config.model = di_test_source("models/tiny");
    config.backend = backend;
    config.device_kernels = kernels;
    config.numerics = "exact";
    config.draft_tokens = draft_tokens;
    config.context_max = 512;
    if (di_engine_create(&config, &engine, err) == DI_ERR_DEVICE)
        return false;
    di_test_ok(err->code, err);
    for (int i = 0; i < REQUESTS; i++) {
        di_engine_request request;
        di_engine_sampling sampling;
        di_engine_request_init(&request, sizeof request);
        di_engine_sampling_init(&sampling, sizeof sampling);
        request.text = prompts[i % (int)DI_COUNT(prompts)];
        request.text_len = strlen(request.text);
        request.events = 0;
        request.sampling = &sampling;
        sampling.max_tokens = 4 + i % (TOKENS - 3);
        sampling.temperature = i % 2 ? 0.9 : 0;
        sampling.top_p = i % 3 ? 1 : 0.9;
        sampling.top_k = i % 7 == 1 ? 20 : -1;
        sampling.presence_penalty = i % 5 == 1 ? 0.5 : 0;
        sampling.has_seed = true;
        sampling.seed = (uint64_t)i;
        di_test_ok(di_engine_submit(engine, &request, on_event, &answers[i], NULL, err), err);
    }
    di_test_ok(di_engine_drain(engine, 600000, err), err);
    di_engine_destroy(engine);
    return true;
}

static void check(const char *kernels, int32_t draft_tokens) {
    static answer want[REQUESTS], got[REQUESTS];
    di_error err = {0};
    di_test_find_modules();
    memset(want, 0, sizeof want);
    memset(got, 0, sizeof got);
    if (!run_all("nvidia", kernels, draft_tokens, got, &err))
        di_test_skip("%s", err.message);
    assert_true(run_all("cpu", "auto", 0, want, &err));
    for (int i = 0; i < REQUESTS; i++) {
        assert_string_equal(got[i].error, "");
        assert_string_equal(want[i].error, "");
        assert_true(want[i].n_tokens > 0);
        assert_int_equal(got[i].n_tokens, want[i].n_tokens);
        for (int64_t k = 0; k < want[i].n_tokens; k++) {
            if (got[i].tokens[k] != want[i].tokens[k])
                fail_msg("request %d, token %d: %d on the GPU, %d on the CPU", i, (int)k, got[i].tokens[k],
                         want[i].tokens[k]);
        }
    }
}

static void exact_tokens_are_the_cpus(void **state) {
    (void)state;
    check("auto", 0);
}
static void exact_tokens_are_the_cpus_with_drafts(void **state) {
    (void)state;
    check("auto", 5);
}
static void exact_tokens_are_the_cpus_by_portable_kernels(void **state) {
    (void)state;
    check("portable", 0);
}

DI_TEST_GROUP(cuda_engine, cmocka_unit_test(exact_tokens_are_the_cpus),
              cmocka_unit_test(exact_tokens_are_the_cpus_with_drafts),
              cmocka_unit_test(exact_tokens_are_the_cpus_by_portable_kernels));
