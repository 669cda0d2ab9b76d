/* The writers of the caches on the NVIDIA backend against the CPU reference: the same bytes, and none elsewhere. */
#include "twin.h"

enum { SEQS_MAX = 5, ROWS_MAX = 300 };

static di_limits limits(void) {
    return (di_limits){.rows_max = 512, .n_in_max = 65536, .n_out_max = 64, .head_dim = 1024, .index_dim = 128};
}

/* Moderate values, zeros, ties of the formats, NaN of both signs. */
static void act_harden(uint64_t *rng, di_act *x) {
    const float values[10] = {0.0f, -0.0f, 0.25f, -1.25f, 6.0f, 0x1p-12f, -5.0f, 1e30f, 0x1.8p-126f, 2688.0f};
    for (int64_t i = 0; i < x->n_rows * x->n_cols / 10; i++) {
        int64_t at =
            di_test_random_range(rng, 0, x->n_rows - 1) * x->stride + di_test_random_range(rng, 0, x->n_cols - 1);
        uint64_t k = di_test_random(rng) % 12;
        float v = k < 10 ? values[k] : di_f32_from_bits(k == 10 ? 0x7FC00000u : 0xFFC00000u);
        if (x->dtype == DI_F32)
            ((float *)x->data)[at] = v;
        else
            ((uint16_t *)x->data)[at] = di_f32_to_bf16(v);
    }
}

static di_act random_x(ops_mem *mem, uint64_t *rng, int64_t n_rows, int64_t n) {
    const int64_t more[3] = {0, 8, 1};
    di_act x =
        ops_act_random(mem, rng, di_test_random(rng) % 3 ? DI_BF16 : DI_F32, n_rows, n + more[di_test_random(rng) % 3]);
    x.n_cols = n;
    if (n_rows && di_test_random(rng) & 1)
        act_harden(rng, &x);
    return x;
}

DI_PROPERTY(kv_encode_has_the_reference_bytes, 2) {
    uint64_t rng = seed;
    const int64_t widths[6] = {512, 128, 64, 32, 96, 1024};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 48; i++) {
        ops_mem mem = {0};
        di_kv_format format = (di_kv_format)(i % 4);
        int64_t n = format == DI_KV_F32 && i % 8 == 4 ? 77 : widths[i / 4 % 6];
        int64_t n_rows = di_test_random_range(&rng, 1, ROWS_MAX);
        size_t n_bytes = (size_t)n_rows * di_kv_record_bytes(format, n);
        uint8_t *want = ops_mem_take(&mem, n_bytes), *got = ops_mem_take(&mem, n_bytes);
        di_kv_encode_args a = {random_x(&mem, &rng, n_rows, n), format, want}, d = a;
        d.x = twin_act_in(&t, &a.x);
        d.records = twin_out(&t, n_bytes);
        assert_int_equal(di_cpu_ops.kv_encode(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->kv_encode(t.stream, &d), DI_OK);
        twin_back(&t, got, d.records, n_bytes);
        twin_same(got, want, n_bytes, "kv_encode");
        if (format != DI_KV_F32) {
            d.x.n_cols = n - 1;
            assert_int_equal(t.gpu.ops->kv_encode(t.stream, &d), DI_ERR_SHAPE);
        }
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

/* Rows of a few sequences at any positions, slots and blocks in any order. */
typedef struct scene {
    di_rows rows;
    int32_t pos[ROWS_MAX], seq[ROWS_MAX];
    int32_t row0[SEQS_MAX], n[SEQS_MAX], pos0[SEQS_MAX], slot[SEQS_MAX], store_from[SEQS_MAX];
    int32_t *blocks;
    int32_t n_blocks;
} scene;

static void scene_make(scene *s, ops_mem *mem, uint64_t *rng) {
    memset(s, 0, sizeof *s);
    s->rows.n_seqs = (int32_t)di_test_random_range(rng, 1, SEQS_MAX);
    s->rows.blocks_stride = 8;
    s->n_blocks = s->rows.n_seqs * (int32_t)s->rows.blocks_stride;
    s->blocks = ops_mem_take(mem, (size_t)s->n_blocks * 4);
    for (int32_t i = 0; i < s->n_blocks; i++) { /* every block once, shuffled */
        int32_t j = (int32_t)di_test_random_range(rng, 0, i);
        s->blocks[i] = s->blocks[j];
        s->blocks[j] = i;
    }
    for (int32_t q = 0; q < s->rows.n_seqs; q++) {
        s->row0[q] = s->rows.n_rows;
        s->n[q] = (int32_t)di_test_random_range(rng, q ? 0 : 1, q % 2 ? 60 : 3);
        s->pos0[q] = (int32_t)di_test_random_range(rng, 0, 900);
        s->slot[q] = (q * 3 + 1) % SEQS_MAX;
        s->store_from[q] = s->pos0[q] + (int32_t)di_test_random_range(rng, -2, 20);
        for (int32_t i = 0; i < s->n[q]; i++) {
            s->pos[s->rows.n_rows] = s->pos0[q] + i;
            s->seq[s->rows.n_rows++] = q;
        }
    }
    s->rows.pos = s->rows.win_lo = s->rows.win_hi = s->pos;
    s->rows.seq = s->seq;
    s->rows.row0 = s->row0;
    s->rows.n = s->n;
    s->rows.pos0 = s->pos0;
    s->rows.slot = s->slot;
    s->rows.blocks = s->blocks;
}

/* A ring in slots of poison; aligned: 16, 4 or 1. */
static di_ring ring_make(ops_mem *mem, uint64_t *rng, size_t record_bytes, size_t aligned, size_t *n_bytes) {
    di_ring r = {.record_bytes = record_bytes, .ring_len = (int32_t)di_test_random_range(rng, 1, 40)};
    r.offset = aligned * (size_t)di_test_random_range(rng, 0, 9);
    r.slot_bytes = DI_ROUND_UP(r.offset + record_bytes * (size_t)r.ring_len, aligned);
    *n_bytes = r.slot_bytes * SEQS_MAX;
    r.slots = ops_mem_take(mem, *n_bytes);
    memset(r.slots, TWIN_POISON, *n_bytes);
    return r;
}

DI_PROPERTY(ring_store_has_the_reference_bytes, 2) {
    uint64_t rng = seed;
    const size_t bytes[6] = {528, 30720, 4096, 68, 33, 2048};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 24; i++) {
        ops_mem mem = {0};
        scene s;
        scene_make(&s, &mem, &rng);
        size_t record = bytes[i % 6], n_records = record * (size_t)s.rows.n_rows, n_ring;
        di_ring_store_args a = {.rows = &s.rows, .store_from = s.store_from};
        a.ring = ring_make(&mem, &rng, record, record % 16 ? record % 4 ? 1 : 4 : 16, &n_ring);
        uint8_t *records = ops_mem_take(&mem, n_records), *got = ops_mem_take(&mem, n_ring);
        for (size_t k = 0; k < n_records; k++)
            records[k] = (uint8_t)di_test_random(&rng);
        a.records = records;
        di_rows rows = twin_rows_in(&t, &s.rows);
        di_ring_store_args d = a;
        d.rows = &rows;
        d.records = twin_in(&t, records, n_records);
        d.store_from = twin_in(&t, s.store_from, sizeof s.store_from);
        d.ring.slots = twin_in(&t, a.ring.slots, n_ring);
        assert_int_equal(di_cpu_ops.ring_store(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->ring_store(t.stream, &d), DI_OK);
        twin_back(&t, got, d.ring.slots, n_ring);
        twin_same(got, a.ring.slots, n_ring, "ring_store");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

/* Entries that close at odd positions, one in five of them absent. */
static di_entries entries_make(const scene *s, uint64_t *rng, int32_t ratio, int32_t *row, int32_t *seq, int32_t *idx) {
    di_entries e = {.row = row, .seq = seq, .idx = idx};
    for (int32_t i = 0; i < s->rows.n_rows; i++) {
        if ((s->pos[i] + 1) % ratio || (s->pos[i] == 0 && ratio == 2))
            continue;
        row[e.n] = di_test_random(rng) % 5 ? i : -1;
        seq[e.n] = s->seq[i];
        idx[e.n++] = (s->pos[i] + 1) / ratio - 1;
    }
    return e;
}
static di_entries entries_in(twin *t, const di_entries *e) {
    size_t n = (size_t)e->n * 4;
    return (di_entries){e->n, twin_in(t, e->row, n), twin_in(t, e->seq, n), twin_in(t, e->idx, n)};
}

DI_PROPERTY(compress_pool_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const int64_t widths[4] = {512, 64, 33, 128};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 16; i++) {
        ops_mem mem = {0};
        scene s;
        int32_t row[ROWS_MAX], seq[ROWS_MAX], idx[ROWS_MAX];
        int64_t d_ = widths[i % 4];
        size_t n_ring;
        scene_make(&s, &mem, &rng);
        di_compress_pool_args a = {.rows = &s.rows, .entries = entries_make(&s, &rng, 2, row, seq, idx)};
        di_act cg = ops_act_random(&mem, &rng, DI_F32, s.rows.n_rows, 2 * d_);
        for (int64_t k = 0; k < cg.n_rows * cg.n_cols; k += 7)
            ((float *)cg.data)[k] *= 60; /* weights of nothing and all */
        a.cg = cg.data;
        a.ring = ring_make(&mem, &rng, (size_t)(2 * d_) * 4, 4, &n_ring);
        for (size_t k = 0; k < n_ring / 4; k++)
            ((float *)(void *)a.ring.slots)[k] = ops_mat_noise(&rng);
        a.out = ops_act_empty(&mem, i & 1 ? DI_BF16 : DI_F32, a.entries.n, d_);
        memset(a.out.data, TWIN_POISON, di_dtype_bytes(a.out.dtype, (size_t)(a.entries.n * d_)));
        di_rows rows = twin_rows_in(&t, &s.rows);
        di_compress_pool_args d = a;
        d.rows = &rows;
        d.entries = entries_in(&t, &a.entries);
        d.cg = twin_in(&t, a.cg, twin_act_bytes(&cg));
        d.ring.slots = twin_in(&t, a.ring.slots, n_ring);
        d.out = twin_act_out(&t, &a.out);
        assert_int_equal(di_cpu_ops.compress_pool(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->compress_pool(t.stream, &d), DI_OK);
        twin_act_same(&t, &d.out, &a.out, "compress_pool"); /* rows of absent entries are poison in both */
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_PROPERTY(page_store_has_the_reference_bytes, 2) {
    uint64_t rng = seed;
    const int32_t widths[4] = {512, 128, 64, 32};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 32; i++) {
        ops_mem mem = {0};
        scene s;
        int32_t row[ROWS_MAX], seq[ROWS_MAX], idx[ROWS_MAX], ratio = i & 1 ? 2 : 1;
        scene_make(&s, &mem, &rng);
        di_page_store_args a = {.rows = &s.rows, .entries = entries_make(&s, &rng, ratio, row, seq, idx)};
        a.dst = (di_paged){.offset = (size_t)di_test_random_range(&rng, 0, 5) * 16,
                           .per_block = 128 / ratio,
                           .format = (di_kv_format)(i / 2 % 4),
                           .n_values = widths[i / 8]};
        size_t section = (size_t)a.dst.per_block * di_kv_record_bytes(a.dst.format, a.dst.n_values);
        a.dst.page_bytes = DI_ROUND_UP(a.dst.offset + section, (size_t)64);
        size_t n_pages = a.dst.page_bytes * (size_t)s.n_blocks;
        a.dst.pages = ops_mem_take(&mem, n_pages);
        memset(a.dst.pages, TWIN_POISON, n_pages);
        a.x = random_x(&mem, &rng, a.entries.n, a.dst.n_values);
        di_rows rows = twin_rows_in(&t, &s.rows);
        di_page_store_args d = a;
        d.rows = &rows;
        d.entries = entries_in(&t, &a.entries);
        d.x = twin_act_in(&t, &a.x);
        d.dst.pages = twin_in(&t, a.dst.pages, n_pages);
        assert_int_equal(di_cpu_ops.page_store(t.cpu_stream, &a), DI_OK);
        assert_int_equal(t.gpu.ops->page_store(t.stream, &d), DI_OK);
        uint8_t *got = ops_mem_take(&mem, n_pages);
        twin_back(&t, got, d.dst.pages, n_pages);
        twin_same(got, a.dst.pages, n_pages, "page_store");
        twin_drop(&t);
        ops_mem_free(&mem);
    }
    twin_close(&t);
}

DI_TEST_GROUP(cuda_kv, cmocka_unit_test(kv_encode_has_the_reference_bytes),
              cmocka_unit_test(ring_store_has_the_reference_bytes),
              cmocka_unit_test(compress_pool_has_the_reference_bits),
              cmocka_unit_test(page_store_has_the_reference_bytes));
