/* The indexer's selection: scores of the visible entries, the best entries and the best candidate blocks.
 *
 *     plan    one block     entry counts, where ranks of a row lie, how the work is shared out (index.cuh)
 *                           (of few rows that are scored alone: by every block of the scores, index_sm90.cu)
 *     scores  fixed grid    spans of 128 entries; here with the bits of the CPU's reference for every shape, format and
 *                           both numerics; in index_sm90.cu for the released shape, with the same bits
 *     best    fixed grid    a segment of up to 32768 ranks lies in a block's registers: the k-th largest bit by bit,
 *                           then those above it and as many of its equals as are wanted, in the order of indices. The
 *                           last block to finish a row that has more segments chooses from what they kept.
 *
 * Most ranks never matter: the k-th largest of the maxima of 8 neighbours is a limit that at least k ranks reach and
 * few do, and the search goes on among those. Scratch: the ranks of a chunk of rows (INDEX_CHUNK_BYTES and four rows
 * more, at most) and what segments keep. Source: model.md 3.7. */
#include "index.cuh"

enum {
    PLAN_THREADS = 1024,
    SCORE_THREADS = INDEX_SPAN,
    SCORE_HEADS = 8, /* dot products that a thread holds */
    SCORE_BYTES_MAX = 200 << 10,
    BEST_THREADS = 1024,
    BEST_WIDTH = 8,                                          /* neighbours that a thread holds */
    BEST_RUNS = INDEX_SEGMENT / (BEST_THREADS * BEST_WIDTH), /* of neighbours: 4 */
    BEST_LISTED = 4096,                                      /* ranks that reach the limit, at most */
    BEST_K_MAX = INDEX_SEGMENT / 2                           /* of rows that have several segments */
};

/* ---- plan --------------------------------------------------------------------------------------------------------
 */

enum { SUM_AT, SUM_ALONE, SUM_GROUP, SUM_SEG, SUM_BLOCK_SEG, N_SUMS };

/* Numbers of the rows from `first` on, as far as there are rows. */
__device__ static inline void put_group(int32_t *to, int32_t first, int32_t n_rows, const int32_t (&v)[INDEX_GROUP]) {
    static_assert(INDEX_GROUP == 4, "an int4");
    if (first + INDEX_GROUP <= n_rows) {
        *(int4 *)(void *)(to + first) = make_int4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < INDEX_GROUP; i++) {
        if (first + i < n_rows)
            to[first + i] = v[i];
    }
}

/* One block; a thread takes INDEX_GROUP rows at a time, so that a group of rows is one thread's business. */
template <int THREADS> __global__ void __launch_bounds__(THREADS) index_plan_rows(index_job job) {
    cu_grid_begin();
    __shared__ int32_t warp_sums[N_SUMS][DI_WARP];
    const index_plan &p = job.plan;
    int32_t *const out[N_SUMS] = {p.at, p.alone, p.group, p.seg, p.block_seg};
    int32_t lane = (int32_t)threadIdx.x % DI_WARP, warp = (int32_t)threadIdx.x / DI_WARP, before[N_SUMS] = {};
    for (int32_t row0 = 0; row0 < job.n_rows; row0 += THREADS * INDEX_GROUP) {
        int32_t first = row0 + (int32_t)threadIdx.x * INDEX_GROUP, lead[INDEX_GROUP];
        int32_t add[INDEX_GROUP][N_SUMS] = {};
        index_row row[INDEX_GROUP];
#pragma unroll
        for (int32_t i = 0; i < INDEX_GROUP; i++) {
            lead[i] = i;
            row[i] = {0, INDEX_FOLLOWS};
            if (first + i < job.n_rows)
                row[i] = index_plan_row(job, first + i);
            int32_t n_blocks = job.with_blocks ? (row[i].n + job.block - 1) / job.block : 0;
            add[i][SUM_AT] = add[i][SUM_ALONE] = index_spans(row[i].n);
            add[i][SUM_SEG] = first + i < job.n_rows ? index_segments(row[i].n) : 0;
            add[i][SUM_BLOCK_SEG] = first + i < job.n_rows ? index_segments(n_blocks) : 0;
        }
        /* Neighbours of one sequence join; the leader takes over their spans. */
#pragma unroll
        for (int32_t i = 1; i < INDEX_GROUP; i++) {
            bool joins = job.with_groups && first + i < job.n_rows && row[i].kind == INDEX_ALONE &&
                         row[i - 1].kind <= INDEX_GROUP && job.seq[first + i] == job.seq[first + i - 1];
            lead[i] = joins ? lead[i - 1] : i;
#pragma unroll
            for (int32_t l = 0; l < i; l++) {
                if (joins && lead[i] == l) {
                    row[l].kind = i - l + 1;
                    int32_t most = add[l][SUM_ALONE] > add[l][SUM_GROUP] ? add[l][SUM_ALONE] : add[l][SUM_GROUP];
                    add[l][SUM_GROUP] = most > add[i][SUM_ALONE] ? most : add[i][SUM_ALONE];
                    add[l][SUM_ALONE] = 0;
                }
            }
            add[i][SUM_ALONE] = joins ? 0 : add[i][SUM_ALONE];
            row[i].kind = joins ? INDEX_FOLLOWS : row[i].kind;
        }
#pragma unroll
        for (int32_t i = 0; i < INDEX_GROUP; i++)
            add[i][SUM_GROUP] += add[i][SUM_GROUP] ? INDEX_GROUP_HEAD : 0;
        int32_t sum[N_SUMS];
#pragma unroll
        for (int s = 0; s < N_SUMS; s++) {
            sum[s] = add[0][s] + add[1][s] + add[2][s] + add[3][s];
            for (int32_t d = 1; d < DI_WARP; d *= 2) {
                int32_t left = __shfl_up_sync(0xFFFFFFFFu, sum[s], (unsigned)d);
                sum[s] += lane >= d ? left : 0;
            }
            if (lane == DI_WARP - 1)
                warp_sums[s][warp] = sum[s];
        }
        __syncthreads();
        for (int32_t s = warp; s < N_SUMS; s += THREADS / DI_WARP) {
            int32_t t = lane < THREADS / DI_WARP ? warp_sums[s][lane] : 0;
            for (int32_t d = 1; d < DI_WARP; d *= 2) {
                int32_t left = __shfl_up_sync(0xFFFFFFFFu, t, (unsigned)d);
                t += lane >= d ? left : 0;
            }
            warp_sums[s][lane] = t;
        }
        __syncthreads();
        int32_t home[INDEX_GROUP], values[INDEX_GROUP];
#pragma unroll
        for (int s = 0; s < N_SUMS; s++) {
            int32_t at = before[s] + sum[s] - (add[0][s] + add[1][s] + add[2][s] + add[3][s]);
            at += warp > 0 ? warp_sums[s][warp - 1] : 0;
#pragma unroll
            for (int32_t i = 0; i < INDEX_GROUP; i++) {
                values[i] = at;
                if (s == SUM_AT)
                    home[i] = i == 0 || lead[i] == i ? at : home[i - 1];
                at += add[i][s];
            }
            put_group(out[s], first, job.n_rows, values);
            before[s] += warp_sums[s][DI_WARP - 1];
        }
        put_group(p.home, first, job.n_rows, home);
#pragma unroll
        for (int32_t i = 0; i < INDEX_GROUP; i++)
            values[i] = row[i].n;
        put_group(p.n, first, job.n_rows, values);
#pragma unroll
        for (int32_t i = 0; i < INDEX_GROUP; i++)
            values[i] = row[i].kind;
        put_group(p.kind, first, job.n_rows, values);
#pragma unroll
        for (int32_t i = 0; i < INDEX_GROUP; i++)
            values[i] = 0;
        put_group(p.done, first, job.n_rows, values);
        put_group(p.block_done, first, job.n_rows, values);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < N_SUMS; s++)
            out[s][job.n_rows] = before[s];
    }
}

/* The plan of a single row of n scores. */
__global__ void index_plan_one(index_plan p, int32_t n) {
    cu_grid_begin();
    p.n[0] = n;
    p.kind[0] = INDEX_ALONE;
    p.home[0] = p.done[0] = p.block_done[0] = p.at[0] = p.alone[0] = p.group[0] = p.seg[0] = p.block_seg[0] = 0;
    p.at[1] = p.alone[1] = index_spans(n);
    p.group[1] = 0;
    p.seg[1] = index_segments(n);
    p.block_seg[1] = 1;
}

/* ---- scores ------------------------------------------------------------------------------------------------------
 */

__global__ void index_no_scores(float *scores, int64_t n) {
    cu_grid_begin();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        scores[i] = -__uint_as_float(0x7F800000u);
}

/* Query and weights of a row as floats in shared memory, the query through QI unless keys are exact. */
__device__ static void put_query(const index_job &job, int32_t row, float *q, float *w) {
    int32_t n_groups = job.n_heads * job.dim / 32;
    for (int32_t g = (int32_t)threadIdx.x; g < n_groups; g += SCORE_THREADS) {
        float scale = 1.0f, inv = 1.0f;
        bool is_coded = job.keys.format != DI_KV_F32;
        if (is_coded) {
            int32_t most = 0;
            for (int32_t i = 0; i < 32; i++) {
                int32_t a = index_magnitude(cu_act_load(job.q, row, g * 32 + i));
                most = a > most ? a : most;
            }
            scale = index_scale(most);
            inv = __fdiv_rn(1.0f, scale);
            scale = cu_e8m0_to_f32((uint8_t)(__float_as_uint(scale) >> 23));
        }
        for (int32_t i = 0; i < 32; i++) {
            float x = cu_act_load(job.q, row, g * 32 + i);
            q[g * 32 + i] = is_coded ? __fmul_rn(cu_e2m1_to_f32(index_e2m1_code(__fmul_rn(x, inv))), scale) : x;
        }
    }
    for (int32_t h = (int32_t)threadIdx.x; h < job.n_heads; h += SCORE_THREADS)
        w[h] = cu_act_load(job.w, row, h);
}

/* Values [32g, 32g + 32) of a record; 16 bytes at a time where they lie so. */
__device__ static inline void load_group(const di_paged &p, const index_key &k, int32_t g, float (&x)[32]) {
    if (p.format == DI_KV_F32) {
        const float *from = (const float *)(const void *)k.data + g * 32;
#pragma unroll
        for (int i = 0; i < 32; i++)
            x[i] = from[i];
    } else if (p.format == DI_KV_FP8) {
        float scale = cu_e8m0_to_f32(k.scale[g]);
#pragma unroll
        for (int i = 0; i < 32; i++)
            x[i] = __fmul_rn(cu_e4m3_to_f32(k.data[g * 32 + i]), scale);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float scale = p.format == DI_KV_FP4 ? cu_e4m3_to_f32(k.scale[2 * g + half]) : cu_e8m0_to_f32(k.scale[g]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t byte = k.data[g * 16 + half * 8 + i];
                x[half * 16 + 2 * i] = __fmul_rn(cu_e2m1_to_f32(byte & 15u), scale);
                x[half * 16 + 2 * i + 1] = __fmul_rn(cu_e2m1_to_f32(byte >> 4), scale);
            }
        }
    }
}

__device__ static float score_entry(const index_job &job, const index_key &k, const float *q, const float *w) {
    int32_t n_groups = job.dim / 32;
    float score = 0.0f;
    for (int32_t h0 = 0; h0 < job.n_heads; h0 += SCORE_HEADS) {
        float dot[SCORE_HEADS] = {};
        for (int32_t g = 0; g < n_groups; g++) {
            float x[32];
            load_group(job.keys, k, g, x);
#pragma unroll
            for (int i = 0; i < SCORE_HEADS; i++) {
                if (h0 + i >= job.n_heads)
                    break;
                const float *qh = q + (h0 + i) * job.dim + g * 32;
                float even = 0.0f, odd = 0.0f;
#pragma unroll
                for (int d = 0; d < 32; d += 2) {
                    even = __fadd_rn(even, __fmul_rn(qh[d], x[d]));
                    odd = __fadd_rn(odd, __fmul_rn(qh[d + 1], x[d + 1]));
                }
                dot[i] = __fadd_rn(dot[i], __fadd_rn(even, odd));
            }
        }
#pragma unroll
        for (int i = 0; i < SCORE_HEADS; i++) {
            if (h0 + i < job.n_heads)
                score = __fadd_rn(score, __fmul_rn(w[h0 + i], dot[i] > 0.0f ? dot[i] : 0.0f));
        }
    }
    return job.round_bf16 ? cu_round_bf16(score) : score;
}

/* Whether block b is in an ascending list with -1 at its end. */
__device__ static bool is_listed(const int32_t *list, int32_t n, int32_t b) {
    int32_t lo = 0, hi = n;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (list[mid] >= 0 && list[mid] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < n && list[lo] == b;
}

/* A thread is an entry of the span. */
__global__ void __launch_bounds__(SCORE_THREADS) index_scores(index_job job) {
    DI_DYN_SHARED(float, q); /* [heads, dim], then the weights */
    cu_grid_begin();
    float *w = q + job.n_heads * job.dim;
    uint32_t *ranks = (uint32_t *)job.ranks;
    int32_t row = -1;
    for (index_walk at = index_walk_begin(job, job.plan.alone); at.unit < at.end; index_walk_step(at)) {
        if (at.row != row) {
            row = at.row;
            __syncthreads();
            put_query(job, row, q, w);
            __syncthreads();
        }
        int32_t n = job.plan.n[row], kind = job.plan.kind[row];
        int32_t v = (at.unit - at.first) * INDEX_SPAN + (int32_t)threadIdx.x;
        uint32_t rank = 0;
        if (v < n) {
            int32_t entry = index_entry(job, row, kind, v);
            if (kind != INDEX_MASKED ||
                is_listed(job.list + (int64_t)row * job.n_list, job.n_list, entry / job.block)) {
                float score = score_entry(job, index_key_at(job, row, entry), q, w);
                rank = index_rank(score);
                if (job.scores)
                    job.scores[row * job.scores_stride + entry] = score;
            }
        }
        ranks[index_ranks_at(job, row) + v] = rank;
    }
}

/* ---- where ranks come from ---------------------------------------------------------------------------------------
 */

enum best_kind {
    BEST_ENTRIES, /* of a row; 0 from n to the end of the row's last span */
    BEST_BLOCKS,  /* candidate blocks: the largest of a block, at most the largest finite bf16; the newest above all */
    BEST_SCORES,  /* scores as they are */
    BEST_KEPT     /* what segments kept: what an earlier round chose, then more */
};
struct best_source {
    best_kind kind;
    bool is_half;     /* ranks are the upper halves alone */
    const void *from; /* ranks or scores; of BEST_KEPT: what was chosen */
    const uint32_t *more;
    const int32_t *from_idx, *more_idx; /* of BEST_KEPT */
    int32_t n, n_chosen, block;
};

__device__ static inline void load_ranks(const best_source &s, int64_t first, uint32_t (&r)[BEST_WIDTH]) {
    if (s.is_half) {
        uint4 x = *(const uint4 *)(const void *)((const uint16_t *)s.from + first);
        r[0] = x.x << 16, r[1] = x.x & 0xFFFF0000u, r[2] = x.y << 16, r[3] = x.y & 0xFFFF0000u;
        r[4] = x.z << 16, r[5] = x.z & 0xFFFF0000u, r[6] = x.w << 16, r[7] = x.w & 0xFFFF0000u;
    } else {
        const uint4 *at = (const uint4 *)(const void *)((const uint32_t *)s.from + first);
        uint4 x = at[0], y = at[1];
        r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w, r[4] = y.x, r[5] = y.y, r[6] = y.z, r[7] = y.w;
    }
}
__device__ static inline uint32_t largest_of_block(const best_source &s, int32_t b) {
    const uint32_t cap = 0xFF7F0000u, newest = 0xFF800000u;
    uint32_t most = 0;
    if (b >= s.n)
        return 0;
    for (int32_t e = 0; e < s.block; e += BEST_WIDTH) {
        uint32_t x[BEST_WIDTH];
        load_ranks(s, (int64_t)b * s.block + e, x);
#pragma unroll
        for (int i = 0; i < BEST_WIDTH; i++)
            most = x[i] > most ? x[i] : most;
    }
    return b == s.n - 1 ? newest : most > cap ? cap : most;
}
/* Items [first, first + 8) of which the first is below n; 0 beyond. Ranks of entries and blocks lie so that all of a
 * vector can be read. */
__device__ static void load_items(const best_source &s, int32_t first, uint32_t (&r)[BEST_WIDTH]) {
    if (s.kind == BEST_ENTRIES) {
        load_ranks(s, first, r);
        return;
    }
#pragma unroll
    for (int i = 0; i < BEST_WIDTH; i++) {
        int32_t at = first + i;
        if (s.kind == BEST_BLOCKS)
            r[i] = largest_of_block(s, at);
        else if (at >= s.n)
            r[i] = 0;
        else if (s.kind == BEST_SCORES)
            r[i] = index_rank(((const float *)s.from)[at]);
        else
            r[i] = at < s.n_chosen ? ((const uint32_t *)s.from)[at] : s.more[at - s.n_chosen];
    }
}

/* Where the best go: indices, or ranks and indices where they are only kept. An index behind a list of candidate blocks
 * becomes that of the entry. */
struct best_sink {
    int32_t *out;
    uint32_t *rank; /* NULL: out is final */
    const int32_t *list;
    int32_t block;
};
__device__ static inline void put_item(const best_source &s, const best_sink &to, uint32_t place, uint32_t rank,
                                       int32_t item) {
    int32_t v = item;
    if (s.kind == BEST_KEPT)
        v = item < s.n_chosen ? s.from_idx[item] : s.more_idx[item - s.n_chosen];
    if (to.rank)
        to.rank[place] = rank;
    else if (to.list)
        v = to.list[v / to.block] * to.block + v % to.block;
    to.out[place] = v;
}

/* ---- sums and searches by a block --------------------------------------------------------------------------------
 */

struct best_room {
    uint32_t sums[2][DI_WARP];                         /* of reductions, in turn */
    uint32_t runs[BEST_RUNS * BEST_THREADS / DI_WARP]; /* what warps of each run keep */
    uint32_t rank[BEST_LISTED];                        /* ranks that reach the limit */
    int32_t at[BEST_LISTED];                           /* their places */
    uint32_t flag;
};

enum best_op { BEST_SUM, BEST_OR, BEST_MAX };

template <int OP> __device__ static inline uint32_t warp_all(uint32_t v) {
    if (OP == BEST_SUM)
        return __reduce_add_sync(0xFFFFFFFFu, v);
    if (OP == BEST_OR)
        return __reduce_or_sync(0xFFFFFFFFu, v);
    return __reduce_max_sync(0xFFFFFFFFu, v);
}
/* Over all threads, to all threads. `turn` changes with every call, so that one barrier is enough. */
template <int OP> __device__ static inline uint32_t block_all(uint32_t v, best_room *room, int *turn) {
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
    v = warp_all<OP>(v);
    if (lane == 0)
        room->sums[*turn][warp] = v;
    __syncthreads();
    v = warp_all<OP>(room->sums[*turn][lane]);
    *turn ^= 1;
    return v;
}

template <int N> __device__ static inline uint32_t reach(const uint32_t (&r)[N], uint32_t least) {
    uint32_t n = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        n += r[i] >= least;
    return n;
}

/* The k-th largest of the block's ranks, of which at least k are not 0: bit by bit from the top, of the bits in which
 * ranks differ. */
template <int N> __device__ static uint32_t kth_rank(const uint32_t (&r)[N], uint32_t k, best_room *room, int *turn) {
    uint32_t most = 0, differ = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        most = r[i] > most ? r[i] : most;
    most = block_all<BEST_MAX>(most, room, turn);
#pragma unroll
    for (int i = 0; i < N; i++)
        differ |= r[i] ? r[i] ^ most : 0;
    uint32_t open = block_all<BEST_OR>(differ, room, turn), found = most & ~open;
    while (open) {
        uint32_t bit = 0x80000000u >> __clz((int)open);
        if (block_all<BEST_SUM>(reach(r, found | bit), room, turn) >= k)
            found |= bit;
        open ^= bit;
    }
    return found;
}

/* The ranks above `last`, and the first `ties` of those equal to it, in order: put(place, rank, item) for each. Items
 * are in runs: thread t has WIDTH neighbours from (run * threads + t) * WIDTH on. Returns how many there are. */
template <int RUNS, int WIDTH, class PUT>
__device__ static uint32_t take(const uint32_t (&r)[RUNS * WIDTH], uint32_t last, uint32_t ties, best_room *room,
                                const PUT &put) {
    const uint32_t n_warps = BEST_THREADS / DI_WARP;
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
    uint32_t before[RUNS]; /* in this warp and run: above in the low half, equal in the high */
    __syncthreads();
#pragma unroll
    for (uint32_t run = 0; run < RUNS; run++) {
        uint32_t own = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            own += (uint32_t)(r[run * WIDTH + i] > last) + ((uint32_t)(ties && r[run * WIDTH + i] == last) << 16);
        uint32_t sum = own;
        for (uint32_t d = 1; d < DI_WARP; d *= 2) {
            uint32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, d);
            sum += lane >= d ? left : 0;
        }
        before[run] = sum - own;
        if (lane == DI_WARP - 1)
            room->runs[run * n_warps + warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t base = 0;
        for (uint32_t run = 0; run < RUNS; run++) {
            uint32_t own = room->runs[run * n_warps + lane], sum = own;
            for (uint32_t d = 1; d < DI_WARP; d *= 2) {
                uint32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, d);
                sum += lane >= d ? left : 0;
            }
            room->runs[run * n_warps + lane] = base + sum - own;
            base += __shfl_sync(0xFFFFFFFFu, sum, DI_WARP - 1);
        }
        if (lane == 0)
            room->flag = base;
    }
    __syncthreads();
    uint32_t total = room->flag, all = total >> 16;
#pragma unroll
    for (uint32_t run = 0; run < RUNS; run++) {
        uint32_t at = room->runs[run * n_warps + warp] + before[run];
        uint32_t above = at & 0xFFFFu, equal = at >> 16;
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; i++) {
            uint32_t rank = r[run * WIDTH + i];
            bool is_above = rank > last, is_equal = ties && rank == last;
            if (is_above || (is_equal && equal < ties))
                put(above + (equal < ties ? equal : ties), rank,
                    (int32_t)((run * BEST_THREADS + threadIdx.x) * WIDTH + i));
            above += is_above;
            equal += is_equal;
        }
    }
    return (total & 0xFFFFu) + (all < ties ? all : ties);
}

/* A limit that at least k ranks reach, and at most BEST_LISTED: the k-th largest of the maxima of neighbours. 0 where
 * it isn't one. */
__device__ static uint32_t limit_of(const uint32_t (&r)[BEST_RUNS * BEST_WIDTH], uint32_t n, uint32_t k,
                                    best_room *room, int *turn) {
    uint32_t most[BEST_RUNS];
    if (n / (2 * BEST_WIDTH) < k) /* too many of the maxima would be wanted */
        return 0;
#pragma unroll
    for (int run = 0; run < BEST_RUNS; run++) {
        most[run] = 0;
#pragma unroll
        for (int i = 0; i < BEST_WIDTH; i++)
            most[run] = r[run * BEST_WIDTH + i] > most[run] ? r[run * BEST_WIDTH + i] : most[run];
    }
    if (block_all<BEST_SUM>(reach(most, 1), room, turn) < k)
        return 0;
    uint32_t limit = kth_rank(most, k, room, turn);
    return block_all<BEST_SUM>(reach(r, limit), room, turn) <= BEST_LISTED ? limit : 0;
}

/* The same of at most BEST_THREADS items, one a thread: a decode step's row has few, and then what counts is how few
 * steps there are. */
__device__ static inline uint32_t best_of_few(const best_source &s, uint32_t k, const best_sink &to, best_room *room,
                                              int *turn) {
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP, r[1] = {0}, last = 0, ties = 0;
    int32_t item = (int32_t)threadIdx.x;
    if (item < s.n) {
        if (s.kind == BEST_BLOCKS)
            r[0] = largest_of_block(s, item);
        else if (s.kind == BEST_SCORES)
            r[0] = index_rank(((const float *)s.from)[item]);
        else
            r[0] = s.is_half ? (uint32_t)((const uint16_t *)s.from)[item] << 16 : ((const uint32_t *)s.from)[item];
    }
    if (s.n > (int32_t)k && block_all<BEST_SUM>(reach(r, 1), room, turn) > k) {
        last = kth_rank(r, k, room, turn);
        ties = k - block_all<BEST_SUM>(reach(r, last + 1), room, turn);
    }
    bool is_above = r[0] > last, is_equal = ties && r[0] == last;
    uint32_t above = __ballot_sync(0xFFFFFFFFu, is_above), equal = __ballot_sync(0xFFFFFFFFu, is_equal);
    if (lane == 0)
        room->runs[warp] = (uint32_t)__popc(above) | (uint32_t)__popc(equal) << 16;
    __syncthreads();
    uint32_t own = room->runs[lane], sum = own;
    for (uint32_t d = 1; d < DI_WARP; d *= 2) {
        uint32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        sum += lane >= d ? left : 0;
    }
    uint32_t before = __shfl_sync(0xFFFFFFFFu, sum - own, warp), total = __shfl_sync(0xFFFFFFFFu, sum, DI_WARP - 1);
    uint32_t below = (1u << lane) - 1;
    uint32_t n_above = (before & 0xFFFFu) + (uint32_t)__popc(above & below);
    uint32_t n_equal = (before >> 16) + (uint32_t)__popc(equal & below), all = total >> 16;
    if (is_above || (is_equal && n_equal < ties))
        put_item(s, to, n_above + (n_equal < ties ? n_equal : ties), r[0], item);
    return (total & 0xFFFFu) + (all < ties ? all : ties);
}

/* The k best of the items of s from `first` on, INDEX_SEGMENT at most, in order. Returns how many there are. */
__device__ static __attribute__((noinline)) uint32_t best(const best_source &s, int32_t first, uint32_t k,
                                                          const best_sink &to, best_room *room, int *turn) {
    uint32_t r[BEST_RUNS * BEST_WIDTH];
    int32_t n = s.n - first < INDEX_SEGMENT ? s.n - first : INDEX_SEGMENT;
#pragma unroll
    for (int run = 0; run < BEST_RUNS; run++) {
        uint32_t x[BEST_WIDTH] = {};
        int32_t at = (run * BEST_THREADS + (int32_t)threadIdx.x) * BEST_WIDTH;
        if (at < n)
            load_items(s, first + at, x);
#pragma unroll
        for (int i = 0; i < BEST_WIDTH; i++)
            r[run * BEST_WIDTH + i] = x[i];
    }
    uint32_t last = 0, ties = 0; /* all that can be chosen */
    uint32_t limit = n > 0 ? limit_of(r, (uint32_t)n, k, room, turn) : 0;
    if (limit) {
        uint32_t x[BEST_LISTED / BEST_THREADS];
        uint32_t n_listed =
            take<BEST_RUNS, BEST_WIDTH>(r, limit - 1, 0, room, [&](uint32_t at, uint32_t rank, int32_t item) {
                room->rank[at] = rank;
                room->at[at] = item;
            });
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BEST_LISTED / BEST_THREADS; i++) {
            uint32_t at = (uint32_t)i * BEST_THREADS + threadIdx.x;
            x[i] = at < n_listed ? room->rank[at] : 0;
        }
        last = kth_rank(x, k, room, turn);
        ties = k - block_all<BEST_SUM>(reach(x, last + 1), room, turn);
        return take<BEST_LISTED / BEST_THREADS, 1>(x, last, ties, room, [&](uint32_t at, uint32_t rank, int32_t item) {
            put_item(s, to, at, rank, first + room->at[item]);
        });
    }
    if (n > 0 && (uint32_t)n > k && block_all<BEST_SUM>(reach(r, 1), room, turn) > k) {
        last = kth_rank(r, k, room, turn);
        ties = k - block_all<BEST_SUM>(reach(r, last + 1), room, turn);
    }
    return take<BEST_RUNS, BEST_WIDTH>(r, last, ties, room, [&](uint32_t at, uint32_t rank, int32_t item) {
        put_item(s, to, at, rank, first + item);
    });
}

/* ---- the best of rows --------------------------------------------------------------------------------------------
 */

struct best_job {
    index_job job;
    best_kind kind;
    bool is_half;
    bool is_rest; /* rows of one segment are chosen from elsewhere */
    int32_t k;
    int32_t *out;   /* [n_rows, k] */
    uint32_t *rank; /* what segments keep: k of each */
    int32_t *idx;
    const float *scores; /* of BEST_SCORES */
};

/* Places [from, k) of a row hold nothing; by thread `thread` of n. */
template <class T>
__device__ static inline void fill_rest(T *out, uint32_t from, int32_t k, T nothing, int32_t thread, int32_t n) {
    for (int32_t at = (int32_t)from + thread; at < k; at += n)
        out[at] = nothing;
}
template <class T> __device__ static inline void fill_rest(T *out, uint32_t from, int32_t k, T nothing) {
    fill_rest(out, from, k, nothing, (int32_t)threadIdx.x, BEST_THREADS);
}

__device__ static best_source source_of(const best_job &b, int32_t row) {
    best_source s = {};
    s.kind = b.kind;
    s.is_half = b.is_half;
    s.n = b.job.plan.n[row];
    s.from = b.scores;
    if (b.kind == BEST_SCORES)
        return s;
    int64_t at = index_ranks_at(b.job, row);
    s.from = b.is_half ? (const void *)((const uint16_t *)b.job.ranks + at) : (const uint32_t *)b.job.ranks + at;
    if (b.kind == BEST_BLOCKS) {
        s.block = b.job.block;
        s.n = (s.n + s.block - 1) / s.block;
    }
    return s;
}
__device__ static best_sink sink_of(const best_job &b, int32_t row) {
    best_sink to = {};
    to.out = b.out + (int64_t)row * b.k;
    if (b.kind == BEST_ENTRIES && b.job.plan.kind[row] == INDEX_LISTED) {
        to.list = b.job.list + (int64_t)row * b.job.n_list;
        to.block = b.job.block;
    }
    return to;
}

/* Chooses from what the segments of a row kept, in rounds of as many as a block holds. What a round chose lies behind
 * what the segments kept, in turn in one of two places. */
__device__ static void merge_kept(const best_job &b, int32_t row, int32_t n_seg, int64_t kept, best_room *room,
                                  int *turn) {
    int32_t done = 0, n = n_seg * b.k;
    best_source s = {};
    s.kind = BEST_KEPT;
    for (int round = 0; done < n; round++) {
        int32_t more = n - done < INDEX_SEGMENT - s.n_chosen ? n - done : INDEX_SEGMENT - s.n_chosen;
        int64_t next = kept + (int64_t)(n_seg + round % 2) * b.k;
        best_sink to = sink_of(b, row);
        if (done + more < n) {
            to.rank = b.rank + next;
            to.out = b.idx + next;
        }
        s.more = b.rank + kept + done;
        s.more_idx = b.idx + kept + done;
        s.n = s.n_chosen + more;
        uint32_t count = best(s, 0, (uint32_t)b.k, to, room, turn);
        if (!to.rank)
            fill_rest(to.out, count, b.k, -1);
        __threadfence_block();
        __syncthreads();
        s.from = b.rank + next;
        s.from_idx = b.idx + next;
        s.n_chosen = (int32_t)count;
        done += more;
    }
}

__global__ void __launch_bounds__(BEST_THREADS, 1) index_best(best_job b) {
    __shared__ best_room room;
    cu_grid_begin();
    bool is_blocks = b.kind == BEST_BLOCKS;
    const int32_t *seg = is_blocks ? b.job.plan.block_seg : b.job.plan.seg;
    int32_t *finished = is_blocks ? b.job.plan.block_done : b.job.plan.done, lo, hi;
    int turn = 0;
    index_chunk_rows(b.job, &lo, &hi);
    if (lo >= hi)
        return;
    int32_t end = seg[hi];
    if (b.is_rest && end - seg[lo] == hi - lo)
        return;
    for (int32_t at = seg[lo] + (int32_t)blockIdx.x; at < end; at += (int32_t)gridDim.x) {
        int32_t row = index_last(seg, lo, hi, at), part = at - seg[row], n_seg = seg[row + 1] - seg[row];
        if (b.is_rest && n_seg == 1)
            continue;
        best_sink to = sink_of(b, row);
        /* 3 * (segments - 1) places for each row: for its segments, and for two rounds of three and more. */
        int64_t kept = 3 * (int64_t)((seg[row] - row) - (seg[lo] - lo)) * b.k, own = kept + (int64_t)part * b.k;
        if (n_seg > 1) {
            to.rank = b.rank + own;
            to.out = b.idx + own;
        }
        best_source from = source_of(b, row);
        uint32_t n = n_seg == 1 && from.n <= BEST_THREADS
                         ? best_of_few(from, (uint32_t)b.k, to, &room, &turn)
                         : best(from, part * INDEX_SEGMENT, (uint32_t)b.k, to, &room, &turn);
        if (n_seg == 1) {
            fill_rest(to.out, n, b.k, -1);
        } else {
            fill_rest(to.rank, n, b.k, 0u);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                room.flag = atomicAdd(&finished[row], 1) == n_seg - 1;
            __syncthreads();
            bool is_last = room.flag;
            if (is_last) {
                __threadfence();
                merge_kept(b, row, n_seg, kept, &room, &turn);
            }
        }
        __syncthreads();
    }
}

/* ---- many rows ---------------------------------------------------------------------------------------------------
 * A prefill has thousands of rows of one segment: what counts then is how many rows are under way, not how soon one is
 * done. A warp holds 4096 ranks of 16 bits, two in a register, and chooses without a barrier; longer rows are a
 * block's. Rows go from the last to the first, since later rows have more entries. */

enum {
    MANY_THREADS = 256,
    MANY_WARPS = MANY_THREADS / DI_WARP,
    MANY_CHUNK = DI_WARP * BEST_WIDTH, /* items that a warp loads at a time */
    MANY_CHUNKS = 16,
    MANY_ITEMS = MANY_CHUNK * MANY_CHUNKS /* of a warp */
};
static_assert(MANY_ITEMS * MANY_WARPS == INDEX_SEGMENT, "a block holds a segment");

struct many_room {
    uint32_t sums[2][MANY_WARPS];
};
/* Over the threads of a team of so many warps, to all of them; of a block: `turn` as in block_all. */
template <int OP, int WARPS> __device__ static inline uint32_t team_all(uint32_t v, many_room *room, int *turn) {
    v = warp_all<OP>(v);
    if (WARPS == 1)
        return v;
    uint32_t lane = threadIdx.x % DI_WARP;
    if (lane == 0)
        room->sums[*turn][threadIdx.x / DI_WARP] = v;
    __syncthreads();
    v = warp_all<OP>(lane < WARPS ? room->sums[*turn][lane] : 0);
    *turn ^= 1;
    return v;
}
/* How many of a pair of ranks reach `least`; ranks and limits lie in the upper halves of words, the first of a pair in
 * its lower half. */
__device__ static inline uint32_t reach_pair(uint32_t pair, uint32_t least) {
    return (uint32_t)(pair >= least) + (uint32_t)(pair << 16 >= least);
}
/* The pairs that a thread holds; four chunks are passed over at a time, those of no items are zeros. */
typedef uint32_t many_pairs[MANY_CHUNKS][BEST_WIDTH / 2];
template <class F> __device__ static inline void each_pair(const many_pairs &pair, int32_t n_chunks, const F &f) {
#pragma unroll
    for (int c = 0; c < MANY_CHUNKS; c += 4) {
        if (c < n_chunks) {
#pragma unroll
            for (int i = 0; i < 4 * (BEST_WIDTH / 2); i++)
                f(pair[c + i / (BEST_WIDTH / 2)][i % (BEST_WIDTH / 2)]);
        }
    }
}
__device__ static inline void load_pairs(const best_source &s, int32_t first, int32_t end, many_pairs &pair) {
#pragma unroll
    for (int c = 0; c < MANY_CHUNKS; c++) {
        int32_t at = first + c * MANY_CHUNK + (int32_t)(threadIdx.x % DI_WARP) * BEST_WIDTH;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (at < end)
            x = *(const uint4 *)(const void *)((const uint16_t *)s.from + at);
        pair[c][0] = x.x, pair[c][1] = x.y, pair[c][2] = x.z, pair[c][3] = x.w;
    }
}
/* The same of candidate blocks. */
__device__ static __attribute__((noinline)) uint32_t block_pair(const best_source &s, int32_t b) {
    return largest_of_block(s, b) >> 16 | largest_of_block(s, b + 1);
}
__device__ static inline void load_block_pairs(const best_source &s, int32_t first, int32_t end, many_pairs &pair) {
#pragma unroll
    for (int c = 0; c < MANY_CHUNKS; c++) {
        int32_t at = first + c * MANY_CHUNK + (int32_t)(threadIdx.x % DI_WARP) * BEST_WIDTH;
#pragma unroll
        for (int i = 0; i < BEST_WIDTH; i += 2)
            pair[c][i / 2] = at + i < end ? block_pair(s, at + i) : 0;
    }
}

/* The k best of the items of s, in order, by a team; at most MANY_ITEMS for each of its warps, ranks of 16 bits.
 * Returns how many there are. */
template <int WARPS, bool IS_BLOCKS>
__device__ static uint32_t best_of_many(const best_source &s, uint32_t k, int32_t *out, many_room *room, int *turn) {
    uint32_t lane = threadIdx.x % DI_WARP, warp = WARPS > 1 ? threadIdx.x / DI_WARP : 0;
    int32_t part = WARPS > 1 ? (s.n + WARPS * MANY_CHUNK - 1) / (WARPS * MANY_CHUNK) * MANY_CHUNK : s.n;
    int32_t first = (int32_t)warp * part, end = first + part < s.n ? first + part : s.n;
    int32_t n_chunks = (end - first + MANY_CHUNK - 1) / MANY_CHUNK; /* none below 1 */
    many_pairs pair;
    if (IS_BLOCKS)
        load_block_pairs(s, first, end, pair);
    else
        load_pairs(s, first, end, pair);
    uint32_t last = 0, ties = 0, n_ranks = 0; /* all that can be chosen */
    if (s.n > (int32_t)k) {
        each_pair(pair, n_chunks, [&](uint32_t x) { n_ranks += reach_pair(x, 1u << 16); });
        n_ranks = team_all<BEST_SUM, WARPS>(n_ranks, room, turn);
    }
    if (n_ranks > k) {
        /* The k-th largest bit by bit, as kth_rank finds it. */
        uint32_t most = 0, differ = 0, above = 0;
        each_pair(pair, n_chunks, [&](uint32_t x) {
            most = x > most ? x : most;
            most = x << 16 > most ? x << 16 : most;
        });
        most = team_all<BEST_MAX, WARPS>(most, room, turn) & 0xFFFF0000u;
        each_pair(pair, n_chunks, [&](uint32_t x) {
            uint32_t hi = x & 0xFFFF0000u, lo = x << 16;
            differ |= (hi ? hi ^ most : 0) | (lo ? lo ^ most : 0);
        });
        uint32_t open = team_all<BEST_OR, WARPS>(differ, room, turn);
        last = most & ~open;
        while (open) {
            uint32_t bit = 0x80000000u >> __clz((int)open), least = last | bit, count = 0;
            each_pair(pair, n_chunks, [&](uint32_t x) { count += reach_pair(x, least); });
            count = team_all<BEST_SUM, WARPS>(count, room, turn);
            if (count >= k)
                last = least;
            else
                above = count; /* the last of these counts is that of ranks above the k-th */
            open ^= bit;
        }
        ties = k - above;
    }
    /* What a thread takes of each chunk: above `last` in the low half, equal to it in the high. */
    uint32_t own[MANY_CHUNKS], before = 0, total = 0;
#pragma unroll
    for (int c = 0; c < MANY_CHUNKS; c++) {
        own[c] = 0;
        if (c < n_chunks) {
            uint32_t reached = 0, beyond = 0;
#pragma unroll
            for (int i = 0; i < BEST_WIDTH / 2; i++) {
                beyond += reach_pair(pair[c][i], last + 0x10000u);
                reached += reach_pair(pair[c][i], last);
            }
            own[c] = beyond | (ties ? reached - beyond : 0) << 16;
            total += own[c];
        }
    }
    total = warp_all<BEST_SUM>(total);
    if (WARPS > 1) {
        if (lane == 0)
            room->sums[*turn][warp] = total;
        __syncthreads();
        uint32_t all = lane < WARPS ? room->sums[*turn][lane] : 0;
        *turn ^= 1;
        before = warp_all<BEST_SUM>(lane < warp ? all : 0);
        total = warp_all<BEST_SUM>(all);
    }
#pragma unroll
    for (int c = 0; c < MANY_CHUNKS; c++) {
        if (c < n_chunks) {
            uint32_t sum = own[c];
#pragma unroll
            for (uint32_t d = 1; d < DI_WARP; d *= 2) {
                uint32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, d);
                sum += lane >= d ? left : 0;
            }
            uint32_t at = before + sum - own[c], above = at & 0xFFFFu, equal = at >> 16;
            before += __shfl_sync(0xFFFFFFFFu, sum, DI_WARP - 1);
            int32_t item = first + c * MANY_CHUNK + (int32_t)lane * BEST_WIDTH;
#pragma unroll
            for (int i = 0; i < BEST_WIDTH; i++) {
                uint32_t rank = i % 2 ? pair[c][i / 2] & 0xFFFF0000u : pair[c][i / 2] << 16;
                bool is_above = rank > last, is_equal = ties && rank == last;
                if (is_above || (is_equal && equal < ties))
                    out[above + (equal < ties ? equal : ties)] = item + i;
                above += is_above;
                equal += is_equal;
            }
        }
    }
    uint32_t n_equal = total >> 16;
    return (total & 0xFFFFu) + (n_equal < ties ? n_equal : ties);
}
/* One row, by threads `thread` of WARPS warps. */
template <int WARPS, bool IS_BLOCKS>
__device__ static inline void put_many(const best_job &b, int32_t row, const best_source &s, many_room *room,
                                       int *turn) {
    int32_t thread = (int32_t)threadIdx.x % (WARPS * DI_WARP);
    best_sink to = sink_of(b, row);
    uint32_t n = best_of_many<WARPS, IS_BLOCKS>(s, (uint32_t)b.k, to.out, room, turn);
    fill_rest(to.out, n, b.k, -1, thread, WARPS * DI_WARP);
    if (!to.list)
        return;
    if (WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
    for (int32_t i = thread; i < (int32_t)n; i += WARPS * DI_WARP) {
        int32_t v = to.out[i];
        to.out[i] = to.list[v / to.block] * to.block + v % to.block;
    }
}

/* Rows of one segment; at_once: rows that a block takes at a time, at most its warps. */
template <bool IS_BLOCKS>
__global__ void __launch_bounds__(MANY_THREADS, 2) index_best_many(best_job b, int32_t at_once) {
    __shared__ many_room room;
    cu_grid_begin();
    int32_t lo, hi, warp = (int32_t)threadIdx.x / DI_WARP;
    int turn = 0;
    index_chunk_rows(b.job, &lo, &hi);
    for (int32_t end = hi - (int32_t)blockIdx.x * at_once; end > lo; end -= (int32_t)gridDim.x * at_once) {
        int32_t begin = end - at_once > lo ? end - at_once : lo;
        if (warp < end - begin) {
            best_source s = source_of(b, begin + warp);
            if (s.n <= MANY_ITEMS)
                put_many<1, IS_BLOCKS>(b, begin + warp, s, &room, &turn);
        }
        for (int32_t row = begin; row < end; row++) {
            best_source s = source_of(b, row);
            if (s.n > MANY_ITEMS && s.n <= INDEX_SEGMENT)
                put_many<MANY_WARPS, IS_BLOCKS>(b, row, s, &room, &turn);
        }
    }
}

/* A row of any length and any k by one block, which reads the ranks again for every bit: where segments would keep more
 * than a block holds, or there is no scratch to keep it in. n_alone >= 0: a single row of so many scores. */
__global__ void __launch_bounds__(BEST_THREADS, 1) index_best_any(best_job b, int32_t n_alone) {
    __shared__ best_room room;
    cu_grid_begin();
    int turn = 0;
    int32_t lo = 0, hi = 1;
    if (n_alone < 0)
        index_chunk_rows(b.job, &lo, &hi);
    for (int32_t row = lo + (int32_t)blockIdx.x; row < hi; row += (int32_t)gridDim.x) {
        best_source s = {};
        best_sink to = {};
        if (n_alone < 0) {
            s = source_of(b, row);
            to = sink_of(b, row);
        } else {
            s.kind = BEST_SCORES;
            s.from = b.scores;
            s.n = n_alone;
            to.out = b.out;
        }
        uint32_t last = 0, ties = 0, n_taken = 0; /* 0: all that can be chosen */
        for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
            uint32_t count = 0;
            for (int32_t at = (int32_t)threadIdx.x * BEST_WIDTH; at < s.n; at += BEST_THREADS * BEST_WIDTH) {
                uint32_t x[BEST_WIDTH];
                load_items(s, at, x);
                count += reach(x, last | bit);
            }
            if (block_all<BEST_SUM>(count, &room, &turn) >= (uint32_t)b.k)
                last |= bit;
        }
        uint32_t above = 0;
        for (int32_t at = (int32_t)threadIdx.x * BEST_WIDTH; at < s.n && last; at += BEST_THREADS * BEST_WIDTH) {
            uint32_t x[BEST_WIDTH];
            load_items(s, at, x);
            above += reach(x, last + 1);
        }
        above = block_all<BEST_SUM>(above, &room, &turn);
        ties = last ? (uint32_t)b.k - above : 0;
        for (int32_t base = 0; base < s.n; base += BEST_THREADS * BEST_WIDTH) {
            uint32_t x[BEST_WIDTH] = {};
            int32_t at = base + (int32_t)threadIdx.x * BEST_WIDTH;
            if (at < s.n)
                load_items(s, at, x);
            above = block_all<BEST_SUM>(reach(x, last + 1), &room, &turn);
            uint32_t n = take<1, BEST_WIDTH>(x, last, ties, &room, [&](uint32_t place, uint32_t rank, int32_t item) {
                put_item(s, to, n_taken + place, rank, base + item);
            });
            n_taken += n;
            ties -= n - above;
        }
        fill_rest(to.out, n_taken, b.k, -1);
        __syncthreads();
    }
}

/* ---- scratch -----------------------------------------------------------------------------------------------------
 */

struct index_shape {
    int64_t n_rows, n_max;      /* n_max: ranks of a row, at most */
    int64_t k, n_blocks, block; /* the best entries, the best blocks; entries of a block, at least */
    int64_t rank_bytes;
};
struct index_scratch {
    index_plan plan;
    void *ranks;
    uint32_t *kept_rank;
    int32_t *kept_idx;
    int64_t chunk_spans, n_chunks;
};

/* Places for what segments keep of `all` items in rows of n_max at most; a row of s segments has 3 * (s - 1) * k. */
static int64_t places_kept(int64_t all, int64_t n_max, int64_t k) {
    return n_max > INDEX_SEGMENT && k <= BEST_K_MAX ? 3 * (all / INDEX_SEGMENT) * k : 0;
}

/* Cuts scratch for a shape and returns its size; with base NULL it only counts. */
static size_t cut_scratch(const index_shape &s, uint8_t *base, index_scratch *out) {
    int64_t spans = DI_CEIL_DIV(s.n_max, (int64_t)INDEX_SPAN), all = DI_MAX(s.n_rows * spans, (int64_t)1);
    int64_t chunk = DI_MAX(DI_MIN(all, (int64_t)INDEX_CHUNK_BYTES / (INDEX_SPAN * s.rank_bytes)), (int64_t)1);
    out->chunk_spans = chunk;
    out->n_chunks = DI_CEIL_DIV(all, chunk);
    /* A chunk ends with the rows of the group that starts in it. */
    int64_t n_spans = DI_MIN(all, chunk + INDEX_GROUP * spans);
    int64_t n_kept = DI_MAX(places_kept(n_spans * INDEX_SPAN, s.n_max, s.k),
                            places_kept(n_spans * INDEX_SPAN / s.block, DI_CEIL_DIV(s.n_max, s.block), s.n_blocks));
    size_t rows = (size_t)(s.n_rows + 1) * sizeof(int32_t);
    size_t at = 0;
    auto piece = [&](size_t n_bytes) {
        void *p = base ? base + at : NULL;
        at += di_cuda_piece(n_bytes);
        return p;
    };
    int32_t **const arrays[] = {&out->plan.n,          &out->plan.kind,     &out->plan.home,  &out->plan.done,
                                &out->plan.block_done, &out->plan.at,       &out->plan.alone, &out->plan.group,
                                &out->plan.seg,        &out->plan.block_seg};
    for (size_t i = 0; i < DI_COUNT(arrays); i++)
        *arrays[i] = (int32_t *)piece(rows);
    out->ranks = piece((size_t)(n_spans * INDEX_SPAN * s.rank_bytes));
    out->kept_rank = (uint32_t *)piece((size_t)n_kept * sizeof(uint32_t));
    out->kept_idx = (int32_t *)piece((size_t)n_kept * sizeof(int32_t));
    return at;
}

size_t di_cuda_need_index(const di_device *dev, const di_limits *limits) {
    (void)dev;
    size_t most = 0;
    for (int64_t rank_bytes = 2; rank_bytes <= 4; rank_bytes += 2) {
        index_shape s = {limits->rows_max, limits->entries_max, limits->keys_max, limits->candidate_blocks, 8,
                         rank_bytes};
        index_scratch scratch;
        most = DI_MAX(most, cut_scratch(s, NULL, &scratch));
    }
    return most;
}

/* ---- the operation -----------------------------------------------------------------------------------------------
 */

static bool fits(const di_device *dev, const di_index_select_args *a) {
    const di_limits *limits = &dev->limits;
    const di_paged *p = &a->keys;
    int64_t n_q = (int64_t)a->n_heads * a->dim;
    if (!a->rows || a->rows->n_rows < 0 || a->n_heads < 1 || a->dim < 32 || a->dim % 32 || a->ratio < 1 ||
        !di_cuda_is_real(&a->q) || !di_cuda_is_real(&a->w) || a->q.n_rows < a->rows->n_rows ||
        a->w.n_rows < a->rows->n_rows || a->q.n_cols != n_q || a->w.n_cols != a->n_heads)
        return false;
    if (!p->pages || p->per_block < 1 || p->n_values != a->dim || a->topk < 0 || !a->idx ||
        a->n_heads > limits->index_heads || a->dim > limits->index_dim ||
        (size_t)(n_q + a->n_heads) * sizeof(float) > SCORE_BYTES_MAX)
        return false;
    return !(a->cand_in || a->cand_out) || (a->n_cand >= 1 && a->cand_block >= 8 && a->cand_block % 8 == 0);
}

/* n_max: items of a row, at most. */
static void run_best(const di_device *dev, const best_job &b, int64_t n_max, cudaStream_t stream) {
    int64_t n_seg = b.job.n_rows * DI_MAX(DI_CEIL_DIV(n_max, (int64_t)INDEX_SEGMENT), (int64_t)1);
    if (n_max > INDEX_SEGMENT && b.k > BEST_K_MAX) {
        DI_LAUNCH_PDL(index_best_any, (unsigned)DI_MIN(b.job.n_rows, dev->n_sms), BEST_THREADS, 0, stream, b, -1);
        return;
    }
    best_job rest = b;
    if (b.is_half && b.job.n_rows > dev->n_sms) {
        int32_t n_blocks = 2 * dev->n_sms, at_once = DI_MIN(DI_CEIL_DIV(b.job.n_rows, n_blocks), (int32_t)MANY_WARPS);
        unsigned grid = (unsigned)DI_MIN(DI_CEIL_DIV(b.job.n_rows, at_once), n_blocks);
        if (b.kind == BEST_BLOCKS)
            DI_LAUNCH_PDL(index_best_many<true>, grid, MANY_THREADS, 0, stream, b, at_once);
        else
            DI_LAUNCH_PDL(index_best_many<false>, grid, MANY_THREADS, 0, stream, b, at_once);
        rest.is_rest = true;
        if (n_max <= INDEX_SEGMENT)
            return;
    }
    DI_LAUNCH_PDL(index_best, (unsigned)DI_MIN(n_seg, (int64_t)dev->n_sms), BEST_THREADS, 0, stream, rest);
}

di_status di_cuda_index_select(di_stream *stream, const di_index_select_args *a) {
    const di_device *dev = stream->dev;
    if (!fits(dev, a))
        return DI_ERR_SHAPE;
    if (a->rows->n_rows == 0)
        return DI_OK;
    /* Ranks of 16 bits are for bf16 scores, and the fast kernels don't mix lists in and out. */
    bool is_fast = dev->arch == DI_CUDA_SM90 && di_cuda_index_is_sm90(a) && !(a->cand_in && a->cand_out);
    int64_t n_max = DI_MIN(dev->limits.entries_max, a->rows->blocks_stride * a->keys.per_block);
    if (a->scores)
        n_max = DI_MIN(n_max, a->scores_stride);
    n_max = DI_MAX(DI_MIN(n_max, (int64_t)INT32_MAX - INDEX_SEGMENT), (int64_t)0);
    int64_t rank_max =
        a->cand_in && !a->cand_out ? DI_MIN(n_max, DI_MAX((int64_t)a->n_cand * a->cand_block, (int64_t)1)) : n_max;
    index_shape shape = {
        a->rows->n_rows, rank_max, a->topk, a->cand_out ? a->n_cand : 0, a->cand_out ? a->cand_block : 8,
        is_fast ? 2 : 4};
    index_scratch scratch;
    uint8_t *base = (uint8_t *)di_cuda_scratch(stream, cut_scratch(shape, NULL, &scratch));
    if (!base || shape.n_rows * DI_CEIL_DIV(n_max, (int64_t)INDEX_SPAN) > INT32_MAX)
        return DI_ERR_SHAPE;
    cut_scratch(shape, base, &scratch);

    index_job job = {};
    job.pos = a->rows->pos;
    job.seq = a->rows->seq;
    job.blocks = a->rows->blocks;
    job.blocks_stride = a->rows->blocks_stride;
    job.n_rows = a->rows->n_rows;
    job.n_heads = a->n_heads;
    job.dim = a->dim;
    job.ratio = a->ratio;
    job.n_max = (int32_t)n_max;
    job.q = a->q;
    job.w = a->w;
    job.keys = a->keys;
    job.round_bf16 = a->round_bf16;
    job.list = a->cand_in;
    job.n_list = a->n_cand;
    job.block = a->cand_block;
    job.with_blocks = a->cand_out;
    job.with_groups = is_fast && a->rows->n_rows > a->rows->n_seqs;
    job.scores = a->scores;
    job.scores_stride = a->scores_stride;
    job.plan = scratch.plan;
    job.ranks = scratch.ranks;
    job.n_chunks = (int32_t)scratch.n_chunks;
    job.chunk_spans = (int32_t)scratch.chunk_spans;

    bool is_planned = is_fast && di_cuda_index_plans(&job); /* with the scores */
    if (!is_planned && job.n_rows <= DI_WARP * INDEX_GROUP)
        DI_LAUNCH_PDL((index_plan_rows<DI_WARP>), 1, DI_WARP, 0, stream->stream, job);
    else if (!is_planned)
        DI_LAUNCH_PDL((index_plan_rows<PLAN_THREADS>), 1, PLAN_THREADS, 0, stream->stream, job);
    if (a->scores)
        DI_LAUNCH_PDL(index_no_scores, 8 * dev->n_sms, 256, 0, stream->stream, a->scores,
                      job.n_rows * a->scores_stride);
    best_job best = {};
    best.is_half = is_fast;
    best.rank = scratch.kept_rank;
    best.idx = scratch.kept_idx;
    for (job.chunk = 0; job.chunk < job.n_chunks; job.chunk++) {
        int64_t n_spans = DI_MAX(DI_CEIL_DIV(rank_max, (int64_t)INDEX_SPAN) * job.n_rows, (int64_t)1);
        if (is_fast)
            di_cuda_index_scores_sm90(&job, dev->n_sms, stream->stream);
        else
            DI_LAUNCH_PDL(index_scores, (unsigned)DI_MIN(n_spans, 8 * (int64_t)dev->n_sms), SCORE_THREADS,
                          (size_t)(job.n_heads * job.dim + job.n_heads) * sizeof(float), stream->stream, job);
        best.job = job;
        if (a->topk > 0) {
            best.kind = BEST_ENTRIES;
            best.k = a->topk;
            best.out = a->idx;
            run_best(dev, best, rank_max, stream->stream);
        }
        if (a->cand_out) {
            best.kind = BEST_BLOCKS;
            best.k = a->n_cand;
            best.out = a->cand_out;
            run_best(dev, best, DI_CEIL_DIV(n_max, (int64_t)a->cand_block), stream->stream);
        }
    }
    return DI_OK;
}

void di_cuda_topk(di_device *dev, const float *scores, int64_t n, int32_t k, int32_t *idx) {
    if (k < 1 || n < 0 || n > INT32_MAX - INDEX_SEGMENT)
        return;
    (void)cudaSetDevice(dev->ordinal);
    best_job best = {};
    best.kind = BEST_SCORES;
    best.k = k;
    best.out = idx;
    best.scores = scores;
    /* A plan of one row without ranks. */
    index_scratch scratch;
    index_shape shape = {1, n, k, 0, 8, 2};
    uint8_t *base = cut_scratch(shape, NULL, &scratch) <= dev->scratch_bytes ? dev->scratch : NULL;
    if (base && (n <= INDEX_SEGMENT || k <= BEST_K_MAX)) {
        cut_scratch(shape, base, &scratch);
        best.job.n_rows = best.job.n_chunks = 1;
        best.job.plan = scratch.plan;
        best.rank = scratch.kept_rank;
        best.idx = scratch.kept_idx;
        DI_LAUNCH_PDL(index_plan_one, 1, 1, 0, dev->copies, scratch.plan, (int32_t)n);
        run_best(dev, best, n, dev->copies);
    } else {
        DI_LAUNCH_PDL(index_best_any, 1, BEST_THREADS, 0, dev->copies, best, (int32_t)n);
    }
    (void)cudaStreamSynchronize(dev->copies);
}
