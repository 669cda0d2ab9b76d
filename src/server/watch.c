/* The watch thread: clients that hang up while nothing is written to them, and deadlines.
 *
 * A suspended connection is out of libmicrohttpd's sight, and so is a client that closes it while its request waits or
 * a long prompt is run. So the socket is watched here for the other side's end as long as the request is there. Every
 * quarter of a second the deadlines are looked at: connections that wait for a request or a body for too long, readers
 * that take nothing, streams that have been silent and get a comment. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server_internal.h"

enum { TICK_MS = 250, EVENTS_MAX = 64, PING_AFTER_S = 10 };

/* ---- hang-ups -----------------------------------------------------------------------------------------------------
 */

void di_watch_add(di_exchange *x) {
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLHUP | EPOLLERR | EPOLLET, .data.u64 = x->id};
    if (epoll_ctl(x->server->watch.epoll_fd, EPOLL_CTL_ADD, x->connection->fd, &event) != 0)
        di_debug("request %s is not watched: %s", x->request_id, strerrordesc_np(errno));
}

void di_watch_remove(di_exchange *x) {
    struct epoll_event event = {0};
    (void)epoll_ctl(x->server->watch.epoll_fd, EPOLL_CTL_DEL, x->connection->fd, &event);
}

static void hang_up(di_server *server, uint64_t id, bool is_cut) {
    pthread_mutex_lock(&server->live_mutex);
    di_exchange *x = server->live[id % DI_LIVE_BUCKETS];
    while (x && x->id != id)
        x = x->next_live;
    if (x)
        di_exchange_acquire(x);
    pthread_mutex_unlock(&server->live_mutex);
    if (!x)
        return;
    di_exchange_hang_up(x, is_cut);
    di_exchange_release(x);
}

/* ---- deadlines ----------------------------------------------------------------------------------------------------
 */

static bool is_past(int64_t since_ns, int64_t now_ns, double limit_s) {
    return since_ns != 0 && (double)(now_ns - since_ns) > limit_s * 1e9;
}

static void check_connections(di_server *server, int64_t now) {
    const di_server_config *c = &server->config;
    pthread_mutex_lock(&server->connections_mutex);
    for (di_connection *n = server->connections; n; n = n->next) {
        bool is_slow_body = is_past(n->reading_ns, now, c->read_timeout_s),
             is_slow_head = !n->has_served && is_past(n->waiting_ns, now, DI_MIN(c->read_timeout_s, c->keep_alive_s));
        if (n->is_cut || !(is_slow_body || is_slow_head || is_past(n->waiting_ns, now, c->keep_alive_s)))
            continue;
        n->is_cut = true;
        if ((is_slow_body || is_slow_head) && !c->tls_cert)
            di_connection_write(n, 408, "Request Timeout", "the request did not come as a whole in time");
        if (is_slow_body || is_slow_head)
            atomic_fetch_add(&server->metrics.n_cut_off, 1);
        (void)shutdown(n->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&server->connections_mutex);
}

/* True: its reader has taken nothing for too long. */
static bool check_exchange(di_exchange *x, int64_t now) {
    const di_server_config *c = &x->server->config;
    pthread_mutex_lock(&x->mutex);
    bool is_silent = x->is_suspended && is_past(x->sent_ns, now, PING_AFTER_S), is_cut = false;
    if (is_silent && x->generate && di_generate_can_ping(x->generate)) {
        x->wants_ping = true;
        x->sent_ns = now;
        di_exchange_wake(x);
    } else if (!x->is_suspended && x->is_replied && !x->is_gone && is_past(x->sent_ns, now, c->write_timeout_s)) {
        /* The system asks for more only when much of its buffer is free: a slow reader is told from one that takes
         * nothing by what it has acknowledged. */
        int64_t acked = di_connection_acked(x->connection);
        is_cut = acked == x->acked;
        x->acked = acked;
        x->sent_ns = now;
    }
    pthread_mutex_unlock(&x->mutex);
    return is_cut;
}

/* Ends those whose time is over. The table is not held meanwhile: what runs for them is ended under other locks. */
static void check_exchanges(di_server *server, int64_t now) {
    uint64_t cut[EVENTS_MAX];
    int n_cut = 0;
    pthread_mutex_lock(&server->live_mutex);
    for (int i = 0; i < DI_LIVE_BUCKETS; i++) {
        for (di_exchange *x = server->live[i]; x; x = x->next_live) {
            if (check_exchange(x, now) && n_cut < EVENTS_MAX) {
                cut[n_cut++] = x->id;
                (void)shutdown(x->connection->fd, SHUT_RDWR); /* it is open while the exchange is in the table */
            }
        }
    }
    pthread_mutex_unlock(&server->live_mutex);
    for (int i = 0; i < n_cut; i++)
        hang_up(server, cut[i], true);
}

/* ---- the thread ---------------------------------------------------------------------------------------------------
 */

static void *run_watch(void *arg) {
    di_server *server = arg;
    struct epoll_event events[EVENTS_MAX];
    int64_t next_ns = di_clock_ns();
    (void)pthread_setname_np(pthread_self(), "serve-watch");
    for (;;) {
        int n = epoll_wait(server->watch.epoll_fd, events, EVENTS_MAX, TICK_MS);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == 0)
                return NULL;
            hang_up(server, events[i].data.u64, false);
        }
        int64_t now = di_clock_ns();
        if (now < next_ns)
            continue;
        next_ns = now + (int64_t)TICK_MS * 1000000;
        check_connections(server, now);
        check_exchanges(server, now);
    }
}

di_status di_watch_start(di_server *server, di_error *err) {
    di_watch *w = &server->watch;
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    if (w->epoll_fd < 0 || w->stop_fd < 0 || epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->stop_fd, &event) != 0)
        return di_fail(err, DI_ERR_IO, "epoll: %s", strerrordesc_np(errno));
    if (pthread_create(&w->thread, NULL, run_watch, server) != 0)
        return di_fail(err, DI_ERR_MEMORY, "the watch thread could not be started");
    w->has_thread = true;
    return DI_OK;
}

void di_watch_stop(di_server *server) {
    di_watch *w = &server->watch;
    uint64_t one = 1;
    if (w->has_thread) {
        (void)!write(w->stop_fd, &one, sizeof one);
        pthread_join(w->thread, NULL);
        w->has_thread = false;
    }
    if (w->epoll_fd >= 0)
        close(w->epoll_fd);
    if (w->stop_fd >= 0)
        close(w->stop_fd);
    w->epoll_fd = w->stop_fd = -1;
}
