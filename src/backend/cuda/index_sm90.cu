/* Scores of the indexer by Hopper's warpgroup multiplies, with the bits of the CPU's reference: 32 heads of 128.
 *
 * Queries and keys are E2M1 codes in four groups of 32 with a power of two each. E2M1 values are E4M3 values, so a
 * group's part of all dot products of 64 keys is one multiply of k = 32. Four times a product is an integer, at most
 * 144, so the sum over a group has 13 bits, which the tensor core keeps whole (it keeps 14); its parts are put together
 * in float in the reference's order:
 *
 *     dot / scale 0 of the key = ((p0 + p1 * s1/s0) + p2 * s2/s0) + p3 * s3/s0      each p exact, each s a power of two
 *
 * Keys are operand A, 16 entries a warp, from registers; a word of eight codes becomes two words of E4M3 by placing
 * bits (the value comes out as 2^-6 of itself). The query is operand B: code times 2^6 times the group's scale by the
 * largest of its head, whose exponent goes into the head's weight. What the four lanes of a quad hold of 64 entries
 * decides how heads are added up in rising order:
 *
 *     index_alone    one row: a lane has 8 heads of 2 entries; products go through shared memory, and lane e of a warp
 *                    sums up entry e of 32
 *     index_groups   2..4 rows of one sequence: columns are dealt out so that lane c has all heads of row c
 *
 * A key or a row whose scales or weights lie so far from 1 that an intermediate result could leave the range of normal
 * floats, or is NaN, is scored by a warp as the reference does it. Copies of keys run ahead through a ring in shared
 * memory, each warp its own 16 rows of a tile, so that warps wait for each other at a new row alone. */
#include "index.cuh"
#include "sm90.cuh"

enum {
    HEADS = 32,
    DIM = 128,
    GROUPS = DIM / 32,
    SECOND_HEADS = INDEX_GROUP * HEADS / 2 * DIM, /* bytes before heads 16.. of a group of rows */
    THREADS = 128,
    STAGES = 3,
    TILE_BYTES = 16 * 64,                 /* codes of a warp's entries of a tile of 64 */
    WARP_STAGE = 2 * TILE_BYTES + 32 * 4, /* two tiles, then the scales */
    STAGE_BYTES = THREADS / DI_WARP * WARP_STAGE,
    TURN_STRIDE = HEADS + 4, /* floats of an entry */
    TURN_BYTES = THREADS / DI_WARP * 32 * TURN_STRIDE * 4,
    WEIGHT_STRIDE = HEADS + 4, /* floats of a row */
    PLAIN_BYTES = 16,
    ALONE_SMEM = HEADS * DIM + STAGES * STAGE_BYTES + TURN_BYTES + WEIGHT_STRIDE * 4 + PLAIN_BYTES,
    GROUPS_SMEM = INDEX_GROUP * HEADS * DIM + STAGES * STAGE_BYTES + INDEX_GROUP * WEIGHT_STRIDE * 4 + PLAIN_BYTES,
    ALONE_BLOCKS = 4, /* of a multiprocessor */
    GROUPS_BLOCKS = 3
};

/* ---- queries -----------------------------------------------------------------------------------------------------
 * Exponents up to which nothing leaves the range of normal floats: with key scales of 2^-15..2^16 (is_far), products of
 * weight and dot product are 0 or 2^-91..2^88. */
enum { HEAD_EXPONENT_MAX = 20, WEIGHT_EXPONENT_MAX = 24, GROUP_BELOW_HEAD_MAX = 14 };

/* The column of a head of row `c` of a group, and of a row alone. */
__device__ static inline uint32_t column_in_group(uint32_t head, uint32_t c) {
    return head / 16 * 64 + head % 16 / 2 * 8 + c * 2 + head % 2;
}
__device__ static inline uint32_t column_alone(uint32_t head) {
    return head % 8 / 2 * 8 + head / 8 * 2 + head % 2;
}

/* The query of a row as operand B and its weights, all threads together: a thread codes a group of 32. *plain becomes 0
 * if the row isn't plain; it must be 1 before. */
template <bool IS_GROUP>
__device__ static void put_query(const index_job &job, int32_t row, uint32_t c, uint8_t *q, float *w, int *plain) {
    uint32_t head = threadIdx.x / GROUPS, g = threadIdx.x % GROUPS;
    const uint4 *from =
        (const uint4 *)(const void *)((const uint16_t *)job.q.data + (int64_t)row * job.q.stride + threadIdx.x * 32);
    float x[32];
    int32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = from[i];
        const uint32_t two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[8 * i + 2 * j] = __uint_as_float(two[j] << 16);
            x[8 * i + 2 * j + 1] = __uint_as_float(two[j] & 0xFFFF0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int32_t a = index_magnitude(x[i]);
        most = a > most ? a : most;
    }
    float scale = index_scale(most), inv = __fdiv_rn(1.0f, scale);
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        uint32_t code = index_e2m1_code(__fmul_rn(x[i], inv));
        any |= code & 7u;
        x[i] = cu_e2m1_to_f32(code);
    }
    /* A group of zeros has no say in the exponent of its head. */
    const int32_t none = -1000;
    int32_t exponent = any ? (int32_t)(__float_as_uint(scale) >> 23) - 127 : none, top = exponent;
#pragma unroll
    for (int32_t d = 1; d < GROUPS; d *= 2) {
        int32_t other = __shfl_xor_sync(0xFFFFFFFFu, top, d);
        top = other > top ? other : top;
    }
    top = top == none ? 0 : top;
    int32_t below = any ? top - exponent : 0;
    bool is_plain = below <= GROUP_BELOW_HEAD_MAX && top >= -HEAD_EXPONENT_MAX && top <= HEAD_EXPONENT_MAX;
    float by = __uint_as_float((uint32_t)(127 + 6 - (below <= GROUP_BELOW_HEAD_MAX ? below : 0)) << 23);
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 4; i++) { /* values of even places, then of odd ones, as widen leaves them */
        const float *v = x + 8 * i;
        words[i] = cu_pack_e4m3(v[0] * by, v[2] * by) | (uint32_t)cu_pack_e4m3(v[4] * by, v[6] * by) << 16;
        words[i + 4] = cu_pack_e4m3(v[1] * by, v[3] * by) | (uint32_t)cu_pack_e4m3(v[5] * by, v[7] * by) << 16;
    }
    uint32_t column = IS_GROUP ? column_in_group(head, c) : column_alone(head);
#pragma unroll
    for (uint32_t half = 0; half < 2; half++)
        *(uint4 *)(void *)(q + cu_sw128(column, 32 * g + 16 * half, 0)) =
            make_uint4(words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]);
    if (g == 0) {
        float v = cu_act_load(job.w, row, head), size = fabsf(v);
        is_plain = is_plain && (v == 0.0f || (size >= 0x1p-24f && size <= 0x1p24f));
        w[head] = is_plain ? v * __uint_as_float((uint32_t)(127 + top) << 23) : 0.0f;
    }
    if (!is_plain)
        *plain = 0;
}

/* ---- keys --------------------------------------------------------------------------------------------------------
 */

/* Where copies of keys are: the row's list of entries. */
struct key_rows {
    const int32_t *blocks; /* of the sequence */
    const int32_t *list;   /* NULL: all entries */
    int32_t n;
};
__device__ static inline key_rows key_rows_of(const index_job &job, int32_t row, bool is_group) {
    key_rows k;
    int32_t kind = job.plan.kind[row];
    k.blocks = job.blocks + job.seq[row] * job.blocks_stride;
    k.list = kind == INDEX_LISTED ? job.list + (int64_t)row * job.n_list : NULL;
    k.n = job.plan.n[row];
    for (int32_t i = 1; is_group && i < kind; i++)
        k.n = job.plan.n[row + i] > k.n ? job.plan.n[row + i] : k.n;
    return k;
}

/* Numbers of the cache that are powers of two. */
struct key_shifts {
    int page, block; /* entries of a page and of a candidate block */
};

/* Starts copies of the warp's keys of the span that begins at (virtual) entry `base`: 8 entries at a time, which lie
 * side by side; 16 that aren't listed lie in one page. Beyond the row's end the last 8 come again. Chunk g of a row
 * lies at g ^ row/2 % 4. */
__device__ static inline void copy_keys(const index_job &job, const key_shifts &shift, const key_rows &k, int32_t base,
                                        uint32_t stage) {
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
    int32_t last = (k.n - 1) & ~7, page_mask = (1 << shift.page) - 1, block_mask = (1 << shift.block) - 1;
    const uint8_t *scale = NULL;
    uint32_t to = stage + lane / 4 * 64 + ((lane % 4 ^ (lane / 8 & 3)) << 4);
#pragma unroll
    for (uint32_t tile = 0; tile < 2; tile++) {
        int32_t v0 = base + (int32_t)(tile * 64 + warp * 16), v1 = v0 + 8;
        v0 = v0 < last ? v0 : last;
        v1 = v1 < last ? v1 : last;
        if (k.list) {
            v0 = (k.list[v0 >> shift.block] << shift.block) + (v0 & block_mask);
            v1 = (k.list[v1 >> shift.block] << shift.block) + (v1 & block_mask);
        }
        int32_t page = k.blocks[v0 >> shift.page];
        const uint8_t *section0 = job.keys.pages + page * (int64_t)job.keys.page_bytes + job.keys.offset;
        const uint8_t *section1 = section0;
        if (k.list)
            section1 = job.keys.pages + k.blocks[v1 >> shift.page] * (int64_t)job.keys.page_bytes + job.keys.offset;
        v0 &= page_mask;
        v1 &= page_mask;
        cu_cp16(to + tile * TILE_BYTES, section0 + v0 * 64 + lane * 16);
        cu_cp16(to + tile * TILE_BYTES + TILE_BYTES / 2, section1 + v1 * 64 + lane * 16);
        if (lane / 16 == tile)
            scale = (lane & 8 ? section1 + v1 * 4 : section0 + v0 * 4) + (64 << shift.page) + lane % 8 * 4;
    }
    cu_cp<4>(stage + 2 * TILE_BYTES + lane * 4, scale);
}

/* Eight codes as E4M3 values, times 2^-6: those of even places, then those of odd ones. */
__device__ static inline void widen(uint32_t codes, uint32_t *even, uint32_t *odd) {
    *even = (codes & 0x08080808u) << 4 | (codes & 0x07070707u) << 2;
    *odd = (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
}

/* The warp's part of tile `tile` as operand A of the four groups. */
__device__ static inline void load_tile(uint32_t stage, uint32_t tile, uint32_t (&a)[GROUPS][4]) {
    uint32_t lane = threadIdx.x % DI_WARP;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t r[4], row = half * 8 + lane % 8, chunk = lane / 8 ^ (row / 2 & 3);
        cu_ldmatrix(r, stage + tile * TILE_BYTES + row * 64 + chunk * 16);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            widen(r[g], &a[g][half], &a[g][half + 2]);
    }
}

/* A key whose scales aren't all of 2^-15..2^16. */
__device__ static inline bool is_far(uint32_t scales) {
    return ((scales + 0x10101010u) & 0xE0E0E0E0u) != 0x80808080u;
}
/* The scales of groups 1..3 by that of group 0, of a key that isn't far. */
__device__ static inline void scale_ratios(uint32_t scales, float (&r)[GROUPS - 1]) {
    uint32_t bytes = scales + 0x0F0F0F0Fu - ((scales & 255u) - 112u) * 0x01010101u; /* 127 + the difference */
    r[0] = __uint_as_float((bytes & 0x0000FF00u) << 15);
    r[1] = __uint_as_float((bytes & 0x00FF0000u) << 7);
    r[2] = __uint_as_float(bytes >> 1 & 0x7F800000u);
}
__device__ static inline float first_scale(uint32_t scales) {
    return __uint_as_float((scales & 255u) << 23);
}

/* w * relu(dot), of the parts of the groups. */
__device__ static inline float head_part(float p0, float p1, float p2, float p3, const float (&ratio)[GROUPS - 1],
                                         float w) {
    float dot = __fmaf_rn(p3, ratio[2], __fmaf_rn(p2, ratio[1], __fmaf_rn(p1, ratio[0], p0)));
    return __fmul_rn(w, fmaxf(dot, 0.0f));
}

/* ---- scores as the reference makes them --------------------------------------------------------------------------
 */

/* By a warp, a lane a head. */
__device__ static float score_by_warp(const index_job &job, int32_t row, int32_t entry) {
    int32_t head = (int32_t)(threadIdx.x % DI_WARP);
    index_key k = index_key_at(job, row, entry);
    float dot = 0.0f;
#pragma unroll 1
    for (int32_t g = 0; g < GROUPS; g++) {
        int32_t most = 0, at = head * DIM + g * 32;
#pragma unroll 1
        for (int32_t i = 0; i < 32; i++) {
            int32_t a = index_magnitude(cu_act_load(job.q, row, at + i));
            most = a > most ? a : most;
        }
        float scale = index_scale(most), inv = __fdiv_rn(1.0f, scale), key_scale = cu_e8m0_to_f32(k.scale[g]);
        float even = 0.0f, odd = 0.0f;
        scale = cu_e8m0_to_f32((uint8_t)(__float_as_uint(scale) >> 23));
#pragma unroll 1
        for (int32_t i = 0; i < 32; i++) {
            float q = cu_e2m1_to_f32(index_e2m1_code(__fmul_rn(cu_act_load(job.q, row, at + i), inv)));
            uint32_t byte = k.data[g * 16 + i / 2];
            float x = __fmul_rn(cu_e2m1_to_f32(i % 2 ? byte >> 4 : byte & 15u), key_scale);
            float product = __fmul_rn(__fmul_rn(q, scale), x);
            even = i % 2 ? even : __fadd_rn(even, product);
            odd = i % 2 ? __fadd_rn(odd, product) : odd;
        }
        dot = __fadd_rn(dot, __fadd_rn(even, odd));
    }
    float part = __fmul_rn(cu_act_load(job.w, row, head), dot > 0.0f ? dot : 0.0f), score = 0.0f;
#pragma unroll 1
    for (int32_t h = 0; h < HEADS; h++)
        score = __fadd_rn(score, __shfl_sync(0xFFFFFFFFu, part, h));
    return score;
}

/* The score of each lane that asks for it: entry `entry` of row `row`. */
__device__ static inline float score_asked(const index_job &job, bool asks, int32_t row, int32_t entry, float score) {
    uint32_t lane = threadIdx.x % DI_WARP, left = __ballot_sync(0xFFFFFFFFu, asks);
    while (left) {
        int from = __ffs((int)left) - 1;
        float s = score_by_warp(job, __shfl_sync(0xFFFFFFFFu, row, from), __shfl_sync(0xFFFFFFFFu, entry, from));
        score = (int)lane == from ? s : score;
        left &= left - 1;
    }
    return score;
}

/* Rounds a score to bf16 and puts it where it belongs; v < n. */
__device__ static inline uint16_t put_score(const index_job &job, int32_t row, int32_t entry, float score) {
    score = cu_round_bf16(score);
    if (job.scores)
        job.scores[row * job.scores_stride + entry] = score;
    return (uint16_t)(index_rank(score) >> 16);
}

/* ---- one row ----------------------------------------------------------------------------------------------------- */

/* The plan of up to 32 rows, none of which joins another: every block makes it for itself, the first one leaves it for
 * the kernels that follow. */
struct few_plan {
    int32_t n[DI_WARP], kind[DI_WARP], at[DI_WARP + 1];
};
__device__ static inline int32_t sum_before(int32_t own, int32_t *total) {
    int32_t lane = (int32_t)(threadIdx.x % DI_WARP), sum = own;
    for (int32_t d = 1; d < DI_WARP; d *= 2) {
        int32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, (unsigned)d);
        sum += lane >= d ? left : 0;
    }
    *total = __shfl_sync(0xFFFFFFFFu, sum, DI_WARP - 1);
    return sum - own;
}
__device__ static inline void plan_few(const index_job &job, few_plan *few) {
    int32_t row = (int32_t)threadIdx.x, n_rows = job.n_rows, total;
    if (row < DI_WARP) {
        index_row r = {0, INDEX_ALONE};
        if (row < n_rows)
            r = index_plan_row(job, row);
        int32_t at = sum_before(row < n_rows ? index_spans(r.n) : 0, &total);
        few->n[row] = r.n;
        few->kind[row] = r.kind;
        few->at[row] = at;
        if (row == 0)
            few->at[n_rows] = total; /* beyond the last row's */
        if (blockIdx.x == 0) {
            const index_plan &p = job.plan;
            int32_t n_blocks = job.with_blocks ? (r.n + job.block - 1) / job.block : 0, n_seg, n_block_seg;
            int32_t seg = sum_before(row < n_rows ? index_segments(r.n) : 0, &n_seg);
            int32_t block_seg = sum_before(row < n_rows ? index_segments(n_blocks) : 0, &n_block_seg);
            if (row < n_rows) {
                p.n[row] = r.n;
                p.kind[row] = r.kind;
                p.home[row] = p.at[row] = p.alone[row] = at;
                p.group[row] = p.done[row] = p.block_done[row] = 0;
                p.seg[row] = seg;
                p.block_seg[row] = block_seg;
            }
            if (row == 0) {
                p.at[n_rows] = p.alone[n_rows] = total;
                p.group[n_rows] = 0;
                p.seg[n_rows] = n_seg;
                p.block_seg[n_rows] = n_block_seg;
            }
        }
    }
    __syncthreads();
}

template <bool WITH_PLAN>
__global__ void __launch_bounds__(THREADS, ALONE_BLOCKS) index_alone(index_job given, key_shifts shift) {
    DI_DYN_SHARED(uint8_t, q); /* the query; stages; products; weights; the plan */
    index_job job = given;
    cu_grid_begin();
    if (WITH_PLAN) {
        few_plan *few = (few_plan *)(void *)(q + ALONE_SMEM);
        plan_few(given, few);
        job.plan.n = few->n;
        job.plan.kind = few->kind;
        job.plan.at = job.plan.alone = few->at;
    }
    uint8_t *stages = q + HEADS * DIM;
    float *weights = (float *)(void *)(stages + STAGES * STAGE_BYTES + TURN_BYTES);
    int *plain = (int *)(void *)(weights + WEIGHT_STRIDE);
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
    float *turn = (float *)(void *)(stages + STAGES * STAGE_BYTES) + warp * 32 * TURN_STRIDE;
    uint32_t own_stages = cu_smem(stages) + warp * WARP_STAGE;

    index_walk at = index_walk_begin(job, job.plan.alone), ahead = at;
    if (at.unit >= at.end)
        return;
    key_rows keys = key_rows_of(job, at.row, false);
    int32_t keys_row = at.row, row = -1, n = 0;
    const int32_t *list = NULL;
    bool is_plain = false;
    uint16_t *out = NULL;
    float w[8] = {};
    uint32_t in = 0, work = 0; /* stages: of the next copy, of the span at work */

    auto copy_next = [&]() {
        if (ahead.unit < ahead.end) {
            if (ahead.row != keys_row) {
                keys_row = ahead.row;
                keys = key_rows_of(job, keys_row, false);
            }
            copy_keys(job, shift, keys, (ahead.unit - ahead.first) * INDEX_SPAN, own_stages + in * STAGE_BYTES);
            index_walk_step(ahead);
        }
        cu_cp_commit();
        in = in + 1 == STAGES ? 0 : in + 1;
    };
    for (int i = 0; i < STAGES - 1; i++)
        copy_next();

    const uint64_t b = cu_desc_k128(cu_smem(q));
    for (; at.unit < at.end; index_walk_step(at)) {
        if (at.row != row) {
            row = at.row;
            __syncthreads();
            if (threadIdx.x == 0)
                *plain = 1;
            __syncthreads();
            put_query<false>(job, row, 0, q, weights, plain);
            cu_fence_async();
            __syncthreads();
            is_plain = *plain;
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = weights[lane % 4 * 8 + i];
            n = job.plan.n[row];
            list = job.plan.kind[row] == INDEX_LISTED ? job.list + (int64_t)row * job.n_list : NULL;
            out = (uint16_t *)job.ranks + index_ranks_at(job, row);
        }
        cu_cp_wait<STAGES - 2>();
        __syncwarp();
        copy_next();
        uint32_t stage = own_stages + work * STAGE_BYTES;
        const uint32_t *scales =
            (const uint32_t *)(const void *)(stages + work * STAGE_BYTES + warp * WARP_STAGE + 2 * TILE_BYTES);
        work = work + 1 == STAGES ? 0 : work + 1;
#pragma unroll 1
        for (uint32_t tile = 0; tile < 2; tile++) {
            uint32_t a[GROUPS][4];
            float p[GROUPS][16], ratio[2][GROUPS - 1];
            load_tile(stage, tile, a);
            cu_wgmma_fence();
#pragma unroll
            for (uint32_t g = 0; g < GROUPS; g++)
                cu_wgmma_e4m3_rs(p[g], a[g], cu_desc_add(b, 32 * g), 0);
            cu_wgmma_commit();
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                scale_ratios(scales[tile * 16 + half * 8 + lane / 4], ratio[half]);
            cu_wgmma_wait<0>();
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                cu_wgmma_pin(p[g]);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float v[8];
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) { /* heads 8 * (lane % 4) + i */
                    uint32_t d = i / 2 * 4 + half * 2 + i % 2;
                    v[i] = head_part(p[0][d], p[1][d], p[2][d], p[3][d], ratio[half], w[i]);
                }
                float4 *to = (float4 *)(void *)(turn + (tile * 16 + half * 8 + lane / 4) * TURN_STRIDE + lane % 4 * 8);
                to[0] = make_float4(v[0], v[1], v[2], v[3]);
                to[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
        }
        __syncwarp();
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < HEADS / 4; i++) {
            float4 v = ((const float4 *)(const void *)(turn + lane * TURN_STRIDE))[i];
            score = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(score, v.x), v.y), v.z), v.w);
        }
        uint32_t own = scales[lane];
        score = __fmul_rn(score, first_scale(own));
        int32_t v = (at.unit - at.first) * INDEX_SPAN + (int32_t)(lane / 16 * 64 + warp * 16 + lane % 16);
        int32_t entry = v;
        if (list && v < n)
            entry = (list[v >> shift.block] << shift.block) + (v & ((1 << shift.block) - 1));
        score = score_asked(job, v < n && (!is_plain || is_far(own)), row, entry, score);
        out[v] = v < n ? put_score(job, row, entry, score) : 0;
        /* The next span's products are written after the barrier that follows the next wait. */
    }
}

/* ---- rows of one sequence ---------------------------------------------------------------------------------------- */

/* d = a group's part of 16 heads of four rows; begun, not finished. */
__device__ static inline void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    cu_wgmma_fence();
    cu_wgmma_e4m3_rs(d, a, b, 0);
    cu_wgmma_commit();
}
/* All multiplies but the newest N are finished, those into x and y among them. */
template <int N> __device__ static inline void finish(float (&x)[32], float (&y)[32]) {
    cu_wgmma_wait<N>();
    cu_wgmma_pin(x);
    cu_wgmma_pin(y);
}
/* Adds the part of group g + 1. */
__device__ static inline void add_group(float (&dot)[32], const float (&part)[32], const float (&ratio)[2][GROUPS - 1],
                                        int g) {
#pragma unroll
    for (int i = 0; i < 32; i++)
        dot[i] = __fmaf_rn(part[i], ratio[i / 2 % 2][g], dot[i]);
}
/* Adds w * relu(dot) of 16 heads to the scores of the thread's two entries. */
__device__ static inline void add_heads(const float (&dot)[32], const float *w, float (&score)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 four = ((const float4 *)(const void *)w)[i];
        const float by[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int h = 0; h < 4; h++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float d = dot[(2 * i + h / 2) * 4 + half * 2 + h % 2];
                score[half] = __fadd_rn(score[half], __fmul_rn(by[h], fmaxf(d, 0.0f)));
            }
        }
    }
}

__global__ void __launch_bounds__(THREADS, GROUPS_BLOCKS) index_groups(index_job job, key_shifts shift) {
    DI_DYN_SHARED(uint8_t, q); /* the queries; stages; weights */
    cu_grid_begin();
    uint8_t *stages = q + INDEX_GROUP * HEADS * DIM;
    float *weights = (float *)(void *)(stages + STAGES * STAGE_BYTES);
    int *plain = (int *)(void *)(weights + INDEX_GROUP * WEIGHT_STRIDE);
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP, c = lane % 4;
    uint32_t own_stages = cu_smem(stages) + warp * WARP_STAGE;

    index_walk at = index_walk_begin(job, job.plan.group), ahead = at;
    if (at.unit >= at.end)
        return;
    key_rows keys = key_rows_of(job, at.row, true);
    int32_t keys_row = at.row, row = -1, own_row = 0, n = 0, n_room = 0;
    bool is_plain = false;
    uint16_t *out = NULL;
    uint32_t in = 0, work = 0;

    auto copy_next = [&]() {
        if (ahead.unit < ahead.end) {
            if (ahead.row != keys_row) {
                keys_row = ahead.row;
                keys = key_rows_of(job, keys_row, true);
            }
            copy_keys(job, shift, keys, (ahead.unit - ahead.first) * INDEX_SPAN, own_stages + in * STAGE_BYTES);
            index_walk_step(ahead);
        }
        cu_cp_commit();
        in = in + 1 == STAGES ? 0 : in + 1;
    };
    for (int i = 0; i < STAGES - 1; i++)
        copy_next();

    const uint64_t b = cu_desc_k128(cu_smem(q));
    for (; at.unit < at.end; index_walk_step(at)) {
        if (at.row != row) {
            row = at.row;
            int32_t n_rows = job.plan.kind[row];
            __syncthreads();
            if (threadIdx.x < INDEX_GROUP)
                plain[threadIdx.x] = 1;
            __syncthreads();
#pragma unroll 1
            for (int32_t i = 0; i < INDEX_GROUP; i++) /* what lacks of four repeats the first */
                put_query<true>(job, i < n_rows ? row + i : row, (uint32_t)i, q, weights + i * WEIGHT_STRIDE,
                                plain + i);
            cu_fence_async();
            __syncthreads();
            is_plain = plain[c];
            own_row = (int32_t)c < n_rows ? row + (int32_t)c : row;
            n = (int32_t)c < n_rows ? job.plan.n[own_row] : 0;
            n_room = (n + INDEX_SPAN - 1) / INDEX_SPAN * INDEX_SPAN;
            out = (uint16_t *)job.ranks + index_ranks_at(job, own_row);
        }
        cu_cp_wait<STAGES - 2>();
        __syncwarp();
        copy_next();
        uint32_t stage = own_stages + work * STAGE_BYTES;
        const uint32_t *scales =
            (const uint32_t *)(const void *)(stages + work * STAGE_BYTES + warp * WARP_STAGE + 2 * TILE_BYTES);
        work = work + 1 == STAGES ? 0 : work + 1;
#pragma unroll 1
        for (uint32_t tile = 0; tile < 2; tile++) {
            uint32_t a[GROUPS][4], scale[2];
            float ratio[2][GROUPS - 1], score[2] = {0.0f, 0.0f};
            load_tile(stage, tile, a);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                scale[half] = scales[tile * 16 + half * 8 + lane / 4];
                scale_ratios(scale[half], ratio[half]);
            }
            /* Heads 0..15 of the four rows, then 16..31: groups go through x, y and z, and while parts are put together
             * the next multiplies run. What is free then: z after the third group, y after the last, x after all. */
            const float *w = weights + c * WEIGHT_STRIDE;
            float x[32], y[32], z[32];
            multiply(x, a[0], b);
            multiply(y, a[1], cu_desc_add(b, 32));
            multiply(z, a[2], cu_desc_add(b, 64));
            finish<1>(x, y);
            add_group(x, y, ratio, 0);
            multiply(y, a[3], cu_desc_add(b, 96));
            finish<1>(z, z);
            add_group(x, z, ratio, 1);
            multiply(z, a[0], cu_desc_add(b, SECOND_HEADS));
            finish<1>(y, y);
            add_group(x, y, ratio, 2);
            multiply(y, a[1], cu_desc_add(b, SECOND_HEADS + 32));
            add_heads(x, w, score);
            multiply(x, a[2], cu_desc_add(b, SECOND_HEADS + 64));
            finish<1>(z, y);
            add_group(z, y, ratio, 0);
            multiply(y, a[3], cu_desc_add(b, SECOND_HEADS + 96));
            finish<1>(x, x);
            add_group(z, x, ratio, 1);
            finish<0>(y, y);
            add_group(z, y, ratio, 2);
            add_heads(z, w + HEADS / 2, score);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                int32_t v = (at.unit - at.first) * INDEX_SPAN + (int32_t)(tile * 64 + warp * 16 + half * 8 + lane / 4);
                float s = __fmul_rn(score[half], first_scale(scale[half]));
                s = score_asked(job, v < n && (!is_plain || is_far(scale[half])), own_row, v, s);
                if (v < n_room)
                    out[v] = v < n ? put_score(job, own_row, v, s) : 0;
            }
        }
    }
}

/* ---- the host's side --------------------------------------------------------------------------------------------- */

static int log2_of(int64_t n) {
    int bits = 0;
    while (bits < 30 && (int64_t)1 << bits < n)
        bits++;
    return (int64_t)1 << bits == n ? bits : -1;
}

bool di_cuda_index_is_sm90(const di_index_select_args *a) {
    const di_paged *p = &a->keys;
    return a->n_heads == HEADS && a->dim == DIM && p->format == DI_KV_MX4 && a->round_bf16 && a->q.dtype == DI_BF16 &&
           p->per_block >= 16 && log2_of(p->per_block) >= 0 &&
           (((uintptr_t)p->pages | p->page_bytes | p->offset | (uintptr_t)a->q.data) & 15) == 0 &&
           a->q.stride % 8 == 0 && (!a->cand_in || log2_of(a->cand_block) >= 3);
}

void di_cuda_index_scores_sm90(const index_job *job, int n_sms, cudaStream_t stream) {
    key_shifts shift = {log2_of(job->keys.per_block), job->list ? log2_of(job->block) : 0};
    if (di_cuda_index_plans(job))
        DI_LAUNCH_PDL((index_alone<true>), ALONE_BLOCKS * n_sms, THREADS, ALONE_SMEM + sizeof(few_plan), stream, *job,
                      shift);
    else
        DI_LAUNCH_PDL((index_alone<false>), ALONE_BLOCKS * n_sms, THREADS, ALONE_SMEM, stream, *job, shift);
    if (job->with_groups)
        DI_LAUNCH_PDL(index_groups, GROUPS_BLOCKS * n_sms, THREADS, GROUPS_SMEM, stream, *job, shift);
}
