/* What the index_select kernels of every level share: argument checks, queries, scratch. Private to backend/cpu. */
#ifndef DI_CPU_INDEX_H
#define DI_CPU_INDEX_H

#include "cache.h"

#define DI_CPU_INDEX_ROWS 64     /* rows whose scores are made at a time, at most */
#define DI_CPU_INDEX_ENTRIES 256 /* entries that a part decodes at a time */

/* Shared scratch. Scores have room for 4 rows of the longest sequence, and for more rows of shorter ones. */
typedef struct di_index_scratch {
    float *q;            /* [DI_CPU_INDEX_ROWS, heads, Di]: queries as they enter the dot products; heads padded to 4 */
    float *w;            /* [DI_CPU_INDEX_ROWS, heads] */
    float *scores;       /* [n_scores] */
    float *block_scores; /* [n_scores / 8] */
    int64_t n_scores;
} di_index_scratch;

/* Entries that a row sees. */
static inline int64_t di_cpu_index_visible(const di_index_select_args *a, int64_t row) {
    return ((int64_t)a->rows->pos[row] + 1) / a->ratio;
}

/* Whether the arguments fit together, into the reserved limits and the scratch. (ref_index.c) */
bool di_cpu_index_fits(const di_stream *stream, const di_index_select_args *a);
/* Query of one row [Ai, Di], through QI unless the keys are exact; bytes: room for its record. (ref_index.c) */
void di_cpu_index_query(const di_index_select_args *a, int64_t row, uint8_t *bytes, float *q);
/* Cuts the shared scratch. (portable_index.c) */
di_index_scratch di_cpu_index_scratch(const di_stream *stream);

#endif
