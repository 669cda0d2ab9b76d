/* Arenas: memory that is freed all at once (model, request, step), and checked size arithmetic.
 *
 * An arena is a chain of blocks; di_arena_reset keeps the blocks for reuse, so that a step that fits what earlier steps
 * took allocates nothing. Not thread-safe. */
#ifndef DI_BASE_ARENA_H
#define DI_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "deepinfer/status.h"

typedef struct di_arena_block di_arena_block;
typedef struct di_arena {
    di_arena_block *first, *current; /* owned */
    size_t block_bytes;              /* size of a new block; larger requests get their own */
    size_t total_bytes;              /* memory taken from the system */
} di_arena;

/* Zeroed storage is a valid empty arena too (64 KiB blocks). */
void di_arena_init(di_arena *arena, size_t block_bytes);
void di_arena_deinit(di_arena *arena);
void di_arena_reset(di_arena *arena);

/* n bytes aligned to 64, uninitialised; NULL when memory is short. n = 0 gives a valid pointer. */
void *di_arena_alloc(di_arena *arena, size_t n_bytes);
/* count * size bytes, zeroed; NULL on overflow or when memory is short. */
void *di_arena_calloc(di_arena *arena, size_t count, size_t size);
/* NUL-terminated copy of n bytes. */
char *di_arena_strndup(di_arena *arena, const char *s, size_t n);

/* Checked arithmetic: false on overflow, out then untouched. */
bool di_size_add(size_t *out, size_t a, size_t b);
bool di_size_mul(size_t *out, size_t a, size_t b);
bool di_size_mul3(size_t *out, size_t a, size_t b, size_t c);

#endif
