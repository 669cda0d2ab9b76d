/* Which kernel runs an operation: levels fill the kernel table from the slowest up, and the operation table calls it.
 *
 * A level is a set of files compiled alone with their flags; each exports functions that overwrite entries. A new
 * instruction set gets a value of di_cpu_level after DI_CPU_PORTABLE, its probe in di_cpu_level_best and its row below.
 * Every level gives the same bits, so the choice is of speed alone. */
#include "cpu.h"

static const char *const level_names[DI_CPU_LEVEL_COUNT] = {"ref", "portable"};

const char *di_cpu_level_name(di_cpu_level level) {
    return level_names[level];
}

di_cpu_level di_cpu_level_best(void) {
    return DI_CPU_PORTABLE;
}

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
    {DI_CPU_PORTABLE, di_cpu_install_portable_dense},
    {DI_CPU_PORTABLE, di_cpu_install_portable_gemm},
    {DI_CPU_PORTABLE, di_cpu_install_portable_hc},
    {DI_CPU_PORTABLE, di_cpu_install_portable_moe},
    {DI_CPU_PORTABLE, di_cpu_install_portable_index},
    {DI_CPU_PORTABLE, di_cpu_install_portable_attention},
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
#undef RUN

const di_ops di_cpu_ops = {.abi = DI_BACKEND_ABI,
                           .size = sizeof(di_ops),
                           .name = "cpu",
#define ENTRY(f) .f = run_##f,
                           DI_OPS_LIST(ENTRY)
#undef ENTRY
};
