/* Blackwell's own instructions as functions: the tensor cores of sm_100a, their memory, and the layouts that they read.
 *
 * One kind of multiply is here: D (128 x N, float) = A (128 x 32) . B (N x 32)^T + keep * D with block scales, where
 * the codes of a row are 8-bit floats, or 4-bit ones padded to bytes, and each row of A and of B has one UE8M0 scale
 * for the 32 k of the multiply: sums of 32 products times both scales, by the tensor core. Copies and barriers are
 * those of sm90.cuh. For files named *_sm100.cu, which are compiled for sm_100a alone.
 *
 * Source: PTX ISA 9.0, chapter "TensorCore 5th generation family instructions" (tcgen05), by the sections named below;
 * where it has drawings alone (where scales lie, how 4-bit codes are padded), what NVIDIA's CUTLASS and DeepSeek's
 * DeepGEMM do. The two differ on N: CUTLASS takes multiples of 8, DeepGEMM of 16, which is what is used. No chip was at
 * hand: the functions are compiled, and kernels run over their emulation, which decodes the same bits from the same
 * description. What that can't show: whether the description was understood. */
#ifndef DI_SM100_CUH
#define DI_SM100_CUH

#include "sm90.cuh"

/* ---- tensor memory -----------------------------------------------------------------------------------------------
 * 128 lanes x 512 columns of 32 bits for the blocks of a multiprocessor; an address is lane << 16 | column. Warp w of a
 * block reads lanes 32*(w%4) and up alone. Accumulator D: row i of A is lane i, row j of B is column j (section "data
 * path layout organization", M = 128 of one block: layout D).
 *
 * Scales of 128 rows take 4 columns, and the same in each quarter of the lanes (section "block scaling",
 * "layout of the scale factor A matrix for scale_vec::1X", likewise of B):
 *
 *                column 0       1        2        3        a cell has the row's scales of 4 multiplies that follow one
 *   lane 32q+0   row 0        row 32   row 64   row 96     another in k, the first in the low byte; which byte is used
 *   lane 32q+1   row 1        row 33   ..                  is said by the instruction descriptor (cu_tc_kind_group)
 *    ..           ..
 *   lane 32q+31  row 31       row 63   row 95   row 127
 *
 * In shared memory that is 32 times 16 bytes, one line for a lane: cu_tc_scale_at. cu_tc_scales copies it. */
enum { CU_TC_SCALES = 512, CU_TC_SCALE_COLUMNS = 4 }; /* bytes, columns of 128 rows' scales */

/* Byte of row r's word. */
__host__ __device__ static inline uint32_t cu_tc_scale_at(uint32_t r) {
    return r % 32 * 16 + r / 32 * 4;
}
__device__ static inline uint32_t cu_tmem_lane(uint32_t lane) {
    return lane << 16;
}

/* ---- descriptors -------------------------------------------------------------------------------------------------
 * Of an operand in shared memory (section "shared memory descriptor"): bits 0-13 start / 16, 16-29 leading distance /
 * 16 (along k; unused where a row of the swizzle holds all k), 32-45 distance / 16 of groups of 8 rows, 46-48 the
 * constant 1, 49-51 base offset (0: the tile starts at a multiple of 1024), 52 distances are relative (0), 61-63
 * swizzle: none 0, 128 bytes 2. */
enum cu_tc_swizzle { CU_TC_NONE = 0, CU_TC_128B = 2 };

__device__ static inline uint64_t cu_tc_desc(uint32_t smem, uint32_t across, cu_tc_swizzle swizzle) {
    return (uint64_t)(smem >> 4 & 0x3FFF) | (uint64_t)(across >> 4) << 32 | (uint64_t)1 << 46 | (uint64_t)swizzle << 61;
}
/* Of a tile laid out by cu_sw128 (sm90.cuh), its rows along k; 32 k further is 32 bytes further. */
__device__ static inline uint64_t cu_tc_desc_k128(uint32_t smem) {
    return cu_tc_desc(smem, 1024, CU_TC_128B);
}
/* Of scales in the order of cu_tc_scale_at: lines of 16 bytes one after the other, groups of 8 are 128 bytes. */
__device__ static inline uint64_t cu_tc_desc_scales(uint32_t smem) {
    return cu_tc_desc(smem, 128, CU_TC_NONE);
}

/* Of the multiply (section "instruction descriptor", kind::mxf8f6f4): bits 4-5 which byte of B's scales, 7-9 and 10-12
 * formats of A and B, 17-22 N / 8, 23 scales are UE8M0, 24-28 M / 16, 29-30 which byte of A's scales; all else is 0:
 * dense, no signs turned, both operands along k, k = 32. */
enum cu_tc_format { CU_TC_E4M3 = 0, CU_TC_E2M1 = 5 };

__host__ __device__ static constexpr inline uint32_t cu_tc_kind(cu_tc_format a, cu_tc_format b, uint32_t n) {
    return (uint32_t)a << 7 | (uint32_t)b << 10 | n / 8 << 17 | 1u << 23 | 128u / 16 << 24;
}
/* The same with byte g of both scales. */
__host__ __device__ static constexpr inline uint32_t cu_tc_kind_group(uint32_t kind, uint32_t g) {
    return kind | g << 4 | g << 29;
}

#ifndef DI_EMU /* whose header has the same functions for the host */

/* ---- having tensor memory ----------------------------------------------------------------------------------------
 * By one whole warp. Waits until the columns are free; n: a power of two, 32 to 512. The address is written to shared
 * memory. All that a block takes is given back before it ends, by the warp that took it. Afterwards the block takes no
 * more, so that others of the multiprocessor may: cu_tmem_done. (Sections tcgen05.alloc, .dealloc,
 * .relinquish_alloc_permit.) */
__device__ static inline void cu_tmem_take(uint32_t *to, uint32_t n) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(cu_smem(to)), "r"(n)
                 : "memory");
}
__device__ static inline void cu_tmem_done() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
__device__ static inline void cu_tmem_give(uint32_t tmem, uint32_t n) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(n) : "memory");
}

/* ---- order -------------------------------------------------------------------------------------------------------
 * cu_tc_scales and cu_tc_multiply run later. Of what one thread issues, multiplies of one N on the same sums keep their
 * order, and so do scales before a later multiply; scales after an earlier multiply do not, so nobody writes scales
 * that a multiply under way reads (section "pipelined tcgen05 instructions"). cu_tc_commit arrives at an mbarrier,
 * once, when all that the thread issued before is done. Around every other way of ordering threads, and after waiting
 * for such a barrier, the fences stand (section "memory consistency model": tcgen05.fence). */
__device__ static inline void cu_tc_fence_before() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ static inline void cu_tc_fence_after() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
__device__ static inline void cu_tc_commit(uint64_t *bar) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(cu_smem(bar))
                 : "memory");
}

/* ---- work of the tensor core, each issued by one thread -----------------------------------------------------------
 */

/* 512 bytes of scales from shared memory to 4 columns at tmem, in all quarters of the lanes (tcgen05.cp). */
__device__ static inline void cu_tc_scales(uint32_t tmem, uint64_t desc) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(desc) : "memory");
}
/* The multiply; a_scale and b_scale: tensor memory. keep false: D is overwritten. N: a multiple of 16 up to 256. */
__device__ static inline void cu_tc_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scale,
                                             uint32_t b_scale, bool keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(
            d),
        "l"(a), "l"(b), "r"(kind), "r"(a_scale), "r"(b_scale), "r"((uint32_t)keep)
        : "memory");
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

/* Columns tmem .. tmem + 15 of a lane for each thread of a warp, together; tmem: the warp's first lane (tcgen05.ld,
 * shape 32x32b). The wait is in the same statement, so that no use of v comes before it. */
__device__ static inline void cu_tmem_load16(float (&v)[16], uint32_t tmem) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "[%16];\ntcgen05.wait::ld.sync.aligned;"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]),
                   "=f"(v[8]), "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15])
                 : "r"(tmem)
                 : "memory");
}

#endif /* DI_EMU */

#endif
