/* Core attention by tiles, at the width of the level that includes this; bit for bit ref_attention.c.
 *
 * Keys are decoded once and kept twice: as columns of panels for the scores (lanes are keys), as rows of panels for the
 * sum over keys (lanes are values); all heads use them. Window keys lie at slots [0, n_window), listed entries from the
 * next multiple of 8 on.
 *
 *     many rows: a part is a few consecutive rows, which share the window keys that they have in common, and the listed
 *                entries that stand at the same place of their lists
 *     few rows:  row after row; first the parts decode 32 keys each, then each part computes 4 heads
 *
 * A score panel may reach over the ends of a row's window: those lanes are computed and not used. Included after
 * lanes_<level>.h of a level with at most 8 lanes. */
#include "act_body.h"
#include "attention.h"
#include "exp_body.h"
#include "tile_body.h"

#define ROWS_PER_PART 8
#define KEYS_PER_PART 32
/* Few rows: below this many, provided that a row is worth several parts. */
#define SPLIT_ROWS_MAX 32
#define SPLIT_WORK_MIN (2 << 20)

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

typedef struct sizes {
    int64_t d, heads; /* heads padded to a multiple of 4 */
    int64_t cap;      /* key slots */
    int64_t lds;      /* floats between the score rows of two heads */
} sizes;

static sizes sizes_of(int64_t keys_max, int64_t n_heads, int64_t d) {
    sizes z;
    z.d = d;
    z.heads = DI_ROUND_UP(n_heads, DI_TILE_ROWS);
    /* Two regions, each rounded up to whole panels, and the window keys that a part's further rows add. */
    z.cap = DI_ROUND_UP(keys_max, DI_TILE_LANES) + 2 * DI_TILE_LANES + ROWS_PER_PART;
    /* The window's panels may begin and end up to 7 keys outside it, the entries' panels end so. */
    z.lds = DI_ROUND_UP(keys_max, DI_TILE_LANES) + 3 * DI_TILE_LANES;
    return z;
}

/* Decoded keys. */
typedef struct key_set {
    float *columns, *rows; /* panels, see above: [cap/8][d][8], [d/8][cap][8] */
    float *buf;            /* [d], of the worker */
} key_set;

static size_t key_bytes(const sizes *z) {
    return 2 * di_cpu_piece((size_t)(z->cap * z->d) * sizeof(float));
}
static size_t head_bytes(const sizes *z, int64_t heads) {
    return di_cpu_piece((size_t)(heads * z->d) * sizeof(float)) +
           di_cpu_piece((size_t)(heads * z->lds) * sizeof(float)) + di_cpu_piece((size_t)heads * sizeof(float));
}
static size_t buf_bytes(const sizes *z) {
    return di_cpu_piece((size_t)z->d * sizeof(float));
}
static size_t held_bytes(const sizes *z) {
    return di_cpu_piece((size_t)z->cap * sizeof(int32_t));
}

static di_cpu_need need_of(const di_limits *limits) {
    sizes z = sizes_of(limits->keys_max, limits->n_heads, limits->head_dim);
    return (di_cpu_need){key_bytes(&z) + held_bytes(&z),
                         key_bytes(&z) + head_bytes(&z, z.heads) + buf_bytes(&z) + held_bytes(&z)};
}

static key_set key_set_take(uint8_t **at, const sizes *z) {
    key_set keys;
    keys.columns = di_cpu_take(at, (size_t)(z->cap * z->d) * sizeof(float));
    keys.rows = di_cpu_take(at, (size_t)(z->cap * z->d) * sizeof(float));
    keys.buf = NULL;
    return keys;
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

typedef struct job {
    di_stream *stream;
    const di_attention_args *a;
    sizes z;
    /* the row at work, few rows only */
    key_set keys;
    int32_t *entries; /* its listed entries without gaps */
    int64_t row, n_main;
} job;

static void put_key(const key_set *keys, const sizes *z, int64_t slot) {
    di_panel_put_column(keys->columns, slot, z->d, keys->buf);
    di_panel_put_row(keys->rows, z->cap, slot, z->d, keys->buf);
}

static void put_window_key(const job *j, const key_set *keys, int32_t seq, int32_t pos, int64_t slot) {
    const di_attention_args *a = j->a;
    size_t record_bytes = di_kv_record_bytes(a->win_format, j->z.d);
    const uint8_t *record = di_cpu_window_at(a->rows, a->records, record_bytes, &a->ring, seq, pos);
    di_kv_decode(a->win_format, record, record + di_kv_data_bytes(a->win_format, j->z.d), j->z.d, keys->buf);
    put_key(keys, &j->z, slot);
}

static void put_entry(const job *j, const key_set *keys, int32_t seq, int32_t entry, int64_t slot) {
    di_cpu_entry_load(j->a->rows, &j->a->main, seq, entry, keys->buf);
    put_key(keys, &j->z, slot);
}

/* ---- heads ------------------------------------------------------------------------------------------------------- */

/* The keys of one row: window slots [first, first + n_window), entry slots [main, main + n_main). */
typedef struct row_keys {
    int64_t first, n_window, main, n_main;
} row_keys;

/* Where the scores of a head lie in its score row: whole panels of the window, then of the entries. */
typedef struct score_place {
    int64_t panel0, n_panels; /* window panels */
    int64_t window, main;     /* first score of each */
} score_place;

static score_place score_place_of(const row_keys *rk) {
    score_place sp;
    sp.panel0 = rk->first / DI_TILE_LANES;
    sp.n_panels = rk->n_window ? DI_CEIL_DIV(rk->first + rk->n_window, DI_TILE_LANES) - sp.panel0 : 0;
    sp.window = rk->first - sp.panel0 * DI_TILE_LANES;
    sp.main = sp.n_panels * DI_TILE_LANES;
    return sp;
}

/* s[h][8*i + lane] = (q[h] . key) * scale for n_panels panels. */
static void make_scores(const sizes *z, int64_t heads, const float *q, const float *panels, int64_t n_panels,
                        float scale, float *s) {
    for (int64_t i = 0; i < n_panels; i++) {
        const float *panel = panels + i * z->d * DI_TILE_LANES;
        for (int64_t h = 0; h < heads; h += DI_TILE_ROWS) {
            di_tile t;
            di_tile_dots(q + h * z->d, z->d, panel, z->d, &t);
            for (int r = 0; r < DI_TILE_ROWS; r++) {
                float *out = s + (h + r) * z->lds + i * DI_TILE_LANES;
                for (int l = 0; l < DI_TILE_VECS; l++)
                    di_v_store(out + l * DI_LANES, t.v[r][l] * di_v_splat(scale));
            }
        }
    }
}

static float max_of(const float *s, int64_t n, float most) {
    di_v lanes = di_v_splat(most);
    int64_t k = 0;
    for (; k + DI_LANES <= n; k += DI_LANES)
        lanes = di_v_max(di_v_load(s + k), lanes);
    for (; k < n; k++)
        most = s[k] > most ? s[k] : most;
    for (int i = 0; i < DI_LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
}

static void exp_of(float *s, int64_t n, float most) {
    int64_t k = 0;
    for (; k + DI_LANES <= n; k += DI_LANES)
        di_v_store(s + k, di_v_exp(di_v_load(s + k) - di_v_splat(most)));
    for (; k < n; k++)
        s[k] = di_expf_inline(s[k] - most);
}

/* Scores of 4 heads to exponentials, and their sums. The 4 sums run side by side: each waits for its last addition. */
static void make_exps(const job *j, const row_keys *rk, const score_place *sp, int64_t head, float *s, float *sum) {
    const di_attention_args *a = j->a;
    int64_t lds = j->z.lds;
    float add[DI_TILE_ROWS] = {0}, last[DI_TILE_ROWS] = {0};
    for (int r = 0; r < DI_TILE_ROWS && head + r < a->n_heads; r++) {
        float *window = s + r * lds + sp->window, *main = s + r * lds + sp->main;
        float most = max_of(main, rk->n_main, max_of(window, rk->n_window, a->sink[head + r]));
        exp_of(window, rk->n_window, most);
        exp_of(main, rk->n_main, most);
        last[r] = di_expf_inline(a->sink[head + r] - most);
    }
    for (int64_t k = sp->window; k < sp->window + rk->n_window; k++) {
        for (int r = 0; r < DI_TILE_ROWS; r++)
            add[r] += s[r * lds + k];
    }
    for (int64_t k = sp->main; k < sp->main + rk->n_main; k++) {
        for (int r = 0; r < DI_TILE_ROWS; r++)
            add[r] += s[r * lds + k];
    }
    for (int r = 0; r < DI_TILE_ROWS; r++)
        sum[r] = add[r] + last[r];
}

/* out[h] = sum over keys of s[h][key]*key, divided by sum[h]. */
static void make_values(const sizes *z, int64_t heads, const float *s, const float *sum, const key_set *keys,
                        const row_keys *rk, const score_place *sp, float *out) {
    for (int64_t c = 0; c < z->d; c += DI_TILE_LANES) {
        const float *panel = keys->rows + c * z->cap;
        for (int64_t h = 0; h < heads; h += DI_TILE_ROWS) {
            const float *p = s + h * z->lds;
            di_tile t;
            memset(&t, 0, sizeof t);
            di_tile_mac(&t, p + sp->window, z->lds, panel + rk->first * DI_TILE_LANES, rk->n_window, 1);
            di_tile_mac(&t, p + sp->main, z->lds, panel + rk->main * DI_TILE_LANES, rk->n_main, 1);
            for (int r = 0; r < DI_TILE_ROWS; r++) {
                for (int l = 0; l < DI_TILE_VECS; l++)
                    di_v_store(out + (h + r) * z->d + c + l * DI_LANES, t.v[r][l] / di_v_splat(sum[h + r]));
            }
        }
    }
}

/* Heads [head, head + heads) of a row, heads a multiple of 4 that may reach beyond the last head. at: scratch. */
static void attend(const job *j, int64_t row, int64_t head, int64_t heads, const key_set *keys, const row_keys *rk,
                   uint8_t *at) {
    const di_attention_args *a = j->a;
    const sizes *z = &j->z;
    float *q = di_cpu_take(&at, (size_t)(heads * z->d) * sizeof(float)); /* queries, then outputs */
    float *s = di_cpu_take(&at, (size_t)(heads * z->lds) * sizeof(float));
    float *sum = di_cpu_take(&at, (size_t)heads * sizeof(float));
    int64_t n = DI_MIN(heads, a->n_heads - head) * z->d;
    if (rk->n_window + rk->n_main == 0) {
        memset(q, 0, (size_t)n * sizeof(float));
        row_store(&a->out, row, head * z->d, n, q);
        return;
    }
    row_load(&a->q, row, head * z->d, n, q);
    memset(q + n, 0, (size_t)(heads * z->d - n) * sizeof(float));
    score_place sp = score_place_of(rk);
    make_scores(z, heads, q, keys->columns + sp.panel0 * DI_TILE_LANES * z->d, sp.n_panels, a->scale, s);
    make_scores(z, heads, q, keys->columns + rk->main * z->d, DI_CEIL_DIV(rk->n_main, DI_TILE_LANES), a->scale,
                s + sp.main);
    for (int64_t h = 0; h < heads; h += DI_TILE_ROWS)
        make_exps(j, rk, &sp, head + h, s + h * z->lds, sum + h);
    make_values(z, heads, s, sum, keys, rk, &sp, q);
    for (int64_t h = 0; h * z->d < n; h++)
        di_cpu_unrotate(a, row, q + h * z->d);
    row_store(&a->out, row, head * z->d, n, q);
}

/* ---- many rows --------------------------------------------------------------------------------------------------- */

/* Rows [row, end) of one sequence whose windows together fit the slots: computes them. */
static void attend_group(const job *j, int64_t row, int64_t end, int32_t lo, int32_t hi, const key_set *keys,
                         int32_t *held, uint8_t *at) {
    const di_attention_args *a = j->a;
    const di_rows *rows = a->rows;
    int32_t seq = rows->seq[row];
    for (int32_t pos = lo; pos < hi; pos++)
        put_window_key(j, keys, seq, pos, pos - lo);
    row_keys rk;
    rk.main = DI_ROUND_UP(hi - lo, DI_TILE_LANES);
    int64_t n_held = 0; /* held[i]: the entry that slot main + i has */
    for (; row < end; row++) {
        rk.n_window = DI_MAX(rows->win_hi[row] - rows->win_lo[row], 0);
        rk.first = rk.n_window ? rows->win_lo[row] - lo : 0;
        rk.n_main = 0;
        for (int32_t t = 0; a->idx && t < a->topk; t++) {
            int32_t entry = a->idx[row * a->topk + t];
            if (entry < 0)
                continue;
            int64_t i = rk.n_main++;
            if (i < n_held && held[i] == entry)
                continue;
            put_entry(j, keys, seq, entry, rk.main + i);
            held[i] = entry;
            n_held = DI_MAX(n_held, i + 1);
        }
        attend(j, row, 0, j->z.heads, keys, &rk, at);
    }
}

static void rows_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_rows *rows = j->a->rows;
    uint8_t *at = di_cpu_worker(j->stream, worker);
    key_set keys = key_set_take(&at, &j->z);
    keys.buf = di_cpu_take(&at, (size_t)j->z.d * sizeof(float));
    int32_t *held = di_cpu_take(&at, (size_t)j->z.cap * sizeof(int32_t));
    int64_t topk = j->a->idx ? DI_ROUND_UP(j->a->topk, DI_TILE_LANES) : 0;
    int64_t row = part * ROWS_PER_PART, end = DI_MIN(row + ROWS_PER_PART, (int64_t)rows->n_rows);
    while (row < end) {
        int32_t lo = 0, hi = 0; /* union of the group's windows */
        int64_t next = row;
        for (; next < end && rows->seq[next] == rows->seq[row]; next++) {
            int32_t l = rows->win_lo[next], h = rows->win_hi[next];
            if (l >= h)
                continue;
            if (lo < hi) {
                l = DI_MIN(l, lo);
                h = DI_MAX(h, hi);
                if (DI_ROUND_UP((int64_t)h - l, DI_TILE_LANES) + topk > j->z.cap)
                    break;
            }
            lo = l;
            hi = h;
        }
        attend_group(j, row, next, lo, hi, &keys, held, at);
        row = next;
    }
}

/* ---- few rows ---------------------------------------------------------------------------------------------------- */

static void keys_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_rows *rows = j->a->rows;
    key_set keys = j->keys;
    keys.buf = (float *)(void *)di_cpu_worker(j->stream, worker);
    int32_t seq = rows->seq[j->row], lo = rows->win_lo[j->row];
    int64_t n_window = DI_MAX(rows->win_hi[j->row] - lo, 0), main = DI_ROUND_UP(n_window, DI_TILE_LANES);
    int64_t end = DI_MIN((part + 1) * KEYS_PER_PART, main + j->n_main);
    for (int64_t slot = part * KEYS_PER_PART; slot < end; slot++) {
        if (slot < n_window)
            put_window_key(j, &keys, seq, lo + (int32_t)slot, slot);
        else if (slot >= main)
            put_entry(j, &keys, seq, j->entries[slot - main], slot);
    }
}

static void heads_part(void *ctx, int64_t part, int64_t n_parts, int worker) {
    (void)n_parts;
    const job *j = ctx;
    const di_rows *rows = j->a->rows;
    row_keys rk;
    rk.first = 0;
    rk.n_window = DI_MAX(rows->win_hi[j->row] - rows->win_lo[j->row], 0);
    rk.main = DI_ROUND_UP(rk.n_window, DI_TILE_LANES);
    rk.n_main = j->n_main;
    attend(j, j->row, part * DI_TILE_ROWS, DI_TILE_ROWS, &j->keys, &rk, di_cpu_worker(j->stream, worker));
}

static void split_rows(job *j) {
    const di_attention_args *a = j->a;
    uint8_t *at = di_cpu_shared(j->stream);
    j->keys = key_set_take(&at, &j->z);
    j->entries = di_cpu_take(&at, (size_t)j->z.cap * sizeof(int32_t));
    for (j->row = 0; j->row < a->rows->n_rows; j->row++) {
        j->n_main = 0;
        for (int32_t t = 0; a->idx && t < a->topk; t++) {
            int32_t entry = a->idx[j->row * a->topk + t];
            if (entry >= 0)
                j->entries[j->n_main++] = entry;
        }
        int64_t n_window = DI_MAX(a->rows->win_hi[j->row] - a->rows->win_lo[j->row], 0);
        int64_t n_slots = DI_ROUND_UP(n_window, DI_TILE_LANES) + j->n_main;
        di_cpu_run(j->stream, keys_part, j, DI_CEIL_DIV(n_slots, KEYS_PER_PART), n_slots * j->z.d * 4);
        di_cpu_run(j->stream, heads_part, j, j->z.heads / DI_TILE_ROWS, 2 * n_slots * j->z.heads * j->z.d);
    }
}

/* ---- the operation ----------------------------------------------------------------------------------------------- */

static di_status attention(di_stream *stream, const di_attention_args *a) {
    if (!di_cpu_attention_fits(stream, a))
        return DI_ERR_SHAPE;
    int64_t keys_max = stream->dev->limits.keys_max, n_rows = a->rows->n_rows;
    job j = {.stream = stream, .a = a, .z = sizes_of(keys_max, a->n_heads, a->head_dim)};
    di_cpu_need need = need_of(&stream->dev->limits);
    if (!di_cpu_scratch_fits(stream, need.shared, need.worker))
        return DI_ERR_SHAPE;
    int64_t row_work = 2 * keys_max * j.z.heads * j.z.d;
    if (n_rows < SPLIT_ROWS_MAX && row_work >= SPLIT_WORK_MIN)
        split_rows(&j);
    else
        di_cpu_run(stream, rows_part, &j, DI_CEIL_DIV(n_rows, ROWS_PER_PART), n_rows * row_work);
    return DI_OK;
}

void DI_INSTALL(attention)(di_cpu_kernels *k) {
    k->attention = attention;
}
