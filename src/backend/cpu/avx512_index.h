/* Index scores of quantised keys with entries in the lanes: what avx512_index.c, which owns it, shares with
 * amx_index.c. Private to backend/cpu. */
#ifndef DI_CPU_AVX512_INDEX_H
#define DI_CPU_AVX512_INDEX_H

#include "avx512_vec.h"
#include "index.h"

enum {
    DI_INDEX_TILE = DI_LANES,                              /* entries of a tile */
    DI_INDEX_GROUP = 32,                                   /* values that share a scale */
    DI_INDEX_TILES = DI_CPU_INDEX_ENTRIES / DI_INDEX_TILE, /* tiles of a chunk */
};

/* A row's query at the start of its room: codes [groups, heads, 32], then the three arrays [groups, heads]. */
typedef struct di_index_query {
    int8_t *codes;  /* twice the value; of 8 values the 4 even ones, then the 4 odd ones */
    int32_t *start; /* what the keys' bias adds, negative */
    float *scale;
    bool *is_plain;   /* one: all scales are within limits */
    uint16_t *values; /* [heads padded to 16, Di] of bf16, for a level that wants them */
} di_index_query;

/* Entries [base, base + DI_CPU_INDEX_ENTRIES) below n of one sequence, made tile by tile when first asked for. */
typedef struct di_index_tiles {
    const di_index_select_args *a;
    const struct di_index_lanes *lanes;
    uint8_t *codes;    /* [DI_INDEX_TILES, groups, lanes->group_bytes] */
    float *scales;     /* [DI_INDEX_TILES, groups, 16]: a quarter of the scale, for the two factors of 2 */
    float *key, *head; /* [Di]: where one score is made alone */
    float *dots;       /* [heads padded to 16, 2, DI_INDEX_TILE] */
    int32_t seq;
    int64_t base, n;
    uint16_t far[DI_INDEX_TILES]; /* lanes with a scale out of limits */
    bool is_ready[DI_INDEX_TILES];
} di_index_tiles;

/* What a level does its way. */
typedef struct di_index_lanes {
    size_t group_bytes; /* of one tile's codes of one group, 1024 at most */
    /* The codes of a tile's group: lane e of packed[i] has the values 8*i .. 8*i+7 of entry e; scale has the entries'
     * E8M0 bytes, within limits. */
    void (*put)(uint8_t *codes, const __m512i packed[4], const __m512i *scale);
    /* Scores, not rounded, of n_tiles tiles that lie side by side, 1 or 2, from `tile` on. */
    void (*score)(const di_index_tiles *k, const di_index_query *q, const float *w, int64_t tile, int n_tiles,
                  __m512 score[2]);
} di_index_lanes;

di_index_query di_index_lanes_query_of(const di_index_select_args *a, float *room);
/* Steps of index.h. The query step leaves `values` alone and the quantised row in scratch. */
void di_index_lanes_query(const di_index_job *j, int64_t row, float *room, float *w, uint8_t *scratch);
void di_index_lanes_score(const di_index_job *j, const di_index_lanes *lanes, int64_t row, int64_t end, int64_t base,
                          int64_t n, uint8_t *scratch);
void di_index_lanes_best(const float *s, int64_t n, int32_t k, int32_t *out);
void di_index_lanes_block_max(const float *s, int64_t n, int64_t block, float *out);
/* index_select by these steps; only its choice of the best where keys are floats. */
di_status di_cpu_index_select_lanes(di_stream *stream, const di_index_select_args *a, const di_index_steps *steps);

#endif
