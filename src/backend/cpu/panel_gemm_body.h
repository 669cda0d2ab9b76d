/* The product of all rows with a whole matrix, as two jobs: rows are packed once, then tiles of 32 outputs x 128 rows
 * are computed in any order, one or a few to a part.
 *
 * The weights of a tile are decoded once for its rows; parts are numbered so that the row blocks of one tile follow
 * each other and find its stored weights in the cache. Tiles don't depend on the number of threads. */
#ifndef DI_CPU_PANEL_GEMM_BODY_H
#define DI_CPU_PANEL_GEMM_BODY_H

#include "panel_body.h"

typedef struct gemm_job {
    const di_gemm_args *a;
    const di_stream *stream;
    float *packed;          /* group after group */
    int64_t row0, n_rows;   /* rows of this pass */
    int64_t n_in, n_in_pad; /* of a group; padded to whole blocks */
    int64_t group_out;
    int64_t part_out, group_parts; /* outputs of a part, parts of a group's outputs */
    int64_t n_row_blocks, n_in_parts;
    bool is_coded, is_free;
} gemm_job;

static void gemm_pack(const gemm_job *job, int64_t group, int64_t k0, int64_t count, int64_t r) {
    int64_t block = job->n_rows * DI_TILE_IN;
    float *dst = job->packed + group * job->n_rows * job->n_in_pad + k0 / DI_TILE_IN * block + r * DI_TILE_IN;
    panel_pack(&job->a->x, job->row0 + r, group * job->n_in, job->n_in, k0, count, block, dst);
}

static void gemm_pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const gemm_job *job = ctx;
    int64_t k0 = part % job->n_in_parts * DI_PACK_IN, rest = part / job->n_in_parts;
    int64_t row_parts = DI_CEIL_DIV(job->n_rows, DI_PACK_ROWS), r = rest % row_parts * DI_PACK_ROWS;
    int64_t end = DI_MIN(r + DI_PACK_ROWS, job->n_rows);
    for (; r < end; r++)
        gemm_pack(job, rest / row_parts, k0, DI_MIN(job->n_in_pad - k0, DI_PACK_IN), r);
}

static void gemm_tile_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const gemm_job *job = ctx;
    const di_gemm_args *a = job->a;
    int64_t r0 = part % job->n_row_blocks * DI_ROW_BLOCK, outs = part / job->n_row_blocks;
    int64_t group = outs / job->group_parts, o_in_group = outs % job->group_parts * job->part_out;
    int n_out = (int)DI_MIN(job->group_out - o_in_group, job->part_out);
    int64_t o0 = group * job->group_out + o_in_group, n_rows = DI_MIN(job->n_rows - r0, DI_ROW_BLOCK);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    panel_scratch scratch = panel_scratch_take(&at);
    float *acc = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK * DI_PART_TILES);
    const float *x = job->packed + group * job->n_rows * job->n_in_pad + r0 * DI_TILE_IN;
    panel_product(a->w, o0, n_out, x, job->n_rows * DI_TILE_IN, n_rows, job->is_coded, job->is_free, &scratch, acc);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t row = job->row0 + r0 + i;
        for (int t = 0; t < n_out; t += DI_TILE_OUT) {
            float *y = acc + t * DI_ROW_BLOCK + i * DI_TILE_OUT;
            int n = DI_MIN(n_out - t, DI_TILE_OUT);
            if (a->add) {
                const float *add = a->add + row * a->out.stride + o0 + t;
                for (int o = 0; o < n; o++)
                    y[o] += add[o];
            }
            row_store(&a->out, row, o0 + t, n, y);
        }
    }
}

/* Packed rows go into `scratch`; where it doesn't hold all they go in several passes. DI_ERR_SHAPE when it doesn't hold
 * one. */
static di_status panel_gemm(di_stream *stream, const di_gemm_args *a, uint8_t *scratch, size_t scratch_bytes) {
    if (!di_cpu_gemm_fits(a) || !di_cpu_scratch_fits(stream, 0, di_panel_worker_bytes(DI_PART_TILES)))
        return DI_ERR_SHAPE;
    int64_t n_groups = DI_MAX(a->n_groups, 1), n_in = a->w->n_in;
    gemm_job job = {.a = a, .stream = stream, .packed = (float *)scratch, .n_in = n_in};
    job.n_in_pad = di_panel_floats(1, n_in);
    job.group_out = a->w->n_out / n_groups;
    job.part_out = a->x.n_rows > DI_PART_ROWS ? DI_TILE_OUT * DI_PART_TILES : DI_TILE_OUT;
    job.group_parts = DI_CEIL_DIV(job.group_out, job.part_out);
    job.n_in_parts = DI_CEIL_DIV(job.n_in_pad, DI_PACK_IN);
    job.is_coded = a->x.dtype == DI_F8_E4M3 && di_panel_x_fits(a->x.scale, a->x.n_rows * (a->x.n_cols / 32));
    job.is_free = stream->dev->is_order_free && a->x.dtype != DI_F32;
    int64_t rows_fit = (int64_t)(scratch_bytes / ((size_t)(n_groups * job.n_in_pad) * sizeof(float)));
    if (rows_fit < 1)
        return DI_ERR_SHAPE;
    for (; job.row0 < a->x.n_rows; job.row0 += job.n_rows) {
        job.n_rows = DI_MIN(a->x.n_rows - job.row0, rows_fit);
        job.n_row_blocks = DI_CEIL_DIV(job.n_rows, DI_ROW_BLOCK);
        di_cpu_run(stream, gemm_pack_part, &job, n_groups * DI_CEIL_DIV(job.n_rows, DI_PACK_ROWS) * job.n_in_parts,
                   job.n_rows * n_groups * n_in);
        di_cpu_run(stream, gemm_tile_part, &job, n_groups * job.group_parts * job.n_row_blocks,
                   job.n_rows * n_in * a->w->n_out);
    }
    return DI_OK;
}

#endif
