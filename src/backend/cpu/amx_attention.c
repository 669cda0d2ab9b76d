/* Core attention's scores with AMX; the rest is avx512_attention.c's, and the bits are ref_attention.c's.
 *
 * Where queries and keys are bf16 values, a tile product over 32 values makes exactly the sums of di_dot32: a fused
 * chain from 0 over the even and one over the odd values, added, then added to the accumulator, subnormals flushed.
 * Rows of the result are keys, columns are heads, as the softmax wants them:
 *
 *     keys     [16 keys, 32 values], rows of the decoded keys as they lie in memory
 *     queries  [16 pairs of values, 16 heads, 2], arranged once for a row
 *     scores   [16 keys, 16 heads] of floats: 2 x 2 of them are made at a time */
#include "avx512_attention.h"

#include "amx_tiles.h"
#include "avx512_vec.h"

enum { KEYS = 16, HEADS = 16, GROUP = 32, GROUP_BYTES = GROUP * HEADS * 2 };

/* Queries as [heads / 16, d / 32, 16 pairs, 16 heads, 2] of bf16. */
static void load_queries(const di_attention_part *t) {
    const di_act *x = &t->a->q;
    const uint16_t *from = (const uint16_t *)x->data + t->row * x->stride + t->head * t->d;
    uint8_t *out = t->q;
    for (int64_t h = 0; h < t->heads; h += HEADS) {
        for (int64_t i = 0; i < t->d; i += GROUP, out += GROUP_BYTES) {
            __m512 r[HEADS]; /* a lane carries a pair of values */
            for (int64_t k = 0; k < HEADS; k++)
                r[k] = h + k < t->n_heads ? _mm512_loadu_ps((const void *)(from + (h + k) * t->d + i))
                                          : _mm512_setzero_ps();
            di_v16_transpose(r);
            for (int64_t k = 0; k < HEADS; k++)
                _mm512_store_ps((void *)(out + k * 64), r[k]);
        }
    }
}

/* Tiles 0 .. 3 are scores [key half, head half], 4 and 5 keys, 6 and 7 queries. */
static inline __attribute__((always_inline)) void score_tiles(const di_attention_part *t, const uint16_t *keys,
                                                              const uint8_t *q, float *s, const bool has_keys_2,
                                                              const bool has_heads_2) {
    size_t key_stride = (size_t)t->d * sizeof *keys, score_stride = (size_t)t->heads * sizeof *s;
    const uint8_t *q2 = q + t->d / GROUP * GROUP_BYTES;
    DI_TILE_ZERO(0);
    DI_TILE_ZERO(1);
    DI_TILE_ZERO(2);
    DI_TILE_ZERO(3);
    for (int64_t i = 0; i < t->d; i += GROUP, q += GROUP_BYTES, q2 += GROUP_BYTES) {
        DI_TILE_LOAD(4, keys + i, key_stride);
        DI_TILE_LOAD(6, q, 64);
        DI_TILE_DOT(0, 4, 6);
        if (has_heads_2) {
            DI_TILE_LOAD(7, q2, 64);
            DI_TILE_DOT(1, 4, 7);
        }
        if (has_keys_2) {
            DI_TILE_LOAD(5, keys + KEYS * t->d + i, key_stride);
            DI_TILE_DOT(2, 5, 6);
            if (has_heads_2)
                DI_TILE_DOT(3, 5, 7);
        }
    }
    DI_TILE_STORE(0, s, score_stride);
    if (has_heads_2)
        DI_TILE_STORE(1, s + HEADS, score_stride);
    if (has_keys_2) {
        DI_TILE_STORE(2, s + KEYS * t->heads, score_stride);
        if (has_heads_2)
            DI_TILE_STORE(3, s + KEYS * t->heads + HEADS, score_stride);
    }
}

static void score_keys(const di_attention_part *t, const void *keys, int64_t n, float *s) {
    if (n == 0)
        return;
    di_tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = GROUP * sizeof(uint16_t);
        config.rows[i] = KEYS;
    }
    di_tile_configure(&config);
    for (int64_t k = 0; k < n; k += 2 * KEYS) {
        const uint16_t *from = (const uint16_t *)keys + k * t->d;
        bool has_keys_2 = n - k > KEYS;
        for (int64_t h = 0; h < t->heads; h += 2 * HEADS) {
            const uint8_t *q = (const uint8_t *)t->q + h / HEADS * (t->d / GROUP) * GROUP_BYTES;
            float *out = s + k * t->heads + h;
            if (h + HEADS < t->heads) {
                if (has_keys_2)
                    score_tiles(t, from, q, out, true, true);
                else
                    score_tiles(t, from, q, out, false, true);
            } else if (has_keys_2) {
                score_tiles(t, from, q, out, true, false);
            } else {
                score_tiles(t, from, q, out, false, false);
            }
        }
    }
    DI_TILE_RELEASE();
}

static const di_attention_steps amx_steps = {load_queries, score_keys};

static di_status amx_attention(di_stream *stream, const di_attention_args *a) {
    return di_cpu_attention_lanes(stream, a, &amx_steps);
}

void di_cpu_install_amx_attention(di_cpu_kernels *k) {
    k->attention = amx_attention;
}
