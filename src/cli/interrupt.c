/* Ctrl-C as something to be read, and lines from a descriptor that Ctrl-C can interrupt.
 *
 * The handler writes to an eventfd and does nothing else; loops look at it between steps and wait on it beside their
 * input. The second signal finds the default action again, so that a program that hangs can still be ended. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cli_model.h"

static int event_fd = -1; /* set before the handlers are; the handler reads it */

static void on_signal(int number) {
    (void)number;
    int saved = errno;
    uint64_t one = 1;
    if (write(event_fd, &one, sizeof one) < 0) {
        /* Full: a mark is there already. */
    }
    errno = saved;
}

static void arm(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

di_status di_interrupt_start(di_error *err) {
    event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd < 0)
        return di_fail(err, DI_ERR_IO, "eventfd: %s", strerrordesc_np(errno));
    arm();
    return DI_OK;
}

void di_interrupt_stop(void) {
    if (event_fd < 0)
        return;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    close(event_fd);
    event_fd = -1;
}

int di_interrupt_fd(void) {
    return event_fd;
}

bool di_interrupt_take(void) {
    uint64_t n;
    if (event_fd < 0 || read(event_fd, &n, sizeof n) != (ssize_t)sizeof n)
        return false;
    arm();
    return true;
}

/* ---- lines ---------------------------------------------------------------------------------------------------------
 */

void di_line_reader_deinit(di_line_reader *r) {
    di_strbuf_deinit(&r->buf);
    r->at = r->searched = 0;
}

/* Waits until the descriptor has something; interrupted by the signal's mark, which stays for the caller to take. */
static di_line_state wait_input(const di_line_reader *r, bool may_wait, di_error *err) {
    struct pollfd fds[2] = {{.fd = r->fd, .events = POLLIN}, {.fd = event_fd, .events = POLLIN}};
    int n = poll(fds, event_fd >= 0 ? 2 : 1, may_wait ? -1 : 0);
    if (n < 0 && errno != EINTR) {
        di_fail(err, DI_ERR_IO, "%s: %s", r->name, strerrordesc_np(errno));
        return DI_LINE_FAILED;
    }
    if (n > 0 && fds[1].revents)
        return DI_LINE_INTERRUPTED;
    return n > 0 && fds[0].revents ? DI_LINE_READY : DI_LINE_NOT_YET;
}

static di_line_state read_more(di_line_reader *r, bool may_wait, di_error *err) {
    char chunk[65536];
    di_line_state state;
    do {
        state = wait_input(r, may_wait, err);
    } while (state == DI_LINE_NOT_YET && may_wait);
    if (state != DI_LINE_READY)
        return state;
    ssize_t n = read(r->fd, chunk, sizeof chunk);
    if (n < 0) {
        if (errno == EINTR || errno == EAGAIN)
            return DI_LINE_NOT_YET;
        di_fail(err, DI_ERR_IO, "%s: %s", r->name, strerrordesc_np(errno));
        return DI_LINE_FAILED;
    }
    if (n == 0)
        r->is_end = true;
    di_strbuf_append(&r->buf, chunk, (size_t)n);
    return di_strbuf_status(&r->buf, err) ? DI_LINE_FAILED : DI_LINE_READY;
}

di_line_state di_line_reader_next(di_line_reader *r, bool may_wait, const char **line, size_t *len, di_error *err) {
    /* What was handed out goes when half of the buffer is used up: each byte moves at most once on average. */
    if (r->at > r->buf.len / 2) {
        di_strbuf_remove(&r->buf, 0, r->at);
        r->at = 0;
    }
    for (;;) {
        size_t left = r->buf.len - r->at;
        char *start = r->buf.data ? r->buf.data + r->at : NULL;
        char *end = start && left > r->searched ? memchr(start + r->searched, '\n', left - r->searched) : NULL;
        if (end || (r->is_end && left > 0)) {
            *line = start;
            *len = end ? (size_t)(end - start) : left;
            r->at += *len + (end != NULL);
            r->searched = 0;
            return DI_LINE_READY;
        }
        r->searched = left;
        if (r->is_end)
            return DI_LINE_END;
        di_line_state state = read_more(r, may_wait, err);
        if (state == DI_LINE_NOT_YET && may_wait)
            continue;
        if (state != DI_LINE_READY)
            return state;
    }
}
