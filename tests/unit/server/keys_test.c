/* API keys: reading, finding, limits of their own, reading again. */
#include "harness.h"

#include "server/server_internal.h"

static const char *write_file(const char *name, const char *text) {
    const char *path = di_test_tmp(name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
    return path;
}

static di_key *find(di_keys *keys, const char *secret) {
    return di_keys_find(keys, secret, strlen(secret));
}

static void keys_of_options_and_file_are_found(void **state) {
    (void)state;
    di_keys keys;
    di_error err = {0};
    const char *const given[] = {"alpha", "beta"};
    const char *path = write_file("keys", "# who may ask\n\ngamma name=carol requests=2 rate=6\n  delta  \r\n");
    di_keys_init(&keys, 7, 0);
    assert_false(di_keys_are_needed(&keys));
    di_test_ok(di_keys_load(&keys, given, 2, path, &err), &err);
    assert_true(di_keys_are_needed(&keys));
    di_key *key = find(&keys, "gamma");
    assert_non_null(key);
    assert_string_equal(key->name, "carol");
    assert_int_equal(key->requests_max, 2);
    assert_int_equal(key->rate_max, 6);
    di_key_release(key);
    key = find(&keys, "delta");
    assert_non_null(key);
    assert_string_equal(key->name, "key 4");
    assert_int_equal(key->requests_max, 7);
    di_key_release(key);
    static const char *const wrong[] = {"", "alph", "alphaa", "alphaalpha", "Alpha", "gamma name=carol", "#"};
    for (size_t i = 0; i < DI_COUNT(wrong); i++)
        assert_null(find(&keys, wrong[i]));
    di_keys_deinit(&keys);
}

static void bad_files_change_nothing_and_name_the_line(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"one\ntwo colour=red\n", "line 2"},
        {"one requests=-1\n", "requests=-1"},
        {"one rate=many\n", "rate=many"},
        {"one\n\none\n", "line 3"},
        {"# nobody\n", "no keys"},
        {"", "no keys"},
        {"one name=\n", "name="},
    };
    di_keys keys;
    di_error err = {0};
    const char *const given[] = {"alpha"};
    di_keys_init(&keys, 0, 0);
    di_test_ok(di_keys_load(&keys, given, 1, NULL, &err), &err);
    for (size_t i = 0; i < DI_COUNT(cases); i++) {
        const char *path = write_file("bad_keys", cases[i].text);
        assert_int_equal(di_keys_load(&keys, NULL, 0, path, &err), DI_ERR_FORMAT);
        assert_non_null(strstr(err.message, cases[i].says));
        di_key *key = find(&keys, "alpha");
        assert_non_null(key);
        di_key_release(key);
    }
    assert_int_equal(di_keys_load(&keys, NULL, 0, "/nowhere/keys", &err), DI_ERR_NOT_FOUND);
    di_keys_deinit(&keys);
}

static void requests_at_once_are_counted_by_key(void **state) {
    (void)state;
    const char *why, *const given[] = {"alpha", "beta"};
    int64_t retry_s = 0;
    di_keys keys;
    di_error err = {0};
    di_keys_init(&keys, 2, 0);
    di_test_ok(di_keys_load(&keys, given, 2, NULL, &err), &err);
    di_key *a = find(&keys, "alpha"), *b = find(&keys, "beta");
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    assert_false(di_key_enter(a, 1, &why, &retry_s));
    assert_true(retry_s >= 1);
    assert_true(di_key_enter(b, 1, &why, &retry_s));
    di_key_leave(a, 1);
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    di_key_release(a);
    di_key_release(b);
    di_keys_deinit(&keys);
}

/* A request of several samples counts as several; where there are other keys, one can't have all places. */
static void samples_count_and_leave_a_share_to_others(void **state) {
    (void)state;
    const char *why = "", *const given[] = {"alpha", "beta"};
    int64_t retry_s = 0;
    di_keys keys;
    di_error err = {0};
    di_keys_init(&keys, 5, 0);
    di_test_ok(di_keys_load(&keys, given, 2, NULL, &err), &err);
    di_key *a = find(&keys, "alpha");
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    assert_true(di_key_add(a, 4, 0, &why, &retry_s));
    assert_false(di_key_add(a, 1, 0, &why, &retry_s));
    assert_contains(why, "at once");
    di_key_leave(a, 5);
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    assert_false(di_key_add(a, 3, 3, &why, &retry_s));
    assert_contains(why, "share");
    assert_true(di_key_add(a, 2, 3, &why, &retry_s));
    di_key_release(a);
    di_keys_deinit(&keys);
}

static void rates_fill_again_with_time(void **state) {
    (void)state;
    const char *why, *const given[] = {"alpha"};
    int64_t retry_s = 0, second = 1000000000;
    di_keys keys;
    di_error err = {0};
    di_keys_init(&keys, 0, 6); /* one in ten seconds, six at first */
    di_test_ok(di_keys_load(&keys, given, 1, NULL, &err), &err);
    di_key *a = find(&keys, "alpha");
    for (int i = 0; i < 6; i++)
        assert_true(di_key_enter(a, 100 * second, &why, &retry_s));
    assert_false(di_key_enter(a, 101 * second, &why, &retry_s));
    assert_true(retry_s >= 9 && retry_s <= 10);
    assert_true(di_key_enter(a, 111 * second, &why, &retry_s));
    assert_false(di_key_enter(a, 112 * second, &why, &retry_s));
    for (int i = 0; i < 6; i++)
        assert_true(di_key_enter(a, 10000 * second, &why, &retry_s));
    assert_false(di_key_enter(a, 10000 * second, &why, &retry_s));
    di_key_release(a);
    di_keys_deinit(&keys);
}

static void reading_again_keeps_counts_of_keys_that_stay(void **state) {
    (void)state;
    const char *why;
    int64_t retry_s;
    di_keys keys;
    di_error err = {0};
    const char *first = write_file("first_keys", "alpha name=a requests=1\nbeta name=b\n"),
               *second = write_file("second_keys", "alpha name=a requests=2\ngamma name=c\n");
    di_keys_init(&keys, 0, 0);
    di_test_ok(di_keys_load(&keys, NULL, 0, first, &err), &err);
    di_key *a = find(&keys, "alpha"), *b = find(&keys, "beta");
    assert_true(di_key_enter(a, 1, &why, &retry_s));
    di_test_ok(di_keys_load(&keys, NULL, 0, second, &err), &err);
    assert_null(find(&keys, "beta"));
    assert_string_equal(b->name, "b"); /* who holds it still may */
    di_key *again = find(&keys, "alpha");
    assert_ptr_equal(a, again);
    assert_true(di_key_enter(again, 1, &why, &retry_s));
    assert_false(di_key_enter(again, 1, &why, &retry_s));
    di_key_release(a);
    di_key_release(again);
    di_key_release(b);
    di_keys_deinit(&keys);
}

DI_TEST_GROUP(keys, cmocka_unit_test(keys_of_options_and_file_are_found),
              cmocka_unit_test(bad_files_change_nothing_and_name_the_line),
              cmocka_unit_test(requests_at_once_are_counted_by_key),
              cmocka_unit_test(samples_count_and_leave_a_share_to_others), cmocka_unit_test(rates_fill_again_with_time),
              cmocka_unit_test(reading_again_keeps_counts_of_keys_that_stay))
