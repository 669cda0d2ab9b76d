/* KV memory: who owns which block and which state slot, and the device memory behind them.
 *
 * Owns: pools of equal units with a free list and reference counts (one for KV blocks of 128 positions, one for state
 * slots), and the two arrays of device memory that the ids index. Knows no sequence: block tables are the caller's.
 * What lies inside a block or slot is the model's (model/layout.c).
 *
 * Threads: one, the engine's. */
#ifndef DI_KV_H
#define DI_KV_H

#include "model/model.h"

/* A pool of units 0 .. n_units-1. A unit is either free, once in the free list, or has a reference count of 1 or more.
 * The free list is first in, first out, so that what was given back last is overwritten last. Zeroed storage is an
 * empty pool. */
typedef struct di_kv_pool {
    int32_t n_units, n_free;
    int32_t *next; /* owned: of free units, the next free one; -1 at the end */
    int32_t *refs; /* owned: reference counts */
    int32_t head, tail;
} di_kv_pool;

di_status di_kv_pool_init(di_kv_pool *pool, int32_t n_units, di_error *err);
void di_kv_pool_deinit(di_kv_pool *pool);
/* n units with one reference each into ids, or none of them: false when fewer are free. */
bool di_kv_pool_alloc(di_kv_pool *pool, int32_t n, int32_t *ids);
/* One more reference to a unit that has one. */
void di_kv_pool_acquire(di_kv_pool *pool, int32_t id);
/* Drops one reference of each of ids [n], from the last to the first; units without any are free again. */
void di_kv_pool_release(di_kv_pool *pool, const int32_t *ids, int32_t n);
/* Units that are not free. */
static inline int32_t di_kv_pool_used(const di_kv_pool *pool) {
    return pool->n_units - pool->n_free;
}

/* The pools with their memory. */
typedef struct di_kv {
    const di_backend *backend; /* borrowed, with device, until di_kv_deinit */
    di_device *device;
    size_t page_bytes, slot_bytes;
    di_kv_pool blocks, slots;
    uint8_t *pages, *states; /* owned device memory: [blocks.n_units * page_bytes], [slots.n_units * slot_bytes] */
} di_kv;

/* Zeroed device memory for n_blocks and n_slots; the pages are touched only as they are used. DI_ERR_MEMORY says how
 * much was asked for. */
di_status di_kv_init(di_kv *kv, const di_backend *backend, di_device *device, const di_memory_plan *plan,
                     int32_t n_blocks, int32_t n_slots, di_error *err);
void di_kv_deinit(di_kv *kv); /* zeroed storage is fine */

/* KV blocks that n tokens need. */
static inline int64_t di_kv_blocks_for(int64_t n_tokens) {
    return DI_CEIL_DIV(n_tokens, DI_PAGE_TOKENS);
}

#endif
