/* Fused chains of row-wise operations: hc_step, norm_quant, key_store.
 *
 * A block takes a row from the first step to the last and holds it in registers; what a separate operation would have
 * stored and loaded again is rounded as if it had been. Sums run as in rms_norm: groups of 32 by four lanes each, then
 * one warp in order. */
#include "kv.cuh"

enum { M = 4 }; /* streams */

/* 1/sqrt(mean of squares + eps) of a row of n values, n_pieces eights of them in each thread; a block calls, sums is
 * shared memory for its groups. */
template <int P>
__device__ static inline float block_inverse_rms(const float (&v)[P][8], int64_t n, float eps, float *sums) {
    __shared__ float inverse;
#pragma unroll
    for (int p = 0; p < P; p++) {
        int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8;
        float squares[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares[i] = v[p][i] * v[p][i];
        float sum = cu_quad_sum(squares);
        if (threadIdx.x % 4 == 3 && col < n)
            sums[col / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x < DI_WARP) {
        float mean = cu_ordered_sum(sums, (int)(n / 32)) / (float)n;
        if (threadIdx.x == 0)
            inverse = 1.0f / sqrtf(mean + eps);
    }
    __syncthreads();
    return inverse;
}

/* Codes of eight values of a row; a group is four lanes. Whole warps call. */
__device__ static inline void store_codes(const di_act &codes, int64_t row, int64_t col, const float (&v)[8]) {
    cu_scale scale = cu_qa_scale(cu_lanes_max<4>(cu_abs_max8(v, 1e-4f)));
    uint2 q = cu_e4m3_codes8(v, scale.inverse);
    if (col >= codes.n_cols)
        return;
    const uint32_t words[2] = {q.x, q.y};
    cu_store_bytes<8>((uint8_t *)codes.data + row * codes.stride + col, words);
    if (col % 32 == 0)
        codes.scale[row * (codes.n_cols / 32) + col / 32] = (uint8_t)scale.byte;
}

/* The last steps: scaling by the inverse and the weights, rounding, codes. */
template <class T, int P>
__device__ static inline void finish_norm(float (&v)[P][8], const float (&w)[P][8], float inverse, int64_t row,
                                          int64_t n, const di_act &out, const di_act &codes) {
#pragma unroll
    for (int p = 0; p < P; p++) {
        int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8;
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[p][i] = v[p][i] * inverse * w[p][i];
        if (out.data)
            cu_row_store8<T>(out, row, col, n, v[p]);
        if (codes.data) {
            cu_round8<T>(v[p]);
            store_codes(codes, row, col, v[p]);
        }
    }
}

static bool codes_fit(const di_act *codes, const di_act *x, int64_t n) {
    return !codes->data ||
           (codes->dtype == DI_F8_E4M3 && di_cuda_is_act(codes) && codes->n_cols == n && codes->n_rows == x->n_rows);
}
/* A block of the type and width of the chain, or none. */
static bool kept_fits(const di_act *kept, const di_act *x, int64_t n) {
    return !kept->data || (kept->dtype == x->dtype && kept->n_cols == n && kept->n_rows == x->n_rows &&
                           di_cuda_is_real(kept) && di_rows_is_wide(kept));
}

/* Calls the macro L with T (float or uint16_t) and the number of pieces of a shape. */
#define BY_SHAPE(dtype, shape, L)                                                                                      \
    do {                                                                                                               \
        if ((dtype) == DI_F32) {                                                                                       \
            using T = float;                                                                                           \
            if ((shape).n_pieces == 1)                                                                                 \
                L(1);                                                                                                  \
            else                                                                                                       \
                L(2);                                                                                                  \
        } else {                                                                                                       \
            using T = uint16_t;                                                                                        \
            if ((shape).n_pieces == 1)                                                                                 \
                L(1);                                                                                                  \
            else                                                                                                       \
                L(2);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* ---- hc_step ---- */

/* So few that two blocks of their registers fit a multiprocessor: H up to 5120. With few rows twice as many do half as
 * much each. */
enum { STEP_THREADS_MAX = 320 };

/* N floats, with 16-byte loads where they may be. */
template <int N> __device__ static inline void load_floats(const float *from, float (&to)[N]) {
    if ((uintptr_t)from % 16 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 q = *(const float4 *)(from + i);
            to[i] = q.x, to[i + 1] = q.y, to[i + 2] = q.z, to[i + 3] = q.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            to[i] = from[i];
    }
}

/* What mixes the streams of a row. */
typedef struct step_mixes {
    float pre[M], post[M], comb[M * M];
} step_mixes;

/* Eight columns of a row from the streams x and f as they came: writes x' where f is, gives the collapse in z. */
template <class T>
__device__ static inline void step_columns(const di_hc_step_args &a, int64_t row, int64_t col, bool with_f,
                                           const step_mixes &mixes, const cu_raw8<T> (&x_in)[M], const cu_raw8<T> &f_in,
                                           float (&z)[8]) {
    int64_t h = a.x.n_cols / M;
    float x[M][8], f[8];
    f_in.get(f);
#pragma unroll
    for (int s = 0; s < M; s++)
        x_in[s].get(x[s]);
#pragma unroll
    for (int i = 0; i < 8; i++)
        z[i] = 0.0f;
#pragma unroll
    for (int b = 0; b < M; b++) {
        float y[8];
        if (with_f) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                y[i] = mixes.post[b] * f[i];
#pragma unroll
                for (int s = 0; s < M; s++)
                    y[i] = y[i] + mixes.comb[s * M + b] * x[s][i];
            }
            if (col < h)
                cu_store8((T *)a.x.data + row * a.x.stride + b * h + col, y);
            cu_round8<T>(y);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                y[i] = x[b][i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            z[i] = z[i] + mixes.pre[b] * y[i];
    }
    if (a.z.data)
        cu_row_store8<T>(a.z, row, col, h, z);
    cu_round8<T>(z);
}

template <class T, int P, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS == STEP_THREADS_MAX ? 2 : 1) hc_step_kernel(di_hc_step_args a) {
    DI_DYN_SHARED(float, sums);
    int64_t row = blockIdx.x, h = a.x.n_cols / M;
    bool with_f = a.f.data;
    cu_raw8<T> x_in[P][M], f_in[P];
    float v[P][8], w[P][8];
#pragma unroll
    for (int p = 0; p < P; p++)
        cu_weights8<true>((const uint16_t *)a.weight, ((int64_t)p * blockDim.x + threadIdx.x) * 8, h, w[p]);
    cu_grid_begin();
#pragma unroll
    for (int p = 0; p < P; p++) { /* everything that is read, before anything is used */
        int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8;
#pragma unroll
        for (int s = 0; s < M; s++) {
            if (col < h)
                x_in[p][s].load((const T *)a.x.data + row * a.x.stride + s * h + col);
            else
                x_in[p][s].zero();
        }
        if (with_f && col < h)
            f_in[p].load((const T *)a.f.data + row * a.f.stride + col);
        else
            f_in[p].zero();
    }
    step_mixes mixes = {};
    load_floats(a.pre_in + row * M, mixes.pre);
    if (with_f) {
        load_floats(a.post + row * M, mixes.post);
        load_floats(a.comb + row * M * M, mixes.comb);
    }
#pragma unroll
    for (int p = 0; p < P; p++) {
        int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8;
        step_columns<T>(a, row, col, with_f, mixes, x_in[p], f_in[p], v[p]);
    }
    float inverse = block_inverse_rms<P>(v, h, a.eps, sums);
    finish_norm<T, P>(v, w, inverse, row, h, a.out, a.codes);
}

enum { STEP_STAGES = 2, STEP_BLOCKS = 2 /* on a multiprocessor */ };

/* A row, f and the mixes of a stage, as they lie in memory. */
template <class T> static __host__ __device__ int64_t step_stage_bytes(int64_t h) {
    return (M + 1) * h * (int64_t)sizeof(T) + (int64_t)sizeof(step_mixes);
}

/* Many rows: a block goes through rows, every gridDim.x'th, and the copy engine brings the next ones meanwhile, so that
 * loads wait neither for a row's sums nor for its stores. Rows of x and f are whole groups of 32 and two pieces. */
template <class T>
__global__ void __launch_bounds__(STEP_THREADS_MAX, STEP_BLOCKS) hc_step_rows_kernel(di_hc_step_args a) {
    DI_DYN_SHARED(uint8_t, smem);
    __shared__ uint64_t is_here[STEP_STAGES];
    int64_t h = a.x.n_cols / M, n_rows = a.x.n_rows, stage_bytes = step_stage_bytes<T>(h);
    float *sums = (float *)(smem + STEP_STAGES * stage_bytes);
    bool with_f = a.f.data;
    bool brings = threadIdx.x + 1 == blockDim.x; /* not of the warp that adds the sums */
    cu_raw8<uint16_t> weights[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
        int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8;
        if (col < h)
            weights[p].load((const uint16_t *)a.weight + col);
        else
            weights[p].zero();
    }
    if (brings) {
        for (int s = 0; s < STEP_STAGES; s++)
            cu_mbar_init(&is_here[s], 1);
        cu_fence_mbar_init();
    }
    __syncthreads();
    cu_grid_begin();
    auto bring = [&](int64_t row, int stage) {
        if (!brings || row >= n_rows)
            return;
        uint32_t to = cu_smem(smem + stage * stage_bytes), x_bytes = (uint32_t)(M * h * (int64_t)sizeof(T));
        uint32_t f_bytes = x_bytes / M, mixes = to + x_bytes + f_bytes;
        uint64_t *bar = &is_here[stage];
        cu_mbar_arrive_expect(bar, with_f ? x_bytes + f_bytes + (uint32_t)sizeof(step_mixes) : x_bytes + M * 4);
        cu_bulk_load(to, (const T *)a.x.data + row * a.x.stride, x_bytes, bar);
        cu_bulk_load(mixes, a.pre_in + row * M, M * 4, bar);
        if (with_f) {
            cu_bulk_load(to + x_bytes, (const T *)a.f.data + row * a.f.stride, f_bytes, bar);
            cu_bulk_load(mixes + M * 4, a.post + row * M, M * 4, bar);
            cu_bulk_load(mixes + 2 * M * 4, a.comb + row * M * M, M * M * 4, bar);
        }
    };
    int64_t row = blockIdx.x;
    for (int s = 0; s < STEP_STAGES; s++)
        bring(row + s * gridDim.x, s);
#pragma unroll 1
    for (uint32_t turn = 0; row < n_rows; turn++, row += gridDim.x) {
        const T *x = (const T *)(smem + turn % STEP_STAGES * stage_bytes), *f = x + M * h;
        const float *in = (const float *)(f + h);
        float v[2][8], w[2][8];
        step_mixes mixes = {};
        cu_mbar_wait(&is_here[turn % STEP_STAGES], turn / STEP_STAGES & 1);
        load_floats(in, mixes.pre);
        if (with_f) {
            load_floats(in + M, mixes.post);
            load_floats(in + 2 * M, mixes.comb);
        }
#pragma unroll
        for (int p = 0; p < 2; p++) {
            int64_t col = ((int64_t)p * blockDim.x + threadIdx.x) * 8, at = col < h ? col : 0;
            cu_raw8<T> x_in[M], f_in;
#pragma unroll
            for (int s = 0; s < M; s++)
                x_in[s].load(x + s * h + at);
            f_in.zero();
            if (with_f)
                f_in.load(f + at);
            step_columns<T>(a, row, col, with_f, mixes, x_in, f_in, v[p]);
            weights[p].get(w[p]);
        }
        float inverse = block_inverse_rms<2>(v, h, a.eps, sums); /* after whose barriers the stage is free */
        bring(row + STEP_STAGES * gridDim.x, turn % STEP_STAGES);
        finish_norm<T, 2>(v, w, inverse, row, h, a.out, a.codes);
    }
}

di_status di_cuda_hc_step(di_stream *stream, const di_hc_step_args *a) {
    int64_t h = a->x.n_cols / M;
    di_rows_shape shape = di_rows_shape_for(h);
    if (!di_cuda_is_real(&a->x) || a->m != M || a->x.n_cols % (32 * M) || h < 32 ||
        shape.n_threads > STEP_THREADS_MAX || shape.n_pieces > 2 || !a->weight || !kept_fits(&a->f, &a->x, h) ||
        !kept_fits(&a->z, &a->x, h) || !kept_fits(&a->out, &a->x, h) || !codes_fit(&a->codes, &a->x, h))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    if (!di_rows_is_wide(&a->x) || !di_rows_is_aligned(a->weight, 0, 16) || !a->pre_in ||
        (a->f.data && (!a->post || !a->comb)))
        return DI_ERR_SHAPE;
#define STEP(P)                                                                                                        \
    DI_LAUNCH_PDL((hc_step_kernel<T, P, STEP_THREADS_MAX>), (unsigned)a->x.n_rows, shape.n_threads,                    \
                  (size_t)(h / 32 * 4), stream->stream, *a)
#define STEP_ALONE(P)                                                                                                  \
    DI_LAUNCH_PDL((hc_step_kernel<T, 1, 2 * STEP_THREADS_MAX>), (unsigned)a->x.n_rows, P *shape.n_threads,             \
                  (size_t)(h / 32 * 4), stream->stream, *a)
    int64_t n_blocks = STEP_BLOCKS * (int64_t)stream->dev->n_sms;
    bool are_mixes_wide = di_rows_is_aligned(a->pre_in, 0, 16) && di_rows_is_aligned(a->post, 0, 16) &&
                          di_rows_is_aligned(a->comb, 0, 16);
    if (shape.n_pieces == 2 && a->x.dtype == DI_BF16 && a->x.n_rows > 2 * n_blocks && are_mixes_wide)
        DI_LAUNCH_PDL(hc_step_rows_kernel<uint16_t>, (unsigned)n_blocks, shape.n_threads,
                      (size_t)(STEP_STAGES * step_stage_bytes<uint16_t>(h) + h / 32 * 4), stream->stream, *a);
    else if (shape.n_pieces == 2 && a->x.n_rows <= stream->dev->n_sms) /* a block has a multiprocessor */
        BY_SHAPE(a->x.dtype, shape, STEP_ALONE);
    else
        BY_SHAPE(a->x.dtype, shape, STEP);
#undef STEP
#undef STEP_ALONE
    return DI_OK;
}

/* ---- norm_quant ---- */

template <class T, int P>
__global__ void __launch_bounds__(DI_ROWS_THREADS_MAX) norm_quant_kernel(di_norm_quant_args a) {
    DI_DYN_SHARED(float, sums);
    int64_t row = blockIdx.x, n = a.x.n_cols;
    float v[P][8], w[P][8];
#pragma unroll
    for (int p = 0; p < P; p++)
        cu_weights8<true>((const uint16_t *)a.weight, ((int64_t)p * blockDim.x + threadIdx.x) * 8, n, w[p]);
    cu_grid_begin();
#pragma unroll
    for (int p = 0; p < P; p++)
        cu_row_load8<T>(a.x, row, ((int64_t)p * blockDim.x + threadIdx.x) * 8, n, v[p]);
    float inverse = block_inverse_rms<P>(v, n, a.eps, sums);
    finish_norm<T, P>(v, w, inverse, row, n, a.out, a.codes);
}

di_status di_cuda_norm_quant(di_stream *stream, const di_norm_quant_args *a) {
    int64_t n = a->x.n_cols;
    di_rows_shape shape = di_rows_shape_for(n);
    if (!di_cuda_is_real(&a->x) || n < 32 || n % 32 || shape.n_pieces > 2 || shape.n_pieces < 1 || !a->weight ||
        !kept_fits(&a->out, &a->x, n) || !codes_fit(&a->codes, &a->x, n))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    if (!di_rows_is_wide(&a->x) || !di_rows_is_aligned(a->weight, 0, 16))
        return DI_ERR_SHAPE;
#define NORM(P)                                                                                                        \
    DI_LAUNCH_PDL((norm_quant_kernel<T, P>), (unsigned)a->x.n_rows, shape.n_threads, (size_t)(n / 32 * 4),             \
                  stream->stream, *a)
    BY_SHAPE(a->x.dtype, shape, NORM);
#undef NORM
    return DI_OK;
}

/* ---- key_store ---- */

typedef struct key_job { /* the part of the arguments that both places share */
    di_act x, out;
    const uint16_t *weight;
    float eps;
    int32_t n_freq;
    const float *cos, *sin;
    di_kv_format format;
} key_job;

template <class T, class PLACE> __global__ void key_store_kernel(key_job a, PLACE place) {
    DI_DYN_SHARED(float, sums);
    int64_t row = blockIdx.x, n = a.x.n_cols, col = (int64_t)threadIdx.x * 8;
    uint8_t *data = NULL, *scale = NULL;
    int64_t pair = (col - (n - 2 * a.n_freq)) / 2;
    bool is_turned = col < n && col >= n - 2 * a.n_freq;
    float v[1][8], w[8], c[4], s[4];
    if (a.weight)
        cu_weights8<true>(a.weight, col, n, w);
    cu_grid_begin();
    cu_row_load8<T>(a.x, row, col, n, v[0]); /* everything that is read, before anything is used */
    if (is_turned) {
        load_floats(a.cos + row * a.n_freq + pair, c);
        load_floats(a.sin + row * a.n_freq + pair, s);
    }
    bool is_inside = col < n && place.find(row, &data, &scale);
    if (a.weight) {
        float inverse = block_inverse_rms<1>(v, n, a.eps, sums);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[0][i] = v[0][i] * inverse * w[i];
        cu_round8<T>(v[0]);
    }
    if (is_turned) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = v[0][2 * i], y = v[0][2 * i + 1];
            v[0][2 * i] = x * c[i] - y * s[i];
            v[0][2 * i + 1] = x * s[i] + y * c[i];
        }
        cu_round8<T>(v[0]);
    }
    if (a.out.data)
        cu_row_store8<T>(a.out, row, col, n, v[0]);
    cu_encode8(a.format, v[0], col, n, data, scale, is_inside);
}

template <class PLACE>
static void key_store(di_stream *stream, const key_job &job, int64_t n_rows, const PLACE &place) {
    int n_threads = (int)((job.x.n_cols / 8 + 31) / 32 * 32);
    size_t smem = (size_t)(job.x.n_cols / 32 * 4);
    if (job.x.dtype == DI_F32)
        DI_LAUNCH_PDL((key_store_kernel<float, PLACE>), (unsigned)n_rows, n_threads, smem, stream->stream, job, place);
    else
        DI_LAUNCH_PDL((key_store_kernel<uint16_t, PLACE>), (unsigned)n_rows, n_threads, smem, stream->stream, job,
                      place);
}

di_status di_cuda_key_store(di_stream *stream, const di_key_store_args *a) {
    const di_paged *dst = &a->dst;
    int64_t n = a->x.n_cols, n_rows = a->records ? a->x.n_rows : a->entries.n;
    di_kv_format format = a->records ? a->format : dst->format;
    if (!di_cuda_is_real(&a->x) || n < 32 || n % 32 || n > 4096 || !di_cuda_kv_fits(format, n) || n_rows < 0 ||
        a->x.n_rows < n_rows || a->n_freq < 1 || a->n_freq % 4 || 2 * (int64_t)a->n_freq > n ||
        !kept_fits(&a->out, &a->x, n))
        return DI_ERR_SHAPE;
    if (!n_rows)
        return DI_OK;
    if (!di_rows_is_wide(&a->x) || !di_rows_is_aligned(a->weight, 0, 16) || !a->cos || !a->sin ||
        (uintptr_t)a->records % 4)
        return DI_ERR_SHAPE;
    key_job job = {a->x, a->out, (const uint16_t *)a->weight, a->eps, a->n_freq, a->cos, a->sin, format};
    int64_t n_data = (int64_t)di_kv_data_bytes(format, n), n_scale = (int64_t)di_kv_scale_bytes(format, n);
    if (a->records) {
        key_store(stream, job, n_rows, cu_record_place{a->records, n_data + n_scale, n_data});
        return DI_OK;
    }
    if (!a->rows || !a->rows->blocks || !a->entries.row || !a->entries.seq || !a->entries.idx || !dst->pages ||
        dst->per_block < 1 || dst->n_values != n || ((uintptr_t)dst->pages | dst->page_bytes | dst->offset) % 4)
        return DI_ERR_SHAPE;
    key_store(stream, job, n_rows,
              cu_page_place{a->rows->blocks, a->rows->blocks_stride, n_data, n_scale, a->entries, *dst});
    return DI_OK;
}
