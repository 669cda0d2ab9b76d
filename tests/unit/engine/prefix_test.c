/* The prefix cache: names against another implementation of XXH3, sharing and its refusals, order of eviction on cases
 * worked out by hand, window snapshots, the tier's table. */
#include "prefix_rig.h"

static prefix_seq a, b, c;

static di_prefix_stats stats_of(const prefix_rig *r) {
    di_prefix_stats s;
    di_prefix_stats_get(r->prefix, &s);
    return s;
}

/* ---- names --------------------------------------------------------------------------------------------------------
 */

static void assert_hash(di_kv_hash hash, const char *hex) {
    char text[33];
    for (int i = 0; i < 16; i++)
        snprintf(text + 2 * (ptrdiff_t)i, 3, "%02x", hash.bytes[i]);
    assert_string_equal(text, hex);
}

/* Names go to disks and other machines. The values are those of Python's xxhash 4.1.0 (library 0.8.4):
 * root  = xxh3_128(identity + xxh3_128(salt).digest(), seed=0), identity = bytes 0 .. 15
 * block = xxh3_128(parent + 128 little-endian ids + extra, seed=2 with extra, else 1) */
static void names_are_stable(void **state) {
    (void)state;
    uint8_t identity[16], extra[DI_KV_EXTRA_BYTES];
    int32_t ids[256];
    for (int i = 0; i < 16; i++)
        identity[i] = (uint8_t)i;
    for (int i = 0; i < DI_KV_EXTRA_BYTES; i++)
        extra[i] = (uint8_t)i;
    for (int i = 0; i < 256; i++)
        ids[i] = i;
    assert_hash(di_kv_hash_xxh3(0, identity, "", 0, NULL), "deb899abdb270ae747f8885c067ea14b");
    di_kv_hash root = di_kv_hash_xxh3(0, identity, "tenant-7", 8, NULL);
    assert_hash(root, "42ecdbed63acc8caeb39caa20ebdd560");
    di_kv_hash first = di_kv_hash_xxh3(1, root.bytes, ids, 128 * sizeof *ids, NULL);
    assert_hash(first, "9959d091c6925f042bf629ce1347ec05");
    assert_hash(di_kv_hash_xxh3(1, first.bytes, ids + 128, 128 * sizeof *ids, NULL),
                "2453417e8b62d23cf65577556f45804c");
    assert_hash(di_kv_hash_xxh3(2, first.bytes, ids + 128, 128 * sizeof *ids, extra),
                "4c5cfd7e1136ff18ce6b4998852002c7");

    /* The chain makes them, for full blocks only. */
    prefix_rig r;
    prefix_rig_open(&r, 4, 0, &(di_prefix_options){.rebuild_rows = 1000});
    di_kv_chain chain;
    di_error err = {0};
    di_test_ok(di_kv_chain_init(&chain, r.prefix, identity, "tenant-7", 8, 0, &err), &err);
    di_test_ok(di_kv_chain_extend(&chain, ids, NULL, 127, &err), &err);
    assert_int_equal(chain.n_hashes, 0);
    di_test_ok(di_kv_chain_extend(&chain, ids, NULL, 255, &err), &err);
    assert_int_equal(chain.n_hashes, 1);
    uint8_t extras[2 * DI_KV_EXTRA_BYTES] = {0}; /* zeros in the first: none */
    memcpy(extras + DI_KV_EXTRA_BYTES, extra, DI_KV_EXTRA_BYTES);
    di_test_ok(di_kv_chain_extend(&chain, ids, extras, 256, &err), &err);
    assert_int_equal(chain.n_hashes, 2);
    assert_hash(chain.hashes[0], "9959d091c6925f042bf629ce1347ec05");
    assert_hash(chain.hashes[1], "4c5cfd7e1136ff18ce6b4998852002c7");
    di_kv_chain_deinit(&chain);
    prefix_rig_close(&r);
}

/* ---- sharing ------------------------------------------------------------------------------------------------------
 */

static void a_prefix_is_found_and_shared(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 16, 0, &(di_prefix_options){.rebuild_rows = 1000});
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2, 3));
    assert_int_equal(prefix_seq_hit(&r, &a, 3, NULL).n_blocks, 0);
    while (a.n_blocks < 3)
        assert_true(prefix_seq_run(&r, &a));

    /* While the first still runs, another gets its blocks, as far as the contents agree and no further than asked. */
    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2, 4));
    di_kv_hit hit = di_prefix_peek(r.prefix, &b.chain, 3);
    assert_int_equal(hit.n_blocks, 2);
    assert_int_equal(hit.n_state, 0);
    assert_int_equal(r.kv.blocks.refs[a.blocks[0]], 2); /* the peek took nothing: the sequence and the cache */
    assert_int_equal(prefix_seq_hit(&r, &b, 3, NULL).n_blocks, 2);
    assert_int_equal(b.chain.n_shared, 2);
    assert_int_equal(b.blocks[0], a.blocks[0]);
    assert_int_equal(b.blocks[1], a.blocks[1]);
    assert_int_equal(r.kv.blocks.refs[a.blocks[0]], 3);
    assert_int_equal(r.kv.blocks.refs[a.blocks[2]], 2);
    assert_true(prefix_seq_run(&r, &b));
    assert_int_not_equal(b.blocks[2], a.blocks[2]);
    prefix_seq_open(&r, &c, PREFIX_WORDS(1, 2, 3));
    assert_int_equal(di_prefix_peek(r.prefix, &c.chain, 1).n_blocks, 1);
    assert_int_equal(di_prefix_peek(r.prefix, &c.chain, 0).n_blocks, 0);
    prefix_seq_close(&r, &c);

    /* What no sequence uses stays, and can be had. */
    assert_int_equal(di_prefix_idle(r.prefix), 0);
    prefix_seq_close(&r, &a);
    assert_int_equal(di_prefix_idle(r.prefix), 1);
    prefix_seq_close(&r, &b);
    assert_int_equal(di_prefix_idle(r.prefix), 4);
    assert_int_equal(r.kv.blocks.n_free, 12);
    assert_int_equal(prefix_request(&r, PREFIX_WORDS(1, 2, 3)), 3);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(2)), 0); /* the content of another place */

    di_prefix_stats s = stats_of(&r);
    assert_int_equal(s.queries, 3);
    assert_int_equal(s.hits, 2);
    assert_int_equal(s.hit_blocks, 5);
    assert_int_equal(s.hit_tokens, 5 * 128);
    assert_int_equal(s.published_blocks, 4);
    assert_int_equal(s.blocks, 4);
    assert_int_equal(s.idle_blocks, 4);
    di_prefix_reset(r.prefix);
    assert_int_equal(r.kv.blocks.n_free, 16);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(1)), 0);
    assert_int_equal(stats_of(&r).evicted_blocks, 0);
    prefix_rig_close(&r);
}

/* Neither salts nor identities ever share, whatever the names say. */
static void callers_of_other_salts_see_nothing(void **state) {
    (void)state;
    static const char *const salts[] = {"", "x", "xx", "y"};
    static const uint8_t other[16] = "another replay";
    for (int few = 0; few < 2; few++) {
        prefix_rig r;
        prefix_rig_open(&r, 16, 0, &(di_prefix_options){.rebuild_rows = 1000, .hash = few ? prefix_hash_of_few : NULL});
        for (size_t i = 0; i < DI_COUNT(salts); i++) {
            for (int k = 0; k < 2; k++) {
                prefix_seq_open_as(&r, &a, k ? other : prefix_identity, salts[i], PREFIX_WORDS(1, 2));
                assert_int_equal(di_prefix_peek(r.prefix, &a.chain, 2).n_blocks, 0);
                assert_int_equal(prefix_seq_hit(&r, &a, 2, NULL).n_blocks, 0);
                assert_true(prefix_seq_run(&r, &a) && prefix_seq_run(&r, &a));
                prefix_seq_close(&r, &a);
            }
        }
        for (size_t i = 0; i < DI_COUNT(salts); i++) {
            prefix_seq_open_as(&r, &a, prefix_identity, salts[i], PREFIX_WORDS(1, 2));
            assert_int_equal(prefix_seq_hit(&r, &a, 2, NULL).n_blocks, 2);
            prefix_seq_close(&r, &a);
        }
        assert_int_equal(stats_of(&r).blocks, 16);
        assert_int_equal(stats_of(&r).merged_blocks, 0);
        prefix_rig_close(&r);
    }
}

/* Images: equal ids with other extra bytes are other content, and so is all behind them. */
static void extra_bytes_are_content(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 16, 0, &(di_prefix_options){.rebuild_rows = 1000, .hash = prefix_hash_of_few});
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2, 3));
    di_error err = {0};
    while (a.n_blocks < 3)
        assert_true(prefix_seq_run(&r, &a));
    for (int image = 1; image <= 2; image++) {
        prefix_seq_open(&r, &b, PREFIX_WORDS(1));
        for (int i = 0; i < 2 * DI_PAGE_TOKENS; i++)
            b.tokens[DI_PAGE_TOKENS + i] = a.tokens[DI_PAGE_TOKENS + i];
        b.extra[DI_KV_EXTRA_BYTES] = (uint8_t)image; /* the second block has an image */
        di_test_ok(di_kv_chain_extend(&b.chain, b.tokens, b.extra, 3 * (int64_t)DI_PAGE_TOKENS, &err), &err);
        assert_int_equal(prefix_seq_hit(&r, &b, 3, NULL).n_blocks, 1);
        while (b.n_blocks < 3)
            assert_true(prefix_seq_run(&r, &b));
        prefix_seq_close(&r, &b);
    }
    assert_int_equal(stats_of(&r).blocks, 7);
    prefix_seq_close(&r, &a);
    prefix_rig_close(&r);
}

/* Two sequences that compute the same at the same time end with one copy. */
static void equal_work_is_merged(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 0, &(di_prefix_options){.rebuild_rows = 1000});
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2));
    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2));
    int32_t mine[2], others[2];
    assert_true(di_kv_pool_alloc(&r.kv.blocks, 2, mine));
    assert_true(di_kv_pool_alloc(&r.kv.blocks, 2, others));
    assert_int_equal(di_prefix_publish(r.prefix, &a.chain, mine[0]), mine[0]);
    assert_int_equal(di_prefix_publish(r.prefix, &b.chain, others[0]), mine[0]);
    assert_int_equal(r.kv.blocks.refs[mine[0]], 3);
    assert_int_equal(r.kv.blocks.refs[others[0]], 0);
    /* The second is faster with the next block, and the cache alone holds it when the first comes. */
    assert_int_equal(di_prefix_publish(r.prefix, &b.chain, others[1]), others[1]);
    b.blocks[0] = mine[0];
    b.blocks[1] = others[1];
    b.n_blocks = 2;
    prefix_seq_close(&r, &b);
    assert_int_equal(di_prefix_idle(r.prefix), 1);
    assert_int_equal(di_prefix_publish(r.prefix, &a.chain, mine[1]), others[1]);
    assert_int_equal(di_prefix_idle(r.prefix), 0);
    assert_int_equal(r.kv.blocks.refs[others[1]], 2);
    assert_int_equal(r.kv.blocks.n_free, 6);
    assert_int_equal(stats_of(&r).merged_blocks, 2);
    a.blocks[0] = mine[0];
    a.blocks[1] = others[1];
    a.n_blocks = 2;
    prefix_seq_close(&r, &a);
    prefix_rig_close(&r);
}

/* A fork publishes the very block that it shares; a sequence that lost its memory begins again. */
static void forks_and_restarts_go_on(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 0, &(di_prefix_options){.rebuild_rows = 1000});
    di_error err = {0};
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2));
    assert_true(prefix_seq_run(&r, &a));
    di_kv_chain fork;
    di_test_ok(di_kv_chain_init(&fork, r.prefix, prefix_identity, "its own", 7, 4, &err), &err);
    di_test_ok(di_kv_chain_copy(&fork, &a.chain, &err), &err);
    assert_int_equal(fork.n_shared, 1);
    assert_memory_equal(fork.hashes, a.chain.hashes, 2 * sizeof *fork.hashes);
    int32_t table[2] = {a.blocks[0], -1};
    assert_true(di_kv_pool_alloc(&r.kv.blocks, 1, &table[1]));
    di_kv_pool_acquire(&r.kv.blocks, table[0]);
    di_kv_pool_acquire(&r.kv.blocks, table[1]); /* full, shared by both before either publishes */
    assert_int_equal(di_prefix_publish(r.prefix, &a.chain, table[1]), table[1]);
    a.blocks[a.n_blocks++] = table[1];
    assert_int_equal(di_prefix_publish(r.prefix, &fork, table[1]), table[1]);
    assert_int_equal(r.kv.blocks.refs[table[1]], 3);
    assert_int_equal(fork.n_shared, 2);
    di_kv_pool_release(&r.kv.blocks, table, 2);
    di_kv_chain_deinit(&fork);

    di_kv_pool_release(&r.kv.blocks, a.blocks, a.n_blocks);
    di_kv_chain_reset(&a.chain);
    assert_int_equal(di_prefix_evict(r.prefix, 1), 1);
    assert_int_equal(prefix_seq_hit(&r, &a, 2, NULL).n_blocks, 1);
    assert_true(prefix_seq_run(&r, &a));
    assert_int_equal(a.chain.n_shared, 2);
    prefix_seq_close(&r, &a);
    prefix_rig_close(&r);
}

/* A cache that is off is one that is always empty. */
static void no_cache_is_an_empty_cache(void **state) {
    (void)state;
    di_kv_chain chain, copy = {0};
    di_error err = {0};
    int32_t ids[128] = {0}, block = 5, slot = 5;
    di_test_ok(di_kv_chain_init(&chain, NULL, prefix_identity, "s", 1, 10, &err), &err);
    di_test_ok(di_kv_chain_extend(&chain, ids, NULL, 128, &err), &err);
    di_test_ok(di_kv_chain_copy(&copy, &chain, &err), &err);
    assert_int_equal(di_prefix_peek(NULL, &chain, 1).n_blocks, 0);
    assert_int_equal(di_prefix_acquire(NULL, &chain, 1, &block, &slot).n_blocks, 0);
    assert_int_equal(slot, -1);
    assert_int_equal(di_prefix_publish(NULL, &chain, block), block);
    assert_int_equal(di_prefix_snapshot_reserve(NULL), -1);
    assert_false(di_prefix_has_snapshot(NULL, &chain, 1));
    assert_int_equal(di_prefix_evict(NULL, 1), 0);
    assert_int_equal(di_prefix_idle(NULL), 0);
    di_prefix_stats s;
    di_prefix_stats_get(NULL, &s);
    assert_int_equal(s.queries, 0);
    assert_null(di_prefix_store(NULL));
    di_prefix_reset(NULL);
    di_prefix_destroy(NULL);
    di_kv_chain_reset(&chain);
    di_kv_chain_deinit(&copy);
    di_kv_chain_deinit(&chain);

    di_prefix *p;
    di_kv kv = {0};
    assert_int_equal(di_prefix_create(&p, &kv, &(di_prefix_options){.snapshots_max = -1}, &err), DI_ERR_RANGE);
    assert_null(p);
}

/* ---- eviction -----------------------------------------------------------------------------------------------------
 */

static void only_unused_leaves_go(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 0, &(di_prefix_options){.rebuild_rows = 1000});
    prefix_request(&r, PREFIX_WORDS(1, 2, 3));
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2, 4));
    prefix_seq_hit(&r, &a, 3, NULL);
    assert_int_equal(a.n_blocks, 2);
    assert_int_equal(di_prefix_idle(r.prefix), 1);
    assert_int_equal(di_prefix_evict(r.prefix, 5), 1); /* the third of the first; the rest is in use */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(1, 2, 3)), 2);
    assert_true(prefix_seq_run(&r, &a));
    assert_int_equal(di_prefix_evict(r.prefix, 5), 0);
    prefix_seq_close(&r, &a);
    /* From the end: what is before stays of use. */
    for (int32_t n = 2; n >= 0; n--) {
        assert_int_equal(di_prefix_evict(r.prefix, 1), 1);
        assert_int_equal(prefix_peek(&r, PREFIX_WORDS(1, 2, 4)), n);
    }
    assert_int_equal(r.kv.blocks.n_free, 8);
    assert_int_equal(stats_of(&r).evicted_blocks, 4);
    prefix_rig_close(&r);
}

/* The clock stands at 0: priorities are hits * 128 * (1 + position / context_even). */
static void the_cheapest_goes_first(void **state) {
    (void)state;
    prefix_rig r;
    /* An attention that doubles a row's cost within two blocks. */
    prefix_rig_open(&r, 16, 0, &(di_prefix_options){.rebuild_rows = 1000, .context_even = 256});
    prefix_request(&r, PREFIX_WORDS(1));       /* 128 * 1 */
    prefix_request(&r, PREFIX_WORDS(2, 3, 4)); /* its leaf: 128 * 2 */
    prefix_request(&r, PREFIX_WORDS(5));       /* 128 * 3 after two hits */
    prefix_request(&r, PREFIX_WORDS(5));
    prefix_request(&r, PREFIX_WORDS(5));
    prefix_request(&r, PREFIX_WORDS(6, 7)); /* its leaf: 128 * 1.5 */
    prefix_request(&r, PREFIX_WORDS(8));    /* 128, used last */
    di_prefix_evict(r.prefix, 1);           /* 1: least, and older than 8 */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(1)), 0);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(8)), 1);
    di_prefix_evict(r.prefix, 1); /* 8 */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(8)), 0);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(6, 7)), 2);
    di_prefix_evict(r.prefix, 1); /* 7 */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(6, 7)), 1);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(2, 3, 4)), 3);
    di_prefix_evict(r.prefix, 2); /* 6, now a leaf of 128, then 4 */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(6, 7)), 0);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(2, 3, 4)), 2);
    di_prefix_evict(r.prefix, 2); /* 3 and 2 */
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(2, 3, 4)), 0);
    assert_int_equal(prefix_peek(&r, PREFIX_WORDS(5)), 1);
    assert_int_equal(di_prefix_evict(r.prefix, 3), 1);
    prefix_rig_close(&r);
}

static void of_equals_the_one_unused_for_longest_goes(void **state) {
    (void)state;
    enum { N = 11 };
    prefix_rig r;
    prefix_rig_open(&r, N, 0, &(di_prefix_options){.rebuild_rows = 1000});
    for (int32_t i = 0; i < N; i++)
        prefix_request(&r, &(int32_t){i}, 1);
    for (int32_t i = 0; i < N; i++) {
        assert_int_equal(prefix_peek(&r, &(int32_t){i}, 1), 1);
        di_prefix_evict(r.prefix, 1);
        assert_int_equal(prefix_peek(&r, &(int32_t){i}, 1), 0);
    }
    prefix_rig_close(&r);
}

/* Hits protect, but not for ever: each turnover of the rest adds the cost of one of them to the clock. */
static void what_is_not_hit_any_more_ages(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 2, 0, &(di_prefix_options){.rebuild_rows = 1000});
    for (int i = 0; i < 1000; i++)
        prefix_request(&r, PREFIX_WORDS(1));
    int n = 0;
    for (; prefix_peek(&r, PREFIX_WORDS(1)) == 1; n++) {
        assert_true(n < 100);
        prefix_request(&r, PREFIX_WORDS(100 + n));
        di_prefix_evict(r.prefix, 1);
    }
    assert_in_range(n, 8, 32); /* hits count up to 16 */
    prefix_rig_close(&r);
}

/* ---- snapshots ----------------------------------------------------------------------------------------------------
 */

static void take_snapshot(prefix_rig *r, const prefix_seq *s, int32_t border) {
    int32_t slot = di_prefix_snapshot_reserve(r->prefix);
    assert_true(slot >= 0);
    di_prefix_snapshot_attach(r->prefix, &s->chain, border, slot);
}

/* Runs words with snapshots at the given borders. */
static void request_with(prefix_rig *r, const int32_t *words, int32_t n, const int32_t *borders, int32_t n_borders) {
    prefix_seq_open(r, &c, words, n);
    prefix_seq_hit(r, &c, n, NULL);
    while (c.n_blocks < n)
        assert_true(prefix_seq_run(r, &c));
    for (int32_t i = 0; i < n_borders; i++)
        take_snapshot(r, &c, borders[i]);
    prefix_seq_close(r, &c);
}

static int32_t state_at(prefix_rig *r, const int32_t *words, int32_t n) {
    prefix_seq_open(r, &c, words, n);
    int32_t border = di_prefix_peek(r->prefix, &c.chain, n).n_state;
    prefix_seq_close(r, &c);
    return border;
}

static void a_hit_names_the_last_border_with_a_state(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 5, &(di_prefix_options){.snapshots_max = 3, .rebuild_rows = 10000});
    int32_t running[2];
    assert_true(di_kv_pool_alloc(&r.kv.slots, 2, running));
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2, 3, 4));
    while (a.n_blocks < 4)
        assert_true(prefix_seq_run(&r, &a));
    assert_false(di_prefix_has_snapshot(r.prefix, &a.chain, 2));
    take_snapshot(&r, &a, 2);
    take_snapshot(&r, &a, 4);
    assert_true(di_prefix_has_snapshot(r.prefix, &a.chain, 2));
    assert_false(di_prefix_has_snapshot(r.prefix, &a.chain, 3));
    assert_int_equal(stats_of(&r).snapshots, 2);
    take_snapshot(&r, &a, 2); /* there already: the slot goes back */
    assert_int_equal(stats_of(&r).snapshots, 2);
    assert_int_equal(r.kv.slots.n_free, 1);

    /* Sequence b leaves behind block 3, where no state is: it goes on from 2 and sees that 3 is a branch. */
    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2, 3, 9));
    int32_t slot;
    di_kv_hit hit = prefix_seq_hit(&r, &b, 4, &slot);
    assert_int_equal(hit.n_blocks, 3);
    assert_int_equal(hit.n_state, 2);
    assert_true(slot >= 0);
    assert_int_equal(r.kv.slots.refs[slot], 2);
    di_kv_pool_release(&r.kv.slots, &slot, 1);
    take_snapshot(&r, &b, 3);
    prefix_seq_close(&r, &b);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2, 3, 9)), 3);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2)), 2);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1)), 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2, 3, 4)), 4);

    /* A hit without interest in the state takes no slot. */
    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2));
    assert_int_equal(prefix_seq_hit(&r, &b, 2, NULL).n_state, 2);
    for (int32_t i = 0; i < 5; i++)
        assert_in_range(r.kv.slots.refs[i], 1, 1);
    prefix_seq_close(&r, &b);
    prefix_seq_close(&r, &a);

    /* Evicting a block takes its state along. */
    assert_int_equal(di_prefix_evict(r.prefix, 2), 2);
    assert_int_equal(stats_of(&r).evicted_snapshots, 2);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2, 3, 4)), 2);
    di_kv_pool_release(&r.kv.slots, running, 2);
    prefix_rig_close(&r);
}

static void the_state_that_costs_least_rows_goes_first(void **state) {
    (void)state;
    prefix_rig r;
    /* Windows are rebuilt by 4 blocks' rows at any border. */
    prefix_rig_open(&r, 32, 4, &(di_prefix_options){.snapshots_max = 4, .rebuild_rows = 512});
    request_with(&r, PREFIX_WORDS(1, 2, 3, 4, 5, 6, 7, 8), (int32_t[]){6}, 1); /* 512 rows, although 6 blocks */
    request_with(&r, PREFIX_WORDS(11, 12, 13, 14), (int32_t[]){1, 3}, 2);      /* 128 and 256 rows */
    request_with(&r, PREFIX_WORDS(21, 22, 23), (int32_t[]){2}, 1);             /* 256 rows, used later */
    int32_t slot = di_prefix_snapshot_reserve(r.prefix);                       /* takes the 128 */
    assert_true(slot >= 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(11, 12)), 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(11, 12, 13, 14)), 3);
    /* Without it the border 3 costs 384 rows, more than that of 21. */
    int32_t second = di_prefix_snapshot_reserve(r.prefix);
    assert_true(second >= 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(21, 22, 23)), 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(11, 12, 13, 14)), 3);
    int32_t third = di_prefix_snapshot_reserve(r.prefix);
    assert_int_equal(state_at(&r, PREFIX_WORDS(11, 12, 13, 14)), 0);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2, 3, 4, 5, 6)), 6);
    int32_t fourth = di_prefix_snapshot_reserve(r.prefix);
    assert_int_equal(state_at(&r, PREFIX_WORDS(1, 2, 3, 4, 5, 6)), 0);
    assert_int_equal(di_prefix_snapshot_reserve(r.prefix), -1); /* all are on their way */
    assert_int_equal(stats_of(&r).evicted_snapshots, 4);
    di_prefix_snapshot_cancel(r.prefix, slot);
    di_prefix_snapshot_cancel(r.prefix, second);
    di_prefix_snapshot_cancel(r.prefix, third);
    di_prefix_snapshot_cancel(r.prefix, fourth);
    assert_int_equal(r.kv.slots.n_free, 4);
    prefix_rig_close(&r);
}

/* A state that someone is about to copy from stays; one that was evicted with its block keeps its slot until then. */
static void a_state_in_use_stays(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 1, &(di_prefix_options){.snapshots_max = 1, .rebuild_rows = 10000});
    request_with(&r, PREFIX_WORDS(1), (int32_t[]){1}, 1);
    prefix_seq_open(&r, &a, PREFIX_WORDS(1));
    int32_t slot;
    assert_int_equal(prefix_seq_hit(&r, &a, 1, &slot).n_state, 1);
    assert_int_equal(di_prefix_snapshot_reserve(r.prefix), -1);
    prefix_seq_close(&r, &a);
    assert_int_equal(di_prefix_evict(r.prefix, 1), 1);
    assert_int_equal(stats_of(&r).snapshots, 0);
    assert_int_equal(r.kv.slots.refs[slot], 1);
    assert_int_equal(di_prefix_snapshot_reserve(r.prefix), -1);
    di_kv_pool_release(&r.kv.slots, &slot, 1);
    assert_int_equal(di_prefix_snapshot_reserve(r.prefix), slot);
    di_prefix_snapshot_cancel(r.prefix, slot);

    /* Released, it can go again, also when its block is in use. */
    prefix_seq_open(&r, &a, PREFIX_WORDS(1));
    assert_true(prefix_seq_run(&r, &a));
    take_snapshot(&r, &a, 1);
    assert_int_equal(di_prefix_snapshot_reserve(r.prefix), slot);
    assert_false(di_prefix_has_snapshot(r.prefix, &a.chain, 1));
    di_prefix_snapshot_attach(r.prefix, &a.chain, 1, slot);
    di_prefix_reset(r.prefix);
    assert_int_equal(stats_of(&r).snapshots, 0);
    assert_int_equal(stats_of(&r).blocks, 1); /* in use */
    prefix_seq_close(&r, &a);
    prefix_rig_close(&r);
}

/* ---- the tier's table ---------------------------------------------------------------------------------------------
 */

static void count_done(void *user, di_status status) {
    assert_int_equal(status, DI_OK);
    ++*(int *)user;
}

static void the_device_tier_keeps_its_contract(void **state) {
    (void)state;
    prefix_rig r;
    prefix_rig_open(&r, 8, 2, &(di_prefix_options){.snapshots_max = 2, .rebuild_rows = 10000});
    di_kv_store *store = di_prefix_store(r.prefix);
    assert_string_equal(store->name, "device");
    assert_true(store->is_sharing);
    assert_null(store->poll);
    int n_done = 0;
    prefix_seq_open(&r, &a, PREFIX_WORDS(1, 2, 3));
    assert_true(di_kv_pool_alloc(&r.kv.blocks, 3, a.blocks));
    a.n_blocks = 3;
    int32_t slot = di_prefix_snapshot_reserve(r.prefix);
    store->put(store, &a.chain, 0, 2, a.blocks, slot, count_done, &n_done);
    store->put(store, &a.chain, 2, 1, a.blocks + 2, -1, count_done, &n_done);
    assert_int_equal(n_done, 2);
    di_kv_hit hit = store->lookup(store, &a.chain, 3);
    assert_int_equal(hit.n_blocks, 3);
    assert_int_equal(hit.n_state, 2);

    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2, 3));
    int32_t found = -1;
    store->load(store, &b.chain, 2, 2, b.blocks, &found, count_done, &n_done);
    b.n_blocks = 2;
    assert_int_equal(n_done, 3);
    assert_int_equal(found, slot);
    di_kv_pool_release(&r.kv.slots, &found, 1);
    assert_memory_equal(a.blocks, b.blocks, 2 * sizeof *a.blocks);
    prefix_seq_close(&r, &b);
    prefix_seq_close(&r, &a);

    prefix_seq_open(&r, &b, PREFIX_WORDS(1, 2));
    store->pin(store, &b.chain, 2);
    assert_int_equal(store->evict(store, 8), 1);
    store->unpin(store, &b.chain, 2);
    assert_int_equal(store->evict(store, 1), 1);
    assert_int_equal(store->lookup(store, &b.chain, 2).n_blocks, 1);
    di_prefix_stats s;
    store->stats(store, &s);
    assert_int_equal(s.evicted_blocks, 2);
    assert_int_equal(s.blocks, 1);
    prefix_seq_close(&r, &b);
    prefix_rig_close(&r);
}

DI_TEST_GROUP(prefix, cmocka_unit_test(names_are_stable), cmocka_unit_test(a_prefix_is_found_and_shared),
              cmocka_unit_test(callers_of_other_salts_see_nothing), cmocka_unit_test(extra_bytes_are_content),
              cmocka_unit_test(equal_work_is_merged), cmocka_unit_test(forks_and_restarts_go_on),
              cmocka_unit_test(no_cache_is_an_empty_cache), cmocka_unit_test(only_unused_leaves_go),
              cmocka_unit_test(the_cheapest_goes_first), cmocka_unit_test(of_equals_the_one_unused_for_longest_goes),
              cmocka_unit_test(what_is_not_hit_any_more_ages),
              cmocka_unit_test(a_hit_names_the_last_border_with_a_state),
              cmocka_unit_test(the_state_that_costs_least_rows_goes_first), cmocka_unit_test(a_state_in_use_stays),
              cmocka_unit_test(the_device_tier_keeps_its_contract));
