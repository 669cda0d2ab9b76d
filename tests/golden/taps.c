/* The comparing tap behind taps.h. */
#include "taps.h"

#include <math.h>
#include <stdio.h>

#include "harness.h"
#include "model/model_internal.h"

static double shown(di_dtype t, const void *data, int64_t i) {
    switch (t) {
    case DI_BF16:
        return di_bf16_to_f32(((const uint16_t *)data)[i]);
    case DI_F32:
        return ((const float *)data)[i];
    case DI_I32:
        return ((const int32_t *)data)[i];
    case DI_I64:
        return (double)((const int64_t *)data)[i];
    default:
        return ((const uint8_t *)data)[i];
    }
}

static void put(di_dtype dtype, void *data, int64_t i, const golden_tensor *t, int64_t k) {
    switch (dtype) {
    case DI_BF16:
        ((uint16_t *)data)[i] = di_f32_to_bf16(golden_float(t, k));
        break;
    case DI_F32:
        ((float *)data)[i] = golden_float(t, k);
        break;
    case DI_I32:
        ((int32_t *)data)[i] = (int32_t)golden_int(t, k);
        break;
    case DI_I64:
        ((int64_t *)data)[i] = golden_int(t, k);
        break;
    default:
        ((uint8_t *)data)[i] = (uint8_t)golden_int(t, k);
    }
}

/* Window records show no tensor of their own name: golden files hold their codes and scales apart. */
static void inject_records(tap_compare *c, const char *name, int64_t n_rows, int64_t n_cols, uint8_t *data) {
    char part[96];
    int stem = (int)(strlen(name) - strlen("window_records"));
    snprintf(part, sizeof part, "%.*swindow_kv_raw.fp8", stem, name);
    if (!golden_has(c->g, part))
        return;
    golden_tensor codes = golden_get(c->g, part);
    snprintf(part, sizeof part, "%.*swindow_kv_raw.fp8_scale", stem, name);
    golden_tensor scales = golden_get(c->g, part);
    int64_t d = golden_row(&codes), s = golden_row(&scales), rows = codes.shape[0];
    if (d + s != n_cols || rows > n_rows)
        fail_msg("'%s': records of %ld bytes, golden %ld", name, (long)n_cols, (long)(d + s));
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *rec = data + (n_rows - rows + r) * n_cols;
        memcpy(rec, codes.data + r * d, (size_t)d);
        memcpy(rec + d, scales.data + r * s, (size_t)s);
    }
}

/* Writes the golden bytes of one kind of entry into the pages of sequence 0. Encoding compressed values again would not
 * give the same bytes, so the codes themselves are moved. */
static void inject_section(const rig *r, int32_t layer, golden_tensor codes, golden_tensor scales, size_t offset,
                           bool split, int64_t n_entries) {
    di_layout lay;
    di_layout_init(&lay, &r->config, DI_NUMERICS_FAITHFUL, true);
    int64_t d = golden_row(&codes), s = golden_row(&scales), per = DI_PAGE_TOKENS / r->config.ratio[layer];
    for (int64_t i = 0; i < codes.shape[0]; i++) {
        int64_t j = n_entries - codes.shape[0] + i;
        uint8_t *section = r->pages + (size_t)r->blocks[j / per] * lay.page_bytes + offset;
        int64_t at = j % per;
        rig_put(r, section + (split ? at * d : at * (d + s)), codes.data + i * d, (size_t)d);
        rig_put(r, section + (split ? per * d + at * s : at * (d + s) + d), scales.data + i * s, (size_t)s);
    }
}

/* Entries of a KV source, between their storing and their first use. */
static void inject_pages(const tap_compare *c, int32_t layer) {
    const rig *r = c->inject;
    char name[96];
    di_layout lay;
    di_layout_init(&lay, &r->config, DI_NUMERICS_FAITHFUL, true);
    snprintf(name, sizeof name, "layers.%d.compressed_kv_raw.fp4", layer);
    if (!golden_has(c->g, name))
        return; /* a prompt too short to close an entry */
    golden_tensor main = golden_get(c->g, name);
    snprintf(name, sizeof name, "layers.%d.compressed_kv_raw.fp4_scale", layer);
    golden_tensor main_scale = golden_get(c->g, name);
    snprintf(name, sizeof name, "layers.%d.index_k_raw.fp4", layer);
    golden_tensor keys = golden_get(c->g, name);
    snprintf(name, sizeof name, "layers.%d.index_k_raw.fp4_scale", layer);
    golden_tensor keys_scale = golden_get(c->g, name);
    int64_t n = c->n_tokens / r->config.ratio[layer];
    inject_section(r, layer, main, main_scale, lay.main_offset[layer], false, n);
    inject_section(r, layer, keys, keys_scale, lay.index_offset[layer], true, n);
}

static bool reads_caches(const char *name) {
    return strstr(name, "index_score") || strstr(name, "index_selected") || strstr(name, "candidate_blocks") ||
           strstr(name, "attn_out");
}

void tap_compare_fn(void *user, const char *name, di_dtype dtype, int64_t n_rows, int64_t n_cols, void *data) {
    tap_compare *c = user;
    int32_t layer;
    if (c->inject && strstr(name, "window_records"))
        inject_records(c, name, n_rows, n_cols, data);
    if (c->inject && strstr(name, "index_q_raw") && sscanf(name, "layers.%d.", &layer) == 1 &&
        di_config_is_kv_source(&c->inject->config, layer))
        inject_pages(c, layer);
    if (!golden_has(c->g, name) || !strcmp(name, "logits"))
        return;
    golden_tensor t = golden_get(c->g, name);
    int64_t rows = t.n_dims ? t.shape[0] : 1, cols = golden_row(&t), first = n_rows - rows;
    bool integer = !strcmp(t.dtype, "I32"), scores = strstr(name, "index_score") != NULL;
    double err = 0, norm = 0;
    bool is_compared = !(c->is_partial && reads_caches(name));
    c->n_seen += is_compared;
    if (rows > n_rows || cols > n_cols)
        fail_msg("'%s': shown [%ld, %ld], golden [%ld, %ld]", name, (long)n_rows, (long)n_cols, (long)rows, (long)cols);
    int64_t from = c->inject ? rows - 1 : 0;
    for (int64_t r = is_compared ? from : rows; r < rows; r++)
        for (int64_t k = 0; k < cols; k++) {
            double got = shown(dtype, data, (first + r) * n_cols + k);
            double want = integer ? (double)golden_int(&t, r * cols + k) : golden_float(&t, r * cols + k);
            if (isinf(got) && got < 0 && scores)
                continue; /* hidden or outside the candidate blocks: the golden file has all scores */
            if (integer && got != want) {
                print_message("'%s' row %ld column %ld: %g, expected %g\n", name, (long)r, (long)k, got, want);
                c->n_wrong++;
                r = rows - 1; /* one report a tensor */
                break;
            }
            err += (got - want) * (got - want);
            norm += want * want;
        }
    double rel = norm > 0 ? sqrt(err / norm) : sqrt(err);
    if (!integer && rel > c->worst)
        c->worst = rel;
    bool is_rounded = strstr(name, "attn_out") || strstr(name, "compressed_kv_raw") || strstr(name, "index_k_raw");
    double tolerance = is_rounded && c->rounded_tolerance > 0 ? c->rounded_tolerance : c->tolerance;
    if (!integer && !(rel <= tolerance)) {
        print_message("'%s': off by %g of its rms, tolerance %g\n", name, rel, tolerance);
        c->n_wrong++;
    }
    if (!c->inject || scores)
        return; /* scores are shown after they were used */
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < cols; k++)
            put(dtype, data, (first + r) * n_cols + k, &t, r * cols + k);
}
