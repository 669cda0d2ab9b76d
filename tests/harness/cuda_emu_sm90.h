/* sm90.cuh's functions on the host: Hopper's copies, barriers, clusters and tensor cores as the hardware defines them.
 *
 * Part of cuda_emu.h; sm90.cuh leaves its PTX out. The machine behind is cuda_emu.cpp. Descriptors, swizzles
 * and fragments are decoded from their bits, so a kernel whose layouts are wrong gives wrong numbers here too.
 * Products are exact; sums are float in rising k, where the hardware keeps fewer bits and adds in its own order.
 * Source: PTX ISA, as sm90.cuh. */
#ifndef DI_TEST_CUDA_EMU_SM90_H
#define DI_TEST_CUDA_EMU_SM90_H

/* ---- the machine's side --------------------------------------------------------------------------------------------
 */

uint32_t di_emu_address(const void *p);                   /* of a shared variable */
void *di_emu_pointer(uint32_t address, uint32_t n_bytes); /* checked */

void di_emu_cp(uint32_t smem, const void *global, uint32_t n_read, uint32_t n_bytes);
void di_emu_cp_commit();
void di_emu_cp_wait(unsigned n);

void di_emu_mbar_init(uint32_t bar, uint32_t n_arrivals);
void di_emu_mbar_inval(uint32_t bar);
void di_emu_mbar_arrive(uint32_t bar, bool counts, int64_t n_bytes);
void di_emu_mbar_arrive_cp(uint32_t bar);
bool di_emu_mbar_test(uint32_t bar, uint32_t parity);
void di_emu_mbar_wait(uint32_t bar, uint32_t parity);

void di_emu_bulk_load(uint32_t smem, const void *global, uint32_t n_bytes, uint32_t bar, uint32_t blocks);
void di_emu_bulk_store(void *global, uint32_t smem, uint32_t n_bytes);
void di_emu_bulk_commit();
void di_emu_bulk_wait(unsigned n);

uint32_t di_emu_cluster_rank();
uint32_t di_emu_cluster_size();
void di_emu_cluster_arrive();
void di_emu_cluster_wait();
uint32_t di_emu_mapa(uint32_t smem, uint32_t rank);

struct di_emu_multiply { /* one warpgroup multiply as a thread issues it */
    int n;
    bool is_e4m3, has_a_registers, is_a_mn, is_b_mn;
    uint64_t a_desc, b_desc;
    bool keep;
    bool is_s8; /* with is_e4m3: 8-bit integers in its place, d the bits of int32_t */
};
void di_emu_wgmma(const di_emu_multiply &m, float *d, const uint32_t *a);
void di_emu_wgmma_commit();
void di_emu_wgmma_wait(unsigned n);

void di_emu_ldmatrix(uint32_t *r, uint32_t smem, int n, bool is_trans);
void di_emu_stmatrix(uint32_t smem, const uint32_t *r, int n, bool is_trans);
void di_emu_mma(float *d, const uint32_t *a, const uint32_t *b, bool is_e4m3);
uint32_t di_emu_movmatrix(uint32_t v);

float di_emu_e4m3_to_f32(uint8_t code);
uint8_t di_emu_f32_to_e4m3(float f);              /* to nearest even, saturating */
uint16_t di_emu_mul_bf16(uint16_t a, uint16_t b); /* with subnormals */

/* ---- sm90.cuh's functions ------------------------------------------------------------------------------------------
 */

static inline uint32_t cu_smem(const void *p) {
    return di_emu_address(p);
}

static inline void cu_cp16(uint32_t smem, const void *global) {
    di_emu_cp(smem, global, 16, 16);
}
static inline void cu_cp16_zfill(uint32_t smem, const void *global, uint32_t n_bytes) {
    di_emu_cp(smem, global, n_bytes, 16);
}
template <int BYTES> static inline void cu_cp(uint32_t smem, const void *global) {
    di_emu_cp(smem, global, BYTES, BYTES);
}
static inline void cu_cp_commit() {
    di_emu_cp_commit();
}
template <int N> static inline void cu_cp_wait() {
    di_emu_cp_wait(N);
}

static inline void cu_mbar_init(uint64_t *bar, uint32_t n_arrivals) {
    di_emu_mbar_init(cu_smem(bar), n_arrivals);
}
static inline void cu_mbar_inval(uint64_t *bar) {
    di_emu_mbar_inval(cu_smem(bar));
}
static inline void cu_fence_mbar_init() {
}
static inline void cu_mbar_arrive(uint32_t bar) {
    di_emu_mbar_arrive(bar, true, 0);
}
static inline void cu_mbar_arrive(uint64_t *bar) {
    cu_mbar_arrive(cu_smem(bar));
}
static inline void cu_mbar_arrive_expect(uint64_t *bar, uint32_t n_bytes) {
    di_emu_mbar_arrive(cu_smem(bar), true, n_bytes);
}
static inline void cu_mbar_expect(uint64_t *bar, uint32_t n_bytes) {
    di_emu_mbar_arrive(cu_smem(bar), false, n_bytes);
}
static inline void cu_mbar_arrive_remote(uint64_t *bar, uint32_t rank) {
    di_emu_mbar_arrive(di_emu_mapa(cu_smem(bar), rank), true, 0);
}
static inline void cu_mbar_arrive_cp(uint64_t *bar) {
    di_emu_mbar_arrive_cp(cu_smem(bar));
}
static inline bool cu_mbar_try_wait(uint64_t *bar, uint32_t parity) {
    return di_emu_mbar_test(cu_smem(bar), parity);
}
static inline void cu_mbar_wait(uint32_t bar, uint32_t parity) {
    di_emu_mbar_wait(bar, parity);
}
static inline void cu_mbar_wait(uint64_t *bar, uint32_t parity) {
    di_emu_mbar_wait(cu_smem(bar), parity);
}
static inline void cu_mbar_wait_cluster(uint64_t *bar, uint32_t parity) {
    di_emu_mbar_wait(cu_smem(bar), parity);
}
static inline void cu_bar_sync(uint32_t id, uint32_t n_threads) {
    (void)di_emu_barrier(id, n_threads, 0, 0);
}
static inline void cu_bar_arrive(uint32_t id, uint32_t n_threads) {
    di_emu_barrier_arrive(id, n_threads);
}

static inline void cu_bulk_load(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar) {
    di_emu_bulk_load(smem, global, n_bytes, cu_smem(bar), 0);
}
static inline void cu_bulk_load_hint(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar, uint64_t) {
    di_emu_bulk_load(smem, global, n_bytes, cu_smem(bar), 0);
}
static inline void cu_bulk_load_multicast(uint32_t smem, const void *global, uint32_t n_bytes, uint64_t *bar,
                                          uint16_t blocks) {
    di_emu_bulk_load(smem, global, n_bytes, cu_smem(bar), blocks);
}
static inline void cu_bulk_store(void *global, uint32_t smem, uint32_t n_bytes) {
    di_emu_bulk_store(global, smem, n_bytes);
}
static inline void cu_bulk_commit() {
    di_emu_bulk_commit();
}
template <int N> static inline void cu_bulk_wait() {
    di_emu_bulk_wait(N);
}
template <int N> static inline void cu_bulk_wait_read() {
    di_emu_bulk_wait(N);
}
struct cu_map {
    const uint8_t *base;
    unsigned rank;
    uint64_t dims[5], strides[5];
    uint32_t box[5];
};
static inline bool cu_map_make(cu_map *map, const void *base, unsigned rank, const uint64_t *dims,
                               const uint64_t *strides, const uint32_t *box) {
    *map = {(const uint8_t *)base, rank, {1, 1, 1, 1, 1}, {1}, {1, 1, 1, 1, 1}};
    bool is_right = (uintptr_t)base % 16 == 0 && box[0] == 128;
    for (unsigned i = 0; i < rank; i++) {
        map->dims[i] = dims[i];
        map->strides[i] = i ? strides[i - 1] : 1;
        map->box[i] = box[i];
        is_right = is_right && box[i] >= 1 && box[i] <= 256 && (i == 0 || strides[i - 1] % 16 == 0);
    }
    return is_right;
}
static inline void di_emu_map_load(uint32_t smem, const cu_map &map, const int (&from)[5], uint64_t *bar) {
    alignas(16) static const uint8_t zeros[16] = {0};
    DI_EMU_CHECK(smem % 1024 == 0, "a box goes to 0x%x: not a multiple of 1024", smem);
    uint32_t n_rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint8_t *row = map.base;
        uint32_t rest = r;
        bool is_in = true;
        for (int i = 1; i < 5; i++) {
            int64_t at = from[i] + (int64_t)(rest % map.box[i]);
            rest /= map.box[i];
            is_in = is_in && at >= 0 && at < (int64_t)map.dims[i];
            row += at * (int64_t)map.strides[i];
        }
        for (uint32_t c = 0; c < 8; c++) {
            int64_t at = from[0] + (int64_t)c * 16;
            bool has = is_in && at >= 0 && at + 16 <= (int64_t)map.dims[0];
            di_emu_bulk_load(smem + r * 128 + ((c ^ (r & 7)) << 4), has ? row + at : zeros, 16, cu_smem(bar), 0);
        }
    }
}
static inline void cu_map_load(uint32_t smem, const cu_map &map, int x, int y, uint64_t *bar) {
    di_emu_map_load(smem, map, {x, y, 0, 0, 0}, bar);
}
static inline void cu_map_store(const cu_map &map, int x, int y, uint32_t smem) {
    DI_EMU_CHECK(smem % 1024 == 0, "a box comes from 0x%x: not a multiple of 1024", smem);
    for (uint32_t r = 0; r < map.box[1]; r++) {
        for (uint32_t c = 0; c < 8; c++) {
            int64_t row = y + (int64_t)r, at = x + (int64_t)c * 16;
            if (row >= 0 && row < (int64_t)map.dims[1] && at >= 0 && at + 16 <= (int64_t)map.dims[0])
                di_emu_bulk_store((uint8_t *)map.base + row * (int64_t)map.strides[1] + at,
                                  smem + r * 128 + ((c ^ (r & 7)) << 4), 16);
        }
    }
}
static inline void cu_map_load4(uint32_t smem, const cu_map &map, int x, int y, uint64_t *bar) {
    di_emu_map_load(smem, map, {x, 0, y, 0, 0}, bar);
}
static inline void cu_fence_async() {
}

static inline uint32_t cu_cluster_rank() {
    return di_emu_cluster_rank();
}
static inline uint32_t cu_cluster_size() {
    return di_emu_cluster_size();
}
static inline void cu_cluster_arrive() {
    di_emu_cluster_arrive();
}
static inline void cu_cluster_wait() {
    di_emu_cluster_wait();
}
static inline void cu_cluster_sync() {
    cu_cluster_arrive();
    cu_cluster_wait();
}
static inline uint32_t cu_mapa(uint32_t smem, uint32_t rank) {
    return di_emu_mapa(smem, rank);
}
static inline float4 cu_smem_load4(uint32_t smem) {
    return *(const float4 *)di_emu_pointer(smem, 16);
}
static inline float cu_dsmem_load(uint32_t mapped) {
    return *(const volatile float *)di_emu_pointer(mapped, 4);
}
static inline float4 cu_dsmem_load4(uint32_t mapped) {
    return *(const float4 *)di_emu_pointer(mapped, 16);
}
static inline void cu_dsmem_store(uint32_t mapped, float v) {
    *(volatile float *)di_emu_pointer(mapped, 4) = v;
}

static inline void cu_wgmma_fence() {
}
static inline void cu_wgmma_commit() {
    di_emu_wgmma_commit();
}
template <int N> static inline void cu_wgmma_wait() {
    di_emu_wgmma_wait(N);
}
template <int N> static inline void cu_wgmma_pin(float (&)[N]) {
}
template <int N> static inline void cu_wgmma_pin(int32_t (&)[N]) {
}
static inline void cu_pin(uint32_t &) {
}
template <int B_MAJOR = 0, int A_MAJOR = 0, int H>
static inline void cu_wgmma_bf16_ss(float (&d)[H], uint64_t a, uint64_t b, int keep) {
    di_emu_wgmma({2 * H, false, false, A_MAJOR != 0, B_MAJOR != 0, a, b, keep != 0, false}, d, NULL);
}
template <int B_MAJOR = 0, int H>
static inline void cu_wgmma_bf16_rs(float (&d)[H], const uint32_t (&a)[4], uint64_t b, int keep) {
    di_emu_wgmma({2 * H, false, true, false, B_MAJOR != 0, 0, b, keep != 0, false}, d, a);
}
template <int H> static inline void cu_wgmma_e4m3_ss(float (&d)[H], uint64_t a, uint64_t b, int keep) {
    di_emu_wgmma({2 * H, true, false, false, false, a, b, keep != 0, false}, d, NULL);
}
template <int H> static inline void cu_wgmma_e4m3_rs(float (&d)[H], const uint32_t (&a)[4], uint64_t b, int keep) {
    di_emu_wgmma({2 * H, true, true, false, false, 0, b, keep != 0, false}, d, a);
}
template <int H> static inline void cu_wgmma_s8_rs(int32_t (&d)[H], const uint32_t (&a)[4], uint64_t b, int keep) {
    di_emu_wgmma({2 * H, true, true, false, false, 0, b, keep != 0, true}, (float *)(void *)d, a);
}
template <int N> static inline void cu_regs_give() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers by eights");
}
template <int N> static inline void cu_regs_take() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers by eights");
}

static inline void cu_ldmatrix(uint32_t (&r)[4], uint32_t smem) {
    di_emu_ldmatrix(r, smem, 4, false);
}
static inline void cu_ldmatrix_trans(uint32_t (&r)[4], uint32_t smem) {
    di_emu_ldmatrix(r, smem, 4, true);
}
static inline void cu_ldmatrix2(uint32_t (&r)[2], uint32_t smem) {
    di_emu_ldmatrix(r, smem, 2, false);
}
static inline void cu_stmatrix(uint32_t smem, const uint32_t (&r)[4]) {
    di_emu_stmatrix(smem, r, 4, false);
}
static inline void cu_stmatrix_trans(uint32_t smem, const uint32_t (&r)[4]) {
    di_emu_stmatrix(smem, r, 4, true);
}
static inline uint32_t cu_movmatrix(uint32_t v) {
    return di_emu_movmatrix(v);
}
static inline void cu_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    di_emu_mma(d, a, b, false);
}
static inline void cu_mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    di_emu_mma(d, a, b, true);
}

static inline uint32_t cu_pack_bf16(float lo, float hi) {
    return (uint32_t)__float2bfloat16(hi).x << 16 | __float2bfloat16(lo).x;
}
static inline uint16_t cu_pack_e4m3(float lo, float hi) {
    return (uint16_t)(di_emu_f32_to_e4m3(hi) << 8 | di_emu_f32_to_e4m3(lo));
}
static inline uint32_t cu_e4m3x2_to_f16x2(uint16_t codes) {
    return (uint32_t)di_emu_f32_to_f16(di_emu_e4m3_to_f32((uint8_t)(codes >> 8))) << 16 |
           di_emu_f32_to_f16(di_emu_e4m3_to_f32((uint8_t)codes));
}
static inline uint32_t cu_mul_bf16x2(uint32_t a, uint32_t b) {
    return (uint32_t)di_emu_mul_bf16((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16 |
           di_emu_mul_bf16((uint16_t)a, (uint16_t)b);
}
static inline uint32_t cu_permute(uint32_t a, uint32_t b, uint32_t pick) {
    uint64_t from = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++, pick >>= 4) {
        uint32_t byte = (uint32_t)(from >> (pick & 7) * 8) & 0xFFu;
        r |= (pick & 8 ? (byte >> 7) * 0xFFu : byte) << 8 * i;
    }
    return r;
}
static inline float cu_exp2_fast(float x) {
    return exp2f(x);
}

template <class T> static inline T di_emu_load(const void *p) {
    DI_EMU_CHECK((uintptr_t)p % sizeof(T) == 0, "load of %zu bytes from %p: misaligned", sizeof(T), p);
    return *(const T *)p;
}
static inline uint4 cu_load16_once(const void *p) {
    return di_emu_load<uint4>(p);
}
static inline uint2 cu_load8_once(const void *p) {
    return di_emu_load<uint2>(p);
}
static inline uint32_t cu_load4_once(const void *p) {
    return di_emu_load<uint32_t>(p);
}
static inline uint64_t cu_policy_first() {
    return 1;
}
static inline uint64_t cu_policy_last() {
    return 2;
}
static inline uint4 cu_load16_hint(const void *p, uint64_t) {
    return di_emu_load<uint4>(p);
}
static inline uint2 cu_load8_hint(const void *p, uint64_t) {
    return di_emu_load<uint2>(p);
}
static inline void cu_prefetch_l2(const void *) {
}
static inline void cu_bulk_prefetch_l2(const void *p, uint32_t n_bytes) {
    DI_EMU_CHECK((uintptr_t)p % 16 == 0 && n_bytes % 16 == 0, "prefetch of %u bytes at %p: not by 16", n_bytes, p);
}
static inline void cu_grid_wait() {
}
static inline void cu_grid_launch() {
}
static inline void cu_grid_begin() {
}
static inline float cu_reciprocal(float x) {
    return 1.0f / x;
}
static inline bool cu_elect() {
    return di_emu_now->lane == 0;
}

#endif
