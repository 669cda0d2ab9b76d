/* The AMX engine of wide products with a model of the tile instructions (amx_model.h), on any machine with AVX-512:
 * products and experts against the reference, bit by bit. On a machine with AMX the levels' own tests run the real one
 * besides. */
#include "ops_mat.h"

#if defined(__x86_64__)

/* The engine under other names than the library's. */
#define DI_AMX_TILES "amx_model.h"
#define di_wide_amx amx_wide_test_engine
#define di_cpu_install_amx_wide amx_wide_test_install
void amx_wide_test_install(di_cpu_kernels *k);
#include "backend/cpu/amx_wide.c"

static bool is_there(void) {
    if (di_cpu_level_best() >= DI_CPU_AVX512)
        return true;
    di_test_skip("needs AVX-512");
    return false;
}

/* The AVX-512 level with the modelled engine on top. */
static void open_modelled(ops_rig *r, int threads, const di_limits *limits) {
    ops_rig_open(r, DI_CPU_AVX512, threads, limits);
    amx_wide_test_install(&r->dev->kernels);
}

/* Every way through the engine: one tile of rows, two, panes with whole and narrow last tiles; outputs of all
 * remainders; groups; each format of weights. */
static void products_match_the_reference(void **state) {
    (void)state;
    if (!is_there())
        return;
    static const struct {
        di_dtype x, w, out;
        int64_t n_rows, n_in, n_out;
        int32_t n_groups;
    } cases[] = {
        {DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 1, 1024, 96, 1}, {DI_F8_E4M3, DI_F4_E2M1, DI_F32, 8, 160, 40, 1},
        {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 1, 288, 64, 1},  {DI_F8_E4M3, DI_F8_E4M3, DI_F32, 16, 96, 75, 1},
        {DI_BF16, DI_BF16, DI_F32, 3, 160, 35, 1},         {DI_BF16, DI_BF16, DI_BF16, 17, 64, 16, 1},
        {DI_BF16, DI_F8_E4M3, DI_F32, 32, 32, 33, 1},      {DI_F8_E4M3, DI_F4_E2M1, DI_BF16, 29, 288, 128, 1},
        {DI_F8_E4M3, DI_F8_E4M3, DI_F32, 33, 544, 300, 1}, {DI_F8_E4M3, DI_F4_E2M1, DI_F32, 130, 608, 70, 1},
        {DI_BF16, DI_BF16, DI_BF16, 80, 1024, 50, 1},      {DI_F8_E4M3, DI_F8_E4M3, DI_BF16, 5, 128, 120, 3},
        {DI_F8_E4M3, DI_BF16, DI_F32, 40, 64, 72, 3},
    };
    uint64_t rng = 11;
    di_limits limits = ops_mat_limits();
    for (size_t c = 0; c < DI_COUNT(cases); c++) {
        ops_mem mem = {0};
        di_mat w = ops_mat_random(&mem, &rng, cases[c].w, cases[c].n_out, cases[c].n_in);
        di_act x = ops_act_random(&mem, &rng, cases[c].x, cases[c].n_rows, cases[c].n_in * cases[c].n_groups);
        di_act want = ops_act_empty(&mem, cases[c].out, cases[c].n_rows, cases[c].n_out);
        di_act got = ops_act_empty(&mem, cases[c].out, cases[c].n_rows, cases[c].n_out);
        di_gemm_args args = {.x = x, .w = &w, .n_groups = cases[c].n_groups, .out = want};
        ops_rig rig;
        ops_rig_open(&rig, DI_CPU_REF, 1, &limits);
        assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
        ops_rig_close(&rig);
        for (int threads = 1; threads <= 2; threads++) {
            open_modelled(&rig, threads, &limits);
            args.out = got;
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            ops_rig_close(&rig);
            size_t n_bytes = di_dtype_bytes(cases[c].out, (size_t)(cases[c].n_rows * cases[c].n_out));
            if (memcmp(got.data, want.data, n_bytes) != 0)
                fail_msg("case %zu on %d threads differs from the reference", c, threads);
        }
        ops_mem_free(&mem);
    }
}

/* What the engine must hand to the plain sums: a NaN, scales beyond its range, exponents beyond it. */
static void unusual_values_match_the_reference(void **state) {
    (void)state;
    enum { OUT = 70, IN = 288 };
    static const struct {
        di_dtype x, w;
        int w_code, w_scale, x_scale;
    } cases[] = {
        {DI_F8_E4M3, DI_F8_E4M3, 0x7F, 118, 117}, {DI_F8_E4M3, DI_F8_E4M3, 1, 250, 117},
        {DI_F8_E4M3, DI_F4_E2M1, 0x77, 255, 117}, {DI_F8_E4M3, DI_F4_E2M1, 0x77, 3, 117},
        {DI_F8_E4M3, DI_F4_E2M1, 0x77, 118, 255}, {DI_BF16, DI_BF16, 0x7F, 0, 0},
    };
    if (!is_there())
        return;
    uint64_t rng = 13;
    di_limits limits = ops_mat_limits();
    const int64_t counts[3] = {2, 20, 50};
    for (size_t c = 0; c < DI_COUNT(cases); c++) {
        ops_mem mem = {0};
        for (int n = 0; n < 3; n++) {
            di_mat w = ops_mat_random(&mem, &rng, cases[c].w, OUT, IN);
            di_act x = ops_act_random(&mem, &rng, cases[c].x, counts[n], IN);
            ((uint8_t *)(uintptr_t)w.data)[35] = (uint8_t)cases[c].w_code; /* of bf16: an exponent, large or NaN's */
            if (w.scale)
                ((uint8_t *)(uintptr_t)w.scale)[1] = (uint8_t)cases[c].w_scale;
            if (x.scale)
                x.scale[1] = (uint8_t)cases[c].x_scale;
            di_act want = ops_act_empty(&mem, DI_F32, counts[n], OUT),
                   got = ops_act_empty(&mem, DI_F32, counts[n], OUT);
            di_gemm_args args = {.x = x, .w = &w, .out = want};
            ops_rig rig;
            ops_rig_open(&rig, DI_CPU_REF, 1, &limits);
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            ops_rig_close(&rig);
            open_modelled(&rig, 2, &limits);
            args.out = got;
            assert_int_equal(di_cpu_ops.gemm(rig.stream, &args), DI_OK);
            ops_rig_close(&rig);
            for (int64_t i = 0; i < counts[n] * OUT; i++) {
                float a = ((float *)want.data)[i], b = ((float *)got.data)[i];
                if (a != b && !(isnan(a) && isnan(b)))
                    fail_msg("case %zu, %d rows, element %d: %g, expected %g", c, (int)counts[n], (int)i, b, a);
            }
        }
        ops_mem_free(&mem);
    }
}

static void experts_match_the_reference(void **state) {
    (void)state;
    enum { H = 288, I = 160, E = 9, K = 3, ROWS = 120 };
    if (!is_there())
        return;
    uint64_t rng = 12;
    ops_mem mem = {0};
    di_expert experts[E + 1];
    for (int e = 0; e <= E; e++) {
        di_dtype dtype = e < E ? DI_F4_E2M1 : DI_F8_E4M3;
        experts[e].w1 = ops_mat_random(&mem, &rng, dtype, I, H);
        experts[e].w3 = ops_mat_random(&mem, &rng, dtype, I, H);
        experts[e].w2 = ops_mat_random(&mem, &rng, dtype, H, I);
    }
    di_act x = ops_act_random(&mem, &rng, DI_F8_E4M3, ROWS, H);
    int32_t idx[ROWS * K];
    float weight[ROWS * K];
    for (int row = 0; row < ROWS; row++) {
        int first = row < 60 ? 2 : (int)di_test_random_range(&rng, 0, E - 1); /* one expert with many rows */
        for (int i = 0; i < K; i++) {
            idx[row * K + i] = (first + 2 * i) % E;
            weight[row * K + i] = (float)di_test_random_unit(&rng);
        }
    }
    di_limits limits = ops_mat_limits();
    limits.hidden_size = H;
    const int64_t counts[3] = {1, 8, ROWS};
    for (int c = 0; c < 3; c++) {
        di_act out[2];
        for (int is_modelled = 0; is_modelled < 2; is_modelled++) {
            out[is_modelled] = ops_act_empty(&mem, DI_BF16, counts[c], H);
            di_moe_args args = {.x = x,
                                .idx = idx,
                                .weight = weight,
                                .k = K,
                                .n_experts = E,
                                .experts = experts,
                                .shared = &experts[E],
                                .limit = 10.0f,
                                .out = out[is_modelled]};
            args.x.n_rows = counts[c];
            ops_rig rig;
            if (is_modelled)
                open_modelled(&rig, 2, &limits);
            else
                ops_rig_open(&rig, DI_CPU_REF, 2, &limits);
            assert_int_equal(di_cpu_ops.moe(rig.stream, &args), DI_OK);
            ops_rig_close(&rig);
        }
        assert_memory_equal(out[0].data, out[1].data, (size_t)(counts[c] * H) * 2);
    }
    ops_mem_free(&mem);
}

DI_TEST_GROUP(backend_amx_wide, cmocka_unit_test(products_match_the_reference),
              cmocka_unit_test(unusual_values_match_the_reference), cmocka_unit_test(experts_match_the_reference));

#endif
