/* Arenas, checked sizes, string buffers and maps. */
#include "harness.h"

#include "base/base.h"

static void sizes_are_checked(void **state) {
    (void)state;
    size_t out = 5;
    assert_true(di_size_add(&out, 2, 3));
    assert_int_equal(out, 5);
    assert_true(di_size_mul(&out, 7, 6));
    assert_int_equal(out, 42);
    assert_true(di_size_mul3(&out, 2, 3, 7));
    assert_int_equal(out, 42);
    assert_false(di_size_add(&out, SIZE_MAX, 1));
    assert_false(di_size_mul(&out, SIZE_MAX / 2, 3));
    assert_false(di_size_mul3(&out, SIZE_MAX / 4, 2, 3));
    assert_int_equal(out, 42);
    assert_true(di_size_mul(&out, SIZE_MAX, 0));
    assert_int_equal(out, 0);
}

static void arena_aligns_and_separates(void **state) {
    (void)state;
    di_arena arena = {0};
    unsigned char *before = NULL;
    for (size_t n = 0; n < 300; n += 7) {
        unsigned char *p = di_arena_alloc(&arena, n);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        assert_ptr_not_equal(p, before);
        memset(p, 0xAB, n);
        before = p;
    }
    di_arena_deinit(&arena);
}

static void arena_reset_reuses_blocks(void **state) {
    (void)state;
    di_arena arena;
    di_arena_init(&arena, 4096);
    size_t total = 0;
    for (int round = 0; round < 5; round++) {
        /* Small, larger than a block, small again: the same order every round. */
        assert_non_null(di_arena_alloc(&arena, 3000));
        assert_non_null(di_arena_alloc(&arena, 3000));
        assert_non_null(di_arena_alloc(&arena, 50000));
        assert_non_null(di_arena_alloc(&arena, 100));
        if (round == 0) {
            total = arena.total_bytes;
        }
        assert_int_equal(arena.total_bytes, total);
        di_arena_reset(&arena);
    }
    di_arena_deinit(&arena);
    assert_null(arena.first);
    assert_int_equal(arena.total_bytes, 0);
    assert_non_null(di_arena_alloc(&arena, 1)); /* usable again */
    di_arena_deinit(&arena);
}

static void arena_calloc_zeroes_and_checks(void **state) {
    (void)state;
    di_arena arena = {0};
    memset(di_arena_alloc(&arena, 1000), 0xFF, 1000);
    di_arena_reset(&arena);
    const unsigned char *p = di_arena_calloc(&arena, 100, 10);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(p[i], 0);
    }
    assert_null(di_arena_calloc(&arena, SIZE_MAX / 2, 4));
    assert_null(di_arena_alloc(&arena, SIZE_MAX - 10));
    assert_null(di_arena_alloc(&arena, SIZE_MAX / 2)); /* more than any system gives */
    di_arena_deinit(&arena);
}

static void arena_strndup_copies(void **state) {
    (void)state;
    di_arena arena = {0};
    assert_string_equal(di_arena_strndup(&arena, "abcdef", 3), "abc");
    assert_string_equal(di_arena_strndup(&arena, NULL, 0), "");
    assert_memory_equal(di_arena_strndup(&arena, "a\0b", 3), "a\0b\0", 4);
    di_arena_deinit(&arena);
}

static void strbuf_appends(void **state) {
    (void)state;
    di_strbuf sb = {0};
    assert_string_equal(di_strbuf_str(&sb), "");
    di_strbuf_puts(&sb, "one");
    di_strbuf_putc(&sb, ' ');
    di_strbuf_printf(&sb, "%d-%s", 2, "three");
    assert_string_equal(sb.data, "one 2-three");
    assert_int_equal(sb.len, 11);
    di_strbuf_append(&sb, "a\0b", 3);
    assert_int_equal(sb.len, 14);
    assert_memory_equal(sb.data + 11, "a\0b\0", 4);
    di_strbuf_append(&sb, NULL, 0);
    assert_int_equal(sb.len, 14);
    assert_int_equal(di_strbuf_status(&sb, NULL), DI_OK);
    di_strbuf_reset(&sb);
    assert_string_equal(di_strbuf_str(&sb), "");
    assert_true(sb.cap > 0);
    di_strbuf_deinit(&sb);
    assert_null(sb.data);
}

static void strbuf_grows(void **state) {
    (void)state;
    di_strbuf sb = {0};
    for (int i = 0; i < 10000; i++) {
        di_strbuf_printf(&sb, "%04d", i);
    }
    assert_int_equal(sb.len, 40000);
    assert_memory_equal(sb.data + 4 * 1234, "1234", 4);
    assert_memory_equal(sb.data + 4 * 9999, "9999", 5);
    di_strbuf_deinit(&sb);
}

static void strbuf_truncates_and_removes(void **state) {
    (void)state;
    di_strbuf sb = {0};
    di_strbuf_truncate(&sb, 3);
    di_strbuf_remove(&sb, 0, 3);
    assert_string_equal(di_strbuf_str(&sb), "");
    di_strbuf_puts(&sb, "0123456789");
    di_strbuf_truncate(&sb, 20);
    assert_int_equal(sb.len, 10);
    di_strbuf_truncate(&sb, 8);
    assert_string_equal(sb.data, "01234567");
    di_strbuf_remove(&sb, 2, 3);
    assert_string_equal(sb.data, "01567");
    di_strbuf_remove(&sb, 3, 100);
    assert_string_equal(sb.data, "015");
    di_strbuf_remove(&sb, 3, 1);
    assert_string_equal(sb.data, "015");
    di_strbuf_deinit(&sb);
}

static void strbuf_failure_sticks(void **state) {
    (void)state;
    di_strbuf sb = {0};
    di_error err;
    di_strbuf_puts(&sb, "kept");
    di_strbuf_append(&sb, "x", SIZE_MAX / 2); /* refused before a byte is read */
    di_strbuf_puts(&sb, "lost");
    assert_string_equal(sb.data, "kept");
    assert_int_equal(di_strbuf_status(&sb, &err), DI_ERR_MEMORY);
    di_strbuf_reset(&sb);
    assert_int_equal(di_strbuf_status(&sb, &err), DI_OK);
    di_strbuf_deinit(&sb);
}

static void map_sets_and_gets(void **state) {
    (void)state;
    di_map map = {0};
    int64_t value = -1;
    bool was = true;
    assert_false(di_map_get(&map, "a", 1, &value));
    assert_int_equal(value, -1);
    assert_int_equal(di_map_set(&map, "a", 1, 10, &was, NULL), DI_OK);
    assert_false(was);
    assert_int_equal(di_map_set(&map, "", 0, 20, NULL, NULL), DI_OK);
    assert_int_equal(di_map_set(&map, "a\0", 2, 30, &was, NULL), DI_OK);
    assert_false(was);
    assert_int_equal(di_map_set(&map, "a", 1, 11, &was, NULL), DI_OK);
    assert_true(was);
    assert_true(di_map_get(&map, "a", 1, &value));
    assert_int_equal(value, 11);
    assert_true(di_map_get(&map, "", 0, &value));
    assert_int_equal(value, 20);
    assert_true(di_map_get(&map, "a\0", 2, &value));
    assert_int_equal(value, 30);
    assert_int_equal(map.n_entries, 3);
    di_map_deinit(&map);
}

static void map_holds_many(void **state) {
    (void)state;
    enum { N = 50000 };
    static char keys[N][8];
    di_map map = {0};
    assert_int_equal(di_map_reserve(&map, 100, NULL), DI_OK);
    for (int i = 0; i < N; i++) {
        snprintf(keys[i], sizeof keys[i], "%d", i);
        assert_int_equal(di_map_set(&map, keys[i], strlen(keys[i]), i, NULL, NULL), DI_OK);
    }
    assert_int_equal(map.n_entries, N);
    for (int i = 0; i < N; i++) {
        int64_t value;
        assert_true(di_map_get(&map, keys[i], strlen(keys[i]), &value));
        assert_int_equal(value, i);
    }
    int64_t value;
    assert_false(di_map_get(&map, "50000", 5, &value));
    di_error err;
    assert_int_equal(di_map_reserve(&map, SIZE_MAX / 2, &err), DI_ERR_MEMORY);
    assert_int_equal(map.n_entries, N);
    di_map_deinit(&map);
}

DI_TEST_GROUP(memory, cmocka_unit_test(sizes_are_checked), cmocka_unit_test(arena_aligns_and_separates),
              cmocka_unit_test(arena_reset_reuses_blocks), cmocka_unit_test(arena_calloc_zeroes_and_checks),
              cmocka_unit_test(arena_strndup_copies), cmocka_unit_test(strbuf_appends), cmocka_unit_test(strbuf_grows),
              cmocka_unit_test(strbuf_truncates_and_removes), cmocka_unit_test(strbuf_failure_sticks),
              cmocka_unit_test(map_sets_and_gets), cmocka_unit_test(map_holds_many))
