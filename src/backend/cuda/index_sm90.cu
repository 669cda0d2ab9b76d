/* Scores of the indexer by Hopper's warpgroup multiplies, with the bits of the CPU's reference: 32 heads of 128.
 *
 * Queries and keys are E2M1 codes in four groups of 32 with a power of two each. E2M1 values are E4M3 values, so a
 * group's part of all dot products of 64 keys is one multiply of k = 32. Four times a product is an integer, at most
 * 144, so the sum over a group has 13 bits, which the tensor core keeps whole; parts are put together in float in the
 * reference's order:
 *
 *     dot / scale 0 of the key = ((p0 + p1 * s1/s0) + p2 * s2/s0) + p3 * s3/s0      each p exact, each s a power of two
 *
 * Keys are operand A, 16 entries a warp, from registers, codes placed as 2^-6 of their value. The query is operand B:
 * code times 2^6 times the group's scale by the largest of its head, whose exponent goes into the head's weight.
 *
 * Rows that share keys mostly do with less: where the four scales of a key, and those of each head, are at most 2^3
 * apart, code and power of two make an integer of 8 bits (E2M1 is 0..12 halves), and one sum of integers over all
 * 128, of 21 bits, is the dot product; none of the reference's partial sums rounds then either. Decided span by span.
 *
 *     index_alone    one row: a lane of a quad has 8 heads of 2 entries; products go through shared memory, and lane e
 *                    of a warp sums up entry e of 32, heads rising
 *     index_groups   2..4 rows of one sequence: columns are dealt out so that lane c has all heads of row c
 *
 * A key or a row whose scales or weights could leave the range of normal floats, or is NaN, is scored by a warp as the
 * reference does it. Copies run ahead through a ring, each warp its own 16 rows: warps wait for each other at a new
 * row. */
#include "index.cuh"
#include "sm90.cuh"

enum {
    HEADS = 32,
    DIM = 128,
    GROUPS = DIM / 32,
    GROUP_QUERY = INDEX_GROUP * HEADS * DIM, /* bytes of a group's queries */
    SECOND_HEADS = GROUP_QUERY / 2,          /* before their heads 16.. */
    THREADS = 128,
    STAGES = 3,
    TILE_BYTES = 16 * 64,                 /* codes of a warp's entries of a tile of 64 */
    WARP_STAGE = 2 * TILE_BYTES + 32 * 4, /* two tiles, then the scales */
    STAGE_BYTES = THREADS / DI_WARP * WARP_STAGE,
    TURN_STRIDE = HEADS + 4, /* floats of an entry */
    TURN_BYTES = THREADS / DI_WARP * 32 * TURN_STRIDE * 4,
    WEIGHT_STRIDE = HEADS + 4, /* floats of a row */
    FLAG_BYTES = 32,
    TABLE_BYTES = 4 * 16,
    ALONE_SMEM = HEADS * DIM + STAGES * STAGE_BYTES + TURN_BYTES + WEIGHT_STRIDE * 4 + FLAG_BYTES,
    GROUPS_SMEM = 2 * GROUP_QUERY + STAGES * STAGE_BYTES + THREADS * 8 + TABLE_BYTES +
                  2 * INDEX_GROUP * WEIGHT_STRIDE * 4 + FLAG_BYTES,
    ALONE_BLOCKS = 4, /* of a multiprocessor */
    GROUPS_BLOCKS = 3
};

/* ---- queries -----------------------------------------------------------------------------------------------------
 * Exponents up to which nothing leaves the range of normal floats: with key scales of 2^-15..2^16 (is_far), products of
 * weight and dot product are 0 or 2^-91..2^88. */
enum { HEAD_EXPONENT_MAX = 20, WEIGHT_EXPONENT_MAX = 24, GROUP_BELOW_HEAD_MAX = 14 };
/* Powers of two between the scales of a head or a key, at most, where integers serve: 12 * 2^3 is one of 8 bits. */
enum { NARROW = 3 };

/* The column of a head of row `c` of a group, and of a row alone. */
__device__ static inline uint32_t column_in_group(uint32_t head, uint32_t c) {
    return head / 16 * 64 + head % 16 / 2 * 8 + c * 2 + head % 2;
}
__device__ static inline uint32_t column_alone(uint32_t head) {
    return head % 8 / 2 * 8 + head / 8 * 2 + head % 2;
}

/* Of a row: 32 values of a head, which a thread codes, and the head's weight. */
struct query_part {
    uint4 values[4];
    float weight;
};
__device__ static inline query_part load_query(const index_job &job, int32_t row) {
    query_part p;
    const uint4 *from =
        (const uint4 *)(const void *)((const uint16_t *)job.q.data + (int64_t)row * job.q.stride + threadIdx.x * 32);
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.values[i] = from[i];
    p.weight = cu_act_load(job.w, row, threadIdx.x / GROUPS);
    return p;
}
/* The value of E2M1 nearest to f, |f| <= 6 or NaN, which counts as 6: neighbours lie 1/2 apart up to 2, then twice as
 * far with each power of two. A sum that large holds no finer bits, and rounds ties to the even code. */
__device__ static inline float nearest_e2m1(float f) {
    f = fminf(f, 6.0f);
    int32_t exponent = (int32_t)(__float_as_uint(f) & 0x7F800000u);
    exponent = exponent > 0x3F800000 ? exponent : 0x3F800000;
    float large = __uint_as_float((uint32_t)exponent + 0x0B400000u); /* 1.5 * 2^22 times the power of two */
    return __fsub_rn(__fadd_rn(f, large), large);
}
/* What threads find out about a row or a group of rows; 1 before. */
struct query_flags {
    int plain[INDEX_GROUP];
    int narrow;
};
/* The query of a row as operand B and its weights, all threads together. Of a group, GROUP_QUERY bytes on, as integers
 * as well, and INDEX_GROUP rows on the weights times -2^23. */
template <bool IS_GROUP>
__device__ static void put_query(const query_part &p, uint32_t c, uint8_t *q, float *w, query_flags *flags) {
    uint32_t head = threadIdx.x / GROUPS, g = threadIdx.x % GROUPS;
    float x[32], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t two[4] = {p.values[i].x, p.values[i].y, p.values[i].z, p.values[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[8 * i + 2 * j] = __uint_as_float(two[j] << 16);
            x[8 * i + 2 * j + 1] = __uint_as_float(two[j] & 0xFFFF0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
        most = fmaxf(most, fabsf(x[i])); /* passes over NaN */
    float scale = index_scale((int32_t)__float_as_uint(most)), inv = __fdiv_rn(1.0f, scale);
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        x[i] = nearest_e2m1(__fmul_rn(x[i], inv));
        any |= __float_as_uint(x[i]);
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
    uint32_t column = IS_GROUP ? column_in_group(head, c) : column_alone(head), words[8];
    uint32_t to[2] = {cu_sw128(column, 32 * g, 0), cu_sw128(column, 32 * g + 16, 0)};
    if (IS_GROUP) {
        float by = __uint_as_float((uint32_t)(127 + 4 - (below <= NARROW ? below : 0)) << 23);
#pragma unroll
        for (int i = 0; i < 8; i++) { /* as widen_narrow leaves them */
            const float *v = x + (i % 4 * 8 + i / 4 * 4);
            uint32_t bits[4]; /* the integer comes to lie in the low ones */
#pragma unroll
            for (int j = 0; j < 4; j++)
                bits[j] = __float_as_uint(__fmaf_rn(v[j], by, 0x1.8p23f));
            words[i] =
                cu_permute(cu_permute(bits[0], bits[1], 0x0040u), cu_permute(bits[2], bits[3], 0x0040u), 0x5410u);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint4 *)(void *)(q + GROUP_QUERY + to[half]) =
                make_uint4(words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]);
        if (below > NARROW)
            flags->narrow = 0;
    }
    float by = __uint_as_float((uint32_t)(127 + 6 - (below <= GROUP_BELOW_HEAD_MAX ? below : 0)) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) { /* values of even places, then of odd ones, as widen leaves them */
        const float *v = x + 8 * i;
        words[i] = cu_pack_e4m3(v[0] * by, v[2] * by) | (uint32_t)cu_pack_e4m3(v[4] * by, v[6] * by) << 16;
        words[i + 4] = cu_pack_e4m3(v[1] * by, v[3] * by) | (uint32_t)cu_pack_e4m3(v[5] * by, v[7] * by) << 16;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        *(uint4 *)(void *)(q + to[half]) =
            make_uint4(words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]);
    if (g == 0) {
        float v = p.weight, size = fabsf(v);
        is_plain = is_plain && (v == 0.0f || (size >= 0x1p-24f && size <= 0x1p24f));
        v = is_plain ? v * __uint_as_float((uint32_t)(127 + top) << 23) : 0.0f;
        w[head] = v;
        if (IS_GROUP)
            w[INDEX_GROUP * WEIGHT_STRIDE + head] = v * -0x1p23f;
    }
    if (!is_plain)
        flags->plain[c] = 0;
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

/* A warp's way over its spans with copies that run ahead. */
template <bool IS_GROUP> struct key_ring {
    static constexpr int32_t HEAD = IS_GROUP ? (int32_t)INDEX_GROUP_HEAD : 0; /* spans before a row's first */
    index_walk ahead;
    key_rows keys;
    int32_t keys_row;
    uint32_t stages;   /* the warp's part of the first one */
    uint32_t in, work; /* offsets of the next copy and of the span at work */

    __device__ void copy_next(const index_job &job, const key_shifts &shift) {
        while (HEAD > 0 && ahead.unit < ahead.end && ahead.unit - ahead.first < HEAD)
            index_walk_step(ahead);
        if (ahead.unit < ahead.end) {
            if (ahead.row != keys_row) {
                keys_row = ahead.row;
                keys = key_rows_of(job, keys_row, IS_GROUP);
            }
            copy_keys(job, shift, keys, (ahead.unit - ahead.first - HEAD) * INDEX_SPAN, stages + in);
            index_walk_step(ahead);
        }
        cu_cp_commit();
        in = in == (STAGES - 1) * STAGE_BYTES ? 0 : in + STAGE_BYTES;
    }
    __device__ void begin(const index_job &job, const key_shifts &shift, const index_walk &at, uint32_t own_stages) {
        ahead = at;
        keys_row = -1;
        stages = own_stages;
        in = work = 0;
        for (int i = 0; i < STAGES - 1; i++)
            copy_next(job, shift);
    }
    /* Offset of the stage whose copies have come; starts the next ones. */
    __device__ uint32_t take(const index_job &job, const key_shifts &shift) {
        uint32_t taken = work;
        cu_cp_wait<STAGES - 2>();
        __syncwarp();
        copy_next(job, shift);
        work = work == (STAGES - 1) * STAGE_BYTES ? 0 : work + STAGE_BYTES;
        return taken;
    }
};

/* Eight codes as E4M3 values, times 2^-6: those of even places, then those of odd ones. */
__device__ static inline void widen(uint32_t codes, uint32_t *even, uint32_t *odd) {
    *even = (codes & 0x08080808u) << 4 | (codes & 0x07070707u) << 2;
    *odd = (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
}

/* Eight codes as integers of 8 bits by a table: the first four, then the last four. */
__device__ static inline void widen_narrow(uint32_t codes, const uint4 &table, uint32_t *first, uint32_t *last) {
    uint32_t size = codes & 0x77777777u, from = (codes >> 1 & 0x44444444u) | 0x32103210u; /* 4 on: a negative one */
    *first = cu_permute(cu_permute(table.x, table.y, size), cu_permute(table.z, table.w, size), from);
    size >>= 16;
    from >>= 16;
    *last = cu_permute(cu_permute(table.x, table.y, size), cu_permute(table.z, table.w, size), from);
}

/* Codes of the warp's rows 8*half .. in tile `tile`: a lane's word of each group. */
__device__ static inline void load_words(uint32_t stage, uint32_t tile, uint32_t half, uint32_t (&r)[GROUPS]) {
    uint32_t lane = threadIdx.x % DI_WARP, row = half * 8 + lane % 8, chunk = lane / 8 ^ (row / 2 & 3);
    cu_ldmatrix(r, stage + tile * TILE_BYTES + row * 64 + chunk * 16);
}

/* The warp's part of tile `tile` as operand A of the four groups. */
__device__ static inline void load_tile(uint32_t stage, uint32_t tile, uint32_t (&a)[GROUPS][4]) {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t r[GROUPS];
        load_words(stage, tile, half, r);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            widen(r[g], &a[g][half], &a[g][half + 2]);
    }
}

/* The same as integers of 8 bits, each group times the power of two of its key: byte i of shifts[half] is 16 times the
 * exponent of group i. Table: 16 bytes for each exponent, see put_table. */
__device__ static inline void load_tile_narrow(uint32_t stage, uint32_t tile, const uint8_t *table,
                                               const uint32_t (&shifts)[2], uint32_t (&a)[GROUPS][4]) {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t r[GROUPS];
        load_words(stage, tile, half, r);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            widen_narrow(r[g], *(const uint4 *)(const void *)(table + (shifts[half] >> 8 * g & 0xFFu)), &a[g][half],
                         &a[g][half + 2]);
    }
}
/* Halves that E2M1 codes 0..7 stand for, times 2^exponent, and their negatives; by thread `exponent`. */
__device__ static inline void put_table(uint8_t *table, uint32_t exponent) {
    uint32_t low = 0x03020100u << exponent, high = 0x0C080604u << exponent;
    /* 128 - x borrows nothing from the next byte, and what it has too much is the sign's bit. */
    uint32_t low_negative = (0x80808080u - low) ^ 0x80808080u, high_negative = (0x80808080u - high) ^ 0x80808080u;
    ((uint4 *)(void *)table)[exponent] = make_uint4(low, high, low_negative, high_negative);
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
/* What integers want to know of a key: the power of two of each group by the least of them, in shifts as
 * load_tile_narrow takes them, and the least by 2^5. Whether they serve; a far key is scored otherwise. */
__device__ static inline bool narrow_key(uint32_t scales, uint32_t *shifts, float *scale) {
    uint32_t b0 = scales & 255u, b1 = scales >> 8 & 255u, b2 = scales >> 16 & 255u, b3 = scales >> 24;
    uint32_t x0 = b0 < b1 ? b0 : b1, x1 = b0 < b1 ? b1 : b0, y0 = b2 < b3 ? b2 : b3, y1 = b2 < b3 ? b3 : b2;
    uint32_t least = x0 < y0 ? x0 : y0, most = x1 > y1 ? x1 : y1;
    *shifts = ((scales - least * 0x01010101u) & 0x03030303u) << 4;
    *scale = __uint_as_float((least - 5 & 255u) << 23);
    return is_far(scales) || most - least <= NARROW;
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
    query_flags *flags = (query_flags *)(void *)(weights + WEIGHT_STRIDE);
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP;
    float *turn = (float *)(void *)(stages + STAGES * STAGE_BYTES) + warp * 32 * TURN_STRIDE;

    index_walk at = index_walk_begin(job, job.plan.alone);
    if (at.unit >= at.end)
        return;
    key_ring<false> ring;
    ring.begin(job, shift, at, cu_smem(stages) + warp * WARP_STAGE);
    int32_t row = -1, n = 0;
    const int32_t *list = NULL;
    bool is_plain = false;
    uint16_t *out = NULL;
    float w[8] = {};

    const uint64_t b = cu_desc_k128(cu_smem(q));
    for (; at.unit < at.end; index_walk_step(at)) {
        if (at.row != row) {
            row = at.row;
            query_part part = load_query(job, row);
            __syncthreads();
            if (threadIdx.x == 0)
                flags->plain[0] = 1;
            __syncthreads();
            put_query<false>(part, 0, q, weights, flags);
            cu_fence_async();
            __syncthreads();
            is_plain = flags->plain[0];
#pragma unroll
            for (int i = 0; i < 8; i++)
                w[i] = weights[lane % 4 * 8 + i];
            n = job.plan.n[row];
            list = job.plan.kind[row] == INDEX_LISTED ? job.list + (int64_t)row * job.n_list : NULL;
            out = (uint16_t *)job.ranks + index_ranks_at(job, row);
        }
        uint32_t taken = ring.take(job, shift), stage = ring.stages + taken;
        const uint32_t *scales = (const uint32_t *)(const void *)(stages + taken + warp * WARP_STAGE + 2 * TILE_BYTES);
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

/* What a block knows of the group at work, a thread of its row. */
struct group_rows {
    int32_t row, n; /* the thread's row and its entries; n is 0 where it has none */
    int32_t n_most; /* entries of the group */
    bool is_plain;
    uint16_t *out;
};
/* The first of the thread's two entries of a tile that begins at entry `base`; the other is 8 on. */
__device__ static inline int32_t tile_entry(int32_t base) {
    return base + (int32_t)(threadIdx.x / DI_WARP * 16 + threadIdx.x % DI_WARP / 4);
}
/* Puts the ranks of both. */
__device__ static inline void put_tile(const index_job &job, const group_rows &own, int32_t base,
                                       const float (&score)[2]) {
    int32_t n_room = (own.n + INDEX_SPAN - 1) / INDEX_SPAN * INDEX_SPAN;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t v = tile_entry(base) + half * 8;
        if (v < n_room)
            own.out[v] = v < own.n ? put_score(job, own.row, v, score[half]) : 0;
    }
}
/* Scores once more, as the reference does, what multiplies don't serve of a span. */
__device__ static inline void put_asked(const index_job &job, const group_rows &own, int32_t base,
                                        const uint32_t *scales) {
#pragma unroll 1
    for (int i = 0; i < 4; i++) { /* tile, half */
        int32_t v = tile_entry(base) + i / 2 * 64 + i % 2 * 8;
        bool asks = v < own.n && (!own.is_plain || is_far(scales[i * 8 + threadIdx.x % DI_WARP / 4]));
        if (!__any_sync(0xFFFFFFFFu, asks))
            continue;
        float score = score_asked(job, asks, own.row, v, 0.0f);
        if (asks)
            own.out[v] = put_score(job, own.row, v, score);
    }
}

/* ---- by floats: d = a group's part of 16 heads of four rows; begun, not finished. */
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
__device__ static inline void score_wide(const index_job &job, const group_rows &own, uint32_t stage,
                                         const uint32_t *scales, uint64_t b, const float *w, int32_t base) {
    uint32_t lane = threadIdx.x % DI_WARP;
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
        score[0] = __fmul_rn(score[0], first_scale(scale[0]));
        score[1] = __fmul_rn(score[1], first_scale(scale[1]));
        put_tile(job, own, base + (int32_t)(tile * 64), score);
    }
}

/* ---- by integers: d = the dot products of 16 heads of four rows; begun, not finished. */
__device__ static inline void multiply(int32_t (&d)[32], const uint32_t (&a)[GROUPS][4], uint64_t b) {
    cu_wgmma_fence();
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++)
        cu_wgmma_s8_rs(d, a[g], cu_desc_add(b, 32 * g), g > 0);
    cu_wgmma_commit();
}
template <int N> __device__ static inline void finish(int32_t (&d)[32]) {
    cu_wgmma_wait<N>();
    cu_wgmma_pin(d);
}
/* As add_heads. 2^23 + relu(dot), made as an integer, is a float as well, and w times it less w * 2^23 (which is exact)
 * rounds as w * relu(dot) does. */
__device__ static inline void add_heads(const int32_t (&dot)[32], const float *w, float (&score)[2]) {
    const int32_t one = 0x4B000000; /* 2^23 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 four = ((const float4 *)(const void *)w)[i];
        float4 less = ((const float4 *)(const void *)(w + INDEX_GROUP * WEIGHT_STRIDE))[i];
        const float by[4] = {four.x, four.y, four.z, four.w}, minus[4] = {less.x, less.y, less.z, less.w};
#pragma unroll
        for (int h = 0; h < 4; h++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int32_t d = dot[(2 * i + h / 2) * 4 + half * 2 + h % 2] + one;
                float by_head = __fmaf_rn(by[h], __int_as_float(d > one ? d : one), minus[h]);
                score[half] = __fadd_rn(score[half], by_head);
            }
        }
    }
}
/* Of two tiles, or of the first; x has the first heads and y the others, and one of them is always being filled. */
struct narrow_tile {
    uint32_t a[GROUPS][4];
    float scale[2];
};
__device__ static inline void begin_narrow(narrow_tile *t, uint32_t stage, uint32_t tile, const uint8_t *table,
                                           const uint2 *keys) {
    uint32_t shifts[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint2 key = keys[tile * 16 + half * 8 + threadIdx.x % DI_WARP / 4];
        shifts[half] = key.x;
        t->scale[half] = __uint_as_float(key.y);
    }
    load_tile_narrow(stage, tile, table, shifts, t->a);
}
__device__ static inline void put_narrow(const index_job &job, const group_rows &own, int32_t base, float (&score)[2],
                                         const float (&scale)[2]) {
    score[0] = __fmul_rn(score[0], scale[0]);
    score[1] = __fmul_rn(score[1], scale[1]);
    put_tile(job, own, base, score);
}
__device__ static inline void score_narrow(const index_job &job, const group_rows &own, uint32_t stage,
                                           const uint8_t *table, const uint2 *keys, uint64_t b, const float *w,
                                           int32_t base) {
    narrow_tile t;
    int32_t x[32], y[32];
    float score[2] = {0.0f, 0.0f};
    bool has_second = base + 64 < own.n_most;
    begin_narrow(&t, stage, 0, table, keys);
    multiply(x, t.a, b);
    multiply(y, t.a, cu_desc_add(b, SECOND_HEADS));
    finish<1>(x);
    add_heads(x, w, score);
    if (has_second) {
        narrow_tile u;
        begin_narrow(&u, stage, 1, table, keys);
        multiply(x, u.a, b);
        finish<1>(y);
        add_heads(y, w + HEADS / 2, score);
        multiply(y, u.a, cu_desc_add(b, SECOND_HEADS));
        put_narrow(job, own, base, score, t.scale);
        finish<1>(x);
        score[0] = score[1] = 0.0f;
        add_heads(x, w, score);
        finish<0>(y);
        add_heads(y, w + HEADS / 2, score);
        put_narrow(job, own, base + 64, score, u.scale);
    } else {
        finish<0>(y);
        add_heads(y, w + HEADS / 2, score);
        put_narrow(job, own, base, score, t.scale);
        score[0] = score[1] = 0.0f; /* no row has these */
        put_narrow(job, own, base + 64, score, score);
    }
}

__global__ void __launch_bounds__(THREADS, GROUPS_BLOCKS) index_groups(index_job job, key_shifts shift) {
    DI_DYN_SHARED(uint8_t, q); /* the queries, twice; stages; what integers want of keys; the table; weights, twice */
    cu_grid_begin();
    uint32_t lane = threadIdx.x % DI_WARP, warp = threadIdx.x / DI_WARP, c = lane % 4;
    uint8_t *stages = q + 2 * GROUP_QUERY, *table = stages + STAGES * STAGE_BYTES + THREADS * 8;
    uint2 *keys = (uint2 *)(void *)(stages + STAGES * STAGE_BYTES) + warp * DI_WARP;
    float *weights = (float *)(void *)(table + TABLE_BYTES);
    query_flags *flags = (query_flags *)(void *)(weights + 2 * INDEX_GROUP * WEIGHT_STRIDE);

    index_walk at = index_walk_begin(job, job.plan.group);
    if (at.unit >= at.end)
        return;
    key_ring<true> ring;
    ring.begin(job, shift, at, cu_smem(stages) + warp * WARP_STAGE);
    if (threadIdx.x <= NARROW)
        put_table(table, threadIdx.x);
    int32_t row = -1;
    bool is_narrow = false;
    group_rows own = {};

    const uint64_t b = cu_desc_k128(cu_smem(q));
    for (; at.unit < at.end; index_walk_step(at)) {
        int32_t base = (at.unit - at.first - INDEX_GROUP_HEAD) * INDEX_SPAN;
        if (base < 0)
            continue;
        if (at.row != row) {
            row = at.row;
            int32_t n_rows = job.plan.kind[row];
            query_part next = load_query(job, row);
            __syncthreads();
            if (threadIdx.x < INDEX_GROUP)
                flags->plain[threadIdx.x] = 1;
            if (threadIdx.x == INDEX_GROUP)
                flags->narrow = 1;
            __syncthreads();
#pragma unroll 1
            for (int32_t i = 0; i < INDEX_GROUP; i++) { /* what lacks of four repeats the first */
                query_part part = next;
                if (i + 1 < INDEX_GROUP)
                    next = load_query(job, i + 1 < n_rows ? row + i + 1 : row);
                put_query<true>(part, (uint32_t)i, q, weights + i * WEIGHT_STRIDE, flags);
            }
            own.row = (int32_t)c < n_rows ? row + (int32_t)c : row;
            own.n = (int32_t)c < n_rows ? job.plan.n[own.row] : 0;
            own.n_most = own.n;
#pragma unroll
            for (int32_t d = 1; d < INDEX_GROUP; d *= 2) {
                int32_t other = __shfl_xor_sync(0xFFFFFFFFu, own.n_most, d);
                own.n_most = other > own.n_most ? other : own.n_most;
            }
            own.out = (uint16_t *)job.ranks + index_ranks_at(job, own.row);
            cu_fence_async();
            __syncthreads();
            own.is_plain = flags->plain[c];
            is_narrow = flags->narrow;
        }
        uint32_t taken = ring.take(job, shift), stage = ring.stages + taken;
        const uint32_t *scales = (const uint32_t *)(const void *)(stages + taken + warp * WARP_STAGE + 2 * TILE_BYTES);
        uint2 key;
        float scale;
        bool serves = narrow_key(scales[lane], &key.x, &scale);
        key.y = __float_as_uint(scale);
        keys[lane] = key;
        const float *w = weights + c * WEIGHT_STRIDE;
        if (__syncthreads_and(is_narrow && serves))
            score_narrow(job, own, stage, table, keys, cu_desc_add(b, GROUP_QUERY), w, base);
        else
            score_wide(job, own, stage, scales, b, w, base);
        if (__any_sync(0xFFFFFFFFu, !own.is_plain || is_far(scales[lane])))
            put_asked(job, own, base, scales);
        __syncwarp();
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
