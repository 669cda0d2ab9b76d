/* What grammar.c, vocab.c, mask.c and matcher.c share: the compiled grammar, vocabularies as tries, masks.
 *
 * A mask is found by walking a trie of the vocabulary along the automaton: a node whose path leads to a dead end is
 * left out with all that is below it. Where nearly everything may come, as inside a string, that would visit the whole
 * trie. So there are slices: sets of characters of which a configuration may take any, each with the same outcome. Of
 * tokens that consist of such characters alone the mask is known beforehand, by their number of characters; the others
 * are such characters and a rest, and many tokens have the same rest, so that the tries of rests are small. */
#ifndef DI_GRAMMAR_INTERNAL_H
#define DI_GRAMMAR_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "pda.h"

/* ---- vocabulary (vocab.c) ---- */

/* Nodes lie depth first: below node i are i + 1 .. end - 1, and its tokens are tokens[node.tokens ..
 * node[i + 1].tokens - 1]. */
typedef struct di_trie_node {
    uint32_t end;
    uint32_t tokens;
    uint16_t depth; /* bytes before this node's */
    uint8_t byte;
    bool is_boundary; /* no continuation byte follows, so that a character ends here if the token is well-formed */
} di_trie_node;

/* Several tries one behind another: group k has the nodes first[k] .. first[k + 1] - 1. */
typedef struct di_trie {
    di_trie_node *nodes; /* owned [n_nodes + 1]; the last has the end of tokens alone */
    int32_t *tokens;     /* owned [n_tokens] */
    uint32_t *first;     /* owned [n_groups + 1] */
    uint32_t n_nodes, n_tokens;
    int32_t n_groups;
} di_trie;

/* A node near the root with all that lies below. Children of a large one have such records too, side by side, so that
 * those that don't come cost no look at nodes far apart. */
typedef struct di_trie_root {
    uint32_t first, end;
    int32_t kids, n_kids; /* among `roots`; n_kids 0: none are recorded */
    uint8_t byte;
} di_trie_root;

/* The slices, larger ones first. */
typedef enum di_slice_kind {
    DI_SLICE_TEXT,   /* all characters but '<', with which the model's own marks begin */
    DI_SLICE_STRING, /* what a JSON string holds as it is: all but controls, '"' and '\\' */
    DI_SLICE_ASCII,  /* of these the ASCII ones */
    DI_SLICE_NAME,   /* A-Z, a-z, 0-9, '_', '-' */
    DI_SLICE_WORD,   /* A-Z, a-z, 0-9, '_' */
    DI_SLICE_ALNUM,  /* A-Z, a-z, 0-9 */
    DI_SLICE_LETTER, /* A-Z, a-z */
    DI_SLICE_LOWNUM, /* a-z, 0-9 */
    DI_SLICE_LOWER,  /* a-z */
    DI_SLICE_UPPER,  /* A-Z */
    DI_SLICE_HEX,    /* 0-9, A-F, a-f */
    DI_SLICE_LOWHEX, /* 0-9, a-f */
    DI_SLICE_DIGIT,  /* 0-9 */
    DI_SLICE_COUNT
} di_slice_kind;

/* Whether code is a character of the slice. Slices hold all code points from 80 hex on, or none. */
bool di_slice_has(di_slice_kind kind, uint32_t code);
static inline bool di_slice_is_wide(di_slice_kind kind) {
    return kind == DI_SLICE_TEXT || kind == DI_SLICE_STRING;
}

enum { DI_SLICE_CHARS = 16 }; /* leading characters of a token that are told apart by number */

/* A token is k characters of the slice and a rest that doesn't begin with one. */
typedef struct di_slice {
    /* Rests by k; the last group has those of tokens with more than DI_SLICE_CHARS, from there on. Group 0 of a slice
     * that is not wide is left empty: it would repeat what the vocabulary's trie has below other first bytes. */
    di_trie by_count; /* [DI_SLICE_CHARS + 1] */
    di_trie merged;   /* [1]: rests of all tokens, of narrow slices those with k > 0 */
    /* Tokens without a rest of at most k + 1 characters, the last of any number; owned [DI_SLICE_CHARS + 1, n_words] */
    uint32_t *whole;
    int32_t n_whole[DI_SLICE_CHARS + 1]; /* tokens of each */
    uint32_t root_nodes; /* of the vocabulary's trie, from first bytes of the slice's ASCII characters on */
    /* Of wide slices: by token of the vocabulary's trie, the byte from which on it is whole characters of the slice
     * (its length where its last one is none); owned [trie.n_tokens] */
    uint16_t *clean_from;
} di_slice;

struct di_grammar_vocab {
    uint64_t key; /* random: tells vocabularies apart also when one lies where another was */
    int32_t n_vocab, eos_id;
    size_t n_words;
    uint32_t length_max; /* bytes of the longest token */
    uint32_t *starts;    /* owned [n_vocab + 1]: token t has the bytes starts[t] .. starts[t + 1] - 1 */
    char *bytes;         /* owned */
    uint32_t *is_added;  /* owned [n_words] bits; added tokens come only where the grammar names them */
    di_trie trie;        /* the others, those without bytes left out */
    uint64_t *below;     /* owned [trie.n_nodes]: bits of the bytes that occur below a node (di_byte_bit) */
    di_trie_root *roots; /* owned [n_roots] of depth 0, then those of their children */
    int32_t n_roots;
    di_slice slices[DI_SLICE_COUNT];
};

/* Bits that tell what a part of the trie has: letters and the space have one each, digits and signs share ten; what a
 * JSON string doesn't hold as it is has DI_ODD_BIT, as has a token that is ill-formed UTF-8. Well-formed characters
 * beyond ASCII have none. */
#define DI_ODD_BIT ((uint64_t)1 << 63)
static inline uint64_t di_byte_bit(uint8_t byte) {
    if (byte >= 0x80)
        return 0;
    if (byte < 0x20 || byte == '"' || byte == '\\')
        return DI_ODD_BIT;
    return (uint64_t)1 << (byte >= 'a' && byte <= 'z'   ? byte - 'a'
                           : byte >= 'A' && byte <= 'Z' ? 26 + byte - 'A'
                           : byte == ' '                ? 52
                                                        : 53 + byte % 10);
}

/* One token of a vocabulary, borrowed. */
typedef struct di_vocab_token {
    const char *bytes;
    size_t len;
    bool is_added;
} di_vocab_token;

/* As di_grammar_vocab_create; tokens [n]. */
di_status di_grammar_vocab_make(di_grammar_vocab **out, const di_vocab_token *tokens, int32_t n, int32_t n_vocab,
                                int32_t eos_id, di_error *err);

static inline bool di_mask_has(const uint32_t *mask, int32_t token) {
    return mask[token / 32] >> (token % 32) & 1;
}
static inline void di_mask_set(uint32_t *mask, int32_t token) {
    mask[token / 32] |= (uint32_t)1 << (token % 32);
}
static inline void di_mask_clear(uint32_t *mask, int32_t token) {
    mask[token / 32] &= ~((uint32_t)1 << (token % 32));
}

/* ---- masks (mask.c) ---- */

/* A kept mask: a list of ids, maybe beside the whole tokens of a slice; or, where the list would be long, the words. */
typedef struct di_mask_entry {
    di_pda_config config;
    int32_t n_set;        /* tokens that are set */
    int32_t only;         /* the token if it is one, else -1 */
    int32_t newer, older; /* neighbours in order of use; -1 at the ends */
    int32_t n_ids;        /* -1: data has the words */
    int16_t slice, chars; /* the whole tokens of at most chars + 1 characters; slice -1: none */
    void *data;           /* owned: int32_t [n_ids] or uint32_t [n_words] */
} di_mask_entry;

/* The masks of one grammar for one vocabulary, by configuration. */
typedef struct di_mask_cache {
    uint64_t vocab_key;
    size_t n_words;
    di_mask_entry *entries; /* owned [n_entries] */
    int32_t n_entries, entries_cap;
    int32_t newest, oldest; /* -1: none */
    int32_t free;           /* chain through `newer` */
    int32_t *slot_of;       /* owned [n_slots], by configuration; -1: none */
    int32_t n_slots;
    int32_t *special_tokens; /* owned [n_specials]: the added token, -1: the vocabulary has none */
    di_pda_config *stack;    /* owned [2, length_max + 2] */
    int32_t *spaces;         /* owned [length_max + 2]: of a run, read since the configuration of the stack */
    int32_t *ids;            /* owned [ids_max]: of the mask that is made */
    /* By class of a byte: nodes of the trie from such a first byte on; and from such a second byte behind a space. */
    uint32_t weight[256], space_weight[256];
    int32_t ids_max;
    size_t bytes; /* that it holds */
    struct di_mask_cache *next;
} di_mask_cache;

/* Where any character of each slice leads: a configuration, DI_PDA_DEAD, or this, where not all lead to the same. */
enum { DI_NOT_UNIFORM = -4 };
typedef struct di_config_info {
    di_pda_config after[DI_SLICE_COUNT]; /* DI_PDA_UNKNOWN: not looked at yet */
    int32_t spaces; /* di_pda_run of all the characters of JSON's white space alike; -1: not looked at yet */
} di_config_info;

/* One byte of each class that a range of bytes has. */
typedef struct di_byte_set {
    uint8_t n;
    uint8_t bytes[128];
} di_byte_set;

enum { DI_LEADS = 8, DI_TAILS = 5 }; /* ranges of first bytes of two or more, and of second bytes */

typedef struct di_mask_tables {
    uint8_t byte_of[256];              /* by class: one of its bytes */
    di_byte_set ascii[DI_SLICE_COUNT]; /* of the slice's ASCII characters */
    di_byte_set leads[DI_LEADS], tails[DI_TAILS];
} di_mask_tables;

/* ---- compiled grammars (grammar.c) ---- */

struct di_grammar {
    _Atomic int32_t n_refs;
    pthread_mutex_t lock;
    di_pda pda;            /* lock: lock, as all below but what is read-only */
    size_t base_bytes;     /* of the automaton before it learnt; read-only */
    size_t memory_bytes;   /* that it may learn; read-only */
    di_mask_tables tables; /* read-only */
    di_config_info *infos; /* owned [n_infos], by configuration */
    int32_t n_infos;
    di_mask_cache *caches; /* owned, by last use */
};

/* The second half of a compilation: gram has rules and a root. */
di_status di_grammar_make(di_grammar **out, di_gram *gram, di_error *err);

/* All with the lock held. */

/* Forgets configurations and what is known of them. */
void di_grammar_flush(di_grammar *g);
/* Whether what was learnt passes the limit even without masks, which are given up first. */
bool di_grammar_is_full(di_grammar *g);

void di_mask_tables_init(di_mask_tables *tables, const di_pda *p);
/* The masks for a vocabulary, made empty when there are none. */
di_status di_mask_cache_get(di_mask_cache **out, di_grammar *g, const di_grammar_vocab *v, di_error *err);
void di_mask_caches_destroy(di_grammar *g);
/* Forgets all masks, and where the characters of slices lead. */
void di_mask_forget(di_grammar *g);
/* Gives up masks, oldest first, until at most `bytes` are held by all. */
void di_mask_caches_shrink(di_grammar *g, size_t bytes);
size_t di_mask_caches_bytes(const di_grammar *g);
/* The mask of c: n_words words, how many tokens it has, and the token where it is one (else -1). False: memory is full.
 */
bool di_mask_find(di_grammar *g, di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c, uint32_t *mask,
                  int32_t *n_set, int32_t *only);
/* Whether c takes more than one token: by its mask where that is there, else by tokens of one byte. False if it doesn't
 * show, or memory is full. */
bool di_mask_is_open(di_grammar *g, const di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c);
/* Where a token leads, which is not the end mark. */
di_pda_config di_mask_step(di_grammar *g, const di_mask_cache *cache, const di_grammar_vocab *v, di_pda_config c,
                           int32_t token);

#endif
