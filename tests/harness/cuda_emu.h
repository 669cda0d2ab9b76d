/* CUDA C++ on the host: what the kernel files of src/backend/cuda need so that a C++ compiler makes functions of them.
 *
 * Owns: CUDA's words, types, arithmetic and warp functions, and the launch of a kernel. The machine behind it
 * (cuda_emu.cpp): a thread of a block is a fiber with a stack of its own; fibers of a block take turns and change only
 * where one waits (a barrier, a warp function). Blocks follow one another, several at a time on the host's threads;
 * blocks of a cluster take turns as well. Shared memory starts as NaN. Threads that all wait, lanes that meet at
 * different functions, misused barriers and dynamic shared memory written past its end fail the launch with a message
 * that names kernel, block and thread; cudaGetLastError tells.
 *
 * Numbers are those of the files' flags: no fused multiply-add (the compiler's -ffp-contract=off), subnormals flushed.
 * Not modelled: time, caches, memory orders, limits of registers; waiting of one block for another outside a cluster.
 *
 * Of asynchronous copies and multiplies (cuda_emu_sm90.h, cuda_emu_sm100.h) either the earliest or the latest moment is
 * taken at which the hardware could do them, and the order of threads can be shuffled: di_emu_set_schedule. A kernel
 * that is right gives the same bits under all of these.
 *
 * C++17, GCC or Clang; every kernel file is compiled with -DDI_EMU -include cuda_emu.h. Source: CUDA C++ programming
 * guide. */
#ifndef DI_TEST_CUDA_EMU_H
#define DI_TEST_CUDA_EMU_H

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "cuda_emu_api.h"

/* ---- words --------------------------------------------------------------------------------------------------------
 * A shared variable is one of the host's thread: blocks on different threads of the host have their own. */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __constant__
#define __restrict__ __restrict
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...) /* DI_LAUNCH_CLUSTER says it again */

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {
    }
};

#define DI_EMU_VECTOR2(T, name, bytes)                                                                                 \
    struct __align__(bytes) name {                                                                                     \
        T x, y;                                                                                                        \
    };                                                                                                                 \
    static inline name make_##name(T x, T y) {                                                                         \
        return name{x, y};                                                                                             \
    }
#define DI_EMU_VECTOR4(T, name, bytes)                                                                                 \
    struct __align__(bytes) name {                                                                                     \
        T x, y, z, w;                                                                                                  \
    };                                                                                                                 \
    static inline name make_##name(T x, T y, T z, T w) {                                                               \
        return name{x, y, z, w};                                                                                       \
    }
DI_EMU_VECTOR2(float, float2, 8)
DI_EMU_VECTOR2(double, double2, 16)
DI_EMU_VECTOR2(int, int2, 8)
DI_EMU_VECTOR2(unsigned, uint2, 8)
DI_EMU_VECTOR2(short, short2, 4)
DI_EMU_VECTOR2(unsigned short, ushort2, 4)
DI_EMU_VECTOR2(unsigned char, uchar2, 2)
DI_EMU_VECTOR2(long long, longlong2, 16)
DI_EMU_VECTOR2(unsigned long long, ulonglong2, 16)
DI_EMU_VECTOR4(float, float4, 16)
DI_EMU_VECTOR4(int, int4, 16)
DI_EMU_VECTOR4(unsigned, uint4, 16)
DI_EMU_VECTOR4(short, short4, 8)
DI_EMU_VECTOR4(unsigned short, ushort4, 8)
DI_EMU_VECTOR4(signed char, char4, 4)
DI_EMU_VECTOR4(unsigned char, uchar4, 4)
struct uint3 {
    unsigned x, y, z;
};
struct float3 {
    float x, y, z;
};
struct int3 {
    int x, y, z;
};

/* ---- the machine --------------------------------------------------------------------------------------------------
 */

/* What a thread knows of itself; the running one is di_emu_now. */
struct di_emu_thread {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    unsigned lane, warp, flat; /* flat: index in the block */
};
extern __thread di_emu_thread *di_emu_now;
#define threadIdx (di_emu_now->thread)
#define blockIdx (di_emu_now->block)
#define blockDim (di_emu_now->block_dim)
#define gridDim (di_emu_now->grid_dim)
constexpr int warpSize = 32;

/* Ends the launch with a message; from a kernel alone. */
[[noreturn]] void di_emu_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define DI_EMU_CHECK(c, ...) ((c) ? (void)0 : di_emu_fail(__VA_ARGS__))

/* Lets the others run. */
void di_emu_yield();
/* Meeting of the lanes of mask at the function `what`: the last one to come runs `all` over what each lane brought (by
 * lane; NULL elsewhere), then everyone goes on. */
typedef void (*di_emu_meet_fn)(void **args, uint32_t mask);
void di_emu_meet(const char *what, uint32_t mask, void *arg, di_emu_meet_fn all);
/* Barrier id of a block among n_threads (0 = all). value is summed (0), ANDed (1) or ORed (2) over the threads. */
int di_emu_barrier(unsigned id, unsigned n_threads, int how, int value);
void di_emu_barrier_arrive(unsigned id, unsigned n_threads);
void *di_emu_dynamic_shared();

typedef struct di_emu_stream *cudaStream_t;

struct di_emu_launch_shape {
    const char *name;
    dim3 grid, block, cluster;
    size_t smem;
    cudaStream_t stream;
};
/* Runs one call for every thread; the stream's capture keeps it instead. */
void di_emu_launch(const di_emu_launch_shape &shape, std::function<void()> call);

template <class... P> struct di_emu_launcher {
    di_emu_launch_shape shape;
    void (*kernel)(P...);
    void operator()(P... p) const {
        auto k = kernel;
        di_emu_launch(shape, [=] { k(p...); });
    }
};
template <class... P>
static inline di_emu_launcher<P...> di_emu_call(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                                                dim3 cluster, size_t smem, cudaStream_t stream) {
    return di_emu_launcher<P...>{{name, grid, block, cluster, smem, stream}, kernel};
}
#define DI_LAUNCH(kernel, grid, block, smem, stream, ...)                                                              \
    di_emu_call(#kernel, kernel, dim3(grid), dim3(block), dim3(1), (size_t)(smem), (stream))(__VA_ARGS__)
#define DI_LAUNCH_CLUSTER(kernel, cluster, grid, block, smem, stream, ...)                                             \
    di_emu_call(#kernel, kernel, dim3(grid), dim3(block), dim3(cluster), (size_t)(smem), (stream))(__VA_ARGS__)
#define DI_DYN_SHARED(type, name) type *name = reinterpret_cast<type *>(di_emu_dynamic_shared())

/* ---- barriers, fences, time ----------------------------------------------------------------------------------------
 */

static inline void __syncthreads() {
    (void)di_emu_barrier(0, 0, 0, 0);
}
static inline int __syncthreads_count(int p) {
    return di_emu_barrier(0, 0, 0, p != 0);
}
static inline int __syncthreads_and(int p) {
    return di_emu_barrier(0, 0, 1, p != 0);
}
static inline int __syncthreads_or(int p) {
    return di_emu_barrier(0, 0, 2, p != 0);
}
static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu) {
    di_emu_meet("__syncwarp", mask, NULL, NULL);
}
static inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_block() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __nanosleep(unsigned) {
    di_emu_yield();
}
[[noreturn]] static inline void __trap() {
    di_emu_fail("__trap");
}
long long clock64();

/* ---- functions of a warp -------------------------------------------------------------------------------------------
 */

struct di_emu_lane_word { /* what a lane brings and takes */
    uint64_t in, out;
    unsigned lane;
    int at, width;
};
enum di_emu_shuffle_kind { DI_EMU_IDX, DI_EMU_UP, DI_EMU_DOWN, DI_EMU_XOR };

template <int KIND> static inline void di_emu_shuffle_all(void **args, uint32_t mask) {
    for (unsigned l = 0; l < 32; l++) {
        auto *w = (di_emu_lane_word *)args[l];
        if (!w)
            continue;
        int width = w->width, first = (int)l & ~(width - 1), from = (int)l;
        if (KIND == DI_EMU_IDX)
            from = first + (w->at & (width - 1));
        else if (KIND == DI_EMU_UP)
            from = (int)l - w->at < first ? (int)l : (int)l - w->at;
        else if (KIND == DI_EMU_DOWN)
            from = (int)l + w->at >= first + width ? (int)l : (int)l + w->at;
        else
            from = ((int)l ^ w->at) >= first + width ? (int)l : (int)l ^ w->at;
        /* A lane outside the mask gives nothing that one may use. */
        w->out = mask >> from & 1 ? ((di_emu_lane_word *)args[from])->in : 0xFFFFFFFFFFFFFFFFu;
    }
}
template <int KIND, class T> static inline T di_emu_shuffle(const char *what, uint32_t mask, T v, int at, int width) {
    static_assert(sizeof(T) <= 8, "a lane passes at most 8 bytes");
    di_emu_lane_word w = {0, 0, di_emu_now->lane, at, width};
    memcpy(&w.in, &v, sizeof v);
    di_emu_meet(what, mask, &w, di_emu_shuffle_all<KIND>);
    memcpy(&v, &w.out, sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(uint32_t mask, T v, int lane, int width = 32) {
    return di_emu_shuffle<DI_EMU_IDX>("__shfl_sync", mask, v, lane, width);
}
template <class T> static inline T __shfl_up_sync(uint32_t mask, T v, unsigned n, int width = 32) {
    return di_emu_shuffle<DI_EMU_UP>("__shfl_up_sync", mask, v, (int)n, width);
}
template <class T> static inline T __shfl_down_sync(uint32_t mask, T v, unsigned n, int width = 32) {
    return di_emu_shuffle<DI_EMU_DOWN>("__shfl_down_sync", mask, v, (int)n, width);
}
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T v, int x, int width = 32) {
    return di_emu_shuffle<DI_EMU_XOR>("__shfl_xor_sync", mask, v, x, width);
}

/* F::all gives each lane of m its result. */
template <class F> static inline uint64_t di_emu_vote(const char *what, uint32_t mask, uint64_t v, F) {
    di_emu_lane_word w = {v, 0, di_emu_now->lane, 0, 32};
    di_emu_meet(what, mask, &w, [](void **args, uint32_t m) { F::all((di_emu_lane_word **)args, m); });
    return w.out;
}
static inline void di_emu_tell(di_emu_lane_word **a, uint32_t m, uint64_t v) { /* the same to all */
    for (int l = 0; l < 32; l++)
        if (m >> l & 1)
            a[l]->out = v;
}
struct di_emu_ballot {
    static void all(di_emu_lane_word **a, uint32_t m) {
        uint32_t r = 0;
        for (int l = 0; l < 32; l++)
            r |= (uint32_t)((m >> l & 1) && a[l]->in) << l;
        di_emu_tell(a, m, r);
    }
};
struct di_emu_match {
    static void all(di_emu_lane_word **a, uint32_t m) {
        for (int me = 0; me < 32; me++) {
            uint32_t r = 0;
            for (int l = 0; l < 32 && (m >> me & 1); l++)
                r |= (uint32_t)((m >> l & 1) && a[l]->in == a[me]->in) << l;
            if (m >> me & 1)
                a[me]->out = r;
        }
    }
};
template <class T, class OP> struct di_emu_fold {
    static void all(di_emu_lane_word **a, uint32_t m) {
        T r = {};
        bool any = false;
        for (int l = 0; l < 32; l++)
            if (m >> l & 1) {
                r = any ? OP()(r, (T)a[l]->in) : (T)a[l]->in;
                any = true;
            }
        di_emu_tell(a, m, (uint64_t)r);
    }
};
static inline unsigned __ballot_sync(uint32_t mask, int p) {
    return (unsigned)di_emu_vote("__ballot_sync", mask, p != 0, di_emu_ballot());
}
static inline int __any_sync(uint32_t mask, int p) {
    return di_emu_vote("__any_sync", mask, p != 0, di_emu_ballot()) != 0;
}
static inline int __all_sync(uint32_t mask, int p) {
    return di_emu_vote("__all_sync", mask, p != 0, di_emu_ballot()) == mask;
}
template <class T> static inline unsigned __match_any_sync(uint32_t mask, T v) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return (unsigned)di_emu_vote("__match_any_sync", mask, bits, di_emu_match());
}
struct di_emu_min {
    template <class T> T operator()(T a, T b) {
        return a < b ? a : b;
    }
};
struct di_emu_max {
    template <class T> T operator()(T a, T b) {
        return a < b ? b : a;
    }
};
#define DI_EMU_REDUCE(name, T, op)                                                                                     \
    static inline T name(uint32_t mask, T v) {                                                                         \
        return (T)di_emu_vote(#name, mask, (uint64_t)v, di_emu_fold<T, op>());                                         \
    }
DI_EMU_REDUCE(__reduce_add_sync, unsigned, std::plus<unsigned>)
DI_EMU_REDUCE(__reduce_min_sync, unsigned, di_emu_min)
DI_EMU_REDUCE(__reduce_max_sync, unsigned, di_emu_max)
DI_EMU_REDUCE(__reduce_add_sync, int, std::plus<int>)
DI_EMU_REDUCE(__reduce_min_sync, int, di_emu_min)
DI_EMU_REDUCE(__reduce_max_sync, int, di_emu_max)
DI_EMU_REDUCE(__reduce_and_sync, unsigned, std::bit_and<unsigned>)
DI_EMU_REDUCE(__reduce_or_sync, unsigned, std::bit_or<unsigned>)
DI_EMU_REDUCE(__reduce_xor_sync, unsigned, std::bit_xor<unsigned>)

/* ---- atomics: whole, in any order ----------------------------------------------------------------------------------
 */

template <class T, class F> static inline T di_emu_atomic(T *p, F f) {
    T was;
    __atomic_load(p, &was, __ATOMIC_SEQ_CST);
    for (;;) {
        T next = f(was);
        if (__atomic_compare_exchange(p, &was, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return was;
    }
}
template <class T> struct di_emu_same { /* the argument is taken as the target's type */
    typedef T type;
};
template <class T> using di_emu_arg = typename di_emu_same<T>::type;
#define DI_EMU_ATOMIC(name, next)                                                                                      \
    template <class T> static inline T name(T *p, di_emu_arg<T> v) {                                                   \
        return di_emu_atomic(p, [v](T was) -> T { return next; });                                                     \
    }
DI_EMU_ATOMIC(atomicAdd, (T)(was + v))
DI_EMU_ATOMIC(atomicSub, (T)(was - v))
DI_EMU_ATOMIC(atomicMin, v < was ? v : was)
DI_EMU_ATOMIC(atomicMax, was < v ? v : was)
DI_EMU_ATOMIC(atomicAnd, (T)(was &v))
DI_EMU_ATOMIC(atomicOr, (T)(was | v))
DI_EMU_ATOMIC(atomicXor, (T)(was ^ v))
DI_EMU_ATOMIC(atomicInc, (T)(was >= v ? 0 : was + 1))
DI_EMU_ATOMIC(atomicDec, (T)(was == 0 || was > v ? v : was - 1))
DI_EMU_ATOMIC(atomicExch, ((void)was, v))
template <class T> static inline T atomicCAS(T *p, di_emu_arg<T> expected, di_emu_arg<T> v) {
    T was = expected;
    (void)__atomic_compare_exchange(p, &was, &v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return was;
}

/* ---- arithmetic ----------------------------------------------------------------------------------------------------
 */

static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline int __float_as_int(float f) {
    return (int)__float_as_uint(f);
}
static inline float __int_as_float(int i) {
    return __uint_as_float((unsigned)i);
}
static inline long long __double_as_longlong(double d) {
    long long u;
    memcpy(&u, &d, 8);
    return u;
}
static inline double __longlong_as_double(long long u) {
    double d;
    memcpy(&d, &u, 8);
    return d;
}
static inline float __fadd_rn(float a, float b) {
    return a + b;
}
static inline float __fsub_rn(float a, float b) {
    return a - b;
}
static inline float __fmul_rn(float a, float b) {
    return a * b;
}
static inline float __fdiv_rn(float a, float b) {
    return a / b;
}
static inline float __fsqrt_rn(float a) {
    return __builtin_sqrtf(a);
}
static inline float __frcp_rn(float a) {
    return 1.0f / a;
}
static inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
static inline double __dadd_rn(double a, double b) {
    return a + b;
}
static inline double __dmul_rn(double a, double b) {
    return a * b;
}
static inline double __fma_rn(double a, double b, double c) {
    return fma(a, b, c);
}
static inline float __frsqrt_rn(float a) {
    return (float)(1.0 / sqrt((double)a));
}
static inline float rsqrtf(float a) {
    return __frsqrt_rn(a);
}
/* The C library has these names. */
#define __expf(a) expf(a)
#define __exp2f(a) exp2f(a)
#define __logf(a) logf(a)
#define __cosf(a) cosf(a)
#define __sinf(a) sinf(a)
#define __powf(a, b) powf(a, b)
static inline float __fdividef(float a, float b) {
    return a / b;
}
static inline float __saturatef(float a) {
    return a > 0.0f ? a < 1.0f ? a : 1.0f : 0.0f;
}
static inline int __float2int_rn(float a) {
    return (int)nearbyintf(a);
}
static inline int __float2int_rz(float a) {
    return (int)a;
}
static inline int __float2int_rd(float a) {
    return (int)floorf(a);
}
static inline unsigned __float2uint_rn(float a) {
    return (unsigned)nearbyintf(a);
}
static inline float __int2float_rn(int a) {
    return (float)a;
}
static inline float __uint2float_rn(unsigned a) {
    return (float)a;
}
static inline float __double2float_rn(double a) {
    return (float)a;
}
static inline int __popc(unsigned a) {
    return __builtin_popcount(a);
}
static inline int __popcll(unsigned long long a) {
    return __builtin_popcountll(a);
}
static inline int __clz(int a) {
    return a ? __builtin_clz((unsigned)a) : 32;
}
static inline int __clzll(long long a) {
    return a ? __builtin_clzll((unsigned long long)a) : 64;
}
static inline int __ffs(int a) {
    return __builtin_ffs(a);
}
static inline int __ffsll(long long a) {
    return __builtin_ffsll(a);
}
static inline unsigned __brev(unsigned a) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (a >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = s >> 4 * i & 7; /* the fourth bit is ignored, unlike prmt's own */
        r |= ((unsigned)(both >> 8 * pick) & 255) << 8 * i;
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++)
        c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return c;
}
/* Inside of max and min CUDA's rules for mixed types are those of the operators. */
template <class A, class B> static inline typename std::common_type<A, B>::type min(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> static inline typename std::common_type<A, B>::type max(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)a < (T)b ? (T)b : (T)a;
}
template <class T> static inline T __ldg(const T *p) {
    return *p;
}
template <class T> static inline T __ldcg(const T *p) {
    return *(const volatile T *)p;
}
template <class T> static inline T __ldcs(const T *p) {
    return *p;
}
template <class T> static inline void __stcg(T *p, di_emu_arg<T> v) {
    *p = v;
}
template <class T> static inline void __stcs(T *p, di_emu_arg<T> v) {
    *p = v;
}

/* ---- bf16 and f16 --------------------------------------------------------------------------------------------------
 */

struct __align__(2) __nv_bfloat16 {
    uint16_t x;
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
struct __align__(2) __half {
    uint16_t x;
};
struct __align__(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

static inline float __bfloat162float(__nv_bfloat16 h) {
    return __uint_as_float((unsigned)h.x << 16);
}
static inline __nv_bfloat16 __float2bfloat16(float f) {
    unsigned u = __float_as_uint(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return {0x7FFF};
    return {(uint16_t)((u + 0x7FFFu + (u >> 16 & 1u)) >> 16)};
}
float di_emu_f16_to_f32(uint16_t h);
uint16_t di_emu_f32_to_f16(float f); /* to nearest even */
static inline float __half2float(__half h) {
    return di_emu_f16_to_f32(h.x);
}
static inline __half __float2half(float f) {
    return {di_emu_f32_to_f16(f)};
}

#define DI_EMU_HALVES(H, H2, to_float, from_float, suffix)                                                             \
    static inline float __low2float(H2 a) {                                                                            \
        return to_float(a.x);                                                                                          \
    }                                                                                                                  \
    static inline float __high2float(H2 a) {                                                                           \
        return to_float(a.y);                                                                                          \
    }                                                                                                                  \
    static inline H __hadd(H a, H b) {                                                                                 \
        return from_float(to_float(a) + to_float(b));                                                                  \
    }                                                                                                                  \
    static inline H __hsub(H a, H b) {                                                                                 \
        return from_float(to_float(a) - to_float(b));                                                                  \
    }                                                                                                                  \
    static inline H __hmul(H a, H b) {                                                                                 \
        return from_float(to_float(a) * to_float(b));                                                                  \
    }                                                                                                                  \
    static inline H __hfma(H a, H b, H c) {                                                                            \
        return from_float((float)((double)to_float(a) * to_float(b) + to_float(c)));                                   \
    }                                                                                                                  \
    static inline H2 __hadd2(H2 a, H2 b) {                                                                             \
        return {__hadd(a.x, b.x), __hadd(a.y, b.y)};                                                                   \
    }                                                                                                                  \
    static inline H2 __hsub2(H2 a, H2 b) {                                                                             \
        return {__hsub(a.x, b.x), __hsub(a.y, b.y)};                                                                   \
    }                                                                                                                  \
    static inline H2 __hmul2(H2 a, H2 b) {                                                                             \
        return {__hmul(a.x, b.x), __hmul(a.y, b.y)};                                                                   \
    }                                                                                                                  \
    static inline H2 __hfma2(H2 a, H2 b, H2 c) {                                                                       \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                                         \
    }
DI_EMU_HALVES(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16, bf16)
DI_EMU_HALVES(__half, __half2, __half2float, __float2half, f16)

static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    return __float2bfloat16(f);
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) {
    return h.x;
}
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    return {u};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {__float2bfloat16(a), __float2bfloat16(b)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 a) {
    return __floats2bfloat162_rn(a.x, a.y);
}
static inline float2 __bfloat1622float2(__nv_bfloat162 a) {
    return {__bfloat162float(a.x), __bfloat162float(a.y)};
}
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) {
    return {a, a};
}
static inline __nv_bfloat162 __float2bfloat162_rn(float a) {
    return __floats2bfloat162_rn(a, a);
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
    return {a, b};
}
static inline __half __float2half_rn(float f) {
    return __float2half(f);
}
static inline unsigned short __half_as_ushort(__half h) {
    return h.x;
}
static inline __half __ushort_as_half(unsigned short u) {
    return {u};
}
static inline __half2 __floats2half2_rn(float a, float b) {
    return {__float2half(a), __float2half(b)};
}
static inline float2 __half22float2(__half2 a) {
    return {__half2float(a.x), __half2float(a.y)};
}
static inline __half2 __half2half2(__half a) {
    return {a, a};
}
static inline __half2 __float2half2_rn(float a) {
    return __floats2half2_rn(a, a);
}
static inline __half2 __halves2half2(__half a, __half b) {
    return {a, b};
}

/* ---- the runtime's functions: device memory is the host's, streams do everything at once ----------------------------
 */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
    cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, l2CacheSize, regsPerBlock, warpSize, maxThreadsPerBlock;
    int maxThreadsPerMultiProcessor, concurrentKernels, integrated, ECCEnabled, persistingL2CacheMaxSize;
};
typedef struct di_emu_event *cudaEvent_t;
typedef struct di_emu_graph *cudaGraph_t;
typedef struct di_emu_graph *cudaGraphExec_t;

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorString(cudaError_t e);
const char *cudaGetErrorName(cudaError_t e);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int ordinal);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaGetDevice(int *ordinal);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t *n_free, size_t *n_total);
cudaError_t cudaDriverGetVersion(int *v);
cudaError_t cudaRuntimeGetVersion(int *v);
cudaError_t di_emu_malloc(void **p, size_t n_bytes);
cudaError_t cudaFree(void *p);
template <class T> static inline cudaError_t cudaMalloc(T **p, size_t n_bytes) {
    return di_emu_malloc((void **)p, n_bytes);
}
template <class T> static inline cudaError_t cudaMallocHost(T **p, size_t n_bytes, unsigned = 0) {
    return di_emu_malloc((void **)p, n_bytes);
}
template <class T> static inline cudaError_t cudaHostAlloc(T **p, size_t n_bytes, unsigned) {
    return di_emu_malloc((void **)p, n_bytes);
}
static inline cudaError_t cudaFreeHost(void *p) {
    return cudaFree(p);
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind kind);
cudaError_t cudaMemset(void *p, int v, size_t n);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t stream = NULL);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = NULL);
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t stream = NULL);
cudaError_t cudaStreamCreate(cudaStream_t *s);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *e);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = NULL);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b);
template <class K> static inline cudaError_t cudaFuncSetAttribute(K, cudaFuncAttribute, int) {
    return cudaSuccess;
}
/* A captured stream keeps launches, copies and fills; a graph repeats them. */
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g);
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s);
cudaError_t cudaGraphUpload(cudaGraphExec_t x, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t g);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x);

#include "cuda_emu_sm90.h"
#include "cuda_emu_sm100.h"

#endif
