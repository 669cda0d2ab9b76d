/* The emulated GPU as C tests see it: opening the NVIDIA backend over it, and how the emulation schedules.
 *
 * The library di_cuda_emu holds the whole backend, compiled as C++ over cuda_emu.h; its device is an H200 of a host's
 * speed with 132 multiprocessors. Device memory is host memory. */
#ifndef DI_TEST_CUDA_EMU_API_H
#define DI_TEST_CUDA_EMU_API_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* seed 0: threads take turns in rising order; else in an order that the seed shuffles. is_late: asynchronous copies and
 * multiplies happen when they are waited for, else at once. The default is 0, true, or what the environment says, as
 * DI_EMU_SCHEDULE=7,early. Between launches. */
void di_emu_set_schedule(uint64_t seed, bool is_late);
/* Threads of the host that run blocks, the caller counted; 0, the default: all processors, at most 16. */
void di_emu_set_threads(int n_threads);
/* Compute capability of the device that is found from then on: 9 (H200, the default), 10, 12. */
void di_emu_set_capability(int major);
/* Launches so far, and the message of the last one that failed ("" = none yet). */
int64_t di_emu_launches(void);
const char *di_emu_last_failure(void);
/* Messages of failed launches go to stderr, unless a test expects them. */
void di_emu_set_quiet(bool is_quiet);

#ifdef __cplusplus
}
#endif

#endif
