/* The functions of sm90.cuh on whatever runs them, a Hopper GPU or the emulation; the kernels are in sm90_test.cu. */
#include "harness.h"

#ifdef DI_TWIN_EMU
#include "cuda_emu_api.h"
#define MAYBE
#else
#define MAYBE __attribute__((weak))
#endif

/* The kernels are linked in where a compiler for them is. */
static void check(const char *(*family)(uint64_t seed), uint64_t seed) {
    if (!family) /* MAYBE */
        di_test_skip("built without the kernels of sm90_test.cu");
    const char *text = family(seed);
    if (text && strncmp(text, "skip", 4) == 0)
        di_test_skip("%s", text);
    if (text)
        fail_msg("%s", text);
}

/* Emulated threads take turns in several orders, and copies and multiplies happen early and late. */
static void check_all(const char *(*family)(uint64_t seed), uint64_t seed) {
#ifdef DI_TWIN_EMU
    for (int i = 0; i < 4; i++) {
        di_emu_set_schedule(i < 2 ? 0 : seed + (uint64_t)i, i % 2);
        check(family, seed + (uint64_t)i);
    }
    di_emu_set_schedule(0, true);
#else
    check(family, seed);
#endif
}

#define FAMILY(name, n_runs)                                                                                           \
    MAYBE const char *di_test_sm90_##name(uint64_t seed);                                                              \
    DI_PROPERTY(name, n_runs) {                                                                                        \
        check_all(di_test_sm90_##name, seed);                                                                          \
    }
FAMILY(wgmma_bf16_shared, 1)
FAMILY(wgmma_bf16_registers, 1)
FAMILY(wgmma_e4m3, 1)
FAMILY(mma, 5)
FAMILY(copies, 5)
FAMILY(clusters, 5)
FAMILY(conversions, 1)
FAMILY(warps, 5)

DI_TEST_GROUP(sm90, cmocka_unit_test(wgmma_bf16_shared), cmocka_unit_test(wgmma_bf16_registers),
              cmocka_unit_test(wgmma_e4m3), cmocka_unit_test(mma), cmocka_unit_test(copies), cmocka_unit_test(clusters),
              cmocka_unit_test(conversions), cmocka_unit_test(warps));
