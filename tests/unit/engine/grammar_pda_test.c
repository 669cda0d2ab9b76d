/* The automaton on grammars built by hand: every kind of node, borders of UTF-8, counted repeats, left recursion of
 * each kind, ambiguity, deep recursion, what is refused, memory that runs out. Texts that are to be accepted follow
 * from the meaning of the nodes (ir.h). */
#include "engine/grammar/pda.h"
#include "harness.h"

typedef struct rig {
    di_gram g;
    di_pda p;
} rig;

static void begin(rig *r) {
    di_gram_init(&r->g, NULL);
    r->g.root = di_gram_rule_add(&r->g, "root", 4);
}

static void compile(rig *r, const di_node *root) {
    di_error err = {0};
    di_gram_rule_define(&r->g, r->g.root, root);
    di_test_ok(di_pda_init(&r->p, &r->g, &err), &err);
    /* The nodes may go now. */
    di_gram_deinit(&r->g);
}

static void end(rig *r) {
    di_pda_deinit(&r->p);
    di_gram_deinit(&r->g);
}

static const di_node *bytes(rig *r, const char *s) {
    return di_node_bytes(&r->g, s, strlen(s));
}

static di_pda_config walk(di_pda *p, const char *text, size_t n) {
    di_pda_config at = di_pda_start(p);
    for (size_t i = 0; i < n && at >= 0; i++)
        at = di_pda_step(p, at, (uint8_t)text[i]);
    return at;
}

static bool accepts_n(rig *r, const char *text, size_t n) {
    di_pda_config at = walk(&r->p, text, n);
    assert_int_not_equal(at, DI_PDA_FULL);
    return at >= 0 && di_pda_accepts(&r->p, at);
}

static bool accepts(rig *r, const char *text) {
    return accepts_n(r, text, strlen(text));
}

static bool is_alive(rig *r, const char *text) {
    return walk(&r->p, text, strlen(text)) >= 0;
}

static bool accepts_code(rig *r, uint32_t code) {
    char utf8[4];
    return accepts_n(r, utf8, di_utf8_encode(code, utf8));
}

/* ---- kinds of nodes ---- */

static void bytes_sequences_and_alternatives(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *words[] = {bytes(&r, "on"), bytes(&r, "one"), bytes(&r, "two"),
                              di_node_seq2(&r.g, bytes(&r, "one"), di_node_code(&r.g, 0x20AC)), bytes(&r, "one")};
    compile(&r,
            di_node_seq2(&r.g, di_node_alt(&r.g, words, DI_COUNT(words)), di_node_repeat(&r.g, bytes(&r, "!"), 0, 1)));
    assert_true(accepts(&r, "on") && accepts(&r, "one") && accepts(&r, "two") && accepts(&r, "one€"));
    assert_true(accepts(&r, "on!") && accepts(&r, "one!") && accepts(&r, "one€!"));
    assert_false(accepts(&r, "") || accepts(&r, "o") || accepts(&r, "tw") || accepts(&r, "one\xE2\x82"));
    assert_true(is_alive(&r, "o") && is_alive(&r, "one\xE2\x82"));
    assert_false(is_alive(&r, "one!!") || is_alive(&r, "two€") || is_alive(&r, "x"));
    end(&r);
}

static void the_empty_text_alone(void **state) {
    (void)state;
    rig r;
    begin(&r);
    compile(&r, di_node_empty());
    assert_true(accepts(&r, ""));
    assert_false(is_alive(&r, "a"));
    end(&r);
}

static void graphs_walk_from_the_first_state(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* (ab)* with a walk out of the loop by any label: 0 -a-> 1 -b-> 0, 1 -(x|yy)-> 2, 2 -empty-> 0 */
    const di_graph_edge edges[] = {{0, 1, bytes(&r, "a")},
                                   {1, 0, bytes(&r, "b")},
                                   {1, 2, di_node_alt2(&r.g, bytes(&r, "x"), bytes(&r, "yy"))},
                                   {2, 0, di_node_empty()}};
    compile(&r, di_node_graph(&r.g, 3, (const bool[]){true, false, false}, edges, DI_COUNT(edges)));
    assert_true(accepts(&r, "") && accepts(&r, "abab") && accepts(&r, "axab") && accepts(&r, "ayyax"));
    assert_false(accepts(&r, "a") || accepts(&r, "ay") || is_alive(&r, "ayx") || is_alive(&r, "b"));
    end(&r);
}

static void classes_read_whole_code_points(void **state) {
    (void)state;
    static const uint32_t borders[] = {0,      0x7F,   0x80,    0x7FF,   0x800,   0xFFF,   0x1000,   0xD7FF,  0xE000,
                                       0xFFFD, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF};
    for (size_t low = 0; low < DI_COUNT(borders); low++) {
        for (size_t high = low; high < DI_COUNT(borders); high++) {
            rig r;
            begin(&r);
            compile(&r, di_node_class(&r.g, &(di_code_range){borders[low], borders[high]}, 1, false));
            for (size_t i = 0; i < DI_COUNT(borders); i++) {
                for (int32_t by = -1; by <= 1; by++) {
                    int64_t code = (int64_t)borders[i] + by;
                    if (code < 0 || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
                        continue;
                    assert_int_equal(accepts_code(&r, (uint32_t)code), code >= borders[low] && code <= borders[high]);
                }
            }
            end(&r);
        }
    }
}

static void ill_formed_bytes_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {
        "\x80",         "\xBF",         "\xC0\x80",         "\xC1\xBF",         "\xE0\x9F\xBF",
        "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5",
        "\xFF",         "\xC3\xC3",     "\xE2\x82\x28"};
    rig r;
    for (int kind = 0; kind < 2; kind++) {
        begin(&r);
        compile(&r,
                kind ? di_node_free(&r.g, NULL, 0) : di_node_repeat(&r.g, di_node_class(&r.g, NULL, 0, true), 0, -1));
        for (size_t i = 0; i < DI_COUNT(bad); i++)
            assert_false(is_alive(&r, bad[i]));
        assert_true(accepts(&r, "") && accepts(&r, "a\u00e9\u20ac\U0001F600\U0010FFFF\uD7FF\uE000"));
        assert_true(accepts_n(&r, "\0", 1));
        assert_false(accepts(&r, "\xF0\x9F\x98"));
        assert_true(is_alive(&r, "\xF0\x9F\x98"));
        end(&r);
    }
}

/* A class of many small ranges against the ranges themselves, at every code point. */
static void scattered_classes_are_exact(void **state) {
    (void)state;
    enum { RANGES = 900 };
    di_code_range ranges[RANGES];
    for (uint32_t i = 0; i < RANGES; i++)
        ranges[i] = (di_code_range){i * 1237 + i % 7, i * 1237 + i % 7 + (i * i) % 131};
    rig r;
    begin(&r);
    const di_node *node = di_node_class(&r.g, ranges, RANGES, false);
    compile(&r, node);
    uint32_t at = 0;
    for (uint32_t code = 0; code <= 0x10FFFF; code += code % 3 + 1) {
        if (code >= 0xD800 && code <= 0xDFFF)
            continue;
        while (at < RANGES && ranges[at].last < code)
            at++;
        bool want = at < RANGES && ranges[at].first <= code;
        if (accepts_code(&r, code) != want)
            fail_msg("U+%04X: %s wanted", code, want ? "accepted" : "refused");
    }
    end(&r);
}

/* ---- until, free, special tokens ---- */

static void until_stops_at_the_first_end(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *ends[] = {bytes(&r, "aab"), bytes(&r, "é")};
    compile(&r, di_node_seq2(&r.g, di_node_until(&r.g, ends, 2), bytes(&r, ".")));
    assert_true(accepts(&r, "aab.") && accepts(&r, "aaaab.") && accepts(&r, "aaxé.") && accepts(&r, "a.aab."));
    assert_false(is_alive(&r, "aabx") || is_alive(&r, "é\u00e9") || accepts(&r, "aab") || is_alive(&r, "\xC3."));
    assert_true(is_alive(&r, "\U0001F600\xC3"));
    end(&r);
}

static void free_text_has_none_of_the_words(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *words[] = {bytes(&r, "<x>"), di_node_special(&r.g, "<|y|>", 5)};
    compile(&r, di_node_free(&r.g, words, 2));
    assert_true(accepts(&r, "") && accepts(&r, "<x") && accepts(&r, "<<x <|y|<x") && accepts(&r, "é<|y"));
    assert_false(is_alive(&r, "<x>") || is_alive(&r, "a<<x>") || is_alive(&r, "<|y<|y|>"));
    for (int32_t i = 0; i < di_pda_n_specials(&r.p); i++)
        assert_int_equal(di_pda_step_special(&r.p, di_pda_start(&r.p), i), DI_PDA_DEAD);
    end(&r);
}

static void specials_come_as_tokens_or_spelled(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *ends[] = {di_node_special(&r.g, "</t>", 4), bytes(&r, "ab")};
    const di_node *call = di_node_special(&r.g, "<c>", 3);
    compile(&r, di_node_seq2(&r.g, di_node_until(&r.g, ends, 2), call));
    assert_int_equal(di_pda_n_specials(&r.p), 2);
    int32_t think = -1, tool = -1;
    for (int32_t i = 0; i < 2; i++) {
        size_t len;
        const char *text = di_pda_special(&r.p, i, &len);
        if (len == 4 && memcmp(text, "</t>", 4) == 0)
            think = i;
        if (len == 3 && memcmp(text, "<c>", 3) == 0)
            tool = i;
    }
    assert_true(think >= 0 && tool >= 0);
    assert_true(accepts(&r, "x</t><c>") && accepts(&r, "ab<c>"));
    di_pda_config start = di_pda_start(&r.p);
    assert_int_equal(di_pda_step_special(&r.p, start, tool), DI_PDA_DEAD);
    di_pda_config after = di_pda_step_special(&r.p, start, think);
    assert_true(after >= 0 && after == walk(&r.p, "</t>", 4));
    /* A part of an end is open; the token ends the text all the same. */
    assert_int_equal(di_pda_step_special(&r.p, walk(&r.p, "x</t", 4), think), after);
    /* Not within a code point. */
    assert_int_equal(di_pda_step_special(&r.p, walk(&r.p, "\xC3", 1), think), DI_PDA_DEAD);
    di_pda_config done = di_pda_step_special(&r.p, after, tool);
    assert_true(done >= 0 && di_pda_accepts(&r.p, done));
    assert_int_equal(di_pda_step_special(&r.p, done, tool), DI_PDA_DEAD);
    end(&r);
}

/* The token whose spelling would bring another end before it is over is no end. */
static void tokens_that_hold_an_earlier_end_are_refused(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *ends[] = {di_node_special(&r.g, "b>", 2), bytes(&r, "ab")};
    compile(&r, di_node_until(&r.g, ends, 2));
    assert_true(di_pda_step_special(&r.p, di_pda_start(&r.p), 0) >= 0);
    assert_int_equal(di_pda_step_special(&r.p, walk(&r.p, "a", 1), 0), DI_PDA_DEAD);
    end(&r);
}

/* ---- counted repeats ---- */

static void expect_counts(int32_t min, int32_t max, bool is_wide) {
    rig r;
    begin(&r);
    const di_node *body = bytes(&r, "ab");
    if (is_wide) /* code points of several bytes, of which the body is not small */
        body = di_node_alt2(&r.g, body, di_node_class(&r.g, &(di_code_range){0x3040, 0x30FF}, 1, false));
    compile(&r, di_node_repeat(&r.g, body, min, max));
    di_pda_config at = di_pda_start(&r.p);
    int32_t last = max < 0 ? min + 3 : max;
    for (int32_t i = 0; i <= last; i++) {
        assert_int_equal(di_pda_accepts(&r.p, at), i >= min);
        at = di_pda_step(&r.p, at, 'a');
        if (i == max) {
            assert_int_equal(at, DI_PDA_DEAD);
            break;
        }
        assert_true(at >= 0 && !di_pda_accepts(&r.p, at));
        at = di_pda_step(&r.p, at, 'b');
        assert_true(at >= 0);
    }
    end(&r);
}

static void repeats_are_exact_at_their_bounds(void **state) {
    (void)state;
    static const int32_t bounds[][2] = {{0, 1},    {0, 2},       {1, 2},    {2, 2},    {0, -1},   {1, -1},
                                        {2, -1},   {23, 24},     {25, 25},  {0, 100},  {99, 101}, {100, -1},
                                        {0, 5000}, {5000, 5000}, {1, 5000}, {5000, -1}};
    for (size_t i = 0; i < DI_COUNT(bounds); i++) {
        expect_counts(bounds[i][0], bounds[i][1], false);
        expect_counts(bounds[i][0], bounds[i][1], true);
    }
}

static void nested_counts_multiply(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *inner = di_node_repeat(&r.g, bytes(&r, "a"), 300, 300);
    compile(&r, di_node_repeat(&r.g, inner, 300, 300));
    assert_true(di_pda_bytes(&r.p) < 64 << 10);
    di_pda_config at = di_pda_start(&r.p);
    for (int32_t i = 0; i < 300 * 300; i++) {
        assert_true(at >= 0 && !di_pda_accepts(&r.p, at));
        at = di_pda_step(&r.p, at, 'a');
    }
    assert_true(di_pda_accepts(&r.p, at));
    assert_int_equal(di_pda_step(&r.p, at, 'a'), DI_PDA_DEAD);
    end(&r);
}

/* A body with the empty text: any number up to the bound. */
static void empty_bodies_need_not_come(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *body = di_node_repeat(&r.g, bytes(&r, "a"), 0, 60);
    compile(&r, di_node_seq2(&r.g, di_node_repeat(&r.g, body, 70, 80), bytes(&r, ".")));
    assert_true(accepts(&r, ".") && accepts(&r, "a."));
    char text[4802];
    memset(text, 'a', sizeof text);
    text[4800] = '.';
    assert_true(accepts_n(&r, text, 4801));
    text[4800] = 'a';
    text[4801] = '.';
    assert_false(accepts_n(&r, text, 4802));
    end(&r);
}

/* Which repeats were meant is open at every byte; only the fewest matter. */
static void ambiguous_counts_stay_small(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *body = di_node_alt2(&r.g, bytes(&r, "a"), bytes(&r, "aa"));
    compile(&r, di_node_repeat(&r.g, body, 0, 20000));
    di_pda_config at = di_pda_start(&r.p);
    for (int32_t i = 0; i < 40000; i++) {
        assert_true(at >= 0 && di_pda_accepts(&r.p, at));
        at = di_pda_step(&r.p, at, 'a');
    }
    assert_true(di_pda_accepts(&r.p, at));
    assert_int_equal(di_pda_step(&r.p, at, 'a'), DI_PDA_DEAD);
    assert_true(di_pda_bytes(&r.p) < 16 << 20);
    end(&r);
}

/* ---- recursion ---- */

static void direct_left_recursion(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* root = root "+" term | term; term = term "*" "n" | "n" | "(" root ")" */
    int32_t term = di_gram_rule_add(&r.g, "term", 4);
    const di_node *root_rule = di_node_rule(&r.g, r.g.root), *term_rule = di_node_rule(&r.g, term);
    const di_node *sum[] = {root_rule, bytes(&r, "+"), term_rule},
                  *group[] = {bytes(&r, "("), root_rule, bytes(&r, ")")};
    const di_node *terms[] = {di_node_seq2(&r.g, term_rule, bytes(&r, "*n")), bytes(&r, "n"),
                              di_node_seq(&r.g, group, 3)};
    di_gram_rule_define(&r.g, term, di_node_alt(&r.g, terms, 3));
    compile(&r, di_node_alt2(&r.g, di_node_seq(&r.g, sum, 3), term_rule));
    assert_true(accepts(&r, "n") && accepts(&r, "n+n*n+n") && accepts(&r, "(n+n)*n+((n))"));
    assert_false(accepts(&r, "") || is_alive(&r, "+") || accepts(&r, "n+") || is_alive(&r, "n)") || is_alive(&r, "nn"));
    /* Long sums take no more room than short ones. */
    di_pda_config at = walk(&r.p, "n+n", 3);
    int32_t n_configs = r.p.n_configs;
    for (int32_t i = 0; i < 100000; i++) {
        at = di_pda_step(&r.p, at, '+');
        at = di_pda_step(&r.p, at, 'n');
    }
    assert_true(di_pda_accepts(&r.p, at) && r.p.n_configs <= n_configs + 2);
    end(&r);
}

static void indirect_left_recursion(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* root = b "x" | "s"; b = c "y" | "t"; c = root "z" | b "w" */
    int32_t b = di_gram_rule_add(&r.g, "b", 1), c = di_gram_rule_add(&r.g, "c", 1);
    const di_node *root_rule = di_node_rule(&r.g, r.g.root), *b_rule = di_node_rule(&r.g, b),
                  *c_rule = di_node_rule(&r.g, c);
    di_gram_rule_define(&r.g, b, di_node_alt2(&r.g, di_node_seq2(&r.g, c_rule, bytes(&r, "y")), bytes(&r, "t")));
    di_gram_rule_define(
        &r.g, c,
        di_node_alt2(&r.g, di_node_seq2(&r.g, root_rule, bytes(&r, "z")), di_node_seq2(&r.g, b_rule, bytes(&r, "w"))));
    compile(&r, di_node_alt2(&r.g, di_node_seq2(&r.g, b_rule, bytes(&r, "x")), bytes(&r, "s")));
    assert_true(accepts(&r, "s") && accepts(&r, "tx") && accepts(&r, "szyx") && accepts(&r, "twyx"));
    assert_true(accepts(&r, "txzyx") && accepts(&r, "twywyxzyx"));
    assert_false(accepts(&r, "t") || accepts(&r, "sz") || is_alive(&r, "sx") || is_alive(&r, "tz") ||
                 is_alive(&r, "x"));
    end(&r);
}

static void hidden_left_recursion(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* root = gap root "x" | "s"; gap = " "* : what stands before the recursion may be empty */
    int32_t gap = di_gram_rule_add(&r.g, "gap", 3);
    di_gram_rule_define(&r.g, gap, di_node_repeat(&r.g, bytes(&r, " "), 0, -1));
    const di_node *parts[] = {di_node_rule(&r.g, gap), di_node_rule(&r.g, r.g.root), bytes(&r, "x")};
    compile(&r, di_node_alt2(&r.g, di_node_seq(&r.g, parts, 3), bytes(&r, "s")));
    assert_true(accepts(&r, "s") && accepts(&r, "sx") && accepts(&r, "  sxx") && accepts(&r, " sx"));
    assert_false(accepts(&r, " s") || is_alive(&r, "x") || is_alive(&r, "s "));
    assert_true(is_alive(&r, "   "));
    end(&r);
}

static void counted_left_recursion(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* root = (root "a"){60,61} | "s" */
    const di_node *body = di_node_seq2(&r.g, di_node_rule(&r.g, r.g.root), bytes(&r, "a"));
    compile(&r, di_node_alt2(&r.g, di_node_repeat(&r.g, body, 60, 61), bytes(&r, "s")));
    char text[130];
    for (int32_t i = 0; i < 64; i++)
        memcpy(text + 2 * i, "sa", 2);
    assert_true(accepts_n(&r, text, 1) && accepts_n(&r, text, 120) && accepts_n(&r, text, 122));
    assert_false(accepts_n(&r, text, 118) || accepts_n(&r, text, 2));
    /* 60 times, then once more on top: the first "root" is itself 60 times "sa". */
    text[120] = 'a';
    assert_true(walk(&r.p, text, 121) >= 0);
    end(&r);
}

/* root = root root | "a" and kin: as many ways to read a text as there are trees. */
static void ambiguous_grammars_stay_small(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        rig r;
        begin(&r);
        const di_node *self = di_node_rule(&r.g, r.g.root), *a = bytes(&r, "a");
        const di_node *three[] = {self, self, self}, *sum[] = {self, bytes(&r, "a"), self};
        const di_node *all[] = {di_node_seq2(&r.g, self, self), kind ? di_node_seq(&r.g, three, 3) : a,
                                kind == 2 ? di_node_seq(&r.g, sum, 3) : a, a};
        compile(&r, di_node_alt(&r.g, all, DI_COUNT(all)));
        di_pda_config at = di_pda_start(&r.p);
        for (int32_t i = 0; i < 20000; i++) {
            at = di_pda_step(&r.p, at, 'a');
            assert_true(at >= 0 && di_pda_accepts(&r.p, at));
        }
        /* Two in a row are as one; three leave stacks of every height open, which share all but their tops. */
        assert_true(kind ? di_pda_bytes(&r.p) < 12 << 20 : r.p.n_configs < 20);
        end(&r);
    }
}

static void right_recursion_needs_no_stack(void **state) {
    (void)state;
    rig r;
    begin(&r);
    /* root = "a" root | "b" rest; rest = "a" root | empty */
    int32_t rest = di_gram_rule_add(&r.g, "rest", 4);
    const di_node *again = di_node_seq2(&r.g, bytes(&r, "a"), di_node_rule(&r.g, r.g.root));
    di_gram_rule_define(&r.g, rest, di_node_alt2(&r.g, again, di_node_empty()));
    compile(&r, di_node_alt2(&r.g, again, di_node_seq2(&r.g, bytes(&r, "b"), di_node_rule(&r.g, rest))));
    di_pda_config at = di_pda_start(&r.p);
    for (int32_t i = 0; i < 100000 && at >= 0; i++)
        at = di_pda_step(&r.p, at, "aab"[i % 3]);
    assert_true(at >= 0);
    assert_true(r.p.n_configs < 20);
    end(&r);
}

static void centre_recursion_counts_exactly(void **state) {
    (void)state;
    enum { DEPTH = 30000 };
    rig r;
    begin(&r);
    const di_node *parts[] = {bytes(&r, "("), di_node_rule(&r.g, r.g.root), bytes(&r, ")")};
    compile(&r, di_node_repeat(&r.g, di_node_seq(&r.g, parts, 3), 0, -1));
    di_pda_config at = di_pda_start(&r.p);
    for (int32_t i = 0; i < DEPTH && at >= 0; i++)
        at = di_pda_step(&r.p, at, '(');
    for (int32_t i = 0; i < DEPTH && at >= 0; i++) {
        assert_false(di_pda_accepts(&r.p, at));
        at = di_pda_step(&r.p, at, ')');
    }
    assert_true(at >= 0 && di_pda_accepts(&r.p, at));
    assert_int_equal(di_pda_step(&r.p, at, ')'), DI_PDA_DEAD);
    assert_true(accepts(&r, "(()())()") && !accepts(&r, "(()"));
    end(&r);
}

/* Two ways to open, of different length: sets of stacks of many depths. */
static void stacks_of_many_depths_are_joined(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *self = di_node_rule(&r.g, r.g.root);
    const di_node *one[] = {bytes(&r, "("), self, bytes(&r, ")")}, *two[] = {bytes(&r, "(("), self, bytes(&r, ")")};
    const di_node *all[] = {di_node_seq(&r.g, one, 3), di_node_seq(&r.g, two, 3), di_node_empty()};
    compile(&r, di_node_alt(&r.g, all, 3));
    char text[302];
    for (size_t n_open = 0; n_open <= 150; n_open += 15) {
        memset(text, '(', n_open);
        memset(text + n_open, ')', n_open + 1);
        for (size_t n_closed = 0; n_closed <= n_open + 1; n_closed++) {
            bool want = 2 * n_closed >= n_open && n_closed <= n_open;
            assert_int_equal(accepts_n(&r, text, n_open + n_closed), want);
        }
    }
    end(&r);
}

/* ---- shapes of grammars ---- */

/* Nodes that hold each other twice are as many texts as 2 to the depth, and still one automaton of that depth. */
static void shared_nodes_are_not_copied(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *node = bytes(&r, "abcdefghijklmnopqrstuvwxyz");
    for (int i = 0; i < 60; i++)
        node = di_node_alt2(&r.g, di_node_seq2(&r.g, node, node), bytes(&r, "!"));
    compile(&r, node);
    assert_true(accepts(&r, "!") && accepts(&r, "!!"));
    assert_true(di_pda_bytes(&r.p) < 1 << 20);
    end(&r);
}

static void deep_nodes_are_no_danger(void **state) {
    (void)state;
    rig r;
    begin(&r);
    const di_node *node = bytes(&r, "x");
    for (int i = 0; i < 30000; i++)
        node = i % 3 == 0   ? di_node_seq2(&r.g, node, bytes(&r, "y"))
               : i % 3 == 1 ? di_node_alt2(&r.g, node, bytes(&r, "z"))
                            : di_node_repeat(&r.g, node, 0, 1);
    compile(&r, node);
    assert_true(accepts(&r, "") && accepts(&r, "z") && accepts(&r, "zy") && accepts(&r, "zyyy") && accepts(&r, "yyy"));
    assert_false(is_alive(&r, "xx") || accepts(&r, "xy"));
    /* The innermost node is within ten thousand sequences. */
    char text[10002] = "x";
    memset(text + 1, 'y', 10001);
    assert_true(accepts_n(&r, text, 10001));
    assert_false(accepts_n(&r, text, 10000) || accepts_n(&r, text, 10002));
    end(&r);
}

static void large_enumerations_stand_in_few_places(void **state) {
    (void)state;
    enum { WORDS = 20000 };
    rig r;
    begin(&r);
    const di_node **words = malloc(WORDS * sizeof *words);
    for (int i = 0; i < WORDS; i++) {
        char word[32];
        snprintf(word, sizeof word, "word number %d", (i * 7919) % WORDS);
        words[i] = bytes(&r, word);
    }
    compile(&r, di_node_alt(&r.g, words, WORDS));
    free(words);
    assert_true(accepts(&r, "word number 0") && accepts(&r, "word number 19999") && accepts(&r, "word number 777"));
    assert_false(accepts(&r, "word number ") || is_alive(&r, "word number 20000") || is_alive(&r, "word number 00"));
    end(&r);
}

/* ---- refusals ---- */

static void expect_refusal(rig *r, const di_node *root, di_status want, const char *part) {
    di_error err = {0};
    di_gram_rule_define(&r->g, r->g.root, root);
    assert_int_equal(di_pda_init(&r->p, &r->g, &err), want);
    assert_int_equal(err.code, want);
    assert_contains(err.message, part);
    end(r);
}

static void undefined_rules_are_named(void **state) {
    (void)state;
    rig r;
    begin(&r);
    int32_t missing = di_gram_rule_add(&r.g, "digits", 6);
    expect_refusal(&r, di_node_alt2(&r.g, bytes(&r, "a"), di_node_rule(&r.g, missing)), DI_ERR_REQUEST, "'digits'");
    begin(&r);
    missing = di_gram_rule_add(&r.g, "digits", 6);
    expect_refusal(&r, di_node_repeat(&r.g, di_node_rule(&r.g, missing), 0, 1000), DI_ERR_REQUEST, "'digits'");
    begin(&r);
    expect_refusal(&r, NULL, DI_ERR_REQUEST, "'root'");
    /* What isn't reached may be missing. */
    begin(&r);
    di_gram_rule_add(&r.g, "unused", 6);
    compile(&r, bytes(&r, "a"));
    assert_true(accepts(&r, "a"));
    end(&r);
}

static void grammars_without_text_are_refused(void **state) {
    (void)state;
    rig r;
    begin(&r);
    expect_refusal(&r, di_node_never(), DI_ERR_REQUEST, "no text");
    begin(&r);
    expect_refusal(&r, di_node_seq2(&r.g, bytes(&r, "a"), di_node_rule(&r.g, r.g.root)), DI_ERR_REQUEST, "no text");
    begin(&r);
    expect_refusal(&r, di_node_rule(&r.g, r.g.root), DI_ERR_REQUEST, "no text");
    begin(&r);
    const di_node *never = di_node_graph(&r.g, 2, (const bool[]){false, true}, NULL, 0);
    expect_refusal(&r, never, DI_ERR_REQUEST, "no text");
}

/* A part without text doesn't count as a beginning of one. */
static void dead_parts_are_dead_from_their_first_byte(void **state) {
    (void)state;
    rig r;
    begin(&r);
    int32_t endless = di_gram_rule_add(&r.g, "endless", 7);
    di_gram_rule_define(&r.g, endless, di_node_seq2(&r.g, bytes(&r, "b"), di_node_rule(&r.g, endless)));
    const di_node *parts[] = {bytes(&r, "a"), di_node_seq2(&r.g, bytes(&r, "c"), di_node_rule(&r.g, endless)),
                              di_node_rule(&r.g, endless)};
    compile(&r, di_node_alt(&r.g, parts, 3));
    assert_true(accepts(&r, "a"));
    assert_false(is_alive(&r, "c") || is_alive(&r, "b"));
    end(&r);
}

static void large_grammars_end_in_an_error(void **state) {
    (void)state;
    di_error err = {0};
    rig r;
    di_gram_init(&r.g, &(di_grammar_limits){.memory_bytes = 1 << 20});
    r.g.root = di_gram_rule_add(&r.g, "root", 4);
    enum { N = 100000 };
    char *text = malloc(N);
    memset(text, 'a', N);
    di_gram_rule_define(&r.g, r.g.root, di_node_bytes(&r.g, text, N));
    free(text);
    assert_int_equal(di_pda_init(&r.p, &r.g, &err), DI_ERR_RANGE);
    assert_contains(err.message, "1 MiB");
    end(&r);
    /* Every rule begins with every rule, and a hundred thousand of them would each begin with all. */
    di_gram_init(&r.g, &(di_grammar_limits){.memory_bytes = 16 << 20});
    r.g.root = di_gram_rule_add(&r.g, "root", 4);
    for (int32_t i = 1; i < 3000; i++)
        di_gram_rule_add(&r.g, "rule", 4);
    for (int32_t i = 0; i < 3000; i++) {
        const di_node *all[] = {di_node_seq2(&r.g, di_node_rule(&r.g, (i + 1) % 3000), bytes(&r, "x")),
                                di_node_seq2(&r.g, di_node_rule(&r.g, (i * 7 + 3) % 3000), bytes(&r, "y")),
                                bytes(&r, "z")};
        di_gram_rule_define(&r.g, i, di_node_alt(&r.g, all, 3));
    }
    assert_int_equal(di_pda_init(&r.p, &r.g, &err), DI_ERR_RANGE);
    end(&r);
}

/* ---- memory ---- */

static void full_memory_is_told_and_flushed(void **state) {
    (void)state;
    di_error err = {0};
    rig r;
    di_gram_init(&r.g, &(di_grammar_limits){.memory_bytes = 256 << 10});
    r.g.root = di_gram_rule_add(&r.g, "root", 4);
    di_gram_rule_define(&r.g, r.g.root, di_node_repeat(&r.g, bytes(&r, "ab"), 90000, 90000));
    di_test_ok(di_pda_init(&r.p, &r.g, &err), &err);
    di_gram_deinit(&r.g);
    size_t bytes_before = di_pda_bytes(&r.p), n_max = 0;
    di_pda_config at = di_pda_start(&r.p);
    size_t n = 0;
    for (; at >= 0; n++)
        at = di_pda_step(&r.p, at, (uint8_t) "ab"[n % 2]);
    assert_int_equal(at, DI_PDA_FULL);
    n_max = n;
    assert_true(di_pda_bytes(&r.p) < bytes_before + (300 << 10));
    /* What was learnt still holds, and the same step is full again. */
    char *text = calloc(n_max + 2, 1);
    for (size_t i = 0; i <= n_max; i++)
        text[i] = "ab"[i % 2];
    assert_true(walk(&r.p, text, n_max - 1) >= 0);
    assert_int_equal(walk(&r.p, text, n_max), DI_PDA_FULL);
    assert_int_equal(walk(&r.p, "aa", 2), DI_PDA_DEAD);
    uint32_t generation = r.p.generation;
    di_pda_flush(&r.p);
    assert_int_not_equal(r.p.generation, generation);
    assert_int_equal(r.p.n_configs, 0);
    assert_true(walk(&r.p, text, n_max - 1) >= 0);
    free(text);
    end(&r);
}

static void tiny_memory_is_full_at_once(void **state) {
    (void)state;
    di_error err = {0};
    rig r;
    begin(&r);
    compile(&r, bytes(&r, "a"));
    end(&r);
    di_gram_init(&r.g, &(di_grammar_limits){.memory_bytes = 100});
    r.g.root = di_gram_rule_add(&r.g, "root", 4);
    di_gram_rule_define(&r.g, r.g.root, bytes(&r, "a"));
    assert_int_equal(di_pda_init(&r.p, &r.g, &err), DI_ERR_RANGE);
    end(&r);
}

DI_TEST_GROUP(grammar_pda, cmocka_unit_test(bytes_sequences_and_alternatives), cmocka_unit_test(the_empty_text_alone),
              cmocka_unit_test(graphs_walk_from_the_first_state), cmocka_unit_test(classes_read_whole_code_points),
              cmocka_unit_test(ill_formed_bytes_are_refused), cmocka_unit_test(scattered_classes_are_exact),
              cmocka_unit_test(until_stops_at_the_first_end), cmocka_unit_test(free_text_has_none_of_the_words),
              cmocka_unit_test(specials_come_as_tokens_or_spelled),
              cmocka_unit_test(tokens_that_hold_an_earlier_end_are_refused),
              cmocka_unit_test(repeats_are_exact_at_their_bounds), cmocka_unit_test(nested_counts_multiply),
              cmocka_unit_test(empty_bodies_need_not_come), cmocka_unit_test(ambiguous_counts_stay_small),
              cmocka_unit_test(direct_left_recursion), cmocka_unit_test(indirect_left_recursion),
              cmocka_unit_test(hidden_left_recursion), cmocka_unit_test(counted_left_recursion),
              cmocka_unit_test(ambiguous_grammars_stay_small), cmocka_unit_test(right_recursion_needs_no_stack),
              cmocka_unit_test(centre_recursion_counts_exactly), cmocka_unit_test(stacks_of_many_depths_are_joined),
              cmocka_unit_test(shared_nodes_are_not_copied), cmocka_unit_test(deep_nodes_are_no_danger),
              cmocka_unit_test(large_enumerations_stand_in_few_places), cmocka_unit_test(undefined_rules_are_named),
              cmocka_unit_test(grammars_without_text_are_refused),
              cmocka_unit_test(dead_parts_are_dead_from_their_first_byte),
              cmocka_unit_test(large_grammars_end_in_an_error), cmocka_unit_test(full_memory_is_told_and_flushed),
              cmocka_unit_test(tiny_memory_is_full_at_once));
