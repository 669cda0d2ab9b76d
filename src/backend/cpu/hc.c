/* Scratch of the hc_mix kernels that take rows in blocks. */
#include "hc.h"

#include "panel.h"

di_hc_scratch di_hc_scratch_for(int64_t h) {
    return (di_hc_scratch){
        .z = (size_t)(DI_HC_ROWS * h) * sizeof(float),
        .rows = DI_HC_ROWS * DI_TILE_IN * sizeof(float),
        .tile = (DI_TILE_OUT + 4) * DI_TILE_IN * sizeof(float),
        .acc = DI_ROUND_UP(DI_HC_DOTS_MAX, DI_TILE_OUT) * DI_HC_ROWS * sizeof(float),
    };
}

size_t di_hc_scratch_bytes(int64_t h) {
    di_hc_scratch s = di_hc_scratch_for(h);
    return di_cpu_piece(s.z) + di_cpu_piece(s.rows) + di_cpu_piece(s.tile) + di_cpu_piece(s.acc);
}

size_t di_hc_split_bytes(int64_t n_rows, int64_t n_cols) {
    return di_cpu_piece((size_t)(n_rows * DI_CEIL_DIV(n_cols, 32) * 2 * DI_HC_SPLIT_DOTS) * sizeof(float));
}

void di_cpu_need_hc_blocks(const di_limits *limits, di_cpu_need *need) {
    int64_t h = limits->hidden_size ? limits->hidden_size : limits->n_in_max;
    int64_t rows = DI_MIN(limits->rows_max, DI_HC_SPLIT_ROWS);
    di_cpu_need_raise(need, di_hc_split_bytes(rows, limits->n_in_max), di_hc_scratch_bytes(h));
}
