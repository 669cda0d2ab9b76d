/* Index scores by AMX with a model of the tile instructions (amx_model.h), on any machine with AVX-512 and VBMI: the
 * operation against the reference, bit by bit. On a machine with AMX the levels' own tests run the real one besides. */
#include "ops_rig.h"

#if defined(__x86_64__)

/* The kernel under another name than the library's. */
#define DI_AMX_TILES "amx_model.h"
#define di_cpu_install_amx_index amx_index_test_install
void amx_index_test_install(di_cpu_kernels *k);
#include "backend/cpu/amx_index.c"

typedef struct shape {
    int32_t heads, dim, entries, rows, topk;
    bool is_far; /* some scales are at the ends of their range */
} shape;

static void check_shape(const shape *z, uint64_t *rng) {
    int32_t n = z->rows, per_block = 40, n_blocks = z->entries / per_block + 1, last = z->entries - n;
    int64_t n_q = (int64_t)z->heads * z->dim;
    size_t data_bytes = (size_t)z->dim / 2, scale_bytes = (size_t)z->dim / 32,
           page_bytes = (size_t)per_block * (data_bytes + scale_bytes);
    uint8_t *pages = ops_rig_alloc(page_bytes * (size_t)n_blocks);
    int32_t *blocks = ops_rig_alloc((size_t)n_blocks * sizeof *blocks);
    for (int32_t b = 0; b < n_blocks; b++)
        blocks[b] = n_blocks - 1 - b;
    for (int32_t j = 0; j < z->entries; j++) {
        uint8_t *page = pages + page_bytes * (size_t)blocks[j / per_block];
        uint8_t *data = page + data_bytes * (size_t)(j % per_block);
        uint8_t *scale = page + data_bytes * (size_t)per_block + scale_bytes * (size_t)(j % per_block);
        ops_rig_random_record(rng, DI_KV_MX4, data, scale, z->dim);
        static const uint8_t far[] = {0, 1, 70, 71, 183, 184, 254, 255};
        if (z->is_far && di_test_random(rng) % 20 == 0)
            scale[di_test_random(rng) % scale_bytes] = far[di_test_random(rng) % DI_COUNT(far)];
    }
    float *q = ops_rig_alloc((size_t)(n * n_q) * sizeof *q), *w = ops_rig_alloc((size_t)(n * z->heads) * sizeof *w);
    uint16_t *q16 = ops_rig_alloc((size_t)(n * n_q) * sizeof *q16),
             *w16 = ops_rig_alloc((size_t)(n * z->heads) * sizeof *w16);
    ops_rig_random_bf16(rng, 2, q, n * n_q);
    ops_rig_random_bf16(rng, 1, w, n * z->heads);
    if (z->is_far) {
        for (int64_t i = 0; i < 32; i++)
            q[i] *= 0x1p-100f; /* the first row's scores are made alone */
    }
    int32_t *pos = ops_rig_alloc((size_t)n * sizeof *pos), *seq = ops_rig_alloc((size_t)n * sizeof *seq), zero = 0;
    int32_t *idx = ops_rig_alloc((size_t)(2 * n * z->topk) * sizeof *idx);
    size_t n_scores = (size_t)n * (size_t)z->entries;
    float *scores = ops_rig_alloc(2 * n_scores * sizeof *scores);
    for (int32_t i = 0; i < n; i++)
        pos[i] = last + i;
    di_rows rows = {.n_rows = n,
                    .n_seqs = 1,
                    .pos = pos,
                    .seq = seq,
                    .win_lo = seq,
                    .win_hi = seq,
                    .row0 = &zero,
                    .n = &n,
                    .pos0 = &last,
                    .slot = &zero,
                    .blocks = blocks,
                    .blocks_stride = n_blocks};
    di_index_select_args a = {.rows = &rows,
                              .q = ops_rig_act(DI_BF16, q, q16, n, n_q),
                              .w = ops_rig_act(DI_BF16, w, w16, n, z->heads),
                              .n_heads = z->heads,
                              .dim = z->dim,
                              .ratio = 1,
                              .keys = {pages, page_bytes, 0, per_block, DI_KV_MX4, z->dim},
                              .round_bf16 = true,
                              .topk = z->topk,
                              .scores_stride = z->entries};
    di_limits limits = {.rows_max = n, .entries_max = z->entries, .index_heads = z->heads, .index_dim = z->dim};
    for (int is_model = 0; is_model < 2; is_model++) {
        ops_rig r;
        ops_rig_open(&r, is_model ? DI_CPU_AVX512 : DI_CPU_REF, 2, &limits);
        if (is_model)
            amx_index_test_install(&r.dev->kernels);
        a.idx = idx + is_model * n * z->topk;
        a.scores = scores + (size_t)is_model * n_scores;
        assert_int_equal(di_cpu_ops.index_select(r.stream, &a), DI_OK);
        ops_rig_close(&r);
    }
    assert_memory_equal(idx, idx + n * z->topk, (size_t)(n * z->topk) * sizeof *idx);
    assert_memory_equal(scores, scores + n_scores, n_scores * sizeof *scores);
    void *all[] = {pages, q, q16, w, w16, pos, seq, blocks, idx, scores};
    for (size_t i = 0; i < DI_COUNT(all); i++)
        free(all[i]);
}

/* Heads, values and entries that fill tiles and that don't; scales where a product would leave the normal floats. */
static void scores_match_the_reference(void **state) {
    (void)state;
    if (di_cpu_level_best() < DI_CPU_AVX512 || !__builtin_cpu_supports("avx512vbmi")) {
        di_test_skip("needs AVX-512 with VBMI");
        return;
    }
    static const shape shapes[] = {{32, 128, 700, 3, 100, false}, {4, 128, 257, 20, 64, false},
                                   {1, 32, 40, 5, 9, false},      {17, 96, 300, 2, 50, true},
                                   {48, 64, 130, 4, 20, true},    {33, 32, 31, 3, 40, true}};
    uint64_t rng = 6;
    for (size_t i = 0; i < DI_COUNT(shapes); i++)
        check_shape(&shapes[i], &rng);
}

DI_TEST_GROUP(amx_index, cmocka_unit_test(scores_match_the_reference));

#endif
