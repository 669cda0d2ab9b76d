/* The parameters of sampling: defaults, ranges, and token sets written as text.
 *
 * The ranges are those that users of other engines know. A refusal names the field as a request spells it, the value
 * and what is expected; comparisons are written so that NaN fails them. */
#include "sample.h"

#include <float.h>

#define GREEDY_BELOW 1e-5 /* temperatures below are greedy */

void di_sampling_init(di_sampling *s) {
    memset(s, 0, sizeof *s);
    s->temperature = 1.0;
    s->top_p = 1.0;
    s->top_k = -1;
    s->repetition_penalty = 1.0;
    s->n_logprobs = -1;
    s->n_prompt_logprobs = -1;
}

bool di_sampling_is_greedy(const di_sampling *s) {
    return s->temperature < GREEDY_BELOW;
}

bool di_sampling_needs_prompt_history(const di_sampling *s) {
    return s->repetition_penalty != 1.0;
}

bool di_sampling_needs_history(const di_sampling *s) {
    return s->presence_penalty != 0.0 || s->frequency_penalty != 0.0 || di_sampling_needs_prompt_history(s);
}

/* ---- ranges -------------------------------------------------------------------------------------------------------
 */

static di_status check_distribution(const di_sampling *s, di_error *err) {
    if (!(s->temperature >= 0.0 && s->temperature <= DBL_MAX))
        return di_fail(err, DI_ERR_RANGE, "'temperature': %g, expected a finite number of 0 or more", s->temperature);
    if (!(s->top_p > 0.0 && s->top_p <= 1.0))
        return di_fail(err, DI_ERR_RANGE, "'top_p': %g, expected a number above 0 and not above 1", s->top_p);
    if (s->top_k < -1 || s->top_k > INT32_MAX)
        return di_fail(err, DI_ERR_RANGE, "'top_k': %lld, expected -1 or 0 (off) or 1 to %d", (long long)s->top_k,
                       INT32_MAX);
    if (!(s->min_p >= 0.0 && s->min_p <= 1.0))
        return di_fail(err, DI_ERR_RANGE, "'min_p': %g, expected 0 to 1", s->min_p);
    return DI_OK;
}

static di_status check_logits(const di_sampling *s, di_error *err) {
    if (!(s->presence_penalty >= -2.0 && s->presence_penalty <= 2.0))
        return di_fail(err, DI_ERR_RANGE, "'presence_penalty': %g, expected -2 to 2", s->presence_penalty);
    if (!(s->frequency_penalty >= -2.0 && s->frequency_penalty <= 2.0))
        return di_fail(err, DI_ERR_RANGE, "'frequency_penalty': %g, expected -2 to 2", s->frequency_penalty);
    if (!(s->repetition_penalty > 0.0 && s->repetition_penalty <= DBL_MAX))
        return di_fail(err, DI_ERR_RANGE, "'repetition_penalty': %g, expected a finite number above 0",
                       s->repetition_penalty);
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] < 0)
            return di_fail(err, DI_ERR_RANGE, "'logit_bias': token id %d, expected 0 or more", s->bias_ids[i]);
        if (!(s->bias_values[i] >= -FLT_MAX && s->bias_values[i] <= FLT_MAX))
            return di_fail(err, DI_ERR_RANGE, "'logit_bias': %g for token %d, expected a finite number",
                           (double)s->bias_values[i], s->bias_ids[i]);
    }
    return DI_OK;
}

static di_status check_length(const di_sampling *s, di_error *err) {
    if (s->max_tokens < 0)
        return di_fail(err, DI_ERR_RANGE, "'max_tokens': %lld, expected 1 or more", (long long)s->max_tokens);
    if (s->min_tokens < 0)
        return di_fail(err, DI_ERR_RANGE, "'min_tokens': %lld, expected 0 or more", (long long)s->min_tokens);
    if (s->max_tokens > 0 && s->min_tokens > s->max_tokens)
        return di_fail(err, DI_ERR_RANGE, "'min_tokens': %lld, expected 0 to max_tokens, which is %lld",
                       (long long)s->min_tokens, (long long)s->max_tokens);
    for (size_t i = 0; i < s->n_stop_tokens; i++) {
        if (s->stop_tokens[i] < 0)
            return di_fail(err, DI_ERR_RANGE, "'stop_token_ids': %d, expected token ids of 0 or more",
                           s->stop_tokens[i]);
    }
    return DI_OK;
}

di_status di_sampling_check(const di_sampling *s, di_error *err) {
    di_status st = check_distribution(s, err);
    if (st || (st = check_logits(s, err)) || (st = check_length(s, err)))
        return st;
    if (s->n_logprobs < -1 || s->n_logprobs > DI_LOGPROBS_MAX)
        return di_fail(err, DI_ERR_RANGE, "'logprobs': %d, expected 0 to %d", s->n_logprobs, DI_LOGPROBS_MAX);
    if (s->n_prompt_logprobs < -1 || s->n_prompt_logprobs > DI_LOGPROBS_MAX)
        return di_fail(err, DI_ERR_RANGE, "'prompt_logprobs': %d, expected 0 to %d", s->n_prompt_logprobs,
                       DI_LOGPROBS_MAX);
    return DI_OK;
}

di_status di_sampling_check_vocab(const di_sampling *s, int64_t n_vocab, di_error *err) {
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] < 0 || s->bias_ids[i] >= n_vocab)
            return di_fail(err, DI_ERR_RANGE, "'logit_bias': token id %d is outside the vocabulary, expected 0 to %lld",
                           s->bias_ids[i], (long long)n_vocab - 1);
    }
    return DI_OK;
}

/* ---- token sets ---------------------------------------------------------------------------------------------------
 */

static const char *skip_blanks(const char *p) {
    while (*p == ' ' || *p == '\t')
        p++;
    return p;
}

/* A number without sign at *p, which moves behind it and the blanks that follow; false when there is none. What is
 * beyond any vocabulary stays there. */
static bool read_id(const char **p, int64_t *id) {
    const char *at = skip_blanks(*p);
    if (*at < '0' || *at > '9')
        return false;
    for (*id = 0; *at >= '0' && *at <= '9'; at++)
        *id = DI_MIN(*id * 10 + (*at - '0'), (int64_t)INT32_MAX + 1);
    *p = skip_blanks(at);
    return true;
}

/* Reads the text once; out NULL: checks it. */
static di_status read_ranges(const char *text, int64_t n_vocab, uint32_t *out, di_error *err) {
    const char *p = skip_blanks(text);
    int64_t last = -1;
    while (*p) {
        int64_t first, end;
        int at = (int)(p - text) + 1;
        if (!read_id(&p, &first))
            return di_fail(err, DI_ERR_ARG, "token ids '%s': character %d, expected an id", text, at);
        end = first;
        if (p[0] == '.' && p[1] == '.') {
            p += 2;
            if (!read_id(&p, &end))
                return di_fail(err, DI_ERR_ARG, "token ids '%s': character %d, expected the end of a range, as in 0..3",
                               text, (int)(p - text) + 1);
        }
        if (end < first || first <= last)
            return di_fail(err, DI_ERR_ARG,
                           "token ids '%s': character %d, %lld after %lld, expected strictly rising ids", text, at,
                           (long long)(end < first ? end : first), (long long)(end < first ? first : last));
        if (end >= n_vocab)
            return di_fail(err, DI_ERR_ARG, "token ids '%s': %lld is outside the vocabulary, expected 0 to %lld", text,
                           (long long)end, (long long)n_vocab - 1);
        for (int64_t id = first; out && id <= end; id++)
            out[id / 32] |= 1u << (id % 32);
        last = end;
        if (*p == ',') {
            p++;
            if (!*skip_blanks(p))
                return di_fail(err, DI_ERR_ARG, "token ids '%s': a comma at the end, expected an id behind it", text);
        } else if (*p) {
            return di_fail(err, DI_ERR_ARG, "token ids '%s': character %d, expected a comma", text,
                           (int)(p - text) + 1);
        }
    }
    return DI_OK;
}

di_status di_token_ranges_parse(const char *text, int64_t n_vocab, uint32_t *out, di_error *err) {
    di_status st = read_ranges(text, n_vocab, NULL, err);
    if (st)
        return st;
    memset(out, 0, (size_t)DI_CEIL_DIV(n_vocab, 32) * sizeof *out);
    return read_ranges(text, n_vocab, out, err);
}
