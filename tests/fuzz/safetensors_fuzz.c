/* The safetensors header and the index: any bytes. What is accepted must hold what the reader promises: names once,
 * sizes as their shapes say, bytes inside the file and shared with no other tensor. */
#include <stdlib.h>

#include "model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_header(const uint8_t *data, size_t size, di_arena *arena) {
    di_safetensors f;
    di_error err;
    if (di_safetensors_parse(&f, data, size, arena, &err))
        return;
    for (size_t i = 0; i < f.n_tensors; i++) {
        const di_safetensor *t = &f.tensors[i];
        uint64_t n = 1;
        for (int32_t k = 0; k < t->n_dims; k++)
            n *= (uint64_t)t->shape[k];
        if (t->begin > t->end || t->end > f.data_bytes || !di_utf8_valid(t->name, t->name_len))
            abort();
        if (t->has_dtype && di_dtype_bytes(t->dtype, n) != t->end - t->begin)
            abort();
        for (size_t k = 0; k < i && f.n_tensors < 100; k++) {
            const di_safetensor *o = &f.tensors[k];
            if (o->name_len == t->name_len && memcmp(o->name, t->name, t->name_len) == 0)
                abort();
            if (t->begin < o->end && o->begin < t->end && o->begin != o->end && t->begin != t->end)
                abort();
        }
        if (t->end > t->begin) { /* the first and last byte can be read */
            volatile uint8_t sum = (uint8_t)(f.data[t->begin] + f.data[t->end - 1]);
            (void)sum;
        }
    }
}

static di_status take_entry(void *user, const char *tensor, size_t tensor_len, const char *file, size_t file_len,
                            di_error *err) {
    (void)err;
    size_t *n = user;
    *n += di_utf8_valid(tensor, tensor_len) + di_utf8_valid(file, file_len);
    return *n > 2000 ? DI_ERR_RANGE : DI_OK; /* a callback may stop the walk */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_arena arena = {0};
    size_t n = 0;
    check_header(data, size, &arena);
    if (size >= 8) { /* again with a length that fits, so that changes of the text reach the scanner */
        uint8_t *copy = malloc(size);
        if (copy) {
            uint64_t header = size - 8;
            memcpy(copy, data, size);
            memcpy(copy, &header, 8);
            check_header(copy, size, &arena);
            free(copy);
        }
    }
    di_weight_map_parse((const char *)data, size, take_entry, &n, &arena, NULL);
    if (n % 2)
        abort(); /* both strings of every entry are UTF-8 */
    di_arena_deinit(&arena);
    return 0;
}
