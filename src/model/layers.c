/* A configuration of a few layers at the released dimensions, for benches (--dummy-layers).
 *
 * The first half of the layers is like layer 2 of the released model (ratio 2), the rest like layer 20 (ratio 1, the
 * first of them candidate source and first consumer); each owns its compressor and its indexer. Embedding and head are
 * whole; there is no Engram, whose tables alone would not fit, and no draft module. */
#include "model.h"

static void list(di_strbuf *out, const char *key, int32_t n, int32_t n_first, int32_t first, int32_t then) {
    di_strbuf_printf(out, "\"%s\":[", key);
    for (int32_t i = 0; i < n; i++)
        di_strbuf_printf(out, "%s%d", i ? "," : "", first < 0 ? i : i < n_first ? first : then);
    di_strbuf_puts(out, "],");
}

di_status di_config_released_layers(di_config *out, int32_t n, di_error *err) {
    di_strbuf text = {0};
    if (n < 1 || n > DI_SOURCES_MAX)
        return di_fail(err, DI_ERR_ARG, "--dummy-layers %d: expected 1 to %d", n, DI_SOURCES_MAX);
    int32_t n_pairs = n / 2;
    di_strbuf_puts(
        &text, "{\"architectures\":[\"DeepseekV41ForCausalLM\"],\"model_type\":\"deepseek_v41\",\"dtype\":\"bfloat16\","
               "\"bos_token_id\":0,\"eos_token_id\":1,\"pad_token_id\":2,"
               "\"quantization_config\":{\"quant_method\":\"fp8\",\"activation_scheme\":\"dynamic\","
               "\"weight_block_size\":[32,32],\"scale_fmt\":\"ue8m0\",\"expert_dtype\":\"fp4\"},\"text_config\":{");
    di_strbuf_printf(&text, "\"num_hidden_layers\":%d,\"candidate_source_layer_id\":%d,", n, n_pairs);
    list(&text, "compress_ratios", n, n_pairs, 2, 1);
    list(&text, "kv_source_layer_ids", n, 0, -1, 0);
    list(&text, "index_source_layer_ids", n, 0, -1, 0);
    di_strbuf_puts(
        &text,
        "\"model_type\":\"deepseek_v41_text\",\"vocab_size\":129280,\"hidden_size\":5120,\"num_attention_heads\":64,"
        "\"num_key_value_heads\":1,\"head_dim\":512,\"qk_rope_head_dim\":64,\"q_lora_rank\":1280,\"o_lora_rank\":1024,"
        "\"o_groups\":8,\"hidden_act\":\"silu\",\"swiglu_limit\":10.0,\"rms_norm_eps\":1e-20,\"attention_bias\":false,"
        "\"attention_dropout\":0.0,\"tie_word_embeddings\":false,\"max_position_embeddings\":1048576,\"rope_theta\":"
        "10000,"
        "\"compress_rope_theta\":160000,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":16,\"beta_fast\":32,\"beta_"
        "slow\":1,"
        "\"original_max_position_embeddings\":65536},\"n_routed_experts\":384,\"n_shared_experts\":1,\"num_experts_per_"
        "tok\":6,"
        "\"moe_intermediate_size\":2304,\"scoring_func\":\"sqrtsoftplus\",\"topk_method\":\"noaux_tc\",\"norm_topk_"
        "prob\":true,"
        "\"routed_scaling_factor\":1.5,\"sliding_window\":128,\"index_n_heads\":32,\"index_head_dim\":128,\"index_"
        "topk\":512,"
        "\"candidate_topk_blocks\":2048,\"candidate_block_size\":8,\"hc_mult\":4,\"hc_sinkhorn_iters\":20,\"hc_eps\":"
        "1e-6,"
        "\"engram_layer_ids\":[],\"engram_num_embeddings\":[],\"num_nextn_predict_layers\":0}}");
    di_status st = di_strbuf_status(&text, err);
    if (!st)
        st = di_config_parse(out, text.data, text.len, err);
    di_strbuf_deinit(&text);
    return st;
}
