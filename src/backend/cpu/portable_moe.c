/* The mixture of experts by panels: rows are grouped by expert, so that each expert's weights are read once per call.
 *
 * A (row, expert) choice is a pair. Pairs are sorted by expert, rows rising; the shared expert is one more expert at
 * the end, chosen by every row. Batches of whole experts go through four jobs whose parts are fixed tiles:
 *
 *     pack    x of the pairs' rows into panels, expert after expert
 *     up      tile of 32 columns of w1 and w3 -> clamp, silu, weight, QA -> packed again, ready for w2
 *     down    tile of 32 columns of w2 -> y [pair, H], rounded to bf16
 *     sum     row by row: + y of its pairs of this batch, in rising expert id
 *
 * Batches bound the memory: together their pairs, padded to whole panels, fit PAIRS rows. Only an expert with more rows
 * than that is cut. Because batches follow the experts' order, so does every row's sum. */
#include "moe.h"
#include "panel.h"
#include "tensor/math_inline.h"

enum { PAIRS_MIN = 256, PAIRS_MAX = 1024, PACK_IN = 1024 };

/* ---- sizes ---- */

typedef struct moe_dims {
    int64_t n_rows, k, n_experts, h, inner; /* k and n_experts count the shared expert */
} moe_dims;

typedef enum moe_phase { PACK, UP, DOWN, N_PHASES } moe_phase;

/* Pairs of one expert in a batch. */
typedef struct segment {
    const di_expert *expert;
    int64_t pair0, n_pairs;
    int64_t base; /* rows of panels before it */
    int64_t first_part[N_PHASES];
} segment;

/* Shared scratch. */
typedef struct moe_scratch {
    float *x, *act, *y;    /* [pairs_max, h padded], [pairs_max, inner padded], [pairs_max, h] */
    float *sum;            /* [n_rows, h] */
    int32_t *expert_first; /* [n_experts + 1]: its pairs are expert_first[e] .. expert_first[e+1]-1 */
    int32_t *pair_row;     /* [n_rows * k], sorted by expert */
    float *pair_weight;    /* the same */
    int32_t *pair_y;       /* the same: row of y */
    int32_t *row_pairs;    /* [n_rows, k]: pairs of a row, rising */
    segment *segments;     /* [pairs_max] */
} moe_scratch;

static int64_t pairs_max(int64_t n_rows) {
    return DI_MAX(DI_MIN(DI_ROUND_UP(n_rows, DI_PANEL_LANES), PAIRS_MAX), PAIRS_MIN);
}

/* Cuts scratch at `base` and returns its size; with base NULL it only counts. */
static size_t cut_scratch(const moe_dims *d, uint8_t *base, moe_scratch *out) {
    size_t pairs = (size_t)pairs_max(d->n_rows), choices = (size_t)(d->n_rows * d->k), total = 0;
#define CUT(field, count)                                                                                              \
    do {                                                                                                               \
        if (base)                                                                                                      \
            out->field = (void *)(base + total);                                                                       \
        total += di_cpu_piece((size_t)(count) * sizeof *out->field);                                                   \
    } while (0)
    CUT(x, pairs * (size_t)DI_ROUND_UP(d->h, 32));
    CUT(act, pairs * (size_t)DI_ROUND_UP(d->inner, 32));
    CUT(y, pairs * (size_t)d->h);
    CUT(sum, d->n_rows * d->h);
    CUT(expert_first, d->n_experts + 1);
    CUT(pair_row, choices);
    CUT(pair_weight, choices);
    CUT(pair_y, choices);
    CUT(row_pairs, choices);
    CUT(segments, pairs);
#undef CUT
    return total;
}

void di_cpu_need_portable_moe(const di_limits *limits, di_cpu_need *need) {
    int64_t h = limits->hidden_size ? limits->hidden_size : limits->n_in_max;
    if (limits->experts_max < 1)
        return;
    moe_dims d = {limits->rows_max, limits->experts_per_row_max + 1, limits->experts_max + 1, h, limits->intermediate};
    di_cpu_need_raise(need, cut_scratch(&d, NULL, &(moe_scratch){0}), di_panel_worker_bytes(2));
    size_t logits = di_cpu_piece((size_t)(limits->rows_max * limits->experts_max) * sizeof(float));
    di_cpu_need_raise(need, logits + di_panel_gemm_bytes(limits->rows_max, h), (size_t)limits->experts_max);
}

/* ---- moe_route ---- */

typedef struct route_job {
    const di_moe_route_args *a;
    const di_stream *stream;
    float *logits;
} route_job;

static void route_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows;
    const route_job *job = ctx;
    di_cpu_route_row(job->a, row, job->logits + row * job->a->gate->n_out, di_cpu_worker(job->stream, worker));
}

static di_status moe_route(di_stream *stream, const di_moe_route_args *a) {
    if (!di_cpu_route_fits(a))
        return DI_ERR_SHAPE;
    int64_t n = a->x.n_rows, n_experts = a->gate->n_out;
    size_t logits_bytes = di_cpu_piece((size_t)(n * n_experts) * sizeof(float));
    if (!di_cpu_scratch_fits(stream, logits_bytes, DI_MAX((size_t)n_experts, di_panel_worker_bytes(1))))
        return DI_ERR_SHAPE;
    route_job job = {a, stream, (float *)di_cpu_shared(stream)};
    di_gemm_args product = {
        .x = a->x,
        .w = a->gate,
        .out = {.dtype = DI_F32, .n_rows = n, .n_cols = n_experts, .stride = n_experts, .data = job.logits},
    };
    di_status st =
        di_panel_gemm(stream, &product, di_cpu_shared(stream) + logits_bytes, stream->dev->have.shared - logits_bytes);
    if (st)
        return st;
    di_cpu_run(stream, route_row, &job, n, n * n_experts * 32);
    return DI_OK;
}

/* ---- moe: the order of pairs ---- */

typedef struct moe_job {
    const di_moe_args *a;
    const di_stream *stream;
    moe_dims d;
    moe_scratch s;
    bool is_faithful;
    int64_t h_pad, inner_pad, up_tiles, down_tiles, pack_parts;
    /* the batch: */
    int64_t n_segments, pair0, pair1;
    bool is_first, is_last;
} moe_job;

/* Counting sort by expert; the shared expert has id n_experts. */
static void sort_pairs(moe_job *job) {
    const di_moe_args *a = job->a;
    moe_scratch *s = &job->s;
    int64_t n = job->d.n_rows, k = job->d.k, n_experts = job->d.n_experts;
    memset(s->expert_first, 0, (size_t)(n_experts + 1) * sizeof *s->expert_first);
    for (int64_t i = 0; i < n * a->k; i++)
        s->expert_first[a->idx[i] + 1]++;
    if (a->shared)
        s->expert_first[n_experts] += (int32_t)n;
    for (int64_t e = 0; e < n_experts; e++)
        s->expert_first[e + 1] += s->expert_first[e];
    for (int64_t row = 0; row < n; row++) {
        for (int64_t i = 0; i < k; i++) {
            int64_t e = i < a->k ? a->idx[row * a->k + i] : n_experts - 1;
            int32_t pair = s->expert_first[e]++; /* the start moves up; it is moved back below */
            s->pair_row[pair] = (int32_t)row;
            s->pair_weight[pair] = i < a->k ? a->weight[row * a->k + i] : 1.0f;
            int64_t at = i;
            int32_t *row_pairs = s->row_pairs + row * k;
            for (; at > 0 && row_pairs[at - 1] > pair; at--)
                row_pairs[at] = row_pairs[at - 1];
            row_pairs[at] = pair;
        }
    }
    memmove(s->expert_first + 1, s->expert_first, (size_t)n_experts * sizeof *s->expert_first);
    s->expert_first[0] = 0;
}

/* Fills the batch from pair `pair0` on: whole experts while their panels fit. Returns false when no pairs are left. */
static bool next_batch(moe_job *job, int64_t *expert, int64_t n_parts[N_PHASES]) {
    const di_moe_args *a = job->a;
    int64_t n_pairs = job->d.n_rows * job->d.k, room = pairs_max(job->d.n_rows), used = 0;
    job->is_first = job->pair1 == 0;
    job->pair0 = job->pair1;
    job->n_segments = 0;
    n_parts[PACK] = n_parts[UP] = n_parts[DOWN] = 0;
    while (job->pair1 < n_pairs) {
        int64_t left = job->s.expert_first[*expert + 1] - job->pair1;
        if (left == 0) {
            ++*expert;
            continue;
        }
        if (used > 0 && used + di_panel_rows(left) > room)
            break;
        int64_t take = di_panel_rows(left) > room ? room : left;
        int64_t row_blocks = DI_CEIL_DIV(take, DI_ROW_BLOCK);
        job->s.segments[job->n_segments++] = (segment){
            .expert = *expert < a->n_experts ? &a->experts[*expert] : a->shared,
            .pair0 = job->pair1,
            .n_pairs = take,
            .base = used,
            .first_part = {n_parts[PACK], n_parts[UP], n_parts[DOWN]},
        };
        n_parts[PACK] += DI_CEIL_DIV(take, DI_PANEL_LANES) * job->pack_parts;
        n_parts[UP] += row_blocks * job->up_tiles;
        n_parts[DOWN] += row_blocks * job->down_tiles;
        for (int64_t i = 0; i < take; i++)
            job->s.pair_y[job->pair1 + i] = (int32_t)(used + i);
        used += di_panel_rows(take);
        job->pair1 += take;
    }
    job->is_last = job->pair1 == n_pairs;
    return job->n_segments > 0;
}

/* The segment that holds part `part` of a phase; *part becomes its number inside the segment. */
static const segment *find_segment(const moe_job *job, moe_phase phase, int64_t *part) {
    int64_t lo = 0, hi = job->n_segments;
    while (hi - lo > 1) {
        int64_t mid = lo + (hi - lo) / 2;
        if (job->s.segments[mid].first_part[phase] <= *part)
            lo = mid;
        else
            hi = mid;
    }
    *part -= job->s.segments[lo].first_part[phase];
    return &job->s.segments[lo];
}

/* ---- moe: the four jobs ---- */

static void pack_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts, (void)worker;
    const moe_job *job = ctx;
    const segment *seg = find_segment(job, PACK, &part);
    int64_t k0 = part % job->pack_parts * PACK_IN, r = part / job->pack_parts * DI_PANEL_LANES;
    int64_t end = DI_MIN(r + DI_PANEL_LANES, seg->n_pairs);
    while (r < end) {
        int lanes = di_panel_lanes(seg->n_pairs - r);
        di_panel_pack(&job->a->x, job->s.pair_row + seg->pair0 + r, 0, (int)DI_MIN(end - r, lanes), lanes, 0, job->d.h,
                      k0, DI_MIN(job->h_pad - k0, PACK_IN), job->s.x + (seg->base + r) * job->h_pad);
        r += lanes;
    }
}

/* 32 activations of one pair from its gate and up products. */
static void activate(const moe_job *job, const float *g_in, const float *u_in, float weight, float *act) {
    float limit = job->a->limit > 0.0f ? job->a->limit : __builtin_inff();
    float g[DI_TILE_OUT], u[DI_TILE_OUT];
    memcpy(g, g_in, sizeof g);
    memcpy(u, u_in, sizeof u);
    for (int o = 0; job->is_faithful && o < DI_TILE_OUT; o++) {
        g[o] = di_round_bf16(g[o]);
        u[o] = di_round_bf16(u[o]);
    }
    for (int o = 0; o < DI_TILE_OUT; o++) {
        g[o] = g[o] > limit ? limit : g[o];
        u[o] = u[o] > limit ? limit : u[o];
        u[o] = u[o] < -limit ? -limit : u[o];
        act[o] = g[o] / (1.0f + di_expf_inline(-g[o])) * u[o] * weight;
    }
    if (job->is_faithful) {
        uint8_t codes[DI_TILE_OUT], scale;
        di_quant_qa(act, DI_TILE_OUT, codes, &scale); /* never scale 0: the least is 2^-22 */
        di_dequant_qa(codes, &scale, DI_TILE_OUT, act);
    }
}

static void up_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const moe_job *job = ctx;
    const segment *seg = find_segment(job, UP, &part);
    int64_t row_blocks = DI_CEIL_DIV(seg->n_pairs, DI_ROW_BLOCK), r0 = part % row_blocks * DI_ROW_BLOCK;
    int64_t o0 = part / row_blocks * DI_TILE_OUT, n_rows = DI_MIN(seg->n_pairs - r0, DI_ROW_BLOCK);
    int n_out = (int)DI_MIN(job->d.inner - o0, DI_TILE_OUT);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *decoded = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_TILE_IN);
    float *gate = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    float *up = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    const float *x = job->s.x + (seg->base + r0) * job->h_pad;
    di_panel_tile(&seg->expert->w1, o0, n_out, x, n_rows, decoded, gate);
    di_panel_tile(&seg->expert->w3, o0, n_out, x, n_rows, decoded, up);
    for (int64_t r = 0; r < n_rows;) {
        int lanes = di_panel_lanes(n_rows - r);
        float *out = job->s.act + (seg->base + r0 + r) * job->inner_pad + o0 * lanes;
        for (int lane = 0; lane < lanes; lane++) {
            float g[DI_TILE_OUT] = {0}, u[DI_TILE_OUT] = {0}, act[DI_TILE_OUT] = {0};
            if (r + lane < n_rows) {
                for (int o = 0; o < n_out; o++)
                    g[o] = gate[o * lanes + lane], u[o] = up[o * lanes + lane];
                activate(job, g, u, job->s.pair_weight[seg->pair0 + r0 + r + lane], act);
            }
            for (int o = 0; o < DI_TILE_OUT; o++)
                out[o * lanes + lane] = act[o];
        }
        gate += DI_TILE_OUT * lanes;
        up += DI_TILE_OUT * lanes;
        r += lanes;
    }
}

static void down_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const moe_job *job = ctx;
    const segment *seg = find_segment(job, DOWN, &part);
    int64_t row_blocks = DI_CEIL_DIV(seg->n_pairs, DI_ROW_BLOCK), r0 = part % row_blocks * DI_ROW_BLOCK;
    int64_t o0 = part / row_blocks * DI_TILE_OUT, n_rows = DI_MIN(seg->n_pairs - r0, DI_ROW_BLOCK);
    int n_out = (int)DI_MIN(job->d.h - o0, DI_TILE_OUT);
    uint8_t *at = di_cpu_worker(job->stream, worker);
    float *decoded = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_TILE_IN);
    float *acc = di_cpu_take(&at, sizeof(float) * DI_TILE_OUT * DI_ROW_BLOCK);
    di_panel_tile(&seg->expert->w2, o0, n_out, job->s.act + (seg->base + r0) * job->inner_pad, n_rows, decoded, acc);
    for (int64_t r = 0; r < n_rows;) {
        int lanes = di_panel_lanes(n_rows - r);
        for (int64_t lane = 0; lane < DI_MIN(lanes, n_rows - r); lane++) {
            float *y = job->s.y + (seg->base + r0 + r + lane) * job->d.h + o0;
            for (int o = 0; o < n_out; o++) {
                y[o] = job->is_faithful ? di_round_bf16(acc[o * lanes + lane]) : acc[o * lanes + lane];
            }
        }
        acc += DI_TILE_OUT * lanes;
        r += lanes;
    }
}

static void sum_row(void *ctx, int64_t row, int64_t n_rows, int worker) {
    (void)n_rows, (void)worker;
    const moe_job *job = ctx;
    int64_t h = job->d.h;
    float *sum = job->s.sum + row * h;
    if (job->is_first)
        memset(sum, 0, (size_t)h * sizeof *sum);
    for (int64_t i = 0; i < job->d.k; i++) {
        int64_t pair = job->s.row_pairs[row * job->d.k + i];
        if (pair < job->pair0 || pair >= job->pair1)
            continue;
        const float *y = job->s.y + job->s.pair_y[pair] * h;
        for (int64_t o = 0; o < h; o++)
            sum[o] += y[o];
    }
    if (!job->is_last)
        return;
    for (int64_t o = 0; job->is_faithful && o < h; o++)
        sum[o] = di_round_bf16(sum[o]);
    di_cpu_store(&job->a->out, row, 0, h, sum);
}

static di_status moe(di_stream *stream, const di_moe_args *a) {
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    uint8_t *shared = di_cpu_shared(stream);
    if (!any || !shared || !di_cpu_moe_fits(a))
        return DI_ERR_SHAPE;
    moe_job job = {.a = a, .stream = stream, .is_faithful = a->x.dtype == DI_F8_E4M3};
    job.d = (moe_dims){a->x.n_rows, a->k + (a->shared ? 1 : 0), a->n_experts + 1, a->x.n_cols, any->w1.n_out};
    if (!di_cpu_scratch_fits(stream, cut_scratch(&job.d, NULL, &job.s), di_panel_worker_bytes(2)))
        return DI_ERR_SHAPE;
    cut_scratch(&job.d, shared, &job.s);
    job.h_pad = DI_ROUND_UP(job.d.h, 32);
    job.inner_pad = DI_ROUND_UP(job.d.inner, 32);
    job.up_tiles = DI_CEIL_DIV(job.d.inner, DI_TILE_OUT);
    job.down_tiles = DI_CEIL_DIV(job.d.h, DI_TILE_OUT);
    job.pack_parts = DI_CEIL_DIV(job.h_pad, PACK_IN);
    sort_pairs(&job);
    int64_t expert = 0, n_parts[N_PHASES];
    while (next_batch(&job, &expert, n_parts)) {
        int64_t pairs = job.pair1 - job.pair0;
        di_cpu_run(stream, pack_part, &job, n_parts[PACK], pairs * job.d.h);
        di_cpu_run(stream, up_part, &job, n_parts[UP], pairs * job.d.h * job.d.inner * 2);
        di_cpu_run(stream, down_part, &job, n_parts[DOWN], pairs * job.d.h * job.d.inner);
        di_cpu_run(stream, sum_row, &job, job.d.n_rows, pairs * job.d.h);
    }
    return DI_OK;
}

void di_cpu_install_portable_moe(di_cpu_kernels *k) {
    k->moe_route = moe_route;
    k->moe = moe;
}
