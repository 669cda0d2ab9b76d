/* What the attention kernels share: where a row's keys lie. Layouts as in ops.h; Source: model.md 5.1 to 5.3. */
#ifndef DI_ATTENTION_CUH
#define DI_ATTENTION_CUH

#include "rows.cuh"

/* The arguments as a kernel takes them: by value, nothing behind host pointers. */
typedef struct attention_job {
    di_attention_args a; /* a.rows is not to be followed: */
    di_rows rows;
    int64_t keys_max; /* as reserved */
    di_act codes;     /* of the result, in place of it; data NULL: none */
} attention_job;

/* Whether, for all that the host can see, the arguments fit together and into the reserved limits. (attention.cu) */
bool di_cuda_attention_fits(const di_stream *stream, const di_attention_args *args);

/* The kernel for Hopper: whether it takes these arguments, and its launch. (attention_sm90.cu) */
bool di_cuda_attention_sm90_fits(const di_stream *stream, const di_attention_args *args);
size_t di_cuda_attention_sm90_scratch(const di_device *dev, const di_limits *limits);
di_status di_cuda_attention_sm90(di_stream *stream, const di_attention_args *args, const di_act *codes);

/* Record of the window key at `pos` of a sequence whose rows of this forward start with row row0 at position pos0. */
__device__ static inline const uint8_t *attention_window_at(const di_attention_args &a, size_t record_bytes,
                                                            int32_t row0, int32_t pos0, int32_t slot, int32_t pos) {
    if (pos >= pos0)
        return a.records + (size_t)(row0 + (pos - pos0)) * record_bytes;
    return a.ring.slots + (size_t)slot * a.ring.slot_bytes + a.ring.offset +
           (size_t)(pos % a.ring.ring_len) * a.ring.record_bytes;
}

#endif
