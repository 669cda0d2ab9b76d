/* A model on the CPU backend with caches for one or more sequences: what forward tests drive.
 *
 * Sequence s has state slot s and its own KV blocks, handed out in an order that is not the identity, so that a mix-up
 * of block and position shows. Faults end the test. */
#ifndef DI_TEST_RIG_H
#define DI_TEST_RIG_H

#include "model/model.h"

typedef struct rig_options {
    const char *dir; /* model folder */
    bool dummy;      /* made-up weights; the token map is the identity then */
    di_numerics numerics;
    int threads;
    const char *isa; /* level of the kernels; NULL: the best */
    int32_t window;  /* instead of the configuration's; 0: that */
    int n_seqs;      /* sequences with caches */
    int64_t tokens_max, rows_max, logits_max;
    const int32_t *token_map;
    int64_t n_token_map;
} rig_options;

typedef struct rig {
    di_config config;
    di_checkpoint *ckpt;
    di_backend backend;
    di_device *device;
    di_model *model;
    di_forward *fw;
    di_memory_plan plan;
    uint8_t *pages, *slots;
    int n_seqs, blocks_per_seq;
    int32_t *blocks; /* [n_seqs, blocks_per_seq] */
    di_replay replay;
    di_tap_fn tap;
    void *tap_user;
} rig;

/* Token id to Engram class by the tiny model's tokenizer; lives as long as the program. */
const int32_t *rig_token_map(int64_t *n);
void rig_open(rig *r, const rig_options *opt);
void rig_close(rig *r);
/* Zeroes all caches, then fills them with a byte pattern that no valid state has, so that stale reads show. */
void rig_reset(rig *r);

/* Runs a batch on the rig's caches under its replay mode; logits as di_forward_run gives them. */
const float *rig_forward(rig *r, const di_seq_rows *rows, int n_seqs);
/* Runs rows pos0 .. pos0+n of one sequence; returns the logits of the last n_logits rows (valid until the next run). */
const float *rig_run(rig *r, int seq, const int32_t *tokens, int64_t pos0, int32_t n, int32_t n_logits, int64_t rect);
/* Prefill in chunks of `chunk` rows (0: one); logits of the last row. */
const float *rig_prefill(rig *r, int seq, const int32_t *tokens, int64_t n, int64_t chunk, int64_t rect);
int32_t rig_argmax(const float *logits, int64_t n);

#endif
