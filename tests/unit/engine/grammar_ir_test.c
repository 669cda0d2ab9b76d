/* Nodes and rules of a grammar under construction: what constructors simplify and copy, classes that are sorted, joined
 * and without surrogates, rules by name, and failures that stick: the first one is told, and memory and time are
 * bounded. */
#include "engine/grammar/ir.h"
#include "harness.h"

static di_gram make_gram(void) {
    di_gram g;
    di_gram_init(&g, NULL);
    return g;
}

static void expect_ranges(const di_node *node, const di_code_range *want, int32_t n) {
    assert_int_equal(node->kind, DI_NODE_CLASS);
    assert_int_equal(node->n, n);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(node->ranges[i].first, want[i].first);
        assert_int_equal(node->ranges[i].last, want[i].last);
    }
}

static void classes_are_sorted_and_joined(void **state) {
    (void)state;
    di_gram g = make_gram();
    const di_code_range ranges[] = {{'x', 'z'}, {'b', 'd'}, {'c', 'f'}, {'g', 'h'}, {'q', 'p'}};
    expect_ranges(di_node_class(&g, ranges, DI_COUNT(ranges), false), (const di_code_range[]){{'b', 'h'}, {'x', 'z'}},
                  2);
    expect_ranges(di_node_class(&g, ranges, DI_COUNT(ranges), true),
                  (const di_code_range[]){{0, 'a'}, {'i', 'w'}, {'{', 0xD7FF}, {0xE000, DI_CODE_MAX}}, 4);
    assert_int_equal(di_gram_status(&g, NULL), DI_OK);
    di_gram_deinit(&g);
}

static void classes_have_no_surrogates(void **state) {
    (void)state;
    di_gram g = make_gram();
    const di_code_range across = {0xD7F0, 0xE00F}, inside = {0xD800, 0xDFFF}, left = {0xD000, 0xD900},
                        right = {0xDFFF, 0xE000}, all = {0, DI_CODE_MAX};
    expect_ranges(di_node_class(&g, &across, 1, false), (const di_code_range[]){{0xD7F0, 0xD7FF}, {0xE000, 0xE00F}}, 2);
    expect_ranges(di_node_class(&g, &left, 1, false), (const di_code_range[]){{0xD000, 0xD7FF}}, 1);
    expect_ranges(di_node_class(&g, &right, 1, false), (const di_code_range[]){{0xE000, 0xE000}}, 1);
    assert_int_equal(di_node_class(&g, &inside, 1, false)->kind, DI_NODE_NEVER);
    assert_int_equal(di_node_class(&g, &all, 1, true)->kind, DI_NODE_NEVER);
    assert_int_equal(di_node_class(&g, NULL, 0, false)->kind, DI_NODE_NEVER);
    expect_ranges(di_node_class(&g, NULL, 0, true), (const di_code_range[]){{0, 0xD7FF}, {0xE000, DI_CODE_MAX}}, 2);
    /* Beyond the last code point there is nothing. */
    expect_ranges(di_node_class(&g, &(di_code_range){0x10FFFF, UINT32_MAX}, 1, false),
                  (const di_code_range[]){{DI_CODE_MAX, DI_CODE_MAX}}, 1);
    di_gram_deinit(&g);
}

static void obvious_parts_are_simplified(void **state) {
    (void)state;
    di_gram g = make_gram();
    const di_node *a = di_node_bytes(&g, "a", 1), *none = di_node_never(), *empty = di_node_empty();
    assert_ptr_equal(di_node_bytes(&g, "", 0), empty);
    assert_ptr_equal(di_node_seq2(&g, a, empty), a);
    assert_ptr_equal(di_node_seq2(&g, empty, empty), empty);
    assert_int_equal(di_node_seq2(&g, a, none)->kind, DI_NODE_NEVER);
    assert_ptr_equal(di_node_alt2(&g, none, a), a);
    assert_int_equal(di_node_alt(&g, NULL, 0)->kind, DI_NODE_NEVER);
    assert_ptr_equal(di_node_repeat(&g, a, 1, 1), a);
    assert_ptr_equal(di_node_repeat(&g, a, 0, 0), empty);
    assert_ptr_equal(di_node_repeat(&g, none, 0, 5), empty);
    assert_int_equal(di_node_repeat(&g, none, 1, 5)->kind, DI_NODE_NEVER);
    const di_node *some = di_node_repeat(&g, a, 2, -1);
    assert_int_equal(some->kind, DI_NODE_REPEAT);
    assert_int_equal(some->min, 2);
    assert_int_equal(some->max, -1);
    assert_int_equal(di_node_until(&g, NULL, 0)->kind, DI_NODE_NEVER);
    assert_int_equal(di_gram_status(&g, NULL), DI_OK);
    di_gram_deinit(&g);
}

static void arrays_are_copied(void **state) {
    (void)state;
    di_gram g = make_gram();
    char word[] = "word";
    const di_node *node = di_node_bytes(&g, word, 4);
    word[0] = 'l';
    assert_memory_equal(node->bytes, "word", 4);
    const di_node *parts[] = {node, di_node_code(&g, 0xE9)};
    const di_node *seq = di_node_seq(&g, parts, 2);
    parts[0] = NULL;
    assert_ptr_equal(seq->nodes[0], node);
    di_graph_edge edge = {0, 1, node};
    bool accepting[] = {false, true};
    const di_node *graph = di_node_graph(&g, 2, accepting, &edge, 1);
    edge.to = 0;
    accepting[1] = false;
    assert_int_equal(graph->edges[0].to, 1);
    assert_true(graph->is_accepting[1]);
    di_gram_deinit(&g);
}

static void rules_keep_their_names(void **state) {
    (void)state;
    di_gram g = make_gram();
    for (int32_t i = 0; i < 40; i++) {
        char name[16];
        int n = snprintf(name, sizeof name, "rule%d", i);
        assert_int_equal(di_gram_rule_add(&g, name, (size_t)n), i);
    }
    assert_string_equal(g.rules[17].name, "rule17");
    assert_string_equal(g.rules[1].name, "rule1");
    assert_null(g.rules[3].node);
    const di_node *node = di_node_rule(&g, 3);
    di_gram_rule_define(&g, 3, node);
    assert_ptr_equal(g.rules[3].node, node);
    assert_int_equal(node->rule, 3);
    di_gram_deinit(&g);
}

static void the_first_failure_sticks(void **state) {
    (void)state;
    di_gram g = make_gram();
    di_error err = {0};
    assert_int_equal(di_gram_fail(&g, DI_ERR_REQUEST, "offset %d: first", 3), DI_ERR_REQUEST);
    assert_int_equal(di_gram_fail(&g, DI_ERR_RANGE, "second"), DI_ERR_REQUEST);
    assert_true(di_gram_has_failed(&g));
    assert_int_equal(di_gram_status(&g, &err), DI_ERR_REQUEST);
    assert_string_equal(err.message, "offset 3: first");
    assert_non_null(di_node_bytes(&g, "a", 1)); /* some node */
    assert_null(di_gram_alloc(&g, 8));
    assert_int_equal(di_gram_rule_add(&g, "x", 1), -1);
    di_gram_deinit(&g);
}

static void memory_and_time_are_bounded(void **state) {
    (void)state;
    di_gram g;
    di_error err = {0};
    di_gram_init(&g, &(di_grammar_limits){.memory_bytes = 1 << 20});
    for (int i = 0; i < 1000000 && !di_gram_has_failed(&g); i++)
        di_node_code(&g, 'a');
    assert_int_equal(di_gram_status(&g, &err), DI_ERR_RANGE);
    assert_contains(err.message, "1 MiB");
    assert_true(g.arena.total_bytes < 4 << 20);
    di_gram_deinit(&g);
    di_gram_init(&g, &(di_grammar_limits){.timeout_ns = 1});
    for (int i = 0; i < 1000 && !di_gram_has_failed(&g); i++)
        di_node_code(&g, 'a');
    assert_int_equal(di_gram_status(&g, &err), DI_ERR_RANGE);
    assert_contains(err.message, "takes longer");
    di_gram_deinit(&g);
}

DI_TEST_GROUP(grammar_ir, cmocka_unit_test(classes_are_sorted_and_joined), cmocka_unit_test(classes_have_no_surrogates),
              cmocka_unit_test(obvious_parts_are_simplified), cmocka_unit_test(arrays_are_copied),
              cmocka_unit_test(rules_keep_their_names), cmocka_unit_test(the_first_failure_sticks),
              cmocka_unit_test(memory_and_time_are_bounded));
