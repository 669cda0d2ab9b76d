/* Connections: who is at the other end, what the socket has taken, and the last word.
 *
 * What libmicrohttpd would close without a word (a line that is no request) gets its 400 here, past libmicrohttpd, and
 * so does a request that came too slowly (watch.c). */
#include "server_internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <linux/sockios.h>
#include <linux/tcp.h>

static bool is_loopback(const struct sockaddr *a) {
    if (!a)
        return false;
    if (a->sa_family == AF_INET) {
        uint32_t ip = ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr);
        return ip >> 24 == 127;
    }
    if (a->sa_family != AF_INET6)
        return false;
    const struct in6_addr *ip = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(ip) || (IN6_IS_ADDR_V4MAPPED(ip) && ip->s6_addr[12] == 127);
}

int64_t di_connection_written(const di_connection *c) {
    struct tcp_info info;
    socklen_t len = sizeof info;
    int unsent = 0;
    if (getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 ||
        len < offsetof(struct tcp_info, tcpi_bytes_retrans))
        return 0;
    (void)ioctl(c->fd, SIOCOUTQNSD, &unsent);
    return (int64_t)(info.tcpi_bytes_sent - info.tcpi_bytes_retrans) + unsent;
}

int64_t di_connection_acked(const di_connection *c) {
    struct tcp_info info;
    socklen_t len = sizeof info;
    if (getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 ||
        len < offsetof(struct tcp_info, tcpi_bytes_received))
        return 0;
    return (int64_t)info.tcpi_bytes_acked;
}

void di_connection_write(const di_connection *c, int status, const char *reason, const char *message) {
    char text[512], body[256];
    int n_body = snprintf(body, sizeof body,
                          "{\"error\":{\"message\":\"%s\",\"type\":\"invalid_request_error\",\"param\":null,"
                          "\"code\":\"invalid_request_error\"}}",
                          message);
    int n = snprintf(
        text, sizeof text,
        "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status,
        reason, n_body, body);
    (void)!send(c->fd, text, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* libmicrohttpd has given a connection up. Where the client has sent what is no request and nobody has answered, it
 * learns so. */
static void say_goodbye(di_server *server, const di_connection *c) {
    char byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    bool is_there = n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
    if (is_there && !c->is_cut && !c->is_busy && !server->config.tls_cert && di_connection_written(c) == c->written)
        di_connection_write(c, 400, "Bad Request", "this is no HTTP request");
}

void di_connection_notify(void *cls, struct MHD_Connection *http, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    di_server *server = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *fd = MHD_get_connection_info(http, MHD_CONNECTION_INFO_CONNECTION_FD);
        const union MHD_ConnectionInfo *peer = MHD_get_connection_info(http, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
        di_connection *c = calloc(1, sizeof *c);
        *context = c;
        if (!c || !fd)
            return;
        c->fd = fd->connect_fd;
        c->is_local = peer && is_loopback(peer->client_addr);
        c->waiting_ns = di_clock_ns();
        int on = 1;
        (void)setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        atomic_fetch_add(&server->metrics.n_connections, 1);
        atomic_fetch_add(&server->metrics.n_connections_total, 1);
        pthread_mutex_lock(&server->connections_mutex);
        c->next = server->connections;
        if (c->next)
            c->next->previous = c;
        server->connections = c;
        pthread_mutex_unlock(&server->connections_mutex);
        return;
    }
    di_connection *c = *context;
    if (!c)
        return;
    pthread_mutex_lock(&server->connections_mutex);
    if (c->previous) {
        c->previous->next = c->next;
    } else {
        server->connections = c->next;
    }
    if (c->next)
        c->next->previous = c->previous;
    pthread_mutex_unlock(&server->connections_mutex);
    say_goodbye(server, c);
    atomic_fetch_sub(&server->metrics.n_connections, 1);
    free(c);
    *context = NULL;
}

ssize_t di_connection_break(const di_connection *c, char *buf) {
    (void)shutdown(c->fd, SHUT_RDWR);
    buf[0] = '\n';
    return 1;
}
