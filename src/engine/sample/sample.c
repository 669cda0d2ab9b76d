/* One token from a row of logits, the same on every machine.
 *
 * Everything that decides is either an integer, a comparison or double arithmetic of single IEEE operations in the
 * order written here (tensor/math.c has exp and log), so the choice depends on logits, parameters, seed and position
 * alone.
 *
 * Masks are joined into one. Bias and penalties change a few logits of a copy, in single precision and in the order
 * that vLLM has; a request without them is served from the row in place. Nothing is sorted but the few tokens whose
 * log-probabilities are asked for. Top-p and top-k both keep a prefix of the order "falling logit, then rising id"; a
 * radix selection over (logit, id) keys finds the last token of that prefix, among the tokens above a logit that the
 * prefix is known to reach. Min-p is a test of a token's weight, made only near its border. The noise needs two
 * logarithms, taken only for tokens that a bound from the leading bits of z still lets win.
 *
 * Logits are looked at in blocks of 32, a word of the mask: most blocks are passed over by their largest logit. */
#include "sample.h"

#include <float.h>

#include "tensor/math_inline.h"

#define WEIGHT_ONE 0x1p36      /* integer weight of the most likely token */
#define LEAST_DISTANCE (-26.0) /* below it a weight rounds to zero: that happens at -37*log(2) */
#define ROUND_SHIFT 0x1.8p52   /* adding and subtracting it rounds |x| < 2^51 to an integer, ties to even */

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

/* Room for one row's work: keys and weights [n_vocab], the changed logits [n_vocab], the joined mask. */
typedef struct scratch {
    uint64_t *keys, *weights;
    float *logits;
    uint32_t *mask;
} scratch;

static scratch scratch_of(const di_sampler *sm, int64_t n_vocab) {
    scratch z = {.keys = sm->memory};
    z.weights = z.keys + n_vocab;
    z.logits = (float *)(z.weights + n_vocab);
    z.mask = (uint32_t *)(z.logits + n_vocab);
    return z;
}

di_status di_sampler_reserve(di_sampler *sm, int64_t n_vocab, di_error *err) {
    size_t bytes, mask_bytes = n_vocab < 1 ? 0 : (size_t)DI_CEIL_DIV(n_vocab, 32) * sizeof(uint32_t);
    if (n_vocab < 1 || !di_size_mul(&bytes, (size_t)n_vocab, 2 * sizeof(uint64_t) + sizeof(float)) ||
        !di_size_add(&bytes, bytes, mask_bytes))
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
    double temperature;
    int32_t best; /* allowed token with the largest logit; -1 when none is allowed */
    int64_t n_allowed;
    uint64_t last; /* order key of the last survivor of top-p and top-k; 0: all survive */
    /* Min-p: the least weight that survives, 0 = off; below low_logit none does, at sure_logit and above all do. */
    double min_weight;
    float low_logit, sure_logit;
} row;

/* A row whose allowed tokens all survive. */
static row row_of(const float *logits, int64_t n_vocab, const uint32_t *mask) {
    return (row){
        .logits = logits,
        .n_vocab = n_vocab,
        .mask = mask,
        .temperature = 1.0,
        .best = -1,
        .low_logit = -FLT_MAX,
        .sure_logit = -FLT_MAX,
    };
}

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

static inline double scaled(const row *r, float logit) {
    return (double)logit / r->temperature;
}

/* round(2^36 * exp(x - largest x)), ties to even: what integer_weights has for the token. */
static double weight_of(const row *r, float logit) {
    double distance = scaled(r, logit) - scaled(r, r->logits[r->best]);
    return distance < LEAST_DISTANCE ? 0.0 : (WEIGHT_ONE * di_exp(distance) + ROUND_SHIFT) - ROUND_SHIFT;
}

/* Whether anything falls to top-p, top-k or min-p. */
static inline bool is_filtered(const row *r) {
    return r->last || r->min_weight > 0.0;
}

/* Whether a token that is allowed to be drawn at all survives top-p, top-k and min-p; its logit is not -infinity. */
static inline bool survives(const row *r, float logit, int64_t id) {
    return order_key(logit, id) >= r->last && (logit >= r->sure_logit || weight_of(r, logit) >= r->min_weight);
}

/* No survivor's logit is below; the least finite one where all survive. */
static inline float least_logit(const row *r) {
    float least = r->last ? key_logit(r->last) : -FLT_MAX;
    return least > r->low_logit ? least : r->low_logit;
}

/* Finds the best token and counts the allowed ones, of which there may be none. DI_ERR_INTERNAL for NaN anywhere and
 * for +infinity. */
static di_status find_best(row *r, di_error *err) {
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
    if (n_nan || best > FLT_MAX)
        return di_sample_failure(DI_SAMPLE_NOT_FINITE, false, 0, err);
    r->n_allowed = n_allowed;
    if (!n_allowed)
        return DI_OK;
    float buf[BLOCK];
    const float *x = block_at(r, best_at, buf);
    int32_t i = 0;
    while (x[i] != best)
        i++;
    r->best = (int32_t)best_at + i;
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

/* Drops the keys of tokens that fall to min-p; the others keep their order. */
static int64_t drop_light(const row *r, uint64_t *keys, int64_t n) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        float logit = key_logit(keys[i]);
        if (logit >= r->sure_logit || weight_of(r, logit) >= r->min_weight)
            keys[kept++] = keys[i];
    }
    return kept;
}

/* Keys of the survivors whose logits lie in [low, high], and their weights (not where min-p is on). */
static int64_t collect(const row *r, float low, float high, uint64_t *keys, uint64_t *weights) {
    int64_t n = 0;
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK];
        const float *x = block_at(r, at, buf);
        if (block_max(x) >= low)
            n = collect_block(r, x, at, low, high, keys, weights, n);
    }
    return r->min_weight > 0.0 ? drop_light(r, keys, n) : n;
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
    bool has_fallen = is_filtered(r);
    for (int64_t at = 0; at < r->n_vocab; at += BLOCK) {
        float buf[BLOCK], *m = most + at % n_groups;
        const float *x = block_at(r, at, buf);
        if (has_fallen && block_max(x) < least)
            continue;
        for (int i = 0; i < BLOCK && has_fallen; i++) {
            if (x[i] > m[i] && survives(r, x[i], at + i))
                m[i] = x[i];
        }
        for (int i = 0; i < BLOCK && !has_fallen; i++)
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

/* round(2^36 * exp(x - largest x)) of every token by id, zero where it is not allowed. Adds them up by slice and
 * returns their sum. */
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
            w[i] = distance < LEAST_DISTANCE ? -__builtin_inf() : distance;
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

/* Sets min-p up for the survivors of top-p and top-k. Between the two logits that decide without a weight lies one unit
 * of weight on either side, and far more than the rounding of what is computed here. */
static void set_min_p(row *r, double min_p) {
    double largest = scaled(r, r->logits[r->best]), weight = min_p * WEIGHT_ONE;
    double margin = 1e-9 * ((largest < 0.0 ? -largest : largest) - LEAST_DISTANCE);
    double low = weight > 1.0 ? di_ln((weight - 1.0) / WEIGHT_ONE) : LEAST_DISTANCE;
    low = (largest + DI_MAX(low, LEAST_DISTANCE) - margin) * r->temperature;
    double sure = (largest + di_ln((weight + 1.0) / WEIGHT_ONE) + margin) * r->temperature;
    low -= 1e-6 * (low < 0.0 ? -low : low) + FLT_MIN;
    r->min_weight = weight;
    r->low_logit = low > -FLT_MAX ? (float)low : -FLT_MAX;
    if (sure <= -FLT_MAX) {
        r->sure_logit = -FLT_MAX;
    } else {
        sure += 1e-6 * (sure < 0.0 ? -sure : sure) + FLT_MIN;
        r->sure_logit = sure <= FLT_MAX ? (float)sure : __builtin_inff();
    }
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

/* Where a token is known to have no probability. */
static void no_probabilities(float *logprob, di_logprob *top, int32_t n_top) {
    if (logprob)
        *logprob = DI_LOGPROB_FLOOR;
    for (int32_t i = 0; top && i < n_top; i++)
        top[i] = (di_logprob){.token = -1, .logprob = DI_LOGPROB_FLOOR};
}

/* A sum of doubles over a row is made by runs of tokens, each as a tree of halves, and the runs in rising order: an
 * order that vectors keep here, and a block of threads for each run elsewhere. */
enum { RUN = 1024 };

/* The sum of e [RUN], which is overwritten. */
static double run_sum(double *e) {
    for (int half = RUN / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            e[i] += e[i + half];
    }
    return e[0];
}

/* Log-softmax over the survivors; what does not survive adds zero to the sum. */
static void log_probabilities(const row *r, int32_t n_top, uint64_t *keys, int32_t token, float *logprob,
                              di_logprob *top) {
    if (r->n_allowed == 0) {
        no_probabilities(logprob, top, n_top);
        return;
    }
    row v = *r;
    double largest = scaled(&v, v.logits[v.best]), sum = 0.0;
    float least = least_logit(&v), buf[BLOCK];
    bool has_fallen = is_filtered(&v);
    int64_t n_survivors = 0;
    for (int64_t first = 0; first < v.n_vocab; first += RUN) {
        double e[RUN] = {0};
        bool has_any = false;
        for (int64_t at = first; at < DI_MIN(first + RUN, v.n_vocab); at += BLOCK) {
            const float *x = block_at(&v, at, buf);
            double *block = e + (at - first);
            if (!(block_max(x) >= least))
                continue;
            has_any = true;
            for (int i = 0; i < BLOCK; i++) {
                bool is_in = x[i] >= least && (!has_fallen || survives(&v, x[i], at + i));
                block[i] = is_in ? scaled(&v, x[i]) - largest : -__builtin_inf();
                n_survivors += is_in;
            }
            for (int i = 0; i < BLOCK; i += DI_EXP_BLOCK)
                di_exp_block(block + i);
        }
        sum += has_any ? run_sum(e) : 0.0;
    }
    double log_sum = di_ln(sum);
    if (logprob) {
        float x = token >= 0 && token < v.n_vocab ? block_at(&v, token / BLOCK * BLOCK, buf)[token % BLOCK]
                                                  : -__builtin_inff();
        bool is_in = x >= least && survives(&v, x, token);
        *logprob = is_in ? (float)((scaled(&v, x) - largest) - log_sum) : DI_LOGPROB_FLOOR;
    }
    if (!top || n_top <= 0)
        return;
    if (n_survivors > n_top) {
        int64_t n = collect(&v, limit_of_count(&v, n_top, keys), FLT_MAX, keys, NULL);
        v.last = select_last(keys, NULL, n, n_top, __builtin_inf(), 0);
    }
    int64_t n = collect(&v, least_logit(&v), FLT_MAX, keys, NULL);
    sort_falling(keys, n);
    for (int32_t i = 0; i < n_top; i++) {
        if (i >= n) {
            top[i] = (di_logprob){.token = -1, .logprob = DI_LOGPROB_FLOOR};
            continue;
        }
        top[i] = (di_logprob){.token = key_id(keys[i]),
                              .logprob = (float)((scaled(&v, key_logit(keys[i])) - largest) - log_sum)};
    }
}

/* Probabilities of the survivors and their logarithms (may be NULL). */
static void distribution(const row *r, bool is_greedy, float *p, float *ln_p) {
    double largest = scaled(r, r->logits[r->best]), sum = 0.0;
    float least = least_logit(r), buf[BLOCK];
    bool has_fallen = is_filtered(r);
    for (int64_t first = 0; first < r->n_vocab; first += RUN) {
        double e[RUN] = {0};
        for (int64_t at = first; at < DI_MIN(first + RUN, r->n_vocab); at += BLOCK) {
            const float *x = block_at(r, at, buf);
            int64_t n = DI_MIN((int64_t)BLOCK, r->n_vocab - at);
            double distance[BLOCK], *block = e + (at - first);
            for (int i = 0; i < BLOCK; i++) {
                bool is_in =
                    is_greedy ? at + i == r->best : x[i] >= least && (!has_fallen || survives(r, x[i], at + i));
                block[i] = distance[i] = is_in ? scaled(r, x[i]) - largest : -__builtin_inf();
            }
            for (int i = 0; i < BLOCK; i += DI_EXP_BLOCK)
                di_exp_block(block + i);
            for (int i = 0; i < n; i++) {
                p[at + i] = (float)block[i];
                if (ln_p)
                    ln_p[at + i] = (float)distance[i];
            }
        }
        sum += run_sum(e);
    }
    float log_sum = (float)di_ln(sum), inverse = (float)(1.0 / sum);
    for (int64_t i = 0; i < r->n_vocab; i++)
        p[i] *= inverse;
    for (int64_t i = 0; ln_p && i < r->n_vocab; i++)
        ln_p[i] -= log_sum;
}

/* ---- masks, bias, penalties ---------------------------------------------------------------------------------------
 */

static inline void forbid(uint32_t *mask, int64_t n_vocab, int32_t token) {
    if (token >= 0 && token < n_vocab)
        mask[token / BLOCK] &= ~(1u << (token % BLOCK));
}

/* What is allowed: the caller's mask in place where nothing else forbids tokens, else all of them joined. */
static const uint32_t *joined_mask(const di_sample_args *a, uint32_t *out) {
    const di_sampling *s = a->sampling;
    bool is_short = a->n_output < s->min_tokens && (a->eos_id >= 0 || s->n_stop_tokens > 0);
    if (!a->blacklist && !is_short)
        return a->mask;
    int64_t n_words = DI_CEIL_DIV(a->n_vocab, BLOCK);
    for (int64_t i = 0; i < n_words; i++)
        out[i] = (a->mask ? a->mask[i] : UINT32_MAX) & ~(a->blacklist ? a->blacklist[i] : 0);
    if (is_short) {
        forbid(out, a->n_vocab, a->eos_id);
        for (size_t i = 0; i < s->n_stop_tokens; i++)
            forbid(out, a->n_vocab, s->stop_tokens[i]);
    }
    return out;
}

/* The penalties of a request in the precision of logits. */
typedef struct penalties {
    float presence, frequency, repetition;
} penalties;

/* What becomes of a logit; a finite one stays finite, so that no penalty makes a token impossible. */
static float penalised(float logit, const penalties *p, bool is_in_prompt, int64_t n_output) {
    if (!(logit >= -FLT_MAX && logit <= FLT_MAX))
        return logit;
    float x = logit;
    if (p->repetition != 1.0f && (is_in_prompt || n_output > 0))
        x = x > 0.0f ? x / p->repetition : x * p->repetition;
    if (n_output > 0) {
        x = x - p->frequency * (float)n_output;
        x = x - p->presence;
    }
    x = x > FLT_MAX ? FLT_MAX : x;
    return x < -FLT_MAX ? -FLT_MAX : x;
}

static int64_t count_of(const int32_t *tokens, int32_t n, int32_t token) {
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++)
        count += tokens[i] == token;
    return count;
}

static void penalise(float *logits, const di_sample_args *a) {
    const di_sampling *s = a->sampling;
    /* A repetition beyond single precision becomes the nearest that still multiplies and divides. */
    double repetition = DI_MAX(FLT_MIN, DI_MIN(FLT_MAX, s->repetition_penalty));
    penalties p = {(float)s->presence_penalty, (float)s->frequency_penalty, (float)repetition};
    size_t n = a->history ? a->history->n : 0;
    for (size_t i = 0; i < n; i++) {
        const di_history_entry *e = &a->history->entries[i];
        if (e->token < 0 || e->token >= a->n_vocab)
            continue;
        int64_t n_output = e->n_output + count_of(a->drafts, a->n_drafts, e->token);
        logits[e->token] = penalised(logits[e->token], &p, e->is_in_prompt, n_output);
    }
    for (int32_t i = 0; i < a->n_drafts; i++) {
        int32_t token = a->drafts[i];
        bool is_done = count_of(a->drafts, i, token) > 0 || (a->history && di_history_find(a->history, token));
        if (!is_done && token >= 0 && token < a->n_vocab)
            logits[token] = penalised(logits[token], &p, false, count_of(a->drafts, a->n_drafts, token));
    }
}

/* Values beyond +-100 are cut, as users of other engines know it: 100 already decides for or against a token. A finite
 * logit stays finite. */
static void add_bias(float *logits, int64_t n_vocab, const di_sampling *s) {
    for (size_t i = 0; i < s->n_bias; i++) {
        int32_t id = s->bias_ids[i];
        if (id < 0 || id >= n_vocab || !(logits[id] >= -FLT_MAX && logits[id] <= FLT_MAX))
            continue;
        float bias = DI_MAX(-100.0f, DI_MIN(100.0f, s->bias_values[i])), x = logits[id] + bias;
        logits[id] = DI_MAX(-FLT_MAX, DI_MIN(FLT_MAX, x));
    }
}

/* ---- sampling ------------------------------------------------------------------------------------------------------
 */

di_status di_sample_failure(int32_t status, bool has_position, uint64_t position, di_error *err) {
    if (status == DI_SAMPLE_OK)
        return DI_OK;
    di_status st = status == DI_SAMPLE_NOTHING_ALLOWED
                       ? di_fail(err, DI_ERR_REQUEST, "the request's constraints allow no token")
                       : di_fail(err, DI_ERR_INTERNAL, "the model's logits are not finite");
    return has_position ? di_error_context(err, st, "position %llu", (unsigned long long)position) : st;
}

/* The row that a token is drawn from: bias and penalties in a copy, then what top-p, top-k and min-p leave. */
static di_status process(row *r, const di_sample_args *a, const scratch *z, di_error *err) {
    const di_sampling *s = a->sampling;
    bool has_penalties = di_sampling_needs_history(s) && ((a->history && a->history->n > 0) || a->n_drafts > 0);
    if (has_penalties || s->n_bias > 0) {
        memcpy(z->logits, r->logits, (size_t)r->n_vocab * sizeof *z->logits);
        add_bias(z->logits, r->n_vocab, s);
        if (has_penalties)
            penalise(z->logits, a);
        *r = row_of(z->logits, r->n_vocab, r->mask);
        di_status st = find_best(r, err);
        if (st)
            return st;
    }
    if (di_sampling_is_greedy(s)) {
        r->temperature = DI_SAMPLE_GREEDY_TEMPERATURE;
        return DI_OK;
    }
    r->temperature = s->temperature;
    r->last = last_survivor(r, s, z->keys, z->weights);
    if (s->min_p > 0.0)
        set_min_p(r, s->min_p);
    return DI_OK;
}

di_status di_sample(di_sampler *sm, const di_sample_args *a, int32_t *token, di_error *err) {
    const di_sampling *s = a->sampling;
    bool has_logprobs = s->n_logprobs >= 0 && (a->logprob || a->top), is_forced = a->forced >= 0;
    if (is_forced && !has_logprobs) {
        *token = a->forced;
        return DI_OK;
    }
    di_status st = di_sampler_reserve(sm, a->n_vocab, err);
    if (st)
        return st;
    scratch z = scratch_of(sm, a->n_vocab);
    row raw = row_of(a->logits, a->n_vocab, joined_mask(a, z.mask));
    st = find_best(&raw, err);
    row r = raw;
    if (!st && raw.n_allowed == 0 && !is_forced)
        st = di_sample_failure(DI_SAMPLE_NOTHING_ALLOWED, false, 0, err);
    if (!st && raw.n_allowed > 0 && (!is_forced || s->logprobs_processed))
        st = process(&r, a, &z, err);
    if (st)
        return di_error_context(err, st, "position %llu", (unsigned long long)a->position);
    int32_t chosen = a->forced;
    if (!is_forced && a->choose) {
        float *p = (float *)z.weights; /* which no longer are needed */
        distribution(&r, di_sampling_is_greedy(s), p, a->ln_p);
        chosen = a->choose(a->choose_ctx, p, a->n_vocab);
    } else if (!is_forced) {
        chosen = di_sampling_is_greedy(s) ? r.best : draw(&r, a->seed, a->position);
    }
    if (has_logprobs)
        log_probabilities(s->logprobs_processed ? &r : &raw, s->n_logprobs, z.keys, chosen, a->logprob, a->top);
    *token = chosen;
    return DI_OK;
}

di_status di_logprobs_of(di_sampler *sm, const float *logits, int64_t n_vocab, int32_t token, int32_t n_top,
                         float *logprob, di_logprob *top, di_error *err) {
    di_status st = di_sampler_reserve(sm, n_vocab, err);
    if (st)
        return st;
    row r = row_of(logits, n_vocab, NULL);
    if ((st = find_best(&r, err)))
        return st;
    log_probabilities(&r, n_top, scratch_of(sm, n_vocab).keys, token, logprob, top);
    return DI_OK;
}
