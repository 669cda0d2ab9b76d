/* The tensors that a config implies: names, dtypes and shapes of model.md 2 and 6.1, in a fixed order.
 *
 * One walk serves the checkpoint's checks, made-up weights and `info`: whoever wants the list passes a callback. */
#include "model_internal.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct walk {
    const di_config *c;
    di_tensor_spec_fn fn;
    void *user;
    di_status st;    /* of the first call that failed; nothing is called after it */
    char prefix[32]; /* "layers.3." */
    bool is_draft;   /* everything under mtp. counts as DI_KIND_DRAFT */
} walk;

static void put(walk *w, di_tensor_kind kind, di_dtype dtype, const char *name, int64_t d0, int64_t d1) {
    if (w->st)
        return;
    di_tensor_spec spec = {.dtype = dtype, .n_dims = d1 ? 2 : 1, .shape = {d0, d1}};
    spec.kind = w->is_draft ? DI_KIND_DRAFT : kind;
    snprintf(spec.name, sizeof spec.name, "%s%s", w->prefix, name);
    w->st = w->fn(w->user, &spec);
}

/* A vector (d1 = 0) or matrix in bf16. */
static void put_bf16(walk *w, di_tensor_kind kind, const char *name, int64_t d0, int64_t d1) {
    put(w, kind, DI_BF16, name, d0, d1);
}

static void put_f32(walk *w, di_tensor_kind kind, const char *name, int64_t d0, int64_t d1) {
    put(w, kind, DI_F32, name, d0, d1);
}

/* `name`.weight in E4M3 and `name`.scale with one E8M0 per 32x32 block. */
static void put_fp8(walk *w, di_tensor_kind kind, const char *name, int64_t n_out, int64_t n_in) {
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    put(w, kind, DI_F8_E4M3, full, n_out, n_in);
    snprintf(full, sizeof full, "%s.scale", name);
    put(w, kind, DI_F8_E8M0, full, DI_CEIL_DIV(n_out, 32), DI_CEIL_DIV(n_in, 32));
}

/* `name`.weight in packed E2M1 (stored as I8) and `name`.scale with one E8M0 per 32 inputs of a row. */
static void put_fp4(walk *w, const char *name, int64_t n_out, int64_t n_in) {
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    put(w, DI_KIND_EXPERT, DI_I8, full, n_out, n_in / 2);
    snprintf(full, sizeof full, "%s.scale", name);
    put(w, DI_KIND_EXPERT, DI_F8_E8M0, full, n_out, n_in / 32);
}

/* What every block has (2.2). */
static void put_block(walk *w, int32_t n_experts) {
    const di_config *c = w->c;
    const int64_t H = c->hidden, I = c->intermediate, M = c->hc_mult, heads = (int64_t)c->n_heads * c->head_dim;
    put_bf16(w, DI_KIND_ATTENTION, "attn_norm.weight", H, 0);
    put_bf16(w, DI_KIND_ATTENTION, "ffn_norm.weight", H, 0);
    put_fp8(w, DI_KIND_ATTENTION, "attn.wq_a", c->q_rank, H);
    put_bf16(w, DI_KIND_ATTENTION, "attn.q_norm.weight", c->q_rank, 0);
    put_fp8(w, DI_KIND_ATTENTION, "attn.wq_b", heads, c->q_rank);
    put_fp8(w, DI_KIND_ATTENTION, "attn.wkv", c->head_dim, H);
    put_bf16(w, DI_KIND_ATTENTION, "attn.kv_norm.weight", c->head_dim, 0);
    put_f32(w, DI_KIND_ATTENTION, "attn.attn_sink", c->n_heads, 0);
    put_fp8(w, DI_KIND_ATTENTION, "attn.wo_a", (int64_t)c->o_groups * c->o_rank, heads / c->o_groups);
    put_fp8(w, DI_KIND_ATTENTION, "attn.wo_b", H, (int64_t)c->o_groups * c->o_rank);
    static const char *const sub[2] = {"attn", "ffn"};
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof name, "hc_%s_fn", sub[i]);
        put_f32(w, DI_KIND_HC, name, (2 + M) * M, M * H);
        snprintf(name, sizeof name, "hc_%s_base", sub[i]);
        put_f32(w, DI_KIND_HC, name, (2 + M) * M, 0);
        snprintf(name, sizeof name, "hc_%s_scale", sub[i]);
        put_f32(w, DI_KIND_HC, name, 3, 0);
    }
    put_bf16(w, DI_KIND_ROUTER, "ffn.gate.weight", n_experts, H);
    put_f32(w, DI_KIND_ROUTER, "ffn.gate.bias", n_experts, 0);
    put_f32(w, DI_KIND_ROUTER, "ffn.gate.bias_vl", n_experts, 0);
    put_fp8(w, DI_KIND_SHARED, "ffn.shared_experts.w1", I, H);
    put_fp8(w, DI_KIND_SHARED, "ffn.shared_experts.w3", I, H);
    put_fp8(w, DI_KIND_SHARED, "ffn.shared_experts.w2", H, I);
    for (int32_t e = 0; e < n_experts && !w->st; e++) {
        char name[48];
        snprintf(name, sizeof name, "ffn.experts.%d.w1", (int)e);
        put_fp4(w, name, I, H);
        snprintf(name, sizeof name, "ffn.experts.%d.w3", (int)e);
        put_fp4(w, name, I, H);
        snprintf(name, sizeof name, "ffn.experts.%d.w2", (int)e);
        put_fp4(w, name, H, I);
    }
}

/* What only some backbone layers have (2.3). */
static void put_roles(walk *w, int32_t l) {
    const di_config *c = w->c;
    const int64_t H = c->hidden, D = c->head_dim, M = c->hc_mult;
    if (di_config_is_kv_source(c, l)) {
        put_bf16(w, DI_KIND_ATTENTION, "attn.compressor.wkv.weight", D, H);
        if (c->ratio[l] == 2)
            put_bf16(w, DI_KIND_ATTENTION, "attn.compressor.wgate.weight", D, H);
        put_bf16(w, DI_KIND_ATTENTION, "attn.compressor.norm.weight", D, 0);
    }
    if (di_config_is_index_source(c, l)) {
        put_fp8(w, DI_KIND_INDEXER, "attn.indexer.wq_b", (int64_t)c->index_heads * c->index_dim, c->q_rank);
        put_bf16(w, DI_KIND_INDEXER, "attn.indexer.weights_proj.weight", c->index_heads, H);
    }
    if (di_config_is_index_k_source(c, l)) {
        put_bf16(w, DI_KIND_INDEXER, "attn.indexer.wk.weight", c->index_dim, D);
        put_bf16(w, DI_KIND_INDEXER, "attn.indexer.k_norm.weight", c->index_dim, 0);
    }
    int32_t e = di_config_engram_index(c, l);
    if (e >= 0) {
        put(w, DI_KIND_ENGRAM_TABLE, DI_F8_E4M3, "engram.embed.weight", c->engram_rows[e], c->engram_dim);
        put(w, DI_KIND_ENGRAM_TABLE, DI_F8_E8M0, "engram.embed.scale", c->engram_rows[e], c->engram_dim / 32);
        put_fp8(w, DI_KIND_ENGRAM, "engram.wkv", (M + 1) * H,
                (int64_t)(c->engram_ngram - 1) * c->engram_heads * c->engram_dim);
        put_bf16(w, DI_KIND_ENGRAM, "engram.q_weight", M, H);
        put_bf16(w, DI_KIND_ENGRAM, "engram.k_weight", M, H);
    }
}

static void put_vision(walk *w) {
    const di_config *c = w->c;
    const int64_t H = c->hidden, Hv = c->vision.hidden, Iv = c->vision.intermediate;
    const int64_t P = c->vision.patch, cells = (int64_t)c->vision.downsample * c->vision.downsample;
    snprintf(w->prefix, sizeof w->prefix, "vision.");
    put_bf16(w, DI_KIND_VISION, "patch_embed.proj.weight", Hv, 3 * P * P);
    put_bf16(w, DI_KIND_VISION, "patch_embed.proj.bias", Hv, 0);
    for (int32_t i = 0; i < c->vision.n_layers; i++) {
        snprintf(w->prefix, sizeof w->prefix, "vision.blocks.%d.", (int)i);
        put_bf16(w, DI_KIND_VISION, "norm1.weight", Hv, 0);
        put_bf16(w, DI_KIND_VISION, "norm2.weight", Hv, 0);
        put_bf16(w, DI_KIND_VISION, "attn.wqkv.weight", 3 * Hv, Hv);
        put_bf16(w, DI_KIND_VISION, "attn.wqkv.bias", 3 * Hv, 0);
        put_bf16(w, DI_KIND_VISION, "attn.wo.weight", Hv, Hv);
        put_bf16(w, DI_KIND_VISION, "attn.wo.bias", Hv, 0);
        put_bf16(w, DI_KIND_VISION, "mlp.w1.weight", 2 * Iv, Hv);
        put_bf16(w, DI_KIND_VISION, "mlp.w2.weight", Hv, Iv);
    }
    snprintf(w->prefix, sizeof w->prefix, "vision.");
    put_bf16(w, DI_KIND_VISION, "norm.weight", Hv, 0);
    snprintf(w->prefix, sizeof w->prefix, "aligner.");
    put_bf16(w, DI_KIND_VISION, "w1.weight", H, cells * Hv);
    put_bf16(w, DI_KIND_VISION, "w1.bias", H, 0);
    put_bf16(w, DI_KIND_VISION, "w2.weight", H, H);
    put_bf16(w, DI_KIND_VISION, "w2.bias", H, 0);
}

static void put_draft(walk *w) {
    const di_config *c = w->c;
    const int64_t H = c->hidden;
    w->is_draft = true;
    for (int32_t i = 0; i < c->n_draft_layers; i++) {
        snprintf(w->prefix, sizeof w->prefix, "mtp.%d.", (int)i);
        put_block(w, c->draft_experts);
        if (i == 0) {
            put_fp8(w, DI_KIND_DRAFT, "main_proj", H, c->n_draft_targets * H);
            put_bf16(w, DI_KIND_DRAFT, "main_norm.weight", H, 0);
        }
        if (i == c->n_draft_layers - 1) {
            put_bf16(w, DI_KIND_DRAFT, "norm.weight", H, 0);
            put_bf16(w, DI_KIND_DRAFT, "markov_head.embed.weight", c->vocab, c->draft_rank);
            put_bf16(w, DI_KIND_DRAFT, "markov_head.head.weight", c->vocab, c->draft_rank);
            put_bf16(w, DI_KIND_DRAFT, "confidence_head.proj.weight", 1, H + c->draft_rank);
        }
    }
    w->is_draft = false;
}

di_status di_tensors_each(const di_config *config, di_tensor_spec_fn fn, void *user) {
    walk w = {.c = config, .fn = fn, .user = user};
    put_bf16(&w, DI_KIND_EMBED, "embed.weight", config->vocab, config->hidden);
    for (int32_t l = 0; l < config->n_layers; l++) {
        snprintf(w.prefix, sizeof w.prefix, "layers.%d.", (int)l);
        put_block(&w, config->n_experts);
        put_roles(&w, l);
    }
    w.prefix[0] = 0;
    put_bf16(&w, DI_KIND_OTHER, "norm.weight", config->hidden, 0);
    put_bf16(&w, DI_KIND_EMBED, "head.weight", config->vocab, config->hidden);
    put_draft(&w);
    w.prefix[0] = 0;
    if (config->has_vision) {
        put_bf16(&w, DI_KIND_OTHER, "image_start", config->hidden, 0);
        put_bf16(&w, DI_KIND_OTHER, "image_end", config->hidden, 0);
        put_bf16(&w, DI_KIND_OTHER, "image_newline", config->hidden, 0);
        put_vision(&w);
    }
    return w.st;
}

const char *di_tensor_kind_name(di_tensor_kind kind) {
    static const char *const names[DI_KIND_COUNT] = {
        [DI_KIND_EMBED] = "embedding and head",
        [DI_KIND_ATTENTION] = "attention",
        [DI_KIND_INDEXER] = "indexer",
        [DI_KIND_EXPERT] = "routed experts",
        [DI_KIND_SHARED] = "shared experts",
        [DI_KIND_ROUTER] = "router",
        [DI_KIND_HC] = "hyper-connections",
        [DI_KIND_ENGRAM_TABLE] = "engram tables",
        [DI_KIND_ENGRAM] = "engram projections",
        [DI_KIND_DRAFT] = "draft module",
        [DI_KIND_VISION] = "vision",
        [DI_KIND_OTHER] = "other",
    };
    return (unsigned)kind < DI_KIND_COUNT ? names[kind] : "?";
}
