/* What was learnt about step times, kept between runs (spec.h): one small file for each key.
 *
 * The numbers are not copied as memory: one walk over the fields names each of them once, with the range that it can
 * have, and either writes them as 64-bit words or reads them. So a file has no padding, saving and loading can't
 * disagree about its layout, and what one refuses the other does too.
 *
 * The folder is not ours alone. It is held by a descriptor that can't be listed, and the only names ever used in it are
 * the file's and, while it is written, one that this process was the first to create. */
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <sys/stat.h>
#include <unistd.h>

#include "spec.h"

#define VERSION 2                    /* of the layout, and of what its numbers mean to cost.c and calibrate.c */
#define NS_MAX 9223372036854775808.0 /* no time that is given to the model is longer */
#define COUNT_MAX ((int64_t)1 << 62) /* leaves room to go on counting */
#define DRIFT_MAX 0.5                /* spec.h: a mean of what is within this */
#define LOG_TEMPERATURE_MAX 104.0    /* |ln| of any float above 0 is less */
#define NAME_BYTES (2 * DI_SPEC_KEY_BYTES + sizeof ".cost")
#define TEMPORARY_BYTES (NAME_BYTES + 48)

enum {
    MAGIC_AT,
    VERSION_AT,
    SIZES_AT,
    KEY_AT,
    TIME_AT = KEY_AT + DI_SPEC_KEY_BYTES / 8,
    DATA_AT,
    BUCKET_WORDS = 1 + DI_SPEC_FEATURES * (DI_SPEC_FEATURES + 1) / 2 + DI_SPEC_FEATURES,
    FIT_WORDS = DI_SPEC_BUCKETS * BUCKET_WORDS + DI_SPEC_FEATURES + 3,
    PLAIN_WORDS = DI_SPEC_BUCKETS * (DI_SPEC_FEATURES + 1),
    COST_WORDS = 2 * 3 + 2 + 2 * FIT_WORDS + PLAIN_WORDS,
    CALIBRATION_WORDS = 2 + 5 * DI_SPEC_DRAFTS_MAX + 3 * DI_SPEC_BINS,
    CHECKSUM_AT = DATA_AT + COST_WORDS + CALIBRATION_WORDS,
    FILE_WORDS
};

#define FILE_BYTES (FILE_WORDS * sizeof(uint64_t))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words of a file are written as they lie in memory");
_Static_assert(sizeof(di_spec_cost) == COST_WORDS * 8, "the walk knows every field");
/* n_drafts and is_frozen share eight bytes. */
_Static_assert(sizeof(di_spec_calibration) == (CALIBRATION_WORDS - 1) * 8, "the walk knows every field");

static const char magic[8] = {'D', 'I', '-', 'C', 'O', 'S', 'T', '\n'};
static const uint64_t sizes = DI_SPEC_FEATURES | DI_SPEC_BUCKETS << 8 | DI_SPEC_DRAFTS_MAX << 16 | DI_SPEC_BINS << 24;

/* ---- the numbers ---- */

typedef struct walk {
    uint64_t *word; /* the next one */
    bool is_reading;
    bool is_out_of_range; /* any number so far */
} walk;

static void walk_real(walk *w, double *value, double low, double high) {
    if (w->is_reading)
        memcpy(value, w->word, sizeof *value);
    else
        memcpy(w->word, value, sizeof *value);
    w->word++;
    w->is_out_of_range |= !(*value >= low && *value <= high); /* NaN too */
}

static void walk_int(walk *w, int64_t *value, int64_t low, int64_t high) {
    if (w->is_reading)
        memcpy(value, w->word, sizeof *value);
    else
        memcpy(w->word, value, sizeof *value);
    w->word++;
    if (*value < low || *value > high) {
        w->is_out_of_range = true;
        *value = low; /* narrower types take it too */
    }
}

static void walk_int32(walk *w, int32_t *value, int32_t low, int32_t high) {
    int64_t wide = w->is_reading ? 0 : *value;
    walk_int(w, &wide, low, high);
    *value = (int32_t)wide;
}

static void walk_bool(walk *w, bool *value) {
    int64_t wide = w->is_reading ? 0 : *value;
    walk_int(w, &wide, 0, 1);
    *value = wide != 0;
}

static void walk_experts(walk *w, di_spec_experts *e) {
    walk_real(w, &e->n_layers, 0, DBL_MAX);
    walk_real(w, &e->n_experts, 0, DBL_MAX);
    walk_real(w, &e->n_chosen, 0, DBL_MAX);
}

static void walk_fit(walk *w, di_spec_fit *f) {
    for (int k = 0; k < DI_SPEC_BUCKETS; k++) {
        di_spec_bucket *bucket = &f->buckets[k];
        walk_real(w, &bucket->weight, 0, DBL_MAX);
        /* No feature is negative and no time is, so that no sum of their products can be. */
        for (size_t i = 0; i < DI_COUNT(bucket->xx); i++)
            walk_real(w, &bucket->xx[i], 0, DBL_MAX);
        for (size_t i = 0; i < DI_COUNT(bucket->xy); i++)
            walk_real(w, &bucket->xy[i], 0, DBL_MAX);
    }
    for (int i = 0; i < DI_SPEC_FEATURES; i++)
        walk_real(w, &f->coef[i], 0, NS_MAX);
    walk_real(w, &f->drift, -DRIFT_MAX, DRIFT_MAX);
    walk_int32(w, &f->settling, 0, INT32_MAX);
    walk_int(w, &f->n_steps, 0, COUNT_MAX);
}

static void walk_cost(walk *w, di_spec_cost *c) {
    walk_experts(w, &c->step_experts);
    walk_experts(w, &c->draft_experts);
    walk_int32(w, &c->n_drafts, 1, DI_SPEC_DRAFTS_MAX);
    walk_int(w, &c->rows_max, 1, INT64_MAX);
    walk_fit(w, &c->step);
    walk_fit(w, &c->draft);
    for (int k = 0; k < DI_SPEC_BUCKETS; k++) {
        for (int i = 0; i < DI_SPEC_FEATURES; i++)
            walk_real(w, &c->plain[k].x[i], 0, DBL_MAX);
        walk_real(w, &c->plain[k].ns, 0, DBL_MAX);
    }
}

static void walk_calibration(walk *w, di_spec_calibration *c) {
    walk_int32(w, &c->n_drafts, 1, DI_SPEC_DRAFTS_MAX);
    walk_bool(w, &c->is_frozen);
    for (int j = 0; j < DI_SPEC_DRAFTS_MAX; j++) {
        walk_real(w, &c->log_inverse[j], -LOG_TEMPERATURE_MAX, LOG_TEMPERATURE_MAX);
        walk_real(w, &c->curvature[j], 0, DBL_MAX);
        walk_int(w, &c->n[j], 0, COUNT_MAX);
        walk_int(w, &c->n_accepted[j], 0, c->n[j]);
        walk_real(w, &c->error_sum[j], 0, (double)c->n[j]); /* each at most 1 */
    }
    for (int i = 0; i < DI_SPEC_BINS; i++) {
        walk_int(w, &c->bins[i].n, 0, COUNT_MAX);
        walk_int(w, &c->bins[i].n_accepted, 0, c->bins[i].n);
        walk_real(w, &c->bins[i].confidence_sum, 0, (double)c->bins[i].n);
    }
}

/* All words between header and checksum, either way; false when a number is none that can be. */
static bool walk_all(uint64_t *words, bool is_reading, di_spec_cost *cost, di_spec_calibration *calibration) {
    walk w = {.word = words + DATA_AT, .is_reading = is_reading};
    walk_cost(&w, cost);
    walk_calibration(&w, calibration);
    DI_ASSERT(w.word == words + CHECKSUM_AT);
    return !w.is_out_of_range;
}

static uint64_t checksum(const uint64_t *words) {
    return di_hash_fnv1a(words, CHECKSUM_AT * sizeof *words);
}

/* ---- key and name ---- */

/* Two lanes that take the same words in different ways: 128 bits that depend on each of them. */
static void mix(uint64_t lanes[2], uint64_t word) {
    lanes[0] = di_mix64(lanes[0] ^ word);
    lanes[1] = di_mix64(lanes[1] + word + 0x9E3779B97F4A7C15u);
}

void di_spec_store_key(uint8_t out[DI_SPEC_KEY_BYTES], const char *const *parts, size_t n) {
    uint64_t lanes[2] = {0x5BE0CD19137E2179u, 0x1F83D9ABFB41BD6Bu}; /* of SHA-512: any but equal ones will do */
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(parts[i]);
        mix(lanes, len);
        for (size_t at = 0; at < len; at += sizeof(uint64_t)) {
            uint64_t word = 0;
            memcpy(&word, parts[i] + at, DI_MIN(len - at, sizeof word));
            mix(lanes, word);
        }
    }
    memcpy(out, lanes, DI_SPEC_KEY_BYTES);
}

static void file_name(char out[NAME_BYTES], const uint8_t key[DI_SPEC_KEY_BYTES]) {
    for (size_t i = 0; i < DI_SPEC_KEY_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", key[i]);
    memcpy(out + NAME_BYTES - sizeof ".cost", ".cost", sizeof ".cost");
}

/* ---- load ---- */

/* The words of the file; false unless it is a regular one of just that size. */
static bool read_words(const char *dir, const char *name, uint64_t words[FILE_WORDS]) {
    int dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0)
        return false;
    /* Something else than a file may have the name: no link is followed, and no pipe waits for its other end. */
    int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    close(dir_fd);
    if (fd < 0)
        return false;
    struct stat info;
    bool is_fit = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == (off_t)FILE_BYTES;
    size_t n_read = 0;
    while (is_fit && n_read < FILE_BYTES) {
        ssize_t n = read(fd, (char *)words + n_read, FILE_BYTES - n_read);
        if (n > 0)
            n_read += (size_t)n;
        else
            is_fit = n < 0 && errno == EINTR;
    }
    close(fd);
    return is_fit;
}

static bool same_experts(const di_spec_experts *a, const di_spec_experts *b) {
    return a->n_layers == b->n_layers && a->n_experts == b->n_experts && a->n_chosen == b->n_chosen;
}

/* Temperatures that were given are no result of learning: they must be those asked for. */
static bool same_temperatures(const di_spec_calibration *a, const di_spec_calibration *b) {
    if (a->n_drafts != b->n_drafts || a->is_frozen != b->is_frozen)
        return false;
    for (int32_t j = 0; a->is_frozen && j < a->n_drafts; j++)
        if (a->log_inverse[j] != b->log_inverse[j])
            return false;
    return true;
}

bool di_spec_store_load(const char *dir, const uint8_t key[DI_SPEC_KEY_BYTES], int64_t now_s, int64_t ttl_s,
                        di_spec_cost *cost, di_spec_calibration *calibration) {
    char name[NAME_BYTES];
    uint64_t words[FILE_WORDS];
    file_name(name, key);
    if (!read_words(dir, name, words))
        return false;
    if (memcmp(&words[MAGIC_AT], magic, sizeof magic) != 0 || words[VERSION_AT] != VERSION || words[SIZES_AT] != sizes)
        return false;
    if (memcmp(&words[KEY_AT], key, DI_SPEC_KEY_BYTES) != 0 || words[CHECKSUM_AT] != checksum(words))
        return false;
    int64_t saved_s = (int64_t)words[TIME_AT];
    if (saved_s < 0 || saved_s > now_s || now_s - saved_s > ttl_s)
        return false;
    di_spec_cost found = {0};
    di_spec_calibration found_calibration = {0};
    if (!walk_all(words, true, &found, &found_calibration))
        return false;
    if (!same_experts(&found.step_experts, &cost->step_experts) ||
        !same_experts(&found.draft_experts, &cost->draft_experts) || found.n_drafts != cost->n_drafts ||
        found.rows_max != cost->rows_max || !same_temperatures(&found_calibration, calibration))
        return false;
    *cost = found;
    *calibration = found_calibration;
    return true;
}

/* ---- save ---- */

static di_status fail_errno(di_error *err, const char *dir, const char *name, const char *what, int code) {
    di_status st = code == ENOSPC || code == EDQUOT ? DI_ERR_DISK : code == ENOMEM ? DI_ERR_MEMORY : DI_ERR_IO;
    return di_fail(err, st, "'%s%s%s': %s: %s", dir, *name ? "/" : "", name, what, strerrordesc_np(code));
}

/* A descriptor to name files in the folder by, which is made if only its last part is missing. */
static di_status open_dir(const char *dir, int *fd, di_error *err) {
    *fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0 && errno == ENOENT) {
        /* Another process may have been faster. */
        if (mkdir(dir, 0777) != 0 && errno != EEXIST)
            return fail_errno(err, dir, "", "make the folder", errno);
        *fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    return *fd < 0 ? fail_errno(err, dir, "", "open the folder", errno) : DI_OK;
}

/* Whether the name is free, or a regular file's that may be replaced. */
static di_status check_name(int dir_fd, const char *dir, const char *name, di_error *err) {
    struct stat info;
    if (fstatat(dir_fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? DI_OK : fail_errno(err, dir, name, "stat", errno);
    if (S_ISREG(info.st_mode))
        return DI_OK;
    return di_fail(err, DI_ERR_IO, "'%s/%s': expected a regular file, found a %s, which is left alone", dir, name,
                   S_ISDIR(info.st_mode)   ? "folder"
                   : S_ISLNK(info.st_mode) ? "symbolic link"
                                           : "special file");
}

static int write_words(int fd, const uint64_t words[FILE_WORDS]) {
    for (size_t n_written = 0; n_written < FILE_BYTES;) {
        ssize_t n = write(fd, (const char *)words + n_written, FILE_BYTES - n_written);
        if (n < 0 && errno != EINTR)
            return errno;
        if (n > 0)
            n_written += (size_t)n;
    }
    return 0;
}

/* Writes a file of another name beside it and gives it the name: what is read under the name is always whole. The
 * machine may still lose power before the words are on the disk. Nothing waits for that: the checksum finds it, and all
 * that is lost is what was learnt. */
static di_status replace(int dir_fd, const char *dir, const char *name, const uint64_t words[FILE_WORDS],
                         di_error *err) {
    char temporary[TEMPORARY_BYTES];
    snprintf(temporary, sizeof temporary, "%s.%ld-%016llx.tmp", name, (long)getpid(),
             (unsigned long long)di_random_u64());
    /* O_EXCL: a file that was there before stays as it is, and one that wasn't is ours to rename or remove. */
    int fd = openat(dir_fd, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
        return fail_errno(err, dir, temporary, "create", errno);
    const char *what = "write";
    int code = write_words(fd, words);
    if (close(fd) != 0 && code == 0)
        code = errno;
    if (code == 0 && renameat(dir_fd, temporary, dir_fd, name) != 0) {
        what = "rename to the file's name";
        code = errno;
    }
    if (code == 0)
        return DI_OK;
    unlinkat(dir_fd, temporary, 0);
    return fail_errno(err, dir, temporary, what, code);
}

di_status di_spec_store_save(const char *dir, const uint8_t key[DI_SPEC_KEY_BYTES], int64_t now_s,
                             const di_spec_cost *cost, const di_spec_calibration *calibration, di_error *err) {
    char name[NAME_BYTES];
    file_name(name, key);
    uint64_t words[FILE_WORDS];
    memcpy(&words[MAGIC_AT], magic, sizeof magic);
    words[VERSION_AT] = VERSION;
    words[SIZES_AT] = sizes;
    memcpy(&words[KEY_AT], key, DI_SPEC_KEY_BYTES);
    words[TIME_AT] = (uint64_t)now_s;
    di_spec_cost cost_copy = *cost; /* the walk goes both ways and so asks for what it may write */
    di_spec_calibration calibration_copy = *calibration;
    if (!walk_all(words, false, &cost_copy, &calibration_copy))
        return di_fail(err, DI_ERR_RANGE, "'%s/%s': a number that was learnt is out of its range, not saved", dir,
                       name);
    words[CHECKSUM_AT] = checksum(words);
    int dir_fd = -1;
    di_status st = open_dir(dir, &dir_fd, err);
    if (st)
        return st;
    st = check_name(dir_fd, dir, name, err);
    if (st == DI_OK)
        st = replace(dir_fd, dir, name, words, err);
    close(dir_fd);
    return st;
}
