/* Test harness: cmocka with groups that register themselves, paths of test data, skips with a reason, properties.
 *
 * A test file is a set of functions and one DI_TEST_GROUP line; the harness brings main. A program of tests runs all
 * its groups but those named long_*, which `--long` runs instead; group names as arguments pick groups. */
#ifndef DI_TESTS_HARNESS_H
#define DI_TESTS_HARNESS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct di_test_group {
    const char *name;
    const struct CMUnitTest *tests;
    size_t n_tests;
    struct di_test_group *next;
} di_test_group;

void di_test_register(di_test_group *group);

/* Registers the tests of a file: DI_TEST_GROUP(arena, cmocka_unit_test(arena_reuses_blocks), ...) */
#define DI_TEST_GROUP(group_name, ...)                                                                                 \
    static const struct CMUnitTest group_name##_tests[] = {__VA_ARGS__};                                               \
    __attribute__((constructor)) static void group_name##_register(void) {                                             \
        static di_test_group group = {#group_name, group_name##_tests,                                                 \
                                      sizeof group_name##_tests / sizeof group_name##_tests[0], NULL};                 \
        di_test_register(&group);                                                                                      \
    }

/* Paths of a file under tests/data, of a file of the repository, and of a fresh name in a folder that is removed when
 * the program ends. The text lives until sixteen more paths were asked for. */
const char *di_test_data(const char *name);
const char *di_test_source(const char *name);
const char *di_test_tmp(const char *name);

/* Ends the test as skipped, with its reason on the screen. */
#define di_test_skip(...)                                                                                              \
    do {                                                                                                               \
        print_message("[  REASON  ] %s: ", __func__);                                                                  \
        print_message(__VA_ARGS__);                                                                                    \
        print_message("\n");                                                                                           \
        di_test_leave_property();                                                                                      \
        skip();                                                                                                        \
    } while (0)

/* A property: the body runs n_runs times with a seed of its own each. The first seed is fixed, so that two runs test
 * the same; `--seed N` starts elsewhere. A failing seed is printed and replayed by `--seed N --runs 1`.
 *     DI_PROPERTY(sum_commutes, 100) { uint64_t rng = seed; int a = (int)di_test_random(&rng); ... }
 *     DI_TEST_GROUP(sums, cmocka_unit_test(sum_commutes)); */
#define DI_PROPERTY(property_name, n_runs)                                                                             \
    static void property_name##_body(uint64_t seed);                                                                   \
    static void property_name(void **state) {                                                                          \
        (void)state;                                                                                                   \
        di_test_property(#property_name, property_name##_body, n_runs);                                                \
    }                                                                                                                  \
    static void property_name##_body(uint64_t seed)

void di_test_property(const char *name, void (*body)(uint64_t seed), int n_runs);
/* The property that runs, if one does, ends here without having failed: it is skipped. */
void di_test_leave_property(void);

/* Random numbers of a property: splitmix64; an integer of [low, high]; a double of [0, 1). */
uint64_t di_test_random(uint64_t *rng);
int64_t di_test_random_range(uint64_t *rng, int64_t low, int64_t high);
double di_test_random_unit(uint64_t *rng);

/* What --backend names, else "cpu"; accelerator.h finds it. */
const char *di_test_backend_name(void);

/* Whether this build runs under a sanitizer: a test of speed or of much arithmetic may do less then. */
bool di_test_is_sanitized(void);

/* Asserts that a di_status is DI_OK and prints the message of err otherwise. */
#define di_test_ok(call, err)                                                                                          \
    do {                                                                                                               \
        int di_test_status = (int)(call);                                                                              \
        if (di_test_status != 0) {                                                                                     \
            fail_msg("%s: status %d: %s", #call, di_test_status, (err)->message);                                      \
        }                                                                                                              \
    } while (0)

/* Asserts that text contains part. */
#define assert_contains(text, part)                                                                                    \
    do {                                                                                                               \
        if (!strstr((text), (part))) {                                                                                 \
            fail_msg("'%s' does not contain '%s'", (text), (part));                                                    \
        }                                                                                                              \
    } while (0)

#endif
