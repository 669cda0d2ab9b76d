/* Private to the automaton: the form of a grammar that pda.c runs, made by the nfa files; stacks and configurations.
 *
 * States have edges that read a byte, that read a special token, that call, and (few) that read nothing. A call puts a
 * frame on the stack and goes to an entry, whose texts are never empty; where a state accepts, its frame comes off and
 * reading goes on where the frame says. Entries are in an order in which one that reads nothing first only calls those
 * behind it, so a chain of calls ends. Every state can reach an accepting one. */
#ifndef DI_GRAMMAR_PDA_INTERNAL_H
#define DI_GRAMMAR_PDA_INTERNAL_H

#include "pda.h"

#define DI_STATE_ACCEPTS 1u
#define DI_STATE_READS 2u /* has edges of bytes or special tokens */
/* Accepting, and no other accepting state can be reached within the net: what is read from here to acceptance may be
 * repeated any number of times, so twice in a row is the same as once. */
#define DI_STATE_LOOPS 4u

/* Where the edges of a state begin; they end where those of the next state begin. */
typedef struct di_auto_state {
    int32_t bytes, specials, calls, empties;
} di_auto_state;

typedef struct di_auto_byte {
    int32_t to;
    uint8_t low, high;
} di_auto_byte;

typedef struct di_auto_special {
    int32_t special, to;
} di_auto_special;

typedef struct di_auto_call {
    int32_t entry;
    int32_t back; /* state, or n_states + site; -1: the state that follows only accepts, so no frame is needed */
} di_auto_call;

/* A counted call: `entry` min to max times, then `to`. */
typedef struct di_auto_site {
    int32_t entry, min, max, to; /* max -1: no bound */
} di_auto_site;

typedef struct di_automaton {
    di_auto_state *states; /* owned [n_states + 1] */
    uint8_t *flags;        /* owned [n_states]: DI_STATE_* */
    di_auto_byte *bytes;   /* owned, as all that follow */
    di_auto_special *specials;
    di_auto_call *calls;
    int32_t *empties;
    di_auto_site *sites;
    int32_t *entries;    /* [n_entries]: state, -1: not used */
    char *special_text;  /* spellings, one after another */
    int32_t *special_at; /* [n_specials + 1] */
    int32_t n_states, n_sites, n_entries, n_specials;
    int32_t root;       /* entry; -1: the empty text is the only one */
    bool accepts_empty; /* the root */
    size_t n_bytes;     /* held */
} di_automaton;

/* ---- stacks -------------------------------------------------------------------------------------------------------
 *
 * A set of stacks is a set of frames, each over a set of stacks of its own; equal sets have one id. Frames rise by
 * (back, count), and no two have both in common. The bottom of all stacks is a frame too. */

typedef struct di_pda_frame {
    int32_t back;  /* state, or n_states + site; -1: the bottom */
    int32_t count; /* of a site: times begun, 1 .. max, or up to max(min, 1) where there is no max; else 0 */
    int32_t below; /* set; of the bottom: -1 */
} di_pda_frame;

enum { DI_STACK_BOTTOM = 0 }; /* the set of the empty stack alone */

typedef struct di_pda_set {
    int32_t first, n; /* frames */
    uint32_t hash;
} di_pda_set;

typedef struct di_pda_union { /* sets a < b, and their union */
    int32_t a, b, both;
} di_pda_union;

typedef struct di_pda_merge { /* a union on its way */
    int32_t a, b;
    int32_t at_a, at_b; /* frames of each that are done */
    int32_t first;      /* of its frames in `merged` */
} di_pda_merge;

/* ---- configurations ---- */

typedef struct di_pda_item { /* a state over a set of stacks */
    int32_t state, stacks;
} di_pda_item;

typedef struct di_pda_key { /* a configuration: items by rising state */
    int32_t first, n;
    uint32_t hash;
    bool accepts;
} di_pda_key;

typedef struct di_pda_entering { /* what an entry is called with, while a step is worked out */
    di_pda_frame frame;          /* back -2: all frames of the set `below` */
    int32_t next;                /* of the same entry, -1: none */
} di_pda_entering;

typedef struct di_pda_private {
    di_automaton m;
    uint8_t byte_of[256]; /* by class */
    size_t limit;         /* of learned_bytes */
    size_t learned_bytes; /* what di_pda_flush gives back */
    size_t scratch_bytes; /* all else but m */
    int64_t n_work;       /* frames looked at in this step */
    int64_t work_left;    /* what may be looked at in this step and later ones */
    bool is_slow;         /* it was not enough */
    di_pda_config start;  /* DI_PDA_UNKNOWN: not worked out */

    /* Learnt; owned. */
    di_pda_frame *frames;
    di_pda_set *sets;
    int32_t *set_table;   /* ids by hash, -1: free */
    di_pda_union *unions; /* hash table; a 0 and b 0: free, as no set is joined with itself */
    di_pda_item *items;
    di_pda_key *keys; /* by configuration */
    int32_t *key_table;
    int32_t n_frames, frames_cap, n_sets, sets_cap, set_table_cap, n_unions, unions_cap, n_items, items_cap, keys_cap,
        key_table_cap, next_cap;

    /* Of a step; owned. */
    di_pda_item *reached; /* [n_reached] */
    int32_t *slot_of;     /* [n_states]: index of `reached`, -1: none */
    bool *is_waiting;     /* by index of `reached` */
    int32_t *waiting;     /* indices of `reached` */
    di_pda_entering *entering;
    int32_t *entering_of;   /* [n_entries]: first of `entering`, -1: none */
    uint64_t *entries_left; /* bits: entries with some */
    di_pda_frame *gathered;
    di_pda_frame *merged;
    di_pda_merge *merges;
    int32_t n_reached, reached_cap, is_waiting_cap, n_waiting, waiting_cap, n_entering, entering_cap, gathered_cap,
        n_merged, merged_cap, n_merges, merges_cap;
    bool accepts;
} di_pda_private;

/* Room for n elements in an array that p owns, counted in learned_bytes or else in scratch_bytes; false when memory or
 * the limit is passed. */
bool di_pda_reserve(di_pda_private *p, void *array, int32_t *cap, int64_t n, size_t size, bool is_learned);
/* A hash table of cap entries in place of one of old_cap; NULL, and nothing counted, when memory or the limit is
 * passed. The caller frees the old one. */
void *di_pda_table_make(di_pda_private *p, int32_t cap, int32_t old_cap, size_t size);
/* Such a table of ids by hash, -1: free, of which cap is a power of two with a free place at least: the first free
 * place for a hash. */
uint32_t di_pda_ids_place(const int32_t *table, int32_t cap, uint32_t hash);
/* A larger table, with ids 0 .. n - 1, whose hashes lie at hash_at in items of `size` bytes. False as di_pda_reserve.
 */
bool di_pda_ids_grow(di_pda_private *p, int32_t **table, int32_t *cap, const void *items, size_t size, size_t hash_at,
                     int32_t n);
/* Whether a step may go on: all of one takes a bounded time, and so does what di_pda_allow is called for. */
#define DI_PDA_WORK_MAX ((int64_t)1 << 20)
static inline bool di_pda_has_time(di_pda_private *p) {
    if (p->n_work <= DI_PDA_WORK_MAX && p->n_work <= p->work_left)
        return true;
    p->is_slow = true;
    return false;
}

/* pda_stack.c. Sets, or DI_PDA_FULL. */
int32_t di_pda_set_intern(di_pda_private *p, di_pda_frame *frames, int32_t n); /* may reorder and drop frames */
int32_t di_pda_set_join(di_pda_private *p, int32_t a, int32_t b);
/* The same texts, where reading goes on from `state` over the set: twice in a row is the same as once for a state that
 * loops. */
int32_t di_pda_set_behind(di_pda_private *p, int32_t state, int32_t set);

#endif
