/* Backends: one table of device functions and one of operations each.
 *
 * Owns: the tables' definition, finding and checking a backend by name. The model calls operations through them and
 * never asks which vendor runs. Leaves what an operation means to ops.h, whose definition in code is cpu/ref_*.c.
 *
 * Memory that operations read and write is made, copied and freed only through the device table. */
#ifndef DI_BACKEND_H
#define DI_BACKEND_H

#include "base/base.h"
#include "ops.h"
#include "tensor/tensor.h"

#define DI_BACKEND_ABI 1

typedef struct di_device di_device; /* an opened device; the backend's own */

/* The largest of everything the model will ask of one forward: the device makes its scratch memory from it once, so
 * that no operation allocates. */
typedef struct di_limits {
    int64_t rows_max;    /* rows of one forward */
    int64_t n_in_max;    /* inputs of the widest product */
    int64_t n_out_max;   /* outputs of the tallest product that is not the head */
    int64_t entries_max; /* compressed entries of the longest sequence */
    int64_t keys_max;    /* keys that one row attends: window + top-k (+ draft block) */
    int64_t head_dim, n_heads, index_heads, index_dim;
    int64_t experts_max, experts_per_row_max, intermediate; /* MoE */
    int64_t hidden_size;      /* H; 0: not known, n_in_max stands for it and more scratch is taken */
    int64_t candidate_blocks; /* blocks kept by the candidate source */
} di_limits;

typedef struct di_device_info {
    char name[128];
    uint64_t memory_total_bytes, memory_free_bytes;
    bool weights_by_mapping; /* weights may be read in place from a host mapping */
    char levels[128];        /* instruction sets or architecture in use */
    char levels_found[128];  /* those that this machine has */
} di_device_info;

/* How a device is opened. Zeroed is a good default. */
typedef struct di_device_config {
    int n_threads;      /* of the host, the caller counted; 0 = all */
    bool is_pinned;     /* one processor of the host for each worker thread */
    bool is_order_free; /* a row's sums may depend on how many rows go with it, where that is faster; else a row gives
                         * the same bits in any batch */
    const char *isa; /* level of the host's kernels by name; NULL and "auto" = the best. One that this machine lacks is
                      * DI_ERR_DEVICE. */
} di_device_config;

typedef struct di_device_ops {
    uint32_t abi, size; /* DI_BACKEND_ABI, sizeof(di_device_ops) */
    const char *name;   /* "cpu", "nvidia", "ascend" */
    di_status (*open)(di_device **out, const di_device_config *config, di_error *err);
    void (*close)(di_device *dev);
    di_status (*info)(di_device *dev, di_device_info *out, di_error *err);
    di_status (*reserve)(di_device *dev, const di_limits *limits,
                         di_error *err);                              /* scratch; may be called again to grow */
    size_t (*scratch_bytes)(di_device *dev, const di_limits *limits); /* what reserve would take; for the memory plan */
    di_status (*alloc)(di_device *dev, size_t n_bytes, void **out, di_error *err); /* zeroed, 64-byte aligned */
    void (*free)(di_device *dev, void *p);
    /* Copies are done when they return; what streams still do with the memory is the caller's to wait for. */
    di_status (*upload)(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err); /* host to device */
    di_status (*download)(di_device *dev, void *dst, const void *src, size_t n_bytes,
                          di_error *err);                                                         /* device to host */
    di_status (*copy)(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err); /* device to device */
    di_status (*stream_create)(di_device *dev, di_stream **out, di_error *err);
    void (*stream_destroy)(di_stream *stream);
    di_status (*stream_sync)(di_stream *stream, di_error *err);
    /* Operations per second that bf16 products can reach at most on this device, by a probe of registers alone. */
    di_status (*measure)(di_device *dev, double *peak_bf16, di_error *err);
    /* The last step of index_select alone, for measurements: the indices of the k best of scores [n], ascending, ties
     * to the lower index, without NaN and -inf, padded with -1; idx [k]. Both in device memory, finished on return.
     * NULL in a backend that doesn't take this step apart. */
    void (*topk)(di_device *dev, const float *scores, int64_t n, int32_t k, int32_t *idx);
    /* Host work beside the forwards (sampling): fn for every part on the threads that the device has on the host, in
     * the caller's floating-point mode; worker is below host_threads. One caller of these and of streams at a time. */
    int (*host_threads)(di_device *dev);
    void (*host_run)(di_device *dev, di_pool_fn fn, void *ctx, int64_t n_parts);
    const char *(*stream_refused)(const di_stream *stream); /* operation that last refused its arguments; NULL = none */
} di_device_ops;

typedef struct di_backend {
    const di_device_ops *device;
    const di_ops *ops;
} di_backend;

/* "auto", "cpu", "nvidia", "ascend". "auto" falls back to the CPU; asked for by name, an absent backend is
 * DI_ERR_DEVICE. Checks ABI and that every operation the model needs is there, naming what is missing. */
di_status di_backend_find(const char *name, di_backend *out, di_error *err);
/* The check that di_backend_find makes on a module's tables: ABI, sizes, every device function and operation present.
 * DI_ERR_DEVICE names what is wrong or missing. */
di_status di_backend_check(const di_device_ops *device, const di_ops *ops, di_error *err);
/* Names of the backends that this build has, and whether each finds a device: "cpu". Appended, one per line. */
void di_backend_list(di_strbuf *out);

#endif
