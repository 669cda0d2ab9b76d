/* Constraints of outputs: where each stands, and the masks of the rows that come next.
 *
 * Row 0 gives the token behind those that are known, row j the one behind draft j-1: its mask supposes that the drafts
 * before it hold. For that the constraint takes drafts ahead of time and gives them back when the next position is
 * known (di_masks_begin). All of it belongs to the runner's thread while a step has the sequence, or to one of the
 * masker's threads, which work while a forward runs: what a mask needs, the tokens, is known before, and the logits
 * that it is for come at the end. */
#include "engine_internal.h"

di_status di_masks_create(di_mask_rows **out, const di_constraint *constraint, int32_t n_vocab, int32_t n_rows,
                          int64_t position, di_error *err) {
    size_t n_words = (size_t)DI_CEIL_DIV(n_vocab, 32), bytes;
    di_mask_rows *m = NULL;
    if (di_size_mul3(&bytes, n_words, (size_t)n_rows, sizeof(uint32_t)) && di_size_add(&bytes, bytes, sizeof *m))
        m = malloc(bytes);
    if (!m) {
        constraint->destroy(constraint->self);
        return di_fail(err, DI_ERR_MEMORY, "%d masks of %d tokens", n_rows, n_vocab);
    }
    *m = (di_mask_rows){.constraint = *constraint, .position = position, .n_words = n_words};
    *out = m;
    return DI_OK;
}

void di_masks_destroy(di_mask_rows *m) {
    if (!m)
        return;
    m->constraint.destroy(m->constraint.self);
    free(m);
}

/* ---- rows ---- */

static bool accept(di_mask_rows *m, int32_t token, bool *is_allowed) {
    *is_allowed = false;
    m->status = m->constraint.accept(m->constraint.self, token, is_allowed, &m->error);
    return m->status == DI_OK;
}

void di_masks_begin(di_sequence *s, int64_t position, bool anew) {
    di_mask_rows *m = s->masks;
    const di_constraint *c = &m->constraint;
    if (!anew && position == m->position)
        return;
    c->rollback(c->self, anew ? c->count(c->self) : m->n_ahead);
    m->position = anew ? s->n_prompt : m->position;
    m->n_ahead = m->n_rows = 0;
    m->has_ended = false;
    m->status = DI_OK;
    for (; m->position < position; m->position++) {
        bool is_allowed;
        if (!accept(m, s->tokens[m->position], &is_allowed))
            return;
        if (!is_allowed) {
            m->status =
                di_fail(&m->error, DI_ERR_REQUEST, "token %d is given and the request's grammar does not allow it",
                        s->tokens[m->position]);
            return;
        }
    }
}

void di_masks_fill(di_sequence *s, int32_t n_rows) {
    di_mask_rows *m = s->masks;
    while (m->n_rows < n_rows && !m->has_ended && !m->status) {
        int32_t j = m->n_rows;
        if (j > 0) {
            int32_t draft = s->tokens[m->position + j - 1];
            bool is_allowed;
            if (!accept(m, draft, &is_allowed))
                return;
            m->n_ahead += is_allowed;
            m->has_ended = !is_allowed || draft == s->core->model.eos_id;
            if (m->has_ended)
                return;
        }
        m->status = m->constraint.mask(m->constraint.self, m->words + (size_t)j * m->n_words, &m->only[j], &m->error);
        m->n_rows += m->status == DI_OK;
    }
}

void di_masks_run(const di_mask_job *job) {
    di_masks_begin(job->seq, job->position, job->anew);
    di_masks_fill(job->seq, job->n_rows);
}

/* ---- threads ---- */

enum { MASKERS_MAX = 8 };

struct di_masker {
    pthread_t threads[MASKERS_MAX];
    int n_threads;
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    /* lock: mutex */
    const di_mask_job *jobs;
    int32_t n, next, n_left;
    bool is_stopping;
};

static void *masker_main(void *arg) {
    di_masker *k = arg;
    (void)pthread_setname_np(pthread_self(), "engine-mask");
    pthread_mutex_lock(&k->mutex);
    for (;;) {
        while (k->next == k->n && !k->is_stopping)
            pthread_cond_wait(&k->work, &k->mutex);
        if (k->is_stopping)
            break;
        const di_mask_job *job = &k->jobs[k->next++];
        pthread_mutex_unlock(&k->mutex);
        di_masks_run(job);
        pthread_mutex_lock(&k->mutex);
        if (--k->n_left == 0)
            pthread_cond_signal(&k->done);
    }
    pthread_mutex_unlock(&k->mutex);
    return NULL;
}

static di_status make_locks(di_masker *k, di_error *err) {
    if (pthread_mutex_init(&k->mutex, NULL))
        return di_fail(err, DI_ERR_INTERNAL, "masks: no lock");
    if (pthread_cond_init(&k->work, NULL)) {
        pthread_mutex_destroy(&k->mutex);
        return di_fail(err, DI_ERR_INTERNAL, "masks: no condition");
    }
    if (pthread_cond_init(&k->done, NULL)) {
        pthread_cond_destroy(&k->work);
        pthread_mutex_destroy(&k->mutex);
        return di_fail(err, DI_ERR_INTERNAL, "masks: no condition");
    }
    return DI_OK;
}

di_status di_masker_create(di_masker **out, int n_threads, di_error *err) {
    di_masker *k = calloc(1, sizeof *k);
    if (!k)
        return di_fail(err, DI_ERR_MEMORY, "threads for masks");
    di_status st = make_locks(k, err);
    if (st) {
        free(k);
        return st;
    }
    n_threads = DI_MIN(n_threads, (int)MASKERS_MAX);
    while (k->n_threads < n_threads && pthread_create(&k->threads[k->n_threads], NULL, masker_main, k) == 0)
        k->n_threads++;
    if (k->n_threads == 0) {
        di_masker_destroy(k);
        return di_fail(err, DI_ERR_INTERNAL, "masks: no thread");
    }
    *out = k;
    return DI_OK;
}

void di_masker_destroy(di_masker *k) {
    if (!k)
        return;
    pthread_mutex_lock(&k->mutex);
    k->is_stopping = true;
    pthread_cond_broadcast(&k->work);
    pthread_mutex_unlock(&k->mutex);
    for (int i = 0; i < k->n_threads; i++)
        pthread_join(k->threads[i], NULL);
    pthread_cond_destroy(&k->done);
    pthread_cond_destroy(&k->work);
    pthread_mutex_destroy(&k->mutex);
    free(k);
}

void di_masker_start(di_masker *k, const di_mask_job *jobs, int32_t n) {
    pthread_mutex_lock(&k->mutex);
    k->jobs = jobs;
    k->n = k->n_left = n;
    k->next = 0;
    pthread_cond_broadcast(&k->work);
    pthread_mutex_unlock(&k->mutex);
}

void di_masker_wait(di_masker *k) {
    pthread_mutex_lock(&k->mutex);
    while (k->n_left > 0)
        pthread_cond_wait(&k->done, &k->mutex);
    pthread_mutex_unlock(&k->mutex);
}
