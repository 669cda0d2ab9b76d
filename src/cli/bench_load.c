/* The connections of a load (bench_load.h).
 *
 * A slot is a request in flight with its libcurl handle, which is used again for later ones; connections stay open
 * between requests and belong to no slot. libcurl says which sockets and which timeout it waits for; the loop waits for
 * these and for the next request that is due. */
#include "bench_load.h"

#include <curl/curl.h>
#include <errno.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include "bench_sse.h"

enum { EVENTS = 256, SLOTS_MAX = 16384, REPLY_MAX = 4096, ANSWER_S = 600, SPARE_FILES = 64 };

typedef struct generator generator;

typedef struct slot {
    generator *g;
    CURL *easy;        /* owned */
    di_strbuf body;    /* owned; sent from here */
    di_strbuf refusal; /* owned: the beginning of an answer that is no stream */
    di_sse sse;        /* owned */
    int64_t sample;    /* index in load->samples */
    int64_t seen_ns;   /* when it last brought text */
    bool is_answered;  /* the head of the answer was looked at */
    bool has_end, has_error, is_client;
    di_error error; /* of an event that says so, or of the parser */
    struct slot *next;
} slot;

struct generator {
    const di_bench_load_plan *plan;
    di_bench_load *load;
    di_strbuf url;
    struct curl_slist *headers; /* owned */
    CURLM *multi;               /* owned */
    slot **slots;               /* owned [n_slots], each owned */
    int n_slots;
    slot *idle;                           /* slots without a request */
    int epoll;                            /* -1: none */
    int64_t start_ns, now_ns, timeout_ns; /* timeout_ns: when libcurl wants its turn; -1: never */
    double due_s;                         /* of the next arrival */
    int64_t n_begun, n_running;
    di_error err; /* of the generator itself: code DI_OK while it goes on */
};

/* ---- answers ------------------------------------------------------------------------------------------------------
 */

static di_bench_load_sample *sample_of(slot *s) {
    return &s->g->load->samples[s->sample];
}

/* A stream has brought nothing from then until now. */
static void note_gap(generator *g, int64_t from_ns, int64_t to_ns) {
    di_bench_load *load = g->load;
    if (load->n_gaps == load->gaps_cap) {
        int64_t cap = DI_MAX(4096, 2 * load->gaps_cap);
        di_bench_load_gap *gaps = realloc(load->gaps, (size_t)cap * sizeof *gaps);
        if (!gaps) {
            di_fail(&g->err, DI_ERR_MEMORY, "%lld times", (long long)cap);
            return;
        }
        load->gaps = gaps;
        load->gaps_cap = cap;
    }
    load->gaps[load->n_gaps++] = (di_bench_load_gap){to_ns, (double)(to_ns - from_ns) * 1e-9};
}

static di_status on_event(void *user, const char *name, const char *data, size_t len, di_error *err) {
    slot *s = user;
    generator *g = s->g;
    di_bench_load_sample *sample = sample_of(s);
    di_sse_chunk chunk;
    (void)err;
    di_sse_chunk_read(data, len, &chunk);
    s->has_end = s->has_end || chunk.is_end;
    if (chunk.is_error || strcmp(name, "error") == 0) {
        if (!s->has_error)
            di_fail(&s->error, DI_ERR_IO, "%.*s", (int)DI_MIN(len, 200), data);
        s->has_error = true;
    }
    if (chunk.prompt_tokens >= 0)
        sample->prompt_tokens = chunk.prompt_tokens;
    if (chunk.output_tokens >= 0)
        sample->output_tokens = chunk.output_tokens;
    if (!chunk.has_text)
        return DI_OK;
    sample->n_chunks++;
    sample->last_ns = g->now_ns - g->start_ns;
    if (!sample->first_ns) {
        sample->first_ns = sample->last_ns;
    } else if (s->seen_ns != sample->last_ns) {
        note_gap(g, s->seen_ns, sample->last_ns);
    }
    s->seen_ns = sample->last_ns;
    return DI_OK;
}

static size_t on_bytes(char *bytes, size_t size, size_t n, void *user) {
    slot *s = user;
    di_bench_load_sample *sample = sample_of(s);
    n *= size;
    if (!s->is_answered) {
        long http = 0;
        curl_easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &http);
        sample->http = (int)http;
        s->is_answered = true;
    }
    if (sample->http != 200) {
        di_strbuf_append(&s->refusal, bytes, DI_MIN(n, REPLY_MAX - DI_MIN(s->refusal.len, REPLY_MAX)));
        return n;
    }
    if (di_sse_feed(&s->sse, bytes, n, &s->error)) {
        s->has_error = true;
        return CURL_WRITEFUNC_ERROR;
    }
    return n;
}

static void finish(slot *s, CURLcode code) {
    generator *g = s->g;
    di_bench_load *load = g->load;
    di_bench_load_sample *sample = sample_of(s);
    long http = 0;
    curl_easy_getinfo(s->easy, CURLINFO_RESPONSE_CODE, &http);
    sample->http = (int)http;
    if (sample->output_tokens < 0)
        sample->output_tokens = sample->n_chunks;
    sample->outcome = DI_LOAD_FAILED;
    if (code == CURLE_OK && http == 200 && s->has_end && !s->has_error) {
        sample->outcome = DI_LOAD_OK;
    } else if (code == CURLE_OK && (http == 429 || http == 503)) {
        sample->outcome = DI_LOAD_REFUSED;
        load->n_refused++;
    } else if (load->n_failed++ == 0) {
        di_error *to = &load->first_error;
        if (s->has_error) {
            di_fail(to, DI_ERR_IO, "%s", s->error.message);
        } else if (code != CURLE_OK) {
            di_fail(to, DI_ERR_IO, "%s after %lld chunks", curl_easy_strerror(code), (long long)sample->n_chunks);
        } else if (http != 200) {
            di_fail(to, DI_ERR_IO, "status %ld: %.200s", http, di_strbuf_str(&s->refusal));
        } else {
            di_fail(to, DI_ERR_IO, "the stream ended without its last event, after %lld chunks",
                    (long long)sample->n_chunks);
        }
        di_error_context(to, DI_ERR_IO, "request %lld", (long long)s->sample);
    }
    load->wall_ns = g->now_ns - g->start_ns;
    g->n_running--;
}

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

static void slot_destroy(slot *s) {
    if (!s)
        return;
    curl_easy_cleanup(s->easy);
    di_sse_deinit(&s->sse);
    di_strbuf_deinit(&s->body);
    di_strbuf_deinit(&s->refusal);
    free(s);
}

static void set_common(CURL *easy, const char *url) {
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROXY, "");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, 0L); /* a bench sends nothing that is worth reading */
    curl_easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, 0L);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT, (long)ANSWER_S);
}

static slot *slot_create(generator *g) {
    slot *s = calloc(1, sizeof *s);
    if (!s || !(s->easy = curl_easy_init())) {
        free(s);
        di_fail(&g->err, DI_ERR_MEMORY, "request %lld", (long long)g->n_begun);
        return NULL;
    }
    s->g = g;
    s->sse.callback = on_event;
    s->sse.user = s;
    set_common(s->easy, di_strbuf_str(&g->url));
    curl_easy_setopt(s->easy, CURLOPT_HTTPHEADER, g->headers);
    curl_easy_setopt(s->easy, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(s->easy, CURLOPT_WRITEDATA, s);
    curl_easy_setopt(s->easy, CURLOPT_PRIVATE, s);
    if (g->n_slots % 64 == 0) {
        slot **slots = realloc(g->slots, ((size_t)g->n_slots + 64) * sizeof *slots);
        if (!slots) {
            slot_destroy(s);
            di_fail(&g->err, DI_ERR_MEMORY, "request %lld", (long long)g->n_begun);
            return NULL;
        }
        g->slots = slots;
    }
    g->slots[g->n_slots++] = s;
    return s;
}

static di_bench_load_sample *add_sample(generator *g) {
    di_bench_load *load = g->load;
    if (load->n_samples == load->samples_cap) {
        int64_t cap = DI_MAX(256, 2 * load->samples_cap);
        di_bench_load_sample *samples = realloc(load->samples, (size_t)cap * sizeof *samples);
        if (!samples) {
            di_fail(&g->err, DI_ERR_MEMORY, "%lld requests", (long long)cap);
            return NULL;
        }
        load->samples = samples;
        load->samples_cap = cap;
    }
    load->samples[load->n_samples] = (di_bench_load_sample){.outcome = DI_LOAD_FAILED, .output_tokens = -1};
    return &load->samples[load->n_samples++];
}

/* Sends the next request, which was due at due_ns since the start. */
static void begin(generator *g, int64_t due_ns) {
    slot *s = g->idle;
    if (!s && g->n_slots == SLOTS_MAX) {
        di_fail(&g->err, DI_ERR_RANGE, "%d requests at once are not answered: the rate is too high for this server",
                (int)SLOTS_MAX);
        return;
    }
    if (s) {
        g->idle = s->next;
    } else if (!(s = slot_create(g))) {
        return;
    }
    di_bench_load_sample *sample = add_sample(g);
    if (!sample)
        return;
    sample->due_ns = due_ns;
    s->sample = g->n_begun++;
    s->is_answered = s->has_end = s->has_error = false;
    s->seen_ns = 0;
    di_sse_reset(&s->sse);
    di_strbuf_reset(&s->refusal);
    di_strbuf_reset(&s->body);
    if (g->plan->body(g->plan->user, s->sample, &s->body, &g->err) || di_strbuf_status(&s->body, &g->err))
        return;
    curl_easy_setopt(s->easy, CURLOPT_POSTFIELDS, di_strbuf_str(&s->body));
    curl_easy_setopt(s->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)s->body.len);
    CURLMcode code = curl_multi_add_handle(g->multi, s->easy);
    if (code != CURLM_OK) {
        di_fail(&g->err, DI_ERR_IO, "libcurl: %s", curl_multi_strerror(code));
        return;
    }
    g->n_running++;
    g->load->late_max_ns = DI_MAX(g->load->late_max_ns, di_clock_ns() - g->start_ns - due_ns);
}

static bool may_begin(const generator *g, double at_s) {
    const di_bench_load_plan *p = g->plan;
    return !g->err.code && (p->n_requests == 0 || g->n_begun < p->n_requests) &&
           (p->duration_s <= 0 || at_s < p->duration_s);
}

/* Sends what is due now. */
static void begin_due(generator *g) {
    const di_bench_load_plan *p = g->plan;
    double now_s = (double)(g->now_ns - g->start_ns) * 1e-9;
    if (p->rate > 0) {
        while (g->due_s <= now_s && may_begin(g, g->due_s)) {
            begin(g, (int64_t)(g->due_s * 1e9));
            g->due_s += di_bench_load_interval(p->seed, g->n_begun) / p->rate;
        }
        return;
    }
    while (g->n_running < p->n_clients && may_begin(g, now_s))
        begin(g, g->now_ns - g->start_ns);
}

/* ---- the loop -----------------------------------------------------------------------------------------------------
 */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *known) {
    (void)easy;
    generator *g = user;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(g->epoll, EPOLL_CTL_DEL, fd, NULL);
        return 0;
    }
    struct epoll_event event = {.data.fd = fd};
    if (what & CURL_POLL_IN)
        event.events |= EPOLLIN;
    if (what & CURL_POLL_OUT)
        event.events |= EPOLLOUT;
    if (epoll_ctl(g->epoll, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
        di_fail(&g->err, DI_ERR_IO, "epoll: %s", strerror(errno));
        return -1;
    }
    curl_multi_assign(g->multi, fd, g); /* any pointer that is not NULL: known from now on */
    return 0;
}

static int on_timer(CURLM *multi, long timeout_ms, void *user) {
    (void)multi;
    generator *g = user;
    g->timeout_ns = timeout_ms < 0 ? -1 : di_clock_ns() + timeout_ms * 1000000;
    return 0;
}

static void act(generator *g, curl_socket_t fd, int mask) {
    int n_running;
    CURLMcode code = curl_multi_socket_action(g->multi, fd, mask, &n_running);
    if (code != CURLM_OK && !g->err.code)
        di_fail(&g->err, DI_ERR_IO, "libcurl: %s", curl_multi_strerror(code));
}

static void collect(generator *g) {
    int n_left;
    for (CURLMsg *m; (m = curl_multi_info_read(g->multi, &n_left)) != NULL;) {
        slot *s = NULL;
        CURL *easy = m->easy_handle;
        CURLcode code = m->data.result;
        if (m->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(easy, CURLINFO_PRIVATE, &s);
        finish(s, code);
        curl_multi_remove_handle(g->multi, easy);
        s->next = g->idle;
        g->idle = s;
    }
}

/* Waits for sockets, libcurl's timeout or the next arrival, whichever comes first. */
static int wait_for(generator *g, struct epoll_event *events, bool is_more) {
    int64_t until_ns = g->timeout_ns, now_ns = di_clock_ns();
    if (is_more && g->plan->rate > 0) {
        int64_t due_ns = g->start_ns + (int64_t)(g->due_s * 1e9);
        until_ns = until_ns < 0 ? due_ns : DI_MIN(until_ns, due_ns);
    }
    int64_t wait_ns = DI_MAX(until_ns - now_ns, 0);
    struct timespec wait = {.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
    int n = epoll_pwait2(g->epoll, events, EVENTS, until_ns < 0 ? NULL : &wait, NULL);
    if (n < 0 && errno != EINTR)
        di_fail(&g->err, DI_ERR_IO, "epoll: %s", strerror(errno));
    return n;
}

static void loop(generator *g) {
    struct epoll_event events[EVENTS];
    g->due_s = g->plan->rate > 0 ? di_bench_load_interval(g->plan->seed, 0) / g->plan->rate : 0;
    g->start_ns = g->now_ns = di_clock_ns();
    for (;;) {
        begin_due(g);
        bool is_more = may_begin(g, g->plan->rate > 0 ? g->due_s : (double)(g->now_ns - g->start_ns) * 1e-9);
        if (g->err.code || (g->n_running == 0 && !is_more))
            return;
        int n = wait_for(g, events, is_more);
        g->now_ns = di_clock_ns();
        for (int i = 0; i < n; i++) {
            uint32_t e = events[i].events;
            act(g, events[i].data.fd,
                (e & (EPOLLIN | EPOLLHUP) ? CURL_CSELECT_IN : 0) | (e & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                    (e & EPOLLERR ? CURL_CSELECT_ERR : 0));
        }
        if (g->timeout_ns >= 0 && g->now_ns >= g->timeout_ns) {
            g->timeout_ns = -1;
            act(g, CURL_SOCKET_TIMEOUT, 0);
        }
        collect(g);
    }
}

di_status di_bench_load_start(di_error *err) {
    return curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? DI_OK
                                                             : di_fail(err, DI_ERR_MEMORY, "libcurl can't start");
}

void di_bench_load_stop(void) {
    curl_global_cleanup();
}

/* As many files as the system lets the process have: the server of a bench is in the same one. */
static void raise_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static bool add_header(struct curl_slist **list, const char *text) {
    struct curl_slist *longer = curl_slist_append(*list, text);
    *list = longer ? longer : *list;
    return longer != NULL;
}

static bool add_headers(struct curl_slist **list, const char *key) {
    di_strbuf bearer = {0};
    bool is_fine = add_header(list, "Content-Type: application/json") && add_header(list, "Expect:");
    if (is_fine && key) {
        di_strbuf_printf(&bearer, "Authorization: Bearer %s", key);
        is_fine = !bearer.failed && add_header(list, di_strbuf_str(&bearer));
    }
    di_strbuf_deinit(&bearer);
    return is_fine;
}

static di_status start(generator *g, di_error *err) {
    const di_bench_load_plan *p = g->plan;
    if (p->rate <= 0 && p->n_clients < 1)
        return di_fail(err, DI_ERR_ARG, "a load of %d clients", p->n_clients);
    if (p->n_requests <= 0 && p->duration_s <= 0)
        return di_fail(err, DI_ERR_ARG, "a load without an end");
    raise_file_limit();
    di_strbuf_printf(&g->url, "%s%s", p->url, p->path);
    g->multi = curl_multi_init();
    if (!g->multi || !add_headers(&g->headers, p->key) || di_strbuf_status(&g->url, NULL))
        return di_fail(err, DI_ERR_MEMORY, "the connections");
    g->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (g->epoll < 0)
        return di_fail(err, DI_ERR_IO, "epoll: %s", strerror(errno));
    curl_multi_setopt(g->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(g->multi, CURLMOPT_SOCKETDATA, g);
    curl_multi_setopt(g->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(g->multi, CURLMOPT_TIMERDATA, g);
    curl_multi_setopt(g->multi, CURLMOPT_MAXCONNECTS, (long)SLOTS_MAX); /* kept open between requests */
    curl_multi_setopt(g->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
    return DI_OK;
}

di_status di_bench_load_run(const di_bench_load_plan *plan, di_bench_load *out, di_error *err) {
    generator g = {.plan = plan, .load = out, .epoll = -1, .timeout_ns = -1};
    *out = (di_bench_load){0};
    di_status st = start(&g, err);
    if (!st) {
        loop(&g);
        st = g.err.code;
        if (st && err)
            *err = g.err;
    }
    for (int i = 0; i < g.n_slots; i++) {
        curl_multi_remove_handle(g.multi, g.slots[i]->easy);
        slot_destroy(g.slots[i]);
    }
    free(g.slots);
    curl_multi_cleanup(g.multi);
    curl_slist_free_all(g.headers);
    if (g.epoll >= 0)
        close(g.epoll);
    di_strbuf_deinit(&g.url);
    return st;
}

/* ---- one answer ---------------------------------------------------------------------------------------------------
 */

static size_t on_whole(char *bytes, size_t size, size_t n, void *user) {
    di_strbuf_append(user, bytes, size * n);
    return size * n;
}

di_status di_bench_load_get(const char *url, const char *path, const char *key, di_strbuf *body, int *http,
                            di_error *err) {
    di_strbuf whole = {0};
    struct curl_slist *headers = NULL;
    CURL *easy = curl_easy_init();
    di_status st = DI_OK;
    di_strbuf_printf(&whole, "%s%s", url, path);
    if (!easy || !add_headers(&headers, key) || di_strbuf_status(&whole, NULL)) {
        st = di_fail(err, DI_ERR_MEMORY, "GET %s", path);
    } else {
        set_common(easy, di_strbuf_str(&whole));
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_whole);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, body);
        CURLcode code = curl_easy_perform(easy);
        long status = 0;
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        *http = (int)status;
        st = code != CURLE_OK ? di_fail(err, DI_ERR_IO, "'%s': %s", di_strbuf_str(&whole), curl_easy_strerror(code))
                              : di_strbuf_status(body, err);
    }
    curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
    di_strbuf_deinit(&whole);
    return st;
}
