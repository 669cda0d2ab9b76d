/* Names of contents: the hash, roots, and the chain of a sequence's blocks.
 *
 * A chain costs one hash of half a kilobyte for each full block, once. Roots are interned, so that comparing two salts
 * later is comparing two pointers; they live as long as a chain or a cached block begins at them. This file is the only
 * one that calls xxhash. */
#include <xxhash.h>

#include "prefix_internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token ids are hashed as they lie in memory");

enum { CHAIN_BLOCKS_MIN = 16 };

di_kv_hash di_kv_hash_xxh3(int kind, const uint8_t head[16], const void *data, size_t n_bytes, const uint8_t *extra) {
    uint8_t text[16 + DI_PAGE_TOKENS * sizeof(int32_t) + DI_KV_EXTRA_BYTES];
    XXH128_canonical_t digest;
    size_t n = 16;
    memcpy(text, head, n);
    if (n_bytes == DI_PAGE_TOKENS * sizeof(int32_t) && kind != 0) {
        memcpy(text + n, data, n_bytes);
        n += n_bytes;
    } else {
        /* A salt has any length: its own hash stands for it. */
        XXH128_canonicalFromHash(&digest, XXH3_128bits(data, n_bytes));
        memcpy(text + n, digest.digest, sizeof digest.digest);
        n += sizeof digest.digest;
    }
    if (extra) {
        memcpy(text + n, extra, DI_KV_EXTRA_BYTES);
        n += DI_KV_EXTRA_BYTES;
    }
    XXH128_canonicalFromHash(&digest, XXH3_128bits_withSeed(text, n, (XXH64_hash_t)kind));
    di_kv_hash hash;
    memcpy(hash.bytes, digest.digest, sizeof hash.bytes);
    return hash;
}

/* ---- roots --------------------------------------------------------------------------------------------------------
 */

di_status di_kv_root_acquire(di_prefix *p, const uint8_t identity[16], const char *salt, size_t salt_len,
                             di_kv_root **out, di_error *err) {
    const char *text = salt_len > 0 ? salt : "";
    di_kv_hash hash = p->options.hash(0, identity, text, salt_len, NULL);
    di_kv_root **bucket = &p->roots[kv_bucket(p, &hash)];
    for (di_kv_root *root = *bucket; root; root = root->next) {
        if (memcmp(root->identity, identity, sizeof root->identity) == 0 && root->salt_len == salt_len &&
            (salt_len == 0 || memcmp(root->salt, text, salt_len) == 0)) {
            root->refs++;
            *out = root;
            return DI_OK;
        }
    }
    di_kv_root *root = calloc(1, sizeof *root);
    char *copy = salt_len > 0 ? malloc(salt_len) : NULL;
    if (!root || (salt_len > 0 && !copy)) {
        free(root);
        free(copy);
        return di_fail(err, DI_ERR_MEMORY, "cache salt of %zu bytes", salt_len);
    }
    if (copy)
        memcpy(copy, text, salt_len);
    *root = (di_kv_root){.hash = hash, .salt = copy, .salt_len = salt_len, .refs = 1, .next = *bucket};
    memcpy(root->identity, identity, sizeof root->identity);
    *bucket = root;
    p->n_roots++;
    *out = root;
    return DI_OK;
}

void di_kv_root_release(di_prefix *p, di_kv_root *root) {
    DI_ASSERT(root->refs > 0);
    if (--root->refs > 0)
        return;
    di_kv_root **at = &p->roots[kv_bucket(p, &root->hash)];
    while (*at != root)
        at = &(*at)->next;
    *at = root->next;
    free(root->salt);
    free(root);
    p->n_roots--;
}

/* ---- chains -------------------------------------------------------------------------------------------------------
 */

/* Room for n hashes. */
static di_status reserve(di_kv_chain *chain, int64_t n, di_error *err) {
    if (n <= chain->cap)
        return DI_OK;
    size_t bytes;
    if (n > INT32_MAX || !di_size_mul(&bytes, (size_t)n, sizeof *chain->hashes))
        return di_fail(err, DI_ERR_RANGE, "hashes of %lld blocks", (long long)n);
    di_kv_hash *hashes = realloc(chain->hashes, bytes);
    if (!hashes)
        return di_fail(err, DI_ERR_MEMORY, "hashes of %lld blocks", (long long)n);
    chain->hashes = hashes;
    chain->cap = (int32_t)n;
    return DI_OK;
}

di_status di_kv_chain_init(di_kv_chain *chain, di_prefix *prefix, const uint8_t identity[16], const char *salt,
                           size_t salt_len, int64_t n_blocks, di_error *err) {
    *chain = (di_kv_chain){.last = -1};
    if (!prefix)
        return DI_OK;
    di_status st = reserve(chain, n_blocks, err);
    if (!st)
        st = di_kv_root_acquire(prefix, identity, salt, salt_len, &chain->root, err);
    if (st) {
        free(chain->hashes);
        *chain = (di_kv_chain){.last = -1};
        return st;
    }
    chain->prefix = prefix;
    return DI_OK;
}

void di_kv_chain_deinit(di_kv_chain *chain) {
    if (chain->root)
        di_kv_root_release(chain->prefix, chain->root);
    free(chain->hashes);
    *chain = (di_kv_chain){.last = -1};
}

di_status di_kv_chain_copy(di_kv_chain *dst, const di_kv_chain *src, di_error *err) {
    di_status st = reserve(dst, src->n_hashes, err);
    if (st)
        return st;
    if (src->root)
        src->root->refs++;
    if (dst->root)
        di_kv_root_release(dst->prefix, dst->root);
    di_kv_hash *hashes = dst->hashes;
    int32_t cap = dst->cap;
    if (hashes && src->n_hashes > 0)
        memcpy(hashes, src->hashes, (size_t)src->n_hashes * sizeof *hashes);
    *dst = *src;
    dst->hashes = hashes;
    dst->cap = cap;
    return DI_OK;
}

static bool is_zero(const uint8_t *extra) {
    static const uint8_t none[DI_KV_EXTRA_BYTES];
    return memcmp(extra, none, sizeof none) == 0;
}

di_status di_kv_chain_extend(di_kv_chain *chain, const int32_t *tokens, const uint8_t *extra, int64_t n_tokens,
                             di_error *err) {
    if (!chain->root)
        return DI_OK;
    int64_t n = n_tokens / DI_PAGE_TOKENS;
    if (n > chain->cap) {
        di_status st = reserve(chain, DI_MAX(n, DI_MAX(2 * (int64_t)chain->cap, CHAIN_BLOCKS_MIN)), err);
        if (st)
            return st;
    }
    chain->tokens = tokens;
    chain->extra = extra;
    for (int64_t i = chain->n_hashes; i < n; i++) {
        const di_kv_hash *parent = i > 0 ? &chain->hashes[i - 1] : &chain->root->hash;
        const uint8_t *more = extra ? extra + i * DI_KV_EXTRA_BYTES : NULL;
        if (more && is_zero(more))
            more = NULL;
        chain->hashes[i] = chain->prefix->options.hash(more ? 2 : 1, parent->bytes, tokens + i * DI_PAGE_TOKENS,
                                                       DI_PAGE_TOKENS * sizeof *tokens, more);
        chain->n_hashes = (int32_t)i + 1;
    }
    return DI_OK;
}

void di_kv_chain_reset(di_kv_chain *chain) {
    chain->n_shared = 0;
    chain->last = -1;
}
