/* What the mixture-of-experts kernels of every level share: argument checks, routing from logits, the gated activation.
 * Private to backend/cpu. */
#ifndef DI_CPU_MOE_H
#define DI_CPU_MOE_H

#include "cpu.h"

#define DI_CPU_EXPERTS_PER_ROW_MAX 64

bool di_cpu_route_fits(const di_moe_route_args *a);
/* Writes idx and weight of a row from its logits [E], which become scores; chosen [E] is scratch. */
void di_cpu_route_row(const di_moe_route_args *a, int64_t row, float *logits, uint8_t *chosen);

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

/* Scratch of portable_moe.c. */
void di_cpu_need_portable_moe(const di_limits *limits, di_cpu_need *need);

#endif
