/* Status tables and messages: every code has its texts, context goes in front, cuts keep UTF-8 whole. */
#include "harness.h"

#include "base/base.h"

static void every_status_has_text_and_codes(void **state) {
    (void)state;
    for (int code = 0; code < DI_STATUS_COUNT; code++) {
        assert_non_null(di_status_text((di_status)code));
        assert_true(strlen(di_status_text((di_status)code)) > 0);
        assert_in_range(di_status_http((di_status)code), 200, 599);
        assert_in_range(di_status_exit((di_status)code), 0, 4);
    }
    assert_string_equal(di_status_text(DI_ERR_MEMORY), "out of memory");
    assert_int_equal(di_status_exit(DI_OK), 0);
    assert_int_equal(di_status_exit(DI_ERR_REQUEST), 1);
    assert_int_equal(di_status_exit(DI_ERR_ARG), 2);
    assert_int_equal(di_status_exit(DI_ERR_FORMAT), 3);
    assert_int_equal(di_status_exit(DI_ERR_DEVICE), 4);
    assert_int_equal(di_status_http(DI_ERR_NOT_FOUND), 404);
    assert_int_equal(di_status_http(DI_ERR_REQUEST), 400);
}

static void unknown_status_reads_as_internal(void **state) {
    (void)state;
    assert_string_equal(di_status_text((di_status)1000), di_status_text(DI_ERR_INTERNAL));
    assert_int_equal(di_status_exit((di_status)-1), 1);
}

static void fail_writes_message_and_returns_code(void **state) {
    (void)state;
    di_error err = {.code = DI_OK};
    assert_int_equal(di_fail(&err, DI_ERR_FORMAT, "'%s': %d", "a.json", 7), DI_ERR_FORMAT);
    assert_int_equal(err.code, DI_ERR_FORMAT);
    assert_string_equal(err.message, "'a.json': 7");
    assert_int_equal(di_fail(NULL, DI_ERR_IO, "x"), DI_ERR_IO);
}

static void fail_may_quote_its_own_message(void **state) {
    (void)state;
    di_error err;
    di_fail(&err, DI_ERR_IO, "inner");
    di_fail(&err, DI_ERR_FORMAT, "outer (%s)", err.message);
    assert_string_equal(err.message, "outer (inner)");
}

static void context_goes_in_front(void **state) {
    (void)state;
    di_error err;
    di_fail(&err, DI_ERR_IO, "short read");
    assert_int_equal(di_error_context(&err, DI_ERR_IO, "shard %d of %d", 2, 5), DI_ERR_IO);
    assert_string_equal(err.message, "shard 2 of 5: short read");
    assert_int_equal(di_error_context(&err, DI_OK, "unused"), DI_OK);
    assert_string_equal(err.message, "shard 2 of 5: short read");
    assert_int_equal(di_error_context(NULL, DI_ERR_IO, "x"), DI_ERR_IO);
}

static void long_messages_are_cut_between_characters(void **state) {
    (void)state;
    char text[1200];
    /* Sequences of 2, 3 and 4 bytes at every alignment to the end of the buffer. */
    static const char *const units[] = {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\xA6\x8A"};
    for (size_t u = 0; u < 3; u++) {
        for (size_t lead = 0; lead < 4; lead++) {
            size_t n = 0;
            memset(text, 'a', lead);
            n = lead;
            while (n + 4 < sizeof text) {
                memcpy(text + n, units[u], strlen(units[u]));
                n += strlen(units[u]);
            }
            text[n] = '\0';
            di_error err;
            di_fail(&err, DI_ERR_IO, "%s", text);
            assert_true(di_utf8_valid(err.message, strlen(err.message)));
            assert_true(strlen(err.message) >= sizeof err.message - 4);
            di_error_context(&err, DI_ERR_IO, "in front");
            assert_true(di_utf8_valid(err.message, strlen(err.message)));
            assert_contains(err.message, "in front: ");
        }
    }
}

DI_TEST_GROUP(error, cmocka_unit_test(every_status_has_text_and_codes),
              cmocka_unit_test(unknown_status_reads_as_internal),
              cmocka_unit_test(fail_writes_message_and_returns_code), cmocka_unit_test(fail_may_quote_its_own_message),
              cmocka_unit_test(context_goes_in_front), cmocka_unit_test(long_messages_are_cut_between_characters))
