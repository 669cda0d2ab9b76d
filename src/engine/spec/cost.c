/* What steps and drafting rounds take on this machine (spec.h): weighted least squares with non-negative coefficients.
 *
 * A fit keeps second moments by bucket of rows, each with its own forgetting, and solves the four coefficients anew at
 * every step: all subsets of them are tried, and of those without a negative one the best is the exact solution of the
 * non-negative problem. That is fifteen systems of at most four unknowns. Under collinear data (one batch size, or no
 * experts) the smaller subset wins, so that nothing is divided between features that the data can't tell apart.
 *
 * Plain steps have no fit of their own: they are set beside that of the others, bucket by bucket. */
#include <math.h>

#include "spec.h"

#define FADE (1.0 - 1.0 / 32) /* of a bucket at each of its steps */
#define TRUSTED 1.9           /* weight from which a bucket's sizes count as seen: two steps */
#define HUBER 0.25            /* relative error from which a step counts less */
#define CLIP 0.5              /* as far off as a step may be at most */
#define DRIFT 0.15            /* weight of the newest step in the drift */
#define DRIFT_MAX 0.2         /* where the machine counts as changed */
#define DRIFT_SETTLING 0.05   /* the same in the steps after a change, to arrive and not only come near */
#define SETTLING_STEPS 64
#define STEPS_MIN 8 /* for a prediction of other sizes */
#define DRAFT_STEPS_MIN 3

double di_spec_experts_touched(const di_spec_experts *e, double n_rows) {
    if (e->n_layers <= 0 || e->n_experts <= 0 || e->n_chosen <= 0 || n_rows <= 0)
        return 0;
    double left = e->n_chosen < e->n_experts ? pow(1 - e->n_chosen / e->n_experts, n_rows) : 0;
    return e->n_layers * e->n_experts * (1 - left);
}

/* 1, 2, 3, then four buckets an octave: 4, 5, 6, 7, 8-9, .., 448-511; all that is more shares the last one. */
static int bucket_of(int64_t n_rows) {
    if (n_rows < 4)
        return (int)n_rows - 1;
    int octave = 63 - __builtin_clzll((uint64_t)n_rows);
    int quarter = (int)(n_rows >> (octave - 2)) & 3;
    return DI_MIN(3 + (octave - 2) * 4 + quarter, DI_SPEC_BUCKETS - 1);
}

static int packed(int i, int j) { /* i <= j */
    return i * DI_SPEC_FEATURES - i * (i - 1) / 2 + (j - i);
}

/* Solves the normal equations restricted to the features of `subset` by Cholesky; a has a unit diagonal where it is
 * not 0. False when they are singular or a solution is negative. */
static bool solve_subset(double a[DI_SPEC_FEATURES][DI_SPEC_FEATURES], const double *b, unsigned subset, double *x) {
    int index[DI_SPEC_FEATURES], n = 0;
    for (int i = 0; i < DI_SPEC_FEATURES; i++) {
        x[i] = 0;
        if (subset >> i & 1)
            index[n++] = i;
    }
    double low[DI_SPEC_FEATURES][DI_SPEC_FEATURES], y[DI_SPEC_FEATURES];
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) {
            double sum = a[index[i]][index[j]];
            for (int k = 0; k < j; k++)
                sum -= low[i][k] * low[j][k];
            if (j < i)
                low[i][j] = sum / low[j][j];
            else if (sum > 1e-9)
                low[i][i] = sqrt(sum);
            else
                return false;
        }
        double sum = b[index[i]];
        for (int k = 0; k < i; k++)
            sum -= low[i][k] * y[k];
        y[i] = sum / low[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        double sum = y[i];
        for (int k = i + 1; k < n; k++)
            sum -= low[k][i] * x[index[k]];
        x[index[i]] = sum / low[i][i];
        if (!(x[index[i]] >= 0))
            return false;
    }
    return true;
}

static void fit_solve(di_spec_fit *f) {
    double xx[DI_SPEC_FEATURES * (DI_SPEC_FEATURES + 1) / 2] = {0}, b[DI_SPEC_FEATURES] = {0};
    for (int k = 0; k < DI_SPEC_BUCKETS; k++) {
        const di_spec_bucket *bucket = &f->buckets[k];
        if (bucket->weight <= 0)
            continue;
        for (size_t i = 0; i < DI_COUNT(xx); i++)
            xx[i] += bucket->xx[i];
        for (int i = 0; i < DI_SPEC_FEATURES; i++)
            b[i] += bucket->xy[i];
    }
    /* Features differ by orders of magnitude: a unit diagonal makes one tolerance of singularity fit all. */
    double scale[DI_SPEC_FEATURES], a[DI_SPEC_FEATURES][DI_SPEC_FEATURES];
    unsigned present = 0;
    for (int i = 0; i < DI_SPEC_FEATURES; i++) {
        double diagonal = xx[packed(i, i)];
        scale[i] = diagonal > 0 ? 1 / sqrt(diagonal) : 0;
        present |= diagonal > 0 ? 1u << i : 0;
        b[i] *= scale[i];
    }
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        for (int j = i; j < DI_SPEC_FEATURES; j++)
            a[i][j] = a[j][i] = xx[packed(i, j)] * scale[i] * scale[j];
    double best[DI_SPEC_FEATURES] = {0}, best_gain = 0;
    for (int size = 1; size <= DI_SPEC_FEATURES; size++) {
        for (unsigned subset = 1; subset < 1u << DI_SPEC_FEATURES; subset++) {
            double x[DI_SPEC_FEATURES];
            if (__builtin_popcount(subset) != size || (subset & ~present) || !solve_subset(a, b, subset, x))
                continue;
            double gain = 0; /* by how much the sum of squares falls */
            for (int i = 0; i < DI_SPEC_FEATURES; i++)
                gain += b[i] * x[i];
            if (gain > best_gain * (1 + 1e-12)) {
                best_gain = gain;
                memcpy(best, x, sizeof best);
            }
        }
    }
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        f->coef[i] = best[i] * scale[i];
}

static double fit_predict(const di_spec_fit *f, const double *x) {
    double sum = 0;
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        sum += f->coef[i] * x[i];
    return sum;
}

/* What a step counts that is off its prediction by a share `off`. */
static double weight_of(double off) {
    return fabs(off) > HUBER ? HUBER / fabs(off) : 1;
}

static double clip(double off) {
    return DI_MAX(-CLIP, DI_MIN(off, CLIP));
}

/* Returns the factor by which the machine has been found to be slower than before: 1 but for changes. */
static double fit_learn(di_spec_fit *f, int bucket_idx, const double *x, double ns) {
    di_spec_bucket *bucket = &f->buckets[bucket_idx];
    double weight = 1, measure = ns, factor = 1;
    /* A size that is new has a prediction from other sizes alone: nothing that could call the step an outlier. */
    if (bucket->weight >= TRUSTED) {
        double predicted = fit_predict(f, x);
        if (predicted > 0) {
            double off = ns / predicted - 1;
            f->drift += DRIFT * (clip(log(ns / predicted)) - f->drift);
            weight = weight_of(off);
            ns = predicted * (1 + clip(off));
            measure = predicted;
        }
    }
    for (size_t i = 0; i < DI_COUNT(bucket->xx); i++)
        bucket->xx[i] *= FADE;
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        bucket->xy[i] *= FADE;
    bucket->weight = bucket->weight * FADE + weight;
    double w = weight / (measure * measure); /* errors are relative ones */
    for (int i = 0; i < DI_SPEC_FEATURES; i++) {
        for (int j = i; j < DI_SPEC_FEATURES; j++)
            bucket->xx[packed(i, j)] += w * x[i] * x[j];
        bucket->xy[i] += w * x[i] * ns;
    }
    f->settling -= f->settling > 0;
    if (fabs(f->drift) > DRIFT_MAX)
        f->settling = SETTLING_STEPS;
    if (fabs(f->drift) > (f->settling > 0 ? DRIFT_SETTLING : DRIFT_MAX)) {
        factor = exp(f->drift);
        for (int k = 0; k < DI_SPEC_BUCKETS; k++)
            for (int i = 0; i < DI_SPEC_FEATURES; i++)
                f->buckets[k].xy[i] *= factor;
        f->drift = 0;
    }
    f->n_steps++;
    fit_solve(f);
    return factor;
}

void di_spec_cost_init(di_spec_cost *c, const di_spec_experts *step, const di_spec_experts *draft, int32_t n_drafts,
                       int64_t rows_max) {
    DI_ASSERT(n_drafts >= 1 && n_drafts <= DI_SPEC_DRAFTS_MAX && rows_max >= 1);
    *c = (di_spec_cost){.step_experts = *step, .draft_experts = *draft, .n_drafts = n_drafts, .rows_max = rows_max};
}

static void step_features(const di_spec_cost *c, int64_t n_rows, int64_t context, double *x) {
    x[0] = 1;
    x[1] = (double)n_rows;
    x[2] = di_spec_experts_touched(&c->step_experts, (double)n_rows);
    x[3] = (double)DI_MAX(context, 0);
}

static void draft_features(const di_spec_cost *c, int32_t n_seqs, double *x) {
    x[0] = 1;
    x[1] = n_seqs;
    x[2] = di_spec_experts_touched(&c->draft_experts, (double)n_seqs * c->n_drafts);
    x[3] = 0;
}

void di_spec_cost_learn_step(di_spec_cost *c, int64_t n_rows, int64_t context, int64_t step_ns) {
    if (n_rows <= 0 || n_rows > c->rows_max || step_ns <= 0)
        return;
    double x[DI_SPEC_FEATURES];
    step_features(c, n_rows, context, x);
    double factor = fit_learn(&c->step, bucket_of(n_rows), x, (double)step_ns);
    for (int k = 0; k < DI_SPEC_BUCKETS; k++)
        c->plain[k].ns *= factor;
}

/* By how much a bucket's plain steps are below the prediction, on average. */
static double plain_saves(const di_spec_cost *c, int bucket_idx) {
    const di_spec_plain *p = &c->plain[bucket_idx];
    return (fit_predict(&c->step, p->x) - p->ns) / p->x[0];
}

void di_spec_cost_learn_plain(di_spec_cost *c, int64_t n_rows, int64_t context, int64_t step_ns) {
    if (n_rows <= 0 || n_rows > c->rows_max || step_ns <= 0)
        return;
    int k = bucket_of(n_rows);
    di_spec_plain *p = &c->plain[k];
    double x[DI_SPEC_FEATURES], weight = 1, ns = (double)step_ns;
    step_features(c, n_rows, context, x);
    double predicted = p->x[0] >= TRUSTED ? fit_predict(&c->step, x) - plain_saves(c, k) : 0;
    if (predicted > 0) {
        double off = ns / predicted - 1;
        weight = weight_of(off);
        ns = predicted * (1 + clip(off));
    }
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        p->x[i] = p->x[i] * FADE + weight * x[i];
    p->ns = p->ns * FADE + weight * ns;
}

void di_spec_cost_learn_draft(di_spec_cost *c, int32_t n_seqs, int64_t draft_ns) {
    if (n_seqs <= 0 || draft_ns <= 0)
        return;
    double x[DI_SPEC_FEATURES];
    draft_features(c, n_seqs, x);
    fit_learn(&c->draft, bucket_of(n_seqs), x, (double)draft_ns);
}

double di_spec_cost_step_ns(const di_spec_cost *c, int64_t n_rows, int64_t context) {
    if (n_rows <= 0)
        return 0;
    double x[DI_SPEC_FEATURES];
    step_features(c, n_rows, context, x);
    return fit_predict(&c->step, x);
}

double di_spec_cost_draft_ns(const di_spec_cost *c, int32_t n_seqs) {
    if (n_seqs <= 0)
        return 0;
    double x[DI_SPEC_FEATURES];
    draft_features(c, n_seqs, x);
    return fit_predict(&c->draft, x);
}

bool di_spec_cost_plain_is_seen(const di_spec_cost *c, int64_t n_rows) {
    return n_rows > 0 && c->plain[bucket_of(n_rows)].x[0] >= TRUSTED;
}

double di_spec_cost_plain_saves_ns(const di_spec_cost *c, int64_t n_rows, int64_t context) {
    if (n_rows <= 0)
        return 0;
    int at = bucket_of(n_rows);
    for (int away = 0; away < DI_SPEC_BUCKETS; away++) {
        for (int side = -1; side <= 1; side += 2) { /* the smaller size first */
            int k = at + side * away;
            if (k < 0 || k >= DI_SPEC_BUCKETS || c->plain[k].x[0] < TRUSTED)
                continue;
            double limit = CLIP * di_spec_cost_step_ns(c, n_rows, context);
            return DI_MAX(-limit, DI_MIN(plain_saves(c, k), limit));
        }
    }
    return 0;
}

bool di_spec_cost_is_ready(const di_spec_cost *c) {
    int n_sizes = 0;
    for (int k = 0; k < DI_SPEC_BUCKETS; k++)
        n_sizes += c->step.buckets[k].weight >= TRUSTED;
    return c->step.n_steps >= STEPS_MIN && n_sizes >= 2;
}

bool di_spec_cost_draft_is_ready(const di_spec_cost *c) {
    return c->draft.n_steps >= DRAFT_STEPS_MIN;
}
