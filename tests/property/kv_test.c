/* The unit pool under random operations: free and used units always add up, and no unit is ever in two places.
 *
 * A round is a random sequence of allocations, further references and releases, checked against a plain model of who
 * holds what. The seed of a round is in the message of a failure. */
#include "engine/kv/kv.h"
#include "harness.h"

enum { UNITS_MAX = 40, HOLDERS = 12 };

typedef struct holder {
    int32_t ids[UNITS_MAX];
    int32_t n;
} holder;

static uint64_t rng_state;
static uint64_t rng(void) {
    return di_mix64(rng_state += 0x9E3779B97F4A7C15u);
}

static void check(const di_kv_pool *pool, const holder *holders, uint64_t round) {
    int32_t refs[UNITS_MAX] = {0}, n_used = 0;
    for (int h = 0; h < HOLDERS; h++) {
        for (int32_t i = 0; i < holders[h].n; i++)
            refs[holders[h].ids[i]]++;
    }
    for (int32_t i = 0; i < pool->n_units; i++) {
        if (refs[i] != pool->refs[i])
            fail_msg("round %llu: unit %d", (unsigned long long)round, i);
        n_used += refs[i] > 0;
    }
    if (di_kv_pool_used(pool) != n_used || pool->n_free + n_used != pool->n_units)
        fail_msg("round %llu: %d free and %d used of %d", (unsigned long long)round, pool->n_free, n_used,
                 pool->n_units);
    /* The free list holds every free unit once. */
    int32_t n_listed = 0;
    bool seen[UNITS_MAX] = {false};
    for (int32_t id = pool->head; id >= 0; id = pool->next[id]) {
        if (seen[id] || refs[id] > 0)
            fail_msg("round %llu: unit %d in the free list", (unsigned long long)round, id);
        seen[id] = true;
        n_listed++;
    }
    assert_int_equal(n_listed, pool->n_free);
}

static void used_and_free_add_up(void **state) {
    (void)state;
    for (uint64_t round = 0; round < 300; round++) {
        rng_state = round;
        di_kv_pool pool;
        int32_t n_units = 1 + (int32_t)(rng() % UNITS_MAX);
        assert_int_equal(di_kv_pool_init(&pool, n_units, NULL), DI_OK);
        holder holders[HOLDERS] = {0};
        for (int op = 0; op < 200; op++) {
            holder *h = &holders[rng() % HOLDERS];
            if (h->n > 0 && rng() % 2) {
                di_kv_pool_release(&pool, h->ids, h->n);
                h->n = 0;
            } else if (h->n == 0 && rng() % 4 == 0) {
                /* Share all that another one holds. */
                const holder *other = &holders[rng() % HOLDERS];
                for (int32_t i = 0; i < other->n; i++)
                    di_kv_pool_acquire(&pool, other->ids[i]);
                *h = *other;
            } else if (h->n == 0) {
                int32_t n = (int32_t)(rng() % (uint64_t)(n_units + 2));
                int32_t n_free = pool.n_free;
                bool done = di_kv_pool_alloc(&pool, n, h->ids);
                assert_int_equal(done, n <= n_free); /* all or nothing */
                if (done)
                    h->n = n;
            }
            check(&pool, holders, round);
        }
        for (int i = 0; i < HOLDERS; i++)
            di_kv_pool_release(&pool, holders[i].ids, holders[i].n);
        assert_int_equal(pool.n_free, n_units);
        di_kv_pool_deinit(&pool);
    }
}

static void given_back_last_is_reused_last(void **state) {
    (void)state;
    di_kv_pool pool;
    assert_int_equal(di_kv_pool_init(&pool, 4, NULL), DI_OK);
    int32_t ids[4], again[4];
    assert_true(di_kv_pool_alloc(&pool, 4, ids));
    assert_false(di_kv_pool_alloc(&pool, 1, again));
    di_kv_pool_release(&pool, &ids[2], 1);
    di_kv_pool_release(&pool, &ids[0], 1);
    assert_true(di_kv_pool_alloc(&pool, 2, again));
    assert_int_equal(again[0], ids[2]);
    assert_int_equal(again[1], ids[0]);
    di_kv_pool_deinit(&pool);
}

DI_TEST_GROUP(kv_pool, cmocka_unit_test(used_and_free_add_up), cmocka_unit_test(given_back_last_is_reused_last));
