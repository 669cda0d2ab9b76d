/* The table of routes, the embedded pages, and percentiles of times. */
#include "harness.h"

#include "server/server_internal.h"

static void paths_find_their_routes_and_nothing_else(void **state) {
    (void)state;
    static const char *const absent[] = {
        "",        "/v1",  "/v1/models/", "/v1/chat/completions/", "/web/",           "//", "/STATS",
        "/stats/", "/web", "/health ",    "/etc/passwd",           "/../web/chat.js", "*"};
    char *rest = NULL;
    for (size_t i = 0; i < di_routes_len; i++) {
        char path[100];
        snprintf(path, sizeof path, "%s", di_routes[i].path);
        char *star = strchr(path, '*');
        if (star)
            memcpy(star, "x/y", 4);
        assert_ptr_equal(di_route_find(path, &rest), &di_routes[i]);
        assert_string_equal(rest, star ? "x/y" : path);
        free(rest);
    }
    for (size_t i = 0; i < DI_COUNT(absent); i++)
        assert_null(di_route_find(absent[i], &rest));
}

static void only_harmless_routes_need_no_key(void **state) {
    (void)state;
    static const char *const open[] = {"/health", "/version", "/metrics", "/", "/stats", "/web/*"};
    for (size_t i = 0; i < di_routes_len; i++) {
        bool is_listed = false;
        for (size_t k = 0; k < DI_COUNT(open); k++)
            is_listed = is_listed || strcmp(open[k], di_routes[i].path) == 0;
        assert_int_equal((di_routes[i].flags & DI_ROUTE_OPEN) != 0, is_listed);
        if (strcmp(di_routes[i].path, "/trace") == 0)
            assert_true(di_routes[i].flags & DI_ROUTE_LOCAL);
    }
}

static void pages_are_in_the_program(void **state) {
    (void)state;
    static const char *const absent[] = {"", ".", "..", "/etc/passwd", "../web.c", "chat.html/", "web_files.h"};
    const di_web_file *page = di_web_find("/");
    assert_non_null(page);
    assert_string_equal(page->path, "chat.html");
    assert_true(page->end - page->data > 500);
    assert_memory_equal(page->data, "<!doctype html>", 15);
    assert_string_equal(di_web_find("/stats")->path, "stats.html");
    for (size_t i = 0; i < DI_COUNT(absent); i++)
        assert_null(di_web_find(absent[i]));
}

/* Times of 1 to 2,000 ms: the window has the last 1,024. */
static void percentiles_are_of_the_last_times(void **state) {
    (void)state;
    di_server server = {.model_name = "a \"model\"", .phase = DI_LOADING};
    di_strbuf out = {0};
    di_metrics_init(&server.metrics);
    di_stats_write(&server, &out);
    assert_non_null(
        strstr(di_strbuf_str(&out), "\"model\":\"a \\\"model\\\"\",\"status\":\"loading\",\"engine\":null"));
    assert_non_null(strstr(di_strbuf_str(&out), "\"ttft_ms\":{\"n\":0,\"p50\":null,\"p90\":null,\"p99\":null}"));
    for (int i = 1; i <= 2000; i++)
        di_metrics_time(&server.metrics, DI_TIME_FIRST, (int64_t)i * 1000000);
    di_strbuf_reset(&out);
    di_stats_write(&server, &out);
    /* 977 .. 2000: places 511, 920 and 1012 of 1,024. */
    assert_non_null(strstr(di_strbuf_str(&out), "\"ttft_ms\":{\"n\":2000,\"p50\":1488,\"p90\":1897,\"p99\":1989}"));
    di_json *json = NULL;
    di_error err = {0};
    di_test_ok(di_json_parse(&json, out.data, out.len, &err), &err);
    di_json_free(json);
    di_strbuf_reset(&out);
    di_metrics_write(&server, &out);
    assert_non_null(strstr(di_strbuf_str(&out), "deepinfer:time_to_first_token_seconds_bucket{le=\"1\"} 1000\n"));
    assert_non_null(strstr(di_strbuf_str(&out), "deepinfer:time_to_first_token_seconds_bucket{le=\"+Inf\"} 2000\n"));
    assert_non_null(strstr(di_strbuf_str(&out), "vllm:time_to_first_token_seconds_count 2000\n"));
    assert_non_null(
        strstr(di_strbuf_str(&out), "vllm:num_requests_waiting{model_name=\"a \\\"model\\\"\",engine=\"0\"} 0\n"));
    di_strbuf_deinit(&out);
    di_metrics_deinit(&server.metrics);
}

DI_TEST_GROUP(routes, cmocka_unit_test(paths_find_their_routes_and_nothing_else),
              cmocka_unit_test(only_harmless_routes_need_no_key), cmocka_unit_test(pages_are_in_the_program),
              cmocka_unit_test(percentiles_are_of_the_last_times))
