/* Private parts of the tokenizer, shared by the .c files of tokenizer.h.
 *
 * Entries are held as the raw bytes that they stand for, all in one blob, so that neither encoding nor decoding goes
 * through the byte map of the file. Two hash tables find an entry: by its bytes (what BPE works on), and by its
 * spelling for the few whose spelling is no byte-map text or that are added tokens. */
#ifndef DI_TOKENIZER_INTERNAL_H
#define DI_TOKENIZER_INTERNAL_H

#include <stdatomic.h>

#include "pretokenize.h"
#include "tokenizer.h"

enum {
    DI_ENTRY_SPECIAL = 1, /* added token with the special flag: dropped by a decode that skips specials */
    DI_ENTRY_ADDED = 2,   /* added token: its spelling is found in text as it is */
    DI_ENTRY_LITERAL = 4, /* spelled with characters outside the byte map: stands for its own UTF-8 */
    DI_ENTRY_UTF8 = 8,    /* its bytes are well-formed UTF-8 on their own */
};

typedef struct di_entry {
    uint32_t at, len; /* its bytes in the blob */
    uint32_t flags;
} di_entry;

/* Hash table from bytes of the blob to an entry. Open addressing, linear probing, at most half full. */
typedef struct di_vocab_slot {
    uint32_t tag; /* high half of the hash */
    int32_t id;   /* -1 = free */
} di_vocab_slot;
typedef struct di_vocab {
    char *blob; /* owned */
    size_t blob_bytes;
    di_entry *entries;    /* owned [n_entries], by id */
    int32_t n_entries;    /* added tokens included */
    int32_t n_base;       /* entries of model.vocab: ids 0 .. n_base-1 */
    di_vocab_slot *slots; /* owned [mask + 1] */
    size_t mask;
    size_t longest; /* bytes of the longest base entry */
    di_map by_text; /* spelling -> id of added tokens and literal entries; keys are in the blob */
} di_vocab;

/* One byte-map character: the byte that code point c stands for, -1 when c is outside the map. */
int di_byte_of_char(uint32_t c);
/* Appends the byte-map spelling of bytes. */
void di_byte_spelling(di_strbuf *out, const char *s, size_t n);
/* Writes the bytes that a byte-map spelling stands for to out (n bytes suffice), their number to *n_out; false when a
 * character is outside the map or s is ill-formed. */
bool di_byte_unmap(char *out, size_t *n_out, const char *s, size_t n);

void di_vocab_deinit(di_vocab *v);
/* Builds the table of base entries from blob, entries and n_base. DI_ERR_FORMAT when two entries have the same bytes.
 */
di_status di_vocab_index(di_vocab *v, di_error *err);
/* Base entry with these bytes, -1 when there is none. Literal entries are not found. */
int32_t di_vocab_find(const di_vocab *v, const char *s, size_t n);

/* Merges: pair of ids -> rank and resulting id. Open addressing, at most half full. */
typedef struct di_merge_slot {
    int32_t left, right; /* left = -1: free */
    uint32_t rank;
    int32_t result;
} di_merge_slot;
typedef struct di_merges {
    di_merge_slot *slots; /* owned [mask + 1] */
    size_t mask, n_merges;
} di_merges;

void di_merges_deinit(di_merges *m);
di_status di_merges_reserve(di_merges *m, size_t n_merges, di_error *err);
/* Adds a merge, room for it must be reserved. A pair that is listed twice keeps its last rank, as in the reference. */
void di_merges_add(di_merges *m, int32_t left, int32_t right, uint32_t rank, int32_t result);

/* Working memory of BPE for one encode call; zeroed storage is empty. */
typedef struct di_bpe_scratch {
    uint32_t *rank; /* owned [cap]: rank of the pair that starts at a symbol, UINT32_MAX for none */
    int32_t *id;    /* owned [cap] */
    int32_t *prev;  /* owned [cap] */
    int32_t *next;  /* owned [cap] */
    uint64_t *heap; /* owned [heap_cap] */
    size_t cap, heap_cap;
} di_bpe_scratch;
void di_bpe_scratch_deinit(di_bpe_scratch *s);
/* Appends the ids of one piece (n >= 1 bytes): single bytes, then the merges of lowest rank first, leftmost among
 * equals, until no pair has a rank. byte_ids are the entries of the 256 bytes. O(n log n). */
di_status di_bpe_encode(const di_merges *m, const int32_t byte_ids[256], di_bpe_scratch *s, const char *piece, size_t n,
                        di_ids *out, di_error *err);

/* One set of added tokens in the order of their spelling, for leftmost-longest search. */
typedef struct di_added {
    const char *text; /* in the blob */
    size_t len;
    int32_t id;
} di_added;
typedef struct di_added_set {
    di_added *tokens; /* owned [n], by bytes */
    size_t n, cap;
    bool starts[256]; /* first bytes that occur */
} di_added_set;

struct di_tokenizer {
    di_vocab vocab;
    di_merges merges;
    di_pretok *pretok; /* owned */
    int32_t byte_ids[256];
    di_added_set
        added[2]; /* [0] not normalized: searched first, over the whole text; [1] normalized: in what remains */
    /* Whether BPE gives a base entry back for its own bytes: it nearly always does, but the reference never takes that
     * for granted, so each entry is tried once, when it is first met. The only state that changes after opening; the
     * answer does not depend on who finds it. */
    _Atomic uint8_t *whole; /* owned [n_base]; values of di_whole */
};
enum di_whole { DI_WHOLE_UNKNOWN, DI_WHOLE_YES, DI_WHOLE_NO };

/* Reads tokenizer.json into a zeroed tokenizer: vocab, merges, pretok, byte_ids and added. On failure the caller closes
 * it. */
di_status di_tokenizer_read(di_tokenizer *tok, const char *text, size_t len, di_error *err);

/* Length of the tail of s that a stream keeps back, 0 .. 3: the beginning of a sequence whose rest may follow. */
size_t di_utf8_open_tail(const char *s, size_t n);

#endif
