/* Row-wise operations on the device: embed, rms_norm, quant, rope_table, rope, stream_mean, gather.
 *
 * Each is bound by memory or, with few rows, by latency: 16-byte accesses, everything of a thread loaded before the
 * first use, blocks for pieces of a row where nothing but the elements is computed. The bits are the CPU reference's
 * (cos and sin: the double's result rounded, an ulp at most from a C library's). Formulas: ops.h, model.md 3.1, 3.3,
 * 3.4. */
#include "rows.cuh"

size_t di_cuda_need_dense(const di_device *dev, const di_limits *limits) {
    (void)dev, (void)limits;
    return 0;
}

enum { THREADS = 256 };

/* Threads for n items, a multiple of 32, at most THREADS. */
static int threads_for(int64_t n) {
    return n >= THREADS ? THREADS : (int)((n + 31) / 32 * 32);
}
static unsigned blocks_for(int64_t n, int per_block) {
    return (unsigned)((n + per_block - 1) / per_block);
}

/* ---- embed ---- */

/* Grid (row, piece of the table's columns). T is of out; the table is bf16. */
template <class T>
__global__ void embed_kernel(const uint16_t *table, int64_t n_table, int64_t n_cols, const int32_t *ids, int32_t copies,
                             di_act out) {
    int64_t row = blockIdx.x, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    cu_grid_begin();
    if (col >= n_cols)
        return;
    int64_t id = ids[row];
    bool is_known = id >= 0 && id < n_table;
    const uint16_t *from = table + (is_known ? id : 0) * n_cols + col;
    if constexpr (std::is_void_v<T>) {
        for (int32_t copy = 0; copy < copies; copy++) {
            for (int i = 0; i < 8 && col + i < n_cols; i++) {
                int64_t at = row * out.stride + copy * n_cols + col + i;
                uint16_t v = is_known ? from[i] : 0;
                if (out.dtype == DI_F32)
                    ((float *)out.data)[at] = cu_bf16_to_f32(v);
                else
                    ((uint16_t *)out.data)[at] = v;
            }
        }
    } else {
        uint4 q = is_known ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
        float v[8];
        cu_unpack8(q, v);
        for (int32_t copy = 0; copy < copies; copy++) {
            T *to = (T *)out.data + row * out.stride + copy * n_cols + col;
            if constexpr (std::is_same_v<T, float>)
                cu_store8(to, v);
            else
                *(uint4 *)to = q;
        }
    }
}

di_status di_cuda_embed(di_stream *stream, const di_embed_args *a) {
    if (!di_cuda_is_mat(a->table) || a->table->dtype != DI_BF16 || !di_cuda_is_real(&a->out) || a->copies < 1 ||
        a->out.n_cols != a->copies * a->table->n_in || !a->ids)
        return DI_ERR_SHAPE;
    if (!a->out.n_rows)
        return DI_OK;
    int64_t n_cols = a->table->n_in, eights = (n_cols + 7) / 8;
    bool is_wide = di_rows_is_wide(&a->out) && n_cols % 8 == 0 && di_rows_is_aligned(a->table->data, n_cols * 2, 16);
    int n_threads = threads_for(eights);
    dim3 grid((unsigned)a->out.n_rows, blocks_for(eights, n_threads));
    DI_ROWS_BY_TYPE(is_wide, a->out.dtype,
                    DI_LAUNCH_PDL((embed_kernel<T>), grid, n_threads, 0, stream->stream,
                                  (const uint16_t *)a->table->data, a->table->n_out, n_cols, a->ids, a->copies,
                                  a->out));
    return DI_OK;
}

/* ---- rms_norm ---- */

/* A block a row; P pieces of eight values a thread are held, with P = 0 they are read again. */
template <class T, int P>
__global__ void __launch_bounds__(DI_ROWS_THREADS_MAX)
    rms_norm_kernel(di_act x, di_act out, const uint16_t *weight, float eps) {
    DI_DYN_SHARED(float, sums);
    __shared__ float inverse;
    constexpr bool IS_WIDE = !std::is_void_v<T>;
    constexpr int HELD = P ? P : 1;
    int64_t row = blockIdx.x, n = x.n_cols, step = (int64_t)blockDim.x * 8, first = (int64_t)threadIdx.x * 8;
    int n_pieces = P ? P : (int)((n + step - 1) / step);
    float v[HELD][8], w[HELD][8], squares[8];
#pragma unroll
    for (int p = 0; p < HELD; p++)
        cu_weights8<IS_WIDE>(weight, first + p * step, n, w[p]);
    cu_grid_begin();
#pragma unroll
    for (int p = 0; p < HELD; p++)
        cu_row_load8<T>(x, row, first + p * step, n, v[p]);
#pragma unroll
    for (int p = 0; p < (P ? P : n_pieces); p++) {
        int64_t col = first + p * step;
        if (!P)
            cu_row_load8<T>(x, row, col, n, v[0]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares[i] = v[P ? p : 0][i] * v[P ? p : 0][i];
        float sum = cu_quad_sum(squares);
        if (threadIdx.x % 4 == 3 && col - 24 < n) /* the group's first column is in the row */
            sums[col / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x < DI_WARP) {
        float mean = cu_ordered_sum(sums, (int)((n + 31) / 32)) / (float)n;
        if (threadIdx.x == 0)
            inverse = 1.0f / sqrtf(mean + eps);
    }
    __syncthreads();
    float r = inverse;
#pragma unroll
    for (int p = 0; p < (P ? P : n_pieces); p++) {
        int64_t col = first + p * step;
        float *value = v[P ? p : 0], *scale = w[P ? p : 0];
        if (!P) {
            cu_row_load8<T>(x, row, col, n, v[0]);
            cu_weights8<IS_WIDE>(weight, col, n, w[0]);
        }
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            y[i] = value[i] * r * scale[i];
        cu_row_store8<T>(out, row, col, n, y);
    }
}

di_status di_cuda_rms_norm(di_stream *stream, const di_rms_norm_args *a) {
    int64_t n = a->x.n_cols;
    if (!di_cuda_is_real(&a->x) || !di_cuda_is_real(&a->out) || !a->weight || n < 1 || n > 32 * 12288 ||
        a->out.n_cols != n || a->out.n_rows != a->x.n_rows)
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    const uint16_t *weight = (const uint16_t *)a->weight;
    bool is_wide = a->x.dtype == a->out.dtype && di_rows_is_wide(&a->x) && di_rows_is_wide(&a->out) &&
                   di_rows_is_aligned(weight, 0, 16);
    di_rows_shape shape = di_rows_shape_for(n);
    size_t smem = (size_t)((n + 31) / 32 * 4 + 16);
    unsigned grid = (unsigned)a->x.n_rows;
#define NORM(P)                                                                                                        \
    DI_LAUNCH_PDL((rms_norm_kernel<T, P>), grid, shape.n_threads, smem, stream->stream, a->x, a->out, weight, a->eps)
    DI_ROWS_BY_TYPE(is_wide, a->x.dtype, {
        if (shape.n_pieces == 1)
            NORM(1);
        else if (shape.n_pieces == 2)
            NORM(2);
        else if (shape.n_pieces == 4)
            NORM(4);
        else
            NORM(0);
    });
#undef NORM
    return DI_OK;
}

/* ---- quant ---- */

/* Grid (row, piece of 16 columns a thread): two lanes share a group. */
template <class T> __global__ void quant_kernel(di_act x, di_act out) {
    cu_grid_begin();
    int64_t row = blockIdx.x, n = x.n_cols, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 16;
    float lo[8], hi[8];
    cu_row_load8<T>(x, row, col, n, lo);
    cu_row_load8<T>(x, row, col + 8, n, hi);
    cu_scale scale = cu_qa_scale(cu_lanes_max<2>(cu_abs_max8(hi, cu_abs_max8(lo, 1e-4f))));
    if (col >= n)
        return;
    uint2 a = cu_e4m3_codes8(lo, scale.inverse), b = cu_e4m3_codes8(hi, scale.inverse);
    const uint32_t words[4] = {a.x, a.y, b.x, b.y};
    cu_store_bytes<16>((uint8_t *)out.data + row * out.stride + col, words);
    if (col % 32 == 0)
        out.scale[row * (n / 32) + col / 32] = (uint8_t)scale.byte;
}

di_status di_cuda_quant(di_stream *stream, const di_quant_args *a) {
    int64_t n = a->x.n_cols;
    if (!di_cuda_is_real(&a->x) || a->out.dtype != DI_F8_E4M3 || !di_cuda_is_act(&a->out) || a->out.n_cols != n ||
        a->out.n_rows != a->x.n_rows)
        return DI_ERR_SHAPE;
    if (!a->x.n_rows || !n)
        return DI_OK;
    int n_threads = threads_for(n / 16);
    dim3 grid((unsigned)a->x.n_rows, blocks_for(n / 16, n_threads));
    DI_ROWS_BY_TYPE(di_rows_is_wide(&a->x), a->x.dtype,
                    DI_LAUNCH_PDL((quant_kernel<T>), grid, n_threads, 0, stream->stream, a->x, a->out));
    return DI_OK;
}

/* ---- rope ---- */

__global__ void rope_table_kernel(const int32_t *pos, int64_t n, int32_t n_freq, const float *inv_freq, float *cos_out,
                                  float *sin_out) {
    cu_grid_begin();
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n)
        return;
    int64_t row = n <= UINT32_MAX ? (uint32_t)at / (uint32_t)n_freq : at / n_freq;
    float angle = (float)pos[row] * inv_freq[at - row * n_freq];
    double s, c;
    sincos((double)angle, &s, &c);
    cos_out[at] = (float)c;
    sin_out[at] = (float)s;
}

di_status di_cuda_rope_table(di_stream *stream, const di_rope_table_args *a) {
    if (a->n_rows < 0 || a->n_freq < 1 || !a->inv_freq)
        return DI_ERR_SHAPE;
    int64_t n = (int64_t)a->n_rows * a->n_freq;
    if (!n)
        return DI_OK;
    if (!a->pos || !a->cos || !a->sin)
        return DI_ERR_SHAPE;
    DI_LAUNCH_PDL(rope_table_kernel, blocks_for(n, 64), 64, 0, stream->stream, a->pos, n, a->n_freq, a->inv_freq,
                  a->cos, a->sin);
    return DI_OK;
}

/* Grid (row, piece of the row's pairs). With T known a thread turns four neighbouring pairs, else one. */
template <class T>
__global__ void rope_kernel(di_act x, int32_t n_heads, int32_t head_dim, int32_t n_freq, const float *cos_table,
                            const float *sin_table, bool is_inverse) {
    constexpr int PAIRS = std::is_void_v<T> ? 1 : 4;
    cu_grid_begin();
    int64_t row = blockIdx.x;
    int32_t unit = (int32_t)(blockIdx.y * blockDim.x + threadIdx.x), per_head = n_freq / PAIRS;
    if (unit >= n_heads * per_head)
        return;
    int32_t head = unit / per_head, j = unit % per_head * PAIRS;
    int64_t col = (int64_t)head * head_dim + head_dim - 2 * n_freq + 2 * j;
    const float *cos_row = cos_table + row * n_freq + j, *sin_row = sin_table + row * n_freq + j;
    if constexpr (std::is_void_v<T>) {
        float a = cu_act_load(x, row, col), b = cu_act_load(x, row, col + 1);
        float c = *cos_row, s = is_inverse ? -*sin_row : *sin_row;
        cu_act_store(x, row, col, a * c - b * s);
        cu_act_store(x, row, col + 1, a * s + b * c);
    } else {
        float v[8];
        T *at = (T *)x.data + row * x.stride + col;
        float4 c4 = *(const float4 *)cos_row, s4 = *(const float4 *)sin_row;
        cu_load8(at, v);
        const float c[4] = {c4.x, c4.y, c4.z, c4.w};
        float s[4] = {s4.x, s4.y, s4.z, s4.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float a = v[2 * i], b = v[2 * i + 1];
            s[i] = is_inverse ? -s[i] : s[i];
            v[2 * i] = a * c[i] - b * s[i];
            v[2 * i + 1] = a * s[i] + b * c[i];
        }
        cu_store8(at, v);
    }
}

di_status di_cuda_rope(di_stream *stream, const di_rope_args *a) {
    if (!di_cuda_is_real(&a->x) || a->n_heads < 1 || a->n_freq < 1 || a->head_dim < 2 * a->n_freq ||
        a->x.n_cols != (int64_t)a->n_heads * a->head_dim || (a->x.n_rows && (!a->cos || !a->sin)))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    /* Four pairs are 16 bytes of bf16: heads and their rotated ends start on such borders. */
    bool is_wide = di_rows_is_wide(&a->x) && a->head_dim % 8 == 0 && a->n_freq % 4 == 0 &&
                   di_rows_is_aligned(a->cos, 0, 16) && di_rows_is_aligned(a->sin, 0, 16);
    int64_t n = (int64_t)a->n_heads * a->n_freq / (is_wide ? 4 : 1);
    int n_threads = threads_for(n < 128 ? n : 128);
    dim3 grid((unsigned)a->x.n_rows, blocks_for(n, n_threads));
    DI_ROWS_BY_TYPE(is_wide, a->x.dtype,
                    DI_LAUNCH_PDL((rope_kernel<T>), grid, n_threads, 0, stream->stream, a->x, a->n_heads, a->head_dim,
                                  a->n_freq, a->cos, a->sin, a->inverse));
    return DI_OK;
}

/* ---- stream_mean ---- */

template <class T> __global__ void stream_mean_kernel(di_act x, int32_t m, di_act out) {
    cu_grid_begin();
    int64_t row = blockIdx.x, h = out.n_cols, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    float sum[8], v[8], scale = 1.0f / (float)m;
    cu_row_load8<T>(x, row, col, h, sum);
    for (int32_t s = 1; s < m; s++) {
        cu_row_load8<T>(x, row, col < h ? s * h + col : x.n_cols, (s + 1) * h, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = sum[i] + v[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = sum[i] * scale;
    cu_row_store8<T>(out, row, col, h, sum);
}

di_status di_cuda_stream_mean(di_stream *stream, const di_stream_mean_args *a) {
    int64_t h = a->out.n_cols;
    if (!di_cuda_is_real(&a->x) || !di_cuda_is_real(&a->out) || a->m < 1 || a->x.n_cols != a->m * h ||
        a->x.n_rows != a->out.n_rows)
        return DI_ERR_SHAPE;
    if (!a->x.n_rows || !h)
        return DI_OK;
    bool is_wide = a->x.dtype == a->out.dtype && di_rows_is_wide(&a->x) && di_rows_is_wide(&a->out);
    int n_threads = threads_for((h + 7) / 8 < 128 ? (h + 7) / 8 : 128);
    dim3 grid((unsigned)a->x.n_rows, blocks_for((h + 7) / 8, n_threads));
    DI_ROWS_BY_TYPE(is_wide, a->x.dtype,
                    DI_LAUNCH_PDL((stream_mean_kernel<T>), grid, n_threads, 0, stream->stream, a->x, a->m, a->out));
    return DI_OK;
}

/* ---- gather ---- */

enum { GATHER_UNITS = 4 }; /* of a thread */

/* Grid (row, piece of its units). All loads of a thread before its stores. */
template <class U> __global__ void gather_kernel(const uint8_t *x, uint8_t *out, const int32_t *idx, size_t row_bytes) {
    cu_grid_begin();
    int64_t n = (int64_t)(row_bytes / sizeof(U));
    int64_t first = (int64_t)blockIdx.y * blockDim.x * GATHER_UNITS + threadIdx.x;
    int32_t row = idx[blockIdx.x];
    if (row < 0)
        return;
    const U *from = (const U *)(x + (size_t)row * row_bytes);
    U *to = (U *)(out + (size_t)blockIdx.x * row_bytes);
    U held[GATHER_UNITS];
#pragma unroll
    for (int k = 0; k < GATHER_UNITS; k++) {
        if (first + k * (int64_t)blockDim.x < n)
            held[k] = from[first + k * (int64_t)blockDim.x];
    }
#pragma unroll
    for (int k = 0; k < GATHER_UNITS; k++) {
        if (first + k * (int64_t)blockDim.x < n)
            to[first + k * (int64_t)blockDim.x] = held[k];
    }
}

template <class U> static void gather_launch(di_stream *stream, const di_gather_args *a) {
    int64_t n = (int64_t)(a->row_bytes / sizeof(U));
    int n_threads = threads_for((n + GATHER_UNITS - 1) / GATHER_UNITS);
    dim3 grid((unsigned)a->n, blocks_for(n, n_threads * GATHER_UNITS));
    DI_LAUNCH_PDL((gather_kernel<U>), grid, n_threads, 0, stream->stream, (const uint8_t *)a->x, (uint8_t *)a->out,
                  a->idx, a->row_bytes);
}

di_status di_cuda_gather(di_stream *stream, const di_gather_args *a) {
    if (a->n < 0 || a->row_bytes < 1 || a->row_bytes > (size_t)1 << 24)
        return DI_ERR_SHAPE;
    if (!a->n)
        return DI_OK;
    if (!a->x || !a->out || !a->idx)
        return DI_ERR_SHAPE;
    uintptr_t bits = (uintptr_t)a->x | (uintptr_t)a->out | a->row_bytes;
    if (bits % 16 == 0)
        gather_launch<uint4>(stream, a);
    else if (bits % 4 == 0)
        gather_launch<uint32_t>(stream, a);
    else
        gather_launch<uint8_t>(stream, a);
    return DI_OK;
}
