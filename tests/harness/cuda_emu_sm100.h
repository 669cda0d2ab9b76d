/* sm100.cuh's functions on the host: Blackwell's tensor memory and block-scaled multiplies as they are documented.
 *
 * Part of cuda_emu.h; sm100.cuh leaves its PTX out. The machine behind is cuda_emu.cpp, the meaning of descriptors and
 * of tensor memory cuda_emu_tensor.h. Source: PTX ISA, as sm100.cuh. */
#ifndef DI_TEST_CUDA_EMU_SM100_H
#define DI_TEST_CUDA_EMU_SM100_H

void di_emu_tmem_take(uint32_t *to, uint32_t n);
void di_emu_tmem_done();
void di_emu_tmem_give(uint32_t tmem, uint32_t n);
void di_emu_tmem_load(float *v, int n, uint32_t tmem);
void di_emu_tc_scales(uint32_t tmem, uint64_t desc);
void di_emu_tc_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scale, uint32_t b_scale,
                        bool keep);
void di_emu_tc_commit(uint32_t bar);

static inline void cu_tmem_take(uint32_t *to, uint32_t n) {
    di_emu_tmem_take(to, n);
}
static inline void cu_tmem_done() {
    di_emu_tmem_done();
}
static inline void cu_tmem_give(uint32_t tmem, uint32_t n) {
    di_emu_tmem_give(tmem, n);
}
static inline void cu_tc_fence_before() {
}
static inline void cu_tc_fence_after() {
}
static inline void cu_tc_commit(uint64_t *bar) {
    di_emu_tc_commit(cu_smem(bar));
}
static inline void cu_tc_scales(uint32_t tmem, uint64_t desc) {
    di_emu_tc_scales(tmem, desc);
}
static inline void cu_tc_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scale, uint32_t b_scale,
                                  bool keep) {
    di_emu_tc_multiply(d, a, b, kind, a_scale, b_scale, keep);
}
static inline void cu_tmem_load16(float (&v)[16], uint32_t tmem) {
    di_emu_tmem_load(v, 16, tmem);
}

#endif
