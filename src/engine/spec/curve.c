/* The released engine's table of step times and its corrections while running (spec.h, dspark.md 4.6). */
#include "spec.h"

#define SAMPLES_MIN 10 /* of an entry, for its median to count */
#define SAMPLER_MIN 5
#define REFRESH_STEPS 64

di_status di_spec_curve_init(di_spec_curve *c, int32_t n, const int32_t *rows, const double *ns, di_error *err) {
    if (n < 0 || n > DI_SPEC_CURVE_POINTS)
        return di_fail(err, DI_ERR_RANGE, "time table of %d entries, expected 0..%d", (int)n,
                       (int)DI_SPEC_CURVE_POINTS);
    for (int32_t i = 0; i < n; i++) {
        if (rows[i] <= (i ? rows[i - 1] : 0))
            return di_fail(err, DI_ERR_RANGE, "time table, entry %d: %d rows after %d, expected more", (int)i,
                           (int)rows[i], (int)(i ? rows[i - 1] : 0));
        if (!(ns[i] > (i ? ns[i - 1] : 0)))
            return di_fail(err, DI_ERR_RANGE, "time table, entry %d: %g ns after %g, expected more", (int)i, ns[i],
                           i ? ns[i - 1] : 0.0);
    }
    memset(c, 0, sizeof *c);
    c->n_points = n;
    for (int32_t i = 0; i < n; i++) {
        c->rows[i] = rows[i];
        c->ns[i] = ns[i];
    }
    return DI_OK;
}

/* The smallest entry of at least n_rows; n_points where there is none. */
static int32_t point_of(const di_spec_curve *c, int64_t n_rows) {
    int32_t low = 0, high = c->n_points;
    while (low < high) {
        int32_t mid = (low + high) / 2;
        if (c->rows[mid] < n_rows)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Puts the k-th smallest value at k, with none that is larger before it (Hoare's selection). */
static float select_kth(float *v, int32_t n, int32_t k) {
    int32_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = v[low + (high - low) / 2];
        int32_t i = low, j = high;
        while (i <= j) {
            while (v[i] < pivot)
                i++;
            while (v[j] > pivot)
                j--;
            if (i <= j) {
                float t = v[i];
                v[i++] = v[j];
                v[j--] = t;
            }
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            break;
    }
    return v[k];
}

static double median(float *v, int32_t n) {
    float upper = select_kth(v, n, n / 2);
    if (n % 2)
        return upper;
    float lower = v[0];
    for (int32_t i = 1; i < n / 2; i++)
        lower = DI_MAX(lower, v[i]);
    return 0.5 * ((double)lower + (double)upper);
}

double di_spec_curve_slope(const di_spec_curve *c) {
    int32_t n = (int32_t)DI_MIN(c->n_steps, DI_SPEC_CURVE_STEPS);
    int32_t ends[DI_SPEC_CURVE_POINTS + 1] = {0};
    float values[DI_SPEC_CURVE_STEPS], medians[DI_SPEC_CURVE_POINTS];
    for (int32_t i = 0; i < n; i++)
        ends[c->steps[i].point + 1]++;
    for (int32_t k = 0; k < c->n_points; k++)
        ends[k + 1] += ends[k];
    /* Filled from its start, an entry's place in `ends` becomes its end. */
    for (int32_t i = 0; i < n; i++)
        values[ends[c->steps[i].point]++] = c->steps[i].per_row_ns;
    int32_t n_medians = 0, start = 0;
    for (int32_t k = 0; k < c->n_points; k++) {
        if (ends[k] - start >= SAMPLES_MIN)
            medians[n_medians++] = (float)median(values + start, ends[k] - start);
        start = ends[k];
    }
    return n_medians ? DI_MAX(0.0, median(medians, n_medians)) : 0;
}

static void recent_add(di_spec_recent *r, double ns) {
    r->ns[r->n % DI_SPEC_SAMPLER_STEPS] = (float)ns;
    /* Only the place in the ring and whether it is full matter, so the count stays small for ever. */
    r->n = r->n + 1 == 2 * DI_SPEC_SAMPLER_STEPS ? DI_SPEC_SAMPLER_STEPS : r->n + 1;
}

/* -1: too few. */
static double recent_median(const di_spec_recent *r) {
    int32_t n = DI_MIN(r->n, DI_SPEC_SAMPLER_STEPS);
    if (n < SAMPLER_MIN)
        return -1;
    float values[DI_SPEC_SAMPLER_STEPS];
    memcpy(values, r->ns, sizeof values);
    return median(values, n);
}

void di_spec_curve_learn(di_spec_curve *c, int64_t n_rows, int32_t n_seqs, int64_t forward_ns, int64_t sampler_ns) {
    int32_t point = point_of(c, n_rows);
    if (n_rows <= 0 || point == c->n_points || forward_ns <= 0)
        return;
    int64_t at = c->n_steps++ % DI_SPEC_CURVE_STEPS;
    c->steps[at].point = point;
    c->steps[at].per_row_ns = (float)(((double)forward_ns - c->ns[point]) / c->rows[point]);
    if (sampler_ns >= 0) {
        recent_add(&c->sampler[0], (double)sampler_ns);
        if (n_seqs >= 1 && n_seqs <= DI_SPEC_SAMPLER_SEQS)
            recent_add(&c->sampler[n_seqs], (double)sampler_ns);
    }
    if (c->n_steps % REFRESH_STEPS == 0)
        c->slope_ns = di_spec_curve_slope(c);
}

/* Median of the sampling times seen with as many sequences, else of all, else 0. */
static double sampler_ns(const di_spec_curve *c, int32_t n_seqs) {
    double ns = -1;
    if (n_seqs >= 1 && n_seqs <= DI_SPEC_SAMPLER_SEQS)
        ns = recent_median(&c->sampler[n_seqs]);
    if (ns < 0)
        ns = recent_median(&c->sampler[0]);
    return DI_MAX(ns, 0);
}

double di_spec_curve_ns(const di_spec_curve *c, int64_t n_rows, int32_t n_seqs) {
    int32_t point = point_of(c, n_rows);
    if (point == c->n_points)
        return -1;
    return c->ns[point] + c->slope_ns * c->rows[point] + sampler_ns(c, n_seqs);
}

int64_t di_spec_curve_rows(const di_spec_curve *c, int64_t n_rows) {
    int32_t point = point_of(c, n_rows);
    return point < c->n_points ? c->rows[point] : -1;
}
