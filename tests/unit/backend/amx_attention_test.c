/* Attention scores by AMX with a model of the tile instructions (amx_model.h), on any machine with AVX-512: the
 * operation against the reference, bit by bit. On a machine with AMX the levels' own tests run the real one besides. */
#include "ops_rig.h"

#if defined(__x86_64__)

/* The kernel under another name than the library's. */
#define DI_AMX_TILES "amx_model.h"
#define di_cpu_install_amx_attention amx_attention_test_install
void amx_attention_test_install(di_cpu_kernels *k);
#include "backend/cpu/amx_attention.c"

typedef struct shape {
    int32_t heads, dim, window, topk, rows;
} shape;

/* Rows at the end of a sequence, with keys from this forward, from the ring and from pages. */
static void check_shape(const shape *z, uint64_t *rng) {
    int32_t d = z->dim, n = z->rows, entries = z->topk + n, ring_len = z->window + 2, pos0 = 3 * z->window;
    int64_t rec = ops_rig_record_bytes(DI_KV_FP8, d), ent = ops_rig_record_bytes(DI_KV_FP4, d),
            n_q = (int64_t)z->heads * d;
    uint8_t *records = ops_rig_alloc((size_t)(rec * n)), *ring = ops_rig_alloc((size_t)(rec * ring_len)),
            *page = ops_rig_alloc((size_t)(ent * entries));
    for (int32_t i = 0; i < n; i++)
        ops_rig_random_record(rng, DI_KV_FP8, records + rec * i, records + rec * i + d, d);
    for (int32_t i = 0; i < ring_len; i++)
        ops_rig_random_record(rng, DI_KV_FP8, ring + rec * i, ring + rec * i + d, d);
    for (int32_t i = 0; i < entries; i++)
        ops_rig_random_record(rng, DI_KV_FP4, page + ent * i, page + ent * i + d / 2, d);
    float *q = ops_rig_alloc((size_t)(n * n_q) * sizeof *q), *sink = ops_rig_alloc((size_t)z->heads * sizeof *sink);
    uint16_t *q16 = ops_rig_alloc((size_t)(n * n_q) * sizeof *q16);
    float *out = ops_rig_alloc((size_t)(n * n_q) * sizeof *out),
          *want = ops_rig_alloc((size_t)(n * n_q) * sizeof *want);
    ops_rig_random_bf16(rng, 2, q, n * n_q);
    ops_rig_random_bf16(rng, 2, sink, z->heads);
    int32_t *pos = ops_rig_alloc((size_t)n * sizeof *pos), *lo = ops_rig_alloc((size_t)n * sizeof *lo),
            *hi = ops_rig_alloc((size_t)n * sizeof *hi), *seq = ops_rig_alloc((size_t)n * sizeof *seq), zero = 0;
    int32_t *idx = ops_rig_alloc((size_t)(n * z->topk + 1) * sizeof *idx);
    for (int32_t i = 0; i < n; i++) {
        pos[i] = pos0 + i;
        lo[i] = pos[i] - z->window + 1;
        hi[i] = pos[i] + 1;
        for (int32_t t = 0; t < z->topk; t++)
            idx[i * z->topk + t] = t % 7 == 6 ? -1 : t + i;
    }
    di_rows rows = {.n_rows = n,
                    .n_seqs = 1,
                    .pos = pos,
                    .seq = seq,
                    .win_lo = lo,
                    .win_hi = hi,
                    .row0 = &zero,
                    .n = &n,
                    .pos0 = &pos0,
                    .slot = &zero,
                    .blocks = &zero,
                    .blocks_stride = 1};
    di_attention_args a = {.rows = &rows,
                           .q = ops_rig_act(DI_BF16, q, q16, n, n_q),
                           .n_heads = z->heads,
                           .head_dim = d,
                           .win_format = DI_KV_FP8,
                           .records = records,
                           .ring = {ring, (size_t)(rec * ring_len), 0, (size_t)rec, ring_len},
                           .idx = z->topk ? idx : NULL,
                           .topk = z->topk,
                           .main = {page, (size_t)(ent * entries), 0, entries, DI_KV_FP4, d},
                           .sink = sink,
                           .scale = 0.1f};
    di_limits limits = {.rows_max = n, .n_in_max = n_q, .head_dim = d, .n_heads = z->heads};
    limits.keys_max = z->window + z->topk;
    for (int is_model = 0; is_model < 2; is_model++) {
        ops_rig r;
        ops_rig_open(&r, is_model ? DI_CPU_AVX512 : DI_CPU_REF, 2, &limits);
        if (is_model)
            amx_attention_test_install(&r.dev->kernels);
        a.out = ops_rig_act(DI_F32, is_model ? out : want, NULL, n, n_q);
        assert_int_equal(di_cpu_ops.attention(r.stream, &a), DI_OK);
        ops_rig_close(&r);
    }
    assert_memory_equal(out, want, (size_t)(n * n_q) * sizeof *out);
    void *blocks[] = {records, ring, page, q, q16, sink, out, want, pos, lo, hi, seq, idx};
    for (size_t i = 0; i < DI_COUNT(blocks); i++)
        free(blocks[i]);
}

/* Heads and keys that fill tiles and that don't; few rows, which share out heads, and many. */
static void scores_match_the_reference(void **state) {
    (void)state;
    if (di_cpu_level_best() < DI_CPU_AVX512) {
        di_test_skip("needs AVX-512");
        return;
    }
    static const shape shapes[] = {{64, 512, 128, 512, 2}, {8, 64, 64, 64, 9},   {3, 32, 5, 0, 3},
                                   {17, 96, 20, 13, 20},   {40, 160, 33, 40, 5}, {16, 512, 16, 16, 17}};
    uint64_t rng = 5;
    for (size_t i = 0; i < DI_COUNT(shapes); i++)
        check_shape(&shapes[i], &rng);
}

DI_TEST_GROUP(amx_attention, cmocka_unit_test(scores_match_the_reference));

#endif
