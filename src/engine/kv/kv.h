/* KV memory: who owns which block and which state slot, the device memory behind them, and what of it is worth keeping
 * for prompts to come.
 *
 * Owns: pools of equal units with a free list and reference counts (one for KV blocks of 128 positions, one for state
 * slots), the two arrays of device memory that the ids index, the names of contents (hash chains), and the prefix cache
 * over them. Knows no sequence: block tables are the caller's. What lies inside a block or slot is the model's
 * (model/layout.c); copies between slots are the caller's too.
 *
 * Threads: one, the engine's. */
#ifndef DI_KV_H
#define DI_KV_H

#include "model/model.h"

/* A pool of units 0 .. n_units-1. A unit is either free, once in the free list, or has a reference count of 1 or more.
 * The free list is first in, first out, so that what was given back last is overwritten last. Zeroed storage is an
 * empty pool. */
typedef struct di_kv_pool {
    int32_t n_units, n_free;
    int32_t *next; /* owned: of free units, the next free one; -1 at the end */
    int32_t *refs; /* owned: reference counts */
    int32_t head, tail;
    /* Called from release when one reference to id is left; NULL: nobody asks. The prefix cache's, which is the holder
     * of that reference when the unit is cached. */
    void (*on_single)(void *user, int32_t id);
    void *user;
} di_kv_pool;

di_status di_kv_pool_init(di_kv_pool *pool, int32_t n_units, di_error *err);
void di_kv_pool_deinit(di_kv_pool *pool);
/* n units with one reference each into ids, or none of them: false when fewer are free. */
bool di_kv_pool_alloc(di_kv_pool *pool, int32_t n, int32_t *ids);
/* One more reference to a unit that has one. */
void di_kv_pool_acquire(di_kv_pool *pool, int32_t id);
/* Drops one reference of each of ids [n], from the last to the first; units without any are free again. */
void di_kv_pool_release(di_kv_pool *pool, const int32_t *ids, int32_t n);
/* Units that are not free. */
static inline int32_t di_kv_pool_used(const di_kv_pool *pool) {
    return pool->n_units - pool->n_free;
}

/* The pools with their memory. */
typedef struct di_kv {
    const di_backend *backend; /* borrowed, with device, until di_kv_deinit */
    di_device *device;
    size_t page_bytes, slot_bytes;
    di_kv_pool blocks, slots;
    uint8_t *pages, *states; /* owned device memory: [blocks.n_units * page_bytes], [slots.n_units * slot_bytes] */
} di_kv;

/* Zeroed device memory for n_blocks and n_slots; the pages are touched only as they are used. DI_ERR_MEMORY says how
 * much was asked for. */
di_status di_kv_init(di_kv *kv, const di_backend *backend, di_device *device, const di_memory_plan *plan,
                     int32_t n_blocks, int32_t n_slots, di_error *err);
void di_kv_deinit(di_kv *kv); /* zeroed storage is fine */

/* KV blocks that n tokens need. */
static inline int64_t di_kv_blocks_for(int64_t n_tokens) {
    return DI_CEIL_DIV(n_tokens, DI_PAGE_TOKENS);
}

/* ---- contents by name ----------------------------------------------------------------------------------------------
 */

/* The name of a full block's content: XXH3 (128 bits, canonical byte order) over the parent's name, the block's 128
 * token ids and its extra bytes; the root's over the engine's identity and the caller's salt. It is the same in every
 * process and in every tier. XXH3 can be made to collide on purpose, so a name finds content and never proves it:
 * whoever matches compares the tokens as well. */
typedef struct di_kv_hash {
    uint8_t bytes[16];
} di_kv_hash;

/* What decides a block's content beside its token ids: a digest of the images that lie in it; zeros: none. */
#define DI_KV_EXTRA_BYTES 32

/* kind keeps apart what is hashed: 0 a root (head: identity, data: salt), 1 a block (head: the parent's name, data:
 * tokens), 2 a block with extra bytes behind its tokens. */
typedef di_kv_hash (*di_kv_hash_fn)(int kind, const uint8_t head[16], const void *data, size_t n_bytes,
                                    const uint8_t *extra);
di_kv_hash di_kv_hash_xxh3(int kind, const uint8_t head[16], const void *data, size_t n_bytes, const uint8_t *extra);

typedef struct di_prefix di_prefix;
typedef struct di_kv_root di_kv_root; /* identity and salt, kept once however many chains begin there */

/* The contents of one sequence, block by block, and how far they are in the cache. The fields are read-only for
 * others. Zeroed storage, and whatever was initialised with a NULL cache, is a chain that never hits and publishes
 * nothing. */
typedef struct di_kv_chain {
    di_prefix *prefix;     /* borrowed; outlives the chain */
    di_kv_root *root;      /* a reference */
    const int32_t *tokens; /* borrowed from the last extend: at least n_hashes * 128 ids from position 0 */
    const uint8_t *extra;  /* likewise [n_hashes, DI_KV_EXTRA_BYTES]; NULL: none */
    di_kv_hash *hashes;    /* owned [cap] */
    int32_t n_hashes, cap;
    int32_t n_shared; /* leading blocks that are entries of the cache, on which the sequence holds a reference each */
    int32_t last;     /* block id of entry n_shared - 1; -1: none */
} di_kv_chain;

/* An empty chain under identity and salt, with room for n_blocks hashes (0 is fine: extend grows it). Requests with
 * different salts or identities share nothing. DI_ERR_MEMORY. */
di_status di_kv_chain_init(di_kv_chain *chain, di_prefix *prefix, const uint8_t identity[16], const char *salt,
                           size_t salt_len, int64_t n_blocks, di_error *err);
void di_kv_chain_deinit(di_kv_chain *chain);
/* Makes dst, zeroed or initialised, a copy with the same progress, for a fork, which has references of its own on the
 * blocks. What dst was is gone; its room stays. On error dst is as it was. */
di_status di_kv_chain_copy(di_kv_chain *dst, const di_kv_chain *src, di_error *err);
/* Hashes every block that the first n_tokens fill and that is not hashed yet. The tokens before stay what they were,
 * but may have moved: the pointers replace those of the last call. Allocates only beyond the room of init. */
di_status di_kv_chain_extend(di_kv_chain *chain, const int32_t *tokens, const uint8_t *extra, int64_t n_tokens,
                             di_error *err);
/* Back to no shared blocks, keeping the hashes: for a sequence that gave up its blocks and starts over. */
void di_kv_chain_reset(di_kv_chain *chain);

/* ---- tiers ---------------------------------------------------------------------------------------------------------
 */

/* What of a chain is there. A border is a number of leading blocks; a state is the content of a slot as it is behind
 * the last row before a border. */
typedef struct di_kv_hit {
    int32_t n_blocks; /* leading blocks */
    int32_t n_state;  /* the largest border <= n_blocks that has a state; 0: none. n_state < n_blocks: a sequence has
                         left the known path where no state is, so this border is worth one */
    int32_t n_idle;   /* blocks of the hit that no sequence uses: whoever takes it can't have them evicted as well */
} di_kv_hit;

typedef struct di_prefix_stats {
    int64_t queries, hits;                   /* di_prefix_acquire: calls, calls with n_blocks > 0 */
    int64_t hit_blocks, hit_tokens;          /* of all hits */
    int64_t published_blocks, merged_blocks; /* new entries; blocks given back because their content was there */
    int64_t evicted_blocks, evicted_snapshots;
    int32_t blocks, idle_blocks, snapshots; /* now: entries; entries that no sequence uses; states */
} di_prefix_stats;

/* Called once when load or put is over, on the engine's thread: from the call itself or from poll. */
typedef void (*di_kv_done)(void *user, di_status status);

/* A place where contents are kept: the device's own blocks, and later the host's memory, a disk, another machine. The
 * first member of the tier's own structure. All calls come from the engine's thread. A tier keeps tokens and extra
 * bytes with each block, and a match compares them. Chain, blocks and slot stay as they are until done. */
typedef struct di_kv_store di_kv_store;
struct di_kv_store {
    const char *name;
    /* true: load and put share blocks by reference, see there; false: they copy. */
    bool is_sharing;
    /* The hit of at most n_max blocks. Changes nothing. */
    di_kv_hit (*lookup)(di_kv_store *store, const di_kv_chain *chain, int32_t n_max);
    /* Gives the first n_blocks blocks, which lookup has found, into blocks [n_blocks], and the state at border n_state
     * (0: none) into *slot. A sharing tier sets the ids and acquires a reference on each for the caller; another
     * fills the blocks and the slot that the ids name. */
    void (*load)(di_kv_store *store, di_kv_chain *chain, int32_t n_blocks, int32_t n_state, int32_t *blocks,
                 int32_t *slot, di_kv_done done, void *user);
    /* Takes blocks [n] of numbers first .. first + n - 1 and the state at border first + n in slot (-1: none). A
     * sharing tier takes a reference on each block, or replaces it by one that has its content: the caller's reference
     * goes from the one to the other; and it takes over the caller's reference on slot. */
    void (*put)(di_kv_store *store, di_kv_chain *chain, int32_t first, int32_t n, int32_t *blocks, int32_t slot,
                di_kv_done done, void *user);
    /* The first n_blocks blocks, which lookup has found, stay until unpin. */
    void (*pin)(di_kv_store *store, const di_kv_chain *chain, int32_t n_blocks);
    void (*unpin)(di_kv_store *store, const di_kv_chain *chain, int32_t n_blocks);
    /* Drops the least valuable blocks until n_blocks are dropped or nothing can be; returns how many were. */
    int32_t (*evict)(di_kv_store *store, int32_t n_blocks);
    /* Finishes what is under way; NULL: load and put are over when they return. */
    void (*poll)(di_kv_store *store);
    void (*stats)(const di_kv_store *store, di_prefix_stats *out);
};

/* ---- the prefix cache ----------------------------------------------------------------------------------------------
 */

/* Full blocks that stay after their sequence, found by content: a tree of entries under each root, one entry a block.
 * The entry of a block holds one reference of kv->blocks; sequences that use it hold one each. A sequence that holds a
 * block of a chain holds those before it, so what is below an unused entry is unused. Release is by di_kv_pool_release;
 * the cache hears of it. The first reference on a block that only the cache holds is taken by di_prefix_acquire or
 * _publish alone.
 *
 * States (window snapshots) are slots of kv->slots that the cache holds, at most snapshots_max of them. All copies and
 * forwards are ordered on one stream, so a slot or block that was evicted may be handed out at once: whoever writes it
 * next does so in a later place of the stream than the last reader.
 *
 * Value of what is kept (GreedyDual-Size-Frequency): priority = clock + frequency * cost / bytes; the clock is the
 * priority of what was evicted last, so that everything ages unless it is hit. Units of one pool have equal bytes and
 * are compared with each other alone, so the division is left out. The cost of a block is 128 rows, each weighing
 * 1 + position / context_even; that of a state is the rows from the last border before it that has one, or
 * rebuild_rows, whichever is less. Frequency is capped, so that nothing outlives its last hit by long.
 *
 * Every function takes a NULL cache as one that is always empty. Threads: one, the engine's. */
typedef struct di_prefix_options {
    int32_t snapshots_max; /* slots that states may take at once */
    int64_t rebuild_rows;  /* rows that rebuild the windows at any border */
    int64_t context_even;  /* position where attention costs a row as much as all else; 0: 65536 */
    di_kv_hash_fn hash;    /* NULL: di_kv_hash_xxh3; tests make names collide */
} di_prefix_options;

/* For the pools of kv, whose on_single it takes; both outlive it. All memory is allocated here. DI_ERR_MEMORY. */
di_status di_prefix_create(di_prefix **out, di_kv *kv, const di_prefix_options *options, di_error *err);
/* Gives all of the cache's references back. Chains are gone by then. */
void di_prefix_destroy(di_prefix *prefix);
/* Drops all blocks and states that no one else uses; counts no eviction. */
void di_prefix_reset(di_prefix *prefix);

/* The hit of at most n_max blocks; takes no reference and touches nothing. */
di_kv_hit di_prefix_peek(di_prefix *prefix, const di_kv_chain *chain, int32_t n_max);
/* The same hit (n_max caps both numbers: 0 .. (prompt - 1) / 128, less with replay), taken: blocks [n_blocks] with a
 * reference each for the caller, and *slot, the slot of the state at n_state with a reference that the caller drops as
 * soon as the copy out of it is on the stream; -1 when n_state is 0. slot NULL: the state is not wanted. The chain,
 * which shares nothing before, follows: n_shared = n_blocks. */
di_kv_hit di_prefix_acquire(di_prefix *prefix, di_kv_chain *chain, int32_t n_max, int32_t *blocks, int32_t *slot);
/* Block number chain->n_shared, hashed already, is complete in `block`, on which the caller holds a reference. Returns
 * the block to use from now on: `block`, now an entry, or another that has the same content already; then the caller's
 * reference on `block` is dropped for one on the other. Steps that are under way may still read `block`: whoever gets
 * it next writes it behind them on the stream. */
int32_t di_prefix_publish(di_prefix *prefix, di_kv_chain *chain, int32_t block);

/* A slot for a state, with one reference for the caller: a free one, or that of the least valuable state that nobody
 * is about to copy from. -1: none. Then exactly one of attach and cancel, before or after the copy is on the stream. */
int32_t di_prefix_snapshot_reserve(di_prefix *prefix);
/* Gives the slot to the entry at border (1 .. n_shared) of the chain. Where a state is already, the slot goes back. */
void di_prefix_snapshot_attach(di_prefix *prefix, const di_kv_chain *chain, int32_t border, int32_t slot);
void di_prefix_snapshot_cancel(di_prefix *prefix, int32_t slot);
/* Whether a state is at border (1 .. n_shared). */
bool di_prefix_has_snapshot(const di_prefix *prefix, const di_kv_chain *chain, int32_t border);

/* Frees n_blocks blocks, or as many as can be, least valuable first; states of evicted blocks go with them. Returns
 * how many. */
int32_t di_prefix_evict(di_prefix *prefix, int32_t n_blocks);
/* Blocks that evict could free now: the pool's free blocks and these are what can be had. */
int32_t di_prefix_idle(const di_prefix *prefix);
void di_prefix_stats_get(const di_prefix *prefix, di_prefix_stats *out); /* zeros for NULL */
/* The device tier, as other tiers see it. */
di_kv_store *di_prefix_store(di_prefix *prefix);

#endif
