/* What hc_mix's host side and its Hopper kernel agree on. Private to hc*.cu. */
#ifndef DI_HC_H
#define DI_HC_H

#include "cuda.h"

/* Streams that the fast kernels are for, and their mixing logits. */
enum { HC_STREAMS = 4, HC_DOTS = (2 + HC_STREAMS) * HC_STREAMS };

/* Columns of a piece, summed from zero; so many pieces, the last ones fewer, are added to a sum of their own. */
enum { HC_PIECE = 128, HC_SPAN = 4 };

/* How sums of a row's parts, pieces or spans, lie in scratch. A row has the dots [part][HC_DOTS], then the squares
 * [part], and starts on 32 bytes, as the dots of each part do: memory takes whole sectors. */
typedef struct hc_parts {
    float *sums;
    int n, pitch; /* parts, floats from row to row */
    int to_add;   /* parts of a span: HC_SPAN pieces, or itself */
} hc_parts;

static inline hc_parts hc_parts_of(float *sums, int64_t n_cols, bool are_spans) {
    int64_t width = are_spans ? HC_SPAN * HC_PIECE : HC_PIECE, n = (n_cols + width - 1) / width;
    return hc_parts{sums, (int)n, (int)((n + 7) / 8 * 8 * (HC_DOTS + 1)), are_spans ? 1 : (int)HC_SPAN};
}

/* hc_sm90.cu: whether its kernel makes the sums of these mixes, whose x and fn have aligned rows of HC_STREAMS streams
 * of whole groups of 32 columns; the scratch for it; all mixes but z. */
bool hc_sm90_fits(const di_stream *stream, const di_hc_mix_args *a);
size_t hc_sm90_need(const di_device *dev, const di_limits *limits);
void hc_sm90(di_stream *stream, const di_hc_mix_args *a);

/* hc.cu: the mixes of rows [row0, row_end) from the sums of their parts, rising. */
void hc_finish_parts(di_stream *stream, const di_hc_mix_args *a, int64_t row0, int64_t row_end, const hc_parts *parts);

#endif
