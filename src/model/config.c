/* config.json into a checked di_config, and the constants that follow from it alone.
 *
 * Every key of model.md section 1 is read once, with its type and range; what the engine takes for granted (one KV
 * head, sqrt-softplus routing, ...) must be stated so. Then the relations between keys are checked, so that nothing
 * behind this file meets an impossible model. Unknown keys are ignored. Also here: RoPE frequencies, Engram
 * multipliers and primes. */
#include "model.h"

#include <inttypes.h>
#include <math.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)
#define DIM_MAX (1 << 20) /* of a hidden or intermediate size */
#define EXPERTS_MAX 4096
#define HEADS_MAX 4096
#define HEAD_DIM_MAX 8192
#define ENGRAM_VOCAB_MAX ((int64_t)1 << 36)

/* ---- reading keys ------------------------------------------------------------------------------------------------ */

/* One object of the file and the first fault met in it. After a fault, reads do nothing, so that a list of keys
 * reads as a list. */
typedef struct reader {
    const di_json *object;
    const char *prefix; /* "text_config." */
    di_error *err;
    di_status st;
} reader;

static void describe(const di_json *v, char out[static 96]) {
    di_strbuf sb = {0};
    if (di_json_kind(v) == DI_JSON_OBJECT) {
        di_strbuf_puts(&sb, "an object");
    } else {
        di_json_write(&sb, v, DI_JSON_COMPACT);
    }
    const char *s = di_strbuf_str(&sb);
    size_t n = strlen(s);
    if (n > 64) { /* cut between characters */
        for (n = 60; n > 0 && ((unsigned char)s[n] & 0xC0) == 0x80; n--) {
        }
        snprintf(out, 96, "%.*s...", (int)n, s);
    } else {
        snprintf(out, 96, "%s", s);
    }
    di_strbuf_deinit(&sb);
}

/* The value of a key, NULL when absent or null; a missing key that is required is the reader's fault. */
static const di_json *look(reader *r, const char *key, bool required, const char *expected) {
    if (r->st)
        return NULL;
    const di_json *v = di_json_get(r->object, key);
    if (v && di_json_kind(v) != DI_JSON_NULL)
        return v;
    if (required) {
        r->st = di_fail(r->err, DI_ERR_FORMAT, "key '%s%s' is %s, expected %s", r->prefix, key, v ? "null" : "missing",
                        expected);
    }
    return NULL;
}

static void wrong(reader *r, di_status code, const char *key, const di_json *v, const char *expected) {
    char found[96];
    describe(v, found);
    r->st = di_fail(r->err, code, "key '%s%s': found %s, expected %s", r->prefix, key, found, expected);
}

static int64_t read_int(reader *r, const char *key, int64_t min, int64_t max, bool required, int64_t absent) {
    char expected[96];
    snprintf(expected, sizeof expected, "an integer from %" PRId64 " to %" PRId64, min, max);
    const di_json *v = look(r, key, required, expected);
    if (!v)
        return absent;
    if (!di_json_is(v, DI_JSON_INT) || di_json_int(v) < min || di_json_int(v) > max) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
        return absent;
    }
    return di_json_int(v);
}

static int32_t need_int(reader *r, const char *key, int64_t min, int64_t max) {
    return (int32_t)read_int(r, key, min, max, true, min);
}

/* A dimension that products or quantisers cut into groups. */
static int32_t need_dim(reader *r, const char *key, int64_t multiple, int64_t max) {
    char expected[96];
    snprintf(expected, sizeof expected, "a multiple of %" PRId64 " from %" PRId64 " to %" PRId64, multiple, multiple,
             max);
    const di_json *v = look(r, key, true, expected);
    if (!v)
        return (int32_t)multiple;
    int64_t n = di_json_int(v);
    if (!di_json_is(v, DI_JSON_INT) || n < multiple || n > max || n % multiple) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
        return (int32_t)multiple;
    }
    return (int32_t)n;
}

/* min exclusive or inclusive as told. */
static double read_number(reader *r, const char *key, double min, bool inclusive, double max, bool required,
                          double absent) {
    char expected[96];
    snprintf(expected, sizeof expected, "a number %s %g and not above %g", inclusive ? "not below" : "above", min, max);
    const di_json *v = look(r, key, required, expected);
    if (!v)
        return absent;
    di_json_type kind = di_json_kind(v);
    bool is_number = kind == DI_JSON_INT || kind == DI_JSON_UINT || kind == DI_JSON_REAL;
    double x = di_json_number(v);
    if (!is_number || !(inclusive ? x >= min : x > min) || !(x <= max)) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
        return absent;
    }
    return x;
}

static void must_be_text(reader *r, const char *key, const char *want, bool required) {
    char expected[96];
    snprintf(expected, sizeof expected, "\"%s\"", want);
    const di_json *v = look(r, key, required, expected);
    if (!v)
        return;
    size_t len = 0;
    const char *s = di_json_str(v, &len);
    if (!s) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
    } else if (len != strlen(want) || memcmp(s, want, len) != 0) {
        wrong(r, DI_ERR_UNSUPPORTED, key, v, expected);
    }
}

static void must_be_bool(reader *r, const char *key, bool want, bool required) {
    const char *expected = want ? "true" : "false";
    const di_json *v = look(r, key, required, expected);
    if (!v)
        return;
    if (!di_json_is(v, DI_JSON_BOOL)) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
    } else if (di_json_bool(v) != want) {
        wrong(r, DI_ERR_UNSUPPORTED, key, v, expected);
    }
}

static void must_be_int(reader *r, const char *key, int64_t want, bool required) {
    char expected[96];
    snprintf(expected, sizeof expected, "%" PRId64, want);
    const di_json *v = look(r, key, required, expected);
    if (!v)
        return;
    if (!di_json_is(v, DI_JSON_INT)) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
    } else if (di_json_int(v) != want) {
        wrong(r, DI_ERR_UNSUPPORTED, key, v, expected);
    }
}

/* A key of a feature that this architecture lacks: absent, null, 0 or 1 (one group of all experts). */
static void must_be_off(reader *r, const char *key, int64_t also) {
    const di_json *v = look(r, key, false, "");
    if (v && !(di_json_is(v, DI_JSON_INT) && (di_json_int(v) == 0 || di_json_int(v) == also))) {
        wrong(r, DI_ERR_UNSUPPORTED, key, v, "it absent or 0");
    }
}

static int32_t read_list(reader *r, const char *key, int32_t *out, int32_t len_max, int64_t min, int64_t max) {
    char expected[96];
    snprintf(expected, sizeof expected, "a list of at most %" PRId32 " integers from %" PRId64 " to %" PRId64, len_max,
             min, max);
    const di_json *v = look(r, key, true, expected);
    if (!v)
        return 0;
    size_t n = di_json_array_len(v);
    bool good = di_json_is(v, DI_JSON_ARRAY) && n <= (size_t)len_max;
    for (size_t i = 0; good && i < n; i++) {
        const di_json *e = di_json_at(v, i);
        good = di_json_is(e, DI_JSON_INT) && di_json_int(e) >= min && di_json_int(e) <= max;
        if (good)
            out[i] = (int32_t)di_json_int(e);
    }
    if (!good) {
        wrong(r, DI_ERR_FORMAT, key, v, expected);
        return 0;
    }
    return (int32_t)n;
}

/* A list of layers in rising order. */
static int32_t read_layers(reader *r, const char *key, int32_t *out, int32_t n_layers) {
    int32_t n = read_list(r, key, out, DI_SOURCES_MAX, 0, n_layers - 1);
    for (int32_t i = 1; i < n; i++) {
        if (out[i] <= out[i - 1]) {
            wrong(r, DI_ERR_FORMAT, key, di_json_get(r->object, key), "layers in rising order");
            return 0;
        }
    }
    return n;
}

static reader sub_reader(reader *parent, const char *key, const char *prefix, bool required) {
    reader r = {.prefix = prefix, .err = parent->err, .st = parent->st};
    const di_json *v = look(parent, key, required, "an object");
    if (v && !di_json_is(v, DI_JSON_OBJECT))
        wrong(parent, DI_ERR_FORMAT, key, v, "an object");
    r.object = v;
    r.st = parent->st;
    return r;
}

/* ---- the file's parts -------------------------------------------------------------------------------------------- */

static void read_top(di_config *c, reader *r) {
    const di_json *a = look(r, "architectures", true, "[\"DeepseekV41ForCausalLM\"]");
    if (a) {
        const char *name = di_json_str(di_json_at(a, 0), NULL);
        if (di_json_array_len(a) != 1 || !name) {
            wrong(r, DI_ERR_FORMAT, "architectures", a, "[\"DeepseekV41ForCausalLM\"]");
        } else if (strcmp(name, "DeepseekV41ForCausalLM") != 0) {
            wrong(r, DI_ERR_UNSUPPORTED, "architectures", a, "[\"DeepseekV41ForCausalLM\"]");
        }
    }
    must_be_text(r, "model_type", "deepseek_v41", true);
    must_be_text(r, "dtype", "bfloat16", true);
    c->bos_id = need_int(r, "bos_token_id", 0, INT32_MAX - 16);
    c->eos_id = need_int(r, "eos_token_id", 0, INT32_MAX - 16);
    c->pad_id = need_int(r, "pad_token_id", 0, INT32_MAX - 16);
    c->image_id = (int32_t)read_int(r, "image_token_id", 0, INT32_MAX - 16, false, -1);

    const di_json *t = look(r, "tokenizer_compatibility", false, "");
    if (t) {
        const char *s = di_json_str(t, NULL);
        if (!s || (strcmp(s, "release") != 0 && strcmp(s, "native") != 0)) {
            wrong(r, DI_ERR_UNSUPPORTED, "tokenizer_compatibility", t, "\"release\" or \"native\"");
        }
    }
    const di_json *seed = look(r, "dummy_seed", false, "");
    if (seed) {
        bool good = (di_json_is(seed, DI_JSON_INT) && di_json_int(seed) >= 0) || di_json_is(seed, DI_JSON_UINT);
        if (!good)
            wrong(r, DI_ERR_FORMAT, "dummy_seed", seed, "an unsigned 64-bit integer");
        c->dummy_seed = di_json_uint(seed);
    }

    reader q = sub_reader(r, "quantization_config", "quantization_config.", true);
    must_be_text(&q, "quant_method", "fp8", true);
    must_be_text(&q, "activation_scheme", "dynamic", true);
    must_be_text(&q, "scale_fmt", "ue8m0", true);
    must_be_text(&q, "expert_dtype", "fp4", true);
    int32_t block[2] = {0};
    if (read_list(&q, "weight_block_size", block, 2, 1, INT32_MAX) != 2 || block[0] != 32 || block[1] != 32) {
        if (!q.st) {
            wrong(&q, DI_ERR_UNSUPPORTED, "weight_block_size", di_json_get(q.object, "weight_block_size"), "[32,32]");
        }
    }
    r->st = q.st;
}

static void read_rope(di_config *c, reader *r) {
    c->rope_theta = read_number(r, "rope_theta", 1.0, false, 1e12, true, 0);
    c->compress_rope_theta = read_number(r, "compress_rope_theta", 1.0, false, 1e12, true, 0);
    if (r->st)
        return;
    const di_json *scaling = di_json_get(r->object, "rope_scaling");
    if (scaling && di_json_kind(scaling) == DI_JSON_NULL)
        return; /* said so: no YaRN */
    reader y = sub_reader(r, "rope_scaling", "text_config.rope_scaling.", true);
    const char *type_key = di_json_get(y.object, "rope_type") ? "rope_type" : "type";
    if (!y.st && !di_json_get(y.object, type_key))
        type_key = "rope_type";
    must_be_text(&y, type_key, "yarn", true);
    c->yarn_factor = read_number(&y, "factor", 0.0, false, 1e6, true, 0);
    c->yarn_beta_fast = read_number(&y, "beta_fast", 0.0, false, 1e6, true, 0);
    c->yarn_beta_slow = read_number(&y, "beta_slow", 0.0, false, 1e6, true, 0);
    c->yarn_original = read_int(&y, "original_max_position_embeddings", 1, INT32_MAX, true, 0);
    c->has_yarn = true;
    r->st = y.st;
}

static void read_engram(di_config *c, reader *r) {
    c->n_engram = read_layers(r, "engram_layer_ids", c->engram_layers, c->n_layers);
    if (r->st || c->n_engram == 0)
        return;
    c->engram_ngram = need_int(r, "engram_max_ngram_size", 2, DI_ENGRAM_NGRAM_MAX);
    c->engram_vocab = read_int(r, "engram_vocab_size", 2, ENGRAM_VOCAB_MAX, true, 0);
    c->engram_heads = need_int(r, "engram_n_heads", 1, DI_ENGRAM_COLUMNS_MAX / (DI_ENGRAM_NGRAM_MAX - 1));
    c->engram_dim = need_dim(r, "engram_head_dim", 32, 4096);
    c->engram_pad = need_int(r, "engram_pad_token_id", 0, c->vocab - 1);
    c->engram_classes = read_int(r, "engram_compressed_vocab_size", 1, (int64_t)1 << 29, true, 0);
    /* Row counts don't fit the 32 bits of the other lists. */
    const char *expected = "one positive integer per layer of engram_layer_ids";
    const di_json *rows = look(r, "engram_num_embeddings", true, expected);
    if (!rows)
        return;
    bool good = di_json_array_len(rows) == (size_t)c->n_engram;
    for (int32_t i = 0; good && i < c->n_engram; i++) {
        c->engram_rows[i] = di_json_int(di_json_at(rows, (size_t)i));
        good = c->engram_rows[i] > 0;
    }
    if (!good)
        wrong(r, DI_ERR_FORMAT, "engram_num_embeddings", rows, expected);
}

static void read_draft(di_config *c, reader *r) {
    if (r->st || c->n_draft_layers == 0)
        return;
    c->draft_block = need_int(r, "dspark_block_size", 1, 64);
    c->draft_noise_id = need_int(r, "dspark_noise_token_id", 0, c->vocab - 1);
    c->n_draft_targets = read_layers(r, "dspark_target_layer_ids", c->draft_targets, c->n_layers);
    must_be_bool(r, "dspark_target_attn_input", true, false);
    c->draft_rank = need_dim(r, "dspark_markov_rank", 32, DIM_MAX);
    c->draft_experts = need_int(r, "dspark_n_routed_experts", 1, EXPERTS_MAX);
    c->draft_experts_tok = need_int(r, "dspark_num_experts_per_tok", 1, DI_MIN(c->draft_experts, DI_EXPERTS_TOK_MAX));
    if (!r->st && c->n_draft_targets == 0) {
        r->st = di_fail(r->err, DI_ERR_FORMAT, "key 'text_config.dspark_target_layer_ids': found [], expected a layer");
    }
}

static void read_text(di_config *c, reader *r) {
    must_be_text(r, "model_type", "deepseek_v41_text", false);
    c->vocab = need_int(r, "vocab_size", 1, INT32_MAX - 16);
    c->hidden = need_dim(r, "hidden_size", 32, DIM_MAX);
    c->n_layers = need_int(r, "num_hidden_layers", 1, DI_LAYERS_MAX);
    c->n_heads = need_int(r, "num_attention_heads", 1, HEADS_MAX);
    must_be_int(r, "num_key_value_heads", 1, true);
    c->head_dim = need_dim(r, "head_dim", 32, HEAD_DIM_MAX);
    c->rope_dim = need_dim(r, "qk_rope_head_dim", 2, c->head_dim);
    c->q_rank = need_dim(r, "q_lora_rank", 32, DIM_MAX);
    c->o_rank = need_dim(r, "o_lora_rank", 32, DIM_MAX);
    c->o_groups = need_int(r, "o_groups", 1, c->n_heads);
    must_be_text(r, "hidden_act", "silu", true);
    c->swiglu_limit = (float)read_number(r, "swiglu_limit", 0.0, true, 1e30, false, 0.0);
    c->rms_eps = (float)read_number(r, "rms_norm_eps", 0.0, false, 1.0, true, 0);
    must_be_bool(r, "attention_bias", false, true);
    const di_json *dropout = look(r, "attention_dropout", true, "0");
    if (dropout && (di_json_number(dropout) != 0.0 || di_json_kind(dropout) == DI_JSON_BOOL)) {
        wrong(r, DI_ERR_UNSUPPORTED, "attention_dropout", dropout, "0");
    }
    must_be_bool(r, "tie_word_embeddings", false, true);
    c->position_max = read_int(r, "max_position_embeddings", 1, INT32_MAX, true, 0);
    read_rope(c, r);

    c->n_experts = need_int(r, "n_routed_experts", 1, EXPERTS_MAX);
    must_be_int(r, "n_shared_experts", 1, true);
    c->n_experts_tok = need_int(r, "num_experts_per_tok", 1, DI_MIN(c->n_experts, DI_EXPERTS_TOK_MAX));
    c->intermediate = need_dim(r, "moe_intermediate_size", 32, DIM_MAX);
    must_be_text(r, "scoring_func", "sqrtsoftplus", true);
    must_be_text(r, "topk_method", "noaux_tc", true);
    must_be_bool(r, "norm_topk_prob", true, true);
    c->routed_scale = (float)read_number(r, "routed_scaling_factor", 0.0, false, 1e6, true, 0);
    must_be_off(r, "num_hash_layers", 0);
    must_be_off(r, "n_group", 1);
    must_be_off(r, "topk_group", 1);

    c->window = need_int(r, "sliding_window", 1, 1 << 20);
    c->n_draft_layers = need_int(r, "num_nextn_predict_layers", 0, DI_LAYERS_MAX - c->n_layers);
    int32_t n_ratios = read_list(r, "compress_ratios", c->ratio, DI_LAYERS_MAX, 0, 2);
    if (!r->st && n_ratios != c->n_layers + c->n_draft_layers) {
        r->st = di_fail(r->err, DI_ERR_FORMAT,
                        "key 'text_config.compress_ratios': found %d entries, expected %d: one per layer of "
                        "num_hidden_layers and num_nextn_predict_layers",
                        (int)n_ratios, (int)(c->n_layers + c->n_draft_layers));
    }
    c->n_kv_sources = read_layers(r, "kv_source_layer_ids", c->kv_sources, c->n_layers);
    c->n_index_sources = read_layers(r, "index_source_layer_ids", c->index_sources, c->n_layers);
    if (look(r, "index_k_source_layer_ids", false, "")) {
        c->n_index_k_sources = read_layers(r, "index_k_source_layer_ids", c->index_k_sources, c->n_layers);
    } else {
        c->n_index_k_sources = c->n_kv_sources;
        memcpy(c->index_k_sources, c->kv_sources, sizeof c->kv_sources);
    }
    c->index_heads = need_int(r, "index_n_heads", 1, HEADS_MAX);
    c->index_dim = need_dim(r, "index_head_dim", 32, HEAD_DIM_MAX);
    c->index_topk = need_int(r, "index_topk", 1, 1 << 20);
    c->candidate_layer = (int32_t)read_int(r, "candidate_source_layer_id", 0, c->n_layers - 1, false, -1);
    if (c->candidate_layer >= 0) {
        c->candidate_blocks = need_dim(r, "candidate_topk_blocks", 8, 4096);
        c->candidate_block = need_dim(r, "candidate_block_size", 8, 16);
    }
    const di_json *fp4 = look(r, "use_fp4_sparse_kv", false, "");
    if (fp4 && !di_json_is(fp4, DI_JSON_BOOL))
        wrong(r, DI_ERR_FORMAT, "use_fp4_sparse_kv", fp4, "true or false");
    c->fp4_kv = fp4 ? di_json_bool(fp4) : true;

    c->hc_mult = need_int(r, "hc_mult", 1, DI_HC_MULT_MAX);
    c->hc_iters = need_int(r, "hc_sinkhorn_iters", 1, 1000);
    c->hc_eps = (float)read_number(r, "hc_eps", 0.0, true, 1.0, true, 0);
    must_be_bool(r, "hc_shifted", true, false);
    read_engram(c, r);
    read_draft(c, r);
}

static void read_vision(di_config *c, reader *r) {
    must_be_text(r, "model_type", "deepseek_v41_vision", false);
    c->vision.n_layers = need_int(r, "num_hidden_layers", 1, 1024);
    c->vision.hidden = need_dim(r, "hidden_size", 4, DIM_MAX);
    c->vision.n_heads = need_int(r, "num_attention_heads", 1, c->vision.hidden);
    c->vision.intermediate = need_int(r, "intermediate_size", 1, DIM_MAX);
    c->vision.patch = need_int(r, "patch_size", 1, 1024);
    c->vision.rope_theta = read_number(r, "rope_theta", 1.0, false, 1e12, true, 0);
    c->vision.downsample = need_int(r, "downsample_ratio", 1, 64);
    c->vision.max_image_tokens = need_int(r, "max_image_tokens", 4, 1 << 24);
    c->vision.min_pixels = read_int(r, "min_pixels", 1, INT32_MAX, true, 0);
    c->vision.max_wh_ratio = read_number(r, "max_wh_ratio", 0.0, false, 1e9, false, 0.0);
    if (!r->st && (c->vision.hidden % c->vision.n_heads || c->vision.hidden / c->vision.n_heads % 4)) {
        r->st = di_fail(
            r->err, DI_ERR_FORMAT,
            "key 'vision_config.num_attention_heads': found %d, expected a divisor of hidden_size %d with heads "
            "of a multiple of 4",
            (int)c->vision.n_heads, (int)c->vision.hidden);
    }
    c->has_vision = true;
}

/* ---- relations between keys (1.4) -------------------------------------------------------------------------------- */

static bool has_layer(const int32_t *list, int32_t n, int32_t l) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == l)
            return true;
    }
    return false;
}

/* The largest source not above l, -1 when there is none. */
static int32_t nearest(const int32_t *sources, int32_t n, int32_t l) {
    int32_t best = -1;
    for (int32_t i = 0; i < n && sources[i] <= l; i++)
        best = sources[i];
    return best;
}

static di_status check_sources(const di_config *c, const char *key, const int32_t *list, int32_t n, di_error *err) {
    for (int32_t i = 0; i < n; i++) {
        if (c->ratio[list[i]] == 0) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.%s': layer %d has compress ratio 0, a source needs 1 or 2", key,
                           (int)list[i]);
        }
    }
    return DI_OK;
}

static di_status derive_layers(di_config *c, di_error *err) {
    di_status st = DI_OK;
    int32_t n_all = c->n_layers + c->n_draft_layers;
    for (int32_t l = 0; l < n_all; l++)
        c->kv_source[l] = c->index_source[l] = c->index_k_source[l] = -1;
    for (int32_t l = c->n_layers; l < n_all; l++) {
        if (c->ratio[l]) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.compress_ratios': entry %d is %d, expected 0 for a draft layer", (int)l,
                           (int)c->ratio[l]);
        }
    }
    if ((st = check_sources(c, "kv_source_layer_ids", c->kv_sources, c->n_kv_sources, err)))
        return st;
    if ((st = check_sources(c, "index_source_layer_ids", c->index_sources, c->n_index_sources, err)))
        return st;
    if ((st = check_sources(c, "index_k_source_layer_ids", c->index_k_sources, c->n_index_k_sources, err)))
        return st;
    for (int32_t i = 0; i < c->n_kv_sources; i++) {
        int32_t l = c->kv_sources[i];
        if (!has_layer(c->index_k_sources, c->n_index_k_sources, l) ||
            !has_layer(c->index_sources, c->n_index_sources, l)) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.kv_source_layer_ids': layer %d is not in index_source_layer_ids and "
                           "index_k_source_layer_ids, expected every kv source to own an indexer and its keys",
                           (int)l);
        }
    }
    for (int32_t i = 0; i < c->n_index_k_sources; i++) {
        /* Index keys are made from the layer's own compressed entry. */
        if (!has_layer(c->kv_sources, c->n_kv_sources, c->index_k_sources[i])) {
            return di_fail(
                err, DI_ERR_UNSUPPORTED,
                "key 'text_config.index_k_source_layer_ids': layer %d has no compressor (kv_source_layer_ids)",
                (int)c->index_k_sources[i]);
        }
    }
    c->first_consumer = c->n_layers;
    for (int32_t l = c->n_layers - 1; l >= 0; l--) {
        if (c->ratio[l] == 1)
            c->first_consumer = l;
    }
    for (int32_t l = 0; l < c->n_layers; l++) {
        if (!c->ratio[l])
            continue;
        int32_t kv = nearest(c->kv_sources, c->n_kv_sources, l);
        int32_t ix = nearest(c->index_sources, c->n_index_sources, l);
        if (kv < 0 || ix < 0) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.%s': no source at or below layer %d, whose compress ratio is %d",
                           kv < 0 ? "kv_source_layer_ids" : "index_source_layer_ids", (int)l, (int)c->ratio[l]);
        }
        if (c->ratio[kv] != c->ratio[l] || c->ratio[ix] != c->ratio[l]) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.compress_ratios': layer %d has ratio %d, its source layer %d has %d, "
                           "expected the same",
                           (int)l, (int)c->ratio[l], (int)(c->ratio[kv] != c->ratio[l] ? kv : ix),
                           (int)c->ratio[c->ratio[kv] != c->ratio[l] ? kv : ix]);
        }
        c->kv_source[l] = kv;
        c->index_source[l] = ix;
        c->index_k_source[l] = nearest(c->index_k_sources, c->n_index_k_sources, l);
    }
    if (c->first_consumer < c->n_layers && c->kv_source[c->first_consumer] != c->first_consumer) {
        return di_fail(
            err, DI_ERR_FORMAT,
            "key 'text_config.kv_source_layer_ids': layer %d, the first with ratio 1, is missing, expected it to be a "
            "source",
            (int)c->first_consumer);
    }
    return DI_OK;
}

static di_status check_relations(const di_config *c, di_error *err) {
    if (c->n_heads % c->o_groups) {
        return di_fail(err, DI_ERR_FORMAT,
                       "key 'text_config.o_groups': found %d, expected a divisor of num_attention_heads %d",
                       (int)c->o_groups, (int)c->n_heads);
    }
    if (c->n_index_sources && c->rope_dim > c->index_dim) {
        return di_fail(err, DI_ERR_FORMAT,
                       "key 'text_config.index_head_dim': found %d, expected at least qk_rope_head_dim %d",
                       (int)c->index_dim, (int)c->rope_dim);
    }
    const struct {
        const char *key;
        int32_t id;
    } ids[] = {{"bos_token_id", c->bos_id},
               {"eos_token_id", c->eos_id},
               {"pad_token_id", c->pad_id},
               {"image_token_id", c->image_id}};
    for (size_t i = 0; i < DI_COUNT(ids); i++) {
        if (ids[i].id >= c->vocab) {
            return di_fail(err, DI_ERR_FORMAT, "key '%s': found %d, expected below vocab_size %d", ids[i].key,
                           (int)ids[i].id, (int)c->vocab);
        }
    }
    int32_t cand = c->candidate_layer;
    if (cand >= 0) {
        if (!di_config_is_index_source(c, cand)) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.candidate_source_layer_id': layer %d is not in index_source_layer_ids",
                           (int)cand);
        }
        for (int32_t l = cand + 1; l < c->n_layers; l++) {
            if (c->ratio[l] && c->ratio[l] != c->ratio[cand]) {
                return di_fail(
                    err, DI_ERR_FORMAT,
                    "key 'text_config.compress_ratios': layer %d has ratio %d, expected %d as the candidate source "
                    "layer %d",
                    (int)l, (int)c->ratio[l], (int)c->ratio[cand], (int)cand);
            }
        }
        if ((int64_t)c->candidate_blocks * c->candidate_block < c->index_topk) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.candidate_topk_blocks': %d blocks of %d entries, expected at least "
                           "index_topk %d entries",
                           (int)c->candidate_blocks, (int)c->candidate_block, (int)c->index_topk);
        }
    }
    for (int32_t i = 1; i < c->n_draft_targets; i++) {
        if ((c->draft_targets[i] >= c->first_consumer) != (c->draft_targets[0] >= c->first_consumer)) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.dspark_target_layer_ids': layers %d and %d, expected all below layer %d "
                           "(the first with "
                           "ratio 1) or none",
                           (int)c->draft_targets[0], (int)c->draft_targets[i], (int)c->first_consumer);
        }
    }
    return DI_OK;
}

/* ---- entry points ------------------------------------------------------------------------------------------------ */

di_status di_config_parse(di_config *out, const char *text, size_t len, di_error *err) {
    di_json *json = NULL;
    di_status st = di_json_parse(&json, text, len, err);
    if (st)
        return st;
    di_config c = {.image_id = -1, .candidate_layer = -1};
    reader top = {.object = json, .prefix = "", .err = err};
    if (!di_json_is(json, DI_JSON_OBJECT)) {
        top.st = di_fail(err, DI_ERR_FORMAT, "found %s at the top, expected an object", di_json_kind_name(json));
    }
    read_top(&c, &top);
    reader t = sub_reader(&top, "text_config", "text_config.", true);
    read_text(&c, &t);
    top.st = t.st;
    reader v = sub_reader(&top, "vision_config", "vision_config.", false);
    if (!v.st && !v.object != (c.image_id < 0)) {
        v.st = di_fail(err, DI_ERR_FORMAT, "key '%s' is missing, expected it beside '%s' (or both absent: text only)",
                       v.object ? "image_token_id" : "vision_config", v.object ? "vision_config" : "image_token_id");
    }
    if (v.object)
        read_vision(&c, &v);
    di_json_free(json);
    if ((st = v.st))
        return st;
    if ((st = derive_layers(&c, err)))
        return st;
    if ((st = check_relations(&c, err)))
        return st;
    if (c.n_engram) {
        int64_t mult[DI_ENGRAM_NGRAM_MAX], primes[DI_ENGRAM_COLUMNS_MAX], offsets[DI_ENGRAM_COLUMNS_MAX];
        if ((st = di_config_engram(&c, c.n_engram - 1, mult, primes, offsets, err)))
            return st;
    }
    *out = c;
    return DI_OK;
}

di_status di_config_load(di_config *out, const char *dir, di_error *err) {
    if (!di_path_is_dir(dir))
        return di_fail(err, DI_ERR_NOT_FOUND, "no model folder '%s'", dir);
    di_strbuf path = {0}, text = {0};
    di_path_join(&path, dir, "config.json");
    di_status st = di_strbuf_status(&path, err);
    if (!st)
        st = di_file_read(di_strbuf_str(&path), CONFIG_BYTES_MAX, &text, err);
    if (!st) {
        st = di_config_parse(out, di_strbuf_str(&text), text.len, err);
        di_error_context(err, st, "'%s'", di_strbuf_str(&path));
    }
    di_strbuf_deinit(&path);
    di_strbuf_deinit(&text);
    return st;
}

int32_t di_config_engram_index(const di_config *c, int32_t l) {
    for (int32_t e = 0; e < c->n_engram; e++) {
        if (c->engram_layers[e] == l)
            return e;
    }
    return -1;
}

int64_t di_config_replay_exact(const di_config *c) {
    return (int64_t)(c->n_layers - c->first_consumer) * (c->window - 1) + 1;
}

/* The window record that layer l makes of position p is a function of the trunk that enters the layer at p. That trunk
 * is exact in every rebuilt row at layer 0 (embeddings and n-grams come from the tokens), and each layer below l passes
 * on what its window lacked: the record is exact from l*(W-1) rows behind the start on. The first row that continues
 * reads back to W-1 positions before the border, and with layers 0 .. n-1 that makes n*(W-1) rows. The compressed
 * entries that rebuilt rows choose from are in the pages.
 * Draft keys are made of the trunk as it enters the last target layer t, so they are exact after (t+1)*(W-1) rows; with
 * replay and targets behind the cut they come with the kept rows and need nothing. */
int64_t di_config_window_span(const di_config *c, bool is_replay, bool with_draft) {
    int32_t n = is_replay ? c->first_consumer : c->n_layers;
    for (int32_t i = 0; with_draft && i < c->n_draft_targets; i++) {
        if (!is_replay || c->draft_targets[i] < c->first_consumer)
            n = DI_MAX(n, c->draft_targets[i] + 1);
    }
    return (int64_t)n * (c->window - 1);
}

/* ---- RoPE frequencies (3.4) -------------------------------------------------------------------------------------- */

void di_config_inv_freq(const di_config *c, bool compressed, float *inv_freq) {
    double theta = compressed ? c->compress_rope_theta : c->rope_theta;
    int32_t half = c->rope_dim / 2;
    bool yarn = compressed && c->has_yarn;
    double low = 0, high = 1;
    if (yarn) {
        const double two_pi = 6.283185307179586;
        double scale = c->rope_dim / (2 * log(theta)), original = (double)c->yarn_original;
        low = fmax(floor(scale * log(original / (c->yarn_beta_fast * two_pi))), 0);
        high = fmin(ceil(scale * log(original / (c->yarn_beta_slow * two_pi))), c->rope_dim - 1);
        if (low == high)
            high += 0.001;
    }
    for (int32_t j = 0; j < half; j++) {
        /* fp32 from here on, as the model was trained: theta^(2j/R) is rounded before its reciprocal. */
        float period = (float)pow(theta, (float)(2 * j) / (float)c->rope_dim);
        float plain = 1.0f / period;
        if (yarn) {
            float ramp = ((float)j - (float)low) / (float)(high - low);
            float keep = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
            float slow = 1.0f / ((float)c->yarn_factor * period);
            plain = slow * (1.0f - keep) + plain * keep;
        }
        inv_freq[j] = plain;
    }
}

/* ---- Engram constants (3.2.2, 3.2.3) ----------------------------------------------------------------------------- */

typedef unsigned __int128 u128;

/* Seed mixing: 32-bit words to a pool of 4 words to 8 words; then PCG64 XSL-RR. */
typedef struct pcg64 {
    u128 state, inc;
} pcg64;

static uint32_t seed_hash(uint32_t v, uint32_t *h) {
    v ^= *h;
    *h *= 0x931e8875u;
    v *= *h;
    return v ^ v >> 16;
}

static void pcg64_step(pcg64 *g) {
    const u128 mult = (u128)0x2360ED051FC65DA4u << 64 | 0x4385DF649FCCF645u;
    g->state = g->state * mult + g->inc;
}

static void pcg64_seed(pcg64 *g, uint64_t seed) {
    const uint32_t words[4] = {(uint32_t)seed, (uint32_t)(seed >> 32), 0, 0};
    uint32_t pool[4], out[8], h = 0x43b0d7e5u;
    for (int i = 0; i < 4; i++)
        pool[i] = seed_hash(words[i], &h);
    for (int s = 0; s < 4; s++) {
        for (int d = 0; d < 4; d++) {
            if (s == d)
                continue;
            uint32_t t = 0xca01f9ddu * pool[d] - 0x4973f715u * seed_hash(pool[s], &h);
            pool[d] = t ^ t >> 16;
        }
    }
    h = 0x8b51f9ddu;
    for (int i = 0; i < 8; i++) {
        uint32_t v = pool[i % 4] ^ h;
        h *= 0x58f38dedu;
        v *= h;
        out[i] = v ^ v >> 16;
    }
    uint64_t u[4];
    for (int i = 0; i < 4; i++)
        u[i] = out[2 * i] | (uint64_t)out[2 * i + 1] << 32;
    g->inc = ((u128)u[2] << 64 | u[3]) << 1 | 1;
    g->state = 0;
    pcg64_step(g);
    g->state += (u128)u[0] << 64 | u[1];
    pcg64_step(g);
}

static uint64_t pcg64_next(pcg64 *g) {
    pcg64_step(g);
    uint64_t hi = (uint64_t)(g->state >> 64), x = hi ^ (uint64_t)g->state;
    unsigned rot = (unsigned)(hi >> 58);
    return x >> rot | x << (-rot & 63);
}

/* Uniform in [0, bound), bound above 2^32. */
static uint64_t pcg64_below(pcg64 *g, uint64_t bound) {
    uint64_t least = -bound % bound; /* 2^64 mod bound */
    u128 p;
    do {
        p = (u128)pcg64_next(g) * bound;
    } while ((uint64_t)p < least);
    return (uint64_t)(p >> 64);
}

static uint64_t pow_mod(uint64_t a, uint64_t e, uint64_t n) {
    uint64_t r = 1;
    for (a %= n; e; e >>= 1) {
        if (e & 1)
            r = (uint64_t)((u128)r * a % n);
        a = (uint64_t)((u128)a * a % n);
    }
    return r;
}

/* Miller-Rabin with bases that decide every 64-bit number. */
static bool is_prime(uint64_t n) {
    static const uint64_t bases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
    if (n < 2)
        return false;
    for (size_t i = 0; i < DI_COUNT(bases); i++) {
        if (n % bases[i] == 0)
            return n == bases[i];
    }
    uint64_t d = n - 1;
    int r = 0;
    for (; !(d & 1); d >>= 1)
        r++;
    for (size_t i = 0; i < DI_COUNT(bases); i++) {
        uint64_t x = pow_mod(bases[i], d, n);
        if (x == 1 || x == n - 1)
            continue;
        int k = 1;
        for (; k < r && x != n - 1; k++)
            x = (uint64_t)((u128)x * x % n);
        if (x != n - 1)
            return false;
    }
    return true;
}

di_status di_config_engram(const di_config *c, int32_t e, int64_t *mult, int64_t *primes, int64_t *offsets,
                           di_error *err) {
    uint64_t bound = (uint64_t)(INT64_MAX / c->engram_classes) / 2;
    pcg64 g;
    pcg64_seed(&g, (uint64_t)10007 * (uint64_t)c->engram_layers[e]);
    for (int32_t s = 0; s < c->engram_ngram; s++)
        mult[s] = (int64_t)(2 * pcg64_below(&g, bound) + 1);

    /* Every search starts at engram_vocab_size and skips what is used: together, the primes from there on in order. */
    int32_t n = (c->engram_ngram - 1) * c->engram_heads;
    int64_t prime = c->engram_vocab - 1;
    for (int32_t i = 0; i <= e; i++) {
        int64_t sum = 0;
        for (int32_t k = 0; k < n; k++) {
            do {
                prime++;
            } while (!is_prime((uint64_t)prime));
            primes[k] = prime;
            offsets[k] = sum;
            sum += prime;
        }
        if (sum != c->engram_rows[i]) {
            return di_fail(err, DI_ERR_FORMAT,
                           "key 'text_config.engram_num_embeddings': entry %d is %" PRId64 ", expected %" PRId64
                           ", the sum of the %d bucket primes of layer %d",
                           (int)i, c->engram_rows[i], sum, (int)n, (int)c->engram_layers[i]);
        }
    }
    return DI_OK;
}
