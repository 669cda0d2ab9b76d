/* From a folder and options to a model that is ready to run, and the memory plan behind it.
 *
 * The order is by cost and by how likely a mistake is: config, device, plan, tokenizer and its Engram classes, then the
 * weights. The plan is explicit: weights (mapped), working memory, state slots and KV blocks are added up before
 * anything large is made, and a shortage says what is needed and what there is. */
#include "engine_internal.h"

#define CONTEXT_MIN 256                             /* a planned context is not cut below this */
#define CHUNK_HOST 512                              /* of a prompt in a step, where nothing is asked for */
#define MEASURE_COST_NS ((int64_t)200 * 1000000)    /* of the start, for the cost of steps */
#define MEASURE_TABLE_NS ((int64_t)20000 * 1000000) /* for the table of DI_SPEC_REFERENCE */
#define DEVICE_RESERVE 16 /* part of a device's free memory that is left to its driver and to fragments */
#define LOGITS_MIN 64     /* rows of logits of a step, so that prompts can be scored in chunks */

/* ---- plan ---------------------------------------------------------------------------------------------------------
 */

static di_status check_options(const di_config *c, const di_load_options *o, di_error *err) {
    if (o->context_max > c->position_max)
        return di_fail(err, DI_ERR_ARG, "--max-model-len %lld: the model's context is %lld", (long long)o->context_max,
                       (long long)c->position_max);
    if (o->context_max == 1)
        return di_fail(err, DI_ERR_ARG, "--max-model-len 1: expected 2 or more, a prompt and an answer");
    if (o->batch_tokens_max < o->seqs_max)
        return di_fail(err, DI_ERR_ARG, "--max-batched-tokens %lld: expected at least --max-seqs (%d)",
                       (long long)o->batch_tokens_max, o->seqs_max);
    int64_t keep;
    return di_replay_settle(c, o->replay, o->replay_keep, &keep, err);
}

static di_model_options model_options(const di_load_options *o, const di_load_plan *plan, const di_backend *backend,
                                      di_device *device) {
    return (di_model_options){
        .backend = backend,
        .device = device,
        .numerics = o->numerics,
        .rows_max = plan->engine.batch_tokens_max,
        .seqs_max = plan->engine.seqs_max,
        .tokens_max = plan->engine.context_max,
        .logits_max = plan->engine.logits_max,
        .with_draft = plan->engine.draft_tokens > 0,
        .engram_on_host = plan->host_bytes > 0,
        .progress = o->progress,
        .user = o->user,
    };
}

/* Fills the plan for one context; false when a size overflows. */
static bool plan_context(di_load_plan *plan, const di_config *c, const di_load_options *o, const di_backend *backend,
                         di_device *device, int64_t context) {
    plan->engine.context_max = context;
    di_model_options mo = model_options(o, plan, backend, device);
    di_model_plan(c, &mo, &plan->memory);
    const di_memory_plan *m = &plan->memory;
    size_t states, drafts = 0;
    size_t n_drafts = (size_t)plan->engine.draft_tokens, seqs = (size_t)o->seqs_max;
    if (o->accept == DI_SPEC_REJECTION && !di_size_mul3(&drafts, seqs * n_drafts, (size_t)c->vocab, sizeof(float)))
        return false;
    if (n_drafts > 0 && o->draft_policy == DI_SPEC_COST && !di_size_add(&drafts, drafts, seqs * m->tap_bytes))
        return false;
    plan->draft_bytes = drafts;
    if (!di_size_mul(&states, (size_t)o->seqs_max + (size_t)plan->engine.n_snapshots, m->slot_bytes))
        return false;
    plan->state_bytes = states;
    /* A device's own memory need not hold the Engram tables: of a token it reads a few rows, wherever they are. */
    plan->host_bytes = plan->weights_are_copied && m->engram_bytes > plan->free_bytes / 4 ? m->engram_bytes : 0;
    plan->total_bytes =
        m->weight_bytes - plan->host_bytes + m->workspace_bytes + m->scratch_bytes + states + plan->draft_bytes;
    return plan->total_bytes >= m->weight_bytes - plan->host_bytes;
}

/* Bytes that KV blocks may take: what --kv-memory leaves behind the slots, else half of what is free behind everything
 * else. Weights that are mapped may lie in the page cache, which counts as free: they come off first, yet not more than
 * half of the memory, since what doesn't fit is read again as needed. Weights that are copied to the device must fit,
 * and nobody else wants what they leave but for a reserve. */
static uint64_t block_budget(const di_load_plan *plan, const di_load_options *o) {
    const di_memory_plan *m = &plan->memory;
    if (o->kv_bytes > 0)
        return (uint64_t)o->kv_bytes > plan->state_bytes ? (uint64_t)o->kv_bytes - plan->state_bytes : 0;
    uint64_t weights = plan->weights_are_copied ? m->weight_bytes - plan->host_bytes
                                                : DI_MIN((uint64_t)m->weight_bytes, plan->free_bytes / 2);
    uint64_t taken = weights + m->workspace_bytes + m->scratch_bytes + plan->state_bytes + plan->draft_bytes;
    if (taken >= plan->free_bytes)
        return 0;
    uint64_t left = plan->free_bytes - taken;
    return plan->weights_are_copied ? left - left / DEVICE_RESERVE : left / 2;
}

static di_status fail_memory(const di_load_plan *plan, const di_load_options *o, int64_t n_blocks, di_error *err) {
    uint64_t need = plan->state_bytes + (uint64_t)n_blocks * plan->memory.page_bytes;
    if (o->kv_bytes > 0)
        return di_fail(
            err, DI_ERR_MEMORY,
            "--kv-memory: %lld bytes, needed are %llu (%d state slots of %zu bytes, %lld blocks of %zu): raise it or "
            "lower --max-seqs",
            (long long)o->kv_bytes, (unsigned long long)need, o->seqs_max, plan->memory.slot_bytes, (long long)n_blocks,
            plan->memory.page_bytes);
    need = plan->total_bytes + (uint64_t)n_blocks * plan->memory.page_bytes;
    return di_fail(err, DI_ERR_MEMORY,
                   "a context of %lld tokens for %d sequences needs %llu bytes with the weights, %llu are free: lower "
                   "--max-model-len, --max-seqs or --max-batched-tokens",
                   (long long)plan->engine.context_max, o->seqs_max, (unsigned long long)need,
                   (unsigned long long)plan->free_bytes);
}

/* Window snapshots of the prefix cache: half as many bytes as the blocks, a quarter of the budget at most. Where the
 * budget is tight, blocks beyond those of one context give way. Returns the blocks that are left of `wanted`. */
static int64_t plan_snapshots(di_load_plan *plan, const di_load_options *o, int64_t n_blocks, int64_t wanted) {
    uint64_t page = plan->memory.page_bytes, slot = plan->memory.slot_bytes, budget = block_budget(plan, o);
    uint64_t bytes = DI_MIN((uint64_t)wanted * page / 2, budget / 4);
    int64_t n = DI_MIN((int64_t)(bytes / slot), wanted);
    int64_t room = (int64_t)((budget - (uint64_t)n * slot) / page);
    if (room < wanted) {
        int64_t least = DI_MIN(n_blocks, wanted);
        if (room < least) { /* one context comes first */
            n = (int64_t)((budget - DI_MIN(budget, (uint64_t)least * page)) / slot);
            room = least;
        }
        wanted = room;
    }
    plan->engine.n_snapshots = (int32_t)DI_MIN(n, INT32_MAX / 2);
    plan->state_bytes += (uint64_t)plan->engine.n_snapshots * slot;
    plan->total_bytes += (uint64_t)plan->engine.n_snapshots * slot;
    return wanted;
}

/* A step of more rows takes a GPU little longer, since all experts are read anyway; the host's arithmetic binds, and
 * whoever waits for tokens waits for the step. */
static int64_t chunk_of(const di_load_options *o, const di_backend *backend) {
    if (o->chunk_max > 0)
        return o->chunk_max;
    return backend->device->graph_launch ? o->batch_tokens_max : DI_MIN((int64_t)CHUNK_HOST, o->batch_tokens_max);
}

di_status di_load_plan_make(di_load_plan *plan, const di_config *c, const di_load_options *o, const di_backend *backend,
                            di_device *device, di_error *err) {
    memset(plan, 0, sizeof *plan);
    di_status st = check_options(c, o, err);
    if (st)
        return st;
    di_device_info info;
    if ((st = backend->device->info(device, &info, err)))
        return st;
    plan->free_bytes = info.memory_free_bytes;
    plan->weights_are_copied = !info.weights_by_mapping;
    int32_t n_drafts = c->n_draft_layers > 0 ? DI_MIN(o->draft_tokens, DI_MIN(c->draft_block, DI_SPEC_DRAFTS_MAX)) : 0;
    plan->engine = (di_core_options){
        .seqs_max = o->seqs_max,
        .batch_tokens_max = o->batch_tokens_max,
        .chunk_max = chunk_of(o, backend),
        .context_sum_max = o->context_sum_max,
        .logits_max = DI_MIN(o->batch_tokens_max, DI_MAX((int64_t)o->seqs_max * (1 + n_drafts), LOGITS_MIN)),
        .draft_tokens = n_drafts,
        .draft_policy = o->draft_policy,
        .accept = o->accept,
        .measure_ns = o->draft_policy == DI_SPEC_REFERENCE ? MEASURE_TABLE_NS : MEASURE_COST_NS,
        .step_times_dir = o->step_times_dir,
        .step_times_ttl_s = o->step_times_ttl_s,
        .queue_max = o->queue_max,
        .replay = o->replay,
        .replay_keep = o->replay_keep,
        .has_prefix_cache = o->has_prefix_cache,
        .is_sync = o->is_sync,
        .ttft_goal_ns = o->ttft_goal_ns,
        .tpot_goal_ns = o->tpot_goal_ns,
        .log_interval_steps = o->log_interval_steps,
        .trace = o->trace,
    };
    if (o->draft_temperatures && n_drafts > 0 &&
        (st = di_spec_temperatures_parse(o->draft_temperatures, n_drafts, plan->engine.draft_temperatures, err)))
        return di_error_context(err, st, "--draft-temperatures");
    /* A context that was asked for must fit; the model's own is halved until one sequence does. */
    int64_t context = o->context_max > 0 ? o->context_max : c->position_max, n_blocks, budget_blocks;
    for (;;) {
        if (!plan_context(plan, c, o, backend, device, context))
            return di_fail(err, DI_ERR_RANGE, "%d sequences of %lld tokens: too large to address", o->seqs_max,
                           (long long)context);
        n_blocks = di_kv_blocks_for(context);
        budget_blocks = (int64_t)(block_budget(plan, o) / plan->memory.page_bytes);
        if (budget_blocks >= n_blocks || (o->context_max > 0 && o->kv_bytes > 0 && budget_blocks > 0))
            break;
        if (o->context_max > 0 || context / 2 < CONTEXT_MIN)
            return fail_memory(plan, o, n_blocks, err);
        context /= 2;
    }
    int64_t wanted = n_blocks * o->seqs_max;
    wanted = DI_MIN(DI_MIN(wanted, budget_blocks), INT32_MAX);
    if (o->has_prefix_cache)
        wanted = plan_snapshots(plan, o, n_blocks, wanted);
    plan->engine.n_blocks = (int32_t)wanted;
    plan->kv_bytes = (uint64_t)wanted * plan->memory.page_bytes;
    plan->total_bytes += plan->kv_bytes;
    return DI_OK;
}

/* ---- opening ------------------------------------------------------------------------------------------------------
 */

static di_status open_tokenizer(di_loaded *l, const di_load_options *o, di_error *err) {
    if (o->dummy_layers > 0)
        return DI_OK;
    di_strbuf path = {0};
    di_path_join(&path, o->dir, "tokenizer.json");
    di_status st = di_strbuf_status(&path, err);
    if (!st && (!o->dummy || di_path_exists(di_strbuf_str(&path))))
        st = di_tokenizer_open(&l->tok, di_strbuf_str(&path), err);
    di_strbuf_deinit(&path);
    return st;
}

/* Every id's class for Engram; NULL where there is no tokenizer: then each id is its own class. */
static di_status make_token_map(const di_loaded *l, int32_t **map, di_error *err) {
    *map = NULL;
    if (!l->tok || l->config.n_engram == 0)
        return DI_OK;
    int32_t n_classes = 0;
    *map = malloc((size_t)di_tokenizer_size(l->tok) * sizeof **map);
    if (!*map)
        return di_fail(err, DI_ERR_MEMORY, "token map of %d ids", di_tokenizer_size(l->tok));
    di_status st = di_tokenizer_engram_map(l->tok, *map, &n_classes, err);
    if (!st && n_classes != l->config.engram_classes)
        st = di_fail(
            err, DI_ERR_FORMAT,
            "tokenizer.json has %d token classes, config.json key 'engram_compressed_vocab_size' says %lld: they are "
            "not of one model",
            n_classes, (long long)l->config.engram_classes);
    if (st) {
        free(*map);
        *map = NULL;
    }
    return st;
}

static di_status open_model(di_loaded *l, const di_load_options *o, di_error *err) {
    di_checkpoint_options co = {.dummy = o->dummy, .progress = o->progress, .user = o->user};
    di_status st = di_checkpoint_open(&l->ckpt, o->dir, &l->config, &co, err);
    if (st)
        return st;
    int32_t *map = NULL;
    if ((st = make_token_map(l, &map, err)))
        return st;
    di_model_options mo = model_options(o, &l->plan, &l->backend, l->device);
    mo.token_map = map;
    mo.n_token_map = map ? di_tokenizer_size(l->tok) : 0;
    st = di_model_create(&l->model, &l->config, l->ckpt, &mo, err);
    free(map);
    return st;
}

/* A digest of what the model computes and how, for the names of cached prefixes: names, types and sizes of all tensors,
 * the contents of the small ones (norms, biases, scales of hyper-connections differ between any two trainings),
 * numerics and replay. */
#define IDENTITY_TENSOR_MAX ((size_t)16 << 10)
static di_status make_identity(di_loaded *l, const di_load_options *o, di_error *err) {
    di_strbuf sb = {0};
    for (size_t i = 0; i < di_checkpoint_count(l->ckpt); i++) {
        const di_stored_tensor *t = di_checkpoint_at(l->ckpt, i);
        di_strbuf_printf(&sb, "%s %d %zu\n", t->name, (int)t->dtype, t->n_bytes);
        if (t->n_bytes <= IDENTITY_TENSOR_MAX && t->kind != DI_KIND_EXPERT)
            di_strbuf_append(&sb, (const char *)t->data, t->n_bytes);
    }
    di_strbuf_printf(&sb, "seed %llu numerics %d replay %d keep %lld", (unsigned long long)l->config.dummy_seed,
                     (int)o->numerics, (int)o->replay, (long long)o->replay_keep);
    di_status st = di_strbuf_status(&sb, err);
    if (!st) {
        static const uint8_t head[16];
        di_kv_hash hash = di_kv_hash_xxh3(0, head, sb.data, sb.len, NULL);
        memcpy(l->plan.engine.identity, hash.bytes, sizeof l->plan.engine.identity);
    }
    di_strbuf_deinit(&sb);
    return st;
}

/* Step times are of a model, a machine and a way to run: whatever changes one of them gets a file of its own. */
static void make_step_times_key(di_loaded *l, const di_load_options *o) {
    char identity[33], cpu[128], numbers[160];
    for (int i = 0; i < 16; i++)
        snprintf(identity + 2 * i, 3, "%02x", l->plan.engine.identity[i]);
    di_cpu_name(cpu, sizeof cpu);
    snprintf(numbers, sizeof numbers, "%d threads, pinned %d, order free %d, %d sequences, %d drafts, %lld rows",
             l->backend.device->host_threads(l->device), o->is_pinned, o->is_order_free, o->seqs_max,
             l->plan.engine.draft_tokens, (long long)o->batch_tokens_max);
    const char *parts[] = {DI_ENGINE_VERSION,
                           identity,
                           o->backend,
                           o->cpu_isa ? o->cpu_isa : "auto",
                           cpu,
                           numbers,
                           o->draft_temperatures ? o->draft_temperatures : ""};
    di_spec_store_key(l->plan.engine.step_times_key, parts, DI_COUNT(parts));
}

static di_status make_blacklist(di_loaded *l, const di_load_options *o, di_error *err) {
    if (!o->blacklist)
        return DI_OK;
    l->blacklist = calloc((size_t)DI_CEIL_DIV(l->config.vocab, 32), sizeof *l->blacklist);
    if (!l->blacklist)
        return di_fail(err, DI_ERR_MEMORY, "a set of %d token ids", l->config.vocab);
    l->plan.engine.blacklist = l->blacklist;
    return di_token_ranges_parse(o->blacklist, l->config.vocab, l->blacklist, err);
}

static di_status check_folder(const char *dir, di_error *err) {
    if (di_path_is_dir(dir))
        return DI_OK;
    if (di_path_exists(dir))
        return di_fail(err, DI_ERR_NOT_FOUND, "model '%s': not a folder, expected one with config.json and the weights",
                       dir);
    return di_fail(err, DI_ERR_NOT_FOUND, "model '%s': no such folder", dir);
}

di_status di_load_config(di_config *config, const di_load_options *o, di_error *err) {
    if (o->dummy_layers > 0)
        return di_config_released_layers(config, o->dummy_layers, err);
    di_status st = check_folder(o->dir, err);
    return st ? st : di_config_load(config, o->dir, err);
}

di_status di_load_open(di_loaded *l, const di_load_options *o, di_error *err) {
    memset(l, 0, sizeof *l);
    int64_t start_ns = di_clock_ns();
    di_status st;
    if ((st = di_load_config(&l->config, o, err)))
        goto out;
    if ((st = di_backend_find(o->backend, &l->backend, err)))
        goto out;
    di_device_config device = di_load_device_config(o);
    if ((st = l->backend.device->open(&l->device, &device, err)))
        goto out;
    if ((st = di_load_plan_make(&l->plan, &l->config, o, &l->backend, l->device, err)))
        goto out;
    if ((st = make_blacklist(l, o, err)))
        goto out;
    if ((st = open_tokenizer(l, o, err)))
        goto out;
    if ((st = open_model(l, o, err)))
        goto out;
    if (!(st = make_identity(l, o, err)))
        make_step_times_key(l, o);
    l->load_ns = di_clock_ns() - start_ns;
out:
    if (st)
        di_load_close(l);
    return st;
}

void di_load_close(di_loaded *l) {
    di_model_destroy(l->model);
    di_checkpoint_close(l->ckpt);
    if (l->device)
        l->backend.device->close(l->device);
    di_tokenizer_close(l->tok);
    free(l->blacklist);
    memset(l, 0, sizeof *l);
}

di_status di_load_core(const di_loaded *l, di_core **out, di_error *err) {
    return di_core_create(out, l->model, &l->backend, l->device, &l->plan.memory, l->tok, &l->plan.engine, err);
}
