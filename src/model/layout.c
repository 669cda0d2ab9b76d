/* Where a KV page and a state slot keep what (model.md 5.1 to 5.3).
 *
 *   page (128 tokens):  for every kv source, in layer order: [index keys | pad][main entries | pad], 128/r of each
 *   slot (a sequence):  a window ring per backbone layer, one per draft layer, a compressor ring per ratio-2 source
 *
 *   taps (a sequence):  a ring of what the draft layers' window keys are made of, for those that are put off
 *
 * Sections and rings start at multiples of 32 bytes. Exact numerics keep floats in the same places. */
#include "model_internal.h"

#define SECTION_ALIGN ((size_t)32)

/* Offset of a section of n bytes behind *total, which grows by it. */
static size_t section(size_t *total, size_t n) {
    size_t at = *total;
    *total += DI_ROUND_UP(n, SECTION_ALIGN);
    return at;
}

void di_layout_init(di_layout *out, const di_config *c, di_numerics numerics, bool with_draft) {
    bool exact = numerics == DI_NUMERICS_EXACT;
    di_layout y = {
        .win_format = exact ? DI_KV_F32 : DI_KV_FP8,
        .main_format = exact       ? DI_KV_F32
                       : c->fp4_kv ? DI_KV_FP4
                                   : DI_KV_FP8,
        .index_format = exact ? DI_KV_F32 : DI_KV_MX4,
    };
    size_t index_bytes = di_kv_record_bytes(y.index_format, c->index_dim);
    size_t main_bytes = di_kv_record_bytes(y.main_format, c->head_dim);
    for (int32_t l = 0; l < c->n_layers; l++) {
        if (!di_config_is_kv_source(c, l))
            continue;
        size_t n = (size_t)(DI_PAGE_TOKENS / c->ratio[l]);
        if (di_config_is_index_k_source(c, l))
            y.index_offset[l] = section(&y.page_bytes, n * index_bytes);
        y.main_offset[l] = section(&y.page_bytes, n * main_bytes);
    }

    /* A drafting round writes positions up to B behind the last certain one, and steps back by as many. */
    int32_t backtrack = DI_MAX(DI_BACKTRACK, with_draft ? c->draft_block + 1 : 0);
    int32_t n_rings = c->n_layers + (with_draft ? c->n_draft_layers : 0);
    y.ring_len = c->window + backtrack;
    y.win_bytes = di_kv_record_bytes(y.win_format, c->head_dim);
    for (int32_t l = 0; l < n_rings; l++)
        y.ring_offset[l] = section(&y.slot_bytes, (size_t)y.ring_len * y.win_bytes);
    y.pair_ring_len = 2 + backtrack - 1;
    y.pair_bytes = (size_t)c->head_dim * 2 * sizeof(float); /* gate scores, then latents */
    for (int32_t l = 0; l < c->n_layers; l++) {
        if (di_config_is_kv_source(c, l) && c->ratio[l] == 2) {
            y.pair_offset[l] = section(&y.slot_bytes, (size_t)y.pair_ring_len * y.pair_bytes);
        }
    }
    if (with_draft) {
        y.tap_record = (size_t)c->n_draft_targets * (size_t)c->hidden * (exact ? 4 : 2);
        y.tap_bytes = (size_t)y.ring_len * y.tap_record;
    }
    *out = y;
}
