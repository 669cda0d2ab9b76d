/* Sets of stacks (pda_internal.h): interning, unions.
 *
 * Two sets become one frame by frame: frames that go on in the same place with the same count are one frame, over the
 * union of what lies below. Sets are built on older ones only, so unions end; those that were made are remembered,
 * because stacks of many ways meet in the same sets again. A union of deep stacks goes on a stack of its own, not on
 * that of the program.
 *
 * Of frames of one counted call that may all go on, the one that was begun fewest times can do whatever the others can,
 * if what lies below is the same; the others are dropped. */
#include "pda_internal.h"

enum {
    TABLE_MIN = 64,
    FRAMES_MAX = 65536, /* of one set */
    DEPTH_MAX = 65536   /* of a union */
};

bool di_pda_reserve(di_pda_private *p, void *array, int32_t *cap, int64_t n, size_t size, bool is_learned) {
    if (n <= *cap)
        return true;
    int64_t doubled = DI_MAX(n, DI_MAX(2 * (int64_t)*cap, 32));
    if (doubled > INT32_MAX)
        return false;
    size_t *held = is_learned ? &p->learned_bytes : &p->scratch_bytes;
    if (is_learned && *held + (size_t)(doubled - *cap) * size > p->limit) {
        doubled = n + n / 8;
        if (doubled > INT32_MAX || *held + (size_t)(doubled - *cap) * size > p->limit)
            return false;
    }
    void *old, *grown;
    memcpy(&old, array, sizeof old);
    grown = realloc(old, (size_t)doubled * size);
    if (!grown)
        return false;
    memcpy(array, &grown, sizeof grown);
    *held += (size_t)(doubled - *cap) * size;
    *cap = (int32_t)doubled;
    return true;
}

void *di_pda_table_make(di_pda_private *p, int32_t cap, int32_t old_cap, size_t size) {
    size_t n_bytes = (size_t)cap * size;
    /* Both are there for a moment. */
    void *table = cap > 0 && p->learned_bytes + n_bytes <= p->limit ? malloc(n_bytes) : NULL;
    if (table)
        p->learned_bytes += n_bytes - (size_t)old_cap * size;
    return table;
}

/* ---- interning ---- */

static uint32_t hash_frames(const di_pda_frame *frames, int32_t n) {
    uint64_t h = (uint64_t)n;
    for (int32_t i = 0; i < n; i++) {
        h = (h ^ (uint32_t)frames[i].back) * 0x9E3779B97F4A7C15u;
        h = (h ^ (h >> 29) ^ ((uint64_t)(uint32_t)frames[i].count << 32 | (uint32_t)frames[i].below)) *
            0xBF58476D1CE4E5B9u;
    }
    return (uint32_t)(h ^ (h >> 32));
}

uint32_t di_pda_ids_place(const int32_t *table, int32_t cap, uint32_t hash) {
    uint32_t at = hash & (uint32_t)(cap - 1);
    while (table[at] >= 0)
        at = (at + 1) & (uint32_t)(cap - 1);
    return at;
}

bool di_pda_ids_grow(di_pda_private *p, int32_t **table, int32_t *cap, const void *items, size_t size, size_t hash_at,
                     int32_t n) {
    int32_t wanted = *cap ? 2 * *cap : TABLE_MIN;
    int32_t *fresh = di_pda_table_make(p, wanted, *cap, sizeof *fresh);
    if (!fresh)
        return false;
    memset(fresh, 0xFF, (size_t)wanted * sizeof *fresh);
    for (int32_t id = 0; id < n; id++) {
        uint32_t hash;
        memcpy(&hash, (const char *)items + (size_t)id * size + hash_at, sizeof hash);
        fresh[di_pda_ids_place(fresh, wanted, hash)] = id;
    }
    free(*table);
    *table = fresh;
    *cap = wanted;
    return true;
}

/* Frames of one site are side by side, by rising count. */
static int32_t drop_weaker(di_pda_private *p, di_pda_frame *frames, int32_t n) {
    int32_t n_kept = 0, run = 0; /* run: the first kept frame of the site that may go on */
    for (int32_t i = 0; i < n; i++) {
        bool is_kept = true;
        if (n_kept == 0 || frames[n_kept - 1].back != frames[i].back)
            run = n_kept;
        const di_auto_site *site = frames[i].back >= p->m.n_states ? &p->m.sites[frames[i].back - p->m.n_states] : NULL;
        if (site && frames[i].count >= site->min) {
            while (run < n_kept && frames[run].count < site->min)
                run++;
            for (int32_t k = run; k < n_kept && is_kept; k++)
                is_kept = frames[k].below != frames[i].below;
            p->n_work += (n_kept - run) / 16;
        }
        if (is_kept)
            frames[n_kept++] = frames[i];
    }
    return n_kept;
}

int32_t di_pda_set_intern(di_pda_private *p, di_pda_frame *frames, int32_t n) {
    p->n_work += n / 8;
    if (n > 1 && p->m.n_sites > 0)
        n = drop_weaker(p, frames, n);
    if (n > FRAMES_MAX)
        return DI_PDA_FULL;
    uint32_t hash = hash_frames(frames, n), at = 0;
    if (p->set_table_cap > 0) {
        uint32_t mask = (uint32_t)(p->set_table_cap - 1);
        for (at = hash & mask; p->set_table[at] >= 0; at = (at + 1) & mask) {
            const di_pda_set *set = &p->sets[p->set_table[at]];
            if (set->hash == hash && set->n == n &&
                memcmp(p->frames + set->first, frames, (size_t)n * sizeof *frames) == 0)
                return p->set_table[at];
        }
    }
    if (2 * (int64_t)(p->n_sets + 1) > p->set_table_cap) {
        if (!di_pda_ids_grow(p, &p->set_table, &p->set_table_cap, p->sets, sizeof *p->sets, offsetof(di_pda_set, hash),
                             p->n_sets))
            return DI_PDA_FULL;
        at = di_pda_ids_place(p->set_table, p->set_table_cap, hash);
    }
    if (!di_pda_reserve(p, &p->sets, &p->sets_cap, (int64_t)p->n_sets + 1, sizeof *p->sets, true) ||
        !di_pda_reserve(p, &p->frames, &p->frames_cap, (int64_t)p->n_frames + n, sizeof *p->frames, true))
        return DI_PDA_FULL;
    memcpy(p->frames + p->n_frames, frames, (size_t)n * sizeof *frames);
    p->sets[p->n_sets] = (di_pda_set){p->n_frames, n, hash};
    p->n_frames += n;
    p->set_table[at] = p->n_sets;
    return p->n_sets++;
}

/* ---- unions ---- */

static uint32_t hash_union(int32_t a, int32_t b) {
    return (uint32_t)di_mix64((uint64_t)(uint32_t)a << 32 | (uint32_t)b);
}

static di_pda_union *find_union(di_pda_union *table, int32_t cap, int32_t a, int32_t b) {
    uint32_t mask = (uint32_t)(cap - 1);
    for (uint32_t at = hash_union(a, b) & mask;; at = (at + 1) & mask) {
        if ((table[at].a == a && table[at].b == b) || table[at].a == table[at].b)
            return &table[at];
    }
}

static bool remember_union(di_pda_private *p, int32_t a, int32_t b, int32_t both) {
    if (2 * (int64_t)(p->n_unions + 1) > p->unions_cap) {
        int32_t cap = p->unions_cap ? 2 * p->unions_cap : TABLE_MIN;
        di_pda_union *fresh = di_pda_table_make(p, cap, p->unions_cap, sizeof *fresh);
        if (!fresh)
            return false;
        memset(fresh, 0, (size_t)cap * sizeof *fresh);
        for (int32_t i = 0; i < p->unions_cap; i++) {
            if (p->unions[i].a != p->unions[i].b)
                *find_union(fresh, cap, p->unions[i].a, p->unions[i].b) = p->unions[i];
        }
        free(p->unions);
        p->unions = fresh;
        p->unions_cap = cap;
    }
    *find_union(p->unions, p->unions_cap, a, b) = (di_pda_union){a, b, both};
    p->n_unions++;
    return true;
}

/* -1: not known. */
static int32_t known_union(const di_pda_private *p, int32_t a, int32_t b) {
    if (a == b)
        return a;
    if (p->unions_cap == 0)
        return -1;
    const di_pda_union *entry = find_union(p->unions, p->unions_cap, DI_MIN(a, b), DI_MAX(a, b));
    return entry->a != entry->b ? entry->both : -1;
}

static bool begin_union(di_pda_private *p, int32_t a, int32_t b) {
    if (p->n_merges == DEPTH_MAX ||
        !di_pda_reserve(p, &p->merges, &p->merges_cap, (int64_t)p->n_merges + 1, sizeof *p->merges, false))
        return false;
    p->merges[p->n_merges++] = (di_pda_merge){.a = DI_MIN(a, b), .b = DI_MAX(a, b), .first = p->n_merged};
    return true;
}

static int compare_places(const di_pda_frame *a, const di_pda_frame *b) {
    if (a->back != b->back)
        return a->back < b->back ? -1 : 1;
    return (a->count > b->count) - (a->count < b->count);
}

/* Takes the union on top on to the end of the two sets (true) or to frames whose lower parts are to be joined first. */
static bool go_on(di_pda_private *p, di_pda_merge *u, bool *has_failed) {
    const di_pda_set a = p->sets[u->a], b = p->sets[u->b];
    if (!di_pda_reserve(p, &p->merged, &p->merged_cap, (int64_t)p->n_merged + a.n + b.n, sizeof *p->merged, false)) {
        *has_failed = true;
        return false;
    }
    while (u->at_a < a.n || u->at_b < b.n) {
        const di_pda_frame *x = &p->frames[a.first + u->at_a], *y = &p->frames[b.first + u->at_b];
        int order = u->at_a == a.n ? 1 : u->at_b == b.n ? -1 : compare_places(x, y);
        di_pda_frame frame = order <= 0 ? *x : *y;
        if (order == 0) {
            int32_t below = known_union(p, x->below, y->below);
            if (below < 0 && x->below != y->below) {
                *has_failed = !begin_union(p, x->below, y->below);
                return false;
            }
            frame.below = below;
        }
        u->at_a += order <= 0;
        u->at_b += order >= 0;
        p->merged[p->n_merged++] = frame;
        p->n_work++;
    }
    return true;
}

int32_t di_pda_set_join(di_pda_private *p, int32_t a, int32_t b) {
    int32_t both = known_union(p, a, b);
    if (both >= 0)
        return both;
    bool has_failed = !begin_union(p, a, b), has_time = true;
    while (!has_failed && p->n_merges > 0 && (has_time = di_pda_has_time(p))) {
        di_pda_merge *u = &p->merges[p->n_merges - 1];
        if (!go_on(p, u, &has_failed))
            continue;
        both = di_pda_set_intern(p, p->merged + u->first, p->n_merged - u->first);
        has_failed = both < 0 || !remember_union(p, u->a, u->b, both);
        p->n_merged = u->first;
        p->n_merges--;
    }
    if (has_failed || !has_time)
        both = DI_PDA_FULL;
    p->n_merges = p->n_merged = 0;
    return both;
}

int32_t di_pda_set_behind(di_pda_private *p, int32_t state, int32_t set) {
    if (!(p->m.flags[state] & DI_STATE_LOOPS))
        return set;
    di_pda_set s = p->sets[set];
    int32_t at = 0;
    p->n_work += s.n / 8;
    while (at < s.n && p->frames[s.first + at].back != state)
        at++;
    if (at == s.n)
        return set;
    int32_t below = p->frames[s.first + at].below;
    if (s.n == 1)
        return below;
    if (!di_pda_reserve(p, &p->merged, &p->merged_cap, s.n, sizeof *p->merged, false))
        return DI_PDA_FULL;
    memcpy(p->merged, p->frames + s.first, (size_t)at * sizeof *p->merged);
    memcpy(p->merged + at, p->frames + s.first + at + 1, (size_t)(s.n - at - 1) * sizeof *p->merged);
    int32_t others = di_pda_set_intern(p, p->merged, s.n - 1);
    return others < 0 ? others : di_pda_set_join(p, others, below);
}
