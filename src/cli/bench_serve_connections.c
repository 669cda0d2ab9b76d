/* bench serve: a thousand connections, 200 of which stream at once; the others have had an answer and are kept open.
 *
 *   connections_gap_p50    between two moments at which a stream brings text, while all 200 stream
 *   connections_gap_ratio  the 99th percentile of these over the median, at most 2; every stream must end well
 *   connections_gap_ratio_all  the same from the first text to the last: while prompts are run beside streams, too
 *   idle_memory            what an idle connection takes of the server's memory
 *   idle_cpu               processor time of the server's threads in a second in which nothing else happens
 *
 * The idle ones are plain sockets, so that what the process takes for them is the server's. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "bench_serve.h"

enum { CONNECTIONS = 1000, STREAMS = 200, IDLE = CONNECTIONS - STREAMS, OUTPUT = 256, PROMPT = 16, ANSWER_MS = 10000 };
enum { QUIET_MS = 3000 };

/* Resident bytes of the process. DI_ERR_IO. */
static di_status resident(double *bytes, di_error *err) {
    di_strbuf text = {0};
    int64_t pages = 0;
    di_status st = di_file_read("/proc/self/statm", 4096, &text, err);
    char *rest = NULL, *word = !st && text.data ? strtok_r(text.data, " ", &rest) : NULL;
    word = word ? strtok_r(NULL, " ", &rest) : NULL; /* the second: what is in memory */
    bool is_good = word && di_parse_i64(word, &pages);
    di_strbuf_deinit(&text);
    if (!is_good)
        return di_fail(err, DI_ERR_IO, "'/proc/self/statm' can't be read");
    *bytes = (double)pages * (double)sysconf(_SC_PAGESIZE);
    return DI_OK;
}

/* Reads an answer to its end, which the length in its head tells. */
static di_status read_answer(int fd, di_error *err) {
    char text[4096];
    size_t n = 0;
    while (n < sizeof text - 1) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, ANSWER_MS) <= 0)
            return di_fail(err, DI_ERR_IO, "no answer within %d ms", (int)ANSWER_MS);
        ssize_t got = read(fd, text + n, sizeof text - 1 - n);
        if (got <= 0)
            return di_fail(err, DI_ERR_IO, "the server has closed the connection");
        n += (size_t)got;
        text[n] = '\0';
        const char *body = strstr(text, "\r\n\r\n"), *length = strcasestr(text, "\r\ncontent-length:");
        if (body && length && n >= (size_t)(body + 4 - text) + strtoul(length + 17, NULL, 10))
            return strstr(text, " 200 ") ? DI_OK : di_fail(err, DI_ERR_IO, "answered by '%.40s'", text);
    }
    return di_fail(err, DI_ERR_FORMAT, "an answer of more than %zu bytes", sizeof text);
}

static di_status open_idle(int port, int *fd, di_error *err) {
    static const char ask[] = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return di_fail(err, DI_ERR_IO, "a socket: %s", strerror(errno));
    if (connect(*fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        send(*fd, ask, sizeof ask - 1, MSG_NOSIGNAL) != (ssize_t)sizeof ask - 1)
        return di_fail(err, DI_ERR_IO, "a connection: %s", strerror(errno));
    return read_answer(*fd, err);
}

/* Whether all are still open, with nothing to read. */
static di_status check_idle(const int *fds, int n, di_error *err) {
    for (int i = 0; i < n; i++) {
        struct pollfd p = {.fd = fds[i], .events = POLLIN};
        if (poll(&p, 1, 0) != 0)
            return di_fail(err, DI_ERR_IO, "idle connection %d was closed", i);
    }
    return DI_OK;
}

static di_status quiet(double *server_ns, di_error *err) {
    di_bench_cpu before, after;
    di_status st = di_bench_cpu_read(&before, err);
    (void)nanosleep(&(struct timespec){.tv_sec = QUIET_MS / 1000, .tv_nsec = QUIET_MS % 1000 * 1000000L}, NULL);
    if (!st)
        st = di_bench_cpu_read(&after, err);
    if (!st)
        *server_ns = (after.server - before.server) * 1000 / QUIET_MS;
    return st;
}

typedef struct wishes {
    bool gap, ratio, ratio_all, memory, cpu;
} wishes;

static di_status gap_row(di_bench *b, bool is_wanted, const char *name, double value, const char *unit, double limit,
                         di_error *err) {
    return is_wanted ? di_bench_row(b, name, &value, 1, unit, limit, "most_allowed", err) : DI_OK;
}

static di_status streams(di_bench *b, const di_bench_server *s, const wishes *wants, di_error *err) {
    di_bench_load load = {0};
    di_bench_load_spread all, steady;
    int64_t from_ns = 0, to_ns = INT64_MAX;
    di_bench_asks asks = {.model = di_strbuf_str(&s->model), .n_prompt = PROMPT, .n_output = OUTPUT, .seed = 5};
    di_bench_load_plan plan = {.n_clients = STREAMS, .n_requests = STREAMS, .user = &asks};
    di_status st = di_bench_load_on(s, &plan, false, &load, err);
    for (int64_t i = 0; i < load.n_samples; i++) { /* from the last first text to the first last one */
        from_ns = DI_MAX(from_ns, load.samples[i].first_ns);
        to_ns = DI_MIN(to_ns, load.samples[i].last_ns);
    }
    if (!st)
        st = di_bench_load_gaps_of(&load, 0, INT64_MAX, &all, err);
    if (!st)
        st = di_bench_load_gaps_of(&load, from_ns, to_ns, &steady, err);
    di_bench_load_deinit(&load);
    if (!st && steady.n == 0)
        st = di_fail(err, DI_ERR_INTERNAL, "they never stream at once");
    if (!st)
        st = gap_row(b, wants->gap, "connections_gap_p50", 1e3 * steady.at[DI_LOAD_P50], "ms", 0, err);
    if (!st)
        st = gap_row(b, wants->ratio, "connections_gap_ratio", steady.at[DI_LOAD_P99] / steady.at[DI_LOAD_P50], "ratio",
                     2, err);
    if (!st)
        st = gap_row(b, wants->ratio_all, "connections_gap_ratio_all", all.at[DI_LOAD_P99] / all.at[DI_LOAD_P50],
                     "ratio", 2, err);
    return st ? di_error_context(err, st, "%d streams", (int)STREAMS) : DI_OK;
}

static di_status rows(di_bench *b, const di_bench_server *s, const wishes *wants, int *fds, int *n_open,
                      di_error *err) {
    double before = 0, after = 0, cpu = 0;
    di_status st = resident(&before, err);
    while (*n_open < IDLE && !st) {
        st = open_idle(di_server_port(s->server), &fds[*n_open], err);
        *n_open += fds[*n_open] >= 0;
    }
    if (!st)
        st = resident(&after, err);
    if (!st && wants->cpu)
        st = quiet(&cpu, err);
    if (!st && wants->memory) {
        double each = (after - before) / IDLE / 1024;
        st = di_bench_row(b, "idle_memory", &each, 1, "KiB", 0, NULL, err);
    }
    cpu *= 1e-6;
    if (!st && wants->cpu)
        st = di_bench_row(b, "idle_cpu", &cpu, 1, "ms/s", 0, NULL, err);
    if (!st && (wants->gap || wants->ratio || wants->ratio_all))
        st = streams(b, s, wants, err);
    return st ? st : check_idle(fds, *n_open, err);
}

di_status di_bench_serve_connections(di_bench *b, di_error *err) {
    wishes wants = {di_bench_wants(b, "connections_gap_p50"), di_bench_wants(b, "connections_gap_ratio"),
                    di_bench_wants(b, "connections_gap_ratio_all"), di_bench_wants(b, "idle_memory"),
                    di_bench_wants(b, "idle_cpu")};
    int fds[IDLE], n_open = 0;
    di_bench_server s;
    if (!(wants.gap || wants.ratio || wants.ratio_all || wants.memory || wants.cpu))
        return DI_OK;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { /* both ends of each are in this process */
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    di_status st = di_bench_server_open(b, &s, STREAMS, err);
    if (!st)
        st = rows(b, &s, &wants, fds, &n_open, err);
    for (int i = 0; i < n_open; i++)
        close(fds[i]);
    di_bench_server_close(&s);
    return st ? di_error_context(err, st, "%d connections", (int)CONNECTIONS) : DI_OK;
}
