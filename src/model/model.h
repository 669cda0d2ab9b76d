/* The model: one forward pass of DeepSeek-V4.1-Flash over a ragged batch, on paged caches and state slots.
 *
 * Owns: config.json, the checkpoint's files and tensors (stored or made up), the weight map, the layout of KV pages and
 * state slots, the forward pass and the draft module's forward. Has no notion of a request or of text: sequences are
 * token arrays, block tables and slot numbers that the caller keeps. Arithmetic is the backend's.
 *
 * Threads: a di_model is read-only once loaded; one di_forward (workspace) per thread that runs steps. */
#ifndef DI_MODEL_H
#define DI_MODEL_H

#include "backend/backend.h"

/* ---- configuration (model.md 1) -----------------------------------------------------------------------------------
 */

#define DI_LAYERS_MAX 256     /* backbone + draft layers */
#define DI_SOURCES_MAX 64     /* of any list of layer ids */
#define DI_HC_MULT_MAX 8      /* what the operations take, of streams ... */
#define DI_EXPERTS_TOK_MAX 64 /* ... and of experts a row */
#define DI_PAGE_TOKENS 128
#define DI_BACKTRACK 6            /* positions by which a sequence may step back: drafts + 1, at least 6 */
#define DI_ENGRAM_NGRAM_MAX 8     /* multipliers of an Engram layer, at most */
#define DI_ENGRAM_COLUMNS_MAX 448 /* (Ng-1)*He, at most */

typedef struct di_config {
    /* top level */
    int32_t bos_id, eos_id, pad_id;
    int32_t image_id; /* -1 when absent (text-only) */
    uint64_t dummy_seed;
    bool has_vision;
    struct {
        int32_t n_layers, hidden, n_heads, intermediate, patch, downsample, max_image_tokens;
        int64_t min_pixels;
        double rope_theta, max_wh_ratio; /* max_wh_ratio 0 = none */
    } vision;
    /* text_config */
    int32_t vocab, hidden, n_layers, n_heads, head_dim, rope_dim, q_rank, o_rank, o_groups;
    int32_t n_experts, n_experts_tok, intermediate;
    float swiglu_limit; /* 0 = off */
    float rms_eps, routed_scale;
    int64_t position_max;
    double rope_theta, compress_rope_theta;
    bool has_yarn;
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    int64_t yarn_original;
    int32_t window;
    int32_t ratio[DI_LAYERS_MAX]; /* of n_layers + n_draft_layers layers */
    int32_t n_kv_sources, kv_sources[DI_SOURCES_MAX];
    int32_t n_index_sources, index_sources[DI_SOURCES_MAX];
    int32_t n_index_k_sources, index_k_sources[DI_SOURCES_MAX];
    int32_t index_heads, index_dim, index_topk;
    int32_t candidate_layer; /* -1 = none */
    int32_t candidate_blocks, candidate_block;
    int32_t hc_mult, hc_iters;
    float hc_eps;
    int32_t n_engram, engram_layers[DI_SOURCES_MAX];
    int64_t engram_rows[DI_SOURCES_MAX]; /* engram_num_embeddings */
    int32_t engram_ngram, engram_heads, engram_dim, engram_pad;
    int64_t engram_vocab, engram_classes;                /* engram_vocab_size, engram_compressed_vocab_size */
    int32_t n_draft_layers, draft_block, draft_noise_id; /* num_nextn_predict_layers, dspark_block_size, ... */
    int32_t n_draft_targets, draft_targets[DI_SOURCES_MAX];
    int32_t draft_rank, draft_experts, draft_experts_tok;
    bool fp4_kv;
    /* derived (1.4) */
    int32_t first_consumer; /* P0: first layer with ratio 1; n_layers when there is none */
    int32_t kv_source[DI_LAYERS_MAX], index_source[DI_LAYERS_MAX], index_k_source[DI_LAYERS_MAX]; /* -1 where r = 0 */
} di_config;

/* Reads and checks `dir`/config.json: every key of model.md 1; an error names the key, what was found and what is
 * expected (DI_ERR_FORMAT, DI_ERR_UNSUPPORTED, DI_ERR_NOT_FOUND). */
di_status di_config_load(di_config *out, const char *dir, di_error *err);
di_status di_config_parse(di_config *out, const char *text, size_t len, di_error *err);

/* n layers at the released dimensions for benches (--dummy-layers): the first half like layer 2, the rest like layer
 * 20, each with its own compressor and indexer. DI_ERR_ARG for n outside 1 .. DI_SOURCES_MAX. */
di_status di_config_released_layers(di_config *out, int32_t n, di_error *err);

static inline bool di_config_is_kv_source(const di_config *c, int32_t l) {
    return c->ratio[l] && c->kv_source[l] == l;
}
static inline bool di_config_is_index_source(const di_config *c, int32_t l) {
    return c->ratio[l] && c->index_source[l] == l;
}
static inline bool di_config_is_index_k_source(const di_config *c, int32_t l) {
    return c->ratio[l] && c->index_k_source[l] == l;
}
/* Index in engram_layers, -1 when layer l has no Engram. */
int32_t di_config_engram_index(const di_config *c, int32_t l);
/* The smallest replay keep that is exact: (L - P0)*(W - 1) + 1 (model.md 3.9). */
int64_t di_config_replay_exact(const di_config *c);
/* Rows before a 128-token border that rebuild the window rings there exactly, given the KV pages up to the border
 * (5.5): run them with valid_start at the first and page_from at the border. With replay the producers' rings are
 * rebuilt, else all layers'; the draft module's come along. */
int64_t di_config_window_span(const di_config *c, bool is_replay, bool with_draft);
/* RoPE frequencies [R/2] of window-only layers, or of layers with a compressed cache (YaRN). (3.4) */
void di_config_inv_freq(const di_config *c, bool compressed, float *inv_freq);
/* Engram constants of the e-th Engram layer: multipliers [Ng], primes and offsets [(Ng-1)*He]. (3.2.2, 3.2.3)
 * DI_ERR_FORMAT when the primes of some layer don't sum to engram_rows. */
di_status di_config_engram(const di_config *c, int32_t e, int64_t *mult, int64_t *primes, int64_t *offsets,
                           di_error *err);

/* ---- checkpoint (model.md 2)
 * ----------------------------------------------------------------------------------------- */

typedef struct di_checkpoint di_checkpoint;

typedef enum di_tensor_kind {
    DI_KIND_EMBED,     /* embed, head */
    DI_KIND_ATTENTION, /* projections, norms, sinks, compressors */
    DI_KIND_INDEXER,
    DI_KIND_EXPERT, /* routed experts */
    DI_KIND_SHARED, /* shared experts */
    DI_KIND_ROUTER,
    DI_KIND_HC,
    DI_KIND_ENGRAM_TABLE,
    DI_KIND_ENGRAM, /* the rest of Engram */
    DI_KIND_DRAFT,  /* everything under mtp. */
    DI_KIND_VISION,
    DI_KIND_OTHER,
    DI_KIND_COUNT
} di_tensor_kind;
const char *di_tensor_kind_name(di_tensor_kind kind);

typedef struct di_stored_tensor {
    const char *name; /* owned by the checkpoint; without "model." */
    di_dtype dtype;   /* as stored: I8 for packed E2M1 */
    int32_t n_dims;
    int64_t shape[4];
    size_t n_bytes;
    di_tensor_kind kind;
    const uint8_t *data; /* view into the mapping or the made-up weights */
} di_stored_tensor;

typedef struct di_checkpoint_options {
    bool dummy;        /* make the weights up (dummy.md) instead of reading shards */
    int n_threads;     /* that make weights up; 0 = all CPUs */
    bool headers_only; /* check names, shapes, dtypes and offsets, but not contents (scales); made-up weights stay
                          unmade */
    /* called while contents are checked or made, with bytes done of total; may be NULL */
    void (*progress)(void *user, uint64_t done, uint64_t total);
    void *user;
} di_checkpoint_options;

/* Opens the index and maps every shard; every tensor that the config implies must be there once, with its name, dtype,
 * shape and size, before anything runs. Errors name file, tensor, found, expected. With dummy, DI_ERR_MEMORY says
 * needed and available bytes when the weights don't fit. */
di_status di_checkpoint_open(di_checkpoint **out, const char *dir, const di_config *config,
                             const di_checkpoint_options *opt, di_error *err);
void di_checkpoint_close(di_checkpoint *ckpt);
size_t di_checkpoint_count(const di_checkpoint *ckpt);
const di_stored_tensor *di_checkpoint_at(const di_checkpoint *ckpt, size_t i);
const di_stored_tensor *di_checkpoint_find(const di_checkpoint *ckpt, const char *name); /* NULL when absent */
size_t di_checkpoint_shards(const di_checkpoint *ckpt);
uint64_t di_checkpoint_bytes(const di_checkpoint *ckpt); /* payload of all tensors */
bool di_checkpoint_is_dummy(const di_checkpoint *ckpt);

/* ---- loaded model
 * ----------------------------------------------------------------------------------------------------- */

typedef enum di_numerics { DI_NUMERICS_FAITHFUL, DI_NUMERICS_EXACT } di_numerics;
typedef enum di_replay { DI_REPLAY_OFF, DI_REPLAY_MASK, DI_REPLAY_COMPACT } di_replay;

typedef struct di_model di_model;

typedef struct di_model_options {
    const di_backend *backend; /* borrowed until close */
    di_device *device;         /* borrowed until close */
    di_numerics numerics;
    int64_t rows_max;    /* rows of one forward */
    int32_t seqs_max;    /* sequences of one forward */
    int64_t tokens_max;  /* positions of one sequence, tables included */
    int64_t logits_max;  /* rows of one forward that need logits */
    bool with_draft;     /* load and run the draft module */
    bool engram_on_host; /* where weights are copied to the device: but for the Engram tables, which it reads from
                            the host's memory */
    /* Called while weights are copied to the device, with bytes done of total; may be NULL */
    void (*progress)(void *user, uint64_t done, uint64_t total);
    void *user;
    const int32_t *token_map; /* [n_token_map] token id to Engram class (tokenizer.md 8); copied; NULL: map[id] = id */
    int64_t n_token_map;
} di_model_options;

di_status di_model_create(di_model **out, const di_config *config, const di_checkpoint *ckpt /* borrowed */,
                          const di_model_options *opt, di_error *err);
void di_model_destroy(di_model *model);
const di_config *di_model_config(const di_model *model);

/* Bytes of one KV block (128 tokens), of one sequence's state slot, of the workspace of one di_forward; tap_bytes of
 * what a sequence needs to put off the draft module's keys, 0 without one. */
typedef struct di_memory_plan {
    size_t page_bytes, slot_bytes, tap_bytes, workspace_bytes, scratch_bytes;
    size_t weight_bytes, engram_bytes; /* all tensors; the Engram tables among them */
} di_memory_plan;
/* The plan of a model that is not loaded yet: config, options (backend and device may be NULL: no scratch), no
 * checkpoint. */
void di_model_plan(const di_config *config, const di_model_options *opt, di_memory_plan *out);

/* Wish to keep the window state that a sequence has at a 128-token border inside its rows: after the forward, the
 * window rings of state slot `slot` hold the records of positions [max(pos0, at - W), at), so that a copy of that slot
 * continues from `at`. The slot is of the same array and no other sequence's or snapshot's of the batch. Where at - W <
 * pos0, the older records must be there before: the caller copies the sequence's slot into it first
 * (di_forward_copy_units).
 *
 * Replay off: the rings of all layers and of the draft module. With mask and compact, the rings of the producer layers
 * alone (and the draft module's when its taps are producers'): the consumers' rings belong to the cut of one prompt,
 * and whoever continues from a border runs the consumers over the rows from its own cut on. Compressor rings are not
 * kept: ratio 1 has none, and with ratio 2 the pair of the odd position at - 1 has just closed, so that no later row
 * reads a latent from before the border. */
typedef struct di_ring_snapshot {
    int64_t at; /* pos0 < at <= pos0 + n_rows, a multiple of 128 */
    int32_t slot;
} di_ring_snapshot;

/* One sequence's rows of a forward. */
typedef struct di_seq_rows {
    const int32_t *tokens; /* all tokens of the sequence from position 0, at least pos0 + n_rows of them; borrowed */
    int64_t pos0;          /* position of the first row */
    int32_t n_rows;        /* >= 1 */
    int32_t n_logits;      /* the last n_logits rows get logits; 0 .. n_rows */
    int32_t slot;
    const int32_t *blocks; /* block table; covers pos0 + n_rows tokens */
    int32_t n_blocks;
    int64_t rect;        /* first position that the consumer layers keep; 0 = all (3.9) */
    int64_t valid_start; /* window keys before it don't exist; usually 0 (5.5) */
    int64_t page_from;   /* rows before it write no KV pages: the pages hold them already; usually 0 */
    int32_t n_snapshots;
    const di_ring_snapshot *snapshots; /* [n_snapshots], borders rising; borrowed for the call */
    const uint8_t *is_image;           /* per position from 0, or NULL: no images */
    int32_t tap_slot;                  /* where its taps are kept in batch->taps */
    int32_t fed_from; /* with batch->fed: of its one row, where the token is there; -1: `tokens` has it */
} di_seq_rows;

/* Where a forward shows its intermediate tensors (tests and debugging). `data` may be written: what follows then uses
 * the new values. dtype of data: DI_F32, DI_BF16, DI_I32, DI_U8 or DI_I64; shape [n_rows, n_cols]. */
typedef void (*di_tap_fn)(void *user, const char *name, di_dtype dtype, int64_t n_rows, int64_t n_cols, void *data);

typedef struct di_batch {
    int32_t n_seqs;
    const di_seq_rows *seqs;
    di_replay replay;
    uint8_t *pages, *slots; /* device memory: KV blocks of page_bytes, state slots of slot_bytes */
    /* Device memory, tap_bytes for each tap_slot. Not NULL: what the draft module's keys of these rows are made of is
     * kept there, and di_draft_catch_up makes them when they are needed. NULL: they are made at once. A snapshot that
     * the batch takes then lacks these rows in the draft module's rings. */
    uint8_t *taps;
    /* Device memory: tokens that operations before this forward draw, on the same stream. NULL: none.
     * DI_ERR_UNSUPPORTED where the backend has no `feed`. */
    const int32_t *fed;
    di_tap_fn tap; /* NULL: none */
    void *tap_user;
} di_batch;

typedef struct di_forward di_forward; /* workspace and stream of one running forward */
di_status di_forward_create(di_forward **out, di_model *model, di_error *err);
void di_forward_destroy(di_forward *fw);

/* Runs the batch: writes KV pages and rings, and the logits of the rows that asked for them, in row order.
 * *logits: device memory [sum of n_logits, V] fp32, valid until the next call. Bad arguments: DI_ERR_RANGE. */
di_status di_forward_run(di_forward *fw, const di_batch *batch, float **logits, di_error *err);

/* Draws tokens from the logits of the last forward or draft step (the backend's sample_rows), behind it on its stream;
 * does not wait. DI_ERR_UNSUPPORTED where the backend has no such operation. */
di_status di_forward_sample(di_forward *fw, const di_sample_rows_args *args, di_error *err);

/* The same in two parts, between which the host is free: launch puts the forward on its stream, where later operations
 * find the logits; wait returns when all of it is done. At most two forwards may be launched and not waited for. */
di_status di_forward_launch(di_forward *fw, const di_batch *batch, float **logits, di_error *err);
di_status di_forward_wait(di_forward *fw, di_error *err);
/* The stream of a forward, for operations on its logits. */
di_stream *di_forward_stream(di_forward *fw);
/* How many forwards and steps of drafting rounds so far took longer than such ones do as a rule, where the device
 * records batches of decoding rows: the first two of a shape, and forwards that have other rows. */
int64_t di_forward_unrecorded(const di_forward *fw);

/* Copies whole units (KV pages or state slots) inside one device array: unit `src` to unit `dst`, in list order, after
 * the forwards and rounds that fw ran before and before those that it runs next. DI_ERR_RANGE for a negative id. */
typedef struct di_copy {
    int32_t dst, src;
} di_copy;
di_status di_forward_copy_units(di_forward *fw, uint8_t *base, size_t unit_bytes, const di_copy *copies, int32_t n,
                                di_error *err);

/* Makes the draft module's keys of rows that were put off (batch->taps): of each sequence
 * consecutive rows, at most as many as a ring holds (the window and what a sequence may step back). The same
 * bytes in the rings as if nothing had been put off. Reads tokens, blocks and positions as di_forward_run does; runs no
 * layer. DI_ERR_ARG without a draft module. */
di_status di_draft_catch_up(di_forward *fw, const di_batch *batch, di_error *err);

/* One drafting round (dspark.md 4.4) for sequences whose last certain row is at position `last` (its main keys are in
 * the rings) and whose next token `token` is sampled but not run. */
typedef struct di_draft_seq {
    int32_t token;
    int64_t last;
    int32_t slot;
} di_draft_seq;

/* Runs the draft blocks with n_rows rows a sequence (dspark_block_size by default); launch only puts them on the
 * stream. */
di_status di_draft_launch(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                          di_tap_fn tap, void *tap_user, di_error *err);
di_status di_draft_begin(di_forward *fw, const di_draft_seq *seqs, int32_t n_seqs, int32_t n_rows, uint8_t *slots,
                         di_tap_fn tap, void *tap_user, di_error *err);
/* Row i of the Markov chain: from the token before (prev [n_seqs]), logits [n_seqs, V] fp32 and confidences [n_seqs],
 * device memory valid until the next call. i rises from 0. */
di_status di_draft_next(di_forward *fw, int32_t i, const int32_t *prev, float **logits, float **conf, di_error *err);
/* The same put on the stream: `tokens` [n_seqs] are device memory that what stands there before writes, ids of the
 * vocabulary; NULL: the tokens before stay, at first those of the round's sequences. The logits are valid until the
 * next step there, the confidences until the next round. DI_ERR_UNSUPPORTED where the backend has no `feed`. */
di_status di_draft_follow(di_forward *fw, int32_t i, const int32_t *tokens, float **logits, float **conf,
                          di_error *err);

#endif
