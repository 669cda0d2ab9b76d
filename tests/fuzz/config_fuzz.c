/* config.json: any bytes. A configuration that is accepted must be one that every layer above can walk: roles inside
 * the model, tensors whose sizes don't overflow, a layout, Engram constants. */
#include <stdlib.h>

#include "model/model_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct walk {
    uint64_t n, bytes;
} walk;

static di_status take_spec(void *user, const di_tensor_spec *spec) {
    walk *w = user;
    size_t n = 1;
    for (int32_t i = 0; i < spec->n_dims; i++) {
        if (spec->shape[i] <= 0 || !di_size_mul(&n, n, (size_t)spec->shape[i]))
            abort();
    }
    size_t bytes = di_dtype_bytes(spec->dtype, n);
    if (bytes < n / 2 || w->bytes + bytes < w->bytes)
        abort();
    w->bytes += bytes;
    return ++w->n > 20000 ? DI_ERR_RANGE : DI_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    di_config c;
    di_error err;
    if (di_config_parse(&c, (const char *)data, size, &err)) {
        if (!err.message[0])
            abort();
        return 0;
    }
    walk w = {0};
    di_tensors_each(&c, take_spec, &w);
    for (int32_t l = 0; l < c.n_layers + c.n_draft_layers; l++) {
        if (c.ratio[l] ? c.kv_source[l] < 0 || c.kv_source[l] > l || c.index_source[l] < c.kv_source[l]
                       : c.kv_source[l] != -1) {
            abort();
        }
    }
    di_layout y;
    di_layout_init(&y, &c, DI_NUMERICS_FAITHFUL, true);
    if (y.slot_bytes == 0 || y.ring_len <= c.window)
        abort();
    float *freq = malloc((size_t)c.rope_dim * sizeof *freq);
    if (freq) {
        di_config_inv_freq(&c, false, freq);
        di_config_inv_freq(&c, true, freq);
        free(freq);
    }
    if (di_config_replay_exact(&c) < 1)
        abort();
    return 0;
}
