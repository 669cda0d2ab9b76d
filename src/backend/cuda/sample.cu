/* Tokens from rows of logits where they lie (ops.h, sample_rows): what engine/sample/sample.c and spec/reject.c do on
 * the host, with the same bits.
 *
 * Whatever decides is an integer, a comparison or double arithmetic in the host's order of operations, so that work may
 * be cut anywhere; sums of doubles are made by runs of 1024 tokens as sample.c makes them. Rows are cut into runs; a
 * block of 128 threads works on a run at a time, a thread on two times four tokens of it. Between launches stands what
 * all blocks of a row must know: its best token, the last survivor, a sum. Top-p, top-k and lists of the best look for
 * one key of an order: slices of the scale of logits are counted by all blocks, then one block takes the slice in which
 * the key must be, sorts it and finds the key; a slice with too many tokens is searched by digits of the key.
 *
 *   scan, head       NaN, tokens that are allowed, the best one; bias and penalties in a copy, which is scanned again
 *   slices, select   the last survivor of top-p and top-k
 *   draw             the largest logit/temperature + noise
 *   sum, dist, pick  by rejection: probabilities, and a token by their cumulated sum
 *   sum, slices, top log-probabilities and the best
 *   finish           results
 *
 * To be compiled without flushing of subnormals, as the host's file is: logits and probabilities of that size count. */
#include "cu.cuh"
#include "math.cuh"

#include <float.h>

typedef unsigned long long u64;

enum {
    RUN = 1024,
    THREADS = 128, /* of a run: eight tokens each */
    FOURS = RUN / 4 / THREADS,
    SLICES = 256,
    LIST = 4096, /* keys that one block sorts */
    SORTERS = 1024,
    ROWS_MAX = 256,  /* that share scratch memory; more are taken in turns */
    CHANGED_MAX = 64 /* of them with a copy of their logits */
};

struct scan_part {
    u64 best;
    int32_t n_allowed, is_bad;
};

struct win_part {
    double score;
    int64_t id;
};

/* What is known of a row; index 0: the model's logits behind the masks, 1: with bias and penalties. */
struct sample_state {
    u64 best[2]; /* order keys; 0: no token is allowed */
    u64 last;    /* order key of the last survivor of top-p and top-k; 0: all survive */
    u64 p_best;  /* bits of the largest p, then the id from above */
    double score;
    int32_t n_allowed, is_bad, token;
    float distance;
};

/* A group of rows and its scratch memory. */
struct sample_job {
    const float *logits;
    int64_t n_vocab;
    int32_t row0, n_rows, n_runs, n_parts, changed0;
    const di_sample_row *rows;
    const uint32_t *words, *blacklist;
    di_sample_result *results;
    int32_t *tokens;
    di_sample_top *top;
    sample_state *states; /* [rows] */
    scan_part *parts;     /* [rows, n_parts] */
    win_part *wins;       /* [rows, n_parts] */
    double *sums;         /* [2, rows, n_runs]: of log-probabilities, of p */
    u64 *weights;         /* [rows, n_runs] */
    u64 *mass;            /* [2, rows, SLICES]: of the last survivor, of the list of the best (not used there) */
    u64 *count;           /* [2, rows, SLICES] */
    float *changed;       /* [CHANGED_MAX, n_vocab] */
};

/* ---- arithmetic, with the steps of tensor/math.c and engine/sample/sample.c ---------------------------------------
 */

#define WEIGHT_ONE 0x1p36
#define LEAST_DISTANCE (-26.0)
#define PENALTY 5e-5f
#define UNIT 0x1p52
#define FLOOR (-9999.0f)

__device__ static inline u64 cu_noise_bits(u64 seed, u64 position, u64 token) {
    u64 q = ((position << 32) + token) * 0x9E3779B97F4A7C15u;
    u64 z = seed + (q ^ (q << 13));
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

__device__ static inline double cu_gumbel(u64 z) {
    double u = ((double)(z >> 12) + 0.5) * 0x1p-52;
    return -cu_ln(-cu_ln(u));
}

__device__ static inline u64 cu_units(float weight) {
    return (u64)(int64_t)((double)weight * UNIT);
}

/* ---- the order of tokens ------------------------------------------------------------------------------------------
 */

__device__ static inline u64 cu_key(float logit, int64_t id) {
    uint32_t bits = __float_as_uint(logit);
    bits = bits == 0x80000000u ? 0u : bits; /* -0 is 0 */
    bits ^= (bits >> 31) ? 0xFFFFFFFFu : 0x80000000u;
    return ((u64)bits << 32) | (uint32_t) ~(uint32_t)id;
}
__device__ static inline int32_t key_id(u64 key) {
    return (int32_t) ~(uint32_t)key;
}
__device__ static inline float key_logit(u64 key) {
    uint32_t bits = (uint32_t)(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}
__device__ static inline bool is_nan(float x) {
    return (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u;
}
__device__ static inline bool is_some(float x) { /* allowed, that is */
    return __float_as_uint(x) != 0xFF800000u;
}
__device__ static inline float no_logit() {
    return __uint_as_float(0xFF800000u);
}

/* ---- a row as one stage sees it ------------------------------------------------------------------------------------
 */

struct row_view {
    const di_sample_row *row;
    const float *x; /* [n_vocab] */
    const uint32_t *mask, *blacklist;
    const int32_t *forbid;
    int64_t n_vocab;
    int32_t best; /* token */
    double temperature, largest;
    u64 last;
    double min_weight;
};

enum view_kind { RAW, CHANGED /* nothing has fallen yet */, SURVIVORS };

__device__ static row_view view_of(const sample_job &job, int32_t g, view_kind kind) {
    const di_sample_row *row = &job.rows[job.row0 + g];
    const sample_state *state = &job.states[g];
    row_view v = {};
    v.row = row;
    v.x = job.logits + (int64_t)row->logits_row * job.n_vocab;
    if (kind != RAW && row->changed_at >= 0)
        v.x = job.changed + (int64_t)(row->changed_at - job.changed0) * job.n_vocab;
    v.mask = row->mask_at >= 0 ? job.words + row->mask_at : NULL;
    v.blacklist = row->flags & DI_SAMPLE_UNLISTED ? NULL : job.blacklist;
    v.forbid = (const int32_t *)(job.words + row->forbid_at);
    v.n_vocab = job.n_vocab;
    v.temperature = kind == RAW ? 1.0 : row->temperature;
    u64 best = state->best[kind == RAW ? 0 : 1];
    v.best = best ? key_id(best) : -1;
    if (best)
        v.largest = (double)v.x[v.best] / v.temperature;
    if (kind == SURVIVORS) {
        v.last = state->last;
        v.min_weight = row->min_p > 0.0 ? row->min_p * WEIGHT_ONE : 0.0;
    }
    return v;
}

/* Bits 0..3: whether tokens at .. at + 3 are allowed; at is a multiple of 4. */
__device__ static inline uint32_t allowed_four(const row_view &v, int64_t at) {
    uint32_t m = 15;
    if (v.mask)
        m = v.mask[at >> 5] >> (at & 31);
    if (v.blacklist)
        m &= ~(v.blacklist[at >> 5] >> (at & 31));
    for (int32_t i = 0; i < v.row->n_forbid; i++) {
        int64_t d = v.forbid[i] - at;
        if (d >= 0 && d < 4)
            m &= ~(1u << d);
    }
    return m & 15;
}

/* Logits of tokens at .. at + 3 as they are stored; -infinity beyond the vocabulary. */
__device__ static inline void load_four(const float *x, int64_t n_vocab, int64_t at, float out[4]) {
    if (n_vocab % 4 == 0 && at + 4 <= n_vocab) { /* rows begin at multiples of 16 bytes */
        float4 f = *(const float4 *)(x + at);
        out[0] = f.x, out[1] = f.y, out[2] = f.z, out[3] = f.w;
        return;
    }
#pragma unroll
    for (int c = 0; c < 4; c++)
        out[c] = at + c < n_vocab ? x[at + c] : no_logit();
}

/* The same, -infinity for what is not allowed. */
__device__ static inline void load_allowed(const row_view &v, int64_t at, float out[4]) {
    if (at >= v.n_vocab) {
        out[0] = out[1] = out[2] = out[3] = no_logit();
        return;
    }
    load_four(v.x, v.n_vocab, at, out);
    uint32_t m = allowed_four(v, at);
#pragma unroll
    for (int c = 0; c < 4; c++)
        out[c] = m >> c & 1 ? out[c] : no_logit();
}

__device__ static inline double scaled(const row_view &v, float logit) {
    return v.temperature == 1.0 ? (double)logit : (double)logit / v.temperature;
}

__device__ static inline double weight_at(double distance) {
    return distance < LEAST_DISTANCE ? 0.0 : (WEIGHT_ONE * cu_exp(distance) + CU_ROUND_SHIFT) - CU_ROUND_SHIFT;
}

/* Of a token that is allowed. */
__device__ static inline bool survives(const row_view &v, float logit, int64_t id) {
    if (v.last && cu_key(logit, id) < v.last)
        return false;
    return v.min_weight <= 0.0 || weight_at(scaled(v, logit) - v.largest) >= v.min_weight;
}

/* ---- what rows ask for: both the host (by the plan) and the kernels decide by these --------------------------------
 */

__host__ __device__ static inline bool is_scanned(const di_sample_row *r) {
    return r->rule != DI_SAMPLE_GIVEN || (r->flags & DI_SAMPLE_LOGPROBS);
}
/* Whether bias, penalties and filters matter. */
__host__ __device__ static inline bool is_processed(const di_sample_row *r) {
    return r->rule != DI_SAMPLE_GIVEN ||
           (r->flags & (DI_SAMPLE_LOGPROBS | DI_SAMPLE_PROCESSED)) == (DI_SAMPLE_LOGPROBS | DI_SAMPLE_PROCESSED);
}
__host__ __device__ static inline bool is_filtered(const di_sample_row *r) {
    return is_processed(r) && !(r->flags & DI_SAMPLE_GREEDY) && (r->top_p < 1.0 || r->top_k > 0);
}
__host__ __device__ static inline bool has_noise(const di_sample_row *r) {
    return r->rule == DI_SAMPLE_NOISE && !(r->flags & DI_SAMPLE_GREEDY);
}
__host__ __device__ static inline bool is_by_chance(const di_sample_row *r) {
    return r->rule == DI_SAMPLE_DRAW || r->rule == DI_SAMPLE_TEST;
}
__host__ __device__ static inline bool has_top(const di_sample_row *r) {
    return (r->flags & DI_SAMPLE_LOGPROBS) && r->n_top > 0;
}
__device__ static inline bool is_dead(const sample_state *s) {
    return s->is_bad || s->n_allowed == 0;
}
__device__ static inline view_kind logprob_kind(const di_sample_row *r) {
    return r->flags & DI_SAMPLE_PROCESSED ? SURVIVORS : RAW;
}

/* ---- a block's shared results --------------------------------------------------------------------------------------
 */

__device__ static inline u64 warp_max(u64 v) {
    for (int lane = DI_WARP / 2; lane; lane >>= 1) {
        u64 other = __shfl_xor_sync(0xFFFFFFFFu, v, lane);
        v = other > v ? other : v;
    }
    return v;
}
__device__ static inline u64 warp_add(u64 v) {
    for (int lane = DI_WARP / 2; lane; lane >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFFu, v, lane);
    return v;
}

/* Of all threads, in all of them. */
template <bool ADDS> __device__ static u64 block_reduce(u64 v) {
    __shared__ u64 of_warps[SORTERS / DI_WARP];
    int n_warps = (int)blockDim.x / DI_WARP;
    v = ADDS ? warp_add(v) : warp_max(v);
    __syncthreads();
    if (threadIdx.x % DI_WARP == 0)
        of_warps[threadIdx.x / DI_WARP] = v;
    __syncthreads();
    u64 all = of_warps[0];
    for (int i = 1; i < n_warps; i++)
        all = ADDS ? all + of_warps[i] : of_warps[i] > all ? of_warps[i] : all;
    return all;
}

/* Sum over this thread and those before it; *all: over all. */
__device__ static u64 block_scan(u64 v, u64 *all) {
    __shared__ u64 of_warps[SORTERS / DI_WARP];
    int n_warps = (int)blockDim.x / DI_WARP, lane = (int)threadIdx.x % DI_WARP, warp = (int)threadIdx.x / DI_WARP;
    for (int n = 1; n < DI_WARP; n <<= 1) {
        u64 left = __shfl_up_sync(0xFFFFFFFFu, v, n);
        v += lane >= n ? left : 0;
    }
    __syncthreads();
    if (lane == DI_WARP - 1)
        of_warps[warp] = v;
    __syncthreads();
    u64 before = 0;
    *all = 0;
    for (int i = 0; i < n_warps; i++) {
        before += i < warp ? of_warps[i] : 0;
        *all += of_warps[i];
    }
    return before + v;
}

/* The sum of a row's runs in rising order, in all threads. */
__device__ static double runs_sum(const double *runs, int32_t n) {
    __shared__ double some[THREADS];
    __shared__ double sum;
    __syncthreads();
    if (threadIdx.x == 0)
        sum = 0.0;
    for (int32_t at = 0; at < n; at += THREADS) {
        int32_t count = n - at < THREADS ? n - at : THREADS;
        __syncthreads();
        if ((int32_t)threadIdx.x < count)
            some[threadIdx.x] = runs[at + (int32_t)threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) {
            double s = sum;
            for (int32_t i = 0; i < count; i++)
                s += some[i];
            sum = s;
        }
    }
    __syncthreads();
    return sum;
}

/* ---- scan and head -------------------------------------------------------------------------------------------------
 */

/* Token of a thread's f-th four in a run. */
__device__ static inline int64_t four_at(int32_t run, int f) {
    return (int64_t)run * RUN + f * (4 * THREADS) + 4 * (int64_t)threadIdx.x;
}

/* KIND RAW: everything, with a copy of rows that will be changed. CHANGED: the best of the changed ones. */
template <view_kind KIND> __global__ void __launch_bounds__(THREADS) scan_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.y;
    const di_sample_row *row = &job.rows[job.row0 + g];
    bool is_changed = is_processed(row) && row->changed_at >= 0;
    if (!is_scanned(row) || (KIND == CHANGED && !is_changed))
        return;
    row_view v = {};
    v.row = row;
    v.x = job.logits + (int64_t)row->logits_row * job.n_vocab;
    float *copy = is_changed ? job.changed + (int64_t)(row->changed_at - job.changed0) * job.n_vocab : NULL;
    if (KIND == CHANGED)
        v.x = copy;
    v.mask = row->mask_at >= 0 ? job.words + row->mask_at : NULL;
    v.blacklist = row->flags & DI_SAMPLE_UNLISTED ? NULL : job.blacklist;
    v.forbid = (const int32_t *)(job.words + row->forbid_at);
    u64 best = 0, n_allowed = 0, n_bad = 0;
    for (int32_t run = (int32_t)blockIdx.x; run < job.n_runs; run += (int32_t)gridDim.x) {
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            int64_t at = four_at(run, f);
            if (at >= job.n_vocab)
                continue;
            float x[4];
            load_four(v.x, job.n_vocab, at, x);
            uint32_t m = allowed_four(v, at);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (at + c >= job.n_vocab)
                    break;
                if (KIND == RAW && copy)
                    copy[at + c] = x[c];
                n_bad += is_nan(x[c]);
                if (!(m >> c & 1) || !is_some(x[c]) || is_nan(x[c]))
                    continue;
                u64 key = cu_key(x[c], at + c);
                best = key > best ? key : best;
                n_allowed++;
            }
        }
    }
    best = block_reduce<false>(best);
    n_allowed = block_reduce<true>(n_allowed);
    n_bad = block_reduce<true>(n_bad);
    if (threadIdx.x == 0)
        job.parts[(int64_t)g * job.n_parts + blockIdx.x] = scan_part{best, (int32_t)n_allowed, n_bad > 0};
}

__device__ static inline bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u;
}
__device__ static inline float cut(float x) {
    x = x > FLT_MAX ? FLT_MAX : x;
    return x < -FLT_MAX ? -FLT_MAX : x;
}

__device__ static inline float penalised(float logit, const di_sample_row *r, bool is_in_prompt, int64_t n_output) {
    if (!is_finite(logit))
        return logit;
    float x = logit;
    if (r->repetition != 1.0f && (is_in_prompt || n_output > 0))
        x = x > 0.0f ? __fdiv_rn(x, r->repetition) : __fmul_rn(x, r->repetition);
    if (n_output > 0) {
        x = __fsub_rn(x, __fmul_rn(r->frequency, (float)n_output));
        x = __fsub_rn(x, r->presence);
    }
    return cut(x);
}

__device__ static void change(const sample_job &job, const di_sample_row *r, float *x) {
    const uint32_t ids = 0x7FFFFFFFu;
    const uint32_t *bias = job.words + r->bias_at, *history = job.words + r->history_at,
                   *drafts = job.words + r->drafts_at;
    for (int32_t i = (int32_t)threadIdx.x; i < r->n_bias; i += THREADS) {
        uint32_t id = bias[2 * i];
        if (i > 0 && bias[2 * i - 2] == id)
            continue; /* the first one of an id takes all */
        float y = x[id];
        for (int32_t j = i; j < r->n_bias && bias[2 * j] == id; j++) {
            float b = __uint_as_float(bias[2 * j + 1]);
            b = b < 100.0f ? b : 100.0f;
            b = b > -100.0f ? b : -100.0f;
            if (is_finite(y))
                y = cut(__fadd_rn(y, b));
        }
        x[id] = y;
    }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < r->n_history; i += THREADS) {
        uint32_t id = history[2 * i] & ids;
        int64_t n = (int32_t)history[2 * i + 1];
        for (int32_t j = 0; j < r->n_drafts; j++)
            n += (drafts[j] & ids) == id;
        x[id] = penalised(x[id], r, history[2 * i] >> 31, n);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < r->n_drafts; i += THREADS) {
        bool is_done = drafts[i] >> 31;
        int64_t n = 0;
        for (int32_t j = 0; j < r->n_drafts; j++) {
            is_done |= j < i && drafts[j] == drafts[i];
            n += drafts[j] == drafts[i];
        }
        if (!is_done)
            x[drafts[i]] = penalised(x[drafts[i]], r, false, n);
    }
}

template <view_kind KIND> __global__ void __launch_bounds__(THREADS) head_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.x;
    const di_sample_row *row = &job.rows[job.row0 + g];
    sample_state *state = &job.states[g];
    bool is_changed = is_processed(row) && row->changed_at >= 0;
    if (KIND == CHANGED && (!is_changed || is_dead(state)))
        return;
    u64 best = 0, n_allowed = 0, n_bad = 0;
    if (is_scanned(row)) {
        for (int32_t i = (int32_t)threadIdx.x; i < job.n_parts; i += THREADS) {
            scan_part part = job.parts[(int64_t)g * job.n_parts + i];
            best = part.best > best ? part.best : best;
            n_allowed += (u64)part.n_allowed;
            n_bad += (u64)part.is_bad;
        }
    }
    best = block_reduce<false>(best);
    n_allowed = block_reduce<true>(n_allowed);
    n_bad = block_reduce<true>(n_bad);
    bool is_bad = n_bad || (best && !is_finite(key_logit(best)));
    if (KIND == RAW) {
        for (int i = (int)threadIdx.x; i < SLICES; i += THREADS) {
            for (int s = 0; s < 2; s++) {
                job.mass[((int64_t)s * job.n_rows + g) * SLICES + i] = 0;
                job.count[((int64_t)s * job.n_rows + g) * SLICES + i] = 0;
            }
        }
        if (is_changed && !is_bad && n_allowed)
            change(job, row, job.changed + (int64_t)(row->changed_at - job.changed0) * job.n_vocab);
    }
    if (threadIdx.x != 0)
        return;
    if (KIND == RAW) {
        sample_state s = {};
        s.best[0] = s.best[1] = best;
        s.n_allowed = (int32_t)n_allowed;
        s.is_bad = is_bad;
        *state = s;
    } else {
        state->best[1] = best;
    }
    if (has_noise(row) && best && !is_bad && (KIND == CHANGED || !is_changed)) {
        int32_t id = key_id(best);
        const float *x = is_changed ? job.changed + (int64_t)(row->changed_at - job.changed0) * job.n_vocab
                                    : job.logits + (int64_t)row->logits_row * job.n_vocab;
        state->score =
            (double)x[id] / row->temperature + cu_gumbel(cu_noise_bits(row->seed, row->position, (u64)(uint32_t)id));
    }
}

/* ---- slices and selection ------------------------------------------------------------------------------------------
 */

enum search { LAST, TOP };

/* Falling logits give rising slices; the last one has the rest. */
struct slicing {
    float largest, per_logit;
};
__device__ static inline slicing slicing_of(const row_view &v, bool has_weights) {
    return slicing{v.x[v.best], has_weights ? (float)(8.0 / v.temperature) : 8.0f};
}
__device__ static inline int slice_of(const slicing &z, float logit) {
    float at = (z.largest - logit) * z.per_logit;
    return (int)(at < SLICES - 1 ? at : SLICES - 1);
}

template <search WHICH> __device__ static inline bool is_searched(const di_sample_row *row, const sample_state *s) {
    if (is_dead(s))
        return false;
    if (WHICH == TOP)
        return has_top(row);
    return is_filtered(row) && (row->top_p < 1.0 || row->top_k < s->n_allowed);
}
template <search WHICH> __device__ static inline view_kind searched_kind(const di_sample_row *row) {
    return WHICH == TOP ? logprob_kind(row) : CHANGED;
}

template <search WHICH> __global__ void __launch_bounds__(THREADS) slices_kernel(sample_job job) {
    __shared__ u64 mass[SLICES];
    __shared__ uint32_t count[SLICES];
    int32_t g = (int32_t)blockIdx.y;
    const di_sample_row *row = &job.rows[job.row0 + g];
    if (!is_searched<WHICH>(row, &job.states[g]))
        return;
    row_view v = view_of(job, g, searched_kind<WHICH>(row));
    bool has_weights = WHICH == LAST && row->top_p < 1.0;
    slicing z = slicing_of(v, has_weights);
    for (int i = (int)threadIdx.x; i < SLICES; i += THREADS) {
        mass[i] = 0;
        count[i] = 0;
    }
    __syncthreads();
    for (int32_t run = (int32_t)blockIdx.x; run < job.n_runs; run += (int32_t)gridDim.x) {
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            int64_t at = four_at(run, f);
            float x[4];
            load_allowed(v, at, x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (!is_some(x[c]) || !survives(v, x[c], at + c))
                    continue;
                int slice = slice_of(z, x[c]);
                atomicAdd(&count[slice], 1u);
                if (has_weights) {
                    u64 w = (u64)weight_at(scaled(v, x[c]) - v.largest);
                    if (w)
                        atomicAdd(&mass[slice], w);
                }
            }
        }
    }
    __syncthreads();
    int64_t to = ((int64_t)WHICH * job.n_rows + g) * SLICES;
    for (int i = (int)threadIdx.x; i < SLICES; i += THREADS) {
        if (count[i])
            atomicAdd(&job.count[to + i], (u64)count[i]);
        if (mass[i])
            atomicAdd(&job.mass[to + i], mass[i]);
    }
}

/* Falling order of a list [LIST] of n keys, by all threads. */
__device__ static void sort_falling(u64 *keys, int n_keys) {
    int n = 2;
    while (n < n_keys)
        n *= 2;
    for (int i = n_keys + (int)threadIdx.x; i < n; i += SORTERS)
        keys[i] = 0;
    for (int size = 2; size <= n; size <<= 1) {
        for (int stride = size >> 1; stride > 0; stride >>= 1) {
            __syncthreads();
            for (int i = (int)threadIdx.x; i < n / 2; i += SORTERS) {
                int a = i / stride * (2 * stride) + i % stride, b = a + stride;
                u64 x = keys[a], y = keys[b];
                if ((x < y) == !(a & size)) {
                    keys[a] = y;
                    keys[b] = x;
                }
            }
        }
    }
    __syncthreads();
}

/* Calls f(key, logit) for every token of the row that is searched. */
template <class F> __device__ static inline void each_searched(const row_view &v, F f) {
    for (int64_t at = 4 * (int64_t)threadIdx.x; at < v.n_vocab; at += 4 * SORTERS) {
        float x[4];
        load_allowed(v, at, x);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (is_some(x[c]) && survives(v, x[c], at + c))
                f(cu_key(x[c], at + c), x[c]);
        }
    }
}

/* The first place in falling order at which a limit is reached: so many keys, or more than so much weight. */
struct limits {
    u64 n_max;
    double weight_max;
    u64 n_before, weight_before; /* that lie before the places at hand */
};

/* The first thread whose count and weight, with those of the threads before it, reach a limit, which then holds what
 * lies before that thread; blockDim.x when none does. */
__device__ static int first_beyond(limits *l, u64 n, u64 weight) {
    __shared__ int first;
    __shared__ u64 n_there, weight_there;
    u64 all;
    u64 n_through = block_scan(n, &all), weight_through = block_scan(weight, &all);
    if (threadIdx.x == 0)
        first = (int)blockDim.x;
    __syncthreads();
    if (l->n_before + n_through >= l->n_max || (double)(l->weight_before + weight_through) > l->weight_max)
        atomicMin(&first, (int)threadIdx.x);
    __syncthreads();
    if ((int)threadIdx.x == first) {
        n_there = n_through - n;
        weight_there = weight_through - weight;
    }
    __syncthreads();
    int found = first;
    if (found < (int)blockDim.x) {
        l->n_before += n_there;
        l->weight_before += weight_there;
    }
    __syncthreads();
    return found;
}

/* Appends the key to a list in shared memory that has room for it. */
__device__ static inline void keep(u64 *list, int *n, u64 key) {
    list[atomicAdd(n, 1)] = key;
}

/* Where the search by slices leaves too many: one digit of the key at a time, over the whole row, until no more than
 * LIST keys have these digits. Returns the digits; *shift: how many bits are below them. */
__device__ static u64 digits_of(const row_view &v, bool has_weights, limits *l, int *shift) {
    __shared__ u64 count[256], mass[256];
    u64 prefix = 0;
    for (*shift = 56;; *shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256)
            count[threadIdx.x] = mass[threadIdx.x] = 0;
        __syncthreads();
        each_searched(v, [&](u64 key, float logit) {
            if (*shift < 56 && key >> (*shift + 8) != prefix)
                return;
            int digit = 255 - (int)(key >> *shift & 255);
            atomicAdd(&count[digit], (u64)1);
            if (has_weights)
                atomicAdd(&mass[digit], (u64)weight_at(scaled(v, logit) - v.largest));
        });
        __syncthreads();
        int at = (int)threadIdx.x;
        int digit = first_beyond(l, at < 256 ? count[at] : 0, at < 256 ? mass[at] : 0);
        prefix = prefix << 8 | (u64)(255 - digit);
        if (*shift == 0 || count[digit] <= LIST)
            return prefix;
    }
}

/* Keys in falling order from list [LIST], of which n are there: the place at which a limit is reached. */
__device__ static int place_of(const row_view &v, bool has_weights, limits *l, const u64 *list, int n) {
    for (int at = 0;; at += SORTERS) {
        int i = at + (int)threadIdx.x;
        u64 weight = i < n && has_weights ? (u64)weight_at(scaled(v, key_logit(list[i])) - v.largest) : 0;
        u64 all_n, all_weight;
        limits before = *l;
        int found = first_beyond(l, i < n ? 1 : 0, weight);
        if (found < SORTERS || at + SORTERS >= n)
            return found < SORTERS ? at + found : n - 1;
        *l = before;
        (void)block_scan(i < n ? 1 : 0, &all_n);
        (void)block_scan(weight, &all_weight);
        l->n_before += all_n;
        l->weight_before += all_weight;
    }
}

template <search WHICH> __global__ void __launch_bounds__(SORTERS) select_kernel(sample_job job) {
    __shared__ u64 list[LIST];
    __shared__ int n_list;
    int32_t g = (int32_t)blockIdx.x;
    const di_sample_row *row = &job.rows[job.row0 + g];
    sample_state *state = &job.states[g];
    if (!is_searched<WHICH>(row, state))
        return;
    row_view v = view_of(job, g, searched_kind<WHICH>(row));
    bool has_weights = WHICH == LAST && row->top_p < 1.0;
    int64_t from = ((int64_t)WHICH * job.n_rows + g) * SLICES;
    int t = (int)threadIdx.x;
    u64 count = t < SLICES ? job.count[from + t] : 0, mass = t < SLICES ? job.mass[from + t] : 0;
    u64 n_all = block_reduce<true>(count), all_mass = block_reduce<true>(mass);
    limits l = {};
    l.weight_max = has_weights ? row->top_p * (double)all_mass : (double)__uint_as_float(0x7F800000u);
    if (WHICH == TOP)
        l.n_max = (u64)row->n_top;
    else
        l.n_max = row->top_k > 0 && row->top_k < state->n_allowed ? (u64)row->top_k : ~(u64)0;
    limits whole = l;
    int slice = first_beyond(&l, count, mass);
    bool is_everything = slice == SORTERS; /* no limit is reached */
    if (WHICH == LAST && is_everything)
        return; /* the state says so already */
    /* What is sorted: the slice; of a list of the best all slices up to it. */
    __shared__ u64 n_sorted;
    if (t == 0)
        n_sorted = n_all, n_list = 0;
    __syncthreads();
    if (t == slice)
        n_sorted = WHICH == TOP ? l.n_before + count : count;
    __syncthreads();
    bool is_bound_only = false;
    if (n_sorted <= LIST) {
        slicing z = slicing_of(v, has_weights);
        each_searched(v, [&](u64 key, float logit) {
            int s = slice_of(z, logit);
            if (WHICH == TOP ? s <= slice : s == slice)
                keep(list, &n_list, key);
        });
    } else {
        l = whole;
        int shift;
        u64 digits = digits_of(v, has_weights, &l, &shift);
        /* Of a list of the best, too, these keys come first: the last of those that are wanted is the bound of all. */
        each_searched(v, [&](u64 key, float logit) {
            (void)logit;
            if (key >> shift == digits)
                keep(list, &n_list, key);
        });
        is_bound_only = true;
    }
    __syncthreads();
    int n = n_list;
    sort_falling(list, n);
    if (WHICH == LAST) {
        int place = place_of(v, has_weights, &l, list, n);
        if (t == 0)
            state->last = list[place];
        return;
    }
    if (is_bound_only) {
        u64 bound = list[place_of(v, false, &l, list, n)];
        __syncthreads();
        if (t == 0)
            n_list = 0;
        __syncthreads();
        each_searched(v, [&](u64 key, float logit) {
            (void)logit;
            if (key >= bound)
                keep(list, &n_list, key);
        });
        __syncthreads();
        n = n_list;
        sort_falling(list, n);
    }
    u64 *out = (u64 *)(job.top + row->top_at); /* finish makes entries of them */
    for (int i = t; i < row->n_top; i += SORTERS)
        out[i] = i < n ? list[i] : 0;
}

/* ---- by noise ------------------------------------------------------------------------------------------------------
 */

__device__ static inline bool wins(double score, int64_t id, double than, int64_t than_id) {
    return score > than || (score == than && id < than_id);
}

/* Of the threads' tokens, in all of them. */
__device__ static win_part block_winner(win_part w) {
    __shared__ win_part of_warps[THREADS / DI_WARP];
    for (int lane = DI_WARP / 2; lane; lane >>= 1) {
        double score = __shfl_xor_sync(0xFFFFFFFFu, w.score, lane);
        int64_t id = (int64_t)__shfl_xor_sync(0xFFFFFFFFu, (long long)w.id, lane);
        if (wins(score, id, w.score, w.id))
            w = win_part{score, id};
    }
    if (threadIdx.x % DI_WARP == 0)
        of_warps[threadIdx.x / DI_WARP] = w;
    __syncthreads();
    w = of_warps[0];
    for (int i = 1; i < THREADS / DI_WARP; i++)
        w = wins(of_warps[i].score, of_warps[i].id, w.score, w.id) ? of_warps[i] : w;
    return w;
}

/* The best of each block's tokens. Most are passed over: with c leading ones in z, g <= (c+1)*log(2), and x is known
 * well enough from a product. */
__global__ void __launch_bounds__(THREADS) draw_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.y;
    const di_sample_row *row = &job.rows[job.row0 + g];
    const sample_state *state = &job.states[g];
    if (!has_noise(row) || is_dead(state))
        return;
    row_view v = view_of(job, g, SURVIVORS);
    double inverse = 1.0 / v.temperature, score = state->score;
    int64_t winner = v.best;
    for (int32_t run = (int32_t)blockIdx.x; run < job.n_runs; run += (int32_t)gridDim.x) {
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            int64_t at = four_at(run, f);
            float x[4];
            load_allowed(v, at, x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (!is_some(x[c]) || at + c == v.best)
                    continue;
                u64 z = cu_noise_bits(row->seed, row->position, (u64)(at + c));
                double bound = (double)(__clzll((long long)~z) + 1) * 0.69315;
                double about = (double)x[c] * inverse;
                double margin = (fabs(about) + fabs(score) + 64.0) * 4e-15;
                if ((about + bound) + margin < score || !survives(v, x[c], at + c))
                    continue;
                double candidate = scaled(v, x[c]) + cu_gumbel(z);
                if (wins(candidate, at + c, score, winner)) {
                    score = candidate;
                    winner = at + c;
                }
            }
        }
    }
    win_part best = block_winner(win_part{score, winner});
    if (threadIdx.x == 0)
        job.wins[(int64_t)g * job.n_parts + blockIdx.x] = best;
}

/* ---- sums ----------------------------------------------------------------------------------------------------------
 */

enum sum_of { LOGPROBS, CHANCES };

/* Where the token survives: logit/temperature less the largest; else -infinity. */
__device__ static inline double distance_of(const row_view &v, bool is_single, float logit, int64_t id) {
    bool is_in = is_some(logit) && (is_single ? id == v.best : survives(v, logit, id));
    return is_in ? scaled(v, logit) - v.largest : (double)no_logit();
}

__device__ static inline bool is_summed(sum_of which, const di_sample_row *row, const sample_state *s) {
    return !is_dead(s) && (which == LOGPROBS ? (row->flags & DI_SAMPLE_LOGPROBS) != 0 : is_by_chance(row));
}

/* Every run as a tree of halves: 512 apart in a thread, 256 and 128 apart between warps, 64 to 4 between the lanes of
 * one, 2 and 1 among a thread's four. */
template <sum_of WHICH> __global__ void __launch_bounds__(THREADS) sum_kernel(sample_job job) {
    static_assert(FOURS == 2, "the tree's first step");
    __shared__ double parts[4][THREADS];
    int32_t g = (int32_t)blockIdx.y;
    const di_sample_row *row = &job.rows[job.row0 + g];
    if (!is_summed(WHICH, row, &job.states[g]))
        return;
    row_view v = view_of(job, g, WHICH == LOGPROBS ? logprob_kind(row) : SURVIVORS);
    bool is_single = WHICH == CHANCES && (row->flags & DI_SAMPLE_GREEDY);
    int t = (int)threadIdx.x;
    for (int32_t run = (int32_t)blockIdx.x; run < job.n_runs; run += (int32_t)gridDim.x) {
        float x[FOURS][4];
        for (int f = 0; f < FOURS; f++)
            load_allowed(v, four_at(run, f), x[f]);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 4; c++)
            parts[c][t] = cu_exp(distance_of(v, is_single, x[0][c], four_at(run, 0) + c)) +
                          cu_exp(distance_of(v, is_single, x[1][c], four_at(run, 1) + c));
        __syncthreads();
        if (t >= DI_WARP)
            continue;
        double s[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            s[c] = (parts[c][t] + parts[c][t + 64]) + (parts[c][t + 32] + parts[c][t + 96]);
            for (int lane = DI_WARP / 2; lane; lane >>= 1)
                s[c] += __shfl_xor_sync(0xFFFFFFFFu, s[c], lane);
        }
        if (t == 0)
            job.sums[((int64_t)WHICH * job.n_rows + g) * job.n_runs + run] = (s[0] + s[2]) + (s[1] + s[3]);
    }
}

/* ---- by rejection ---------------------------------------------------------------------------------------------------
 */

struct chances {
    float inverse, log_sum;
};

__device__ static inline chances chances_of(const sample_job &job, int32_t g) {
    double sum = runs_sum(job.sums + ((int64_t)CHANCES * job.n_rows + g) * job.n_runs, job.n_runs);
    return chances{(float)(1.0 / sum), (float)cu_ln(sum)};
}

/* What a token weighs in the draw. */
__device__ static inline float weight_of(const di_sample_row *row, float p, int64_t id) {
    if (row->rule != DI_SAMPLE_TEST)
        return p;
    float left = __fsub_rn(p, cu_expf(__fsub_rn(row->ln_q[id], PENALTY)));
    return left > 0.0f ? left : 0.0f;
}

__global__ void __launch_bounds__(THREADS) dist_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.y;
    const di_sample_row *row = &job.rows[job.row0 + g];
    sample_state *state = &job.states[g];
    if (!is_summed(CHANCES, row, state))
        return;
    row_view v = view_of(job, g, SURVIVORS);
    bool is_single = row->flags & DI_SAMPLE_GREEDY;
    chances k = chances_of(job, g);
    u64 p_best = 0;
    for (int32_t run = (int32_t)blockIdx.x; run < job.n_runs; run += (int32_t)gridDim.x) {
        u64 units = 0;
        for (int f = 0; f < FOURS; f++) {
            int64_t at = four_at(run, f);
            float x[4];
            load_allowed(v, at, x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (at + c >= job.n_vocab)
                    break;
                double distance = distance_of(v, is_single, x[c], at + c);
                float p = __fmul_rn((float)cu_exp(distance), k.inverse);
                if (row->ln_p)
                    row->ln_p[at + c] = __fsub_rn((float)distance, k.log_sum);
                units += cu_units(weight_of(row, p, at + c));
                u64 key = (u64)__float_as_uint(p) << 32 | (uint32_t) ~(uint32_t)(at + c);
                p_best = key > p_best ? key : p_best;
            }
        }
        units = block_reduce<true>(units);
        if (threadIdx.x == 0)
            job.weights[(int64_t)g * job.n_runs + run] = units;
    }
    p_best = block_reduce<false>(p_best);
    if (threadIdx.x == 0)
        atomicMax(&state->p_best, p_best);
}

__device__ static inline float p_of(const row_view &v, bool is_single, const chances &k, int64_t id) {
    float x[4];
    load_allowed(v, id & ~(int64_t)3, x);
    float logit = id & 2 ? (id & 1 ? x[3] : x[2]) : (id & 1 ? x[1] : x[0]);
    return __fmul_rn((float)cu_exp(distance_of(v, is_single, logit, id)), k.inverse);
}

/* Units of the thread's f-th four in a run, which is the order of ids over threads. */
__device__ static inline void units_of_four(const row_view &v, bool is_single, const chances &k, int64_t at,
                                            u64 out[4]) {
    float x[4];
    load_allowed(v, at, x);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        out[c] = 0;
        if (at + c < v.n_vocab)
            out[c] = cu_units(
                weight_of(v.row, __fmul_rn((float)cu_exp(distance_of(v, is_single, x[c], at + c)), k.inverse), at + c));
    }
}

/* The first token of the run whose cumulated units, `before` those of the runs before it, exceed the mark; -1: none. */
__device__ static int32_t pick_in_run(const row_view &v, bool is_single, const chances &k, int32_t run, u64 before,
                                      double mark) {
    for (int f = 0; f < FOURS; f++) {
        u64 units[4], all;
        int64_t at = four_at(run, f);
        units_of_four(v, is_single, k, at, units);
        u64 own = units[0] + units[1] + units[2] + units[3];
        u64 sum = before + block_scan(own, &all) - own;
        u64 found = 0; /* the id from above: the largest is the first */
        for (int c = 0; c < 4; c++) {
            sum += units[c];
            if (!found && units[c] && (double)sum > mark)
                found = ~(u64)(at + c);
        }
        found = block_reduce<false>(found);
        if (found)
            return (int32_t)~found;
        before += all;
    }
    return -1;
}

__device__ static int32_t last_with_units(const row_view &v, bool is_single, const chances &k, int32_t n_runs) {
    for (int32_t run = n_runs - 1; run >= 0; run--) {
        u64 last = 0;
        for (int f = 0; f < FOURS; f++) {
            u64 units[4];
            units_of_four(v, is_single, k, four_at(run, f), units);
            for (int c = 0; c < 4; c++)
                last = units[c] ? (u64)(four_at(run, f) + c + 1) : last;
        }
        last = block_reduce<false>(last);
        if (last)
            return (int32_t)last - 1;
    }
    return -1;
}

__global__ void __launch_bounds__(THREADS) pick_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.x;
    const di_sample_row *row = &job.rows[job.row0 + g];
    sample_state *state = &job.states[g];
    if (!is_summed(CHANCES, row, state))
        return;
    row_view v = view_of(job, g, SURVIVORS);
    bool is_single = row->flags & DI_SAMPLE_GREEDY, is_test = row->rule == DI_SAMPLE_TEST;
    chances k = chances_of(job, g);
    const u64 *weights = job.weights + (int64_t)g * job.n_runs;
    u64 total = 0;
    for (int32_t at = 0; at < job.n_runs; at += THREADS) {
        int32_t run = at + (int32_t)threadIdx.x;
        total += block_reduce<true>(run < job.n_runs ? weights[run] : 0);
    }
    if (threadIdx.x == 0)
        state->distance = is_test ? (float)((double)total / UNIT) : 0.0f;
    if (is_test) {
        float p = p_of(v, is_single, k, row->token);
        bool holds = false;
        if (p > 0.0f) {
            float above = __fsub_rn((float)cu_ln((double)p), row->ln_q[row->token]);
            float chance = above >= 0.0f ? 1.0f : cu_expf(above);
            holds = chance > (float)row->u_test;
        }
        if (holds) {
            if (threadIdx.x == 0)
                state->token = row->token;
            return;
        }
        if (total == 0) {
            if (threadIdx.x == 0)
                state->token = key_id(state->p_best);
            return;
        }
    }
    double mark = row->u * (double)total;
    u64 before = 0;
    int32_t token = -1;
    for (int32_t at = 0; at < job.n_runs && token < 0; at += THREADS) {
        int32_t run = at + (int32_t)threadIdx.x;
        u64 own = run < job.n_runs ? weights[run] : 0, all;
        u64 through = before + block_scan(own, &all);
        u64 found = own && (double)through > mark ? ~(u64)run : 0;
        found = block_reduce<false>(found);
        if (found) {
            __shared__ u64 before_found;
            if ((u64)run == ~found)
                before_found = through - own;
            __syncthreads();
            token = pick_in_run(v, is_single, k, (int32_t)~found, before_found, mark);
            break;
        }
        before += all;
    }
    if (token < 0) /* rounding has put the mark at the total */
        token = last_with_units(v, is_single, k, job.n_runs);
    if (threadIdx.x == 0)
        state->token = token;
}

/* ---- results
 * ---------------------------------------------------------------------------------------------------------
 */

__device__ static int32_t token_of(const sample_job &job, int32_t g, const di_sample_row *row) {
    const sample_state *state = &job.states[g];
    if (row->rule == DI_SAMPLE_GIVEN)
        return row->token;
    if (is_dead(state))
        return 0;
    if (is_by_chance(row))
        return state->token;
    win_part w = {state->score, key_id(state->best[1])};
    if (!has_noise(row))
        return (int32_t)w.id;
    for (int32_t i = (int32_t)threadIdx.x; i < job.n_parts; i += THREADS) {
        win_part other = job.wins[(int64_t)g * job.n_parts + i];
        w = wins(other.score, other.id, w.score, w.id) ? other : w;
    }
    return (int32_t)block_winner(w).id;
}

__global__ void __launch_bounds__(THREADS) finish_kernel(sample_job job) {
    int32_t g = (int32_t)blockIdx.x;
    const di_sample_row *row = &job.rows[job.row0 + g];
    const sample_state *state = &job.states[g];
    bool is_given = row->rule == DI_SAMPLE_GIVEN, has_logprobs = row->flags & DI_SAMPLE_LOGPROBS;
    int32_t status = DI_SAMPLE_OK;
    if (is_scanned(row) && state->is_bad)
        status = DI_SAMPLE_NOT_FINITE;
    else if (is_scanned(row) && state->n_allowed == 0 && !is_given)
        status = DI_SAMPLE_NOTHING_ALLOWED;
    double log_sum = 0.0;
    bool has_chances = has_logprobs && !is_dead(state);
    row_view v = {};
    if (has_chances) { /* the same in all threads */
        v = view_of(job, g, logprob_kind(row));
        log_sum = cu_ln(runs_sum(job.sums + ((int64_t)LOGPROBS * job.n_rows + g) * job.n_runs, job.n_runs));
    }
    if (status == DI_SAMPLE_OK && has_top(row)) {
        for (int32_t i = (int32_t)threadIdx.x; i < row->n_top; i += THREADS) {
            di_sample_top *entry = job.top + row->top_at + i;
            u64 key = has_chances ? *(u64 *)entry : 0;
            *entry = key ? di_sample_top{key_id(key), (float)((scaled(v, key_logit(key)) - v.largest) - log_sum)}
                         : di_sample_top{-1, FLOOR};
        }
    }
    di_sample_result result = {};
    result.status = status;
    result.token = status == DI_SAMPLE_OK ? token_of(job, g, row) : 0;
    if (threadIdx.x != 0)
        return;
    if (is_by_chance(row) && status == DI_SAMPLE_OK)
        result.distance = state->distance;
    if (has_logprobs && status == DI_SAMPLE_OK) {
        result.logprob = FLOOR;
        if (has_chances && result.token >= 0 && result.token < job.n_vocab) {
            float x[4];
            load_allowed(v, result.token & ~3, x);
            float logit = x[result.token & 3];
            if (is_some(logit) && survives(v, logit, result.token))
                result.logprob = (float)((scaled(v, logit) - v.largest) - log_sum);
        }
    }
    job.results[job.row0 + g] = result;
    if (job.tokens)
        job.tokens[job.row0 + g] = result.token;
}

/* ---- host
 * ------------------------------------------------------------------------------------------------------------
 */

static int32_t group_rows(const di_limits *limits) {
    return (int32_t)DI_MAX(DI_MIN(limits->logits_max, (int64_t)ROWS_MAX), (int64_t)1);
}

/* Cuts scratch memory for groups of n rows; returns its size. */
static size_t lay_out(sample_job *job, uint8_t *memory, int64_t n, int64_t n_vocab) {
    size_t rows = (size_t)n, runs = (size_t)((n_vocab + RUN - 1) / RUN), changed = DI_MIN(rows, (size_t)CHANGED_MAX);
    uint8_t *at = memory;
    job->states = (sample_state *)di_cuda_take(&at, rows * sizeof *job->states);
    job->parts = (scan_part *)di_cuda_take(&at, rows * runs * sizeof *job->parts);
    job->wins = (win_part *)di_cuda_take(&at, rows * runs * sizeof *job->wins);
    job->sums = (double *)di_cuda_take(&at, 2 * rows * runs * sizeof *job->sums);
    job->weights = (u64 *)di_cuda_take(&at, rows * runs * sizeof *job->weights);
    job->mass = (u64 *)di_cuda_take(&at, 2 * rows * SLICES * sizeof *job->mass);
    job->count = (u64 *)di_cuda_take(&at, 2 * rows * SLICES * sizeof *job->count);
    job->changed = (float *)di_cuda_take(&at, changed * (size_t)n_vocab * sizeof *job->changed);
    return (size_t)(at - memory);
}

size_t di_cuda_need_sample(const di_device *dev, const di_limits *limits) {
    (void)dev;
    sample_job job;
    if (limits->n_vocab < 1 || limits->logits_max < 1)
        return 0;
    return lay_out(&job, NULL, group_rows(limits), limits->n_vocab);
}

/* What the rows of a group ask for together. */
struct group_needs {
    bool scans, changes, filters, noise, chances, logprobs, top;
};

static group_needs needs_of(const di_sample_row *rows, int32_t n) {
    group_needs needs = {};
    for (int32_t i = 0; i < n; i++) {
        const di_sample_row *r = &rows[i];
        needs.scans |= is_scanned(r);
        needs.changes |= is_processed(r) && r->changed_at >= 0;
        needs.filters |= is_filtered(r);
        needs.noise |= has_noise(r);
        needs.chances |= is_by_chance(r);
        needs.logprobs |= (r->flags & DI_SAMPLE_LOGPROBS) != 0;
        needs.top |= has_top(r);
    }
    return needs;
}

static void run_group(di_stream *stream, const sample_job &job, const group_needs &needs) {
    dim3 parts((unsigned)job.n_parts, (unsigned)job.n_rows), rows((unsigned)job.n_rows);
    cudaStream_t s = stream->stream;
    if (needs.scans)
        DI_LAUNCH((scan_kernel<RAW>), parts, THREADS, 0, s, job);
    DI_LAUNCH((head_kernel<RAW>), rows, THREADS, 0, s, job);
    if (needs.changes) {
        DI_LAUNCH((scan_kernel<CHANGED>), parts, THREADS, 0, s, job);
        DI_LAUNCH((head_kernel<CHANGED>), rows, THREADS, 0, s, job);
    }
    if (needs.filters) {
        DI_LAUNCH((slices_kernel<LAST>), parts, THREADS, 0, s, job);
        DI_LAUNCH((select_kernel<LAST>), rows, SORTERS, 0, s, job);
    }
    if (needs.noise)
        DI_LAUNCH((draw_kernel), parts, THREADS, 0, s, job);
    if (needs.chances) {
        DI_LAUNCH((sum_kernel<CHANCES>), parts, THREADS, 0, s, job);
        DI_LAUNCH((dist_kernel), parts, THREADS, 0, s, job);
        DI_LAUNCH((pick_kernel), rows, THREADS, 0, s, job);
    }
    if (needs.logprobs)
        DI_LAUNCH((sum_kernel<LOGPROBS>), parts, THREADS, 0, s, job);
    if (needs.top) {
        DI_LAUNCH((slices_kernel<TOP>), parts, THREADS, 0, s, job);
        DI_LAUNCH((select_kernel<TOP>), rows, SORTERS, 0, s, job);
    }
    DI_LAUNCH((finish_kernel), rows, THREADS, 0, s, job);
}

di_status di_cuda_sample_rows(di_stream *stream, const di_sample_rows_args *a) {
    const di_limits *limits = &stream->dev->limits;
    if (a->n_rows == 0)
        return DI_OK;
    if (a->n_rows < 0 || a->n_vocab < 1 || a->n_vocab > INT32_MAX || a->n_vocab > limits->n_vocab || !a->logits ||
        !a->rows || !a->plan || !a->words || !a->results)
        return DI_ERR_SHAPE;
    sample_job job = {};
    int32_t rows_max = group_rows(limits);
    uint8_t *memory = (uint8_t *)di_cuda_scratch(stream, lay_out(&job, NULL, rows_max, a->n_vocab));
    if (!memory)
        return DI_ERR_SHAPE;
    (void)lay_out(&job, memory, rows_max, a->n_vocab);
    job.logits = a->logits;
    job.n_vocab = a->n_vocab;
    job.n_runs = (int32_t)((a->n_vocab + RUN - 1) / RUN);
    job.rows = a->rows;
    job.words = a->words;
    job.blacklist = a->blacklist;
    job.results = a->results;
    job.tokens = a->tokens;
    job.top = a->top;
    int32_t changed_max = DI_MIN(rows_max, (int32_t)CHANGED_MAX), changed = 0;
    for (int32_t i = 0; i < a->n_rows; i++) {
        const di_sample_row *r = &a->plan[i];
        if (r->rule < DI_SAMPLE_NOISE || r->rule > DI_SAMPLE_GIVEN || r->n_forbid > DI_SAMPLE_FORBID_MAX ||
            r->logits_row < 0 || r->n_top > 1000 || (has_top(r) && !a->top) ||
            (r->rule == DI_SAMPLE_TEST && (!r->ln_q || r->token < 0 || r->token >= a->n_vocab)) ||
            (r->changed_at >= 0 && r->changed_at != changed++))
            return DI_ERR_SHAPE;
    }
    for (job.row0 = 0, job.changed0 = 0; job.row0 < a->n_rows; job.row0 += job.n_rows) {
        changed = 0;
        for (job.n_rows = 0; job.row0 + job.n_rows < a->n_rows && job.n_rows < rows_max; job.n_rows++) {
            bool is_changed = a->plan[job.row0 + job.n_rows].changed_at >= 0;
            if (is_changed && changed == changed_max)
                break;
            changed += is_changed;
        }
        /* A few blocks for each multiprocessor; how many does not show in any result. */
        int32_t wanted = (16 * stream->dev->n_sms + job.n_rows - 1) / job.n_rows;
        job.n_parts = DI_MAX(DI_MIN(wanted, job.n_runs), 1);
        run_group(stream, job, needs_of(a->plan + job.row0, job.n_rows));
        job.changed0 += changed;
    }
    return DI_OK;
}
