/* Rows of a step for the operation sample_rows: parameters as numbers, lists side by side in one array of words.
 *
 * A row says what di_sample would read of its arguments, so that the same call gives the same token on the host and on
 * a device. What is settled by the parameters alone is settled here: which entries of a history can change a logit,
 * ids that are outside the vocabulary, whether an end mark may come. Rows of one sequence follow each other and share
 * their lists; masks are each row's own. */
#include "sample.h"

#include <float.h>

#define WORDS_MIN 1024
#define MARK 0x80000000u

_Static_assert(sizeof(di_sample_top) == sizeof(di_logprob) &&
                   offsetof(di_sample_top, logprob) == offsetof(di_logprob, logprob),
               "lists of the best are downloaded where they belong");
_Static_assert(sizeof(di_sample_row) % sizeof(uint32_t) == 0, "words follow the rows");

void di_sample_pack_deinit(di_sample_pack *pack) {
    free(pack->memory);
    *pack = (di_sample_pack){0};
}

static uint32_t *words_of(const di_sample_pack *pack) {
    return (uint32_t *)(void *)(pack->memory + di_sample_pack_words_at(pack));
}

/* Room for n more words. */
static di_status reserve(di_sample_pack *pack, size_t n, di_error *err) {
    size_t n_words, bytes;
    if (!di_size_add(&n_words, (size_t)pack->n_words, n) || n_words > INT32_MAX ||
        !di_size_mul(&bytes, n_words, sizeof(uint32_t)) || !di_size_add(&bytes, bytes, di_sample_pack_words_at(pack)))
        return di_fail(err, DI_ERR_MEMORY, "lists of a step's rows: %zu words more", n);
    if (bytes <= pack->cap)
        return DI_OK;
    size_t cap = DI_MAX(bytes, 2 * pack->cap);
    uint8_t *memory = realloc(pack->memory, cap);
    if (!memory)
        return di_fail(err, DI_ERR_MEMORY, "rows of a step: %zu bytes", cap);
    pack->memory = memory;
    pack->cap = cap;
    return DI_OK;
}

di_status di_sample_pack_begin(di_sample_pack *pack, int32_t rows_max, int64_t n_vocab, di_error *err) {
    *pack = (di_sample_pack){.memory = pack->memory, .cap = pack->cap, .n_vocab = n_vocab, .rows_max = rows_max};
    return reserve(pack, WORDS_MIN, err);
}

/* The next word; there is room for it. */
static void put(di_sample_pack *pack, uint32_t word) {
    words_of(pack)[pack->n_words++] = word;
}

static bool is_in_vocab(const di_sample_pack *pack, int32_t token) {
    return token >= 0 && token < pack->n_vocab;
}

/* ---- lists ---- */

typedef struct pair {
    uint32_t id, value;
} pair;

static bool is_sorted(const pair *pairs, size_t n) {
    for (size_t i = 1; i < n; i++) {
        if (pairs[i - 1].id > pairs[i].id)
            return false;
    }
    return true;
}

/* Merges the sorted runs [at, middle) and [middle, end) of `from` into `to`; of equal ids the left one goes first. */
static void merge(const pair *from, pair *to, size_t at, size_t middle, size_t end) {
    size_t left = at, right = middle;
    for (; at < end; at++)
        to[at] = right == end || (left < middle && from[left].id <= from[right].id) ? from[left++] : from[right++];
}

/* Pairs [n] by rising id, those of an id in their order; there is room for as many behind them. */
static void sort_pairs(pair *pairs, size_t n) {
    pair *from = pairs, *to = pairs + n;
    for (size_t run = 1; run < n; run *= 2) {
        for (size_t at = 0; at < n; at += 2 * run)
            merge(from, to, at, DI_MIN(at + run, n), DI_MIN(at + 2 * run, n));
        pair *swap = from;
        from = to;
        to = swap;
    }
    if (from != pairs)
        memcpy(pairs, from, n * sizeof *pairs);
}

static di_status put_bias(di_sample_pack *pack, const di_sampling *s, di_error *err) {
    di_status st = reserve(pack, 4 * s->n_bias, err); /* twice: to sort them */
    if (st)
        return st;
    pack->bias_at = pack->n_words;
    pair *pairs = (pair *)(void *)(words_of(pack) + pack->bias_at);
    size_t n = 0;
    for (size_t i = 0; i < s->n_bias; i++) {
        if (is_in_vocab(pack, s->bias_ids[i]))
            pairs[n++] = (pair){(uint32_t)s->bias_ids[i], di_f32_bits(s->bias_values[i])};
    }
    if (!is_sorted(pairs, n))
        sort_pairs(pairs, n);
    pack->n_bias = (int32_t)n;
    pack->n_words += 2 * (int32_t)n;
    return DI_OK;
}

/* What an end mark or a stop token is as long as it may not come. Few stand in a list, many are taken off the row's
 * mask. */
static size_t n_forbidden(const di_sample_args *a) {
    const di_sampling *s = a->sampling;
    return a->n_output < s->min_tokens ? s->n_stop_tokens + (a->eos_id >= 0) : 0;
}

static di_status put_forbidden(di_sample_pack *pack, const di_sample_args *a, di_error *err) {
    const di_sampling *s = a->sampling;
    di_status st = reserve(pack, n_forbidden(a), err);
    if (st)
        return st;
    pack->forbid_at = pack->n_words;
    if (is_in_vocab(pack, a->eos_id))
        put(pack, (uint32_t)a->eos_id);
    for (size_t i = 0; i < s->n_stop_tokens; i++) {
        if (is_in_vocab(pack, s->stop_tokens[i]))
            put(pack, (uint32_t)s->stop_tokens[i]);
    }
    pack->n_forbid = pack->n_words - pack->forbid_at;
    return DI_OK;
}

static di_status put_mask(di_sample_pack *pack, const di_sample_args *a, bool takes_forbidden, int32_t *at,
                          di_error *err) {
    size_t n = (size_t)DI_CEIL_DIV(pack->n_vocab, 32);
    di_status st = reserve(pack, n, err);
    if (st)
        return st;
    uint32_t *mask = words_of(pack) + pack->n_words;
    if (a->mask)
        memcpy(mask, a->mask, n * sizeof *mask);
    else
        memset(mask, 0xFF, n * sizeof *mask);
    *at = pack->n_words;
    pack->n_words += (int32_t)n;
    if (!takes_forbidden)
        return DI_OK;
    if (is_in_vocab(pack, a->eos_id))
        mask[a->eos_id / 32] &= ~(1u << (a->eos_id % 32));
    for (size_t i = 0; i < a->sampling->n_stop_tokens; i++) {
        int32_t id = a->sampling->stop_tokens[i];
        if (is_in_vocab(pack, id))
            mask[id / 32] &= ~(1u << (id % 32));
    }
    return DI_OK;
}

/* Whether the penalties do anything with an entry that no draft adds to. */
static bool is_counted(const di_sampling *s, const di_history_entry *e) {
    return e->n_output > 0 || (e->is_in_prompt && s->repetition_penalty != 1.0);
}

static di_status put_history(di_sample_pack *pack, const di_sampling *s, const di_history *h, di_error *err) {
    di_status st = reserve(pack, 2 * h->n, err);
    if (st)
        return st;
    pack->history_at = pack->n_words;
    uint32_t *at = words_of(pack) + pack->n_words;
    for (size_t i = 0; i < h->n; i++) {
        const di_history_entry *e = &h->entries[i];
        if (!is_counted(s, e) || !is_in_vocab(pack, e->token))
            continue;
        *at++ = (uint32_t)e->token | (e->is_in_prompt ? MARK : 0);
        *at++ = (uint32_t)e->n_output;
    }
    pack->n_words = (int32_t)(at - words_of(pack));
    pack->n_history = (pack->n_words - pack->history_at) / 2;
    return DI_OK;
}

static di_status put_drafts(di_sample_pack *pack, const di_sample_args *a, di_sample_row *row, di_error *err) {
    di_status st = reserve(pack, (size_t)a->n_drafts, err);
    if (st)
        return st;
    row->drafts_at = pack->n_words;
    for (int32_t i = 0; i < a->n_drafts; i++) {
        const di_history_entry *e = a->history ? di_history_find(a->history, a->drafts[i]) : NULL;
        if (is_in_vocab(pack, a->drafts[i]))
            put(pack, (uint32_t)a->drafts[i] | (e && is_counted(a->sampling, e) ? MARK : 0));
    }
    row->n_drafts = pack->n_words - row->drafts_at;
    return DI_OK;
}

/* Bias and penalties. */
static di_status put_changes(di_sample_pack *pack, const di_sample_args *a, di_sample_row *row, di_error *err) {
    const di_sampling *s = a->sampling;
    di_status st = DI_OK;
    if (pack->bias_of != s) {
        st = put_bias(pack, s, err);
        pack->bias_of = s;
    }
    row->bias_at = pack->bias_at;
    row->n_bias = pack->n_bias;
    if (!st && di_sampling_needs_history(s)) {
        if (a->history && (pack->history_of != a->history || pack->counted_by != s)) {
            st = put_history(pack, s, a->history, err);
            pack->history_of = a->history;
            pack->counted_by = s;
        }
        row->history_at = pack->history_at;
        row->n_history = a->history ? pack->n_history : 0;
        if (!st)
            st = put_drafts(pack, a, row, err);
        /* A repetition beyond single precision becomes the nearest that still multiplies and divides. */
        row->presence = (float)s->presence_penalty;
        row->frequency = (float)s->frequency_penalty;
        row->repetition = (float)DI_MAX(FLT_MIN, DI_MIN(FLT_MAX, s->repetition_penalty));
    }
    if (row->n_bias + row->n_history + row->n_drafts > 0)
        row->changed_at = pack->n_changed++;
    return st;
}

static di_status put_masks(di_sample_pack *pack, const di_sample_args *a, di_sample_row *row, di_error *err) {
    size_t n = n_forbidden(a);
    bool is_long = n > DI_SAMPLE_FORBID_MAX;
    di_status st = DI_OK;
    if (a->mask || is_long)
        st = put_mask(pack, a, is_long, &row->mask_at, err);
    if (st || is_long || n == 0)
        return st;
    if (pack->forbid_of != a->sampling) {
        st = put_forbidden(pack, a, err);
        pack->forbid_of = a->sampling;
    }
    row->forbid_at = pack->forbid_at;
    row->n_forbid = pack->n_forbid;
    return st;
}

/* ---- rows ---- */

static di_sample_row row_of(int64_t logits_row, int64_t top_at) {
    return (di_sample_row){
        .temperature = 1.0,
        .top_p = 1.0,
        .top_at = top_at,
        .logits_row = (int32_t)logits_row,
        .mask_at = -1,
        .changed_at = -1,
        .repetition = 1.0f,
    };
}

static void add_row(di_sample_pack *pack, const di_sample_row *row) {
    DI_ASSERT(pack->n_rows < pack->rows_max);
    ((di_sample_row *)(void *)pack->memory)[pack->n_rows++] = *row;
    pack->n_top = DI_MAX(pack->n_top, row->top_at + row->n_top);
}

static void set_parameters(di_sample_row *row, const di_sample_args *a, const di_sample_how *how) {
    const di_sampling *s = a->sampling;
    row->seed = a->seed;
    row->position = a->position;
    if (di_sampling_is_greedy(s)) {
        row->temperature = DI_SAMPLE_GREEDY_TEMPERATURE;
        row->flags |= DI_SAMPLE_GREEDY;
    } else {
        row->temperature = s->temperature;
        row->top_p = s->top_p;
        row->top_k = (int32_t)DI_MAX(DI_MIN(s->top_k, (int64_t)INT32_MAX), 0);
        row->min_p = s->min_p;
    }
    if (!how)
        return;
    row->rule = how->rule;
    row->u = how->u;
    row->u_test = how->u_test;
    row->token = how->draft;
    row->ln_q = how->ln_q;
    row->ln_p = how->ln_p;
}

di_status di_sample_pack_add(di_sample_pack *pack, const di_sample_args *a, const di_sample_how *how,
                             int64_t logits_row, int64_t top_at, di_error *err) {
    const di_sampling *s = a->sampling;
    bool has_logprobs = s->n_logprobs >= 0 && (a->logprob || a->top), is_given = a->forced >= 0;
    di_sample_row row = row_of(logits_row, top_at);
    set_parameters(&row, a, how);
    if (has_logprobs) {
        row.flags |= DI_SAMPLE_LOGPROBS | (s->logprobs_processed ? DI_SAMPLE_PROCESSED : 0);
        row.n_top = a->top ? s->n_logprobs : 0;
    }
    if (is_given) {
        row.rule = DI_SAMPLE_GIVEN;
        row.token = a->forced;
    }
    di_status st = DI_OK;
    /* A given token asks for nothing but what its log-probabilities do. */
    if (!is_given || has_logprobs)
        st = put_masks(pack, a, &row, err);
    if (!st && (!is_given || (has_logprobs && s->logprobs_processed)))
        st = put_changes(pack, a, &row, err);
    if (!st)
        add_row(pack, &row);
    return st;
}

void di_sample_pack_prompt(di_sample_pack *pack, int32_t token, int32_t n_top, int64_t logits_row, int64_t top_at) {
    di_sample_row row = row_of(logits_row, top_at);
    row.rule = DI_SAMPLE_GIVEN;
    row.flags = DI_SAMPLE_LOGPROBS | DI_SAMPLE_UNLISTED;
    row.token = token;
    row.n_top = n_top;
    add_row(pack, &row);
}
