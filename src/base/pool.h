/* Thread pool for kernels. A job is cut into n_parts fixed parts, whatever the number of threads; workers take parts
 * from a shared counter and share nothing else, so a result cannot depend on the thread count. */
#ifndef DI_BASE_POOL_H
#define DI_BASE_POOL_H

#include <stdint.h>

#include "deepinfer/status.h"

typedef struct di_pool di_pool;

/* Computes part `part` of `n_parts`. worker is 0 .. n_threads-1 and unique among those running now: it names the
 * worker's scratch memory. */
typedef void (*di_pool_fn)(void *ctx, int64_t part, int64_t n_parts, int worker);

/* n_threads counts the caller, which works too; 1 starts no thread; 0 takes the number of usable CPUs. worker_start
 * (may be NULL) runs once on every worker thread, for floating-point modes. */
di_status di_pool_create(di_pool **out, int n_threads, void (*worker_start)(void), di_error *err);
void di_pool_destroy(di_pool *pool); /* NULL is fine */
int di_pool_threads(const di_pool *pool);

/* Keeps each worker on one processor of its own, taken in order from those that the process may use; the caller's
 * thread, which is not the pool's, stays free to move and finds the first of them empty. DI_ERR_DEVICE when the system
 * refuses or when there are more threads than processors. */
di_status di_pool_pin(di_pool *pool, di_error *err);

/* Runs fn for every part and returns when all are done. One caller at a time; must not be called from inside a job. */
void di_pool_run(di_pool *pool, di_pool_fn fn, void *ctx, int64_t n_parts);

/* CPUs that this process may use. */
int di_cpu_count(void);

#endif
