/* The reader behind golden.h: safetensors by jansson, number formats by their definitions. */
#include "golden.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

struct golden {
    uint8_t *raw;
    const uint8_t *payload;
    json_t *head;
    const char **names;
    int n_names;
};

golden *golden_open(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("golden file '%s' can't be opened", path);
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    golden *g = calloc(1, sizeof *g);
    assert_non_null(g);
    g->raw = malloc((size_t)size);
    assert_non_null(g->raw);
    assert_int_equal(fread(g->raw, 1, (size_t)size, f), size);
    fclose(f);
    uint64_t n;
    memcpy(&n, g->raw, 8);
    assert_true(n <= (uint64_t)size - 8);
    json_error_t e;
    g->head = json_loadb((const char *)g->raw + 8, (size_t)n, 0, &e);
    if (!g->head)
        fail_msg("golden file '%s': %s", path, e.text);
    json_object_del(g->head, "__metadata__");
    g->payload = g->raw + 8 + n;
    g->n_names = (int)json_object_size(g->head);
    g->names = calloc((size_t)g->n_names + 1, sizeof *g->names);
    assert_non_null(g->names);
    const char *key;
    json_t *v;
    int i = 0;
    json_object_foreach(g->head, key, v) g->names[i++] = key;
    return g;
}

void golden_close(golden *g) {
    if (!g)
        return;
    json_decref(g->head);
    free(g->names);
    free(g->raw);
    free(g);
}

bool golden_has(const golden *g, const char *name) {
    return json_object_get(g->head, name) != NULL;
}
int golden_count(const golden *g) {
    return g->n_names;
}
const char *golden_name(const golden *g, int i) {
    return g->names[i];
}

golden_tensor golden_get(const golden *g, const char *name) {
    const json_t *v = json_object_get(g->head, name);
    if (!v)
        fail_msg("golden tensor '%s' is not in the file", name);
    golden_tensor t = {.n = 1};
    snprintf(t.dtype, sizeof t.dtype, "%s", json_string_value(json_object_get(v, "dtype")));
    const json_t *shape = json_object_get(v, "shape"), *off = json_object_get(v, "data_offsets");
    t.n_dims = (int)json_array_size(shape);
    assert_true(t.n_dims <= 8);
    for (int i = 0; i < t.n_dims; i++) {
        t.shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
        t.n *= t.shape[i];
    }
    int64_t begin = json_integer_value(json_array_get(off, 0)), end = json_integer_value(json_array_get(off, 1));
    t.data = g->payload + begin;
    t.n_bytes = (size_t)(end - begin);
    return t;
}

int64_t golden_row(const golden_tensor *t) {
    return t->n_dims && t->shape[0] ? t->n / t->shape[0] : 1;
}

static float e4m3(uint8_t b) {
    int e = (b >> 3) & 15, m = b & 7;
    float v = e ? ldexpf(1.0f + (float)m / 8.0f, e - 7) : ldexpf((float)m, -9);
    if ((b & 0x7F) == 0x7F)
        v = NAN;
    return b & 0x80 ? -v : v;
}

float golden_float(const golden_tensor *t, int64_t i) {
    if (!strcmp(t->dtype, "F32")) {
        float v;
        memcpy(&v, t->data + 4 * i, 4);
        return v;
    }
    if (!strcmp(t->dtype, "BF16")) {
        uint16_t h;
        memcpy(&h, t->data + 2 * i, 2);
        uint32_t bits = (uint32_t)h << 16;
        float v;
        memcpy(&v, &bits, 4);
        return v;
    }
    if (!strcmp(t->dtype, "F8_E4M3"))
        return e4m3(t->data[i]);
    if (!strcmp(t->dtype, "F8_E8M0"))
        return ldexpf(1.0f, t->data[i] - 127);
    return (float)golden_int(t, i);
}

int64_t golden_int(const golden_tensor *t, int64_t i) {
    if (!strcmp(t->dtype, "I32")) {
        int32_t v;
        memcpy(&v, t->data + 4 * i, 4);
        return v;
    }
    if (!strcmp(t->dtype, "I64")) {
        int64_t v;
        memcpy(&v, t->data + 8 * i, 8);
        return v;
    }
    if (t->n_bytes != (size_t)t->n)
        fail_msg("golden tensor of type %s read as integers", t->dtype);
    return t->data[i];
}

double golden_rms_diff(const float *got, const golden_tensor *want, int64_t first, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)got[i] - golden_float(want, first + i);
        sum += d * d;
    }
    return n ? sqrt(sum / (double)n) : 0;
}

double golden_rms(const golden_tensor *t, int64_t first, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = golden_float(t, first + i);
        sum += d * d;
    }
    return n ? sqrt(sum / (double)n) : 0;
}
