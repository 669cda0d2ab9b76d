/* hc_mix for up to 16 rows at a time and hc_post, at the width of the level that includes this.
 *
 * The trunk is read once, 128 columns after 128. Each piece of the rows goes, while it is in the cache, into the
 * collapse, the sum of squares and the products with fn, whose weights are so read once for 16 rows. What follows the
 * products is a long chain of few numbers; for several rows it runs with a row a lane. The order of every sum is the
 * reference's. Included after lanes_<level>.h. */
#include "dot_body.h"
#include "exp_body.h"
#include "hc.h"
#include "panel_body.h"

typedef struct mix_job {
    const di_hc_mix_args *a;
    const di_stream *stream;
    int64_t rows_per_part; /* at most DI_HC_ROWS */
} mix_job;

/* ---- a row a lane ---- */

DI_INLINE di_v lanes_sigmoid(di_v x) {
    return di_v_splat(1.0f) / (di_v_splat(1.0f) + di_v_exp(-x));
}

/* di_cpu_sinkhorn of DI_LANES rows: c[a * m + b]. */
DI_INLINE void lanes_sinkhorn(di_v *c, int32_t m, int32_t iters, float eps) {
    const di_v e = di_v_splat(eps), zero = {0};
    for (int32_t a = 0; a < m; a++) {
        di_v most = c[a * m], sum = zero;
        for (int32_t b = 1; b < m; b++)
            most = di_v_max(c[a * m + b], most);
        for (int32_t b = 0; b < m; b++) {
            c[a * m + b] = di_v_exp(c[a * m + b] - most);
            sum += c[a * m + b];
        }
        for (int32_t b = 0; b < m; b++)
            c[a * m + b] = c[a * m + b] / sum + e;
    }
    for (int32_t i = 0; i < iters; i++) {
        for (int32_t a = 0; i > 0 && a < m; a++) {
            di_v sum = zero;
            for (int32_t b = 0; b < m; b++)
                sum += c[a * m + b];
            for (int32_t b = 0; b < m; b++)
                c[a * m + b] /= sum + e;
        }
        for (int32_t b = 0; b < m; b++) {
            di_v sum = zero;
            for (int32_t a = 0; a < m; a++)
                sum += c[a * m + b];
            for (int32_t a = 0; a < m; a++)
                c[a * m + b] /= sum + e;
        }
    }
}

/* di_cpu_hc_finish of n <= DI_LANES rows; acc: the sums of the first of them. */
static void finish_lanes(const di_hc_mix_args *a, int64_t row, int n, const float *acc, const float *squares) {
    int32_t m = a->m, n_dots = (2 + m) * m;
    di_v dots[DI_HC_DOTS_MAX], rms;
    float lane[DI_LANES] = {0};
    for (int r = 0; r < n; r++)
        lane[r] = squares[r];
    rms = di_v_load(lane) / di_v_splat((float)a->x.n_cols) + di_v_splat(a->norm_eps);
    di_v_store(lane, rms);
    for (int r = 0; r < DI_LANES; r++)
        lane[r] = sqrtf(lane[r]);
    rms = di_v_load(lane);
    for (int32_t o = 0; o < n_dots; o++) {
        int part = o < m ? 0 : o < 2 * m ? 1 : 2;
        const float *at = acc + o / DI_TILE_OUT * DI_HC_ROWS * DI_TILE_OUT + o % DI_TILE_OUT;
        memset(lane, 0, sizeof lane);
        for (int r = 0; r < n; r++)
            lane[r] = at[r * DI_TILE_OUT];
        dots[o] = di_v_load(lane) / rms * di_v_splat(a->scale[part]) + di_v_splat(a->base[o]);
    }
    for (int32_t i = 0; i < m; i++) {
        dots[i] = lanes_sigmoid(dots[i]) + di_v_splat(a->eps);
        dots[m + i] = di_v_splat(2.0f) * lanes_sigmoid(dots[m + i]);
    }
    if (m == 4) /* the released models': known here, its loops unroll */
        lanes_sinkhorn(dots + 2 * m, 4, a->iters, a->eps);
    else
        lanes_sinkhorn(dots + 2 * m, m, a->iters, a->eps);
    for (int32_t o = 0; o < n_dots; o++) {
        float *out = o < m ? a->pre_out + o : o < 2 * m ? a->post + o - m : a->comb + o - 2 * m;
        int64_t stride = o < 2 * m ? m : m * m;
        di_v_store(lane, dots[o]);
        for (int r = 0; r < n; r++)
            out[(row + r) * stride] = lane[r];
    }
}

/* ---- hc_mix ---- */

static void mix_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const mix_job *job = ctx;
    const di_hc_mix_args *a = job->a;
    int64_t n = a->x.n_cols, h = a->z.n_cols, row0 = part * job->rows_per_part;
    int n_rows = (int)DI_MIN(a->x.n_rows - row0, job->rows_per_part), n_dots = a->fn ? (2 + a->m) * a->m : 0;
    di_hc_scratch size = di_hc_scratch_for(h);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *z = di_cpu_take(&at, size.z);
    float *rows = di_cpu_take(&at, size.rows);
    float *tile = di_cpu_take(&at, size.tile);
    float *acc = di_cpu_take(&at, size.acc);
    float squares[DI_HC_ROWS] = {0};
    const di_mat fn = {.dtype = DI_F32, .n_out = n_dots, .n_in = n, .data = a->fn};
    memset(z, 0, (size_t)(n_rows * h) * sizeof *z);
    memset(acc, 0, size.acc);
    for (int64_t c0 = 0; c0 < n; c0 += DI_TILE_IN) {
        int64_t count = DI_MIN(n - c0, DI_TILE_IN), padded = DI_ROUND_UP(count, 32);
        for (int r = 0; r < n_rows; r++) {
            float *x = rows + r * DI_TILE_IN;
            row_load(&a->x, row0 + r, c0, count, x);
            memset(x + count, 0, (size_t)(padded - count) * sizeof *x);
            for (int64_t c = c0; c < c0 + count;) { /* a block may lie across streams */
                int64_t m = c / h, i0 = c % h, run = DI_MIN(h - i0, c0 + count - c);
                float pre = a->pre_in[(row0 + r) * a->m + m];
                float *zr = z + r * h + i0;
                const float *xc = x + (c - c0);
                for (int64_t i = 0; i < run; i++)
                    zr[i] += pre * xc[i];
                c += run;
            }
            if (a->fn)
                squares[r] = row_dot32_from(squares[r], x, x, padded);
        }
        for (int o = 0; o < n_dots; o += DI_TILE_OUT) {
            int n_out = DI_MIN(n_dots - o, DI_TILE_OUT);
            tile_floats(&fn, o, n_out, c0, padded, tile + DI_TILE_OUT * DI_TILE_IN, tile);
            panel_add(rows, n_rows, tile, tile, padded / 32, n_out, PANEL_FLOATS, acc + o * DI_HC_ROWS);
        }
    }
    for (int r = 0; r < n_rows; r++)
        row_store(&a->z, row0 + r, 0, h, z + r * h);
    if (!a->fn)
        return;
    for (int r = 0; n_rows > 1 && r < n_rows; r += DI_LANES)
        finish_lanes(a, row0 + r, DI_MIN(n_rows - r, DI_LANES), acc + r * DI_TILE_OUT, squares + r);
    if (n_rows == 1) { /* one row fills no lanes */
        float dots[DI_HC_DOTS_MAX];
        for (int o = 0; o < n_dots; o++)
            dots[o] = acc[o / DI_TILE_OUT * DI_HC_ROWS * DI_TILE_OUT + o % DI_TILE_OUT];
        di_cpu_hc_finish(a, row0, dots, squares[0]);
    }
}

/* ---- hc_mix of few rows ---- */

/* Few rows make no parts that several threads could share, so a part is 128 columns of every stream instead. It leaves
 * the sums of its groups of 32, which the caller then adds in their order. Each sum stands twice, as the two chains
 * that it comes from stood side by side. */
typedef struct split_job {
    const di_hc_mix_args *a;
    const di_stream *stream;
    float *sums; /* [row][group of the row][2 * DI_HC_SPLIT_DOTS]: the dots, and the square last */
} split_job;

static void split_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const split_job *job = ctx;
    const di_hc_mix_args *a = job->a;
    int64_t n = a->x.n_cols, h = a->z.n_cols, n_groups = n / 32;
    int n_dots = (2 + a->m) * a->m;
    for (int64_t r = 0; r < a->x.n_rows; r++) {
        float z[DI_TILE_IN] = {0}, x[DI_TILE_IN];
        for (int32_t m = 0; m < a->m; m++) {
            int64_t c0 = m * h + part * DI_TILE_IN;
            float pre = a->pre_in[r * a->m + m], *sums = job->sums + (r * n_groups + c0 / 32) * 2 * DI_HC_SPLIT_DOTS;
            row_load(&a->x, r, c0, DI_TILE_IN, x);
            for (int i = 0; i < DI_TILE_IN; i++)
                z[i] += pre * x[i];
            for (int g = 0; g < DI_TILE_IN; g += 32, sums += 2 * DI_HC_SPLIT_DOTS) {
                for (int o = 0; o < n_dots; o += DI_PAIRS) { /* DI_PAIRS divides n_dots, which is 24 */
                    const float *w = a->fn + o * n + c0 + g;
                    di_v chain = chains_of(w, n, x + g, 0);
                    di_v_store(sums + 2 * o, chain + di_v_swap_pairs(chain));
                }
                di_v_store(sums + 2 * n_dots, di_v_splat(row_dot32_from(0.0f, x + g, x + g, 32)));
            }
        }
        row_store(&a->z, r, part * DI_TILE_IN, DI_TILE_IN, z);
    }
}

/* Adds the groups' sums of a row and finishes it. */
static void split_finish(const split_job *job, int64_t row) {
    const di_hc_mix_args *a = job->a;
    int64_t n_groups = a->x.n_cols / 32;
    int n_dots = (2 + a->m) * a->m;
    const float *sums = job->sums + row * n_groups * 2 * DI_HC_SPLIT_DOTS;
    float twice[2 * DI_HC_SPLIT_DOTS] = {0}, dots[DI_HC_SPLIT_DOTS];
    for (int64_t g = 0; g < n_groups; g++, sums += 2 * DI_HC_SPLIT_DOTS) {
        for (int o = 0; o <= 2 * n_dots; o += DI_LANES)
            di_v_store(twice + o, di_v_load(twice + o) + di_v_load(sums + o));
    }
    for (int o = 0; o < n_dots; o++)
        dots[o] = twice[2 * o];
    di_cpu_hc_finish(a, row, dots, twice[2 * n_dots]);
}

static di_status hc_mix(di_stream *stream, const di_hc_mix_args *a) {
    if (!di_cpu_hc_mix_fits(a) || !di_cpu_scratch_fits(stream, 0, di_hc_scratch_bytes(a->z.n_cols)))
        return DI_ERR_SHAPE;
    /* Few rows are shared out too, at some cost to how often the weights are read. */
    mix_job job = {a, stream, DI_MAX((int64_t)4, DI_MIN((int64_t)DI_HC_ROWS, DI_CEIL_DIV(a->x.n_rows, 4)))};
    int64_t n_dots = a->fn ? (2 + a->m) * a->m : 0;
    if (n_dots == DI_HC_SPLIT_DOTS - 8 && a->x.n_rows <= DI_HC_SPLIT_ROWS && a->z.n_cols % DI_TILE_IN == 0 &&
        di_cpu_scratch_fits(stream, di_hc_split_bytes(a->x.n_rows, a->x.n_cols), 0)) {
        split_job split = {a, stream, (float *)di_cpu_shared(stream)};
        di_cpu_run(stream, split_part, &split, a->z.n_cols / DI_TILE_IN, a->x.n_rows * a->x.n_cols * (n_dots + 2));
        for (int64_t row = 0; row < a->x.n_rows; row++)
            split_finish(&split, row);
        return DI_OK;
    }
    di_cpu_run(stream, mix_part, &job, DI_CEIL_DIV(a->x.n_rows, job.rows_per_part),
               a->x.n_rows * a->x.n_cols * (n_dots + 2));
    return DI_OK;
}

/* ---- hc_post ---- */

typedef struct post_job {
    const di_hc_post_args *a;
    const di_stream *stream;
} post_job;

static void post_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const post_job *job = ctx;
    const di_hc_post_args *args = job->a;
    int32_t m = args->m;
    int64_t h = args->f.n_cols;
    const float *post = args->post + row * m, *comb = args->comb + row * m * m;
    enum { PIECE = 64 };
    float x[DI_CPU_HC_MAX][PIECE] = {0}, f[PIECE] = {0}, y[PIECE];
    for (int64_t i0 = 0; i0 < h; i0 += PIECE) { /* a piece of all streams is read before any is written */
        int64_t n = DI_MIN(h - i0, PIECE);
        row_load(&args->f, row, i0, n, f);
        for (int32_t a = 0; a < m; a++)
            row_load(&args->x, row, a * h + i0, n, x[a]);
        for (int32_t b = 0; b < m; b++) {
            for (int i = 0; i < PIECE; i += DI_LANES) {
                di_v sum = di_v_splat(post[b]) * di_v_load(f + i);
                for (int32_t a = 0; a < m; a++)
                    sum += di_v_splat(comb[a * m + b]) * di_v_load(x[a] + i);
                di_v_store(y + i, sum);
            }
            row_store(&args->x, row, b * h + i0, n, y);
        }
    }
}

static di_status hc_post(di_stream *stream, const di_hc_post_args *a) {
    if (!di_cpu_hc_post_fits(stream, a) || a->m > DI_CPU_HC_MAX)
        return DI_ERR_SHAPE;
    post_job job = {a, stream};
    di_cpu_run(stream, post_row, &job, a->x.n_rows, a->x.n_rows * a->x.n_cols * (a->m + 1) / 8);
    return DI_OK;
}

void DI_INSTALL(hc)(di_cpu_kernels *k) {
    k->hc_mix = hc_mix;
    k->hc_post = hc_post;
}
