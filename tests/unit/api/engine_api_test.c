/* The engine of the public API on the model that ships: requests from JSON, text and ids, the order of events, refusals
 * on the caller's thread, aborts, the bound of the queue, draining, the end with requests running, statistics, and two
 * engines at once from many threads. Answers are those of docs/interface.md's examples or of the request run alone. */
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "api/api.h"
#include "deepinfer/deepinfer.h"
#include "harness.h"

/* ---- rig ----------------------------------------------------------------------------------------------------------
 */

static di_engine_config small_config(void) {
    di_engine_config config;
    di_engine_config_init(&config, sizeof config);
    config.model = di_test_source("models/tiny");
    config.backend = "cpu";
    config.threads = 2;
    config.seqs_max = 4;
    config.batch_tokens_max = 256;
    config.chunk_max = 64;
    config.context_max = 1024;
    return config;
}

static di_engine *engine_of(const di_engine_config *config) {
    di_engine *engine = NULL;
    di_error err = {0};
    di_test_ok(di_engine_create(config, &engine, &err), &err);
    assert_non_null(engine);
    return engine;
}

static di_engine *small_engine(void) {
    di_engine_config config = small_config();
    return engine_of(&config);
}

/* What came of a sample. Written by the engine's thread, read after `done`. */
typedef struct outcome {
    sem_t done;
    sem_t *gate; /* waited for at every token; NULL: none */
    sem_t started;
    uint64_t id;
    int n_done, n_tokens, n_text, n_output, stop_after; /* stop_after: the callback ends it at this token; 0: never */
    int order_faults;
    char finish[16];
    di_error error;
    di_strbuf json, text, streamed;
    int32_t tokens[1100];
    int64_t n_result, n_cached, n_prompt;
    bool has_seed;
    uint64_t seed;
    size_t last_text_at;
} outcome;

static void outcome_init(outcome *o) {
    memset(o, 0, sizeof *o);
    assert_int_equal(sem_init(&o->done, 0, 0) | sem_init(&o->started, 0, 0), 0);
}

static void outcome_deinit(outcome *o) {
    sem_destroy(&o->done);
    sem_destroy(&o->started);
    di_strbuf_deinit(&o->json);
    di_strbuf_deinit(&o->text);
    di_strbuf_deinit(&o->streamed);
}

static void wait_for(sem_t *sem) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 120;
    assert_int_equal(sem_timedwait(sem, &end), 0);
}

static void keep_result(outcome *o, const di_engine_result *r) {
    snprintf(o->finish, sizeof o->finish, "%s", r->finish_reason);
    o->error = r->error;
    o->n_result = r->n_tokens;
    o->n_cached = r->n_cached;
    o->n_prompt = r->n_prompt;
    o->has_seed = r->has_seed;
    o->seed = r->seed;
    memcpy(o->tokens, r->tokens, (size_t)DI_MIN(r->n_tokens, 1100) * sizeof *r->tokens);
    di_strbuf_append(&o->text, r->text, r->text_len);
    char *json = NULL;
    size_t len = 0;
    if (!di_engine_result_json(r, &json, &len, NULL))
        di_strbuf_append(&o->json, json, len);
    di_free(json);
}

/* user: outcomes [n], one for each sample. */
static int on_event(void *user, const di_engine_event *event) {
    outcome *o = (outcome *)user + event->index;
    o->order_faults += o->n_done > 0 || (o->id && event->id != o->id);
    o->id = event->id;
    switch (event->kind) {
    case DI_ENGINE_TOKEN:
        o->n_tokens++;
        sem_post(&o->started);
        if (o->gate)
            wait_for(o->gate);
        return o->stop_after == o->n_tokens;
    case DI_ENGINE_TEXT:
        o->n_text++;
        o->order_faults += o->n_tokens == 0;
        di_strbuf_append(&o->streamed, event->text, event->text_len);
        return 0;
    case DI_ENGINE_OUTPUT:
        o->n_output++;
        o->order_faults += o->n_tokens == 0;
        if (event->output == DI_ENGINE_CONTENT)
            di_strbuf_append(&o->streamed, event->text, event->text_len);
        return 0;
    case DI_ENGINE_DONE:
        keep_result(o, event->result);
        o->n_done++;
        sem_post(&o->done);
        return 0;
    }
    return 0;
}

static di_engine_request json_request(const char *json) {
    di_engine_request r;
    di_engine_request_init(&r, sizeof r);
    r.json = json;
    r.json_len = strlen(json);
    return r;
}

/* Submits and waits for the samples [n]. */
static void run_request(di_engine *engine, const di_engine_request *r, outcome *o, int n) {
    di_error err = {0};
    uint64_t id = 0;
    for (int i = 0; i < n; i++)
        outcome_init(&o[i]);
    di_test_ok(di_engine_submit(engine, r, on_event, o, &id, &err), &err);
    for (int i = 0; i < n; i++) {
        wait_for(&o[i].done);
        assert_int_equal(o[i].id, id);
        assert_int_equal(o[i].n_done, 1);
        assert_int_equal(o[i].order_faults, 0);
    }
}

static void run_json(di_engine *engine, const char *json, outcome *o, int n) {
    di_engine_request r = json_request(json);
    run_request(engine, &r, o, n);
}

#define SUM "{\"id\":7,\"messages\":[{\"role\":\"user\",\"content\":\"What is 47 + 38?\"}],\"temperature\":0}"
#define LONG_TALE "{\"prompt\":\"Once upon a time\",\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":1000}"

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

static void messages_are_answered(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome o;
    run_json(engine, SUM, &o, 1);
    assert_string_equal(di_strbuf_str(&o.text), "47 + 38 = 85");
    assert_string_equal(di_strbuf_str(&o.streamed), "47 + 38 = 85");
    assert_string_equal(o.finish, "stop");
    assert_int_equal(o.n_tokens, o.n_result);
    assert_int_equal(o.n_text, 0);
    assert_true(o.n_output > 0);
    assert_contains(di_strbuf_str(&o.json), "{\"id\":7,\"text\":\"47 + 38 = 85\",\"token_ids\":[");
    assert_contains(di_strbuf_str(&o.json),
                    "\"message\":{\"role\":\"assistant\",\"content\":\"47 + 38 = 85\"},\"finish_reason\":\"stop\"");
    assert_true(o.json.data[o.json.len - 1] == '}');
    outcome_deinit(&o);
    di_engine_destroy(engine);
}

static void text_and_ids_are_what_a_line_is(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome line, text, ids;
    const int n_new = di_test_is_sanitized() ? 8 : 20;
    char json[128];
    snprintf(json, sizeof json, "{\"prompt\":\"Once upon a time\",\"temperature\":0,\"max_tokens\":%d}", n_new);
    run_json(engine, json, &line, 1);
    assert_int_equal(line.n_result, n_new);
    assert_string_equal(line.finish, "length");
    assert_string_equal(di_strbuf_str(&line.text), di_strbuf_str(&line.streamed));

    di_engine_sampling sampling;
    di_engine_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = n_new;
    di_engine_request r;
    di_engine_request_init(&r, sizeof r);
    r.text = "Once upon a time";
    r.text_len = strlen(r.text);
    r.sampling = &sampling;
    run_request(engine, &r, &text, 1);
    assert_string_equal(di_strbuf_str(&text.text), di_strbuf_str(&line.text));

    /* The prompt's ids: the begin mark, then the text's. */
    int32_t *encoded = NULL, prompt[64] = {di_tokenizer_find(di_engine_tokenizer(engine), "<｜begin▁of▁sentence｜>")};
    size_t n = 0;
    di_error err = {0};
    assert_true(prompt[0] >= 0);
    di_test_ok(di_tokenizer_tokenize(di_engine_tokenizer(engine), r.text, r.text_len, false, &encoded, &n, &err), &err);
    memcpy(prompt + 1, encoded, n * sizeof *encoded);
    di_free(encoded);
    r.text = NULL;
    r.ids = prompt;
    r.n_ids = n + 1;
    r.events = 0;
    run_request(engine, &r, &ids, 1);
    assert_string_equal(di_strbuf_str(&ids.text), di_strbuf_str(&line.text));
    assert_memory_equal(ids.tokens, line.tokens, (size_t)n_new * sizeof *ids.tokens);
    assert_int_equal(ids.n_prompt, n + 1);
    assert_int_equal(ids.n_tokens, 0); /* nobody asked for these events */
    assert_int_equal(ids.n_text, 0);
    outcome_deinit(&line);
    outcome_deinit(&text);
    outcome_deinit(&ids);
    di_engine_destroy(engine);
}

static void samples_are_requests_with_the_next_seeds(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome together[3], alone;
    const int n_new = di_test_is_sanitized() ? 8 : 24;
    char line[128];
    snprintf(line, sizeof line, "{\"prompt\":\"The fox\",\"seed\":11,\"n\":3,\"max_tokens\":%d}", n_new);
    run_json(engine, line, together, 3);
    for (int i = 0; i < 3; i++) {
        snprintf(line, sizeof line, "{\"prompt\":\"The fox\",\"seed\":%d,\"max_tokens\":%d}", 11 + i, n_new);
        run_json(engine, line, &alone, 1);
        assert_int_equal(together[i].seed, 11 + i);
        assert_int_equal(together[i].n_result, alone.n_result);
        assert_memory_equal(together[i].tokens, alone.tokens, (size_t)alone.n_result * sizeof *alone.tokens);
        char part[32];
        snprintf(part, sizeof part, "\"index\":%d,", i);
        assert_contains(di_strbuf_str(&together[i].json), part);
        outcome_deinit(&alone);
        outcome_deinit(&together[i]);
    }
    di_engine_destroy(engine);
}

static void prefixes_are_cached_under_one_salt(void **state) {
    (void)state;
    di_engine_config config = small_config();
    di_engine *engine = engine_of(&config);
    di_strbuf line = {0};
    di_strbuf_puts(&line, "{\"prompt_token_ids\":[0");
    for (int i = 1; i < (di_test_is_sanitized() ? 140 : 300); i++) /* two blocks and more, or one */
        di_strbuf_printf(&line, ",%d", 100 + i % 50);
    di_strbuf_puts(&line, "],\"temperature\":0,\"max_tokens\":4}");
    di_engine_request r = json_request(di_strbuf_str(&line));
    outcome cold, warm, salted;
    run_request(engine, &r, &cold, 1);
    run_request(engine, &r, &warm, 1);
    r.cache_salt = "another";
    run_request(engine, &r, &salted, 1);
    assert_int_equal(cold.n_cached, 0);
    assert_true(warm.n_cached >= 128 && warm.n_cached % 128 == 0); /* whole blocks */
    assert_int_equal(salted.n_cached, 0);
    assert_memory_equal(cold.tokens, warm.tokens, 4 * sizeof *cold.tokens);
    assert_memory_equal(cold.tokens, salted.tokens, 4 * sizeof *cold.tokens);
    outcome_deinit(&cold);
    outcome_deinit(&warm);
    outcome_deinit(&salted);
    di_strbuf_deinit(&line);
    di_engine_destroy(engine);
}

/* ---- refusals -----------------------------------------------------------------------------------------------------
 */

static void bad_configurations_are_refused(void **state) {
    (void)state;
    di_engine *engine = NULL;
    di_error err = {0};
    di_engine_config config = small_config();
    config.struct_size = 3;
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_ARG);
    assert_contains(err.message, "struct_size 3");
    config = small_config();
    config.model = NULL;
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_ARG);
    assert_contains(err.message, "model");
    config = small_config();
    config.model = "/nonexistent/folder";
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_NOT_FOUND);
    config = small_config();
    config.replay = "sometimes";
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_ARG);
    assert_contains(err.message, "replay: 'sometimes', expected off, mask or compact");
    config = small_config();
    config.seqs_max = 0;
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_ARG);
    assert_contains(err.message, "seqs_max: 0, expected 1 to 4096");
    config = small_config();
    config.trace = "/nonexistent/trace.json";
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_IO);
    di_engine_sampling sampling;
    di_engine_sampling_init(&sampling, sizeof sampling);
    sampling.top_p = 2;
    config = small_config();
    config.sampling = &sampling;
    assert_int_equal(di_engine_create(&config, &engine, &err), DI_ERR_RANGE);
    assert_contains(err.message, "top_p");
    assert_null(engine);
    assert_int_equal(di_log_level_set("loud", &err), DI_ERR_ARG);
    di_engine_destroy(NULL);
}

static void assert_refused(di_engine *engine, const di_engine_request *r, di_status want, const char *part) {
    outcome o;
    di_error err = {0};
    outcome_init(&o);
    assert_int_equal(di_engine_submit(engine, r, on_event, &o, NULL, &err), want);
    assert_contains(err.message, part);
    assert_int_equal(o.n_done, 0);
    outcome_deinit(&o);
}

static void bad_requests_are_refused_at_once(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    di_engine_request r = json_request("{\"prompt\":");
    assert_refused(engine, &r, DI_ERR_REQUEST, "not JSON");
    r = json_request("{\"prompt\":\"x\",\"temperature\":-1}");
    assert_refused(engine, &r, DI_ERR_REQUEST, "temperature");
    r = json_request("{\"prompt_token_ids\":[]}");
    assert_refused(engine, &r, DI_ERR_REQUEST, "empty");
    r = json_request("{}");
    r.text = "x";
    assert_refused(engine, &r, DI_ERR_ARG, "2 of json, text and ids");
    r = json_request("{}");
    r.json_api = "carrier pigeon";
    assert_refused(engine, &r, DI_ERR_ARG, "carrier pigeon");
    r = json_request("{}");
    r.struct_size = 1;
    assert_refused(engine, &r, DI_ERR_ARG, "struct_size");
    di_engine_request_init(&r, sizeof r);
    assert_refused(engine, &r, DI_ERR_ARG, "0 of json, text and ids");

    int32_t many[1100] = {0};
    r.ids = many;
    r.n_ids = 1024;
    assert_refused(engine, &r, DI_ERR_REQUEST, "the context holds 1024");
    r.n_ids = 2;
    di_engine_sampling sampling;
    di_engine_sampling_init(&sampling, sizeof sampling);
    r.sampling = &sampling;
    sampling.n = 0;
    assert_refused(engine, &r, DI_ERR_RANGE, "n: 0, expected 1 to 1024");
    sampling.n = 1;
    sampling.n_stop = 1;
    assert_refused(engine, &r, DI_ERR_ARG, "'stop' is NULL");
    sampling.n_stop = 0;
    sampling.min_p = 3;
    assert_refused(engine, &r, DI_ERR_RANGE, "min_p");
    sampling.min_p = 0;
    int32_t outside = 1 << 30;
    float bias = 1;
    sampling.n_bias = 1;
    sampling.bias_tokens = &outside;
    sampling.bias = &bias;
    assert_refused(engine, &r, DI_ERR_RANGE, "1073741824");
    r.text = "\xff";
    r.text_len = 1;
    r.ids = NULL;
    sampling.n_bias = 0;
    assert_refused(engine, &r, DI_ERR_REQUEST, "UTF-8");

    di_engine_stats_t stats = {.struct_size = sizeof stats};
    di_engine_stats(engine, &stats);
    assert_int_equal(stats.n_submitted, 0);
    assert_int_equal(stats.n_refused_invalid, 12);
    di_engine_destroy(engine);
}

/* What only the core sees comes as the last event of every sample. */
static void late_refusals_are_done_events(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome o[2];
    run_json(engine, "{\"prompt_token_ids\":[0,999999],\"n\":2}", o, 2);
    for (int i = 0; i < 2; i++) {
        assert_string_equal(o[i].finish, "error");
        assert_int_equal(o[i].error.code, DI_ERR_REQUEST);
        assert_contains(o[i].error.message, "999999");
        assert_contains(di_strbuf_str(&o[i].json), "\"error\":{\"message\":");
        outcome_deinit(&o[i]);
    }
    di_engine_destroy(engine);
}

static void a_refusal_has_its_line(void **state) {
    (void)state;
    di_engine_request r = json_request("{\"id\":\"a\",\"prompt\":\"x\",\"top_p\":7}");
    di_error refused = {.code = DI_ERR_REQUEST, .message = "top_p: 7, expected something else"}, err = {0};
    char *json = NULL;
    size_t len = 0;
    di_test_ok(di_engine_refusal_json(&r, &refused, &json, &len, &err), &err);
    assert_int_equal(strlen(json), len);
    assert_contains(json, "{\"id\":\"a\",\"text\":\"\",\"token_ids\":[],\"finish_reason\":\"error\"");
    assert_contains(json, "\"message\":\"top_p: 7, expected something else\"");
    assert_contains(json, "\"type\":\"invalid_request_error\",\"param\":\"top_p\"");
    di_free(json);
    static const struct {
        di_status status;
        const char *type;
    } cases[] = {{DI_ERR_BUSY, "\"type\":\"rate_limit_error\""},
                 {DI_ERR_CANCELLED, "\"type\":\"server_error\""},
                 {DI_ERR_MEMORY, "\"type\":\"server_error\""}};
    r = json_request("{\"prompt\":\"x\"}");
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        refused.code = cases[i].status;
        di_test_ok(di_engine_refusal_json(&r, &refused, &json, NULL, &err), &err);
        assert_contains(json, cases[i].type);
        di_free(json);
    }
}

/* ---- ends ---------------------------------------------------------------------------------------------------------
 */

static void aborts_end_requests(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    di_error err = {0};
    outcome o;
    uint64_t id = 0;
    outcome_init(&o);
    di_engine_request r = json_request(LONG_TALE);
    di_test_ok(di_engine_submit(engine, &r, on_event, &o, &id, &err), &err);
    wait_for(&o.started);
    assert_true(di_engine_abort(engine, id));
    assert_true(di_engine_abort(engine, id) || o.n_done);
    wait_for(&o.done);
    assert_string_equal(o.finish, "abort");
    assert_true(o.n_result > 0 && o.n_result < 1000);
    assert_string_equal(di_strbuf_str(&o.text), di_strbuf_str(&o.streamed));
    di_test_ok(di_engine_drain(engine, -1, &err), &err);
    assert_false(di_engine_abort(engine, id));
    assert_false(di_engine_abort(engine, id + 1));
    outcome_deinit(&o);
    di_engine_destroy(engine);
}

/* Aborted at once, a request may not even have reached the engine's thread; it ends in the same way. */
static void aborts_right_behind_submission(void **state) {
    (void)state;
    enum { N = 50 };
    di_engine *engine = small_engine();
    static outcome o[N];
    for (int i = 0; i < N; i++) {
        di_error err = {0};
        uint64_t id = 0;
        outcome_init(&o[i]);
        di_engine_request r = json_request(LONG_TALE);
        di_test_ok(di_engine_submit(engine, &r, on_event, &o[i], &id, &err), &err);
        assert_true(di_engine_abort(engine, id));
    }
    for (int i = 0; i < N; i++) {
        wait_for(&o[i].done);
        assert_string_equal(o[i].finish, "abort");
        outcome_deinit(&o[i]);
    }
    di_engine_destroy(engine);
}

static void a_callback_ends_its_sample_alone(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome o[2];
    di_error err = {0};
    outcome_init(&o[0]);
    outcome_init(&o[1]);
    o[1].stop_after = 3;
    di_engine_request r =
        json_request("{\"prompt\":\"The fox\",\"seed\":1,\"n\":2,\"ignore_eos\":true,\"max_tokens\":9}");
    di_test_ok(di_engine_submit(engine, &r, on_event, o, NULL, &err), &err);
    wait_for(&o[0].done);
    wait_for(&o[1].done);
    assert_string_equal(o[0].finish, "length");
    assert_int_equal(o[0].n_result, 9);
    assert_string_equal(o[1].finish, "abort");
    assert_int_equal(o[1].error.code, DI_OK);
    assert_int_equal(o[1].n_result, 3);
    di_test_ok(di_engine_drain(engine, -1, &err), &err);
    di_engine_stats_t stats = {.struct_size = sizeof stats};
    for (int i = 0; i < 1000 && stats.n_finished < 2; i++) { /* numbers follow at the end of the step */
        di_engine_stats(engine, &stats);
        usleep(1000);
    }
    assert_int_equal(stats.n_abort, 1);
    assert_int_equal(stats.n_error, 0);
    outcome_deinit(&o[0]);
    outcome_deinit(&o[1]);
    di_engine_destroy(engine);
}

static void deadlines_pass(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome o;
    sem_t gate;
    di_error err = {0};
    outcome_init(&o);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    o.gate = &gate;
    di_engine_request r = json_request(LONG_TALE);
    r.deadline_ms = 20;
    di_test_ok(di_engine_submit(engine, &r, on_event, &o, NULL, &err), &err);
    if (sem_trywait(&o.done)) { /* the request may be late before its first token */
        usleep(40000);
        for (int i = 0; i < 1000; i++)
            sem_post(&gate);
        wait_for(&o.done);
    }
    assert_string_equal(o.finish, "error");
    assert_int_equal(o.error.code, DI_ERR_CANCELLED);
    assert_contains(o.error.message, "deadline");
    outcome_deinit(&o);
    di_engine_destroy(engine);
    sem_destroy(&gate);
}

static void a_full_queue_is_busy(void **state) {
    (void)state;
    di_engine_config config = small_config();
    config.seqs_max = 1;
    config.queue_max = 1;
    di_engine *engine = engine_of(&config);
    di_error err = {0};
    outcome o[2], refused;
    sem_t gate;
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    outcome_init(&o[0]);
    outcome_init(&o[1]);
    o[0].gate = &gate;
    di_engine_request r = json_request(SUM), two = json_request("{\"prompt\":\"x\",\"n\":2}"),
                      three = json_request("{\"prompt\":\"x\",\"n\":3}");
    assert_refused(engine, &three, DI_ERR_REQUEST, "n: 3, expected 1 to 2"); /* there is never room for it */
    di_test_ok(di_engine_submit(engine, &r, on_event, &o[0], NULL, &err), &err);
    wait_for(&o[0].started);
    assert_refused(engine, &two, DI_ERR_BUSY, "try again"); /* one place is left */
    di_test_ok(di_engine_submit(engine, &r, on_event, &o[1], NULL, &err), &err);
    assert_refused(engine, &r, DI_ERR_BUSY, "try again");
    for (int i = 0; i < 100; i++)
        sem_post(&gate);
    wait_for(&o[0].done);
    wait_for(&o[1].done);
    assert_string_equal(di_strbuf_str(&o[0].text), "47 + 38 = 85");
    assert_string_equal(di_strbuf_str(&o[1].text), "47 + 38 = 85");
    for (int i = 0; i < 1000; i++) { /* the place is free behind the callback */
        outcome_init(&refused);
        if (!di_engine_submit(engine, &r, on_event, &refused, NULL, &err))
            break;
        outcome_deinit(&refused);
        usleep(1000);
    }
    wait_for(&refused.done);
    outcome_deinit(&refused);
    di_engine_stats_t stats = {.struct_size = sizeof stats};
    di_engine_stats(engine, &stats);
    assert_true(stats.n_refused_busy >= 2);
    assert_int_equal(di_status_http(DI_ERR_BUSY), 429);
    outcome_deinit(&o[0]);
    outcome_deinit(&o[1]);
    di_engine_destroy(engine);
    sem_destroy(&gate);
}

static void draining_lets_requests_end(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    di_error err = {0};
    outcome o;
    sem_t gate;
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    outcome_init(&o);
    o.gate = &gate;
    di_engine_request r = json_request(SUM);
    di_test_ok(di_engine_submit(engine, &r, on_event, &o, NULL, &err), &err);
    assert_int_equal(di_engine_drain(engine, 20, &err), DI_ERR_BUSY);
    assert_contains(err.message, "1 requests still run");
    assert_refused(engine, &r, DI_ERR_BUSY, "shutting down");
    for (int i = 0; i < 100; i++)
        sem_post(&gate);
    di_test_ok(di_engine_drain(engine, -1, &err), &err);
    assert_int_equal(o.n_done, 1);
    assert_string_equal(di_strbuf_str(&o.text), "47 + 38 = 85");
    di_test_ok(di_engine_drain(engine, 0, &err), &err);
    outcome_deinit(&o);
    di_engine_destroy(engine);
    sem_destroy(&gate);
}

static void destroying_ends_what_runs(void **state) {
    (void)state;
    enum { N = 12 }; /* some run, some wait */
    di_engine *engine = small_engine();
    static outcome o[N];
    for (int i = 0; i < N; i++) {
        di_error err = {0};
        outcome_init(&o[i]);
        di_engine_request r = json_request(LONG_TALE);
        di_test_ok(di_engine_submit(engine, &r, on_event, &o[i], NULL, &err), &err);
    }
    wait_for(&o[0].started);
    di_engine_destroy(engine);
    for (int i = 0; i < N; i++) {
        assert_int_equal(o[i].n_done, 1);
        assert_string_equal(o[i].finish, "abort");
        outcome_deinit(&o[i]);
    }
}

/* ---- callbacks that use the engine --------------------------------------------------------------------------------
 */

typedef struct relay {
    di_engine *engine;
    outcome second;
    di_status drained;
    sem_t done;
} relay;

static int on_first(void *user, const di_engine_event *event) {
    relay *r = user;
    if (event->kind != DI_ENGINE_DONE)
        return 0;
    di_engine_request again = json_request(SUM);
    r->drained = di_engine_drain(r->engine, 0, NULL);
    di_engine_destroy(r->engine); /* does nothing here */
    if (di_engine_submit(r->engine, &again, on_event, &r->second, NULL, NULL))
        sem_post(&r->second.done);
    sem_post(&r->done);
    return 0;
}

static void callbacks_may_submit(void **state) {
    (void)state;
    relay r = {.engine = small_engine()};
    di_error err = {0};
    outcome_init(&r.second);
    assert_int_equal(sem_init(&r.done, 0, 0), 0);
    di_engine_request first = json_request("{\"prompt\":\"x\",\"max_tokens\":1}");
    di_test_ok(di_engine_submit(r.engine, &first, on_first, &r, NULL, &err), &err);
    wait_for(&r.done);
    wait_for(&r.second.done);
    assert_int_equal(r.drained, DI_ERR_ARG);
    assert_string_equal(di_strbuf_str(&r.second.text), "47 + 38 = 85");
    outcome_deinit(&r.second);
    di_engine_destroy(r.engine);
    sem_destroy(&r.done);
}

/* ---- numbers ------------------------------------------------------------------------------------------------------
 */

static void statistics_count(void **state) {
    (void)state;
    di_engine *engine = small_engine();
    outcome o;
    di_error err = {0};
    run_json(engine, SUM, &o, 1);
    di_test_ok(di_engine_drain(engine, -1, &err), &err);
    di_engine_stats_t stats = {.struct_size = sizeof stats};
    for (int i = 0; i < 1000 && stats.n_finished < 1; i++) {
        di_engine_stats(engine, &stats);
        usleep(1000);
    }
    assert_int_equal(stats.n_submitted, 1);
    assert_int_equal(stats.n_finished, 1);
    assert_int_equal(stats.n_stop, 1);
    assert_int_equal(stats.prompt_tokens, o.n_prompt);
    assert_int_equal(stats.output_tokens, o.n_result);
    assert_int_equal(stats.finished_output_tokens, o.n_result);
    assert_int_equal(stats.slots, 4);
    assert_int_equal(stats.is_replay_exact, 1);
    char *json = NULL;
    size_t len = 0;
    di_test_ok(di_engine_stats_json(engine, &json, &len, &err), &err);
    di_json *v = NULL;
    di_test_ok(di_json_parse(&v, json, len, &err), &err);
    assert_int_equal(di_json_int(di_json_get(v, "output_tokens")), o.n_result);
    assert_true(di_json_is(di_json_get(v, "steps_per_s"), DI_JSON_REAL));
    size_t n_fields = 0;
#define COUNT(type, kind, name, meaning) n_fields += di_json_get(v, #name) != NULL;
    DI_ENGINE_STATS_LIST(COUNT)
#undef COUNT
    assert_int_equal(di_json_object_len(v), n_fields);
    di_json_free(v);
    di_free(json);
    /* A program built with an earlier header has a shorter structure. */
    di_engine_stats_t shorter = {.struct_size = offsetof(di_engine_stats_t, n_decode_steps), .n_decode_steps = -5};
    di_engine_stats(engine, &shorter);
    assert_true(shorter.n_steps >= stats.n_steps); /* the step that was under way may have ended */
    assert_int_equal(shorter.n_decode_steps, -5);
    outcome_deinit(&o);
    di_engine_destroy(engine);
}

static void traces_are_written(void **state) {
    (void)state;
    di_engine_config config = small_config();
    config.trace = di_test_tmp("trace.json");
    di_engine *engine = engine_of(&config);
    outcome o;
    run_json(engine, SUM, &o, 1);
    outcome_deinit(&o);
    di_engine_destroy(engine);
    di_strbuf text = {0};
    di_error err = {0};
    di_json *v = NULL;
    di_test_ok(di_file_read(config.trace, 1 << 24, &text, &err), &err);
    di_test_ok(di_json_parse(&v, text.data, text.len, &err), &err);
    di_json_free(v);
    di_strbuf_deinit(&text);
}

/* ---- two engines, many threads ------------------------------------------------------------------------------------
 */

enum { THREADS = 4, REQUESTS = 6 };

/* Of REQUESTS: under a sanitizer threads meet as often in fewer, which take most of the time. */
static int n_requests(void) {
    return di_test_is_sanitized() ? 2 : REQUESTS;
}

typedef struct client {
    di_engine *engine;
    int first;
    outcome o[REQUESTS];
    int n_failed;
    pthread_t thread;
} client;

static void write_line(char *line, size_t size, int i) {
    snprintf(line, size, "{\"prompt\":\"%s number %d\",\"seed\":%d,\"max_tokens\":%d,\"logprobs\":1}",
             i % 2 ? "Once upon a time" : "The fox", i, i, di_test_is_sanitized() ? 3 + i % 3 : 8 + i % 9);
}

static void *submit_all(void *arg) {
    client *c = arg;
    for (int i = 0; i < n_requests(); i++) {
        char line[160];
        write_line(line, sizeof line, c->first + i);
        di_engine_request r = json_request(line);
        outcome_init(&c->o[i]);
        c->n_failed += di_engine_submit(c->engine, &r, on_event, &c->o[i], NULL, NULL) != DI_OK;
    }
    for (int i = 0; i < n_requests(); i++)
        wait_for(&c->o[i].done);
    return NULL;
}

/* cached_tokens depends on what ran before; everything else of a result must not. */
static void assert_same_result(const outcome *a, const outcome *b) {
    di_error err = {0};
    di_json *x = NULL, *y = NULL;
    di_test_ok(di_json_parse(&x, a->json.data, a->json.len, &err), &err);
    di_test_ok(di_json_parse(&y, b->json.data, b->json.len, &err), &err);
    static const char *const keys[] = {"text", "token_ids", "finish_reason", "seed", "logprobs"};
    for (size_t i = 0; i < DI_COUNT(keys); i++) {
        assert_non_null(di_json_get(x, keys[i]));
        assert_true(di_json_equal(di_json_get(x, keys[i]), di_json_get(y, keys[i])));
    }
    di_json_free(x);
    di_json_free(y);
}

static void two_engines_are_independent(void **state) {
    (void)state;
    static outcome alone[THREADS * REQUESTS];
    const int n = n_requests();
    di_engine *engine = small_engine();
    for (int i = 0; i < THREADS * n; i++) {
        char line[160];
        write_line(line, sizeof line, i);
        run_json(engine, line, &alone[i], 1);
    }
    di_engine_destroy(engine);

    static client clients[2 * THREADS];
    di_engine *engines[2] = {small_engine(), small_engine()};
    for (int i = 0; i < 2 * THREADS; i++) {
        clients[i].engine = engines[i % 2];
        clients[i].first = i / 2 * n;
        assert_int_equal(pthread_create(&clients[i].thread, NULL, submit_all, &clients[i]), 0);
    }
    for (int i = 0; i < 2 * THREADS; i++) {
        assert_int_equal(pthread_join(clients[i].thread, NULL), 0);
        assert_int_equal(clients[i].n_failed, 0);
        for (int k = 0; k < n; k++) {
            assert_same_result(&clients[i].o[k], &alone[clients[i].first + k]);
            outcome_deinit(&clients[i].o[k]);
        }
    }
    for (int i = 0; i < THREADS * n; i++)
        outcome_deinit(&alone[i]);
    di_engine_destroy(engines[0]);
    di_engine_destroy(engines[1]);
}

/* Requests and aborts from several threads at once: every request has exactly one last event, whenever it was ended. */
typedef struct vandal {
    di_engine *engine;
    uint64_t rng;
    int n_failed;
    pthread_t thread;
} vandal;

static int n_aborted_or_not(void) {
    return di_test_is_sanitized() ? 12 : 25;
}

static void *submit_and_abort(void *arg) {
    const int n = n_aborted_or_not();
    vandal *v = arg;
    outcome *o = calloc((size_t)n, sizeof *o);
    for (int i = 0; i < n; i++) {
        uint64_t id = 0;
        di_engine_request r =
            json_request(di_test_is_sanitized() ? "{\"prompt\":\"The fox\",\"seed\":3,\"max_tokens\":4}"
                                                : "{\"prompt\":\"The fox\",\"seed\":3,\"max_tokens\":12}");
        outcome_init(&o[i]);
        v->n_failed += di_engine_submit(v->engine, &r, on_event, &o[i], &id, NULL) != DI_OK;
        usleep((useconds_t)di_test_random_range(&v->rng, 0, 3000));
        if (di_test_random_range(&v->rng, 0, 1))
            di_engine_abort(v->engine, id);
    }
    for (int i = 0; i < n; i++) {
        wait_for(&o[i].done);
        v->n_failed += o[i].n_done != 1 || o[i].order_faults > 0;
        outcome_deinit(&o[i]);
    }
    free(o);
    return NULL;
}

static void aborts_from_many_threads(void **state) {
    (void)state;
    const int n = THREADS * n_aborted_or_not();
    vandal vandals[THREADS];
    di_engine *engine = small_engine();
    di_error err = {0};
    for (int i = 0; i < THREADS; i++) {
        vandals[i] = (vandal){.engine = engine, .rng = (uint64_t)i};
        assert_int_equal(pthread_create(&vandals[i].thread, NULL, submit_and_abort, &vandals[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(vandals[i].thread, NULL), 0);
        assert_int_equal(vandals[i].n_failed, 0);
    }
    di_test_ok(di_engine_drain(engine, -1, &err), &err);
    di_engine_stats_t stats = {.struct_size = sizeof stats};
    for (int i = 0; i < 1000 && (stats.n_finished < n || stats.blocks_used > 0); i++) {
        di_engine_stats(engine, &stats);
        usleep(1000);
    }
    assert_int_equal(stats.n_finished, n);
    assert_int_equal(stats.blocks_used, 0);
    assert_int_equal(stats.slots_used, 0);
    di_engine_destroy(engine);
}

DI_TEST_GROUP(engine_api, cmocka_unit_test(messages_are_answered), cmocka_unit_test(text_and_ids_are_what_a_line_is),
              cmocka_unit_test(samples_are_requests_with_the_next_seeds),
              cmocka_unit_test(prefixes_are_cached_under_one_salt), cmocka_unit_test(bad_configurations_are_refused),
              cmocka_unit_test(bad_requests_are_refused_at_once), cmocka_unit_test(late_refusals_are_done_events),
              cmocka_unit_test(a_refusal_has_its_line), cmocka_unit_test(aborts_end_requests),
              cmocka_unit_test(aborts_right_behind_submission), cmocka_unit_test(a_callback_ends_its_sample_alone),
              cmocka_unit_test(deadlines_pass), cmocka_unit_test(a_full_queue_is_busy),
              cmocka_unit_test(draining_lets_requests_end), cmocka_unit_test(destroying_ends_what_runs),
              cmocka_unit_test(callbacks_may_submit), cmocka_unit_test(statistics_count),
              cmocka_unit_test(traces_are_written), cmocka_unit_test(two_engines_are_independent),
              cmocka_unit_test(aborts_from_many_threads));
