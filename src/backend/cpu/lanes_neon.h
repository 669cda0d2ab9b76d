/* Vectors of the neon level: four floats in thirty-two registers; bytes in one lane of sixteen. */
#ifndef DI_CPU_LANES_NEON_H
#define DI_CPU_LANES_NEON_H

#include <arm_neon.h>

#define DI_LANES 4
#define DI_BLOCK_VECS 4
#define DI_BLOCK_ROWS 4
#define DI_HAS_BYTES 1
#define DI_INSTALL(family) di_cpu_install_neon_##family

#include "lanes.h"

DI_INLINE di_v di_v_splat(float x) {
    return (di_v)vdupq_n_f32(x);
}
DI_INLINE di_v di_v_fma(di_v a, di_v b, di_v c) {
    return (di_v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
DI_INLINE int32_t di_v_largest(di_vi v) {
    return vmaxvq_s32((int32x4_t)v);
}
/* The lowest byte of every lane. */
DI_INLINE void di_v_store_bytes(uint8_t *p, di_vi v) {
    uint8x16_t b = (uint8x16_t)v;
    uint8_t lowest[16] = {0, 4, 8, 12};
    b = vqtbl1q_u8(b, vld1q_u8(lowest));
    vst1q_lane_u32((uint32_t *)(void *)p, vreinterpretq_u32_u8(b), 0);
}
/* Four fp16 values. Flushing subnormals leaves those of fp16 alone here. */
DI_INLINE di_v di_v_load_half(const uint16_t *p) {
    return (di_v)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

/* ---- bytes (lanes_bytes.h), named after what each does on x86 ---- */

#define DI_BYTE_LANES 1
typedef uint8x16_t di_b;
#define DI_B(operation) neon_##operation
#define DI_B_BITS(operation) neon_bits_##operation

#define INTERLEAVE(bits)                                                                                               \
    DI_INLINE di_b neon_unpacklo_epi##bits(di_b a, di_b b) {                                                           \
        return (di_b)vzip1q_u##bits((uint##bits##_lanes)a, (uint##bits##_lanes)b);                                     \
    }                                                                                                                  \
    DI_INLINE di_b neon_unpackhi_epi##bits(di_b a, di_b b) {                                                           \
        return (di_b)vzip2q_u##bits((uint##bits##_lanes)a, (uint##bits##_lanes)b);                                     \
    }
typedef uint8x16_t uint8_lanes;
typedef uint16x8_t uint16_lanes;
typedef uint32x4_t uint32_lanes;
typedef uint64x2_t uint64_lanes;
INTERLEAVE(8)
INTERLEAVE(16)
INTERLEAVE(32)
INTERLEAVE(64)
#undef INTERLEAVE

DI_INLINE di_b neon_bits_and(di_b a, di_b b) {
    return vandq_u8(a, b);
}
DI_INLINE di_b neon_bits_or(di_b a, di_b b) {
    return vorrq_u8(a, b);
}
DI_INLINE di_b neon_bits_setzero(void) {
    return vdupq_n_u8(0);
}
DI_INLINE di_b neon_set1_epi8(int8_t x) {
    return vdupq_n_u8((uint8_t)x);
}
DI_INLINE di_b neon_set1_epi16(int16_t x) {
    return vreinterpretq_u8_u16(vdupq_n_u16((uint16_t)x));
}
DI_INLINE di_b neon_srli_epi16(di_b a, int n) {
    return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16((int16_t)-n)));
}
DI_INLINE di_b neon_shuffle_epi8(di_b table, di_b index) {
    return vqtbl1q_u8(table, index);
}
DI_INLINE di_b neon_max_epu8(di_b a, di_b b) {
    return vmaxq_u8(a, b);
}
DI_INLINE di_b di_b_load_lanes(const uint8_t *p, int64_t stride) {
    (void)stride; /* one lane */
    return vld1q_u8(p);
}
DI_INLINE void di_b_store(void *p, di_b v) {
    vst1q_u8(p, v);
}
DI_INLINE di_b di_b_table(const uint8_t *p) {
    return vld1q_u8(p);
}
DI_INLINE bool di_b_any_equal(di_b a, di_b b) {
    return vmaxvq_u8(vceqq_u8(a, b)) != 0;
}

#endif
