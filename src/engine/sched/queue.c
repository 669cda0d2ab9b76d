/* The waiting queue: callers in a hash table, their items in lists.
 *
 * A caller exists as long as one of its items is attached, whether queued or running, so that the table does not grow
 * with the callers of the past; a class exists as long as one of its callers does. Picking looks at the head of every
 * caller that waits: as many as there are callers with something to do, never as many as there are requests. */
#include "sched.h"

struct di_sched_class {
    di_sched_class *next;
    int32_t priority;
    uint64_t n_callers;
    uint64_t now;  /* virtual time: rows that an even division would have given each caller */
    uint64_t rest; /* rows that did not make up one for each yet */
};

struct di_sched_caller {
    di_sched_class *class;
    di_sched_caller *chain;                /* in the hash table */
    di_sched_caller *prev_active, *active; /* among the callers that wait */
    di_sched_item *first, *last;
    int64_t n_attached;
    uint64_t served; /* rows */
    uint64_t hash;
    size_t len;
    char name[];
};

enum { CAP_MIN = 16 };

di_status di_sched_queue_init(di_sched_queue *q, di_error *err) {
    *q = (di_sched_queue){.cap = CAP_MIN};
    q->table = calloc(q->cap, sizeof(di_sched_caller *));
    return q->table ? DI_OK : di_fail(err, DI_ERR_MEMORY, "queue of requests");
}

void di_sched_queue_deinit(di_sched_queue *q) {
    DI_ASSERT(q->n_callers == 0);
    free(q->table);
    *q = (di_sched_queue){0};
}

/* Makes room for one more; failing to grow only makes chains longer. */
static void grow(di_sched_queue *q) {
    if (q->n_callers < q->cap)
        return;
    size_t cap = 2 * q->cap;
    di_sched_caller **table = calloc(cap, sizeof(di_sched_caller *));
    if (!table)
        return;
    for (size_t i = 0; i < q->cap; i++) {
        for (di_sched_caller *c = q->table[i], *next; c; c = next) {
            next = c->chain;
            c->chain = table[c->hash & (cap - 1)];
            table[c->hash & (cap - 1)] = c;
        }
    }
    free(q->table);
    q->table = table;
    q->cap = cap;
}

/* The class of a priority, with one more caller; NULL: no memory. */
static di_sched_class *enter_class(di_sched_queue *q, int32_t priority) {
    di_sched_class *k = q->classes;
    while (k && k->priority != priority)
        k = k->next;
    if (!k) {
        if (!(k = calloc(1, sizeof *k)))
            return NULL;
        k->priority = priority;
        k->next = q->classes;
        q->classes = k;
    }
    k->n_callers++;
    return k;
}

static void leave_class(di_sched_queue *q, di_sched_class *k) {
    if (--k->n_callers > 0)
        return;
    di_sched_class **link = &q->classes;
    while (*link != k)
        link = &(*link)->next;
    *link = k->next;
    free(k);
}

/* NULL: no memory. */
static di_sched_caller *make_caller(di_sched_queue *q, uint64_t hash, int32_t priority, const char *name, size_t len) {
    size_t bytes;
    di_sched_caller *c = di_size_add(&bytes, sizeof *c, len) ? calloc(1, bytes) : NULL;
    di_sched_class *k = c ? enter_class(q, priority) : NULL;
    if (!k) {
        free(c);
        return NULL;
    }
    grow(q);
    c->class = k;
    c->hash = hash;
    c->len = len;
    if (len)
        memcpy(c->name, name, len);
    c->served = k->now;
    c->chain = q->table[hash & (q->cap - 1)];
    q->table[hash & (q->cap - 1)] = c;
    q->n_callers++;
    return c;
}

static bool is_caller(const di_sched_caller *c, uint64_t hash, int32_t priority, const char *name, size_t len) {
    return c->hash == hash && c->class->priority == priority && c->len == len &&
           (len == 0 || memcmp(c->name, name, len) == 0);
}

di_status di_sched_attach(di_sched_queue *q, di_sched_item *item, const char *name, size_t len, di_error *err) {
    int32_t priority = item->priority;
    uint64_t hash = di_mix64(di_hash_fnv1a(len ? name : "", len) + (uint32_t)priority);
    di_sched_caller *c = q->table[hash & (q->cap - 1)];
    while (c && !is_caller(c, hash, priority, name, len))
        c = c->chain;
    if (!c && !(c = make_caller(q, hash, priority, name, len)))
        return di_fail(err, DI_ERR_MEMORY, "caller with a name of %zu bytes", len);
    c->n_attached++;
    item->caller = c;
    return DI_OK;
}

void di_sched_detach(di_sched_queue *q, di_sched_item *item) {
    di_sched_caller *c = item->caller;
    if (!c)
        return;
    DI_ASSERT(!item->is_queued);
    item->caller = NULL;
    if (--c->n_attached > 0)
        return;
    di_sched_caller **link = &q->table[c->hash & (q->cap - 1)];
    while (*link != c)
        link = &(*link)->chain;
    *link = c->chain;
    q->n_callers--;
    leave_class(q, c->class);
    free(c);
}

static void activate(di_sched_queue *q, di_sched_caller *c) {
    c->prev_active = NULL;
    c->active = q->active;
    if (q->active)
        q->active->prev_active = c;
    q->active = c;
    /* One that waited for nothing in the meantime has no claim from before. */
    c->served = DI_MAX(c->served, c->class->now);
}

static void deactivate(di_sched_queue *q, di_sched_caller *c) {
    if (c->prev_active) {
        c->prev_active->active = c->active;
    } else {
        q->active = c->active;
    }
    if (c->active)
        c->active->prev_active = c->prev_active;
    c->active = c->prev_active = NULL;
}

void di_sched_push(di_sched_queue *q, di_sched_item *item) {
    di_sched_caller *c = item->caller;
    DI_ASSERT(c && !item->is_queued);
    if (!c->first)
        activate(q, c);
    /* From the end: what comes back (preempted) is older than most, what comes new belongs last. */
    di_sched_item *before = c->last;
    while (before && di_sched_precedes(item, before))
        before = before->prev;
    item->prev = before;
    item->next = before ? before->next : c->first;
    *(before ? &before->next : &c->first) = item;
    *(item->next ? &item->next->prev : &c->last) = item;
    item->is_queued = true;
    q->n_items++;
}

void di_sched_remove(di_sched_queue *q, di_sched_item *item) {
    di_sched_caller *c = item->caller;
    DI_ASSERT(c && item->is_queued);
    *(item->prev ? &item->prev->next : &c->first) = item->next;
    *(item->next ? &item->next->prev : &c->last) = item->prev;
    item->prev = item->next = NULL;
    item->is_queued = false;
    q->n_items--;
    if (!c->first)
        deactivate(q, c);
}

static di_sched_item *first_ready(const di_sched_caller *c) {
    di_sched_item *item = c->first;
    while (item && !item->is_ready)
        item = item->next;
    return item;
}

static bool goes_before(const di_sched_item *a, const di_sched_item *b) {
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->is_resumed != b->is_resumed)
        return a->is_resumed;
    if (!a->is_resumed && a->caller->served != b->caller->served)
        return a->caller->served < b->caller->served;
    return a->arrival < b->arrival;
}

di_sched_item *di_sched_peek(di_sched_queue *q) {
    di_sched_item *best = NULL;
    for (di_sched_caller *c = q->active; c; c = c->active) {
        di_sched_item *item = first_ready(c);
        if (item && (!best || goes_before(item, best)))
            best = item;
    }
    if (best && !best->is_resumed) { /* nobody of its class that waits was served less, so neither is virtual time */
        di_sched_caller *c = best->caller;
        c->class->now = DI_MAX(c->class->now, c->served);
    }
    return best;
}

void di_sched_charge(di_sched_queue *q, di_sched_item *item, int64_t n_rows) {
    (void)q;
    di_sched_class *k = item->caller->class;
    item->caller->served += (uint64_t)n_rows;
    k->rest += (uint64_t)n_rows;
    k->now += k->rest / k->n_callers;
    k->rest %= k->n_callers;
}

void di_sched_each(di_sched_queue *q, void (*fn)(void *user, di_sched_item *item), void *user) {
    for (di_sched_caller *c = q->active, *next_caller; c; c = next_caller) {
        next_caller = c->active;
        for (di_sched_item *item = c->first, *next; item; item = next) {
            next = item->next;
            fn(user, item);
        }
    }
}
