/* gemm on the NVIDIA backend: the portable kernel has the reference's bits, the tensor cores' kernels are within the
 * rounding of their sums, and unless the device is order-free a row gives the same bits in any batch. */
#include "twin.h"

#ifdef DI_TWIN_EMU
enum { IS_SLOW = 1 }; /* the emulated device: a thousandth of the rate */
#else
enum { IS_SLOW = 0 };
#endif

static di_limits limits(void) {
    return (di_limits){
        .rows_max = 2048, .n_in_max = 8192, .n_out_max = 32768, .n_heads = 64, .head_dim = 512, .hidden_size = 5120};
}

typedef struct gemm_case {
    ops_mem mem;
    di_mat w;
    di_gemm_args a; /* in host memory; out poisoned */
    di_mat dev_w;
    di_gemm_args d;
} gemm_case;

typedef struct gemm_kind {
    di_dtype x, w, out;
    int64_t n_rows, n_out, n_in;
    int32_t n_groups;
    bool has_add;
    int64_t x_more, out_more; /* stride beyond the columns */
} gemm_kind;

static void case_make(gemm_case *c, twin *t, uint64_t *rng, const gemm_kind *k) {
    memset(c, 0, sizeof *c);
    int64_t cols = k->n_in * DI_MAX(k->n_groups, 1), x_stride = cols + k->x_more, out_stride = k->n_out + k->out_more;
    c->w = ops_mat_random(&c->mem, rng, k->w, k->n_out, k->n_in);
    c->a.w = &c->w;
    c->a.n_groups = k->n_groups;
    c->a.x = ops_act_random(&c->mem, rng, k->x, k->n_rows, x_stride);
    c->a.x.n_cols = cols;
    c->a.out = ops_act_empty(&c->mem, k->out, k->n_rows, out_stride);
    c->a.out.n_cols = k->n_out;
    size_t n_out = (size_t)(k->n_rows * out_stride);
    memset(c->a.out.data, TWIN_POISON, di_dtype_bytes(k->out, n_out));
    float *add = NULL;
    if (k->has_add) {
        add = ops_mem_take(&c->mem, n_out * sizeof *add);
        for (size_t i = 0; i < n_out; i++)
            add[i] = 8 * ops_mat_noise(rng);
    }
    c->a.add = add;
    c->d = c->a;
    c->dev_w = twin_mat_in(t, &c->w);
    c->d.w = &c->dev_w;
    c->d.x = twin_act_in(t, &c->a.x);
    c->d.out = twin_act_out(t, &c->a.out);
    c->d.add = twin_in(t, add, n_out * sizeof *add);
}

static void case_drop(gemm_case *c, twin *t) {
    twin_drop(t);
    ops_mem_free(&c->mem);
}

/* What lies between the rows of out is still poison. */
static void gaps_are_untouched(twin *t, const di_act *out) {
    size_t size = di_dtype_bytes(out->dtype, 1), n_bytes = twin_act_bytes(out);
    uint8_t *got = ops_rig_alloc(n_bytes);
    twin_back(t, got, out->data, n_bytes);
    for (int64_t r = 0; r + 1 < out->n_rows; r++) {
        for (size_t i = (size_t)(r * out->stride + out->n_cols) * size; i < (size_t)((r + 1) * out->stride) * size; i++)
            assert_int_equal(got[i], TWIN_POISON);
    }
    free(got);
}

/* ---- the portable kernel ----------------------------------------------------------------------------------------- */

static di_dtype pick(uint64_t *rng, const di_dtype *from, int64_t n) {
    return from[di_test_random_range(rng, 0, n - 1)];
}

static void portable_case(twin *t, uint64_t *rng, const gemm_kind *k) {
    gemm_case c;
    case_make(&c, t, rng, k);
    assert_int_equal(di_cpu_ops.gemm(t->cpu_stream, &c.a), DI_OK);
    assert_int_equal(t->gpu.ops->gemm(t->stream, &c.d), DI_OK);
    twin_act_same(t, &c.d.out, &c.a.out, "gemm");
    gaps_are_untouched(t, &c.d.out);
    case_drop(&c, t);
}

DI_PROPERTY(portable_has_the_reference_bits, 2) {
    uint64_t rng = seed;
    const di_dtype acts[3] = {DI_F32, DI_BF16, DI_F8_E4M3}, mats[4] = {DI_F32, DI_BF16, DI_F8_E4M3, DI_F4_E2M1};
    const int64_t rows[6] = {1, 3, 17, 33, 70, 129};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "portable");
    for (int i = 0; i < 48; i++) {
        gemm_kind k = {.x = acts[i % 3], .w = mats[i / 3 % 4], .out = i & 1 ? DI_F32 : DI_BF16};
        k.n_rows = rows[di_test_random_range(&rng, 0, 5)];
        k.n_groups = (int32_t)di_test_random_range(&rng, 0, 3);
        k.n_out = di_test_random_range(&rng, 1, 90) * DI_MAX(k.n_groups, 1);
        k.n_in = di_test_random_range(&rng, 1, 9) * 32;
        if (k.x != DI_F8_E4M3 && k.w != DI_F4_E2M1)
            k.n_in -= di_test_random_range(&rng, 0, 31);
        k.has_add = di_test_random(&rng) & 1;
        k.x_more = k.x == DI_F8_E4M3 ? 32 * di_test_random_range(&rng, 0, 1) : di_test_random_range(&rng, 0, 3);
        k.out_more = di_test_random_range(&rng, 0, 3);
        portable_case(&t, &rng, &k);
    }
    twin_close(&t);
}

DI_PROPERTY(portable_has_the_reference_bits_at_released_sizes, 1) {
    uint64_t rng = seed;
    const gemm_kind kinds[6] = {
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 3, 1280, 5120, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 2, 2304, 5120, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 2, 2048, 4096, 2, false, 0, 0},
        {DI_BF16, DI_BF16, DI_F32, 40, 384, 5120, 1, false, 0, 0},
        {DI_F32, DI_F8_E4M3, DI_F32, 33, 512, 5120, 1, true, 0, 0},
        {DI_BF16, DI_BF16, DI_F32, 1, 2000, 5120, 1, false, 0, 1},
    };
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "portable");
    for (size_t i = 0; i < DI_COUNT(kinds); i++)
        portable_case(&t, &rng, &kinds[i]);
    twin_close(&t);
}

/* ---- the tensor cores' kernels -----------------------------------------------------------------------------------
 * Products of bf16 are exact and added in float, in the tensor core with truncation: a step of 16 k is off by at most
 * 17 units of the last place of what it holds, so 2^-22 for each k of the sum of magnitudes covers it. A step of
 * E4M3 on both sides keeps 13 bits below the largest of its 32 products, each product cut there. */

static void case_check(twin *t, uint64_t *rng, gemm_case *c, int64_t n_samples) {
    const di_gemm_args *a = &c->a;
    bool is_cut = a->x.dtype == DI_F8_E4M3 && a->w->dtype == DI_F8_E4M3;
    int64_t g = DI_MAX(a->n_groups, 1), n_out = a->w->n_out, n_in = a->w->n_in, n_all = a->x.n_rows * n_out;
    double *got = twin_act_values(t, &c->d.out);
    di_act poison = a->out; /* still poisoned: the reference did not run */
    double poison_value = ops_act_value(&poison, 0, 0);
    for (int64_t i = 0; i < n_all; i++) {
        if (got[i] == poison_value || isnan(got[i]))
            fail_msg("row %d, output %d is %g: not written", (int)(i / n_out), (int)(i % n_out), got[i]);
    }
    for (int64_t s = 0; s < (n_samples ? n_samples : n_all); s++) {
        int64_t at = n_samples ? di_test_random_range(rng, 0, n_all - 1) : s, row = at / n_out, o = at % n_out;
        double y = 0, size = 0, cut = 0, largest = 0;
        for (int64_t i = 0; i < n_in; i++) {
            double p = ops_act_value(&a->x, row, o / (n_out / g) * n_in + i) * ops_mat_value(a->w, o, i);
            largest = i % 32 ? fmax(largest, fabs(p)) : fabs(p);
            if (i % 32 == 31)
                cut += 32 * 0x1p-13 * largest;
            y += p;
            size += fabs(p);
        }
        if (a->add)
            y += a->add[row * a->out.stride + o];
        double bound = (double)n_in * 0x1p-22 * size + ops_round_bound(a->out.dtype, y) + (is_cut ? cut : 0);
        if (!(fabs(got[at] - y) <= bound))
            fail_msg("row %d, output %d: found %.9g, expected %.9g within %.3g", (int)row, (int)o, got[at], y, bound);
    }
    free(got);
}

static void fast_case(twin *t, uint64_t *rng, const gemm_kind *k, int64_t n_samples) {
    gemm_case c;
    case_make(&c, t, rng, k);
    assert_int_equal(t->gpu.ops->gemm(t->stream, &c.d), DI_OK);
    case_check(t, rng, &c, n_samples);
    gaps_are_untouched(t, &c.d.out);
    case_drop(&c, t);
}

static const di_dtype fast_weights[3] = {DI_F8_E4M3, DI_F4_E2M1, DI_BF16};

static void fast_random(twin *t, uint64_t *rng, int n) {
    const int64_t rows[12] = {1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 128, 300};
    const di_dtype outs[2] = {DI_F32, DI_BF16};
    for (int i = 0; i < n; i++) {
        gemm_kind k = {.w = fast_weights[i % 3], .out = pick(rng, outs, 2)};
        k.x = k.w == DI_BF16 ? DI_BF16 : DI_F8_E4M3;
        k.n_rows = rows[(i / 3 + (int)di_test_random_range(rng, 0, 2)) % 12];
        k.n_groups = di_test_random(rng) % 4 ? 1 : 2;
        k.n_out = k.n_groups > 1 ? 256 : di_test_random_range(rng, 1, 300);
        k.n_in = 128 * di_test_random_range(rng, 1, 9);
        k.has_add = di_test_random(rng) & 1;
        k.x_more = 32 * di_test_random_range(rng, 0, 1);
        k.out_more = di_test_random(rng) & 1 ? di_test_random_range(rng, 0, 9) : 0;
        fast_case(t, rng, &k, 3000);
    }
}

DI_PROPERTY(fast_is_within_rounding, 2) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    fast_random(&t, &rng, IS_SLOW ? 12 : 72);
    twin_close(&t);
}

DI_PROPERTY(order_free_is_within_rounding, 2) {
    uint64_t rng = seed;
    di_limits l = limits();
    di_error err = {0};
    twin t;
    if (!twin_try_open(&t, &l, "auto", true, &err))
        di_test_skip("%s", err.message);
    fast_random(&t, &rng, IS_SLOW ? 6 : 36);
    for (int i = 0; i < (IS_SLOW ? 2 : 12); i++) {
        gemm_kind k = {.x = DI_F8_E4M3, .w = DI_F8_E4M3, .out = i & 1 ? DI_F32 : DI_BF16, .has_add = i & 2};
        k.n_rows = di_test_random_range(&rng, 512, IS_SLOW ? 520 : 1500);
        k.n_groups = i % 3 ? 1 : 2;
        k.n_out = k.n_groups > 1 ? 512 : di_test_random_range(&rng, 1, IS_SLOW ? 150 : 3000);
        k.n_in = 128 * di_test_random_range(&rng, 1, IS_SLOW ? 3 : 12);
        k.x_more = 32 * di_test_random_range(&rng, 0, 1);
        k.out_more = i & 4 ? di_test_random_range(&rng, 0, 9) : 0;
        fast_case(&t, &rng, &k, 6000);
    }
    twin_close(&t);
}

/* wq_a, wq_b, wkv, wo_a, wo_b, w1 and the head (cut), few and many rows. */
DI_PROPERTY(fast_is_within_rounding_at_released_sizes, 1) {
    uint64_t rng = seed;
    const gemm_kind kinds[8] = {
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 0, 1280, 5120, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 0, 32768, 1280, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 0, 512, 5120, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 0, 8192, 4096, 8, false, 0, 0},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 0, 5120, 8192, 1, false, 0, 0},
        {DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 0, 2304, 5120, 1, false, 0, 0},
        {DI_BF16, DI_BF16, DI_F32, 0, 12928, 5120, 1, true, 0, 0},
        {DI_BF16, DI_BF16, DI_BF16, 0, 512, 5120, 1, false, 0, 0},
    };
    const int64_t rows[6] = {1, 5, 16, 32, 64, 513};
    di_limits l = limits();
    for (int free_order = 0; free_order < 2; free_order++) {
        di_error err = {0};
        twin t;
        if (!twin_try_open(&t, &l, "auto", free_order, &err))
            di_test_skip("%s", err.message);
        for (size_t i = 0; i < DI_COUNT(kinds); i++) {
            for (int r = 0; r < 6; r++) {
                gemm_kind k = kinds[i];
                k.n_rows = rows[r];
                if (IS_SLOW && k.n_rows * k.n_out * k.n_in > 16 << 20)
                    continue;
                if (k.n_rows > 64 && (i + (size_t)free_order) % 2)
                    continue; /* making and checking them takes the time */
                fast_case(&t, &rng, &k, 300);
            }
        }
        twin_close(&t);
    }
}

/* Rows 0.. of a product among ever more rows. */
static void same_bits_case(twin *t, uint64_t *rng, di_dtype w, const int64_t *shape, int64_t n_rows) {
    const int64_t rows[14] = {1, 2, 8, 9, 17, 33, 64, 65, 128, 200, 300, 500, 1100, 1700};
    gemm_kind k = {w == DI_BF16 ? DI_BF16 : DI_F8_E4M3, w, DI_F32, n_rows, shape[0], shape[1], 1, false, 0, 0};
    gemm_case c;
    case_make(&c, t, rng, &k);
    size_t n_bytes = twin_act_bytes(&c.a.out);
    uint8_t *first = ops_rig_alloc(n_bytes), *got = ops_rig_alloc(n_bytes);
    for (int r = 0; r < 14 && rows[r] <= k.n_rows; r++) {
        c.d.x.n_rows = c.d.out.n_rows = rows[r];
        assert_int_equal(t->gpu.ops->gemm(t->stream, &c.d), DI_OK);
        size_t n_now = (size_t)(rows[r] * k.n_out) * 4;
        twin_back(t, got, c.d.out.data, n_now);
        if (r) /* as many as the batch before had */
            twin_same(got, first, (size_t)(rows[r - 1] * k.n_out) * 4, "rows of a larger batch");
        memcpy(first, got, n_now);
    }
    free(first);
    free(got);
    case_drop(&c, t);
}

DI_PROPERTY(a_row_has_the_same_bits_in_any_batch, 1) {
    uint64_t rng = seed;
    const int64_t shapes[6][2] = {{300, 384}, {320, 512}, {512, 5120}, {2304, 1280}, {17024, 256}, {1280, 640}};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < (IS_SLOW ? 4 : 18); i++)
        same_bits_case(&t, &rng, fast_weights[i % 3], shapes[i / 3], IS_SLOW ? 300 : 1700);
    twin_close(&t);
}

/* gemm_chain has the bits of gemm with rope, or with quant, behind it. */
static void chain_case(twin *t, uint64_t *rng, int64_t n_rows, int32_t n_groups, bool is_rope) {
    enum { HEAD = 128, FREQ = 32 };
    gemm_kind k = {DI_F8_E4M3, DI_F8_E4M3, is_rope ? DI_BF16 : DI_F32, n_rows, 1024, 384, n_groups, false, 0, 0};
    gemm_case c;
    case_make(&c, t, rng, &k);
    di_act codes = ops_act_empty(&c.mem, DI_F8_E4M3, n_rows, k.n_out);
    float *cos = ops_mem_take(&c.mem, (size_t)(n_rows * FREQ) * 4),
          *sin = ops_mem_take(&c.mem, (size_t)(n_rows * FREQ) * 4);
    for (int64_t i = 0; i < n_rows * FREQ; i++) {
        cos[i] = ops_mat_noise(rng);
        sin[i] = ops_mat_noise(rng);
    }
    di_gemm_chain_args d = {.gemm = c.d};
    if (is_rope) {
        d.head_dim = HEAD, d.n_freq = FREQ;
        d.cos = twin_in(t, cos, (size_t)(n_rows * FREQ) * 4);
        d.sin = twin_in(t, sin, (size_t)(n_rows * FREQ) * 4);
    } else {
        d.codes = twin_act_out(t, &codes);
    }
    const di_ops *ops = t->gpu.ops;
    assert_int_equal(ops->gemm(t->stream, &c.d), DI_OK);
    twin_back(t, c.a.out.data, c.d.out.data, twin_act_bytes(&c.a.out));
    di_rope_args rope = {
        .x = c.a.out, .n_heads = 1024 / HEAD, .head_dim = HEAD, .n_freq = FREQ, .cos = cos, .sin = sin};
    if (is_rope)
        assert_int_equal(di_cpu_ops.rope(t->cpu_stream, &rope), DI_OK);
    else
        assert_int_equal(di_cpu_ops.quant(t->cpu_stream, &(di_quant_args){.x = c.a.out, .out = codes}), DI_OK);
    di_status st = ops->gemm_chain(t->stream, &d);
    if (is_rope && n_rows > 16 && st == DI_ERR_SHAPE) { /* many rows: the operations one by one */
        case_drop(&c, t);
        return;
    }
    assert_int_equal(st, DI_OK);
    if (is_rope)
        twin_act_same(t, &d.gemm.out, &c.a.out, "rope behind a product");
    else
        twin_act_same(t, &d.codes, &codes, "codes of a product");
    d.gemm.out.dtype = is_rope ? DI_F32 : DI_BF16;
    assert_int_equal(ops->gemm_chain(t->stream, &d), DI_ERR_SHAPE);
    case_drop(&c, t);
}

DI_PROPERTY(chain_has_the_bits_of_its_operations, 1) {
    uint64_t rng = seed;
    const int64_t rows[7] = {1, 7, 16, 30, 70, 257, 1500};
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "sm90");
    for (int i = 0; i < 4 * (IS_SLOW ? 6 : 7); i++)
        chain_case(&t, &rng, rows[i / 4], i & 1 ? 8 : 1, i & 2);
    twin_close(&t);
}

/* Scales of any size: weights' factors beyond bf16's range are taken in two steps. x is scaled down so that products
 * are floats. */
static void any_scale_case(twin *t, uint64_t *rng, di_dtype w, int64_t n_rows) {
    gemm_kind k = {DI_F8_E4M3, w, DI_F32, n_rows, 128, 256, 1, false, 0, 0};
    gemm_case c;
    case_make(&c, t, rng, &k);
    uint8_t *scale = (uint8_t *)c.w.scale;
    size_t n_scales = c.w.dtype == DI_F8_E4M3 ? 4 * 8 : 128 * 8;
    for (size_t s = 0; s < n_scales; s++)
        scale[s] = (uint8_t)di_test_random_range(rng, 20, 235);
    twin_drop(t);
    c.dev_w = twin_mat_in(t, &c.w);
    c.d.x = twin_act_in(t, &c.a.x);
    c.d.out = twin_act_out(t, &c.a.out);
    assert_int_equal(t->gpu.ops->gemm(t->stream, &c.d), DI_OK);
    case_check(t, rng, &c, 0);
    case_drop(&c, t);
}

DI_PROPERTY(any_scale_of_weights_is_right, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    for (int i = 0; i < 4; i++)
        any_scale_case(&t, &rng, fast_weights[i % 2], i < 2 ? 3 : 40);
    twin_close(&t);
}

/* A NaN of the activations stays one, in its row alone. */
static void nan_case(twin *t, uint64_t *rng, di_dtype w, uint8_t code) {
    gemm_kind k = {w == DI_BF16 ? DI_BF16 : DI_F8_E4M3, w, DI_F32, 5, 128, 256, 1, false, 0, 0};
    gemm_case c;
    case_make(&c, t, rng, &k);
    if (w == DI_BF16)
        ((uint16_t *)c.a.x.data)[3 * 256 + 77] = 0x7FC0;
    else
        ((uint8_t *)c.a.x.data)[3 * 256 + 77] = code;
    c.d.x = twin_act_in(t, &c.a.x);
    assert_int_equal(t->gpu.ops->gemm(t->stream, &c.d), DI_OK);
    double *got = twin_act_values(t, &c.d.out);
    for (int r = 0; r < 5; r++) {
        for (int o = 0; o < 128; o++)
            assert_int_equal(isnan(got[r * 128 + o]) != 0, r == 3);
    }
    free(got);
    case_drop(&c, t);
}

static void nan_stays_in_its_row(void **state) {
    (void)state;
    uint64_t rng = 3;
    const char *const kernels[2] = {"portable", "auto"};
    di_limits l = limits();
    for (int i = 0; i < 6; i++) {
        twin t;
        twin_open(&t, &l, kernels[i / 3]);
        nan_case(&t, &rng, fast_weights[i % 3], i & 1 ? 0xFF : 0x7F);
        twin_close(&t);
    }
}

/* ---- Blackwell's kernel, which is taken when asked for by name --------------------------------------------------- */

/* All widths of the multiply, clusters of 1 to 8 blocks, tiles that are not full, groups of columns. */
DI_PROPERTY(sm100_is_within_rounding, 2) {
    uint64_t rng = seed;
    const int64_t rows[8] = {1, 16, 17, 31, 64, 65, 128, 150};
    const int64_t blocks[4] = {1, 3, 5, 18};
    di_limits l = limits();
    twin t;
    twin_open_sm100(&t, &l);
    for (int i = 0; i < 16; i++) {
        gemm_kind k = {.x = DI_F8_E4M3, .w = DI_F8_E4M3, .out = i & 1 ? DI_F32 : DI_BF16, .has_add = i % 3 == 0};
        k.n_rows = rows[(i + (int)(seed % 8)) % 8];
        k.n_in = 128 * blocks[i / 2 % 4];
        k.n_groups = i % 4 == 1 ? 2 : 1;
        k.n_out = k.n_groups > 1 ? 256 : di_test_random_range(&rng, 1, 300);
        k.x_more = 32 * di_test_random_range(&rng, 0, 1);
        k.out_more = di_test_random_range(&rng, 0, 9);
        twin_turn(seed, i);
        fast_case(&t, &rng, &k, 3000);
    }
    twin_turn(0, 1);
    twin_close(&t);
}

DI_PROPERTY(sm100_rows_have_the_same_bits_in_any_batch, 1) {
    uint64_t rng = seed;
    const int64_t shapes[2][2] = {{300, 384}, {130, 2304}};
    di_limits l = limits();
    twin t;
    twin_open_sm100(&t, &l);
    for (int i = 0; i < 2; i++)
        same_bits_case(&t, &rng, DI_F8_E4M3, shapes[i], IS_SLOW ? 200 : 1700);
    twin_close(&t);
}

DI_PROPERTY(sm100_takes_scales_and_nan, 1) {
    uint64_t rng = seed;
    di_limits l = limits();
    twin t;
    twin_open_sm100(&t, &l);
    any_scale_case(&t, &rng, DI_F8_E4M3, 3);
    any_scale_case(&t, &rng, DI_F8_E4M3, 40);
    nan_case(&t, &rng, DI_F8_E4M3, 0x7F);
    nan_case(&t, &rng, DI_F8_E4M3, 0xFF);
    twin_close(&t);
}

#ifdef DI_TWIN_EMU
static void sm100_is_not_the_default(void **state) {
    (void)state;
    const char *const kernels[3] = {"auto", "portable", "sm100"}, *const want[3] = {"portable", "portable",
                                                                                    "portable sm100"};
    di_limits l = limits();
    for (int i = 0; i < 3; i++) {
        di_device_info info;
        di_error err = {0};
        twin t;
        assert_true(twin_try_open_blackwell(&t, &l, kernels[i], &err));
        di_test_ok(t.gpu.device->info(t.dev, &info, &err), &err);
        assert_string_equal(info.levels, want[i]);
        twin_close(&t);
    }
}
#endif

static void wrong_shapes_are_refused(void **state) {
    (void)state;
    uint64_t rng = 5;
    di_limits l = limits();
    twin t;
    twin_open(&t, &l, "auto");
    gemm_kind k = {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 4, 128, 256, 1, false, 0, 0};
    gemm_case c;
    case_make(&c, &t, &rng, &k);
    di_gemm_args d = c.d;
    d.x.n_cols = 224;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.out.n_rows = 3;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.out.n_cols = 127;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.out.dtype = DI_F8_E4M3;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.n_groups = 3;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.x.scale = NULL;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_ERR_SHAPE);
    d = c.d;
    d.x.n_rows = d.out.n_rows = 0;
    assert_int_equal(t.gpu.ops->gemm(t.stream, &d), DI_OK);
    case_drop(&c, &t);
    twin_close(&t);
}

#ifdef DI_TWIN_EMU
#define EMULATED_TESTS cmocka_unit_test(sm100_is_not_the_default),
#else
#define EMULATED_TESTS
#endif
DI_TEST_GROUP(cuda_gemm, EMULATED_TESTS cmocka_unit_test(portable_has_the_reference_bits),
              cmocka_unit_test(portable_has_the_reference_bits_at_released_sizes),
              cmocka_unit_test(fast_is_within_rounding), cmocka_unit_test(order_free_is_within_rounding),
              cmocka_unit_test(fast_is_within_rounding_at_released_sizes),
              cmocka_unit_test(a_row_has_the_same_bits_in_any_batch),
              cmocka_unit_test(chain_has_the_bits_of_its_operations), cmocka_unit_test(any_scale_of_weights_is_right),
              cmocka_unit_test(nan_stays_in_its_row), cmocka_unit_test(sm100_is_within_rounding),
              cmocka_unit_test(sm100_rows_have_the_same_bits_in_any_batch),
              cmocka_unit_test(sm100_takes_scales_and_nan), cmocka_unit_test(wrong_shapes_are_refused));
