/* Arenas and checked size arithmetic.
 *
 * Blocks form a list in the order in which they were taken; `current` is the one being filled and the ones behind it
 * are empty. A request that does not fit goes to the next block that is large enough, and a new block is put right
 * behind the current one, so that a step that repeats finds the same blocks in the same order. */
#include "arena.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { ALIGN_BYTES = 64, DEFAULT_BLOCK_BYTES = 64 * 1024 };

struct di_arena_block {
    di_arena_block *next; /* owned by the arena */
    size_t cap, used;     /* bytes behind the header, which is itself padded to ALIGN_BYTES */
};

enum { HEADER_BYTES = (sizeof(di_arena_block) + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES };

bool di_size_add(size_t *out, size_t a, size_t b) {
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

bool di_size_mul(size_t *out, size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

bool di_size_mul3(size_t *out, size_t a, size_t b, size_t c) {
    size_t product;
    if (!di_size_mul(&product, a, b) || !di_size_mul(&product, product, c)) {
        return false;
    }
    *out = product;
    return true;
}

void di_arena_init(di_arena *arena, size_t block_bytes) {
    *arena = (di_arena){.block_bytes = block_bytes};
}

void di_arena_deinit(di_arena *arena) {
    for (di_arena_block *block = arena->first; block;) {
        di_arena_block *next = block->next;
        free(block);
        block = next;
    }
    *arena = (di_arena){.block_bytes = arena->block_bytes};
}

void di_arena_reset(di_arena *arena) {
    for (di_arena_block *block = arena->first; block; block = block->next) {
        block->used = 0;
    }
    arena->current = arena->first;
}

/* A new block of at least n_bytes behind the current one; NULL when memory is short. */
static di_arena_block *add_block(di_arena *arena, size_t n_bytes) {
    size_t cap = arena->block_bytes ? arena->block_bytes : DEFAULT_BLOCK_BYTES;
    if (cap < n_bytes) {
        cap = n_bytes;
    }
    size_t total;
    if (!di_size_add(&cap, cap, ALIGN_BYTES - 1)) {
        return NULL;
    }
    cap -= cap % ALIGN_BYTES;
    if (!di_size_add(&total, cap, HEADER_BYTES)) {
        return NULL;
    }
    di_arena_block *block = aligned_alloc(ALIGN_BYTES, total);
    if (!block) {
        return NULL;
    }
    block->cap = cap;
    block->used = 0;
    if (arena->current) {
        block->next = arena->current->next;
        arena->current->next = block;
    } else {
        block->next = arena->first;
        arena->first = block;
    }
    arena->total_bytes += total;
    return block;
}

void *di_arena_alloc(di_arena *arena, size_t n_bytes) {
    size_t size;
    if (!di_size_add(&size, n_bytes ? n_bytes : 1, ALIGN_BYTES - 1)) {
        return NULL;
    }
    size -= size % ALIGN_BYTES;
    di_arena_block *block = arena->current ? arena->current : arena->first;
    while (block && block->cap - block->used < size) {
        block = block->next;
    }
    if (!block) {
        block = add_block(arena, size);
        if (!block) {
            return NULL;
        }
    }
    arena->current = block;
    void *p = (char *)block + HEADER_BYTES + block->used;
    block->used += size;
    return p;
}

void *di_arena_calloc(di_arena *arena, size_t count, size_t size) {
    size_t n_bytes;
    if (!di_size_mul(&n_bytes, count, size)) {
        return NULL;
    }
    void *p = di_arena_alloc(arena, n_bytes);
    if (p) {
        memset(p, 0, n_bytes);
    }
    return p;
}

char *di_arena_strndup(di_arena *arena, const char *s, size_t n) {
    size_t n_bytes;
    if (!di_size_add(&n_bytes, n, 1)) {
        return NULL;
    }
    char *copy = di_arena_alloc(arena, n_bytes);
    if (copy) {
        if (n) {
            memcpy(copy, s, n);
        }
        copy[n] = '\0';
    }
    return copy;
}
