/* Vocabulary: the byte map of byte-level BPE, and finding an entry by its bytes.
 *
 * The byte map gives every byte a printable character: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for themselves, the
 * other 68 bytes in increasing order are U+0100, U+0101, ... Only reading the file, looking up a spelling and the
 * Engram map need it; everything else sees bytes. */
#include "tokenizer_internal.h"

enum { FIRST_MOVED = 0x100, N_MOVED = 68 };

static bool is_own_char(uint32_t c) {
    return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

int di_byte_of_char(uint32_t c) {
    if (is_own_char(c)) {
        return (int)c;
    }
    if (c < FIRST_MOVED || c >= FIRST_MOVED + N_MOVED) {
        return -1;
    }
    /* The moved bytes are 0x00-0x20, 0x7F-0xA0 and 0xAD. */
    int k = (int)c - FIRST_MOVED;
    return k <= 0x20 ? k : k <= 0x20 + 0xA0 - 0x7F + 1 ? k - 0x21 + 0x7F : 0xAD;
}

static uint32_t char_of_byte(unsigned char b) {
    if (is_own_char(b)) {
        return b;
    }
    return FIRST_MOVED + (b <= 0x20 ? b : b <= 0xA0 ? (uint32_t)b - 0x7F + 0x21 : N_MOVED - 1);
}

void di_byte_spelling(di_strbuf *out, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char c[4];
        size_t len = di_utf8_encode(char_of_byte((unsigned char)s[i]), c);
        di_strbuf_append(out, c, len);
    }
}

bool di_byte_unmap(char *out, size_t *n_out, const char *s, size_t n) {
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        unsigned char lead = (unsigned char)s[i];
        if (lead < 0x80) {
            if (!is_own_char(lead)) {
                return false;
            }
            out[k++] = s[i++];
            continue;
        }
        /* Every other character of the map has two bytes. */
        if (lead < 0xC2 || lead > 0xDF || i + 1 == n || ((unsigned char)s[i + 1] & 0xC0) != 0x80) {
            return false;
        }
        int byte = di_byte_of_char((lead & 0x1Fu) << 6 | ((unsigned char)s[i + 1] & 0x3Fu));
        if (byte < 0) {
            return false;
        }
        out[k++] = (char)byte;
        i += 2;
    }
    *n_out = k;
    return true;
}

static uint64_t load64(const char *s) {
    uint64_t v;
    memcpy(&v, s, sizeof v);
    return v;
}

static uint32_t load32(const char *s) {
    uint32_t v;
    memcpy(&v, s, sizeof v);
    return v;
}

static uint64_t mix(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

/* Most entries have 2 to 12 bytes: whole words, the last one overlapping, instead of a loop over bytes. */
static uint64_t bytes_hash(const char *s, size_t n) {
    uint64_t h = mix(0x243F6A8885A308D3u, n);
    if (n >= 8) {
        for (size_t i = 0; i + 8 < n; i += 8) {
            h = mix(h, load64(s + i));
        }
        h = mix(h, load64(s + n - 8));
    } else if (n >= 4) {
        h = mix(h, (uint64_t)load32(s) << 32 | load32(s + n - 4));
    } else if (n > 0) {
        h = mix(h,
                (uint64_t)(unsigned char)s[0] << 16 | (uint64_t)(unsigned char)s[n / 2] << 8 | (unsigned char)s[n - 1]);
    }
    h *= 0xBF58476D1CE4E5B9u;
    return h ^ h >> 32;
}

void di_vocab_deinit(di_vocab *v) {
    free(v->blob);
    free(v->entries);
    free(v->slots);
    di_map_deinit(&v->by_text);
    *v = (di_vocab){0};
}

int32_t di_vocab_find(const di_vocab *v, const char *s, size_t n) {
    if (n == 0 || n > v->longest) {
        return -1;
    }
    uint64_t h = bytes_hash(s, n);
    uint32_t tag = (uint32_t)(h >> 32);
    for (size_t i = (size_t)h & v->mask; v->slots[i].id >= 0; i = (i + 1) & v->mask) {
        if (v->slots[i].tag == tag) {
            const di_entry *e = &v->entries[v->slots[i].id];
            if (e->len == n && memcmp(v->blob + e->at, s, n) == 0) {
                return v->slots[i].id;
            }
        }
    }
    return -1;
}

di_status di_vocab_index(di_vocab *v, di_error *err) {
    size_t cap = 16;
    while (cap < 2 * (size_t)v->n_base) {
        cap *= 2;
    }
    free(v->slots);
    v->slots = malloc(cap * sizeof *v->slots);
    if (!v->slots) {
        return di_fail(err, DI_ERR_MEMORY, "out of memory for %d entries", v->n_base);
    }
    memset(v->slots, 0xFF, cap * sizeof *v->slots); /* id -1 */
    v->mask = cap - 1;
    v->longest = 0;
    for (int32_t id = 0; id < v->n_base; id++) {
        const di_entry *e = &v->entries[id];
        if (e->flags & DI_ENTRY_LITERAL) {
            continue;
        }
        v->longest = DI_MAX(v->longest, e->len);
        int32_t other = di_vocab_find(v, v->blob + e->at, e->len);
        if (other >= 0) {
            return di_fail(err, DI_ERR_FORMAT, "ids %d and %d have the same spelling", other, id);
        }
        uint64_t h = bytes_hash(v->blob + e->at, e->len);
        size_t i = (size_t)h & v->mask;
        while (v->slots[i].id >= 0) {
            i = (i + 1) & v->mask;
        }
        v->slots[i] = (di_vocab_slot){.tag = (uint32_t)(h >> 32), .id = id};
    }
    return DI_OK;
}
