/* The draft module's own operation on the device: the confidence head (dspark.md 4.4.2).
 *
 * A block takes one row: the dot product over hidden state and embedding, side by side, in groups of 32 by four lanes
 * each, then the groups in their order. Bits are the CPU reference's. */
#include "rows.cuh"

size_t di_cuda_need_draft(const di_device *dev, const di_limits *limits) {
    (void)dev, (void)limits;
    return 0;
}

enum { CONFIDENCE_THREADS = 384 };

/* Columns [col, col + 8) of hid and emb side by side. With T known no eight lie across the border. */
template <class T>
__device__ static inline void load_both(const di_act &hid, const di_act &emb, int64_t row, int64_t col, float (&v)[8]) {
    int64_t h = hid.n_cols, n = h + emb.n_cols;
    if constexpr (std::is_void_v<T>) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int64_t c = col + i;
            v[i] = c < h ? cu_act_load(hid, row, c) : c < n ? cu_act_load(emb, row, c - h) : 0.0f;
        }
    } else if (col < h) {
        cu_row_load8<T>(hid, row, col, h, v);
    } else {
        cu_row_load8<T>(emb, row, col - h, n - h, v);
    }
}

template <class T> __global__ void confidence_kernel(di_act hid, di_act emb, di_mat w, float tau, float *conf) {
    DI_DYN_SHARED(float, sums);
    cu_grid_begin();
    int64_t row = blockIdx.x, n = w.n_in;
    for (int64_t col0 = 0; col0 < n; col0 += (int64_t)blockDim.x * 8) {
        int64_t col = col0 + (int64_t)threadIdx.x * 8;
        float x[8], products[8];
        load_both<T>(hid, emb, row, col, x);
        if constexpr (std::is_void_v<T>) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                products[i] = col + i < n ? cu_mat_load(w, 0, col + i) * x[i] : 0.0f;
        } else {
            float weights[8];
            cu_weights8<true>((const uint16_t *)w.data, col, n, weights);
#pragma unroll
            for (int i = 0; i < 8; i++)
                products[i] = weights[i] * x[i];
        }
        float sum = cu_quad_sum(products);
        if (threadIdx.x % 4 == 3 && col - 24 < n)
            sums[col / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= DI_WARP)
        return;
    float v = cu_ordered_sum(sums, (int)((n + 31) / 32)) / tau;
    v = v < -60.0f ? -60.0f : v > 60.0f ? 60.0f : v;
    if (threadIdx.x == 0)
        conf[row] = cu_sigmoid(v);
}

di_status di_cuda_confidence(di_stream *stream, const di_confidence_args *a) {
    if (!di_cuda_is_real(&a->hid) || !di_cuda_is_real(&a->emb) || a->hid.n_rows != a->emb.n_rows ||
        !di_cuda_is_mat(a->w) || a->w->n_out != 1 || a->w->n_in != a->hid.n_cols + a->emb.n_cols ||
        a->w->n_in > 32 * 12288 || (a->hid.n_rows && !a->conf))
        return DI_ERR_SHAPE;
    if (!a->hid.n_rows)
        return DI_OK;
    bool is_wide = a->hid.dtype == a->emb.dtype && di_rows_is_wide(&a->hid) && di_rows_is_wide(&a->emb) &&
                   a->w->dtype == DI_BF16 && di_rows_is_aligned(a->w->data, 0, 16);
    di_mat w = *a->w;
    size_t smem = (size_t)((w.n_in + 31) / 32 * 4 + 16);
    DI_ROWS_BY_TYPE(is_wide, a->hid.dtype,
                    DI_LAUNCH_PDL((confidence_kernel<T>), (unsigned)a->hid.n_rows, CONFIDENCE_THREADS, smem,
                                  stream->stream, a->hid, a->emb, w, a->tau, a->conf));
    return DI_OK;
}
