/* The automaton of a grammar: bytes in, sets of stacks out, made deterministic as it is used.
 *
 * A configuration is everything that the text so far leaves open. It is interned: equal ones have one id, so that a
 * transition is looked up once it is known. `next` has a row of n_classes ids for each configuration, by class of the
 * byte; what is unknown there is worked out by di_pda_step_slow. The caller holds the grammar's lock. */
#ifndef DI_GRAMMAR_PDA_H
#define DI_GRAMMAR_PDA_H

#include "ir.h"

typedef int32_t di_pda_config; /* 0 .. n_configs - 1, until the next flush */
#define DI_PDA_DEAD (-1)       /* no text of the grammar begins like this */
#define DI_PDA_FULL (-2)       /* memory is used up: flush, or give up */
#define DI_PDA_UNKNOWN (-3)    /* in `next` alone */

typedef struct di_pda {
    uint8_t class_of[256]; /* bytes of one class do the same everywhere */
    int32_t n_classes;
    int32_t *next; /* owned [n_configs, n_classes] */
    int32_t n_configs;
    uint32_t generation;            /* rises with every flush */
    struct di_pda_private *private; /* owned */
} di_pda;

/* Compiles g, whose root is set. DI_ERR_REQUEST where a rule is used and not defined or the grammar has no text at all,
 * DI_ERR_RANGE. Nothing of g is needed afterwards. */
di_status di_pda_init(di_pda *p, di_gram *g, di_error *err);
void di_pda_deinit(di_pda *p);        /* zeroed storage is fine */
size_t di_pda_bytes(const di_pda *p); /* memory that it holds */

/* DI_PDA_FULL when even that doesn't fit. */
di_pda_config di_pda_start(di_pda *p);
di_pda_config di_pda_step_slow(di_pda *p, di_pda_config c, int32_t byte_class);
/* Where a byte leads; c is a configuration, not one of the values below 0. */
static inline di_pda_config di_pda_step(di_pda *p, di_pda_config c, uint8_t byte) {
    int32_t k = p->class_of[byte];
    di_pda_config to = p->next[(size_t)c * (size_t)p->n_classes + (size_t)k];
    return to != DI_PDA_UNKNOWN ? to : di_pda_step_slow(p, c, k);
}
/* Whether the text so far is one of the grammar's. */
bool di_pda_accepts(di_pda *p, di_pda_config c);
/* SPECIAL nodes have numbers 0 .. n_specials - 1 by their spelling. */
int32_t di_pda_n_specials(const di_pda *p);
const char *di_pda_special(const di_pda *p, int32_t special, size_t *len);
/* The added token itself; DEAD where it may not come. */
di_pda_config di_pda_step_special(di_pda *p, di_pda_config c, int32_t special);
/* How many of the bytes [n] in a row c reads, any of them each time, where up to so many of them and one other byte do
 * the same as that other byte alone; 0: that doesn't hold, or doesn't show. DI_PDA_FULL. */
int32_t di_pda_run(di_pda *p, di_pda_config c, const uint8_t *bytes, int32_t n);
/* Forgets all configurations. */
void di_pda_flush(di_pda *p);
/* How much may be worked out from now on, in frames that are looked at, of which DI_PDA_WORK_SECOND take about a
 * second; without a call, any amount. What passes it is DI_PDA_FULL, and di_pda_is_slow says so until the next call. */
#define DI_PDA_WORK_SECOND ((int64_t)20 << 20)
void di_pda_allow(di_pda *p, int64_t work);
bool di_pda_is_slow(const di_pda *p);

#endif
