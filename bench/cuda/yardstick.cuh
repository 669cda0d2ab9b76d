/* What the benches of kernels measure by: random data, medians by events, and the machine's limits: reading memory, and
 * cuBLASLt's bf16 rate, whose library is opened where it is found. */
#ifndef DI_BENCH_YARDSTICK_CUH
#define DI_BENCH_YARDSTICK_CUH

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "backend/cuda/cu.cuh"

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

__host__ __device__ static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
template <class T> static T *device(size_t n) {
    T *p;
    OK(cudaMalloc(&p, n * sizeof(T) + 16));
    return p;
}

template <class F> static double median_ms(cudaStream_t stream, int n, F f) {
    std::vector<float> ms(n);
    cudaEvent_t from, to;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    f();
    for (int i = 0; i < n; i++) {
        OK(cudaEventRecord(from, stream));
        f();
        OK(cudaEventRecord(to, stream));
        OK(cudaEventSynchronize(to));
        OK(cudaEventElapsedTime(&ms[i], from, to));
    }
    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
    std::sort(ms.begin(), ms.end());
    return ms[n / 2];
}

__global__ void read_all(const uint4 *p, int64_t n, uint32_t *out) {
    uint32_t x = 0;
    int64_t step = (int64_t)gridDim.x * blockDim.x, i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = __ldg(p + i), b = __ldg(p + i + step), c = __ldg(p + i + 2 * step), d = __ldg(p + i + 3 * step);
        x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (x == 0x12345678u)
        *out = x;
}

/* Random bf16 values of (-1, 1). */
__global__ void fill_factors(uint16_t *p, int64_t n, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        p[i] = cu_f32_to_bf16((float)(mix(seed ^ (uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
}

/* cuBLASLt by the few functions that a product needs; its header may be absent. */
static double cublaslt_tflops(const char *path, cudaStream_t stream) {
    const char *names[] = {path, "libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12",
                           "/usr/local/cuda/lib64/libcublasLt.so"};
    void *lib = NULL;
    for (const char *name : names)
        lib = lib || !name ? lib : dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!lib)
        return 0;
    typedef int (*fn)(...);
    auto at = [&](const char *name) { return (fn)dlsym(lib, name); };
    struct found {
        uint64_t algo[8];
        size_t workspace;
        int state;
        float waves;
        int reserved[4];
    } best[8];
    void *handle, *desc, *layout[3], *preference;
    const int64_t n = 8192;
    const int r_32f = 0, r_16bf = 14, compute_32f = 68, op_t = 1, attr_trans_a = 3, attr_workspace = 1;
    size_t workspace = 64 << 20;
    int n_found = 0;
    if (!at("cublasLtCreate") || at("cublasLtCreate")(&handle) ||
        at("cublasLtMatmulDescCreate")(&desc, compute_32f, r_32f) ||
        at("cublasLtMatmulDescSetAttribute")(desc, attr_trans_a, &op_t, sizeof op_t))
        return 0;
    for (void *&l : layout)
        if (at("cublasLtMatrixLayoutCreate")(&l, r_16bf, (uint64_t)n, (uint64_t)n, (int64_t)n))
            return 0;
    if (at("cublasLtMatmulPreferenceCreate")(&preference) ||
        at("cublasLtMatmulPreferenceSetAttribute")(preference, attr_workspace, &workspace, sizeof workspace) ||
        at("cublasLtMatmulAlgoGetHeuristic")(handle, desc, layout[0], layout[1], layout[2], layout[2], preference, 8,
                                             best, &n_found) ||
        !n_found)
        return 0;
    uint16_t *m[3];
    for (int i = 0; i < 3; i++) {
        m[i] = device<uint16_t>(n * n);
        fill_factors<<<1024, 256>>>(m[i], n * n, 90 + i);
    }
    OK(cudaDeviceSynchronize());
    uint8_t *space = device<uint8_t>(workspace);
    float one = 1, zero = 0;
    double most = 0;
    fn matmul = at("cublasLtMatmul");
    for (int i = 0; i < std::min(n_found, 4); i++) {
        int failed = 0;
        double ms = median_ms(stream, 15, [&] {
            failed |= matmul(handle, desc, &one, m[0], layout[0], m[1], layout[1], &zero, m[2], layout[2], m[2],
                             layout[2], best[i].algo, space, workspace, stream);
        });
        if (!failed)
            most = std::max(most, 2.0 * n * n * n / ms * 1e-9);
    }
    for (uint16_t *p : m)
        OK(cudaFree(p));
    OK(cudaFree(space));
    return most;
}

#endif
