/* The automaton of random small grammars:
 *   it accepts just the texts that a recogniser by spans finds, over all texts up to a length;
 *   from every configuration that is not dead some continuation is accepted;
 *   forgetting all configurations at any moment changes nothing;
 *   with little memory there are errors, and full memory, but no other answers. */
#include "engine/grammar/pda_internal.h"
#include "harness.h"

enum { TEXT_MAX = 8, RULES_MAX = 4, POOL_MAX = 12 };

typedef struct maker {
    di_gram *g;
    uint64_t *rng;
    const di_node *pool[POOL_MAX]; /* nodes to use again */
    int32_t n_pool, n_rules, n_letters;
} maker;

static const di_node *random_word(maker *m) {
    char word[3];
    size_t n = (size_t)di_test_random_range(m->rng, 1, 3);
    for (size_t i = 0; i < n; i++)
        word[i] = (char)('a' + di_test_random_range(m->rng, 0, m->n_letters - 1));
    return di_node_bytes(m->g, word, n);
}

static const di_node *random_node(maker *m, int depth);

static const di_node *random_graph(maker *m, int depth) {
    int32_t n = (int32_t)di_test_random_range(m->rng, 1, 3), n_edges = (int32_t)di_test_random_range(m->rng, 1, 4);
    bool accepting[3];
    di_graph_edge edges[4];
    for (int32_t i = 0; i < n; i++)
        accepting[i] = di_test_random(m->rng) % 2;
    for (int32_t i = 0; i < n_edges; i++) {
        edges[i] = (di_graph_edge){(int32_t)di_test_random_range(m->rng, 0, n - 1),
                                   (int32_t)di_test_random_range(m->rng, 0, n - 1), random_node(m, depth - 1)};
    }
    return di_node_graph(m->g, n, accepting, edges, (size_t)n_edges);
}

static const di_node *random_repeat(maker *m, int depth) {
    static const int32_t bounds[][2] = {{0, 1}, {0, -1}, {1, -1}, {2, 2}, {1, 3}, {0, 4}, {2, -1}, {3, 5}, {0, 70}};
    const int32_t *bound = bounds[di_test_random(m->rng) % DI_COUNT(bounds)];
    const di_node *body = random_node(m, depth - 1);
    /* A long alternative that no text here has makes the automaton count instead of writing copies. */
    if (di_test_random(m->rng) % 2) {
        static const char tail[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
        body = di_node_alt2(m->g, body, di_node_seq2(m->g, body, di_node_bytes(m->g, tail, sizeof tail - 1)));
    }
    return di_node_repeat(m->g, body, bound[0], bound[1]);
}

static const di_node *make_node(maker *m, int depth) {
    const di_node *parts[4];
    size_t n = (size_t)di_test_random_range(m->rng, 2, 3);
    switch (depth > 0 ? di_test_random(m->rng) % 12 : di_test_random(m->rng) % 4) {
    case 0:
    case 1:
        return random_word(m);
    case 2:
        return di_node_class(m->g, &(di_code_range){'a', (uint32_t)('a' + di_test_random(m->rng) % 2)}, 1, false);
    case 3:
    case 4:
        return di_node_rule(m->g, (int32_t)di_test_random_range(m->rng, 0, m->n_rules - 1));
    case 5:
    case 6:
        for (size_t i = 0; i < n; i++)
            parts[i] = random_node(m, depth - 1);
        return di_node_seq(m->g, parts, n);
    case 7:
    case 8:
        for (size_t i = 0; i < n; i++)
            parts[i] = di_test_random(m->rng) % 8 ? random_node(m, depth - 1) : di_node_empty();
        return di_node_alt(m->g, parts, n);
    case 9:
        return random_repeat(m, depth);
    case 10:
        for (size_t i = 0; i < n; i++)
            parts[i] = random_word(m);
        return di_test_random(m->rng) % 2 ? di_node_until(m->g, parts, n - 1) : di_node_free(m->g, parts, n - 1);
    default:
        return random_graph(m, depth);
    }
}

static const di_node *random_node(maker *m, int depth) {
    if (m->n_pool > 0 && di_test_random(m->rng) % 5 == 0)
        return m->pool[di_test_random_range(m->rng, 0, m->n_pool - 1)];
    const di_node *node = make_node(m, depth);
    if (m->n_pool < POOL_MAX)
        m->pool[m->n_pool++] = node;
    return node;
}

static void random_grammar(di_gram *g, uint64_t *rng, int32_t n_letters, size_t memory_bytes) {
    di_gram_init(g, &(di_grammar_limits){.memory_bytes = memory_bytes});
    maker m = {.g = g, .rng = rng, .n_letters = n_letters};
    m.n_rules = (int32_t)di_test_random_range(rng, 1, RULES_MAX);
    for (int32_t i = 0; i < m.n_rules; i++)
        di_gram_rule_add(g, &"pqrs"[i], 1);
    for (int32_t i = 0; i < m.n_rules; i++)
        di_gram_rule_define(g, i, random_node(&m, 3));
    g->root = 0;
    assert_int_equal(di_gram_status(g, NULL), DI_OK);
}

/* ---- the recogniser: where a node's texts that begin at i may end, as bits; rules by the least fixed point ---- */

typedef struct spans {
    const di_gram *g;
    const char *text;
    int32_t n;
    uint32_t ends[RULES_MAX][TEXT_MAX + 1];
} spans;

static uint32_t find_ends(const spans *s, const di_node *node, int32_t i);

static uint32_t ends_from(const spans *s, const di_node *node, uint32_t begins) {
    uint32_t ends = 0;
    for (int32_t i = 0; i <= s->n; i++) {
        if (begins >> i & 1)
            ends |= find_ends(s, node, i);
    }
    return ends;
}

static bool is_word_end(const spans *s, const di_node *node, int32_t i, int32_t end) {
    for (int32_t k = 0; k < node->n; k++) {
        const di_node *word = node->nodes[k];
        if (end - word->n >= i && memcmp(s->text + end - word->n, word->bytes, (size_t)word->n) == 0)
            return true;
    }
    return false;
}

static uint32_t graph_ends(const spans *s, const di_node *node, int32_t i) {
    uint32_t at[3] = {1u << i, 0, 0}, ends = 0;
    for (bool is_new = true; is_new;) {
        is_new = false;
        for (int32_t k = 0; k < node->n; k++) {
            const di_graph_edge *edge = &node->edges[k];
            uint32_t to = at[edge->to] | ends_from(s, edge->label, at[edge->from]);
            is_new = is_new || to != at[edge->to];
            at[edge->to] = to;
        }
    }
    for (int32_t k = 0; k < DI_MIN(node->n_states, 3); k++)
        ends |= node->is_accepting[k] ? at[k] : 0;
    return ends;
}

static uint32_t find_ends(const spans *s, const di_node *node, int32_t i) {
    uint32_t ends = 0, at = 1u << i;
    switch (node->kind) {
    case DI_NODE_NEVER:
        return 0;
    case DI_NODE_EMPTY:
        return at;
    case DI_NODE_BYTES:
    case DI_NODE_SPECIAL:
        return i + node->n <= s->n && memcmp(s->text + i, node->bytes, (size_t)node->n) == 0 ? at << node->n : 0;
    case DI_NODE_CLASS:
        for (int32_t k = 0; i < s->n && k < node->n; k++) {
            if ((uint32_t)s->text[i] >= node->ranges[k].first && (uint32_t)s->text[i] <= node->ranges[k].last)
                ends = at << 1;
        }
        return ends;
    case DI_NODE_SEQ:
        for (int32_t k = 0; k < node->n; k++)
            at = ends_from(s, node->nodes[k], at);
        return at;
    case DI_NODE_ALT:
        for (int32_t k = 0; k < node->n; k++)
            ends |= find_ends(s, node->nodes[k], i);
        return ends;
    case DI_NODE_REPEAT: {
        int32_t max = node->max < 0 ? node->min + s->n + 1 : node->max;
        for (int32_t k = 0; k <= max && at; k++) {
            ends |= k >= node->min ? at : 0;
            at = ends_from(s, node->nodes[0], at);
        }
        return ends;
    }
    case DI_NODE_RULE:
        return s->ends[node->rule][i];
    case DI_NODE_UNTIL:
        for (int32_t end = i; end <= s->n; end++) {
            if (is_word_end(s, node, i, end))
                return 1u << end;
        }
        return 0;
    case DI_NODE_FREE:
        for (int32_t end = i; end <= s->n && !is_word_end(s, node, i, end); end++)
            ends |= 1u << end;
        return ends;
    case DI_NODE_GRAPH:
        return graph_ends(s, node, i);
    }
    return 0;
}

static bool is_text(const di_gram *g, const char *text, int32_t n) {
    spans s = {.g = g, .text = text, .n = n};
    for (bool is_new = true; is_new;) {
        is_new = false;
        for (int32_t rule = 0; rule < g->n_rules; rule++) {
            for (int32_t i = 0; i <= n; i++) {
                uint32_t ends = find_ends(&s, g->rules[rule].node, i);
                is_new = is_new || ends != s.ends[rule][i];
                s.ends[rule][i] = ends;
            }
        }
    }
    return s.ends[g->root][0] >> n & 1;
}

/* ---- properties ---- */

/* false: the grammar has no text, which only the recogniser can confirm up to its length. */
static bool make_automaton(di_pda *p, di_gram *g) {
    di_error err = {0};
    di_status st = di_pda_init(p, g, &err);
    if (st == DI_ERR_REQUEST)
        assert_contains(err.message, "no text");
    else
        di_test_ok(st, &err);
    return st == DI_OK;
}

static di_pda_config walk(di_pda *p, const char *text, int32_t n) {
    di_pda_config at = di_pda_start(p);
    for (int32_t i = 0; i < n && at >= 0; i++)
        at = di_pda_step(p, at, (uint8_t)text[i]);
    return at;
}

typedef struct texts { /* all texts over the letters, in order of length */
    char text[TEXT_MAX + 1];
    int32_t n, n_letters;
} texts;

static bool next_text(texts *t) {
    int32_t i = t->n - 1;
    for (; i >= 0 && t->text[i] == 'a' + t->n_letters - 1; i--)
        t->text[i] = 'a';
    if (i >= 0) {
        t->text[i]++;
        return true;
    }
    t->text[t->n++] = 'a';
    return t->n <= (t->n_letters == 2 ? TEXT_MAX : TEXT_MAX - 2);
}

DI_PROPERTY(automaton_accepts_the_texts_of_the_grammar, 400) {
    uint64_t rng = seed;
    di_gram g;
    di_pda p;
    texts t = {.n_letters = (int32_t)di_test_random_range(&rng, 2, 3)};
    random_grammar(&g, &rng, t.n_letters, 0);
    bool has_texts = make_automaton(&p, &g);
    do {
        bool want = is_text(&g, t.text, t.n);
        di_pda_config at = has_texts ? walk(&p, t.text, t.n) : DI_PDA_DEAD;
        if (at == DI_PDA_FULL || (at >= 0 && di_pda_accepts(&p, at)) != want)
            fail_msg("'%.*s': %s wanted, configuration %d", t.n, t.text, want ? "accepted" : "refused", at);
    } while (next_text(&t));
    di_pda_deinit(&p);
    di_gram_deinit(&g);
}

typedef enum outcome { DEAD_END, COMPLETED, TOO_LONG } outcome;

/* Breadth first over the letters, up to LOOK_AT configurations. */
static outcome complete(di_pda *p, di_pda_config from, const uint8_t *letters, int32_t n_letters) {
    enum { LOOK_AT = 4000 };
    di_pda_config *queue = malloc((LOOK_AT + 8) * sizeof *queue);
    int32_t n = 0;
    outcome found = DEAD_END;
    queue[n++] = from;
    for (int32_t i = 0; i < n && found == DEAD_END; i++) {
        if (di_pda_accepts(p, queue[i]))
            found = COMPLETED;
        else if (n > LOOK_AT)
            found = TOO_LONG;
        for (int32_t k = 0; k < n_letters && found == DEAD_END; k++) {
            di_pda_config to = di_pda_step(p, queue[i], letters[k]);
            /* New configurations have rising numbers, so most that are met again are found near the end. */
            bool was_met = to < 0;
            for (int32_t j = n - 1; j >= 0 && !was_met; j--)
                was_met = queue[j] == to;
            if (!was_met)
                queue[n++] = to;
        }
    }
    free(queue);
    return found;
}

static int64_t n_completed, n_too_long;

DI_PROPERTY(every_living_configuration_can_be_completed, 300) {
    static const uint8_t letters[] = "abc";
    uint64_t rng = seed;
    di_gram g;
    di_pda p;
    random_grammar(&g, &rng, 3, 0);
    if (make_automaton(&p, &g)) {
        for (int run = 0; run < 10; run++) {
            di_pda_config at = di_pda_start(&p);
            for (int i = 0; i < 12 && at >= 0; i++) {
                outcome found = complete(&p, at, letters, 3);
                if (found == DEAD_END)
                    fail_msg("configuration %d after %d bytes leads to no text", at, i);
                n_completed += found == COMPLETED;
                n_too_long += found == TOO_LONG;
                if (found == TOO_LONG)
                    break;
                at = di_pda_step(&p, at, letters[di_test_random(&rng) % 3]);
            }
            assert_int_not_equal(at, DI_PDA_FULL);
        }
    }
    di_pda_deinit(&p);
    di_gram_deinit(&g);
}

DI_PROPERTY(forgetting_changes_nothing, 200) {
    uint64_t rng = seed, again = seed;
    di_gram g, h;
    di_pda p, q;
    random_grammar(&g, &rng, 2, 0);
    random_grammar(&h, &again, 2, 0);
    bool has_texts = make_automaton(&p, &g);
    assert_int_equal(make_automaton(&q, &h), has_texts);
    if (has_texts) {
        for (int run = 0; run < 200; run++) {
            char text[TEXT_MAX];
            int32_t n = (int32_t)di_test_random_range(&rng, 0, TEXT_MAX);
            for (int32_t i = 0; i < n; i++)
                text[i] = (char)('a' + di_test_random(&rng) % 2);
            if (di_test_random(&rng) % 4 == 0) {
                uint32_t generation = q.generation;
                di_pda_flush(&q);
                assert_int_equal(q.n_configs, 0);
                assert_int_not_equal(q.generation, generation);
            }
            di_pda_config a = walk(&p, text, n), b = walk(&q, text, n);
            assert_int_not_equal(a, DI_PDA_FULL);
            assert_int_not_equal(b, DI_PDA_FULL);
            assert_int_equal(a < 0, b < 0);
            assert_int_equal(a >= 0 && di_pda_accepts(&p, a), b >= 0 && di_pda_accepts(&q, b));
        }
    }
    di_pda_deinit(&p);
    di_pda_deinit(&q);
    di_gram_deinit(&g);
    di_gram_deinit(&h);
}

/* The text's configuration; where memory is full, what was learnt is forgotten and the text read again. */
static di_pda_config walk_again(di_pda *p, const char *text, int32_t n) {
    di_pda_config at = walk(p, text, n);
    if (at != DI_PDA_FULL)
        return at;
    di_pda_flush(p);
    return walk(p, text, n);
}

static int64_t n_refused, n_full, n_walked;

DI_PROPERTY(little_memory_gives_no_other_answers, 300) {
    uint64_t rng = seed, again = seed;
    di_gram g, h;
    di_pda p, q;
    di_error err = {0};
    random_grammar(&g, &rng, 2, 0);
    random_grammar(&h, &again, 2, 0);
    bool has_texts = make_automaton(&p, &g);
    /* The nodes are there already; the automaton, or what it learns, gets this much. */
    size_t little = (size_t)di_test_random_range(&rng, 300, 20000);
    bool is_compiled = di_test_random(&rng) % 2;
    if (!is_compiled) {
        h.limits.memory_bytes = little;
        h.arena.total_bytes = 0;
    }
    di_status st = di_pda_init(&q, &h, &err);
    if (is_compiled && st == DI_OK)
        q.private->limit = little;
    n_refused += st == DI_ERR_RANGE;
    if (st != DI_ERR_RANGE)
        assert_int_equal(st, has_texts ? DI_OK : DI_ERR_REQUEST);
    for (int run = 0; run < 100 && st == DI_OK; run++) {
        char text[TEXT_MAX];
        int32_t n = (int32_t)di_test_random_range(&rng, 0, TEXT_MAX);
        for (int32_t i = 0; i < n; i++)
            text[i] = (char)('a' + di_test_random(&rng) % 2);
        di_pda_config a = walk(&p, text, n), b = walk_again(&q, text, n);
        n_full += b == DI_PDA_FULL;
        n_walked += b != DI_PDA_FULL;
        assert_true(!is_compiled || q.private->learned_bytes <= little);
        if (b == DI_PDA_FULL)
            continue;
        assert_int_equal(a < 0, b < 0);
        assert_int_equal(a >= 0 && di_pda_accepts(&p, a), b >= 0 && di_pda_accepts(&q, b));
    }
    di_pda_deinit(&p);
    di_pda_deinit(&q);
    di_gram_deinit(&g);
    di_gram_deinit(&h);
}

/* So that the properties above say something: few searches were given up, and memory did run out. */
static void the_properties_saw_all_cases(void **state) {
    (void)state;
    assert_true(n_completed == 0 || 20 * n_too_long < n_completed);
    assert_true(n_walked < 1000 || (n_refused > 0 && n_full > 0));
}

DI_TEST_GROUP(grammar_pda_properties, cmocka_unit_test(automaton_accepts_the_texts_of_the_grammar),
              cmocka_unit_test(every_living_configuration_can_be_completed),
              cmocka_unit_test(forgetting_changes_nothing), cmocka_unit_test(little_memory_gives_no_other_answers),
              cmocka_unit_test(the_properties_saw_all_cases));
