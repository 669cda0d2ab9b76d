/* What the attention kernels of every level share: argument checks and the inverse rotation. Private to backend/cpu. */
#ifndef DI_CPU_ATTENTION_H
#define DI_CPU_ATTENTION_H

#include "cache.h"

/* Whether the arguments fit together and into the reserved limits. (ref_attention.c) */
bool di_cpu_attention_fits(const di_stream *stream, const di_attention_args *a);

/* Rotates the last 2*n_freq values of a head's output [D] back by the row's angles:
 * (a,b) -> (a cos + b sin, b cos - a sin). */
static inline void di_cpu_unrotate(const di_attention_args *a, int64_t row, float *out) {
    const float *cos_row = a->cos + row * a->n_freq, *sin_row = a->sin + row * a->n_freq;
    float *tail = out + a->head_dim - 2 * a->n_freq;
    for (int32_t i = 0; i < a->n_freq; i++) {
        float x = tail[2 * i], y = tail[2 * i + 1], c = cos_row[i], s = sin_row[i];
        tail[2 * i] = x * c + y * s;
        tail[2 * i + 1] = y * c - x * s;
    }
}

/* Scratch of attention_body.h. (portable_attention.c) */
void di_cpu_need_portable_attention(const di_limits *limits, di_cpu_need *need);

#endif
