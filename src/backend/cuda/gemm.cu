/* gemm: arguments, and the portable kernel, which gives the reference's bits on any chip and for any pair of types.
 *
 * A block of threads has a tile of rows and 64 outputs and walks k in the groups of 32 that the sum is defined by: both
 * operands of a group go to shared memory as floats, then every thread runs the two chains of its outputs. Source:
 * model.md 0.3. */
#include "cu.cuh"
#include "gemm.h"
#include "rows.cuh"

enum { GROUP_K = 32, TILE_OUT = 64, TILE_THREADS = 256, OUT_EACH = 4 };

/* A thread has ROWS rows and 4 outputs; the block 16*ROWS rows. */
template <int ROWS>
__global__ void __launch_bounds__(TILE_THREADS) gemm_portable(const gemm_job job, int tiles_per_group) {
    constexpr int TILE_ROWS = 16 * ROWS;
    __shared__ __align__(16) float xs[GROUP_K][TILE_ROWS + 4];
    __shared__ __align__(16) float ws[GROUP_K][TILE_OUT + 4];
    int t = threadIdx.x, tx = t % 16, ty = t / 16;
    int64_t n_in = job.w.n_in, group_out = job.w.n_out / job.n_groups;
    int64_t group = blockIdx.x / tiles_per_group, in_group = (int64_t)(blockIdx.x % tiles_per_group) * TILE_OUT;
    int64_t o0 = group * group_out + in_group, o_end = (group + 1) * group_out;
    int64_t row0 = (int64_t)blockIdx.y * TILE_ROWS;
    float total[ROWS][OUT_EACH] = {};
    for (int64_t k0 = 0; k0 < n_in; k0 += GROUP_K) {
        /* Eight neighbouring threads read 4 k each of a row, so that a warp reads whole lines. */
        int k = t % 8 * 4;
        for (int r = t / 8; r < TILE_ROWS; r += TILE_THREADS / 8) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool is_in = row0 + r < job.x.n_rows && k0 + k + i < n_in;
                xs[k + i][r] = is_in ? cu_act_load(job.x, row0 + r, group * n_in + k0 + k + i) : 0.0f;
            }
        }
        for (int o = t / 8; o < TILE_OUT; o += TILE_THREADS / 8) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool is_in = o0 + o < o_end && k0 + k + i < n_in;
                ws[k + i][o] = is_in ? cu_mat_load(job.w, o0 + o, k0 + k + i) : 0.0f;
            }
        }
        __syncthreads();
        float even[ROWS][OUT_EACH] = {}, odd[ROWS][OUT_EACH] = {};
        for (int i = 0; i < GROUP_K; i += 2) { /* zeros beyond n_in add nothing */
            float4 w0 = *(const float4 *)&ws[i][tx * OUT_EACH], w1 = *(const float4 *)&ws[i + 1][tx * OUT_EACH];
            const float a0[4] = {w0.x, w0.y, w0.z, w0.w}, a1[4] = {w1.x, w1.y, w1.z, w1.w};
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float x0 = xs[i][ty * ROWS + r], x1 = xs[i + 1][ty * ROWS + r];
#pragma unroll
                for (int j = 0; j < OUT_EACH; j++) {
                    even[r][j] = __fadd_rn(even[r][j], __fmul_rn(x0, a0[j]));
                    odd[r][j] = __fadd_rn(odd[r][j], __fmul_rn(x1, a1[j]));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int j = 0; j < OUT_EACH; j++)
                total[r][j] = __fadd_rn(total[r][j], __fadd_rn(even[r][j], odd[r][j]));
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int64_t row = row0 + ty * ROWS + r;
#pragma unroll
        for (int j = 0; j < OUT_EACH; j++) {
            int64_t o = o0 + tx * OUT_EACH + j;
            if (row >= job.x.n_rows || o >= o_end)
                continue;
            float y = total[r][j];
            if (job.add)
                y = __fadd_rn(y, job.add[row * job.out.stride + o]);
            cu_act_store(job.out, row, o, y);
        }
    }
}

static bool fits(const di_gemm_args *a, int64_t g) {
    return di_cuda_is_act(&a->x) && di_cuda_is_mat(a->w) && di_cuda_is_real(&a->out) && a->w->n_out % g == 0 &&
           a->x.n_cols == g * a->w->n_in && a->out.n_cols == a->w->n_out && a->out.n_rows == a->x.n_rows &&
           (a->x.dtype != DI_F8_E4M3 || a->w->n_in % 32 == 0);
}

size_t di_cuda_need_gemm(const di_device *dev, const di_limits *limits) {
    (void)limits;
    return dev->arch == DI_CUDA_SM90 ? gemm_sm90_need(dev) : 0;
}

di_status di_cuda_gemm(di_stream *stream, const di_gemm_args *a) {
    int64_t g = a->n_groups > 1 ? a->n_groups : 1;
    if (!fits(a, g))
        return DI_ERR_SHAPE;
    if (a->x.n_rows == 0)
        return DI_OK;
    gemm_job job = {};
    job.x = a->x, job.out = a->out, job.w = *a->w, job.add = a->add, job.n_groups = (int)g, job.aligned = 1;
    if (gemm_sm90_fits(stream->dev, &job))
        return gemm_sm90(stream, &job);
    if (gemm_sm100_fits(stream->dev, &job) && gemm_sm100(stream, &job))
        return DI_OK;
    int64_t tiles = (a->w->n_out / g + TILE_OUT - 1) / TILE_OUT, n = a->x.n_rows;
    if (n <= 32) {
        DI_LAUNCH((gemm_portable<1>), dim3((unsigned)(g * tiles), (unsigned)((n + 15) / 16)), TILE_THREADS, 0,
                  stream->stream, job, (int)tiles);
    } else {
        DI_LAUNCH((gemm_portable<4>), dim3((unsigned)(g * tiles), (unsigned)((n + 63) / 64)), TILE_THREADS, 0,
                  stream->stream, job, (int)tiles);
    }
    return DI_OK;
}

/* ---- gemm_chain ---- */

static bool chain_fits(const di_gemm_chain_args *a) {
    const di_act *out = &a->gemm.out, *codes = &a->codes;
    bool is_even = out->stride % 8 == 0 && di_rows_is_aligned(out->data, 0, 16);
    if (a->cos)
        return !codes->data && out->dtype == DI_BF16 && is_even && a->sin && a->n_freq > 0 && a->n_freq % 8 == 0 &&
               a->head_dim % 8 == 0 && a->head_dim >= 2 * a->n_freq && out->n_cols % a->head_dim == 0 &&
               di_rows_is_aligned(a->cos, 0, 16) && di_rows_is_aligned(a->sin, 0, 16);
    return codes->data && codes->dtype == DI_F8_E4M3 && codes->scale && codes->n_cols == out->n_cols &&
           codes->n_rows == out->n_rows && codes->stride % 8 == 0 && di_rows_is_aligned(codes->data, 0, 8) &&
           out->dtype == DI_F32 && is_even && out->n_cols % 32 == 0;
}

di_status di_cuda_gemm_chain(di_stream *stream, const di_gemm_chain_args *a) {
    int64_t g = a->gemm.n_groups > 1 ? a->gemm.n_groups : 1;
    if (!fits(&a->gemm, g) || !chain_fits(a) || a->gemm.add || a->gemm.x.dtype != DI_F8_E4M3 ||
        a->gemm.w->dtype != DI_F8_E4M3)
        return DI_ERR_SHAPE;
    gemm_job job = {};
    job.x = a->gemm.x, job.out = a->gemm.out, job.w = *a->gemm.w, job.n_groups = (int)g;
    job.head_dim = a->head_dim, job.n_freq = a->n_freq, job.cos = a->cos, job.sin = a->sin, job.codes = a->codes;
    job.aligned = 8; /* chain_fits */
    if (!gemm_sm90_fits(stream->dev, &job))
        return DI_ERR_SHAPE;
    gemm_cut cut = gemm_fp8_cut(stream->dev, &job.w);
    /* With many rows the warps that multiply would wait for rope: a kernel of its own is faster. */
    if (job.cos && gemm_fp8_pick(stream->dev, &job, &cut) == GEMM_FP8_MANY)
        return DI_ERR_SHAPE;
    return job.x.n_rows ? gemm_sm90(stream, &job) : DI_OK;
}
