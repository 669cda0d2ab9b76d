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

#define DI_BACKEND_ABI 4

typedef struct di_device di_device; /* an opened device; the backend's own */
typedef struct di_event di_event;   /* a place in a stream; the backend's own */
typedef struct di_graph di_graph;   /* a recorded run of operations; the backend's own */

/* Rows of an operation on a side stream, at most. */
enum { DI_SIDE_ROWS = 256 };

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
    int64_t hidden_size;         /* H; 0: not known, n_in_max stands for it and more scratch is taken */
    int64_t candidate_blocks;    /* blocks kept by the candidate source */
    int64_t n_vocab, logits_max; /* tokens and rows of logits that sample_rows sees at once; 0: none */
} di_limits;

typedef struct di_device_info {
    char name[128];
    uint64_t memory_total_bytes, memory_free_bytes;
    bool weights_by_mapping; /* weights are read in place from a host mapping; else they are copied to the device */
    char levels[128];        /* instruction sets or architecture in use */
    char levels_found[128];  /* those that this machine has */
} di_device_info;

/* How a device is opened. Zeroed is a good default. */
typedef struct di_device_config {
    int n_threads;       /* of the host, the caller counted; 0 = all */
    bool is_pinned;      /* one processor of the host for each worker thread */
    bool is_order_free;  /* a row's sums may depend on how many rows go with it, where that is faster; else a row gives
                          * the same bits in any batch */
    int device_index;    /* which of the machine's accelerators */
    const char *kernels; /* level of an accelerator's kernels: "portable", "sm90", "sm100"; NULL and "auto" = the best
                          * that was proven on a chip. One that the device can't run is DI_ERR_DEVICE. */
    const char *isa; /* level of the host's kernels by name; NULL and "auto" = the best. One that this machine lacks is
                      * DI_ERR_DEVICE. */
} di_device_config;

typedef struct di_device_ops {
    uint32_t abi, size; /* DI_BACKEND_ABI, sizeof(di_device_ops) */
    const char *name;   /* "cpu", "nvidia", "ascend" */
    /* Whether this machine has a device: DI_OK, or DI_ERR_DEVICE saying what is missing. */
    di_status (*probe)(di_error *err);
    di_status (*open)(di_device **out, const di_device_config *config, di_error *err);
    void (*close)(di_device *dev);
    di_status (*info)(di_device *dev, di_device_info *out, di_error *err);
    di_status (*reserve)(di_device *dev, const di_limits *limits,
                         di_error *err);                              /* scratch; may be called again to grow */
    size_t (*scratch_bytes)(di_device *dev, const di_limits *limits); /* what reserve would take; for the memory plan */
    di_status (*alloc)(di_device *dev, size_t n_bytes, void **out, di_error *err); /* zeroed, 64-byte aligned */
    void (*free)(di_device *dev, void *p);
    /* Zeroed memory of the host that operations can read: what is too large for the device, and read sparsely. */
    di_status (*alloc_host)(di_device *dev, size_t n_bytes, void **out, di_error *err);
    void (*free_host)(di_device *dev, void *p);
    /* Makes of a layer's experts [n] and its shared expert (may be NULL), whose weights are in device memory, what moe
     * wants to find on the device: *table, freed by `free`; NULL where operations need nothing. The weights are the
     * table's from then on: they may have been laid out anew in place, which nobody else can read, and can't be placed
     * again. DI_ERR_FORMAT: scales beyond what the device's numbers hold. */
    di_status (*experts_place)(di_device *dev, const di_expert *experts, int32_t n, const di_expert *shared,
                               void **table, di_error *err);
    /* Copies are done when they return; what streams still do with the memory is the caller's to wait for. */
    di_status (*upload)(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err); /* host to device */
    di_status (*download)(di_device *dev, void *dst, const void *src, size_t n_bytes,
                          di_error *err);                                                         /* device to host */
    di_status (*copy)(di_device *dev, void *dst, const void *src, size_t n_bytes, di_error *err); /* device to device */
    di_status (*stream_create)(di_device *dev, di_stream **out, di_error *err);
    void (*stream_destroy)(di_stream *stream);
    di_status (*stream_sync)(di_stream *stream, di_error *err);
    /* A second stream beside this one, for operations of up to DI_SIDE_ROWS rows which run at the same time as what
     * this one is given meanwhile; made by the first call, owned by this one, whose recordings take in what it is
     * given. NULL in a backend that runs every operation at once, as is follow. */
    di_status (*stream_side)(di_stream *stream, di_stream **out, di_error *err);
    /* What `stream` is given from now on waits for all that `other` was given until now: one of them is the other's
     * side. Work beside a stream begins with side following stream and ends with stream following side, before the
     * stream is waited for or its recording ends. */
    di_status (*stream_follow)(di_stream *stream, di_stream *other, di_error *err);
    /* In the stream's order, without waiting: n_rows pieces of n_bytes, each row_bytes behind the one before on both
     * sides, from memory of alloc_host that stays as it is until the stream has passed; and between places of the
     * device. */
    di_status (*stream_upload)(di_stream *stream, void *dst, const void *src, size_t n_bytes, int64_t n_rows,
                               size_t row_bytes, di_error *err);
    di_status (*stream_copy)(di_stream *stream, void *dst, const void *src, size_t n_bytes, di_error *err);
    /* Likewise to memory of alloc_host, which has the bytes once an event behind it has come. */
    di_status (*stream_download)(di_stream *stream, void *dst, const void *src, size_t n_bytes, di_error *err);
    di_status (*event_create)(di_device *dev, di_event **out, di_error *err);
    void (*event_destroy)(di_event *event);
    di_status (*event_record)(di_event *event, di_stream *stream, di_error *err);
    di_status (*event_wait)(di_event *event,
                            di_error *err); /* until the stream has come to where it was recorded last */
    /* Nanoseconds of the device from one event to another behind it; false: one of them has not come yet, or the device
     * keeps no time. */
    bool (*event_elapsed)(const di_event *from, const di_event *to, int64_t *ns);
    /* Between begin and end, what is put on the stream is recorded and not run; launch runs it again, with the same
     * arguments, as one. NULL in a backend that runs every operation at once. */
    di_status (*graph_begin)(di_stream *stream, di_error *err);
    di_status (*graph_end)(di_stream *stream, di_graph **out, di_error *err);
    di_status (*graph_launch)(di_stream *stream, di_graph *graph, di_error *err);
    void (*graph_destroy)(di_graph *graph);
    /* Operations per second that bf16 products can reach at most on this device, by a probe of registers alone; and
     * bytes per second that it reads from a memory of its own, 0 where that is the host's. */
    di_status (*measure)(di_device *dev, double *peak_bf16, double *read_bandwidth, di_error *err);
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
/* Names of the backends that run here: module and device are there. Appended, one per line, "cpu" first. */
void di_backend_list(di_strbuf *out);
/* The folder of modules; NULL, the default: that of the program or of libdeepinfer.so. Borrowed; before threads start.
 * A module exports di_backend_module(log level), which returns its tables. */
void di_backend_set_dir(const char *dir);

#endif
