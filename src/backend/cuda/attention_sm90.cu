/* Core attention on Hopper, faithful numerics: 64 heads of 512 values over gathered FP8 and FP4 keys.
 *
 * A block takes row after row: the 64 heads of a row are the 64 rows of a warpgroup multiply. Keys go through in tiles
 * of 64, window first, then the listed entries; five warpgroups, each with one job, hand them on by barriers:
 *
 *   feeder    finds the records of a tile and has them copied, as they are, to a ring of units, 16 keys of FP4 or 8 of
 *             FP8; so no register waits for memory                                               units: four in turn
 *   widener   widens them to bf16, which is exact, and writes them as a [64 keys, 512] tile that both multiplies read:
 *             K-major for the scores, MN-major for the values                                    tiles: two in turn
 *   scorer    S = Q K^T, running maximum, P = exp2(S - maximum) in bf16; keeps the denominators    P: two in turn
 *   adders    two: O = O * rescale + P V, 256 of the 512 values each, in registers; at the end of a row division,
 *             inverse rotation and store, while the others are at the next row
 *
 *   feeder --raw_full--> widener --BAR_KEY--> scorer --BAR_MOST, BAR_P--> adders --key_free (16 keys)--> widener
 *      \---BAR_RAW_FREE---/                     \--------sum_full---------/   \---sum_free--> scorer
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

enum { THREADS = 5 * GROUP };
enum { SCORER, ADDER_LOW, ADDER_HIGH, WIDENER, FEEDER }; /* warpgroups */
/* Named barriers, most by turns: a warp that waits there issues nothing, one at a barrier in shared memory keeps
 * asking. */
enum { BAR_SCORER = 1, BAR_MOST = 2, BAR_P = 4, BAR_KEY = 6, BAR_RAW_FREE = 8 };

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

enum {
    UNITS = 4,
    UNIT_BYTES = 16 * raw_key<DI_KV_FP4>::BYTES, /* or 8 keys of FP8 */
    QUARTERS = KEYS / 16,                        /* of a tile: what one step of the values' multiply takes */
    INFOS = 4, /* the feeder is up to two tiles ahead of the widener, this two ahead of the adders */
};
enum {
    Q_AT = 0,
    KEY_AT = TILE,
    P_AT = 3 * TILE,
    RAW_AT = P_AT + 2 * PANEL,
    CONTROL_AT = RAW_AT + UNITS * UNIT_BYTES,
    SMEM = CONTROL_AT + 1024,
};
static_assert(8 * raw_key<DI_KV_FP8>::BYTES <= UNIT_BYTES && SMEM <= 227 * 1024, "shared memory of a block");

typedef struct control {
    uint64_t raw_full[UNITS], key_free[2][QUARTERS], q_full, sum_full, sum_free;
    struct {
        uint8_t there[8] __align__(8); /* which keys of the tile are there, a bit each */
        int32_t is_window;
        int32_t is_last;     /* of its row */
    } info[INFOS];           /* of tiles, by turns */
    float rescale[2][HEADS]; /* of the sums so far, by the tile's new maximum */
    float factor[HEADS];     /* of the row's sums at its end */
} control;
static_assert(sizeof(control) <= SMEM - CONTROL_AT, "control block");

/* ---- feeder ------------------------------------------------------------------------------------------------------
 * Each warp has one place of the ring: a quarter of every tile. */

/* Tiles of a row's list: up to the last entry that is there. All lanes of a warp. */
__device__ static inline int32_t listed_tiles(const int32_t *idx, int32_t topk, int lane) {
    enum { AT_ONCE = 8 };
    int32_t n = 0;
    for (int32_t t0 = lane; t0 < topk; t0 += AT_ONCE * DI_WARP) {
        int32_t entry[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            entry[i] = t0 + i * DI_WARP < topk ? idx[t0 + i * DI_WARP] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            n = entry[i] >= 0 ? t0 + i * DI_WARP + 1 : n;
    }
    return ((int32_t)__reduce_max_sync(0xFFFFFFFFu, n) + KEYS - 1) / KEYS;
}

/* Keys of a unit. A tile has four or eight, of which each warp of the feeder brings one or two. */
template <int FORMAT> struct unit_of {
    enum { N = FORMAT == DI_KV_FP4 ? 16 : 8, EACH = 16 / N };
};

/* Brings a unit's records to the warp's place of the ring, 16 bytes a lane at a time. record: of key lane % N of the
 * unit, or NULL; there: the unit's bits. turn: units of the warp so far. */
template <int FORMAT>
__device__ static inline void feed_unit(uint8_t *smem, control *c, uint32_t &turn, const uint8_t *record,
                                        uint8_t *there, int warp, int lane) {
    enum { N = unit_of<FORMAT>::N, LANES = DI_WARP / N, PARTS = raw_key<FORMAT>::BYTES / 16 };
    uint32_t is_there = __ballot_sync(0xFFFFFFFFu, record != NULL);
    if (lane == 0) {
        there[0] = (uint8_t)is_there;
        if (N > 8)
            there[1] = (uint8_t)(is_there >> 8);
    }
    const uint8_t *from = (record ? record : (const uint8_t *)attention_no_record) + lane / N * 16;
    uint32_t to = cu_smem(smem + RAW_AT + warp * UNIT_BYTES) + lane % N * raw_key<FORMAT>::BYTES + lane / N * 16;
    if (turn++)
        cu_bar_sync(BAR_RAW_FREE + warp, GROUP + DI_WARP);
#pragma unroll
    for (int i = 0; i < PARTS; i += LANES) {
        if (i + LANES <= PARTS || i + lane / N < PARTS)
            cu_cp16(to + i * 16, from + i * 16);
    }
    cu_mbar_arrive_cp(&c->raw_full[warp]);
    if (lane == 0)
        cu_mbar_arrive(&c->raw_full[warp]); /* for what is in c->info */
}

template <int FORMAT>
__device__ static inline void feed_rows(const attention_job &job, const shape &z, uint8_t *smem, control *c,
                                        int thread) {
    enum { N = unit_of<FORMAT>::N, U = unit_of<FORMAT>::EACH };
    const di_attention_args &a = job.a;
    int warp = thread / DI_WARP, lane = thread % DI_WARP;
    uint32_t turn = 0, tile = 0;
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x) {
        const int32_t *idx = a.idx + (int64_t)row * z.topk;
        int32_t seq = job.rows.seq[row], lo = job.rows.win_lo[row], hi = max(job.rows.win_hi[row], lo);
        const int32_t *blocks = job.rows.blocks + seq * job.rows.blocks_stride;
        int32_t row0 = job.rows.row0[seq], pos0 = job.rows.pos0[seq], slot = job.rows.slot[seq];
        int32_t n_window = (hi - lo + KEYS - 1) / KEYS, n_main = 0;
        /* Of the list's next unit, on their way while the warp waits for its place. */
        int32_t i = warp * N + lane % N, entry = i < z.topk ? idx[i] : -1;
        if (n_window < 2) {
            n_main = listed_tiles(idx, z.topk, lane);
            n_window += n_window + n_main == 0; /* no key at all: a tile of none */
        }
        for (int32_t u = 0; u < 2 * n_window; u++) {
            int32_t pos = lo + u * 32 + warp * 8 + lane % 8;
            auto &info = c->info[tile % INFOS];
            if (thread == 0 && u % 2 == 0) {
                info.is_window = 1;
                info.is_last = u / 2 + 1 == n_window && n_main == 0;
            }
            feed_unit<DI_KV_FP8>(smem, c, turn,
                                 pos < hi ? attention_window_at(a, WINDOW_BYTES, row0, pos0, slot, pos) : NULL,
                                 info.there + u % 2 * 4 + warp, warp, lane);
            if (u == 0 && thread * 32 < a.n_freq) { /* what the adders' store will want */
                cu_prefetch_l2(a.cos + (int64_t)row * a.n_freq + thread * 32);
                cu_prefetch_l2(a.sin + (int64_t)row * a.n_freq + thread * 32);
            }
            if (u == 0 && n_window > 1) /* so late, that the first tile needn't wait for it */
                n_main = listed_tiles(idx, z.topk, lane);
            tile += u % 2;
        }
        int32_t block = entry >= 0 ? blocks[entry / a.main.per_block] : 0;
        for (int32_t u = 0; u < U * n_main; u++) {
            const uint8_t *record = NULL;
            if (entry >= 0)
                record = a.main.pages + a.main.offset + (size_t)block * a.main.page_bytes +
                         entry % a.main.per_block * (int)raw_key<FORMAT>::BYTES;
            i += KEYS / U;
            entry = i < z.topk ? idx[i] : -1;
            auto &info = c->info[tile % INFOS];
            if (thread == 0 && u % U == 0) {
                info.is_window = 0;
                info.is_last = u / U + 1 == n_main;
            }
            feed_unit<FORMAT>(smem, c, turn, record, info.there + (U == 1 ? warp * 2 : u % U * 4 + warp), warp, lane);
            block = entry >= 0 ? blocks[entry / a.main.per_block] : 0;
            tile += u % U == U - 1;
        }
    }
    if (turn) /* the widener's last word */
        cu_bar_sync(BAR_RAW_FREE + warp, GROUP + DI_WARP);
}

/* ---- widener ----------------------------------------------------------------------------------------------------- */

/* A quarter of a tile at a time, four keys of it to a warp: of one unit of FP4, of two of FP8. */
template <int FORMAT>
__device__ static inline void widen_tile(uint8_t *smem, control *c, uint32_t tile, uint32_t &unit, int warp, int lane) {
    enum {
        BYTES = raw_key<FORMAT>::BYTES,
        N = unit_of<FORMAT>::N,
        EACH = N / 4,   /* keys of a unit that a warp widens */
        STEPS = 16 / N, /* units of a quarter */
    };
    int buf = tile & 1, other = lane & 4 ? -16 : 16; /* from the first chunk to the second, of even keys */
    const uint8_t *from = smem + RAW_AT + warp * EACH * BYTES;
    uint8_t *to[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        to[i] = smem + KEY_AT + buf * TILE + key_at(lane, warp * EACH + i);
#pragma unroll 1
    for (int q = 0; q < QUARTERS; q++) {
        raw_key<FORMAT> raw[STEPS][EACH];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t at = (unit + s) % UNITS;
            cu_mbar_wait(&c->raw_full[at], (unit + s) / UNITS & 1);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                raw[s][i].load_shared(from + at * UNIT_BYTES + i * BYTES, lane);
        }
        cu_mbar_wait(&c->key_free[buf][q], (tile >> 1 & 1) ^ 1);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                uint4 first, second;
                raw[s][i].widen(lane, first, second);
                *(uint4 *)(to[i] + s * N * 128) = first;
                *(uint4 *)(to[i] + (i % 2 ? -other : other) + s * N * 128) = second;
            }
            cu_bar_arrive(BAR_RAW_FREE + (unit + s) % UNITS, GROUP + DI_WARP);
        }
        unit += STEPS;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            to[i] += 16 * 128;
    }
    cu_fence_async();
    cu_bar_arrive(BAR_KEY + buf, 2 * GROUP);
}

template <int FORMAT> __device__ static inline void widen_rows(const shape &z, uint8_t *smem, control *c, int thread) {
    int warp = thread / DI_WARP, lane = thread % DI_WARP;
    uint32_t tile = 0, unit = 0;
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x) {
        for (bool is_last = false; !is_last; tile++) {
            cu_mbar_wait(&c->raw_full[unit % UNITS], unit / UNITS & 1);
            is_last = c->info[tile % INFOS].is_last;
            if (c->info[tile % INFOS].is_window)
                widen_tile<DI_KV_FP8>(smem, c, tile, unit, warp, lane);
            else
                widen_tile<FORMAT>(smem, c, tile, unit, warp, lane);
        }
    }
}

/* ---- scorer ------------------------------------------------------------------------------------------------------ */

/* Has Q of a row brought to its place. One thread. */
__device__ static inline void bring_q(const cu_map &q, int32_t row, uint8_t *smem, control *c) {
    cu_mbar_arrive_expect(&c->q_full, TILE);
#pragma unroll 1
    for (int p = 0; p < DIM / 64; p++)
        cu_map_load4(cu_smem(smem + Q_AT) + p * PANEL, q, p * 128, row, &c->q_full);
}

__device__ static inline void score_rows(const attention_job &job, const cu_map &q, const shape &z, uint8_t *smem,
                                         control *c, int thread) {
    int warp = thread / DI_WARP, lane = thread % DI_WARP, quad = lane & 3, head = warp * 16 + lane / 4;
    uint32_t q_at = cu_smem(smem + Q_AT), key_at = cu_smem(smem + KEY_AT), tile = 0, turn = 0;
    if (thread == 0)
        bring_q(q, blockIdx.x, smem, c);
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x, turn++) {
        float most[2] = {first_most(job, head), first_most(job, head + 8)}, sum[2] = {first_sum(quad), first_sum(quad)};
        cu_mbar_wait(&c->q_full, turn & 1);
        for (bool is_last = false; !is_last; tile++) {
            int buf = tile & 1;
            float s[32];
            cu_bar_sync(BAR_KEY + buf, 2 * GROUP);
            is_last = c->info[tile % INFOS].is_last;
            multiply_scores(s, q_at, key_at + buf * TILE);
            if (is_last && row + gridDim.x < z.n_rows) { /* all warps are through with Q */
                cu_bar_sync(BAR_SCORER, GROUP);
                if (thread == 0)
                    bring_q(q, row + gridDim.x, smem, c);
            }
            mask_scores(s, *(const uint64_t *)c->info[tile % INFOS].there, quad);
            float rescale[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float now = fmaxf(most[r], top_score(s, r) * z.scale2);
                rescale[r] = cu_exp2_fast(most[r] - now);
                most[r] = now;
                if (quad == 0)
                    c->rescale[buf][head + 8 * r] = rescale[r];
            }
            cu_bar_arrive(BAR_MOST + buf, 3 * GROUP);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float part = put_probabilities(s, r, z.scale2, most[r], smem + P_AT + buf * PANEL, head, quad);
                sum[r] = fmaf(sum[r], rescale[r], part);
            }
            cu_fence_async();
            cu_bar_arrive(BAR_P + buf, 3 * GROUP);
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
    float o[2][64]; /* 128 columns each: two multiplies, since one of 256 takes more registers than a group has */
    for (int32_t row = blockIdx.x; row < z.n_rows; row += gridDim.x, turn++) {
        bool is_first = true;
        for (bool is_last = false; !is_last; tile++, is_first = false) {
            int buf = tile & 1;
            cu_bar_sync(BAR_MOST + buf, 3 * GROUP);
            is_last = c->info[tile % INFOS].is_last;
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
            cu_bar_sync(BAR_P + buf, 3 * GROUP);
            uint64_t p_desc = cu_desc_k128(__shfl_sync(0xFFFFFFFFu, p_at + buf * PANEL, 0));
            uint64_t value_desc = cu_desc_mn128(__shfl_sync(0xFFFFFFFFu, value_at + buf * TILE, 0), KEYS);
            cu_wgmma_pin(o[0]);
            cu_wgmma_pin(o[1]);
            cu_wgmma_fence();
#pragma unroll
            for (int k = 0; k < QUARTERS; k++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    cu_wgmma_bf16_ss<CU_MN_MAJOR, CU_K_MAJOR>(o[i], cu_desc_add(p_desc, k * 32),
                                                              cu_desc_add(value_desc, i * 2 * PANEL + k * 2048),
                                                              k > 0 || !is_first);
                cu_wgmma_commit();
            }
            auto give_back = [&](int quarter) {
                __syncwarp();
                if (lane == 0)
                    cu_mbar_arrive(&c->key_free[buf][quarter]);
            };
            cu_wgmma_wait<3>();
            give_back(0);
            cu_wgmma_wait<2>();
            give_back(1);
            cu_wgmma_wait<1>();
            give_back(2);
            cu_wgmma_wait<0>();
            cu_wgmma_pin(o[0]);
            cu_wgmma_pin(o[1]);
            give_back(3);
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

template <int FORMAT>
__global__ void __launch_bounds__(THREADS, 1)
    attention_tiles(attention_job job, const __grid_constant__ cu_map q, shape z) {
    DI_DYN_SHARED(uint8_t, smem);
    control *c = (control *)(smem + CONTROL_AT);
    if (threadIdx.x == 0) {
        for (int i = 0; i < UNITS; i++)
            cu_mbar_init(&c->raw_full[i], DI_WARP + 1);
        for (int i = 0; i < 2 * QUARTERS; i++)
            cu_mbar_init(&c->key_free[i / QUARTERS][i % QUARTERS], 8);
        cu_mbar_init(&c->q_full, 1);
        cu_mbar_init(&c->sum_full, 4);
        cu_mbar_init(&c->sum_free, 8);
        cu_fence_mbar_init();
    }
    __syncthreads();
    int group = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / GROUP, 0), thread = threadIdx.x % GROUP;
    if (group == FEEDER) {
        cu_regs_give<32>();
        feed_rows<FORMAT>(job, z, smem, c, thread);
    } else if (group == WIDENER) {
        cu_regs_give<48>();
        widen_rows<FORMAT>(z, smem, c, thread);
    } else if (group == SCORER) {
        cu_regs_give<80>();
        score_rows(job, q, z, smem, c, thread);
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
    return (p->format == DI_KV_FP4 || p->format == DI_KV_FP8) && is_aligned(p->pages, p->offset, p->page_bytes);
}

size_t di_cuda_attention_sm90_scratch(const di_device *dev, const di_limits *limits) {
    return dev->arch == DI_CUDA_SM90 && limits->n_heads >= HEADS && limits->head_dim >= DIM ? attention_few_scratch()
                                                                                            : 0;
}

di_status di_cuda_attention_sm90(di_stream *stream, const di_attention_args *args, const di_act *codes) {
    int64_t keys_max = stream->dev->limits.keys_max;
    int32_t n_rows = args->rows->n_rows, topk = args->idx ? args->topk : 0;
    attention_job job = {*args, *args->rows, keys_max, codes ? *codes : di_act{}};
    shape z = {args->scale * 0x1.715476p0f * 65536.0f, n_rows, topk, 0};
    /* A window reaches no further back than the ring, and no further on than this forward. */
    int64_t window = DI_MIN(DI_MAX(keys_max - topk, 0), (int64_t)args->ring.ring_len + n_rows);
    z.tiles = (int32_t)DI_MAX(DI_CEIL_DIV(window, KEYS) + DI_CEIL_DIV(topk, KEYS), (int64_t)1);
    void *scratch = di_cuda_scratch(stream, attention_few_scratch());
    if (scratch && attention_few_fits(stream, &z)) {
        attention_few_launch(stream, &job, &z, scratch);
        return DI_OK;
    }
    cu_map q;
    uint64_t row_bytes = (uint64_t)args->q.stride * 2;
    const uint64_t dims[4] = {DIM * 2, HEADS, (uint64_t)n_rows, 1};
    const uint64_t strides[3] = {DIM * 2, row_bytes, row_bytes};
    const uint32_t box[4] = {128, HEADS, 1, 1};
    if (!cu_map_make(&q, args->q.data, 4, dims, strides, box))
        return DI_ERR_DEVICE;
    unsigned n_blocks = (unsigned)DI_MIN(n_rows, stream->dev->n_sms);
    if (topk && args->main.format == DI_KV_FP8)
        DI_LAUNCH((attention_tiles<DI_KV_FP8>), n_blocks, THREADS, SMEM, stream->stream, job, q, z);
    else
        DI_LAUNCH((attention_tiles<DI_KV_FP4>), n_blocks, THREADS, SMEM, stream->stream, job, q, z);
    return DI_OK;
}
