/* Hyper-connections on the device: hc_mix and hc_post, model.md 3.3.
 *
 * hc_mix has three results. The collapse z is a row-wise sum. The 24 mixing logits and the mean square are sums over
 * 20480 inputs against 2 MB of fp32 weights; the order of ops.h makes each of them a chain over 640 groups, so that the
 * groups are what runs in parallel. What follows the sums is a long chain over 24 numbers (Sinkhorn).
 *
 *   few rows   split_kernel: a warp takes a group of 32 inputs; a lane holds one output's 32 weights and goes through
 *              the rows. The groups' sums go to scratch; finish_kernel adds them, a lane an output, a warp a row.
 *   many rows  tile_kernel: a block takes 16 or 32 rows through all groups. A lane has 4 rows x 6 outputs of a group:
 *              arithmetic is what counts. Sums of groups meet in shared memory and are added there in order.
 *   others     any_kernel: other numbers of streams, odd widths or addresses; simple.
 *
 * All give the reference's bits, whatever the batch. Index convention of comb: [old stream][new stream]. */
#include "rows.cuh"

enum { STREAMS_MAX = 8 }; /* streams, at most */

enum { M = 4, DOTS = (2 + M) * M, SUMS = DOTS + 1 /* and the square */ };

/* Most rows of one split launch: more go in turns over the same scratch. */
enum { SPLIT_ROWS = 256, SPLIT_ROWS_MAX = 6 * SPLIT_ROWS };

static size_t split_row_bytes(int64_t n) {
    return (size_t)(n / 32) * SUMS * sizeof(float);
}

size_t di_cuda_need_hc(const di_device *dev, const di_limits *limits) {
    (void)dev;
    int64_t rows = limits->rows_max > 0 ? limits->rows_max : 1, few = rows < SPLIT_ROWS ? rows : (int64_t)SPLIT_ROWS;
    int64_t n = limits->hidden_size > 0 ? M * limits->hidden_size : limits->n_in_max;
    size_t groups = (size_t)few * split_row_bytes((n + 31) / 32 * 32), all = (size_t)rows * SUMS * sizeof(float);
    return groups > all ? groups : all;
}

/* ---- what follows the sums ---- */

/* Of one row by one thread, as di_cpu_hc_finish. N streams, known (4) or not (0). */
template <int N>
__device__ static inline void finish_row(const di_hc_mix_args &args, int64_t row, const float *dots, float squares) {
    const int32_t m = N ? N : args.m;
    float c[N ? N * N : STREAMS_MAX * STREAMS_MAX];
    float rms = sqrtf(squares / (float)args.x.n_cols + args.norm_eps);
    float *pre = args.pre_out + row * m, *post = args.post + row * m, *comb = args.comb + row * m * m;
#pragma unroll
    for (int32_t i = 0; i < m; i++) {
        pre[i] = cu_sigmoid(dots[i] / rms * args.scale[0] + args.base[i]) + args.eps;
        post[i] = 2.0f * cu_sigmoid(dots[m + i] / rms * args.scale[1] + args.base[m + i]);
    }
#pragma unroll
    for (int32_t i = 0; i < m * m; i++)
        c[i] = dots[2 * m + i] / rms * args.scale[2] + args.base[2 * m + i];
#pragma unroll
    for (int32_t a = 0; a < m; a++) { /* softmax over the new streams, + eps */
        float most = c[a * m], sum = 0.0f;
#pragma unroll
        for (int32_t b = 1; b < m; b++)
            most = c[a * m + b] > most ? c[a * m + b] : most;
#pragma unroll
        for (int32_t b = 0; b < m; b++) {
            c[a * m + b] = cu_expf(c[a * m + b] - most);
            sum = sum + c[a * m + b];
        }
#pragma unroll
        for (int32_t b = 0; b < m; b++)
            c[a * m + b] = c[a * m + b] / sum + args.eps;
    }
#pragma unroll 1
    for (int32_t i = 0; i < args.iters; i++) {
#pragma unroll
        for (int32_t a = 0; a < m; a++) {
            if (i == 0)
                break; /* the softmax was the first */
            float sum = 0.0f;
#pragma unroll
            for (int32_t b = 0; b < m; b++)
                sum = sum + c[a * m + b];
#pragma unroll
            for (int32_t b = 0; b < m; b++)
                c[a * m + b] = c[a * m + b] / (sum + args.eps);
        }
#pragma unroll
        for (int32_t b = 0; b < m; b++) {
            float sum = 0.0f;
#pragma unroll
            for (int32_t a = 0; a < m; a++)
                sum = sum + c[a * m + b];
#pragma unroll
            for (int32_t a = 0; a < m; a++)
                c[a * m + b] = c[a * m + b] / (sum + args.eps);
        }
    }
#pragma unroll
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

/* The same of one row by one warp: lane l < 24 brings dot l, lane 24 the sum of squares; scale and base are the lane's.
 */
__device__ static inline void finish_warp(const di_hc_mix_args &args, int64_t row, float acc, float scale, float base) {
    int lane = (int)(threadIdx.x % DI_WARP);
    float rms = sqrtf(__shfl_sync(0xFFFFFFFFu, acc, DOTS) / (float)args.x.n_cols + args.norm_eps);
    float y = acc / rms * scale + base;
    if (lane < 2 * M) {
        float g = cu_sigmoid(y);
        if (lane < M)
            args.pre_out[row * M + lane] = g + args.eps;
        else
            args.post[row * M + lane - M] = 2.0f * g;
    }
    /* Entry (a, b) in lanes 4a + b and 16 + 4a + b, twice so that no lane divides by what is none. */
    float c = __shfl_sync(0xFFFFFFFFu, y, 2 * M + lane % (M * M));
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
    if (!__all_sync(0xFFFFFFFFu, is_middling && least >= little)) {
        c = start;
#pragma unroll 1
        for (int32_t i = 0; i < args.iters; i++) {
            if (i > 0)
                c = c / (sum_of(c, row_lane, 1) + args.eps);
            c = c / (sum_of(c, column_lane, M) + args.eps);
        }
    }
    if (lane < M * M)
        args.comb[row * M * M + lane] = c;
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

/* ---- few rows ---- */

enum { SPLIT_PASS = 8 }; /* rows that four lanes each bring at a time */

/* Grid (32 columns of every stream, rows_per_block rows); warp s has stream s. sums [row - row0][group][SUMS]. */
template <class T>
__global__ void __launch_bounds__(M *DI_WARP)
    split_kernel(di_hc_mix_args args, int64_t row0, int64_t row_end, int32_t rows_per_block, float *sums) {
    __shared__ __align__(16) float staged[M][SPLIT_PASS][32];
    __shared__ __align__(16) float weights[M][DOTS * 36]; /* rows of 32, padded */
    const di_act &x = args.x;
    int warp = (int)(threadIdx.x / DI_WARP), lane = (int)(threadIdx.x % DI_WARP);
    int64_t n = x.n_cols, h = args.x.n_cols / M, n_groups = n / 32;
    int64_t group = warp * (h / 32) + blockIdx.x, first = row0 + (int64_t)blockIdx.y * rows_per_block;
    int64_t end = first + rows_per_block < row_end ? first + rows_per_block : row_end;
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
            sums[((mine - row0) * n_groups + group) * SUMS + DOTS] = square;
        mine += SPLIT_PASS;
        cu_row_load8<T>(x, mine, mine < end ? group * 32 + lane % 4 * 8 : n, n, v); /* for the next turn */
        __syncthreads();
        int n_here = (int)(end - at < SPLIT_PASS ? end - at : SPLIT_PASS);
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
                sums[((at - row0 + r) * n_groups + group) * SUMS + lane] = even + odd;
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

enum { CHUNK = 64 /* groups */, CHUNKS = 4 /* of them in shared memory */, BEHIND = 16 };

/* acc and the n sums s[0], s[SUMS], s[2*SUMS] .. in their order; n is a multiple of 4. Loads run ahead of the chain. */
__device__ static inline float add_in_order(float acc, const float *s, int n) {
    int g = 0;
    if (n >= BEHIND) {
        float now[BEHIND], next[BEHIND];
#pragma unroll
        for (int k = 0; k < BEHIND; k++)
            now[k] = s[k * SUMS];
#pragma unroll 2
        for (; g + BEHIND <= n; g += BEHIND) {
            s += g + 2 * BEHIND <= n ? BEHIND * SUMS : 0; /* the last turn loads what it has once more */
#pragma unroll
            for (int k = 0; k < BEHIND; k++)
                next[k] = s[k * SUMS];
#pragma unroll
            for (int k = 0; k < BEHIND; k++) {
                acc = acc + now[k];
                now[k] = next[k];
            }
        }
        s += BEHIND * SUMS;
    }
    for (; g < n; g++, s += SUMS)
        acc = acc + *s;
    return acc;
}

/* A warp a row: a lane adds the groups of one sum in their order, while the copy engine brings the next ones. */
__global__ void __launch_bounds__(DI_WARP) finish_kernel(di_hc_mix_args args, int64_t row0, const float *sums) {
    __shared__ __align__(128) float ring[CHUNKS][CHUNK * SUMS];
    __shared__ uint64_t is_full[CHUNKS];
    int lane = (int)threadIdx.x, n_groups = (int)(args.x.n_cols / 32);
    int n_chunks = (n_groups + CHUNK - 1) / CHUNK;
    const float *from = sums + (int64_t)blockIdx.x * n_groups * SUMS;
    auto size = [&](int c) { /* a multiple of 4, as the groups of 4 streams are: of 16 bytes */
                             return n_groups - c * CHUNK < CHUNK ? n_groups - c * CHUNK : (int)CHUNK;
    };
    auto bring = [&](int c) {
        if (lane || c >= n_chunks)
            return;
        uint32_t n_bytes = (uint32_t)(size(c) * SUMS) * (uint32_t)sizeof(float);
        cu_mbar_arrive_expect(&is_full[c % CHUNKS], n_bytes);
        cu_bulk_load(cu_smem(ring[c % CHUNKS]), from + (int64_t)c * CHUNK * SUMS, n_bytes, &is_full[c % CHUNKS]);
    };
    if (lane < CHUNKS)
        cu_mbar_init(&is_full[lane], 1);
    cu_fence_mbar_init();
    __syncwarp();
    int part = lane < M ? 0 : lane < 2 * M ? 1 : 2; /* of pre, post, comb */
    float scale = args.scale[part], base = args.base[lane < DOTS ? lane : 0];
    cu_grid_begin();
    for (int c = 0; c < CHUNKS - 1; c++)
        bring(c);
    float acc = 0.0f;
    for (int c = 0; c < n_chunks; c++) {
        __syncwarp(); /* the chunk before is done with */
        bring(c + CHUNKS - 1);
        cu_mbar_wait(&is_full[c % CHUNKS], (uint32_t)(c / CHUNKS & 1));
        acc = add_in_order(acc, ring[c % CHUNKS] + (lane < SUMS ? lane : 0), size(c));
    }
    finish_warp(args, row0 + blockIdx.x, acc, scale, base);
}

/* ---- many rows ---- */

enum { TILE_THREADS = 256 };

/* Shapes of a pass over some groups. Columns of a group are padded to 36, rows to a pitch that spreads the lanes of a
 * warp over the banks. */
template <int ROWS> struct tile {
    static constexpr int SHARE = 32 / ROWS;  /* groups of a warp */
    static constexpr int GROUPS = 8 * SHARE; /* of a pass */
    static constexpr int COLS = 32 * GROUPS;
    static constexpr int PITCH = 36 * GROUPS + 4 * SHARE;
    static constexpr int ROW_LANES = ROWS / 4; /* lane = (share, row lane, output lane): rows r + ROW_LANES*j, */
    static constexpr int X = ROWS * PITCH;     /* outputs o + 4*j */
    static constexpr int FN = DOTS * PITCH;
    static constexpr int PARTS = ROWS * SUMS; /* of a group */
    static constexpr int X_UNITS = ROWS * COLS / 8 / TILE_THREADS, FN_UNITS = DOTS * COLS / 4 / TILE_THREADS;
    static constexpr size_t BYTES = (size_t)(X + FN + GROUPS * PARTS) * sizeof(float);
};

template <class T, int ROWS>
__global__ void __launch_bounds__(TILE_THREADS, ROWS == 32 ? 2 : 1)
    tile_kernel(di_act x, const float *fn, float *sums) {
    typedef tile<ROWS> shape;
    DI_DYN_SHARED(float, xs);
    cu_grid_begin();
    float *fs = xs + shape::X, *parts = fs + shape::FN;
    int64_t n = x.n_cols, row0 = (int64_t)blockIdx.x * ROWS;
    int tid = (int)threadIdx.x, lane = tid % DI_WARP, warp = tid / DI_WARP;
    int out_lane = lane % 4, row_lane = lane / 4 % shape::ROW_LANES, share = lane / 4 / shape::ROW_LANES;
    int group = warp * shape::SHARE + share;
    constexpr int MINE = (shape::PARTS + TILE_THREADS - 1) / TILE_THREADS;
    float acc[MINE];
    cu_raw8<T> x_next[shape::X_UNITS];
    float4 fn_next[shape::FN_UNITS];
#pragma unroll
    for (int k = 0; k < MINE; k++)
        acc[k] = 0.0f;

    /* What this thread brings of a pass: the same eight (four) columns of every X_STEP'th row (FN_STEP'th output). */
    constexpr int X_STEP = TILE_THREADS / (shape::COLS / 8), FN_STEP = TILE_THREADS / (shape::COLS / 4);
    int x_row = tid / (shape::COLS / 8), x_col = tid % (shape::COLS / 8) * 8;
    int fn_out = tid / (shape::COLS / 4), fn_col = tid % (shape::COLS / 4) * 4;
    int n_here = (int)(x.n_rows - row0 < ROWS ? x.n_rows - row0 : ROWS);
    const T *x_from = (const T *)x.data + (row0 + x_row) * x.stride + x_col;
    const float *fn_from = fn + fn_out * n + fn_col;
    auto load = [&](int64_t c0) { /* the columns from c0 on; zeros where there are none */
#pragma unroll
                                  for (int k = 0; k < shape::X_UNITS; k++) {
                                      if (x_row + k * X_STEP < n_here && c0 + x_col < n)
                                          x_next[k].load(x_from + c0 + k * X_STEP * x.stride);
                                      else
                                          x_next[k].zero();
                                  }
#pragma unroll
                                  for (int k = 0; k < shape::FN_UNITS; k++) {
                                      fn_next[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                                      if (c0 + fn_col < n)
                                          fn_next[k] = *(const float4 *)(fn_from + c0 + k * FN_STEP * n);
                                  }
    };
    float *x_to = xs + x_row * shape::PITCH + x_col / 32 * 36 + x_col % 32;
    float *fn_to = fs + fn_out * shape::PITCH + fn_col / 32 * 36 + fn_col % 32;
    auto store = [&] {
#pragma unroll
        for (int k = 0; k < shape::X_UNITS; k++) {
            float v[8];
            x_next[k].get(v);
            cu_store8(x_to + k * X_STEP * shape::PITCH, v);
        }
#pragma unroll
        for (int k = 0; k < shape::FN_UNITS; k++)
            *(float4 *)(fn_to + k * FN_STEP * shape::PITCH) = fn_next[k];
    };

    load(0);
    store();
    __syncthreads();
#pragma unroll 1
    for (int64_t c0 = 0; c0 < n; c0 += shape::COLS) {
        float even[4][6], odd[4][6], even_square = 0.0f, odd_square = 0.0f;
        const float *xp = xs + row_lane * shape::PITCH + group * 36, *fp = fs + out_lane * shape::PITCH + group * 36;
        const float *square = xp + out_lane * shape::ROW_LANES * shape::PITCH; /* of one of the lane's four rows */
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int o = 0; o < 6; o++)
                even[j][o] = odd[j][o] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
            float4 xv[4], wv[6], s = *(const float4 *)(square + k);
#pragma unroll
            for (int j = 0; j < 4; j++)
                xv[j] = *(const float4 *)(xp + j * shape::ROW_LANES * shape::PITCH + k);
#pragma unroll
            for (int o = 0; o < 6; o++)
                wv[o] = *(const float4 *)(fp + o * 4 * shape::PITCH + k);
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int o = 0; o < 6; o++) {
                    even[j][o] = even[j][o] + wv[o].x * xv[j].x;
                    odd[j][o] = odd[j][o] + wv[o].y * xv[j].y;
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int o = 0; o < 6; o++) {
                    even[j][o] = even[j][o] + wv[o].z * xv[j].z;
                    odd[j][o] = odd[j][o] + wv[o].w * xv[j].w;
                }
            }
            even_square = even_square + s.x * s.x;
            odd_square = odd_square + s.y * s.y;
            even_square = even_square + s.z * s.z;
            odd_square = odd_square + s.w * s.w;
        }
        float *part = parts + group * shape::PARTS + row_lane * SUMS;
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int o = 0; o < 6; o++)
                part[j * shape::ROW_LANES * SUMS + out_lane + 4 * o] = even[j][o] + odd[j][o];
        }
        part[out_lane * shape::ROW_LANES * SUMS + DOTS] = even_square + odd_square;
        __syncthreads();
        bool is_more = c0 + shape::COLS < n;
        if (is_more)
            load(c0 + shape::COLS);
#pragma unroll
        for (int k = 0; k < MINE; k++) {
            int at = tid + k * TILE_THREADS;
            if (at < shape::PARTS) {
#pragma unroll
                for (int g = 0; g < shape::GROUPS; g++) /* groups beyond the row are zeros */
                    acc[k] = acc[k] + parts[g * shape::PARTS + at];
            }
        }
        if (is_more)
            store();
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < MINE; k++) {
        int at = tid + k * TILE_THREADS;
        if (at < n_here * SUMS)
            sums[row0 * SUMS + at] = acc[k];
    }
}

/* A thread a row. */
__global__ void __launch_bounds__(DI_WARP) finish_rows_kernel(di_hc_mix_args args, const float *sums) {
    cu_grid_begin();
    int64_t row = (int64_t)blockIdx.x * DI_WARP + threadIdx.x;
    if (row >= args.x.n_rows)
        return;
    float dots[DOTS];
#pragma unroll
    for (int o = 0; o < DOTS; o++)
        dots[o] = sums[row * SUMS + o];
    finish_row<M>(args, row, dots, sums[row * SUMS + DOTS]);
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
        finish_row<0>(args, row, dots, dots[n_dots]);
}

/* ---- hc_mix ---- */

/* z may be missing here (data NULL). */
static bool mix_fits(const di_hc_mix_args *a) {
    return di_cuda_is_real(&a->x) && a->m >= 1 && a->m <= STREAMS_MAX && a->x.n_cols >= a->m &&
           a->x.n_cols % a->m == 0 && a->x.n_cols <= 32 * 12000 &&
           (!a->fn || (a->scale && a->base && a->pre_out && a->post && a->comb));
}

static void split(di_stream *stream, const di_hc_mix_args *a, float *scratch, int64_t rows_at_once) {
    int64_t n_rows = a->x.n_rows, h = a->x.n_cols / M;
    for (int64_t row0 = 0; row0 < n_rows; row0 += rows_at_once) {
        int64_t end = row0 + rows_at_once < n_rows ? row0 + rows_at_once : n_rows;
        /* More rows a block read the weights less often, fewer fill the chip sooner. */
        int32_t per_block = end - row0 > 128 ? 32 : 16;
        dim3 grid((unsigned)(h / 32), (unsigned)((end - row0 + per_block - 1) / per_block));
        if (a->x.dtype == DI_F32)
            DI_LAUNCH_PDL((split_kernel<float>), grid, M * DI_WARP, 0, stream->stream, *a, row0, end, per_block,
                          scratch);
        else
            DI_LAUNCH_PDL((split_kernel<uint16_t>), grid, M * DI_WARP, 0, stream->stream, *a, row0, end, per_block,
                          scratch);
        DI_LAUNCH_PDL(finish_kernel, (unsigned)(end - row0), DI_WARP, 0, stream->stream, *a, row0, scratch);
    }
}

template <int ROWS> static void tiles(di_stream *stream, const di_hc_mix_args *a, float *scratch) {
    unsigned grid = (unsigned)((a->x.n_rows + ROWS - 1) / ROWS);
    if (a->x.dtype == DI_F32)
        DI_LAUNCH_PDL((tile_kernel<float, ROWS>), grid, TILE_THREADS, tile<ROWS>::BYTES, stream->stream, a->x, a->fn,
                      scratch);
    else
        DI_LAUNCH_PDL((tile_kernel<uint16_t, ROWS>), grid, TILE_THREADS, tile<ROWS>::BYTES, stream->stream, a->x, a->fn,
                      scratch);
    DI_LAUNCH_PDL(finish_rows_kernel, (unsigned)((a->x.n_rows + DI_WARP - 1) / DI_WARP), DI_WARP, 0, stream->stream, *a,
                  scratch);
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
    int64_t at_once = (int64_t)(scratch_bytes / split_row_bytes(a->x.n_cols ? (a->x.n_cols + 31) / 32 * 32 : 32));
    at_once = at_once < SPLIT_ROWS ? at_once : (int64_t)SPLIT_ROWS;
    if (is_fast && a->x.n_rows <= SPLIT_ROWS_MAX && at_once >= 1) {
        split(stream, a, (float *)scratch, at_once);
        return DI_OK;
    }
    if (with_z)
        collapse(stream, a, is_wide);
    is_fast = is_fast && (size_t)a->x.n_rows * SUMS * sizeof(float) <= scratch_bytes;
    if (is_fast && a->x.n_rows <= 16 * (int64_t)stream->dev->n_sms)
        tiles<16>(stream, a, (float *)scratch);
    else if (is_fast)
        tiles<32>(stream, a, (float *)scratch);
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
    return mix(stream, a, di_cuda_scratch(stream, 0), stream->dev->scratch_bytes);
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
