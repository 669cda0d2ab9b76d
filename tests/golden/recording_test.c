/* Recorded forwards: a backend that records the CPU's operations and plays them again, as a GPU's graphs do, with their
 * arguments as they were. What comes out of a batch that was filled up and played has the bits of the plain run, and so
 * have pages and rings: so shape alone decides which recording serves, and the rows that fill up leave no trace.
 *
 * With side streams, what goes to a side is done as late as it may be, when the stream follows it, or at once, before
 * what the stream was given since the side followed it: whoever counts on another order changes bits. */
#include "harness.h"
#include "model/model_internal.h"
#include "rig.h"

enum { SEQS = 35, PROMPT = 9, STEPS = 6, CALLS_MAX = 4096, CALL_BYTES = 512 };

/* A call: which operation, its arguments, and the rows that they point to. */
typedef struct call {
    di_status (*run)(di_stream *stream, void *args);
    union {
        max_align_t align;
        uint8_t bytes[CALL_BYTES];
    } args;
    di_rows rows;
    bool has_rows;
} call;

struct di_graph {
    call *calls;
    int n_calls;
};

static const di_backend *cpu;
static di_graph *recorder; /* NULL: not recording */
static int n_launched;
static di_device *cpu_device;
static di_stream *side; /* NULL: none was asked for */
static bool is_early;   /* the side's calls are done at once, the stream's are put off; else the other way round */
static bool is_open;    /* the side followed the stream, which has not followed it since */
static di_graph put_off;
static int n_beside;    /* calls that the side was given */
static float *collapse; /* room for what nobody keeps */

/* Where a call on this stream is noted; NULL: it is done. */
static di_graph *note_where(const di_stream *stream) {
    bool is_side = side && stream == side;
    n_beside += is_side;
    return is_open && is_side != is_early ? &put_off : recorder;
}

/* Operations that have rows, each in the first field of its arguments. */
#define HAS_ROWS(f)                                                                                                    \
    (strcmp(#f, "ring_store") == 0 || strcmp(#f, "compress_pool") == 0 || strcmp(#f, "page_store") == 0 ||             \
     strcmp(#f, "index_select") == 0 || strcmp(#f, "attention") == 0)

#define NOTED(f, does)                                                                                                 \
    static di_status play_##f(di_stream *stream, void *args) {                                                         \
        return does(stream, args);                                                                                     \
    }                                                                                                                  \
    static di_status note_##f(di_stream *stream, const di_##f##_args *args) {                                          \
        di_graph *to = note_where(stream);                                                                             \
        if (!to)                                                                                                       \
            return does(stream, args);                                                                                 \
        _Static_assert(sizeof *args <= CALL_BYTES, "room for the arguments");                                          \
        assert_true(to->n_calls < CALLS_MAX);                                                                          \
        call *c = &to->calls[to->n_calls++];                                                                           \
        c->run = play_##f;                                                                                             \
        memcpy(c->args.bytes, args, sizeof *args);                                                                     \
        c->has_rows = HAS_ROWS(f);                                                                                     \
        if (c->has_rows)                                                                                               \
            memcpy(&c->rows, *(const di_rows *const *)(const void *)args, sizeof c->rows);                             \
        return DI_OK;                                                                                                  \
    }
#define OP(f) NOTED(f, cpu->ops->f)
DI_OPS_LIST(OP)

static di_status play(di_stream *stream, const call *calls, int n) {
    for (int i = 0; i < n; i++) {
        call c = calls[i];
        const di_rows *rows = &c.rows;
        if (c.has_rows)
            memcpy(c.args.bytes, &rows, sizeof rows);
        di_status st = c.run(stream, c.args.bytes);
        if (st)
            return st;
    }
    return DI_OK;
}

/* What hc_step stands for (ops.h), so that the mixes are left over for a side. */
static di_status step_by_step(di_stream *stream, const di_hc_step_args *a) {
    const di_ops *ops = cpu->ops;
    assert_null(a->z.data);
    di_act z = a->out;
    z.data = collapse;
    if (a->f.data)
        assert_int_equal(
            ops->hc_post(stream, &(di_hc_post_args){.x = a->x, .f = a->f, .m = a->m, .post = a->post, .comb = a->comb}),
            DI_OK);
    assert_int_equal(ops->hc_mix(stream, &(di_hc_mix_args){.x = a->x, .m = a->m, .pre_in = a->pre_in, .z = z}), DI_OK);
    assert_int_equal(
        ops->rms_norm(stream, &(di_rms_norm_args){.x = z, .out = a->out, .weight = a->weight, .eps = a->eps}), DI_OK);
    return a->codes.data ? ops->quant(stream, &(di_quant_args){.x = a->out, .out = a->codes}) : DI_OK;
}
NOTED(hc_step, step_by_step)

/* The other half of hc_mix: the CPU's makes the collapse too. */
static di_status mixes_alone(di_stream *stream, const di_hc_mix_args *a) {
    di_hc_mix_args args = *a;
    if (!args.z.data) {
        int64_t h = a->x.n_cols / a->m;
        args.z = (di_act){.dtype = a->x.dtype, .n_rows = a->x.n_rows, .n_cols = h, .stride = h, .data = collapse};
    }
    return note_hc_mix(stream, &args);
}

static di_status make_side(di_stream *stream, di_stream **out, di_error *err) {
    (void)stream;
    assert_null(side);
    put_off.calls = calloc(CALLS_MAX, sizeof *put_off.calls);
    assert_non_null(put_off.calls);
    di_status st = cpu->device->stream_create(cpu_device, &side, err);
    *out = side;
    return st;
}

/* One follows the other: what the other put off is done, or recorded. */
static di_status follow(di_stream *stream, di_stream *other, di_error *err) {
    (void)err;
    is_open = other != side;
    if (is_open && !is_early) /* nothing of the stream is put off */
        return DI_OK;
    int n = put_off.n_calls;
    put_off.n_calls = 0;
    if (!recorder)
        return play(stream, put_off.calls, n);
    assert_true(recorder->n_calls + n <= CALLS_MAX);
    memcpy(recorder->calls + recorder->n_calls, put_off.calls, (size_t)n * sizeof *put_off.calls);
    recorder->n_calls += n;
    return DI_OK;
}

static di_status begin(di_stream *stream, di_error *err) {
    (void)stream, (void)err;
    assert_null(recorder);
    assert_int_equal(put_off.n_calls, 0);
    recorder = calloc(1, sizeof *recorder);
    assert_non_null(recorder);
    recorder->calls = calloc(CALLS_MAX, sizeof *recorder->calls);
    assert_non_null(recorder->calls);
    return DI_OK;
}

static di_status end(di_stream *stream, di_graph **out, di_error *err) {
    (void)stream, (void)err;
    assert_int_equal(put_off.n_calls, 0);
    *out = recorder;
    recorder = NULL;
    return DI_OK;
}

static di_status launch(di_stream *stream, di_graph *graph, di_error *err) {
    (void)err;
    n_launched++;
    return play(stream, graph->calls, graph->n_calls);
}

static void destroy(di_graph *graph) {
    free(graph->calls);
    free(graph);
}

static di_seq_rows decode_row(const rig *r, int seq, const int32_t *tokens, int64_t pos) {
    return (di_seq_rows){.tokens = tokens,
                         .pos0 = pos,
                         .n_rows = 1,
                         .n_logits = 1,
                         .slot = seq,
                         .blocks = r->blocks + seq * r->blocks_per_seq,
                         .n_blocks = r->blocks_per_seq};
}

/* Prefills every sequence, then decodes n of them for a few steps; logits of all steps go to out [STEPS, SEQS, V]. */
static void decode(rig *r, int32_t *tokens, int n, float *out) {
    size_t v = (size_t)r->config.vocab;
    rig_reset(r);
    for (int seq = 0; seq < SEQS; seq++)
        rig_prefill(r, seq, tokens + seq, PROMPT + seq % 3, 0, 0);
    for (int step = 0; step < STEPS; step++) {
        di_seq_rows rows[SEQS];
        for (int i = 0; i < n; i++)
            rows[i] = decode_row(r, n - 1 - i, tokens + n - 1 - i, PROMPT + (n - 1 - i) % 3 + step);
        memcpy(out + (size_t)step * SEQS * v, rig_forward(r, rows, n), (size_t)n * v * sizeof *out);
    }
}

typedef enum sides { NO_SIDES, LATE_SIDES, EARLY_SIDES } sides;

static void check(di_numerics numerics, sides with) {
    bool with_side = with != NO_SIDES;
    is_early = with == EARLY_SIDES;
    rig r;
    rig_options opt = {.dir = di_test_source("models/tiny"),
                       .numerics = numerics,
                       .threads = 2,
                       .n_seqs = SEQS,
                       .tokens_max = 256,
                       .rows_max = 64,
                       .logits_max = 64};
    opt.token_map = rig_token_map(&opt.n_token_map);
    rig_open(&r, &opt);
    di_backend plain = r.backend;
    cpu = &plain;
    di_ops ops = *plain.ops;
#define NOTE(f) ops.f = note_##f;
    DI_OPS_LIST(NOTE)
    di_device_ops device = *plain.device;
    device.graph_begin = begin;
    device.graph_end = end;
    device.graph_launch = launch;
    device.graph_destroy = destroy;
    cpu_device = r.device;
    if (with_side) {
        device.stream_side = make_side;
        device.stream_follow = follow;
        ops.hc_step = note_hc_step;
        ops.hc_mix = mixes_alone;
        collapse = calloc((size_t)(opt.rows_max * r.config.hidden), sizeof *collapse);
        assert_non_null(collapse);
    }

    size_t n_bytes = (size_t)STEPS * SEQS * (size_t)r.config.vocab * sizeof(float);
    size_t page_bytes = r.plan.page_bytes * (size_t)(SEQS * r.blocks_per_seq), slot_bytes = r.plan.slot_bytes * SEQS;
    float *want = calloc(1, n_bytes), *got = calloc(1, n_bytes);
    uint8_t *pages = malloc(page_bytes), *slots = malloc(slot_bytes);
    assert_true(want && got && pages && slots);
    int32_t tokens[SEQS + 64];
    for (int i = 0; i < SEQS + 64; i++)
        tokens[i] = 300 + (int32_t)(di_mix64((uint64_t)i) % 5000);
    /* 3 rows stay as they are, 35 are filled up to 40. */
    const int counts[] = {3, SEQS};
    for (size_t k = 0; k < DI_COUNT(counts); k++) {
        memset(want, 0, n_bytes);
        memset(got, 0, n_bytes);
        decode(&r, tokens, counts[k], want);
        memcpy(pages, r.pages, page_bytes);
        memcpy(slots, r.slots, slot_bytes);
        di_forward *first = r.fw;
        di_error err = {0};
        di_backend recording = {.device = &device, .ops = &ops};
        di_model *model;
        di_model_options mo = {.backend = &recording,
                               .device = r.device,
                               .numerics = numerics,
                               .rows_max = opt.rows_max,
                               .seqs_max = opt.n_seqs,
                               .tokens_max = opt.tokens_max,
                               .logits_max = opt.logits_max,
                               .with_draft = true,
                               .token_map = opt.token_map,
                               .n_token_map = opt.n_token_map};
        di_test_ok(di_model_create(&model, &r.config, r.ckpt, &mo, &err), &err);
        di_test_ok(di_forward_create(&r.fw, model, &err), &err);
        n_launched = n_beside = 0;
        decode(&r, tokens, counts[k], got);
        assert_true(n_launched >= STEPS - 1); /* all but the first of a shape */
        assert_true(with_side ? n_beside > 0 : n_beside == 0);
        assert_false(is_open);
        assert_int_equal(put_off.n_calls, 0);
        assert_memory_equal(got, want, n_bytes);
        assert_memory_equal(r.pages, pages, page_bytes);
        assert_memory_equal(r.slots, slots, slot_bytes);
        di_forward_destroy(r.fw);
        plain.device->stream_destroy(side);
        free(put_off.calls);
        side = NULL;
        di_model_destroy(model);
        r.fw = first;
    }
    free(want), free(got), free(pages), free(slots), free(collapse);
    collapse = NULL;
    rig_close(&r);
}

static void recorded_batches_have_the_same_bits(void **state) {
    (void)state;
    rig_needs_cpu();
    check(DI_NUMERICS_FAITHFUL, NO_SIDES);
    check(DI_NUMERICS_EXACT, NO_SIDES);
}

static void what_runs_beside_may_be_late(void **state) {
    (void)state;
    rig_needs_cpu();
    check(DI_NUMERICS_FAITHFUL, LATE_SIDES);
    check(DI_NUMERICS_EXACT, LATE_SIDES);
}

static void what_runs_beside_may_be_early(void **state) {
    (void)state;
    rig_needs_cpu();
    check(DI_NUMERICS_FAITHFUL, EARLY_SIDES);
    check(DI_NUMERICS_EXACT, EARLY_SIDES);
}

DI_TEST_GROUP(recording, cmocka_unit_test(recorded_batches_have_the_same_bits),
              cmocka_unit_test(what_runs_beside_may_be_late), cmocka_unit_test(what_runs_beside_may_be_early));
