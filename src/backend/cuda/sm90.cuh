/* Hopper's own instructions as functions: one line of PTX each, named, with the layouts that they imply.
 *
 * Owns: asynchronous copies and their barriers, clusters, warpgroup matrix multiplies with their shared-memory
 * descriptors, the warp-wide tensor-core forms, hints for loads. No policy: kernels decide the order of things.
 * Shared memory is named by 32-bit addresses (cu_smem) where an instruction wants one, else by pointers.
 *
 * What needs sm_90a (wgmma, setmaxnreg) traps in code made for another target; everything else is plain sm_90.
 * Source: PTX ISA, sections "asynchronous warpgroup level matrix instructions", "data movement", "mbarrier". */
#ifndef DI_SM90_CUH
#define DI_SM90_CUH

#include "cuda.h"

/* ---- layouts of shared memory ------------------------------------------------------------------------------------
 * A matrix operand lies in shared memory in atoms of 8 rows. "K-major": a row is one m (or n) and runs along k, the
 * direction of the sum. "MN-major": a row is one k and runs along m (or n), as V does in P*V where keys are k.
 *
 *   128-byte swizzle       rows of 128 bytes (64 bf16, 128 e4m3), 8 rows = 1024 bytes, atoms aligned to 1024.
 *                          16-byte chunk c of row r lies at chunk c ^ (r % 8) of the row.
 *   64-byte swizzle        rows of 64 bytes, 8 rows = 512 bytes, aligned to 512; chunk c of row r at c ^ (r / 2 % 4).
 *   none                   rows of 16 bytes, 8 rows = 128 bytes ("core matrix"); distances of matrices are free.
 *
 * A tile wider than a row is a sequence of panels: panel p holds bytes [128p, 128p + 128) of every row,
 * n_rows * 128 bytes in all (n_rows a multiple of 8), so that rows of a panel are contiguous:
 *
 *          128 bytes            128 bytes                        Steps along k (descriptor + bytes, cu_desc_add):
 *        +-----------+        +-----------+                      K-major   32 bytes (16 bf16 or 32 e4m3) four times
 *   row 0|  panel 0  |        |  panel 1  |                                inside a panel, then the next panel
 *     .. |           |        |           |                      MN-major  16 rows = 2048 bytes (bf16 alone)
 *   n - 1+-----------+        +-----------+                      Steps along m or n, K-major: 8 rows = 1024 bytes.
 *
 * The swizzle works on the address, so a tile must start at a multiple of its atom; DI_DYN_SHARED starts at 1024. */

enum cu_major { CU_K_MAJOR, CU_MN_MAJOR };

/* Byte offset of byte b of row r in a tile of n_rows rows, 128-byte swizzle (either major). */
__device__ static inline uint32_t cu_sw128(uint32_t r, uint32_t b, uint32_t n_rows) {
    return (b >> 7) * (n_rows * 128) + r * 128 + ((b & 127) ^ ((r & 7) << 4));
}
/* Likewise with rows of 64 bytes and the 64-byte swizzle. */
__device__ static inline uint32_t cu_sw64(uint32_t r, uint32_t b, uint32_t n_rows) {
    return (b >> 6) * (n_rows * 64) + r * 64 + ((b & 63) ^ ((r >> 1 & 3) << 4));
}
/* Likewise without swizzle: panels of 16 bytes. */
__device__ static inline uint32_t cu_sw0(uint32_t r, uint32_t b, uint32_t n_rows) {
    return (b >> 4) * (n_rows * 16) + r * 16 + (b & 15);
}

/* A descriptor: where an operand starts and the two distances (bytes) between its atoms.
 *   K-major:  along = between core matrices in k (used without swizzle only), across = between groups of 8 rows
 *   MN-major: along = between panels in m or n, across = between groups of 8 k */
__device__ static inline uint64_t cu_desc(uint32_t smem, uint32_t along, uint32_t across, uint32_t swizzle_mode) {
    return (uint64_t)(smem >> 4 & 0x3FFF) | (uint64_t)(along >> 4 & 0x3FFF) << 16 |
           (uint64_t)(across >> 4 & 0x3FFF) << 32 | (uint64_t)swizzle_mode << 62;
}
/* Of tiles laid out by cu_sw128, cu_sw64, cu_sw0 and read K-major. */
__device__ static inline uint64_t cu_desc_k128(uint32_t smem) {
    return cu_desc(smem, 16, 1024, 1);
}
__device__ static inline uint64_t cu_desc_k64(uint32_t smem) {
    return cu_desc(smem, 16, 512, 2);
}
__device__ static inline uint64_t cu_desc_k0(uint32_t smem, uint32_t n_rows) {
    return cu_desc(smem, n_rows * 16, 128, 0);
}
/* Of a tile of n_rows keys laid out by cu_sw128 and read MN-major: rows are k. */
__device__ static inline uint64_t cu_desc_mn128(uint32_t smem, uint32_t n_rows) {
    return cu_desc(smem, n_rows * 128, 1024, 1);
}
__device__ static inline uint64_t cu_desc_add(uint64_t desc, uint32_t n_bytes) {
    return desc + (n_bytes >> 4);
}

/* ---- layouts of registers ----------------------------------------------------------------------------------------
 * Accumulator of a warpgroup (64 x N) in float d[N/2]; w = warp of the group, l = lane:
 *
 *            column 2*(l%4)  +1     +8  +9     +16 ..        d[i]: row  16*w + l/4 + 8*(i/2%2)
 *   row l/4           d[0]  d[1]   d[4] d[5]   d[8] ..             column  8*(i/4) + 2*(l%4) + i%2
 *   row l/4 + 8       d[2]  d[3]   d[6] d[7]   d[10] ..
 *
 * mma.sync's accumulator (16 x 8) is d[0..3] of that with w = 0. A of either, 32-bit words a[4], low element first:
 *
 *                 bf16 k = 2*(l%4) + {0,1}     +8             e4m3 k = 4*(l%4) + {0..3}   +16
 *   row l/4                       a[0]         a[2]                           a[0]        a[2]
 *   row l/4 + 8                   a[1]         a[3]                           a[1]        a[3]
 *
 * so two neighbouring accumulators, packed, are the A words of a bf16 multiply whose k is this one's column:
 * a[0..3] of k step s = (d[8s], d[8s+1]) (d[8s+2], d[8s+3]) (d[8s+4], d[8s+5]) (d[8s+6], d[8s+7]).
 * B of mma.sync (k x 8), column n = l/4: b[0], b[1] with the k of a[0], a[2]. */
__device__ static inline int cu_acc_row(int thread_of_group, int i) {
    return (thread_of_group / 32) * 16 + (thread_of_group % 32) / 4 + (i / 2 % 2) * 8;
}
__device__ static inline int cu_acc_col(int thread_of_group, int i) {
    return (i / 4) * 8 + (thread_of_group % 4) * 2 + i % 2;
}

#ifndef DI_EMU /* whose header has the same functions for the host */

/* Address of a shared variable in the block's window. */
__device__ static inline uint32_t cu_smem(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four floats by an address, for a kernel that keeps addresses in registers. */
__device__ static inline float4 cu_smem_load4(uint32_t smem) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(smem)
                 : "memory");
    return v;
}

/* ---- asynchronous copies of 16 bytes by threads ------------------------------------------------------------------
 * Global to shared past L1; both ends aligned to 16. Visible to the thread after its wait, to others after a barrier
 * on top; to wgmma after cu_fence_async as well. */

__device__ static inline void cu_cp16(uint32_t smem, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
/* Copies the first n_bytes (0..16) and zeroes the rest; with 0 nothing is read, but the address must be valid. */
__device__ static inline void cu_cp16_zfill(uint32_t smem, const void *global, uint32_t n_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(n_bytes) : "memory");
}
/* 4 or 8 bytes; through L1. */
template <int BYTES> __device__ static inline void cu_cp(uint32_t smem, const void *global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "size of a copy");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(smem), "l"(global), "n"(BYTES) : "memory");
}
__device__ static inline void cu_cp_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most N of this thread's newest groups are under way. */
template <int N> __device__ static inline void cu_cp_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- barriers in shared memory -----------------------------------------------------------------------------------
 * A phase ends when its count of arrivals is reached and all announced bytes have come; then the parity flips. The
 * first phase has parity 0: wait(bar, 0) waits for its end, wait(bar, 1) on a fresh barrier returns at once. */

__device__ static inline void cu_mbar_init(uint64_t *bar, uint32_t n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cu_smem(bar)), "r"(n_arrivals) : "memory");
}
__device__ static inline void cu_mbar_inval(uint64_t *bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(cu_smem(bar)) : "memory");
}
/* After init, before the barrier is shown to the copy engine or to the cluster (then also a block or cluster sync). */
__device__ static inline void cu_fence_mbar_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void cu_mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ static inline void cu_mbar_arrive(uint64_t *bar) {
    cu_mbar_arrive(cu_smem(bar));
}
/* Arrives and announces n_bytes that bulk copies bring in this phase. */
__device__ static inline void cu_mbar_arrive_expect(uint64_t *bar, uint32_t n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cu_smem(bar)), "r"(n_bytes) : "memory");
}
/* Announces without arriving. */
__device__ static inline void cu_mbar_expect(uint64_t *bar, uint32_t n_bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(cu_smem(bar)), "r"(n_bytes)
                 : "memory");
}
/* Arrives at the barrier of the same name in another block of the cluster. */
__device__ static inline void cu_mbar_arrive_remote(uint64_t *bar, uint32_t rank) {
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [at];\n}" ::"r"(cu_smem(bar)),
                 "r"(rank)
                 : "memory");
}
/* Arrives when this thread's cp.async so far are complete: one of the arrivals counted at init. */
__device__ static inline void cu_mbar_arrive_cp(uint64_t *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cu_smem(bar)) : "memory");
}
/* Whether the phase of this parity has ended; may sleep a moment first. */
__device__ static inline bool cu_mbar_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done;
}
__device__ static inline bool cu_mbar_try_wait(uint64_t *bar, uint32_t parity) {
    return cu_mbar_try_wait(cu_smem(bar), parity);
}
/* bar: a pointer, or the address. */
template <class Bar> __device__ static inline void cu_mbar_wait(Bar bar, uint32_t parity) {
    while (!cu_mbar_try_wait(bar, parity)) {
    }
}
/* Likewise where other blocks of the cluster arrived: their writes are seen. */
__device__ static inline void cu_mbar_wait_cluster(uint64_t *bar, uint32_t parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(cu_smem(bar)), "r"(parity)
                     : "memory");
}

/* Named barriers of a block: id 1..15 (0 is __syncthreads), n_threads a multiple of 32. */
__device__ static inline void cu_bar_sync(uint32_t id, uint32_t n_threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}
__device__ static inline void cu_bar_arrive(uint32_t id, uint32_t n_threads) {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* ---- bulk copies by the copy engine ------------------------------------------------------------------------------
 * One thread issues; addresses and sizes are multiples of 16. */

/* Global to shared; completes n_bytes on the barrier. */
__device__ static inline void cu_bulk_load(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(global), "r"(n_bytes), "r"(cu_smem(bar))
                 : "memory");
}
/* Likewise with a policy of cu_policy_* for L2. */
__device__ static inline void cu_bulk_load_hint(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar,
                                                uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(smem),
                 "l"(global), "r"(n_bytes), "r"(cu_smem(bar)), "l"(policy)
                 : "memory");
}
/* To the same place, and the same barrier, of every block of the cluster whose bit is set. */
__device__ static inline void cu_bulk_load_multicast(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar,
                                                     uint16_t blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(smem),
                 "l"(global), "r"(n_bytes), "r"(cu_smem(bar)), "h"(blocks)
                 : "memory");
}
/* Shared to global; commit and wait as with cu_cp_*, by the issuing thread. */
__device__ static inline void cu_bulk_store(void *global, uint32_t smem, uint32_t n_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(n_bytes)
                 : "memory");
}
__device__ static inline void cu_bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until at most N groups are under way; _read: until their source may be overwritten. */
template <int N> __device__ static inline void cu_bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
template <int N> __device__ static inline void cu_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* ---- boxes of an array by the copy engine ----
 * A map tells where an array of bytes lies, up to five dimensions, the fastest first, and how large a box a load takes:
 * box[0] = 128 bytes, which land as rows in the 128-byte swizzle, the other dimensions one after another. Bytes outside
 * of the array come as zeros and count as loaded. A kernel takes it as const __grid_constant__ cu_map. */
struct alignas(128) cu_map { /* the driver's CUtensorMap */
    uint64_t opaque[16];
};

/* Host. strides: bytes, of dimensions 1..; base and strides are multiples of 16. The driver's function by its name and
 * its enums by their values, so that neither its header nor its library is needed. */
static inline bool cu_map_make(cu_map *map, const void *base, unsigned rank, const uint64_t *dims,
                               const uint64_t *strides, const uint32_t *box) {
    enum { TYPE_UINT8 = 0, INTERLEAVE_NONE = 0, SWIZZLE_128B = 3, L2_PROMOTION_256B = 3, FILL_ZEROS = 0 };
    typedef int (*encode_fn)(cu_map *, int type, uint32_t rank, void *, const uint64_t *dims, const uint64_t *strides,
                             const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion,
                             int fill);
    static encode_fn encode; /* a race sets the same value twice */
    if (!encode) {
        void *found = NULL;
        cudaDriverEntryPointQueryResult how;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how) ||
            how != cudaDriverEntryPointSuccess)
            return false;
        encode = (encode_fn)found;
    }
    const uint32_t steps[5] = {1, 1, 1, 1, 1};
    return !encode(map, TYPE_UINT8, rank, (void *)base, dims, strides, box, steps, INTERLEAVE_NONE, SWIZZLE_128B,
                   L2_PROMOTION_256B, FILL_ZEROS);
}
/* A box of a two-dimensional map from (x, y) on; its bytes complete on the barrier. One thread. */
__device__ static inline void cu_map_load(uint32_t smem, const cu_map &map, int x, int y, uint64_t *bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem),
                 "l"(&map), "r"(x), "r"(y), "r"(cu_smem(bar))
                 : "memory");
}
/* A box from shared memory to the array of a two-dimensional map; what lies outside is left out. Commit and wait as
 * with cu_bulk_store. */
__device__ static inline void cu_map_store(const cu_map &map, int x, int y, uint32_t smem) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
                 "r"(y), "r"(smem)
                 : "memory");
}
/* Of a four-dimensional one from (x, 0, y, 0) on. */
__device__ static inline void cu_map_load4(uint32_t smem, const cu_map &map, int x, int y, uint64_t *bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %3}], [%5];" ::"r"(smem),
                 "l"(&map), "r"(x), "r"(0), "r"(y), "r"(cu_smem(bar))
                 : "memory");
}

/* Orders this thread's ordinary writes of shared memory before reads by wgmma or the copy engine; then a barrier. */
__device__ static inline void cu_fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- clusters ----------------------------------------------------------------------------------------------------
 */

__device__ static inline uint32_t cu_cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ static inline uint32_t cu_cluster_size() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
}
__device__ static inline void cu_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ static inline void cu_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ static inline void cu_cluster_sync() {
    cu_cluster_arrive();
    cu_cluster_wait();
}
/* The address, in another block of the cluster, of what lies at smem here; for cu_dsmem_*. */
__device__ static inline uint32_t cu_mapa(uint32_t smem, uint32_t rank) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem), "r"(rank));
    return r;
}
__device__ static inline float cu_dsmem_load(uint32_t mapped) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(mapped) : "memory");
    return v;
}
__device__ static inline float4 cu_dsmem_load4(uint32_t mapped) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(mapped)
                 : "memory");
    return v;
}
__device__ static inline void cu_dsmem_store(uint32_t mapped, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(mapped), "f"(v) : "memory");
}

/* ---- warpgroup multiplies ----------------------------------------------------------------------------------------
 *     cu_wgmma_fence();  multiplies on one or more accumulators;  cu_wgmma_commit();  cu_wgmma_wait<0>();
 *
 * All 128 threads of a warpgroup (first warp divisible by 4) together. Until the wait returns nobody touches d, or a[]
 * of the register form. The fence comes after other writes of d or a[], not between multiplies on the same d.
 * Where the compiler might move uses of d over the wait, cu_wgmma_pin(d) holds them.
 *
 *   cu_wgmma_bf16_ss<B_MAJOR, A_MAJOR>(d, a_desc, b_desc, keep)   d (64 x N) = A (64 x 16) * B (16 x N) + keep * d
 *   cu_wgmma_bf16_rs<B_MAJOR>(d, a, b_desc, keep)                 A from registers, each warp its 16 rows
 *   cu_wgmma_e4m3_ss(d, a_desc, b_desc, keep)                     k = 32, both K-major
 *   cu_wgmma_e4m3_rs(d, a, b_desc, keep)
 *   cu_wgmma_s8_rs(d, a, b_desc, keep)                            likewise, of integers; d is int32_t, sums are exact
 *
 * N is twice the size of d[N/2]: 8, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256, bf16 also 72, s8 64 alone.
 * keep 0 overwrites d (first k step). B's rows of a K-major tile are n. Sums: bf16 in f32; e4m3 with fewer bits (about
 * 14) inside one instruction's k and across instructions of one accumulator, so long sums add partial results in f32
 * outside. */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define WGMMA_ASM(...) __trap()
#endif

__device__ static inline void cu_wgmma_fence() {
    WGMMA_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void cu_wgmma_commit() {
    WGMMA_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N groups are under way. */
template <int N> __device__ static inline void cu_wgmma_wait() {
    WGMMA_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N> __device__ static inline void cu_wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ static inline void cu_wgmma_pin(int32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(d[i])::"memory");
}

/* Holds one word of A likewise: before the fence, after what computes it. */
__device__ static inline void cu_pin(uint32_t &v) {
    asm volatile("" : "+r"(v)::"memory");
}

#include "wgmma_sm90.inc"

/* Registers of each thread of this warpgroup: producers give, consumers take. N: 24..256 by 8; needs a kernel with
 * __launch_bounds__(threads, 1). */
template <int N> __device__ static inline void cu_regs_give() {
    WGMMA_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ static inline void cu_regs_take() {
    WGMMA_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#undef WGMMA_ASM

/* ---- tensor cores by warps ---------------------------------------------------------------------------------------
 */

/* Four 8x8 matrices of 16-bit elements: lane l gives the address of row l%8 of matrix l/8 (16 bytes, aligned) and gets
 * in r[m] elements 2*(l%4) and +1 of row l/4 of matrix m. _trans: of the transposed matrix. */
__device__ static inline void cu_ldmatrix(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}
__device__ static inline void cu_ldmatrix_trans(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}
/* Two matrices; addresses of lanes 0..15 count. */
__device__ static inline void cu_ldmatrix2(uint32_t (&r)[2], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem)
                 : "memory");
}
__device__ static inline void cu_stmatrix(uint32_t smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ static inline void cu_stmatrix_trans(uint32_t smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
/* An 8x8 matrix held as cu_ldmatrix leaves it, transposed. */
__device__ static inline uint32_t cu_movmatrix(uint32_t v) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
/* d (16 x 8) += A (16 x 16) * B (16 x 8) in bf16, A (16 x 32) * B (32 x 8) in e4m3. */
__device__ static inline void cu_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ static inline void cu_mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- conversions and fast functions ------------------------------------------------------------------------------
 */

/* Two floats to bf16, to nearest even; lo in the low half. NaN becomes 7FFF. */
__device__ static inline uint32_t cu_pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
/* Two floats to e4m3, to nearest even, saturating at 448; lo in the low byte. */
__device__ static inline uint16_t cu_pack_e4m3(float lo, float hi) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}
/* Two e4m3 codes to f16 (exact), low byte in the low half. */
__device__ static inline uint32_t cu_e4m3x2_to_f16x2(uint16_t codes) {
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
    return r;
}
/* Product of two pairs of bf16, to nearest even; subnormals are kept, on both sides. */
__device__ static inline uint32_t cu_mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
/* Byte i of the result: byte pick_i & 7 of (a, b), a's first; where pick_i & 8, eight copies of that byte's top bit.
 * pick_i is the i-th hexadecimal digit of pick, from the right. */
__device__ static inline uint32_t cu_permute(uint32_t a, uint32_t b, uint32_t pick) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(pick));
    return r;
}
/* 2^x, within 2 ulps; subnormals are zero. */
__device__ static inline float cu_exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* ---- loads that pass once, prefetch ------------------------------------------------------------------------------
 * For memory that no one writes during the kernel. */

__device__ static inline uint4 cu_load16_once(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ static inline uint2 cu_load8_once(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ static inline uint32_t cu_load4_once(const void *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
/* What L2 shall do with the lines of an access: drop them first (streams), or keep them. */
__device__ static inline uint64_t cu_policy_first() {
    uint64_t r;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r));
    return r;
}
__device__ static inline uint64_t cu_policy_last() {
    uint64_t r;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(r));
    return r;
}
__device__ static inline uint4 cu_load16_hint(const void *p, uint64_t policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}
__device__ static inline uint2 cu_load8_hint(const void *p, uint64_t policy) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p), "l"(policy));
    return v;
}
__device__ static inline void cu_prefetch_l2(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
/* A stretch of memory, multiple of 16 bytes. */
__device__ static inline void cu_bulk_prefetch_l2(const void *p, uint32_t n_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(n_bytes) : "memory");
}

/* ---- one kernel after another ------------------------------------------------------------------------------------
 * Of kernels launched with programmatic serialisation; without it both do nothing. */

/* Until the kernels before have ended and their writes are seen. */
__device__ static inline void cu_grid_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
/* The next kernel may start (when all blocks have said so or ended). */
__device__ static inline void cu_grid_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/* Both in turn, where a kernel has nothing to do before. */
__device__ static inline void cu_grid_begin() {
    cu_grid_wait();
    cu_grid_launch();
}

/* 1/x to an ulp, of a normal x; bits are the chip's. */
__device__ static inline float cu_reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* True in one lane of a converged warp. */
__device__ static inline bool cu_elect() {
    uint32_t r;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(r));
    return r;
}

/* ---- launch of clusters ------------------------------------------------------------------------------------------
 * As DI_LAUNCH for a kernel whose blocks work in clusters; cluster (dim3) divides grid in every dimension. */
#define DI_LAUNCH_CLUSTER_(kernel, cluster, grid, block, smem, queue, n_attributes, ...)                               \
    do {                                                                                                               \
        static int di_allowed_ = 48 * 1024;                                                                            \
        if (di_allowed_ < (int)(smem)) {                                                                               \
            (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(smem));              \
            di_allowed_ = (int)(smem);                                                                                 \
        }                                                                                                              \
        dim3 di_cluster_(cluster);                                                                                     \
        cudaLaunchAttribute di_attribute_[2] = {};                                                                     \
        di_attribute_[0].id = cudaLaunchAttributeClusterDimension;                                                     \
        di_attribute_[0].val.clusterDim.x = di_cluster_.x;                                                             \
        di_attribute_[0].val.clusterDim.y = di_cluster_.y;                                                             \
        di_attribute_[0].val.clusterDim.z = di_cluster_.z;                                                             \
        di_attribute_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;                                      \
        di_attribute_[1].val.programmaticStreamSerializationAllowed = 1;                                               \
        cudaLaunchConfig_t di_config_ = {};                                                                            \
        di_config_.gridDim = dim3(grid);                                                                               \
        di_config_.blockDim = dim3(block);                                                                             \
        di_config_.dynamicSmemBytes = (size_t)(smem);                                                                  \
        di_config_.stream = (queue);                                                                                   \
        di_config_.attrs = di_attribute_;                                                                              \
        di_config_.numAttrs = (n_attributes);                                                                          \
        (void)cudaLaunchKernelEx(&di_config_, kernel, __VA_ARGS__); /* cudaGetLastError tells */                       \
    } while (0)
#define DI_LAUNCH_CLUSTER(kernel, cluster, grid, block, smem, queue, ...)                                              \
    DI_LAUNCH_CLUSTER_(kernel, cluster, grid, block, smem, queue, 1, __VA_ARGS__)
/* With what DI_LAUNCH_PDL says. */
#define DI_LAUNCH_CLUSTER_PDL(kernel, cluster, grid, block, smem, queue, ...)                                          \
    DI_LAUNCH_CLUSTER_(kernel, cluster, grid, block, smem, queue, 2, __VA_ARGS__)

#else
#define DI_LAUNCH_CLUSTER_PDL DI_LAUNCH_CLUSTER
#endif /* DI_EMU */

#endif
