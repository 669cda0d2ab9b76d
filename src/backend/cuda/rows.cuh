/* What row-wise kernels share: eight values a thread, sums in the order of di_dot32 by four lanes a group, quantisers.
 *
 * A thread holds eight consecutive values of a row, so that loads and stores are 16 bytes wide and neighbours touch
 * neighbours. Four lanes hold a group of 32: the group's two chains run through them in turn, which keeps the order of
 * ops.h; the sums of groups are then added by one warp, rising, from shared memory.
 *
 *   thread      0    1    2    3    4 ..         sums[0]  sums[1] ..
 *   columns   0..7 8..15  ..  24..31 32..39      = group 0, group 1 .. -> one sum, in order
 *   chains      ------------->       --
 *
 * Kernels are templates of the element type T: float and uint16_t (bf16) where rows start on 16 bytes and a row is
 * whole groups of 8; void takes anything, value by value. */
#ifndef DI_ROWS_CUH
#define DI_ROWS_CUH

#include <type_traits>

#include "cu.cuh"
#include "sm90.cuh"

/* ---- eight values ---- */

__device__ static inline void cu_unpack8(uint4 q, float (&v)[8]) {
    const uint32_t u[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(u[i] << 16);
        v[2 * i + 1] = __uint_as_float(u[i] & 0xFFFF0000u);
    }
}
__device__ static inline void cu_load8(const uint16_t *p, float (&v)[8]) {
    cu_unpack8(*(const uint4 *)p, v);
}
__device__ static inline void cu_load8(const float *p, float (&v)[8]) {
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ static inline void cu_store8(uint16_t *p, const float (&v)[8]) {
    *(uint4 *)p = make_uint4(cu_pack_bf16(v[0], v[1]), cu_pack_bf16(v[2], v[3]), cu_pack_bf16(v[4], v[5]),
                             cu_pack_bf16(v[6], v[7]));
}
__device__ static inline void cu_store8(float *p, const float (&v)[8]) {
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
/* As a store and a load would leave them. */
template <class T> __device__ static inline void cu_round8(float (&v)[8]) {
    if constexpr (std::is_same_v<T, uint16_t>) {
        cu_unpack8(make_uint4(cu_pack_bf16(v[0], v[1]), cu_pack_bf16(v[2], v[3]), cu_pack_bf16(v[4], v[5]),
                              cu_pack_bf16(v[6], v[7])),
                   v);
    }
}

/* Eight values as they lie in memory. */
template <class T> struct cu_raw8;
template <> struct cu_raw8<uint16_t> {
    uint4 q;
    __device__ void load(const uint16_t *p) {
        q = *(const uint4 *)p;
    }
    __device__ void zero() {
        q = make_uint4(0, 0, 0, 0);
    }
    __device__ void get(float (&v)[8]) const {
        cu_unpack8(q, v);
    }
};
template <> struct cu_raw8<float> {
    float v8[8];
    __device__ void load(const float *p) {
        cu_load8(p, v8);
    }
    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v8[i] = 0.0f;
    }
    __device__ void get(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = v8[i];
    }
};

/* Columns [col, col + 8) of a row as floats, zeros from column `end` on. With T known col < end means that all eight
 * are there. */
template <class T>
__device__ static inline void cu_row_load8(const di_act &x, int64_t row, int64_t col, int64_t end, float (&v)[8]) {
    if constexpr (std::is_void_v<T>) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = col + i < end ? cu_act_load(x, row, col + i) : 0.0f;
    } else if (col < end) {
        cu_load8((const T *)x.data + row * x.stride + col, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = 0.0f;
    }
}
template <class T>
__device__ static inline void cu_row_store8(const di_act &x, int64_t row, int64_t col, int64_t end,
                                            const float (&v)[8]) {
    if constexpr (std::is_void_v<T>) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (col + i < end)
                cu_act_store(x, row, col + i, v[i]);
        }
    } else if (col < end) {
        cu_store8((T *)x.data + row * x.stride + col, v);
    }
}
/* Eight bf16 weights; is_wide as T is known. */
template <bool IS_WIDE>
__device__ static inline void cu_weights8(const uint16_t *w, int64_t col, int64_t end, float (&v)[8]) {
    if (IS_WIDE && col < end) {
        cu_load8(w + col, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = col + i < end ? cu_bf16_to_f32(w[col + i]) : 0.0f;
    }
}

/* ---- sums in the order of di_dot32 ---- */

/* The sum of a group of 32 products, eight in each of four lanes; right in the last lane of the four. A whole warp
 * calls. Step k carries the chains of lane l - k to lane l, so that after step 3 the last lane has gone through all
 * four in turn; what the others have then is not used. */
__device__ static inline float cu_quad_sum(const float (&p)[8]) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (step) {
            even = __shfl_up_sync(0xFFFFFFFFu, even, 1);
            odd = __shfl_up_sync(0xFFFFFFFFu, odd, 1);
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            even = even + p[i];
            odd = odd + p[i + 1];
        }
    }
    return even + odd;
}

/* The sums of groups s[0..n), shared memory, 16-byte aligned, added to acc in rising order. Loads run ahead of the
 * chain. */
__device__ static inline float cu_ordered_sum(const float *s, int n, float acc = 0.0f) {
    const float4 *at = (const float4 *)s;
    int i = 0;
    if (n >= 16) {
        float4 now[4], next[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            now[k] = at[k];
        for (; i + 16 <= n; i += 16) {
            at += i + 32 <= n ? 4 : 0; /* the last turn loads what it has once more */
#pragma unroll
            for (int k = 0; k < 4; k++)
                next[k] = at[k];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                acc = acc + now[k].x;
                acc = acc + now[k].y;
                acc = acc + now[k].z;
                acc = acc + now[k].w;
                now[k] = next[k];
            }
        }
    }
    for (; i < n; i++)
        acc = acc + s[i];
    return acc;
}

/* ---- quantisers: tensor/format_inline.h on the device ---- */

/* The largest magnitude of eight values, at least `least`; NaN counts as zero. */
__device__ static inline float cu_abs_max8(const float (&v)[8], float least) {
    float m = least;
#pragma unroll
    for (int i = 0; i < 8; i++)
        m = fmaxf(m, fabsf(v[i])); /* of a number and NaN it gives the number */
    return m;
}
/* Over groups of N lanes, N a power of two. lanes: those that call it. */
template <int N> __device__ static inline float cu_lanes_max(float v, uint32_t lanes = 0xFFFFFFFFu) {
#pragma unroll
    for (int lane = 1; lane < N; lane <<= 1)
        v = fmaxf(v, __shfl_xor_sync(lanes, v, lane));
    return v;
}

/* A power-of-two scale: its E8M0 byte, and the factor that takes values to codes. */
typedef struct cu_scale {
    uint32_t byte;
    float inverse;
} cu_scale;

/* s rounded up to a power of two, s positive and normal, or infinite. */
__device__ static inline cu_scale cu_pow2_ceil(float s) {
    uint32_t e = (__float_as_uint(s) + 0x007FFFFFu) >> 23;
    return cu_scale{e, e < 254 ? __uint_as_float((254u - e) << 23) : 0.0f}; /* 2^-127 and below are flushed */
}
__device__ static inline cu_scale cu_qa_scale(float most) { /* most >= 1e-4 */
    return cu_pow2_ceil(__fdiv_rn(most, 448.0f));
}
__device__ static inline cu_scale cu_qi_scale(float most) { /* most >= 6 * 2^-126 */
    return cu_pow2_ceil(__fdiv_rn(most, 6.0f));
}

/* Four E4M3 codes of v * inverse, the first in the low byte. The instruction drops the sign of NaN, which the
 * reference keeps, so all signs are taken from the values. */
__device__ static inline uint32_t cu_e4m3_codes4(float a, float b, float c, float d, float inverse) {
    uint32_t codes = (uint32_t)cu_pack_e4m3(a * inverse, b * inverse) | (uint32_t)cu_pack_e4m3(c * inverse, d * inverse)
                                                                            << 16;
    uint32_t ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0073);
    uint32_t cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0073);
    return codes | (__byte_perm(ab, cd, 0x5410) & 0x80808080u);
}
__device__ static inline uint2 cu_e4m3_codes8(const float (&v)[8], float inverse) {
    return make_uint2(cu_e4m3_codes4(v[0], v[1], v[2], v[3], inverse), cu_e4m3_codes4(v[4], v[5], v[6], v[7], inverse));
}

/* The E2M1 code of f: how many borders between neighbours its magnitude has passed; a tie goes to the even code. */
__device__ static inline uint32_t cu_e2m1_code(float f) {
    uint32_t bits = __float_as_uint(f), a = bits & 0x7FFFFFFFu;
    uint32_t code = (a > 0x3E800000u) + (a >= 0x3F400000u) + (a > 0x3FA00000u) + (a >= 0x3FE00000u) +
                    (a > 0x40200000u) + (a >= 0x40600000u) + (a > 0x40A00000u);
    return code | (bits >> 28 & 8u);
}
/* Eight codes of v * inverse, the first in the low nibble. Signs of the values, as above. */
__device__ static inline uint32_t cu_e2m1_codes8(const float (&v)[8], float inverse) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        codes |= (cu_e2m1_code(v[i] * inverse) & 7u) << (4 * i) | (__float_as_uint(v[i]) >> 31) << (4 * i + 3);
    return codes;
}

/* N = 4, 8 or 16 bytes to an address that may lie anywhere. */
template <int N> __device__ static inline void cu_store_bytes(uint8_t *p, const uint32_t (&words)[N / 4]) {
    uintptr_t at = (uintptr_t)p;
    if (N == 16 && at % 16 == 0) {
        *(uint4 *)p =
            make_uint4(words[0], words[N / 4 > 1 ? 1 : 0], words[N / 4 > 2 ? 2 : 0], words[N / 4 > 3 ? 3 : 0]);
    } else if (N >= 8 && at % 8 == 0) {
#pragma unroll
        for (int i = 0; i + 1 < N / 4; i += 2)
            ((uint2 *)p)[i / 2] = make_uint2(words[i], words[i + 1]);
    } else if (at % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            ((uint32_t *)p)[i] = words[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = (uint8_t)(words[i / 4] >> (i % 4 * 8));
    }
}

/* ---- on the host: which T ---- */

static inline bool di_rows_is_aligned(const void *p, int64_t stride_bytes, int64_t n) {
    return (uintptr_t)p % (uintptr_t)n == 0 && stride_bytes % n == 0;
}
/* Whether kernels with T known take the block. */
static inline bool di_rows_is_wide(const di_act *x) {
    int64_t size = x->dtype == DI_F32 ? 4 : 2;
    return x->dtype != DI_F8_E4M3 && x->n_cols % 8 == 0 && di_rows_is_aligned(x->data, x->stride * size, 16);
}

/* Runs the statement with T the element type of a wide block, void otherwise. */
#define DI_ROWS_BY_TYPE(is_wide, dtype, ...)                                                                           \
    do {                                                                                                               \
        if (!(is_wide)) {                                                                                              \
            using T = void;                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else if ((dtype) == DI_F32) {                                                                                \
            using T = float;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            using T = uint16_t;                                                                                        \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

/* Threads and pieces of eight values of a block that holds a row of n values: few enough threads for several blocks on
 * a multiprocessor, pieces 1, 2 or 4. n_pieces 0: the row is too long to be held. */
enum { DI_ROWS_THREADS_MAX = 512 };
typedef struct di_rows_shape {
    int n_threads, n_pieces;
} di_rows_shape;

static inline di_rows_shape di_rows_shape_for(int64_t n) {
    int64_t eights = (n + 7) / 8;
    int n_pieces = eights <= 256 ? 1 : eights <= 1024 ? 2 : eights <= 2048 ? 4 : 0;
    if (!n_pieces)
        return di_rows_shape{DI_ROWS_THREADS_MAX, 0};
    int64_t n_threads = (eights + n_pieces - 1) / n_pieces;
    return di_rows_shape{(int)((n_threads + 31) / 32 * 32), n_pieces};
}

#endif
