/* What tests of the prefix cache share: pools without device memory, prompts by seed, sequences that hold blocks.
 *
 * Inline: a test program takes what it needs. */
#ifndef DI_TEST_PREFIX_RIG_H
#define DI_TEST_PREFIX_RIG_H

#include "engine/kv/kv.h"
#include "harness.h"

enum { PREFIX_BLOCKS_MAX = 64, PREFIX_SLOTS_MAX = 16 };

typedef struct prefix_rig {
    di_kv kv;
    di_prefix *prefix;
} prefix_rig;

static inline void prefix_rig_open(prefix_rig *r, int32_t n_blocks, int32_t n_slots, const di_prefix_options *options) {
    di_error err = {0};
    *r = (prefix_rig){0};
    di_test_ok(di_kv_pool_init(&r->kv.blocks, n_blocks, &err), &err);
    di_test_ok(di_kv_pool_init(&r->kv.slots, n_slots, &err), &err);
    di_test_ok(di_prefix_create(&r->prefix, &r->kv, options, &err), &err);
}

/* All sequences are gone: destroying the cache must free every unit. */
static inline void prefix_rig_close(prefix_rig *r) {
    di_prefix_destroy(r->prefix);
    assert_int_equal(r->kv.blocks.n_free, r->kv.blocks.n_units);
    assert_int_equal(r->kv.slots.n_free, r->kv.slots.n_units);
    di_kv_pool_deinit(&r->kv.blocks);
    di_kv_pool_deinit(&r->kv.slots);
}

static const uint8_t prefix_identity[16] = "model, numerics";

/* A sequence: its tokens, its chain and the full blocks that it holds. */
typedef struct prefix_seq {
    int32_t tokens[PREFIX_BLOCKS_MAX * DI_PAGE_TOKENS];
    uint8_t extra[PREFIX_BLOCKS_MAX * DI_KV_EXTRA_BYTES];
    di_kv_chain chain;
    int32_t blocks[PREFIX_BLOCKS_MAX];
    int32_t n_blocks;
} prefix_seq;

/* Block i has the content of words[i]: 127 equal ids, and the word in its last. */
static inline void prefix_seq_open_as(prefix_rig *r, prefix_seq *s, const uint8_t identity[16], const char *salt,
                                      const int32_t *words, int32_t n) {
    di_error err = {0};
    s->n_blocks = 0;
    memset(s->extra, 0, sizeof s->extra);
    for (int32_t i = 0; i < n * DI_PAGE_TOKENS; i++)
        s->tokens[i] = (i + 1) % DI_PAGE_TOKENS ? 7 : words[i / DI_PAGE_TOKENS];
    di_test_ok(di_kv_chain_init(&s->chain, r->prefix, identity, salt, strlen(salt), 0, &err), &err);
    di_test_ok(di_kv_chain_extend(&s->chain, s->tokens, s->extra, (int64_t)n * DI_PAGE_TOKENS, &err), &err);
}

static inline void prefix_seq_open(prefix_rig *r, prefix_seq *s, const int32_t *words, int32_t n) {
    prefix_seq_open_as(r, s, prefix_identity, "", words, n);
}

/* Takes what is there of the first n_max blocks; *slot is as in di_prefix_acquire. */
static inline di_kv_hit prefix_seq_hit(prefix_rig *r, prefix_seq *s, int32_t n_max, int32_t *slot) {
    di_kv_hit hit = di_prefix_acquire(r->prefix, &s->chain, n_max, s->blocks, slot);
    s->n_blocks = hit.n_blocks;
    return hit;
}

/* Computes and publishes the next block; false when no block can be had. */
static inline bool prefix_seq_run(prefix_rig *r, prefix_seq *s) {
    int32_t block;
    if (!di_kv_pool_alloc(&r->kv.blocks, 1, &block))
        return false;
    s->blocks[s->n_blocks++] = di_prefix_publish(r->prefix, &s->chain, block);
    return true;
}

static inline void prefix_seq_close(prefix_rig *r, prefix_seq *s) {
    di_kv_pool_release(&r->kv.blocks, s->blocks, s->n_blocks);
    s->n_blocks = 0;
    di_kv_chain_deinit(&s->chain);
}

/* A request from its start to its end: hit, run the rest, give everything back. Returns the blocks that were there. */
static inline int32_t prefix_request(prefix_rig *r, const int32_t *words, int32_t n) {
    static prefix_seq s;
    prefix_seq_open(r, &s, words, n);
    int32_t n_hit = prefix_seq_hit(r, &s, n, NULL).n_blocks;
    while (s.n_blocks < n)
        assert_true(prefix_seq_run(r, &s));
    prefix_seq_close(r, &s);
    return n_hit;
}

/* How many leading blocks of these words are there; changes nothing. */
static inline int32_t prefix_peek(prefix_rig *r, const int32_t *words, int32_t n) {
    static prefix_seq s;
    prefix_seq_open(r, &s, words, n);
    int32_t n_hit = di_prefix_peek(r->prefix, &s.chain, n).n_blocks;
    prefix_seq_close(r, &s);
    return n_hit;
}

#define PREFIX_WORDS(...) ((const int32_t[]){__VA_ARGS__}), (int32_t)DI_COUNT(((const int32_t[]){__VA_ARGS__}))

/* A hash that takes two values only: nearly every name is wrong. */
static inline di_kv_hash prefix_hash_of_few(int kind, const uint8_t head[16], const void *data, size_t n_bytes,
                                            const uint8_t *extra) {
    di_kv_hash h = di_kv_hash_xxh3(kind, head, data, n_bytes, extra);
    uint8_t bit = h.bytes[0] & 1;
    memset(&h, bit, sizeof h);
    return h;
}

#endif
