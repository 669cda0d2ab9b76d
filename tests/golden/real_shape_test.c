/* The forward pass at the released layer dimensions: 5 layers and 16 experts of made-up weights, against golden tensors
 * that the PyTorch program in tools/oracle made of the same weights.
 *
 * About 3 GB of weights and minutes of arithmetic: ctest label `long`. Exact numerics: every kept tensor and the logits
 * within 1e-4 of their deviation, drafts, decode and a compact prefill. Faithful numerics: stages fed with golden
 * inputs within 1e-2, and end to end within 1.5 times the distance between the modes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "golden.h"
#include "harness.h"
#include "rig.h"
#include "taps.h"

enum { PROMPTS = 3, CHUNK = 512, LAST = 4 };
static const float logits_std = 4.07f; /* the smallest of the prompts' */
static const int32_t forced[] = {901, 2077, 3333};
/* rms of the logits between the modes: last rows, decode row, first draft row */
static const double mode_rows[PROMPTS] = {0.27, 0.33, 0.34}, mode_decode[PROMPTS] = {0.42, 0.31, 0.27},
                    mode_draft[PROMPTS] = {0.19, 0.16, 0.17};

static int32_t *prompt_ids[PROMPTS];
static int64_t prompt_n[PROMPTS];
static const int32_t *token_map;
static int64_t n_token_map;

/* Reads prompts and token map once; they live as long as the program. */
static void load_manifest(void) {
    if (token_map)
        return;
    di_strbuf text = {0};
    di_error err = {0};
    di_json *j = NULL;
    if (di_file_read(di_test_data("real-shape/manifest.json"), 1 << 24, &text, &err))
        fail_msg("%s", err.message);
    if (di_json_parse(&j, text.data, text.len, &err))
        fail_msg("%s", err.message);
    for (int i = 0; i < PROMPTS; i++) {
        const di_json *a = di_json_at(di_json_get(j, "prompts"), (size_t)i);
        prompt_n[i] = (int64_t)di_json_array_len(a);
        prompt_ids[i] = calloc((size_t)prompt_n[i] + 8, sizeof(int32_t));
        assert_non_null(prompt_ids[i]);
        for (int64_t k = 0; k < prompt_n[i]; k++)
            prompt_ids[i][k] = (int32_t)di_json_int(di_json_at(a, (size_t)k));
        for (int k = 0; k < 3; k++)
            prompt_ids[i][prompt_n[i] + k] = forced[k];
    }
    token_map = rig_token_map(&n_token_map); /* this configuration shares the tiny model's tokenizer */
    di_json_free(j);
    di_strbuf_deinit(&text);
}

/* rms over several rows of the logits against the golden ones */
static double rows_rms(const float *logits, const golden_tensor *want, int64_t rows, int64_t vocab) {
    return golden_rms_diff(logits, want, want->n - rows * vocab, rows * vocab);
}

static void one_prompt(rig *r, int p, bool faithful) {
    char name[64];
    int64_t v = r->config.vocab, n = prompt_n[p];
    int32_t rows = (int32_t)DI_MIN(n, (int64_t)LAST);
    snprintf(name, sizeof name, "real-shape/%s.%d.safetensors", faithful ? "faithful" : "dequant", p);
    golden *g = golden_open(di_test_data(name));
    tap_compare cmp = {.g = g,
                       .tolerance = faithful ? 1e-2 : 2e-4,
                       .rounded_tolerance = faithful ? rig_rounded_tolerance() : 0,
                       .inject = faithful ? r : NULL,
                       .n_tokens = n,
                       .is_partial = faithful && n > LAST};
    double bound = faithful ? 1.5 * mode_rows[p] : 1e-4 * logits_std;

    /* stages, with the golden inputs in faithful numerics */
    rig_reset(r);
    const float *logits = NULL;
    for (int64_t at = 0; at < n; at += CHUNK) {
        bool last = at + CHUNK >= n;
        r->tap = last ? tap_compare_fn : NULL;
        r->tap_user = &cmp;
        logits = rig_run(r, 0, prompt_ids[p], at, (int32_t)DI_MIN((int64_t)CHUNK, n - at), last ? rows : 0, 0);
    }
    golden_tensor want = golden_get(g, "logits");
    print_message("%s prompt %d: %d tensors, worst stage %.2g, logits %.4f\n", faithful ? "faithful" : "exact", p,
                  cmp.n_seen, cmp.worst, rows_rms(logits, &want, rows, v));
    assert_true(cmp.n_seen > 50);
    assert_int_equal(cmp.n_wrong, 0);
    r->tap = NULL;

    /* end to end; in exact numerics the run above was that already */
    if (faithful) {
        rig_reset(r);
        for (int64_t at = 0; at < n; at += CHUNK)
            logits = rig_run(r, 0, prompt_ids[p], at, (int32_t)DI_MIN((int64_t)CHUNK, n - at),
                             at + CHUNK >= n ? rows : 0, 0);
        print_message("  end to end: rows %.4f of %.4f\n", rows_rms(logits, &want, rows, v), bound);
    }
    assert_true(rows_rms(logits, &want, rows, v) <= bound);

    di_draft_seq seq = {.token = forced[0], .last = n - 1};
    di_error err = {0};
    const float *dl, *conf;
    golden_tensor want_tokens = golden_get(g, "draft.tokens"), want_conf = golden_get(g, "draft.conf"),
                  want_draft = golden_get(g, "draft.logits");
    if (di_draft_begin(r->fw, &seq, 1, r->config.draft_block, r->slots, NULL, NULL, &err))
        fail_msg("%s", err.message);
    int32_t prev = forced[0];
    for (int32_t j = 0; j < r->config.draft_block; j++) {
        rig_draft_next(r, j, &prev, 1, &dl, &conf);
        prev = rig_argmax(dl, v);
        if (j == 0) {
            double d = golden_rms_diff(dl, &want_draft, 0, v);
            print_message("  first draft row %.4f\n", d);
            assert_true(d <= (faithful ? 1.5 * mode_draft[p] : 1e-4 * logits_std));
        }
        if (!faithful) {
            assert_int_equal(prev, golden_int(&want_tokens, j));
            assert_true(fabs((double)*conf - golden_float(&want_conf, j)) < 1e-4);
        } else if (prev != golden_int(&want_tokens, j))
            break; /* the chain follows another token from here on */
    }
    for (int k = 0; k < 3; k++)
        logits = rig_run(r, 0, prompt_ids[p], n + k, 1, 1, 0);
    golden_tensor want_decode = golden_get(g, "decode.logits");
    double d = golden_rms_diff(logits, &want_decode, 0, v);
    print_message("  decode row %.4f\n", d);
    assert_true(d <= (faithful ? 1.5 * mode_decode[p] : 1e-4 * logits_std));

    if (golden_has(g, "compact.128.logits") && !faithful) {
        golden_tensor want_compact = golden_get(g, "compact.128.logits");
        r->replay = DI_REPLAY_COMPACT;
        rig_reset(r);
        logits = rig_prefill(r, 0, prompt_ids[p], n, 0, n - 128);
        r->replay = DI_REPLAY_OFF;
        assert_true(golden_rms_diff(logits, &want_compact, want_compact.n - v, v) < 1e-4 * logits_std);
    }
    golden_close(g);
}

static void run_all(di_numerics numerics) {
    rig r;
    load_manifest();
    rig_open(&r, &(rig_options){.dir = di_test_data("real-shape"),
                                .dummy = true,
                                .numerics = numerics,
                                .threads = 0,
                                .n_seqs = 1,
                                .tokens_max = 1536,
                                .rows_max = CHUNK,
                                .logits_max = 8,
                                .token_map = token_map,
                                .n_token_map = n_token_map});
    for (int p = 0; p < PROMPTS; p++)
        one_prompt(&r, p, numerics == DI_NUMERICS_FAITHFUL);
    rig_close(&r);
}

static void exact(void **state) {
    (void)state;
    run_all(DI_NUMERICS_EXACT);
}

static void faithful(void **state) {
    (void)state;
    run_all(DI_NUMERICS_FAITHFUL);
}

DI_TEST_GROUP(long_real_shape, cmocka_unit_test(exact), cmocka_unit_test(faithful));
