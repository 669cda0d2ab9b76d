/* The order in which the mixture of experts computes (moe.h): pairs sorted by expert, batches, and room for both. */
#include "moe.h"

#include "panel.h"

static int64_t pairs_max(int64_t n_rows) {
    return DI_MAX(DI_MIN(n_rows, DI_MOE_PAIRS_MAX), DI_MOE_PAIRS_MIN);
}

size_t di_moe_scratch_cut(const di_moe_dims *d, uint8_t *base, di_moe_scratch *out) {
    int64_t pairs = pairs_max(d->n_rows), choices = d->n_rows * d->k;
    size_t total = 0;
#define CUT(field, count)                                                                                              \
    do {                                                                                                               \
        if (base)                                                                                                      \
            out->field = (void *)(base + total);                                                                       \
        total += di_cpu_piece((size_t)(count) * sizeof *out->field);                                                   \
    } while (0)
    CUT(x, di_panel_floats(pairs, d->h));
    CUT(act, di_panel_floats(pairs, d->inner));
    CUT(y, pairs * d->h);
    CUT(sum, d->n_rows * d->h);
    CUT(expert_first, d->n_experts + 1);
    CUT(pair_row, choices);
    CUT(pair_weight, choices);
    CUT(row_pairs, choices);
    CUT(segments, pairs);
#undef CUT
    return total;
}

void di_cpu_need_panel_moe(const di_limits *limits, di_cpu_need *need) {
    int64_t h = limits->hidden_size ? limits->hidden_size : limits->n_in_max;
    if (limits->experts_max < 1)
        return;
    di_moe_dims d = {limits->rows_max, limits->experts_per_row_max + 1, limits->experts_max + 1, h,
                     limits->intermediate};
    di_cpu_need_raise(need, di_moe_scratch_cut(&d, NULL, &(di_moe_scratch){0}), di_panel_worker_bytes(2));
    size_t logits = di_cpu_piece((size_t)(limits->rows_max * limits->experts_max) * sizeof(float));
    di_cpu_need_raise(need, logits + di_panel_gemm_bytes(limits->rows_max, h), (size_t)limits->experts_max);
}

/* ---- routing ---- */

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

di_status di_cpu_route_by(di_stream *stream, const di_moe_route_args *a, di_cpu_products products,
                          size_t worker_bytes) {
    int64_t n = a->x.n_rows, n_experts = a->gate->n_out;
    size_t logits_bytes = di_cpu_piece((size_t)(n * n_experts) * sizeof(float));
    if (!di_cpu_scratch_fits(stream, logits_bytes, DI_MAX((size_t)n_experts, worker_bytes)))
        return DI_ERR_SHAPE;
    route_job job = {a, stream, (float *)di_cpu_shared(stream)};
    di_gemm_args product = {
        .x = a->x,
        .w = a->gate,
        .out = {.dtype = DI_F32, .n_rows = n, .n_cols = n_experts, .stride = n_experts, .data = job.logits},
    };
    di_status st =
        products(stream, &product, di_cpu_shared(stream) + logits_bytes, stream->dev->have.shared - logits_bytes);
    if (st)
        return st;
    di_cpu_run(stream, route_row, &job, n, n * n_experts * 32);
    return DI_OK;
}

/* ---- order ---- */

/* Counting sort by expert; the shared expert has id n_experts - 1 of the dims. */
void di_moe_order_start(di_moe_order *o) {
    const di_moe_args *a = o->a;
    di_moe_scratch *s = &o->s;
    int64_t n = o->d.n_rows, k = o->d.k, n_experts = o->d.n_experts;
    memset(s->expert_first, 0, (size_t)(n_experts + 1) * sizeof *s->expert_first);
    for (int64_t i = 0; i < n * a->k; i++)
        s->expert_first[a->idx[i] + 1]++;
    if (a->shared)
        s->expert_first[n_experts] += (int32_t)n;
    for (int64_t e = 0; e < n_experts; e++)
        s->expert_first[e + 1] += s->expert_first[e];
    for (int64_t row = 0; row < n; row++) {
        int32_t *row_pairs = s->row_pairs + row * k;
        for (int64_t i = 0; i < k; i++) {
            int64_t e = i < a->k ? a->idx[row * a->k + i] : n_experts - 1;
            int32_t pair = s->expert_first[e]++; /* the start moves up; it is moved back below */
            s->pair_row[pair] = (int32_t)row;
            s->pair_weight[pair] = i < a->k ? a->weight[row * a->k + i] : 1.0f;
            int64_t at = i;
            for (; at > 0 && row_pairs[at - 1] > pair; at--)
                row_pairs[at] = row_pairs[at - 1];
            row_pairs[at] = pair;
        }
    }
    memmove(s->expert_first + 1, s->expert_first, (size_t)n_experts * sizeof *s->expert_first);
    s->expert_first[0] = 0;
    o->expert = o->pair0 = o->pair1 = 0;
}

/* Whole experts while their pairs fit. */
bool di_moe_order_next(di_moe_order *o) {
    const di_moe_args *a = o->a;
    int64_t n_pairs = o->d.n_rows * o->d.k, room = pairs_max(o->d.n_rows);
    o->is_first = o->pair1 == 0;
    o->pair0 = o->pair1;
    o->n_segments = 0;
    memset(o->n_parts, 0, sizeof o->n_parts);
    while (o->pair1 < n_pairs) {
        int64_t left = o->s.expert_first[o->expert + 1] - o->pair1, used = o->pair1 - o->pair0;
        if (left == 0) {
            o->expert++;
            continue;
        }
        if (used > 0 && used + left > room)
            break;
        int64_t take = DI_MIN(left, room);
        di_moe_segment *seg = &o->s.segments[o->n_segments++];
        seg->expert = o->expert < a->n_experts ? &a->experts[o->expert] : a->shared;
        seg->pair0 = o->pair1;
        seg->n_pairs = take;
        seg->base = used;
        for (int phase = 0; phase < DI_MOE_PHASES; phase++) {
            seg->first_part[phase] = o->n_parts[phase];
            o->n_parts[phase] += DI_CEIL_DIV(take, o->rows_of_block[phase]) * o->parts_of_block[phase];
        }
        o->pair1 += take;
    }
    o->is_last = o->pair1 == n_pairs;
    return o->n_segments > 0;
}
