/* `deepinfer info`: what a model is and what it takes here. The architecture, the role of every layer, tensors and
 * bytes by kind, and the memory plan that `run` with the same options would make.
 *
 * Only config.json, the index and the shards' headers are read, so that a checkpoint of any size takes a moment;
 * everything that opening checks by name, dtype, shape and offset is checked. Byte counts are plain digits, for
 * scripts, with a rounded form behind. A model that doesn't fit is shown all the same, with what is missing. */
#include <inttypes.h>

#include "cli_model.h"

/* "31826680 bytes (30.35 MiB)", the digits at least `width` wide. */
static void put_bytes(di_strbuf *out, int width, uint64_t n) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    di_strbuf_printf(out, "%*" PRIu64 " bytes", width, n);
    if (n < 1024)
        return;
    double x = (double)n / 1024;
    size_t u = 0;
    for (; x >= 1024 && u + 1 < DI_COUNT(units); u++)
        x /= 1024;
    di_strbuf_printf(out, " (%.2f %s)", x, units[u]);
}

static void put_label(di_strbuf *out, const char *label) {
    di_strbuf_printf(out, "  %-22s", label);
}

static void put_size(di_strbuf *out, const char *label, uint64_t n) {
    put_label(out, label);
    put_bytes(out, 0, n);
    di_strbuf_putc(out, '\n');
}

/* ---- architecture ------------------------------------------------------------------------------------------------ */

static void put_architecture(di_strbuf *out, const di_options *opt, const di_config *c) {
    if (opt->dummy_layers)
        di_strbuf_printf(out, "%d layers at the released dimensions\n\narchitecture\n", c->n_layers);
    else
        di_strbuf_printf(out, "model %s\n\narchitecture\n", opt->model);
    put_label(out, "class");
    di_strbuf_printf(out, "DeepseekV41ForCausalLM, %s\n", c->has_vision ? "text and images" : "text only");
    put_label(out, "layers");
    di_strbuf_printf(out, "%d", c->n_layers);
    if (c->first_consumer < c->n_layers) {
        di_strbuf_printf(out, " (producers 0 to %d, consumers %d to %d)", c->first_consumer - 1, c->first_consumer,
                         c->n_layers - 1);
    }
    di_strbuf_printf(out, ", %d draft\n", c->n_draft_layers);
    put_label(out, "hidden size");
    di_strbuf_printf(out, "%d in %d streams\n", c->hidden, c->hc_mult);
    put_label(out, "attention");
    di_strbuf_printf(out, "%d heads of %d, %d rotated; window %d; ranks %d and %d in %d groups\n", c->n_heads,
                     c->head_dim, c->rope_dim, c->window, c->q_rank, c->o_rank, c->o_groups);
    put_label(out, "index");
    di_strbuf_printf(out, "%d heads of %d, best %d", c->index_heads, c->index_dim, c->index_topk);
    if (c->candidate_layer >= 0) {
        di_strbuf_printf(out, " within %d blocks of %d from layer %d", c->candidate_blocks, c->candidate_block,
                         c->candidate_layer);
    }
    di_strbuf_putc(out, '\n');
    put_label(out, "experts");
    di_strbuf_printf(out, "%d of %d and a shared one, %d wide\n", c->n_experts_tok, c->n_experts, c->intermediate);
    put_label(out, "rotation");
    di_strbuf_printf(out, "theta %g, compressed layers %g", c->rope_theta, c->compress_rope_theta);
    if (c->has_yarn)
        di_strbuf_printf(out, " with YaRN %g from %" PRId64, c->yarn_factor, c->yarn_original);
    di_strbuf_putc(out, '\n');
    put_label(out, "vocabulary");
    di_strbuf_printf(out, "%d\n", c->vocab);
    put_label(out, "context");
    di_strbuf_printf(out, "%" PRId64 " tokens\n", c->position_max);
    if (c->n_engram) {
        put_label(out, "engram");
        di_strbuf_printf(out, "n-grams to %d, %d heads of %d, %" PRId64 " token classes\n", c->engram_ngram,
                         c->engram_heads, c->engram_dim, c->engram_classes);
    }
    if (c->n_draft_layers) {
        put_label(out, "draft module");
        di_strbuf_printf(out, "%d tokens a round, %d of %d experts, reads layers", c->draft_block, c->draft_experts_tok,
                         c->draft_experts);
        for (int32_t i = 0; i < c->n_draft_targets; i++)
            di_strbuf_printf(out, " %d", c->draft_targets[i]);
        di_strbuf_putc(out, '\n');
    }
}

static void put_source(di_strbuf *out, int32_t source) {
    if (source < 0) {
        di_strbuf_printf(out, "%9s", "-");
    } else {
        di_strbuf_printf(out, "%9d", source);
    }
}

/* What layer l has of its own. */
static void put_role(di_strbuf *out, const di_config *c, int32_t l) {
    if (c->ratio[l] == 0) {
        di_strbuf_puts(out, "window only");
    } else if (di_config_is_kv_source(c, l)) {
        di_strbuf_puts(out,
                       c->ratio[l] == 2 ? "compressor with gate, indexer with keys" : "compressor, indexer with keys");
    } else if (di_config_is_index_source(c, l)) {
        di_strbuf_printf(out, "indexer over the keys of %d", c->index_k_source[l]);
    } else {
        di_strbuf_puts(out, "reuses");
    }
    if (l == c->candidate_layer)
        di_strbuf_puts(out, ", candidate source");
    if (c->candidate_layer >= 0 && l > c->candidate_layer && di_config_is_index_source(c, l)) {
        di_strbuf_puts(out, ", within candidates");
    }
    int32_t e = di_config_engram_index(c, l);
    if (e >= 0)
        di_strbuf_printf(out, ", engram of %" PRId64 " rows", c->engram_rows[e]);
    if (l == c->first_consumer)
        di_strbuf_puts(out, ", first consumer");
}

static void put_layers(di_strbuf *out, const di_config *c) {
    di_strbuf_puts(out, "\nlayers\n   layer  ratio    kv of  list of  role\n");
    for (int32_t l = 0; l < c->n_layers; l++) {
        di_strbuf_printf(out, "  %6d %6d", l, c->ratio[l]);
        put_source(out, c->kv_source[l]);
        put_source(out, c->index_source[l]);
        di_strbuf_puts(out, "  ");
        put_role(out, c, l);
        di_strbuf_putc(out, '\n');
    }
    for (int32_t i = 0; i < c->n_draft_layers; i++) {
        di_strbuf_printf(out, "   mtp.%-2d %6d        -        -  draft, window only\n", i, 0);
    }
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static void put_tensors(di_strbuf *out, const di_checkpoint *ckpt) {
    size_t count[DI_KIND_COUNT] = {0};
    uint64_t bytes[DI_KIND_COUNT] = {0};
    for (size_t i = 0; i < di_checkpoint_count(ckpt); i++) {
        const di_stored_tensor *t = di_checkpoint_at(ckpt, i);
        count[t->kind]++;
        bytes[t->kind] += t->n_bytes;
    }
    di_strbuf_puts(out, "\ntensors\n");
    for (int k = 0; k < DI_KIND_COUNT; k++) {
        if (!count[k])
            continue;
        put_label(out, di_tensor_kind_name((di_tensor_kind)k));
        di_strbuf_printf(out, "%8zu ", count[k]);
        put_bytes(out, 13, bytes[k]);
        di_strbuf_putc(out, '\n');
    }
    put_label(out, "all");
    di_strbuf_printf(out, "%8zu ", di_checkpoint_count(ckpt));
    put_bytes(out, 13, di_checkpoint_bytes(ckpt));
    if (di_checkpoint_is_dummy(ckpt)) {
        di_strbuf_puts(out, ", made up\n");
    } else {
        di_strbuf_printf(out, " in %zu file%s\n", di_checkpoint_shards(ckpt),
                         di_checkpoint_shards(ckpt) == 1 ? "" : "s");
    }
}

/* ---- memory plan ------------------------------------------------------------------------------------------------- */

static void put_replay(di_strbuf *out, const di_options *opt, const di_config *c, const di_load_options *load) {
    put_label(out, "replay");
    if (load->replay == DI_REPLAY_OFF) {
        di_strbuf_puts(out, "off\n");
        return;
    }
    int64_t exact = di_config_replay_exact(c),
            keep = load->replay_keep ? load->replay_keep : DI_MAX(exact, (int64_t)c->window + DI_BACKTRACK);
    di_strbuf_printf(out, "%s, the last %" PRId64 " tokens of a prompt: ", opt->replay, keep);
    if (keep >= exact) {
        di_strbuf_puts(out, "exact\n");
    } else {
        di_strbuf_printf(out, "approximate (exact from %" PRId64 " on)\n", exact);
    }
}

static void put_plan(di_strbuf *out, const di_options *opt, const di_config *c, const di_load_options *load,
                     const di_load_plan *plan, const di_device_info *device, di_status fit, const di_error *fit_error) {
    const di_memory_plan *m = &plan->memory;
    di_strbuf_printf(out, "\nmemory plan for %s, %s numerics\n", device->name, opt->numerics);
    put_label(out, "levels in use");
    di_strbuf_printf(out, "%s of %s\n", device->levels, device->levels_found);
    put_size(out,
             plan->weights_are_copied ? "weights on the device"
             : load->dummy            ? "weights, made up"
                                      : "weights, mapped",
             m->weight_bytes - plan->host_bytes);
    if (plan->host_bytes)
        put_size(out, "weights on the host", plan->host_bytes);
    put_size(out, "workspace", m->workspace_bytes);
    put_size(out, "scratch", m->scratch_bytes);
    put_size(out, "state slot", m->slot_bytes);
    put_label(out, "state slots");
    di_strbuf_printf(out, "%d, ", plan->engine.seqs_max);
    put_bytes(out, 0, (uint64_t)plan->engine.seqs_max * m->slot_bytes);
    di_strbuf_putc(out, '\n');
    put_label(out, "snapshots of windows");
    di_strbuf_printf(out, "%d, ", plan->engine.n_snapshots);
    put_bytes(out, 0, (uint64_t)plan->engine.n_snapshots * m->slot_bytes);
    di_strbuf_putc(out, '\n');
    if (plan->draft_bytes)
        put_size(out, "drafts of sequences", plan->draft_bytes);
    put_size(out, "KV block", m->page_bytes);
    put_label(out, "KV a token");
    di_strbuf_printf(out, "%.2f bytes\n", (double)m->page_bytes / DI_PAGE_TOKENS);
    put_label(out, "KV blocks");
    di_strbuf_printf(out, "%d of %d tokens, ", plan->engine.n_blocks, DI_PAGE_TOKENS);
    put_bytes(out, 0, plan->kv_bytes);
    di_strbuf_putc(out, '\n');
    put_size(out, "total", plan->total_bytes);
    put_size(out, "free", plan->free_bytes);
    put_replay(out, opt, c, load);
    put_label(out, "context that fits");
    if (fit) {
        di_strbuf_printf(out, "none: %s\n", fit_error->message);
        return;
    }
    int64_t in_all = (int64_t)plan->engine.n_blocks * DI_PAGE_TOKENS;
    di_strbuf_printf(out, "%" PRId64 " tokens a sequence, %" PRId64 " in all\n", plan->engine.context_max, in_all);
    if (!plan->weights_are_copied && m->weight_bytes > plan->free_bytes) {
        put_label(out, "note");
        di_strbuf_puts(out, load->dummy
                                ? "the weights don't fit into free memory and can't be made up here\n"
                                : "the weights don't fit into free memory and are read from disk as they are needed\n");
    }
}

static di_status plan_memory(di_strbuf *out, const di_options *opt, const di_config *c, di_error *err) {
    di_load_options load;
    di_backend backend;
    di_device *device = NULL;
    di_device_info info;
    di_load_plan plan;
    di_error fit_error = {0};
    di_status st = di_cli_load_options(&load, opt, err);
    if (st)
        return st;
    di_device_config config = di_load_device_config(&load);
    st = di_backend_find(load.backend, &backend, err);
    if (!st)
        st = backend.device->open(&device, &config, err);
    if (st)
        return st;
    st = backend.device->info(device, &info, err);
    if (!st) {
        di_status fit = di_load_plan_make(&plan, c, &load, &backend, device, &fit_error);
        if (fit && fit != DI_ERR_MEMORY) { /* options that can't be met, not a shortage */
            st = fit;
            if (err)
                *err = fit_error;
        } else {
            put_plan(out, opt, c, &load, &plan, &info, fit, &fit_error);
        }
    }
    backend.device->close(device);
    return st;
}

int di_cmd_info(const di_options *opt) {
    di_error err;
    di_config config;
    di_checkpoint *ckpt = NULL;
    di_strbuf out = {0};
    di_load_options load;
    di_status st = di_cli_load_options(&load, opt, &err);
    if (!st)
        st = di_load_config(&config, &load, &err);
    if (!st) {
        di_checkpoint_options open = {.dummy = load.dummy, .headers_only = true};
        st = di_checkpoint_open(&ckpt, opt->model, &config, &open, &err);
    }
    if (!st) {
        put_architecture(&out, opt, &config);
        put_layers(&out, &config);
        put_tensors(&out, ckpt);
        st = plan_memory(&out, opt, &config, &err);
    }
    if (!st)
        st = di_strbuf_status(&out, &err);
    if (!st)
        st = di_cli_print(out.data, out.len, &err);
    di_strbuf_deinit(&out);
    di_checkpoint_close(ckpt);
    return st ? di_cli_fail(&err) : 0;
}
