/* Where cached keys live: ring elements and paged entries, as pointers and as floats.
 *
 * Shared by the kernels that read or write caches (ref_kv.c, *_index.c, *_attention.c). The layouts are ops.h's: a
 * record is codes, then scales; a block of DI_KV_MX4 entries is all codes, then all scales. Private to backend/cpu. */
#ifndef DI_CPU_CACHE_H
#define DI_CPU_CACHE_H

#include "cpu.h"

/* Element pos mod ring_len of the ring in state slot `slot`. */
static inline uint8_t *di_cpu_ring_at(const di_ring *ring, int32_t slot, int32_t pos) {
    return ring->slots + (size_t)slot * ring->slot_bytes + ring->offset +
           (size_t)(pos % ring->ring_len) * ring->record_bytes;
}

/* Codes and scales of entry j of sequence seq. */
typedef struct di_cpu_entry {
    uint8_t *data, *scale;
} di_cpu_entry;

static inline di_cpu_entry di_cpu_entry_at(const di_rows *rows, const di_paged *p, int32_t seq, int32_t j) {
    int32_t block = rows->blocks[seq * rows->blocks_stride + j / p->per_block];
    size_t at = (size_t)(j % p->per_block);
    size_t n_data = di_kv_data_bytes(p->format, p->n_values), n_scale = di_kv_scale_bytes(p->format, p->n_values);
    uint8_t *section = p->pages + (size_t)block * p->page_bytes + p->offset;
    if (p->format == DI_KV_MX4)
        return (di_cpu_entry){section + at * n_data, section + (size_t)p->per_block * n_data + at * n_scale};
    uint8_t *record = section + at * (n_data + n_scale);
    return (di_cpu_entry){record, record + n_data};
}

static inline void di_cpu_entry_load(const di_rows *rows, const di_paged *p, int32_t seq, int32_t j, float *x) {
    di_cpu_entry e = di_cpu_entry_at(rows, p, seq, j);
    di_kv_decode(p->format, e.data, e.scale, p->n_values, x);
}

/* Record of the window key at `pos`: positions of this forward are in `records`, earlier ones in the ring. */
static inline const uint8_t *di_cpu_window_at(const di_rows *rows, const uint8_t *records, size_t record_bytes,
                                              const di_ring *ring, int32_t seq, int32_t pos) {
    int32_t ahead = pos - rows->pos0[seq];
    if (ahead >= 0)
        return records + (size_t)(rows->row0[seq] + ahead) * record_bytes;
    return di_cpu_ring_at(ring, rows->slot[seq], pos);
}

/* Groups of the format divide n values; DI_KV_F32 has none. */
static inline bool di_cpu_kv_fits(di_kv_format format, int64_t n) {
    return n > 0 && (format == DI_KV_F32 || n % 32 == 0);
}

static inline bool di_cpu_paged_fits(const di_paged *p) {
    return p->pages && p->per_block > 0 && di_cpu_kv_fits(p->format, p->n_values);
}

static inline bool di_cpu_ring_fits(const di_ring *ring, size_t record_bytes) {
    return ring->slots && ring->ring_len > 0 && ring->record_bytes >= record_bytes;
}

/* ---- writers of every level (ref_kv.c) ---- */

/* di_kv_encode, as a level does it. */
typedef void di_cpu_encode_fn(di_kv_format format, const float *x, int64_t n, uint8_t *data, uint8_t *scale);
di_cpu_encode_fn di_cpu_avx512_encode; /* avx512_kv.c; x86-64 only */
/* out [d] from two tokens, each d gate scores, then d latents. */
typedef void di_cpu_pool_fn(const float *first, const float *second, int64_t d, float *out);

di_status di_cpu_kv_encode_by(di_stream *stream, const di_kv_encode_args *a, di_cpu_encode_fn *encode);
di_status di_cpu_page_store_by(di_stream *stream, const di_page_store_args *a, di_cpu_encode_fn *encode);
di_status di_cpu_compress_pool_by(di_stream *stream, const di_compress_pool_args *a, di_cpu_pool_fn *pool);

#endif
