/* Sequences that continue from stored state, on the tiny model: window snapshots at 128-token borders, rings rebuilt
 * from pages, forks, drafts.
 *
 * Every property runs one sequence from its first token to its last and another that takes a shortcut, with chunks,
 * kernel level, numerics and replay mode at random, and asserts the same bits: logits of all rows that the shortcut
 * runs, window records, pages, drafts. Caches start as a pattern that no valid state has, and pages that are shared
 * must stay as they are. */
#include <stdlib.h>

#include "backend/cpu/cpu.h"
#include "harness.h"
#include "model/model_internal.h"
#include "rig.h"

enum { TOKENS_MAX = 1024, SEQS = 16, BORDERS = TOKENS_MAX / DI_PAGE_TOKENS };

/* One way through a sequence; what is done is at. */
typedef struct track {
    const int32_t *tokens;
    int64_t at, rect, valid_start, page_from;
    int32_t slot, blocks[BORDERS];
    int32_t snapshot[BORDERS + 1]; /* by border / 128: slot, 0 = none (slot 0 is never one) */
    float *logits;                 /* [TOKENS_MAX, V] by position; rows before rect get none */
} track;

typedef struct fixture {
    rig r;
    di_layout lay;
    bool is_exact;
    int64_t keep; /* 0: replay off */
    int64_t span; /* of a window rebuild */
    int32_t *tokens;
    float *logits[2];
} fixture;

/* keep: 0 replay off, else mask or compact. window 0: the model's. */
static void fixture_open(fixture *f, uint64_t *rng, di_cpu_level level, bool is_exact, di_replay replay, int64_t keep,
                         int32_t window) {
    rig_options o = {.dir = di_test_source("models/tiny"),
                     .numerics = is_exact ? DI_NUMERICS_EXACT : DI_NUMERICS_FAITHFUL,
                     .threads = (int)di_test_random_range(rng, 1, 2),
                     .isa = di_cpu_level_name(level),
                     .window = window,
                     .n_seqs = SEQS,
                     .tokens_max = TOKENS_MAX,
                     .rows_max = 704,
                     .logits_max = 704};
    o.token_map = rig_token_map(&o.n_token_map);
    memset(f, 0, sizeof *f);
    rig_needs_cpu();
    rig_open(&f->r, &o);
    f->r.replay = replay;
    f->is_exact = is_exact;
    f->keep = keep;
    f->span = di_config_window_span(&f->r.config, replay != DI_REPLAY_OFF, true);
    di_layout_init(&f->lay, &f->r.config, o.numerics, true);
    f->tokens = malloc(2 * TOKENS_MAX * sizeof *f->tokens);
    assert_non_null(f->tokens);
    for (int i = 0; i < 2 * TOKENS_MAX; i++)
        f->tokens[i] = (int32_t)di_test_random_range(rng, 0, f->r.config.vocab - 1);
    for (int i = 0; i < 2; i++) {
        f->logits[i] = malloc((size_t)TOKENS_MAX * (size_t)f->r.config.vocab * sizeof(float));
        assert_non_null(f->logits[i]);
    }
}

static void fixture_close(fixture *f) {
    rig_close(&f->r);
    free(f->tokens);
    free(f->logits[0]);
    free(f->logits[1]);
}

/* A random case: level, numerics, replay mode and keep. The exact bound comes as often as smaller tails; the reference
 * level, which takes twenty times as long as the next, has a test of its own. */
static void fixture_open_random(fixture *f, uint64_t *rng) {
    di_replay replay = (di_replay)(di_test_random(rng) % 3);
    di_cpu_level best = di_cpu_level_best(), least = DI_MIN((di_cpu_level)(DI_CPU_REF + 1), best);
    di_cpu_level level = (di_cpu_level)di_test_random_range(rng, (int64_t)least, (int64_t)best);
    bool is_exact = di_test_random(rng) % 2;
    int64_t keep = 0;
    if (replay != DI_REPLAY_OFF) {
        di_config c;
        di_error err = {0};
        di_test_ok(di_config_load(&c, di_test_source("models/tiny"), &err), &err);
        int64_t exact = di_config_replay_exact(&c);
        keep = di_test_random(rng) % 2 ? exact : di_test_random_range(rng, c.window + DI_BACKTRACK, exact - 1);
    }
    fixture_open(f, rng, level, is_exact, replay, keep, 0);
}

/* A fresh way through subject 0 or 1 (its tokens) in slot and KV blocks `seq` of the rig, whose bytes say nothing. */
static track track_new(fixture *f, int subject, int seq, int64_t n_prompt) {
    track t = {
        .tokens = f->tokens + subject * TOKENS_MAX, .rect = f->keep ? DI_MAX(n_prompt - f->keep, 0) : 0, .slot = seq};
    memset(f->r.slots + (size_t)seq * f->lay.slot_bytes, 0x7F, f->lay.slot_bytes);
    for (int i = 0; i < BORDERS; i++) {
        t.blocks[i] = f->r.blocks[seq * f->r.blocks_per_seq + i];
        memset(f->r.pages + (size_t)t.blocks[i] * f->lay.page_bytes, 0x7F, f->lay.page_bytes);
    }
    return t;
}

static void copy_units(fixture *f, uint8_t *base, size_t unit_bytes, int32_t dst, int32_t src) {
    di_error err = {0};
    di_test_ok(di_forward_copy_units(f->r.fw, base, unit_bytes, &(di_copy){.dst = dst, .src = src}, 1, &err), &err);
}

/* Runs the tracks to their ends, in shared batches with chunks of any size. */
static void advance(fixture *f, uint64_t *rng, track **tracks, const int64_t *ends, int n_tracks) {
    int64_t v = f->r.config.vocab, w = f->r.config.window;
    for (;;) {
        di_seq_rows rows[4];
        di_ring_snapshot snapshots[4][BORDERS];
        track *of[4];
        int n = 0;
        for (int i = 0; i < n_tracks; i++) {
            static const int64_t sizes[] = {1, 9, 70, 300, 340};
            track *t = tracks[i];
            int64_t left = ends[i] - t->at;
            if (!left)
                continue;
            int64_t size = sizes[di_test_random(rng) % DI_COUNT(sizes)], most = DI_MIN(size, left);
            int64_t n_rows = di_test_random_range(rng, (most + 1) / 2, most);
            int64_t end = t->at + n_rows, border = t->at / DI_PAGE_TOKENS + 1;
            int32_t n_snapshots = 0;
            for (; border * DI_PAGE_TOKENS <= end; border++) {
                if (!t->snapshot[border])
                    continue;
                int64_t at = border * DI_PAGE_TOKENS;
                if (at - w < t->at) /* a part of the window is older than these rows */
                    copy_units(f, f->r.slots, f->lay.slot_bytes, t->snapshot[border], t->slot);
                snapshots[n][n_snapshots++] = (di_ring_snapshot){.at = at, .slot = t->snapshot[border]};
            }
            rows[n] = (di_seq_rows){.tokens = t->tokens,
                                    .pos0 = t->at,
                                    .n_rows = (int32_t)n_rows,
                                    .n_logits = t->logits ? (int32_t)DI_MIN(DI_MAX(end - t->rect, 0), n_rows) : 0,
                                    .slot = t->slot,
                                    .blocks = t->blocks,
                                    .n_blocks = BORDERS,
                                    .rect = t->rect,
                                    .valid_start = t->valid_start,
                                    .page_from = t->page_from,
                                    .n_snapshots = n_snapshots,
                                    .snapshots = snapshots[n]};
            of[n++] = t;
        }
        if (!n)
            return;
        const float *logits = rig_forward(&f->r, rows, n);
        for (int i = 0; i < n; i++) {
            of[i]->at += rows[i].n_rows;
            if (rows[i].n_logits) {
                memcpy(of[i]->logits + (of[i]->at - rows[i].n_logits) * v, logits,
                       (size_t)(rows[i].n_logits * v) * sizeof(float));
                logits += rows[i].n_logits * v;
            }
        }
    }
}

static void advance_one(fixture *f, uint64_t *rng, track *t, int64_t end) {
    advance(f, rng, &t, &end, 1);
}

/* ---- comparisons, bit for bit ---- */

static void assert_same_logits(const fixture *f, const track *got, const track *want, int64_t from, int64_t end) {
    int64_t v = f->r.config.vocab;
    for (int64_t p = DI_MAX(from, want->rect); p < end; p++) {
        if (memcmp(got->logits + p * v, want->logits + p * v, (size_t)v * sizeof(float)))
            fail_msg("logits of position %ld of %ld from %ld differ", (long)p, (long)end, (long)from);
    }
}

/* Layers whose window rings a border keeps: all with replay off, the producers else. */
static int32_t kept_rings(const fixture *f) {
    const di_config *c = &f->r.config;
    return f->keep ? c->first_consumer : c->n_layers + c->n_draft_layers;
}

/* Window records of positions lo .. hi of the first n_rings layers in two slots; the first that differs, -1 = none. */
static int32_t differing_ring(const fixture *f, int32_t slot_a, int32_t slot_b, int32_t n_rings, int64_t lo, int64_t hi,
                              int64_t *position) {
    const uint8_t *a = f->r.slots + (size_t)slot_a * f->lay.slot_bytes;
    const uint8_t *b = f->r.slots + (size_t)slot_b * f->lay.slot_bytes;
    for (int32_t l = 0; l < n_rings; l++) {
        for (int64_t p = DI_MAX(lo, 0); p < hi; p++) {
            size_t at = f->lay.ring_offset[l] + (size_t)(p % f->lay.ring_len) * f->lay.win_bytes;
            *position = p;
            if (memcmp(a + at, b + at, f->lay.win_bytes))
                return l;
        }
    }
    return -1;
}

static void assert_same_rings(const fixture *f, int32_t got, int32_t want, int64_t lo, int64_t border) {
    int64_t position;
    int32_t l = differing_ring(f, got, want, kept_rings(f), lo, border, &position);
    if (l >= 0)
        fail_msg("window record of layer %d at position %ld before border %ld differs", l, (long)position,
                 (long)border);
}

static void assert_same_pages(const fixture *f, const track *got, const track *want, int64_t from, int64_t end) {
    for (int64_t i = from / DI_PAGE_TOKENS; i < DI_CEIL_DIV(end, DI_PAGE_TOKENS); i++) {
        if (memcmp(f->r.pages + (size_t)got->blocks[i] * f->lay.page_bytes,
                   f->r.pages + (size_t)want->blocks[i] * f->lay.page_bytes, f->lay.page_bytes))
            fail_msg("KV page %ld of %ld tokens differs", (long)i, (long)end);
    }
}

/* A drafting round of both in one batch, with the same tokens. */
static void assert_same_drafts(fixture *f, const track *a, const track *b) {
    const di_config *c = &f->r.config;
    int64_t v = c->vocab;
    const float *logits, *conf;
    di_error err = {0};
    int32_t token = a->tokens[a->at];
    di_draft_seq seqs[2] = {{.token = token, .last = a->at - 1, .slot = a->slot},
                            {.token = token, .last = b->at - 1, .slot = b->slot}};
    di_test_ok(di_draft_begin(f->r.fw, seqs, 2, c->draft_block, f->r.slots, NULL, NULL, &err), &err);
    int32_t prev[2] = {token, token};
    for (int32_t j = 0; j < c->draft_block; j++) {
        rig_draft_next(&f->r, j, prev, 2, &logits, &conf);
        assert_memory_equal(logits, logits + v, (size_t)v * sizeof(float));
        assert_memory_equal(conf, conf + 1, sizeof *conf);
        prev[0] = prev[1] = rig_argmax(logits, v);
    }
}

/* ---- the properties ---- */

static int runs(int n) { /* a sanitizer is slow and looks for something else */
    return di_test_is_sanitized() ? DI_CEIL_DIV(n, 6) : n;
}

/* The largest border that a prompt may be continued from. */
static int64_t last_border(const fixture *f, int64_t n_prompt) {
    return (n_prompt - DI_MAX(f->keep, 1)) / DI_PAGE_TOKENS * DI_PAGE_TOKENS;
}

/* Two sequences run in shared batches and leave a snapshot at each border. Each snapshot holds the windows of a plain
 * run to that border, and a sequence restored from it goes on like the one that it was taken from. */
static void check_snapshots(fixture *f, uint64_t *rng) {
    enum { SUBJECTS = 2, OTHER = 2, FIRST_SNAPSHOT = 3, DECODED = 8 };
    int64_t n_prompt[SUBJECTS], ends[SUBJECTS];
    track whole[SUBJECTS], *both[SUBJECTS] = {&whole[0], &whole[1]};
    int32_t slot = FIRST_SNAPSHOT;
    for (int s = 0; s < SUBJECTS; s++) {
        n_prompt[s] = DI_PAGE_TOKENS + DI_MAX(f->keep, 1) + di_test_random_range(rng, 0, s ? 100 : 400);
        ends[s] = n_prompt[s] + DECODED;
        whole[s] = track_new(f, s, s, n_prompt[s]);
        whole[s].logits = f->logits[s];
        for (int64_t b = 1; b * DI_PAGE_TOKENS <= ends[s]; b++)
            whole[s].snapshot[b] = slot++;
    }
    assert_true(slot <= SEQS);
    advance(f, rng, both, ends, SUBJECTS);

    float *logits = malloc((size_t)TOKENS_MAX * (size_t)f->r.config.vocab * sizeof(float));
    assert_non_null(logits);
    for (int s = 0; s < SUBJECTS; s++) {
        track plain = track_new(f, s, OTHER, n_prompt[s]);
        plain.logits = logits;
        for (int64_t b = DI_PAGE_TOKENS; b <= ends[s]; b += DI_PAGE_TOKENS) {
            advance_one(f, rng, &plain, b);
            assert_same_rings(f, whole[s].snapshot[b / DI_PAGE_TOKENS], OTHER, b - f->r.config.window, b);
        }
        advance_one(f, rng, &plain, ends[s]);
        assert_same_logits(f, &plain, &whole[s], 0, ends[s]);
        assert_same_pages(f, &plain, &whole[s], 0, ends[s]);

        int64_t b = di_test_random_range(rng, 1, last_border(f, n_prompt[s]) / DI_PAGE_TOKENS);
        track hit = track_new(f, s, OTHER, n_prompt[s]);
        hit.logits = logits;
        hit.at = hit.page_from = b * DI_PAGE_TOKENS;
        memcpy(hit.blocks, whole[s].blocks, (size_t)b * sizeof *hit.blocks);
        copy_units(f, f->r.slots, f->lay.slot_bytes, hit.slot, whole[s].snapshot[b]);
        advance_one(f, rng, &hit, ends[s]);
        assert_same_logits(f, &hit, &whole[s], b * DI_PAGE_TOKENS, ends[s]);
        assert_same_pages(f, &hit, &whole[s], b * DI_PAGE_TOKENS, ends[s]);
        assert_same_drafts(f, &hit, &whole[s]);
    }
    free(logits);
}

DI_PROPERTY(snapshots_continue_like_the_whole_run, runs(12)) {
    uint64_t rng = seed;
    fixture f;
    fixture_open_random(&f, &rng);
    check_snapshots(&f, &rng);
    fixture_close(&f);
}

/* Windows longer than a page overlap at neighbouring borders. The weights don't know the window's length. */
static void long_windows_are_kept_too(void **state) {
    (void)state;
    static const int32_t windows[] = {200, 300};
    for (size_t i = di_test_is_sanitized() ? 1 : 0; i < DI_COUNT(windows); i++) { /* both overlap in the same way */
        uint64_t rng = i;
        fixture f;
        fixture_open(&f, &rng, di_cpu_level_best(), false, DI_REPLAY_OFF, 0, windows[i]);
        check_snapshots(&f, &rng);
        fixture_close(&f);
    }
}

/* Without a snapshot: rows before a position rebuild its windows from the pages, which keep every byte. */
DI_PROPERTY(rebuilt_windows_continue_like_the_whole_run, runs(8)) {
    uint64_t rng = seed;
    fixture f;
    fixture_open_random(&f, &rng);
    int64_t n_prompt = DI_MIN(f.span + DI_MAX(f.keep, 1) + di_test_random_range(&rng, DI_PAGE_TOKENS, 300), 900);
    int64_t end = n_prompt + 4;
    /* Mostly a border; any position does, also one between the two tokens of a pair. */
    int64_t from = di_test_random(&rng) % 3 ? last_border(&f, n_prompt)
                                            : di_test_random_range(&rng, f.span, n_prompt - DI_MAX(f.keep, 1));
    int64_t more = di_test_random(&rng) % 3 ? 0 : di_test_random_range(&rng, 1, 9);
    track whole = track_new(&f, 0, 0, n_prompt);
    whole.logits = f.logits[0];
    advance_one(&f, &rng, &whole, from);
    copy_units(&f, f.r.slots, f.lay.slot_bytes, 2, 0); /* the windows there */
    size_t n_bytes = f.lay.page_bytes * SEQS * BORDERS;
    uint8_t *pages = malloc(n_bytes);
    assert_non_null(pages);

    track hit = track_new(&f, 0, 1, n_prompt);
    hit.logits = f.logits[1];
    hit.at = hit.valid_start = DI_MAX(from - f.span - more, 0);
    hit.page_from = from;
    int64_t shared = DI_CEIL_DIV(from, DI_PAGE_TOKENS);
    memcpy(hit.blocks, whole.blocks, (size_t)shared * sizeof *hit.blocks);
    if (from % DI_PAGE_TOKENS) { /* the last one is written by both */
        hit.blocks[shared - 1] = f.r.blocks[f.r.blocks_per_seq + shared - 1];
        copy_units(&f, f.r.pages, f.lay.page_bytes, hit.blocks[shared - 1], whole.blocks[shared - 1]);
    }
    memcpy(pages, f.r.pages, n_bytes);
    if (di_test_random(&rng) % 2) { /* else a chunk may cross the position */
        advance_one(&f, &rng, &hit, from);
        assert_same_rings(&f, 1, 2, from - f.r.config.window + 1, from);
        if (memcmp(pages, f.r.pages, n_bytes))
            fail_msg("rebuilding the windows at %ld wrote KV pages", (long)from);
    }
    advance_one(&f, &rng, &hit, end);
    for (int64_t i = 0; i < from / DI_PAGE_TOKENS; i++)
        assert_memory_equal(f.r.pages + (size_t)whole.blocks[i] * f.lay.page_bytes,
                            pages + (size_t)whole.blocks[i] * f.lay.page_bytes, f.lay.page_bytes);
    advance_one(&f, &rng, &whole, end);
    assert_same_logits(&f, &hit, &whole, from, end);
    assert_same_pages(&f, &hit, &whole, from, end);
    assert_same_drafts(&f, &hit, &whole);
    free(pages);
    fixture_close(&f);
}

/* Two branches with other tokens from a common start, on a copied slot and a copied partial page. */
DI_PROPERTY(forks_continue_like_separate_runs, runs(6)) {
    uint64_t rng = seed;
    fixture f;
    fixture_open_random(&f, &rng);
    int64_t fork = DI_MAX(f.keep, 1) + di_test_random_range(&rng, 0, 300), end = fork + 150;
    memcpy(f.tokens + TOKENS_MAX, f.tokens, (size_t)fork * sizeof *f.tokens);
    track branch[2] = {track_new(&f, 0, 0, fork), track_new(&f, 1, 1, fork)};
    branch[0].logits = f.logits[0];
    advance_one(&f, &rng, &branch[0], fork);
    int64_t full = fork / DI_PAGE_TOKENS;
    memcpy(branch[1].blocks, branch[0].blocks, (size_t)full * sizeof *branch[0].blocks);
    if (fork % DI_PAGE_TOKENS)
        copy_units(&f, f.r.pages, f.lay.page_bytes, branch[1].blocks[full], branch[0].blocks[full]);
    copy_units(&f, f.r.slots, f.lay.slot_bytes, branch[1].slot, branch[0].slot);
    branch[1].at = fork;
    branch[1].logits = f.logits[1];
    advance(&f, &rng, (track *[2]){&branch[0], &branch[1]}, (int64_t[2]){end, end}, 2);

    float *logits = malloc((size_t)TOKENS_MAX * (size_t)f.r.config.vocab * sizeof(float));
    assert_non_null(logits);
    for (int i = 0; i < 2; i++) {
        track alone = track_new(&f, i, 2, fork);
        alone.logits = logits;
        advance_one(&f, &rng, &alone, end);
        assert_same_logits(&f, &branch[i], &alone, fork, end);
        assert_same_pages(&f, &branch[i], &alone, 0, end);
        assert_same_drafts(&f, &branch[i], &alone);
    }
    free(logits);
    fixture_close(&f);
}

/* The reference level, on short cases: replay off in exact numerics, compact in faithful ones. */
static void reference_level_continues_too(void **state) {
    (void)state;
    if (di_test_is_sanitized())
        di_test_skip("minutes of plain loops under a sanitizer, which the other levels' cases don't take");
    for (int compact = 0; compact < 2; compact++) {
        uint64_t rng = 1;
        fixture f;
        fixture_open(&f, &rng, DI_CPU_REF, !compact, compact ? DI_REPLAY_COMPACT : DI_REPLAY_OFF, compact ? 70 : 0, 0);
        int64_t n_prompt = DI_PAGE_TOKENS + DI_MAX(f.keep, 10), end = n_prompt + 2;
        track whole = track_new(&f, 0, 0, n_prompt), hit = track_new(&f, 0, 1, n_prompt);
        whole.logits = f.logits[0];
        hit.logits = f.logits[1];
        whole.snapshot[1] = 2;
        advance_one(&f, &rng, &whole, end);
        hit.at = DI_PAGE_TOKENS;
        hit.blocks[0] = whole.blocks[0];
        copy_units(&f, f.r.slots, f.lay.slot_bytes, hit.slot, 2);
        advance_one(&f, &rng, &hit, end);
        assert_same_logits(&f, &hit, &whole, DI_PAGE_TOKENS, end);
        assert_same_pages(&f, &hit, &whole, 0, end);
        assert_same_drafts(&f, &hit, &whole);
        fixture_close(&f);
    }
}

/* The span is as short as it can be: with one row less, the oldest record that is needed of the deepest ring is another
 * one, and no other record is. In exact numerics, since a quantiser may swallow what a single key changes. */
static void windows_need_the_whole_span(void **state) {
    (void)state;
    for (int compact = 0; compact < 2; compact++) {
        uint64_t rng = 1;
        fixture f;
        int64_t position, border = 5 * DI_PAGE_TOKENS;
        fixture_open(&f, &rng, di_cpu_level_best(), true, compact ? DI_REPLAY_COMPACT : DI_REPLAY_OFF,
                     compact ? DI_PAGE_TOKENS : 0, 0);
        int64_t oldest = border - f.r.config.window + 1;
        int32_t deepest = (compact ? f.r.config.first_consumer : f.r.config.n_layers) - 1;
        track whole = track_new(&f, 0, 0, border + f.keep);
        advance_one(&f, &rng, &whole, border);
        for (int64_t less = 0; less <= 1; less++) {
            track hit = track_new(&f, 0, 1, border + f.keep);
            memcpy(hit.blocks, whole.blocks, sizeof hit.blocks);
            hit.at = hit.valid_start = border - f.span + less;
            hit.page_from = border;
            advance_one(&f, &rng, &hit, border);
            int32_t layer = differing_ring(&f, 1, 0, kept_rings(&f), oldest, border, &position);
            assert_int_equal(layer, less ? deepest : -1);
            if (less)
                assert_int_equal(position, oldest);
            assert_int_equal(differing_ring(&f, 1, 0, kept_rings(&f), oldest + less, border, &position), -1);
        }
        fixture_close(&f);
    }
}

DI_TEST_GROUP(prefix, cmocka_unit_test(snapshots_continue_like_the_whole_run),
              cmocka_unit_test(long_windows_are_kept_too),
              cmocka_unit_test(rebuilt_windows_continue_like_the_whole_run),
              cmocka_unit_test(forks_continue_like_separate_runs), cmocka_unit_test(reference_level_continues_too),
              cmocka_unit_test(windows_need_the_whole_span));
