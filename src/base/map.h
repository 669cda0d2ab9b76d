/* Hash map from byte strings to 64-bit integers. Open addressing, no removal; keys are borrowed and must outlive it. */
#ifndef DI_BASE_MAP_H
#define DI_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "deepinfer/status.h"

typedef struct di_map_entry {
    const char *key; /* borrowed; NULL = free */
    size_t len;
    int64_t value;
} di_map_entry;

typedef struct di_map {
    di_map_entry *entries; /* owned */
    size_t n_entries, cap; /* cap is 0 or a power of two */
} di_map;

void di_map_deinit(di_map *map); /* zeroed storage is a valid empty map */
di_status di_map_reserve(di_map *map, size_t n_entries, di_error *err);
/* Sets key to value. *was (may be NULL) tells whether the key existed; its old value is replaced then. */
di_status di_map_set(di_map *map, const char *key, size_t len, int64_t value, bool *was, di_error *err);
/* false when absent; *value is then untouched. */
bool di_map_get(const di_map *map, const char *key, size_t len, int64_t *value);

#endif
