/* The NVIDIA backend's own header: device, stream, scratch memory and the launch of a kernel.
 *
 * Owns: what every kernel file of this folder stands on. The folder becomes one loadable module,
 * libdeepinfer-cuda.so, whose only visible symbol is di_backend_module (module.cu); the program finds it by
 * registry.c and sees two tables. Each family of operations is a file or two:
 *
 *   <family>.cu        portable kernels: any chip from compute capability 9.0 on, both numerics, sums in the order of
 *                      ops.h, so that they give the CPU reference's bits; the readable side of every fast path
 *   <family>_sm90.cu   fast kernels for faithful numerics on Hopper: wgmma, asynchronous copies; compiled for sm_90a
 *   <family>_sm100.cu  the same on Blackwell: tcgen05; compiled for sm_100a, taken when asked for
 *
 * A family exports one di_cuda_<operation> for each of its operations, which checks arguments, picks a kernel and
 * launches; and di_cuda_need_<family>, the scratch that it takes under given limits. Nothing here waits for the device
 * inside an operation, and nothing reads device memory from the host.
 *
 * Private to backend/cuda and its tests. CUDA C++ (.cu); the headers of the layers below are C and come in here. */
#ifndef DI_CUDA_H
#define DI_CUDA_H

#ifndef DI_EMU /* tests build kernels as functions of the host, with what they need included beforehand */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <pthread.h>

#define _Noreturn __attribute__((noreturn)) /* C's word, which C++ lacks */
extern "C" {
#include "backend/backend.h"
}

/* ---- device ------------------------------------------------------------------------------------------------------
 */

enum di_cuda_arch { DI_CUDA_PORTABLE, DI_CUDA_SM90 /* wgmma */, DI_CUDA_SM100 /* tcgen05 */ };

enum { DI_CUDA_STAGES = 4 }; /* pinned buffers of an upload */

struct di_device {
    int ordinal; /* of the CUDA runtime */
    cudaDeviceProp prop;
    di_cuda_arch arch; /* what kernels are picked by; below prop's where the config caps it */
    int n_sms;
    bool is_order_free; /* sums may be added in an order that depends on the batch */
    di_pool *pool;      /* owned: host work */
    di_limits limits;   /* as reserved, field by field the largest */
    /* owned: of the operation at work, since operations of one GPU run in one order (di_cuda_turn_begin); behind it
     * that of the operation at work on a side stream */
    uint8_t *scratch;
    size_t scratch_bytes, side_scratch_bytes;
    pthread_mutex_t copying;      /* one copy at a time has the stream and the buffers */
    cudaStream_t copies;          /* owned: uploads and downloads; lock: copying */
    void *stages[DI_CUDA_STAGES]; /* owned, pinned; lock: copying */
    cudaEvent_t stage_free[DI_CUDA_STAGES];
};

struct di_stream {
    di_device *dev; /* borrowed */
    cudaStream_t stream;
    di_stream *side;     /* owned: works beside this one; NULL: none was asked for, or this is one */
    di_stream *owner;    /* borrowed: whose side this is; NULL: nobody's */
    cudaEvent_t ends;    /* owned: of what it was given when another stream got its turn or followed it */
    bool is_recording;   /* what is put on it and on its side does not run now */
    const char *refused; /* operation that last refused its arguments or failed to launch, of the side too; NULL = none
                            yet */
};
static inline di_stream *di_cuda_owner(di_stream *stream) {
    return stream->owner ? stream->owner : stream;
}

/* Around putting something on a stream: makes it and its side wait for what other streams of the GPU were given before,
 * of whichever engine: scratch is the device's, and some kernels count in memory of the module. */
void di_cuda_turn_begin(di_stream *stream);
void di_cuda_turn_end(di_stream *stream);

/* DI_OK, or DI_ERR_DEVICE with what was tried and CUDA's own words; DI_ERR_MEMORY where memory is what lacks. */
di_status di_cuda_check(cudaError_t e, di_error *err, const char *what);

/* Scratch of the operation at work, and how much there is; NULL when more is asked for. 256-byte aligned. */
static inline size_t di_cuda_scratch_bytes(const di_stream *stream) {
    return stream->owner ? stream->dev->side_scratch_bytes : stream->dev->scratch_bytes;
}
static inline void *di_cuda_scratch(const di_stream *stream, size_t n_bytes) {
    if (n_bytes > di_cuda_scratch_bytes(stream))
        return NULL;
    return stream->dev->scratch + (stream->owner ? stream->dev->scratch_bytes : 0);
}
/* Cuts a piece of n bytes, rounded up to 256, off *at. */
static inline void *di_cuda_take(uint8_t **at, size_t n_bytes) {
    void *p = *at;
    *at += (n_bytes + 255) & ~(size_t)255;
    return p;
}
static inline size_t di_cuda_piece(size_t n_bytes) {
    return (n_bytes + 255) & ~(size_t)255;
}

/* ---- launching ---------------------------------------------------------------------------------------------------
 * DI_LAUNCH((kernel<A, B>), grid, block, smem_bytes, stream, arguments...): dynamic shared memory of any size that the
 * chip has, beside up to 16 KiB of a kernel's own. DI_DYN_SHARED(type, name) names it inside the kernel. */
#ifndef DI_EMU
#define DI_DYN_SHARED(type, name)                                                                                      \
    extern __shared__ __align__(1024) uint8_t di_dyn_shared_[];                                                        \
    type *name = reinterpret_cast<type *>(di_dyn_shared_)
#define DI_LAUNCH(kernel, grid, block, smem, stream, ...)                                                              \
    do {                                                                                                               \
        if ((smem) > 32 * 1024) {                                                                                      \
            static int di_allowed_ = 0; /* per kernel and place; a race sets the same value twice */                   \
            if (di_allowed_ < (int)(smem)) {                                                                           \
                (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(smem));          \
                di_allowed_ = (int)(smem);                                                                             \
            }                                                                                                          \
        }                                                                                                              \
        kernel<<<(grid), (block), (smem), (stream)>>>(__VA_ARGS__);                                                    \
    } while (0)
/* The same, for a kernel that may begin while the one before it still runs. All threads of such a kernel that touch
 * what other kernels write or read call cu_grid_wait (sm90.cuh) first, and at least one thread calls it in any case;
 * cu_grid_launch after it lets the next kernel begin. What may be read before the wait: weights, and nothing else. */
#define DI_LAUNCH_PDL(kernel, grid, block, smem, queue, ...)                                                           \
    do {                                                                                                               \
        if ((smem) > 32 * 1024) {                                                                                      \
            static int di_allowed_ = 0;                                                                                \
            if (di_allowed_ < (int)(smem)) {                                                                           \
                (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(smem));          \
                di_allowed_ = (int)(smem);                                                                             \
            }                                                                                                          \
        }                                                                                                              \
        cudaLaunchAttribute di_attribute_ = {};                                                                        \
        di_attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;                                         \
        di_attribute_.val.programmaticStreamSerializationAllowed = 1;                                                  \
        cudaLaunchConfig_t di_config_ = {};                                                                            \
        di_config_.gridDim = dim3(grid);                                                                               \
        di_config_.blockDim = dim3(block);                                                                             \
        di_config_.dynamicSmemBytes = (size_t)(smem);                                                                  \
        di_config_.stream = (queue);                                                                                   \
        di_config_.attrs = &di_attribute_;                                                                             \
        di_config_.numAttrs = 1;                                                                                       \
        (void)cudaLaunchKernelEx(&di_config_, kernel, __VA_ARGS__); /* cudaGetLastError tells */                       \
    } while (0)
#else
#define DI_LAUNCH_PDL DI_LAUNCH
#endif

/* ---- operations and scratch of each family ----------------------------------------------------------------------- */

#define DI_CUDA_OP(f) di_status di_cuda_##f(di_stream *stream, const di_##f##_args *args);
DI_OPS_LIST(DI_CUDA_OP)
DI_OPS_OPTIONAL_LIST(DI_CUDA_OP)
#undef DI_CUDA_OP

size_t di_cuda_need_dense(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_gemm(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_hc(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_engram(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_kv(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_index(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_attention(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_moe(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_draft(const di_device *dev, const di_limits *limits);
size_t di_cuda_need_sample(const di_device *dev, const di_limits *limits);

/* experts_place of the device table (moe.cu). */
di_status di_cuda_experts_place(di_device *dev, const di_expert *experts, int32_t n, const di_expert *shared,
                                void **out, di_error *err);
/* The last step of index_select alone (index.cu). */
void di_cuda_topk(di_device *dev, const float *scores, int64_t n, int32_t k, int32_t *idx);

/* ---- arguments that families check alike ------------------------------------------------------------------------- */

/* A block of activations whose fields fit together; is_real: floats, not codes. */
static inline bool di_cuda_is_act(const di_act *x) {
    bool is_known = x->dtype == DI_F32 || x->dtype == DI_BF16 || (x->dtype == DI_F8_E4M3 && x->scale);
    return is_known && x->n_rows >= 0 && x->n_cols >= 0 && x->stride >= x->n_cols && (x->data || !x->n_rows) &&
           (x->dtype != DI_F8_E4M3 || x->n_cols % 32 == 0);
}
static inline bool di_cuda_is_real(const di_act *x) {
    return x->dtype != DI_F8_E4M3 && di_cuda_is_act(x);
}
static inline bool di_cuda_is_mat(const di_mat *w) {
    bool has_scale = w && (w->dtype == DI_F8_E4M3 || (w->dtype == DI_F4_E2M1 && w->n_in % 32 == 0));
    return w && w->data && w->n_out >= 1 && w->n_in >= 1 &&
           (w->dtype == DI_F32 || w->dtype == DI_BF16 || (has_scale && w->scale));
}

#endif
