/* Wide products: faithful products straight from stored weights, 16 outputs side by side. Private to backend/cpu.
 *
 * Where both factors are bf16 values (bf16, or codes times powers of two) every product is exact in fp32, so fused
 * multiply-adds and AMX's tiles give the bits of di_dot32 (model.md 0.3), and a power-of-two scale may be taken out of
 * a group's sums. That holds while nothing underflows or overflows on the way, which is why an engine watches the
 * exponents of what it reads: a block of outputs that holds anything unusual (a NaN, a scale far from 1) is computed
 * again by the plain sums of wide.c.
 *
 * An engine is an instruction set's part of it: packing rows, products of a block, the gate between an expert's
 * matrices. wide_gemm.c and wide_moe.c cut operations into blocks and are the same for all engines. Products that are
 * not of this kind (fp32 rows or weights, inputs that fill no group of 32) go on to the level's other kernels. */
#ifndef DI_CPU_WIDE_H
#define DI_CPU_WIDE_H

#include "cpu.h"

enum {
    DI_WIDE_ROWS = 16, /* rows that are packed together */
    DI_WIDE_OUT = 32,  /* outputs of the smallest piece of work: a scale block's height, a group of QA */
    DI_WIDE_OUT_MIN = 16
};

/* Exponents that engines take. Products of such values are normal and so is every partial sum of 16 of them: the last
 * bit of a product is 2^-14 of it. With codes down to 2^-9 of the scale, 2^-40 * 2^-63 * 2^-14 stays above 2^-126. */
enum {
    DI_WIDE_X_MIN = 127 - 40, /* fields of the exponent of a row's non-zero values */
    DI_WIDE_X_MAX = 127 + 60,
    DI_WIDE_W_MIN = 127 - 63, /* of bf16 weights */
    DI_WIDE_W_MAX = 127 + 61,
    DI_WIDE_SCALE_MIN = 127 - 54, /* bytes of E8M0 weight scales: codes reach from 2^-9 to 2^8.8 */
    DI_WIDE_SCALE_MAX = 127 + 52
};

/* Rows of activations and where they are packed for weights of one dtype. */
typedef struct di_wide_x {
    const di_act *x;     /* DI_BF16 or DI_F8_E4M3 */
    const int32_t *rows; /* rows of x; NULL: row0, row0 + 1, ... */
    int64_t row0, n_rows;
    int64_t col0, n_in; /* columns [col0, col0 + n_in), n_in a multiple of 32 */
    di_dtype weights;
    void *packed; /* packed_bytes(n_rows, n_in), 64-byte aligned */
} di_wide_x;

/* Outputs [o0, o0 + n_out) of w for the packed rows [row0, row0 + n_rows); row0 is a multiple of DI_WIDE_ROWS. */
typedef struct di_wide_block {
    const di_mat *w;
    int64_t o0, n_out; /* n_out >= DI_WIDE_OUT_MIN */
    const void *packed;
    int64_t packed_rows; /* of the whole packed block */
    int64_t row0, n_rows;
    float *acc; /* [n_rows, lda], all n_out columns are written; 64-byte aligned */
    int64_t lda;
    const uint8_t *ahead; /* weights that this worker will probably read next, or NULL */
} di_wide_block;

/* Between an expert's matrices, for 32 columns of one row: codes and scale of QA(silu(g) * u * weight). */
typedef struct di_wide_gate {
    const float *g, *u; /* [n_rows, 32] with stride ld, products of w1 and w3 */
    int64_t ld, n_rows;
    const float *weight; /* [n_rows] */
    float limit;         /* infinity: none */
    uint8_t *codes;      /* [n_rows, codes_ld] */
    int64_t codes_ld;
    uint8_t *scales; /* [n_rows, scales_ld] */
    int64_t scales_ld;
} di_wide_gate;

typedef struct di_wide_engine {
    int64_t rows_max, outs_max; /* of one block */
    size_t work_bytes;          /* scratch of a block beside acc */
    /* Whether gemm with so many rows is faster by this engine than by the level's other kernels. */
    bool (*is_best)(di_dtype weights, int64_t n_rows);
    size_t (*packed_bytes)(int64_t n_rows, int64_t n_in);
    /* Packs groups [g0, g1) of 32 inputs of the rows 16*tile .. ; false when a value is out of range or NaN. */
    bool (*pack)(const di_wide_x *x, int64_t tile, int64_t g0, int64_t g1);
    /* False when the weights hold something unusual: acc is then not to be used. */
    bool (*block)(const di_wide_block *b, uint8_t *work);
    void (*gate)(const di_wide_gate *g);
    /* v [n] (+ add [n] where not NULL) to columns [col, col + n) of a row of DI_F32 or DI_BF16. */
    void (*store)(const di_act *out, int64_t row, int64_t col, int64_t n, const float *v, const float *add);
    void (*accumulate)(float *sum, const uint16_t *y, int64_t n); /* sum += y, bf16 */
} di_wide_engine;

const di_wide_engine *di_wide_avx512(bool has_vnni); /* avx512_wide.c */
const di_wide_engine *di_wide_amx(void);             /* amx_wide.c */

/* ---- wide.c ---- */

static inline bool di_wide_takes(const di_act *x, const di_mat *w) {
    return x->dtype != DI_F32 && w->dtype != DI_F32 && w->n_in % 32 == 0;
}
/* Bytes of one row of weights. */
static inline int64_t di_wide_row_bytes(const di_mat *w) {
    return w->dtype == DI_BF16 ? 2 * w->n_in : w->dtype == DI_F8_E4M3 ? w->n_in : w->n_in / 2;
}
static inline const uint8_t *di_wide_weights(const di_mat *w, int64_t o) {
    return (const uint8_t *)w->data + o * di_wide_row_bytes(w);
}
/* Outputs of a part of a job, a multiple of 32: enough weights to be worth a turn, few enough to share out. */
int64_t di_wide_outs(const di_wide_engine *e, const di_mat *w, int64_t n_rows);
/* A block's products, by the engine or, where is_plain or the engine finds the weights unusual, by plain sums that read
 * rows and weights where they are stored. */
void di_wide_products(const di_wide_engine *e, const di_wide_x *x, const di_wide_block *b, bool is_plain,
                      uint8_t *work);
/* Puts an engine and the operations on it into a table that the levels below have filled. */
void di_wide_install(di_cpu_kernels *k, const di_wide_engine *engine);

/* Scratch of a worker: sums of n_acc blocks, then the engine's own. */
static inline size_t di_wide_worker_bytes(const di_wide_engine *e, int n_acc) {
    return (size_t)n_acc * di_cpu_piece((size_t)(e->rows_max * e->outs_max) * sizeof(float)) + e->work_bytes;
}

/* ---- wide_gemm.c, wide_moe.c ---- */

di_status di_wide_gemm(di_stream *stream, const di_gemm_args *a);
di_status di_wide_route(di_stream *stream, const di_moe_route_args *a);
di_status di_wide_moe(di_stream *stream, const di_moe_args *a);
void di_wide_need_gemm(const di_wide_engine *e, const di_limits *limits, di_cpu_need *need);
void di_wide_need_moe(const di_wide_engine *e, const di_limits *limits, di_cpu_need *need);

#endif
