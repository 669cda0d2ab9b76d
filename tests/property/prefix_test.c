/* The prefix cache under random traffic, against a plain model of what every block and slot holds.
 *
 * Blocks and slots have "content": the number of the path, salt and words from the start, that they were written for.
 * Whatever sequences do, each finds in its table the paths of its own words, also when names collide all the time; what
 * is cached is the set of paths that a peek finds, each once, parents included; references add up; eviction frees what
 * it says and nothing that is in use. */
#include "prefix_rig.h"

enum { SEQS = 6, DEPTH = 7, PATHS_MAX = 4096, WORDS = 3, OPS = 400 };

/* Path 0 is nothing; the paths of depth 0 have a salt's number below zero as parent. */
typedef struct path {
    int32_t parent, word;
} path;

typedef struct actor {
    prefix_seq seq;
    bool is_open;
    int32_t n;            /* blocks of its prompt */
    int32_t paths[DEPTH]; /* of its blocks */
    int32_t copying;      /* slot that it is about to copy from; -1: none */
    int32_t writing;      /* slot reserved for its state; -1: none */
} actor;

static const char *const salts[] = {"", "a", "b"};

static struct world {
    prefix_rig rig;
    di_prefix_options options;
    actor actors[SEQS];
    path paths[PATHS_MAX];
    int32_t n_paths;
    int32_t block_path[PREFIX_BLOCKS_MAX], slot_path[PREFIX_SLOTS_MAX];
} w;

static int32_t path_of(int32_t parent, int32_t word) {
    for (int32_t i = 1; i < w.n_paths; i++) {
        if (w.paths[i].parent == parent && w.paths[i].word == word)
            return i;
    }
    assert_true(w.n_paths < PATHS_MAX);
    w.paths[w.n_paths] = (path){parent, word};
    return w.n_paths++;
}

static void open_actor(actor *a, uint64_t *rng) {
    int32_t words[DEPTH], salt = (int32_t)di_test_random_range(rng, 0, DI_COUNT(salts) - 1);
    a->n = (int32_t)di_test_random_range(rng, 1, DEPTH);
    for (int32_t i = 0; i < a->n; i++) {
        words[i] = (int32_t)di_test_random_range(rng, 0, WORDS - 1);
        a->paths[i] = path_of(i > 0 ? a->paths[i - 1] : -1 - salt, words[i]);
    }
    prefix_seq_open_as(&w.rig, &a->seq, prefix_identity, salts[salt], words, a->n);
    a->is_open = true;
    a->copying = a->writing = -1;
}

static void close_actor(actor *a) {
    if (a->copying >= 0)
        di_kv_pool_release(&w.rig.kv.slots, &a->copying, 1);
    if (a->writing >= 0)
        di_prefix_snapshot_cancel(w.rig.prefix, a->writing);
    prefix_seq_close(&w.rig, &a->seq);
    a->is_open = false;
}

static void start_actor(actor *a, uint64_t *rng) {
    open_actor(a, rng);
    bool wants_state = di_test_random(rng) % 2;
    int32_t n_max = (int32_t)di_test_random_range(rng, 0, a->n), slot = -1;
    di_kv_hit peek = di_prefix_peek(w.rig.prefix, &a->seq.chain, n_max);
    di_kv_hit hit = prefix_seq_hit(&w.rig, &a->seq, n_max, wants_state ? &slot : NULL);
    assert_int_equal(hit.n_blocks, peek.n_blocks);
    assert_int_equal(hit.n_state, peek.n_state);
    assert_in_range(hit.n_blocks, 0, n_max);
    assert_in_range(hit.n_state, 0, hit.n_blocks);
    assert_int_equal(slot >= 0, wants_state && hit.n_state > 0);
    if (slot >= 0) {
        assert_int_equal(w.slot_path[slot], a->paths[hit.n_state - 1]);
        a->copying = slot;
    }
}

/* The next block, where one can be had: written, and perhaps replaced by one that was there. */
static void run_actor(actor *a) {
    int32_t i = a->seq.n_blocks, block;
    if (i == a->n)
        return;
    if (!di_kv_pool_alloc(&w.rig.kv.blocks, 1, &block)) {
        int32_t n_idle = di_prefix_idle(w.rig.prefix);
        assert_int_equal(di_prefix_evict(w.rig.prefix, 1), n_idle > 0);
        if (!di_kv_pool_alloc(&w.rig.kv.blocks, 1, &block)) {
            assert_int_equal(n_idle, 0);
            return;
        }
    }
    w.block_path[block] = a->paths[i];
    a->seq.blocks[i] = di_prefix_publish(w.rig.prefix, &a->seq.chain, block);
    a->seq.n_blocks++;
}

static void use_states(actor *a, uint64_t *rng) {
    if (a->copying >= 0) {
        di_kv_pool_release(&w.rig.kv.slots, &a->copying, 1);
        a->copying = -1;
    } else if (a->writing >= 0 && a->seq.n_blocks > 0) {
        int32_t border = (int32_t)di_test_random_range(rng, 1, a->seq.n_blocks);
        bool was_there = di_prefix_has_snapshot(w.rig.prefix, &a->seq.chain, border);
        int32_t n_free = w.rig.kv.slots.n_free;
        w.slot_path[a->writing] = a->paths[border - 1];
        di_prefix_snapshot_attach(w.rig.prefix, &a->seq.chain, border, a->writing);
        assert_true(di_prefix_has_snapshot(w.rig.prefix, &a->seq.chain, border));
        assert_int_equal(w.rig.kv.slots.n_free, n_free + was_there);
        a->writing = -1;
    } else if (a->writing < 0) {
        a->writing = di_prefix_snapshot_reserve(w.rig.prefix);
    }
}

/* ---- what must hold after every operation -------------------------------------------------------------------------
 */

static void check_pool(const di_kv_pool *pool) {
    int32_t n_used = 0;
    for (int32_t i = 0; i < pool->n_units; i++)
        n_used += pool->refs[i] > 0;
    assert_int_equal(n_used + pool->n_free, pool->n_units);
}

static void check(void) {
    const di_kv *kv = &w.rig.kv;
    int32_t holders[PREFIX_BLOCKS_MAX] = {0}, slot_holders[PREFIX_SLOTS_MAX] = {0}, n_reserved = 0;
    check_pool(&kv->blocks);
    check_pool(&kv->slots);
    for (actor *a = w.actors; a < w.actors + SEQS; a++) {
        if (!a->is_open)
            continue;
        for (int32_t i = 0; i < a->seq.n_blocks; i++) {
            assert_int_equal(w.block_path[a->seq.blocks[i]], a->paths[i]);
            holders[a->seq.blocks[i]]++;
        }
        if (a->copying >= 0)
            slot_holders[a->copying]++;
        if (a->writing >= 0) {
            slot_holders[a->writing]++;
            n_reserved++;
        }
    }
    /* What is cached has one reference more than holders. */
    static bool is_cached[PATHS_MAX];
    memset(is_cached, 0, sizeof is_cached);
    int32_t n_cached = 0, n_idle = 0, n_states = 0;
    for (int32_t i = 0; i < kv->blocks.n_units; i++) {
        int32_t more = kv->blocks.refs[i] - holders[i];
        assert_in_range(more, 0, 1);
        if (more) {
            assert_false(is_cached[w.block_path[i]]);
            is_cached[w.block_path[i]] = true;
            n_cached++;
            n_idle += holders[i] == 0;
        }
    }
    for (int32_t i = 0; i < kv->slots.n_units; i++) {
        int32_t more = kv->slots.refs[i] - slot_holders[i];
        assert_in_range(more, 0, 1);
        n_states += more;
        if (more)
            assert_true(is_cached[w.slot_path[i]]);
    }
    for (int32_t i = 1; i < w.n_paths; i++) {
        if (is_cached[i] && w.paths[i].parent > 0)
            assert_true(is_cached[w.paths[i].parent]);
    }
    di_prefix_stats s;
    di_prefix_stats_get(w.rig.prefix, &s);
    assert_int_equal(s.blocks, n_cached);
    assert_int_equal(s.idle_blocks, n_idle);
    assert_int_equal(di_prefix_idle(w.rig.prefix), n_idle);
    assert_int_equal(s.snapshots, n_states);
    assert_true(n_states + n_reserved <= w.options.snapshots_max);
    assert_int_equal(s.published_blocks - s.evicted_blocks, n_cached);
    /* A peek finds the cached paths and no more. */
    for (actor *a = w.actors; a < w.actors + SEQS; a++) {
        int32_t n = 0;
        while (a->is_open && n < a->n && is_cached[a->paths[n]])
            n++;
        if (a->is_open)
            assert_int_equal(di_prefix_peek(w.rig.prefix, &a->seq.chain, a->n).n_blocks, n);
    }
}

DI_PROPERTY(every_sequence_finds_its_own, 300) {
    uint64_t rng = seed;
    w.n_paths = 1;
    w.options = (di_prefix_options){.snapshots_max = (int32_t)di_test_random_range(&rng, 0, 8),
                                    .rebuild_rows = di_test_random_range(&rng, 0, 1000),
                                    .context_even = di_test_random_range(&rng, 1, 2000),
                                    .hash = seed % 2 ? prefix_hash_of_few : NULL};
    prefix_rig_open(&w.rig, (int32_t)di_test_random_range(&rng, 1, PREFIX_BLOCKS_MAX),
                    (int32_t)di_test_random_range(&rng, 1, PREFIX_SLOTS_MAX), &w.options);
    for (int i = 0; i < SEQS; i++)
        w.actors[i].is_open = false;
    for (int op = 0; op < OPS; op++) {
        actor *a = &w.actors[di_test_random(&rng) % SEQS];
        int64_t dice = di_test_random_range(&rng, 0, 19);
        if (!a->is_open) {
            start_actor(a, &rng);
        } else if (dice < 12) {
            run_actor(a);
        } else if (dice < 16) {
            use_states(a, &rng);
        } else if (dice < 19) {
            close_actor(a);
        } else {
            int32_t n = (int32_t)di_test_random_range(&rng, 0, 4), n_free = w.rig.kv.blocks.n_free;
            int32_t n_idle = di_prefix_idle(w.rig.prefix);
            assert_int_equal(di_prefix_evict(w.rig.prefix, n), DI_MIN(n, n_idle));
            assert_int_equal(w.rig.kv.blocks.n_free, n_free + DI_MIN(n, n_idle));
        }
        check();
    }
    for (int i = 0; i < SEQS; i++) {
        if (w.actors[i].is_open)
            close_actor(&w.actors[i]);
    }
    check();
    di_prefix_reset(w.rig.prefix);
    assert_int_equal(w.rig.kv.blocks.n_free, w.rig.kv.blocks.n_units);
    assert_int_equal(w.rig.kv.slots.n_free, w.rig.kv.slots.n_units);
    prefix_rig_close(&w.rig);
}

DI_TEST_GROUP(prefix_cache, cmocka_unit_test(every_sequence_finds_its_own));
