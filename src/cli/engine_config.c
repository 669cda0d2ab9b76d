/* The engine's part of the options as the public API has it, for what runs an engine on a thread of its own. */
#include "cli_model.h"

void di_cli_engine_config(di_engine_config *out, const di_options *opt) {
    di_engine_config_init(out, sizeof *out);
    out->model = opt->model;
    out->backend = opt->backend;
    out->threads = (int32_t)opt->threads;
    out->cpu_isa = opt->cpu_isa;
    out->is_pinned = opt->pin;
    out->is_dummy = opt->dummy;
    out->dummy_layers = (int32_t)opt->dummy_layers;
    out->numerics = opt->numerics;
    out->is_order_free = strcmp(opt->batch_invariant, "off") == 0;
    out->seqs_max = (int32_t)opt->max_seqs;
    out->batch_tokens_max = opt->max_batched_tokens;
    out->chunk_max = opt->chunk;
    out->context_max = opt->max_model_len;
    out->context_sum_max = opt->max_context_sum;
    out->kv_bytes = opt->kv_memory;
    out->replay = opt->replay;
    out->replay_keep = opt->replay_keep;
    out->draft_tokens = (int32_t)opt->draft_tokens;
    out->draft_policy = opt->draft_policy;
    out->accept = opt->accept;
    out->draft_temperatures = opt->draft_temperatures;
    out->step_times = opt->step_times;
    out->step_times_ttl_s = opt->step_times_ttl;
    out->has_prefix_cache = !opt->no_prefix_cache;
    out->is_sync = strcmp(opt->async, "off") == 0;
    out->queue_max = opt->max_queue;
    out->ttft_goal_ms = opt->ttft_goal;
    out->tpot_goal_ms = opt->tpot_goal;
    out->blacklist = opt->token_blacklist;
    out->trace = opt->trace;
    out->log_interval_steps = opt->log_interval;
    out->grammar_threads = (int32_t)opt->grammar_threads;
    out->grammar_cache_bytes = opt->grammar_cache;
    out->grammar_timeout_s = opt->grammar_timeout;
    out->device = (int32_t)opt->device;
    out->device_kernels = opt->device_kernels;
    out->vendor_compat = opt->vendor_compat;
    out->reasoning = !opt->vendor_compat || di_options_is_set(opt, DI_OPT_reasoning) ? opt->reasoning : NULL;
}

di_status di_cli_load_options(di_load_options *out, const di_options *opt, di_error *err) {
    di_engine_config config;
    di_cli_engine_config(&config, opt);
    di_status st = di_engine_load_options(out, &config, err);
    if (!st)
        out->queue_max = opt->max_queue; /* the public API counts what waits itself */
    return st;
}
