/* Work threads: what takes longer than a look (reading a body, encoding a prompt) is done here, so that a long prompt
 * holds up neither the sockets nor the engine. */
#include <signal.h>

#include "server_internal.h"

static void *run_work(void *arg) {
    di_work *work = arg;
    (void)pthread_setname_np(pthread_self(), "serve-work");
    for (;;) {
        pthread_mutex_lock(&work->mutex);
        while (!work->first && !work->is_stopping)
            pthread_cond_wait(&work->more, &work->mutex);
        di_exchange *x = work->first;
        if (x && !(work->first = x->next_work))
            work->last = NULL;
        pthread_mutex_unlock(&work->mutex);
        if (!x)
            return NULL;
        if (di_exchange_is_gone(x)) {
            di_exchange_answer(x, 499); /* nobody reads it */
        } else {
            x->route->run(x);
        }
        di_exchange_release(x);
    }
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
