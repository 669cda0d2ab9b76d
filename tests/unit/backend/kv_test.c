/* Writers of the caches: record bytes as the golden files have them, where records and entries go, pooled pairs. */
#include "golden.h"
#include "ops_rig.h"

static const di_limits limits = {.rows_max = 64,
                                 .n_in_max = 512,
                                 .head_dim = 512,
                                 .n_heads = 1,
                                 .index_dim = 128,
                                 .index_heads = 1,
                                 .keys_max = 8,
                                 .entries_max = 64};

/* Rows of one sequence at positions pos0 .. in state slot 1, with a block table. */
typedef struct batch {
    int32_t pos[64], seq[64], none[64];
    int32_t row0, n, pos0, slot;
    di_rows rows;
} batch;

static void batch_init(batch *b, int32_t pos0, int32_t n, const int32_t *blocks) {
    memset(b, 0, sizeof *b);
    for (int32_t i = 0; i < n; i++)
        b->pos[i] = pos0 + i;
    b->n = n;
    b->pos0 = pos0;
    b->slot = 1;
    b->rows = (di_rows){.n_rows = n,
                        .n_seqs = 1,
                        .pos = b->pos,
                        .seq = b->seq,
                        .win_lo = b->none,
                        .win_hi = b->none,
                        .row0 = &b->row0,
                        .n = &b->n,
                        .pos0 = &b->pos0,
                        .slot = &b->slot,
                        .blocks = blocks,
                        .blocks_stride = 8};
}

/* ---- bytes of records -------------------------------------------------------------------------------------------- */

static void record_sizes_are_the_specs(void **state) {
    (void)state;
    assert_int_equal(di_kv_record_bytes(DI_KV_FP8, 512), 528);
    assert_int_equal(di_kv_record_bytes(DI_KV_FP4, 512), 288);
    assert_int_equal(di_kv_record_bytes(DI_KV_MX4, 128), 68);
    assert_int_equal(di_kv_data_bytes(DI_KV_FP8, 512), 512);
    assert_int_equal(di_kv_data_bytes(DI_KV_FP4, 512), 256);
    assert_int_equal(di_kv_data_bytes(DI_KV_MX4, 128), 64);
    assert_int_equal(di_kv_record_bytes(DI_KV_F32, 512), 2048);
}

static golden_tensor part_of(const golden *g, const char *name, const char *part) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", name, part);
    return golden_get(g, full);
}

/* Encodes the values that a golden file has for the last rows of `name` as window records. */
static void check_window(ops_rig *r, const golden *g, const char *name) {
    golden_tensor raw = part_of(g, name, ""), codes = part_of(g, name, ".fp8"), scales = part_of(g, name, ".fp8_scale");
    int64_t n = raw.shape[0], d = raw.shape[1], first = codes.shape[0] - n, n_scales = d / 32;
    assert_string_equal(raw.dtype, "BF16");
    int64_t bytes = d + n_scales;
    uint8_t *records = ops_rig_alloc((size_t)(n * bytes));
    di_kv_encode_args a = {.x = {DI_BF16, n, d, d, (void *)raw.data, NULL}, .format = DI_KV_FP8, .records = records};
    assert_int_equal(di_cpu_ops.kv_encode(r->stream, &a), DI_OK);
    for (int64_t i = 0; i < n; i++) {
        assert_memory_equal(records + i * bytes, codes.data + (first + i) * d, (size_t)d);
        assert_memory_equal(records + i * bytes + d, scales.data + (first + i) * n_scales, (size_t)n_scales);
    }
    free(records);
}

static void window_records_have_the_golden_bytes(void **state) {
    (void)state;
    static const char *const files[] = {"tiny/faithful.2.safetensors", "tiny/faithful.5.safetensors",
                                        "real-shape/faithful.0.safetensors", "real-shape/faithful.1.safetensors"};
    static const char *const names[] = {"layers.0.window_kv_raw", "layers.3.window_kv_raw", "layers.4.window_kv_raw",
                                        "mtp.0.window_kv_raw", "mtp.1.window_kv_raw"};
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &limits);
    for (size_t f = 0; f < DI_COUNT(files); f++) {
        golden *g = golden_open(di_test_data(files[f]));
        for (size_t i = 0; i < DI_COUNT(names); i++)
            check_window(&r, g, names[i]);
        golden_close(g);
    }
    ops_rig_close(&r);
}

/* Stores the golden entries of `name` in pages of 5 entries with a gap before the section and after it, and compares
 * every byte of the pages: main entries record by record, index keys with a block's scales behind all its codes. */
static void check_entries(ops_rig *r, const golden *g, const char *name, di_kv_format format) {
    golden_tensor raw = part_of(g, name, ""), codes = part_of(g, name, ".fp4"), scales = part_of(g, name, ".fp4_scale");
    enum { PER_BLOCK = 5, BLOCKS = 8, GAP = 32 };
    static const int32_t table[BLOCKS] = {6, 2, 7, 0, 3, 5, 1, 4};
    int64_t n = raw.shape[0], d = raw.shape[1], n_data = d / 2, n_scale = codes.shape[0] ? scales.shape[1] : 0;
    int64_t first = codes.shape[0] - n;
    assert_true(n <= PER_BLOCK * BLOCKS);
    batch b;
    batch_init(&b, 0, (int32_t)n, table);
    size_t page_bytes = (size_t)(GAP + PER_BLOCK * (n_data + n_scale) + GAP), total = page_bytes * BLOCKS;
    uint8_t *pages = ops_rig_alloc(total), *want = ops_rig_alloc(total);
    memset(pages, 0xA5, total);
    memset(want, 0xA5, total);
    int32_t idx[64];
    for (int32_t i = 0; i < n; i++) {
        idx[i] = (int32_t)n - 1 - i; /* entry order is the list's, not the rows' */
        uint8_t *section = want + page_bytes * (size_t)table[idx[i] / PER_BLOCK] + GAP;
        int64_t at = idx[i] % PER_BLOCK, split = PER_BLOCK * n_data;
        uint8_t *data = section + at * (format == DI_KV_MX4 ? n_data : n_data + n_scale);
        uint8_t *scale = format == DI_KV_MX4 ? section + split + at * n_scale : data + n_data;
        memcpy(data, codes.data + (first + i) * n_data, (size_t)n_data);
        memcpy(scale, scales.data + (first + i) * n_scale, (size_t)n_scale);
    }
    di_page_store_args a = {.rows = &b.rows,
                            .entries = {.n = (int32_t)n, .row = b.seq, .seq = b.seq, .idx = idx},
                            .x = {DI_BF16, n, d, d, (void *)raw.data, NULL},
                            .dst = {pages, page_bytes, GAP, PER_BLOCK, format, (int32_t)d}};
    assert_int_equal(di_cpu_ops.page_store(r->stream, &a), DI_OK);
    assert_memory_equal(pages, want, total);
    free(pages);
    free(want);
}

static void entries_have_the_golden_bytes_at_their_places(void **state) {
    (void)state;
    static const char *const files[] = {"tiny/faithful.2.safetensors", "tiny/faithful.5.safetensors",
                                        "real-shape/faithful.0.safetensors", "real-shape/faithful.1.safetensors"};
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &limits);
    for (size_t f = 0; f < DI_COUNT(files); f++) {
        golden *g = golden_open(di_test_data(files[f]));
        check_entries(&r, g, "layers.1.compressed_kv_raw", DI_KV_FP4);
        check_entries(&r, g, "layers.3.compressed_kv_raw", DI_KV_FP4);
        check_entries(&r, g, "layers.1.index_k_raw", DI_KV_MX4);
        check_entries(&r, g, "layers.3.index_k_raw", DI_KV_MX4);
        golden_close(g);
    }
    ops_rig_close(&r);
}

static void exact_records_are_the_floats(void **state) {
    (void)state;
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 1, &limits);
    float x[3 * 40], records[3 * 32];
    for (int i = 0; i < 3 * 40; i++)
        x[i] = (float)i / 7 - 3;
    di_kv_encode_args a = {.x = {DI_F32, 3, 32, 40, x, NULL}, .format = DI_KV_F32, .records = (uint8_t *)records};
    assert_int_equal(di_cpu_ops.kv_encode(r.stream, &a), DI_OK);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(records + 32 * i, x + 40 * i, 32 * sizeof(float));
    ops_rig_close(&r);
}

/* ---- rings ------------------------------------------------------------------------------------------------------- */

enum { RING = 5, RECORD = 3 };

/* Stores n rows from pos0 on, then checks which position each element holds (-1: untouched). */
static void check_ring(int32_t pos0, int32_t n, int32_t store_from, const int32_t want[RING]) {
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &limits);
    batch b;
    batch_init(&b, pos0, n, NULL);
    uint8_t slots[3 * (RING * RECORD + 4)], records[64 * RECORD];
    memset(slots, 0xFF, sizeof slots);
    for (int32_t i = 0; i < n; i++)
        for (int k = 0; k < RECORD; k++)
            records[i * RECORD + k] = (uint8_t)(3 * (pos0 + i) + k);
    di_ring ring = {slots, RING * RECORD + 4, 2, RECORD, RING};
    di_ring_store_args a = {.rows = &b.rows, .records = records, .store_from = &store_from, .ring = ring};
    assert_int_equal(di_cpu_ops.ring_store(r.stream, &a), DI_OK);
    for (size_t i = 0; i < sizeof slots; i++) {
        int64_t at = (int64_t)i - (RING * RECORD + 4) - 2; /* byte in the ring of slot 1 */
        int32_t p = at >= 0 && at < RING * RECORD ? want[at / RECORD] : -1;
        assert_int_equal(slots[i], p < 0 ? 0xFF : (uint8_t)(3 * p + at % RECORD));
    }
    ops_rig_close(&r);
}

static void ring_takes_positions_modulo_its_length(void **state) {
    (void)state;
    check_ring(3, 3, 0, (const int32_t[RING]){5, -1, -1, 3, 4});
    check_ring(0, 1, 0, (const int32_t[RING]){0, -1, -1, -1, -1});
}

static void ring_skips_rows_before_store_from(void **state) {
    (void)state;
    check_ring(3, 3, 5, (const int32_t[RING]){5, -1, -1, -1, -1});
    check_ring(3, 3, 6, (const int32_t[RING]){-1, -1, -1, -1, -1});
}

static void ring_keeps_the_newest_of_a_long_chunk(void **state) {
    (void)state;
    check_ring(1, 40, 0, (const int32_t[RING]){40, 36, 37, 38, 39});
}

/* ---- pooled pairs ------------------------------------------------------------------------------------------------ */

/* Positions 4..8 in a batch: pairs (4,5) and (6,7) close; or 5..7: pair (4,5) has its first half in the ring. */
static void pairs_pool_by_softmax_of_their_gates(void **state) {
    (void)state;
    enum { D = 32, N = 5 };
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 2, &limits);
    uint64_t rng = 5;
    float cg[N * 2 * D], out[2 * D], again[2 * D];
    for (int i = 0; i < N * 2 * D; i++)
        cg[i] = (float)(12 * di_test_random_unit(&rng) - 6);
    cg[3] = 200; /* far apart: the weights are 1 and 0 */
    cg[2 * D + 3] = -200;
    float slots[2][7 * 2 * D];
    memset(slots, 0xFF, sizeof slots);
    di_ring ring = {(uint8_t *)slots, sizeof slots[0], 0, 2 * D * sizeof(float), 7};
    batch b;
    batch_init(&b, 4, N, NULL);
    const int32_t rows[2] = {1, 3}, seq[2] = {0, 0}, idx[2] = {2, 3};
    di_compress_pool_args a = {
        .rows = &b.rows, .entries = {2, rows, seq, idx}, .cg = cg, .ring = ring, .out = {DI_F32, 2, D, D, out, NULL}};
    assert_int_equal(di_cpu_ops.compress_pool(r.stream, &a), DI_OK);
    for (int e = 0; e < 2; e++) {
        for (int c = 0; c < D; c++) {
            const float *first = cg + 2 * e * 2 * D, *second = first + 2 * D;
            double w = 1 / (1 + exp((double)second[c] - first[c]));
            double want = w * first[D + c] + (1 - w) * second[D + c];
            assert_true(fabs(out[e * D + c] - want) <= 12 * 0x1p-23 * 6);
        }
    }
    assert_true(out[3] == cg[D + 3]);

    memcpy(slots[1] + 4 * 2 * D, cg, 2 * D * sizeof(float)); /* position 4 into element 4 */
    batch_init(&b, 5, N - 1, NULL);
    const int32_t later[2] = {0, 2};
    a.entries.row = later;
    a.cg = cg + 2 * D;
    a.out.data = again;
    assert_int_equal(di_cpu_ops.compress_pool(r.stream, &a), DI_OK);
    assert_memory_equal(again, out, sizeof out);
    ops_rig_close(&r);
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static void bad_shapes_are_refused(void **state) {
    (void)state;
    ops_rig r;
    ops_rig_open(&r, di_cpu_level_best(), 1, &limits);
    float x[64] = {0};
    uint8_t bytes[4096];
    batch b;
    batch_init(&b, 0, 1, (const int32_t[8]){0});
    di_kv_encode_args enc = {.x = {DI_F32, 1, 48, 48, x, NULL}, .format = DI_KV_FP8, .records = bytes};
    assert_int_equal(di_cpu_ops.kv_encode(r.stream, &enc), DI_ERR_SHAPE); /* 48 is no multiple of 32 */
    di_page_store_args page = {.rows = &b.rows,
                               .entries = {1, b.seq, b.seq, b.seq},
                               .x = {DI_F32, 1, 64, 64, x, NULL},
                               .dst = {bytes, 2048, 0, 8, DI_KV_FP4, 32}};
    assert_int_equal(di_cpu_ops.page_store(r.stream, &page), DI_ERR_SHAPE); /* 64 values into entries of 32 */
    di_compress_pool_args pool = {.rows = &b.rows,
                                  .entries = {1, b.seq, b.seq, b.seq},
                                  .cg = x,
                                  .ring = {bytes, 2048, 0, 64, 4},
                                  .out = {DI_F32, 1, 32, 32, x, NULL}};
    assert_int_equal(di_cpu_ops.compress_pool(r.stream, &pool), DI_ERR_SHAPE); /* ring records are too small */
    di_ring_store_args ring = {.rows = &b.rows, .records = bytes, .store_from = b.seq, .ring = {bytes, 64, 0, 8, 0}};
    assert_int_equal(di_cpu_ops.ring_store(r.stream, &ring), DI_ERR_SHAPE); /* a ring of no elements */
    ops_rig_close(&r);
}

DI_TEST_GROUP(kv, cmocka_unit_test(record_sizes_are_the_specs), cmocka_unit_test(window_records_have_the_golden_bytes),
              cmocka_unit_test(entries_have_the_golden_bytes_at_their_places),
              cmocka_unit_test(exact_records_are_the_floats), cmocka_unit_test(ring_takes_positions_modulo_its_length),
              cmocka_unit_test(ring_skips_rows_before_store_from),
              cmocka_unit_test(ring_keeps_the_newest_of_a_long_chunk),
              cmocka_unit_test(pairs_pool_by_softmax_of_their_gates), cmocka_unit_test(bad_shapes_are_refused));
