/* What the structures of the public API say, in the terms of the layers below.
 *
 * Each structure comes with its size: what the caller's version of the header doesn't have keeps its default. Words
 * become enumerations here, text and ids become a di_request like any that was read from JSON, so that from here on
 * there is one kind of request. */
#include <math.h>

#include "engine_api.h"

/* ---- structures of any version ---- */

static di_status check_size(const char *name, size_t size, size_t least, size_t most, di_error *err) {
    if (size >= least && size <= most)
        return DI_OK;
    return di_fail(err, DI_ERR_ARG, "%s: struct_size %zu, expected %zu to %zu, as its _init function sets it", name,
                   size, least, most);
}

/* Defaults of the fields that both versions know. */
static void init_prefix(void *out, size_t struct_size, const void *defaults, size_t size) {
    memset(out, 0, struct_size);
    memcpy(out, defaults, DI_MIN(struct_size, size));
    if (struct_size >= sizeof struct_size)
        memcpy(out, &struct_size, sizeof struct_size); /* the first field of each */
}

void di_engine_sampling_init(di_engine_sampling *sampling, size_t struct_size) {
    const di_engine_sampling defaults = {
        .n = 1,
        .temperature = 1,
        .top_p = 1,
        .top_k = -1,
        .repetition_penalty = 1,
        .logprobs = -1,
        .prompt_logprobs = -1,
    };
    init_prefix(sampling, struct_size, &defaults, sizeof defaults);
}

void di_engine_config_init(di_engine_config *config, size_t struct_size) {
    const di_engine_config defaults = {
        .backend = "auto",
        .cpu_isa = "auto",
        .numerics = "faithful",
        .seqs_max = 16,
        .batch_tokens_max = 2048,
        .replay = "off",
        .draft_tokens = 5,
        .draft_policy = "cost",
        .accept = "coupled",
        .step_times_ttl_s = 604800,
        .grammar_threads = 2,
        .grammar_cache_bytes = (int64_t)256 << 20,
        .grammar_timeout_s = 20,
        .has_prefix_cache = true,
        .log_interval_steps = 100,
    };
    init_prefix(config, struct_size, &defaults, sizeof defaults);
}

void di_engine_request_init(di_engine_request *request, size_t struct_size) {
    const di_engine_request defaults = {.events = DI_ENGINE_WANTS_ALL};
    init_prefix(request, struct_size, &defaults, sizeof defaults);
}

di_status di_engine_config_read(di_engine_config *out, const di_engine_config *given, di_error *err) {
    size_t least = offsetof(di_engine_config, progress_user) + sizeof given->progress_user;
    di_status st = check_size("di_engine_config", given->struct_size, least, sizeof *given, err);
    if (st)
        return st;
    di_engine_config_init(out, sizeof *out);
    memcpy(out, given, given->struct_size);
    return DI_OK;
}

di_status di_engine_request_read(di_engine_request *out, const di_engine_request *given, di_error *err) {
    size_t least = offsetof(di_engine_request, events) + sizeof given->events;
    di_status st = check_size("di_engine_request", given->struct_size, least, sizeof *given, err);
    if (st)
        return st;
    di_engine_request_init(out, sizeof *out);
    memcpy(out, given, given->struct_size);
    return DI_OK;
}

static di_status read_sampling(di_engine_sampling *out, const di_engine_sampling *given, di_error *err) {
    size_t least = offsetof(di_engine_sampling, forced_tokens) + sizeof given->forced_tokens;
    di_status st = check_size("di_engine_sampling", given->struct_size, least, sizeof *given, err);
    if (st)
        return st;
    di_engine_sampling_init(out, sizeof *out);
    memcpy(out, given, given->struct_size);
    return DI_OK;
}

/* ---- sampling ---- */

/* A copy in the arena; an empty list is NULL. */
static di_status copy_list(di_arena *memory, const void *list, size_t n, size_t item_bytes, const void **out,
                           di_error *err) {
    *out = NULL;
    if (n == 0)
        return DI_OK;
    void *copy = di_arena_calloc(memory, n, item_bytes);
    if (!copy)
        return di_fail(err, DI_ERR_MEMORY, "list of %zu items", n);
    memcpy(copy, list, n * item_bytes);
    *out = copy;
    return DI_OK;
}

static di_status copy_stops(di_sampling *out, const di_engine_sampling *s, di_arena *memory, di_error *err) {
    const char **stop = di_arena_calloc(memory, s->n_stop, sizeof *stop);
    size_t *stop_len = di_arena_calloc(memory, s->n_stop, sizeof *stop_len);
    if (!stop || !stop_len)
        return di_fail(err, DI_ERR_MEMORY, "%zu stop strings", s->n_stop);
    for (size_t i = 0; i < s->n_stop; i++) {
        if (!s->stop[i])
            return di_fail(err, DI_ERR_ARG, "stop string %zu: NULL, expected a text", i);
        stop_len[i] = s->stop_len ? s->stop_len[i] : strlen(s->stop[i]);
        if (!di_utf8_valid(s->stop[i], stop_len[i]))
            return di_fail(err, DI_ERR_REQUEST, "stop string %zu is not UTF-8", i);
        stop[i] = di_arena_strndup(memory, s->stop[i], stop_len[i]);
        if (!stop[i])
            return di_fail(err, DI_ERR_MEMORY, "%zu stop strings", s->n_stop);
    }
    out->n_stop = s->n_stop;
    out->stop = stop;
    out->stop_len = stop_len;
    return DI_OK;
}

static di_status check_lists(const di_engine_sampling *s, di_error *err) {
    const char *missing = s->n_stop && !s->stop                 ? "stop"
                          : s->n_stop_tokens && !s->stop_tokens ? "stop_tokens"
                          : s->n_bias && !s->bias_tokens        ? "bias_tokens"
                          : s->n_bias && !s->bias               ? "bias"
                          : s->n_forced && !s->forced_tokens    ? "forced_tokens"
                                                                : NULL;
    if (missing)
        return di_fail(err, DI_ERR_ARG, "di_engine_sampling: '%s' is NULL, expected as many items as its count says",
                       missing);
    if (s->n < 1 || s->n > DI_SAMPLES_MAX)
        return di_fail(err, DI_ERR_RANGE, "n: %d, expected 1 to %d", s->n, DI_SAMPLES_MAX);
    return DI_OK;
}

/* Into the engine's own structure, lists copied, ranges checked. */
static di_status take_sampling(di_sampling *out, const di_engine_sampling *s, di_arena *memory, di_error *err) {
    di_status st = check_lists(s, err);
    if (st)
        return st;
    di_sampling_init(out);
    out->temperature = s->temperature;
    out->top_p = s->top_p;
    out->top_k = s->top_k;
    out->min_p = s->min_p;
    out->presence_penalty = s->presence_penalty;
    out->frequency_penalty = s->frequency_penalty;
    out->repetition_penalty = s->repetition_penalty;
    out->has_seed = s->has_seed;
    out->seed = s->seed;
    out->max_tokens = s->max_tokens;
    out->min_tokens = s->min_tokens;
    out->ignore_eos = s->ignore_eos;
    out->n_logprobs = s->logprobs;
    out->n_prompt_logprobs = s->prompt_logprobs;
    out->logprobs_processed = s->logprobs_processed;
    out->n_bias = s->n_bias;
    out->n_stop_tokens = s->n_stop_tokens;
    const void *bias_ids, *bias_values, *stop_tokens;
    if ((st = copy_list(memory, s->bias_tokens, s->n_bias, sizeof *s->bias_tokens, &bias_ids, err)) ||
        (st = copy_list(memory, s->bias, s->n_bias, sizeof *s->bias, &bias_values, err)) ||
        (st = copy_list(memory, s->stop_tokens, s->n_stop_tokens, sizeof *s->stop_tokens, &stop_tokens, err)) ||
        (st = copy_stops(out, s, memory, err)))
        return st;
    out->bias_ids = bias_ids;
    out->bias_values = bias_values;
    out->stop_tokens = stop_tokens;
    return di_sampling_check(out, err);
}

/* ---- configuration ---- */

static di_status read_word(const char *name, const char *value, const char *const *words, int n, int *out,
                           di_error *err) {
    di_strbuf list = {0};
    for (int i = 0; i < n; i++) {
        if (value && strcmp(value, words[i]) == 0) {
            di_strbuf_deinit(&list);
            *out = i;
            return DI_OK;
        }
        di_strbuf_printf(&list, "%s%s", i == 0 ? "" : i == n - 1 ? " or " : ", ", words[i]);
    }
    di_status st =
        di_fail(err, DI_ERR_ARG, "%s: '%s', expected %s", name, value ? value : "(none)", di_strbuf_str(&list));
    di_strbuf_deinit(&list);
    return st;
}

di_status di_log_level_set(const char *level, di_error *err) {
    static const char *const words[] = {"error", "warn", "info", "debug"};
    int i = 0;
    di_status st = read_word("log level", level, words, (int)DI_COUNT(words), &i, err);
    if (!st)
        di_log_set_level((di_log_level)i);
    return st;
}

static di_status check_limit(const char *name, int64_t value, int64_t least, int64_t most, di_error *err) {
    if (value >= least && value <= most)
        return DI_OK;
    return di_fail(err, DI_ERR_ARG, "%s: %lld, expected %lld to %lld", name, (long long)value, (long long)least,
                   (long long)most);
}

/* The ranges are those of the options (base/options.def), with 0 where a default is chosen by it. */
static di_status check_limits(const di_engine_config *c, di_error *err) {
    const struct {
        const char *name;
        int64_t value, least, most;
    } limits[] = {
        {"threads", c->threads, 0, 4096},
        {"dummy_layers", c->dummy_layers, 0, 64},
        {"seqs_max", c->seqs_max, 1, 4096},
        {"batch_tokens_max", c->batch_tokens_max, 1, 1048576},
        {"chunk_max", c->chunk_max, 0, 1048576},
        {"context_max", c->context_max, 0, 16777216},
        {"context_sum_max", c->context_sum_max, 0, INT64_MAX},
        {"kv_bytes", c->kv_bytes, 0, INT64_MAX},
        {"replay_keep", c->replay_keep, 0, 16777216},
        {"draft_tokens", c->draft_tokens, 0, DI_SPEC_DRAFTS_MAX},
        {"step_times_ttl_s", c->step_times_ttl_s, 1, 1000000000},
        {"grammar_threads", c->grammar_threads, 1, 256},
        {"grammar_cache_bytes", c->grammar_cache_bytes, 0, INT64_MAX},
        {"queue_max", c->queue_max, 0, INT64_MAX / 2},
        {"log_interval_steps", c->log_interval_steps, 0, INT64_MAX},
        {"device", c->device, 0, 1023},
    };
    for (size_t i = 0; i < DI_COUNT(limits); i++) {
        di_status st = check_limit(limits[i].name, limits[i].value, limits[i].least, limits[i].most, err);
        if (st)
            return st;
    }
    return DI_OK;
}

static di_status read_goal(const char *name, double ms, int64_t *out_ns, di_error *err) {
    if (!(ms >= 0 && ms <= 1e9))
        return di_fail(err, DI_ERR_ARG, "%s: %g, expected 0 to 1e9 milliseconds", name, ms);
    *out_ns = (int64_t)llround(ms * 1e6);
    return DI_OK;
}

di_status di_engine_load_options(di_load_options *out, const di_engine_config *c, di_error *err) {
    static const char *const numerics[] = {"faithful", "exact"}, *const replays[] = {"off", "mask", "compact"},
                             *const policies[] = {"cost", "reference", "fixed"},
                             *const accepts[] = {"coupled", "rejection"};
    static const di_spec_policy policy_of[] = {DI_SPEC_COST, DI_SPEC_REFERENCE, DI_SPEC_FIXED};
    static const di_replay replay_of[] = {DI_REPLAY_OFF, DI_REPLAY_MASK, DI_REPLAY_COMPACT};
    int numerics_at = 0, replay_at = 0, policy_at = 0, accept_at = 0;
    int64_t ttft_ns = 0, tpot_ns = 0;
    di_status st;
    if ((st = check_limits(c, err)) ||
        (st = read_word("numerics", c->numerics, numerics, (int)DI_COUNT(numerics), &numerics_at, err)) ||
        (st = read_word("replay", c->replay, replays, (int)DI_COUNT(replays), &replay_at, err)) ||
        (st = read_word("draft_policy", c->draft_policy, policies, (int)DI_COUNT(policies), &policy_at, err)) ||
        (st = read_word("accept", c->accept, accepts, (int)DI_COUNT(accepts), &accept_at, err)) ||
        (st = read_goal("ttft_goal_ms", c->ttft_goal_ms, &ttft_ns, err)) ||
        (st = read_goal("tpot_goal_ms", c->tpot_goal_ms, &tpot_ns, err)))
        return st;
    if (!(c->grammar_timeout_s > 0 && c->grammar_timeout_s <= 1e6))
        return di_fail(err, DI_ERR_ARG, "grammar_timeout_s: %g, expected more than 0, up to 1e6", c->grammar_timeout_s);
    if (!c->model && c->dummy_layers == 0)
        return di_fail(err, DI_ERR_ARG, "model: NULL, expected a folder with config.json and the weights");
    *out = (di_load_options){
        .dir = c->model,
        .backend = c->backend ? c->backend : "auto",
        .threads = c->threads,
        .cpu_isa = c->cpu_isa,
        .is_pinned = c->is_pinned,
        .is_order_free = c->is_order_free,
        .dummy = c->is_dummy || c->dummy_layers > 0,
        .dummy_layers = c->dummy_layers,
        .numerics = numerics_at ? DI_NUMERICS_EXACT : DI_NUMERICS_FAITHFUL,
        .seqs_max = c->seqs_max,
        .batch_tokens_max = c->batch_tokens_max,
        .chunk_max = c->chunk_max,
        .context_max = c->context_max,
        .kv_bytes = c->kv_bytes,
        .replay = replay_of[replay_at],
        .replay_keep = c->replay_keep,
        .draft_tokens = c->draft_tokens,
        .draft_policy = policy_of[policy_at],
        .accept = accept_at ? DI_SPEC_REJECTION : DI_SPEC_COUPLED,
        .draft_temperatures = c->draft_temperatures,
        .step_times_dir = c->step_times,
        .step_times_ttl_s = c->step_times_ttl_s,
        .has_prefix_cache = c->has_prefix_cache,
        .is_sync = c->is_sync,
        .context_sum_max = c->context_sum_max,
        .ttft_goal_ns = ttft_ns,
        .tpot_goal_ns = tpot_ns,
        .log_interval_steps = c->log_interval_steps,
        .blacklist = c->blacklist,
        .progress = c->progress,
        .user = c->progress_user,
        .device_index = c->device,
        .device_kernels = c->device_kernels,
    };
    return DI_OK;
}

di_status di_engine_defaults(di_request_options *out, const di_engine_config *c, di_arena *memory, di_error *err) {
    di_request_options_init(out, c->vendor_compat);
    di_status st = c->reasoning ? di_effort_parse(c->reasoning, &out->effort_default, err) : DI_OK;
    if (st || !c->sampling)
        return st;
    di_engine_sampling sampling;
    st = read_sampling(&sampling, c->sampling, err);
    if (!st)
        st = take_sampling(&out->sampling, &sampling, memory, err);
    return di_error_context(err, st, "defaults of requests");
}

/* ---- requests ---- */

static di_status own_text(di_request *q, const char *text, size_t len, di_chat_text *out, di_error *err) {
    out->data = di_arena_strndup(&q->arena, text, len);
    out->len = len;
    return out->data ? DI_OK : di_fail(err, DI_ERR_MEMORY, "text of %zu bytes", len);
}

static di_status take_format(di_request *q, const di_engine_request *r, di_error *err) {
    if (!r->json_schema && !r->regex && !r->ebnf)
        return DI_OK;
    if (r->json_schema && !*r->json_schema) /* no text at all would stand for any object */
        return di_fail(err, DI_ERR_REQUEST, "json_schema: an empty text, expected a JSON schema");
    const char *text = r->json_schema ? r->json_schema : r->regex ? r->regex : r->ebnf;
    q->format_constraint = r->json_schema ? DI_CONSTRAINT_JSON : r->regex ? DI_CONSTRAINT_REGEX : DI_CONSTRAINT_EBNF;
    di_status st = own_text(q, text, strlen(text), &q->format_text, err);
    q->constraint = q->format_constraint;
    q->constraint_text = q->format_text;
    return st;
}

/* What a request line of the same content would have been read to. */
static di_status from_structure(di_request *q, const di_engine_request *r, di_error *err) {
    di_engine_sampling sampling;
    *q = (di_request){.api = DI_API_LINE, .input = r->text ? DI_INPUT_TEXT : DI_INPUT_IDS, .n = 1};
    di_engine_sampling_init(&sampling, sizeof sampling);
    di_status st = r->sampling ? read_sampling(&sampling, r->sampling, err) : DI_OK;
    if (st || (st = take_sampling(&q->sampling, &sampling, &q->arena, err)))
        return st;
    const void *forced, *ids;
    if ((st = copy_list(&q->arena, sampling.forced_tokens, sampling.n_forced, sizeof *q->forced, &forced, err)))
        return st;
    q->forced = forced;
    q->n_forced = sampling.n_forced;
    q->n = sampling.n;
    q->has_max_tokens = sampling.max_tokens > 0;
    if ((st = take_format(q, r, err)))
        return st;
    if (r->text) {
        if (!di_utf8_valid(r->text, r->text_len))
            return di_fail(err, DI_ERR_REQUEST, "the prompt is not UTF-8");
        return own_text(q, r->text, r->text_len, &q->text, err);
    }
    if ((st = copy_list(&q->arena, r->ids, r->n_ids, sizeof *q->ids, &ids, err)))
        return st;
    q->ids = ids;
    q->n_ids = r->n_ids;
    return DI_OK;
}

static di_status from_json(di_request *q, const di_engine_request *r, const di_request_options *defaults,
                           di_error *err) {
    di_api_kind api = DI_API_LINE;
    /* Completions may have several prompts, which a request of the engine can't. */
    if (r->json_api && (!di_api_kind_parse(r->json_api, &api) || api == DI_API_COMPLETIONS))
        return di_fail(err, DI_ERR_ARG, "json_api '%s', expected line, chat, responses or messages", r->json_api);
    return di_request_parse(q, api, r->json, r->json_len, defaults, err);
}

di_status di_engine_request_parse(di_request *q, const di_engine_request *r, const di_request_options *defaults,
                                  di_error *err) {
    *q = (di_request){0};
    int n_inputs = (r->json != NULL) + (r->text != NULL) + (r->ids != NULL);
    if (n_inputs != 1)
        return di_fail(err, DI_ERR_ARG, "di_engine_request: %d of json, text and ids are set, expected 1", n_inputs);
    int n_formats = (r->json_schema != NULL) + (r->regex != NULL) + (r->ebnf != NULL);
    if (n_formats > 1)
        return di_fail(err, DI_ERR_ARG, "di_engine_request: %d of json_schema, regex and ebnf are set, expected one",
                       n_formats);
    if (n_formats && r->json)
        return di_fail(err, DI_ERR_ARG, "di_engine_request: a format beside json, expected it in the JSON");
    if (r->deadline_ms < 0 || r->deadline_ms > INT64_MAX / 2000000)
        return di_fail(err, DI_ERR_RANGE, "deadline_ms: %lld, expected 0 or more, up to %lld",
                       (long long)r->deadline_ms, (long long)(INT64_MAX / 2000000));
    di_status st = r->json ? from_json(q, r, defaults, err) : from_structure(q, r, err);
    if (st)
        return st;
    if (r->has_priority)
        q->priority = r->priority;
    if (r->caller && (st = own_text(q, r->caller, strlen(r->caller), &q->caller, err)))
        return st;
    return r->cache_salt ? own_text(q, r->cache_salt, strlen(r->cache_salt), &q->cache_salt, err) : DI_OK;
}
