/* Regular sets against the definition: for random nodes over three characters, the automaton, intersection, difference
 * and erasing agree with a span matcher on every text of up to five characters. */
#include "grammar_walk.h"
#include "harness.h"

static const char *const letters[] = {"a", "b", "é"};
static const uint32_t codes[] = {'a', 'b', 0xE9};
enum { N_LETTERS = 3, LEN_MAX = 5 };

/* is_erasing: the same node, but that every 'b' is the empty text. */
typedef struct maker {
    di_gram *g;
    uint64_t rng;
    bool is_erasing;
} maker;

static const di_node *random_node(maker *m, int depth);

static const di_node *random_class(maker *m) {
    di_code_range ranges[N_LETTERS];
    size_t n = 0;
    bool has_b = false;
    uint64_t set = di_test_random(&m->rng) % 8;
    for (int i = 0; i < N_LETTERS; i++) {
        if (!(set >> i & 1))
            continue;
        if (i == 1 && m->is_erasing)
            has_b = true;
        else
            ranges[n++] = (di_code_range){codes[i], codes[i]};
    }
    const di_node *node = di_node_class(m->g, ranges, n, false);
    return has_b ? di_node_alt2(m->g, node, di_node_empty()) : node;
}

static const di_node *random_bytes(maker *m) {
    di_strbuf text = {0};
    int64_t n = di_test_random_range(&m->rng, 1, 3);
    for (int64_t i = 0; i < n; i++) {
        const char *letter = letters[di_test_random(&m->rng) % N_LETTERS];
        if (m->is_erasing && letter == letters[1])
            continue;
        di_strbuf_puts(&text, letter);
    }
    const di_node *node = di_node_bytes(m->g, di_strbuf_str(&text), text.len);
    di_strbuf_deinit(&text);
    return node;
}

static const di_node *random_graph(maker *m, int depth) {
    enum { STATES_MAX = 4, EDGES_MAX = 6 };
    int32_t n_states = (int32_t)di_test_random_range(&m->rng, 1, STATES_MAX);
    int64_t n_edges = di_test_random_range(&m->rng, 0, EDGES_MAX);
    bool is_accepting[STATES_MAX];
    di_graph_edge edges[EDGES_MAX];
    for (int32_t i = 0; i < n_states; i++)
        is_accepting[i] = di_test_random(&m->rng) % 2;
    for (int64_t i = 0; i < n_edges; i++) {
        edges[i].from = (int32_t)di_test_random_range(&m->rng, 0, n_states - 1);
        edges[i].to = (int32_t)di_test_random_range(&m->rng, 0, n_states - 1);
        edges[i].label = random_node(m, depth - 1);
    }
    return di_node_graph(m->g, n_states, is_accepting, edges, (size_t)n_edges);
}

static const di_node *random_node(maker *m, int depth) {
    const di_node *parts[3];
    int64_t kind = di_test_random_range(&m->rng, depth > 0 ? 0 : 4, 7);
    if (kind == 0) {
        const di_node *part = random_node(m, depth - 1);
        int32_t min = (int32_t)di_test_random_range(&m->rng, 0, 2);
        int32_t max = di_test_random(&m->rng) % 2 ? -1 : min + (int32_t)di_test_random_range(&m->rng, 0, 2);
        return di_node_repeat(m->g, part, min, max);
    }
    if (kind <= 2) {
        size_t n = (size_t)di_test_random_range(&m->rng, 1, 3);
        for (size_t i = 0; i < n; i++)
            parts[i] = random_node(m, depth - 1);
        return kind == 1 ? di_node_seq(m->g, parts, n) : di_node_alt(m->g, parts, n);
    }
    if (kind == 3)
        return random_graph(m, depth);
    if (kind <= 5)
        return random_class(m);
    return kind == 6 ? random_bytes(m) : di_node_empty();
}

/* The texts of up to LEN_MAX characters, by number. */
static size_t text_of(int64_t k, char text[2 * LEN_MAX + 1]) {
    size_t len = 0;
    for (; k > 0; k = (k - 1) / N_LETTERS) {
        const char *letter = letters[(k - 1) % N_LETTERS];
        memcpy(text + len, letter, strlen(letter));
        len += strlen(letter);
    }
    text[len] = '\0';
    return len;
}

DI_PROPERTY(sets_agree_with_their_definition, 150) {
    di_gram g;
    di_error err;
    di_gram_init(&g, NULL);
    maker first = {.g = &g, .rng = seed}, second = {.g = &g, .rng = seed * 3 + 1}, erasing = first;
    erasing.is_erasing = true;
    const di_node *x = random_node(&first, 3), *y = random_node(&second, 3), *x_erased = random_node(&erasing, 3);
    const di_regular *a = di_regular_make(&g, x), *b = di_regular_make(&g, y);
    const di_regular *both = di_regular_intersect(&g, a, b), *rest = di_regular_subtract(&g, a, b);
    const di_regular *erased = di_regular_erase(&g, a, &(di_code_range){'b', 'b'}, 1);
    const di_node *back = di_regular_node(&g, both);
    di_test_ok(di_gram_status(&g, &err), &err);
    bool has_both = false, has_rest = false;
    int64_t n_texts = 1;
    for (int i = 0, power = 1; i < LEN_MAX; i++)
        n_texts += power *= N_LETTERS;
    for (int64_t k = 0; k < n_texts; k++) {
        char text[2 * LEN_MAX + 1];
        size_t len = text_of(k, text);
        bool in_x = walk_matches(&g, x, text, len), in_y = walk_matches(&g, y, text, len);
        assert_int_equal(di_regular_matches(a, text, len), in_x);
        assert_int_equal(di_regular_matches(b, text, len), in_y);
        assert_int_equal(di_regular_matches(both, text, len), in_x && in_y);
        assert_int_equal(di_regular_matches(rest, text, len), in_x && !in_y);
        assert_int_equal(di_regular_matches(erased, text, len), walk_matches(&g, x_erased, text, len));
        assert_int_equal(walk_matches(&g, back, text, len), in_x && in_y);
        has_both |= in_x && in_y;
        has_rest |= in_x && !in_y;
    }
    /* Longer texts may be there where short ones are not. */
    assert_false(has_both && di_regular_is_never(both));
    assert_false(has_rest && di_regular_is_never(rest));
    assert_true(di_regular_is_never(di_regular_subtract(&g, both, a)));
    assert_true(di_regular_is_never(di_regular_intersect(&g, both, rest)));
    assert_true(di_regular_is_never(di_regular_intersect(&g, rest, b)));
    di_gram_deinit(&g);
}

DI_TEST_GROUP(grammar_regular_sets, cmocka_unit_test(sets_agree_with_their_definition));
