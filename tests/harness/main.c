/* The main function of every test program, and the helpers of harness.h. */
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness.h"

static di_test_group *first_group;
static uint64_t seed_start = 20250101;
static int runs_max = 0; /* 0: what each property asks for */
static const char *backend = "cpu";

static char tmp_dir[256];

const char *di_test_backend_name(void) {
    return backend;
}

void di_test_register(di_test_group *group) {
    /* Constructors run in the order of linking; by name the order is the same everywhere. */
    di_test_group **at = &first_group;
    while (*at && strcmp((*at)->name, group->name) < 0) {
        at = &(*at)->next;
    }
    group->next = *at;
    *at = group;
}

static const char *make_path(const char *dir, const char *name) {
    static char paths[16][1024];
    static unsigned next;
    char *path = paths[next++ % 16];
    int n = snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof paths[0]) {
        fail_msg("path too long: %s/%s", dir, name);
    }
    return path;
}

const char *di_test_data(const char *name) {
    return make_path(DI_TEST_SOURCE_DIR "/tests/data", name);
}

const char *di_test_source(const char *name) {
    return make_path(DI_TEST_SOURCE_DIR, name);
}

static void remove_tree(const char *path) {
    DIR *dir = opendir(path);
    if (dir) {
        struct dirent *entry;
        while ((entry = readdir(dir))) {
            if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
                char child[1024];
                int n = snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
                if (n > 0 && (size_t)n < sizeof child) {
                    struct stat info;
                    if (lstat(child, &info) == 0 && S_ISDIR(info.st_mode)) {
                        remove_tree(child);
                    } else {
                        unlink(child);
                    }
                }
            }
        }
        closedir(dir);
    }
    rmdir(path);
}

static void remove_tmp_dir(void) {
    remove_tree(tmp_dir);
}

const char *di_test_tmp(const char *name) {
    if (!tmp_dir[0]) {
        const char *base = getenv("TMPDIR");
        int n = snprintf(tmp_dir, sizeof tmp_dir, "%s/deepinfer-test-XXXXXX", base && *base ? base : "/tmp");
        if (n < 0 || (size_t)n >= sizeof tmp_dir || !mkdtemp(tmp_dir)) {
            tmp_dir[0] = '\0';
            fail_msg("no folder for temporary files");
        }
        atexit(remove_tmp_dir);
    }
    return make_path(tmp_dir, name);
}

uint64_t di_test_random(uint64_t *rng) {
    uint64_t z = *rng += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int64_t di_test_random_range(uint64_t *rng, int64_t low, int64_t high) {
    uint64_t span = (uint64_t)high - (uint64_t)low + 1;
    uint64_t value = di_test_random(rng);
    return (int64_t)((uint64_t)low + (span ? value % span : value));
}

double di_test_random_unit(uint64_t *rng) {
    return (double)(di_test_random(rng) >> 11) * 0x1p-53;
}

static const char *running_property;
static uint64_t running_seed;

void di_test_property(const char *name, void (*body)(uint64_t seed), int n_runs) {
    if (runs_max > 0 && runs_max < n_runs) {
        n_runs = runs_max;
    }
    for (int i = 0; i < n_runs; i++) {
        running_property = name;
        running_seed = seed_start + (uint64_t)i;
        body(running_seed);
    }
    running_property = NULL;
}

void di_test_leave_property(void) {
    running_property = NULL;
}

bool di_test_is_sanitized(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    return true;
#else
    return false;
#endif
#else
    return false;
#endif
}

static bool is_picked(const char *name, bool is_long, char **picks, int n_picks) {
    if (n_picks == 0) {
        return (strncmp(name, "long_", 5) == 0) == is_long;
    }
    for (int i = 0; i < n_picks; i++) {
        if (strcmp(name, picks[i]) == 0) {
            return true;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    bool is_long = false;
    int n_picks = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--long") == 0) {
            is_long = true;
        } else if (strcmp(argv[i], "--list") == 0) {
            for (di_test_group *group = first_group; group; group = group->next) {
                printf("%s\n", group->name);
            }
            return 0;
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            seed_start = strtoull(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc) {
            runs_max = (int)strtol(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--backend") == 0 && i + 1 < argc) {
            backend = argv[++i];
        } else if (argv[i][0] == '-') {
            fprintf(stderr, "usage: %s [--long] [--list] [--seed N] [--runs N] [--backend NAME] [GROUP]...\n", argv[0]);
            return 2;
        } else {
            argv[1 + n_picks++] = argv[i];
        }
    }
    int n_run = 0, n_failed = 0;
    for (di_test_group *group = first_group; group; group = group->next) {
        if (!is_picked(group->name, is_long, argv + 1, n_picks)) {
            continue;
        }
        n_run++;
        n_failed += _cmocka_run_group_tests(group->name, group->tests, group->n_tests, NULL, NULL);
        if (running_property) {
            fprintf(stderr, "property '%s' failed: replay by %s --seed %llu --runs 1 %s\n", running_property, argv[0],
                    (unsigned long long)running_seed, group->name);
            running_property = NULL;
        }
    }
    if (n_run < n_picks) {
        fprintf(stderr, "%s: a group of that name does not exist, see --list\n", argv[0]);
        return 2;
    }
    return n_failed ? 1 : 0;
}
