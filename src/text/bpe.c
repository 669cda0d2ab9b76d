/* Byte-pair encoding of one piece, and the table of merges.
 *
 * The reference merges the adjacent pair of lowest rank, leftmost among equals, until no pair has a rank. Short pieces
 * are done by scanning for the minimum. Long ones use a linked list of symbols and a heap of (rank, position):
 *
 *   heap item  = rank << 32 | position of the left symbol      smallest first: rank, then position
 *   stale item = its rank is not rank[position] any more       a symbol only ever grows, so a pair never comes back
 *
 * so a run of a million letters costs n log n and gives what the plain loop gives. */
#include "tokenizer_internal.h"

enum { SCAN_MAX = 48 }; /* up to here the quadratic scan is faster than the heap */

#define NO_RANK UINT32_MAX

void di_merges_deinit(di_merges *m) {
    free(m->slots);
    *m = (di_merges){0};
}

static size_t pair_hash(int32_t left, int32_t right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    return (size_t)(h ^ h >> 32);
}

di_status di_merges_reserve(di_merges *m, size_t n_merges, di_error *err) {
    size_t cap = 16;
    while (cap < 2 * n_merges) {
        cap *= 2;
    }
    di_merge_slot *slots = malloc(cap * sizeof *slots);
    if (!slots) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for %zu merges", n_merges);
    }
    for (size_t i = 0; i < cap; i++) {
        slots[i].left = -1;
    }
    free(m->slots);
    *m = (di_merges){.slots = slots, .mask = cap - 1};
    return DI_OK;
}

void di_merges_add(di_merges *m, int32_t left, int32_t right, uint32_t rank, int32_t result) {
    size_t i = pair_hash(left, right) & m->mask;
    while (m->slots[i].left >= 0 && (m->slots[i].left != left || m->slots[i].right != right)) {
        i = (i + 1) & m->mask;
    }
    m->n_merges += m->slots[i].left < 0;
    DI_ASSERT(m->n_merges <= (m->mask + 1) / 2);
    m->slots[i] = (di_merge_slot){.left = left, .right = right, .rank = rank, .result = result};
}

static uint32_t merge_rank(const di_merges *m, int32_t left, int32_t right, int32_t *result) {
    for (size_t i = pair_hash(left, right) & m->mask; m->slots[i].left >= 0; i = (i + 1) & m->mask) {
        if (m->slots[i].left == left && m->slots[i].right == right) {
            *result = m->slots[i].result;
            return m->slots[i].rank;
        }
    }
    return NO_RANK;
}

void di_bpe_scratch_deinit(di_bpe_scratch *s) {
    free(s->rank);
    free(s->id);
    free(s->prev);
    free(s->next);
    free(s->heap);
    *s = (di_bpe_scratch){0};
}

static di_status encode_short(const di_merges *m, const int32_t byte_ids[256], const char *piece, size_t n, di_ids *out,
                              di_error *err) {
    int32_t id[SCAN_MAX], result[SCAN_MAX];
    uint32_t rank[SCAN_MAX];
    for (size_t i = 0; i < n; i++) {
        id[i] = byte_ids[(unsigned char)piece[i]];
    }
    for (size_t i = 0; i + 1 < n; i++) {
        rank[i] = merge_rank(m, id[i], id[i + 1], &result[i]);
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            best = rank[i] < rank[best] ? i : best;
        }
        if (rank[best] == NO_RANK) {
            break;
        }
        id[best] = result[best];
        n--;
        memmove(&id[best + 1], &id[best + 2], (n - best - 1) * sizeof id[0]);
        if (best + 1 < n) {
            /* Pair best+1 is gone; the pairs after it move down, and pair best has a new left and right. */
            memmove(&rank[best + 1], &rank[best + 2], (n - best - 2) * sizeof rank[0]);
            memmove(&result[best + 1], &result[best + 2], (n - best - 2) * sizeof result[0]);
            rank[best] = merge_rank(m, id[best], id[best + 1], &result[best]);
        }
        if (best > 0) {
            rank[best - 1] = merge_rank(m, id[best - 1], id[best], &result[best - 1]);
        }
    }
    return di_ids_append(out, id, n, err);
}

static bool scratch_reserve(di_bpe_scratch *s, size_t n) {
    if (n <= s->cap) {
        return true;
    }
    di_bpe_scratch_deinit(s);
    /* Every merge of two symbols adds at most two pairs, and there are at most n - 1 merges. */
    s->rank = malloc(n * sizeof *s->rank);
    s->id = malloc(n * sizeof *s->id);
    s->prev = malloc(n * sizeof *s->prev);
    s->next = malloc(n * sizeof *s->next);
    s->heap = malloc(3 * n * sizeof *s->heap);
    if (!s->rank || !s->id || !s->prev || !s->next || !s->heap) {
        di_bpe_scratch_deinit(s);
        return false;
    }
    s->cap = n;
    s->heap_cap = 3 * n;
    return true;
}

/* A heap with four children a node: as few cache lines a level as with two, half the levels. */
static void heap_down(uint64_t *heap, size_t n, size_t i) {
    uint64_t item = heap[i];
    for (;;) {
        size_t child = 4 * i + 1;
        if (child >= n) {
            break;
        }
        size_t last = child + 4 < n ? child + 4 : n;
        size_t best = child;
        for (size_t k = child + 1; k < last; k++) {
            best = heap[k] < heap[best] ? k : best;
        }
        if (heap[best] >= item) {
            break;
        }
        heap[i] = heap[best];
        i = best;
    }
    heap[i] = item;
}

static void heap_up(uint64_t *heap, size_t i) {
    uint64_t item = heap[i];
    while (i > 0) {
        size_t parent = (i - 1) / 4;
        if (heap[parent] <= item) {
            break;
        }
        heap[i] = heap[parent];
        i = parent;
    }
    heap[i] = item;
}

static di_status encode_long(const di_merges *m, const int32_t byte_ids[256], di_bpe_scratch *s, const char *piece,
                             size_t n, di_ids *out, di_error *err) {
    if (!scratch_reserve(s, n)) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for a piece of %zu bytes", n);
    }
    int32_t result = -1;
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        s->id[i] = byte_ids[(unsigned char)piece[i]];
        s->prev[i] = (int32_t)i - 1;
        s->next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i < n; i++) {
        s->rank[i] = i + 1 < n ? merge_rank(m, s->id[i], s->id[i + 1], &result) : NO_RANK;
        if (s->rank[i] != NO_RANK) {
            s->heap[n_heap++] = (uint64_t)s->rank[i] << 32 | i;
        }
    }
    for (size_t i = n_heap / 4 + 1; i-- > 0;) {
        if (i < n_heap) {
            heap_down(s->heap, n_heap, i);
        }
    }
    while (n_heap > 0) {
        uint64_t item = s->heap[0];
        size_t left = (uint32_t)item;
        s->heap[0] = s->heap[--n_heap];
        if (n_heap > 1) {
            heap_down(s->heap, n_heap, 0);
        }
        if (s->rank[left] != (uint32_t)(item >> 32)) {
            continue;
        }
        int32_t right = s->next[left];
        merge_rank(m, s->id[left], s->id[right], &result);
        s->id[left] = result;
        s->next[left] = s->next[right];
        s->rank[right] = NO_RANK; /* it is part of left now */
        if (s->next[left] >= 0) {
            s->prev[s->next[left]] = (int32_t)left;
        }
        size_t changed[2] = {left, s->prev[left] >= 0 ? (size_t)s->prev[left] : left};
        for (int k = 0; k < 2; k++) {
            size_t i = changed[k];
            if (k == 1 && i == left) {
                break;
            }
            s->rank[i] = s->next[i] >= 0 ? merge_rank(m, s->id[i], s->id[s->next[i]], &result) : NO_RANK;
            if (s->rank[i] != NO_RANK) {
                DI_ASSERT(n_heap < s->heap_cap);
                s->heap[n_heap] = (uint64_t)s->rank[i] << 32 | i;
                heap_up(s->heap, n_heap++);
            }
        }
    }
    size_t n_ids = 0;
    for (int32_t i = 0; i >= 0; i = s->next[i]) {
        s->id[n_ids++] = s->id[i]; /* never overtakes the list: n_ids <= i */
    }
    return di_ids_append(out, s->id, n_ids, err);
}

di_status di_bpe_encode(const di_merges *m, const int32_t byte_ids[256], di_bpe_scratch *s, const char *piece, size_t n,
                        di_ids *out, di_error *err) {
    if (n <= SCAN_MAX) {
        return encode_short(m, byte_ids, piece, n, out, err);
    }
    return encode_long(m, byte_ids, s, piece, n, out, err);
}
