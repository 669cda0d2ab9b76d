/* Edges of text (nfa.h): one code point of a class as bytes of UTF-8; any text up to the first end, or without some
 * words.
 *
 * A class is cut along the blocks of UTF-8: the code points that begin with the same bytes. A block that is wholly in
 * the class goes to a state shared by all such blocks of its length, one that is partly in it gets a state of its own,
 * so the edges of a state never overlap.
 *
 * Until and free are the product of an Aho-Corasick automaton of their words, which finds the first end in one pass,
 * and of the few states of a decoder of UTF-8, which lets well-formed text through alone. */
#include "nfa.h"

/* ---- classes ---- */

enum { LEAVES = 16 }; /* states of one continuation byte that are looked up again */

typedef struct class_writer {
    di_nfa *a;
    const di_code_range *ranges;
    int32_t n, at;     /* ranges before `at` lie before the block at hand */
    uint32_t code_min; /* the least code point of the length at hand */
    int32_t to;
    int32_t full[4]; /* state that reads so many continuation bytes; 0: not made (state 0 is the root's start) */
    uint64_t leaf_bits[LEAVES];
    int32_t leaf_states[LEAVES], n_leaves;
} class_writer;

static int32_t full_state(class_writer *w, int32_t n_more) {
    if (n_more == 0)
        return w->to;
    if (w->full[n_more] == 0) {
        int32_t next = full_state(w, n_more - 1);
        w->full[n_more] = di_nfa_state_add(w->a);
        di_nfa_byte(w->a, w->full[n_more], 0x80, 0xBF, next);
    }
    return w->full[n_more];
}

/* A state for the continuation bytes of a set. */
static int32_t leaf_state(class_writer *w, uint64_t bits) {
    int32_t n = DI_MIN(w->n_leaves, (int32_t)LEAVES);
    for (int32_t i = 0; i < n; i++) {
        if (w->leaf_bits[i] == bits)
            return w->leaf_states[i];
    }
    int32_t state = di_nfa_state_add(w->a), slot = w->n_leaves++ % LEAVES;
    w->leaf_bits[slot] = bits;
    w->leaf_states[slot] = state;
    for (int32_t low = 0; low < 64; low++) {
        if (!(bits >> low & 1))
            continue;
        int32_t high = low;
        while (high < 63 && bits >> (high + 1) & 1)
            high++;
        di_nfa_byte(w->a, state, 0x80 + low, 0x80 + high, w->to);
        low = high;
    }
    return state;
}

/* The code points first .. first + 63 of the class, as bits. */
static uint64_t leaf_bits(const class_writer *w, uint32_t first) {
    uint64_t bits = 0;
    for (int32_t i = w->at; i < w->n && w->ranges[i].first <= first + 63; i++) {
        uint32_t low = DI_MAX(DI_MAX(w->ranges[i].first, w->code_min), first);
        uint32_t high = DI_MIN(w->ranges[i].last, first + 63);
        if (low <= high)
            bits |= (UINT64_MAX >> (63 - (high - low))) << (low - first);
    }
    return bits;
}

/* Edges of bytes byte .. byte + n - 1, each the block of 64^n_more code points behind that of the byte before. */
static void write_blocks(class_writer *w, int32_t from, int32_t n_more, uint32_t code, int32_t byte, int32_t n) {
    uint32_t size = 1u << (6 * n_more);
    int32_t run = -1; /* the first of the whole blocks just before k */
    for (int32_t k = 0; k <= n; k++) {
        uint32_t low = code + (uint32_t)k * size, high = low + size - 1, first = UINT32_MAX;
        while (w->at < w->n && w->ranges[w->at].last < low)
            w->at++;
        if (k < n && w->at < w->n)
            first = DI_MAX(w->ranges[w->at].first, w->code_min);
        if (first <= low && w->ranges[w->at].last >= high) {
            run = run < 0 ? k : run;
            continue;
        }
        if (run >= 0)
            di_nfa_byte(w->a, from, byte + run, byte + k - 1, full_state(w, n_more));
        run = -1;
        if (first > high)
            continue;
        if (n_more == 1) {
            uint64_t bits = leaf_bits(w, low);
            if (bits)
                di_nfa_byte(w->a, from, byte + k, byte + k, leaf_state(w, bits));
        } else {
            int32_t block = di_nfa_state_add(w->a);
            di_nfa_byte(w->a, from, byte + k, byte + k, block);
            write_blocks(w, block, n_more - 1, low, 0x80, 64);
        }
    }
}

void di_nfa_class(di_nfa *a, const di_node *node, int32_t from, int32_t to) {
    class_writer w = {.a = a, .ranges = node->ranges, .n = node->n, .to = to};
    for (int32_t i = 0; i < node->n && node->ranges[i].first < 0x80; i++)
        di_nfa_byte(a, from, (int32_t)node->ranges[i].first, (int32_t)DI_MIN(node->ranges[i].last, 0x7Fu), to);
    uint32_t last = node->ranges[node->n - 1].last;
    if (last >= 0x80) {
        w.code_min = 0x80;
        write_blocks(&w, from, 1, 0x80, 0xC2, 30);
    }
    if (last >= 0x800) {
        w.code_min = 0x800;
        write_blocks(&w, from, 2, 0, 0xE0, 16);
    }
    if (last >= 0x10000) {
        w.code_min = 0x10000;
        write_blocks(&w, from, 3, 0, 0xF0, 5);
    }
}

/* ---- words that are looked for ---- */

/* A prefix of a word: a state of the search. */
typedef struct word_state {
    int32_t child, sibling, fallback; /* child -1, sibling -1: none */
    int32_t moves, n_moves;           /* bytes that lead elsewhere than to the empty prefix, by rising byte */
    uint8_t byte;
    bool is_end;
} word_state;

typedef struct word_move {
    int32_t to;
    uint8_t byte;
} word_move;

typedef struct search {
    di_nfa *a;
    word_state *states; /* owned [n_states] */
    word_move *moves;   /* owned */
    int32_t *queue;     /* owned [n_states] */
    int32_t n_states, states_cap, n_moves, moves_cap;
} search;

static int32_t add_word_state(search *s, uint8_t byte) {
    if (di_gram_status(s->a->g, NULL) ||
        !di_nfa_reserve(s->a, &s->states, &s->states_cap, (int64_t)s->n_states + 1, sizeof *s->states))
        return 0;
    s->states[s->n_states] = (word_state){.child = -1, .sibling = -1, .byte = byte};
    return s->n_states++;
}

static void add_word(search *s, const di_node *word) {
    int32_t at = 0;
    if (!s->states)
        return;
    for (int32_t i = 0; i < word->n && !di_gram_has_failed(s->a->g); i++) {
        uint8_t byte = (uint8_t)word->bytes[i];
        int32_t child = s->states[at].child;
        while (child >= 0 && s->states[child].byte != byte)
            child = s->states[child].sibling;
        if (child < 0) {
            child = add_word_state(s, byte);
            s->states[child].sibling = s->states[at].child;
            s->states[at].child = child;
        }
        at = child;
    }
    s->states[at].is_end = true;
}

static int32_t find_move(const search *s, int32_t state, uint8_t byte) {
    const word_move *moves = s->moves + s->states[state].moves;
    int32_t low = 0, high = s->states[state].n_moves;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (moves[middle].byte < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low < s->states[state].n_moves && moves[low].byte == byte ? moves[low].to : 0;
}

/* The moves of a state: its own children's, then those of the state that it falls back to. */
static void make_moves(search *s, int32_t state) {
    const word_state *at = &s->states[state];
    int32_t to[256], n = 0;
    memset(to, 0, sizeof to);
    if (state) {
        const word_state *back = &s->states[at->fallback];
        for (int32_t i = 0; i < back->n_moves; i++)
            to[s->moves[back->moves + i].byte] = s->moves[back->moves + i].to;
    }
    for (int32_t child = at->child; child >= 0; child = s->states[child].sibling) {
        s->states[child].fallback = state ? to[s->states[child].byte] : 0;
        to[s->states[child].byte] = child;
    }
    if (!di_nfa_reserve(s->a, &s->moves, &s->moves_cap, (int64_t)s->n_moves + 256, sizeof *s->moves))
        return;
    for (int32_t byte = 0; byte < 256; byte++) {
        if (to[byte])
            s->moves[s->n_moves + n++] = (word_move){to[byte], (uint8_t)byte};
    }
    s->states[state].moves = s->n_moves;
    s->states[state].n_moves = n;
    s->n_moves += n;
}

/* Level by level, because a state falls back to a shorter one. */
static void make_search(search *s) {
    s->queue = di_nfa_scratch(s->a, s->n_states, sizeof *s->queue);
    if (!s->queue)
        return;
    int32_t n = 1;
    for (int32_t i = 0; i < n && !di_gram_status(s->a->g, NULL); i++) {
        word_state *at = &s->states[s->queue[i]];
        at->is_end = at->is_end || s->states[at->fallback].is_end;
        make_moves(s, s->queue[i]);
        for (int32_t child = at->child; child >= 0; child = s->states[child].sibling)
            s->queue[n++] = child;
    }
}

/* ---- until and free ---- */

/* States of a decoder: 0 between code points, 1 .. 3 that many bytes missing, then after E0, ED, F0, F4, whose second
 * bytes are fewer. */
typedef struct decode_range {
    uint8_t low, high, next;
} decode_range;

enum { DECODE_STATES = 8 };

static const struct {
    int32_t n;
    decode_range ranges[9];
} decoder[DECODE_STATES] = {
    {9,
     {{0x00, 0x7F, 0},
      {0xC2, 0xDF, 1},
      {0xE0, 0xE0, 4},
      {0xE1, 0xEC, 2},
      {0xED, 0xED, 5},
      {0xEE, 0xEF, 2},
      {0xF0, 0xF0, 6},
      {0xF1, 0xF3, 3},
      {0xF4, 0xF4, 7}}},
    {1, {{0x80, 0xBF, 0}}},
    {1, {{0x80, 0xBF, 1}}},
    {1, {{0x80, 0xBF, 2}}},
    {1, {{0xA0, 0xBF, 1}}},
    {1, {{0x80, 0x9F, 1}}},
    {1, {{0x90, 0xBF, 2}}},
    {1, {{0x80, 0x8F, 2}}},
};

typedef struct text_writer {
    search s;
    const di_node *node;
    int32_t to;
    int32_t *made;    /* owned [s.n_states, DECODE_STATES]: state of the automaton, -1: none yet */
    int32_t *waiting; /* owned: indices of `made` whose edges aren't written */
    int32_t n_waiting, waiting_cap;
} text_writer;

static int32_t text_state(text_writer *w, int32_t word, int32_t decode) {
    int32_t index = word * DECODE_STATES + decode;
    if (w->made[index] < 0) {
        w->made[index] = di_nfa_state_add(w->s.a);
        if (di_nfa_reserve(w->s.a, &w->waiting, &w->waiting_cap, (int64_t)w->n_waiting + 1, sizeof *w->waiting))
            w->waiting[w->n_waiting++] = index;
    }
    return w->made[index];
}

static void write_move(text_writer *w, int32_t from, int32_t low, int32_t high, int32_t word, int32_t decode) {
    if (!w->s.states[word].is_end)
        di_nfa_byte(w->s.a, from, low, high, text_state(w, word, decode));
    else if (w->node->kind == DI_NODE_UNTIL)
        di_nfa_byte(w->s.a, from, low, high, w->to);
}

/* The token of an end may come where its spelling, after the text so far, is the first end: an end within it would
 * leave a rest of the token over. */
static void write_token(text_writer *w, int32_t from, int32_t word, const di_node *end) {
    for (int32_t i = 0; i < end->n; i++) {
        word = find_move(&w->s, word, (uint8_t)end->bytes[i]);
        if (w->s.states[word].is_end != (i + 1 == end->n))
            return;
    }
    int32_t special = di_nfa_special_find(w->s.a, end->bytes, end->n);
    di_nfa_edge_add(w->s.a, from, (di_nfa_edge){.kind = DI_EDGE_SPECIAL, .to = w->to, .arg = special});
}

static void write_text_state(text_writer *w, int32_t index) {
    int32_t from = w->made[index], word = index / DECODE_STATES, decode = index % DECODE_STATES;
    const word_move *moves = w->s.moves + w->s.states[word].moves, *moves_end = moves + w->s.states[word].n_moves;
    for (int32_t i = 0; i < decoder[decode].n; i++) {
        decode_range range = decoder[decode].ranges[i];
        int32_t low = range.low;
        for (; moves < moves_end && moves->byte <= range.high; moves++) {
            if (moves->byte < low)
                continue; /* no byte of UTF-8 here */
            if (moves->byte > low)
                write_move(w, from, low, moves->byte - 1, 0, range.next);
            write_move(w, from, moves->byte, moves->byte, moves->to, range.next);
            low = moves->byte + 1;
        }
        if (low <= range.high)
            write_move(w, from, low, range.high, 0, range.next);
    }
    if (decode != 0)
        return;
    if (w->node->kind == DI_NODE_FREE) {
        di_nfa_empty(w->s.a, from, w->to);
        return;
    }
    for (int32_t i = 0; i < w->node->n && !di_gram_status(w->s.a->g, NULL); i++) {
        if (w->node->nodes[i]->kind == DI_NODE_SPECIAL)
            write_token(w, from, word, w->node->nodes[i]);
    }
}

void di_nfa_until(di_nfa *a, const di_node *node, int32_t from, int32_t to) {
    text_writer w = {.s = {.a = a}, .node = node, .to = to};
    add_word_state(&w.s, 0);
    for (int32_t i = 0; i < node->n && !di_gram_has_failed(a->g); i++) {
        if (node->nodes[i]->kind == DI_NODE_EMPTY) {
            /* The empty word is found at once. */
            if (node->kind == DI_NODE_UNTIL)
                di_nfa_empty(a, from, to);
            goto out;
        }
        if (node->nodes[i]->kind != DI_NODE_NEVER)
            add_word(&w.s, node->nodes[i]);
    }
    make_search(&w.s);
    int64_t n_made = (int64_t)w.s.n_states * DECODE_STATES;
    w.made = n_made <= INT32_MAX ? di_nfa_scratch(a, n_made, sizeof *w.made) : NULL;
    if (!w.made) {
        di_gram_fail(a->g, DI_ERR_RANGE, "the grammar has ends of %d bytes together", w.s.n_states);
        goto out;
    }
    for (int64_t i = 0; i < n_made; i++)
        w.made[i] = -1;
    di_nfa_empty(a, from, text_state(&w, 0, 0));
    while (w.n_waiting > 0 && !di_gram_has_failed(a->g))
        write_text_state(&w, w.waiting[--w.n_waiting]);
out:
    a->n_bytes -= (size_t)w.s.states_cap * sizeof *w.s.states + (size_t)w.s.moves_cap * sizeof *w.s.moves +
                  (size_t)w.waiting_cap * sizeof *w.waiting;
    free(w.s.states);
    free(w.s.moves);
    free(w.s.queue);
    free(w.made);
    free(w.waiting);
}
