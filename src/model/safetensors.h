/* Private to model/: the safetensors container and its index. */
#ifndef DI_SAFETENSORS_H
#define DI_SAFETENSORS_H

#include "tensor/tensor.h"

#define DI_SAFETENSOR_DIMS_MAX 8

/* One entry of a header. Names are not NUL-terminated: they point into the file, or into the arena when escaped. */
typedef struct di_safetensor {
    const char *name;
    size_t name_len;
    bool has_dtype; /* false: a dtype of the format that this engine has no use for, spelled in dtype_name */
    di_dtype dtype;
    char dtype_name[12];
    int32_t n_dims;
    int64_t shape[DI_SAFETENSOR_DIMS_MAX];
    uint64_t begin, end; /* in the data part, begin <= end <= data_bytes */
} di_safetensor;

typedef struct di_safetensors {
    di_safetensor *tensors; /* in the arena, in the header's order */
    size_t n_tensors;
    const uint8_t *data; /* after the header; borrowed from the file */
    uint64_t data_bytes;
} di_safetensors;

/* Reads the header of a whole file. Checked: the header's length and syntax, names (UTF-8, each once), that every
 * tensor's bytes are inside the file, as many as its shape says, and shared with no other. Faults are DI_ERR_FORMAT.
 * Time is n log n in the number of tensors. */
di_status di_safetensors_parse(di_safetensors *out, const uint8_t *file, size_t n_bytes, di_arena *arena,
                               di_error *err);

/* Calls fn for every entry of an index's weight_map, in the text's order (a name given twice is seen twice). The
 * strings are not NUL-terminated and live as long as text and arena. The first status of fn that is not DI_OK is
 * returned. */
typedef di_status (*di_weight_map_fn)(void *user, const char *tensor, size_t tensor_len, const char *file,
                                      size_t file_len, di_error *err);
di_status di_weight_map_parse(const char *text, size_t len, di_weight_map_fn fn, void *user, di_arena *arena,
                              di_error *err);

#endif
