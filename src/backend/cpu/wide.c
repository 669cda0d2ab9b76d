/* What the operations on wide products (wide.h) share: the size of a part, the way around unusual weights, the room
 * they need, and their place in the kernel table. */
#include "wide.h"

#include "panel.h"

/* A part reads about this many bytes of weights: long enough that starting it costs little, short enough that threads
 * end together. */
enum { PART_BYTES = 192 << 10 };

int64_t di_wide_outs(const di_wide_engine *e, const di_mat *w, int64_t n_rows) {
    int64_t outs = n_rows > 4 * DI_WIDE_ROWS ? e->outs_max : PART_BYTES / di_wide_row_bytes(w);
    return DI_MAX(DI_MIN(outs, e->outs_max) / DI_WIDE_OUT, 1) * DI_WIDE_OUT;
}

/* Every sum in the order of di_dot32, group by group. */
static void plain(const di_wide_x *x, const di_wide_block *b) {
    float xs[32], ws[32];
    for (int64_t i = 0; i < b->n_rows; i++)
        memset(b->acc + i * b->lda, 0, (size_t)b->n_out * sizeof *b->acc);
    for (int64_t o = 0; o < b->n_out; o++) {
        for (int64_t k = 0; k < x->n_in; k += 32) {
            di_panel_decode_row(b->w, b->o0 + o, k, 32, ws);
            for (int64_t i = 0; i < b->n_rows; i++) {
                int64_t row = b->row0 + i;
                di_cpu_load(x->x, x->rows ? x->rows[row] : x->row0 + row, x->col0 + k, 32, xs);
                b->acc[i * b->lda + o] += di_dot32(xs, ws, 32);
            }
        }
    }
}

void di_wide_products(const di_wide_engine *e, const di_wide_x *x, const di_wide_block *b, bool is_plain,
                      uint8_t *work) {
    if (is_plain || b->n_out < DI_WIDE_OUT_MIN || !e->block(b, work))
        plain(x, b);
}

void di_wide_install(di_cpu_kernels *k, const di_wide_engine *engine) {
    if (!k->wide) {
        k->narrow_gemm = k->gemm;
        k->narrow_moe_route = k->moe_route;
        k->narrow_moe = k->moe;
    }
    k->wide = engine;
    k->gemm = di_wide_gemm;
    k->moe_route = di_wide_route;
    k->moe = di_wide_moe;
}

void di_cpu_need_wide(const di_limits *limits, di_cpu_need *need) {
#if defined(__x86_64__)
    const di_wide_engine *engines[] = {di_wide_avx512(false), di_wide_avx512(true), di_wide_amx()};
    for (size_t i = 0; i < DI_COUNT(engines); i++) {
        di_wide_need_gemm(engines[i], limits, need);
        di_wide_need_moe(engines[i], limits, need);
    }
#else
    (void)limits, (void)need;
#endif
}
