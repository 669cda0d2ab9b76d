/* A model of AMX's tile instructions, after Intel's description of them, in the place of amx_tiles.h's own.
 *
 * Each thread has its eight tiles. A product keeps two chains of fused multiply-adds a sum, over the even and the odd
 * inputs, takes subnormal inputs as zero and flushes results; bounds that the processor would fault on are asserted. */
#ifndef DI_TEST_AMX_MODEL_H
#define DI_TEST_AMX_MODEL_H

#include <immintrin.h>
#include <math.h>

#include "base/base.h"

typedef struct amx_model_tile {
    int rows, row_bytes;
    uint8_t data[16][64];
} amx_model_tile;

static _Thread_local amx_model_tile amx_model[8];
static _Thread_local bool amx_model_on;

static inline void di_tile_configure(const di_tile_config *config) {
    DI_ASSERT(config->palette == 1 && config->start_row == 0);
    memset(amx_model, 0, sizeof amx_model);
    for (int i = 0; i < 8; i++) {
        DI_ASSERT(config->rows[i] <= 16 && config->row_bytes[i] <= 64 && config->row_bytes[i] % 4 == 0);
        DI_ASSERT((config->rows[i] == 0) == (config->row_bytes[i] == 0));
        amx_model[i].rows = config->rows[i];
        amx_model[i].row_bytes = config->row_bytes[i];
    }
    for (int i = 8; i < 16; i++)
        DI_ASSERT(config->rows[i] == 0 && config->row_bytes[i] == 0);
    amx_model_on = true;
}

static inline amx_model_tile *amx_model_at(int tile) {
    DI_ASSERT(amx_model_on && amx_model[tile].rows > 0);
    return &amx_model[tile];
}
static inline void amx_model_zero(int tile) {
    memset(amx_model_at(tile)->data, 0, sizeof amx_model[tile].data);
}
static inline void amx_model_load(int tile, const void *base, size_t stride) {
    amx_model_tile *t = amx_model_at(tile);
    memset(t->data, 0, sizeof t->data);
    for (int r = 0; r < t->rows; r++)
        memcpy(t->data[r], (const uint8_t *)base + (size_t)r * stride, (size_t)t->row_bytes);
}
static inline void amx_model_store(int tile, void *base, size_t stride) {
    const amx_model_tile *t = amx_model_at(tile);
    for (int r = 0; r < t->rows; r++)
        memcpy((uint8_t *)base + (size_t)r * stride, t->data[r], (size_t)t->row_bytes);
}

/* Float number i of a row of a tile; of bf16 number i. */
static inline float amx_model_f32(const uint8_t *row, int i) {
    float v;
    memcpy(&v, row + 4 * i, 4);
    return fpclassify(v) == FP_SUBNORMAL ? 0.0f : v;
}
static inline float amx_model_bf16(const uint8_t *row, int i) {
    uint16_t h;
    memcpy(&h, row + 2 * i, 2);
    float v = di_bf16_to_f32(h);
    return fpclassify(v) == FP_SUBNORMAL ? 0.0f : v;
}
static inline float amx_model_flush(float v) {
    return fpclassify(v) == FP_SUBNORMAL ? 0.0f : v;
}

static inline void amx_model_dot(int c, int a, int b) {
    amx_model_tile *tc = amx_model_at(c);
    const amx_model_tile *ta = amx_model_at(a), *tb = amx_model_at(b);
    DI_ASSERT(ta->rows == tc->rows && tb->row_bytes == tc->row_bytes && 4 * tb->rows == ta->row_bytes);
    for (int m = 0; m < tc->rows; m++) {
        for (int n = 0; n < tc->row_bytes / 4; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < tb->rows; k++) {
                const uint8_t *pair = tb->data[k] + 4 * n;
                even = amx_model_flush(fmaf(amx_model_bf16(ta->data[m], 2 * k), amx_model_bf16(pair, 0), even));
                odd = amx_model_flush(fmaf(amx_model_bf16(ta->data[m], 2 * k + 1), amx_model_bf16(pair, 1), odd));
            }
            float sum = amx_model_flush(amx_model_f32(tc->data[m], n) + amx_model_flush(even + odd));
            memcpy(tc->data[m] + 4 * n, &sum, 4);
        }
    }
}

#define DI_TILE_RELEASE() ((void)(amx_model_on = false))
#define DI_TILE_ZERO(tile) amx_model_zero(tile)
#define DI_TILE_LOAD(tile, base, stride) amx_model_load(tile, base, stride)
#define DI_TILE_STORE(tile, base, stride) amx_model_store(tile, base, stride)
#define DI_TILE_DOT(c, a, b) amx_model_dot(c, a, b)

#endif
