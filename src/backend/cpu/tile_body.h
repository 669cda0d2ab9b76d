/* The inner loop of attention_body.h and index_body.h: 4 rows of scalars times 8 lanes of a panel.
 *
 * A panel is [n, 8]: eight columns side by side. For dot products the columns are keys and n runs over their values;
 * for the sum over keys the columns are values and n runs over keys. Either way a lane adds its products one after the
 * other in rising n, which is the order that ops.h states; lanes and rows don't meet, so the tiling can't change a bit.
 * Included after lanes_<level>.h of a level with at most 8 lanes; private to backend/cpu. */
#ifndef DI_CPU_TILE_BODY_H
#define DI_CPU_TILE_BODY_H

#include "lanes.h"

#define DI_TILE_ROWS 4
#define DI_TILE_LANES 8
#define DI_TILE_VECS (DI_TILE_LANES / DI_LANES)

typedef struct di_tile {
    di_v v[DI_TILE_ROWS][DI_TILE_VECS];
} di_tile;

/* x where x > 0, else 0; NaN gives 0. */
DI_INLINE di_v di_v_relu(di_v x) {
    const di_v zero = {0};
    return (di_v)((di_vi)x & (x > zero));
}

/* t[r][lane] += a[r*lda + i] * b[i*8 + lane] for i = 0, step, 2*step .. below n. The tile stays in registers
 * throughout, which is why this must be inlined with a constant step. */
DI_INLINE void di_tile_mac(di_tile *t, const float *a, int64_t lda, const float *b, int64_t n, int64_t step) {
    di_tile c = *t;
    for (int64_t i = 0; i < n; i += step) {
        di_v v[DI_TILE_VECS];
        for (int l = 0; l < DI_TILE_VECS; l++)
            v[l] = di_v_load(b + i * DI_TILE_LANES + l * DI_LANES);
        for (int r = 0; r < DI_TILE_ROWS; r++) {
            di_v x = di_v_splat(a[r * lda + i]);
            for (int l = 0; l < DI_TILE_VECS; l++)
                c.v[r][l] += x * v[l];
        }
    }
    *t = c;
}

/* Dot products of 4 rows (stride lda) with the 8 columns of a panel [n, 8], in the order of di_dot32; n a multiple
 * of 32. */
static inline void di_tile_dots(const float *a, int64_t lda, const float *b, int64_t n, di_tile *out) {
    di_tile sum;
    memset(&sum, 0, sizeof sum);
    for (int64_t g = 0; g < n; g += 32) {
        di_tile even, odd;
        memset(&even, 0, sizeof even);
        memset(&odd, 0, sizeof odd);
        di_tile_mac(&even, a + g, lda, b + g * DI_TILE_LANES, 32, 2);
        di_tile_mac(&odd, a + g + 1, lda, b + (g + 1) * DI_TILE_LANES, 31, 2);
        for (int r = 0; r < DI_TILE_ROWS; r++) {
            for (int l = 0; l < DI_TILE_VECS; l++)
                sum.v[r][l] += even.v[r][l] + odd.v[r][l];
        }
    }
    *out = sum;
}

/* Puts x [n] into column `slot` of panels whose columns are keys: slot/8 panels of [n, 8] before it. */
static inline void di_panel_put_column(float *panels, int64_t slot, int64_t n, const float *x) {
    float *p = panels + slot / DI_TILE_LANES * n * DI_TILE_LANES + slot % DI_TILE_LANES;
    for (int64_t i = 0; i < n; i++)
        p[i * DI_TILE_LANES] = x[i];
}

/* Puts x [n] into row `slot` of panels whose columns are values: n/8 panels of [cap, 8]. */
static inline void di_panel_put_row(float *panels, int64_t cap, int64_t slot, int64_t n, const float *x) {
    float *p = panels + slot * DI_TILE_LANES;
    for (int64_t i = 0; i < n; i += DI_TILE_LANES, p += cap * DI_TILE_LANES)
        memcpy(p, x + i, DI_TILE_LANES * sizeof *x);
}

#endif
