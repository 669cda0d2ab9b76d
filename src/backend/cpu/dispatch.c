/* Which kernel runs an operation: levels fill the kernel table from the slowest up, and the operation table calls it.
 *
 * A level is a set of files compiled alone with their flags; each exports functions that overwrite entries. What the
 * processor has is asked of cpuid, what the system saves at a switch of threads of xgetbv, and AMX's tiles need the
 * kernel's permission besides. Every level gives the same bits, so the choice is of speed alone. */
#include <errno.h>

#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const char *const level_names[DI_CPU_LEVEL_COUNT] = {
    "ref",  "portable",
#if defined(__x86_64__)
    "avx2", "avx512",   "amx",
#elif defined(__aarch64__)
    "neon",
#endif
};

const char *di_cpu_level_name(di_cpu_level level) {
    return level_names[level];
}

/* ---- what this machine has ---- */

#if defined(__x86_64__)
/* arch_prctl: which states the kernel can hand out, and asking for one. */
enum { PRCTL_GET_XCOMP_SUPP = 0x1021, PRCTL_REQ_XCOMP_PERM = 0x1023 };
enum { STATE_SSE = 1, STATE_AVX = 2, STATE_AVX512 = 5 /* and 6, 7 */, STATE_TILECFG = 17, STATE_TILEDATA = 18 };

static bool has_all(uint64_t found, uint64_t wanted) {
    return (found & wanted) == wanted;
}

#define BIT(n) ((uint64_t)1 << (n))

di_cpu_level di_cpu_level_best(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return DI_CPU_PORTABLE;
    const uint64_t fma = BIT(12), osxsave = BIT(27), avx = BIT(28), f16c = BIT(29);
    if (!has_all(c, fma | osxsave | avx | f16c))
        return DI_CPU_PORTABLE;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    uint64_t saved = (uint64_t)high << 32 | low;
    if (!has_all(saved, BIT(STATE_SSE) | BIT(STATE_AVX)) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return DI_CPU_PORTABLE;
    const uint64_t avx2 = BIT(5), bmi2 = BIT(8), avx512_f = BIT(16), avx512_dq = BIT(17), avx512_bw = BIT(30),
                   avx512_vl = BIT(31), avx512_vbmi = BIT(1) /* in ecx */;
    const uint64_t amx_bf16 = BIT(22), amx_tile = BIT(24); /* in edx */
    if (!has_all(b, avx2 | bmi2))
        return DI_CPU_PORTABLE;
    if (!has_all(b, avx512_f | avx512_dq | avx512_bw | avx512_vl) || !has_all(saved, (uint64_t)7 << STATE_AVX512))
        return DI_CPU_AVX2;
    bool has_amx = has_all(c, avx512_vbmi) && has_all(d, amx_bf16 | amx_tile) &&
                   has_all(saved, BIT(STATE_TILECFG) | BIT(STATE_TILEDATA));
    const uint64_t avx512_bf16 = BIT(5);
    uint64_t states = 0;
    has_amx = has_amx && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_all(a, avx512_bf16) &&
              syscall(SYS_arch_prctl, PRCTL_GET_XCOMP_SUPP, &states) == 0 && has_all(states, BIT(STATE_TILEDATA));
    return has_amx ? DI_CPU_AMX : DI_CPU_AVX512;
}

di_status di_cpu_level_permit(di_cpu_level level, di_error *err) {
    if (level >= DI_CPU_AMX && syscall(SYS_arch_prctl, PRCTL_REQ_XCOMP_PERM, (unsigned long)STATE_TILEDATA) != 0) {
        return di_fail(err, DI_ERR_DEVICE, "cpu: the kernel refuses the tile registers of AMX: %s; use level 'avx512'",
                       strerror(errno));
    }
    return DI_OK;
}
#else
di_cpu_level di_cpu_level_best(void) {
    return (di_cpu_level)(DI_CPU_LEVEL_COUNT - 1);
}

di_status di_cpu_level_permit(di_cpu_level level, di_error *err) {
    (void)level, (void)err;
    return DI_OK;
}
#endif

di_status di_cpu_level_find(const char *name, di_cpu_level *out, di_error *err) {
    di_cpu_level best = di_cpu_level_best();
    if (!name || strcmp(name, "auto") == 0) {
        *out = best;
        return DI_OK;
    }
    for (int level = 0; level <= (int)best; level++) {
        if (strcmp(name, level_names[level]) == 0) {
            *out = (di_cpu_level)level;
            return DI_OK;
        }
    }
    static const char *const all[] = {"neon", "avx2", "avx512", "amx"};
    for (size_t i = 0; i < DI_COUNT(all); i++) {
        if (strcmp(name, all[i]) == 0) {
            return di_fail(err, DI_ERR_DEVICE,
                           "instruction-set level '%s' asked for, but the highest of this machine is '%s'; use 'auto'",
                           name, level_names[best]);
        }
    }
    return di_fail(err, DI_ERR_ARG,
                   "instruction-set level '%s' is unknown; expected auto, ref, portable, neon, avx2, avx512 or amx",
                   name);
}

/* ---- the kernel table ---- */

static const struct {
    di_cpu_level level;
    void (*install)(di_cpu_kernels *k);
} installs[] = {
    {DI_CPU_REF, di_cpu_install_ref_dense},
    {DI_CPU_REF, di_cpu_install_ref_gemm},
    {DI_CPU_REF, di_cpu_install_ref_hc},
    {DI_CPU_REF, di_cpu_install_ref_engram},
    {DI_CPU_REF, di_cpu_install_ref_moe},
    {DI_CPU_REF, di_cpu_install_ref_kv},
    {DI_CPU_REF, di_cpu_install_ref_index},
    {DI_CPU_REF, di_cpu_install_ref_attention},
    {DI_CPU_REF, di_cpu_install_ref_draft},
    {DI_CPU_PORTABLE, di_cpu_install_portable_peak},
    {DI_CPU_PORTABLE, di_cpu_install_portable_dense},
    {DI_CPU_PORTABLE, di_cpu_install_portable_gemm},
    {DI_CPU_PORTABLE, di_cpu_install_portable_hc},
    {DI_CPU_PORTABLE, di_cpu_install_portable_moe},
    {DI_CPU_PORTABLE, di_cpu_install_portable_index},
    {DI_CPU_PORTABLE, di_cpu_install_portable_attention},
#if defined(__x86_64__)
    {DI_CPU_AVX2, di_cpu_install_avx2_peak},
    {DI_CPU_AVX2, di_cpu_install_avx2_dense},
    {DI_CPU_AVX2, di_cpu_install_avx2_gemm},
    {DI_CPU_AVX2, di_cpu_install_avx2_hc},
    {DI_CPU_AVX2, di_cpu_install_avx2_moe},
    {DI_CPU_AVX2, di_cpu_install_avx2_index},
    {DI_CPU_AVX2, di_cpu_install_avx2_attention},
    {DI_CPU_AVX512, di_cpu_install_avx512_peak},
    {DI_CPU_AVX512, di_cpu_install_avx512_dense},
    {DI_CPU_AVX512, di_cpu_install_avx512_gemm},
    {DI_CPU_AVX512, di_cpu_install_avx512_hc},
    {DI_CPU_AVX512, di_cpu_install_avx512_moe},
    {DI_CPU_AVX512, di_cpu_install_avx512_kv},
    {DI_CPU_AVX512, di_cpu_install_avx512_index},
    {DI_CPU_AVX512, di_cpu_install_avx512_attention},
    {DI_CPU_AVX512, di_cpu_install_avx512_wide},
    {DI_CPU_AMX, di_cpu_install_amx_peak},
    {DI_CPU_AMX, di_cpu_install_amx_wide},
    {DI_CPU_AMX, di_cpu_install_amx_index},
    {DI_CPU_AMX, di_cpu_install_amx_attention},
#elif defined(__aarch64__)
    {DI_CPU_NEON, di_cpu_install_neon_gemm},
    {DI_CPU_NEON, di_cpu_install_neon_moe},
#endif
};

void di_cpu_kernels_init(di_cpu_kernels *k, di_cpu_level level) {
    *k = (di_cpu_kernels){0};
    for (size_t i = 0; i < DI_COUNT(installs); i++) {
        if (installs[i].level <= level)
            installs[i].install(k);
    }
}

/* Each entry of the operation table takes the device, sets flush-to-zero for the caller's part of the work, and runs
 * the kernel of the device's level. */
#define RUN(f)                                                                                                         \
    static di_status run_##f(di_stream *stream, const di_##f##_args *args) {                                           \
        di_device *dev = stream->dev;                                                                                  \
        pthread_mutex_lock(&dev->lock);                                                                                \
        uint64_t mode = di_cpu_fp_flush();                                                                             \
        di_status st = dev->kernels.f(stream, args);                                                                   \
        di_cpu_fp_restore(mode);                                                                                       \
        pthread_mutex_unlock(&dev->lock);                                                                              \
        if (st)                                                                                                        \
            stream->refused = #f;                                                                                      \
        return st;                                                                                                     \
    }
DI_OPS_LIST(RUN)
RUN(feed)
#undef RUN

const di_ops di_cpu_ops = {.abi = DI_BACKEND_ABI,
                           .size = sizeof(di_ops),
                           .name = "cpu",
#define ENTRY(f) .f = run_##f,
                           DI_OPS_LIST(ENTRY) ENTRY(feed)
#undef ENTRY
};
