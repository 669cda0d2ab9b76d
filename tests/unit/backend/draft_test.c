/* The confidence head against double precision, and its clamp. */
#include "ops_rig.h"

enum { H = 160, RANK = 64, N = 5 };
static const di_limits limits = {.rows_max = N, .n_in_max = H + RANK, .head_dim = 32, .n_heads = 1, .keys_max = 8};

typedef struct head {
    ops_rig r;
    uint16_t w[H + RANK];
    float hid[N * H], emb[N * RANK], conf[N];
    uint16_t hid16[N * H], emb16[N * RANK];
    di_mat mat;
    di_confidence_args a;
} head;

static void head_init(head *t, di_dtype dtype) {
    memset(t, 0, sizeof *t);
    ops_rig_open(&t->r, di_cpu_level_best(), 2, &limits);
    uint64_t rng = 3;
    float w[H + RANK];
    ops_rig_random_bf16(&rng, 0.3, w, H + RANK);
    for (int i = 0; i < H + RANK; i++)
        t->w[i] = di_f32_to_bf16(w[i]);
    ops_rig_random_bf16(&rng, 1, t->hid, N * H);
    ops_rig_random_bf16(&rng, 1, t->emb, N * RANK);
    t->mat = (di_mat){.dtype = DI_BF16, .n_out = 1, .n_in = H + RANK, .data = t->w};
    t->a = (di_confidence_args){.hid = ops_rig_act(dtype, t->hid, t->hid16, N, H),
                                .emb = ops_rig_act(dtype, t->emb, t->emb16, N, RANK),
                                .w = &t->mat,
                                .tau = 1,
                                .conf = t->conf};
}

static void confidence_is_the_sigmoid_of_the_dot_over_tau(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) {
        head t;
        head_init(&t, k % 2 ? DI_BF16 : DI_F32);
        t.a.tau = k < 2 ? 1.0f : 2.5f;
        assert_int_equal(di_cpu_ops.confidence(t.r.stream, &t.a), DI_OK);
        for (int i = 0; i < N; i++) {
            double dot = 0;
            for (int c = 0; c < H; c++)
                dot += (double)di_bf16_to_f32(t.w[c]) * t.hid[i * H + c];
            for (int c = 0; c < RANK; c++)
                dot += (double)di_bf16_to_f32(t.w[H + c]) * t.emb[i * RANK + c];
            assert_true(fabs(t.conf[i] - 1 / (1 + exp(-dot / t.a.tau))) < 1e-5);
        }
        ops_rig_close(&t.r);
    }
}

static void the_logit_is_clamped_to_60(void **state) {
    (void)state;
    head t;
    head_init(&t, DI_F32);
    t.a.tau = 1e-20f;
    assert_int_equal(di_cpu_ops.confidence(t.r.stream, &t.a), DI_OK);
    int high = 0, low = 0;
    for (int i = 0; i < N; i++) {
        if (t.conf[i] == 1.0f)
            high++; /* 1/(1 + e^-60) rounds to 1 */
        if (t.conf[i] > 8.7e-27f && t.conf[i] < 8.8e-27f)
            low++; /* e^-60, where no clamp gives 0 */
    }
    assert_int_equal(high + low, N);
    assert_true(high > 0 && low > 0);
    ops_rig_close(&t.r);
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    head t;
    head_init(&t, DI_F32);
    t.mat.n_in = H;
    assert_int_equal(di_cpu_ops.confidence(t.r.stream, &t.a), DI_ERR_SHAPE);
    t.mat.n_in = H + RANK;
    t.mat.n_out = 2;
    assert_int_equal(di_cpu_ops.confidence(t.r.stream, &t.a), DI_ERR_SHAPE);
    t.mat.n_out = 1;
    t.a.emb.n_rows = N - 1;
    assert_int_equal(di_cpu_ops.confidence(t.r.stream, &t.a), DI_ERR_SHAPE);
    ops_rig_close(&t.r);
}

DI_TEST_GROUP(draft, cmocka_unit_test(confidence_is_the_sigmoid_of_the_dot_over_tau),
              cmocka_unit_test(the_logit_is_clamped_to_60), cmocka_unit_test(bad_shapes_are_refused));
