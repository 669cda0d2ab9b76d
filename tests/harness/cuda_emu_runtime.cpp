/* The CUDA runtime's functions over the emulation: memory, streams, events, graphs, the device; and the backend's
 * tables.
 *
 * A stream does what it is given before the call returns, so nothing ever has to be waited for. While it captures it
 * keeps what it is given; a graph is that list. */
#include <time.h>

#include <atomic>
#include <string>
#include <vector>

#include "backend/cuda/cuda.h"

struct di_emu_graph {
    std::vector<std::function<cudaError_t()>> steps;
};
struct di_emu_stream {
    di_emu_graph *capture; /* owned; NULL = none */
};
struct di_emu_event {
    double ms;
};

cudaError_t di_emu_run(const di_emu_launch_shape &shape, const std::function<void()> &call); /* cuda_emu.cpp */

static std::atomic<int> the_major{9};
extern "C" void di_emu_set_capability(int major) {
    the_major = major;
}

static cudaError_t enqueue(cudaStream_t s, std::function<cudaError_t()> step) {
    if (!s || !s->capture)
        return step();
    s->capture->steps.push_back(std::move(step));
    return cudaSuccess;
}
void di_emu_launch(const di_emu_launch_shape &shape, std::function<void()> call) {
    (void)enqueue(shape.stream, [=] { return di_emu_run(shape, call); });
}

/* ---- errors and the device -----------------------------------------------------------------------------------------
 */

const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaSuccess ? "cudaSuccess" : e == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaError";
}
const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorLaunchFailure:
        return di_emu_last_failure();
    default:
        return "error";
    }
}
cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int ordinal) {
    return ordinal == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int *ordinal) {
    *ordinal = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->totalGlobalMem = (size_t)16 << 30;
    p->sharedMemPerBlock = 48 * 1024;
    p->sharedMemPerBlockOptin = 227 * 1024;
    p->sharedMemPerMultiprocessor = 228 * 1024;
    p->major = the_major;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *n_free, size_t *n_total) {
    *n_free = *n_total = (size_t)16 << 30;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}

/* ---- memory: like the device's, aligned to 256 and not cleared
 * ------------------------------------------------------- */

cudaError_t di_emu_malloc(void **p, size_t n_bytes) {
    size_t n = (n_bytes + 255) / 256 * 256;
    *p = aligned_alloc(256, n ? n : 256);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind, cudaStream_t s) {
    return enqueue(s, [=] {
        memmove(dst, src, n);
        return cudaSuccess;
    });
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t s) {
    return enqueue(s, [=] {
        for (size_t i = 0; i < height; i++)
            memmove((uint8_t *)dst + i * dst_pitch, (const uint8_t *)src + i * src_pitch, width);
        return cudaSuccess;
    });
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
    return enqueue(s, [=] {
        memset(p, v, n);
        return cudaSuccess;
    });
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(dst, src, n, kind, NULL);
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
    return cudaMemsetAsync(p, v, n, NULL);
}

/* ---- streams and events
 * ---------------------------------------------------------------------------------------------- */

long long clock64() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = new di_emu_stream{NULL};
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    return cudaStreamCreate(s);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if (s)
        delete s->capture;
    delete s;
    return cudaSuccess;
}
/* Waiting for a stream that captures is refused, as the runtime does. */
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    return s && s->capture ? cudaErrorInvalidValue : cudaPeekAtLastError();
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    return cudaStreamSynchronize(s);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = new di_emu_event{0.0};
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    return cudaEventCreate(e);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    return enqueue(s, [=] {
        e->ms = (double)clock64() * 1e-6;
        return cudaSuccess;
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaPeekAtLastError();
}
cudaError_t cudaEventQuery(cudaEvent_t) {
    return cudaPeekAtLastError();
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = (float)std::max(b->ms - a->ms, 1e-6);
    return cudaSuccess;
}

/* ---- graphs
 * ---------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    if (!s || s->capture)
        return cudaErrorInvalidValue;
    s->capture = new di_emu_graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    if (!s || !s->capture)
        return cudaErrorInvalidValue;
    *g = s->capture;
    s->capture = NULL;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status) {
    *status = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long) {
    *x = new di_emu_graph(*g);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
    return enqueue(s, [=] {
        for (const auto &step : x->steps)
            if (cudaError_t e = step())
                return e;
        return cudaSuccess;
    });
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete g;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) {
    delete x;
    return cudaSuccess;
}

/* ---- the backend
 * ----------------------------------------------------------------------------------------------------- */

extern "C" const di_backend *di_backend_module(int log_level);
extern "C" di_backend di_emu_backend(void) {
    return *di_backend_module(DI_LOG_WARN);
}
