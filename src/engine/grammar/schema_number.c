/* Numbers of a JSON schema: decimals exactly as they are written, and automata over digits for what bounds, multipleOf
 * and excluded values leave.
 *
 * An automaton reads the canonical spelling of a number (no exponent, no leading zeros, no minus before zero) and keeps
 * for each bound how the digits so far compare with the bound's, and for each divisor the remainder. Its states are
 * found by a search from the start, those that lead nowhere are cut off, equal ones are joined. */
#include "schema_internal.h"

enum {
    MARKS_MAX = 258,     /* bounds and excluded values of one number */
    DIVISORS_MAX = 4,    /* multipleOf of one number */
    STATES_MAX = 20000,  /* of an automaton before it is minimised */
    FRACTION_MAX = 18,   /* decimals of a divisor */
    DIVISOR_MAX = 100000 /* a divisor without its point */
};

/* ---- decimals ---- */

bool di_decimal_read(di_schema *s, di_decimal *out, const di_json *number) {
    di_strbuf text = {0};
    if (di_json_kind(number) == DI_JSON_REAL)
        di_json_write_double(&text, di_json_number(number));
    else
        di_json_write(&text, number, DI_JSON_COMPACT);
    const char *p = di_strbuf_str(&text);
    bool is_negative = *p == '-';
    p += is_negative;
    int64_t exponent = 0;
    const char *e = strchr(p, 'e');
    if (e)
        (void)di_parse_i64(e[1] == '+' ? e + 2 : e + 1, &exponent);
    /* The digits without the point, and where the point is among them. */
    size_t len = e ? (size_t)(e - p) : strlen(p), n = 0;
    int64_t point = -1;
    size_t room = len + (size_t)(exponent < 0 ? -exponent : exponent) + 2;
    char *all = di_gram_alloc(s->g, 2 * room);
    if (!all || text.failed) {
        di_strbuf_deinit(&text);
        return false;
    }
    char *digits = all + room;
    for (size_t i = 0; i < len; i++) {
        if (p[i] == '.')
            point = (int64_t)n;
        else
            all[n++] = p[i];
    }
    di_strbuf_deinit(&text);
    point = (point < 0 ? (int64_t)n : point) + exponent;
    int64_t n_digits = 0, n_whole = 0;
    for (int64_t i = DI_MIN(point, (int64_t)0); i < DI_MAX(point, (int64_t)n); i++) {
        char c = i >= 0 && i < (int64_t)n ? all[i] : '0';
        if (i < point && n_digits == 0 && c == '0')
            continue; /* leading zeros */
        if (i >= point && n_whole == 0) {
            n_whole = DI_MAX(n_digits, (int64_t)1);
            if (n_digits == 0)
                digits[n_digits++] = '0';
        }
        digits[n_digits++] = c;
    }
    if (n_digits == 0)
        digits[n_digits++] = '0';
    if (n_whole == 0)
        n_whole = n_digits;
    while (n_digits > n_whole && digits[n_digits - 1] == '0')
        n_digits--;
    bool is_zero = n_digits == 1 && digits[0] == '0';
    *out = (di_decimal){.is_negative = is_negative && !is_zero,
                        .n_whole = (int32_t)n_whole,
                        .n_fraction = (int32_t)(n_digits - n_whole),
                        .digits = digits};
    return true;
}

static int compare_magnitudes(const di_decimal *a, const di_decimal *b) {
    if (a->n_whole != b->n_whole)
        return a->n_whole < b->n_whole ? -1 : 1;
    int32_t n_a = a->n_whole + a->n_fraction, n_b = b->n_whole + b->n_fraction;
    int order = memcmp(a->digits, b->digits, (size_t)DI_MIN(n_a, n_b));
    if (order)
        return order < 0 ? -1 : 1;
    return n_a == n_b ? 0 : n_a < n_b ? -1 : 1;
}

int di_decimal_compare(const di_decimal *a, const di_decimal *b) {
    if (a->is_negative != b->is_negative)
        return a->is_negative ? -1 : 1;
    int order = compare_magnitudes(a, b);
    return a->is_negative ? -order : order;
}

bool di_decimal_is_whole(const di_decimal *a) {
    return a->n_fraction == 0;
}

/* m * 10^m's decimals as an integer; 0 where that is too large. */
static int64_t divisor_of(const di_decimal *m) {
    int64_t divisor = 0;
    if (m->n_fraction > FRACTION_MAX)
        return 0;
    for (int32_t i = 0; i < m->n_whole + m->n_fraction; i++) {
        divisor = divisor * 10 + (m->digits[i] - '0');
        if (divisor > DIVISOR_MAX)
            return 0;
    }
    return divisor;
}

bool di_decimal_is_multiple(const di_decimal *a, const di_decimal *m, bool *is_known) {
    int64_t divisor = divisor_of(m), rest = 0;
    *is_known = divisor > 0;
    if (!*is_known || a->n_fraction > m->n_fraction)
        return false;
    for (int32_t i = 0; i < a->n_whole + m->n_fraction; i++) {
        bool has_digit = i < a->n_whole + a->n_fraction;
        rest = (rest * 10 + (has_digit ? a->digits[i] - '0' : 0)) % divisor;
    }
    return rest == 0;
}

/* ---- automata ---- */

typedef enum phase { START, MINUS, ZERO, WHOLE, POINT, FRACTION } phase;

typedef enum mark_kind { MARK_LOW, MARK_HIGH, MARK_NOT } mark_kind;

typedef struct mark {
    mark_kind kind;
    bool is_exclusive;
    const di_decimal *value;
} mark;

typedef struct divisor {
    bool is_negated;
    int64_t value;      /* the divisor without its point */
    int32_t n_fraction; /* and its decimals */
} divisor;

/* The words of a state: phase and flags; decimals so far (up to the most that a divisor has, and one more); a word for
 * each mark: position << 2 | order + 1; a word for each divisor: the remainder. */
enum { IS_NEGATIVE = 8, IS_NONZERO = 16, HAS_FRACTION = 32, PHASE = 7, FIXED_WORDS = 2 };

typedef struct machine {
    int32_t types;
    mark marks[MARKS_MAX];
    int32_t n_marks;
    divisor divisors[DIVISORS_MAX];
    int32_t n_divisors, n_words;
    int32_t fraction_max; /* decimals that a positive divisor leaves; -1: any number */
    int32_t fraction_cap; /* decimals are counted up to here */
} machine;

/* Signs settle a comparison whatever the digits are. */
static bool is_settled(const mark *m, bool is_negative) {
    return m->value->is_negative != is_negative;
}

/* The digit d as the next one before the point. */
static int32_t mark_whole(const mark *m, int32_t word, int d) {
    int32_t at = word >> 2, order = (word & 3) - 1;
    if (at >= m->value->n_whole)
        return (m->value->n_whole + 1) << 2 | 2; /* longer than the bound: larger */
    if (order == 0)
        order = DI_MAX(-1, DI_MIN(1, d - (m->value->digits[at] - '0')));
    return (at + 1) << 2 | (order + 1);
}

/* The comparison of what was before the point, at the point. */
static int32_t mark_point(const mark *m, int32_t word) {
    int32_t at = word >> 2, order = (word & 3) - 1;
    if (at != m->value->n_whole)
        order = at < m->value->n_whole ? -1 : 1;
    return order + 1;
}

static int32_t mark_fraction(const mark *m, int32_t word, int d) {
    int32_t at = word >> 2, order = (word & 3) - 1;
    if (order)
        return word;
    int digit = at < m->value->n_fraction ? m->value->digits[m->value->n_whole + at] - '0' : 0;
    if (d != digit)
        return d < digit ? 0 : 2;
    return DI_MIN(at + 1, m->value->n_fraction) << 2 | 1;
}

/* How the number that ends here compares with the mark's value. */
static int mark_order(const mark *m, int32_t word, phase at, bool is_negative) {
    if (is_settled(m, is_negative))
        return is_negative ? -1 : 1;
    if (at != FRACTION)
        word = mark_point(m, word);
    int32_t position = word >> 2, order = (word & 3) - 1;
    if (order == 0 && position < m->value->n_fraction)
        order = -1; /* its last decimal isn't zero */
    return is_negative ? -order : order;
}

static bool accepts(const machine *m, const int32_t *state) {
    phase at = (phase)(state[0] & PHASE);
    bool is_negative = state[0] & IS_NEGATIVE, has_fraction = state[0] & HAS_FRACTION;
    if (at == START || at == MINUS || at == POINT || (is_negative && !(state[0] & IS_NONZERO)))
        return false;
    if (!(m->types & (has_fraction ? DI_TYPE_FRACTION : DI_TYPE_WHOLE)))
        return false;
    for (int32_t i = 0; i < m->n_marks; i++) {
        int order = mark_order(&m->marks[i], state[FIXED_WORDS + i], at, is_negative);
        if (order == 0 ? m->marks[i].is_exclusive
                       : m->marks[i].kind != MARK_NOT && order == (m->marks[i].kind == MARK_LOW ? -1 : 1))
            return false;
    }
    for (int32_t i = 0; i < m->n_divisors; i++) {
        const divisor *d = &m->divisors[i];
        int64_t rest = state[FIXED_WORDS + m->n_marks + i];
        bool is_multiple = rest >= 0; /* -1: it has too many decimals */
        for (int32_t k = state[1]; is_multiple && k < d->n_fraction; k++)
            rest = rest * 10 % d->value;
        if ((is_multiple && rest == 0) == d->is_negated)
            return false;
    }
    return true;
}

/* Symbols 0 .. 9, the point, the minus. */
enum { SYMBOL_POINT = 10, SYMBOL_MINUS, N_SYMBOLS };

/* False where the symbol may not come. */
static bool step(const machine *m, const int32_t *from, int symbol, int32_t *to) {
    phase at = (phase)(from[0] & PHASE);
    int32_t flags = from[0] & ~PHASE;
    memcpy(to, from, (size_t)m->n_words * sizeof *to);
    if (symbol == SYMBOL_MINUS) {
        to[0] = MINUS | IS_NEGATIVE;
        return at == START;
    }
    bool is_negative = flags & IS_NEGATIVE;
    int32_t *words = to + FIXED_WORDS, *rests = words + m->n_marks;
    if (symbol == SYMBOL_POINT) {
        if ((at != ZERO && at != WHOLE) || !(m->types & DI_TYPE_FRACTION) || m->fraction_max == 0)
            return false;
        to[0] = POINT | flags;
        for (int32_t i = 0; i < m->n_marks; i++) {
            if (!is_settled(&m->marks[i], is_negative))
                words[i] = mark_point(&m->marks[i], words[i]);
        }
        return true;
    }
    if (at == ZERO)
        return false;
    bool is_fraction = at == POINT || at == FRACTION;
    if (is_fraction && m->fraction_max >= 0 && from[1] >= m->fraction_max)
        return false;
    if (is_fraction)
        to[0] = FRACTION | flags | (symbol ? IS_NONZERO | HAS_FRACTION : 0);
    else
        to[0] = ((at == START || at == MINUS) && symbol == 0 ? ZERO : WHOLE) | flags | (symbol ? IS_NONZERO : 0);
    for (int32_t i = 0; i < m->n_marks; i++) {
        if (!is_settled(&m->marks[i], is_negative))
            words[i] = is_fraction ? mark_fraction(&m->marks[i], words[i], symbol)
                                   : mark_whole(&m->marks[i], words[i], symbol);
    }
    for (int32_t i = 0; i < m->n_divisors; i++) {
        if (!is_fraction || from[1] < m->divisors[i].n_fraction)
            rests[i] = (int32_t)(((int64_t)rests[i] * 10 + symbol) % m->divisors[i].value);
        else if (symbol)
            rests[i] = -1;
        if (rests[i] < 0)
            rests[i] = -1;
    }
    if (is_fraction)
        to[1] = DI_MIN(from[1] + 1, m->fraction_cap);
    return true;
}

/* An automaton under construction, in heap memory: its size isn't known. */
typedef struct table {
    int32_t *words;             /* owned [cap, n_words] */
    int32_t (*next)[N_SYMBOLS]; /* owned [cap]; -1: none */
    int32_t *slots;             /* owned [n_slots] of states by their words; -1: free */
    int32_t n, cap, n_slots;
} table;

static void table_free(table *t) {
    free(t->words);
    free(t->next);
    free(t->slots);
}

static bool table_grow(table *t, int32_t n_words) {
    int32_t cap = DI_MAX(2 * t->cap, 64);
    int32_t *words = realloc(t->words, (size_t)cap * (size_t)n_words * sizeof *words);
    t->words = words ? words : t->words;
    int32_t(*next)[N_SYMBOLS] = realloc(t->next, (size_t)cap * sizeof *next);
    t->next = next ? next : t->next;
    int32_t *slots = realloc(t->slots, 4 * (size_t)cap * sizeof *slots);
    t->slots = slots ? slots : t->slots;
    if (!words || !next || !slots)
        return false;
    t->cap = cap;
    t->n_slots = 4 * cap;
    for (int32_t i = 0; i < t->n_slots; i++)
        slots[i] = -1;
    for (int32_t i = 0; i < t->n; i++) {
        uint64_t h = di_hash_fnv1a(words + (size_t)i * (size_t)n_words, (size_t)n_words * sizeof *words);
        int32_t k = (int32_t)(h % (uint64_t)t->n_slots);
        while (slots[k] >= 0)
            k = (k + 1) % t->n_slots;
        slots[k] = i;
    }
    return true;
}

/* The number of a state; -1 when memory is short. */
static int32_t table_find(table *t, const int32_t *state, int32_t n_words) {
    if (t->n == t->cap && !table_grow(t, n_words))
        return -1;
    size_t bytes = (size_t)n_words * sizeof *state;
    int32_t k = (int32_t)(di_hash_fnv1a(state, bytes) % (uint64_t)t->n_slots);
    for (; t->slots[k] >= 0; k = (k + 1) % t->n_slots) {
        if (memcmp(t->words + (size_t)t->slots[k] * (size_t)n_words, state, bytes) == 0)
            return t->slots[k];
    }
    memcpy(t->words + (size_t)t->n * (size_t)n_words, state, bytes);
    t->slots[k] = t->n;
    return t->n++;
}

/* Gives each state the number of its class in `class_of`, -1 to those that lead nowhere; returns the number of classes.
 * States are alike when they accept alike and their successors are alike: Moore's refinement. */
static int32_t minimise(const table *t, const bool *is_accepting, int32_t *class_of, int32_t *refined, int32_t *slots) {
    bool has_changed = true;
    for (int32_t i = 0; i < t->n; i++)
        class_of[i] = is_accepting[i] ? 0 : -1;
    while (has_changed) { /* states that can still accept */
        has_changed = false;
        for (int32_t i = t->n - 1; i >= 0; i--) {
            for (int k = 0; k < N_SYMBOLS && class_of[i] < 0; k++) {
                if (t->next[i][k] >= 0 && class_of[t->next[i][k]] >= 0) {
                    class_of[i] = 1;
                    has_changed = true;
                }
            }
        }
    }
    for (int32_t n_before = 0, n_slots = 2 * t->n + 1;;) {
        int32_t n = 0;
        for (int32_t i = 0; i < n_slots; i++)
            slots[i] = -1;
        for (int32_t i = 0; i < t->n; i++) {
            refined[i] = -1;
            if (class_of[i] < 0)
                continue;
            uint64_t h = di_mix64((uint64_t)class_of[i] + 1);
            for (int k = 0; k < N_SYMBOLS; k++)
                h = di_mix64(h ^ (uint64_t)(t->next[i][k] >= 0 ? class_of[t->next[i][k]] + 2 : 1));
            int32_t at = (int32_t)(h % (uint64_t)n_slots);
            for (; slots[at] >= 0; at = (at + 1) % n_slots) {
                int32_t j = slots[at];
                bool is_same = class_of[i] == class_of[j];
                for (int k = 0; k < N_SYMBOLS && is_same; k++) {
                    int32_t a = t->next[i][k], b = t->next[j][k];
                    is_same = (a >= 0 ? class_of[a] : -1) == (b >= 0 ? class_of[b] : -1);
                }
                if (is_same)
                    break;
            }
            if (slots[at] < 0) {
                slots[at] = i;
                refined[i] = n++;
            } else {
                refined[i] = refined[slots[at]];
            }
        }
        memcpy(class_of, refined, (size_t)t->n * sizeof *class_of);
        if (n == n_before)
            return n;
        n_before = n;
    }
}

static const di_node *symbols_node(di_gram *g, const bool *has) {
    di_code_range ranges[N_SYMBOLS];
    size_t n = 0;
    for (int k = 0; k < N_SYMBOLS; k++) {
        uint32_t c = k == SYMBOL_POINT ? '.' : k == SYMBOL_MINUS ? '-' : (uint32_t)('0' + k);
        if (has[k])
            ranges[n++] = (di_code_range){c, c};
    }
    return di_node_class(g, ranges, n, false);
}

/* The minimal automaton as a GRAPH: classes in the order of their first states, so that the start is 0. */
static const di_node *table_node(di_gram *g, const table *t, const bool *is_accepting) {
    size_t n = (size_t)t->n;
    int32_t *class_of = di_gram_alloc(g, n * sizeof *class_of), *refined = di_gram_alloc(g, n * sizeof *refined);
    int32_t *slots = di_gram_alloc(g, (2 * n + 1) * sizeof *slots);
    if (!class_of || !refined || !slots)
        return di_node_never();
    int32_t n_classes = minimise(t, is_accepting, class_of, refined, slots);
    if (n_classes == 0 || class_of[0] < 0)
        return di_node_never();
    bool *accepting = di_gram_alloc(g, (size_t)n_classes * sizeof *accepting);
    bool *is_done = di_gram_alloc(g, (size_t)n_classes * sizeof *is_done);
    di_graph_edge *edges = di_gram_alloc(g, (size_t)n_classes * N_SYMBOLS * sizeof *edges);
    if (!accepting || !is_done || !edges)
        return di_node_never();
    memset(is_done, 0, (size_t)n_classes * sizeof *is_done);
    size_t n_edges = 0;
    for (int32_t i = 0; i < t->n; i++) {
        int32_t c = class_of[i];
        if (c < 0 || is_done[c])
            continue;
        is_done[c] = true;
        accepting[c] = is_accepting[i];
        bool is_used[N_SYMBOLS] = {false};
        for (int k = 0; k < N_SYMBOLS; k++) {
            int32_t to = t->next[i][k] >= 0 ? class_of[t->next[i][k]] : -1;
            if (to < 0 || is_used[k])
                continue;
            bool has[N_SYMBOLS];
            for (int j = 0; j < N_SYMBOLS; j++) {
                has[j] = t->next[i][j] >= 0 && class_of[t->next[i][j]] == to;
                is_used[j] |= has[j];
            }
            edges[n_edges++] = (di_graph_edge){.from = c, .to = to, .label = symbols_node(g, has)};
        }
    }
    return di_node_graph(g, n_classes, accepting, edges, n_edges);
}

static const di_node *machine_node(di_schema *s, const machine *m, const di_json *at) {
    table t = {0};
    const di_node *node = di_node_never();
    int32_t words[FIXED_WORDS + MARKS_MAX + DIVISORS_MAX] = {START}, to[FIXED_WORDS + MARKS_MAX + DIVISORS_MAX];
    bool *is_accepting = NULL;
    for (int32_t i = 0; i < m->n_marks; i++)
        words[FIXED_WORDS + i] = 1; /* no digits yet, equal so far */
    bool is_short = table_find(&t, words, m->n_words) < 0;
    for (int32_t i = 0; i < t.n && !is_short; i++) {
        memcpy(words, t.words + (size_t)i * (size_t)m->n_words, (size_t)m->n_words * sizeof *words);
        for (int k = 0; k < N_SYMBOLS; k++) {
            bool has_step = step(m, words, k, to);
            int32_t next = has_step ? table_find(&t, to, m->n_words) : -1;
            is_short |= has_step && next < 0;
            t.next[i][k] = next;
        }
        if (t.n > STATES_MAX) {
            di_schema_fail(s, at ? at : s->root, at ? "multipleOf" : "", "can't be guaranteed: takes too many states");
            goto out;
        }
        if (i % 1024 == 1023 && di_gram_status(s->g, NULL))
            goto out;
    }
    is_accepting = malloc((size_t)DI_MAX(t.n, 1) * sizeof *is_accepting);
    if (!is_accepting || is_short) {
        di_gram_fail(s->g, DI_ERR_MEMORY, "numbers of a schema: %d states", t.n);
        goto out;
    }
    for (int32_t i = 0; i < t.n; i++)
        is_accepting[i] = accepts(m, t.words + (size_t)i * (size_t)m->n_words);
    node = table_node(s->g, &t, is_accepting);
out:
    free(is_accepting);
    table_free(&t);
    return node;
}

/* ---- numbers without bounds ---- */

static const di_node *digits_node(di_gram *g, char first, int32_t min, int32_t max) {
    return di_node_repeat(g, di_node_class(g, &(di_code_range){(uint32_t)first, '9'}, 1, false), min, max);
}

static const di_node *unsigned_node(di_gram *g) {
    return di_node_seq2(g, digits_node(g, '1', 1, 1), digits_node(g, '0', 0, -1));
}

static const di_node *whole_node(di_schema *s) {
    di_gram *g = s->g;
    if (!s->whole) {
        const di_node *minus = di_node_repeat(g, di_node_bytes(g, "-", 1), 0, 1);
        const di_node *node = di_node_alt2(g, di_node_bytes(g, "0", 1), di_node_seq2(g, minus, unsigned_node(g)));
        s->whole = node;
    }
    return s->whole;
}

static const di_node *number_node(di_schema *s) {
    di_gram *g = s->g;
    if (!s->number) {
        const di_node *minus = di_node_repeat(g, di_node_bytes(g, "-", 1), 0, 1);
        const di_node *whole = di_node_alt2(g, di_node_bytes(g, "0", 1), unsigned_node(g));
        const di_node *fraction = di_node_seq2(g, di_node_bytes(g, ".", 1), digits_node(g, '0', 1, -1));
        const di_node *e = di_node_class(g, (di_code_range[]){{'E', 'E'}, {'e', 'e'}}, 2, false);
        /* Enough for every size that means anything, and too little to overflow a double by itself. */
        const di_node *plus =
            di_node_seq2(g, di_node_repeat(g, di_node_bytes(g, "+", 1), 0, 1), digits_node(g, '0', 1, 2));
        const di_node *negative = di_node_seq2(g, di_node_bytes(g, "-", 1), digits_node(g, '0', 1, 3));
        const di_node *exponent = di_node_seq2(g, e, di_node_alt2(g, plus, negative));
        const di_node *parts[] = {minus, whole, di_node_repeat(g, fraction, 0, 1), di_node_repeat(g, exponent, 0, 1)};
        s->number = di_node_seq(g, parts, 4);
    }
    return s->number;
}

/* ---- numbers of a shape ---- */

static void add_excluded(di_schema *s, machine *m, const di_fact *fact, di_decimal *storage) {
    size_t n = fact->is_list ? di_json_array_len(fact->value) : 1;
    for (size_t i = 0; i < n; i++) {
        const di_json *value = fact->is_list ? di_json_at(fact->value, i) : fact->value;
        if (!(di_schema_type_of(value) & DI_TYPE_NUMBER))
            continue;
        if (m->n_marks == MARKS_MAX) {
            di_schema_fail(s, fact->schema, fact->is_list ? "enum" : "const", "too many numbers are excluded");
            return;
        }
        if (!di_decimal_read(s, &storage[m->n_marks], value))
            return;
        m->marks[m->n_marks] = (mark){MARK_NOT, true, &storage[m->n_marks]};
        m->n_marks++;
    }
}

const di_node *di_schema_number(di_schema *s, const di_shape *shape) {
    machine m = {.types = shape->types & DI_TYPE_NUMBER, .fraction_max = -1};
    di_decimal storage[MARKS_MAX];
    const di_json *at = NULL;
    if (shape->low.is_set)
        m.marks[m.n_marks++] = (mark){MARK_LOW, shape->low.is_exclusive, &shape->low.value};
    if (shape->high.is_set)
        m.marks[m.n_marks++] = (mark){MARK_HIGH, shape->high.is_exclusive, &shape->high.value};
    for (const di_fact *f = shape->facts; f; f = f->next) {
        if (f->kind == DI_FACT_VALUES && f->is_negated)
            add_excluded(s, &m, f, storage);
        if (f->kind != DI_FACT_MULTIPLE)
            continue;
        int64_t value = divisor_of(&f->decimal);
        if (value == 0 || m.n_divisors == DIVISORS_MAX) {
            if (di_schema_refuse(s, f->schema, "multipleOf", "takes too many states"))
                continue;
            return di_node_never();
        }
        at = f->schema;
        int32_t n_fraction = f->decimal.n_fraction;
        m.divisors[m.n_divisors++] = (divisor){f->is_negated, value, n_fraction};
        m.fraction_cap = DI_MAX(m.fraction_cap, n_fraction);
        if (!f->is_negated)
            m.fraction_max = m.fraction_max < 0 ? n_fraction : DI_MIN(m.fraction_max, n_fraction);
    }
    if (di_gram_has_failed(s->g))
        return di_node_never();
    if (m.n_marks == 0 && m.n_divisors == 0 && m.types != DI_TYPE_FRACTION)
        return m.types == DI_TYPE_WHOLE ? whole_node(s) : number_node(s);
    m.n_words = FIXED_WORDS + m.n_marks + m.n_divisors;
    return machine_node(s, &m, at);
}
