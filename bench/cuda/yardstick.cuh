/* What the benches of kernels measure by: random data, medians by events and of graphs, and the machine's limits:
 * reading memory, and cuBLASLt's bf16 products, whose library is opened where it is found. */
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

/* Seconds of one of the n launches that `all` makes: the median of replays of a graph of them. */
template <class F> static double graph_seconds(cudaStream_t stream, int n, int replays, F all) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    all(); /* modules, attributes */
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    all();
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, stream));
    double ms = median_ms(stream, replays, [&] { OK(cudaGraphLaunch(exec, stream)); });
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    return ms * 1e-3 / n;
}

/* ---- cuBLASLt ----------------------------------------------------------------------------------------------------
 * The few names of its interface that a product needs, as its reference manual has them; its header may be absent. */

typedef struct lt_algo {
    uint64_t data[8];
} lt_algo;
typedef struct lt_found {
    lt_algo algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} lt_found;

static struct lt {
    void *handle;
    int (*desc_create)(void **, int compute, int scale);
    int (*desc_set)(void *, int attribute, const void *, size_t);
    int (*desc_destroy)(void *);
    int (*layout_create)(void **, int type, uint64_t rows, uint64_t cols, int64_t ld);
    int (*layout_destroy)(void *);
    int (*preference_create)(void **);
    int (*preference_set)(void *, int attribute, const void *, size_t);
    int (*preference_destroy)(void *);
    int (*heuristic)(void *, void *, void *, void *, void *, void *, void *, int, lt_found *, int *);
    int (*matmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                  void *, void *, void *, const lt_algo *, void *, size_t, cudaStream_t);
} lt;
static const size_t lt_workspace_bytes = (size_t)64 << 20;
static uint8_t *lt_workspace;

/* path: of the library, or NULL: where it usually is. Where it is not, products take no time. */
static void lt_open(const char *path) {
    const char *const names[] = {path, "libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12",
                                 "/usr/local/cuda/lib64/libcublasLt.so"};
    void *lib = NULL;
    for (const char *name : names)
        lib = lib || !name ? lib : dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    int (*create)(void **) = lib ? (int (*)(void **))dlsym(lib, "cublasLtCreate") : NULL;
    if (!create) {
        printf("cuBLASLt: not here\n");
        return;
    }
#define GET(field, name) *(void **)&lt.field = dlsym(lib, name)
    GET(desc_create, "cublasLtMatmulDescCreate");
    GET(desc_set, "cublasLtMatmulDescSetAttribute");
    GET(desc_destroy, "cublasLtMatmulDescDestroy");
    GET(layout_create, "cublasLtMatrixLayoutCreate");
    GET(layout_destroy, "cublasLtMatrixLayoutDestroy");
    GET(preference_create, "cublasLtMatmulPreferenceCreate");
    GET(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    GET(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    GET(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    GET(matmul, "cublasLtMatmul");
#undef GET
    if (!lt.matmul || create(&lt.handle))
        lt.handle = NULL;
    lt_workspace = device<uint8_t>(lt_workspace_bytes);
}

/* Seconds of out [rows, n_out] = X . W^T in bf16, the best of eight proposals, over weights of 256 MB in turn; 0
 * without the library. */
static double lt_seconds(cudaStream_t stream, int64_t rows, int64_t n_out, int64_t n_in) {
    if (!lt.handle)
        return 0;
    enum { R_32F = 0, R_16BF = 14, COMPUTE_32F = 68, TRANSA = 3, OP_T = 1, MAX_WORKSPACE = 1, TRIES = 8 };
    void *desc, *a, *b, *d, *preference;
    int op = OP_T, n_found = 0;
    lt_found found[TRIES];
    int64_t n_values = n_out * n_in;
    int n_w = (int)std::max<int64_t>(2, std::min<int64_t>(32, ((int64_t)256 << 20) / (2 * n_values)));
    uint16_t *w = device<uint16_t>((size_t)(n_values * n_w)), *x = device<uint16_t>((size_t)(rows * n_in)),
             *out = device<uint16_t>((size_t)(rows * n_out));
    fill_factors<<<1024, 256, 0, stream>>>(w, n_values * n_w, 3);
    fill_factors<<<1024, 256, 0, stream>>>(x, rows * n_in, 4);
    double best = 0;
    bool ok = !lt.desc_create(&desc, COMPUTE_32F, R_32F) && !lt.desc_set(desc, TRANSA, &op, sizeof op) &&
              !lt.layout_create(&a, R_16BF, (uint64_t)n_in, (uint64_t)n_out, n_in) &&
              !lt.layout_create(&b, R_16BF, (uint64_t)n_in, (uint64_t)rows, n_in) &&
              !lt.layout_create(&d, R_16BF, (uint64_t)n_out, (uint64_t)rows, n_out) &&
              !lt.preference_create(&preference) &&
              !lt.preference_set(preference, MAX_WORKSPACE, &lt_workspace_bytes, sizeof lt_workspace_bytes) &&
              !lt.heuristic(lt.handle, desc, a, b, d, d, preference, TRIES, found, &n_found);
    float one = 1, zero = 0;
    for (int i = 0; ok && i < n_found; i++) {
        int status = 0;
        double t = graph_seconds(stream, n_w, 5, [&] {
            for (int k = 0; k < n_w; k++)
                status |= lt.matmul(lt.handle, desc, &one, w + k * n_values, a, x, b, &zero, out, d, out, d,
                                    &found[i].algo, lt_workspace, lt_workspace_bytes, stream);
        });
        if (!status && (best == 0 || t < best))
            best = t;
    }
    if (ok) {
        lt.preference_destroy(preference);
        lt.layout_destroy(d);
        lt.layout_destroy(b);
        lt.layout_destroy(a);
        lt.desc_destroy(desc);
    }
    OK(cudaFree(w));
    OK(cudaFree(x));
    OK(cudaFree(out));
    return best;
}

/* The chip's bf16 rate, of a product 8192^3; 0 without the library. */
static double cublaslt_tflops(const char *path, cudaStream_t stream) {
    const int64_t n = 8192;
    if (!lt.handle)
        lt_open(path);
    double t = lt_seconds(stream, n, n, n);
    return t > 0 ? 2.0 * n * n * n / t * 1e-12 : 0;
}

#endif
