/* The counts of a sequence's tokens: a list in order of first appearance and a hash table of indices into it.
 *
 * Penalties visit every distinct token of a row's history, so the list is what they read; the table finds the entry of
 * a token that comes again. An entry stays when its counts fall back to zero, so that nothing is ever deleted from the
 * table: at most as many are left over as tokens were ever taken back. */
#include "sample.h"

#define SLOTS_MIN 64

void di_history_deinit(di_history *h) {
    free(h->entries);
    free(h->slots);
    *h = (di_history){0};
}

/* Where the token's index is, or the free slot where it goes. */
static size_t slot_of(const di_history *h, int32_t token) {
    size_t at = (size_t)di_mix64((uint64_t)(uint32_t)token) & (h->n_slots - 1);
    while (h->slots[at] >= 0 && h->entries[h->slots[at]].token != token)
        at = (at + 1) & (h->n_slots - 1);
    return at;
}

di_status di_history_reserve(di_history *h, size_t n, di_error *err) {
    size_t n_entries, n_slots = h->n_slots ? h->n_slots : SLOTS_MIN;
    if (!di_size_add(&n_entries, h->n, n) || n_entries > INT32_MAX)
        return di_fail(err, DI_ERR_MEMORY, "counts of %zu more tokens", n);
    if (h->n_slots && n_entries <= h->n_slots / 2)
        return DI_OK;
    while (n_slots / 2 < n_entries)
        n_slots *= 2;
    int32_t *slots = malloc(n_slots * sizeof *slots);
    di_history_entry *entries = slots ? realloc(h->entries, n_slots / 2 * sizeof *entries) : NULL;
    if (!entries) {
        free(slots);
        return di_fail(err, DI_ERR_MEMORY, "counts of %zu tokens", n_entries);
    }
    free(h->slots);
    h->slots = slots;
    h->entries = entries;
    h->n_slots = n_slots;
    memset(slots, 0xFF, n_slots * sizeof *slots);
    for (size_t i = 0; i < h->n; i++)
        slots[slot_of(h, entries[i].token)] = (int32_t)i;
    return DI_OK;
}

/* The token's entry, new where it never came; NULL when memory is short. */
static di_history_entry *entry_of(di_history *h, int32_t token, di_error *err) {
    if (2 * h->n >= h->n_slots && di_history_reserve(h, 1, err))
        return NULL;
    size_t at = slot_of(h, token);
    if (h->slots[at] < 0) {
        h->entries[h->n] = (di_history_entry){.token = token};
        h->slots[at] = (int32_t)h->n++;
    }
    return &h->entries[h->slots[at]];
}

di_status di_history_add_prompt(di_history *h, const int32_t *tokens, size_t n, di_error *err) {
    for (size_t i = 0; i < n; i++) {
        di_history_entry *e = entry_of(h, tokens[i], err);
        if (!e)
            return DI_ERR_MEMORY;
        e->is_in_prompt = true;
    }
    return DI_OK;
}

di_status di_history_add_output(di_history *h, const int32_t *tokens, size_t n, di_error *err) {
    for (size_t i = 0; i < n; i++) {
        di_history_entry *e = entry_of(h, tokens[i], err);
        if (!e)
            return DI_ERR_MEMORY;
        e->n_output++;
    }
    return DI_OK;
}

/* The token's entry; NULL when it never came. */
static di_history_entry *find(const di_history *h, int32_t token) {
    if (!h->entries)
        return NULL;
    int32_t i = h->slots[slot_of(h, token)];
    return i < 0 ? NULL : &h->entries[i];
}

const di_history_entry *di_history_find(const di_history *h, int32_t token) {
    return find(h, token);
}

void di_history_step_back(di_history *h, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++) {
        di_history_entry *e = find(h, tokens[i]);
        DI_ASSERT(e && e->n_output > 0);
        e->n_output--;
    }
}

di_status di_history_copy(di_history *to, const di_history *from, di_error *err) {
    di_history copy = {0};
    di_status st = di_history_reserve(&copy, from->n, err);
    if (st)
        return st;
    DI_ASSERT(copy.entries && copy.slots);
    for (size_t i = 0; i < from->n; i++) {
        copy.entries[i] = from->entries[i];
        copy.slots[slot_of(&copy, copy.entries[i].token)] = (int32_t)i;
        copy.n = i + 1;
    }
    di_history_deinit(to);
    *to = copy;
    return DI_OK;
}
