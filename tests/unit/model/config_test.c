/* config.json: the configurations that must load, every key missing or wrong, relations between keys, and the constants
 * that follow (roles, RoPE frequencies, Engram primes, multipliers and hashes). */
#include "harness.h"

#include <jansson.h>

#include "golden.h"
#include "model/model.h"

static di_config load(const char *name) {
    di_config c;
    di_error err;
    di_strbuf text = {0};
    di_test_ok(di_file_read(di_test_data(name), 1 << 20, &text, &err), &err);
    di_test_ok(di_config_parse(&c, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    return c;
}

/* ---- what must load ---------------------------------------------------------------------------------------------- */

static void released_config_has_its_roles(void **state) {
    (void)state;
    di_config c = load("model/released.json");
    assert_int_equal(c.hidden, 5120);
    assert_int_equal(c.n_layers + c.n_draft_layers, 43);
    assert_int_equal(c.image_id, 129264);
    assert_int_equal(c.first_consumer, 20);
    assert_true(c.rms_eps == 1e-20f && c.hc_eps == 1e-6f && c.swiglu_limit == 10.0f && c.routed_scale == 1.5f);
    assert_true(c.fp4_kv && c.has_yarn && c.has_vision);
    assert_int_equal(c.vision.min_pixels, 295936);
    assert_true(c.vision.max_wh_ratio == 0.0);
    assert_int_equal(c.dummy_seed, 0);
    for (int l = 0; l < 43; l++) {
        int kv = l < 2 || l >= 40 ? -1 : l < 8 ? 2 : l < 14 ? 8 : l < 20 ? 14 : 20;
        int ix = kv < 20 ? kv : l < 24 ? 20 : l / 4 * 4;
        assert_int_equal(c.kv_source[l], kv);
        assert_int_equal(c.index_k_source[l], kv);
        assert_int_equal(c.index_source[l], ix);
        assert_int_equal(di_config_is_kv_source(&c, l), kv == l);
        assert_int_equal(di_config_is_index_source(&c, l), ix == l);
        assert_int_equal(di_config_engram_index(&c, l), l == 1 ? 0 : l == 14 ? 1 : -1);
    }
    assert_int_equal(di_config_replay_exact(&c), 2541);
    assert_int_equal(di_config_window_span(&c, true, true), 20 * 127); /* model.md, oracle cross-check 4 */
    assert_int_equal(di_config_window_span(&c, true, false), 20 * 127);
    assert_int_equal(di_config_window_span(&c, false, true), 40 * 127);
}

static void coverage_config_loads(void **state) {
    (void)state;
    di_config c = load("model/coverage.json");
    assert_int_equal(c.first_consumer, 5);
    assert_int_equal(c.candidate_layer, 5);
    assert_int_equal(c.index_source[6], 5);
    assert_int_equal(c.index_source[7], 7);
    assert_int_equal(c.kv_source[3], 2);
    assert_int_equal(di_config_replay_exact(&c), 46);
}

static void shipped_and_real_shape_configs_load(void **state) {
    (void)state;
    di_config c;
    di_error err;
    di_test_ok(di_config_load(&c, di_test_source("models/tiny"), &err), &err);
    assert_int_equal(c.image_id, -1);
    assert_false(c.has_vision);
    assert_int_equal(di_config_replay_exact(&c), 253);
    assert_int_equal(di_config_window_span(&c, true, true), 252);
    assert_int_equal(di_config_window_span(&c, false, true), 8 * 63);
    di_test_ok(di_config_load(&c, di_test_data("real-shape"), &err), &err);
    assert_int_equal(c.dummy_seed, 1);
    assert_int_equal(c.first_consumer, 3);
}

static void missing_folder_or_file_is_named(void **state) {
    (void)state;
    di_config c;
    di_error err;
    assert_int_equal(di_config_load(&c, di_test_tmp("nowhere"), &err), DI_ERR_NOT_FOUND);
    assert_contains(err.message, "nowhere");
    assert_int_equal(di_config_load(&c, di_test_data("vectors"), &err), DI_ERR_NOT_FOUND);
    assert_contains(err.message, "config.json");
}

/* ---- one change at a time ---------------------------------------------------------------------------------------- */

/* Parses `name` with the value at `path` ("text_config.hidden_size"; NULL: no change) replaced by the JSON text
 * value, or removed when value is NULL. */
static di_status parse_changed(const char *name, const char *path, const char *value, di_error *err) {
    json_error_t je;
    json_t *root = json_load_file(di_test_data(name), 0, &je), *at = root;
    assert_non_null(root);
    char keys[128], *key = keys;
    snprintf(keys, sizeof keys, "%s", path);
    for (char *dot; (dot = strchr(key, '.')); key = dot + 1) {
        *dot = 0;
        at = json_object_get(at, key);
        assert_non_null(at);
    }
    static const char mark[] = "@value@"; /* then replaced in the text: the library can't hold every number */
    if (value) {
        assert_int_equal(json_object_set_new(at, key, json_string(mark)), 0);
    } else {
        json_object_del(at, key);
    }
    char *dump = json_dumps(root, 0);
    assert_non_null(dump);
    char *hole = value ? strstr(dump, mark) : NULL, *text = malloc(strlen(dump) + strlen(value ? value : "") + 1);
    assert_non_null(text);
    if (hole) {
        size_t n = (size_t)(hole - dump) - 1, k = strlen(value); /* without the quotes around the mark */
        memcpy(text, dump, n);
        memcpy(text + n, value, k);
        memcpy(text + n + k, hole + strlen(mark) + 1, strlen(hole + strlen(mark) + 1) + 1);
    } else {
        memcpy(text, dump, strlen(dump) + 1);
    }
    free(dump);
    di_config *c = malloc(sizeof *c); /* apart from others: a partial result would show under a sanitizer */
    assert_non_null(c);
    di_status st = di_config_parse(c, text, strlen(text), err);
    free(c);
    free(text);
    json_decref(root);
    return st;
}

static void every_missing_key_is_named(void **state) {
    (void)state;
    static const char *const keys[] = {"architectures",
                                       "model_type",
                                       "dtype",
                                       "bos_token_id",
                                       "eos_token_id",
                                       "pad_token_id",
                                       "image_token_id",
                                       "quantization_config",
                                       "text_config",
                                       "vision_config",
                                       "quantization_config.quant_method",
                                       "quantization_config.activation_scheme",
                                       "quantization_config.weight_block_size",
                                       "quantization_config.scale_fmt",
                                       "quantization_config.expert_dtype",
                                       "text_config.vocab_size",
                                       "text_config.hidden_size",
                                       "text_config.num_hidden_layers",
                                       "text_config.num_attention_heads",
                                       "text_config.num_key_value_heads",
                                       "text_config.head_dim",
                                       "text_config.qk_rope_head_dim",
                                       "text_config.q_lora_rank",
                                       "text_config.o_lora_rank",
                                       "text_config.o_groups",
                                       "text_config.hidden_act",
                                       "text_config.rms_norm_eps",
                                       "text_config.attention_bias",
                                       "text_config.attention_dropout",
                                       "text_config.tie_word_embeddings",
                                       "text_config.max_position_embeddings",
                                       "text_config.rope_theta",
                                       "text_config.compress_rope_theta",
                                       "text_config.rope_scaling",
                                       "text_config.rope_scaling.rope_type",
                                       "text_config.rope_scaling.factor",
                                       "text_config.rope_scaling.beta_fast",
                                       "text_config.rope_scaling.beta_slow",
                                       "text_config.rope_scaling.original_max_position_embeddings",
                                       "text_config.n_routed_experts",
                                       "text_config.n_shared_experts",
                                       "text_config.num_experts_per_tok",
                                       "text_config.moe_intermediate_size",
                                       "text_config.scoring_func",
                                       "text_config.topk_method",
                                       "text_config.norm_topk_prob",
                                       "text_config.routed_scaling_factor",
                                       "text_config.sliding_window",
                                       "text_config.compress_ratios",
                                       "text_config.kv_source_layer_ids",
                                       "text_config.index_source_layer_ids",
                                       "text_config.index_n_heads",
                                       "text_config.index_head_dim",
                                       "text_config.index_topk",
                                       "text_config.candidate_topk_blocks",
                                       "text_config.candidate_block_size",
                                       "text_config.hc_mult",
                                       "text_config.hc_sinkhorn_iters",
                                       "text_config.hc_eps",
                                       "text_config.engram_layer_ids",
                                       "text_config.engram_num_embeddings",
                                       "text_config.engram_max_ngram_size",
                                       "text_config.engram_vocab_size",
                                       "text_config.engram_n_heads",
                                       "text_config.engram_head_dim",
                                       "text_config.engram_pad_token_id",
                                       "text_config.engram_compressed_vocab_size",
                                       "text_config.num_nextn_predict_layers",
                                       "text_config.dspark_block_size",
                                       "text_config.dspark_noise_token_id",
                                       "text_config.dspark_target_layer_ids",
                                       "text_config.dspark_markov_rank",
                                       "text_config.dspark_n_routed_experts",
                                       "text_config.dspark_num_experts_per_tok",
                                       "vision_config.num_hidden_layers",
                                       "vision_config.hidden_size",
                                       "vision_config.num_attention_heads",
                                       "vision_config.intermediate_size",
                                       "vision_config.patch_size",
                                       "vision_config.rope_theta",
                                       "vision_config.downsample_ratio",
                                       "vision_config.max_image_tokens",
                                       "vision_config.min_pixels"};
    for (size_t i = 0; i < DI_COUNT(keys); i++) {
        di_error err = {0};
        char want[160];
        snprintf(want, sizeof want, "'%s'", keys[i]);
        di_status st = parse_changed("model/released.json", keys[i], NULL, &err);
        if (st != DI_ERR_FORMAT)
            fail_msg("without %s: status %d, %s", keys[i], st, err.message);
        assert_contains(err.message, want);
        assert_contains(err.message, "missing, expected");
    }
}

static void optional_keys_may_be_absent(void **state) {
    (void)state;
    static const char *const keys[] = {"text_config.model_type",
                                       "text_config.swiglu_limit",
                                       "text_config.initializer_range",
                                       "text_config.use_cache",
                                       "text_config.candidate_source_layer_id",
                                       "vision_config.max_wh_ratio",
                                       "vision_config.model_type"};
    di_error err;
    for (size_t i = 0; i < DI_COUNT(keys); i++) {
        di_test_ok(parse_changed("model/released.json", keys[i], NULL, &err), &err);
    }
    static const char *const added[][2] = {{"tokenizer_compatibility", "\"native\""},
                                           {"a_new_key", "{\"x\": [1]}"},
                                           {"dummy_seed", "18446744073709551615"},
                                           {"text_config.hc_shifted", "true"},
                                           {"text_config.dspark_target_attn_input", "true"},
                                           {"text_config.use_fp4_sparse_kv", "false"},
                                           {"text_config.index_k_source_layer_ids", "[2, 8, 14, 20]"},
                                           {"text_config.candidate_source_layer_id", "null"},
                                           {"text_config.n_group", "1"},
                                           {"text_config.num_hash_layers", "0"},
                                           {"text_config.rope_scaling", "null"},
                                           {"text_config.rope_scaling.mscale", "0.7"},
                                           {"vision_config.max_wh_ratio", "200"}};
    for (size_t i = 0; i < DI_COUNT(added); i++) {
        di_test_ok(parse_changed("model/released.json", added[i][0], added[i][1], &err), &err);
    }
    di_test_ok(parse_changed("model/released.json", "text_config.rope_scaling",
                             "{\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1, "
                             "\"original_max_position_embeddings\": 65536}",
                             &err),
               &err);
}

static void wrong_values_are_named(void **state) {
    (void)state;
    static const struct {
        const char *path, *value;
        di_status status;
        const char *parts;
    } rows[] = {
        {"architectures", "[\"LlamaForCausalLM\"]", DI_ERR_UNSUPPORTED, "LlamaForCausalLM|DeepseekV41ForCausalLM"},
        {"architectures", "[\"DeepseekV41ForCausalLM\", \"x\"]", DI_ERR_FORMAT, "'architectures'"},
        {"architectures", "\"DeepseekV41ForCausalLM\"", DI_ERR_FORMAT, "'architectures'"},
        {"model_type", "\"deepseek_v4\"", DI_ERR_UNSUPPORTED, "'model_type'|found \"deepseek_v4\"|\"deepseek_v41\""},
        {"model_type", "3", DI_ERR_FORMAT, "'model_type'|found 3"},
        {"dtype", "\"float16\"", DI_ERR_UNSUPPORTED, "'dtype'"},
        {"bos_token_id", "-1", DI_ERR_FORMAT, "'bos_token_id'|found -1"},
        {"eos_token_id", "129280", DI_ERR_FORMAT, "'eos_token_id'|found 129280|vocab_size 129280"},
        {"image_token_id", "true", DI_ERR_FORMAT, "'image_token_id'|found true"},
        {"tokenizer_compatibility", "\"other\"", DI_ERR_UNSUPPORTED, "'tokenizer_compatibility'"},
        {"dummy_seed", "-1", DI_ERR_FORMAT, "'dummy_seed'|found -1"},
        {"dummy_seed", "1.5", DI_ERR_FORMAT, "'dummy_seed'|found 1.5"},
        {"quantization_config", "[]", DI_ERR_FORMAT, "'quantization_config'|an object"},
        {"quantization_config.quant_method", "\"awq\"", DI_ERR_UNSUPPORTED,
         "'quantization_config.quant_method'|\"fp8\""},
        {"quantization_config.activation_scheme", "\"static\"", DI_ERR_UNSUPPORTED, "activation_scheme"},
        {"quantization_config.weight_block_size", "[128, 128]", DI_ERR_UNSUPPORTED,
         "weight_block_size|[128,128]|[32,32]"},
        {"quantization_config.weight_block_size", "[32]", DI_ERR_UNSUPPORTED, "weight_block_size|[32]"},
        {"quantization_config.scale_fmt", "\"float\"", DI_ERR_UNSUPPORTED, "scale_fmt"},
        {"quantization_config.expert_dtype", "\"fp8\"", DI_ERR_UNSUPPORTED, "expert_dtype"},
        {"text_config", "7", DI_ERR_FORMAT, "'text_config'|found 7|an object"},
        {"text_config.model_type", "\"llama\"", DI_ERR_UNSUPPORTED, "'text_config.model_type'"},
        {"text_config.vocab_size", "\"129280\"", DI_ERR_FORMAT,
         "'text_config.vocab_size'|\"129280\"|an integer from 1"},
        {"text_config.vocab_size", "0", DI_ERR_FORMAT, "vocab_size|found 0"},
        {"text_config.hidden_size", "5121", DI_ERR_FORMAT, "hidden_size|found 5121|multiple of 32"},
        {"text_config.hidden_size", "5120.5", DI_ERR_FORMAT, "hidden_size|found 5120.5"},
        {"text_config.hidden_size", "99999999999999999999", DI_ERR_FORMAT, "hidden_size"},
        {"text_config.num_hidden_layers", "0", DI_ERR_FORMAT, "num_hidden_layers|found 0"},
        {"text_config.num_hidden_layers", "41", DI_ERR_FORMAT, "compress_ratios|found 43 entries, expected 44"},
        {"text_config.num_attention_heads", "63", DI_ERR_FORMAT, "o_groups|found 8|num_attention_heads 63"},
        {"text_config.num_key_value_heads", "8", DI_ERR_UNSUPPORTED, "num_key_value_heads|found 8, expected 1"},
        {"text_config.head_dim", "500", DI_ERR_FORMAT, "head_dim|found 500"},
        {"text_config.qk_rope_head_dim", "63", DI_ERR_FORMAT, "qk_rope_head_dim|multiple of 2"},
        {"text_config.qk_rope_head_dim", "1024", DI_ERR_FORMAT, "qk_rope_head_dim|to 512"},
        {"text_config.index_head_dim", "32", DI_ERR_FORMAT, "index_head_dim|at least qk_rope_head_dim 64"},
        {"text_config.q_lora_rank", "1281", DI_ERR_FORMAT, "q_lora_rank"},
        {"text_config.o_lora_rank", "1000", DI_ERR_FORMAT, "o_lora_rank"},
        {"text_config.hidden_act", "\"gelu\"", DI_ERR_UNSUPPORTED, "hidden_act|\"silu\""},
        {"text_config.swiglu_limit", "-1", DI_ERR_FORMAT, "swiglu_limit|found -1"},
        {"text_config.rms_norm_eps", "0", DI_ERR_FORMAT, "rms_norm_eps|above 0"},
        {"text_config.attention_bias", "true", DI_ERR_UNSUPPORTED, "attention_bias|expected false"},
        {"text_config.attention_bias", "0", DI_ERR_FORMAT, "attention_bias"},
        {"text_config.attention_dropout", "0.1", DI_ERR_UNSUPPORTED, "attention_dropout"},
        {"text_config.attention_dropout", "false", DI_ERR_UNSUPPORTED, "attention_dropout"},
        {"text_config.tie_word_embeddings", "true", DI_ERR_UNSUPPORTED, "tie_word_embeddings"},
        {"text_config.rope_theta", "0", DI_ERR_FORMAT, "rope_theta|found 0"},
        {"text_config.rope_theta", "\"1e4\"", DI_ERR_FORMAT, "rope_theta"},
        {"text_config.rope_scaling.rope_type", "\"linear\"", DI_ERR_UNSUPPORTED,
         "rope_scaling.rope_type|\"linear\"|\"yarn\""},
        {"text_config.rope_scaling.factor", "0", DI_ERR_FORMAT, "rope_scaling.factor"},
        {"text_config.rope_scaling", "\"yarn\"", DI_ERR_FORMAT, "rope_scaling|an object"},
        {"text_config.n_shared_experts", "2", DI_ERR_UNSUPPORTED, "n_shared_experts|found 2"},
        {"text_config.num_experts_per_tok", "385", DI_ERR_FORMAT, "num_experts_per_tok|to 64"},
        {"text_config.moe_intermediate_size", "2300", DI_ERR_FORMAT, "moe_intermediate_size"},
        {"text_config.scoring_func", "\"softmax\"", DI_ERR_UNSUPPORTED, "scoring_func|\"sqrtsoftplus\""},
        {"text_config.topk_method", "\"greedy\"", DI_ERR_UNSUPPORTED, "topk_method"},
        {"text_config.norm_topk_prob", "false", DI_ERR_UNSUPPORTED, "norm_topk_prob"},
        {"text_config.n_group", "8", DI_ERR_UNSUPPORTED, "n_group|found 8"},
        {"text_config.num_hash_layers", "3", DI_ERR_UNSUPPORTED, "num_hash_layers"},
        {"text_config.sliding_window", "0", DI_ERR_FORMAT, "sliding_window"},
        {"text_config.compress_ratios", "[0, 3]", DI_ERR_FORMAT, "compress_ratios|from 0 to 2"},
        {"text_config.compress_ratios", "[0, 0]", DI_ERR_FORMAT, "compress_ratios|found 2 entries, expected 43"},
        {"text_config.kv_source_layer_ids", "[8, 14, 20]", DI_ERR_FORMAT, "kv_source_layer_ids|layer 2"},
        {"text_config.kv_source_layer_ids", "[2, 8, 14]", DI_ERR_FORMAT, "layer 20|14"},
        {"text_config.kv_source_layer_ids", "[2, 14, 8, 20]", DI_ERR_FORMAT, "kv_source_layer_ids|rising order"},
        {"text_config.kv_source_layer_ids", "[1, 2, 8, 14, 20]", DI_ERR_FORMAT, "kv_source_layer_ids|layer 1"},
        {"text_config.kv_source_layer_ids", "[2, 3, 8, 14, 20]", DI_ERR_FORMAT, "kv_source_layer_ids|layer 3"},
        {"text_config.kv_source_layer_ids", "[2, 8, 14, 40]", DI_ERR_FORMAT, "kv_source_layer_ids|from 0 to 39"},
        {"text_config.index_source_layer_ids", "[2, 8, 20]", DI_ERR_FORMAT, "layer 14|index_source_layer_ids"},
        {"text_config.index_k_source_layer_ids", "[2, 8, 14, 20, 24]", DI_ERR_UNSUPPORTED, "index_k_source|layer 24"},
        {"text_config.index_k_source_layer_ids", "[2, 8, 20]", DI_ERR_FORMAT, "layer 14|index_k_source"},
        {"text_config.candidate_source_layer_id", "21", DI_ERR_FORMAT, "candidate_source_layer_id|layer 21"},
        {"text_config.candidate_source_layer_id", "2", DI_ERR_FORMAT, "layer 20 has ratio 1|layer 2"},
        {"text_config.candidate_topk_blocks", "2044", DI_ERR_FORMAT, "candidate_topk_blocks|multiple of 8"},
        {"text_config.candidate_topk_blocks", "4104", DI_ERR_FORMAT, "candidate_topk_blocks|to 4096"},
        {"text_config.candidate_topk_blocks", "56", DI_ERR_FORMAT,
         "candidate_topk_blocks|56 blocks of 8|index_topk 512"},
        {"text_config.candidate_block_size", "32", DI_ERR_FORMAT, "candidate_block_size"},
        {"text_config.hc_shifted", "false", DI_ERR_UNSUPPORTED, "hc_shifted"},
        {"text_config.hc_mult", "0", DI_ERR_FORMAT, "hc_mult"},
        {"text_config.engram_layer_ids", "[1]", DI_ERR_FORMAT, "engram_num_embeddings"},
        {"text_config.engram_num_embeddings", "[384006168, 384016683]", DI_ERR_FORMAT,
         "engram_num_embeddings|384016683|384016682|layer 14"},
        {"text_config.engram_head_dim", "200", DI_ERR_FORMAT, "engram_head_dim"},
        {"text_config.engram_pad_token_id", "129280", DI_ERR_FORMAT, "engram_pad_token_id"},
        {"text_config.dspark_target_layer_ids", "[19, 38]", DI_ERR_FORMAT,
         "dspark_target_layer_ids|19 and 38|layer 20"},
        {"text_config.dspark_target_layer_ids", "[]", DI_ERR_FORMAT, "dspark_target_layer_ids"},
        {"text_config.dspark_target_attn_input", "false", DI_ERR_UNSUPPORTED, "dspark_target_attn_input"},
        {"text_config.dspark_num_experts_per_tok", "129", DI_ERR_FORMAT, "dspark_num_experts_per_tok|to 64"},
        {"text_config.dspark_noise_token_id", "129280", DI_ERR_FORMAT, "dspark_noise_token_id"},
        {"vision_config", "null", DI_ERR_FORMAT, "'vision_config'|image_token_id"},
        {"vision_config.num_attention_heads", "24", DI_ERR_FORMAT, "vision_config.num_attention_heads|found 24"},
        {"vision_config.downsample_ratio", "0", DI_ERR_FORMAT, "vision_config.downsample_ratio"},
        {"vision_config.min_pixels", "0", DI_ERR_FORMAT, "vision_config.min_pixels"},
        {"vision_config.model_type", "\"clip\"", DI_ERR_UNSUPPORTED, "vision_config.model_type"},
    };
    for (size_t i = 0; i < DI_COUNT(rows); i++) {
        di_error err = {0};
        di_status st = parse_changed("model/released.json", rows[i].path, rows[i].value, &err);
        if (st != rows[i].status) {
            fail_msg("%s = %s: status %d (%s), expected %d", rows[i].path, rows[i].value, st, err.message,
                     rows[i].status);
        }
        char parts[256];
        snprintf(parts, sizeof parts, "%s", rows[i].parts);
        for (char *part = parts; part;) {
            char *bar = strchr(part, '|');
            if (bar)
                *bar = 0;
            if (!strstr(err.message, part))
                fail_msg("%s = %s: '%s' lacks '%s'", rows[i].path, rows[i].value, err.message, part);
            part = bar ? bar + 1 : NULL;
        }
    }
}

static void text_that_is_no_object_is_refused(void **state) {
    (void)state;
    static const char *const texts[] = {"", "[]", "3", "{", "null", "{\"text_config\":{}}"};
    for (size_t i = 0; i < DI_COUNT(texts); i++) {
        di_config c;
        di_error err = {0};
        assert_int_equal(di_config_parse(&c, texts[i], strlen(texts[i]), &err), DI_ERR_FORMAT);
        assert_true(err.message[0] != 0);
    }
}

/* ---- constants --------------------------------------------------------------------------------------------------- */

static void assert_close(double got, double want, double relative) {
    if (fabs(got - want) > relative * fabs(want))
        fail_msg("found %.9g, expected %.9g", got, want);
}

static void yarn_frequencies_are_the_check_values(void **state) {
    (void)state;
    di_config c = load("model/released.json");
    float scaled[32];
    di_config_inv_freq(&c, true, scaled);
    static const struct {
        int j;
        double plain, scaled;
    } rows[] = {{1, 0.687656022, 0.687656022},
                {15, 0.00363553858, 0.00363553858},
                {16, 0.0025, 0.002265625},
                {20, 0.000559016994, 0.000296977778},
                {25, 8.59570027e-05, 5.37231267e-06},
                {31, 9.08884646e-06, 5.68052904e-07}};
    /* fp32 with a few roundings beside values of nine digits. */
    for (size_t i = 0; i < DI_COUNT(rows); i++)
        assert_close(scaled[rows[i].j], rows[i].scaled, 3e-7);
    c.has_yarn = false;
    di_config_inv_freq(&c, true, scaled);
    for (size_t i = 0; i < DI_COUNT(rows); i++)
        assert_close(scaled[rows[i].j], rows[i].plain, 3e-7);
}

static void frequencies_equal_the_reference(void **state) {
    (void)state;
    di_config c;
    di_error err;
    di_test_ok(di_config_load(&c, di_test_source("models/tiny"), &err), &err);
    golden *g = golden_open(di_test_data("tiny/static.safetensors"));
    for (int compressed = 0; compressed < 2; compressed++) {
        float got[16];
        golden_tensor want = golden_get(g, compressed ? "rope.compressed.inv_freq" : "rope.window.inv_freq");
        assert_int_equal(want.n, c.rope_dim / 2);
        di_config_inv_freq(&c, compressed, got);
        for (int i = 0; i < want.n; i++)
            assert_true(got[i] == golden_float(&want, i));
    }
    golden_close(g);
}

static void engram_constants_equal_the_reference(void **state) {
    (void)state;
    di_config c;
    di_error err;
    di_test_ok(di_config_load(&c, di_test_source("models/tiny"), &err), &err);
    golden *g = golden_open(di_test_data("tiny/static.safetensors"));
    for (int e = 0; e < c.n_engram; e++) {
        int64_t mult[DI_ENGRAM_NGRAM_MAX], primes[DI_ENGRAM_COLUMNS_MAX], offsets[DI_ENGRAM_COLUMNS_MAX];
        di_test_ok(di_config_engram(&c, e, mult, primes, offsets, &err), &err);
        static const char *const parts[] = {"multipliers", "primes", "offsets"};
        const int64_t *got[] = {mult, primes, offsets};
        for (int k = 0; k < 3; k++) {
            char name[64];
            snprintf(name, sizeof name, "engram.%d.%s", (int)c.engram_layers[e], parts[k]);
            golden_tensor want = golden_get(g, name);
            for (int64_t i = 0; i < want.n; i++)
                assert_true(got[k][i] == golden_int(&want, i));
        }
    }
    golden_close(g);
}

/* Rows that classes t[0..Ng-1] look up, by the definition. */
static void hash_rows(const di_config *c, int e, const int64_t *t, int64_t *rows) {
    di_error err;
    int64_t mult[DI_ENGRAM_NGRAM_MAX], primes[DI_ENGRAM_COLUMNS_MAX], offsets[DI_ENGRAM_COLUMNS_MAX];
    di_test_ok(di_config_engram(c, e, mult, primes, offsets, &err), &err);
    int64_t h = t[0] * mult[0];
    for (int s = 1; s < c->engram_ngram; s++) {
        h ^= t[s] * mult[s];
        for (int k = 0; k < c->engram_heads; k++) {
            int col = (s - 1) * c->engram_heads + k;
            rows[col] = h % primes[col] + offsets[col];
        }
    }
}

static void engram_constants_are_the_check_values(void **state) {
    (void)state;
    di_error err;
    int64_t mult[DI_ENGRAM_NGRAM_MAX], primes[DI_ENGRAM_COLUMNS_MAX], offsets[DI_ENGRAM_COLUMNS_MAX], rows[24];
    di_config c = load("model/coverage.json");
    static const int64_t tiny_mult[2][4] = {{8437364068238481, 532881113154025, 3959239832743293, 8146170270474473},
                                            {3030781234032623, 8990863924945465, 1197684397367955, 7739849729322327}};
    static const int64_t tiny_primes[2][6] = {{1009, 1013, 1019, 1021, 1031, 1033},
                                              {1039, 1049, 1051, 1061, 1063, 1069}};
    for (int e = 0; e < 2; e++) {
        di_test_ok(di_config_engram(&c, e, mult, primes, offsets, &err), &err);
        assert_memory_equal(mult, tiny_mult[e], sizeof tiny_mult[e]);
        assert_memory_equal(primes, tiny_primes[e], sizeof tiny_primes[e]);
    }
    static const int64_t tiny_rows[2][6] = {{376, 1898, 2794, 3621, 4766, 5527}, {141, 1409, 2816, 3248, 4462, 5932}};
    hash_rows(&c, 0, (const int64_t[]){5, 7, 11, 13}, rows);
    assert_memory_equal(rows, tiny_rows[0], sizeof tiny_rows[0]);
    hash_rows(&c, 0, (const int64_t[]){5, 0, 0, 0}, rows);
    assert_memory_equal(rows, tiny_rows[1], sizeof tiny_rows[1]);

    c = load("model/released.json");
    static const int64_t mult_1[4] = {76632096046245, 4839876093313, 35959672319349, 73987337458391};
    static const int64_t mult_14[4] = {67716810739261, 51510806800915, 30921347202721, 82619226485591};
    di_test_ok(di_config_engram(&c, 0, mult, primes, offsets, &err), &err);
    assert_memory_equal(mult, mult_1, sizeof mult_1);
    assert_true(primes[0] == 16000057 && primes[8] == 16000189 && primes[23] == 16000463);
    di_test_ok(di_config_engram(&c, 1, mult, primes, offsets, &err), &err);
    assert_memory_equal(mult, mult_14, sizeof mult_14);
    assert_true(primes[0] == 16000477 && primes[15] == 16000769 && primes[23] == 16000889);
    static const int64_t released_rows[24] = {6961830,   31143904,  34796895,  48021142,  75858929,  90471933,
                                              97778503,  125113896, 128920094, 146640906, 168356892, 188372380,
                                              206667341, 223815044, 225536255, 253542237, 267226692, 284872852,
                                              289916976, 308439827, 331455479, 349978782, 360629759, 372696692};
    hash_rows(&c, 0, (const int64_t[]){5, 7, 11, 13}, rows);
    assert_memory_equal(rows, released_rows, sizeof released_rows);
}

/* The layers of --dummy-layers have the released dimensions; two of them are one of each ratio. */
static void released_layers_are_of_both_ratios(void **state) {
    (void)state;
    di_config c, released;
    di_error err = {0};
    di_test_ok(di_config_released_layers(&c, 2, &err), &err);
    di_strbuf text = {0};
    di_test_ok(di_file_read(di_test_data("model/released.json"), 1 << 20, &text, &err), &err);
    di_test_ok(di_config_parse(&released, text.data, text.len, &err), &err);
    di_strbuf_deinit(&text);
    assert_int_equal(c.n_layers, 2);
    assert_int_equal(c.ratio[0], 2);
    assert_int_equal(c.ratio[1], 1);
    assert_int_equal(c.first_consumer, 1);
    assert_int_equal(c.candidate_layer, 1);
    assert_true(di_config_is_kv_source(&c, 0) && di_config_is_kv_source(&c, 1));
    assert_true(di_config_is_index_source(&c, 0) && di_config_is_index_source(&c, 1));
    assert_int_equal(c.n_draft_layers, 0);
    assert_int_equal(c.hidden, released.hidden);
    assert_int_equal(c.vocab, released.vocab);
    assert_int_equal(c.n_experts, released.n_experts);
    assert_int_equal(c.n_experts_tok, released.n_experts_tok);
    assert_int_equal(c.intermediate, released.intermediate);
    assert_int_equal(c.n_heads, released.n_heads);
    assert_int_equal(c.head_dim, released.head_dim);
    assert_int_equal(c.q_rank, released.q_rank);
    assert_int_equal(c.o_rank, released.o_rank);
    assert_int_equal(c.index_topk, released.index_topk);
    assert_int_equal(c.window, released.window);
    assert_true(c.rms_eps == released.rms_eps && c.swiglu_limit == released.swiglu_limit);
    assert_true(c.compress_rope_theta == released.compress_rope_theta && c.yarn_factor == released.yarn_factor);
    assert_int_equal(di_config_released_layers(&c, 0, &err), DI_ERR_ARG);
    assert_int_equal(di_config_released_layers(&c, DI_SOURCES_MAX + 1, &err), DI_ERR_ARG);
}

DI_TEST_GROUP(config, cmocka_unit_test(released_layers_are_of_both_ratios),
              cmocka_unit_test(released_config_has_its_roles), cmocka_unit_test(coverage_config_loads),
              cmocka_unit_test(shipped_and_real_shape_configs_load), cmocka_unit_test(missing_folder_or_file_is_named),
              cmocka_unit_test(every_missing_key_is_named), cmocka_unit_test(optional_keys_may_be_absent),
              cmocka_unit_test(wrong_values_are_named), cmocka_unit_test(text_that_is_no_object_is_refused),
              cmocka_unit_test(yarn_frequencies_are_the_check_values),
              cmocka_unit_test(frequencies_equal_the_reference), cmocka_unit_test(engram_constants_equal_the_reference),
              cmocka_unit_test(engram_constants_are_the_check_values));
