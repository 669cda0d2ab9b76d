/* Golden files for tests: a small reader of safetensors that shares nothing with the program's own.
 *
 * golden_open reads a whole file; golden_get finds a tensor by name. Values come as float or as 64-bit integers
 * whatever the stored type (F32, BF16, F8_E4M3, F8_E8M0, U8, I32, I64). Faults end the test. */
#ifndef DI_TEST_GOLDEN_H
#define DI_TEST_GOLDEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct golden golden;

typedef struct golden_tensor {
    char dtype[12];
    int n_dims;
    int64_t shape[8];
    int64_t n; /* elements */
    size_t n_bytes;
    const uint8_t *data; /* owned by the file */
} golden_tensor;

golden *golden_open(const char *path);
void golden_close(golden *g);
bool golden_has(const golden *g, const char *name);
golden_tensor golden_get(const golden *g, const char *name); /* fails the test when absent */
int golden_count(const golden *g);
const char *golden_name(const golden *g, int i);

float golden_float(const golden_tensor *t, int64_t i);
int64_t golden_int(const golden_tensor *t, int64_t i);
/* Elements per entry of the first dimension. */
int64_t golden_row(const golden_tensor *t);

/* Root mean square of got - want over n values, and of want. */
double golden_rms_diff(const float *got, const golden_tensor *want, int64_t first, int64_t n);
double golden_rms(const golden_tensor *t, int64_t first, int64_t n);

#endif
