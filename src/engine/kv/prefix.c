/* The prefix cache: entries by content in a hash table, a tree by parent, heaps of what could go.
 *
 *     root (identity, salt) <- entry, 128 tokens <- entry, 128 tokens     sequences use a path from the root;
 *                                     ^- entry, 128 tokens + state        below an unused entry all is unused
 *
 * A match compares content at every step from the root, so that names that collide cost time and never give foreign
 * content. Only leaves that no sequence uses are in the heap of blocks; a parent enters it with its last child gone.
 * States that nobody is about to copy from are in theirs. A use costs O(log n) for each block at most, an eviction too,
 * and nothing is allocated after create but roots. Evicting gives references back to the pools; who waits for free
 * units asks there. */
#include "prefix_internal.h"

/* The weight of many hits ends here: with it, the clock passes an entry that is not hit any more after as many
 * turnovers of the cache at most. */
enum { HITS_MAX = 16 };
enum { CONTEXT_EVEN = 65536 };

/* ---- heaps --------------------------------------------------------------------------------------------------------
 */

static bool is_before(const kv_heap *h, int32_t a, int32_t b) {
    const kv_value *x = &h->values[a], *y = &h->values[b];
    return x->priority < y->priority || (x->priority == y->priority && x->stamp < y->stamp);
}

static void heap_set(kv_heap *h, int32_t at, int32_t id) {
    h->ids[at] = id;
    h->values[id].at = at;
}

static void heap_up(kv_heap *h, int32_t at) {
    int32_t id = h->ids[at];
    while (at > 0 && is_before(h, id, h->ids[(at - 1) / 2])) {
        heap_set(h, at, h->ids[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_set(h, at, id);
}

static void heap_down(kv_heap *h, int32_t at) {
    int32_t id = h->ids[at];
    for (int32_t child; (child = 2 * at + 1) < h->n; at = child) {
        if (child + 1 < h->n && is_before(h, h->ids[child + 1], h->ids[child]))
            child++;
        if (!is_before(h, h->ids[child], id))
            break;
        heap_set(h, at, h->ids[child]);
    }
    heap_set(h, at, id);
}

static void heap_push(kv_heap *h, int32_t id) {
    DI_ASSERT(h->values[id].at < 0);
    heap_set(h, h->n, id);
    heap_up(h, h->n++);
}

/* Does nothing when id is not in the heap. */
static void heap_remove(kv_heap *h, int32_t id) {
    int32_t at = h->values[id].at;
    if (at < 0)
        return;
    h->values[id].at = -1;
    int32_t last = h->ids[--h->n];
    if (last == id)
        return;
    heap_set(h, at, last);
    heap_up(h, at);
    heap_down(h, h->values[last].at);
}

static di_status heap_init(kv_heap *h, int32_t n_units, di_error *err) {
    size_t n = (size_t)DI_MAX(n_units, 1);
    h->values = calloc(n, sizeof *h->values);
    h->ids = calloc(n, sizeof *h->ids);
    if (!h->values || !h->ids)
        return di_fail(err, DI_ERR_MEMORY, "values of %d units", n_units);
    for (int32_t i = 0; i < n_units; i++)
        h->values[i].at = -1;
    return DI_OK;
}

static void heap_deinit(kv_heap *h) {
    free(h->values);
    free(h->ids);
}

static void value_begin(kv_value *v) {
    DI_ASSERT(v->at < 0);
    v->hits = 1;
}

static void value_hit(kv_value *v) {
    if (v->hits < HITS_MAX)
        v->hits++;
}

/* The value after a use, for something that is not in the heap. */
static void value_used(di_prefix *p, kv_heap *h, int32_t id, double cost) {
    kv_value *v = &h->values[id];
    v->base = h->clock;
    v->priority = v->base + v->hits * cost;
    v->stamp = ++p->stamp;
}

/* ---- costs --------------------------------------------------------------------------------------------------------
 */

static double block_cost(const di_prefix *p, int32_t block) {
    double position = (double)p->entries[block].depth * DI_PAGE_TOKENS;
    return DI_PAGE_TOKENS * (1 + position / (double)p->options.context_even);
}

/* Rows to the border behind `block` from the nearest border before it that has a state, or from the start. */
static double state_cost(const di_prefix *p, int32_t block) {
    int64_t rows = DI_PAGE_TOKENS;
    for (int32_t e = p->entries[block].parent; e >= 0 && p->entries[e].slot < 0 && rows < p->options.rebuild_rows;
         e = p->entries[e].parent)
        rows += DI_PAGE_TOKENS;
    return (double)DI_MIN(rows, p->options.rebuild_rows);
}

/* ---- references ---------------------------------------------------------------------------------------------------
 */

/* A reference on a cached block for a sequence. */
static void hold_block(di_prefix *p, int32_t block) {
    if (p->kv->blocks.refs[block] == 1) {
        p->stats.idle_blocks--;
        heap_remove(&p->blocks, block);
    }
    di_kv_pool_acquire(&p->kv->blocks, block);
}

/* The cache's reference on a block is the only one: its last sequence is gone. */
static void on_single_block(void *user, int32_t block) {
    di_prefix *p = user;
    if (!p->entries[block].is_here)
        return;
    p->stats.idle_blocks++;
    value_used(p, &p->blocks, block, block_cost(p, block));
    if (p->entries[block].n_children == 0)
        heap_push(&p->blocks, block);
}

static void on_single_slot(void *user, int32_t slot) {
    di_prefix *p = user;
    if (p->state_owner[slot] < 0)
        return;
    value_used(p, &p->states, slot, state_cost(p, p->state_owner[slot]));
    heap_push(&p->states, slot);
}

static void drop_state(di_prefix *p, int32_t slot) {
    heap_remove(&p->states, slot);
    p->entries[p->state_owner[slot]].slot = -1;
    p->state_owner[slot] = -1;
    p->stats.snapshots--;
    di_kv_pool_release(&p->kv->slots, &slot, 1);
}

/* The least valuable state that could go; -1: none. The states before it may have gone since its value was taken, which
 * made it dearer: then it is put back by what it costs now. A cost that fell is seen at the next use. */
static int32_t least_state(di_prefix *p) {
    kv_heap *h = &p->states;
    while (h->n > 0) {
        int32_t slot = h->ids[0];
        kv_value *v = &h->values[slot];
        double priority = v->base + v->hits * state_cost(p, p->state_owner[slot]);
        if (priority <= v->priority)
            return slot;
        v->priority = priority;
        heap_down(h, 0);
    }
    return -1;
}

/* ---- entries ------------------------------------------------------------------------------------------------------
 */

static const uint8_t *extra_of(const di_kv_chain *chain, int32_t i) {
    static const uint8_t none[DI_KV_EXTRA_BYTES];
    return chain->extra ? chain->extra + (int64_t)i * DI_KV_EXTRA_BYTES : none;
}

/* The entry of block i of the chain behind the entry `parent`; -1: none. */
static int32_t find(const di_prefix *p, const di_kv_chain *chain, int32_t i, int32_t parent) {
    const di_kv_hash *hash = &chain->hashes[i];
    int32_t e = p->buckets[kv_bucket(p, hash)];
    for (; e >= 0; e = p->entries[e].next) {
        const kv_entry *x = &p->entries[e];
        if (x->parent == parent && memcmp(&x->hash, hash, sizeof *hash) == 0 &&
            (parent >= 0 || x->root == chain->root) &&
            memcmp(p->tokens + (int64_t)e * DI_PAGE_TOKENS, chain->tokens + (int64_t)i * DI_PAGE_TOKENS,
                   DI_PAGE_TOKENS * sizeof *p->tokens) == 0 &&
            memcmp(x->extra, extra_of(chain, i), DI_KV_EXTRA_BYTES) == 0)
            break;
    }
    return e;
}

static void add_entry(di_prefix *p, const di_kv_chain *chain, int32_t i, int32_t parent, int32_t block) {
    kv_entry *x = &p->entries[block];
    DI_ASSERT(!x->is_here && p->kv->blocks.refs[block] > 0);
    int32_t *bucket = &p->buckets[kv_bucket(p, &chain->hashes[i])];
    *x = (kv_entry){
        .hash = chain->hashes[i], .parent = parent, .next = *bucket, .depth = i, .slot = -1, .is_here = true};
    memcpy(x->extra, extra_of(chain, i), DI_KV_EXTRA_BYTES);
    memcpy(p->tokens + (int64_t)block * DI_PAGE_TOKENS, chain->tokens + (int64_t)i * DI_PAGE_TOKENS,
           DI_PAGE_TOKENS * sizeof *p->tokens);
    *bucket = block;
    if (parent >= 0) {
        p->entries[parent].n_children++;
    } else {
        x->root = chain->root;
        x->root->refs++;
    }
    value_begin(&p->blocks.values[block]);
    di_kv_pool_acquire(&p->kv->blocks, block);
    p->stats.blocks++;
    p->stats.published_blocks++;
}

/* Removes a leaf that is in the heap. */
static void drop_entry(di_prefix *p, int32_t block) {
    kv_entry *x = &p->entries[block];
    DI_ASSERT(x->is_here && x->n_children == 0 && p->kv->blocks.refs[block] == 1);
    heap_remove(&p->blocks, block);
    if (x->slot >= 0)
        drop_state(p, x->slot);
    int32_t *at = &p->buckets[kv_bucket(p, &x->hash)];
    while (*at != block)
        at = &p->entries[*at].next;
    *at = x->next;
    x->is_here = false;
    if (x->parent >= 0) {
        kv_entry *parent = &p->entries[x->parent];
        if (--parent->n_children == 0 && p->kv->blocks.refs[x->parent] == 1)
            heap_push(&p->blocks, x->parent);
    } else {
        di_kv_root_release(p, x->root);
    }
    p->stats.blocks--;
    p->stats.idle_blocks--;
    di_kv_pool_release(&p->kv->blocks, &block, 1);
}

/* The entry of the last of the chain's first n_blocks blocks, which must be there. */
static int32_t entry_at(const di_prefix *p, const di_kv_chain *chain, int32_t n_blocks) {
    int32_t e = -1;
    for (int32_t i = 0; i < n_blocks; i++) {
        e = find(p, chain, i, e);
        DI_ASSERT(e >= 0);
    }
    return e;
}

/* The entry before a border within what the chain shares. */
static int32_t entry_before(const di_prefix *p, const di_kv_chain *chain, int32_t border) {
    DI_ASSERT(border >= 1 && border <= chain->n_shared);
    int32_t e = chain->last;
    for (int32_t i = chain->n_shared; i > border; i--)
        e = p->entries[e].parent;
    DI_ASSERT(p->entries[e].is_here && p->entries[e].depth == border - 1);
    return e;
}

/* ---- the device tier ----------------------------------------------------------------------------------------------
 */

static di_prefix *of_store(di_kv_store *store) {
    return (di_prefix *)store; /* its first member */
}

static di_kv_hit device_lookup(di_kv_store *store, const di_kv_chain *chain, int32_t n_max) {
    const di_prefix *p = of_store(store);
    di_kv_hit hit = {0};
    int32_t n = DI_MIN(n_max, chain->n_hashes), e = -1;
    while (hit.n_blocks < n && (e = find(p, chain, hit.n_blocks, e)) >= 0) {
        hit.n_blocks++;
        hit.n_idle += p->kv->blocks.refs[e] == 1;
        if (p->entries[e].slot >= 0)
            hit.n_state = hit.n_blocks;
    }
    return hit;
}

static void device_load(di_kv_store *store, di_kv_chain *chain, int32_t n_blocks, int32_t n_state, int32_t *blocks,
                        int32_t *slot, di_kv_done done, void *user) {
    di_prefix *p = of_store(store);
    DI_ASSERT(chain->n_shared == 0);
    int32_t e = -1;
    for (int32_t i = 0; i < n_blocks; i++) {
        e = find(p, chain, i, e);
        DI_ASSERT(e >= 0);
        hold_block(p, e);
        value_hit(&p->blocks.values[e]);
        blocks[i] = e;
    }
    if (n_state > 0) {
        *slot = p->entries[blocks[n_state - 1]].slot;
        DI_ASSERT(*slot >= 0);
        heap_remove(&p->states, *slot);
        value_hit(&p->states.values[*slot]);
        di_kv_pool_acquire(&p->kv->slots, *slot);
    }
    chain->n_shared = n_blocks;
    chain->last = e;
    done(user, DI_OK);
}

static void attach(di_prefix *p, int32_t e, int32_t slot) {
    DI_ASSERT(p->n_reserved > 0 && p->state_owner[slot] < 0);
    if (p->entries[e].slot >= 0) {
        di_prefix_snapshot_cancel(p, slot);
        return;
    }
    p->n_reserved--;
    p->entries[e].slot = slot;
    p->state_owner[slot] = e;
    p->stats.snapshots++;
    value_begin(&p->states.values[slot]);
    if (p->kv->slots.refs[slot] == 1)
        on_single_slot(p, slot);
}

static int32_t put_block(di_prefix *p, di_kv_chain *chain, int32_t block) {
    int32_t i = chain->n_shared, parent = chain->last;
    DI_ASSERT(i < chain->n_hashes && (parent >= 0) == (i > 0));
    DI_ASSERT(parent < 0 || (p->entries[parent].is_here && p->entries[parent].depth == i - 1));
    int32_t e = find(p, chain, i, parent);
    if (e < 0) {
        e = block;
        add_entry(p, chain, i, parent, e);
    } else if (e != block) {
        /* The other's work is used again: a hit in all but time. */
        hold_block(p, e);
        value_hit(&p->blocks.values[e]);
        di_kv_pool_release(&p->kv->blocks, &block, 1);
        p->stats.merged_blocks++;
    }
    chain->n_shared = i + 1;
    chain->last = e;
    return e;
}

static void device_put(di_kv_store *store, di_kv_chain *chain, int32_t first, int32_t n, int32_t *blocks, int32_t slot,
                       di_kv_done done, void *user) {
    di_prefix *p = of_store(store);
    DI_ASSERT(first == chain->n_shared);
    for (int32_t i = 0; i < n; i++)
        blocks[i] = put_block(p, chain, blocks[i]);
    if (slot >= 0)
        attach(p, chain->last, slot);
    done(user, DI_OK);
}

static void device_pin(di_kv_store *store, const di_kv_chain *chain, int32_t n_blocks) {
    di_prefix *p = of_store(store);
    for (int32_t e = entry_at(p, chain, n_blocks); e >= 0; e = p->entries[e].parent)
        hold_block(p, e);
}

/* From the last to the first, as sequences release. */
static void device_unpin(di_kv_store *store, const di_kv_chain *chain, int32_t n_blocks) {
    di_prefix *p = of_store(store);
    for (int32_t e = entry_at(p, chain, n_blocks); e >= 0;) {
        int32_t parent = p->entries[e].parent;
        di_kv_pool_release(&p->kv->blocks, &e, 1);
        e = parent;
    }
}

static int32_t device_evict(di_kv_store *store, int32_t n_blocks) {
    di_prefix *p = of_store(store);
    int32_t n = 0;
    for (; n < n_blocks && p->blocks.n > 0; n++) {
        int32_t block = p->blocks.ids[0];
        p->blocks.clock = DI_MAX(p->blocks.clock, p->blocks.values[block].priority);
        p->stats.evicted_snapshots += p->entries[block].slot >= 0;
        p->stats.evicted_blocks++;
        drop_entry(p, block);
    }
    return n;
}

static void device_stats(const di_kv_store *store, di_prefix_stats *out) {
    *out = ((const di_prefix *)store)->stats;
}

/* ---- the cache ----------------------------------------------------------------------------------------------------
 */

static di_status create(di_prefix *p, di_error *err) {
    int32_t n_blocks = p->kv->blocks.n_units, n_slots = p->kv->slots.n_units;
    /* Up to one bucket a block, a power of two. */
    uint32_t n_buckets = 1;
    while (n_buckets < (uint32_t)n_blocks)
        n_buckets *= 2;
    p->bucket_mask = n_buckets - 1;
    size_t tokens_bytes;
    if (!di_size_mul3(&tokens_bytes, (size_t)DI_MAX(n_blocks, 1), DI_PAGE_TOKENS, sizeof *p->tokens))
        return di_fail(err, DI_ERR_RANGE, "prefix cache of %d blocks", n_blocks);
    p->entries = calloc((size_t)DI_MAX(n_blocks, 1), sizeof *p->entries);
    p->tokens = malloc(tokens_bytes);
    p->state_owner = malloc((size_t)DI_MAX(n_slots, 1) * sizeof *p->state_owner);
    p->buckets = malloc(n_buckets * sizeof *p->buckets);
    p->roots = calloc(n_buckets, sizeof(di_kv_root *));
    if (!p->entries || !p->tokens || !p->state_owner || !p->buckets || !p->roots)
        return di_fail(err, DI_ERR_MEMORY, "prefix cache of %d blocks", n_blocks);
    memset(p->state_owner, 0xFF, (size_t)DI_MAX(n_slots, 1) * sizeof *p->state_owner); /* -1 */
    memset(p->buckets, 0xFF, n_buckets * sizeof *p->buckets);
    di_status st = heap_init(&p->blocks, n_blocks, err);
    if (!st)
        st = heap_init(&p->states, n_slots, err);
    return st;
}

static void free_all(di_prefix *p) {
    heap_deinit(&p->blocks);
    heap_deinit(&p->states);
    free(p->entries);
    free(p->tokens);
    free(p->state_owner);
    free(p->buckets);
    free(p->roots);
    free(p);
}

di_status di_prefix_create(di_prefix **out, di_kv *kv, const di_prefix_options *options, di_error *err) {
    *out = NULL;
    if (options->snapshots_max < 0 || options->rebuild_rows < 0 || options->context_even < 0)
        return di_fail(err, DI_ERR_RANGE, "prefix cache: %d snapshots, %lld rows, context %lld: expected 0 or more",
                       options->snapshots_max, (long long)options->rebuild_rows, (long long)options->context_even);
    di_prefix *p = calloc(1, sizeof *p);
    if (!p)
        return di_fail(err, DI_ERR_MEMORY, "prefix cache");
    p->kv = kv;
    p->options = *options;
    if (p->options.context_even == 0)
        p->options.context_even = CONTEXT_EVEN;
    if (!p->options.hash)
        p->options.hash = di_kv_hash_xxh3;
    p->store = (di_kv_store){.name = "device",
                             .is_sharing = true,
                             .lookup = device_lookup,
                             .load = device_load,
                             .put = device_put,
                             .pin = device_pin,
                             .unpin = device_unpin,
                             .evict = device_evict,
                             .stats = device_stats};
    di_status st = create(p, err);
    if (st) {
        free_all(p);
        return st;
    }
    kv->blocks.on_single = on_single_block;
    kv->slots.on_single = on_single_slot;
    kv->blocks.user = kv->slots.user = p;
    *out = p;
    return DI_OK;
}

void di_prefix_destroy(di_prefix *p) {
    if (!p)
        return;
    p->kv->blocks.on_single = p->kv->slots.on_single = NULL;
    p->kv->blocks.user = p->kv->slots.user = NULL;
    for (int32_t i = 0; i < p->kv->blocks.n_units; i++) {
        kv_entry *x = &p->entries[i];
        if (!x->is_here)
            continue;
        if (x->slot >= 0)
            drop_state(p, x->slot);
        if (x->root)
            di_kv_root_release(p, x->root);
        di_kv_pool_release(&p->kv->blocks, &i, 1);
    }
    DI_ASSERT(p->n_roots == 0 && p->n_reserved == 0);
    free_all(p);
}

void di_prefix_reset(di_prefix *p) {
    if (!p)
        return;
    while (p->blocks.n > 0)
        drop_entry(p, p->blocks.ids[0]);
    while (p->states.n > 0)
        drop_state(p, p->states.ids[0]);
}

/* The device tier is done when it returns, and can't fail. */
static void at_once(void *user, di_status status) {
    DI_ASSERT(status == DI_OK);
    *(bool *)user = true;
}

di_kv_hit di_prefix_peek(di_prefix *p, const di_kv_chain *chain, int32_t n_max) {
    if (!p || !chain->root)
        return (di_kv_hit){0};
    return p->store.lookup(&p->store, chain, n_max);
}

di_kv_hit di_prefix_acquire(di_prefix *p, di_kv_chain *chain, int32_t n_max, int32_t *blocks, int32_t *slot) {
    int32_t unwanted;
    int32_t *state = slot ? slot : &unwanted;
    *state = -1;
    if (!p || !chain->root)
        return (di_kv_hit){0};
    di_kv_hit hit = p->store.lookup(&p->store, chain, n_max);
    p->stats.queries++;
    if (hit.n_blocks > 0) {
        p->stats.hits++;
        p->stats.hit_blocks += hit.n_blocks;
        p->stats.hit_tokens += (int64_t)hit.n_blocks * DI_PAGE_TOKENS;
        bool is_done = false;
        p->store.load(&p->store, chain, hit.n_blocks, slot ? hit.n_state : 0, blocks, state, at_once, &is_done);
        DI_ASSERT(is_done);
    }
    return hit;
}

int32_t di_prefix_publish(di_prefix *p, di_kv_chain *chain, int32_t block) {
    if (!p || !chain->root)
        return block;
    bool is_done = false;
    p->store.put(&p->store, chain, chain->n_shared, 1, &block, -1, at_once, &is_done);
    DI_ASSERT(is_done);
    return block;
}

int32_t di_prefix_snapshot_reserve(di_prefix *p) {
    if (!p || p->options.snapshots_max == 0)
        return -1;
    while (p->stats.snapshots + p->n_reserved >= p->options.snapshots_max || p->kv->slots.n_free == 0) {
        int32_t slot = least_state(p);
        if (slot < 0)
            return -1;
        p->states.clock = DI_MAX(p->states.clock, p->states.values[slot].priority);
        p->stats.evicted_snapshots++;
        drop_state(p, slot);
    }
    int32_t slot;
    di_kv_pool_alloc(&p->kv->slots, 1, &slot);
    p->n_reserved++;
    return slot;
}

void di_prefix_snapshot_attach(di_prefix *p, const di_kv_chain *chain, int32_t border, int32_t slot) {
    attach(p, entry_before(p, chain, border), slot);
}

void di_prefix_snapshot_cancel(di_prefix *p, int32_t slot) {
    DI_ASSERT(p->n_reserved > 0);
    p->n_reserved--;
    di_kv_pool_release(&p->kv->slots, &slot, 1);
}

bool di_prefix_has_snapshot(const di_prefix *p, const di_kv_chain *chain, int32_t border) {
    return p && chain->root && p->entries[entry_before(p, chain, border)].slot >= 0;
}

int32_t di_prefix_evict(di_prefix *p, int32_t n_blocks) {
    return p ? p->store.evict(&p->store, n_blocks) : 0;
}

int32_t di_prefix_idle(const di_prefix *p) {
    return p ? p->stats.idle_blocks : 0;
}

void di_prefix_stats_get(const di_prefix *p, di_prefix_stats *out) {
    *out = (di_prefix_stats){0};
    if (p)
        p->store.stats(&p->store, out);
}

di_kv_store *di_prefix_store(di_prefix *p) {
    return p ? &p->store : NULL;
}
