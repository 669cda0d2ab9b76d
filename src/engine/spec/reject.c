/* Acceptance by rejection: the test of a draft and the draws behind it (spec.h, dspark.md 4.5, model.md 7.1).
 *
 * exp and ln are tensor's, so that a seed means the same tokens on every host. Weights are added as integers, so that
 * it means the same where many threads add them, in any order. */
#include "spec.h"
#include "tensor/math_inline.h"
#include "tensor/tensor.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define ROW_STRIDE 10000019u
#define UNIT 0x1p52
#define PENALTY 5e-5f /* on the draft's ln q: keeps the residual from vanishing by rounding where p = q */

double di_spec_uniform(uint64_t seed, int32_t position, di_spec_case which) {
    uint64_t q = (3 * (uint64_t)(int64_t)position + (uint64_t)which) * GOLDEN;
    uint64_t x = which == DI_SPEC_TEST ? seed ^ q : seed + (q ^ (q << 13));
    return (double)(di_mix64(x + GOLDEN) >> 11) * 0x1p-53;
}

int32_t di_spec_position(int32_t first, int32_t row) {
    return (int32_t)((uint32_t)first + (uint32_t)row * ROW_STRIDE);
}

bool di_spec_accepts(float p, float ln_q, double u) {
    if (!(p > 0))
        return false;
    float above = (float)di_ln((double)p) - ln_q;
    float chance = above >= 0 ? 1.0f : di_expf(above);
    return chance > (float)u;
}

/* Weights of ids [at, at + n), n <= BLOCK: by block, so that the loop without a sum becomes vectors. */
enum { BLOCK = 256 };
static void weigh(const float *p, const float *ln_q, int64_t at, int n, float *out) {
    if (!ln_q) {
        memcpy(out, p + at, (size_t)n * sizeof *out);
        return;
    }
    for (int i = 0; i < n; i++) {
        float left = p[at + i] - di_expf_inline(ln_q[at + i] - PENALTY);
        out[i] = left > 0 ? left : 0;
    }
}

/* A weight in units of 2^-52, cut: exact from 2^-28 on. */
static inline uint64_t units_of(float weight) {
    return (uint64_t)(int64_t)((double)weight * UNIT);
}

static uint64_t total_of(const float *p, const float *ln_q, int64_t n) {
    float weights[BLOCK];
    uint64_t sum = 0;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int count = (int)DI_MIN(n - at, BLOCK);
        weigh(p, ln_q, at, count, weights);
        for (int i = 0; i < count; i++)
            sum += units_of(weights[i]);
    }
    return sum;
}

static int32_t pick(const float *p, const float *ln_q, int64_t n, double mark) {
    float weights[BLOCK];
    uint64_t sum = 0;
    int32_t last = -1; /* with a weight: what is left where rounding puts the mark at the total */
    for (int64_t at = 0; at < n; at += BLOCK) {
        int count = (int)DI_MIN(n - at, BLOCK);
        weigh(p, ln_q, at, count, weights);
        for (int i = 0; i < count; i++) {
            uint64_t units = units_of(weights[i]);
            sum += units;
            last = units > 0 ? (int32_t)(at + i) : last;
            if ((double)sum > mark)
                return (int32_t)(at + i);
        }
    }
    return last;
}

int32_t di_spec_draw(const float *p, int64_t n, double u) {
    return pick(p, NULL, n, u * (double)total_of(p, NULL, n));
}

int32_t di_spec_redraw(const float *p, const float *ln_q, int64_t n, double u, double *residual) {
    uint64_t total = total_of(p, ln_q, n);
    if (residual)
        *residual = (double)total / UNIT;
    if (total > 0)
        return pick(p, ln_q, n, u * (double)total);
    int32_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (p[i] > 0 && (best < 0 || p[i] > p[best]))
            best = (int32_t)i;
    return best;
}

double di_spec_distance(const float *p, const float *ln_q, int64_t n) {
    return (double)total_of(p, ln_q, n) / UNIT;
}

bool di_spec_row_token(const di_spec_row *r, int32_t *token) {
    int32_t position = di_spec_position(r->first, r->row);
    if (r->is_last) {
        *token = di_spec_draw(r->p, r->n_vocab, di_spec_uniform(r->seed, position, DI_SPEC_DRAW));
        return false;
    }
    bool is_draft = r->draft >= 0 && r->draft < r->n_vocab;
    if (is_draft &&
        di_spec_accepts(r->p[r->draft], r->ln_q[r->draft], di_spec_uniform(r->seed, position, DI_SPEC_TEST))) {
        *token = r->draft;
        return true;
    }
    *token = di_spec_redraw(r->p, is_draft ? r->ln_q : NULL, r->n_vocab,
                            di_spec_uniform(r->seed, position, DI_SPEC_REDRAW), NULL);
    return false;
}
