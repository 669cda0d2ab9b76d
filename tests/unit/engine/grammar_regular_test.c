/* Regular sets: what intersection, difference and erasing keep, the size of what comes out, limits. */
#include "grammar_walk.h"
#include "harness.h"

static di_gram gram;

static int set_up(void **state) {
    (void)state;
    di_gram_init(&gram, NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    di_gram_deinit(&gram);
    return 0;
}

static const di_regular *make(const char *regex) {
    const di_regular *a = di_regular_make(&gram, di_node_regex(&gram, regex, strlen(regex), false));
    di_error err;
    di_test_ok(di_gram_status(&gram, &err), &err);
    assert_non_null(a);
    return a;
}

/* The set, and the node that comes of it, hold the texts before NULL and not those after it. */
static void check(const di_regular *a, const char *const *texts) {
    const di_node *node = di_regular_node(&gram, a);
    bool is_in = true;
    for (int i = 0; texts[i] || is_in; i++) {
        if (!texts[i]) {
            is_in = false;
            continue;
        }
        if (di_regular_matches(a, texts[i], strlen(texts[i])) != is_in) {
            fail_msg("'%s' is %s the set", texts[i], is_in ? "not in" : "in");
        }
        if (walk_matches(&gram, node, texts[i], strlen(texts[i])) != is_in) {
            fail_msg("'%s' is %s the node of the set", texts[i], is_in ? "not in" : "in");
        }
    }
}

static void matches_what_its_node_matches(void **state) {
    (void)state;
    check(make("(a|bc)*d?"), (const char *const[]){"", "a", "bcad", "d", NULL, "b", "dd", NULL});
    check(make("[^a]{2,3}"), (const char *const[]){"é😀", "bbb", NULL, "a", "ba", "bbbb", "\xED\xA0\x80x", NULL});
    check(make("x{3}y{0,2}z{1,}"), (const char *const[]){"xxxz", "xxxyyzz", NULL, "xxz", "xxxyyy", NULL});
    check(make(""), (const char *const[]){"", NULL, "a", NULL});
    check(make("[^\\d\\D]"), (const char *const[]){NULL, "", "a", NULL});
}

static void intersects_and_subtracts(void **state) {
    (void)state;
    const di_regular *word = make("[a-z]+"), *key = make("a|bc|k1"), *two = make(".{2}"), *never = make("[^\\d\\D]");
    check(di_regular_intersect(&gram, word, key), (const char *const[]){"a", "bc", NULL, "k1", "b", NULL});
    check(di_regular_subtract(&gram, word, key), (const char *const[]){"b", "bcd", "aa", NULL, "a", "bc", "", NULL});
    check(di_regular_subtract(&gram, two, word), (const char *const[]){"a1", "éé", NULL, "ab", "a", NULL});
    assert_false(di_regular_is_never(word));
    assert_true(di_regular_is_never(never));
    assert_true(di_regular_is_never(di_regular_intersect(&gram, word, make("\\d+"))));
    assert_true(di_regular_is_never(di_regular_subtract(&gram, key, make("(?s).*"))));
    assert_true(di_regular_is_never(di_regular_intersect(&gram, never, word)));
    assert_int_equal(di_regular_node(&gram, never)->kind, DI_NODE_NEVER);
    check(di_regular_subtract(&gram, word, never), (const char *const[]){"a", NULL, "", NULL});
}

static void erases_code_points(void **state) {
    (void)state;
    static const di_code_range marks[] = {{'-', '-'}, {'x', 'z'}};
    check(di_regular_erase(&gram, make("a-?b(x|1)[yc]*"), marks, 2),
          (const char *const[]){"ab", "ab1", "ab1cc", "abc", NULL, "a-b", "abx", "b", NULL});
    check(di_regular_erase(&gram, make("[w-y]"), marks, 2), (const char *const[]){"w", "", NULL, "x", "y", NULL});
    check(di_regular_erase(&gram, make("-*"), marks, 1), (const char *const[]){"", NULL, "-", NULL});
}

/* States of the least automaton, by hand. */
static void joins_equal_states(void **state) {
    (void)state;
    static const struct {
        const char *regex;
        int32_t n_states;
    } cases[] = {
        {"(a|b)*abb", 4},      {"(ac|bc|[d-f]c)*", 2}, {"a{0,5}", 6},
        {"(foo|boo|zoo)?", 4}, {"(a|aa|aaa)*", 1},     {"(?s).*", 1},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        const di_node *node = di_regular_node(&gram, make(cases[i].regex));
        assert_int_equal(node->kind, DI_NODE_GRAPH);
        if (node->n_states != cases[i].n_states) {
            fail_msg("'%s' has %d states, expected %d", cases[i].regex, node->n_states, cases[i].n_states);
        }
    }
}

static void expect_failure(const di_node *node, di_status status, const char *part) {
    di_error err;
    assert_null(di_regular_make(&gram, node));
    assert_int_equal(di_gram_status(&gram, &err), status);
    assert_contains(err.message, part);
    /* What takes it goes on to fail. */
    assert_null(di_regular_intersect(&gram, NULL, NULL));
    assert_null(di_regular_erase(&gram, NULL, NULL, 0));
    assert_true(di_regular_is_never(NULL));
    assert_false(di_regular_matches(NULL, "", 0));
}

static void refuses_what_is_not_regular(void **state) {
    (void)state;
    expect_failure(di_node_seq2(&gram, di_node_code(&gram, 'a'), di_node_special(&gram, "<x>", 3)), DI_ERR_REQUEST,
                   "must be regular");
}

static void refuses_bytes_that_are_no_text(void **state) {
    (void)state;
    expect_failure(di_node_bytes(&gram, "a\xC3", 2), DI_ERR_REQUEST, "no UTF-8");
}

static void refuses_exponential_sizes(void **state) {
    (void)state;
    /* The place of the last 'a' among the 40 characters before the end needs 2^40 states. */
    static const char regex[] = "[ab]*a[ab]{40}";
    expect_failure(di_node_regex(&gram, regex, strlen(regex), false), DI_ERR_RANGE, "too large");
}

static void refuses_exponential_counts(void **state) {
    (void)state;
    static const char regex[] = "(((a{1000}){1000}){1000}){1000}";
    expect_failure(di_node_regex(&gram, regex, strlen(regex), false), DI_ERR_RANGE, "too large");
}

#define in_gram(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

DI_TEST_GROUP(grammar_regular, in_gram(matches_what_its_node_matches), in_gram(intersects_and_subtracts),
              in_gram(erases_code_points), in_gram(joins_equal_states), in_gram(refuses_what_is_not_regular),
              in_gram(refuses_bytes_that_are_no_text), in_gram(refuses_exponential_sizes),
              in_gram(refuses_exponential_counts));
