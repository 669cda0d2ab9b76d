/* Speed of the mixture of experts at the released shape, beside the machine's limits measured in the same run.
 *
 * 384 experts in FP4 and a shared one in FP8, 5120 x 2304, six of a row; weights of random bits, 7.2 GB of experts.
 * Rows choose by fixed preferences of experts (a log-normal of 0.5) plus chance. A decode case runs over eight sets of
 * choices, rows and shared experts, by turns in one graph, so that what L2 holds is not what is asked for. Rows of each
 * case are checked against a slow kernel in double, in the same run, and for the same bits in batches of a few rows.
 *
 *   F="-std=c++17 -O3 -ftz=true -fmad=false -I src -I include" D=src/backend/cuda
 *   nvcc $F -gencode=arch=compute_100a,code=sm_100a -c -o moe_sm100.o $D/moe_sm100.cu
 *   nvcc $F -gencode=arch=compute_90a,code=sm_90a -o moe_bench bench/cuda/moe_bench.cu \
 *        $D/{moe,route}.cu $D/{route,moe_few,moe_wide,gemm,gemm_few,gemm_fp8,gemm_bf16}_sm90.cu \
 *        moe_sm100.o -ldl
 *   ./moe_bench [--cublaslt PATH] [--portable] [--quick] [--rows N]
 *
 * us: the whole operation (sorting, both products, sum). without: the same less sorting and sum, each measured alone.
 * GB/s: bytes of the experts that the rows chose, and of the shared one, each once. TFLOPS: 2*3*5120*2304 for each pair
 * of row and expert, the shared one too. Limits: reading 4 GiB, copying (read and written bytes), cuBLASLt's bf16
 * product 8192^3. */
#include <cmath>
#include <cstdarg>
#include <cstring>

#include "backend/cuda/moe.cuh"
#include "backend/cuda/moe_placed.cuh"
#include "yardstick.cuh"

enum { H = 5120, I = 2304, E = 384, K = 6, SETS = 8, ROWS_MAX = 32768, SAMPLES = 4 };

/* What the kernel files want of the layers below. */
extern "C" di_status di_fail(di_error *, di_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return code;
}
extern "C" const char *di_dtype_name(di_dtype) {
    return "?";
}
di_status di_cuda_check(cudaError_t e, di_error *err, const char *what) {
    return e == cudaSuccess ? DI_OK : di_fail(err, DI_ERR_DEVICE, "%s: %s", what, cudaGetErrorString(e));
}

static di_device dev;
static di_stream stream;

/* ---- random data --------------------------------------------------------------------------------------------------
 */

static double unit(uint64_t *state) {
    return ((double)(mix((*state)++) >> 11) + 0.5) * 0x1p-53;
}
static double normal(uint64_t *state) {
    double r = sqrt(-2 * log(unit(state)));
    return r * cos(6.283185307179586 * unit(state));
}
/* Bytes of any value, or E4M3 codes without NaN, or scales of [lo, hi). */
__global__ void fill(uint8_t *p, int64_t n, int kind, int lo, int hi, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t r = mix(seed * 0x100000000ull + (uint64_t)i);
        p[i] = (uint8_t)(kind == 0 ? r : kind == 1 ? (r & 0x80) | (r >> 8) % 0x7F : lo + r % (uint64_t)(hi - lo));
    }
}
__global__ void fill_bf16(uint16_t *p, int64_t n, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        p[i] = cu_f32_to_bf16((float)(int32_t)mix(seed * 0x100000000ull + (uint64_t)i) * 0x1p-31f);
}

/* ---- the slow reference -------------------------------------------------------------------------------------------
 */

__device__ static double block_sum(double v) {
    __shared__ double sums[4];
    for (int step = 16; step; step >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = v;
    __syncthreads();
    return sums[0] + sums[1] + sums[2] + sums[3];
}
/* Block: output i of the expert in slot s of the row's; slot K is the shared one. */
__global__ void __launch_bounds__(128) ref_up(di_moe_args a, const di_expert *table, int64_t row, float *act) {
    int i = blockIdx.x, s = blockIdx.y;
    const di_expert *e = &table[s < a.k ? a.idx[row * a.k + s] : a.n_experts];
    di_mat w1 = e->w1, w3 = e->w3;
    double g = 0, u = 0;
    for (int k = threadIdx.x; k < H; k += 128) {
        double x = cu_act_load(a.x, row, k);
        g += x * moe_mat_load(w1, i, k);
        u += x * moe_mat_load(w3, i, k);
    }
    g = cu_round_bf16((float)block_sum(g));
    u = cu_round_bf16((float)block_sum(u));
    g = fmin(g, (double)a.limit);
    u = fmax(fmin(u, (double)a.limit), -(double)a.limit);
    if (threadIdx.x == 0)
        act[(int64_t)s * I + i] = (float)(g / (1 + exp(-g)) * u * (s < a.k ? a.weight[row * a.k + s] : 1.0f));
}
/* Through QA and back; a warp is a group. */
__global__ void ref_quant(float *act) {
    float *p = act + (int64_t)blockIdx.x * 32 + threadIdx.x, v = *p; /* bits of values >= 0 have their order */
    float most = fmaxf(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(fabsf(v)))), 1e-4f);
    float scale = exp2f(ceilf(log2f(most / 448.0f)));
    float q = fabsf(v) / scale, step = q < 0x1p-6f ? 0x1p-9f : exp2f(floorf(log2f(q)) - 3);
    *p = copysignf(fminf(rintf(q / step) * step, 448.0f) * scale, v);
}
__global__ void __launch_bounds__(128)
    ref_down(di_moe_args a, const di_expert *table, int64_t row, const float *act, double *y) {
    int o = blockIdx.x, s = blockIdx.y;
    di_mat w2 = table[s < a.k ? a.idx[row * a.k + s] : a.n_experts].w2;
    double sum = 0;
    for (int k = threadIdx.x; k < I; k += 128)
        sum += (double)act[(int64_t)s * I + k] * moe_mat_load(w2, o, k);
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        y[(int64_t)s * H + o] = cu_round_bf16((float)sum);
}

/* The largest error of the sampled rows over the row's norm. */
static double check(const di_moe_args &a) {
    float *act = device<float>((K + 1) * I);
    double *y = device<double>((K + 1) * H), worst = 0;
    std::vector<double> want((K + 1) * H);
    std::vector<uint16_t> got(H);
    for (int i = 0; i < SAMPLES; i++) {
        int64_t row = i == 0 ? 0 : i == 1 ? a.x.n_rows - 1 : (int64_t)(mix(i) % (uint64_t)a.x.n_rows);
        const di_expert *table = (const di_expert *)a.table;
        ref_up<<<dim3(I, K + 1), 128>>>(a, table, row, act);
        ref_quant<<<(K + 1) * I / 32, 32>>>(act);
        ref_down<<<dim3(H, K + 1), 128>>>(a, table, row, act, y);
        OK(cudaMemcpy(want.data(), y, want.size() * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got.data(), (uint16_t *)a.out.data + row * H, H * 2, cudaMemcpyDeviceToHost));
        double norm = 0, error = 0;
        for (int o = 0; o < H; o++) {
            double sum = 0;
            for (int s = 0; s <= K; s++)
                sum += want[(size_t)s * H + o];
            uint32_t bits = (uint32_t)got[o] << 16;
            float g;
            memcpy(&g, &bits, 4);
            norm += sum * sum;
            error += (g - sum) * (g - sum);
        }
        double e = sqrt(error / norm);
        worst = e > worst || e != e ? e : worst;
    }
    OK(cudaFree(act));
    OK(cudaFree(y));
    return worst;
}

/* Values that differ where slices of 1 to 64 rows of the batch run alone. */
static int64_t differing(const di_moe_args &a) {
    uint16_t *apart = device<uint16_t>(64 * H);
    std::vector<uint16_t> one(64 * H), other(64 * H);
    int64_t count = 0;
    for (int64_t n = 1; n <= 64 && n <= a.x.n_rows; n *= 4) {
        int64_t row0 = (int64_t)(mix(n) % (uint64_t)(a.x.n_rows - n + 1));
        di_moe_args d = a;
        d.x.n_rows = d.out.n_rows = n;
        d.x.data = (uint8_t *)a.x.data + row0 * H;
        d.x.scale += row0 * (H / 32);
        d.idx += row0 * K;
        d.weight += row0 * K;
        d.out.data = apart;
        if (di_cuda_moe(&stream, &d))
            exit((fprintf(stderr, "moe refuses %d rows\n", (int)n), 1));
        OK(cudaStreamSynchronize(stream.stream));
        OK(cudaMemcpy(one.data(), apart, n * H * 2, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(other.data(), (uint16_t *)a.out.data + row0 * H, n * H * 2, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < n * H; i++)
            count += one[i] != other[i];
    }
    OK(cudaFree(apart));
    return count;
}

/* Of one of the things that f puts on the stream, captured and run as a graph. */
template <class F> static double graph_us(int n_runs, int n_things, F f) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal));
    f();
    OK(cudaStreamEndCapture(stream.stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    double us = median_ms(stream.stream, n_runs, [&] { OK(cudaGraphLaunch(exec, stream.stream)); }) * 1e3 / n_things;
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    return us;
}

/* ---- cases --------------------------------------------------------------------------------------------------------
 */

static di_mat make_mat(di_dtype dtype, int64_t n_out, int64_t n_in, uint64_t seed) {
    bool is_fp4 = dtype == DI_F4_E2M1;
    int64_t n_bytes = n_out * n_in / (is_fp4 ? 2 : 1), n_scales = is_fp4 ? n_out * n_in / 32 : n_out / 32 * (n_in / 32);
    uint8_t *data = device<uint8_t>(n_bytes), *scale = device<uint8_t>(n_scales);
    fill<<<512, 256>>>(data, n_bytes, is_fp4 ? 0 : 1, 0, 0, seed);
    fill<<<64, 256>>>(scale, n_scales, 2, is_fp4 ? 117 : 112, is_fp4 ? 120 : 115, seed + 1);
    return di_mat{dtype, n_out, n_in, data, scale};
}
static di_expert make_expert(di_dtype dtype, uint64_t seed) {
    return di_expert{make_mat(dtype, I, H, seed), make_mat(dtype, I, H, seed + 2), make_mat(dtype, H, I, seed + 4)};
}

static di_expert experts[E], shared[SETS];
static void *tables[SETS];
static double preference[E];

/* Six distinct experts a row; returns how many different ones the rows chose. */
static int choose(int64_t n_rows, uint64_t seed, std::vector<int32_t> &idx, std::vector<float> &weight) {
    std::vector<bool> is_chosen(E);
    std::vector<std::pair<double, int>> score(E);
    uint64_t state = mix(seed);
    idx.resize(n_rows * K);
    weight.resize(n_rows * K);
    for (int64_t row = 0; row < n_rows; row++) {
        for (int e = 0; e < E; e++)
            score[e] = {-preference[e] + log(-log(unit(&state))), e};
        std::partial_sort(score.begin(), score.begin() + K, score.end());
        for (int i = 0; i < K; i++) {
            idx[row * K + i] = score[i].second;
            weight[row * K + i] = (float)(0.1 + 0.3 * unit(&state));
            is_chosen[score[i].second] = true;
        }
    }
    return (int)std::count(is_chosen.begin(), is_chosen.end(), true);
}

static void run_case(int64_t n, double read_gbs, double copy_gbs, double peak) {
    int n_sets = n <= 1024 ? SETS : 1;
    const double expert_bytes = 3.0 * H * I * (0.5 + 1.0 / 32), shared_bytes = 3.0 * H * I * (1 + 1.0 / 1024);
    double bytes = 0;
    std::vector<di_moe_args> args(n_sets);
    std::vector<void *> owned;
    for (int s = 0; s < n_sets; s++) {
        std::vector<int32_t> idx;
        std::vector<float> weight;
        bytes += (choose(n, 1000 * n + s, idx, weight) * expert_bytes + shared_bytes) / n_sets;
        int32_t *d_idx = device<int32_t>(n * K);
        float *d_weight = device<float>(n * K);
        uint8_t *x = device<uint8_t>(n * H), *x_scale = device<uint8_t>(n * H / 32);
        uint16_t *out = device<uint16_t>(n * H);
        OK(cudaMemcpy(d_idx, idx.data(), idx.size() * 4, cudaMemcpyHostToDevice));
        OK(cudaMemcpy(d_weight, weight.data(), weight.size() * 4, cudaMemcpyHostToDevice));
        fill<<<1024, 256>>>(x, n * H, 1, 0, 0, 70 + s);
        fill<<<64, 256>>>(x_scale, n * H / 32, 2, 119, 121, 90 + s);
        OK(cudaMemset(out, 0xA5, (size_t)(n * H) * 2));
        owned.insert(owned.end(), {d_idx, d_weight, x, x_scale, out});
        di_moe_args &a = args[s];
        a = {};
        a.x = {DI_F8_E4M3, n, H, H, x, x_scale};
        a.idx = d_idx;
        a.weight = d_weight;
        a.k = K;
        a.n_experts = E;
        a.experts = experts;
        a.shared = &shared[s];
        a.table = tables[s];
        a.limit = 10.0f;
        a.out = {DI_BF16, n, H, H, out, NULL};
    }
    OK(cudaDeviceSynchronize());
    int n_runs = n <= 1024 ? 21 : 9;
    double us = graph_us(n_runs, n_sets, [&] {
        for (const di_moe_args &a : args)
            if (di_cuda_moe(&stream, &a))
                exit((fprintf(stderr, "moe refuses %d rows\n", (int)n), 1));
    });
    double worst = 0;
    for (const di_moe_args &a : args) {
        double e = check(a);
        worst = e > worst || e != e ? e : worst;
    }
    int64_t n_differing = differing(args[0]);
    /* sorting and sum alone; the tile's rows hardly matter here. Results are lost. */
    moe_order o;
    size_t order_bytes = di_moe_order_cut(&args[0], 0, n, 64, dev.scratch, &o);
    double rest_us = graph_us(n_runs, 8, [&] {
        for (int i = 0; i < 8; i++) {
            di_moe_order_start(&stream, &o, NULL);
            di_moe_sum(&stream, &o, dev.scratch + order_bytes, DI_BF16, &args[i % n_sets].out, 0, true);
        }
    });
    double flops = 2.0 * 3 * H * I * (double)n * (K + 1), tflops = flops / us * 1e-6, gbs = bytes / us * 1e-3;
    double net = us - rest_us;
    bool is_right = worst < 0x1p-5 && n_differing == 0; /* tests/cuda/moe_test.c has the reasons */
    printf("%6d %10.1f %10.1f %8.0f %6.0f%% %6.0f%% %8.1f %6.0f%% %6.0f%% %9.2e%s\n", (int)n, us, net, gbs,
           100 * gbs / copy_gbs, 100 * gbs * us / net / copy_gbs, tflops, 100 * tflops / peak,
           100 * tflops * us / net / peak, worst, is_right ? "" : "  WRONG");
    fflush(stdout);
    printf("{\"bench\":\"moe\",\"rows\":%d,\"us\":%.2f,\"products_us\":%.2f,\"touched_bytes\":%.0f,\"gbs\":%.1f,"
           "\"tflops\":"
           "%.2f,\"read_gbs\":%.1f,\"copy_gbs\":%.1f,\"cublaslt_tflops\":%.1f,\"error\":%.3e,\"right\":%s}\n",
           (int)n, us, net, bytes, gbs, tflops, read_gbs, copy_gbs, peak, worst, is_right ? "true" : "false");
    for (void *p : owned)
        OK(cudaFree(p));
}

static void run_route(int64_t n) {
    uint16_t *x = device<uint16_t>(n * H), *gate = device<uint16_t>((int64_t)E * H);
    float *bias = device<float>(E), *weight = device<float>(n * K);
    int32_t *idx = device<int32_t>(n * K);
    fill_bf16<<<1024, 256>>>(x, n * H, 7);
    fill_bf16<<<1024, 256>>>(gate, (int64_t)E * H, 8);
    OK(cudaMemset(bias, 0, E * 4));
    OK(cudaDeviceSynchronize());
    di_mat w = {DI_BF16, E, H, gate, NULL};
    di_moe_route_args a = {};
    a.x = {DI_BF16, n, H, H, x, NULL};
    a.gate = &w;
    a.bias = bias;
    a.k = K;
    a.factor = 1.5f;
    a.idx = idx;
    a.weight = weight;
    double us = graph_us(15, 8, [&] {
        for (int i = 0; i < 8; i++)
            if (di_cuda_moe_route(&stream, &a))
                exit((fprintf(stderr, "moe_route refuses\n"), 1));
    });
    printf("route %6d rows: %8.1f us\n{\"bench\":\"moe_route\",\"rows\":%d,\"us\":%.2f}\n", (int)n, us, (int)n, us);
    OK(cudaFree(x));
    OK(cudaFree(gate));
    OK(cudaFree(bias));
    OK(cudaFree(weight));
    OK(cudaFree(idx));
}

int main(int argc, char **argv) {
    const char *cublaslt = NULL;
    bool is_portable = false, is_quick = false;
    int64_t only = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--cublaslt") && i + 1 < argc)
            cublaslt = argv[++i];
        is_portable |= !strcmp(argv[i], "--portable");
        is_quick |= !strcmp(argv[i], "--quick");
        if (!strcmp(argv[i], "--rows") && i + 1 < argc)
            only = atoll(argv[++i]);
    }
    OK(cudaSetDevice(0));
    OK(cudaGetDeviceProperties(&dev.prop, 0));
    OK(cudaStreamCreate(&stream.stream));
    dev.arch = is_portable ? DI_CUDA_PORTABLE : DI_CUDA_SM90;
    dev.n_sms = dev.prop.multiProcessorCount;
    stream.dev = &dev;
    dev.limits.rows_max = ROWS_MAX;
    dev.limits.hidden_size = H;
    dev.limits.intermediate = I;
    dev.limits.experts_max = E;
    dev.limits.experts_per_row_max = K;
    dev.scratch_bytes = di_cuda_need_moe(&dev, &dev.limits);
    dev.scratch = device<uint8_t>((int64_t)dev.scratch_bytes);
    int64_t n_read = (int64_t)4 << 30;
    uint8_t *from = device<uint8_t>(n_read), *to = device<uint8_t>(n_read);
    fill<<<2048, 256>>>(from, n_read, 0, 0, 0, 5);
    OK(cudaDeviceSynchronize());
    double read_ms = median_ms(stream.stream, 15, [&] {
        read_all<<<dev.n_sms * 8, 512, 0, stream.stream>>>((const uint4 *)from, n_read / 16, (uint32_t *)to);
    });
    double copy_ms = median_ms(stream.stream, 15,
                               [&] { OK(cudaMemcpyAsync(to, from, n_read, cudaMemcpyDeviceToDevice, stream.stream)); });
    double read_gbs = n_read / read_ms * 1e-6, copy_gbs = 2.0 * n_read / copy_ms * 1e-6;
    OK(cudaFree(from));
    OK(cudaFree(to));
    double peak = cublaslt_tflops(cublaslt, stream.stream);
    printf("%s, %d multiprocessors: reads %.0f GB/s, copies %.0f GB/s, cuBLASLt bf16 %.0f TFLOPS%s; scratch %.2f GB\n",
           dev.prop.name, dev.n_sms, read_gbs, copy_gbs, peak, peak > 0 ? "" : " (library not found; ratios take 790)",
           (double)dev.scratch_bytes * 1e-9);
    peak = peak > 0 ? peak : 790;
    uint64_t state = 11;
    for (int e = 0; e < E; e++) {
        preference[e] = 0.5 * normal(&state);
        experts[e] = make_expert(DI_F4_E2M1, 10 * (uint64_t)e);
    }
    for (int s = 0; s < SETS; s++) { /* routed experts can be placed once only; each table has its own shared one */
        shared[s] = make_expert(DI_F8_E4M3, 100000 + 10 * (uint64_t)s);
        di_error err = {};
        if (di_cuda_experts_place(&dev, s ? NULL : experts, s ? 0 : E, &shared[s], &tables[s], &err))
            return 1;
        if (s) {
            di_expert *table = device<di_expert>(E + 1);
            OK(cudaMemcpy(table, tables[0], E * sizeof *table, cudaMemcpyDeviceToDevice));
            OK(cudaMemcpy(table + E, tables[s], sizeof *table, cudaMemcpyDeviceToDevice));
            OK(cudaFree(tables[s]));
            tables[s] = table;
        }
    }
    OK(cudaDeviceSynchronize());
    printf("%6s %10s %10s %8s %7s %7s %8s %7s %7s %9s\n", "rows", "us", "without", "GB/s", "of copy", "without",
           "TFLOPS", "cuBLAS", "without", "error");
    const int64_t all[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const int64_t quick[] = {1, 8, 64, 8192};
    if (only) {
        run_case(only, read_gbs, copy_gbs, peak);
        return 0;
    }
    if (is_portable || is_quick) {
        for (int64_t n : quick)
            if (!is_portable || n <= 64)
                run_case(n, read_gbs, copy_gbs, peak);
    } else {
        for (int64_t n : all)
            run_case(n, read_gbs, copy_gbs, peak);
    }
    for (int64_t n : {1, 8, 64, 256, 512, 1024, 8192})
        run_route(n);
    OK(cudaDeviceSynchronize());
    return 0;
}
