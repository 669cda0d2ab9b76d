/* hc_mix for up to 16 rows at a time: the trunk is read once, 128 columns after 128.
 *
 * Each piece of the rows goes, while it is in the cache, into the collapse, the sum of squares and, packed as a panel,
 * into the products with fn, whose weights are so read once for 16 rows. The order of every sum is the reference's. */
#include "hc.h"
#include "panel.h"
#include "vec.h"

enum { DOTS_MAX = (2 + DI_CPU_HC_MAX) * DI_CPU_HC_MAX };

/* Bytes of the pieces of worker scratch, in their order. */
typedef struct mix_scratch {
    size_t z, rows, panel, weights, acc;
} mix_scratch;

static mix_scratch scratch_for(int64_t h) {
    return (mix_scratch){
        .z = (size_t)(DI_PANEL_LANES * h) * sizeof(float),
        .rows = DI_PANEL_LANES * DI_TILE_IN * sizeof(float),
        .panel = DI_PANEL_LANES * DI_TILE_IN * sizeof(float),
        .weights = DOTS_MAX * DI_TILE_IN * sizeof(float),
        .acc = DOTS_MAX * DI_PANEL_LANES * sizeof(float),
    };
}

static size_t scratch_bytes(int64_t h) {
    mix_scratch s = scratch_for(h);
    return di_cpu_piece(s.z) + di_cpu_piece(s.rows) + di_cpu_piece(s.panel) + di_cpu_piece(s.weights) +
           di_cpu_piece(s.acc);
}

void di_cpu_need_portable_hc(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need_raise(need, 0, scratch_bytes(limits->hidden_size ? limits->hidden_size : limits->n_in_max));
}

typedef struct mix_job {
    const di_hc_mix_args *a;
    const di_stream *stream;
} mix_job;

/* sum + x . x over n values, n a multiple of 32 and at most a tile: di_dot32's order, continued. */
static float add_squares(float sum, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) {
        int64_t next = i + 32 < n ? 32 : 0;
        di_f4 chain = {0};
        for (int64_t k = i; k < i + 32; k += 2) {
            di_f4 v = di_f4_pairs(x + k, x + k + next);
            chain += v * v;
        }
        sum += chain[0] + chain[1];
        if (next)
            sum += chain[2] + chain[3];
    }
    return sum;
}

static void mix_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const mix_job *job = ctx;
    const di_hc_mix_args *a = job->a;
    int64_t n = a->x.n_cols, h = a->z.n_cols, row0 = part * DI_PANEL_LANES;
    int n_rows = (int)DI_MIN(a->x.n_rows - row0, DI_PANEL_LANES), n_dots = (2 + a->m) * a->m;
    int lanes = n_rows > 8 ? 16 : n_rows > 4 ? 8 : n_rows > 1 ? 4 : 1;
    mix_scratch size = scratch_for(h);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *z = di_cpu_take(&at, size.z);
    float(*rows)[DI_TILE_IN] = di_cpu_take(&at, size.rows);
    float *panel = di_cpu_take(&at, size.panel);
    float *weights = di_cpu_take(&at, size.weights);
    float *acc = di_cpu_take(&at, size.acc);
    float squares[DI_PANEL_LANES] = {0};
    memset(z, 0, (size_t)(n_rows * h) * sizeof *z);
    memset(acc, 0, size.acc);
    memset(rows, 0, size.rows);
    for (int64_t c0 = 0; c0 < n; c0 += DI_TILE_IN) {
        int64_t count = DI_MIN(n - c0, DI_TILE_IN), padded = DI_ROUND_UP(count, 32);
        for (int r = 0; r < n_rows; r++) {
            float *x = rows[r];
            di_cpu_load(&a->x, row0 + r, c0, count, x);
            memset(x + count, 0, (size_t)(padded - count) * sizeof *x);
            for (int64_t c = c0; c < c0 + count;) { /* a tile may lie across streams */
                int64_t m = c / h, i0 = c % h, run = DI_MIN(h - i0, c0 + count - c);
                float pre = a->pre_in[(row0 + r) * a->m + m];
                float *zr = z + r * h + i0;
                const float *xc = x + (c - c0);
                for (int64_t i = 0; i < run; i++)
                    zr[i] += pre * xc[i];
                c += run;
            }
            if (a->fn)
                squares[r] = add_squares(squares[r], x, padded);
        }
        if (!a->fn)
            continue;
        const float *w = a->fn + c0;
        int64_t ldw = n;
        if (n_dots % 8 || padded != count) { /* the kernels read whole groups of 8 rows and 32 inputs */
            memset(weights, 0, size.weights);
            for (int o = 0; o < n_dots; o++)
                memcpy(weights + o * DI_TILE_IN, w + o * n, (size_t)count * sizeof *w);
            w = weights;
            ldw = DI_TILE_IN;
        }
        if (lanes > 1)
            di_panel_fill((const float(*)[DI_TILE_IN])rows, lanes, padded, panel);
        di_panel_add(lanes > 1 ? panel : rows[0], lanes, w, ldw, n_dots, padded / 32, acc);
    }
    for (int r = 0; r < n_rows; r++) {
        di_cpu_store(&a->z, row0 + r, 0, h, z + r * h);
        if (!a->fn)
            continue;
        float dots[DOTS_MAX];
        for (int o = 0; o < n_dots; o++)
            dots[o] = acc[o * lanes + r];
        di_cpu_hc_finish(a, row0 + r, dots, squares[r]);
    }
}

static di_status hc_mix(di_stream *stream, const di_hc_mix_args *a) {
    if (!di_cpu_hc_mix_fits(a) || !di_cpu_scratch_fits(stream, 0, scratch_bytes(a->z.n_cols)))
        return DI_ERR_SHAPE;
    mix_job job = {a, stream};
    int64_t n_dots = a->fn ? (2 + a->m) * a->m : 0;
    di_cpu_run(stream, mix_part, &job, DI_CEIL_DIV(a->x.n_rows, DI_PANEL_LANES),
               a->x.n_rows * a->x.n_cols * (n_dots + 2));
    return DI_OK;
}

void di_cpu_install_portable_hc(di_cpu_kernels *k) {
    k->hc_mix = hc_mix;
}
