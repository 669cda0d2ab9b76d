/* The weight map: every tensor of the forward pass as a view into the checkpoint, by its role.
 *
 * The checkpoint has already checked names, dtypes and shapes against the config, so that binding only looks up and
 * takes pointers; a name that is not found here is our own bug. Nothing is transformed or copied: a device with memory
 * of its own has its copies made by model.c, and the map then points there. */
#include "model_internal.h"

typedef struct binder {
    const di_checkpoint *ckpt;
    uint8_t *const *placed; /* by tensor of the checkpoint; NULL: they stay in the mapping */
    di_error *err;
    di_status st;
    char prefix[32];
} binder;

static const di_stored_tensor *tensor(binder *b, const char *name, const char *end) {
    char full[128];
    snprintf(full, sizeof full, "%s%s%s", b->prefix, name, end);
    const di_stored_tensor *t = b->st ? NULL : di_checkpoint_find(b->ckpt, full);
    if (!t && !b->st)
        b->st = di_fail(b->err, DI_ERR_INTERNAL, "tensor '%s' is not in the checkpoint", full);
    return t;
}

/* Where operations find it. */
static const void *data_of(const binder *b, const di_stored_tensor *t) {
    return b->placed ? b->placed[t - di_checkpoint_at(b->ckpt, 0)] : t->data;
}

static const uint16_t *bf16(binder *b, const char *name) {
    const di_stored_tensor *t = tensor(b, name, "");
    return t ? data_of(b, t) : NULL;
}

static const float *f32(binder *b, const char *name) {
    const di_stored_tensor *t = tensor(b, name, "");
    return t ? data_of(b, t) : NULL;
}

/* `name`.weight as a matrix: bf16, or E4M3 or packed E2M1 with `name`.scale. */
static di_mat mat(binder *b, const char *name) {
    const di_stored_tensor *t = tensor(b, name, ".weight");
    if (!t)
        return (di_mat){0};
    di_mat m = {.dtype = t->dtype, .n_out = t->shape[0], .n_in = t->shape[1], .data = data_of(b, t)};
    if (t->dtype == DI_BF16)
        return m;
    if (t->dtype == DI_I8) { /* two values a byte */
        m.dtype = DI_F4_E2M1;
        m.n_in *= 2;
    }
    const di_stored_tensor *s = tensor(b, name, ".scale");
    m.scale = s ? data_of(b, s) : NULL;
    return m;
}

static di_hc_weights hyper(binder *b, const char *sub) {
    char name[32];
    di_hc_weights w;
    snprintf(name, sizeof name, "hc_%s_fn", sub);
    w.fn = f32(b, name);
    snprintf(name, sizeof name, "hc_%s_scale", sub);
    w.scale = f32(b, name);
    snprintf(name, sizeof name, "hc_%s_base", sub);
    w.base = f32(b, name);
    return w;
}

static di_expert expert(binder *b, const char *stem) {
    char name[64];
    di_expert e;
    snprintf(name, sizeof name, "%s.w1", stem);
    e.w1 = mat(b, name);
    snprintf(name, sizeof name, "%s.w3", stem);
    e.w3 = mat(b, name);
    snprintf(name, sizeof name, "%s.w2", stem);
    e.w2 = mat(b, name);
    return e;
}

static void bind_block(binder *b, di_block_weights *w, int32_t n_experts, int32_t n_experts_tok, di_arena *arena) {
    w->attn_norm = bf16(b, "attn_norm.weight");
    w->ffn_norm = bf16(b, "ffn_norm.weight");
    w->wq_a = mat(b, "attn.wq_a");
    w->wq_b = mat(b, "attn.wq_b");
    w->wkv = mat(b, "attn.wkv");
    w->wo_a = mat(b, "attn.wo_a");
    w->wo_b = mat(b, "attn.wo_b");
    w->q_norm = bf16(b, "attn.q_norm.weight");
    w->kv_norm = bf16(b, "attn.kv_norm.weight");
    w->sink = f32(b, "attn.attn_sink");
    w->hc_attn = hyper(b, "attn");
    w->hc_ffn = hyper(b, "ffn");
    w->gate = mat(b, "ffn.gate");
    w->gate_bias = f32(b, "ffn.gate.bias");
    w->gate_bias_vl = f32(b, "ffn.gate.bias_vl");
    w->shared = expert(b, "ffn.shared_experts");
    w->n_experts = n_experts;
    w->n_experts_tok = n_experts_tok;
    w->experts = di_arena_calloc(arena, (size_t)n_experts, sizeof *w->experts);
    if (!w->experts && !b->st)
        b->st = di_fail(b->err, DI_ERR_MEMORY, "out of memory for %d experts", (int)n_experts);
    for (int32_t e = 0; e < n_experts && !b->st; e++) {
        char stem[48];
        snprintf(stem, sizeof stem, "ffn.experts.%d", (int)e);
        w->experts[e] = expert(b, stem);
    }
}

static void bind_roles(binder *b, di_block_weights *w, const di_config *c, int32_t l) {
    if (di_config_is_kv_source(c, l)) {
        w->c_wkv = mat(b, "attn.compressor.wkv");
        if (c->ratio[l] == 2)
            w->c_wgate = mat(b, "attn.compressor.wgate");
        w->c_norm = bf16(b, "attn.compressor.norm.weight");
    }
    if (di_config_is_index_source(c, l)) {
        w->ix_wq_b = mat(b, "attn.indexer.wq_b");
        w->ix_weights = mat(b, "attn.indexer.weights_proj");
    }
    if (di_config_is_index_k_source(c, l)) {
        w->ix_wk = mat(b, "attn.indexer.wk");
        w->ix_k_norm = bf16(b, "attn.indexer.k_norm.weight");
    }
    if (di_config_engram_index(c, l) >= 0) {
        const di_stored_tensor *codes = tensor(b, "engram.embed.weight", ""),
                               *scales = tensor(b, "engram.embed.scale", "");
        if (codes && scales) {
            w->eg_codes = data_of(b, codes);
            w->eg_scales = data_of(b, scales);
            w->eg_rows = codes->shape[0];
        }
        w->eg_wkv = mat(b, "engram.wkv");
        w->eg_q = bf16(b, "engram.q_weight");
        w->eg_k = bf16(b, "engram.k_weight");
    }
}

di_status di_weights_bind(di_weights *out, const di_config *c, const di_checkpoint *ckpt, uint8_t *const *placed,
                          bool with_draft, di_arena *arena, di_error *err) {
    binder b = {.ckpt = ckpt, .placed = placed, .err = err};
    di_weights w = {0};
    size_t n_blocks = (size_t)c->n_layers + (size_t)c->n_draft_layers;
    w.blocks = di_arena_calloc(arena, n_blocks, sizeof *w.blocks);
    if (!w.blocks)
        return di_fail(err, DI_ERR_MEMORY, "out of memory for the weight map");
    w.embed = mat(&b, "embed");
    w.head = mat(&b, "head");
    w.norm = bf16(&b, "norm.weight");
    for (int32_t l = 0; l < c->n_layers && !b.st; l++) {
        snprintf(b.prefix, sizeof b.prefix, "layers.%d.", (int)l);
        bind_block(&b, &w.blocks[l], c->n_experts, c->n_experts_tok, arena);
        bind_roles(&b, &w.blocks[l], c, l);
    }
    if (with_draft && c->n_draft_layers) {
        for (int32_t i = 0; i < c->n_draft_layers && !b.st; i++) {
            snprintf(b.prefix, sizeof b.prefix, "mtp.%d.", (int)i);
            bind_block(&b, &w.blocks[c->n_layers + i], c->draft_experts, c->draft_experts_tok, arena);
        }
        w.draft_norm = bf16(&b, "norm.weight"); /* still of the last block */
        w.markov_embed = mat(&b, "markov_head.embed");
        w.markov_head = mat(&b, "markov_head.head");
        w.confidence = mat(&b, "confidence_head.proj");
        snprintf(b.prefix, sizeof b.prefix, "mtp.0.");
        w.main_proj = mat(&b, "main_proj");
        w.main_norm = bf16(&b, "main_norm.weight");
    }
    if (b.st)
        return b.st;
    *out = w;
    return DI_OK;
}
