/* The mixture of experts by panels, at the width of the level that includes this: rows are grouped by expert (moe.h),
 * so that each expert's weights are read once per call.
 *
 * Each batch of experts goes through four jobs whose parts are fixed tiles:
 *
 *     pack    x of the pairs' rows, expert after expert
 *     up      tile of 32 columns of w1 and w3 -> clamp, silu, weight, QA -> packed again, ready for w2
 *     down    tile of 32 columns of w2 -> y [pair, H], rounded to bf16
 *     sum     row by row: + y of its pairs of this batch, in rising expert id
 *
 * Included after lanes_<level>.h. */
#include <stdatomic.h>

#include "exp_body.h"
#include "moe.h"
#include "panel_gemm_body.h"

/* ---- moe_route ---- */

static di_status moe_route(di_stream *stream, const di_moe_route_args *a) {
    return di_cpu_route_fits(a) ? di_cpu_route_by(stream, a, panel_gemm, 0) : DI_ERR_SHAPE;
}

/* ---- moe ---- */

typedef struct moe_job {
    di_moe_order o;
    const di_stream *stream;
    bool is_faithful, is_coded, is_free; /* is_coded: of x; see panel_product */
    _Atomic bool is_act_out_of_range;    /* an activation's scale is too near the ends of its range to be left out */
    int64_t h_pad, inner_pad;
} moe_job;

static void pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const moe_job *job = ctx;
    const di_moe_segment *seg = di_moe_segment_of(&job->o, DI_MOE_PACK, &part);
    int64_t in_parts = job->o.parts_of_block[DI_MOE_PACK], k0 = part % in_parts * DI_PACK_IN;
    int64_t r = part / in_parts * DI_PACK_ROWS, end = DI_MIN(r + DI_PACK_ROWS, seg->n_pairs);
    int64_t block = seg->n_pairs * DI_TILE_IN, h = job->o.d.h;
    float *dst = job->o.s.x + seg->base * job->h_pad + k0 / DI_TILE_IN * block;
    for (; r < end; r++) {
        panel_pack(&job->o.a->x, job->o.s.pair_row[seg->pair0 + r], 0, h, k0, DI_MIN(job->h_pad - k0, DI_PACK_IN),
                   block, dst + r * DI_TILE_IN);
    }
}

/* Activations of one pair from 32 gate and up products, which are overwritten. Returns false where QA's scale is out of
 * range for coded products. */
static bool activate(const moe_job *job, float *g, float *u, float weight, float *act) {
    const di_v limit = di_v_splat(job->o.a->limit > 0.0f ? job->o.a->limit : __builtin_inff()), one = di_v_splat(1.0f);
    for (int o = 0; job->is_faithful && o < DI_TILE_OUT; o++) {
        g[o] = di_round_bf16(g[o]);
        u[o] = di_round_bf16(u[o]);
    }
    for (int o = 0; o < DI_TILE_OUT; o += DI_LANES) {
        di_v gate = di_v_load(g + o), up = di_v_load(u + o);
        gate = di_v_select(gate > limit, limit, gate);
        up = di_v_select(up > limit, limit, up);
        up = di_v_select(up < -limit, -limit, up);
        di_v_store(act + o, gate / (one + di_v_exp(-gate)) * up * di_v_splat(weight));
    }
    if (!job->is_faithful)
        return true;
    uint8_t codes[DI_TILE_OUT], scale = row_quant_qa_32(act, codes);
    row_e4m3_32(codes, scale, act);
    return di_panel_x_fits(&scale, 1);
}

/* The rows and outputs of a part of the two product phases. */
typedef struct tile_place {
    const di_moe_segment *seg;
    int64_t r0, n_rows, o0;
    int n_out;
} tile_place;

static tile_place place_of(const moe_job *job, di_moe_phase phase, int64_t part, int64_t n_outputs) {
    tile_place p;
    p.seg = di_moe_segment_of(&job->o, phase, &part);
    int64_t row_blocks = DI_CEIL_DIV(p.seg->n_pairs, DI_ROW_BLOCK);
    p.r0 = part % row_blocks * DI_ROW_BLOCK;
    p.n_rows = DI_MIN(p.seg->n_pairs - p.r0, DI_ROW_BLOCK);
    p.o0 = part / row_blocks * DI_TILE_OUT;
    p.n_out = (int)DI_MIN(n_outputs - p.o0, DI_TILE_OUT);
    return p;
}

static void up_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    moe_job *job = ctx;
    tile_place p = place_of(job, DI_MOE_UP, part, job->o.d.inner);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    panel_scratch scratch = panel_scratch_take(&at);
    float *gate = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    float *up = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    int64_t block = p.seg->n_pairs * DI_TILE_IN;
    const float *x = job->o.s.x + p.seg->base * job->h_pad + p.r0 * DI_TILE_IN;
    panel_product(&p.seg->expert->w1, p.o0, p.n_out, x, block, p.n_rows, job->is_coded, job->is_free, &scratch, gate);
    panel_product(&p.seg->expert->w3, p.o0, p.n_out, x, block, p.n_rows, job->is_coded, job->is_free, &scratch, up);
    float *out =
        job->o.s.act + p.seg->base * job->inner_pad + p.o0 / DI_TILE_IN * block + p.r0 * DI_TILE_IN + p.o0 % DI_TILE_IN;
    bool is_in_range = true;
    for (int64_t r = 0; r < p.n_rows; r++, gate += DI_TILE_OUT, up += DI_TILE_OUT, out += DI_TILE_IN) {
        for (int o = p.n_out; o < DI_TILE_OUT; o++)
            gate[o] = up[o] = 0.0f;
        is_in_range &= activate(job, gate, up, job->o.s.pair_weight[p.seg->pair0 + p.r0 + r], out);
    }
    if (!is_in_range)
        atomic_store_explicit(&job->is_act_out_of_range, true, memory_order_relaxed);
}

static void down_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    moe_job *job = ctx;
    tile_place p = place_of(job, DI_MOE_DOWN, part, job->o.d.h);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    panel_scratch scratch = panel_scratch_take(&at);
    float *acc = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    bool is_coded = job->is_faithful && !atomic_load_explicit(&job->is_act_out_of_range, memory_order_relaxed);
    const float *x = job->o.s.act + p.seg->base * job->inner_pad + p.r0 * DI_TILE_IN;
    panel_product(&p.seg->expert->w2, p.o0, p.n_out, x, p.seg->n_pairs * DI_TILE_IN, p.n_rows, is_coded, job->is_free,
                  &scratch, acc);
    float *y = job->o.s.y + (p.seg->base + p.r0) * job->o.d.h + p.o0;
    for (int64_t r = 0; r < p.n_rows; r++, acc += DI_TILE_OUT, y += job->o.d.h) {
        for (int o = 0; job->is_faithful && o < DI_TILE_OUT; o++)
            acc[o] = di_round_bf16(acc[o]);
        memcpy(y, acc, (size_t)p.n_out * sizeof *y);
    }
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
        if (pair < job->o.pair0 || pair >= job->o.pair1)
            continue;
        const float *y = job->o.s.y + (pair - job->o.pair0) * h;
        for (int64_t o = 0; o < h; o++)
            sum[o] += y[o];
    }
    if (!job->o.is_last)
        return;
    for (int64_t o = 0; job->is_faithful && o < h; o++)
        sum[o] = di_round_bf16(sum[o]);
    row_store(&job->o.a->out, row, 0, h, sum);
}

static di_status moe(di_stream *stream, const di_moe_args *a) {
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    uint8_t *shared = di_cpu_shared(stream);
    if (!any || !shared || !di_cpu_moe_fits(a))
        return DI_ERR_SHAPE;
    moe_job job = {.stream = stream, .is_faithful = a->x.dtype == DI_F8_E4M3};
    di_moe_order *o = &job.o;
    o->a = a;
    o->d = (di_moe_dims){a->x.n_rows, a->k + (a->shared ? 1 : 0), a->n_experts + 1, a->x.n_cols, any->w1.n_out};
    if (!di_cpu_scratch_fits(stream, di_moe_scratch_cut(&o->d, NULL, &o->s), di_panel_worker_bytes(2)))
        return DI_ERR_SHAPE;
    di_moe_scratch_cut(&o->d, shared, &o->s);
    job.is_coded = job.is_faithful && di_panel_x_fits(a->x.scale, a->x.n_rows * (a->x.n_cols / 32));
    job.is_free = job.is_faithful && stream->dev->is_order_free;
    job.h_pad = di_panel_floats(1, o->d.h);
    job.inner_pad = di_panel_floats(1, o->d.inner);
    o->rows_of_block[DI_MOE_PACK] = DI_PACK_ROWS;
    o->rows_of_block[DI_MOE_UP] = o->rows_of_block[DI_MOE_DOWN] = DI_ROW_BLOCK;
    o->parts_of_block[DI_MOE_PACK] = DI_CEIL_DIV(job.h_pad, DI_PACK_IN);
    o->parts_of_block[DI_MOE_UP] = DI_CEIL_DIV(o->d.inner, DI_TILE_OUT);
    o->parts_of_block[DI_MOE_DOWN] = DI_CEIL_DIV(o->d.h, DI_TILE_OUT);
    di_moe_order_start(o);
    while (di_moe_order_next(o)) {
        int64_t pairs = o->pair1 - o->pair0, work = pairs * o->d.h * o->d.inner;
        atomic_store_explicit(&job.is_act_out_of_range, false, memory_order_relaxed);
        di_cpu_run(stream, pack_part, &job, o->n_parts[DI_MOE_PACK], pairs * o->d.h);
        di_cpu_run(stream, up_part, &job, o->n_parts[DI_MOE_UP], work * 2);
        di_cpu_run(stream, down_part, &job, o->n_parts[DI_MOE_DOWN], work);
        di_cpu_run(stream, sum_row, &job, o->d.n_rows, pairs * o->d.h);
    }
    return DI_OK;
}

void DI_INSTALL(moe)(di_cpu_kernels *k) {
    k->moe_route = moe_route;
    k->moe = moe;
}
