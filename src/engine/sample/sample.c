/* One token from a row of logits, the same on every machine.
 *
 * Everything that decides is either an integer, a comparison or double arithmetic of single IEEE operations in the
 * order written here (tensor/math.c has exp and log), so the choice depends on logits, parameters, seed and position
 * alone.
 *
 * Nothing is sorted but the few tokens whose log-probabilities are asked for. Top-p and top-k both keep a prefix of the
 * order "falling logit, then rising id"; a radix selection over (logit, id) keys finds the last token of that prefix,
 * among the tokens above a logit that the prefix is known to reach. The noise needs two logarithms, taken only for
 * tokens that a bound from the leading bits of z still lets win.
 *
 * Logits are looked at in blocks of 32, a word of the mask: most blocks are passed over by their largest logit. */
#include "sample.h"

#include <float.h>

#include "tensor/math_inline.h"

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

static inline float key_logit(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    return di_f32_from_bits(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

#define DIGIT_BITS 11

/* The last key, in falling order, of those with fewer than n_max keys before it and weights before it that sum to at
 * most weight_max, of which weight_before lies before all keys here; 0 when all are. weights NULL: keys are only
 * counted. Both arrays are overwritten; n >= 1.
 *
 * One digit of the key at a time, from the top: the digit's first bucket at whose end a limit is passed holds the last
 * kept key, because its own first key still obeys the limits. Keys are distinct, so that the search ends at one key. */
static uint64_t select_last(uint64_t *keys, uint64_t *weights, int64_t n, int64_t n_max, double weight_max,
                            uint64_t weight_before) {
    int64_t count[1 << DIGIT_BITS];
    uint64_t weight[1 << DIGIT_BITS];
    int64_t n_before = 0;
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

#define BLOCK 32

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_bits __attribute__((vector_size(16)));

static inline quad quad_load(const float *x) {
    quad v;
    memcpy(&v, x, sizeof v);
    return v;
}
static inline quad larger(quad a, quad b) {
    quad_bits is_a = a > b;
    return (quad)(((quad_bits)a & is_a) | ((quad_bits)b & ~is_a));
}

/* The logits of tokens [at, at + BLOCK), -infinity for what is not allowed or beyond the vocabulary: in place, or a
 * copy in buf. */
static inline const float *block_at(const row *r, int64_t at, float buf[BLOCK]) {
    const float *logits = r->logits + at;
    int64_t n = DI_MIN((int64_t)BLOCK, r->n_vocab - at);
    uint32_t mask = r->mask ? r->mask[at / BLOCK] : UINT32_MAX;
    if (n == BLOCK && mask == UINT32_MAX)
        return logits;
    if (n < BLOCK) {
        for (int i = 0; i < BLOCK; i++)
            buf[i] = i < n && (mask >> i & 1) ? logits[i] : -__builtin_inff();
        return buf;
    }
    const quad_bits bit = {1, 2, 4, 8};
    const quad none = {-__builtin_inff(), -__builtin_inff(), -__builtin_inff(), -__builtin_inff()};
    for (int i = 0; i < BLOCK; i += 4, mask >>= 4) {
        quad_bits is_in = (bit & (int32_t)(mask & 15)) != 0;
        quad v = (quad)(((quad_bits)quad_load(logits + i) & is_in) | ((quad_bits)none & ~is_in));
        memcpy(buf + i, &v, sizeof v);
    }
    return buf;
}

static inline float block_max(const float *x) {
    quad m[BLOCK / 4];
    for (int i = 0; i < BLOCK / 4; i++)
        m[i] = quad_load(x + 4 * i);
    for (int n = BLOCK / 8; n > 0; n /= 2) {
        for (int i = 0; i < n; i++)
            m[i] = larger(m[i], m[i + n]);
    }
    float a = m[0][0] > m[0][1] ? m[0][0] : m[0][1], b = m[0][2] > m[0][3] ? m[0][2] : m[0][3];
    return a > b ? a : b;
}

/* Whether a token that is allowed to be drawn at all survives top-p and top-k; its logit is not -infinity. */
static inline bool survives(const row *r, float logit, int64_t id) {
    return order_key(logit, id) >= r->last;
}

/* No survivor's logit is below; the least finite one where all survive. */
static inline float least_logit(const row *r) {
    return r->last ? key_logit(r->last) : -FLT_MAX;
}

static inline double scaled(const row *r, float logit) {
    return (double)logit / r->temperature;
}

static di_status find_best(row *r, uint64_t position, di_error *err) {
    float best = -__builtin_inff();
    int64_t best_at = 0;
    int32_t n_nan = 0, n_allowed = 0;
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf), *raw = r->logits + at;
        int64_t n = DI_MIN((int64_t)BLOCK, r->n_vocab - at);
        for (int64_t i = 0; i < n; i++)
            n_nan += raw[i] != raw[i];
        for (int i = 0; i < BLOCK; i++)
            n_allowed += x[i] > -__builtin_inff();
        float most = block_max(x);
        if (most > best) {
            best = most;
            best_at = at;
        }
    }
    if (n_nan || best > 0x1.fffffep127f)
        return di_fail(err, DI_ERR_INTERNAL, "position %llu: the model's logits are not finite",
                       (unsigned long long)position);
    if (!n_allowed)
        return di_fail(err, DI_ERR_REQUEST, "position %llu: the request's constraints allow no token",
                       (unsigned long long)position);
    float buf[BLOCK];
    const float *x = block_at(r, best_at, buf);
    int32_t i = 0;
    while (x[i] != best)
        i++;
    r->best = (int32_t)best_at + i;
    r->n_allowed = n_allowed;
    return DI_OK;
}

/* Appends the keys of the block's tokens with logits in [low, high] that survive and, where weights are given by id,
 * moves their weights beside them; returns the new count. Without branches: every token is written, few are kept. */
static inline int64_t collect_block(const row *r, const float *x, int64_t at, float low, float high, uint64_t *keys,
                                    uint64_t *weights, int64_t n) {
    int64_t in_block = DI_MIN((int64_t)BLOCK, r->n_vocab - at);
    for (int64_t i = 0; i < in_block; i++) {
        uint64_t key = order_key(x[i], at + i);
        keys[n] = key;
        if (weights)
            weights[n] = weights[at + i];
        n += (x[i] >= low) & (x[i] <= high) & (key >= r->last);
    }
    return n;
}

/* Keys of the survivors whose logits lie in [low, high], and their weights. */
static int64_t collect(const row *r, float low, float high, uint64_t *keys, uint64_t *weights) {
    int64_t n = 0;
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf);
        if (block_max(x) >= low)
            n = collect_block(r, x, at, low, high, keys, weights, n);
    }
    return n;
}

enum { MAXIMA_MAX = 4096 };

/* A logit that at least k survivors reach where there are so many: the k-th largest of the maxima of twice as many
 * groups of tokens, which are spread over the vocabulary. For a k too large for that, one that all reach. */
static float limit_of_count(const row *r, int64_t k, uint64_t *keys) {
    int64_t n_groups = DI_ROUND_UP(2 * k, BLOCK);
    if (n_groups > MAXIMA_MAX || 2 * n_groups > r->n_vocab)
        return -FLT_MAX;
    float most[MAXIMA_MAX];
    for (int64_t g = 0; g < MAXIMA_MAX; g++) /* all of them: groups are written by whole blocks */
        most[g] = -__builtin_inff();
    float least = least_logit(r);
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK], *m = most + at % n_groups;
        const float *x = block_at(r, at, buf);
        if (r->last && block_max(x) < least)
            continue;
        for (int i = 0; i < BLOCK && r->last; i++) {
            if (x[i] > m[i] && survives(r, x[i], at + i))
                m[i] = x[i];
        }
        for (int i = 0; i < BLOCK && !r->last; i++)
            m[i] = x[i] > m[i] ? x[i] : m[i];
    }
    for (int64_t g = 0; g < n_groups; g++)
        keys[g] = order_key(most[g], g);
    float limit = key_logit(select_last(keys, NULL, n_groups, k, __builtin_inf(), 0));
    return limit > -FLT_MAX ? limit : -FLT_MAX;
}

/* Slices of the scale of logits, an eighth of a temperature each, from the largest down; the last one has the rest. */
enum { SLICES = 256 };

typedef struct slicing {
    float largest, per_logit;
} slicing;

static inline slicing slicing_of(const row *r) {
    return (slicing){r->logits[r->best], (float)(8.0 / r->temperature)};
}

/* Falling logits give rising slices: each step of this is monotone. */
static inline int slice_of(const slicing *z, float logit) {
    float at = (z->largest - logit) * z->per_logit;
    return (int)(at < SLICES - 1 ? at : SLICES - 1);
}

/* round(2^36 * exp(x - largest x)) of every token by id, zero where it is not allowed and below a distance where it
 * rounds to zero, 37*log(2). Adds them up by slice and returns their sum. */
static uint64_t integer_weights(const row *r, uint64_t *weights, uint64_t mass[SLICES]) {
    double largest = scaled(r, r->logits[r->best]);
    slicing z = slicing_of(r);
    uint64_t total = 0, halves[2][SLICES];
    memset(halves, 0, sizeof halves);
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf);
        double w[BLOCK];
        uint64_t bits[BLOCK];
        int slice[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            double distance = scaled(r, x[i]) - largest;
            w[i] = distance < -26.0 ? -__builtin_inf() : distance;
        }
        for (int i = 0; i < BLOCK; i++)
            slice[i] = slice_of(&z, x[i]);
        for (int i = 0; i < BLOCK; i += DI_EXP_BLOCK)
            di_exp_block(w + i);
        /* The sum's low mantissa bits are the rounded number. */
        for (int i = 0; i < BLOCK; i++)
            w[i] = WEIGHT_ONE * w[i] + ROUND_SHIFT;
        memcpy(bits, w, sizeof bits);
        for (int i = 0; i < BLOCK; i++)
            bits[i] &= 0x0007FFFFFFFFFFFFu;
        for (int i = 0; i < BLOCK; i += 2) { /* two sums, so that equal slices wait less for each other */
            halves[0][slice[i]] += bits[i];
            halves[1][slice[i + 1]] += bits[i + 1];
        }
        memcpy(weights + at, bits, (size_t)DI_MIN((int64_t)BLOCK, r->n_vocab - at) * sizeof *bits);
    }
    for (int i = 0; i < SLICES; i++) {
        mass[i] = halves[0][i] + halves[1][i];
        total += mass[i];
    }
    return total;
}

/* The last token that top-p alone keeps: only the slice in which the limit is passed has to be searched. */
static uint64_t last_of_weight(const row *r, const uint64_t mass[SLICES], double weight_max, uint64_t *keys,
                               uint64_t *weights) {
    uint64_t before = 0;
    int slice = 0;
    for (; slice < SLICES && (double)(before + mass[slice]) <= weight_max; slice++)
        before += mass[slice];
    if (slice == SLICES)
        return 0;
    slicing z = slicing_of(r);
    int64_t n = 0;
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf);
        int32_t in_slice[BLOCK], any = 0;
        for (int i = 0; i < BLOCK; i++) {
            in_slice[i] = (slice_of(&z, x[i]) == slice) & (x[i] > -__builtin_inff());
            any |= in_slice[i];
        }
        for (int i = 0; i < BLOCK && any; i++) {
            if (!in_slice[i])
                continue;
            keys[n] = order_key(x[i], at + i);
            weights[n++] = weights[at + i];
        }
    }
    return select_last(keys, weights, n, INT64_MAX, weight_max, before);
}

/* The order key of the last token that top-p and top-k keep; 0 when all are kept. The tokens above a logit are a prefix
 * of the order, so that a search among them ends where the search among all would, provided that a limit is passed
 * there. */
static uint64_t last_survivor(const row *r, const di_sampling *s, uint64_t *keys, uint64_t *weights) {
    bool has_top_p = s->top_p<1.0, has_top_k = s->top_k> 0 && s->top_k < r->n_allowed;
    if (!has_top_p && !has_top_k)
        return 0;
    double weight_max = __builtin_inf();
    if (has_top_p) {
        uint64_t mass[SLICES];
        weight_max = s->top_p * (double)integer_weights(r, weights, mass);
        if (!has_top_k)
            return last_of_weight(r, mass, weight_max, keys, weights);
    }
    float limit = limit_of_count(r, s->top_k, keys);
    int64_t n = collect(r, limit, FLT_MAX, keys, has_top_p ? weights : NULL);
    return select_last(keys, has_top_p ? weights : NULL, n, s->top_k, weight_max, 0);
}

/* How many leading ones z may have at most for a token of score x to stay below `score`, plus one; 0 when any may win.
 */
static int hopeless_ones(double x, double score) {
    int ones = 0;
    while (ones < 63 && x + (double)(ones + 1) * 0.69315 < score)
        ones++;
    return ones;
}

/* The survivor with the largest x + g, ties to the lower id. The most likely token goes first, since it sets a bound
 * that few others pass. x + bound and x + g round monotonically, so that skipping is exact. */
static int32_t draw(const row *r, uint64_t seed, uint64_t position) {
    int32_t winner = r->best;
    double score = scaled(r, r->logits[winner]) + di_noise_gumbel(di_noise_bits(seed, position, (uint64_t)winner));
    float least = least_logit(r);
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf);
        float most = block_max(x);
        if (!(most >= least) || scaled(r, most) + 37.0 < score)
            continue; /* g is below 36.8 */
        int ones = hopeless_ones(scaled(r, most), score);
        for (int i = 0; i < BLOCK; i++) {
            uint64_t z = di_noise_bits(seed, position, (uint64_t)(at + i));
            if ((ones && ~z >> (64 - ones)) || !(x[i] >= least))
                continue; /* fewer leading ones than even the block's largest needs */
            double at_i = scaled(r, x[i]);
            if (at + i == r->best || at_i + gumbel_bound(z) < score || !survives(r, x[i], at + i))
                continue;
            double candidate = at_i + di_noise_gumbel(z);
            if (candidate > score || (candidate == score && at + i < winner)) {
                score = candidate;
                winner = (int32_t)(at + i);
            }
        }
    }
    return winner;
}

/* Log-softmax over what `processed` says: of survivors after temperature, or of the logits after masks. Sums run over
 * rising ids, in double; what does not survive adds zero. */
static void log_probabilities(const row *r, const di_sampling *s, uint64_t *keys, int32_t token, float *logprob,
                              di_logprob *top) {
    row v = *r;
    if (!s->logprobs_processed) {
        v.temperature = 1.0;
        v.last = 0;
    }
    double largest = scaled(&v, v.logits[v.best]), sum = 0.0;
    float least = least_logit(&v), buf[BLOCK];
    int64_t n_survivors = 0;
    for (int64_t at = 0; at < v.n_vocab; at += BLOCK) {
        const float *x = block_at(&v, at, buf);
        if (!(block_max(x) >= least))
            continue;
        double e[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            bool is_in = x[i] >= least && (!v.last || survives(&v, x[i], at + i));
            e[i] = is_in ? scaled(&v, x[i]) - largest : -__builtin_inf();
            n_survivors += is_in;
        }
        for (int i = 0; i < BLOCK; i += DI_EXP_BLOCK)
            di_exp_block(e + i);
        for (int i = 0; i < BLOCK; i++)
            sum += e[i];
    }
    double log_sum = di_ln(sum);
    if (logprob) {
        float x = token >= 0 && token < v.n_vocab ? block_at(&v, token / BLOCK * BLOCK, buf)[token % BLOCK]
                                                  : -__builtin_inff();
        bool is_in = x >= least && survives(&v, x, token);
        *logprob = is_in ? (float)((scaled(&v, x) - largest) - log_sum) : DI_LOGPROB_FLOOR;
    }
    if (!top || s->n_logprobs <= 0)
        return;
    if (n_survivors > s->n_logprobs) {
        int64_t n = collect(&v, limit_of_count(&v, s->n_logprobs, keys), FLT_MAX, keys, NULL);
        v.last = select_last(keys, NULL, n, s->n_logprobs, __builtin_inf(), 0);
    }
    int64_t n = collect(&v, least_logit(&v), FLT_MAX, keys, NULL);
    sort_falling(keys, n);
    for (int32_t i = 0; i < s->n_logprobs; i++) {
        if (i >= n) {
            top[i] = (di_logprob){.token = -1, .logprob = DI_LOGPROB_FLOOR};
            continue;
        }
        top[i] = (di_logprob){.token = key_id(keys[i]),
                              .logprob = (float)((scaled(&v, key_logit(keys[i])) - largest) - log_sum)};
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
