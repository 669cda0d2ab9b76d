/* What chain.c and prefix.c share: roots, entries, heaps of values, the cache itself.
 *
 * The entry of a block has the block's own id, so there are as many entries as blocks and an entry needs no name of its
 * own; likewise a state and its slot. */
#ifndef DI_KV_PREFIX_INTERNAL_H
#define DI_KV_PREFIX_INTERNAL_H

#include "kv.h"

/* Where chains begin. Two chains have the same root if and only if identity and salt are the same bytes. */
struct di_kv_root {
    di_kv_hash hash;
    uint8_t identity[16];
    char *salt; /* owned [salt_len]; NULL when empty */
    size_t salt_len;
    int64_t refs;     /* chains and entries of depth 0 */
    di_kv_root *next; /* in its bucket */
};

/* A reference to the root of identity and salt, which is made when it is new. */
di_status di_kv_root_acquire(di_prefix *p, const uint8_t identity[16], const char *salt, size_t salt_len,
                             di_kv_root **out, di_error *err);
void di_kv_root_release(di_prefix *p, di_kv_root *root);

/* What a block or a state is worth: priority = base + hits * cost, where base is the clock at the last use. */
typedef struct kv_value {
    double base, priority;
    uint64_t stamp; /* of the last use; of equal priorities the older goes first */
    uint32_t hits;
    int32_t at; /* place in the heap; -1: not in it */
} kv_value;

/* A binary heap with the least priority on top. It holds what could be evicted now. */
typedef struct kv_heap {
    kv_value *values; /* owned [n_units] */
    int32_t *ids;     /* owned [n_units] */
    int32_t n;
    double clock;
} kv_heap;

/* A cached block. */
typedef struct kv_entry {
    di_kv_hash hash;
    di_kv_root *root; /* a reference at depth 0, NULL below: the parent says it */
    int32_t parent;   /* entry of the block before; -1 at depth 0 */
    int32_t next;     /* in its bucket; -1 at the end */
    int32_t n_children;
    int32_t depth; /* number of the block in its sequences */
    int32_t slot;  /* of the state behind this block, a reference; -1: none */
    bool is_here;
    uint8_t extra[DI_KV_EXTRA_BYTES]; /* zeros: none */
} kv_entry;

struct di_prefix {
    di_kv_store store; /* the device tier's table */
    di_kv *kv;         /* borrowed */
    di_prefix_options options;
    kv_entry *entries;    /* owned [n_blocks] */
    int32_t *tokens;      /* owned [n_blocks, 128] */
    int32_t *state_owner; /* owned [n_slots]: the entry that has the slot's state; -1: none */
    kv_heap blocks, states;
    uint32_t bucket_mask;
    int32_t *buckets;   /* owned [bucket_mask + 1]: entries by name; -1: none */
    di_kv_root **roots; /* owned [bucket_mask + 1] */
    int64_t n_roots;
    int32_t n_reserved; /* slots between reserve and attach or cancel */
    uint64_t stamp;
    di_prefix_stats stats;
};

static inline uint32_t kv_bucket(const di_prefix *p, const di_kv_hash *hash) {
    uint32_t h;
    memcpy(&h, hash->bytes + 12, sizeof h);
    return h & p->bucket_mask;
}

#endif
