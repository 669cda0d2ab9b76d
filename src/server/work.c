/* Work threads: what takes longer than a look (reading a body, encoding a prompt) is done here, so that a long prompt
 * holds up neither the sockets nor the engine. */
#include <signal.h>

#include "server_internal.h"

/* Long bodies, and what waits for steps. */
static bool is_long(const di_exchange *x) {
    return x->body.len > DI_BODY_SMALL || (x->route->flags & DI_ROUTE_LOCAL);
}

/* The first that may begin now; NULL: none. With the mutex held. */
static di_exchange *take(di_work *work) {
    di_exchange **link = &work->first, *before = NULL;
    while (*link && is_long(*link) && work->n_long >= (int)DI_COUNT(work->threads) / 2) {
        before = *link;
        link = &(*link)->next_work;
    }
    di_exchange *x = *link;
    if (!x)
        return NULL;
    *link = x->next_work;
    if (work->last == x)
        work->last = before;
    return x;
}

static void *run_work(void *arg) {
    di_work *work = arg;
    (void)pthread_setname_np(pthread_self(), "serve-work");
    pthread_mutex_lock(&work->mutex);
    for (;;) {
        di_exchange *x = take(work);
        if (!x && work->is_stopping && !work->first)
            break;
        if (!x) {
            pthread_cond_wait(&work->more, &work->mutex);
            continue;
        }
        bool has_long = is_long(x);
        work->n_long += has_long;
        pthread_mutex_unlock(&work->mutex);
        if (!di_exchange_is_gone(x))
            x->route->run(x);
        di_exchange_release(x);
        pthread_mutex_lock(&work->mutex);
        work->n_long -= has_long;
        if (has_long)
            pthread_cond_broadcast(&work->more); /* a long one may have been passed over */
    }
    pthread_mutex_unlock(&work->mutex);
    return NULL;
}

di_status di_work_start(di_work *work, di_error *err) {
    pthread_mutex_init(&work->mutex, NULL);
    pthread_cond_init(&work->more, NULL);
    for (size_t i = 0; i < DI_COUNT(work->threads); i++) {
        if (pthread_create(&work->threads[i], NULL, run_work, work) != 0)
            return di_fail(err, DI_ERR_MEMORY, "a work thread could not be started");
        work->n_threads++;
    }
    return DI_OK;
}

void di_work_stop(di_work *work) {
    pthread_mutex_lock(&work->mutex);
    work->is_stopping = true;
    pthread_cond_broadcast(&work->more);
    pthread_mutex_unlock(&work->mutex);
    for (int i = 0; i < work->n_threads; i++)
        pthread_join(work->threads[i], NULL);
    work->n_threads = 0;
}

void di_work_add(di_work *work, di_exchange *x) {
    pthread_mutex_lock(&work->mutex);
    x->next_work = NULL;
    if (work->last) {
        work->last->next_work = x;
    } else {
        work->first = x;
    }
    work->last = x;
    pthread_cond_signal(&work->more);
    pthread_mutex_unlock(&work->mutex);
}
