/* Mixture of experts: the order of pairs, the portable product kernels, the table of experts. (The router: route.cu.)
 *
 * Choices are sorted by expert on the device (moe.cuh). The portable products take tiles of 8 pairs and 32 columns, one
 * output a thread, inputs in order; the activation between the matrices goes through QA when the 32 columns of a tile
 * are there. Sums over a row's experts are a last, small kernel.
 *
 * Source: model.md 3.10; sums in the order of ops.h. */
#include "gemm.h"
#include "moe.cuh"

#include "moe_placed.cuh"
#include "rows.cuh"
#include "tiles_sm90.cuh"

/* ---- the table of experts ---------------------------------------------------------------------------------------- */

static const char *const expert_names[3] = {"w1", "w3", "w2"};

static di_status expert_check(const di_expert *e, const di_expert *like, bool is_same_format, const char *who,
                              int32_t i, di_error *err) {
    const di_mat *m[3] = {&e->w1, &e->w3, &e->w2}, *l[3] = {&like->w1, &like->w3, &like->w2};
    for (int j = 0; j < 3; j++) {
        if (!di_cuda_is_mat(m[j]) || m[j]->n_out != l[j]->n_out || m[j]->n_in != l[j]->n_in ||
            (is_same_format && m[j]->dtype != l[j]->dtype))
            return di_fail(err, DI_ERR_SHAPE, "nvidia: %s expert %d, '%s': %s [%lld,%lld], expected %s [%lld,%lld]",
                           who, (int)i, expert_names[j], di_dtype_name(m[j]->dtype), (long long)m[j]->n_out,
                           (long long)m[j]->n_in, is_same_format ? di_dtype_name(l[j]->dtype) : "a matrix",
                           (long long)l[j]->n_out, (long long)l[j]->n_in);
    }
    if (m[0]->n_out != m[1]->n_out || m[0]->n_in != m[1]->n_in || m[2]->n_in != m[0]->n_out ||
        m[2]->n_out != m[0]->n_in)
        return di_fail(err, DI_ERR_SHAPE, "nvidia: %s expert %d: its matrices don't fit together", who, (int)i);
    return DI_OK;
}

static bool fast_expert_fits(const di_expert *e, size_t scale_align) {
    const di_mat *m[3] = {&e->w1, &e->w3, &e->w2};
    for (int i = 0; i < 3; i++) {
        if ((m[i]->dtype != DI_F4_E2M1 && m[i]->dtype != DI_F8_E4M3) || m[i]->dtype != m[0]->dtype ||
            (uintptr_t)m[i]->data % 16 || (uintptr_t)m[i]->scale % scale_align)
            return false;
    }
    return true;
}

enum { PLACE_THREADS = 1024 }; /* one block fits a multiprocessor */

/* Slabs of matrix blockIdx.y (three of an expert), one of a block at a time, with their scales. */
template <bool IS_F8>
__device__ static inline void place_mat(const di_mat &w, int32_t mat, uint32_t *slab, int32_t *refused) {
    constexpr int WORDS = IS_F8 ? 16 : 8, BITS = IS_F8 ? 8 : 4, EACH = 32 / BITS; /* of a block of 64 k */
    constexpr uint32_t ADD = IS_F8 ? MOE_F8_EXPONENT : MOE_F4_EXPONENT;
    const int32_t row_words = (int32_t)(w.n_in / EACH), row_blocks = (int32_t)(w.n_in / 64);
    const int32_t row_scales = (int32_t)(w.n_in / 128), n_scales = IS_F8 ? row_scales : MOE_SLAB * row_scales;
    const int t = (int)threadIdx.x, step = (int)blockDim.x;
    for (int64_t s = blockIdx.x; s < w.n_out / MOE_SLAB; s += gridDim.x) {
        uint32_t *data = (uint32_t *)w.data + s * MOE_SLAB * row_words;
        uint32_t *scales = (uint32_t *)(void *)w.scale + s * n_scales;
        __syncthreads();
        for (int32_t i = t; i < MOE_SLAB * row_words; i += step)
            slab[i] = data[i];
        __syncthreads();
        for (int32_t b = t; b < MOE_SLAB * row_blocks; b += step) {
            const uint32_t *from = slab + b * WORDS;
            uint32_t to[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                to[i] = 0;
#pragma unroll
            for (int k = 0; k < 64; k++) {
                moe_place p = moe_place_of(k);
                uint32_t code = from[k / EACH] >> k % EACH * BITS & ((1u << BITS) - 1u);
                to[moe_place_word(p, IS_F8)] |= moe_place_bits(p, IS_F8, code);
            }
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                data[moe_place_at(b / row_blocks, b % row_blocks, i, IS_F8)] = to[i];
        }
        __syncthreads();
        for (int32_t i = t; i < n_scales; i += step)
            slab[i] = scales[i];
        __syncthreads();
        for (int32_t i = t; i < n_scales; i += step) {
            uint32_t e[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t scale = slab[i] >> 8 * j & 255;
                e[j] = scale + ADD;
                if (e[j] > 254)
                    atomicMax(refused, 1 + (mat << 8 | (int32_t)scale));
            }
            scales[IS_F8 ? i : moe_place_scale(i / row_scales, i % row_scales)] =
                e[0] << 7 | e[1] << 23 | moe_rotate(e[2] << 7 | e[3] << 23, 8);
        }
    }
}
__global__ void __launch_bounds__(PLACE_THREADS) place_experts(const di_expert *table, int32_t *refused) {
    DI_DYN_SHARED(uint32_t, slab);
    const di_expert *e = &table[blockIdx.y / 3];
    const di_mat w = blockIdx.y % 3 == 0 ? e->w1 : blockIdx.y % 3 == 1 ? e->w3 : e->w2;
    if (w.dtype == (di_dtype)MOE_F4_PLACED)
        place_mat<false>(w, (int32_t)blockIdx.y, slab, refused);
    else if (w.dtype == (di_dtype)MOE_F8_PLACED)
        place_mat<true>(w, (int32_t)blockIdx.y, slab, refused);
}

/* Whether Hopper's kernels take experts of this one's kind. */
static bool placed_fits(const di_device *dev, const di_expert *e) {
    return dev->arch == DI_CUDA_SM90 && di_moe_placed_fits(e->w1.n_in, e->w1.n_out) && fast_expert_fits(e, 8);
}
static void mark_placed(di_expert *e) {
    di_mat *m[3] = {&e->w1, &e->w3, &e->w2};
    for (int i = 0; i < 3; i++)
        m[i]->dtype = (di_dtype)(m[i]->dtype == DI_F8_E4M3 ? MOE_F8_PLACED : MOE_F4_PLACED);
}

/* The table of host [n_all], the shared expert last, on the device. slab: of those that are marked to be placed, at
 * most; 0: none is. */
static di_status place_all(di_device *dev, const di_expert *host, int32_t n_all, size_t slab, di_expert **out,
                           di_error *err) {
    size_t n_bytes = (size_t)n_all * sizeof *host;
    uint8_t *p = NULL; /* the table; behind it what was refused, 0 if nothing */
    int32_t refused = 0;
    di_status st = di_cuda_check(cudaSetDevice(dev->ordinal), err, "choosing the device");
    if (!st)
        st = di_cuda_check(cudaMalloc((void **)&p, n_bytes + sizeof refused), err, "a table of experts");
    if (!st)
        st = di_cuda_check(cudaMemcpy(p, host, n_bytes, cudaMemcpyHostToDevice), err, "copying a table of experts");
    if (!st)
        st = di_cuda_check(cudaMemset(p + n_bytes, 0, sizeof refused), err, "clearing what was refused");
    if (!st && slab) {
        di_expert *table = (di_expert *)(void *)p;
        DI_LAUNCH((place_experts), dim3(16, 3 * (unsigned)n_all), PLACE_THREADS, slab, (cudaStream_t)0,
                  (const di_expert *)table, (int32_t *)(void *)(p + n_bytes));
        st = di_cuda_check(cudaGetLastError(), err, "starting to lay experts out");
        if (!st)
            st = di_cuda_check(cudaMemcpy(&refused, p + n_bytes, sizeof refused, cudaMemcpyDeviceToHost), err,
                               "laying experts out");
    }
    if (!st && refused) {
        int mat = (refused - 1) >> 8, scale = (refused - 1) & 255, i = mat / 3;
        int most = 254 - (host[i].w1.dtype == (di_dtype)MOE_F8_PLACED ? MOE_F8_EXPONENT : MOE_F4_EXPONENT);
        bool is_shared = i == n_all - 1;
        st = di_fail(err, DI_ERR_FORMAT,
                     "nvidia: %s expert %d, '%s': a scale of byte %d (2^%d), expected %d (2^%d) at most; "
                     "--device-kernels portable takes any",
                     is_shared ? "shared" : "routed", is_shared ? 0 : i, expert_names[mat % 3], scale, scale - 127,
                     most, most - 127);
    }
    if (st)
        (void)cudaFree(p);
    else
        *out = (di_expert *)(void *)p;
    return st;
}

/* Kernels rely on what is checked here: all routed experts have one shape and format, the shared one the same shape;
 * and where Hopper's take them, their weights are laid out anew. */
di_status di_cuda_experts_place(di_device *dev, const di_expert *experts, int32_t n, const di_expert *shared,
                                void **out, di_error *err) {
    *out = NULL;
    if (n < 0 || (n > 0 && !experts) || n > DI_MOE_EXPERTS_MAX)
        return di_fail(err, DI_ERR_SHAPE, "nvidia: %d experts, expected 0 to %d", (int)n, DI_MOE_EXPERTS_MAX);
    if (!n && !shared)
        return DI_OK;
    const di_expert *like = n ? &experts[0] : shared;
    di_status st = DI_OK;
    bool is_placed = n > 0, is_shared_placed = shared && placed_fits(dev, shared);
    for (int32_t i = 0; i < n && !st; i++) {
        st = expert_check(&experts[i], like, true, "routed", i, err);
        is_placed = is_placed && placed_fits(dev, &experts[i]);
    }
    if (shared && !st)
        st = expert_check(shared, like, false, "shared", 0, err);
    if (st)
        return st;
    di_expert *host = (di_expert *)calloc((size_t)n + 1, sizeof *host);
    if (!host)
        return di_fail(err, DI_ERR_MEMORY, "nvidia: no memory for a table of experts");
    for (int32_t i = 0; i < n; i++) {
        host[i] = experts[i];
        if (is_placed)
            mark_placed(&host[i]);
    }
    if (shared) {
        host[n] = *shared;
        if (is_shared_placed)
            mark_placed(&host[n]);
    }
    di_expert *table = NULL;
    size_t slab = is_placed || is_shared_placed ? MOE_SLAB * (size_t)DI_MAX(like->w1.n_in, like->w1.n_out) : 0;
    st = place_all(dev, host, n + 1, slab, &table, err);
    free(host);
    *out = table;
    return st;
}

/* ---- order of pairs ---------------------------------------------------------------------------------------------- */

enum { ORDER_SMALL = 1024 }; /* pairs that one block sorts */

static inline int64_t tiles_bound(int64_t n_pairs, int64_t n_experts, int32_t tile_rows) {
    int64_t spread = n_experts + 1 + n_pairs / tile_rows; /* every expert's last tile may be partial */
    return DI_MIN(n_pairs, spread);
}

size_t di_moe_order_cut(const di_moe_args *a, int64_t row0, int64_t n_rows, int32_t tile_rows, uint8_t *base,
                        moe_order *out) {
    int32_t per_row = a->k + (a->shared ? 1 : 0);
    int64_t n_pairs = n_rows * per_row, n_tiles = tiles_bound(n_pairs, a->n_experts, tile_rows);
    int64_t pairs_max = di_moe_pairs_max(a, n_rows);
    moe_order o = {};
    o.table = (const di_expert *)a->table;
    o.idx = a->idx ? a->idx + row0 * a->k : NULL;
    o.weight = a->weight ? a->weight + row0 * a->k : NULL;
    o.n_rows = (int32_t)n_rows;
    o.k = a->k;
    o.n_experts = a->n_experts;
    o.per_row = per_row;
    o.tile_rows = tile_rows;
    o.tiles_max = (int32_t)n_tiles;
    size_t total = 0;
#define CUT(field, type, n)                                                                                            \
    do {                                                                                                               \
        if (base)                                                                                                      \
            o.field = (type *)(base + total);                                                                          \
        total += di_cuda_piece((size_t)(n) * sizeof(type));                                                            \
    } while (0)
    CUT(count, int32_t, a->n_experts + 1);
    CUT(pair_row, int32_t, pairs_max);
    CUT(pair_weight, float, pairs_max);
    CUT(row_pairs, int32_t, n_pairs);
    CUT(tiles, moe_tile, n_tiles);
    CUT(head, int32_t, MOE_HEAD);
#undef CUT
    if (out)
        *out = o;
    return total;
}

/* An id out of range, which the host can't see, must not reach memory out of range. */
__device__ static inline int32_t order_expert(const moe_order &o, int32_t i) {
    int32_t e = o.idx[i];
    return e < 0 ? 0 : e < o.n_experts ? e : o.n_experts - 1;
}

__device__ static inline int32_t order_tiles(const moe_order &o, int32_t n) {
    return (n + o.tile_rows - 1) / o.tile_rows;
}

/* Where routed pairs begin. */
__device__ static inline int32_t order_routed(const moe_order &o) {
    return o.per_row > o.k ? moe_places(o.n_rows) : 0;
}

/* Tiles of an expert, as even as multiples of 8 allow. */
__device__ static inline void order_put_tile(const moe_order &o, int32_t expert, int32_t pair0, int32_t n,
                                             int32_t first, int32_t t) {
    int32_t count = order_tiles(o, n), size = moe_places((n + count - 1) / count);
    const di_expert *w = &o.table[expert];
    moe_tile tile = {expert,
                     pair0 + t * size,
                     n - t * size < size ? n - t * size : size,
                     first,
                     count,
                     first + t,
                     {0, 0},
                     {(const uint8_t *)w->w1.data, (const uint8_t *)w->w3.data, (const uint8_t *)w->w2.data},
                     {w->w1.scale, w->w3.scale, w->w2.scale}};
    o.tiles[first + t] = tile;
}

/* Pair i of the choices has its place: `pair`. */
__device__ static inline void order_put_pair(const moe_order &o, int32_t i, int32_t e, int32_t pair) {
    int32_t row = i / o.k, place = 0;
    for (int32_t j = row * o.k; j < (row + 1) * o.k; j++) {
        int32_t other = order_expert(o, j);
        place += other < e || (other == e && j < i);
    }
    o.pair_row[pair] = row;
    o.pair_weight[pair] = o.weight[i];
    o.row_pairs[(int64_t)row * o.per_row + place] = pair;
}
__device__ static inline void order_put_shared(const moe_order &o, int32_t row) {
    o.pair_row[row] = row;
    o.pair_weight[row] = 1.0f;
    o.row_pairs[(int64_t)row * o.per_row + o.k] = row;
}

/* Chunk i, by one thread: eight values, four of each group of a block. */
__device__ static inline void order_widen(const moe_widening &w, int64_t i) {
    int64_t block = i / 8;
    const uint32_t *from = (const uint32_t *)(const void *)(w.from + block * 64) + i % 8;
    uint16_t scales = ((const uint16_t *)(const void *)w.from_scale)[block];
    ((uint4 *)(void *)w.to)[i] = tile_x_pairs(__ldg(from), __ldg(from + 8), scales & 255u, scales >> 8);
}

__global__ void __launch_bounds__(256) order_widening(moe_widening w) {
    cu_grid_begin();
    int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i < w.n_chunks)
        order_widen(w, i);
}

/* Everything by the first block, a pair and an expert a thread: few rows. The others widen activations. */
__global__ void __launch_bounds__(ORDER_SMALL) order_small(moe_order o, moe_widening w) {
    cu_grid_wait();
    cu_grid_launch();
    if (blockIdx.x > 0) {
        int64_t step = (int64_t)(gridDim.x - 1) * ORDER_SMALL;
        for (int64_t i = (blockIdx.x - 1) * (int64_t)ORDER_SMALL + threadIdx.x; i < w.n_chunks; i += step)
            order_widen(w, i);
        return;
    }
    __shared__ __align__(16) int32_t ids[ORDER_SMALL];
    __shared__ int32_t count[ORDER_SMALL], first[ORDER_SMALL], warp_sums[DI_WARP];
    int32_t t = (int32_t)threadIdx.x, n = o.n_rows * o.k, e = t < n ? order_expert(o, t) : -1;
    int32_t shared_tiles = o.per_row > o.k ? order_tiles(o, o.n_rows) : 0;
    ids[t] = e;
    count[t] = 0;
    __syncthreads();
    int32_t rank = 0; /* among the pairs of its expert */
    if (t < n) {
        atomicAdd(&count[e], 1);
        for (int32_t j = 0; j < t; j++)
            rank += ids[j] == e;
    }
    __syncthreads();
    /* Sums of places (low half) and tiles (high half) over the experts below. */
    int32_t mine = t < o.n_experts ? count[t] : 0, both = moe_places(mine) | order_tiles(o, mine) << 16, sum = both;
    for (int step = 1; step < DI_WARP; step <<= 1) {
        int32_t below = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        sum += t % DI_WARP >= step ? below : 0;
    }
    if (t % DI_WARP == DI_WARP - 1)
        warp_sums[t / DI_WARP] = sum;
    __syncthreads();
    for (int32_t w = 0; w < t / DI_WARP; w++)
        sum += warp_sums[w];
    sum -= both;
    first[t] = order_routed(o) + (sum & 0xFFFF);
    __syncthreads();
    int32_t tile0 = shared_tiles + (sum >> 16);
    for (int32_t i = 0; i < order_tiles(o, mine); i++)
        order_put_tile(o, t, first[t], mine, tile0, i);
    if (t == ORDER_SMALL - 1) {
        o.head[MOE_N_TILES] = tile0 + order_tiles(o, mine);
    }
    if (t < n)
        order_put_pair(o, t, e, first[e] + rank);
    if (o.per_row > o.k) {
        if (t < shared_tiles)
            order_put_tile(o, o.n_experts, 0, o.n_rows, 0, t);
        for (int32_t row = t; row < o.n_rows; row += ORDER_SMALL)
            order_put_shared(o, row);
    }
}

/* Many rows: a block is an expert and reads all choices, first to count its own, then to place them. */
enum { ORDER_THREADS = 256, ORDER_EACH = 4 };

__device__ static inline int32_t order_block_sum(int32_t v, int32_t *sums) {
    for (int step = DI_WARP / 2; step; step >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    __syncthreads();
    if (threadIdx.x % DI_WARP == 0)
        sums[threadIdx.x / DI_WARP] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < ORDER_THREADS / DI_WARP; w++)
        v += sums[w];
    return v;
}

__global__ void __launch_bounds__(ORDER_THREADS) order_count(moe_order o) {
    __shared__ int32_t sums[ORDER_THREADS / DI_WARP];
    int32_t n = o.n_rows * o.k, count = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += ORDER_THREADS)
        count += order_expert(o, i) == (int32_t)blockIdx.x;
    count = order_block_sum(count, sums);
    if (threadIdx.x == 0)
        o.count[blockIdx.x] = count;
}

__global__ void __launch_bounds__(ORDER_THREADS) order_place(moe_order o) {
    __shared__ int32_t sums[ORDER_THREADS / DI_WARP];
    int32_t e = (int32_t)blockIdx.x, t = (int32_t)threadIdx.x, n = o.n_rows * o.k, pairs = 0, tiles = 0;
    bool has_shared = o.per_row > o.k;
    for (int32_t i = t; i < e; i += ORDER_THREADS) {
        pairs += moe_places(o.count[i]);
        tiles += order_tiles(o, o.count[i]);
    }
    pairs = order_routed(o) + order_block_sum(pairs, sums);
    tiles = order_block_sum(tiles, sums) + (has_shared ? order_tiles(o, o.n_rows) : 0);
    if (e == o.n_experts) {
        if (t == 0) {
            o.head[MOE_N_TILES] = tiles;
        }
        if (has_shared) {
            for (int32_t i = t; i < order_tiles(o, o.n_rows); i += ORDER_THREADS)
                order_put_tile(o, e, 0, o.n_rows, 0, i);
            for (int32_t row = t; row < o.n_rows; row += ORDER_THREADS)
                order_put_shared(o, row);
        }
        return;
    }
    int32_t mine = o.count[e];
    for (int32_t i = t; i < order_tiles(o, mine); i += ORDER_THREADS)
        order_put_tile(o, e, pairs, mine, tiles, i);
    /* Each thread looks at consecutive choices, so that threads in order are rows in order. */
    for (int32_t i0 = 0; i0 < n; i0 += ORDER_THREADS * ORDER_EACH) {
        uint32_t found = 0;
        for (int32_t j = 0; j < ORDER_EACH; j++) {
            int32_t i = i0 + t * ORDER_EACH + j;
            found |= (uint32_t)(i < n && order_expert(o, i) == e) << j;
        }
        int32_t before = __popc(found);
        for (int step = 1; step < DI_WARP; step <<= 1) {
            int32_t below = __shfl_up_sync(0xFFFFFFFFu, before, step);
            before += t % DI_WARP >= step ? below : 0;
        }
        __syncthreads();
        if (t % DI_WARP == DI_WARP - 1)
            sums[t / DI_WARP] = before;
        __syncthreads();
        int32_t at = pairs + before - __popc(found);
        for (int32_t w = 0; w < ORDER_THREADS / DI_WARP; w++) {
            at += w < t / DI_WARP ? sums[w] : 0;
            pairs += sums[w];
        }
        for (int32_t j = 0; j < ORDER_EACH; j++) {
            if (found >> j & 1)
                order_put_pair(o, i0 + t * ORDER_EACH + j, e, at++);
        }
    }
}

void di_moe_order_start(const di_stream *stream, const moe_order *o, const moe_widening *widening) {
    moe_widening w = widening ? *widening : moe_widening{};
    if ((int64_t)o->n_rows * o->k <= ORDER_SMALL && o->n_experts < ORDER_SMALL &&
        (int64_t)o->n_rows * o->per_row <= 2 * ORDER_SMALL) {
        int64_t more = DI_MIN((w.n_chunks + ORDER_SMALL - 1) / ORDER_SMALL, (int64_t)128);
        DI_LAUNCH_PDL((order_small), 1 + (unsigned)more, ORDER_SMALL, 0, stream->stream, *o, w);
        return;
    }
    if (w.n_chunks)
        DI_LAUNCH_PDL((order_widening), (unsigned)((w.n_chunks + 255) / 256), 256, 0, stream->stream, w);
    if (o->n_experts)
        DI_LAUNCH((order_count), (unsigned)o->n_experts, ORDER_THREADS, 0, stream->stream, *o);
    DI_LAUNCH((order_place), (unsigned)o->n_experts + 1, ORDER_THREADS, 0, stream->stream, *o);
}

/* ---- the host's side of the fast kernels ------------------------------------------------------------------------- */

bool di_moe_fast_fits(const di_moe_args *a, size_t scale_align) {
    if (a->x.dtype != DI_F8_E4M3 || a->x.stride != a->x.n_cols || (uintptr_t)a->x.data % 16 ||
        (uintptr_t)a->x.scale % scale_align)
        return false;
    for (int32_t e = 0; a->k && e < a->n_experts; e++) {
        if (!fast_expert_fits(&a->experts[e], scale_align))
            return false;
    }
    return !a->shared || fast_expert_fits(a->shared, scale_align);
}

void di_moe_fast_begin(const di_moe_args *a, int64_t row0, int64_t n_rows, int32_t tile_rows, uint8_t *base,
                       moe_fast_args *out) {
    (void)di_moe_order_cut(a, row0, n_rows, tile_rows, base, &out->o);
    out->h = (int32_t)a->x.n_cols;
    out->inner = (int32_t)di_moe_inner(a);
    out->limit = a->limit;
    out->is_fp8 = a->k && a->experts[0].w1.dtype == DI_F8_E4M3;
    out->is_fp8_shared = a->shared && a->shared->w1.dtype == DI_F8_E4M3;
}

/* ---- sum over a row's experts ------------------------------------------------------------------------------------ */

__device__ static inline void sum_store(const di_act &out, int64_t row, int64_t col, float v, bool is_rounded) {
    cu_act_store(out, row, col, is_rounded ? cu_round_bf16(v) : v);
}

template <class T>
__global__ void __launch_bounds__(128) sum_pairs(moe_order o, const T *y, di_act out, int64_t row0, bool is_rounded) {
    cu_grid_wait();
    cu_grid_launch();
    int64_t row = blockIdx.x, col = ((int64_t)blockIdx.y * 128 + threadIdx.x) * 8;
    if (col >= out.n_cols)
        return;
    const int32_t *pairs = o.row_pairs + row * o.per_row;
    float sum[8] = {};
    if (out.n_cols % 8 == 0) { /* rows of y start on 16 bytes */
#pragma unroll 4
        for (int i = 0; i < o.per_row; i++) {
            float v[8];
            cu_load8(y + pairs[i] * out.n_cols + col, v);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum[j] = __fadd_rn(sum[j], v[j]);
        }
        if (out.dtype == DI_BF16 && out.stride % 8 == 0 && (uintptr_t)out.data % 16 == 0) {
            cu_store8((uint16_t *)out.data + (row0 + row) * out.stride + col, sum);
            return;
        }
    } else {
        for (int i = 0; i < o.per_row; i++) {
            for (int j = 0; j < 8; j++) {
                if (col + j < out.n_cols) {
                    T v = y[pairs[i] * out.n_cols + col + j];
                    sum[j] = __fadd_rn(sum[j], sizeof(T) == 2 ? cu_bf16_to_f32((uint16_t)v) : (float)v);
                }
            }
        }
    }
    for (int j = 0; j < 8; j++) {
        if (col + j < out.n_cols)
            sum_store(out, row0 + row, col + j, sum[j], is_rounded);
    }
}

void di_moe_sum(const di_stream *stream, const moe_order *o, const void *y, di_dtype y_dtype, const di_act *out,
                int64_t row0, bool is_rounded) {
    dim3 grid((unsigned)o->n_rows, (unsigned)((out->n_cols + 1023) / 1024));
    if (y_dtype == DI_BF16)
        DI_LAUNCH_PDL((sum_pairs<uint16_t>), grid, 128, 0, stream->stream, *o, (const uint16_t *)y, *out, row0,
                      is_rounded);
    else
        DI_LAUNCH_PDL((sum_pairs<float>), grid, 128, 0, stream->stream, *o, (const float *)y, *out, row0, is_rounded);
}

/* ---- portable products ------------------------------------------------------------------------------------------- */

enum { TILE_ROWS = 8, TILE_COLS = DI_WARP, TILE_DEPTH = 128, PORTABLE_ROWS = 1024 /* of a pass: bounds the scratch */ };

/* Sums of TILE_COLS columns from col0 of each matrix with the rows that x(row of tile, i) gives: one thread an output,
 * column threadIdx.x % 32, row threadIdx.x / 32. Zeros past the end change no sum. */
template <int MATS, class X>
__device__ static inline void tile_dots(const di_mat *const (&w)[MATS], int64_t col0, X x, float (&total)[MATS]) {
    __shared__ float ws[MATS][TILE_COLS][TILE_DEPTH + 1], xs[TILE_ROWS][TILE_DEPTH];
    int lane = (int)threadIdx.x % DI_WARP, row = (int)threadIdx.x / DI_WARP;
    int64_t depth = w[0]->n_in;
#pragma unroll
    for (int m = 0; m < MATS; m++)
        total[m] = 0.0f;
    for (int64_t k0 = 0; k0 < depth; k0 += TILE_DEPTH) {
        __syncthreads();
        for (int i = lane; i < TILE_DEPTH; i += DI_WARP) {
            bool is_there = k0 + i < depth;
            xs[row][i] = is_there ? x(row, k0 + i) : 0.0f;
            for (int c = row; c < TILE_COLS; c += TILE_ROWS) {
#pragma unroll
                for (int m = 0; m < MATS; m++)
                    ws[m][c][i] = is_there && col0 + c < w[m]->n_out ? moe_mat_load(*w[m], col0 + c, k0 + i) : 0.0f;
            }
        }
        __syncthreads();
        for (int g = 0; g < TILE_DEPTH && k0 + g < depth; g += 32) {
#pragma unroll
            for (int m = 0; m < MATS; m++) {
                float even = 0.0f, odd = 0.0f;
                for (int i = g; i < g + 32; i += 2) {
                    even = __fadd_rn(even, __fmul_rn(xs[row][i], ws[m][lane][i]));
                    odd = __fadd_rn(odd, __fmul_rn(xs[row][i + 1], ws[m][lane][i + 1]));
                }
                total[m] = __fadd_rn(total[m], __fadd_rn(even, odd));
            }
        }
    }
}

/* act [pairs, inner] as floats: in faithful numerics the values that QA's codes stand for. */
__global__ void __launch_bounds__(TILE_COLS *TILE_ROWS)
    moe_up(moe_order o, const di_expert *table, di_act x, int64_t row0, float limit, float *act) {
    if ((int32_t)blockIdx.y >= o.head[MOE_N_TILES])
        return;
    moe_tile tile = o.tiles[blockIdx.y];
    di_mat w1 = table[tile.expert].w1, w3 = table[tile.expert].w3;
    const di_mat *w[2] = {&w1, &w3};
    int lane = (int)threadIdx.x % DI_WARP, row = (int)threadIdx.x / DI_WARP;
    int32_t pair = tile.pair0 + (row < tile.n ? row : 0); /* a row too many repeats the first */
    int64_t col = (int64_t)blockIdx.x * TILE_COLS + lane, x_row = row0 + o.pair_row[pair];
    bool is_faithful = x.dtype == DI_F8_E4M3;
    float g_u[2];
    tile_dots(
        w, (int64_t)blockIdx.x * TILE_COLS, [&](int, int64_t i) { return cu_act_load(x, x_row, i); }, g_u);
    float v = moe_swiglu(g_u[0], g_u[1], o.pair_weight[pair], limit, is_faithful);
    if (is_faithful) {
        cu_scale s = cu_qa_scale(cu_lanes_max<DI_WARP>(fmaxf(fabsf(v), 1e-4f)));
        uint32_t code = cu_e4m3_codes4(v, v, v, v, s.inverse) & 0xFFu;
        v = __fmul_rn(cu_e4m3_to_f32((uint8_t)code), cu_e8m0_to_f32((uint8_t)s.byte));
    }
    if (row < tile.n && col < w1.n_out)
        act[pair * w1.n_out + col] = v;
}

__global__ void __launch_bounds__(TILE_COLS *TILE_ROWS)
    moe_down(moe_order o, const di_expert *table, const float *act, bool is_faithful, float *y) {
    if ((int32_t)blockIdx.y >= o.head[MOE_N_TILES])
        return;
    moe_tile tile = o.tiles[blockIdx.y];
    di_mat w2 = table[tile.expert].w2;
    const di_mat *w[1] = {&w2};
    int lane = (int)threadIdx.x % DI_WARP, row = (int)threadIdx.x / DI_WARP;
    int32_t pair = tile.pair0 + (row < tile.n ? row : 0);
    int64_t col = (int64_t)blockIdx.x * TILE_COLS + lane;
    float sum[1];
    tile_dots(
        w, (int64_t)blockIdx.x * TILE_COLS, [&](int, int64_t i) { return act[pair * w2.n_in + i]; }, sum);
    if (row < tile.n && col < w2.n_out)
        y[pair * w2.n_out + col] = is_faithful ? cu_round_bf16(sum[0]) : sum[0];
}

static di_status moe_portable(const di_stream *stream, const di_moe_args *a, int64_t inner) {
    int64_t h = a->x.n_cols;
    bool is_faithful = a->x.dtype == DI_F8_E4M3;
    for (int64_t row0 = 0; row0 < a->x.n_rows; row0 += PORTABLE_ROWS) {
        int64_t n = DI_MIN(a->x.n_rows - row0, (int64_t)PORTABLE_ROWS);
        moe_order o;
        size_t order_bytes = di_moe_order_cut(a, row0, n, TILE_ROWS, NULL, NULL);
        size_t n_pairs = (size_t)di_moe_pairs_max(a, n);
        size_t act_bytes = di_cuda_piece(n_pairs * (size_t)inner * sizeof(float));
        size_t y_bytes = di_cuda_piece(n_pairs * (size_t)h * sizeof(float));
        uint8_t *base = (uint8_t *)di_cuda_scratch(stream, order_bytes + act_bytes + y_bytes);
        if (!base)
            return DI_ERR_SHAPE;
        (void)di_moe_order_cut(a, row0, n, TILE_ROWS, base, &o);
        float *act = (float *)(base + order_bytes), *y = (float *)(base + order_bytes + act_bytes);
        const di_expert *table = (const di_expert *)a->table;
        di_moe_order_start(stream, &o, NULL);
        dim3 up((unsigned)((inner + TILE_COLS - 1) / TILE_COLS), (unsigned)o.tiles_max);
        dim3 down((unsigned)((h + TILE_COLS - 1) / TILE_COLS), (unsigned)o.tiles_max);
        DI_LAUNCH((moe_up), up, TILE_COLS * TILE_ROWS, 0, stream->stream, o, table, a->x, row0, a->limit, act);
        DI_LAUNCH((moe_down), down, TILE_COLS * TILE_ROWS, 0, stream->stream, o, table, act, is_faithful, y);
        di_moe_sum(stream, &o, y, DI_F32, &a->out, row0, is_faithful);
    }
    return DI_OK;
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

static bool expert_fits(const di_expert *e, int64_t h, int64_t inner) {
    return di_cuda_is_mat(&e->w1) && di_cuda_is_mat(&e->w3) && di_cuda_is_mat(&e->w2) && e->w1.n_in == h &&
           e->w3.n_in == h && e->w1.n_out == inner && e->w3.n_out == inner && e->w2.n_in == inner && e->w2.n_out == h;
}

/* What the host can see: the choices lie on the device. That all routed experts are alike is experts_place's check. */
static bool moe_fits(const di_moe_args *a) {
    int64_t n = a->x.n_rows, h = a->x.n_cols;
    bool is_faithful = a->x.dtype == DI_F8_E4M3;
    if (!(is_faithful || a->x.dtype == DI_F32) || !di_cuda_is_act(&a->x) || !di_cuda_is_real(&a->out) ||
        a->out.n_rows != n || a->out.n_cols != h || a->k < 0 || a->k > DI_MOE_PER_ROW_MAX || a->k > a->n_experts ||
        (a->k && (!a->experts || !a->idx || !a->weight)) || (!a->k && !a->shared) ||
        a->n_experts > DI_MOE_EXPERTS_MAX || !a->table)
        return false;
    const di_expert *any = a->k ? &a->experts[0] : a->shared;
    int64_t inner = any->w1.n_out;
    return !(is_faithful && inner % 32) && expert_fits(any, h, inner) &&
           (!a->shared || expert_fits(a->shared, h, inner));
}

di_status di_cuda_moe(di_stream *stream, const di_moe_args *a) {
    if (!moe_fits(a))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    if (di_moe_sm90_fits(stream, a))
        return di_moe_sm90(stream, a);
    if (di_moe_sm100_fits(stream, a))
        return di_moe_sm100(stream, a);
    return moe_portable(stream, a, di_moe_inner(a));
}

size_t di_cuda_need_moe(const di_device *dev, const di_limits *limits) {
    if (limits->experts_max < 1)
        return 0;
    int64_t h = limits->hidden_size ? limits->hidden_size : limits->n_in_max, k = limits->experts_per_row_max;
    int64_t n = DI_MIN(limits->rows_max, (int64_t)PORTABLE_ROWS);
    di_expert shared = {};
    di_moe_args a = {};
    a.k = (int32_t)k;
    a.n_experts = (int32_t)limits->experts_max;
    a.shared = &shared;
    size_t route = (size_t)(limits->rows_max * limits->experts_max) * sizeof(float);
    if (dev->arch == DI_CUDA_SM90)
        route = DI_MAX(route, gemm_bf16_apart_bytes(dev));
    size_t n_pairs = (size_t)di_moe_pairs_max(&a, n);
    size_t portable = di_moe_order_cut(&a, 0, n, TILE_ROWS, NULL, NULL) +
                      di_cuda_piece(n_pairs * (size_t)limits->intermediate * sizeof(float)) +
                      di_cuda_piece(n_pairs * (size_t)h * sizeof(float));
    size_t fast = 0;
    if (dev->arch == DI_CUDA_SM90)
        fast = di_moe_sm90_bytes(&a, limits->rows_max, h, limits->intermediate);
    else if (dev->arch == DI_CUDA_SM100)
        fast = di_moe_sm100_bytes(&a, limits->rows_max, h, limits->intermediate);
    return DI_MAX(DI_MAX(route, portable), fast);
}
