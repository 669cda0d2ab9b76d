/* Records of the caches as kernels write them: where they go, and eight values of one a thread.
 *
 * Shared by the writers (kv.cu) and by operations that write what they have just made (fused.cu). Formats are model.md
 * 0.2 and 5.1; the bytes are tensor/'s. */
#ifndef DI_KV_CUH
#define DI_KV_CUH

#include "rows.cuh"

/* Groups of the format divide n values; DI_KV_F32 has none. */
static inline bool di_cuda_kv_fits(di_kv_format format, int64_t n) {
    bool is_known = format == DI_KV_F32 || format == DI_KV_FP8 || format == DI_KV_FP4 || format == DI_KV_MX4;
    return is_known && n > 0 && n < 1 << 24 && (format == DI_KV_F32 || n % 32 == 0);
}

/* Where row i of x goes: its codes and its scales. False: nowhere. */
typedef struct cu_record_place {
    uint8_t *records;
    int64_t record_bytes, data_bytes;
    __device__ bool find(int64_t i, uint8_t **data, uint8_t **scale) const {
        *data = records + i * record_bytes;
        *scale = *data + data_bytes;
        return true;
    }
} cu_record_place;

typedef struct cu_page_place {
    const int32_t *blocks;
    int64_t blocks_stride, data_bytes, scale_bytes;
    di_entries entries;
    di_paged dst;
    __device__ bool find(int64_t i, uint8_t **data, uint8_t **scale) const {
        int32_t row = entries.row[i], j = entries.idx[i], seq = entries.seq[i]; /* at once */
        if (row < 0)
            return false;
        int64_t block = blocks[seq * blocks_stride + j / dst.per_block], at = j % dst.per_block;
        uint8_t *section = dst.pages + (size_t)block * dst.page_bytes + dst.offset;
        if (dst.format == DI_KV_MX4) { /* all codes of the block, then all scales */
            *data = section + at * data_bytes;
            *scale = section + dst.per_block * data_bytes + at * scale_bytes;
        } else {
            *data = section + at * (data_bytes + scale_bytes);
            *scale = *data + data_bytes;
        }
        return true;
    }
} cu_page_place;

/* Writes columns [col, col + 8) of a record of n values; a group of 32 is four lanes, one of 16 two. Whole warps call,
 * with values of zero where is_inside is false. */
__device__ static inline void cu_encode8(di_kv_format format, const float (&v)[8], int64_t col, int64_t n,
                                         uint8_t *data, uint8_t *scale, bool is_inside) {
    if (format == DI_KV_F32) {
        float *to = (float *)data + col;
        if (is_inside && col + 8 <= n && (uintptr_t)to % 16 == 0) {
            cu_store8(to, v);
        } else if (is_inside) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (col + i < n)
                    to[i] = v[i];
            }
        }
    } else if (format == DI_KV_FP8) {
        cu_scale s = cu_qa_scale(cu_lanes_max<4>(cu_abs_max8(v, 1e-4f)));
        uint2 codes = cu_e4m3_codes8(v, s.inverse);
        if (is_inside) {
            const uint32_t words[2] = {codes.x, codes.y};
            cu_store_bytes<8>(data + col, words);
            if (col % 32 == 0)
                scale[col / 32] = (uint8_t)s.byte;
        }
    } else if (format == DI_KV_MX4) {
        cu_scale s = cu_qi_scale(cu_lanes_max<4>(cu_abs_max8(v, 0x1.8p-124f))); /* 6 * 2^-126 */
        const uint32_t words[1] = {cu_e2m1_codes8(v, s.inverse)};
        if (is_inside) {
            cu_store_bytes<4>(data + col / 2, words);
            if (col % 32 == 0)
                scale[col / 32] = (uint8_t)s.byte;
        }
    } else {
        float s = cu_lanes_max<2>(cu_abs_max8(v, 0.01171875f)) * (1.0f / 6.0f); /* 6 * 2^-9 */
        uint8_t code = (uint8_t)cu_pack_e4m3(s, 0.0f);
        const uint32_t words[1] = {cu_e2m1_codes8(v, __fdiv_rn(1.0f, cu_e4m3_to_f32(code)))};
        if (is_inside) {
            cu_store_bytes<4>(data + col / 2, words);
            if (col % 16 == 0)
                scale[col / 16] = code;
        }
    }
}

#endif
