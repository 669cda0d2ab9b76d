/* What follows the sums of a product: the addend, rope or codes, and the store. Private to gemm*_sm90.cu. */
#ifndef DI_GEMM_STORE_CUH
#define DI_GEMM_STORE_CUH

#include "cu.cuh"
#include "gemm.h"
#include "rows.cuh"

/* Codes of a group of 32 sums, which eight lanes have; o: the first of this one's. */
__device__ static inline void gemm_store_codes(const gemm_job &job, int64_t row, int64_t o, const float (&v)[4]) {
    int lane = threadIdx.x % DI_WARP;
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        most = fmaxf(most, fabsf(v[i]));
    cu_scale scale = cu_qa_scale(cu_lanes_max<8>(most, 0xFFu << (lane & 24)));
    *(uint32_t *)((uint8_t *)job.codes.data + row * job.codes.stride + o) =
        cu_e4m3_codes4(v[0], v[1], v[2], v[3], scale.inverse);
    if (lane % 8 == 0)
        job.codes.scale[row * (job.w.n_out / 32) + o / 32] = (uint8_t)scale.byte;
}

/* The sums as bf16 values, two pairs, turned where they are in the rotated end of a head. */
__device__ static inline void gemm_rope(const gemm_job &job, int64_t row, int64_t o, float (&v)[4]) {
    int32_t j = (int32_t)(o % job.head_dim) - (job.head_dim - 2 * job.n_freq);
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = cu_round_bf16(v[i]);
    if (j < 0)
        return;
    float2 cos = *(const float2 *)(job.cos + row * job.n_freq + j / 2);
    float2 sin = *(const float2 *)(job.sin + row * job.n_freq + j / 2);
    const float c[2] = {cos.x, cos.y}, s[2] = {sin.x, sin.y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a = v[2 * i], b = v[2 * i + 1];
        v[2 * i] = __fsub_rn(__fmul_rn(a, c[i]), __fmul_rn(b, s[i]));
        v[2 * i + 1] = __fadd_rn(__fmul_rn(a, s[i]), __fmul_rn(b, c[i]));
    }
}

/* Four neighbouring sums of a row, o a multiple of 4, with what follows the product. For codes eight neighbouring lanes
 * have a group and call together. */
__device__ static inline void gemm_store(const gemm_job &job, int64_t row, int64_t o, const float4 &sum) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
    int64_t at = row * job.out.stride + o;
    if (job.codes.data) {
        gemm_store_codes(job, row, o, v);
        return;
    }
    if (job.cos)
        gemm_rope(job, row, o, v);
    if (job.aligned >= 8 && o + 4 <= job.w.n_out) {
        float4 add = job.add ? *(const float4 *)(job.add + at) : make_float4(0, 0, 0, 0);
        if (job.add) {
            v[0] += add.x;
            v[1] += add.y;
            v[2] += add.z;
            v[3] += add.w;
        }
        if (job.out.dtype == DI_F32)
            *(float4 *)((float *)job.out.data + at) = make_float4(v[0], v[1], v[2], v[3]);
        else
            *(uint2 *)((uint16_t *)job.out.data + at) = make_uint2(cu_pack_bf16(v[0], v[1]), cu_pack_bf16(v[2], v[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (o + i < job.w.n_out)
            cu_act_store(job.out, row, o + i, job.add ? v[i] + job.add[at + i] : v[i]);
    }
}

/* Eight, o a multiple of 8, without codes. */
__device__ static inline void gemm_store8(const gemm_job &job, int64_t row, int64_t o, float (&v)[8]) {
    float4 low = make_float4(v[0], v[1], v[2], v[3]), high = make_float4(v[4], v[5], v[6], v[7]);
    if (job.out.dtype != DI_BF16 || job.aligned < 8 || job.add) {
        gemm_store(job, row, o, low);
        gemm_store(job, row, o + 4, high);
        return;
    }
    float a[4] = {v[0], v[1], v[2], v[3]}, b[4] = {v[4], v[5], v[6], v[7]};
    if (job.cos) {
        gemm_rope(job, row, o, a);
        gemm_rope(job, row, o + 4, b);
    }
    *(uint4 *)((uint16_t *)job.out.data + row * job.out.stride + o) = make_uint4(
        cu_pack_bf16(a[0], a[1]), cu_pack_bf16(a[2], a[3]), cu_pack_bf16(b[0], b[1]), cu_pack_bf16(b[2], b[3]));
}

#endif
