/* Pools of KV blocks and state slots, and their device memory.
 *
 * A pool is two arrays: the free list threaded through `next`, and reference counts. Nothing is searched and nothing is
 * allocated after init. Asking for more than there is is an outcome, not an error: the caller decides whether to wait.
 * Releasing what is not held is our own bug and asserts. */
#include "kv.h"

di_status di_kv_pool_init(di_kv_pool *pool, int32_t n_units, di_error *err) {
    *pool = (di_kv_pool){.head = -1, .tail = -1};
    if (n_units < 0)
        return di_fail(err, DI_ERR_RANGE, "pool of %d units", n_units);
    if (n_units == 0)
        return DI_OK;
    pool->next = malloc((size_t)n_units * sizeof *pool->next);
    pool->refs = calloc((size_t)n_units, sizeof *pool->refs);
    if (!pool->next || !pool->refs) {
        di_kv_pool_deinit(pool);
        return di_fail(err, DI_ERR_MEMORY, "pool of %d units", n_units);
    }
    for (int32_t i = 0; i < n_units; i++)
        pool->next[i] = i + 1 < n_units ? i + 1 : -1;
    pool->n_units = pool->n_free = n_units;
    pool->head = 0;
    pool->tail = n_units - 1;
    return DI_OK;
}

void di_kv_pool_deinit(di_kv_pool *pool) {
    free(pool->next);
    free(pool->refs);
    *pool = (di_kv_pool){.head = -1, .tail = -1};
}

bool di_kv_pool_alloc(di_kv_pool *pool, int32_t n, int32_t *ids) {
    if (n > pool->n_free)
        return false;
    for (int32_t i = 0; i < n; i++) {
        int32_t id = pool->head;
        pool->head = pool->next[id];
        pool->refs[id] = 1;
        ids[i] = id;
    }
    pool->n_free -= n;
    if (pool->head < 0)
        pool->tail = -1;
    return true;
}

void di_kv_pool_acquire(di_kv_pool *pool, int32_t id) {
    DI_ASSERT(id >= 0 && id < pool->n_units && pool->refs[id] > 0 && pool->refs[id] < INT32_MAX);
    pool->refs[id]++;
}

void di_kv_pool_release(di_kv_pool *pool, const int32_t *ids, int32_t n) {
    for (int32_t i = n - 1; i >= 0; i--) {
        int32_t id = ids[i];
        DI_ASSERT(id >= 0 && id < pool->n_units && pool->refs[id] > 0);
        if (--pool->refs[id] > 0) {
            if (pool->refs[id] == 1 && pool->on_single)
                pool->on_single(pool->user, id);
            continue;
        }
        pool->next[id] = -1;
        if (pool->tail >= 0) {
            pool->next[pool->tail] = id;
        } else {
            pool->head = id;
        }
        pool->tail = id;
        pool->n_free++;
    }
}

static di_status alloc_units(di_kv *kv, int32_t n, size_t unit_bytes, const char *what, uint8_t **out, di_error *err) {
    size_t bytes;
    if (!di_size_mul(&bytes, (size_t)n, unit_bytes))
        return di_fail(err, DI_ERR_RANGE, "%d %s of %zu bytes", n, what, unit_bytes);
    void *memory = NULL;
    di_status st = kv->backend->device->alloc(kv->device, bytes, &memory, err);
    *out = memory;
    return di_error_context(err, st, "%d %s of %zu bytes", n, what, unit_bytes);
}

di_status di_kv_init(di_kv *kv, const di_backend *backend, di_device *device, const di_memory_plan *plan,
                     int32_t n_blocks, int32_t n_slots, di_error *err) {
    *kv = (di_kv){.backend = backend, .device = device, .page_bytes = plan->page_bytes, .slot_bytes = plan->slot_bytes};
    di_status st;
    if ((st = di_kv_pool_init(&kv->blocks, n_blocks, err)))
        goto out;
    if ((st = di_kv_pool_init(&kv->slots, n_slots, err)))
        goto out;
    if ((st = alloc_units(kv, n_blocks, kv->page_bytes, "KV blocks", &kv->pages, err)))
        goto out;
    st = alloc_units(kv, n_slots, kv->slot_bytes, "state slots", &kv->states, err);
out:
    if (st)
        di_kv_deinit(kv);
    return st;
}

void di_kv_deinit(di_kv *kv) {
    if (kv->pages)
        kv->backend->device->free(kv->device, kv->pages);
    if (kv->states)
        kv->backend->device->free(kv->device, kv->states);
    di_kv_pool_deinit(&kv->blocks);
    di_kv_pool_deinit(&kv->slots);
    *kv = (di_kv){0};
}
