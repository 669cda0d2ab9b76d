/* Writers of the caches on the device: record encoding, window rings, pooled pairs, paged entries.
 *
 * Encoding takes eight values a thread, wherever the codes go: to records of this forward or to an entry of the pages.
 * A row or an entry is written by its threads alone and reads nothing that others write. Bits are the CPU reference's;
 * formats are model.md 0.2 and 5.1, pooling is 3.6. */
#include "kv.cuh"

size_t di_cuda_need_kv(const di_device *dev, const di_limits *limits) {
    (void)dev, (void)limits;
    return 0;
}

enum { THREADS = 128 };

static unsigned blocks_for(int64_t n, int per_block) {
    return (unsigned)((n + per_block - 1) / per_block);
}

static bool ring_fits(const di_ring *ring, size_t record_bytes) {
    return ring->slots && ring->ring_len > 0 && ring->record_bytes >= record_bytes;
}

__device__ static inline uint8_t *ring_at(const di_ring &ring, int32_t slot, int32_t pos) {
    return ring.slots + (size_t)slot * ring.slot_bytes + ring.offset +
           (size_t)(pos % ring.ring_len) * ring.record_bytes;
}

/* ---- encoding ---- */

/* A thread takes eight values of a row; a group of 32 is four lanes, one of 16 two. */
template <class T, class PLACE>
__global__ void encode_kernel(di_act x, int64_t n_rows, di_kv_format format, PLACE place) {
    cu_grid_begin();
    int64_t n = x.n_cols, eights = (n + 7) / 8, unit = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool is_inside = unit < n_rows * eights;
    int64_t row = 0, col = n; /* outside: zeros */
    if (is_inside && n_rows * eights <= UINT32_MAX) {
        row = (uint32_t)unit / (uint32_t)eights;
        col = (uint32_t)unit % (uint32_t)eights * 8;
    } else if (is_inside) {
        row = unit / eights;
        col = unit % eights * 8;
    }
    float v[8];
    cu_row_load8<T>(x, row, col, n, v);
    uint8_t *data = NULL, *scale = NULL;
    is_inside = is_inside && place.find(row, &data, &scale);
    cu_encode8(format, v, col, n, data, scale, is_inside);
}

template <class PLACE>
static void encode(di_stream *stream, const di_act *x, int64_t n_rows, di_kv_format format, const PLACE &place) {
    int64_t n = n_rows * ((x->n_cols + 7) / 8);
    DI_ROWS_BY_TYPE(di_rows_is_wide(x), x->dtype,
                    DI_LAUNCH_PDL((encode_kernel<T, PLACE>), blocks_for(n, THREADS), THREADS, 0, stream->stream, *x,
                                  n_rows, format, place));
}

di_status di_cuda_kv_encode(di_stream *stream, const di_kv_encode_args *a) {
    if (!di_cuda_is_real(&a->x) || !di_cuda_kv_fits(a->format, a->x.n_cols) || (a->x.n_rows && !a->records))
        return DI_ERR_SHAPE;
    if (!a->x.n_rows)
        return DI_OK;
    cu_record_place place = {a->records, (int64_t)di_kv_record_bytes(a->format, a->x.n_cols),
                             (int64_t)di_kv_data_bytes(a->format, a->x.n_cols)};
    if (a->format == DI_KV_F32 && (uintptr_t)a->records % 4)
        return DI_ERR_SHAPE;
    encode(stream, &a->x, a->x.n_rows, a->format, place);
    return DI_OK;
}

di_status di_cuda_page_store(di_stream *stream, const di_page_store_args *a) {
    const di_paged *dst = &a->dst;
    if (!a->rows || a->entries.n < 0 || !di_cuda_is_real(&a->x) || a->x.n_rows < a->entries.n || !dst->pages ||
        dst->per_block < 1 || !di_cuda_kv_fits(dst->format, dst->n_values) || a->x.n_cols != dst->n_values)
        return DI_ERR_SHAPE;
    if (dst->format == DI_KV_F32 && ((uintptr_t)dst->pages | dst->page_bytes | dst->offset) % 4)
        return DI_ERR_SHAPE;
    if (!a->entries.n)
        return DI_OK;
    if (!a->rows->blocks || !a->entries.row || !a->entries.seq || !a->entries.idx)
        return DI_ERR_SHAPE;
    cu_page_place place = {a->rows->blocks,
                           a->rows->blocks_stride,
                           (int64_t)di_kv_data_bytes(dst->format, dst->n_values),
                           (int64_t)di_kv_scale_bytes(dst->format, dst->n_values),
                           a->entries,
                           *dst};
    encode(stream, &a->x, a->entries.n, dst->format, place);
    return DI_OK;
}

/* ---- ring_store ---- */

enum { RING_AHEAD = 4 };

/* blockDim.y rows a block, blockDim.x threads a row. A row whose element a later row of this forward takes is not
 * written. */
template <class U>
__global__ void ring_store_kernel(di_rows rows, const uint8_t *records, const int32_t *store_from, di_ring ring) {
    cu_grid_begin();
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows.n_rows)
        return;
    const U *from = (const U *)(records + (size_t)row * ring.record_bytes);
    int32_t n = (int32_t)(ring.record_bytes / sizeof(U)), seq = rows.seq[row], pos = rows.pos[row];
    U held[RING_AHEAD]; /* loaded while it becomes known where they go */
#pragma unroll
    for (int32_t k = 0; k < RING_AHEAD; k++) {
        int32_t i = (int32_t)(threadIdx.x + k * blockDim.x);
        held[k] = i < n ? from[i] : U();
    }
    int32_t first = store_from[seq], slot = rows.slot[seq], last = rows.pos0[seq] + rows.n[seq] - 1;
    if (pos < first || last - pos >= ring.ring_len)
        return;
    U *to = (U *)ring_at(ring, slot, pos);
#pragma unroll
    for (int32_t k = 0; k < RING_AHEAD; k++) {
        int32_t i = (int32_t)(threadIdx.x + k * blockDim.x);
        if (i < n)
            to[i] = held[k];
    }
#pragma unroll 4
    for (int32_t i = (int32_t)(threadIdx.x + RING_AHEAD * blockDim.x); i < n; i += (int32_t)blockDim.x)
        to[i] = from[i];
}

template <class U> static void ring_store_launch(di_stream *stream, const di_ring_store_args *a) {
    size_t n = a->ring.record_bytes / sizeof(U);
    unsigned per_row = n <= 64 ? 32 : n <= 512 ? 64 : 256;
    dim3 block(per_row, 256 / per_row);
    DI_LAUNCH_PDL((ring_store_kernel<U>), blocks_for(a->rows->n_rows, (int)block.y), block, 0, stream->stream, *a->rows,
                  a->records, a->store_from, a->ring);
}

di_status di_cuda_ring_store(di_stream *stream, const di_ring_store_args *a) {
    if (!a->rows || a->rows->n_rows < 0 || !a->records || !a->store_from || !ring_fits(&a->ring, 1) ||
        a->ring.record_bytes > (size_t)1 << 30)
        return DI_ERR_SHAPE;
    if (!a->rows->n_rows)
        return DI_OK;
    uintptr_t bits =
        (uintptr_t)a->records | (uintptr_t)a->ring.slots | a->ring.slot_bytes | a->ring.offset | a->ring.record_bytes;
    if (bits % 16 == 0)
        ring_store_launch<uint4>(stream, a);
    else if (bits % 4 == 0)
        ring_store_launch<uint32_t>(stream, a);
    else
        ring_store_launch<uint8_t>(stream, a);
    return DI_OK;
}

/* ---- compress_pool ---- */

/* Grid (entry, piece of its channels); a thread a channel. */
__global__ void compress_pool_kernel(di_rows rows, di_entries entries, const float *cg, di_ring ring, di_act out) {
    cu_grid_begin();
    int64_t d = out.n_cols, i = blockIdx.x, c = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= d)
        return;
    int32_t row = entries.row[i], seq = entries.seq[i];
    if (row < 0)
        return;
    int32_t pos = rows.pos[row];
    const float *second = cg + row * 2 * d; /* gate scores, then latents */
    const float *first =
        pos - 1 < rows.pos0[seq] ? (const float *)ring_at(ring, rows.slot[seq], pos - 1) : second - 2 * d;
    float s0 = first[c], l0 = first[d + c], s1 = second[c], l1 = second[d + c];
    float most = s0 > s1 ? s0 : s1;
    float e0 = cu_expf(s0 - most), e1 = cu_expf(s1 - most);
    float sum = e0 + e1;
    float w0 = e0 / sum, w1 = e1 / sum;
    cu_act_store(out, i, c, w0 * l0 + w1 * l1);
}

di_status di_cuda_compress_pool(di_stream *stream, const di_compress_pool_args *a) {
    int64_t d = a->out.n_cols;
    if (!a->rows || a->entries.n < 0 || !a->cg || !di_cuda_is_real(&a->out) || a->out.n_rows < a->entries.n || d < 1 ||
        !ring_fits(&a->ring, (size_t)(2 * d) * sizeof(float)) ||
        ((uintptr_t)a->ring.slots | a->ring.slot_bytes | a->ring.offset | a->ring.record_bytes) % 4)
        return DI_ERR_SHAPE;
    if (!a->entries.n)
        return DI_OK;
    if (!a->entries.row || !a->entries.seq)
        return DI_ERR_SHAPE;
    dim3 grid((unsigned)a->entries.n, blocks_for(d, THREADS));
    DI_LAUNCH_PDL(compress_pool_kernel, grid, THREADS, 0, stream->stream, *a->rows, a->entries, a->cg, a->ring, a->out);
    return DI_OK;
}
