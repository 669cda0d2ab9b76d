/* The steps of the indexer's selection by panels (index.h), at the width of the level that includes this: keys decoded
 * once into panels of 8, only those that a row needs, then the rows' scores, 8 entries and 4 heads at a time; the best
 * by a limit that is sure to leave enough of them, then a radix search for the last one that gets in among the few that
 * reach it, which leaves the chosen ascending. Included after lanes_<level>.h of a level with at most 8 lanes. */
#include <float.h>

#include "act_body.h"
#include "index.h"
#include "tile_body.h"

#define TILE_ENTRIES DI_CPU_INDEX_ENTRIES
#define TILE_PANELS (TILE_ENTRIES / DI_TILE_LANES)

/* ---- scores ------------------------------------------------------------------------------------------------------ */

static void panel_query(const di_index_job *j, int64_t row, float *q, float *w, uint8_t *scratch) {
    const di_index_select_args *a = j->a;
    int64_t n = (int64_t)a->n_heads * a->dim, padded = DI_ROUND_UP((int64_t)a->n_heads, DI_TILE_ROWS) * a->dim;
    di_cpu_index_query(a, row, scratch, q);
    memset(q + n, 0, (size_t)(padded - n) * sizeof(float));
    row_load(&a->w, row, 0, a->n_heads, w);
}

/* Scores of one row against one panel of 8 keys. */
static void score_panel(const di_index_select_args *a, const float *q, const float *w, const float *panel, float *out) {
    di_v score[DI_TILE_VECS];
    memset(score, 0, sizeof score);
    for (int64_t h = 0; h < a->n_heads; h += DI_TILE_ROWS) {
        di_tile t;
        di_tile_dots(q + h * a->dim, a->dim, panel, a->dim, &t);
        for (int r = 0; r < DI_TILE_ROWS && h + r < a->n_heads; r++) {
            for (int l = 0; l < DI_TILE_VECS; l++)
                score[l] += di_v_splat(w[h + r]) * di_v_relu(t.v[r][l]);
        }
    }
    for (int l = 0; l < DI_TILE_VECS; l++)
        di_v_store(out + l * DI_LANES, score[l]);
    for (int lane = 0; lane < DI_TILE_LANES && a->round_bf16; lane++)
        out[lane] = di_round_bf16(out[lane]);
}

/* Keys of entries [base, base + TILE_ENTRIES) below n of one sequence, decoded panel by panel when first asked for. */
typedef struct key_panels {
    float *panels, *key;
    int32_t seq;
    int64_t base, n;
    bool is_ready[TILE_PANELS];
} key_panels;

static const float *panel_of(const di_index_select_args *a, key_panels *k, int64_t i) {
    float *panel = k->panels + i * DI_TILE_LANES * a->dim;
    if (!k->is_ready[i]) {
        k->is_ready[i] = true;
        int64_t first = k->base + i * DI_TILE_LANES, end = DI_MIN(first + DI_TILE_LANES, k->n);
        for (int64_t e = first; e < end; e++) {
            di_cpu_entry_load(a->rows, &a->keys, k->seq, (int32_t)e, k->key);
            di_panel_put_column(panel, e - first, a->dim, k->key);
        }
    }
    return panel;
}

static void panel_scores(const di_index_job *j, int64_t row, int64_t end, int64_t base, int64_t n, uint8_t *scratch) {
    const di_index_select_args *a = j->a;
    key_panels k = {.seq = a->rows->seq[row], .base = base, .n = n};
    k.panels = di_cpu_take(&scratch, (size_t)(TILE_ENTRIES * a->dim) * sizeof(float));
    k.key = di_cpu_take(&scratch, (size_t)a->dim * sizeof(float));
    for (; row < end; row++) {
        int64_t row_end = DI_MIN(base + TILE_ENTRIES, di_cpu_index_visible(a, row));
        if (base >= row_end)
            continue;
        uint32_t wanted = di_cpu_index_wanted(a, row, base, row_end);
        float *out = di_index_scores_of(j, row) + base;
        for (int64_t i = 0; i * DI_TILE_LANES < row_end - base; i++, out += DI_TILE_LANES) {
            if (wanted >> i & 1)
                score_panel(a, di_index_query_of(j, row), di_index_weights_of(j, row), panel_of(a, &k, i), out);
            for (int lane = 0; lane < DI_TILE_LANES && !(wanted >> i & 1); lane++)
                out[lane] = -INFINITY;
        }
    }
}

/* ---- the best ---------------------------------------------------------------------------------------------------- */

/* An unsigned number that orders as the score does; the two zeros are one. */
static inline uint32_t rank_of(float score) {
    uint32_t bits = di_f32_bits(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline bool is_usable(float score) {
    return score > -INFINITY; /* false for NaN */
}

/* What the search for the last one that gets in finds: of the ranks under `mask`, all above `prefix` get in and `ties`
 * of those equal to it. */
typedef struct last_in {
    uint32_t prefix, mask;
    int64_t ties;
} last_in;

/* Of at least k usable scores, digit by digit from the top. */
static last_in radix_last(const float *s, int64_t n, int64_t k) {
    last_in last = {0, 0, k};
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t count[256] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t rank = rank_of(s[i]);
            if (is_usable(s[i]) && (rank & last.mask) == last.prefix)
                count[rank >> shift & 255]++;
        }
        uint32_t digit = 255;
        for (; last.ties > count[digit]; digit--)
            last.ties -= count[digit];
        last.prefix |= digit << shift;
        last.mask |= 255u << shift;
        if (last.ties == count[digit]) /* all of them get in: lower digits don't matter */
            break;
    }
    return last;
}

/* The k best of s, ascending, ties to the lower index, padded with -1. */
static void radix_best(const float *s, int64_t n, int32_t k, int32_t *out) {
    int64_t usable = 0;
    for (int64_t i = 0; i < n; i++)
        usable += is_usable(s[i]);
    bool is_all = usable <= k;
    last_in last = {0};
    if (!is_all && k > 0)
        last = radix_last(s, n, k);
    int32_t at = 0;
    for (int64_t i = 0; i < n && at < k; i++) {
        if (!is_usable(s[i]))
            continue;
        uint32_t rank = rank_of(s[i]) & last.mask;
        if (rank > last.prefix || is_all)
            out[at++] = (int32_t)i;
        else if (rank == last.prefix && last.ties > 0) {
            last.ties--;
            out[at++] = (int32_t)i;
        }
    }
    while (at < k)
        out[at++] = -1;
}

enum { KEPT_MAX = 4096, LOOK = 16 }; /* candidates for the best and groups, at most; scores looked at together */

/* A score that at least k scores reach, or the least finite one: the k-th largest of the maxima of 2*k groups. A group
 * is every (2*k)-th score, since large scores lie close together. */
static float limit_of(const float *s, int64_t n, int32_t k) {
    float maxima[KEPT_MAX];
    int64_t n_groups = 2 * (int64_t)k, usable = 0;
    if (n_groups > KEPT_MAX || n < 4 * n_groups)
        return -FLT_MAX;
    for (int64_t g = 0; g < n_groups; g++)
        maxima[g] = -INFINITY;
    for (int64_t from = 0; from < n; from += n_groups) {
        for (int64_t g = 0; g < DI_MIN(n_groups, n - from); g++)
            maxima[g] = s[from + g] > maxima[g] ? s[from + g] : maxima[g]; /* false for NaN */
    }
    for (int64_t g = 0; g < n_groups; g++)
        usable += is_usable(maxima[g]);
    if (usable < k)
        return -FLT_MAX;
    uint32_t least = radix_last(maxima, n_groups, k).prefix, least_finite = 0x00800000u;
    return least <= least_finite ? -FLT_MAX : di_f32_from_bits(least & 0x80000000u ? least ^ 0x80000000u : ~least);
}

/* The same as radix_best: the scores that reach limit_of are few, and the best are among them. */
static void panel_best(const float *s, int64_t n, int32_t k, int32_t *out) {
    int32_t kept[KEPT_MAX + LOOK];
    float scores[KEPT_MAX];
    int64_t count = 0;
    float limit = k > 0 ? limit_of(s, n, k) : -FLT_MAX;
    if (limit == -FLT_MAX) {
        radix_best(s, n, k, out);
        return;
    }
    for (int64_t i = 0; i < n && count < KEPT_MAX; i += LOOK) {
        int64_t end = DI_MIN(i + LOOK, n);
        int is_any = end - i < LOOK;
        for (int l = 0; l < LOOK && i + LOOK <= n; l++)
            is_any |= s[i + l] >= limit;
        for (int64_t e = i; e < end && is_any; e++) {
            kept[count] = (int32_t)e;
            count += s[e] >= limit;
        }
    }
    if (count >= KEPT_MAX) {
        radix_best(s, n, k, out);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        scores[i] = s[kept[i]];
    radix_best(scores, count, k, out);
    for (int32_t i = 0; i < k && out[i] >= 0; i++)
        out[i] = kept[out[i]];
}

static void block_max(const float *s, int64_t n, int64_t block, float *out) {
    for (int64_t b = 0; b * block < n; b++) {
        float most = -INFINITY;
        for (int64_t e = b * block; e < DI_MIN((b + 1) * block, n); e++)
            most = s[e] > most ? s[e] : most;
        out[b] = most;
    }
}
