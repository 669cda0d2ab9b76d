/* Grammars of the public API's requests: the fields that name one, refusals of what does not fit together, and the end
 * of requests whose grammar is still being compiled, by an abort, with the engine, beside others. Grammars that take
 * long are intersections of patterns, which have to be determinized; none ever gets that far here. */
#include <semaphore.h>
#include <time.h>

#include "base/base.h"
#include "deepinfer/deepinfer.h"
#include "harness.h"

static di_engine *engine_with(int32_t n_threads, int64_t cache_bytes) {
    di_engine_config config;
    di_engine_config_init(&config, sizeof config);
    config.model = di_test_source("models/tiny");
    config.backend = "cpu";
    config.threads = 2;
    config.seqs_max = 4;
    config.context_max = 512;
    config.grammar_threads = n_threads;
    config.grammar_cache_bytes = cache_bytes;
    di_engine *engine = NULL;
    di_error err = {0};
    di_test_ok(di_engine_create(&config, &engine, &err), &err);
    return engine;
}

/* What came of one sample; written by the engine's thread, read after `done`. */
typedef struct outcome {
    sem_t done;
    int n_done;
    int64_t done_ns;
    char finish[16], text[256];
    di_error error;
} outcome;

static void outcome_init(outcome *o) {
    memset(o, 0, sizeof *o);
    assert_int_equal(sem_init(&o->done, 0, 0), 0);
}

static void wait_for(outcome *o) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 120;
    assert_int_equal(sem_timedwait(&o->done, &end), 0);
    assert_int_equal(o->n_done, 1);
}

/* user: outcomes, one for each sample. */
static int on_event(void *user, const di_engine_event *event) {
    outcome *o = (outcome *)user + event->index;
    if (event->kind != DI_ENGINE_DONE)
        return 0;
    o->n_done++;
    o->done_ns = di_clock_ns();
    o->error = event->result->error;
    snprintf(o->finish, sizeof o->finish, "%s", event->result->finish_reason);
    snprintf(o->text, sizeof o->text, "%s", event->result->text);
    sem_post(&o->done);
    return 0;
}

static di_engine_request text_request(void) {
    di_engine_request r;
    di_engine_request_init(&r, sizeof r);
    r.text = "x";
    r.text_len = 1;
    return r;
}

static void run(di_engine *engine, const di_engine_request *r, outcome *o) {
    di_error err = {0};
    outcome_init(o);
    di_test_ok(di_engine_submit(engine, r, on_event, o, NULL, &err), &err);
    wait_for(o);
    sem_destroy(&o->done);
}

/* ---- fields --------------------------------------------------------------------------------------------------------
 */

static void fields_name_grammars(void **state) {
    (void)state;
    di_engine *engine = engine_with(2, 0);
    outcome o;
    di_engine_request r = text_request();
    r.regex = "(no|yes){2}";
    run(engine, &r, &o);
    assert_string_equal(o.finish, "stop");
    for (const char *at = o.text; *at; at += *at == 'n' ? 2 : 3)
        assert_true(strncmp(at, "no", 2) == 0 || strncmp(at, "yes", 3) == 0);
    r = text_request();
    r.json_schema = "{\"enum\":[true,null]}";
    run(engine, &r, &o);
    assert_true(strcmp(o.text, "true") == 0 || strcmp(o.text, "null") == 0);
    int32_t ids[] = {0, 5};
    r = text_request();
    r.text = NULL;
    r.ids = ids;
    r.n_ids = 2;
    r.ebnf = "root ::= \"<\" [0-9] \">\"";
    run(engine, &r, &o);
    assert_int_equal(strlen(o.text), 3);
    assert_true(o.text[0] == '<' && o.text[1] >= '0' && o.text[1] <= '9' && o.text[2] == '>');
    r = text_request();
    r.regex = "(";
    run(engine, &r, &o);
    assert_string_equal(o.finish, "error");
    assert_int_equal(o.error.code, DI_ERR_REQUEST);
    assert_contains(o.error.message, "regex: ");
    assert_contains(o.error.message, "'(' has no ')'");
    di_engine_destroy(engine);
}

static void one_field_at_most(void **state) {
    (void)state;
    di_engine *engine = engine_with(1, 0);
    outcome o = {0};
    di_error err = {0};
    di_engine_request r = text_request();
    r.regex = "a";
    r.ebnf = "root ::= \"a\"";
    assert_int_equal(di_engine_submit(engine, &r, on_event, &o, NULL, &err), DI_ERR_ARG);
    r = text_request();
    r.regex = "a";
    r.json_schema = "{}";
    assert_int_equal(di_engine_submit(engine, &r, on_event, &o, NULL, &err), DI_ERR_ARG);
    r = text_request();
    r.json_schema = "";
    assert_int_equal(di_engine_submit(engine, &r, on_event, &o, NULL, &err), DI_ERR_REQUEST);
    assert_contains(err.message, "json_schema: an empty text");
    di_engine_request_init(&r, sizeof r); /* JSON names its own */
    r.json = "{\"prompt\":\"x\"}";
    r.json_len = strlen(r.json);
    r.regex = "a";
    assert_int_equal(di_engine_submit(engine, &r, on_event, &o, NULL, &err), DI_ERR_ARG);
    assert_int_equal(o.n_done, 0);
    di_engine_destroy(engine);
}

/* ---- ends while grammars compile -----------------------------------------------------------------------------------
 */

enum { N = 8, SAMPLES = 2 };

/* Requests of two samples, each with a grammar of its own that takes long. */
static void submit_slow(di_engine *engine, outcome (*o)[SAMPLES], uint64_t *ids) {
    for (int i = 0; i < N; i++) {
        char line[512];
        di_error err = {0};
        snprintf(line, sizeof line,
                 "{\"prompt\":\"x\",\"n\":2,\"max_tokens\":4,\"response_format\":{\"type\":\"json_schema\","
                 "\"json_schema\":{\"schema\":{\"allOf\":[{\"type\":\"string\",\"pattern\":\"(a|b)*a(a|b){12}c%d\"},"
                 "{\"pattern\":\"(a|b)*a(a|b){12}d\"},{\"pattern\":\"(a|b)*a(a|b){12}e\"}]}}}}",
                 i);
        di_engine_request r;
        di_engine_request_init(&r, sizeof r);
        r.json = line;
        r.json_len = strlen(line);
        for (int k = 0; k < SAMPLES; k++)
            outcome_init(&o[i][k]);
        di_test_ok(di_engine_submit(engine, &r, on_event, o[i], &ids[i], &err), &err);
    }
}

/* The bound of an end that does not wait for anything; sanitizers slow all threads down. */
static int64_t prompt_ns(void) {
    return (di_test_is_sanitized() ? 20 : 1) * (int64_t)1000000000;
}

static void aborts_do_not_wait_for_grammars(void **state) {
    (void)state;
    di_engine *engine = engine_with(1, 0);
    outcome o[N][SAMPLES], good;
    uint64_t ids[N];
    submit_slow(engine, o, ids);
    int64_t start_ns = di_clock_ns();
    for (int i = N - 1; i >= 0; i--) /* all but the first wait for the only thread */
        di_engine_abort(engine, ids[i]);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < SAMPLES; k++) {
            wait_for(&o[i][k]);
            if (i > 0) { /* the first one's failure may have been faster */
                assert_string_equal(o[i][k].finish, "abort");
                assert_int_equal(o[i][k].error.code, DI_OK);
            }
            assert_true(o[i][k].done_ns - start_ns < prompt_ns());
            sem_destroy(&o[i][k].done);
        }
    }
    di_engine_request r = text_request();
    r.regex = "abc";
    run(engine, &r, &good);
    assert_string_equal(good.text, "abc");
    di_engine_destroy(engine);
}

static void destroying_does_not_wait_for_grammars(void **state) {
    (void)state;
    for (int32_t n_threads = 1; n_threads <= 2; n_threads++) {
        di_engine *engine = engine_with(n_threads, 1 << 20);
        outcome o[N][SAMPLES];
        uint64_t ids[N];
        submit_slow(engine, o, ids);
        int64_t start_ns = di_clock_ns();
        di_engine_destroy(engine);
        assert_true(di_clock_ns() - start_ns < prompt_ns());
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < SAMPLES; k++) {
                assert_int_equal(o[i][k].n_done, 1);
                if (i >= n_threads)
                    assert_string_equal(o[i][k].finish, "abort");
                sem_destroy(&o[i][k].done);
            }
        }
    }
}

/* Grammars that are there at once come back while the engine is being destroyed: no request may be lost between the
 * compiler's thread and the engine's. */
static void destroying_loses_no_request(void **state) {
    (void)state;
    enum { ROUNDS = 6, REQUESTS = 24 };
    for (int round = 0; round < ROUNDS; round++) {
        di_engine *engine = engine_with(2, 0);
        outcome o[REQUESTS];
        for (int i = 0; i < REQUESTS; i++) {
            char regex[64];
            di_error err = {0};
            di_engine_request r = text_request();
            snprintf(regex, sizeof regex, "[a-z]{%d,%d}(x|y)*", i + 1, 40 + round);
            r.regex = regex;
            outcome_init(&o[i]);
            di_test_ok(di_engine_submit(engine, &r, on_event, &o[i], NULL, &err), &err);
        }
        di_engine_destroy(engine);
        for (int i = 0; i < REQUESTS; i++) {
            assert_int_equal(o[i].n_done, 1);
            sem_destroy(&o[i].done);
        }
    }
}

typedef struct relay {
    di_engine *engine;
    outcome second;
    di_status submitted;
} relay;

static int on_first(void *user, const di_engine_event *event) {
    relay *r = user;
    if (event->kind != DI_ENGINE_DONE)
        return 0;
    di_engine_request again = text_request();
    again.regex = "again [0-9]";
    r->submitted = di_engine_submit(r->engine, &again, on_event, &r->second, NULL, NULL);
    if (r->submitted)
        sem_post(&r->second.done);
    return 0;
}

/* From the end of a request whose grammar was refused: the engine's thread has just taken it from the compiler's. */
static void callbacks_may_submit_grammars(void **state) {
    (void)state;
    relay r = {.engine = engine_with(1, 0)};
    di_error err = {0};
    outcome_init(&r.second);
    di_engine_request first = text_request();
    first.regex = "(";
    di_test_ok(di_engine_submit(r.engine, &first, on_first, &r, NULL, &err), &err);
    wait_for(&r.second);
    assert_int_equal(r.submitted, DI_OK);
    assert_int_equal(strlen(r.second.text), 7);
    assert_memory_equal(r.second.text, "again ", 6);
    sem_destroy(&r.second.done);
    di_engine_destroy(r.engine);
}

DI_TEST_GROUP(engine_grammar, cmocka_unit_test(fields_name_grammars), cmocka_unit_test(one_field_at_most),
              cmocka_unit_test(aborts_do_not_wait_for_grammars),
              cmocka_unit_test(destroying_does_not_wait_for_grammars), cmocka_unit_test(destroying_loses_no_request),
              cmocka_unit_test(callbacks_may_submit_grammars));
