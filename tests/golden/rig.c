/* The rig behind rig.h. */
#include "rig.h"

#include <stdlib.h>

#include "golden.h"
#include "harness.h"

#define OK(expr)                                                                                                       \
    do {                                                                                                               \
        di_error err_ = {0};                                                                                           \
        di_error *err = &err_;                                                                                         \
        if ((expr))                                                                                                    \
            fail_msg("%s", err_.message);                                                                              \
    } while (0)

const int32_t *rig_token_map(int64_t *n) {
    static int32_t *token_map;
    static int64_t n_token_map;
    if (!token_map) {
        golden *st = golden_open(di_test_data("tiny/static.safetensors"));
        golden_tensor map = golden_get(st, "token_map");
        n_token_map = map.n;
        token_map = calloc((size_t)map.n, sizeof *token_map);
        assert_non_null(token_map);
        for (int64_t i = 0; i < map.n; i++)
            token_map[i] = (int32_t)golden_int(&map, i);
        golden_close(st);
    }
    *n = n_token_map;
    return token_map;
}

void rig_open(rig *r, const rig_options *opt) {
    memset(r, 0, sizeof *r);
    OK(di_config_load(&r->config, opt->dir, err));
    if (opt->window)
        r->config.window = opt->window;
    OK(di_checkpoint_open(&r->ckpt, opt->dir, &r->config, &(di_checkpoint_options){.dummy = opt->dummy}, err));
    OK(di_backend_find(di_test_backend(), &r->backend, err));
    di_device_config config = {.n_threads = opt->threads, .isa = opt->isa};
    OK(r->backend.device->open(&r->device, &config, err));
    di_model_options mo = {.backend = &r->backend,
                           .device = r->device,
                           .numerics = opt->numerics,
                           .rows_max = opt->rows_max,
                           .seqs_max = opt->n_seqs,
                           .tokens_max = opt->tokens_max,
                           .logits_max = opt->logits_max,
                           .with_draft = true,
                           .token_map = opt->token_map,
                           .n_token_map = opt->n_token_map};
    OK(di_model_create(&r->model, &r->config, r->ckpt, &mo, err));
    OK(di_forward_create(&r->fw, r->model, err));
    di_model_plan(&r->config, &mo, &r->plan);
    r->n_seqs = opt->n_seqs;
    r->blocks_per_seq = (int)DI_CEIL_DIV(opt->tokens_max, (int64_t)DI_PAGE_TOKENS);
    int n_blocks = r->n_seqs * r->blocks_per_seq;
    OK(r->backend.device->alloc(r->device, r->plan.page_bytes * (size_t)n_blocks, (void **)&r->pages, err));
    OK(r->backend.device->alloc(r->device, r->plan.slot_bytes * (size_t)r->n_seqs, (void **)&r->slots, err));
    r->blocks = calloc((size_t)n_blocks, sizeof *r->blocks);
    assert_non_null(r->blocks);
    for (int i = 0; i < n_blocks; i++)
        r->blocks[i] = n_blocks - 1 - i;
    rig_reset(r);
}

void rig_reset(rig *r) {
    size_t n_pages = r->plan.page_bytes * (size_t)(r->n_seqs * r->blocks_per_seq);
    size_t n_slots = r->plan.slot_bytes * (size_t)r->n_seqs;
    uint8_t *pattern = malloc(DI_MAX(n_pages, n_slots));
    assert_non_null(pattern);
    memset(pattern, 0x7F, DI_MAX(n_pages, n_slots)); /* an E4M3 NaN, a large scale; as fp32 3.4e38 */
    OK(r->backend.device->upload(r->device, r->pages, pattern, n_pages, err));
    OK(r->backend.device->upload(r->device, r->slots, pattern, n_slots, err));
    free(pattern);
}

void rig_close(rig *r) {
    di_forward_destroy(r->fw);
    di_model_destroy(r->model);
    r->backend.device->free(r->device, r->pages);
    r->backend.device->free(r->device, r->slots);
    r->backend.device->close(r->device);
    di_checkpoint_close(r->ckpt);
    free(r->blocks);
    free(r->logits);
    free(r->conf);
}

/* Floats of the device in host memory of the rig's. */
static const float *fetch(const rig *r, float **host, const float *device, size_t n) {
    free(*host);
    *host = malloc(DI_MAX(n, (size_t)1) * sizeof **host);
    assert_non_null(*host);
    OK(r->backend.device->download(r->device, *host, device, n * sizeof **host, err));
    return *host;
}

const float *rig_forward(rig *r, const di_seq_rows *rows, int n_seqs) {
    di_batch batch = {.n_seqs = n_seqs,
                      .seqs = rows,
                      .replay = r->replay,
                      .pages = r->pages,
                      .slots = r->slots,
                      .tap = r->tap,
                      .tap_user = r->tap_user};
    float *logits = NULL;
    OK(di_forward_run(r->fw, &batch, &logits, err));
    size_t n = 0;
    for (int s = 0; s < n_seqs; s++)
        n += (size_t)rows[s].n_logits;
    return fetch(r, &r->logits, logits, n * (size_t)r->config.vocab);
}

void rig_put(const rig *r, uint8_t *at, const void *bytes, size_t n) {
    OK(r->backend.device->upload(r->device, at, bytes, n, err));
}

double rig_rounded_tolerance(void) {
    return strcmp(di_test_backend(), "nvidia") == 0 ? 5e-2 : 0;
}

void rig_draft_next(rig *r, int32_t i, const int32_t *prev, int n, const float **logits, const float **conf) {
    float *l, *c;
    OK(di_draft_next(r->fw, i, prev, &l, &c, err));
    *logits = fetch(r, &r->logits, l, (size_t)n * (size_t)r->config.vocab);
    *conf = fetch(r, &r->conf, c, (size_t)n);
}

const float *rig_run(rig *r, int seq, const int32_t *tokens, int64_t pos0, int32_t n, int32_t n_logits, int64_t rect) {
    di_seq_rows rows = {.tokens = tokens,
                        .pos0 = pos0,
                        .n_rows = n,
                        .n_logits = n_logits,
                        .slot = seq,
                        .blocks = r->blocks + seq * r->blocks_per_seq,
                        .n_blocks = r->blocks_per_seq,
                        .rect = rect};
    return rig_forward(r, &rows, 1);
}

const float *rig_prefill(rig *r, int seq, const int32_t *tokens, int64_t n, int64_t chunk, int64_t rect) {
    const float *logits = NULL;
    if (!chunk)
        chunk = n;
    for (int64_t at = 0; at < n; at += chunk) {
        int64_t rows = DI_MIN(chunk, n - at);
        logits = rig_run(r, seq, tokens, at, (int32_t)rows, at + rows == n, rect);
    }
    return logits;
}

int32_t rig_argmax(const float *logits, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}
