/* Calibration of confidences while running, one temperature a draft position, and its statistics (spec.h). */
#include <math.h>

#include "spec.h"

#define RAW_MIN 1e-6 /* confidences are kept this far from 0 and 1, where a logit is infinite */
#define CURVATURE_START 0.1
#define CURVATURE_MIN 0.01 /* outcomes of near-certain drafts say little; a step divided by that would be too long */
#define STEP_MAX 0.05
#define LOG_INVERSE_MAX 2.0794415416798357 /* ln 8 */

static double clamp(double x, double limit) {
    return DI_MAX(-limit, DI_MIN(x, limit));
}

static double logit(float raw) {
    double c = raw > 0 ? (double)raw : 0; /* NaN too */
    c = DI_MAX(RAW_MIN, DI_MIN(c, 1 - RAW_MIN));
    return log(c / (1 - c));
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

void di_spec_calibration_init(di_spec_calibration *c, int32_t n_drafts, const float *temperatures) {
    DI_ASSERT(n_drafts >= 1 && n_drafts <= DI_SPEC_DRAFTS_MAX);
    *c = (di_spec_calibration){.n_drafts = n_drafts};
    for (int32_t j = 0; j < n_drafts; j++) {
        DI_ASSERT(!temperatures || temperatures[j] > 0);
        c->log_inverse[j] = temperatures ? -log((double)temperatures[j]) : 0;
        c->curvature[j] = CURVATURE_START;
    }
}

double di_spec_calibration_temperature(const di_spec_calibration *c, int32_t draft) {
    return exp(-c->log_inverse[draft]);
}

static double calibrated(const di_spec_calibration *c, int32_t j, float raw) {
    return raw > 0 ? sigmoid(logit(raw) * exp(c->log_inverse[j])) : 0;
}

void di_spec_calibrate(const di_spec_calibration *c, int32_t n, const float *raw, float *out) {
    DI_ASSERT(n <= c->n_drafts);
    for (int32_t j = 0; j < n; j++)
        out[j] = (float)calibrated(c, j, raw[j]);
}

/* One step of T_j along the log-loss of an outcome. With s = 1/T, z = logit(c) and p = sigmoid(s z) the loss has the
 * derivative (p - y) s z in ln s, and about p (1 - p) (s z)^2 as its second one. */
static void follow(di_spec_calibration *c, int32_t j, float raw, bool is_accepted) {
    double sz = logit(raw) * exp(c->log_inverse[j]), p = sigmoid(sz), n = (double)c->n[j];
    c->curvature[j] += DI_MAX(1 / (n + 8), 1.0 / 128) * (p * (1 - p) * sz * sz - c->curvature[j]);
    double gradient = (p - (is_accepted ? 1 : 0)) * sz;
    double step = DI_MAX(1 / (n + 16), 1.0 / 512) * gradient / DI_MAX(c->curvature[j], CURVATURE_MIN);
    c->log_inverse[j] = clamp(c->log_inverse[j] - clamp(step, STEP_MAX), LOG_INVERSE_MAX);
}

void di_spec_calibration_learn(di_spec_calibration *c, int32_t n_verified, int32_t n_accepted, const float *raw) {
    /* A draft behind a rejected one was never put to the test that its confidence is about. */
    for (int32_t j = 0; j < n_verified && j <= n_accepted && j < c->n_drafts; j++) {
        bool is_accepted = j < n_accepted;
        double confidence = calibrated(c, j, raw[j]);
        int bin = DI_MIN((int)(confidence * DI_SPEC_BINS), DI_SPEC_BINS - 1);
        c->bins[bin].n++;
        c->bins[bin].n_accepted += is_accepted;
        c->bins[bin].confidence_sum += confidence;
        c->error_sum[j] += fabs(confidence - (is_accepted ? 1 : 0));
        if (!c->is_frozen && raw[j] > 0)
            follow(c, j, raw[j], is_accepted);
        c->n[j]++;
        c->n_accepted[j] += is_accepted;
    }
}

double di_spec_calibration_error(const di_spec_calibration *c, int32_t draft) {
    double sum = 0;
    int64_t n = 0;
    for (int32_t j = 0; j < c->n_drafts; j++) {
        if (draft >= 0 && j != draft)
            continue;
        sum += c->error_sum[j];
        n += c->n[j];
    }
    return n ? sum / (double)n : 0;
}

di_status di_spec_temperatures_parse(const char *text, int32_t n_drafts, float *out, di_error *err) {
    DI_ASSERT(n_drafts >= 1 && n_drafts <= DI_SPEC_DRAFTS_MAX);
    float values[DI_SPEC_DRAFTS_MAX];
    int32_t n = 0;
    for (const char *at = text;; n++) {
        size_t len = strcspn(at, ",");
        char number[64];
        double value = 0;
        if (n == n_drafts)
            return di_fail(err, DI_ERR_ARG, "confidence temperatures '%s': more than %d, expected 1 or %d", text,
                           (int)n_drafts, (int)n_drafts);
        if (len < sizeof number) {
            memcpy(number, at, len);
            number[len] = 0;
        }
        if (len >= sizeof number || !di_parse_double(number, &value) || !((float)value > 0) || !isfinite((float)value))
            return di_fail(err, DI_ERR_ARG, "confidence temperatures '%s': '%.*s', expected a number above 0", text,
                           (int)DI_MIN(len, sizeof number), at);
        values[n] = (float)value;
        at += len;
        if (!*at)
            break;
        at++;
    }
    n++;
    if (n != 1 && n != n_drafts)
        return di_fail(err, DI_ERR_ARG, "confidence temperatures '%s': %d, expected 1 or %d", text, (int)n,
                       (int)n_drafts);
    for (int32_t j = 0; j < n_drafts; j++)
        out[j] = values[n == 1 ? 0 : j];
    return DI_OK;
}
