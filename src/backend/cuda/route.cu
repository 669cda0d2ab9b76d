/* The router: logits of rows with the experts' gates, scores, the choice of the best.
 *
 * Logits have the reference's bits, so that the choice of experts is the same: products of a group of 32 inputs by two
 * chains, sums of groups added in rising order. Groups are independent until they are added, so that lanes (few rows)
 * or warps (many rows) take different ones, and what is in order is the adding alone. Products of two bf16 values are
 * exact, hence a fused step gives the bits of two; the work is bound by fp32 multiply-adds, and kernels differ in how
 * little else there is for each of them:
 *
 *   logits_few    up to ROUTE_FEW rows: a lane is a group, with a small tile of outputs; operands in bf16
 *   logits_wide   more: a warp is a group, its lanes tile 32 rows and 24 to 64 experts; operands unpacked to floats
 *   logits_any    few rows that are not bf16 or not aligned
 *
 * Source: model.md 3.10; sums in the order of ops.h. */
#include "math.cuh"
#include "route.cuh"
#include "rows.cuh"

enum {
    ROUTE_FEW = 128,       /* rows of bf16 up to which logits_few wins */
    ROUTE_ANY_FEW = 32,    /* other rows, up to which logits_any wins */
    ROUTE_SMEM = 227 << 10 /* of a block of large tiles; other chips, which have less, take small ones */
};

static int64_t smem_max(const di_stream *stream) {
    return DI_MIN((int64_t)stream->dev->prop.sharedMemPerBlockOptin, (int64_t)ROUTE_SMEM);
}

/* ---- logits of few rows ------------------------------------------------------------------------------------------
 * A block is a tile of rows and experts. Its operands come in stages of `span` groups by asynchronous copies; a warp
 * has 32 groups of a stage, a lane each, and a part of the tile, RT rows and CT experts. The groups' sums go to shared
 * memory, where a thread for each output adds those of the stage before, in order.
 *
 *   stage   [operand row: rows of x, then of the gate][group] 64 bytes; 16-byte piece j of group g lies at j ^ (g / 2),
 *           so that eight lanes that read piece j of their groups find all banks
 *   sums    [2][output][span + 4] */

typedef struct few_shape {
    int32_t n_groups, row_parts, col_parts; /* parts of the tile along rows and experts */
    int32_t span, n_stages;                 /* n_stages >= 2, except where one stage holds all groups */
} few_shape;

/* One step of both chains for each output: inputs 2i and 2i + 1, packed. */
template <int RT, int CT>
__device__ static inline void few_step(const uint32_t (&a)[RT], const uint32_t (&b)[CT], float (&even)[RT][CT],
                                       float (&odd)[RT][CT]) {
#pragma unroll
    for (int r = 0; r < RT; r++) {
#pragma unroll
        for (int c = 0; c < CT; c++) {
            even[r][c] = __fmaf_rn(__uint_as_float(a[r] << 16), __uint_as_float(b[c] << 16), even[r][c]);
            odd[r][c] = __fmaf_rn(__uint_as_float(a[r] & 0xFFFF0000u), __uint_as_float(b[c] & 0xFFFF0000u), odd[r][c]);
        }
    }
}

template <int RT, int CT>
__global__ void __launch_bounds__(RT == 8 ? 512 : 640) logits_few(di_act x, di_mat gate, few_shape f, float *logits) {
    DI_DYN_SHARED(uint8_t, stages);
    int lane = (int)threadIdx.x % DI_WARP, warp = (int)threadIdx.x / DI_WARP;
    int rows = f.row_parts * RT, cols = f.col_parts * CT, chunks = f.span / DI_WARP;
    int64_t row0 = blockIdx.y * (int64_t)rows, e0 = blockIdx.x * (int64_t)cols;
    uint32_t stage_bytes = (uint32_t)((rows + cols) * f.span) * 64;
    float *sums = (float *)(void *)(stages + f.n_stages * stage_bytes);
    int pitch = f.span + 4, n_turns = (f.n_groups + f.span - 1) / f.span;

    /* Rows of one operand for turn i; `at` is the first one's place among the operand rows. Past the end the last row
     * or expert stands in: its outputs are not stored. A warp brings 32 groups of a row at a time. */
    int part = warp / chunks, n_parts = f.row_parts * f.col_parts, chunk = warp % chunks;
    uint32_t place = (uint32_t)(lane / 4 * 64 + ((lane ^ lane >> 3) & 3) * 16);
    auto load = [&](const void *data, int64_t stride, int64_t row, int last, int at, int n, int i) {
        int group0 = i * f.span + chunk * DI_WARP;
        const uint16_t *from = (const uint16_t *)data + row * stride + group0 * 32 + lane * 8;
        uint32_t to = cu_smem(stages) + (uint32_t)(i % f.n_stages) * stage_bytes + place;
        for (int r = part; r < n; r += n_parts) {
            const uint16_t *p = from + (int64_t)DI_MIN(r, last) * (int32_t)stride;
            uint32_t q = to + (uint32_t)((at + r) * f.span + chunk * DI_WARP) * 64;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (group0 + lane / 4 + 8 * j < f.n_groups)
                    cu_cp16(q + (uint32_t)j * 512, p + j * 256);
            }
        }
    };
    int x_last = (int)DI_MIN(x.n_rows - 1 - row0, (int64_t)rows),
        w_last = (int)DI_MIN(gate.n_out - 1 - e0, (int64_t)cols);
    auto load_x = [&](int i) { load(x.data, x.stride, row0, x_last, 0, rows, i); };
    auto load_w = [&](int i) { load(gate.data, gate.n_in, e0, w_last, rows, cols, i); };
    int n_ahead = DI_MIN(DI_MAX(f.n_stages - 1, 1), n_turns);
    for (int i = 0; i < n_ahead; i++)
        load_w(i);
    cu_grid_wait();
    cu_grid_launch();
    for (int i = 0; i < n_ahead; i++) {
        load_x(i);
        cu_cp_commit();
    }

    int r0 = part % f.row_parts * RT, c0 = part / f.row_parts * CT, out = (int)threadIdx.x;
    float total = 0.0f;
    for (int i = 0; i < n_turns; i++) {
        if (f.n_stages >= 4)
            cu_cp_wait<2>();
        else if (f.n_stages == 3)
            cu_cp_wait<1>();
        else
            cu_cp_wait<0>();
        __syncthreads();
        if (f.n_stages > 1) {
            if (i + f.n_stages - 1 < n_turns) {
                load_w(i + f.n_stages - 1);
                load_x(i + f.n_stages - 1);
            }
            cu_cp_commit();
        }
        const uint8_t *stage = stages + i % f.n_stages * stage_bytes;
        const uint8_t *xs = stage + (r0 * f.span + chunk * DI_WARP + lane) * 64;
        const uint8_t *ws = stage + ((rows + c0) * f.span + chunk * DI_WARP + lane) * 64;
        float even[RT][CT] = {}, odd[RT][CT] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = ((j ^ lane >> 1) & 3) * 16;
            uint4 a[RT], b[CT];
#pragma unroll
            for (int r = 0; r < RT; r++)
                a[r] = *(const uint4 *)(const void *)(xs + r * f.span * 64 + at);
#pragma unroll
            for (int c = 0; c < CT; c++)
                b[c] = *(const uint4 *)(const void *)(ws + c * f.span * 64 + at);
#define STEP(field)                                                                                                    \
    do {                                                                                                               \
        uint32_t p[RT], q[CT];                                                                                         \
        for (int r = 0; r < RT; r++)                                                                                   \
            p[r] = a[r].field;                                                                                         \
        for (int c = 0; c < CT; c++)                                                                                   \
            q[c] = b[c].field;                                                                                         \
        few_step<RT, CT>(p, q, even, odd);                                                                             \
    } while (0)
            STEP(x);
            STEP(y);
            STEP(z);
            STEP(w);
#undef STEP
        }
        /* Zeros past the end change no sum. */
        int g = chunk * DI_WARP + lane;
        bool is_there = i * f.span + g < f.n_groups;
        float *to = sums + i % 2 * (rows * cols * pitch) + (r0 * cols + c0) * pitch + g;
#pragma unroll
        for (int r = 0; r < RT; r++) {
#pragma unroll
            for (int c = 0; c < CT; c++)
                to[(r * cols + c) * pitch] = is_there ? __fadd_rn(even[r][c], odd[r][c]) : 0.0f;
        }
        if (i > 0 && out < rows * cols)
            total = cu_ordered_sum(sums + (i - 1) % 2 * (rows * cols * pitch) + out * pitch, f.span, total);
    }
    __syncthreads();
    if (out < rows * cols) {
        total = cu_ordered_sum(sums + (n_turns - 1) % 2 * (rows * cols * pitch) + out * pitch, f.span, total);
        int64_t row = row0 + out / cols, e = e0 + out % cols;
        if (row < x.n_rows && e < gate.n_out)
            logits[row * gate.n_out + e] = total;
    }
}

template <int RT, int CT>
static void few_start(const di_stream *stream, const di_act *x, const di_mat &gate, int row_parts, int col_parts,
                      float *logits) {
    int64_t rows = row_parts * RT, cols = col_parts * CT, n_groups = x->n_cols / 32;
    int64_t chunks = (n_groups + DI_WARP - 1) / DI_WARP, parts = row_parts * col_parts;
    int64_t chunk_bytes = (rows + cols) * DI_WARP * 64;
    few_shape f = {(int32_t)n_groups, row_parts, col_parts, DI_WARP, 1};
    /* All groups at once, or 32 after another. */
    auto bytes = [&](int64_t n_chunks, int64_t n_stages) {
        int64_t n_sums = n_chunks < chunks ? 2 : 1;
        return n_stages * n_chunks * chunk_bytes + n_sums * rows * cols * (n_chunks * DI_WARP + 4) * 4;
    };
    if (chunks * parts <= 20 && bytes(chunks, 1) <= smem_max(stream)) {
        f.span = (int32_t)chunks * DI_WARP;
    } else {
        f.n_stages = 2;
        while (f.n_stages < 4 && bytes(1, f.n_stages + 1) <= smem_max(stream))
            f.n_stages++;
    }
    int64_t smem = bytes(f.span / DI_WARP, f.n_stages);
    dim3 grid((unsigned)((gate.n_out + cols - 1) / cols), (unsigned)((x->n_rows + rows - 1) / rows));
    DI_LAUNCH_PDL((logits_few<RT, CT>), grid, (unsigned)(f.span * parts), smem, stream->stream, *x, gate, f, logits);
}

/* Tiles that spread the released shape's 384 experts evenly over the chip. */
static void few_pick(const di_stream *stream, const di_act *x, const di_mat &gate, float *logits) {
    int64_t n = smem_max(stream) == ROUTE_SMEM ? x->n_rows : DI_MIN(x->n_rows, (int64_t)16);
    if (n == 1)
        few_start<1, 3>(stream, x, gate, 1, 1, logits);
    else if (n <= 32)
        few_start<4, 3>(stream, x, gate, n <= 4 ? 1 : n <= 16 ? 2 : 4, n <= 8 ? 1 : 2, logits);
    else
        few_start<8, 3>(stream, x, gate, 2, 4, logits);
}

/* ---- logits of many rows -----------------------------------------------------------------------------------------
 * A block is 32 rows and 8*CT experts; warp w has groups w, w + 8, .. of all its outputs. The warp unpacks a group's
 * inputs into floats of its own, [operand row][input], and a lane multiplies 8 rows by CT experts of them: rows
 * lr + 4i, experts lc + 8j. Lanes whose numbers differ in bit 0 share rows of x and those that differ in bit 1 share
 * experts, so that a load of 16 bytes takes two passes of shared memory instead of four.
 *
 * Totals lie in shared memory, each lane's its own in all warps. They pass from warp to warp in the order of groups:
 * barrier 1 + w tells warp w that its turn has come. Warps so keep a distance, and one unpacks or adds while others
 * multiply. */

enum { WIDE_ROWS = 32, WIDE_WARPS = 8, WIDE_PITCH = 36 /* floats: rows start four banks apart */ };

/* The first product of a chain is its sum: that the sign of a zero may differ from 0 + product ends with the total. */
template <bool IS_EXACT, bool IS_FIRST> __device__ static inline void wide_add(float &sum, float a, float b) {
    sum = IS_FIRST ? __fmul_rn(a, b) : IS_EXACT ? __fmaf_rn(a, b, sum) : __fadd_rn(sum, __fmul_rn(a, b));
}

template <int CT, bool IS_BF16>
__global__ void __launch_bounds__(WIDE_WARPS *DI_WARP, 1)
    logits_wide(di_act x, di_mat gate, int32_t n_groups, float *logits) {
    enum { COLS = 8 * CT, OPERANDS = WIDE_ROWS + COLS, PIECES = OPERANDS / 8 };
    DI_DYN_SHARED(float4, totals); /* [8 * CT / 4][lane], then each warp's floats */
    cu_grid_wait();
    cu_grid_launch();
    int lane = (int)threadIdx.x % DI_WARP, warp = (int)threadIdx.x / DI_WARP;
    int lr = (lane >> 1 & 1) | (lane >> 4 & 1) << 1, lc = (lane & 1) | (lane >> 2 & 3) << 1;
    int64_t row0 = blockIdx.y * (int64_t)WIDE_ROWS, e0 = blockIdx.x * (int64_t)COLS;
    float *mine = (float *)(void *)(totals + 2 * CT * DI_WARP) + warp * OPERANDS * WIDE_PITCH;
    totals += lane;

    /* Of eight operand rows a lane brings 16 bytes of one: row lane / 4, inputs lane % 4 * 8 and on. Past the end the
     * last row or expert stands in: its outputs are not stored. */
    const uint8_t *xp = (const uint8_t *)x.data + (row0 * x.stride + lane % 4 * 8) * 2;
    const uint8_t *wp = (const uint8_t *)gate.data + (e0 * gate.n_in + lane % 4 * 8) * 2;
    int x_last = (int)DI_MIN(x.n_rows - 1 - row0, (int64_t)WIDE_ROWS - 1);
    int w_last = (int)DI_MIN(gate.n_out - 1 - e0, (int64_t)COLS - 1);
    uint32_t at[PIECES];
    uint4 raw[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int r = lane / 4 + 8 * i;
        at[i] = i < WIDE_ROWS / 8 ? (uint32_t)DI_MIN(r, x_last) * (uint32_t)x.stride * 2
                                  : (uint32_t)DI_MIN(r - WIDE_ROWS, w_last) * (uint32_t)gate.n_in * 2;
    }
    auto load = [&](int g) {
        if constexpr (IS_BF16) {
            const uint8_t *xg = xp + 64 * (int64_t)g, *wg = wp + 64 * (int64_t)g;
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                raw[i] = __ldg((const uint4 *)(const void *)((i < WIDE_ROWS / 8 ? xg : wg) + at[i]));
        }
    };
    auto unpack = [&](int g) {
        if constexpr (IS_BF16) {
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                float v[8];
                cu_unpack8(raw[i], v);
                cu_store8(mine + (lane / 4 + 8 * i) * WIDE_PITCH + lane % 4 * 8, v);
            }
        } else {
            int64_t k = 32 * (int64_t)g + lane; /* zeros past the end change no sum */
            for (int r = 0; r < OPERANDS; r++)
                mine[r * WIDE_PITCH + lane] = k >= x.n_cols ? 0.0f
                                              : r < WIDE_ROWS
                                                  ? cu_act_load(x, row0 + DI_MIN(r, x_last), k)
                                                  : cu_mat_load(gate, e0 + DI_MIN(r - WIDE_ROWS, w_last), k);
        }
    };

    const float *xs = mine + lr * WIDE_PITCH, *ws = mine + (WIDE_ROWS + lc) * WIDE_PITCH;
    load(DI_MIN(warp, n_groups - 1));
    if (warp == 0) {
#pragma unroll
        for (int q = 0; q < 2 * CT; q++)
            totals[q * DI_WARP] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int g = warp; g < n_groups; g += WIDE_WARPS) {
        __syncwarp();
        unpack(g);
        load(DI_MIN(g + WIDE_WARPS, n_groups - 1));
        __syncwarp();
        float even[8][CT], odd[8][CT];
        float4 a[8];
#pragma unroll
        for (int r = 0; r < 8; r++)
            a[r] = *(const float4 *)(xs + 4 * r * WIDE_PITCH);
        auto step = [&](int k, auto first) { /* inputs k to k + 3; a holds theirs and gets the next */
                                             constexpr bool IS_FIRST = decltype(first)::value;
#pragma unroll
                                             for (int c = 0; c < CT; c++) {
                                                 float4 b = *(const float4 *)(ws + 8 * c * WIDE_PITCH + k);
#pragma unroll
                                                 for (int r = 0; r < 8; r++) {
                                                     wide_add<IS_BF16, IS_FIRST>(even[r][c], a[r].x, b.x);
                                                     wide_add<IS_BF16, IS_FIRST>(odd[r][c], a[r].y, b.y);
                                                     wide_add<IS_BF16, false>(even[r][c], a[r].z, b.z);
                                                     wide_add<IS_BF16, false>(odd[r][c], a[r].w, b.w);
                                                     if (c == CT - 1) /* after the last, the row's pad */
                                                         a[r] = *(const float4 *)(xs + 4 * r * WIDE_PITCH + k + 4);
                                                 }
                                             }
        };
        step(0, std::true_type());
#pragma unroll 1
        for (int k = 4; k < 32; k += 4)
            step(k, std::false_type());
        if (g > 0)
            cu_bar_sync(1 + (uint32_t)warp, 2 * DI_WARP);
#pragma unroll
        for (int q = 0; q < 2 * CT; q++) {
            float4 t = totals[q * DI_WARP];
            float v[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = (4 * q + i) / CT, c = (4 * q + i) % CT;
                v[i] = __fadd_rn(v[i], __fadd_rn(even[r][c], odd[r][c]));
            }
            totals[q * DI_WARP] = make_float4(v[0], v[1], v[2], v[3]);
        }
        if (g + 1 < n_groups) {
            cu_bar_arrive(1 + (uint32_t)(warp + 1) % WIDE_WARPS, 2 * DI_WARP);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < 8 * CT; i++) {
            int r = lr + i / CT * 4, c = lc + i % CT * 8;
            if (r <= x_last && c <= w_last)
                logits[(row0 + r) * gate.n_out + e0 + c] = ((const float *)(totals + i / 4 * DI_WARP))[i % 4];
        }
    }
}

template <int CT, bool IS_BF16>
static void wide_start(const di_stream *stream, const di_act *x, const di_mat &gate, float *logits) {
    dim3 grid((unsigned)((gate.n_out + 8 * CT - 1) / (8 * CT)), (unsigned)((x->n_rows + WIDE_ROWS - 1) / WIDE_ROWS));
    size_t smem =
        2 * CT * DI_WARP * sizeof(float4) + (size_t)WIDE_WARPS * (WIDE_ROWS + 8 * CT) * WIDE_PITCH * sizeof(float);
    DI_LAUNCH_PDL((logits_wide<CT, IS_BF16>), grid, WIDE_WARPS * DI_WARP, smem, stream->stream, *x, gate,
                  (int32_t)((x->n_cols + 31) / 32), logits);
}

/* The width whose blocks, one a multiprocessor, end first: the time of a block goes with CT + 1, about. */
static void wide_pick(const di_stream *stream, const di_act *x, const di_mat &gate, float *logits) {
    auto cost = [&](int64_t ct) {
        int64_t n_blocks = (gate.n_out + 8 * ct - 1) / (8 * ct) * ((x->n_rows + WIDE_ROWS - 1) / WIDE_ROWS);
        return (n_blocks + stream->dev->n_sms - 1) / stream->dev->n_sms * (ct + 1);
    };
    bool is_small = smem_max(stream) < ROUTE_SMEM;
    if (!is_small && cost(8) <= cost(6) && cost(8) <= cost(3))
        wide_start<8, true>(stream, x, gate, logits);
    else if (cost(6) <= cost(3))
        wide_start<6, true>(stream, x, gate, logits);
    else
        wide_start<3, true>(stream, x, gate, logits);
}

/* ---- logits of few rows of any kind ------------------------------------------------------------------------------
 * A block is one expert and up to 8 rows, a thread takes groups of 32 inputs. n_sums: groups, rounded up to a multiple
 * of 4. */

enum { ANY_ROWS = 8 };

__global__ void __launch_bounds__(256)
    logits_any(di_act x, di_mat gate, int32_t n_groups, int32_t n_sums, float *logits) {
    DI_DYN_SHARED(float, sums); /* [rows, n_sums] */
    cu_grid_begin();
    int64_t e = blockIdx.x, row0 = (int64_t)blockIdx.y * ANY_ROWS;
    int rows = (int)DI_MIN(x.n_rows - row0, (int64_t)ANY_ROWS);
    for (int g = (int)threadIdx.x; g < n_groups; g += (int)blockDim.x) {
        for (int r = 0; r < rows; r++)
            sums[r * n_sums + g] =
                cu_dot_group([&](int64_t i) { return cu_act_load(x, row0 + r, i); },
                             [&](int64_t i) { return cu_mat_load(gate, e, i); }, 32 * (int64_t)g, x.n_cols);
    }
    __syncthreads();
    if ((int)threadIdx.x < rows)
        logits[(row0 + threadIdx.x) * gate.n_out + e] = cu_ordered_sum(sums + threadIdx.x * n_sums, n_groups);
}

/* ---- scores and choice ------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(512) route_select(route_out o, const float *logits) {
    DI_DYN_SHARED(float, score);
    cu_grid_begin();
    const float *mine = logits + blockIdx.x * (int64_t)o.n_experts;
    route_choose(o, score, [&](int e) { /* sqrt(softplus(logit)) */
                                        float v = mine[e];
                                        return __fsqrt_rn(v > 20.0f ? v : (float)cu_log1p(cu_exp((double)v)));
    });
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

di_status di_cuda_moe_route(di_stream *stream, const di_moe_route_args *a) {
    const di_act *x = &a->x;
    if (!di_cuda_is_real(x) || !di_cuda_is_mat(a->gate) || a->gate->n_in != x->n_cols || !a->bias || a->k < 1 ||
        a->k > a->gate->n_out || a->k > DI_MOE_PER_ROW_MAX || a->gate->n_out > DI_MOE_EXPERTS_MAX ||
        (a->is_image && !a->bias_vl))
        return DI_ERR_SHAPE;
    if (!x->n_rows)
        return DI_OK;
    if (di_moe_route_sm90(stream, a))
        return DI_OK;
    const di_mat gate = *a->gate;
    int64_t n_experts = gate.n_out, n_groups = (x->n_cols + 31) / 32, n_sums = (n_groups + 3) / 4 * 4;
    float *logits = (float *)di_cuda_scratch(stream, (size_t)(x->n_rows * n_experts) * sizeof(float));
    if (!logits)
        return DI_ERR_SHAPE;
    bool is_bf16 = x->dtype == DI_BF16 && gate.dtype == DI_BF16 && x->n_cols % 32 == 0 &&
                   di_rows_is_aligned(x->data, 2 * x->stride, 16) && (uintptr_t)gate.data % 16 == 0 &&
                   x->stride < 1 << 24; /* a tile's rows by 32-bit distances */
    if (is_bf16 && x->n_rows <= ROUTE_FEW) {
        few_pick(stream, x, gate, logits);
    } else if (is_bf16) {
        wide_pick(stream, x, gate, logits);
    } else if (x->n_rows > ROUTE_ANY_FEW) {
        wide_start<3, false>(stream, x, gate, logits);
    } else {
        dim3 grid((unsigned)n_experts, (unsigned)((x->n_rows + ANY_ROWS - 1) / ANY_ROWS));
        unsigned block = (unsigned)DI_MIN((n_groups + 31) / 32 * 32, (int64_t)256);
        size_t smem = ANY_ROWS * (size_t)n_sums * sizeof(float);
        DI_LAUNCH_PDL((logits_any), grid, block, smem, stream->stream, *x, gate, (int32_t)n_groups, (int32_t)n_sums,
                      logits);
    }
    unsigned block = (unsigned)DI_MIN((n_experts + 31) / 32 * 32, (int64_t)512);
    DI_LAUNCH_PDL((route_select), (unsigned)x->n_rows, block, 2 * (size_t)n_experts * sizeof(float), stream->stream,
                  route_out_of(a), logits);
    return DI_OK;
}
