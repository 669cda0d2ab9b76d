/* Statistics of the public API about drafts: what rejection tested comes through, and its sums fit together. */
#include <semaphore.h>
#include <unistd.h>

#include "deepinfer/deepinfer.h"
#include "harness.h"

static int on_event(void *user, const di_engine_event *event) {
    if (event->kind == DI_ENGINE_DONE)
        sem_post(user);
    return 0;
}

/* The numbers after one request at temperature 1, whose drafts are all verified. */
static void run_with(const char *accept, di_engine_stats_t *stats) {
    di_engine_config config;
    di_engine *engine = NULL;
    di_error err = {0};
    sem_t done;
    assert_int_equal(sem_init(&done, 0, 0), 0);
    di_engine_config_init(&config, sizeof config);
    config.model = di_test_source("models/tiny");
    config.threads = 2;
    config.seqs_max = 2;
    config.context_max = 512;
    config.draft_policy = "fixed";
    config.accept = accept;
    di_test_ok(di_engine_create(&config, &engine, &err), &err);
    static const char line[] = "{\"prompt\":\"Once upon a time\",\"temperature\":1,\"seed\":3,\"max_tokens\":40,"
                               "\"ignore_eos\":true}";
    di_engine_request r;
    di_engine_request_init(&r, sizeof r);
    r.json = line;
    r.json_len = sizeof line - 1;
    uint64_t id;
    di_test_ok(di_engine_submit(engine, &r, on_event, &done, &id, &err), &err);
    sem_wait(&done);
    *stats = (di_engine_stats_t){.struct_size = sizeof *stats};
    for (int i = 0; i < 1000 && stats->n_finished < 1; i++) { /* numbers follow at the end of the step */
        di_engine_stats(engine, stats);
        usleep(1000);
    }
    assert_int_equal(stats->n_finished, 1);
    di_engine_destroy(engine);
    sem_destroy(&done);
}

static void rejection_is_counted(void **state) {
    (void)state;
    di_engine_stats_t s;
    run_with("rejection", &s);
    assert_true(s.draft_tokens > 0);
    /* A verification tests the drafts that hold and the first that doesn't. */
    assert_true(s.n_tested > 0 && s.n_tested <= s.draft_tokens);
    assert_true(s.n_tested >= s.accepted_tokens);
    /* (1 - d) / (1 + d) <= 1 - d <= 1 */
    assert_true(s.expected_sum > 0 && s.expected_sum <= (double)s.n_tested);
    assert_true(s.bound_sum > 0 && s.bound_sum <= s.expected_sum);
}

static void coupled_acceptance_tests_nothing(void **state) {
    (void)state;
    di_engine_stats_t s;
    run_with("coupled", &s);
    assert_true(s.draft_tokens > 0);
    assert_int_equal(s.n_tested, 0);
    assert_float_equal(s.expected_sum, 0, 0);
    assert_float_equal(s.bound_sum, 0, 0);
}

DI_TEST_GROUP(engine_stats, cmocka_unit_test(rejection_is_counted), cmocka_unit_test(coupled_acceptance_tests_nothing));
