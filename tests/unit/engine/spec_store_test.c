/* What was learnt, kept between runs: a process that loads goes on as one that never ended, nothing that is damaged,
 * old or of something else is loaded, and whatever else lies in the folder stays as it is. */
#include "engine/spec/spec.h"
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROWS_MAX = 64, DRAFTS = 5, NOW = 1000000, DAY = 86400, PATH_BYTES = 600 };

static const di_spec_experts step_experts = {.n_layers = 10, .n_experts = 32, .n_chosen = 4};
static const di_spec_experts draft_experts = {.n_layers = 1, .n_experts = 16, .n_chosen = 2};

typedef struct learnt {
    di_spec_cost cost;
    di_spec_calibration calibration;
} learnt;

static void learnt_init(learnt *l) {
    memset(l, 0, sizeof *l); /* padding too, so that memory can be compared */
    di_spec_cost_init(&l->cost, &step_experts, &draft_experts, DRAFTS, ROWS_MAX);
    di_spec_calibration_init(&l->calibration, DRAFTS, NULL);
}

/* Steps of a machine with noise that is `factor` times slower than at first, and what becomes of their drafts. */
static void learnt_go_on(learnt *l, uint64_t *rng, int n_steps, double factor) {
    for (int k = 0; k < n_steps; k++) {
        int64_t rows = di_test_random_range(rng, 1, 48), context = rows * di_test_random_range(rng, 1, 4000);
        int32_t seqs = (int32_t)di_test_random_range(rng, 1, 12);
        double noise = factor * (0.97 + 0.06 * di_test_random_unit(rng)) * (k % 20 == 19 ? 4 : 1);
        double touched = di_spec_experts_touched(&step_experts, (double)rows);
        double ns = 3e6 + 2e5 * (double)rows + 3e4 * touched + 7 * (double)context;
        di_spec_cost_learn_step(&l->cost, rows, context, (int64_t)(noise * ns));
        di_spec_cost_learn_draft(&l->cost, seqs, (int64_t)(noise * (1e6 + 1e5 * seqs)));
        di_spec_cost_learn_plain(&l->cost, rows, context, (int64_t)(noise * (ns - 1e6)));
        float raw[DRAFTS];
        for (int j = 0; j < DRAFTS; j++)
            raw[j] = (float)di_test_random_unit(rng);
        int32_t n_verified = (int32_t)di_test_random_range(rng, 0, DRAFTS);
        int32_t n_accepted = (int32_t)di_test_random_range(rng, 0, n_verified);
        di_spec_calibration_learn(&l->calibration, n_verified, n_accepted, raw);
    }
}

/* To the last bit, in what is predicted and in what decides on further learning. */
static void assert_same(const learnt *a, const learnt *b) {
    for (int64_t rows = 1; rows <= ROWS_MAX; rows++)
        assert_true(di_spec_cost_step_ns(&a->cost, rows, rows * 777) ==
                    di_spec_cost_step_ns(&b->cost, rows, rows * 777));
    for (int64_t rows = 1; rows <= ROWS_MAX; rows++)
        assert_true(di_spec_cost_plain_saves_ns(&a->cost, rows, rows * 777) ==
                    di_spec_cost_plain_saves_ns(&b->cost, rows, rows * 777));
    for (int32_t seqs = 1; seqs <= 16; seqs++)
        assert_true(di_spec_cost_draft_ns(&a->cost, seqs) == di_spec_cost_draft_ns(&b->cost, seqs));
    assert_int_equal(di_spec_cost_is_ready(&a->cost), di_spec_cost_is_ready(&b->cost));
    assert_int_equal(di_spec_cost_draft_is_ready(&a->cost), di_spec_cost_draft_is_ready(&b->cost));
    assert_true(di_spec_calibration_error(&a->calibration, -1) == di_spec_calibration_error(&b->calibration, -1));
    for (int32_t j = 0; j < DRAFTS; j++)
        assert_true(di_spec_calibration_temperature(&a->calibration, j) ==
                    di_spec_calibration_temperature(&b->calibration, j));
    assert_memory_equal(&a->calibration.bins, &b->calibration.bins, sizeof a->calibration.bins);
    const di_spec_fit *fits[2][2] = {{&a->cost.step, &a->cost.draft}, {&b->cost.step, &b->cost.draft}};
    for (int i = 0; i < 2; i++) {
        const di_spec_fit *x = fits[0][i], *y = fits[1][i];
        assert_memory_equal(x->buckets, y->buckets, sizeof x->buckets);
        assert_memory_equal(x->coef, y->coef, sizeof x->coef);
        assert_memory_equal(&x->drift, &y->drift, sizeof x->drift);
        assert_int_equal(x->settling, y->settling);
        assert_int_equal(x->n_steps, y->n_steps);
    }
}

static void assert_untouched(const learnt *l) {
    learnt blank;
    learnt_init(&blank);
    assert_memory_equal(l, &blank, sizeof blank);
}

/* A folder of its own for a test, and the file of a key in it. */
typedef struct place {
    char dir[PATH_BYTES - 100], path[PATH_BYTES];
    uint8_t key[DI_SPEC_KEY_BYTES];
} place;

static void path_of(const place *p, const uint8_t *key, char out[PATH_BYTES]) {
    int at = snprintf(out, PATH_BYTES, "%s/", p->dir);
    for (int i = 0; i < DI_SPEC_KEY_BYTES; i++)
        at += snprintf(out + at, PATH_BYTES - (size_t)at, "%02x", key[i]);
    snprintf(out + at, PATH_BYTES - (size_t)at, ".cost");
}

static void place_init(place *p, const char *name) {
    const char *const parts[] = {"a model", "fp8", "a machine"};
    snprintf(p->dir, sizeof p->dir, "%s", di_test_tmp(name));
    di_spec_store_key(p->key, parts, DI_COUNT(parts));
    path_of(p, p->key, p->path);
}

static void save(const place *p, const learnt *l) {
    di_error err;
    di_test_ok(di_spec_store_save(p->dir, p->key, NOW, &l->cost, &l->calibration, &err), &err);
}

static bool load_at(const place *p, int64_t now_s, int64_t ttl_s, learnt *l) {
    return di_spec_store_load(p->dir, p->key, now_s, ttl_s, &l->cost, &l->calibration);
}

static bool load(const place *p, learnt *l) {
    learnt_init(l);
    return load_at(p, NOW, DAY, l);
}

static void write_file(const char *path, const void *bytes, size_t n) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

static void read_file(const char *path, di_strbuf *out) {
    di_error err;
    di_strbuf_reset(out);
    di_test_ok(di_file_read(path, 1 << 20, out, &err), &err);
}

static int count_entries(const char *dir) {
    DIR *d = opendir(dir);
    assert_non_null(d);
    int n = 0;
    for (const struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}

/* One process ends and another begins after any number of steps, the machine's change and settling included: both then
 * learn the same from the same. */
DI_PROPERTY(goes_on_as_if_it_never_ended, 12) {
    uint64_t rng = seed;
    place p;
    place_init(&p, "goes-on");
    learnt stays, restarts;
    learnt_init(&stays);
    for (int run = 0; run < 4; run++) {
        /* The machine changes in the last steps of every other run, so that the save finds it settling. */
        learnt_go_on(&stays, &rng, (int)di_test_random_range(&rng, 0, 300), 1);
        learnt_go_on(&stays, &rng, (int)di_test_random_range(&rng, 0, 12), run % 2 ? 2.5 : 1);
        save(&p, &stays);
        assert_true(load(&p, &restarts));
        assert_same(&stays, &restarts);
        uint64_t same_rng = rng;
        learnt_go_on(&stays, &rng, 200, run % 2 ? 2.5 : 1);
        learnt_go_on(&restarts, &same_rng, 200, run % 2 ? 2.5 : 1);
        assert_same(&stays, &restarts);
    }
}

/* A single odd step after a restart counts as little as without one, and steps that stay different win in time. */
static void old_steps_keep_their_weight_and_fade(void **state) {
    (void)state;
    place p;
    place_init(&p, "weight");
    learnt l, next;
    learnt_init(&l);
    for (int k = 0; k < 400; k++)
        di_spec_cost_learn_step(&l.cost, 1 + k % 8, 1000, 1000000 + 100000 * (1 + k % 8));
    save(&p, &l);
    assert_true(load(&p, &next));
    assert_true(di_spec_cost_is_ready(&next.cost));
    assert_true(fabs(di_spec_cost_step_ns(&next.cost, 4, 1000) / 1.4e6 - 1) < 1e-6);
    di_spec_cost_learn_step(&next.cost, 4, 1000, 4 * 1400000);
    assert_true(di_spec_cost_step_ns(&next.cost, 4, 1000) < 1.01 * 1.4e6);
    for (int k = 0; k < 400; k++)
        di_spec_cost_learn_step(&next.cost, 1 + k % 8, 1000, 2 * (1000000 + 100000 * (1 + k % 8)));
    assert_true(fabs(di_spec_cost_step_ns(&next.cost, 4, 1000) / 2.8e6 - 1) < 0.02);
}

/* What is in no prediction survives too: signs of zero, the smallest and the largest numbers. */
static void every_number_survives(void **state) {
    (void)state;
    place p;
    place_init(&p, "numbers");
    learnt l, back;
    learnt_init(&l);
    l.cost.step.drift = -0.0;
    l.cost.draft.drift = -0.25;
    l.cost.step.settling = 63;
    l.cost.step.n_steps = (int64_t)1 << 62;
    l.cost.step.coef[1] = 0.1;
    l.cost.step.coef[2] = 5e-324;
    l.cost.draft.coef[3] = 9223372036854775808.0;
    for (int k = 0; k < DI_SPEC_BUCKETS; k++) {
        l.cost.draft.buckets[k].weight = 1.0 / (3 + k);
        l.cost.draft.buckets[k].xx[k % 10] = 1.7976931348623157e308;
        l.cost.step.buckets[k].xy[k % 4] = 2.2250738585072014e-308;
    }
    for (int j = 0; j < DI_SPEC_DRAFTS_MAX; j++) {
        l.calibration.log_inverse[j] = -0.1 * j;
        l.calibration.curvature[j] = 1e-9 * j;
        l.calibration.n[j] = 1000 + j;
        l.calibration.n_accepted[j] = j;
        l.calibration.error_sum[j] = 100.0 / (j + 1);
    }
    for (int i = 0; i < DI_SPEC_BINS; i++) {
        l.calibration.bins[i].n = 10 + i;
        l.calibration.bins[i].n_accepted = 10 + i;
        l.calibration.bins[i].confidence_sum = (10 + i) * 0.9;
    }
    save(&p, &l);
    assert_true(load(&p, &back));
    assert_same(&l, &back);
    assert_memory_equal(l.calibration.log_inverse, back.calibration.log_inverse, sizeof l.calibration.log_inverse);
    assert_memory_equal(l.calibration.curvature, back.calibration.curvature, sizeof l.calibration.curvature);
    assert_memory_equal(l.calibration.n, back.calibration.n, sizeof l.calibration.n);
    assert_memory_equal(l.calibration.n_accepted, back.calibration.n_accepted, sizeof l.calibration.n_accepted);
    assert_memory_equal(l.calibration.error_sum, back.calibration.error_sum, sizeof l.calibration.error_sum);
}

static void learn_something(learnt *l) {
    uint64_t rng = 7;
    learnt_init(l);
    learnt_go_on(l, &rng, 200, 1);
}

static void nothing_is_there_at_first(void **state) {
    (void)state;
    place p;
    place_init(&p, "absent");
    learnt l;
    assert_false(load(&p, &l)); /* no folder */
    assert_untouched(&l);
    assert_false(di_path_exists(p.dir));
    assert_int_equal(mkdir(p.dir, 0755), 0);
    assert_false(load(&p, &l)); /* no file */
    assert_untouched(&l);
    assert_int_equal(count_entries(p.dir), 0);
}

static void age_is_limited(void **state) {
    (void)state;
    place p;
    place_init(&p, "age");
    learnt saved, l;
    learn_something(&saved);
    save(&p, &saved);
    static const struct {
        int64_t now_s, ttl_s;
        bool is_usable;
    } cases[] = {
        {NOW, 0, true},
        {NOW + 1, 0, false},
        {NOW + DAY, DAY, true},
        {NOW + DAY + 1, DAY, false},
        {NOW - 1, DAY, false}, /* the future */
        {0, INT64_MAX, false},
        {-1, INT64_MAX, false},
        {INT64_MIN, INT64_MAX, false},
        {INT64_MAX, DAY, false},
        {INT64_MAX, INT64_MAX, true},
        {NOW, -1, false},
        {NOW, INT64_MIN, false},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        learnt_init(&l);
        assert_int_equal(load_at(&p, cases[i].now_s, cases[i].ttl_s, &l), cases[i].is_usable);
        if (cases[i].is_usable)
            assert_same(&saved, &l);
        else
            assert_untouched(&l);
    }
    /* Saved again, it is young again. */
    di_error err;
    di_test_ok(di_spec_store_save(p.dir, p.key, NOW + 2 * DAY, &saved.cost, &saved.calibration, &err), &err);
    learnt_init(&l);
    assert_true(load_at(&p, NOW + 3 * DAY, DAY, &l));
}

static void other_things_than_asked_for(void **state) {
    (void)state;
    place p;
    place_init(&p, "asked");
    learnt saved, l, asked;
    learn_something(&saved);
    save(&p, &saved);
    const float temperatures[DRAFTS] = {1, 1, 1, 1, 1};
    for (int i = 0; i < 8; i++) {
        di_spec_experts step = step_experts, draft = draft_experts;
        step.n_layers += i == 0;
        step.n_experts += i == 1;
        step.n_chosen += i == 2;
        draft.n_experts += i == 3;
        memset(&asked, 0, sizeof asked);
        int32_t n_drafts = DRAFTS - (i == 4);
        di_spec_cost_init(&asked.cost, &step, &draft, n_drafts, ROWS_MAX + (i == 5));
        di_spec_calibration_init(&asked.calibration, DRAFTS - (i == 6), temperatures);
        asked.calibration.is_frozen = i == 7;
        l = asked;
        assert_false(load_at(&p, NOW, DAY, &l));
        assert_memory_equal(&l, &asked, sizeof l);
    }
    assert_true(load(&p, &l));

    /* Temperatures that were given, and not learnt, have to be the same ones. */
    for (int i = 0; i < 2; i++) {
        const float given[DRAFTS] = {1.5f, 1.25f, 1, 1, 0.75f}, other[DRAFTS] = {1.5f, 1.25f, 1, 1, 0.5f};
        di_spec_calibration_init(&saved.calibration, DRAFTS, given);
        saved.calibration.is_frozen = true;
        save(&p, &saved);
        assert_false(load(&p, &l));
        learnt_init(&l);
        di_spec_calibration_init(&l.calibration, DRAFTS, i ? other : given);
        l.calibration.is_frozen = true;
        assert_int_equal(load_at(&p, NOW, DAY, &l), i == 0);
    }
}

/* A file is of the key in it, whatever it is called. */
static void other_keys(void **state) {
    (void)state;
    place p;
    place_init(&p, "keys");
    learnt saved, l;
    learn_something(&saved);
    save(&p, &saved);
    place other = p;
    other.key[15] ^= 1;
    path_of(&other, other.key, other.path);
    assert_false(load(&other, &l));
    assert_untouched(&l);
    assert_int_equal(rename(p.path, other.path), 0);
    assert_false(load(&other, &l));
    assert_untouched(&l);
    assert_int_equal(rename(other.path, p.path), 0);
    assert_true(load(&p, &l));
    /* Both keys have a file of their own. */
    learnt_init(&l);
    save(&other, &l);
    assert_true(load(&p, &l));
    assert_same(&saved, &l);
}

/* Any byte changed, any length but the right one, and content that is no such file at all. */
static void damage_is_found(void **state) {
    (void)state;
    place p;
    place_init(&p, "damage");
    learnt saved, l;
    learn_something(&saved);
    save(&p, &saved);
    di_strbuf file = {0};
    read_file(p.path, &file);
    int fd = open(p.path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    for (size_t i = 0; i < file.len; i += i < 128 || i + 64 > file.len ? 1 : 5) {
        char bad = (char)(file.data[i] ^ (1 << i % 8));
        assert_int_equal(pwrite(fd, &bad, 1, (off_t)i), 1);
        assert_false(load(&p, &l));
        assert_int_equal(pwrite(fd, &file.data[i], 1, (off_t)i), 1);
    }
    assert_untouched(&l);
    assert_true(load(&p, &l));
    for (size_t len = 0; len < file.len; len += len < 128 ? 1 : 97) {
        write_file(p.path, file.data, len);
        assert_false(load(&p, &l));
    }
    di_strbuf_putc(&file, '\0');
    write_file(p.path, file.data, file.len);
    assert_false(load(&p, &l));
    memset(file.data, 0, file.len);
    write_file(p.path, file.data, file.len - 1);
    assert_false(load(&p, &l));
    assert_untouched(&l);
    /* A save replaces it. */
    save(&p, &saved);
    assert_true(load(&p, &l));
    assert_same(&saved, &l);
    close(fd);
    di_strbuf_deinit(&file);
}

/* Puts value in the place of the only word that equals old, with a checksum that is right. */
static void forge(const place *p, const di_strbuf *file, uint64_t old, uint64_t value) {
    size_t n = file->len / 8, n_found = 0;
    uint64_t *words = malloc(file->len);
    assert_non_null(words);
    memcpy(words, file->data, file->len);
    for (size_t i = 0; i + 1 < n; i++) {
        if (words[i] == old) {
            words[i] = value;
            n_found++;
        }
    }
    assert_int_equal(n_found, 1);
    words[n - 1] = di_hash_fnv1a(words, (n - 1) * 8);
    write_file(p->path, words, n * 8);
    free(words);
}

static uint64_t bits(double value) {
    uint64_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

/* Files with a right checksum over numbers that no process has learnt, each found by a value that only it has. */
static void impossible_numbers_are_refused(void **state) {
    (void)state;
    place p;
    place_init(&p, "impossible");
    learnt saved, l;
    learnt_init(&saved);
    saved.cost.step.buckets[3].weight = 11.5;
    saved.cost.step.buckets[3].xx[4] = 12.5;
    saved.cost.draft.buckets[9].xy[2] = 13.5;
    saved.cost.step.coef[1] = 14.5;
    saved.cost.draft.drift = 0.375;
    saved.cost.step.settling = 1001;
    saved.cost.step.n_steps = 1002;
    saved.calibration.log_inverse[2] = 0.625;
    saved.calibration.curvature[2] = 17.5;
    saved.calibration.n[2] = 1003;
    saved.calibration.n_accepted[2] = 501;
    saved.calibration.error_sum[2] = 18.5;
    saved.calibration.bins[4].n = 1004;
    saved.calibration.bins[4].n_accepted = 502;
    saved.calibration.bins[4].confidence_sum = 19.5;
    save(&p, &saved);
    di_strbuf file = {0};
    read_file(p.path, &file);
    const struct {
        uint64_t old, value;
        bool is_usable;
    } cases[] = {
        {bits(11.5), bits(3), true},
        {bits(11.5), bits(-1), false},
        {bits(11.5), bits((double)NAN), false},
        {bits(12.5), bits((double)INFINITY), false},
        {bits(12.5), bits(-1e-300), false},
        {bits(13.5), bits(-(double)NAN), false},
        {bits(13.5), bits(-1), false},
        {bits(14.5), bits(20), true},
        {bits(14.5), bits(-20), false},
        {bits(14.5), bits(-0.0), true},
        {bits(14.5), bits(1e300), false},
        {bits(14.5), bits((double)NAN), false},
        {bits(0.375), bits(0.5), true},
        {bits(0.375), bits(-0.5), true},
        {bits(0.375), bits(0.51), false},
        {bits(0.375), bits(-(double)INFINITY), false},
        {1001, 0, true},
        {1001, (uint64_t)-1, false},
        {1001, (uint64_t)INT32_MAX + 1, false},
        {1001, (uint64_t)1 << 32, false},
        {1002, (uint64_t)-1, false},
        {1002, INT64_MAX, false},
        {bits(0.625), bits(-2), true},
        {bits(0.625), bits(1000), false},
        {bits(0.625), bits((double)NAN), false},
        {bits(17.5), bits(-1), false},
        {1003, 501, true},
        {1003, 500, false}, /* fewer than were accepted */
        {1003, (uint64_t)-1, false},
        {501, (uint64_t)-1, false},
        {bits(18.5), bits(1003), true},
        {bits(18.5), bits(1003.5), false}, /* more than one each */
        {1004, 501, false},
        {502, 1005, false},
        {bits(19.5), bits(-1), false},
        {bits(19.5), bits(1005), false},
        {NOW, NOW - 1, true},
        {NOW, (uint64_t)-1, false},
        {NOW, NOW + 1, false},
        {NOW, INT64_MAX, false},
        {NOW, (uint64_t)1 << 63, false},
    };
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        forge(&p, &file, cases[i].old, cases[i].value);
        if (load(&p, &l) != cases[i].is_usable)
            fail_msg("case %zu: expected %s", i, cases[i].is_usable ? "usable" : "refused");
        if (!cases[i].is_usable)
            assert_untouched(&l);
    }
    /* Magic, version and sizes: the three words in front of the key. */
    for (int i = 0; i < 3; i++) {
        uint64_t word;
        memcpy(&word, file.data + (size_t)i * 8, sizeof word);
        forge(&p, &file, word, word + 1);
        assert_false(load(&p, &l));
    }
    di_strbuf_deinit(&file);
}

/* What a load would refuse is not saved, and does not take the place of what was. */
static void impossible_numbers_are_not_saved(void **state) {
    (void)state;
    place p;
    place_init(&p, "refused");
    learnt saved, l;
    learn_something(&saved);
    save(&p, &saved);
    for (int i = 0; i < 4; i++) {
        learnt bad = saved;
        if (i == 0)
            bad.cost.step.coef[0] = (double)NAN;
        else if (i == 1)
            bad.cost.draft.buckets[1].xx[0] = (double)INFINITY;
        else if (i == 2)
            bad.calibration.n_drafts = 0;
        else
            bad.calibration.error_sum[1] = -1;
        di_error err;
        assert_int_equal(di_spec_store_save(p.dir, p.key, NOW, &bad.cost, &bad.calibration, &err), DI_ERR_RANGE);
        assert_contains(err.message, p.path);
        assert_int_equal(di_spec_store_save(p.dir, p.key, NOW, &bad.cost, &bad.calibration, NULL), DI_ERR_RANGE);
    }
    assert_int_equal(count_entries(p.dir), 1);
    assert_true(load(&p, &l));
    assert_same(&saved, &l);
}

/* Files, folders and links of others, under every name that a careless clean-up would take for its own. */
typedef struct foreign {
    char path[PATH_BYTES];
    char bytes[64];
    struct stat before;
} foreign;

static void assert_foreign_as_before(const foreign *files, int n) {
    di_strbuf text = {0};
    for (int i = 0; i < n; i++) {
        struct stat now;
        assert_int_equal(lstat(files[i].path, &now), 0);
        assert_int_equal(now.st_ino, files[i].before.st_ino);
        assert_int_equal(now.st_mode, files[i].before.st_mode);
        assert_int_equal(now.st_size, files[i].before.st_size);
        assert_int_equal(now.st_nlink, files[i].before.st_nlink);
        assert_int_equal(now.st_mtim.tv_sec, files[i].before.st_mtim.tv_sec);
        assert_int_equal(now.st_mtim.tv_nsec, files[i].before.st_mtim.tv_nsec);
        if (S_ISREG(now.st_mode)) {
            read_file(files[i].path, &text);
            assert_string_equal(di_strbuf_str(&text), files[i].bytes);
        }
    }
    di_strbuf_deinit(&text);
}

static void foreign_files_survive(void **state) {
    (void)state;
    place p;
    place_init(&p, "foreign");
    assert_int_equal(mkdir(p.dir, 0755), 0);
    char hex[2 * DI_SPEC_KEY_BYTES + 1], pid[32];
    snprintf(hex, sizeof hex, "%s", p.path + strlen(p.dir) + 1);
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    static const char *const patterns[] = {"notes.txt",
                                           ".cost",
                                           "cost",
                                           ".tmp",
                                           "KEY",
                                           "KEY.tmp",
                                           "KEY.cost.tmp",
                                           "KEY.cost.PID",
                                           "KEY.cost.PID.tmp",
                                           "KEY.cost.PID-0000000000000000.tmp",
                                           "KEY.cost.1-0123456789abcdef.tmp",
                                           "KEY.cost~",
                                           ".KEY.cost",
                                           "KEY.cost.bak",
                                           "KEY.COST",
                                           "KEYcost",
                                           "0KEY.cost",
                                           "00000000000000000000000000000000.cost",
                                           "ffffffffffffffffffffffffffffffff.cost",
                                           "ffffffffffffffffffffffffffffffff.cost.tmp",
                                           "profile_cache_v1.json"};
    enum { N_FILES = sizeof patterns / sizeof *patterns, N_FOREIGN = N_FILES + 2 };
    foreign files[N_FOREIGN];
    for (int i = 0; i < N_FILES; i++) {
        di_strbuf name = {0};
        for (const char *at = patterns[i]; *at;) {
            bool is_key = strncmp(at, "KEY", 3) == 0, is_pid = strncmp(at, "PID", 3) == 0;
            if (is_key || is_pid)
                di_strbuf_puts(&name, is_key ? hex : pid);
            else
                di_strbuf_putc(&name, *at);
            at += is_key || is_pid ? 3 : 1;
        }
        snprintf(files[i].path, sizeof files[i].path, "%s/%s", p.dir, di_strbuf_str(&name));
        snprintf(files[i].bytes, sizeof files[i].bytes, "%d: not yours", i);
        write_file(files[i].path, files[i].bytes, strlen(files[i].bytes));
        di_strbuf_deinit(&name);
    }
    snprintf(files[N_FILES].path, PATH_BYTES, "%s/%s.cost.d", p.dir, hex);
    assert_int_equal(mkdir(files[N_FILES].path, 0700), 0);
    snprintf(files[N_FILES + 1].path, PATH_BYTES, "%s/%s.cost.lnk", p.dir, hex);
    assert_int_equal(symlink(files[0].path, files[N_FILES + 1].path), 0);
    for (int i = 0; i < N_FOREIGN; i++)
        assert_int_equal(lstat(files[i].path, &files[i].before), 0);

    learnt saved, l;
    learn_something(&saved);
    assert_false(load(&p, &l));
    for (int k = 0; k < 3; k++) {
        save(&p, &saved);
        assert_true(load(&p, &l));
        learnt_init(&l);
        assert_false(load_at(&p, NOW + 100 * DAY, DAY, &l)); /* too old: it is not cleaned up either */
        assert_int_equal(count_entries(p.dir), N_FOREIGN + 1);
        assert_foreign_as_before(files, N_FOREIGN);
    }
    write_file(p.path, "damaged", 7);
    assert_false(load(&p, &l));
    save(&p, &saved);
    assert_int_equal(count_entries(p.dir), N_FOREIGN + 1);
    assert_foreign_as_before(files, N_FOREIGN);
}

static void assert_save_leaves_it(const place *p, const learnt *l, const char *what) {
    di_error err;
    assert_int_equal(di_spec_store_save(p->dir, p->key, NOW, &l->cost, &l->calibration, &err), DI_ERR_IO);
    assert_contains(err.message, p->path);
    assert_contains(err.message, what);
    learnt blank;
    assert_false(load(p, &blank)); /* a pipe does not make it wait */
    assert_untouched(&blank);
}

/* A link is not followed, be its target even a file that could be loaded. */
static void what_is_no_file_is_left_alone(void **state) {
    (void)state;
    place p, real;
    place_init(&p, "no-file");
    place_init(&real, "no-file-real");
    learnt saved;
    learn_something(&saved);
    save(&real, &saved);
    di_strbuf before = {0}, after = {0};
    read_file(real.path, &before);
    assert_int_equal(mkdir(p.dir, 0755), 0);

    assert_int_equal(symlink(real.path, p.path), 0);
    assert_save_leaves_it(&p, &saved, "symbolic link");
    struct stat info;
    assert_true(lstat(p.path, &info) == 0 && S_ISLNK(info.st_mode));
    read_file(real.path, &after);
    assert_int_equal(before.len, after.len);
    assert_memory_equal(before.data, after.data, after.len);
    assert_int_equal(unlink(p.path), 0);

    char target[PATH_BYTES + 8];
    snprintf(target, sizeof target, "%s.none", real.path);
    assert_int_equal(symlink(target, p.path), 0);
    assert_save_leaves_it(&p, &saved, "symbolic link");
    assert_true(lstat(target, &info) != 0 && errno == ENOENT);
    assert_int_equal(unlink(p.path), 0);

    assert_int_equal(mkdir(p.path, 0755), 0);
    assert_save_leaves_it(&p, &saved, "folder");
    assert_int_equal(rmdir(p.path), 0); /* it is still empty */

    assert_int_equal(mkfifo(p.path, 0644), 0);
    assert_save_leaves_it(&p, &saved, "special file");
    assert_true(lstat(p.path, &info) == 0 && S_ISFIFO(info.st_mode));
    assert_int_equal(count_entries(p.dir), 1);
    assert_int_equal(unlink(p.path), 0);

    /* Another name of the same file keeps the bytes that it had. */
    save(&p, &saved);
    assert_int_equal(link(p.path, target), 0);
    learnt more = saved;
    uint64_t rng = 3;
    learnt_go_on(&more, &rng, 10, 1);
    save(&p, &more);
    read_file(target, &after);
    assert_memory_equal(before.data, after.data, after.len);
    di_strbuf_deinit(&before);
    di_strbuf_deinit(&after);
}

static void the_folder_is_made(void **state) {
    (void)state;
    place p;
    place_init(&p, "made");
    learnt saved, l;
    learn_something(&saved);
    size_t len = strlen(p.dir);
    /* Only the last part. */
    snprintf(p.dir + len, sizeof p.dir - len, "/deeper");
    di_error err;
    assert_int_equal(di_spec_store_save(p.dir, p.key, NOW, &saved.cost, &saved.calibration, &err), DI_ERR_IO);
    assert_contains(err.message, p.dir);
    p.dir[len] = '\0';
    assert_false(di_path_exists(p.dir));
    save(&p, &saved);
    assert_true(load(&p, &l));
    snprintf(p.dir + len, sizeof p.dir - len, "/deeper/");
    save(&p, &saved);
    assert_true(load(&p, &l));
    /* A file where the folder should be. */
    snprintf(p.dir + len, sizeof p.dir - len, "/file");
    write_file(p.dir, "text", 4);
    assert_int_equal(di_spec_store_save(p.dir, p.key, NOW, &saved.cost, &saved.calibration, &err), DI_ERR_IO);
    assert_contains(err.message, p.dir);
    assert_false(load(&p, &l));
    di_strbuf text = {0};
    read_file(p.dir, &text);
    assert_string_equal(di_strbuf_str(&text), "text");
    di_strbuf_deinit(&text);
    p.dir[0] = '\0';
    assert_int_equal(di_spec_store_save(p.dir, p.key, NOW, &saved.cost, &saved.calibration, &err), DI_ERR_IO);
    assert_false(load(&p, &l));
}

/* A write that ends in the middle, here at a limit of the file's size, leaves the file that was there and no other. */
static void a_failed_write_leaves_what_was(void **state) {
    (void)state;
    place p;
    place_init(&p, "failed");
    learnt saved, more, l;
    learn_something(&saved);
    save(&p, &saved);
    more = saved;
    uint64_t rng = 3;
    learnt_go_on(&more, &rng, 10, 1);
    struct rlimit limit, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 1000;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    di_error err;
    di_status st = di_spec_store_save(p.dir, p.key, NOW, &more.cost, &more.calibration, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, handler);
    assert_int_equal(st, DI_ERR_IO);
    assert_contains(err.message, p.path);
    assert_contains(err.message, "write");
    assert_int_equal(count_entries(p.dir), 1);
    assert_true(load(&p, &l));
    assert_same(&saved, &l);
}

typedef struct saver {
    const place *p;
    const learnt *l;
    int n_failed;
} saver;

static void *save_often(void *arg) {
    saver *s = arg;
    for (int k = 0; k < 100; k++)
        s->n_failed += di_spec_store_save(s->p->dir, s->p->key, NOW, &s->l->cost, &s->l->calibration, NULL) != DI_OK;
    return NULL;
}

/* While two save, a third never finds the file missing or torn. */
static void saves_at_once_are_whole(void **state) {
    (void)state;
    place p;
    place_init(&p, "at-once");
    learnt both[2], l;
    uint64_t rng = 5;
    learn_something(&both[0]);
    both[1] = both[0];
    learnt_go_on(&both[1], &rng, 30, 2);
    save(&p, &both[0]);
    pthread_t threads[2];
    saver savers[2];
    for (int i = 0; i < 2; i++) {
        savers[i] = (saver){&p, &both[i], 0};
        assert_int_equal(pthread_create(&threads[i], NULL, save_often, &savers[i]), 0);
    }
    int n_torn = 0;
    for (int k = 0; k < 200; k++) {
        bool is_found = load(&p, &l);
        int64_t n = l.cost.step.n_steps;
        n_torn += !is_found || (n != both[0].cost.step.n_steps && n != both[1].cost.step.n_steps);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(savers[i].n_failed, 0);
    }
    assert_int_equal(n_torn, 0);
    assert_int_equal(count_entries(p.dir), 1);
}

static void keys_tell_parts_apart(void **state) {
    (void)state;
    static const char *const lists[][4] = {
        {NULL},
        {"", NULL},
        {"", "", NULL},
        {"ab", "c", NULL},
        {"a", "bc", NULL},
        {"abc", NULL},
        {"abc", "", NULL},
        {"", "abc", NULL},
        {"c", "ab", NULL},
        {"ab", "c", "", NULL},
        {"12345678", NULL},
        {"1234567", "8", NULL},
        {"12345678", "", NULL},
        {"123456789", NULL},
        {"DeepSeek-V4.1-Flash", "fp8", "8 threads", NULL},
        {"DeepSeek-V4.1-Flash", "fp8", "16 threads", NULL},
        {"DeepSeek-V4.1-Flash", "fp4", "8 threads", NULL},
    };
    uint8_t keys[DI_COUNT(lists)][DI_SPEC_KEY_BYTES], again[DI_SPEC_KEY_BYTES];
    for (size_t i = 0; i < DI_COUNT(lists); i++) {
        size_t n = 0;
        while (lists[i][n])
            n++;
        di_spec_store_key(keys[i], lists[i], n);
        di_spec_store_key(again, lists[i], n);
        assert_memory_equal(keys[i], again, sizeof again);
        /* Each half alone tells them apart too. */
        for (size_t k = 0; k < i; k++) {
            assert_memory_not_equal(keys[i], keys[k], 8);
            assert_memory_not_equal(keys[i] + 8, keys[k] + 8, 8);
        }
    }
}

/* A changed byte changes each bit of the key with a chance of 1/2: of 128, 64 +- 5.66, here within 6 of these. */
DI_PROPERTY(keys_depend_on_every_byte, 20) {
    uint64_t rng = seed;
    char text[41] = {0}, other[41] = {0};
    int len = (int)di_test_random_range(&rng, 1, 40);
    for (int i = 0; i < len; i++)
        text[i] = (char)di_test_random_range(&rng, 1, 255);
    text[len] = '\0';
    const char *const parts[] = {"model", text, "machine"}, *const changed[] = {"model", other, "machine"};
    uint8_t a[DI_SPEC_KEY_BYTES], b[DI_SPEC_KEY_BYTES];
    di_spec_store_key(a, parts, 3);
    for (int i = 0; i < len; i++) {
        memcpy(other, text, sizeof text);
        do
            other[i] = (char)di_test_random_range(&rng, 1, 255);
        while (other[i] == text[i]);
        di_spec_store_key(b, changed, 3);
        int n_bits = 0;
        for (int k = 0; k < DI_SPEC_KEY_BYTES; k++)
            n_bits += __builtin_popcount(a[k] ^ b[k]);
        assert_in_range(n_bits, 30, 98);
    }
}

DI_TEST_GROUP(spec_store, cmocka_unit_test(goes_on_as_if_it_never_ended),
              cmocka_unit_test(old_steps_keep_their_weight_and_fade), cmocka_unit_test(every_number_survives),
              cmocka_unit_test(nothing_is_there_at_first), cmocka_unit_test(age_is_limited),
              cmocka_unit_test(other_things_than_asked_for), cmocka_unit_test(other_keys),
              cmocka_unit_test(damage_is_found), cmocka_unit_test(impossible_numbers_are_refused),
              cmocka_unit_test(impossible_numbers_are_not_saved), cmocka_unit_test(foreign_files_survive),
              cmocka_unit_test(what_is_no_file_is_left_alone), cmocka_unit_test(the_folder_is_made),
              cmocka_unit_test(a_failed_write_leaves_what_was), cmocka_unit_test(saves_at_once_are_whole),
              cmocka_unit_test(keys_tell_parts_apart), cmocka_unit_test(keys_depend_on_every_byte))
