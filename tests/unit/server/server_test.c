/* The whole server in this process, over loopback, with the model that ships: many clients at once, some of which hang
 * up in the middle, its end in the middle of streams, and what it gives back afterwards. Runs under the thread
 * sanitizer. */
#include "harness.h"

#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "server/server_internal.h"

/* Connections that were made since the last server began: one may wait to be accepted when its client has left. */
static _Atomic int64_t n_dialed;

static di_server *start(di_server_config *config, di_engine_config *engine) {
    di_server *server;
    di_error err = {0};
    di_engine_config_init(engine, sizeof *engine);
    engine->model = di_test_source("models/tiny");
    engine->threads = 2;
    engine->seqs_max = 4;
    engine->batch_tokens_max = 256;
    engine->chunk_max = 128;
    engine->queue_max = 12;
    engine->context_max = 1024;
    di_server_config_init(config);
    config->engine = engine;
    config->keep_alive_s = config->read_timeout_s = 5; /* what a client left in its middle ends by these */
    di_test_ok(di_server_create(config, &server, &err), &err);
    di_test_ok(di_server_wait_ready(server, &err), &err);
    atomic_store(&n_dialed, 0);
    return server;
}

static int dial(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval limit = {.tv_sec = 60};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        close(fd);
        return -1;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    atomic_fetch_add(&n_dialed, fd >= 0);
    return fd;
}

static bool post(int fd, const char *path, const char *headers, const char *body) {
    char text[2000];
    int n = snprintf(text, sizeof text,
                     "POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %zu\r\n%s\r\n%s",
                     path, strlen(body), headers, body);
    return send(fd, text, (size_t)n, MSG_NOSIGNAL) == n;
}

/* Everything up to the other side's end, or at most `limit` bytes. */
static size_t read_all(int fd, char *out, size_t size, size_t limit) {
    size_t n = 0;
    while (n < DI_MIN(limit, size - 1)) {
        ssize_t k = recv(fd, out + n, DI_MIN(limit, size - 1) - n, 0);
        if (k <= 0)
            break;
        n += (size_t)k;
    }
    out[n] = '\0';
    return n;
}

/* Asks and returns the status, with the reply in out. */
static int ask(int port, const char *path, const char *headers, const char *body, char *out, size_t size) {
    int fd = dial(port), status = 0;
    if (fd >= 0 && post(fd, path, headers, body) && read_all(fd, out, size, size) > 12)
        status = (out[9] - '0') * 100 + (out[10] - '0') * 10 + (out[11] - '0');
    if (fd >= 0)
        close(fd);
    return status;
}

static void answers_are_those_of_the_engine_alone(void **state) {
    (void)state;
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    int port = di_server_port(server);
    static char whole[20000], streamed[200000];
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"What is 47 + 38?\"}],\"temperature\":0}",
                      stream[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"What is 47 + 38?\"}],"
                                 "\"temperature\":0,\"stream\":true}";
    assert_int_equal(ask(port, "/v1/chat/completions", "", body, whole, sizeof whole), 200);
    assert_contains(whole, "\"content\":\"47 + 38 = 85\"");
    assert_int_equal(ask(port, "/v1/chat/completions", "", stream, streamed, sizeof streamed), 200);
    assert_contains(streamed, "text/event-stream");
    assert_contains(streamed, "\"finish_reason\":\"stop\"");
    assert_contains(streamed, "data: [DONE]");
    di_server_destroy(server);
}

static void what_is_wrong_gets_its_status(void **state) {
    (void)state;
    static const struct {
        const char *path, *headers, *body;
        int status;
        const char *says;
    } cases[] = {
        {"/v1/chat/completions", "", "{\"messages\":", 400, "not JSON"},
        {"/v1/chat/completions", "", "{\"messages\":7}", 400, "\"param\":\"messages\""},
        {"/v1/chat/completions", "", "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"model\":\"gpt\"}", 404,
         "model_not_found"},
        {"/v1/completions", "", "{\"prompt\":[-1]}", 400, "invalid_request_error"},
        {"/v1/messages", "", "{\"messages\":7}", 400, "\"type\":\"error\""},
        {"/v1/nothing", "", "{}", 404, "there is nothing at"},
        {"/health", "", "{}", 405, "expected GET"},
        {"/v1/models", "Content-Length: 3\r\n", "{}", 400, "different things"},
        {"/v1/completions", "Transfer-Encoding: chunked\r\n", "0\r\n\r\n", 400, "given twice"},
        {"/v1/completions", "Sec-Fetch-Site: cross-site\r\nOrigin: http://elsewhere\r\n", "{}", 403, "another origin"},
        {"/trace", "X-Forwarded-For: 10.0.0.1\r\n", "{}", 403, "loopback"},
        {"/trace", "", "{}", 404, "--trace-dir"},
        {"/trace%00", "", "{}", 404, "there is nothing at"},
        {"http://localhost/trace", "", "{}", 404, "--trace-dir"},
        {"/v1/completions", "Origin: http://elsewhere\r\n", "{}", 403, "--cors-origin"},
        {"/v1/completions", "", "{\"prompt\":[\"a\",\"b\",\"c\",\"d\"],\"n\":5}", 400, "n: 20, expected 1 to 16"},
        {"/v1/completions", "", "{\"prompt\":\"a\",\"prompt_logprobs\":1}", 400, "\"param\":\"prompt_logprobs\""},
        {"/v1/completions", "", "{\"prompt\":\"a\",\"n\":16,\"logprobs\":20,\"max_tokens\":1040}", 400, "or a stream"},
        {"/v1/completions", "", "{\"prompt\":\"a\",\"logit_bias\":{\"999999\":1}}", 400, "logit_bias"},
        {"/v1/messages", "", "{\"max_tokens\":3,\"messages\":[{\"role\":\"x\",\"content\":\"a\"}]}", 400,
         "messages.0.role: "},
        {"/detokenize", "", "{\"tokens\":[99999999]}", 400, "tokens[0]"},
    };
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    static char reply[20000];
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        int status = ask(di_server_port(server), cases[i].path, cases[i].headers, cases[i].body, reply, sizeof reply);
        if (status != cases[i].status)
            fail_msg("%s %s: %d\n%s", cases[i].path, cases[i].body, status, reply);
        assert_contains(reply, cases[i].says);
    }
    di_server_destroy(server);
}

/* What the two APIs without choices don't know must not end the server. */
static void one_reply_has_one_sample(void **state) {
    (void)state;
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    static char reply[20000];
    assert_int_equal(ask(di_server_port(server), "/v1/responses", "",
                         "{\"input\":\"Hi\",\"n\":3,\"max_output_tokens\":3}", reply, sizeof reply),
                     200);
    assert_contains(reply, "\"object\":\"response\"");
    assert_int_equal(ask(di_server_port(server), "/v1/messages", "",
                         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"n\":3,\"max_tokens\":3}", reply,
                         sizeof reply),
                     200);
    di_server_destroy(server);
}

/* Every route while the model is loaded and while the server ends before it was. */
static void before_the_model_is_there_routes_say_so(void **state) {
    (void)state;
    static const char *const paths[] = {"/v1/completions", "/tokenize", "/detokenize", "/v1/responses/render",
                                        "/trace"};
    di_server_config config;
    di_engine_config engine;
    di_server *server;
    di_error err = {0};
    static char reply[20000];
    di_engine_config_init(&engine, sizeof engine);
    engine.model = "/nowhere/at/all";
    di_server_config_init(&config);
    config.engine = &engine;
    di_test_ok(di_server_create(&config, &server, &err), &err);
    assert_int_equal(di_server_wait_ready(server, &err), DI_ERR_NOT_FOUND);
    for (int is_draining = 0; is_draining < 2; is_draining++) {
        for (size_t i = 0; i < DI_COUNT(paths); i++)
            assert_int_equal(ask(di_server_port(server), paths[i], "", "{}", reply, sizeof reply), 503);
        di_server_drain(server);
    }
    di_server_destroy(server);
}

/* ---- many at once -------------------------------------------------------------------------------------------------
 */

enum { CLIENTS = 8 };

typedef struct client {
    int port, n_requests;
    bool is_short; /* its requests are for a work thread alone */
    uint64_t rng;
    int n_answers, n_busy, n_odd;
    pthread_t thread;
} client;

static void one_request(client *c) {
    static const char *const requests[][2] = {
        {"/v1/chat/completions",
         "{\"stream\":true,\"max_tokens\":24,\"messages\":[{\"role\":\"user\",\"content\":\"A story\"}]}"},
        {"/v1/completions",
         "{\"prompt\":[\"The fox\",\"A dog\"],\"n\":2,\"max_tokens\":8,\"logprobs\":2,\"echo\":true}"},
        {"/v1/messages",
         "{\"stream\":true,\"max_tokens\":16,\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}"},
        {"/v1/responses", "{\"input\":\"Hello\",\"max_output_tokens\":16}"},
        {"/v1/completions", "{\"prompt\":\"One\",\"regex\":\"[a-z]{8}\",\"stream\":true}"},
        {"/v1/completions", "{\"prompt\":\"One\",\"regex\":\"[\"}"},
        {"/tokenize", "{\"prompt\":\"The fox\"}"},
    };
    int64_t at = di_test_random_range(&c->rng, 0, (int64_t)DI_COUNT(requests) - 1),
            leaves = di_test_random_range(&c->rng, 0, 3);
    char reply[4096];
    int fd = dial(c->port);
    if (fd < 0 || !post(fd, requests[at][0], "", requests[at][1])) {
        c->n_odd++;
    } else if (leaves == 0) { /* soon */
        const struct timespec pause = {.tv_nsec = di_test_random_range(&c->rng, 0, 20000000)};
        nanosleep(&pause, NULL);
    } else if (leaves == 1) { /* in the middle of the reply */
        (void)read_all(fd, reply, sizeof reply, 700);
    } else {
        size_t n = read_all(fd, reply, sizeof reply, sizeof reply);
        int status = n > 12 ? (reply[9] - '0') * 100 + (reply[10] - '0') * 10 + (reply[11] - '0') : 0;
        bool is_bad = at == 5;
        c->n_busy += status == 429;
        c->n_answers += status == (is_bad ? 400 : 200);
        c->n_odd += status != 429 && status != (is_bad ? 400 : 200);
    }
    if (fd >= 0)
        close(fd);
}

static void *run_client(void *arg) {
    client *c = arg;
    char reply[4096];
    for (int i = 0; i < c->n_requests; i++) {
        if (c->is_short)
            (void)ask(c->port, "/tokenize", "", "{\"prompt\":\"The fox\"}", reply, sizeof reply);
        else
            one_request(c);
    }
    return NULL;
}

static void run_clients(int port, client clients[CLIENTS], int n_requests) {
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = (client){.port = port, .n_requests = n_requests, .rng = (uint64_t)i + 1};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
    }
}

/* Waits until the engine has nothing to do and nothing of the clients is left. */
static void assert_all_given_back(di_server *server) {
    di_engine_stats_t s = {.struct_size = sizeof s};
    const struct timespec pause = {.tv_nsec = 10000000};
    for (int i = 0; i < 3000; i++) {
        di_engine_stats(di_server_engine(server), &s);
        if (s.n_running + s.n_waiting == 0 && s.n_submitted == s.n_finished && di_server_is_idle(server) &&
            atomic_load(&server->metrics.n_connections_total) == atomic_load(&n_dialed) &&
            atomic_load(&server->metrics.n_connections) == 0 && atomic_load(&server->body_bytes) == 0)
            break;
        nanosleep(&pause, NULL);
    }
    assert_int_equal(atomic_load(&server->metrics.n_connections_total), atomic_load(&n_dialed));
    assert_int_equal(s.n_running + s.n_waiting, 0);
    assert_int_equal(s.n_submitted, s.n_finished);
    assert_int_equal(s.blocks_used, 0);
    assert_int_equal(s.slots_used, 0);
    assert_int_equal(atomic_load(&server->metrics.n_connections), 0);
    assert_int_equal(atomic_load(&server->metrics.n_streams), 0);
    assert_int_equal(atomic_load(&server->body_bytes), 0);
}

static void clients_that_leave_give_everything_back(void **state) {
    (void)state;
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    client clients[CLIENTS];
    int n_answers = 0, n_odd = 0;
    run_clients(di_server_port(server), clients, di_test_is_sanitized() ? 6 : 20);
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(clients[i].thread, NULL);
        n_answers += clients[i].n_answers;
        n_odd += clients[i].n_odd;
    }
    assert_true(n_answers > 0);
    assert_int_equal(n_odd, 0);
    assert_all_given_back(server);
    di_server_destroy(server);
}

static void it_can_end_in_the_middle_of_streams(void **state) {
    (void)state;
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    client clients[CLIENTS];
    const struct timespec pause = {.tv_nsec = 200000000};
    run_clients(di_server_port(server), clients, 4);
    nanosleep(&pause, NULL);
    di_server_destroy(server);
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(clients[i].thread, NULL);
}

/* Short requests that come all the time must not be suspended where nobody wakes them any more. */
static void it_can_end_among_short_requests(void **state) {
    (void)state;
    for (int round = 0; round < (di_test_is_sanitized() ? 2 : 6); round++) {
        di_server_config config;
        di_engine_config engine;
        di_server *server = start(&config, &engine);
        client clients[CLIENTS];
        const struct timespec pause = {.tv_nsec = 10000000 + round * 7000000};
        for (int i = 0; i < CLIENTS; i++) {
            clients[i] = (client){.port = di_server_port(server), .n_requests = 60, .is_short = true};
            assert_int_equal(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
        }
        nanosleep(&pause, NULL);
        di_server_destroy(server);
        for (int i = 0; i < CLIENTS; i++)
            pthread_join(clients[i].thread, NULL);
    }
}

static void while_it_drains_work_is_refused_and_health_says_so(void **state) {
    (void)state;
    di_server_config config;
    di_engine_config engine;
    di_server *server = start(&config, &engine);
    int port = di_server_port(server), fd = dial(port);
    static char reply[200000];
    assert_true(
        post(fd, "/v1/completions", "", "{\"prompt\":\"One\",\"stream\":true,\"max_tokens\":60,\"ignore_eos\":true}"));
    assert_true(read_all(fd, reply, sizeof reply, 12) == 12); /* it runs */
    di_server_drain(server);
    assert_int_equal(ask(port, "/v1/completions", "", "{\"prompt\":\"One\"}", reply, sizeof reply), 503);
    assert_contains(reply, "Retry-After:");
    assert_true(read_all(fd, reply, sizeof reply, sizeof reply) > 0);
    assert_contains(reply, "data: [DONE]"); /* the stream that ran has come to its end */
    close(fd);
    assert_all_given_back(server);
    di_server_destroy(server);
}

DI_TEST_GROUP(server, cmocka_unit_test(answers_are_those_of_the_engine_alone),
              cmocka_unit_test(what_is_wrong_gets_its_status), cmocka_unit_test(one_reply_has_one_sample),
              cmocka_unit_test(before_the_model_is_there_routes_say_so),
              cmocka_unit_test(clients_that_leave_give_everything_back),
              cmocka_unit_test(it_can_end_in_the_middle_of_streams), cmocka_unit_test(it_can_end_among_short_requests),
              cmocka_unit_test(while_it_drains_work_is_refused_and_health_says_so))
