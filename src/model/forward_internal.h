/* Private to model/: the loaded model and the workspace of a forward.
 *
 * A workspace is one device allocation, cut into named buffers by one function (workspace.c) that also counts it for
 * the memory plan. Row buffers are [rows_max, ...] in the activation type: bf16 in faithful numerics, fp32 in exact. */
#ifndef DI_FORWARD_INTERNAL_H
#define DI_FORWARD_INTERNAL_H

#include "model_internal.h"

typedef struct di_engram_consts {
    int64_t *mult, *primes, *offsets; /* device memory */
    float *qk;                        /* device memory [M, H]: q_weight * k_weight in fp32 */
} di_engram_consts;

struct di_model {
    di_config config;
    di_backend backend; /* tables */
    di_device *device;  /* borrowed */
    di_numerics numerics;
    bool with_draft;
    int64_t rows_max, tokens_max, logits_max; /* rows_max includes the rows of a drafting round */
    int32_t seqs_max;
    di_weights weights;
    uint8_t *placed;      /* owned, device memory: the weights; NULL: they are read in place */
    uint8_t *placed_host; /* owned, the host's memory that the device reads: Engram tables; NULL: none */
    di_layout layout;
    di_engram_consts *engram;             /* [n_engram] */
    float *freq_window, *freq_compressed; /* device memory [R/2] */
    int32_t *token_map;                   /* [n_token_map], host */
    int32_t *token_map_device;            /* the same in device memory; NULL without it */
    int64_t n_token_map;
    di_arena arena;
};

/* Host copy and device copy of one di_rows with what belongs to it. */
typedef struct di_row_set {
    di_rows rows;                                                     /* pointers into device memory */
    const int32_t *store_from;                                        /* [n_seqs] device: window rings */
    float *cos_window, *sin_window, *cos_compressed, *sin_compressed; /* [n_rows, R/2] device */
} di_row_set;

/* Device buffers, see workspace.c for shapes. */
typedef struct di_workspace {
    uint8_t *meta; /* all integer arrays of a batch: filled on the host, sent in one copy */
    float *cos_window[2], *sin_window[2], *cos_compressed[2], *sin_compressed[2]; /* producers, consumers */
    float *cos_entries[3], *sin_entries[3];                                       /* by ratio 1, 2 */
    uint8_t *trunk, *trunk_kept, *z, *x, *xq, *xq_scale;
    float *pre[3], *one_hot, *post, *comb; /* one_hot [n, M]: stream 0 alone, never written */
    uint8_t *qa, *qr, *qrq, *qrq_scale, *q, *kv, *kvn, *records;
    float *cg;
    uint8_t *lat, *latn, *ikey, *ikeyn, *iq, *iw;
    int32_t *idx, *cand;
    uint8_t *o, *oq, *oq_scale, *yq, *yq_scale, *f;
    float *y;
    int32_t *router_idx;
    float *router_weight;
    int64_t *eg_rows;
    uint8_t *eg_x, *eg_scale, *eg_kv;
    float *eg_gate;
    uint8_t *taps, *tapsq, *tapsq_scale;
    float *logits;
    /* draft */
    uint8_t *hid, *hid_norm, *emb;
    float *base, *draft_logits, *conf;
} di_workspace;

/* Snapshots that a batch of rows_max rows and seqs_max sequences can have: a sequence of n rows meets at most n/128 + 1
 * borders. */
static inline int64_t di_snapshots_max(int64_t rows_max, int64_t seqs_max) {
    return rows_max / DI_PAGE_TOKENS + seqs_max;
}
/* A row belongs to the windows of this many borders at most: as many passes store snapshots. 1 for windows up to 128.
 */
static inline int32_t di_snapshot_passes(const di_config *c) {
    return DI_CEIL_DIV(c->window, DI_PAGE_TOKENS);
}

/* Offsets of the integer arrays in the metadata block, for a batch of so many rows and sequences: the largest where
 * memory is planned, then those of the batch that runs, so that a small one sends little. */
typedef struct di_meta_layout {
    struct {
        size_t pos, seq, win_lo, win_hi, row0, n, pos0, slot, store_from;
    } set[2];                 /* 0: producers (all rows), 1: consumers */
    size_t pair_store_from;   /* [seqs_max] */
    size_t ids;               /* [rows_max] */
    size_t fed_from;          /* [rows_max]: where in the fed tokens a row's is; -1: nowhere */
    size_t grams;             /* [rows_max, Ng] */
    size_t keep;              /* [rows_max]: producer row of each consumer row */
    size_t logit_rows;        /* [logits_max]: consumer rows */
    size_t chain, chain_from; /* [seqs_max]: tokens before a round's next drafts; their sequences' places among these */
    size_t tap_slot, tap_rows; /* [seqs_max], [rows_max]: places of taps that are put off, of sequences and rows */
    size_t ent_row[3], ent_seq[3], ent_idx[3], ent_pos[3]; /* by ratio 1, 2 */
    struct {
        size_t seq;                             /* [passes, n_rows]: snapshot of a row, or the last of the others */
        size_t row0, n, pos0, slot, store_from; /* [snapshots_max + 1] */
    } snap;
    size_t skip;    /* [2, n_rows] u8: image rows */
    size_t n_small; /* bytes so far: what is sent whole */
    size_t blocks;  /* [seqs_max, blocks_stride]: of each sequence, as many as it has */
    size_t n_bytes;
    int64_t n_rows; /* that the layout is for */
} di_meta_layout;

/* A run of operations whose arguments depend on nothing but this. */
typedef struct di_recording {
    int32_t kind, n_rows, n_seqs; /* DI_RECORD_ */
    const uint8_t *pages, *slots, *taps;
    const int32_t *fed;
    di_graph *graph; /* owned; NULL: not recorded yet, or it can't be */
    int64_t n_runs;
} di_recording;
enum { DI_RECORD_FORWARD, DI_RECORD_DRAFT_BEGIN, DI_RECORD_DRAFT_NEXT };

struct di_forward {
    di_model *model;
    di_stream *stream;     /* that operations go to: own, or side between di_side_begin and di_side_end */
    di_stream *own, *side; /* own: owned; side: own's, NULL where the device has none */
    bool has_side_work;    /* side was given something that own has not followed */
    void *memory;          /* device: the workspace */
    di_workspace ws;
    di_meta_layout ml;
    uint8_t
        *meta; /* host copy of ws.meta: one of the two, in turn, since a copy to the device may still be on its way */
    uint8_t *metas[2]; /* owned: memory of the device's alloc_host */
    int64_t blocks_stride;
    /* Batches of equal shape are recorded once and then run as one (graph.c). */
    di_recording *recordings; /* owned [n_recordings] */
    int32_t n_recordings;
    bool is_recordable;   /* the batch that runs now has a shape that comes again */
    bool has_others;      /* it has other rows than decoding ones, which are never recorded */
    int64_t n_unrecorded; /* di_forward_unrecorded */
    /* the batch that runs now */
    di_row_set set[2];
    di_entries entries[3];       /* by ratio */
    const uint8_t *skip_rows[2]; /* device, or NULL when no row is an image's; per set */
    bool compact;                /* set 1 has fewer rows than set 0 */
    bool is_replay;
    int32_t n_snapshots; /* 0: `snap` is not in use */
    di_row_set snap;     /* rows of set 0 by snapshot instead of sequence; its seq array is that of the first pass */
    int32_t n_logits;
    const int32_t *pair_store_from;
    uint8_t *pages, *slots, *taps;
    const int32_t *fed;
    bool has_pending; /* ws.f is not in the trunk yet: the next hc_step writes it back, or di_trunk_settle */
    bool has_codes;   /* ws.xq are the codes of ws.x */
    di_tap_fn tap;
    void *tap_user;
    float *tap_scores; /* device, made when a tap wants index scores */
    int64_t tap_scores_stride;
    size_t tap_scores_bytes;
    uint8_t *tap_host;
    size_t tap_host_bytes;
    /* the drafting round that runs now */
    int32_t draft_seqs, draft_given, draft_rows; /* sequences with those that fill it up, and without */
    di_error *err;
};

/* Returns from the function on the first status that is not DI_OK. */
#define DI_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        di_status st_ = (expr);                                                                                        \
        if (st_)                                                                                                       \
            return st_;                                                                                                \
    } while (0)

/* The class that stands before a sequence's start. */
static inline int32_t di_engram_pad(const di_model *mo) {
    return mo->token_map ? mo->token_map[mo->config.engram_pad] : mo->config.engram_pad;
}

/* ---- workspace.c ---- */
/* Cuts a workspace for these sizes at `base` (NULL: only counts) and returns its bytes. */
size_t di_workspace_cut(di_workspace *ws, di_meta_layout *ml, uint8_t *base, const di_config *c,
                        const di_layout *layout, di_numerics numerics, const di_model_options *opt);
void di_workspace_limits(di_limits *out, const di_config *c, const di_model_options *opt);
/* Rows that a workspace holds: rows_max, or the rows of a drafting round when that is more. */
int64_t di_workspace_rows(const di_config *c, const di_model_options *opt);

void di_meta_cut(di_meta_layout *m, const di_config *c, int64_t n, int64_t s, int64_t blocks_stride, int64_t n_logits);

/* ---- graph.c ---- */
/* Rows that a batch of n rows is filled up to, so that shapes come again: n itself where the device records nothing. */
int32_t di_graph_rows(const di_forward *fw, int32_t n);
/* Puts what `put` puts on the stream there, from a recording where there is one. kind and the shape of the forward name
 * it; `index` tells the steps of a draft chain apart. */
di_status di_graph_run(di_forward *fw, int32_t kind, int32_t index, di_status (*put)(di_forward *fw, int32_t index));
void di_graph_drop(di_forward *fw);

/* ---- prepare.c ---- */
/* Sends the host's copy of the metadata in the stream's order: the small arrays, and of each sequence's blocks the
 * first n_blocks. */
di_status di_meta_send(di_forward *fw, int32_t n_seqs, int32_t n_blocks);
/* Checks the batch and fills row sets, entries, n-gram windows and lists; sends them to the device. */
di_status di_forward_prepare(di_forward *fw, const di_batch *batch);
/* The same for a drafting round. */
di_status di_draft_prepare(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows);

/* ---- helpers shared by the blocks (forward.c) ---- */
static inline di_dtype di_act_dtype(const di_forward *fw) {
    return fw->model->numerics == DI_NUMERICS_EXACT ? DI_F32 : DI_BF16;
}
/* A block of activations of the forward's type. */
di_act di_act_of(const di_forward *fw, void *data, int64_t n_rows, int64_t n_cols);
di_act di_act_f32(float *data, int64_t n_rows, int64_t n_cols);
/* Codes of a block of x's shape. */
di_act di_codes_of(di_act x, uint8_t *codes, uint8_t *scales);
/* The form in which x enters a quantised product: QA codes in (codes, scales) in faithful numerics, x itself in exact.
 */
di_status di_act_quant(di_forward *fw, di_act x, uint8_t *codes, uint8_t *scales, di_act *out);
/* The same for a sub-layer's input, whose codes may be there already. */
di_status di_input_quant(di_forward *fw, di_act x, di_act *out);
di_status di_linear(di_forward *fw, di_act x, const di_mat *w, di_act out);
di_status di_norm(di_forward *fw, di_act x, const uint16_t *weight, di_act out);
/* norm, then the form in which the result enters a product. */
di_status di_norm_quantised(di_forward *fw, di_act x, const uint16_t *weight, di_act out, uint8_t *codes,
                            uint8_t *scales, di_act *quantised);
/* Writes back what the last sub-layer left to the next one: before anything else looks at the trunk. */
di_status di_trunk_settle(di_forward *fw, di_act trunk);
/* Puts the name of the operation that refused into the error object, when it is still empty; returns st. */
di_status di_refused(const di_forward *fw, di_status st);
/* Trunk of the batch's token ids, and the one-hot mix that the first sub-layer reads. */
di_status di_forward_start(di_forward *fw, di_act trunk, float **pre);
/* Between begin and end operations go to the side stream and run beside what the stream is given until di_side_join:
 * what nobody needs soon, in a forward of few rows, whose operations leave most of the device idle. They see what the
 * stream was given before begin; is_more: before the begin before, which nothing was given since that they need. In a
 * forward of many rows, where the device has no sides, or with a tap, everything stays in one order. */
di_status di_side_begin(di_forward *fw, bool is_more);
void di_side_end(di_forward *fw);
/* What the stream is given from now on sees what was done beside it. */
di_status di_side_join(di_forward *fw);
#define DI_BESIDE(fw, is_more, expr)                                                                                   \
    do {                                                                                                               \
        DI_TRY(di_side_begin(fw, is_more));                                                                            \
        di_status st_ = (expr);                                                                                        \
        di_side_end(fw);                                                                                               \
        if (st_)                                                                                                       \
            return st_;                                                                                                \
    } while (0)
/* Shows a tensor to the tap, if there is one. */
di_status di_show(di_forward *fw, const char *layer, const char *name, di_dtype dtype, int64_t n_rows, int64_t n_cols,
                  void *data);
/* "layers.3" or "mtp.0" */
void di_layer_name(const di_forward *fw, int32_t layer, char out[24]);

/* ---- attention.c, compressor.c, ffn.c, engram.c ---- */
/* Latents, compressed entries and index keys of kv source `layer` for all rows of the forward; x [n, H] normed. */
di_status di_block_compress(di_forward *fw, int32_t layer, di_act x);
/* f = attention(x) of a backbone layer on row set `set`. */
di_status di_block_attention(di_forward *fw, int32_t layer, int32_t set, di_act x, bool compressed_done, di_act f);
/* f = attention of draft block `layer` over ring context and this round's rows. */
di_status di_block_draft_attention(di_forward *fw, int32_t layer, di_act x, di_act f);
/* f = moe(x) */
di_status di_block_ffn(di_forward *fw, int32_t layer, int32_t set, di_act x, di_act f);
/* The n-gram rows of an Engram layer, projected, of row set `set`: of tokens alone, so that it may run while the layer
 * before does. */
di_status di_block_engram_rows(di_forward *fw, int32_t layer, int32_t set);
/* These, gated, added to the trunk of row set 0. */
di_status di_block_engram(di_forward *fw, int32_t layer, di_act trunk);
/* Window keys of `x` for `layer`: wkv, kv_norm, RoPE, records in ws.records. */
di_status di_block_window_keys(di_forward *fw, int32_t layer, const di_row_set *rs, bool compressed_rope, di_act xq);
/* Puts ws.records of row set `set` into the layer's rings of the sequences' slots and of the snapshots' slots. */
di_status di_block_window_store(di_forward *fw, int32_t layer, int32_t set);
/* One layer's two sub-layers with their hyper-connections; *pre is the buffer in use and changes. */
di_status di_block_run(di_forward *fw, int32_t layer, int32_t set, bool compressed_done, uint8_t *trunk, float **pre);

#endif
