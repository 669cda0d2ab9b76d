/* Kernels with one mistake each: the emulation must name it. Never built for a GPU. */
#include "backend/cuda/sm100.cuh"

#ifdef DI_EMU

namespace {

struct faults {
    float *out; /* [1024] */
    const float *in;
};

__global__ void half_at_barrier(faults f) {
    if (threadIdx.x < 48)
        __syncthreads();
    f.out[threadIdx.x] = 1.0f;
}
__global__ void lanes_apart(faults f) {
    float v = 1.0f;
    if (threadIdx.x % 2)
        v = __shfl_sync(0xFFFFFFFFu, v, 0);
    else
        v = (float)__ballot_sync(0xFFFFFFFFu, 1);
    f.out[threadIdx.x] = v;
}
__global__ void not_in_mask(faults f) {
    f.out[threadIdx.x] = __shfl_sync(0xFFFFu, 1.0f, 0);
}
__global__ void past_the_end(faults) {
    DI_DYN_SHARED(float, smem);
    smem[threadIdx.x] = 0.0f; /* of 100 bytes */
}
__global__ void no_barrier_there(faults) {
    __shared__ uint64_t bar;
    cu_mbar_arrive(&bar);
}
__global__ void too_many_arrivals(faults) {
    __shared__ uint64_t bar;
    if (threadIdx.x == 0)
        cu_mbar_init(&bar, 2);
    __syncthreads();
    if (threadIdx.x < 2)
        cu_mbar_arrive_expect(&bar, 16);
    __syncthreads();
    if (threadIdx.x == 5)
        cu_mbar_arrive(&bar);
}
__global__ void bytes_never_come(faults f) {
    __shared__ __align__(16) float box[4];
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) {
        cu_mbar_init(&bar, 1);
        cu_mbar_arrive_expect(&bar, 32);
        cu_bulk_load(cu_smem(box), f.in, 16, &bar);
    }
    __syncthreads();
    cu_mbar_wait(&bar, 0);
}
__global__ void store_not_awaited(faults f) {
    __shared__ __align__(16) float box[4];
    if (threadIdx.x == 0) {
        cu_bulk_store(f.out, cu_smem(box), 16);
        cu_bulk_commit();
    }
}
__global__ void multiply_not_awaited(faults) {
    DI_DYN_SHARED(uint8_t, smem);
    float d[4];
    cu_wgmma_bf16_ss(d, cu_desc_k128(cu_smem(smem)), cu_desc_k128(cu_smem(smem)), 0);
    cu_wgmma_commit();
}
__global__ void warps_differ(faults) {
    DI_DYN_SHARED(uint8_t, smem);
    float d[4];
    uint64_t a = cu_desc_k128(cu_smem(smem) + threadIdx.x / 32 * 1024);
    cu_wgmma_bf16_ss(d, a, a, 0);
    cu_wgmma_commit();
    cu_wgmma_wait<0>();
}
/* With 64 columns of tensor memory, at 448 here, and a block's 20 KiB of shared memory: a multiply of 16 rows. */
struct tensor_fault {
    uint8_t *smem;
    uint32_t *at;
    uint64_t *bar;

    __device__ explicit tensor_fault(uint8_t *shared)
        : smem(shared), at((uint32_t *)(shared + 20480)), bar((uint64_t *)(shared + 20488)) {
        cu_tmem_take(at, 64);
        if (threadIdx.x == 0)
            cu_mbar_init(bar, 1);
        __syncthreads();
    }
    __device__ void multiply(uint64_t a_bits, uint32_t kind_bits, uint32_t d) const {
        uint64_t a = cu_tc_desc_k128(cu_smem(smem)) ^ a_bits, b = cu_tc_desc_k128(cu_smem(smem) + 16384);
        cu_tc_multiply(*at + d, a, b, cu_tc_kind(CU_TC_E4M3, CU_TC_E4M3, 16) ^ kind_bits, *at + 16, *at + 20, false);
    }
    __device__ void end() const {
        if (threadIdx.x == 0)
            cu_tc_commit(bar);
        cu_mbar_wait(bar, 0);
        cu_tmem_give(*at, 64);
    }
};
template <uint64_t A_BITS, uint32_t KIND_BITS, uint32_t D> __global__ void tensor_bits_wrong(faults) {
    DI_DYN_SHARED(uint8_t, smem);
    tensor_fault t(smem);
    if (threadIdx.x == 0)
        t.multiply(A_BITS, KIND_BITS, D);
    t.end();
}
constexpr auto tensor_version = tensor_bits_wrong<(uint64_t)1 << 46, 0, 0>;
constexpr auto tensor_start = tensor_bits_wrong<8, 0, 0>;
constexpr auto tensor_scale_type = tensor_bits_wrong<0, 1u << 23, 0>;
constexpr auto tensor_columns = tensor_bits_wrong<0, 0, 56>;
__global__ void tensor_kept(faults) {
    DI_DYN_SHARED(uint8_t, smem);
    tensor_fault t(smem);
}
__global__ void tensor_of_two(faults) {
    DI_DYN_SHARED(uint8_t, smem);
    tensor_fault t(smem);
    if (threadIdx.x == 1)
        t.multiply(0, 0, 0);
    __syncthreads();
    t.end();
}
__global__ void tensor_quarter(faults f) {
    DI_DYN_SHARED(uint8_t, smem);
    tensor_fault t(smem);
    float v[16];
    cu_tmem_load16(v, *t.at + cu_tmem_lane(32));
    f.out[0] = v[0];
    t.end();
}
__global__ void misaligned(faults f) {
    DI_DYN_SHARED(uint8_t, smem);
    cu_cp16(cu_smem(smem + 8), f.in);
}
__global__ void look_for_ever(faults f) {
    __shared__ uint64_t bar;
    if (threadIdx.x == 0)
        cu_mbar_init(&bar, 1);
    __syncthreads();
    while (!cu_mbar_try_wait(&bar, 0)) {
    }
    f.out[0] = 1.0f;
}

/* Not seen as mistakes, but their numbers are NaN or old: what was never written, what is used before it came. */
__global__ void never_written(faults f) {
    __shared__ float box[32];
    DI_DYN_SHARED(float, more);
    if (!f.in) /* never; a compiler knows the value of what nobody writes */
        box[threadIdx.x] = 1.0f;
    f.out[threadIdx.x] = box[threadIdx.x];
    f.out[32 + threadIdx.x] = more[threadIdx.x];
}
__global__ void read_too_early(faults f) {
    __shared__ __align__(16) float box[32][4];
    unsigned t = threadIdx.x;
    box[t][0] = -1.0f;
    cu_cp16(cu_smem(box[t]), f.in + 4 * t);
    cu_cp_commit();
    f.out[t] = box[t][0];
    cu_cp_wait<0>();
    f.out[32 + t] = box[t][0];
}
__global__ void order_of_threads(faults f) { /* the last writer wins */
    __shared__ float box;
    box = (float)threadIdx.x;
    __syncthreads();
    f.out[threadIdx.x] = box;
}

typedef void (*kernel)(faults);
const struct {
    const char *name;
    kernel k;
    unsigned threads, smem;
} list[] = {
#define ROW(name, threads, smem)                                                                                       \
    { #name, name, threads, smem }
    ROW(half_at_barrier, 64, 0),    ROW(lanes_apart, 32, 0),       ROW(not_in_mask, 32, 0),
    ROW(past_the_end, 26, 100),     ROW(no_barrier_there, 32, 0),  ROW(too_many_arrivals, 32, 0),
    ROW(bytes_never_come, 64, 0),   ROW(store_not_awaited, 32, 0), ROW(multiply_not_awaited, 128, 16384),
    ROW(warps_differ, 128, 16384),  ROW(misaligned, 32, 1024),     ROW(look_for_ever, 32, 0),
    ROW(tensor_version, 32, 20496), ROW(tensor_start, 32, 20496),  ROW(tensor_scale_type, 32, 20496),
    ROW(tensor_columns, 32, 20496), ROW(tensor_kept, 32, 20496),   ROW(tensor_of_two, 32, 20496),
    ROW(tensor_quarter, 32, 20496), ROW(never_written, 32, 128),   ROW(read_too_early, 32, 0),
    ROW(order_of_threads, 32, 0),
#undef ROW
};

} // namespace

/* Runs one kernel by name on out [1024]; the failure's message, "" when it ended. */
extern "C" const char *di_test_fault(const char *name, const float *in, float *out) {
    for (const auto &row : list)
        if (strcmp(row.name, name) == 0) {
            DI_LAUNCH(row.k, 1, row.threads, row.smem, (cudaStream_t)NULL, faults{out, in});
            return cudaGetLastError() == cudaSuccess ? "" : di_emu_last_failure();
        }
    return "no such kernel";
}

/* A launch with a block of the wrong size, and a captured graph that is launched twice. */
extern "C" bool di_test_refuses(void) {
    DI_LAUNCH(half_at_barrier, 1, 2048, 0, (cudaStream_t)NULL, faults{NULL, NULL});
    return cudaGetLastError() == cudaErrorInvalidValue;
}
namespace {
__global__ void add_one(float *p) {
    p[blockIdx.x * blockDim.x + threadIdx.x] += 1.0f;
}
} // namespace
extern "C" void di_test_graph(float *p, int n_launches) { /* p [1024]; +1 each */
    cudaStream_t s;
    cudaGraph_t g;
    cudaGraphExec_t x;
    (void)cudaStreamCreate(&s);
    (void)cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    DI_LAUNCH(add_one, 4, 256, 0, s, p);
    (void)cudaStreamEndCapture(s, &g);
    (void)cudaGraphInstantiate(&x, g);
    for (int i = 0; i < n_launches; i++)
        (void)cudaGraphLaunch(x, s);
    (void)cudaGraphExecDestroy(x);
    (void)cudaGraphDestroy(g);
    (void)cudaStreamDestroy(s);
}

#endif
