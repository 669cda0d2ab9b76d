/* Sampling: from a row of logits to one token, by request parameters, seed and position alone.
 *
 * Owns: the parameters and their validation, the noise, top-p and top-k without a full sort, log-probabilities. Leaves
 * the choice of rows, stop rules and text to engine/. The rule is interface.md's "How a token is sampled": masks,
 * temperature, top-p, top-k, then the largest x + g(seed, position, token). */
#ifndef DI_SAMPLE_H
#define DI_SAMPLE_H

#include "tensor/tensor.h"

typedef struct di_sampling {
    double temperature; /* default 1; below 1e-5 is greedy */
    double top_p;       /* default 1: off */
    int64_t top_k;      /* default -1; -1 and 0: off */
    bool has_seed;
    uint64_t seed;
    int64_t max_tokens; /* 0: the caller's default */
    bool ignore_eos;
    int32_t n_logprobs; /* -1: none; n >= 0: of the token and the n best */
    bool logprobs_processed;
    size_t n_stop;           /* stop strings; empty ones are ignored */
    const char *const *stop; /* borrowed for the request's life */
    const size_t *stop_len;
} di_sampling;

#define DI_LOGPROBS_MAX 1000
#define DI_LOGPROB_FLOOR (-9999.0f) /* what stands for the logarithm of zero */

void di_sampling_init(di_sampling *s); /* the defaults */
bool di_sampling_is_greedy(const di_sampling *s);
/* DI_ERR_RANGE naming field, value and range: temperature finite and >= 0, 0 < top_p <= 1, top_k -1 .. 2^31-1,
 * max_tokens
 * >= 0, n_logprobs -1 .. 1000. */
di_status di_sampling_check(const di_sampling *s, di_error *err);

/* Noise of (seed, position, token): z as in interface.md, and g = -log(-log(u)). */
uint64_t di_noise_bits(uint64_t seed, uint64_t position, uint64_t token);
double di_noise_gumbel(uint64_t z);

typedef struct di_logprob {
    int32_t token;
    float logprob;
} di_logprob;

/* Reusable scratch; zeroed storage is valid. */
typedef struct di_sampler {
    void *memory; /* owned */
    size_t n_bytes;
} di_sampler;
void di_sampler_deinit(di_sampler *sm);
di_status di_sampler_reserve(di_sampler *sm, int64_t n_vocab, di_error *err);

/* One token from logits [n_vocab] (host memory). position = its index in prompt + output. mask (may be NULL): bit t of
 * 32-bit words set = token t allowed; a logit of -infinity is not allowed either. *logprob and top [n_logprobs] (may be
 * NULL) are filled when s->n_logprobs >= 0, top by falling probability, ties by lower id; entries past the tokens of
 * non-zero probability have token -1. Allocates nothing after di_sampler_reserve. DI_ERR_REQUEST when no token is
 * allowed, DI_ERR_INTERNAL for logits with NaN or +infinity. */
di_status di_sample(di_sampler *sm, const di_sampling *s, const float *logits, int64_t n_vocab, uint64_t position,
                    const uint32_t *mask, int32_t *token, float *logprob, di_logprob *top, di_error *err);
/* The log-probabilities alone, of a token that is given: the same values that drawing it would have had. A token
 * without probability has DI_LOGPROB_FLOOR. */
di_status di_sample_forced(di_sampler *sm, const di_sampling *s, const float *logits, int64_t n_vocab,
                           uint64_t position, const uint32_t *mask, int32_t token, float *logprob, di_logprob *top,
                           di_error *err);

#endif
