/* The inside of the stop-string matcher, for the output parser, which steps it byte by byte beside its own markers.
 *
 * Owns the layout of the trie's nodes; what it means is explained in stop.c, the public part is in parser.h. */
#ifndef DI_STOP_H
#define DI_STOP_H

#include "parser.h"

struct di_stop_node {
    size_t path_at, depth; /* the path from the root: bytes[path_at .. path_at + depth) */
    size_t first_child, sibling, fail;
    size_t hit_len; /* length of the string that is complete here */
    int64_t hit;    /* its index, -1 = none */
    uint8_t byte;   /* label of the edge from the parent */
};

/* Takes one byte; returns the length of the stop string that it completes, 0 = none. Sets m->found. */
size_t di_stop_matcher_step(di_stop_matcher *m, uint8_t byte);
/* Length of the longest suffix of the text so far that is a prefix of a stop string. */
size_t di_stop_matcher_held(const di_stop_matcher *m);

#endif
