/* index_select on the NVIDIA backend against the CPU reference: the same scores in every bit, the same entries and
 * blocks; and topk against sorting.
 *
 * Scores by tensor cores are exact too: a group's sum has 13 bits, and the parts are added in the reference's order. So
 * there is no tolerance anywhere; a NaN is a NaN of any bits. */
#include "twin.h"

enum { ROWS_MAX = 320, SEQS_MAX = 64 };

typedef struct shape {
    int32_t n_heads, dim, ratio, per_block, topk, cand_block, n_cand;
    di_kv_format format;
    int32_t n_seqs, rows_per_seq; /* rows of a sequence: 1 .. rows_per_seq */
    int32_t entries;              /* of the longest sequence */
    enum { NO_CAND, CAND_OUT, CAND_IN, CAND_BOTH } cand;
    bool is_full; /* lists of candidates hold the newest blocks without gaps, as many as fit */
    bool is_even; /* sequences are equally long and have rows_per_seq rows each */
    bool is_near; /* nearly all keys have scales at most 2^3 apart */
} shape;

typedef struct scene {
    ops_mem mem;
    twin *t;
    shape sh;
    di_rows rows;
    di_index_select_args a; /* host */
    size_t page_bytes, n_pages;
    int32_t *cand_in;
} scene;

static int32_t visible(const scene *sc, int32_t row) {
    return (int32_t)(((int64_t)sc->rows.pos[row] + 1) / sc->a.ratio);
}

static void make_rows(scene *sc, uint64_t *rng) {
    const shape *sh = &sc->sh;
    int32_t *pos = ops_mem_take(&sc->mem, ROWS_MAX * 4), *seq = ops_mem_take(&sc->mem, ROWS_MAX * 4);
    int32_t *row0 = ops_mem_take(&sc->mem, SEQS_MAX * 4), *n = ops_mem_take(&sc->mem, SEQS_MAX * 4);
    int32_t *pos0 = ops_mem_take(&sc->mem, SEQS_MAX * 4), *zeros = ops_mem_take(&sc->mem, ROWS_MAX * 4), at = 0;
    int64_t n_blocks = DI_CEIL_DIV(sh->entries, sh->per_block) + 1;
    int32_t *blocks = ops_mem_take(&sc->mem, (size_t)(sh->n_seqs * n_blocks) * 4);
    for (int32_t s = 0; s < sh->n_seqs; s++) {
        int32_t count = sh->is_even ? sh->rows_per_seq : (int32_t)di_test_random_range(rng, 1, sh->rows_per_seq);
        int32_t positions = sh->entries * sh->ratio;
        int32_t end = sh->is_even || s == 0 ? positions : (int32_t)di_test_random_range(rng, count, positions);
        row0[s] = at;
        n[s] = count;
        pos0[s] = end - count;
        for (int32_t i = 0; i < count && at < ROWS_MAX; i++, at++) {
            pos[at] = pos0[s] + i;
            seq[at] = s;
        }
        for (int64_t b = 0; b < n_blocks; b++) /* blocks of sequences are interleaved */
            blocks[s * n_blocks + b] = (int32_t)((b * sh->n_seqs + (s + b) % sh->n_seqs));
    }
    sc->n_pages = (size_t)(n_blocks * sh->n_seqs);
    sc->rows = (di_rows){.n_rows = at,
                         .n_seqs = sh->n_seqs,
                         .pos = pos,
                         .seq = seq,
                         .win_lo = zeros,
                         .win_hi = zeros,
                         .row0 = row0,
                         .n = n,
                         .pos0 = pos0,
                         .slot = zeros,
                         .blocks = blocks,
                         .blocks_stride = n_blocks};
}

/* Any bytes that a quantiser writes; some scales far from 1, some groups of zeros. */
static void make_keys(scene *sc, uint64_t *rng) {
    const shape *sh = &sc->sh;
    int64_t data = ops_rig_data_bytes(sh->format, sh->dim), scale = ops_rig_scale_bytes(sh->format, sh->dim);
    size_t offset = 64 * (size_t)di_test_random_range(rng, 0, 2);
    sc->page_bytes = DI_ROUND_UP(offset + (size_t)(sh->per_block * (data + scale)), (size_t)64);
    uint8_t *pages = ops_mem_take(&sc->mem, sc->n_pages * sc->page_bytes);
    for (size_t p = 0; p < sc->n_pages; p++) {
        uint8_t *section = pages + p * sc->page_bytes + offset;
        for (int32_t e = 0; e < sh->per_block; e++) {
            bool is_mx4 = sh->format == DI_KV_MX4;
            uint8_t *d = section + e * (is_mx4 ? data : data + scale);
            uint8_t *s = is_mx4 ? section + sh->per_block * data + e * scale : d + data;
            ops_rig_random_record(rng, sh->format, d, s, sh->dim);
            for (int64_t g = 0; g < scale && sh->is_near; g++)
                s[g] = (uint8_t)(116 + 3 * (p % 8) + di_test_random(rng) % 4);
            uint64_t kind = di_test_random(rng) % (sh->is_near ? 1500 : 500);
            int64_t g = (int64_t)(di_test_random(rng) % (uint64_t)DI_MAX(scale, 1));
            if (is_mx4 && kind == 0)
                s[g] = (uint8_t)di_test_random_range(rng, 0, 255);
            if (is_mx4 && kind == 1) {
                s[g] = 1;
                memset(d + g * 16, 0, 16);
            }
            if (is_mx4 && (sh->is_near ? kind == 2 : kind > 400)) /* still as fast kernels like it */
                s[g] = (uint8_t)di_test_random_range(rng, 112, 143);
        }
    }
    sc->a.keys = (di_paged){.pages = pages,
                            .page_bytes = sc->page_bytes,
                            .offset = offset,
                            .per_block = sh->per_block,
                            .format = sh->format,
                            .n_values = sh->dim};
}

static void make_queries(scene *sc, uint64_t *rng, bool is_exact) {
    di_index_select_args *a = &sc->a;
    int64_t n = sc->rows.n_rows, n_q = (int64_t)a->n_heads * a->dim;
    float *q = ops_mem_take(&sc->mem, (size_t)(n * n_q) * 4), *w = ops_mem_take(&sc->mem, (size_t)(n * a->n_heads) * 4);
    ops_rig_random_bf16(rng, 2, q, n * n_q);
    ops_rig_random_bf16(rng, 1, w, n * a->n_heads);
    for (int64_t row = 0; row < n; row++) {
        float *qr = q + row * n_q, *wr = w + row * a->n_heads;
        uint64_t kind = di_test_random(rng) % 24;
        int64_t h = (int64_t)(di_test_random(rng) % (uint64_t)a->n_heads);
        for (int32_t i = 0; i < a->n_heads && kind < 2; i++)
            wr[i] = kind ? 0 : NAN; /* all tie; none counts */
        if (kind == 2)
            wr[h] = 0x1p-60f;
        if (kind == 3)
            memset(qr + h * a->dim, 0, (size_t)a->dim * 4); /* a head, a group of zeros */
        if (kind == 4)
            memset(qr + h * a->dim, 0, 32 * 4);
        if (kind == 5)
            qr[h * a->dim + 7] = 0x1p40f;
        if (kind == 6)
            qr[h * a->dim + 9] = NAN;
        for (int32_t i = 0; i < 32 && kind == 7; i++)
            qr[h * a->dim + i] *= 0x1p-13f; /* a group far below its head */
        for (int32_t i = 0; i < a->n_heads && kind == 8; i++)
            wr[i] = -fabsf(wr[i]);
        for (int64_t i = 0; i < n_q && kind == 9; i++)
            qr[i] = fabsf(qr[i]) + 1;
    }
    uint16_t *q16 = ops_mem_take(&sc->mem, (size_t)(n * n_q) * 2),
             *w16 = ops_mem_take(&sc->mem, (size_t)(n * a->n_heads) * 2);
    a->q = ops_rig_act(is_exact ? DI_F32 : DI_BF16, q, q16, n, n_q);
    a->w = ops_rig_act(is_exact ? DI_F32 : DI_BF16, w, w16, n, a->n_heads);
}

static void make_lists(scene *sc, uint64_t *rng) {
    di_index_select_args *a = &sc->a;
    size_t n = (size_t)sc->rows.n_rows * (size_t)a->n_cand;
    int32_t *list = sc->cand_in = ops_mem_take(&sc->mem, n * 4);
    memset(list, 0xFF, n * 4);
    for (int32_t row = 0; row < sc->rows.n_rows; row++, list += a->n_cand) {
        int32_t n_blocks = DI_CEIL_DIV(visible(sc, row), a->cand_block), at = 0;
        if (sc->sh.is_full) {
            for (int32_t b = DI_MAX(n_blocks - a->n_cand, 0); b < n_blocks; b++)
                list[at++] = b;
            continue;
        }
        bool has_later = di_test_random(rng) % 4 == 0; /* blocks that aren't visible yet */
        for (int32_t b = 0; b < n_blocks + (has_later ? 3 : 0) && at < a->n_cand; b++)
            if ((int64_t)(di_test_random(rng) % (uint64_t)(n_blocks + 1)) < 2 * (int64_t)a->n_cand / 3)
                list[at++] = b;
    }
}

static void scene_make(scene *sc, twin *t, uint64_t *rng, const shape *sh) {
    memset(sc, 0, sizeof *sc);
    sc->t = t;
    sc->sh = *sh;
    di_index_select_args *a = &sc->a;
    bool is_exact = sh->format == DI_KV_F32;
    a->n_heads = sh->n_heads;
    a->dim = sh->dim;
    a->ratio = sh->ratio;
    a->topk = sh->topk;
    a->round_bf16 = !is_exact;
    make_rows(sc, rng);
    a->rows = &sc->rows;
    make_keys(sc, rng);
    make_queries(sc, rng, is_exact);
    a->idx = ops_mem_take(&sc->mem, (size_t)sc->rows.n_rows * (size_t)a->topk * 4);
    if (sh->cand) {
        a->cand_block = sh->cand_block;
        a->n_cand = sh->n_cand;
        if (sh->cand != CAND_IN)
            a->cand_out = ops_mem_take(&sc->mem, (size_t)sc->rows.n_rows * (size_t)a->n_cand * 4);
        if (sh->cand != CAND_OUT)
            make_lists(sc, rng);
        a->cand_in = sc->cand_in;
    }
    a->scores_stride = sh->entries + (int64_t)(di_test_random(rng) % 20);
    a->scores = ops_mem_take(&sc->mem, (size_t)(sc->rows.n_rows * a->scores_stride) * 4);
}

static di_limits limits_of(const shape *sh) {
    return (di_limits){.rows_max = ROWS_MAX,
                       .entries_max = sh->entries,
                       .keys_max = sh->topk,
                       .candidate_blocks = sh->n_cand,
                       .index_heads = sh->n_heads,
                       .index_dim = sh->dim,
                       .head_dim = sh->dim,
                       .n_in_max = (int64_t)sh->n_heads * sh->dim};
}

static void compare_i32(twin *t, const int32_t *d, const int32_t *want, int32_t n_rows, int32_t n, const char *what) {
    int32_t *got = ops_rig_alloc((size_t)n_rows * (size_t)n * 4);
    twin_back(t, got, d, (size_t)n_rows * (size_t)n * 4);
    for (int32_t row = 0; row < n_rows; row++) {
        for (int32_t i = 0; i < n; i++) {
            if (got[row * n + i] != want[row * n + i])
                fail_msg("%s of row %d: place %d holds %d, the reference has %d", what, row, i, got[row * n + i],
                         want[row * n + i]);
        }
    }
    free(got);
}

/* The device's arguments: everything mirrored; with_scores: scores are asked for. */
static di_index_select_args mirror(scene *sc, di_rows *rows, bool with_scores) {
    twin *t = sc->t;
    di_index_select_args d = sc->a;
    *rows = twin_rows_in(t, &sc->rows);
    d.rows = rows;
    d.q = twin_act_in(t, &sc->a.q);
    d.w = twin_act_in(t, &sc->a.w);
    d.keys.pages = twin_in(t, sc->a.keys.pages, sc->n_pages * sc->page_bytes);
    size_t n = (size_t)sc->rows.n_rows;
    d.idx = twin_out(t, n * (size_t)d.topk * 4);
    d.cand_in = twin_in(t, sc->a.cand_in, n * (size_t)d.n_cand * 4);
    d.cand_out = sc->a.cand_out ? twin_out(t, n * (size_t)d.n_cand * 4) : NULL;
    d.scores = with_scores ? twin_out(t, n * (size_t)d.scores_stride * 4) : NULL;
    return d;
}

static void compare(scene *sc, const di_index_select_args *d) {
    const di_index_select_args *a = &sc->a;
    if (d->scores) {
        size_t n = (size_t)(sc->rows.n_rows * a->scores_stride);
        float *got = ops_rig_alloc(n * 4);
        twin_back(sc->t, got, d->scores, n * 4);
        for (size_t i = 0; i < n; i++) {
            float x = got[i], y = a->scores[i];
            if (isnan(y) ? !isnan(x) : di_f32_bits(x) != di_f32_bits(y))
                fail_msg("row %zu of %d, entry %zu: score %.9g, the reference has %.9g", i / (size_t)a->scores_stride,
                         sc->rows.n_rows, i % (size_t)a->scores_stride, (double)x, (double)y);
        }
        free(got);
    }
    if (a->cand_out)
        compare_i32(sc->t, d->cand_out, a->cand_out, sc->rows.n_rows, a->n_cand, "blocks");
    compare_i32(sc->t, d->idx, a->idx, sc->rows.n_rows, a->topk, "entries");
}

/* One case by the kernels of the name, with and without scores. */
static void run_case(uint64_t *rng, const shape *sh, const char *kernels) {
    twin t;
    di_limits l = limits_of(sh);
    twin_open(&t, &l, kernels);
    scene sc;
    scene_make(&sc, &t, rng, sh);
    assert_int_equal(di_cpu_ops.index_select(t.cpu_stream, &sc.a), DI_OK);
    for (int i = 0; i < 2; i++) {
        di_rows rows;
        di_index_select_args d = mirror(&sc, &rows, i == 0);
        assert_int_equal(t.gpu.ops->index_select(t.stream, &d), DI_OK);
        compare(&sc, &d);
        twin_drop(&t);
    }
    ops_mem_free(&sc.mem);
    twin_close(&t);
}

/* Any shape; where it is the released one, the fast kernels run it. */
DI_PROPERTY(index_select_has_the_reference_bits, 24) {
    uint64_t rng = seed;
    shape sh = {.ratio = (int32_t)di_test_random_range(&rng, 1, 2),
                .topk = (int32_t)di_test_random_range(&rng, 1, 90),
                .cand_block = di_test_random(&rng) % 2 ? 8 : 16,
                .n_cand = (int32_t)di_test_random_range(&rng, 1, 40),
                .n_seqs = (int32_t)di_test_random_range(&rng, 1, 6),
                .rows_per_seq = (int32_t)di_test_random_range(&rng, 1, 9),
                .cand = (int)(di_test_random(&rng) % 4)};
    sh.entries = (int32_t)di_test_random_range(&rng, 1, di_test_random(&rng) % 2 ? 100 : 1500);
    bool is_released = di_test_random(&rng) % 2;
    const di_kv_format formats[6] = {DI_KV_F32, DI_KV_F32, DI_KV_FP8, DI_KV_FP4, DI_KV_MX4, DI_KV_MX4};
    const int32_t per_block[4] = {128, 64, 12, 8};
    sh.per_block = per_block[di_test_random(&rng) % 4];
    if (is_released) {
        sh.n_heads = 32;
        sh.dim = 128;
        sh.format = DI_KV_MX4;
        sh.entries += sh.rows_per_seq;
    } else {
        sh.n_heads = (int32_t)di_test_random_range(&rng, 1, 19);
        sh.dim = 32 * (int32_t)di_test_random_range(&rng, 1, 5);
        sh.format = formats[di_test_random(&rng) % 6];
        sh.entries += sh.rows_per_seq;
    }
    run_case(&rng, &sh, "auto");
    if (is_released)
        run_case(&rng, &sh, "portable");
}

static const shape released = {.n_heads = 32,
                               .dim = 128,
                               .ratio = 1,
                               .per_block = 128,
                               .topk = 512,
                               .cand_block = 8,
                               .n_cand = 2048,
                               .format = DI_KV_MX4};

/* Decode, one row a sequence; more entries than one block chooses from. */
static void released_decode(void **state) {
    (void)state;
    uint64_t rng = 1;
    shape sh = released;
    sh.n_seqs = 3;
    sh.rows_per_seq = 1;
    sh.entries = 70001;
    sh.cand = CAND_OUT;
    run_case(&rng, &sh, "auto");
    sh.n_seqs = 40;
    sh.entries = 3000;
    sh.ratio = 2;
    sh.per_block = 64;
    run_case(&rng, &sh, "auto");
}

/* Rows with lists of 2048 blocks: full lists, and lists with gaps. */
static void released_candidates(void **state) {
    (void)state;
    uint64_t rng = 2;
    shape sh = released;
    sh.cand = CAND_IN;
    sh.n_seqs = 3;
    sh.rows_per_seq = 5;
    sh.entries = 21000;
    run_case(&rng, &sh, "auto");
    sh.is_full = true;
    sh.entries = 20000;
    sh.n_seqs = 1;
    run_case(&rng, &sh, "auto");
    sh.entries = 5000; /* the list is all there is */
    sh.n_seqs = 2;
    run_case(&rng, &sh, "auto");
}

/* Prefill and verification: rows of a sequence share keys, in groups of any size. */
static void released_prefill(void **state) {
    (void)state;
    uint64_t rng = 3;
    shape sh = released;
    sh.cand = CAND_OUT;
    sh.n_seqs = 1;
    sh.rows_per_seq = 136; /* more than multiprocessors, and rows that take a warp or a block to choose from */
    sh.is_even = sh.is_near = true;
    sh.entries = 4160;
    run_case(&rng, &sh, "auto");
    sh.is_even = sh.is_near = false;
    sh.n_seqs = 20;
    sh.rows_per_seq = 7;
    sh.entries = 2000;
    run_case(&rng, &sh, "auto");
}

/* A k that segments can't keep. */
static void large_k(void **state) {
    (void)state;
    uint64_t rng = 4;
    shape sh = {.n_heads = 2,
                .dim = 32,
                .ratio = 1,
                .per_block = 128,
                .topk = 20000,
                .cand_block = 8,
                .n_cand = 4096,
                .format = DI_KV_MX4,
                .n_seqs = 2,
                .rows_per_seq = 2,
                .entries = 40000,
                .cand = CAND_OUT};
    run_case(&rng, &sh, "auto");
}

/* A row gives the same in any batch. */
static void row_alone_is_the_same(void **state) {
    (void)state;
    uint64_t rng = 5;
    shape sh = released;
    sh.n_seqs = 4;
    sh.rows_per_seq = 6;
    sh.entries = 900;
    sh.topk = 64;
    twin t;
    di_limits l = limits_of(&sh);
    twin_open(&t, &l, "auto");
    scene sc;
    scene_make(&sc, &t, &rng, &sh);
    assert_int_equal(di_cpu_ops.index_select(t.cpu_stream, &sc.a), DI_OK);
    di_rows rows, one;
    di_index_select_args d = mirror(&sc, &rows, true), b = d;
    for (int32_t row = 0; row < sc.rows.n_rows; row++) {
        one = rows;
        one.n_rows = 1;
        one.pos += row;
        one.seq += row;
        one.n_seqs = 1 + sc.rows.seq[row]; /* its sequence is the last */
        b.rows = &one;
        b.q.n_rows = b.w.n_rows = 1;
        b.q.data = (uint16_t *)d.q.data + row * d.q.stride;
        b.w.data = (uint16_t *)d.w.data + row * d.w.stride;
        b.idx = d.idx + row * d.topk;
        b.scores = d.scores + row * d.scores_stride;
        assert_int_equal(t.gpu.ops->index_select(t.stream, &b), DI_OK);
    }
    compare(&sc, &d);
    twin_drop(&t);
    ops_mem_free(&sc.mem);
    twin_close(&t);
}

static void refuses_what_does_not_fit(void **state) {
    (void)state;
    uint64_t rng = 6;
    shape sh = released;
    sh.n_seqs = sh.rows_per_seq = 1;
    sh.entries = 100;
    twin t;
    di_limits l = limits_of(&sh);
    twin_open(&t, &l, "auto");
    scene sc;
    scene_make(&sc, &t, &rng, &sh);
    di_rows rows;
    di_index_select_args d = mirror(&sc, &rows, false), b = d;
    b.n_heads = 33;
    assert_int_equal(t.gpu.ops->index_select(t.stream, &b), DI_ERR_SHAPE);
    b = d;
    b.cand_out = d.idx;
    b.n_cand = 4;
    b.cand_block = 12;
    assert_int_equal(t.gpu.ops->index_select(t.stream, &b), DI_ERR_SHAPE);
    b = d;
    rows.n_rows = 0;
    assert_int_equal(t.gpu.ops->index_select(t.stream, &b), DI_OK);
    twin_drop(&t);
    ops_mem_free(&sc.mem);
    twin_close(&t);
}

/* ---- topk alone -------------------------------------------------------------------------------------------------- */

static const float *sort_by;
static int by_score(const void *x, const void *y) {
    int32_t i = *(const int32_t *)x, j = *(const int32_t *)y;
    if (sort_by[i] != sort_by[j])
        return sort_by[i] > sort_by[j] ? -1 : 1;
    return i < j ? -1 : 1;
}
static int by_index(const void *x, const void *y) {
    return *(const int32_t *)x - *(const int32_t *)y;
}

static void check_topk(twin *t, const float *s, int32_t n, int32_t k) {
    int32_t *order = ops_rig_alloc((size_t)n * 4 + 4), *got = ops_rig_alloc((size_t)k * 4), m = 0;
    float *ds = twin_in(t, s, (size_t)n * 4);
    int32_t *d = twin_out(t, (size_t)k * 4);
    t->gpu.device->topk(t->dev, ds, n, k, d);
    twin_back(t, got, d, (size_t)k * 4);
    for (int32_t i = 0; i < n; i++)
        if (s[i] > -INFINITY)
            order[m++] = i;
    sort_by = s;
    qsort(order, (size_t)m, sizeof *order, by_score);
    m = DI_MIN(m, k);
    qsort(order, (size_t)m, sizeof *order, by_index);
    for (int32_t i = 0; i < k; i++) {
        if (got[i] != (i < m ? order[i] : -1))
            fail_msg("%d of %d: place %d holds %d, expected %d", k, n, i, got[i], i < m ? order[i] : -1);
    }
    free(order);
    free(got);
    twin_drop(t);
}

/* Scores of many kinds: spread, few different ones, rising (so that segments keep much), unusable ones between. */
static void fill_scores(uint64_t *rng, float *s, int32_t n, int kind) {
    for (int32_t i = 0; i < n; i++) {
        double u = di_test_random_unit(rng);
        s[i] = (float)(kind == 0   ? 2 * u - 1
                       : kind == 1 ? floor(8 * u) - 3
                       : kind == 2 ? (double)i + u
                       : kind == 3 ? 0
                       : kind == 4 ? (u < 0.6    ? -INFINITY
                                      : u < 0.7  ? (double)NAN
                                      : u < 0.71 ? -0.0
                                                 : u - 0.75)
                                   : exp(40 * u - 20) * (u < 0.5 ? -1 : 1));
        if (kind == 0)
            s[i] = di_round_bf16(s[i]);
    }
}

static void topk_sorts(void **state) {
    (void)state;
    uint64_t rng = 7;
    di_limits l = {
        .rows_max = 4, .entries_max = 300000, .keys_max = 2048, .n_in_max = 64, .index_heads = 1, .index_dim = 32};
    twin t;
    twin_open(&t, &l, "auto");
    const int32_t ns[] = {1, 7, 512, 513, 4097, 8192, 32768, 32769, 65536, 200001}, ks[] = {1, 8, 512, 2048, 20000};
    float *s = ops_rig_alloc(200001 * 4);
    for (size_t i = 0; i < DI_COUNT(ns); i++) {
        for (size_t j = 0; j < DI_COUNT(ks); j++) {
            int kinds = ks[j] > 2048 && ns[i] < 65536 ? 1 : 6;
            for (int kind = 0; kind < kinds; kind++) {
                fill_scores(&rng, s, ns[i], kind);
                check_topk(&t, s, ns[i], ks[j]);
            }
        }
    }
    free(s);
    twin_close(&t);
}

/* More than one round among what segments kept: 40 segments keep 1000 each. */
static void topk_takes_rounds(void **state) {
    (void)state;
    uint64_t rng = 8;
    int32_t n = 40 * 32768 - 5;
    di_limits l = {
        .rows_max = 1, .entries_max = n, .keys_max = 2048, .n_in_max = 64, .index_heads = 1, .index_dim = 32};
    twin t;
    twin_open(&t, &l, "auto");
    float *s = ops_rig_alloc((size_t)n * 4);
    for (int kind = 0; kind < 6; kind++) {
        fill_scores(&rng, s, n, kind);
        check_topk(&t, s, n, 1000);
    }
    free(s);
    twin_close(&t);
}

DI_TEST_GROUP(cuda_index, cmocka_unit_test(index_select_has_the_reference_bits), cmocka_unit_test(released_decode),
              cmocka_unit_test(released_candidates), cmocka_unit_test(released_prefill), cmocka_unit_test(large_k),
              cmocka_unit_test(row_alone_is_the_same), cmocka_unit_test(refuses_what_does_not_fit),
              cmocka_unit_test(topk_sorts), cmocka_unit_test(topk_takes_rounds));
