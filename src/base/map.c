/* Hash map with open addressing and linear probing, at most three quarters full.
 *
 * Keys are compared by length and bytes, so that they may hold NUL and the empty key is a key. The hash is FNV-1a with
 * a finaliser, because linear probing wants well mixed low bits. Keys come from files the user chose, not from the
 * network. */
#include "map.h"

#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "error.h"
#include "util.h"

void di_map_deinit(di_map *map) {
    free(map->entries);
    *map = (di_map){0};
}

/* The entry that holds key, or the free one where it belongs. The table has at least one free entry. */
static di_map_entry *find(di_map_entry *entries, size_t cap, const char *key, size_t len) {
    size_t i = (size_t)di_mix64(di_hash_fnv1a(key, len)) & (cap - 1);
    while (entries[i].key && (entries[i].len != len || memcmp(entries[i].key, key, len) != 0)) {
        i = (i + 1) & (cap - 1);
    }
    return &entries[i];
}

di_status di_map_reserve(di_map *map, size_t n_entries, di_error *err) {
    size_t cap = 16;
    while (cap / 4 * 3 < n_entries) {
        if (!di_size_mul(&cap, cap, 2)) {
            return di_fail(err, DI_ERR_MEMORY, "out of memory: a map of %zu entries", n_entries);
        }
    }
    if (cap <= map->cap) {
        return DI_OK;
    }
    di_map_entry *entries = calloc(cap, sizeof *entries);
    if (!entries) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory: a map of %zu entries", n_entries);
    }
    for (size_t i = 0; i < map->cap; i++) {
        if (map->entries[i].key) {
            *find(entries, cap, map->entries[i].key, map->entries[i].len) = map->entries[i];
        }
    }
    free(map->entries);
    map->entries = entries;
    map->cap = cap;
    return DI_OK;
}

di_status di_map_set(di_map *map, const char *key, size_t len, int64_t value, bool *was, di_error *err) {
    if (map->n_entries + 1 > map->cap / 4 * 3) {
        di_status st = di_map_reserve(map, map->n_entries + 1, err);
        if (st) {
            return st;
        }
    }
    di_map_entry *entry = find(map->entries, map->cap, key, len);
    if (was) {
        *was = entry->key != NULL;
    }
    if (!entry->key) {
        entry->key = key;
        entry->len = len;
        map->n_entries++;
    }
    entry->value = value;
    return DI_OK;
}

bool di_map_get(const di_map *map, const char *key, size_t len, int64_t *value) {
    if (map->cap == 0) {
        return false;
    }
    const di_map_entry *entry = find(map->entries, map->cap, key, len);
    if (!entry->key) {
        return false;
    }
    *value = entry->value;
    return true;
}
