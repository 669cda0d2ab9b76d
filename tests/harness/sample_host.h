/* The operation sample_rows on the host: every packed row taken apart again and given to di_sample.
 *
 * Stands in for a device, so that the engine's way over packed rows can be compared with its direct one; and it says
 * what a row means, independently of the code that packs it. */
#ifndef DI_TEST_SAMPLE_HOST_H
#define DI_TEST_SAMPLE_HOST_H

#include "engine/sample/sample.h"
#include "engine/spec/spec.h"
#include "harness.h"

typedef struct sample_host_choice {
    const di_sample_row *row;
    float distance;
} sample_host_choice;

static inline int32_t sample_host_choose(void *ctx, const float *p, int64_t n_vocab) {
    sample_host_choice *c = ctx;
    const di_sample_row *row = c->row;
    if (row->rule == DI_SAMPLE_DRAW)
        return di_spec_draw(p, n_vocab, row->u);
    c->distance = (float)di_spec_distance(p, row->ln_q, n_vocab);
    if (di_spec_accepts(p[row->token], row->ln_q[row->token], row->u_test))
        return row->token;
    return di_spec_redraw(p, row->ln_q, n_vocab, row->u, NULL);
}

static inline void sample_host_row(const di_sample_rows_args *args, const di_sample_row *row, di_sample_result *out) {
    const uint32_t *words = args->words;
    enum { IDS = 0x7FFFFFFF };
    di_sampling s;
    di_sampling_init(&s);
    s.temperature = row->flags & DI_SAMPLE_GREEDY ? 0 : row->temperature;
    s.top_p = row->top_p;
    s.top_k = row->top_k;
    s.min_p = row->min_p;
    s.presence_penalty = (double)row->presence;
    s.frequency_penalty = (double)row->frequency;
    s.repetition_penalty = (double)row->repetition;
    s.n_logprobs = row->flags & DI_SAMPLE_LOGPROBS ? row->n_top : -1;
    s.logprobs_processed = row->flags & DI_SAMPLE_PROCESSED;
    s.min_tokens = 1;
    s.n_stop_tokens = (size_t)row->n_forbid;
    s.stop_tokens = (const int32_t *)(const void *)(words + row->forbid_at);
    int32_t *ids = malloc((size_t)(row->n_bias + row->n_drafts + 1) * sizeof *ids), *drafts = ids + row->n_bias;
    float *values = malloc((size_t)(row->n_bias + 1) * sizeof *values);
    assert_non_null(ids);
    assert_non_null(values);
    s.n_bias = (size_t)row->n_bias;
    s.bias_ids = ids;
    s.bias_values = values;
    for (int32_t i = 0; i < row->n_bias; i++) {
        ids[i] = (int32_t)words[row->bias_at + 2 * i];
        values[i] = di_f32_from_bits(words[row->bias_at + 2 * i + 1]);
        assert_true(i == 0 || ids[i - 1] <= ids[i]);
    }
    di_history h = {0};
    for (int32_t i = 0; i < row->n_history; i++) {
        uint32_t word = words[row->history_at + 2 * i];
        int32_t id = (int32_t)(word & IDS);
        di_error err = {0};
        assert_null(di_history_find(&h, id)); /* ids differ */
        di_test_ok(di_history_add_output(&h, &id, 1, &err), &err);
        h.entries[h.n - 1].n_output = (int32_t)words[row->history_at + 2 * i + 1];
        h.entries[h.n - 1].is_in_prompt = word >> 31;
    }
    for (int32_t i = 0; i < row->n_drafts; i++) {
        uint32_t word = words[row->drafts_at + i];
        drafts[i] = (int32_t)(word & IDS);
        assert_int_equal(word >> 31, di_history_find(&h, drafts[i]) != NULL);
    }
    assert_int_equal(row->changed_at >= 0, row->n_bias + row->n_history + row->n_drafts > 0);
    sample_host_choice choice = {.row = row};
    bool is_chosen = row->rule == DI_SAMPLE_DRAW || row->rule == DI_SAMPLE_TEST;
    float logprob = 0;
    di_sample_args a = {.sampling = &s,
                        .logits = args->logits + (int64_t)row->logits_row * args->n_vocab,
                        .n_vocab = args->n_vocab,
                        .seed = row->seed,
                        .position = row->position,
                        .eos_id = -1,
                        .mask = row->mask_at >= 0 ? words + row->mask_at : NULL,
                        .blacklist = row->flags & DI_SAMPLE_UNLISTED ? NULL : args->blacklist,
                        .history = &h,
                        .drafts = drafts,
                        .n_drafts = row->n_drafts,
                        .forced = row->rule == DI_SAMPLE_GIVEN ? row->token : -1,
                        .choose = is_chosen ? sample_host_choose : NULL,
                        .choose_ctx = &choice,
                        .ln_p = row->ln_p,
                        .logprob = &logprob,
                        .top = row->n_top > 0 ? (di_logprob *)(void *)(args->top + row->top_at) : NULL};
    di_sampler sampler = {0};
    di_error err = {0};
    int32_t token = 0;
    di_status st = di_sample(&sampler, &a, &token, &err);
    di_sampler_deinit(&sampler);
    *out = (di_sample_result){.token = st ? 0 : token, .logprob = logprob, .distance = choice.distance};
    out->status = !st ? DI_SAMPLE_OK : st == DI_ERR_REQUEST ? DI_SAMPLE_NOTHING_ALLOWED : DI_SAMPLE_NOT_FINITE;
    di_history_deinit(&h);
    free(ids);
    free(values);
}

/* The arguments in host memory, all of them. Rows and plan must be the same. */
static inline void sample_host(const di_sample_rows_args *args) {
    int32_t n_changed = 0;
    if (memcmp(args->rows, args->plan, (size_t)args->n_rows * sizeof *args->rows) != 0)
        fail_msg("rows and plan differ");
    for (int32_t i = 0; i < args->n_rows; i++) {
        if (args->rows[i].changed_at >= 0)
            assert_int_equal(args->rows[i].changed_at, n_changed++);
        sample_host_row(args, &args->rows[i], &args->results[i]);
        if (args->tokens)
            args->tokens[i] = args->results[i].token;
    }
}

#endif
