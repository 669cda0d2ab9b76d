/* Keys of the draft module that are put off and made later: the same bytes in a sequence's rings as when every forward
 * makes them at once, for as many rows as a ring holds, in one piece or several. */
#include "harness.h"
#include "model/model_internal.h"
#include "rig.h"

enum { PROMPT = 21, SEQS = 2 };

static void run_put_off(rig *r, uint8_t *taps, int seq, const int32_t *tokens, int64_t pos0, int32_t n, bool makes) {
    di_error err = {0};
    di_seq_rows rows = {.tokens = tokens,
                        .pos0 = pos0,
                        .n_rows = n,
                        .slot = seq,
                        .tap_slot = SEQS - 1 - seq,
                        .blocks = r->blocks + seq * r->blocks_per_seq,
                        .n_blocks = r->blocks_per_seq};
    di_batch batch = {.n_seqs = 1, .seqs = &rows, .pages = r->pages, .slots = r->slots, .taps = taps};
    float *logits;
    if (makes)
        di_test_ok(di_draft_catch_up(r->fw, &batch, &err), &err);
    else
        di_test_ok(di_forward_run(r->fw, &batch, &logits, &err), &err);
}

static void check(di_numerics numerics) {
    rig r;
    rig_options opt = {.dir = di_test_source("models/tiny"),
                       .numerics = numerics,
                       .threads = 2,
                       .n_seqs = SEQS,
                       .tokens_max = 512,
                       .rows_max = 256,
                       .logits_max = 8};
    opt.token_map = rig_token_map(&opt.n_token_map);
    rig_open(&r, &opt);
    di_layout lay;
    di_layout_init(&lay, &r.config, numerics, true);
    assert_int_equal(r.plan.tap_bytes, lay.tap_bytes);
    int32_t tokens[512];
    for (int i = 0; i < 512; i++)
        tokens[i] = 300 + (int32_t)(di_mix64((uint64_t)i) % 5000);
    void *taps = NULL;
    di_error err = {0};
    di_test_ok(r.backend.device->alloc(r.device, lay.tap_bytes * SEQS, &taps, &err), &err);
    memset(taps, 0x7F, lay.tap_bytes * SEQS);
    /* A few rows, then so many that the ring has been around and the first ones are of no use any more. */
    const int64_t counts[] = {5, 2 * lay.ring_len + 3};
    for (size_t k = 0; k < DI_COUNT(counts); k++) {
        int64_t end = PROMPT + counts[k], from = DI_MAX((int64_t)PROMPT, end - lay.ring_len);
        assert_true(end <= 512);
        if (di_test_is_sanitized() && numerics == DI_NUMERICS_EXACT && k == 1)
            continue; /* a sanitizer is slow, and the ring the same */
        rig_reset(&r);
        for (int seq = 0; seq < SEQS; seq++)
            rig_prefill(&r, seq, tokens, PROMPT, 0, 0);
        for (int64_t p = PROMPT; p < end; p++) {
            rig_run(&r, 0, tokens, p, 1, 0, 0);
            run_put_off(&r, taps, 1, tokens, p, 1, false);
        }
        assert_memory_not_equal(r.slots, r.slots + lay.slot_bytes, lay.slot_bytes);
        for (int64_t p = from; p < end; p += 7)
            run_put_off(&r, taps, 1, tokens, p, (int32_t)DI_MIN(end - p, 7), true);
        assert_memory_equal(r.slots, r.slots + lay.slot_bytes, lay.slot_bytes);
        /* Made again in one piece they are the same. */
        run_put_off(&r, taps, 1, tokens, from, (int32_t)(end - from), true);
        assert_memory_equal(r.slots, r.slots + lay.slot_bytes, lay.slot_bytes);
    }
    r.backend.device->free(r.device, taps);
    rig_close(&r);
}

static void keys_made_later_are_the_same(void **state) {
    (void)state;
    rig_needs_cpu();
    check(DI_NUMERICS_FAITHFUL);
    check(DI_NUMERICS_EXACT);
}

DI_TEST_GROUP(put_off, cmocka_unit_test(keys_made_later_are_the_same));
