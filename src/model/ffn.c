/* The feed-forward sub-layer: router and mixture of experts with its shared expert (model.md 3.10). */
#include "forward_internal.h"

di_status di_block_ffn(di_forward *fw, int32_t layer, int32_t set, di_act x, di_act f) {
    const di_model *mo = fw->model;
    const di_config *c = &mo->config;
    const di_block_weights *w = &mo->weights.blocks[layer];
    bool draft = layer >= c->n_layers; /* draft blocks always take the text bias */
    di_act xq;
    di_status st;
    char name[24];
    di_layer_name(fw, layer, name);
    if ((st = mo->backend.ops->moe_route(fw->stream, &(di_moe_route_args){.x = x,
                                                                          .gate = &w->gate,
                                                                          .bias = w->gate_bias,
                                                                          .bias_vl = w->gate_bias_vl,
                                                                          .is_image = draft ? NULL : fw->skip_rows[set],
                                                                          .k = w->n_experts_tok,
                                                                          .factor = c->routed_scale,
                                                                          .idx = fw->ws.router_idx,
                                                                          .weight = fw->ws.router_weight})))
        return st;
    if ((st = di_show(fw, name, "ffn.router_idx", DI_I32, x.n_rows, w->n_experts_tok, fw->ws.router_idx)))
        return st;
    if ((st = di_show(fw, name, "ffn.router_weight", DI_F32, x.n_rows, w->n_experts_tok, fw->ws.router_weight)))
        return st;
    if ((st = di_input_quant(fw, x, &xq)))
        return st;
    return mo->backend.ops->moe(fw->stream, &(di_moe_args){.x = xq,
                                                           .idx = fw->ws.router_idx,
                                                           .weight = fw->ws.router_weight,
                                                           .k = w->n_experts_tok,
                                                           .n_experts = w->n_experts,
                                                           .experts = w->experts,
                                                           .shared = &w->shared,
                                                           .table = w->expert_table,
                                                           .limit = c->swiglu_limit,
                                                           .out = f});
}
