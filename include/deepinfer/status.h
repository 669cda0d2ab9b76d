/* Status codes and the error object of the public API.
 *
 * Every function that depends on a file, a request, a device or free memory returns a di_status and takes a
 * `di_error *` last, which may be NULL. On failure the message says what, which, expected and found, lower case and
 * without a full stop, so that a program can print it behind its own name. Success leaves the error object untouched.
 */
#ifndef DEEPINFER_STATUS_H
#define DEEPINFER_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DI_API __attribute__((visibility("default")))
#else
#define DI_API
#endif

/* X(code, text, HTTP status, exit status of a program that ends with it) */
#define DI_STATUS_LIST(X)                                                                                              \
    X(DI_OK, "ok", 200, 0)                                                                                             \
    X(DI_ERR_ARG, "invalid argument", 400, 2)                                                                          \
    X(DI_ERR_REQUEST, "invalid request", 400, 1)                                                                       \
    X(DI_ERR_RANGE, "value out of range", 400, 1)                                                                      \
    X(DI_ERR_SHAPE, "shape mismatch", 500, 3)                                                                          \
    X(DI_ERR_FORMAT, "damaged or malformed data", 500, 3)                                                              \
    X(DI_ERR_UNSUPPORTED, "not supported", 400, 3)                                                                     \
    X(DI_ERR_NOT_FOUND, "not found", 404, 3)                                                                           \
    X(DI_ERR_IO, "input/output error", 500, 1)                                                                         \
    X(DI_ERR_MEMORY, "out of memory", 503, 4)                                                                          \
    X(DI_ERR_DISK, "out of disk space", 503, 4)                                                                        \
    X(DI_ERR_DEVICE, "device not available", 503, 4)                                                                   \
    X(DI_ERR_BUSY, "busy", 429, 4)                                                                                     \
    X(DI_ERR_CANCELLED, "cancelled", 499, 1)                                                                           \
    X(DI_ERR_INTERNAL, "internal error", 500, 1)

typedef enum di_status {
#define DI_STATUS_ENUM(code, text, http, exit_status) code,
    DI_STATUS_LIST(DI_STATUS_ENUM)
#undef DI_STATUS_ENUM
        DI_STATUS_COUNT
} di_status;

/* One failure. Caller-owned storage, no pointers inside: copy it freely. */
typedef struct di_error {
    di_status code;
    char message[1000];
} di_error;

/* Short text of a code ("out of memory"); never NULL. */
DI_API const char *di_status_text(di_status status);

/* HTTP status of a code (400, 404, 500, ...). */
DI_API int di_status_http(di_status status);

/* Exit status of a program that ends with a code: 0 done, 1 the run failed, 2 usage, 3 model files, 4 resources. */
DI_API int di_status_exit(di_status status);

#ifdef __cplusplus
}
#endif
#endif
