/* The plan of a step: how many drafts of each sequence are verified (spec.h).
 *
 * Drafts of all sequences become elements of 64 bits: what they are sorted by, falling, above their sequence and draft.
 * Elements are made in the order of sequence and draft, and both sorts are stable, so ties go to the lower index. A
 * radix sort is what makes some hundred sequences a matter of microseconds; below some dozens of elements, insertion
 * is faster than clearing its counts. */
#include <math.h>

#include "spec.h"

#define DRAFT_BITS 4 /* of an element's low bits; the sequence is above */
#define KEY_SHIFT 32
#define DIGITS_MAX 3
#define DIGIT_BITS_MAX 10
#define INSERTION_MAX 48

#define WORTH_BITS 16     /* of a worth's key, in fixed point: two digits */
#define PASSES_MAX 8      /* over the rate; one to three are usual */
#define WORTH_EPS 1e-3    /* an order of worths that may be wrong by less is kept */
#define TIMID_CHANCE 0.8f /* while the cost model is not ready */
#define TIMID_DRAFTS 2
#define TIMID_SEQS 4
#define PLAIN_GAIN_UNSEEN 2.0 /* no more can be saved, as the model has it */
#define PLAIN_GAIN 1.25
#define PLAIN_EVERY 1024
#define PLAIN_WAIT 64

_Static_assert(DI_SPEC_DRAFTS_MAX <= 1 << DRAFT_BITS, "a draft's index fits its bits");
_Static_assert(DI_SPEC_SEQS_MAX <= 1 << (KEY_SHIFT - DRAFT_BITS), "an element's index fits below its key");

typedef struct plan_scratch {
    uint64_t *elements, *spare; /* [n_seqs * K] */
    float *chances;             /* [n_seqs * K] */
} plan_scratch;

size_t di_spec_scratch_bytes(int32_t n_seqs, int32_t n_drafts) {
    return (size_t)n_seqs * (size_t)n_drafts * (2 * sizeof(uint64_t) + sizeof(float));
}

static plan_scratch scratch_of(const di_spec_ask *ask) {
    size_t n = (size_t)ask->n_seqs * (size_t)ask->n_drafts;
    uint64_t *elements = ask->scratch;
    return (plan_scratch){elements, elements + n, (float *)(elements + 2 * n)};
}

static uint64_t element(uint32_t key, int32_t seq, int32_t draft) {
    return (uint64_t)key << KEY_SHIFT | (uint64_t)seq << DRAFT_BITS | (uint64_t)draft;
}

static int32_t seq_of(uint64_t e) {
    return (int32_t)((uint32_t)e >> DRAFT_BITS);
}

static int32_t draft_of(uint64_t e) {
    return (int32_t)(e & ((1u << DRAFT_BITS) - 1));
}

/* Stable, by rising key, whose low n_digits * digit_bits bits are what counts. Returns where the result is: elements or
 * spare. Inline, so that each use has its constants. */
static inline uint64_t *sort(const plan_scratch *s, size_t n, int n_digits, int digit_bits) {
    uint64_t *from = s->elements, *to = s->spare;
    if (n <= INSERTION_MAX) {
        for (size_t i = 1; i < n; i++) {
            uint64_t e = from[i];
            size_t j = i;
            for (; j > 0 && from[j - 1] >> KEY_SHIFT > e >> KEY_SHIFT; j--)
                from[j] = from[j - 1];
            from[j] = e;
        }
        return from;
    }
    uint32_t starts[DIGITS_MAX << DIGIT_BITS_MAX];
    const uint64_t mask = (1u << digit_bits) - 1;
    memset(starts, 0, sizeof *starts * ((size_t)n_digits << digit_bits));
    for (size_t i = 0; i < n; i++)
        for (int d = 0; d < n_digits; d++)
            starts[(size_t)d << digit_bits | (from[i] >> (KEY_SHIFT + d * digit_bits) & mask)]++;
    for (int d = 0; d < n_digits; d++) {
        uint32_t *start = starts + ((size_t)d << digit_bits), sum = 0;
        for (uint64_t k = 0; k <= mask; k++) {
            uint32_t count = start[k];
            start[k] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            to[start[from[i] >> (KEY_SHIFT + d * digit_bits) & mask]++] = from[i];
        uint64_t *t = from;
        from = to;
        to = t;
    }
    return from;
}

/* Key of a chance within 0..1 that sorts by falling value, exactly: the bits of such floats rise with them, and those
 * of 1.0 need 30 bits. */
static uint32_t exact_key(float chance) {
    uint32_t bits;
    memcpy(&bits, &chance, sizeof bits);
    return 0x3f800000u - bits;
}

static float sane(float confidence) {
    return confidence > 0 ? DI_MIN(confidence, 1.0f) : 0; /* NaN: 0 */
}

/* Drafts of a sequence that the step may verify. */
static int32_t drafts_of(const di_spec_ask *ask, const di_spec_seq *seq) {
    return seq->may_speculate ? DI_MAX(0, DI_MIN(seq->n_drafts, ask->n_drafts)) : 0;
}

static int64_t rows_for_drafts(const di_spec_ask *ask) {
    return DI_MAX(0, ask->rows_max - ask->n_seqs);
}

static int64_t context_without_drafts(const di_spec_ask *ask) {
    int64_t context = ask->other_context;
    for (int32_t i = 0; i < ask->n_seqs; i++)
        context += ask->seqs[i].n_context + 1;
    return context;
}

/* Context length of the row of a draft: the sequence's first row is one position before that of draft 0. */
static double context_of(const di_spec_seq *seq, int32_t draft) {
    return (double)(seq->n_context + draft + 2);
}

/* Fills the chances: of draft j and all before it, 0 past the drafts that a sequence has. */
static void fill_chances(const di_spec_ask *ask, const plan_scratch *s, float without_record) {
    for (int32_t i = 0; i < ask->n_seqs; i++) {
        const di_spec_seq *seq = &ask->seqs[i];
        float *chances = s->chances + (size_t)i * (size_t)ask->n_drafts;
        int32_t n = drafts_of(ask, seq);
        float chance = 1;
        for (int32_t j = 0; j < n; j++) {
            chance *= seq->confidence ? sane(seq->confidence[j]) : without_record;
            chances[j] = chance;
        }
        for (int32_t j = n; j < ask->n_drafts; j++)
            chances[j] = 0;
    }
}

static double tokens_of(const di_spec_ask *ask, const plan_scratch *s, const int32_t *n_verify, int64_t *n_drafts) {
    double tokens = ask->n_seqs;
    *n_drafts = 0;
    for (int32_t i = 0; i < ask->n_seqs; i++) {
        *n_drafts += n_verify[i];
        for (int32_t j = 0; j < n_verify[i]; j++)
            tokens += (double)s->chances[(size_t)i * (size_t)ask->n_drafts + (size_t)j];
    }
    return tokens;
}

/* ---- fixed, and before the cost model is ready --------------------------------------------------------------------
 */

static void plan_all(const di_spec_ask *ask, int32_t *n_verify) {
    int64_t left = rows_for_drafts(ask);
    for (int32_t j = 0; j < ask->n_drafts && left > 0; j++) {
        for (int32_t i = 0; i < ask->n_seqs && left > 0; i++) {
            if (drafts_of(ask, &ask->seqs[i]) > j) {
                n_verify[i]++;
                left--;
            }
        }
    }
}

static void plan_timid(const di_spec_ask *ask, const plan_scratch *s, int32_t *n_verify) {
    int64_t left = rows_for_drafts(ask);
    int32_t n_seqs = 0;
    for (int32_t i = 0; i < ask->n_seqs && n_seqs < TIMID_SEQS && left > 0; i++) {
        const float *chances = s->chances + (size_t)i * (size_t)ask->n_drafts;
        for (int32_t j = 0; j < DI_MIN(ask->n_drafts, TIMID_DRAFTS) && left > 0 && chances[j] >= TIMID_CHANCE; j++) {
            n_verify[i]++;
            left--;
        }
        n_seqs += n_verify[i] > 0;
    }
}

/* ---- cost ---------------------------------------------------------------------------------------------------------
 */

/* Time of the step as drafts are added: what does not depend on them, and the terms that do. */
typedef struct step_time {
    double fixed_ns;           /* all but experts, of the step without drafts */
    double row_ns, context_ns; /* of a draft's row; of a position of its context */
    double experts_ns;         /* of all experts of all layers */
    double untouched, keep;    /* share that the step without drafts leaves out; factor of a row */
    double first_ns;           /* that the first draft brings along */
    double least_ns;           /* of a draft's row in the fullest step, context apart: the least that a row takes */
} step_time;

static step_time step_time_of(const di_spec_ask *ask) {
    const di_spec_cost *c = ask->cost;
    const di_spec_experts *e = &c->step_experts;
    const double *coef = c->step.coef;
    double rows = (double)(ask->n_seqs + ask->other_rows);
    bool has_experts = e->n_layers > 0 && e->n_experts > 0 && e->n_chosen > 0;
    double all = has_experts ? e->n_layers * e->n_experts : 0;
    return (step_time){.fixed_ns =
                           ask->always_ns + coef[0] + coef[1] * rows + coef[3] * (double)context_without_drafts(ask),
                       .row_ns = coef[1],
                       .context_ns = coef[3],
                       .experts_ns = coef[2] * all,
                       .untouched = has_experts ? 1 - di_spec_experts_touched(e, rows) / all : 1,
                       .keep = has_experts ? DI_MAX(0, 1 - e->n_chosen / e->n_experts) : 1,
                       .first_ns = ask->drafts_ns};
}

/* Makes and sorts, by worth at the rate r, the elements that can be in the best plan: those worth at least what the
 * last row of the fullest step takes, at a rate that is within reach. (Time is concave in rows, so every draft of the
 * best plan is worth that much at the best rate; then it is at any lower one.) Returns where they are. */
static const uint64_t *sort_by_worth(const di_spec_ask *ask, const plan_scratch *s, const step_time *t, double r,
                                     double reached, size_t *n_elements) {
    const float top = (1 << WORTH_BITS) - 1;
    float context_cost = (float)(r * t->context_ns), least_cost = (float)(reached * t->context_ns);
    float least_row = (float)(reached * t->least_ns * (1 - 1e-6));
    size_t n = 0;
    for (int32_t i = 0; i < ask->n_seqs; i++) {
        const float *chances = s->chances + (size_t)i * (size_t)ask->n_drafts;
        float context = (float)context_of(&ask->seqs[i], 0);
        for (int32_t j = 0; j < ask->n_drafts && chances[j] > 0; j++, context++) {
            if (chances[j] < least_row + least_cost * context)
                break; /* the rest of the sequence is worth less still */
            float worth = chances[j] - context_cost * context;
            s->elements[n++] = element((uint32_t)(top - top * DI_MAX(worth, 0)), i, j);
        }
    }
    *n_elements = n;
    return sort(s, n, 2, WORTH_BITS / 2);
}

/* Of the plans that take elements from the front, the one of the largest rate, if that is above *tokens / *ns; the
 * number of its elements, else -1. */
static int64_t best_prefix(const di_spec_ask *ask, const plan_scratch *s, const step_time *t, const uint64_t *elements,
                           int64_t n, double *best_tokens, double *best_ns) {
    double tokens = ask->n_seqs, ns = t->fixed_ns + t->first_ns, untouched = t->untouched;
    int64_t at = -1;
    for (int64_t k = 0; k < n; k++) {
        int32_t i = seq_of(elements[k]), j = draft_of(elements[k]);
        tokens += (double)s->chances[(size_t)i * (size_t)ask->n_drafts + (size_t)j];
        ns += t->row_ns;
        if (t->context_ns > 0)
            ns += t->context_ns * context_of(&ask->seqs[i], j);
        untouched *= t->keep;
        double total_ns = ns + t->experts_ns * (1 - untouched);
        if (tokens * *best_ns > *best_tokens * total_ns) {
            at = k + 1;
            *best_tokens = tokens;
            *best_ns = total_ns;
        }
    }
    return at;
}

static void plan_cost(const di_spec_ask *ask, const plan_scratch *s, int32_t *n_verify, di_spec_plan *plan) {
    fill_chances(ask, s, 0.5f);
    if (!di_spec_cost_is_ready(ask->cost)) {
        plan_timid(ask, s, n_verify);
        plan->tokens = tokens_of(ask, s, n_verify, &plan->n_drafts);
        return;
    }
    step_time t = step_time_of(ask);
    double plain_ns = t.fixed_ns + t.experts_ns * (1 - t.untouched), plain_rate = ask->n_seqs / plain_ns;
    int64_t n_max = DI_MIN(rows_for_drafts(ask), (int64_t)ask->n_seqs * ask->n_drafts);
    t.least_ns = t.row_ns;
    if (t.experts_ns > 0 && n_max > 0)
        t.least_ns += t.experts_ns * t.untouched * pow(t.keep, (double)(n_max - 1)) * (1 - t.keep);
    int64_t low = INT64_MAX, high = 0;
    for (int32_t i = 0; i < ask->n_seqs; i++) {
        low = DI_MIN(low, ask->seqs[i].n_context);
        high = DI_MAX(high, ask->seqs[i].n_context);
    }
    double spread_ns = t.context_ns * (double)(high - low + ask->n_drafts);

    double tokens = ask->n_seqs, ns = plain_ns;
    double rate = ask->rate_hint > plain_rate ? ask->rate_hint : plain_rate;
    int64_t n_best = 0;
    for (int pass = 0; pass < PASSES_MAX && n_max > 0; pass++) {
        size_t n;
        const uint64_t *elements = sort_by_worth(ask, s, &t, rate, tokens / ns, &n);
        int64_t at = best_prefix(ask, s, &t, elements, DI_MIN((int64_t)n, n_max), &tokens, &ns);
        if (at >= 0) {
            memset(n_verify, 0, (size_t)ask->n_seqs * sizeof *n_verify);
            for (int64_t k = 0; k < at; k++)
                n_verify[seq_of(elements[k])]++;
            n_best = at;
        }
        double moved = fabs(tokens / ns - rate);
        rate = tokens / ns;
        if (moved * spread_ns <= WORTH_EPS)
            break;
    }
    if (n_best > 0 && rate <= plain_rate * (1 + ask->gain_min)) {
        memset(n_verify, 0, (size_t)ask->n_seqs * sizeof *n_verify);
        n_best = 0;
        tokens = ask->n_seqs;
        ns = plain_ns;
    }
    plan->n_drafts = n_best;
    plan->tokens = tokens;
    plan->ns = ns;
    plan->plain_ns = plain_ns;
    double draft_ns = n_best > 0 ? (ns - plain_ns) / (double)n_best
                                 : t.row_ns + t.context_ns * ((double)low + 2) +
                                       t.experts_ns * t.untouched * (1 - t.keep) + t.first_ns;
    plan->tokens_per_draft = plain_rate * draft_ns;
}

/* ---- the released engine's ----------------------------------------------------------------------------------------
 */

/* Elements of the cumulative products of one of the two rounds, sorted; a sequence without a record has 1 for each
 * draft that it has. Returns where they are; their chances are in s->chances. */
static const uint64_t *sort_rates(const di_spec_ask *ask, const plan_scratch *s, bool is_newest, size_t *n_elements) {
    size_t n = 0;
    for (int32_t i = 0; i < ask->n_seqs; i++) {
        const di_spec_seq *seq = &ask->seqs[i];
        const float *rates = is_newest ? seq->confidence : seq->before;
        float *chances = s->chances + (size_t)i * (size_t)ask->n_drafts;
        int32_t n_drafts = drafts_of(ask, seq);
        if (!is_newest && seq->before && seq->may_speculate)
            n_drafts = DI_MAX(0, DI_MIN(seq->n_before, ask->n_drafts));
        float chance = 1;
        for (int32_t j = 0; j < n_drafts; j++) {
            chance *= rates ? sane(rates[j]) : 1;
            chances[j] = chance;
            s->elements[n++] = element(exact_key(chance), i, j);
        }
    }
    *n_elements = n;
    return sort(s, n, 3, 10);
}

static void plan_reference(const di_spec_ask *ask, const plan_scratch *s, int32_t *n_verify, di_spec_plan *plan) {
    const di_spec_curve *curve = ask->curve;
    int64_t n_best = 0;
    bool has_curve = curve && curve->n_points > 0;
    if (has_curve) {
        size_t n;
        const uint64_t *elements = sort_rates(ask, s, false, &n);
        double tokens = ask->n_seqs, best = 0;
        double ns = di_spec_curve_ns(curve, ask->n_seqs, ask->n_seqs);
        plan->plain_ns = DI_MAX(ns, 0);
        best = ns > 0 ? tokens / ns : 0;
        int64_t rows = di_spec_curve_rows(curve, ask->n_seqs);
        for (int64_t k = 0; k < DI_MIN((int64_t)n, rows_for_drafts(ask)); k++) {
            tokens +=
                (double)s->chances[(size_t)seq_of(elements[k]) * (size_t)ask->n_drafts + (size_t)draft_of(elements[k])];
            if (ask->n_seqs + k + 1 > rows) {
                ns = di_spec_curve_ns(curve, ask->n_seqs + k + 1, ask->n_seqs);
                if (ns < 0)
                    break; /* the table ends: longer steps aren't in it either */
                rows = di_spec_curve_rows(curve, ask->n_seqs + k + 1);
            }
            if (tokens > best * ns) {
                best = tokens / ns;
                n_best = k + 1;
            }
        }
    }
    size_t n;
    const uint64_t *elements = sort_rates(ask, s, true, &n);
    for (int64_t k = 0; has_curve && k < DI_MIN((int64_t)n, n_best); k++)
        n_verify[seq_of(elements[k])]++;
    if (!has_curve)
        plan_all(ask, n_verify);
    plan->tokens = tokens_of(ask, s, n_verify, &plan->n_drafts);
    if (has_curve)
        plan->ns = DI_MAX(di_spec_curve_ns(curve, ask->n_seqs + plan->n_drafts, ask->n_seqs), 0);
}

void di_spec_plan_make(const di_spec_ask *ask, int32_t *n_verify, di_spec_plan *plan) {
    DI_ASSERT(ask->n_drafts >= 1 && ask->n_drafts <= DI_SPEC_DRAFTS_MAX);
    DI_ASSERT(ask->n_seqs >= 0 && ask->n_seqs <= DI_SPEC_SEQS_MAX);
    *plan = (di_spec_plan){0};
    if (ask->n_seqs == 0)
        return;
    memset(n_verify, 0, (size_t)ask->n_seqs * sizeof *n_verify);
    plan_scratch s = scratch_of(ask);
    switch (ask->policy) {
    case DI_SPEC_COST:
        plan_cost(ask, &s, n_verify, plan);
        break;
    case DI_SPEC_REFERENCE:
        plan_reference(ask, &s, n_verify, plan);
        break;
    case DI_SPEC_FIXED:
        fill_chances(ask, &s, 0.5f);
        plan_all(ask, n_verify);
        plan->tokens = tokens_of(ask, &s, n_verify, &plan->n_drafts);
        break;
    }
}

double di_spec_drafting_gain(const di_spec_ask *ask, int32_t *n_verify) {
    if (ask->policy != DI_SPEC_COST || !di_spec_cost_is_ready(ask->cost) || !di_spec_cost_draft_is_ready(ask->cost))
        return INFINITY;
    di_spec_plan plan;
    di_spec_plan_make(ask, n_verify, &plan);
    return plan.n_drafts > 0 ? plan.tokens / plan.ns * plan.plain_ns / ask->n_seqs : 1;
}

bool di_spec_plain_is_due(const di_spec_cost *c, int64_t n_rows, double gain, int64_t n_since, int64_t n_since_try) {
    if (n_since_try < PLAIN_WAIT)
        return false;
    if (!di_spec_cost_plain_is_seen(c, n_rows))
        return gain < PLAIN_GAIN_UNSEEN;
    return gain < PLAIN_GAIN && n_since >= PLAIN_EVERY;
}
