/* The cache layout: the released sizes, that sections and rings don't overlap, and the view that weights give. */
#include "harness.h"

#include "model/model_internal.h"

static di_config load(const char *name) {
    di_config c;
    di_error err;
    di_strbuf text = {0};
    di_test_ok(di_file_read(di_test_data(name), 1 << 20, &text, &err), &err);
    di_test_ok(di_config_parse(&c, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    return c;
}

static void released_sizes_are_the_check_values(void **state) {
    (void)state;
    di_config c = load("model/released.json");
    di_layout y;
    di_layout_init(&y, &c, DI_NUMERICS_FAITHFUL, true);
    assert_int_equal(y.page_bytes, 113920);
    assert_int_equal(y.page_bytes / DI_PAGE_TOKENS, 890);
    assert_int_equal(y.ring_len, 134);
    assert_int_equal(y.win_bytes, 528);
    assert_int_equal(y.ring_offset[1] - y.ring_offset[0], 70752);
    assert_int_equal(y.pair_ring_len, 7);
    assert_int_equal(y.pair_bytes * 7, 28672);
    assert_int_equal(y.slot_bytes, 3128352);
    /* Layers in order, index keys before main entries: 22,784 bytes a ratio-2 source. */
    assert_int_equal(y.index_offset[2], 0);
    assert_int_equal(y.main_offset[2], 64 * 68);
    assert_int_equal(y.index_offset[8], 22784);
    assert_int_equal(y.index_offset[20], 3 * 22784);
    assert_int_equal(y.main_offset[20], 3 * 22784 + 128 * 68);
    assert_int_equal(y.win_format, DI_KV_FP8);
    assert_int_equal(y.main_format, DI_KV_FP4);
    assert_int_equal(y.index_format, DI_KV_MX4);

    c.fp4_kv = false;
    di_layout_init(&y, &c, DI_NUMERICS_FAITHFUL, true);
    assert_int_equal(y.main_format, DI_KV_FP8);
    assert_int_equal(y.page_bytes, 3 * (64 * 68 + 64 * 528) + 128 * 68 + 128 * 528);

    di_layout_init(&y, &c, DI_NUMERICS_FAITHFUL, false); /* no draft rings */
    assert_int_equal(y.slot_bytes, 40 * 70752 + 3 * 28672);
}

static void exact_numerics_keep_floats(void **state) {
    (void)state;
    di_config c = load("model/coverage.json");
    di_layout y;
    di_layout_init(&y, &c, DI_NUMERICS_EXACT, true);
    assert_int_equal(y.win_format, DI_KV_F32);
    assert_int_equal(y.main_format, DI_KV_F32);
    assert_int_equal(y.index_format, DI_KV_F32);
    /* Sources 2 and 4 with ratio 2, source 5 with ratio 1; D = Di = 128. */
    assert_int_equal(y.page_bytes, (64 + 64 + 128) * 2 * 128 * 4);
    assert_int_equal(y.slot_bytes, 10 * 22 * 512 + 2 * 7 * 1024);
}

typedef struct span {
    size_t begin, end;
} span;

/* Every pair of spans is apart and all are aligned and inside the whole. */
static void check_spans(const span *s, int n, size_t whole) {
    for (int i = 0; i < n; i++) {
        assert_int_equal(s[i].begin % 32, 0);
        assert_true(s[i].end <= whole);
        for (int k = 0; k < i; k++)
            assert_true(s[i].end <= s[k].begin || s[k].end <= s[i].begin);
    }
}

DI_PROPERTY(sections_and_rings_dont_overlap, 50) {
    uint64_t rng = seed;
    di_config c = load("model/coverage.json");
    c.head_dim = 32 * (int32_t)di_test_random_range(&rng, 1, 9);
    c.index_dim = 32 * (int32_t)di_test_random_range(&rng, 1, 5);
    c.window = (int32_t)di_test_random_range(&rng, 1, 200);
    c.draft_block = (int32_t)di_test_random_range(&rng, 1, 9);
    bool with_draft = di_test_random(&rng) & 1, exact = di_test_random(&rng) & 1;
    di_layout y;
    di_layout_init(&y, &c, exact ? DI_NUMERICS_EXACT : DI_NUMERICS_FAITHFUL, with_draft);
    /* A rejected draft must not reach back into the window. */
    assert_true(y.ring_len >= c.window + DI_BACKTRACK && (!with_draft || y.ring_len >= c.window + c.draft_block + 1));
    span page[16], slot[32];
    int n_page = 0, n_slot = 0;
    for (int l = 0; l < c.n_layers + (with_draft ? c.n_draft_layers : 0); l++) {
        slot[n_slot++] = (span){y.ring_offset[l], y.ring_offset[l] + (size_t)y.ring_len * y.win_bytes};
        if (l >= c.n_layers || !di_config_is_kv_source(&c, l))
            continue;
        size_t n = (size_t)(DI_PAGE_TOKENS / c.ratio[l]);
        page[n_page++] =
            (span){y.index_offset[l], y.index_offset[l] + n * di_kv_record_bytes(y.index_format, c.index_dim)};
        page[n_page++] = (span){y.main_offset[l], y.main_offset[l] + n * di_kv_record_bytes(y.main_format, c.head_dim)};
        if (c.ratio[l] == 2) {
            slot[n_slot++] = (span){y.pair_offset[l], y.pair_offset[l] + (size_t)y.pair_ring_len * y.pair_bytes};
        }
    }
    check_spans(page, n_page, y.page_bytes);
    check_spans(slot, n_slot, y.slot_bytes);
}

/* ---- weight map -------------------------------------------------------------------------------------------------- */

static void weight_map_covers_the_model_that_ships(void **state) {
    (void)state;
    di_error err;
    di_config c;
    di_checkpoint *ckpt = NULL;
    const char *dir = di_test_source("models/tiny");
    di_test_ok(di_config_load(&c, dir, &err), &err);
    di_test_ok(di_checkpoint_open(&ckpt, dir, &c, NULL, &err), &err);
    di_arena arena = {0};
    di_weights w;
    di_test_ok(di_weights_bind(&w, &c, ckpt, NULL, true, &arena, &err), &err);

    assert_ptr_equal(w.embed.data, di_checkpoint_find(ckpt, "embed.weight")->data);
    assert_true(w.embed.dtype == DI_BF16 && w.embed.n_out == 6144 && w.embed.n_in == 256 && !w.embed.scale);
    for (int l = 0; l < c.n_layers + c.n_draft_layers; l++) {
        const di_block_weights *b = &w.blocks[l];
        bool draft = l >= c.n_layers;
        assert_true(b->attn_norm && b->ffn_norm && b->q_norm && b->kv_norm && b->sink && b->gate_bias &&
                    b->gate_bias_vl);
        assert_true(b->hc_attn.fn && b->hc_attn.scale && b->hc_attn.base && b->hc_ffn.fn && b->hc_ffn.scale &&
                    b->hc_ffn.base);
        assert_true(b->wq_a.dtype == DI_F8_E4M3 && b->wq_a.n_out == 128 && b->wq_a.n_in == 256 && b->wq_a.scale);
        assert_true(b->wo_a.n_out == 128 && b->wo_a.n_in == 256 && b->wo_b.n_out == 256 && b->wo_b.n_in == 128);
        assert_int_equal(b->n_experts, draft ? 8 : 32);
        assert_int_equal(b->n_experts_tok, draft ? 2 : 4);
        for (int e = 0; e < b->n_experts; e++) {
            assert_true(b->experts[e].w1.dtype == DI_F4_E2M1 && b->experts[e].w1.n_out == 128 &&
                        b->experts[e].w1.n_in == 256);
            assert_true(b->experts[e].w2.n_out == 256 && b->experts[e].w2.n_in == 128 && b->experts[e].w2.scale);
        }
        bool kv = l == 1 || l == 3 || l == 4, index = kv || l == 6, engram = l == 1 || l == 3;
        assert_int_equal(b->c_wkv.data != NULL && b->c_norm != NULL && b->ix_wk.data != NULL && b->ix_k_norm != NULL,
                         kv);
        assert_int_equal(b->c_wgate.data != NULL, l == 1 || l == 3);
        assert_int_equal(b->ix_wq_b.data != NULL && b->ix_weights.data != NULL, index);
        assert_int_equal(b->eg_codes != NULL && b->eg_scales != NULL && b->eg_q != NULL && b->eg_k != NULL, engram);
        assert_int_equal(b->eg_rows, l == 1 ? 49796 : l == 3 ? 50980 : 0);
        assert_int_equal(b->eg_wkv.n_out, engram ? 5 * 256 : 0);
    }
    const di_stored_tensor *w3 = di_checkpoint_find(ckpt, "mtp.1.ffn.experts.7.w3.weight");
    assert_ptr_equal(w.blocks[9].experts[7].w3.data, w3->data);
    assert_true(w.main_proj.n_in == 3 * 256 && w.main_norm && w.draft_norm && w.markov_embed.n_in == 64);
    assert_ptr_equal(w.draft_norm, di_checkpoint_find(ckpt, "mtp.1.norm.weight")->data);
    assert_true(w.confidence.n_out == 1 && w.confidence.n_in == 256 + 64);

    di_test_ok(di_weights_bind(&w, &c, ckpt, NULL, false, &arena, &err), &err);
    assert_null(w.main_proj.data);
    assert_null(w.blocks[8].attn_norm);
    di_arena_deinit(&arena);
    di_checkpoint_close(ckpt);
}

DI_TEST_GROUP(layout, cmocka_unit_test(released_sizes_are_the_check_values),
              cmocka_unit_test(exact_numerics_keep_floats), cmocka_unit_test(sections_and_rings_dont_overlap),
              cmocka_unit_test(weight_map_covers_the_model_that_ships));
