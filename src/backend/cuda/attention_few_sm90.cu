/* Core attention on Hopper for few rows: a row is spread over many blocks, and has the bits that one block would give.
 *
 * Two kernels. The first has a block for each tile of 64 keys of each row: it widens the tile, multiplies it with Q and
 * leaves the scores and their maxima by head in scratch memory. The second has a block for each 64 of the 512 values of
 * each row: it makes the running maxima, probabilities and denominators from all scores, as each of its like does, and
 * adds up P V of its values tile by tile, in order. It may start beside the first: it takes up its values until the
 * scores are there.
 *
 *                 tile 0   tile 1   tile 2 ..            values 0..63   64..127 ..
 *   score_tiles     S        S        S      -> scratch ->  sum_values   over all tiles, rising
 *
 * Sums are cut nowhere, so that the number of rows may choose the kernel: attention_sm90.cu does the same operations on
 * the same numbers. Up to FEW_ROWS rows of up to FEW_TILES tiles. */
#include "attention_sm90.cuh"

enum { THREADS = 2 * GROUP, SUM_GROUPS = 4, SUM_THREADS = SUM_GROUPS * GROUP };

/* Scratch memory of a row, after those of the rows before. */
typedef struct few_row {
    float4 scores[FEW_TILES][8][GROUP]; /* as a warpgroup holds them: 4 of the 32 registers of every thread at a time */
    float tops[FEW_TILES][HEADS];       /* the largest score of each head */
} few_row;

/* What a block must know to find a row's keys. */
typedef struct row_keys {
    int32_t seq, lo, hi, row0, pos0, slot;
    int32_t n_window, n_tiles; /* tiles of window keys, and of all */
} row_keys;

/* All N threads; n: of shared memory, for each warp. */
template <int N>
__device__ static inline row_keys find_row(const attention_job &job, const shape &z, int32_t row, int32_t *n) {
    row_keys k;
    int32_t n_listed = 0;
    k.seq = job.rows.seq[row];
    k.lo = job.rows.win_lo[row];
    k.hi = max(k.lo, job.rows.win_hi[row]);
    for (int32_t t = threadIdx.x; t < z.topk; t += N) {
        if (job.a.idx[(int64_t)row * z.topk + t] >= 0)
            n_listed = t + 1;
    }
    n_listed = __reduce_max_sync(0xFFFFFFFFu, n_listed);
    if (threadIdx.x % DI_WARP == 0)
        n[threadIdx.x / DI_WARP] = n_listed;
    k.row0 = job.rows.row0[k.seq];
    k.pos0 = job.rows.pos0[k.seq];
    k.slot = job.rows.slot[k.seq];
    __syncthreads();
    for (int i = 0; i < N / DI_WARP; i++)
        n_listed = max(n_listed, n[i]);
    k.n_window = (k.hi - k.lo + KEYS - 1) / KEYS;
    int32_t n_main = (n_listed + KEYS - 1) / KEYS;
    k.n_window += k.n_window + n_main == 0; /* no key at all: a tile of none */
    k.n_tiles = min(k.n_window + n_main, z.tiles);
    return k;
}

/* Record of key `key` of a tile, or NULL. */
__device__ static inline const uint8_t *window_record(const attention_job &job, const row_keys &k, int32_t tile,
                                                      int key) {
    int32_t pos = k.lo + tile * KEYS + key;
    return pos < k.hi ? attention_window_at(job.a, WINDOW_BYTES, k.row0, k.pos0, k.slot, pos) : NULL;
}
template <int FORMAT>
__device__ static inline const uint8_t *listed_record(const attention_job &job, const shape &z, const row_keys &k,
                                                      int32_t row, int32_t tile, int key) {
    const di_paged &p = job.a.main;
    int32_t t = (tile - k.n_window) * KEYS + key, entry = t < z.topk ? job.a.idx[(int64_t)row * z.topk + t] : -1;
    if (entry < 0)
        return NULL;
    int32_t block = job.rows.blocks[k.seq * job.rows.blocks_stride + entry / p.per_block];
    return p.pages + (size_t)block * p.page_bytes + p.offset + entry % p.per_block * (int)raw_key<FORMAT>::BYTES;
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

enum { SCORE_Q_AT = 0, SCORE_KEY_AT = TILE, SCORE_SMEM = 2 * TILE };

/* 16 bytes of Q [64 heads, 512] at a time, on their way to shared memory; THREADS threads. */
__device__ static inline void load_q(const attention_job &job, int32_t row, uint32_t smem) {
    const uint16_t *q = (const uint16_t *)job.a.q.data + row * job.a.q.stride;
#pragma unroll 8
    for (int i = 0; i < TILE / 16; i += THREADS) {
        uint32_t chunk = i + threadIdx.x, head = chunk / (DIM / 8), at = chunk % (DIM / 8);
        cu_cp16(smem + cu_sw128(head, at * 16, HEADS), q + chunk * 8);
    }
    cu_cp_commit();
}

/* Widens the 8 keys of a tile that are the warp's; record: of lane l, the key l % 8's. */
template <int FORMAT> __device__ static inline void widen_keys(uint8_t *tile, const uint8_t *record) {
    int warp = threadIdx.x / DI_WARP, lane = threadIdx.x % DI_WARP;
    raw_key<FORMAT> raw[8];
#pragma unroll
    for (int u = 0; u < 8; u++)
        raw[u].load((const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)record, u), lane);
#pragma unroll
    for (int u = 0; u < 8; u++) {
        uint4 first, second;
        uint32_t at = key_at(lane, warp * 8 + u);
        raw[u].widen(lane, first, second);
        *(uint4 *)(tile + at) = first;
        *(uint4 *)(tile + (at ^ 16)) = second;
    }
}

template <int FORMAT>
__global__ void __launch_bounds__(THREADS, 1) attention_score_tiles(attention_job job, shape z, few_row *scratch) {
    DI_DYN_SHARED(uint8_t, smem);
    __shared__ int32_t n_listed[THREADS / DI_WARP];
    __shared__ uint8_t there[THREADS / DI_WARP] __align__(8);
    int32_t tile = blockIdx.x, row = blockIdx.y;
    int warp = threadIdx.x / DI_WARP, lane = threadIdx.x % DI_WARP, key = warp * 8 + (lane & 7);
    cu_grid_begin(); /* the second kernel may begin: all that these two read but the scores is there */
    load_q(job, row, cu_smem(smem + SCORE_Q_AT));
    row_keys k = find_row<THREADS>(job, z, row, n_listed);
    few_row *out = scratch + row;
    if (tile >= k.n_tiles) {
        cu_cp_wait<0>();
        return;
    }
    bool is_window = tile < k.n_window;
    const uint8_t *record =
        is_window ? window_record(job, k, tile, key) : listed_record<FORMAT>(job, z, k, row, tile, key);
    uint32_t is_there = __ballot_sync(0xFFFFFFFFu, record != NULL);
    if (lane == 0)
        there[warp] = (uint8_t)is_there;
    record = record ? record : (const uint8_t *)attention_no_record;
    if (is_window)
        widen_keys<DI_KV_FP8>(smem + SCORE_KEY_AT, record);
    else
        widen_keys<FORMAT>(smem + SCORE_KEY_AT, record);
    cu_cp_wait<0>();
    cu_fence_async();
    __syncthreads();
    if (threadIdx.x >= GROUP)
        return;
    int quad = lane & 3, head = warp * 16 + lane / 4;
    float s[32];
    multiply_scores(s, cu_smem(smem + SCORE_Q_AT), cu_smem(smem + SCORE_KEY_AT));
    mask_scores(s, *(const uint64_t *)there, quad);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = top_score(s, r);
        if (quad == 0)
            out->tops[tile][head + 8 * r] = top;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        out->scores[tile][i][threadIdx.x] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

typedef struct sums {
    const uint8_t *records[FEW_TILES][KEYS]; /* of all keys */
    float tops[FEW_TILES][HEADS];            /* as floats of scores */
    float rescale[FEW_TILES][HEADS];         /* by each tile's new maximum */
    float part[FEW_TILES][2][GROUP];         /* of the denominators, by thread of a warpgroup */
    float factor[HEADS];
} sums;
enum {
    SUM_VALUE_AT = 0,
    SUM_P_AT = FEW_TILES * PANEL,
    SUM_AT = 2 * FEW_TILES * PANEL,
    SUM_SMEM = SUM_AT + sizeof(sums),
    SUM_AT_ONCE = 6, /* chunks on their way to a thread */
};
static_assert(SUM_SMEM <= 227 * 1024, "shared memory of a block");

/* Eight values of a key: chunk c of the 8 that the block has of it. Scales as in raw_key. */
typedef struct raw_chunk {
    uint2 codes;
    uint32_t scale;
} raw_chunk;

template <int FORMAT> __device__ static inline raw_chunk load_chunk(const uint8_t *record, int panel, int c) {
    raw_chunk r = {};
    if (FORMAT == DI_KV_FP4) {
        r.codes.x = cu_load4_once(record + panel * 32 + c * 4);
        r.scale = __ldg(record + DIM / 2 + panel * 4 + c / 2);
    } else {
        r.codes = cu_load8_once(record + panel * 64 + c * 8);
        r.scale = __ldg(record + DIM + panel * 2 + c / 4);
    }
    return r;
}
template <int FORMAT> __device__ static inline uint4 widen_chunk(const raw_chunk &r) {
    if (FORMAT == DI_KV_FP4)
        return widen_e2m1(r.codes.x, widen_e4m3_scale(r.scale));
    uint32_t scale = widen_e8m0_scale(r.scale);
    uint2 low = widen_e4m3(r.codes.x, scale), high = widen_e4m3(r.codes.y, scale);
    return make_uint4(low.x, low.y, high.x, high.y);
}

/* What a thread has of the scores of a tile. */
__device__ static inline void load_scores(float4 (&s)[8], const few_row *in, int32_t tile, int thread) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        s[i] = in->scores[tile][i][thread];
}

template <int FORMAT>
__global__ void __launch_bounds__(SUM_THREADS, 1)
    attention_sum_values(attention_job job, shape z, const few_row *scratch) {
    DI_DYN_SHARED(uint8_t, smem);
    __shared__ int32_t n_listed[SUM_THREADS / DI_WARP];
    sums *c = (sums *)(smem + SUM_AT);
    int32_t panel = blockIdx.x, row = blockIdx.y;
    const few_row *in = scratch + row;
    int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    int warp = thread / DI_WARP, lane = thread % DI_WARP, quad = lane & 3, head = warp * 16 + lane / 4;
    /* The first kernel has waited for what came before it, so that all but the scores may be read at once. */
    row_keys k = find_row<SUM_THREADS>(job, z, row, n_listed);

    for (int32_t i = threadIdx.x; i < k.n_tiles * KEYS; i += SUM_THREADS) {
        int32_t tile = i / KEYS, key = i % KEYS;
        const uint8_t *record =
            tile < k.n_window ? window_record(job, k, tile, key) : listed_record<FORMAT>(job, z, k, row, tile, key);
        c->records[tile][key] = record ? record : (const uint8_t *)attention_no_record;
    }
    __syncthreads();
    /* Eight lanes a key, a tile at a time. */
    int key = threadIdx.x / 8, chunk = threadIdx.x % 8;
    for (int32_t first = 0; first < k.n_tiles; first += SUM_AT_ONCE) {
        raw_chunk raw[SUM_AT_ONCE];
#pragma unroll
        for (int i = 0; i < SUM_AT_ONCE; i++) {
            const uint8_t *record = c->records[min(first + i, k.n_tiles - 1)][key];
            raw[i] = first + i < k.n_window ? load_chunk<DI_KV_FP8>(record, panel, chunk)
                                            : load_chunk<FORMAT>(record, panel, chunk);
        }
#pragma unroll
        for (int i = 0; i < SUM_AT_ONCE; i++) {
            uint4 v = first + i < k.n_window ? widen_chunk<DI_KV_FP8>(raw[i]) : widen_chunk<FORMAT>(raw[i]);
            if (first + i < k.n_tiles)
                *(uint4 *)(smem + SUM_VALUE_AT + (first + i) * PANEL + key * 128 + ((chunk ^ (key & 7)) << 4)) = v;
        }
    }

    cu_grid_wait(); /* from here on the scores are there */
    float4 next[8];
    if (group < k.n_tiles)
        load_scores(next, in, group, thread);
    for (int32_t i = threadIdx.x; i < k.n_tiles * HEADS; i += SUM_THREADS)
        c->tops[i / HEADS][i % HEADS] = in->tops[i / HEADS][i % HEADS];
    float most[2] = {first_most(job, head), first_most(job, head + 8)};
    __syncthreads();

    /* Tiles by turns of the warpgroups; maxima by all. */
    for (int32_t tile = 0; tile < k.n_tiles; tile++) {
        float now[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            now[r] = fmaxf(most[r], c->tops[tile][head + 8 * r] * z.scale2);
        if (tile % SUM_GROUPS == group) {
            float s[32];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[4 * i] = next[i].x;
                s[4 * i + 1] = next[i].y;
                s[4 * i + 2] = next[i].z;
                s[4 * i + 3] = next[i].w;
            }
            if (tile + SUM_GROUPS < k.n_tiles)
                load_scores(next, in, tile + SUM_GROUPS, thread);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (quad == 0)
                    c->rescale[tile][head + 8 * r] = cu_exp2_fast(most[r] - now[r]);
                c->part[tile][r][thread] =
                    put_probabilities(s, r, z.scale2, now[r], smem + SUM_P_AT + tile * PANEL, head, quad);
            }
        }
        most[0] = now[0];
        most[1] = now[1];
    }
    cu_fence_async();
    __syncthreads();

    if (group > 1) {
        __syncthreads();
        return;
    }
    if (group) { /* the denominators, while the other group multiplies */
        float sum[2] = {first_sum(quad), first_sum(quad)};
        for (int32_t tile = 0; tile < k.n_tiles; tile++) {
            for (int r = 0; r < 2; r++)
                sum[r] = fmaf(sum[r], c->rescale[tile][head + 8 * r], c->part[tile][r][thread]);
        }
        for (int r = 0; r < 2; r++) {
            float factor = last_factor(sum[r]);
            if (quad == 0)
                c->factor[head + 8 * r] = factor;
        }
        __syncthreads();
        return;
    }
    float o[32];
    uint32_t p_at = cu_smem(smem + SUM_P_AT), value_at = cu_smem(smem + SUM_VALUE_AT);
    for (int32_t tile = 0; tile < k.n_tiles; tile++) {
        float low = c->rescale[tile][head], high = c->rescale[tile][head + 8];
        if (tile) {
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                o[i] *= low;
                o[i + 1] *= low;
                o[i + 2] *= high;
                o[i + 3] *= high;
            }
        }
        uint64_t p_desc = cu_desc_k128(__shfl_sync(0xFFFFFFFFu, p_at + tile * PANEL, 0));
        uint64_t value_desc = cu_desc_mn128(__shfl_sync(0xFFFFFFFFu, value_at + tile * PANEL, 0), KEYS);
        cu_wgmma_pin(o);
        cu_wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            cu_wgmma_bf16_ss<CU_MN_MAJOR, CU_K_MAJOR>(o, cu_desc_add(p_desc, i * 32), cu_desc_add(value_desc, i * 2048),
                                                      i > 0 || tile > 0);
        cu_wgmma_commit();
        cu_wgmma_wait<0>();
        cu_wgmma_pin(o);
    }
    __syncthreads();
    store_columns(job, row, head, panel * 64, quad, o, c->factor[head], c->factor[head + 8]);
}

/* ---- on the host ------------------------------------------------------------------------------------------------- */

size_t attention_few_scratch(void) {
    return FEW_ROWS * sizeof(few_row);
}

bool attention_few_fits(const di_stream *stream, const shape *z) {
    (void)stream;
    return z->n_rows <= FEW_ROWS && z->tiles <= FEW_TILES;
}

template <int FORMAT>
static void launch(di_stream *stream, const attention_job *job, const shape *z, few_row *scratch) {
    dim3 tiles((unsigned)z->tiles, (unsigned)z->n_rows), panels(DIM / 64, (unsigned)z->n_rows);
    DI_LAUNCH_PDL((attention_score_tiles<FORMAT>), tiles, THREADS, SCORE_SMEM, stream->stream, *job, *z, scratch);
    DI_LAUNCH_PDL((attention_sum_values<FORMAT>), panels, SUM_THREADS, SUM_SMEM, stream->stream, *job, *z, scratch);
}

void attention_few_launch(di_stream *stream, const attention_job *job, const shape *z, void *scratch) {
    if (z->topk && job->a.main.format == DI_KV_FP8)
        launch<DI_KV_FP8>(stream, job, z, (few_row *)scratch);
    else
        launch<DI_KV_FP4>(stream, job, z, (few_row *)scratch);
}
