/* Pre-tokenizer over PCRE2.
 *
 * The file's patterns are written for Oniguruma. Three things are done so that PCRE2 matches the same: the pattern is
 * checked to use only what both read alike; \s and \S become the property White_Space, since PCRE2's own \s also takes
 * U+180E; and matching is on code points with Unicode properties. Each piece is matched as a subject of its own, so
 * that a look-ahead sees the end of the piece as the end of text.
 *
 * Categories of characters are those of the linked PCRE2 (10.42: Unicode 14). Only characters that were assigned later
 * can be cut otherwise than by an engine with newer tables.
 *
 * A match never fails for the length of a piece: compiled code that runs out of its stack is followed by the
 * interpreter, whose memory grows on the heap. Limits end only patterns whose work is not linear in the text. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "pretokenize.h"

#include <pcre2.h>

enum { PATTERN_BYTES_MAX = 1 << 16, HEAP_KIB_MAX = 1 << 20 };

typedef struct step {
    pcre2_code *code; /* owned */
    bool has_jit;
    bool starts[128]; /* ASCII characters that a match can start with */
} step;

struct di_pretok {
    step steps[DI_PRETOK_STEPS_MAX];
    size_t n_steps;
};

typedef struct run {
    const di_pretok *pretok;
    pcre2_match_data *match;     /* owned */
    pcre2_match_context *limits; /* owned */
    di_piece_fn fn;
    void *ctx;
} run;

/* Copies one pattern to out in PCRE2's dialect, refusing what the two read differently. */
static di_status translate(di_strbuf *out, const char *s, size_t n, di_error *err) {
    static const char *const openers[] = {"(?:", "(?=", "(?!", "(?>", "(?i:"};
    bool in_class = false;
    size_t class_at = 0;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (c == '\\') {
            if (++i == n) {
                return di_fail(err, DI_ERR_FORMAT, "pattern ends in a backslash");
            }
            c = s[i];
            if (c == 's' || c == 'S') {
                di_strbuf_puts(out, c == 's' ? "\\p{White_Space}" : "\\P{White_Space}");
                continue;
            }
            bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
            if ((is_letter && !strchr("pPdDwWrntf", c)) || (unsigned char)c >= 0x80 || c == 0) {
                return di_fail(err, DI_ERR_UNSUPPORTED,
                               "pattern has the escape '\\%c' at byte %zu, which is not supported",
                               (unsigned char)c < 0x80 && c ? c : '?', i - 1);
            }
            di_strbuf_putc(out, '\\');
            di_strbuf_putc(out, c);
            continue;
        }
        if (in_class) {
            bool is_first = i == class_at + 1 || (i == class_at + 2 && s[class_at + 1] == '^');
            if (c == ']' && !is_first) {
                in_class = false;
            } else if (c == '[' || (c == ']' && is_first) || (c == '&' && i + 1 < n && s[i + 1] == '&')) {
                return di_fail(
                    err, DI_ERR_UNSUPPORTED,
                    "pattern has a nested class, an intersection or an empty class at byte %zu, which is not "
                    "supported",
                    i);
            }
        } else if (c == '[') {
            in_class = true;
            class_at = i;
        } else if (c == '^' || c == '$') {
            return di_fail(err, DI_ERR_UNSUPPORTED, "pattern has the anchor '%c' at byte %zu, which is not supported",
                           c, i);
        } else if (c == '(' && i + 1 < n && (s[i + 1] == '?' || s[i + 1] == '*')) {
            bool is_known = false;
            for (size_t k = 0; k < DI_COUNT(openers); k++) {
                size_t len = strlen(openers[k]);
                is_known = is_known || (n - i >= len && memcmp(s + i, openers[k], len) == 0);
            }
            if (!is_known) {
                return di_fail(err, DI_ERR_UNSUPPORTED,
                               "pattern has a group at byte %zu of a kind that is not supported", i);
            }
        }
        di_strbuf_putc(out, c);
    }
    return di_strbuf_status(out, err);
}

/* An ASCII character can start a match unless even the empty set of conditions on what follows fails: a hard partial
 * match of it alone reports "more text needed" wherever the rest of the text could decide. No pattern looks behind its
 * start (translate refuses those), so the text before does not matter. */
static void find_starts(step *st, pcre2_match_data *match, pcre2_match_context *limits) {
    for (int c = 0; c < 128; c++) {
        char ch = (char)c;
        int rc = pcre2_match(st->code, (PCRE2_SPTR)&ch, 1, 0,
                             PCRE2_ANCHORED | PCRE2_PARTIAL_HARD | PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, limits);
        st->starts[c] = rc != PCRE2_ERROR_NOMATCH;
    }
}

static di_status compile(step *st, const char *pattern, size_t n, pcre2_match_data *match, pcre2_match_context *limits,
                         di_error *err) {
    if (n > PATTERN_BYTES_MAX) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "pattern of %zu bytes, at most %d are supported", n, PATTERN_BYTES_MAX);
    }
    di_strbuf text = {0};
    pcre2_compile_context *context = NULL;
    di_status status = translate(&text, pattern, n, err);
    if (status) {
        goto out;
    }
    context = pcre2_compile_context_create(NULL);
    if (!context) {
        status = di_fail(err, DI_ERR_MEMORY, "out of memory for a pattern");
        goto out;
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    int code = 0;
    PCRE2_SIZE at = 0;
    st->code =
        pcre2_compile((PCRE2_SPTR)di_strbuf_str(&text), text.len,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE, &code, &at, context);
    if (!st->code) {
        char why[160] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        status = di_fail(err, DI_ERR_FORMAT, "pattern is not a valid expression: %s (at byte %zu of its translation)",
                         why, (size_t)at);
        goto out;
    }
    /* Without executable memory the interpreter does the work. */
    st->has_jit = pcre2_jit_compile(st->code, PCRE2_JIT_COMPLETE) == 0;
    find_starts(st, match, limits);
out:
    pcre2_compile_context_free(context);
    di_strbuf_deinit(&text);
    return status;
}

static pcre2_match_context *limits_create(size_t text_bytes) {
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    if (limits) {
        uint64_t steps = 4000000 + 64 * (uint64_t)text_bytes;
        pcre2_set_match_limit(limits, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
        pcre2_set_depth_limit(limits, UINT32_MAX);
        pcre2_set_heap_limit(limits, HEAP_KIB_MAX);
    }
    return limits;
}

di_status di_pretok_create(di_pretok **out, const char *const *patterns, const size_t *lens, size_t n_patterns,
                           di_error *err) {
    if (n_patterns > DI_PRETOK_STEPS_MAX) {
        return di_fail(err, DI_ERR_UNSUPPORTED, "%zu split steps, at most %d are supported", n_patterns,
                       DI_PRETOK_STEPS_MAX);
    }
    di_pretok *p = calloc(1, sizeof *p);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = limits_create(1);
    di_status status = DI_OK;
    if (p && match && limits) {
        for (size_t i = 0; !status && i < n_patterns; i++) {
            status = compile(&p->steps[i], patterns[i], lens[i], match, limits, err);
            status = di_error_context(err, status, "split %zu", i + 1);
            p->n_steps = i + 1;
        }
    } else {
        status = di_fail(err, DI_ERR_MEMORY, "out of memory for the pre-tokenizer");
    }
    pcre2_match_data_free(match);
    pcre2_match_context_free(limits);
    if (status) {
        di_pretok_destroy(p);
    } else {
        *out = p;
    }
    return status;
}

void di_pretok_destroy(di_pretok *p) {
    if (!p) {
        return;
    }
    for (size_t i = 0; i < p->n_steps; i++) {
        pcre2_code_free(p->steps[i].code);
    }
    free(p);
}

/* Next match at or after `at`. Returns 1 with the range, 0 for none, below 0 for PCRE2's error. */
static int next_match(const run *r, const step *st, const char *s, size_t n, size_t at, size_t *begin, size_t *end) {
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (st->has_jit) {
        rc = pcre2_jit_match(st->code, (PCRE2_SPTR)s, n, at, 0, r->match, r->limits);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
        rc = pcre2_match(st->code, (PCRE2_SPTR)s, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->match, r->limits);
    }
    if (rc == PCRE2_ERROR_NOMATCH) {
        return 0;
    }
    if (rc < 0) {
        return rc;
    }
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(r->match);
    *begin = range[0];
    *end = range[1];
    return 1;
}

static size_t char_len(char c) {
    unsigned char lead = (unsigned char)c;
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

static di_status split(const run *r, size_t level, const char *s, size_t n, di_error *err) {
    if (level == r->pretok->n_steps) {
        return r->fn(r->ctx, s, n, err);
    }
    const step *st = &r->pretok->steps[level];
    size_t done = 0; /* everything before is handed on */
    size_t at = 0;   /* the search goes on here */
    while (at < n) {
        while (at < n && (unsigned char)s[at] < 0x80 && !st->starts[(unsigned char)s[at]]) {
            at++;
        }
        if (at == n) {
            break;
        }
        size_t begin = 0, end = 0;
        int rc = next_match(r, st, s, n, at, &begin, &end);
        if (rc == 0) {
            break;
        }
        if (rc < 0) {
            char why[160] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            return di_fail(err, rc == PCRE2_ERROR_NOMEMORY ? DI_ERR_MEMORY : DI_ERR_UNSUPPORTED,
                           "split %zu of the tokenizer on a piece of %zu bytes: %s", level + 1, n, why);
        }
        if (begin == end) { /* an empty match makes no piece */
            at = begin < n ? begin + char_len(s[begin]) : n;
            continue;
        }
        if (begin > done) {
            di_status status = split(r, level + 1, s + done, begin - done, err);
            if (status) {
                return status;
            }
        }
        di_status status = split(r, level + 1, s + begin, end - begin, err);
        if (status) {
            return status;
        }
        done = at = end;
    }
    return done < n ? split(r, level + 1, s + done, n - done, err) : DI_OK;
}

di_status di_pretok_run(const di_pretok *p, const char *text, size_t n, di_piece_fn fn, void *ctx, di_error *err) {
    if (n == 0) {
        return DI_OK;
    }
    run r = {.pretok = p, .fn = fn, .ctx = ctx};
    di_status status = DI_OK;
    r.match = pcre2_match_data_create(1, NULL);
    r.limits = limits_create(n);
    if (!r.match || !r.limits) {
        status = di_fail(err, DI_ERR_MEMORY, "out of memory for the pre-tokenizer");
    } else {
        status = split(&r, 0, text, n, err);
    }
    pcre2_match_data_free(r.match);
    pcre2_match_context_free(r.limits);
    return status;
}
