/* One token from a row of logits, the same on every machine.
 *
 * Everything that decides is either an integer, a comparison or double arithmetic of single IEEE operations in the
 * order written here (tensor/math.c has exp and log), so the choice depends on logits, parameters, seed and position
 * alone.
 *
 * Nothing is sorted but the few tokens whose log-probabilities are asked for. Top-p and top-k both keep a prefix of the
 * order "falling logit, then rising id"; a radix selection over (logit, id) keys finds the last token of that prefix.
 * The noise needs two logarithms, taken only for tokens that a bound from the leading bits of z still lets win. */
#include "sample.h"

#define GREEDY_BELOW 1e-5    /* temperatures below are greedy */
#define WEIGHT_ONE 0x1p36    /* integer weight of the most likely token */
#define ROUND_SHIFT 0x1.8p52 /* adding and subtracting it rounds |x| < 2^51 to an integer, ties to even */

/* ---- parameters ---------------------------------------------------------------------------------------------------
 */

void di_sampling_init(di_sampling *s) {
    memset(s, 0, sizeof *s);
    s->temperature = 1.0;
    s->top_p = 1.0;
    s->top_k = -1;
    s->n_logprobs = -1;
}

bool di_sampling_is_greedy(const di_sampling *s) {
    return s->temperature < GREEDY_BELOW;
}

di_status di_sampling_check(const di_sampling *s, di_error *err) {
    /* Comparisons are written so that NaN fails them. */
    if (!(s->temperature >= 0.0 && s->temperature <= 1.7976931348623157e308))
        return di_fail(err, DI_ERR_RANGE, "'temperature': %g, expected a finite number of 0 or more", s->temperature);
    if (!(s->top_p > 0.0 && s->top_p <= 1.0))
        return di_fail(err, DI_ERR_RANGE, "'top_p': %g, expected a number above 0 and not above 1", s->top_p);
    if (s->top_k < -1 || s->top_k > INT32_MAX)
        return di_fail(err, DI_ERR_RANGE, "'top_k': %lld, expected -1 or 0 (off) or 1 to %d", (long long)s->top_k,
                       INT32_MAX);
    if (s->max_tokens < 0)
        return di_fail(err, DI_ERR_RANGE, "'max_tokens': %lld, expected 1 or more", (long long)s->max_tokens);
    if (s->n_logprobs < -1 || s->n_logprobs > DI_LOGPROBS_MAX)
        return di_fail(err, DI_ERR_RANGE, "'logprobs': %d, expected 0 to %d", s->n_logprobs, DI_LOGPROBS_MAX);
    return DI_OK;
}

/* ---- noise --------------------------------------------------------------------------------------------------------
 */

uint64_t di_noise_bits(uint64_t seed, uint64_t position, uint64_t token) {
    uint64_t q = ((position << 32) + token) * 0x9E3779B97F4A7C15u;
    uint64_t z = seed + (q ^ (q << 13));
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double di_noise_gumbel(uint64_t z) {
    double u = ((double)(z >> 12) + 0.5) * 0x1p-52;
    return -di_ln(-di_ln(u));
}

/* An upper bound of di_noise_gumbel(z). With c leading ones in z, 1 - u >= 2^-(c+1); -log(u) >= 1 - u, hence
 * g <= (c+1)*log(2). The constant is rounded up by 3e-6, far more than the error of g. */
static inline double gumbel_bound(uint64_t z) {
    int ones = ~z ? __builtin_clzll(~z) : 64;
    return (double)(ones + 1) * 0.69315;
}

/* ---- scratch ------------------------------------------------------------------------------------------------------
 */

void di_sampler_deinit(di_sampler *sm) {
    free(sm->memory);
    *sm = (di_sampler){0};
}

/* Two arrays of n_vocab 64-bit values: keys and weights. */
di_status di_sampler_reserve(di_sampler *sm, int64_t n_vocab, di_error *err) {
    size_t bytes;
    if (n_vocab < 1 || !di_size_mul3(&bytes, (size_t)n_vocab, 2, sizeof(uint64_t)))
        return di_fail(err, DI_ERR_RANGE, "vocabulary of %lld tokens", (long long)n_vocab);
    if (bytes <= sm->n_bytes)
        return DI_OK;
    void *memory = realloc(sm->memory, bytes);
    if (!memory)
        return di_fail(err, DI_ERR_MEMORY, "sampler: %zu bytes", bytes);
    sm->memory = memory;
    sm->n_bytes = bytes;
    return DI_OK;
}

/* ---- order and selection ------------------------------------------------------------------------------------------
 */

/* A token's place in the order, larger first: the logit's bits made to rise with its value, then the id from above. */
static inline uint64_t order_key(float logit, int64_t id) {
    uint32_t bits = di_f32_bits(logit + 0.0f); /* -0 becomes 0: they are equal */
    bits ^= (bits >> 31) ? 0xFFFFFFFFu : 0x80000000u;
    return ((uint64_t)bits << 32) | (uint32_t) ~(uint32_t)id;
}

static inline int32_t key_id(uint64_t key) {
    return (int32_t) ~(uint32_t)key;
}

#define DIGIT_BITS 11

/* The last key, in falling order, of those with fewer than n_max keys before it and weights before it that sum to at
 * most weight_max; 0 when all are. weights NULL: keys are only counted. Both arrays are overwritten; n >= 1.
 *
 * One digit of the key at a time, from the top: the digit's first bucket at whose end a limit is passed holds the last
 * kept key, because its own first key still obeys the limits. Keys are distinct, so that the search ends at one key. */
static uint64_t select_last(uint64_t *keys, uint64_t *weights, int64_t n, int64_t n_max, double weight_max) {
    int64_t count[1 << DIGIT_BITS];
    uint64_t weight[1 << DIGIT_BITS];
    int64_t n_before = 0;
    uint64_t weight_before = 0;
    for (int shift = 64 - DIGIT_BITS; n > 1; shift -= DIGIT_BITS) {
        int right = shift < 0 ? 0 : shift;
        uint64_t digit_mask = (1u << (shift < 0 ? DIGIT_BITS + shift : DIGIT_BITS)) - 1;
        memset(count, 0, sizeof count);
        memset(weight, 0, sizeof weight);
        for (int64_t i = 0; i < n; i++) {
            uint64_t digit = (keys[i] >> right) & digit_mask;
            count[digit]++;
            if (weights)
                weight[digit] += weights[i];
        }
        int64_t digit = (int64_t)digit_mask;
        for (; digit >= 0; digit--) {
            if (!count[digit])
                continue;
            if (n_before + count[digit] >= n_max || (double)(weight_before + weight[digit]) > weight_max)
                break;
            n_before += count[digit];
            weight_before += weight[digit];
        }
        if (digit < 0)
            return 0; /* only at the top digit: no limit is passed anywhere */
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            if (((keys[i] >> right) & digit_mask) != (uint64_t)digit)
                continue;
            keys[kept] = keys[i];
            if (weights)
                weights[kept] = weights[i];
            kept++;
        }
        n = kept;
    }
    return keys[0];
}

/* Heapsort, largest first: in place, no allocation, and n is at most a thousand. */
static void sort_falling(uint64_t *keys, int64_t n) {
    for (int64_t end = n, start = n / 2; end > 1;) {
        if (start > 0) {
            start--;
        } else {
            end--;
            uint64_t t = keys[end];
            keys[end] = keys[0];
            keys[0] = t;
        }
        int64_t root = start;
        for (int64_t child; (child = 2 * root + 1) < end; root = child) {
            if (child + 1 < end && keys[child + 1] < keys[child])
                child++;
            if (keys[root] <= keys[child])
                break;
            uint64_t t = keys[root];
            keys[root] = keys[child];
            keys[child] = t;
        }
    }
}

/* ---- one row -------------------------------------------------------------------------------------------------------
 */

typedef struct row {
    const float *logits;
    int64_t n_vocab;
    const uint32_t *mask; /* NULL: all allowed */
    double temperature;   /* 1e-5 when greedy: what processed log-probabilities then mean (model.md 7) */
    int32_t best;         /* allowed token with the largest logit */
    int64_t n_allowed;
    uint64_t last; /* order key of the last survivor of top-p and top-k; 0: all survive */
} row;

static inline bool is_allowed(const row *r, int64_t id) {
    return (!r->mask || (r->mask[id >> 5] >> (id & 31) & 1)) && r->logits[id] > -__builtin_inff();
}

static inline bool survives(const row *r, int64_t id) {
    return is_allowed(r, id) && order_key(r->logits[id], id) >= r->last;
}

static inline double scaled(const row *r, int64_t id) {
    return (double)r->logits[id] / r->temperature;
}

static di_status find_best(row *r, uint64_t position, di_error *err) {
    float best = -__builtin_inff();
    bool is_nan = false;
    r->best = -1;
    r->n_allowed = 0;
    for (int64_t i = 0; i < r->n_vocab; i++) {
        is_nan |= r->logits[i] != r->logits[i];
        if (!is_allowed(r, i))
            continue;
        r->n_allowed++;
        if (r->logits[i] > best) {
            best = r->logits[i];
            r->best = (int32_t)i;
        }
    }
    if (is_nan || best > 0x1.fffffep127f)
        return di_fail(err, DI_ERR_INTERNAL, "position %llu: the model's logits are not finite",
                       (unsigned long long)position);
    if (r->best < 0)
        return di_fail(err, DI_ERR_REQUEST, "position %llu: the request's constraints allow no token",
                       (unsigned long long)position);
    return DI_OK;
}

/* round(2^36 * exp(x - largest x)); zero below a distance where it rounds to zero, 37*log(2). */
static inline uint64_t integer_weight(double distance) {
    if (distance < -26.0)
        return 0;
    double w = WEIGHT_ONE * di_exp(distance);
    return (uint64_t)((w + ROUND_SHIFT) - ROUND_SHIFT);
}

static uint64_t last_survivor(const row *r, const di_sampling *s, uint64_t *keys, uint64_t *weights) {
    bool has_top_p = s->top_p<1.0, has_top_k = s->top_k> 0 && s->top_k < r->n_allowed;
    if (!has_top_p && !has_top_k)
        return 0;
    double largest = scaled(r, r->best);
    uint64_t total = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < r->n_vocab; i++) {
        if (!is_allowed(r, i))
            continue;
        keys[n] = order_key(r->logits[i], i);
        if (has_top_p) {
            weights[n] = integer_weight(scaled(r, i) - largest);
            total += weights[n];
        }
        n++;
    }
    double weight_max = has_top_p ? s->top_p * (double)total : __builtin_inf();
    return select_last(keys, has_top_p ? weights : NULL, n, has_top_k ? s->top_k : INT64_MAX, weight_max);
}

/* The survivor with the largest x + g, ties to the lower id. The most likely token goes first, since it sets a bound
 * that few others pass. x + bound and x + g round monotonically, so that skipping is exact. */
static int32_t draw(const row *r, uint64_t seed, uint64_t position) {
    int32_t winner = r->best;
    double score = scaled(r, winner) + di_noise_gumbel(di_noise_bits(seed, position, (uint64_t)winner));
    for (int64_t i = 0; i < r->n_vocab; i++) {
        if (i == r->best || !survives(r, i))
            continue;
        double x = scaled(r, i);
        if (x + 37.0 < score)
            continue; /* g is below 36.8 */
        uint64_t z = di_noise_bits(seed, position, (uint64_t)i);
        if (x + gumbel_bound(z) < score)
            continue;
        double candidate = x + di_noise_gumbel(z);
        if (candidate > score || (candidate == score && i < winner)) {
            score = candidate;
            winner = (int32_t)i;
        }
    }
    return winner;
}

/* Log-softmax over what `processed` says: of survivors after temperature, or of the logits after masks. Sums run over
 * rising ids, in double. */
static void log_probabilities(const row *r, const di_sampling *s, uint64_t *keys, int32_t token, float *logprob,
                              di_logprob *top) {
    row v = *r;
    if (!s->logprobs_processed) {
        v.temperature = 1.0;
        v.last = 0;
    }
    double largest = scaled(&v, v.best), sum = 0.0;
    int64_t n = 0;
    for (int64_t i = 0; i < v.n_vocab; i++) {
        if (!survives(&v, i))
            continue;
        sum += di_exp(scaled(&v, i) - largest);
        keys[n++] = order_key(v.logits[i], i);
    }
    double log_sum = di_ln(sum);
    if (logprob)
        *logprob = survives(&v, token) ? (float)((scaled(&v, token) - largest) - log_sum) : DI_LOGPROB_FLOOR;
    if (!top || s->n_logprobs <= 0)
        return;
    uint64_t last = n > s->n_logprobs ? select_last(keys, NULL, n, s->n_logprobs, __builtin_inf()) : 0;
    n = 0;
    for (int64_t i = 0; i < v.n_vocab; i++) {
        if (survives(&v, i) && order_key(v.logits[i], i) >= last)
            keys[n++] = order_key(v.logits[i], i);
    }
    sort_falling(keys, n);
    for (int32_t i = 0; i < s->n_logprobs; i++) {
        if (i >= n) {
            top[i] = (di_logprob){.token = -1, .logprob = DI_LOGPROB_FLOOR};
            continue;
        }
        int32_t id = key_id(keys[i]);
        top[i] = (di_logprob){.token = id, .logprob = (float)((scaled(&v, id) - largest) - log_sum)};
    }
}

static di_status open_row(row *r, di_sampler *sm, const di_sampling *s, const float *logits, int64_t n_vocab,
                          uint64_t position, const uint32_t *mask, di_error *err) {
    di_status st = di_sampler_reserve(sm, n_vocab, err);
    if (st)
        return st;
    *r = (row){.logits = logits, .n_vocab = n_vocab, .mask = mask};
    r->temperature = di_sampling_is_greedy(s) ? GREEDY_BELOW : s->temperature;
    if ((st = find_best(r, position, err)))
        return st;
    uint64_t *keys = sm->memory;
    if (!di_sampling_is_greedy(s))
        r->last = last_survivor(r, s, keys, keys + n_vocab);
    return DI_OK;
}

di_status di_sample(di_sampler *sm, const di_sampling *s, const float *logits, int64_t n_vocab, uint64_t position,
                    const uint32_t *mask, int32_t *token, float *logprob, di_logprob *top, di_error *err) {
    row r;
    di_status st = open_row(&r, sm, s, logits, n_vocab, position, mask, err);
    if (st)
        return st;
    *token = di_sampling_is_greedy(s) ? r.best : draw(&r, s->seed, position);
    if (s->n_logprobs >= 0 && (logprob || top))
        log_probabilities(&r, s, sm->memory, *token, logprob, top);
    return DI_OK;
}

di_status di_sample_forced(di_sampler *sm, const di_sampling *s, const float *logits, int64_t n_vocab,
                           uint64_t position, const uint32_t *mask, int32_t token, float *logprob, di_logprob *top,
                           di_error *err) {
    if (s->n_logprobs < 0 || (!logprob && !top))
        return DI_OK;
    row r;
    di_status st = open_row(&r, sm, s, logits, n_vocab, position, mask, err);
    if (st)
        return st;
    log_probabilities(&r, s, sm->memory, token, logprob, top);
    return DI_OK;
}
