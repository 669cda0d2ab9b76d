/* The writer of traces: one JSON object {"traceEvents":[...]}, an event a line.
 *
 * The file is complete JSON after every write: the buffer goes out together with the end of the document, over the end
 * that was written before. So a program that dies leaves a trace that lacks its last events and nothing else. What
 * can't be written at a place of choice, a pipe, gets the end at close alone. */
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "json.h"
#include "strbuf.h"

enum { BUFFER_BYTES = 64 * 1024, NAMES_MAX = 16 };

static const char HEAD[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
static const char END[] = "\n]}\n";

typedef struct writer {
    pthread_mutex_t lock;
    int fd;
    char *path; /* owned */
    int pid;
    bool is_seekable;
    off_t offset;  /* of what buf holds. lock: lock */
    di_strbuf buf; /* whole events that are not in the file yet. lock: lock */
    int failure;   /* errno of the first write that failed; 0: none. lock: lock */
    /* Of rows, to be written at the head of each file. lock: lock */
    struct {
        int thread;
        char *name; /* owned */
    } names[NAMES_MAX];
    int n_names;
    bool is_open;       /* lock: lock */
    _Atomic bool is_on; /* the same, for a look without the lock */
} writer;

struct di_trace {
    writer *w; /* owned */
};

/* ---- the file -----------------------------------------------------------------------------------------------------
 */

static void write_all(writer *w, const char *data, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t k = w->is_seekable ? pwrite(w->fd, data + done, n - done, w->offset + (off_t)done)
                                   : write(w->fd, data + done, n - done);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0) {
            w->failure = k < 0 ? errno : EIO;
            return;
        }
        done += (size_t)k;
    }
}

/* Writes the buffer, and the end behind it where it can be overwritten or is the last. */
static void flush(writer *w, bool is_last) {
    size_t n = w->buf.len;
    if (w->buf.failed && w->failure == 0)
        w->failure = ENOMEM;
    if (w->failure == 0) {
        if (w->is_seekable || is_last)
            di_strbuf_append(&w->buf, END, sizeof END - 1);
        write_all(w, di_strbuf_str(&w->buf), w->buf.len);
        w->offset += (off_t)n;
    }
    di_strbuf_reset(&w->buf);
}

di_status di_trace_create(di_trace **out, di_error *err) {
    di_trace *trace = calloc(1, sizeof *trace);
    writer *w = calloc(1, sizeof *w);
    *out = NULL;
    if (!trace || !w) {
        free(trace);
        free(w);
        return di_fail(err, DI_ERR_MEMORY, "trace");
    }
    pthread_mutex_init(&w->lock, NULL);
    trace->w = w;
    *out = trace;
    return DI_OK;
}

static void put_thread(writer *w, int thread, const char *name);

di_status di_trace_start(di_trace *trace, const char *path, di_error *err) {
    writer *w = trace->w;
    char *copy = strdup(path);
    if (!copy)
        return di_fail(err, DI_ERR_MEMORY, "trace file '%s'", path);
    pthread_mutex_lock(&w->lock);
    if (w->is_open) {
        pthread_mutex_unlock(&w->lock);
        free(copy);
        return di_fail(err, DI_ERR_BUSY, "a trace is being written already");
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        int code = errno;
        pthread_mutex_unlock(&w->lock);
        free(copy);
        return di_fail(err, DI_ERR_IO, "trace file '%s': %s", path, strerrordesc_np(code));
    }
    w->fd = fd;
    w->path = copy;
    w->pid = (int)getpid();
    w->is_seekable = lseek(fd, 0, SEEK_CUR) >= 0;
    w->offset = 0;
    w->failure = 0;
    di_strbuf_append(&w->buf, HEAD, sizeof HEAD - 1);
    di_strbuf_printf(&w->buf,
                     "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"deepinfer\"}}",
                     w->pid);
    for (int i = 0; i < w->n_names; i++)
        put_thread(w, w->names[i].thread, w->names[i].name);
    flush(w, false);
    w->is_open = true;
    atomic_store(&w->is_on, true);
    pthread_mutex_unlock(&w->lock);
    return DI_OK;
}

di_status di_trace_stop(di_trace *trace, di_error *err) {
    writer *w = trace->w;
    di_status st = DI_OK;
    pthread_mutex_lock(&w->lock);
    if (w->is_open) {
        atomic_store(&w->is_on, false);
        w->is_open = false;
        flush(w, true);
        if (close(w->fd) != 0 && w->failure == 0)
            w->failure = errno;
        if (w->failure) {
            st = di_fail(err, w->failure == ENOSPC || w->failure == EDQUOT ? DI_ERR_DISK : DI_ERR_IO,
                         "trace file '%s' is incomplete: %s", w->path, strerrordesc_np(w->failure));
        }
        free(w->path);
        w->path = NULL;
    }
    pthread_mutex_unlock(&w->lock);
    return st;
}

di_status di_trace_open(di_trace **out, const char *path, di_error *err) {
    di_error ignored;
    di_status st = di_trace_create(out, err);
    if (*out && (st = di_trace_start(*out, path, err))) {
        (void)di_trace_close(*out, &ignored);
        *out = NULL;
    }
    return st;
}

di_status di_trace_close(di_trace *trace, di_error *err) {
    if (!trace)
        return DI_OK;
    writer *w = trace->w;
    di_status st = di_trace_stop(trace, err);
    pthread_mutex_destroy(&w->lock);
    di_strbuf_deinit(&w->buf);
    for (int i = 0; i < w->n_names; i++)
        free(w->names[i].name);
    free(w);
    free(trace);
    return st;
}

/* ---- events -------------------------------------------------------------------------------------------------------
 */

/* A whole number. By hand, as an event has several and a step of the engine several events. */
static void put_int(di_strbuf *out, int64_t v) {
    char text[20];
    size_t at = sizeof text;
    uint64_t rest = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    do {
        text[--at] = (char)('0' + rest % 10);
    } while (rest /= 10);
    if (v < 0)
        text[--at] = '-';
    di_strbuf_append(out, text + at, sizeof text - at);
}

/* Nanoseconds as microseconds: 12.345. key: `,"ts":` or the like. */
static void put_us(di_strbuf *out, const char *key, int64_t ns) {
    ns = ns > 0 ? ns : 0;
    int rest = (int)(ns % 1000);
    const char fraction[4] = {'.', (char)('0' + rest / 100), (char)('0' + rest / 10 % 10), (char)('0' + rest % 10)};
    di_strbuf_puts(out, key);
    put_int(out, ns / 1000);
    di_strbuf_append(out, fraction, sizeof fraction);
}

/* With the lock held: the beginning of an event. */
static void put_head(writer *w, const char *name, char phase, int thread) {
    di_strbuf_puts(&w->buf, ",\n{\"name\":");
    di_json_write_string(&w->buf, name, strlen(name));
    di_strbuf_puts(&w->buf, ",\"ph\":\"");
    di_strbuf_putc(&w->buf, phase);
    di_strbuf_puts(&w->buf, "\",\"pid\":");
    put_int(&w->buf, w->pid);
    di_strbuf_puts(&w->buf, ",\"tid\":");
    put_int(&w->buf, thread);
}

/* Takes the lock and starts an event; false when the trace is off or has failed, without the lock. */
static bool begin(const di_trace *trace, const char *name, char phase, int thread) {
    if (!trace || !atomic_load_explicit(&trace->w->is_on, memory_order_relaxed))
        return false;
    writer *w = trace->w;
    pthread_mutex_lock(&w->lock);
    if (!w->is_open || w->failure) {
        pthread_mutex_unlock(&w->lock);
        return false;
    }
    put_head(w, name, phase, thread);
    return true;
}

static void end(writer *w) {
    di_strbuf_putc(&w->buf, '}');
    if (w->buf.len >= BUFFER_BYTES || w->buf.failed)
        flush(w, false);
    pthread_mutex_unlock(&w->lock);
}

static void put_args(di_strbuf *out, int n_args, const di_trace_arg *args) {
    if (n_args <= 0)
        return;
    di_strbuf_puts(out, ",\"args\":{");
    for (int i = 0; i < n_args; i++) {
        if (i > 0)
            di_strbuf_putc(out, ',');
        di_json_write_string(out, args[i].key, strlen(args[i].key));
        di_strbuf_putc(out, ':');
        put_int(out, args[i].value);
    }
    di_strbuf_putc(out, '}');
}

static void put_thread(writer *w, int thread, const char *name) {
    put_head(w, "thread_name", 'M', thread);
    di_strbuf_puts(&w->buf, ",\"args\":{\"name\":");
    di_json_write_string(&w->buf, name, strlen(name));
    di_strbuf_puts(&w->buf, "}}");
}

void di_trace_thread(const di_trace *trace, int thread, const char *name) {
    char *copy = trace ? strdup(name) : NULL;
    if (!copy)
        return;
    writer *w = trace->w;
    pthread_mutex_lock(&w->lock);
    if (w->is_open && !w->failure)
        put_thread(w, thread, name);
    if (w->n_names < NAMES_MAX) {
        w->names[w->n_names].thread = thread;
        w->names[w->n_names++].name = copy;
        copy = NULL;
    }
    pthread_mutex_unlock(&w->lock);
    free(copy);
}

void di_trace_span(const di_trace *trace, int thread, const char *name, int64_t start_ns, int64_t end_ns, int n_args,
                   const di_trace_arg *args) {
    if (!begin(trace, name, 'X', thread))
        return;
    put_us(&trace->w->buf, ",\"ts\":", start_ns);
    put_us(&trace->w->buf, ",\"dur\":", end_ns - start_ns);
    put_args(&trace->w->buf, n_args, args);
    end(trace->w);
}

void di_trace_instant(const di_trace *trace, int thread, const char *name, int64_t at_ns, int n_args,
                      const di_trace_arg *args) {
    if (!begin(trace, name, 'i', thread))
        return;
    put_us(&trace->w->buf, ",\"ts\":", at_ns);
    di_strbuf_puts(&trace->w->buf, ",\"s\":\"t\"");
    put_args(&trace->w->buf, n_args, args);
    end(trace->w);
}

void di_trace_counter(const di_trace *trace, const char *name, int64_t at_ns, int n_args, const di_trace_arg *args) {
    if (n_args <= 0 || !begin(trace, name, 'C', 0))
        return;
    put_us(&trace->w->buf, ",\"ts\":", at_ns);
    put_args(&trace->w->buf, n_args, args);
    end(trace->w);
}
