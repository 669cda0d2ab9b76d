/* The fields of a request that say how it is sampled and scheduled: temperature to log-probabilities, penalties and
 * biases, lists of token ids, seed, stop strings, priority and caller.
 *
 * Two sets of rules meet here. Our own does what a request asks for and refuses only what is malformed or out of range;
 * the hosted service's (vendor_compat) has narrower ranges and its own words, and doesn't know the fields that come
 * from vLLM. Ids are checked against the vocabulary by the engine, which has one. */
#include <float.h>
#include <math.h>

#include "request_internal.h"

/* ------------------------------------------------------------------ numbers in a range */

/* A number within [lo, hi], or above lo where lo_is_open. */
static di_status read_ranged(di_reader *r, const di_json *body, const char *key, double lo, bool lo_is_open, double hi,
                             const char *vendor_message, double *out, bool *has) {
    double v = 0;
    di_status st = di_read_number(r, body, "", key, &v, has);
    if (st || !*has) {
        return st;
    }
    if (!isfinite(v) || v < lo || (lo_is_open && v == lo) || v > hi) {
        if (r->req->vendor_compat && vendor_message) {
            return di_refuse(r, key, "%s", vendor_message);
        }
        if (isfinite(hi)) {
            return di_refuse(r, key, "%s: %g, expected a number in %c%g, %g]", key, v, lo_is_open ? '(' : '[', lo, hi);
        }
        return di_refuse(r, key, "%s: %g, expected a number %s %g", key, v, lo_is_open ? "above" : "not below", lo);
    }
    *out = v;
    return DI_OK;
}

/* An integer in [lo, hi]. */
static di_status read_ranged_int(di_reader *r, const di_json *body, const char *key, int64_t lo, int64_t hi,
                                 int64_t *out, bool *has) {
    int64_t v = 0;
    di_status st = di_read_int(r, body, "", key, &v, has);
    if (st || !*has) {
        return st;
    }
    if (v < lo || v > hi) {
        if (hi == INT64_MAX) {
            return di_refuse(r, key, "%s: %lld, expected %lld or more", key, (long long)v, (long long)lo);
        }
        return di_refuse(r, key, "%s: %lld, expected %lld to %lld", key, (long long)v, (long long)lo, (long long)hi);
    }
    *out = v;
    return DI_OK;
}

enum { VENDOR_TOKENS_MAX = 393216, VENDOR_STOPS_MAX = 16, VENDOR_LOGPROBS_MAX = 20, SAMPLES_MAX = 4096 };

/* ------------------------------------------------------------------ lengths, seed, stop strings, log-probabilities */

static di_status read_max_tokens(di_reader *r, const di_json *body, const di_field_names *names) {
    const char *key = names->max_tokens;
    bool has;
    int64_t v = 0;
    di_status st = di_read_int(r, body, "", key, &v, &has);
    if (st == DI_OK && names->max_tokens_alias && !r->req->vendor_compat) {
        bool has_alias;
        int64_t alias = 1;
        st = di_read_int(r, body, "", names->max_tokens_alias, &alias, &has_alias);
        if (st == DI_OK && has_alias && !has) {
            key = names->max_tokens_alias;
            v = alias;
            has = true;
        } else if (st == DI_OK && alias < 1) {
            return di_refuse(r, names->max_tokens_alias, "%s: %lld, expected 1 or more", names->max_tokens_alias,
                             (long long)alias);
        }
    }
    if (st) {
        return st;
    }
    if (!has) {
        return DI_OK;
    }
    if (r->req->vendor_compat) {
        if (r->req->api == DI_API_MESSAGES) {
            v = DI_MIN(v, VENDOR_TOKENS_MAX);
        }
        if (v < 1 || v > VENDOR_TOKENS_MAX) {
            return di_refuse(r, key, "Invalid %s value, the valid range of %s is [1, %d]", key, key, VENDOR_TOKENS_MAX);
        }
    } else if (v == 0 && r->req->echo) {
        r->req->is_echo_only = true; /* the prompt's log-probabilities are what is wanted */
        v = 1;
    } else if (v < 1) {
        return di_refuse(r, key, "%s: %lld, expected 1 or more", key, (long long)v);
    }
    r->req->sampling.max_tokens = v;
    r->req->has_max_tokens = true;
    return DI_OK;
}

/* Finds the top-level integer `key` in the text of the body and takes it modulo 2^64: the JSON value of an integer
 * beyond 64 bits is a double, which has lost its last digits. The text is known to be valid JSON. False when it is no
 * integer. */
static bool read_integer_text(const di_reader *r, const char *key, uint64_t *out) {
    const char *p = r->text, *end = r->text + r->len;
    size_t key_len = strlen(key);
    int depth = 0;
    bool found = false;
    while (p < end) {
        char c = *p++;
        if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (c == '"') {
            const char *start = p;
            while (p < end && *p != '"') {
                p += *p == '\\' ? 2 : 1;
            }
            bool is_key = depth == 1 && (size_t)(p - start) == key_len && memcmp(start, key, key_len) == 0;
            p++;
            while (is_key && p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')) {
                p++;
            }
            if (!is_key || p >= end || *p != ':') {
                continue;
            }
            for (p++; p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r');) {
                p++;
            }
            bool is_negative = p < end && *p == '-';
            p += is_negative;
            uint64_t v = 0;
            const char *digits = p;
            for (; p < end && *p >= '0' && *p <= '9'; p++) {
                v = v * 10 + (uint64_t)(*p - '0');
            }
            /* The last of several equal keys counts. */
            found = p > digits && (p == end || (*p != '.' && *p != 'e' && *p != 'E'));
            *out = is_negative ? 0 - v : v;
        }
    }
    return found;
}

static di_status read_seed(di_reader *r, const di_json *body) {
    const di_json *v = di_json_get(body, "seed");
    di_json_type kind = di_json_kind(v);
    uint64_t seed;
    if (kind == DI_JSON_NULL) {
        return DI_OK;
    }
    if (r->req->vendor_compat && !(kind == DI_JSON_UINT || (kind == DI_JSON_INT && di_json_int(v) >= 0))) {
        return di_refuse_body(r, "seed", "seed: expected an integer from 0 to 2^64-1");
    }
    if (kind == DI_JSON_INT) {
        seed = (uint64_t)di_json_int(v);
    } else if (kind == DI_JSON_UINT) {
        seed = di_json_uint(v);
    } else if (kind != DI_JSON_REAL || !read_integer_text(r, "seed", &seed)) {
        return di_refuse_body(r, "seed", "'seed': expected an integer, found %s", di_json_kind_name(v));
    }
    r->req->sampling.has_seed = true;
    r->req->sampling.seed = seed;
    return DI_OK;
}

static di_status read_stop(di_reader *r, const di_json *body, const char *key) {
    const di_json *v = di_json_get(body, key);
    if (!v || di_json_is(v, DI_JSON_NULL)) {
        return DI_OK;
    }
    bool is_one = di_json_is(v, DI_JSON_STRING);
    if (!is_one && !di_json_is(v, DI_JSON_ARRAY)) {
        return di_refuse_body(r, key, "'%s': expected a string or an array of strings, found %s", key,
                              di_json_kind_name(v));
    }
    size_t n = is_one ? 1 : di_json_array_len(v), kept = 0;
    const char **stop = di_arena_calloc(&r->req->arena, n + 1, sizeof *stop);
    size_t *stop_len = di_arena_calloc(&r->req->arena, n + 1, sizeof *stop_len);
    if (!stop || !stop_len) {
        return di_reader_no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        const di_json *item = is_one ? v : di_json_at(v, i);
        di_chat_text text = di_text_of(item);
        if (!text.data) {
            return di_refuse_body(r, di_place_of("%s[%zu]", key, i).text, "'%s[%zu]': expected a string, found %s", key,
                                  i, di_json_kind_name(item));
        }
        if (text.len == 0) {
            if (r->req->vendor_compat) {
                di_place place = is_one ? di_place_of("%s", key) : di_place_of("%s[%zu]", key, i);
                return di_refuse(
                    r, place.text,
                    "Invalid '%s': empty string. Expected a string with minimum length 1, but got an empty "
                    "string instead.",
                    place.text);
            }
            continue; /* an empty stop string stops nothing */
        }
        stop[kept] = text.data;
        stop_len[kept++] = text.len;
    }
    if (r->req->vendor_compat && r->req->api != DI_API_MESSAGES && n > VENDOR_STOPS_MAX) {
        return di_refuse(r, key, "Stop string array too long: %zu", n);
    }
    r->req->sampling.stop = stop;
    r->req->sampling.stop_len = stop_len;
    r->req->sampling.n_stop = kept;
    return DI_OK;
}

/* Chat asks by a flag and a number beside it, a request line by the number alone. */
static di_status read_logprobs_flag(di_reader *r, const di_json *body) {
    const di_json *v = di_json_get(body, "logprobs");
    bool is_on = false, has_top = false, is_vendor = r->req->vendor_compat;
    int64_t n = 0, top = 0;
    di_status st;
    if (v && di_json_is(v, DI_JSON_INT) && (!is_vendor || r->req->api == DI_API_LINE)) {
        if ((st = read_ranged_int(r, body, "logprobs", -1, r->options->logprobs_max, &n, &is_on))) {
            return st;
        }
        is_on = n >= 0;
    } else if ((st = di_read_bool(r, body, "", "logprobs", &is_on, NULL))) {
        return st;
    }
    if ((st = di_read_int(r, body, "", "top_logprobs", &top, &has_top))) {
        return st;
    }
    if (has_top) {
        int64_t most = is_vendor ? VENDOR_LOGPROBS_MAX : r->options->logprobs_max;
        /* Responses have no flag: there the number is enough. */
        bool needs_flag = r->req->api != DI_API_RESPONSES && (is_vendor || top > 0);
        if (needs_flag && !is_on) {
            return di_refuse(
                r, "top_logprobs",
                "Invalid top_logprobs and logprobs value, logprobs must be set to true if top_logprobs is used.");
        }
        if (top < 0 || top > most) {
            return di_refuse(r, "top_logprobs",
                             "Invalid top_logprobs value, the valid range of top_logprobs is [0, %lld].",
                             (long long)most);
        }
        is_on = is_on || (r->req->api == DI_API_RESPONSES && top > 0);
        n = DI_MAX(n, top);
    }
    if (v && !di_json_is(v, DI_JSON_NULL)) {
        r->req->sampling.n_logprobs = -1; /* named: the caller's default no longer counts */
    }
    if (is_on) {
        r->req->sampling.n_logprobs = (int32_t)n;
    }
    return DI_OK;
}

/* Completions know the number alone, and 0 is of the token itself. What comes back of the prompt has them too. */
static di_status read_logprobs_count(di_reader *r, const di_json *body) {
    di_sampling *s = &r->req->sampling;
    bool has;
    int64_t n = s->n_logprobs;
    di_status st = read_ranged_int(r, body, "logprobs", 0, r->options->logprobs_max, &n, &has);
    if (st == DI_OK) {
        s->n_logprobs = (int32_t)n;
        s->n_prompt_logprobs = r->req->echo ? DI_MAX(s->n_prompt_logprobs, s->n_logprobs) : s->n_prompt_logprobs;
    }
    return st;
}

static di_status read_logprobs_mode(di_reader *r, const di_json *body) {
    di_chat_text mode;
    bool has_mode;
    di_status st = di_read_string(r, body, "", "logprobs_mode", &mode, &has_mode);
    if (st || !has_mode) {
        return st;
    }
    if (!di_text_is(mode, "raw") && !di_text_is(mode, "processed")) {
        return di_refuse(r, "logprobs_mode", "logprobs_mode: '%.*s', expected raw or processed",
                         (int)DI_MIN(mode.len, 40), mode.data);
    }
    r->req->sampling.logprobs_processed = di_text_is(mode, "processed");
    return DI_OK;
}

static di_status read_logprobs(di_reader *r, const di_json *body) {
    di_status st = r->req->api == DI_API_COMPLETIONS ? read_logprobs_count(r, body) : read_logprobs_flag(r, body);
    return st || r->req->vendor_compat ? st : read_logprobs_mode(r, body);
}

/* ------------------------------------------------------------------ fields that vLLM's users know */

di_status di_read_token_ids(di_reader *r, const di_json *list, const char *at, const int32_t **out, size_t *n) {
    size_t len = di_json_array_len(list);
    int32_t *ids = di_arena_calloc(&r->req->arena, len, sizeof *ids);
    if (!ids) {
        return di_reader_no_memory(r);
    }
    for (size_t i = 0; i < len; i++) {
        const di_json *v = di_json_at(list, i);
        di_place id_at = di_place_of("%s[%zu]", at, i);
        if (!di_json_is(v, DI_JSON_INT) && !di_json_is(v, DI_JSON_UINT)) {
            return di_refuse_body(r, id_at.text, "'%s': expected a token id, found %s", id_at.text,
                                  di_json_kind_name(v));
        }
        int64_t id = di_json_is(v, DI_JSON_UINT) ? INT64_MAX : di_json_int(v);
        if (id < 0 || id > INT32_MAX) {
            return di_refuse(r, id_at.text, "%s: %lld, expected a token id", id_at.text, (long long)id);
        }
        ids[i] = (int32_t)id;
    }
    *out = ids;
    *n = len;
    return DI_OK;
}

/* A list of token ids, the whole of which is one field. */
static di_status read_ids(di_reader *r, const di_json *body, const char *key, const int32_t **out, size_t *n) {
    const di_json *list;
    di_status st = di_read_array(r, body, "", key, &list);
    return st || !list ? st : di_read_token_ids(r, list, key, out, n);
}

/* A token id as the key of an object: digits alone, without leading zeros, so that no id can come twice. */
static bool read_key_id(const char *key, size_t len, int32_t *id) {
    int64_t v = 0;
    if (len == 0 || len > 10 || (len > 1 && key[0] == '0')) {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        if (key[i] < '0' || key[i] > '9') {
            return false;
        }
        v = v * 10 + (key[i] - '0');
    }
    *id = (int32_t)DI_MIN(v, (int64_t)INT32_MAX);
    return v <= INT32_MAX;
}

static di_status read_logit_bias(di_reader *r, const di_json *body) {
    const di_json *object;
    di_status st = di_read_object(r, body, "", "logit_bias", &object);
    if (st || !object) {
        return st;
    }
    size_t n = di_json_object_len(object), i = 0;
    int32_t *ids = di_arena_calloc(&r->req->arena, n, sizeof *ids);
    float *values = di_arena_calloc(&r->req->arena, n, sizeof *values);
    if (!ids || !values) {
        return di_reader_no_memory(r);
    }
    for (void *it = di_json_iter(object); it; it = di_json_iter_next(object, it), i++) {
        size_t len;
        const char *key = di_json_iter_key(it, &len);
        const di_json *v = di_json_iter_value(it);
        if (!read_key_id(key, len, &ids[i])) {
            return di_refuse(r, "logit_bias", "logit_bias: key '%.*s', expected a token id", (int)DI_MIN(len, 40), key);
        }
        di_json_type kind = di_json_kind(v);
        if (kind != DI_JSON_INT && kind != DI_JSON_UINT && kind != DI_JSON_REAL) {
            di_place at = di_place_of("logit_bias.%d", ids[i]);
            return di_refuse_body(r, at.text, "'%s': expected a number, found %s", at.text, di_json_kind_name(v));
        }
        /* The sampler cuts at 100; here the value only has to stay finite in single precision. */
        values[i] = (float)DI_MAX(-FLT_MAX, DI_MIN(FLT_MAX, di_json_number(v)));
    }
    r->req->sampling.n_bias = n;
    r->req->sampling.bias_ids = ids;
    r->req->sampling.bias_values = values;
    return DI_OK;
}

static di_status read_min_tokens(di_reader *r, const di_json *body) {
    di_sampling *s = &r->req->sampling;
    bool has;
    di_status st = read_ranged_int(r, body, "min_tokens", 0, INT64_MAX, &s->min_tokens, &has);
    if (st == DI_OK && s->max_tokens > 0 && s->min_tokens > s->max_tokens) {
        return di_refuse(r, "min_tokens", "min_tokens: %lld, expected 0 to max_tokens, which is %lld",
                         (long long)s->min_tokens, (long long)s->max_tokens);
    }
    return st;
}

/* What shapes the output beyond temperature, top-p and top-k. */
static di_status read_shaping(di_reader *r, const di_json *body) {
    di_request *q = r->req;
    di_sampling *s = &q->sampling;
    bool has;
    int64_t n_prompt_logprobs = s->n_prompt_logprobs;
    /* The replies of these two have no place for a second sample, and their APIs no such field. */
    bool is_single = q->api == DI_API_RESPONSES || q->api == DI_API_MESSAGES;
    di_status st = is_single ? DI_OK : read_ranged_int(r, body, "n", 1, SAMPLES_MAX, &q->n, &has);
    if (st || (st = read_ranged(r, body, "min_p", 0, false, 1, NULL, &s->min_p, &has)) ||
        (st = read_ranged(r, body, "presence_penalty", -2, false, 2, NULL, &s->presence_penalty, &has)) ||
        (st = read_ranged(r, body, "frequency_penalty", -2, false, 2, NULL, &s->frequency_penalty, &has)) ||
        (st = read_ranged(r, body, "repetition_penalty", 0, true, HUGE_VAL, NULL, &s->repetition_penalty, &has)) ||
        (st = read_logit_bias(r, body)) || (st = read_min_tokens(r, body)) ||
        (st = read_ids(r, body, "stop_token_ids", &s->stop_tokens, &s->n_stop_tokens)) ||
        (st = read_ids(r, body, "forced_token_ids", &q->forced, &q->n_forced)) ||
        (st = read_ranged_int(r, body, "prompt_logprobs", -1, r->options->logprobs_max, &n_prompt_logprobs, &has))) {
        return st;
    }
    s->n_prompt_logprobs = (int32_t)n_prompt_logprobs;
    return DI_OK;
}

/* Who asks, for fair shares between callers. Anthropic's requests have it one level deeper. */
static di_status read_caller(di_reader *r, const di_json *body) {
    if (r->req->api != DI_API_MESSAGES) {
        return di_read_string(r, body, "", "user", &r->req->caller, NULL);
    }
    const di_json *metadata;
    di_status st = di_read_object(r, body, "", "metadata", &metadata);
    return st ? st : di_read_string(r, metadata, "metadata", "user_id", &r->req->caller, NULL);
}

/* How the request is treated beside others. */
static di_status read_scheduling(di_reader *r, const di_json *body) {
    di_request *q = r->req;
    bool has;
    int64_t priority = 0;
    di_status st = read_ranged_int(r, body, "priority", INT32_MIN, INT32_MAX, &priority, &has);
    if (st || (st = di_read_string(r, body, "", "cache_salt", &q->cache_salt, &has))) {
        return st;
    }
    if (has && q->cache_salt.len == 0) {
        return di_refuse(r, "cache_salt", "cache_salt: an empty string, expected one character or more");
    }
    q->priority = (int32_t)priority;
    return read_caller(r, body);
}

/* The hosted service has one completion a request, takes the penalties and ignores them, and doesn't know the rest. */
static di_status read_vendor_count(di_reader *r, const di_json *body) {
    bool has;
    int64_t n = 1;
    di_status st = di_read_int(r, body, "", "n", &n, &has);
    if (st) {
        return st;
    }
    return n == 1 ? DI_OK : di_refuse(r, "n", "Invalid n value (currently only n = 1 is supported)");
}

static di_status read_stream(di_reader *r, const di_json *body) {
    const di_json *options;
    di_status st = di_read_bool(r, body, "", "stream", &r->req->is_stream, NULL);
    if (st || (st = di_read_object(r, body, "", "stream_options", &options))) {
        return st;
    }
    if ((st = di_read_bool(r, options, "stream_options", "include_usage", &r->req->stream_usage, NULL))) {
        return st;
    }
    return di_read_bool(r, options, "stream_options", "continuous_usage_stats", &r->req->stream_counts, NULL);
}

di_status di_read_sampling(di_reader *r, const di_json *body, const di_field_names *names) {
    di_request *q = r->req;
    double hottest = q->vendor_compat ? 2 : HUGE_VAL;
    di_status st;
    if ((st = read_ranged(r, body, "temperature", 0, false, hottest,
                          "Invalid temperature value, the valid range of temperature is [0, 2]",
                          &q->sampling.temperature, &q->has_temperature)) ||
        (st = read_ranged(r, body, "top_p", 0, true, 1, "Invalid top_p value, the valid range of top_p is (0, 1.0]",
                          &q->sampling.top_p, &q->has_top_p)) ||
        (st = read_max_tokens(r, body, names))) {
        return st;
    }
    if (!q->vendor_compat &&
        (st = read_ranged_int(r, body, "top_k", -1, INT32_MAX, &q->sampling.top_k, &q->has_top_k))) {
        return st;
    }
    if ((!q->vendor_compat || q->api == DI_API_LINE) &&
        (st = di_read_bool(r, body, "", "ignore_eos", &q->sampling.ignore_eos, NULL))) {
        return st;
    }
    if (q->vendor_compat) {
        st = read_vendor_count(r, body);
    } else if ((st = read_shaping(r, body)) == DI_OK) {
        st = read_scheduling(r, body);
    }
    if (st || (names->stop && (st = read_stop(r, body, names->stop))) || (st = read_logprobs(r, body)) ||
        (st = read_seed(r, body))) {
        return st;
    }
    return read_stream(r, body);
}
