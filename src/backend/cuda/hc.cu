/* Hyper-connections on the device: hc_mix and hc_post, model.md 3.3.
 *
 * hc_mix has three results. The collapse z is a row-wise sum. The 24 mixing logits and the mean square are sums over
 * 20480 inputs against 2 MB of fp32 weights; the order of ops.h makes each of them a chain over 640 groups, so that the
 * groups are what runs in parallel. What follows the sums is a long chain over 24 numbers (Sinkhorn).
 *
 *   few rows   split_kernel: a warp takes a group of 32 inputs; a lane holds one output's 32 weights and goes through
 *              the rows. The groups' sums go to scratch; finish_kernel adds them, a lane an output, a warp a row.
 *   some rows  spread_kernel: likewise a group and half of the outputs a warp, but a lane holds a row's 32 inputs and
 *              meets the same weights as all lanes. finish_kernel.
 *   many rows  many_kernel: a block takes 32 or 64 rows through all groups. A lane has one or two rows, a warp all
 *              outputs of a group: a multiply and an add a weight and row, which is what counts. Other warps add the
 *              groups' sums in order; finish_rows_kernel has half a warp a row.
 *   others     any_kernel: other numbers of streams, odd widths or addresses; simple.
 *
 * All give the reference's bits, whatever the batch. On Hopper the sums of bf16 rows of the first three kinds come from
 * hc_sm90.cu for any number of rows, in an order of their own; finish_parts_kernel goes on with them.
 * Index convention of comb: [old stream][new stream]. */
#include "hc.h"
#include "rows.cuh"

enum { STREAMS_MAX = 8 }; /* streams, at most */

enum { M = HC_STREAMS, DOTS = HC_DOTS, SUMS = DOTS + 1 /* and the square */ };

/* Rows whose groups' sums scratch has room for: some more go in turns over the same scratch. */
enum { GROUPED_ROWS = 256, GROUPED_ROWS_MAX = 6 * GROUPED_ROWS };

static size_t grouped_row_bytes(int64_t n) {
    return (size_t)(n / 32) * SUMS * sizeof(float);
}

size_t di_cuda_need_hc(const di_device *dev, const di_limits *limits) {
    int64_t rows = limits->rows_max > 0 ? limits->rows_max : 1,
            few = rows < GROUPED_ROWS ? rows : (int64_t)GROUPED_ROWS;
    int64_t n = limits->hidden_size > 0 ? M * limits->hidden_size : limits->n_in_max;
    size_t groups = (size_t)few * grouped_row_bytes((n + 31) / 32 * 32), all = (size_t)rows * SUMS * sizeof(float);
    size_t most = groups > all ? groups : all, parts = hc_sm90_need(dev, limits);
    return most > parts ? most : parts;
}

/* ---- what follows the sums ---- */

/* Of one row by one thread, as di_cpu_hc_finish: any number of streams. */
__device__ static inline void finish_row(const di_hc_mix_args &args, int64_t row, const float *dots, float squares) {
    const int32_t m = args.m;
    float c[STREAMS_MAX * STREAMS_MAX];
    float rms = sqrtf(squares / (float)args.x.n_cols + args.norm_eps);
    float *pre = args.pre_out + row * m, *post = args.post + row * m, *comb = args.comb + row * m * m;
    for (int32_t i = 0; i < m; i++) {
        pre[i] = cu_sigmoid(dots[i] / rms * args.scale[0] + args.base[i]) + args.eps;
        post[i] = 2.0f * cu_sigmoid(dots[m + i] / rms * args.scale[1] + args.base[m + i]);
    }
    for (int32_t i = 0; i < m * m; i++)
        c[i] = dots[2 * m + i] / rms * args.scale[2] + args.base[2 * m + i];
    for (int32_t a = 0; a < m; a++) { /* softmax over the new streams, + eps */
        float most = c[a * m], sum = 0.0f;
        for (int32_t b = 1; b < m; b++)
            most = c[a * m + b] > most ? c[a * m + b] : most;
        for (int32_t b = 0; b < m; b++) {
            c[a * m + b] = cu_expf(c[a * m + b] - most);
            sum = sum + c[a * m + b];
        }
        for (int32_t b = 0; b < m; b++)
            c[a * m + b] = c[a * m + b] / sum + args.eps;
    }
    for (int32_t i = 0; i < args.iters; i++) {
        for (int32_t a = 0; a < m; a++) {
            if (i == 0)
                break; /* the softmax was the first */
            float sum = 0.0f;
            for (int32_t b = 0; b < m; b++)
                sum = sum + c[a * m + b];
            for (int32_t b = 0; b < m; b++)
                c[a * m + b] = c[a * m + b] / (sum + args.eps);
        }
        for (int32_t b = 0; b < m; b++) {
            float sum = 0.0f;
            for (int32_t a = 0; a < m; a++)
                sum = sum + c[a * m + b];
            for (int32_t a = 0; a < m; a++)
                c[a * m + b] = c[a * m + b] / (sum + args.eps);
        }
    }
    for (int32_t i = 0; i < m * m; i++)
        comb[i] = c[i];
}

/* The sum of four lanes' values, none of them a negative zero, rising. */
__device__ static inline float sum_of(float v, int first, int step) {
    float sum = __shfl_sync(0xFFFFFFFFu, v, first);
#pragma unroll
    for (int i = 1; i < M; i++)
        sum = sum + __shfl_sync(0xFFFFFFFFu, v, first + i * step);
    return sum;
}

/* a/b rounded as division rounds, where a, b and a/b are far from the ends of the range: the steps that division takes
 * there, without the test. */
__device__ static inline float divide_middling(float a, float b) {
    float r = cu_reciprocal(b);
    r = __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
    float q = __fmul_rn(a, r);
    q = __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
    return __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
}

/* What a lane adds to its logits: of lane % 16, mixing logit 8 + lane % 16 and, in the first 8, gate lane % 8. */
typedef struct finish_terms {
    float gate_scale, gate_base, mix_scale, mix_base;
} finish_terms;
__device__ static inline finish_terms finish_terms_of(const di_hc_mix_args &args) {
    int lane = (int)(threadIdx.x % 16);
    return finish_terms{args.scale[lane % 8 / M], args.base[lane % 8], args.scale[2], args.base[2 * M + lane]};
}

/* The same of four streams and one row by each half of a warp: every lane brings its gate's and its mixing dot
 * (finish_terms) and the sum of squares. A half with is_kept off works along and writes nothing. */
__device__ static inline void finish_halves(const di_hc_mix_args &args, int64_t row, bool is_kept, float gate,
                                            float mix, float squares, const finish_terms &t) {
    int lane = (int)(threadIdx.x % DI_WARP), entry = lane % 16;
    float rms = sqrtf(squares / (float)args.x.n_cols + args.norm_eps);
    float g = cu_sigmoid(gate / rms * t.gate_scale + t.gate_base);
    if (is_kept && entry < M)
        args.pre_out[row * M + entry] = g + args.eps;
    else if (is_kept && entry < 2 * M)
        args.post[row * M + entry - M] = 2.0f * g;
    float c = mix / rms * t.mix_scale + t.mix_base; /* entry (a, b) in lane 4a + b of the half */
    int row_lane = lane & ~3, column_lane = (lane & 16) | (lane & 3);
    float most = __shfl_sync(0xFFFFFFFFu, c, row_lane);
#pragma unroll
    for (int b = 1; b < M; b++) {
        float v = __shfl_sync(0xFFFFFFFFu, c, row_lane + b);
        most = v > most ? v : most;
    }
    c = cu_expf(c - most);
    c = c / sum_of(c, row_lane, 1) + args.eps;
    /* Entries and eps of 0..1 stay there. Where none comes near 0 they are all as divide_middling wants them. */
    const float little = 0x1p-60f;
    float start = c, least = c;
    bool is_middling = c >= little && c <= 2.0f && args.eps >= 0.0f && args.eps <= 1.0f;
#pragma unroll 1
    for (int32_t i = 0; i < args.iters; i++) {
        if (i > 0) {
            c = divide_middling(c, sum_of(c, row_lane, 1) + args.eps);
            least = fminf(least, c);
        }
        c = divide_middling(c, sum_of(c, column_lane, M) + args.eps);
        least = fminf(least, c);
    }
    uint32_t half = lane < 16 ? 0x0000FFFFu : 0xFFFF0000u;
    bool is_right = (__ballot_sync(0xFFFFFFFFu, is_middling && least >= little) & half) == half;
    if (!__all_sync(0xFFFFFFFFu, is_right)) {
        float slow = start;
#pragma unroll 1
        for (int32_t i = 0; i < args.iters; i++) {
            if (i > 0)
                slow = slow / (sum_of(slow, row_lane, 1) + args.eps);
            slow = slow / (sum_of(slow, column_lane, M) + args.eps);
        }
        c = is_right ? c : slow;
    }
    if (is_kept)
        args.comb[row * M * M + entry] = c;
}

/* ---- collapse ---- */

/* Grid (row, piece of the columns). */
template <class T> __global__ void collapse_kernel(di_act x, int32_t m, const float *pre_in, di_act z) {
    cu_grid_begin();
    int64_t row = blockIdx.x, h = z.n_cols, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, v[8];
#pragma unroll 4
    for (int32_t s = 0; s < m; s++) {
        float pre = pre_in[row * m + s];
        cu_row_load8<T>(x, row, col < h ? s * h + col : x.n_cols, (s + 1) * h, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = sum[i] + pre * v[i];
    }
    cu_row_store8<T>(z, row, col, h, sum);
}

static void collapse(di_stream *stream, const di_hc_mix_args *a, bool is_wide) {
    int64_t n = (a->z.n_cols + 7) / 8;
    int n_threads = n >= 128 ? 128 : (int)((n + 31) / 32 * 32);
    dim3 grid((unsigned)a->x.n_rows, (unsigned)((n + n_threads - 1) / n_threads));
    DI_ROWS_BY_TYPE(
        is_wide, a->x.dtype,
        DI_LAUNCH_PDL((collapse_kernel<T>), grid, n_threads, 0, stream->stream, a->x, a->m, a->pre_in, a->z));
}

/* ---- sums of groups ---- */

enum { QUADS = DOTS / 4 };

/* 32 values of a row, shared memory. */
__device__ static inline void load_group(const uint16_t *from, float (&v)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        float eight[8];
        cu_load8(from + i, eight);
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[i + k] = eight[k];
    }
}
__device__ static inline void load_group(const float *from, float (&v)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        float4 q = *(const float4 *)(from + i);
        v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
    }
}

/* The sum of squares of a group. */
__device__ static inline float square_of(const float (&v)[32]) {
    float even = v[0] * v[0], odd = v[1] * v[1];
#pragma unroll
    for (int k = 2; k < 32; k += 2) {
        even = even + v[k] * v[k];
        odd = odd + v[k + 1] * v[k + 1];
    }
    return even + odd;
}

/* Four outputs of a group for a lane's R rows: weights at fp, those of an output PITCH floats after the last one's, the
 * same for all lanes. They come one step ahead of their use: w[0] holds the first four of each output, and in the end
 * those at `after`. Chains begin with their first product where the reference adds it to 0: a zero's sign is all that
 * may differ, and no result shows it. */
template <int R, int PITCH>
__device__ static inline void four_outputs(const float (&v)[R][32], float4 (&w)[2][4], const float *fp,
                                           const float *after, float4 (&sum)[R]) {
    float even[R][4], odd[R][4];
#pragma unroll
    for (int k = 0; k < 32; k += 4) {
        const float4(&u)[4] = w[k / 4 % 2];
#pragma unroll
        for (int o = 0; o < 4; o++)
            w[(k / 4 + 1) % 2][o] = *(const float4 *)(k < 28 ? fp + k + 4 + o * PITCH : after + o * PITCH);
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int o = 0; o < 4; o++) {
                float e = u[o].x * v[r][k], d = u[o].y * v[r][k + 1];
                even[r][o] = k ? even[r][o] + e : e;
                odd[r][o] = k ? odd[r][o] + d : d;
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int o = 0; o < 4; o++) {
                even[r][o] = even[r][o] + u[o].z * v[r][k + 2];
                odd[r][o] = odd[r][o] + u[o].w * v[r][k + 3];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
        sum[r] =
            make_float4(even[r][0] + odd[r][0], even[r][1] + odd[r][1], even[r][2] + odd[r][2], even[r][3] + odd[r][3]);
}

/* ---- few rows ----
 * Sums go to scratch [row][group / 4][SUMS][4]: four groups of one sum side by side. */

__device__ static inline float *sum_at(float *sums, int64_t row, int64_t n_groups, int64_t group, int sum) {
    return sums + row * n_groups * SUMS + (group / 4 * SUMS + sum) * 4 + group % 4;
}

enum { SPLIT_PASS = 8 }; /* rows that four lanes each bring at a time */

/* Grid (32 columns of every stream); warp s has stream s. */
template <class T>
__global__ void __launch_bounds__(M *DI_WARP)
    split_kernel(di_hc_mix_args args, int64_t row0, int64_t row_end, float *sums) {
    __shared__ __align__(16) float staged[M][SPLIT_PASS][32];
    __shared__ __align__(16) float weights[M][DOTS * 36]; /* rows of 32, padded */
    const di_act &x = args.x;
    int warp = (int)(threadIdx.x / DI_WARP), lane = (int)(threadIdx.x % DI_WARP);
    int64_t n = x.n_cols, h = args.x.n_cols / M, n_groups = n / 32;
    int64_t group = warp * (h / 32) + blockIdx.x, first = row0, end = row_end;
    float w[32], v[8];
    for (int unit = lane; unit < DOTS * 8; unit += DI_WARP) /* whole lines of the weights, then a row of them a lane */
        cu_cp16(cu_smem(&weights[warp][unit / 8 * 36 + unit % 8 * 4]),
                args.fn + unit / 8 * n + group * 32 + unit % 8 * 4);
    cu_cp_commit();
    cu_grid_begin();
    int64_t mine = first + lane / 4; /* row that this lane brings a quarter of */
    cu_row_load8<T>(x, mine, mine < end ? group * 32 + lane % 4 * 8 : n, n, v);
    cu_cp_wait<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        float4 q = *(const float4 *)&weights[warp][(lane < DOTS ? lane : 0) * 36 + i];
        w[i] = q.x, w[i + 1] = q.y, w[i + 2] = q.z, w[i + 3] = q.w;
    }
    for (int64_t at = first; at < end; at += SPLIT_PASS) {
        float squares[8];
        float4 *to = (float4 *)&staged[warp][lane / 4][lane % 4 * 8];
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares[i] = v[i] * v[i];
        float square = cu_quad_sum(squares);
        if (lane % 4 == 3 && mine < end)
            *sum_at(sums, mine - row0, n_groups, group, DOTS) = square;
        mine += SPLIT_PASS;
        cu_row_load8<T>(x, mine, mine < end ? group * 32 + lane % 4 * 8 : n, n, v); /* for the next turn */
        __syncthreads();
        int n_here = (int)(end - at < SPLIT_PASS ? end - at : (int64_t)SPLIT_PASS);
#pragma unroll 2
        for (int r = 0; r < n_here; r++) {
            const float4 *row = (const float4 *)staged[warp][r];
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 q = row[i];
                even = even + w[4 * i] * q.x;
                odd = odd + w[4 * i + 1] * q.y;
                even = even + w[4 * i + 2] * q.z;
                odd = odd + w[4 * i + 3] * q.w;
            }
            if (lane < DOTS)
                *sum_at(sums, at - row0 + r, n_groups, group, lane) = even + odd;
        }
        int r = (int)threadIdx.x / 16, i = (int)threadIdx.x % 16 * 2;
        if (args.z.data && r < n_here) { /* two columns of the collapse a thread */
            float z[2] = {0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < M; s++) {
                float pre = args.pre_in[(at + r) * M + s];
                z[0] = z[0] + pre * staged[s][r][i];
                z[1] = z[1] + pre * staged[s][r][i + 1];
            }
            T *out = (T *)args.z.data + (at + r) * args.z.stride + (int64_t)blockIdx.x * 32 + i;
            if constexpr (std::is_same_v<T, float>)
                *(float2 *)out = make_float2(z[0], z[1]);
            else
                *(uint32_t *)out = cu_pack_bf16(z[0], z[1]);
        }
        __syncthreads();
    }
}

enum { SPREAD_GROUPS = 4, SPREAD_COLS = 32 * SPREAD_GROUPS, SPREAD_THREADS = 2 * SPREAD_GROUPS * DI_WARP };

/* Grid (4 groups, 32 rows); warp w has group w % 4 and half of the outputs, a lane a row. */
template <class T>
__global__ void __launch_bounds__(SPREAD_THREADS, 3)
    spread_kernel(di_act x, const float *fn, int64_t row0, int64_t row_end, float *sums) {
    constexpr int PITCH = SPREAD_COLS * (int)sizeof(T) + 16, OUT_PITCH = SPREAD_GROUPS * SUMS + 1; /* spread banks */
    constexpr int X_LANES = SPREAD_COLS * (int)sizeof(T) / 16, FN_LANES = SPREAD_COLS * 4 / 16, HALF = QUADS / 2;
    __shared__ __align__(16) uint8_t xs[DI_WARP * PITCH];
    __shared__ __align__(16) float fs[DOTS * SPREAD_COLS];
    __shared__ float out[DI_WARP * OUT_PITCH];
    int tid = (int)threadIdx.x, lane = tid % DI_WARP, g = tid / DI_WARP % SPREAD_GROUPS;
    int q0 = tid / DI_WARP / SPREAD_GROUPS * HALF;
    int64_t n = x.n_cols, c0 = (int64_t)blockIdx.x * SPREAD_COLS, first = row0 + (int64_t)blockIdx.y * DI_WARP;
    int n_here = (int)(row_end - first < DI_WARP ? row_end - first : (int64_t)DI_WARP);
#pragma unroll
    for (int i = tid; i < DOTS * FN_LANES; i += SPREAD_THREADS)
        cu_cp16(cu_smem(fs + i * 4), fn + i / FN_LANES * n + c0 + i % FN_LANES * 4);
    cu_grid_begin();
#pragma unroll
    for (int i = tid; i < DI_WARP * X_LANES; i += SPREAD_THREADS) {
        int r = i / X_LANES, at = i % X_LANES * 16;
        if (r < n_here)
            cu_cp16(cu_smem(xs + r * PITCH + at),
                    (const uint8_t *)((const T *)x.data + (first + r) * x.stride + c0) + at);
    }
    cu_cp_commit();
    cu_cp_wait<0>();
    __syncthreads();
    const float *fp = fs + q0 * 4 * SPREAD_COLS + g * 32;
    float *to = out + lane * OUT_PITCH + g;
    float v[1][32];
    float4 w[2][4];
#pragma unroll
    for (int o = 0; o < 4; o++)
        w[0][o] = *(const float4 *)(fp + o * SPREAD_COLS);
    load_group((const T *)(xs + lane * PITCH) + g * 32, v[0]); /* noise in lanes that have no row */
    if (q0)
        to[DOTS * SPREAD_GROUPS] = square_of(v[0]);
    cu_wgmma_pin(v[0]);
#pragma unroll 1
    for (int q = q0; q < q0 + HALF; q++) {
        float4 sum[1];
        const float *after = q + 1 < q0 + HALF ? fp + 4 * SPREAD_COLS : fp;
        four_outputs<1, SPREAD_COLS>(v, w, fp, after, sum);
        fp = after;
        float *at = to + q * 4 * SPREAD_GROUPS;
        at[0] = sum[0].x, at[SPREAD_GROUPS] = sum[0].y, at[2 * SPREAD_GROUPS] = sum[0].z;
        at[3 * SPREAD_GROUPS] = sum[0].w;
    }
    __syncthreads();
    for (int i = tid; i < n_here * SPREAD_GROUPS * SUMS; i += SPREAD_THREADS) {
        int r = i / (SPREAD_GROUPS * SUMS), at = i % (SPREAD_GROUPS * SUMS);
        sum_at(sums, first - row0 + r, n / 32, (int64_t)blockIdx.x * SPREAD_GROUPS, 0)[at] = out[r * OUT_PITCH + at];
    }
}

enum { CHUNK = 64 /* groups */, CHUNKS_MAX = 12 /* of them in shared memory */, BEHIND = 4 /* fours of groups */ };

/* acc and n groups' sums s[0].x .. s[0].w, s[SUMS].x .. in their order. Loads run ahead of the chain. */
__device__ static inline float add_in_order(float acc, const float4 *s, int n) {
    auto add = [&](float4 four) {
        acc = acc + four.x;
        acc = acc + four.y;
        acc = acc + four.z;
        acc = acc + four.w;
    };
    int g = 0;
    if (n >= 4 * BEHIND) {
        float4 now[BEHIND], next[BEHIND];
#pragma unroll
        for (int k = 0; k < BEHIND; k++)
            now[k] = s[k * SUMS];
#pragma unroll 2
        for (; g + 4 * BEHIND <= n; g += 4 * BEHIND) {
            s += g + 8 * BEHIND <= n ? BEHIND * SUMS : 0; /* the last turn loads what it has once more */
#pragma unroll
            for (int k = 0; k < BEHIND; k++)
                next[k] = s[k * SUMS];
#pragma unroll
            for (int k = 0; k < BEHIND; k++) {
                add(now[k]);
                now[k] = next[k];
            }
        }
        s += BEHIND * SUMS;
    }
    for (; g < n; g += 4, s += SUMS)
        add(*s);
    return acc;
}

static int finish_chunks(int64_t n_groups) {
    int64_t n = (n_groups + CHUNK - 1) / CHUNK;
    return (int)(n < CHUNKS_MAX ? n : (int64_t)CHUNKS_MAX);
}

/* A warp a row: a lane adds the groups of one sum in their order. The copy engine brings them; n_slots chunks, of the
 * released shape all, are on their way at once, since the first come as late as all. */
__global__ void __launch_bounds__(DI_WARP)
    finish_kernel(di_hc_mix_args args, int64_t row0, int n_slots, const float *sums) {
    DI_DYN_SHARED(float, ring);
    __shared__ uint64_t is_full[CHUNKS_MAX];
    int lane = (int)threadIdx.x, n_groups = (int)(args.x.n_cols / 32);
    int n_chunks = (n_groups + CHUNK - 1) / CHUNK;
    const float *from = sums + (int64_t)blockIdx.x * n_groups * SUMS;
    auto size = [&](int c) { /* a multiple of 4, as the groups of 4 streams are */
                             return n_groups - c * CHUNK < CHUNK ? n_groups - c * CHUNK : (int)CHUNK;
    };
    auto bring = [&](int c, int slot) {
        uint32_t n_bytes = (uint32_t)(size(c) * SUMS) * (uint32_t)sizeof(float);
        cu_mbar_arrive_expect(&is_full[slot], n_bytes);
        cu_bulk_load(cu_smem(ring + slot * CHUNK * SUMS), from + (int64_t)c * CHUNK * SUMS, n_bytes, &is_full[slot]);
    };
    if (lane < CHUNKS_MAX)
        cu_mbar_init(&is_full[lane], 1);
    cu_fence_mbar_init();
    __syncwarp();
    finish_terms terms = finish_terms_of(args);
    cu_grid_begin();
    if (lane < n_slots)
        bring(lane, lane);
    float acc = 0.0f;
    for (int c = 0, slot = 0, turn = 0; c < n_chunks; c++) {
        cu_mbar_wait(&is_full[slot], (uint32_t)(turn & 1));
        acc = add_in_order(acc, (const float4 *)(ring + slot * CHUNK * SUMS) + (lane < SUMS ? lane : 0), size(c));
        if (c + n_slots < n_chunks) {
            __syncwarp();
            if (lane == 0)
                bring(c + n_slots, slot);
        }
        slot++;
        if (slot == n_slots)
            slot = 0, turn++;
    }
    float gate = __shfl_sync(0xFFFFFFFFu, acc, lane % 8), mix = __shfl_sync(0xFFFFFFFFu, acc, 2 * M + lane % 16);
    finish_halves(args, row0 + blockIdx.x, lane < 16, gate, mix, __shfl_sync(0xFFFFFFFFu, acc, DOTS), terms);
}

/* ---- many rows ---- */

enum { WORKERS = 8, ADDERS = 4, MANY_THREADS = (WORKERS + ADDERS) * DI_WARP, STAGES = 2 };

/* Shared memory: stages of a pass over WORKERS groups, rows and weights as they lie in memory; a part for each worker,
 * the sums of its group, four outputs together, then the squares. */
template <class T, int R> struct many {
    static constexpr int ROWS = DI_WARP * R, COLS = 32 * WORKERS;
    static constexpr int PITCH = COLS * (int)sizeof(T) + 16; /* spreads the rows of a warp over the banks */
    static constexpr int X = ROWS * PITCH, STAGE = X + DOTS * COLS * (int)sizeof(float);
    static constexpr int PART = ROWS * (QUADS * (int)sizeof(float4) + (int)sizeof(float));
    static constexpr int ITEMS = (QUADS * ROWS + ADDERS * DI_WARP - 1) / (ADDERS * DI_WARP); /* quads of an adder */
    static constexpr size_t BYTES = (size_t)STAGES * STAGE + (size_t)WORKERS * PART;
};

/* Warps 0..7 work: in pass p, warp w has group 8p + w. A lane holds 32 values of R rows and meets every weight of the
 * group once, the same one in all lanes. The other warps add: each lane some sums of all groups, in order; between
 * passes they bring what the pass after next needs. */
template <class T, int R>
__global__ void __launch_bounds__(MANY_THREADS, 1) many_kernel(di_act x, const float *fn, float *sums) {
    typedef many<T, R> shape;
    constexpr int ROWS = shape::ROWS, COLS = shape::COLS;
    DI_DYN_SHARED(uint8_t, smem);
    __shared__ uint64_t is_here[STAGES], is_made[WORKERS], is_added[WORKERS];
    int tid = (int)threadIdx.x, lane = tid % DI_WARP, warp = tid / DI_WARP;
    int64_t n = x.n_cols, row0 = (int64_t)blockIdx.x * ROWS;
    int n_groups = (int)(n / 32), n_passes = (n_groups + WORKERS - 1) / WORKERS;
    int n_here = (int)(x.n_rows - row0 < ROWS ? x.n_rows - row0 : ROWS);
    if (tid < STAGES)
        cu_mbar_init(&is_here[tid], ADDERS * DI_WARP);
    if (tid < WORKERS) {
        cu_mbar_init(&is_made[tid], 1);
        cu_mbar_init(&is_added[tid], ADDERS);
    }
    cu_fence_mbar_init();
    __syncthreads();
    cu_grid_begin();
    if (warp < WORKERS) {
        uint8_t *part = smem + STAGES * shape::STAGE + warp * shape::PART;
#pragma unroll 1
        for (int pass = 0; pass < n_passes && pass * WORKERS + warp < n_groups; pass++) {
            const uint8_t *stage = smem + pass % STAGES * shape::STAGE;
            const float *fp = (const float *)(stage + shape::X) + warp * 32;
            float v[R][32], square[R];
            float4 w[2][4];
            cu_mbar_wait(&is_here[pass % STAGES], (uint32_t)(pass / STAGES & 1));
#pragma unroll
            for (int o = 0; o < 4; o++)
                w[0][o] = *(const float4 *)(fp + o * COLS);
#pragma unroll
            for (int r = 0; r < R; r++) {
                load_group((const T *)(stage + (lane + r * DI_WARP) * shape::PITCH) + warp * 32, v[r]);
                square[r] = square_of(v[r]);
                cu_wgmma_pin(v[r]); /* or bf16 values would be made floats again for every four outputs */
            }
            cu_mbar_wait(&is_added[warp], (uint32_t)(pass & 1) ^ 1);
#pragma unroll
            for (int r = 0; r < R; r++)
                ((float *)(part + QUADS * ROWS * sizeof(float4)))[lane + r * DI_WARP] = square[r];
#pragma unroll 1
            for (int q = 0; q < QUADS; q++) {
                float4 sum[R];
                const float *after = q + 1 < QUADS ? fp + 4 * COLS : fp;
                four_outputs<R, COLS>(v, w, fp, after, sum);
                fp = after;
#pragma unroll
                for (int r = 0; r < R; r++)
                    ((float4 *)part)[q * ROWS + lane + r * DI_WARP] = sum[r];
            }
            __syncwarp();
            if (lane == 0)
                cu_mbar_arrive(&is_made[warp]);
        }
        return;
    }

    int adder = tid - WORKERS * DI_WARP;
    /* Sixteen bytes at a time, whole lines of the pass's columns of a row or an output; what lies beyond the row's end
     * or the last row is left as it was and not used. */
    constexpr int X_LANES = COLS * (int)sizeof(T) / 16, X_STEP = ADDERS * DI_WARP / X_LANES;
    constexpr int FN_LANES = COLS * 4 / 16, FN_STEP = ADDERS * DI_WARP / FN_LANES;
    int x_row = adder / X_LANES, x_col = adder % X_LANES * (16 / (int)sizeof(T));
    int fn_out = adder / FN_LANES, fn_col = adder % FN_LANES * 4;
    const T *x_from = (const T *)x.data + (row0 + x_row) * x.stride + x_col;
    const float *fn_from = fn + fn_out * n + fn_col;
    uint32_t x_to = cu_smem(smem) + (uint32_t)(x_row * shape::PITCH + x_col * (int)sizeof(T));
    uint32_t fn_to = cu_smem(smem) + (uint32_t)(shape::X + fn_out * COLS * 4 + fn_col * 4);
    auto bring = [&](int pass) { /* when all have done with what the stage held */
                                 if (pass >= n_passes)
                                     return;
                                 uint32_t stage = (uint32_t)(pass % STAGES * shape::STAGE);
                                 int64_t c0 = (int64_t)pass * COLS;
                                 const T *x_at = x_from + c0;
                                 const float *fn_at = fn_from + c0;
                                 if (c0 + x_col < n) {
#pragma unroll
                                     for (int i = 0; i < ROWS / X_STEP; i++, x_at += X_STEP * x.stride) {
                                         if (x_row + i * X_STEP < n_here)
                                             cu_cp16(x_to + stage + (uint32_t)(i * X_STEP * shape::PITCH), x_at);
                                     }
                                 }
                                 if (c0 + fn_col < n) {
#pragma unroll
                                     for (int i = 0; i < DOTS / FN_STEP; i++, fn_at += FN_STEP * n)
                                         cu_cp16(fn_to + stage + (uint32_t)(i * FN_STEP * COLS * 4), fn_at);
                                 }
                                 cu_mbar_arrive_cp(&is_here[pass % STAGES]);
    };
    for (int pass = 0; pass < STAGES; pass++)
        bring(pass);
    float4 acc[shape::ITEMS];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < shape::ITEMS; i++)
        acc[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int pass = 0; pass < n_passes; pass++) {
        int n_now = n_groups - pass * WORKERS < WORKERS ? n_groups - pass * WORKERS : (int)WORKERS;
#pragma unroll
        for (int g = 0; g < WORKERS; g++) {
            const float4 *quads = (const float4 *)(smem + STAGES * shape::STAGE + g * shape::PART);
            float4 s[shape::ITEMS];
            if (g >= n_now)
                break;
            cu_mbar_wait(&is_made[g], (uint32_t)(pass & 1));
#pragma unroll
            for (int i = 0; i < shape::ITEMS; i++)
                s[i] = quads[(i + 1) * ADDERS * DI_WARP <= QUADS * ROWS || adder + i * ADDERS * DI_WARP < QUADS * ROWS
                                 ? adder + i * ADDERS * DI_WARP
                                 : 0];
            float s_square = ((const float *)(quads + QUADS * ROWS))[adder % ROWS];
            __syncwarp();
            if (lane == 0)
                cu_mbar_arrive(&is_added[g]);
#pragma unroll
            for (int i = 0; i < shape::ITEMS; i++) {
                acc[i].x = acc[i].x + s[i].x;
                acc[i].y = acc[i].y + s[i].y;
                acc[i].z = acc[i].z + s[i].z;
                acc[i].w = acc[i].w + s[i].w;
            }
            square = square + s_square;
        }
        bring(pass + STAGES);
    }
#pragma unroll
    for (int i = 0; i < shape::ITEMS; i++) {
        int at = adder + i * ADDERS * DI_WARP, r = at % ROWS;
        float *to = sums + (row0 + r) * SUMS + at / ROWS * 4;
        if (at < QUADS * ROWS && r < n_here)
            to[0] = acc[i].x, to[1] = acc[i].y, to[2] = acc[i].z, to[3] = acc[i].w;
    }
    if (adder < n_here)
        sums[(row0 + adder) * SUMS + DOTS] = square;
}

enum { FINISH_THREADS = 128 };

/* Half a warp a row. */
__global__ void __launch_bounds__(FINISH_THREADS) finish_rows_kernel(di_hc_mix_args args, const float *sums) {
    finish_terms terms = finish_terms_of(args);
    cu_grid_begin();
    int64_t row = ((int64_t)blockIdx.x * FINISH_THREADS + threadIdx.x) / 16;
    bool is_kept = row < args.x.n_rows;
    const float *s = sums + (is_kept ? row : 0) * SUMS;
    int lane = (int)(threadIdx.x % 16);
    finish_halves(args, row, is_kept, s[lane % 8], s[2 * M + lane], s[DOTS], terms);
}

/* ---- sums of parts ---- */

/* R rows a warp, 1 or 2; a lane adds the parts of one sum, TO_ADD of them to a span's first. */
template <int R, int TO_ADD>
__global__ void __launch_bounds__(DI_WARP)
    finish_parts_kernel(di_hc_mix_args args, int64_t row0, int64_t row_end, hc_parts parts) {
    DI_DYN_SHARED(float, mine);
    __shared__ uint64_t is_here;
    int lane = (int)threadIdx.x, half = R == 2 ? lane / 16 : 0;
    int64_t row = row0 + (int64_t)blockIdx.x * R;
    int n_here = row_end - row < R ? 1 : R;
    if (lane == 0)
        cu_mbar_init(&is_here, 1);
    cu_fence_mbar_init();
    __syncwarp();
    finish_terms terms = finish_terms_of(args);
    cu_grid_begin();
    if (lane == 0) {
        uint32_t n_bytes = (uint32_t)(n_here * parts.pitch) * (uint32_t)sizeof(float);
        cu_mbar_arrive_expect(&is_here, n_bytes);
        cu_bulk_load(cu_smem(mine), parts.sums + (row - row0) * parts.pitch, n_bytes, &is_here);
    }
    cu_mbar_wait(&is_here, 0);
    int step = lane < DOTS ? DOTS : 1, part = 0;
    const float *s[R];
    float acc[R];
#pragma unroll
    for (int r = 0; r < R; r++) { /* a row that isn't there is the other one again */
        s[r] = mine + (r < n_here ? r * parts.pitch : 0) + (lane < DOTS ? lane : parts.n * DOTS);
        acc[r] = 0.0f;
    }
    auto add = [&](int n) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            float sum = s[r][0];
#pragma unroll
            for (int i = 1; i < TO_ADD; i++) {
                if (i < n)
                    sum = sum + s[r][i * step];
            }
            acc[r] = acc[r] + sum;
            s[r] += TO_ADD * step;
        }
    };
#pragma unroll 4
    for (; part + TO_ADD <= parts.n; part += TO_ADD)
        add(TO_ADD);
    if (part < parts.n)
        add(parts.n - part);
    float of[2][3]; /* a half's gates, mixes and square */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        of[r][0] = __shfl_sync(0xFFFFFFFFu, acc[r % R], lane % 8);
        of[r][1] = __shfl_sync(0xFFFFFFFFu, acc[r % R], 2 * M + lane % 16);
        of[r][2] = __shfl_sync(0xFFFFFFFFu, acc[r % R], DOTS);
    }
    finish_halves(args, row + half, R == 2 ? half < n_here : lane < 16, half ? of[1][0] : of[0][0],
                  half ? of[1][1] : of[0][1], half ? of[1][2] : of[0][2], terms);
}

void hc_finish_parts(di_stream *stream, const di_hc_mix_args *a, int64_t row0, int64_t row_end, const hc_parts *parts) {
    size_t row_bytes = (size_t)parts->pitch * sizeof(float);
    if (parts->to_add == 1)
        DI_LAUNCH_PDL((finish_parts_kernel<2, 1>), (unsigned)((row_end - row0 + 1) / 2), DI_WARP, 2 * row_bytes,
                      stream->stream, *a, row0, row_end, *parts);
    else
        DI_LAUNCH_PDL((finish_parts_kernel<1, HC_SPAN>), (unsigned)(row_end - row0), DI_WARP, row_bytes, stream->stream,
                      *a, row0, row_end, *parts);
}

/* ---- others ---- */

enum { ANY_THREADS = 256 };

/* A block a row, one sum after another. */
__global__ void any_kernel(di_hc_mix_args args) {
    DI_DYN_SHARED(float, sums);
    __shared__ float dots[(2 + STREAMS_MAX) * STREAMS_MAX + 1];
    cu_grid_begin();
    int64_t row = blockIdx.x, n = args.x.n_cols;
    int n_dots = (2 + args.m) * args.m;
    for (int o = 0; o <= n_dots; o++) {
        for (int64_t c0 = 0; c0 < n; c0 += ANY_THREADS * 8) {
            int64_t col = c0 + (int64_t)threadIdx.x * 8;
            float v[8], products[8];
            cu_row_load8<void>(args.x, row, col, n, v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float w = o == n_dots ? v[i] : col + i < n ? args.fn[o * n + col + i] : 0.0f;
                products[i] = w * v[i];
            }
            float sum = cu_quad_sum(products);
            if (threadIdx.x % 4 == 3 && col - 24 < n)
                sums[col / 32] = sum;
        }
        __syncthreads();
        if (threadIdx.x < DI_WARP) {
            float sum = cu_ordered_sum(sums, (int)((n + 31) / 32));
            if (threadIdx.x == 0)
                dots[o] = sum;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        finish_row(args, row, dots, dots[n_dots]);
}

/* ---- hc_mix ---- */

/* z may be missing here (data NULL). */
static bool mix_fits(const di_hc_mix_args *a) {
    return di_cuda_is_real(&a->x) && a->m >= 1 && a->m <= STREAMS_MAX && a->x.n_cols >= a->m &&
           a->x.n_cols % a->m == 0 && a->x.n_cols <= 32 * 12000 &&
           (!a->fn || (a->scale && a->base && a->pre_out && a->post && a->comb));
}

/* From so many rows on a lane has a row; below, lanes would be idle. */
enum { SPREAD_ROWS_MIN = 12 };

template <class T>
static void few_rows(di_stream *stream, const di_hc_mix_args *a, float *scratch, int64_t rows_at_once) {
    int64_t n_rows = a->x.n_rows, n = a->x.n_cols;
    int n_slots = finish_chunks(n / 32);
    for (int64_t row0 = 0; row0 < n_rows; row0 += rows_at_once) {
        int64_t end = row0 + rows_at_once < n_rows ? row0 + rows_at_once : n_rows;
        if (n_rows < SPREAD_ROWS_MIN)
            DI_LAUNCH_PDL((split_kernel<T>), (unsigned)(n / M / 32), M * DI_WARP, 0, stream->stream, *a, row0, end,
                          scratch);
        else
            DI_LAUNCH_PDL((spread_kernel<T>),
                          dim3((unsigned)(n / SPREAD_COLS), (unsigned)((end - row0 + DI_WARP - 1) / DI_WARP)),
                          SPREAD_THREADS, 0, stream->stream, a->x, a->fn, row0, end, scratch);
        DI_LAUNCH_PDL(finish_kernel, (unsigned)(end - row0), DI_WARP, (size_t)(n_slots * CHUNK * SUMS * 4),
                      stream->stream, *a, row0, n_slots, scratch);
    }
}

template <class T, int R> static void many_rows(di_stream *stream, const di_hc_mix_args *a, float *scratch) {
    unsigned grid = (unsigned)((a->x.n_rows + many<T, R>::ROWS - 1) / many<T, R>::ROWS);
    DI_LAUNCH_PDL((many_kernel<T, R>), grid, MANY_THREADS, (many<T, R>::BYTES), stream->stream, a->x, a->fn, scratch);
    DI_LAUNCH_PDL(finish_rows_kernel, (unsigned)((a->x.n_rows * 16 + FINISH_THREADS - 1) / FINISH_THREADS),
                  FINISH_THREADS, 0, stream->stream, *a, scratch);
}

/* Turns of the chip that tiles of so many rows take. */
static int64_t turns(const di_stream *stream, int64_t n_rows, int64_t tile) {
    int64_t n_tiles = (n_rows + tile - 1) / tile;
    return (n_tiles + stream->dev->n_sms - 1) / stream->dev->n_sms;
}

/* Everything that a has room for: z where z.data is not NULL, the mixes where fn is not. */
static di_status mix(di_stream *stream, const di_hc_mix_args *a, void *scratch, size_t scratch_bytes) {
    bool with_z = a->z.data, is_same = !with_z || a->z.dtype == a->x.dtype;
    int64_t h = a->x.n_cols / a->m;
    bool is_wide = is_same && h % 8 == 0 && di_rows_is_wide(&a->x) && (!with_z || di_rows_is_wide(&a->z));
    if (!a->fn) {
        collapse(stream, a, is_wide);
        return DI_OK;
    }
    bool is_fast = a->m == M && h % 32 == 0 && is_wide && di_rows_is_aligned(a->fn, 0, 16);
    if (is_fast && hc_sm90_fits(stream, a)) {
        if (with_z)
            collapse(stream, a, is_wide);
        hc_sm90(stream, a);
        return DI_OK;
    }
    int64_t at_once = (int64_t)(scratch_bytes / grouped_row_bytes(a->x.n_cols ? (a->x.n_cols + 31) / 32 * 32 : 32));
    at_once = at_once < GROUPED_ROWS ? at_once : (int64_t)GROUPED_ROWS;
    bool is_few = is_fast && a->x.n_rows <= GROUPED_ROWS_MAX && at_once >= 1;
    if (with_z && !(is_few && a->x.n_rows < SPREAD_ROWS_MIN))
        collapse(stream, a, is_wide);
    if (is_few) {
        if (a->x.dtype == DI_F32)
            few_rows<float>(stream, a, (float *)scratch, at_once);
        else
            few_rows<uint16_t>(stream, a, (float *)scratch, at_once);
        return DI_OK;
    }
    is_fast = is_fast && (size_t)a->x.n_rows * SUMS * sizeof(float) <= scratch_bytes;
    if (is_fast && a->x.dtype == DI_F32)
        many_rows<float, 1>(stream, a, (float *)scratch);
    else if (is_fast && turns(stream, a->x.n_rows, 32) < 2 * turns(stream, a->x.n_rows, 64))
        many_rows<uint16_t, 1>(stream, a, (float *)scratch);
    else if (is_fast)
        many_rows<uint16_t, 2>(stream, a, (float *)scratch);
    else
        DI_LAUNCH_PDL(any_kernel, (unsigned)a->x.n_rows, ANY_THREADS, (size_t)((a->x.n_cols + 31) / 32 * 4 + 16),
                      stream->stream, *a);
    return DI_OK;
}

di_status di_cuda_hc_mix(di_stream *stream, const di_hc_mix_args *a) {
    bool with_z = a->z.data || !a->fn;
    if (!mix_fits(a) || (with_z && (!di_cuda_is_real(&a->z) || a->x.n_cols != a->m * a->z.n_cols ||
                                    a->z.n_rows != a->x.n_rows || (a->x.n_rows && !a->pre_in))))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    return mix(stream, a, di_cuda_scratch(stream, 0), di_cuda_scratch_bytes(stream));
}

/* ---- hc_post ---- */

/* Grid (row, piece of the columns). N streams, known (4) or not (0). */
template <class T, int N>
__global__ void hc_post_kernel(di_act x, di_act f, int32_t streams, const float *post, const float *comb) {
    constexpr int ROOM = N ? N : STREAMS_MAX;
    const int32_t m = N ? N : streams;
    int64_t row = blockIdx.x, h = f.n_cols, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    cu_grid_begin();
    float v[ROOM][8], fv[8], y[8];
    cu_row_load8<T>(f, row, col, h, fv);
#pragma unroll
    for (int a = 0; a < ROOM; a++) {
        if (a < m)
            cu_row_load8<T>(x, row, col < h ? a * h + col : x.n_cols, (a + 1) * h, v[a]);
    }
#pragma unroll
    for (int b = 0; b < ROOM; b++) {
        if (b >= m)
            break;
        float p = post[row * m + b];
#pragma unroll
        for (int i = 0; i < 8; i++)
            y[i] = p * fv[i];
#pragma unroll
        for (int a = 0; a < ROOM; a++) {
            if (a >= m)
                break;
            float c = comb[row * m * m + a * m + b];
#pragma unroll
            for (int i = 0; i < 8; i++)
                y[i] = y[i] + c * v[a][i];
        }
        cu_row_store8<T>(x, row, col < h ? b * h + col : x.n_cols, (b + 1) * h, y);
    }
}

di_status di_cuda_hc_post(di_stream *stream, const di_hc_post_args *a) {
    if (!di_cuda_is_real(&a->x) || !di_cuda_is_real(&a->f) || a->m < 1 || a->m > STREAMS_MAX ||
        a->x.n_cols != a->m * a->f.n_cols || a->f.n_rows != a->x.n_rows)
        return DI_ERR_SHAPE;
    if (!a->x.n_rows || !a->x.n_cols)
        return DI_OK;
    if (!a->post || !a->comb)
        return DI_ERR_SHAPE;
    int64_t h = a->f.n_cols, n = (h + 7) / 8;
    bool is_wide =
        a->m == M && h % 8 == 0 && a->x.dtype == a->f.dtype && di_rows_is_wide(&a->x) && di_rows_is_wide(&a->f);
    int n_threads = n >= 128 ? 128 : (int)((n + 31) / 32 * 32);
    dim3 grid((unsigned)a->x.n_rows, (unsigned)((n + n_threads - 1) / n_threads));
    DI_ROWS_BY_TYPE(is_wide, a->x.dtype,
                    DI_LAUNCH_PDL((hc_post_kernel < T, std::is_void_v<T> ? 0 : M >), grid, n_threads, 0, stream->stream,
                                  a->x, a->f, a->m, a->post, a->comb));
    return DI_OK;
}
