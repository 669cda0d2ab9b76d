/* What the mixture-of-experts kernels of every level share: argument checks, routing from logits, the gated activation,
 * and the order in which rows meet experts. Private to backend/cpu.
 *
 * A (row, expert) choice is a pair. Pairs are sorted by expert, rows rising; the shared expert is one more expert at
 * the end, chosen by every row. Batches of whole experts bound the memory: together their pairs are at most
 * DI_MOE_PAIRS_MAX, and only an expert with more rows than that is cut. Because batches follow the experts' order, so
 * does every row's sum. */
#ifndef DI_CPU_MOE_H
#define DI_CPU_MOE_H

#include "cpu.h"

#define DI_CPU_EXPERTS_PER_ROW_MAX 64

bool di_cpu_route_fits(const di_moe_route_args *a);
/* Writes idx and weight of a row from its logits [E], which become scores; chosen [E] is scratch. */
void di_cpu_route_row(const di_moe_route_args *a, int64_t row, float *logits, uint8_t *chosen);
/* A level's product, with scratch for it in the shared memory. */
typedef di_status (*di_cpu_products)(di_stream *stream, const di_gemm_args *a, uint8_t *scratch, size_t scratch_bytes);
/* moe_route with the logits of all rows from a product, then row by row; each worker has worker_bytes or more. */
di_status di_cpu_route_by(di_stream *stream, const di_moe_route_args *a, di_cpu_products products, size_t worker_bytes);

bool di_cpu_moe_fits(const di_moe_args *a);

/* silu(g)*u*weight after the clamps; is_faithful rounds g and u to bf16 first. */
static inline float di_cpu_swiglu(float g, float u, float weight, float limit, bool is_faithful) {
    if (is_faithful) {
        g = di_round_bf16(g);
        u = di_round_bf16(u);
    }
    if (limit > 0.0f) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    return g / (1.0f + di_expf(-g)) * u * weight;
}

/* ---- pairs and batches (moe.c) ---- */

enum { DI_MOE_PAIRS_MIN = 256, DI_MOE_PAIRS_MAX = 1024 };

/* What has to be known to make room for one call. */
typedef struct di_moe_dims {
    int64_t n_rows, k, n_experts, h, inner; /* k and n_experts count the shared expert */
} di_moe_dims;

/* Jobs whose parts are numbered through all segments of a batch. */
typedef enum di_moe_phase { DI_MOE_PACK, DI_MOE_UP, DI_MOE_DOWN, DI_MOE_PHASES } di_moe_phase;

/* Pairs of one expert in a batch. */
typedef struct di_moe_segment {
    const di_expert *expert;
    int64_t pair0, n_pairs;
    int64_t base; /* pairs of the batch before it */
    int64_t first_part[DI_MOE_PHASES];
} di_moe_segment;

/* Shared scratch. */
typedef struct di_moe_scratch {
    float *x, *act, *y;       /* packed (panel.h), expert after expert, [pairs, H] and [pairs, I]; [pairs, H] */
    float *sum;               /* [n_rows, H] */
    int32_t *expert_first;    /* [n_experts + 1]: its pairs are expert_first[e] .. expert_first[e+1]-1 */
    int32_t *pair_row;        /* [n_rows * k], sorted by expert */
    float *pair_weight;       /* the same */
    int32_t *row_pairs;       /* [n_rows, k]: pairs of a row, rising */
    di_moe_segment *segments; /* [pairs] */
} di_moe_scratch;

/* One call: the pairs in order, then batch after batch. Part sizes: a unit of each phase is one block of rows of an
 * expert times one of parts_of_block[phase]. */
typedef struct di_moe_order {
    const di_moe_args *a;
    di_moe_dims d;
    di_moe_scratch s;
    int64_t rows_of_block[DI_MOE_PHASES], parts_of_block[DI_MOE_PHASES];
    /* the batch: */
    int64_t expert, n_segments, pair0, pair1;
    int64_t n_parts[DI_MOE_PHASES];
    bool is_first, is_last;
} di_moe_order;

/* Cuts scratch at `base` and returns its size; with base NULL it only counts. */
size_t di_moe_scratch_cut(const di_moe_dims *d, uint8_t *base, di_moe_scratch *out);
/* Sorts the pairs; a, d, s, rows_of_block and parts_of_block are set. */
void di_moe_order_start(di_moe_order *o);
/* The next batch; false when no pairs are left. */
bool di_moe_order_next(di_moe_order *o);

/* The segment that holds part `*part` of a phase; *part becomes its number inside the segment. */
static inline const di_moe_segment *di_moe_segment_of(const di_moe_order *o, di_moe_phase phase, int64_t *part) {
    int64_t lo = 0, hi = o->n_segments;
    while (hi - lo > 1) {
        int64_t mid = lo + (hi - lo) / 2;
        if (o->s.segments[mid].first_part[phase] <= *part)
            lo = mid;
        else
            hi = mid;
    }
    *part -= o->s.segments[lo].first_part[phase];
    return &o->s.segments[lo];
}

/* Scratch of moe and moe_route. */
void di_cpu_need_panel_moe(const di_limits *limits, di_cpu_need *need);

#endif
