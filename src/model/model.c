/* Loading: from a config and a checkpoint to a model that can run, and the memory that it will take.
 *
 * Weights are bound as views: into the mapping, or, where a device has memory of its own, into one allocation there
 * that is filled tensor by tensor. What is made here besides is small: Engram constants, RoPE frequencies, the
 * token-to-class map. */
#include "forward_internal.h"

static di_status to_device(di_model *mo, const void *src, size_t n_bytes, void **out, di_error *err) {
    di_status st = mo->backend.device->alloc(mo->device, n_bytes, out, err);
    return st ? st : mo->backend.device->upload(mo->device, *out, src, n_bytes, err);
}

/* ---- weights in a device's own memory ---- */

#define PLACE_ALIGN ((size_t)256)

typedef enum placing { PLACED_NOWHERE, PLACED_ON_DEVICE, PLACED_ON_HOST } placing;

static placing where_to(const di_model *mo, const di_model_options *opt, const di_stored_tensor *t) {
    if (t->kind == DI_KIND_VISION || (t->kind == DI_KIND_DRAFT && !mo->with_draft))
        return PLACED_NOWHERE;
    return t->kind == DI_KIND_ENGRAM_TABLE && opt->engram_on_host ? PLACED_ON_HOST : PLACED_ON_DEVICE;
}

static di_status place_tensors(di_model *mo, const di_checkpoint *ckpt, const di_model_options *opt, uint8_t **placed,
                               uint64_t total, di_error *err) {
    size_t at[3] = {0};
    uint64_t done = 0;
    for (size_t i = 0; i < di_checkpoint_count(ckpt); i++) {
        const di_stored_tensor *t = di_checkpoint_at(ckpt, i);
        placing where = where_to(mo, opt, t);
        if (where == PLACED_NOWHERE)
            continue;
        placed[i] = (where == PLACED_ON_HOST ? mo->placed_host : mo->placed) + at[where];
        at[where] += DI_ROUND_UP(t->n_bytes, PLACE_ALIGN);
        di_status st = DI_OK;
        if (where == PLACED_ON_HOST)
            memcpy(placed[i], t->data, t->n_bytes);
        else
            st = mo->backend.device->upload(mo->device, placed[i], t->data, t->n_bytes, err);
        if (st)
            return di_error_context(err, st, "tensor '%s'", t->name);
        done += t->n_bytes;
        if (opt->progress)
            opt->progress(opt->user, done, total);
    }
    return DI_OK;
}

/* Copies what the model needs to the device, and makes the table of experts there. */
static di_status place_weights(di_model *mo, const di_checkpoint *ckpt, const di_model_options *opt, di_error *err) {
    const di_device_ops *dev = mo->backend.device;
    size_t n_bytes[3] = {0};
    uint64_t total = 0;
    for (size_t i = 0; i < di_checkpoint_count(ckpt); i++) {
        const di_stored_tensor *t = di_checkpoint_at(ckpt, i);
        placing where = where_to(mo, opt, t);
        n_bytes[where] += DI_ROUND_UP(t->n_bytes, PLACE_ALIGN);
        total += where == PLACED_NOWHERE ? 0 : t->n_bytes;
    }
    uint8_t **placed = calloc(di_checkpoint_count(ckpt), sizeof(uint8_t *));
    if (!placed)
        return di_fail(err, DI_ERR_MEMORY, "places of %zu tensors", di_checkpoint_count(ckpt));
    di_status st = dev->alloc(mo->device, n_bytes[PLACED_ON_DEVICE], (void **)&mo->placed, err);
    if (!st && n_bytes[PLACED_ON_HOST])
        st = dev->alloc_host(mo->device, n_bytes[PLACED_ON_HOST], (void **)&mo->placed_host, err);
    if (!st)
        st = place_tensors(mo, ckpt, opt, placed, total, err);
    if (!st)
        st = di_weights_bind(&mo->weights, &mo->config, ckpt, placed, mo->with_draft, &mo->arena, err);
    free(placed);
    return di_error_context(err, st, "weights of %llu bytes", (unsigned long long)total);
}

static di_status place_experts(di_model *mo, di_error *err) {
    const di_config *c = &mo->config;
    int32_t n_blocks = c->n_layers + (mo->with_draft ? c->n_draft_layers : 0);
    di_status st = DI_OK;
    for (int32_t l = 0; l < n_blocks && !st; l++) {
        di_block_weights *w = &mo->weights.blocks[l];
        st = mo->backend.device->experts_place(mo->device, w->experts, w->n_experts, &w->shared, &w->expert_table, err);
        st = di_error_context(err, st, "experts of layer %d", (int)l);
    }
    return st;
}

/* ---- constants ---- */

/* Multipliers, primes, offsets and the product of the two gate weights (in host memory) of the e-th Engram layer. */
static di_status load_engram(di_model *mo, const di_weights *host, int32_t e, di_error *err) {
    const di_config *c = &mo->config;
    const di_block_weights *w = &host->blocks[c->engram_layers[e]];
    size_t cols = (size_t)(c->engram_ngram - 1) * (size_t)c->engram_heads,
           n_qk = (size_t)c->hc_mult * (size_t)c->hidden;
    di_engram_consts *out = &mo->engram[e];
    int64_t *mult = di_arena_calloc(&mo->arena, (size_t)c->engram_ngram, 8);
    int64_t *primes = di_arena_calloc(&mo->arena, cols, 8), *offsets = di_arena_calloc(&mo->arena, cols, 8);
    float *qk = di_arena_calloc(&mo->arena, n_qk, 4);
    if (!mult || !primes || !offsets || !qk)
        return di_fail(err, DI_ERR_MEMORY, "Engram constants of layer %d", c->engram_layers[e]);
    di_status st = di_config_engram(c, e, mult, primes, offsets, err);
    if (st)
        return st;
    for (size_t i = 0; i < n_qk; i++)
        qk[i] = di_bf16_to_f32(w->eg_q[i]) * di_bf16_to_f32(w->eg_k[i]);
    if ((st = to_device(mo, mult, (size_t)c->engram_ngram * 8, (void **)&out->mult, err)))
        return st;
    if ((st = to_device(mo, primes, cols * 8, (void **)&out->primes, err)))
        return st;
    if ((st = to_device(mo, offsets, cols * 8, (void **)&out->offsets, err)))
        return st;
    return to_device(mo, qk, n_qk * 4, (void **)&out->qk, err);
}

static di_status load_frequencies(di_model *mo, di_error *err) {
    size_t half = (size_t)mo->config.rope_dim / 2;
    float *freq = di_arena_calloc(&mo->arena, half, 4);
    if (!freq)
        return di_fail(err, DI_ERR_MEMORY, "RoPE frequencies");
    di_config_inv_freq(&mo->config, false, freq);
    di_status st = to_device(mo, freq, half * 4, (void **)&mo->freq_window, err);
    if (st)
        return st;
    di_config_inv_freq(&mo->config, true, freq);
    return to_device(mo, freq, half * 4, (void **)&mo->freq_compressed, err);
}

/* The map must give a class below engram_compressed_vocab_size to every id that the model can meet. */
static di_status load_token_map(di_model *mo, const di_model_options *opt, di_error *err) {
    const di_config *c = &mo->config;
    if (!c->n_engram)
        return DI_OK;
    if (!opt->token_map) {
        if (c->engram_classes != c->vocab)
            return di_fail(
                err, DI_ERR_FORMAT,
                "key 'engram_compressed_vocab_size': %lld, expected %d (vocab_size) where there is no tokenizer",
                (long long)c->engram_classes, c->vocab);
        return DI_OK;
    }
    if (opt->n_token_map <= c->engram_pad)
        return di_fail(err, DI_ERR_FORMAT, "token map of %lld ids, expected more than key 'engram_pad_token_id' (%d)",
                       (long long)opt->n_token_map, c->engram_pad);
    mo->token_map = di_arena_calloc(&mo->arena, (size_t)opt->n_token_map, 4);
    if (!mo->token_map)
        return di_fail(err, DI_ERR_MEMORY, "token map of %lld ids", (long long)opt->n_token_map);
    mo->n_token_map = opt->n_token_map;
    for (int64_t i = 0; i < opt->n_token_map; i++) {
        if (opt->token_map[i] < 0 || opt->token_map[i] >= c->engram_classes)
            return di_fail(err, DI_ERR_FORMAT, "token map: id %lld has class %d, expected 0 to %lld", (long long)i,
                           opt->token_map[i], (long long)c->engram_classes - 1);
        mo->token_map[i] = opt->token_map[i];
    }
    return to_device(mo, mo->token_map, (size_t)opt->n_token_map * 4, (void **)&mo->token_map_device, err);
}

static di_status create(di_model *mo, const di_checkpoint *ckpt, const di_model_options *opt, di_error *err) {
    const di_config *c = &mo->config;
    di_device_info info;
    di_limits limits;
    di_status st;
    if (opt->rows_max < 1 || opt->seqs_max < 1 || opt->logits_max < 1 || opt->tokens_max < 1 ||
        opt->tokens_max > INT32_MAX / 2)
        return di_fail(
            err, DI_ERR_RANGE,
            "model limits of %lld rows, %d sequences, %lld rows of logits, %lld positions, expected 1 or more of each",
            (long long)opt->rows_max, opt->seqs_max, (long long)opt->logits_max, (long long)opt->tokens_max);
    if (opt->logits_max > opt->rows_max)
        return di_fail(err, DI_ERR_RANGE, "model limits: logits of %lld rows, forwards have %lld",
                       (long long)opt->logits_max, (long long)opt->rows_max);
    if ((st = mo->backend.device->info(mo->device, &info, err)))
        return st;
    di_weights host;
    if ((st = di_weights_bind(&host, c, ckpt, NULL, mo->with_draft, &mo->arena, err)))
        return st;
    mo->weights = host;
    if (!info.weights_by_mapping && (st = place_weights(mo, ckpt, opt, err)))
        return st;
    if ((st = place_experts(mo, err)))
        return st;
    di_layout_init(&mo->layout, c, mo->numerics, mo->with_draft);
    di_workspace_limits(&limits, c, opt);
    if ((st = mo->backend.device->reserve(mo->device, &limits, err)))
        return st;
    if (c->n_engram) {
        mo->engram = di_arena_calloc(&mo->arena, (size_t)c->n_engram, sizeof *mo->engram);
        if (!mo->engram)
            return di_fail(err, DI_ERR_MEMORY, "Engram constants");
        for (int32_t e = 0; e < c->n_engram; e++)
            if ((st = load_engram(mo, &host, e, err)))
                return st;
    }
    if ((st = load_frequencies(mo, err)))
        return st;
    return load_token_map(mo, opt, err);
}

di_status di_model_create(di_model **out, const di_config *config, const di_checkpoint *ckpt,
                          const di_model_options *opt, di_error *err) {
    di_model *mo = calloc(1, sizeof *mo);
    if (!mo)
        return di_fail(err, DI_ERR_MEMORY, "model");
    mo->config = *config;
    mo->backend = *opt->backend;
    mo->device = opt->device;
    mo->numerics = opt->numerics;
    mo->with_draft = opt->with_draft && config->n_draft_layers > 0;
    mo->rows_max = di_workspace_rows(config, opt);
    mo->tokens_max = opt->tokens_max;
    mo->logits_max = opt->logits_max;
    mo->seqs_max = opt->seqs_max;
    di_status st = create(mo, ckpt, opt, err);
    if (st)
        di_model_destroy(mo);
    else
        *out = mo;
    return di_error_context(err, st, "loading the model");
}

void di_model_destroy(di_model *mo) {
    if (!mo)
        return;
    void (*release)(di_device *, void *) = mo->backend.device->free;
    for (int32_t e = 0; mo->engram && e < mo->config.n_engram; e++) {
        release(mo->device, mo->engram[e].mult);
        release(mo->device, mo->engram[e].primes);
        release(mo->device, mo->engram[e].offsets);
        release(mo->device, mo->engram[e].qk);
    }
    for (int32_t l = 0; mo->weights.blocks && l < mo->config.n_layers + mo->config.n_draft_layers; l++)
        release(mo->device, mo->weights.blocks[l].expert_table);
    release(mo->device, mo->placed);
    mo->backend.device->free_host(mo->device, mo->placed_host);
    release(mo->device, mo->token_map_device);
    release(mo->device, mo->freq_window);
    release(mo->device, mo->freq_compressed);
    di_arena_deinit(&mo->arena);
    free(mo);
}

const di_config *di_model_config(const di_model *mo) {
    return &mo->config;
}

static di_status add_bytes(void *user, const di_tensor_spec *spec) {
    di_memory_plan *plan = user;
    size_t n = 1;
    for (int32_t i = 0; i < spec->n_dims; i++)
        n *= (size_t)spec->shape[i];
    plan->weight_bytes += di_dtype_bytes(spec->dtype, n);
    if (spec->kind == DI_KIND_ENGRAM_TABLE)
        plan->engram_bytes += di_dtype_bytes(spec->dtype, n);
    return DI_OK;
}

void di_model_plan(const di_config *config, const di_model_options *opt, di_memory_plan *out) {
    di_layout layout;
    di_workspace ws;
    di_meta_layout ml;
    di_limits limits;
    di_model_options o = *opt;
    memset(out, 0, sizeof *out);
    o.with_draft = opt->with_draft && config->n_draft_layers > 0;
    di_layout_init(&layout, config, o.numerics, o.with_draft);
    out->page_bytes = layout.page_bytes;
    out->slot_bytes = layout.slot_bytes;
    out->tap_bytes = layout.tap_bytes;
    out->workspace_bytes = di_workspace_cut(&ws, &ml, NULL, config, &layout, o.numerics, &o) +
                           2 * ml.n_bytes; /* the host's copies of the metadata */
    if (o.backend && o.device) {
        di_workspace_limits(&limits, config, &o);
        out->scratch_bytes = o.backend->device->scratch_bytes(o.device, &limits);
    }
    di_tensors_each(config, add_bytes, out);
}

/* The mixes that the first sub-layer of a forward reads: of the trunk's streams the first. */
static di_status make_one_hot(di_forward *fw, di_error *err) {
    const di_model *mo = fw->model;
    size_t m = (size_t)mo->config.hc_mult, n = (size_t)mo->rows_max;
    float *rows = calloc(n * m, sizeof *rows);
    if (!rows)
        return di_fail(err, DI_ERR_MEMORY, "mixes of %zu rows", n);
    for (size_t i = 0; i < n; i++)
        rows[i * m] = 1.0f;
    di_status st = mo->backend.device->upload(mo->device, fw->ws.one_hot, rows, n * m * sizeof *rows, err);
    free(rows);
    return st;
}

di_status di_forward_create(di_forward **out, di_model *model, di_error *err) {
    const di_device_ops *dev = model->backend.device;
    di_model_options sizes = {.rows_max = model->rows_max,
                              .seqs_max = model->seqs_max,
                              .tokens_max = model->tokens_max,
                              .logits_max = model->logits_max,
                              .with_draft = model->with_draft};
    di_forward *fw = calloc(1, sizeof *fw);
    if (!fw)
        return di_fail(err, DI_ERR_MEMORY, "forward");
    di_status st;
    fw->model = model;
    fw->blocks_stride = DI_CEIL_DIV(model->tokens_max, (int64_t)DI_PAGE_TOKENS);
    size_t n_bytes = di_workspace_cut(&fw->ws, &fw->ml, NULL, &model->config, &model->layout, model->numerics, &sizes);
    if ((st = dev->stream_create(model->device, &fw->own, err)))
        goto out;
    fw->stream = fw->own;
    if (dev->stream_side && (st = dev->stream_side(fw->own, &fw->side, err)))
        goto out;
    if ((st = dev->alloc(model->device, n_bytes, &fw->memory, err)))
        goto out;
    di_workspace_cut(&fw->ws, &fw->ml, fw->memory, &model->config, &model->layout, model->numerics, &sizes);
    for (int i = 0; i < 2; i++) {
        if ((st = dev->alloc_host(model->device, fw->ml.n_bytes, (void **)&fw->metas[i], err)))
            goto out;
    }
    fw->meta = fw->metas[0];
    st = make_one_hot(fw, err);
out:
    if (st)
        di_forward_destroy(fw);
    else
        *out = fw;
    return di_error_context(err, st, "workspace of a forward (%zu bytes)", n_bytes);
}

void di_forward_destroy(di_forward *fw) {
    if (!fw)
        return;
    const di_device_ops *dev = fw->model->backend.device;
    if (fw->own)
        dev->stream_destroy(fw->own);
    di_graph_drop(fw);
    dev->free(fw->model->device, fw->memory);
    dev->free(fw->model->device, fw->tap_scores);
    for (int i = 0; i < 2; i++)
        dev->free_host(fw->model->device, fw->metas[i]);
    free(fw->tap_host);
    free(fw);
}
