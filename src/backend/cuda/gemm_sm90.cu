/* gemm on Hopper's tensor cores: which kernels take a product, and those for E2M1 weights with E4M3 activations.
 *
 * Products of E4M3 with E4M3 go to gemm_few_sm90.cu and gemm_fp8_sm90.cu, of BF16 with BF16 to gemm_bf16_sm90.cu. The
 * form of this file (tiles_sm90.cuh) reads every weight once per tile of up to 64 rows, widens it to bf16 in registers
 * and is bound by memory for few rows: blocks of threads walk units of 128 outputs, one tile of rows and one piece of
 * k.
 *
 * Batch invariance: sums over k are the same instructions in the same order for every width of tile; k is cut into
 * pieces by the matrix's shape alone, and their sums are added in rising order, by whichever block comes last or by one
 * block that does all pieces. */
#include "gemm_store.cuh"
#include "tiles_sm90.cuh"

enum {
    OUT_TILE = 128,    /* outputs of a unit: two warpgroups */
    CONSUMERS = 256,   /* threads */
    THREADS = 384,     /* and a warpgroup that brings activations */
    PARTIALS = 528,    /* units whose sums may wait in scratch at once, four for each multiprocessor of an H200, ... */
    PARTIAL_ROWS = 64, /* ... of so many rows */
    SPLITS_MAX = 64
};

/* Blocks that have added their piece to scratch, by tile and warpgroup, of streams and of their sides; whoever comes
 * last puts it back to 0. */
__device__ static unsigned gemm_arrivals[2][2 * PARTIALS];

/* ---- the narrow form --------------------------------------------------------------------------------------------- */

typedef struct narrow_shape {
    int n_row_tiles, n_out_tiles, n_splits, n_blocks; /* n_blocks: of 128 k */
    int side;                                         /* 1: on a side stream */
    float *partial;                                   /* [unit][warpgroup][N/2][128], where n_splits > 1 and not SEQ */
} narrow_shape;

/* SEQ: a block does all pieces of its tile, one after another; else every piece is a unit of its own. */
template <int N, bool SEQ> struct narrow_plan {
    const gemm_job &job;
    const narrow_shape &shape;
    unsigned *last; /* shared, by warpgroup: arrivals before this block's */
    float total[SEQ ? N / 2 : 1];

    struct place {
        int row_tile, out_tile, split, tile;
    };
    __device__ place at(int i) const {
        place p;
        int pieces = shape.n_splits;
        if (SEQ) {
            p.split = i % pieces;
            p.tile = blockIdx.x + i / pieces * gridDim.x;
            p.row_tile = p.tile % shape.n_row_tiles;
            p.out_tile = p.tile / shape.n_row_tiles;
        } else { /* rows innermost: what reads the same weights runs at the same time */
            int u = blockIdx.x + i * gridDim.x, rest = u / shape.n_row_tiles;
            p.row_tile = u % shape.n_row_tiles;
            p.split = rest % pieces;
            p.out_tile = rest / pieces;
            p.tile = p.out_tile * shape.n_row_tiles + p.row_tile;
        }
        return p;
    }
    __device__ int begin(int split) const {
        return shape.n_blocks * split / shape.n_splits;
    }
    __device__ int n_blocks(int i) const {
        place p = at(i);
        return p.out_tile < shape.n_out_tiles ? begin(p.split + 1) - begin(p.split) : 0;
    }
    /* Outputs are dealt to mma rows so that a thread's two are neighbours. */
    __device__ int64_t out_row(const place &p) const {
        int t = threadIdx.x;
        return (int64_t)p.out_tile * OUT_TILE + t / 32 * 16 + t % 32 / 4 * 2;
    }
    __device__ void rows(int i, tile_rows &r) const {
        place p = at(i);
        int64_t o = out_row(p), col = (int64_t)begin(p.split) * TILE_K, end = job.w.n_out - 1;
        r.set(0, job.w, o < end ? o : end, col);
        r.set(1, job.w, o + 1 < end ? o + 1 : end, col);
    }
    __device__ int x_row(int i, int n) const {
        int64_t row = (int64_t)at(i).row_tile * N + n;
        return row < job.x.n_rows ? (int)row : -1;
    }
    __device__ int x_col(int i) const {
        place p = at(i);
        int64_t group = (int64_t)p.out_tile * OUT_TILE / (job.w.n_out / job.n_groups);
        return (int)(group * job.w.n_in) + begin(p.split) * TILE_K;
    }
    /* Calls f(index of the first of two neighbouring outputs in out, their sums) for every column that is a row of x.
     */
    template <class F> __device__ void each(const place &p, const float (&v)[N / 2], F f) const {
        int64_t o = out_row(p), n0 = (int64_t)p.row_tile * N + threadIdx.x % 4 * 2;
#pragma unroll
        for (int k = 0; k < N / 4; k++) { /* k/2: eight columns, k%2: one of the thread's two */
            int64_t n = n0 + k / 2 * 8 + k % 2;
            if (n < job.x.n_rows)
                f(n * job.out.stride + o, v[k / 2 * 4 + k % 2], v[k / 2 * 4 + 2 + k % 2]);
        }
    }
    __device__ void store(const place &p, const float (&v)[N / 2]) const {
        int64_t o = out_row(p);
        bool has1 = o + 1 < job.w.n_out, is_f32 = job.out.dtype == DI_F32;
        float *f32 = (float *)job.out.data;
        uint16_t *bf16 = (uint16_t *)job.out.data;
        if (has1 && job.aligned >= 2 && !job.add && is_f32) {
            each(p, v, [=](int64_t at, float v0, float v1) { *(float2 *)(f32 + at) = make_float2(v0, v1); });
        } else if (has1 && job.aligned >= 2 && !job.add) {
            each(p, v, [=](int64_t at, float v0, float v1) { *(uint32_t *)(bf16 + at) = cu_pack_bf16(v0, v1); });
        } else { /* one by one, through local memory: little code */
            float w[N / 2];
#pragma unroll
            for (int k = 0; k < N / 2; k++)
                w[k] = v[k];
#pragma unroll 1
            for (int k = 0; k < N / 2; k++) {
                int64_t n = (int64_t)p.row_tile * N + threadIdx.x % 4 * 2 + k / 4 * 8 + k % 2, at = o + k / 2 % 2;
                if (n >= job.x.n_rows || at >= job.w.n_out)
                    continue;
                at += n * job.out.stride;
                float y = job.add ? w[k] + job.add[at] : w[k];
                if (is_f32)
                    f32[at] = y;
                else
                    bf16[at] = cu_f32_to_bf16(y);
            }
        }
    }
    __device__ void done(int i, const float (&acc)[N / 2]) {
        cu_grid_wait(); /* the kernels before may still read what is written here */
        place p = at(i);
        if constexpr (SEQ) {
#pragma unroll
            for (int k = 0; k < N / 2; k++)
                total[k] = p.split ? total[k] + acc[k] : acc[k];
            if (p.split == shape.n_splits - 1)
                store(p, total);
        } else {
            float sum[N / 2];
#pragma unroll
            for (int k = 0; k < N / 2; k++)
                sum[k] = acc[k];
            if (shape.n_splits > 1) {
                if (!leave(p, acc))
                    return;
                gather(p, sum);
            }
            store(p, sum);
        }
    }
    /* Leaves a piece in scratch; true for the warpgroup that finds all of them there. */
    __device__ bool leave(const place &p, const float (&acc)[N / 2]) {
        int group = threadIdx.x / TILE_GROUP, t = threadIdx.x % TILE_GROUP;
        float *mine = piece(p, p.split);
#pragma unroll
        for (int k = 0; k < N / 2; k++)
            __stcg(mine + k * TILE_GROUP, acc[k]);
        __threadfence();
        cu_bar_sync(1 + group, TILE_GROUP);
        if (t == 0)
            last[group] = atomicAdd(&gemm_arrivals[shape.side][p.tile * 2 + group], 1u);
        cu_bar_sync(1 + group, TILE_GROUP);
        return last[group] == (unsigned)shape.n_splits - 1;
    }
    __device__ void gather(const place &p, float (&sum)[N / 2]) {
        __threadfence();
        if (threadIdx.x % TILE_GROUP == 0)
            gemm_arrivals[shape.side][p.tile * 2 + threadIdx.x / TILE_GROUP] = 0;
        /* Pieces are added in order; as many are on their way at once as registers hold. */
        constexpr int BATCH = N > 96 ? 1 : 192 / N;
        const float *from = piece(p, 0);
        for (int s0 = 0; s0 < shape.n_splits; s0 += BATCH) {
            float v[BATCH][N / 2];
#pragma unroll
            for (int b = 0; b < BATCH; b++, from += 2 * (N / 2 * TILE_GROUP)) {
#pragma unroll
                for (int k = 0; k < N / 2; k++)
                    v[b][k] = s0 + b < shape.n_splits ? __ldcg(from + k * TILE_GROUP) : 0.0f;
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
#pragma unroll
                for (int k = 0; k < N / 2; k++)
                    sum[k] = s0 + b == 0 ? v[b][k] : s0 + b < shape.n_splits ? sum[k] + v[b][k] : sum[k];
            }
        }
    }
    __device__ float *piece(const place &p, int split) const {
        int64_t unit = (int64_t)p.tile * shape.n_splits + split;
        return shape.partial + (unit * 2 + threadIdx.x / TILE_GROUP) * (N / 2 * TILE_GROUP) + threadIdx.x % TILE_GROUP;
    }
};

template <int N> struct narrow_stages { static constexpr int COUNT = N <= 16 ? 8 : 6; };
enum { DEPTH = 4 }; /* blocks of weights under way: at least 32 KB a multiprocessor, as far as registers go */
template <int N, bool SEQ>
__global__ void __launch_bounds__(THREADS, 1)
    gemm_narrow(const __grid_constant__ gemm_job job, const __grid_constant__ narrow_shape shape) {
    DI_DYN_SHARED(uint8_t, shared);
    __shared__ unsigned last[2];
    constexpr int STAGES = narrow_stages<N>::COUNT;
    tile_ring<N, STAGES> ring(shared);
    if (threadIdx.x == 0)
        ring.init(CONSUMERS / DI_WARP);
    __syncthreads();
    narrow_plan<N, SEQ> plan{job, shape, last, {}};
    if (threadIdx.x >= CONSUMERS) {
        cu_regs_give<104>();
        cu_grid_begin(); /* before the activations; weights are on their way */
        tile_convert(ring, plan, job.x, threadIdx.x - CONSUMERS);
    } else {
        cu_regs_take<200>();
        tile_consume<N, STAGES, DEPTH>(ring, plan);
    }
}

template <int N, bool SEQ>
static void narrow_launch(di_stream *stream, const gemm_job &job, const narrow_shape &shape) {
    int64_t n_units = (int64_t)shape.n_row_tiles * shape.n_out_tiles * (SEQ ? 1 : shape.n_splits);
    unsigned grid = (unsigned)(n_units < stream->dev->n_sms ? n_units : stream->dev->n_sms);
    size_t smem = tile_ring<N, narrow_stages<N>::COUNT>::BYTES;
    DI_LAUNCH_PDL((gemm_narrow<N, SEQ>), grid, THREADS, smem, stream->stream, job, shape);
}

/* Pieces of k for n_tiles tiles of n_blocks blocks: the count that gives the shortest time, in blocks, when a unit
 * costs its blocks and two more, and the multiprocessors go round by round. */
int gemm_splits(int64_t n_tiles, int n_blocks, int n_sms, int64_t units_max) {
    int best = 1;
    int64_t best_time = INT64_MAX;
    for (int s = 1; s <= n_blocks && s <= SPLITS_MAX && (s == 1 || n_tiles * s <= units_max); s++) {
        int64_t time = gemm_ceil_div(n_tiles * s, n_sms) * (gemm_ceil_div(n_blocks, s) + 2);
        if (time < best_time) {
            best_time = time;
            best = s;
        }
    }
    return best;
}

static size_t partial_bytes() {
    return (size_t)PARTIALS * PARTIAL_ROWS * OUT_TILE * sizeof(float);
}

static di_status narrow(di_stream *stream, const gemm_job &job) {
    const di_device *dev = stream->dev;
    int n = job.x.n_rows <= 16 ? 16 : 64;
    narrow_shape shape = {};
    shape.n_out_tiles = (int)gemm_ceil_div(job.w.n_out, OUT_TILE);
    shape.n_blocks = (int)(job.w.n_in / TILE_K);
    shape.side = stream->owner ? 1 : 0;
    shape.n_splits = gemm_splits(shape.n_out_tiles, shape.n_blocks, dev->n_sms, 2 * dev->n_sms);
    shape.n_row_tiles = (int)gemm_ceil_div(job.x.n_rows, n);
    int64_t units = (int64_t)shape.n_row_tiles * shape.n_out_tiles * shape.n_splits;
    if (shape.n_splits > 1 && units <= PARTIALS) {
        shape.partial = (float *)di_cuda_scratch(stream, partial_bytes());
        if (!shape.partial)
            return DI_ERR_SHAPE;
    }
    if (n == 16)
        narrow_launch<16, false>(stream, job, shape);
    else if (shape.n_splits > 1 && !shape.partial)
        narrow_launch<64, true>(stream, job, shape);
    else
        narrow_launch<64, false>(stream, job, shape);
    return DI_OK;
}

/* ---- sums of pieces ---------------------------------------------------------------------------------------------- */

enum { SUM_THREADS = 128 };

/* Four neighbouring outputs of a row a thread. */
__global__ void __launch_bounds__(SUM_THREADS)
    gemm_sum(const __grid_constant__ gemm_job job, const float *sums, int n_pieces) {
    cu_grid_begin();
    int64_t i = (blockIdx.x * (int64_t)SUM_THREADS + threadIdx.x) * 4, n = job.x.n_rows * job.w.n_out;
    if (i >= n)
        return;
    float v[4];
    gemm_add_pieces(v, sums + i, n, n_pieces);
    gemm_store(job, i / job.w.n_out, i % job.w.n_out, make_float4(v[0], v[1], v[2], v[3]));
}

void gemm_sum_pieces(const di_stream *stream, const gemm_job *job, const float *sums, int n_pieces) {
    int64_t n = job->x.n_rows * job->w.n_out / 4;
    DI_LAUNCH_PDL(gemm_sum, (unsigned)gemm_ceil_div(n, SUM_THREADS), SUM_THREADS, 0, stream->stream, *job, sums,
                  n_pieces);
}

/* ---- host -------------------------------------------------------------------------------------------------------- */

size_t gemm_sm90_need(const di_device *dev) {
    return DI_MAX(partial_bytes(), gemm_bf16_apart_bytes(dev));
}

bool gemm_sm90_fits(const di_device *dev, const gemm_job *job) {
    bool has_pair = job->x.dtype == DI_F8_E4M3 ? job->w.dtype == DI_F8_E4M3 || job->w.dtype == DI_F4_E2M1
                                               : job->x.dtype == DI_BF16 && job->w.dtype == DI_BF16;
    return dev->arch == DI_CUDA_SM90 && has_pair && dev->n_sms * 2 <= PARTIALS && tile_fits_act(&job->x) &&
           tile_fits_mat(&job->w) && (job->n_groups == 1 || job->w.n_out / job->n_groups % OUT_TILE == 0) &&
           job->x.n_cols < INT32_MAX && job->x.n_rows < INT32_MAX / 512 && job->w.n_out < INT32_MAX / 512;
}

di_status gemm_sm90(di_stream *stream, const gemm_job *given) {
    gemm_job job = *given;
    uintptr_t out = (uintptr_t)job.out.data, add = (uintptr_t)job.add;
    int64_t size = job.out.dtype == DI_F32 ? 4 : 2;
    if (job.out.stride % 8 == 0 && (out | add) % 16 == 0)
        job.aligned = 8;
    else
        job.aligned = job.out.stride % 2 == 0 && out % (2 * size) == 0 && add % 8 == 0 ? 2 : 1;
    if (job.w.dtype == DI_F8_E4M3) {
        gemm_cut cut = gemm_fp8_cut(stream->dev, &job.w), whole = {1, 1, cut.n_blocks};
        gemm_fp8_form form = gemm_fp8_pick(stream->dev, &job, &cut);
        bool has_started = form == GEMM_FP8_APART ? gemm_sm90_fp8_apart(stream, &job, &cut)
                           : form == GEMM_FP8_MANY
                               ? gemm_sm90_fp8(stream, &job, stream->dev->is_order_free ? &whole : &cut)
                               : false;
        if (!has_started)
            gemm_sm90_few(stream, &job, &cut);
        return DI_OK;
    }
    if (job.w.dtype == DI_BF16)
        return gemm_sm90_bf16(stream, &job) ? DI_OK : DI_ERR_DEVICE;
    return narrow(stream, job);
}
