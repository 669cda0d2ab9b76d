/* gemm of the NVIDIA backend at the released model's shapes, against this machine's memory and cuBLASLt.
 *
 * One run measures the bandwidth of a large copy and of a large read, cuBLASLt's bf16 products (libcublasLt.so is
 * opened at run time; without it its columns stay empty), and di_cuda_gemm for few and many rows. A graph holds one
 * launch for each of several weight matrices, 256 MB in all, so that L2 does not serve them; the time of a launch is
 * the median over replays. Every configuration is checked in the same run: outputs drawn at random are computed once
 * more in double by a kernel that reads the formats as they are defined. Table on stdout, a JSON line for each row in
 * the file named by the first argument.
 *
 *   F="-std=c++17 -O3 -ftz=true -prec-div=true -prec-sqrt=true -I src -I include" D=src/backend/cuda
 *   nvcc $F -gencode=arch=compute_100a,code=sm_100a -c -o gemm_sm100.o $D/gemm_sm100.cu
 *   nvcc $F -gencode=arch=compute_90a,code=sm_90a -o gemm_bench bench/cuda/gemm_bench.cu $D/gemm.cu \
 *        $D/gemm_{,few_,fp8_,bf16_}sm90.cu gemm_sm100.o -ldl */
#include <math.h>

#include "backend/cuda/gemm.h"
#include "yardstick.cuh"

static FILE *json;
static cudaStream_t stream;
static double copy_bandwidth, read_bandwidth; /* bytes/s */

/* ---- data -------------------------------------------------------------------------------------------------------- */

enum fill { FILL_E4M3, FILL_BYTES, FILL_BF16, FILL_SCALE_W, FILL_SCALE_X };

__device__ static inline uint32_t bits_of(uint64_t x) {
    return (uint32_t)(mix(x) >> 32);
}

/* Bytes that a checkpoint or a quantiser could have written; bf16 of [-1, 1). */
__global__ void fill_kernel(uint8_t *p, int64_t n, fill how, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t r = bits_of(seed + (uint64_t)i * 0x9E3779B97F4A7C15ull);
        if (how == FILL_BF16) {
            ((uint16_t *)p)[i] = cu_f32_to_bf16((float)(int32_t)r * 0x1p-31f);
        } else if (how == FILL_SCALE_W || how == FILL_SCALE_X) {
            p[i] = (uint8_t)((how == FILL_SCALE_W ? 115 : 117) + r % 4);
        } else {
            uint8_t b = (uint8_t)r;
            p[i] = how == FILL_E4M3 && (b & 0x7F) == 0x7F ? 0x3A : b;
        }
    }
}

static void fill_with(void *p, int64_t n, fill how, uint64_t seed) {
    fill_kernel<<<2048, 256, 0, stream>>>((uint8_t *)p, n, how, seed);
    OK(cudaGetLastError());
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void measure_memory(int n_sms) {
    const size_t n = (size_t)4 << 30;
    uint8_t *a = device<uint8_t>(n), *b = device<uint8_t>(n);
    fill_with(a, (int64_t)n, FILL_BYTES, 1);
    double copy = graph_seconds(stream, 1, 9, [&] { OK(cudaMemcpyAsync(b, a, n, cudaMemcpyDeviceToDevice, stream)); });
    double read = graph_seconds(stream, 1, 9, [&] {
        read_all<<<n_sms * 4, 512, 0, stream>>>((const uint4 *)a, (int64_t)(n / 16), (uint32_t *)b);
    });
    copy_bandwidth = 2.0 * (double)n / copy;
    read_bandwidth = (double)n / read;
    printf("memory: copy %.0f GB/s (read + written), read %.0f GB/s\n", copy_bandwidth * 1e-9, read_bandwidth * 1e-9);
    fprintf(json, "{\"what\":\"memory\",\"copy_gbps\":%.1f,\"read_gbps\":%.1f}\n", copy_bandwidth * 1e-9,
            read_bandwidth * 1e-9);
    OK(cudaFree(a));
    OK(cudaFree(b));
}

/* ---- ours -------------------------------------------------------------------------------------------------------- */

typedef struct shape {
    const char *name;
    di_dtype x, w, out;
    int64_t n_out, n_in;
    int n_groups;
} shape;

/* Output (row, out) of sample i: its sum, the sum of magnitudes, and what the fp8 form may cut (32 * 2^-13 of the
 * largest product of each group). One warp a sample; want [n][3]. */
__global__ void check_kernel(di_act x, di_mat w, int n_groups, int64_t n, uint64_t seed, double *want) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    if (i >= n)
        return;
    int lane = threadIdx.x % 32;
    int64_t row = (int64_t)(bits_of(seed + 2 * i) % (uint64_t)x.n_rows),
            o = bits_of(seed + 2 * i + 1) % (uint64_t)w.n_out;
    int64_t col = o / (w.n_out / n_groups) * w.n_in;
    double y = 0, size = 0, cut = 0;
    for (int64_t g = lane; g < w.n_in / 32; g += 32) {
        double largest = 0;
        for (int k = 0; k < 32; k++) {
            double p = (double)cu_act_load(x, row, col + g * 32 + k) * (double)cu_mat_load(w, o, g * 32 + k);
            y += p;
            size += fabs(p);
            largest = fmax(largest, fabs(p));
        }
        cut += 32 * 0x1p-13 * largest;
    }
    for (int d = 16; d; d >>= 1) {
        y += __shfl_xor_sync(~0u, y, d);
        size += __shfl_xor_sync(~0u, size, d);
        cut += __shfl_xor_sync(~0u, cut, d);
    }
    if (lane == 0) {
        want[3 * i] = y;
        want[3 * i + 1] = size;
        want[3 * i + 2] = cut;
    }
}
__global__ void pick_kernel(di_act out, int64_t n, uint64_t seed, float *got) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    int64_t row = (int64_t)(bits_of(seed + 2 * i) % (uint64_t)out.n_rows),
            o = bits_of(seed + 2 * i + 1) % (uint64_t)out.n_cols;
    got[i] = cu_act_load(out, row, o);
}

/* The largest error over its bound, and the error's norm over the result's in *norm. */
static double check(const di_gemm_args &a, bool is_fp8_form, double *norm) {
    enum { N = 16384 };
    static double *want = device<double>(N * 3);
    static float *got = device<float>(N);
    static uint64_t seed = 77;
    seed += 1 << 20;
    std::vector<double> w(N * 3);
    std::vector<float> g(N);
    check_kernel<<<N / 8, 256, 0, stream>>>(a.x, *a.w, a.n_groups, N, seed, want);
    pick_kernel<<<N / 256, 256, 0, stream>>>(a.out, N, seed, got);
    OK(cudaMemcpyAsync(w.data(), want, w.size() * sizeof(double), cudaMemcpyDeviceToHost, stream));
    OK(cudaMemcpyAsync(g.data(), got, g.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    double worst = 0, error = 0, all = 0;
    for (int i = 0; i < N; i++) {
        double y = w[3 * i], e = fabs(g[i] - y);
        double bound = (double)a.w->n_in * 0x1p-22 * w[3 * i + 1] +
                       fabs(y) * (a.out.dtype == DI_BF16 ? 0x1p-8 : 0x1p-23) + (is_fp8_form ? w[3 * i + 2] : 0) + 1e-37;
        if (!(e / bound <= worst))
            worst = e / bound; /* NaN stays */
        error += e * e;
        all += y * y;
    }
    *norm = sqrt(error / all);
    return worst;
}

static di_device dev;
static di_stream handle = {&dev, NULL, NULL};
static int n_wrong;

/* One table row: rows of a shape, with or without invariance. */
static void measure(const shape &s, int64_t rows, bool is_order_free, double lt_time) {
    dev.is_order_free = is_order_free;
    size_t codes = s.w == DI_BF16      ? (size_t)(s.n_out * s.n_in) * 2
                   : s.w == DI_F8_E4M3 ? (size_t)(s.n_out * s.n_in)
                                       : (size_t)(s.n_out * s.n_in) / 2;
    size_t scales = s.w == DI_BF16 ? 0 : (size_t)(s.w == DI_F8_E4M3 ? s.n_out / 32 : s.n_out) * (size_t)(s.n_in / 32);
    size_t step = (codes + 255) & ~(size_t)255, scale_step = (scales + 255) & ~(size_t)255;
    int n_w = (int)std::max<size_t>(2, std::min<size_t>(128, (((size_t)256 << 20) + step - 1) / step));
    int64_t cols = s.n_in * s.n_groups;
    uint8_t *w = device<uint8_t>(step * (size_t)n_w), *ws = device<uint8_t>(scale_step * (size_t)n_w);
    uint8_t *x = device<uint8_t>((size_t)(rows * cols) * 2), *xs = device<uint8_t>((size_t)(rows * cols) / 32);
    uint8_t *out = device<uint8_t>((size_t)(rows * s.n_out) * 4);
    if (s.w == DI_BF16)
        fill_with(w, (int64_t)step * n_w / 2, FILL_BF16, 11);
    else
        fill_with(w, (int64_t)step * n_w, s.w == DI_F8_E4M3 ? FILL_E4M3 : FILL_BYTES, 11);
    fill_with(ws, (int64_t)scale_step * n_w, FILL_SCALE_W, 12);
    fill_with(x, rows * cols, s.x == DI_BF16 ? FILL_BF16 : FILL_E4M3, 13);
    fill_with(xs, rows * cols / 32, FILL_SCALE_X, 14);
    OK(cudaMemsetAsync(out, 0xA5, (size_t)(rows * s.n_out) * 4, stream));
    std::vector<di_mat> mats;
    for (int i = 0; i < n_w; i++)
        mats.push_back({s.w, s.n_out, s.n_in, w + (size_t)i * step, scales ? ws + (size_t)i * scale_step : NULL});
    di_gemm_args args = {};
    args.x = {s.x, rows, cols, cols, x, s.x == DI_BF16 ? NULL : xs};
    args.out = {s.out, rows, s.n_out, s.n_out, out, NULL};
    args.n_groups = s.n_groups;
    di_status st = DI_OK;
    double t = graph_seconds(stream, n_w, rows > 512 ? 5 : 15, [&] {
        for (int i = 0; i < n_w && !st; i++) {
            args.w = &mats[(size_t)i];
            st = di_cuda_gemm(&handle, &args);
        }
    });
    OK(cudaGetLastError());
    if (st) {
        printf("%-6s %6lld: refused\n", s.name, (long long)rows);
        n_wrong++;
        return;
    }
    bool is_fp8_form = s.w == DI_F8_E4M3;
    double norm, worst = check(args, is_fp8_form, &norm), bytes = (double)(codes + scales);
    double gbps = bytes / t * 1e-9, tflops = 2.0 * (double)rows * (double)s.n_out * (double)s.n_in / t * 1e-12;
    n_wrong += !(worst <= 1);
    printf("%-6s %6lld %-9s %9.2f us %7.0f GB/s %5.2f of copy %5.2f of read %7.1f TFLOPS", s.name, (long long)rows,
           is_order_free ? "free" : "invariant", t * 1e6, gbps, gbps * 1e9 / copy_bandwidth,
           gbps * 1e9 / read_bandwidth, tflops);
    if (lt_time > 0)
        printf("  cublasLt %9.2f us, %5.2fx", lt_time * 1e6, lt_time / t);
    printf("  error %.2f of bound, %.1e%s\n", worst, norm, worst <= 1 ? "" : "  WRONG");
    fprintf(
        json,
        "{\"what\":\"gemm\",\"name\":\"%s\",\"n_out\":%lld,\"n_in\":%lld,\"groups\":%d,\"rows\":%lld,\"order\":\"%s\","
        "\"us\":%.3f,\"gbps\":%.1f,\"of_copy\":%.4f,\"of_read\":%.4f,\"tflops\":%.2f,\"cublaslt_us\":%.3f,"
        "\"times_cublaslt\":%.4f,\"error_of_bound\":%.4f,\"error_norm\":%.3e}\n",
        s.name, (long long)s.n_out, (long long)s.n_in, s.n_groups, (long long)rows,
        is_order_free ? "free" : "invariant", t * 1e6, gbps, gbps * 1e9 / copy_bandwidth, gbps * 1e9 / read_bandwidth,
        tflops, lt_time * 1e6, lt_time / t, worst, norm);
    fflush(stdout);
    OK(cudaFree(w));
    OK(cudaFree(ws));
    OK(cudaFree(x));
    OK(cudaFree(xs));
    OK(cudaFree(out));
}

int main(int argc, char **argv) {
    json = fopen(argc > 1 ? argv[1] : "/dev/null", "w");
    if (!json) {
        fprintf(stderr, "'%s' can't be written\n", argv[1]);
        return 1;
    }
    cudaDeviceProp prop;
    int driver = 0;
    OK(cudaSetDevice(0));
    OK(cudaGetDeviceProperties(&prop, 0));
    OK(cudaDriverGetVersion(&driver));
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    printf("%s, %d multiprocessors, L2 %d MB, driver %d\n", prop.name, prop.multiProcessorCount, prop.l2CacheSize >> 20,
           driver);
    fprintf(json, "{\"what\":\"machine\",\"name\":\"%s\",\"multiprocessors\":%d,\"driver\":%d}\n", prop.name,
            prop.multiProcessorCount, driver);
    dev.arch = prop.major == 9 ? DI_CUDA_SM90 : DI_CUDA_PORTABLE;
    dev.n_sms = prop.multiProcessorCount;
    di_limits limits = {};
    limits.rows_max = 16384;
    limits.n_in_max = 32768;
    dev.scratch_bytes = di_cuda_need_gemm(&dev, &limits);
    dev.scratch = device<uint8_t>(dev.scratch_bytes);
    handle.stream = stream;
    measure_memory(prop.multiProcessorCount);
    lt_open(NULL);

    const shape shapes[7] = {{"wq_a", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 1280, 5120, 1},
                             {"wq_b", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 32768, 1280, 1},
                             {"wkv", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 512, 5120, 1},
                             {"wo_a", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 8192, 4096, 8},
                             {"wo_b", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 5120, 8192, 1},
                             {"w1", DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 2304, 5120, 1},
                             {"head", DI_BF16, DI_BF16, DI_F32, 129280, 5120, 1}};
    const shape mx = {"mx_w1", DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 2304, 5120, 1};
    const shape mx_tall = {"mx_tall", DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 65536, 5120, 1};
    const int64_t few[6] = {1, 4, 8, 16, 32, 64}, many[4] = {256, 1024, 4096, 8192};
    printf("\nfew rows: bytes are those of the weights\n");
    for (const shape &s : shapes) {
        for (int64_t rows : few)
            measure(s, rows, false, 0);
    }
    for (int64_t rows : few) {
        measure(mx, rows, false, 0);
        measure(mx_tall, rows, false, 0);
    }
    printf("\nmany rows\n");
    for (const shape &s : shapes) {
        if (s.w == DI_BF16)
            continue;
        for (int64_t rows : many) {
            /* The groups of wo_a as one product of the same size: what a caller of cuBLASLt would have to loop over. */
            double seconds = lt_seconds(stream, rows, s.n_out, s.n_in);
            measure(s, rows, true, seconds);
            measure(s, rows, false, seconds);
        }
    }
    measure(mx, 4096, true, lt_seconds(stream, 4096, mx.n_out, mx.n_in));
    printf(n_wrong ? "\n%d configurations WRONG\n" : "\nall configurations right\n", n_wrong);
    fclose(json);
    return n_wrong != 0;
}
