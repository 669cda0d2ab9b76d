/* The CPU backend's own header: device, stream, scratch memory, jobs and the kernel table.
 *
 * Owns: what every kernel file stands on. A stream is synchronous: an operation has finished when its function returns.
 * dispatch.c wraps every operation: it takes the device's lock and sets flush-to-zero on the calling thread (the
 * workers have it from their start), so that a kernel only computes. Kernels fill a table level by level: ref,
 * portable, then instruction sets; a later level overwrites entries, and every level gives the same bits.
 *
 * Leaves the meaning of operations to ops.h and number formats to tensor/. Private to backend/cpu and its tests. */
#ifndef DI_CPU_H
#define DI_CPU_H

#include <math.h>
#include <pthread.h>

#include "backend/backend.h"

/* Levels of this architecture in rising order; each applies all those below it first, and a machine has every level
 * below the highest that it has. */
typedef enum di_cpu_level {
    DI_CPU_REF,      /* ref_*.c: the readable definition */
    DI_CPU_PORTABLE, /* portable_*.c: plain C, arranged for speed */
#if defined(__x86_64__)
    DI_CPU_AVX2,   /* avx2_*.c: AVX2, FMA, F16C */
    DI_CPU_AVX512, /* avx512_*.c: AVX-512 F, BW, DQ, VL */
    DI_CPU_AMX,    /* amx_*.c: AMX tiles of bf16, AVX-512 BF16, VBMI */
#elif defined(__aarch64__)
    DI_CPU_NEON, /* neon_*.c: what the baseline has, by its own instructions */
#endif
    DI_CPU_LEVEL_COUNT
} di_cpu_level;

const char *di_cpu_level_name(di_cpu_level level); /* "ref", "portable", "avx2", ... */

/* The kernel table. An operation's kernel has the operation's own signature. */
typedef struct di_cpu_kernels {
#define DI_CPU_KERNEL(f) di_status (*f)(di_stream * stream, const di_##f##_args *args);
    DI_OPS_LIST(DI_CPU_KERNEL)
    DI_CPU_KERNEL(feed) /* of the optional ones */
    /* Where wide products (wide.h) are in use: their engine, and the kernels for what they don't take. */
    const struct di_wide_engine *wide;
#undef DI_CPU_KERNEL
    /* The arithmetic probe: n rounds of independent multiply-adds from from[32] to to[16]; returns the operations done.
     */
    double (*peak)(int64_t n, const float *from, float *to);
    /* The last step of index_select: the k best of s [n], ascending, ties to the lower index, without NaN and -inf,
     * padded with -1. */
    void (*topk)(const float *s, int64_t n, int32_t k, int32_t *out);
    di_status (*narrow_gemm)(di_stream *stream, const di_gemm_args *args);
    di_status (*narrow_moe_route)(di_stream *stream, const di_moe_route_args *args);
    di_status (*narrow_moe)(di_stream *stream, const di_moe_args *args);
} di_cpu_kernels;

/* Scratch bytes: `shared` once, `worker` for every thread. */
typedef struct di_cpu_need {
    size_t shared, worker;
} di_cpu_need;

struct di_device {
    di_pool *pool; /* owned */
    di_cpu_level level;
    bool is_order_free; /* sums may be added in other orders than the reference's, depending on the batch */
    di_cpu_kernels kernels;
    pthread_mutex_t lock; /* one operation at a time: pool and scratch are the device's */
    di_limits limits;     /* as reserved, field by field the largest; lock: lock */
    di_cpu_need have;     /* lock: lock */
    uint8_t *shared;      /* owned: scratch of the operation at work; lock: lock */
    uint8_t *workers;     /* owned: scratch of each worker; lock: lock */
};

struct di_stream {
    di_device *dev;      /* borrowed */
    const char *refused; /* operation that last refused its arguments; NULL = none yet */
};

/* Opens a device capped at `level`, which this machine must have; the table's open finds the level of a name. */
di_status di_cpu_device_open(di_device **out, int n_threads, di_cpu_level level, di_error *err);

extern const di_device_ops di_cpu_device_ops; /* device.c */
extern const di_ops di_cpu_ops;               /* dispatch.c */

/* ---- levels: each function overwrites its entries of the table ------------------------------------------------------
 */

di_cpu_level di_cpu_level_best(void); /* the highest level that processor and kernel have */
/* The level of a name; NULL and "auto" are the best. An unknown name is DI_ERR_ARG, a level that this machine lacks
 * DI_ERR_DEVICE. */
di_status di_cpu_level_find(const char *name, di_cpu_level *out, di_error *err);
/* Asks the kernel for AMX's tile registers, for this process and the threads that it starts from then on: before the
 * workers start. Levels below DI_CPU_AMX need nothing. DI_ERR_DEVICE when it refuses. */
di_status di_cpu_level_permit(di_cpu_level level, di_error *err);
void di_cpu_kernels_init(di_cpu_kernels *k, di_cpu_level level);

void di_cpu_install_ref_dense(di_cpu_kernels *k);  /* embed, rms_norm, quant, rope_table, rope, stream_mean, gather */
void di_cpu_install_ref_gemm(di_cpu_kernels *k);   /* gemm */
void di_cpu_install_ref_hc(di_cpu_kernels *k);     /* hc_mix, hc_post */
void di_cpu_install_ref_engram(di_cpu_kernels *k); /* engram_hash, engram_gather, engram_gate */
void di_cpu_install_ref_moe(di_cpu_kernels *k);    /* moe_route, moe */
void di_cpu_install_ref_kv(di_cpu_kernels *k);     /* kv_encode, ring_store, compress_pool, page_store */
void di_cpu_install_ref_index(di_cpu_kernels *k);  /* index_select */
void di_cpu_install_ref_attention(di_cpu_kernels *k); /* attention */
void di_cpu_install_ref_draft(di_cpu_kernels *k);     /* confidence */
/* The bodies that several levels share: rms_norm, quant, rope, engram_gate; gemm; hc_mix, hc_post; moe_route, moe; ...
 */
#define DI_CPU_INSTALLS(level)                                                                                         \
    void di_cpu_install_##level##_dense(di_cpu_kernels *k);                                                            \
    void di_cpu_install_##level##_gemm(di_cpu_kernels *k);                                                             \
    void di_cpu_install_##level##_hc(di_cpu_kernels *k);                                                               \
    void di_cpu_install_##level##_moe(di_cpu_kernels *k);                                                              \
    void di_cpu_install_##level##_peak(di_cpu_kernels *k);
DI_CPU_INSTALLS(portable)
DI_CPU_INSTALLS(avx2)
DI_CPU_INSTALLS(avx512)
#undef DI_CPU_INSTALLS
void di_cpu_install_portable_index(di_cpu_kernels *k);
void di_cpu_install_portable_attention(di_cpu_kernels *k);
void di_cpu_install_avx2_index(di_cpu_kernels *k);
void di_cpu_install_avx2_attention(di_cpu_kernels *k);
void di_cpu_install_neon_gemm(di_cpu_kernels *k);
void di_cpu_install_neon_moe(di_cpu_kernels *k);
void di_cpu_install_avx512_kv(di_cpu_kernels *k);
void di_cpu_install_avx512_index(di_cpu_kernels *k);
void di_cpu_install_avx512_attention(di_cpu_kernels *k);
void di_cpu_install_amx_index(di_cpu_kernels *k);
void di_cpu_install_amx_attention(di_cpu_kernels *k);
void di_cpu_install_avx512_wide(di_cpu_kernels *k); /* gemm, moe_route, moe in faithful numerics */
void di_cpu_install_amx_wide(di_cpu_kernels *k);
void di_cpu_install_amx_peak(di_cpu_kernels *k);

/* ---- scratch: each family raises *need to what its kernels take under the limits (all levels)
 * ------------------------ */

static inline void di_cpu_need_raise(di_cpu_need *need, size_t shared, size_t worker) {
    need->shared = DI_MAX(need->shared, shared);
    need->worker = DI_MAX(need->worker, worker);
}
void di_cpu_need_dense(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_gemm(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_hc(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_engram(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_moe(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_wide(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_kv(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_index(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_attention(const di_limits *limits, di_cpu_need *need);
void di_cpu_need_draft(const di_limits *limits, di_cpu_need *need);

/* Scratch parts are 64-byte aligned. A kernel checks that its need is met before it runs a job, then cuts its part into
 * pieces with di_cpu_take. */
static inline bool di_cpu_scratch_fits(const di_stream *stream, size_t shared, size_t worker) {
    return shared <= stream->dev->have.shared && worker <= stream->dev->have.worker;
}
static inline uint8_t *di_cpu_shared(const di_stream *stream) {
    return stream->dev->shared;
}
static inline uint8_t *di_cpu_worker(const di_stream *stream, int worker) {
    return stream->dev->workers + (size_t)worker * stream->dev->have.worker;
}
/* Size of a piece as di_cpu_take advances: rounded up to 64 bytes. */
static inline size_t di_cpu_piece(size_t n_bytes) {
    return DI_ROUND_UP(n_bytes, (size_t)64);
}
static inline void *di_cpu_take(uint8_t **at, size_t n_bytes) {
    void *p = *at;
    *at += di_cpu_piece(n_bytes);
    return p;
}

/* ---- jobs
 * -------------------------------------------------------------------------------------------------------------- */

/* Runs fn(ctx, part, n_parts, worker) for every part. `work` estimates the whole job in multiply-adds or elements
 * touched: a small job runs on the calling thread (worker 0), which is cheaper than waking anybody. Parts are the same
 * either way. */
void di_cpu_run(di_stream *stream, di_pool_fn fn, void *ctx, int64_t n_parts, int64_t work);

/* ---- floating-point mode
 * ------------------------------------------------------------------------------------------------ */

/* Flushes subnormal results and inputs to zero on this thread; returns the mode before, for di_cpu_fp_restore. */
uint64_t di_cpu_fp_flush(void);
void di_cpu_fp_restore(uint64_t mode);

/* ---- activations
 * -------------------------------------------------------------------------------------------------------- */

static inline bool di_cpu_is_real(const di_act *x) {
    return (x->dtype == DI_F32 || x->dtype == DI_BF16) && x->stride >= x->n_cols && x->data;
}
static inline bool di_cpu_is_act(const di_act *x) {
    if (x->dtype == DI_F8_E4M3)
        return x->n_cols % 32 == 0 && x->stride >= x->n_cols && x->data && x->scale;
    return di_cpu_is_real(x);
}

/* v * 2^(b-127); right for b = 0 too, whose power alone is subnormal and would be flushed. */
static inline float di_cpu_scaled(float v, uint8_t b) {
    return b ? v * di_e8m0_to_f32(b) : v * 0x1p-126f * 0.5f;
}

/* Columns [col, col + n) of row `row` as floats. For DI_F8_E4M3 col and n are multiples of 32. */
void di_cpu_load(const di_act *x, int64_t row, int64_t col, int64_t n, float *out);
/* The same without a copy where the row holds floats already: returns the row itself or buf. */
const float *di_cpu_row(const di_act *x, int64_t row, int64_t col, int64_t n, float *buf);
/* Stores floats at [col, col + n) of row `row`: DI_F32 as they are, DI_BF16 rounded to nearest even. */
void di_cpu_store(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v);
void di_cpu_bf16_to_f32(const uint16_t *x, int64_t n, float *out);
void di_cpu_f32_to_bf16(const float *x, int64_t n, uint16_t *out);

/* ---- weights
 * ------------------------------------------------------------------------------------------------------------ */

static inline bool di_cpu_is_mat(const di_mat *w) {
    if (!w || !w->data || w->n_out < 1 || w->n_in < 1)
        return false;
    if (w->dtype == DI_F32 || w->dtype == DI_BF16)
        return true;
    return w->scale && (w->dtype == DI_F8_E4M3 || (w->dtype == DI_F4_E2M1 && w->n_in % 32 == 0));
}
/* Row `row` as floats [n_in]; di_mat_row that holds under flush-to-zero. */
void di_cpu_mat_row(const di_mat *mat, int64_t row, float *out);

/* ---- sums
 * --------------------------------------------------------------------------------------------------------------- */

/* di_dot32, arranged for speed: same bits. */
float di_cpu_dot32(const float *a, const float *b, int64_t n);
/* out[i] = di_dot32(a, b + i*stride, n) for i in [0, count). */
void di_cpu_dot32_rows(const float *a, const float *b, int64_t stride, int64_t n, int64_t count, float *out);

/* ---- arguments that kernels of every level check alike ---- */

bool di_cpu_rms_norm_fits(const di_stream *stream, const di_rms_norm_args *a);           /* ref_dense.c */
bool di_cpu_quant_fits(const di_quant_args *a);                                          /* ref_dense.c */
bool di_cpu_rope_fits(const di_stream *stream, const di_rope_args *a);                   /* ref_dense.c */
bool di_cpu_engram_gather_fits(const di_stream *stream, const di_engram_gather_args *a); /* ref_engram.c */
bool di_cpu_engram_gate_fits(const di_stream *stream, const di_engram_gate_args *a);     /* ref_engram.c */

/* One row of engram_gather; buf [dim]. (ref_engram.c) */
void di_cpu_engram_gather_row(const di_engram_gather_args *a, int64_t row, float *buf);

/* 1 / (1 + exp(-x)) by di_expf; right at both ends. */
static inline float di_cpu_sigmoid(float x) {
    return 1.0f / (1.0f + di_expf(-x));
}

#endif
