/* The mixture of experts by wide products (wide.h), in the order of moe.h.
 *
 * Each batch of experts goes through five jobs, whose parts are fixed blocks of an expert's rows and outputs:
 *
 *     pack    x of the pairs' rows, expert after expert
 *     up      32 or more columns of w1 and w3 -> gate -> codes and scales [pair, I]
 *     repack  codes and scales for w2
 *     down    columns of w2 -> y [pair, H], rounded to bf16
 *     sum     row by row: + y of its pairs of this batch, in rising expert id
 *
 * While a part computes its last rows of weights, the first of its thread's next part are prefetched, through matrices
 * and experts: with one row an expert, weights are all there is to read. */
#include <stdatomic.h>

#include "moe.h"
#include "wide.h"

enum { PACK_GROUPS = 32 };

/* ---- sizes ---- */

/* Shared scratch beside di_moe_scratch. */
typedef struct room {
    uint8_t *x, *act; /* packed: of h and of inner columns */
    uint8_t *codes, *scales;
    uint16_t *y;
} room;

static int64_t pairs_max(int64_t n_rows) {
    return DI_MAX(DI_MIN(n_rows, DI_MOE_PAIRS_MAX), DI_MOE_PAIRS_MIN);
}

/* Each segment is packed by itself, from a place that its first pair alone decides: any n pairs take at most n times
 * the room of one. */
static size_t packed_room(const di_wide_engine *e, int64_t pairs, int64_t n_in) {
    return (size_t)pairs * di_cpu_piece(e->packed_bytes(1, n_in));
}

static size_t cut_room(const di_wide_engine *e, const di_moe_dims *d, uint8_t *base, room *out) {
    int64_t pairs = pairs_max(d->n_rows);
    size_t total = 0;
#define CUT(field, bytes)                                                                                              \
    do {                                                                                                               \
        if (base)                                                                                                      \
            out->field = (void *)(base + total);                                                                       \
        total += di_cpu_piece(bytes);                                                                                  \
    } while (0)
    CUT(x, packed_room(e, pairs, d->h));
    CUT(act, packed_room(e, pairs, d->inner));
    CUT(codes, (size_t)(pairs * d->inner));
    CUT(scales, (size_t)(pairs * (d->inner / 32)));
    CUT(y, (size_t)(pairs * d->h) * sizeof *out->y);
#undef CUT
    return total;
}

void di_wide_need_moe(const di_wide_engine *e, const di_limits *limits, di_cpu_need *need) {
    if (limits->experts_max < 1)
        return;
    di_moe_dims d = {limits->rows_max, limits->experts_per_row_max + 1, limits->experts_max + 1,
                     limits->hidden_size ? limits->hidden_size : limits->n_in_max, limits->intermediate};
    di_cpu_need_raise(need, di_moe_scratch_cut(&d, NULL, &(di_moe_scratch){0}) + cut_room(e, &d, NULL, &(room){0}),
                      di_wide_worker_bytes(e, 2));
}

/* ---- the jobs ---- */

typedef struct moe_job {
    di_moe_order o;
    const di_stream *stream;
    const di_wide_engine *e;
    room r;
    di_act act;                 /* codes and scales of the batch's pairs */
    int64_t up_outs, down_outs; /* outputs of a part */
    _Atomic bool is_x_plain, is_act_plain;
} moe_job;

static uint8_t *packed_of(const moe_job *job, uint8_t *packed, const di_moe_segment *seg, int64_t n_in) {
    return packed + (size_t)seg->base * di_cpu_piece(job->e->packed_bytes(1, n_in));
}

static di_wide_x x_of(const moe_job *job, const di_moe_segment *seg) {
    return (di_wide_x){.x = &job->o.a->x,
                       .rows = job->o.s.pair_row + seg->pair0,
                       .n_rows = seg->n_pairs,
                       .n_in = job->o.d.h,
                       .weights = seg->expert->w1.dtype,
                       .packed = packed_of(job, job->r.x, seg, job->o.d.h)};
}
static di_wide_x act_of(const moe_job *job, const di_moe_segment *seg) {
    return (di_wide_x){.x = &job->act,
                       .row0 = seg->base,
                       .n_rows = seg->n_pairs,
                       .n_in = job->o.d.inner,
                       .weights = seg->expert->w2.dtype,
                       .packed = packed_of(job, job->r.act, seg, job->o.d.inner)};
}

static bool pack(const moe_job *job, const di_wide_x *x, int64_t part) {
    int64_t in_parts = DI_CEIL_DIV(x->n_in / 32, PACK_GROUPS), g0 = part % in_parts * PACK_GROUPS;
    return job->e->pack(x, part / in_parts, g0, DI_MIN(g0 + PACK_GROUPS, x->n_in / 32));
}

static void pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    moe_job *job = ctx;
    const di_moe_segment *seg = di_moe_segment_of(&job->o, DI_MOE_PACK, &part);
    di_wide_x x = x_of(job, seg);
    if (!pack(job, &x, part))
        atomic_store_explicit(&job->is_x_plain, true, memory_order_relaxed);
}

/* The first weights of the part that this thread will probably take next: as many on as there are threads. */
static const uint8_t *ahead_of(const moe_job *job, di_moe_phase phase, int64_t part, int64_t outs) {
    int64_t next = part + di_pool_threads(job->stream->dev->pool);
    if (next >= job->o.n_parts[phase])
        return NULL;
    const di_moe_segment *seg = di_moe_segment_of(&job->o, phase, &next);
    int64_t o = next / DI_CEIL_DIV(seg->n_pairs, job->o.rows_of_block[phase]) * outs;
    const di_mat *w = phase == DI_MOE_UP ? &seg->expert->w1 : &seg->expert->w2;
    return o + DI_WIDE_OUT_MIN <= w->n_out ? di_wide_weights(w, o) : NULL;
}

static di_wide_block block_of(const moe_job *job, const di_moe_segment *seg, int64_t part, const di_mat *w,
                              const di_wide_x *x, int64_t outs) {
    int64_t rows = job->e->rows_max, row_blocks = DI_CEIL_DIV(seg->n_pairs, rows);
    int64_t r0 = part % row_blocks * rows, o0 = part / row_blocks * outs;
    return (di_wide_block){.w = w,
                           .o0 = o0,
                           .n_out = DI_MIN(w->n_out - o0, outs),
                           .packed = x->packed,
                           .packed_rows = seg->n_pairs,
                           .row0 = r0,
                           .n_rows = DI_MIN(seg->n_pairs - r0, rows),
                           .lda = outs};
}

static void up_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const moe_job *job = ctx;
    const uint8_t *ahead = ahead_of(job, DI_MOE_UP, part, job->up_outs);
    const di_moe_segment *seg = di_moe_segment_of(&job->o, DI_MOE_UP, &part);
    bool is_plain = atomic_load_explicit(&job->is_x_plain, memory_order_relaxed);
    di_wide_x x = x_of(job, seg);
    uint8_t *scratch = di_cpu_worker(job->stream, worker);
    size_t acc_bytes = (size_t)(job->e->rows_max * job->e->outs_max) * sizeof(float);
    float *g = di_cpu_take(&scratch, acc_bytes), *u = di_cpu_take(&scratch, acc_bytes);
    di_wide_block b = block_of(job, seg, part, &seg->expert->w1, &x, job->up_outs);
    b.acc = g;
    b.ahead = di_wide_weights(&seg->expert->w3, b.o0);
    di_wide_products(job->e, &x, &b, is_plain, scratch);
    b.w = &seg->expert->w3;
    b.acc = u;
    b.ahead = ahead;
    di_wide_products(job->e, &x, &b, is_plain, scratch);
    float limit = job->o.a->limit > 0.0f ? job->o.a->limit : __builtin_inff();
    int64_t inner = job->o.d.inner, pair = seg->base + b.row0;
    for (int64_t o = 0; o < b.n_out; o += 32) {
        di_wide_gate gate = {.g = g + o,
                             .u = u + o,
                             .ld = b.lda,
                             .n_rows = b.n_rows,
                             .weight = job->o.s.pair_weight + seg->pair0 + b.row0,
                             .limit = limit,
                             .codes = job->r.codes + pair * inner + b.o0 + o,
                             .codes_ld = inner,
                             .scales = job->r.scales + pair * (inner / 32) + (b.o0 + o) / 32,
                             .scales_ld = inner / 32};
        job->e->gate(&gate);
    }
}

static void repack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    moe_job *job = ctx;
    /* As many parts as pack has: of a narrower matrix the last find nothing to do. */
    const di_moe_segment *seg = di_moe_segment_of(&job->o, DI_MOE_PACK, &part);
    di_wide_x x = act_of(job, seg);
    int64_t in_parts = job->o.parts_of_block[DI_MOE_PACK], per_part = DI_CEIL_DIV(x.n_in / 32, in_parts);
    int64_t g0 = DI_MIN(part % in_parts * per_part, x.n_in / 32);
    if (!job->e->pack(&x, part / in_parts, g0, DI_MIN(g0 + per_part, x.n_in / 32)))
        atomic_store_explicit(&job->is_act_plain, true, memory_order_relaxed);
}

static void down_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const moe_job *job = ctx;
    const uint8_t *ahead = ahead_of(job, DI_MOE_DOWN, part, job->down_outs);
    const di_moe_segment *seg = di_moe_segment_of(&job->o, DI_MOE_DOWN, &part);
    di_wide_x x = act_of(job, seg);
    uint8_t *scratch = di_cpu_worker(job->stream, worker);
    di_wide_block b = block_of(job, seg, part, &seg->expert->w2, &x, job->down_outs);
    b.acc = di_cpu_take(&scratch, (size_t)(job->e->rows_max * job->e->outs_max) * sizeof *b.acc);
    b.ahead = ahead;
    di_wide_products(job->e, &x, &b, atomic_load_explicit(&job->is_act_plain, memory_order_relaxed), scratch);
    int64_t h = job->o.d.h;
    di_act y = {.dtype = DI_BF16, .n_rows = seg->base + seg->n_pairs, .n_cols = h, .stride = h, .data = job->r.y};
    for (int64_t i = 0; i < b.n_rows; i++)
        job->e->store(&y, seg->base + b.row0 + i, b.o0, b.n_out, b.acc + i * b.lda, NULL);
}

static void sum_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const moe_job *job = ctx;
    int64_t h = job->o.d.h;
    float *sum = job->o.s.sum + row * h;
    if (job->o.is_first)
        memset(sum, 0, (size_t)h * sizeof *sum);
    for (int64_t i = 0; i < job->o.d.k; i++) {
        int64_t pair = job->o.s.row_pairs[row * job->o.d.k + i];
        if (pair >= job->o.pair0 && pair < job->o.pair1)
            job->e->accumulate(sum, job->r.y + (pair - job->o.pair0) * h, h);
    }
    if (!job->o.is_last)
        return;
    if (job->o.a->out.dtype == DI_F32) { /* rounded to bf16 all the same */
        for (int64_t i = 0; i < h; i++)
            sum[i] = di_round_bf16(sum[i]);
    }
    job->e->store(&job->o.a->out, row, 0, h, sum, NULL);
}

/* Whether every expert that a row chose, and the shared one, is of the kind that wide products take. */
static bool takes(const di_moe_args *a) {
    if (a->x.dtype == DI_F32)
        return false;
    for (int64_t i = -1; i < a->x.n_rows * a->k; i++) {
        const di_expert *e = i < 0 ? a->shared : &a->experts[a->idx[i]];
        if (e && (!di_wide_takes(&a->x, &e->w1) || !di_wide_takes(&a->x, &e->w2) || e->w1.dtype != e->w3.dtype))
            return false;
    }
    return true;
}

di_status di_wide_moe(di_stream *stream, const di_moe_args *a) {
    const di_cpu_kernels *k = &stream->dev->kernels;
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    uint8_t *shared = di_cpu_shared(stream);
    if (!any || !shared || !di_cpu_moe_fits(a))
        return DI_ERR_SHAPE;
    if (!takes(a))
        return k->narrow_moe(stream, a);
    moe_job job = {.stream = stream, .e = k->wide};
    di_moe_order *o = &job.o;
    o->a = a;
    o->d = (di_moe_dims){a->x.n_rows, a->k + (a->shared ? 1 : 0), a->n_experts + 1, a->x.n_cols, any->w1.n_out};
    size_t order_bytes = di_moe_scratch_cut(&o->d, NULL, &o->s);
    if (!di_cpu_scratch_fits(stream, order_bytes + cut_room(job.e, &o->d, NULL, &job.r),
                             di_wide_worker_bytes(job.e, 2)))
        return DI_ERR_SHAPE;
    di_moe_scratch_cut(&o->d, shared, &o->s);
    cut_room(job.e, &o->d, shared + order_bytes, &job.r);
    int64_t h = o->d.h, inner = o->d.inner;
    job.act = (di_act){DI_F8_E4M3, pairs_max(o->d.n_rows), inner, inner, job.r.codes, job.r.scales};
    /* An expert's rows decide how its blocks are cut best; a few rows each is what matters. */
    int64_t rows_each = o->d.n_rows * o->d.k / o->d.n_experts;
    const di_expert *first = a->k ? &a->experts[a->idx[0]] : a->shared;
    job.up_outs = di_wide_outs(job.e, &first->w1, rows_each);
    job.down_outs = di_wide_outs(job.e, &first->w2, rows_each);
    o->rows_of_block[DI_MOE_PACK] = DI_WIDE_ROWS;
    o->rows_of_block[DI_MOE_UP] = o->rows_of_block[DI_MOE_DOWN] = job.e->rows_max;
    o->parts_of_block[DI_MOE_PACK] = DI_CEIL_DIV(h / 32, PACK_GROUPS);
    o->parts_of_block[DI_MOE_UP] = DI_CEIL_DIV(inner, job.up_outs);
    o->parts_of_block[DI_MOE_DOWN] = DI_CEIL_DIV(h, job.down_outs);
    di_moe_order_start(o);
    while (di_moe_order_next(o)) {
        int64_t pairs = o->pair1 - o->pair0, work = pairs * h * inner;
        atomic_store_explicit(&job.is_act_plain, false, memory_order_relaxed);
        di_cpu_run(stream, pack_part, &job, o->n_parts[DI_MOE_PACK], pairs * h);
        di_cpu_run(stream, up_part, &job, o->n_parts[DI_MOE_UP], work * 2);
        di_cpu_run(stream, repack_part, &job, o->n_parts[DI_MOE_PACK], pairs * inner);
        di_cpu_run(stream, down_part, &job, o->n_parts[DI_MOE_DOWN], work);
        di_cpu_run(stream, sum_row, &job, o->d.n_rows, pairs * h);
    }
    return DI_OK;
}
