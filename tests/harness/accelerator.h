/* The backend that tests of the model and the engine run on, with its module found. */
#ifndef DI_TEST_ACCELERATOR_H
#define DI_TEST_ACCELERATOR_H

#include "harness.h"

#include "backend/backend.h"

/* Modules lie beside the program. */
static inline void di_test_find_modules(void) {
    static char dir[sizeof DI_TEST_PROGRAM];
    snprintf(dir, sizeof dir, "%.*s", (int)(strrchr(DI_TEST_PROGRAM, '/') - DI_TEST_PROGRAM), DI_TEST_PROGRAM);
    di_backend_set_dir(dir);
}

/* "cpu", or what --backend of the test program names. */
static inline const char *di_test_backend(void) {
    di_test_find_modules();
    return di_test_backend_name();
}

#endif
