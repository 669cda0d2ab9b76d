/* Core attention, portable: any chip, both numerics, the reference's bits (model.md 3.8, dspark.md 4.4).
 *
 * A block is one row and up to 8 heads, a warp each. It lists the row's keys in order, then goes through them twice in
 * tiles of 32, decoded to floats in shared memory:
 *
 *   scores   lane = key: its dot product in the order of di_dot32, kept in shared memory
 *   sums     lane = value, and those 32 further: sum of p * key over the keys, rising
 *
 * Between the two the warp takes the largest score, all exponentials, and one lane adds them in key order. Every sum
 * has its own thread and runs in the order of ops.h, so that nothing but the sums' own latency is serial.
 * attention_sm90.cu is the fast version. */
#include "attention.cuh"

enum {
    HEADS = 8,       /* of a block at most */
    TILE = 32,       /* keys in shared memory */
    VALUES_MAX = 16, /* of a lane in one pass over the keys: head_dim 512 */
};

/* Shared memory of a block, in 4-byte words. */
typedef struct layout {
    int64_t keys, q, p, list, n_words;
} layout;

__device__ __host__ static inline layout layout_of(int64_t d, int64_t keys_max, int64_t topk, int heads) {
    layout l;
    l.keys = 0; /* [TILE, d + 1]: keys of one column lie in different banks */
    l.q = l.keys + TILE * (d + 1);
    l.p = l.q + heads * d;
    l.list = l.p + heads * keys_max; /* listed entries, gaps left out */
    l.n_words = l.list + topk + 1;   /* and their number */
    return l;
}

/* Value i of a record. The product is the reference's: code times scale, rounded once. */
__device__ static inline float record_value(di_kv_format format, const uint8_t *data, const uint8_t *scale, int64_t i) {
    if (format == DI_KV_F32)
        return ((const float *)data)[i];
    if (format == DI_KV_FP8)
        return __fmul_rn(cu_e4m3_to_f32(data[i]), cu_e8m0_to_f32(scale[i / 32]));
    float v = cu_e2m1_to_f32((uint32_t)data[i / 2] >> (i % 2 * 4) & 15u);
    return __fmul_rn(v, format == DI_KV_FP4 ? cu_e4m3_to_f32(scale[i / 16]) : cu_e8m0_to_f32(scale[i / 32]));
}

__device__ static inline int64_t data_bytes(di_kv_format format, int64_t n) {
    return format == DI_KV_F32 ? 4 * n : format == DI_KV_FP8 ? n : n / 2;
}
__device__ static inline int64_t scale_bytes(di_kv_format format, int64_t n) {
    return format == DI_KV_F32 ? 0 : format == DI_KV_FP4 ? n / 16 : n / 32;
}

/* What a block knows of its row. */
typedef struct row_keys {
    int32_t seq, lo, n_window, n; /* n: with the listed entries */
} row_keys;

/* Decodes keys [k0, k0 + TILE) of the row into tile, as far as there are so many. All threads. */
__device__ static void load_tile(const attention_job &job, const row_keys &r, const int32_t *list, int64_t k0,
                                 float *tile) {
    const di_attention_args &a = job.a;
    int64_t d = a.head_dim;
    for (int64_t k = threadIdx.x / DI_WARP; k < TILE && k0 + k < r.n; k += blockDim.x / DI_WARP) {
        int32_t key = (int32_t)(k0 + k);
        di_kv_format format = key < r.n_window ? a.win_format : a.main.format;
        const uint8_t *data, *scale;
        int64_t n_data = data_bytes(format, d), n_scale = scale_bytes(format, d);
        if (key < r.n_window) {
            data = attention_window_at(a, (size_t)(n_data + n_scale), job.rows.row0[r.seq], job.rows.pos0[r.seq],
                                       job.rows.slot[r.seq], r.lo + key);
            scale = data + n_data;
        } else {
            int32_t entry = list[key - r.n_window], at = entry % a.main.per_block;
            int32_t block = job.rows.blocks[r.seq * job.rows.blocks_stride + entry / a.main.per_block];
            const uint8_t *section = a.main.pages + (size_t)block * a.main.page_bytes + a.main.offset;
            bool is_apart = format == DI_KV_MX4; /* all codes of a block, then all scales */
            data = section + at * (is_apart ? n_data : n_data + n_scale);
            scale = is_apart ? section + a.main.per_block * n_data + at * n_scale : data + n_data;
        }
        for (int64_t i = threadIdx.x % DI_WARP; i < d; i += DI_WARP)
            tile[k * (d + 1) + i] = record_value(format, data, scale, i);
    }
}

/* Leaves the entries >= 0 of the row's list in order in `list`; returns how many. The first warp. */
__device__ static int32_t compact_list(const attention_job &job, int64_t row, int32_t *list) {
    int32_t n = 0, lane = threadIdx.x % DI_WARP;
    for (int32_t t0 = 0; t0 < job.a.topk; t0 += DI_WARP) {
        int32_t entry = t0 + lane < job.a.topk ? job.a.idx[row * job.a.topk + t0 + lane] : -1;
        uint32_t there = __ballot_sync(0xFFFFFFFFu, entry >= 0);
        if (entry >= 0)
            list[n + __popc(there & ((1u << lane) - 1u))] = entry;
        n += __popc(there);
    }
    return n;
}

/* Scores of a head to probabilities, in place; returns the denominator. One warp. */
__device__ static float softmax(float *p, int32_t n, float sink) {
    int32_t lane = threadIdx.x % DI_WARP;
    float most = sink;
    for (int32_t k = lane; k < n; k += DI_WARP)
        most = p[k] > most ? p[k] : most;
    for (int32_t step = DI_WARP / 2; step; step >>= 1) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
        most = other > most ? other : most;
    }
    for (int32_t k = lane; k < n; k += DI_WARP)
        p[k] = cu_expf(__fsub_rn(p[k], most));
    __syncwarp();
    float sum = 0.0f; /* every lane adds the same */
    for (int32_t k = 0; k < n; k++)
        sum = __fadd_rn(sum, p[k]);
    return __fadd_rn(sum, cu_expf(__fsub_rn(sink, most)));
}

/* Division, inverse rotation and store of values i0 + 32*c + lane of a head. */
__device__ static inline void store_values(const attention_job &job, int64_t row, int64_t head, int64_t i0,
                                           const float (&acc)[VALUES_MAX], int32_t n_keys, float sum) {
    const di_attention_args &a = job.a;
    int64_t d = a.head_dim, tail = d - 2 * a.n_freq;
#pragma unroll
    for (int c = 0; c < VALUES_MAX; c++) {
        int64_t i = i0 + c * DI_WARP + threadIdx.x % DI_WARP;
        if (i0 + c * DI_WARP >= d) /* the same for the whole warp: d is a multiple of 32 */
            break;
        float v = n_keys ? __fdiv_rn(acc[c], sum) : acc[c];
        float pair = __shfl_xor_sync(0xFFFFFFFFu, v, 1);
        if (n_keys && i >= tail) {
            float cs = a.cos[row * a.n_freq + (i - tail) / 2], sn = a.sin[row * a.n_freq + (i - tail) / 2];
            v = i % 2 ? __fsub_rn(__fmul_rn(v, cs), __fmul_rn(pair, sn))
                      : __fadd_rn(__fmul_rn(v, cs), __fmul_rn(pair, sn));
        }
        cu_act_store(a.out, row, head * d + i, v);
    }
}

__global__ void __launch_bounds__(HEADS *DI_WARP) attention_rows(attention_job job) {
    DI_DYN_SHARED(float, shared);
    const di_attention_args &a = job.a;
    int64_t d = a.head_dim, row = blockIdx.x, topk = a.idx ? a.topk : 0;
    int heads = blockDim.x / DI_WARP, warp = threadIdx.x / DI_WARP, lane = threadIdx.x % DI_WARP;
    int64_t head = (int64_t)blockIdx.y * heads + warp;
    layout l = layout_of(d, job.keys_max, topk, heads);
    float *tile = shared + l.keys, *q = shared + l.q + warp * d, *p = shared + l.p + warp * job.keys_max;
    int32_t *list = (int32_t *)shared + l.list, *n_list = list + topk;
    bool is_head = head < a.n_heads;

    row_keys r = {job.rows.seq[row], job.rows.win_lo[row], job.rows.win_hi[row] - job.rows.win_lo[row], 0};
    /* More than was reserved is the caller's fault; on the device it can only be kept inside the arrays. */
    r.n_window = max(0, min(r.n_window, (int32_t)(job.keys_max - topk)));
    if (warp == 0) {
        int32_t n = topk ? compact_list(job, row, list) : 0;
        if (lane == 0)
            *n_list = n;
    }
    for (int64_t i = lane; i < d && is_head; i += DI_WARP)
        q[i] = cu_act_load(a.q, row, head * d + i);
    __syncthreads();
    r.n = r.n_window + *n_list;

    for (int64_t k0 = 0; k0 < r.n; k0 += TILE) {
        load_tile(job, r, list, k0, tile);
        __syncthreads();
        if (is_head && k0 + lane < r.n) {
            const float *key = tile + lane * (d + 1);
            float s = 0.0f;
            for (int64_t i0 = 0; i0 < d; i0 += 32) {
                float even = 0.0f, odd = 0.0f;
#pragma unroll
                for (int i = 0; i < 32; i += 2) {
                    even = __fadd_rn(even, __fmul_rn(q[i0 + i], key[i0 + i]));
                    odd = __fadd_rn(odd, __fmul_rn(q[i0 + i + 1], key[i0 + i + 1]));
                }
                s = __fadd_rn(s, __fadd_rn(even, odd));
            }
            p[k0 + lane] = __fmul_rn(s, a.scale);
        }
        __syncthreads();
    }
    float sum = is_head ? softmax(p, r.n, a.sink[head]) : 0.0f;

    for (int64_t i0 = 0; i0 < d; i0 += VALUES_MAX * DI_WARP) {
        float acc[VALUES_MAX] = {};
        for (int64_t k0 = 0; k0 < r.n; k0 += TILE) {
            load_tile(job, r, list, k0, tile);
            __syncthreads();
            for (int64_t k = 0; is_head && k < TILE && k0 + k < r.n; k++) {
                const float *key = tile + k * (d + 1) + i0 + lane;
                float pk = p[k0 + k];
#pragma unroll
                for (int c = 0; c < VALUES_MAX; c++) {
                    if (i0 + c * DI_WARP < d)
                        acc[c] = __fadd_rn(acc[c], __fmul_rn(pk, key[c * DI_WARP]));
                }
            }
            __syncthreads();
        }
        if (is_head)
            store_values(job, row, head, i0, acc, r.n, sum);
    }
}

/* ---- on the host ------------------------------------------------------------------------------------------------- */

static bool kv_fits(di_kv_format format, int64_t n) {
    return n > 0 && (format == DI_KV_F32 || n % 32 == 0);
}

static size_t record_bytes(di_kv_format format, int64_t n) {
    return format == DI_KV_F32 ? (size_t)n * 4
                               : (size_t)(format == DI_KV_FP8   ? n + n / 32
                                          : format == DI_KV_FP4 ? n / 2 + n / 16
                                                                : n / 2 + n / 32);
}

bool di_cuda_attention_fits(const di_stream *stream, const di_attention_args *a) {
    const di_rows *rows = a->rows;
    const di_limits *limits = &stream->dev->limits;
    int64_t n_cols = (int64_t)a->n_heads * a->head_dim, d = a->head_dim;
    if (!rows || rows->n_rows < 0 || a->n_heads < 1 || d < 32 || d % 32 || !di_cuda_is_real(&a->q) ||
        !di_cuda_is_real(&a->out) || a->q.n_rows < rows->n_rows || a->out.n_rows < rows->n_rows ||
        a->q.n_cols != n_cols || a->out.n_cols != n_cols || !a->records || !a->sink || !a->ring.slots ||
        a->ring.ring_len < 1 || a->ring.record_bytes < record_bytes(a->win_format, d) || a->n_freq < 0 ||
        2 * a->n_freq > d || (a->n_freq && (!a->cos || !a->sin)) || d > limits->head_dim ||
        a->n_heads > limits->n_heads)
        return false;
    if (!a->idx)
        return true;
    return a->topk >= 0 && a->main.pages && a->main.per_block > 0 && kv_fits(a->main.format, a->main.n_values) &&
           a->main.n_values == d && a->topk <= limits->keys_max;
}

/* The portable kernel takes none: scores stay in shared memory. */
size_t di_cuda_need_attention(const di_device *dev, const di_limits *limits) {
    return di_cuda_attention_sm90_scratch(dev, limits);
}

di_status di_cuda_attention(di_stream *stream, const di_attention_args *args) {
    if (!di_cuda_attention_fits(stream, args))
        return DI_ERR_SHAPE;
    if (args->rows->n_rows == 0)
        return DI_OK;
    if (stream->dev->arch == DI_CUDA_SM90 && di_cuda_attention_sm90_fits(stream, args))
        return di_cuda_attention_sm90(stream, args, NULL);
    attention_job job = {*args, *args->rows, stream->dev->limits.keys_max, {}};
    int64_t topk = args->idx ? args->topk : 0;
    for (int heads = HEADS; heads >= 1; heads /= 2) {
        size_t n_bytes = (size_t)layout_of(args->head_dim, job.keys_max, topk, heads).n_words * 4;
        if (n_bytes > stream->dev->prop.sharedMemPerBlockOptin || (heads > 1 && heads / 2 >= args->n_heads))
            continue;
        dim3 grid((unsigned)args->rows->n_rows, (unsigned)((args->n_heads + heads - 1) / heads));
        DI_LAUNCH(attention_rows, grid, (unsigned)(heads * DI_WARP), n_bytes, stream->stream, job);
        return DI_OK;
    }
    return DI_ERR_SHAPE;
}

di_status di_cuda_attention_quant(di_stream *stream, const di_attention_quant_args *args) {
    const di_attention_args *a = &args->attention;
    const di_act *codes = &args->codes;
    if (!di_cuda_attention_fits(stream, a) || codes->dtype != DI_F8_E4M3 || !di_cuda_is_act(codes) ||
        codes->n_cols != a->out.n_cols || codes->n_rows < a->rows->n_rows || codes->stride % 8 ||
        !di_rows_is_aligned(codes->data, 0, 8) || stream->dev->arch != DI_CUDA_SM90 ||
        !di_cuda_attention_sm90_fits(stream, a))
        return DI_ERR_SHAPE;
    return a->rows->n_rows ? di_cuda_attention_sm90(stream, a, codes) : DI_OK;
}
