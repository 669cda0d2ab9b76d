/* What the index_select kernels of every level share: argument checks, queries, scratch, and the course of the
 * operation with the steps that levels do differently. Private to backend/cpu and its tests. */
#ifndef DI_CPU_INDEX_H
#define DI_CPU_INDEX_H

#include "cache.h"

#define DI_CPU_INDEX_ROWS 64     /* rows whose scores are made at a time, at most */
#define DI_CPU_INDEX_ENTRIES 256 /* entries that a part decodes at a time; a bit for 8 of them fills 32 */
#define DI_CPU_INDEX_GROUP 8     /* entries that a bit stands for: blocks of candidates are a multiple */

/* Shared scratch. Scores have room for 4 rows of the longest sequence, and for more rows of shorter ones. */
typedef struct di_index_scratch {
    float *q;            /* [DI_CPU_INDEX_ROWS, heads, Di]: room of the queries; heads padded to 16 */
    float *w;            /* [DI_CPU_INDEX_ROWS, heads] */
    float *scores;       /* [n_scores] */
    float *block_scores; /* [n_scores / 8] */
    int64_t n_scores;
} di_index_scratch;

/* The operation at work: the rows [row0, row0 + n_rows) of a wave. */
typedef struct di_index_job {
    di_stream *stream;
    const di_index_select_args *a;
    di_index_scratch s;
    const struct di_index_steps *steps;
    int64_t heads;        /* padded to 16 */
    int64_t row0, n_rows; /* the wave */
    int64_t stride;       /* scores between its rows, a multiple of 8 */
    int64_t n_chunks;     /* of DI_CPU_INDEX_ENTRIES */
} di_index_job;

/* What a level does its way. scratch is the worker's part. */
typedef struct di_index_steps {
    /* Brings the query of one row of the wave into the room q [heads, Di] and its weights into w [heads]. */
    void (*query)(const di_index_job *j, int64_t row, float *q, float *w, uint8_t *scratch);
    /* Scores of the rows [row, end), of one sequence, for the entries that they see of [base, base +
     * DI_CPU_INDEX_ENTRIES); -inf outside a row's candidate blocks. Entries of the sequence below n are written. */
    void (*score)(const di_index_job *j, int64_t row, int64_t end, int64_t base, int64_t n, uint8_t *scratch);
    /* The k best of s [n], ascending, ties to the lower index, without NaN and -inf, padded with -1. */
    void (*best)(const float *s, int64_t n, int32_t k, int32_t *out);
    /* out[b] = the largest of s[b*block .. (b+1)*block) below n, NaN left out; block is a multiple of 8. */
    void (*block_max)(const float *s, int64_t n, int64_t block, float *out);
} di_index_steps;

/* Entries that a row sees. */
static inline int64_t di_cpu_index_visible(const di_index_select_args *a, int64_t row) {
    return ((int64_t)a->rows->pos[row] + 1) / a->ratio;
}

/* Where a row of the wave has its query, its weights and its scores. */
static inline float *di_index_query_of(const di_index_job *j, int64_t row) {
    return j->s.q + (row - j->row0) * j->heads * j->a->dim;
}
static inline float *di_index_weights_of(const di_index_job *j, int64_t row) {
    return j->s.w + (row - j->row0) * j->heads;
}
static inline float *di_index_scores_of(const di_index_job *j, int64_t row) {
    return j->s.scores + (row - j->row0) * j->stride;
}

/* Which groups of 8 entries from base on the row's candidate blocks hold, of those below end <= base +
 * DI_CPU_INDEX_ENTRIES: bit i stands for group i. All where there are no candidates. (portable_index.c) */
uint32_t di_cpu_index_wanted(const di_index_select_args *a, int64_t row, int64_t base, int64_t end);

/* Whether the arguments fit together, into the reserved limits and the scratch. (ref_index.c) */
bool di_cpu_index_fits(const di_stream *stream, const di_index_select_args *a);
/* Query of one row [Ai, Di], through QI unless the keys are exact; bytes: room for its record. (ref_index.c) */
void di_cpu_index_query(const di_index_select_args *a, int64_t row, uint8_t *bytes, float *q);

/* portable_index.c */
di_index_scratch di_cpu_index_scratch(const di_stream *stream); /* cuts the shared scratch */
di_status di_cpu_index_run(di_stream *stream, const di_index_select_args *a, const di_index_steps *steps);
extern const di_index_steps di_index_portable_steps;

#endif
