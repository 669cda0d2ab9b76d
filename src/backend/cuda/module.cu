/* The module's one visible symbol, and the operation table: every entry notes which operation refused its arguments or
 * could not be launched. */
#include "cuda.h"

extern const di_device_ops di_cuda_device_ops;

#define RUN(f)                                                                                                         \
    static di_status run_##f(di_stream *stream, const di_##f##_args *args) {                                           \
        di_cuda_turn_begin(stream);                                                                                    \
        di_status st = di_cuda_##f(stream, args);                                                                      \
        if (!st && cudaPeekAtLastError() != cudaSuccess) {                                                             \
            di_error_log("nvidia: operation '" #f "': %s", cudaGetErrorString(cudaGetLastError()));                    \
            st = DI_ERR_DEVICE;                                                                                        \
        }                                                                                                              \
        di_cuda_turn_end(stream);                                                                                      \
        if (st)                                                                                                        \
            di_cuda_owner(stream)->refused = #f;                                                                       \
        return st;                                                                                                     \
    }
DI_OPS_LIST(RUN)
DI_OPS_OPTIONAL_LIST(RUN)
#undef RUN

static const di_ops ops = {.abi = DI_BACKEND_ABI,
                           .size = sizeof(di_ops),
                           .name = "nvidia",
#define ENTRY(f) .f = run_##f,
                           DI_OPS_LIST(ENTRY) DI_OPS_OPTIONAL_LIST(ENTRY)
#undef ENTRY
};

static const di_backend backend = {&di_cuda_device_ops, &ops};

extern "C" __attribute__((visibility("default"))) const di_backend *di_backend_module(int log_level) {
    di_log_set_level((di_log_level)log_level);
    return &backend;
}
