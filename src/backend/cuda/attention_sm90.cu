/* Core attention on Hopper, faithful numerics: 64 heads of 512 values over gathered FP8 and FP4 keys.
 *
 * A block takes row after row: the 64 heads of a row are the 64 rows of a warpgroup multiply. Keys go through in tiles
 * of 64, window first, then the listed entries; four warpgroups, each with one job, hand tiles on by barriers:
 *
 *   loader    gathers the records of a tile, widens them to bf16, which is exact, and writes them as a [64 keys, 512]
 *             tile that both multiplies read: K-major for the scores, MN-major for the values     tiles: two in turn
 *   scorer    S = Q K^T, running maximum, P = exp2(S - maximum) in bf16; keeps the denominators    P: two in turn
 *   adders    two: O = O * rescale + P V, 256 of the 512 values each, in registers; at the end of a row division,
 *             inverse rotation and store, while the loader and the scorer are at the next row
 *
 *        loader --key_full--> scorer --p_full--> adders --key_free--> loader
 *                               \------sum_full----/ \---sum_free--> scorer
 *
 * Keys are kept as 2^-16 times their value, so that a power of two of the formats' full range is one bf16 factor; the
 * scale of the scores and the last division take it back. Nothing else is rounded than in the reference but P, to bf16
 * (relative 2^-9), and sums and exponentials in their last bits: an output is within 2^-8 * sum(p |v|) / sum(p) of the
 * reference before its own rounding. The running maximum starts as the sink, whose weight is the denominator's first
 * term, so that a row without keys gives 0 / 1.
 *
 * The order of a row's sums depends on the number of its window keys and on its list alone. Codes that are NaN are
 * taken as the number that continues the format. Source: model.md 3.8, 5.1. */
#include "attention_sm90.cuh"

enum {
    THREADS = 4 * GROUP,
    TOPK_MAX = 2048, /* lists of two rows beside the tiles */
    META = 5,
    AT_ONCE = 8, /* keys of which a warp of the loader holds the records */
};
enum { SCORER, ADDER_LOW, ADDER_HIGH, LOADER }; /* warpgroups */
enum { BAR_SCORER = 1, BAR_LOADER };            /* named barriers */

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

enum { Q_AT = 0, KEY_AT = TILE, P_AT = 3 * TILE, CONTROL_AT = P_AT + 2 * PANEL, LIST_AT = CONTROL_AT + 1024 };

typedef struct control {
    uint64_t key_full[2], key_free[2], p_full[2], sum_full, sum_free;
    float rescale[2][HEADS]; /* of the sums so far, by the tile's new maximum */
    float factor[HEADS];     /* of the row's sums at its end */
    uint16_t there[2][4];    /* which keys of the tile are there, 16 by each warp of the loader */
    int32_t is_last[2];      /* of its row */
    int32_t meta[2][META];   /* of a row: lo, hi, row0, pos0, slot; by turns */
    int32_t n_listed[2][4];  /* listed entries up to the last one that is there, as each warp of the loader saw them */
} control;
static_assert(sizeof(control) <= LIST_AT - CONTROL_AT, "control block");

/* A listed entry in shared memory: block << shift | entry of the block; -1 where there is none. */
__device__ static inline int32_t *list_of(uint8_t *smem, int turn, int32_t topk) {
    return (int32_t *)(smem + LIST_AT) + turn * topk;
}

/* ---- loader ------------------------------------------------------------------------------------------------------ */

typedef struct loader {
    const attention_job *job;
    const shape *z;
    uint8_t *smem;
    control *c;
    int thread, warp, lane;
    uint32_t tile; /* tiles so far */
} loader;

/* Leaves what the loader must know of a row to find its window keys. All threads of the loader. */
__device__ static void prepare_window(const loader &l, int32_t row, int turn) {
    const attention_job &job = *l.job;
    int32_t seq = job.rows.seq[row], lo = job.rows.win_lo[row], hi = job.rows.win_hi[row];
    int32_t row0 = job.rows.row0[seq], pos0 = job.rows.pos0[seq], slot = job.rows.slot[seq];
    if (l.thread == 0) {
        int32_t *meta = l.c->meta[turn];
        meta[0] = lo;
        meta[1] = hi;
        meta[2] = row0;
        meta[3] = pos0;
        meta[4] = slot;
    }
    cu_bar_sync(BAR_LOADER, GROUP);
}

/* Likewise for the listed entries. */
__device__ static void prepare_list(const loader &l, int32_t row, int turn) {
    const attention_job &job = *l.job;
    const int32_t *idx = job.a.idx + (int64_t)row * l.z->topk;
    const int32_t *blocks = job.rows.blocks + job.rows.seq[row] * job.rows.blocks_stride;
    int32_t *list = list_of(l.smem, turn, l.z->topk), shift = l.z->shift, per_block = job.a.main.per_block, n = 0;
    cu_bar_sync(BAR_LOADER, GROUP); /* nobody is at the row before, whose list this was */
    for (int32_t t0 = l.thread; t0 < l.z->topk; t0 += 4 * GROUP) {
        int32_t entry[4], block[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            entry[i] = t0 + i * GROUP < l.z->topk ? idx[t0 + i * GROUP] : -1;
#pragma unroll
        for (int i = 0; i < 4; i++)
            block[i] = entry[i] >= 0 ? blocks[entry[i] / per_block] : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t t = t0 + i * GROUP;
            if (t < l.z->topk)
                list[t] = entry[i] >= 0 ? block[i] << shift | entry[i] % per_block : -1;
            if (entry[i] >= 0)
                n = t + 1;
        }
    }
    n = __reduce_max_sync(0xFFFFFFFFu, n);
    if (l.lane == 0)
        l.c->n_listed[turn][l.warp] = n;
    cu_bar_sync(BAR_LOADER, GROUP);
}

__device__ static inline int32_t n_listed(const loader &l, int turn) {
    const int32_t *n = l.c->n_listed[turn];
    return max(max(n[0], n[1]), max(n[2], n[3]));
}

/* Fills n tiles. A warp has 16 keys of each: where(tile, key of the tile) gives a record or NULL, asked by the first 16
 * lanes. is_last(tile) says of a tile whether it ends its row, after(tile) is called between the tile and the next.
 * Records are on their way for the time of half a tile: the second half's while the first is widened, the next tile's
 * from the fence on, which they would hold up. */
template <int FORMAT, class WHERE, class IS_LAST, class AFTER>
__device__ static inline void fill_tiles(loader &l, int32_t n, WHERE where, IS_LAST is_last, AFTER after) {
    const uint8_t *none = (const uint8_t *)attention_no_record;
    raw_key<FORMAT> raw[AT_ONCE];
    int mine = l.warp * 16 + (l.lane & 15);
    const uint8_t *record = where(0, mine);
    uint32_t there = __ballot_sync(0xFFFFFFFFu, record != NULL);
    record = record ? record : none;
    auto load = [&](int u, int k) {
        raw[u].load((const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)record, k), l.lane);
    };
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
        load(u, u);
    for (int32_t t = 0; t < n; t++, l.tile++) {
        int buf = l.tile & 1;
        uint8_t *at = l.smem + KEY_AT + buf * TILE + (l.lane >> 3) * PANEL + l.warp * 16 * 128;
        auto widen = [&](int u, int k) {
            uint4 low, high;
            uint32_t chunk = ((l.lane & 7) ^ (k & 7)) * 16;
            raw[u].widen(l.lane, low, high);
            *(uint4 *)(at + k * 128 + chunk) = low;
            *(uint4 *)(at + 4 * PANEL + k * 128 + chunk) = high;
        };
        const uint8_t *next = t + 1 < n ? where(t + 1, mine) : NULL;
        uint32_t next_there = __ballot_sync(0xFFFFFFFFu, next != NULL);
        cu_mbar_wait(&l.c->key_free[buf], (l.tile >> 1 & 1) ^ 1);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            widen(u, u);
            load(u, u + AT_ONCE);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            widen(u, u + AT_ONCE);
        if (l.lane == 0)
            l.c->there[buf][l.warp] = (uint16_t)there;
        if (l.thread == 0)
            l.c->is_last[buf] = is_last(t);
        cu_fence_async();
        __syncwarp();
        if (l.lane == 0)
            cu_mbar_arrive(&l.c->key_full[buf]);
        record = next ? next : none;
        there = next_there;
        if (t + 1 < n) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                load(u, u);
        }
        after(t);
    }
}

template <int FORMAT> __device__ static inline void load_rows(loader &l) {
    const attention_job &job = *l.job;
    const di_attention_args &a = job.a;
    bool has_list = false; /* of the row, or of the one that comes next */
    int turn = 0;
    prepare_window(l, blockIdx.x, turn);
    for (int32_t row = blockIdx.x; row < l.z->n_rows; row += gridDim.x, turn ^= 1) {
        const int32_t *meta = l.c->meta[turn];
        int32_t lo = meta[0], hi = max(meta[1], lo), row0 = meta[2], pos0 = meta[3], slot = meta[4];
        int32_t n_window = (hi - lo + KEYS - 1) / KEYS, n_main = 0;
        auto list_once = [&]() {
            if (l.z->topk && !has_list)
                prepare_list(l, row, turn);
            has_list = true;
            n_main = l.z->topk ? (n_listed(l, turn) + KEYS - 1) / KEYS : 0;
        };
        /* The first row's list is made behind the first window tile, which needs no list. */
        if (n_window < 2 || has_list)
            list_once();
        if (n_window + n_main == 0 && has_list)
            n_window = 1; /* no key at all: a tile of none */
        fill_tiles<DI_KV_FP8>(
            l, n_window,
            [&](int32_t t, int k) -> const uint8_t * {
                int32_t pos = lo + t * KEYS + k;
                return pos < hi ? attention_window_at(a, WINDOW_BYTES, row0, pos0, slot, pos) : NULL;
            },
            [&](int32_t t) { return t + 1 == n_window && n_main == 0; },
            [&](int32_t t) {
                if (t == 0 && !has_list)
                    list_once();
            });
        int32_t next_row = row + gridDim.x;
        bool is_next_ready = next_row >= l.z->n_rows;
        auto next_once = [&]() {
            if (!is_next_ready) {
                prepare_window(l, next_row, turn ^ 1);
                if (l.z->topk)
                    prepare_list(l, next_row, turn ^ 1);
                is_next_ready = true;
            }
        };
        if (n_main) {
            const int32_t *list = list_of(l.smem, turn, l.z->topk);
            fill_tiles<FORMAT>(
                l, n_main,
                [&](int32_t t, int k) -> const uint8_t * {
                    int32_t i = t * KEYS + k, entry = i < l.z->topk ? list[i] : -1;
                    if (entry < 0)
                        return NULL;
                    return a.main.pages + (size_t)(entry >> l.z->shift) * a.main.page_bytes + a.main.offset +
                           (entry & ((1 << l.z->shift) - 1)) * raw_key<FORMAT>::BYTES;
                },
                [&](int32_t t) { return t + 1 == n_main; },
                [&](int32_t t) {
                    if (t == 0)
                        next_once();
                });
        }
        next_once();
    }
}

/* ---- scorer ------------------------------------------------------------------------------------------------------ */

__device__ static inline void score_rows(const attention_job &job, const shape &z, uint8_t *smem, control *c,
                                         int thread) {
    int warp = thread / DI_WARP, lane = thread % DI_WARP, quad = lane & 3, head = warp * 16 + lane / 4;
    uint32_t q_at = cu_smem(smem + Q_AT), key_at = cu_smem(smem + KEY_AT), tile = 0, turn = 0;
    load_q(job, blockIdx.x, q_at, thread, GROUP);
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x, turn++) {
        float most[2] = {first_most(job, head), first_most(job, head + 8)}, sum[2] = {first_sum(quad), first_sum(quad)};
        cu_cp_wait<0>();
        cu_fence_async();
        cu_bar_sync(BAR_SCORER, GROUP);
        for (bool is_last = false; !is_last; tile++) {
            int buf = tile & 1;
            float s[32];
            cu_mbar_wait(&c->key_full[buf], tile >> 1 & 1);
            is_last = c->is_last[buf];
            multiply_scores(s, q_at, key_at + buf * TILE);
            if (is_last && row + gridDim.x < z.n_rows) { /* all warps are through with Q */
                cu_bar_sync(BAR_SCORER, GROUP);
                load_q(job, row + gridDim.x, q_at, thread, GROUP);
            }
            mask_scores(s, *(const uint64_t *)c->there[buf], quad);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float now = fmaxf(most[r], top_score(s, r) * z.scale2), rescale = cu_exp2_fast(most[r] - now);
                most[r] = now;
                if (quad == 0)
                    c->rescale[buf][head + 8 * r] = rescale;
                float part = put_probabilities(s, r, z.scale2, now, smem + P_AT + buf * PANEL, head, quad);
                sum[r] = fmaf(sum[r], rescale, part);
            }
            cu_fence_async();
            __syncwarp();
            if (lane == 0)
                cu_mbar_arrive(&c->p_full[buf]);
        }
        cu_mbar_wait(&c->sum_free, (turn & 1) ^ 1);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = last_factor(sum[r]);
            if (quad == 0)
                c->factor[head + 8 * r] = factor;
        }
        __syncwarp();
        if (lane == 0)
            cu_mbar_arrive(&c->sum_full);
    }
}

/* ---- adders ------------------------------------------------------------------------------------------------------ */

__device__ static inline void add_rows(const attention_job &job, const shape &z, uint8_t *smem, control *c, int thread,
                                       int half) {
    int warp = thread / DI_WARP, lane = thread % DI_WARP, quad = lane & 3, head = warp * 16 + lane / 4;
    uint32_t value_at = cu_smem(smem + KEY_AT) + half * 4 * PANEL, tile = 0, turn = 0;
    uint32_t p_at = cu_smem(smem + P_AT);
    float o[2][64]; /* 128 columns each: two multiplies, since one of 256 takes more registers than four groups have */
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x, turn++) {
        bool is_first = true;
        for (bool is_last = false; !is_last; tile++, is_first = false) {
            int buf = tile & 1;
            cu_mbar_wait(&c->key_full[buf], tile >> 1 & 1);
            is_last = c->is_last[buf];
            cu_mbar_wait(&c->p_full[buf], tile >> 1 & 1);
            float low = c->rescale[buf][head], high = c->rescale[buf][head + 8];
            /* Once the maximum has settled nothing is to be done. */
            if (!is_first && __any_sync(0xFFFFFFFFu, low != 1.0f || high != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 128; i += 4) {
                    float *v = o[i / 64] + i % 64;
                    v[0] *= low;
                    v[1] *= low;
                    v[2] *= high;
                    v[3] *= high;
                }
            }
            uint64_t p_desc = cu_desc_k128(__shfl_sync(0xFFFFFFFFu, p_at + buf * PANEL, 0));
            uint64_t value_desc = cu_desc_mn128(__shfl_sync(0xFFFFFFFFu, value_at + buf * TILE, 0), KEYS);
            cu_wgmma_pin(o[0]);
            cu_wgmma_pin(o[1]);
            cu_wgmma_fence();
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    cu_wgmma_bf16_ss<CU_MN_MAJOR, CU_K_MAJOR>(o[i], cu_desc_add(p_desc, k * 32),
                                                              cu_desc_add(value_desc, i * 2 * PANEL + k * 2048),
                                                              k > 0 || !is_first);
            }
            cu_wgmma_commit();
            cu_wgmma_wait<0>();
            cu_wgmma_pin(o[0]);
            cu_wgmma_pin(o[1]);
            __syncwarp();
            if (lane == 0)
                cu_mbar_arrive(&c->key_free[buf]);
        }
        cu_mbar_wait(&c->sum_full, turn & 1);
        float low = c->factor[head], high = c->factor[head + 8];
        __syncwarp();
        if (lane == 0)
            cu_mbar_arrive(&c->sum_free);
        store_columns(job, row, head, half * 256, quad, o[0], low, high);
        store_columns(job, row, head, half * 256 + 128, quad, o[1], low, high);
    }
}

/* ---- kernel ------------------------------------------------------------------------------------------------------ */

template <int FORMAT> __global__ void __launch_bounds__(THREADS, 1) attention_tiles(attention_job job, shape z) {
    DI_DYN_SHARED(uint8_t, smem);
    control *c = (control *)(smem + CONTROL_AT);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            cu_mbar_init(&c->key_full[i], 4); /* warps of the loader */
            cu_mbar_init(&c->key_free[i], 8); /* of the adders */
            cu_mbar_init(&c->p_full[i], 4);   /* of the scorer */
        }
        cu_mbar_init(&c->sum_full, 4);
        cu_mbar_init(&c->sum_free, 8);
        cu_fence_mbar_init();
    }
    __syncthreads();
    int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    if (group == LOADER) {
        cu_regs_give<96>();
        loader l = {&job, &z, smem, c, thread, thread / DI_WARP, thread % DI_WARP, 0};
        load_rows<FORMAT>(l);
    } else if (group == SCORER) {
        cu_regs_give<96>();
        score_rows(job, z, smem, c, thread);
    } else {
        cu_regs_take<160>();
        add_rows(job, z, smem, c, thread, group - ADDER_LOW);
    }
}

/* ---- on the host ------------------------------------------------------------------------------------------------- */

static bool is_aligned(const void *p, uint64_t more, uint64_t step) {
    return ((uintptr_t)p + more) % 16 == 0 && step % 16 == 0;
}

bool di_cuda_attention_sm90_fits(const di_stream *stream, const di_attention_args *a) {
    (void)stream;
    if (a->n_heads != HEADS || a->head_dim != DIM || a->q.dtype != DI_BF16 || a->out.dtype != DI_BF16 ||
        a->win_format != DI_KV_FP8 || !(a->scale > 0.0f) || !is_aligned(a->q.data, 0, (uint64_t)a->q.stride * 2) ||
        !is_aligned(a->out.data, 0, (uint64_t)a->out.stride * 2) || !is_aligned(a->records, 0, 0) ||
        !is_aligned(a->ring.slots, a->ring.offset, a->ring.slot_bytes | a->ring.record_bytes))
        return false;
    if (!a->idx || !a->topk)
        return true;
    const di_paged *p = &a->main;
    return (p->format == DI_KV_FP4 || p->format == DI_KV_FP8) && a->topk <= TOPK_MAX && p->per_block <= 1 << 16 &&
           is_aligned(p->pages, p->offset, p->page_bytes);
}

size_t di_cuda_attention_sm90_scratch(const di_device *dev, const di_limits *limits) {
    return dev->arch == DI_CUDA_SM90 && limits->n_heads >= HEADS && limits->head_dim >= DIM ? attention_few_scratch()
                                                                                            : 0;
}

di_status di_cuda_attention_sm90(di_stream *stream, const di_attention_args *args) {
    int64_t keys_max = stream->dev->limits.keys_max;
    int32_t n_rows = args->rows->n_rows, topk = args->idx ? args->topk : 0;
    attention_job job = {*args, *args->rows, keys_max};
    shape z = {args->scale * 0x1.715476p0f * 65536.0f, 0, n_rows, topk, 0};
    while (1 << z.shift < args->main.per_block)
        z.shift++;
    /* A window reaches no further back than the ring, and no further on than this forward. */
    int64_t window = DI_MIN(DI_MAX(keys_max - topk, 0), (int64_t)args->ring.ring_len + n_rows);
    z.tiles = (int32_t)DI_MAX(DI_CEIL_DIV(window, KEYS) + DI_CEIL_DIV(topk, KEYS), (int64_t)1);
    void *scratch = di_cuda_scratch(stream, attention_few_scratch());
    if (scratch && attention_few_fits(stream, &z)) {
        attention_few_launch(stream, &job, &z, scratch);
        return DI_OK;
    }
    unsigned n_blocks = (unsigned)DI_MIN(n_rows, stream->dev->n_sms);
    size_t smem = LIST_AT + 2 * (size_t)topk * sizeof(int32_t);
    if (topk && args->main.format == DI_KV_FP8)
        DI_LAUNCH((attention_tiles<DI_KV_FP8>), n_blocks, THREADS, smem, stream->stream, job, z);
    else
        DI_LAUNCH((attention_tiles<DI_KV_FP4>), n_blocks, THREADS, smem, stream->stream, job, z);
    return DI_OK;
}
