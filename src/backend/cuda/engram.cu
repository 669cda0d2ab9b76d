/* Engram on the device: the hash of n-grams to table rows, the lookup, and the gated addition to the trunk.
 *
 * The table may lie in device memory or in pinned memory of the host; the kernel is the same, and has every load of a
 * token under way at once, since a row of 264 bytes comes from anywhere. The gate takes a block for a row's stream.
 * Bits are the CPU reference's. Formulas: model.md 3.2.4, 3.2.5. */
#include <cmath>

#include "rows.cuh"

size_t di_cuda_need_engram(const di_device *dev, const di_limits *limits) {
    (void)dev, (void)limits;
    return 0;
}

/* ---- engram_hash ---- */

/* A thread a column; products wrap as the CPU's do. */
__global__ void engram_hash_kernel(const int32_t *grams, int64_t n, int32_t n_gram, int32_t n_heads,
                                   const int64_t *mult, const int64_t *primes, const int64_t *offsets, int64_t *rows) {
    cu_grid_begin();
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n_cols = (int64_t)(n_gram - 1) * n_heads;
    if (at >= n * n_cols)
        return;
    int64_t row = at / n_cols, col = at % n_cols;
    int32_t last = (int32_t)(col / n_heads) + 1;
    const int32_t *gram = grams + row * n_gram;
    uint64_t h = (uint64_t)(int64_t)gram[0] * (uint64_t)mult[0];
    for (int32_t s = 1; s <= last; s++)
        h ^= (uint64_t)(int64_t)gram[s] * (uint64_t)mult[s];
    rows[at] = (int64_t)(h % (uint64_t)primes[col]) + offsets[col];
}

di_status di_cuda_engram_hash(di_stream *stream, const di_engram_hash_args *a) {
    if (a->n < 0 || a->n_gram < 2 || a->n_heads < 1)
        return DI_ERR_SHAPE;
    if (!a->n)
        return DI_OK;
    if (!a->grams || !a->mult || !a->primes || !a->offsets || !a->rows)
        return DI_ERR_SHAPE;
    int64_t n = (int64_t)a->n * (a->n_gram - 1) * a->n_heads;
    DI_LAUNCH_PDL(engram_hash_kernel, (unsigned)((n + 127) / 128), 128, 0, stream->stream, a->grams, (int64_t)a->n,
                  a->n_gram, a->n_heads, a->mult, a->primes, a->offsets, a->rows);
    return DI_OK;
}

/* ---- engram_gather ---- */

typedef struct gather_table {
    const uint8_t *codes, *scales;
    int64_t n_table;
    int32_t dim, n_cols;
    const int64_t *rows;
} gather_table;

/* Codes and scales as stored. A block a token: a thread takes U's of codes, then bytes of scales; all reads are
 * independent, and those of a table row are neighbours. */
template <class U> __global__ void engram_gather_kernel(gather_table t, di_act out) {
    cu_grid_begin();
    int64_t row = blockIdx.x;
    int32_t per_row = t.dim / (int32_t)sizeof(U), n_groups = t.dim / 32;
    const int64_t *ids = t.rows + row * t.n_cols;
    for (int32_t unit = (int32_t)threadIdx.x; unit < t.n_cols * per_row; unit += (int32_t)blockDim.x) {
        int32_t col = unit / per_row, at = unit % per_row;
        int64_t id = ids[col];
        U held = {};
        if (id >= 0 && id < t.n_table)
            held = ((const U *)(t.codes + id * t.dim))[at];
        ((U *)((uint8_t *)out.data + row * out.stride + (int64_t)col * t.dim))[at] = held;
    }
    for (int32_t unit = (int32_t)threadIdx.x; unit < t.n_cols * n_groups; unit += (int32_t)blockDim.x) {
        int32_t col = unit / n_groups, at = unit % n_groups;
        int64_t id = ids[col];
        bool is_stored = id >= 0 && id < t.n_table;
        out.scale[row * t.n_cols * n_groups + unit] = is_stored ? t.scales[id * n_groups + at] : (uint8_t)127;
    }
}

/* The values. */
__global__ void engram_values_kernel(gather_table t, di_act out) {
    cu_grid_begin();
    int64_t row = blockIdx.x;
    for (int32_t unit = (int32_t)threadIdx.x; unit < t.n_cols * t.dim; unit += (int32_t)blockDim.x) {
        int64_t id = t.rows[row * t.n_cols + unit / t.dim], at = unit % t.dim;
        bool is_stored = id >= 0 && id < t.n_table;
        float v = is_stored ? cu_scaled(cu_e4m3_to_f32(t.codes[id * t.dim + at]), t.scales[id * (t.dim / 32) + at / 32])
                            : 0.0f;
        cu_act_store(out, row, unit, v);
    }
}

di_status di_cuda_engram_gather(di_stream *stream, const di_engram_gather_args *a) {
    if (a->dim < 32 || a->dim % 32 || a->n_cols < 1 || a->out.n_cols != (int64_t)a->n_cols * a->dim ||
        a->out.n_cols > INT32_MAX || !di_cuda_is_act(&a->out))
        return DI_ERR_SHAPE;
    if (!a->out.n_rows)
        return DI_OK;
    if (!a->codes || !a->scales || !a->rows)
        return DI_ERR_SHAPE;
    gather_table t = {a->codes, a->scales, a->n_table, a->dim, a->n_cols, a->rows};
    unsigned grid = (unsigned)a->out.n_rows;
    if (a->out.dtype != DI_F8_E4M3) {
        DI_LAUNCH_PDL(engram_values_kernel, grid, 512, 0, stream->stream, t, a->out);
        return DI_OK;
    }
    int64_t n = a->out.n_cols / 16;
    int n_threads = n >= 1024 ? 1024 : (int)((n + 31) / 32 * 32);
    if (di_rows_is_aligned(a->codes, 0, 16) && di_rows_is_aligned(a->out.data, a->out.stride, 16))
        DI_LAUNCH_PDL((engram_gather_kernel<uint4>), grid, n_threads, 0, stream->stream, t, a->out);
    else
        DI_LAUNCH_PDL((engram_gather_kernel<uint8_t>), grid, 512, 0, stream->stream, t, a->out);
    return DI_OK;
}

/* ---- engram_gate ---- */

/* A block a stream of a row: three sums over the stream at once, added in order by a lane each. Pieces of the stream
 * are held as in rms_norm. */
template <class T, int P>
__global__ void __launch_bounds__(DI_ROWS_THREADS_MAX)
    engram_gate_kernel(di_act x, di_act kv, int32_t m, const float *qk, const uint8_t *skip, float eps, float h_scale,
                       float *gate) {
    DI_DYN_SHARED(float, sums); /* [3][n_groups rounded up to 4] */
    __shared__ float open;
    constexpr bool IS_WIDE = !std::is_void_v<T>;
    constexpr int HELD = P ? P : 1;
    cu_grid_begin();
    int64_t row = blockIdx.x, s = blockIdx.y, h = x.n_cols / m;
    if (skip && skip[row]) {
        if (gate && threadIdx.x == 0)
            gate[row * m + s] = 0.0f;
        return;
    }
    int64_t step = (int64_t)blockDim.x * 8, first = (int64_t)threadIdx.x * 8;
    int n_pieces = P ? P : (int)((h + step - 1) / step), n_groups = (int)((h + 31) / 32);
    int pitch = (n_groups + 3) & ~3;
    float v[HELD][8], add[HELD][8];
#pragma unroll
    for (int p = 0; p < (P ? P : n_pieces); p++) {
        int64_t col = first + p * step;
        int64_t at = col < h ? s * h + col : x.n_cols; /* beyond the row: zeros */
        int held = P ? p : 0;
        float key[8], q[8], products[3][8];
        cu_row_load8<T>(x, row, at, (s + 1) * h, v[held]);
        cu_row_load8<T>(kv, row, at, (s + 1) * h, key);
        cu_row_load8<T>(kv, row, col < h ? m * h + col : kv.n_cols, (m + 1) * h, add[held]);
        if (IS_WIDE && col < h) {
            cu_load8(qk + s * h + col, q);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                q[i] = col + i < h ? qk[s * h + col + i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            products[0][i] = v[held][i] * q[i] * key[i];
            products[1][i] = v[held][i] * v[held][i];
            products[2][i] = key[i] * key[i];
        }
#pragma unroll
        for (int k = 0; k < 3; k++) {
            float sum = cu_quad_sum(products[k]);
            if (threadIdx.x % 4 == 3 && col - 24 < h)
                sums[k * pitch + col / 32] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x < DI_WARP) {
        int k = threadIdx.x < 2 ? (int)threadIdx.x : 2;
        float sum = cu_ordered_sum(sums + k * pitch, n_groups);
        float inverse = 1.0f / sqrtf(sum / (float)h + eps); /* of sums 1 and 2 */
        float x_inverse = __shfl_sync(0xFFFFFFFFu, inverse, 1), key_inverse = __shfl_sync(0xFFFFFFFFu, inverse, 2);
        float dot = __shfl_sync(0xFFFFFFFFu, sum, 0) * x_inverse * key_inverse * h_scale;
        float g = cu_sigmoid(copysignf(sqrtf(fmaxf(fabsf(dot), 1e-6f)), dot));
        if (threadIdx.x == 0) {
            open = g;
            if (gate)
                gate[row * m + s] = g;
        }
    }
    __syncthreads();
    float g = open;
#pragma unroll
    for (int p = 0; p < (P ? P : n_pieces); p++) {
        int64_t col = first + p * step;
        int64_t at = col < h ? s * h + col : x.n_cols;
        int held = P ? p : 0;
        if (!P) {
            cu_row_load8<T>(x, row, at, (s + 1) * h, v[0]);
            cu_row_load8<T>(kv, row, col < h ? m * h + col : kv.n_cols, (m + 1) * h, add[0]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[held][i] = v[held][i] + g * add[held][i];
        cu_row_store8<T>(x, row, at, (s + 1) * h, v[held]);
    }
}

di_status di_cuda_engram_gate(di_stream *stream, const di_engram_gate_args *a) {
    if (!di_cuda_is_real(&a->x) || !di_cuda_is_real(&a->kv) || a->m < 1 || a->x.n_cols % a->m || !a->qk ||
        a->kv.n_cols != a->x.n_cols / a->m * (a->m + 1) || a->kv.n_rows != a->x.n_rows)
        return DI_ERR_SHAPE;
    int64_t h = a->x.n_cols / a->m;
    if (!a->x.n_rows || !h)
        return DI_OK;
    if (h > 32 * 4000)
        return DI_ERR_SHAPE; /* sums of groups in 48 KiB */
    bool is_wide = a->x.dtype == a->kv.dtype && h % 8 == 0 && di_rows_is_wide(&a->x) && di_rows_is_wide(&a->kv) &&
                   di_rows_is_aligned(a->qk, 0, 16);
    di_rows_shape shape = di_rows_shape_for(h);
    size_t smem = (size_t)((h + 31) / 32 + 4) * 3 * sizeof(float);
    dim3 grid((unsigned)a->x.n_rows, (unsigned)a->m);
    float h_scale = 1.0f / sqrtf((float)h);
#define GATE(P)                                                                                                        \
    DI_LAUNCH_PDL((engram_gate_kernel<T, P>), grid, shape.n_threads, smem, stream->stream, a->x, a->kv, a->m, a->qk,   \
                  a->skip, a->eps, h_scale, a->gate)
    DI_ROWS_BY_TYPE(is_wide, a->x.dtype, {
        if (shape.n_pieces == 1)
            GATE(1);
        else if (shape.n_pieces == 2)
            GATE(2);
        else if (shape.n_pieces == 4)
            GATE(4);
        else
            GATE(0);
    });
#undef GATE
    return DI_OK;
}
