/* What the kernels of index_select share: the plan of a call, how scores are ranked, where keys lie.
 *
 * Entry counts are known on the device alone, so a call begins with one block that makes a plan of all rows; the other
 * kernels have fixed grids and share out what the plan holds. A row's scores are kept as ranks: unsigned numbers that
 * order as scores do, 0 for what is never chosen. Ranks of rows lie one after the other, each row a whole number of
 * spans of 128:
 *
 *     rank of entry v of row r:  ranks[(plan.at[r] - chunk * chunk_spans) * 128 + v]
 *
 * A row with a list of candidate blocks has virtual entries: v is entry v % b of the v/b-th listed block, b entries
 * each. Where memory for the ranks of all rows lacks, rows are taken in chunks by plan.home.
 *
 * Private to backend/cuda/index*.cu. */
#ifndef DI_INDEX_CUH
#define DI_INDEX_CUH

#include "cu.cuh"
#include "sm90.cuh"

enum {
    INDEX_SPAN = 128,      /* entries that a block scores at a time */
    INDEX_GROUP = 4,       /* rows that score the same keys together, at most */
    INDEX_GROUP_HEAD = 2,  /* spans that take as long as preparing a group's queries */
    INDEX_SEGMENT = 32768, /* ranks that a block chooses from at a time */
    INDEX_CHUNK_BYTES = 256 << 20
};

/* What becomes of a row's scores. 2..INDEX_GROUP: it leads so many rows of one sequence, which are scored together. */
enum { INDEX_FOLLOWS = 0, INDEX_ALONE = 1, INDEX_LISTED = 16, INDEX_MASKED = 17 };

/* Device arrays of n_rows, and n_rows + 1 where they are sums of what comes before a row. */
struct index_plan {
    int32_t *n;          /* entries, virtual ones where the row is listed */
    int32_t *kind;       /* above */
    int32_t *home;       /* `at` of the row that leads */
    int32_t *done;       /* segments of the row that are finished, of entries and of blocks */
    int32_t *block_done; /* */
    int32_t *at;         /* spans before the row */
    int32_t *alone;      /* spans of rows that are scored alone */
    int32_t *group;      /* spans of rows that lead others, and INDEX_GROUP_HEAD before each one's */
    int32_t *seg;        /* segments of entries; a row has one at least */
    int32_t *block_seg;  /* segments of candidate blocks */
};

struct index_job {
    const int32_t *pos, *seq, *blocks;
    int64_t blocks_stride;
    int32_t n_rows, n_heads, dim, ratio, n_max; /* n_max: entries of a row, at most */
    di_act q, w;
    di_paged keys;
    bool round_bf16;
    const int32_t *list;   /* candidate blocks [n_rows, n_list]; NULL: all */
    int32_t n_list, block; /* entries of a candidate block */
    bool with_blocks;      /* the best blocks are asked for */
    bool with_groups;      /* rows of a sequence are scored together */
    float *scores;         /* [n_rows, scores_stride] or NULL */
    int64_t scores_stride;
    index_plan plan;
    void *ranks; /* uint16_t: the upper halves, of scores that are bf16; or uint32_t */
    int32_t chunk, n_chunks, chunk_spans;
};

/* Scores of the chunk's rows for heads of 32 x 128, keys DI_KV_MX4 and bf16 scores, as 16-bit ranks (index_sm90.cu). */
void di_cuda_index_scores_sm90(const index_job *job, int n_sms, cudaStream_t stream);
/* Whether it makes the plan as well. */
static inline bool di_cuda_index_plans(const index_job *job) {
    return job->n_rows <= DI_WARP && job->n_chunks == 1 && !job->with_groups;
}
/* Whether it takes the arguments. */
bool di_cuda_index_is_sm90(const di_index_select_args *args);

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

__device__ static inline uint32_t index_rank(float score) {
    uint32_t u = __float_as_uint(score);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u || u == 0xFF800000u)
        return 0;
    if (u == 0x80000000u)
        u = 0; /* the two zeros are one */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* ---- the plan of a row ------------------------------------------------------------------------------------------
 */

/* Blocks of the row's list that have entries below n. A forward lists all blocks, or as many as the list holds. */
__device__ static inline int32_t index_listed(const int32_t *list, int32_t n_list, int32_t n_blocks) {
    if (list[n_list - 1] >= 0 && list[n_list - 1] < n_blocks)
        return n_list;
    int32_t lo = 0, hi = n_list - 1; /* the last one isn't in */
    if (n_blocks < n_list && (n_blocks == 0 || (list[n_blocks - 1] >= 0 && list[n_blocks - 1] < n_blocks)))
        lo = n_blocks;
    if (lo == n_blocks && list[lo] < 0)
        return lo;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (list[mid] >= 0 && list[mid] < n_blocks)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct index_row {
    int32_t n, kind;
};
__device__ static inline index_row index_plan_row(const index_job &job, int32_t row) {
    int32_t pos = job.pos[row], n = pos < 0 ? 0 : (int32_t)(((uint32_t)pos + 1) / (uint32_t)job.ratio);
    n = n > job.n_max ? job.n_max : n;
    if (!job.list)
        return {n, INDEX_ALONE};
    const int32_t *list = job.list + (int64_t)row * job.n_list;
    int32_t n_blocks = (n + job.block - 1) / job.block, listed = index_listed(list, job.n_list, n_blocks);
    if (listed == n_blocks)
        return {n, INDEX_ALONE}; /* all of them */
    if (job.with_blocks)
        return {n, INDEX_MASKED};
    int32_t v = 0;
    if (listed > 0) {
        int32_t last = n - list[listed - 1] * job.block;
        v = (listed - 1) * job.block + (last < job.block ? last : job.block);
    }
    return {v, INDEX_LISTED};
}

__device__ static inline int32_t index_segments(int32_t n) {
    return n > 0 ? (n + INDEX_SEGMENT - 1) / INDEX_SEGMENT : 1;
}
__device__ static inline int32_t index_spans(int32_t n) {
    return (n + INDEX_SPAN - 1) / INDEX_SPAN;
}

/* ---- rows and spans ----------------------------------------------------------------------------------------------
 */

/* The last i of [lo, hi) with a[i] <= x, where a never falls and a[lo] <= x; by all lanes of a warp. */
__device__ static inline int32_t index_last(const int32_t *a, int32_t lo, int32_t hi, int32_t x) {
    int32_t lane = (int32_t)(threadIdx.x % DI_WARP);
    while (hi - lo > 1) {
        int32_t step = (hi - lo + DI_WARP - 1) / DI_WARP, i = lo + lane * step;
        int32_t n = __popc(__ballot_sync(0xFFFFFFFFu, i < hi && a[i] <= x));
        lo += (n - 1) * step;
        hi = lo + step < hi ? lo + step : hi;
    }
    return lo;
}

/* Rows [lo, hi) of the chunk. */
__device__ static inline void index_chunk_rows(const index_job &job, int32_t *lo, int32_t *hi) {
    *lo = 0;
    *hi = job.n_rows;
    if (job.n_chunks == 1)
        return;
    int32_t first = job.chunk * job.chunk_spans;
    if (job.chunk > 0)
        *lo = index_last(job.plan.home, 0, job.n_rows, first - 1) + 1;
    *hi = index_last(job.plan.home, 0, job.n_rows, first + job.chunk_spans - 1) + 1;
}

/* A block's way over its spans: an equal part of those in `work` of the chunk's rows. Rows without work are passed. */
struct index_walk {
    const int32_t *work;
    int32_t unit, end;        /* spans left to the block: [unit, end) of all */
    int32_t row, first, next; /* at work: the row, and its spans [first, next) of all */
};
__device__ static inline index_walk index_walk_begin(const index_job &job, const int32_t *work) {
    index_walk k;
    int32_t lo, hi;
    index_chunk_rows(job, &lo, &hi);
    k.work = work;
    k.unit = k.end = k.row = k.first = k.next = 0;
    if (lo >= hi)
        return k;
    int32_t from = work[lo], n = work[hi] - from;
    int32_t share = n / (int32_t)gridDim.x, more = n % (int32_t)gridDim.x, b = (int32_t)blockIdx.x;
    k.unit = from + share * b + (b < more ? b : more);
    k.end = k.unit + share + (b < more);
    if (k.unit < k.end) {
        k.row = index_last(work, lo, hi, k.unit);
        k.first = work[k.row];
        k.next = work[k.row + 1];
    }
    return k;
}
__device__ static inline void index_walk_step(index_walk &k) {
    if (++k.unit >= k.end)
        return;
    while (k.unit >= k.next) {
        k.row++;
        k.first = k.next;
        k.next = k.work[k.row + 1];
    }
}

/* Where the ranks of a row start. */
__device__ static inline int64_t index_ranks_at(const index_job &job, int32_t row) {
    return ((int64_t)job.plan.at[row] - (int64_t)job.chunk * job.chunk_spans) * INDEX_SPAN;
}
/* The entry that stands for virtual entry v. */
__device__ static inline int32_t index_entry(const index_job &job, int32_t row, int32_t kind, int32_t v) {
    if (kind != INDEX_LISTED)
        return v;
    return job.list[(int64_t)row * job.n_list + v / job.block] * job.block + v % job.block;
}

/* ---- keys and queries --------------------------------------------------------------------------------------------
 */

/* Codes and scales of an entry. */
struct index_key {
    const uint8_t *data, *scale;
};
__device__ static inline index_key index_key_at(const index_job &job, int32_t row, int32_t entry) {
    const di_paged &p = job.keys;
    int64_t n = p.n_values;
    int64_t data = p.format == DI_KV_F32 ? 4 * n : p.format == DI_KV_FP8 ? n : n / 2;
    int64_t scale = p.format == DI_KV_F32 ? 0 : p.format == DI_KV_FP4 ? n / 16 : n / 32;
    int64_t page = job.blocks[job.seq[row] * job.blocks_stride + entry / p.per_block], in = entry % p.per_block;
    const uint8_t *section = p.pages + page * (int64_t)p.page_bytes + p.offset;
    index_key k;
    if (p.format == DI_KV_MX4) {
        k.data = section + in * data;
        k.scale = section + p.per_block * data + in * scale;
    } else {
        k.data = section + in * (data + scale);
        k.scale = k.data + data;
    }
    return k;
}

/* The code of E2M1 nearest to f: how many borders between neighbours the magnitude has passed; ties to the even code.
 */
__device__ static inline uint32_t index_e2m1_code(float f) {
    uint32_t bits = __float_as_uint(f);
    int32_t a = (int32_t)(bits & 0x7FFFFFFFu);
    uint32_t code = (uint32_t)(a > 0x3E800000) + (uint32_t)(a >= 0x3F400000) + (uint32_t)(a > 0x3FA00000) +
                    (uint32_t)(a >= 0x3FE00000) + (uint32_t)(a > 0x40200000) + (uint32_t)(a >= 0x40600000) +
                    (uint32_t)(a > 0x40A00000);
    return code | (bits >> 28 & 8u);
}
/* Magnitude of a value as an integer that orders as it; NaN counts as zero. */
__device__ static inline int32_t index_magnitude(float f) {
    int32_t a = (int32_t)(__float_as_uint(f) & 0x7FFFFFFFu);
    return a > 0x7F800000 ? 0 : a;
}
/* QI's scale of a group whose largest magnitude is `most` (or 0): a power of two, or infinity. Source: model.md 0.2. */
__device__ static inline float index_scale(int32_t most) {
    int32_t least = 0x01C00000; /* 6 * 2^-126 */
    float s = __fdiv_rn(__uint_as_float((uint32_t)(most > least ? most : least)), 6.0f);
    return __uint_as_float((__float_as_uint(s) + 0x007FFFFFu) & 0x7F800000u);
}

#endif
