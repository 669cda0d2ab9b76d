/* gemm by panels (panel.h): rows are packed once, then tiles of 32 outputs x 128 rows are computed in any order.
 *
 * The weights of a tile are decoded once for its rows; parts are numbered so that the row blocks of one tile follow
 * each other and find its stored weights in the cache. Tiles don't depend on the number of threads. */
#include "panel.h"

enum { PACK_IN = 1024 /* inputs that one part packs */, PACKED_BYTES_MAX = 64 << 20 };

size_t di_panel_gemm_bytes(int64_t rows_max, int64_t n_in_max) {
    size_t row = (size_t)DI_ROUND_UP(n_in_max, 32) * sizeof(float);
    size_t all = (size_t)di_panel_rows(rows_max) * row;
    return DI_MAX(DI_MIN(all, (size_t)PACKED_BYTES_MAX), DI_PANEL_LANES * row);
}

void di_cpu_need_portable_gemm(const di_limits *limits, di_cpu_need *need) {
    di_cpu_need_raise(need, di_panel_gemm_bytes(limits->rows_max, limits->n_in_max), di_panel_worker_bytes(1));
}

typedef struct gemm_job {
    const di_gemm_args *a;
    const di_stream *stream;
    float *packed;          /* group after group: [di_panel_rows(n_rows)][n_in padded] */
    int64_t row0, n_rows;   /* rows of this pass */
    int64_t n_in, n_in_pad; /* of a group */
    int64_t group_out, group_tiles, group_packed;
    int64_t n_row_blocks, n_in_parts;
} gemm_job;

static void pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const gemm_job *job = ctx;
    int64_t k0 = part % job->n_in_parts * PACK_IN, rest = part / job->n_in_parts;
    int64_t n_panels = DI_CEIL_DIV(job->n_rows, DI_PANEL_LANES), group = rest / n_panels;
    /* A part packs 16 rows, which at the end may be several narrower panels. */
    int64_t r = rest % n_panels * DI_PANEL_LANES, end = DI_MIN(r + DI_PANEL_LANES, job->n_rows);
    while (r < end) {
        int lanes = di_panel_lanes(job->n_rows - r);
        di_panel_pack(&job->a->x, NULL, job->row0 + r, (int)DI_MIN(end - r, lanes), lanes, group * job->n_in, job->n_in,
                      k0, DI_MIN(job->n_in_pad - k0, PACK_IN),
                      job->packed + group * job->group_packed + r * job->n_in_pad);
        r += lanes;
    }
}

static void tile_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const gemm_job *job = ctx;
    const di_gemm_args *a = job->a;
    int64_t r0 = part % job->n_row_blocks * DI_ROW_BLOCK, tile = part / job->n_row_blocks;
    int64_t group = tile / job->group_tiles, o_in_group = tile % job->group_tiles * DI_TILE_OUT;
    int n_out = (int)DI_MIN(job->group_out - o_in_group, DI_TILE_OUT);
    int64_t o0 = group * job->group_out + o_in_group, n_rows = DI_MIN(job->n_rows - r0, DI_ROW_BLOCK);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *decoded = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_TILE_IN);
    float *acc = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    di_panel_tile(a->w, o0, n_out, job->packed + group * job->group_packed + r0 * job->n_in_pad, n_rows, decoded, acc);
    for (int64_t r = 0; r < n_rows;) {
        int lanes = di_panel_lanes(n_rows - r);
        for (int64_t i = 0; i < DI_MIN(lanes, n_rows - r); i++) {
            int64_t row = job->row0 + r0 + r + i;
            float y[DI_TILE_OUT];
            for (int o = 0; o < n_out; o++)
                y[o] = acc[o * lanes + i];
            if (a->add) {
                const float *add = a->add + row * a->out.stride + o0;
                for (int o = 0; o < n_out; o++)
                    y[o] += add[o];
            }
            di_cpu_store(&a->out, row, o0, n_out, y);
        }
        acc += DI_TILE_OUT * lanes;
        r += lanes;
    }
}

di_status di_panel_gemm(di_stream *stream, const di_gemm_args *a, uint8_t *scratch, size_t scratch_bytes) {
    if (!di_cpu_gemm_fits(a))
        return DI_ERR_SHAPE;
    int64_t n_groups = DI_MAX(a->n_groups, 1), n_in = a->w->n_in;
    gemm_job job = {.a = a, .stream = stream, .packed = (float *)scratch, .n_in = n_in};
    job.n_in_pad = DI_ROUND_UP(n_in, 32);
    job.group_out = a->w->n_out / n_groups;
    job.group_tiles = DI_CEIL_DIV(job.group_out, DI_TILE_OUT);
    job.n_in_parts = DI_CEIL_DIV(job.n_in_pad, PACK_IN);
    size_t row_bytes = (size_t)(n_groups * job.n_in_pad) * sizeof(float);
    int64_t rows_fit = (int64_t)(scratch_bytes / row_bytes);
    if (di_panel_rows(a->x.n_rows) > rows_fit)
        rows_fit = rows_fit / DI_PANEL_LANES * DI_PANEL_LANES;
    if (rows_fit < 1)
        return DI_ERR_SHAPE;
    for (; job.row0 < a->x.n_rows; job.row0 += job.n_rows) {
        job.n_rows = DI_MIN(a->x.n_rows - job.row0, rows_fit);
        job.group_packed = di_panel_rows(job.n_rows) * job.n_in_pad;
        job.n_row_blocks = DI_CEIL_DIV(job.n_rows, DI_ROW_BLOCK);
        di_cpu_run(stream, pack_part, &job, n_groups * DI_CEIL_DIV(job.n_rows, DI_PANEL_LANES) * job.n_in_parts,
                   job.n_rows * n_groups * n_in);
        di_cpu_run(stream, tile_part, &job, n_groups * job.group_tiles * job.n_row_blocks,
                   job.n_rows * n_in * a->w->n_out);
    }
    return DI_OK;
}

static di_status gemm(di_stream *stream, const di_gemm_args *a) {
    if (!di_cpu_scratch_fits(stream, 0, di_panel_worker_bytes(1)))
        return DI_ERR_SHAPE;
    return di_panel_gemm(stream, a, di_cpu_shared(stream), stream->dev->have.shared);
}

void di_cpu_install_portable_gemm(di_cpu_kernels *k) {
    k->gemm = gemm;
}
