/* gemm and moe_route by wide products (wide.h): rows are packed once, then blocks of outputs and rows are computed in
 * any order. Blocks of rows of the same outputs follow each other, so that they find the weights in the cache. */
#include <stdatomic.h>

#include "moe.h"
#include "panel.h"
#include "wide.h"

enum { PACK_GROUPS = 32 /* that one part packs */, PACKED_BYTES_MAX = 64 << 20 };

typedef struct gemm_job {
    const di_gemm_args *a;
    const di_stream *stream;
    const di_wide_engine *e;
    uint8_t *packed; /* group after group of the operation, packed_bytes each */
    size_t packed_bytes;
    int64_t row0, n_rows; /* rows of this pass */
    int64_t group_out, outs, group_blocks, n_row_blocks, n_in_parts;
    _Atomic bool is_plain; /* a row holds something unusual */
} gemm_job;

static di_wide_x rows_of(const gemm_job *job, int64_t group) {
    int64_t n_in = job->a->w->n_in;
    return (di_wide_x){.x = &job->a->x,
                       .row0 = job->row0,
                       .n_rows = job->n_rows,
                       .col0 = group * n_in,
                       .n_in = n_in,
                       .weights = job->a->w->dtype,
                       .packed = job->packed + (size_t)group * job->packed_bytes};
}

static void pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    gemm_job *job = ctx;
    int64_t n_tiles = DI_CEIL_DIV(job->n_rows, DI_WIDE_ROWS), g0 = part % job->n_in_parts * PACK_GROUPS;
    int64_t rest = part / job->n_in_parts;
    di_wide_x x = rows_of(job, rest / n_tiles);
    if (!job->e->pack(&x, rest % n_tiles, g0, DI_MIN(g0 + PACK_GROUPS, x.n_in / 32)))
        atomic_store_explicit(&job->is_plain, true, memory_order_relaxed);
}

static void block_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    gemm_job *job = ctx;
    const di_gemm_args *a = job->a;
    int64_t r0 = part % job->n_row_blocks * job->e->rows_max, at = part / job->n_row_blocks;
    int64_t group = at / job->group_blocks, o = at % job->group_blocks * job->outs;
    di_wide_x x = rows_of(job, group);
    uint8_t *scratch = di_cpu_worker(job->stream, worker);
    di_wide_block b = {
        .w = a->w,
        .o0 = group * job->group_out + o,
        .n_out = DI_MIN(job->group_out - o, job->outs),
        .packed = x.packed,
        .packed_rows = job->n_rows,
        .row0 = r0,
        .n_rows = DI_MIN(job->n_rows - r0, job->e->rows_max),
        .lda = job->outs,
    };
    /* Threads run side by side through the weights, so this one's next part is probably as many on. */
    int64_t next = b.o0 + di_pool_threads(job->stream->dev->pool) * job->outs;
    if (part + 1 < n_parts && job->n_row_blocks == 1 && next + DI_WIDE_OUT_MIN <= a->w->n_out)
        b.ahead = di_wide_weights(a->w, next);
    b.acc = di_cpu_take(&scratch, (size_t)(job->e->rows_max * job->e->outs_max) * sizeof *b.acc);
    di_wide_products(job->e, &x, &b, atomic_load_explicit(&job->is_plain, memory_order_relaxed), scratch);
    for (int64_t i = 0; i < b.n_rows; i++) {
        int64_t row = job->row0 + r0 + i;
        const float *add = a->add ? a->add + row * a->out.stride + b.o0 : NULL;
        job->e->store(&a->out, row, b.o0, b.n_out, b.acc + i * b.lda, add);
    }
}

static di_status products(di_stream *stream, const di_gemm_args *a, uint8_t *scratch, size_t scratch_bytes) {
    const di_wide_engine *e = stream->dev->kernels.wide;
    int64_t n_groups = DI_MAX(a->n_groups, 1), n_in = a->w->n_in, n_rows = a->x.n_rows;
    gemm_job job = {.a = a, .stream = stream, .e = e, .packed = scratch, .group_out = a->w->n_out / n_groups};
    job.outs = di_wide_outs(e, a->w, n_rows);
    job.group_blocks = DI_CEIL_DIV(job.group_out, job.outs);
    job.n_in_parts = DI_CEIL_DIV(n_in / 32, PACK_GROUPS);
    /* Where scratch doesn't hold all rows, they go in passes of whole tiles. */
    int64_t rows_fit = n_rows;
    size_t group_bytes = scratch_bytes / (size_t)n_groups / 64 * 64;
    if (di_cpu_piece(e->packed_bytes(n_rows, n_in)) > group_bytes) {
        size_t tile = di_cpu_piece(e->packed_bytes(DI_WIDE_ROWS, n_in));
        rows_fit = (int64_t)(group_bytes / tile) * DI_WIDE_ROWS;
        if (rows_fit < 1)
            return DI_ERR_SHAPE;
    }
    for (; job.row0 < n_rows; job.row0 += job.n_rows) {
        job.n_rows = DI_MIN(n_rows - job.row0, rows_fit);
        job.packed_bytes = di_cpu_piece(e->packed_bytes(job.n_rows, n_in));
        job.n_row_blocks = DI_CEIL_DIV(job.n_rows, e->rows_max);
        di_cpu_run(stream, pack_part, &job, n_groups * DI_CEIL_DIV(job.n_rows, DI_WIDE_ROWS) * job.n_in_parts,
                   job.n_rows * n_groups * n_in);
        di_cpu_run(stream, block_part, &job, n_groups * job.group_blocks * job.n_row_blocks,
                   job.n_rows * n_in * a->w->n_out);
    }
    return DI_OK;
}

di_status di_wide_gemm(di_stream *stream, const di_gemm_args *a) {
    const di_cpu_kernels *k = &stream->dev->kernels;
    if (!di_cpu_gemm_fits(a))
        return DI_ERR_SHAPE;
    if (!di_wide_takes(&a->x, a->w) || !k->wide->is_best(a->w->dtype, a->x.n_rows))
        return k->narrow_gemm(stream, a);
    if (!di_cpu_scratch_fits(stream, 0, di_wide_worker_bytes(k->wide, 1)))
        return DI_ERR_SHAPE;
    return products(stream, a, di_cpu_shared(stream), stream->dev->have.shared);
}

/* ---- moe_route ---- */

di_status di_wide_route(di_stream *stream, const di_moe_route_args *a) {
    const di_cpu_kernels *k = &stream->dev->kernels;
    if (!di_cpu_route_fits(a))
        return DI_ERR_SHAPE;
    if (!di_wide_takes(&a->x, a->gate) || !k->wide->is_best(a->gate->dtype, a->x.n_rows))
        return k->narrow_moe_route(stream, a);
    return di_cpu_route_by(stream, a, products, di_wide_worker_bytes(k->wide, 1));
}

void di_wide_need_gemm(const di_wide_engine *e, const di_limits *limits, di_cpu_need *need) {
    size_t all = di_cpu_piece(e->packed_bytes(limits->rows_max, limits->n_in_max));
    size_t tile = di_cpu_piece(e->packed_bytes(DI_WIDE_ROWS, limits->n_in_max));
    size_t logits = di_cpu_piece((size_t)(limits->rows_max * limits->experts_max) * sizeof(float));
    di_cpu_need_raise(need, logits + DI_MAX(DI_MIN(all, (size_t)PACKED_BYTES_MAX), tile),
                      DI_MAX(di_wide_worker_bytes(e, 1), (size_t)limits->experts_max));
}
