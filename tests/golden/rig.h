/* A model on the backend under test with caches for one or more sequences: what forward tests drive.
 *
 * Sequence s has state slot s and its own KV blocks, handed out in an order that is not the identity, so that a mix-up
 * of block and position shows. Faults end the test. */
#ifndef DI_TEST_RIG_H
#define DI_TEST_RIG_H

#include "accelerator.h"

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
    float *logits, *conf; /* of the last run, in host memory */
    di_tap_fn tap;
    void *tap_user;
} rig;

/* Token id to Engram class by the tiny model's tokenizer; lives as long as the program. */
const int32_t *rig_token_map(int64_t *n);
void rig_open(rig *r, const rig_options *opt);
void rig_close(rig *r);
/* Zeroes all caches, then fills them with a byte pattern that no valid state has, so that stale reads show. */
void rig_reset(rig *r);

/* Runs a batch on the rig's caches under its replay mode; logits as di_forward_run gives them, in host memory. */
const float *rig_forward(rig *r, const di_seq_rows *rows, int n_seqs);
/* Runs rows pos0 .. pos0+n of one sequence; returns the logits of the last n_logits rows (valid until the next run). */
const float *rig_run(rig *r, int seq, const int32_t *tokens, int64_t pos0, int32_t n, int32_t n_logits, int64_t rect);
/* Prefill in chunks of `chunk` rows (0: one); logits of the last row. */
const float *rig_prefill(rig *r, int seq, const int32_t *tokens, int64_t n, int64_t chunk, int64_t rect);
/* Skips a test that looks into caches where they lie. */
#define rig_needs_cpu()                                                                                                \
    do {                                                                                                               \
        if (strcmp(di_test_backend(), "cpu"))                                                                          \
            di_test_skip("it reads the caches of the CPU in place");                                                   \
    } while (0)
/* Puts bytes into the rig's caches. */
void rig_put(const rig *r, uint8_t *at, const void *bytes, size_t n);
/* Step i of a drafting round of n sequences: logits [n, V] and confidences [n] in host memory, valid until the next
 * run.
 */
void rig_draft_next(rig *r, int32_t i, const int32_t *prev, int n, const float **logits, const float **conf);
/* The tolerance of attn_out and of entries in faithful numerics, 0 where it is that of all. Between attn_out and the
 * golden tensors before it lie three products of E4M3 activations, rounded to codes anew each time; an entry also
 * closes over rows whose inputs are not in the golden files. Tensor cores that multiply the codes keep 13 bits below
 * the largest product of a group, which moves codes to their neighbours, 6 to 12 % away: of attn_out, products cut like
 * that on the host are 1.3 to 2.2 % off at the released dimensions, an H200, which also rounds chances to bf16, 1.8
 * to 3.1 %. */
double rig_rounded_tolerance(void);
int32_t rig_argmax(const float *logits, int64_t n);

#endif
