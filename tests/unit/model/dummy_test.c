/* Made-up weights: the streams' check values, first bytes and checksums of tensors at the released shapes, and that
 * slices, threads and whole checkpoints give the same bytes. */
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

/* CRC-32 as zlib computes it. */
static uint32_t crc32_update(uint32_t crc, const uint8_t *p, size_t n) {
    static uint32_t table[256];
    if (!table[1]) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++)
                c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
            table[i] = c;
        }
    }
    crc = ~crc;
    for (size_t i = 0; i < n; i++)
        crc = table[(crc ^ p[i]) & 255] ^ crc >> 8;
    return ~crc;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static uint64_t stream_word(uint64_t seed, const char *name, uint64_t j) {
    di_config c = {.dummy_seed = seed, .hc_mult = 4};
    di_tensor_spec spec = {.dtype = DI_I8, .n_dims = 2, .shape = {1, INT64_MAX / 4}}; /* stored as the stream is */
    snprintf(spec.name, sizeof spec.name, "%s", name);
    uint64_t w;
    di_dummy_fill(&c, &spec, 8 * j, 8, (uint8_t *)&w);
    return w;
}

static void streams_are_the_check_values(void **state) {
    (void)state;
    static const struct {
        uint64_t seed;
        const char *name;
        uint64_t first, second, far;
    } rows[] = {
        {0, "embed.weight", 0xc52f96aeb458aaba, 0x0f1420e178b7f61e, 0x04ce297d15e15642},
        {1, "embed.weight", 0x5b774fe0e03a101e, 0xd3c827bbe85daa1c, 0xc1808028ceab92aa},
        {1, "layers.0.attn.wq_a.weight", 0x784ea48101e9134b, 0x9472b42f4e5adb96, 0x92d574b15417dd95},
        {UINT64_MAX, "norm.weight", 0x49f0c51a7ee17e05, 0x9b633434868c772b, 0x3a91d56c2b741582},
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        assert_true(stream_word(rows[i].seed, rows[i].name, 0) == rows[i].first);
        assert_true(stream_word(rows[i].seed, rows[i].name, 1) == rows[i].second);
        assert_true(stream_word(rows[i].seed, rows[i].name, 10000000000u) == rows[i].far);
    }
}

/* ---- tensors at the released shapes ------------------------------------------------------------------------------ */

typedef struct expected {
    const char *name, *first; /* the first stored bytes in hexadecimal */
    uint32_t crc;
} expected;

static const expected small_tensors[] = {
    {"layers.0.hc_attn_fn", "0008103b00aa483c00b07bbb0076403c", 0xa549ebb3},
    {"layers.0.hc_attn_scale", "4074063fc09eed3e40b7083f", 0xadfb7cda},
    {"layers.0.hc_attn_base", "c0c70240404f0fc0607009c0c093f4bf", 0x16212f82},
    {"layers.0.hc_ffn_base", "4074f4bf403e0440400efebfc05bf7bf", 0x022d27b9},
    {"layers.0.attn.attn_sink", "00d055be00482e3f001c33bf00ca6f3f", 0x6c5f6755},
    {"layers.0.attn.wq_a.weight", "4b53c941c1c44e58d6db5a4e4fd452d4", 0xd0165214},
    {"layers.0.attn.wq_a.scale", "75747475757575767575767476747475", 0x6545f192},
    {"layers.0.attn.q_norm.weight", "b33fcc3fae3fa03fdf3fba3fdf3fdd3f", 0x89f83724},
    {"layers.0.attn.wo_b.scale", "73737273727473747272727272737372", 0x0b21fbdd},
    {"layers.0.ffn.experts.3.w1.weight", "31c3410de7b61dd00e717ec48b7f2356", 0xce12dd5e},
    {"layers.0.ffn.experts.3.w1.scale", "79787879787978797a79797a787a7a79", 0x5af9ee1a},
    {"layers.0.ffn.experts.3.w2.weight", "1b30966f5a56e74d8012336766860fa8", 0x7d0570ba},
    {"layers.0.ffn.experts.3.w2.scale", "72727273727172717272727171727272", 0x0e963460},
    {"layers.0.ffn.gate.weight", "7c3d8e3cc5bb30bc923cc7bc4e3d53bc", 0xb20e86b1},
    {"layers.0.ffn.gate.bias", "00dc23bd0032633d004c6abd00c27c3d", 0x3b9bb264},
    {"layers.0.ffn.gate.bias_vl", "00527d3d00e0683c00407a3b009ca4bc", 0x4efada7b},
    {"layers.0.ffn.shared_experts.w2.weight", "4958c142d1515b44d0c75ccac44bca5d", 0xf0d09d29},
    {"layers.0.ffn.shared_experts.w2.scale", "6e6e6d6e6d6e6d6f6e6e6d6d6e6f6e6f", 0x754003c8},
    {"layers.1.engram.embed.scale", "7a7a7a7a79797a797a787a7a7879787a", 0x770e22e6},
    {"layers.1.engram.q_weight", "6c3f7a3f853f873f8c3f8d3f6b3f6c3f", 0x8d3bdf07},
    {"layers.1.engram.wkv.scale", "76757675767776767676767777767677", 0x0cbcd1a4},
    {"layers.3.attn.compressor.wkv.weight", "8cbb093b18bbf73cb33bfdbc123cedbc", 0x390320c7},
    {"layers.3.attn.indexer.wq_b.scale", "76767576767575757676777676767775", 0xa12cdeb9},
    {"layers.3.attn.indexer.weights_proj.weight", "ddbb513c1bbcdc3cd13bf9bb323c2ebc", 0x0cb22632},
    {"norm.weight", "663f803f903f713f643f7a3f6c3f933f", 0x8c821b35},
    {"mtp.0.main_proj.scale", "74757473737574747475737475757373", 0x837a2a20},
    {"mtp.1.hc_ffn_base", "806afdbf20b20bc0c0cde43fc0d50bc0", 0xc99c07f2},
    {"mtp.1.markov_head.embed.weight", "833f5ebeadbe593f08bed0bfa3bfb2bf", 0xc3e61e63},
    {"mtp.1.markov_head.head.weight", "b1bdd0bdd93c86bc9d3ca2bcb0bcde3d", 0xa0a321e8},
    {"mtp.1.confidence_head.proj.weight", "303c59bbbcbaeabbac3bdb3ad5ba313c", 0x820f12e3},
};

static const expected large_tensors[] = {
    {"embed.weight", "1e3e3abee03f773f1cbe5dbebb3fc8bf", 0xffef95db},
    {"layers.1.engram.embed.weight", "5448dcd253c35aca5d405657c6574155", 0xed5e8bea},
    {"head.weight", "e2bd7f3d52bdc23c533d01bcbb3c57bc", 0x0b1154d5},
};

typedef struct lookup {
    const char *name;
    di_tensor_spec spec;
    bool found;
} lookup;

static di_status lookup_spec(void *user, const di_tensor_spec *spec) {
    lookup *l = user;
    if (strcmp(spec->name, l->name) == 0) {
        l->spec = *spec;
        l->found = true;
    }
    return DI_OK;
}

static size_t spec_bytes(const di_tensor_spec *spec) {
    size_t n = 1;
    for (int32_t i = 0; i < spec->n_dims; i++)
        n *= (size_t)spec->shape[i];
    return di_dtype_bytes(spec->dtype, n);
}

static void check_tensors(const expected *rows, size_t n_rows) {
    di_config c = load("real-shape/config.json");
    for (size_t r = 0; r < n_rows; r++) {
        lookup l = {.name = rows[r].name};
        assert_int_equal(di_tensors_each(&c, lookup_spec, &l), DI_OK);
        if (!l.found)
            fail_msg("no tensor '%s'", l.name);
        size_t n = spec_bytes(&l.spec), head = DI_MIN(n, 16);
        uint8_t *data = malloc(n);
        assert_non_null(data);
        di_dummy_fill(&c, &l.spec, 0, n, data);
        char hex[40];
        for (size_t i = 0; i < head; i++)
            snprintf(hex + 2 * i, 3, "%02x", data[i]);
        assert_string_equal(hex, rows[r].first);
        if (crc32_update(0, data, n) != rows[r].crc)
            fail_msg("'%s': checksum differs", l.name);
        free(data);
    }
}

static void small_tensors_have_their_checksums(void **state) {
    (void)state;
    check_tensors(small_tensors, DI_COUNT(small_tensors));
}

static void large_tensors_have_their_checksums(void **state) {
    (void)state;
    check_tensors(large_tensors, DI_COUNT(large_tensors));
}

/* ---- slices and checkpoints -------------------------------------------------------------------------------------- */

DI_PROPERTY(slices_are_pieces_of_the_whole, 60) {
    uint64_t rng = seed;
    static di_checkpoint *ckpt; /* read-only after it is made */
    static di_config c;
    if (!ckpt) {
        di_error err;
        c = load("model/coverage.json");
        c.dummy_seed = 77;
        di_test_ok(di_checkpoint_open(&ckpt, "", &c, &(di_checkpoint_options){.dummy = true, .n_threads = 2}, &err),
                   &err);
    }
    for (int i = 0; i < 20; i++) {
        int64_t k = di_test_random_range(&rng, 0, (int64_t)di_checkpoint_count(ckpt) - 1);
        const di_stored_tensor *t = di_checkpoint_at(ckpt, (size_t)k);
        di_tensor_spec spec = {.dtype = t->dtype, .n_dims = t->n_dims};
        snprintf(spec.name, sizeof spec.name, "%s", t->name);
        memcpy(spec.shape, t->shape, sizeof spec.shape);
        size_t first = (size_t)di_test_random_range(&rng, 0, (int64_t)t->n_bytes - 1);
        size_t n = (size_t)di_test_random_range(&rng, 0, DI_MIN(300, (int64_t)(t->n_bytes - first)));
        uint8_t out[302];
        memset(out, 0xA5, sizeof out);
        di_dummy_fill(&c, &spec, first, n, out + 1);
        assert_memory_equal(out + 1, t->data + first, n);
        assert_true(out[0] == 0xA5 && out[n + 1] == 0xA5);
    }
}

typedef struct progress {
    uint64_t done, total;
} progress;

static void note_progress(void *user, uint64_t done, uint64_t total) {
    progress *p = user;
    assert_true(done > p->done && done <= total);
    *p = (progress){done, total};
}

static void checkpoint_is_the_same_with_any_threads(void **state) {
    (void)state;
    di_error err;
    di_config c = load("model/coverage.json");
    di_checkpoint *one = NULL, *three = NULL;
    progress p = {0};
    di_checkpoint_options opt = {.dummy = true, .n_threads = 1, .progress = note_progress, .user = &p};
    di_test_ok(di_checkpoint_open(&one, "", &c, &opt, &err), &err);
    assert_true(p.total >= di_checkpoint_bytes(one) && p.done == p.total);
    di_test_ok(di_checkpoint_open(&three, "", &c, &(di_checkpoint_options){.dummy = true, .n_threads = 3}, &err), &err);
    assert_true(di_checkpoint_is_dummy(one));
    assert_int_equal(di_checkpoint_count(one), 1238);
    assert_int_equal(di_checkpoint_shards(one), 0);
    for (size_t i = 0; i < di_checkpoint_count(one); i++) {
        const di_stored_tensor *a = di_checkpoint_at(one, i), *b = di_checkpoint_at(three, i);
        assert_memory_equal(a->data, b->data, a->n_bytes);
        assert_int_equal((uintptr_t)a->data % 64, 0);
        if (a->dtype == DI_F8_E8M0)
            assert_null(memchr(a->data, 255, a->n_bytes));
        if (a->dtype == DI_F8_E4M3) {
            for (size_t k = 0; k < a->n_bytes; k++)
                assert_true((a->data[k] & 0x7F) != 0x7F);
        }
    }
    di_checkpoint_close(one);
    di_checkpoint_close(three);
}

static void weights_that_dont_fit_say_how_much_is_missing(void **state) {
    (void)state;
    di_error err;
    di_config c = load("model/coverage.json");
    c.engram_rows[0] = (int64_t)1 << 44; /* two petabytes */
    di_checkpoint *ckpt = NULL;
    assert_int_equal(di_checkpoint_open(&ckpt, "", &c, &(di_checkpoint_options){.dummy = true}, &err), DI_ERR_MEMORY);
    assert_null(ckpt);
    assert_int_equal(di_status_exit(err.code), 4);
    assert_contains(err.message, "need 23221");
    assert_contains(err.message, "available");
}

DI_TEST_GROUP(dummy, cmocka_unit_test(streams_are_the_check_values),
              cmocka_unit_test(small_tensors_have_their_checksums), cmocka_unit_test(slices_are_pieces_of_the_whole),
              cmocka_unit_test(checkpoint_is_the_same_with_any_threads),
              cmocka_unit_test(weights_that_dont_fit_say_how_much_is_missing));
DI_TEST_GROUP(long_dummy, cmocka_unit_test(large_tensors_have_their_checksums));
